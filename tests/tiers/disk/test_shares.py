"""A tenant's guarantee and limit count on the disk below a cache too, also after a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, Tenant
from radixkv.audit.oracle import Engine
from radixkv.audit.properties.material import LAYOUT
from radixkv.errors import ConfigError
from radixkv.tiers.disk.slots import NO_QUOTA, Quota
from radixkv.tiers.settings import DiskOptions, TierSettings
from radixkv.tiers.tiered_cache import TieredCache
from tests.tiers.support import FaultyFiles, num_of
from tests.tiers.support import patience as patience
from tests.tiers.test_loading import SECRET, DiskOwner
from tests.tiers.test_tiered_cache import PROMPT, SIZE
from tests.waiting import eventually

pytestmark = pytest.mark.slow

NUM_BLOCKS, NUM_SLOTS = 40, 80
"""Of the cache, and of the disk: a tenant has twice as much of the disk."""
ACME = Tenant("a", guaranteed_blocks=10, max_blocks=20)
GLOBEX = Tenant("b", max_blocks=25)


class SharedOwner(DiskOwner):
    """A cache with a small disk, and these tenants."""

    def __init__(self, folder: Path, tenants: tuple[Tenant, ...], fingerprint: str = "toy") -> None:
        size = 2 * 4096 + NUM_SLOTS * (4096 + 128)
        disk = DiskOptions(folder, size, SECRET, files=FaultyFiles())
        self.cache = TieredCache(
            CacheConfig(NUM_BLOCKS, SIZE, LAYOUT, host_blocks=24, policy="lru"),
            disk=disk,
            fingerprint=fingerprint,
        )
        self.engine = Engine(self.cache)
        for tenant in tenants:
            self.cache.add_tenant(tenant)

    def records(self, tenant: str) -> int:
        """The slots that a tenant has on the disk."""
        tier = self.disk.records
        return num_of(tier._table, bytes.fromhex(tier.folder.tag(tenant)))

    def quota(self, tenant: str) -> Quota:
        tier = self.disk.records
        owner = tier._table._owners.get(bytes.fromhex(tier.folder.tag(tenant)))
        return NO_QUOTA if owner is None else owner.quota

    def stored(self, tenant: str, ids: list[int], least: int) -> None:
        """Compute a prompt, and wait until the disk has at least so many records of the tenant."""
        self.ask(ids, Namespace(tenant, "m"))
        self.evict()
        assert eventually(lambda: self.is_stored() and self.records(tenant) >= least)

    def is_stored(self) -> bool:
        """Whether nothing waits for the disk. Lets the tiers go on."""
        with self.below.gate:
            self.below.tick()
            return (
                not self.disk.num_running
                and not self.disk.demotions.num_waiting
                and not self.disk.demotions._leaving
            )

    def loaded(self, ids: list[int], tenant: str) -> int:
        """Wait for all of a prompt that lies below. Returns its tokens."""
        with self.cache.open(Namespace(tenant, "m"), ids) as sequence:
            loading = sequence.loading
            return loading.num_loaded_tokens if loading is not None and loading.wait() else 0

    def flood(self, tenant: str, num: int = 30) -> None:
        """Compute prompts that take the disk several times over, and wait until what is stored is stored."""
        for number in range(num):
            self.ask([1_000 * (number + 1) + each for each in range(41)], Namespace(tenant, "m"))
            self.evict()
            assert eventually(self.is_stored)


@contextmanager
def shared(folder: Path, *tenants: Tenant, **settings: Any) -> Iterator[SharedOwner]:
    owner = SharedOwner(folder, tenants, **settings)
    try:
        yield owner
    finally:
        owner.cache.close()


def test_a_flood_evicts_nothing_that_a_tenant_is_guaranteed(tmp_path: Path) -> None:
    with shared(tmp_path / "disk", ACME, GLOBEX) as owner:
        assert owner.disk.records.num_slots == NUM_SLOTS
        assert owner.quota("a") == Quota(20, 40) and owner.quota("b") == Quota(0, 50)
        owner.stored("a", PROMPT, 10)
        owner.flood("b")
        assert owner.records("a") == 10 and owner.records("b") == 50
        owner.flood("c")  # a tenant that nobody added
        assert owner.records("a") == 10 and owner.records("b") + owner.records("c") == NUM_SLOTS - 10
    with shared(tmp_path / "disk", ACME, GLOBEX) as owner:
        owner.flood("b")
        assert owner.records("a") == 10
        owner.evict()
        assert owner.loaded(PROMPT, "a") == 40, "what is guaranteed is served"


def test_a_change_of_a_tenant_reaches_the_disk(tmp_path: Path) -> None:
    with shared(tmp_path / "disk", ACME, GLOBEX) as owner:
        owner.flood("b")
        assert owner.records("b") == 50
        owner.cache.add_tenant(replace(GLOBEX, max_blocks=12, weight=2.0))
        assert owner.quota("b") == Quota(0, 24, 2.0) and owner.records("b") == 50
        owner.flood("b", 12)
        assert owner.records("b") == 24
        owner.cache.add_tenant(Tenant("b", guaranteed_blocks=5, mode="strict"))
        assert owner.quota("b") == NO_QUOTA and eventually(lambda: owner.records("b") == 0)
        owner.cache.remove_tenant("a")
        assert owner.quota("a") == NO_QUOTA


def test_a_guarantee_that_does_not_fit_yet_is_logged_and_given_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache never has such tenants, but the tiers may hear of two changes in another order."""
    with shared(tmp_path / "disk", Tenant("a", guaranteed_blocks=NUM_BLOCKS)) as owner:
        follow = owner.disk.follow
        follow("b", Tenant("b", guaranteed_blocks=1, max_blocks=3))
        assert owner.quota("b") == Quota(0, 6)
        (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert "'b' is guaranteed no part of the disk: guaranteed=2 is not allowed" in record.getMessage()
        follow("c", Tenant("c", max_blocks=1))
        assert owner.quota("b") == Quota(0, 6) and owner.quota("c") == Quota(0, 2)
        follow("a", Tenant("a", guaranteed_blocks=NUM_BLOCKS - 1))
        assert owner.quota("b") == Quota(2, 6) and owner.quota("a") == Quota(NUM_SLOTS - 2)
        follow("d", Tenant("d", guaranteed_blocks=1))
        follow("d", None)  # it is content with nothing now
        follow("a", None)
        assert owner.quota("d") == NO_QUOTA and owner.quota("b") == Quota(2, 6)


# --- what computes the KV


@pytest.mark.parametrize("fingerprint", ["", " \t", None, b"toy", 7])
def test_a_disk_needs_a_fingerprint(tmp_path: Path, fingerprint: Any) -> None:
    config = CacheConfig(NUM_BLOCKS, SIZE, LAYOUT, host_blocks=24)
    disk = DiskOptions(tmp_path / "disk", 4 << 20, SECRET)
    with pytest.raises(ConfigError, match=r"fingerprint.*; allowed: a text that names what"):
        TieredCache(config, disk=disk, fingerprint=fingerprint)
    with pytest.raises(ConfigError, match="fingerprint"):
        TieredCache(config, disk=disk)
    assert not (tmp_path / "disk").exists()


def test_host_memory_alone_needs_no_fingerprint() -> None:
    cache = TieredCache(CacheConfig(NUM_BLOCKS, SIZE, LAYOUT, host_blocks=24))
    assert cache.lower is not None and TierSettings(0).disk is None
    cache.close()


def test_another_fingerprint_finds_nothing_and_is_stored_beside(tmp_path: Path) -> None:
    lives = ("one", 0, 10), ("one", 40, 10), ("two", 0, 20), ("two", 40, 20), ("one", 40, 20)
    for fingerprint, num_loaded, num_records in lives:
        with shared(tmp_path / "disk", fingerprint=fingerprint) as owner:
            assert owner.loaded(PROMPT, "a") == num_loaded
            owner.stored("a", PROMPT, num_records)
            assert len(owner.disk.records) == num_records
