"""Many clients at once, which also hang up and clear. Afterwards nothing is held, and every invariant holds."""

from __future__ import annotations

import random
import threading
from typing import Any

import httpx
import pytest

from radixkv import audit
from radixkv.service.core import Limits
from tests.service.running import KEYS, Running, client, service_in_thread
from tests.waiting import LIMIT_S, ended, eventually

pytestmark = pytest.mark.slow

ALLOWED = {
    "warm": {200, 202, 409, 429, 503},
    "lookup": {200},
    "complete": {200, 409, 429, 503},
    "stream": {200, 409, 429, 503},
    "clear": {200, 404},
}


def act(http: httpx.Client, draw: random.Random) -> tuple[str, int]:
    """Send one random request. Return its kind and its status, which is 0 if the client hung up."""
    length = draw.choice((16, 40, 100, 300))
    body: dict[str, Any] = {"token_ids": [5] * length, "salt": draw.choice("ab")}
    kind = draw.choice(tuple(ALLOWED))
    try:
        if kind == "clear":
            return kind, http.delete("/v1/cache", params={"salt": body["salt"]}).status_code
        if kind in ("complete", "stream"):
            prompt = body.pop("token_ids")
            body |= {
                "prompt": prompt,
                "n": draw.choice((1, 3)),
                "max_tokens": draw.choice((2, 12)),
                "ignore_eos": True,
            }
        if kind == "stream":
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                if draw.random() < 0.5:
                    next(answer.iter_lines(), None)
                return kind, answer.status_code
        if kind == "warm":
            body["wait"] = draw.random() < 0.7
        path = {"complete": "/v1/completions"}.get(kind, f"/v1/{kind}")
        return kind, http.post(path, json=body, timeout=draw.choice((0.05, LIMIT_S))).status_code
    except httpx.TimeoutException:
        return kind, 0


@pytest.mark.parametrize("seed", [1, 2])
def test_random_requests_leave_nothing_behind(seed: int) -> None:
    with service_in_thread(Limits(max_queued=4, max_jobs=8), **{"num-blocks": "48"}) as live:
        seen: list[tuple[str, int]] = []

        def play(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            with client(live.url, KEYS[("acme", "globex")[number % 2]]) as http:
                for _ in range(25):
                    seen.append(act(http, draw))

        threads = [threading.Thread(target=play, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            ended(thread)
        assert len(seen) == 150, "a thread ended early"
        assert {each for each in seen if each[1] and each[1] not in ALLOWED[each[0]]} == set()
        settle(live)


def settle(live: Running) -> None:
    eventually(
        lambda: live.service.engine_loop.num_unfinished == live.service.warm_jobs.table.num_unfinished == 0
    )
    assert live.service.warmer.num_under_way == 0
    stats = live.service.cache.stats()
    assert stats.num_sequences == stats.sequence_blocks == stats.quarantined_blocks == 0
    audit.check(live.service.cache)
    assert live.nobody.get("/healthz").status_code == 200


def test_a_warm_that_is_cleared_midway_is_done_or_in_conflict() -> None:
    with service_in_thread() as live:
        job = live.acme.post("/v1/warm", json={"token_ids": [7] * 4000, "wait": False}).json()["job"]
        eventually(lambda: live.acme.get(f"/v1/warm/{job}").json()["progress"]["computed"])
        live.acme.delete("/v1/cache")
        eventually(lambda: live.acme.get(f"/v1/warm/{job}").json()["state"] in ("done", "failed"))
        ended = live.acme.get(f"/v1/warm/{job}").json()
        found = live.acme.post("/v1/lookup", json={"token_ids": [7] * 4000}).json()["matched_tokens"]
        assert found == 0 and (ended["state"] == "done" or ended["error"]["type"] == "conflict")
        settle(live)
