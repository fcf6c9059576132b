"""Chat templates, rendered in a process of their own: a template is a program that came with a model.

    render ─▶ template and values as JSON ─▶ the process: Jinja's sandbox ─▶ text, or why not

One process for all templates of this one. It is started when it is first needed (0.2 s of a core, 30 MB), ends with
this one, and is replaced when it has died. For each template that it compiles or renders it has RENDER_S of CPU time.
The kernel ends it after that, even inside one long operation. It has MAX_MEMORY_BYTES of memory, and a text may have
MAX_RENDERED_CHARS. So nothing that a template does costs more than that, and nothing of it is left.

A call blocks until the process answers. So no event loop may render (``Unrendered``); the service does it in the
processes that read bodies.
"""

from __future__ import annotations

import atexit
import datetime
import importlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NoReturn

from radixkv.errors import ConfigError, needs

if TYPE_CHECKING:
    import jinja2

RENDER_S = 2.0
"""CPU time in which a template is compiled, or rendered."""
MAX_RENDERED_CHARS: Final = 16 * 2**20
MAX_MEMORY_BYTES: Final = 2**30
_SIZE: Final = struct.Struct("<Q")
_CODE: Final = "from radixkv.tokenizer.templates import serve; serve()"
_MAX_COMPILED: Final = 8


class Refused(Exception):
    """The template refuses the conversation, with this message."""


class TooLong(Exception):
    """The template took too much time, memory or text."""


def _too_long() -> TooLong:
    return TooLong(
        f"the chat template needs more than {RENDER_S:g} s, {MAX_RENDERED_CHARS:,} characters or "
        f"{MAX_MEMORY_BYTES >> 20} MiB"
    )


class _Process:
    """The process that renders. Thread-safe; a fork of this process starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises TooLong if the process died of the question."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                _send(process.stdin, message)
                found = _received(process.stdout)
            except BrokenPipeError:
                found = None
            except BaseException:
                self._stop()
                raise
            if found is None:
                self._stop()
                raise _too_long()
            return found

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and (self._owner != os.getpid() or self._process.poll() is not None):
            self._stop()
        if self._process is None:
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._owner == os.getpid():
            process.kill()
            process.wait()
        else:
            process.returncode = 0  # it is the parent's
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


_process = _Process()
atexit.register(_process.close)
os.register_at_fork(after_in_child=lambda: setattr(_process, "_lock", threading.Lock()))


def check(template: str) -> None:
    """Compile a template. Raises ConfigError if it isn't one, takes too long, or Jinja isn't installed."""
    if find_spec("jinja2") is None:
        raise ConfigError("chat_template", template, "None", problem=needs("tokenizer"))
    try:
        answer = _process.ask({"template": template, "variables": None, "seconds": RENDER_S})
    except TooLong as error:
        raise ConfigError("tokenizer", "chat_template", f"a Jinja template: {error}") from None
    if "syntax" in answer:
        raise ConfigError("tokenizer", "chat_template", f"a Jinja template: {answer['syntax']}")


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return what a template that was checked makes of its variables. Raises Refused or TooLong."""
    answer = _process.ask({"template": template, "variables": variables, "seconds": RENDER_S})
    if "refused" in answer:
        raise Refused(answer["refused"])
    if "text" not in answer:
        raise _too_long()
    text: str = answer["text"]
    return text


def _environment() -> dict[str, str]:
    """Return the environment without radixkv's settings, because some are secrets; module paths are kept."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RADIXKV_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _send(pipe: Any, message: Mapping[str, Any]) -> None:
    content = json.dumps(message).encode("ascii")
    pipe.write(_SIZE.pack(len(content)) + content)
    pipe.flush()


def _received(pipe: Any) -> dict[str, Any] | None:
    """Return the next message; None once the other end is closed."""
    head = pipe.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    size = _SIZE.unpack(head)[0]
    content = pipe.read(size)
    if len(content) < size:
        return None
    found: dict[str, Any] = json.loads(content)
    return found


# ---- in the process


def serve() -> None:
    """Answer messages on standard input until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal, for all its processes
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    importlib.import_module("jinja2.ext")
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    while (message := _received(incoming)) is not None:
        signal.setitimer(signal.ITIMER_PROF, message["seconds"])
        try:
            answer = _answer(message["template"], message["variables"])
        except (MemoryError, RecursionError):
            answer = {}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(outgoing, answer)


def _answer(template: str, variables: dict[str, Any] | None) -> dict[str, Any]:
    import jinja2

    try:
        compiled = _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": str(error)}
    if variables is None:
        return {}
    pieces, size = [], 0
    try:
        for piece in compiled.generate(**variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                return {}
            pieces.append(piece)
    except (MemoryError, RecursionError):
        return {}
    except Exception as error:  # noqa: BLE001 whatever a template raises refuses the conversation
        return {"refused": str(error)}
    return {"text": "".join(pieces)}


@lru_cache(_MAX_COMPILED)
def _compiled(template: str) -> jinja2.Template:
    """Return the template in the sandbox, with the functions that chat templates expect."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
