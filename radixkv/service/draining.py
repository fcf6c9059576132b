"""How requests end when the process does.

begin ──▶ new requests are 503, those under way go on ──▶ end ──▶ those under way are answered 503
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Drain:
    """Requests of a process that are being answered. To be used from the event loop's thread."""

    def __init__(self) -> None:
        self.is_stopping = False
        """No new requests are taken."""
        self.is_over = False
        """Those under way are told to end."""
        self._tasks: set[asyncio.Task[object]] = set()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The current task answers a request as long as the ``with`` lasts. Raises Ended when ``end`` ends it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_over:
                raise
            task.uncancel()
            raise Ended from None
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """End all requests under way."""
        self.is_stopping = self.is_over = True
        for task in self._tasks:
            task.cancel()


class Ended(Exception):
    """The process ends, and the request with it."""
