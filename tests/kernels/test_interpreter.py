"""The Triton kernels on a machine without a GPU: the tests of this folder in Triton's interpreter.

They run in a process of their own. TRITON_INTERPRET is read when triton is first imported, and other tests import
triton without it (through transformers).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SUITES = {"test_fork.py": 45, "test_copies.py": 70, "test_quantize.py": 45, "test_reorder.py": 38}
"""The least number of tests that each must have."""


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_passes_in_an_interpreting_process(suite: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / suite)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        command,
        cwd=FOLDER.parents[1],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=320,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) >= SUITES[suite], output
    assert "skipped" not in output and "deselected" not in output, output
