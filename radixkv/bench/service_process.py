"""``radixkv serve`` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_S = 300.0


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """Serve with these options on a free port during the ``with``; yield the URL. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "radixkv", "serve", "--port", "0", *options]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield _url(process, log)
        finally:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + _START_S
    while "Ctrl-C" not in (said := log.read_text()):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the service did not start: {said}")
        time.sleep(0.05)
    return said.split(" at ", 1)[1].split("\n", 1)[0]
