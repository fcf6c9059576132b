"""The example of an engine with tiers finds its prompt in host memory, and on disk after a restart."""

from __future__ import annotations

import pytest

from tests.examples.running import printed


@pytest.mark.slow
def test_it_runs() -> None:
    assert [line.split(" tokens cached")[0] for line in printed("tiered_engine.py").splitlines()] == [
        "cold: 0 of 1,529",
        "from host memory: 1,520 of 1,529",
        "from disk, after a restart: 1,520 of 1,529",
        "another tenant: 0 of 1,529",
    ]
