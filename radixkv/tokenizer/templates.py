"""Chat templates, rendered in a process of their own: a template is a program that came with a model.

    render ─▶ template and values as JSON ─▶ the process (``rendering``): transformers' own function ─▶ text, or why not

One process for all templates of this one. It is started when it is first needed (a second of a core, 70 MB), ends with
this one, and is replaced when it has died. For each question it has RENDER_S of CPU time. The kernel ends it after
that, even inside one long operation. It has MAX_MEMORY_BYTES of memory, and a text may have MAX_RENDERED_CHARS. So
nothing that a template does costs more than that, and nothing of it is left.

A call blocks until the process answers. So no event loop may render (``Unrendered``); the service does it in the
processes that read bodies.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from radixkv.errors import ConfigError

RENDER_S = 2.0
"""CPU time in which a template is compiled, or a conversation rendered."""
MAX_RENDERED_CHARS: Final = 16 * 2**20
MAX_MEMORY_BYTES: Final = 2**30
_SIZE: Final = struct.Struct("<Q")
_CODE: Final = "from radixkv.tokenizer.templates import serve; serve()"


class Refused(Exception):
    """The template refuses the conversation, with this message."""


class Failed(Exception):
    """The template can't render the conversation: it has an error, or expects other values."""


class TooLong(Exception):
    """The template took too much time, memory or text."""


@dataclass(frozen=True, slots=True)
class Template:
    """A model's chat template, or several by name (``default``, ``tool_use``), and the special tokens for it."""

    source: str | Mapping[str, str]
    variables: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Strings:
    """The strings in a template: those that it may write, and those that it looks for in its values."""

    written: Sequence[str]
    searched: Sequence[str]


@dataclass(frozen=True, slots=True)
class Guard:
    """What must not be taken for the template's when a caller typed it.

    - ``begins``: characters, one of each control string.
    - ``whole``: control strings that are looked for as a whole, and the position of their character that is marked.
    - ``searched``: strings that the template looks for in contents; ``replaced``: control strings in these.
    """

    begins: str
    whole: Mapping[str, int]
    searched: Sequence[str]
    replaced: Sequence[str]

    def concerns(self, value: Any) -> bool:
        """Whether a string in a JSON value could hold a control string, or a part of one."""
        if isinstance(value, str):
            return any(each in value for each in self.begins) or any(each in value for each in self.whole)
        if isinstance(value, Mapping):
            return any(self.concerns(each) for pair in value.items() for each in pair)
        return isinstance(value, list | tuple) and any(map(self.concerns, value))


NO_GUARD: Final = Guard("", {}, (), ())


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. ``typed``: positions at which a caller typed what may begin a control string; ordered."""

    text: str
    typed: Sequence[int]


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


def analysed(template: Template) -> Strings:
    """Compile a template and return its strings. Raises ConfigError if it isn't one, or takes too long."""
    try:
        answer = _process.ask({"do": "analyse", "template": template.source, "seconds": RENDER_S})
    except TooLong as error:
        raise ConfigError("tokenizer", "chat_template", f"a Jinja template: {error}") from None
    if "syntax" in answer:
        raise ConfigError("tokenizer", "chat_template", f"a Jinja template: {answer['syntax']}")
    if "written" not in answer:
        raise ConfigError("tokenizer", "chat_template", f"a Jinja template: {_too_long()}")
    return Strings(answer["written"], answer["searched"])


def render(
    template: Template,
    guard: Guard,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = False,
    now: str | None = None,
) -> Rendered:
    """Return what transformers makes of a conversation with an analysed template.

    now: the local time that ``strftime_now`` shows, in ISO 8601; by default the present. Raises Refused, Failed or
    TooLong. If a message holds a character of a control string, the conversation is rendered twice: about a millisecond
    for ten turns.
    """
    answer = _process.ask(
        {
            "do": "render",
            "template": template.source,
            "variables": template.variables,
            "guard": asdict(guard) if guard.concerns((messages, tools)) else None,
            "messages": messages,
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
            "now": now,
            "seconds": RENDER_S,
        }
    )
    if "refused" in answer:
        raise Refused(answer["refused"])
    if "failed" in answer:
        raise Failed(answer["failed"])
    if "text" not in answer:
        raise _too_long()
    return Rendered(answer["text"], answer["typed"])


def _environment() -> dict[str, str]:
    """Return the environment without radixkv's settings, because some are secrets; module paths are kept."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RADIXKV_")}
    kept["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
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
    """Answer questions on standard input until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal, for all its processes
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would load it, which takes seconds
    from radixkv.tokenizer import rendering

    rendering.prepare()
    while (question := _received(incoming)) is not None:
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
        try:
            do = rendering.render if question["do"] == "render" else rendering.analyse
            answer = do(question)
        except (MemoryError, RecursionError):
            answer = {}
        if len(answer.get("text", "")) > MAX_RENDERED_CHARS:
            answer = {}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(outgoing, answer)
