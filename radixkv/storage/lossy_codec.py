"""Records of blocks with 8 bits a value: what the tiers keep with a lossy ``tier_dtype``.

    record   [ codes, a byte a value │ scales, float32, one a vector │ zeros up to a multiple of 64 bytes ]

A vector is the ``head_dim`` values of one head of one token, of the keys or the values of one layer. With m, its
largest magnitude, and x̂ = code × s, rounded to the pool's dtype:

    int8   scale s = m / 127    code = x / s, rounded      |x - x̂| ≤ m / 254
    fp8    scale s = m / 448    code = x / s, as e4m3      |x - x̂| ≤ max(|x| / 16, m / 458,752)

The bounds may be exceeded by 1 / 30,000 of themselves, and by the rounding to the pool's dtype. Vectors below 2⁻¹⁰⁰
become zeros. With fp8 in a float16 pool, so does each x̂ below 2⁻²⁰, where float16 is coarser than e4m3; that adds 2⁻²⁰
to the bound.

**A second round trip changes nothing**, so errors don't grow when what came back is kept again. s has 16 significant
bits, so code × s is exact in float32. Its last bit is always set, so neither code × s nor x / s lies halfway between
two numbers of 16 bits. (int8 records of ``radixkv_kernels.quantize`` are larger, and a second trip changes them.)

Vectors with a NaN, an infinity or 2¹²⁷ or more have a scale that isn't finite, which ``is_whole`` finds.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.storage.lossy_codec", "storage")

import math
from typing import Final

import torch

from radixkv.config import LOSSY_DTYPES, QUANTIZABLE
from radixkv.errors import ConfigError
from radixkv_kernels import Pool

_LARGEST: Final = {"int8": 127.0, "fp8": 448.0}
_ALIGNMENT: Final = 64
_SCALE_BYTES: Final = 4
_LAST_BIT: Final = 1 << 8
"""Of a float32, the last of its 16 first significant bits."""
_LEAST: Final = 2.0**-100
_MOST: Final = 2.0**127
_COARSE: Final = 2.0**-20
"""Below it numbers of float16 are less dense than those of e4m3 under any scale."""


class LossyCodec:
    """Turns blocks of ``pool`` into records of ``dtype``, ``"fp8"`` or ``"int8"``, and back, on the pool's device.

    ``tensors``: the pool's memory by blocks, each ``[num_blocks, …, head_dim]``. Raises ConfigError for another
    ``dtype``, and for a pool of other elements than float32, float16 and bfloat16.
    """

    def __init__(self, pool: Pool, dtype: str) -> None:
        if dtype not in LOSSY_DTYPES:
            raise ConfigError("tier_dtype", dtype, f"one of {', '.join(LOSSY_DTYPES)}")
        name = str(pool.dtype).removeprefix("torch.")
        if name not in QUANTIZABLE:
            raise ConfigError(
                "tier_dtype", dtype, f"'exact' for KV of {name}: only {', '.join(QUANTIZABLE)} can be"
            )
        self.dtype, self._of_values, self._device = dtype, pool.dtype, pool.device
        self.tensors = _tensors_of(pool)
        self._least = _COARSE if (dtype, name) == ("fp8", "float16") else _LEAST
        self._head_dim = pool.geometry.head_dim
        self._num_vectors = [math.prod(each.shape[1:-1]) for each in self.tensors]
        self._codes_bytes = sum(self._num_vectors) * self._head_dim
        self._scales_at = -(-self._codes_bytes // _SCALE_BYTES) * _SCALE_BYTES
        self._used_bytes = self._scales_at + sum(self._num_vectors) * _SCALE_BYTES
        self.record_bytes = -(-self._used_bytes // _ALIGNMENT) * _ALIGNMENT
        """Bytes of a record: ``head_dim`` + 4 a vector, rounded up to 64."""
        self.work_bytes = 4 * self._codes_bytes
        """Bytes of a block while it is encoded, at least."""

    def encode(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the records of blocks, int64 ``[n]`` on the device: uint8 ``[n, record_bytes]``. One pass."""
        n = len(blocks)
        parts = [each.index_select(0, blocks).reshape(n, -1, self._head_dim) for each in self.tensors]
        values = torch.cat(parts, dim=1).float()
        scales = self._scales(values)
        divisor = torch.where(scales > 0, scales, math.inf)  # what is divided by infinity is 0
        records = torch.zeros((n, self.record_bytes), dtype=torch.uint8, device=self._device)
        codes = self._codes(values.div_(divisor.unsqueeze(-1)), scales)
        records[:, : self._codes_bytes] = codes.view(n, -1)
        records[:, self._scales_at : self._used_bytes] = scales.view(torch.uint8).view(n, -1)
        return records

    def decode(self, records: torch.Tensor) -> list[torch.Tensor]:
        """Return the blocks of records, uint8 ``[n, record_bytes]``: for each of ``tensors`` its rows."""
        n = len(records)
        codes = records[:, : self._codes_bytes].contiguous().view(n, -1, self._head_dim)
        scales = records[:, self._scales_at : self._used_bytes].contiguous().view(torch.float32)
        stored = codes.view(torch.float8_e4m3fn if self.dtype == "fp8" else torch.int8)
        values = (stored.float() * scales.unsqueeze(-1)).to(self._of_values)
        parts = torch.split(values, self._num_vectors, dim=1)
        return [part.reshape(n, *each.shape[1:]) for part, each in zip(parts, self.tensors, strict=True)]

    def is_whole(self, records: torch.Tensor) -> bool:
        """Whether all values of blocks were finite. ``records``: on the CPU. O(scales)."""
        scales = records[:, self._scales_at : self._used_bytes].contiguous().view(torch.float32)
        return bool(scales.isfinite().all())

    def _scales(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scales of vectors ``[n, vectors, head_dim]``; infinity or NaN for those that can't be kept."""
        largest = values.abs().amax(-1)
        # With a Python number as the divisor, torch may multiply by its inverse, which rounds twice.
        quotient = largest / torch.full_like(largest, _LARGEST[self.dtype])
        bits = quotient.view(torch.int32)
        scales = (bits & -_LAST_BIT | _LAST_BIT).view(torch.float32)
        scales = torch.where(scales * _LARGEST[self.dtype] < self._least, 0.0, scales)
        return torch.where(largest < _MOST, scales, math.inf)

    def _codes(self, scaled: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the codes of ``x / s``, which it overwrites, as uint8."""
        most = _LARGEST[self.dtype]
        if self.dtype == "int8":
            return scaled.round_().clamp_(-most, most).to(torch.int8).view(torch.uint8)
        codes = scaled.clamp_(-most, most).to(torch.float8_e4m3fn)
        bits = codes.view(torch.uint8)
        if self._least == _COARSE:
            bits.masked_fill_(codes.float().mul_(scales.unsqueeze(-1)).abs_() < _COARSE, 0)
        return bits


def _tensors_of(pool: Pool) -> list[torch.Tensor]:
    if pool.storage is not None:
        return [pool.storage]
    layers, sides = range(pool.num_layers), range(pool.planes_per_layer)
    return [pool.plane(layer, side) for layer in layers for side in sides]
