"""Match: the longest resident prefix of some ids at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.index.blocks import unpack
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.storage.plan import BlockIds


class Match:
    """The longest resident prefix of some ids at one moment. A miss has ``num_tokens`` 0.

    ``num_tokens``: matched tokens, always whole blocks. ``block_ids``: int32 ``[num_blocks]``, read-only. The ids are
    valid only while a lease holds the blocks (``PrefixCache.lease``).
    """

    __slots__ = ("_key", "_packed", "namespace", "num_tokens")

    def __init__(self, namespace: Namespace, key: bytes, packed: bytes) -> None:
        self.namespace = namespace
        self.num_tokens = len(key) // TOKEN_BYTES
        self._key, self._packed = key, packed

    @property
    def num_blocks(self) -> int:
        """Number of matched blocks."""
        return len(self._packed) // ID_BYTES

    @property
    def block_ids(self) -> BlockIds:
        """Ids of the matched blocks, int32 ``[num_blocks]``, read-only."""
        return unpack(self._packed)

    def __repr__(self) -> str:
        return f"<Match of {self.num_tokens} tokens in {self.num_blocks} blocks>"
