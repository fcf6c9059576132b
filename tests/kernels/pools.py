"""Pools of every layout, filled with noise, and access to their bytes, for all kernel tests.

``IS_INTERPRETING`` and ``DEVICES`` say which path this process tests. By default that is the torch path, and CUDA if
there is a GPU. With TRITON_INTERPRET=1 it is Triton's kernels in the interpreter; ``test_interpreter.py`` starts such a
process.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import radixkv_kernels
from radixkv_kernels import Pool

torch.set_num_threads(1)
ON_CUDA = torch.cuda.is_available()
IS_INTERPRETING = radixkv_kernels.backend(torch.empty(1)) == "triton"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if ON_CUDA and not IS_INTERPRETING else ["cpu"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
LAYOUTS = ["block-major", "latent-major", "apart", "together-0", "together-1", "hnd", "packed", "latent"]
IS_SHORT = IS_INTERPRETING and settings().max_examples < 100
"""Whether a test should do less, because the interpreter is slow. Not where examples vary, as before a release."""
FEW_LAYOUTS = ["hnd"] if IS_SHORT else LAYOUTS
"""For tests of the same code in each layout. Generated tests draw all layouts."""


def examples(count: int) -> settings:
    """Settings for ``count`` examples on the torch path, and for fewer in the interpreter."""
    few = max(5, count // (20 if IS_SHORT else 4)) if IS_INTERPRETING else count
    return settings(max_examples=few, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Shape(NamedTuple):
    """The shape of a pool: its sizes, its memory layout, and the seed of its noise."""

    layout: str
    num_blocks: int
    num_layers: int
    block_size: int
    heads: int
    dim: int
    dtype: torch.dtype = torch.float16
    seed: int = 0

    def pool(self, device: str = "cpu") -> tuple[Pool, list[torch.Tensor]]:
        """The pool, and the tensors that are its memory. They hold random bytes, so NaNs with every payload occur."""
        n, layers, rows, heads, dim = self[1:6]
        shapes = {
            "block-major": [(n, layers, 2, rows, heads, dim)],
            "latent-major": [(n, layers, 1, rows, 1, dim)],
            "apart": [(n, rows, heads, dim)] * (2 * layers),
            "together-0": [(2, n, rows, heads, dim)] * layers,
            "together-1": [(n, 2, rows, heads, dim)] * layers,
            "hnd": [(n, 2, heads, rows, dim)] * layers,
            "packed": [(n, rows, heads, 2 * dim)] * layers,  # each head's key and value side by side
            "latent": [(n, rows, dim)] * layers,
        }
        noise = np.random.default_rng(self.seed)
        memory = [self._noise(noise, shape).to(device) for shape in shapes[self.layout]]
        return self._adopt(memory), memory

    def _noise(self, noise: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        data = noise.integers(0, 256, (*shape[:-1], shape[-1] * self.dtype.itemsize), dtype=np.uint8)
        return torch.from_numpy(data).view(self.dtype)

    def _adopt(self, memory: list[torch.Tensor]) -> Pool:
        if self.layout in ("block-major", "latent-major"):
            return Pool.of(memory[0])
        if self.layout == "apart":
            return Pool(memory[: self.num_layers], memory[self.num_layers :])
        if self.layout == "hnd":
            return Pool.together([tensor.transpose(2, 3) for tensor in memory], dim=1)
        if self.layout == "packed":
            return Pool(
                [tensor[..., : self.dim] for tensor in memory], [tensor[..., self.dim :] for tensor in memory]
            )
        if self.layout == "latent":
            return Pool(memory)
        return Pool.together(memory, dim=int(self.layout[-1]))


@st.composite
def shapes(
    draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES, dims: tuple[int, ...] = (1, 2, 3, 7, 8, 16, 33)
) -> Shape:
    return Shape(
        draw(st.sampled_from(LAYOUTS)),
        draw(st.integers(2, 7)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(dims)),
        draw(st.sampled_from(dtypes)),
        draw(st.integers(0, 2**32 - 1)),
    )


def blocks_of(pool: Pool) -> np.ndarray:
    """A copy of the pool's bytes, ``[num_blocks, num_planes, block_size, heads, head bytes]``."""
    sides = [
        pool.plane(layer, side).contiguous().view(torch.uint8).cpu().numpy()
        for layer in range(pool.num_layers)
        for side in range(pool.planes_per_layer)
    ]
    return np.stack(sides, axis=1)


def memory_of(memory: list[torch.Tensor]) -> list[np.ndarray]:
    """A copy of every byte of the tensors."""
    return [tensor.contiguous().view(torch.uint8).cpu().numpy().copy() for tensor in memory]
