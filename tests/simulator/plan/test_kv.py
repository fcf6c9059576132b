"""KV of tokens and states of requests: dtypes, parallel GPUs, windows, and vLLM's arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import ConfigError
from radixkv.simulator.plan.kv import KV_DTYPES, Attention, IndexKeys, Kept, Latent, State, dtypes_for
from tests.simulator.plan.models import model, published

GQA = Attention(32, 8, 128, 128)


@pytest.mark.parametrize(
    ("dtype", "of_a_vector"),
    [
        ("float32", 512),
        ("bfloat16", 256),
        ("float16", 256),
        ("fp8", 128),
        ("fp8_per_token_head", 128 + 4),
        ("int8_per_token_head", 128 + 4),
        ("nvfp4", 64 + 8),
    ],
)
def test_dtypes(dtype: str, of_a_vector: int) -> None:
    assert GQA.token_bytes(dtype) == 32 * 8 * 2 * of_a_vector


def test_a_page_with_scales_is_as_large_as_in_vllm() -> None:
    """vLLM adds two float32 a token and head to a page of 16 tokens of one layer."""
    one = Attention(1, 8, 128, 128)
    page = Kept((one,), (), "int8_per_token_head", 1, 16).block_bytes
    assert page == 2 * 16 * 8 * 128 + 2 * 16 * 8 * 4


def test_latents() -> None:
    """656 bytes is a token of sparse latent attention in fp8: 512, four float32, and 64 values of 16 bits."""
    assert Latent(1, 512, 64).token_bytes("bfloat16") == 1_152
    assert Latent(1, 512, 64).token_bytes("fp8") == 576
    assert Latent(1, 512, 64, is_sparse=True).token_bytes("fp8") == 656
    assert IndexKeys(1, 128).token_bytes("bfloat16") == IndexKeys(1, 128).token_bytes("fp8") == 132
    assert published("DeepSeek-V3.2-Exp").layers == (Latent(61, 512, 64, is_sparse=True), IndexKeys(61, 128))


def test_dtypes_that_some_layers_cannot_have_are_refused() -> None:
    assert dtypes_for([GQA]) == KV_DTYPES
    assert dtypes_for([Latent(1, 512, 64)]) == ("float32", "bfloat16", "float16", "fp8")
    assert "nvfp4" not in dtypes_for([Attention(1, 1, 72, 72)])
    with pytest.raises(ConfigError, match=r"--kv-dtype='nvfp4' is not allowed.*latent"):
        Latent(1, 512, 64).token_bytes("nvfp4")
    with pytest.raises(ConfigError, match="--kv-dtype='fp3' is not allowed; allowed: one of float32, "):
        GQA.token_bytes("fp3")


def test_gpus_divide_heads_and_copy_the_last_one() -> None:
    assert [GQA.token_bytes("bfloat16", gpus) // GQA.token_bytes("bfloat16", 8) for gpus in (1, 2, 4, 8, 16)] == [
        8, 4, 2, 1, 1,
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match="--gpus=3 is not allowed; allowed: a divisor or a multiple of the 8 KV"
    ):
        GQA.token_bytes("bfloat16", 3)
    latent = Latent(61, 512, 64)
    assert latent.token_bytes("bfloat16", 8) == latent.token_bytes("bfloat16", 1)


def test_states_on_parallel_gpus_are_as_large_as_in_vllm() -> None:
    """Mamba-2 with one group: each GPU keeps the whole group, and its part of the rest."""
    state = State(36, "Mamba-2", 3 * 8192, 8192 * 128, "bfloat16", "bfloat16", 128, 1, 3 * 2 * 128)
    assert state.request_bytes(1) == 36 * (3 * (8192 + 2 * 128) + 128 * 64 * 128) * 2
    # vLLM: n_groups 1 becomes 4 for 4 GPUs, and the conv's channels are divided then
    assert state.request_bytes(4) == 36 * (3 * (8192 + 2 * 4 * 128) // 4 + 32 * 64 * 128) * 2
    with pytest.raises(ConfigError, match="--gpus=3 is not allowed; allowed: a divisor of the 128 heads"):
        state.request_bytes(3)


def test_windows_bound_what_a_request_keeps() -> None:
    kept = Kept((Attention(2, 1, 4, 4), Attention(4, 1, 4, 4, window=128)), (), "fp8", 1, 16)
    full, windowed = 2 * 8, 4 * 8
    assert kept.token_bytes == full + windowed
    assert kept.token_bytes_beyond_windows == full
    assert kept.request_bytes(64, 1) == 64 * (full + windowed)
    assert kept.request_bytes(10_000, 1) == 10_000 * full + (128 + 16) * windowed
    # as vLLM: cdiv(window - 1 + tokens of a step, 16) + 1 blocks
    assert kept.request_bytes(10_000, 1_000) == 10_000 * full + (71 + 1) * 16 * windowed


def test_a_request_takes_whole_blocks() -> None:
    kept = Kept((GQA,), (), "bfloat16", 1, 16)
    assert kept.request_bytes(1, 1) == kept.request_bytes(16, 1) == kept.block_bytes
    assert kept.request_bytes(17, 1) == 2 * kept.block_bytes


@given(st.integers(1, 10_000), st.integers(1, 512), st.integers(1, 4_096), st.integers(1, 64))
def test_a_window_never_costs_more_than_no_window(tokens: int, step: int, window: int, size: int) -> None:
    with_window = Kept((Attention(3, 2, 8, 8, window),), (), "fp8", 1, size)
    without = Kept((Attention(3, 2, 8, 8),), (), "fp8", 1, size)
    assert 0 < with_window.request_bytes(tokens, step) <= without.request_bytes(tokens, step)
    assert with_window.request_bytes(tokens, step) <= with_window.request_bytes(tokens + 1, step)


def test_which_layers_have_windows() -> None:
    def windows(name: str) -> list[tuple[int, int | None]]:
        return [(each.num_layers, each.window) for each in published(name).layers]

    assert windows("Gemma-2-9B") == [(21, None), (21, 4096)]
    assert windows("Gemma-3-1B") == [(4, None), (22, 512)]
    assert windows("gpt-oss-20b") == [(12, None), (12, 128)]
    assert windows("Mistral-7B-v0.1") == [(32, 4096)]
    assert windows("Qwen2.5-7B") == [(28, None)]
    qwen = model(model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    assert [(each.num_layers, each.window) for each in qwen.layers] == [(1, None), (2, 64)]


def test_formulas_are_shown() -> None:
    assert GQA.formula("bfloat16") == "2 × 32 layers × 8 KV heads × 128 × 2 bytes"
    assert Latent(61, 512, 64).formula("bfloat16") == "61 layers × (512 + 64) × 2 bytes"
    assert Latent(61, 512, 64, True).formula("fp8") == "61 layers × (512 + 16 of scales + 2 × 64)"
    assert IndexKeys(61, 128).formula("fp8") == "61 layers × (128 + 4 of scales), FP8"
    (state,) = published("Kimi-Linear-48B-A3B").states
    assert state.formula() == "20 layers × (36,864 × 2 bytes + 524,288 × 4 bytes)"
