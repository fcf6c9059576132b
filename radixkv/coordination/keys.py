"""Keyed digests: the process sends these to the store in place of ids and names.

    sent                      made from                                            length
    tenant digest             HMAC-SHA256(fleet secret, ("tenant", id))               32
    namespace digest          HMAC-SHA256(fleet secret, ("namespace", ns, generation)) 32
    prefix digest             BLAKE2b-128(namespace's secret, chain)                  16
      chain[i]                xxh3-128 of the key bytes up to the end of segment i, one stream over all of them
      namespace's secret      HMAC-SHA256(fleet secret, ("prefix", ns, generation)), never published
    canary                    hash of the prefix digests of a fixed vector: equal if all of the above is equal
    proof of a limit          HMAC-SHA256(fleet secret, ("limit", tenant digest, stamp, blocks or ""))
    key of a purpose          HMAC-SHA256(fleet secret, ("key", purpose)), never published: see ``proofs.py``

Fields are framed with type and length, and every use has its own label. So inputs of two uses never coincide. A
reader of the store can't confirm a guessed prompt without the fleet secret. ``ns`` is ``Namespace.framed``: its version
of the weights counts, so a prefix has other digests after the weights changed.

xxh3 is not a cryptographic hash: a tenant could make two of its own prompts collide, and would get wrong hints about
them. Hints never decide reuse.

The chain is one stream, so segments behind a long prefix cost one C call over that prefix. A digest costs about
0.5 µs. Most of it is the keyed BLAKE2b; copying its keyed start is faster than making it again (0.35 against 0.63 µs).
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Final, NamedTuple

from xxhash import xxh3_128

from radixkv.index.tokens import TOKEN_BYTES
from radixkv.signing import checked_secret, derived, frame, mac

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.tokens import Key

SEGMENT_TOKENS: Final = 256
"""Tokens per published digest. Block sizes must divide it, so that a segment ends at a block's end."""
DIGEST_BYTES = 16
NAMESPACE_BYTES = 32
SEGMENT_BYTES: Final[int] = SEGMENT_TOKENS * TOKEN_BYTES

_CANARY_KEY = b"".join(i.to_bytes(TOKEN_BYTES, "little") for i in range(7, 7 + 2 * SEGMENT_TOKENS))
_MAX_KNOWN_NAMESPACES = 4096
_SHORT_BYTES: Final[int] = 1 << 16
"""Keys in pieces are joined up to this size.

Joining takes 0.2 µs; reading two segments piece by piece takes 0.9 µs more.
"""
_UPDATE, _DIGEST = hashlib.blake2b.update, hashlib.blake2b.digest
_EXTEND, _LINK = xxh3_128.update, xxh3_128.digest
"""The hash's methods as functions: in compiled code, looking up a method costs as much as calling it."""
SCOPE_BYTES = 600
"""Approximate bytes for the keys of one namespace."""


def chains(key: Key, first: int, stop: int) -> list[bytes]:
    """Return ``chain[i]`` of segments ``[first, stop)`` of ``key``, which must exist; never leaves this process.

    One pass: O(the key's bytes up to the last segment). A long key in pieces is not joined: joining would cost as much.
    """
    if first >= stop:
        return []
    if not isinstance(key, bytes):
        if stop * SEGMENT_BYTES > _SHORT_BYTES:
            return _chains(key, (first + 1) * SEGMENT_BYTES, stop - first)
        key = b"".join(key)
    view, end = memoryview(key), (first + 1) * SEGMENT_BYTES
    stream = xxh3_128(view[:end])
    if stop - first == 2:  # most requests: one new segment, and the one before it; a third faster
        link = _LINK(stream)
        _EXTEND(stream, view[end : end + SEGMENT_BYTES])
        return [link, _LINK(stream)]
    extend, chained = stream.update, stream.digest
    found = [chained()]
    for start in range(end, stop * SEGMENT_BYTES, SEGMENT_BYTES):
        extend(view[start : start + SEGMENT_BYTES])
        found.append(chained())
    return found


def _chains(pieces: tuple[bytes, ...], left: int, num_left: int) -> list[bytes]:
    """Return the chain of a key in pieces: the first link ends after ``left`` bytes; ``num_left`` links."""
    found: list[bytes] = []
    stream = xxh3_128()
    extend, chained = stream.update, stream.digest
    for piece in pieces:
        view, start = memoryview(piece), 0
        while start + left <= len(piece):
            extend(view[start : start + left])
            start, left, num_left = start + left, SEGMENT_BYTES, num_left - 1
            found.append(chained())
            if not num_left:
                return found
        extend(view[start:])
        left -= len(piece) - start
    return found


class Scope(NamedTuple):
    """Digest state of a namespace in one generation: its own digest, and the keyed start of its prefix digests."""

    digest: bytes
    keyed: hashlib.blake2b

    def digests(self, chained: list[bytes]) -> list[bytes]:
        """Return the prefix digest of each ``chain[i]``. O(1) each, about 0.4 µs."""
        begun, update, digest, found = self.keyed.copy, _UPDATE, _DIGEST, []
        for each in chained:
            hashed = begun()
            update(hashed, each)
            found.append(digest(hashed))
        return found


class FleetKeys:
    """All digests of one fleet secret. Thread-safe; keeps the keys of the most recently used namespaces."""

    def __init__(self, secret: object) -> None:
        self._secret = checked_secret(secret)
        self._known: dict[tuple[Namespace, int], Scope] = {}
        self.canary = self._canary()

    @property
    def num_bytes(self) -> int:
        """Approximate bytes for the kept keys of namespaces; at most about 2.5 MB."""
        return len(self._known) * SCOPE_BYTES

    def tenant(self, tenant: str) -> bytes:
        """Return the tenant's digest, 32 bytes."""
        return mac(self._secret, "tenant", tenant)

    def namespace(self, namespace: Namespace, generation: int = 0) -> bytes:
        """Return the digest of a namespace in one generation of its tenant, 32 bytes."""
        return self.scope(namespace, generation).digest

    def digests(
        self, namespace: Namespace, key: bytes, first: int = 0, stop: int | None = None, generation: int = 0
    ) -> list[bytes]:
        """Return the prefix digests of segments ``[first, stop)`` of ``key``, 16 bytes each.

        Segment ``i`` covers tokens ``[256 i, 256 (i + 1))``; its digest covers all tokens up to its end. ``stop``
        defaults to the number of whole segments of ``key``. Cost: 0.5 µs a digest, and one pass over the tokens before
        ``first``.
        """
        num_segments = len(key) // SEGMENT_BYTES
        stop = num_segments if stop is None else min(stop, num_segments)
        return self.scope(namespace, generation).digests(chains(key, first, stop))

    def derived(self, purpose: str) -> bytes:
        """Return a key for one purpose, 32 bytes; it never leaves the process."""
        return derived(self._secret, purpose)

    def limit_proof(self, tenant: bytes, stamp: int, blocks: int | None) -> str:
        """Return the proof that a replica with the fleet secret set this limit of the tenant: 64 hex digits."""
        return mac(self._secret, "limit", tenant, stamp, "" if blocks is None else blocks).hex()

    def is_limit_proof(self, proof: str, tenant: bytes, stamp: int, blocks: int | None) -> bool:
        """Whether ``proof`` is the proof of this limit; in constant time."""
        expected = self.limit_proof(tenant, stamp, blocks)
        return hmac.compare_digest(expected.encode(), proof.encode())

    def scope(self, namespace: Namespace, generation: int = 0) -> Scope:
        """Return the digest state of a namespace in one generation of its tenant."""
        known = self._known.get((namespace, generation))
        if known is None:
            framed = namespace.framed()
            known = Scope(
                mac(self._secret, "namespace", framed, generation),
                _keyed(mac(self._secret, "prefix", framed, generation)),
            )
            if len(self._known) >= _MAX_KNOWN_NAMESPACES:
                self._known = {}
            self._known[namespace, generation] = known
        return known

    def _canary(self) -> str:
        digests = b"".join(Scope(b"", _keyed(mac(self._secret, "canary"))).digests(chains(_CANARY_KEY, 0, 2)))
        return hashlib.sha256(digests + frame(SEGMENT_TOKENS, DIGEST_BYTES)).hexdigest()


def _keyed(secret: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES, key=secret)
