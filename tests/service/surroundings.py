"""What all tests of a folder find that import this fixture: it is what the forked processes have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked import small_demo_model
from tests.service.patience import patient_services
from tests.tiers.support import patient_disks


@pytest.fixture(scope="package", autouse=True)
def surroundings() -> Iterator[None]:
    """A small demo model, the same for all replicas, and services and disks that are patient with a busy machine."""
    with small_demo_model(), patient_disks(), patient_services():
        yield
