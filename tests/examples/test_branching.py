"""The example of beams and tree of thought runs at a small size, and its output is true."""

from __future__ import annotations

import re

import pytest

from tests.examples.running import printed


@pytest.mark.slow
def test_both_searches_find_the_same_with_fewer_blocks() -> None:
    arguments = ["--device", "cpu", "--prompt", "90", "--steps", "20", "--branches", "3", "--rounds", "2"]
    beams, thoughts = printed("branching.py", *arguments).split("tree of thought")
    assert "same tokens as transformers' own cache: True" in beams
    assert "same path as with transformers' own cache: True" in thoughts
    found = re.search(r"blocks held at most: (\d+), without sharing: (\d+)", beams)
    assert found is not None and int(found[1]) < int(found[2]) * 2 / 3
    for part in (beams, thoughts):
        assert "audit: clean" in part
        ours, stock = (
            re.search(rf"{name} +([\d.]+) +([\d.]+)", part) for name in ("radixkv", "transformers")
        )
        assert ours is not None and stock is not None
        assert 0 < float(ours[2]) < float(stock[2])
    # The first round has computed 109 of its 110 tokens: 6 whole blocks of 16.
    assert "tokens found cached, round by round: 0, 96" in thoughts
