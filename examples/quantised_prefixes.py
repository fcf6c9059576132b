"""What quantising cached prefixes costs: perplexity and attention error at fp16, FP8, INT8 and INT4.

    python examples/quantised_prefixes.py [--steps 300] [--prefixes 32] [--block-size 16] [--text FILE …]

Trains a small Llama (bytes as tokens, 3 layers, 4 query heads over 2 KV heads of 64) on local text, the Python
standard library's sources unless told otherwise, for a few minutes on a CPU. Then, for prefixes of held-out text:
their KV, computed once, go to blocks of a fp16 pool, through quantize and dequantize, and back into the model's
cache, which reads the next 64 bytes by them. So what is measured is the model on quantised prefixes with everything
else as it was. The baseline, fp16, is the same way through gather and scatter.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from radixkv_kernels import Pool, Quantized, dequantize, quantize
from radixkv_kernels.quantized import Scheme

PREFIX, CONTINUATION = 256, 64
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 3


def read_text(paths: Sequence[str]) -> torch.Tensor:
    """Bytes of the files, in the order of their names: int64 ``[n]``."""
    files = [Path(path) for path in paths] or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()


def small_model() -> LlamaForCausalLM:
    """A Llama of 2.5 million parameters, seeded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=HEADS * HEAD_DIM, intermediate_size=3 * HEADS * HEAD_DIM, head_dim=HEAD_DIM,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        max_position_embeddings=PREFIX + CONTINUATION, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, text: torch.Tensor, steps: int, batch: int = 8) -> float:
    """AdamW on random windows, one cycle of the learning rate; returns the mean loss of the last tenth."""
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
    """The cache after its KV were in blocks of a fp16 pool, quantised (or not) and back."""
    num_blocks = PREFIX // block_size
    pool = Pool.of(torch.zeros(num_blocks, LAYERS, 2, block_size, KV_HEADS, HEAD_DIM, dtype=torch.float16))
    for layer, sides in enumerate(keys_values):
        for side, tensor in enumerate(sides):
            pool.plane(layer, side).copy_(tensor[0].transpose(0, 1).unflatten(0, (num_blocks, block_size)))
    if scheme is not None:
        records = torch.empty(num_blocks, Quantized(pool, scheme).record_bytes, dtype=torch.uint8)
        quantize(pool, range(num_blocks), records, scheme)
        dequantize(records, pool, range(num_blocks), scheme)
    cache = DynamicCache()
    for layer in range(LAYERS):
        sides = [pool.plane(layer, side).flatten(0, 1).transpose(0, 1)[None].float() for side in (0, 1)]
        cache.update(*sides, layer)
    return cache


class AttentionOutputs:
    """Collects what each layer's attention puts out."""

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
    windows: Iterator[torch.Tensor],
    schemes: Sequence[Scheme | None],
    block_size: int,
) -> dict[Scheme | None, tuple[float, float]]:
    """By scheme: nats a byte of the continuations, and error of the attention outputs relative to fp16's."""
    outputs = AttentionOutputs(model)
    losses: dict[Scheme | None, list[float]] = {scheme: [] for scheme in schemes}
    errors: dict[Scheme | None, list[float]] = {scheme: [] for scheme in schemes}
    for window in windows:
        prefix, rest = window[None, :PREFIX], window[None, PREFIX:]
        computed = model(prefix, use_cache=True)
        keys_values = [(layer.keys, layer.values) for layer in computed.past_key_values.layers]
        outputs.take()
        exact: list[torch.Tensor] = []
        for scheme in schemes:
            read = model(rest, past_key_values=through(keys_values, scheme, block_size))
            logits = torch.cat((computed.logits[0, -1:], read.logits[0, :-1]))
            losses[scheme].append(cross_entropy(logits, rest[0]).item())
            seen = outputs.take()
            exact = exact or seen
            moved = [float((a - b).norm() / b.norm()) for a, b in zip(seen, exact, strict=True)]
            errors[scheme].append(sum(moved) / len(moved))
    return {scheme: (_mean(losses[scheme]), _mean(errors[scheme])) for scheme in schemes}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prefixes", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=16, choices=(16, 32, 64, 128))
    parser.add_argument("--text", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = read_text(options.text)
    held_out = text[-len(text) // 20 :]
    if len(held_out) < PREFIX + CONTINUATION:
        parser.error(f"--text is {len(text):,} bytes; it takes at least {20 * (PREFIX + CONTINUATION):,}")
    model = small_model()
    print(f"training {sum(p.numel() for p in model.parameters()):,} parameters on {len(text):,} bytes")
    last = train(model, text[: -len(held_out)], options.steps)
    print(f"trained: {last / math.log(2):.2f} bits a byte at the end")
    stride = (len(held_out) - PREFIX - CONTINUATION) // options.prefixes
    windows = (held_out[start * stride :][: PREFIX + CONTINUATION] for start in range(options.prefixes))
    with torch.inference_mode():
        found = evaluate(model.eval(), windows, (None, *get_args(Scheme)), options.block_size)
    base = found[None][0]
    print(
        f"{options.prefixes} prefixes of {PREFIX} held-out bytes in blocks of {options.block_size}, "
        f"{CONTINUATION} bytes read by each"
    )
    print("scheme  bits a value  perplexity a byte  against fp16  attention error")
    pool = Pool.of(torch.zeros(1, LAYERS, 2, options.block_size, KV_HEADS, HEAD_DIM, dtype=torch.float16))
    for scheme, (loss, error) in found.items():
        bits = 16.0 if scheme is None else Quantized(pool, scheme).bits_per_value
        change = math.exp(loss - base) - 1
        print(f"{scheme or 'fp16':6}  {bits:12.3f}  {math.exp(loss):17.4f}  {change:+12.3%}  {error:15.4f}")


if __name__ == "__main__":
    main()
