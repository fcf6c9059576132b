"""Services that a benchmark starts, forked from a process that has already done the imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO

import pytest

from tests.forked import Forked


def fork_services(patch: pytest.MonkeyPatch, benchmark: ModuleType) -> None:
    """Let the ``radixkv`` processes of a benchmark be forked. They have the small demo model."""
    patch.setattr(benchmark, "subprocess", SimpleNamespace(Popen=_forked, STDOUT=subprocess.STDOUT))


def _forked(command: Sequence[str], stdout: IO[bytes], stderr: int) -> Forked:
    assert list(command[:3]) == [sys.executable, "-m", "radixkv"] and stderr == subprocess.STDOUT
    return Forked(["radixkv", *command[3:]], Path(stdout.name))
