"""What ``/openapi.json`` says beside its schemas: tags, examples, parameters and the types of errors.

``texts/operations.yaml`` has it, and says what holds for the examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, with_config

from radixkv.service.texts import load


def _flat(names: list[Any]) -> list[Any]:
    """Return names in one list. Some of them are in lists, which several operations share."""
    return [name for each in names for name in (each if isinstance(each, list) else [each])]


@dataclass(frozen=True, slots=True)
class Example:
    """A request body, and the status of its answer."""

    summary: str
    status: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """The tag of an operation, its request examples, an example of each kind of answer, and its types of errors."""

    tag: str
    requests: tuple[Example, ...] = ()
    replies: Mapping[int, Any] = field(default_factory=dict)
    errors: Annotated[tuple[str, ...], BeforeValidator(_flat)] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """An example of a parameter, and its schema. ``at``: other schemas, by path.

    ``about``: what it is in a path. In a query and a header the endpoint says it.
    """

    example: str | int
    about: str | None = None
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    at: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@with_config(extra="forbid")
@dataclass(frozen=True, slots=True)
class _Texts:
    description: str
    tags: Mapping[str, str]
    statuses: Mapping[int, str]
    parameters: Mapping[str, Parameter]
    operations: Mapping[str, Operation]


_TEXTS = load("operations", _Texts)

DESCRIPTION = _TEXTS.description
TAGS = _TEXTS.tags
"""Groups of operations, in the order in which they are shown."""
STATUSES = _TEXTS.statuses
"""What each status means."""
PARAMETERS = _TEXTS.parameters
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    (method, path): each
    for name, each in _TEXTS.operations.items()
    for method, _, path in [name.partition(" ")]
}
"""By method and path, in the order in which the request examples are sent."""
