"""Lending: beam steps on the device, without the host, and the books that come back from it.

    lend         the beams' books go to the device, with blocks that it may take, charged to the tenant
    step         beam i goes on from beam parents[i] and has one row more: on the device alone, nobody waits
    lend_more    further blocks, if it ran out of them
    reconcile    the host's books are what the same steps by ``reorder`` and ``append`` would have made of them

Meanwhile the sequences are *lent*: beam i is ``sequences[i]``, and what the host knows of it is as it was before the
first step. Nothing but ``release``, which reconciles first, can be called on it: the device permutes the beams' tables,
writes into their blocks, frees them and takes them again.

    leased, or shared with others        private to the beams            lent besides
    [ the group's prefix ][ held ]       [ counted on the device ]       [ the device's free stack ]
      never counted         counted       private before, or taken since
                            once more

So a block is in the same place of the host's books all the time: in a tree, in a run, at the end of a sequence, or
among the ``block_ids`` of a lending. What the device does among the last two kinds changes no count of the tenant, and
whatever happens to other sequences changes nothing on the device: who shares a block with a beam, shares it until
the beams are taken back.

**Reconcile** asks the device where each beam comes from, which ids it appended and which blocks it has. A beam keeps
its ancestor's whole blocks, as a child of it would; the blocks behind those are a tree of common beginnings, whose
edges become runs. What nobody holds then is free. Reading is O(beams × (steps + columns)), outside the lock; under it,
with 64 steps to take back: 0.25 ms for 4 beams, 0.7 to 1 ms for 64, one core, compiled.

An interruption of a call that works on one of the sequences costs all that were lent together, since nobody knows
any more what their blocks hold.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import (
    ArgumentError,
    ConfigError,
    IntegrityError,
    LeaseError,
    ReentrantCall,
    StaleGeneration,
    wrong_count,
)
from radixkv.index.blocks import unpack
from radixkv.index.locking import Guard
from radixkv.index.recovery import mend
from radixkv.index.sequence import Run, Sequence, SequenceState
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES
from radixkv.index.validation import require_between
from radixkv.storage.plan import BeamsState

if TYPE_CHECKING:
    import torch

    from radixkv.index.cache import PrefixCache
    from radixkv.index.tenants import TenantState
    from radixkv.storage.beams import BeamsReading, DeviceBeams

MAX_NUM_BEAMS = 1_024
"""Beams of one lending."""

MAX_STEPS = 2**20
"""Steps of one lending."""


class Lending:
    """What the cache knows of lent beams. ``sequences``: their states, in the order of the beams."""

    __slots__ = ("block_ids", "device", "is_over", "sequences", "tenant")

    def __init__(self, sequences: list[SequenceState], tenant: TenantState, block_ids: bytearray) -> None:
        self.sequences, self.tenant = tuple(sequences), tenant
        self.block_ids = block_ids  # lent besides those that the sequences had, packed
        self.is_over = False
        self.device: DeviceBeams | None = None

    @property
    def is_held(self) -> bool:
        """Whether they have to be taken back."""
        return not self.is_over

    @property
    def description(self) -> str:
        """What a warning says of them: no token id."""
        return f"a lending of {len(self.sequences)} beams of tenant {self.tenant.tenant_id!r}"

    def end(self) -> None:
        """For the cache, under its lock: nobody steps any more."""
        self.is_over = True
        if self.device is not None:
            self.device.close()


class LentBeams:
    """Sequences whose beam steps the device makes by itself. Made by ``PrefixCache.lend``; use it in a ``with``.

    ``tables``: int32 ``[num_beams, columns]``, block ids, and ``lengths``: int32 ``[num_beams]``, rows: on the device,
    always as of the last step that was enqueued, at the same addresses: what paged attention reads. Columns behind a
    beam's length hold anything. Used by one thread at a time.

    Beams that are forgotten (collected before they were taken back) give a ResourceWarning, and the next call of the
    cache takes them back: it waits for the device, under the lock.
    """

    __slots__ = ("_cache", "_guard", "_lending", "sequences")
    _guard: Guard  # set only by the finaliser

    def __init__(self, cache: PrefixCache, sequences: list[Sequence], lending: Lending) -> None:
        self._cache, self.sequences, self._lending = cache, tuple(sequences), lending

    def __del__(self) -> None:
        lending: Lending | None = getattr(self, "_lending", None)  # None if its making was interrupted
        if lending is not None and not lending.is_over:
            self._guard = Guard(self._cache, lending)

    @property
    def is_over(self) -> bool:
        """Whether they are taken back."""
        return self._lending.is_over

    @property
    def block_ids(self) -> bytearray:
        """Packed int32 ids of the blocks that were lent besides those that the sequences had."""
        return self._lending.block_ids

    @property
    def tenant(self) -> TenantState:
        """Who is charged."""
        return self._lending.tenant

    @property
    def _device(self) -> DeviceBeams | None:
        return self._lending.device

    def __repr__(self) -> str:
        return f"<LentBeams {'taken back' if self.is_over else 'lent'}: {len(self.sequences)} beams>"

    @property
    def tables(self) -> torch.Tensor:
        """See the class."""
        return self._on_device().books.tables

    @property
    def lengths(self) -> torch.Tensor:
        """See the class."""
        return self._on_device().books.lengths

    def step(self, parents: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Beam i goes on from beam ``parents[i]`` and gets a row for ``token_ids[i]``: ``reorder``, then ``append``.

        ``parents``: int32, ``token_ids``: int32 or int64, ``[num_beams]``, contiguous, on the storage's device.
        Enqueues three launches on the current stream and waits for nothing, so that a graph may capture it, to be
        replayed after the tensors were filled anew. Values are checked on the device: a step that can't be made
        changes nothing, nor do those after it, until ``lend_more`` or ``clear``; ``state`` tells. Raises ArgumentError
        for tensors of another form, KernelError, LeaseError once taken back, StaleGeneration once purged.
        """
        self._on_device().step(parents, token_ids)

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the KV of each beam's newest row goes: block ids, and rows in them, int64 ``[num_beams]``; enqueued."""
        return self._on_device().slots()

    def state(self) -> BeamsState:
        """How far the beams are, and what stopped them, if something did. Waits for the device."""
        return self._on_device().state()

    def clear(self) -> None:
        """Let steps go on after one that couldn't be made, as ``lend_more`` does."""
        self._on_device().clear()

    def lend_more(self, num_blocks: SupportsIndex) -> None:
        """Lend further blocks to the device, charged to the tenant, and let steps go on. Enqueued.

        Raises QuotaExceeded and OutOfBlocks, and changes nothing.
        """
        device, num_blocks, taken = (
            self._on_device(),
            require_between("num_blocks", num_blocks, 1, None),
            bytearray(),
        )
        cache, lending, evictor = self._cache, self._lending, self._cache._evictor
        with cache._lock:
            try:
                _require_lent(cache, lending)
                evictor.take(num_blocks, lending.tenant, taken)
                evictor.charge(lending.tenant, num_blocks)
                lending.block_ids += taken
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, lending.sequences)
                raise
        device.lend(unpack(bytes(taken)))

    def reconcile(self) -> BeamsState:
        """Take the books back: each sequence is what its beam is, with the ids that the steps were told.

        Returns how far the device came: steps that it couldn't make are in nobody's books. Blocks that no beam holds
        are free again. From then on no step is made, nor by a graph that was captured. Waits for the device, not
        under the lock. Raises LeaseError if they are taken back already. O(beams × (steps + blocks)).
        """
        if self.is_over:
            raise LeaseError("these beams are taken back already")
        if self._cache.is_broken or self._cache._lock.is_mine:
            self._cache.require_alive()
        assert self._device is not None
        state = self._device.state()
        take_back(self._cache, self._lending)
        return state

    def __enter__(self) -> LentBeams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_over and not self._cache.is_dead:
            try:
                self.reconcile()
            except ReentrantCall as reentrant:
                self._cache.defer(self._lending, reentrant)
            except IntegrityError:
                if error is None or not self._cache.is_dead:
                    raise  # else the error that ends the block goes on

    def _on_device(self) -> DeviceBeams:
        _require_lent(self._cache, self._lending)
        assert self._device is not None
        return self._device


def lend(
    cache: PrefixCache,
    sequences: list[Any],
    max_steps: SupportsIndex,
    num_blocks: SupportsIndex | None,
    groups: Iterable[SupportsIndex] | None,
) -> LentBeams:
    """See PrefixCache.lend."""
    if cache._storage is None:
        allowed = "a cache that was made with a layout, or with an engine's BlockStorage"
        problem = f"has no storage, where lend lets the device move beams on; allowed: {allowed}"
        raise ConfigError("cache", None, allowed, problem=problem)
    max_steps, families = (
        require_between("max_steps", max_steps, 1, MAX_STEPS),
        _groups(groups, len(sequences)),
    )
    states = cache.states_of(sequences)
    with cache._lock:
        try:
            lending, private = _begin(cache, states, max_steps, num_blocks)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, states)
            raise
    try:
        lending.device = _on_device(cache, lending, private, max_steps, families)
        return LentBeams(cache, sequences, lending)
    except BaseException:
        take_back(cache, lending)
        raise


def take_back(cache: PrefixCache, lending: Lending) -> None:
    """Bring the host's books up to date and end the lending; nothing if it is over."""
    reading = None if lending.device is None else lending.device.read()
    with cache._lock:
        try:
            if not lending.is_over:
                _take_back(cache, lending, reading)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, lending.sequences)
            raise


def take_back_now(cache: PrefixCache, lending: Lending) -> None:
    """The same under the lock, of beams that were forgotten: waits for the device."""
    if not lending.is_over:
        _take_back(cache, lending, None if lending.device is None else lending.device.read())


# --- lending


def _begin(
    cache: PrefixCache, sequences: list[SequenceState], max_steps: int, num_blocks: SupportsIndex | None
) -> tuple[Lending, NDArray[np.int32]]:
    """Take the blocks and note who is lent: the host's side of it; and the blocks that are the sequences' alone."""
    _check(cache, sequences)
    tenant = sequences[0]._tree.tenant
    if num_blocks is None:
        num_blocks = _most_blocks(sequences, max_steps, cache._block_size)
    needed = require_between("num_blocks", num_blocks, 0, None)
    taken = bytearray()
    cache._evictor.take(needed, tenant, taken)
    cache._evictor.charge(tenant, needed)
    beams = Lending(sequences, tenant, taken)
    cache._lendings.add(beams)
    for sequence in sequences:
        sequence._is_open, sequence._lent = False, beams
    return beams, _private_blocks(beams.sequences)


def _check(cache: PrefixCache, sequences: list[SequenceState]) -> None:
    cache._require_batch(sequences)
    if not 1 <= len(sequences) <= MAX_NUM_BEAMS:
        raise wrong_count("sequences", len(sequences), f"1 to {MAX_NUM_BEAMS}")
    if any(sequence._tree.tenant is not sequences[0]._tree.tenant for sequence in sequences):
        allowed = "sequences of one tenant, which is charged"
        problem = f"belong to several tenants; allowed: {allowed}"
        raise ArgumentError("sequences", sequences, allowed, problem=problem)
    if any(sequence in cache._publishing for sequence in sequences):
        allowed = "sequences that publish nothing"
        problem = f"has one that computes a base; allowed: {allowed}"
        raise ArgumentError("sequences", sequences, allowed, problem=problem)


def _most_blocks(sequences: list[SequenceState], max_steps: int, block_size: int) -> int:
    """Blocks that no steps can exceed: each beam's own from its partial tail on, and one more while it is copied."""
    rows = max(sequence.num_tokens % block_size for sequence in sequences) + max_steps
    return len(sequences) * (-(-rows // block_size) + 1)


def _on_device(
    cache: PrefixCache, beams: Lending, private: NDArray[np.int32], max_steps: int, groups: list[int]
) -> DeviceBeams:
    """The books on the device. Sizes are powers of two, so that few kernels are compiled for beams of all lengths.

    Not under the lock: tables of lent sequences don't change.
    """
    from radixkv.storage.beams import DeviceBeams

    sequences, storage = beams.sequences, cache._storage
    assert storage is not None
    tables = [sequence.block_table for sequence in sequences]
    lengths = [sequence.num_tokens for sequence in sequences]
    prefixes = _prefixes(tables, lengths, groups, storage.block_size)
    behind = np.concatenate([table[start:] for table, start in zip(tables, prefixes, strict=True)])
    is_held = np.isin(behind, private, invert=True) | np.isin(behind, _in_several(tables, groups))
    columns = -(-(max(lengths) + max_steps) // storage.block_size)
    return DeviceBeams(
        storage.pool,
        tables,
        lengths,
        prefixes,
        unpack(bytes(beams.block_ids)),
        held=np.unique(behind[is_held]),
        groups=groups,
        max_columns=_power_of_two(columns),
        max_steps=_power_of_two(max_steps),
    )


def _prefixes(
    tables: list[NDArray[np.int32]], lengths: list[int], groups: list[int], block_size: int
) -> list[int]:
    """How many whole blocks at the front of its table each beam shares with all of its group."""
    shared: dict[int, NDArray[np.int32]] = {}
    for table, length, group in zip(tables, lengths, groups, strict=True):
        whole = table[: length // block_size]
        before = shared.setdefault(group, whole)
        size = min(len(before), len(whole))
        differs = before[:size] != whole[:size]
        shared[group] = whole[: int(differs.argmax()) if differs.any() else size]
    return [len(shared[group]) for group in groups]


def _in_several(tables: list[NDArray[np.int32]], groups: list[int]) -> NDArray[np.int32]:
    """Ids of the blocks that beams of more than one group have."""
    members: dict[int, list[NDArray[np.int32]]] = {}
    for table, group in zip(tables, groups, strict=True):
        members.setdefault(group, []).append(table)
    if len(members) == 1:
        return np.zeros(0, np.int32)
    ids, counts = np.unique(
        np.concatenate([np.unique(np.concatenate(its)) for its in members.values()]), return_counts=True
    )
    return ids[counts > 1]


def _private_blocks(sequences: tuple[SequenceState, ...]) -> NDArray[np.int32]:
    """Ids of the blocks that nobody but these sequences holds."""
    owners = Counter(sequence._run for sequence in sequences if sequence._run is not None)
    packed = bytearray()
    for sequence in sequences:
        packed += sequence._table[sequence._own * ID_BYTES :]
    runs: set[Run] = set()
    for at in owners:
        run: Run | None = at
        while run is not None and run not in runs:
            runs.add(run)
            run = run.parent
    for run in sorted(runs, key=lambda run: -run.start):  # children before parents
        if owners[run] == run.owners:
            if run.node is None:
                packed += run.block_ids
            if run.parent is not None:
                owners[run.parent] += 1
    return unpack(bytes(packed))


# --- taking back


def _take_back(cache: PrefixCache, beams: Lending, reading: BeamsReading | None) -> None:
    """Make the sequences what their beams are, give back what nobody holds, and end the lending."""
    blocks, taken = beams.block_ids[:], np.zeros(0, np.int32)
    if reading is not None and reading.num_steps:
        heirs, taken = _heirs(cache, beams.sequences, reading)
        for sequence in beams.sequences:
            blocks += _let_go(cache, sequence)
        for sequence, heir in zip(beams.sequences, heirs, strict=True):
            sequence.become(heir)
        cache._runs.num_copied_blocks += reading.num_copied
    ids = unpack(bytes(blocks))
    is_taken = np.isin(ids, taken)
    if reading is not None and not _is_sound(ids, is_taken, taken, reading.free):
        raise IntegrityError("the books of lent beams name blocks that weren't lent, or one of them twice")
    cache._evictor.give(ids[~is_taken].tobytes(), beams.tenant)
    beams.end()
    cache._lendings.discard(beams)
    for sequence in beams.sequences:
        sequence._lent = None
        sequence._is_open = not getattr(sequence, "_is_stale", False)
    if cache._num_waiting:
        cache._progress.notify_all()


def _is_sound(
    ids: NDArray[np.int32], is_taken: NDArray[np.bool_], taken: NDArray[np.int32], free: NDArray[np.int32]
) -> bool:
    """Whether what the device took, and has free, are blocks that it was lent, each once."""
    has_one_place = len(np.unique(ids)) == len(ids) and len(np.unique(free)) == len(free)
    return bool(has_one_place and is_taken.sum() == len(taken) and np.isin(free, ids[~is_taken]).all())


def _heirs(
    cache: PrefixCache, sequences: tuple[SequenceState, ...], reading: BeamsReading
) -> tuple[list[SequenceState], NDArray[np.int32]]:
    """What each beam is now, as a sequence that nobody knows of yet; and the blocks that they have of the device."""
    families: dict[int, list[int]] = {}
    for beam, origin in enumerate(reading.origins):
        families.setdefault(origin, []).append(beam)
    heirs: dict[int, SequenceState] = {}
    taken: list[NDArray[np.int32]] = []
    for origin, members in families.items():
        ancestor = sequences[origin]
        whole = ancestor.num_tokens // cache._block_size
        _check_reading(ancestor, members, whole, reading)
        size = -(-(ancestor.num_tokens + reading.num_steps) // cache._block_size)
        rows = reading.tables[members, whole:size]
        family = _children(cache, ancestor, whole, len(members))
        _share(family, rows, whole)
        for beam, heir in zip(members, family, strict=True):
            heir._tail += reading.token_ids[beam].astype("<u4").tobytes()
            heir._size += reading.num_steps * TOKEN_BYTES
            heirs[beam] = heir
        taken.append(np.unique(rows))
    return [heirs[beam] for beam in range(len(sequences))], np.concatenate(taken)


def _check_reading(ancestor: SequenceState, members: list[int], whole: int, reading: BeamsReading) -> None:
    begins, length = unpack(bytes(ancestor._table))[:whole], ancestor.num_tokens + reading.num_steps
    is_another = bool((reading.tables[members, :whole] != begins).any())
    if is_another or any(reading.lengths[beam] != length for beam in members):
        raise IntegrityError("a lent beam doesn't go on from the sequence that it comes from")


def _children(cache: PrefixCache, ancestor: SequenceState, whole: int, number: int) -> list[SequenceState]:
    """So many sequences that share the first ``whole`` blocks of ``ancestor``, and have nothing behind them."""
    first = cache._child(ancestor)
    cache._runs.cut(first, whole)
    del first._table[whole * ID_BYTES :]
    return [first, *(cache._child(first) for _ in range(number - 1))]


def _share(family: list[SequenceState], rows: NDArray[np.int32], at: int) -> None:
    """Give each of a family its blocks ``rows[i]``, from position ``at`` on: common beginnings as runs, ends alone.

    All of the family own the same run.
    """
    pending = [(list(range(len(family))), 0)]
    while pending:
        members, start = pending.pop()
        first = members[0]
        if len(members) == 1:
            family[first]._own = at + start
            family[first]._table += rows[first, start:].tobytes()
            continue
        differs = (rows[members, start:] != rows[first, start:]).any(axis=0)
        if not differs.any():
            raise IntegrityError("two lent beams write into the same block")
        stop = start + int(differs.argmax())
        if stop > start:
            shared, parent = rows[first, start:stop].tobytes(), family[first]._run
            run = Run(parent, at + start, shared)
            run.owners = len(members)
            if parent is not None:
                parent.owners -= len(members) - 1
            for beam in members:
                family[beam]._run = run
                family[beam]._table += shared
        branches: dict[int, list[int]] = {}
        for beam in members:
            branches.setdefault(int(rows[beam, stop]), []).append(beam)
        pending += [(branch, stop) for branch in branches.values()]


def _let_go(cache: PrefixCache, sequence: SequenceState) -> bytearray:
    """Give up what a sequence holds, as a release would; the blocks that nobody holds any more are the caller's."""
    freed, run = sequence._table[sequence._own * ID_BYTES :], sequence._run
    while run is not None:
        run.owners -= 1
        if run.owners:
            break
        if run.node is not None:
            cache._evictor.release(run.node, sequence._tree)
        else:
            freed += run.block_ids
        run = run.parent
    cache._evictor.release(sequence._node, sequence._tree)
    return freed


# --- checks


def _require_lent(cache: PrefixCache, beams: Lending) -> None:
    if cache.is_dead:
        cache.require_alive()
    if beams.is_over:
        raise LeaseError("these beams are taken back already")
    if getattr(beams.sequences[0], "_is_stale", False):
        raise StaleGeneration("these beams' tenant was purged: release their sequences")


def _groups(groups: Any, num_beams: int) -> list[int]:
    """A number for each beam, from 0 on, the same for those of one group."""
    if groups is None:
        return [0] * num_beams
    try:
        named = [operator.index(group) for group in groups]
    except TypeError:
        raise ArgumentError("groups", groups, "an integer for each sequence, or None") from None
    if len(named) != num_beams:
        raise wrong_count("groups", len(named), f"one for each of {num_beams} sequences")
    places = {group: at for at, group in enumerate(dict.fromkeys(named))}
    return [places[group] for group in named]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
