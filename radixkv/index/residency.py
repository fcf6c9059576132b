"""Residency of announced prompts: how much of each is resident, kept up with every change of a tree.

A *claim* is an announced prompt (``announcements.Announcement``). It protects nothing. In each tree that could serve
it, a *hook* marks where its resident part ends:

    root ──"[0 … 1024)"──▶ node ──"[1024 … 1312)"──▶ leaf
                            │                          └ inside: the prompt leaves the label, or ends in it
                            └ below: all of the path is resident; kept by the next block of the prompt

    eviction    cuts the hooks of a leaf, or moves them to its parent
    new nodes   take the hooks below their parent whose next block is theirs, and no others
    split       moves the hooks that end in the upper half

So a change costs O(hooks of the changed node), and nobody walks from the root again. A tree without claims has no
``Hooks``, so its changes cost nothing more.

A claim of a tenant that reads bases has a hook in each tree that could serve it, and ``head``: what bases give.

Everything here follows from the open claims. After an interrupted call, recovery hooks them anew.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from radixkv.index.tree import Node, RadixTree, num_common_bytes
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixkv.clock import Clock
    from radixkv.config import Namespace
    from radixkv.index.locking import Owner


class Claim:
    """An announced prompt.

    - ``key``, ``size``: the key, and how many bytes of it are whole blocks. The key is dropped when the claim ends.
    - ``end``: resident bytes. ``head``: bytes that bases give.
    - ``hooks``: one for each tree that could serve it.
    - ``until``: its end on the cache's clock. ``is_over``: it has ended.
    """

    __slots__ = (
        "_cache",
        "end",
        "head",
        "hints",
        "hooks",
        "is_over",
        "key",
        "namespace",
        "number",
        "size",
        "until",
    )

    def __init__(
        self,
        cache: Owner,
        namespace: Namespace,
        key: bytes,
        size: int,
        hints: object,
        until: float,
        number: int,
    ) -> None:
        self._cache, self.namespace, self.key, self.size = cache, namespace, key, size
        self.hints, self.until, self.number = hints, until, number
        self.end = self.head = 0
        self.hooks: list[Hook] = []
        self.is_over = False

    @property
    def share_missing(self) -> float:
        """The share of its whole blocks that is not resident."""
        return 1.0 - self.end / self.size if self.size else 0.0


refuse_copies(Claim, "the cache keeps only this one up to date. Pass it on")


class Hook:
    """Where the resident part of a claim ends in one tree.

    ``node``: the deepest node that it reaches into. ``end``: its bytes. ``next``: the next block, if all of the node is
    passed and the prompt continues.
    """

    __slots__ = ("claim", "end", "home", "next", "node")

    def __init__(self, home: Hooks, claim: Claim, node: Node) -> None:
        self.home, self.claim, self.node, self.end = home, claim, node, 0
        self.next: bytes | None = None


class _Hanging:
    """The hooks of one node. ``below``: by the next block. ``inside``: those that don't pass the whole node."""

    __slots__ = ("below", "inside")

    def __init__(self) -> None:
        self.below: dict[bytes, dict[Hook, None]] = {}
        self.inside: dict[Hook, None] = {}

    def all(self) -> list[Hook]:
        """All of them, in a fixed order."""
        found = list(self.inside)
        for group in self.below.values():
            found += group
        return found

    @property
    def is_empty(self) -> bool:
        """Whether no hook hangs here."""
        return not self.inside and not self.below


class Hooks:
    """The hooks of one tree. Every change of its nodes is reported here, after it."""

    __slots__ = ("_at", "_step", "_tree", "_waiting")

    def __init__(self, tree: RadixTree, waiting: Waiting) -> None:
        self._tree, self._waiting, self._step = tree, waiting, tree.block_bytes
        self._at: dict[Node, _Hanging] = {}

    def add(self, claim: Claim) -> None:
        """Hook a claim whose prompt begins with the tree's head. O(nodes on the path)."""
        hook = Hook(self, claim, self._tree.root)
        self._walk(hook, None, 0)
        claim.hooks.append(hook)
        self._waiting.settle(hook)

    def discard(self, hook: Hook) -> None:
        """Remove the hook of a claim that ends. O(1)."""
        at = self._at[hook.node]
        if hook.next is None:
            del at.inside[hook]
        else:
            group = at.below[hook.next]
            del group[hook]
            if not group:
                del at.below[hook.next]
        if at.is_empty:
            del self._at[hook.node]

    def close(self) -> None:
        """Remove all hooks: no match reaches the tree any more. O(hooks)."""
        for at in self._at.values():
            for hook in at.all():
                hook.claim.hooks.remove(hook)
                self._waiting.lose(hook)
        self._at = {}

    def attached(self, parent: Node, first: bytes) -> None:
        """New nodes hang below ``parent``, the first block of which is ``first``. O(hooks that they take)."""
        at = self._at.get(parent)
        if at is None:
            return
        group = at.below.pop(first, None)
        if group is None:
            return
        if at.is_empty:
            del self._at[parent]
        for hook in group:
            self._walk(hook, parent, hook.end)
            self._waiting.settle(hook)

    def grown(self, leaf: Node, added: int) -> None:
        """A leaf grew by ``added`` label bytes. O(hooks that passed it)."""
        at = self._at.get(leaf)
        if at is None or not at.below:
            return
        groups, at.below = at.below, {}
        label = leaf.label
        start, passed = leaf.depth * self._step - len(label), len(label) - added
        first = label[passed : passed + self._step]
        for following, group in groups.items():
            for hook in group:
                end = hook.end
                if following == first:
                    claim = hook.claim
                    end = start + num_common_bytes(label, claim.key, start, claim.size, self._step)
                self._hang(hook, leaf, end)
                self._waiting.settle(hook)

    def split(self, upper: Node, lower: Node) -> None:
        """``lower`` was split, and ``upper`` took its first blocks. O(hooks of the node)."""
        at = self._at.pop(lower, None)
        if at is None:
            return
        cut = upper.depth * self._step
        for hook in at.all():
            self._hang(hook, upper if hook.end <= cut else lower, hook.end)
            self._waiting.settle(hook)

    def trimmed(self, leaf: Node) -> None:
        """A leaf lost its last blocks. O(hooks of the leaf)."""
        at = self._at.pop(leaf, None)
        if at is None:
            return
        end = leaf.depth * self._step
        for hook in at.all():
            self._hang(hook, leaf, min(hook.end, end))
            self._waiting.settle(hook)

    def removed(self, leaf: Node) -> None:
        """A leaf is gone. O(its hooks)."""
        at = self._at.pop(leaf, None)
        if at is not None:
            assert leaf.parent is not None
            self._raise_to(leaf.parent, at)

    def leave(self, nodes: list[Node], above: Node) -> None:
        """These nodes, all that is below one child of ``above``, leave the tree. O(nodes + their hooks)."""
        for node in nodes:
            at = self._at.pop(node, None)
            if at is not None:
                self._raise_to(above, at)

    def _raise_to(self, above: Node, at: _Hanging) -> None:
        end = above.depth * self._step
        for hook in at.all():
            self._hang(hook, above, end)
            self._waiting.settle(hook)

    def _walk(self, hook: Hook, node: Node | None, at: int) -> None:
        """Hang a hook as deep as the prompt is resident, from the end of ``node`` on. O(nodes on the way)."""
        claim = hook.claim
        end, at, child, common = self._tree.walk(claim.key, claim.size, bytearray(), node, at)
        self._hang(hook, end if child is None else child, at + common)

    def _hang(self, hook: Hook, node: Node, end: int) -> None:
        at = self._at.get(node)
        if at is None:
            at = self._at[node] = _Hanging()
        hook.node, hook.end, claim = node, end, hook.claim
        if end < claim.size and end == node.depth * self._step:
            hook.next = following = claim.key[end : end + self._step]
            group = at.below.get(following)
            if group is None:
                at.below[following] = {hook: None}
            else:
                group[hook] = None
        else:
            hook.next = None
            at.inside[hook] = None


class Waiting:
    """The claims of one tenant.

    ``by_number``: the open claims, in the order of their announcement. ``on_…``: the policy's hooks, or None.
    """

    __slots__ = ("_changed", "_clock", "_due", "by_namespace", "by_number", "on_announced", "on_withdrawn")

    def __init__(self, changed: dict[Claim, None], clock: Clock) -> None:
        self._changed, self._clock = changed, clock
        self.by_number: dict[int, Claim] = {}
        self.by_namespace: dict[Namespace, dict[Claim, None]] = {}
        self._due: list[tuple[float, int]] = []
        self.on_announced: Callable[..., Any] | None = None
        self.on_withdrawn: Callable[..., Any] | None = None

    def __len__(self) -> int:
        return len(self.by_number)

    def add(self, claim: Claim) -> None:
        """Add a claim that is hooked. It doesn't count as changed."""
        self._changed.pop(claim, None)
        if len(self._due) > 2 * len(self.by_number) + 64:
            self._due = [(each.until, each.number) for each in self.by_number.values()]
            heapify(self._due)
        heappush(self._due, (claim.until, claim.number))
        self.by_namespace.setdefault(claim.namespace, {})[claim] = None
        self.by_number[claim.number] = claim

    def end(self, claim: Claim) -> None:
        """End a claim, unless it has ended. O(its hooks)."""
        if claim.is_over:
            return
        claim.is_over = True  # first: if the end is interrupted, recovery finishes it
        self.by_number.pop(claim.number, None)
        beside = self.by_namespace.get(claim.namespace)
        if beside is not None:
            beside.pop(claim, None)
            if not beside:
                del self.by_namespace[claim.namespace]
        hooks, claim.hooks = claim.hooks, []
        for hook in hooks:
            hook.home.discard(hook)
            if self.on_withdrawn is not None:
                self.on_withdrawn(hook)
        self._changed.pop(claim, None)
        claim.key = b""

    def end_due(self) -> None:
        """End the claims whose time is over. O(1), plus the ended claims."""
        due = self._due
        if not due:
            return
        now = self._clock()
        while due and due[0][0] <= now:
            claim = self.by_number.get(heappop(due)[1])
            if claim is not None:
                self.end(claim)

    def end_all(self) -> None:
        """End all claims. O(claims)."""
        for claim in list(self.by_number.values()):
            self.end(claim)

    def settle(self, hook: Hook) -> None:
        """A hook was hung: note what is resident now, and tell the policy."""
        self._note(hook.claim)
        if self.on_announced is not None:
            self._tell(hook)

    def lose(self, hook: Hook) -> None:
        """A hook was removed because no match reaches its tree any more."""
        self._note(hook.claim)
        if self.on_withdrawn is not None:
            self.on_withdrawn(hook)

    def set_head(self, claim: Claim, size: int) -> None:
        """Note how many bytes of a prompt bases give."""
        claim.head = size
        self._note(claim)

    def _note(self, claim: Claim) -> None:
        end = claim.head
        for hook in claim.hooks:
            if hook.end > end:
                end = hook.end
        if end != claim.end:
            claim.end = end
            self._changed[claim] = None

    def _tell(self, hook: Hook) -> None:
        node, num_blocks = hook.node, 0
        if node.parent is not None:
            size = node.tree.block_bytes
            num_blocks = hook.end // size - node.depth + node.num_blocks
        assert self.on_announced is not None
        told = None if node.parent is None else node
        self.on_announced(hook, told, num_blocks, hook.claim.share_missing, hook.claim.hints)

    def tell_all(self) -> None:
        """Tell a new policy of all claims, in the order of their announcement. O(claims)."""
        if self.on_announced is not None:
            for claim in self.by_number.values():
                for hook in claim.hooks:
                    self._tell(hook)

    def forget_hooks(self) -> None:
        """After an interruption, keep the claims that are open, without hooks. O(claims)."""
        self.by_number = {number: claim for number, claim in self.by_number.items() if not claim.is_over}
        self.by_namespace = {}
        for claim in self.by_number.values():
            claim.hooks = []
            self.by_namespace.setdefault(claim.namespace, {})[claim] = None
        for claim in [each for each in self._changed if each.is_over]:
            del self._changed[claim]
        self._due = [(claim.until, claim.number) for claim in self.by_number.values()]
        heapify(self._due)


class Claims:
    """The claims of one cache, by tenant. ``changed``: those whose residency has changed since somebody asked."""

    __slots__ = ("_clock", "changed", "last_number", "tenants")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.tenants: dict[str, Waiting] = {}
        self.changed: dict[Claim, None] = {}
        self.last_number = 0

    @property
    def cache(self) -> Owner | None:
        """The cache, as long as there are claims. Without claims, this object doesn't keep the cache alive."""
        for waiting in self.tenants.values():
            for claim in waiting.by_number.values():
                return claim._cache
        return None

    def of(self, tenant: str) -> Waiting:
        """The claims of a tenant, perhaps none. O(1)."""
        waiting = self.tenants.get(tenant)
        return Waiting(self.changed, self._clock) if waiting is None else waiting

    def take_changed(self) -> list[Any]:
        """Return the changed claims, in the order of their announcement. None are changed afterwards."""
        found = sorted(self.changed, key=_number)
        self.changed.clear()
        return found

    def end_due(self) -> None:
        """End the claims of all tenants whose time is over. O(tenants with claims + ended claims)."""
        for waiting in self.tenants.values():
            waiting.end_due()


def _number(claim: Claim) -> int:
    return claim.number
