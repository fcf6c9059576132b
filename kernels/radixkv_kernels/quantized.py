"""Quantized: the memory layout of quantised blocks, codes first and their scales after them.

    record   [ codes of all planes | parameters of all planes ]     one block, decodable alone

    scheme   code    parameters                                      for each
    fp8      e4m3    scale, float32                                  head of a block
    int8     8 bits  scale and minimum, of the pool's dtype          channel of a key head; token of a value head
    int4     4 bits  the same                                        the same

Keys are quantised by channel, because some channels of keys are large in every token. Values are quantised by token,
as in KIVI (Liu et al., 2024). A group of keys is the ``block_size`` values of one channel. A group of values is the
``head_dim`` values of one token. MLA's single latent is quantised by token. The real bits per value are:

    fp8              8 + 32 / (block_size × head_dim) bits
    int, b bits      keys b + 2 p / block_size, values b + 2 p / head_dim        p: bits of the pool's dtype

For blocks of 16 tokens, 128 channels and 16-bit pools that is 8.02 for fp8, 9.13 for int8 (keys 10, values 8.25) and
5.13 for int4 (keys 6, values 4.25). This is 2.0, 1.8 and 3.1 times less than 16 bits. With blocks of 64 tokens, int4
needs 4.4. ``bits_per_value`` is this number, including the padding of the record to 16 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from radixkv_kernels.checks import InputError
from radixkv_kernels.pool import Pool

Scheme = Literal["fp8", "int8", "int4"]
QUANTIZABLE = (torch.float32, torch.float16, torch.bfloat16)
MAX_TILE = 1 << 15


@dataclass(frozen=True)
class Quantized:
    """The record of a block of ``pool`` under ``scheme``: sizes in bytes, and views into records.

    Raises InputError for an unknown scheme, for a dtype other than float32, float16 and bfloat16, and for int4 with an
    odd ``head_dim``. Also for heads of more than 32,768 values a block, with both sizes rounded up to powers of 2.
    """

    pool: Pool
    scheme: Scheme

    def __post_init__(self) -> None:
        if self.scheme not in get_args(Scheme):
            raise InputError("scheme", self.scheme, f"one of {', '.join(get_args(Scheme))}")
        if self.pool.dtype not in QUANTIZABLE:
            raise InputError("pool.dtype", str(self.pool.dtype), "float32, float16 or bfloat16")
        shape = self.pool.geometry
        if self.scheme == "int4" and shape.head_dim % 2:
            raise InputError("pool.head_dim", shape.head_dim, "an even number for int4")
        if (1 << (shape.block_size - 1).bit_length()) * (1 << (shape.head_dim - 1).bit_length()) > MAX_TILE:
            sizes = (shape.block_size, shape.head_dim)
            raise InputError("(block_size, head_dim)", sizes, f"a product of at most {MAX_TILE}")

    @property
    def levels(self) -> int:
        """The largest code of int8 and int4; the smallest is 0."""
        return 15 if self.scheme == "int4" else 255

    @property
    def code_dim(self) -> int:
        """Bytes of the codes of one head of one row. int4: byte d has channel d low, d + head_dim / 2 high."""
        return self.pool.geometry.head_dim // (2 if self.scheme == "int4" else 1)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The dtype of scales and minima. Minima are values of the pool, so they are exact."""
        return torch.float32 if self.scheme == "fp8" else self.pool.dtype

    @property
    def codes_bytes(self) -> int:
        """Bytes of a record before its parameters, a multiple of 16."""
        shape = self.pool.geometry
        return _padded(len(self.pool.addresses) * shape.block_size * shape.num_heads * self.code_dim)

    def num_parameters(self, side: int) -> int:
        """The number of scales of one plane, and of its minima. Side 0 is keys, 1 values."""
        shape = self.pool.geometry
        if self.scheme == "fp8":
            return shape.num_heads
        return shape.num_heads * (shape.head_dim if self.is_by_channel(side) else shape.block_size)

    def is_by_channel(self, side: int) -> bool:
        """Whether groups of this side's planes are channels (keys) instead of tokens (values, MLA's latent)."""
        return self.scheme != "fp8" and side == 0 and self.pool.planes_per_layer == 2

    def plane_bytes(self, side: int) -> int:
        """Bytes of the parameters of one plane."""
        kinds = 1 if self.scheme == "fp8" else 2
        return kinds * self.num_parameters(side) * self.parameter_dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of the parameters of one layer."""
        return sum(self.plane_bytes(side) for side in range(self.pool.planes_per_layer))

    @property
    def record_bytes(self) -> int:
        """Bytes of a record, a multiple of 16."""
        return _padded(self.codes_bytes + self.pool.num_layers * self.layer_bytes)

    @property
    def bits_per_value(self) -> float:
        """Bits per quantised value, including parameters and padding."""
        return 8 * self.record_bytes / math.prod(self.pool.block_shape)

    def codes(self, records: torch.Tensor) -> torch.Tensor:
        """A view of records: uint8 ``[n, num_layers, planes_per_layer, block_size, num_heads, code_dim]``."""
        *outer, _ = self.pool.block_shape
        num_bytes = math.prod(outer) * self.code_dim
        return records[:, :num_bytes].view(-1, *outer, self.code_dim)

    def parameters(self, records: torch.Tensor, layer: int, side: int) -> torch.Tensor:
        """A view of one plane's scales, then minima.

        Shape: ``[n, 1 or 2, num_heads, head_dim]`` by channel, ``[n, 1 or 2, block_size, num_heads]`` by token, ``[n,
        1, num_heads]`` for fp8.
        """
        shape = self.pool.geometry
        start = self.codes_bytes + layer * self.layer_bytes + (self.plane_bytes(0) if side else 0)
        flat = records[:, start : start + self.plane_bytes(side)].view(self.parameter_dtype)
        if self.scheme == "fp8":
            return flat.view(-1, 1, shape.num_heads)
        if self.is_by_channel(side):
            return flat.view(-1, 2, shape.num_heads, shape.head_dim)
        return flat.view(-1, 2, shape.block_size, shape.num_heads)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
