"""The tiers below a cache some of whose tenants have a lossy ``tier_dtype``: one ``LowerTiers`` for each dtype.

    cache ──┬─ tenants of "exact" ──▶ blocks as they are
            ├─ tenants of "fp8"   ──▶ records of fp8
            └─ tenants of "int8"  ──▶ records of int8

Each has an index, a memory and a disk of its own, and serves no tenant of another dtype: for such a tenant its mark is
None, so nothing is loaded or kept. So exact and lossy KV can't mix below. They can't above either: a tenant that
changes its dtype is forgotten by the cache first (``load_target.follow``), and a lossy tenant publishes no bases.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from radixkv.config import LOSSY_DTYPES, CacheConfig, Namespace, Tenant, TierDtype
from radixkv.engines.cache_tiers import CacheTiers
from radixkv.engines.lower_tiers import LowerTiers, RowBelow
from radixkv.engines.tier_settings import TierSettings
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.engines.disk_level import DiskLevel
    from radixkv.engines.tier_settings import Disks
    from radixkv.index.below import Expected, Loading, Part, Target
    from radixkv.storage.device import BlockStorage
    from radixkv.storage.plan import BlockIds

DTYPES: Final[tuple[TierDtype, ...]] = ("exact", "fp8", "int8")


def tiers_below(
    config: CacheConfig, storage: BlockStorage | None, disks: Disks | None = None, fingerprint: str = ""
) -> LowerTiers | TiersByDtype:
    """Return the tiers of a cache with ``host_blocks`` or ``lossy_host_blocks``. Raises ConfigError.

    It raises that without a storage, for a disk without host memory of its dtype, and as CacheTiers.
    """
    sizes = {"host_blocks": config.host_blocks, "lossy_host_blocks": config.lossy_host_blocks}
    if storage is None:
        name = "host_blocks" if config.host_blocks else "lossy_host_blocks"
        allowed = "0 without a layout or a storage: the cache must copy the blocks"
        raise ConfigError(name, sizes[name], allowed)
    disks = disks or {}
    wanted = [dtype for dtype in DTYPES if sizes["host_blocks" if dtype == "exact" else "lossy_host_blocks"]]
    for dtype, disk in disks.items():
        if dtype not in wanted:
            name = "host_blocks" if dtype == "exact" else "lossy_host_blocks"
            raise ConfigError("disk", disk.folder, f"none without {name}: records pass through host memory")
    make = partial(_made, config, storage, disks, fingerprint)
    if wanted == ["exact"]:
        return make("exact")
    return TiersByDtype(wanted, make, default_dtype(config))


def _made(
    config: CacheConfig, storage: BlockStorage, disks: Disks, fingerprint: str, dtype: TierDtype
) -> CacheTiers:
    return CacheTiers(config, storage, disks.get(dtype), fingerprint, dtype)


def tiers_of(
    settings: TierSettings, make: Callable[[TierSettings], LowerTiers], default: TierDtype
) -> LowerTiers | TiersByDtype:
    """Return tiers with these settings; ``make`` makes those of one dtype. ``default``: see TiersByDtype.

    A disk is for exact KV. Raises what ``make`` raises.
    """
    if not settings.lossy_host_bytes:
        return make(settings)
    lossy = {dtype: TierSettings(settings.lossy_host_bytes, dtype=dtype) for dtype in LOSSY_DTYPES}
    of_dtype: dict[TierDtype, TierSettings] = {"exact": settings} if settings.host_bytes else {}
    of_dtype |= lossy
    return TiersByDtype(list(of_dtype), lambda dtype: make(of_dtype[dtype]), default)


def default_dtype(config: CacheConfig) -> TierDtype:
    """Return the ``tier_dtype`` of tenants that weren't added."""
    return "exact" if config.default_tenant is None else config.default_tenant.tier_dtype


class TiersByDtype:
    """Tiers for each of ``dtypes``, which ``make`` makes. ``default``: the dtype of tenants that nobody named.

    It does what ``LowerTiers`` does, by the tiers of the tenant. Raises what ``make`` raises.
    """

    def __init__(
        self, dtypes: list[TierDtype], make: Callable[[TierDtype], LowerTiers], default: TierDtype
    ) -> None:
        self._default, self._dtypes = default, dict[str, TierDtype]()
        self._following = threading.Lock()
        self.tiers: dict[TierDtype, LowerTiers] = {}
        """By dtype."""
        try:
            for dtype in dtypes:
                self.tiers[dtype] = make(dtype)
        except BaseException:
            self.close()
            raise
        for dtype, tiers in self.tiers.items():
            tiers.serves = partial(self._is_of, dtype)
        self.slice_blocks = min(each.slice_blocks for each in self.tiers.values())
        self.keeps_commits = any(each.keeps_commits for each in self.tiers.values())

    def dtype_of(self, tenant: str) -> TierDtype:
        """Return how a tenant's KV are kept. Any thread."""
        return self._dtypes.get(tenant, self._default)

    def _is_of(self, dtype: TierDtype, tenant: str) -> bool:
        return self.dtype_of(tenant) == dtype

    def _of(self, tenant: str) -> LowerTiers | None:
        return self.tiers.get(self.dtype_of(tenant))

    # --- Below

    def keep(self, tenant: str, take: Callable[[], Part | None]) -> None:
        """See ``Below``."""
        tiers = self._of(tenant)
        if tiers is not None:
            tiers.keep(tenant, take)

    def moving(self) -> AbstractContextManager[None]:
        """See ``Below``. Always in the same order of the dtypes."""
        return self._all([each.moving() for each in self.tiers.values()])

    def leave(self, namespace: Namespace, key: bytes, start: int, block_ids: BlockIds) -> None:
        """See ``Below``."""
        tiers = self._of(namespace.tenant)
        if tiers is not None:
            tiers.leave(namespace, key, start, block_ids)

    def may_have(self, namespace: Namespace, key: bytes) -> bool:
        """See ``Below``."""
        tiers = self._of(namespace.tenant)
        return tiers is not None and tiers.may_have(namespace, key)

    def begin(self, target: Target) -> Loading | None:
        """See ``Below``."""
        tiers = self._of(target.namespace.tenant)
        return None if tiers is None else tiers.begin(target)

    def expect(self, expected: Expected) -> None:
        """See ``Below``."""
        tiers = self._of(expected.namespace.tenant)
        if tiers is not None:
            tiers.expect(expected)

    @contextmanager
    def _all(self, contexts: list[AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for each in contexts:
                stack.enter_context(each)
            yield

    def forgotten(self, tenant: str, namespace: Namespace | None) -> AbstractContextManager[None]:
        """See ``Below``. A purge or a clear reaches the tiers of all dtypes."""
        return self._all([each.forgotten(tenant, namespace) for each in self.tiers.values()])

    def require(self, tenant: Tenant) -> None:
        """See ``Below``. An exact tenant needs no memory: without it, nothing of it is kept."""

    def follow(self, settings: Callable[[], Tenant]) -> None:
        """See ``Below``. The last caller's settings count."""
        with self._following:
            self.add_tenant(settings())

    def add_tenant(self, tenant: Tenant) -> None:
        """Keep a tenant's KV as its settings say, in its share of that memory. See ``LowerTiers.add_tenant``."""
        self._dtypes[tenant.id] = tenant.tier_dtype
        for dtype, tiers in self.tiers.items():
            if dtype == tenant.tier_dtype:
                tiers.add_tenant(tenant)
            else:
                tiers.leave_out(tenant.id)

    def namespaces(self, tenant: str | None) -> list[Namespace]:
        """See ``Below``."""
        return [each for tiers in self.tiers.values() for each in tiers.namespaces(tenant)]

    # --- an engine that loads and saves by itself

    def row(self, namespace: Namespace) -> RowBelow | None:
        """See LowerTiers."""
        tiers = self._of(namespace.tenant)
        return None if tiers is None else tiers.row(namespace)

    @property
    def disk(self) -> DiskLevel | None:
        """A disk, if there is one."""
        return next((each.disk for each in self.tiers.values() if each.disk is not None), None)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.computed(num_tokens, seconds)

    def weights_changed(self, version: int) -> None:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.weights_changed(version)

    # --- all of them

    def start(self) -> None:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.start()

    def close(self) -> None:
        """See LowerTiers."""
        with ExitStack() as stack:
            for each in self.tiers.values():
                stack.callback(each.close)

    def owed(self) -> frozenset[str]:
        """See LowerTiers."""
        return frozenset[str]().union(*(each.owed() for each in self.tiers.values()))

    def follow_generations(
        self,
        generation: Callable[[str], int],
        knows: Callable[[], bool],
        store_id: Callable[[], str] = lambda: "",
    ) -> None:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.follow_generations(generation, knows, store_id)

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """See LowerTiers. Those of lossy tiers have their dtype behind the name: ``host_int8``."""
        found = dict[str, Mapping[str, float]]()
        for dtype, tiers in self.tiers.items():
            end = "" if dtype == "exact" else f"_{dtype}"
            found |= {f"{name}{end}": counts for name, counts in tiers.counts().items()}
        return found
