"""What the tests of benchmarks share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _frozen_objects_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark unfreezes the heap at its end. Here that is all modules and tests: half a second a collection."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
