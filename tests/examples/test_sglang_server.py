"""The example with a real SGLang runs, and prints the expected lines."""

from __future__ import annotations

import re

import pytest

from tests.examples.running import printed

pytestmark = [pytest.mark.engines]


def test_sglang_server_example() -> None:
    lines = printed("sglang_server/two_tenants.py").splitlines()
    told = dict(line.split(": ", 1) for line in lines[:3])
    cached = {who: int(text.split()[0]) for who, text in told.items()}
    num_tokens = int(re.findall(r"of (\d+) tokens", lines[0])[0])
    whole = (num_tokens - 1) // 16 * 16
    assert cached == {"acme, cold": 0, "acme again": whole, "globex, the same prompt": 0}
    assert lines[3] == f"globex warmed {num_tokens} tokens for the salt v2, 0 were cached"
    assert lines[4] == f"globex pinned {num_tokens // 16 * 16} tokens; acme sees 0 pins"
    assert lines[5] == "globex was purged, generation 1; its pins: []"
    assert lines[6].startswith("globex after that: 0 of ")
    assert lines[7].startswith(f"acme after that: {whole} of ")
    assert lines[8] == "the gateway, asked for /server_info: 404"
    audited = dict(line.rsplit(": ", 1) for line in lines[9:])
    assert audited["audit"] == "isolated in what was checked" and "leaks" not in audited.values(), lines[9:]
