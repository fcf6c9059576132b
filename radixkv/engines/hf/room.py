"""Which requests of a batch have room, and which gives its room up.

A request starts when its prompt and its expected output fit. What is expected is a quantile of the output lengths seen
so far, reserved in the cache as soon as several requests run. So requests within their quantile always grow. If one
that exceeds it can't grow, one request is *preempted*: of those of the same tenant, and of those that borrow if the
pool is short, the one that loses the fewest computed tokens.

A beam search can't be preempted. So one starts beside others only if the most that they may come to need fits together.

A strict tenant learns from its own requests alone, and only its own requests are preempted for it. The other tenants
learn together. Nobody loses what its tenant has guaranteed to another tenant's request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from radixkv.engines.hf.request import BatchRequest, Row
from radixkv.errors import CapacityError, OutOfBlocks, QuotaExceeded
from radixkv.index.cache import PrefixCache

QUANTILE: Final = 0.9
"""Share of requests that need no more output than is reserved for them."""
_WINDOW: Final = 256
"""Ended requests from which the quantile is learned."""
_MAX_STRICT: Final = 1_024
"""Strict tenants whose lengths are known; the one that was idle longest is forgotten first."""


class OutputLengths:
    """The lengths of the latest outputs, and their quantile."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_WINDOW)
        self._quantile: int | None = None

    def add(self, num_tokens: int) -> None:
        """Count the output of a request that ended."""
        self._lengths.append(num_tokens)
        self._quantile = None

    def expected(self, most: int) -> int:
        """Return the tokens to expect of an output of at most ``most``; ``most`` before anything is known."""
        if not self._lengths:
            return most
        if self._quantile is None:
            ordered = sorted(self._lengths)
            self._quantile = ordered[min(int(QUANTILE * len(ordered)), len(ordered) - 1)]
        return min(self._quantile, most)


class Room:
    """What the requests of a batch need, and who goes first when there is too little."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._shared = OutputLengths()
        self._own: OrderedDict[str, OutputLengths] = OrderedDict()

    def ended(self, request: BatchRequest) -> None:
        """Learn from a request that came to its end."""
        self._lengths(request.tenant).add(request.num_chosen)

    def reserve(self, request: BatchRequest) -> None:
        """Reserve room for the output that is expected, unless it is. Raises CapacityError, and changes nothing then.

        A request whose rows will be forked has all of it at its first row until then.
        """
        rows = [row for row in request.rows if row.sequence is not None and not row.is_over]
        if request.chooser is None or not rows or any(row.opened.num_reserved_tokens for row in rows):
            return
        expected = self._lengths(request.tenant).expected(request.max_new_tokens)
        left = max(expected - request.num_chosen, 1)
        if request.num_chosen == 0:
            unopened = sum(row.num_tokens for row in request.rows if row.sequence is None)
            rows[0].opened.reserve(unopened + left * request.fanout * len(request.prompts))
            return
        done: list[Row] = []
        try:
            for row in rows:
                row.opened.reserve(left)
                done.append(row)
        except CapacityError:
            for row in done:
                row.opened.drop()
            raise

    def obstacle(self, request: BatchRequest) -> CapacityError | None:
        """Return why a waiting request can't fit now, if counts alone say so. Evicts nothing, unlike an attempt."""
        most = self._lengths(request.tenant).expected(request.max_new_tokens)
        output = max(most - request.num_chosen, 1) * request.fanout * len(request.prompts)
        found = sum(
            self._cache.match(request.namespace, row.cache_key).num_blocks
            for row in request.rows
            if not row.is_over
        )
        needed = -(-(request.num_tokens + output) // self._cache.config.block_size) - found
        own = self._cache.blocks_of(request.tenant)
        if self.is_strict(request.tenant):
            available = own.free_blocks + own.evictable_blocks
        else:
            stats = self._cache.stats()
            available = stats.free_blocks + stats.evictable_blocks
        if needed <= available:
            return None
        return OutOfBlocks(needed, own.free_blocks, own.evictable_blocks)

    def crowding(self, request: BatchRequest, beside: Iterable[BatchRequest]) -> CapacityError | None:
        """Return why a beam search has to wait for others that run: together they might come to need too much."""
        if not request.is_driven:
            return None
        needs = {request.tenant: 0}
        for each in (each for each in beside if each.is_driven and each is not request):
            needs[each.tenant] = needs.get(each.tenant, 0) + self._most_blocks(each)
        if not any(needs.values()):
            return None
        own = needs[request.tenant] = needs[request.tenant] + self._most_blocks(request)
        settings, blocks = self._cache.tenant(request.tenant), self._cache.blocks_of(request.tenant)
        most = None if settings is None else settings.max_blocks
        if most is not None and own > most:
            beside_it = own - self._most_blocks(request)
            return QuotaExceeded(own - beside_it, most, beside_it, 0)
        if self.is_strict(request.tenant):
            return None
        stats = self._cache.stats()
        usable = stats.num_blocks - stats.lent_blocks - stats.pinned_blocks - stats.base_blocks
        promised = blocks.guaranteed_to_others + self._guaranteed(request.tenant)
        needed = promised + sum(max(need - self._guaranteed(name), 0) for name, need in needs.items())
        return None if needed <= usable else OutOfBlocks(needed, usable, 0)

    def _most_blocks(self, request: BatchRequest) -> int:
        """Blocks that a request may come to have: the prompts' own, and those of each row after them."""
        size = self._cache.config.block_size
        lengths = [len(prompt.ids) for prompt in request.prompts]
        tails = [-(-(length % size + request.max_new_tokens) // size) for length in lengths]
        return sum(length // size for length in lengths) + request.fanout * sum(tails)

    def _guaranteed(self, tenant: str) -> int:
        settings = self._cache.tenant(tenant)
        return 0 if settings is None else settings.guaranteed_blocks

    def is_strict(self, tenant: str) -> bool:
        """Whether nothing of the tenant may depend on others."""
        settings = self._cache.tenant(tenant)
        return settings is not None and settings.mode == "strict"

    def victim(
        self, request: BatchRequest, error: CapacityError, running: Iterable[BatchRequest]
    ) -> BatchRequest | None:
        """Return which request gives its room up so that ``request`` can grow; None if there is none to choose.

        It may be ``request`` itself, if it loses least.
        """
        is_own = isinstance(error, QuotaExceeded) or self.is_strict(request.tenant)
        found = [
            each
            for each in running
            if each.state in ("filling", "choosing")
            and each.chooser is not None
            and any(row.sequence is not None for row in each.rows)
            and (each.tenant == request.tenant or (not is_own and self._borrows(each.tenant)))
        ]
        if not any(each is not request for each in found):
            return None
        return min(found, key=_loss)

    def _borrows(self, tenant: str) -> bool:
        """Whether a tenant's requests hold more than it has guaranteed."""
        stats = self._cache.tenant_stats(tenant)
        return stats.used_blocks - stats.evictable_blocks > self._guaranteed(tenant)

    def _lengths(self, tenant: str) -> OutputLengths:
        if not self.is_strict(tenant):
            return self._shared
        lengths = self._own.setdefault(tenant, OutputLengths())
        self._own.move_to_end(tenant)
        while len(self._own) > _MAX_STRICT:
            self._own.popitem(last=False)
        return lengths


def _loss(request: BatchRequest) -> int:
    """Tokens that it would have to compute again, at most."""
    return sum(
        row.num_computed - row.sequence.num_cached_tokens for row in request.rows if row.sequence is not None
    )
