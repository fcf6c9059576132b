"""Decoders with attention and an MLP, or experts, in each layer: Llama and what differs little from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from radixkv.simulator.plan.kv import Attention, KVLayers
from radixkv.simulator.plan.model import (
    CHUNKED,
    FULL,
    SLIDING,
    Flag,
    Layers,
    Model,
    Parts,
    Shape,
    flag_of,
    kinds_of,
    made_of,
    shape_of,
    where,
)
from radixkv.simulator.plan.reading import MAX_LAYERS, Fields

Windows = Literal["none", "all", "qwen", "alternate", "pattern", "chunked"]
"""Which layers have a window: none, all, those of Qwen's fields, every second one, all but each n-th, Llama 4's."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The fields of a mixture of experts, and what it has beside its experts.

    ``layers``: which layers have experts: all, those after the first ones that are dense, or those of a step.
    """

    count: str
    width: str
    active: str = "num_experts_per_tok"
    layers: Literal["all", "after", "step"] = "all"
    bias: bool = False
    router_bias: bool = False
    shared: Literal["none", "count", "width"] = "none"


@dataclass(frozen=True, slots=True)
class Decoder:
    """How a family differs from Llama.

    - ``qkv_bias``, ``out_bias``, ``mlp_bias``: biases of the projections.
    - ``norms``: norms of the hidden size in a layer. ``norm_bias``: they have biases too.
    - ``qk_norm``: norms of queries and keys: of a head, or of all heads.
    - ``tied``: the head is the embedding, if the config doesn't say.
    """

    qkv_bias: Flag = "attention_bias"
    out_bias: Flag = "attention_bias"
    mlp_bias: Flag = "mlp_bias"
    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    tied: bool = False
    windows: Windows = "none"
    experts: Experts | None = None
    pattern: int = 0
    has_sinks: bool = False
    head_bias: bool = False


def attention_kinds(fields: Fields, spec: Decoder, num_layers: int) -> tuple[list[str], int | None]:
    """Return the kind of each layer, and the window of those that have one."""
    every = range(1, num_layers + 1)
    if spec.windows == "none":
        return kinds_of(fields, num_layers, [FULL], [FULL] * num_layers), None
    if spec.windows == "chunked":
        chunk = fields.optional_count("attention_chunk_size")
        usual = [CHUNKED if number % 4 else FULL for number in every]
        found = kinds_of(fields, num_layers, [FULL, CHUNKED], usual)
        return ([FULL] * num_layers, None) if chunk is None else (found, chunk)
    window = fields.optional_count("sliding_window")
    if spec.windows == "qwen":
        first = fields.optional_count("max_window_layers", low=0) or 0
        used = fields.flag("use_sliding_window", default=False)
        usual = [SLIDING if used and number > first else FULL for number in every]
    elif spec.windows == "all":
        usual = [SLIDING] * num_layers
    else:
        step = (
            2
            if spec.windows == "alternate"
            else fields.optional_count("sliding_window_pattern") or spec.pattern
        )
        usual = [SLIDING if number % step else FULL for number in every]
    found = kinds_of(fields, num_layers, [FULL, SLIDING], usual)
    if window is None:
        if "layer_types" in fields and SLIDING in found:
            raise fields.refused("sliding_window", "the window of the layers that layer_types calls sliding")
        return [FULL] * num_layers, None
    return found, window


def decoder(fields: Fields, spec: Decoder) -> Model:
    shape = shape_of(fields)
    kinds, window = attention_kinds(fields, spec, shape.num_layers)
    every, parts = tuple(range(shape.num_layers)), Parts()
    tied = fields.flag("tie_word_embeddings", default=spec.tied)
    parts.embeddings(shape.vocab, shape.hidden, tied=tied, head_bias=spec.head_bias)
    add_attention(parts, fields, shape, every, spec)
    widest = add_mlps(parts, fields, shape, every, spec)
    parts.plain("norms", spec.norms * shape.hidden * (1 + spec.norm_bias), every)
    parts.plain("model.norm", shape.hidden * (1 + spec.norm_bias))
    groups: list[KVLayers] = []
    for kind, limit in ((FULL, None), (SLIDING, window), (CHUNKED, window)):
        if number := len(where(kinds, kind)):
            groups.append(Attention(number, shape.kv_heads, shape.head_dim, shape.head_dim, limit))
    return made_of(fields, shape, groups, (), parts, widest)


def add_attention(
    parts: Parts, fields: Fields, shape: Shape, layers: Layers, spec: Decoder, *, gate: bool = False
) -> None:
    hidden, wide, narrow = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    bias = flag_of(fields, spec.qkv_bias)
    parts.linear("self_attn.q_proj", hidden, wide * (1 + gate), layers, bias=bias)
    parts.linear("self_attn.k_proj", hidden, narrow, layers, split="heads", bias=bias)
    parts.linear("self_attn.v_proj", hidden, narrow, layers, split="heads", bias=bias)
    parts.linear("self_attn.o_proj", wide, hidden, layers, bias=flag_of(fields, spec.out_bias))
    if spec.qk_norm != "none" or fields.flag("use_qk_norm", default=False):
        parts.plain("self_attn.norms", wide + narrow if spec.qk_norm == "all" else 2 * shape.head_dim, layers)
    if spec.has_sinks:
        parts.plain("self_attn.sinks", shape.heads, layers)


def add_mlps(parts: Parts, fields: Fields, shape: Shape, layers: Layers, spec: Decoder) -> int:
    """Add the MLPs and experts of layers. Returns the widest activation."""
    moe = spec.experts
    sparse = () if moe is None else _sparse_layers(fields, moe, layers)
    dense = tuple(each for each in layers if each not in set(sparse))
    widest = 0
    if dense:
        width = fields.count("intermediate_size")
        parts.mlp("mlp", shape.hidden, width, dense, gated=spec.gated, bias=flag_of(fields, spec.mlp_bias))
        widest = width
    if moe is None or not sparse:
        return widest
    count, active, width = fields.count(moe.count), fields.count(moe.active), fields.count(moe.width)
    if active > count:
        raise fields.refused(moe.active, f"at most the {count} experts of {moe.count}")
    parts.experts(
        shape.hidden,
        width,
        sparse,
        count,
        active,
        bias=moe.bias,
        gated=spec.gated,
        router_bias=moe.router_bias,
    )
    if moe.shared == "count":
        shared = width * (fields.optional_count("n_shared_experts", "num_shared_experts", low=0) or 0)
    else:
        shared = fields.optional_count("shared_expert_intermediate_size") or 0 if moe.shared == "width" else 0
    if shared:
        parts.mlp("mlp.shared_experts", shape.hidden, shared, sparse, gated=spec.gated)
        parts.plain("mlp.shared_expert_gate", shape.hidden if moe.shared == "width" else 0, sparse)
    return max(widest, active * width + shared)


def _sparse_layers(fields: Fields, moe: Experts, layers: Layers) -> Layers:
    """Return which of the layers have experts."""
    named = fields.texts("mlp_layer_types")
    if named is not None:
        if len(named) != len(layers) or not set(named) <= {"dense", "sparse"}:
            raise fields.refused("mlp_layer_types", f"{len(layers)} times dense or sparse")
        return where(named, "sparse")
    if moe.layers == "all":
        return layers
    if moe.layers == "after":
        first = fields.count("first_k_dense_replace", low=0)
        step = fields.optional_count("moe_layer_freq") or 1
        return tuple(each for each in layers if each >= first and each % step == 0)
    step = fields.optional_count("decoder_sparse_step") or 1
    without = set(fields.counts("mlp_only_layers") or ())
    return tuple(each for each in layers if each not in without and (each + 1) % step == 0)


# --- older models, with fields of their own


def gpt2(fields: Fields) -> Model:
    """GPT-2, and StarCoder's GPTBigCode with one KV head."""
    hidden, heads = fields.count("n_embd"), fields.count("n_head")
    if hidden % heads:
        raise fields.refused("n_embd", f"a multiple of the {heads} heads")
    is_shared = fields.text("model_type") == "gpt_bigcode" and fields.flag("multi_query", default=True)
    num_layers = fields.count("n_layer", high=MAX_LAYERS)
    kv_heads = 1 if is_shared else heads
    shape = Shape(num_layers, hidden, heads, kv_heads, hidden // heads, fields.count("vocab_size"))
    every, parts = tuple(range(num_layers)), Parts()
    width = fields.optional_count("n_inner") or 4 * hidden
    positions = fields.count("n_positions")
    parts.embeddings(shape.vocab, hidden, tied=fields.flag("tie_word_embeddings", default=True))
    parts.plain("wpe", positions * hidden)
    add_attention(parts, fields, shape, every, Decoder(qkv_bias=True, out_bias=True))
    parts.mlp("mlp", hidden, width, every, gated=False, bias=True)
    parts.plain("norms", 4 * hidden, every)
    parts.plain("ln_f", 2 * hidden)
    kept = [Attention(num_layers, kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(fields, shape, kept, (), parts, width, positions)


def gpt_neox(fields: Fields) -> Model:
    """GPT-NeoX and Pythia."""
    shape = shape_of(fields)
    every, parts = tuple(range(shape.num_layers)), Parts()
    bias = fields.flag("attention_bias", default=True)
    width = fields.count("intermediate_size")
    parts.embeddings(shape.vocab, shape.hidden, tied=fields.flag("tie_word_embeddings", default=False))
    add_attention(parts, fields, shape, every, Decoder(qkv_bias=bias, out_bias=bias))
    parts.mlp("mlp", shape.hidden, width, every, gated=False, bias=True)
    parts.plain("norms", 4 * shape.hidden, every)
    parts.plain("final_layer_norm", 2 * shape.hidden)
    kept = [Attention(shape.num_layers, shape.kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(fields, shape, kept, (), parts, width)


def falcon(fields: Fields) -> Model:
    """Falcon 7B (one KV head) and 40B, 180B (groups)."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads", "n_head")
    if hidden % heads:
        raise fields.refused("hidden_size", f"a multiple of the {heads} attention heads")
    is_new = fields.flag("new_decoder_architecture", default=False)
    is_shared = fields.flag("multi_query", default=True)
    given = fields.optional_count("num_kv_heads", "n_head_kv")
    kv_heads = given or heads if is_new else 1 if is_shared else heads
    num_layers = fields.count("num_hidden_layers", "n_layer", high=MAX_LAYERS)
    shape = Shape(num_layers, hidden, heads, kv_heads, hidden // heads, fields.count("vocab_size"))
    every, parts, bias = tuple(range(num_layers)), Parts(), fields.flag("bias", default=False)
    width = fields.optional_count("ffn_hidden_size") or 4 * hidden
    parts.embeddings(shape.vocab, hidden, tied=fields.flag("tie_word_embeddings", default=True))
    add_attention(parts, fields, shape, every, Decoder(qkv_bias=bias, out_bias=bias))
    parts.mlp("mlp", hidden, width, every, gated=False, bias=bias)
    norms = 2 if is_new and (fields.optional_count("num_ln_in_parallel_attn") or 2) == 2 else 1
    norms = norms if fields.flag("parallel_attn", default=True) else 2
    parts.plain("norms", 2 * norms * hidden, every)
    parts.plain("ln_f", 2 * hidden)
    kept = [Attention(num_layers, kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(fields, shape, kept, (), parts, width)


def llama4(fields: Fields) -> Model:
    """Llama 4: chunks of local attention, experts in some layers, one shared expert."""
    shape = shape_of(fields)
    spec = Decoder(windows="chunked")
    kinds, chunk = attention_kinds(fields, spec, shape.num_layers)
    every, parts = tuple(range(shape.num_layers)), Parts()
    step = fields.optional_count("interleave_moe_layer_step") or 1
    named = fields.counts("moe_layers")
    sparse = tuple(named) if named is not None else tuple(each for each in every if (each + 1) % step == 0)
    if not set(sparse) <= set(every):
        raise fields.refused("moe_layers", f"numbers of layers from 0 to {shape.num_layers - 1}")
    dense = tuple(each for each in every if each not in set(sparse))
    width, active = fields.count("intermediate_size"), fields.count("num_experts_per_tok")
    parts.embeddings(shape.vocab, shape.hidden, tied=fields.flag("tie_word_embeddings", default=False))
    add_attention(parts, fields, shape, every, spec)
    parts.mlp("mlp", shape.hidden, fields.count("intermediate_size_mlp") if dense else 0, dense, gated=True)
    parts.experts(
        shape.hidden, width, sparse, fields.count("num_local_experts"), active, prefix="feed_forward"
    )
    parts.mlp("feed_forward.shared_expert", shape.hidden, width, sparse, gated=True)
    parts.plain("norms", 2 * shape.hidden, every)
    parts.plain("model.norm", shape.hidden)
    groups = [
        Attention(len(at), shape.kv_heads, shape.head_dim, shape.head_dim, limit)
        for at, limit in ((where(kinds, FULL), None), (where(kinds, CHUNKED), chunk))
        if at
    ]
    return made_of(fields, shape, groups, (), parts, (active + 1) * width)


DEEPSEEK_EXPERTS: Final = Experts(
    "n_routed_experts", "moe_intermediate_size", layers="after", router_bias=True, shared="count"
)
_QWEN_MOE: Final = Experts("num_experts", "moe_intermediate_size", layers="step")

DECODERS: Final[Mapping[str, Decoder]] = {
    "llama": Decoder(),
    "mistral": Decoder(qkv_bias=False, out_bias=False, mlp_bias=False, windows="all"),
    "ministral3": Decoder(qkv_bias=False, out_bias=False, mlp_bias=False, windows="all"),
    "mixtral": Decoder(
        qkv_bias=False, out_bias=False, windows="all", experts=Experts("num_local_experts", "intermediate_size")
    ),
    "qwen2": Decoder(qkv_bias=True, out_bias=False, windows="qwen"),
    "qwen2_moe": Decoder(
        qkv_bias=True,
        out_bias=False,
        windows="qwen",
        experts=Experts("num_experts", "moe_intermediate_size", layers="step", shared="width"),
    ),
    "qwen3": Decoder(qk_norm="head", windows="qwen"),
    "qwen3_moe": Decoder(qk_norm="head", windows="qwen", experts=_QWEN_MOE),
    "phi3": Decoder(qkv_bias=False, out_bias=False, windows="all"),
    "gemma": Decoder(tied=True),
    "gemma2": Decoder(norms=4, tied=True, windows="alternate"),
    "gemma3_text": Decoder(norms=4, tied=True, qk_norm="head", windows="pattern", pattern=6),
    "gpt_oss": Decoder(
        qkv_bias=True,
        out_bias=True,
        windows="alternate",
        has_sinks=True,
        experts=Experts("num_local_experts", "intermediate_size", bias=True, router_bias=True),
    ),
    "olmo2": Decoder(qk_norm="all"),
    "olmo3": Decoder(qk_norm="all", windows="pattern", pattern=4),
    "olmoe": Decoder(qk_norm="all", experts=Experts("num_experts", "intermediate_size")),
    "starcoder2": Decoder(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", gated=False, norm_bias=True, tied=True,
        windows="all",
    ),
    "cohere": Decoder(norms=1, tied=True),
    "cohere2": Decoder(norms=1, tied=True, windows="pattern", pattern=4),
    "granite": Decoder(),
    "granitemoe": Decoder(experts=Experts("num_local_experts", "intermediate_size")),
    "nemotron": Decoder(gated=False, norm_bias=True),
    "glm": Decoder(qkv_bias="attention_bias", out_bias=False),
    "glm4": Decoder(qkv_bias="attention_bias", out_bias=False, norms=4),
    "glm4_moe": Decoder(qkv_bias="attention_bias", out_bias=False, experts=DEEPSEEK_EXPERTS),
    "minimax_m2": Decoder(
        qkv_bias=False,
        out_bias=False,
        qk_norm="all",
        experts=Experts("num_local_experts", "intermediate_size", router_bias=True),
    ),
    "smollm3": Decoder(),
    "seed_oss": Decoder(qkv_bias="attention_bias", out_bias="attention_out_bias"),
}  # fmt: skip
