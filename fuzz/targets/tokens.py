"""Token encodings: encoded ids decode to the same ids, and invalid ids raise TokenError only."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from fuzz.targets.material import Material
from radixkv.errors import TokenError
from radixkv.index.tokens import decode, encode, encode_one

_DTYPES = ("<u4", "<i4", "<u8", "<i8", "<u2", "<i2", "u1", "i1", ">u4", ">i8", "<f4", "<f8", "?")
_CODES = "bBhHiIlLqQfd"


def one(data: bytes) -> None:
    """Test one container of ids, in any form."""
    material = Material(data)
    kind = material.byte() % 6
    if kind == 0:
        _agrees([material.number() for _ in range(material.byte())])
    elif kind == 1:
        _agrees(tuple(material.number() for _ in range(material.byte())))
    elif kind == 2:
        _agrees([material.value() for _ in range(material.byte() % 8)])
    elif kind == 3:
        _agrees(_array(material))
    elif kind == 4:
        _agrees(_numpy(material))
    else:
        _agrees(material.rest())


def _array(material: Material) -> Any:
    found = array(_CODES[material.byte() % len(_CODES)])
    raw = material.rest()
    found.frombytes(raw[: len(raw) // found.itemsize * found.itemsize])
    return found


def _numpy(material: Material) -> Any:
    dtype = np.dtype(_DTYPES[material.byte() % len(_DTYPES)])
    shape = material.byte() % 4
    raw = material.rest()
    found = np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)
    if shape == 1 and len(found) % 2 == 0:
        return found.reshape(2, -1)
    return found[::2] if shape == 2 else found[::-1] if shape == 3 else found


def _agrees(ids: Any) -> None:
    if not isinstance(ids, bytes) and not len(ids):  # an empty array has a float dtype by default
        assert _or_none(lambda: encode(ids)) in (b"", None)
        return
    expected = _plain(ids)
    key = _or_none(lambda: encode(ids))
    if expected is None:
        assert key is None, f"{ids!r} was encoded"
        return
    assert key is not None, f"{ids!r} was refused"
    assert type(key) is bytes and decode(key).tolist() == expected, (ids, key)
    if len(expected) == 1:
        assert encode_one(expected[0]) == key


def _or_none(call: Callable[[], bytes]) -> bytes | None:
    try:
        return call()
    except TokenError:
        return None


def _plain(ids: Any) -> list[int] | None:
    """Return the ids as a list of integers, or None if they are invalid, in the slow and obvious way."""
    if isinstance(ids, bytes):
        return (
            None
            if len(ids) % 4
            else [int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)]
        )
    if isinstance(ids, np.ndarray) and (ids.ndim != 1 or ids.dtype.kind not in "ui"):
        return None
    if isinstance(ids, array) and ids.typecode in "fd":
        return None
    items = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    good = all(isinstance(item, int) and 0 <= item < 2**32 for item in items)  # True is 1 in a list
    return list(map(int, items)) if good else None
