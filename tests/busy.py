"""Runs a command beside busy loops, to show that it doesn't depend on how fast the machine is.

    python -m tests.busy --loops 4 -- make test

The loops end with the command, whatever ends it. The exit code is the command's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOOP = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""It also ends if its parent was killed."""


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep ``number`` cores busy during the ``with``."""
    command = [sys.executable, "-S", "-c", _LOOP, str(os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    """Run the command of the command line, and print its time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--loops", type=int, default=4, help="number of busy loops")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no command: give one after --")
    began_s = time.monotonic()
    with busy_loops(given.loops):
        code = subprocess.run(command, check=False).returncode
    print(f"busy: {given.loops} loops, {time.monotonic() - began_s:.0f} s, exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
