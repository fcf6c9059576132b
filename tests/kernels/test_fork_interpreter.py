"""The Triton kernel on a machine without a GPU: the suite of ``test_fork.py`` through Triton's interpreter.

In a process of its own: TRITON_INTERPRET counts when triton is first imported, and other tests import it
without (transformers does).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("test_fork.py")
ROOT = SUITE.parents[2]


@pytest.mark.timeout(170)
def test_the_suite_passes_in_an_interpreting_process() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(SUITE),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=150
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) >= 50, output
    assert "skipped" not in output and "deselected" not in output, output
