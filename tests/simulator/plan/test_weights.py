"""Bytes of weights: from the files, computed, quantised, and on parallel GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.simulator.plan.planner import describe
from radixkv.simulator.plan.reading import Fields
from radixkv.simulator.plan.weights import Matrix, Quantisation, parameters, share_of_a_gpu, total_bytes
from tests.simulator.plan.models import LLAMA, PUBLISHED, model, published, write_config, write_tensors


def _tensors(**dtypes: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """The tensors of the small Llama, by what their names contain in another dtype."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (128, 64),
        "lm_head": (128, 64),
        "model.norm": (64,),
    }
    for layer in range(3):
        for name, shape in {
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (32, 64),
            "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64),
            "mlp.gate_proj": (96, 64),
            "mlp.up_proj": (96, 64),
            "mlp.down_proj": (64, 96),
            "input_layernorm": (64,),
            "post_attention_layernorm": (64,),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    bits = {"BF16": 16, "F32": 32, "F8_E4M3": 8}
    found = {}
    for name, shape in shapes.items():
        dtype = next((each for part, each in dtypes.items() if part in name), "BF16")
        found[f"{name}.weight"] = dtype, shape, bits[dtype]
    return found


def test_the_files_and_the_config_agree(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", LLAMA)
    computed = describe(str(folder))
    write_tensors(folder / "model.safetensors", _tensors())
    exact = describe(str(folder))
    assert (computed.source, exact.source) == ("config", "safetensors")
    assert computed.weights_bytes == exact.weights_bytes == 2 * model().num_parameters
    assert describe(str(folder), weights_bytes=7).weights_bytes == 7


def test_files_are_loaded_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", LLAMA)
    write_tensors(folder / "model.safetensors", _tensors(norm="F32"))
    assert describe(str(folder)).weights_bytes == 2 * model().num_parameters
    assert describe(str(folder), "float32").weights_bytes == 4 * model().num_parameters
    with pytest.raises(
        ConfigError, match="--dtype='fp8' is not allowed; allowed: one of float32, bfloat16, float16"
    ):
        describe(str(folder), "fp8")


def test_quantised_tensors_stay_as_they_are(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", {**LLAMA, "quantization_config": {"quant_method": "bitsandbytes"}})
    write_tensors(folder / "model.safetensors", _tensors(mlp="F8_E4M3"))
    of_mlps = 3 * 3 * 64 * 96
    found = describe(str(folder))
    assert found.weights_bytes == 2 * (model().num_parameters - of_mlps) + of_mlps
    assert found.quantisation == "bitsandbytes"


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", LLAMA)
    further = {
        "model.layers.3.eh_proj.weight": ("BF16", (64, 128), 16),
        "mtp.fc.weight": ("BF16", (2, 3), 16),
    }
    write_tensors(folder / "model.safetensors", {**_tensors(), **further})
    found = describe(str(folder))
    assert found.weights_bytes == 2 * model().num_parameters
    assert found.left_out_bytes == 2 * (64 * 128 + 6)


def test_a_tower_needs_its_files(tmp_path: Path) -> None:
    text = {**LLAMA, "sliding_window": None, "model_type": "mistral"}
    config = {"model_type": "mistral3", "text_config": text, "vision_config": {"depth": 1}}
    folder = write_config(tmp_path / "m", config)
    with pytest.raises(ConfigError, match=r"vision_config.* is not allowed.*or --weights"):
        describe(str(folder))
    assert describe(str(folder), weights_bytes=10).weights_bytes == 10
    write_tensors(folder / "model.safetensors", {"vision_tower.x": ("BF16", (5,), 16)})
    assert describe(str(folder)).weights_bytes == 10


def test_an_unknown_type_is_certain_if_the_files_show_it(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", {**LLAMA, "model_type": "newest"})
    with pytest.raises(ConfigError, match="model_type='newest' is not allowed"):
        describe(str(folder))
    write_tensors(folder / "model.safetensors", _tensors())
    found = describe(str(folder))
    assert found.model.layers == model().layers and found.weights_bytes == 2 * model().num_parameters


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        ({"sliding_window": 128}, _tensors()),
        ({"num_hidden_layers": 4}, _tensors()),
        ({"num_key_value_heads": 4}, _tensors()),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, _tensors()),
        ({}, _tensors(k_proj="F8_E4M3")),
        ({}, {name: each for name, each in _tensors().items() if "1.self_attn.v_proj" not in name}),
    ],
)
def test_an_unknown_type_is_refused_if_the_files_do_not_show_it(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], int]]
) -> None:
    folder = write_config(tmp_path / "m", {**LLAMA, "model_type": "newest", **config})
    write_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"model_type='newest'|sliding_window=128|layer_types"):
        describe(str(folder))


# --- quantised


def _quantised(name: str, **config: Any) -> float:
    """Return the bytes of a published model's weights, quantised."""
    fields = Fields(Path("config.json"), config)
    return total_bytes(published(name).matrices, published(name).dtype, Quantisation(fields))


GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
KIMI = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config", "num_bytes"),
    [
        # arXiv 2508.10925, table 1: checkpoints of 60.8 and 12.8 GiB
        ("gpt-oss-120b", GPT_OSS, 60.8 * 2**30),
        ("gpt-oss-20b", GPT_OSS, 12.8 * 2**30),
        # the files have 688.6 GB with the layer that predicts further tokens, which has about 15.6
        ("DeepSeek-V3", {"quant_method": "fp8", "weight_block_size": [128, 128]}, 673e9),
        # the model card: 594 GB
        ("Kimi-K2", KIMI, 594e9),
    ],
)
def test_published_sizes_of_quantised_models(name: str, config: dict[str, Any], num_bytes: float) -> None:
    assert _quantised(name, **config) == pytest.approx(num_bytes, rel=0.01)


ONE = Matrix("mlp.up_proj", 256, 100, (0, 1), is_linear=True)
PLAIN = Matrix("mlp.gate", 256, 1, (0, 1))


@pytest.mark.parametrize(
    ("config", "of_one"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 25_600 + 4 * 2 * 1),
        ({"quant_method": "fp8"}, 25_600 + 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 12_800 + 2 * 100 * 2 + 2 * 100 // 2),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            12_800 + 2 * 100 * 2 + 2 * 100 // 2 + 256 * 4,
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 25_600 + 100 * 3 + 256 * 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 12_800 + 16 * 100 + 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 25_600 + 8),
        (KIMI, 12_800 + 8 * 100 * 2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["mlp"]}, 51_200),
    ],
)
def test_bytes_of_a_matrix(config: dict[str, Any], of_one: int) -> None:
    config = {name: each for name, each in config.items() if name != "ignore"}
    quantisation = Quantisation(Fields(Path("config.json"), config))
    assert quantisation.total_bytes(ONE, "bfloat16") == 2 * of_one
    assert quantisation.total_bytes(PLAIN, "bfloat16") == 2 * 512


def test_single_layers_may_be_left_out() -> None:
    names = ["model.layers.1.mlp.up_proj", "lm_head"]
    config = {"quant_method": "fp8", "modules_to_not_convert": names}
    assert Quantisation(Fields(Path("c"), config)).total_bytes(ONE, "bfloat16") == 25_604 + 51_200


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "quant_method is not set"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not allowed; allowed: one of fp8, mxfp4"),
        ({"quant_method": "awq", "bits": 1, "group_size": 128}, "bits=1"),
        ({"quant_method": "awq", "bits": 4}, "group_size is not set"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo='W4A8'"),
        ({"quant_method": "compressed-tensors"}, "config_groups is not set"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:(a+)+$"], **{
            "config_groups": KIMI["config_groups"]}}, "simple patterns"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:" + ".*" * 5]}, "simple patterns"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:*"]}, "simple patterns"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["*a"] * 65}, "at most 64 patterns"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Quantisation(Fields(Path("config.json"), config))
    assert named in str(refused.value)


# --- parallel


def test_parallel_gpus_copy_what_they_cannot_divide() -> None:
    linear = Matrix("q", 8, 8, (0,), is_linear=True, split="split")
    heads = Matrix("k", 8, 8, (0,), is_linear=True, split="heads")
    copied = Matrix("norm", 64, 1, (0,))
    assert share_of_a_gpu([linear], 4, 8) == 1 / 4
    assert share_of_a_gpu([heads], 4, 2) == 1 / 2
    assert share_of_a_gpu([copied], 4, 8) == 1
    assert share_of_a_gpu([linear, heads, copied], 4, 2) == pytest.approx((1 / 4 + 1 / 2 + 1) / 3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_gpus_together_have_the_whole_model_and_little_more(name: str) -> None:
    found = published(name)
    share = share_of_a_gpu(found.matrices, 2, found.num_kv_heads)
    assert 1 / 2 <= share < 0.53
    assert parameters(found.matrices) == found.num_parameters
