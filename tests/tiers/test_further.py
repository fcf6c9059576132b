"""Tiers that somebody brings, below host memory and the disk: what reaches them, what comes back, what they forget."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import CacheConfig, Namespace, Tenant
from radixkv.audit.oracle import Engine
from radixkv.audit.properties.material import LAYOUT
from radixkv.clock import ManualClock
from radixkv.errors import ConfigError
from radixkv.index.below import Scope
from radixkv.index.tokens import encode
from radixkv.tiers.disk.io_threads import IOThreads, Job
from radixkv.tiers.pending import RETRY_S, Pending
from radixkv.tiers.settings import DiskOptions
from radixkv.tiers.tier import Offer, Records
from radixkv.tiers.tiered_cache import TieredCache
from tests.tiers.support import SECRET, FaultyFiles
from tests.tiers.support import clock as clock
from tests.tiers.support import patience as patience
from tests.tiers.test_tiered_cache import NS, OTHER, PROMPT, SIZE, Owner
from tests.waiting import eventually

BLOCK_BYTES = 4 * SIZE
_SHELF: Any = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "further_tier.py"))["Shelf"]


class Shelf(_SHELF):  # type: ignore[misc]
    """The tier of the example, for blocks of these tests."""

    def __init__(self, keeps: Callable[[int], bool] = lambda block: True) -> None:
        super().__init__(1_000)
        self.keeps, self.num_asked = keeps, 0
        _SHELF.find.__globals__["BLOCK_BYTES"] = BLOCK_BYTES

    def offer(self, offer: Offer, source: Records) -> None:
        super().offer(offer, ((block, content) for block, content in source if self.keeps(block)))

    def find(self, namespace: Namespace, key: bytes, first: int) -> int:
        self.num_asked += 1
        found: int = super().find(namespace, key, first)
        return found

    def num_of(self, tenant: str) -> int:
        """How many blocks of a tenant it has."""
        return sum(namespace.tenant == tenant for namespace, _ in self.kept)


_owners = list["ShelfOwner"]()


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    """The threads of a test's tiers end with it."""
    yield
    while _owners:
        _owners.pop().cache.close()


class ShelfOwner(Owner):
    """An engine of one's own, with such tiers below host memory."""

    def __init__(self, *shelves: Any, folder: Path | None = None) -> None:
        config = CacheConfig(40, SIZE, LAYOUT, host_blocks=64)
        disk = None if folder is None else DiskOptions(folder, 4 << 20, SECRET, files=FaultyFiles())
        self.cache = TieredCache(config, disk=disk, tiers=shelves, fingerprint="toy")
        self.engine = Engine(self.cache)
        _owners.append(self)

    def evict_all(self) -> None:
        """Leave nothing in the cache and in host memory."""
        self.evict()
        with self.below.gate:
            self.below.host.cache.evict(1_000)


def test_what_left_host_memory_comes_back() -> None:
    shelf = Shelf()
    owner = ShelfOwner(shelf)
    owner.ask(PROMPT)
    owner.evict_all()
    assert owner.ask(PROMPT) == (40, 1), "each block has its own KV, as `ask` checks"
    counts = owner.cache.tier_counts()["Shelf"]
    assert (counts["resident_blocks"], counts["hit_blocks"], counts["open"]) == (10, 10, 1)
    assert owner.ask(PROMPT, OTHER) == (0, 41), "another tenant has nothing of it"
    owner.check()
    owner.cache.close()
    assert not shelf.kept


def test_each_gives_what_the_one_before_lacks() -> None:
    owner = ShelfOwner(Shelf(lambda block: not 3 <= block < 6), Shelf(lambda block: 3 <= block < 8))
    owner.ask(PROMPT)
    owner.evict_all()
    assert owner.ask(PROMPT) == (40, 1)
    counts = owner.cache.tier_counts()
    assert counts["Shelf-1"]["hit_blocks"] == counts["Shelf-2"]["hit_blocks"] == 5
    owner.check()


def test_a_disk_is_asked_first(tmp_path: Path) -> None:
    owner = ShelfOwner(Shelf(), folder=tmp_path / "kv")
    owner.ask(PROMPT)
    assert eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] == 10)
    owner.evict_all()
    assert owner.cache.open(NS, PROMPT).loading.wait()  # type: ignore[union-attr]
    counts = owner.cache.tier_counts()
    assert counts["disk"]["hit_blocks"] == 10 and counts["Shelf"]["hit_blocks"] == 0
    owner.cache.close()


def test_a_gap_in_the_disk_is_filled(tmp_path: Path) -> None:
    owner = ShelfOwner(Shelf(), folder=tmp_path / "kv")
    owner.ask(PROMPT)
    assert eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] == 10)
    disk = owner.below.disk
    assert disk is not None
    records, key = disk.records, encode(PROMPT[:40])
    keys = records.folder.keys("a")
    assert keys is not None
    for block in (4, 5):
        slot = records._table.find(records._locator(keys, NS, memoryview(key)[: (block + 1) * BLOCK_BYTES]))
        assert slot is not None
        records._table.drop(slot)
    owner.evict_all()
    with owner.cache.open(NS, PROMPT) as sequence:
        assert sequence.loading is not None and sequence.loading.wait()
        assert sequence.loading.num_loaded_tokens == 40 and owner.is_right(sequence)
    counts = owner.cache.tier_counts()
    assert counts["disk"]["hit_blocks"] == 4 and counts["Shelf"]["hit_blocks"] == 6
    owner.cache.close()


@pytest.mark.parametrize("way", ["purge", "clear", "remove", "forget in tiers", "all but"])
def test_what_is_forgotten_is_forgotten_there(way: str) -> None:
    shelf = Shelf()
    owner = ShelfOwner(shelf)
    for namespace in (NS, OTHER):
        owner.cache.add_tenant(Tenant(namespace.tenant))
        owner.ask(PROMPT, namespace)
    match way:
        case "purge":
            owner.cache.purge("a")
        case "clear":
            owner.cache.clear(NS)
        case "remove":
            owner.cache.remove_tenant("a")
        case "forget in tiers":
            owner.cache.forget_in_tiers(Scope("a"))
        case _:
            owner.cache.forget_in_tiers(Scope(None, but=frozenset({"b"})))
    assert (shelf.num_of("a"), shelf.num_of("b")) == (0, 10)
    owner.evict_all()
    assert owner.ask(PROMPT, OTHER) == (40, 1)
    if way in ("purge", "clear"):
        assert owner.ask(PROMPT) == (0, 41)
    owner.check()


def test_what_is_offered_in_the_middle_of_a_purge_is_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    owner = ShelfOwner(shelf)
    owner.ask(PROMPT)
    kept, forget = dict(shelf.kept), owner.below.host.forget

    def late(scope: Scope) -> Pending:
        assert not shelf.kept, "it forgot before host memory did"
        shelf.kept |= kept
        return forget(scope)

    monkeypatch.setattr(owner.below.host, "forget", late)
    owner.cache.purge("a")
    assert not shelf.kept


def test_a_purge_while_no_process_was_there_is_told_before_anything_is_asked() -> None:
    """The tier outlives the process; the fleet purged the tenant in between."""
    shelf, told = Shelf(), list[int]()
    ShelfOwner(shelf).ask(PROMPT)
    forget, shelf.num_asked = shelf.forget, 0

    def noted(scope: Scope) -> Pending:
        told.append(scope.generation)
        found: Pending = forget(scope)
        return found

    shelf.forget = noted
    owner, generation = ShelfOwner(shelf), dict[str, int | None](a=None)
    owner.cache.follow_generations(lambda tenant: generation[tenant], lambda: True)
    assert owner.ask(PROMPT) == (0, 41) and not shelf.num_asked, "the fleet's purges aren't known yet"
    generation["a"] = 7
    owner.evict_all()
    assert owner.ask(PROMPT) == (0, 41) and told == [7]
    owner.ask([*PROMPT, *range(900, 910)])
    owner.evict_all()
    assert owner.ask([*PROMPT, *range(900, 910)])[0] and told == [7], "what came since is served"


def test_weights_that_change_leave_nothing_there() -> None:
    shelf = Shelf()
    owner = ShelfOwner(shelf)
    owner.ask(PROMPT)
    owner.below.weights_changed("m", 1)
    assert not shelf.kept
    owner.ask(PROMPT, NS._replace(weights=1))
    assert not shelf.kept, "after a restart the number means other weights"


def test_a_strict_tenant_has_nothing_there() -> None:
    shelf = Shelf()
    owner = ShelfOwner(shelf)
    owner.cache.add_tenant(Tenant("a", mode="strict", guaranteed_blocks=12))
    owner.ask(PROMPT)
    owner.evict_all()
    assert owner.ask(PROMPT) == (0, 41) and not shelf.kept and not shelf.num_asked


class Forgetting(Shelf):
    """A tier that destroys nothing until it ``can``."""

    def __init__(self) -> None:
        super().__init__()
        self.owed, self.num_removed, self.can, self.num_tries = frozenset[str](), 0, False, 0

    def forget(self, scope: Scope) -> Pending:
        assert scope.tenant is not None
        self.owed |= {scope.tenant}
        return Pending([self], scope.tenant)

    def find(self, namespace: Namespace, key: bytes, first: int) -> int:
        return 0 if namespace.tenant in self.owed else super().find(namespace, key, first)

    def retry(self, tenant: str) -> Job:
        self.num_tries += 1
        if self.can:
            super().forget(Scope(tenant))
            self.owed -= {tenant}
        return Job.ended(self.can)

    def retry_removed(self) -> None:
        """Nothing."""

    def problem(self, tenant: str) -> str:
        return "the store is away"


def test_a_purge_that_is_not_done_there_stays_pending(clock: ManualClock) -> None:
    shelf = Forgetting()
    owner = ShelfOwner(shelf)
    owner.ask(PROMPT)
    owner.cache.purge("a", wait_s=0)
    assert owner.cache.pending("a") and "the store is away" in str(owner.cache.pending())
    owner.evict_all()
    assert owner.ask(PROMPT) == (0, 41), "nothing of it is served meanwhile"
    shelf.can, tries = True, shelf.num_tries
    clock.advance(RETRY_S)
    with owner.below.gate:
        owner.below.tick()
    assert shelf.num_tries > tries and not owner.cache.pending() and not shelf.kept


@pytest.mark.parametrize("call", ["offer", "find", "read"])
def test_an_error_of_a_tier_costs_hits_alone(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = ShelfOwner(shelf := Shelf())
    owner.ask(PROMPT)
    owner.evict_all()

    def failing(*given: Any, **named: Any) -> Any:
        raise OSError("planted")

    monkeypatch.setattr(shelf, call, failing)
    owner.ask(PROMPT)
    owner.ask([*PROMPT[:20], *range(500, 540)])
    assert owner.cache.tier_counts()["host"]["errors"] >= 1
    monkeypatch.undo()
    owner.evict_all()
    owner.ask(PROMPT)
    owner.below.host.totals["errors"] = 0
    owner.check()


def test_a_tier_that_cannot_forget_says_so_after_the_others_have_forgotten() -> None:
    class Broken(Shelf):
        def forget(self, scope: Scope) -> Pending:
            raise OSError("planted")

    shelf = Shelf()
    owner = ShelfOwner(Broken(), shelf)
    owner.ask(PROMPT)
    with pytest.raises(OSError, match="planted"):
        owner.cache.purge("a")
    assert not shelf.kept and not owner.cache.match(NS, PROMPT).num_tokens
    assert owner.below.host.cache.match(NS, PROMPT).num_tokens == 0


def test_a_slow_tier_answers_while_the_engine_computes() -> None:
    """Its reads end in threads, some badly: what they don't bring is computed."""

    class Slow(Shelf):
        def __init__(self) -> None:
            super().__init__()
            self.threads = IOThreads(1, 1)

        def read(self, namespace: Any, key: bytes, block: int, into: Any, *, begun: Any = None) -> Job | None:
            def work(job: Job, memory: memoryview) -> bool:
                if not job.claim():
                    return False
                super(Slow, self).read(namespace, key, block, into)
                job.unclaim()
                return block not in (2, 7)

            return self.threads.submit(work, is_load=True, begun=begun)

        def close(self) -> None:
            assert self.threads.close()

    owner = ShelfOwner(Slow())
    owner.ask(PROMPT)
    owner.evict_all()
    with owner.cache.open(NS, PROMPT) as sequence:
        assert sequence.loading is not None and sequence.loading.wait()
        assert sequence.num_committed_tokens == 8 and sequence.loading.num_loaded_tokens == 32
        while sequence.num_committed_tokens < len(PROMPT):
            owner.compute(sequence, sequence.loading.claim(4))
        assert owner.is_right(sequence)
    owner.check()
    owner.cache.close()


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_blocks"):
        TieredCache(CacheConfig(16, SIZE, LAYOUT), tiers=[Shelf()])
    with pytest.raises(ConfigError, match="tiers"):
        TieredCache(CacheConfig(16, SIZE, LAYOUT, host_blocks=8), tiers=["a shelf"])  # type: ignore[list-item]
