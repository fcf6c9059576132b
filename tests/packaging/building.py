"""Builds wheels and sdists."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]


def hasty_compiler(folder: Path) -> str:
    """Return the C compiler without optimization, which takes a fraction of the time."""
    script = folder / "cc"
    compiler = sysconfig.get_config_var("CC") or "cc"
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


def build(source: Path, kind: str, out: Path, **environment: str) -> Path:
    """Build with the installed tools, without a package index, and return the one file that results."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        f"--{kind}",
        "--outdir",
        str(out),
        str(source),
    ]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    inherited["RADIXKV_BUILDS"] = ""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=inherited | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}
