"""Blocks that change their tenant are zeroed. No tenant reads what another wrote, whichever way the blocks take."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from radixkv import CacheConfig, CapacityError, ConfigError, Namespace, PrefixCache, Tenant, audit
from radixkv.audit.properties import LAYOUT
from radixkv_policies import POLICIES

BLOCK = 2
NUM_BLOCKS = 24
A, B, C = Namespace("a", "m"), Namespace("b", "m"), Namespace("c", "m")
SPACES = (A, B, C, Namespace("a", "other"))


class Blocks:
    """A cache with access to its blocks' bytes: the storage's, or those of an engine that owns them."""

    def __init__(self, *, owned: bool, num_blocks: int = NUM_BLOCKS, **settings: Any) -> None:
        config = CacheConfig(num_blocks, BLOCK, None if owned else LAYOUT, **settings)
        self.calls: list[list[int]] = []
        if owned:
            self.rows: NDArray[np.float64] = np.zeros((num_blocks, 2 * BLOCK))
            self.cache = PrefixCache(config, scrub_blocks=self._zero)
        else:
            self.cache = PrefixCache(config)
            storage = self.cache.storage
            assert storage is not None
            self.rows = storage.data.numpy().reshape(num_blocks, 2 * BLOCK)
            if settings.get("scrub") != "never":
                self.cache._scrubber._zero = lambda ids: (self.calls.append(ids.tolist()), storage.scrub(ids))

    def _zero(self, ids: NDArray[np.int32]) -> None:
        assert ids.dtype == np.int32 and len(set(ids.tolist())) == len(ids) > 0
        self.calls.append(ids.tolist())
        self.rows[ids] = 0

    def settle(self) -> None:
        """Execute the waiting copies, as an engine that owns its blocks does."""
        for source, target, rows in self.cache.flush():
            self.rows[target, :rows] = self.rows[source, :rows]

    def seen(self, block_ids: NDArray[np.int32]) -> set[float]:
        """The non-zero values in these blocks."""
        return set(self.rows[block_ids].ravel().tolist()) - {0.0}


class Tenants:
    """Tenants that write their canary value into every block that they get, after they check its content."""

    def __init__(self, blocks: Blocks, seed: int) -> None:
        self.blocks, self.cache, self.draw = blocks, blocks.cache, random.Random(seed)
        self.running: list[Any] = []
        self.hand_overs = 0
        self.cache.add_tenant(Tenant("a", guaranteed_blocks=8, mode="strict"))
        self.cache.add_tenant(Tenant("b", guaranteed_blocks=4))
        self.canary = {"a": 1.0, "b": 2.0, "c": 3.0}

    def look_and_write(self, sequence: Any, start: int) -> None:
        """From position ``start`` on, the blocks may hold only the tenant's own values. Then write them."""
        mine, fresh = self.canary[sequence.namespace.tenant], sequence.block_table[start:]
        assert self.blocks.seen(fresh) <= {mine}, "bytes of another tenant"
        self.blocks.rows[fresh] = mine
        self.hand_overs += len(fresh)

    def step(self) -> None:
        draw, cache = self.draw, self.cache
        try:
            getattr(
                self, draw.choice(("ask", "ask", "ask", "grow", "fork", "end", "end", "forget", "lend"))
            )()
        except CapacityError:
            if self.running:
                self.running.pop(draw.randrange(len(self.running))).release()
            else:
                cache.evict(NUM_BLOCKS)

    def ask(self) -> None:
        space = self.draw.choice(SPACES)
        ids = [self.draw.randrange(2) for _ in range(self.draw.randrange(1, 9))]
        sequence = self.cache.open(space, ids)
        self.running.append(sequence)
        self.look_and_write(sequence, sequence.num_cached_tokens // BLOCK)
        sequence.commit(self.draw.randrange(sequence.num_cached_tokens, len(ids) + 1))

    def grow(self) -> None:
        if self.running:
            sequence = self.draw.choice(self.running)
            before = sequence.block_table
            sequence.extend([self.draw.randrange(2) for _ in range(self.draw.randrange(1, 4))])
            self.blocks.settle()
            after = sequence.block_table[: len(before)]
            self.look_and_write(sequence, int((before == after).sum()))

    def fork(self) -> None:
        if self.running and len(self.running) < 6:
            self.running += self.draw.choice(self.running).fork(1)

    def end(self) -> None:
        if self.running:
            sequence = self.running.pop(self.draw.randrange(len(self.running)))
            if self.draw.random() < 0.3:
                sequence.truncate(sequence.num_committed_tokens)
            sequence.release()

    def forget(self) -> None:
        kind = self.draw.randrange(6)
        if kind == 0:
            self.cache.clear(self.draw.choice(SPACES))
        elif kind == 1:
            self.cache.evict(self.draw.randrange(NUM_BLOCKS))
        elif kind == 2:
            tenant = self.draw.choice("abc")
            self.cache.purge(tenant)
            for sequence in [each for each in self.running if each.namespace.tenant == tenant]:
                sequence.release()
                self.running.remove(sequence)
            self.canary[tenant] += 3  # its data from before the purge is no longer its own
        elif not any(each.namespace.tenant == "b" for each in self.running):
            self.cache.add_tenant(
                Tenant("b", guaranteed_blocks=4, mode=self.draw.choice(("burst", "strict")))
            )

    def lend(self) -> None:
        lent = self.cache.allocate(self.draw.randrange(1, 4))
        assert not self.blocks.seen(lent), "the engine may fill lent blocks for any tenant"
        self.blocks.rows[lent] = 100.0
        self.hand_overs += len(lent)
        self.cache.free(lent)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("owned", [False, True])
def test_no_tenant_reads_anothers_canary_in_ten_thousand_hand_overs(policy: str, owned: bool) -> None:
    """About 600 hand-overs for each policy, with storage and without; more than 10,000 together."""
    blocks = Blocks(owned=owned, policy=policy, segment_tokens=BLOCK)
    tenants = Tenants(blocks, seed=len(policy))
    while tenants.hand_overs < 600:
        tenants.step()
    audit.check(blocks.cache)
    assert sum(map(len, blocks.calls)) == blocks.cache.stats().scrubbed_blocks > 50


def test_canaries_are_found_without_scrubbing() -> None:
    """A positive control: without scrubbing, the test above finds foreign values."""
    blocks = Blocks(owned=True, scrub="cross-tenant")
    tenants = Tenants(blocks, seed=1)
    blocks.cache._scrubber._zero = lambda ids: None
    with pytest.raises(AssertionError, match=r"another|any tenant"):
        for _ in range(1000):
            tenants.step()


def written(blocks: Blocks, space: Namespace, ids: range, *, commit: bool) -> NDArray[np.int32]:
    """The blocks of a request that wrote them and ended."""
    with blocks.cache.open(space, ids) as sequence:
        table = sequence.block_table
        blocks.rows[table] = 7.0
        if commit:
            sequence.commit(len(ids))
    return table


@pytest.mark.parametrize("owned", [False, True])
def test_blocks_freed_by_a_strict_tenant_are_zeroed_at_once(owned: bool) -> None:
    blocks = Blocks(owned=owned)
    cache = blocks.cache
    cache.add_tenant(Tenant("a", guaranteed_blocks=8, mode="strict"))
    table = written(blocks, A, range(12), commit=False)
    assert not blocks.seen(table) and blocks.calls == [table.tolist()], "a release zeroes in one call"
    table = written(blocks, A, range(12), commit=True)
    assert blocks.seen(table) == {7.0}, "resident blocks keep their bytes"
    cache.evict(2)
    assert len(blocks.calls) == 2 and sorted(blocks.calls[1]) == sorted(table[-2:].tolist())
    assert not blocks.seen(table[-2:])
    cache.clear(A)
    assert not blocks.seen(table) and len(blocks.calls) == 3, "a clear zeroes in one call"
    table = written(blocks, A, range(12), commit=True)
    cache.purge("a")
    assert not blocks.seen(table)
    with cache.open(A, range(5)) as sequence:
        blocks.rows[sequence.block_table] = 7.0
        last = sequence.block_table[1:]
        sequence.truncate(2)
        assert not blocks.seen(last)
        cache.purge("a")
        held = sequence.block_table
        assert blocks.seen(held) == {7.0}, "quarantined blocks keep their bytes"
    assert not blocks.seen(held), "the release zeroes quarantined blocks"


@pytest.mark.parametrize("owned", [False, True])
def test_other_blocks_are_zeroed_when_another_tenant_gets_them(owned: bool) -> None:
    blocks = Blocks(owned=owned, num_blocks=4)
    table = written(blocks, A, range(8), commit=True)
    with blocks.cache.open(A, range(100, 108)) as sequence:
        assert blocks.seen(sequence.block_table) == {7.0} and not blocks.calls, (
            "blocks of its own tenant are not zeroed"
        )
    with blocks.cache.open(B, range(8)) as sequence:
        assert sorted(sequence.block_table) == sorted(table)
        assert not blocks.seen(sequence.block_table) and len(blocks.calls) == 1


def test_a_purged_tenant_does_not_read_its_old_data() -> None:
    blocks = Blocks(owned=True, num_blocks=4)
    written(blocks, A, range(8), commit=True)
    blocks.cache.purge("a")
    with blocks.cache.open(A, range(8)) as sequence:
        assert not blocks.seen(sequence.block_table)


@pytest.mark.parametrize("owned", [False, True])
def test_scrub_always(owned: bool) -> None:
    """Blocks are zeroed when freed, even if the tenant's next request takes them at once."""
    blocks = Blocks(owned=owned, num_blocks=4, scrub="always")
    written(blocks, A, range(4), commit=False)
    assert not blocks.rows.any()
    written(blocks, A, range(8), commit=True)
    with blocks.cache.open(A, range(100, 108)) as sequence:
        assert not blocks.seen(sequence.block_table)


def test_scrub_never() -> None:
    blocks = Blocks(owned=False, num_blocks=4, scrub="never")
    written(blocks, A, range(8), commit=True)
    with blocks.cache.open(B, range(8)) as sequence:
        assert blocks.seen(sequence.block_table) == {7.0} and not blocks.calls
    assert blocks.cache.stats().scrubbed_blocks == 0


@pytest.mark.parametrize(
    "cache",
    [
        PrefixCache(CacheConfig(4)),
        PrefixCache(CacheConfig(4, layout=LAYOUT, scrub="never")),
        PrefixCache(CacheConfig(4, scrub="never"), scrub_blocks=print),
    ],
    ids=["no scrubber", "never", "never, though the engine could"],
)
def test_a_strict_tenant_needs_scrubbing(cache: PrefixCache) -> None:
    with pytest.raises(ConfigError, match=r"mode='strict' .* a strict tenant's blocks are zeroed"):
        cache.add_tenant(Tenant("a", guaranteed_blocks=2, mode="strict"))
    assert cache.tenant("a") is None


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="scrub='sometimes' is not allowed; allowed: 'cross-tenant', 'always' or 'never'"
    ):
        CacheConfig(4, scrub="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"scrub='always' is not allowed; allowed: .* scrub_blocks"):
        PrefixCache(CacheConfig(4, scrub="always"))
    with pytest.raises(ConfigError, match=r"scrub_blocks=.* is not allowed; allowed: None with a layout"):
        PrefixCache(CacheConfig(4, layout=LAYOUT), scrub_blocks=print)
    with pytest.raises(ConfigError, match="scrub_blocks='zero' is not allowed; allowed: a function"):
        PrefixCache(CacheConfig(4), scrub_blocks="zero")  # type: ignore[arg-type]


def test_blocks_are_not_handed_out_if_scrubbing_fails() -> None:
    blocks = Blocks(owned=True, num_blocks=4)
    table = written(blocks, A, range(8), commit=True)
    zero = blocks.cache._scrubber._zero

    def fails(ids: NDArray[np.int32]) -> None:
        raise RuntimeError("the device is gone")

    blocks.cache._scrubber._zero = fails
    with pytest.raises(RuntimeError, match="the device is gone"):
        blocks.cache.open(B, range(8))
    audit.check(blocks.cache)
    assert blocks.seen(table) == {7.0} and blocks.cache.stats().num_sequences == 0
    blocks.cache._scrubber._zero = zero
    with blocks.cache.open(B, range(8)) as sequence:
        assert not blocks.seen(sequence.block_table)
    audit.check(blocks.cache)


def test_inserted_blocks_belong_to_the_tenant() -> None:
    blocks = Blocks(owned=True, num_blocks=4)
    lent = blocks.cache.allocate(4)
    blocks.rows[lent] = 7.0
    blocks.cache.insert(A, range(8), lent)
    assert blocks.seen(blocks.cache.match(A, range(8)).block_ids) == {7.0} and not blocks.calls
    with blocks.cache.open(A, range(100, 104)) as sequence:
        assert blocks.seen(sequence.block_table) == {7.0} and not blocks.calls
    with blocks.cache.open(B, range(4)) as sequence:
        assert not blocks.seen(sequence.block_table)


@given(
    dtype=st.sampled_from(
        ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
    ),
    ids=st.sets(st.integers(0, 8), min_size=1),
)
def test_a_storage_zeroes_exactly_these_blocks(dtype: str, ids: set[int]) -> None:
    from radixkv.storage import DeviceStorage, KVLayout

    storage = DeviceStorage(KVLayout(2, 1, 4, dtype), 9, 4)
    raw = storage.data.view(9, -1).view(torch.uint8)
    raw.fill_(0xA5)
    storage.scrub(np.array(sorted(ids), np.int32))
    for block in range(9):
        assert bool((raw[block] == (0 if block in ids else 0xA5)).all())
