"""What the tests of benchmarks share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_objects_stay_frozen() -> Iterator[None]:
    """A benchmark unfreezes the heap at its end. Here that is all modules and tests: half a second a collection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
