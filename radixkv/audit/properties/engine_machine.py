"""The machine that attacks a cache whose blocks the engine owns (``CacheConfig(blocks="engine")``).

It knows which blocks the engine has. After each step these, the resident blocks and those to reclaim are all blocks of
the pool, each once. There are limits and guarantees of tenants, pins, clears and purges, and policies that give blocks
up at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from radixkv.audit import invariants
from radixkv.audit.oracle import chain
from radixkv.audit.properties.lookups import Lookups
from radixkv.audit.properties.material import (
    MAX_PINS,
    NAMESPACES,
    expect,
    prompts,
    small,
    where_to,
)
from radixkv.config import CacheConfig, Tenant
from radixkv.errors import (
    ArgumentError,
    ConfigError,
    NotResident,
    OutOfBlocks,
    QuotaExceeded,
    RadixKVError,
    TokenError,
)


class EngineMachine(Lookups):
    """One cache under attack. The engine has all free blocks.

    ``declining``: a policy that gives up blocks as soon as they are unused, for some lives. See ``Tenant.policy``.
    """

    declining: ClassVar[Any] = None

    @initialize(
        policy=st.integers(0, 63),
        declines=st.sampled_from((False, False, True)),
        block_size=st.sampled_from((4, 2, 1)),
        num_blocks=st.sampled_from((16, 12, 24, 8)),
        limited=st.booleans(),
        guaranteed=st.booleans(),
    )
    def make(
        self,
        policy: int,
        declines: bool,
        block_size: int,
        num_blocks: int,
        limited: bool,
        guaranteed: bool,
    ) -> None:
        """Make a tiny cache and its engine, which has every block."""
        cls = type(self)
        default = Tenant(
            "default",
            max_blocks=num_blocks // 2 if limited else None,
            max_pinned_blocks=num_blocks // 3,
            max_pins=MAX_PINS,
            policy=type(self).declining if declines else None,
        )
        name = cls.policies[policy % len(cls.policies)]
        self.start(
            CacheConfig(
                num_blocks,
                block_size,
                policy=name,
                default_tenant=default,
                segment_tokens=block_size,
                blocks="engine",
            )
        )
        self.declines = (declines and cls.declining is not None) or name in ("doorkeeper", "auto")
        if guaranteed:
            self.guaranteed = {"b": num_blocks // 3}
            tenant = Tenant(
                "b",
                guaranteed_blocks=num_blocks // 3,
                max_blocks=default.max_blocks,
                max_pinned_blocks=num_blocks // 3,
                max_pins=MAX_PINS,
            )
            self.cache.add_tenant(tenant)
        self.lent = list(range(num_blocks))

    # Blocks come and go.

    @rule(
        where=where_to,
        prompt=prompts,
        start=st.integers(0, 4),
        own=st.integers(0, 15),
        kind=st.sampled_from(("plain", "plain", "plain", "hints", "lease")),
    )
    def insert(self, where: int, prompt: tuple[int, ...], start: int, own: int, kind: str) -> None:
        """The engine inserts blocks that it filled, after it reclaimed what it lacked."""
        namespace, ids = self._place(where, prompt)
        ids = ids[: len(ids) // self.block_size * self.block_size]
        self._pass(1.0)
        num_blocks = len(ids) // self.block_size
        if len(self.lent) < num_blocks:
            self._reclaim(num_blocks - len(self.lent), namespace.tenant)
        if len(self.lent) < num_blocks:
            return
        match = self._matched(namespace, ids)
        theirs = match.block_ids.tolist()
        start = min(start, match.num_blocks)
        given = [
            theirs[at] if at < len(theirs) and own >> at & 1 else self.lent[at] for at in range(num_blocks)
        ]
        self.engine.write(np.array([*theirs[:start], *given[start:]], np.int32), 0, chain(namespace, ids))
        before = self.cache.snapshot()
        try:
            done = self._insert(namespace, ids, given[start:], start, theirs, kind)
        except QuotaExceeded as error:
            self._same(before)
            used, limit = self._held(before, namespace.tenant, theirs), error.limit
            expect(used + num_blocks - len(theirs) > limit, f"{error}, but {used} blocks are in use")
            return
        except OutOfBlocks as error:
            self._is_borrowed(error, before)
            return
        evicted = done.evicted.tolist()
        given_up = set(theirs) & set(evicted)
        expect(kind != "lease" or not given_up, f"blocks {given_up} are leased, and the engine has them")
        taken = set(given[len(theirs) :])
        self.lent = [block for block in self.lent if block not in taken] + evicted
        after = self.cache.snapshot()
        expect(
            sorted(after.free_ids.tolist()) == sorted(before.free_ids.tolist()),
            "an insert evicted blocks and left them to a reclaim",
        )
        if kind == "lease" or not self.declines:
            expect(self._matched(namespace, ids).num_tokens == len(ids), "what was inserted isn't matched")

    def _held(self, before: Any, tenant: str, path: list[int]) -> int:
        """How many blocks of a tenant would be in use if a path were too."""
        used = int(sum(each.used_blocks for each in before.tenants if each.tenant == tenant))
        return used - self._evictable(before, tenant, set(path))

    def _evictable(self, before: Any, tenant: str, path: set[int] | None = None) -> int:
        its = tuple(tree for tree in before.trees if tree.namespace.tenant == tenant)
        return invariants.num_evictable(replace(before, trees=its), path or set())

    @rule(num_blocks=st.integers(0, 9), tenant=st.sampled_from((None, "a", "b", "new")))
    def reclaim(self, num_blocks: int, tenant: str | None) -> None:
        """The engine gets blocks back, for a tenant or for anybody."""
        self._pass(1.0)
        self._reclaim(num_blocks, tenant)

    def _reclaim(self, num_blocks: int, tenant: str | None) -> None:
        """Everything that was freed comes, then as many victims as are missing and allowed."""
        before = self.cache.snapshot()
        freed = set(before.free_ids.tolist())
        used = {each.tenant: each.used_blocks for each in before.tenants}
        allowed = 0
        for name in used:
            evictable = self._evictable(before, name)
            borrowed = max(used[name] - self.guaranteed.get(name, 0), 0)
            allowed += evictable if tenant in (None, name) else min(evictable, borrowed)
        back = self.cache.reclaim(num_blocks, tenant).tolist()
        wanted = max(len(freed), min(num_blocks, len(freed) + allowed))
        expect(len(back) == wanted, f"{len(back)} blocks were reclaimed, not {wanted}")
        expect(set(back) >= freed, f"{freed - set(back)} were freed and not reclaimed")
        expect(len({*back, *self.lent}) == len(back) + len(self.lent), "reclaimed what the engine has")
        self.lent += back

    # Calls that must be refused.

    @rule(kind=st.integers(0, 63), which=small)
    def refuse(self, kind: int, which: int) -> None:
        """Calls that need blocks of the cache's own, and wrong inserts."""
        calls = self._wrong_calls(which)
        self._refused(*calls[kind % len(calls)])

    def _wrong_calls(self, which: int) -> list[tuple[Callable[[], object], type[RadixKVError]]]:
        cache, namespace, size = self.cache, NAMESPACES[which % len(NAMESPACES)], self.block_size
        gone = [block for block in range(cache.config.num_blocks) if block not in self.lent]
        taken = gone[which % len(gone)] if gone else cache.config.num_blocks
        there = self.lent[:1] or [0]
        return [
            (lambda: cache.open(namespace, [0]), ConfigError),
            (lambda: cache.publish("base", namespace, [0] * size, ["c"]), ConfigError),
            (lambda: cache.allocate(1), ConfigError),
            (lambda: cache.free([taken]), ConfigError),
            (lambda: cache.evict(1), ConfigError),
            (lambda: cache.reclaim(-1), ArgumentError),
            (lambda: cache.reclaim(1, 5), ArgumentError),
            (lambda: cache.insert(namespace, [99] * size, [taken]), ArgumentError),
            (lambda: cache.insert(namespace, [99] * 2 * size, there * 2), ArgumentError),
            (lambda: cache.insert(namespace, [99] * 2 * size, there, start=size), NotResident),
            (lambda: cache.insert(namespace, [2**32] * size, there), TokenError),
            (lambda: cache.insert(namespace, [99] * size, []), ArgumentError),
        ]

    # After each step.

    def contents(self) -> None:
        """The engine has what it knows of, and every block is in one place."""
        super().contents()
        snapshot = self.cache.snapshot()
        expect(sorted(snapshot.lent_ids) == sorted(self.lent), "the engine has other blocks than it knows")
        resident = [
            block
            for tree in snapshot.trees
            for node in tree.nodes
            for block in np.frombuffer(node.block_ids, np.int32).tolist()
        ]
        everything = sorted([*self.lent, *resident, *snapshot.free_ids.tolist()])
        expect(everything == list(range(snapshot.num_blocks)), f"{everything} are the engine's or the tree's")

    def _give_back(self) -> int:
        """At the end the engine reclaims everything."""
        self._reclaim(self.cache.config.num_blocks, None)
        return len(self.lent)
