"""The example of a beam step runs at a small size, and both ways end with the same KV."""

from __future__ import annotations

import re

from tests.examples.running import printed


def test_both_ways_end_with_the_same_keys_and_values() -> None:
    text = printed("beam_step.py", "--device", "cpu", "--prompt", "90", "--steps", "12")
    assert "the same KV in the end" in text
    paged, contiguous = (float(size) for size in re.findall(r"([\d.]+) MiB held", text))
    assert 0 < paged < contiguous
