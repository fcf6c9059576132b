"""Bases over HTTP: the operator publishes them, tenants read them, and no other caller learns of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import audit
from radixkv.service.auth import OPERATOR_ACCOUNT
from tests.service.running import Running, model_held, sent, service_in_thread
from tests.service.test_refusals import refusal
from tests.waiting import eventually

IDS = list(range(100, 164))
"""Four blocks."""
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with service_in_thread() as running:
        yield running


@pytest.fixture
def live(shared: Running) -> Iterator[Running]:
    """A running service without bases."""
    yield shared
    for base in shared.operator.get("/v1/bases").json()["bases"]:
        assert shared.operator.delete(f"/v1/bases/{base['id']}").status_code == 204
    for tenant in (shared.acme, shared.globex):
        tenant.delete("/v1/cache")
    shared.service.cache.purge(OPERATOR_ACCOUNT)  # what bases left
    audit.check(shared.service.cache)


def publish(live: Running, **fields: Any) -> dict[str, Any]:
    body = {"id": "base", "token_ids": IDS, "readers": ["acme", "globex"], **fields}
    answer = live.operator.post("/v1/bases", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def matched(tenant: Any, ids: list[int] = IDS, **fields: Any) -> int:
    return int(tenant.post("/v1/lookup", json={"token_ids": ids, **fields}).json()["matched_tokens"])


def test_a_base_is_published_read_and_unpublished(live: Running) -> None:
    made = publish(live, token_ids=[*IDS, 7, 7], readers=["acme"])
    assert made.pop("seconds") > 0
    assert made == {
        "id": "base", "readers": ["acme"], "adapter": None, "tokens": 64, "blocks": 4, "state": "readable",
        "computed": 64, "left_out": 2,
    }  # fmt: skip
    assert matched(live.acme) == matched(live.acme, salt="any") == 64
    assert matched(live.globex) == matched(live.acme, adapter="other") == 0
    (listed,) = live.operator.get("/v1/bases").json()["bases"]
    assert listed == {name: made[name] for name in listed}
    changed = live.operator.put("/v1/bases/base/readers", json={"readers": ["globex"]}).json()
    assert changed == {**listed, "readers": ["globex"]}
    assert matched(live.acme) == 0 and matched(live.globex) == 64
    assert live.operator.delete("/v1/bases/base").status_code == 204
    assert matched(live.globex) == 0 and live.operator.get("/v1/bases").json() == {"bases": []}


def test_completions_are_the_same_behind_a_base(live: Running) -> None:
    """A completion behind a base has the same tokens as one without it.

    The usage counts the hit, and the next turn reuses it.
    """
    prompt = [*IDS, *range(20)]
    alone = live.globex.post("/v1/completions", json={"prompt": prompt, **GREEDY}).json()
    publish(live, readers=["acme"])
    behind = live.acme.post("/v1/completions", json={"prompt": prompt, **GREEDY}).json()
    assert behind["choices"] == alone["choices"]
    assert behind["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    again = live.acme.post(
        "/v1/completions", json={"prompt": prompt, **GREEDY, "n": 2, "temperature": 1}
    ).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
    exactly = live.acme.post("/v1/completions", json={"prompt": IDS, **GREEDY}).json()
    assert exactly["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert live.acme.post("/v1/warm", json={"token_ids": IDS}).json()["computed"] == 0


def test_a_base_of_text_or_messages_serves_every_continuation(live: Running) -> None:
    """A published text is cut where a warm cuts it, so every prompt that starts with the text can read the base."""
    text = "You are a helpful assistant of the platform. Answer shortly, and never of the weather. " * 4
    made = publish(live, token_ids=None, prompt=text)
    assert made["tokens"] % 16 == 0 and made["tokens"] > 32
    answer = live.acme.post("/v1/lookup", json={"prompt": text + "And now?"}).json()
    assert answer["matched_tokens"] == made["tokens"]
    messages = [{"role": "system", "content": text}]
    chat = publish(live, id="chat", token_ids=None, messages=messages)
    question = [*messages, {"role": "user", "content": "And now?"}]
    answer = live.acme.post("/v1/lookup", json={"messages": question}).json()
    assert answer["matched_tokens"] >= chat["tokens"]


def test_only_the_operator_sees_a_base_in_statistics(live: Running) -> None:
    """A tenant's statistics, clear and purge ignore a base. The operator's counts and metrics include it."""
    before = live.acme.get("/v1/stats").json()
    publish(live)
    assert live.acme.get("/v1/stats").json() == before
    live.acme.post("/v1/completions", json={"prompt": [*IDS, 1], **GREEDY})
    after = live.acme.get("/v1/stats").json()
    assert after["hit_tokens"] == before["hit_tokens"] + 64 and after["resident_blocks"] == 0
    assert live.operator.post("/v1/tenants/acme/purge").status_code == 200
    assert matched(live.acme) == 64
    stats = live.operator.get("/v1/stats").json()
    assert stats["cache"]["num_bases"] == 1 and stats["cache"]["base_blocks"] == 4
    assert {each["tenant"] for each in stats["tenants"]} == {"acme", "globex"}
    metrics = live.operator.get("/metrics").text
    assert "radixkv_cache_num_bases 1.0" in metrics and "radixkv_cache_base_blocks 4.0" in metrics
    assert OPERATOR_ACCOUNT not in metrics and live.acme.get("/metrics").status_code == 403
    for method, path in (("GET", ""), ("POST", ""), ("PUT", "/base/readers"), ("DELETE", "/base")):
        answers = [who.request(method, f"/v1/bases{path}", json={}) for who in (live.acme, live.nobody)]
        assert [answer.status_code for answer in answers] == [403, 401]
    assert matched(live.acme) == 64


def test_bad_requests_about_bases_are_refused(live: Running) -> None:
    publish(live)
    operator = live.operator
    body = {"id": "next", "token_ids": IDS, "readers": ["acme"]}
    for change, status, field in (
        ({"id": "base"}, 409, "id"),
        ({"id": "with space"}, 422, "id"),
        ({"readers": ["acme", "nobody"]}, 422, "readers[1]"),
        ({"readers": "acme"}, 422, "readers"),
        ({"token_ids": IDS[:15]}, 422, "prompt"),
        ({"token_ids": [10**6]}, 422, "token_ids[0]"),
        ({"prompt": "both"}, 422, "prompt, messages, token_ids"),
        ({"salt": "s"}, 422, "salt"),
        ({"tenant": "acme"}, 422, "tenant"),
    ):
        answer = operator.post("/v1/bases", json=body | change)  # type: ignore[operator]
        assert answer.status_code == status and refusal(answer)["field"] == field, answer.text
    for answer in (
        operator.put("/v1/bases/none/readers", json={"readers": []}),
        operator.delete("/v1/bases/none"),
    ):
        assert answer.status_code == 404 and refusal(answer)["message"] == "no such base"
    answer = operator.put("/v1/bases/base/readers", json={"readers": ["x"]})
    assert answer.status_code == 422 and refusal(answer)["field"] == "readers[0]"
    assert len(operator.get("/v1/bases").json()["bases"]) == 1 and matched(live.acme) == 64


def test_a_base_is_hidden_until_it_is_computed(live: Running) -> None:
    """While a base waits for the model, no list shows it. A client that hangs up cancels it."""
    unfinished = live.service.engine_loop._unfinished
    with model_held(live.service):
        with sent(live, "operator", "/v1/bases", {"id": "late", "token_ids": IDS, "readers": ["acme"]}):
            eventually(lambda: len(unfinished) == 2, "it waits for the model")
            assert live.operator.get("/v1/bases").json() == {"bases": []}
        eventually(lambda: any(work.future.cancelled() for work in unfinished), "it is given up")
        assert live.operator.get("/v1/bases").json() == {"bases": []}
    eventually(lambda: not live.service.engine_loop.num_unfinished)
    assert live.operator.get("/v1/bases").json() == {"bases": []} and matched(live.acme) == 0
    publish(live, id="late")


def test_bases_respect_guarantees_and_lose_removed_readers(tmp_path: Path) -> None:
    """A base that does not fit beside the guarantees is refused, with the number of missing blocks.

    Removing a tenant removes it from the readers.
    """
    keys = tmp_path / "keys.json"
    tenants = {
        "acme": {"keys": ["demo-acme"], "guaranteed_blocks": 62},
        "globex": {"keys": ["demo-globex"]},
    }
    keys.write_text(json.dumps({"operator": "demo-operator", "tenants": tenants}))
    with service_in_thread(keys=str(keys), **{"num-blocks": "64"}) as live:
        body = {"id": "base", "token_ids": IDS, "readers": ["acme", "globex"]}
        refused = refusal(live.operator.post("/v1/bases", json=body))
        assert refused["field"] == "prompt" and "2 fewer" in refused["message"]
        assert live.operator.put("/v1/tenants/acme", json={"guaranteed_blocks": 60}).status_code == 200
        publish(live)
        assert live.operator.put("/v1/tenants/acme", json={"guaranteed_blocks": 61}).status_code == 422
        assert live.operator.delete("/v1/tenants/acme").status_code == 204
        assert live.operator.get("/v1/bases").json()["bases"][0]["readers"] == ["globex"]
        key = live.operator.post("/v1/tenants/acme/keys").json()["key"]
        answer = live.acme.post(
            "/v1/lookup", json={"token_ids": IDS}, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.json()["matched_tokens"] == 0 and matched(live.globex) == 64
        audit.check(live.service.cache)
