"""Models for the transformers engine: a demo model, models of local directories, and the fingerprint of a model.

- ``demo_model``: a Llama-architecture model with random weights, built in memory. Its weights come from PCG64's raw
  64-bit stream by exact operations only. So a seed gives the same bits on every machine.
- ``load_model``: any causal LM that ``save_pretrained`` wrote. It reads safetensors only, no code from the
  directory, and uses no network.
- ``fingerprint``: SHA-256 over everything that a block's bytes depend on, apart from the tokens. Two models with
  equal fingerprints may share blocks. Anything that could change their KV changes the fingerprint.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.engines.hf.models", "hf")

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from radixkv.engines.hf.paged_cache import layout_of
from radixkv.errors import ConfigError

Model = PreTrainedModel
"""A model that the engine serves."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The values of ``load_model``'s ``dtype``."""

_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "use_cache")
_ATTENTION_GAIN = 2.0
"""Standard deviation of queries and keys in the demo model.

Attention is sharp, so that the output depends on the whole prompt, and wrong KV shows in the tokens.
"""


def demo_model(
    seed: int = 0,
    vocab_size: int = 8000,
    *,
    num_layers: int = 6,
    hidden_size: int = 256,
    intermediate_size: int = 1024,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_model_len: int = 8192,
    bos_token_id: int = 1,
    eos_token_id: int = 2,
) -> LlamaForCausalLM:
    """Return a random Llama of about 10 million float32 parameters, in eval mode, on the CPU.

    The same arguments give bit-equal weights on every machine. Torch's random state doesn't change. The model's
    text is noise. It takes 0.2 s to make; 1,500 tokens of prefill take about 0.25 s on one core.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=False,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, torch.float32)
    model.train(False)
    bits = np.random.PCG64(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 2:
            with torch.no_grad():
                parameter.copy_(_uniform(bits, tuple(parameter.shape), _gain(name)))
    return model


def _gain(name: str) -> float:
    return _ATTENTION_GAIN if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0


def _uniform(bits: np.random.PCG64, shape: tuple[int, ...], gain: float) -> torch.Tensor:
    """Weights ``[outputs, inputs]``, uniform with standard deviation ``gain ÷ √inputs``."""
    count = math.prod(shape)
    raw = bits.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
    unit = (raw >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return torch.from_numpy(unit * np.float32(gain * math.sqrt(3.0 / shape[-1]))).view(shape)


def load_model(path: str, device: str = "cpu", dtype: str = "float32") -> PreTrainedModel:
    """Return the causal LM in the local directory ``path``, as written by ``save_pretrained``, in eval mode.

    Reads ``config.json`` and ``*.safetensors`` only: no pickled weights, no code, no network. Raises ConfigError if
    the directory, its files or ``dtype`` are unsuitable, or if the model's KV can't be cached (see ``layout_of``).
    """
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"one of {', '.join(DTYPES)}")
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError("model", path, "a local directory with a config.json")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            "model", path, "a directory with *.safetensors weights (pickled weights are not read)"
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=DTYPES[dtype],
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError("model", path, f"a causal LM that this transformers can load: {error}") from error
    model, report = loaded
    absent = sorted(report["missing_keys"])
    if absent:
        raise ConfigError(
            "model", path, f"weights for every parameter: {len(absent)} are absent, {absent[0]} the first"
        )
    return _ready(model, device)


def _ready(model: PreTrainedModel, device: str) -> PreTrainedModel:
    torch.nn.Module.to(model, device)
    model.train(False)
    layout_of(model)
    return model


def max_model_len_of(model: PreTrainedModel) -> int | None:
    """Return the number of positions over which the model's KV is consistent; None if its configuration names no limit.

    Some RoPE variants rescale all positions once a sequence exceeds the original length. For them that length is
    the limit: KV that was computed before that point is wrong after it.
    """
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [
        limit,
        rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None,
    ]
    return min((int(value) for value in limits if value is not None), default=None)


def fingerprint(model: PreTrainedModel, tokenizer_digest: str, block_size: int) -> str:
    """``"fp:"`` and 64 hex digits: SHA-256 of weights, dtype, configuration (with RoPE), tokenizer, block size.

    Reads every weight once: about a second for each GB.
    """
    digest = hashlib.sha256(b"radixkv-model-1")
    for part in _identity(model, tokenizer_digest, block_size):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"fp:{digest.hexdigest()}"


def _identity(model: PreTrainedModel, tokenizer_digest: str, block_size: int) -> Iterator[Any]:
    settings = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE_CONFIG}
    yield type(model).__name__.encode()
    yield json.dumps(settings, sort_keys=True, default=str).encode()
    yield str(model.dtype).encode()
    yield tokenizer_digest.encode()
    yield str(block_size).encode()
    for name, tensor in sorted(model.state_dict().items()):
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
