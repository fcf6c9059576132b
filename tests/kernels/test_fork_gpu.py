"""What only a GPU can show of fork_blocks; its bytes are compared there by ``test_fork.py``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixkv_kernels import InputError, backend, fork_blocks

pytestmark = pytest.mark.gpu


@pytest.fixture
def storage() -> torch.Tensor:
    storage = torch.zeros(64, 4, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    storage[:32].fill_(1)
    fork_blocks(storage, [0], [63], [1])  # compiled and loaded before anything is watched
    return storage


def test_takes_the_triton_path(storage: torch.Tensor) -> None:
    assert backend(storage) == "triton"


def test_never_waits_for_the_device(storage: torch.Tensor) -> None:
    ids = np.arange(16, dtype=np.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fork_blocks(storage, ids, ids + 32, np.full(16, 7, dtype=np.int32))
        with pytest.raises(InputError):
            fork_blocks(storage, ids, ids, ids + 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (storage[32:48, :, :, :7] == 1).all()
    assert not storage[32:48, :, :, 7:].any()


def test_all_pairs_are_one_launch(storage: torch.Tensor) -> None:
    ids = np.arange(24, dtype=np.int32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fork_blocks(storage, ids, ids + 32, np.full(24, 5, dtype=np.int32))
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if event.name == "copy_kernel"]
    assert len(launches) == 1


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
