"""A strict tenant has slots, threads, rows and rests of the disk for itself: no flood, hang or rest of others shows."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from radixkv import CacheConfig, Namespace, Tenant
from radixkv.audit.oracle import Engine
from radixkv.audit.properties.material import LAYOUT
from radixkv.clock import ManualClock, monotonic
from radixkv.tiers import disk_level
from radixkv.tiers.disk import tier as disk_tier
from radixkv.tiers.disk.lanes import USED_PART
from radixkv.tiers.disk.patience import NUM_SAMPLES
from radixkv.tiers.disk.slots import SlotTable
from radixkv.tiers.disk.tier import DiskTier
from radixkv.tiers.disk_level import DiskLevel
from radixkv.tiers.host.staging import StagingRows
from radixkv.tiers.settings import DiskOptions
from radixkv.tiers.tiered_cache import TieredCache
from tests.tiers.disk.test_shares import NUM_BLOCKS, NUM_SLOTS, SharedOwner
from tests.tiers.support import FaultyFiles, failing
from tests.tiers.support import patience as patience
from tests.tiers.test_cache_tiers import PROMPT, SIZE
from tests.tiers.test_loading import SECRET, Reads
from tests.waiting import LIMIT_S, eventually, is_set

pytestmark = pytest.mark.slow

BANK = Tenant("a", guaranteed_blocks=12, max_blocks=12, mode="strict")
OWN = BANK.guaranteed_blocks * NUM_SLOTS // NUM_BLOCKS
BANDWIDTH = 1e12
OTHERS = Tenant("b", guaranteed_blocks=4)


class StrictOwner(SharedOwner):
    """A cache with a small disk, for a strict tenant and others."""

    def __init__(
        self, folder: Path, files: FaultyFiles | None = None, tenants: tuple[Tenant, ...] = (BANK, OTHERS)
    ) -> None:
        size = 2 * 4096 + NUM_SLOTS * (4096 + 128)
        self.cache = TieredCache(
            CacheConfig(NUM_BLOCKS, SIZE, LAYOUT, host_blocks=40, policy="lru"),
            disk=DiskOptions(folder, size, SECRET, files=files or FaultyFiles(), bandwidth=BANDWIDTH),
            fingerprint="toy",
        )
        self.engine = Engine(self.cache)
        for tenant in tenants:
            self.cache.add_tenant(tenant)

    def evict_host(self) -> None:
        """Leave only the disk what it has."""
        self.evict()
        with self.below.gate:
            self.below.level.cache.evict(self.below.num_slots)

    def is_settled(self, tenant: str) -> bool:
        """Whether nothing of a tenant's lane waits for the disk, whatever the others do. Lets the tiers go on."""
        with self.below.gate:
            self.below.tick()
            return self.disk.lane_of(tenant).stores.is_idle

    def ask_again(self, ids: list[int], tenant: str = "a") -> int:
        """Serve a prompt that may be on the disk alone. Returns the tokens that were loaded."""
        self.evict_host()
        assert eventually(lambda: self.is_settled(tenant) and self.disk.debts.is_known(tenant))
        return self.loaded(ids, tenant)


@contextmanager
def strict(folder: Path, files: FaultyFiles | None = None, *tenants: Tenant) -> Iterator[StrictOwner]:
    owner = StrictOwner(folder, files, tenants or (BANK, OTHERS))
    try:
        yield owner
        owner.disk.tier._table.check()
        assert eventually(lambda: not owner.disk.num_used_rows), "all staging memory is given back"
    finally:
        owner.cache.close()


def prompt(number: int) -> list[int]:
    return [100 * number + each for each in range(21)]


# --- slots


def check_a_flood_takes_nothing(folder: Path) -> None:
    with strict(folder) as owner:
        assert owner.disk.tier.partition("a") == OWN
        owner.stored("a", PROMPT, 10)
        owner.flood("b")
        assert owner.records("a") == 10 and owner.records("b") == NUM_SLOTS - OWN
        assert owner.ask_again(PROMPT) == 40


def test_a_flood_takes_nothing_of_a_partition(tmp_path: Path) -> None:
    check_a_flood_takes_nothing(tmp_path / "disk")


def test_its_own_flood_takes_nothing_of_others(tmp_path: Path) -> None:
    with strict(tmp_path / "disk") as owner:
        owner.stored("b", PROMPT, 10)
        owner.flood("a")
        assert owner.records("a") == OWN and owner.records("b") == 10
        assert owner.ask_again(PROMPT, "b") == 40


def test_a_restart_keeps_its_records(tmp_path: Path) -> None:
    with strict(tmp_path / "disk") as owner:
        owner.stored("a", PROMPT, 10)
        owner.flood("b")
    with strict(tmp_path / "disk") as owner:
        assert owner.records("a") == 10
        owner.flood("b")
        assert owner.records("a") == 10 and owner.ask_again(PROMPT) == 40


def test_a_purge_destroys_its_records_alone(tmp_path: Path) -> None:
    with strict(tmp_path / "disk") as owner:
        owner.stored("a", PROMPT, 10)
        owner.stored("b", PROMPT, 10)
        owner.cache.purge("a")
        assert eventually(lambda: owner.records("a") == 0) and not owner.cache.pending()
        assert owner.records("b") == 10 and owner.ask_again(PROMPT) == 0
        owner.stored("a", PROMPT, 10)
        assert owner.ask_again(PROMPT) == 40, "it is served again"
    with strict(tmp_path / "disk") as owner:
        assert owner.ask_again(PROMPT) == 40


# --- changes


def test_a_tenant_becomes_strict_and_shared_again(tmp_path: Path) -> None:
    shared = Tenant("a", guaranteed_blocks=12)
    with strict(tmp_path / "disk", None, shared, OTHERS) as owner:
        owner.stored("a", PROMPT, 10)
        num_rows = owner.disk.shared.rows.num_free
        for _ in range(2):
            owner.cache.add_tenant(BANK)
            assert owner.disk.own_lane("a") is not None and owner.disk.tier.partition("a") == OWN
            assert owner.records("a") == 10 and owner.ask_again(PROMPT) == 40
            owner.cache.add_tenant(shared)
            assert owner.disk.own_lane("a") is None and owner.disk.tier.partition("a") == 0
            assert owner.quota("a").guaranteed == OWN and owner.ask_again(PROMPT) == 40
            assert eventually(lambda: owner.disk.shared.rows.num_free == num_rows)
        owner.cache.add_tenant(BANK)
        owner.cache.remove_tenant("a")
        assert owner.disk.own_lane("a") is None and owner.disk.tier.partition("a") == 0
        assert owner.disk.shared.rows.num_free == num_rows


def test_another_guarantee_changes_the_partition(tmp_path: Path) -> None:
    with strict(tmp_path / "disk") as owner:
        owner.stored("a", PROMPT, 10)
        owner.flood("b")
        owner.cache.add_tenant(Tenant("a", guaranteed_blocks=20, max_blocks=20, mode="strict"))
        assert owner.disk.tier.partition("a") == 40 and owner.records("b") == NUM_SLOTS - 40
        owner.cache.add_tenant(Tenant("a", guaranteed_blocks=4, max_blocks=4, mode="strict"))
        assert owner.disk.tier.partition("a") == 8 and owner.records("a") == 8


def test_what_does_not_fit_leaves_nothing_on_disk_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_level, "LEAST_ROWS", 100)
    with strict(tmp_path / "disk") as owner:
        (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert "nothing of strict tenant 'a' is kept on disk: staging rows=100" in record.getMessage()
        owner.ask(PROMPT, Namespace("a", "m"))
        owner.stored("b", PROMPT, 10)
        assert owner.records("a") == 0 and owner.disk.own_lane("a") is None
        assert owner.ask_again(PROMPT) == 0
        monkeypatch.setattr(disk_level, "LEAST_ROWS", 2)
        owner.cache.add_tenant(OTHERS)
        assert owner.disk.tier.partition("a") == OWN, "the next change gives it"
        owner.stored("a", PROMPT, 10)
        assert owner.ask_again(PROMPT) == 40


def test_the_same_settings_again_end_no_prefetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs goes on, and gives its row back; another guarantee ends it."""
    reads = Reads()
    with strict(tmp_path / "disk", FaultyFiles(reads)) as owner:
        owner.stored("a", PROMPT, 10)
        owner.evict_host()
        assert eventually(lambda: owner.disk.debts.is_known("a"))
        reads.is_armed = True
        owner.cache.prefetch(Namespace("a", "m"), PROMPT)
        assert eventually(lambda: owner.disk.lane_of("a").promotions.num_running == 1)
        held, was_off = owner.below._own_prefetches["a"], list[bool]()
        own_slots = owner.below._set_own_slots

        def set_own_slots(tenant: str, num_slots: int) -> None:
            was_off.append(tenant in owner.below._off_disk)
            own_slots(tenant, num_slots)

        monkeypatch.setattr(owner.below, "_set_own_slots", set_own_slots)
        owner.cache.add_tenant(BANK)
        assert owner.below._own_prefetches["a"] is held and not owner.is_quiet("a")
        assert was_off == [False], "a tick in between would end what comes in parts"
        reads.open()
        assert eventually(lambda: owner.is_quiet("a") and not owner.disk.num_used_rows)
        assert owner.below.level.cache.match(Namespace("a", "m"), PROMPT).num_blocks > 0
        assert owner.below.level.cache.stats().num_sequences == 0
        owner.cache.add_tenant(Tenant("a", guaranteed_blocks=20, max_blocks=20, mode="strict"))
        assert owner.below._own_prefetches["a"] is not held


@pytest.mark.parametrize("guaranteed", [20, None])
def test_another_lane_ends_what_the_prefetch_began(tmp_path: Path, guaranteed: int | None) -> None:
    reads = Reads()
    with strict(tmp_path / "disk", FaultyFiles(reads)) as owner:
        owner.stored("a", PROMPT, 10)
        owner.evict_host()
        assert eventually(lambda: owner.disk.debts.is_known("a"))
        reads.is_armed = True
        for number in range(3):
            owner.cache.prefetch(Namespace("a", "m"), PROMPT[: 41 - number])
        assert eventually(lambda: owner.disk.lane_of("a").promotions.num_running == 1)
        held = owner.below._own_prefetches["a"]
        if guaranteed is None:
            owner.cache.add_tenant(Tenant("a", guaranteed_blocks=12))
        else:
            owner.cache.add_tenant(
                Tenant("a", guaranteed_blocks=guaranteed, max_blocks=guaranteed, mode="strict")
            )
        assert not held.is_busy
        assert eventually(lambda: owner.below.level.cache.stats().num_sequences == 0)
        reads.open()


# --- noninterference


def traffic_of(folder: Path, is_flooded: bool) -> list[object]:
    """What a strict tenant notices of a fixed traffic: tokens loaded, records, what is stored, rests."""
    dice, found = random.Random(5), list[object]()
    with strict(folder) as owner:
        for number in range(30):
            ids = prompt(dice.randrange(9))
            if is_flooded:
                for other in range(3):
                    owner.ask(prompt(10 * number + other), Namespace("b", "m"))
            loaded = owner.ask_again(ids)
            owner.ask(ids, Namespace("a", "m"))
            owner.evict()
            assert eventually(lambda: owner.is_settled("a"))
            lane = owner.disk.lane_of("a")
            counts = lane.stores.take_counts() | lane.patience.take_counts()
            found.append((loaded, owner.records("a"), counts, lane.patience.patience_s(10**9)))
    return found


def check_noninterference(folder: Path) -> None:
    folder.mkdir()
    assert traffic_of(folder / "quiet", False) == traffic_of(folder / "flooded", True)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread a lane: the order of two loads at once is nobody's."""
    monkeypatch.setattr(disk_tier, "LANE_THREADS", 1)


def test_a_strict_tenant_notices_nothing_of_a_flood(tmp_path: Path, in_turn: None) -> None:
    quiet = traffic_of(tmp_path / "disk", False)
    assert sum(each[0] for each in quiet) > 100  # type: ignore[index]
    assert max(each[1] for each in quiet) == OWN  # type: ignore[index]
    check_noninterference(tmp_path / "x")


def check_a_hang_delays_nobody_else(folder: Path, most_s: float = LIMIT_S) -> None:
    """``most_s``: how long a load that waits for others is waited for. These hang until it is over."""
    with strict(folder) as owner:
        owner.stored("a", PROMPT, 10)
        owner.stored("b", PROMPT, 10)
    released, is_armed = threading.Event(), threading.Event()
    left, num_hung = threading.Semaphore(4), threading.Semaphore(0)

    def before(name: str) -> None:
        if name == "read" and is_armed.is_set() and left.acquire(blocking=False):
            num_hung.release()
            is_set(released)

    with strict(folder, FaultyFiles(before)) as owner:
        owner.evict_host()
        with owner.below.gate:
            assert eventually(lambda: owner.disk.debts.is_known("a") and owner.disk.debts.is_known("b"))
        is_armed.set()
        try:
            with owner.cache.open(Namespace("b", "m"), PROMPT) as sequence:
                loading = sequence.loading
                assert loading is not None
                loading.poll()
                for _ in range(4):
                    assert num_hung.acquire(timeout=LIMIT_S), "all threads of the others hang"
                with owner.cache.open(Namespace("a", "m"), PROMPT) as own:
                    assert own.loading is not None and own.loading.wait(most_s), "it waits for others"
                    assert own.loading.num_loaded_tokens == 40
                assert not loading.is_done
        finally:
            released.set()


def test_a_hang_of_others_delays_no_load(tmp_path: Path) -> None:
    check_a_hang_delays_nobody_else(tmp_path / "disk")


def check_rests_are_apart(folder: Path) -> None:
    with strict(folder) as owner:
        for slow, other in (("a", "b"), ("b", "a")):
            owner.disk.lane_of(slow).patience.rest()
            places = [
                owner.disk.lane_of(each).promotions.place_of(Namespace(each, "m")) for each in (slow, other)
            ]
            assert places[0] is None and places[1] is not None
            owner.disk.lane_of(slow).patience._rests_until = 0.0


def test_rests_are_apart(tmp_path: Path) -> None:
    check_rests_are_apart(tmp_path / "disk")


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_the_metric_shows_a_rest_of_any_lane(tmp_path: Path, tenant: str) -> None:
    """It doesn't say of which one."""
    with strict(tmp_path / "disk") as owner:
        assert owner.cache.tier_counts()["disk"]["open"] == 1
        owner.disk.lane_of(tenant).patience.rest()
        assert owner.cache.tier_counts()["disk"]["open"] == 0


def test_the_metric_shows_a_lane_whose_disk_fails(tmp_path: Path) -> None:
    files = FaultyFiles()
    with strict(tmp_path / "disk", files) as owner:
        owner.stored("a", PROMPT, 10)
        files.before = failing("read", times=100)
        assert owner.ask_again(PROMPT) == 0
        assert owner.disk.tier.state == "open" and owner.disk.tier.state_for("a") == "degraded"
        assert owner.cache.tier_counts()["disk"]["open"] == 0


def test_others_staging_memory_is_apart(tmp_path: Path) -> None:
    with strict(tmp_path / "disk") as owner, owner.below.gate:
        rows, num_own = owner.disk.shared.rows, owner.disk.lane_of("a").rows.num_free
        taken = [rows.take_one("b") for _ in range(rows.num_free)]
        assert owner.disk.lane_of("a").rows.num_free == num_own >= 1
        for row in taken:
            rows.give(row)


# --- planted bugs


def shares_a_lane(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskLevel, "lane_of", lambda self, tenant: self.shared)


def shares_threads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "_lane_of", lambda self, tenant: self._shared)


def shares_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "set_partition", lambda self, name, size: None)
    patch.setattr(SlotTable, "partition", lambda self, name: OWN)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (shares_a_lane, check_rests_are_apart),
        (shares_threads, partial(check_a_hang_delays_nobody_else, most_s=0.2)),
        (shares_slots, check_a_flood_takes_nothing),
        (shares_slots, check_noninterference),
    ],
)
def test_the_checks_find_planted_bugs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_turn: None,
    plant: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[Path], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(tmp_path / "x")


# --- shares of the device and of staging memory


def test_lanes_have_their_parts_of_the_bandwidth(tmp_path: Path) -> None:
    with strict(tmp_path / "disk") as owner:
        tier = owner.disk.tier
        rates = [tier._lane_of(each).io._pace.bytes_per_s for each in ("a", "b")]
        assert rates == pytest.approx(
            [USED_PART * BANDWIDTH * OWN / NUM_SLOTS, USED_PART * BANDWIDTH * (1 - OWN / NUM_SLOTS)]
        )
        owner.cache.remove_tenant("a")
        assert tier._shared.io._pace.bytes_per_s is None, "nobody needs a part of it any more"


class Rows:
    num_staging = 12

    def slot_bytes(self, slot: int) -> memoryview:
        return memoryview(bytearray(1))

    def staging_bytes(self, row: int) -> memoryview:
        return memoryview(bytearray(1))


def test_rows_in_use_follow_to_a_part_and_back() -> None:
    whole = StagingRows.of(Rows(), 2, ManualClock())
    taken = [whole.take_one("b") for _ in range(8)]
    part = whole.part(4)
    assert (whole.num_rows, whole.num_free, part.num_free, part.num_ahead, part.num_used) == (6, 0, 1, 1, 0)
    for row in taken[:2]:
        whole.give(row)
    assert (whole.num_free, part.num_free, whole.num_used) == (0, 3, 6)
    mine, ahead = part.take_one("a"), part.take_ahead()
    assert part.num_used == 2
    part.end()
    assert part.has_ended and (whole.num_free, whole.num_rows) == (2, 10)
    part.give(mine)
    part.give(ahead)
    for row in taken[2:]:
        whole.give(row)
    assert (whole.num_free, whole.num_ahead, whole.num_used, part.num_used) == (10, 2, 0, 0)
    assert sorted(whole._free_rows) == [*range(10)]


def test_all_lanes_learn_how_long_computing_takes(tmp_path: Path) -> None:
    with strict(tmp_path / "disk") as owner:
        lanes = [owner.disk.shared, owner.disk.lane_of("a")]
        with owner.below.gate:
            for _ in range(NUM_SAMPLES):
                owner.below.computed(1_000, 0.5)
        assert [lane.patience._seconds_a_token for lane in lanes] == [5e-4, 5e-4]
        for lane in lanes:
            lane.patience._clock = ManualClock()
        for step in range(NUM_SAMPLES):
            with owner.below.gate:
                owner.disk.begin_step(step, 1_000)
                for lane in lanes:
                    lane.patience._clock.advance(1.0)  # type: ignore[attr-defined]
                owner.disk.computed([step])
        assert [lane.patience._seconds_a_token for lane in lanes] == [1e-3, 1e-3]
        for lane in lanes:
            lane.patience._clock = monotonic


def test_what_waits_in_a_lane_that_ends_is_counted(tmp_path: Path) -> None:
    with strict(tmp_path / "disk") as owner:
        stores = owner.disk.lane_of("a").stores
        for _ in range(2):
            owner.disk.lane_of("a").patience.rest()
        owner.ask(PROMPT, Namespace("a", "m"))
        assert stores.num_waiting
        before = owner.cache.tier_counts()["disk"]["lost_blocks"]
        owner.cache.add_tenant(replace(BANK, guaranteed_blocks=8, max_blocks=8))
        assert not stores.num_waiting
        assert eventually(lambda: owner.cache.tier_counts()["disk"]["lost_blocks"] == before + 10)
