"""Runs examples as scripts."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import forked
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]


def printed(name: str, *arguments: str) -> str:
    """Return what an example printed. Fails unless the example ends with code 0."""
    command = [str(ROOT / "examples" / name), *arguments]
    with TemporaryDirectory() as folder:
        done = forked.run(command, os.environ, Path(folder), LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout
