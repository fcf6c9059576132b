"""RequestHints: what a caller may tell policies about a request. Opaque to the cache, which only passes it on.

Labels that policies know, all optional: ``session`` (who goes on), ``turn`` (its number, from 1), ``type`` (the
kind of request), ``session_over`` (nothing follows), ``tool_pending`` (the session goes on once a tool has
answered). A label that no policy knows is carried and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

Label = str | int | float | bool
"""The value of a label."""

DEFAULT_PRIORITY = 35
"""The priority of what was given none; TensorRT-LLM's."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens ``[start, stop)`` of a request, ``stop`` None for its end, with a priority of their own.

    ``priority``: 0 (goes first) to 100. ``duration_s``: how long it holds after the last use; None for ever.
    """

    start: int
    stop: int | None
    priority: int
    duration_s: float | None = None

    def __post_init__(self) -> None:
        is_start = isinstance(self.start, int) and self.start >= 0
        if not is_start or not (self.stop is None or (isinstance(self.stop, int) and self.start < self.stop)):
            raise ValueError(f"token range [{self.start}, {self.stop}) is not allowed: 0 ≤ start < stop")
        _check(self.priority, self.duration_s)


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What policies may use of a request.

    labels: see the module. priority: 0 (goes first) to 100 for all its blocks, None for the default.
    duration_s: how long that priority holds after the last use; None for ever. ranges: priorities of parts of the
    request; the last range that holds a token wins over those before it, and over ``priority``.
    Raises ValueError for a label of another type, and for a priority or duration out of range.
    """

    labels: Mapping[str, Label] = field(default_factory=dict)
    priority: int | None = None
    duration_s: float | None = None
    ranges: tuple[TokenRange, ...] = ()

    def __post_init__(self) -> None:
        _check(self.priority, self.duration_s)
        if not isinstance(self.ranges, tuple) or not all(
            isinstance(each, TokenRange) for each in self.ranges
        ):
            raise ValueError(f"ranges={self.ranges!r} is not allowed: a tuple of TokenRange")
        if not isinstance(self.labels, Mapping):
            raise ValueError(f"labels={self.labels!r} is not allowed: a mapping of labels by name")
        for name, label in self.labels.items():
            if not isinstance(name, str) or not isinstance(label, (str, int, float)):
                raise ValueError(
                    f"label {name!r}: {label!r} is not allowed: a string, a number or a boolean by name"
                )


def _check(priority: int | None, duration_s: float | None) -> None:
    if priority is not None and not (isinstance(priority, Real) and 0 <= priority <= 100):
        raise ValueError(f"priority={priority!r} is not allowed: 0 to 100")
    if duration_s is not None and not (isinstance(duration_s, Real) and duration_s > 0):
        raise ValueError(f"duration_s={duration_s!r} is not allowed: seconds > 0, or None for ever")
