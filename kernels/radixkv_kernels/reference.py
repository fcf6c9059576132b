"""The truth: every kernel in plain torch, written to be believed rather than to be fast.

Nothing is checked here; callers have done that. Each function works on any torch device, pool and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv_kernels.pool import PoolLike, as_pool
from radixkv_kernels.quantized import Quantized

LARGEST_E4M3 = 448.0
LEAST_LARGEST = 1e-30
"""A head whose values are all smaller is quantised to zeros."""


def fork_blocks(pool: PoolLike, src: Sequence[int], dst: Sequence[int], num_rows: Sequence[int]) -> None:
    """Copies the first ``num_rows[i]`` rows of block ``src[i]`` into block ``dst[i]``, every plane.

    One ``copy_`` a pair in block-major storage, one a pair and plane in others.
    """
    for view in as_pool(pool).views:
        for source, target, rows in zip(src, dst, num_rows, strict=True):
            view[target, :rows].copy_(view[source, :rows])


def gather(pool: PoolLike, block_ids: Sequence[int], staging: torch.Tensor) -> None:
    """Block ``block_ids[i]`` becomes ``staging[i]``, converted if dtypes differ: one ``copy_`` a block and view."""
    for view, staged in as_pool(pool).beside(staging):
        for index, block_id in enumerate(block_ids):
            staged[index].copy_(view[block_id])


def scatter(staging: torch.Tensor, pool: PoolLike, block_ids: Sequence[int]) -> None:
    """``staging[i]`` becomes block ``block_ids[i]``, converted if dtypes differ: one ``copy_`` a block and view."""
    for view, staged in as_pool(pool).beside(staging):
        for index, block_id in enumerate(block_ids):
            view[block_id].copy_(staged[index])


def scrub(pool: PoolLike, block_ids: Sequence[int]) -> None:
    """Zeroes the bytes of whole blocks: one ``zero_`` a block and view."""
    for view in as_pool(pool).views:
        for block_id in block_ids:
            view[block_id].zero_()  # every dtype's zero is zero bytes


def quantize(form: Quantized, block_ids: Sequence[int], records: torch.Tensor) -> None:
    """Block ``block_ids[i]`` becomes ``records[i]``: plane by plane, in float32."""
    codes = form.codes(records)
    for layer in range(form.pool.num_layers):
        for side in range(form.pool.planes_per_layer):
            values = form.pool.plane(layer, side)[list(block_ids)].float()
            parameters = form.parameters(records, layer, side)
            if form.scheme == "fp8":
                largest = values.abs().amax((1, 3)).clamp(min=LEAST_LARGEST)
                parameters[:, 0] = largest / LARGEST_E4M3
                inverse = torch.full_like(largest, LARGEST_E4M3).div(
                    largest
                )  # a number / tensor rounds twice
                scaled = values * inverse[:, None, :, None]
                scaled = scaled.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
                codes[:, layer, side] = scaled.view(torch.uint8)
                continue
            axis = 1 if form.is_by_channel(side) else 3
            least, largest = values.amin(axis), values.amax(axis)
            parameters[:, 0] = _scale(largest - least, form.levels, form.parameter_dtype)
            parameters[:, 1] = least
            inverse = 1 / parameters[:, 0].float().unsqueeze(axis)
            steps = ((values - least.unsqueeze(axis)) * inverse + 0.5).floor().clamp(0, form.levels)
            codes[:, layer, side] = (
                _packed(steps.to(torch.uint8)) if form.scheme == "int4" else steps.to(torch.uint8)
            )


def dequantize(form: Quantized, block_ids: Sequence[int], records: torch.Tensor) -> None:
    """``records[i]`` becomes block ``block_ids[i]``: plane by plane, in float32, rounded to the pool's dtype."""
    codes = form.codes(records)
    for layer in range(form.pool.num_layers):
        for side in range(form.pool.planes_per_layer):
            parameters = form.parameters(records, layer, side).float()
            plane = codes[:, layer, side]
            if form.scheme == "fp8":
                values = (
                    plane.contiguous().view(torch.float8_e4m3fn).float() * parameters[:, 0, None, :, None]
                )
            else:
                steps = _unpacked(plane) if form.scheme == "int4" else plane
                axis = 1 if form.is_by_channel(side) else 3
                scale, least = parameters[:, 0].unsqueeze(axis), parameters[:, 1].unsqueeze(axis)
                values = steps.float() * scale + least
            form.pool.plane(layer, side)[list(block_ids)] = values.to(form.pool.dtype)


def _scale(width: torch.Tensor, levels: int, dtype: torch.dtype) -> torch.Tensor:
    """A step of ``dtype`` so large that ``levels`` of it reach over ``width``, whichever way it is rounded."""
    return (width * (1 / levels) * (1 + 2 * torch.finfo(dtype).eps) + smallest_step(dtype)).to(dtype)


def smallest_step(dtype: torch.dtype) -> float:
    """Added to a scale, so that none is zero and none too small for having been rounded."""
    return 2.0**-24 if dtype == torch.float16 else 2.0**-126


def _packed(steps: torch.Tensor) -> torch.Tensor:
    low, high = steps.chunk(2, dim=-1)
    return low | (high << 4)


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat((codes & 15, codes >> 4), dim=-1)
