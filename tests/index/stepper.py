"""Raise an exception at the k-th step of a call, or at the k-th call that the cache makes to code of others.

A step is a line, a return, or the return of a C function, in code of ``radixkv`` and ``radixkv_policies`` that the
call runs. Between a call and the step before it nothing changes, nor in a C function of IDLE, so these are steps only
if ``INTERRUPT_ALL`` is set. ``sys.settrace`` and ``sys.setprofile`` report the steps. An exception that they raise
comes out of the traced code at that place. Python then switches both off, so code that handles the exception runs
untouched.

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
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import radixkv
import radixkv_policies
from radixkv import NamespaceError
from radixkv.index.locking import SourceLock

ALL = os.environ.get("INTERRUPT_ALL") == "1"
"""Interrupt each call at each of its steps. By default, see ``test_recovery.stops``."""
NEVER = sys.maxsize
"""A step that no call reaches."""
IDLE = re.compile(
    "all|any|argmax|endswith|flatnonzero|frombuffer|get|getattr|hasattr|isinstance|items|iter|join|keys|len|max|min|"
    "sorted|startswith|sum|tobytes|tolist|values"
)
"""C functions that change nothing."""
_OURS = tuple(f"{Path(package.__file__).parent}/" for package in (radixkv, radixkv_policies))
_WITH_LOCK = re.compile(r"with \S*\b_lock(, Mending\(\w+\))?:")
_NOT_THE_CACHE = f"{_OURS[0]}audit/"


class Interrupted(BaseException):
    """The exception that is raised. Only the test catches it."""


ERRORS = tuple(
    type(f"Raised{kind.__name__}", (Interrupted, kind), {})
    for kind in (KeyboardInterrupt, MemoryError, SystemExit, RuntimeError, NamespaceError)
)
"""Exceptions that are raised in its place. The cache raises the last one too, when it refuses a call."""

_SKIPPED, _STEP, _STEP_WITHOUT_LOCK, _STEP_AT_LINES = range(4)
_LOCKS = SourceLock.__enter__.__code__
_LOCKS_AT = (_LOCKS.co_filename, frozenset(line for _, _, line in _LOCKS.co_lines()))


class _Lines(dict[int | None, int]):
    """Whether each line of a function is a step: never, always, while the lock is free, or unless it is left."""

    def __init__(self, code: CodeType) -> None:
        self._filename, self._name = code.co_filename, code.co_name

    def __missing__(self, line: int | None) -> int:
        text = "" if line is None else linecache.getline(self._filename, line).strip()
        if line is None or self._name == "__del__" or text in ("try:", "pass"):
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


class Place(NamedTuple):
    """Where a step is, and what it is."""

    code: CodeType
    line: int
    event: str
    function: str | None


class Stepper:
    """Runs a call and raises ``error`` at step ``stop``, counted from 1. ``where`` describes that step.

    With NEVER it lists the ``places`` of all steps.
    """

    def __init__(self, cache: Any, stop: int, error: type[Interrupted] = Interrupted) -> None:
        self._is_locked, self._stop, self._error = cache._lock.locked, stop, error
        self.num_steps, self.where = 0, ""
        self.places: list[Place] = []

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
        if ALL:
            self._step(lines, frame, event)
        return self._local

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" or (event == "return" and self._is_locked()):
            lines = _FUNCTIONS[frame.f_code]
            assert lines is not None
            self._step(lines, frame, event)
        return self._local

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if (event == "c_return" and (ALL or not IDLE.fullmatch(arg.__name__))) or (ALL and event == "c_call"):
            lines = _FUNCTIONS[frame.f_code]
            if lines is not None and self._is_locked():
                self._step(lines, frame, event, arg.__name__)

    def _step(self, lines: _Lines, frame: FrameType, event: str, function: str | None = None) -> None:
        kind = lines[frame.f_lineno]
        if kind != _STEP and (
            kind == _SKIPPED
            or (kind == _STEP_WITHOUT_LOCK and self._is_locked())
            or (kind == _STEP_AT_LINES and event == "return")
        ):
            return
        self.num_steps += 1
        if self._stop == NEVER:
            self.places.append(Place(frame.f_code, frame.f_lineno, event, function))
        elif self.num_steps == self._stop:
            filename, line = frame.f_code.co_filename, frame.f_lineno
            text = linecache.getline(filename, line).strip()
            self.where = f"{event} {function or ''} at {filename}:{line} {text}"
            raise self._error(self.where)


class Callbacks:
    """Calls that a cache makes to code of others: its journal, clock, policy, and what zeroes and copies blocks.

    In a run, the k-th of them raises ``error``: before it did its work, or afterwards. It works in both builds.
    """

    def __init__(self) -> None:
        self.stop, self.error, self.num_steps, self.where = 0, Interrupted, 0, ""

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, unless it is interrupted."""

        def call(*args: Any, **named: Any) -> Any:
            self._step(function)
            result = function(*args, **named)
            self._step(function)
            return result

        return call

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a call. Return its result if it makes fewer than ``stop`` ÷ 2 calls, or if somebody handles the error."""
        self.num_steps, self.where = 0, ""
        try:
            return call()
        finally:
            self.stop = 0

    def _step(self, function: Callable[..., Any]) -> None:
        self.num_steps += 1
        if self.num_steps == self.stop:
            self.where = f"{self.num_steps} {function}"
            raise self.error(self.where)
