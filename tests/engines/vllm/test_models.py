"""Kinds of models, drafts and parallel workers inside the real vLLM, beside vLLM's own cache; what is refused.

``make engines`` sets vLLM up, in an environment of its own that ``RADIXKV_VLLM`` names (its Python).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.test_same_tokens import ROOT, model, nothing_is_left, ran

__all__ = ["model"]  # the fixture

pytestmark = [pytest.mark.engines]

SCRIPT = Path(__file__).with_name("models.py")
REFUSALS = Path(__file__).with_name("refusals.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Make the folder of a model of a kind."""

    def make(kind: str, *of: str) -> str:
        folder = str(tmp_path_factory.mktemp(kind))
        subprocess.run([os.environ["RADIXKV_VLLM"], str(SCRIPT), kind, folder, *of], check=True)
        return folder

    return make


def pair(folder: str, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What vLLM's own cache and radixkv found, with eviction. The tokens are the same."""
    stock, ours = (ran(cache, folder, blocks=150, settings=settings) for cache in ("stock", "radixkv"))
    assert ours["outputs"] == stock["outputs"]
    nothing_is_left(ours)
    return stock, ours


def test_mla(made: Callable[..., str]) -> None:
    """vLLM has a prefix cache for MLA on a CPU only where the processor has AMX, which needs bfloat16."""
    if "amx_bf16" in Path("/proc/cpuinfo").read_text():
        stock, ours = pair(made("mla"), dtype="bfloat16")
        assert ours["cached"] >= stock["cached"] > 0
    else:
        stock, ours = pair(made("mla"), attention_backend="CPU_MLA")
        assert ours["cached"] == stock["cached"] == 0


def test_a_window_in_every_layer(made: Callable[..., str]) -> None:
    """vLLM gives back blocks that the window has passed, so that it has room for some more. Here they stay."""
    stock, ours = pair(made("windows"))
    assert ours["cached"] >= 0.98 * stock["cached"] > 0


def test_windows_in_some_layers_with_the_hybrid_manager_off(made: Callable[..., str]) -> None:
    stock, ours = pair(made("mixed"), disable_hybrid_kv_cache_manager=True)
    assert ours["cached"] >= stock["cached"] > 0


def test_drafts_of_n_grams(model: str) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    stock, ours = pair(model, speculative_config=drafts)
    assert ours["cached"] >= stock["cached"] > 0
    assert ours["num_computed"] > ran("radixkv", model, blocks=150)["num_computed"], "no draft was rejected"


def test_drafts_of_eagle(model: str, made: Callable[..., str]) -> None:
    drafts = {"method": "eagle", "model": made("eagle", model), "num_speculative_tokens": 2}
    stock, ours = pair(model, speculative_config=drafts)
    assert ours["cached"] >= stock["cached"] > 0
    assert ours["num_computed"] > ran("radixkv", model, blocks=150)["num_computed"], "no draft was rejected"


def test_two_tensor_parallel_workers(model: str) -> None:
    stock = ran("stock", model, blocks=150)
    ours = ran("radixkv", model, blocks=150, settings={"tensor_parallel_size": 2})
    assert ours["outputs"] == stock["outputs"]
    assert ours["cached"] >= stock["cached"] > 0
    nothing_is_left(ours)


def test_adapters_share_nothing(
    model: str, made: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with each other, nor under another's name, nor after a reload in place under the same name."""
    folders = [made("adapter", model) for _ in range(2)]
    monkeypatch.setenv("ADAPTERS", os.pathsep.join(folders))
    settings = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    stock, ours = (
        ran(cache, model, workload="adapters", settings=settings) for cache in ("stock", "radixkv")
    )
    assert ours["outputs"] == stock["outputs"]
    plain, first, second, *again, renamed, reloaded = ours["outputs"]
    assert plain != first != second != plain
    assert (again, renamed, reloaded) == ([plain, first, second], first, second)
    assert ours["cached"] == [0, 0, 0, 499, 499, 499, 0, 0]
    nothing_is_left(ours)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("mamba", "MambaSpec"),
        ("sinks", "SinkFullAttentionSpec"),
        ("hybrid", "2 (FullAttentionSpec, SlidingWindowSpec)"),
        ("none", "0 (none)"),
        ("narrow", "max_model_len=2048 is not allowed; allowed: at most the tokens of all blocks: 1248"),
        ("encoder", "an encoder-decoder model"),
        ("context", "context parallelism"),
        ("version", "vllm='0.99.0'"),
        (
            "connector",
            "kv_connector='OffloadingConnector' is not allowed; allowed: none below `radixkv serve`",
        ),
        ("tails", "RADIXKV_TAILS='2' is not allowed; allowed: 0 or 1"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_at_the_start(what: str, reason: str) -> None:
    said = _said(what)
    assert said.startswith("ConfigError") and reason in said


def test_the_scheduler_is_asynchronous_where_vllm_s_own_would_be() -> None:
    assert _said("classes").split() == ["Scheduler", "AsyncScheduler"]


def _said(what: str) -> str:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "policies")))
    done = subprocess.run(
        [os.environ["RADIXKV_VLLM"], str(REFUSALS), what],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    return done.stdout


def test_switched_off_vllm_is_as_it_was(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_OFF", "1")
    settings = {"scheduler_cls": "radixkv.engines.vllm.Scheduler"}
    off = ran("stock", model, settings=settings)
    monkeypatch.delenv("RADIXKV_OFF")
    stock = ran("stock", model)
    same = ("outputs", "cached", "num_computed", "num_steps")
    assert [off[each] for each in same] == [stock[each] for each in same]
