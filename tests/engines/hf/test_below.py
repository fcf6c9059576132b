"""The embedded engine on a cache that has host memory, or a disk, below it by itself: ``host.memory``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import CacheConfig, RequestHints, audit
from radixkv.engines.hf import HFEngine, layout_of
from radixkv.index.tokens import decode
from radixkv.storage.device import DeviceStorage
from radixkv.tiers.disk import records
from radixkv.tiers.disk.io_threads import IOThreads
from radixkv.tiers.ladder import Ladder
from radixkv.tiers.loading import TierLoading
from radixkv.tiers.settings import DiskOptions, TierSettings
from radixkv.tiers.tiered_cache import TieredCache
from tests.engines.support import model_of, prompt_of, stock
from tests.tiers import test_ladder as own_tiers
from tests.tiers.support import FaultyFiles
from tests.tiers.support import patience as patience
from tests.tiers.test_ladder import (
    SIZE,
    ask,
    evict_all,
    hits,
    purged_again_and_again,
    wrong_answers,
)
from tests.tiers.test_loading import Reads
from tests.waiting import eventually

pytestmark = pytest.mark.slow

PROMPT = prompt_of(41)


@contextmanager
def tiered(
    num_blocks: int = 32, host_blocks: int = 256, model: Any = None, disk: Any = None, **settings: Any
) -> Iterator[HFEngine]:
    """An engine on a cache with few blocks and much below. Afterwards nothing is open, in either."""
    model = model or model_of()
    config = CacheConfig(num_blocks, SIZE, layout_of(model), host_blocks=host_blocks, **settings)
    cache = TieredCache(config, disk=disk, fingerprint="tiny")
    engine = HFEngine(model, cache, chunk_tokens=16)
    try:
        yield engine
        below = cache.lower
        assert below is not None and below.counts()["host"]["errors"] == 0
        for each in (cache, below.host.cache):
            assert each.stats().num_sequences == 0
            audit.check(each)
    finally:
        engine.close()
        cache.close()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("evicted_kv_comes_back_with_the_same_tokens", ()),
        ("the_next_turn_finds_the_answer", ()),
        ("a_part_is_resident_and_a_part_below", ()),
        ("samples_and_beams_load_their_prompt", ({"num_beams": 3},)),
        (
            "samples_and_beams_load_their_prompt",
            ({"num_return_sequences": 3, "do_sample": True, "seed": 5},),
        ),
        ("prefill_and_published_bases_load", ()),
        ("tenants_share_nothing_below", ()),
        ("what_was_forgotten_does_not_come_back", ("purge",)),
        ("what_was_forgotten_does_not_come_back", ("clear",)),
        ("what_was_forgotten_does_not_come_back", ("weights",)),
        ("purges_while_requests_run", ()),
    ],
)
def test_it_is_like_the_engines_own_tiers(
    name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_tiers, "tiered", tiered)
    getattr(own_tiers, f"test_{name}")(*arguments)


def test_a_model_whose_requests_run_one_after_the_other_finds_host_memory() -> None:
    model = model_of("falcon")
    with tiered(model=model) as engine:
        first, cached = ask(engine, PROMPT)
        evict_all(engine)
        assert (ask(engine, PROMPT), cached) == ((first, 40), 0)
        evict_all(engine)
        assert engine.prefill(engine.namespace("a"), PROMPT).num_cached_tokens == 40


def options(folder: Path, reads: Reads | None = None) -> DiskOptions:
    return DiskOptions(folder, 4 << 20, b"a secret of the fleet", files=FaultyFiles(reads))


def filled(folder: Path) -> Any:
    """Serve the prompt once, so that the folder has its KV. Returns the answer."""
    with tiered(disk=options(folder)) as engine:
        answer, cached = ask(engine, PROMPT)
        assert cached == 0 and isinstance(engine.cache, TieredCache)
        counts = engine.cache.tier_counts
        assert eventually(lambda: counts()["disk"]["resident_blocks"] >= 10)
    return answer


@pytest.mark.parametrize("sampling", [{}, {"num_beams": 2, "num_return_sequences": 2}])
@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_a_disk_hears_when_conversations_go_on(tmp_path: Path, sampling: dict[str, Any], name: str) -> None:
    """With the prompts and answers, at the end of a request whose hints say it."""
    prompts = [PROMPT, PROMPT[::-1]]
    with tiered(model=model_of(name), disk=options(tmp_path)) as engine:
        assert isinstance(engine.cache, TieredCache) and isinstance(engine.cache.lower, Ladder)
        later, namespace = engine.cache.lower._later, engine.namespace("a")
        for labels in ({}, {"tool_pending": True}, {"expected_gap_s": 60.0, "session_over": True}):
            engine.generate(namespace, prompts, 4, hints=RequestHints(labels), **sampling)
            assert len(later) == 0
        made = engine.generate(
            namespace, prompts, 4, hints=RequestHints({"expected_gap_s": 60.0}), **sampling
        )
        best = made.token_ids[:: len(made.token_ids) // 2]
        assert [decode(each.key).tolist() for each in later.take_due(inf)] == [
            [*prompt, *answer] for prompt, answer in zip(prompts, best, strict=True)
        ]


def test_the_engine_computes_what_lies_before_the_records_that_came_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk is read from the back. What has come when the request's patience ends is used."""
    answer = filled(tmp_path / "disk")
    assert answer == stock(model_of(), [PROMPT], 6, eos=None)
    reads, claims = Reads(), list[int]()
    monkeypatch.setattr(
        records, "IOThreads", lambda num_threads, *given, **more: IOThreads(1, *given, **more)
    )  # in order
    with tiered(disk=options(tmp_path / "disk", reads)) as engine:
        assert isinstance(engine.cache, TieredCache) and engine.cache.lower is not None
        below = engine.cache.lower
        with below.gate:  # type: ignore[attr-defined]
            assert eventually(lambda: below.disk is not None and below.disk.purges.is_known("a"))
        reads.is_armed = True
        reads.allow(4)
        poll, claim = TierLoading.poll, TierLoading.claim

        def polled(self: TierLoading) -> bool:
            is_done = poll(self)
            if self.num_loaded_tokens == 4 * SIZE:
                monkeypatch.setattr("radixkv.tiers.disk.patience.LEAST_WAIT_S", 0.0)
                self._ends_at = 0.0
            return is_done

        def claimed(self: TierLoading, num_tokens: int) -> int:
            claims.append(stop := claim(self, num_tokens))
            return stop

        monkeypatch.setattr(TierLoading, "poll", polled)
        monkeypatch.setattr(TierLoading, "claim", claimed)
        assert ask(engine, PROMPT)[0] == answer
        assert claims == [16, 24, 41], "it stops before what was loaded"
        assert engine.cache.tier_counts()["disk"]["hit_blocks"] == 4
        reads.open()


def test_a_generation_says_what_came_from_where(tmp_path: Path) -> None:
    filled(tmp_path / "disk")
    with tiered(disk=options(tmp_path / "disk")) as engine:
        name = engine.namespace("a")
        made = engine.generate(name, PROMPT, 2, eos_token_id=-1)
        assert made.loaded is not None and made.loaded.seconds > 0
        assert made.num_cached_tokens == [40]
        assert (made.loaded.host_tokens, made.loaded.disk_tokens) == (0, 40)
        evict_all(engine)
        made = engine.generate(name, PROMPT, 2, eos_token_id=-1)
        assert made.loaded is not None and made.num_cached_tokens == [40]
        assert (made.loaded.host_tokens, made.loaded.disk_tokens) == (40, 0)


def test_a_disk_that_hangs_costs_hits_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = filled(tmp_path / "disk")
    monkeypatch.setattr("radixkv.tiers.disk.patience.LEAST_WAIT_S", 0.1)
    reads = Reads()
    with tiered(disk=options(tmp_path / "disk", reads)) as engine:
        reads.is_armed = True
        assert ask(engine, PROMPT) == (answer, 0)
        assert ask(engine, PROMPT) == (answer, 40)
        reads.open()


@pytest.mark.slow
def test_requests_side_by_side_over_a_small_cache(tmp_path: Path) -> None:
    """Preempted, purged and evicted while their KV comes from below: the right tokens."""
    with tiered(num_blocks=24, disk=options(tmp_path / "disk")) as engine:
        with purged_again_and_again(engine, "c"):
            assert not wrong_answers(engine, "abca")
        assert hits(engine) > 0


@pytest.mark.parametrize("is_the_engines", [False, True])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_lossy_tiers(dtype: Any, is_the_engines: bool) -> None:
    """KV come back with small errors, from the tiers of the cache and from those that the engine makes."""
    model, tiers = model_of(), TierSettings(8 << 20, dtype=dtype) if is_the_engines else None
    config = CacheConfig(32, SIZE, layout_of(model))
    if tiers is None:
        config = replace(config, host_blocks=256, tier_dtype=dtype)
    cache = TieredCache(config, fingerprint="tiny")
    engine = HFEngine(model, cache, chunk_tokens=16, tiers=tiers)
    try:
        ask(engine, PROMPT)
        before = kv_of(engine, "a")
        evict_all(engine)
        assert ask(engine, PROMPT)[1] == 40
        error, largest = (kv_of(engine, "a") - before).abs(), before.abs().amax(-1, keepdim=True)
        bound = largest / 254 if dtype == "int8" else before.abs() / 16 + largest / 458_752
        assert error.any() and (error <= bound * 1.0001).all()
        counts = cache.tier_counts()["host"]
        assert (counts["hit_blocks"], counts["errors"]) == (10, 0)
        engine.weights_changed()
        assert ask(engine, PROMPT)[1] == 0
    finally:
        engine.close()
        cache.close()


def kv_of(engine: HFEngine, tenant: str) -> torch.Tensor:
    """The KV that are resident of the prompt's whole blocks."""
    match = engine.cache.match(engine.namespace(tenant), PROMPT)
    assert match.num_tokens == 40 and isinstance(engine.cache.storage, DeviceStorage)
    return engine.cache.storage.data[match.block_ids.tolist()].clone()
