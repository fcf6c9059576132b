"""Match and Lease: the longest resident prefix at one moment, and the right to use it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from radixkv.blocks import unpack
from radixkv.tokens import TOKEN_BYTES
from radixkv.tree import Node
from radixkv.types import ID_BYTES

if TYPE_CHECKING:
    from radixkv.namespaces import Namespace
    from radixkv.types import BlockIds


class LeaseIndex(Protocol):
    """What a lease asks of the cache that made it."""

    def release_lease(self, lease: Lease) -> None: ...


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


class Lease:
    """The right to use a match: its blocks are not evicted until ``release``. Use it in a ``with``.

    ``index``: None for a lease of the cache's own, which it ends itself.
    """

    __slots__ = ("_index", "_is_open", "_node", "_packed", "num_tokens")

    def __init__(self, index: LeaseIndex | None, node: Node | None, match: Match) -> None:
        self._index, self._node, self._is_open = index, node, True
        self._packed = match._packed
        self.num_tokens = match.num_tokens

    @property
    def block_ids(self) -> BlockIds:
        """Ids of the leased blocks, int32, read-only."""
        return unpack(self._packed)

    @property
    def is_open(self) -> bool:
        """False once released."""
        return self._is_open

    def release(self) -> None:
        """Give the blocks back to eviction. A second call raises LeaseError."""
        assert self._index is not None
        self._index.release_lease(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_open:
            self.release()
