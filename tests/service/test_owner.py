"""What a purge, a clear, a removal or a revocation ends: every request that came before it, wherever that waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from radixkv import audit
from radixkv.service import warming
from radixkv.service.endpoints import completions
from radixkv.service.engine_loop import Work, finished
from tests.service.running import KEYS, Running, client, model_held, service_in_thread
from tests.waiting import LIMIT_S, eventually

pytestmark = pytest.mark.slow

SALT = "s"
Ending = Callable[[Running], None]
Body = dict[str, Any]


def ids(number: int) -> list[int]:
    """A prompt of eight blocks that shares none with another's."""
    return [*range(100 + 200 * number, 100 + 200 * number + 128)]


REQUESTS: dict[str, Callable[[list[int]], tuple[str, Body]]] = {
    "completion": lambda ids: ("/v1/completions", {"prompt": ids, "max_tokens": 2}),
    "several": lambda ids: ("/v1/completions", {"prompt": ids, "max_tokens": 2, "n": 2, "temperature": 1.0}),
    "beams": lambda ids: (
        "/v1/completions",
        {"prompt": ids, "max_tokens": 2, "n": 2, "use_beam_search": True},
    ),
    "stream": lambda ids: ("/v1/completions", {"prompt": ids, "max_tokens": 2, "stream": True}),
    "warm": lambda ids: ("/v1/warm", {"token_ids": ids}),
    "job": lambda ids: ("/v1/warm", {"token_ids": ids, "wait": False}),
    "everywhere": lambda ids: ("/v1/warm", {"token_ids": ids, "replicas": "all"}),
    "pin": lambda ids: ("/v1/pins", {"token_ids": ids, "ttl_s": 600, "replicas": "all"}),
    "salted": lambda ids: ("/v1/completions", {"prompt": ids, "max_tokens": 2, "cache_salt": SALT}),
}
ACCEPTED = {"job"}
"""Requests that are answered before they are computed."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    tenants = {name: {"keys": [KEYS[name]], "max_pinned_blocks": 200} for name in ("acme", "globex")}
    path.write_text(json.dumps({"operator": KEYS["operator"], "tenants": tenants}))
    path.chmod(0o600)
    with service_in_thread(keys=str(path)) as running:
        yield running
        audit.check(running.service.cache)


@pytest.fixture
def live(shared: Running) -> Running:
    """A service whose tenant has nothing, and a key of its own."""
    shared.operator.delete("/v1/tenants/acme")
    shared.operator.put("/v1/tenants/acme", json={"max_pinned_blocks": 200})
    give_key(shared)
    return shared


def give_key(live: Running) -> None:
    live.acme.close()
    live.acme = client(live.url, live.operator.post("/v1/tenants/acme/keys").json()["key"])
    eventually(lambda: live.acme.get("/v1/pins").status_code == 200, "no other replica has the removed one's")


def purge(live: Running) -> None:
    assert live.operator.post("/v1/tenants/acme/purge").json()["complete"]


def clear(live: Running) -> None:
    assert live.acme.delete("/v1/cache").status_code == 200


def made_again(live: Running) -> None:
    assert live.operator.delete("/v1/tenants/acme").status_code == 204
    assert live.operator.put("/v1/tenants/acme", json={"max_pinned_blocks": 200}).status_code == 200
    give_key(live)


@contextmanager
def waiting(live: Running, *kinds: str) -> Iterator[list[Future[httpx.Response]]]:
    """Requests of each kind that wait for the model. At the end of the ``with`` they may go on, and are awaited."""
    url, headers = live.url, dict(live.acme.headers)
    with ThreadPoolExecutor(len(kinds)) as threads:

        def ask(at: int, kind: str) -> httpx.Response:
            path, body = REQUESTS[kind](ids(at))
            with client(url, None) as someone:
                return someone.post(path, json=body, headers={"Authorization": headers["authorization"]})

        with model_held(live.service, "globex"):
            asked = [threads.submit(ask, at, kind) for at, kind in enumerate(kinds)]
            eventually(
                lambda: live.service.engine_loop.num_unfinished == 1 + len(kinds), "all wait for the model"
            )
            yield asked
    eventually(lambda: live.service.engine_loop.num_unfinished == 0, "the model has no work left")


def matched(live: Running, number: int, salt: str = "") -> int:
    answer = live.acme.post("/v1/lookup", json={"token_ids": ids(number), "salt": salt})
    return int(answer.json()["matched_tokens"])


def status(answer: httpx.Response) -> int:
    """The status of an answer, or of the error that ends a stream."""
    if "event-stream" not in answer.headers["content-type"] or '"error"' not in answer.text:
        return answer.status_code
    error = json.loads(answer.text.split("data: ")[-1].strip())["error"]
    return {"conflict": 409, "unauthorized": 401}[error["code"]]


def num_billed(live: Running) -> int:
    rows = live.operator.get("/v1/usage", params={"tenant": "acme"}).json()["rows"]
    return sum(int(each["requests"]) for each in rows)


def test_a_job_that_a_purge_dropped_is_ended_not_unknown(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The purge comes while the store is asked for the job."""

    async def reply(tenant: str, job: str) -> None:
        live.service.cache.purge(tenant)

    monkeypatch.setattr(live.service.warm_jobs, "reply", reply)
    answer = live.acme.post("/v1/warm", json={"token_ids": ids(1), "replicas": "all"})
    assert answer.status_code == 409, answer.text


@pytest.mark.parametrize("end", [purge, clear, made_again])
def test_what_waits_for_the_model_is_ended(live: Running, end: Ending) -> None:
    kinds, billed = [*REQUESTS], num_billed(live)
    with waiting(live, *kinds) as asked:
        end(live)
    late = {401, 409} if end is made_again else {409}
    for kind, each in zip(kinds, asked, strict=True):
        answer = each.result()
        if kind in ACCEPTED:
            assert answer.status_code == 202
        elif kind == "pin":
            assert answer.status_code in (401, 404, 409, 201, 503), answer.text
            assert answer.status_code != 201 or answer.json()["replicas"][0]["state"] == "failed"
        else:
            assert status(answer) in late, (kind, answer.text)
    found = {kind: matched(live, at, SALT if kind == "salted" else "") for at, kind in enumerate(kinds)}
    assert found == dict.fromkeys(kinds, 0)
    assert num_billed(live) == billed, "nobody pays for what was refused"
    if end is made_again:
        stats = live.acme.get("/v1/stats").json()
        assert stats["requests"] == stats["resident_blocks"] == 0
        assert live.acme.get("/v1/usage").json()["rows"] == []


def test_a_clear_of_one_salt_ends_what_waits_with_that_salt(live: Running) -> None:
    with waiting(live, "completion", "salted") as asked:
        live.acme.delete("/v1/cache", params={"salt": SALT})
    plain, salted = (each.result() for each in asked)
    assert (plain.status_code, salted.status_code) == (200, 409)
    assert matched(live, 0) == 128 and matched(live, 1, SALT) == 0


def test_what_comes_after_a_purge_does_not_join_what_came_before(live: Running) -> None:
    with ThreadPoolExecutor(1) as threads, waiting(live, "warm") as asked:
        purge(live)
        later = threads.submit(live.acme.post, "/v1/warm", json={"token_ids": ids(0)})
        eventually(lambda: live.service.engine_loop.num_unfinished == 3)
    assert asked[0].result().status_code == 409
    assert later.result().status_code == 200 and matched(live, 0) == 128


@pytest.mark.parametrize("kind", ["completion", "stream", "warm", "everywhere"])
def test_a_revoked_key_ends_its_requests_and_no_others(live: Running, kind: str) -> None:
    key_id = next(
        each["id"] for each in live.operator.get("/v1/keys").json()["keys"] if each["tenant"] == "acme"
    )
    with waiting(live, kind) as asked:
        other = live.operator.post("/v1/tenants/acme/keys").json()["key"]
        assert live.operator.delete(f"/v1/keys/{key_id}").status_code == 204
    assert status(asked[0].result()) == 401
    with client(live.url, other) as another:
        answer = another.post("/v1/completions", json={"prompt": ids(1), "max_tokens": 1})
        assert answer.status_code == 200
        assert another.post("/v1/lookup", json={"token_ids": ids(0)}).json()["matched_tokens"] == 0


def test_who_waits_for_a_pin_learns_at_once_that_its_key_was_revoked(live: Running) -> None:
    key_id = next(
        each["id"] for each in live.operator.get("/v1/keys").json()["keys"] if each["tenant"] == "acme"
    )
    with waiting(live, "pin") as asked:
        assert live.operator.delete(f"/v1/keys/{key_id}").status_code == 204
        assert status(asked[0].result(LIMIT_S)) == 401


def test_an_answer_that_is_ready_is_not_sent_after_a_purge(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ran to its end; the purge comes before the event loop takes its result."""

    async def purged_meanwhile(work: Work[Any]) -> Any:
        result = await finished(work)
        await live.service.purges.purge("acme")
        return result

    monkeypatch.setattr(completions, "finished", purged_meanwhile)
    monkeypatch.setattr(warming, "finished", purged_meanwhile)
    for path, body in (REQUESTS["completion"](ids(0)), REQUESTS["warm"](ids(1)), REQUESTS["stream"](ids(2))):
        assert status(live.acme.post(path, json=body)) == 409


@pytest.mark.slow
def test_a_pin_outlives_the_key_that_asked_for_it(live: Running) -> None:
    """It is the tenant's: after its key was revoked, it is pinned again if the cache loses it."""
    path, body = REQUESTS["pin"](ids(0))
    assert status(live.acme.post(path, json=body)) == 201
    key_id = next(
        each["id"] for each in live.operator.get("/v1/keys").json()["keys"] if each["tenant"] == "acme"
    )
    give_key(live)
    assert live.operator.delete(f"/v1/keys/{key_id}").status_code == 204
    for namespace in live.service.cache.namespaces("acme"):
        live.service.cache.clear(namespace)
    eventually(lambda: live.service.cache.pins("acme"), "it is pinned again")
    assert matched(live, 0) == 128


def test_a_pin_whose_time_ends_during_a_step_ends_quietly(
    live: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pins, clock = live.service.fleet_pins, live.service.fleet_pins._clock
    path, body = REQUESTS["pin"](ids(0))
    assert status(live.acme.post(path, json=body)) == 201

    def a_slow_store_that_lost_it(tenant: str) -> list[Any]:
        monkeypatch.setattr(pins, "_clock", lambda: clock() + 3600)
        return []

    monkeypatch.setattr(live.service.fleet.coordinator, "fleet_pins", a_slow_store_that_lost_it)
    eventually(lambda: not live.service.cache.pins("acme"), "its time is over")
    assert "unexpected error" not in caplog.text
