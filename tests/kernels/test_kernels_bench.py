"""The benchmark of the kernels: without a GPU it compares and says that nothing was timed."""

from __future__ import annotations

import json

import pytest

from radixkv.bench import kernels as bench
from radixkv.errors import ArgumentError, ConfigError, KernelError


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_compares_every_kernel_and_times_none(dtype: str) -> None:
    report = bench.run(dtype=dtype)
    assert json.loads(json.dumps(report)) == report
    assert report["checked"] == list(bench.KERNELS)
    assert (report["results"], report["path"]) == ([], "torch")
    assert "nothing timed" in report["note"]


@pytest.mark.parametrize("name", bench.KERNELS)
def test_a_kernel_that_does_nothing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.KERNELS[name]
    idle = {name: lambda ops, work: None if ops is not bench.Reference else real(ops, work)}
    monkeypatch.setattr(bench, "KERNELS", {**bench.KERNELS, **idle})
    with pytest.raises(KernelError, match=f"{name} on cpu differs from the reference"):
        bench.run(dtype="float16")


@pytest.mark.gpu
def test_times_every_kernel_on_a_gpu() -> None:
    report = bench.run(device="cuda", num_layers=2, num_blocks=40, repeats=3)
    rows = {row["kernel"]: row for row in report["results"]}
    assert set(rows) == {*bench.KERNELS, "reorder, graph", bench.COPY, bench.MEMSET}
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
    ],
)
def test_arguments_that_cannot_work_are_named(argument: str, value: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=argument):
        bench.run(**{argument: value})
