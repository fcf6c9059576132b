"""A disk below lossy host memory: records of one dtype, in a folder of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, Tenant
from radixkv.audit.oracle import Engine
from radixkv.clock import ManualClock
from radixkv.errors import ConfigError
from radixkv.index.below import Scope
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.settings import DiskOptions
from radixkv.tiers.tiered_cache import TieredCache
from radixkv.tiers.tiers_by_dtype import TiersByDtype
from tests.tiers.support import FaultyFiles
from tests.tiers.support import patience as patience
from tests.tiers.test_cache_tiers import NS, OTHER, PROMPT, SIZE, loading_of
from tests.tiers.test_loading import SECRET
from tests.tiers.test_tier_dtype import LAYOUT, LossyOwner
from tests.waiting import eventually, is_set

pytestmark = pytest.mark.slow


class LossyDiskOwner(LossyOwner):
    """Tenant a is lossy, tenant b exact; each has a disk. ``is_added``: False leaves a without settings, exact."""

    def __init__(
        self,
        folder: Path,
        dtype: Any,
        exact: bool = True,
        num_blocks: int = 40,
        dtype_of_a: Any = None,
        is_added: bool = True,
    ) -> None:
        config = CacheConfig(num_blocks, SIZE, LAYOUT, host_blocks=64, lossy_host_blocks=64)
        self.cache = TieredCache(
            config,
            disk=options(folder / "exact") if exact else None,
            lossy_disks={dtype: options(folder / "lossy")},
            fingerprint="toy",
        )
        self.engine = Engine(self.cache)
        if is_added:
            self.cache.add_tenant(Tenant("a", tier_dtype=dtype_of_a or dtype))

    def on_disk(self, dtype: str) -> int:
        name = "disk" if dtype == "exact" else f"disk_{dtype}"
        return int(self.cache.tier_counts()[name]["resident_blocks"])


def options(folder: Path) -> DiskOptions:
    return DiskOptions(folder, 4 << 20, SECRET, files=FaultyFiles())


@contextmanager
def on_disk(folder: Path, dtype: Any = "int8", **settings: Any) -> Iterator[LossyDiskOwner]:
    owner = LossyDiskOwner(folder, dtype, **settings)
    try:
        yield owner
    finally:
        owner.cache.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folders with the KV of the prompt, of tenant a as int8 and of tenant b exact."""
    with on_disk(tmp_path) as owner:
        for namespace in (NS, OTHER):
            owner.ask(PROMPT, namespace)
        assert eventually(lambda: owner.on_disk("int8") == owner.on_disk("exact") == 10)
    return tmp_path


def loaded(owner: LossyDiskOwner, namespace: Namespace) -> int:
    """Open the prompt, and return how many of its tokens come back. They are right."""
    with owner.cache.open(namespace, PROMPT) as sequence:
        if sequence.loading is None:
            return 0
        assert loading_of(sequence).wait() and owner.is_right(sequence)
        return sequence.num_committed_tokens


def test_a_restart_finds_what_was_kept(folder: Path) -> None:
    with on_disk(folder) as owner:
        assert loaded(owner, NS) == loaded(owner, OTHER) == 40
        assert owner.is_exact(PROMPT, OTHER) and not owner.is_exact(PROMPT, NS)
        counts = owner.cache.tier_counts()
        assert counts["disk"]["hit_blocks"] == counts["disk_int8"]["hit_blocks"] == 10
        first = owner.engine.read(owner.cache.match(NS, PROMPT).block_ids).copy()
        owner.evict()
        assert owner.ask(PROMPT) == (40, 1), "host memory has it again"
        assert (owner.engine.read(owner.cache.match(NS, PROMPT).block_ids) == first).all()


def test_records_of_another_dtype_are_never_read(folder: Path) -> None:
    """They have the same size, and lie in the folder that is given."""
    with on_disk(folder, "fp8") as owner:
        assert loaded(owner, NS) == 0
        assert owner.cache.tier_counts()["disk_fp8"]["hit_blocks"] == 0
        assert loaded(owner, OTHER) == 40


def test_a_folder_of_another_dtype_begins_anew(folder: Path) -> None:
    with on_disk(folder, "fp8") as owner:
        owner.ask(PROMPT)
        assert eventually(lambda: owner.on_disk("fp8") == 10), "no old record is in the way"
    with on_disk(folder) as owner:
        assert loaded(owner, NS) == 0 and owner.on_disk("int8") == 0
        assert loaded(owner, OTHER) == 40


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_dtype_that_comes_back_finds_nothing_of_before(folder: Path, is_asked: bool) -> None:
    """Tenant a is int8, exact, int8; tenant b is exact, int8, exact. The first settings of a start count."""
    with on_disk(folder, dtype_of_a="exact") as owner:
        owner.cache.add_tenant(Tenant("b", tier_dtype="int8"))
        assert not owner.cache.pending() and owner.on_disk("int8") == owner.on_disk("exact") == 0
        for namespace in (NS, OTHER) if is_asked else ():
            assert loaded(owner, namespace) == 0
            owner.ask(PROMPT, namespace)
    with on_disk(folder) as owner:
        owner.cache.add_tenant(Tenant("b"))
        assert loaded(owner, NS) == loaded(owner, OTHER) == 0


def test_the_first_request_without_settings_decides_on_the_dtype(folder: Path) -> None:
    with on_disk(folder, is_added=False) as owner:
        owner.cache.prefetch(NS, PROMPT)
        assert owner.on_disk("int8") == 10, "to ask for a prompt decides nothing"
        owner.ask(PROMPT)
        assert eventually(lambda: owner.on_disk("int8") == 0 and not owner.cache.pending())
    with on_disk(folder) as owner:
        assert loaded(owner, NS) == 0


@pytest.mark.parametrize("is_added_late", [False, True])
def test_a_start_without_requests_of_a_tenant_changes_nothing(folder: Path, is_added_late: bool) -> None:
    with on_disk(folder, is_added=False) as owner:
        owner.ask([token + 1 for token in PROMPT], OTHER)
        if is_added_late:
            owner.cache.add_tenant(Tenant("a", tier_dtype="int8"))
            assert loaded(owner, NS) == 40
    with on_disk(folder) as owner:
        assert loaded(owner, NS) == loaded(owner, OTHER) == 40


def test_a_tenant_that_is_exact_after_a_restart_finds_nothing_lossy(folder: Path) -> None:
    with on_disk(folder) as owner:
        owner.cache.add_tenant(Tenant("a"))
        assert loaded(owner, NS) == 0
        assert eventually(lambda: not owner.cache.pending("a"))
        owner.cache.add_tenant(Tenant("a", tier_dtype="int8"))
        assert loaded(owner, NS) == 0, "the change has forgotten it"


def test_a_start_destroys_records_of_a_dtype_that_a_tenant_no_longer_has(folder: Path) -> None:
    with on_disk(folder, dtype_of_a="exact") as owner:
        owner.cache.add_tenant(Tenant("b", tier_dtype="int8"))
        owner.cache.forget_in_tiers(Scope(None, but=frozenset({"a", "b"})))
        assert eventually(lambda: owner.on_disk("int8") == owner.on_disk("exact") == 0)
        assert eventually(lambda: not owner.cache.pending())
        for namespace in (NS, OTHER):
            owner.ask(PROMPT, namespace)
        assert eventually(lambda: owner.on_disk("int8") == owner.on_disk("exact") == 10), (
            "of the other tenant"
        )
    with on_disk(folder) as owner:
        assert loaded(owner, NS) == loaded(owner, OTHER) == 0


def test_a_start_keeps_records_of_tenants_whose_dtype_is_not_known_yet(folder: Path) -> None:
    with on_disk(folder) as owner:
        owner.cache.forget_in_tiers(Scope(None, but=frozenset({"a", "b"})))
        assert owner.on_disk("int8") == owner.on_disk("exact") == 10
        assert loaded(owner, NS) == loaded(owner, OTHER) == 40


@pytest.mark.parametrize("forget", ["purge", "clear"])
def test_what_was_forgotten_does_not_come_back(folder: Path, forget: str) -> None:
    with on_disk(folder) as owner:
        owner.cache.purge("a") if forget == "purge" else owner.cache.clear(NS)
        assert loaded(owner, NS) == 0
        assert eventually(lambda: not owner.cache.pending("a"))
    with on_disk(folder) as owner:
        assert (loaded(owner, NS), loaded(owner, OTHER)) == (0, 40), "also after a restart"


@pytest.mark.parametrize("call", ["announce", "prefetch"])
def test_a_prompt_comes_ahead(folder: Path, call: str) -> None:
    with on_disk(folder) as owner:
        getattr(owner.cache, call)(NS, PROMPT)
        tiers = owner.tiers.tiers["int8"]
        assert eventually(lambda: tiers.level.cache.match(NS, PROMPT).num_tokens == 40)
        assert owner.ask(PROMPT) == (40, 1)


def test_what_is_refused(tmp_path: Path) -> None:
    one, config = options(tmp_path / "one"), CacheConfig(16, SIZE, LAYOUT, host_blocks=4, lossy_host_blocks=4)
    for lossy in ({"exact": one}, {"int4": one}):
        with pytest.raises(ConfigError, match="lossy_disks"):
            TieredCache(config, lossy_disks=lossy, fingerprint="toy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a folder of its own"):
        TieredCache(config, disk=one, lossy_disks={"int8": replace(one)}, fingerprint="toy")
    with pytest.raises(ConfigError, match="lossy_host_blocks"):
        TieredCache(replace(config, lossy_host_blocks=0), lossy_disks={"int8": one}, fingerprint="toy")
    with pytest.raises(ConfigError, match="none without host_blocks"):
        TieredCache(replace(config, host_blocks=0), disk=one, fingerprint="toy")
    with pytest.raises(ConfigError, match="none without host_blocks"):
        TieredCache(CacheConfig(16, SIZE, LAYOUT), lossy_disks={"int8": one}, fingerprint="toy")
    with opened(config, one), pytest.raises(ConfigError, match=r"folder|disk"):
        TieredCache(config, lossy_disks={"fp8": options(tmp_path / "two"), "int8": one}, fingerprint="toy")
    with opened(config, options(tmp_path / "two")):
        pass  # what was opened before the error is free again


@contextmanager
def opened(config: CacheConfig, disk: DiskOptions) -> Iterator[TieredCache]:
    cache = TieredCache(config, lossy_disks={"int8": disk}, fingerprint="toy")
    try:
        yield cache
    finally:
        cache.close()


@pytest.mark.parametrize("hangs", [("exact", "fp8", "int8"), ("exact",), ("int8",)])
def test_a_purge_waits_for_all_disks_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: tuple[str, ...]
) -> None:
    """Disks that don't answer cost one wait, and don't keep the others from forgetting."""
    clock, poll = ManualClock(), Job.poll
    monkeypatch.setattr("radixkv.tiers.pending.FORGET_S", 5.0)
    monkeypatch.setattr("radixkv.tiers.pending.monotonic", clock)

    def polled(job: Job, timeout_s: float) -> bool:
        is_over = poll(job, min(timeout_s, 0.02))
        clock.advance(0.0 if is_over else timeout_s)
        return is_over

    released, files = threading.Event(), {dtype: FaultyFiles() for dtype in ("exact", "fp8", "int8")}
    made = {dtype: replace(options(tmp_path / dtype), files=each) for dtype, each in files.items()}
    exact = made.pop("exact")
    config = CacheConfig(40, SIZE, LAYOUT, host_blocks=64, lossy_host_blocks=64)
    with closing(TieredCache(config, disk=exact, lossy_disks=made, fingerprint="toy")) as cache:  # type: ignore[arg-type]
        assert isinstance(cache.lower, TiersByDtype)
        disks = {dtype: tiers.disk for dtype, tiers in cache.lower.tiers.items()}
        for dtype in hangs:
            files[dtype].before = lambda call: is_set(released)
        with monkeypatch.context() as patch:
            patch.setattr(Job, "poll", polled)
            cache.purge("a")
        assert clock() == 5.0 and cache.pending("a")

        def owing() -> set[str]:
            return {dtype for dtype, disk in disks.items() if disk is not None and disk.debts.owed}

        assert eventually(lambda: owing() == set(hangs))
        released.set()
        assert eventually(lambda: not cache.pending("a"))


def test_all_dtypes_close_while_each_still_wants_to_evict_ahead(tmp_path: Path) -> None:
    """What one dtype gives to its disk passes the others' gates, and their threads would pass its own one."""
    owner = LossyDiskOwner(tmp_path, "int8", exact=False, num_blocks=128)
    cleaners = [each._cleaner for each in owner.tiers.tiers.values()]
    for number in range(20):
        owner.ask([1_000 * number + at for at in range(41)], OTHER if number < 16 else NS)
    thread = threading.Thread(target=owner.cache.close, daemon=True)
    thread.start()

    def has_closed() -> bool:
        for each in cleaners:
            each._wanted, each._is_due = 4, True
            each._wake()
        return not thread.is_alive()

    assert eventually(has_closed)
