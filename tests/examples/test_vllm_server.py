"""The example with a real vLLM runs, and prints the expected lines."""

from __future__ import annotations

import re

import pytest

from tests.examples.running import printed

pytestmark = [pytest.mark.engines]


def test_vllm_server_example() -> None:
    lines = printed("vllm_server/two_tenants.py").splitlines()
    told = dict(line.split(": ", 1) for line in lines[:3])
    cached = {who: int(text.split()[0]) for who, text in told.items()}
    num_tokens = int(re.findall(r"of (\d+) tokens", lines[0])[0])
    assert cached == {"acme, cold": 0, "acme again": num_tokens - 1, "globex, the same prompt": 0}
    assert re.fullmatch(
        rf"globex warmed {num_tokens // 32 * 32} tokens for the salt v2, 0 were cached", lines[3]
    )
    assert lines[4] == f"globex pinned {num_tokens // 32} blocks; acme sees 0 pins"
    assert lines[5] == "globex was purged, complete: True; its pins: []"
    assert lines[6].startswith("globex after that: 0 of ")
    assert lines[7].startswith(f"acme after that: {num_tokens - 1} of ")
    audited = dict(line.rsplit(": ", 1) for line in lines[8:])
    assert audited["audit"] == "isolated in what was checked" and "leaks" not in audited.values(), lines[8:]
