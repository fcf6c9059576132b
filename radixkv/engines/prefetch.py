"""Announced prompts: what the disk has of them comes into host memory before anybody waits for it.

    announce          add      remembers the prompt, until its announcement ends
    the disk's thread go_on    one prompt at a time: disk → staging rows of its own → slot

Tenants take turns, after each part of a long prompt. Nothing here holds up a request: the rows are not those of
requests, and the reads go behind all that somebody waits for. A promotion like any other does the work
(``disk_level``), so what comes is proven, counts as the tenant's, and a purge stops it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from radixkv.config import Namespace

if TYPE_CHECKING:
    from radixkv.engines.disk_level import DiskLevel
    from radixkv.index.below import Expected

AHEAD_ROWS: Final = 16
"""Rows of staging memory for it, so blocks that come at once; at most a quarter of the slots, at least one."""
MAX_PROMPTS: Final = 256
"""Prompts of a tenant that may wait. More are not brought."""
MAX_TENANTS: Final = 1_024
MAX_ARRIVED: Final = 4_096
_AT_ONCE: Final = 8
"""Prompts that are looked at in one call, each for a hash of its key."""


class _Prompt(NamedTuple):
    request_id: str
    expected: Expected


class Prefetch:
    """Brings what ``disk`` has of prompts for which ``keeps`` is true. ``generation``: of a tenant, in host memory."""

    def __init__(
        self, disk: DiskLevel, keeps: Callable[[Namespace], bool], generation: Callable[[str], int]
    ) -> None:
        self._disk, self._keeps, self._generation = disk, keeps, generation
        self._numbers = count(1)
        self._arrived: deque[_Prompt] = deque(maxlen=MAX_ARRIVED)
        self._waiting: dict[str, deque[_Prompt]] = {}
        """By tenant, whose turn it is first."""
        self._running: _Prompt | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do."""
        return self._running is not None or bool(self._arrived) or bool(self._waiting)

    def add(self, expected: Expected) -> None:
        """Remember a prompt. O(1), by any thread."""
        self._arrived.append(_Prompt(f"ahead-{next(self._numbers)}", expected))

    def go_on(self) -> None:
        """Take what came, and begin more. Within the gate. Never waits."""
        while self._arrived:
            prompt = self._arrived.popleft()
            tenant = prompt.expected.namespace.tenant
            if tenant in self._waiting or len(self._waiting) < MAX_TENANTS:
                waiting = self._waiting.setdefault(tenant, deque())
                if len(waiting) < MAX_PROMPTS:
                    waiting.append(prompt)
        for _ in range(_AT_ONCE):
            running = self._running or self._next()
            if running is None:
                return
            is_coming, self._running = False, None
            try:
                is_coming = self._is_coming(running)
            finally:
                if not is_coming:  # after an error too: it isn't tried again
                    self._disk.forget(running.request_id)
            if is_coming:
                self._running = running
                return

    def _next(self) -> _Prompt | None:
        """Take the next tenant's first prompt."""
        if not self._waiting:
            return None
        tenant = next(iter(self._waiting))
        waiting = self._waiting.pop(tenant)
        prompt = waiting.popleft()
        if waiting:
            self._waiting[tenant] = waiting
        return prompt

    def _is_coming(self, prompt: _Prompt) -> bool:
        """Whether the disk brings some of a prompt now. After a part it is the next tenant's turn."""
        expected, namespace, key = prompt.expected, prompt.expected.namespace, prompt.expected.key
        if not key or not expected.is_open or not self._keeps(namespace):  # its end drops the key
            return False
        is_coming = self._disk.is_waiting(
            prompt.request_id,
            namespace,
            self._generation(namespace.tenant),
            key,
            expected.resident_tokens,
            is_ahead=True,
        )
        has_part = self._disk.take_brought(prompt.request_id) > 0
        if is_coming and has_part and any(tenant != namespace.tenant for tenant in self._waiting):
            self._waiting.setdefault(namespace.tenant, deque()).appendleft(prompt)
            return False
        return is_coming
