"""The Triton kernel of fork_blocks: one launch that copies the valid rows of every pair, layer, K and V.

A block is ``num_layers * 2`` planes of ``block_size`` rows, each plane contiguous, so the valid rows of a
plane are one run from its start:

    plane   [ row 0 | row 1 | … | row num_rows-1 | … row block_size-1 ]
            └────────── copied ─────────────────┘ └─── untouched ───┘

A program copies one chunk (at most MAX_CHUNK_WORDS words) of one plane of one pair; words beyond the valid
rows are masked, which costs no memory traffic. Words are int32 where a row is a whole number of them and
the base is aligned, otherwise bytes. Row and plane sizes are compile-time constants: Triton then knows that
offsets and masks come in multiples of them, and makes 16-byte loads and stores wherever a row has a multiple
of 16 bytes. A layout is compiled once, at its first launch (or from Triton's disk cache).

Importing this module imports triton, and so fixes whether this process interprets or compiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from radixkv_kernels.checks import ForkPairs

MAX_CHUNK_WORDS = 4096
MAX_NUM_WARPS = 4


class Geometry(NamedTuple):
    """Compile-time constants of a layout, in words of ``word_bytes`` (4 or 1)."""

    word_bytes: int
    row_words: int
    plane_words: int
    num_planes: int
    chunk_words: int

    @property
    def num_warps(self) -> int:
        """As many as have 16 bytes a thread: more would narrow the loads of a short plane."""
        return min(MAX_NUM_WARPS, max(1, self.chunk_words // 128))


@triton.jit  # type: ignore[untyped-decorator]
def fork_kernel(
    words: tl.tensor,  # pointer to the storage's words
    table: tl.tensor,  # pointer to int32 [num_pairs, 3]: source, target, rows
    ROW_WORDS: tl.constexpr,
    PLANE_WORDS: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
) -> None:
    num_chunks: tl.constexpr = (PLANE_WORDS + CHUNK_WORDS - 1) // CHUNK_WORDS
    program = tl.program_id(0)
    chunk = program % num_chunks
    plane = (program // num_chunks) % NUM_PLANES
    pair = program // (num_chunks * NUM_PLANES)
    source = tl.load(table + pair * 3).to(tl.int64)
    target = tl.load(table + pair * 3 + 1).to(tl.int64)
    num_words = tl.load(table + pair * 3 + 2) * ROW_WORDS
    offsets = chunk * CHUNK_WORDS + tl.arange(0, CHUNK_WORDS)
    is_valid = offsets < num_words
    # 64 bits: a pool of 2**31 words is 8 GiB, and pools are larger.
    read = words + (source * NUM_PLANES + plane) * PLANE_WORDS
    write = words + (target * NUM_PLANES + plane) * PLANE_WORDS
    tl.store(write + offsets, tl.load(read + offsets, mask=is_valid), mask=is_valid)


def geometry(storage: torch.Tensor) -> Geometry:
    """The constants that ``fork_kernel`` is compiled with for this storage."""
    _, num_layers, _, block_size, num_kv_heads, head_dim = storage.shape
    row_bytes = num_kv_heads * head_dim * storage.element_size()
    offset_bytes = int(storage.storage_offset()) * storage.element_size()
    is_aligned = all(number % 4 == 0 for number in (row_bytes, offset_bytes, storage.data_ptr()))
    word_bytes = 4 if is_aligned else 1
    row_words = row_bytes // word_bytes
    plane_words = block_size * row_words
    chunk_words = min(triton.next_power_of_2(plane_words), MAX_CHUNK_WORDS)
    return Geometry(word_bytes, row_words, plane_words, num_layers * 2, chunk_words)


def upload(pairs: ForkPairs, device: torch.device) -> torch.Tensor:
    """The pairs on ``device``, as int32 ``[num_pairs, 3]``; enqueued, never waited for."""
    host = torch.tensor(pairs, dtype=torch.int32).T.contiguous()
    if device.type == "cpu":
        return host
    # From pinned memory the copy is asynchronous, and torch keeps the buffer until the stream has read it.
    return host.pin_memory().to(device, non_blocking=True)


def launch(storage: torch.Tensor, table: torch.Tensor) -> None:
    """Enqueues the copies of a non-empty ``table`` that ``upload`` made on the storage's device: one launch."""
    shape = geometry(storage)
    words = storage.view(-1).view(torch.int32 if shape.word_bytes == 4 else torch.int8)
    num_programs = len(table) * shape.num_planes * triton.cdiv(shape.plane_words, shape.chunk_words)
    constants = (shape.row_words, shape.plane_words, shape.num_planes, shape.chunk_words)
    if storage.is_cpu:
        fork_kernel[(num_programs,)](words, table, *constants)
        return
    with torch.cuda.device(storage.device):
        fork_kernel[(num_programs,)](words, table, *constants, num_warps=shape.num_warps)
