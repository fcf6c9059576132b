"""A disk below the embedded engine: what it computed comes back after a restart, and a bad disk only costs hits."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixkv.config import CacheConfig, Tenant
from radixkv.coordination.store.memory import MemoryStore
from radixkv.engines.hf import HFEngine, layout_of
from radixkv.errors import ConfigError, LeaseError, TierError
from radixkv.files.system import Files
from radixkv.index.below import Scope
from radixkv.index.tokens import encode
from radixkv.tiers.host.memory import HostBlocks
from radixkv.tiers.host.tier import HostTier
from radixkv.tiers.ladder import Ladder
from radixkv.tiers.pending import Pending
from radixkv.tiers.settings import DiskOptions, TierSettings
from radixkv.tiers.tier import Offer
from radixkv.tiers.tiered_cache import TieredCache
from tests.engines.support import model_of, prompt_of, stock
from tests.tiers.support import FaultyFiles, failing
from tests.tiers.support import patience as patience
from tests.tiers.test_ladder import SIZE, ask, evict_all, hits, host_bytes
from tests.tiers.test_loading import Reads
from tests.waiting import LIMIT_S, ended, eventually, is_set

pytestmark = pytest.mark.slow

SECRET = b"a secret of the fleet"
DISK_BYTES = 4 << 20
PROMPT = prompt_of(41)


@contextmanager
def on_disk(
    folder: Path,
    *,
    num_blocks: int = 32,
    host_blocks: int = 64,
    files: Files | None = None,
    secret: bytes = SECRET,
    awaits: bool = False,
    name: str = "llama",
) -> Iterator[HFEngine]:
    """An engine with host memory and a disk. It is closed afterwards."""
    model = model_of(name)
    cache = TieredCache(CacheConfig(num_blocks, SIZE, layout_of(model)))
    disk = DiskOptions(folder, DISK_BYTES, secret, awaits, files or FaultyFiles())
    engine = HFEngine(model, cache, chunk_tokens=16, tiers=TierSettings(host_bytes(host_blocks), disk))
    try:
        yield engine
    finally:
        engine.close()


def disk_counts(engine: HFEngine) -> Any:
    assert isinstance(engine.cache, TieredCache)
    return engine.cache.tier_counts()["disk"]


def filled(folder: Path, tenant: str = "a") -> list[list[int]]:
    """Serve the prompt once, so that the folder has its KV. Returns the answer."""
    with on_disk(folder) as engine:
        answer, cached = ask(engine, PROMPT, tenant)
        assert cached == 0
    return answer


def test_a_restart_finds_what_was_computed(tmp_path: Path) -> None:
    answer = filled(tmp_path / "disk")
    assert answer == stock(model_of(), [PROMPT], 6, eos=None)
    with on_disk(tmp_path / "disk") as engine:
        assert disk_counts(engine)["resident_blocks"] >= 10
        assert ask(engine, PROMPT) == (answer, 40)
        assert disk_counts(engine)["hit_blocks"] == 10 and disk_counts(engine)["load_seconds"] > 0
        evict_all(engine)
        assert ask(engine, PROMPT) == (answer, 40)
        assert disk_counts(engine)["hit_blocks"] == 10, "it is in host memory again"


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}])
def test_a_model_whose_requests_run_one_after_the_other_waits_for_the_disk(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    with on_disk(tmp_path / "disk", name="falcon") as engine:
        answer, cached = ask(engine, PROMPT, **settings)
        assert cached == 0
    with on_disk(tmp_path / "disk", name="falcon") as engine:
        name = engine.namespace("a")
        made = engine.generate(name, PROMPT, 6, eos_token_id=-1, **settings)
        assert (made.token_ids, made.num_cached_tokens, disk_counts(engine)["hit_blocks"]) == (
            answer,
            [40],
            10,
        )
        assert made.loaded is not None and made.loaded.seconds > 0
        assert (made.loaded.host_tokens, made.loaded.disk_tokens) == (0, 40)
        evict_all(engine)
        done = engine.prefill(name, PROMPT)
        assert done.num_cached_tokens == 40 and done.loaded is not None
        assert (done.loaded.host_tokens, done.loaded.disk_tokens) == (40, 0)


def test_a_generation_says_what_came_from_where(tmp_path: Path) -> None:
    filled(tmp_path / "disk")
    with on_disk(tmp_path / "disk") as engine:
        name = engine.namespace("a")

        def loaded() -> tuple[int, int, bool]:
            made = engine.generate(name, PROMPT, 2, eos_token_id=-1).loaded
            assert made is not None
            return made.host_tokens, made.disk_tokens, made.seconds > 0

        assert loaded() == (0, 40, True)
        assert loaded()[:2] == (0, 0), "resident"
        evict_all(engine)
        assert loaded() == (40, 0, True)


def test_what_host_memory_evicted_comes_back(tmp_path: Path) -> None:
    prompts = [prompt_of(41, seed) for seed in range(6)]
    with on_disk(tmp_path / "disk", host_blocks=24) as engine:
        answers = []
        for each in prompts:  # what host memory evicts before the disk has it is not stored
            answers.append(ask(engine, each)[0])
            evict_all(engine)
            assert eventually(lambda: disk_counts(engine)["resident_blocks"] >= 11 * len(answers))
        evict_all(engine)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert ask(engine, prompt) == (answer, 40)


def blocks_read(engine: HFEngine) -> int:
    return int(disk_counts(engine)["read_bytes"]) // lower_of(engine).memory.block_bytes


@pytest.mark.parametrize(("num_together", "host_blocks"), [(2, 26), (3, 26), (1, 8), (2, 8)])
def test_what_is_read_is_used(tmp_path: Path, num_together: int, host_blocks: int) -> None:
    """Requests side by side that need more than host memory has, or one of which it can't hold."""
    prompts = [prompt_of(81, seed) for seed in range(6)]
    with on_disk(tmp_path / "disk", num_blocks=256, host_blocks=256) as engine:
        answers = [ask(engine, each) for each in prompts]
    with on_disk(tmp_path / "disk", num_blocks=256, host_blocks=host_blocks) as engine:
        with ThreadPoolExecutor(num_together) as threads:
            found = list(threads.map(partial(ask, engine), prompts))
        assert found == [(answer, 80) for answer, _ in answers]
        assert blocks_read(engine) == disk_counts(engine)["hit_blocks"] == 6 * 20
        assert hits(engine) == 0


def test_a_request_without_room_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its load begins when it has its blocks. What comes ahead for an announcement is another matter."""
    monkeypatch.setattr(Ladder, "expect", lambda self, expected: None)
    answer, lacks = filled(tmp_path / "disk"), threading.Event()
    with on_disk(tmp_path / "disk") as engine, ThreadPoolExecutor(1) as threads:
        with engine.cache.open(engine.namespace("b"), prompt_of(100)):
            asked = threads.submit(ask, engine, PROMPT, on_no_room=lambda error: not lacks.set())
            is_set(lacks)
            assert blocks_read(engine) == 0
        assert asked.result(LIMIT_S) == (answer, 40) and blocks_read(engine) == 10


def test_what_was_read_and_not_used_is_no_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = filled(tmp_path / "disk")

    def fail(*_: object) -> None:
        raise OSError("no memory")

    with on_disk(tmp_path / "disk") as engine:
        monkeypatch.setattr(HostBlocks, "put", fail)
        assert ask(engine, PROMPT) == (answer, 0)
        assert blocks_read(engine) > 0 == disk_counts(engine)["hit_blocks"] == hits(engine)
        monkeypatch.undo()


@pytest.mark.parametrize("forget", ["purge", "clear"])
def test_what_is_forgotten_while_it_comes_is_not_used(tmp_path: Path, forget: str) -> None:
    answer, reads = filled(tmp_path / "disk"), Reads()
    with on_disk(tmp_path / "disk", files=FaultyFiles(reads)) as engine, ThreadPoolExecutor(1) as threads:
        with lower_of(engine).gate:
            disk = lower_of(engine).disk
            assert disk is not None and eventually(lambda: disk.purges.is_known("a"))
        reads.is_armed = True
        asked = threads.submit(ask, engine, PROMPT)
        assert eventually(lambda: reads.num_held > 0)
        forgets = threading.Thread(target=forget_it, args=(engine, forget))
        forgets.start()
        assert eventually(lambda: lower_of(engine).mark("a") != 0)
        reads.open()
        ended(forgets)
        if forget == "purge":
            with pytest.raises(LeaseError):
                asked.result(LIMIT_S)
        else:
            assert asked.result(LIMIT_S) == (answer, 0)
        assert disk_counts(engine)["hit_blocks"] == hits(engine) == 0
        reader = lower_of(engine).reader
        assert reader is not None and eventually(lambda: not disk.num_running and not reader.num_running)
        assert lower_of(engine).host.cache.stats().num_sequences == 0


def test_tenants_share_nothing_on_disk(tmp_path: Path) -> None:
    answer = filled(tmp_path / "disk", "a")
    with on_disk(tmp_path / "disk") as engine:
        assert ask(engine, PROMPT, "b") == (answer, 0)
        assert engine.generate(
            engine.namespace("a", salt="x"), PROMPT, 1, eos_token_id=-1
        ).num_cached_tokens == [0]
        assert ask(engine, PROMPT, "a") == (answer, 40)


@pytest.mark.parametrize("forget", ["purge", "clear"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_forgotten_stays_forgotten_after_a_restart(tmp_path: Path, forget: str, when: str) -> None:
    """Before the restart, or after it, while the folder still has it."""
    with on_disk(tmp_path / "disk") as engine:
        answer, _ = ask(engine, PROMPT)
        ask(engine, PROMPT, "b")
        assert eventually(lambda: disk_counts(engine)["resident_blocks"] >= 20)
        if when == "before":
            forget_it(engine, forget)
            assert ask(engine, prompt_of(5, 77), "a")[1] == 0
    with on_disk(tmp_path / "disk") as engine:
        if when == "after":
            forget_it(engine, forget)
        assert ask(engine, PROMPT) == (answer, 0)
        assert ask(engine, PROMPT, "b") == (answer, 40), "another tenant's stays"
    with on_disk(tmp_path / "disk") as engine:
        assert ask(engine, PROMPT) == (answer, 40), "what was computed after it is kept"


def forget_it(engine: HFEngine, how: str) -> None:
    assert isinstance(engine.cache, TieredCache)
    if how == "purge":
        engine.cache.purge("a")
    else:
        engine.cache.clear(engine.namespace("a"))
    assert not engine.cache.pending("a")


def test_a_purge_that_skips_the_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tiers.disk.records.DiskRecords.purge", lambda self, tenant: 0)
    with pytest.raises(AssertionError):
        test_what_was_forgotten_stays_forgotten_after_a_restart(tmp_path, "purge", "before")


@pytest.mark.parametrize("forget", ["purge", "clear"])
def test_a_store_in_the_middle_of_a_purge_is_forgotten_too(
    tmp_path: Path, forget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is emptied early, and what host memory still has is stored once more before it is emptied too."""
    with on_disk(tmp_path / "disk") as engine:
        cache = engine.cache
        assert isinstance(cache, TieredCache) and cache.lower is not None and cache.lower.disk is not None
        disk, name, original = cache.lower.disk, engine.namespace("a"), HostTier.forget
        answer, _ = ask(engine, PROMPT)
        assert eventually(lambda: disk_counts(engine)["resident_blocks"] >= 10)

        def late(self: HostTier, scope: Scope) -> Pending:
            with lower_of(engine).gate:
                disk.purges._retries_at = 0.0
                disk.purges._retry_owed()
            assert eventually(lambda: disk.records.counts()["sealed"] == 0)
            assert eventually(lambda: not disk.purges.owed)
            with lower_of(engine).gate:
                disk.demotions.offer(Offer(name, 0, encode(PROMPT), 0, 10))
            assert eventually(lambda: disk.records.counts()["sealed"] >= 10)
            return original(self, scope)

        monkeypatch.setattr(HostTier, "forget", late)
        forget_it(engine, forget)
        assert disk.records.counts()["sealed"] == 0
    with on_disk(tmp_path / "disk") as engine:
        assert ask(engine, PROMPT) == (answer, 0)


def test_new_weights_forget_all(tmp_path: Path) -> None:
    answer = filled(tmp_path / "disk")
    with on_disk(tmp_path / "disk") as engine:
        engine.weights_changed(3)
        assert ask(engine, PROMPT) == (answer, 0)
    with on_disk(tmp_path / "disk") as engine:
        assert ask(engine, PROMPT) == (answer, 0), (
            "these are the weights of version 0 again, whose KV was forgotten"
        )


def test_a_strict_tenant_has_nothing_on_disk(tmp_path: Path) -> None:
    strict = Tenant("a", guaranteed_blocks=16, max_blocks=16, mode="strict")
    with on_disk(tmp_path / "disk") as engine:
        engine.cache.add_tenant(strict)
        answer, _ = ask(engine, PROMPT)
        ask(engine, PROMPT, "b")
        assert eventually(lambda: disk_counts(engine)["resident_blocks"] == 11)
    with on_disk(tmp_path / "disk") as engine:
        engine.cache.add_tenant(strict)
        assert disk_counts(engine)["resident_blocks"] == 11
        assert ask(engine, PROMPT) == (answer, 0) and ask(engine, PROMPT, "b") == (answer, 40)


def test_the_folder_waits_for_the_fleets_purges(tmp_path: Path) -> None:
    """Nothing is served until all purges of the fleet are known; then nothing of an older generation is."""
    answer = filled(tmp_path / "disk")
    filled(tmp_path / "disk", "b")
    known = threading.Event()
    with on_disk(tmp_path / "disk", awaits=True) as engine:
        assert isinstance(engine.cache, TieredCache)
        engine.cache.follow_generations(lambda tenant: 5 if tenant == "a" else 0, known.is_set)
        assert disk_counts(engine)["open"] == 0
        assert ask(engine, prompt_of(9, 77))[1] == 0
        known.set()
        assert eventually(lambda: disk_counts(engine)["open"] == 1)
        assert ask(engine, PROMPT, "a") == (answer, 0), "purged while this replica was down"
        assert ask(engine, PROMPT, "b") == (answer, 40)


def test_the_disk_learns_no_purge_that_the_cache_has_not_applied(tmp_path: Path) -> None:
    """It would outlive a crash: the next process would keep what the cache had from before the purge."""
    answer, applied = filled(tmp_path / "disk"), list[int | None]([None])
    with on_disk(tmp_path / "disk") as engine:
        cache, disk = engine.cache, lower_of(engine).disk
        assert isinstance(cache, TieredCache) and disk is not None
        cache.follow_generations(lambda tenant: applied[-1], lambda: True)
        assert ask(engine, PROMPT) == (answer, 0) and not disk.purges.is_known("a")
        assert disk.records.folder.fleet_generation("a") == 0
        cache.purge("a", generation=7, wait_s=0.0)
        applied.append(7)
        assert eventually(lambda: not cache.pending() and disk.purges.is_known("a"))
        assert disk.records.folder.fleet_generation("a") == 7
        assert ask(engine, PROMPT) == (answer, 0)
    with on_disk(tmp_path / "disk") as engine:
        cache = engine.cache
        assert isinstance(cache, TieredCache)
        cache.follow_generations(lambda tenant: 7, lambda: True)
        cache.purge("a", generation=7, wait_s=0.0)
        assert not cache.pending() and ask(engine, PROMPT) == (answer, 40)
        for generation in (6, 8):
            cache.purge("a", generation=generation, wait_s=0.0)
            assert eventually(lambda: not cache.pending()) and ask(engine, PROMPT) == (answer, 0)


def lower_of(engine: HFEngine) -> Ladder:
    assert isinstance(engine.cache, TieredCache) and isinstance(engine.cache.lower, Ladder)
    return engine.cache.lower


def test_another_store_of_the_fleets_purges_empties_the_disk(tmp_path: Path) -> None:
    """At the start, and while it serves: purges that only the lost store had must not be missed."""
    answer, stores = filled(tmp_path / "disk"), {"now": "a" * 32}

    def follow(engine: HFEngine) -> None:
        assert isinstance(engine.cache, TieredCache)
        engine.cache.follow_generations(lambda tenant: 0, lambda: True, lambda: stores["now"])
        assert eventually(lambda: disk_counts(engine)["open"] == 1)

    for known, cached in (("a", 40), ("a", 40), ("b", 0), ("b", 40)):
        stores["now"] = known * 32
        with on_disk(tmp_path / "disk", awaits=True) as engine:
            follow(engine)
            assert ask(engine, PROMPT) == (answer, cached), known
    with on_disk(tmp_path / "disk", awaits=True) as engine:
        follow(engine)
        stores["now"] = "c" * 32
        assert eventually(lambda: disk_counts(engine)["resident_blocks"] == 0)
        assert eventually(lambda: disk_counts(engine)["open"] == 1)
        assert ask(engine, PROMPT) == (answer, 0)
        disk = lower_of(engine).disk
        assert disk is not None and disk.records.folder.store == "c" * 32


class Notes:
    """A store of the fleet, as a disk uses it. ``hold``: its calls wait for this event."""

    def __init__(self) -> None:
        self.store, self.hold = MemoryStore(), threading.Event()
        self.hold.set()

    def disk_notes(self, folder: bytes, tags: Sequence[bytes]) -> list[bytes | None]:
        return self.store.notes(folder, tags)

    def note_disk(self, folder: bytes, notes: Mapping[bytes, bytes]) -> int:
        is_set(self.hold)
        return self.store.keep_notes(folder, notes).value

    def num(self) -> int:
        """How many notes it has."""
        return sum(map(len, self.store.noted.values()))

    def follow(self, engine: HFEngine) -> None:
        assert isinstance(engine.cache, TieredCache)
        engine.cache.follow_generations(lambda tenant: 0, lambda: True, lambda: "a" * 32, self)


@pytest.mark.parametrize("forget", ["clear", "weights", "removed meanwhile", "store away"])
def test_an_older_folder_has_nothing_of_what_was_forgotten_since(
    tmp_path: Path, forget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet's generation stays: it is this folder that forgot, and the store's note of it shows that."""
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    folder, notes = tmp_path / "disk", Notes()
    with on_disk(folder) as engine:
        answer, _ = ask(engine, PROMPT, "a")
        ask(engine, PROMPT, "b")
    shutil.copytree(folder, tmp_path / "old")
    with on_disk(folder, awaits=True) as engine:
        cache, name = engine.cache, engine.namespace("a")
        assert isinstance(cache, TieredCache)
        notes.follow(engine)
        assert eventually(lambda: disk_counts(engine)["open"] == 1) and not notes.num()
        match forget:
            case "clear":
                assert ask(engine, PROMPT) == (answer, 40)
                cache.clear(name)
                assert notes.num() == 1, "before the call returns"
            case "weights":
                engine.weights_changed()
            case "removed meanwhile":
                cache.forget_in_tiers(Scope(None, but=frozenset(["b"])))
            case _:
                notes.store.is_reachable = False
                cache.purge("a")
                assert not cache.pending() and not notes.num(), (
                    "the disk forgot it, and the store doesn't know yet"
                )
                notes.store.is_reachable = True
        assert eventually(lambda: notes.num() == (2 if forget == "weights" else 1))
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "old", folder)
    with on_disk(folder, awaits=True) as engine:
        notes.store.is_reachable = False
        notes.follow(engine)
        assert eventually(lambda: lower_of(engine).disk.purges._meeting is not None)  # type: ignore[union-attr]
        assert disk_counts(engine)["open"] == 0, "closed until the store answers"
        notes.store.is_reachable = True
        assert eventually(lambda: disk_counts(engine)["open"] == 1)
        assert ask(engine, PROMPT) == (answer, 0)
        assert ask(engine, PROMPT, "b") == (answer, 0 if forget == "weights" else 40)
    with on_disk(folder, awaits=True) as engine:
        notes.follow(engine)
        assert eventually(lambda: disk_counts(engine)["open"] == 1)
        assert ask(engine, PROMPT) == (answer, 40), "once is enough"


def test_a_store_that_hangs_holds_up_one_clear_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.NOTE_S", 0.05)
    folder, notes = tmp_path / "disk", Notes()
    answer = filled(folder)
    with on_disk(folder, awaits=True) as engine:
        notes.follow(engine)
        assert eventually(lambda: disk_counts(engine)["open"] == 1)
        notes.hold.clear()
        try:
            for _ in range(2):
                engine.cache.purge("a")
                assert isinstance(engine.cache, TieredCache) and not engine.cache.pending()
                assert ask(engine, PROMPT) == (answer, 0)
                assert eventually(lambda: disk_counts(engine)["resident_blocks"] >= 10)
        finally:
            notes.hold.set()
        assert eventually(lambda: notes.num() == 1)


def test_a_disk_that_cannot_forget_another_stores_records_stays_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    answer, files, stores = filled(tmp_path / "disk"), FaultyFiles(), ["a" * 32]
    with on_disk(tmp_path / "disk", files=files, awaits=True) as engine:
        assert isinstance(engine.cache, TieredCache)
        engine.cache.follow_generations(lambda tenant: 0, lambda: True, lambda: stores[-1])
        assert eventually(lambda: disk_counts(engine)["open"] == 1)
        files.before = failing("write sync rename", errno.EIO)
        stores.append("b" * 32)
        assert eventually(lambda: "stays closed: " in caplog.text)
        assert disk_counts(engine)["open"] == 0 and ask(engine, PROMPT) == (answer, 0)
        files.before = lambda call: None
        assert eventually(lambda: disk_counts(engine)["open"] == 1)
        assert disk_counts(engine)["resident_blocks"] == 0


def test_what_is_owed_is_repeated_while_the_tiers_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    filled(tmp_path / "disk")
    files = FaultyFiles()
    with on_disk(tmp_path / "disk", files=files) as engine:
        lower, cache = lower_of(engine), engine.cache
        assert isinstance(cache, TieredCache)
        files.before = failing("write sync rename", errno.EIO)
        cache.purge("a")
        assert cache.pending().tenants == {"a"}

        def fail(*_: object) -> None:
            raise RuntimeError("an error in the tiers")

        monkeypatch.setattr(lower.memory, "save", fail)
        for seed in (9, 10):
            ask(engine, prompt_of(41, seed), "b")
        assert eventually(lambda: disk_counts(engine)["open"] == 0), "off"
        files.before = lambda call: None
        assert eventually(lambda: not cache.pending())
    with on_disk(tmp_path / "disk") as engine:
        assert ask(engine, PROMPT)[1] == 0


@pytest.mark.parametrize("where", ["knows", "tick"])
def test_an_error_in_the_tiers_thread_does_not_end_it(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    answer, files, errors = filled(tmp_path / "disk"), FaultyFiles(), [RuntimeError("a failure")]

    def knows() -> bool:
        if errors:
            raise errors[0]
        return True

    with on_disk(tmp_path / "disk", files=files, awaits=where == "knows") as engine:
        cache, lower = engine.cache, lower_of(engine)
        assert isinstance(cache, TieredCache)
        if where == "tick":
            monkeypatch.setattr(lower.memory, "load", lambda work: knows())
            monkeypatch.setattr(Ladder, "_guarded", lambda self: nullcontext())
        cache.follow_generations(lambda tenant: 0, knows)
        files.before = failing("write sync rename", errno.EIO, times=3)
        cache.purge("a")
        assert eventually(lambda: not cache.pending()), "repeated, whatever fails beside it"
        assert eventually(lambda: disk_counts_of(lower)["errors"] >= 3)
        assert caplog.text.count("a tick of the tiers below the cache failed") == 1, "told once"
        errors.clear()
        if where == "knows":
            assert eventually(lambda: disk_counts(engine)["open"] == 1)
            assert ask(engine, PROMPT) == (answer, 0)
        monkeypatch.undo()


def disk_counts_of(lower: Ladder) -> Any:
    return lower.counts()["host"]


def test_a_purge_after_the_close_is_refused(tmp_path: Path) -> None:
    with on_disk(tmp_path / "disk") as engine:
        answer, _ = ask(engine, PROMPT)
        engine.close()
        for call in (
            lambda: engine.cache.purge("a"),
            lambda: engine.cache.clear(engine.namespace("a")),
            lambda: engine.cache.remove_tenant("a"),
        ):
            with pytest.raises(TierError, match="closed, and can't forget: open it again, then purge"):
                call()
        assert engine.cache.generation("a") == 0, "a refused call changes nothing"
    with on_disk(tmp_path / "disk") as engine:
        assert ask(engine, PROMPT) == (answer, 40)


@pytest.mark.parametrize("how", ["purge", "clear"])
def test_a_close_tells_what_the_disk_still_owes(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next opening doesn't find it, because its key was marked before anything failed."""
    answer, files = filled(tmp_path / "disk"), FaultyFiles()
    message = r"of 1 purged or cleared tenants \('a'\): .*Input/output error"
    with pytest.raises(TierError, match=message), on_disk(tmp_path / "disk", files=files) as engine:
        assert isinstance(engine.cache, TieredCache)
        ask(engine, prompt_of(9, 77))
        files.before = failing("write", errno.EIO)
        if how == "purge":
            engine.cache.purge("a")
        else:
            engine.cache.clear(engine.namespace("a"))
        assert engine.cache.pending().tenants == {"a"}
    assert any(each.levelname == "ERROR" and "Purge them again" in each.message for each in caplog.records)
    with on_disk(tmp_path / "disk") as engine:
        assert ask(engine, PROMPT) == (answer, 0)


def test_a_close_beside_a_purge_that_hangs_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that was closed under the purge might be another file's by the time it goes on."""
    filled(tmp_path / "disk")
    for name in ("disk.tier.CLOSING_S", "disk.tier._ADMIN_S", "pending.FORGET_S"):
        monkeypatch.setattr(f"radixkv.tiers.{name}", 0.1)
    hang = HangingDisk("write")
    with (
        pytest.raises(TierError, match="the disk doesn't answer"),
        on_disk(tmp_path / "disk", files=FaultyFiles(hang)) as engine,
    ):
        hang.is_armed = True
        engine.cache.purge("a")
    with pytest.raises(ConfigError, match="no other process uses"), on_disk(tmp_path / "disk"):
        pass
    hang.is_over.set()


@pytest.mark.parametrize("calls", ["read", "write", "sync", "read write sync rename remove"])
def test_errors_of_the_disk_cost_hits_only(tmp_path: Path, calls: str) -> None:
    answer = filled(tmp_path / "disk")
    files = FaultyFiles()
    with on_disk(tmp_path / "disk", files=files) as engine:
        files.before = failing(calls, errno.EIO)
        found, cached = ask(engine, PROMPT)
        assert found == answer and cached == (0 if "read" in calls else 40)
        assert ask(engine, prompt_of(41, 9))[1] == 0
        files.before = lambda call: None


class HangingDisk:
    """Blocks every thread of the tier in these calls until ``is_over``."""

    def __init__(self, calls: str) -> None:
        self.calls, self.is_armed, self.is_over = calls.split(), False, threading.Event()

    def __call__(self, call: str) -> None:
        if self.is_armed and call in self.calls:
            is_set(self.is_over)


@pytest.mark.parametrize("calls", ["read", "write", "read write sync rename remove"])
def test_a_disk_that_never_answers_holds_nobody_up(
    tmp_path: Path, calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs until all have got their answers: otherwise this test would hang too."""
    answer = filled(tmp_path / "disk")
    monkeypatch.setattr("radixkv.tiers.disk.patience.LEAST_WAIT_S", 0.05)
    monkeypatch.setattr("radixkv.tiers.pending.FORGET_S", 0.2)
    hang = HangingDisk(calls)
    with on_disk(tmp_path / "disk", files=FaultyFiles(hang)) as engine:
        cache = engine.cache
        assert isinstance(cache, TieredCache)
        ask(engine, prompt_of(9, 77))  # the tenant's generation is known
        hang.is_armed = True
        assert ask(engine, PROMPT)[0] == answer
        for seed in range(5):
            ask(engine, prompt_of(41, seed + 20))
        cache.purge("a")
        assert ask(engine, PROMPT)[0] == answer
        if calls != "read":
            assert cache.pending("a"), "shown until it is done"
        hang.is_armed = False
        hang.is_over.set()
        assert eventually(lambda: not cache.pending("a"))
    with on_disk(tmp_path / "disk") as engine:
        assert ask(engine, PROMPT)[0] == answer


@pytest.mark.parametrize("wrong", ["secret", "foreign", "size", "taken"])
def test_folders_that_are_refused(tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "disk"
    if wrong == "foreign":
        folder.mkdir(mode=0o700)
        (folder / "letters.txt").write_text("mine")
        with pytest.raises((ConfigError, TierError), match=r"letters|empty|ours"), on_disk(folder):
            pass
        assert (folder / "letters.txt").read_text() == "mine"
        return
    filled(folder)
    if wrong == "secret":
        with (
            pytest.raises((ConfigError, TierError), match="secret"),
            on_disk(folder, secret=b"another secret!!"),
        ):
            pass
    elif wrong == "size":
        model = model_of()
        with pytest.raises(ConfigError):
            HFEngine(
                model,
                TieredCache(CacheConfig(32, SIZE, layout_of(model))),
                tiers=TierSettings(host_bytes(8), DiskOptions(tmp_path / "small", 10, SECRET)),
            )
    else:
        with on_disk(folder), pytest.raises((ConfigError, TierError)), on_disk(folder):
            pass
    with on_disk(folder) as engine:
        assert ask(engine, PROMPT)[1] == 40, "a refusal changes nothing"


@pytest.mark.parametrize("rate", [-5.0, 0.0, float("nan"), float("inf"), True, "1GB"])
def test_a_wrong_rate_of_writes_is_refused(rate: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bytes_per_s=.*a finite number above 0"):
        DiskOptions(tmp_path / "disk", 1 << 20, SECRET, bytes_per_s=rate)


def test_errors_of_the_folder_name_the_setting(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"disk=.*mode 0700"), on_disk(folder):
        pass
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"disk="), on_disk(folder):
        pass
