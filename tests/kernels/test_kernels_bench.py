"""The benchmark of the kernels. Without a GPU it compares results, and reports that nothing was timed."""

from __future__ import annotations

import json

import pytest
import torch

from radixkv.bench import kernels as bench
from radixkv.bench.fork import Timing
from radixkv.errors import ArgumentError, ConfigError, KernelError
from radixkv.storage import KVLayout


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_without_a_gpu_every_kernel_is_compared_and_none_timed(dtype: str) -> None:
    report = bench.run(dtype=dtype)
    assert json.loads(json.dumps(report)) == report
    assert report["checked"] == list(bench.KERNELS)
    assert (report["results"], report["path"]) == ([], "torch")
    assert "nothing timed" in report["note"]


@pytest.mark.parametrize("name", bench.KERNELS)
def test_a_kernel_that_does_nothing_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.KERNELS[name]
    idle = {name: lambda ops, work: None if ops is not bench.Reference else real(ops, work)}
    monkeypatch.setattr(bench, "KERNELS", {**bench.KERNELS, **idle})
    with pytest.raises(KernelError, match=f"{name} on cpu differs from the reference"):
        bench.run(dtype="float16")


@pytest.mark.parametrize("name", bench.ALTERNATIVES)
def test_an_alternative_with_another_result_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other, _ = bench.ALTERNATIVES[name]
    monkeypatch.setitem(
        bench.ALTERNATIVES, name, (other, lambda work: [each.fill_(7) for each in work.tensors()])
    )
    with pytest.raises(KernelError, match=f"{other} on cpu is no alternative to {name}"):
        bench.run(dtype="float16")


def test_all_beam_steps_fit_and_equal_those_of_a_stock_beam_search() -> None:
    beams, calls = bench.beam_step(KVLayout(2, 1, 8, "float16"), 3, 20, 30, torch.device("cpu"), seed=2)
    for _ in range(30):
        for call in calls.values():
            call(0)
    books = beams.read()
    assert (books.status, books.lengths) == (0, [50] * 3)
    beams.check()
    assert list(calls) == [bench.BEAM_STEP, "instead of beam step"]


def test_the_rows_compare_kernels_with_their_alternatives() -> None:
    names = [*bench.KERNELS, bench.COPY, bench.MEMSET, bench.BEAM_STEP]
    seconds = dict.fromkeys(names, Timing(2.0, 3.0, 1.0))
    seconds |= {
        f"instead of {name}": Timing(6.0, 7.0, 1.0) for name in (*bench.ALTERNATIVES, bench.BEAM_STEP)
    }
    moved = {bench.COPY: 200, bench.MEMSET: 100, "gather": 100, "scrub": 50}
    rows = {row["kernel"]: row for row in bench._rows(seconds, moved)}
    assert list(rows) == names
    assert rows["gather"]["alternative"] == "index_select" and rows["gather"]["times_faster"] == 3
    assert rows["gather"]["of_copy_bandwidth"] == rows["scrub"]["of_memset"] == 0.5
    assert rows["beam step"]["times_faster"] == 3 and rows["beam step"]["bytes"] is None
    assert rows["reorder"]["times_faster"] is None
    row = rows["reorder"]
    assert (row["seconds"], row["eager_seconds"], row["enqueue_seconds"]) == (2, 3, 1)


@pytest.mark.gpu
def test_times_every_kernel_on_a_gpu() -> None:
    report = bench.run(device="cuda", num_layers=2, num_blocks=40, repeats=3)
    rows = {row["kernel"]: row for row in report["results"]}
    assert set(rows) == {*bench.KERNELS, "reorder, graph", bench.COPY, bench.MEMSET, bench.BEAM_STEP}
    assert all(rows[name]["times_faster"] > 0 for name in (*bench.ALTERNATIVES, bench.BEAM_STEP))
    assert all(row["seconds"] > 0 for row in rows.values())
    assert rows["scrub"]["of_memset"] > 0
    assert rows["gather"]["of_copy_bandwidth"] > 0


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("block_size", 0, ArgumentError),
        ("num_blocks", 0, ArgumentError),
        ("repeats", 0, ArgumentError),
        ("num_layers", 0, ConfigError),
        ("device", "cuda:99", ConfigError),
    ],
)
def test_invalid_arguments_are_named(argument: str, value: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=argument):
        bench.run(**{argument: value})
