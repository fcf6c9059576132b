"""Host memory below a cache holds what the cache doesn't: blocks are copied when they leave, once slots are short."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv import CacheConfig, Namespace, Tenant
from radixkv.audit.oracle import Engine
from radixkv.audit.properties.material import LAYOUT
from radixkv.config import Scrub
from radixkv.index import engine_blocks
from radixkv.index.tokens import encode
from radixkv.storage.plan import BlockIds
from radixkv.tiers.settings import DiskOptions
from radixkv.tiers.tiered_cache import TieredCache
from tests.engines.vllm.test_steps import ids_of
from tests.tiers.disk.test_tier import DiskEngine
from tests.tiers.support import FaultyFiles
from tests.tiers.support import patience as patience
from tests.tiers.test_loading import SECRET
from tests.tiers.test_tiered_cache import NS, OTHER, SIZE, Owner
from tests.waiting import ended, eventually, is_set


def prompt_of(number: int, size: int = 41) -> list[int]:
    return [1_000 * number + at for at in range(size)]


def lost(owner: Owner) -> float:
    return owner.below.counts()["host"]["lost_blocks"]


def saved(owner: Owner) -> float:
    return owner.below.counts()["host"]["written_bytes"] // owner.below.block_bytes


def test_the_two_hold_different_blocks_when_memory_is_short() -> None:
    owner = Owner(num_blocks=23, host_blocks=30, policy="lru")
    for number in range(5):  # 50 blocks: more than either holds
        owner.ask(prompt_of(number))
    assert lost(owner) == 0
    index, found = owner.below.host.index, list[int]()
    for number in range(5):
        key = encode(prompt_of(number)[:40])
        found.append(index.reach(NS, key, owner.cache.match(NS, prompt_of(number)).num_blocks))
    assert found == [10] * 5, "each block is in one of them"
    owner.below.host.index.check()
    owner.check()


@pytest.mark.parametrize("policy", ["lru", "learned", "lfu"])
def test_a_working_set_of_both_is_computed_once(policy: str) -> None:
    """Neither tier alone holds it, and whole prompts come and go."""
    owner = Owner(num_blocks=35, host_blocks=60, policy=policy)  # 8 × 10, and room to exchange a prompt
    computed = sum(owner.ask(prompt_of(number))[1] for _ in range(6) for number in range(8))
    assert computed == 8 * 41 + 5 * 8
    assert lost(owner) == 0
    owner.check()


def test_what_leaves_while_its_copy_is_here_is_not_copied_again() -> None:
    owner = Owner(num_blocks=16, host_blocks=64)
    for _ in range(4):
        owner.ask(prompt_of(1))
        owner.evict()
    assert saved(owner) == 10
    owner.check()


def test_an_append_in_a_full_cache_saves_what_it_evicts() -> None:
    owner = Owner(num_blocks=14, host_blocks=24)
    owner.ask(prompt_of(1))
    owner.ask(prompt_of(2, 9))
    with owner.cache.open(NS, prompt_of(3, 5)) as sequence:
        owner.compute(sequence, 5)
        for token in range(24):
            sequence.append(token)
    assert lost(owner) == 0
    assert owner.ask(prompt_of(1))[1] == 1
    owner.check()


def test_a_long_prompt_evicts_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's lock is held for few blocks at a time."""
    owner = Owner(num_blocks=64, host_blocks=100)
    owner.below.host.slice_blocks = 2
    owner.ask(prompt_of(1, 200))
    most, index = 0, owner.below.host.index
    let_go = index.let_go

    def watched(blocks: BlockIds) -> NDArray[np.bool_]:
        nonlocal most
        most = max(most, len(blocks))
        return let_go(blocks)

    monkeypatch.setattr(index, "let_go", watched)
    owner.ask(prompt_of(2, 200))
    assert 0 < most <= 2
    assert owner.ask(prompt_of(1, 200))[1] < 8
    owner.check()


@contextmanager
def busy(owner: Owner) -> Iterator[None]:
    """Another thread is in the gate of the tiers meanwhile."""
    is_in, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with owner.below.gate:
            is_in.set()
            is_set(is_over)

    thread = threading.Thread(target=hold)
    thread.start()
    is_set(is_in)
    try:
        yield
    finally:
        is_over.set()
        ended(thread)


def evict_meanwhile(owner: Owner) -> None:
    """Evict everything while the tiers are busy, by a call that doesn't wait for them."""
    before = lost(owner)
    with busy(owner):
        engine_blocks._evict(owner.cache, 1_000, None)
    assert owner.cache.resident_blocks == 0 and lost(owner) == before + 10


def test_slots_of_what_leaves_while_the_tiers_are_busy_are_not_spare() -> None:
    owner = Owner(num_blocks=16, host_blocks=24, policy="lru")
    owner.evicted(prompt_of(1))
    owner.ask(prompt_of(2))
    evict_meanwhile(owner)
    owner.evicted(prompt_of(3))
    assert owner.ask(prompt_of(2)) == (40, 1), "the oldest prompt gave its slots, not this one"
    owner.check()


def test_blocks_that_left_while_the_tiers_were_busy_have_no_copy_of_what_they_had() -> None:
    """Else what they hold next wouldn't be saved when it leaves."""
    owner = Owner(num_blocks=11, host_blocks=20, policy="lru")
    owner.ask(prompt_of(1))
    evict_meanwhile(owner)
    assert owner.below.host.index.let_go(np.arange(11)).all()
    owner.below.host.index.check()
    owner.check()


def test_a_purge_leaves_nothing_of_what_leaves_later() -> None:
    owner = Owner(num_blocks=12, host_blocks=4)
    held = owner.cache.open(NS, prompt_of(1))
    owner.compute(held, 41)
    owner.cache.purge("a")
    held.release()
    owner.evict()
    assert owner.below.host.cache.namespaces() == []
    assert owner.ask(prompt_of(1)) == (0, 41)
    owner.check()


def test_slots_that_change_tenant_are_zeroed_first() -> None:
    owner = Owner(num_blocks=12, host_blocks=10)
    owner.evicted(prompt_of(1))
    index, memory = owner.below.host.index, owner.below.memory
    zeroed: list[int] = []
    zero = memory._zero
    memory._zero = lambda slots: (zeroed.extend(slots.tolist()), zero(slots))[1]  # type: ignore[method-assign]
    owner.evicted(prompt_of(1), OTHER)
    assert sorted(zeroed) == list(range(10))
    index.check()
    owner.check()


@pytest.mark.parametrize("forget", ["purge", "clear"])
@pytest.mark.parametrize("scrub", ["always", "cross-tenant"])
def test_slots_that_must_not_keep_bytes_are_zeroed_without_a_request(scrub: Scrub, forget: str) -> None:
    """With ``scrub="always"``, and of a strict tenant. A thread does it: a purge waits for no copy."""
    owner = Owner(num_blocks=64, host_blocks=64, scrub=scrub)
    if scrub == "cross-tenant":
        owner.cache.add_tenant(Tenant(NS.tenant, guaranteed_blocks=32, mode="strict"))
    owner.evicted(prompt_of(1))
    rows = owner.below.memory._rows
    assert rows.any()
    owner.cache.purge(NS.tenant) if forget == "purge" else owner.cache.clear(NS)
    assert eventually(lambda: not rows.any())
    owner.below.host.index.check()
    owner.check()


def test_a_strict_tenant_loses_no_slot_to_others() -> None:
    owner = Owner(num_blocks=32, host_blocks=32, policy="lru")
    owner.cache.add_tenant(Tenant("a", guaranteed_blocks=12, max_blocks=12, mode="strict"))
    owner.evicted(prompt_of(1))
    for number in range(20):
        owner.evicted(prompt_of(number), OTHER)
    assert owner.ask(prompt_of(1)) == (40, 1)
    owner.below.host.index.check()
    owner.check()


def test_threads_get_their_own_kv() -> None:
    """Many threads open, compute, load and evict in a cache and a host memory that are both too small."""
    owner = Owner(num_blocks=40, host_blocks=30)
    errors: list[BaseException] = []

    def serve(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for _ in range(60):
                owner.ask(prompt_of(dice.randrange(8), dice.randint(5, 41)), dice.choice([NS, OTHER]))
                if dice.random() < 0.05:
                    owner.cache.purge("a" if dice.random() < 0.5 else "b")
        except BaseException as error:
            if type(error).__name__ not in ("StaleGeneration", "OutOfBlocks"):
                errors.append(error)
                raise

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        ended(each)
    assert not errors
    owner.below.host.index.check()
    owner.check()


# --- with a disk


def on_disk(folder: Path, num_blocks: int, host_blocks: int, disk_slots: int) -> Owner:
    owner = Owner.__new__(Owner)
    config = CacheConfig(num_blocks, SIZE, LAYOUT, host_blocks=host_blocks, policy="lru")
    options = DiskOptions(
        folder, 4_096 * disk_slots + 64 * disk_slots * 2 + 16_384, SECRET, files=FaultyFiles()
    )
    owner.cache = TieredCache(config, disk=options, fingerprint="a test")
    owner.engine = Engine(owner.cache)
    return owner


def ask(owner: Owner, ids: list[int]) -> int:
    """Serve a prompt, and wait for the disk. Returns the tokens that were computed."""
    with owner.cache.open(NS, ids) as sequence:
        loading = sequence.loading
        if loading is not None:
            loading.wait()
        left = len(ids) - sequence.num_committed_tokens
        owner.compute(sequence, len(ids))
        assert owner.is_right(sequence)
        return left


def settled(owner: Owner) -> bool:
    """Whether the disk has stored what waits for it."""
    disk = owner.below.disk
    assert disk is not None
    with owner.below.gate:
        owner.below.tick()
        return not (disk.demotions._leaving or disk.demotions._waiting or disk.demotions._stores)


def test_a_full_disk_stores_what_leaves_host_memory(tmp_path: Path) -> None:
    """Cache, host memory and disk hold different blocks: all of them are computed once."""
    owner = on_disk(tmp_path / "disk", 24, 80, 64)
    try:
        disk = owner.below.disk
        assert disk is not None
        num = (disk.records.num_slots + 80) // 10
        numbers = list(range(num))
        for number in numbers:
            owner.ask(prompt_of(number))
            assert eventually(lambda: settled(owner))
        assert disk.records.is_full
        computed = []
        for number in reversed(numbers):
            computed.append(ask(owner, prompt_of(number)))
            assert eventually(lambda: settled(owner))
        assert computed[:10] == [1] * 10, "the newest; the disk alone has room for six, host memory for eight"
    finally:
        owner.cache.close()


def test_all_of_it_is_there_after_a_restart(tmp_path: Path) -> None:
    """Also what only the cache had, and what a full disk would have stored later."""
    owner = on_disk(tmp_path / "disk", 33, 20, 512)
    for number in range(3):
        owner.ask(prompt_of(number))
    owner.cache.close()
    owner = on_disk(tmp_path / "disk", 33, 20, 512)
    try:
        assert [ask(owner, prompt_of(number)) for number in range(3)] == [1, 1, 1]
    finally:
        owner.cache.close()


def test_a_new_strict_tenant_hits_whatever_idle_tenants_have() -> None:
    owner = Owner(num_blocks=16, host_blocks=16, policy="lru")
    for number in range(4):
        owner.ask(prompt_of(number, 33), OTHER)
        owner.evict()
    assert owner.below.host.index.num_used == 16
    owner.cache.add_tenant(Tenant("a", guaranteed_blocks=8, max_blocks=8, mode="strict"))
    owner.ask(prompt_of(9, 21))
    for _ in range(3):
        owner.evict()
        assert owner.ask(prompt_of(9, 21)) == (20, 1)
    owner.check()


def test_more_strict_tenants_than_slots_keep_nothing_there(caplog: pytest.LogCaptureFixture) -> None:
    """Those without slots of their own: in shared ones they could tell each other's traffic."""
    owner = Owner(num_blocks=40, host_blocks=4, policy="lru")
    for number in range(6):
        owner.cache.add_tenant(Tenant(f"s{number}", guaranteed_blocks=6, max_blocks=6, mode="strict"))
    own = [owner.below.host.index.own_slots(f"s{number}") for number in range(6)]
    assert own == [1, 1, 1, 1, 0, 0] and "nothing of tenant 's5' is kept in host memory" in caplog.text
    for number in range(6):
        name = Namespace(f"s{number}", "m")
        owner.evicted(prompt_of(number, 5), name)
        assert owner.ask(prompt_of(number, 5), name)[0] == (4 if own[number] else 0)


@pytest.mark.parametrize("rate", [None, 1e9])
def test_what_leaves_with_gaps_is_stored_where_it_is(tmp_path: Path, rate: float | None) -> None:
    """Blocks 0, 3 and 5 have lost their slots as spare ones, and come to host memory again: the disk gets all."""
    engine = DiskEngine(tmp_path / "disk", bytes_per_s=rate)
    stores, noted = engine.disk.demotions, list[tuple[int, int]]()
    engine.again("a", ids_of(6 * SIZE + 1))
    namespace, key = engine.level.cache.namespaces()[0], encode(ids_of(6 * SIZE))
    entries = engine.level.cache.match(namespace, key).block_ids.astype(np.int64)
    engine.level.index.take_away(entries[[0, 3, 5]])
    offer = stores.offer
    stores.offer = lambda each: (noted.append(each[-2:]), offer(each))[1]  # type: ignore[method-assign]
    engine.level.demote(namespace, key, 0, np.arange(1, 7, dtype=np.int32))
    engine.step(0)
    engine.run()
    assert noted == [(0, 1), (3, 4), (5, 6)]
    engine.stop()
