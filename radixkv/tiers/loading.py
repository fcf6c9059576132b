"""The way back of one sequence's KV from the tiers below: what ``Sequence.loading`` returns.

    tokens   [committed | claimed │ not begun │ on their way │ loaded ranges …│ the rest]
                         engine ▶            ◀ disk, from the back

Host memory is fast, so its part is copied by the first call. The disk's records behind it are read from the back, in
threads of the tier, while the engine computes from the front. Where they meet, nothing is left to do.

- A block is written only behind everything that the engine has claimed or committed. ``Target.put`` decides that under
  the cache's lock, so a late record of a claimed block is dropped.
- A loaded range is committed as soon as the committed tokens reach it, and never before.
- A record that fails leaves a gap, which the engine computes.
- A load that nobody claims from ends after ``patience_s``. If a record was slow, the disk rests.
- One whose tenant's purges the folder doesn't know waits for them ``LEARNING_S`` at most, then goes without the disk.
  So do the tenant's later ones, at once, until they are known.
- One that nobody polls either gives its staging memory back ``IDLE_S`` seconds later, or ``COMPUTING_S`` while claimed
  tokens aren't committed. So does one whose sequence has committed all of it.
- The tiers' gate is open to others between parts of a copy from host memory. Each part is written only if the load and
  its mark still hold.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final, Protocol, SupportsIndex

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.forks import OwnLock
from radixkv.index.below import Target
from radixkv.index.validation import require_between, require_seconds
from radixkv.tiers.gate import Gate
from radixkv.tiers.record_reader import Flight, RecordReader, Where
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.storage.plan import BlockIds

POLL_S: Final = 0.001
MAX_FLIGHTS: Final = 64
"""Records of one load that are on their way at once."""

IDLE_S: Final = 2.0
COMPUTING_S: Final = 10.0

Ranges = list[tuple[int, int]]
"""Ranges of blocks, disjoint and in order."""


class Source(Protocol):
    """Where a load takes KV from: the tiers of a cache."""

    gate: Gate
    reader: RecordReader | None
    """Of the disk, if there is one."""

    def is_current(self, mark: int, tenant: str) -> bool:
        """Whether nothing of a tenant was purged, cleared or found wrong since the mark."""

    def safely(self, call: Callable[[], None]) -> bool:
        """Call it, and return whether it raised no error. An error is logged."""

    def load_from_host(self, namespace: Namespace, key: bytes, start: int, put: Put) -> None:
        """Put what host memory has of a key from block ``start`` on, in parts, until one is refused."""

    def row_copy(self, row: int) -> Callable[[BlockIds], None]:
        """Return a function that copies a row of staging memory into a block."""


class Put(Protocol):
    """Writes a range of blocks by a function of their ids, unless that isn't right any more."""

    def __call__(self, start: int, stop: int, copy: Callable[[BlockIds], None]) -> bool:
        """Return whether it did."""


class TierLoading:
    """See ``Loading``. ``mark``: of the target's tenant. ``host_stop``: the block where host memory's part ends.

    Everything but ``num_tokens``, ``num_loaded_tokens`` and ``is_done`` takes the tiers' gate. ``poll`` and ``claim``
    go one after the other, also where the gate is open.
    """

    def __init__(
        self, source: Source, target: Target, mark: int, host_stop: int, block_size: int, clock: Clock
    ) -> None:
        self._source, self._target, self._mark = source, target, mark
        self._host_stop, self._size, self._clock = host_stop, block_size, clock
        self._began_at = target.num_committed
        self._claimed = self._began_at
        self._claimed_at: float | None = None
        self._measured = self._began_at
        self._ranges: Ranges = []
        """Loaded blocks that aren't committed."""
        self._num_loaded = self._num_kept = self._num_from_disk = 0
        self._has_host, self.is_done = host_stop * block_size <= self._began_at, False
        self._place: Namespace | None = None
        self._stop = self._next = host_stop  # the end of what lies below, and of what was not begun
        self._flights: list[Flight] = []
        self._ends_at = self._found_at = self._polled_at = clock()
        self._polling = OwnLock()
        if source.reader is None:
            return
        self._ends_at += source.reader.disk.patience.patience_s(0)
        weakref.finalize(self, source.reader.dropped.append, self._flights).atexit = False

    def __repr__(self) -> str:
        standing = "done" if self.is_done else "loading"
        return f"<Loading, {standing}: {self.num_loaded_tokens} of {self.num_tokens} tokens>"

    @property
    def num_tokens(self) -> int:
        """See ``Loading``."""
        return max(self._stop * self._size - self._began_at, 0)

    @property
    def num_host_tokens(self) -> int:
        """See ``Loading``."""
        return max(self._host_stop * self._size - self._began_at, 0)

    @property
    def num_loaded_tokens(self) -> int:
        """See ``Loading``."""
        return self._num_loaded * self._size

    def poll(self) -> bool:
        """See ``Loading``."""
        with self._polling, self._source.gate:
            self._advance()
        self._keep()
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> bool:
        """See ``Loading``."""
        ends_at = None if timeout_s is None else time.monotonic() + require_seconds("timeout_s", timeout_s)
        while not self.poll() and (ends_at is None or time.monotonic() < ends_at):
            time.sleep(POLL_S)
        return self.is_done

    def __await__(self) -> Generator[Any, Any, int]:
        """See ``Loading``."""
        return self._waited().__await__()

    async def _waited(self) -> int:
        while not await asyncio.to_thread(self.poll):
            await asyncio.sleep(POLL_S)
        return self.num_loaded_tokens

    def claim(self, num_tokens: SupportsIndex) -> int:
        """See ``Loading``."""
        num_tokens = require_between("num_tokens", num_tokens, 1, None)
        with self._polling, self._source.gate:
            self._measure()
            self._advance()
            committed = self._target.num_committed
            stop = min(committed + num_tokens, self._target.num_tokens)
            for start, _ in self._ranges:
                if start * self._size > committed:
                    stop = min(stop, start * self._size)
                    break
            self._claimed = max(self._claimed, stop)
            self._claimed_at = self._clock()
            self._drop_claimed()
        self._keep()
        return stop

    def cancel(self) -> None:
        """See ``Loading``."""
        with self._source.gate:
            self.end()

    def begin(self) -> bool:
        """Begin. Returns False if there is nothing below, as far as is known. Within the gate."""
        reader = self._source.reader
        if reader is not None and self._find(reader):
            self._take_records(reader)
        is_searching = reader is not None and self._place is None and not self.is_done
        self.is_done = False
        return self.num_tokens > 0 or is_searching

    def end(self) -> None:
        """Load nothing more. Within the gate."""
        self.is_done = True
        while self._flights:
            flight = self._flights.pop()
            assert self._source.reader is not None
            self._source.reader.end(flight)

    def sweep(self) -> None:
        """End it if its sequence or its tiers don't go on, or nobody wants it. Within the gate; from time to time."""
        if not self._is_current() or self._is_idle():
            self.end()
        self._drop_claimed()

    def _is_idle(self) -> bool:
        """Whether nobody has polled or claimed for a while, though its time is over."""
        is_computing = self._claimed > self._target.num_committed
        idle_at = self._polled_at + (COMPUTING_S if is_computing else IDLE_S)
        return self._clock() >= max(self._ends_at, idle_at)

    # --- inside, within the gate

    def _advance(self) -> None:
        """Bring what is there, and commit what continues the committed tokens."""
        if not self._target.is_current:
            self._ranges = []
        self._polled_at = self._clock()
        is_good = self.is_done or not self._is_current() or self._source.safely(self._take)
        if not is_good or not self._is_current():
            self.end()
        self._settle()

    def _is_current(self) -> bool:
        target = self._target
        return target.is_current and self._source.is_current(self._mark, target.namespace.tenant)

    @property
    def _front(self) -> int:
        """The first block that the engine has neither claimed nor committed."""
        return -(-max(self._claimed, self._target.num_committed) // self._size)

    def _take(self) -> None:
        target = self._target
        if not self._has_host:
            self._has_host = True
            self._source.load_from_host(target.namespace, target.key, self._front, self._put)
            if self.is_done:  # cancelled meanwhile
                return
        reader = self._source.reader
        if reader is None:
            self.is_done = True
        elif self._find(reader):
            self._take_records(reader)
        if reader is not None and not self.is_done and self._clock() >= self._ends_at:
            self._run_out(reader)

    def _run_out(self, reader: RecordReader) -> None:
        """End it, unless its records were only just begun, because nobody polled before."""
        if self._place is None:
            self.end()
            return
        now, least_s = self._clock(), reader.disk.patience.patience_s(0)
        is_slow = any(now - each.began_at >= least_s for each in self._flights)
        if self._flights and not is_slow:
            self._ends_at = now + least_s
            return
        if is_slow:
            reader.disk.patience.rest()
        reader.disk.promotions.load_ended(now - self._found_at)
        self.end()

    def _find(self, reader: RecordReader) -> bool:
        """Find what the disk has behind host memory's part. False if that isn't known yet, or it is shut: then done."""
        if self._place is None:
            tenant = self._target.namespace.tenant
            place = reader.disk.promotions.place_of(self._target.namespace)
            is_known = place is not None and reader.disk.debts.is_known(tenant)
            if place is None or not is_known:
                is_computing = self._claimed_at is not None  # meanwhile, so it waits for nothing
                self.is_done = place is None or not (is_computing or reader.disk.debts.may_wait(tenant))
                return False
            self.is_done = False
            num = reader.disk.promotions.located(self._target.namespace, self._target.key, self._host_stop)
            self._place, self._stop = place, self._host_stop + num
            self._next, self._found_at = self._stop, self._clock()
            self._ends_at = self._found_at + reader.disk.patience.patience_s(num * self._size)
        return True

    def _take_records(self, reader: RecordReader) -> None:
        """Put records that have come, and begin more, from the back."""
        low = max(self._front, self._host_stop)
        for flight in [each for each in self._flights if each.job.is_done]:
            self._flights.remove(flight)
            block = flight.where.block
            try:
                is_good, is_used = flight.job.wait(0), False
                if is_good and block >= low:
                    is_used = self._put(block, block + 1, self._source.row_copy(flight.row))
                self._num_from_disk += is_used
                reader.disk.promotions.read_ended(is_good=is_good, is_used=is_used)
            finally:
                reader.end(flight)
        assert self._place is not None
        while self._next > low and len(self._flights) < MAX_FLIGHTS:
            where = Where(self._mark, self._place, self._next - 1)
            if reader.begin(where, self._target.key, self._flights) is None:
                break
            self._next -= 1
        tenant = self._place.tenant
        is_refused = self._next > low and not self._flights and reader.disk.rows.num_for(tenant) > 0
        self.is_done = is_refused or (self._next <= low and not self._flights)
        if self.is_done and self._stop > self._host_stop:
            reader.disk.promotions.load_ended(self._clock() - self._found_at)
        if self.is_done and self._num_from_disk:
            reader.disk.patience.was_fast()

    def _drop_claimed(self) -> None:
        """Give up records of claimed blocks. After the last block it is over."""
        for flight in [each for each in self._flights if each.where.block < self._front]:
            self._flights.remove(flight)
            assert self._source.reader is not None
            self._source.reader.end(flight)
        if self._place is not None and self._front >= self._stop:
            self.end()

    def _measure(self) -> None:
        """Tell the disk how long the engine computed what it claimed last, and go on as long as it computes."""
        reader = self._source.reader
        if reader is not None and self._claimed_at is not None:
            now, num_tokens = self._clock(), self._claimed - self._measured
            if self._target.num_committed >= self._claimed:
                reader.disk.patience.computed_in(now - self._claimed_at, num_tokens)
            self._ends_at = max(self._ends_at, now + reader.disk.patience.patience_s(0))
        self._measured = self._target.num_committed

    def _put(self, start: int, stop: int, copy: Callable[[BlockIds], None]) -> bool:
        """Write loaded blocks, unless something was forgotten meanwhile or the engine has them."""
        if self.is_done or not self._is_current() or not self._target.put(start, stop, copy):
            return False
        self._ranges = with_range(self._ranges, start, stop)
        self._num_loaded += stop - start
        self._settle()
        return True

    def _settle(self) -> None:
        """Commit loaded blocks that continue the committed tokens."""
        while self._ranges and self._ranges[0][0] * self._size <= self._target.num_committed:
            _, stop = self._ranges.pop(0)
            if not self._target.commit(stop * self._size):
                self._ranges = []

    # --- outside of the gate

    def _keep(self) -> None:
        """Let host memory keep what came from the disk and is committed."""
        if self._source.reader is not None and self._num_loaded > self._num_kept and not self._ranges:
            self._num_kept = self._num_loaded
            self._target.keep()


refuse_copies(TierLoading, "it writes into the blocks of one sequence. Pass it on")


def with_range(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the ranges with one more, joined to those that it touches."""
    joined: Ranges = []
    for low, high in sorted([*ranges, (start, stop)]):
        if joined and joined[-1][1] >= low:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return joined
