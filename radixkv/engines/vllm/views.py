"""What vLLM's connectors and operators' tools read of vLLM's own manager, as views of a VllmCache. Imports no vLLM.

    coordinator.single_type_managers[0].req_to_blocks      the blocks of each request, as ``BlockView``
    coordinator.single_type_managers[0].num_cached_block   how many of them others may find
    block_pool.free_block_queue.num_free_blocks            blocks that requests can get
    len(block_pool.cached_block_hash_to_block)             resident blocks

Nothing is kept: a view reads the cache when it is asked. vLLM's scheduler itself asks for none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from radixkv.engines.vllm.cache import VllmCache


class BlockView(NamedTuple):
    """A block of a request, as it was when it was read.

    - ``ref_cnt``: requests that hold it.
    - ``block_hash``: a name of its content, if other requests may find it. None otherwise. It isn't vLLM's hash.
    """

    block_id: int
    ref_cnt: int
    block_hash: bytes | None
    is_null: bool = False

    @property
    def _block_hash(self) -> bytes | None:
        return self.block_hash


class _ByRequest(Mapping[str, Any]):
    """Something of each request that holds blocks."""

    def __init__(self, cache: VllmCache) -> None:
        self._cache = cache

    def __iter__(self) -> Iterator[str]:
        return iter(self._cache.holders())

    def __len__(self) -> int:
        return len(self._cache.holders())


class RequestBlocks(_ByRequest):
    """The blocks of each request. Reading one request takes O(blocks of all requests + its tokens)."""

    def __getitem__(self, request_id: str) -> list[BlockView]:
        holders = self._cache.holders()
        if request_id not in holders:
            raise KeyError(request_id)
        counts = Counter(block for each in holders for block in self._cache.blocks(each))
        blocks, names = self._cache.blocks(request_id), self._cache.block_names(request_id)
        return [BlockView(block, counts[block], name) for block, name in zip(blocks, names, strict=True)]


class NumCached(_ByRequest):
    """How many blocks of each request others may find. Reading one takes O(its tokens)."""

    def __getitem__(self, request_id: str) -> int:
        if request_id not in self._cache.holders():
            raise KeyError(request_id)
        return sum(name is not None for name in self._cache.block_names(request_id))


class ManagerView:
    """vLLM's manager of the one group of blocks. Further attributes are those of ``stock``."""

    def __init__(self, stock: Any, cache: VllmCache) -> None:
        self._stock = stock
        self.req_to_blocks, self.num_cached_block = RequestBlocks(cache), NumCached(cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class FreeBlocks:
    """vLLM's queue of free blocks, as far as it can be counted."""

    def __init__(self, cache: VllmCache) -> None:
        self._cache = cache

    @property
    def num_free_blocks(self) -> int:
        """Blocks that requests can get."""
        return self._cache.num_available


class ResidentBlocks:
    """vLLM's table of hashes, as far as it can be counted."""

    def __init__(self, cache: VllmCache) -> None:
        self._cache = cache

    def __len__(self) -> int:
        return self._cache.cache.resident_blocks
