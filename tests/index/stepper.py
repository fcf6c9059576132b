"""Raise an exception at the k-th step of a call.

A step is a line, a call, a return, or the call or return of a C function, in code of ``radixkv`` and
``radixkv_policies`` that the call runs. With ``opcodes``, each bytecode instruction is a step too. ``sys.settrace`` and
``sys.setprofile`` report the steps. An exception that they raise comes out of the traced code at that place. Python
then switches both off, so code that handles the exception runs untouched.

Five places are left out, because no code could handle an exception there:

- The end of ``with lock``, after its body and before the lock is released. CPython delivers real signals only at
  calls, returns from C and backward jumps. There is none between the two.
- ``try:``, ``pass`` and the end of a block. They are NOPs and jumps, which cannot raise. CPython 3.11 covers them with
  no handler, not even with that of a surrounding ``with``.
- A finaliser: no caller receives what it raises.
- The return from the lock's own ``__enter__``: no signal is delivered there either.
- Code after the last release of the lock. The call is done then; the caller stores the result.
"""

from __future__ import annotations

import functools
import linecache
import opcode
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import radixkv
import radixkv_policies
from radixkv.index.locking import SourceLock

_OURS = tuple(f"{Path(package.__file__).parent}/" for package in (radixkv, radixkv_policies))
_NOPS = (opcode.opmap["NOP"], opcode.opmap["JUMP_FORWARD"])
_WITH_LOCK = re.compile(r"with \S*\b_lock(, Mending\(\w+\))?:")
_NOT_THE_CACHE = f"{_OURS[0]}audit/"


class Interrupted(BaseException):
    """The exception that is raised. Only the test catches it."""


@functools.cache
def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS) and not filename.startswith(_NOT_THE_CACHE)


@functools.cache
def _text(filename: str, line: int) -> str:
    return linecache.getline(filename, line).strip()


def _enters_the_lock(frame: FrameType) -> bool:
    return frame.f_code is SourceLock.__enter__.__code__


class Stepper:
    """Runs a call and raises ``Interrupted`` at step ``stop``, counted from 1. ``where`` describes that step."""

    def __init__(self, cache: Any, stop: int, *, opcodes: bool = False) -> None:
        self._lock, self._stop, self._opcodes = cache._lock, stop, opcodes
        self.num_steps = 0
        self.where = ""

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a call. Return its result if it has fewer than ``stop`` steps."""
        outer = sys.gettrace()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.setprofile(None)
            sys.settrace(outer)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not _is_ours(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = self._opcodes
        self._step(frame, event)
        return self._local

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        is_nop = event == "opcode" and frame.f_code.co_code[frame.f_lasti] in _NOPS
        if event == "line" or (event in ("return", "opcode") and self._lock.locked() and not is_nop):
            self._step(frame, event)
        return self._local

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        is_c = event in ("c_call", "c_return")
        if is_c and self._lock.locked() and _is_ours(frame.f_code.co_filename):
            self._step(frame, f"{event} {arg.__name__}")

    def _step(self, frame: FrameType, event: str) -> None:
        filename, line = frame.f_code.co_filename, frame.f_lineno
        if frame.f_code.co_name == "__del__" or (event in ("return", "opcode") and _enters_the_lock(frame)):
            return
        if line is None:  # an instruction without a source line
            return
        text = _text(filename, line)
        if text in ("try:", "pass") or (_WITH_LOCK.fullmatch(text) and self._lock.locked()):
            return
        self.num_steps += 1
        if self.num_steps == self._stop:
            self.where = f"{event} at {filename}:{line} {text}"
            raise Interrupted(self.where)
