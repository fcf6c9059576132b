"""The shared redis-server does what the tests that lean on it expect."""

from __future__ import annotations

import pytest

from tests.redis_server import RedisServer, find_binary


def test_is_the_binary_found_and_answers(redis_server: RedisServer) -> None:
    assert redis_server.binary == find_binary()
    assert redis_server.version[0].isdigit()
    assert redis_server.url == f"redis://127.0.0.1:{redis_server.port}/0"
    assert redis_server.command("PING") == "+PONG"


@pytest.mark.parametrize("_round", range(2))
def test_starts_empty_for_each_test(redis_server: RedisServer, _round: int) -> None:
    assert redis_server.command("DBSIZE") == ":0"
    redis_server.command("SET left behind")


def test_comes_back_empty_on_the_same_port_after_a_kill(redis_server: RedisServer) -> None:
    redis_server.command("SET key value")
    killed, port = redis_server.process, redis_server.port
    redis_server.kill()
    assert killed.poll() is not None and not redis_server.is_running
    with pytest.raises(OSError):
        redis_server.command("PING")
    redis_server.restart()
    assert redis_server.port == port
    assert redis_server.command("DBSIZE") == ":0"


@pytest.mark.parametrize("deed", ["kill", "stop", "pause"])
def test_is_whole_again_after_a_test_that_left_it_broken(redis_server: RedisServer, deed: str) -> None:
    getattr(redis_server, deed)()
    redis_server.reset()
    assert redis_server.command("PING") == "+PONG"


def test_raises_what_the_server_refuses(redis_server: RedisServer) -> None:
    with pytest.raises(RuntimeError, match="unknown command"):
        redis_server.command("NOSUCHCOMMAND")
