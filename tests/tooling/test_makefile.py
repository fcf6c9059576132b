"""`make` installs what the lock file pins, and shows its progress: the time, and the current step of pip."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from requirements import locked
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  "-m pip install"*)
    echo "Collecting torch"
    while ! [ -e "$0.may-end" ]; do sleep 0.1; done
    echo "nothing went wrong"; exit $PIP_STATUS;;
esac
"""
"""A fake Python of the environment: pip ends when the test lets it, everything else at once."""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


class Make:
    """``make`` that installs into a folder with the fake Python, writing to a pipe or a terminal."""

    def __init__(self, venv: Path, pip_status: int, *, terminal: bool = False) -> None:
        self._venv = venv
        self._output, theirs = pty.openpty() if terminal else os.pipe()
        self._process = subprocess.Popen(
            ["make", f"{venv}/.installed-all", f"VENV={venv}", "PROGRESS_S=1"],
            cwd=ROOT,
            env={**os.environ, "PIP_STATUS": str(pip_status)},
            stdout=theirs,
            stderr=subprocess.PIPE,
        )
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read the output until it has ``text``."""
        while text not in self.shown and self._read():
            pass
        assert text in self.shown

    def end(self) -> tuple[int, str]:
        """Let pip end. Return the exit code of ``make`` and its errors; ``shown`` is its whole output."""
        self._let_pip_end()
        while self._read():
            pass
        os.close(self._output)
        _, errors = self._process.communicate(timeout=LIMIT_S)
        return self._process.returncode, errors.decode()

    def _let_pip_end(self) -> None:
        (self._venv / "bin" / "python.may-end").touch()

    def _read(self) -> bool:
        try:
            part = os.read(self._output, 65536)
        except OSError:  # EIO: the other side of a terminal is closed
            part = b""
        self.shown += part.decode()
        return bool(part)


def test_progress_is_printed_in_lines(venv: Path) -> None:
    make = Make(venv, pip_status=0)
    make.wait_for("  2 s  Collecting torch\n")
    code, errors = make.end()
    first, *ticks = make.shown.splitlines()
    assert code == 0 and not errors
    assert first.startswith("Installing radixkv[all,build]") and "busy machine" in first
    assert ticks[:2] == ["  1 s  Collecting torch", "  2 s  Collecting torch"]


def test_progress_on_a_terminal_is_one_line_that_is_erased(venv: Path) -> None:
    make = Make(venv, pip_status=0, terminal=True)
    make.wait_for("\r\x1b[K  1 s  Collecting torch\r\x1b[K")
    code, _ = make.end()
    assert code == 0 and make.shown.endswith("\r\x1b[K") and make.shown.count("\n") == 1


def test_the_output_of_pip_is_shown_if_it_fails(venv: Path) -> None:
    code, errors = Make(venv, pip_status=1).end()
    assert code == 2 and not (venv / ".installed-all").exists()
    assert "nothing went wrong\nmake: pip could not install radixkv[all,build]" in errors


def test_the_lock_file_has_all_that_an_extra_requires() -> None:
    """Each requirement of pyproject.toml is pinned once for each Python, with hashes. Only torch goes without them."""
    for extra in ("all", "build", "dev", "docs"):
        lines = locked.locked([extra])
        assert locked.required([extra]) <= lines.keys()
        assert all("==" in each and "--hash=sha256:" in each for each in lines.values())
    assert "torch" in locked.locked(["all"]) and "torch" not in locked.locked(["docs"])
    assert not [name for name in locked.locked(["dev"]) if name.startswith(("nvidia-", "cuda-"))]


def test_what_another_requires_is_locked_with_it() -> None:
    assert {"httpcore", "h11", "markupsafe"} <= locked.locked(["http"]).keys()
    assert "torch" not in locked.locked(["http"])
