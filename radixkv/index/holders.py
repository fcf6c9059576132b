"""Objects other than trees that hold blocks: sequences with their runs, leases, lent beams.

    block table   [ leased from the tree ][ in runs, shared ][ own, from position ``_own`` on ]
    tokens        [0 … committed)          [committed … num_tokens)[reserved: ids come later)

The own blocks of a sequence, which it shares with no other, are at the end of its block table. A ``Run`` is a range of
private blocks that several sequences share. It counts its *owners*: sequences that end with it and runs that continue
it. Runs form a tree below the radix tree. A fork turns the parent's own blocks into a run, adds an owner to it and
copies nothing. A divergent write starts new own blocks. So the cost of a fork doesn't depend on how many blocks are
shared, and no block needs a reference count.

    fork, then both write:            run [20, 23)  owners 2
                                      ├── own [23, 24)  the parent, writing on in its tail block
                                      └── own [23, 24)  the child, in a copy of that tail

A commit may give blocks to the tree that other sequences share. Their run then keeps a lease on the node in place of
the blocks (``node`` is set). So no block table changes and nothing is counted twice.

The cache holds these states. A user holds a handle of a state: ``Sequence``, ``Lease``, ``LentBeams``. The cache holds
no handles. So a forgotten handle is garbage-collected, and its finaliser tells the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from radixkv.index.blocks import unpack
from radixkv.index.match import Match
from radixkv.index.tenants import NOT_COUNTED, NamespaceTree
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES, Key
from radixkv.index.tree import Node, SoleUser

if TYPE_CHECKING:
    from radixkv.index.ghost_keys import SegmentKeys
    from radixkv.index.locking import Owner
    from radixkv.index.tenants import TenantState
    from radixkv.storage.beams import DeviceBeams
    from radixkv.storage.plan import BlockIds

MAX_COPIED_TAIL_BYTES = 4_096
"""A fork copies at most this many key bytes for each child. A longer tail is moved into the shared key once."""


RELEASE: Final = 0
INTERRUPTION: Final = 1
PURGE: Final = 2
"""The reason why a sequence was closed. After a purge, the sequence holds its blocks until its release."""


class Run:
    """Private blocks ``[start, end)`` that sequences share, or that duplicate blocks of the tree."""

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
        """Whether its owner may write into it: there is only one owner, and the blocks don't belong to the tree."""
        return self.owners == 1 and self.node is None

    def split(self, at: int) -> Run:
        """Cut before position ``at`` and return the new upper part. This run keeps the lower part and its owners. O(1).

        If there is a ``node``, the caller must lease it once more.
        """
        assert self.start < at < self.end
        cut = (at - self.start) * ID_BYTES
        upper = Run(self.parent, self.start, self.block_ids[:cut])
        upper.node = self.node
        self.block_ids = self.block_ids[cut:]
        self.start, self.parent = at, upper
        return upper


class Ahead:
    """Tokens up to ``end`` whose KV a step computes, from the entry before or the committed part on.

    ``is_leaned``: another sequence computes them. ``is_done``: the step is done, an earlier one isn't.
    """

    __slots__ = ("end", "is_done", "is_leaned", "step")

    def __init__(self, step: int, end: int, is_leaned: bool, is_done: bool = False) -> None:
        self.step, self.end, self.is_leaned, self.is_done = step, end, is_leaned, is_done


class SequenceState:
    """The cache's state of a sequence. Both the cache and the user's Sequence hold it.

    All methods are called under the cache's lock.
    """

    __slots__ = (
        "_ahead",
        "_closed_by",
        "_counted",
        "_hints",
        "_is_fenced",
        "_is_open",
        "_lent",
        "_loading",
        "_node",
        "_num_cached",
        "_num_committed",
        "_own",
        "_prompt_key",
        "_prompt_size",
        "_reserved",
        "_run",
        "_segment_keys",
        "_size",
        "_table",
        "_tail",
        "_tree",
        "_user",
    )

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
        self._prompt_key = key  # immutable, shared by forks
        self._prompt_size = len(
            key
        )  # how many bytes of it this sequence uses; a truncation only lowers this number
        self._tail = bytearray()  # appended since then
        self._size = len(key)  # of prompt key and tail, in bytes
        self._ahead: list[Ahead] | None = None  # what steps compute, in order; see ``ahead``
        self._reserved = 0  # tokens without ids yet that have a place in the table
        self._num_cached = num_cached
        self._num_committed = num_cached
        self._table = table
        self._own = (
            num_cached_blocks  # from this position on, the blocks of the table belong to this sequence alone
        )
        self._run: Run | None = None  # the last run before that position
        self._is_open = True
        self._closed_by = RELEASE  # valid only if it isn't open
        self._is_fenced = False  # released, and holds everything until a fence is lifted
        self._lent: Lending | None = None  # set while lent to the device; then it isn't open
        self._loading: object = None  # the LoadTarget that may write into its own blocks
        self._hints: object = None  # what the policy wants to get with each commit
        self._segment_keys: SegmentKeys | None = None  # of committed segments, if the policy wants them
        self._user: SoleUser | None = None  # the session that opened it
        self._counted = NOT_COUNTED

    @property
    def is_lent(self) -> bool:
        """Whether the device advances the sequence."""
        return not self._is_open and self._lent is not None

    @property
    def is_held(self) -> bool:
        """Whether there is something to release: the sequence is open, lent, or stale."""
        return self._is_open or self._closed_by == PURGE or self.is_lent

    @property
    def description(self) -> str:
        """The description in a warning. It contains no token id."""
        tenant, blocks = self._tree.tenant.tenant_id, self.num_blocks
        return f"a sequence of tenant {tenant!r} with {self.num_tokens} tokens in {blocks} blocks"

    @property
    def num_tokens(self) -> int:
        """Tokens that have a place in its blocks."""
        return self._size // TOKEN_BYTES

    @property
    def num_blocks(self) -> int:
        """Blocks of its block table."""
        return len(self._table) // ID_BYTES

    @property
    def block_table(self) -> BlockIds:
        """Block ids in order, int32 ``[num_blocks]``, a snapshot. O(blocks)."""
        return unpack(self._table)

    def key_between(self, start: int, stop: int) -> bytes:
        """Key bytes ``[start, stop)``."""
        size = self._prompt_size
        if stop <= size:
            return self._prompt_key[start:stop]
        if start >= size:
            return bytes(self._tail[start - size : stop - size])
        return self._prompt_key[start:size] + bytes(self._tail[: stop - size])

    def key_to(self, stop: int) -> Key:
        """Return the key up to at least ``stop`` and at most twice that length. For a caller that keeps it.

        A prompt is mostly not copied.
        """
        size = self._prompt_size
        if stop > size:
            return self.key_between(0, size), bytes(self._tail[: stop - size])
        return self._prompt_key if len(self._prompt_key) <= 2 * stop else self._prompt_key[:stop]

    @property
    def shared_tail(self) -> Run | None:
        """The run that holds the last block, if other sequences share it. It must not be written into."""
        run = self._run
        if run is None or len(self._table) > self._own * ID_BYTES or run.is_writable:
            return None
        return run

    def child(self) -> SequenceState:
        """Return another sequence in the same state that shares all blocks. The caller leases the node for it."""
        if len(self._tail) > MAX_COPIED_TAIL_BYTES:
            self._prompt_key, self._tail = (
                self._prompt_key[: self._prompt_size] + bytes(self._tail),
                bytearray(),
            )
            self._prompt_size = len(self._prompt_key)
        if len(self._table) > self._own * ID_BYTES:
            self._run = Run(self._run, self._own, self._table[self._own * ID_BYTES :])
            self._own = len(self._table) // ID_BYTES
        twin = SequenceState(
            self._tree, self._node, self._prompt_key, self._table[:], self._num_cached, self._own
        )
        twin._prompt_size = self._prompt_size
        twin._hints, twin._user = self._hints, self._user
        twin._tail = self._tail[:]
        twin._size = self._size
        twin._num_committed = self._num_committed
        twin._run = self._run
        if twin._run is not None:
            twin._run.owners += 1
        if self._ahead is not None:
            twin._ahead = self.leaned_to(self._size // TOKEN_BYTES)
        return twin

    def leaned_to(self, stop: int) -> list[Ahead]:
        """Return what a sequence leans on that shares this one's blocks of the first ``stop`` tokens."""
        found: list[Ahead] = []
        start = self._num_committed
        for each in self._ahead or ():
            if start < stop:
                found.append(Ahead(each.step, min(each.end, stop), True, each.is_done))
            start = each.end
        return found

    @property
    def leaned_end(self) -> int:
        """Tokens up to the last one that another sequence computes; 0 without one."""
        return max([each.end for each in self._ahead or () if each.is_leaned], default=0)

    def become_request(self, node: Node, key: bytes, num_cached: int) -> None:
        """Make a child, whose blocks begin ``key``, the sequence of a request of its own that leases ``node``."""
        self._node, self._prompt_key, self._prompt_size, self._tail = node, key, len(key), bytearray()
        self._size, self._own = len(key), len(self._table) // ID_BYTES
        self._num_cached = self._num_committed = num_cached
        self._hints = self._user = None

    def become(self, other: SequenceState) -> None:
        """Take over the state of an unregistered sequence, and what it holds."""
        self._tree, self._node, self._run, self._hints = other._tree, other._node, other._run, other._hints
        self._prompt_key, self._prompt_size, self._tail = other._prompt_key, other._prompt_size, other._tail
        self._size, self._table, self._own = other._size, other._table, other._own
        self._num_cached, self._num_committed = other._num_cached, other._num_committed
        self._segment_keys, self._user = other._segment_keys, other._user
        self._loading = None

    def cut_key(self, size: int) -> None:
        """Remove key bytes from ``size`` on. O(1)."""
        self._size = size
        if size < self._prompt_size:
            self._prompt_size, self._tail = size, bytearray()
        else:
            del self._tail[size - self._prompt_size :]


class LeaseState:
    """The cache's state of a lease. The cache has leases too, for pins. ``node`` is None for a miss."""

    __slots__ = ("_cache", "_is_open", "_node", "_packed", "num_tokens")

    def __init__(self, cache: Owner, node: Node | None, match: Match) -> None:
        self._cache, self._node, self._is_open = cache, node, True
        self._packed = match._packed
        self.num_tokens = match.num_tokens

    @property
    def is_open(self) -> bool:
        """False after the release."""
        return self._is_open

    @property
    def is_held(self) -> bool:
        """The same as ``is_open``."""
        return self._is_open

    @property
    def num_blocks(self) -> int:
        """Leased blocks."""
        return len(self._packed) // ID_BYTES

    @property
    def tree(self) -> NamespaceTree:
        """The tree of its node. There must be a node."""
        assert self._node is not None
        return cast(NamespaceTree, self._node.tree)

    @property
    def description(self) -> str:
        """The description in a warning. It contains no token id."""
        owner = "" if self._node is None else f" of tenant {self.tree.tenant.tenant_id!r}"
        return f"a lease{owner} on {self.num_tokens} tokens"


class Lending:
    """The cache's state of lent beams. ``sequences``: the states of the sequences, in the order of the beams."""

    __slots__ = ("block_ids", "device", "is_over", "sequences", "tenant")

    def __init__(self, sequences: list[SequenceState], tenant: TenantState, block_ids: bytearray) -> None:
        self.sequences, self.tenant = tuple(sequences), tenant
        self.block_ids = block_ids  # lent in addition to the sequences' own blocks, packed
        self.is_over = False
        self.device: DeviceBeams | None = None

    @property
    def is_held(self) -> bool:
        """Whether the beams must be taken back."""
        return not self.is_over

    @property
    def description(self) -> str:
        """The description in a warning. It contains no token id."""
        return f"a lending of {len(self.sequences)} beams of tenant {self.tenant.tenant_id!r}"

    def end(self) -> None:
        """End the lending: no beam step is made afterwards. The cache calls this under its lock."""
        self.is_over = True
        if self.device is not None:
            self.device.close()
