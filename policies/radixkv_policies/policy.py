"""The interface of eviction policies: an order over the nodes of one tenant, updated by events from the cache.

A policy sees opaque handles, sizes, depths, hints, opaque keys and a clock. It never sees token ids, so it can't leak
them. It keeps the *evictable* nodes, those that no lease protects, and names the next victim among them.

The life of a node, as the cache reports it:

    inserted ─▶ in use ──unleased──▶ evictable ──leased──▶ in use …  evictable ──trimmed*, removed──▶ gone

Every policy implements ``leased``, ``unleased``, ``removed``, ``victim`` and ``__len__``. The other hooks are
optional. The cache never calls a hook that a class doesn't override, so it costs nothing.

The cache guarantees:

- A use of a node is a use of all its ancestors. They are leased no later, and unleased in the same call or later,
  child before parent. ``touched`` gets a request's whole matched path.
- So if the order is by last use, or by counts of uses with last use as the tie-break, a node comes before its parent.
  The first evictable node is then a leaf.
- Only a node that ``victim`` named, or that ``admit`` rejected, is trimmed, and only while it is evictable. A victim
  loses no more than ``most`` blocks before ``victim`` is called again.
- A request's calls come in this order: ``leased`` for the matched nodes, ``touched``, ``opened``. Then, as its KV is
  computed, ``inserted`` or ``extended``. At last ``unleased``, and ``admit`` for the leaf. Requests interleave.
- ``admit`` is called at the end of a use, not at its start, because the running request needs the blocks, and others
  may share them. A rejected leaf is ``trimmed`` as a whole and ``removed``.

Ghost keys identify whole prefixes. They are 64-bit values, one for each segment of ``segment_blocks`` blocks that
ends within the given blocks, shallowest first. Equal prefixes of one tenant have equal keys. A collision costs only
hit rate. Policies use the keys to remember evicted blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from radixkv_policies._mypyc import mypyc_attr

Handle = Hashable
"""A node, as a policy sees it. A policy may only compare it, hash it and keep it."""

Clock = Callable[[], float]

GhostKeys = Sequence[int]
"""Opaque 64-bit keys of prefixes."""


class Shape(NamedTuple):
    """Questions about nodes, O(1) each: the parent (None at the top), whether it is a leaf, and its blocks."""

    parent: Callable[[Handle], Handle | None]
    is_leaf: Callable[[Handle], bool]
    num_blocks: Callable[[Handle], int]


SEGMENT_TOKENS: Final = 512
"""Tokens per segment. In a simulation with one token per block, ``segment_blocks`` gives the size instead."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Policy:
    """The order in which one tenant's nodes are evicted.

    - capacity: blocks that the cache can hold. It bounds what a policy remembers.
    - clock: returns seconds, never backwards. seed: for all random choices.
    - block_size: token ids a block, to convert the ranges of hints.
    - segment_blocks: blocks of one ghost key, SEGMENT_TOKENS ÷ block_size, at least 1. Use it for weights in tokens.

    Raises TypeError for a subclass without one of the ``required`` methods.
    """

    required: ClassVar[tuple[str, ...]] = ("leased", "unleased", "removed", "victim", "__len__")
    """The methods that a subclass must define."""

    uses_ghost_keys: ClassVar[bool] = False
    """Whether ``inserted`` and ``extended`` need ghost keys. Otherwise the cache computes none."""

    def __init__(
        self, capacity: int, clock: Clock, seed: int, *, block_size: int = 16, segment_blocks: int = 1
    ) -> None:
        # Not an abstract base class, because mypyc's abstract classes accept each other's instances.
        missing = [name for name in self.required if getattr(type(self), name) is getattr(Policy, name)]
        if missing:
            raise TypeError(f"the policy {type(self).__name__} has no {', '.join(missing)}")
        self._capacity, self._clock, self._seed = capacity, clock, seed
        self._block_size, self._segment_blocks = block_size, segment_blocks
        self._block_tokens = SEGMENT_TOKENS / segment_blocks
        self.begin()

    def begin(self) -> None:
        """Set up the subclass's own state. The arguments of the constructor are set already."""

    def hook(self, name: str) -> Callable[..., Any] | None:
        """The optional hook of that name, or None if the policy doesn't define it."""
        if getattr(type(self), name) is getattr(Policy, name):
            return None
        method: Callable[..., Any] = getattr(self, name)
        return method

    def order(self) -> tuple[Callable[..., object], Callable[..., object], Callable[..., object]]:
        """``leased``, ``unleased`` and ``removed`` as callables. A policy may return equivalent faster ones."""
        return self.leased, self.unleased, self.removed

    # --- optional: a request

    def touched(self, nodes: Sequence[Handle]) -> None:
        """A request uses these nodes. They are a path from the root downward, and all are in use."""

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        """A request matched ``nodes``. Its return value replaces the hints in later calls for this request.

        num_blocks: blocks of its prompt that an equal request could match at most. hints: its RequestHints or None.
        To insert computed blocks with hints, make this call too, and pass its value to ``inserted``.
        """
        return hints

    def noted(self, request: object, hints: object, node: Handle | None = None) -> None:
        """More is known of a request that was opened, while it runs or after its end: RequestHints with labels.

        ``request``: what ``opened`` returned for it, perhaps of the policy before this one. ``node``: instead of it, a
        node; the request is the one that used its end last.
        """

    # --- optional: requests that wait

    def expect_requests(self, shape: Shape) -> None:
        """The tenant's waiting requests are announced from now on. ``order`` and ``hook`` are asked again after it.

        ``shape``: answers questions about nodes, for policies that keep no tree of their own.
        """

    def announced(
        self, request: Handle, node: Handle | None, num_blocks: int, missing: float, hints: object
    ) -> None:
        """A request waits. The first ``num_blocks`` of ``node`` are the end of its resident prefix.

        Called again after each change of these, and for a new policy in the order of the announcements. ``node``: None
        if nothing is resident. ``missing``: the share of its blocks that isn't resident. ``hints``: its RequestHints or
        None. Nothing is promised to it.
        """

    def withdrawn(self, request: Handle) -> None:
        """The request waits no longer."""

    # --- optional: changes of a node

    def inserted(
        self,
        node: Handle,
        num_blocks: int,
        depth: int,
        hints: object = None,
        ghost_keys: GhostKeys = (),
        parent: Handle | None = None,
    ) -> None:
        """A new node, in use, below ``parent`` (None: the root). ``depth``: blocks from the root to its end."""

    def extended(
        self, node: Handle, num_blocks: int, hints: object = None, ghost_keys: GhostKeys = ()
    ) -> None:
        """A leaf in use grew by ``num_blocks``."""

    def split(self, upper: Handle, lower: Handle, num_blocks: int) -> None:
        """``lower`` was split. The new node ``upper`` takes its first ``num_blocks``, and is in use if ``lower`` is.

        ``upper`` has the same history as ``lower``.
        """

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        """The victim lost its last ``num_blocks`` to an eviction."""

    # --- the order

    def leased(self, node: Handle) -> object:
        """An evictable node came into use."""
        raise NotImplementedError

    def unleased(self, node: Handle) -> object:
        """A node in use became evictable."""
        raise NotImplementedError

    def removed(self, node: Handle) -> object:
        """An evictable node is gone: nothing is left of it after an eviction, or it was cleared."""
        raise NotImplementedError

    def victim(self) -> Handle | None:
        """The next leaf to evict, or None if nothing is evictable. Repeated calls return the same leaf."""
        raise NotImplementedError

    def admit(self, node: Handle) -> bool:
        """Whether to keep a leaf whose last use has just ended. If not, it is removed at once, and so on upward.

        Optional: without it, every leaf is kept until it is a victim.
        """
        return True

    def most(self, node: Handle) -> int:
        """Blocks that the victim may lose before ``victim`` is called again. Optional: without it, all."""
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of evictable nodes."""
        raise NotImplementedError

    # --- optional: slow work

    def maintain(self) -> None:
        """Do slow work, such as learning. Called about once a second, in a separate thread while other hooks run."""
