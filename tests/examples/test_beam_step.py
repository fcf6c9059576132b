"""The example of a beam step runs small, and both ways end with the same KV."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_both_ways_end_with_the_same_keys_and_values() -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "beam_step.py"),
            "--device",
            "cpu",
            "--prompt",
            "90",
            "--steps",
            "40",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "the same KV in the end" in done.stdout
    paged, contiguous = (float(size) for size in re.findall(r"([\d.]+) MiB held", done.stdout))
    assert 0 < paged < contiguous
