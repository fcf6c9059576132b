"""Match and Lease: the longest resident prefix at one moment, and the right to use it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, cast

from radixkv.errors import IntegrityError, ReentrantCall
from radixkv.index.blocks import unpack
from radixkv.index.locking import Guard
from radixkv.index.tenants import NamespaceTree
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES
from radixkv.index.tree import Node

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.cache import PrefixCache
    from radixkv.storage.plan import BlockIds


class Match:
    """The longest resident prefix of some ids at one moment. A miss has ``num_tokens`` 0.

    ``num_tokens``: matched tokens, whole blocks. ``block_ids``: int32 ``[num_blocks]``, read-only, valid only
    while a lease holds them (``PrefixCache.lease``).
    """

    __slots__ = ("_key", "_packed", "namespace", "num_tokens")

    def __init__(self, namespace: Namespace, key: bytes, packed: bytes) -> None:
        self.namespace = namespace
        self.num_tokens = len(key) // TOKEN_BYTES
        self._key, self._packed = key, packed

    @property
    def num_blocks(self) -> int:
        """Matched blocks."""
        return len(self._packed) // ID_BYTES

    @property
    def block_ids(self) -> BlockIds:
        """Ids of the matched blocks, int32 ``[num_blocks]``, read-only."""
        return unpack(self._packed)

    def __repr__(self) -> str:
        return f"<Match of {self.num_tokens} tokens in {self.num_blocks} blocks>"


class LeaseState:
    """What the cache knows of a lease, one of its own for a pin included. ``node`` is None for a miss."""

    __slots__ = ("_index", "_is_open", "_node", "_packed", "num_tokens")

    def __init__(self, index: PrefixCache, node: Node | None, match: Match) -> None:
        self._index, self._node, self._is_open = index, node, True
        self._packed = match._packed
        self.num_tokens = match.num_tokens

    @property
    def is_open(self) -> bool:
        """False once released."""
        return self._is_open

    @property
    def is_held(self) -> bool:
        """The same."""
        return self._is_open

    @property
    def description(self) -> str:
        """What a warning says of it: no token id."""
        owner = (
            ""
            if self._node is None
            else f" of tenant {cast(NamespaceTree, self._node.tree).tenant.tenant_id!r}"
        )
        return f"a lease{owner} on {self.num_tokens} tokens"


class Lease:
    """The right to use a match: its blocks are not evicted until ``release``. Use it in a ``with``.

    A lease that is forgotten (collected before it was released) gives a ResourceWarning, and the next call of the cache
    releases it.
    """

    __slots__ = ("_guard", "_index", "_state", "num_tokens")
    _guard: Guard  # set only by the finaliser

    def __init__(self, index: PrefixCache, state: LeaseState) -> None:
        self._index, self._state = index, state
        self.num_tokens = state.num_tokens

    def __del__(self) -> None:
        try:
            state = self._state
        except AttributeError:  # its making was interrupted
            return
        if state._is_open:
            self._guard = Guard(self._index, state)

    @property
    def block_ids(self) -> BlockIds:
        """Ids of the leased blocks, int32, read-only. Raises LeaseError once released."""
        if not self._state._is_open or self._index.is_broken:
            self._index.require_leased(self._state)
        return unpack(self._state._packed)

    @property
    def is_open(self) -> bool:
        """False once released."""
        return self._state._is_open

    def release(self) -> None:
        """Give the blocks back to eviction. A second call raises LeaseError.

        From a finaliser that runs in the middle of a call of the same cache, the next call releases it.
        """
        try:
            self._index.release_lease(self._state)
        except ReentrantCall as error:
            self._index.defer(self._state, error)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state._is_open and not self._index.is_dead:
            try:
                self.release()
            except IntegrityError:
                if error is None or not self._index.is_dead:
                    raise  # else the error that ends the block goes on
