"""The audit's prompts are the same in each run of a test, and differ between tests."""

from __future__ import annotations

import random

import pytest

from radixkv.audit import probe_prompts


@pytest.fixture(autouse=True)
def _fixed_prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_prompts, "_draw", random.Random(request.node.nodeid))
