"""Which part of a disk each tenant may have: as much of it as its settings give it of the level above."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from radixkv.errors import ArgumentError
from radixkv.tiers.disk.slot_owners import Quota
from radixkv.tiers.disk.tier import DiskTier

_log = logging.getLogger(__name__)


class DiskShares:
    """Gives tenants quotas of ``tier``, whose settings count ``num_blocks`` blocks. One thread at a time."""

    def __init__(self, tier: DiskTier, num_blocks: int) -> None:
        self._tier, self._num_blocks = tier, num_blocks
        self._unmet: dict[str, Quota] = {}
        """Quotas whose guarantee the disk refused."""

    def set(
        self, tenant: str, guaranteed_blocks: int = 0, max_blocks: int | None = None, weight: float = 1.0
    ) -> None:
        """Give a tenant a part of the disk: as much of it as these blocks are of all.

        Two tenants' changes may come in another order than to the cache. Then a guarantee may not fit yet. The next
        change gives it.
        """
        least, limit = (
            blocks * self._tier.num_slots // self._num_blocks
            for blocks in (guaranteed_blocks, max_blocks or 0)
        )
        quota = Quota(least, None if max_blocks is None else max(limit, least, 1), weight)
        self._unmet.pop(tenant, None)
        try:
            self._tier.set_quota(tenant, quota)
        except ArgumentError as error:
            _log.warning("tenant %r is guaranteed no part of the disk: %s", tenant, error)
            self._tier.set_quota(tenant, replace(quota, guaranteed=0))
            self._unmet[tenant] = quota
            return
        self.retry()

    def retry(self) -> None:
        """Give guarantees that didn't fit before, if they do now."""
        for each, unmet in list(self._unmet.items()):
            with suppress(ArgumentError):
                self._tier.set_quota(each, unmet)
                del self._unmet[each]
