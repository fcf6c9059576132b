"""Two data-parallel ranks of the real vLLM: each has a cache, a control socket and events of its own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from radixkv.coordination.view.event_view import EventView
from radixkv.engines.control.client import ControlClient
from radixkv.events.event_subscriber import EventSubscriber
from radixkv.tenancy.salt import SaltReader, make_salt
from tests.engines.vllm.test_http import KEYS, RADIXKV, body, listening
from tests.engines.vllm.test_same_tokens import model
from tests.waiting import eventually

pytestmark = [pytest.mark.engines]

__all__ = ["model"]  # the fixture

PROMPT = [17 + at * 7 % 900 for at in range(400)]


def test_sockets_events_and_views_are_by_rank(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header chooses the rank. What one rank computes, the other doesn't find, and a view knows which has it."""
    place = tmp_path / "events"
    place.mkdir(mode=0o700)
    events = f"ipc://{place}/kv"
    monkeypatch.setenv("RADIXKV_EVENTS", events)
    salt = make_salt(KEYS, "acme")
    namespace = SaltReader(KEYS).read(salt).namespace("vllm", None, 0)
    folder, view = tmp_path / "ranks", EventView(KEYS, 32)
    sockets = [folder / "control" / each / "control.sock" for each in ("", "rank-1")]
    with listening(folder, model, 200, *RADIXKV, "--data-parallel-size", "2") as client, ExitStack() as stack:
        for rank, endpoint in enumerate((events, f"{events}.2")):
            subscriber = EventSubscriber(endpoint, f"{endpoint}.replay", view.follow(f"rank-{rank}"))
            subscriber.start()
            stack.callback(subscriber.close)

        def asked(rank: int) -> tuple[list[int], int]:
            headers = {"X-data-parallel-rank": str(rank)}
            answer = client.post("/v1/completions", json=body(PROMPT, salt, 2), headers=headers)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            details = found["usage"].get("prompt_tokens_details") or {}
            return found["choices"][0]["token_ids"], details.get("cached_tokens") or 0

        first = asked(1)
        eventually(lambda: view.held(namespace, PROMPT) == {"rank-1": 384}, "rank 1 says what it has")
        again, other = asked(1), asked(0)
        assert (first[1], again[1], other[1]) == (0, 399, 0) and first[0] == again[0] == other[0]
        both = {"rank-0": 384, "rank-1": 384}
        eventually(lambda: view.held(namespace, PROMPT) == both, "so does rank 0")
        ranks = [stack.enter_context(ControlClient(each, KEYS)) for each in sockets]
        for rank in ranks:
            assert rank.call("stats")["cache"]["resident_blocks"] >= 12
            assert rank.call("audit")["ok"]
        ranks[1].call("purge", {"tenant": namespace.tenant, "generation": 1})
        eventually(lambda: view.held(namespace, PROMPT) == {"rank-0": 384}, "rank 1 says that it forgot")
        assert asked(0)[1] == 399
