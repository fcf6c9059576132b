"""An error in the tiers costs the operation, not the tiers: what was decided is undone, and nothing wrong is served."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.clock import ManualClock
from radixkv.tiers import ladder
from radixkv.tiers import loading as tier_loading
from radixkv.tiers.disk.demotions import DiskDemotions
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.disk.promotions import DiskPromotions
from radixkv.tiers.disk.records import DiskRecords
from radixkv.tiers.disk.tier import DiskTier
from radixkv.tiers.host.index import HostIndex
from radixkv.tiers.host.memory import HostBlocks
from radixkv.tiers.host.steps import HostSteps
from radixkv.tiers.ladder import MOST_ERRORS
from radixkv.tiers.loading import RecordReader
from tests.tiers.support import clock, patience
from tests.tiers.test_loading import DiskOwner, SlowLife, folder, held_reads, on_disk
from tests.tiers.test_tiered_cache import NS, PROMPT, Life, Owner
from tests.waiting import eventually, is_set

pytestmark = pytest.mark.slow

__all__ = ["clock", "folder", "patience"]  # fixtures

CALLS: list[tuple[Any, str]] = [
    (HostBlocks, "load"),
    (HostBlocks, "save"),
    (HostBlocks, "stage"),
    (HostBlocks, "put"),
    (HostBlocks, "take_report"),
    (HostIndex, "give"),
    (HostIndex, "filled"),
    (HostIndex, "lacking"),
    (HostIndex, "loaded"),
    (HostIndex, "demoted"),
    (HostSteps, "take_work"),
    (HostSteps, "reported"),
    (HostSteps, "_begin_save"),
    (HostSteps, "_end_save"),
    (DiskDemotions, "_store"),
    (DiskDemotions, "_begin_stores"),
    (DiskTier, "read"),
    (DiskPromotions, "located"),
    (DiskPromotions, "_fill_slots"),
    (RecordReader, "begin"),
    (DiskRecords, "load"),
    (DiskRecords, "store"),
]


def failing_sometimes(patch: pytest.MonkeyPatch, seed: int, share: float) -> None:
    """Let each of the calls fail at times, before or after it did its work."""
    dice = random.Random(seed)

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            chance = dice.random()
            if chance < share / 2:
                raise MemoryError("before")
            found = original(*given, **named)
            if chance > 1 - share / 2:
                raise MemoryError("after")
            return found

        return call

    for owner, name in CALLS:
        patch.setattr(owner, name, wrapped(getattr(owner, name)))


def out_of_memory(patch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """Let a call of host memory fail that often."""
    original, left = getattr(HostBlocks, name), [times]

    def call(self: HostBlocks, *given: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("no memory")
        return original(self, *given)

    patch.setattr(HostBlocks, name, call)


def checked(owner: Owner) -> None:
    """Nothing is held, and each slot is where it should be."""
    owner.below.host.totals["errors"] = 0
    owner.below.host.index.check()
    owner.check()


@pytest.mark.parametrize("name", ["stage", "put", "save", "take_report"])
def test_one_error_costs_one_operation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    out_of_memory(monkeypatch, name, 1)
    for number in range(2):
        owner.ask(PROMPT)
        owner.ask([number, *PROMPT])
        owner.evict()
    assert owner.ask(PROMPT) == (40, 1)
    assert owner.below.counts()["host"]["errors"] == 1 and owner.below.counts()["host"]["open"] == 1
    checked(owner)


def test_after_several_errors_the_tiers_rest_and_come_back(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    out_of_memory(monkeypatch, "stage", MOST_ERRORS)
    for _ in range(MOST_ERRORS):
        assert owner.below.counts()["host"]["open"] == 1
        assert owner.ask(PROMPT) == (0, 41)
        owner.evict()
    assert owner.below.counts()["host"]["open"] == 0
    assert owner.ask(PROMPT) == (0, 41), "they rest"
    owner.evict()
    clock.advance(ladder.REST_S)
    assert owner.below.counts()["host"]["open"] == 1
    assert owner.ask(PROMPT) == (40, 1)
    checked(owner)


def test_rare_errors_are_no_reason_to_rest(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    out_of_memory(monkeypatch, "stage", 2 * MOST_ERRORS)
    for _ in range(2 * MOST_ERRORS):
        owner.evicted(PROMPT)
        clock.advance(ladder.ERRORS_S / 3)
    assert owner.ask(PROMPT) == (40, 1)


def error_lives(num: int, share: float = 0.02) -> tuple[int, int]:
    """Live random lives with errors. Returns the tokens that were loaded, and the errors."""
    loaded = errors = 0
    for seed in range(num):
        owner = Owner(40, 48)
        with pytest.MonkeyPatch.context() as within:
            failing_sometimes(within, seed, share)
            life = Life(owner, seed)
            life.check = lambda: None  # type: ignore[method-assign]
            life.run(300)
        errors += int(owner.below.counts()["host"]["errors"])
        loaded += life.num_loaded
        owner.evict()
        checked(owner)
        owner.evicted(PROMPT)
        assert owner.ask(PROMPT) == (40, 1), "the tiers go on"
    return loaded, errors


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiers never rest."""
    monkeypatch.setattr(ladder, "REST_S", 0.0)


@pytest.mark.usefixtures("restless")
def test_random_lives_with_errors_commit_only_their_own_kv() -> None:
    loaded, errors = error_lives(18)
    assert loaded > 500 and errors > 100


@pytest.mark.usefixtures("restless")
def test_random_lives_with_errors_over_a_disk(tmp_path: Path) -> None:
    errors = 0
    for seed in range(5):
        owner = DiskOwner(tmp_path / str(seed), host_blocks=16)
        try:
            errors += life_with_errors(owner, seed)
        finally:
            owner.cache.close()
    assert errors > 20


def life_with_errors(owner: DiskOwner, seed: int) -> int:
    """Live a random life over a disk. Afterwards nothing is held. Returns the number of errors."""
    with pytest.MonkeyPatch.context() as within:
        failing_sometimes(within, seed, 0.04)
        life = SlowLife(owner, seed)
        life.check = lambda: None  # type: ignore[method-assign]
        life.run(250)
    errors, uses = int(owner.below.counts()["host"]["errors"]), owner.below.host.index._uses
    assert eventually(owner.is_idle), "staging memory is given back"
    assert eventually(lambda: not owner.disk.num_running)
    with owner.below.gate:  # type: ignore[attr-defined]
        checked(owner)
    assert eventually(lambda: not uses.any()), "no slot is in use for ever"
    owner.ask(PROMPT, NS)
    return errors


def failing_after(patch: pytest.MonkeyPatch, kind: type, name: str, number: int) -> None:
    """Let one call of a method, the ``number``-th, fail after it did its work."""
    original, left = getattr(kind, name), [number]

    def call(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        left[0] -= 1
        if not left[0]:
            raise MemoryError("after")
        return found

    patch.setattr(kind, name, call)


@pytest.mark.parametrize("most_reads", [64, 2])
@pytest.mark.parametrize(
    ("kind", "name"), [(RecordReader, "begin"), (DiskTier, "read"), (DiskRecords, "load")]
)
def test_an_error_behind_a_begun_read_leaves_no_staging_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, most_reads: int
) -> None:
    """The log keeps the error, and so all that its frames know. The read itself goes on, into nobody's row.

    All reads begin with the load, or two do and the others with its polls.
    """
    monkeypatch.setattr(tier_loading, "MAX_READS", most_reads)
    jobs, load = list[Job](), DiskRecords.load

    def noted(*given: Any, **named: Any) -> Job | None:
        job = load(*given, **named)
        jobs.extend([] if job is None else [job])
        return job

    monkeypatch.setattr(DiskRecords, "load", noted)
    failing_after(monkeypatch, kind, name, 5)
    with held_reads(folder) as (owner, reads), owner.cache.open(NS, PROMPT) as sequence:
        if most_reads == 64:
            assert sequence.loading is None and reads.num == 0
        else:
            reads.open()
            assert sequence.loading is not None and sequence.loading.wait()
        assert owner.below.counts()["host"]["errors"] == 1 and len(jobs) == 5
        assert not owner.disk.rows.num_used
        reads.open()
        assert all(eventually(lambda job=job: job.is_done) for job in jobs)
        assert owner.is_idle(), "no row holds what came afterwards"
        owner.compute(sequence, 41)
        assert owner.is_right(sequence)
        owner.below.host.totals["errors"] = 0


def test_an_error_behind_a_begun_store_leaves_its_slots_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a thread has their bytes. Else it could store what another prompt puts there."""
    may_take, claim = threading.Event(), Job.claim

    def held(job: Job) -> bool:
        is_set(may_take)
        return claim(job)

    with on_disk(tmp_path / "disk") as owner:
        owner.known()
        uses = owner.below.host.index._uses
        monkeypatch.setattr(Job, "claim", held)
        failing_after(monkeypatch, DiskRecords, "store", 1)
        try:
            owner.ask(PROMPT)
            assert eventually(lambda: owner.below.counts()["host"]["errors"] == 1)
            with owner.below.gate:
                for _ in range(3):
                    owner.below.tick()
                assert uses.any()
        finally:
            may_take.set()
        assert eventually(lambda: not uses.any())
        owner.below.host.totals["errors"] = 0


@pytest.mark.usefixtures("restless")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_that_undoes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: what was decided before an error stays. The handles of the life that ended so are collected here."""
    monkeypatch.setattr(HostSteps, "undo", lambda self: None)
    with pytest.raises(AssertionError) as found:
        error_lives(25)
    del found
    gc.collect()


def test_a_prompt_that_fails_to_come_ahead_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = DiskOwner(tmp_path / "disk")
    try:
        owner.ask(PROMPT)
        assert eventually(lambda: len(owner.disk.records) == 10)
        for namespace in owner.below.namespaces(None):
            owner.below.host.cache.clear(namespace)
        owner.evict()
        original = DiskPromotions.is_waiting

        def fail(self: DiskPromotions, request_id: str, *given: Any, **named: Any) -> bool:
            original(self, request_id, *given, **named)
            raise MemoryError("planted")

        monkeypatch.setattr(DiskPromotions, "is_waiting", fail)
        owner.cache.announce(NS, PROMPT)
        assert eventually(lambda: owner.below.counts()["host"]["errors"] == 1)
        assert eventually(owner.is_idle)
        for _ in range(10):
            with owner.below.gate:
                owner.below.tick()
        assert owner.is_quiet() and owner.below.counts()["host"]["errors"] == 1
        assert owner.below.counts()["host"]["open"] == 1 and not owner.disk.promotions._promotions
    finally:
        owner.cache.close()
