"""Each bug is planted by a patch that exists only here, and the state machine finds it.

The first three matter most: a tenant left out of the tree lookup, a copy skipped on a shared tail, and blocks that
match before their KV is committed. Seeds are fixed, but another version of Hypothesis plays other lives. So a bug may
show any of its symptoms, and each entry lists them all. Failures are not shrunk.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv import PrefixCache
from radixkv.audit import properties
from radixkv.errors import QuotaExceeded
from radixkv.index import ahead, announcements, bases, device_beams, recovery, requests, sessions
from radixkv.index import cache as cache_module
from radixkv.index import registry as registry_module
from radixkv.index import tree as tree_module
from radixkv.index.blocks import BlockPool, WaitingCopies
from radixkv.index.eviction import Evictor
from radixkv.index.match import End
from radixkv.index.pins import Pins
from radixkv.index.registry import Registry
from radixkv.index.residency import Hooks, Waiting
from radixkv.index.runs import Runs
from radixkv.index.sequence import Sequence
from radixkv.index.tenants import TenantState
from radixkv.index.tree import RadixTree
from radixkv.storage.beams import DeviceBeams
from radixkv_kernels import reference
from radixkv_policies.lfu import LFU

pytestmark = pytest.mark.pure
EXAMPLES = 3000  # the rarest bug shows after about 900 lives, at worst seeds after 1,500
Patch = Callable[[pytest.MonkeyPatch], None]


class OracleAlone(properties.CacheMachine):
    """The machine without the audit: only the oracle finds bugs."""

    def laws(self) -> None:
        """Do nothing."""


class ObservationAlone(properties.TwoRuns):
    """Two runs without the laws: only A's observations find bugs."""

    def _check(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Bug:
    """A patch, and a pattern for the machine's message."""

    plant: Patch
    said: str
    machine: type[properties.CacheMachine] | type[properties.EngineMachine] | type[properties.TwoRuns] = (
        properties.CacheMachine
    )
    mode: str = "burst"
    policy: str | None = None


def _wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, self, *args)``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **named: around(original, self, *args, **named))


def tenant_left_out(patch: pytest.MonkeyPatch) -> None:
    """The tree is looked up by model, adapter and salt alone."""

    def lookup(self: Any, namespace: Any) -> Any:
        trees = (tree for state in self.tenants.values() for tree in state.trees.values())
        return next((tree for tree in trees if tree.namespace[1:] == namespace[1:]), None)

    patch.setattr(Registry, "tree", lookup)


def unframed_namespace(patch: pytest.MonkeyPatch) -> None:
    """The fields of a namespace are joined without frames, so adapter "s" and salt "s" are the same."""

    def lookup(self: Any, namespace: Any) -> Any:
        tenant = self.tenants.get(namespace.tenant)
        joined = "".join(str(field or "") for field in namespace)
        trees = tenant.trees.values() if tenant else ()
        return next(
            (tree for tree in trees if "".join(str(field or "") for field in tree.namespace) == joined), None
        )

    patch.setattr(Registry, "tree", lookup)


def old_weights_matched(patch: pytest.MonkeyPatch) -> None:
    """The version of the weights is left out of the lookup, so KV of old weights are matched."""

    def lookup(self: Any, namespace: Any) -> Any:
        tenant = self.tenants.get(namespace.tenant)
        trees = tenant.trees.values() if tenant else ()
        return next((tree for tree in trees if tree.namespace[:4] == namespace[:4]), None)

    patch.setattr(Registry, "tree", lookup)


def copy_skipped(patch: pytest.MonkeyPatch) -> None:
    """A shared tail gets a new block, and its rows are never copied."""
    patch.setattr(WaitingCopies, "add", lambda self, source, target, num_rows: None)


def source_not_held(patch: pytest.MonkeyPatch) -> None:
    """The source of a waiting copy is free as soon as its owner releases it."""

    def hold(self: Any, freed: bytes) -> bytes:
        for block_id in np.frombuffer(freed, np.int32).tolist():
            self.copies.cancel(block_id)
        return freed

    patch.setattr(BlockPool, "_hold", hold)


def held_on_an_account(patch: pytest.MonkeyPatch) -> None:
    """The source of a waiting copy counts as its tenant's until another request has the plan fetched."""
    owed: list[tuple[Any, Any, int]] = []

    def give(self: Any, block_ids: bytes, tenant: Any) -> None:
        before = len(self._pool.held)
        self._pool.give(block_ids)
        held = max(len(self._pool.held) - before, 0) // 4
        self._discharge(tenant, len(block_ids) // 4 - held)
        owed.append((self, tenant, held))

    def settle(original: Any, self: Any) -> None:
        original(self)
        for evictor, tenant, held in [each for each in owed if each[0]._pool is self]:
            evictor._discharge(tenant, held)
        owed[:] = [each for each in owed if each[0]._pool is not self]

    patch.setattr(Evictor, "give", give)
    _wrap(patch, BlockPool, "settle", settle)


def written_in_place(patch: pytest.MonkeyPatch) -> None:
    """A shared tail counts as writable, so a fork writes into its parent's block."""
    patch.setattr(Runs, "_count_copies", lambda self, sequences: 0)
    _wrap(patch, Runs, "grow", _as_if_owned)


def _as_if_owned(original: Any, self: Any, sequences: Any, keys: Any) -> None:
    tails = {sequence._run: sequence._run.owners for sequence in sequences if sequence._run is not None}
    for run in tails:
        run.owners = 1
    try:
        original(self, sequences, keys)
    finally:
        for run, owners in tails.items():
            run.owners = owners


def one_row_short(patch: pytest.MonkeyPatch) -> None:
    """A copy leaves out the last valid row."""

    def short(original: Any, self: Any, sequence: Any, tail: Any, fresh: bytes, rows: int) -> None:
        original(self, sequence, tail, fresh, max(rows - 1, 1))

    _wrap(patch, Runs, "_copy_on_write", short)


def committed_when_opened(patch: pytest.MonkeyPatch) -> None:
    """Blocks match as soon as they are allocated, before they are computed."""

    def eager(original: Any, self: Any, *args: Any, **named: Any) -> Any:
        sequence = original(self, *args, **named)
        new = sequence.num_tokens // self._block_size
        state = sequence._state
        if new > state._node.depth:
            requests._store(self, state, state._node, new)
        return sequence

    _wrap(patch, PrefixCache, "open", eager)


def commit_rounds_up(patch: pytest.MonkeyPatch) -> None:
    """A commit that ends inside a block makes the whole block matchable."""

    def rounded(original: Any, self: Any, sequence: Any, node: Any, new: int) -> None:
        full = sequence.num_tokens // self._block_size
        original(self, sequence, node, min(new + 1, full))

    _wrap(patch, requests, "_store", rounded)


def lease_stops_at_its_node(patch: pytest.MonkeyPatch) -> None:
    """A lease does not reach the ancestors: the parent of a leased node counts as unused."""

    def shallow(original: Any, self: Any, node: Any, tree: Any) -> None:
        parent = node.parent
        if parent is not None and not parent.uses:
            parent.uses = -1
            original(self, node, tree)
            parent.uses = 0
        else:
            original(self, node, tree)

    _wrap(patch, Evictor, "lease", shallow)


def split_forgets_uses(patch: pytest.MonkeyPatch) -> None:
    """The upper half of a split leased node counts as unused, which truncates its lease."""

    def forgetful(original: Any, self: Any, lower: Any, at: int) -> Any:
        upper = original(self, lower, at)
        upper.uses = 0
        return upper

    _wrap(patch, RadixTree, "split", forgetful)


def freed_twice(patch: pytest.MonkeyPatch) -> None:
    """A sequence's private blocks go to the free list twice."""

    def twice(original: Any, self: Any, block_ids: Any, tenant: Any) -> None:
        original(self, block_ids, tenant)
        original(self, block_ids, tenant)

    _wrap(patch, Evictor, "give", twice)


def never_freed(patch: pytest.MonkeyPatch) -> None:
    """A released sequence's private blocks are lost."""

    patch.setattr(Evictor, "give", lambda self, block_ids, tenant: None)


def shared_run_never_freed(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a run are lost when its last owner ends."""

    def lost(original: Any, self: Any, run: Any, *args: Any) -> None:
        run.owners -= 1

    _wrap(patch, Runs, "drop", lost)


def lease_kept(patch: pytest.MonkeyPatch) -> None:
    """A released sequence keeps its lease."""

    def leaky(self: Any, sequence: Any) -> None:
        sequence._is_open = False
        self._sequences.discard(sequence)
        self._runs.let_go(sequence)

    patch.setattr(requests, "release", leaky)


def whole_prompt_cached(patch: pytest.MonkeyPatch) -> None:
    """``open`` uses every matched block and leaves no token to compute."""

    def greedy(original: Any, self: Any, key: bytes, stop: int, *args: Any) -> Any:
        return original(self, key, stop + 1 if stop == len(key) - 1 else stop, *args)

    _wrap(patch, RadixTree, "walk", greedy)


def compared_by_first_id(patch: pytest.MonkeyPatch) -> None:
    """A label matches over its whole length, without a look at its ids.

    This is the effect of trusting a short digest.
    """

    def common(label: bytes, key: bytes, at: int, stop: int, step: int) -> int:
        size = min(len(label), stop - at)
        return size - size % step

    patch.setattr(tree_module, "num_common_bytes", common)


def cleared_still_matches(patch: pytest.MonkeyPatch) -> None:
    """Running sequences of a cleared namespace commit into the tree that is matched."""

    def half(self: Any, tree: Any) -> None:
        self.detached.discard(tree)

    patch.setattr(TenantState, "detach", half)


def append_half_done(patch: pytest.MonkeyPatch) -> None:
    """A batch that runs out of blocks keeps the blocks of its first sequences."""

    def one_by_one(original: Any, self: Any, sequences: Any, keys: Any) -> list[Any]:
        pairs = zip(sequences, keys, strict=True)
        return [copied for sequence, key in pairs for copied in original(self, [sequence], [key])]

    _wrap(patch, Runs, "grow", one_by_one)


def truncate_keeps_blocks(patch: pytest.MonkeyPatch) -> None:
    """A rollback removes the ids but keeps the blocks."""
    patch.setattr(Runs, "cut", lambda self, sequence, keep: None)


def shared_run_adopted(patch: pytest.MonkeyPatch) -> None:
    """A commit takes blocks out of a shared run as if it were not shared."""

    def sole(original: Any, self: Any, sequence: Any, *args: Any) -> None:
        runs, run = {}, sequence._run
        while run is not None:
            runs[run] = run.owners
            run.owners, run = 1, run.parent
        original(self, sequence, *args)
        for run, owners in runs.items():
            run.owners = owners

    _wrap(patch, Runs, "adopt", sole)


def stale_match_leased(patch: pytest.MonkeyPatch) -> None:
    """A lease trusts a match's length and ignores its block ids."""

    def trusting(self: Any, match: Any) -> Any:
        fresh = self.match(match.namespace, match._key)
        return real(self, fresh)

    real = PrefixCache.lease
    patch.setattr(PrefixCache, "lease", trusting)


def block_ids_shown(patch: pytest.MonkeyPatch) -> None:
    """The repr of a sequence shows the pool's id of its first block."""

    def named(original: Any, self: Any) -> str:
        return f"{original(self)} at block {self.block_table[:1].tolist()}"

    _wrap(patch, Sequence, "__repr__", named)


def gauge_without_a_label(patch: pytest.MonkeyPatch) -> None:
    """A tenant's count of requests includes all tenants."""

    def summed(original: Any, self: Any, tenant: str) -> Any:
        return replace(original(self, tenant), requests=self.stats().requests)

    _wrap(patch, PrefixCache, "tenant_stats", summed)


def split_loses_the_namespace(patch: pytest.MonkeyPatch) -> None:
    """The upper half of a split can also be found from the root of the last used namespace."""
    used: list[Any] = []

    def leased(original: Any, self: Any, node: Any, tree: Any) -> None:
        original(self, node, tree)
        used[:] = [*(each for each in used[-8:] if each is not tree), tree]

    def lost(original: Any, self: Any, child: Any, at: int, tree: Any) -> Any:
        upper = original(self, child, at, tree)
        clock, first = tree.tenant.policy._clock, upper.label[: tree.block_bytes]
        others = [each for each in used if each.tenant.policy._clock is clock and each is not tree]
        for other in others[-1:]:
            there = {child.label[: tree.block_bytes]: child for child in other.root.child_nodes()}
            other.root.children = {first: upper} | there
        return upper

    _wrap(patch, Evictor, "lease", leased)
    _wrap(patch, Evictor, "split", lost)


def purge_leaves_what_runs(patch: pytest.MonkeyPatch) -> None:
    """A purge skips trees that running sequences lease, so they still match."""

    def passing(original: Any, self: Any, tenant: str) -> int:
        state = self._tenants.get(tenant)
        running = [tree for tree in state.trees.values() if tree.root.uses] if state else []
        forgotten = int(original(self, tenant))
        for tree in running:
            tree.detached = False
            state.detached.discard(tree)
            state.trees[tree.place] = tree
        return forgotten

    _wrap(patch, PrefixCache, "purge", passing)


def global_recency(patch: pytest.MonkeyPatch) -> None:
    """The longest idle tenant loses blocks, whichever tenant's limit is reached."""
    order: list[Any] = []

    def leased(original: Any, self: Any, node: Any, tree: Any) -> None:
        original(self, node, tree)
        order[:] = [each for each in order if each is not tree.tenant] + [tree.tenant]

    def evicted(original: Any, self: Any, tenant: Any, size: int, freed: bytearray) -> None:
        mine = [each for each in order if each.policy._clock is tenant.policy._clock]
        mine = [
            each
            for each in mine
            if 4 * each.evictable_blocks >= size and self._ranking._tenants.get(each.tenant_id) is each
        ]
        original(self, mine[0] if mine else tenant, size, freed)

    _wrap(patch, Evictor, "lease", leased)
    _wrap(patch, Evictor, "_evict_from", evicted)


def capacity_of_others_reported(patch: pytest.MonkeyPatch) -> None:
    """A refusal reports how much of the pool is used."""

    def reporting(original: Any, self: Any, *args: Any, **named: Any) -> int:
        try:
            return int(original(self, *args, **named))
        except QuotaExceeded as error:
            used = self._pool.num_blocks - self._pool.num_free
            raise QuotaExceeded(error.needed, error.limit, used, error.evictable) from None

    _wrap(patch, Evictor, "require", reporting)


def ghosts_shared(patch: pytest.MonkeyPatch) -> None:
    """The ghosts of all tenants are in one bounded list."""
    _shared(patch, "_ghosts")


def ages_shared(patch: pytest.MonkeyPatch) -> None:
    """All tenants of a cache share one age of the frequencies."""

    def age(self: Any) -> int:
        return getattr(self._cache, "shared_age", 0)

    def raised(self: Any, to: int) -> None:
        self._cache.shared_age = max(age(self), to)

    patch.setattr(LFU, "_age", property(age, raised), raising=False)
    _shared(patch, None)


def _shared(patch: pytest.MonkeyPatch, state: str | None) -> None:
    """All policies of a cache share the first policy's attribute ``state``. With None they share the cache."""
    caches: dict[Any, SimpleNamespace] = {}

    def made(original: Any, self: Any, settings: Any) -> Any:
        cache = caches.setdefault(self, SimpleNamespace())
        if state is None:
            patch.setattr(LFU, "_cache", cache, raising=False)
        policy = original(self, settings)
        if state is None:
            policy._cache = cache
        else:
            first = next(iter(self.tenants.values()), None)
            if first is not None:
                setattr(policy, state, getattr(first.policy, state))
        return policy

    _wrap(patch, Registry, "new_policy", made)


def pin_without_lease(patch: pytest.MonkeyPatch) -> None:
    """A pin is recorded, but its lease is released."""

    def noted(original: Any, self: Any, lease: Any, ttl_s: float) -> Any:
        pin = original(self, lease, ttl_s)
        self._evictor.release(lease._node, lease._node.tree)
        return pin

    _wrap(patch, Pins, "hold", noted)


def budget_shared(patch: pytest.MonkeyPatch) -> None:
    """Other tenants' pins count against a tenant's budget."""

    def shared(
        original: Any, self: Any, match: Any, tokens: int, ttl_s: float, budget: int, limit: int
    ) -> Any:
        others = self.num_blocks() - self.num_blocks(match.namespace.tenant)
        return original(self, match, tokens, ttl_s, budget - others, limit)

    _wrap(patch, Pins, "renew", shared)


def pins_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A tenant may have any number of pins."""

    def unbounded(original: Any, self: Any, *args: Any) -> Any:
        return original(self, *args[:-1], 2**31)

    _wrap(patch, Pins, "renew", unbounded)


def pin_limit_shared(patch: pytest.MonkeyPatch) -> None:
    """Other tenants' pins count against a tenant's number of pins."""

    def shared(original: Any, self: Any, match: Any, *args: Any) -> Any:
        others = self.num_pins() - self.num_pins(match.namespace.tenant)
        return original(self, match, *args[:-1], args[-1] - others)

    _wrap(patch, Pins, "renew", shared)


def base_for_everybody(patch: pytest.MonkeyPatch) -> None:
    """Tenants that are not on its list can read a base."""

    def readable(original: Any, self: Any, tenant: str) -> Any:
        found: dict[Any, Any] = {}
        for reader in ("a", "b"):
            found |= original(self, reader) or {}
        return found or None

    _wrap(patch, bases.Bases, "readable_by", readable)

    def show(original: Any, self: Any, base: Any, _: Any, tenants: Any) -> None:
        for tenant in tenants.values():
            tenant.bases = self.readable_by(tenant.tenant_id)

    _wrap(patch, bases.Bases, "show", show)


def base_of_another_adapter(patch: pytest.MonkeyPatch) -> None:
    """The adapter and the version of the weights are left out of the lookup of bases."""

    def readable(original: Any, self: Any, tenant: str) -> Any:
        found = original(self, tenant) or {}
        return {
            (model, other, first): its
            for (model, _, first), its in found.items()
            for other in ((None, 0), (None, 1), ("s", 0))
        }

    _wrap(patch, bases.Bases, "readable_by", readable)


def readers_share_what_follows(patch: pytest.MonkeyPatch) -> None:
    """All readers share one tree behind a base."""
    original, behind = bases.longest, {}  # type: ignore[var-annotated]

    def longest(*args: Any) -> Any:
        found = original(*args)
        if found is None or found.base is None:
            return found
        place = (found.base, len(found.head_key))
        if place not in behind or behind[place].detached:
            behind[place] = found
        return behind[place]

    patch.setattr(registry_module, "longest", longest)


def unpublished_and_still_read(patch: pytest.MonkeyPatch) -> None:
    """Former readers of a base still find it."""

    def show(original: Any, self: Any, base: Any, readers: Any, tenants: Any) -> None:
        if not base.is_over:
            original(self, base, readers, tenants)

    _wrap(patch, bases.Bases, "show", show)


def read_counts_reported(patch: pytest.MonkeyPatch) -> None:
    """A reader's counts show how many trees are behind a base, including other readers' trees."""

    def reporting(original: Any, self: Any, tenant: str) -> Any:
        seen = original(self, tenant)
        used = sum(len(base.trees) for base in self._bases.published.values() if tenant in base.readers)
        return replace(seen, num_namespaces=seen.num_namespaces + used)

    _wrap(patch, PrefixCache, "tenant_stats", reporting)


def reconcile_forgets_an_owner(patch: pytest.MonkeyPatch) -> None:
    """A run that returning beams share counts one owner too few."""
    original = device_beams._share

    def share(family: list[Any], rows: Any, at: int) -> None:
        original(family, rows, at)
        run = family[0]._run
        if run is not None and run.owners > 1:
            run.owners -= 1

    patch.setattr(device_beams, "_share", share)


def reconcile_loses_blocks(patch: pytest.MonkeyPatch) -> None:
    """Lent blocks that no beam took do not come back."""
    original = device_beams._take_back

    def lossy(cache: Any, beams: Any, reading: Any) -> None:
        given = cache._evictor.give
        patch.setattr(Evictor, "give", lambda self, ids, tenant: self._discharge(tenant, len(ids) // 4))
        original(cache, beams, reading)
        patch.setattr(Evictor, "give", given.__func__)

    patch.setattr(device_beams, "_take_back", lossy)


def reconcile_mistakes_the_ancestor(patch: pytest.MonkeyPatch) -> None:
    """A beam that comes back continues itself, not its real ancestor."""
    original = DeviceBeams.read

    def read(self: Any) -> Any:
        reading = original(self)
        return reading._replace(origins=list(range(len(reading.origins))))

    patch.setattr(DeviceBeams, "read", read)


def shared_blocks_lent(patch: pytest.MonkeyPatch) -> None:
    """The device treats blocks as the beams' own although other sequences share them."""

    def all_of_them(sequences: Any) -> Any:
        return np.concatenate([sequence.block_table for sequence in sequences])

    patch.setattr(device_beams, "_private_blocks", all_of_them)


def beam_copies_skipped(patch: pytest.MonkeyPatch) -> None:
    """A beam step on the device takes a block for a tail but copies nothing into it."""
    patch.setattr(reference, "fork_blocks", lambda *_: None)


def lent_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """Blocks are lent to the device but charged to no tenant."""
    original = device_beams._begin

    def begin(cache: Any, *args: Any) -> Any:
        beams, private = original(cache, *args)
        cache._evictor._discharge(beams.tenant, len(beams.block_ids) // 4)
        return beams, private

    patch.setattr(device_beams, "_begin", begin)


def lent_and_still_used(patch: pytest.MonkeyPatch) -> None:
    """A lent sequence can still append and commit."""

    def begin(original: Any, *args: Any) -> Any:
        beams, private = original(*args)
        for sequence in beams.sequences:
            sequence._is_open = True
        return beams, private

    original = device_beams._begin
    patch.setattr(device_beams, "_begin", lambda *args: begin(original, *args))


def dropped_room_lost(patch: pytest.MonkeyPatch) -> None:
    """Reserved room that is dropped leaves the block table, and its blocks are never freed."""

    def lost(original: Any, cache: Any, sequence: Any, num_tokens: int) -> None:
        if sequence._reserved:
            del sequence._table[-(-num_tokens // cache._block_size) * 4 :]
        else:
            original(cache, sequence, num_tokens)

    _wrap(patch, requests, "_cut", lost)


def released_room_lost(patch: pytest.MonkeyPatch) -> None:
    """A release forgets the blocks of reserved room."""

    def release(original: Any, cache: Any, sequence: Any) -> None:
        del sequence._table[-(-sequence.num_tokens // cache._block_size) * 4 :]
        original(cache, sequence)

    _wrap(patch, requests, "release", release)


def reserved_room_committed(patch: pytest.MonkeyPatch) -> None:
    """A commit covers reserved room, as if it had ids."""

    def commit(original: Any, cache: Any, sequence: Any, num_tokens: Any) -> None:
        if num_tokens > sequence.num_tokens:
            requests.fill(sequence, bytes(4 * min(num_tokens - sequence.num_tokens, sequence._reserved)))
        original(cache, sequence, num_tokens)

    _wrap(patch, requests, "commit", commit)


def appended_beside_the_room(patch: pytest.MonkeyPatch) -> None:
    """``extend`` takes new blocks although there is reserved room."""

    def extend(original: Any, cache: Any, sequence: Any, key: bytes) -> None:
        if sequence._reserved:
            requests._cut(cache, sequence, sequence.num_tokens)
        original(cache, sequence, key)

    _wrap(patch, requests, "extend", extend)


def resident_count_drifts(patch: pytest.MonkeyPatch) -> None:
    """The count of resident blocks isn't lowered at an eviction."""

    def count(original: Any, self: Any, tenant: Any, num_blocks: int) -> None:
        original(self, tenant, max(num_blocks, 0))

    _wrap(patch, Evictor, "count_resident", count)


def total_count_drifts(patch: pytest.MonkeyPatch) -> None:
    """The count of all tenants' resident blocks isn't lowered at an eviction; each tenant's own is right."""

    def count(original: Any, self: Any, tenant: Any, num_blocks: int) -> None:
        original(self, tenant, num_blocks)
        self.resident_blocks -= min(num_blocks, 0)

    _wrap(patch, Evictor, "count_resident", count)


def surplus_unowned(patch: pytest.MonkeyPatch) -> None:
    """Blocks that an insert didn't take are no longer lent."""

    def insert(original: Any, cache: Any, *args: Any) -> None:
        original(cache, *args)
        lent, surplus = cache._pool.lent, np.frombuffer(args[-1].surplus, np.int32).tolist()
        lent.remove([block for block in surplus if block not in lent.missing(surplus)])

    _wrap(patch, requests, "insert", insert)


def surplus_taken(patch: pytest.MonkeyPatch) -> None:
    """An insert frees the blocks that it didn't take, instead of leaving them to the engine."""

    def insert(original: Any, cache: Any, *args: Any) -> None:
        original(cache, *args)
        lent, surplus = cache._pool.lent, np.frombuffer(args[-1].surplus, np.int32)
        if len(surplus) and not lent.missing(surplus.tolist()):
            cache._pool.give_back(surplus)

    _wrap(patch, requests, "insert", insert)


def insert_without_its_lease(patch: pytest.MonkeyPatch) -> None:
    """The lease of an insert is recorded, but holds nothing."""

    def insert(original: Any, cache: Any, *args: Any) -> None:
        original(cache, *args)
        lease = args[-1].lease
        if lease is not None and lease._node is not None:
            cache._evictor.release(lease._node, lease.tree)

    _wrap(patch, requests, "insert", insert)


def lookup_all_the_same(patch: pytest.MonkeyPatch) -> None:
    """``open(lookup=False)`` still finds what is resident."""
    _wrap(patch, requests, "open_sequence", lambda original, *args: original(*args[:6], True))


def uncounted_lookup(patch: pytest.MonkeyPatch) -> None:
    """``open(lookup=False)`` counts its tokens as missed."""

    def opened(original: Any, *args: Any) -> Any:
        sequence = original(*args)
        if not args[-1]:
            sequence._tree.tenant.missed_tokens += sequence.num_tokens
        return sequence

    _wrap(patch, requests, "open_sequence", opened)


def ends_of_one_length_equal(patch: pytest.MonkeyPatch) -> None:
    """Ends of the same number of tokens in one namespace are equal."""

    def equal(original: Any, self: Any, other: Any) -> bool:
        return len(self._key) == len(other._key) and self.namespace == other.namespace

    _wrap(patch, End, "__eq__", equal)


def reclaimed_ids_lost(patch: pytest.MonkeyPatch) -> None:
    """A reclaim of several blocks loses one."""

    def lossy(original: Any, self: Any, start: int, table: bytearray) -> None:
        at = len(table)
        original(self, start, table)
        if len(table) > at + 4:
            del table[-4:]

    _wrap(patch, BlockPool, "lend_freed", lossy)


def reclaimed_and_still_matched(patch: pytest.MonkeyPatch) -> None:
    """A reclaim hands out blocks of a leaf, and leaves them in the tree."""

    def reclaim(original: Any, cache: Any, num_blocks: int, tenant: Any, taken: bytearray) -> bool:
        if num_blocks and not cache._pool.num_free and cache._evictor.evictable_blocks:
            leaf = max((state.policy for state in cache._tenants.values()), key=len).victim()
            taken += leaf.block_ids
            return False
        return bool(original(cache, num_blocks, tenant, taken))

    _wrap(patch, requests, "reclaim", reclaim)


def evictions_of_an_insert_kept(patch: pytest.MonkeyPatch) -> None:
    """An insert doesn't report the blocks that it evicted."""
    _wrap(
        patch,
        BlockPool,
        "lend_freed",
        lambda original, self, start, table: (
            None if start or not self.num_free else original(self, start, table)
        ),
    )


def failed_step_matched(patch: pytest.MonkeyPatch) -> None:
    """A step that failed commits like one that is done."""
    patch.setattr(cache_module, "step_failed", lambda cache, step: ahead.step_done(cache, step) and 0)


def leaning_not_cut(patch: pytest.MonkeyPatch) -> None:
    """Sequences keep the blocks that a failed step was to compute for them."""

    def failed(cache: Any, step: int) -> int:
        for sequence in cache._steps.pop(step, {}):
            requests.keep_ahead(cache, sequence, [])
        return 0

    patch.setattr(cache_module, "step_failed", failed)


def offered_and_matched(patch: pytest.MonkeyPatch) -> None:
    """What a step computes is committed when the step is scheduled."""
    patch.setattr(
        ahead, "computing", lambda cache, sequence, end, step: requests.commit(cache, sequence, end)
    )


def offered_to_other_prompts(patch: pytest.MonkeyPatch) -> None:
    """An offer isn't compared with the prompt that leans on it."""
    patch.setattr(ahead, "num_common_bytes", lambda offered, key, at, stop, size: len(offered))


def offered_to_other_tenants(patch: pytest.MonkeyPatch) -> None:
    """An offer counts in every tree that matches as much."""

    def offer(original: Any, cache: Any, place: Any, key: bytes) -> Any:
        node = place.node
        for each in cache._computing:
            if each._node.depth == node.depth:
                place.node = each._node
                owner, stop = original(cache, place, key)
                place.node = node
                if owner is not None:
                    return owner, stop
        return original(cache, place, key)

    original = ahead._offer
    patch.setattr(ahead, "_offer", lambda *args: offer(original, *args))


def committed_before_its_step(patch: pytest.MonkeyPatch) -> None:
    """A sequence may commit what another one's step has yet to compute."""

    def passed(cache: Any, sequence: Any, num_tokens: int) -> None:
        requests.keep_ahead(cache, sequence, [each for each in sequence._ahead if each.end > num_tokens])

    patch.setattr(requests, "_pass_ahead", passed)


def fence_ignored(patch: pytest.MonkeyPatch) -> None:
    """A sequence that waits for a fence gives up its private blocks at once."""

    def released(original: Any, cache: Any, sequence: Any, fence: Any) -> None:
        original(cache, sequence, fence)
        cache._runs.let_go(sequence)

    _wrap(patch, requests, "release_after", released)


def eviction_not_told(patch: pytest.MonkeyPatch) -> None:
    """A waiting request isn't told when blocks of its prompt are trimmed."""
    patch.setattr(Hooks, "trimmed", lambda self, leaf: None)


def waits_in_every_tree(patch: pytest.MonkeyPatch) -> None:
    """A waiting request is told what is resident for any tenant."""

    def hook(original: Any, cache: Any, waiting: Any, claim: Any) -> None:
        original(cache, waiting, claim)
        for tenant in cache._tenants.values():
            for tree in tenant.trees.values():
                if tree.namespace != claim.namespace and tree.namespace[1:] == claim.namespace[1:]:
                    waiting.set_head(claim, tree.walk(claim.key, claim.size, bytearray())[1])

    original = announcements._hook
    patch.setattr(announcements, "_hook", lambda *args: hook(original, *args))


def waiting_protects(patch: pytest.MonkeyPatch) -> None:
    """An announcement leases what is resident."""

    def add(original: Any, self: Any, claim: Any) -> None:
        original(self, claim)
        for hook in claim.hooks:
            claim._cache._evictor.lease(hook.node, hook.node.tree)

    _wrap(patch, Waiting, "add", add)


def use_of_others_not_noted(patch: pytest.MonkeyPatch) -> None:
    """A session keeps the blocks as its own that another request uses."""
    patch.setattr(requests, "note_use", lambda node, user: [])


def sessions_named_together(patch: pytest.MonkeyPatch) -> None:
    """The names of sessions count those of all tenants."""

    def name(original: Any, cache: Any, namespace: Any) -> Any:
        original(cache, namespace)
        return f"session {sum(tenant.num_sessions for tenant in cache._tenants.values())}"

    original = sessions._next_name
    patch.setattr(sessions, "_next_name", lambda *args: name(original, *args))


_WRONG = "never committed|other KV|A observes|A is served|counts, names or bytes"
_WRONG_LOOKUP = "another namespace|never committed|forgotten|wrong KV|cleared|free and evictable are"

BUGS = {
    "base for everybody": Bug(base_for_everybody, _WRONG, ObservationAlone),
    "base of another adapter": Bug(base_of_another_adapter, _WRONG, ObservationAlone),
    "readers share what follows": Bug(
        readers_share_what_follows,
        "one-namespace|session of another namespace|" + _WRONG,
        properties.TwoRuns,
    ),
    "unpublished and still read": Bug(unpublished_and_still_read, _WRONG, ObservationAlone),
    "read counts told": Bug(read_counts_reported, "counts, names or bytes", ObservationAlone, "strict"),
    "pin without a lease": Bug(pin_without_lease, "leases|pinned"),
    "one budget for the pins of all": Bug(
        budget_shared, "A observes|counts, pins", ObservationAlone, "strict", "lru"
    ),
    "pins not counted": Bug(pins_not_counted, "beyond the 2 pins"),
    "one limit of pins for all": Bug(
        pin_limit_shared, "A observes|counts, pins", ObservationAlone, "strict", "lru"
    ),
    "global recency order": Bug(
        global_recency, "A observes|counts, names or bytes", ObservationAlone, "strict", "lru"
    ),
    "capacity of others in an error": Bug(
        capacity_of_others_reported, "A observes", ObservationAlone, "strict", "lru"
    ),
    "shared ghosts": Bug(
        ghosts_shared, "A observes|counts, names or bytes", ObservationAlone, "strict", "s3fifo"
    ),
    "shared frequency ages": Bug(
        ages_shared, "A observes|counts, names or bytes", ObservationAlone, "strict", "lfu"
    ),
    "tenant left out of the lookup": Bug(tenant_left_out, _WRONG_LOOKUP),
    "tenant left out, oracle alone": Bug(tenant_left_out, _WRONG_LOOKUP, OracleAlone),
    "tenant left out, two runs": Bug(tenant_left_out, f"{_WRONG}|namespace|depends on B", properties.TwoRuns),
    "copy skipped": Bug(copy_skipped, "wrong KV|copies"),
    "copy skipped, oracle alone": Bug(copy_skipped, "wrong KV|copies", OracleAlone),
    "source not held": Bug(source_not_held, "wrong KV|depend on each other|conservation"),
    "held on an account": Bug(
        held_on_an_account, "A observes|counts, names or bytes", ObservationAlone, "strict"
    ),
    "fork writes into its parent's block": Bug(
        written_in_place, "reference-counts|copies|wrong KV|shared|to unpack"
    ),
    "commit before compute": Bug(committed_when_opened, "committed"),
    "commit before compute, oracle alone": Bug(
        committed_when_opened,
        "never committed|forgotten",
        OracleAlone,
    ),
    "commit rounds up": Bug(commit_rounds_up, "committed"),
    "unframed namespace": Bug(unframed_namespace, "another namespace|never committed|forgotten|cleared"),
    "an old weights version matched": Bug(old_weights_matched, _WRONG_LOOKUP),
    "an old weights version matched, oracle alone": Bug(old_weights_matched, _WRONG_LOOKUP, OracleAlone),
    "one row short": Bug(one_row_short, "wrong KV"),
    "lease stops at its node": Bug(lease_stops_at_its_node, "leases"),
    "split forgets uses": Bug(split_forgets_uses, "leases|KeyError"),
    "freed twice": Bug(freed_twice, "conservation"),
    "never freed": Bug(never_freed, "conservation"),
    "shared run never freed": Bug(shared_run_never_freed, "conservation|leases"),
    "lease kept": Bug(lease_kept, "leases"),
    "whole prompt cached": Bug(whole_prompt_cached, "cached"),
    "block ids shown": Bug(block_ids_shown, "A observes|counts, names or bytes", ObservationAlone),
    "gauge without a label": Bug(
        gauge_without_a_label, "A observes|counts, names or bytes", ObservationAlone
    ),
    "gauge without a label, strict": Bug(
        gauge_without_a_label, "A observes|counts, names or bytes", ObservationAlone, "strict"
    ),
    "split loses the namespace": Bug(split_loses_the_namespace, "siblings|never committed|wrong KV"),
    "purge leaves what runs": Bug(
        purge_leaves_what_runs, "never committed|A observes|counts", ObservationAlone
    ),
    "truncated digest trusted": Bug(compared_by_first_id, "never committed|forgotten|wrong KV"),
    "cleared still matches": Bug(cleared_still_matches, "cleared|never committed|usage"),
    "append half done": Bug(append_half_done, "changed by a call|but the facts"),
    "truncate keeps blocks": Bug(truncate_keeps_blocks, "tables|blocks"),
    "shared run adopted": Bug(shared_run_adopted, "tables|reference-counts|wrong KV"),
    "reconcile forgets an owner": Bug(reconcile_forgets_an_owner, "reference-counts", properties.BeamMachine),
    "reconcile loses blocks": Bug(reconcile_loses_blocks, "conservation", properties.BeamMachine),
    "reconcile mistakes the ancestor": Bug(
        reconcile_mistakes_the_ancestor,
        "doesn't continue|other token ids|records of lent beams",
        properties.BeamMachine,
    ),
    "shared blocks lent": Bug(shared_blocks_lent, "wrong KV|records of lent beams", properties.BeamMachine),
    "beam copies skipped": Bug(beam_copies_skipped, "wrong KV", properties.BeamMachine),
    "lent for nothing": Bug(lent_for_nothing, "usage", properties.BeamMachine),
    "lent and still used": Bug(
        lent_and_still_used, "lendings|SequenceLent|Lent|of Mirror", properties.BeamMachine
    ),
    "dropped room lost": Bug(dropped_room_lost, "conservation|tables|aren't free"),
    "released room lost": Bug(released_room_lost, "conservation"),
    "reserved room committed": Bug(
        reserved_room_committed,
        "ArgumentError was expected|reserved|committed|other token ids|changed by a call",
    ),
    "appended beside the room": Bug(
        appended_beside_the_room, "tables|blocks|became|conservation|of Mirror|changed by a call"
    ),
    "resident count drifts": Bug(resident_count_drifts, "usage|in O|resident_blocks"),
    "total count drifts": Bug(total_count_drifts, "in O"),
    "surplus unowned": Bug(surplus_unowned, "conservation|isn't the engine's|has other blocks"),
    "surplus taken": Bug(surplus_taken, "isn't the engine's|conservation|are lent"),
    "surplus taken, engine's blocks": Bug(
        surplus_taken, "has other blocks than it knows|left them to a reclaim", properties.EngineMachine
    ),
    "insert without its lease": Bug(insert_without_its_lease, "leases"),
    "lookup all the same": Bug(
        lookup_all_the_same, "cached, 0 were matched|free and evictable are|TenantStats"
    ),
    "lookup counted": Bug(uncounted_lookup, "missed"),
    "ends of one length equal": Bug(ends_of_one_length_equal, "End after"),
    "reclaimed ids lost": Bug(
        reclaimed_ids_lost, "the engine has|blocks were reclaimed", properties.EngineMachine
    ),
    "reclaimed and still matched": Bug(
        reclaimed_and_still_matched,
        "conservation|the engine has|were reclaimed|owned already",
        properties.EngineMachine,
    ),
    "evictions of an insert kept": Bug(
        evictions_of_an_insert_kept, "left them to a reclaim", properties.EngineMachine
    ),
    "failed step matched": Bug(failed_step_matched, "never committed|wrong KV|leaned on step|of Mirror"),
    "leaning not cut": Bug(leaning_not_cut, "leaned on step"),
    "offered and matched": Bug(offered_and_matched, "changed by a call|never committed"),
    "offered to other prompts": Bug(offered_to_other_prompts, "before they exist|no running step"),
    "offered to other tenants": Bug(offered_to_other_tenants, _WRONG, ObservationAlone),
    "committed before its step": Bug(committed_before_its_step, "ArgumentError was expected|never committed"),
    "fence ignored": Bug(fence_ignored, "conservation|tables|wrong KV"),
    "eviction not told": Bug(eviction_not_told, "announcements|tokens match"),
    "waits in every tree": Bug(
        waits_in_every_tree, "A observes|counts, names or bytes", ObservationAlone, "strict"
    ),
    "waiting protects": Bug(waiting_protects, "leases|an announcement changed"),
    "use not noted": Bug(use_of_others_not_noted, "sessions|blocks of others"),
    "names shared": Bug(sessions_named_together, "A observes", ObservationAlone, "strict"),
    "stale match leased": Bug(stale_match_leased, "other blocks than its match|wrong KV"),
}


def test_the_docs_name_each_bug() -> None:
    """The bug table in docs/measurements/security.md names each bug."""
    text = (Path(__file__).parents[2] / "docs" / "measurements" / "security.md").read_text(encoding="utf-8")
    named = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")}
    assert {name for name in BUGS if "oracle alone" not in name} <= named


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the patch, the machine fails within a few hundred examples. Its message names the fault."""
    bug = BUGS[name]
    bug.plant(monkeypatch)
    # The planted functions stand for the cache's own, so what passes through them is still the cache's refusal.
    monkeypatch.setattr(recovery, "_OWN", (*recovery._OWN, __name__))
    chosen = {} if bug.policy is None else {"policies": [bug.policy]}
    report = properties.run(
        PrefixCache, EXAMPLES, 50, seed=0, machine=bug.machine, modes=[bug.mode], shrink=False, **chosen
    )
    print(f"{name}: {report.steps} steps")
    assert report.failure is not None, f"not found in {report.examples} examples"
    assert re.search(bug.said, report.failure.partition("Failing test case")[0]), report.failure
