"""The waiting requests of vLLM's scheduler in the order of ``radixkv.scheduling``, in the place of vLLM's FCFS queue.

Requests whose prompts are mostly resident start first, with a bound on waiting, and tenants share prefill tokens by
their weights. Each waiting request is announced to the cache, so that eviction knows the queue. ``refresh``, once a
step, reads which announcements changed.

    RADIXKV_KAPPA   requests with resident prompts that may start between two others (8); 0: order of arrival

vLLM takes a request out of the queue to start it, or to pass it over in this step. It puts those back at the step's end
(``prepend_requests``): their start is undone. With ``--scheduling-policy priority`` vLLM's own queue stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue

from radixkv import scheduling
from radixkv.engines.vllm.cache import VllmCache
from radixkv.errors import ConfigError
from radixkv.index.announcements import Announcement
from radixkv.scheduling import KAPPA, WaitingRequest

KAPPA_VARIABLE: Final = "RADIXKV_KAPPA"
_MOST_KAPPA: Final = 1_000_000
_TTL_S: Final = 86_400.0


def kappa_of(environment: Mapping[str, str]) -> int:
    """Return κ as it is set. Raises ConfigError."""
    text = environment.get(KAPPA_VARIABLE, str(KAPPA))
    if not text.isdecimal() or not text.isascii() or len(text) > 7 or int(text) > _MOST_KAPPA:
        raise ConfigError(KAPPA_VARIABLE, text, f"an integer from 0 to {_MOST_KAPPA:,}")
    return int(text)


class RadixQueue(RequestQueue):
    """vLLM's queue of waiting requests over a ``scheduling.RequestQueue``. Calls take O(log requests), amortised."""

    def __init__(self, manager: Any, kappa: int) -> None:
        """``manager``: the RadixManager that the requests' blocks come from."""
        self._manager = manager
        self._cache: VllmCache = manager.radixkv
        self._queue = scheduling.RequestQueue(kappa=kappa)
        self._handles: WeakKeyDictionary[Any, WaitingRequest] = WeakKeyDictionary()
        self._announced: dict[WaitingRequest, Announcement] = {}
        self._changed: dict[Announcement, WaitingRequest] = {}
        self._started: list[WaitingRequest] = []
        self._next: WaitingRequest | None = None

    def refresh(self) -> None:
        """Begin a step: end the announcements of what started in the last one, and read which others changed."""
        for handle in self._started:
            if handle.state == "started":
                self._withdraw(handle)
                handle.item = None  # so that nothing here keeps the request
        self._started.clear()
        for announcement in self._cache.cache.changed_announcements():
            waiting = self._changed.get(announcement)
            if waiting is not None and waiting.state == "waiting":
                self._queue.update(waiting, announcement.missing)
        self._next = None

    def add_request(self, request: Any) -> None:
        """Let a request wait."""
        tenant, tokens, announcement, missing = self._arrival(request)
        handle = self._queue.add(tenant, tokens=tokens, missing=missing, item=request)
        self._remember(handle, announcement)

    def prepend_request(self, request: Any) -> None:
        """Let a request that was preempted wait again, before those that never started."""
        handle = self._handles.get(request)
        if handle is None or handle.state != "started":
            self.add_request(request)
            return
        self._withdraw(handle)
        handle.item = request
        _, _, announcement, missing = self._arrival(request)
        self._queue.requeue(handle, missing)
        self._remember(handle, announcement)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Put back the requests that this step passed over."""
        for request in requests:
            handle = self._handles.get(request)
            if handle is None or handle.state != "started":
                self.add_request(request)
            else:
                self._queue.give_back(handle)
        self._next = None

    def peek_request(self) -> Any:
        """Return the request that starts next."""
        if self._next is None:
            self._next = self._queue.peek(0.0)
        if self._next is None:
            raise IndexError("peek from an empty queue")
        return self._next.item

    def pop_request(self) -> Any:
        """Take out the request that ``peek_request`` returns: it starts, or it is passed over."""
        request = self.peek_request()
        assert self._next is not None
        self._queue.start(self._next)
        self._started.append(self._next)
        self._next = None
        return request

    def remove_request(self, request: Any) -> None:
        """Let a request go. Raises ValueError if it doesn't wait here."""
        handle = self._handles.get(request)
        if handle is None or handle.state != "waiting":
            raise ValueError(f"request {request.request_id} does not wait")
        self._queue.remove(handle)
        self._withdraw(handle)
        handle.item = None
        self._next = None

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Let requests go, as far as they wait here."""
        for request in list(requests):
            handle = self._handles.get(request)
            if handle is not None and handle.state == "waiting":
                self.remove_request(request)

    def __bool__(self) -> bool:
        return len(self._queue) > 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the waiting requests in order of arrival. O(n log n)."""
        return (handle.item for handle in self._queue)

    def __getitem__(self, at: int) -> Any:
        """Return a waiting request by its place in order of arrival, as vLLM's own queue does. O(n log n)."""
        return list(self)[at]

    def _arrival(self, request: Any) -> tuple[str, int, Announcement | None, float]:
        """Return a request's tenant, tokens, announcement, and the share of its tokens that is not resident."""
        tenant, announcement, missing = self._manager.announce(request, _TTL_S)
        settings = self._cache.cache.tenant(tenant)
        self._queue.set_weight(tenant, 1.0 if settings is None else settings.weight)
        return tenant, max(request.num_tokens, 1), announcement, missing

    def _remember(self, handle: WaitingRequest, announcement: Announcement | None) -> None:
        self._handles[handle.item] = handle
        if announcement is not None:
            self._announced[handle] = announcement
            self._changed[announcement] = handle
        self._next = None

    def _withdraw(self, handle: WaitingRequest) -> None:
        announcement = self._announced.pop(handle, None)
        if announcement is not None:
            del self._changed[announcement]
            announcement.withdraw()


def take_place(scheduler: Any, environment: Mapping[str, str]) -> None:
    """Put a RadixQueue in the place of a scheduler's FCFS queue. Another queue stays. Raises ConfigError."""
    kappa = kappa_of(environment)
    if isinstance(scheduler.waiting, FCFSRequestQueue):
        scheduler.waiting = RadixQueue(scheduler.kv_cache_manager, kappa)


def refresh(scheduler: Any) -> None:
    """Begin a step of a scheduler, if its queue is a RadixQueue."""
    if isinstance(scheduler.waiting, RadixQueue):
        scheduler.waiting.refresh()
