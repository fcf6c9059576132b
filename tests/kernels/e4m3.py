"""Exhaustive tests of the integer arithmetic for e4m3. Imported only where Triton can run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.quantize_triton import decode_e4m3, encode_e4m3


@triton.jit
def encode_all(values, codes, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(codes + at, encode_e4m3(tl.load(values + at), False))


@triton.jit
def decode_all(codes, values, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(values + at, decode_e4m3(tl.load(codes + at), False))


def count_wrong_codes(device: str) -> int:
    """The number of codes that differ from torch's, over every float16 and bfloat16 within ±448 and their float32
    neighbours.
    """
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = torch.cat([words.view(torch.float16).float(), words.view(torch.bfloat16).float()])
    values = torch.cat([values, values * (1 + 2.0**-23), values * (1 - 2.0**-23)])
    values = torch.where(values.abs() <= 448, values, 0.0).to(device)  # NaN too
    codes = torch.empty(len(values), dtype=torch.uint8, device=device)
    encode_all[(len(values) // 32768,)](values, codes, 32768)
    return int((codes != values.to(torch.float8_e4m3fn).view(torch.uint8)).sum())


def wrong_values(device: str) -> list[int]:
    """The codes that decode to other values than torch's."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    values = torch.empty(256, device=device)
    decode_all[(1,)](codes, values, 256)
    return (values != codes.view(torch.float8_e4m3fn).float()).nonzero().flatten().tolist()
