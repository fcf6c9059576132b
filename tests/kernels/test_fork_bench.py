"""The fork benchmark: its report, and the check of each variant before it is timed. The tests judge no timing."""

from __future__ import annotations

import json
from importlib.metadata import version

import numpy as np
import pytest
import torch

from radixkv.bench import fork as bench
from radixkv.config import ELEMENT_BYTES
from radixkv.errors import ArgumentError, ConfigError, KernelError
from radixkv.storage import KVLayout

TINY = {
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "block_size": 4,
    "repeats": 3,
    "rotate_bytes": 1 << 16,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_report_has_every_variant_for_every_number_of_pairs(device: str) -> None:
    progress: list[tuple[int, int]] = []
    report = bench.run(
        device=device,
        num_pairs=(1, 3),
        seed=5,
        dtype="float16",
        progress=lambda done, total: progress.append((done, total)),
        **TINY,
    )
    assert json.loads(json.dumps(report)) == report
    assert report["seed"] == 5
    assert report["path"] == {"cpu": "torch", "cuda": "triton"}[device]
    assert report["versions"]["torch"] == version("torch")
    assert report["device"]
    assert report["layout"]["block_bytes"] == 4 * 2 * 2 * 8 * 2
    assert report["copy_bytes_per_s"] > 0
    assert progress == [(1, 2), (2, 2)]
    found = [(result["num_pairs"], result["variant"]) for result in report["results"]]
    names = [*bench.VARIANTS, *(["graph_replay"] if device == "cuda" else []), bench.CONTIGUOUS]
    assert found == [(count, name) for count in (1, 3) for name in names]
    for result in report["results"]:
        row_bytes = 2 * 2 * 8 * 2
        assert (
            2 * row_bytes * result["num_pairs"] <= result["bytes"] <= 2 * row_bytes * 3 * result["num_pairs"]
        )
        seconds = [result[name] for name in ("seconds", "eager_seconds", "enqueue_seconds")]
        assert min(*seconds, result["bytes_per_s"]) > 0
        assert device == "cuda" or len(set(seconds)) == 1
        assert result["of_copy_bandwidth"] > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_every_variant_copies_like_the_reference(dtype: str, device: str) -> None:
    bench.check_variants(KVLayout(3, 2, 5, dtype), 4, device, seed=1)


@pytest.mark.parametrize("name", bench.VARIANTS)
def test_a_variant_that_copies_wrongly_is_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.VARIANTS, name, lambda work, step: None)
    with pytest.raises(KernelError, match=f"{name} on cpu differs from the reference"):
        bench.run(**TINY)


def test_steps_never_share_a_block_and_follow_the_seed() -> None:
    layout = KVLayout(2, 1, 8, "float16")
    first, again, other = (bench.make_workload(layout, 4, "cpu", 3, 1 << 14, seed) for seed in (1, 1, 2))
    ids = np.concatenate([np.concatenate((step.sources, step.targets)) for step in first.steps])
    assert sorted(ids) == list(range(len(first.storage)))
    assert first.storage.nbytes >= 1 << 14
    for step in first.steps:
        assert step.num_rows.min() >= 1
        assert step.num_rows.max() <= 3
    assert torch.equal(first.storage.view(torch.uint8), again.storage.view(torch.uint8))
    assert not torch.equal(first.storage.view(torch.uint8), other.storage.view(torch.uint8))
    for left, right in zip(first.steps, again.steps, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_report_has_the_time_beyond_the_copied_bytes() -> None:
    report = bench.run(num_pairs=(2,), **TINY)
    for result in report["results"]:
        least = result["bytes"] / report["copy_bytes_per_s"]
        assert result["seconds_above_bytes"] == pytest.approx(result["seconds"] - least)
        assert result["eager_seconds_above_bytes"] == pytest.approx(result["eager_seconds"] - least)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_given_number_of_rows_applies_to_every_tail(num_rows: int) -> None:
    report = bench.run(num_pairs=(2,), num_rows=num_rows, **TINY)
    assert report["num_rows"] == num_rows
    assert {result["bytes"] for result in report["results"]} == {2 * 2 * num_rows * 2 * 2 * 8 * 2}


def test_blocks_of_one_row_work() -> None:
    bench.run(**{**TINY, "block_size": 1})


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("num_pairs", (), ArgumentError),
        ("num_pairs", (4, 0), ArgumentError),
        ("num_rows", 0, ArgumentError),
        ("num_rows", 5, ArgumentError),
        ("repeats", 0, ArgumentError),
        ("seed", -1, ArgumentError),
        ("block_size", 0, ArgumentError),
        ("rotate_bytes", 0, ArgumentError),
        ("num_threads", 0, ArgumentError),
        ("device", "nonsense", ConfigError),
        ("dtype", "float128", ConfigError),
    ],
)
def test_invalid_arguments_are_named(argument: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=argument):
        bench.run(**{**TINY, argument: value})


def test_the_benchmark_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    bench.run(num_threads=2, **TINY)
    assert torch.get_num_threads() == before
