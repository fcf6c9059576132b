"""Raise an exception at the k-th step of a call.

A step is a line, a return, or the return of a C function, in code of ``radixkv`` and ``radixkv_policies`` that the
call runs. Between a call and the step before it nothing changes, so calls are steps only if ``INTERRUPT_ALL`` is set.
With ``opcodes``, each bytecode instruction is a step too. ``sys.settrace`` and
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

import gc
import linecache
import opcode
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import radixkv
import radixkv_policies
from radixkv.index.locking import SourceLock

ALL = os.environ.get("INTERRUPT_ALL") == "1"
"""Interrupt each call at each of its steps. By default, see ``test_recovery.Plan``."""
NEVER = sys.maxsize
"""A step that no call reaches."""
_OURS = tuple(f"{Path(package.__file__).parent}/" for package in (radixkv, radixkv_policies))
_NOPS = (opcode.opmap["NOP"], opcode.opmap["JUMP_FORWARD"])
_WITH_LOCK = re.compile(r"with \S*\b_lock(, Mending\(\w+\))?:")
_NOT_THE_CACHE = f"{_OURS[0]}audit/"


class Interrupted(BaseException):
    """The exception that is raised. Only the test catches it."""


_SKIPPED, _STEP, _STEP_WITHOUT_LOCK, _STEP_AT_LINES = range(4)
_LOCKS = SourceLock.__enter__.__code__
_LOCKS_AT = (_LOCKS.co_filename, frozenset(line for _, _, line in _LOCKS.co_lines()))


class _Lines(dict[int | None, int]):
    """Whether each line of a function is a step: never, always, while the lock is free, or unless it is left."""

    def __init__(self, code: CodeType) -> None:
        self._filename, self._name = code.co_filename, code.co_name

    def __missing__(self, line: int | None) -> int:
        text = "" if line is None else linecache.getline(self._filename, line).strip()
        if (
            line is None or self._name == "__del__" or text in ("try:", "pass")
        ):  # an instruction may have no line
            kind = _SKIPPED
        elif _WITH_LOCK.fullmatch(text):
            kind = _STEP_WITHOUT_LOCK
        else:
            kind = _STEP_AT_LINES if self._filename == _LOCKS_AT[0] and line in _LOCKS_AT[1] else _STEP
        self[line] = kind
        return kind


class _Functions(dict[CodeType, _Lines | None]):
    """The lines of each function of ours; None for others."""

    def __missing__(self, code: CodeType) -> _Lines | None:
        filename = code.co_filename
        is_ours = filename.startswith(_OURS) and not filename.startswith(_NOT_THE_CACHE)
        self[code] = lines = _Lines(code) if is_ours else None
        return lines


_FUNCTIONS = _Functions()


class Stepper:
    """Runs a call and raises ``Interrupted`` at step ``stop``, counted from 1. ``where`` describes that step."""

    def __init__(self, cache: Any, stop: int, *, opcodes: bool = False) -> None:
        self._is_locked, self._stop, self._opcodes = cache._lock.locked, stop, opcodes
        self.num_steps = 0
        self.where = ""

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a call. Return its result if it has fewer than ``stop`` steps.

        The collector is off meanwhile: finalisers of other caches would make steps too.
        """
        outer, collects = sys.gettrace(), gc.isenabled()
        gc.disable()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.setprofile(None)
            sys.settrace(outer)
            if collects:
                gc.enable()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines = _FUNCTIONS[frame.f_code]
        if lines is None:
            return None
        frame.f_trace_opcodes = self._opcodes
        if ALL:
            self._step(lines, frame, event)
        return self._local

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line":
            if event not in ("return", "opcode") or not self._is_locked():
                return self._local
            if event == "opcode" and frame.f_code.co_code[frame.f_lasti] in _NOPS:
                return self._local
        lines = _FUNCTIONS[frame.f_code]
        assert lines is not None
        self._step(lines, frame, event)
        return self._local

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_return" or (ALL and event == "c_call"):
            lines = _FUNCTIONS[frame.f_code]
            if lines is not None and self._is_locked():
                self._step(lines, frame, event, arg)

    def _step(self, lines: _Lines, frame: FrameType, event: str, function: Any = None) -> None:
        kind = lines[frame.f_lineno]
        if kind != _STEP and (
            kind == _SKIPPED
            or (kind == _STEP_WITHOUT_LOCK and self._is_locked())
            or (kind == _STEP_AT_LINES and event in ("return", "opcode"))
        ):
            return
        self.num_steps += 1
        self.reached(frame, event, function)
        if self.num_steps == self._stop:
            filename, line = frame.f_code.co_filename, frame.f_lineno
            called = "" if function is None else f" {function.__name__}"
            text = linecache.getline(filename, line).strip()
            self.where = f"{event}{called} at {filename}:{line} {text}"
            raise Interrupted(self.where)

    def reached(self, frame: FrameType, event: str, function: Any) -> None:
        """Called at each step."""


class Place(NamedTuple):
    """Where a step is: its line, the line of ours that called its function, and what the step is."""

    line: tuple[CodeType, int]
    caller: tuple[CodeType, int] | None
    event: str
    function: str | None


class Survey(Stepper):
    """Lists the places of the steps of a call, and interrupts nothing."""

    def __init__(self, cache: Any, *, opcodes: bool = False) -> None:
        super().__init__(cache, NEVER, opcodes=opcodes)
        self.places: list[Place] = []

    def reached(self, frame: FrameType, event: str, function: Any) -> None:
        """Note the place."""
        back, caller = frame.f_back, None
        if back is not None and back.f_code.co_filename.startswith(_OURS):
            caller = (back.f_code, back.f_lineno)
        name = None if function is None else function.__name__
        self.places.append(Place((frame.f_code, frame.f_lineno), caller, event, name))
