"""Small random models, and the answers of stock transformers for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from radixkv import audit
from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig
from radixkv.engines.hf import HFEngine, demo_model, layout_of
from radixkv.index.cache import PrefixCache

VOCAB = 97
EOS, PAD = 2, 0

Prompts = list[list[int]]


def _configs() -> dict[str, tuple[type[Any], Any]]:
    small = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide = {"initializer_range": 0.3, **small}
    return {
        "qwen2": (
            Qwen2ForCausalLM,
            Qwen2Config(**wide, **sizes, num_key_value_heads=2, max_position_embeddings=512),
        ),
        "mistral": (
            MistralForCausalLM,
            MistralConfig(
                **wide, **sizes, num_key_value_heads=1, sliding_window=None, max_position_embeddings=512
            ),
        ),
        "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**wide, **sizes, max_position_embeddings=512)),
        "gpt2": (GPT2LMHeadModel, GPT2Config(**wide, n_embd=32, n_layer=2, n_head=4, n_positions=512)),
        "opt": (
            OPTForCausalLM,
            OPTConfig(
                **small,
                init_std=0.3,
                hidden_size=32,
                word_embed_proj_dim=32,
                ffn_dim=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=512,
            ),
        ),
        "falcon": (
            FalconForCausalLM,
            FalconConfig(
                **wide,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=512,
            ),
        ),
    }


ARCHITECTURES = ("llama", "qwen2", "mistral", "gpt_neox", "gpt2", "opt", "falcon")


@cache
def model_of(architecture: str = "llama", device: str = "cpu") -> PreTrainedModel:
    """Return a tiny model with random weights, the same each time and on every device. Don't change it."""
    if device != "cpu":
        there: PreTrainedModel = deepcopy(model_of(architecture)).to(device)
        return there
    if architecture == "llama":
        model: PreTrainedModel = demo_model(
            3, VOCAB, num_layers=2, hidden_size=32, intermediate_size=48, max_model_len=512
        )
        model.generation_config.pad_token_id = PAD
        return model
    kind, config = _configs()[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        made: PreTrainedModel = kind(config).eval()
    return made


@contextmanager
def engine_over(
    model: PreTrainedModel,
    *,
    block_size: int = 4,
    num_blocks: int = 512,
    chunk_tokens: int = 512,
    kind: type[PrefixCache] = PrefixCache,
    lends_beams: bool | None = None,
    clock: Clock = monotonic,
) -> Iterator[HFEngine]:
    """Yield an engine with a cache of its own.

    Afterwards check that no sequence is open and that the audit is clean.
    """
    config = CacheConfig(num_blocks, block_size, layout_of(model), str(model.device))
    cache = kind(config)
    yield HFEngine(model, cache, chunk_tokens=chunk_tokens, lends_beams=lends_beams, clock=clock)
    assert cache.stats().num_sequences == 0
    assert cache.stats().sequence_blocks == 0
    audit.check(cache)


def stock(
    model: PreTrainedModel,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    eos: int | None = EOS,
    seed: int | None = None,
    **settings: Any,
) -> Prompts:
    """Return each output row's new tokens by ``model.generate`` with its own cache, up to the end-of-sequence token."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device
    )
    settings.setdefault("do_sample", False)
    if settings["do_sample"]:
        settings.setdefault("top_k", 0)
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=PAD,
            **settings,
        )
    return [row[: row.index(eos) + 1] if eos in row else row for row in output[:, width:].tolist()]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (num_tokens,), generator=generator).tolist()
