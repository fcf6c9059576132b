"""No tenant, no load and no hanging disk takes the tiers from the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.clock import ManualClock
from radixkv.config import Tenant
from radixkv.index.tokens import encode
from radixkv.tiers import loading as tier_loading
from radixkv.tiers import pending as disk_debts
from radixkv.tiers.disk import demotions as disk_stores
from radixkv.tiers.disk import demotions as waiting_stores
from radixkv.tiers.disk import patience as disk_patience
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.disk.patience import MOST_SECONDS_A_TOKEN, MOST_WAIT_S, NUM_SAMPLES
from radixkv.tiers.host.memory import HostBlocks
from radixkv.tiers.host.staging import SHARED_S
from radixkv.tiers.tier import Offer
from tests.engines.vllm.test_steps import Engine, ids_of
from tests.tiers.disk.test_tier import DiskEngine
from tests.tiers.support import PATIENT_S, FaultyFiles, clock, patience
from tests.tiers.test_loading import DiskOwner, folder, held_reads, on_disk
from tests.tiers.test_tiered_cache import NS, OTHER, PROMPT, Owner, changed, loading_of
from tests.waiting import LIMIT_S, ended, eventually, is_set

pytestmark = pytest.mark.slow

__all__ = ["clock", "folder", "patience"]  # fixtures


def others_load(owner: DiskOwner) -> int:
    """Return what another tenant loads."""
    with owner.cache.open(OTHER, PROMPT) as sequence:
        loading = loading_of(sequence)
        loading.wait()
        return loading.num_loaded_tokens


# --- staging memory


def test_a_load_that_nobody_polls_gives_its_memory_back(folder: Path, clock: ManualClock) -> None:
    with on_disk(folder) as owner:
        owner.known()
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert owner.disk.rows.num_used
            clock.advance(PATIENT_S)
            assert eventually(owner.is_idle), "though the sequence is open"
            assert loading.is_done and loading.num_loaded_tokens == 0
            assert others_load(owner) == 40
            assert loading.claim(100) == 41
            owner.compute(sequence, 41)
            assert owner.is_right(sequence)


def test_a_load_goes_on_while_claimed_tokens_are_computed(
    folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loading, "IDLE_S", 1.0)
    monkeypatch.setattr(disk_patience, "LEAST_WAIT_S", 1.0)
    with held_reads(folder) as (owner, _), owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        stop = loading.claim(8)
        clock.advance(0.9 * PATIENT_S)
        with owner.below.gate:
            owner.below.tick()
            assert not loading.is_done and owner.disk.rows.num_used
        owner.compute(sequence, stop)
        assert eventually(lambda: loading.is_done), "nothing is computed, nobody polls"
        assert eventually(owner.is_idle)


def test_records_of_computed_tokens_are_given_up(folder: Path) -> None:
    """A sequence that computes everything and goes on for minutes holds no staging memory."""
    with held_reads(folder) as (owner, _), owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        owner.compute(sequence, 20)
        assert eventually(lambda: owner.disk.rows.num_used == 5)
        assert not loading.is_done
        owner.compute(sequence, 41)
        assert eventually(owner.is_idle) and loading.is_done


def test_tenants_share_staging_memory(folder: Path) -> None:
    with on_disk(folder) as owner:
        disk, clock = owner.disk, ManualClock()
        disk.rows._clock = clock

        def takes(tenant: str) -> list[int]:
            rows = list[int]()
            while (row := disk.rows.take(tenant)) is not None:
                rows.append(row)
            return rows

        with owner.below.gate:  # type: ignore[attr-defined]
            assert disk.rows.num_free == 16
            mine = takes("a")
            assert len(mine) == 12, "a quarter is for those that come"
            theirs = takes("b")
            assert len(theirs) == 4
            for row in mine[:8]:
                disk.rows.give(row)
            mine = mine[8:]
            theirs += takes("b")
            assert len(theirs) == 6 and len(takes("c")) == 4
            mine += takes("a")
            assert len(mine) == 4, "its share of three"
            clock.advance(SHARED_S + 1)
            mine += takes("a")
            assert len(mine) == 6 and disk.rows.num_free == 0
            for row in range(16):
                disk.rows.give(row)
            assert not disk.rows._num_held
            assert len(takes("a")) == 12
            for row in sorted(set(range(16)) - set(disk.rows._free_rows)):
                disk.rows.give(row)


def test_requests_that_wait_share_it_too(tmp_path: Path) -> None:
    """A long prompt comes in parts, and leaves rows for another tenant."""
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(121))
    engine.stop()
    released = threading.Event()
    engine = DiskEngine(tmp_path / "disk", files=(files := FaultyFiles()))
    files.before = lambda call: is_set(released)
    engine.add("b", ids_of(121))
    assert eventually(lambda: engine.step(0) is None and bool(engine.disk.promotions._promotions))
    assert engine.disk.rows.num_free == 4
    released.set()
    engine.run()
    assert engine.disk.rows.num_free == 16
    engine.stop()


# --- a disk that hangs


class Hanging(FaultyFiles):
    """Writes of records never return while it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.num = False, 0
        self._back = threading.Event()

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        if self.hangs and len(content) >= 1_024:
            self.num += 1
            is_set(self._back)
        return super().write(descriptor, content, offset)

    def back(self) -> None:
        self.hangs = False
        self._back.set()


def prompt(number: int) -> list[int]:
    return list(range(1_000 * number, 1_000 * number + 41))


def test_a_hanging_disk_leaves_host_memory_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Hanging()
    with on_disk(tmp_path / "disk", files=files, host_blocks=32) as owner:
        owner.ask(prompt(0))
        owner.known()
        assert eventually(lambda: len(owner.disk.records) == 10 and not owner.disk.num_running)
        files.hangs = True
        monkeypatch.setattr(disk_stores, "STORE_S", 0.1)
        for number in range(1, 8):
            owner.evicted(prompt(number))
        uses = owner.below.host.index._uses
        assert eventually(lambda: files.num > 0 and not uses.any()), "no slot waits for the disk for long"
        for number in range(8, 12):
            owner.evicted(prompt(number))
            assert int((uses > 0).sum()) <= 2 * (32 // 8)
            assert owner.ask(prompt(number)) == (40, 1)
        files.back()
        assert eventually(lambda: not owner.disk.num_running)


def test_a_store_needs_its_slot_until_it_is_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_stores, "STORE_S", 1e9)
    files = Hanging()
    with on_disk(tmp_path / "disk", files=files) as owner:
        owner.known()
        files.hangs = True
        owner.evicted(PROMPT[:9])
        assert eventually(lambda: files.num == 2)
        uses = owner.below.host.index._uses
        assert eventually(lambda: not uses.any()), "the threads have the bytes"
        assert owner.disk.num_running == 1
        files.back()
        assert eventually(lambda: len(owner.disk.records) == 2)


def test_what_leaves_a_full_disks_host_memory_is_given_up_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_disk(tmp_path / "disk", host_blocks=32) as owner:
        owner.ask(prompt(0))
        assert eventually(lambda: len(owner.disk.records) == 10)
        monkeypatch.setattr(type(owner.disk.demotions), "_stores_later", property(lambda self: True))
        owner.disk.demotions._leaving_slots._most_now = 4
        tier, uses = owner.disk.records, owner.below.host.index._uses
        assert eventually(lambda: not uses.any())
        with owner.below.gate:  # type: ignore[attr-defined]
            owner.below.host.cache.evict(4)
            assert len(owner.disk.demotions._leaving) and int(uses.sum()) == 4
            tier._opens_at = tier._clock() + PATIENT_S
            owner.below.tick()
            assert (
                not owner.disk.demotions._leaving
                and not uses.any()
                and not owner.disk.demotions._leaving_slots.num
            )
            tier._opens_at = None


def test_memory_that_a_job_never_took_is_the_callers() -> None:
    job = Job(lambda job, memory: True)
    assert job.needs_memory
    assert job.claim() and job.needs_memory
    job.unclaim()
    assert not job.needs_memory and not job.is_done
    abandoned = Job(lambda job, memory: True)
    abandoned.cancel()
    assert not abandoned.needs_memory and not abandoned.claim()


# --- patience


def test_a_few_slow_computations_dont_lengthen_patience() -> None:
    patience = disk_patience.DiskPatience(16, ManualClock())
    for _ in range(NUM_SAMPLES):
        patience.computed_in(16 * 1e-3, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_patience, "LEAST_WAIT_S", 0.1)
        before = patience.patience_s(1_500)
        assert before == pytest.approx(0.75)
        for seconds in (8.0, 1e9, float("inf"), float("nan"), -1.0, 15.9 * MOST_SECONDS_A_TOKEN):
            patience.computed_in(seconds, 16)
        for _ in range(NUM_SAMPLES // 2 - 1):
            patience.computed_in(1.5, 16)
        assert patience.patience_s(1_500) == pytest.approx(before)


def test_patience_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_patience, "LEAST_WAIT_S", 0.1)
    patience = disk_patience.DiskPatience(16, ManualClock())
    for _ in range(10 * NUM_SAMPLES):
        patience.computed_in(1.5, 16)
    assert patience.patience_s(10**9) == MOST_WAIT_S and patience.patience_s(0) == 0.1


def test_steps_that_save_nothing_are_forgotten() -> None:
    patience = disk_patience.DiskPatience(16, ManualClock())
    for step in range(1_000):
        patience.begin_step(step, 32)
        patience.computed([])
    assert len(patience._computing) == disk_patience.MOST_STEPS
    assert 999 in patience._computing, "the last ones are measured"


# --- long copies from host memory


def during_a_copy(
    monkeypatch: pytest.MonkeyPatch,
    owner: Owner,
    act: Callable[[], Any],
    has_begun: Callable[[], bool] | None = None,
) -> list[threading.Thread]:
    """Let another thread do something after the third part of a copy, which goes on when that ``has_begun``.

    By default it begins by waiting for the gate. Returns a list that gets the thread.
    """
    monkeypatch.setattr(owner.below.host, "slice_blocks", 1)
    original, num, threads = HostBlocks.put, [0], list[threading.Thread]()
    waiting = owner.below.gate._waiting

    def put(self: HostBlocks, staged: Any, blocks: Any) -> None:
        original(self, staged, blocks)
        num[0] += 1
        if num[0] == 3:
            threads.append(threading.Thread(target=act))
            threads[0].start()
            eventually(has_begun or (lambda: bool(waiting)), "what another thread does meanwhile")

    monkeypatch.setattr(HostBlocks, "put", put)
    return threads


def test_others_go_on_between_parts_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    loaded = list[int]()
    with owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)

        def act() -> None:
            with owner.below.gate:  # type: ignore[attr-defined]
                loaded.append(loading.num_loaded_tokens)

        during_a_copy(monkeypatch, owner, act)
        assert loading.poll() and loading.num_loaded_tokens == 40 and owner.is_right(sequence)
    assert loaded == [12]
    owner.check()


@pytest.mark.parametrize("change", ["purge", "clear", "truncate", "release", "cancel"])
def test_a_copy_stops_where_it_was_changed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    sequence = owner.cache.open(NS, PROMPT)
    loading = loading_of(sequence)

    def act() -> None:
        if change == "cancel":
            loading.cancel()
        elif change in ("purge", "clear"):
            changed(owner, sequence, change)
        else:
            with owner.below.gate:  # type: ignore[attr-defined]
                sequence.truncate(20) if change == "truncate" else sequence.release()

    mark = owner.below.mark("a")
    marks = {"purge", "clear"} & {change}
    has_begun = (lambda: owner.below.mark("a") != mark) if marks else None
    threads = during_a_copy(monkeypatch, owner, act, has_begun)
    assert loading.poll()
    assert loading.num_loaded_tokens == 12, "nothing is written after it"
    ended(threads[0])
    if sequence.is_open:
        owner.compute(sequence, sequence.num_tokens)
        assert owner.is_right(sequence)
    if change != "release":
        sequence.release()
    assert not owner.below.host.index._uses.any()
    owner.below.host.index.check()
    owner.check()


def test_slots_that_are_copied_are_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tenant needs all of host memory, and another sequence of the same prompt makes the slots spare."""
    owner = Owner(32, host_blocks=12)
    owner.evicted(PROMPT)
    with owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)

        def act() -> None:
            index = owner.below.host.index
            with owner.below.gate:  # type: ignore[attr-defined]
                index.loaded(np.arange(len(index._slot_of)))
            owner.evicted(list(range(500, 541)), OTHER)

        threads = during_a_copy(monkeypatch, owner, act)
        assert loading.poll() and loading.num_loaded_tokens == 40 and owner.is_right(sequence)
    ended(threads[0])
    owner.below.host.index.check()


class Wanted:
    """A lock that tells whether a second one wants it."""

    def __init__(self) -> None:
        self._lock, self._num_asked = threading.Lock(), 0

    def __enter__(self) -> None:
        self._num_asked += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def is_wanted(self) -> bool:
        return self._num_asked > 1


def test_claims_wait_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being copied is never claimed."""
    owner, polling = Owner(), Wanted()
    owner.evicted(PROMPT)
    claims = list[int]()
    with owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        monkeypatch.setattr(loading, "_polling", polling)
        claiming = during_a_copy(
            monkeypatch, owner, lambda: claims.append(loading.claim(8)), polling.is_wanted
        )
        assert loading.poll() and loading.num_loaded_tokens == 40
        ended(claiming[0])
        assert claims == [41] and owner.is_right(sequence)


# --- slots that a worker is still to fill


class Filling:
    """A promotion of the prompt's first block, which was proven: its slot still holds another tenant's bytes."""

    def __init__(self, owner: DiskOwner) -> None:
        self.owner, self.tier, self.demotions = owner, owner.disk.records, owner.disk.demotions
        self.level, self.promotions = owner.below.host, owner.disk.promotions
        owner.ask(PROMPT[:5])
        assert eventually(lambda: len(self.tier) == 1)
        self.evict()
        owner.ask([700 + each for each in range(41)], OTHER)
        assert eventually(lambda: len(self.tier) == 11 and owner.is_idle())
        self.evict()
        self.key, self.generation = encode(PROMPT[:4]), self.level.cache.generation("a")

    def evict(self) -> None:
        self.owner.evict()
        with self.owner.below.gate:
            self.level.cache.evict(1_000)

    def begin(self) -> None:
        """Let the present step fill the slot. Its record on the disk makes way for others. Within the gate."""
        assert self.is_waiting()
        job = self.promotions._promotions["r"].jobs[0]
        assert eventually(lambda: job.is_done)
        tags = self.tier.folder.keys("a")
        assert tags is not None
        found = self.tier._table.find(self.tier._locator(tags, NS, memoryview(self.key)))
        assert found is not None
        with self.tier._lock:
            self.tier._table.drop(found)
        assert not self.is_waiting()

    def is_waiting(self) -> bool:
        return self.promotions.is_waiting("r", NS, self.generation, self.key, 0, need="announced")

    def slot_bytes(self) -> bytes:
        entries = self.level.cache.match(NS, self.key).block_ids
        return bytes(self.owner.below.memory.slot_bytes(int(self.level.index.slots_of(entries)[0])))

    def stored(self) -> bytes | None:
        """Return what the disk proves of the block."""
        into = bytearray(self.owner.below.memory.block_bytes)
        job = self.tier.load(NS, self.key, 0, memoryview(into))
        assert job is not None
        return bytes(into) if job.wait(LIMIT_S) else None

    def unstored(self) -> int:
        return self.demotions._counts["disk_unstored_blocks"]


def test_a_slot_that_is_being_filled_is_stored_when_it_is_filled(tmp_path: Path) -> None:
    with on_disk(tmp_path / "disk", host_blocks=16) as owner:
        filling = Filling(owner)
        with owner.below.gate:
            filling.begin()
            assert any(filling.slot_bytes()), "it holds other bytes"
            filling.demotions.offer(Offer(NS, filling.generation, filling.key, 0, 1))
            filling.demotions.step()
            assert filling.demotions.num_waiting == 1 and not filling.demotions.num_running
            owner.below._run()
            right = filling.slot_bytes()
        assert eventually(lambda: filling.demotions.is_idle and len(filling.tier) == 11)
        assert filling.stored() == right


def test_a_slot_that_is_being_filled_is_lost_when_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_disk(tmp_path / "disk", host_blocks=64) as owner:
        filling = Filling(owner)
        monkeypatch.setattr(type(filling.demotions), "_stores_later", property(lambda self: True))
        with owner.below.gate:
            filling.begin()
            before = filling.unstored()
            filling.level.cache.evict(1_000)
            assert not filling.demotions._leaving and filling.unstored() == before + 1
            owner.below._run()
        assert filling.stored() is None


def test_a_fill_that_never_ends_does_not_hold_up_the_close_of_its_disk(tmp_path: Path) -> None:
    """Otherwise this test would hang."""
    owner = DiskOwner(tmp_path / "disk", host_blocks=16)
    filling = Filling(owner)
    owner.below._stop.set()
    with owner.below.gate:
        filling.begin()
        filling.demotions.offer(Offer(NS, filling.generation, filling.key, 0, 1))
        owner.disk.close()
        assert filling.demotions.is_idle
        assert len(filling.tier) == 10 and filling.unstored() >= 1
    owner.cache.close()


def test_after_an_error_no_slot_is_being_filled(tmp_path: Path) -> None:
    with on_disk(tmp_path / "disk", host_blocks=16) as owner:
        filling = Filling(owner)
        with owner.below.gate:
            filling.begin()
            filling.demotions.offer(Offer(NS, filling.generation, filling.key, 0, 1))
            owner.below._undo()
            assert owner.disk.rows.num_ready(np.arange(16)) == 16
            owner.below._run()
        assert eventually(lambda: filling.demotions.is_idle)
        assert filling.stored() is None and owner.ask(PROMPT[:5]) == (0, 5)
        assert owner.below.counts()["host"]["errors"] == 1
        owner.below.host.totals["errors"] = 0


# --- a tenant whose purges the disk can't learn


@contextmanager
def unlearnable(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskOwner]:
    """Tenant b was purged by the fleet, and its file of the disk is damaged."""
    monkeypatch.setattr(disk_debts, "LEARNING_S", 0.1)
    with on_disk(path) as owner:
        owner.cache.follow_generations(lambda tenant: int(tenant == "b"), lambda: True)
        learn = owner.disk.records.learn_generation

        def failing(tenant: str, generation: int) -> None:
            if tenant == "b":
                raise OSError("planted")
            learn(tenant, generation)

        monkeypatch.setattr(owner.disk.records, "learn_generation", failing)
        yield owner
        monkeypatch.setattr(owner.disk.records, "learn_generation", learn)


def test_a_tenant_that_cannot_be_learned_makes_no_disk_rest(
    folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unlearnable(folder, monkeypatch) as owner:
        for number in range(3):
            with owner.cache.open(OTHER, PROMPT) as sequence:
                loading = sequence.loading
                assert (loading is None) == (number > 0), "only the first one waits"
                clock.advance(disk_debts.LEARNING_S)
                assert loading is None or loading.wait()
            assert not owner.disk.patience.is_resting
        assert eventually(lambda: owner.disk.purges.is_known("a"))
        with owner.cache.open(NS, PROMPT) as sequence:
            assert loading_of(sequence).wait() and sequence.num_committed_tokens == 40
        assert owner.disk.promotions.load_durations.count == 1, "nothing was loaded for the other one"


def test_many_tenants_cost_a_purged_one_no_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its purge isn't repeated when the disk forgets which purges it knows."""
    monkeypatch.setattr(disk_debts, "_MAX_KNOWN", 2)
    with on_disk(folder) as owner:
        owner.ask(PROMPT)
        owner.cache.purge("a")
        owner.ask(PROMPT)
        assert eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] == 20)
        purges = owner.disk.purges
        assert all(eventually(lambda name=name: purges.is_known(name)) for name in "abcdefa")  # type: ignore[misc]
        assert owner.cache.tier_counts()["disk"]["resident_blocks"] == 20
        assert len(purges._known) <= 3


def test_learning_that_fails_is_tried_again_from_time_to_time(
    folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in some seconds, and at once if there is news; told once."""
    with unlearnable(folder, monkeypatch) as owner:
        purges = owner.disk.purges
        tries = list[int]()
        learn = purges._learn
        monkeypatch.setattr(purges, "_learn", lambda *given: (tries.append(1), learn(*given))[1])

        def num_tries() -> int:
            for _ in range(50):
                assert not purges.is_known("b")
            assert eventually(lambda: purges._learning["b"].job.is_done)
            return len(tries)

        assert num_tries() == num_tries() == 1
        clock.advance(disk_debts.RETRY_S)
        assert num_tries() == num_tries() == 2
        owner.cache.follow_generations(lambda tenant: 2 * int(tenant == "b"), lambda: True)
        assert num_tries() == num_tries() == 3
    assert caplog.text.count("can't learn the purges of tenant 'b'") == 1 and "Traceback" not in caplog.text


def test_a_tenant_that_cannot_be_learned_holds_up_no_close(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise this test would hang."""
    with unlearnable(folder, monkeypatch) as owner:
        owner.ask([900 + each for each in range(41)], OTHER)
        assert eventually(lambda: owner.disk.purges.has_failed("b")) and len(owner.disk.demotions._waiting)
        owner.cache.close()


def test_a_limit_that_falls_while_a_range_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread evicts in the middle: what has no slot any more is never stored out of another one's."""
    engine = DiskEngine(tmp_path / "disk", 64)
    index, stores = engine.level.index, engine.disk.demotions
    most, stores._most_stores = stores._most_stores, 0
    for number, size in enumerate((41, 121, 97)):
        engine.add(str(number), ids_of(size, 7 * number))
        Engine.run(engine, 60_000)
    slots_of, stored = index.slots_of, list[int]()

    def later(entries: Any) -> Any:
        name = engine.level.cache.namespaces()[0]
        engine.level.cache.add_tenant(Tenant(name.tenant, max_blocks=20))
        return slots_of(entries)

    begin = stores._begin

    def begun(on_disk: Any, key: Any, first: Any, slots: Any, since: Any) -> int:
        stored.extend(slots.tolist())
        return begin(on_disk, key, first, slots, since)

    stores._most_stores = most
    monkeypatch.setattr(index, "slots_of", later)
    monkeypatch.setattr(stores, "_begin", begun)
    for _ in range(20):
        stores.step()
    assert stored and min(stored) >= 0
    monkeypatch.undo()
    engine.stop()


def test_who_computes_meanwhile_uses_what_is_learned_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_disk(folder) as owner:
        known = owner.disk.purges.is_known
        monkeypatch.setattr(owner.disk.purges, "is_known", lambda tenant: False)
        monkeypatch.setattr(owner.disk.purges, "may_wait", lambda tenant: True)
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            stop = loading.claim(4)
            monkeypatch.setattr(owner.disk.purges, "may_wait", lambda tenant: False)
            owner.compute(sequence, stop)
            assert not loading.poll()
            assert eventually(lambda: known("a"))
            monkeypatch.setattr(owner.disk.purges, "is_known", known)
            assert loading.wait() and loading.num_loaded_tokens == 36
            assert owner.is_right(sequence)


def test_what_is_learned_of_tenants_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_debts, "_MAX_KNOWN", 8)
    with on_disk(folder) as owner, owner.below.gate:
        for number in range(30):
            owner.disk.purges.is_known(f"t{number}")
        assert len(owner.disk.purges._learning) <= 8


# --- what waits for the disk


def test_a_tenant_that_cannot_be_learned_stops_no_stores(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unlearnable(folder, monkeypatch) as owner:
        before = len(owner.disk.records)
        for namespace in (OTHER, NS):
            owner.ask([900 + each for each in range(41)], namespace)
        assert eventually(lambda: len(owner.disk.records) == before + 10)
        assert {each.namespace.tenant for each in owner.disk.demotions._waiting} == {"b"}


def test_a_step_looks_at_few_of_those_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_stores, "MAX_LOOKS", 8)
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    namespace = engine.level.cache.namespaces()[0]
    stores, patience, num_looks = engine.disk.demotions, engine.disk.patience, list[int]()
    locate = engine.disk.records.locate
    monkeypatch.setattr(
        engine.disk.records, "locate", lambda *given: (num_looks.append(1), locate(*given))[1]
    )
    for most_bytes, most_looks in ((1 << 20, 8), (3 * 4 * 40, 3)):
        monkeypatch.setattr(disk_stores, "MAX_LOOK_BYTES", most_bytes)
        patience.rest()
        patience.rest()
        for number in range(40):
            stores.offer(Offer(namespace, 0, encode([*ids_of(39), number]), 0, 10))
        patience._rests_until = engine.disk._clock()
        while stores.num_waiting:
            num_looks.clear()
            stores.step()
            assert 0 < len(num_looks) <= most_looks
    monkeypatch.setattr(disk_stores, "MAX_LOOK_BYTES", 1 << 20)
    num_looks.clear()
    for number in range(5):
        stores.offer(Offer(namespace, 0, encode(ids_of(40, 50 + number)), 0, 10))
    assert not stores.num_waiting and len(num_looks) == 5, "what memory doesn't have is looked at once"
    engine.run()
    engine.stop()


def test_what_waits_is_bounded_by_the_bytes_of_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_stores, "MAX_WAITING_BYTES", 10 * 4 * 40)
    engine = DiskEngine(tmp_path / "disk")
    engine.again("a", ids_of(41))
    namespace, stores = engine.level.cache.namespaces()[0], engine.disk.demotions
    for _ in range(2):
        engine.disk.patience.rest()
    for number in range(30):
        stores.offer(Offer(namespace, 0, encode([*ids_of(39), number]), 8, 10))
    assert stores.num_waiting == 10 and stores._waiting.num_bytes == 10 * 4 * 40
    assert engine.disk.take_counts()["disk_unstored_blocks"] == 20 * 2
    stores.forget_waiting()
    assert stores._waiting.num_bytes == 0 and engine.disk.take_counts()["disk_unstored_blocks"] == 10 * 2
    engine.stop()


@pytest.mark.parametrize("is_done", [False, True])
def test_an_interruption_leaves_no_slot_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """The interruption comes before the slots are free, or just afterwards."""
    with on_disk(tmp_path / "disk") as owner:
        index = owner.below.host.index
        unuse, stores = index.unuse, owner.disk.demotions

        def interrupted(slots: Any) -> None:
            if is_done:
                unuse(slots)
            monkeypatch.setattr(index, "unuse", unuse)
            raise KeyboardInterrupt

        with owner.below.gate:
            slots = index.give("a", np.arange(2), may_evict=False)
            index.use(slots)
            store = disk_stores._Store(slots, True, 0.0)
            stores._stores.append(store)
            stores._leaving_slots.num = 2
            monkeypatch.setattr(index, "unuse", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stores._free_slots(store)
            stores.step()
            assert not index._uses.any() and not stores._leaving_slots.num and not stores._stores
            index.take_away(np.arange(2))
            index.check()


@pytest.mark.parametrize("rate", [None, 1e9])
def test_what_the_disk_is_too_busy_for_goes_on_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float | None
) -> None:
    engine = DiskEngine(tmp_path / "disk", bytes_per_s=rate)
    stores, store, num_calls = engine.disk.demotions, engine.disk.records.store, list[int]()

    def busy(*given: Any, **named: Any) -> Job | None:
        num_calls.append(1)
        return None if len(num_calls) > 2 else store(*given, **named)

    monkeypatch.setattr(engine.disk.records, "store", busy)
    engine.add("a", ids_of(41))
    Engine.run(engine, 60_000)
    assert eventually(lambda: (engine.step(0), len(engine.disk.records) == 2)[1])
    assert sum(each.num_blocks for each in stores._waiting) == 8
    if stores._budget is not None:
        income = stores._budget.bytes_per_s
        assert stores._budget.left_bytes(engine.disk._clock()) == income - 2 * stores._record_bytes
    monkeypatch.setattr(engine.disk.records, "store", store)
    engine.run()
    assert len(engine.disk.records) == 10 and engine.disk.take_counts()["disk_unstored_blocks"] == 0
    engine.stop()


@pytest.mark.parametrize("reason", ["busy", "unknown", "owed", "shut"])
def test_what_leaves_and_is_refused_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    with on_disk(tmp_path / "disk") as owner:
        owner.ask(PROMPT)
        disk, stores = owner.disk, owner.disk.demotions
        assert eventually(lambda: len(disk.records) == 10 and not owner.below.host.index._uses.any())
        with owner.below.gate, monkeypatch.context() as patch:
            patch.setattr(type(stores), "_stores_later", property(lambda self: True))
            patch.setattr(disk.records, "locate", lambda *given: 0)
            if reason == "busy":
                patch.setattr(disk.records, "store", lambda *given, **named: None)
            elif reason == "unknown":
                patch.setattr(disk.purges, "known", lambda tenant: None)
            elif reason == "owed":
                patch.setattr(disk.purges, "is_owed", lambda tenant: True)
            else:
                patch.setattr(type(stores), "_is_open", property(lambda self: False))
            before = stores._counts["disk_unstored_blocks"]
            owner.below.host.cache.evict(1)
            stores.step()
            stores.step()
            assert stores._counts["disk_unstored_blocks"] == before + 1
            assert not owner.below.host.index._uses.any()
