"""Lending: beam steps on the device, without the host, and the way back to the host.

    lend         the beams' tables go to the device, with blocks that it may take, charged to the tenant
    step         beam i continues beam parents[i] and has one row more: only on the device, without waiting
    lend_more    lend further blocks, if the device has run out
    reconcile    the host's state becomes what the same steps by ``reorder`` and ``append`` would have made

Until then the sequences are *lent*: beam i is ``sequences[i]``, and the host knows its state before the first step.
Only ``release``, which reconciles first, can be called on it. The device permutes the beams' tables, writes into their
blocks, frees blocks and takes them again.

    leased, or shared with others        private to the beams            lent in addition
    [ the group's prefix ][ held ]       [ counted on the device ]       [ the device's free stack ]
      never counted         counted       private before, or taken since
                            once more

So the host's record of a block doesn't change: it is in a tree, in a run, at the end of a sequence, or among the
``block_ids`` of a lending. What the device does with the last two kinds changes no count of the tenant. What happens to
other sequences changes nothing on the device. A sequence that shares a block with a beam shares it until the beams are
taken back.

**Reconcile** asks the device for each beam's origin, the ids that it appended and the blocks that it has. A beam keeps
its ancestor's whole blocks, as a child of it would. The blocks behind them form a tree of common prefixes. Its edges
become runs. Blocks that no beam holds are free. Reading is O(beams × (steps + columns)), outside the lock. The time
under the lock, with 64 steps to take back: 0.25 ms for 4 beams, 0.7 to 1 ms for 64 (one core, compiled).

If a call that works on one of the sequences is interrupted, all that were lent together are lost, because the contents
of their blocks are then unknown.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import (
    ArgumentError,
    ConfigError,
    IntegrityError,
    LeaseError,
    StaleGeneration,
    wrong_count,
)
from radixkv.index import requests
from radixkv.index.blocks import unpack
from radixkv.index.holders import PURGE, Lending, Run, SequenceState
from radixkv.index.recovery import mend
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES
from radixkv.index.validation import require_between

if TYPE_CHECKING:
    from radixkv.index.state import CacheState
    from radixkv.storage.beams import BeamsReading, DeviceBeams

MAX_NUM_BEAMS = 1_024
"""The most beams of one lending."""

MAX_STEPS = 2**20
"""The most steps of one lending."""


def lend(
    cache: CacheState,
    states: list[SequenceState],
    max_steps: SupportsIndex,
    num_blocks: SupportsIndex | None,
    groups: Iterable[SupportsIndex] | None,
) -> Lending:
    """See PrefixCache.lend."""
    if cache._storage is None:
        allowed = "a cache that was made with a layout, or with an engine's BlockStorage"
        problem = f"has no storage, where lend lets the device move beams on; allowed: {allowed}"
        raise ConfigError("cache", None, allowed, problem=problem)
    max_steps, families = (
        require_between("max_steps", max_steps, 1, MAX_STEPS),
        _groups(groups, len(states)),
    )
    with cache._lock:
        try:
            lending, private = _begin(cache, states, max_steps, num_blocks)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, states)
            raise
    try:
        lending.device = _on_device(cache, lending, private, max_steps, families)
        return lending
    except BaseException:
        take_back(cache, lending)
        raise


def take_back(cache: CacheState, lending: Lending) -> None:
    """Update the host's state from the device and end the lending. Does nothing if it is over."""
    reading = None if lending.device is None else lending.device.read()
    with cache._lock:
        try:
            if not lending.is_over:
                _take_back(cache, lending, reading)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, lending.sequences)
            raise


def take_back_now(cache: CacheState, lending: Lending) -> None:
    """Take back forgotten beams under the lock. Waits for the device."""
    if not lending.is_over:
        _take_back(cache, lending, None if lending.device is None else lending.device.read())


# --- lending


def _begin(
    cache: CacheState, sequences: list[SequenceState], max_steps: int, num_blocks: SupportsIndex | None
) -> tuple[Lending, NDArray[np.int32]]:
    """Take the blocks and mark the sequences as lent, on the host. Also returns the blocks private to the sequences."""
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


def _check(cache: CacheState, sequences: list[SequenceState]) -> None:
    requests.require_batch(sequences, may_have_room=False)
    if any(sequence._ahead is not None for sequence in sequences):
        raise LeaseError("a step computes blocks of one of these sequences: end the step first")
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
    """Return how many blocks no steps can exceed.

    These are each beam's own blocks from its partial tail on, plus one during a copy.
    """
    rows = max(sequence.num_tokens % block_size for sequence in sequences) + max_steps
    return len(sequences) * (-(-rows // block_size) + 1)


def _on_device(
    cache: CacheState, beams: Lending, private: NDArray[np.int32], max_steps: int, groups: list[int]
) -> DeviceBeams:
    """Make the tables and counts on the device.

    Sizes are powers of two, so that few kernels are compiled for beams of all lengths. Runs without the lock, because
    tables of lent sequences don't change.
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
        unpack(beams.block_ids),
        held=np.unique(behind[is_held]),
        groups=groups,
        max_columns=_power_of_two(columns),
        max_steps=_power_of_two(max_steps),
    )


def _prefixes(
    tables: list[NDArray[np.int32]], lengths: list[int], groups: list[int], block_size: int
) -> list[int]:
    """Return for each beam how many whole blocks at the front of its table all of its group share."""
    shared: dict[int, NDArray[np.int32]] = {}
    for table, length, group in zip(tables, lengths, groups, strict=True):
        whole = table[: length // block_size]
        before = shared.setdefault(group, whole)
        size = min(len(before), len(whole))
        differs = before[:size] != whole[:size]
        shared[group] = whole[: int(differs.argmax()) if differs.any() else size]
    return [len(shared[group]) for group in groups]


def _in_several(tables: list[NDArray[np.int32]], groups: list[int]) -> NDArray[np.int32]:
    """Return ids of the blocks that beams of more than one group have."""
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
    """Return ids of the blocks that only these sequences hold."""
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
    return unpack(packed)


# --- taking back


def _take_back(cache: CacheState, beams: Lending, reading: BeamsReading | None) -> None:
    """Give the sequences the state of their beams, free blocks without holders, and end the lending."""
    blocks, taken = beams.block_ids[:], np.zeros(0, np.int32)
    if reading is not None and reading.num_steps:
        heirs, taken = _heirs(cache, beams.sequences, reading)
        for sequence in beams.sequences:
            blocks += _let_go(cache, sequence)
        for sequence, heir in zip(beams.sequences, heirs, strict=True):
            sequence.become(heir)
        cache._runs.num_copied_blocks += reading.num_copied
    ids = unpack(blocks)
    is_taken = np.isin(ids, taken)
    if reading is not None and not _is_sound(ids, is_taken, taken, reading.free):
        raise IntegrityError("the records of lent beams name blocks that weren't lent, or a block twice")
    cache._evictor.give(ids[~is_taken].tobytes(), beams.tenant)
    beams.end()
    cache._lendings.discard(beams)
    for sequence in beams.sequences:
        sequence._lent = None
        sequence._is_open = sequence._closed_by != PURGE


def _is_sound(
    ids: NDArray[np.int32], is_taken: NDArray[np.bool_], taken: NDArray[np.int32], free: NDArray[np.int32]
) -> bool:
    """Whether the taken and free blocks of the device are exactly blocks that it was lent, each once."""
    has_one_place = len(np.unique(ids)) == len(ids) and len(np.unique(free)) == len(free)
    return bool(has_one_place and is_taken.sum() == len(taken) and np.isin(free, ids[~is_taken]).all())


def _heirs(
    cache: CacheState, sequences: tuple[SequenceState, ...], reading: BeamsReading
) -> tuple[list[SequenceState], NDArray[np.int32]]:
    """Return each beam's state as an unregistered sequence, and the blocks of the device that they have."""
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
    begins, length = unpack(ancestor._table)[:whole], ancestor.num_tokens + reading.num_steps
    is_another = bool((reading.tables[members, :whole] != begins).any())
    if is_another or any(reading.lengths[beam] != length for beam in members):
        raise IntegrityError("a lent beam doesn't continue the sequence that it comes from")


def _children(cache: CacheState, ancestor: SequenceState, whole: int, number: int) -> list[SequenceState]:
    """Return ``number`` sequences that share the first ``whole`` blocks of ``ancestor`` and have no further blocks."""
    first = requests.fork(cache, ancestor)
    cache._runs.cut(first, whole)
    del first._table[whole * ID_BYTES :]
    return [first, *(requests.fork(cache, first) for _ in range(number - 1))]


def _share(family: list[SequenceState], rows: NDArray[np.int32], at: int) -> None:
    """Give each of a family its blocks ``rows[i]``, from position ``at`` on. Common prefixes become runs.

    The ends belong to one sequence each. All of the family own the same run.
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


def _let_go(cache: CacheState, sequence: SequenceState) -> bytearray:
    """Release what a sequence holds. Returns the blocks without another holder, which the caller must free."""
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


def require_lent(cache: CacheState, beams: Lending) -> None:
    """Raise unless the beams are lent and the cache is alive."""
    if cache.is_dead:
        cache.require_alive()
    if beams.is_over:
        raise LeaseError("these beams were already taken back")
    if beams.sequences[0]._closed_by == PURGE:
        raise StaleGeneration("these beams' tenant was purged: release their sequences")


def _groups(groups: Any, num_beams: int) -> list[int]:
    """Return a number for each beam, from 0 on, equal within a group."""
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
