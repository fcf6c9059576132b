"""From the fields of a config.json to a ``Model``: what its layers keep, and the weights that it has.

Most families are one shape, a decoder with attention and an MLP in each layer, and ``Decoder`` says how they differ:
biases, norms, windows, experts. The others have functions of their own: multi-head latent attention, sparse indexers,
and the hybrids, whose layers keep states. ``KNOWN`` lists all.

Refused by name: unknown model types, kinds of layers that a family doesn't have, and fields that change what is kept in
a family that doesn't know them (``_CHANGES``). An unknown type is served all the same if the files make it certain:
``from_tensors`` reads the shapes of the keys' and values' projections of each layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from radixkv.simulator.plan.decoders import DECODERS, decoder, falcon, gpt2, gpt_neox, llama4
from radixkv.simulator.plan.hybrids import (
    bamba,
    falcon_h1,
    granite_hybrid,
    jamba,
    kimi_linear,
    lightning,
    nemotron_h,
    qwen_hybrid,
)
from radixkv.simulator.plan.kv import Attention
from radixkv.simulator.plan.latents import latent_model
from radixkv.simulator.plan.model import FULL, Model, Parts, kinds_of, made_of, shape_of
from radixkv.simulator.plan.reading import Fields, Tensor

FAMILIES: Final[Mapping[str, Callable[[Fields], Model]]] = {
    "deepseek_v2": latent_model,
    "deepseek_v3": latent_model,
    "deepseek_v32": latent_model,
    "kimi_k2": latent_model,
    "glm4_moe_lite": latent_model,
    "glm_moe_dsa": latent_model,
    "kimi_linear": kimi_linear,
    "qwen3_next": qwen_hybrid,
    "qwen3_5": qwen_hybrid,
    "qwen3_5_text": qwen_hybrid,
    "qwen3_5_moe": qwen_hybrid,
    "qwen3_5_moe_text": qwen_hybrid,
    "minimax": lightning,
    "minimax_text_01": lightning,
    "nemotron_h": nemotron_h,
    "granitemoehybrid": granite_hybrid,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "jamba": jamba,
    "gpt2": gpt2,
    "gpt_bigcode": gpt2,
    "gpt_neox": gpt_neox,
    "falcon": falcon,
    "llama4_text": llama4,
}
"""Families with a function of their own, by model type."""

WRAPPERS: Final = {
    "gemma3": "gemma3_text", "llama4": "llama4_text", "mistral3": "mistral", "kimi_k25": "deepseek_v3",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
}  # fmt: skip
"""Models with a part for pictures or sound around a text model: the usual type of that."""

DEFAULTS: Final[Mapping[str, Mapping[str, int | bool]]] = {
    "cohere2": {"sliding_window": 4_096},
    "gemma2": {"sliding_window": 4_096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4_096,
    },
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "gpt_oss": {"sliding_window": 128},
    "llama4_text": {"attention_chunk_size": 8_192},
    "mistral": {"sliding_window": 4_096},
    "olmo3": {"sliding_window": 4_096},
    "qwen2": {"sliding_window": 4_096, "max_window_layers": 28},
    "qwen2_moe": {"sliding_window": 4_096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4_096, "max_window_layers": 28},
    "qwen3_moe": {"sliding_window": 4_096},
    "seed_oss": {"attention_bias": True},
    "smollm3": {"tie_word_embeddings": True},
    "starcoder2": {"use_bias": True},
}
"""What transformers takes for fields that a config leaves out, where configs do. A null is no such field."""

KNOWN: Final = tuple(sorted({*DECODERS, *FAMILIES, *WRAPPERS}))

_CHANGES: Final[Mapping[str, tuple[str, ...]]] = {
    "sliding_window": ("windows",),
    "attention_chunk_size": ("llama4_text",),
    "kv_lora_rank": ("latent",),
    "index_head_dim": ("latent",),
    "linear_attn_config": ("kimi_linear",),
    "compress_ratios": (),
    "num_kv_shared_layers": (),
    "cla_share_factor": (),
    "block_configs": (),
    "num_key_value_heads_per_layer": (),
    "attention_other_setting": (),
    "kv_sharing": (),
    "use_mla": ("latent",),
    "cross_attention_layers": (),
    "ssm_state_size": ("nemotron_h",),
    "mamba_d_state": ("granitemoehybrid", "bamba", "falcon_h1", "jamba"),
    "linear_num_key_heads": ("delta",),
}
"""Fields that change what layers keep, and who knows them. Other families refuse them, unless they are empty."""


def model_of(fields: Fields, dtype: str | None = None) -> Model:
    """Return the model of a config. ``dtype``: in place of its own. Raises ConfigError for what isn't known."""
    fields, left_out = _text_model(fields)
    if fields.flag("is_encoder_decoder", default=False):
        raise fields.refused("is_encoder_decoder", "false: an encoder's output is no prefix of tokens")
    kind = fields.text("model_type")
    if kind is None or (kind not in DECODERS and kind not in FAMILIES):
        raise fields.refused(
            "model_type", f"one of {', '.join(KNOWN)}; or a folder whose files make it certain"
        )
    _require_known(fields, kind)
    fields = fields.with_defaults(DEFAULTS.get(kind, {}))
    if dtype is not None:
        fields = Fields(fields.path, {"dtype": dtype}).over(fields)
    made = FAMILIES[kind](fields) if kind in FAMILIES else decoder(fields, DECODERS[kind])
    return replace(made, left_out=left_out)


def _text_model(fields: Fields) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields of the text model, and the names of the other parts."""
    others = tuple(sorted(name for name in fields if name.endswith("_config") and name in _OTHER_PARTS))
    text = fields.inner("text_config")
    if text is None:
        return fields, others
    kind = fields.text("model_type") or ""
    if "model_type" not in text:
        usual = WRAPPERS.get(kind)
        if usual is None:
            raise text.refused("model_type", f"one of {', '.join(KNOWN)}")
        text = Fields(text.path, {"model_type": usual}).over(text)
    shared = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")
    return text.over(fields.only(shared)), others


_OTHER_PARTS: Final = ("vision_config", "audio_config", "speech_config", "image_config")


def _require_known(fields: Fields, kind: str) -> None:
    """Refuse fields that change what is kept, and that this family doesn't know."""
    spec = DECODERS.get(kind)
    knows = {kind}
    knows |= {"windows"} if spec is not None and spec.windows != "none" else set()
    knows |= {"latent"} if FAMILIES.get(kind) is latent_model or kind == "kimi_linear" else set()
    knows |= {"delta"} if FAMILIES.get(kind) is qwen_hybrid else set()
    for name, families in _CHANGES.items():
        if fields.says(name) and knows.isdisjoint(families):
            if name == "sliding_window" and not fields.flag("use_sliding_window", default=True):
                continue
            raise fields.refused(name, f"nothing: it changes what a {kind} keeps, and how isn't known here")


# --- unknown types whose files make it certain

_PROJECTION: Final = re.compile(r"(?:^|\.)layers\.([0-9]{1,4})\.self_attn\.(k|v)_proj\.weight")


def from_tensors(fields: Fields, tensors: Sequence[Tensor], dtype: str | None = None) -> Model:
    """Return a model of an unknown type, of which the files show keys and values in every layer.

    Each layer needs a ``self_attn.k_proj`` and a ``v_proj`` of floating-point weights, of the shape that the config's
    heads make, and the config no field that changes what is kept. Raises ConfigError otherwise, as ``model_of``.
    """
    kind = fields.text("model_type") or ""
    _require_known(fields, kind)
    shape = shape_of(fields)
    wanted = (shape.kv_heads * shape.head_dim, shape.hidden)
    found = {
        (int(at[1]), at[2]): each.shape
        for each in tensors
        if each.dtype in ("F32", "F16", "BF16") and (at := _PROJECTION.search(each.name)) is not None
    }
    needed = {(layer, side) for layer in range(shape.num_layers) for side in "kv"}
    is_full = set(kinds_of(fields, shape.num_layers, [FULL], [FULL] * shape.num_layers)) == {FULL}
    if not is_full or set(found) != needed or set(found.values()) != {wanted}:
        others = f"one whose files have k_proj and v_proj of {list(wanted)} in each layer"
        allowed = f"one of {', '.join(KNOWN)}; or {others}"
        raise fields.refused("model_type", allowed)
    if dtype is not None:
        fields = Fields(fields.path, {"dtype": dtype}).over(fields)
    kept = [Attention(shape.num_layers, shape.kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(
        fields, shape, kept, (), Parts(), fields.optional_count("intermediate_size") or 4 * shape.hidden
    )
