"""The types of errors over HTTP, with their statuses, their meaning, and advice for clients.

``texts/errors.yaml`` is the only table. ``/docs/errors`` and the examples of ``/openapi.json`` are made from it. Every
error body links to the entry of its type with ``docs_url``. The hints of errors in process are in ``radixkv.errors``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import with_config

from radixkv.errors import RadixKVError
from radixkv.service.texts import load

DOCS_PATH = "/docs/errors"
"""The page that describes all types. Each type has an anchor of its name there."""


@with_config(extra="forbid")
@dataclass(frozen=True, slots=True)
class ErrorType:
    """One type of error.

    - ``statuses``: its HTTP statuses. Empty if it occurs only in the ``error`` of one replica's part of a job or a pin.
    - ``meaning``: the cause.
    - ``action``: the client's remedy.
    - ``example``: ``message``, ``field``, ``value`` and ``allowed`` of a typical error. A missing field is null.
    """

    type: str
    statuses: tuple[int, ...]
    meaning: str
    action: str
    example: Mapping[str, object] = field(default_factory=dict)

    def example_body(self) -> dict[str, dict[str, object]]:
        """Return a typical body of this type."""
        fields = {"type": self.type, "message": self.meaning, "field": None, "value": None, "allowed": None}
        return {"error": {**fields, **self.example, "docs_url": docs_url(self.type)}}


ERROR_TYPES: Mapping[str, ErrorType] = {each.type: each for each in load("errors", list[ErrorType])}
"""All types, by name, in the order of their statuses."""

_DOCS_URLS = {name: f"{DOCS_PATH}#{name}" for name in ERROR_TYPES}


def docs_url(type: str) -> str:
    """Return the path of a type's description on this service; that of the whole page for an unknown type. O(1)."""
    return _DOCS_URLS.get(type, DOCS_PATH)


def error_classes() -> Iterator[tuple[int, type[RadixKVError]]]:
    """Yield the errors of ``radixkv.errors`` as a tree: the depth of each, 0 for the base, and its class.

    What a class means is its docstring, and what to do is its ``hint``.
    """
    yield from _below(RadixKVError, 0)


def _below(error: type[RadixKVError], depth: int) -> Iterator[tuple[int, type[RadixKVError]]]:
    yield depth, error
    for each in error.__subclasses__():
        if each.__module__ == RadixKVError.__module__:
            yield from _below(each, depth + 1)
