"""Prompts whose requests will come: what the disk has of them comes into host memory before anybody waits for it.

    announce          add      remembers the prompt, until its announcement ends
    route             ask      remembers it for seconds: somebody asked where to send it
    expected_gap_s    ask      the same, once most of the expected pause is over (``later_prompts``)
    the disk's thread go_on    one prompt at a time: disk → staging rows of its own → slot

Tenants take turns, after each part of a long prompt. Of one tenant, announced prompts go first, because their requests
wait. Asked ones follow, the newest first: the request of an older one has probably come.

Nothing here holds up a request: the rows are not those of requests, and the reads go behind all that somebody waits
for. A promotion like any other does the work (``disk.promotions``), so what comes is proven, counts as the tenant's,
and a purge stops it.

Anybody who may send a tenant's requests may ask, and send nothing. So beyond its tenant's guarantee an asked prompt
takes no host memory from other tenants, and a tenant's flood replaces its own prompts alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from radixkv.config import Namespace
from radixkv.forks import OwnLock

if TYPE_CHECKING:
    from radixkv.index.below import Expected
    from radixkv.tiers.disk.promotions import DiskPromotions

AHEAD_ROWS: Final = 16
"""Rows of staging memory for it, so blocks that come at once; at most a quarter of the slots, at least one."""
MAX_PROMPTS: Final = 256
"""Announced prompts of a tenant that may wait. More are not brought."""
MAX_ASKED: Final = 4
"""Asked prompts of a tenant that may wait. A newer one replaces the oldest."""
ASKED_S: Final = 5.0
"""The time after which an asked prompt isn't brought any further."""
MAX_TENANTS: Final = 1_024
MAX_ARRIVED: Final = 4_096
"""Announced prompts of all tenants that may come between two calls of ``go_on``. The longest lines lose the rest."""
_AT_ONCE: Final = 8
"""Prompts that are looked at in one call, each for a hash of its key."""


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


class _LaterLine:
    """The prompts of one tenant by their numbers, the oldest first."""

    __slots__ = ("num_bytes", "prompts")

    def __init__(self) -> None:
        self.prompts: dict[int, Asked] = {}
        self.num_bytes = 0


class LaterPrompts:
    """Prompts that come back at a time that somebody named: an agent pauses, and says for how long.

    They wait here for that time, with their ids, 4 bytes a token. So each tenant has a bounded number of them, and all
    together have a bounded number of bytes. A newer one replaces its tenant's oldest. If the bytes are too many, the
    tenant with the most loses its oldest. A purge or a clear drops a tenant's at once.

    Prompts by the time at which they are taken. Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = OwnLock()
        self._lines: dict[str, _LaterLine] = {}
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
            line = self._lines.setdefault(tenant, _LaterLine())
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


class Asked:
    """A prompt of which somebody asked where to send it: see ``below.Expected``."""

    __slots__ = ("_is_open", "_resident_tokens", "key", "namespace")

    def __init__(
        self,
        namespace: Namespace,
        key: bytes,
        is_open: Callable[[], bool],
        resident_tokens: Callable[[], int],
    ) -> None:
        self.namespace, self.key = namespace, key
        self._is_open, self._resident_tokens = is_open, resident_tokens

    @property
    def is_open(self) -> bool:
        """See ``Expected``."""
        return self._is_open()

    @property
    def resident_tokens(self) -> int:
        """See ``Expected``. O(nodes on the path), with the cache's lock."""
        return self._resident_tokens()


class _Prompt(NamedTuple):
    request_id: str
    expected: Expected
    is_asked: bool = False


class _Line:
    """The prompts of one tenant that wait."""

    __slots__ = ("_announced", "_asked")

    def __init__(self) -> None:
        self._announced: deque[_Prompt] = deque()
        self._asked: deque[_Prompt] = deque(maxlen=MAX_ASKED)

    def __len__(self) -> int:
        return len(self._announced) + len(self._asked)

    def add(self, prompt: _Prompt) -> None:
        """Add one that has come, if there is room; an asked one may replace the oldest."""
        if prompt.is_asked:
            self._asked.append(prompt)
        elif len(self._announced) < MAX_PROMPTS:
            self._announced.append(prompt)

    def take(self) -> _Prompt:
        """Take the next one."""
        return self._announced.popleft() if self._announced else self._asked.pop()

    def give_back(self, prompt: _Prompt) -> None:
        """Take one back of which a part has come. Newer asked ones go before it, and may replace it."""
        if not prompt.is_asked:
            self._announced.appendleft(prompt)
        elif len(self._asked) < MAX_ASKED:
            self._asked.appendleft(prompt)


class Prefetch:
    """Brings what ``promotions`` have of prompts for which ``keeps`` is true.

    ``generation``: of a tenant, in host memory. ``is_there``: whether host memory has a key behind its first so many
    tokens; ``is_loading``: whether a request loads it from there on. ``wake``: is called when a prompt has come.
    """

    def __init__(
        self,
        promotions: DiskPromotions,
        keeps: Callable[[Namespace], bool],
        generation: Callable[[str], int],
        is_there: Callable[[Namespace, bytes, int], bool],
        is_loading: Callable[[Namespace, bytes, int], bool],
        wake: Callable[[], None],
    ) -> None:
        self._promotions, self._keeps, self._generation = promotions, keeps, generation
        self._is_there, self._is_loading = is_there, is_loading
        self._numbers = count(1)
        self._arrived: dict[str, deque[_Prompt]] = {}
        """Those that were announced since the last ``go_on``, by tenant."""
        self._num_arrived = 0
        self._asked: dict[str, deque[_Prompt]] = {}
        """Those that were asked since then, by tenant."""
        self._arriving = OwnLock()
        self._waiting: dict[str, _Line] = {}
        """By tenant, whose turn it is first."""
        self._running: _Prompt | None = None
        self._has_begun = False
        """Whether a part of the running one is on its way."""
        self._wake = wake

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do."""
        return self._running is not None or bool(self._arrived or self._asked or self._waiting)

    def add(self, expected: Expected) -> None:
        """Remember an announced prompt, unless its tenant has too many. By any thread.

        O(1); O(tenants) if too many of all tenants have come.
        """
        with self._arriving:
            self._arrive(expected.namespace.tenant, self._prompt(expected))
        self._wake()

    def _arrive(self, tenant: str, prompt: _Prompt) -> None:
        arrived = self._arrived.get(tenant)
        if arrived is None and len(self._arrived) >= MAX_TENANTS:
            return
        if self._num_arrived >= MAX_ARRIVED:
            most = max(self._arrived.values(), key=len)
            if len(most) <= len(arrived or ()) + 1:
                return
            most.pop()
            self._num_arrived -= 1
        if arrived is None:
            arrived = self._arrived[tenant] = deque()
        if len(arrived) < MAX_PROMPTS:
            arrived.append(prompt)
            self._num_arrived += 1

    def ask(self, expected: Expected) -> None:
        """Remember an asked prompt, in place of its tenant's oldest if there are too many. O(1), by any thread."""
        tenant, prompt = expected.namespace.tenant, self._prompt(expected, is_asked=True)
        with self._arriving:
            asked = self._asked.get(tenant)
            if asked is None:
                if len(self._asked) >= MAX_TENANTS:
                    return
                asked = self._asked[tenant] = deque(maxlen=MAX_ASKED)
            asked.append(prompt)
        self._wake()

    def go_on(self) -> None:
        """Take what came, and begin more. Within the gate. Never waits."""
        self._take_new()
        for _ in range(_AT_ONCE):
            self._has_begun &= self._running is not None
            running = self._running or self._next()
            if running is None:
                return
            is_coming, self._running = False, None
            try:
                is_coming = self._is_coming(running)
            finally:
                if not is_coming:  # after an error too: it isn't tried again
                    self._promotions.forget(running.request_id)
            if is_coming:
                self._running = running
                return

    def _prompt(self, expected: Expected, *, is_asked: bool = False) -> _Prompt:
        return _Prompt(f"ahead-{next(self._numbers)}", expected, is_asked)

    def _take_new(self) -> None:
        """Let what came wait in its tenant's line."""
        with self._arriving:
            asked, self._asked = self._asked, {}
            arrived, self._arrived, self._num_arrived = self._arrived, {}, 0
        lines = (*asked.values(), *arrived.values())
        for prompt in (prompt for prompts in lines for prompt in prompts):
            tenant = prompt.expected.namespace.tenant
            if tenant in self._waiting or len(self._waiting) < MAX_TENANTS:
                self._waiting.setdefault(tenant, _Line()).add(prompt)

    def _next(self) -> _Prompt | None:
        """Take the next tenant's first prompt."""
        if not self._waiting:
            return None
        tenant = next(iter(self._waiting))
        line = self._waiting.pop(tenant)
        prompt = line.take()
        if line:
            self._waiting[tenant] = line
        return prompt

    def _is_coming(self, prompt: _Prompt) -> bool:
        """Whether the disk brings some of a prompt now.

        After a part it is the next one's turn. So while another one waits, the promotions get an empty key: they end
        the part that is on its way, and begin no further one.
        """
        expected, namespace, key = prompt.expected, prompt.expected.namespace, prompt.expected.key
        if not key or not expected.is_open or not self._keeps(namespace):  # its end drops the key
            return False
        promotions, num_resident = self._promotions, expected.resident_tokens
        if prompt.is_asked and self._is_loading(namespace, key, num_resident):
            return False
        gives_way, num_running = self._has_begun and self._must_yield(prompt), promotions.num_running
        is_coming = promotions.is_waiting(
            prompt.request_id,
            namespace,
            self._generation(namespace.tenant),
            b"" if gives_way else key,
            num_resident,
            need="asked" if prompt.is_asked else "announced",
        )
        self._has_begun = promotions.num_running >= num_running + (0 if self._has_begun else 1)
        has_part = promotions.take_brought(prompt.request_id) > 0
        if gives_way and has_part and not is_coming and not self._is_there(namespace, key, num_resident):
            self._waiting.setdefault(namespace.tenant, _Line()).give_back(prompt)
        return is_coming

    def _must_yield(self, prompt: _Prompt) -> bool:
        """Whether another prompt goes before the next part of this one."""
        tenant = prompt.expected.namespace.tenant
        return any(each != tenant for each in self._waiting) or (prompt.is_asked and tenant in self._waiting)
