"""The example of two replicas runs on a real Redis and prints the expected lines."""

from __future__ import annotations

import pytest

from tests.examples.running import printed
from tests.redis_server import RedisServer

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_two_replicas_example(redis_server: RedisServer) -> None:
    lines = [line.split() for line in printed("two_replicas.py", redis_server.url).splitlines()]
    assert [line[:4] for line in lines[:2]] == [
        ["warm", "on", "one:", "done,"],
        ["warm", "on", "two:", "done,"],
    ]
    assert [line[:2] for line in lines[2:]] == [["one", "holds"], ["two", "holds"]]
    assert len({int(word) for line in lines for word in line if word.isdigit()}) == 1
