"""What all bodies have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MAX_NAME = 256

UNKNOWN_FIELDS = "unknown_fields"
"""Type of the one error that stands for all unknown fields of an object."""


class RequestBody(BaseModel):
    """A body that a client sends: strict, without unknown names; null means left out.

    Unknown names are refused before anything else is validated, as one error, whatever their number.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    without_prompts: ClassVar[Mapping[str, object]] = {}
    """Fields that may be long and aren't needed once the prompts were read, and what stands there then."""

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = _names(cls)
        unknown = [name for name in data if name not in known]
        if unknown:
            found = {"name": unknown[0], "value": data[unknown[0]], "more": len(unknown) - 1}
            raise PydanticCustomError(UNKNOWN_FIELDS, "unknown field", found)
        return {name: value for name, value in data.items() if value is not None}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Names that a schema takes, aliases too."""
    names = set(model.model_fields)
    for field in model.model_fields.values():
        alias = field.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names.update(each for each in choices if isinstance(each, str))
    return frozenset(names)


def first_at_most(maximum: int) -> BeforeValidator:
    """A map's maximum, held before its values are validated: pydantic's own makes an error for each bad one first."""
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
