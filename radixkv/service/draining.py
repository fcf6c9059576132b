"""How requests end when the process does.

begin ──▶ new requests of clients get 503, requests in progress continue ──▶ end ──▶ requests in progress get 503
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Drain:
    """Requests that a process is answering. To be used from the event loop's thread."""

    def __init__(self) -> None:
        self.is_stopping = False
        """Whether new requests of clients are refused."""
        self.is_over = False
        """Whether requests in progress were told to end."""
        self._tasks: set[asyncio.Task[object]] = set()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count the current task as a request in progress during the ``with``. Raises Ended when ``end`` ends it."""
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
        """End all requests in progress."""
        self.is_stopping = self.is_over = True
        for task in self._tasks:
            task.cancel()


class Ended(Exception):
    """The process ends, and so does the request."""
