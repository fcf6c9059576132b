"""What hears of evictions: all blocks that leave, with their prefixes, before anybody else gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from radixkv import CacheConfig, Namespace, PrefixCache, Tenant
from radixkv.index.load_target import watch_evictions
from radixkv.index.tokens import encode
from radixkv.storage.plan import BlockIds
from radixkv_policies import LRU

SIZE, NUM_BLOCKS = 4, 48
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
"""One token id for each block."""


class InPieces(LRU):
    """Evicts at most two blocks of a node at a time."""

    def hook(self, name: str) -> Callable[..., Any] | None:
        return (lambda node: 2) if name == "most" else super().hook(name)


class Watched:
    """A cache, the ids that left it, and what was told of those that were asked for: every ``nth`` one."""

    def __init__(self, nth: int, policy: type[LRU]) -> None:
        default = Tenant("*", policy=policy)
        self.cache, self._nth = PrefixCache(CacheConfig(NUM_BLOCKS, SIZE, default_tenant=default)), nth
        self.left: list[int] = []
        self.asked: set[int] = set()
        self.told: dict[tuple[Namespace, bytes], int] = {}
        watch_evictions(self.cache, self._leave, self._let_go)

    def _let_go(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        self.left += block_ids.tolist()
        is_asked = np.arange(len(block_ids)) % self._nth == 0
        self.asked.update(block_ids[is_asked].tolist())
        return is_asked

    def _leave(self, namespace: Namespace, key: bytes, start: int, block_ids: BlockIds) -> None:
        assert len(key) == (start + len(block_ids)) * SIZE * 4
        for at, block in enumerate(block_ids.tolist(), start + 1):
            self.told[namespace, key[: at * SIZE * 4]] = block

    def resident(self, prompts: dict[tuple[Namespace, bytes], None]) -> dict[tuple[Namespace, bytes], int]:
        """Return the block at the end of each whole prefix of these."""
        found = dict[tuple[Namespace, bytes], int]()
        for namespace, key in prompts:
            for at, block in enumerate(self.cache.match(namespace, key).block_ids.tolist(), 1):
                found[namespace, key[: at * SIZE * 4]] = block
        return found


@given(
    st.lists(st.tuples(st.sampled_from("ab"), PROMPTS, st.integers(0, 12)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from([LRU, InPieces]),
)
def test_all_that_leaves_is_heard_with_its_prefix(
    steps: list[tuple[str, list[int], int]], nth: int, policy: type[LRU]
) -> None:
    watched, prompts = Watched(nth, policy), dict[tuple[Namespace, bytes], None]()
    for tenant, prompt, num_evicted in steps:
        namespace, ids = Namespace(tenant, "m"), np.repeat(np.array(prompt, np.uint32), SIZE)
        prompts[namespace, encode(ids)] = None
        with watched.cache.open(namespace, ids) as sequence:
            sequence.commit(len(ids))
        before = watched.resident(prompts)
        watched.left, watched.asked, watched.told = [], set(), {}
        num = watched.cache.evict(num_evicted)
        after = watched.resident(prompts)
        gone = {each: block for each, block in before.items() if each not in after}
        assert sorted(watched.left) == sorted(gone.values()) and len(gone) == num
        assert watched.told.items() <= gone.items()
        assert watched.asked <= set(watched.told.values())
