"""All kernels: a check of their results, then their speed relative to memory.

Each kernel runs once on small blocks and is compared with the torch reference, byte for byte. Without a GPU nothing
else runs, and the report says so. ``TRITON_INTERPRET=1`` checks Triton's kernels without a GPU.

On a GPU the kernels then run on ``num_blocks`` blocks, scattered over twice as many. They are timed as in ``bench
fork``, on a busy device (``seconds``) and on an idle one (``eager_seconds``). Each round calls every kernel, its
alternative without the kernel (``ALTERNATIVES``), one large ``copy_`` and one ``zero_`` of the same bytes, in a
random order. Figures are medians:

- ``of_copy_bandwidth``: bytes read and written per second, relative to ``copy_``.
- ``of_memset``: bytes per second that scrub writes, relative to ``zero_``.
- ``times_faster``: the alternative's seconds divided by the kernel's.

``reorder`` is a step of 64 beams, each with 2,048 blocks of its own (32k tokens in blocks of 16). Each beam continues
from the next one. It is timed as a launch and as the replay of a CUDA graph. Its blocks are one row long, so it
copies no rows. ``beam step`` includes the copies: 4 beams over 1,000 tokens in Llama-2-7B's shape. Its alternative is
an ``index_select`` of the whole cache, as in a common beam search.

Needs torch (and Triton on a GPU): the command imports this module only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import radixkv_kernels
from radixkv.bench.fork import Timing, device_name, time_cuda
from radixkv.bench.measure import versions
from radixkv.errors import ArgumentError, KernelError
from radixkv.storage import DeviceStorage, KVLayout
from radixkv_kernels import Beams, Pool, Quantized, backend, reference
from radixkv_kernels.quantized import Scheme

SCHEMES: tuple[Scheme, ...] = ("fp8", "int8", "int4")
WARMUP_ROUNDS = 5
COPY, MEMSET, BEAM_STEP = "copy_", "zero_", "beam step"
LLAMA_2_7B = KVLayout(num_layers=32, num_kv_heads=32, head_dim=128, dtype="float16")


class Work(NamedTuple):
    """Blocks of random finite values, half of them sources and half targets; the targets of copies; and beams."""

    storage: torch.Tensor
    sources: list[int]
    targets: list[int]
    source_index: torch.Tensor  # the same ids: int64, on the device
    target_index: torch.Tensor
    num_rows: list[int]
    staging: torch.Tensor
    records: dict[Scheme, torch.Tensor]
    beams: Beams
    rows_of_beams: torch.Tensor  # storage of the beams' blocks, one row each
    parents: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All blocks and records that a kernel may change."""
        return [self.storage, self.staging, *self.records.values(), self.rows_of_beams]


class Reference:
    """The reference under the names and arguments of the kernels."""

    fork_blocks = staticmethod(reference.fork_blocks)
    gather = staticmethod(reference.gather)
    scatter = staticmethod(reference.scatter)
    scrub = staticmethod(reference.scrub)
    reorder = staticmethod(reference.reorder)

    @staticmethod
    def quantize(pool: torch.Tensor, block_ids: Sequence[int], records: torch.Tensor, scheme: Scheme) -> None:
        """See ``radixkv_kernels.quantize``."""
        reference.quantize(Quantized(Pool.of(pool), scheme), block_ids, records)

    @staticmethod
    def dequantize(
        records: torch.Tensor, pool: torch.Tensor, block_ids: Sequence[int], scheme: Scheme
    ) -> None:
        """See ``radixkv_kernels.dequantize``."""
        reference.dequantize(Quantized(Pool.of(pool), scheme), block_ids, records)


Kernel = Callable[[Any, Work], None]


def _quantize(scheme: Scheme, ops: Any, work: Work) -> None:
    ops.quantize(work.storage, work.sources, work.records[scheme], scheme)


def _dequantize(scheme: Scheme, ops: Any, work: Work) -> None:
    ops.dequantize(work.records[scheme], work.storage, work.targets, scheme)


KERNELS: dict[str, Kernel] = {
    "fork_blocks": lambda ops, work: ops.fork_blocks(work.storage, work.sources, work.targets, work.num_rows),
    "gather": lambda ops, work: ops.gather(work.storage, work.sources, work.staging),
    "scatter": lambda ops, work: ops.scatter(work.staging, work.storage, work.targets),
    **{f"quantize {scheme}": partial(_quantize, scheme) for scheme in SCHEMES},
    **{f"dequantize {scheme}": partial(_dequantize, scheme) for scheme in SCHEMES},
    "reorder": lambda ops, work: ops.reorder(work.rows_of_beams, work.beams, work.parents),
    "scrub": lambda ops, work: ops.scrub(work.storage, work.targets),
}


ALTERNATIVES: dict[str, tuple[str, Callable[[Work], object]]] = {
    "fork_blocks": ("loop of copy_", lambda work: KERNELS["fork_blocks"](Reference, work)),
    "gather": (
        "index_select",
        lambda work: torch.index_select(work.storage, 0, work.source_index, out=work.staging),
    ),
    "scatter": ("index_copy_", lambda work: work.storage.index_copy_(0, work.target_index, work.staging)),
    "scrub": ("index_fill_", lambda work: work.storage.index_fill_(0, work.target_index, 0)),
}
"""For some kernels, the alternative with torch alone: its name and a call. The resulting bytes are the same."""


def run(
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    num_layers: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    num_blocks: int = 1000,
    repeats: int = 30,
    seed: int = 0,
) -> dict[str, object]:
    """Check all kernels, and on a GPU time them. Returns what ``radixkv bench kernels --json`` prints.

    device: None for the GPU if there is one, otherwise the CPU. GPU memory: about six times ``num_blocks`` blocks
    plus 5 GiB, 17 GiB by default. Raises ConfigError for an invalid device or layout, ArgumentError for other invalid
    arguments, KernelError for a kernel that differs from the reference.
    """
    for argument, value in (("block_size", block_size), ("num_blocks", num_blocks), ("repeats", repeats)):
        if value < 1:
            raise ArgumentError(argument, value, "at least 1")
    wanted = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = DeviceStorage(KVLayout(1, 1, 1), 1, 1, wanted).device
    layout = KVLayout(num_layers, num_kv_heads, head_dim, dtype)
    checked = check(KVLayout(2, 2, 16, dtype), place, seed)
    where = "not on a GPU" if torch.cuda.is_available() else "no GPU"
    report: dict[str, object] = {
        "benchmark": "kernels",
        "device": device_name(place),
        "path": backend(torch.empty(0, device=place)),
        "versions": versions("torch", "triton"),
        "seed": seed,
        "checked": checked,
        "results": [],
        "note": f"{where}: kernels compared with the reference, nothing timed",
    }
    if place.type == "cuda":
        del report["note"]
        report["results"] = measure(layout, block_size, num_blocks, repeats, seed, place)
    return report


def check(layout: KVLayout, device: torch.device, seed: int) -> list[str]:
    """Run each kernel on a few small blocks. Returns their names. Raises KernelError for the first that differs."""
    ours, truth = (make_work(layout, 5, 3, 4, 20, 20, device, seed) for _ in range(2))
    for name, kernel in KERNELS.items():
        kernel(radixkv_kernels, ours)
        kernel(Reference, truth)
        if not _is_same(name, ours, truth):
            raise KernelError(f"{name} on {device} differs from the reference for {layout}")
        if name in ALTERNATIVES:
            other, call = ALTERNATIVES[name]
            call(ours)
            if not _is_same(name, ours, truth):
                raise KernelError(f"{other} on {device} is no alternative to {name} for {layout}")
    return list(KERNELS)


def _is_same(name: str, ours: Work, truth: Work) -> bool:
    if name.startswith("dequantize") and ours.storage.dtype == torch.bfloat16 and ours.storage.is_cpu:
        # Triton's interpreter truncates to bfloat16 instead of rounding. Allow a neighbouring value, then correct it.
        is_near = torch.allclose(ours.storage.float(), truth.storage.float(), rtol=2**-7, atol=0)
        ours.storage.copy_(truth.storage)
        return is_near
    pairs = zip(ours.tensors(), truth.tensors(), strict=True)
    are_same = all(torch.equal(got.view(torch.uint8), want.view(torch.uint8)) for got, want in pairs)
    return are_same and ours.beams.read() == truth.beams.read()


def make_work(
    layout: KVLayout,
    block_size: int,
    num_blocks: int,
    num_beams: int,
    num_tokens: int,
    num_steps: int,
    device: torch.device,
    seed: int,
) -> Work:
    """Make work on scattered blocks, and beams with ``num_tokens`` blocks of one row, for ``num_steps`` steps."""
    rng = np.random.default_rng(seed)
    storage = torch.empty(
        (2 * num_blocks, *layout.block_shape(block_size)), dtype=getattr(torch, layout.dtype), device=device
    )
    storage.normal_(generator=torch.Generator(device).manual_seed(seed))
    ids = rng.permutation(2 * num_blocks)
    pool = Pool.of(storage)
    records = {
        scheme: torch.zeros(
            (num_blocks, Quantized(pool, scheme).record_bytes), dtype=torch.uint8, device=device
        )
        for scheme in SCHEMES
    }
    columns = num_tokens + num_steps
    beams = Beams(
        [range(beam * num_tokens, (beam + 1) * num_tokens) for beam in range(num_beams)],
        [num_tokens] * num_beams,
        [0] * num_beams,
        range(num_beams * num_tokens, num_beams * columns),
        num_blocks=num_beams * columns,
        block_size=1,
        max_columns=columns,
        device=device,
    )
    index = torch.from_numpy(ids).to(device)
    return Work(
        storage,
        ids[:num_blocks].tolist(),
        ids[num_blocks:].tolist(),
        index[:num_blocks],
        index[num_blocks:],
        rng.integers(1, block_size, num_blocks, endpoint=True).tolist(),
        torch.zeros_like(storage[:num_blocks]),
        records,
        beams,
        torch.zeros((num_beams * columns, 1, 2, 1, 1, 8), dtype=storage.dtype, device=device),
        torch.from_numpy(rng.integers(0, num_beams, num_beams, dtype=np.int32)).to(device),
    )


def measure(
    layout: KVLayout, block_size: int, num_blocks: int, repeats: int, seed: int, device: torch.device
) -> list[dict[str, object]]:
    """Time the kernels on a GPU. Returns a row for each."""
    num_steps = (
        4 * (WARMUP_ROUNDS + repeats) + 1
    )  # launched and replayed, each on a busy and on an idle device
    work = make_work(layout, block_size, num_blocks, 64, 2048, num_steps, device, seed)
    work.parents.copy_(torch.arange(1, 65) % 64)  # every beam changes its parent, so every column is moved
    source, target = torch.ones_like(work.staging), torch.zeros_like(work.staging)
    calls: dict[str, Callable[[int], object]] = {
        name: partial(_once, kernel, work) for name, kernel in KERNELS.items()
    }
    beams, steps = beam_step(LLAMA_2_7B, 4, 1000, 2 * (WARMUP_ROUNDS + repeats) + 1, device, seed)
    calls |= steps
    for name in (*KERNELS, BEAM_STEP):
        calls[name](0)  # compile and load before anything is captured or timed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls["reorder"](0)
    calls |= {
        "reorder, graph": lambda _: graph.replay(),
        COPY: lambda _: target.copy_(source),
        MEMSET: lambda _: target.zero_(),
    }
    calls |= {_other(name): partial(_alternative, call, work) for name, (_, call) in ALTERNATIVES.items()}
    seconds = _timed(calls, repeats, seed, device)
    if status := work.beams.read().status | beams.read().status:
        raise KernelError(f"the steps of reorder ended with status {status}")
    return _rows(seconds, _bytes_moved(work))


def beam_step(
    layout: KVLayout, num_beams: int, num_tokens: int, num_steps: int, device: torch.device, seed: int
) -> tuple[Beams, dict[str, Callable[[int], object]]]:
    """Make beams over a shared prompt, with space for ``num_steps`` steps. Returns them and two calls.

    One call is a step of the beams. The other is the ``index_select`` of a common beam search.
    """
    size = 16
    whole, held = num_tokens // size, -(-num_tokens // size)
    columns = -(-(num_tokens + num_steps) // size)
    spare = num_beams * (columns - whole + 1)
    storage = torch.zeros(
        (held + spare, *layout.block_shape(size)), dtype=getattr(torch, layout.dtype), device=device
    )
    beams = Beams(
        [range(held)] * num_beams,
        [num_tokens] * num_beams,
        [whole] * num_beams,
        range(held, held + spare),
        num_blocks=held + spare,
        block_size=size,
        max_columns=columns,
        device=device,
    )
    drawn = np.random.default_rng(seed).integers(0, num_beams, num_beams, dtype=np.int32)
    parents = torch.from_numpy(drawn).to(device)
    rows = storage.new_zeros(
        num_beams, 2 * layout.num_layers, num_tokens, layout.num_kv_heads, layout.head_dim
    )
    chosen, index = torch.empty_like(rows), parents.long()
    return beams, {
        BEAM_STEP: lambda _: radixkv_kernels.reorder(storage, beams, parents),
        _other(BEAM_STEP): lambda _: torch.index_select(rows, 0, index, out=chosen),
    }


def _timed(
    calls: dict[str, Callable[[int], object]], repeats: int, seed: int, device: torch.device
) -> dict[str, Timing]:
    """Median times of each call."""
    rng = np.random.default_rng(seed)
    order = [name for _ in range(WARMUP_ROUNDS + repeats) for name in rng.permutation(list(calls)).tolist()]
    timings = time_cuda([(calls[name], 0) for name in order], device)
    seconds: dict[str, list[Timing]] = {name: [] for name in calls}
    for name, timing in list(zip(order, timings, strict=True))[WARMUP_ROUNDS * len(calls) :]:
        seconds[name].append(timing)
    return {name: Timing(*np.median(np.array(times), axis=0).tolist()) for name, times in seconds.items()}


def _rows(seconds: dict[str, Timing], moved: dict[str, int]) -> list[dict[str, object]]:
    """The reported row of each kernel. Its alternative fills columns of the same row."""
    speed = {name: moved[name] / seconds[name].seconds for name in moved}
    others = {name: other for name, (other, _) in ALTERNATIVES.items()}
    others[BEAM_STEP] = "index_select of the whole cache"
    return [
        {
            "kernel": name,
            "bytes": moved.get(name),
            **timing._asdict(),
            "of_copy_bandwidth": speed[name] / speed[COPY] if name in moved else None,
            "of_memset": speed[name] / speed[MEMSET] if name == "scrub" else None,
            "alternative": others.get(name),
            "times_faster": seconds[_other(name)].seconds / timing.seconds if name in others else None,
        }
        for name, timing in seconds.items()
        if not name.startswith(_other(""))
    ]


def _other(name: str) -> str:
    """The name under which a kernel's alternative is timed."""
    return f"instead of {name}"


def _alternative(call: Callable[[Work], object], work: Work, _: int) -> None:
    call(work)


def _once(kernel: Kernel, work: Work, _: int) -> None:
    kernel(radixkv_kernels, work)


def _bytes_moved(work: Work) -> dict[str, int]:
    """Bytes read and written by the kernels whose cost is bandwidth."""
    blocks = work.staging.nbytes
    row_bytes = blocks // len(work.sources) // work.storage.shape[3]
    moved = {COPY: 2 * blocks, MEMSET: blocks, "scrub": blocks, "gather": 2 * blocks, "scatter": 2 * blocks}
    moved["fork_blocks"] = 2 * row_bytes * sum(work.num_rows)
    for scheme, records in work.records.items():
        moved[f"quantize {scheme}"] = moved[f"dequantize {scheme}"] = blocks + records.nbytes
    return moved
