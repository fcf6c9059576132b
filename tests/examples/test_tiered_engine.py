"""The example of an engine with tiers finds its prompt in host memory, and on disk after a restart."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.examples.running import ROOT


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "tiered_engine.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert [line.split(" tokens cached")[0] for line in done.stdout.splitlines()] == [
        "cold: 0 of 1,529",
        "from host memory: 1,520 of 1,529",
        "from disk, after a restart: 1,520 of 1,529",
        "another tenant: 0 of 1,529",
    ]
