"""The shared redis-server behaves as the tests that use it expect."""

from __future__ import annotations

import pytest

from tests.redis_server import RedisServer, find_binary


def test_the_server_is_the_binary_found_and_answers(redis_server: RedisServer) -> None:
    assert redis_server.binary == find_binary()
    assert redis_server.version[0].isdigit()
    assert redis_server.url == f"redis://127.0.0.1:{redis_server.port}/0"
    assert redis_server.command("PING") == "+PONG"


@pytest.mark.parametrize("_round", range(2))
def test_the_server_is_empty_for_each_test(redis_server: RedisServer, _round: int) -> None:
    assert redis_server.command("DBSIZE") == ":0"
    redis_server.command("SET left behind")


def test_after_a_kill_the_server_restarts_empty_on_the_same_port(redis_server: RedisServer) -> None:
    redis_server.command("SET key value")
    killed, port = redis_server.process, redis_server.port
    redis_server.kill()
    assert killed.poll() is not None and not redis_server.is_running
    with pytest.raises(OSError):
        redis_server.command("PING")
    redis_server.restart()
    assert redis_server.port == port
    assert redis_server.command("DBSIZE") == ":0"


@pytest.mark.parametrize("action", ["kill", "stop", "pause"])
def test_reset_repairs_a_server_that_a_test_broke(redis_server: RedisServer, action: str) -> None:
    getattr(redis_server, action)()
    redis_server.reset()
    assert redis_server.command("PING") == "+PONG"


def test_an_error_reply_raises_runtime_error(redis_server: RedisServer) -> None:
    with pytest.raises(RuntimeError, match="unknown command"):
        redis_server.command("NOSUCHCOMMAND")
