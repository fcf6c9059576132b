"""How tests wait: for an event, under one limit that is far above what a busy machine needs.

A test never asserts that something took less than a number of seconds. It waits for what must happen, and the limit
only turns a hang into a failure that says what was waited for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Found = TypeVar("Found")

LIMIT_S = 300.0
"""How long any wait of a test may take, in seconds. Give it also to ``join``, ``wait``, ``result`` and sockets."""
_POLL_S = 0.01
_MOST_POLL_S = 0.1
"""A long wait asks less and less often: what it asks may cost more than what it waits for."""


def eventually(condition: Callable[[], Found], what: str = "the condition") -> Found:
    """Call ``condition`` every 10 ms, later every 100, until its value is true, and return that value.

    Raises AssertionError that names ``what`` after LIMIT_S.
    """
    until, pause_s = time.monotonic() + LIMIT_S, _POLL_S
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} never came true"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, _MOST_POLL_S)
    return found


async def eventually_async(condition: Callable[[], Found], what: str = "the condition") -> Found:
    """Do the same on an event loop, which goes on meanwhile."""
    until = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} never came true"
        await asyncio.sleep(_POLL_S)
    return found


def ended(thread: threading.Thread) -> None:
    """Wait until a thread has ended. Raises AssertionError with its name after LIMIT_S."""
    thread.join(LIMIT_S)
    assert not thread.is_alive(), f"thread {thread.name} never ended"


def is_set(event: threading.Event, what: str = "the event") -> None:
    """Wait until an event is set. Raises AssertionError that names ``what`` after LIMIT_S."""
    assert event.wait(LIMIT_S), f"{what} never happened"


async def finished(work: Awaitable[Found]) -> Found:
    """Await ``work`` and return its result. Raises TimeoutError after LIMIT_S."""
    return await asyncio.wait_for(work, LIMIT_S)
