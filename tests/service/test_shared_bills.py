"""Requests that share one computation: what all of them are billed as computed is what was computed, once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.running import Running, model_held, sent, service_in_thread
from tests.service.test_usage_records import everything
from tests.service.test_warm import num_waiting, prefill_held
from tests.waiting import eventually, is_set

SIZE = 16
KINDS = ("warm", "pin")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("bills") / "usage"
    with service_in_thread(usage=str(folder)) as running:
        yield running


def prewarm(who: httpx.Client, text: str, salt: str, ttl: str = "1h") -> httpx.Response:
    marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}]
    body = {"system": marked, "messages": [{"role": "user", "content": "Hello"}], "salt": salt}
    return who.post("/v1/messages", json={"model": "radixkv-demo", "max_tokens": 0, **body})


def billed(live: Running) -> Counter[str]:
    return everything(live.acme, "warm") + everything(live.acme, "pin")


def computed(counts: Counter[str]) -> int:
    """All tokens that weren't read."""
    return sum(counts[name] for name in counts if name.startswith("written_") or name == "uncached_tokens")


def missed(live: Running) -> int:
    """Tokens that the engine computed for the tenant, by its cache's own count."""
    return int(live.acme.get("/v1/stats").json()["missed_tokens"])


def test_two_equal_prewarms_at_a_time_are_written_once(live: Running, salt: str, text: str) -> None:
    before, before_missed = billed(live), missed(live)
    with ThreadPoolExecutor(2) as pool:
        with model_held(live.service):
            asked = [pool.submit(prewarm, live.acme, text, salt) for _ in range(2)]
            eventually(lambda: num_waiting(live) == 2)
        usages = sorted(
            (each.result().json()["usage"] for each in asked),
            key=lambda each: each["cache_read_input_tokens"],
        )
    writer, reader = usages
    written = writer["cache_creation_input_tokens"]
    assert written > 64 and writer["cache_read_input_tokens"] == 0
    assert reader["cache_creation_input_tokens"] == 0 and reader["cache_read_input_tokens"] >= written
    grown = billed(live) - before
    assert grown["requests"] == 2 and grown["written_3600"] == written
    tail = reader["input_tokens"]  # less than a block: in the prompt, not computed
    assert computed(grown) == missed(live) - before_missed + 2 * tail and tail < SIZE


def test_a_prewarm_a_warm_and_a_pin_share_one_bill(live: Running, salt: str) -> None:
    ids = list(range(3, 3 + 8 * SIZE))
    before, before_missed = billed(live), missed(live)
    pin = {"token_ids": ids, "salt": salt, "ttl_s": 50, "replicas": "all"}
    with ThreadPoolExecutor(2) as pool:
        with model_held(live.service):
            first = pool.submit(live.acme.post, "/v1/pins", json=pin)
            eventually(lambda: num_waiting(live) == 1)
            second = pool.submit(live.acme.post, "/v1/warm", json={"token_ids": ids, "salt": salt})
            eventually(lambda: num_waiting(live) == 2)
        assert first.result().status_code == 201 and second.result().json()["tokens"] == len(ids)
    grown = billed(live) - before
    assert grown == Counter(requests=2, written_300=len(ids), read_tokens=len(ids)), "the pin came first"
    assert missed(live) - before_missed == len(ids)
    live.acme.delete(f"/v1/pins/{first.result().json()['id']}")


def test_when_the_first_hangs_up_the_next_one_pays(live: Running, salt: str) -> None:
    ids = list(range(3, 3 + 8 * SIZE))
    before = billed(live)
    body = {"token_ids": ids, "salt": salt}
    with ThreadPoolExecutor(1) as pool:
        with model_held(live.service):
            with sent(live, "acme", "/v1/warm", body):
                eventually(lambda: num_waiting(live) == 1)
                second = pool.submit(live.acme.post, "/v1/warm", json=body)
                eventually(lambda: num_waiting(live) == 2)
            eventually(lambda: num_waiting(live) == 1)
        assert second.result().json()["computed"] == len(ids)
    assert billed(live) - before == Counter(requests=1, uncached_tokens=len(ids))


def test_a_warm_that_is_left_midway_pays_for_what_was_computed(live: Running, salt: str) -> None:
    ids = list(range(5, 5 + 64 * SIZE))
    before, before_missed = billed(live), missed(live)
    body = {"token_ids": ids, "salt": salt}
    with prefill_held(live) as arrived:
        with sent(live, "acme", "/v1/warm", body):
            is_set(arrived)
        eventually(lambda: live.service.warmer.num_under_way == 0)
    eventually(lambda: live.service.engine_loop.num_unfinished == 0)
    grown = billed(live) - before
    resident = live.acme.post("/v1/lookup", json=body).json()["matched_tokens"]
    assert grown == Counter(requests=1, uncached_tokens=resident) and 0 < resident <= len(ids)
    assert missed(live) - before_missed >= resident


def test_a_warm_that_never_began_costs_nothing(live: Running, salt: str) -> None:
    before = billed(live)
    with model_held(live.service):
        with sent(live, "acme", "/v1/warm", {"token_ids": list(range(64)), "salt": salt}):
            eventually(lambda: num_waiting(live) == 1)
        eventually(lambda: live.service.warmer.num_under_way == 0)
    assert billed(live) == before


@pytest.mark.slow
def test_random_requests_at_a_time_are_billed_what_was_computed(live: Running, salt: str) -> None:
    """Warms, jobs, pins and prewarms of few prefixes, from twelve threads; some hang up while they wait."""
    draw, before, before_missed = random.Random(11), billed(live), missed(live)
    texts = [f"Rule {number}: be polite. " * (8 + number) for number in range(3)]
    tails, lock = 0, threading.Lock()

    def one(number: int) -> None:
        nonlocal tails
        kind, text = draw.choice(("warm", "job", "pin", "prewarm", "prewarm", "left")), draw.choice(texts)
        body: dict[str, Any] = {"prompt": text, "salt": f"{salt}-{number // 24}"}
        if kind == "prewarm":
            usage = prewarm(live.acme, text, body["salt"], draw.choice(("5m", "1h"))).json()["usage"]
            whole = usage["input_tokens"] + usage["cache_read_input_tokens"]
            whole += usage["cache_creation_input_tokens"]
            with lock:
                tails += whole % SIZE
        elif kind == "left":
            sent(live, "acme", "/v1/warm", body).close()
        elif kind == "pin":
            answer = live.acme.post("/v1/pins", json={**body, "ttl_s": 5, "replicas": "all"})
            assert answer.status_code == 201, answer.text
        else:
            job = live.acme.post("/v1/warm", json={**body, "wait": kind == "warm"})
            assert job.is_success, job.text

    with ThreadPoolExecutor(12) as pool:
        asked: list[Future[None]] = [pool.submit(one, number) for number in range(96)]
        for each in asked:
            each.result()
    eventually(lambda: live.service.engine_loop.num_unfinished == 0 and not live.service.warmer.num_under_way)
    grown = billed(live) - before
    assert computed(grown) - tails == missed(live) - before_missed > 0
    assert grown["requests"] <= 96
