"""A request through the engine: the blocks that it computes, commits and releases, and the arguments it refuses."""

from __future__ import annotations

import copy
import gc
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from radixkv import audit
from radixkv.config import CacheConfig, KVLayout, Namespace, Tenant
from radixkv.engines.calls import generating, is_stepping
from radixkv.engines.hf import HFEngine, demo_model, layout_of
from radixkv.engines.hf.paged_cache import CACHE_ARGUMENT, PagedCache
from radixkv.engines.steps import Steps
from radixkv.errors import ArgumentError, CapacityError, ConfigError, TokenError
from radixkv.index.cache import PrefixCache
from radixkv.service.engine_loop import EngineLoop, Work
from radixkv_policies import LRU, RequestHints
from tests.engines.support import EOS, VOCAB, engine_over, model_of, prompt_of, stock
from tests.waiting import LIMIT_S


def resident_kv(engine: HFEngine, ns: Namespace, ids: list[int]) -> torch.Tensor:
    """Return the KV of the resident prefix of ``ids``: ``[layers, 2, kv_heads, tokens, head_dim]``."""
    match = engine.cache.match(ns, ids)
    assert engine.cache.storage is not None
    blocks = engine.cache.storage.data[torch.from_numpy(match.block_ids.astype(np.int64))]
    return blocks.permute(1, 2, 4, 0, 3, 5).flatten(3, 4)


def stock_kv(engine: HFEngine, ids: list[int]) -> torch.Tensor:
    past = DynamicCache(config=engine.model.config)
    with torch.no_grad():
        engine.model(input_ids=torch.tensor([ids]), **{CACHE_ARGUMENT: past})
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in past.layers])


# --- prefill


@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(1, 512), (3, 10), (16, 1)])
def test_prefill_makes_the_prefix_resident(block_size: int, chunk_tokens: int) -> None:
    prompt = prompt_of(45)
    with engine_over(model_of(), block_size=block_size, chunk_tokens=chunk_tokens) as engine:
        ns = engine.namespace("acme")
        first = engine.prefill(ns, prompt)
        assert (first.num_tokens, first.num_cached_tokens, first.num_computed_tokens) == (45, 0, 45)
        assert first.num_blocks == -(-45 // block_size)
        whole = 45 // block_size * block_size
        assert engine.cache.match(ns, prompt).num_tokens == whole
        expected = stock_kv(engine, prompt)[..., :whole, :]
        torch.testing.assert_close(resident_kv(engine, ns, prompt), expected, rtol=1e-4, atol=1e-4)
        again = engine.prefill(ns, prompt)
        assert again.num_cached_tokens == 44 // block_size * block_size


def test_policies_get_the_hints_of_a_request() -> None:
    """Hints of a prefill and of each prompt of a batch reach the policy. Without hints it gets None."""
    received: list[Any] = []

    class Noting(LRU):
        def opened(self, nodes: Any, num_blocks: int, hints: object) -> object:
            """Record the hints."""
            received.append(hints)
            return hints

    chat, agent = (RequestHints(labels={"type": kind}) for kind in ("chat", "agent"))
    with engine_over(model_of()) as engine:
        engine.cache.add_tenant(Tenant("acme", policy=Noting))
        ns = engine.namespace("acme")
        engine.prefill(ns, prompt_of(20), hints=chat)
        engine.generate(ns, [prompt_of(20), prompt_of(30)], 2, hints=agent)
        engine.generate(ns, prompt_of(20), 2)
    assert received == [chat, agent, agent, None]


def test_prefill_commits_chunk_by_chunk() -> None:
    prompt = prompt_of(45)
    with engine_over(model_of(), chunk_tokens=10) as engine:
        ns = engine.namespace("acme")
        progress: list[tuple[int, int]] = []

        def on_chunk(done: int, total: int) -> None:
            progress.append((done, total))
            assert engine.cache.match(ns, prompt).num_tokens == done // 4 * 4

        engine.prefill(ns, prompt, on_chunk=on_chunk)
        assert progress == [(10, 45), (20, 45), (30, 45), (40, 45), (45, 45)]


def test_an_aborted_prefill_keeps_the_committed_blocks() -> None:
    prompt = prompt_of(45)
    with engine_over(model_of(), chunk_tokens=10) as engine:
        ns = engine.namespace("acme")

        def on_chunk(done: int, total: int) -> None:
            if done == 20:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.prefill(ns, prompt, on_chunk=on_chunk)
        assert engine.cache.match(ns, prompt).num_tokens == 20
        assert not engine.model._forward_pre_hooks


def test_prefill_computes_only_what_is_not_cached() -> None:
    prompt = prompt_of(45)
    with engine_over(model_of()) as engine:
        ns = engine.namespace("acme")
        engine.prefill(ns, prompt[:20])
        computed: list[int] = []
        handle = engine.model.register_forward_pre_hook(
            lambda module, args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        engine.generate(ns, prompt, 3, eos_token_id=-1)
        handle.remove()
        assert computed == [24, 1, 1, 1]  # 45 − 20 cached − the last, then one token at a time


# --- the cache after a request


def test_generated_kv_is_right_and_only_computed_tokens_are_committed() -> None:
    prompt = prompt_of(10)
    with engine_over(model_of(), block_size=1) as engine:
        ns = engine.namespace("acme")
        (reply,) = engine.generate(ns, prompt, 20, eos_token_id=-1).token_ids
        turn = prompt + reply
        assert engine.cache.match(ns, turn).num_tokens == 29  # the last token was never fed to the model
        torch.testing.assert_close(
            resident_kv(engine, ns, turn), stock_kv(engine, turn)[..., :29, :], rtol=1e-4, atol=1e-4
        )


def endings(engine: HFEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Return rows that end at different times: an id of the first row's output serves as end-of-sequence."""
    return stock(engine.model, prompts, 24, eos=None)


def test_padding_takes_no_block_and_is_never_resident() -> None:
    prompts = [prompt_of(6), prompt_of(13, 1), prompt_of(9, 2)]
    with engine_over(model_of(), block_size=2) as engine:
        ns, size = engine.namespace("acme"), 2
        free_running = endings(engine, prompts)
        eos = free_running[0][3]
        lengths = [row.index(eos) + 1 if eos in row else 24 for row in free_running]
        assert lengths[0] < max(lengths), "the first row ends before another"
        steps: list[list[list[int]]] = []

        def on_step(step: list[list[int]]) -> None:
            steps.append(step)
            audit.check(engine.cache)
            # Before this step's tokens are fed, a row holds its prompt and the tokens fed so far.
            fed = [min(len(steps) - 1, length - 1) for length in lengths]
            held = sum(-(-(len(prompt) + count) // size) for prompt, count in zip(prompts, fed, strict=True))
            stats = engine.cache.stats()
            assert stats.num_blocks - stats.free_blocks == held

        made = engine.generate(ns, prompts, 24, eos_token_id=eos, on_step=on_step)
        assert made.token_ids == stock(engine.model, prompts, 24, eos=eos)
        assert made.finish_reasons == ["stop" if row[-1] == eos else "length" for row in made.token_ids]
        assert [sum((step[row] for step in steps), []) for row in range(3)] == made.token_ids
        for prompt, row in zip(prompts, made.token_ids, strict=True):
            computed = len(prompt) + len(row) - 1
            assert engine.cache.match(ns, [*prompt, *row, 0, 0, 0, 0]).num_tokens == computed // size * size


def test_a_row_that_ends_at_once() -> None:
    prompt = prompt_of(12)
    with engine_over(model_of()) as engine:
        ns = engine.namespace("acme")
        ((first, *_),) = stock(engine.model, [prompt], 5, eos=None)
        made = engine.generate(ns, prompt, 5, eos_token_id=[first, EOS])
        assert made.token_ids == [[first]]
        assert made.finish_reasons == ["stop"]
        assert engine.cache.stats().resident_blocks == 3


def test_one_new_token() -> None:
    prompts = [prompt_of(12), prompt_of(7, 1)]
    with engine_over(model_of()) as engine:
        ns = engine.namespace("acme")
        for mode in ({}, {"num_beams": 3}, {"do_sample": True, "seed": 1, "num_return_sequences": 2}):
            made = engine.generate(ns, prompts, 1, **mode)
            assert made.token_ids == stock(engine.model, prompts, 1, **mode)
        assert engine.cache.stats().copied_blocks == 0


@pytest.mark.slow
def test_the_working_copy_is_freed_after_the_request() -> None:
    with engine_over(model_of()) as engine:
        ns = engine.namespace("acme")
        gc.collect()
        gc.disable()
        try:
            engine.prefill(ns, prompt_of(30))
            engine.generate(ns, [prompt_of(30), prompt_of(9, 1)], 5, num_beams=2)
            assert not any(type(thing) is PagedCache for thing in gc.get_objects())
        finally:
            gc.enable()


# --- callbacks, time, randomness


def test_stop_ends_early_and_releases() -> None:
    prompt = prompt_of(12)
    with engine_over(model_of()) as engine:
        ns = engine.namespace("acme")
        asked: list[int] = []

        def stop() -> bool:
            asked.append(engine.cache.stats().num_sequences)
            return len(asked) == 5

        made = engine.generate(ns, prompt, 50, eos_token_id=-1, stop=stop)
        assert made.token_ids == [stock(engine.model, [prompt], 4, eos=None)[0]]  # called once in the prefill
        assert made.finish_reasons == ["stop"]
        assert asked == [1] * 5
        assert engine.cache.match(ns, prompt + made.token_ids[0]).num_tokens == 12


def test_stop_with_beams() -> None:
    prompt = prompt_of(12)
    with engine_over(model_of()) as engine:
        asked: list[None] = []

        def stop() -> bool:
            asked.append(None)
            return len(asked) == 5

        made = engine.generate(engine.namespace("acme"), prompt, 50, eos_token_id=-1, num_beams=3, stop=stop)
        assert made.token_ids == stock(engine.model, [prompt], 4, eos=None, num_beams=3)


def test_stop_in_the_prefill() -> None:
    prompts = [prompt_of(40), prompt_of(40, 1)]
    with engine_over(model_of(), chunk_tokens=16) as engine:
        ns = engine.namespace("acme")
        made = engine.generate(ns, prompts, 5, stop=lambda: True, num_beams=2, num_return_sequences=2)
        assert made.token_ids == [[], [], [], []]
        assert made.finish_reasons == ["stop"] * 4
        assert made.num_cached_tokens == [0, 0]
        assert made.time_to_first_token_s == made.seconds
        assert engine.cache.match(ns, prompts[0]).num_tokens == 16


def test_a_callback_that_fails_leaves_nothing_open() -> None:
    def on_step(step: list[list[int]]) -> None:
        raise RuntimeError("the client went away")

    with engine_over(model_of()) as engine:
        ns = engine.namespace("acme")
        with pytest.raises(RuntimeError, match="the client went away"):
            engine.generate(ns, [prompt_of(12), prompt_of(5)], 5, on_step=on_step)
        assert not engine.model._forward_pre_hooks
        assert engine.generate(ns, prompt_of(12), 5).token_ids == stock(engine.model, [prompt_of(12)], 5)


def test_times_are_those_of_the_clock() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    cache = PrefixCache(CacheConfig(num_blocks=64, block_size=4, layout=layout_of(model_of())))
    engine = HFEngine(model_of(), cache, clock=clock)
    made = engine.generate(engine.namespace("acme"), prompt_of(12), 3)
    assert (made.queued_s, made.time_to_first_token_s, made.seconds) == (1.0, 2.0, 3.0)
    assert engine.prefill(engine.namespace("acme"), prompt_of(12)).seconds == 2.0
    audit.check(cache)


def test_a_seed_leaves_the_random_state_alone() -> None:
    sampled: dict[str, Any] = {"do_sample": True}
    with engine_over(model_of()) as engine:
        ns = engine.namespace("acme")
        before = torch.random.get_rng_state()
        first = engine.generate(ns, prompt_of(12), 20, seed=1, **sampled).token_ids
        assert torch.random.get_rng_state().equal(before)
        assert engine.generate(ns, prompt_of(12), 20, seed=1, **sampled).token_ids == first
        assert engine.generate(ns, prompt_of(12), 20, seed=2, **sampled).token_ids != first
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            assert engine.generate(ns, prompt_of(12), 20, **sampled).token_ids == first
            assert engine.generate(ns, prompt_of(12), 20, **sampled).token_ids != first


INTERLEAVED: tuple[dict[str, Any], ...] = (
    {"do_sample": True, "seed": 1},
    {"do_sample": True, "seed": 2, "num_return_sequences": 3},
    {},
    {"num_beams": 3},
    {"do_sample": True, "seed": 1, "temperature": 0.7},
)


def test_requests_that_are_interleaved_step_by_step_get_their_own_tokens() -> None:
    """Each request has a thread and a tenant of its own. They take turns after each chunk and each step."""
    with engine_over(model_of(), num_blocks=200, chunk_tokens=5) as engine:
        namespaces = [engine.namespace(f"t{place}") for place in range(len(INTERLEAVED))]
        prompts = [prompt_of(20 + place, place) for place in range(len(INTERLEAVED))]
        requests = list(zip(namespaces, prompts, INTERLEAVED, strict=True))
        alone = [
            engine.generate(ns, ids, 12, eos_token_id=-1, **mode).token_ids for ns, ids, mode in requests
        ]
        for ns in namespaces:
            engine.cache.clear(ns)
        before, order = torch.random.get_rng_state(), list[int]()
        loop = EngineLoop(num_together=32, engine=engine if is_stepping(engine) else None)
        held = threading.Event()

        def generate(place: int, work: Work[Any]) -> Steps[list[list[int]]]:
            ns, ids, mode = requests[place]

            def stop() -> bool:
                order.append(place)
                return work.stopping

            admission = work.admission(lambda: None)
            made = yield from generating(engine, ns, ids, 12, admission, eos_token_id=-1, stop=stop, **mode)
            return made.token_ids

        loop.call("z", lambda _: held.wait(LIMIT_S))
        works = [loop.submit(f"t{n}", partial(generate, n)) for n in range(len(requests))]
        held.set()
        assert [work.future.result(LIMIT_S) for work in works] == alone
        loop.close()
        assert order[:10] == [0, 1, 2, 3, 4] * 2, "the requests were interleaved"
        assert torch.random.get_rng_state().equal(before)
        assert engine.cache.stats().num_sequences == 0
        audit.check(engine.cache)


@pytest.mark.parametrize(
    "mode", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1, "num_return_sequences": 3}]
)
def test_a_step_without_room_is_tried_again(mode: dict[str, Any]) -> None:
    with engine_over(model_of(), num_blocks=40) as engine:
        ns, prompt = engine.namespace("acme"), prompt_of(20)
        expected = engine.generate(ns, prompt, 12, eos_token_id=-1, **mode).token_ids
        held = engine.cache.open(engine.namespace("other"), prompt_of(4 * 33, 9))
        asked: list[CapacityError] = []

        def on_no_room(error: CapacityError) -> bool:
            asked.append(error)
            torch.rand(3)  # other threads draw random numbers meanwhile
            held.release()
            return True

        made = engine.generate(ns, prompt, 12, eos_token_id=-1, on_no_room=on_no_room, **mode)
        assert made.token_ids == expected and len(asked) == 1
        audit.check(engine.cache)


def test_a_prefill_without_room_is_tried_again() -> None:
    with engine_over(model_of(), num_blocks=10) as engine:
        held = engine.cache.open(engine.namespace("other"), prompt_of(30, 9))
        with pytest.raises(CapacityError):
            engine.prefill(engine.namespace("acme"), prompt_of(30), on_no_room=lambda _: False)

        def on_no_room(_: CapacityError) -> bool:
            held.release()
            return True

        assert engine.prefill(engine.namespace("acme"), prompt_of(30), on_no_room=on_no_room).num_tokens == 30


# --- capacity


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_a_pool_that_runs_out_midway(mode: dict[str, Any]) -> None:
    with engine_over(model_of(), num_blocks=10) as engine:
        ns = engine.namespace("acme")
        with pytest.raises(CapacityError):
            engine.generate(ns, prompt_of(20), 100, eos_token_id=-1, **mode)
        assert engine.cache.stats().num_sequences == 0
        audit.check(engine.cache)
        assert engine.cache.match(ns, prompt_of(20)).num_tokens == 20
        assert engine.generate(ns, prompt_of(20), 4).token_ids == stock(engine.model, [prompt_of(20)], 4)


def test_a_batch_whose_second_row_does_not_fit() -> None:
    with engine_over(model_of(), num_blocks=10) as engine:
        ns = engine.namespace("acme")
        with pytest.raises(CapacityError):
            engine.generate(ns, [prompt_of(30), prompt_of(30, 1)], 4)
        assert engine.cache.stats().num_sequences == 0


def test_a_prefill_that_does_not_fit() -> None:
    with engine_over(model_of(), num_blocks=10) as engine, pytest.raises(CapacityError):
        engine.prefill(engine.namespace("acme"), prompt_of(41))


def test_resident_blocks_are_evicted_for_a_request() -> None:
    with engine_over(model_of(), num_blocks=12) as engine:
        ns = engine.namespace("acme")
        for seed in range(6):
            prompt = prompt_of(30, seed)
            assert engine.generate(ns, prompt, 6).token_ids == stock(engine.model, [prompt], 6)
            audit.check(engine.cache)
        assert engine.cache.stats().evicted_blocks > 0


def test_a_namespace_cleared_while_it_generates() -> None:
    with engine_over(model_of()) as engine:
        ns = engine.namespace("acme")
        cleared: list[int] = []

        def on_step(step: list[list[int]]) -> None:
            if not cleared:
                cleared.append(engine.cache.clear(ns))

        made = engine.generate(ns, prompt_of(12), 9, on_step=on_step)
        assert made.token_ids == stock(engine.model, [prompt_of(12)], 9)
        assert engine.cache.match(ns, prompt_of(12)).num_tokens == 0
        assert engine.cache.stats().free_blocks == engine.cache.stats().num_blocks


# --- refusals


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ids": []}, ArgumentError, r"ids has 0 items; allowed: 1 to 511 tokens"),
    ({"ids": [[3], []]}, ArgumentError, r"ids\[1\] has 0 items; allowed"),
    ({"ids": [3] * 512}, ArgumentError, r"ids has 512 items; allowed: 1 to 511 tokens"),
    (
        {"ids": [3, VOCAB]},
        TokenError,
        rf"ids\[1\]={VOCAB} is not allowed; allowed: ids of the vocabulary, 0 to {VOCAB - 1}",
    ),
    ({"ids": [[3], [4, 2**31]]}, TokenError, rf"ids\[1\]\[1\]={2**31} is not allowed"),
    ({"ids": [3, -1]}, TokenError, r"ids: token id at index 1 is -1"),
    ({"ids": [3, 1.5]}, TokenError, r"ids: token id at index 1 is 1.5"),
    ({"ids": [[3], ["a"]]}, TokenError, r"ids\[1\]: token id at index 0 is 'a'"),
    ({"ids": "text"}, TokenError, r"ids: token ids can't be a str"),
    ({"ids": None}, TokenError, r"ids: token ids can't be a NoneType"),
    ({"max_new_tokens": 0}, ArgumentError, "max_new_tokens=0 is not allowed; allowed: an integer ≥ 1"),
    ({"max_new_tokens": 2.0}, ArgumentError, "max_new_tokens=2.0"),
    ({"max_new_tokens": True}, ArgumentError, "max_new_tokens=True"),
    (
        {"max_new_tokens": 510},
        ArgumentError,
        "max_new_tokens=510 is not allowed; allowed: 1 to 509 after a prompt of 3",
    ),
    ({"num_beams": 0}, ArgumentError, "num_beams=0"),
    ({"num_return_sequences": 0}, ArgumentError, "num_return_sequences=0"),
    (
        {"num_return_sequences": 2},
        ArgumentError,
        "num_return_sequences=2 is not allowed; allowed: 1 for greedy",
    ),
    (
        {"num_beams": 2, "num_return_sequences": 3},
        ArgumentError,
        "num_return_sequences=3 .* at most num_beams = 2",
    ),
    ({"num_beams": 2, "on_step": print}, ArgumentError, "on_step=.* None with num_beams > 1"),
    ({"do_sample": 1}, ArgumentError, "do_sample=1"),
    ({"temperature": 0.0}, ArgumentError, "temperature=0.0 is not allowed; allowed: a finite number > 0"),
    ({"temperature": float("nan")}, ArgumentError, "temperature=nan"),
    ({"temperature": "hot"}, ArgumentError, "temperature='hot'"),
    ({"top_k": 0}, ArgumentError, "top_k=0"),
    ({"top_p": 0.0}, ArgumentError, "top_p=0.0"),
    ({"top_p": 1.1}, ArgumentError, "top_p=1.1"),
    ({"seed": 2**64}, ArgumentError, "seed=18446744073709551616"),
    ({"seed": 1.0}, ArgumentError, "seed=1.0"),
    ({"hints": {"type": "chat"}}, ArgumentError, "hints=.* a RequestHints, or None"),
    ({"eos_token_id": VOCAB}, ArgumentError, f"eos_token_id={VOCAB}"),
    ({"eos_token_id": "</s>"}, ArgumentError, "eos_token_id='</s>'"),
    ({"ns": "acme"}, ArgumentError, "ns='acme' is not allowed; allowed: a Namespace"),
    (
        {"ns": Namespace("acme", "another")},
        ArgumentError,
        "ns.model='another' is not allowed; allowed: this engine's",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_invalid_arguments_are_refused_before_anything_changes(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with engine_over(model_of()) as engine:
        call = {"ns": engine.namespace("acme"), "ids": [3, 4, 5], "max_new_tokens": 4, **arguments}
        with pytest.raises(error, match=message):
            engine.generate(**call)
        assert engine.cache.stats().requests == 0


@pytest.mark.parametrize(
    ("ids", "error"),
    [([], ArgumentError), ([3] * 513, ArgumentError), ([VOCAB], TokenError), ([[3]], TokenError)],
)
def test_prefill_refuses_invalid_ids(ids: list[Any], error: type[Exception]) -> None:
    with engine_over(model_of()) as engine:
        with pytest.raises(error):
            engine.prefill(engine.namespace("acme"), ids)
        assert engine.prefill(engine.namespace("acme"), [3] * 512).num_tokens == 512


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.uint32)]
)
def test_ids_in_any_form(form: Any) -> None:
    prompt = prompt_of(9)
    with engine_over(model_of()) as engine:
        ns = engine.namespace("acme")
        expected = stock(engine.model, [prompt], 4)
        assert engine.generate(ns, form(prompt), 4).token_ids == expected
        assert engine.generate(ns, form([prompt, prompt]), 4).token_ids == expected * 2


def test_engines_refuse_a_cache_that_does_not_fit_the_model() -> None:
    model, layout = model_of(), layout_of(model_of())
    with pytest.raises(ConfigError, match="layout"):
        HFEngine(model, PrefixCache(CacheConfig(num_blocks=8)))
    with pytest.raises(ConfigError, match="layout"):
        HFEngine(model, PrefixCache(CacheConfig(num_blocks=8, layout=KVLayout(1, 2, 8, "float32"))))
    with pytest.raises(ConfigError, match="chunk_tokens"):
        HFEngine(model, PrefixCache(CacheConfig(num_blocks=8, layout=layout)), chunk_tokens=0)
    training = demo_model(0, 64, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1).train()
    with pytest.raises(ConfigError, match="eval mode"):
        HFEngine(training, PrefixCache(CacheConfig(num_blocks=8, layout=layout_of(training))))


def test_an_engine_can_not_be_copied() -> None:
    with engine_over(model_of()) as engine:
        for way in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="it holds a model, threads and a cache"):
                way(engine)
