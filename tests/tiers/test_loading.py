"""A disk below the cache of any engine: the engine computes from the front, records come from the back, they meet."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.audit.oracle import Engine
from radixkv.audit.properties.material import LAYOUT
from radixkv.clock import ManualClock
from radixkv.engines.control.tenants import is_known_to
from radixkv.errors import ConfigError
from radixkv.index.below import Loading, Scope
from radixkv.index.tokens import encode
from radixkv.tiers import ladder
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.disk.patience import DiskPatience
from radixkv.tiers.disk.tier import DiskTier
from radixkv.tiers.host.memory import HostBlocks
from radixkv.tiers.loading import RecordId, RecordReader, TierLoading
from radixkv.tiers.settings import UNCACHED_SALT, DiskOptions
from radixkv.tiers.tiered_cache import TieredCache
from tests.tiers.support import FaultyFiles, failing
from tests.tiers.support import clock as clock
from tests.tiers.support import patience as patience
from tests.tiers.test_tiered_cache import NS, OTHER, PROMPT, SIZE, STEMS, Life, Owner, changed, loading_of
from tests.waiting import LIMIT_S, eventually

SECRET = b"a secret of the fleet"


class Reads:
    """Lets as many reads through as ``allow`` said, once it is armed."""

    def __init__(self) -> None:
        self.is_armed = False
        self._begun, self._through = list[None](), list[None]()
        self._left = threading.Semaphore(0)

    def __call__(self, name: str) -> None:
        if name == "read" and self.is_armed:
            self._begun.append(None)
            self._left.acquire()
            self._through.append(None)

    @property
    def num(self) -> int:
        """Reads that it has let through."""
        return len(self._through)

    @property
    def num_held(self) -> int:
        """Reads that wait."""
        return len(self._begun) - len(self._through)

    def allow(self, num: int) -> None:
        self._left.release(num)

    def open(self) -> None:
        """Let all through from now on."""
        self.is_armed = False
        self._left.release(1_000)


class DiskOwner(Owner):
    """An engine of one's own, with a disk below."""

    def __init__(self, folder: Path, files: FaultyFiles | None = None, host_blocks: int = 64) -> None:
        self.cache = TieredCache(
            CacheConfig(40, SIZE, LAYOUT, host_blocks=host_blocks),
            disk=DiskOptions(folder, 4 << 20, SECRET, files=files or FaultyFiles()),
            fingerprint="toy",
        )
        self.engine = Engine(self.cache)

    @property
    def disk(self) -> DiskTier:
        assert self.below.disk is not None
        return self.below.disk

    def known(self) -> None:
        """Wait until the folder has applied the tenants' purges."""
        with self.below.gate:  # type: ignore[attr-defined]
            assert eventually(lambda: self.disk.purges.is_known("a") and self.disk.purges.is_known("b"))

    def is_idle(self) -> bool:
        """Whether no record is on its way, and all staging memory is free and zero."""
        rows, memory = range(self.below.memory.num_staging), self.below.memory
        return not self.disk.rows.num_used and not any(any(memory.staging_bytes(row)) for row in rows)

    def is_quiet(self) -> bool:
        """Whether nothing comes ahead any more; never in the middle of a step."""
        prefetch = self.below._prefetch
        assert prefetch is not None
        with self.below.gate:
            return not prefetch.is_busy


class Sleeper:
    """From now on, the thread of an owner's tiers sleeps for an hour when it has nothing to do, unless it is woken."""

    def __init__(self, owner: DiskOwner, patch: pytest.MonkeyPatch) -> None:
        self._is_asleep, wait = False, owner.below._has_work.wait

        def sleep(timeout: float | None = None) -> bool:
            self._is_asleep = timeout == 3_600.0
            try:
                return wait(timeout)
            finally:
                self._is_asleep = False

        patch.setattr(ladder, "_TICK_S", 3_600.0)
        patch.setattr(owner.below._has_work, "wait", sleep)

    def sleeps(self) -> bool:
        """Wait until it sleeps. Returns True."""
        return eventually(lambda: self._is_asleep, "its sleep")


@contextmanager
def on_disk(folder: Path, **settings: Any) -> Iterator[DiskOwner]:
    """Afterwards nothing is held, and the folder is free."""
    owner = DiskOwner(folder, **settings)
    try:
        yield owner
        assert eventually(owner.is_idle)
        assert eventually(lambda: not owner.disk.num_running)
        owner.check()
    finally:
        owner.cache.close()


@contextmanager
def held_reads(folder: Path) -> Iterator[tuple[DiskOwner, Reads]]:
    """A disk that knows all purges, and whose reads wait until they are let through. At the end all are."""
    reads = Reads()
    with on_disk(folder, files=FaultyFiles(reads)) as owner:
        owner.known()
        reads.is_armed = True
        try:
            yield owner, reads
        finally:
            reads.open()


@cache
def _filled(base: Path) -> Path:
    made = Path(mkdtemp(dir=base)) / "disk"
    with on_disk(made) as owner:
        for namespace in (NS, OTHER):
            assert owner.ask(PROMPT, namespace) == (0, 41)
        assert eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] == 20)
    return made


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the KV of the prompt, of two tenants. It is filled once, and copied for each test."""
    return Path(shutil.copytree(_filled(tmp_path_factory.getbasetemp()), tmp_path / "disk"))


def arrived(loading: Loading, num: int) -> bool:
    """Whether so many records of a load have come, and wait to be taken."""
    assert isinstance(loading, TierLoading)
    return eventually(lambda: sum(each.job.is_done for each in loading._reads) == num)


def test_a_restart_finds_what_was_computed(folder: Path) -> None:
    with on_disk(folder) as owner:
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert loading.wait() and (loading.num_tokens, loading.num_loaded_tokens) == (40, 40)
            assert sequence.num_committed_tokens == 40 and owner.is_right(sequence)
        owner.evict()
        assert owner.ask(PROMPT) == (40, 1), "host memory has it again"
        counts = owner.cache.tier_counts()
        assert (counts["disk"]["hit_blocks"], counts["host"]["hit_blocks"]) == (10, 10)
        assert counts["disk"]["load_seconds"] > 0 and counts["host"]["load_seconds"] > 0


def test_an_idle_engine_s_blocks_go_on_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are stored at once. The next ones follow, and don't wait until somebody looks again, in an hour here."""
    with on_disk(tmp_path / "disk", host_blocks=16) as owner:
        owner.ask(PROMPT[:5])
        assert eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] == 1)
        assert Sleeper(owner, monkeypatch).sleeps()
        owner.ask(PROMPT)
        assert eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] == 10)


def test_a_miss_asks_no_more_than_the_first_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_disk(folder) as owner:
        owner.known()
        monkeypatch.setattr(TierLoading, "begin", lambda self: pytest.fail("there is nothing"))
        for ids, namespace in (([7, *PROMPT], NS), (PROMPT, NS._replace(salt="x")), (PROMPT[:4], NS)):
            with owner.cache.open(namespace, ids) as sequence:
                assert sequence.loading is None


def test_the_engine_and_the_disk_meet(folder: Path) -> None:
    with held_reads(folder) as (owner, reads):
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert loading.num_tokens == 40
            assert loading.claim(8) == 8, "nothing has come, nothing is waited for"
            owner.compute(sequence, 8)
            reads.allow(4)
            assert arrived(loading, 4) and isinstance(loading, TierLoading)
            there = [each.id.block for each in loading._reads if each.job.is_done]
            assert min(there) > 2, "from the back, by some threads at once"
            assert loading.claim(100) == min(there) * SIZE
            assert loading.num_loaded_tokens == 16
            while sequence.num_committed_tokens < 41:
                owner.compute(sequence, loading.claim(100))
            assert owner.is_right(sequence) and loading.poll() and loading.num_loaded_tokens == 16
            reads.open()
        with owner.cache.open(NS, PROMPT) as sequence:
            assert sequence.num_cached_tokens == 40


def test_a_load_may_be_awaited_from_disk(folder: Path) -> None:
    with on_disk(folder) as owner:

        async def ask() -> int:
            with owner.cache.open(NS, PROMPT) as sequence:
                return await loading_of(sequence)

        assert asyncio.run(ask()) == 40


def test_host_memory_comes_first_and_the_disk_behind_it(folder: Path) -> None:
    with on_disk(folder) as owner:
        owner.ask(PROMPT[:21])
        owner.evict()
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert loading.wait() and loading.num_loaded_tokens == 40
            assert owner.is_right(sequence) and sequence.num_committed_tokens == 40


def test_a_disk_that_hangs_is_not_waited_for(
    folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.disk.patience.LEAST_WAIT_S", 1.0)
    with held_reads(folder) as (owner, _):
        assert owner.ask(PROMPT) == (0, 41), "claims go on"
        assert owner.disk.promotions.place_of(NS) is not None
        with owner.cache.open(OTHER, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert not loading.poll()
            clock.advance(1.0)
            assert loading.poll() and loading.num_loaded_tokens == 0
            assert owner.disk.promotions.place_of(OTHER) is None, "the disk rests"
            owner.compute(sequence, 41)


def test_who_polls_rarely_isnt_taken_for_a_slow_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tiers.loading.MAX_READS", 4)
    with on_disk(folder) as owner:
        owner.known()
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            for num_loaded in (16, 32, 40):
                assert arrived(loading, min(4, 10 - loading.num_loaded_tokens // SIZE))
                assert isinstance(loading, TierLoading)
                loading._ends_at = 0.0
                loading.poll()
                assert loading.num_loaded_tokens == num_loaded
            assert owner.disk.promotions.place_of(NS) is not None and sequence.num_committed_tokens == 40


def test_a_record_that_fails_leaves_a_gap(folder: Path) -> None:
    disk = FaultyFiles()
    with on_disk(folder, files=disk) as owner:
        owner.known()
        disk.before = failing("read", times=1, after=3)
        with owner.cache.open(NS, PROMPT) as sequence:
            loading = loading_of(sequence)
            loading.wait()
            assert 12 <= loading.num_loaded_tokens <= 36
            while sequence.num_committed_tokens < 41:
                owner.compute(sequence, loading.claim(100))
            assert owner.is_right(sequence)


def test_a_record_is_read_once_for_all(folder: Path) -> None:
    with (
        held_reads(folder) as (owner, reads),
        owner.cache.open(NS, PROMPT) as one,
        owner.cache.open(NS, [*PROMPT[:30], 7, 8]) as other,
    ):
        loads = [loading_of(one), loading_of(other)]
        assert [each.num_tokens for each in loads] == [40, 28]
        reads.allow(100)
        assert all(each.wait() for each in loads)
        assert (reads.num, one.num_committed_tokens, other.num_committed_tokens) == (10, 40, 28)
        assert owner.is_right(one) and owner.is_right(other)


@pytest.mark.parametrize("change", ["purge", "clear", "truncate", "fork", "release", "forgotten", "cancel"])
def test_records_on_their_way_are_dropped(folder: Path, change: str) -> None:
    """The sequence changes while its records are read: none is written, and all staging memory comes back."""
    with held_reads(folder) as (owner, reads):
        sequence = owner.cache.open(NS, PROMPT)
        loading = loading_of(sequence)
        reads.allow(4)
        assert arrived(loading, 4)
        if change == "cancel":
            loading.cancel()
        others = changed(owner, sequence, change)
        if change == "forgotten":
            del loading
            sequence.release()
            del sequence
            gc.collect()
        else:
            before = owner.engine.read(list(range(40))).tolist()  # type: ignore[arg-type]
            reads.open()
            loading.poll()
            assert owner.engine.read(list(range(40))).tolist() == before  # type: ignore[arg-type]
            assert loading.num_loaded_tokens == 0
            if sequence.is_open:
                owner.compute(sequence, 41)
                assert owner.is_right(sequence)
            for each in (sequence, *others):
                if change != "release":
                    each.release()
            loading.wait(0.01)


def test_what_was_purged_does_not_come_back_from_disk(folder: Path) -> None:
    with on_disk(folder) as owner:
        assert owner.cache.tenant("a") is None, "only the disk knows it"
        assert [is_known_to(owner.cache, each) for each in ("a", "b", "nobody")] == [True, True, False]
        owner.cache.purge("a")
        assert not is_known_to(owner.cache, "a")
        assert owner.ask(PROMPT) == (0, 41)
        with owner.cache.open(OTHER, PROMPT) as sequence:
            assert loading_of(sequence).wait() and sequence.num_committed_tokens == 40


def test_a_disk_needs_host_memory() -> None:
    with pytest.raises(ConfigError, match="host_blocks"):
        TieredCache(
            CacheConfig(16, SIZE, LAYOUT),
            disk=DiskOptions(Path("/nowhere"), 1 << 20, SECRET),
            fingerprint="toy",
        )
    assert PrefixCache(CacheConfig(16, SIZE, LAYOUT)).config.host_blocks == 0


class SlowLife(Life):
    """A life whose disk takes its time, and whose load is polled at random. Some prompts are announced."""

    def begin(self) -> None:
        """Announce another prompt, and open a request."""
        if self.chance.random() < 0.5:
            self.owner.cache.announce(self.chance.choice([NS, OTHER]), self.chance.choice(STEMS), ttl_s=0.05)
        super().begin()

    def wait(self, loading: Loading) -> None:
        """Wait a moment, or until it is over."""
        loading.wait(self.chance.choice([0.001, LIMIT_S]))

    def check(self) -> None:
        """The disk's own threads hold some of it for a moment."""
        owner = self.owner
        assert isinstance(owner, DiskOwner)

        def is_over() -> bool:  # also what was announced, which begins by itself
            return owner.is_quiet() and owner.is_idle() and not owner.disk.num_running

        assert eventually(is_over)
        owner.check()


def disk_lives(folder: Path, num: int, num_steps: int = 250) -> int:
    """Live random lives over a disk with a small host memory. Returns the tokens that were loaded."""
    loaded = 0
    for seed in range(num):
        owner = DiskOwner(folder / str(seed), host_blocks=16)
        try:
            life = SlowLife(owner, seed)
            life.run(num_steps)
            loaded += life.num_loaded
        finally:
            owner.cache.close()
    return loaded


@pytest.mark.slow
def test_random_lives_over_a_disk(tmp_path: Path) -> None:
    assert disk_lives(tmp_path, 6) > 200


# --- planted bugs


def an_unproven_record_counted_as_loaded(patch: pytest.MonkeyPatch) -> None:
    original = TierLoading._take_records

    def take(self: TierLoading, reader: RecordReader) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(Job, "wait", lambda self, timeout_s=None: True)
            original(self, reader)

    patch.setattr(TierLoading, "_take_records", take)


def test_an_unproven_record_counted_as_loaded_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    an_unproven_record_counted_as_loaded(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_record_that_fails_leaves_a_gap(folder)


def test_a_late_record_in_a_claimed_block_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: claims don't reach the load, and the late record holds something else."""
    original = HostBlocks.put
    monkeypatch.setattr(TierLoading, "_front", property(lambda self: 0))
    monkeypatch.setattr("radixkv.index.load_target._first_own", lambda cache, state: 0)
    monkeypatch.setattr(
        HostBlocks, "put", lambda self, rows, ids: original(self, [each * 0 for each in rows], ids)
    )
    with pytest.raises(AssertionError):
        test_the_engine_and_the_disk_meet(folder)


def test_a_read_that_outlives_a_purge_is_not_joined(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_reads(folder) as (owner, reads):
        assert isinstance(owner.below, object)
        reader = owner.below.reader  # type: ignore[attr-defined]
        with owner.below.gate:  # type: ignore[attr-defined]
            key = memoryview(b"".join(each.to_bytes(4, "little") for each in PROMPT[:4])).tobytes()
            old, new = (reader.begin(RecordId(mark, NS, 0, 0), key, []) for mark in (1, 2))
            joined = reader.begin(RecordId(2, NS, 0, 0), key, [])
            assert old is not new and new is joined
            reads.open()
            for each in (old, new, joined):
                reader.end(each)


# --- what counts as the disk's


def emptied(owner: DiskOwner) -> None:
    """Leave only the disk what it has."""
    owner.evict()
    with owner.below.gate:
        owner.below.host.cache.evict(1_000)


def rested_twice(owner: DiskOwner) -> DiskPatience:
    """Return the patience of a disk that was slow twice in a row, after its rest."""
    patience = owner.disk.patience
    patience.rest()
    patience.rest()
    patience._rests_until = 0.0
    return patience


def test_what_host_memory_has_tells_nothing_of_the_disk(folder: Path) -> None:
    with on_disk(folder) as owner:
        owner.ask(PROMPT)
        owner.evict()
        owner.known()
        patience = rested_twice(owner)
        with owner.cache.open(NS, PROMPT) as sequence:
            assert loading_of(sequence).wait() and sequence.num_committed_tokens == 40
        patience.rest()
        assert patience.is_worthless, "it was slow three times in a row"
        patience._rests_until = 0.0
        emptied(owner)
        with owner.cache.open(NS, PROMPT) as sequence:
            assert loading_of(sequence).wait() and sequence.num_committed_tokens == 40
        patience.rest()
        assert not patience.is_worthless


def test_what_comes_ahead_counts_where_a_request_finds_it(folder: Path) -> None:
    with on_disk(folder) as owner:
        owner.known()
        patience = rested_twice(owner)
        owner.cache.prefetch(NS, PROMPT)
        index = owner.below.host.index
        assert eventually(lambda: index.reach(NS, encode(PROMPT[:40]), 0) == 10)
        assert eventually(owner.is_quiet)
        counts = owner.cache.tier_counts()
        assert counts["disk"]["hit_blocks"] == counts["host"]["hit_blocks"] == 0
        assert counts["disk"]["loads"] > 0
        patience.rest()
        assert patience.is_worthless, "nobody waited for it, so it proves nothing"
        patience._rests_until = 0.0
        with owner.cache.open(NS, PROMPT) as sequence:
            assert loading_of(sequence).wait() and sequence.num_committed_tokens == 40
        counts = owner.cache.tier_counts()
        assert (counts["disk"]["hit_blocks"], counts["host"]["hit_blocks"]) == (0, 10)


def test_a_late_record_is_no_hit(folder: Path) -> None:
    """The engine has claimed its block meanwhile."""
    with held_reads(folder) as (owner, reads), owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        reads.allow(10)
        assert arrived(loading, 10)
        assert isinstance(loading, TierLoading)
        with owner.below.gate:
            loading._claimed = 16
            loading._take()
        assert loading.num_loaded_tokens == 24
        assert owner.disk.promotions._counts["disk_loaded_blocks"] == 6
        owner.compute(sequence, 41)


@pytest.mark.parametrize("namespace", [NS._replace(salt=f"{UNCACHED_SALT}x"), NS._replace(weights=7)])
def test_a_disk_forgets_the_tenant_also_for_a_namespace_of_which_nothing_is_kept(
    folder: Path, namespace: Namespace
) -> None:
    """A client may clear the salt of requests that leave nothing, or of former weights."""
    with on_disk(folder) as owner:
        owner.known()
        assert not owner.cache.forget_in_tiers(Scope("a", namespace))
        assert owner.ask(PROMPT) == (0, 41), "its keys are destroyed"
        with owner.cache.open(OTHER, PROMPT) as sequence:
            loading = loading_of(sequence)
            assert loading.wait() and loading.num_loaded_tokens == 40, "the other tenant's are not"
