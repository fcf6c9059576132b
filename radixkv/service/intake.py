"""Where a body is read: at once on the event loop, or in a process.

| body | read | why |
|---|---|---|
| up to INLINE_COST, and its tenant has loop time left | on the loop, a few milliseconds at most | nothing is faster |
| up to SHORT_COST | in the process for short bodies | so that it waits behind short ones only |
| longer | in the processes for long ones | anything up to a second and more |

A tenant has LOOP_SHARE of the loop's time for its bodies, LOOP_BURST_S at once. Beyond that its short bodies are read
in the process for them, so that no tenant takes the loop from others by many small requests.

Bodies longer than INLINE_COST are received a few at a time for each tenant (``admit``); the others wait unread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from radixkv.clock import Clock, monotonic
from radixkv.service.budgets import budget_of
from radixkv.service.prompts import PromptRules
from radixkv.service.reading import Reader, Reading, unpacked
from radixkv.service.reading_pool import ReadingPool, Specification
from radixkv.service.reading_process import name_of
from radixkv.service.schemas.base import RequestBody
from radixkv.tokenizer import Tokenizer

B = TypeVar("B", bound=RequestBody)

INLINE_COST = 8 * 1024
SHORT_COST = 32 * 1024
_OBJECT_COST = 100
"""Bytes that an object counts for: a message is validated and rendered, however short it is."""
LOOP_SHARE = 0.25
LOOP_BURST_S = 0.1
MAX_RECEIVING = 4
"""Bodies of a tenant, longer than INLINE_COST, that are received or wait to be read at a time."""
_SHORT_NICENESS, _LONG_NICENESS = 2, 15
"""So that the event loop gets a core at once, even where it shares one with the processes."""
_MAX_PROCESSES = 4


class Intake:
    """Reads bodies. To be used from one event loop; ``close`` it when done."""

    def __init__(
        self, tokenizer: Tokenizer, rules: PromptRules, path: str | None, clock: Clock = monotonic
    ) -> None:
        """``path``: where processes load the same tokenizer from, as ``load_tokenizer`` takes it."""
        self._reader = Reader(tokenizer, rules)
        specification = Specification(path, tokenizer.digest, rules)
        num_long = min(max((os.cpu_count() or 1) - 1, 1), _MAX_PROCESSES)
        self._short = ReadingPool(specification, 1, _SHORT_NICENESS)
        self._long = ReadingPool(specification, num_long, _LONG_NICENESS)
        self._loop_time = LoopTime(clock)
        self._receiving: dict[str, _Turns] = {}

    @property
    def most_inline(self) -> int:
        """Bytes of the longest body that may be read on the loop."""
        return INLINE_COST

    def max_bytes(self, model: type[RequestBody]) -> int | None:
        """The most bytes that a body of this schema may have, if that follows from it."""
        return budget_of(model, self._reader.rules.max_ids).max_bytes

    @property
    def num_waiting(self) -> int:
        """Bodies that wait for a process."""
        return self._short.num_waiting + self._long.num_waiting

    def start(self) -> None:
        """Start a process of each kind, so that the first body needn't wait for that."""
        for pool in (self._short, self._long):
            pool.processes[0].start()

    def close(self) -> None:
        """End the processes."""
        self._short.close()
        self._long.close()

    def read_now(self, lane: str, raw: bytes, model: type[B]) -> Reading[B] | None:
        """The reading, if the body may be read on the loop; None if not. Raises ApiError."""
        if cost_of(raw) > INLINE_COST or not self._loop_time.has_any(lane):
            return None
        began_at = time.thread_time()
        try:
            return self._reader.read(raw, model)
        finally:
            self._loop_time.spend(lane, time.thread_time() - began_at)

    async def read(self, lane: str, raw: bytes, model: type[B]) -> Reading[B]:
        """The reading, made in a process. Raises ApiError, Busy or Closed."""
        pool = self._short if cost_of(raw) <= SHORT_COST else self._long
        return unpacked(await pool.ask(lane, [name_of(model), raw]), model)

    @asynccontextmanager
    async def admit(self, lane: str) -> AsyncIterator[None]:
        """Wait until a long body of this tenant may be received; until the ``with`` ends it counts."""
        turns = self._receiving.setdefault(lane, _Turns())
        turns.num_users += 1
        try:
            async with turns.semaphore:
                yield
        finally:
            turns.num_users -= 1
            if not turns.num_users:
                del self._receiving[lane]


def cost_of(raw: bytes) -> int:
    """About what it costs to read a body: 0.5 µs each on one core. Cheap: long bodies aren't looked at."""
    return len(raw) if len(raw) > SHORT_COST else len(raw) + _OBJECT_COST * raw.count(b"{")


class _Turns:
    def __init__(self) -> None:
        self.semaphore, self.num_users = asyncio.Semaphore(MAX_RECEIVING), 0


class LoopTime:
    """What each lane may still use of the event loop's time: LOOP_SHARE of it, LOOP_BURST_S at once. O(1)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._debts: dict[str, tuple[float, float]] = {}

    def has_any(self, lane: str) -> bool:
        """Whether the lane has some left."""
        return self._debt(lane) < LOOP_BURST_S

    def spend(self, lane: str, seconds: float) -> None:
        """The lane has used so much."""
        self._debts[lane] = (self._debt(lane) + seconds, self._clock())
        if len(self._debts) > 1024:
            self._debts = {each: debt for each, debt in self._debts.items() if self._debt(each)}

    def _debt(self, lane: str) -> float:
        debt, since = self._debts.get(lane, (0.0, 0.0))
        return max(debt - LOOP_SHARE * (self._clock() - since), 0.0)
