"""DeviceStorage: its allocation, the execution of plans, and its refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.config import ELEMENT_BYTES
from radixkv.errors import ArgumentError, ConfigError, KernelError
from radixkv.storage import DeviceStorage, KVLayout
from radixkv.storage.plan import StepPlan
from radixkv_kernels import reference
from tests.waiting import LIMIT_S

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float16")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def filled(num_blocks: int = 8, block_size: int = 4, device: str = "cpu") -> DeviceStorage:
    storage = DeviceStorage(LAYOUT, num_blocks, block_size, device)
    count = torch.arange(storage.data.numel()) % 2039
    storage.data.copy_(count.view(storage.data.shape))
    return storage


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_allocates_zeros_in_block_major_order(dtype: str, device: str) -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype)
    storage = DeviceStorage(layout, num_blocks=5, block_size=16, device=device)
    assert storage.data.shape == (5, 3, 2, 16, 2, 4)
    assert storage.data.is_contiguous()
    assert storage.data.dtype == getattr(torch, dtype)
    assert storage.device.type == storage.data.device.type == device
    assert storage.num_bytes == 5 * 16 * layout.bytes_per_token
    assert not storage.data.view(torch.uint8).any()
    assert (storage.num_launches, storage.num_copied_blocks) == (0, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_is_one_launch(device: str) -> None:
    storage = filled(device=device)
    want = storage.data.clone()
    reference.fork_blocks(want, [0, 0, 5], [3, 7, 1], [1, 3, 2])
    storage.execute(StepPlan.of([(0, 3, 1), (0, 7, 3), (5, 1, 2)]))
    assert torch.equal(storage.data, want)
    assert (storage.num_launches, storage.num_copied_blocks) == (1, 3)
    storage.execute(StepPlan.of([(7, 2, 3)]))
    assert (storage.num_launches, storage.num_copied_blocks) == (2, 4)


def test_an_empty_plan_is_no_launch() -> None:
    storage = filled()
    before = storage.data.clone()
    storage.execute(StepPlan.of([]))
    assert torch.equal(storage.data, before)
    assert (storage.num_launches, storage.num_copied_blocks) == (0, 0)


@given(data=st.data())
def test_plans_run_in_order(data: st.DataObject) -> None:
    storage = filled()
    want = storage.data.clone()
    num_copies = 0
    for _ in range(data.draw(st.integers(1, 4))):
        ids = data.draw(st.permutations(range(8)))
        copies = [
            (ids[i], ids[4 + i], data.draw(st.integers(1, 4))) for i in range(data.draw(st.integers(0, 4)))
        ]
        storage.execute(StepPlan.of(copies))
        for source, target, num_rows in copies:
            want[target, :, :, :num_rows] = want[source, :, :, :num_rows]
        num_copies += len(copies)
    assert torch.equal(storage.data, want)
    assert storage.num_copied_blocks == num_copies


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        ([(0, 1, 2), (2, 8, 1)], r"dst\[1\]=8 is not allowed; allowed: 0 to num_blocks - 1 = 7"),
        ([(-1, 1, 2)], r"src\[0\]=-1"),
        ([(0, 1, 5)], r"num_rows\[0\]=5 is not allowed; allowed: 1 to block_size = 4"),
        ([(0, 1, 2), (3, 1, 2)], r"dst\[1\]=1 is not allowed; allowed: each target once"),
        ([(0, 1, 2), (1, 2, 2)], r"src\[1\]=1 is not allowed; allowed: no source that is also a target"),
    ],
)
def test_a_bad_plan_is_a_kernel_error_and_changes_nothing(
    copies: list[tuple[int, int, int]], said: str
) -> None:
    storage = filled()
    before = storage.data.clone()
    with pytest.raises(KernelError, match=said):
        storage.execute(StepPlan.of(copies))
    assert torch.equal(storage.data, before)
    assert (storage.num_launches, storage.num_copied_blocks) == (0, 0)


def test_a_launch_that_fails_is_a_kernel_error_and_is_not_counted() -> None:
    storage = filled()
    storage.data.requires_grad_()  # torch refuses to write into it
    with pytest.raises(KernelError, match="launching 1 copies on cpu failed"):
        storage.execute(StepPlan.of([(0, 1, 2)]))
    assert storage.num_launches == 0


def test_a_layer_is_a_view() -> None:
    storage = filled()
    layer = storage.layer(2)
    assert layer.shape == (8, 2, 4, 2, 4)
    assert torch.equal(layer, storage.data[:, 2])
    layer[6, 1, 3] = -1
    assert (storage.data[6, 2, 1, 3] == -1).all()
    for index in (-1, 3):
        with pytest.raises(
            ArgumentError, match=rf"index={index} is not allowed; allowed: 0 to num_layers - 1 = 2"
        ):
            storage.layer(index)


def test_storage_made_in_inference_mode_is_written_outside_it() -> None:
    with torch.inference_mode():
        storage = DeviceStorage(LAYOUT, 4, 4)
    storage.data[0] = 1
    storage.execute(StepPlan.of([(0, 1, 2)]))
    with torch.inference_mode():
        storage.execute(StepPlan.of([(0, 2, 4)]))
    assert storage.data[2].all()
    assert storage.data[1, :, :, :2].all()
    assert not storage.data[1, :, :, 2:].any()


@pytest.mark.parametrize("num_blocks", [2**31 - 1, 10**9])
def test_a_lack_of_memory_is_reported_in_bytes(num_blocks: int) -> None:
    layout = KVLayout(num_layers=80, num_kv_heads=64, head_dim=128)
    wanted = num_blocks * 16 * layout.bytes_per_token
    with pytest.raises(ConfigError, match=f"{wanted:,} bytes") as caught:
        DeviceStorage(layout, num_blocks, 16)
    assert (caught.value.setting, caught.value.value) == ("num_blocks", num_blocks)
    assert f"{16 * layout.bytes_per_token:,} a block" in caught.value.allowed


@pytest.mark.parametrize("shape", [(2**40, 2**20, 2**20), (2**30, 2**10, 2**10)])
def test_sizes_beyond_the_range_of_torch_are_reported_in_bytes(shape: tuple[int, int, int]) -> None:
    layout = KVLayout(*shape)
    with pytest.raises(ConfigError, match=f"{1000 * 16 * layout.bytes_per_token:,} bytes"):
        DeviceStorage(layout, 1000, 16, device="meta")


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ((0, 16, "cpu"), "num_blocks"),
        ((2**31, 16, "cpu"), "num_blocks"),
        ((True, 16, "cpu"), "num_blocks"),
        ((4.0, 16, "cpu"), "num_blocks"),
        ((4, 0, "cpu"), "block_size"),
        ((4, -1, "cpu"), "block_size"),
        ((4, 16, "nonsense"), "device"),
        ((4, 16, "cuda:99"), "device"),
    ],
)
def test_invalid_settings_are_refused_by_name(arguments: tuple[int, int, str], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeviceStorage(LAYOUT, *arguments)
    assert caught.value.setting == setting


def test_importing_the_package_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # as if it weren't installed
        "import radixkv.storage\n"
        "radixkv.storage.KVLayout(1, 1, 8)\n"
        "try:\n"
        "    radixkv.storage.DeviceStorage\n"
        "except ModuleNotFoundError as error:\n"
        "    assert 'radixkv[storage]' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
        "try:\n"
        "    radixkv.storage.nothing\n"
        "except AttributeError:\n"
        "    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
