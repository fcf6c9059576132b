"""Sequence: a lease on a match, private blocks, and the tokens that are not committed yet. Run: shared private blocks.

    block table   [ leased from the tree ][ in runs, shared ][ own, from position ``_own`` on ]
    tokens        [0 … committed)          [committed … num_tokens)

What a sequence shares with nobody is just the end of its block table. A ``Run`` is a stretch of private blocks
that several share, and knows by count how many *owners* it has: sequences that end with it and runs that
continue it. Runs form a tree that hangs below the radix tree: a fork makes the parent's own blocks a run,
adds an owner to it and copies nothing; a divergent write starts blocks of one's own again. So a fork costs
the same however many blocks are shared, and no block carries a count of its own.

    fork, then both write:            run [20, 23)  owners 2
                                      ├── own [23, 24)  the parent, writing on in its tail block
                                      └── own [23, 24)  the child, in a copy of that tail

When a commit gives blocks to the tree that other sequences share, their run keeps a lease on the node in
place of the blocks (``node`` is set), so that no block table changes and nothing is counted twice.

``SequenceState`` is the bookkeeping on one sequence; what needs the pool or the tree is done by the cache, which
holds its lock around every call. ``Sequence`` is the user's handle of the state. The cache holds states and no handles,
so a handle that nobody has any more is collected, and its finaliser tells the cache.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import IntegrityError, ReentrantCall
from radixkv.index.blocks import unpack
from radixkv.index.locking import Guard
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES, Key, TokenIds, decode
from radixkv.index.tree import Node

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.cache import PrefixCache
    from radixkv.index.device_beams import Lending
    from radixkv.index.ghost_keys import SegmentKeys
    from radixkv.index.tenants import NamespaceTree
    from radixkv.storage.plan import BlockIds

MAX_CHILDREN = 65_536
"""Of one fork."""

MAX_COPIED_TAIL_BYTES = 4_096
"""A fork copies at most so many key bytes for each child; longer tails are folded into the shared base once."""


class Run:
    """Private blocks ``[start, end)`` that sequences share, or that duplicate what the tree has."""

    __slots__ = ("block_ids", "node", "owners", "parent", "start")

    def __init__(self, parent: Run | None, start: int, block_ids: bytes | bytearray | memoryview) -> None:
        self.parent = parent
        self.start = start
        self.block_ids = memoryview(block_ids)
        self.owners = 1
        self.node: Node | None = None

    @property
    def end(self) -> int:
        """The position after its last block."""
        return self.start + len(self.block_ids) // ID_BYTES

    @property
    def is_writable(self) -> bool:
        """Whether its one owner may write into it: not shared, and not the tree's."""
        return self.owners == 1 and self.node is None

    def split(self, at: int) -> Run:
        """Cut before position ``at``; returns the new upper part, this run keeps the lower one and its owners. O(1).

        The caller leases ``node`` once more if there is one.
        """
        assert self.start < at < self.end
        cut = (at - self.start) * ID_BYTES
        upper = Run(self.parent, self.start, self.block_ids[:cut])
        upper.node = self.node
        self.block_ids = self.block_ids[cut:]
        self.start, self.parent = at, upper
        return upper


class SequenceState:
    """What the cache knows of a sequence. The cache holds it, and so does the Sequence that the user has.

    All methods are called under the cache's lock.
    """

    __slots__ = (
        "_base",
        "_base_size",
        "_hints",
        "_is_interrupted",
        "_is_open",
        "_is_stale",
        "_lent",
        "_node",
        "_num_cached",
        "_num_committed",
        "_own",
        "_run",
        "_segment_keys",
        "_size",
        "_table",
        "_tail",
        "_tree",
    )
    _is_interrupted: bool  # set only once an interrupted call has closed it
    _is_stale: bool  # set only once its tenant was purged: true until it is released
    _lent: Lending | None  # set only once it was lent to the device, when it isn't open: None afterwards

    def __init__(
        self,
        tree: NamespaceTree,
        node: Node,
        key: bytes,
        table: bytearray,
        num_cached: int,
        num_cached_blocks: int,
    ) -> None:
        self._tree = tree
        self._node = node
        self._base = key  # immutable, shared by forks
        self._base_size = len(
            key
        )  # how many bytes of it are the sequence's: a truncation keeps the rest of it
        self._tail = bytearray()  # what was appended since
        self._size = len(key)  # of both, in bytes
        self._num_cached = num_cached
        self._num_committed = num_cached
        self._table = table
        self._own = (
            num_cached_blocks  # the position in the table from which the blocks are this sequence's alone
        )
        self._run: Run | None = None  # the last of the runs before that
        self._is_open = True
        self._hints: object = None  # what the policy wants to be told with what it computes
        self._segment_keys: SegmentKeys | None = None  # of what is committed, where the policy wants them

    @property
    def is_lent(self) -> bool:
        """Whether the device moves it on."""
        return not self._is_open and getattr(self, "_lent", None) is not None

    @property
    def is_held(self) -> bool:
        """Whether it has something to release: it is open, lent, or stale."""
        return self._is_open or getattr(self, "_is_stale", False) or self.is_lent

    @property
    def description(self) -> str:
        """What a warning says of it: no token id."""
        tenant, blocks = self._tree.tenant.tenant_id, self.num_blocks
        return f"a sequence of tenant {tenant!r} with {self.num_tokens} tokens in {blocks} blocks"

    @property
    def num_tokens(self) -> int:
        """Tokens it has room for."""
        return self._size // TOKEN_BYTES

    @property
    def num_blocks(self) -> int:
        """Blocks of its block table."""
        return len(self._table) // ID_BYTES

    @property
    def block_table(self) -> BlockIds:
        """Block ids in order, int32 ``[num_blocks]``, a snapshot. O(blocks)."""
        return unpack(bytes(self._table))

    def key_between(self, start: int, stop: int) -> bytes:
        """Key bytes ``[start, stop)``."""
        size = self._base_size
        if stop <= size:
            return self._base[start:stop]
        if start >= size:
            return bytes(self._tail[start - size : stop - size])
        return self._base[start:size] + bytes(self._tail[: stop - size])

    def key_to(self, stop: int) -> Key:
        """The key up to ``stop`` at least, at most twice as long, for who may keep it: of the prompt mostly no copy."""
        size = self._base_size
        if stop > size:
            return self.key_between(0, size), bytes(self._tail[: stop - size])
        return self._base if len(self._base) <= 2 * stop else self._base[:stop]

    @property
    def shared_tail(self) -> Run | None:
        """The run that holds the last block, if others share it so that it must not be written into."""
        run = self._run
        if run is None or len(self._table) > self._own * ID_BYTES or run.is_writable:
            return None
        return run

    def child(self) -> SequenceState:
        """Another sequence in the same state that shares all blocks; the caller leases the node for it."""
        if len(self._tail) > MAX_COPIED_TAIL_BYTES:
            self._base, self._tail = self._base[: self._base_size] + bytes(self._tail), bytearray()
            self._base_size = len(self._base)
        if len(self._table) > self._own * ID_BYTES:
            self._run = Run(self._run, self._own, self._table[self._own * ID_BYTES :])
            self._own = len(self._table) // ID_BYTES
        twin = SequenceState(self._tree, self._node, self._base, self._table[:], self._num_cached, self._own)
        twin._base_size = self._base_size
        twin._hints = self._hints
        twin._tail = self._tail[:]
        twin._size = self._size
        twin._num_committed = self._num_committed
        twin._run = self._run
        if twin._run is not None:
            twin._run.owners += 1
        return twin

    def become(self, other: SequenceState) -> None:
        """Be what the other one is, which nobody knows of, and hold what it holds."""
        self._tree, self._node, self._run, self._hints = other._tree, other._node, other._run, other._hints
        self._base, self._base_size, self._tail = other._base, other._base_size, other._tail
        self._size, self._table, self._own = other._size, other._table, other._own
        self._num_cached, self._num_committed = other._num_cached, other._num_committed
        self._segment_keys = other._segment_keys

    def cut_key(self, size: int) -> None:
        """Forget key bytes from ``size`` on. O(1)."""
        self._size = size
        if size < self._base_size:
            self._base_size, self._tail = size, bytearray()
        else:
            del self._tail[size - self._base_size :]


class Sequence:
    """A request's token ids and the blocks that hold their KV. Made by ``PrefixCache.open``; use it in a ``with``.

    The first ``num_cached_tokens`` tokens' KV are there already; the engine computes the rest into the blocks
    of ``block_table`` and says so with ``commit``. Every method but ``release`` raises LeaseError once the sequence
    is released or consumed, StaleGeneration once its tenant was purged, SequenceLent while the device moves it on.
    Safe to use from several threads, one call at a time taking effect.

    A sequence that is forgotten (collected before it was released) gives a ResourceWarning, and the next call of the
    cache releases it.
    """

    __slots__ = ("_guard", "_index", "_state")
    _guard: Guard  # set only by the finaliser

    def __init__(self, index: PrefixCache, state: SequenceState) -> None:
        self._index = index
        self._state = state

    def __del__(self) -> None:
        try:
            state = self._state
        except AttributeError:  # its making was interrupted
            return
        if state._is_open or state in self._index._sequences:
            self._guard = Guard(self._index, state)

    def __repr__(self) -> str:
        standing = "lent" if self.is_lent else "open" if self._state._is_open else "released"
        return f"<Sequence {standing}: {self.num_tokens} tokens ({self.num_committed_tokens} committed)>"

    # --- what it is

    @property
    def namespace(self) -> Namespace:
        """Where it matches and commits."""
        return self._state._tree.namespace

    @property
    def is_open(self) -> bool:
        """False once released or consumed, or its tenant purged."""
        state = self._state
        return state._is_open or (state.is_lent and not getattr(state, "_is_stale", False))

    @property
    def is_lent(self) -> bool:
        """Whether the device moves it on; what is said of it here is as it was when it was lent."""
        return self._state.is_lent

    @property
    def num_tokens(self) -> int:
        """Tokens it has room for: prompt and everything appended."""
        return self._state.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens whose KV were found when it was opened: skip these in the prefill."""
        return self._state._num_cached

    @property
    def num_committed_tokens(self) -> int:
        """Leading tokens whose KV exist."""
        return self._state._num_committed

    @property
    def num_blocks(self) -> int:
        """Blocks of its block table: ⌈num_tokens ÷ block_size⌉."""
        return self._state.num_blocks

    @property
    def block_table(self) -> BlockIds:
        """Block ids in order, int32 ``[num_blocks]``, read-only: a snapshot, later calls don't change it. O(blocks).

        Raises LeaseError once the sequence is released or consumed, and IntegrityError once the cache is dead: the
        blocks may be another's by then. A sequence whose tenant was purged has its blocks until its release. Of a lent
        sequence: see ``is_lent``.
        """
        if not self._state._is_open or self._index.is_broken:
            self._index.require_readable(self._state)
        return self._state.block_table

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """Its ids, uint32 ``[num_tokens]``, read-only. O(tokens) copy."""
        return decode(self._index.read_sequence(self._state))

    # --- what it does

    def commit(self, num_tokens: SupportsIndex) -> None:
        """The first ``num_tokens`` tokens' KV exist now: their whole blocks become matchable.

        Blocks that another sequence committed first stay private to this one until its release; the block
        table never changes. Raises ArgumentError unless ``num_committed_tokens ≤ num_tokens ≤ num_tokens of
        the sequence``. O(nodes passed), independent of what is committed already.
        """
        self._index.commit_sequence(self._state, num_tokens)

    def append(self, token_id: SupportsIndex) -> None:
        """Make room for one more token: ``PrefixCache.append`` with a batch of one."""
        self._index.append_to([self._state], (token_id,))

    def extend(self, ids: TokenIds) -> None:
        """Make room for ``ids``; copies a shared tail block first.

        Raises TokenError, CapacityError, and changes nothing. O(ids).
        """
        self._index.extend_sequence(self._state, ids)

    def truncate(self, num_tokens: SupportsIndex) -> None:
        """Roll back to ``num_tokens`` what was never committed, such as rejected drafts; frees whole blocks.

        Raises ArgumentError unless ``num_committed_tokens ≤ num_tokens ≤ num_tokens of the sequence``.
        """
        self._index.truncate_sequence(self._state, num_tokens)

    def fork(self, num_children: SupportsIndex) -> list[Sequence]:
        """``num_children`` (1 to 65,536) sequences that share every block with this one, which stays open. Copies no
        block: the first write into a shared tail block does. Raises ArgumentError. O(children).
        """
        return self._index.fork_sequence(self._state, num_children)

    def release(self) -> None:
        """Give up the lease and free what is private; what was committed stays resident.

        If it is lent to the device, all that were lent together are taken back first, which waits for the device. A
        second call raises LeaseError. If a finaliser calls it in the middle of a call of the same cache, the next call
        releases the sequence. O(nodes on the path).
        """
        try:
            self._index.release_sequence(self._state)
        except ReentrantCall as error:
            self._index.defer(self._state, error)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state.is_held and not self._index.is_dead:
            try:
                self.release()
            except IntegrityError:
                if error is None or not self._index.is_dead:
                    raise  # else the error that ends the block goes on
