"""Eight threads use one cache while the audit runs. Every law holds at all times, and every byte is right."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

import pytest

from radixkv import (
    CacheConfig,
    LeaseError,
    Namespace,
    OutOfBlocks,
    PrefixCache,
    Sequence,
    Tenant,
    audit,
)
from radixkv.audit.oracle import Engine, chain
from radixkv.audit.properties import LAYOUT
from tests.waiting import is_set

NUM_THREADS = 8
NUM_OPS = 120


class Worker(threading.Thread):
    """Makes random requests in two shared namespaces. Each read and write is compared with the oracle's KV."""

    def __init__(self, cache: PrefixCache, seed: int, audited: threading.Event) -> None:
        super().__init__(daemon=True)
        self.cache, self.engine, self.rng = cache, Engine(cache), random.Random(seed)
        self.error: Exception | None = None
        self.num_done = 0
        self.audited = audited

    def run(self) -> None:
        try:
            for at in range(NUM_OPS):
                if at == NUM_OPS // 2:
                    is_set(self.audited, "an audit")
                self._request()
                self.num_done += 1
        except Exception as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def _request(self) -> None:
        rng = self.rng
        namespace = Namespace(rng.choice("ab"), "m")
        ids = [0] * rng.randrange(1, 14) + [rng.randrange(3) for _ in range(rng.randrange(6))]
        kind = rng.randrange(10)
        if kind == 0:
            self.cache.evict(rng.randrange(6))
        elif kind == 1:
            self.cache.clear(namespace)
        elif kind == 2:
            self._lookup(namespace, ids)
        elif kind == 3:
            self._lend(namespace, ids)
        else:
            self._serve(namespace, ids)

    def _lookup(self, namespace: Namespace, ids: list[int]) -> None:
        match = self.cache.match(namespace, ids)
        try:
            with self.cache.lease(match) as lease:
                assert self.engine.holds(lease.block_ids, chain(namespace, ids[: lease.num_tokens]))
        except LeaseError:
            pass
        with self.cache.match_and_lease(namespace, ids) as lease:
            assert self.engine.holds(lease.block_ids, chain(namespace, ids[: lease.num_tokens]))
        assert self.cache.touch(namespace, ids) <= len(ids)

    def _lend(self, namespace: Namespace, ids: list[int]) -> None:
        """Fill and insert blocks. What the tree has already is left over."""
        num_blocks = self.rng.randrange(4)
        ids = ids[: num_blocks * self.cache.config.block_size]
        try:
            block_ids = self.cache.allocate(len(ids) // self.cache.config.block_size)
            ids = ids[: len(block_ids) * self.cache.config.block_size]
        except OutOfBlocks:
            return
        self.engine.write(block_ids, 0, chain(namespace, ids))
        try:
            done = self.cache.insert(namespace, ids, block_ids, lease=True)
        except OutOfBlocks:
            self.cache.free(block_ids)
            return
        assert done.lease is not None
        with done.lease as lease:
            assert self.engine.holds(lease.block_ids, chain(namespace, ids))
        self.cache.free(done.surplus)

    def _serve(self, namespace: Namespace, ids: list[int]) -> None:
        try:
            looks = self.rng.randrange(4) > 0
            sequence = self.cache.open(namespace, ids, lookup=looks)
        except OutOfBlocks:
            return
        with sequence:
            self._compute(sequence, sequence.num_cached_tokens)
            family = [sequence]
            try:
                for _ in range(self.rng.randrange(4)):
                    family = self._decode(family)
            finally:
                for other in family:
                    if other.is_open:
                        other.release()

    def _decode(self, family: list[Sequence]) -> list[Sequence]:
        if self.rng.random() < 0.5:
            family = family + family[0].fork(self.rng.randrange(1, 3))
        else:
            parents = [self.rng.randrange(len(family)) for _ in range(len(family))]
            family = self.cache.reorder(family, parents)
        sizes = [sequence.num_tokens for sequence in family]
        if len(family) == 1 and self._decode_ahead(family[0]):
            return family
        try:
            self.cache.append(family, [self.rng.randrange(3) for _ in family])
        except OutOfBlocks:
            assert [sequence.num_tokens for sequence in family] == sizes
            return family
        for sequence, size in zip(family, sizes, strict=True):
            self._compute(sequence, size)
        return family

    def _decode_ahead(self, sequence: Sequence) -> bool:
        """Make room, compute into it, and learn the ids afterwards. No block of the table changes."""
        size, more = sequence.num_tokens, self.rng.randrange(4)
        try:
            sequence.reserve(more)
        except OutOfBlocks:
            return False
        table = sequence.block_table
        sequence.fill([self.rng.randrange(3) for _ in range(self.rng.randrange(more + 1))])
        assert sequence.block_table.tolist() == table.tolist()
        sequence.drop()
        assert not sequence.num_reserved_tokens
        self._compute(sequence, size)
        return True

    def _compute(self, sequence: Sequence, start: int) -> None:
        states = chain(sequence.namespace, sequence.token_ids.tolist())
        assert self.engine.holds(sequence.block_table, states[:start])
        self.engine.write(sequence.block_table, start, states[start:])
        sequence.commit(self.rng.randrange(sequence.num_committed_tokens, len(states) + 1))
        assert self.engine.holds(sequence.block_table, states)


class EngineWorker(threading.Thread):
    """Inserts blocks of its own, and gets others back. It has as many as its inserts and reclaims left it."""

    def __init__(self, cache: PrefixCache, seed: int, audited: threading.Event, block_ids: list[int]) -> None:
        super().__init__(daemon=True)
        self.cache, self.rng, self.mine = cache, random.Random(seed), block_ids
        self.error: Exception | None = None
        self.audited = audited

    def run(self) -> None:
        try:
            for at in range(NUM_OPS):
                if at == NUM_OPS // 2:
                    is_set(self.audited, "an audit")
                self._request()
        except Exception as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def _request(self) -> None:
        namespace, kind = Namespace(self.rng.choice("ab"), "m"), self.rng.randrange(8)
        ids = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 5) * 2)]
        if kind == 0:
            self.cache.clear(namespace)
        elif kind == 1:
            self.mine += self.cache.reclaim(self.rng.randrange(5), namespace.tenant).tolist()
        elif kind == 2:
            with self.cache.match_and_lease(namespace, ids) as lease:
                assert len(set(lease.block_ids.tolist())) == len(lease.block_ids)
                assert not set(lease.block_ids.tolist()) & set(self.mine), "a block of the engine is matched"
        elif len(self.mine) >= len(ids) // 2:
            self._insert(namespace, ids)

    def _insert(self, namespace: Namespace, ids: list[int]) -> None:
        given, self.mine = self.mine[: len(ids) // 2], self.mine[len(ids) // 2 :]
        done = self.cache.insert(namespace, ids, given)
        self.mine += [*done.surplus.tolist(), *done.evicted.tolist()]


def run_and_audit(
    cache: PrefixCache, workers: Iterable[Worker | EngineWorker], audited: threading.Event
) -> None:
    """Audit the cache while these run: at least once before any of them goes beyond its half."""
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        audit.check(cache)
        cache.stats()
        audited.set()
    for worker in workers:
        if worker.error is not None:
            raise worker.error


def test_eight_threads_of_an_engine_that_owns_the_blocks(_eager_switches: None) -> None:
    """No block is lost, and none has two owners."""
    cache = PrefixCache(CacheConfig(64, 2, blocks="engine", default_tenant=Tenant("d", max_blocks=20)))
    audited = threading.Event()
    workers = [
        EngineWorker(cache, seed, audited, list(range(seed * 8, seed * 8 + 8))) for seed in range(NUM_THREADS)
    ]
    run_and_audit(cache, workers, audited)
    mine = [block for worker in workers for block in worker.mine]
    assert sorted([*mine, *cache.reclaim(64).tolist()]) == list(range(64))
    audit.check(cache)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_eight_threads_and_the_audit(policy: str, _eager_switches: None) -> None:
    """Nothing breaks, every read byte is right, and nothing is left over."""
    cache = PrefixCache(CacheConfig(num_blocks=60, block_size=2, layout=LAYOUT, policy=policy))
    audited = threading.Event()
    workers = [Worker(cache, seed, audited) for seed in range(NUM_THREADS)]
    run_and_audit(cache, workers, audited)
    assert all(worker.num_done == NUM_OPS for worker in workers)
    stats = cache.stats()
    assert (stats.sequence_blocks, stats.quarantined_blocks, stats.lent_blocks, stats.num_sequences) == (
        0,
        0,
        0,
        0,
    )
    assert cache.evict(60) + stats.free_blocks == 60
    audit.check(cache)
