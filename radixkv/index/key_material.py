"""Key material: what else the KV of some tokens depends on, beside their ids. Images, audio, prompt embeddings.

An engine puts the same placeholder ids in a prompt for every image. ``key_of`` puts a digest of the content into the
key. So the KV of one image is never found for another. All calls of the cache take the key in place of ids:

    key = key_of(ids, [Material(4, 580, sha256(pixels).digest())], block_size=16)
    with cache.open(namespace, key) as sequence: ...

The tokens of a range, and those before it in the same block, get other ids: the old id XOR the 16 words of BLAKE2b over
(start of the range, digest), again and again, with the highest bit set. Ids of text are below 2³¹, so they never equal
these. Nothing after the range changes. So prompts that begin alike share their blocks, and tokens may be appended.

Two contents collide in a block with a chance of 2⁻³¹ to the power of its covered tokens, at most 16. That is 2⁻⁴⁹⁶ for
16 tokens, and 2⁻³¹ where one token is a whole block. ``Sequence.token_ids`` shows the ids of the key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, SupportsIndex

import numpy as np

from radixkv.errors import ArgumentError
from radixkv.index.tokens import TokenIds, encode
from radixkv.index.validation import list_of, require_between

MIN_DIGEST_BYTES: Final = 16
MAX_DIGEST_BYTES: Final = 64
_HIGH: Final = np.uint32(1 << 31)


class Material(NamedTuple):
    """Content that the KV of tokens ``[start, stop)`` depends on: its digest has 16 to 64 bytes, as a SHA-256 has."""

    start: int
    stop: int
    digest: bytes


def key_of(ids: TokenIds, material: Iterable[Material] = (), *, block_size: SupportsIndex) -> bytes:
    """Return the key of a prompt, some of whose tokens stand for other content. Use it wherever ids are taken.

    ``material``: ranges of positions in ``ids``, in order, without overlap. ``block_size``: the cache's.

    Raises TokenError, and ArgumentError for a wrong range or digest. O(ids), at the speed of NumPy.
    """
    size = require_between("block_size", block_size, 1, None)
    key = encode(ids)
    ranges = list_of("material", material)
    if not ranges:
        return key
    from hashlib import blake2b  # here: it loads OpenSSL, which prompts of text don't need

    covered = bytearray(key)
    words = np.frombuffer(covered, "<u4")
    after = 0
    for at, each in enumerate(ranges):
        start, stop, digest = _checked(f"material[{at}]", each, after, len(words))
        first = max(start - start % size, after)
        mask = np.frombuffer(blake2b(b"radixkv material %d:" % start + digest).digest(), "<u4")
        words[first:stop] ^= np.tile(mask, -(-(stop - first) // len(mask)))[: stop - first]
        words[first:stop] |= _HIGH
        after = stop
    return bytes(covered)


def _checked(name: str, material: Any, low: int, num_tokens: int) -> tuple[int, int, bytes]:
    """Return a range and its digest. Raises ArgumentError."""
    if not isinstance(material, tuple) or len(material) != 3:
        raise ArgumentError(name, material, "a Material: start, stop and digest")
    if low >= num_tokens:
        raise ArgumentError(name, material, f"a range within the {num_tokens} ids, after the others")
    start = require_between(f"{name}.start", material[0], low, num_tokens - 1)
    stop = require_between(f"{name}.stop", material[1], start + 1, num_tokens)
    digest = material[2]
    if not isinstance(digest, bytes) or not MIN_DIGEST_BYTES <= len(digest) <= MAX_DIGEST_BYTES:
        allowed = f"{MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} bytes, such as a SHA-256"
        raise ArgumentError(f"{name}.digest", digest, allowed)
    return start, stop, digest
