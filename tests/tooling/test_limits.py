"""A planted test that hangs ends with its name, wherever it hangs, and the next test runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]

BODY = "def test_hangs(): time.sleep(1e6)"
SETUP = """
@pytest.fixture
def resource(): time.sleep(1e6)
def test_hangs(resource): pass
"""
TEARDOWN = """
@pytest.fixture
def resource():
    yield
    time.sleep(1e6)
def test_hangs(resource): pass
"""
FINALISER = """
class Finalised:
    def __del__(self): time.sleep(1e6)
def test_hangs(): Finalised()
"""
GARBAGE = """
class Finalised:
    def __init__(self): self.myself = self
    def __del__(self): time.sleep(1e6)
def test_hangs(): Finalised()
"""
LOOP = """
def test_hangs():
    while True: pass
"""
GENERATED = """
@hypothesis.given(hypothesis.strategies.integers())
def test_hangs(number):
    while True: pass
"""
THREAD = 'def test_hangs(): threading.Thread(target=time.sleep, args=(1e6,), name="stubborn").start()'
STUBBORN = """
def test_hangs():
    while True:
        try: time.sleep(1e6)
        except BaseException: pass
"""
AT_EXIT = """
def test_hangs(): atexit.register(time.sleep, 1e6)
"""


def run(folder: Path, planted: str, *options: str) -> tuple[int, str]:
    """Run a file of a hanging test and one that passes, under limits of a second. Return exit code and output."""
    head = "import atexit, hypothesis, pytest, threading, time\n"
    (folder / "test_planted.py").write_text(f"{head}{planted}\ndef test_passes(): pass\n")
    command = [
        *(sys.executable, "-m", "pytest", "-p", "tests.limits", "-p", "no:cacheprovider", "-c", "/dev/null"),
        *("--cpu-limit-s", "1", "--wall-limit-s", "4", "--grace-s", "4", "--rootdir", str(folder), *options),
        f"--basetemp={folder / 'inner'}",  # its end would also remove what earlier runs left, which may take long
    ]
    done = subprocess.run(
        [*command, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("planted", [BODY, SETUP, TEARDOWN, FINALISER, LOOP, GENERATED])
def test_what_hangs_is_interrupted_and_the_next_test_runs(tmp_path: Path, planted: str) -> None:
    code, output = run(tmp_path, planted)
    assert code == 1 and "The stacks of all threads:" in output, output
    assert "test_planted.py::test_hangs used up its" in output and "Flaky" not in output
    assert "test_planted.py::test_passes" not in output, "the other test has passed"


def test_garbage_that_hangs_is_a_failure(tmp_path: Path) -> None:
    code, output = run(tmp_path, GARBAGE)
    assert code == 1 and "used up its time" in output and "in __del__" in output, output


def test_a_thread_that_never_ends_is_named_with_its_test(tmp_path: Path) -> None:
    code, output = run(tmp_path, THREAD)
    assert code == 1 and "never end" in output, output
    assert "stubborn, started during test_planted.py::test_hangs" in output


def test_a_process_that_swallows_its_interruptions_exits_with_its_stacks(tmp_path: Path) -> None:
    code, output = run(tmp_path, STUBBORN)
    assert code == 1 and "in test_hangs" in output and "Timeout" in output, output


def test_a_worker_that_swallows_its_interruptions_fails_its_test_alone(tmp_path: Path) -> None:
    code, output = run(tmp_path, STUBBORN, "-n", "1")
    assert code == 1 and "crashed while running 'test_planted.py::test_hangs'" in output, output
    assert "1 failed, 1 passed" in output


def test_a_run_that_hangs_after_its_last_test_exits_with_its_stacks(tmp_path: Path) -> None:
    code, output = run(tmp_path, AT_EXIT)
    assert code == 1 and "2 passed" in output and "Timeout" in output, output
