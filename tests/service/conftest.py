"""One service for most tests of this folder; each test uses salts of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.service.running import Running, service_in_thread

_numbers = itertools.count()


@pytest.fixture(scope="session")
def shared_service() -> Iterator[Running]:
    with service_in_thread() as running:
        yield running


@pytest.fixture
def live(shared_service: Running) -> Running:
    """A running service with the demo model."""
    return shared_service


@pytest.fixture
def salt() -> str:
    """A salt that no other test uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture(scope="session")
def text() -> str:
    """A prompt of some hundred tokens that ends at a stable boundary."""
    return "".join(
        f"Rule {number}: answer politely, name the page, ask if in doubt.\n" for number in range(12)
    )
