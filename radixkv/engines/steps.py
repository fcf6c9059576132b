"""Calls of an engine in steps, so that one thread can have many of them under way.

    steps ──next──▶ computes until it has to wait ──yields──▶ None, or a function that says when it can go on

``Steps`` is a generator that returns the call's result. Whoever runs it may do other things whenever it yields, and
goes on with it later. It can be resumed before its function is true: then it looks, and yields again. Closing it ends
the call.

An engine makes such steps itself (``protocol.Stepping``), or its calls get a thread each, which runs only while its
steps are resumed (``in_thread``). So at any time one thread computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
R = TypeVar("R")

Wait: TypeAlias = Callable[[], bool]
"""Whether steps can go on. Called often, so it has to be quick."""
Steps: TypeAlias = Generator[Wait | None, None, T]


class Pause(Protocol):
    """Lets others go on, in the middle of a synchronous call."""

    def __call__(self, wait: Wait | None = None, /) -> None:
        """Return after the others had their turn. ``wait``: when there is something to do; it may return sooner."""


def run(steps: Steps[T], pause: Pause) -> T:
    """Make steps to their end in the calling thread. ``pause`` is called whenever they have to wait."""
    try:
        while True:
            try:
                wait = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            pause(wait)
    finally:
        steps.close()


def in_thread(call: Callable[[Pause], T]) -> Steps[T]:
    """Run a synchronous call as steps: it has a thread of its own, which runs only while the steps are resumed."""
    return _Call(call).steps()


class Left(Exception):
    """Raised in a call whose steps were closed."""


class _Call(Generic[T]):
    """A synchronous call, and the thread that runs it."""

    def __init__(self, call: Callable[[Pause], T]) -> None:
        self._call = call
        self._wait: Wait | None = None
        self._goes_on, self._is_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = self._is_left = False
        self._result: list[T] = []
        self._error: BaseException | None = None

    def steps(self) -> Steps[T]:
        thread = threading.Thread(target=self._run, name="radixkv-call", daemon=True)
        thread.start()
        try:
            while True:
                self._goes_on.release()
                self._is_paused.acquire()
                if self._is_over:
                    break
                yield self._wait
        finally:
            if not self._is_over:
                self._is_left = True
                self._goes_on.release()
            thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        self._goes_on.acquire()
        try:
            self._result.append(self._call(self._pause))
        except BaseException as error:  # noqa: BLE001 raised in the steps
            self._error = error
        self._is_over = True
        self._is_paused.release()

    def _pause(self, wait: Wait | None = None, /) -> None:
        """See ``Pause``. Raises Left if the steps were closed."""
        self._wait = wait
        if not self._is_left:
            self._is_paused.release()
            self._goes_on.acquire()
        if self._is_left:
            raise Left
