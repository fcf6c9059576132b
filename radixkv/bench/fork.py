"""The cost of a fork's copies: fork_blocks beside its alternatives, as a share of the memory's bandwidth.

A step's copy-on-write copies the valid rows of a few tail blocks (``num_rows``; None: between 1 and block_size - 1,
drawn from the seed). The variants do that work on the same blocks:

    fork_blocks       one call: on a GPU one upload of the pairs and one launch, elsewhere one copy_ a pair
    launch_per_layer  the same over one tensor a layer: the pairs are uploaded once, then one launch a layer
    copy_loop         a Python loop of copy_, one a pair
    index_copy        index_select and index_copy_ over whole blocks, indices uploaded beforehand
    graph_replay      on a GPU: fork_blocks' launch replayed from a CUDA graph, of many pairs uploaded beforehand
    contiguous        one copy_ of as many contiguous bytes: the bandwidth of memory for so few bytes

First each variant is compared, byte for byte, with the torch reference. A difference stops the run.

Then ``repeats`` rounds are timed for each number of pairs. A round calls each variant on other blocks, in a random
order. ``rotate_bytes`` bytes, more than the caches hold, lie between two visits of a block. All times are medians:

- ``seconds``: the cost for the device. The device is kept busy until the whole call is enqueued. Timed by CUDA
  events.
- ``eager_seconds``: the same on an idle device, which waits for the host.
- ``enqueue_seconds``: the time of the host.

The bytes of a call are its valid rows, read and written. Bandwidth is relative to one large ``copy_`` in the same
rounds. Its reads and writes count too:

- ``of_copy_bandwidth``: the call's bytes per second, relative to those of the large copy.
- ``seconds_above_bytes``, ``eager_seconds_above_bytes``: the time of a call beyond its bytes at that bandwidth.

Needs torch (and Triton on a GPU): the command imports this module only when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.bench.measure import processor, versions
from radixkv.errors import ArgumentError, KernelError
from radixkv.storage import DeviceStorage, KVLayout
from radixkv_kernels import Pool, backend, fork_blocks, reference
from radixkv_kernels.checks import BlockPairs

CPU_ROTATE_BYTES = 512 << 20
CUDA_COPY_BYTES = 1 << 30
"""Size of the copy that measures the bandwidth. It is large enough that the cost of a launch doesn't count."""
BUSY_CYCLES = 2_000_000
"""About a millisecond of work for the device, while the host enqueues a call."""
WARMUP_ROUNDS = 3
COPY, CONTIGUOUS = "copy", "contiguous"
MAX_CHECKED_PAIRS = 4

Int32Array = NDArray[np.int32]
Progress = Callable[[int, int], None]


class Pairs(NamedTuple):
    """The copies of one step, in the form that each variant needs."""

    sources: Int32Array
    targets: Int32Array
    num_rows: Int32Array
    source_index: torch.Tensor  # int64, on the device
    target_index: torch.Tensor


class Graph(NamedTuple):
    """A captured launch, and the uploaded table that it reads, if any."""

    replay: Callable[[], None]
    table: torch.Tensor | None


class Workload(NamedTuple):
    """Blocks of random bytes, as one storage and as one storage per layer. No block appears in two steps."""

    storage: torch.Tensor
    pool: Pool
    layers: list[torch.Tensor]
    steps: list[Pairs]
    graphs: list[Graph]  # one per step, on a GPU only

    @property
    def bytes_per_step(self) -> NDArray[np.float64]:
        """Bytes of the valid rows of each step, read and written."""
        row_bytes = self.storage[0].nbytes / self.storage.shape[3]
        return 2 * row_bytes * np.array([step.num_rows.sum() for step in self.steps], dtype=np.float64)


class Timing(NamedTuple):
    """Times of one call; see the module's docstring. On a CPU all three are equal."""

    seconds: float
    eager_seconds: float
    enqueue_seconds: float


class Sample(NamedTuple):
    """The calls of one variant: mean bytes, median times, and the median of bytes / seconds."""

    bytes: float
    seconds: float
    eager_seconds: float
    enqueue_seconds: float
    bytes_per_s: float


Variant = Callable[[Workload, int], None]


def run(
    *,
    device: str = "cpu",
    dtype: str = "bfloat16",
    num_layers: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    num_pairs: Sequence[int] = (1, 4, 16),
    num_rows: int | None = None,
    repeats: int = 30,
    seed: int = 0,
    rotate_bytes: int | None = None,
    num_threads: int = 1,
    progress: Progress | None = None,
) -> dict[str, object]:
    """Measure all variants for each number of pairs. Returns what ``radixkv bench fork --json`` prints.

    The default layout is Llama-3-8B's. ``num_rows``: valid rows of every tail, None to draw them. ``num_threads``:
    threads of torch on the CPU. ``progress(done, total)`` is called after each number of pairs.

    ``rotate_bytes``: None means four times the L2 cache on CUDA and 512 MiB on a CPU. The blocks take about twice
    ``rotate_bytes``, or four times the blocks of the largest step if that is more. Measuring the copy takes as much
    again (2 GiB on CUDA).

    Raises ConfigError for an invalid device or layout, ArgumentError for other invalid arguments, and KernelError if
    a variant's bytes differ from the reference's.
    """
    _check_arguments(block_size, num_pairs, num_rows, repeats, seed, rotate_bytes, num_threads)
    layout = KVLayout(num_layers, num_kv_heads, head_dim, dtype)
    with _torch_threads(num_threads):
        probe = DeviceStorage(layout, 1, block_size, device)
        if rotate_bytes is None:
            rotate_bytes = _default_rotate_bytes(probe.device)
        check_variants(layout, block_size, device, seed)
        results: list[dict[str, object]] = []
        copies: list[float] = []
        for done, count in enumerate(num_pairs, start=1):
            work = make_workload(layout, block_size, device, count, rotate_bytes, seed, num_rows)
            samples = measure(work, repeats, rotate_bytes, seed)
            copies.append(samples.pop(COPY).bytes_per_s)
            results += [_result(name, count, sample, copies[-1]) for name, sample in samples.items()]
            if progress is not None:
                progress(done, len(num_pairs))
    return {
        "benchmark": "fork",
        "device": device_name(probe.device),
        "path": backend(probe.data),
        "versions": versions("torch", "triton"),
        "seed": seed,
        "repeats": repeats,
        "num_threads": num_threads,
        "layout": {
            **asdict(layout),
            "block_size": block_size,
            "block_bytes": layout.bytes_per_token * block_size,
        },
        "num_rows": num_rows,
        "rotate_bytes": rotate_bytes,
        "copy_bytes_per_s": float(np.median(copies)),
        "results": results,
    }


# -- the variants --------------------------------------------------------------------------------------


def one_call(work: Workload, step: int) -> None:
    """Copy all pairs, layers, keys and values with one fork_blocks."""
    pairs = work.steps[step]
    fork_blocks(work.pool, pairs.sources, pairs.targets, pairs.num_rows)


def launch_per_layer(work: Workload, step: int) -> None:
    """Launch once per layer, as over an engine's own per-layer tensors. Arguments are unchecked and uploaded once."""
    pairs = work.steps[step]
    columns = (pairs.sources.tolist(), pairs.targets.tolist(), pairs.num_rows.tolist())
    if backend(work.storage) == "triton":
        from radixkv_kernels import copy_triton, launch

        uploaded = launch.upload(BlockPairs(*columns), work.storage.device)
        for pool in map(Pool.of, work.layers):
            copy_triton.copier(pool, pool).copy_many(uploaded, max(columns[2]))
        return
    for layer in work.layers:
        reference.fork_blocks(layer, *columns)


def copy_loop(work: Workload, step: int) -> None:
    """Call copy_ for each pair: on a GPU, one launch per pair."""
    pairs = work.steps[step]
    columns = (pairs.sources.tolist(), pairs.targets.tolist(), pairs.num_rows.tolist())
    reference.fork_blocks(work.storage, *columns)


def index_copy(work: Workload, step: int) -> None:
    """Copy whole blocks through a temporary tensor, which reads and writes every byte twice."""
    pairs = work.steps[step]
    words = (
        work.storage.view(torch.uint8) if work.storage.element_size() == 1 else work.storage
    )  # index_copy_ doesn't support fp8
    words.index_copy_(0, pairs.target_index, words.index_select(0, pairs.source_index))


def graph_replay(work: Workload, step: int) -> None:
    """Replay one_call's launch, without its checks and without its upload of many pairs."""
    work.graphs[step].replay()


VARIANTS: dict[str, Variant] = {
    "fork_blocks": one_call,
    "launch_per_layer": launch_per_layer,
    "copy_loop": copy_loop,
    "index_copy": index_copy,
}


def variants_on(storage: torch.Tensor) -> dict[str, Variant]:
    """Return the variants that can run on the storage's device."""
    if storage.is_cuda and backend(storage) == "triton":
        return {**VARIANTS, "graph_replay": graph_replay}
    return VARIANTS


def check_variants(layout: KVLayout, block_size: int, device: str, seed: int) -> None:
    """Raise KernelError unless each variant gives the reference's bytes in all valid rows.

    Other rows must not change, except with ``index_copy``, which copies whole blocks.
    """
    probe = DeviceStorage(layout, 1, block_size, device).data
    for name, variant in variants_on(probe).items():
        work = make_workload(layout, block_size, device, MAX_CHECKED_PAIRS, 0, seed)
        pairs = work.steps[0]
        num_rows = np.full_like(pairs.num_rows, block_size) if name == "index_copy" else pairs.num_rows
        want = work.storage.clone()
        reference.fork_blocks(want, pairs.sources.tolist(), pairs.targets.tolist(), num_rows.tolist())
        variant(work, 0)
        got = torch.cat(work.layers, dim=1) if name == "launch_per_layer" else work.storage
        if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
            raise KernelError(
                f"{name} on {device} differs from the reference for {layout}, block_size={block_size}"
            )


# -- workload and measurement --------------------------------------------------------------------------


def make_workload(
    layout: KVLayout,
    block_size: int,
    device: str,
    num_pairs: int,
    rotate_bytes: int,
    seed: int,
    num_rows: int | None = None,
) -> Workload:
    """Make two or more steps of ``num_pairs`` copies between random blocks, ``rotate_bytes`` or more in all."""
    step_bytes = 2 * num_pairs * layout.bytes_per_token * block_size
    num_steps = max(2, -(-rotate_bytes // step_bytes))
    storage = DeviceStorage(layout, num_steps * 2 * num_pairs, block_size, device).data
    rng = np.random.default_rng(seed)
    block_ids = rng.permutation(len(storage)).astype(np.int32).reshape(num_steps, 2, num_pairs)
    fewest, most = (1, max(1, block_size - 1)) if num_rows is None else (num_rows, num_rows)
    rows = rng.integers(fewest, most, (num_steps, num_pairs), dtype=np.int32, endpoint=True)
    steps = [
        Pairs(ids[0], ids[1], count, *(torch.tensor(side, dtype=torch.int64, device=device) for side in ids))
        for ids, count in zip(block_ids, rows, strict=True)
    ]
    pool = Pool.of(storage)
    graphs = [_captured(pool, step) for step in steps] if "graph_replay" in variants_on(storage) else []
    # Capturing executes each copy once. The bytes are drawn after it, or a missing copy would go unnoticed.
    storage.view(torch.uint8).random_(0, 256, generator=torch.Generator(storage.device).manual_seed(seed))
    layers = [storage[:, layer : layer + 1].contiguous() for layer in range(layout.num_layers)]
    return Workload(storage, pool, layers, steps, graphs)


def _captured(pool: Pool, pairs: Pairs) -> Graph:
    from radixkv_kernels import copy_triton, launch

    columns = BlockPairs(*(column.tolist() for column in pairs[:3]))
    copier = copy_triton.copier(pool, pool)
    table = None
    if copier.may_copy_few(len(columns.sources)):
        copy = partial(copier.copy_few, columns)
    else:
        table = launch.upload(columns, pool.device)
        copy = partial(copier.copy_many, table, max(columns.num_rows))
    copy()  # compile and load before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy()
    return Graph(graph.replay, table)


def measure(work: Workload, repeats: int, rotate_bytes: int, seed: int) -> dict[str, Sample]:
    """Time every variant and a large ``copy_`` in each of ``repeats`` rounds, in a random order.

    The random order spreads other load, and the dirty cache lines of a large copy, over all variants. Each call takes
    the next step, so ``rotate_bytes`` bytes lie between two visits of a block.
    """
    device = work.storage.device
    step_bytes = work.bytes_per_step
    num_bytes = CUDA_COPY_BYTES if device.type == "cuda" else max(rotate_bytes, 1 << 20)
    source = torch.ones(max(num_bytes, int(step_bytes.max()) // 2), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    calls: dict[str, Callable[[int], object]] = {COPY: lambda _: target.copy_(source)}
    calls |= {name: partial(variant, work) for name, variant in variants_on(work.storage).items()}
    calls[CONTIGUOUS] = partial(_contiguous, source, target, step_bytes)
    rng = np.random.default_rng(seed)
    rounds = [rng.permutation(list(calls)).tolist() for _ in range(WARMUP_ROUNDS + repeats)]
    turns = [(name, number % len(work.steps)) for number, name in enumerate(chain.from_iterable(rounds))]
    watch = time_cuda if device.type == "cuda" else _time_host
    timings = watch([(calls[name], step) for name, step in turns], device)
    measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
    for (name, step), timing in list(zip(turns, timings, strict=True))[WARMUP_ROUNDS * len(calls) :]:
        moved = 2 * source.nbytes if name == COPY else float(step_bytes[step])
        measured[name].append((moved, *timing))
    return {name: _sample(np.array(rows)) for name, rows in measured.items()}


def _contiguous(
    source: torch.Tensor, target: torch.Tensor, step_bytes: NDArray[np.float64], step: int
) -> None:
    """Copy as many bytes as the step, at another place than the step before."""
    num_bytes = int(step_bytes[step]) // 2
    start = (step * num_bytes) % (len(source) - num_bytes + 1) // 16 * 16
    target[start : start + num_bytes].copy_(source[start : start + num_bytes])


def _sample(rows: NDArray[np.float64]) -> Sample:
    num_bytes, *seconds = rows.T
    medians = (float(np.median(values)) for values in (*seconds, num_bytes / seconds[0]))
    return Sample(float(num_bytes.mean()), *medians)


Order = list[tuple[Callable[[int], object], int]]


def _time_host(order: Order, _: torch.device) -> list[Timing]:
    timings = []
    for call, step in order:
        start = time.perf_counter()
        call(step)
        timings.append(Timing(*[time.perf_counter() - start] * 3))
    return timings


def time_cuda(order: Order, device: torch.device) -> list[Timing]:
    """Time each call on a busy device and on an idle device. The host is timed in the second case."""
    with torch.cuda.device(device):
        busy = [_between_events(call, step, is_idle=False) for call, step in order]
        torch.cuda.synchronize()
        idle = [_between_events(call, step, is_idle=True) for call, step in order]
        torch.cuda.synchronize()
    return [
        Timing(before.elapsed_time(after) / 1e3, start.elapsed_time(end) / 1e3, enqueue)
        for (before, after, _), (start, end, enqueue) in zip(busy, idle, strict=True)
    ]


def _between_events(call: Callable[[int], object], step: int, *, is_idle: bool) -> tuple[Any, Any, float]:
    """Return events on the device before and after a call, and the seconds of the host."""
    before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    if is_idle:
        torch.cuda.synchronize()
    else:
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    before.record()
    start = time.perf_counter()
    call(step)
    enqueue = time.perf_counter() - start
    after.record()
    return before, after, enqueue


def _result(name: str, num_pairs: int, sample: Sample, copy_bytes_per_s: float) -> dict[str, object]:
    return {
        "variant": name,
        "num_pairs": num_pairs,
        **sample._asdict(),
        "seconds_above_bytes": sample.seconds - sample.bytes / copy_bytes_per_s,
        "eager_seconds_above_bytes": sample.eager_seconds - sample.bytes / copy_bytes_per_s,
        "of_copy_bandwidth": sample.bytes_per_s / copy_bytes_per_s,
    }


# -- arguments and machine -----------------------------------------------------------------------------


def _check_arguments(
    block_size: int,
    num_pairs: Sequence[int],
    num_rows: int | None,
    repeats: int,
    seed: int,
    rotate_bytes: int | None,
    num_threads: int,
) -> None:
    if not num_pairs or min(num_pairs) < 1:
        raise ArgumentError("num_pairs", list(num_pairs), "one or more counts, each at least 1")
    if num_rows is not None and not 1 <= num_rows <= block_size:
        raise ArgumentError("num_rows", num_rows, f"1 to block_size = {block_size}, or None")
    least = {
        "block_size": (block_size, 1),
        "repeats": (repeats, 1),
        "seed": (seed, 0),
        "num_threads": (num_threads, 1),
    }
    if rotate_bytes is not None:
        least["rotate_bytes"] = (rotate_bytes, 1)
    for argument, (value, allowed) in least.items():
        if value < allowed:
            raise ArgumentError(argument, value, f"at least {allowed}")


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _default_rotate_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return 4 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    return CPU_ROTATE_BYTES


def device_name(device: torch.device) -> str:
    """The model of a GPU, or of the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type}: {processor()}"
