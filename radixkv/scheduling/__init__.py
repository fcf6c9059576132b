"""The order of waiting requests, for any engine: cache-first with a bound on waiting, fair between tenants.

    queue = RequestQueue()
    waiting = queue.add("acme", tokens=8_000, missing=0.1, item=request)   # it arrives; missing: the share not resident
    queue.update(waiting, missing=0.7)                                     # its blocks were evicted
    queue.peek(now)                                                        # who starts next; changes nothing
    queue.start(waiting)                                                   # the engine could start it

The package is pure and deterministic: no I/O, no thread, no clock of its own, nothing of the cache. The same calls give
the same order.
"""

from radixkv.scheduling.request_queue import MAX_TENANTS, MAX_TOKENS, RequestQueue
from radixkv.scheduling.row_shares import RowShares
from radixkv.scheduling.waiting import KAPPA, MAX_PRIORITY, WHOLE_MISSING, WaitingRequest

__all__ = [
    "RequestQueue",
    "RowShares",
    "WaitingRequest",
    "KAPPA",
    "MAX_PRIORITY",
    "MAX_TENANTS",
    "MAX_TOKENS",
    "WHOLE_MISSING",
]
