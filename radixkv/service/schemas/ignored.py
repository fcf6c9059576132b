"""What requests may say that changes nothing in what is generated here: one table for the APIs of all providers.

Clients send many fields that only concern the provider's own servers: who the end user is, what is stored, how much is
told of a stream. Such a field is accepted and dropped, so that the client works. A field that *would* change the answer
is accepted with the values that ask for what this service does anyway. Every other value is refused by name, with the
reason: nothing that a client asks for is dropped in silence.

The table is ``texts/ignored.yaml``. A schema names its part of it in ``drops``. ``RequestBody`` checks and drops these
fields before it looks at the others, and shows them in the JSON schema. The documentation lists the table
(``docs/_generate.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, with_config
from pydantic_core import PydanticCustomError

from radixkv.service.texts import load

NOT_SUPPORTED: Final = "not_supported"
"""Type of the error of a value that isn't supported. Its context has ``allowed``, and for a field of this table also
``name``, ``value`` and ``reason``."""


def refusal(name: str, value: Any, allowed: str, reason: str) -> PydanticCustomError:
    """Return the error of a value that isn't supported, in the object that is being checked."""
    found = {"name": name, "value": value, "allowed": allowed, "reason": reason}
    return PydanticCustomError(NOT_SUPPORTED, "not supported", found)


@with_config(extra="forbid")
@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that is dropped.

    - ``about``: why nothing depends on it, or why only these values are accepted.
    - ``values``: the accepted values; None: any value.
    - ``names``: the names of an object, each with its own entry. The object may have no others.
    - ``many``: the value is a list of such values.
    """

    about: str
    values: tuple[Any, ...] | None = None
    names: Mapping[str, Entry] = field(default_factory=dict)
    many: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise PydanticCustomError unless the value changes nothing. O(size of the value)."""
        if value is None:
            return
        if self.many:
            if not isinstance(value, list):
                raise self._refusal(name, value)
            for index, each in enumerate(value):
                self._check_one(f"{name}[{index}]", each)
        else:
            self._check_one(name, value)

    def _check_one(self, name: str, value: Any) -> None:
        if not self.names:
            if self.values is not None and not any(_is_same(value, each) for each in self.values):
                raise self._refusal(name, value)
            return
        if not isinstance(value, dict):
            raise self._refusal(name, value)
        for inner, given in value.items():
            entry = self.names.get(inner) or self.names.get(_camel(inner))
            if entry is None:
                raise self._refusal(f"{name}.{inner}", given)
            entry.check(f"{name}.{inner}", given)

    def _refusal(self, name: str, value: Any) -> PydanticCustomError:
        return refusal(name, value, self.allowed, self.about)

    @property
    def allowed(self) -> str:
        """The accepted values in words."""
        if self.names:
            words = f"an object with {', '.join(self.names)}"
        elif self.values is None:
            words = "any value"
        else:
            words = " or ".join(map(json.dumps, self.values))
        if self.many:
            words = f"a list of {words}" if words else "[]"
        return f"{words} or left out" if words else "left out"

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the field."""
        described = {"description": self.about}
        if self.names:
            inner = {name: entry.schema() for name, entry in self.names.items()}
            one: dict[str, Any] = {"type": "object", "properties": inner, "additionalProperties": False}
        elif self.values is None:
            return described
        else:
            one = {"enum": list(self.values)}
        if self.many:
            one = {"type": "array", "items": one, "maxItems": MAX_ITEMS if self.values != () else 0}
        return (
            {"anyOf": [one, {"type": "null"}], **described}
            if one != {"enum": []}
            else {"type": "null", **described}
        )


Entry = Annotated[Ignored, BeforeValidator(lambda told: {"about": told} if isinstance(told, str) else told)]
"""An entry of the file. One that is only a text accepts any value."""

Drops = Mapping[str, Ignored]
"""The fields of an object that are dropped, by name."""

MAX_ITEMS: Final = 64
"""Items that the JSON schema says of a list. No body is refused for it."""


def _is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 0 and 0.0 are, but false is no number."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _camel(name: str) -> str:
    return re.sub("_([a-z])", lambda letter: letter[1].upper(), name)


def without_ignored(data: dict[str, Any], drops: Drops) -> dict[str, Any]:
    """Return an object without these fields. Raises PydanticCustomError for a value that would change the answer."""
    kept = {}
    for name, value in data.items():
        entry = drops.get(name)
        if entry is None:
            kept[name] = value
        else:
            entry.check(name, value)
    return kept


TABLE: Final[Mapping[str, Mapping[str, Drops]]] = load("ignored", dict[str, dict[str, dict[str, Entry]]])
"""The whole table, by API and by place in a body. The place of the body itself is empty."""

CHAT: Final = TABLE["/v1/chat/completions"][""]
COMPLETIONS: Final = TABLE["/v1/completions"][""]
RESPONSES: Final = TABLE["/v1/responses"][""]
MESSAGES: Final = TABLE["/v1/messages"][""]
CONTENTS: Final = TABLE[":generateContent"][""]


def rows(drops: Drops, place: str) -> Iterator[tuple[str, str, str]]:
    """Yield the path, the accepted values and the reason of each entry, for the documentation."""
    for name, entry in drops.items():
        path = f"{place}.{name}" if place else name
        if entry.names:
            yield from rows(entry.names, f"{path}[]" if entry.many else path)
        else:
            yield path, entry.allowed.removesuffix(" or left out"), entry.about
