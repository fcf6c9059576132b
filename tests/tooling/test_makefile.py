"""`make` sets up with a sign of life: how long it takes, and what pip is at."""

from __future__ import annotations

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
"""Stands for the Python of the environment: pip takes a while, and everything else is done at once."""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def command(venv: Path) -> list[str]:
    return ["make", f"{venv}/.installed-all", f"VENV={venv}", "PROGRESS_S=1"]


def test_lines_say_that_it_goes_on(venv: Path) -> None:
    environment = {**os.environ, "PIP_STATUS": "0"}
    done = subprocess.run(
        command(venv), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done
    first, *ticks = done.stdout.splitlines()
    assert first.startswith("Installing radixkv[all]") and "busy machine" in first
    assert ticks[:2] == ["  1 s  Collecting torch", "  2 s  Collecting torch"] and len(ticks) <= 7


def test_on_a_terminal_it_is_one_line_that_goes_away(venv: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PIP_STATUS": "0"}
    done = subprocess.run(command(venv), cwd=ROOT, env=environment, stdout=theirs, timeout=60)
    os.close(theirs)
    said = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.returncode == 0 and "\r\x1b[K  1 s  Collecting torch\r\x1b[K" in said
    assert said.endswith("\r\x1b[K") and said.count("\n") == 1


def test_what_pip_said_is_shown_if_it_failed(venv: Path) -> None:
    environment = {**os.environ, "PIP_STATUS": "1"}
    done = subprocess.run(
        command(venv), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and not (venv / ".installed-all").exists()
    assert "nothing went wrong\nmake: pip could not install radixkv[all]" in done.stderr
