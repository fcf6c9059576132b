"""The interface of eviction policies: an order over the nodes of one tenant, updated by events from the cache.

A policy sees opaque handles, sizes, depths, hints, opaque keys and a clock. It never sees token ids, so it can't leak
them. It keeps the *evictable* nodes, those that no lease protects, and names the next victim among them.

The life of a node, as the cache reports it:

    inserted ─▶ in use ──unleased──▶ evictable ──leased──▶ in use …  evictable ──trimmed*, removed──▶ gone

Every policy implements ``leased``, ``unleased``, ``removed``, ``victim`` and ``__len__``. The other hooks are optional:
the cache never calls a hook that a class doesn't override, so a simple policy doesn't pay for it.

The cache guarantees:

- A use of a node is a use of all its ancestors: they are leased no later, and unleased in the same call or
  later, child before parent. ``touched`` names a request's whole matched path.
- So in any order by last use, or by counts of uses with that as the tie-break, a node comes before its
  parent, and the first evictable node is a leaf.
- Only a node that ``victim`` named, or that ``admit`` declined, is trimmed, and only while it is evictable. A victim
  loses no more than ``most`` blocks before ``victim`` is called again.
- A request's calls come in this order: ``leased`` for the matched nodes, ``touched``, ``opened``; then, as its KV is
  computed, ``inserted`` or ``extended``; at last ``unleased``, and ``admit`` for the leaf. Requests interleave.
- ``admit`` is called at the end of a use, not at its start: the blocks are there in any case while the request runs,
  and others may share them. A declined leaf is ``trimmed`` as a whole and ``removed``.

Ghost keys identify whole prefixes. They are 64-bit values, one for each segment of ``segment_blocks`` blocks that ends
within the given blocks, shallowest first. Equal prefixes of one tenant have equal keys. A collision costs only hit
rate. Policies use the keys to remember evicted blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Final

from radixkv_policies._mypyc import mypyc_attr

Handle = Hashable
"""A node, as a policy sees it: it can be compared, hashed and kept, nothing else."""

Clock = Callable[[], float]

GhostKeys = Sequence[int]
"""Opaque 64-bit keys of prefixes."""


SEGMENT_TOKENS: Final = 512
"""Tokens that a segment stands for. A simulation in which one token stands for a block says so by
``segment_blocks``.
"""


@mypyc_attr(allow_interpreted_subclasses=True)
class Policy:
    """The order in which one tenant's nodes are evicted.

    capacity: blocks that the cache can hold; it bounds what a policy remembers. clock: seconds, never backwards. seed:
    for all random choices. block_size: token ids a block, as the ranges of hints count them. segment_blocks: blocks of
    one ghost key, SEGMENT_TOKENS ÷ block_size, at least 1; use it for weights that are stated in tokens. Raises
    TypeError for a subclass without one of ``required``.
    """

    required: ClassVar[tuple[str, ...]] = ("leased", "unleased", "removed", "victim", "__len__")
    """The methods that a subclass has to have."""

    uses_ghost_keys: ClassVar[bool] = False
    """Whether ``inserted`` and ``extended`` want ghost keys; otherwise the cache computes none."""

    def __init__(
        self, capacity: int, clock: Clock, seed: int, *, block_size: int = 16, segment_blocks: int = 1
    ) -> None:
        # Not an abstract base class: those that mypyc makes take each other's instances for their own.
        missing = [name for name in self.required if getattr(type(self), name) is getattr(Policy, name)]
        if missing:
            raise TypeError(f"the policy {type(self).__name__} has no {', '.join(missing)}")
        self._capacity, self._clock, self._seed = capacity, clock, seed
        self._block_size, self._segment_blocks = block_size, segment_blocks
        self._block_tokens = SEGMENT_TOKENS / segment_blocks
        self.begin()

    def begin(self) -> None:
        """A subclass's own state; everything that it was made with is there by now."""

    def hook(self, name: str) -> Callable[..., Any] | None:
        """The optional hook of that name, or None if the policy leaves it out."""
        if getattr(type(self), name) is getattr(Policy, name):
            return None
        method: Callable[..., Any] = getattr(self, name)
        return method

    def order(self) -> tuple[Callable[..., object], Callable[..., object], Callable[..., object]]:
        """``leased``, ``unleased`` and ``removed`` as callables. A policy may return equivalent faster ones."""
        return self.leased, self.unleased, self.removed

    # --- optional: a request

    def touched(self, nodes: Sequence[Handle]) -> None:
        """A request uses these nodes, a path from the root downward, all in use by now."""

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        """A request matched ``nodes``; ``num_blocks`` of its prompt are what another one like it could match at
        most; ``hints`` are its RequestHints or None.

        What it returns takes the place of the hints in the later calls for this request.
        """
        return hints

    # --- optional: what becomes of a node

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
        """``upper`` is new and takes the first ``num_blocks`` of ``lower``, with its history; in use if ``lower``
        is.
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
        """The next leaf to evict, or None if nothing is evictable. It changes nothing: asked again, it is the same."""
        raise NotImplementedError

    def admit(self, node: Handle) -> bool:
        """Whether to keep a leaf whose last use has just ended. If not, it is removed at once, and so on upward.

        Optional: without it, every leaf is kept until it is a victim.
        """
        return True

    def most(self, node: Handle) -> int:
        """How many blocks of the victim may go before ``victim`` is asked again. Optional: without it, all."""
        raise NotImplementedError

    def __len__(self) -> int:
        """How many nodes are evictable."""
        raise NotImplementedError

    # --- optional: slow work

    def maintain(self) -> None:
        """Slow work, such as learning: called about once a second, in a thread of its own while other hooks run."""
