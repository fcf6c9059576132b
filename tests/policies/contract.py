"""The contract of every policy, driven like the cache drives it. A policy's test class inherits it in one line.

``PolicyContract`` plays random lives of a tree of nodes: requests with hints, growth, splits, evictions and clears.
Evicted blocks may return with the same ghost keys. At each step it checks the promises of ``radixkv_policies.policy``:

- The victim is an evictable leaf whenever there is one.
- Asking for the victim changes nothing.
- Only evictable nodes count.
- The same history gives the same victims.

If a subclass names a ``reference``, the policy must evict in its order. A reference is a slow, plain statement of the
order in single blocks, each with its own history. The audit must also be clean for whole caches of each policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv import CacheConfig, Namespace, PrefixCache, Sequence, Tenant, audit
from radixkv.clock import ManualClock
from radixkv.errors import CapacityError
from radixkv_policies import POLICIES, Policy, RequestHints, TokenRange

NUM_LIVES = max(settings().max_examples // 4, 5)
NUM_CACHES = max(settings().max_examples // 2, 5)
"""The numbers of lives of a policy and of a whole cache: 12 and 25 in `make test`."""

CAPACITY = 24

PINNED = (0,) * 14
"""A test pins this prompt, or a prefix of it."""

_Op = tuple[int, int, int]
lives = st.lists(
    st.tuples(st.integers(0, 13), st.integers(0, 40), st.integers(1, 4)), min_size=30, max_size=120
)
"""A life has 60 steps on average. Most faults need a tree of some nodes: a long life shows more than ten short ones."""

HINTS = (
    None,
    RequestHints(labels={"type": "chat", "turn": 2, "session": "s"}),
    RequestHints(labels={"type": "agent", "tool_pending": True}, priority=80, duration_s=5.0),
    RequestHints(labels={"session_over": True}, priority=10),
    RequestHints(ranges=(TokenRange(0, 4, 100), TokenRange(4, 9, 5, 2.5)), priority=50),
)


@dataclass(eq=False)
class Block:
    """A block for a reference: its place, and the reference's notes."""

    key: int
    depth: int
    node: Node
    uses: int = 0
    stamp: int = 0
    rank: float = 0.0
    is_new: bool = True
    flag: bool = False
    notes: list[float] = field(default_factory=list)

    @property
    def above(self) -> Block | None:
        """The block before it."""
        at = self.node.blocks.index(self)
        if at:
            return self.node.blocks[at - 1]
        parent = self.node.parent
        return parent.blocks[-1] if parent is not None and parent.blocks else None


@dataclass(eq=False)
class Node:
    """A node for the test."""

    parent: Node | None
    blocks: list[Block] = field(default_factory=list)
    uses: int = 0
    children: list[Node] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """The number of blocks from the root to the node's end."""
        above = self.parent.depth if self.parent is not None else 0
        return above + len(self.blocks)


class Reference:
    """The eviction order in plain form, block by block.

    The evictable leaf with the smallest ``key`` is evicted first.
    """

    def __init__(self, life: Life) -> None:
        self.life = life

    def opened(self, path: list[Block], num_blocks: int, hints: RequestHints | None) -> None:
        """A request with a prompt of ``num_blocks`` blocks came and matched these blocks."""

    def inserted(self, blocks: list[Block], hints: RequestHints | None, prompt: int) -> None:
        """A request computed these blocks of a node. ``prompt`` is the number of blocks of its prompt."""

    def used(self, block: Block) -> None:
        """A request found the block resident."""

    def ended(self, block: Block) -> None:
        """The last use of the block ended."""

    def settle(self, leaves: list[Block]) -> None:
        """The cache asks for the victim."""

    def key(self, block: Block) -> tuple[float, ...]:
        """The sort key. The smallest is evicted first."""
        raise NotImplementedError

    def evicted(self, block: Block) -> None:
        """The block was evicted."""

    def admits(self, block: Block) -> bool | None:
        """Whether a leaf that ends with this block is kept when its use ends. None: the reference does not decide."""
        return None

    def declined(self, block: Block) -> None:
        """The block was not kept."""

    def cleared(self, block: Block) -> None:
        """The block was removed with its namespace."""


@dataclass(eq=False)
class Request:
    """A lease on a node, and the request's hints."""

    node: Node
    hints: object
    given: RequestHints | None
    prompt: int


class Life:
    """A tree of nodes with leases. It makes the same calls to a policy as the cache would."""

    def __init__(self, policy: Policy, clock: ManualClock, reference: type[Reference] | None) -> None:
        self.policy, self.clock = policy, clock
        self.reference = reference(self) if reference is not None else None
        self.root = Node(None)
        self.nodes: list[Node] = []
        self.requests: list[Request] = []
        self.victims: list[int] = []
        self.now = self.num_declined = 0
        self.steps = 0

    def step(self, op: _Op) -> None:
        """Make one step of a life, chosen by three small numbers."""
        kind, which, size = op
        self.steps += 1
        self.clock.advance(0.1 + which % 7 + self.steps / 128)
        if kind < 4:
            self._use(which, size, split=kind == 0)
        elif kind < 7:
            self._insert(which, size)
        elif kind == 7:
            self._extend(which, size)
        elif kind < 10:
            self._end(which)
        elif kind < 13:
            self._evict(size)
        else:
            self._clear(which)
        self.policy.maintain()
        self._check()

    def end_all(self) -> None:
        """End all uses and evict everything."""
        while self.requests:
            self._end(0)
        while self.nodes:
            self._evict(3)
            self._check()
        assert self.policy.victim() is None and len(self.policy) == 0

    # --- events

    def _use(self, which: int, size: int, *, split: bool) -> None:
        node = self.nodes[which % len(self.nodes)] if self.nodes else self.root
        if split and len(node.blocks) > 1:
            node = self._split(node, 1 + which % (len(node.blocks) - 1))
        self._open(node, node.depth + which % 3, HINTS[(which + size) % len(HINTS)])

    def _open(self, node: Node, prompt: int, given: RequestHints | None) -> Request:
        path = self._path(node)
        self._lease(node)
        if path:
            self.policy.touched(path)
        hints = self.policy.opened(path, prompt, given)
        blocks = [block for used in path for block in used.blocks]
        if self.reference is not None:
            for block in blocks:
                block.is_new = False
                self.reference.used(block)
            self.reference.opened(blocks, prompt, given)
        self.requests.append(Request(node, hints, given, prompt))
        return self.requests[-1]

    def _split(self, lower: Node, at: int) -> Node:
        assert lower.parent is not None
        upper = Node(lower.parent, lower.blocks[:at], 1 if lower.uses else 0, [lower])
        lower.parent.children[lower.parent.children.index(lower)] = upper
        lower.parent, lower.blocks = upper, lower.blocks[at:]
        for block in upper.blocks:
            block.node = upper
        self.nodes.append(upper)
        self.policy.split(upper, lower, at)
        return upper

    def _insert(self, which: int, size: int) -> None:
        """A commit moves the request's lease from its node to a new child."""
        if not self.requests or which % 3 == 0:
            self._open(self.root, size + which % 2, HINTS[which % len(HINTS)])
        request = self.requests[which % len(self.requests)]
        parent = request.node
        firsts = {child.blocks[0].key for child in parent.children}
        keys = self._keys(parent, size)
        symbol = which
        while keys[0] in firsts:
            symbol += 1
            keys = self._keys(parent, size, symbol)
        node = Node(parent, uses=1)
        parent.children.append(node)
        self.nodes.append(node)
        self._grow(node, keys, request)
        request.node = node
        above = None if parent is self.root else parent
        self.policy.inserted(node, size, node.depth, request.hints, keys, above)

    def _extend(self, which: int, size: int) -> None:
        growable = [one for one in self.requests if one.node.uses == 1 and not one.node.children]
        growable = [one for one in growable if one.node is not self.root]
        if growable:
            request = growable[which % len(growable)]
            keys = self._keys(request.node, size)
            self._grow(request.node, keys, request)
            self.policy.extended(request.node, size, request.hints, keys)

    def _keys(self, above: Node, num_blocks: int, symbol: int = 0) -> list[int]:
        """The ghost keys of blocks below a node. Equal prefixes have equal keys."""
        blocks = [block for node in self._path(above) for block in node.blocks]
        key = blocks[-1].key if blocks else 1
        keys = []
        for i in range(num_blocks):
            key = (key * 1_000_003 + (symbol if i == 0 else 0) + 7) % 2**61
            keys.append(key)
        return keys

    def _grow(self, node: Node, keys: list[int], request: Request) -> None:
        size = len(node.blocks)
        for key in keys:
            node.blocks.append(Block(key, node.depth + 1, node))
        if self.reference is not None:
            self.reference.inserted(node.blocks[size:], request.given, request.prompt)

    def _lease(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.uses += 1
            if at.uses > 1:
                return
            if at is not self.root:
                self.policy.leased(at)
            at = at.parent

    def _end(self, which: int) -> None:
        if not self.requests:
            return
        node = at = self.requests.pop(which % len(self.requests)).node
        while at is not None:
            at.uses -= 1
            if at.uses:
                break
            if at is not self.root:
                if self.reference is not None:
                    for block in at.blocks:
                        self.now += 1
                        block.is_new = False
                        self.reference.ended(block)
                self.policy.unleased(at)
            at = at.parent
        if type(self.policy).admit is not Policy.admit:
            self._give_up_declined(node)

    def _give_up_declined(self, node: Node) -> None:
        """Remove declined leaves like the cache at the end of a use: at once, leaf by leaf upward."""
        at: Node | None = node
        while at is not None and at in self.leaves():
            keeps, reference = self.policy.admit(at), self.reference
            if reference is not None:
                assert reference.admits(at.blocks[-1]) in (None, keeps)
            if keeps:
                return
            above, size = at.parent, len(at.blocks)
            while at.blocks:
                block = at.blocks.pop()
                if reference is not None:
                    reference.declined(block)
            self.num_declined += size
            self.policy.trimmed(at, size)
            self.policy.removed(at)
            self._drop(at)
            at = above

    def _evict(self, num_blocks: int) -> None:
        while num_blocks:
            node = self.policy.victim()
            if node is None:
                return
            assert isinstance(node, Node)
            size = min(num_blocks, len(node.blocks))
            if self.policy.hook("most") is not None:  # as the cache asks
                most = self.policy.most(node)
                assert 1 <= most <= len(node.blocks)
                size = min(size, most)
            num_blocks -= size
            self.victims.append(self.nodes.index(node))
            self._expect(node)
            for _ in range(size):
                if self.reference is not None:
                    self.reference.evicted(node.blocks[-1])
                node.blocks.pop()
            self.policy.trimmed(node, size)
            if not node.blocks:
                self.policy.removed(node)
                self._drop(node)

    def _clear(self, which: int) -> None:
        """Clear a namespace: an unused leaf is removed, in any order."""
        leaves = [node for node in self.nodes if not node.uses and not node.children]
        if leaves:
            node = leaves[which % len(leaves)]
            self.policy.removed(node)
            while node.blocks:
                if self.reference is not None:
                    self.reference.cleared(node.blocks[-1])
                node.blocks.pop()
            self._drop(node)

    def _drop(self, node: Node) -> None:
        self.nodes.remove(node)
        assert node.parent is not None
        node.parent.children.remove(node)

    # --- invariants

    def leaves(self) -> list[Node]:
        """The evictable leaves."""
        return [node for node in self.nodes if not node.uses and not node.children and node.blocks]

    def _check(self) -> None:
        evictable = [node for node in self.nodes if not node.uses]
        assert len(self.policy) == len(evictable)
        victim = self.policy.victim()
        assert self.policy.victim() is victim and len(self.policy) == len(evictable)
        assert (victim is None) == (not self.leaves())
        if victim is not None:
            assert isinstance(victim, Node) and victim in self.leaves()
            self._expect(victim)

    def _expect(self, victim: Node) -> None:
        """The victim's last block must be the one that the reference names."""
        if self.reference is not None:
            last = [node.blocks[-1] for node in self.leaves()]
            self.reference.settle(last)
            assert victim.blocks[-1] is min(last, key=self.reference.key)

    def _path(self, node: Node) -> list[Node]:
        path = []
        at: Node | None = node
        while at is not None and at is not self.root:
            path.append(at)
            at = at.parent
        return path[::-1]


class PolicyContract:
    """Inherit from this class and set ``name``."""

    name: str
    reference: type[Reference] | None = None

    def make(self, clock: ManualClock | None = None) -> Policy:
        """A new policy."""
        return POLICIES[self.name](CAPACITY, clock or ManualClock(), 7, block_size=2)

    def live(self, ops: list[_Op]) -> Life:
        """Play a whole life and check it at every step."""
        clock = ManualClock()
        life = Life(self.make(clock), clock, self.reference)
        for op in ops:
            life.step(op)
        life.end_all()
        return life

    # Each policy inherits these tests on purpose: one test, several executors.
    @settings(
        max_examples=NUM_LIVES, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow]
    )
    @given(lives)
    def test_random_lives_keep_the_contract(self, ops: list[_Op]) -> None:
        """Every promise holds at every step, at the end everything can be evicted, and a second time it goes alike."""
        assert self.live(ops).victims == self.live(ops).victims

    def test_a_new_policy_has_no_victim(self) -> None:
        """Nothing is evictable yet."""
        policy = self.make()
        assert policy.victim() is None and len(policy) == 0

    @settings(
        max_examples=NUM_CACHES,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(st.data())
    def test_random_calls_of_a_whole_cache(self, data: st.DataObject) -> None:
        """A real cache with running requests, forks, growth, leases, pins and evictions.

        The audit must be clean, and leased and pinned blocks must stay.
        """
        clock = ManualClock()
        grain, default_tenant = data.draw(st.sampled_from([2, 6])), Tenant("default", max_pinned_blocks=5)
        config = CacheConfig(
            CAPACITY, 2, policy=self.name, segment_tokens=grain, default_tenant=default_tenant
        )
        cache = PrefixCache(config, clock=clock)
        running: list[Sequence] = []
        for kind in data.draw(st.lists(st.integers(0, 9), max_size=40)):
            clock.advance(1.5)
            self._act(cache, running, kind, data)
            cache.maintain()
            cache.flush()
            for pin in cache.pins():
                assert cache.match(pin.namespace, PINNED[: pin.num_tokens]).num_tokens == pin.num_tokens
            for sequence in running:
                ids = sequence.token_ids[: sequence.num_committed_tokens]
                assert cache.match(sequence.namespace, ids).num_tokens >= len(ids) // 2 * 2
            audit.check(cache)
        for sequence in running:
            sequence.release()
        for pin in cache.pins():
            cache.unpin(pin)
        num_held = CAPACITY - cache.stats().free_blocks
        assert cache.evict(CAPACITY) == num_held and cache.stats().free_blocks == CAPACITY
        audit.check(cache)

    def _act(self, cache: PrefixCache, running: list[Sequence], kind: int, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        tenant = Namespace(data.draw(st.sampled_from(["a", "b"])), "m")
        try:
            if kind < 4:
                hints = data.draw(st.sampled_from(HINTS))
                running.append(cache.open(tenant, ids, hints=hints))
                running[-1].commit(data.draw(st.integers(running[-1].num_cached_tokens, len(ids))))
            elif kind == 4 and running:
                running[0].extend(ids)
                running[0].commit(running[0].num_tokens)
            elif kind == 5 and running:
                running.extend(running[-1].fork(1))
            elif kind == 6:
                cache.evict(len(ids))
            elif kind == 7 and running:
                running.pop(0).release()
            elif kind > 7:
                with cache.open(tenant, PINNED) as sequence:
                    sequence.commit(len(PINNED))
                    cache.pin(tenant, PINNED[: len(ids) // 2 * 2 + 2], 1.0 + len(ids))
        except CapacityError:
            pass

    @pytest.mark.parametrize("num_nodes", [1, 1_000])
    def test_every_leaf_is_evicted_once(self, num_nodes: int) -> None:
        """Many leaves are each evicted once."""
        policy = self.make()
        nodes = list(range(num_nodes))
        for node in nodes:
            policy.inserted(node, 2, 2)
            policy.unleased(node)
        gone = []
        while (victim := policy.victim()) is not None:
            policy.trimmed(victim, 1)
            policy.trimmed(victim, 1)
            policy.removed(victim)
            gone.append(victim)
        assert sorted(gone) == nodes
