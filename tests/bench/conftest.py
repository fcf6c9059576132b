"""What the tests of benchmarks share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _frozen_objects_stay_frozen() -> Iterator[None]:
    """A benchmark unfreezes the heap at its end. Here that is all modules and tests: half a second a collection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _fine_cpu_time() -> Iterator[None]:
    """No limit of CPU time. While one is set, Linux counts this process's CPU time in steps of some ms, so that small
    figures would be 0. The limit of time still ends a test that hangs.
    """
    left = signal.setitimer(signal.ITIMER_PROF, 0.0)
    yield
    signal.setitimer(signal.ITIMER_PROF, *left)
