"""A thread that repeats one step, sleeps as long as the step says, can be woken, and can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Loop:
    """Runs ``step()`` repeatedly; it returns the seconds to sleep, or None to sleep until woken.

    A step that raises ends the loop: ``failure`` holds the error, and ``threading.excepthook`` reports it. Steps handle
    the errors that they expect. Any other error is a bug in radixkv, and the health shows it.
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
        """Whether the loop was told to stop."""
        return self._stopping

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Run the next step now. O(1), from any thread."""
        if not self._woken.is_set():
            self._woken.set()

    def stop(self) -> None:
        """Stop the loop and wait for its thread, and for a step that blocks. Idempotent."""
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
