"""KV events of a service: the options, and what a reader with the fleet's key learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv import Namespace
from radixkv.coordination.view.event_view import EventView
from radixkv.errors import ConfigError
from radixkv.events.event_subscriber import EventSubscriber
from radixkv.service.journals import JournalPair
from radixkv.service.options import ServeSettings
from radixkv.signing import KeySet
from tests.redis_server import RedisServer
from tests.service.running import service_in_thread
from tests.waiting import eventually

SECRET = b"a secret that the fleet shares"


class Noted:
    """A journal that keeps what it hears."""

    def __init__(self, grain: int) -> None:
        self.grain_tokens = grain
        self.heard: list[tuple[str, int, int]] = []

    def stored(self, namespace: Namespace, key: object, start: int, stop: int) -> None:
        self.heard.append(("stored", start, stop))

    def removed(self, namespace: Namespace, key: object, start: int, stop: int) -> None:
        self.heard.append(("removed", start, stop))

    def cleared(self, namespace: Namespace) -> None:
        self.heard.append(("cleared", 0, 0))


def test_a_pair_of_journals_passes_on_what_each_asked_for() -> None:
    fine, coarse, namespace = Noted(4), Noted(16), Namespace("a", "m")
    pair = JournalPair(fine, coarse)
    assert pair.grain_tokens == 4
    calls = [
        ("stored", 0, 12),
        ("stored", 12, 16),
        ("stored", 16, 40),
        ("removed", 36, 40),
        ("removed", 28, 36),
    ]
    for name, start, stop in calls:
        getattr(pair, name)(namespace, b"", start, stop)
    pair.cleared(namespace)
    assert fine.heard == [*calls, ("cleared", 0, 0)]
    assert coarse.heard == [calls[1], calls[2], calls[4], ("cleared", 0, 0)]


@pytest.mark.parametrize("with_redis", [False, True])
def test_a_service_publishes_what_it_holds(
    with_redis: bool, redis_server: RedisServer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    options = {"events": "tcp://127.0.0.1:*", "fleet-secret": str(secret), "num-blocks": "64"}
    if with_redis:
        options["redis"] = redis_server.url
    view = EventView(KeySet.derive([SECRET], ["events"]), 16)
    with service_in_thread(**options) as live:
        events = live.service.events
        assert events is not None
        subscriber = EventSubscriber(events.endpoint, events.replay_endpoint, view.follow("a"))
        subscriber.start()
        try:
            prompt = "A sentence that the service computes and keeps. " * 8
            done = live.acme.post("/v1/warm", json={"prompt": prompt})
            assert done.status_code == 200
            ids = live.service.tokenizer.encode(prompt)
            namespace = live.service.namespace("acme", "", None)
            eventually(lambda: view.held(namespace, ids).get("a") == done.json()["tokens"], "stored")
            assert view.held(live.service.namespace("globex", "", None), ids) == {}
        finally:
            subscriber.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"events": "tcp://0.0.0.0:5557"}, "--events="),
        ({"events": "5557"}, "--events="),
        ({"events": ""}, "--events="),
        ({"events": "tcp://127.0.0.1:5557", "events-replay": "tcp://10.0.0.1:5557"}, "--events-replay="),
        ({"events": "tcp://127.0.0.1:5557", "events-topic": "x" * 300}, "--events-topic="),
        ({"events": "tcp://127.0.0.1:5557", "events-content": "all"}, "--events-content="),
        ({"events": "tcp://127.0.0.1:5557", "events-scope": "world"}, "--events-scope="),
        ({"events-topic": "x"}, "because --events-topic is set"),
    ],
)
def test_invalid_options_are_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServeSettings.parse(options)


def test_options_become_settings() -> None:
    chosen = {
        "events": "tcp://*:6000", "events-scope": "network", "events-content": "prompts-in-clear",
        "events-topic": "kv@a@m", "block-size": "32",
    }  # fmt: skip
    events = ServeSettings.parse(chosen).event_settings
    assert events is not None and (events.block_size, events.endpoint, events.replays) == (
        32, "tcp://*:6000", "tcp://*:6001",
    )  # fmt: skip
    assert events.publishes_prompts and events.allows_network and events.topic == "kv@a@m"
    assert ServeSettings.parse({}).event_settings is None


def test_an_endpoint_in_use_is_named() -> None:
    with service_in_thread(**{"events": "tcp://127.0.0.1:*", "num-blocks": "64"}) as live:
        events = live.service.events
        assert events is not None
        taken = {"events": events.endpoint, "num-blocks": "64"}
        with pytest.raises(ConfigError, match="--events="), service_in_thread(**taken):
            pass
