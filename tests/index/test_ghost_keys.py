"""Keys of segments depend only on the tokens before the segment's end, not on how they were committed."""

from __future__ import annotations

import random
from itertools import pairwise

from xxhash import xxh3_64_intdigest

from radixkv import Namespace
from radixkv.index.ghost_keys import SegmentKeys

SIZE, BLOCK = 32, 8
NAMESPACE = Namespace("t", "m")
SEED = xxh3_64_intdigest(NAMESPACE.framed())


def test_keys_depend_on_the_prefix_alone() -> None:
    """Prompts and tails of any length, committed in any steps.

    The first step starts after the tokens that were already resident.
    """
    rng = random.Random(0)
    for _ in range(500):
        key = rng.randbytes(BLOCK * rng.randrange(80))
        base_size = BLOCK * rng.randrange(len(key) // BLOCK + 1)
        base, tail = key[:base_size] + rng.randbytes(rng.randrange(3)), bytearray(key[base_size:])
        steps = sorted(BLOCK * rng.randrange(len(key) // BLOCK + 1) for _ in range(rng.randrange(2, 6)))
        named = SegmentKeys(NAMESPACE, SIZE)
        for start, stop in pairwise(steps):
            ends = range(start - start % SIZE + SIZE, stop + 1, SIZE)
            assert named.between(start, stop, base, base_size, tail) == tuple(
                xxh3_64_intdigest(key[:end], SEED) for end in ends
            )
