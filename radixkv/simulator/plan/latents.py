"""Multi-head latent attention (MLA): DeepSeek and what is built like it, with and without a sparse indexer (DSA)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from radixkv.simulator.plan.decoders import DEEPSEEK_EXPERTS, Decoder, add_mlps
from radixkv.simulator.plan.kv import IndexKeys, KVLayers, Latent
from radixkv.simulator.plan.model import Layers, Model, Parts, Shape, made_of, where
from radixkv.simulator.plan.reading import MAX_LAYERS, Fields


def add_latent(parts: Parts, fields: Fields, hidden: int, heads: int, layers: Layers) -> Latent:
    """Add the projections of multi-head latent attention. Returns what it keeps."""
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    wide = heads * (nope + rope)
    query_rank = fields.optional_count("q_lora_rank")
    bias = fields.flag("attention_bias", default=False)
    if query_rank is None:
        parts.linear("self_attn.q_proj", hidden, wide, layers)
    else:
        parts.linear("self_attn.q_a_proj", hidden, query_rank, layers, split="copied", bias=bias)
        parts.plain("self_attn.q_a_layernorm", query_rank, layers)
        parts.linear("self_attn.q_b_proj", query_rank, wide, layers)
    parts.linear("self_attn.kv_a_proj_with_mqa", hidden, rank + rope, layers, split="copied", bias=bias)
    parts.plain("self_attn.kv_a_layernorm", rank, layers)
    parts.linear("self_attn.kv_b_proj", rank, heads * (nope + value), layers)
    parts.linear("self_attn.o_proj", heads * value, hidden, layers, bias=bias)
    return Latent(len(layers), rank, rope)


def latent_model(fields: Fields) -> Model:
    """DeepSeek and what is built like it, with and without a sparse indexer."""
    shape = latent_shape(fields)
    every, parts = tuple(range(shape.num_layers)), Parts()
    parts.embeddings(shape.vocab, shape.hidden, tied=fields.flag("tie_word_embeddings", default=False))
    latent = add_latent(parts, fields, shape.hidden, shape.heads, every)
    groups: list[KVLayers] = [latent]
    if "index_head_dim" in fields or fields.text("model_type") in _SPARSE:
        groups = [Latent(latent.num_layers, latent.rank, latent.rope_dim, is_sparse=True)]
        groups.append(_add_indexer(parts, fields, shape))
    is_v2 = fields.text("model_type") == "deepseek_v2"
    spec = Decoder(experts=replace(DEEPSEEK_EXPERTS, router_bias=False) if is_v2 else DEEPSEEK_EXPERTS)
    widest = add_mlps(parts, fields, shape, every, spec)
    parts.plain("norms", 2 * shape.hidden, every)
    parts.plain("model.norm", shape.hidden)
    return made_of(fields, shape, groups, (), parts, widest)


def latent_shape(fields: Fields) -> Shape:
    heads = fields.count("num_attention_heads")
    keys = fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
    dim = (keys + fields.count("v_head_dim")) // 2
    num_layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
    return Shape(num_layers, fields.count("hidden_size"), heads, heads, dim, fields.count("vocab_size"))


_SPARSE: Final = ("deepseek_v32", "glm_moe_dsa")


def _add_indexer(parts: Parts, fields: Fields, shape: Shape) -> IndexKeys:
    """Add a sparse indexer. Layers that share another layer's choice have none."""
    dim, heads = fields.count("index_head_dim"), fields.count("index_n_heads")
    rank = fields.count("q_lora_rank")
    layers = _indexed_layers(fields, shape.num_layers)
    parts.linear("self_attn.indexer.wq_b", rank, heads * dim, layers, split="copied")
    parts.linear("self_attn.indexer.wk", shape.hidden, dim, layers, split="copied")
    parts.plain("self_attn.indexer.k_norm", 2 * dim, layers)
    parts.plain("self_attn.indexer.weights_proj", shape.hidden * heads, layers)
    return IndexKeys(len(layers), dim)


def _indexed_layers(fields: Fields, num_layers: int) -> Layers:
    given = fields.texts("indexer_types")
    if given is not None:
        if len(given) != num_layers or not set(given) <= {"full", "shared"}:
            raise fields.refused("indexer_types", f"{num_layers} times full or shared")
        return where(given, "full")
    if "index_topk_pattern" in fields:
        pattern = fields.text("index_topk_pattern") or ""
        if len(pattern) != num_layers or not set(pattern) <= set("FS"):
            raise fields.refused("index_topk_pattern", f"{num_layers} letters F or S")
        return tuple(at for at, each in enumerate(pattern) if each == "F")
    step = fields.optional_count("index_topk_freq") or 1
    offset = fields.optional_count("index_skip_topk_offset", low=0)
    start = 2 if offset is None else offset
    return tuple(at for at in range(num_layers) if max(at - start + 1, 0) % step == 0)
