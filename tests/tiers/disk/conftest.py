"""Shared by the tests of the disk tier: its threads may take their time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiers.support import patient_threads


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    with patient_threads():
        yield
