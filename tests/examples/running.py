"""Examples, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 500
"""Of most of them the time goes into loading torch, which takes a machine that does much else minutes."""


def printed(name: str, *arguments: str) -> str:
    """What an example printed, which ended well."""
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout
