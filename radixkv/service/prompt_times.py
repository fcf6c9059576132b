"""The time that chat templates show, fixed for each request.

A template may print the date (``strftime_now``), so the ids of a conversation may change at midnight. A request is
rendered with one time, read once when its body is read, in the fleet's time zone. What was promised on a day keeps that
day: its conversations are also rendered with the days in ``Times.earlier``.

A template that doesn't ask for the time costs nothing of this: then there are no times at all (``NO_TIMES``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal
from zoneinfo import ZoneInfo

Day = Literal["today", "tomorrow"]
WallClock = Callable[[], float]
"""Returns the Unix time."""

wall_clock: WallClock = time.time
DATE_CHARS: Final = 10
"""Characters of a date in ISO 8601, with which a time begins."""


@dataclass(frozen=True, slots=True)
class Times:
    """The times with which one request is rendered.

    - ``now``: the local time in ISO 8601, without an offset; None if no template asks for it.
    - ``earlier``: dates with which a conversation is also rendered, because something was promised then.
    """

    now: str | None = None
    earlier: tuple[str, ...] = ()

    @property
    def date(self) -> str:
        """The present date; empty if no template asks for it."""
        return date_of(self.now)

    def on(self, date: str) -> str:
        """Return the present time of another date."""
        assert self.now is not None
        return date + self.now[DATE_CHARS:]

    def of(self, day: Day) -> Times:
        """Return the times of a prompt for today or for tomorrow."""
        if self.now is None or day == "today":
            return self
        return Times((datetime.fromisoformat(self.now) + timedelta(days=1)).isoformat())


NO_TIMES: Final = Times()


def date_of(at: str | None) -> str:
    """Return the date of a time in ISO 8601; empty without one."""
    return "" if at is None else at[:DATE_CHARS]


def local_time(zone: str | None, clock: WallClock) -> str:
    """Return the local time in ISO 8601, to the second. zone: its name in the IANA database; None: the machine's."""
    at = datetime.fromtimestamp(int(clock()), None if zone is None else ZoneInfo(zone))
    return at.replace(tzinfo=None).isoformat()
