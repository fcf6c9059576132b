"""`make` shows its progress while it sets up: the time, and the current step of pip."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  "-m pip install"*) echo "Collecting torch"; sleep 6; echo "nothing went wrong"; exit $PIP_STATUS;;
esac
"""
"""A fake Python of the environment: pip takes a while, everything else ends at once."""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def command(venv: Path) -> list[str]:
    return ["make", f"{venv}/.installed-all", f"VENV={venv}", "PROGRESS_S=1"]


def read_all(terminal: int) -> str:
    """What was written to a terminal whose other side is closed: one read may return a part of it."""
    output = b""
    with contextlib.suppress(OSError):  # EIO: there is no more
        while part := os.read(terminal, 65536):
            output += part
    return output.decode()


def test_progress_is_printed_in_lines(venv: Path) -> None:
    environment = {**os.environ, "PIP_STATUS": "0"}
    done = subprocess.run(
        command(venv), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done
    first, *ticks = done.stdout.splitlines()
    assert first.startswith("Installing radixkv[all]") and "busy machine" in first
    assert ticks[:2] == ["  1 s  Collecting torch", "  2 s  Collecting torch"] and len(ticks) <= 7


def test_progress_on_a_terminal_is_one_line_that_is_erased(venv: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PIP_STATUS": "0"}
    done = subprocess.run(command(venv), cwd=ROOT, env=environment, stdout=theirs, timeout=60)
    os.close(theirs)
    output = read_all(ours)
    os.close(ours)
    assert done.returncode == 0 and "\r\x1b[K  1 s  Collecting torch\r\x1b[K" in output
    assert output.endswith("\r\x1b[K") and output.count("\n") == 1


def test_the_output_of_pip_is_shown_if_it_fails(venv: Path) -> None:
    environment = {**os.environ, "PIP_STATUS": "1"}
    done = subprocess.run(
        command(venv), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and not (venv / ".installed-all").exists()
    assert "nothing went wrong\nmake: pip could not install radixkv[all]" in done.stderr
