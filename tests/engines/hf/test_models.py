"""The demo model, local directories, layouts and fingerprints."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from radixkv.config import CacheConfig, KVLayout
from radixkv.engines.hf.engine import HFEngine, demo_model, fingerprint, layout_of, load_model
from radixkv.errors import ConfigError
from radixkv.index.cache import PrefixCache
from tests.engines.support import VOCAB, engine_over, model_of, prompt_of, stock

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


# --- the demo model


def weights_digest(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_demo_weights_are_the_same_everywhere() -> None:
    tiny = demo_model(7, 64, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=24)
    assert weights_digest(tiny) == "f06df98ed0daafd85df06960beb70398c7c14e2ad7a806f7c9e1f5638166636e"


@pytest.mark.slow
def test_demo_model_has_its_documented_layout() -> None:
    before = torch.random.get_rng_state()
    model = demo_model()
    assert torch.random.get_rng_state().equal(before)
    assert layout_of(model) == KVLayout(num_layers=6, num_kv_heads=2, head_dim=64, dtype="float32")
    assert model.config.max_position_embeddings >= 8192
    assert model.config.vocab_size == 8000
    assert not model.training
    assert weights_digest(demo_model()) == weights_digest(model)
    assert weights_digest(demo_model(seed=1)) != weights_digest(model)


def test_demo_model_serves_its_whole_context() -> None:
    model = demo_model(0, 64, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=24)
    cache = PrefixCache(CacheConfig(num_blocks=512, layout=layout_of(model)))
    engine = HFEngine(model, cache)
    assert engine.max_model_len == 8192
    prompt = torch.randint(3, 64, (8190,), generator=torch.Generator().manual_seed(0)).tolist()
    cold = engine.generate(engine.namespace("acme"), prompt, 2, eos_token_id=-1)
    warm = engine.generate(engine.namespace("acme"), prompt, 2, eos_token_id=-1)
    assert warm.num_cached_tokens == [8176]
    assert warm.token_ids == cold.token_ids


# --- fingerprints


def changed(model: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    twin = copy.deepcopy(model)
    for name, value in settings.items():
        setattr(twin.config, name, value)
    return twin


def test_fingerprint_is_stable() -> None:
    assert fingerprint(model_of(), "abc", 16) == fingerprint(copy.deepcopy(model_of()), "abc", 16)
    assert fingerprint(model_of(), "abc", 16).startswith("fp:")
    assert len(fingerprint(model_of(), "abc", 16)) == 3 + 64


def test_each_ingredient_changes_the_fingerprint() -> None:
    model = model_of()
    other_weight = copy.deepcopy(model)
    with torch.no_grad():
        other_weight.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4].mul_(1 + 1e-6)
    other_theta = {**model.config.rope_parameters, "rope_theta": 12345.0}
    variants = {
        "base": fingerprint(model, "abc", 16),
        "weight": fingerprint(other_weight, "abc", 16),
        "tokenizer": fingerprint(model, "abd", 16),
        "block size": fingerprint(model, "abc", 8),
        "dtype": fingerprint(copy.deepcopy(model).to(torch.float64), "abc", 16),
        "rope": fingerprint(changed(model, rope_parameters=other_theta), "abc", 16),
        "norm": fingerprint(changed(model, rms_norm_eps=1e-3), "abc", 16),
        "architecture": fingerprint(model_of("qwen2"), "abc", 16),
    }
    assert len(set(variants.values())) == len(variants)


def test_fields_of_the_fingerprint_are_framed() -> None:
    assert fingerprint(model_of(), "abc1", 6) != fingerprint(model_of(), "abc", 16)


def test_a_loaded_model_has_the_same_fingerprint(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "a")
    loaded = load_model(str(tmp_path / "a"))
    assert fingerprint(loaded, "abc", 16) == fingerprint(model_of(), "abc", 16)


# --- models that can't be served


REFUSED: dict[str, tuple[Any, str]] = {
    "sliding window": (
        lambda: MistralForCausalLM(MistralConfig(**TINY, num_key_value_heads=2, sliding_window=8)),
        "full attention in every layer: it has sliding_attention",
    ),
    "alternating windows": (
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**TINY, num_key_value_heads=2, head_dim=8)),
        "full attention in every layer: it has sliding_attention",
    ),
    "hybrid": (
        lambda: JambaForCausalLM(
            JambaConfig(**TINY, num_key_value_heads=2, num_experts=2, use_mamba_kernels=False)
        ),
        "attention in every layer",
    ),
    "recurrent": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)),
        "a recurrent state",
    ),
    "latent attention": (
        lambda: DeepseekV3ForCausalLM(
            DeepseekV3Config(**TINY, q_lora_rank=8, kv_lora_rank=8, n_routed_experts=4, num_experts_per_tok=1)
        ),
        "multi-head latent attention",
    ),
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, d_kv=4, num_layers=1)
        ),
        "a decoder-only model",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_served_are_refused(kind: str) -> None:
    build, reason = REFUSED[kind]
    with pytest.raises(ConfigError, match=reason):
        layout_of(build().eval())


def test_layout_of_other_architectures() -> None:
    assert layout_of(model_of("gpt2")) == KVLayout(2, 4, 8, "float32")
    assert layout_of(model_of("falcon")) == KVLayout(2, 1, 8, "float32")
    assert layout_of(copy.deepcopy(model_of()).to(torch.bfloat16)).dtype == "bfloat16"


def test_a_model_with_rescaled_rope_is_limited_to_the_original_length() -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 128,
    }
    config = Phi3Config(
        **TINY,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        sliding_window=None,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters=rope,
    )
    with engine_over(Phi3ForCausalLM(config).eval()) as engine:
        assert engine.max_model_len == 128


# --- local directories


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt_neox"])
def test_a_saved_model_is_loaded_and_served(architecture: str, tmp_path: Path) -> None:
    model_of(architecture).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert not loaded.training
    prompt = prompt_of(20)
    with engine_over(loaded) as engine:
        made = engine.generate(engine.namespace("acme"), prompt, 8)
        assert made.token_ids == stock(model_of(architecture), [prompt], 8)


def test_the_models_own_settings_are_used(tmp_path: Path) -> None:
    """The engine uses the end-of-sequence ids and processors of the model's generation config, but runs the loop
    itself.
    """
    model = copy.deepcopy(model_of())
    prompt = prompt_of(12)
    (free_running,) = stock(model, [prompt], 12, eos=None, repetition_penalty=5.0)
    model.generation_config.eos_token_id = [free_running[4], 2]
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_length = 30
    model.generation_config.prompt_lookup_num_tokens = 3
    model.generation_config.penalty_alpha = 0.6
    model.generation_config.num_beam_groups = 2
    model.generation_config.cache_implementation = "static"
    model.save_pretrained(tmp_path)
    with engine_over(load_model(str(tmp_path))) as engine:
        assert engine.eos_token_ids == {free_running[4], 2}
        made = engine.generate(engine.namespace("acme"), prompt, 12)
        assert made.token_ids == [free_running[:5]]
        never = engine.generate(engine.namespace("acme"), prompt, 12, eos_token_id=-1)
        assert never.token_ids == [free_running]


def test_an_end_of_sequence_id_that_does_not_exist_is_ignored() -> None:
    model = copy.deepcopy(model_of())
    model.generation_config.eos_token_id = [VOCAB + 5]
    prompt = prompt_of(12)
    with engine_over(model) as engine:
        assert engine.eos_token_ids == frozenset()
        made = engine.generate(engine.namespace("acme"), prompt, 5)
        assert made.token_ids == stock(model, [prompt], 5, eos=None)


@pytest.mark.slow
def test_half_precision(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="bfloat16")
    with engine_over(loaded) as engine:
        ns = engine.namespace("acme")
        first = engine.generate(ns, prompt_of(20), 8, num_beams=2)
        assert engine.generate(ns, prompt_of(20), 8, num_beams=2).num_cached_tokens == [16]
        assert 1 <= len(first.token_ids[0]) <= 8
        assert engine.cache.storage is not None
        assert engine.cache.storage.data.dtype == torch.bfloat16


def test_unloadable_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model("gpt2")  # the name of a model on the hub is no directory
    (tmp_path / "config.json").write_text(model_of().config.to_json_string())
    torch.save(model_of().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="dtype='int8'"):
        load_model(str(tmp_path), dtype="int8")


def test_code_in_a_directory_is_not_run(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["model_type"] = "unheard_of"
    settings["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError, match="that this transformers can load"):
        load_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_broken_files_are_named(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match="model="):
        load_model(str(tmp_path))


def test_absent_weights_are_refused(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 are absent, model\.layers\.1\.mlp\.up_proj\.weight the first"):
        load_model(str(tmp_path))


def test_a_saved_model_with_a_sliding_window_is_refused(tmp_path: Path) -> None:
    model = MistralForCausalLM(MistralConfig(**TINY, num_key_value_heads=2, sliding_window=8))
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sliding_attention"):
        load_model(str(tmp_path))


def test_the_package_of_engines_imports_nothing_heavy() -> None:
    code = "import sys, radixkv.engines; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
