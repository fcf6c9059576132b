"""A small language model of bytes, trained here: KV of a model that predicts text differ from those of random weights.

The text comes with every CPython: that of the tokenizer (``radixkv.tokenizer.train``). Its last tenth is held out, for
prompts. Nothing is downloaded. The architecture is that of the demo model: Llama, three layers, heads of 64 values.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch

from radixkv.engines.hf_models import Model, demo_model
from radixkv.tokenizer.train import lines

BYTES: Final = 256
"""The vocabulary: a token is a byte."""
ROWS: Final = 8
LENGTH: Final = 256
"""Sequences of a step, and tokens of each."""
RATE: Final = 3e-3
HELD_OUT: Final = 0.1


class Trained(NamedTuple):
    """The model, text that it hasn't seen, and its last losses on the text that it has, in nats a token."""

    model: Model
    held_out: bytes
    loss: float


def text() -> bytes:
    """Return the text, some six megabytes. Takes some seconds."""
    return "\n".join(lines(Path(sysconfig.get_path("stdlib")))).encode()


def trained(
    steps: int, max_model_len: int, seed: int = 0, progress: Callable[[], None] | None = None
) -> Trained:
    """Train for so many steps of 2,048 tokens. The same seed gives the same batches. Costs 8 GFLOP a step."""
    content = text()
    cut = int(len(content) * (1 - HELD_OUT))
    known = torch.frombuffer(bytearray(content[:cut]), dtype=torch.uint8)
    shape = {"num_layers": 3, "hidden_size": 128, "intermediate_size": 384, "num_heads": 2, "num_kv_heads": 2}
    model = demo_model(seed, BYTES, max_model_len=max_model_len, **shape)
    noise, losses = torch.Generator().manual_seed(seed), list[float]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 20, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02)
        starts = torch.randint(len(known) - LENGTH, (ROWS, 1), generator=noise)
        ids = known[starts + torch.arange(LENGTH)].long()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if progress is not None:
            progress()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return Trained(model, content[cut:], sum(losses[-20:]) / max(len(losses[-20:]), 1))
