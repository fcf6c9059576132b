"""The example of two replicas runs on a real Redis and prints the expected lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples import two_replicas
from tests.forked import Forked
from tests.redis_server import RedisServer


@pytest.mark.slow
def test_two_replicas_example(
    redis_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def forked(*command: str) -> Iterator[Forked]:
        """Run the same command line in a process that already has the imports, which would take 6 s of CPU each."""
        *python, name = command[:3]
        assert (python, name) == ([sys.executable, "-m"], "radixkv")
        child = Forked([name, *command[3:]], tmp_path / f"{len(list(tmp_path.iterdir()))}.log")
        try:
            yield child
        finally:
            child.terminate()
            child.wait()

    monkeypatch.setattr(two_replicas, "process", forked)
    two_replicas.main(redis_server.url)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in lines[:2]] == [
        ["warm", "on", "one:", "done,"],
        ["warm", "on", "two:", "done,"],
    ]
    assert [line[:2] for line in lines[2:]] == [["one", "holds"], ["two", "holds"]]
    assert len({int(word) for line in lines for word in line if word.isdigit()}) == 1
