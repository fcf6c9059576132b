"""Match: the longest resident prefix of some ids at one moment. End: where it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixkv.index.blocks import unpack
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.storage.plan import BlockIds


class End:
    """The end of a match, a lease or an insert: a position in a namespace's tree. Hashable and comparable.

    Two ends are equal if they are at the end of equal prefixes of one namespace. So an end stays what it is when the
    tree splits a node there, when the blocks are evicted, and when they are computed again. Use it as a key for an
    engine's own records. It keeps the prefix in memory, 4 bytes a token, shared with its match.

    Comparing costs O(tokens) at memory speed if both have the same length, hashing O(1).
    """

    __slots__ = ("_key", "namespace")

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        self.namespace, self._key = namespace, key

    def __reduce__(self) -> tuple[type[End], tuple[Namespace, bytes]]:
        return End, (self.namespace, self._key)

    @property
    def num_tokens(self) -> int:
        """Tokens before this end."""
        return len(self._key) // TOKEN_BYTES

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, End):
            return NotImplemented
        return self._key == other._key and self.namespace == other.namespace

    def __hash__(self) -> int:
        return hash((len(self._key), self._key[-_HASHED_BYTES:], self.namespace))

    def __repr__(self) -> str:
        return f"<End after {self.num_tokens} tokens of tenant {self.namespace.tenant!r}>"


_HASHED_BYTES: Final = 256
"""The hash of an end covers its last 64 token ids."""


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

    def __reduce__(self) -> tuple[type[Match], tuple[Namespace, bytes, bytes]]:
        return Match, (self.namespace, self._key, self._packed)

    @property
    def num_blocks(self) -> int:
        """Number of matched blocks."""
        return len(self._packed) // ID_BYTES

    @property
    def block_ids(self) -> BlockIds:
        """Ids of the matched blocks, int32 ``[num_blocks]``, read-only."""
        return unpack(self._packed)

    @property
    def end(self) -> End:
        """Where the match ends."""
        return End(self.namespace, self._key)

    def __repr__(self) -> str:
        return f"<Match of {self.num_tokens} tokens in {self.num_blocks} blocks>"
