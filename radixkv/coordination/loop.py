"""A thread that repeats one step, sleeps as long as the step says, can be woken, and ends when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Loop:
    """Runs ``step()`` over and over; it returns the seconds to sleep, None for until woken.

    A step that raises ends the loop: ``failure`` holds the error, and ``threading.excepthook`` hears it.
    Steps handle what they expect; the rest is a bug of ours, and shows in the health.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self.failure: BaseException | None = None
        self._step = step
        self._name = name
        self._woken = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def is_stopping(self) -> bool:
        """The loop was told to end."""
        return self._stopping

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Let the next step come now. O(1), from any thread."""
        if not self._woken.is_set():
            self._woken.set()

    def stop(self) -> None:
        """End the loop and wait for its thread; a step that blocks is waited for. Idempotent."""
        self._stopping = True
        self._woken.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._woken.wait(self._step())
                self._woken.clear()
        except BaseException as failure:
            self.failure = failure
            raise
