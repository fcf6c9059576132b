"""Beam search with steps on the device: the tokens of stock transformers, and the copies of the host's own search.

These tests run on a CPU, where the engine lends beams only with ``lends_beams=True``. On a GPU the same code works on
the same kind of tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv import audit
from radixkv.engines.hf.paged_cache import PagedCache
from radixkv.errors import CapacityError, KernelError
from radixkv.index.cache import PrefixCache
from radixkv.index.lent_beams import LentBeams
from tests.engines.hf.test_same_tokens import MODES, all_pairs
from tests.engines.support import ARCHITECTURES, engine_over, model_of, prompt_of, stock

pytestmark = pytest.mark.slow

BEAMS = {name: settings for name, settings in MODES.items() if "num_beams" in settings}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[LentBeams]:
    """The lending of each step, in order."""
    made: list[LentBeams] = []
    original = LentBeams.step

    def step(self: LentBeams, *tensors: torch.Tensor) -> None:
        made.append(self)
        original(self, *tensors)

    monkeypatch.setattr(LentBeams, "step", step)
    return made


@pytest.mark.parametrize(
    ("architecture", "mode"),
    all_pairs(ARCHITECTURES, BEAMS, lambda each, mode: each == "llama" or mode == "returned beams"),
)
def test_batch_cold_and_warm(architecture: str, mode: str, steps: list[LentBeams]) -> None:
    model = model_of(architecture)
    prompts = [prompt_of(21), prompt_of(9, 1), prompt_of(21)[:14] + prompt_of(6, 2), [5]]
    expected = stock(model, prompts, 12, **BEAMS[mode])
    with engine_over(model, lends_beams=True) as engine:
        ns = engine.namespace("acme")
        for cached in ([0, 0, 12, 0], [20, 8, 16, 0]):
            made = engine.generate(ns, prompts, 12, **BEAMS[mode])
            assert made.token_ids == expected
            assert made.num_cached_tokens == cached
    assert len(set(steps)) == 2 and len(steps) > 6


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "num_prompts"), [(1, 2), (3, 1), (4, 2), (16, 1)])
def test_the_result_equals_that_of_the_host(
    block_size: int, num_prompts: int, steps: list[LentBeams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, copies, resident blocks and hits of the next turn. Every step was made by the device."""
    model, prompts, new = model_of(), [prompt_of(33), prompt_of(18, 1)][:num_prompts], 40
    seen: list[Any] = []
    for lends in (False, True):
        with engine_over(model, block_size=block_size, lends_beams=lends) as engine:
            ns, cache = engine.namespace("acme"), engine.cache
            made = engine.generate(ns, prompts, new, eos_token_id=-1, num_beams=4, num_return_sequences=2)
            replies = [
                cache.match(ns, [*prompts[at // 2], *row]).num_tokens for at, row in enumerate(made.token_ids)
            ]
            stats = cache.stats()
            seen.append(
                (made.token_ids, replies, stats.copied_blocks, stats.resident_blocks, stats.free_blocks)
            )
    assert seen[0] == seen[1]
    assert len(steps) == new - 1  # the newest tokens are never computed


def test_the_host_reads_from_the_device_rarely(
    monkeypatch: pytest.MonkeyPatch, steps: list[LentBeams]
) -> None:
    """Of 40 steps, three read the state to get more blocks. The parents and tokens of the others stay on the device."""
    reads: list[None] = []
    original = LentBeams.state

    def state(self: LentBeams) -> Any:
        reads.append(None)
        return original(self)

    monkeypatch.setattr(LentBeams, "state", state)
    monkeypatch.setattr(PagedCache, "_append", None)
    permuted = []
    permute = PagedCache._permute
    monkeypatch.setattr(PagedCache, "_permute", lambda self, to: (permuted.append(to), permute(self, to)))
    with engine_over(model_of(), lends_beams=True, num_blocks=1024) as engine:
        monkeypatch.setattr(PagedCache, "_append", lambda self, ids: None)
        engine.generate(engine.namespace("acme"), prompt_of(12), 40, eos_token_id=-1, num_beams=4)
    assert len(steps) == 39 and len(reads) == 3 and len(permuted) == 1


@pytest.mark.parametrize(
    ("num_blocks", "suffices"), [(8, False), (13, False), (14, True), (18, True), (24, True)]
)
def test_small_pools(num_blocks: int, suffices: bool) -> None:
    """Without blocks for steps ahead, the host continues with the rest.

    The search ends where the host alone would end.
    """
    model, prompt = model_of(), prompt_of(20)
    expected = stock(model, [prompt], 24, eos=None, num_beams=3) if suffices else None
    for lends in (False, True):
        with engine_over(model, num_blocks=num_blocks, lends_beams=lends) as engine:
            try:
                found = engine.generate(engine.namespace("a"), prompt, 24, eos_token_id=-1, num_beams=3)
                assert found.token_ids == expected
            except CapacityError:
                assert not suffices


def test_one_new_token_and_a_stop(steps: list[LentBeams]) -> None:
    """The search ends before its first step, or in the middle of one."""
    prompts = [prompt_of(12), prompt_of(7, 1)]
    with engine_over(model_of(), lends_beams=True) as engine:
        ns = engine.namespace("acme")
        made = engine.generate(ns, prompts, 1, num_beams=3)
        assert made.token_ids == stock(engine.model, prompts, 1, num_beams=3) and steps == []
        asked: list[None] = []

        def stop() -> bool:
            asked.append(None)
            return len(asked) == 5

        made = engine.generate(ns, prompt_of(15), 50, eos_token_id=-1, num_beams=3, stop=stop)
        assert made.token_ids == stock(engine.model, [prompt_of(15)], 4, eos=None, num_beams=3)
        assert len(steps) == 3


def test_an_error_in_the_middle_releases_all(steps: list[LentBeams]) -> None:
    with engine_over(model_of(), lends_beams=True) as engine:

        def stop() -> bool:
            audit.check(engine.cache)
            if len(steps) == 4:
                raise ZeroDivisionError
            return False

        with pytest.raises(ZeroDivisionError):
            engine.generate(engine.namespace("a"), prompt_of(15), 50, eos_token_id=-1, num_beams=3, stop=stop)
    assert steps[0].is_over


def test_a_refused_step_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device refuses an invalid id. An error is raised in the end, and no sequence stays open."""
    step = LentBeams.step
    monkeypatch.setattr(LentBeams, "step", lambda self, parents, ids: step(self, parents, ids - 1000))
    with (
        engine_over(model_of(), lends_beams=True) as engine,
        pytest.raises(KernelError, match="bad_token=True"),
    ):
        engine.generate(engine.namespace("acme"), prompt_of(13), 3, eos_token_id=-1, num_beams=3)


def test_by_default_only_beams_on_a_gpu_are_lent(steps: list[LentBeams]) -> None:
    for lends, settings in ((None, {"num_beams": 3}), (True, {"do_sample": True, "num_return_sequences": 3})):
        with engine_over(model_of(), lends_beams=lends) as engine:
            engine.generate(engine.namespace("acme"), prompt_of(12), 5, **settings)
    assert steps == []


def test_a_subclass_of_the_cache(steps: list[LentBeams]) -> None:
    """A subclass of the cache counts the calls: the engine lends once a search."""

    class Counting(PrefixCache):
        def lend(self, *arguments: Any, **named: Any) -> LentBeams:
            self.__dict__["lent"] = self.__dict__.get("lent", 0) + 1
            return super().lend(*arguments, **named)

    with engine_over(model_of(), kind=Counting, lends_beams=True) as engine:
        engine.generate(engine.namespace("acme"), [prompt_of(12), prompt_of(5, 1)], 9, num_beams=3)
        assert engine.cache.__dict__["lent"] == 1
