"""Penalties, biases and least lengths are transformers' own; log probabilities are those of the model."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from radixkv.engines.hf import HFEngine
from radixkv.engines.hf.choose import OpenAIPenalties
from radixkv.engines.protocol import Logprobs, Penalties
from radixkv.errors import ArgumentError
from tests.engines.support import EOS, VOCAB, engine_over, model_of, prompt_of, stock

PENALTIES: list[tuple[Penalties, dict[str, Any]]] = [
    (Penalties(repetition=1.7), {"repetition_penalty": 1.7}),
    (Penalties(bias={5: 50.0, 6: -100.0}), {"sequence_bias": [[[5], 50.0], [[6], -100.0]]}),
    (Penalties(min_new_tokens=12), {"min_new_tokens": 12}),
    (
        Penalties(repetition=1.3, bias={9: 4.0}, min_new_tokens=6),
        {"repetition_penalty": 1.3, "sequence_bias": [[[9], 4.0]], "min_new_tokens": 6},
    ),
]
MODES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 2, "num_return_sequences": 3},
    {"do_sample": True, "seed": 3, "temperature": 1.5, "top_k": 20, "top_p": 0.8},
    {"num_beams": 3, "num_return_sequences": 2},
]


def made(engine: HFEngine, prompts: Any, penalties: Penalties | None, num: int = 20, **mode: Any) -> Any:
    return engine.generate(engine.namespace("acme"), prompts, num, penalties=penalties, **mode).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "falcon"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("penalties", "settings"), PENALTIES)
def test_the_tokens_are_those_of_transformers(
    architecture: str, mode: dict[str, Any], penalties: Penalties, settings: dict[str, Any]
) -> None:
    """Also of several prompts, and of a model that transformers' own loop serves."""
    prompts = [prompt_of(9), prompt_of(14, 1)]
    with engine_over(model_of(architecture)) as engine:
        found = made(engine, prompts, penalties, **mode)
        assert found == stock(engine.model, prompts, 20, **settings, **mode)


def test_the_least_length_holds_the_end_back() -> None:
    with engine_over(model_of()) as engine:
        prompt = prompt_of(15)
        eos = stock(engine.model, [prompt], 12, eos=None)[0][4]
        (plain,) = made(engine, prompt, None, eos_token_id=eos)
        (longer,) = made(engine, prompt, Penalties(min_new_tokens=9), eos_token_id=eos)
        assert len(plain) == 5 and len(longer) >= 9 and longer[:4] == plain[:4]


def naive(logits: torch.Tensor, answer: list[int], presence: float, frequency: float) -> torch.Tensor:
    """OpenAI's formula, token by token."""
    found = logits.clone()
    for token_id, count in Counter(answer).items():
        found[token_id] -= count * frequency + presence
    return found


def test_presence_and_frequency_are_openais_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 11, generator=generator)
    ids = torch.randint(0, 11, (3, 9), generator=generator)
    found = OpenAIPenalties(0.7, -0.3, width=4)(ids, scores)
    for row in range(3):
        expected = naive(scores[row], ids[row, 4:].tolist(), 0.7, -0.3)
        torch.testing.assert_close(found[row], expected)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_presence_and_frequency_penalise_what_the_answer_has(architecture: str) -> None:
    prompt = prompt_of(12)
    with engine_over(model_of(architecture)) as engine:
        (found,) = made(engine, prompt, Penalties(presence=1.5, frequency=0.5), 25, eos_token_id=-1)
        answer: list[int] = []
        for _ in range(25):
            ids = torch.tensor([[*prompt, *answer]])
            with torch.no_grad():
                logits = engine.model(input_ids=ids, use_cache=False).logits[0, -1].float()
            answer.append(int(naive(logits, answer, 1.5, 0.5).argmax()))
        assert found == answer
        assert found != made(engine, prompt, None, 25, eos_token_id=-1)[0]


@pytest.mark.slow
def test_a_batch_with_and_without_penalties_changes_no_tokens() -> None:
    choices = [
        Penalties(presence=1.0),
        None,
        Penalties(repetition=1.5, frequency=0.2),
        None,
        Penalties(bias={5: 3.0}),
    ]
    with engine_over(model_of(), num_blocks=800) as engine:

        def one(n: int) -> Any:
            return made(engine, prompt_of(9 + n, n), choices[n % 5], 30, eos_token_id=-1, **MODES[n % 3])

        alone = [one(n) for n in range(10)]
        with ThreadPoolExecutor(10) as pool:
            assert [*pool.map(one, range(10))] == alone


@pytest.mark.parametrize(
    ("penalties", "named"),
    [
        (Penalties(presence=float("nan")), "penalties.presence"),
        (Penalties(frequency=float("inf")), "penalties.frequency"),
        (Penalties(repetition=0.0), "penalties.repetition"),
        (Penalties(bias={VOCAB: 1.0}), "penalties.bias"),
        (Penalties(bias={"5": 1.0}), "penalties.bias"),  # type: ignore[dict-item]
        (Penalties(min_new_tokens=21), "penalties.min_new_tokens"),
        ("none", "penalties"),
    ],
)
def test_invalid_penalties_are_named(penalties: Any, named: str) -> None:
    with engine_over(model_of()) as engine, pytest.raises(ArgumentError) as caught:
        made(engine, prompt_of(5), penalties)
    assert caught.value.argument == named


# --- log probabilities


@pytest.mark.parametrize("mode", MODES[:3])
@pytest.mark.parametrize("num_top", [0, 4])
def test_log_probabilities_are_those_of_the_model(mode: dict[str, Any], num_top: int) -> None:
    """Before penalties and temperature. Without the token that ends a row."""
    prompts = [prompt_of(9), prompt_of(14, 1)]
    with engine_over(model_of()) as engine:
        told, seen = Logprobs(num_top), []

        def on_step(new: list[list[int]]) -> None:
            seen.append([len(row) for row in told.rows])
            assert all(
                len(row) == len(seen)
                for row, ids in zip(told.rows, new, strict=True)
                if ids not in ([], [EOS])
            )

        ns, penalties = engine.namespace("acme"), Penalties(presence=1.0)
        done = engine.generate(ns, prompts, 20, on_step=on_step, logprobs=told, penalties=penalties, **mode)
        assert seen[-1] == [len(row) for row in told.rows]
        num_rows = len(done.token_ids) // len(prompts)
        for number, (row, found) in enumerate(zip(done.token_ids, told.rows, strict=True)):
            text = [token_id for token_id in row if token_id != EOS]
            assert [each.token_id for each in found] == text
            prompt = prompts[number // num_rows]
            with torch.no_grad():
                logits = engine.model(input_ids=torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
            expected = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
            for step, each in enumerate(found):
                assert each.logprob == pytest.approx(float(expected[step, each.token_id]), abs=1e-4)
                values, ids = expected[step].topk(num_top) if num_top else ([], [])
                assert [token_id for token_id, _ in each.top] == [int(token_id) for token_id in ids]
                assert [value for _, value in each.top] == pytest.approx([float(v) for v in values], abs=1e-4)


def test_log_probabilities_change_no_tokens() -> None:
    with engine_over(model_of()) as engine:
        ns, prompt = engine.namespace("acme"), prompt_of(9)
        for mode in MODES[:3]:
            plain = engine.generate(ns, prompt, 20, **mode)
            told = engine.generate(ns, prompt, 20, logprobs=Logprobs(2), **mode)
            assert plain.token_ids == told.token_ids


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logprobs": Logprobs(21)}, "logprobs.num_top"),
        ({"logprobs": Logprobs(), "num_beams": 2}, "logprobs"),
        ({"logprobs": 5}, "logprobs"),
    ],
)
def test_log_probabilities_that_cannot_be_told(fields: dict[str, Any], named: str) -> None:
    with engine_over(model_of()) as engine, pytest.raises(ArgumentError) as caught:
        engine.generate(engine.namespace("acme"), prompt_of(5), 5, **fields)
    assert caught.value.argument == named
