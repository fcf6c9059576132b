"""The example of the disk tier finds its records after a restart, and nothing after the purge."""

from __future__ import annotations

import subprocess
import sys

from tests.examples.running import ROOT
from tests.waiting import LIMIT_S


def test_it_runs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "disk_tier.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "segment 0 stored: True",
        "segment 1 stored: True",
        "after a restart found: 2",
        "segment 0 loaded: True",
        "segment 1 loaded: True",
        "another tenant finds: 0",
        "purged: 2 records; left: 0",
    ]
