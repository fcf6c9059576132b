"""Records of 8 bits a value: the stated bounds, a second round trip that changes nothing, and what isn't finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import ConfigError
from radixkv.storage.lossy_codec import LossyCodec
from radixkv_kernels import Pool
from tests.kernels.pools import LAYOUTS, Shape

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EXPONENTS = {torch.float32: (-45.0, 37.5), torch.float16: (-8.0, 4.5), torch.bfloat16: (-40.0, 37.5)}


def pool_of(values: torch.Tensor) -> Pool:
    """A pool with one vector a row of ``values``, ``[blocks, vectors, head_dim]``."""
    return Pool.of(values.unsqueeze(1).unsqueeze(1).unsqueeze(3).contiguous())


def of_many_sizes(seed: int, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """Vectors of all magnitudes that the dtype has, some with values of many magnitudes, some with zeros."""
    noise = torch.Generator().manual_seed(seed)
    least, most = EXPONENTS[dtype]
    exponents = torch.rand(8, 16, 1, generator=noise).double() * (most - least) + least
    values = torch.randn(8, 16, head_dim, generator=noise).double().clamp(-4, 4) * 10.0**exponents
    values[:3] *= 10.0 ** (-6 * torch.rand(3, 16, head_dim, generator=noise).double())
    values[3, :, ::2] = 0.0
    values[4, ::3] = 0.0
    limit = torch.finfo(dtype)
    return values.clamp(limit.min, limit.max).to(dtype)


def encoded(pool: Pool, dtype: str) -> tuple[LossyCodec, torch.Tensor]:
    codec = LossyCodec(pool, dtype)
    return codec, codec.encode(torch.arange(pool.geometry.num_blocks))


def bound(values: torch.Tensor, dtype: str, pool_dtype: torch.dtype) -> torch.Tensor:
    """The allowed errors of float64 values, as the module states them."""
    largest = values.abs().amax(-1, keepdim=True)
    most = largest / 254 if dtype == "int8" else torch.maximum(values.abs() / 16, largest / 458_752)
    limits = torch.finfo(pool_dtype)
    rounding = values.abs() * limits.eps * (17 / 16) + limits.smallest_normal * limits.eps
    least = 2.0**-20 if (dtype, pool_dtype) == ("fp8", torch.float16) else 2.0**-100
    return most * (1 + 1 / 30_000) + rounding + least


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), head_dim=st.sampled_from((1, 3, 16, 65)))
def test_errors_stay_within_the_bound_and_do_not_grow(
    pool_dtype: torch.dtype, dtype: str, seed: int, head_dim: int
) -> None:
    values = of_many_sizes(seed, pool_dtype, head_dim)
    codec, records = encoded(pool_of(values), dtype)
    assert codec.is_whole(records)
    (once,) = codec.decode(records)
    once = once.reshape(values.shape)
    error = (once.double() - values.double()).abs()
    assert (error <= bound(values.double(), dtype, pool_dtype)).all()
    again, records_of_once = encoded(pool_of(once), dtype)
    assert torch.equal(records_of_once, records), "a second round trip changes nothing"
    assert torch.equal(again.decode(records_of_once)[0].reshape(values.shape), once)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_every_half_survives_a_second_trip(dtype: str) -> None:
    """All float16 numbers beside many largest ones, down to the smallest."""
    numbers = torch.arange(0, 0x7C00, dtype=torch.int16).view(torch.float16)[: 31_700 // 50 * 50]
    for code in range(1, 0x7C00, 1_009):
        largest = torch.tensor([code], dtype=torch.int16).view(torch.float16)
        values = torch.minimum(numbers, largest).view(-1, 1, 50).clone()
        values[..., 0] = largest
        codec, records = encoded(pool_of(values), dtype)
        (once,) = codec.decode(records)
        assert torch.equal(encoded(pool_of(once.reshape(values.shape)), dtype)[1], records)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=str)
def test_the_formula(pool_dtype: torch.dtype, dtype: str) -> None:
    """Values that have codes come back as they were; between two codes, the nearer one counts."""
    most = {"int8": 127.0, "fp8": 448.0}[dtype]
    given = [most, -most, 0.0, 1.0, -3.0, 26.0] if dtype == "fp8" else [most, -most, 0.0, 1.0, -3.0, 26.4]
    values = torch.tensor(given).to(pool_dtype).view(1, 1, 6)
    codec, records = encoded(pool_of(values), dtype)
    found = codec.decode(records)[0].flatten().double()
    wanted = torch.tensor([most, -most, 0.0, 1.0, -3.0, 26.0], dtype=torch.float64)
    assert torch.allclose(found, wanted, rtol=2.0**-8, atol=0.0)
    assert codec.record_bytes == 64 and records.shape == (1, 64)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=str)
def test_zeros_and_extreme_values(pool_dtype: torch.dtype, dtype: str) -> None:
    limits = torch.finfo(pool_dtype)
    largest = min(limits.max, 1.6e38)
    rows = [
        [0.0] * 4,
        [-0.0] * 4,
        [largest, -largest, largest / 2, 0.0],
        [limits.tiny, 0.0, -limits.tiny, 0.0],
    ]
    values = torch.tensor(rows).to(pool_dtype).unsqueeze(1)
    codec, records = encoded(pool_of(values), dtype)
    assert codec.is_whole(records)
    found = codec.decode(records)[0].reshape(4, 4).double()
    assert not found[:2].any() and found.isfinite().all()
    assert torch.allclose(found[2], values[2, 0].double(), rtol=1 / 16)
    assert (found[3] - values[3, 0].double()).abs().max() <= 2.0**-19


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 2.0**127])
def test_what_is_not_finite_is_found(pool_dtype: torch.dtype, dtype: str, wrong: float) -> None:
    values = torch.ones(3, 5, 4, dtype=pool_dtype)
    codec, records = encoded(pool_of(values), dtype)
    assert codec.is_whole(records)
    values[1, 3, 2] = wrong
    codec, records = encoded(pool_of(values), dtype)
    assert not codec.is_whole(records)
    assert [codec.is_whole(records[at : at + 1]) for at in range(3)] == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=str)
def test_a_gpu_makes_the_same_records_and_values(pool_dtype: torch.dtype, dtype: str) -> None:
    """So what one device kept may come back to another, and the bounds hold there too."""
    values = of_many_sizes(5, pool_dtype, 64)
    codec, records = encoded(pool_of(values), dtype)
    pool = Pool.of(values.cuda().unsqueeze(1).unsqueeze(1).unsqueeze(3).contiguous())
    on_gpu = LossyCodec(pool, dtype)
    assert torch.equal(on_gpu.encode(torch.arange(8, device="cuda")).cpu(), records)
    assert torch.equal(on_gpu.decode(records.cuda())[0].cpu(), codec.decode(records)[0])


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_a_pool(layout: str, dtype: str) -> None:
    """The same values have the same records, and come back to their own places."""
    shape = Shape(layout, 5, 2, 4, 3, 8, torch.float16, 7)
    pool, memory = shape.pool()
    noise = torch.Generator().manual_seed(3)
    for tensor in memory:
        tensor.copy_(torch.randn(tensor.shape, generator=noise))
    planes = [
        pool.plane(layer, side) for layer in range(pool.num_layers) for side in range(pool.planes_per_layer)
    ]
    codec = LossyCodec(pool, dtype)
    records = codec.encode(torch.tensor([3, 1]))
    before = [plane[[3, 1]].double() for plane in planes]
    for tensor, rows in zip(codec.tensors, codec.decode(records), strict=True):
        tensor.index_copy_(0, torch.tensor([0, 4]), rows)
    for plane, values in zip(planes, before, strict=True):
        error = (plane[[0, 4]].double() - values).abs()
        assert (error <= bound(values, dtype, torch.float16)).all() and error.any()
        assert torch.equal(plane[[3, 1]].double(), values), "others are as they were"
    num_vectors = len(planes) * shape.block_size * pool.geometry.num_heads
    assert 0 <= codec.record_bytes - num_vectors * (pool.geometry.head_dim + 4) < 64


@pytest.mark.parametrize(
    ("pool_dtype", "dtype", "named"),
    [
        (torch.float64, "int8", "float64"),
        (torch.int8, "fp8", "int8"),
        (torch.float8_e4m3fn, "int8", "float8_e4m3fn"),
        (torch.float16, "exact", "'exact'"),
        (torch.float16, "int4", "'int4'"),
        (torch.float16, "", "fp8, int8"),
    ],
)
def test_what_is_refused(pool_dtype: torch.dtype, dtype: Any, named: str) -> None:
    with pytest.raises(ConfigError, match="tier_dtype") as caught:
        LossyCodec(Pool([torch.zeros(2, 4, 1, 8).to(pool_dtype)]), dtype)
    assert named in str(caught.value)
