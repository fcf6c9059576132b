"""The in-process example runs and prints the expected lines."""

from __future__ import annotations

from tests.examples.running import printed


def test_in_process_example() -> None:
    lines = printed("in_process.py").splitlines()
    assert lines[0] == "first request: 0 of 100 tokens cached"
    assert lines[1] == "second request: 96 of 100 tokens cached"
    assert lines[2] == "forked into 3: 0 blocks copied"
    assert lines[3] == "each wrote a token of its own: 3 blocks copied, in one launch"
    assert lines[4] == "their last three tokens: [[1.0, 1.0, 2.0], [1.0, 1.0, 3.0], [1.0, 1.0, 4.0]]"
    assert lines[5] == "the same prompt of another tenant: 0 tokens matched"
    assert lines[6] == "evicted 3 blocks; now 48 tokens match"
    assert lines[7] == "audit: clean"
