"""The example of quantised prefixes runs at a small size, and its errors are in the order of the bits."""

from __future__ import annotations

import re

import pytest

from tests.examples.running import ROOT, printed


@pytest.mark.slow
def test_it_runs_and_its_figures_are_in_order() -> None:
    texts = map(str, sorted((ROOT / "docs").rglob("*.md")))
    text = printed("quantised_prefixes.py", "--steps", "2", "--prefixes", "3", "--text", *texts)
    rows = dict(re.findall(r"^(fp16|fp8|int8|int4) +([\d.]+ .*)$", text, re.MULTILINE))
    bits, perplexity, change, _, spread, error = (
        {scheme: float(row.split()[column].strip("±%") or 0) for scheme, row in rows.items()}
        for column in range(6)
    )
    assert bits == {"fp16": 16, "fp8": 8.031, "int8": 9.25, "int4": 5.25}
    assert error["fp16"] == 0 < error["int8"] < error["fp8"] < error["int4"] < 0.2
    assert change["fp16"] == spread["fp16"] == 0 < spread["fp8"]
    for scheme, value in perplexity.items():
        assert abs(value / perplexity["fp16"] - 1 - change[scheme] / 100) < 1e-4, scheme
        assert abs(change[scheme]) < 5
