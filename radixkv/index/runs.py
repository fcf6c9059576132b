"""Runs: the private blocks of sequences, unshared or shared. These are the blocks that aren't in the tree.

    grow      take blocks for further tokens; copy a shared tail before a write
    adopt     a commit gave blocks to the tree: remove them from the sequence's own blocks and runs
    cut       a rollback gives up blocks
    let_go    a release gives up all

``holders.Run`` explains how sharing is counted. The copies that ``grow`` decides wait in the pool. With storage they
wait until the call returns, without it until the engine fetches them. All methods run under the cache's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.index.blocks import BlockPool, unpack
from radixkv.index.eviction import Evictor
from radixkv.index.holders import Run, SequenceState
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.index.tenants import NamespaceTree, TenantState


class Runs:
    """Manages the private blocks of the sequences of one cache."""

    __slots__ = ("_block_bytes", "_evictor", "_pool", "num_copied_blocks")

    def __init__(self, pool: BlockPool, evictor: Evictor, block_bytes: int) -> None:
        self._pool, self._evictor, self._block_bytes = pool, evictor, block_bytes
        self.num_copied_blocks = 0

    # --- more blocks

    def grow(self, sequences: list[SequenceState], keys: list[bytes]) -> list[SequenceState]:
        """Get blocks for ``keys[i]`` at the end of ``sequences[i]``.

        Returns the sequences that need a copy of their tail.
        """
        size = self._block_bytes
        fresh = [
            max(-(-(sequence._size + len(key)) // size) - len(sequence._table) // ID_BYTES, 0)
            for sequence, key in zip(sequences, keys, strict=True)
        ]
        at, blocks = 0, self._take_for(sequences, fresh)
        copied: list[SequenceState] = []
        for sequence, key, num_fresh in zip(sequences, keys, fresh, strict=True):
            rows = sequence._size % size // TOKEN_BYTES
            tail = sequence.shared_tail if rows else None
            if tail is not None:
                self._copy_on_write(sequence, tail, blocks[at : at + ID_BYTES], rows)
                copied.append(sequence)
                at += ID_BYTES
            sequence._table += blocks[at : at + num_fresh * ID_BYTES]
            at += num_fresh * ID_BYTES
            sequence._tail += key
            sequence._size += len(key)
            if sequence._reserved:
                sequence._reserved = max(sequence._reserved - len(key) // TOKEN_BYTES, 0)
        assert at == len(blocks)
        return copied

    def _take_for(self, sequences: list[SequenceState], fresh: list[int]) -> bytearray:
        """Take blocks for each sequence's ``fresh`` and for the copies of shared tails. Charges them to the tenants."""
        members: dict[TenantState, list[SequenceState]] = {}
        needs: dict[TenantState, int] = {}
        for sequence, num_fresh in zip(sequences, fresh, strict=True):
            tenant = sequence._tree.tenant
            members.setdefault(tenant, []).append(sequence)
            needs[tenant] = needs.get(tenant, 0) + num_fresh
        for tenant, its in members.items():
            needs[tenant] += self._count_copies(its)
        self._evictor.require_all(needs)
        blocks = bytearray()
        for tenant, needed in needs.items():
            if needed:
                self._evictor.take_granted(needed, tenant, blocks)
                self._evictor.charge(tenant, needed)
        return blocks

    def _count_copies(self, sequences: list[SequenceState]) -> int:
        """Count the tail blocks to copy if all of ``sequences`` write. The last owner of a tail writes in place.

        For a shared partial tail this is writers − 1 if every owner writes, otherwise writers.
        """
        size = self._block_bytes
        writers: dict[Run, int] = {}
        for sequence in sequences:
            tail = sequence.shared_tail if sequence._size % size else None
            if tail is not None:
                writers[tail] = writers.get(tail, 0) + 1
        return sum(count - (count == tail.owners and tail.node is None) for tail, count in writers.items())

    def _copy_on_write(self, sequence: SequenceState, tail: Run, fresh: bytearray, rows: int) -> None:
        """Give the sequence its own tail block, with the ``rows`` valid rows of the shared one."""
        source, target = unpack(bytes(sequence._table[-ID_BYTES:]) + fresh).tolist()
        self._pool.copies.add(source, target, rows)  # first, because giving up the tail may free the source
        if tail.node is not None and self._pool.is_deferred:
            self._pool.expose(sequence._table[-ID_BYTES:])
        self.num_copied_blocks += 1
        sequence._table[-ID_BYTES:] = fresh
        last = sequence.num_blocks - 1
        if tail.start < last:
            tail.split(last)
            if tail.node is not None:
                self._evictor.lease(tail.node, sequence._tree)
        parent = tail.parent
        if parent is not None:
            parent.owners += 1
        self.drop(tail, sequence._tree)
        sequence._run, sequence._own = parent, last

    # --- fewer blocks

    def adopt(self, sequence: SequenceState, start: int, stop: int) -> None:
        """Remove blocks ``[start, stop)`` from the sequence's own blocks and its runs. They belong to the tree now.

        A run that other sequences share keeps a lease on the node instead. Own blocks before ``start`` duplicate blocks
        of the tree that another sequence committed. They become a run.
        """
        own = sequence._own
        if start > own:
            sequence._run = Run(sequence._run, own, sequence._table[own * ID_BYTES : start * ID_BYTES])
        sequence._own = max(own, stop)
        if start < own:
            self._adopt_runs(sequence, start, min(own, stop))

    def _adopt_runs(self, sequence: SequenceState, start: int, stop: int) -> None:
        """Remove blocks ``[start, stop)`` from the sequence's runs. Shared runs keep a lease in their place."""
        node, run = sequence._node, sequence._run
        below: Run | None = None
        shared = False
        while run is not None and run.end > start:
            shared = shared or run.owners > 1
            if run.start < stop:
                if run.end > stop:
                    below, run = run, run.split(stop)
                if run.start < start:
                    run.split(start)
                if shared:
                    run.node = node
                    self._evictor.lease(node, sequence._tree)
                else:
                    run = run.parent
                    if below is None:
                        sequence._run = run
                    else:
                        below.parent = run
                    continue
            below, run = run, run.parent

    def cut(self, sequence: SequenceState, keep: int) -> None:
        """Give up the sequence's private blocks from position ``keep`` on."""
        run, tree = sequence._run, sequence._tree
        own = sequence._table[max(keep, sequence._own) * ID_BYTES :]
        if own:
            self._evictor.give(own, tree.tenant)
        sequence._own = min(keep, sequence._own)
        while run is not None and run.end > keep:
            if run.start < keep:
                parent = run.split(keep)
                if run.node is not None:
                    self._evictor.lease(run.node, sequence._tree)
            else:
                kept = run.parent
                if kept is None:
                    self.drop(run, tree)
                    sequence._run = None
                    return
                parent = kept
            parent.owners += 1
            self.drop(run, tree)
            sequence._run = run = parent

    def let_go(self, sequence: SequenceState) -> None:
        """Give up all private blocks of a released sequence."""
        own = sequence._table[sequence._own * ID_BYTES :]
        if own:
            self._evictor.give(own, sequence._tree.tenant)
        if sequence._run is not None:
            self.drop(sequence._run, sequence._tree)
            sequence._run = None

    def drop(self, run: Run, tree: NamespaceTree) -> None:
        """Remove one owner of the run. A run without owners is freed, and so on upward."""
        at: Run | None = run
        while at is not None:
            at.owners -= 1
            if at.owners:
                return
            if at.node is not None:
                self._evictor.release(at.node, tree)
            else:
                self._evictor.give(at.block_ids, tree.tenant)
            at = at.parent
