"""TieredCache: a PrefixCache that shows the tiers below it, and may have a disk under host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from radixkv.config import Tenant
from radixkv.errors import ConfigError
from radixkv.index.below import Below, Scope
from radixkv.index.cache import PrefixCache
from radixkv.index.load_target import attach
from radixkv.index.tokens import TokenIds, encode
from radixkv.index.validation import require_namespace, require_seconds
from radixkv.tiers.pending import Pending
from radixkv.tiers.settings import DiskOptions, TierSettings, require_fingerprint

if TYPE_CHECKING:
    from radixkv.config import CacheConfig, Namespace
    from radixkv.tiers.ladder import Ladder
    from radixkv.tiers.pending import FolderNotes
    from radixkv.tiers.tier import Records, Tier, TierDetails

_log = logging.getLogger(__name__)


class TieredCache(PrefixCache):
    """A cache with tiers below. ``disk``: under host memory; needs ``CacheConfig.host_blocks``, and ``close``.

    ``tiers``: further ones below these, such as a remote store: see ``Tier``. They need ``close`` too, which closes
    them.

    ``fingerprint``: of what computes the KV: model, weights, precision. A disk needs one: it reads no records of
    another. Raises ConfigError without it.

    HFEngine calls ``add_tiers`` for a cache without ``host_blocks``: the fingerprint is its model's.

    No call raises what a disk does. A disk that hasn't forgotten a tenant yet serves nothing of it, and goes on trying:
    see ``pending``. After ``close`` a purge or a clear raises TierError, because no disk would hear of it.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        disk: DiskOptions | None = None,
        tiers: Sequence[Tier[Records, memoryview]] = (),
        fingerprint: str = "",
        **parts: Any,
    ) -> None:
        if "lossy_disks" in parts:
            allowed = "disk, with CacheConfig.tier_dtype: a cache keeps all in one dtype"
            raise ConfigError("lossy_disks", parts["lossy_disks"], allowed)
        self._lower: Ladder | None = None
        if disk is not None:
            require_fingerprint(fingerprint)
        for tier in tiers:
            if not callable(getattr(tier, "offer", None)):
                raise ConfigError("tiers", tier, "objects with the calls of radixkv.tiers.tier.Tier")
        self._below_options = disk, tuple(tiers), fingerprint
        super().__init__(config, **parts)

    def _made_below(self) -> Below | None:
        disk, tiers, fingerprint = self._below_options
        if self.config.host_blocks:
            from radixkv.tiers.ladder import tiers_below

            settings = TierSettings(0, disk, self.config.host_blocks, self.config.tier_dtype, tiers)
            self._lower = tiers_below(self.config, self.storage, settings, fingerprint, clock=self._clock)
            self._lower.start()
        elif disk is not None:
            raise ConfigError(
                "disk", disk.folder, "none without host_blocks: records pass through host memory"
            )
        elif tiers:
            raise ConfigError("tiers", tiers, "none without host_blocks: blocks pass through host memory")
        return self._lower

    @property
    def lower(self) -> Ladder | None:
        """The tiers below."""
        return self._lower

    def add_tiers(self, settings: TierSettings, fingerprint: str) -> None:
        """Let host memory, and a disk, lie below from now on. Before the first request. ``close`` ends them.

        ``fingerprint``: of what computes the KV. Raises ConfigError if the cache has tiers, and for tiers that can't be
        had (see ``Ladder``). Nothing is added then.
        """
        from radixkv.tiers.ladder import tiers_below

        if self._lower is not None:
            raise ConfigError("host_blocks", self.config.host_blocks, "0 if the engine brings its own tiers")
        tiers = tiers_below(self.config, self.storage, settings, fingerprint, clock=self._clock)
        known = [each for each in map(self.tenant, self.tenants()) if each is not None]
        self._lower = tiers
        attach(self, tiers)
        for each in known:
            tiers.add_tenant(each)
        tiers.start()

    def close(self) -> None:
        """Store what waits for the disk, for some seconds at most, and give its folder back. After all calls.

        Raises TierError, after all that, if the disk still has what a purge or a clear was to destroy.
        """
        if self._lower is not None:
            self._lower.close()

    def prefetch(self, namespace: Namespace, ids: TokenIds, *, in_s: float = 0.0) -> None:
        """Bring what a disk has of a prompt into host memory, because its request may come in ``in_s`` seconds.

        Unlike ``announce`` it is no request: it changes no order of eviction in this cache, and beyond its tenant's
        guarantee it takes no host memory from others. The newest ``prefetch.MAX_ASKED`` prompts of a tenant count, for
        ``prefetch.ASKED_S`` seconds; a purge or a clear ends them. Each keeps its ids, 4 bytes a token.

        ``in_s``: 0 for within moments. Otherwise it begins after three quarters of that time; above an hour it has no
        effect. ``later_prompts`` bounds how many wait. A hint of ``expected_gap_s`` does the same: see ``note``.

        Raises TokenError, ArgumentError. O(tokens) to read the ids. It waits neither for the disk nor for a request.
        """
        require_namespace(namespace)
        in_s = require_seconds("in_s", in_s)
        key = encode(ids)
        if self._lower is not None:
            self._lower.prefetch(namespace, key, lambda: self.match(namespace, key).num_tokens, in_s)

    # --- what is forgotten reaches the tiers

    def forget_in_tiers(self, scope: Scope, wait_s: float | None = None) -> Pending:
        """Forget something in the tiers, also what lies nowhere else. Returns what a disk still has to destroy of it.

        It doesn't change what this cache has: ``purge`` and ``clear`` do, and reach the tiers too. With
        ``Scope(None, but=tenants)``, before the first request, a disk forgets the tenants that were removed while no
        process had it. One that was removed and made again has another ``incarnation``: ``add_tenant`` forgets what the
        earlier one left.

        No tier serves any of it from now on. Waits for a disk for ``wait_s`` seconds at most (None:
        ``pending.FORGET_S``). What isn't done by then is repeated until it is. Raises TierError for a disk that was
        closed.
        """
        if self._lower is None:
            return Pending()
        return self._waited(self._lower.forget(scope), wait_s)

    def pending(self, tenant: str | None = None) -> Pending:
        """Return what a disk still has to destroy of a tenant that was purged, cleared or removed, or is strict; None:
        of all.
        """
        return Pending() if self._lower is None else self._lower.pending(tenant)

    def purge(self, tenant: str, *, generation: int = 0, wait_s: float | None = None) -> int:
        """See PrefixCache. A disk forgets the tenant too: see ``forget_in_tiers``, and ``Scope`` for ``generation``."""
        num_blocks = self._purged(tenant, generation)
        self._waited(self.pending(tenant), wait_s)
        return num_blocks

    def clear(self, namespace: Namespace, *, wait_s: float | None = None) -> int:
        """See PrefixCache. A disk forgets the whole tenant: see ``forget_in_tiers``."""
        num_blocks = super().clear(namespace)
        self._waited(self.pending(namespace.tenant), wait_s)
        return num_blocks

    def add_tenant(self, tenant: Tenant, *, wait_s: float | None = None) -> None:
        """See PrefixCache. A disk forgets what an earlier tenant of that name left, and all of a strict one: see
        ``forget_in_tiers``.
        """
        was_pending = isinstance(tenant, Tenant) and bool(self.pending(tenant.id))
        super().add_tenant(tenant)
        if not was_pending:
            self._waited(self.pending(tenant.id), wait_s)

    def remove_tenant(self, tenant: str, *, wait_s: float | None = None) -> None:
        """See PrefixCache. A disk forgets the tenant: see ``forget_in_tiers``."""
        super().remove_tenant(tenant)
        self._waited(self.pending(tenant), wait_s)

    def _waited(self, pending: Pending, wait_s: float | None) -> Pending:
        if pending and wait_s != 0 and not pending.wait(wait_s):
            if self._lower is not None:
                self._lower.require_disk()
            _log.error("%s", pending)
        return pending

    def is_on_disk(self, tenant: str) -> bool:
        """Whether a disk has, or may have, records of a tenant."""
        return self._lower is not None and self._lower.is_on_disk(tenant)

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk."""
        return self._lower is not None and self._lower.has_disk

    # --- Tiered

    def follow_generations(
        self,
        generation: Callable[[str], int | None],
        knows: Callable[[], bool],
        store_id: Callable[[], str] = lambda: "",
        notes: FolderNotes | None = None,
    ) -> None:
        """Take the fleet's generations of tenants, whether all are known, and the id of their store from these."""
        if self._lower is not None:
            self._lower.follow_generations(generation, knows, store_id, notes)

    def tier_counts(self) -> Mapping[str, Mapping[str, float]]:
        """Return counts by tier: see ``Ladder.counts``."""
        return {} if self._lower is None else self._lower.counts()

    def tier_details(self) -> Mapping[str, TierDetails]:
        """Return details by tier: see ``Tiered``."""
        return {} if self._lower is None else self._lower.details()
