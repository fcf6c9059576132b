"""One service is shared by most tests of this folder. Each test uses its own salts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

import pytest

from radixkv.errors import LeaseError
from tests.service.running import Running, service_in_thread
from tests.service.surroundings import surroundings as surroundings
from tests.waiting import eventually

_numbers = itertools.count()


@pytest.fixture(scope="package")
def shared_service(surroundings: None) -> Iterator[Running]:
    with service_in_thread() as running:
        yield running


@pytest.fixture
def live(shared_service: Running) -> Iterator[Running]:
    """A running service with the demo model. What a test began or promised has ended before the next one."""
    yield shared_service
    service = shared_service.service
    eventually(lambda: service.cache.stats().num_sequences == 0, "the requests of the test end")
    for pin in service.cache.pins():
        with suppress(LeaseError):  # its time may have ended meanwhile
            service.promises.unpin(pin)


@pytest.fixture
def salt() -> str:
    """A salt that no other test uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture(scope="session")
def text() -> str:
    """A prompt of more than a hundred tokens that ends at a stable boundary."""
    return "".join(
        f"Rule {number}: answer politely, name the page, ask if in doubt.\n" for number in range(12)
    )
