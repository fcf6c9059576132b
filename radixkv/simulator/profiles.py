"""The cost of a model's prefill and the size of its KV, to convert hits to seconds and blocks to gigabytes.

    flops(n)   = 2 × parameters × n + 2 × layers × heads × head size × n²     causal attention, both products
    seconds(n) = flops(n) ÷ sustained flops

Cached tokens are the first ones of a prompt, so hits save ``seconds(hits)``. Parameters are those that a token uses:
for a mixture of experts, the active ones. KV has 16 bits a value, and counts KV heads, or the latent for MLA.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import ConfigError
from radixkv_policies.gdsf import PrefillProfile

DEFAULT_TFLOPS = 400.0
"""Sustained by one H100 in bf16: 40 % of its dense peak of 989."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model on a machine. ``kv_values``: values stored per token and layer. ``tflops``: sustained, all GPUs."""

    name: str
    parameters: float
    num_layers: int
    num_heads: int
    head_dim: int
    kv_values: int
    tflops: float = DEFAULT_TFLOPS

    @property
    def attention_flops(self) -> float:
        """Flops of attention over n tokens, divided by n²."""
        return 2.0 * self.num_layers * self.num_heads * self.head_dim

    @property
    def for_policies(self) -> PrefillProfile:
        """The profile for policies that weigh prefill: the derivative of ``prefill_seconds``."""
        flops = self.tflops * 1e12
        return PrefillProfile(2.0 * self.parameters / flops, 2.0 * self.attention_flops / flops)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token in 16 bits."""
        return 2 * self.num_layers * self.kv_values

    def prefill_seconds(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds to compute the first ``tokens`` tokens of a prompt."""
        n = tokens.astype(np.float64)
        flops: NDArray[np.float64] = n * (2.0 * self.parameters + self.attention_flops * n)
        return flops / (self.tflops * 1e12)


PROFILES = {
    profile.name: profile
    for profile in (
        ModelProfile("llama-2-7b", 6.74e9, 32, 32, 128, 2 * 32 * 128),
        ModelProfile("llama-2-13b", 13.0e9, 40, 40, 128, 2 * 40 * 128),
        ModelProfile("llama-3-8b", 8.03e9, 32, 32, 128, 2 * 8 * 128),
        ModelProfile("llama-3-70b", 70.6e9, 80, 64, 128, 2 * 8 * 128),
        ModelProfile("llama-3.1-405b", 405.9e9, 126, 128, 128, 2 * 8 * 128),
        ModelProfile("mistral-7b", 7.25e9, 32, 32, 128, 2 * 8 * 128),
        ModelProfile("qwen2.5-7b", 7.62e9, 28, 28, 128, 2 * 4 * 128),
        ModelProfile("deepseek-v3", 37.0e9, 61, 128, 160, 512 + 64),
    )
}


def profile_of(name: str, tflops: float = DEFAULT_TFLOPS) -> ModelProfile:
    """Return the profile of that name at that speed. Raises ConfigError."""
    if name not in PROFILES:
        raise ConfigError("--profile", name, f"one of {', '.join(PROFILES)}")
    if not 0 < tflops < float("inf"):
        raise ConfigError("--tflops", tflops, "a number > 0")
    base = PROFILES[name]
    return ModelProfile(
        name, base.parameters, base.num_layers, base.num_heads, base.head_dim, base.kv_values, tflops
    )
