"""The disk below host memory, driven by the small engine of ``tests/engines/vllm/test_steps`` over a real folder.

Every block that a request gets is compared with what is right for that request. So a record of another tenant, an
older version or another prompt shows, whatever path it took.
"""

from __future__ import annotations

import os
import random
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.clock import ManualClock
from radixkv.engines.vllm.settings import ConnectorSettings
from radixkv.engines.vllm.steps import VllmSteps
from radixkv.engines.vllm.tenants import LevelTenants
from radixkv.errors import ConfigError
from radixkv.files.system import Files
from radixkv.tenancy.request_keys import RequestFacts
from radixkv.tenancy.salt import SaltReader, make_salt
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.disk.records import DiskRecords, DiskSettings
from radixkv.tiers.disk.tier import DiskTier
from radixkv.tiers.disk.write_budget import WriteBudget
from radixkv.tiers.pending import Pending
from tests.engines.vllm.test_steps import KEYS, PLAIN, SIZE, Engine, Worker, ids_of
from tests.tiers.support import FaultyFiles
from tests.tiers.support import patience as patience
from tests.waiting import LIMIT_S, eventually, is_set

pytestmark = pytest.mark.slow

LIVES = max(int(os.environ.get("RADIXKV_EXAMPLES", "200")) // 100, 2)
SECRET = b"a secret of the fleet"
SLOTS = 510
"""Of the disk."""


class DiskEngine(Engine):
    """An engine over ``folder``, which it waits for by a clock that stands still. ``salts``: tenants come from them."""

    def __init__(
        self,
        folder: Path,
        num_slots: int = 64,
        *,
        files: Files | None = None,
        salts: SaltReader | None = None,
        fingerprint: bytes = bytes(32),
        late: bool = False,
        bytes_per_s: float | None = None,
        disk_slots: int = SLOTS,
    ) -> None:
        super().__init__(num_slots, late=late)
        self.level = VllmSteps(num_slots, SIZE, policy="lru", salts=salts)
        self.clock = ManualClock(1_000.0)
        self.workers = [Worker(num_slots, 40, 0, num_staging=16)]
        record_bytes = self.workers[0].block_bytes
        settings = DiskSettings(
            folder,
            2 * 4096 + disk_slots * (4096 + 128),
            record_bytes,
            segment_tokens=SIZE,
            fingerprint=fingerprint,
            sync_s=0.01,
        )
        generation = (lambda tenant: 0) if salts is None else salts.generation
        self.tenants = LevelTenants(self.level)
        tier = DiskRecords(settings, [SECRET], files=files or FaultyFiles())
        self.disk = DiskTier(
            tier,
            self.level.index,
            self.workers[0],
            self.level.fill,
            fleet_generation=generation,
            bytes_per_s=bytes_per_s,
            clock=self.clock,
        )
        self.level.disk = self.disk

    def step(self, budget: int = 24) -> None:
        """Step. One that computes nothing waits a moment for the disk, if that does something."""
        before = self.num_computed
        self.tenants.begin_step()
        super().step(budget)
        job = next((each for each in self._jobs() if not each.is_done), None)
        if job is not None and self.num_computed == before:
            job.poll(0.01)

    def _jobs(self) -> list[Job]:
        """What the disk does for promotions, stores, a reset, and tenants whose purges it learns."""
        purges, running = self.disk.purges, self.disk.promotions._promotions.values()
        jobs = [job for each in chain(running, self.disk.demotions._stores) for job in each.jobs]
        resetting = [] if purges._resetting is None else [purges._resetting]
        return [*jobs, *(each.job for each in purges._learning.values()), *resetting]

    def run(self, max_steps: int = 60_000) -> None:
        """Run until all is done, the stores too."""
        super().run(max_steps)
        for _ in range(60_000):
            if not (self.disk.num_running or self.disk.demotions._waiting or self.disk.purges.is_resetting):
                break
            self.step(0)
            while self.outputs:
                self._take(*self.outputs.popleft())
        assert not self.disk.num_running and not self.disk.demotions._waiting

    def again(self, name: str, ids: list[int], facts: RequestFacts = PLAIN) -> int:
        """Run a request alone, and return how many tokens it computed."""
        before = self.num_computed
        self.add(name, ids, facts)
        self.run()
        return self.num_computed - before

    def promoting(self) -> None:
        """Admit requests until the disk brings something."""

        def is_promoting() -> bool:
            self._admit()
            return self.disk.promotions.num_running > 0

        assert eventually(is_promoting)

    def stop(self) -> None:
        self.check()
        assert sorted(self.disk.rows._free_rows) == list(range(16)), "staging memory is given back"
        self.disk.close()


def test_a_restart_finds_what_was_saved(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    assert engine.again("a", ids_of(41)) == 41
    engine.stop()
    engine = DiskEngine(tmp_path / "disk")
    assert engine.again("b", [*ids_of(41), 1, 2, 3]) == 4
    assert engine.disk.take_counts()["disk_loaded_blocks"] == 10
    assert engine.again("c", ids_of(41)) == 1, "it is in host memory again"
    assert engine.disk.take_counts()["disk_loaded_blocks"] == 0
    engine.stop()


def test_what_host_memory_evicted_comes_back(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk", num_slots=20)
    for seed in range(6):
        assert engine.again(f"a{seed}", ids_of(41, seed)) == 41
    assert engine.level.cache.stats().evicted_blocks >= 40
    for seed in range(6):
        assert engine.again(f"b{seed}", ids_of(41, seed)) == 1
    engine.stop()


def test_a_write_budget_bounds_what_is_written(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk", num_slots=64, bytes_per_s=1.0)
    record_bytes = engine.disk.records.settings.record_bytes
    budget = engine.disk.demotions._budget = WriteBudget(4.0 * record_bytes)
    for number in range(60):
        engine.clock.advance(1.0)
        engine.again(f"a{number}", ids_of(61, number))
    written = engine.disk.records.counts()["stored"]
    assert 4 * 59 <= written <= 4 * 61 + 16 and engine.disk.take_counts()["disk_unchosen_blocks"] > 60 * 8
    engine.clock.advance(9.0)
    engine.step(0)
    left = engine.disk.demotions.budget_bytes
    assert 0 < left == int(budget.left_bytes(engine.clock()))
    engine.clock.advance(2.0)
    engine.step(0)
    assert engine.disk.demotions.budget_bytes == left + 2 * 4 * record_bytes, "it grows without a store too"
    engine.stop()


def test_what_a_prompt_finds_in_memory_is_offered_again(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk", num_slots=64, bytes_per_s=1.0)
    budget = engine.disk.demotions._budget = WriteBudget(1e9)
    assert budget.spend("a", 2_000_000_000, engine.clock())
    engine.again("a", ids_of(41))
    assert engine.disk.take_counts()["disk_unchosen_blocks"] == 10, "the budget is overdrawn"
    engine.clock.advance(60.0)
    assert engine.again("b", [*ids_of(41), 1, 2, 3, 4]) == 5
    assert engine.disk.records.counts()["stored"] == 11
    assert engine.again("c", [*ids_of(41), 1, 2, 3, 4]) == 1
    assert engine.disk.records.counts()["stored"] == 11, "what is on disk is not offered again"
    engine.stop()


def test_only_the_missing_end_comes_from_the_disk(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    namespace = engine.level.cache.namespaces()[0]
    with engine.level.cache.open(namespace, ids_of(41)) as sequence:
        engine.level.cache.forget(sequence, 6 * SIZE)
    assert engine.again("b", ids_of(41)) == 1
    assert engine.disk.take_counts()["disk_loaded_blocks"] == 4
    engine.stop()


def test_two_requests_never_read_the_same_records(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    engine.stop()
    engine = DiskEngine(tmp_path / "disk")
    engine.add("b", ids_of(41))
    engine.add("c", [*ids_of(41), 7])
    engine.run()
    assert engine.num_computed == 1 + 2 and engine.disk.take_counts()["disk_loaded_blocks"] == 10
    engine.stop()


def test_requests_that_need_more_than_host_memory_use_what_they_read(tmp_path: Path) -> None:
    """What has come for one isn't evicted for the other before it is loaded."""
    engine = DiskEngine(tmp_path / "disk", num_slots=128)
    for seed in range(4):
        engine.again(f"a{seed}", ids_of(61, seed))
    engine.stop()
    engine = DiskEngine(tmp_path / "disk", num_slots=20)
    for seed in range(4):
        engine.add(f"b{seed}", ids_of(61, seed))
    engine.run()
    num_used = engine.disk.take_counts()["disk_loaded_blocks"]
    assert engine.num_computed == 4 * 61 - num_used * SIZE and num_used >= 15
    assert engine.disk.records.counts()["loaded"] == num_used
    engine.stop()


def test_a_request_waits_for_staging_memory(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk", num_slots=128)
    for seed in range(3):
        engine.again(f"a{seed}", ids_of(41, seed))
    engine.stop()
    engine = DiskEngine(tmp_path / "disk", num_slots=128)
    for seed in range(3):  # 30 blocks, and 16 rows
        engine.add(f"b{seed}", ids_of(41, seed))
    engine.run()
    assert engine.num_computed == 3 and engine.disk.take_counts()["disk_loaded_blocks"] == 30
    engine.stop()


def test_a_prompt_longer_than_staging_memory_comes_in_parts(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk", num_slots=128)
    engine.again("a", ids_of(30 * SIZE + 1))
    engine.stop()
    engine = DiskEngine(tmp_path / "disk", num_slots=128)
    assert engine.again("b", ids_of(30 * SIZE + 1)) == 1  # 16 rows
    assert engine.disk.take_counts()["disk_loaded_blocks"] == 30
    engine.stop()


def test_it_waits_a_moment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tiers.disk.patience.LEAST_WAIT_S", 0.0)
    engine = DiskEngine(tmp_path / "disk", num_slots=128)
    for seed in range(3):
        engine.again(f"a{seed}", ids_of(41, seed))
    engine.stop()
    engine = DiskEngine(tmp_path / "disk", num_slots=128)
    for seed in range(3):
        engine.add(f"b{seed}", ids_of(41, seed))
    engine.run()
    assert 3 <= engine.num_computed <= 3 + 2 * 40
    engine.stop()


def test_tenants_and_prompts_never_meet(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41), RequestFacts(cache_salt="one"))
    engine.stop()
    engine = DiskEngine(tmp_path / "disk")
    assert engine.again("b", ids_of(41), RequestFacts(cache_salt="two")) == 41
    assert engine.again("c", ids_of(41), RequestFacts(cache_salt="one", adapter="x")) == 41
    assert engine.again("d", [7, *ids_of(41)[1:]], RequestFacts(cache_salt="one")) == 41
    assert engine.again("e", ids_of(41), RequestFacts(cache_salt="one")) == 1
    engine.stop()


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    engine.stop()
    engine = DiskEngine(tmp_path / "disk", fingerprint=b"x" * 32)
    assert engine.again("b", ids_of(41)) == 41
    engine.stop()


def test_a_purge_reaches_the_disk_and_lasts(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    tenant = engine.level.cache.namespaces()[0].tenant
    engine.level.cache.purge(tenant)
    engine.disk.purges.add(tenant)
    assert Pending([engine.disk.purges], tenant).wait(LIMIT_S)
    assert engine.again("b", ids_of(41, 1)) == 41
    assert engine.disk.records.locate(engine.level.cache.namespaces()[0], _bytes(ids_of(41)), 0) == 0
    engine.stop()
    engine = DiskEngine(tmp_path / "disk")
    assert engine.again("c", ids_of(41)) == 41
    assert engine.again("d", ids_of(41, 1)) == 1, "what came after the purge is found"
    engine.stop()


def test_a_purge_that_only_the_cache_heard_of_is_applied_before_the_disk_serves(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk", num_slots=20)
    engine.again("a", ids_of(41))
    engine.level.cache.purge(engine.level.cache.namespaces()[0].tenant)
    engine.version += 1
    assert engine.again("b", ids_of(41)) == 41
    engine.stop()


def test_a_purge_that_the_disk_cannot_apply_holds_no_request_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    engine.level.cache.purge(engine.level.cache.namespaces()[0].tenant)
    engine.version += 1

    def failing(tenant: str) -> int:
        raise OSError("planted")

    monkeypatch.setattr(engine.disk.records, "purge", failing)
    monkeypatch.setattr("radixkv.tiers.pending.LEARNING_S", 0.1)
    engine.add("b", ids_of(41))
    engine.step()
    assert engine.num_computed == 41, "it waits"
    engine.clock.advance(0.1)
    Engine.run(engine)
    assert not engine.requests and engine.num_computed == 82
    assert engine.disk.take_counts()["disk_loaded_blocks"] == 0


def test_a_newer_salt_purges_what_an_earlier_process_left(tmp_path: Path) -> None:
    """The tenant was purged while this process was down: its gateway makes salts of a newer generation now."""
    for generation, num_computed in ((1, 41), (1, 1), (2, 41), (2, 1)):
        engine = DiskEngine(tmp_path / "disk", salts=SaltReader(KEYS))
        facts = RequestFacts(cache_salt=make_salt(KEYS, "acme", generation=generation))
        assert engine.again("a", ids_of(41), facts) == num_computed
        engine.stop()


def test_a_reset_forgets_the_disk_and_new_weights_are_not_found_after_a_restart(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    engine.level.reset()
    assert not engine.level.is_loading
    engine.version += 1
    engine.run()
    assert engine.again("b", ids_of(41)) == 41
    assert engine.again("c", ids_of(41)) == 1
    assert len(engine.disk.records) == 10
    engine.stop()
    engine = DiskEngine(tmp_path / "disk")
    assert engine.again("d", ids_of(41)) == 41, "these are the first weights again"
    engine.stop()
    engine = DiskEngine(tmp_path / "disk")
    engine.level.reset()
    engine.version += 1
    assert engine.again("e", ids_of(41)) == 41, "and these are others than the other process had"
    engine.stop()


def test_a_purge_during_a_promotion_leaves_nothing(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    engine.stop()
    engine = DiskEngine(tmp_path / "disk")
    engine.add("b", ids_of(41))
    engine.promoting()
    engine.level.cache.purge(engine.level._requests["b"].namespace.tenant)
    engine.version += 1
    engine.run()
    assert engine.num_computed == 41 and engine.num_loaded == 0
    engine.stop()


def test_a_request_that_ends_during_its_promotion_gives_all_back(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    engine.stop()
    engine = DiskEngine(tmp_path / "disk")
    request = engine.add("b", ids_of(41))
    engine.promoting()
    engine.end(request)
    engine.run()
    engine.stop()


def test_broken_records_are_computed(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    for seed in range(8):
        engine.again(f"a{seed}", ids_of(41, seed))
    engine.stop()
    slab = tmp_path / "disk" / "slab"
    content, dice = bytearray(slab.read_bytes()), random.Random(1)
    for at in dice.sample(range(len(content)), len(content) // 2000):
        content[at] ^= 1 << dice.randrange(8)
    slab.write_bytes(content)
    engine = DiskEngine(tmp_path / "disk")
    for seed in range(8):
        engine.again(f"b{seed}", ids_of(41, seed))
    assert engine.disk.take_counts()["disk_failed_blocks"] + engine.num_computed > 8
    engine.stop()


def test_a_disk_that_never_answers_costs_one_request_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.disk.patience.LEAST_WAIT_S", 0.1)
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    engine.again("b", ids_of(41, 1))
    engine.stop()
    released, files = threading.Event(), FaultyFiles()
    engine = DiskEngine(tmp_path / "disk", files=files)
    patience = engine.disk.patience
    patience.computed_in(41 * 1e-3, 41)
    waits_s = patience.patience_s(40)
    files.before = lambda call: is_set(released) if call == "read" else None
    engine.add("c", ids_of(41))
    engine.promoting()
    engine.clock.advance(0.9 * waits_s)
    engine.step()
    assert engine.requests[0].status == "waiting"
    engine.clock.advance(0.2 * waits_s)
    Engine.run(engine)
    counts = engine.disk.take_counts()
    assert engine.num_computed == 41 and counts["disk_timeouts"] == 1 and counts["disk_failed_blocks"] == 10
    engine.add("d", ids_of(41, 1))
    engine._admit()
    assert engine.requests[0].status == "running", "nobody asks the disk now"
    assert patience.is_resting
    released.set()
    engine.run()
    engine.stop()


def test_a_disk_that_is_slow_twice_is_not_written_until_it_may_be_faster(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk")
    patience = engine.disk.patience
    patience.rest()
    assert engine.again("a", ids_of(41)) == 41 and len(engine.disk.records) == 10, "once is no reason"
    patience.rest()
    engine.add("b", ids_of(41, 1))
    Engine.run(engine, 60_000)
    assert (
        len(engine.disk.records) == 10
        and engine.disk.demotions.num_waiting == 2
        and not engine.disk.num_running
    )
    patience._rests_until = engine.disk._clock()
    engine.run()
    assert len(engine.disk.records) == 20
    engine.stop()


def test_what_leaves_for_a_disk_that_is_slow_twice_is_lost_and_counted(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk", num_slots=20)
    prompts = engine.disk.records.num_slots // 10 + 3
    for seed in range(prompts):
        engine.again(f"a{seed}", ids_of(41, seed))
    assert engine.disk.records.is_full
    engine.disk.take_counts()
    stored = engine.disk.records.counts()["stored"]
    for _ in range(2):
        engine.disk.patience.rest()
    for seed in range(prompts, prompts + 3):
        assert engine.again(f"b{seed}", ids_of(41, seed)) == 41
    counts = engine.disk.take_counts()
    assert engine.disk.records.counts()["stored"] == stored and counts["disk_unstored_blocks"] >= 20
    engine.disk.patience.was_fast()
    assert not engine.disk.patience.is_worthless
    engine.stop()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(LIVES))
def test_random_traffic_over_restarts_never_gets_wrong_kv(tmp_path: Path, seed: int, late: bool) -> None:
    dice = random.Random(seed)
    num_loaded = num_promoted = 0
    for _ in range(3):
        engine = DiskEngine(tmp_path / "disk", num_slots=24, late=late)
        for at in range(40):
            base, size = ids_of(60, dice.randrange(4)), dice.randint(5, 60)
            salt = dice.choice([None, "one", "two"])
            engine.add(
                f"r{at}", [*base[:size], *ids_of(dice.randint(1, 8), at)], RequestFacts(cache_salt=salt)
            )
            for _ in range(dice.randint(0, 6)):
                engine.step()
            running = [each for each in engine.requests if each.status == "running"]
            if running and dice.random() < 0.2:
                engine.preempt(dice.choice(running))
            waiting = [each for each in engine.requests if each.status == "waiting"]
            if waiting and dice.random() < 0.1:
                engine.end(dice.choice(waiting))
        engine.run()
        num_loaded += engine.num_loaded
        num_promoted += engine.disk.take_counts()["disk_loaded_blocks"]
        engine.stop()
    assert num_loaded > 50 and num_promoted > 20


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"disk": "/x"}, "disk_size"),
        ({"disk": "/x", "disk_size": "1GiB"}, "fleet_secret"),
        ({"disk": "/x", "disk_size": "much", "fleet_secret": "f"}, "disk_size"),
        ({"disk": "", "disk_size": 1, "fleet_secret": "f"}, "disk"),
    ],
)
def test_settings_of_the_disk_are_all_or_none(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        ConnectorSettings.read({"host_blocks": 8, **given})
    assert named in error.value.setting


def _bytes(ids: list[int]) -> bytes:
    return np.asarray(ids, "<u4").tobytes()
