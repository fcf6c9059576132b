"""Tensor parallel ranks of the real SGLang: they decide alike under any load, or stop.

``RADIXKV_SOAK_S=1800 make engines PYTEST="-k sglang_ranks"`` loads them for half an hour.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engines.sglang.runs import folder as folder
from tests.engines.sglang.runs import ran

SECONDS = float(os.environ.get("RADIXKV_SOAK_S", "15"))

pytestmark = [pytest.mark.engines, pytest.mark.limit(wall_s=600 + 2 * SECONDS)]

SOAK = "soak.py"
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def test_two_ranks_answer_a_mixed_load_as_one_rank_does(folder: Path, tmp_path: Path) -> None:
    """Half the prompts' pages fit. Pins end and tenants are purged meanwhile, and the ranks' clocks differ."""
    table = ran("stock", folder, 16, 4_096, SOAK, workload="table")
    found = ran(
        "radixkv",
        folder,
        16,
        4_096,
        SOAK,
        workload="soak",
        settings={"tp_size": 2},
        RADIXKV_KEYS=str(folder / "engine.keys"),
        RADIXKV_SOCKET=str(tmp_path / "control" / "control.sock"),
        RADIXKV_TEST_SECONDS=str(SECONDS),
        RADIXKV_TEST_SKEW_S="0.1",
        **TWO_RANKS,
    )
    print({name: told for name, told in found.items() if name != "outputs"})
    for mine, own in zip(found["outputs"], table["outputs"], strict=True):
        assert mine in ([], [own])
    assert found["requests"] > SECONDS / 3 and found["cached"] > 0 and found["evicted"] > 0
    operators = found["operators"]
    assert operators["violations"] == 0 and min(operators[name] for name in ("pins", "purges")) > 0
    assert found["flushed"]


def test_a_rank_that_decides_otherwise_ends_sglang_by_name(folder: Path) -> None:
    with pytest.raises(AssertionError, match="decided otherwise than rank 0"):
        ran("radixkv", folder, 16, 4_096, settings={"tp_size": 2}, RADIXKV_TEST_DIFFERS="9", **TWO_RANKS)
