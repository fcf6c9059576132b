"""Chooses where a body is read: at once on the event loop, or in a process.

| body | read | why |
|---|---|---|
| up to INLINE_COST, and its tenant has loop time left | on the loop, a few milliseconds at most | nothing is faster |
| up to SHORT_COST | in the process for short bodies | it waits behind short bodies only |
| longer | in the processes for long bodies | it may take a second and more |

A conversation that a model's template renders is never read on the loop: a template is a program.

A tenant may use LOOP_SHARE of the loop's time for its bodies, and LOOP_BURST_S at once. Beyond that, the process for
short bodies reads its short bodies. So no tenant takes the loop from others by many small requests.

A tenant's bodies over INLINE_COST have at most RECEIVING_BYTES together, from reception until they are read. Further
bodies wait, not received (``admit``). They are received at RECEIVING_RATE at most (``pace``), because receiving uses
the loop's time too.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from radixkv.clock import Clock, monotonic
from radixkv.service.budgets import budget_of
from radixkv.service.prompt_times import NO_TIMES, Times, WallClock, date_of, local_time, wall_clock
from radixkv.service.prompts import PromptRules
from radixkv.service.reading import Reader, Reading, asked, unpacked
from radixkv.service.reading_pool import ReadingPool, Specification
from radixkv.service.schemas.base import RequestBody
from radixkv.service.turns import Allowance
from radixkv.tokenizer import Tokenizer
from radixkv.tokenizer.base import BaseTokenizer
from radixkv.tokenizer.chat import NotRendered

B = TypeVar("B", bound=RequestBody)

INLINE_COST = 8 * 1024
SHORT_COST = 32 * 1024
_OBJECT_COST = 100
"""The cost of an object in bytes: each message is validated and rendered, however short it is."""
LOOP_SHARE = 0.25
LOOP_BURST_S = 0.1
RECEIVING_BYTES = 32 * 2**20
RECEIVING_RATE = 64 * 2**20
RECEIVING_BURST = 2**20
_SHORT_NICENESS, _LONG_NICENESS = 2, 15
"""Niceness of the processes, so that the event loop gets a core at once, even if they share one."""
_MAX_PROCESSES = 4


class Intake:
    """Reads bodies. To be used from one event loop; ``close`` it when done."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: PromptRules,
        path: str | None,
        clock: Clock = monotonic,
        wall: WallClock = wall_clock,
    ) -> None:
        """``path``: the path from which processes load the same tokenizer, as ``load_tokenizer`` takes it.

        ``wall``: the clock whose time templates show.
        """
        self.wall, self._uses_clock = wall, tokenizer.uses_clock
        self.rule_uses = {each.name: 0 for each in rules.lines}
        """How many prompts each rule for lines has changed, by its name."""
        unblocked = tokenizer.without_blocking() if isinstance(tokenizer, BaseTokenizer) else tokenizer
        self._reader = Reader(unblocked, rules)
        specification = Specification(path, tokenizer.digest, rules)
        num_long = min(max((os.cpu_count() or 1) - 1, 1), _MAX_PROCESSES)
        self._short = ReadingPool(specification, 1, _SHORT_NICENESS)
        self._long = ReadingPool(specification, num_long, _LONG_NICENESS)
        self._loop_time = Allowance(clock, LOOP_SHARE, LOOP_BURST_S)
        self._received = Allowance(clock, RECEIVING_RATE, RECEIVING_BURST)
        self._rooms: dict[str, _Room] = {}

    @property
    def most_inline(self) -> int:
        """Bytes of the longest body that may be read on the loop."""
        return INLINE_COST

    def max_bytes(self, model: type[RequestBody]) -> int | None:
        """Return the most bytes that a body of this schema may have, if the schema bounds them."""
        return budget_of(model, self._reader.rules.max_ids).max_bytes

    @property
    def num_waiting(self) -> int:
        """Number of bodies that wait for a process."""
        return self._short.num_waiting + self._long.num_waiting

    def start(self) -> None:
        """Start a process of each kind, so that the first body doesn't wait for it."""
        for pool in (self._short, self._long):
            pool.processes[0].start()

    def close(self) -> None:
        """End the processes."""
        self._short.close()
        self._long.close()

    def times(self, earlier: Callable[[str], tuple[str, ...]]) -> Times:
        """Return the times for one request, once. ``earlier``: returns the dates before a date to render with too.

        A tokenizer that doesn't ask for the time gets none.
        """
        if not self._uses_clock:
            return NO_TIMES
        now = local_time(self._reader.rules.time_zone, self.wall)
        return Times(now, earlier(date_of(now)))

    def read_now(self, lane: str, raw: bytes, model: type[B], times: Times = NO_TIMES) -> Reading[B] | None:
        """Read the body if it may be read on the loop; otherwise return None. Raises ApiError."""
        if cost_of(raw) > INLINE_COST or self._loop_time.wait_s(lane):
            return None
        began_at = time.thread_time()
        try:
            return self._counted(self._reader.read(raw, model, times))
        except NotRendered:
            return None
        finally:
            self._loop_time.spend(lane, time.thread_time() - began_at)

    async def read(self, lane: str, raw: bytes, model: type[B], times: Times = NO_TIMES) -> Reading[B]:
        """Read the body in a process. Raises ApiError, Busy or Closed."""
        pool = self._short if cost_of(raw) <= SHORT_COST else self._long
        return self._counted(unpacked(await pool.ask(lane, asked(raw, model, times)), model))

    def _counted(self, reading: Reading[B]) -> Reading[B]:
        for prompt in reading.prompts:
            for name in prompt.rules:
                self.rule_uses[name] += 1
        return reading

    @asynccontextmanager
    async def admit(self, lane: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait until a body of this size may be received; it counts until the ``with`` ends."""
        room = self._rooms.setdefault(lane, _Room())
        room.num_users += 1
        try:
            async with room.taken(min(num_bytes, RECEIVING_BYTES)):
                yield
        finally:
            room.num_users -= 1
            if not room.num_users:
                del self._rooms[lane]

    async def pace(self, lane: str, num_bytes: int) -> None:
        """Wait before receiving more, after ``num_bytes`` were received."""
        self._received.spend(lane, num_bytes)
        if wait_s := self._received.wait_s(lane):
            await asyncio.sleep(wait_s)


def cost_of(raw: bytes) -> int:
    """Return the approximate cost of reading a body, in units of 0.5 µs on one core.

    Cheap: doesn't scan long bodies.
    """
    return len(raw) if len(raw) > SHORT_COST else len(raw) + _OBJECT_COST * raw.count(b"{")


class _Room:
    """The bytes of a lane's bodies, first come, first served."""

    def __init__(self) -> None:
        self.num_users = 0
        self._left = RECEIVING_BYTES
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Wait until ``size`` bytes are free, and take them until the ``with`` ends."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._left += size
            self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._left):
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._left -= size
                turn.set_result(None)
