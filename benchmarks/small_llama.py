"""The model that engines load to be measured without one: it is as small as they allow."""

from __future__ import annotations

from typing import Final

CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": 8_192,
    "torch_dtype": "float32",
}
