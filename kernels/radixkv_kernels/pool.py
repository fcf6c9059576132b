"""Pool: a description of the memory of an engine's blocks, for all kernels.

A pool is a list of *planes*, one for each layer and each of keys and values (MLA's latent: one a layer):

    plane   [num_blocks, block_size, num_kv_heads, head_dim]      a view, with any order in memory

All planes of a pool have the same shape, dtype, device and strides. Only their addresses differ. The strides describe
block-major storage, an engine's own tensors per layer, keys and values separate or together, rows of all heads (NHD)
and heads of all rows (HND):

    block-major       Pool.of(storage)                [num_blocks, num_layers, 2, block_size, heads, dim]
    K and V separate  Pool(keys, values)              a layer: [num_blocks, block_size, heads, dim]
    K and V together  Pool.together(caches, dim=1)    a layer: [num_blocks, 2, …]; dim=0: [2, num_blocks, …]
    HND               the same of cache.transpose(-3, -2), a view of […, heads, block_size, dim]
    MLA               Pool(latents)                   a layer: [num_blocks, block_size, latent_dim]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from radixkv_kernels.checks import MAX_NUM_BLOCKS, InputError, check_storage

PLANE_SHAPE = "[num_blocks, block_size, num_kv_heads, head_dim] or [num_blocks, block_size, latent_dim]"

MAX_SPAN = 2**31 - 1
"""Maximum span of a block's plane in bytes. Kernels use 64-bit offsets only between blocks."""


class Geometry(NamedTuple):
    """The common shape and strides of a pool's planes. Strides are in bytes."""

    num_blocks: int
    block_size: int
    num_heads: int
    head_dim: int
    element_bytes: int
    block_stride: int
    row_stride: int
    head_stride: int

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one row, which are contiguous."""
        return self.head_dim * self.element_bytes

    @property
    def has_whole_rows(self) -> bool:
        """Whether the heads of a row are contiguous, as in NHD."""
        return self.num_heads == 1 or self.head_stride == self.head_bytes


class Pool:
    """Planes of one geometry: keys and values of each layer, or MLA's single latent.

    keys[layer], values[layer]: ``[num_blocks, block_size, num_kv_heads, head_dim]`` of any dtype. Any strides are
    allowed that keep a head's elements contiguous and let no two elements overlap. A tensor of three dimensions has
    one head. Keys and values of different head sizes need two pools.

    A pool holds references to its tensors. Make it once and use it for every call: O(planes). Raises InputError for
    invalid planes.
    """

    __slots__ = ("_planes", "addresses", "device", "dtype", "geometry", "num_layers", "storage")

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor] | None = None) -> None:
        for side, layers in (("keys", keys), ("values", values)):
            if not isinstance(layers, (Sequence, torch.Tensor)) and (side == "keys" or layers is not None):
                raise InputError(side, type(layers).__name__, "a list of tensors, one a layer")
        if not len(keys):
            raise InputError("len(keys)", 0, "at least one layer")
        if values is not None and len(values) != len(keys):
            raise InputError("len(values)", len(values), f"as many as keys: {len(keys)}")
        sides = {"keys": keys} if values is None else {"keys": keys, "values": values}
        planes = {
            f"{side}[{layer}]": _as_plane(f"{side}[{layer}]", tensors[layer])
            for layer in range(len(keys))
            for side, tensors in sides.items()
        }
        self.storage: torch.Tensor | None = None
        self._planes: list[torch.Tensor] | None = list(planes.values())
        first = self._planes[0]
        for name, plane in planes.items():
            _check_alike(name, plane, first)
        _check_strides("keys[0].stride()", first)
        self.geometry = _geometry(first.shape, first.stride(), first.element_size())
        self.addresses = tuple(plane.data_ptr() for plane in self._planes)
        if len(set(self.addresses)) != len(self.addresses):
            raise InputError("keys, values", "the same memory twice", "a separate plane for each")
        self.device, self.dtype, self.num_layers = first.device, first.dtype, len(keys)

    @classmethod
    def of(cls, storage: torch.Tensor) -> Pool:
        """The pool of block-major storage, contiguous ``[num_blocks, num_layers, 2, block_size, heads, dim]``.

        For MLA the third dimension is 1. Raises InputError for storage of another form.
        """
        check_storage(storage)
        pool = cls.__new__(cls)
        pool.storage, pool._planes = storage, None
        pool.geometry, pool.addresses = _of_storage(
            storage.data_ptr(), tuple(storage.shape), storage.element_size()
        )
        pool.device, pool.dtype, pool.num_layers = storage.device, storage.dtype, storage.shape[1]
        return pool

    @classmethod
    def together(cls, caches: Sequence[torch.Tensor], dim: int) -> Pool:
        """The pool of one tensor a layer, which holds first keys, then values along ``dim``."""
        for layer, cache in enumerate(caches):
            if not isinstance(cache, torch.Tensor):
                raise InputError(
                    f"caches[{layer}]", type(cache).__name__, "a torch.Tensor of five dimensions"
                )
            if cache.ndim != 5 or dim not in (0, 1) or cache.shape[dim] != 2:
                shape = tuple(cache.shape)
                raise InputError(f"caches[{layer}].shape", shape, f"five dimensions, 2 at dim={dim} (0 or 1)")
        return cls([cache.select(dim, 0) for cache in caches], [cache.select(dim, 1) for cache in caches])

    @property
    def planes_per_layer(self) -> int:
        """2 for keys and values; 1 for MLA's latent."""
        return len(self.addresses) // self.num_layers

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``[num_layers, planes_per_layer, block_size, num_kv_heads, head_dim]``."""
        shape = self.geometry
        return (self.num_layers, self.planes_per_layer, shape.block_size, shape.num_heads, shape.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all planes."""
        shape = self.geometry
        return len(self.addresses) * shape.block_size * shape.num_heads * shape.head_bytes

    @property
    def views(self) -> list[torch.Tensor]:
        """All blocks in as few tensors as possible, each ``[num_blocks, block_size, …]``."""
        if self.storage is not None:
            return [self.storage.movedim(3, 1)]
        assert self._planes is not None
        return self._planes

    def plane(self, layer: int, side: int) -> torch.Tensor:
        """The plane of a layer, ``[num_blocks, block_size, num_kv_heads, head_dim]``. Side 0 is keys, 1 values."""
        if self.storage is not None:
            return self.storage[:, layer, side]
        assert self._planes is not None
        return self._planes[layer * self.planes_per_layer + side]

    def layers(self, start: int, stop: int) -> Pool:
        """The pool of layers ``[start, stop)`` only, for work layer by layer. Raises InputError outside the range."""
        if not 0 <= start < stop <= self.num_layers:
            raise InputError("(start, stop)", (start, stop), f"0 ≤ start < stop ≤ {self.num_layers}")
        sides = [
            [self.plane(layer, side) for layer in range(start, stop)] for side in range(self.planes_per_layer)
        ]
        return Pool(*sides)

    def beside(self, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of views with blocks of one shape: the pool's ``[num_blocks, …]`` and staging's ``[n, …]``."""
        if self.storage is not None:
            yield self.storage, staging
            return
        for layer in range(self.num_layers):
            for side in range(self.planes_per_layer):
                yield self.plane(layer, side), staging[:, layer, side]

    def __repr__(self) -> str:
        return f"Pool({self.geometry}, {len(self.addresses)} planes, {self.dtype}, {self.device})"


PoolLike = Pool | torch.Tensor
"""A pool, or block-major storage, from which ``as_pool`` makes one."""


def as_pool(pool: PoolLike) -> Pool:
    """Return the pool itself, or the pool of block-major storage. Raises InputError for anything else."""
    return pool if isinstance(pool, Pool) else Pool.of(pool)


@lru_cache(maxsize=256)
def _of_storage(address: int, shape: tuple[int, ...], element_bytes: int) -> tuple[Geometry, tuple[int, ...]]:
    num_blocks, num_layers, num_sides, block_size, num_heads, head_dim = shape
    row = num_heads * head_dim
    num_planes = num_layers * num_sides
    plane_shape = (num_blocks, block_size, num_heads, head_dim)
    strides = (num_planes * block_size * row, row, head_dim, 1)
    plane_bytes = block_size * row * element_bytes
    geometry = _geometry(plane_shape, strides, element_bytes)
    return geometry, tuple(address + plane * plane_bytes for plane in range(num_planes))


def _geometry(shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> Geometry:
    return Geometry._make((*shape, element_bytes, *(stride * element_bytes for stride in strides[:3])))


def _as_plane(name: str, plane: torch.Tensor) -> torch.Tensor:
    if not isinstance(plane, torch.Tensor):
        raise InputError(name, type(plane).__name__, f"a torch.Tensor {PLANE_SHAPE}")
    if plane.ndim not in (3, 4) or 0 in plane.shape or plane.shape[0] > MAX_NUM_BLOCKS:
        raise InputError(
            f"{name}.shape", tuple(plane.shape), f"{PLANE_SHAPE}, at most {MAX_NUM_BLOCKS} blocks"
        )
    return plane.unsqueeze(2) if plane.ndim == 3 else plane


def _check_alike(name: str, plane: torch.Tensor, first: torch.Tensor) -> None:
    for attribute in ("shape", "dtype", "device"):
        value, wanted = getattr(plane, attribute), getattr(first, attribute)
        if value != wanted:
            raise InputError(f"{name}.{attribute}", value, f"that of keys[0]: {wanted}")
    if plane.stride() != first.stride():
        raise InputError(f"{name}.stride()", plane.stride(), f"those of keys[0]: {first.stride()}")


def _check_strides(argument: str, plane: torch.Tensor) -> None:
    by_stride = sorted(
        (stride, size) for stride, size in zip(plane.stride(), plane.shape, strict=True) if size > 1
    )
    extent = 1
    for stride, size in by_stride:
        if stride < extent:
            raise InputError(argument, plane.stride(), "strides with which no two elements overlap")
        extent = stride * (size - 1) + extent
    within = sum(
        stride * (size - 1) for stride, size in zip(plane.stride()[1:], plane.shape[1:], strict=True)
    )
    if (within + 1) * plane.element_size() > MAX_SPAN:
        raise InputError(argument, plane.stride(), f"the rows and heads of a block within {MAX_SPAN} bytes")
    if plane.shape[3] > 1 and plane.stride(3) != 1:
        raise InputError(argument, plane.stride(), "1 for the last dimension")
