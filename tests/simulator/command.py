"""Commands of ``radixkv`` that run in this process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from radixkv.cli.main import main


class Done(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Done:
    """Run ``radixkv`` with these arguments."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            main(arguments)
        except SystemExit as ending:
            code = ending.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), errors.getvalue())


def complaint(done: Done, code: int = 2) -> str:
    """Return the one line of error that a command ended with."""
    assert done.code == code and not done.stdout, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("radixkv: ")
    return line
