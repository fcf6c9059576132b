"""The journal of one cache, turned into numbered batches of events.

    cache, under its lock ──append──▶ queue (bounded) ──step(), another thread──▶ batches

Under the cache's lock, a record costs one append, and a wake-up if the thread sleeps. All other work is done by
``step``, in parts of about 2 ms.

**Losses.** A full queue drops all records, and all that follow. The next ``step`` leaves out one number and sends
AllBlocksCleared. At least ``restate_s`` after the last such statement, records are accepted again, the cache is read
in slices, and everything resident is stated again, after another AllBlocksCleared. Records that are older than the
reading are applied a second time; the last record of a block decides. A consumer that missed batches which are no
longer kept asks for the same statement (``restate``). So each AllBlocksCleared is a *base*: a reader that knows
nothing can begin there.

**Numbers** begin with the microseconds since 1970 at the start. So the numbers of a new process are higher, and its
first batch is a base behind a gap. A reader that was away during the restart notices the gap too. If the clock was set
back, the numbers are lower. Readers take that for a new process as well.

**Memory.** The stream keeps the digests of what it published, about 110 bytes a block, because a namespace is cleared
by removing its blocks, one by one. A record of a long prompt keeps its key. The digests of one new block behind a
prefix cost a pass over the prefix: 5 ms for a million tokens.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from radixkv.clock import Clock, monotonic
from radixkv.errors import ConfigError, RadixKVError
from radixkv.events.engine_hashes import BlockHashes, EngineHashes
from radixkv.events.event_messages import (
    AllBlocksCleared,
    BlockDigests,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Hash,
    encode,
)
from radixkv.events.event_settings import EventSettings
from radixkv.index.tokens import TAIL_FILL, TOKEN_BYTES, decode
from radixkv.signing import KeySet
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.snapshot import Snapshot, TreeSnapshot
    from radixkv.index.tokens import Key

_RECORD_BYTES: Final = 200
"""Approximate bytes of a queued record, without its key."""
_EVENT_BLOCKS: Final = 1_024
_BATCH_WORK: Final = 2_048
"""Work of one batch: blocks, KiB of skipped prefixes, and events."""
_EVENT_TOKENS: Final = 32_768
"""Most token ids of an event, where they are published."""
_LOGGER = logging.getLogger(__name__)

Record: TypeAlias = tuple[Literal["store", "remove", "clear"], "Namespace", "Key", int, int]
Events: TypeAlias = list[Event]
Piece: TypeAlias = tuple[Event | None, int]
"""An event, if there is one, and the work that it was."""


class Batch(NamedTuple):
    """A numbered batch. ``is_base``: it begins with AllBlocksCleared, so a reader that knows nothing can begin here."""

    number: int
    payload: bytes
    is_base: bool


class Snapshots(Protocol):
    """The source of statements: a PrefixCache, or another cache with a ``snapshot``."""

    def snapshot(self) -> Snapshot:
        """Return everything resident, at one moment."""


class EventStream:
    """A Journal that makes batches.

    ``stored``, ``removed``, ``cleared`` and ``restate`` may be called from any thread, ``step`` by one at a time.

    - ``keys``: of the purpose ``events``; not needed with ``hashes``.
    - ``hashes``: how an engine hashes blocks, in place of keyed digests; only together with the prompts.
    - ``wake``: called for a record that comes while ``is_asleep``; the thread that calls ``step`` sets that flag.

    Raises ConfigError.
    """

    def __init__(
        self,
        keys: KeySet | None,
        settings: EventSettings,
        *,
        hashes: EngineHashes | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
        wall: Clock = time.time,
    ) -> None:
        self.grain_tokens = settings.block_size
        self.is_asleep = False
        self.num_overflows = self.num_failed = 0
        self._settings, self._wake, self._clock, self._wall = settings, wake, clock, wall
        self._hashes: BlockHashes = _keyed(keys, settings) if hashes is None else hashes
        self._block_bytes = settings.block_size * TOKEN_BYTES
        self._event_blocks = _EVENT_BLOCKS
        if settings.publishes_prompts:
            self._event_blocks = min(_EVENT_BLOCKS, max(1, _EVENT_TOKENS // settings.block_size))
        self._max_records, self._max_bytes = settings.queue_records, settings.queue_bytes
        self._queue: deque[Record] = deque()
        self._appended_bytes = self._drained_bytes = 0
        self._dropping, self._is_wanted, self._rests = False, True, False
        self._number = int(wall() * 1e6)
        self._held: dict[Namespace, set[Hash]] = {}
        self._source: Snapshots | None = None
        self._restated_at = float("-inf")
        self._turns = self._run()

    @property
    def is_idle(self) -> bool:
        """Whether the last ``step`` found nothing to do and no record came since; a statement may wait for its time."""
        return self._rests and not self._queue

    @property
    def queued_bytes(self) -> int:
        """Approximate bytes of the queued records."""
        return max(0, self._appended_bytes - self._drained_bytes)

    @property
    def num_blocks(self) -> int:
        """Blocks that are published as resident. O(namespaces)."""
        return sum(map(len, list(self._held.values())))

    def attach(self, source: Snapshots) -> None:
        """State what ``source`` holds, at the first ``step`` and after each loss."""
        self._source = source

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Queue stored blocks. O(1): only appends."""
        self._append(("store", namespace, key, start, stop), stop * TOKEN_BYTES)

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Queue removed blocks. O(1): only appends."""
        self._append(("remove", namespace, key, start, stop), stop * TOKEN_BYTES)

    def cleared(self, namespace: Namespace) -> None:
        """Queue a cleared namespace. O(1): only appends."""
        self._append(("clear", namespace, b"", 0, 0), 0)

    def restate(self) -> None:
        """State everything resident again, as soon as ``restate_s`` allows it."""
        self._is_wanted = True

    def close(self) -> None:
        """Drop all records, queued and to come. The other thread has ended."""
        self._dropping = True
        self._queue.clear()

    def step(self) -> Batch | None:
        """Return the next batch; None if there is none now. About 2 ms of work, or reading the cache in slices."""
        events = next(self._turns)
        if not events:
            return None
        payload = encode(EventBatch(self._wall(), events, self._settings.data_parallel_rank))
        self._number += 1
        return Batch(self._number - 1, payload, isinstance(events[0], AllBlocksCleared))

    def _append(self, record: Record, num_bytes: int) -> None:
        if self._dropping:
            return
        self._appended_bytes = appended = self._appended_bytes + num_bytes + _RECORD_BYTES
        self._queue.append(record)
        if len(self._queue) > self._max_records or appended - self._drained_bytes > self._max_bytes:
            self._dropping = True  # the other thread frees the memory
            self.num_overflows += 1
        if self.is_asleep:
            self._wake()

    # --- the other thread

    def _run(self) -> Generator[Events, None, None]:
        """Yield the events of each batch; nothing where other work may come first, or there is none."""
        while True:
            if self._dropping:
                yield from self._lose()
            elif self._is_wanted and self._clock() >= self._restated_at + self._settings.restate_s:
                yield from self._batches(self._statement())
            elif self._queue:
                yield from self._batches(self._changes())
            else:
                yield from self._rest()

    def _rest(self) -> Generator[Events, None, None]:
        self._rests = True
        yield []
        self._rests = False

    def _lose(self) -> Generator[Events, None, None]:
        """Tell readers that nothing they know counts. Accept records again as soon as everything may be stated."""
        _LOGGER.warning("too many changes of the cache at once: KV events were dropped, and start over")
        self._number += 1
        self._held, self._is_wanted = {}, True
        yield [AllBlocksCleared()]
        while self._clock() < self._restated_at + self._settings.restate_s:
            self._queue.clear()
            yield from self._rest()
        self._queue.clear()
        self._drained_bytes = self._appended_bytes
        # last: the cache has what the dropped records describe, and is read after this
        self._dropping = False

    def _statement(self) -> Iterator[Piece]:
        """Yield everything that the source holds, behind AllBlocksCleared."""
        self._restated_at, self._is_wanted, self._held = self._clock(), False, {}
        yield AllBlocksCleared(), 0
        if self._source is None:
            return
        try:
            read = getattr(
                self._source, "snapshot_in_slices", self._source.snapshot
            )  # in slices: short waits
            snapshot = read()
        except RadixKVError as error:  # a dead cache: nobody should be led to it
            _LOGGER.error("the cache can't be read for KV events: %s", error)
            self.num_failed += 1
            self._is_wanted = True
            return
        for tree in snapshot.trees:
            if not tree.detached and tree.base is None:
                yield from self._stated(tree, snapshot.has_tails)

    def _batches(self, pieces: Iterator[Piece]) -> Generator[Events, None, None]:
        """Group pieces, events and the work that they were, into batches. Ends at a loss."""
        events: Events = []
        work = 0
        for event, cost in pieces:
            work += cost + 1
            if event is not None:
                events.append(event)
            if work >= _BATCH_WORK:
                yield events
                events, work = [], 0
            if self._dropping:
                return
        if events:
            yield events

    def _stated(self, tree: TreeSnapshot, has_tails: bool) -> Iterator[Piece]:
        """Yield the blocks of a tree, node by node, parents first."""
        namespace = tree.namespace
        held = self._held.setdefault(namespace, set())
        ends: dict[int, tuple[Any, Hash]] = {}
        for index, node in enumerate(tree.nodes):
            if node.parent is None:
                state, parent = self._hashes.begin(namespace), None
            else:
                above, parent = ends[node.parent]
                state = above.copy()
            first = node.depth - len(node.label) // self._block_bytes
            label = node.label
            if has_tails and label.endswith(
                TAIL_FILL
            ):  # a tail is no block of a prompt: the journal leaves it out too
                label = label[: -self._block_bytes]
            for event, cost in self._blocks(namespace, held, state, label, 0, parent, is_first=not first):
                yield event, cost
                parent = event.block_hashes[-1]
            if node.num_children and parent is not None:
                ends[index] = state, parent

    def _changes(self) -> Iterator[Piece]:
        """Yield the changes of the queued records."""
        while self._queue:
            op, namespace, key, start, stop = self._queue.popleft()
            self._drained_bytes += stop * TOKEN_BYTES + _RECORD_BYTES
            held = self._held.get(namespace)
            if op == "store":
                yield from self._store(namespace, self._held.setdefault(namespace, set()), key, start, stop)
            elif held is None:
                continue
            elif op == "remove":
                yield from self._remove(namespace, held, key, start, stop)
            else:
                yield from self._removed(list(held))
                del self._held[namespace]

    def _store(
        self, namespace: Namespace, held: set[Hash], key: Key, start: int, stop: int
    ) -> Iterator[Piece]:
        whole, first = _joined(key, stop), start // self.grain_tokens
        state, parent = self._hashes.begin(namespace), None
        if first:
            self._hashes.skip(state, whole, first - 1)
            (parent,) = self._hashes.extend(state, whole, first - 1, first)
        yield None, start // 256
        yield from self._blocks(namespace, held, state, whole, first, parent, is_first=not first)

    def _blocks(
        self,
        namespace: Namespace,
        held: set[Hash],
        state: Any,
        key: bytes,
        first: int,
        parent: Hash | None,
        is_first: bool,
    ) -> Iterator[tuple[BlockStored, int]]:
        """Yield the blocks of a key from block ``first`` on. ``state``: before this block.

        Blocks that are published already are left out: some consumers count how often a block was stored.
        """
        size = self._event_blocks
        for at in range(first, len(key) // self._block_bytes, size):
            stop = min(at + size, len(key) // self._block_bytes)
            digests = self._hashes.extend(state, key, at, stop)
            for begin, end in _runs(digests, held):
                before = digests[begin - 1] if begin else parent
                ids = key[(at + begin) * self._block_bytes : (at + end) * self._block_bytes]
                starts_prompt = is_first and at + begin == first
                yield self._event(namespace, digests[begin:end], before, ids, starts_prompt), end - begin
            held.update(digests)
            parent = digests[-1]

    def _event(
        self,
        namespace: Namespace,
        digests: list[Hash],
        parent: Hash | None,
        ids: bytes,
        starts_prompt: bool,
    ) -> BlockStored:
        settings = self._settings
        event = BlockStored(digests, parent, [], settings.block_size, None, settings.medium, None)
        if settings.publishes_prompts:
            event.token_ids = decode(ids).tolist()
            event.lora_name = namespace.adapter
            if isinstance(self._hashes, EngineHashes):
                event.lora_name, event.extra_keys = self._hashes.shown(namespace, len(digests), starts_prompt)
            else:
                event.extra_keys = _extra_keys(namespace, len(digests), starts_prompt)
        return event

    def _remove(
        self, namespace: Namespace, held: set[Hash], key: Key, start: int, stop: int
    ) -> Iterator[Piece]:
        whole, first = _joined(key, stop), start // self.grain_tokens
        state = self._hashes.begin(namespace)
        self._hashes.skip(state, whole, first)
        yield None, start // 256
        for at in range(first, stop // self.grain_tokens, _EVENT_BLOCKS):
            end = min(at + _EVENT_BLOCKS, stop // self.grain_tokens)
            digests = [each for each in self._hashes.extend(state, whole, at, end) if each in held]
            held.difference_update(digests)
            yield from self._removed(digests)
        if not held:
            self._held.pop(namespace, None)

    def _removed(self, digests: list[Hash]) -> Iterator[Piece]:
        for at in range(0, len(digests), _EVENT_BLOCKS):
            some = digests[at : at + _EVENT_BLOCKS]
            yield BlockRemoved(some, self._settings.medium), len(some)


refuse_copies(EventStream, "its batches are numbered once. Pass it on, or make another")


def _keyed(keys: KeySet | None, settings: EventSettings) -> BlockDigests:
    if keys is None:
        raise ConfigError("keys", None, "keys of the purpose 'events', for digests of blocks")
    return BlockDigests(keys, settings.block_size)


def _joined(key: Key, stop: int) -> bytes:
    whole = key if isinstance(key, bytes) else b"".join(key)
    return whole[: stop * TOKEN_BYTES]


def _runs(digests: list[Hash], held: set[Hash]) -> Iterator[tuple[int, int]]:
    """Yield the longest stretches ``[begin, end)`` of digests that aren't held."""
    if held.isdisjoint(digests):
        yield 0, len(digests)
        return
    begin = 0
    for at, digest in enumerate(digests):
        if digest in held:
            if begin < at:
                yield begin, at
            begin = at + 1
    if begin < len(digests):
        yield begin, len(digests)


def _extra_keys(namespace: Namespace, num_blocks: int, starts_prompt: bool) -> list[tuple[str, ...] | None]:
    """Return what vLLM hashes into each block besides ids: the adapter, and the salt in a prompt's first block."""
    adapter = () if namespace.adapter is None else (namespace.adapter,)
    first = (*adapter, namespace.salt) if starts_prompt and namespace.salt else adapter
    return [first or None, *[adapter or None] * (num_blocks - 1)]
