"""Prompts that come back at a time that somebody named: an agent pauses, and says for how long.

They wait here for that time, with their ids, 4 bytes a token. So each tenant has a bounded number of them, and all
together have a bounded number of bytes. A newer one replaces its tenant's oldest. If the bytes are too many, the tenant
with the most loses its oldest. A purge or a clear drops a tenant's at once.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from radixkv.forks import OwnLock

if TYPE_CHECKING:
    from radixkv.tiers.prefetch import Asked

BEGUN_PART: Final = 0.75
"""The part of an expected pause after which its prompt comes."""
MAX_PAUSE_S: Final = 3_600.0
"""The longest pause after which a prompt comes ahead."""
MAX_LATER: Final = 256
"""Prompts of a tenant that may wait for their time."""
MAX_LATER_BYTES: Final = 64 << 20
"""Bytes of all of them: 16 million tokens, or 65,536 short prompts. Nor may a longer one wait."""
PROMPT_BYTES: Final = 1_024
"""What one of them takes besides its key, so that a flood of short ones is bounded too."""
MAX_AT_ONCE: Final = 256
"""Prompts that are taken at once; the others have their turn in the next tick."""


class _Line:
    """The prompts of one tenant by their numbers, the oldest first."""

    __slots__ = ("num_bytes", "prompts")

    def __init__(self) -> None:
        self.prompts: dict[int, Asked] = {}
        self.num_bytes = 0


class LaterPrompts:
    """Prompts by the time at which they are taken. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = OwnLock()
        self._lines: dict[str, _Line] = {}
        self._due: list[tuple[float, int, str]] = []
        """A heap of times, numbers and tenants; also of prompts that were dropped meanwhile."""
        self._numbers = count()
        self._num = self._num_bytes = 0

    def __len__(self) -> int:
        return self._num

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self._num_bytes

    def add(self, due_at: float, asked: Asked) -> None:
        """Let a prompt wait until ``due_at``, unless it has ended already.

        O(log(prompts)); O(tenants) too if there are too many bytes.
        """
        tenant, number, size = asked.namespace.tenant, next(self._numbers), _size(asked)
        if size > MAX_LATER_BYTES:
            return
        with self._lock:
            if not asked.is_open:  # what ends it comes before ``forget``
                return
            line = self._lines.setdefault(tenant, _Line())
            line.prompts[number] = asked
            line.num_bytes += size
            self._num, self._num_bytes = self._num + 1, self._num_bytes + size
            heappush(self._due, (due_at, number, tenant))
            if len(line.prompts) > MAX_LATER:
                self._drop_oldest(tenant)
            while self._num_bytes > MAX_LATER_BYTES:
                self._drop_oldest(max(self._lines, key=lambda each: self._lines[each].num_bytes))
            if len(self._due) > 2 * self._num + MAX_LATER:
                self._due = [each for each in self._due if self._waits(each[2], each[1])]
                heapify(self._due)

    def take_due(self, now: float) -> list[Asked]:
        """Take up to ``MAX_AT_ONCE`` whose time has come, the earliest first. O(log(prompts)) for each."""
        taken: list[Asked] = []
        with self._lock:
            while self._due and self._due[0][0] <= now and len(taken) < MAX_AT_ONCE:
                _, number, tenant = heappop(self._due)
                if self._waits(tenant, number):
                    taken.append(self._drop(tenant, number))
        return taken

    def forget(self, tenant: str) -> None:
        """Drop all of a tenant. O(its prompts)."""
        with self._lock:
            while tenant in self._lines:
                self._drop_oldest(tenant)

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._lines.clear()
            self._due.clear()
            self._num = self._num_bytes = 0

    def _waits(self, tenant: str, number: int) -> bool:
        return tenant in self._lines and number in self._lines[tenant].prompts

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._lines[tenant].prompts)))

    def _drop(self, tenant: str, number: int) -> Asked:
        line = self._lines[tenant]
        asked = line.prompts.pop(number)
        line.num_bytes -= _size(asked)
        self._num, self._num_bytes = self._num - 1, self._num_bytes - _size(asked)
        if not line.prompts:
            del self._lines[tenant]
        return asked


def _size(asked: Asked) -> int:
    return len(asked.key) + PROMPT_BYTES
