"""A beam step on the device: beams lent to it, over paged blocks, beside index_select of the whole cache.

    python examples/beam_step.py [--device cuda] [--beams 4] [--prompt 1000] [--steps 64]

Beams over one long prompt take random parents, step by step, and each writes a row of KV, as a decoder would. This
runs in two ways:

- Paged: the beams share the prompt's whole blocks. A step changes tables and copies tail blocks (PrefixCache.lend).
- Contiguous, as in a common beam search: each beam has a contiguous cache. index_select copies it layer by layer, and
  another copy adds the new row.

At the end both must hold the same bytes, or the script fails. On a GPU the shape is Llama-3-8B's, on a CPU a small
one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache, audit
from radixkv_kernels import backend

BLOCK_SIZE = 16
SHAPES = {"cuda": (32, 8, 128), "cpu": (8, 2, 64)}  # layers, KV heads, head_dim


class Paged:
    """Sequences of a prefix cache that share the prompt's blocks, and are lent to the device."""

    def __init__(self, prompt: torch.Tensor, num_beams: int, steps: int) -> None:
        layers, _, length, heads, dim = prompt.shape
        num_blocks = -(-length // BLOCK_SIZE) + num_beams * (-(-steps // BLOCK_SIZE) + 2)
        layout = KVLayout(layers, heads, dim, "float16")
        self.cache = PrefixCache(CacheConfig(num_blocks, BLOCK_SIZE, layout, str(prompt.device)))
        self.storage = self.cache.storage.data
        first = self.cache.open(Namespace("example", "random"), range(length))
        for at, block in enumerate(first.block_table.tolist()):
            rows = prompt[:, :, at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
            self.storage[block, :, :, : rows.shape[2]] = rows
        first.commit(length)
        self.sequences = [first, *first.fork(num_beams - 1)]
        self.beams = self.cache.lend(self.sequences, steps)

    def step(self, parents: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Do a step without waiting, and write the new rows: ``[num_beams, layers, 2, heads, dim]``."""
        self.beams.step(parents, token_ids)
        blocks, offsets = self.beams.slots()
        self.storage[blocks, :, :, offsets] = rows

    def read(self) -> list[torch.Tensor]:
        """Return ``[layers, 2, length, heads, dim]`` of each beam, by the tables that the host read back."""
        self.beams.reconcile()
        return [
            self.storage[sequence.block_table.tolist()]
            .permute(1, 2, 0, 3, 4, 5)
            .flatten(2, 3)[:, :, : sequence.num_tokens]
            for sequence in self.sequences
        ]


class Contiguous:
    """A common beam search: keys and values of each layer, ``[num_beams, heads, length, dim]``."""

    def __init__(self, prompt: torch.Tensor, num_beams: int, steps: int) -> None:
        layers, _, length, heads, dim = prompt.shape
        shape = (num_beams, length + steps, heads, dim)
        self.sides = [prompt.new_zeros(shape) for _ in range(2 * layers)]
        self.length = length
        for side, rows in zip(self.sides, prompt.flatten(0, 1), strict=True):
            side[:, :length] = rows

    def step(self, parents: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Select the whole cache of each beam's parent, and add a row."""
        for index, side in enumerate(self.sides):
            side[:, : self.length] = side[:, : self.length].index_select(0, parents)
            side[:, self.length] = rows[:, index // 2, index % 2]
        self.length += 1

    def read(self) -> list[torch.Tensor]:
        """Return ``[layers, 2, length, heads, dim]`` of each beam."""
        whole = torch.stack(self.sides).unflatten(0, (-1, 2))[:, :, :, : self.length]
        return list(whole.unbind(2))


def timed(step: Callable[..., None], work: list[tuple[torch.Tensor, ...]]) -> float:
    """Median seconds of a step. On a GPU each step is awaited, so the time includes the host's part."""
    seconds = []
    for tensors in work:
        start = time.perf_counter()
        step(*tensors)
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=tuple(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers, heads, dim = SHAPES[options.device]
    torch.manual_seed(0)
    prompt = torch.randn(layers, 2, options.prompt, heads, dim, dtype=torch.float16).to(options.device)
    work = [
        (
            torch.randint(0, options.beams, (options.beams,), dtype=torch.int32).to(options.device),
            torch.randint(0, 32_000, (options.beams,)).to(options.device),
            torch.randn(options.beams, layers, 2, heads, dim, dtype=torch.float16).to(options.device),
        )
        for _ in range(options.steps)
    ]
    paged = Paged(prompt, options.beams, options.steps)
    stock = Contiguous(prompt, options.beams, options.steps)
    seconds = [timed(paged.step, work), timed(stock.step, work)]
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(paged.read(), stock.read(), strict=True))
    if not same:
        raise SystemExit("the two caches differ")
    audit.check(paged.cache)
    held = len({block_id for sequence in paged.sequences for block_id in sequence.block_table.tolist()})
    num_rows = paged.sequences[0].num_tokens
    token_bytes = layers * 2 * heads * dim * 2
    print(
        f"{options.beams} beams over {options.prompt} tokens, {options.steps} steps, {token_bytes:,} bytes a token"
    )
    print(f"path: {backend(paged.storage)} on {options.device}; the same KV in the end")
    rows = {"paged, lent beams": held * BLOCK_SIZE, "contiguous, index_select": options.beams * num_rows}
    for (name, size), median in zip(rows.items(), seconds, strict=True):
        print(f"{name:26}{median * 1e3:8.3f} ms a step, {size * token_bytes / 2**20:8.1f} MiB held")
    print(f"times faster: {seconds[1] / seconds[0]:.1f}")


if __name__ == "__main__":
    main()
