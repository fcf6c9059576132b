"""Weights that change while the service runs: the engine's version is in all namespaces, and no client sets it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from radixkv import audit
from tests.service.running import Running, model_held, service_in_thread
from tests.service.test_bases import publish
from tests.service.test_refusals import refusal
from tests.service.test_routing import Join, best, join, ranked, router, secret  # noqa: F401 fixtures
from tests.waiting import eventually

pytestmark = pytest.mark.slow

IDS = list(range(100, 164))
"""Four blocks."""
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with service_in_thread() as running:
        yield running


@pytest.fixture
def live(shared: Running) -> Iterator[Running]:
    """A running service of this file alone, with empty caches: its tests change its weights."""
    yield shared
    for tenant in (shared.acme, shared.globex):
        tenant.delete("/v1/cache")
    audit.check(shared.service.cache)


def update(live: Running) -> int:
    """Change the weights in place, and tell the engine."""
    import torch

    with torch.no_grad():
        for weight in live.service.engine.model.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape)
    return live.service.engine.weights_changed()


def complete(live: Running, **fields: Any) -> tuple[str, int]:
    """Return the text of a completion, and how many of its tokens were cached."""
    answer = live.acme.post("/v1/completions", json={"prompt": [*IDS, 7], **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def matched(who: Any, **fields: Any) -> int:
    return int(who.post("/v1/lookup", json={"token_ids": IDS, **fields}).json()["matched_tokens"])


def test_a_request_after_the_change_computes_again(live: Running, salt: str) -> None:
    before, _ = complete(live, salt=salt)
    assert complete(live, salt=salt) == (before, 64)
    update(live)
    assert matched(live.acme, salt=salt) == 0
    after = complete(live, salt=salt)
    assert after == complete(live, salt=f"{salt}-cold") and after[1] == 0
    assert after[0] != before, "the update changes the answer"
    assert complete(live, salt=salt) == (after[0], 64)


def test_a_request_that_waited_during_the_change_gets_the_new_weights(live: Running, salt: str) -> None:
    complete(live, salt=salt)
    with ThreadPoolExecutor(1) as pool:
        with model_held(live.service):
            waiting = pool.submit(complete, live, salt=salt)
            eventually(lambda: live.service.engine_loop.num_unfinished == 2)
            update(live)
        assert waiting.result() == (complete(live, salt=f"{salt}-cold")[0], 0)


@pytest.mark.parametrize("wait", [True, False])
def test_a_warm_that_waited_during_the_change_can_be_sent_again(live: Running, salt: str, wait: bool) -> None:
    body = {"token_ids": IDS, "salt": salt, "wait": wait}
    with ThreadPoolExecutor(1) as pool:
        with model_held(live.service):
            waiting = pool.submit(live.acme.post, "/v1/warm", json=body)
            eventually(lambda: live.service.engine_loop.num_unfinished == 2)
            update(live)
        answer = waiting.result()
    if not wait:
        job = answer.json()["job"]
        ended = eventually(
            lambda: (found := live.acme.get(f"/v1/warm/{job}").json())["state"] == "failed" and found
        )
        assert ended["error"]["type"] == "conflict"
    else:
        assert (answer.status_code, refusal(answer)["type"]) == (409, "conflict")
    assert matched(live.acme, salt=salt) == 0
    assert live.acme.post("/v1/warm", json={**body, "wait": True}).json()["computed"] == 64
    assert matched(live.acme, salt=salt) == 64


def test_a_repeated_warm_is_another_job_after_the_change(live: Running, salt: str) -> None:
    body, key = {"token_ids": IDS, "salt": salt, "wait": False}, {"Idempotency-Key": salt}

    def job() -> str:
        answer = live.acme.post("/v1/warm", json=body, headers=key)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["job"])

    first = job()
    assert job() == first
    update(live)
    second = job()
    assert job() == second != first
    eventually(lambda: matched(live.acme, salt=salt) == 64)


def test_pins_and_bases_end_with_their_weights(live: Running, salt: str) -> None:
    body = {"token_ids": IDS, "salt": salt, "ttl_s": 600}
    settings = {"max_pinned_blocks": 16, "policy": "lrfu"}
    assert live.operator.put("/v1/tenants/acme", json=settings).status_code == 200
    publish(live, readers=["globex"], token_ids=IDS)
    assert matched(live.globex) == 64
    assert live.acme.post("/v1/warm", json={"token_ids": IDS, "salt": salt}).status_code == 200
    local = live.acme.post("/v1/pins", json=body)
    fleet = live.acme.post("/v1/pins", json={**body, "replicas": "all"})
    assert (local.status_code, fleet.status_code) == (201, 201), (local.text, fleet.text)
    assert fleet.json()["replicas"][0]["state"] == "done"
    update(live)
    assert matched(live.globex) == 0 and live.operator.get("/v1/bases").json()["bases"] == []

    def parts() -> list[list[Any]]:
        pins = live.acme.get("/v1/pins").json()["pins"]
        return [[(part["state"], part["error"]) for part in pin["replicas"]] for pin in pins]

    eventually(
        lambda: parts() == [[("failed", "cleared")]], "the pin of the fleet has failed, the other one is gone"
    )
    again = live.acme.post("/v1/pins", json={**body, "replicas": "all"}).json()
    assert again["replicas"][0]["state"] == "done" and again["id"] != fleet.json()["id"]
    for pin in live.acme.get("/v1/pins").json()["pins"]:
        assert live.acme.delete(f"/v1/pins/{pin['id']}").status_code == 204


@pytest.mark.parametrize("path", ["/v1/lookup", "/v1/warm", "/v1/pins", "/v1/completions", "/v1/route"])
def test_no_client_sets_the_version(live: Running, path: str) -> None:
    answer = live.acme.post(path, json={"prompt": "a prompt", "weights": 1})
    status = 400 if path == "/v1/completions" else 422  # as OpenAI answers
    assert (answer.status_code, refusal(answer)["field"]) == (status, "weights")
    assert {each.weights for each in live.service.cache.namespaces()} <= {live.service.engine.weights_version}


@pytest.mark.slow
def test_replicas_with_different_weights_do_not_count_for_each_other(
    join: Join,  # noqa: F811
    router: Any,  # noqa: F811
) -> None:
    """A replica takes no order for another version. A router credits a replica with its present version only."""
    one, two = join("one"), join("two")
    rows = [one.acme, two.acme]
    eventually(lambda: all(len(_weights(each)) == 2 for each in rows), "they see each other")
    assert one.acme.post("/v1/warm", json={"token_ids": IDS * 8}).json()["computed"] == 512
    eventually(lambda: _held(router, IDS * 8) == {"one": 512, "two": 0}, "the router sees what one has")

    assert two.service.engine.weights_changed() == 1
    warmed = one.acme.post("/v1/warm", json={"token_ids": IDS, "replicas": "all"}).json()
    outcomes = {each["replica"]: (each["state"], each["error"]) for each in warmed["replicas"]}
    assert outcomes == {"one": ("done", None), "two": ("failed", "other_weights")}
    assert (matched(one.acme), matched(two.acme)) == (64, 0)
    pinned = one.acme.post("/v1/pins", json={"token_ids": IDS, "ttl_s": 600, "replicas": ["two"]})
    assert pinned.status_code == 503 and "other_weights" in pinned.json()["error"]["message"]
    eventually(
        lambda: all(_weights(each) == {"one": 0, "two": 1} for each in rows), "both know both versions"
    )
    assert _held(one.acme, IDS * 8) == {"one": 512, "two": 0} and _held(two.acme, IDS * 8) == {
        "one": 0,
        "two": 0,
    }
    eventually(lambda: _held(router, IDS * 8) == {"one": 0, "two": 0}, "the router uses the newest version")

    assert one.service.engine.weights_changed() == 1
    assert _held(one.acme, IDS * 8) == {"one": 0, "two": 0}
    warmed = one.acme.post("/v1/warm", json={"token_ids": IDS * 8, "replicas": "all"}).json()
    assert [each["state"] for each in warmed["replicas"]] == ["done", "done"], json.dumps(warmed)
    eventually(lambda: _held(router, IDS * 8) == {"one": 512, "two": 512}, "the router sees what both have")


def _weights(who: Any) -> dict[str, int]:
    rows = who.get("/v1/replicas").json()["replicas"]
    return {each["id"]: each["weights"] for each in rows if each["reachable"]}


def _held(who: Any, ids: list[int]) -> dict[str, int]:
    return {each["replica"]: each["matched_tokens"].get("device", 0) for each in ranked(who, token_ids=ids)}
