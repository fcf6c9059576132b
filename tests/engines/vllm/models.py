"""Folders of small models of several kinds, whose outputs depend on the whole context. Run with the Python of vLLM.

vllm_models.py KIND FOLDER [MODEL]. Kinds: ``mla`` (DeepSeek V2), ``windows`` (Mistral, a window in every layer),
``mixed`` (Gemma 2, every second layer with a window), ``eagle`` (an EAGLE head that drafts for the Llama in MODEL, made
of its first layer), ``adapter`` (a LoRA adapter for the Llama in MODEL; FOLDER's name is its seed).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 200


def made(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "mla":
        config: Any = DeepseekV2Config(
            **COMMON,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=2,
            n_routed_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=64,
        )
        model: Any = DeepseekV2ForCausalLM(config)
    elif kind == "windows":
        model = MistralForCausalLM(
            MistralConfig(**COMMON, num_key_value_heads=2, head_dim=64, sliding_window=WINDOW)
        )
    else:
        model = Gemma2ForCausalLM(
            Gemma2Config(
                **COMMON, num_key_value_heads=2, head_dim=64, sliding_window=WINDOW, query_pre_attn_scalar=64
            )
        )
    # Gemma multiplies embeddings by the root of their width, and its output layer is the embeddings.
    embedding = 0.02 if kind == "mixed" else 1.0
    model = model.float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                gain = 3.0 if "q_" in name or "k_proj" in name or "kv_a" in name else 1.5
                weights.normal_(0, embedding if "embed" in name else gain / weights.shape[1] ** 0.5)
    return model


def depends_on_its_context(model: Any) -> bool:
    """Whether other tokens in any one of five blocks of 32, within the window, change most of the next 12 tokens."""
    ids = torch.randint(3, 2048, (1, 320), generator=torch.Generator().manual_seed(1))
    variants = ids.repeat(6, 1)
    for at in range(1, 6):
        variants[at, 128 + 32 * at : 160 + 32 * at] += 1
    new = model.generate(variants.clamp(max=2047), max_new_tokens=12, do_sample=False)[:, 320:]
    return bool(((new[1:] != new[0]).sum(1) > 6).all())


def save_eagle(folder: Path, model: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name.removeprefix("model."): each
        for name, each in load_file(model / "model.safetensors").items()
        if "layers.0." in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.eye(config["hidden_size"]).repeat(1, 2)
    save_file(weights, folder / "model.safetensors")


def save_adapter(folder: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    size, layers, rank = config["hidden_size"], config["num_hidden_layers"], 8
    dice = torch.Generator().manual_seed(sum(folder.name.encode()))
    weights = {}
    for at in range(layers):
        name = f"base_model.model.model.layers.{at}.self_attn.o_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, size, generator=dice) / size**0.5
        weights[f"{name}.lora_B.weight"] = torch.randn(size, rank, generator=dice)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["o_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    if sys.argv[1] == "eagle":
        save_eagle(Path(sys.argv[2]), Path(sys.argv[3]))
        sys.exit()
    if sys.argv[1] == "adapter":
        save_adapter(Path(sys.argv[2]), Path(sys.argv[3]))
        sys.exit()
    found = made(sys.argv[1])
    if not depends_on_its_context(found):
        sys.exit(f"the outputs of {sys.argv[1]} ignore the context")
    found.save_pretrained(sys.argv[2])
