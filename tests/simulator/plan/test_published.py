"""Plans beside published figures: parameters and KV a token of models that everybody can look up."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from radixkv.errors import ConfigError
from radixkv.simulator.plan.families import KNOWN, model_of
from radixkv.simulator.plan.kv import Kept
from radixkv.simulator.plan.reading import Fields
from radixkv.sizes import GIB
from tests.simulator.plan.models import LLAMA, PUBLISHED, published

KIB: Final = 1 << 10


def test_there_are_models_of_twenty_families() -> None:
    assert len({each["config"]["model_type"] for each in PUBLISHED.values()}) >= 20
    assert all(each["source"] for each in PUBLISHED.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_within_a_percent(name: str) -> None:
    assert published(name).num_parameters == pytest.approx(PUBLISHED[name]["parameters"], rel=0.01)


@pytest.mark.parametrize("name", [name for name, each in PUBLISHED.items() if "active_parameters" in each])
def test_active_parameters(name: str) -> None:
    """They are published with two digits, and some leave out the embeddings."""
    found, given = published(name).num_active_parameters, PUBLISHED[name]["active_parameters"]
    assert found == pytest.approx(given, rel=0.03)


@pytest.mark.parametrize("name", PUBLISHED)
def test_kv_of_a_token_and_states_of_a_request(name: str) -> None:
    model, given = published(name), PUBLISHED[name]
    kept = Kept(model.layers, model.states, model.dtype, 1, 16)
    assert kept.token_bytes == given["kv_bytes_per_token"]
    assert kept.state_bytes == given.get("state_bytes_per_request", 0)


@pytest.mark.parametrize(
    ("name", "kib", "block_mib", "of_4k_gib", "of_128k_gib"),
    [
        ("Llama-2-7B", 512, 8, 2, 64),
        ("Llama-2-13B", 800, 12.5, 3.125, 100),
        ("Llama-3.1-8B", 128, 2, 0.5, 16),
        ("Mistral-7B-v0.1", 128, 2, 0.5, None),
        ("Llama-3.1-70B", 320, 5, 1.25, 40),
        ("Llama-3.1-405B", 504, 7.875, 1.96875, 63),
        ("Qwen2.5-7B", 56, 0.875, 0.21875, 7),
        ("DeepSeek-V3", 68.625, 1.072265625, 0.26806640625, 8.578125),
    ],
)
def test_tables_of_memory(
    name: str, kib: float, block_mib: float, of_4k_gib: float, of_128k_gib: float | None
) -> None:
    """In 16 bits: a token, a block of 16 tokens, requests of 4 Ki and of 128 Ki tokens."""
    model = published(name)
    kept = Kept(model.layers, (), "float16", 1, 16)
    assert kept.token_bytes == kib * KIB
    assert kept.block_bytes == block_mib * KIB**2
    assert kept.request_bytes(4 * KIB, 1) == of_4k_gib * GIB
    if of_128k_gib is not None:
        assert kept.request_bytes(128 * KIB, 1) == of_128k_gib * GIB


def test_what_is_often_said_wrongly() -> None:
    """Query heads counted as KV heads, blocks in KB, and requests that don't fit by far."""
    kept = Kept(published("Llama-3.1-70B").layers, (), "bfloat16", 1, 16)
    assert kept.num_requests(35 * 10**9, 5_000, 1) == 21
    assert kept.num_requests(45 * 10**9, 700, 1) == 195
    assert 45 * 10**9 // kept.block_bytes == 8_583
    seven = Kept(published("Llama-2-7B").layers, (), "float16", 1, 16)
    assert 50 * GIB // seven.block_bytes == 6_400


def test_jambas_table_of_256_ki_tokens() -> None:
    """KV of 256 Ki tokens: 128, 32, 32 and 4 GB (arXiv 2403.19887, table 1)."""
    for name, gib in (("Llama-2-7B", 128), ("Mixtral-8x7B", 32), ("Jamba-v0.1", 4)):
        kept = Kept(published(name).layers, (), "bfloat16", 1, 16)
        assert kept.request_bytes(256 * KIB, 1) == gib * GIB


@pytest.mark.parametrize("kind", ["gemma3", "llama4", "mistral3", "qwen3_vl"])
def test_a_text_model_inside_another(kind: str) -> None:
    inside = {name: each for name, each in LLAMA.items() if name not in ("model_type", "torch_dtype")}
    inside |= {
        "sliding_window": None,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
    }
    config = {
        "model_type": kind,
        "torch_dtype": "bfloat16",
        "text_config": inside,
        "vision_config": {"depth": 2},
    }
    found = model_of(Fields(Path("config.json"), config))
    assert found.layers[0].token_bytes("bfloat16") == 2 * 3 * 2 * 16 * 2
    assert found.left_out == ("vision_config",)


def test_qwen3_5_has_its_layers_inside_text_config() -> None:
    text = {
        **PUBLISHED["Qwen3-Next-80B-A3B"]["config"],
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 60,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "vocab_size": 248_320,
        "mamba_ssm_dtype": "float32",
    }
    found = model_of(Fields(Path("config.json"), {"model_type": "qwen3_5_moe", "text_config": text}))
    assert found.num_parameters == pytest.approx(397e9, rel=0.01)
    kept = Kept(found.layers, found.states, "bfloat16", 1, 16)
    assert kept.token_bytes == 2 * 15 * 2 * 256 * 2
    assert kept.state_bytes == 45 * (3 * (2 * 16 * 128 + 64 * 128) * 2 + 64 * 128 * 128 * 4)


def test_gemma_3_leaves_out_what_is_usual() -> None:
    """The text_config of Gemma 3 12B, as it is published."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {}}
    found = model_of(Fields(Path("config.json"), config))
    assert [(each.num_layers, each.window) for each in found.layers] == [(8, None), (40, 1024)]
    assert sum(each.token_bytes("bfloat16") for each in found.layers) == 2 * 48 * 8 * 256 * 2
    assert found.num_parameters == pytest.approx(11.77e9, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("mistral", "num_key_value_heads"),
        ("qwen3", "head_dim"),
        ("gemma2", "head_dim"),
        ("glm4_moe", "num_key_value_heads"),
    ],
)
def test_heads_that_a_family_does_not_compute_must_be_there(kind: str, name: str) -> None:
    config = {**LLAMA, "model_type": kind, "head_dim": 16, "sliding_window": None}
    del config[name]
    with pytest.raises(ConfigError, match=f"{name} is not set; allowed: an integer, for a {kind}"):
        model_of(Fields(Path("config.json"), config))


def test_a_missing_window_is_not_the_same_as_none() -> None:
    """Mistral 7B says null since version 0.2. A config that says nothing has the window of 4,096 tokens."""
    config = {**LLAMA, "model_type": "mistral"}
    assert model_of(Fields(Path("c"), config)).layers[0].window == 4_096
    assert model_of(Fields(Path("c"), {**config, "sliding_window": None})).layers[0].window is None


def test_every_known_type_has_a_model_or_is_inside_one() -> None:
    shown = {each["config"]["model_type"] for each in PUBLISHED.values()}
    assert shown <= set(KNOWN)


def test_an_unknown_type_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="model_type='retnet' is not allowed; allowed: one of bamba, "):
        model_of(Fields(Path("config.json"), {**LLAMA, "model_type": "retnet"}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 1024),
        ("kv_lora_rank", 512),
        ("index_head_dim", 128),
        ("attention_chunk_size", 8192),
        ("compress_ratios", [4, 128]),
        ("num_kv_shared_layers", 10),
        ("linear_num_key_heads", 16),
        ("mamba_d_state", 128),
        ("block_configs", [{"attention": {}}]),
    ],
)
def test_fields_that_change_what_a_llama_keeps_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {name}.*is not allowed.*changes what a llama keeps"):
        model_of(Fields(Path("config.json"), {**LLAMA, name: value}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size is not set"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"hidden_size": 65}, "hidden_size=65"),
        ({"hidden_size": -4}, "hidden_size=-4"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"vocab_size": 1e5}, "vocab_size=100000.0"),
        ({"torch_dtype": "int4"}, "dtype='int4'|torch_dtype='int4'"),
        ({"torch_dtype": None}, "dtype is not set"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"layer_types": ["full_attention", "full_attention", "cross_attention"]}, "cross_attention"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
    ],
)
def test_invalid_fields_are_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        model_of(Fields(Path("config.json"), {**LLAMA, **changes}))
