"""A strict tenant has host memory for itself, and nothing on the disk: nothing goes there, and nothing waits for it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, Tenant
from radixkv.audit.oracle import Engine
from radixkv.audit.properties.material import LAYOUT
from radixkv.errors import TierError
from radixkv.index.below import Scope
from radixkv.tiers.disk.demotions import DiskDemotions
from radixkv.tiers.disk.records import DiskRecords
from radixkv.tiers.disk.tier import DiskTier
from radixkv.tiers.settings import DiskOptions
from radixkv.tiers.tiered_cache import TieredCache
from tests.tiers.disk.test_shares import NUM_BLOCKS, NUM_SLOTS, SharedOwner
from tests.tiers.support import FaultyFiles, failing
from tests.tiers.support import patience as patience
from tests.tiers.test_loading import SECRET
from tests.tiers.test_tiered_cache import PROMPT, SIZE
from tests.waiting import LIMIT_S, ended, eventually, is_set

pytestmark = pytest.mark.slow

BANK = Tenant("a", guaranteed_blocks=24, max_blocks=24, mode="strict")
BURST = Tenant("a", guaranteed_blocks=12)
OTHERS = Tenant("b", guaranteed_blocks=4)
MINE, THEIRS = Namespace("a", "m"), Namespace("b", "m")
DESTROYING = "rename write sync remove"


class StrictOwner(SharedOwner):
    """A cache with host memory and a small disk, for a strict tenant and others."""

    def __init__(self, folder: Path, tenants: tuple[Tenant, ...], **disk: Any) -> None:
        size, files = 2 * 4096 + NUM_SLOTS * (4096 + 128), disk.pop("files", None) or FaultyFiles()
        self.cache = TieredCache(
            CacheConfig(NUM_BLOCKS, SIZE, LAYOUT, host_blocks=40, policy="lru"),
            disk=DiskOptions(folder, size, SECRET, files=files, **disk),
            fingerprint="toy",
        )
        self.engine = Engine(self.cache)
        for tenant in tenants:
            self.cache.add_tenant(tenant)

    def has_keys(self, tenant: str) -> bool:
        return self.disk.records.folder.is_known(tenant)

    def evict_host(self) -> None:
        """Leave only the disk what it has."""
        self.evict()
        with self.below.gate:
            self.below.host.cache.evict(self.below.num_slots)


@contextmanager
def owned(folder: Path, *tenants: Tenant, **disk: Any) -> Iterator[StrictOwner]:
    owner = StrictOwner(folder, tenants or (BANK, OTHERS), **disk)
    try:
        yield owner
        owner.disk.records._table.check()
    finally:
        owner.cache.close()


def prompt(number: int) -> list[int]:
    return [100 * number + each for each in range(21)]


def written(folder: Path, *tenants: str) -> None:
    """Make a folder that has ten records of each of these tenants, none of which is strict."""
    with owned(folder, BURST, OTHERS) as owner:
        for tenant in tenants:
            owner.stored(tenant, PROMPT, 10)


# --- nothing goes there


def check_nothing_is_stored(folder: Path, **disk: Any) -> None:
    with owned(folder, **disk) as owner:
        for number in range(8):  # more than the cache and host memory hold
            owner.ask(prompt(number), MINE)
            owner.ask(prompt(number), THEIRS)
            owner.evict()
        owner.evict_host()
        owner.ask(PROMPT, MINE)
        assert eventually(owner.is_stored) and owner.records("a") == 0 < owner.records("b")
    with owned(folder, **disk) as owner:  # the close has stored what was left
        assert not owner.has_keys("a") and owner.records("b") > 0


@pytest.mark.parametrize("bytes_per_s", [None, 1e9])
def test_nothing_of_a_strict_tenant_reaches_the_disk(tmp_path: Path, bytes_per_s: float | None) -> None:
    """Neither what is saved, nor what leaves host memory, nor what is there at the end."""
    check_nothing_is_stored(tmp_path / "disk", bytes_per_s=bytes_per_s)


def test_nor_when_the_disk_is_full(tmp_path: Path) -> None:
    with owned(tmp_path / "disk") as owner:
        owner.flood("b")
        assert owner.disk.records.is_full
        for number in range(8):
            owner.ask(prompt(number), MINE)
            owner.evict()
        owner.evict_host()
        assert eventually(owner.is_stored) and not owner.has_keys("a")


def test_it_has_its_share_of_host_memory_alone(tmp_path: Path) -> None:
    with owned(tmp_path / "disk") as owner:
        owner.ask(PROMPT, MINE)
        owner.flood("b")
        assert owner.loaded(PROMPT, "a") == 40
        owner.evict_host()
        assert owner.loaded(PROMPT, "a") == 0, "it was in host memory alone"


def test_the_write_budget_is_that_of_the_others(tmp_path: Path) -> None:
    with owned(tmp_path / "disk", bytes_per_s=1e9) as owner:
        owner.ask(PROMPT, MINE)
        budget = owner.disk.demotions._budget
        assert budget is not None and not budget._parts
        assert owner.cache.tier_counts()["disk"]["unchosen_blocks"] == 0


def check_nothing_is_looked_for(folder: Path) -> None:
    written(folder, "a", "b")
    with owned(folder) as owner, pytest.MonkeyPatch.context() as patch:
        for call in ("locate", "load", "store", "num_missing", "learn_generation"):
            original = getattr(owner.disk.records, call)

            def of_others(first: Any, *more: Any, original: Any = original, **named: Any) -> Any:
                assert "a" not in (first, getattr(first, "tenant", None)), "the disk is asked for it"
                return original(first, *more, **named)

            patch.setattr(owner.disk.records, call, of_others)
        owner.cache.announce(MINE, PROMPT)
        owner.cache.prefetch(MINE, PROMPT)
        assert owner.ask(PROMPT, MINE) == (0, 41)
        owner.evict()
        assert owner.ask(PROMPT, MINE)[0] == 40, "from host memory"
        assert eventually(owner.is_quiet)
        assert owner.below.counts()["host"]["errors"] == 0, (
            "an error in the tiers is counted, and requests go on"
        )


def test_nothing_of_a_strict_tenant_is_looked_for(tmp_path: Path) -> None:
    check_nothing_is_looked_for(tmp_path / "disk")


# --- what is there is destroyed


def check_old_records_are_destroyed(folder: Path) -> None:
    """``folder`` has records, maybe of a version in which the tenant had a part of the disk as a strict one."""
    written(folder, "a", "b")
    check_old_records_are_gone(folder)


def check_old_records_are_gone(folder: Path) -> None:
    with owned(folder) as owner:
        assert eventually(lambda: not owner.cache.pending())
        assert owner.records("a") == 0 and not owner.has_keys("a") and owner.records("b") == 10
        assert owner.loaded(PROMPT, "a") == 0 and owner.loaded(PROMPT, "b") == 40
        num_syncs = owner.disk.records.durations["sync"].count
        owner.cache.add_tenant(BANK)
        assert not owner.cache.pending() and owner.disk.records.durations["sync"].count == num_syncs
    with owned(folder, BURST, OTHERS) as owner:
        assert owner.loaded(PROMPT, "a") == 0 and owner.loaded(PROMPT, "b") == 40


def test_a_folder_with_records_of_a_strict_tenant_is_opened_without_them(tmp_path: Path) -> None:
    check_old_records_are_destroyed(tmp_path / "disk")


def check_a_tenant_that_becomes_strict_leaves(folder: Path) -> None:
    with owned(folder, BURST, OTHERS) as owner:
        owner.stored("b", PROMPT, 10)
        for _ in range(2):
            owner.stored("a", PROMPT, 10)
            assert owner.quota("a").guaranteed == 24
            owner.cache.add_tenant(BANK)
            assert eventually(lambda: not owner.cache.pending())
            assert owner.records("a") == 0 and not owner.has_keys("a")
            owner.evict_host()
            assert owner.loaded(PROMPT, "a") == 0 and owner.records("b") == 10
            owner.cache.add_tenant(BURST)  # from now on it is there again
        owner.stored("a", PROMPT, 10)
        owner.evict_host()
        assert owner.loaded(PROMPT, "a") == 40


def test_a_tenant_that_becomes_strict_leaves_the_disk(tmp_path: Path) -> None:
    check_a_tenant_that_becomes_strict_leaves(tmp_path / "disk")


def test_it_is_pending_until_the_disk_can_destroy_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.01)
    written(tmp_path / "disk", "a", "b")
    files = FaultyFiles()
    with owned(tmp_path / "disk", OTHERS, files=files) as owner:
        files.before = failing(DESTROYING)
        owner.cache.add_tenant(BANK)
        assert owner.cache.pending().tenants == {"a"} == owner.cache.pending("a").tenants
        assert owner.cache.tier_counts()["disk"]["owed_purges"] == 1
        assert owner.loaded(PROMPT, "a") == 0 and owner.loaded(PROMPT, "b") == 40
        owner.cache.add_tenant(BURST)
        assert owner.loaded(PROMPT, "a") == 0, "nothing is served before"
        owner.cache.add_tenant(BANK)
        files.before = lambda call: None
        assert eventually(lambda: not owner.cache.pending()) and not owner.has_keys("a")


def test_a_close_names_it_if_the_disk_could_not_destroy_it(tmp_path: Path) -> None:
    written(tmp_path / "disk", "a", "b")
    files = FaultyFiles()
    message = r"may still have the records of 1 strict tenants \('a'\): .*Input/output error"
    with (
        pytest.raises(TierError, match=message),
        owned(tmp_path / "disk", OTHERS, files=files) as owner,
    ):
        files.before = failing(DESTROYING)
        owner.cache.add_tenant(BANK)
    check_old_records_are_gone(tmp_path / "disk")


def test_what_is_on_its_way_to_the_disk_is_not_there_in_the_end(tmp_path: Path) -> None:
    """A store that runs when the tenant becomes strict, what waits behind it, and what leaves host memory then."""
    released, num_held = threading.Event(), threading.Semaphore(0)

    def before(name: str) -> None:
        if name == "write" and is_armed:
            num_held.release()
            is_set(released)

    is_armed = False
    with owned(tmp_path / "disk", BURST, OTHERS, files=FaultyFiles(before)) as owner:
        owner.stored("b", PROMPT, 10)
        is_armed = True
        owner.ask(PROMPT, MINE)
        owner.evict()
        with owner.below.gate:
            owner.below.tick()
        assert num_held.acquire(timeout=LIMIT_S)
        owner.cache.add_tenant(BANK, wait_s=0)
        is_armed = False
        released.set()
        assert eventually(lambda: owner.is_stored() and not owner.cache.pending())
        assert owner.records("a") == 0 and owner.records("b") == 10
    with owned(tmp_path / "disk") as owner:
        assert owner.records("a") == 0


# --- nothing waits for the disk


def check_a_hang_delays_nothing(folder: Path, most_s: float = LIMIT_S) -> None:
    """Whatever a strict tenant does while the disk hangs is done before the disk goes on.

    ``most_s``: how long that is waited for, if it isn't so.
    """
    written(folder, "b")
    released, is_armed, num_hung = threading.Event(), threading.Event(), threading.Semaphore(0)

    def before(name: str) -> None:
        if is_armed.is_set() and threading.current_thread().name.startswith("radixkv-tier-"):
            num_hung.release()
            released.wait(LIMIT_S)

    def life() -> None:
        owner.ask(PROMPT, MINE)
        owner.evict()
        owner.cache.prefetch(MINE, PROMPT)
        assert owner.ask(PROMPT, MINE)[0] == 40
        owner.cache.clear(MINE)
        owner.cache.purge("a")
        assert not owner.cache.forget_in_tiers(Scope("a")) and not owner.cache.pending("a")
        owner.cache.add_tenant(BANK)
        done.set()

    done = threading.Event()
    with owned(folder, files=FaultyFiles(before)) as owner:
        owner.evict_host()
        with owner.below.gate:
            assert eventually(lambda: owner.disk.purges.is_known("b"))
        is_armed.set()
        purging = threading.Thread(target=partial(owner.cache.purge, "b"))
        living = threading.Thread(target=life)
        try:
            with owner.cache.open(THEIRS, PROMPT) as sequence:
                assert sequence.loading is not None
                sequence.loading.poll()
                assert num_hung.acquire(timeout=LIMIT_S)
                purging.start()
                assert num_hung.acquire(timeout=LIMIT_S)
                living.start()
                assert done.wait(most_s), "it waits for others, or for the disk"
        finally:
            released.set()
            ended(purging)
            ended(living)


def test_a_disk_that_hangs_delays_nothing_of_a_strict_tenant(tmp_path: Path) -> None:
    check_a_hang_delays_nothing(tmp_path / "disk")


def traffic_of(folder: Path, is_flooded: bool) -> list[object]:
    """What a strict tenant notices of a fixed traffic: tokens loaded and computed, and its blocks in host memory."""
    dice, found = random.Random(5), list[object]()
    with owned(folder) as owner:
        for number in range(60):
            ids = prompt(dice.randrange(9))
            if is_flooded:
                for other in range(3):
                    owner.ask(prompt(10 * number + other), THEIRS)
            if number % 20 == 19:
                owner.cache.purge("a")
            with owner.below.gate:
                usage = owner.below.host.cache.tenant_stats("a").resident_blocks
            found.append((owner.ask(ids, MINE), usage))
            owner.evict()
    return found


def test_a_strict_tenant_notices_nothing_of_a_flood(tmp_path: Path) -> None:
    quiet, flooded = traffic_of(tmp_path / "quiet", False), traffic_of(tmp_path / "flooded", True)
    assert quiet == flooded and sum(each[0][0] for each in quiet) > 100  # type: ignore[index]


# --- planted bugs


def serves_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "serves", lambda self, tenant: True)


def stores_of_all(patch: pytest.MonkeyPatch) -> None:
    made = DiskDemotions.__init__

    def make(self: DiskDemotions, *given: Any) -> None:
        made(self, *given)
        self._serves = lambda tenant: True

    patch.setattr(DiskDemotions, "__init__", make)


def leaves_old_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "_leave_out", lambda self, tenant: self._strict.add(tenant))


def forgets_without_destroying(patch: pytest.MonkeyPatch) -> None:
    """The records aren't found any more in this process, but their keys stay."""
    patch.setattr(DiskRecords, "purge", lambda self, tenant: len(self._drop_owner(self._owner_of(tenant))))


def owes_every_purge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "may_have", lambda self, tenant: True)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (serves_all, check_nothing_is_stored),
        (stores_of_all, check_nothing_is_stored),
        (serves_all, check_nothing_is_looked_for),
        (leaves_old_records, check_old_records_are_destroyed),
        (leaves_old_records, check_a_tenant_that_becomes_strict_leaves),
        (forgets_without_destroying, check_old_records_are_destroyed),
        (owes_every_purge, partial(check_a_hang_delays_nothing, most_s=0.5)),
    ],
)
def test_the_checks_find_planted_bugs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[Path], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(tmp_path / "x")
