"""Tenants: valid settings, guarantees, which blocks are evicted, and which requests are refused with which message.

The property test plays random lives of several tenants and compares each step with a slow, plain reference. The
reference counts blocks one by one in a snapshot. It grants a request exactly if two conditions hold. First, blocks can
be taken one by one from the tenants that the rules name. Second, every guarantee can still be met afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import (
    ArgumentError,
    CacheConfig,
    ConfigError,
    Namespace,
    NamespaceError,
    OutOfBlocks,
    PrefixCache,
    QuotaExceeded,
    Tenant,
    audit,
)
from radixkv.clock import ManualClock
from radixkv.config import MAX_WEIGHT, MIN_WEIGHT
from radixkv.index.tenant_settings import require_removable
from radixkv_policies import POLICIES
from tests.index.support import compute, make_cache, same, scrubbed

A, B = Namespace("a", "m"), Namespace("b", "m")


def strict(tenant: str, num_blocks: int) -> Tenant:
    return Tenant(tenant, guaranteed_blocks=num_blocks, mode="strict")


# Valid and invalid settings.


@pytest.mark.parametrize(
    ("settings_of", "field_named", "value", "allowed"),
    [
        ({"weight": 0}, "weight", 0, "a finite number > 0"),
        ({"weight": -1.5}, "weight", -1.5, "> 0"),
        ({"weight": float("inf")}, "weight", float("inf"), "finite"),
        ({"weight": float("nan")}, "weight", None, "finite"),
        ({"weight": 5e-324}, "weight", 5e-324, "1e-100 to 1e+100"),
        ({"weight": 10**120}, "weight", 10**120, "1e-100 to 1e+100"),
        ({"weight": True}, "weight", True, "number"),
        ({"weight": "2"}, "weight", "2", "number"),
        ({"guaranteed_blocks": -1}, "guaranteed_blocks", -1, "≥ 0"),
        ({"guaranteed_blocks": 1.0}, "guaranteed_blocks", 1.0, "integer"),
        ({"guaranteed_blocks": True}, "guaranteed_blocks", True, "integer"),
        ({"max_blocks": 0}, "max_blocks", 0, "≥ 1"),
        ({"max_blocks": "all"}, "max_blocks", "all", "integer"),
        ({"guaranteed_blocks": 5, "max_blocks": 4}, "max_blocks", 4, "≥ 5"),
        ({"mode": "lax"}, "mode", "lax", "'burst' or 'strict'"),
        ({"mode": None}, "mode", None, "'burst' or 'strict'"),
        ({"mode": "strict"}, "guaranteed_blocks", 0, "≥ 1"),
        ({"mode": "strict", "guaranteed_blocks": 4, "max_blocks": 5}, "max_blocks", 5, "4, its guarantee"),
    ],
)
def test_an_invalid_tenant_names_the_field_the_value_and_the_allowed_values(
    settings_of: dict[str, Any], field_named: str, value: object, allowed: str
) -> None:
    with pytest.raises(ArgumentError) as error:
        Tenant("a", **settings_of)
    assert error.value.argument == field_named and allowed in error.value.allowed
    assert field_named in str(error.value) and allowed in str(error.value)
    if value is not None:
        assert error.value.value == value and repr(value) in str(error.value)


@pytest.mark.parametrize("name", ["", "x" * 1_025, "\ud800", 7, None])
def test_an_invalid_tenant_name_is_refused(name: Any) -> None:
    with pytest.raises(NamespaceError, match="tenant"):
        Tenant(name)


def test_valid_tenants() -> None:
    plain = Tenant("a")
    assert (plain.weight, plain.guaranteed_blocks, plain.limit, plain.mode) == (1.0, 0, None, "burst")
    assert Tenant("a", 2, 3, 4).limit == 4
    assert strict("a", 4).limit == Tenant("a", 1.0, 4, 4, "strict").limit == 4
    with pytest.raises(AttributeError):
        plain.weight = 2.0  # type: ignore[misc]


def test_guarantees_sum_to_the_pool_at_most_and_the_shortfall_is_named() -> None:
    cache = make_cache(16)
    cache.add_tenant(Tenant("a", guaranteed_blocks=10))
    before = cache.snapshot()
    with pytest.raises(ArgumentError, match=r"at most 6: .* exceed the pool by 3 blocks") as error:
        cache.add_tenant(strict("b", 9))
    assert (error.value.argument, error.value.value) == ("guaranteed_blocks", 9)
    assert same(before, cache) and cache.tenant("b") is None and cache.tenants() == ["a"]
    cache.add_tenant(strict("b", 6))
    cache.add_tenant(Tenant("a", guaranteed_blocks=7))  # its own old guarantee does not count
    with pytest.raises(ArgumentError, match="by 1 blocks"):
        cache.add_tenant(Tenant("a", guaranteed_blocks=11))
    assert cache.tenant("a") == Tenant("a", guaranteed_blocks=7)


@pytest.mark.parametrize("tenant", ["a", None, ("a", 1), Namespace("a", "m")])
def test_only_a_tenant_can_be_added(tenant: Any) -> None:
    with pytest.raises(ArgumentError, match="a Tenant"):
        make_cache().add_tenant(tenant)


@pytest.mark.parametrize("default", ["a", strict("a", 2), Tenant("a", guaranteed_blocks=1)])
def test_a_default_tenant_has_no_guarantee(default: Any) -> None:
    with pytest.raises(ConfigError, match="default_tenant"):
        make_cache(default_tenant=default)


def test_an_unknown_tenant_gets_the_default_or_is_refused() -> None:
    cache = make_cache(16, default_tenant=Tenant("whoever", 3.0, max_blocks=2))
    compute(cache, range(8))
    assert cache.tenant("a") == Tenant("a", 3.0, max_blocks=2)
    with pytest.raises(QuotaExceeded):
        cache.open(A, range(12))
    cache = make_cache(16, default_tenant=None)
    before = cache.snapshot()
    with pytest.raises(NamespaceError, match="'a' is not known"):
        cache.open(A, [1])
    with pytest.raises(NamespaceError, match="'a' is not known"):
        cache.insert(A, range(4), [0])
    assert cache.match(A, [1]).num_tokens == 0 and same(before, cache)
    cache.add_tenant(Tenant("a"))
    compute(cache, range(8))
    cache.remove_tenant("a")
    with pytest.raises(NamespaceError, match="'a' is not known"):
        cache.open(A, [1])


# Changes and removals at run time.


def test_a_lower_limit_evicts_the_tenants_own_blocks() -> None:
    cache = make_cache(16)
    for tenant in (A, B):
        compute(cache, range(12), tenant)
        compute(cache, range(50, 62), tenant)
    cache.add_tenant(Tenant("a", max_blocks=2))
    assert [cache.tenant_stats(tenant).used_blocks for tenant in "ab"] == [2, 6]
    with cache.open(A, range(8)), pytest.raises(QuotaExceeded) as error:
        cache.open(A, [7])
    assert (error.value.needed, error.value.limit, error.value.used, error.value.evictable) == (1, 2, 2, 0)
    audit.check(cache)


def test_a_limit_that_running_sequences_exceed_is_refused_and_changes_nothing() -> None:
    cache = make_cache(16)
    compute(cache, range(30, 50))
    with cache.open(A, range(12)):
        before = cache.snapshot()
        for tenant in (Tenant("a", max_blocks=2), strict("a", 2)):
            with pytest.raises(ArgumentError, match="at least 3, which its sequences and pins hold"):
                cache.add_tenant(tenant)
        assert same(before, cache) and cache.tenant("a") == Tenant("a")
        cache.add_tenant(strict("a", 3))
    audit.check(cache)


def test_a_guarantee_that_cannot_be_met_now_is_refused_and_changes_nothing() -> None:
    cache = make_cache(16)
    running = cache.open(B, range(40))
    lent = cache.allocate(2)
    before = cache.snapshot()
    with pytest.raises(ArgumentError, match="2 fewer while running sequences, pins and bases hold the rest"):
        cache.add_tenant(strict("a", 6))
    assert same(before, cache) and cache.tenant("a") is None
    cache.add_tenant(strict("a", 4))
    with pytest.raises(OutOfBlocks):
        cache.allocate(1)
    cache.free(lent)
    cache.add_tenant(strict("a", 6))
    with pytest.raises(OutOfBlocks):
        cache.open(B, [99])
    running.release()
    cache.add_tenant(strict("a", 16))
    audit.check(cache)


def test_a_removed_tenant_is_forgotten_and_its_sequences_continue() -> None:
    cache = make_cache(16)
    cache.add_tenant(Tenant("a", 2.0, 8, 8))
    compute(cache, range(50, 62))
    sequence = cache.open(A, range(8))
    sequence.commit(8)
    cache.remove_tenant("a")
    assert cache.tenant("a") == Tenant("a") and not cache.namespaces("a")
    assert cache.match(A, range(50, 62)).num_tokens == 0 == cache.match(A, range(8)).num_tokens
    with cache.open(B, range(56)):  # its guarantee is gone
        sequence.append(1) if cache.stats().free_blocks else None
        audit.check(cache)
    sequence.release()
    assert cache.tenant_stats("a").used_blocks == 0
    for unknown in ("a", "nobody"):
        with pytest.raises(ArgumentError, match="a tenant that was added"):
            cache.remove_tenant(unknown)
    audit.check(cache)


def test_a_strict_tenant_has_all_of_its_guarantee_and_nothing_more() -> None:
    cache = make_cache(16)
    cache.add_tenant(strict("a", 4))
    with cache.open(A, range(16)), pytest.raises(QuotaExceeded):
        cache.open(A, [1])
    compute(cache, range(50, 66))
    assert cache.match(A, range(16)).num_tokens == 0
    assert cache.tenant_stats("a").used_blocks == 4 and cache.stats().free_blocks == 12
    audit.check(cache)


def test_a_batch_of_several_tenants_gets_what_each_is_guaranteed() -> None:
    cache = make_cache(8)
    for tenant in "ab":
        cache.add_tenant(strict(tenant, 4))
    compute(cache, range(16))
    compute(cache, range(16), B)
    batch = [cache.open(tenant, range(8)) for tenant in (A, B)]
    cache.append(batch, [1, 2])
    assert [sequence.num_blocks for sequence in batch] == [3, 3]
    audit.check(cache)


# Each rule, compared with the reference.

NUM_BLOCKS, SIZE = 10, 2
TENANTS = "abc"


@dataclass
class Ownership:
    """The owner of each block, counted in a snapshot."""

    num_blocks: int
    num_free: int
    num_lent: int
    used: dict[str, set[int]] = field(default_factory=dict)
    protected: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: PrefixCache) -> Ownership:
        seen = cache.snapshot()
        ownership = cls(seen.num_blocks, len(seen.free_ids), len(seen.lent_ids))
        for tenant in TENANTS:
            ownership.used[tenant], ownership.protected[tenant] = set(), set()
        for tree in seen.trees:
            for node in tree.nodes:
                ownership.used[tree.namespace.tenant].update(_ids(node.block_ids))
        for sequence in seen.sequences:
            ownership.used[sequence.namespace.tenant].update(_ids(sequence.block_ids))
            ownership.protected[sequence.namespace.tenant].update(_ids(sequence.block_ids))
        ends = [each.node for each in (*seen.sequences, *seen.leases)]
        for at, node in [*ends, *(run.node for run in seen.runs if run.node is not None)]:
            tree, up = seen.trees[at], node
            while up is not None:
                ownership.protected[tree.namespace.tenant].update(_ids(tree.nodes[up].block_ids))
                up = tree.nodes[up].parent
        return ownership

    def evictable(self, tenant: str) -> set[int]:
        return self.used[tenant] - self.protected[tenant]


def _ids(packed: bytes) -> list[int]:
    return np.frombuffer(packed, np.int32).tolist()


@dataclass
class Reference:
    """The rules, in plain numbers: the blocks that each tenant uses and could give up."""

    promises: dict[str, Tenant]
    free: int
    used: dict[str, int]
    evictable: dict[str, int]

    def guarantee(self, tenant: str) -> int:
        return self.promises[tenant].guaranteed_blocks

    def overuse(self, tenant: str) -> Fraction:
        """(used − share) ÷ weight, where share = guarantee + weight ÷ Σ weights × (capacity − Σ guarantees)."""
        weight = Fraction(self.promises[tenant].weight)
        weights = sum(Fraction(each.weight) for each in self.promises.values())
        rest = NUM_BLOCKS - sum(each.guaranteed_blocks for each in self.promises.values())
        return (self.used[tenant] - self.guarantee(tenant) - weight / weights * rest) / weight

    def candidates(self, requester: str | None) -> list[str]:
        """The tenants that may lose blocks: the requester, and those above their guarantee."""
        return [
            tenant
            for tenant in self.promises
            if self.evictable[tenant] and (tenant == requester or self.used[tenant] > self.guarantee(tenant))
        ]

    def victim(self, requester: str | None) -> str | None:
        """The candidate with the largest overuse. Among equals the requester comes first."""
        found = self.candidates(requester)
        return max(found, key=lambda tenant: (self.overuse(tenant), tenant == requester), default=None)

    def evict(self, tenant: str) -> None:
        self.used[tenant] -= 1
        self.evictable[tenant] -= 1
        self.free += 1

    @property
    def meets_all_guarantees(self) -> bool:
        """The law of guarantees: free + evictable borrowed ≥ Σ max(0, guarantee − used)."""
        borrowed = short = 0
        for tenant in self.promises:
            above = self.used[tenant] - self.guarantee(tenant)
            borrowed += min(self.evictable[tenant], max(above, 0))
            short += max(-above, 0)
        return self.free + borrowed >= short

    def limit(self, tenant: str) -> int:
        limit = self.promises[tenant].limit
        return NUM_BLOCKS if limit is None else limit

    def own_over(self, tenant: str, needed: int) -> int:
        """The number of its own blocks that the tenant must give up to stay within its limit."""
        return max(self.used[tenant] + needed - self.limit(tenant), 0)

    def outcome(self, tenant: str | None, needed: int) -> str:
        """Whether ``needed`` blocks are granted, taken one by one."""
        unlimited = tenant is None or self.promises[tenant].limit is None
        if tenant is not None and not unlimited:
            for _ in range(self.own_over(tenant, needed)):
                if not self.evictable[tenant]:
                    return "quota"
                self.evict(tenant)
        for _ in range(needed - self.free):
            victim = self.victim(tenant)
            if victim is None:
                return "pool"
            self.evict(victim)
        self.free -= needed
        if tenant is not None:
            self.used[tenant] += needed
        return "granted" if self.meets_all_guarantees else "pool"


class World:
    """A cache of several tenants. Each call is compared with the reference."""

    def __init__(self, policy: str, default: Tenant, promises: list[Tenant]) -> None:
        config = CacheConfig(NUM_BLOCKS, SIZE, policy=policy, segment_tokens=SIZE, default_tenant=default)
        self.cache = PrefixCache(config, scrub_blocks=scrubbed, clock=ManualClock())
        self.default = default
        self.promises: dict[str, Tenant] = {}
        self.running: list[tuple[str, Any]] = []
        self.leases: list[Any] = []
        self.lent: list[int] = []
        self.refusals = 0
        for tenant in promises:
            self.add(tenant)

    def reference(self, ownership: Ownership, path: set[int] | frozenset[int] = frozenset()) -> Reference:
        """The reference for these counts, while a lease also protects ``path``."""
        used = {tenant: len(ownership.used[tenant]) for tenant in self.promises}
        evictable = {tenant: len(ownership.evictable(tenant) - path) for tenant in self.promises}
        return Reference(dict(self.promises), ownership.num_free, used, evictable)

    def request(self, tenant: str | None, needed: int, path: set[int], call: Any) -> Any:
        """Make a call that needs blocks, for a tenant or for the engine.

        Return None if it is refused, as the reference expects.
        """
        if tenant is not None:
            known = tenant in self.promises
            self.promises.setdefault(tenant, replace(self.default, id=tenant))
        before, seen = Ownership.of(self.cache), self.cache.snapshot()
        expected = self.reference(before, path).outcome(tenant, needed)
        try:
            result = call()
        except (QuotaExceeded, OutOfBlocks) as error:
            self.refusals += 1
            assert expected == ("quota" if isinstance(error, QuotaExceeded) else "pool"), error
            assert same(seen, self.cache)
            if tenant is not None:
                self.check_refusal(error, tenant, needed, before, path)
                if not known:
                    del self.promises[tenant]
            return None
        assert expected == "granted", f"granted, but the reference says {expected}"
        self.check_victims(tenant, needed, before, path)
        return result

    def check_refusal(
        self, error: QuotaExceeded | OutOfBlocks, tenant: str, needed: int, before: Ownership, path: set[int]
    ) -> None:
        """Check the numbers in a refusal.

        They are the tenant's own. A strict tenant is refused by its quota, and no tenant within its guarantee.
        """
        promise, used = self.promises[tenant], len(before.used[tenant])
        evictable = len(before.evictable(tenant) - path)
        limit = NUM_BLOCKS if promise.limit is None else promise.limit
        if isinstance(error, QuotaExceeded):
            told, facts = (error.limit, error.used), (limit, used)
        else:
            assert promise.mode == "burst"
            told, facts = (error.free,), (limit - used,)
        assert (error.needed, error.evictable, *told) == (needed, evictable, *facts)
        assert used - evictable + needed > promise.guaranteed_blocks, "refused within its guarantee"

    def check_victims(self, tenant: str | None, needed: int, before: Ownership, path: set[int]) -> None:
        """Check that exactly the needed blocks were taken, each from a tenant with the largest overuse."""
        after, reference = Ownership.of(self.cache), self.reference(before, path)
        lost = {
            each: reference.used[each] + (needed if each == tenant else 0) - len(after.used[each])
            for each in self.promises
        }
        over = 0 if tenant is None else reference.own_over(tenant, needed)
        assert sum(lost.values()) == max(over, needed - before.num_free), lost
        for _ in range(over):
            assert tenant is not None
            reference.evict(tenant)
            lost[tenant] -= 1
        while any(lost.values()):
            allowed = reference.candidates(tenant)
            most = max(reference.overuse(each) for each in allowed)
            top = [each for each in allowed if reference.overuse(each) == most]
            victim = tenant if tenant in top else next((each for each in top if lost[each]), None)
            assert victim is not None and lost[victim], (
                f"{lost} blocks remained to be taken, but the next victim was one of {top}"
            )
            reference.evict(victim)
            lost[victim] -= 1

    # The calls.

    def open(self, tenant: str, prompt: tuple[int, ...], done: int) -> None:
        namespace = Namespace(tenant, "m")
        match = self.cache.match(namespace, prompt)
        cached = min(match.num_blocks, max(len(prompt) - 1, 0) // SIZE)
        needed = -(-len(prompt) // SIZE) - cached
        path = set(match.block_ids[:cached].tolist())
        sequence = self.request(tenant, needed, path, lambda: self.cache.open(namespace, prompt))
        if sequence is not None:
            sequence.commit(max(min(done, len(prompt)), cached * SIZE))
            self.running.append((tenant, sequence))

    def append(self, which: int) -> None:
        tenant, sequence = self.running[which % len(self.running)]
        last, rows = sequence.block_table[-1:], sequence.num_tokens % SIZE
        sharers = sum(last in other.block_table for _, other in self.running)
        in_tree = any(
            last in _ids(node.block_ids) for tree in self.cache.snapshot().trees for node in tree.nodes
        )
        needed = int(not rows or sharers + in_tree > 1)
        self.request(tenant, needed, set(), lambda: sequence.append(0) or True)
        self.cache.flush()

    def add(self, tenant: Tenant) -> None:
        """Add or change a tenant. It is refused exactly if its guarantee or its limit cannot be met now."""
        before, seen = Ownership.of(self.cache), self.cache.snapshot()
        planned = {**self.promises, tenant.id: tenant}
        held = len(before.protected[tenant.id])
        reference = replace(self.reference(before), promises=planned)
        for counts in (reference.used, reference.evictable):
            counts.setdefault(tenant.id, 0)
        too_many = sum(each.guaranteed_blocks for each in planned.values()) > NUM_BLOCKS
        too_low = tenant.limit is not None and held > tenant.limit
        refused = too_many or too_low or not reference.meets_all_guarantees
        try:
            self.cache.add_tenant(tenant)
        except ArgumentError:
            assert refused and same(seen, self.cache)
            return
        assert not refused
        self.promises[tenant.id] = tenant
        after, used = Ownership.of(self.cache), len(before.used[tenant.id])
        expected = used if tenant.limit is None else min(used, tenant.limit)
        assert len(after.used[tenant.id]) == expected
        assert all(after.used[each] == before.used[each] for each in TENANTS if each != tenant.id)

    def remove(self, tenant: str) -> None:
        state = self.cache.tenant(tenant)
        try:
            self.cache.remove_tenant(tenant)
        except ArgumentError:
            assert state is None or state == replace(self.default, id=tenant)
            return
        self.promises[tenant] = replace(self.default, id=tenant)

    def allocate(self, num_blocks: int) -> None:
        block_ids = self.request(None, num_blocks, set(), lambda: self.cache.allocate(num_blocks))
        if block_ids is not None:
            self.lent += block_ids.tolist()

    def lease(self, tenant: str, prompt: tuple[int, ...]) -> None:
        """Lease a match. It is refused exactly if a guarantee could not be met without these blocks."""
        match = self.cache.match(Namespace(tenant, "m"), prompt)
        before, seen = Ownership.of(self.cache), self.cache.snapshot()
        path = set(match.block_ids.tolist()) - before.protected[tenant]
        reference = self.reference(before, path)
        try:
            self.leases.append(self.cache.lease(match))
        except OutOfBlocks as error:
            self.refusals += 1
            assert not reference.meets_all_guarantees and same(seen, self.cache)
            self.check_refusal(error, tenant, len(path), before, path)
        else:
            assert reference.meets_all_guarantees

    def serve(self, tenant: str, prompt: tuple[int, ...]) -> None:
        """Make a whole request. Its blocks can be evicted afterwards."""
        running = len(self.running)
        self.open(tenant, prompt, len(prompt))
        if len(self.running) > running:
            self.running.pop()[1].release()

    def fork(self, which: int) -> None:
        owner, sequence = self.running[which % len(self.running)]
        self.running += [(owner, child) for child in sequence.fork(1)]

    def free(self, count: int) -> None:
        self.cache.free(self.lent[:count])
        del self.lent[:count]

    def step(self, op: tuple[int, str, tuple[int, ...], int, Tenant]) -> None:
        kind, tenant, prompt, which, promise = op
        if kind >= 16 and self.running:
            (self.append, self.fork, self.release, self.commit)[kind % 4](which)
            return
        calls = {
            7: lambda: self.allocate(which),
            8: lambda: self.free(which),
            9: lambda: self.cache.evict(which),
            10: lambda: self.cache.clear(Namespace(tenant, "m")),
            11: lambda: self.remove(tenant),
            12: lambda: self.add(replace(promise, id=tenant)),
            13: lambda: self.lease(tenant, prompt),
            14: lambda: self.lease(tenant, prompt),
            15: lambda: self.leases.pop(which % len(self.leases)).release() if self.leases else None,
        }
        if kind < 4:
            self.serve(tenant, prompt)
        else:
            calls.get(kind, lambda: self.open(tenant, prompt, which * SIZE))()

    def commit(self, which: int) -> None:
        sequence = self.running[which % len(self.running)][1]
        sequence.commit(sequence.num_tokens)

    def release(self, which: int) -> None:
        self.running.pop(which % len(self.running))[1].release()

    def check(self) -> None:
        """After each step, check the laws, the guarantees and the limits."""
        audit.check(self.cache)
        reference = self.reference(Ownership.of(self.cache))
        assert reference.meets_all_guarantees
        assert all(reference.used[tenant] <= reference.limit(tenant) for tenant in self.promises)


promises = st.one_of(
    st.builds(Tenant, st.just("x"), st.sampled_from((1.0, 2.0, 0.5)), st.integers(0, 8)),
    st.builds(
        lambda weight, guarantee, more: Tenant("x", weight, guarantee, guarantee + more),
        st.sampled_from((1.0, 3.0)),
        st.integers(0, 4),
        st.integers(1, 5),
    ),
    st.builds(strict, st.just("x"), st.integers(1, 6)),
)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=13).map(tuple)
ops = st.tuples(st.integers(0, 23), st.sampled_from(TENANTS), prompts, st.integers(0, 5), promises)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_rule_matches_the_reference(policy: str) -> None:
    """Some lives for each policy, which must include refusals."""
    refused = 0

    @settings(max_examples=20)
    @given(st.lists(promises, max_size=3), st.lists(ops, min_size=10, max_size=60))
    def lives(first: list[Tenant], steps: list[Any]) -> None:
        nonlocal refused
        added = [replace(promise, id=name) for promise, name in zip(first, TENANTS, strict=False)]
        world = World(policy, Tenant("default"), added)
        for op in steps:
            world.step(op)
            world.check()
        refused += world.refusals

    lives()
    assert refused > 10


def test_a_removed_tenant_gets_the_default_limit() -> None:
    """A tenant that is removed gets the default's limit.

    If it holds more, the removal is refused; resident blocks above it are evicted.
    """
    cache = PrefixCache(
        CacheConfig(num_blocks=16, block_size=4, default_tenant=Tenant("anybody", max_blocks=4))
    )
    cache.add_tenant(Tenant("a", guaranteed_blocks=10))
    running = cache.open(Namespace("a", "m"), range(24))
    for refuse in (require_removable, PrefixCache.remove_tenant):
        with pytest.raises(ArgumentError, match="at most 4 blocks"):
            refuse(cache, "a")
    assert cache.tenant("a") == Tenant("a", guaranteed_blocks=10)
    audit.check(cache)
    running.commit(24)
    running.release()
    require_removable(cache, "a")
    cache.remove_tenant("a")
    assert cache.tenant("a") == Tenant("a", max_blocks=4) and cache.stats().free_blocks == 16
    audit.check(cache)


def test_extreme_weights_keep_the_order_of_eviction() -> None:
    """The tenant with the smallest weight is furthest above its share. No quotient or product of a weight overflows."""
    cache = make_cache(32)
    weights = {"feather": MIN_WEIGHT, "plain": 1.0, "anvil": MAX_WEIGHT}
    for tenant, weight in weights.items():
        cache.add_tenant(Tenant(tenant, weight=weight))
    for turn in range(6):
        for tenant in weights:
            compute(cache, [100 * turn + at for at in range(17)], Namespace(tenant, "m"))
            audit.check(cache)
    assert cache.tenant_stats("feather").resident_blocks < cache.tenant_stats("anvil").resident_blocks


@pytest.mark.parametrize("wrong", ["acme/keys", "/", "a/", ".", "..", ""])
def test_an_id_that_would_name_another_path_is_refused(wrong: str) -> None:
    fine = Namespace("a", "m")
    for make in (lambda: Tenant(wrong), lambda: Namespace(wrong, "m"), lambda: fine._replace(tenant=wrong)):
        with pytest.raises(NamespaceError, match="tenant"):
            make()
    cache = PrefixCache(CacheConfig(num_blocks=4))
    with pytest.raises(ArgumentError, match=r"tenant=.* is not allowed; allowed: the id .* without '/'"):
        cache.purge(wrong)
    assert Tenant("...").id == "..." and Namespace("a b", "m/n", "x/y", "/").model == "m/n"
