"""The fuzz drivers start, end in time and find nothing in a short run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_state_machine_driver() -> None:
    command = [sys.executable, str(ROOT / "fuzz" / "state_machine.py"), "--seconds", "1", "--batch", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("nothing found")
