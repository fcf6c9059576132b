"""A small language model of bytes, trained here: KV of a model that predicts text differ from those of random weights.

The recipe is that of ``examples/quantised_prefixes.py``: a Llama of 2.5 million parameters with 2 KV heads of 64, and
the sources of the Python standard library. Their last fifth is held out, for prompts. Nothing is downloaded.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch

from radixkv.engines.hf.models import Model, demo_model

BYTES: Final = 256
"""The vocabulary: a token is a byte."""
ROWS: Final = 8
LENGTH: Final = 320
"""Sequences of a step, and tokens of each."""
RATE: Final = 2e-3
HELD_OUT: Final = 0.2


class Trained(NamedTuple):
    """The model, text that it hasn't seen, and its last losses on the text that it has, in nats a token."""

    model: Model
    held_out: bytes
    loss: float


def text() -> bytes:
    """Return the text, some megabytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)


def trained(
    steps: int, max_model_len: int, seed: int = 0, progress: Callable[[], None] | None = None
) -> Trained:
    """Train for so many steps of 2,560 tokens, about a second each. The same seed gives the same batches."""
    content = text()
    cut = int(len(content) * (1 - HELD_OUT))
    known = torch.frombuffer(bytearray(content[:cut]), dtype=torch.uint8)
    model = _untrained(max_model_len, seed)
    noise, losses = torch.Generator().manual_seed(seed), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=max(steps, 2), pct_start=0.1)
    for _ in range(steps):
        starts = torch.randint(len(known) - LENGTH, (ROWS, 1), generator=noise)
        ids = known[starts + torch.arange(LENGTH)].long()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if progress is not None:
            progress()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    last = losses[-max(steps // 10, 1) :]
    return Trained(model, content[cut:], sum(last) / len(last))


def _untrained(max_model_len: int, seed: int) -> Model:
    """Return the model as transformers would begin it: normal weights of 0.02."""
    model = demo_model(
        seed,
        BYTES,
        num_layers=3,
        hidden_size=256,
        intermediate_size=768,
        num_heads=4,
        num_kv_heads=2,
        max_model_len=max_model_len,
    )
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02, generator=noise)
    return model
