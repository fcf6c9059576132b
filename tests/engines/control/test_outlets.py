"""Settings of what a vLLM shows outside, without vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv import PrefixCache
from radixkv.engines.control.client import ControlClient
from radixkv.engines.control.outlets import Outlets, event_settings
from radixkv.engines.vllm.cache import VllmCache
from radixkv.errors import ConfigError
from radixkv.signing import KeySet
from radixkv.tenancy.salt import SaltReader
from tests.engines.patience import patient_channels as patient_channels

KEYS = KeySet.derive([b"the fleet's own secret"])


@pytest.mark.parametrize(
    ("rank", "replay", "found"),
    [
        (0, None, ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")),
        (1, None, ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:5560")),
        (1, "tcp://127.0.0.1:6000", ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:6001")),
    ],
)
def test_ranks_have_endpoints_of_their_own(rank: int, replay: str | None, found: tuple[str, str]) -> None:
    variables = {"RADIXKV_EVENTS": "tcp://127.0.0.1:5557"}
    variables |= {} if replay is None else {"RADIXKV_EVENTS_REPLAY": replay}
    settings = event_settings(variables, 32, rank, None)
    assert settings is not None and (settings.endpoint, settings.replays) == found
    assert settings.data_parallel_rank == rank and not settings.publishes_prompts


def test_vllms_own_settings_of_events_are_used_and_stay_on_loopback() -> None:
    given: dict[str, Any] = {"replay_endpoint": None, "topic": "kv@a@m", "buffer_steps": 10_000}
    local = SimpleNamespace(endpoint="tcp://127.0.0.1:5557", **given)
    settings = event_settings({}, 32, 2, local)
    assert settings is not None and settings.topic == "kv@a@m"
    assert (settings.endpoint, settings.replays) == ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:*")
    everywhere = SimpleNamespace(endpoint="tcp://*:5557", **given)
    with pytest.raises(ConfigError, match="loopback"):
        event_settings({}, 32, 0, everywhere)
    allowed = event_settings({"RADIXKV_EVENTS_SCOPE": "network"}, 32, 0, everywhere)
    assert allowed is not None and allowed.endpoint == "tcp://*:5557"
    assert event_settings({}, 32, 0, None) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"RADIXKV_SOCKET": "/run/radixkv/control.sock"},
        {"RADIXKV_SOCKET": "control.sock", "RADIXKV_KEYS": "k"},
        {"RADIXKV_SOCKET": "/run/radixkv/other.sock", "RADIXKV_KEYS": "k"},
        {"RADIXKV_EVENTS": "tcp://127.0.0.1:5557"},
        {"RADIXKV_EVENTS": "tcp://127.0.0.1:5557", "RADIXKV_EVENTS_CONTENT": "all"},
    ],
)
def test_wrong_settings_are_named(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"RADIXKV_|keys"):
        Outlets(variables, 32)


def test_a_rank_serves_its_own_socket(tmp_path: Path) -> None:
    KEYS.write(tmp_path / "engine.keys")
    socket = tmp_path / "control" / "control.sock"
    variables = {"RADIXKV_SOCKET": str(socket), "RADIXKV_KEYS": str(tmp_path / "engine.keys")}
    engine = VllmCache(64, 32, 512, model="m", make=lambda config, **named: PrefixCache(config, **named))
    for rank, path in ((0, socket), (2, socket.parent / "rank-2" / "control.sock")):
        outlets = Outlets(variables, 32, rank=rank)
        outlets.start(engine, SaltReader(KEYS), lambda: True)
        try:
            with ControlClient(path, KEYS) as client:
                assert client.call("stats")["cache"]["num_blocks"] == 64
                assert not engine._may_be_stale
                client.call("purge", {"tenant": "acme"})
                assert engine._may_be_stale and engine.take_stale() == []
        finally:
            outlets.close()
