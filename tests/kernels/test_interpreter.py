"""The Triton kernels on a machine without a GPU: the tests of this folder in Triton's interpreter.

They run in a process of their own. TRITON_INTERPRET is read when triton is first imported, and other tests import
triton without it (through transformers).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SUITES = ("test_copies.py", "test_fork.py", "test_quantize.py", "test_reorder.py")


def run(*suites: str, **environment: str) -> None:
    """Run suites in an interpreting process: all of their tests run and pass."""
    files = [str(FOLDER / suite) for suite in suites]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=FOLDER.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout and "deselected" not in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("suites", [SUITES[:1], SUITES[1:]], ids=["copies", "others"])
def test_the_suites_pass_in_an_interpreting_process(suites: tuple[str, ...]) -> None:
    run(*suites)


@pytest.mark.release
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_passes_with_more_examples(suite: str) -> None:
    run(suite, HYPOTHESIS_PROFILE="vary")
