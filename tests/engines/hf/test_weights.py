"""Weights that change in place: KV of the old weights are never used for a later request."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch

from radixkv import audit
from radixkv.engines.hf import HFEngine
from radixkv.errors import ArgumentError
from tests.engines.hf.test_requests import resident_kv, stock_kv
from tests.engines.support import engine_over, model_of, prompt_of, stock


def update(engine: HFEngine, seed: int) -> None:
    """Change the model's weights in place, as a step of training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=generator)


def test_requests_after_a_change_compute_again() -> None:
    with engine_over(deepcopy(model_of())) as engine:
        prompt, fingerprint = prompt_of(30), engine.fingerprint
        answers = []
        for version in range(3):
            ns = engine.namespace("acme")
            assert (ns.weights, engine.weights_version) == (version, version)
            for expected in (0, 28):
                made = engine.generate(ns, prompt, 8)
                assert made.num_cached_tokens == [expected]
                assert made.token_ids == stock(engine.model, [prompt], 8)
            torch.testing.assert_close(
                resident_kv(engine, ns, prompt), stock_kv(engine, prompt)[..., :28, :], rtol=1e-4, atol=1e-4
            )
            answers.append(made.token_ids)
            update(engine, version)
            assert engine.weights_changed() == version + 1
            assert engine.cache.match(engine.namespace("acme"), prompt).num_tokens == 0
        assert len({str(answer) for answer in answers}) > 1, "the updates change the answers"
        assert engine.fingerprint == fingerprint


def test_old_kv_gives_its_blocks_back() -> None:
    with engine_over(deepcopy(model_of())) as engine:
        ns, cache = engine.namespace("acme"), engine.cache
        engine.prefill(ns, prompt_of(20))
        engine.prefill(engine.namespace("acme", "adapter", "salt"), prompt_of(20))
        engine.publish("base", engine.namespace("op"), prompt_of(16), ["globex"])
        cache.pin(ns, prompt_of(20), 60)
        other = ns._replace(model="another model of this cache")
        cache.insert(other, range(4), cache.allocate(1))
        engine.weights_changed()
        assert cache.namespaces() == [other] and not cache.bases() and not cache.pins("acme")
        assert cache.stats().free_blocks == cache.stats().num_blocks - 1
        assert cache.match(engine.namespace("globex"), prompt_of(16)).num_tokens == 0


def test_the_version_can_be_a_number_of_the_fleet() -> None:
    with engine_over(deepcopy(model_of())) as engine:
        engine.prefill(engine.namespace("acme"), prompt_of(8))
        assert engine.weights_changed(1_000) == engine.namespace("acme").weights == 1_000
        assert engine.cache.match(engine.namespace("acme"), prompt_of(8)).num_tokens == 0
        engine.prefill(engine.namespace("acme"), prompt_of(8))
        for wrong in (1_000, 0, -1, True, 2**53, 1_001.0, "1001"):
            with pytest.raises(
                ArgumentError, match=r"version=.* is not allowed; allowed: an integer from 1001 to"
            ):
                engine.weights_changed(wrong)  # type: ignore[arg-type]
        assert engine.weights_version == 1_000
        assert engine.cache.match(engine.namespace("acme"), prompt_of(8)).num_tokens == 8
        assert engine.weights_changed() == 1_001
        assert engine.weights_changed(2**53 - 1) == 2**53 - 1
        with pytest.raises(ArgumentError, match="version"):
            engine.weights_changed()


@pytest.mark.parametrize("off", [-1, 1])
def test_a_namespace_of_another_version_is_refused(off: int) -> None:
    with engine_over(deepcopy(model_of())) as engine:
        engine.weights_changed()
        ns = engine.namespace("acme")._replace(weights=1 + off)
        calls: list[Callable[[], object]] = [
            lambda: engine.generate(ns, prompt_of(8), 2),
            lambda: engine.prefill(ns, prompt_of(8)),
            lambda: engine.publish("base", ns, prompt_of(8), []),
        ]
        for call in calls:
            with pytest.raises(
                ArgumentError, match=r"ns\.weights=. is not allowed; allowed: the version of this"
            ):
                call()
        assert not engine.cache.namespaces()


def test_what_a_running_request_computes_is_not_matched_later() -> None:
    """It continues with its KV. Some are of the old weights and some of the new ones, so no other request gets them."""
    with engine_over(deepcopy(model_of())) as engine:
        ns = engine.namespace("acme")

        def on_step(step: list[list[int]]) -> None:
            if not engine.weights_version:
                update(engine, 1)
                engine.weights_changed()

        made = engine.generate(ns, prompt_of(12), 9, on_step=on_step, eos_token_id=-1)
        assert len(made.token_ids[0]) == 9
        for namespace in (ns, engine.namespace("acme")):
            assert engine.cache.match(namespace, prompt_of(12) + made.token_ids[0]).num_tokens == 0
        assert engine.cache.stats().free_blocks == engine.cache.stats().num_blocks
        assert engine.generate(engine.namespace("acme"), prompt_of(12), 9).token_ids == stock(
            engine.model, [prompt_of(12)], 9
        )


def test_prompts_that_begin_after_the_change_have_the_new_version() -> None:
    """A batch computes its prompts one by one, and others may run in between."""
    with engine_over(deepcopy(model_of()), chunk_tokens=8) as engine:
        prompts, num_asked = [prompt_of(20, 1), prompt_of(20, 2)], 0

        def stop() -> bool:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 3:  # after the last chunk of the first prompt
                update(engine, 1)
                engine.weights_changed()
            return False

        old = engine.namespace("acme")
        engine.generate(old, prompts, 2, stop=stop)
        new = engine.namespace("acme")
        assert [engine.cache.match(ns, prompt).num_tokens for ns in (old, new) for prompt in prompts] == [
            0,
            0,
            0,
            20,
        ]
        torch.testing.assert_close(
            resident_kv(engine, new, prompts[1]), stock_kv(engine, prompts[1]), rtol=1e-4, atol=1e-4
        )
        audit.check(engine.cache)
