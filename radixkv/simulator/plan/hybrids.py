"""Hybrids: some layers keep a state for each request, the others KV for each token."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.simulator.plan.decoders import Decoder, Experts, add_attention, add_mlps
from radixkv.simulator.plan.kv import Attention, State
from radixkv.simulator.plan.latents import add_latent, latent_shape
from radixkv.simulator.plan.model import (
    DTYPES,
    FULL,
    LINEAR,
    Flag,
    Layers,
    Model,
    Parts,
    dtype_of,
    flag_of,
    kinds_of,
    made_of,
    shape_of,
    where,
)
from radixkv.simulator.plan.reading import MAX_LAYERS, Fields


def _state_dtype(fields: Fields, usual: str) -> str:
    """Return the dtype of recurrent states: what the config says, or the usual one."""
    dtype = fields.text("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    if dtype is None:
        return usual
    if dtype not in DTYPES:
        raise fields.refused("mamba_ssm_dtype", f"one of {', '.join(DTYPES)}")
    return dtype


def _add_delta_net(parts: Parts, fields: Fields, hidden: int, layers: Layers) -> State:
    """Add gated delta nets, as in Qwen3-Next. Returns what they keep."""
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    kernel = fields.count("linear_conv_kernel_dim", high=64)
    keys, values = key_heads * key_dim, value_heads * value_dim
    conv = 2 * keys + values
    parts.linear("linear_attn.in_proj_qkvz", hidden, 2 * keys + 2 * values, layers)
    parts.linear("linear_attn.in_proj_ba", hidden, 2 * value_heads, layers)
    parts.plain("linear_attn.conv1d", conv * kernel, layers, split="split")
    parts.plain("linear_attn.rest", 2 * value_heads + value_dim, layers)
    parts.linear("linear_attn.out_proj", values, hidden, layers)
    dtype = dtype_of(fields)
    recurrent = value_heads * value_dim * key_dim
    return State(
        len(layers),
        "gated delta net",
        (kernel - 1) * conv,
        recurrent,
        dtype,
        _state_dtype(fields, dtype),
        key_heads,
    )


def qwen_hybrid(fields: Fields) -> Model:
    """Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in each fourth layer."""
    shape = shape_of(fields)
    step = fields.optional_count("full_attention_interval") or 4
    usual = [LINEAR if number % step else FULL for number in range(1, shape.num_layers + 1)]
    kinds = kinds_of(fields, shape.num_layers, [FULL, LINEAR], usual)
    every, parts = tuple(range(shape.num_layers)), Parts()
    has_experts = "num_experts" in fields
    spec = Decoder(
        qk_norm="head",
        experts=Experts("num_experts", "moe_intermediate_size", layers="step", shared="width")
        if has_experts
        else None,
    )
    parts.embeddings(shape.vocab, shape.hidden, tied=fields.flag("tie_word_embeddings", default=False))
    full, linear = where(kinds, FULL), where(kinds, LINEAR)
    add_attention(parts, fields, shape, full, spec, gate=fields.flag("attn_output_gate", default=True))
    state = _add_delta_net(parts, fields, shape.hidden, linear)
    widest = add_mlps(parts, fields, shape, every, spec)
    parts.plain("norms", 2 * shape.hidden, every)
    parts.plain("model.norm", shape.hidden)
    kept = [Attention(len(full), shape.kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(fields, shape, kept, [state], parts, widest)


def kimi_linear(fields: Fields) -> Model:
    """Kimi Linear: delta attention with a gate for each channel, and latent attention in some layers."""
    shape = latent_shape(fields)
    given = fields.inner("linear_attn_config")
    if given is not None:
        full = tuple(each - 1 for each in given.counts("full_attn_layers", low=1) or ())
        if not set(full) <= set(range(shape.num_layers)):
            raise given.refused("full_attn_layers", f"numbers of layers from 1 to {shape.num_layers}")
        heads, dim = given.count("num_heads"), given.count("head_dim")
        kernel = given.count("short_conv_kernel_size", high=64)
    else:
        kinds = kinds_of(fields, shape.num_layers, [FULL, LINEAR], [])
        if not kinds:
            raise fields.refused("linear_attn_config", "an object with full_attn_layers, or layer_types")
        full = where(kinds, FULL)
        heads, dim = fields.count("linear_num_heads"), fields.count("linear_head_dim")
        kernel = fields.count("linear_conv_kernel_dim", high=64)
    every, hidden, parts, wide = tuple(range(shape.num_layers)), shape.hidden, Parts(), heads * dim
    linear = tuple(each for each in every if each not in set(full))
    parts.embeddings(shape.vocab, hidden, tied=fields.flag("tie_word_embeddings", default=False))
    latent = add_latent(parts, fields, hidden, shape.heads, full)
    for side in "qkv":
        parts.linear(f"self_attn.{side}_proj", hidden, wide, linear)
    for gate in "fg":
        parts.linear(f"self_attn.{gate}_a_proj", hidden, dim, linear, split="copied")
        parts.linear(f"self_attn.{gate}_b_proj", dim, wide, linear)
    parts.linear("self_attn.b_proj", hidden, heads, linear)
    parts.linear("self_attn.o_proj", wide, hidden, linear)
    parts.plain("self_attn.conv1d", 3 * wide * kernel, linear, split="split")
    parts.plain("self_attn.rest", wide + heads + dim, linear)
    experts = Experts(
        "num_experts",
        "moe_intermediate_size",
        "num_experts_per_token" if "num_experts_per_token" in fields else "num_experts_per_tok",
        layers="after",
        router_bias=True,
        shared="count",
    )
    widest = add_mlps(parts, fields, shape, every, Decoder(experts=experts))
    parts.plain("norms", 2 * hidden, every)
    parts.plain("model.norm", hidden)
    state = State(
        len(linear),
        "delta attention",
        (kernel - 1) * 3 * wide,
        heads * dim * dim,
        dtype_of(fields),
        "float32",
        heads,
    )
    return made_of(fields, shape, [latent], [state], parts, widest)


def lightning(fields: Fields) -> Model:
    """MiniMax-Text-01: lightning attention, and softmax attention in each eighth layer; experts in all."""
    shape = shape_of(fields)
    marks = fields.counts("attn_type_list")
    if marks is not None:
        if len(marks) != shape.num_layers or not set(marks) <= {0, 1}:
            raise fields.refused("attn_type_list", f"{shape.num_layers} times 0 or 1")
        kinds = [FULL if each else LINEAR for each in marks]
    else:
        kinds = kinds_of(fields, shape.num_layers, [FULL, LINEAR], [])
        if not kinds:
            raise fields.refused("attn_type_list", "0 or 1 for each layer, or layer_types")
    full, linear = where(kinds, FULL), where(kinds, LINEAR)
    every, parts, wide = tuple(range(shape.num_layers)), Parts(), shape.heads * shape.head_dim
    spec = Decoder(qkv_bias=False, out_bias=False, experts=Experts("num_local_experts", "intermediate_size"))
    parts.embeddings(shape.vocab, shape.hidden, tied=fields.flag("tie_word_embeddings", default=False))
    add_attention(parts, fields, shape, full, spec)
    parts.linear("self_attn.qkv_proj", shape.hidden, 3 * wide, linear)
    parts.linear("self_attn.output_gate", shape.hidden, wide, linear)
    parts.linear("self_attn.out_proj", wide, shape.hidden, linear)
    parts.plain("self_attn.norm", wide, linear)
    widest = add_mlps(parts, fields, shape, every, spec)
    parts.plain("norms", 2 * shape.hidden, every)
    parts.plain("model.norm", shape.hidden)
    recurrent = shape.heads * shape.head_dim**2
    dtype = dtype_of(fields)
    state = State(
        len(linear), "lightning attention", 0, recurrent, dtype, _state_dtype(fields, dtype), shape.heads
    )
    kept = [Attention(len(full), shape.kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(fields, shape, kept, [state], parts, widest)


class _Mamba2(NamedTuple):
    """The numbers of a Mamba-2 mixer."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    has_norm: bool = True
    bias: bool = False
    conv_bias: bool = True


def _add_mamba2(parts: Parts, fields: Fields, hidden: int, layers: Layers, own: _Mamba2) -> State:
    inner = own.heads * own.head_dim
    conv = inner + 2 * own.groups * own.state
    parts.linear("mixer.in_proj", hidden, inner + conv + own.heads, layers, bias=own.bias)
    parts.plain("mixer.conv1d", conv * (own.kernel + own.conv_bias), layers, split="split")
    parts.plain("mixer.rest", 3 * own.heads + own.has_norm * inner, layers)
    parts.linear("mixer.out_proj", inner, hidden, layers, bias=own.bias)
    dtype = dtype_of(fields)
    return State(
        len(layers),
        "Mamba-2",
        (own.kernel - 1) * inner,
        inner * own.state,
        dtype,
        _state_dtype(fields, dtype),
        own.heads,
        own.groups,
        (own.kernel - 1) * 2 * own.state,
    )


def nemotron_h(fields: Fields) -> Model:
    """Nemotron-H: each layer is one of Mamba-2 (M), attention (*), an MLP (-) or experts (E)."""
    shape = shape_of(fields)
    pattern = fields.text("hybrid_override_pattern") if "hybrid_override_pattern" in fields else None
    kinds = [*pattern] if pattern is not None else fields.texts("layers_block_type") or []
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    kinds = [names.get(each, each) for each in kinds]
    if len(kinds) != shape.num_layers or not set(kinds) <= set(names.values()):
        raise fields.refused("hybrid_override_pattern", f"{shape.num_layers} of the letters M * - E")
    every, parts = tuple(range(shape.num_layers)), Parts()
    mamba, full, dense, sparse = (where(kinds, each) for each in names.values())
    own = _Mamba2(
        fields.count("mamba_num_heads"),
        fields.count("mamba_head_dim"),
        fields.count("n_groups", "mamba_n_groups"),
        fields.count("ssm_state_size"),
        fields.count("conv_kernel", "mamba_d_conv", high=64),
        bias=fields.flag("use_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", default=True),
    )
    parts.embeddings(shape.vocab, shape.hidden, tied=fields.flag("tie_word_embeddings", default=False))
    state = _add_mamba2(parts, fields, shape.hidden, mamba, own)
    add_attention(parts, fields, shape, full, Decoder(qkv_bias=False, out_bias=False))
    width = fields.count("intermediate_size") if dense else 0
    bias = fields.flag("mlp_bias", default=False)
    parts.mlp("mixer", shape.hidden, width, dense, gated=False, bias=bias)
    if sparse:
        if "moe_latent_size" in fields:
            raise fields.refused("moe_latent_size", "none: experts of a latent aren't known here")
        count, active = fields.count("n_routed_experts"), fields.count("num_experts_per_tok")
        wide = fields.count("moe_intermediate_size")
        parts.experts(
            shape.hidden, wide, sparse, count, active, gated=False, router_bias=True, prefix="mixer"
        )
        shared = fields.optional_count("moe_shared_expert_intermediate_size", low=0) or 0
        parts.mlp("mixer.shared_experts", shape.hidden, shared, sparse if shared else (), gated=False)
        width = max(width, active * wide + shared)
    parts.plain("norms", shape.hidden, every)
    parts.plain("model.norm", shape.hidden)
    kept = [Attention(len(full), shape.kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(fields, shape, kept, [state], parts, max(width, 2 * own.heads * own.head_dim))


def _mamba_d(fields: Fields, hidden: int, *, norm: Flag = True) -> _Mamba2:
    """Return a Mamba-2 mixer that is written as in Bamba, Granite and Falcon-H1."""
    heads = fields.count("mamba_n_heads")
    inner = fields.optional_count("mamba_d_ssm") or (fields.optional_count("mamba_expand") or 2) * hidden
    if inner % heads:
        raise fields.refused("mamba_n_heads", f"a divisor of the inner size, {inner}")
    return _Mamba2(
        heads,
        inner // heads,
        fields.count("mamba_n_groups"),
        fields.count("mamba_d_state"),
        fields.count("mamba_d_conv", high=64),
        has_norm=flag_of(fields, norm),
        bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
    )


def granite_hybrid(fields: Fields) -> Model:
    """Granite 4: Mamba-2 or attention, then experts and a shared MLP, or that alone."""
    shape = shape_of(fields)
    given = fields.texts("layer_types") or fields.texts("layers_block_type")
    names = {"mamba": "mamba", LINEAR: "mamba", "attention": "attention", FULL: "attention"}
    if given is None or len(given) != shape.num_layers or not set(given) <= set(names):
        raise fields.refused("layer_types", f"{shape.num_layers} times mamba or attention")
    kinds = [names[each] for each in given]
    every, parts = tuple(range(shape.num_layers)), Parts()
    mamba, full = where(kinds, "mamba"), where(kinds, "attention")
    parts.embeddings(shape.vocab, shape.hidden, tied=fields.flag("tie_word_embeddings", default=False))
    state = [_add_mamba2(parts, fields, shape.hidden, mamba, _mamba_d(fields, shape.hidden))] if mamba else []
    add_attention(parts, fields, shape, full, Decoder())
    shared = fields.count("shared_intermediate_size")
    parts.mlp("shared_mlp", shape.hidden, shared, every, gated=True)
    count = fields.optional_count("num_local_experts", low=0) or 0
    widest = shared
    if count:
        width, active = fields.count("intermediate_size"), fields.count("num_experts_per_tok")
        parts.experts(shape.hidden, width, every, count, active, prefix="block_sparse_moe")
        widest += active * width
    parts.plain("norms", 2 * shape.hidden, every)
    parts.plain("model.norm", shape.hidden)
    kept = [Attention(len(full), shape.kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(fields, shape, kept, state, parts, widest)


def bamba(fields: Fields) -> Model:
    """Bamba: Mamba-2, attention in the layers that ``attn_layer_indices`` names."""
    shape = shape_of(fields)
    full = tuple(fields.counts("attn_layer_indices") or ())
    if not full or not set(full) <= set(range(shape.num_layers)):
        raise fields.refused("attn_layer_indices", f"numbers of layers from 0 to {shape.num_layers - 1}")
    every, parts = tuple(range(shape.num_layers)), Parts()
    mamba = tuple(each for each in every if each not in set(full))
    parts.embeddings(shape.vocab, shape.hidden, tied=fields.flag("tie_word_embeddings", default=False))
    state = _add_mamba2(parts, fields, shape.hidden, mamba, _mamba_d(fields, shape.hidden))
    add_attention(parts, fields, shape, full, Decoder())
    widest = add_mlps(parts, fields, shape, every, Decoder())
    parts.plain("norms", 2 * shape.hidden, every)
    parts.plain("model.norm", shape.hidden)
    kept = [Attention(len(full), shape.kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(fields, shape, kept, [state], parts, widest)


def falcon_h1(fields: Fields) -> Model:
    """Falcon-H1: attention and Mamba-2 side by side in each layer."""
    shape = shape_of(fields)
    every, parts = tuple(range(shape.num_layers)), Parts()
    own = _mamba_d(fields, shape.hidden, norm="mamba_rms_norm")
    own = own._replace(bias=fields.flag("projectors_bias", default=False))
    parts.embeddings(shape.vocab, shape.hidden, tied=fields.flag("tie_word_embeddings", default=False))
    state = _add_mamba2(parts, fields, shape.hidden, every, own)
    add_attention(parts, fields, shape, every, Decoder())
    widest = add_mlps(parts, fields, shape, every, Decoder())
    parts.plain("norms", 2 * shape.hidden, every)
    parts.plain("model.norm", shape.hidden)
    kept = [Attention(shape.num_layers, shape.kv_heads, shape.head_dim, shape.head_dim)]
    return made_of(fields, shape, kept, [state], parts, widest)


def jamba(fields: Fields) -> Model:
    """Jamba: Mamba, attention in each eighth layer, experts in each second."""
    shape = shape_of(fields)
    hidden, parts = shape.hidden, Parts()
    every = tuple(range(shape.num_layers))
    full = _every(fields, "attn_layer_period", "attn_layer_offset", every)
    sparse = _every(fields, "expert_layer_period", "expert_layer_offset", every)
    mamba = tuple(each for each in every if each not in set(full))
    inner = hidden * (fields.optional_count("mamba_expand") or 2)
    state, kernel = fields.count("mamba_d_state"), fields.count("mamba_d_conv", high=64)
    is_auto = fields.is_text("mamba_dt_rank") and fields.text("mamba_dt_rank") == "auto"
    rank = -(-hidden // 16) if is_auto else fields.count("mamba_dt_rank")
    parts.embeddings(shape.vocab, hidden, tied=fields.flag("tie_word_embeddings", default=False))
    add_attention(parts, fields, shape, full, Decoder(qkv_bias=False, out_bias=False))
    bias = fields.flag("mamba_proj_bias", default=False)
    parts.linear("mamba.in_proj", hidden, 2 * inner, mamba, bias=bias)
    parts.linear("mamba.x_proj", inner, rank + 2 * state, mamba)
    parts.linear("mamba.dt_proj", rank, inner, mamba, bias=True)
    parts.linear("mamba.out_proj", inner, hidden, mamba, bias=bias)
    conv = inner * (kernel + fields.flag("mamba_conv_bias", default=True))
    parts.plain("mamba.rest", conv + inner * state + inner, mamba, split="split")
    parts.plain("mamba.norms", rank + 2 * state, mamba)
    width, count = fields.count("intermediate_size"), fields.count("num_experts")
    active = fields.count("num_experts_per_tok")
    sparse = sparse if count > 1 else ()
    dense = tuple(each for each in every if each not in set(sparse))
    parts.mlp("feed_forward", hidden, width, dense, gated=True)
    if sparse:
        parts.experts(hidden, width, sparse, count, active, prefix="feed_forward")
    parts.plain("norms", 2 * hidden, every)
    parts.plain("model.norm", hidden)
    dtype = dtype_of(fields)
    kept = [Attention(len(full), shape.kv_heads, shape.head_dim, shape.head_dim)]
    states = [
        State(
            len(mamba),
            "Mamba",
            (kernel - 1) * inner,
            inner * state,
            dtype,
            _state_dtype(fields, dtype),
            inner,
        )
    ]
    return made_of(fields, shape, kept, states, parts, max(2 * inner, active * width))


def _every(fields: Fields, period: str, offset: str, layers: Layers) -> Layers:
    step, first = fields.count(period, high=MAX_LAYERS), fields.count(offset, low=0, high=MAX_LAYERS)
    return tuple(each for each in layers if each % step == first)
