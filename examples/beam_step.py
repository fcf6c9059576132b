"""A beam step on the device: reorder over paged blocks beside index_select of the whole cache.

    python examples/beam_step.py [--device cuda] [--beams 4] [--prompt 1000] [--steps 64]

Beams over one long prompt take random parents, step by step, and write a row of KV each, as a decoder would. Once
paged: the prompt's whole blocks are shared, a step moves tables and copies tail blocks (radixkv_kernels.reorder). Once
as stock beam search keeps it: a contiguous cache of each beam, picked anew by index_select, layer by layer, and copied
once more for its new row. In the end both hold the same bytes, or the script fails. On a GPU the shape is
Llama-3-8B's, on a CPU a small one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from radixkv_kernels import Beams, backend, reorder

BLOCK_SIZE = 16
SHAPES = {"cuda": (32, 8, 128), "cpu": (8, 2, 64)}  # layers, KV heads, head_dim


class Paged:
    """Blocks in a pool; the prompt's are shared by all beams."""

    def __init__(self, prompt: torch.Tensor, num_beams: int, steps: int) -> None:
        layers, _, length, heads, dim = prompt.shape
        whole, held = length // BLOCK_SIZE, -(-length // BLOCK_SIZE)
        columns = -(-(length + steps) // BLOCK_SIZE)
        spare = num_beams * (columns - whole + 1)
        self.storage = prompt.new_zeros(held + spare, layers, 2, BLOCK_SIZE, heads, dim)
        for block in range(held):
            rows = prompt[:, :, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            self.storage[block, :, :, : rows.shape[2]] = rows
        self.beams = Beams(
            [range(held)] * num_beams, [length] * num_beams, [whole] * num_beams, range(held, held + spare),
            num_blocks=held + spare, block_size=BLOCK_SIZE, max_columns=columns, device=prompt.device,
        )  # fmt: skip

    def step(self, parents: torch.Tensor, rows: torch.Tensor) -> None:
        """rows: ``[num_beams, layers, 2, heads, dim]``, written where reorder made room; waits for nothing."""
        reorder(self.storage, self.beams, parents)
        last = (self.beams.lengths - 1).long()
        blocks = self.beams.tables.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0].long()
        self.storage[blocks, :, :, last % BLOCK_SIZE] = rows

    def read(self) -> list[torch.Tensor]:
        """``[layers, 2, length, heads, dim]`` of each beam."""
        books = self.beams.read()
        return [
            self.storage[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :length]
            for table, length in zip(books.tables, books.lengths, strict=True)
        ]


class Contiguous:
    """What stock beam search does: keys and values of each layer, ``[num_beams, heads, length, dim]``."""

    def __init__(self, prompt: torch.Tensor, num_beams: int, steps: int) -> None:
        layers, _, length, heads, dim = prompt.shape
        shape = (num_beams, length + steps, heads, dim)
        self.sides = [prompt.new_zeros(shape) for _ in range(2 * layers)]
        self.length = length
        for side, rows in zip(self.sides, prompt.flatten(0, 1), strict=True):
            side[:, :length] = rows

    def step(self, parents: torch.Tensor, rows: torch.Tensor) -> None:
        """index_select of all that the beams have, and a row more."""
        for index, side in enumerate(self.sides):
            side[:, : self.length] = side[:, : self.length].index_select(0, parents)
            side[:, self.length] = rows[:, index // 2, index % 2]
        self.length += 1

    def read(self) -> list[torch.Tensor]:
        """``[layers, 2, length, heads, dim]`` of each beam."""
        whole = torch.stack(self.sides).unflatten(0, (-1, 2))[:, :, :, : self.length]
        return list(whole.unbind(2))


def timed(
    step: Callable[[torch.Tensor, torch.Tensor], None], work: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """Median seconds of a step; on a GPU each is waited for, so the host's share is in it."""
    seconds = []
    for parents, rows in work:
        start = time.perf_counter()
        step(parents, rows)
        if parents.is_cuda:
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
    paged.beams.check()
    books = paged.beams.read()
    held = len({block_id for table in books.tables for block_id in table})
    token_bytes = layers * 2 * heads * dim * 2
    print(
        f"{options.beams} beams over {options.prompt} tokens, {options.steps} steps, {token_bytes:,} bytes a token"
    )
    print(f"path: {backend(paged.storage)} on {options.device}; the same KV in the end")
    rows = {"paged, reorder": held * BLOCK_SIZE, "contiguous, index_select": options.beams * books.lengths[0]}
    for (name, num_rows), median in zip(rows.items(), seconds, strict=True):
        print(f"{name:26}{median * 1e3:8.3f} ms a step, {num_rows * token_bytes / 2**20:8.1f} MiB held")
    print(f"times faster: {seconds[1] / seconds[0]:.1f}")


if __name__ == "__main__":
    main()
