"""The Triton kernels compile for every target without a GPU, and the tests check their machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release


SCRIPT = Path(__file__).with_name("aot.py")
TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)]
KERNELS = {"few", "copy", "scrub", "quantize", "dequantize", "plan", "permute", "finish"}
MOST_REGISTERS = 128
"""With 128 threads in a program, four programs of the largest kernel fit on an SM at once."""
Facts = dict[str, object]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The cache is empty, so the kernels are compiled now.
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run(
        [sys.executable, SCRIPT],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_every_configuration_compiles_for_every_target(kernels: list[Facts]) -> None:
    assert {tuple(kernel["target"]) for kernel in kernels} == set(TARGETS)
    names = {kernel["name"] for kernel in kernels}
    # e4m3 is an instruction on two of the targets, and integer arithmetic on the other two.
    in_part = {name for name in names if "fp8" in name}
    assert len(kernels) == len(TARGETS) * len(names) - 2 * len(in_part)
    assert {kernel["name"].partition("/")[0] for kernel in kernels} == KERNELS
    assert all(kernel["code_bytes"] > 0 for kernel in kernels)


def test_copies_are_16_bytes_wide(kernels: list[Facts]) -> None:
    wide = [kernel for kernel in kernels if kernel["wide_bytes"]]
    assert {kernel["name"].partition("/")[0] for kernel in wide} == {"few", "copy", "scrub", "finish"}
    for kernel in wide:
        lanes = kernel["num_warps"] * kernel["target"][2]
        vectors = kernel["wide_bytes"] // (16 * lanes)
        assert kernel["wide_stores"] >= vectors > 0, kernel
        if not kernel["name"].startswith("scrub"):
            assert kernel["wide_loads"] >= vectors, (
                kernel
            )  # other kernels load ids in fours, or arguments on gfx942


def test_nothing_spills_and_registers_are_few(kernels: list[Facts]) -> None:
    for kernel in kernels:
        assert kernel["spilled"] in (0, None), kernel  # None: this triton has no cuobjdump
        assert kernel["registers"] is None or kernel["registers"] <= MOST_REGISTERS, kernel
    assert all(kernel["spilled"] == 0 for kernel in kernels if kernel["target"][0] == "hip")
