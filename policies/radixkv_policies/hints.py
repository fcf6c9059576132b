"""RequestHints: optional information about a request for policies. The cache only passes it on.

Policies know these labels. All are optional:

- ``session``: the conversation.
- ``turn``: its number, from 1.
- ``type``: the kind of request.
- ``session_over``: no request follows.
- ``tool_pending``: the session continues after a tool's answer.
- ``expected_gap_s``: seconds until the session's next request, as expected.

Other labels are ignored.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

Label = str | int | float | bool
"""The value of a label."""

MAX_DURATION_S = 1e12
"""The maximum of a priority's duration in seconds, if it ends at all."""

DEFAULT_PRIORITY = 35
"""The priority without a hint, as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A priority for tokens ``[start, stop)`` of a request. ``stop`` None means the request's end.

    priority: 0 (evicted first) to 100. duration_s: seconds for which it lasts after the last use; None for ever.
    """

    start: int
    stop: int | None
    priority: int
    duration_s: float | None = None

    def __post_init__(self) -> None:
        start, stop = self.start, self.stop
        if not (_is_int(start) and start >= 0 and (stop is None or (_is_int(stop) and start < stop))):
            raise ValueError(
                f"token range [{start!r}, {stop!r}) is not allowed; allowed: 0 ≤ start < stop, integers"
            )
        _check_priority(self.priority)
        _check_duration(self.duration_s)


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Information about a request that policies may use.

    - labels: see the module.
    - priority: 0 (evicted first) to 100 for all its blocks, None for the default.
    - duration_s: seconds for which that priority lasts after the last use; None for ever.
    - ranges: priorities of parts of the request. For each token, the last range that contains it takes precedence
      over earlier ones and over ``priority``.

    Raises ValueError for a label of another type, for a priority or duration out of range, and for an invalid range.
    """

    labels: Mapping[str, Label] = field(default_factory=dict)
    priority: int | None = None
    duration_s: float | None = None
    ranges: tuple[TokenRange, ...] = ()

    def __post_init__(self) -> None:
        if self.priority is not None:
            _check_priority(self.priority)
        _check_duration(self.duration_s)
        labels: object = self.labels
        if not isinstance(labels, Mapping):
            raise ValueError(f"labels={labels!r} is not allowed; allowed: a mapping of names to values")
        for name, label in labels.items():
            if not isinstance(name, str) or not isinstance(label, (str, int, float)):
                raise ValueError(
                    f"label {name!r}: {label!r} is not allowed; allowed: a string, a number or a boolean by name"
                )
        ranges: object = self.ranges
        if not isinstance(ranges, tuple) or not all(isinstance(each, TokenRange) for each in ranges):
            raise ValueError(f"ranges={ranges!r} is not allowed; allowed: a tuple of TokenRange")

    @property
    def pause_s(self) -> float | None:
        """Seconds until the session's next request, by its labels; None if they don't say that."""
        gap_s = self.labels.get("expected_gap_s")
        if isinstance(gap_s, bool) or not isinstance(gap_s, (int, float)) or not 0 < gap_s < inf:
            return None
        return None if self.labels.get("session_over") else float(min(gap_s, MAX_DURATION_S))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_priority(priority: object) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= 100:
        raise ValueError(f"priority={priority!r} is not allowed; allowed: 0 to 100, an integer")


def _check_duration(duration_s: object) -> None:
    if duration_s is None:
        return
    if (
        isinstance(duration_s, bool)
        or not isinstance(duration_s, (int, float))
        or not (0 < duration_s <= MAX_DURATION_S or duration_s == inf)
    ):
        allowed = f"seconds > 0, at most {MAX_DURATION_S:.0e}, or None for no end"
        raise ValueError(f"duration_s={reprlib.repr(duration_s)} is not allowed; allowed: {allowed}")
