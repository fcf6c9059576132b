"""The engine gives the tokens of stock transformers in fp32: cold, warm, in batches, sampled, with beams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.support import ARCHITECTURES, EOS, PAD, Prompts, engine_over, model_of, prompt_of, stock

pytestmark = pytest.mark.slow

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 5},
    "warm sampled": {"do_sample": True, "temperature": 1.7, "top_k": 20, "top_p": 0.9, "seed": 6},
    "returned": {"do_sample": True, "seed": 7, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "returned beams": {"num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True, "seed": 8},
}


def all_pairs(firsts: Iterable[Any], seconds: Iterable[Any], chosen: Callable[[Any, Any], bool]) -> list[Any]:
    """Return all pairs as parameters of a test. Those that aren't chosen are for releases."""
    release = pytest.mark.release
    return [
        pytest.param(first, second, marks=() if chosen(first, second) else release)
        for first, second in product(firsts, seconds)
    ]


@pytest.mark.parametrize(
    ("architecture", "mode"),
    all_pairs(
        ARCHITECTURES, MODES, lambda each, mode: each == "llama" or mode in ("returned", "returned beams")
    ),
)
def test_batch_cold_and_warm(architecture: str, mode: str) -> None:
    model = model_of(architecture)
    prompts = [prompt_of(21), prompt_of(9, 1), prompt_of(21)[:14] + prompt_of(6, 2), [5]]
    expected = stock(model, prompts, 12, **MODES[mode])
    with engine_over(model) as engine:
        ns = engine.namespace("acme")
        cold = engine.generate(ns, prompts, 12, **MODES[mode])
        assert cold.token_ids == expected
        assert cold.num_prompt_tokens == [21, 9, 20, 1]
        # The third row finds the blocks that the first has committed.
        assert cold.num_cached_tokens == [0, 0, 12, 0]
        warm = engine.generate(ns, prompts, 12, **MODES[mode])
        assert warm.token_ids == expected
        assert warm.num_cached_tokens == [20, 8, 16, 0]


@cache
def _expected(mode: str) -> Prompts:
    return stock(model_of(), [prompt_of(33)], 20, eos=None, **MODES[mode])


FEW_SIZES = ((1, 64), (3, 7), (16, 1))
"""Sizes of blocks and chunks, of which each occurs once."""


@pytest.mark.parametrize(
    ("sizes", "mode"),
    all_pairs(
        product((1, 3, 16), (1, 7, 64)),
        MODES,
        lambda sizes, mode: sizes in FEW_SIZES and mode in ("returned", "sampled beams"),
    ),
)
def test_block_and_chunk_sizes(sizes: tuple[int, int], mode: str) -> None:
    block_size, chunk_tokens = sizes
    model, prompt, expected = model_of(), prompt_of(33), _expected(mode)
    with engine_over(model, block_size=block_size, chunk_tokens=chunk_tokens) as engine:
        ns = engine.namespace("acme")
        for cached in (0, 32 // block_size * block_size):
            made = engine.generate(ns, prompt, 20, eos_token_id=-1, **MODES[mode])
            assert made.token_ids == expected
            assert made.num_cached_tokens == [cached]
            assert made.finish_reasons == ["length"] * len(expected)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("mode", ["returned", "beams"])
def test_next_turn_finds_what_was_generated(block_size: int, mode: str) -> None:
    model = model_of()
    prompt, question = prompt_of(18), prompt_of(5, 1)
    with engine_over(model, block_size=block_size) as engine:
        ns = engine.namespace("acme")
        for reply in engine.generate(ns, prompt, 15, eos_token_id=[], **MODES[mode]).token_ids:
            turn = [*prompt, *reply, *question]
            assert engine.cache.match(ns, turn).num_tokens == (18 + 15 - 1) // block_size * block_size
            second = engine.generate(ns, turn, 10)
            assert second.token_ids == stock(model, [turn], 10)


def test_a_prompt_of_whole_blocks() -> None:
    model = model_of()
    prompt = prompt_of(16)
    with engine_over(model, block_size=4) as engine:
        ns = engine.namespace("acme")
        for mode, cached in (("beams", 0), ("returned", 12), ("greedy", 12)):
            made = engine.generate(ns, prompt, 9, **MODES[mode])
            assert made.token_ids == stock(model, [prompt], 9, **MODES[mode])
            assert made.num_cached_tokens == [cached]


@pytest.mark.slow
def test_a_long_generation_enlarges_the_working_copy() -> None:
    model = model_of()
    prompt = prompt_of(20)
    with engine_over(model, block_size=16) as engine:
        made = engine.generate(engine.namespace("acme"), prompt, 400, eos_token_id=-1)
        assert made.token_ids == stock(model, [prompt], 400, eos=None)


def test_after_a_prefill() -> None:
    model = model_of()
    prompt = prompt_of(50)
    with engine_over(model, chunk_tokens=8) as engine:
        ns = engine.namespace("acme")
        assert engine.prefill(ns, prompt[:41]).num_computed_tokens == 41
        made = engine.generate(ns, prompt, 10)
        assert made.num_cached_tokens == [40]
        assert made.token_ids == stock(model, [prompt], 10)


def test_namespaces_share_nothing() -> None:
    model = model_of()
    prompt = prompt_of(30)
    with engine_over(model) as engine:
        for ns in (engine.namespace("a"), engine.namespace("b"), engine.namespace("a", salt="s")):
            made = engine.generate(ns, prompt, 5)
            assert made.num_cached_tokens == [0]
            assert made.token_ids == stock(model, [prompt], 5)


def test_wrong_kv_changes_the_tokens() -> None:
    """The comparison detects wrong KV: a cached block with other values changes the tokens."""
    model = model_of()
    prompt = prompt_of(30)
    with engine_over(model) as engine:
        ns = engine.namespace("acme")
        engine.prefill(ns, prompt)
        block = int(engine.cache.match(ns, prompt).block_ids[2])
        data = engine.cache.storage.data
        data[block, :, 0] = data[block, :, 0].flip(
            1
        )  # the keys of its tokens in reverse, their values unchanged
        assert engine.generate(ns, prompt, 20).token_ids != stock(model, [prompt], 20)


def test_a_skipped_copy_changes_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beams read the blocks: without the copies of copy-on-write they give other tokens."""
    model = model_of()
    prompt = prompt_of(30)
    with engine_over(model, block_size=16) as engine:
        monkeypatch.setattr(engine.cache.storage, "execute", lambda plan: None)
        made = engine.generate(engine.namespace("acme"), prompt, 20, num_beams=4, eos_token_id=-1)
        assert made.token_ids != stock(model, [prompt], 20, eos=None, num_beams=4)


def _batches() -> st.SearchStrategy[list[tuple[Prompts, int, dict[str, Any]]]]:
    runs = st.lists(st.integers(3, 5), min_size=1, max_size=9)  # few ids, so that prompts share prefixes
    prompts = st.lists(runs, min_size=1, max_size=3)
    modes = st.sampled_from(list(MODES.values()))
    return st.lists(st.tuples(prompts, st.integers(1, 7), modes), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 4)
@given(requests=_batches(), block_size=st.sampled_from([1, 2, 3, 4]), chunk_tokens=st.integers(1, 5))
def test_random_requests_in_sequence(
    requests: list[tuple[Prompts, int, dict[str, Any]]], block_size: int, chunk_tokens: int
) -> None:
    model = model_of()
    with engine_over(model, block_size=block_size, chunk_tokens=chunk_tokens, num_blocks=96) as engine:
        ns = engine.namespace("acme")
        for prompts, max_new_tokens, mode in requests:
            made = engine.generate(ns, prompts, max_new_tokens, **mode)
            assert made.token_ids == stock(model, prompts, max_new_tokens, **mode)


def test_special_ids_in_a_prompt_are_ordinary() -> None:
    model = model_of()
    prompts = [[1, EOS, 7, PAD, 9, EOS], [PAD, PAD, 8, 8]]
    with engine_over(model, block_size=2) as engine:
        ns = engine.namespace("acme")
        for cached in ([0, 0], [4, 2]):
            made = engine.generate(ns, prompts, 6)
            assert made.token_ids == stock(model, prompts, 6)
            assert made.num_cached_tokens == cached
