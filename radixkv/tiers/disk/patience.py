"""For how long a request waits for the disk, and when the disk is left alone: hardly slower than computing.

A request waits at most for ``PATIENCE`` of the time that computing its tokens would take, at least ``LEAST_WAIT_S`` and
at most ``MOST_WAIT_S``. That time is the median of the last samples, so a few slow ones don't count. If the disk needs
longer, what has come is used, and the disk rests: no request asks it for ``REST_S`` seconds. Each further time in a row
doubles the rest, up to ``MOST_REST_S``.

Another bound, on the wait for a tenant's purges to be known, is ``pending.LEARNING_S``.

A record is worth its bytes if reading it takes less than computing its tokens. In the second rest in a row, and later
ones, no record is worth writing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

from radixkv.clock import Clock

PATIENCE: Final = 0.5
"""Share of the time that computing would take, for which a request waits for the disk."""
LEAST_WAIT_S: Final = 0.1
MOST_WAIT_S: Final = 2.0
REST_S: Final = 30.0
MOST_REST_S: Final = 960.0
FIRST_SECONDS_A_TOKEN: Final = 1e-4
"""Taken for the time to compute a token, before steps were measured."""
MOST_SECONDS_A_TOKEN: Final = 0.1
"""A sample above that is no measure of computing: something held it up."""
NUM_SAMPLES: Final = 15
MOST_STEPS: Final = 16
"""Steps that are measured at once. Of most of them nobody tells when they end, because they save nothing."""

_log = logging.getLogger(__name__)


class DiskPatience:
    """Waits and rests, for steps of at least ``block_size`` tokens that were measured."""

    def __init__(self, block_size: int, clock: Clock) -> None:
        self._size, self._clock = block_size, clock
        self._rests_until, self._rest_s = clock(), REST_S
        self._seconds_a_token = FIRST_SECONDS_A_TOKEN
        self._samples = deque([FIRST_SECONDS_A_TOKEN] * 2, maxlen=NUM_SAMPLES)
        self._computing: dict[int, tuple[float, int]] = {}
        self._num_timeouts = 0

    @property
    def is_resting(self) -> bool:
        """Whether no request asks the disk for a while, because it was slower than computing."""
        return self._clock() < self._rests_until

    @property
    def is_worthless(self) -> bool:
        """Whether nothing is worth writing to the disk: it rests, and not for the first time in a row."""
        return self.is_resting and self._rest_s > 2 * REST_S

    def patience_s(self, num_tokens: int) -> float:
        """Return for how long a request may wait for so many tokens."""
        return max(min(PATIENCE * self._seconds_a_token * num_tokens, MOST_WAIT_S), LEAST_WAIT_S)

    def rest(self) -> None:
        """Leave the disk alone for a while."""
        self._num_timeouts += 1
        self._rests_until = self._clock() + self._rest_s
        _log.warning("the disk is slower than computing: no request asks it for %g s", self._rest_s)
        self._rest_s = min(2 * self._rest_s, MOST_REST_S)

    def was_fast(self) -> None:
        """Take that a load came in time."""
        self._rest_s = REST_S

    def begin_step(self, step: int, num_tokens: int) -> None:
        """Take that a step begins, which computes so many tokens."""
        if num_tokens >= self._size:
            self._computing[step] = self._clock(), num_tokens
            if len(self._computing) > MOST_STEPS:
                del self._computing[next(iter(self._computing))]

    def computed(self, steps: Iterable[int]) -> None:
        """Take that these steps have ended: they tell how long computing takes."""
        for step in steps:
            began, num_tokens = self._computing.pop(step, (0.0, 0))
            if num_tokens:
                self.computed_in(self._clock() - began, num_tokens)
                self._computing = {later: each for later, each in self._computing.items() if later > step}

    def computed_in(self, seconds: float, num_tokens: int) -> None:
        """Take that so many tokens took so many seconds to compute."""
        if num_tokens >= self._size and 0 <= seconds <= MOST_SECONDS_A_TOKEN * num_tokens:
            self._samples.append(seconds / num_tokens)
            self._seconds_a_token = median(self._samples)

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        taken, self._num_timeouts = self._num_timeouts, 0
        return {"disk_timeouts": taken}
