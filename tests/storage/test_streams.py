"""A cache that uses several streams of a device.

Freed blocks are neither zeroed nor overwritten by their next owner while earlier work still reads or copies them.
Tested on a simulated device with a clock, and on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv import CacheConfig, CapacityError, KernelError, KVLayout, Namespace, PrefixCache, Tenant, audit
from radixkv.storage import DeviceStorage
from radixkv.storage import device as device_module
from radixkv_kernels import Fences, reference
from tests.kernels.streams import Device

NUM_BLOCKS, BLOCK = 24, 4
SPACES = (Namespace("strict", "m"), Namespace("burst", "m"), Namespace("other", "m"))
Blocks = frozenset[int]


class Engine:
    """Two workers and an operator that share a cache, each on a stream of its own. A sequence stays with its worker.

    ``launch(reads, writes)`` is work of the engine on these blocks, on the current stream.
    """

    def __init__(
        self,
        cache: PrefixCache,
        on: Callable[[str], Any],
        launch: Callable[[Blocks, Blocks], None],
        seed: int,
    ):
        self.cache, self.on, self.launch, self.draw = cache, on, launch, random.Random(seed)
        self.running: dict[str, list[Any]] = {"decode": [], "prefill": []}
        cache.add_tenant(Tenant("strict", guaranteed_blocks=6, mode="strict"))

    def step(self) -> None:
        """Make one call of one of the three, and the compute that follows it."""
        act = self.draw.choice(
            (self.ask, self.ask, self.grow, self.grow, self.fork, self.fork, self.end, self.forget)
        )
        worker = self.draw.choice(tuple(self.running))
        with self.on(worker):
            try:
                act(worker, self.running[worker])
            except CapacityError:
                for sequence in self.running[worker][::2]:
                    sequence.release()
                self.running[worker] = self.running[worker][1::2]

    def ask(self, worker: str, running: list[Any]) -> None:
        ids = [self.draw.randrange(2) for _ in range(self.draw.randrange(1, 14))]
        sequence = self.cache.open(self.draw.choice(SPACES), ids)
        running.append(sequence)
        cached = sequence.num_cached_tokens // BLOCK
        self.launch(ids_of(sequence.block_table[:cached]), ids_of(sequence.block_table[cached:]))
        sequence.commit(self.draw.randrange(sequence.num_cached_tokens, len(ids) + 1))

    def grow(self, worker: str, running: list[Any]) -> None:
        if running:
            self.cache.append(running, [self.draw.randrange(2) for _ in running])
            for sequence in running:
                self.launch(ids_of(sequence.block_table), ids_of(sequence.block_table[-1:]))

    def fork(self, worker: str, running: list[Any]) -> None:
        if 0 < len(running) < 4:
            running += self.draw.choice(running).fork(self.draw.randrange(1, 3))

    def end(self, worker: str, running: list[Any]) -> None:
        if running:
            with self.on(self.draw.choice((worker, "operator"))):
                running.pop(self.draw.randrange(len(running))).release()

    def forget(self, worker: str, running: list[Any]) -> None:
        space = self.draw.choice(SPACES)
        with self.on("operator"):
            if self.draw.randrange(2):
                self.cache.evict(self.draw.randrange(NUM_BLOCKS))
            else:
                self.cache.clear(space)
        match = self.cache.match(space, [self.draw.randrange(2) for _ in range(2 * BLOCK)])
        with self.cache.lease(match) as lease:
            self.launch(ids_of(lease.block_ids), frozenset())


def ids_of(block_ids: Any) -> Blocks:
    return frozenset(int(block_id) for block_id in block_ids)


def random_life(seed: int, fences: type[Fences] = Fences, num_steps: int = 100) -> tuple[Device, PrefixCache]:
    """Return a device and a cache after random calls. Each piece of work on the device takes a time of its own."""
    device, draw = Device(), random.Random(seed)

    def launch(reads: Any, writes: Any, num_rows: Any = None) -> None:
        device.run(ids_of(reads), ids_of(writes), draw.choice((0.1, 1, 1, 9)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fences, "of", lambda _: fences(device))
        watch_kernels(patch, launch, partial(launch, []))
        cache = PrefixCache(CacheConfig(NUM_BLOCKS, BLOCK, KVLayout(1, 1, 1, "int8")))
        engine = Engine(cache, device.use, launch, seed)
        for _ in range(num_steps):
            engine.step()
            device.now += draw.choice((0, 0, 0.5, 20))
    assert audit.check(cache).ok
    return device, cache


def watch_kernels(
    patch: pytest.MonkeyPatch, on_copies: Callable[..., None], on_scrub: Callable[..., None]
) -> None:
    """Call the callbacks before a storage launches copies and scrubs."""
    copies, scrub = device_module.fork_blocks, device_module.scrub

    def fork_blocks(pool: Any, src: Any, dst: Any, num_rows: Any) -> None:
        on_copies(src, dst, num_rows)
        copies(pool, src, dst, num_rows)

    def scrubs(pool: Any, block_ids: Any) -> None:
        on_scrub(block_ids)
        scrub(pool, block_ids)

    patch.setattr(device_module, "fork_blocks", fork_blocks)
    patch.setattr(device_module, "scrub", scrubs)


@given(seed=st.integers(0, 2**32))
def test_no_block_is_used_after_it_was_freed(seed: int) -> None:
    device, _ = random_life(seed)
    assert device.first_race() is None


def test_a_random_life_copies_scrubs_and_uses_every_stream() -> None:
    """Otherwise the test above would have nothing to find."""
    lives = [random_life(seed) for seed in range(10)]
    assert {work.stream for device, _ in lives for work in device.done} == {"decode", "prefill", "side"}
    assert sum(cache.stats().copied_blocks for _, cache in lives) > 30
    assert sum(cache.stats().scrubbed_blocks for _, cache in lives) > 100


class NeverJoins(Fences):
    """Hands out blocks without waiting for the other streams."""

    def join(self) -> None:
        self.add(self._streams.current())


class NeverWaits(Fences):
    """Starts work on the side stream at once."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        with self._streams.use(self._streams.side):
            yield
        self._aside = self._streams.record(self._streams.side)


class WaitsForTheCallerOnly(Fences):
    """Work on the side stream waits for the stream that freed a block, but not for those that compute."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._engine.clear()
        with super().aside():
            yield


@pytest.mark.parametrize("bug", [NeverJoins, NeverWaits, WaitsForTheCallerOnly])
def test_a_missing_fence_is_found(bug: type[Fences]) -> None:
    assert any(random_life(seed, bug)[0].first_race() for seed in range(20))


def test_one_stream_without_strict_tenants_costs_no_event() -> None:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fences, "of", lambda _: Fences(device))
        cache = PrefixCache(CacheConfig(NUM_BLOCKS, BLOCK, KVLayout(1, 1, 1, "int8")))
    device.num_events = device.num_waits = 0
    for at in range(20):
        with cache.open(SPACES[1], [at, 1, 2, 3]) as sequence:
            sequence.commit(4)
    assert cache.stats().scrubbed_blocks == device.num_events == device.num_waits == 0


class Fails(Fences):
    """A device that fails while its streams are ordered, once ``is_broken`` is set."""

    is_broken = False

    def join(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access")
        super().join()


def test_a_device_failure_fails_only_the_call() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fences, "of", lambda _: Fails(Device()))
        cache = PrefixCache(CacheConfig(NUM_BLOCKS, BLOCK, KVLayout(1, 1, 1, "int8")))
    with cache.open(SPACES[1], range(9)) as sequence:
        sequence.commit(9)
        free, match = cache.stats().free_blocks, cache.match(SPACES[1], range(9))
        assert cache.storage is not None and isinstance(cache.storage.fences, Fails)
        cache.storage.fences.is_broken = True
        for call in (
            lambda: cache.open(SPACES[1], range(9)),
            lambda: cache.lease(match),
            lambda: cache.allocate(2),
        ):
            with pytest.raises(KernelError, match="ordering the streams of cpu failed: CUDA error"):
                call()
            assert cache.stats().free_blocks == free
            assert audit.check(cache).ok
        cache.storage.fences.is_broken = False
        assert sequence.is_open
    with cache.open(SPACES[1], range(9)) as again:
        assert again.num_cached_tokens == 8


def test_a_cpu_needs_no_fences() -> None:
    storage = DeviceStorage(KVLayout(1, 1, 1), 2, 2)
    storage.add_stream("forward")
    storage.join()
    assert storage.fences is None


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_under_stress_a_gpu_gives_the_result_of_sequential_execution(seed: int) -> None:
    cache = PrefixCache(CacheConfig(NUM_BLOCKS, BLOCK, KVLayout(4, 8, 128, "float32"), device="cuda"))
    storage, draw = cache.storage, random.Random(seed)
    assert isinstance(storage, DeviceStorage)
    data, truth = storage.data, torch.zeros(storage.data.shape)
    streams = {name: torch.cuda.Stream() for name in ("decode", "prefill", "operator")}
    wrong: list[torch.Tensor] = []

    def sent(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to("cuda", non_blocking=True)

    def launch(reads: Blocks, writes: Blocks) -> None:
        torch.cuda._sleep(draw.randrange(200_000))
        there = sent(torch.tensor(sorted(reads), dtype=torch.int64))
        wrong.append((data[there] != sent(truth[sorted(reads)])).any())
        value = draw.randrange(1, 2**24)
        data.index_fill_(0, sent(torch.tensor(sorted(writes), dtype=torch.int64)), value)
        truth[sorted(writes)] = value

    def zero(block_ids: Any) -> None:
        truth[np.asarray(block_ids).tolist()] = 0

    with pytest.MonkeyPatch.context() as patch:
        watch_kernels(patch, partial(reference.fork_blocks, truth), zero)
        engine = Engine(cache, lambda name: torch.cuda.stream(streams[name]), launch, seed)
        torch.cuda.synchronize()
        for _ in range(400):
            engine.step()
    torch.cuda.synchronize()
    assert not any(bool(each) for each in wrong)
    assert torch.equal(data.cpu(), truth)
    assert audit.check(cache).ok
