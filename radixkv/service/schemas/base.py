"""The base classes of all bodies, and annotations of fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from radixkv.service.schemas.ignored import NOT_SUPPORTED, Drops, without_ignored

MAX_NAME = 256

UNKNOWN_FIELDS = "unknown_fields"
"""Type of the one error that reports all unknown fields of an object."""

TWO_VALUES = "two_values"
"""Type of the error of a field and its other name with different values."""


class RequestBody(BaseModel):
    """A body that a client sends: strict, without unknown fields. Null has the same meaning as leaving a field out.

    Unknown fields are refused before anything else is validated, as one error, whatever their number.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    without_prompts: ClassVar[Mapping[str, object]] = {}
    """Fields that may be long and aren't needed once the prompts were read, with the values that replace them."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """Fields that are other names of fields. A body may have both if their values are equal."""

    value_bytes: ClassVar[int | None] = None
    """A long body may have one JSON value for this many bytes. None: as many as its schema allows.

    With it, the fields in ``without_prompts`` may have lists and maps without a maximum."""

    removed: ClassVar[Mapping[str, str]] = {}
    """Fields of earlier versions, and what to use in their place. A body that has one is refused."""

    drops: ClassVar[Drops] = {}
    """Fields that change nothing and are dropped: see ``schemas.ignored``."""

    types: ClassVar[tuple[str, ...]] = ()
    """The values that ``type`` may have, if it is given. A body of another type gets an error about that alone."""

    def without_long(self) -> Self:
        """Return the body without what isn't needed once its prompts were read."""
        return self.model_copy(update=dict(self.without_prompts)) if self.without_prompts else self

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if cls.types and data.get("type") is not None and data["type"] not in cls.types:
            allowed = " or ".join(map(json.dumps, cls.types))
            found = {"name": "type", "value": data["type"], "allowed": allowed}
            raise PydanticCustomError(TWO_VALUES, "another type", found)
        data = without_ignored(data, cls.drops)
        for name, allowed in cls.removed.items():
            if data.get(name) is not None:
                found = {"name": name, "value": data[name], "allowed": allowed}
                raise PydanticCustomError(NOT_SUPPORTED, "not supported any more; allowed: {allowed}", found)
        known = _names(cls) | cls.removed.keys()
        unknown = [name for name in data if name not in known]
        if unknown:
            found = {"name": unknown[0], "value": data[unknown[0]], "more": len(unknown) - 1}
            raise PydanticCustomError(UNKNOWN_FIELDS, "unknown field", found)
        given = {name: value for name, value in data.items() if value is not None}
        for other, name in cls.other_names.items():
            if other in given and given.setdefault(name, given[other]) != given[other]:
                found = {
                    "name": other,
                    "value": given[other],
                    "allowed": f"the value of {name}, or one of the two",
                }
                raise PydanticCustomError(TWO_VALUES, "another value than {name}", found)
        return given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema of the fields, with those that are dropped."""
        found = handler(schema)
        own = handler.resolve_ref_schema(found)
        own["properties"] = {
            **own.get("properties", {}),
            **{name: each.schema() for name, each in cls.drops.items()},
        }
        return found


class Neutral:
    """The annotation of a field that would change the output and isn't supported: ``Annotated[Any, Neutral(0)]``.

    Allows the values that change nothing, null included. So clients that always send the field are served.
    """

    def __init__(self, *values: str | float | bool | dict[str, str] | list[str]) -> None:
        self.values = list(values)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Any value, then the check."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The neutral values."""
        return {
            "enum": [*self.values, None],
            "description": "not supported; allowed: values that change nothing",
        }

    def _checked(self, value: Any) -> Any:
        for each in self.values:  # 0 and 0.0 are one number, but False is none
            if value == each and isinstance(value, bool) == isinstance(each, bool):
                return value
        words = " or ".join([*map(json.dumps, self.values), "left out"])
        raise PydanticCustomError(NOT_SUPPORTED, "not supported", {"allowed": words})


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names that a schema allows, aliases included."""
    names = set(model.model_fields)
    for field in model.model_fields.values():
        alias = field.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names.update(each for each in choices if isinstance(each, str))
    return frozenset(names)


def first_at_most(maximum: int) -> BeforeValidator:
    """Check the size of a map before its values are validated. pydantic's own check first makes an error for each."""
    return BeforeValidator(_at_most(maximum))


def _at_most(maximum: int) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > maximum:
            message = "Dictionary should have at most {maximum} items, not {found}"
            raise PydanticCustomError("too_long", message, {"maximum": maximum, "found": len(value)})
        return value

    return checked


Seconds = Annotated[float, AfterValidator(lambda seconds: round(seconds, 6))]


class ReplyBody(BaseModel):
    """A body that the service sends."""

    model_config = ConfigDict(frozen=True)
