"""The example of two replicas runs on a real Redis and prints what it claims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.redis_server import RedisServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_replicas.py"


@pytest.mark.timeout(600)  # replicas are started, which loads torch
def test_two_replicas_example(redis_server: RedisServer) -> None:
    command = [sys.executable, str(EXAMPLE), redis_server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:4] for line in lines[:2]] == [
        ["warm", "on", "one:", "done,"],
        ["warm", "on", "two:", "done,"],
    ]
    assert [line[:2] for line in lines[2:]] == [["one", "holds"], ["two", "holds"]]
    assert len({int(word) for line in lines for word in line if word.isdigit()}) == 1
