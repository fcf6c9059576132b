"""The beam search example runs, and what it prints is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_runs_and_says_what_happened() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "beam_search.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "same tokens as transformers' own cache: True" in done.stdout
    found = re.search(r"blocks held at most: (\d+), without sharing: (\d+)", done.stdout)
    assert found is not None
    held, unshared = map(int, found.groups())
    assert held < unshared / 2
    assert "the next turn finds 336 of 340 tokens cached" in done.stdout
    assert "audit: clean" in done.stdout
