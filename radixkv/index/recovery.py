"""Recovery: repair a cache's state after an exception in the middle of a call.

A call changes a tree, a sequence, counts, the free list and a policy's order one after the other. An exception
(KeyboardInterrupt, MemoryError, an error in a policy or a journal) may come between any two steps. The cache writes no
log for this case, so requests pay nothing. Instead ``mend`` runs under the lock before the exception propagates. It
keeps what is certain and rebuilds everything else from it:

    certain                                             rebuilt
    which nodes hang below a root, and their blocks     parents, depths, uses, counts of a tree
    block table, ids and leased node of a sequence      its runs and their owners
    leases; blocks lent, also to the device             counts of tenants, policies' orders, the free list
    copies that wait
    pins, by the leases that they hold                  how many blocks they hold, and which ends first
    published bases                                     their readers, and which other bases are still held
    announced prompts that haven't ended                where they hang, and how much of each is resident
    sole users of nodes                                 that an ancestor's is theirs, or nobody

- **An interrupted call costs the sequences that it worked on.** They are closed. Sequences that it was about to return
  never exist for the user. Other sequences keep their blocks, with one exception: sequences that were lent to the
  device together with a closed one are closed too.
- Blocks that a call made resident stay if the node is complete: their KV exist. Blocks without a certain owner are
  free.
- A split or a growth that was interrupted is finished or cut back (``_finish``). A cleared tree gives up its unused
  nodes, as after ``clear``.
- A policy starts again with the old order. Nodes that it had keep their position, missing nodes are youngest, and a
  child comes before its parent. Counts of uses are forgotten. If it can't start, ``lru`` replaces it.
- The journal gets everything again. Otherwise a lost ``removed`` would leave a false record for ever.

Shared blocks are found in the block tables. Forks have the same blocks up to the first difference. So sorted tables
form a tree of common prefixes, and its edges are the runs.

Cost: O(resident blocks + block tables + pool), only after an exception. If ``mend`` itself is interrupted, it starts
again, up to ATTEMPTS times in all. This is safe because it reads only what is certain. If no attempt succeeds, the
cache is *broken*: ``CacheLock.broken`` is set. The next call repairs the cache before it does anything (``repair``), or
raises IntegrityError. After MAX_FAILED_REPAIRS such calls the cache is *dead* for ever.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np

from radixkv.errors import (
    ArgumentError,
    CapacityError,
    IntegrityError,
    LeaseError,
    NamespaceError,
    TokenError,
)
from radixkv.index.blocks import unpack
from radixkv.index.guarded import fallback, taken_over
from radixkv.index.holders import INTERRUPTION, Run, SequenceState
from radixkv.index.ranking import Ranking
from radixkv.index.tenants import UNRANKED, Base, NamespaceTree, TenantState
from radixkv.index.tokens import ID_BYTES
from radixkv.index.tree import Node, joined

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from radixkv.index.holders import LeaseState
    from radixkv.index.state import CacheState

REFUSALS = (ArgumentError, CapacityError, LeaseError, NamespaceError, TokenError)
"""Errors that the cache raises before anything has changed."""

_OWN = ("radixkv.index.", "radixkv.config")

ATTEMPTS = 4
"""How often one repair is tried."""

MAX_FAILED_REPAIRS = 8
"""After this many calls that couldn't repair the cache, no call tries again."""


def mend(
    cache: CacheState,
    error: BaseException,
    sequences: SequenceState | Iterable[SequenceState] | None = None,
    others: Iterable[SequenceState] = (),
    lease: LeaseState | None = None,
    lent: bytes | bytearray = b"",
) -> None:
    """Repair the cache after ``error`` in one of its calls. Does nothing if the call was refused. Call it under the
    lock.

    - ``sequences``, ``others``: sequences that the call worked on or was about to return. They are closed.
    - ``lease``: a lease that the call worked on or was about to return. It is closed.
    - ``lent``: packed ids of blocks that the call was about to lend. They become free.

    All arguments are existing objects, so that the caller needs no memory for this call. If the repair fails,
    ``CacheLock.broken`` stays set, and no call runs before ``repair`` has succeeded.
    """
    damage = cache._damage
    damage.error, cache._lock.broken = error, cache
    if _was_refused(cache):
        return
    damage.sequences = sequences
    damage.others = others
    damage.lease = lease
    damage.lent = lent
    damage.is_known = True
    _try_to_mend(cache)


class Mending:
    """Repair the cache after an error in the block: ``with cache._lock, Mending(cache):``.

    For calls that are not on a request's path and work on no sequence or lease.
    """

    __slots__ = ("_cache",)

    def __init__(self, cache: CacheState) -> None:
        self._cache = cache

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            cache = self._cache
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error)


def repair(cache: CacheState) -> None:
    """Repair a broken cache before a call. Call it under the lock.

    Raises IntegrityError if the repair fails. After MAX_FAILED_REPAIRS failures the cache is dead. If the repair is
    interrupted (KeyboardInterrupt), raises the interruption after the cache is repaired.
    """
    if _was_refused(cache):
        return
    try:
        _try_to_mend(cache)
    except BaseException as error:
        if cache._lock.broken is None:
            if isinstance(error, Exception):
                return  # a later attempt succeeded
            raise
        cache._damage.num_failed += 1
        left, name = MAX_FAILED_REPAIRS - cache._damage.num_failed, type(error).__name__
        why = (_BROKEN if left > 0 else _DEAD).format(error=name, left=left)
        if left <= 0:
            cache._lock.death = why
        raise IntegrityError(why) from error


_BROKEN = (
    "the cache couldn't be repaired after an error that interrupted a call ({error}); the next call tries again. After "
    "{left} more calls that can't, the cache is dead: only then replace the cache by a new PrefixCache"
)
_DEAD = (
    "the cache is dead: an error interrupted a call and the cache's state could not be repaired ({error}); "
    "every call fails: replace the cache by a new PrefixCache"
)


def _try_to_mend(cache: CacheState) -> None:
    """Try to mend several times. Raises the error of the last failed attempt, also if a later attempt succeeded."""
    try:
        _mend(cache)
        _whole(cache)
    except BaseException:
        _mend_again(cache, ATTEMPTS - 1)
        raise


def _mend_again(cache: CacheState, attempts: int) -> None:
    try:
        gc.collect()
        _mend(cache)
        _whole(cache)
    except BaseException:
        if attempts > 1:
            _mend_again(cache, attempts - 1)
        raise


def _whole(cache: CacheState) -> None:
    cache._damage.clear()
    cache._damage.num_failed = 0
    cache._lock.broken = None


def _was_refused(cache: CacheState) -> bool:
    """Whether the call was refused before it changed anything. Then there is nothing to repair."""
    error = cache._damage.error
    if not isinstance(error, REFUSALS) or not _is_own(error):
        return False
    cache._lock.broken = None
    cache._damage.error = None
    return True


def _is_own(error: BaseException) -> bool:
    """Whether code of the cache raised an error, and not a callback: that may raise anything, at any point."""
    at = error.__traceback__
    while at is not None:
        if not at.tb_frame.f_globals.get("__name__", "").startswith(_OWN):
            return False
        at = at.tb_next
    return True


def _mend(cache: CacheState) -> None:
    damage = cache._damage
    if not damage.is_known:
        damage.sequences = tuple(cache._sequences)
        for lease in cache._leases:
            lease._is_open = False
        cache._leases.clear()
    if isinstance(damage.sequences, SequenceState):
        _close(cache, damage.sequences)
    elif damage.sequences is not None:
        for sequence in damage.sequences:
            _close(cache, sequence)
    for sequence in damage.others:
        _close(cache, sequence)
    if damage.lease is not None:
        damage.lease._is_open = False
        cache._leases.discard(damage.lease)
    cache._recorder.start_over()
    _unlend(cache, damage.lent)
    _Books(cache).rebuild()


def _unlend(cache: CacheState, block_ids: bytes | bytearray) -> None:
    """Forget that blocks were lent, whether they are marked or not."""
    is_kept = np.ones(cache._pool.num_blocks, np.bool_)
    is_kept[unpack(block_ids)] = False
    cache._pool.lent.keep_only(np.flatnonzero(is_kept).astype(np.int32))


def _close(cache: CacheState, sequence: SequenceState) -> None:
    sequence._is_open, sequence._closed_by = False, INTERRUPTION
    sequence._lent = None
    cache._sequences.discard(sequence)


class _Books:
    """The certain facts of a cache, and everything that is rebuilt from them."""

    def __init__(self, cache: CacheState) -> None:
        self.cache = cache
        self.tenants = list(cache._tenants.values())
        self.nodes: list[Node] = []  # of all trees, parents before children
        self.home = np.full(cache._pool.num_blocks, -1, np.int64)  # index of the node that has the block
        self.private_to = np.full(
            cache._pool.num_blocks, -1, np.int64
        )  # index of the tenant that has the block
        self.num_private: Counter[TenantState] = Counter()

    def rebuild(self) -> None:
        """Rebuild everything that follows from the certain facts."""
        self._unhook()
        self._finish_moves()
        self._settle_bases()
        trees = self._trees()
        for tree in trees:
            self._relink(tree)
        self._close_what_lost_its_node()
        self._keep_lent()
        self.cache._pins.settle()
        self._share_blocks()
        self._count_uses()
        self._forget_what_was_cleared(trees)
        self._settle_sole_users()
        self._hold_for_copies()
        self._count()
        self._refill_pool()
        self._hook_again()
        self._tell_journal(trees)

    # --- announced prompts

    def _unhook(self) -> None:
        """Keep up no residency while trees are rebuilt."""
        for tenant in self.tenants:
            tenant.waiting = None
        for tree in self._trees():
            tree.hooks = None

    def _hook_again(self) -> None:
        """Hook the open claims in the rebuilt trees. O(claims × nodes on the path)."""
        cache = self.cache
        for tenant in self.tenants:
            waiting = cache._claims.tenants.get(tenant.tenant_id)
            if waiting is not None:
                waiting.forget_hooks()
                tenant.wait(waiting)
                cache._bases.settle_heads(tenant)

    # --- moves

    def _finish_moves(self) -> None:
        """Finish moves of nodes into detached trees if their parent is the new tree's root already, or undo them."""
        cache = self.cache
        for tree in [tree for tenant in self.tenants for tree in tenant.detached]:
            top = tree.root.children
            if isinstance(top, Node) and top.parent is not tree.root:
                tree.root.children = None
            for node in tree.nodes():
                node.tree = tree
        for sequence in cache._sequences:
            sequence._tree = cast(NamespaceTree, sequence._node.tree)
        for base in cache._bases.held():
            base.tree = cast(NamespaceTree, base.node.tree)

    # --- bases

    def _settle_bases(self) -> None:
        """Rebuild the bases' readers from the published bases. Trees behind other bases are cleared, and hold their
        base.
        """
        bases = self.cache._bases
        for tenant in self.tenants:
            tenant.settle_trees()
        behind = {tree for tenant in self.tenants for tree in tenant.trees.values() if tree.base is not None}
        for tree in behind:
            assert tree.base is not None
            if bases.published.get(tree.base.base_id) is not tree.base or not tree.base.is_for(tree):
                tree.tenant.detach(tree)
        behind |= self._used_trees()
        found: dict[Base, set[NamespaceTree]] = {base: set() for base in bases.published.values()}
        for tree in behind:
            if tree.base is not None:
                found.setdefault(tree.base, set()).add(tree)
        for base, trees in found.items():
            base.is_over = bases.published.get(base.base_id) is not base
            base.trees, base.is_held = trees, True
        bases.ended = {base for base in found if base.is_over}
        for tenant in self.tenants:
            tenant.bases = bases.readable_by(tenant.tenant_id)

    def _used_trees(self) -> set[NamespaceTree]:
        """Return the trees of sequences and leases, and those whose blocks such a tree continues."""
        pending = [sequence._tree for sequence in self.cache._sequences]
        pending += [cast(NamespaceTree, lease._node.tree) for lease in self.cache._leases if lease._node]
        found = set[NamespaceTree]()
        while pending:
            tree = pending.pop()
            if tree not in found:
                found.add(tree)
                if tree.base is not None:
                    pending.append(tree.base.tree)
        return found

    def _lease_bases(self) -> None:
        """Lease the blocks of each base that is published or has running sequences behind it."""
        used = self._used_trees()
        for base in self.cache._bases.held():
            base.is_held = not base.is_over or not used.isdisjoint(base.trees)
            base.node.uses += base.is_held

    # --- trees

    def _trees(self) -> list[NamespaceTree]:
        """Return all trees, including one that was being detached."""
        cache = self.cache
        found = [tree for tenant in self.tenants for tree in (*tenant.trees.values(), *tenant.detached)]
        found += [sequence._tree for sequence in cache._sequences]
        found += [cast(NamespaceTree, lease._node.tree) for lease in cache._leases if lease._node is not None]
        found += [base.tree for base in cache._bases.held()]
        return list(dict.fromkeys(found))

    def _relink(self, tree: NamespaceTree) -> None:
        first = len(self.nodes)
        tree.root.uses = 0
        pending = [tree.root]
        while pending:
            above = pending.pop()
            for node in above.child_nodes():
                if node.tree is not tree:
                    _unlink(above, node)
                    continue
                _finish(node, above, tree.block_bytes)
                self.home[unpack(node.block_ids)] = len(self.nodes)
                self.nodes.append(node)
                pending.append(node)
        tree._trimmed = None  # every label is complete
        tree.num_nodes = len(self.nodes) - first
        tree.num_blocks = sum(node.num_blocks for node in self.nodes[first:])

    def _forget_what_was_cleared(self, trees: list[NamespaceTree]) -> None:
        """Reduce cleared trees to what is in use, and forget empty trees."""
        for tree in trees:
            tree.detached = tree.tenant.trees.get(tree.place) is not tree
        for node in reversed(self.nodes):
            tree = cast(NamespaceTree, node.tree)
            if tree.detached and not node.uses:
                self.home[unpack(node.block_ids)] = -1
                tree.remove(node)
        self.nodes = [node for node in self.nodes if node.uses or not cast(NamespaceTree, node.tree).detached]
        for tree in trees:
            if tree.detached:
                tree.tenant.detached.add(tree)
            tree.tenant.drop_if_empty(tree)

    def _settle_sole_users(self) -> None:
        """Let what uses a node use its ancestors, where an interrupted call noted only a part of this."""
        users = {node.sole_user: None for node in self.nodes if node.sole_user is not None}
        for sequence in self.cache._sequences:
            node = sequence._node
            if node.sole_user is not None:
                node.sole_user = joined(node.sole_user, sequence._user)
        for node in reversed(self.nodes):
            above = node.parent
            if above is not None and above.sole_user is not None:
                above.sole_user = joined(above.sole_user, node.sole_user)
        for user in users:
            user.nodes = {}
        for node in self.nodes:
            if node.sole_user is not None:
                node.sole_user.nodes[node] = None

    # --- holders of blocks

    def _close_what_lost_its_node(self) -> None:
        """Close sequences and leases with a changed leased path.

        No step of any call causes this; it is a safeguard.
        """
        cache, linked = self.cache, set(self.nodes)
        linked.update(sequence._tree.root for sequence in cache._sequences)
        linked.update(lease._node.tree.root for lease in cache._leases if lease._node is not None)
        for sequence in list(cache._sequences):
            depth = sequence._num_committed // cache._config.block_size
            if sequence._node not in linked or sequence._node.depth != depth:
                _close(cache, sequence)
        for lease in list(cache._leases):
            if lease._node is not None and lease._node not in linked:
                lease._is_open = False
                cache._leases.discard(lease)

    def _keep_lent(self) -> None:
        """Keep blocks that are lent to the device charged to the tenant, if all sequences of the lending are there."""
        cache = self.cache
        for beams in list(cache._lendings):
            if cache._sequences.issuperset(beams.sequences):
                self.private_to[unpack(beams.block_ids)] = self.tenants.index(beams.tenant)
                self.num_private[beams.tenant] += len(beams.block_ids) // ID_BYTES
                continue
            for sequence in beams.sequences:
                _close(cache, sequence)
            cache._lendings.discard(beams)
            beams.end()

    def _share_blocks(self) -> None:
        """Rebuild the runs of all sequences. They are the edges of the tree that the sorted tables form."""
        number: dict[NamespaceTree, int] = {}
        for sequence in self.cache._sequences:
            number.setdefault(sequence._tree, len(number))
        running = sorted(self.cache._sequences, key=lambda each: (number[each._tree], bytes(each._table)))
        common = [_num_common(one, other) for one, other in pairwise(running)]
        pending: list[tuple[int, int, int, Run | None]] = [(0, len(running), 0, None)]
        while pending:
            low, high, at, run = pending.pop()
            if high - low < 2:
                if high > low:
                    self._settle(running[low], at, run)
                continue
            stop = min(common[low : high - 1])
            for start, end in self._stretches(running[low:high], at, stop):
                run = self._new_run(
                    run, start, running[low]._table[start * ID_BYTES : end * ID_BYTES], running[low]
                )
            cuts = [index + 1 for index in range(low, high - 1) if common[index] == stop]
            bounds = [low, *cuts, high]
            pending += [(begin, end, stop, run) for begin, end in pairwise(bounds)]

    def _settle(self, sequence: SequenceState, at: int, run: Run | None) -> None:
        """Set a sequence's blocks from position ``at`` on, which no other shares: own blocks at the end, runs before
        them.
        """
        own = size = sequence.num_blocks
        for start, stop in self._stretches([sequence], at, size):
            block_ids = sequence._table[start * ID_BYTES : stop * ID_BYTES]
            if stop == size and self._node_of(block_ids) is None:
                own = start
                self._own(block_ids, sequence)
            else:
                run = self._new_run(run, start, block_ids, sequence)
        if run is not None:
            run.owners += 1
        sequence._run, sequence._own = run, own

    def _stretches(self, family: list[SequenceState], at: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of ``[at, stop)`` that aren't on the leased path of the whole family.

        A range ends where residency begins or ends.
        """
        table = unpack(family[0]._table)[at:stop]
        is_resident = self.home[table] >= 0
        depth = min(sequence._node.depth for sequence in family)
        is_leased = is_resident & (np.arange(at, stop) < depth)
        kind = is_resident * 2 + is_leased
        cuts = (np.flatnonzero(np.diff(kind)) + 1).tolist()
        for start, end in zip([0, *cuts], [*cuts, len(table)], strict=True):
            if start < end and not is_leased[start]:
                yield at + start, at + end

    def _new_run(self, parent: Run | None, start: int, block_ids: bytearray, sequence: SequenceState) -> Run:
        run = Run(parent, start, block_ids)
        run.owners = 0
        run.node = self._node_of(block_ids)
        if run.node is None:
            self._own(block_ids, sequence)
        else:
            run.node.uses += 1
        if parent is not None:
            parent.owners += 1
        return run

    def _node_of(self, block_ids: bytearray) -> Node | None:
        """Return the node that has the last of these blocks; None if they are private."""
        index = int(self.home[unpack(block_ids)[-1]])
        return self.nodes[index] if index >= 0 else None

    def _own(self, block_ids: bytearray, sequence: SequenceState) -> None:
        self.private_to[unpack(block_ids)] = self.tenants.index(sequence._tree.tenant)
        self.num_private[sequence._tree.tenant] += len(block_ids) // ID_BYTES

    def _count_uses(self) -> None:
        """Count the uses of nodes. Leases of runs are counted already."""
        for sequence in self.cache._sequences:
            sequence._node.uses += 1
        for lease in self.cache._leases:
            if lease._node is not None:
                lease._node.uses += 1
        self._lease_bases()
        for node in reversed(self.nodes):
            if node.uses:
                assert node.parent is not None
                node.parent.uses += 1

    # --- copies that wait

    def _hold_for_copies(self) -> None:
        """Drop waiting copies into targets without an owner. If only the source has no owner, hold the source."""
        pool, is_owned = self.cache._pool, (self.home >= 0) | (self.private_to >= 0)
        targets = list(pool.copies.targets)
        pool.copies = pool.copies.without({target for target in targets if not is_owned[target]})
        sources = list(pool.copies.readers)
        pool.exposed = {block_id for block_id in (*sources, *targets) if self.home[block_id] >= 0}
        held = [source for source in sources if not is_owned[source]]
        pool.held = bytearray(np.array(held, np.int32).tobytes())

    # --- tenants

    def _count(self) -> None:
        nodes: dict[TenantState, list[Node]] = {tenant: [] for tenant in self.tenants}
        for node in self.nodes:
            nodes[cast(NamespaceTree, node.tree).tenant].append(node)
        for tenant, its_nodes in nodes.items():
            evictable = [node for node in its_nodes if not node.uses]
            num_used = sum(node.num_blocks for node in its_nodes)
            num_used += self.num_private[tenant]
            tenant.evictable_blocks = sum(node.num_blocks for node in evictable)
            tenant.protected_blocks = num_used - tenant.evictable_blocks
            reachable = [node for node in its_nodes if not cast(NamespaceTree, node.tree).detached]
            tenant.resident_blocks = sum(node.num_blocks for node in reachable)
            tenant.ranked_blocks, tenant.rank_entry = UNRANKED, UNRANKED
            self._renew_policy(tenant, its_nodes, evictable)
        evictor = self.cache._evictor
        evictor.evictable_blocks = sum(tenant.evictable_blocks for tenant in self.tenants)
        evictor.resident_blocks = sum(tenant.resident_blocks for tenant in self.tenants)
        evictor._ranking = Ranking(self.cache._tenants)
        evictor.settle_promises(list(self.cache._tenants.values()))

    def _renew_policy(self, tenant: TenantState, nodes: list[Node], evictable: list[Node]) -> None:
        """Give a tenant a new policy with its nodes, or ``lru`` if it can't have one of its own."""
        most = self.cache._config.num_blocks
        if not tenant.has_failed_policy:
            try:
                policy = self.cache._registry.new_policy(tenant.settings)
                tenant.follow(taken_over(policy, tenant.policy, nodes, evictable, most))
                return
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - otherwise the cache would be dead for all tenants
                tenant.note_failure("a repair", error)
        tenant.follow(taken_over(fallback(), tenant.policy, nodes, evictable, most))

    # --- the pool and the journal

    def _refill_pool(self) -> None:
        """Free all blocks that have no owner and that no waiting copy needs."""
        pool = self.cache._pool
        is_owned = (self.private_to >= 0) | (self.home >= 0)
        is_owned[unpack(pool.held)] = True
        pool.lent.keep_only(np.flatnonzero(~is_owned).astype(np.int32))
        is_owned[pool.lent.ids()] = True
        pool._free = _packed(~is_owned)

    def _tell_journal(self, trees: list[NamespaceTree]) -> None:
        journal, evictor = self.cache._journal, self.cache._evictor
        if journal is None:
            return
        for namespace in dict.fromkeys(tree.namespace for tree in trees):
            journal.cleared(namespace)
        for node in self.nodes:
            tree = cast(NamespaceTree, node.tree)
            start, stop = node.depth - node.num_blocks, evictor.reported_depth(node)
            if evictor.reports(tree, start, stop):
                evictor.report_stored(tree, tree.key_of(node), start, stop)


def _unlink(above: Node, moved: Node) -> None:
    """Remove a child that was moved to another tree."""
    beside = above.children
    if isinstance(beside, dict):
        above.children = {first: node for first, node in beside.items() if node is not moved} or None
    else:
        above.children = None


def _finish(node: Node, above: Node, block_bytes: int) -> None:
    """Finish a split or a growth that was interrupted, and rebuild what follows from the node's place.

    A split links the upper half before it cuts the lower half. So both may begin with the same blocks. A growth changes
    the label and the block ids one after the other. So the shorter of the two counts.
    """
    label, block_ids = node.label, node.block_ids
    if above.block_ids and block_ids.startswith(above.block_ids):
        block_ids = block_ids[len(above.block_ids) :]
        if len(label) // block_bytes > len(block_ids) // ID_BYTES:
            label = label[above.num_blocks * block_bytes :]
    num_blocks = min(len(label) // block_bytes, len(block_ids) // ID_BYTES)
    node.label, node.block_ids = label[: num_blocks * block_bytes], block_ids[: num_blocks * ID_BYTES]
    node.parent, node.depth, node.uses = above, above.depth + num_blocks, 0


def _num_common(one: SequenceState, other: SequenceState) -> int:
    """Return in how many leading blocks two tables agree; 0 if the sequences are in different trees."""
    if one._tree is not other._tree:  # they may share a base, but no blocks of their own
        return 0
    size = min(one.num_blocks, other.num_blocks)
    differs = unpack(one._table)[:size] != unpack(other._table)[:size]
    return int(differs.argmax()) if differs.any() else size


def _packed(mask: NDArray[np.bool_]) -> bytearray:
    """Return the packed ids of the blocks in a mask."""
    return bytearray(np.flatnonzero(mask).astype(np.int32).tobytes())
