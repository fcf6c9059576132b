"""The cost of quantised prefixes: perplexity and attention error at fp16, FP8, INT8 and INT4.

    python examples/quantised_prefixes.py [--steps 600] [--prefixes 2800] [--block-size 16] [--text FILE …]

Trains a small Llama for a few minutes on a CPU: bytes as tokens, 3 layers, 4 query heads over 2 KV heads of 64. The
text is local, by default the Python standard library's sources.

Then it takes prefixes of held-out text and computes their KV once. The KV goes to blocks of a fp16 pool, through
quantize and dequantize, and back into the model's cache. With this cache the model reads the next 64 bytes.
Everything else is the same for all schemes. The baseline, fp16, takes the same path without quantisation.

Losses differ more between texts than between schemes on one text. So losses are compared in pairs: the difference
from fp16 on the same 64 bytes, its mean over the prefixes, and the standard error of that mean.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from radixkv.engines.hf.paged_cache import CACHE_ARGUMENT
from radixkv_kernels import Pool, Quantized, dequantize, quantize
from radixkv_kernels.quantized import Scheme

PREFIX, CONTINUATION, BATCH = 256, 64, 16
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 3


def read_text(paths: Sequence[str]) -> torch.Tensor:
    """Bytes of the files, in the order of their names: int64 ``[n]``."""
    files = [Path(path) for path in paths] or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()


def small_model() -> LlamaForCausalLM:
    """A Llama of 2.5 million parameters, with a seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=HEADS * HEAD_DIM, intermediate_size=3 * HEADS * HEAD_DIM, head_dim=HEAD_DIM,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        max_position_embeddings=PREFIX + CONTINUATION, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, text: torch.Tensor, steps: int, batch: int = 8) -> float:
    """Train with AdamW on random windows, one cycle of the learning rate. Returns the mean loss of the last tenth."""
    length = PREFIX + CONTINUATION
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for step in range(steps):
        starts = torch.randint(0, len(text) - length, (batch,)).tolist()
        window = torch.stack([text[start : start + length] for start in starts])
        loss = model(window, labels=window).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 49:
            print(f"  step {step + 1}: {sum(losses[-50:]) / 50 / math.log(2):.2f} bits a byte", flush=True)
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def through(
    keys_values: list[tuple[torch.Tensor, torch.Tensor]], scheme: Scheme | None, block_size: int
) -> DynamicCache:
    """The cache after its KV was written to blocks of a fp16 pool, quantised (or not), and read back.

    keys_values: for each layer, float32 ``[batch, KV_HEADS, PREFIX, HEAD_DIM]``.
    """
    batch = len(keys_values[0][0])
    num_blocks = batch * PREFIX // block_size
    pool = Pool.of(torch.zeros(num_blocks, LAYERS, 2, block_size, KV_HEADS, HEAD_DIM, dtype=torch.float16))
    for layer, sides in enumerate(keys_values):
        for side, tensor in enumerate(sides):
            rows = tensor.transpose(1, 2)  # [batch, PREFIX, KV_HEADS, HEAD_DIM]
            pool.plane(layer, side).copy_(rows.reshape(num_blocks, block_size, KV_HEADS, HEAD_DIM))
    if scheme is not None:
        records = torch.empty(num_blocks, Quantized(pool, scheme).record_bytes, dtype=torch.uint8)
        quantize(pool, range(num_blocks), records, scheme)
        dequantize(records, pool, range(num_blocks), scheme)
    cache = DynamicCache()
    for layer in range(LAYERS):
        sides = [pool.plane(layer, side).reshape(batch, PREFIX, KV_HEADS, HEAD_DIM) for side in (0, 1)]
        cache.update(*(rows.transpose(1, 2).float() for rows in sides), layer)
    return cache


class AttentionOutputs:
    """Collects the attention output of each layer."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.seen: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(
                lambda _module, _inputs, output: self.seen.append(output[0])
            )

    def take(self) -> list[torch.Tensor]:
        seen, self.seen = self.seen, []
        return seen


def evaluate(
    model: LlamaForCausalLM,
    windows: Iterable[torch.Tensor],
    schemes: Sequence[Scheme | None],
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two ``[schemes, prefixes]``: nats a byte of each continuation, and the error of attention outputs.

    The error is relative to the first scheme's outputs. windows: int64 ``[BATCH or fewer, PREFIX + CONTINUATION]``.
    """
    outputs = AttentionOutputs(model)
    losses, errors = [], []
    for window in windows:
        prefix, rest = window[:, :PREFIX], window[:, PREFIX:]
        cache = DynamicCache(config=model.config)
        computed = model(prefix, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        keys_values = [(layer.keys, layer.values) for layer in cache.layers]
        outputs.take()
        exact: list[torch.Tensor] = []
        for scheme in schemes:
            read = model(rest, **{CACHE_ARGUMENT: through(keys_values, scheme, block_size)})
            logits = torch.cat((computed.logits, read.logits[:, :-1]), dim=1)
            losses.append(cross_entropy(logits.transpose(1, 2), rest, reduction="none").mean(1))
            seen = outputs.take()
            exact = exact or seen
            moved = [(a - b).norm(dim=(1, 2)) / b.norm(dim=(1, 2)) for a, b in zip(seen, exact, strict=True)]
            errors.append(torch.stack(moved).mean(0))
    return tuple(
        torch.stack([torch.cat(found[at :: len(schemes)]) for at in range(len(schemes))])
        for found in (losses, errors)
    )


def report(
    losses: torch.Tensor, errors: torch.Tensor, schemes: Sequence[Scheme | None], block_size: int
) -> None:
    """Print a row for each scheme: its bits, its perplexity, the increase over fp16's, and the attention error."""
    pool = Pool.of(torch.zeros(1, LAYERS, 2, block_size, KV_HEADS, HEAD_DIM, dtype=torch.float16))
    print("scheme  bits a value  perplexity a byte     against fp16 ± standard error  attention error")
    for scheme, loss, error in zip(schemes, losses, errors, strict=True):
        bits = 16.0 if scheme is None else Quantized(pool, scheme).bits_per_value
        more = (loss - losses[0]).double()
        spread = float(more.std() / math.sqrt(len(more))) if len(more) > 1 else math.nan
        change = f"{math.expm1(more.mean()):+14.4%} ± {spread:.4%}"
        perplexity = math.exp(loss.mean())
        print(f"{scheme or 'fp16':6}  {bits:12.3f}  {perplexity:17.4f}  {change:>30}  {error.mean():15.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--prefixes", type=int, default=2800)
    parser.add_argument("--block-size", type=int, default=16, choices=(16, 32, 64, 128))
    parser.add_argument("--text", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = read_text(options.text)
    held_out = text[-len(text) // 5 :]
    if len(held_out) < PREFIX + CONTINUATION:
        parser.error(f"--text is {len(text):,} bytes; it takes at least {5 * (PREFIX + CONTINUATION):,}")
    model = small_model()
    print(f"training {sum(p.numel() for p in model.parameters()):,} parameters on {len(text):,} bytes")
    last = train(model, text[: -len(held_out)], options.steps)
    print(f"trained: {last / math.log(2):.2f} bits a byte at the end")
    stride = (len(held_out) - PREFIX - CONTINUATION) // options.prefixes
    starts = torch.arange(options.prefixes)[:, None] * stride + torch.arange(PREFIX + CONTINUATION)
    schemes: tuple[Scheme | None, ...] = (None, *get_args(Scheme))
    with torch.inference_mode():
        found = evaluate(model.eval(), held_out[starts].split(BATCH), schemes, options.block_size)
    print(
        f"{options.prefixes:,} prefixes of {PREFIX} held-out bytes in blocks of {options.block_size}, "
        f"{CONTINUATION} bytes read by each"
    )
    report(*found, schemes, options.block_size)


if __name__ == "__main__":
    main()
