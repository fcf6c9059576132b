"""BlockStorage: the cache forks, copies and zeroes in an engine's own tensors, in any memory layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixkv import CacheConfig, ConfigError, KVLayout, Namespace, PrefixCache, Tenant, audit
from radixkv.storage import BlockStorage
from radixkv_kernels import Pool
from tests.kernels.pools import DEVICES, LAYOUTS, Shape, blocks_of

NUM_BLOCKS, BLOCK = 9, 4
A, B = Namespace("a", "m"), Namespace("b", "m")


def adopted(layout: str, device: str = "cpu", **settings: Any) -> tuple[PrefixCache, Pool]:
    pool, _ = Shape(layout, NUM_BLOCKS, 2, BLOCK, 2, 8).pool(device)
    return PrefixCache(CacheConfig(NUM_BLOCKS, BLOCK, **settings), storage=BlockStorage(pool)), pool


def write(pool: Pool, block_ids: Any, value: float) -> None:
    for layer in range(pool.num_layers):
        for side in range(pool.planes_per_layer):
            pool.plane(layer, side)[np.asarray(block_ids).tolist()] = value + layer + side / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forks_copy_on_write_in_the_engines_tensors(layout: str, device: str) -> None:
    cache, pool = adopted(layout, device)
    with cache.open(A, range(6)) as parent:
        write(pool, parent.block_table, 5)
        before = blocks_of(pool)
        tail = int(parent.block_table[-1])
        children = parent.fork(2)
        cache.append([parent, *children], [7, 8, 9])
        tails = [int(each.block_table[-1]) for each in (parent, *children)]
        assert len(set(tails)) == 3 and tail in tails
        want = before.copy()
        for target in set(tails) - {tail}:
            want[target] = 0  # handed out
            want[target, :, :2] = before[tail, :, :2]
        np.testing.assert_array_equal(blocks_of(pool), want)
        storage = cache.storage
        assert storage is not None and (storage.num_launches, storage.num_copied_blocks) == (1, 2)
        assert not cache.flush(), "copies are executed when they are planned"
        assert audit.check(cache).ok
        for child in children:
            child.release()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_contents_and_blocks_of_others_are_zeroed(layout: str) -> None:
    cache, pool = adopted(layout)
    cache.add_tenant(Tenant("b", guaranteed_blocks=3, mode="strict"))
    before = blocks_of(pool)
    with cache.open(A, range(8)) as sequence:
        table = sequence.block_table
        assert not blocks_of(pool)[table].any(), "no noise of earlier contents"
        write(pool, table, 1)
        sequence.commit(8)
    others = sorted(set(range(NUM_BLOCKS)) - set(table.tolist()))
    np.testing.assert_array_equal(blocks_of(pool)[others], before[others])
    cache.clear(A)
    with cache.open(B, range(12)) as sequence:
        assert not blocks_of(pool)[sequence.block_table].any()
        write(pool, sequence.block_table, 2)
        table = sequence.block_table
    assert not blocks_of(pool)[table].any(), "a strict tenant's blocks are zeroed when freed"


def test_blocks_that_the_engine_filled_are_not_zeroed() -> None:
    cache, pool = adopted("apart")
    lent = cache.allocate(2)
    write(pool, lent, 3)
    before = blocks_of(pool)
    assert cache.insert(A, range(8), lent).num_resident_tokens == 0
    with cache.open(A, range(9)) as sequence:
        assert sequence.num_cached_tokens == 8
        np.testing.assert_array_equal(blocks_of(pool)[lent], before[lent])


LATENTS = Pool([torch.zeros(NUM_BLOCKS, BLOCK, 8)])


@pytest.mark.parametrize(
    ("settings", "arguments", "setting"),
    [
        ({"num_blocks": 8}, {"storage": BlockStorage(LATENTS)}, "storage"),
        ({"block_size": 2}, {"storage": BlockStorage(LATENTS)}, "storage"),
        ({}, {"storage": LATENTS}, "storage"),
        ({"layout": KVLayout(1, 1, 8)}, {"storage": BlockStorage(LATENTS)}, "storage"),
        ({}, {"storage": BlockStorage(LATENTS), "scrub_blocks": print}, "scrub_blocks"),
    ],
    ids=["blocks", "tokens", "no storage", "a layout too", "scrub_blocks too"],
)
def test_a_storage_that_does_not_fit_the_cache_is_refused_by_name(
    settings: Any, arguments: Any, setting: str
) -> None:
    config = CacheConfig(**{"num_blocks": NUM_BLOCKS, "block_size": BLOCK} | settings)
    with pytest.raises(ConfigError) as caught:
        PrefixCache(config, **arguments)
    assert caught.value.setting == setting


def test_block_storage_takes_a_pool_and_reports_its_size() -> None:
    with pytest.raises(ConfigError, match=r"pool='Tensor' is not allowed; allowed: a radixkv_kernels\.Pool"):
        BlockStorage(torch.zeros(2, 2, 2))
    storage = BlockStorage(LATENTS)
    assert storage.num_bytes == NUM_BLOCKS * BLOCK * 8 * 4 and storage.device.type == "cpu"
    assert repr(storage).startswith("BlockStorage(Pool(")
