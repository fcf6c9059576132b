"""``radixkv serve`` in processes that are forked from one that has imported torch and transformers.

Those imports take some 6 s of CPU, and a fleet of processes is started and killed often. Each pytest process starts
one template, at the first use; it forks a child for each line that it reads and is told of their ends.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.02


class Template:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.service.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, *question: Any) -> Any:
        """Its answer to a question."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """It ends, and its children with it."""
        self._process.communicate()


@functools.cache
def template() -> Template:
    """The one of this process."""
    return Template()


class Forked:
    """A child, as ``subprocess.Popen`` has it."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.pid: int = template().ask("fork", arguments, str(log))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = template().ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        """Its exit code, when it has ended."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("radixkv serve", timeout)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing, if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _serve(arguments: list[str], log: str) -> None:
    """The child: what ``python -m radixkv.cli.main serve`` is, with its output in a file."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, file in ((0, nothing), (1, out), (2, out)):
        os.dup2(file, descriptor)
    sys.argv = ["radixkv", "serve", *arguments]
    from radixkv.cli.main import main

    main()


def _poll(children: set[int], pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _answer_questions() -> None:
    import radixkv.engines.hf
    import radixkv.service.app
    import radixkv.service.server  # noqa: F401

    children: set[int] = set()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "fork":
            answer: int | None = os.fork()
            if answer == 0:
                _serve(*arguments)
                return
            children.add(answer)
        else:
            answer = _poll(children, *arguments)
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _answer_questions()
