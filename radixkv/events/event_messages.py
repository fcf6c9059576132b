"""Digests of blocks, and the messages that carry them: vLLM's KV events.

**Digests.** A block's hash is BLAKE2b-128, keyed, over the ids of the whole prefix up to the block's end. The key is
HMAC-SHA256(key of the purpose "events", ("blocks", ``Namespace.framed``)). vLLM allows integers of 64 bits or bytes. A
hash without a key, as vLLM's, lets every reader test guesses of a prompt. An unkeyed one of 64 bits also collides
among many blocks. Equal prompts of two tenants have different digests. A reader sees which blocks of one namespace
continue each other, and when they are used; nothing of their content.

**Format** (msgpack). A message has three frames: topic, number (8 bytes, big-endian), batch. The batch is an array of
time, events and data-parallel rank. An event is a map with its type under "type", as in vLLM since 0.24. Consumers of
older versions expect arrays and can't read them.

``decoded`` reads batches that a publisher of radixkv made. Anything else is malformed. A reader can't verify a batch:
ZMQ authenticates nobody, and consumers of vLLM's format allow no fourth frame for a MAC. Somebody who writes on the
wire can repeat digests that were published, and hide removals. That leads requests to the wrong replica. It can't make
digests of prompts that nobody published, and never leads to wrong KV, because each replica looks up its own tree.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.events", "events")

import hashlib
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from radixkv.config import Namespace
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.signing import KeySet, mac

DIGEST_BYTES: Final = 16
NUMBER_BYTES: Final = 8
MAX_BATCH_BYTES: Final = 8 << 20
"""Most bytes of a batch. A reader refuses longer ones before it parses them."""
END_OF_REPLAY: Final = b"\xff" * NUMBER_BYTES
"""The number after the last batch of a replay: −1."""

_MAX_NAMESPACES = 4_096
_SKIP_BYTES: Final = 2_047
"""Longer inputs make hashlib release the interpreter's lock. A busy thread then keeps it for milliseconds."""
_MAX_SKIPPED: Final = 1 << 18
"""Above this size, hashing takes long enough to release it."""


Hash: TypeAlias = bytes | int
"""What names a block in an event: a keyed digest, or the hash of an engine."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that became resident, one after the other, behind ``parent_block_hash`` (None: the first of a prompt)."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that left."""

    block_hashes: list[Hash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """All blocks of the publisher left."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in order, with the time in Unix seconds."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class Change(NamedTuple):
    """What a reader does: store or remove packed digests, or clear everything."""

    op: Literal["store", "remove", "clear"]
    digests: bytes


_Digests: TypeAlias = list[Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]]


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: _Digests


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: _Digests


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _Received(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Received)


def decoded(payload: bytes) -> list[Change] | None:
    """Return the changes of a batch in order; None if it is malformed or longer than MAX_BATCH_BYTES. O(bytes)."""
    if len(payload) > MAX_BATCH_BYTES:
        return None
    try:
        events = _decoder.decode(payload).events
    except (msgspec.DecodeError, RecursionError):
        return None
    return [_change(event) for event in events]


def _change(event: _Stored | _Removed | _Cleared) -> Change:
    if isinstance(event, _Cleared):
        return Change("clear", b"")
    return Change("store" if isinstance(event, _Stored) else "remove", b"".join(event.block_hashes))


class BlockDigests:
    """The digests of the blocks of all namespaces. One thread at a time.

    ``keys``: of the purpose ``events``; the first is used. Raises ConfigError if there is none.
    """

    def __init__(self, keys: KeySet, block_size: int) -> None:
        self._key = keys.accepted("events")[0]
        self.block_bytes = block_size * TOKEN_BYTES
        self._begun: dict[Namespace, hashlib.blake2b] = {}

    def begin(self, namespace: Namespace) -> hashlib.blake2b:
        """Return the state before the first block of a namespace."""
        begun = self._begun.get(namespace)
        if begun is None:
            if len(self._begun) >= _MAX_NAMESPACES:
                self._begun = {}
            key = mac(self._key, "blocks", namespace.framed())
            begun = self._begun[namespace] = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key)
        return begun.copy()

    def skip(self, state: hashlib.blake2b, key: bytes, num_blocks: int) -> None:
        """Advance the state over the first blocks of a key. About 1.3 µs for 1,024 bytes."""
        view = memoryview(key)[: num_blocks * self.block_bytes]
        size = _SKIP_BYTES if len(view) <= _MAX_SKIPPED else len(view)
        for start in range(0, len(view), size):
            state.update(view[start : start + size])

    def extend(self, state: hashlib.blake2b, key: bytes, first: int, stop: int) -> list[bytes]:
        """Advance the state over blocks ``[first, stop)`` of a key. Returns their digests. About 0.7 µs each."""
        view, size = memoryview(key), self.block_bytes
        update, copy, found = state.update, state.copy, []
        for start in range(first * size, stop * size, size):
            update(view[start : start + size])
            found.append(copy().digest())
        return found

    def of(self, namespace: Namespace, key: bytes) -> list[bytes]:
        """Return the digests of the whole blocks of a prefix. O(blocks)."""
        return self.extend(self.begin(namespace), key, 0, len(key) // self.block_bytes)
