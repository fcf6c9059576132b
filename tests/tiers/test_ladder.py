"""Host memory below the embedded engine: what was evicted comes back, with the same tokens, and only to its owner."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from radixkv import audit
from radixkv.config import CacheConfig, Tenant
from radixkv.engines.hf import HFEngine, layout_of
from radixkv.errors import ConfigError, LeaseError
from radixkv.index.cache import PrefixCache
from radixkv.tiers.host.memory import HostBlocks
from radixkv.tiers.host.tier import HostTier
from radixkv.tiers.ladder import MOST_ERRORS
from radixkv.tiers.pending import Pending
from radixkv.tiers.settings import TierSettings, bytes_of
from radixkv.tiers.tiered_cache import TieredCache
from tests.engines.support import model_of, prompt_of, stock
from tests.isolation.test_loading_machine import a_tenant_lost_below
from tests.tiers.support import patience as patience
from tests.waiting import ended

SIZE = 4


def host_bytes(num_blocks: int) -> int:
    return num_blocks * layout_of(model_of()).bytes_per_token * SIZE


@contextmanager
def tiered(num_blocks: int = 32, host_blocks: int = 256, **settings: Any) -> Iterator[HFEngine]:
    """An engine with few blocks and much host memory. Afterwards nothing is open, in either."""
    model = model_of()
    cache = TieredCache(CacheConfig(num_blocks, SIZE, layout_of(model), **settings))
    engine = HFEngine(model, cache, chunk_tokens=16, tiers=TierSettings(host_bytes(host_blocks)))
    try:
        yield engine
        below = cache.lower
        assert below is not None and below.counts()["host"]["errors"] == 0
        for each in (cache, below.host.cache):
            assert (
                each.stats().num_sequences == 0
                and each.stats().evictable_blocks == each.stats().resident_blocks
            )
            audit.check(each)
    finally:
        engine.close()


def ask(
    engine: HFEngine, prompt: list[int], tenant: str = "a", num: int = 6, **settings: Any
) -> tuple[Any, int]:
    """Return the new tokens of a request, and how many tokens of its prompt were cached."""
    found = engine.generate(engine.namespace(tenant), prompt, num, eos_token_id=-1, **settings)
    return found.token_ids, found.num_cached_tokens[0]


def evict_all(engine: HFEngine) -> None:
    """Evict every block of the cache that nothing holds."""
    assert isinstance(engine.cache, PrefixCache)
    engine.cache.evict(1_000)
    assert engine.cache.evictable_blocks == 0


def hits(engine: HFEngine) -> float:
    assert isinstance(engine.cache, TieredCache)
    return engine.cache.tier_counts()["host"]["hit_blocks"]


def test_evicted_kv_comes_back_with_the_same_tokens() -> None:
    prompt = prompt_of(41)
    with tiered() as engine:
        first, cached = ask(engine, prompt)
        assert cached == 0 and hits(engine) == 0
        evict_all(engine)
        assert engine.cache.match(engine.namespace("a"), prompt).num_tokens == 0
        again, cached = ask(engine, prompt)
        assert (again, cached, hits(engine)) == (first, 40, 10)
        assert engine.cache.match(engine.namespace("a"), prompt).num_tokens == 40
        assert again == stock(model_of(), [prompt], 6, eos=None)


def test_the_next_turn_finds_the_answer() -> None:
    prompt = prompt_of(30)
    with tiered() as engine:
        (answer,), _ = ask(engine, prompt, num=11)
        evict_all(engine)
        turn = [*prompt, *answer, *prompt_of(9, 1)]
        again, cached = ask(engine, turn)
        assert cached == 40  # 30 + 10 tokens were computed
        assert again == stock(model_of(), [turn], 6, eos=None)


def test_a_part_is_resident_and_a_part_below() -> None:
    prompt = prompt_of(80)
    with tiered(num_blocks=48) as engine:
        first, _ = ask(engine, prompt)
        evict_all(engine)
        ask(engine, prompt[:21])
        assert engine.cache.match(engine.namespace("a"), prompt).num_tokens == 20
        before = hits(engine)
        again, cached = ask(engine, prompt)
        assert (again, cached, hits(engine) - before) == (first, 76, 14)


@pytest.mark.parametrize(
    "settings", [{"num_return_sequences": 3, "do_sample": True, "seed": 5}, {"num_beams": 3}]
)
def test_samples_and_beams_load_their_prompt(settings: dict[str, Any]) -> None:
    prompt = prompt_of(25)
    with tiered() as engine:
        first, _ = ask(engine, prompt, **settings)
        evict_all(engine)
        again, cached = ask(engine, prompt, **settings)
        assert (again, cached) == (first, 24)


def test_prefill_and_published_bases_load() -> None:
    prompt = prompt_of(33)
    with tiered() as engine:
        name = engine.namespace("a")
        assert engine.prefill(name, prompt).num_cached_tokens == 0
        evict_all(engine)
        done = engine.prefill(name, prompt)
        assert (done.num_cached_tokens, done.num_computed_tokens) == (32, 1)
        evict_all(engine)
        base = engine.publish("base", name, prompt, ["b"])
        assert base.num_cached_tokens == 28  # its last block is computed
        assert ask(engine, prompt, "b")[1] == 32
        engine.cache.unpublish("base")
        evict_all(engine)
        assert ask(engine, prompt, "b")[1] == 0, (
            "what was computed on another tenant's base stays with the base"
        )


def test_tenants_share_nothing_below() -> None:
    prompt = prompt_of(41)
    with tiered() as engine:
        first, _ = ask(engine, prompt, "a")
        evict_all(engine)
        assert ask(engine, prompt, "b") == (first, 0)
        salted = engine.namespace("a", salt="x")
        assert engine.generate(salted, prompt, 2, eos_token_id=-1).num_cached_tokens == [0]


def test_a_lookup_without_the_namespace_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: host memory is searched for everybody at one place."""
    a_tenant_lost_below(monkeypatch)
    with pytest.raises(AssertionError):
        test_tenants_share_nothing_below()


@pytest.mark.parametrize("forget", ["purge", "clear", "remove", "weights"])
def test_what_was_forgotten_does_not_come_back(forget: str) -> None:
    prompt = prompt_of(41)
    with tiered() as engine:
        first, _ = ask(engine, prompt)
        kept, _ = ask(engine, prompt, "b")
        evict_all(engine)
        match forget:
            case "purge":
                engine.cache.purge("a")
            case "clear":
                engine.cache.clear(engine.namespace("a"))
            case "remove":
                engine.cache.add_tenant(Tenant("a"))
                engine.cache.remove_tenant("a")
            case _:
                engine.weights_changed()
        assert ask(engine, prompt) == (first, 0)
        if forget != "weights":
            assert ask(engine, prompt, "b") == (kept, 40), "another tenant's stays"


def test_a_purge_that_skips_host_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "forget", lambda self, scope: Pending())
    with pytest.raises(AssertionError):
        test_what_was_forgotten_does_not_come_back("purge")


def test_a_request_that_began_before_a_purge_saves_nothing() -> None:
    prompt = prompt_of(41)
    with tiered() as engine:
        below = engine.cache
        assert isinstance(below, TieredCache) and below.lower is not None
        purged = []

        def purge(step: list[list[int]]) -> None:
            if not purged:
                purged.append(engine.cache.purge("a"))

        with pytest.raises(LeaseError):
            ask(engine, prompt, on_step=purge)
        assert below.lower.host.cache.namespaces("a") == []
        assert ask(engine, prompt)[1] == 0


@contextmanager
def purged_again_and_again(engine: HFEngine, tenant: str) -> Iterator[None]:
    stops = threading.Event()

    def purges() -> None:
        while not stops.wait(0.003):
            engine.cache.purge(tenant)

    purging = threading.Thread(target=purges)
    purging.start()
    try:
        yield
    finally:
        stops.set()
        ended(purging)


def wrong_answers(engine: HFEngine, tenants: Iterable[str]) -> list[object]:
    """Let these tenants ask side by side, some prompts twice. Returns the answers that stock transformers doesn't give.

    A request whose tenant is purged may fail.
    """
    prompts = [prompt_of(37, seed) for seed in range(6)]
    wanted = [stock(model_of(), [each], 4, eos=None) for each in prompts]
    wrong: list[object] = []

    def requests(tenant: str) -> None:
        for turn in range(12):
            try:
                found, _ = ask(engine, prompts[turn % 6], tenant, 4)
            except LeaseError:
                continue
            if found != wanted[turn % 6]:
                wrong.append((tenant, turn, found))

    threads = [threading.Thread(target=requests, args=(name,)) for name in tenants]
    for each in threads:
        each.start()
    for each in threads:
        ended(each)
    return wrong


def test_purges_while_requests_run() -> None:
    """Requests of two tenants, while one of them is purged again and again: right tokens, and nothing stays."""
    with tiered(num_blocks=40) as engine:
        with purged_again_and_again(engine, "a"):
            assert not wrong_answers(engine, "aba")
        assert hits(engine) > 0
        engine.cache.purge("a")
        assert isinstance(engine.cache, TieredCache) and engine.cache.namespaces("a") == []


@pytest.mark.parametrize("call", ["stage", "put", "save", "take_report"])
def test_errors_in_host_memory_cost_hits_only(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(41)
    model = model_of()
    cache = TieredCache(CacheConfig(32, SIZE, layout_of(model)))
    engine = HFEngine(model, cache, tiers=TierSettings(host_bytes(64)))
    first, _ = ask(engine, prompt)
    evict_all(engine)

    def fail(*arguments: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(HostBlocks, call, fail)
    assert ask(engine, prompt) == (first, 0 if call in ("stage", "put") else 40)
    assert ask(engine, prompt)[1] == 40, "what is resident is found"
    errors = cache.tier_counts()["host"]["errors"]
    assert 1 <= errors < MOST_ERRORS and cache.tier_counts()["host"]["open"] == 1
    for _ in range(MOST_ERRORS):
        evict_all(engine)
        assert ask(engine, prompt)[0] == first
    assert cache.tier_counts()["host"]["open"] == 0, "after several errors they rest"
    monkeypatch.undo()
    assert cache.lower is not None
    cache.lower._rests_until = 0.0  # type: ignore[union-attr]
    evict_all(engine)
    assert ask(engine, prompt) == (first, 40)
    for each in (cache, cache.lower.host.cache if cache.lower is not None else cache):
        stats = each.stats()
        assert stats.num_sequences == 0 and stats.evictable_blocks == stats.resident_blocks
        audit.check(each)


def test_a_torn_copy_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fails in the middle leaves wrong bytes in the engine's blocks, and they are computed."""
    prompt = prompt_of(41)
    with tiered() as engine:
        first, _ = ask(engine, prompt)
        evict_all(engine)

        def tear(self: HostBlocks, staged: Any, blocks: Any) -> None:
            for each in self._engine:
                each.index_fill_(0, torch.from_numpy(blocks[:3]).long(), 7)
            raise OSError("torn")

        monkeypatch.setattr(HostBlocks, "put", tear)
        assert ask(engine, prompt) == (first, 0)
        monkeypatch.undo()
        evict_all(engine)
        assert ask(engine, prompt) == (first, 40), "what was wrong was saved again"
        assert isinstance(engine.cache, TieredCache) and engine.cache.lower is not None
        engine.cache.lower.host.totals["errors"] = 0


def test_a_strict_tenant_has_its_own_share() -> None:
    prompt = prompt_of(41)
    with tiered(64, 128, default_tenant=Tenant("default")) as engine:
        engine.cache.add_tenant(Tenant("a", guaranteed_blocks=24, max_blocks=24, mode="strict"))
        first, _ = ask(engine, prompt)
        for seed in range(200, 220):
            ask(engine, prompt_of(60, seed), "other", 1)
        for seed in range(2):
            ask(engine, prompt_of(60, 300 + seed), "a", 1)  # takes its blocks in the cache
        assert ask(engine, prompt) == (first, 40)


def test_requests_that_leave_nothing_leave_nothing_below() -> None:
    prompt = prompt_of(41)
    with tiered() as engine:
        alone = engine.namespace("a", salt="uncached-1")
        engine.generate(alone, prompt, 2, eos_token_id=-1)
        assert isinstance(engine.cache, TieredCache) and engine.cache.lower is not None
        assert engine.cache.lower.host.cache.namespaces() == []


def test_what_is_refused() -> None:
    model = model_of()
    config = CacheConfig(32, SIZE, layout_of(model))
    with pytest.raises(ConfigError, match="2 to 2,147,483,647 blocks, 2,048 to"):
        HFEngine(model, TieredCache(config), tiers=TierSettings(host_bytes(1)))
    with pytest.raises(ConfigError, match="what the machine has"):
        HFEngine(model, TieredCache(config), tiers=TierSettings(2**60))
    with pytest.raises(ConfigError, match="TieredCache"):
        HFEngine(model, PrefixCache(config), tiers=TierSettings(host_bytes(8)))


@pytest.mark.parametrize(
    ("text", "wanted"), [("8GiB", 8 << 30), ("8GB", 8 * 10**9), ("12", 12), (7, 7), ("3 KiB", 3072)]
)
def test_sizes(text: object, wanted: int) -> None:
    assert bytes_of("host_memory", text) == wanted


@pytest.mark.parametrize("text", ["", "8XB", "-1", "1e9", True, None, "8 gib", "９"])
def test_wrong_sizes(text: object) -> None:
    with pytest.raises(ConfigError, match="host_memory"):
        bytes_of("host_memory", text)
