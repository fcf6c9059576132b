"""What every policy must do, driven as the cache drives it. A policy's test inherits this in one line.

``PolicyContract`` lives random lives of a tree of nodes (uses, growth, splits, evictions) and holds the policy to
the promises of ``radixkv_policies.policy``: the victim is an evictable leaf whenever there is one, asking
changes nothing, only evictable nodes count, the same history gives the same victims. A subclass that names
a ``reference`` is also held to that: a slow, obvious statement of the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.clock import ManualClock
from radixkv_policies import POLICIES, Policy

# Inherited by each policy on purpose: one test, several executors.
_inherited = settings(
    max_examples=200, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow]
)

_Op = tuple[int, int, int]
lives = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 40), st.integers(1, 4)), max_size=120)


@dataclass(eq=False)
class Node:
    """A node as the test sees it. ``count`` and the stamps are for the references."""

    parent: Node | None
    num_blocks: int
    uses: int = 0
    children: list[Node] = field(default_factory=list)
    count: int = 1
    ended: int = 0
    priority: int = 0


class Reference:
    """The order, said plainly: ``key`` of the evictable leaves, the smallest goes."""

    age = 0

    def ended(self, node: Node) -> None:
        """A use of the node ended."""

    def key(self, node: Node) -> tuple[int, ...]:
        """The smallest goes first."""
        raise NotImplementedError

    def evicted(self, node: Node) -> None:
        """The node was the victim."""


class Life:
    """A tree of nodes with leases, telling a policy what the cache would tell it."""

    def __init__(self, policy: Policy, reference: Reference | None) -> None:
        self.policy, self.reference = policy, reference
        self.root = Node(None, 0)
        self.nodes: list[Node] = []
        self.leased: list[Node] = []
        self.victims: list[int] = []
        self.now = 0

    def step(self, op: _Op) -> None:
        """One step of a life, from three small numbers."""
        kind, which, size = op
        if kind < 4:
            self._use(which, split=kind == 0)
        elif kind < 7:
            self._insert(which, size)
        elif kind == 7:
            self._extend(which, size)
        elif kind < 10:
            self._end(which)
        else:
            self._evict(size)
        self._check()

    def end_all(self) -> None:
        """All uses end, everything is evicted."""
        while self.leased:
            self._end(0)
        while self.nodes:
            self._evict(3)
            self._check()
        assert self.policy.victim() is None and len(self.policy) == 0

    def _use(self, which: int, *, split: bool) -> None:
        if not self.nodes:
            return
        node = self.nodes[which % len(self.nodes)]
        if split and node.num_blocks > 1:
            node = self._split(node)
        self._lease(node)
        self.policy.touched(self._path(node))
        for used in self._path(node):
            used.count += 1

    def _split(self, lower: Node) -> Node:
        assert lower.parent is not None
        upper = Node(
            lower.parent, 1, 1 if lower.uses else 0, [lower], lower.count, lower.ended, lower.priority
        )
        lower.parent.children[lower.parent.children.index(lower)] = upper
        lower.parent, lower.num_blocks = upper, lower.num_blocks - 1
        self.nodes.append(upper)
        self.policy.split(upper, lower)
        return upper

    def _insert(self, which: int, size: int) -> None:
        """A commit: the lease moves from its node (the root, if it held none) to a new one below."""
        if self.leased and which % 3:
            parent = self.leased.pop(which % len(self.leased))
        else:
            parent = self.root
            parent.uses += 1
        node = Node(parent, size, 1)
        parent.children.append(node)
        self.nodes.append(node)
        self.leased.append(node)
        self.policy.inserted(node, size, sum(above.num_blocks for above in self._path(node)))

    def _extend(self, which: int, size: int) -> None:
        growable = [node for node in self.leased if node.uses == 1 and not node.children]
        if growable:
            node = growable[which % len(growable)]
            node.num_blocks += size
            self.policy.extended(node, size)

    def _lease(self, node: Node) -> None:
        self.leased.append(node)
        at: Node | None = node
        while at is not None:
            at.uses += 1
            if at.uses > 1:
                return
            if at is not self.root:
                self.policy.leased(at)
            at = at.parent

    def _end(self, which: int) -> None:
        if not self.leased:
            return
        at: Node | None = self.leased.pop(which % len(self.leased))
        while at is not None:
            at.uses -= 1
            if at.uses:
                return
            if at is not self.root:
                self.now += 1
                at.ended = self.now
                if self.reference is not None:
                    self.reference.ended(at)
                self.policy.unleased(at)
            at = at.parent

    def _evict(self, num_blocks: int) -> None:
        while num_blocks:
            node = self.policy.victim()
            if node is None:
                return
            assert isinstance(node, Node)
            size = min(num_blocks, node.num_blocks)
            num_blocks -= size
            self.victims.append(self.nodes.index(node))
            if self.reference is not None:
                self.reference.evicted(node)
            self.policy.trimmed(node, size)
            node.num_blocks -= size
            if not node.num_blocks:
                self.policy.removed(node)
                self.nodes.remove(node)
                assert node.parent is not None
                node.parent.children.remove(node)

    def _check(self) -> None:
        evictable = [node for node in self.nodes if not node.uses]
        assert len(self.policy) == len(evictable)
        victim = self.policy.victim()
        assert self.policy.victim() is victim and len(self.policy) == len(evictable)
        leaves = [node for node in evictable if not node.children]
        assert (victim is None) == (not leaves)
        assert victim is None or victim in leaves
        if victim is not None and self.reference is not None:
            assert victim is min(leaves, key=self.reference.key)

    def _path(self, node: Node) -> list[Node]:
        path = []
        at: Node | None = node
        while at is not None and at is not self.root:
            path.append(at)
            at = at.parent
        return path[::-1]


class PolicyContract:
    """Inherit, and name the policy."""

    name: str
    reference: type[Reference] | None = None

    def make(self) -> Policy:
        """A new policy."""
        return POLICIES[self.name](64, ManualClock(), 7)

    def live(self, ops: list[_Op]) -> Life:
        """A whole life, checked at every step."""
        life = Life(self.make(), self.reference() if self.reference else None)
        for op in ops:
            life.step(op)
        life.end_all()
        return life

    @_inherited
    @given(lives)
    def test_any_life(self, ops: list[_Op]) -> None:
        """Every promise, at every step; and in the end all go."""
        self.live(ops)

    @_inherited
    @given(lives)
    def test_the_same_life_twice(self, ops: list[_Op]) -> None:
        """The same history and seed give the same victims."""
        assert self.live(ops).victims == self.live(ops).victims

    def test_a_new_policy_has_no_victim(self) -> None:
        """Nothing is evictable yet."""
        policy = self.make()
        assert policy.victim() is None and len(policy) == 0

    @pytest.mark.parametrize("num_nodes", [1, 1_000])
    def test_everything_goes(self, num_nodes: int) -> None:
        """Many leaves, each once."""
        policy = self.make()
        nodes = list(range(num_nodes))
        for node in nodes:
            policy.inserted(node, 2, 2)
            policy.unleased(node)
        gone = []
        while (victim := policy.victim()) is not None:
            policy.trimmed(victim, 1)
            assert policy.victim() == victim, "half a leaf is evicted, and another one is next"
            policy.trimmed(victim, 1)
            policy.removed(victim)
            gone.append(victim)
        assert sorted(gone) == nodes
