"""Token ids in every form give the same key. Invalid ids raise an error that names the index."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv import CacheConfig, Namespace, PrefixCache, TokenError, audit
from radixkv.index.tokens import MAX_BUFFERED, MIN_BUFFERED, decode, encode, encode_one

IDS = [0, 1, 2, 100, 127]
KEY = b"".join(token_id.to_bytes(4, "little") for token_id in IDS)

FORMS: dict[str, Callable[[], Any]] = {
    "list": lambda: IDS,
    "tuple": lambda: tuple(IDS),
    "list of numpy scalars": lambda: [np.int64(token_id) for token_id in IDS],
    "key bytes": lambda: KEY,
    **{f"array {code}": (lambda code=code: array(code, IDS)) for code in "bBhHiIlLqQ"},
    **{
        f"numpy {kind}": (lambda kind=kind: np.array(IDS, dtype=kind))
        for kind in (
            "i1",
            "u1",
            "<i2",
            ">i2",
            "<u2",
            ">u2",
            "<i4",
            ">i4",
            "<u4",
            ">u4",
            "<i8",
            ">i8",
            "<u8",
            ">u8",
        )
    },
    "numpy every second": lambda: np.array([x for token_id in IDS for x in (token_id, 7)], dtype=np.int64)[
        ::2
    ],
    "numpy reversed": lambda: np.array(IDS[::-1], dtype=np.uint32)[::-1],
    "numpy column": lambda: np.array([[token_id, 9] for token_id in IDS], dtype=np.int32)[:, 0],
    "numpy read-only": lambda: np.frombuffer(KEY, dtype="<u4"),
    **{
        f"torch {kind}": (lambda kind=kind: torch.tensor(IDS, dtype=getattr(torch, kind)))
        for kind in ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
    },
    "torch every second": lambda: torch.tensor([x for token_id in IDS for x in (token_id, 7)])[::2],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_key(form: str) -> None:
    """Any container of ids gives the same key."""
    ids = FORMS[form]()
    assert encode(ids) == KEY
    assert decode(KEY).tolist() == IDS


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_takes_every_form(form: str) -> None:
    """Open with a list, match with any form, extend with any form."""
    cache, ns = PrefixCache(CacheConfig(num_blocks=16, block_size=2)), Namespace("a", "m")
    with cache.open(ns, IDS) as sequence:
        sequence.commit(5)
        sequence.extend(FORMS[form]())
        assert sequence.token_ids.tolist() == IDS + IDS and sequence.token_ids.dtype == np.uint32
    assert cache.match(ns, FORMS[form]()).num_tokens == 4
    audit.check(cache)


def test_ranges_and_empty_inputs() -> None:
    """Ranges, and empty input in every form."""
    assert encode(range(3)) == encode([0, 1, 2])
    for nothing in (
        [],
        (),
        range(0),
        array("q"),
        np.array([], dtype=np.int64),
        torch.tensor([], dtype=torch.int64),
        b"",
    ):
        assert encode(nothing) == b""


BIG = 2**32

WRONG: dict[str, tuple[Callable[[], Any], int | None]] = {
    "float in a list": (lambda: [1, 2.0, 3], 1),
    "float in a tuple": (lambda: (1.5,), 0),
    "string in a list": (lambda: [1, 2, "3"], 2),
    "None in a list": (lambda: [None], 0),
    "list in a list": (lambda: [[1]], 0),
    "negative in a list": (lambda: [0, 0, -1, -2], 2),
    "too large in a list": (lambda: [0, BIG], 1),
    "enormous in a list": (lambda: [0, 10**30], 1),
    "negative in an array": (lambda: array("h", [1, -1]), 1),
    "negative in a long array": (lambda: array("q", [1, 2, -1]), 2),
    "too large in an array": (lambda: array("Q", [1, BIG]), 1),
    "largest of all in an array": (lambda: array("Q", [2**64 - 1]), 0),
    "float array": (lambda: array("d", [1.0]), None),
    "float32 array": (lambda: array("f", [1.0]), None),
    "negative in numpy i1": (lambda: np.array([1, -1], dtype=np.int8), 1),
    "negative in numpy i4": (lambda: np.array([1, 1, -5], dtype=np.int32), 2),
    "negative in numpy >i4": (lambda: np.array([1, 1, -5], dtype=">i4"), 2),
    "negative in numpy i8": (lambda: np.array([-1, 5]), 0),
    "too large in numpy i8": (lambda: np.array([5, BIG, -1]), 1),
    "too large in numpy >i8": (lambda: np.array([5, BIG, -1], dtype=">i8"), 1),
    "too large in numpy u8": (lambda: np.array([5, 2**64 - 1], dtype=np.uint64), 1),
    "negative in a numpy slice": (lambda: np.array([0, 9, -3, 9])[::2], 1),
    "numpy floats": (lambda: np.array([1.0]), None),
    "numpy booleans": (lambda: np.array([True]), None),
    "numpy objects": (lambda: np.array([1], dtype=object), None),
    "numpy complex": (lambda: np.array([1j]), None),
    "numpy of two dimensions": (lambda: np.zeros((2, 2), dtype=np.int64), None),
    "numpy of no dimension": (lambda: np.array(5), None),
    "torch floats": (lambda: torch.tensor([1.0]), None),
    "torch booleans": (lambda: torch.tensor([True]), None),
    "torch of two dimensions": (lambda: torch.zeros((1, 4), dtype=torch.int64), None),
    "negative in torch": (lambda: torch.tensor([3, -7]), 1),
    "too large in torch": (lambda: torch.tensor([BIG]), 0),
    "torch elsewhere": (lambda: torch.zeros(3, dtype=torch.int64, device="meta"), None),
    "text": (lambda: "123", None),
    "an odd number of bytes": (lambda: b"12345", None),
    "a set": (lambda: {1, 2}, None),
    "a dict": (lambda: {1: 2}, None),
    "an integer": (lambda: 5, None),
    "None": (lambda: None, None),
}


@pytest.mark.parametrize("form", WRONG)
def test_invalid_ids_are_refused(form: str) -> None:
    """A TokenError, which is also a ValueError, has the index of the first bad id, if an id is to blame.

    Nothing changes.
    """
    make, index = WRONG[form]
    with pytest.raises(TokenError) as error:
        encode(make())
    assert error.value.index == index and isinstance(error.value, ValueError)
    if index is not None:
        assert str(index) in str(error.value)
    cache, ns = PrefixCache(CacheConfig(num_blocks=8, block_size=2)), Namespace("a", "m")
    with cache.open(ns, [1, 2, 3]) as sequence:
        for call in (cache.match, cache.open):
            with pytest.raises(TokenError):
                call(ns, make())
        with pytest.raises(TokenError):
            sequence.extend(make())
        assert sequence.num_tokens == 3
        audit.check(cache)


@pytest.mark.parametrize("wrong", [-1, BIG, 1.0, "1", None])
def test_append_accepts_what_a_list_accepts(wrong: Any) -> None:
    """``append`` accepts the same ids as a list."""
    assert encode_one(BIG - 1) == encode([BIG - 1]) == b"\xff\xff\xff\xff"
    assert encode_one(np.int64(3)) == encode([3])
    with pytest.raises(TokenError):
        encode_one(wrong)


@pytest.mark.parametrize(
    "item", [10**5000, -(10**5000), "x" * 100_000], ids=["huge", "hugely negative", "text"]
)
def test_a_long_message_is_cut(item: Any) -> None:
    """The message stays short, also for an integer with more digits than Python prints, and is a TokenError."""
    with pytest.raises(TokenError) as error:
        encode([0, item])
    assert len(str(error.value)) < 300


@given(st.lists(st.integers(0, BIG - 1)))
def test_round_trip(ids: list[int]) -> None:
    """Ids survive the round trip through their key of 4 bytes an id. Prefixes of ids are prefixes of keys."""
    key = encode(ids)
    assert decode(key).tolist() == ids and len(key) == 4 * len(ids)
    assert key.startswith(encode(ids[: len(ids) // 2]))
    assert encode(np.array(ids, dtype=np.uint64)) == encode(np.array(ids, dtype=np.int64)) == key


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_any_int64(ids: list[int]) -> None:
    """Either every id is valid and all forms agree, or all forms name the same first bad index."""
    bad = [at for at, token_id in enumerate(ids) if not 0 <= token_id < BIG]
    outcomes = set()
    for form in (
        ids,
        tuple(ids),
        array("q", ids),
        np.array(ids),
        np.array(ids, dtype=">i8"),
        torch.tensor(ids),
    ):
        try:
            outcomes.add(encode(form))
        except TokenError as error:
            outcomes.add(error.index)
    assert outcomes == ({bad[0]} if bad else {encode(ids)})


@pytest.mark.parametrize(
    "wide", [lambda ids: array("q", ids.tobytes()), lambda ids: ids, lambda ids: ids[::-1]]
)
def test_long_ids_that_use_the_shared_buffer(wide: Callable[[Any], Any]) -> None:
    """Each key is that of its own ids, after any earlier conversions, and from several threads at once."""
    sizes = [MAX_BUFFERED, MIN_BUFFERED, MAX_BUFFERED + 1, MIN_BUFFERED - 1, 5_000, 4_999] * 8

    def is_right(at: int) -> bool:
        ids = np.random.default_rng(at).integers(0, 2**32, sizes[at])
        given = wide(ids)
        expected = np.asarray(given).astype("<u4").tobytes()
        return encode(given) == expected and encode(given[:-1]) == expected[:-4]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(is_right, range(len(sizes))))


def test_a_long_prompt_with_an_invalid_id_leaves_nothing_behind() -> None:
    good = np.arange(MIN_BUFFERED + 5)
    bad = good.copy()
    bad[-1] = -1
    key = encode(good)
    with pytest.raises(TokenError, match=f"index {MIN_BUFFERED + 4}"):
        encode(bad)
    assert encode(good) == key == good.astype("<u4").tobytes()
