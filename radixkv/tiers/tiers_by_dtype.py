"""The tiers below a cache some of whose tenants have a lossy ``tier_dtype``: one ``LowerTiers`` for each dtype.

    cache ──┬─ tenants of "exact" ──▶ blocks as they are
            ├─ tenants of "fp8"   ──▶ records of fp8
            └─ tenants of "int8"  ──▶ records of int8

Each has an index, a memory and a disk of its own, and serves no tenant of another dtype. For such a tenant its mark is
None, so nothing is loaded or kept. So exact and lossy KV can't mix below. They can't above either: a tenant that
changes its dtype is forgotten by the cache first (``load_target.follow``), and a lossy tenant publishes no bases.

A dtype may also have changed while no process ran. So when a tenant's dtype is known, by its settings or its first
request, the disks of the other dtypes forget what they have of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from radixkv.clock import Clock, monotonic
from radixkv.config import LOSSY_DTYPES, CacheConfig, Namespace, Tenant, TierDtype
from radixkv.errors import ConfigError
from radixkv.forks import OwnLock
from radixkv.index.below import Scope
from radixkv.tiers.lossy_folder import disks_in, errors_named, open_folder
from radixkv.tiers.lower_tiers import LowerTiers
from radixkv.tiers.pending import Pending
from radixkv.tiers.settings import TierSettings
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.files.private_folder import PrivateFolder
    from radixkv.index.below import Expected, GiveAll, Loading, Part, Target
    from radixkv.index.cache import PrefixCache
    from radixkv.storage.device import BlockStorage
    from radixkv.storage.plan import BlockIds
    from radixkv.tiers.disk_level import DiskLevel
    from radixkv.tiers.settings import Disks
    from radixkv.tiers.tier import FolderNotes, TierDetails

_Read = TypeVar("_Read")
DTYPES: Final[tuple[TierDtype, ...]] = ("exact", "fp8", "int8")


def tiers_below(
    config: CacheConfig,
    storage: BlockStorage | None,
    disks: Disks | None = None,
    fingerprint: str = "",
    clock: Clock = monotonic,
) -> LowerTiers | TiersByDtype:
    """Return the tiers of a cache on this clock, with ``host.memory`` or ``lossy_host_blocks``. Raises ConfigError.

    It raises that without a storage, for a disk without host memory of its dtype, and as LowerTiers.
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
    make = partial(_made, config, storage, disks, fingerprint, clock)
    if wanted == ["exact"]:
        return make("exact")
    return TiersByDtype(wanted, make, default_dtype(config))


def _made(
    config: CacheConfig,
    storage: BlockStorage,
    disks: Disks,
    fingerprint: str,
    clock: Clock,
    dtype: TierDtype,
) -> LowerTiers:
    num_slots = config.host_blocks if dtype == "exact" else config.lossy_host_blocks
    return tiers_with(
        TierSettings(0, disks.get(dtype), num_slots, dtype), config, storage, fingerprint, clock
    )


def tiers_with(
    settings: TierSettings, config: CacheConfig, storage: BlockStorage, fingerprint: str, clock: Clock
) -> LowerTiers:
    """Return tiers of one dtype below a cache with this configuration, storage and clock. Raises as LowerTiers."""
    return LowerTiers(
        storage,
        settings,
        fingerprint,
        policy=config.policy,
        always_scrubs=config.scrub == "always",
        policy_clock=clock,
    )


def tiers_of(
    settings: TierSettings, make: Callable[[TierSettings], LowerTiers], default: TierDtype
) -> LowerTiers | TiersByDtype:
    """Return tiers with these settings; ``make`` makes those of one dtype. ``default``: see TiersByDtype.

    Raises what ``make`` and ``open_folder`` raise, and ConfigError for a disk without host memory of its dtype.
    """
    lossy_disk, has_exact = settings.lossy_disk, bool(settings.host_bytes or settings.host_blocks)
    for name, disk, memory, is_there in (
        ("disk", settings.disk, "host_bytes", has_exact),
        ("lossy_disk", lossy_disk, "lossy_host_bytes", bool(settings.lossy_host_bytes)),
    ):
        if disk is not None and not is_there:
            raise ConfigError(
                name, str(disk.folder), f"none without {memory}: records pass through host memory"
            )
    if not settings.lossy_host_bytes:
        return make(settings)
    disks = {} if lossy_disk is None else disks_in(lossy_disk)
    of_dtype: dict[TierDtype, TierSettings] = {"exact": settings} if has_exact else {}
    for each in LOSSY_DTYPES:
        of_dtype[each] = TierSettings(settings.lossy_host_bytes, disks.get(each), dtype=each)

    def made(dtype: TierDtype) -> LowerTiers:
        with nullcontext() if lossy_disk is None or dtype == "exact" else errors_named(lossy_disk):
            return make(of_dtype[dtype])

    folder = None
    if lossy_disk is not None:
        with suppress(OSError):  # the disks in it tell, and are left out
            folder = open_folder(lossy_disk)
    return TiersByDtype(list(of_dtype), made, default, folder)


def default_dtype(config: CacheConfig) -> TierDtype:
    """Return the ``tier_dtype`` of tenants that weren't added."""
    return "exact" if config.default_tenant is None else config.default_tenant.tier_dtype


class TiersByDtype:
    """Tiers for each of ``dtypes``, which ``make`` makes. ``default``: the dtype of tenants that nobody named.

    It does what ``LowerTiers`` does, by the tiers of the tenant. ``folder``: that of their lossy disks, which ``close``
    gives back. Raises what ``make`` raises; then the folder is given back too.
    """

    def __init__(
        self,
        dtypes: list[TierDtype],
        make: Callable[[TierDtype], LowerTiers],
        default: TierDtype,
        folder: PrivateFolder | None = None,
    ) -> None:
        self._default, self._dtypes, self._folder = default, dict[str, TierDtype](), folder
        self._following = OwnLock()
        self.tiers: dict[TierDtype, LowerTiers] = {}
        """By dtype."""
        try:
            for dtype in dtypes:
                self.tiers[dtype] = make(dtype)
        except BaseException as error:
            self._close(is_refused=isinstance(error, ConfigError))
            raise
        for dtype, tiers in self.tiers.items():
            tiers.serves = partial(self._is_of, dtype)
        self.slice_blocks = min(each.slice_blocks for each in self.tiers.values())

    def dtype_of(self, tenant: str) -> TierDtype:
        """Return how a tenant's KV are kept. Any thread."""
        return self._dtypes.get(tenant, self._default)

    def _is_of(self, dtype: TierDtype, tenant: str) -> bool:
        return self.dtype_of(tenant) == dtype

    def _of(self, tenant: str) -> LowerTiers | None:
        return self.tiers.get(self.dtype_of(tenant))

    def _used(self, tenant: str) -> LowerTiers | None:
        """Return the tiers of a tenant of which KV come or go. Never waits for a disk."""
        if tenant not in self._dtypes and (others := self._others_with(tenant, self._default)):
            for each in others:
                each.pending(tenant).wait(0.0)
        return self._of(tenant)

    def _others_with(self, tenant: str, dtype: TierDtype) -> list[LowerTiers]:
        """Return the tiers of other dtypes whose disks have something of a tenant. They owe its purge from now on."""
        return [tiers for each, tiers in self.tiers.items() if each != dtype and tiers.owes_all_of(tenant)]

    # --- Below

    def keep(self, tenant: str, take: Callable[[], Part | None]) -> None:
        """See ``Below``."""
        tiers = self._used(tenant)
        if tiers is not None:
            tiers.keep(tenant, take)

    def attached(self, give_all: GiveAll, free_ahead: Callable[[int], None]) -> None:
        """See ``Below``."""
        for each in self.tiers.values():
            each.attached(give_all, free_ahead)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """See ``Below``. Always in the same order of the dtypes."""
        with ExitStack() as stack:
            for each in self.tiers.values():
                stack.enter_context(each.moving())
            yield

    def let_go(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """See ``Below``."""
        has_none = np.ones(len(block_ids), np.bool_)
        for each in self.tiers.values():
            has_none &= each.let_go(block_ids)
        return has_none

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
        tiers = self._used(target.namespace.tenant)
        return None if tiers is None else tiers.begin(target)

    def expect(self, expected: Expected) -> None:
        """See ``Below``."""
        tiers = self._of(expected.namespace.tenant)
        if tiers is not None:
            tiers.expect(expected)

    def prefetch(
        self, namespace: Namespace, key: bytes, resident_tokens: Callable[[], int], in_s: float = 0.0
    ) -> None:
        """See ``Below``."""
        tiers = self._of(namespace.tenant)
        if tiers is not None:
            tiers.prefetch(namespace, key, resident_tokens, in_s)

    @contextmanager
    def forgetting(self, scope: Scope) -> Iterator[None]:
        """See ``Below``. A purge or a clear reaches the tiers of all dtypes. Their disks forget at the same time."""
        with ExitStack() as stack:
            for each in self.tiers.values():
                stack.enter_context(each.forgetting(scope))
            yield

    def forget_scope(self, scope: Scope) -> Pending:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.forget_scope(scope)
        return self.pending(scope.tenant)

    def pending(self, tenant: str | None = None) -> Pending:
        """See LowerTiers."""
        return Pending([disk for each in self.tiers.values() for disk in each.pending().disks], tenant)

    def require_disk(self) -> None:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.require_disk()

    def is_on_disk(self, tenant: str) -> bool:
        """See LowerTiers."""
        return any(each.is_on_disk(tenant) for each in self.tiers.values())

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk."""
        return any(each.has_disk for each in self.tiers.values())

    def require(self, tenant: Tenant) -> None:
        """See ``Below``. An exact tenant needs no memory: without it, nothing of it is kept."""

    def follow(self, settings: Callable[[], Tenant]) -> None:
        """See ``Below``. The last caller's settings count."""
        with self._following:
            self.add_tenant(settings())

    def add_tenant(self, tenant: Tenant) -> None:
        """Keep a tenant's KV as its settings say, in its share of that memory. See ``LowerTiers.add_tenant``.

        Disks of other dtypes forget it.
        """
        self._dtypes[tenant.id] = tenant.tier_dtype
        for dtype, tiers in self.tiers.items():
            if dtype == tenant.tier_dtype:
                tiers.add_tenant(tenant)
            else:
                tiers.leave_out(tenant.id)
        for each in self._others_with(tenant.id, tenant.tier_dtype):
            each.pending(tenant.id).wait(0.0)

    def namespaces(self, tenant: str | None) -> list[Namespace]:
        """See ``Below``."""
        return [each for tiers in self.tiers.values() for each in tiers.namespaces(tenant)]

    def maintain(self) -> None:
        """See ``Below``."""
        for each in self.tiers.values():
            each.maintain()

    # --- the engine

    @property
    def disk(self) -> DiskLevel | None:
        """A disk, if there is one."""
        return next((each.disk for each in self.tiers.values() if each.disk is not None), None)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.computed(num_tokens, seconds)

    def weights_changed(self, model: str, version: int) -> None:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.weights_changed(model, version)

    # --- all of them

    def start(self) -> None:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.start()

    def close(self) -> None:
        """See LowerTiers."""
        self._close()

    def _close(self, **refused: bool) -> None:
        """All gates are held in the usual order: what one of the tiers gives to its disk passes the others' too."""
        for each in self.tiers.values():
            each.stop()
        with self.moving(), ExitStack() as stack:
            if self._folder is not None:
                stack.callback(self._folder.close, **refused)  # after the disks in it
            for each in self.tiers.values():
                stack.callback(each.close)

    def follow_generations(
        self,
        generation: Callable[[str], int | None],
        knows: Callable[[], bool],
        store_id: Callable[[], str] = lambda: "",
        notes: FolderNotes | None = None,
    ) -> None:
        """See LowerTiers."""
        for each in self.tiers.values():
            each.follow_generations(generation, knows, store_id, notes)

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """See LowerTiers. Those of lossy tiers have their dtype behind the name: ``host_int8``."""
        return self._by_tier(LowerTiers.counts)

    def details(self) -> Mapping[str, TierDetails]:
        """See LowerTiers, and ``counts`` for the names."""
        return self._by_tier(LowerTiers.details)

    def indexes(self) -> Mapping[str, PrefixCache]:
        """See ``Below``, and ``counts`` for the names."""
        return self._by_tier(LowerTiers.indexes)

    def violations(self, pause: Callable[[], None]) -> Mapping[str, list[tuple[str, str]]]:
        """See ``Below``, and ``counts`` for the names."""
        return self._by_tier(lambda tiers: tiers.violations(pause))

    def _by_tier(self, read: Callable[[LowerTiers], Mapping[str, _Read]]) -> Mapping[str, _Read]:
        return {
            name if dtype == "exact" else f"{name}_{dtype}": each
            for dtype, tiers in self.tiers.items()
            for name, each in read(tiers).items()
        }


refuse_copies(TiersByDtype, "it holds memory, threads and files. Make another")
