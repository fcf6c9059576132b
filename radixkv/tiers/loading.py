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
from collections import Counter, deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, SupportsIndex

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.forks import OwnLock
from radixkv.index.below import Target
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.index.validation import require_between, require_seconds
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.fair_lock import FairLock
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.storage.plan import BlockIds
    from radixkv.tiers.disk.patience import DiskPatience
    from radixkv.tiers.disk.tier import DiskTier
    from radixkv.tiers.further import Further
    from radixkv.tiers.host.staging import StagingRows
    from radixkv.tiers.host.tier import HostTier
    from radixkv.tiers.tier import Records, Tier

POLL_S: Final = 0.001
MAX_READS: Final = 64
"""Records of one load that are on their way at once."""

IDLE_S: Final = 2.0
COMPUTING_S: Final = 10.0

Ranges = list[tuple[int, int]]
"""Ranges of blocks, disjoint and in order."""


class RecordId(NamedTuple):
    """The record of one block. ``mark``: of the tenant, so nobody joins a read that began before a purge."""

    mark: int
    namespace: Namespace
    block: int
    tier: int
    """Its number in the reader's ``tiers``."""


class Part(NamedTuple):
    """Blocks of a prompt up to block ``stop``, which the reader's tier number ``tier`` has."""

    tier: int
    stop: int


class Read:
    """A record that is being read for ``num_users`` loads, or was. ``key``: of its prompt, up to its end at least."""

    __slots__ = ("began_at", "id", "job", "key", "num_users", "row")

    def __init__(self, record: RecordId, key: bytes, row: int, job: Job, began_at: float) -> None:
        self.id, self.key, self.row, self.job, self.num_users = record, key, row, job, 1
        self.began_at = began_at


class RecordReader:
    """Single records of the tiers below host memory on their way into ``rows``, each read once for all that want it.

    A load takes records in any order, straight from staging memory into the cache's blocks. (``promotions`` bring a
    prompt's leading records into host memory: for a worker in another process, and for prompts that are to come.) Used
    within the tiers' gate. Only threads of the tiers wait for their media.

    ``tiers``: in the order in which they are asked; ``disk`` is the first, if there is one. Blocks have ``block_size``
    tokens. ``serves``: whether a tenant's blocks may be below host memory.
    """

    def __init__(
        self,
        disk: DiskTier | None,
        further: Further,
        rows: StagingRows,
        patience: DiskPatience,
        serves: Callable[[str], bool],
        block_size: int,
        clock: Clock,
    ) -> None:
        self._further = further
        self._disk, self.rows, self.patience, self._serves = disk, rows, patience, serves
        self._tiers: tuple[Tier[Records, memoryview], ...] = (
            *([] if disk is None else [disk]),
            *further.tiers,
        )
        self._block_bytes, self._clock = block_size * TOKEN_BYTES, clock
        self._reads: dict[RecordId, list[Read]] = {}
        self.num_hits = Counter[int]()
        """Records that loads used, by the number of the tier."""
        self.dropped: deque[list[Read]] = deque()
        """Of loads that nobody has any more. A finaliser adds them; ``sweep`` ends them."""

    @property
    def num_running(self) -> int:
        """Records in staging memory, or on their way there."""
        return sum(map(len, self._reads.values()))

    def find(self, namespace: Namespace, key: bytes, first: int, *, is_computing: bool) -> list[Part] | None:
        """Return what blocks of a prompt in a row, from ``first`` on, are where.

        None if the disk is still to learn of the tenant's purges, and the load may wait for that. ``is_computing``: it
        waits for nothing, so it may in any case. O(tokens) for each tier.
        """
        tenant = namespace.tenant
        tiers = list(enumerate(self._tiers)) if self._serves(tenant) else []
        if self._disk is not None and tiers:
            if self._disk.promotions.place_of(namespace) is None:
                del tiers[0]
            elif not self._disk.purges.is_known(tenant):
                if is_computing or self._disk.purges.may_wait(tenant):
                    return None
                del tiers[0]
        if tiers and not self._further.is_open_for(namespace):
            tiers = tiers[: len(tiers) - len(self._further.tiers)]
        parts, stop, was = list[Part](), first, -1
        while stop > was:  # a later tier may have what lies between blocks of an earlier one
            was = stop
            for number, tier in tiers:
                if num := tier.find(namespace, key, stop):
                    stop += num
                    parts.append(Part(number, stop))
            if len(tiers) == 1:
                break
        return parts

    def reads(self, namespace: Namespace, key: bytes, block: int) -> bool:
        """Whether records of a prompt are on their way that has the first ``block + 1`` blocks of a key. O(records)."""
        head = key[: (block + 1) * self._block_bytes]
        reads = (
            each for record, found in self._reads.items() if record.namespace == namespace for each in found
        )
        return any(each.key.startswith(head) for each in reads)

    def begin(self, record: RecordId, key: bytes, reads: list[Read]) -> Read | None:
        """Begin to read a record, or join a read of it. None if its tenant has no rows left, or the tier refuses.

        ``reads``: of the load, which gets it here, so it is ended with these whatever happens to the caller. O(a hash
        of the key up to the block).
        """
        stop = (record.block + 1) * self._block_bytes
        for read in self._reads.get(record, ()):
            is_same = read.key[:stop] == key[:stop]
            if is_same and not (read.job.is_done and not read.job.wait(0)):
                reads.append(read)
                read.num_users += 1
                return read
        row = self.rows.take(record.namespace.tenant)
        if row is None:
            return None
        made, jobs = None, list[Job]()
        try:
            tier, into = self._tiers[record.tier], self.rows.bytes_of(row)
            job = tier.read(record.namespace, key, record.block, into, begun=jobs)
            if job is not None:
                made = Read(record, key, row, job, self._clock())
                reads.append(made)
        except BaseException:
            for begun in jobs:
                begun.cancel()  # else it writes into a row that is free, or somebody else's
            self.rows.give(row)
            raise
        if made is None:
            self.rows.give(row)
            return None
        self._reads.setdefault(record, []).append(made)
        return made

    def end(self, read: Read) -> None:
        """End one load's interest in a record. After the last one its memory is zeroed and free.

        May wait for a decryption.
        """
        read.num_users -= 1
        if read.num_users:
            return
        read.job.cancel()
        left = [each for each in self._reads.pop(read.id, ()) if each is not read]
        if left:
            self._reads[read.id] = left
        self.rows.give(read.row)

    def read_ended(self, read: Read, *, is_good: bool, is_used: bool) -> None:
        """Count a record that was read for one load: a hit if that used it."""
        self.num_hits[read.id.tier] += is_used
        if self._disk is not None and read.id.tier == 0:
            self._disk.promotions.read_ended(is_good=is_good, is_used=is_used)

    def load_ended(self, seconds: float) -> None:
        """Count a load, and how long it took."""
        if self._disk is not None:
            self._disk.promotions.load_ended(seconds)

    def sweep(self) -> None:
        """End what dropped loads left."""
        while self.dropped:
            reads = self.dropped.popleft()
            while reads:
                self.end(reads.pop())


class Source(Protocol):
    """Where a load takes KV from: the tiers of a cache."""

    gate: FairLock
    host: HostTier
    reader: RecordReader | None
    """Of the tiers below host memory, if there are any."""

    def is_current(self, mark: int, tenant: str) -> bool:
        """Whether nothing of a tenant was purged, cleared or found wrong since the mark."""

    def safely(self, call: Callable[[], None]) -> bool:
        """Call it, and return whether it raised no error. An error is logged."""


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
        self._parts: list[Part] | None = None
        """What lies where behind host memory's part; None until that is known."""
        self._stop = self._next = host_stop  # the end of what lies below, and of what was not begun
        self._reads: list[Read] = []
        self._ends_at = self._found_at = self._polled_at = clock()
        self._polling = OwnLock()
        if source.reader is None:
            return
        self._ends_at += source.reader.patience.patience_s(0)
        weakref.finalize(self, source.reader.dropped.append, self._reads).atexit = False

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
        is_searching = reader is not None and self._parts is None and not self.is_done
        self.is_done = False
        return self.num_tokens > 0 or is_searching

    def end(self) -> None:
        """Load nothing more. Within the gate."""
        self.is_done = True
        while self._reads:
            read = self._reads.pop()
            assert self._source.reader is not None
            self._source.reader.end(read)

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
            self._source.host.read(target.namespace, target.key, self._front, self._put)
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
        if self._parts is None:
            self.end()
            return
        now, least_s = self._clock(), reader.patience.patience_s(0)
        is_slow = any(now - each.began_at >= least_s for each in self._reads)
        if self._reads and not is_slow:
            self._ends_at = now + least_s
            return
        if is_slow:
            reader.patience.rest()
        reader.load_ended(now - self._found_at)
        self.end()

    def _find(self, reader: RecordReader) -> bool:
        """Find what lies behind host memory's part. False if that isn't known yet."""
        if self._parts is None:
            target, is_computing = self._target, self._claimed_at is not None
            parts = reader.find(target.namespace, target.key, self._host_stop, is_computing=is_computing)
            self.is_done = False
            if parts is None:
                return False
            self._parts, self._stop = parts, parts[-1].stop if parts else self._host_stop
            self._next, self._found_at = self._stop, self._clock()
            num_tokens = (self._stop - self._host_stop) * self._size
            self._ends_at = self._found_at + reader.patience.patience_s(num_tokens)
        return True

    def _take_records(self, reader: RecordReader) -> None:
        """Put records that have come, and begin more, from the back."""
        low = max(self._front, self._host_stop)
        for read in [each for each in self._reads if each.job.is_done]:
            self._reads.remove(read)
            block = read.id.block
            try:
                is_good, is_used = read.job.wait(0), False
                if is_good and block >= low:
                    is_used = self._put(block, block + 1, self._source.host.row_copy(read.row))
                self._num_from_disk += is_used
                reader.read_ended(read, is_good=is_good, is_used=is_used)
            finally:
                reader.end(read)
        target, parts = self._target, self._parts or []
        while self._next > low and len(self._reads) < MAX_READS:
            tier = next(part.tier for part in parts if part.stop >= self._next)
            record = RecordId(self._mark, target.namespace, self._next - 1, tier)
            if reader.begin(record, target.key, self._reads) is None:
                break
            self._next -= 1
        tenant = target.namespace.tenant
        is_refused = self._next > low and not self._reads and reader.rows.num_for(tenant) > 0
        self.is_done = is_refused or (self._next <= low and not self._reads)
        if self.is_done and self._stop > self._host_stop:
            reader.load_ended(self._clock() - self._found_at)
        if self.is_done and self._num_from_disk:
            reader.patience.was_fast()

    def _drop_claimed(self) -> None:
        """Give up records of claimed blocks. After the last block it is over."""
        for read in [each for each in self._reads if each.id.block < self._front]:
            self._reads.remove(read)
            assert self._source.reader is not None
            self._source.reader.end(read)
        if self._parts is not None and self._front >= self._stop:
            self.end()

    def _measure(self) -> None:
        """Tell the disk how long the engine computed what it claimed last, and go on as long as it computes."""
        reader = self._source.reader
        if reader is not None and self._claimed_at is not None:
            now, num_tokens = self._clock(), self._claimed - self._measured
            if self._target.num_committed >= self._claimed:
                reader.patience.computed_in(now - self._claimed_at, num_tokens)
            self._ends_at = max(self._ends_at, now + reader.patience.patience_s(0))
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
