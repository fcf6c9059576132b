"""What a record is the KV of. Two records with equal identities are interchangeable; no others are.

A record is the KV of tokens ``[start, stop)`` of one prefix: one *segment*. Its identity covers everything that decides
these bytes and who may read them:

- the namespace, with its version of the weights, and the generation of the tenant
- the fingerprint of the engine, and the scheme of the bytes
- the SHA-256 of all ids up to ``stop``

It covers no place: a record may move to another slot, tier or replica.

A reader computes the identity that it needs. A tier proves that a record has this identity: on disk as associated data
of AES-GCM, in host memory by comparison. Nothing else decides; a locator only says where to look.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final, NamedTuple

from radixkv.config import Namespace
from radixkv.errors import ArgumentError
from radixkv.signing import frame

FINGERPRINT_BYTES: Final = 32
TOKEN_BYTES: Final = 4
SCHEMES: Final = ("exact", "fp8", "int8")
"""How the bytes of a record stand for KV. Records of different schemes never mix."""

_PACKED: Final = struct.Struct("<16s32sQ32sQB32sQQQ")
_MAGIC: Final = b"radixkv record 1"


def fingerprint_of(**facts: str | int | bytes) -> bytes:
    """Return the fingerprint of an engine: 32 bytes that change with any fact, or name of a fact.

    Give all that decides the bytes of a block: layout, dtype, block size, version of kernels, hash of the weights.
    """
    parts: list[str | int | bytes] = ["fingerprint"]
    for name in sorted(facts):
        parts += [name, facts[name]]
    return hashlib.sha256(frame(*parts)).digest()


class RecordIdentity(NamedTuple):
    """The identity of the record of tokens ``[start, stop)``. ``prefix``: SHA-256 of the key bytes of ``[0, stop)``."""

    namespace: Namespace
    generation: int
    fingerprint: bytes
    scheme: str
    prefix: bytes
    start: int
    stop: int

    def packed(self, payload_bytes: int) -> bytes:
        """Return the identity of a record with so many bytes as unambiguous bytes of a fixed size. About 3 µs."""
        return _PACKED.pack(
            _MAGIC,
            hashlib.sha256(self.namespace.framed()).digest(),
            self.generation,
            self.fingerprint,
            self.namespace.weights,
            SCHEMES.index(self.scheme),
            self.prefix,
            self.start,
            self.stop,
            payload_bytes,
        )


def segment_identity(
    namespace: Namespace,
    generation: int,
    fingerprint: bytes,
    scheme: str,
    key: bytes | memoryview,
    start: int,
    stop: int,
) -> RecordIdentity:
    """Return the identity of tokens ``[start, stop)`` of the prompt with these key bytes. O(stop), 1.5 GB/s.

    Raises ArgumentError for a range outside of the key, an unknown scheme, or a fingerprint of another length.
    """
    if not 0 <= start < stop <= len(key) // TOKEN_BYTES:
        raise ArgumentError(
            "stop", stop, f"a range within the {len(key) // TOKEN_BYTES} tokens, from {start}"
        )
    if scheme not in SCHEMES:
        raise ArgumentError("scheme", scheme, f"one of {', '.join(SCHEMES)}")
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise ArgumentError("fingerprint", len(fingerprint), f"{FINGERPRINT_BYTES} bytes")
    prefix = hashlib.sha256(memoryview(key)[: stop * TOKEN_BYTES]).digest()
    return RecordIdentity(namespace, generation, fingerprint, scheme, prefix, start, stop)
