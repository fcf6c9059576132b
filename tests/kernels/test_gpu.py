"""Properties of the kernels that only a GPU can show. The other tests of this folder compare the bytes there too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity

from radixkv_kernels import (
    Beams,
    Fences,
    InputError,
    Pool,
    Quantized,
    backend,
    dequantize,
    fork_blocks,
    gather,
    quantize,
    reference,
    reorder,
    scatter,
    scrub,
)
from tests.kernels.waiting import no_waiting

pytestmark = pytest.mark.gpu


@pytest.fixture
def storage() -> torch.Tensor:
    storage = torch.zeros(64, 4, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    storage[:32].fill_(1)
    fork_blocks(storage, [0], [63], [1])  # compile and load the kernel before the test watches it
    return storage


def test_cuda_uses_the_triton_path(storage: torch.Tensor) -> None:
    assert backend(storage) == "triton"


def test_fork_never_waits_for_the_device(storage: torch.Tensor) -> None:
    ids = np.arange(16, dtype=np.int32)
    with no_waiting():
        fork_blocks(storage, ids, ids + 32, np.full(16, 7, dtype=np.int32))
        with pytest.raises(InputError):
            fork_blocks(storage, ids, ids, ids + 1)
    assert (storage[32:48, :, :, :7] == 1).all()
    assert not storage[32:48, :, :, 7:].any()


@pytest.mark.parametrize("num_pairs", [1, 8, 32, 33, 1000, 4000])
def test_a_busy_device_is_not_waited_for(num_pairs: int) -> None:
    """This holds for pairs as arguments, as a table sent with the command, and as a table in pinned memory."""
    storage = torch.zeros(8001, 1, 2, 1, 1, 8, dtype=torch.int32, device="cuda")
    storage[:4000].fill_(1)
    ids = np.arange(num_pairs)
    ones = np.ones(num_pairs, dtype=np.int32)
    fork_blocks(storage, ids, ids + 4000, ones)  # compile the kernel and allocate the pinned memory
    storage[4000:].zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # one second
    fork_blocks(storage, ids, ids + 4000, ones)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert (storage[4000 : 4000 + num_pairs] == 1).all() and not storage[4000 + num_pairs :].any()


@pytest.mark.parametrize(
    ("num_pairs", "kernel"),
    [(1, "copy_few_kernel"), (8, "copy_few_kernel"), (32, "copy_few_kernel"), (33, "copy_kernel")],
)
def test_all_pairs_run_in_one_launch(storage: torch.Tensor, num_pairs: int, kernel: str) -> None:
    ids = np.arange(num_pairs, dtype=np.int32)
    rows = np.full(num_pairs, 5, dtype=np.int32)
    assert launches_of(lambda: fork_blocks(storage, ids % 20, ids + 20, rows)) == [kernel]


@pytest.mark.parametrize("first", [(0, 1, 1), (16, 32, 16)], ids=["ones", "multiples-of-16"])
def test_a_kernel_for_few_pairs_is_compiled_for_any_numbers(
    storage: torch.Tensor, first: tuple[int, int, int]
) -> None:
    """The numbers of the first launch do not matter, although Triton could specialise on them."""
    from radixkv_kernels import copy_triton

    copy_triton._copier.cache_clear()
    fork_blocks(storage, *([number] for number in first))
    storage[32:].zero_()
    fork_blocks(storage, [3, 5, 7], [61, 62, 63], [2, 7, 15])
    for block, rows in ((61, 2), (62, 7), (63, 15)):
        assert (storage[block, :, :, :rows] == 1).all() and not storage[block, :, :, rows:].any()
    assert not storage[32:61].any()


def test_few_pairs_are_frozen_in_a_graph(storage: torch.Tensor) -> None:
    """The pairs are arguments of the launch, so a replay reads no memory of the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fork_blocks(storage, [1, 2], [60, 61], [16, 3])
    assert not storage[60:62].any()
    graph.replay()
    assert (storage[60] == 1).all() and (storage[61, :, :, :3] == 1).all()
    assert not storage[61, :, :, 3:].any()


def test_ids_on_the_device_are_refused(storage: torch.Tensor) -> None:
    with pytest.raises(InputError, match="host"):
        fork_blocks(storage, torch.zeros(1, dtype=torch.int32, device="cuda"), [1], [1])


def test_enqueues_on_the_current_stream(storage: torch.Tensor) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        storage[0].fill_(3)
        fork_blocks(storage, [0], [40], [16])
    stream.synchronize()
    assert (storage[40] == 3).all()


def launches_of(call: Callable[[], object]) -> list[str]:
    """The names of this package's kernels that a call launches, in order.

    The call is made twice, once where waiting raises.
    """
    with no_waiting():
        call()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.name.endswith("_kernel")]


def every_call(storage: torch.Tensor) -> dict[str, Callable[[], object]]:
    """A call of each kernel except reorder, on blocks 0 to 23. All kernels are already compiled."""
    ids, targets = list(range(24)), list(range(32, 56))
    staging = torch.zeros((24, *Pool.of(storage).block_shape), dtype=storage.dtype, device="cuda")
    record_bytes = Quantized(Pool.of(storage), "int4").record_bytes
    records = torch.zeros((24, record_bytes), dtype=torch.uint8, device="cuda")
    calls = {
        "copy_few_kernel": lambda: gather(storage, ids, staging),
        "copy_few_kernel ": lambda: scatter(staging, storage, targets),
        "quantize_kernel": lambda: quantize(storage, ids, records, "int4"),
        "dequantize_kernel": lambda: dequantize(records, storage, targets, "int4"),
        "scrub_kernel": lambda: scrub(storage, targets),
    }
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    return calls


def test_every_kernel_is_one_launch_and_waits_for_nothing(storage: torch.Tensor) -> None:
    for name, call in every_call(storage).items():
        assert launches_of(call) == [name.strip()], name


def search(num_beams: int) -> tuple[torch.Tensor, Beams]:
    """Beams that share a prompt of 5 rows in blocks of 4, and their storage."""
    storage = torch.randn(200, 2, 2, 4, 2, 64, dtype=torch.float16, device="cuda")
    beams = Beams(
        [[0, 1]] * num_beams, [5] * num_beams, [1] * num_beams, range(2, 200),
        num_blocks=200, block_size=4, max_columns=40, device="cuda",
    )  # fmt: skip
    return storage, beams


def test_reorder_replays_in_a_graph_with_other_parents() -> None:
    (storage, beams), (twin_storage, twin) = search(8), search(8)
    twin_storage.copy_(storage)
    parents = torch.zeros(8, dtype=torch.int32, device="cuda")
    reorder(storage, beams, parents)  # compile before the capture
    reference.reorder(twin_storage, twin, parents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reorder(storage, beams, parents)
    rng = np.random.default_rng(0)
    for _ in range(40):
        step = torch.from_numpy(rng.integers(0, 8, 8, dtype=np.int32))
        parents.copy_(step)
        graph.replay()
        reference.reorder(twin_storage, twin, step)
        assert beams.read() == twin.read()
        assert torch.equal(beams.refs, twin.refs)
        assert torch.equal(storage, twin_storage)
        beams.check()


def test_reorder_is_three_launches_and_waits_for_nothing() -> None:
    storage, beams = search(4)
    parents = torch.zeros(4, dtype=torch.int32, device="cuda")
    reorder(storage, beams, parents)
    torch.cuda.synchronize()
    launches = launches_of(lambda: reorder(storage, beams, parents))
    assert launches == ["plan_kernel", "permute_kernel", "finish_kernel"]


def test_copies_and_scrubs_on_many_streams_have_the_result_of_sequential_execution() -> None:
    rng = np.random.default_rng(0)
    storage = torch.randn(32, 8, 2, 16, 8, 128, dtype=torch.float16, device="cuda")
    want = storage.clone()
    fences = Fences.of(storage.device)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(400):
        ids = rng.permutation(32)[:8].tolist()
        with torch.cuda.stream(streams[rng.integers(4)]):
            fences.join()
            if rng.integers(3):
                fork_blocks(storage, ids[:4], ids[4:], [16] * 4)
                reference.fork_blocks(want, ids[:4], ids[4:], [16] * 4)
            else:
                with fences.aside():
                    scrub(storage, ids[:2])
                reference.scrub(want, ids[:2])
    torch.cuda.synchronize()
    assert torch.equal(storage, want)


def test_joins_and_side_work_do_not_wait(storage: torch.Tensor) -> None:
    fences = Fences.of(storage.device)
    scrub(storage, [0])
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with no_waiting():
        with torch.cuda.stream(other):
            fences.join()
        with fences.aside():
            scrub(storage, [1, 2])
        fences.join()
    assert not storage[1:3].any()
