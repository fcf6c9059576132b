"""``radixkv serve`` in processes forked from one that has already imported torch and transformers.

These imports take about 6 s of CPU, and the tests start and stop many processes. One mother process makes them for all
pytest processes of a run. At its first use, each of these gets a template of its own, forked from the mother: the
template forks a child for each question on its connection, and answers when a child has ended. A template ends with its
connection, and kills its children. The mother ends with the last template.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import functools
import gc
import itertools
import json
import logging
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from radixkv.tokenizer import load_tokenizer
from tests.service.patience import holdable_warms, patient_services
from tests.tiers.support import patient_disks
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from radixkv.engines.hf.models import Model

_POLL_S = 0.02
_CONNECT_S = 0.2
_READY = b"ready\n"


@contextmanager
def small_demo_model(num_layers: int = 2, hidden_size: int = 64) -> Iterator[None]:
    """The demo model is smaller during the ``with``: most tests don't depend on its size, 6 layers of 256.

    The services of a process share its weights and the shipped tokenizer. Neither ever changes.
    """
    from radixkv.engines.hf import engine as hf
    from radixkv.engines.hf import load as hf_load
    from radixkv.service import build

    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size}
    make = functools.cache(functools.partial(hf.demo_model, **sizes))
    load = functools.cache(load_tokenizer)

    def model(**others: int) -> Model:
        made = make(**others)
        return copy.deepcopy(made, {id(each): each for each in made.parameters()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_load, "demo_model", model)
        patch.setattr(build, "load_tokenizer", lambda path: load_tokenizer(path) if path else load())
        yield


class Template:
    """The process that forks the children of this one."""

    def __init__(self) -> None:
        self._connection = _connect()
        self._stream = self._connection.makefile("rw", encoding="utf-8")
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self.is_sound = True
        """False once a question was given up, by the limit of a test for instance."""
        atexit.register(self.close)

    def ask(self, *question: Any) -> Any:
        """Send a question to the template and return its answer.

        Question and answer have a number, because the answer to a question that was given up may come later.
        """
        with self._lock:
            number = next(self._numbers)
            try:
                print(json.dumps([number, *question]), file=self._stream, flush=True)
                while True:
                    answered, answer = json.loads(self._stream.readline())
                    if answered == number:
                        return answer
            except BaseException:
                self.is_sound = False
                raise

    def close(self) -> None:
        """End the template, and wait until it has killed its children."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while self._connection.recv(65536):
                pass
        self._connection.close()


def _connect() -> socket.socket:
    """Connect to the mother of this run, and start her if there is none. Returns when the template is there."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"of-{os.getpid()}"
    address = f"\0radixkv-tests-{run}"  # an abstract address: no file, whose path could be too long
    until = time.monotonic() + LIMIT_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(LIMIT_S)
        try:
            connection.connect(address)
            if connection.recv(len(_READY)) == _READY:  # not if she was just ending
                return connection
        except OSError as failure:
            if failure.errno != errno.ECONNREFUSED:
                raise
            _start_mother(address[1:])
        connection.close()
        assert time.monotonic() < until, "the process that forks the services never listened"
        time.sleep(_CONNECT_S)


_mother: subprocess.Popen[bytes] | None = None
"""The mother that this process has started last."""


def _start_mother(name: str) -> None:
    global _mother
    if _mother is None or _mother.poll() is not None:
        command = [sys.executable, "-m", "tests.forked", name]
        _mother = subprocess.Popen(command, cwd=Path(__file__).parents[1], start_new_session=True)
        # She may outlive this process, for others.
        atexit.register(warnings.filterwarnings, "ignore", "subprocess .* is still running", ResourceWarning)


_template: Template | None = None


def template() -> Template:
    """The template of this pytest process: started at the first call, and anew after one that failed.

    The children of one that failed go on to use it.
    """
    global _template
    if _template is None or not _template.is_sound:
        _template = Template()
    return _template


class Forked:
    """A forked child with the interface of ``subprocess.Popen``."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Run a command line: ``radixkv`` or the path of a script, and arguments. Errors go to ``output`` by default.

        ``environment``: the whole environment, of this process by default.
        """
        variables = dict(os.environ if environment is None else environment)
        files = [str(output), str(errors or output)]
        self._template = template()
        self.pid: int = self._template.ask("fork", list(arguments), files, variables)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while the child runs."""
        if self.returncode is None:
            self.returncode = self._template.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float = LIMIT_S) -> int:
        """Wait for the child to end and return its exit code.

        Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("radixkv", timeout)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the child has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command line, as for ``Forked``, as ``subprocess.run`` does, with its output in files of ``folder``.

    Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds.
    """
    output, errors = folder / "stdout", folder / "stderr"
    child = Forked(arguments, output, errors, environment)
    try:
        code = child.wait(timeout)
    finally:
        child.kill()
    return subprocess.CompletedProcess(list(arguments), code, output.read_text(), errors.read_text())


_ended_with: int | None = None
"""In a child whose command line has ended: the exit code."""


def _leave() -> None:
    """Leave a child without tearing down its modules. They include torch, so that would take half a second of CPU.

    It is registered before all imports of the service, so it runs after what they want done at the end.
    """
    if _ended_with is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_ended_with)


def _begin(arguments: list[str], files: list[str], environment: dict[str, str]) -> None:
    """Run a command line in the child, with its output in files."""
    global _ended_with
    opened = {file: os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for file in files}
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, file in ((0, nothing), (1, opened[files[0]]), (2, opened[files[1]])):
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    try:
        if arguments[0] == "radixkv":
            runpy.run_module("radixkv", run_name="__main__")
        else:
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            _ended_with = ending.code or 0
        raise
    _ended_with = 0


def _poll(children: set[int], pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _prepare() -> None:
    """Import and make what all services need."""
    from radixkv.service.intake import Intake
    from radixkv.service.local import demo_service

    # Processes that read bodies take half a second of CPU each to start. Most children get only short bodies.
    pytest.MonkeyPatch().setattr(Intake, "start", lambda intake: None)
    with demo_service():  # so that the children find what only the first service of a process has to make
        pass
    gc.collect()
    gc.freeze()  # the children leave alone what was imported, and go on to share its memory


def _answer_questions(connection: socket.socket) -> None:
    """Be the template of one pytest process, until the connection ends."""
    connection.sendall(_READY)
    stream = connection.makefile("rw", encoding="utf-8")
    children: set[int] = set()
    for line in stream:
        number, what, *arguments = json.loads(line)
        if what == "fork":
            answer: int | None = os.fork()
            if answer == 0:
                os.close(connection.fileno())
                _begin(*arguments)
                return
            children.add(answer)
        else:
            answer = _poll(children, *arguments)
        print(json.dumps([number, answer]), file=stream, flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def _serve(listener: socket.socket) -> None:
    """Be the mother: fork a template for each connection, until the last one has ended."""
    templates: set[int] = set()
    waits_until = time.monotonic() + LIMIT_S
    while templates or time.monotonic() < waits_until:
        templates -= {pid for pid in templates if os.waitpid(pid, os.WNOHANG)[0]}
        if not select.select([listener], [], [], _POLL_S if templates else 1.0)[0]:
            continue
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid() and not (pid := os.fork()):
            listener.close()
            _answer_questions(connection)
            return
        connection.close()
        if user == os.getuid():
            templates.add(pid)
            waits_until = 0.0


def main(name: str) -> None:
    """Be the mother of a run, unless there is one already."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return
    listener.listen(64)
    with small_demo_model(), patient_disks(), patient_services(), holdable_warms():
        _prepare()
        _serve(listener)


if __name__ == "__main__":
    atexit.register(_leave)
    main(sys.argv[1])
