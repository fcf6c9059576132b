"""The engine on a GPU, in fp32: the same tokens as stock transformers, and beam steps on the device."""

from __future__ import annotations

import pytest

from radixkv.index.lent_beams import LentBeams
from tests.engines.hf.test_batch import MODES as TOGETHER
from tests.engines.hf.test_batch import Call, forwards, preempted, together
from tests.engines.hf.test_same_tokens import MODES
from tests.engines.support import ARCHITECTURES, engine_over, model_of, prompt_of, stock

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batch_cold_and_warm(architecture: str, mode: str) -> None:
    model = model_of(architecture, "cuda")
    prompts = [prompt_of(21), prompt_of(9, 1), prompt_of(21)[:14] + prompt_of(6, 2), [5]]
    expected = stock(model, prompts, 12, **MODES[mode])
    with engine_over(model) as engine:
        ns = engine.namespace("acme")
        for cached in ([0, 0, 12, 0], [20, 8, 16, 0]):
            made = engine.generate(ns, prompts, 12, **MODES[mode])
            assert made.token_ids == expected
            assert made.num_cached_tokens == cached


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_long_beam_search_is_made_by_the_device(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[LentBeams] = []
    original = LentBeams.step
    monkeypatch.setattr(
        LentBeams, "step", lambda self, *tensors: steps.append(self) or original(self, *tensors)
    )
    model, prompts = model_of("llama", "cuda"), [prompt_of(33), prompt_of(18, 1)]
    how = {"num_beams": 4, "num_return_sequences": 2}
    expected = stock(model, prompts, 40, eos=None, **how)
    with engine_over(model, block_size=block_size) as engine:
        made = engine.generate(engine.namespace("acme"), prompts, 40, eos_token_id=-1, **how)
        assert made.token_ids == expected
    assert len(steps) == 39  # the newest tokens are never computed


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_requests_of_all_tenants_step_together(architecture: str) -> None:
    model = model_of(architecture, "cuda")
    with engine_over(model, num_blocks=800, chunk_tokens=32) as engine:
        calls = [
            Call(
                f"t{n % 3}",
                prompt_of(20)[: 9 + n] + prompt_of(8 + n, n),
                20 + n,
                **TOGETHER[n % len(TOGETHER)],
            )
            for n in range(12)
        ]
        expected = [call.expected(engine) for call in calls]
        with forwards(engine) as sizes:
            made = together(engine, calls)
        assert [one.token_ids for one in made] == expected
        beams = sum(call.num for call in calls if "num_beams" in call.mode)
        alone = sum(call.num for call in calls if "num_beams" not in call.mode)
        assert len(sizes) - beams < alone / 3


def test_requests_that_outgrow_the_pool_resume() -> None:
    with engine_over(model_of("llama", "cuda"), num_blocks=45) as engine:
        together(engine, [Call("acme", prompt_of(8, n), 2) for n in range(4)])
        calls = [Call("acme", prompt_of(13 + n, n), 25, **TOGETHER[n % 4]) for n in range(8)]
        expected = [call.expected(engine) for call in calls]
        assert [one.token_ids for one in together(engine, calls)] == expected
        assert preempted(engine) > 0
