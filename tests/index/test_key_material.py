"""Key material: KV of one image is never found for another, and what is before and after is shared as usual."""

from __future__ import annotations

import hashlib
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import ArgumentError, Material, PrefixCache, TokenError, key_of
from tests.index.support import NS, make_cache, num_events

CAT, DOG = sha256(b"cat").digest(), sha256(b"dog").digest()
IDS = [*range(10), *([7] * 20), *range(50, 60)]
"""Text, an image of 20 placeholders, text."""


def key(digest: bytes, ids: Any = IDS, start: int = 10, stop: int = 30, block_size: int = 4) -> bytes:
    return key_of(ids, [Material(start, stop, digest)], block_size=block_size)


def compute_key(cache: PrefixCache, prompt: bytes) -> None:
    with cache.open(NS, prompt) as sequence:
        sequence.commit(sequence.num_tokens)


def test_one_image_is_not_found_for_another() -> None:
    """The text before is shared in whole blocks. The same image is found again."""
    cache = make_cache(64)
    compute_key(cache, key(CAT))
    assert cache.match(NS, key(CAT)).num_tokens == 40
    assert cache.match(NS, key(DOG)).num_tokens == 8
    assert cache.match(NS, IDS).num_tokens == 8
    compute_key(cache, key(DOG))
    assert cache.match(NS, key(DOG)).num_tokens == 40 and cache.match(NS, key(CAT)).num_tokens == 40


def test_a_prompt_may_go_on_after_an_image() -> None:
    """Tokens appended behind it make the same key as a prompt that has them: the next turn finds all."""
    cache = make_cache(64)
    with cache.open(NS, key(CAT, IDS[:30])) as sequence:
        sequence.extend(IDS[30:])
        sequence.commit(40)
    assert cache.match(NS, key(CAT)).num_tokens == 40


@given(
    data=st.data(),
    block_size=st.sampled_from((1, 2, 4, 16)),
    num_tokens=st.integers(1, 80),
)
def test_ranges_in_any_place(data: st.DataObject, block_size: int, num_tokens: int) -> None:
    """Outside the covered blocks nothing changes; inside, every id is changed, and depends on digest and start."""
    cuts = sorted(data.draw(st.sets(st.integers(0, num_tokens), min_size=2, max_size=6)))
    ranges = list(pairwise(cuts))[::2]
    ids = data.draw(st.lists(st.integers(0, 2**17), min_size=num_tokens, max_size=num_tokens))
    found = {
        digest: np.frombuffer(
            key_of(ids, [Material(*each, digest) for each in ranges], block_size=block_size), "<u4"
        )
        for digest in (CAT, DOG)
    }
    covered = np.zeros(num_tokens, np.bool_)
    for start, stop in ranges:
        covered[start - start % block_size : stop] = True
    for words in found.values():
        assert np.array_equal(words >= 2**31, covered)
        assert np.array_equal(words[~covered], np.array(ids, np.uint32)[~covered])
    assert (found[CAT][covered] != found[DOG][covered]).all()


def test_the_same_content_elsewhere_has_another_key() -> None:
    """An image that begins one token later, or is one of two that changed places."""
    assert key(CAT, start=8)[48:] != key(CAT, start=9)[48:]
    two = [
        key_of(IDS, [Material(10, 20, first), Material(20, 30, second)], block_size=4)
        for first, second in ((CAT, DOG), (DOG, CAT), (CAT, CAT))
    ]
    assert len(set(two)) == 3


def test_without_material_it_is_the_key_of_the_ids() -> None:
    assert (
        key_of([1, 2], block_size=4) == b"\1\0\0\0\2\0\0\0" == key_of(b"\1\0\0\0\2\0\0\0", (), block_size=16)
    )


@pytest.mark.parametrize(
    ("material", "problem"),
    [
        ([Material(0, 41, CAT)], "stop=41"),
        ([Material(-1, 4, CAT)], "start=-1"),
        ([Material(4, 4, CAT)], "stop=4"),
        ([Material(40, 41, CAT)], "start=40"),
        ([Material(0, 8, CAT), Material(7, 9, CAT)], r"material\[1\]\.start=7"),
        ([Material(8, 9, CAT), Material(0, 4, CAT)], r"material\[1\]\.start=0"),
        ([Material(0, 4, b"short")], "16 to 64 bytes"),
        ([Material(0, 4, bytes(65))], "16 to 64 bytes"),
        ([Material(0, 4, "a" * 32)], "16 to 64 bytes"),  # type: ignore[arg-type]
        ([(0, 4)], "a Material"),
        ([Material(True, 4, CAT)], "start=True"),
        (3, "an iterable"),
    ],
)
def test_wrong_material_is_refused(material: Any, problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        key_of(IDS, material, block_size=4)


def test_wrong_ids_and_sizes_are_refused() -> None:
    with pytest.raises(TokenError):
        key_of([-1], [Material(0, 1, CAT)], block_size=4)
    with pytest.raises(ArgumentError, match="block_size=0"):
        key_of([1], block_size=0)
    with pytest.raises(ArgumentError, match="within the 0 ids"):
        key_of([], [Material(0, 1, CAT)], block_size=4)


def test_a_long_range_costs_little() -> None:
    """A million covered tokens take as many steps of Python as a thousand: no loop over tokens."""

    def num_steps(num_tokens: int) -> int:
        ids = np.zeros(num_tokens, np.uint32)
        return num_events(lambda: key_of(ids, [Material(0, num_tokens, CAT)], block_size=16), "opcode")

    assert num_steps(1_000_000) == num_steps(1_000) > 0


def test_ignored_material_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the digest is left out. Then one image is found for another, and the test above fails."""

    class Planted:
        def __init__(self, seed: bytes) -> None:
            self.digest = lambda: bytes(64)

    monkeypatch.setattr(hashlib, "blake2b", Planted)
    with pytest.raises(AssertionError):
        test_one_image_is_not_found_for_another()
