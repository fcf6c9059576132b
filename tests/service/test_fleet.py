"""Replicas: two real processes on one real Redis, and requests that only claim to come from a replica."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from radixkv.coordination import Settings
from radixkv.errors import ConfigError
from radixkv.service.auth import Keyring
from radixkv.service.fleet.peers import MAX_AT_ONCE, PIN_PATH, PROVE_PATH, PURGE_PATH, WARM_PATH, Fleet
from radixkv.service.problems import ApiError
from radixkv.signing import SIGNED_HEADERS, sign_request
from tests.coordination import signed
from tests.redis_server import RedisServer, need_binary
from tests.service.patience import leaping
from tests.service.running import (
    LEASE_S,
    Process,
    Running,
    answered,
    client,
    lease_over,
    served,
    service_in_thread,
)
from tests.tcp_proxy import TcpProxy
from tests.tiers.support import PATIENT_S
from tests.waiting import LIMIT_S, ended, eventually

SECRET = b"a secret of this test's fleet"
IDS = list(range(5, 5 + 16 * 40))

Start = Callable[[str], Process]


@pytest.fixture
def start(redis_server: RedisServer, tmp_path: Path) -> Iterator[Start]:
    """Start replicas of one fleet: ``start(name)``."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with ExitStack() as stack:

        def begin(name: str) -> Process:
            log = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}.log"
            common = ["--redis", redis_server.url, "--replica", name, "--num-blocks", "256"]
            return stack.enter_context(served(log, *common, "--fleet-secret", str(secret)))

        yield begin


def view(replica: Process | Running, key: str = "demo-acme") -> dict[str, dict[str, Any]]:
    """The replicas that a replica knows, by id."""
    with client(replica.url, key) as someone:
        return {each["id"]: each for each in someone.get("/v1/replicas").json()["replicas"]}


def reachable(replica: Process | Running, *names: str) -> bool:
    return {name for name, each in view(replica).items() if each["reachable"]} == set(names)


def post(
    replica: Process | Running, path: str, body: dict[str, Any], key: str = "demo-acme"
) -> httpx.Response:
    with client(replica.url, key) as someone:
        return answered(lambda: someone.post(path, json=body))


def matched(replica: Process | Running, key: str = "demo-acme", **fields: Any) -> int:
    return int(post(replica, "/v1/lookup", {"token_ids": IDS, **fields}, key).json()["matched_tokens"])


@pytest.mark.slow
def test_replicas_join_leave_and_warm_together(start: Start, redis_server: RedisServer) -> None:
    one, two = start("one"), start("two")
    eventually(lambda: reachable(one, "one", "two") and reachable(two, "one", "two"))
    assert view(one)["two"]["address"] == two.url and not view(one)["two"]["is_self"]

    warmed = post(one, "/v1/warm", {"token_ids": IDS, "replicas": "all", "salt": "s"}).json()
    assert [
        (each["replica"], each["state"], each["tokens"], each["computed"]) for each in warmed["replicas"]
    ] == [
        ("one", "done", len(IDS), len(IDS)),
        ("two", "done", len(IDS), len(IDS)),
    ]
    assert matched(one, salt="s") == matched(two, salt="s") == len(IDS)
    assert matched(two) == matched(two, salt="s", key="demo-globex") == 0
    alone = post(one, "/v1/warm", {"token_ids": IDS, "salt": "only here"}).json()
    assert "replicas" not in alone and matched(two, salt="only here") == 0
    eventually(lambda: view(one, "demo-operator")["two"]["last_seq"] > 1, "two's log reaches one")
    assert view(one)["two"]["last_seq"] is None, "the counter includes all tenants, so tenants do not see it"

    first_life = view(one)["two"]
    two.kill()
    after = post(one, "/v1/warm", {"token_ids": IDS, "replicas": "all", "salt": "later"}).json()
    assert after["tokens"] == len(IDS), "a failure elsewhere does not fail the local warm"
    outcomes = {each["replica"]: each["state"] for each in after["replicas"]}
    assert outcomes == {"one": "done", "two": "failed"}
    lease_over(redis_server, "two")
    eventually(lambda: "two" not in view(one), "two leaves the view")
    with client(one.url, "demo-acme") as acme:
        all_replicas = acme.get("/v1/replicas", params={"all": "true"}).json()["replicas"]
        assert {each["id"]: each["live"] for each in all_replicas} == {"one": True, "two": False}
        assert acme.get("/v1/replicas", params={"all": "yes"}).status_code == 422
    gone = post(one, "/v1/warm", {"token_ids": IDS, "replicas": "all", "salt": "s"}).json()
    assert [each["replica"] for each in gone["replicas"]] == ["one"]

    reborn = start("two")
    eventually(lambda: reachable(one, "one", "two"))
    second_life = view(one)["two"]
    assert second_life["epoch"] > first_life["epoch"] and second_life["address"] == reborn.url
    assert matched(reborn, salt="s") == 0
    again = post(one, "/v1/warm", {"token_ids": IDS, "replicas": "all", "salt": "s"}).json()
    assert [(each["replica"], each["cached_before"]) for each in again["replicas"]] == [
        ("one", len(IDS)),
        ("two", 0),
    ]

    assert reborn.stop() == 0
    eventually(lambda: "two" not in view(one), "a replica that leaves on its own is gone at once")
    assert one.stop() == 0


# The tests below need replicas but no processes. A service in a thread starts in a tenth of the time.


@pytest.fixture
def join(redis_server: RedisServer, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Add a service in a thread to one fleet: ``join(name, setting=value)``."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with ExitStack() as stack:

        def begin(name: str, **settings: str) -> Running:
            fleet = {"redis": redis_server.url, "replica": name, "fleet-secret": str(secret)}
            return stack.enter_context(service_in_thread(**{"num-blocks": "256", **fleet, **settings}))

        yield begin


Join = Callable[..., Running]


@pytest.mark.slow
def test_a_job_warms_everywhere_too(join: Join) -> None:
    one, two = join("one"), join("two")
    eventually(lambda: reachable(one, "one", "two"))
    job = one.acme.post("/v1/warm", json={"token_ids": IDS, "replicas": "all", "wait": False}).json()["job"]
    eventually(lambda: one.acme.get(f"/v1/warm/{job}").json()["state"] == "done")
    done = one.acme.get(f"/v1/warm/{job}").json()
    assert [each["replica"] for each in done["result"]["replicas"]] == ["one", "two"]
    assert matched(two) == len(IDS)
    assert two.acme.get(f"/v1/warm/{job}").json() == done, "every replica gives the same answer"
    unknown = [two.acme.get(f"/v1/warm/{'0' * 32}"), two.globex.get(f"/v1/warm/{job}")]
    assert [each.status_code for each in unknown] == [404, 404] and unknown[0].content == unknown[1].content


@pytest.mark.slow
def test_a_replica_learns_which_prefixes_another_holds(join: Join) -> None:
    one, two = join("one"), join("two")
    eventually(lambda: reachable(one, "one", "two"))
    one.acme.post("/v1/warm", json={"token_ids": IDS})
    namespace = two.service.namespace("acme", "", None)
    hints = eventually(lambda: two.service.fleet.coordinator.hints(namespace, IDS))
    assert [(hint.replica.id, hint.num_tokens) for hint in hints] == [("one", len(IDS) // 256 * 256)]
    one.acme.delete("/v1/cache")
    eventually(lambda: not two.service.fleet.coordinator.hints(namespace, IDS))


@pytest.mark.slow
def test_a_warm_fails_only_on_the_replica_that_lacks_blocks(join: Join) -> None:
    one, two = join("one"), join("two", **{"num-blocks": "41"})
    eventually(lambda: reachable(one, "one", "two"))
    held = two.service.cache.open(two.service.namespace("globex", "", None), IDS)
    reply = one.acme.post("/v1/warm", json={"token_ids": IDS, "replicas": "all"}).json()
    outcomes = {each["replica"]: (each["state"], each["error"]) for each in reply["replicas"]}
    assert outcomes == {"one": ("done", None), "two": ("failed", "no_capacity")}
    eventually(lambda: reachable(two, "one", "two"))
    other_way = two.acme.post("/v1/warm", json={"token_ids": IDS, "replicas": "all", "salt": "s"}).json()
    outcomes = {each["replica"]: (each["state"], each["error"]) for each in other_way["replicas"]}
    assert outcomes == {"one": ("done", None), "two": ("failed", "no_capacity")}
    assert (other_way["tokens"], other_way["computed"]) == (len(IDS), len(IDS)), (
        "the totals are those of the replica that is done"
    )
    held.release()


@pytest.mark.slow
def test_a_warm_fails_only_on_the_replica_that_lacks_the_tenant(join: Join, tmp_path: Path) -> None:
    (tmp_path / "few.json").write_text(json.dumps({"tenants": {"acme": "demo-acme"}}))
    one, two = join("one"), join("two", keys=str(tmp_path / "few.json"))
    eventually(lambda: reachable(two, "one", "two") and reachable(one, "one", "two"))
    reply = one.globex.post("/v1/warm", json={"token_ids": IDS, "replicas": "all"}).json()
    outcomes = {each["replica"]: (each["state"], each["error"]) for each in reply["replicas"]}
    assert outcomes == {"one": ("done", None), "two": ("failed", "not_found")}


@pytest.mark.slow
def test_an_address_without_a_proof_gets_no_requests(
    join: Join, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "beat_s", PATIENT_S)  # the next beat would repair the address
    one, _ = join("one"), join("two")
    eventually(lambda: reachable(one, "one", "two"))
    redis_server.command(f"HSET rk1:{{r:two}}:meta address {one.url}")
    eventually(lambda: not view(one)["two"]["reachable"], "an address without its proof is ignored")
    assert view(one)["two"]["address"] is None
    reply = one.acme.post("/v1/warm", json={"token_ids": IDS, "replicas": "all"}).json()
    assert [each["replica"] for each in reply["replicas"]] == ["one"]


@pytest.mark.slow
def test_a_fenced_replica_is_unhealthy(join: Join) -> None:
    old, new = join("same"), join("same")
    eventually(lambda: old.nobody.get("/healthz").status_code == 503)
    assert old.nobody.get("/readyz").json()["reasons"] == ["coordination: fenced"]
    assert new.nobody.get("/readyz").status_code == 200


@pytest.mark.slow
def test_local_work_continues_without_redis(join: Join, redis_server: RedisServer) -> None:
    one = join("one")
    redis_server.kill()
    eventually(lambda: one.service.fleet.coordinator.health().state == "unavailable")
    assert one.acme.post("/v1/warm", json={"token_ids": IDS, "replicas": "all"}).json()["tokens"] == len(IDS)
    assert matched(one) == len(IDS)
    job = one.acme.post("/v1/warm", json={"token_ids": IDS, "salt": "s", "wait": False}).json()["job"]
    eventually(lambda: one.acme.get(f"/v1/warm/{job}").json()["state"] == "done")
    assert one.acme.get(f"/v1/warm/{'0' * 32}").json()["error"]["type"] == "store_unavailable", (
        "the job may exist"
    )
    once = one.acme.post("/v1/warm", json={"token_ids": IDS}, headers={"Idempotency-Key": "k"})
    assert once.status_code == 503, "a request that cannot be recorded is refused"
    for path in ("/healthz", "/readyz"):
        answer = one.nobody.get(path)
        assert answer.status_code == 200 and answer.json()["coordination"] == "unavailable"
    assert "radixkv_replica_ok 0.0" in one.operator.get("/metrics").text
    redis_server.restart()
    eventually(lambda: one.nobody.get("/readyz").json()["coordination"] == "ok", "the replica reconnects")
    assert "radixkv_replica_ok 1.0" in one.operator.get("/metrics").text
    keyed = {"json": {"token_ids": IDS}, "headers": {"Idempotency-Key": "k"}}
    again = answered(lambda: one.acme.post("/v1/warm", **keyed)).json()
    assert (again["cached_before"], again["computed"]) == (len(IDS), 0)


@pytest.mark.slow
def test_a_purge_is_obeyed_everywhere_at_once(join: Join, redis_server: RedisServer) -> None:
    all_three = a, b, c = join("a"), join("b"), join("c")
    eventually(lambda: all(reachable(each, "a", "b", "c") for each in all_three))
    for key in ("demo-acme", "demo-globex"):
        warmed = post(a, "/v1/warm", {"token_ids": IDS, "replicas": "all"}, key).json()
        assert [each["state"] for each in warmed["replicas"]] == ["done"] * 3
    purge = "/v1/tenants/acme/purge"

    def state(who: Running) -> dict[str, Any]:
        return dict(answered(lambda: who.operator.get(purge)).json())

    purged = answered(lambda: a.operator.post(purge)).json()
    assert purged["blocks"] == len(IDS) // 16 and purged["generation"] == 1
    eventually(lambda: state(b)["complete"], "the purge is complete")
    found = state(c)
    assert found["confirmed"] == ["a", "b", "c"] and found["pending"] == found["unconfirmed"] == []
    assert [matched(each) for each in all_three] == [0] * 3
    assert [matched(each, "demo-globex") for each in all_three] == [len(IDS)] * 3, "another tenant's stay"

    redis_server.restart()  # it restarts empty
    is_back = eventually(
        lambda: all(
            each.nobody.get("/readyz").json()["coordination"] == "ok"
            and state(each)["confirmed"] == ["a", "b", "c"]
            for each in all_three
        ),
        "the replicas write the generation to the store again",
    )
    assert is_back and state(b)["generation"] == 1
    assert [matched(each) for each in all_three] == [0] * 3
    eventually(lambda: all(reachable(each, "a", "b", "c") for each in all_three))

    def is_found() -> bool:
        """A replica that registers anew purges anew.

        A warm at that time is refused with a conflict, or its blocks are purged.
        """
        again = post(b, "/v1/warm", {"token_ids": IDS})
        assert again.is_success or again.json()["error"]["type"] == "conflict", again.text
        rows = post(a, "/v1/route", {"token_ids": IDS, "predict": False}).json()["candidates"]
        return {each["replica"]: each["matched_tokens"]["device"] for each in rows} == {
            "a": 0,
            "b": 512,
            "c": 0,
        }

    eventually(is_found, "the others find the new blocks")


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[TcpProxy]:
    """What a replica needs to reach Redis that is to be cut off from it."""
    with closing(TcpProxy(redis_server.host, redis_server.port)) as made:
        yield made


@pytest.mark.slow
def test_after_a_lease_a_purge_is_complete_without_a_replica_that_was_cut_off(
    join: Join, proxy: TcpProxy, redis_server: RedisServer, tmp_path: Path
) -> None:
    """That one then refuses the tenants that ask for it."""
    careful = {"keys": ["demo-globex"], "on_unconfirmed_generation": "refuse"}
    (tmp_path / "keys.json").write_text(
        json.dumps({"operator": "demo-operator", "tenants": {"acme": "demo-acme", "globex": careful}})
    )
    keys = {"keys": str(tmp_path / "keys.json")}
    with leaping() as clock:
        one, two = join("one", **keys), join("two", **keys, redis=f"redis://127.0.0.1:{proxy.port}/0")
    eventually(lambda: reachable(one, "one", "two") and reachable(two, "one", "two"))
    for tenant in (two.acme, two.globex):
        assert tenant.post("/v1/warm", json={"token_ids": IDS}).json()["tokens"] == len(IDS)
    purge = "/v1/tenants/acme/purge"

    def state(who: Running = one) -> dict[str, Any]:
        return dict(answered(lambda: who.operator.get(purge)).json())

    proxy.refuse = True
    eventually(lambda: two.service.fleet.coordinator.health().state == "unavailable")
    assert answered(lambda: one.operator.post(purge)).json()["confirmed"] == ["one"]
    assert not state()["complete"] and matched(two) == 0, (
        "it was told directly, and acme's setting is to serve"
    )
    assert matched(two, "demo-globex") == len(IDS), "its lease isn't over"
    lease_over(redis_server, "two")
    eventually(
        lambda: reachable(one, "one"), "one has seen the last beat of two: a beat seen later counts anew"
    )
    clock.leap(float(LEASE_S))
    eventually(lambda: state()["complete"], "its lease is over")
    assert (state()["confirmed"], state()["unconfirmed"]) == (["one"], ["two"])
    for path in ("/v1/lookup", "/v1/warm"):
        refused = two.globex.post(path, json={"token_ids": IDS})
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        assert refused.json()["error"]["type"] == "generation_unconfirmed"
    ready = two.nobody.get("/readyz")
    assert (ready.status_code, ready.json()["coordination"]) == (200, "unavailable")
    proxy.refuse = False
    eventually(lambda: state()["unconfirmed"] == [], "after reconnecting, it purges first")
    assert matched(two, "demo-globex") == len(IDS), "globex was not purged"
    assert matched(two) == 0


@pytest.mark.slow
def test_a_replica_that_was_cut_off_keeps_its_pins_for_their_time(join: Join, proxy: TcpProxy) -> None:
    with leaping() as clock:
        one, two = join("one"), join("two", redis=f"redis://127.0.0.1:{proxy.port}/0")
    eventually(lambda: reachable(one, "one", "two") and reachable(two, "one", "two"))
    for each in (one, two):
        assert each.operator.put("/v1/tenants/acme", json={"max_pinned_blocks": 64}).status_code == 200
    body = {"token_ids": IDS[:512], "replicas": "all"}
    lasting, brief = (
        post(one, "/v1/pins", {**body, "ttl_s": ttl_s, "salt": f"{ttl_s}"}).json() for ttl_s in (3000, 300)
    )
    assert [each["state"] for each in (*lasting["replicas"], *brief["replicas"])] == ["done"] * 4
    proxy.refuse = True
    eventually(lambda: two.service.fleet.coordinator.health().state == "unavailable")
    clock.leap(300)
    assert [each["id"] for each in two.acme.get("/v1/pins").json()["pins"]] == [lasting["id"]]
    path = f"/v1/pins/{lasting['id']}"
    assert two.acme.delete(path).status_code == 503
    assert answered(lambda: one.acme.delete(path)).status_code == 204
    refused = two.acme.post("/v1/pins", json={**body, "ttl_s": 9})
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "store_unavailable")
    eventually(lambda: two.service.cache.tenant_stats("acme").pinned_blocks == 32, "the brief one has ended")
    proxy.refuse = False
    eventually(
        lambda: two.service.cache.tenant_stats("acme").pinned_blocks == 0, "it learns of the other's end"
    )


@pytest.mark.slow
def test_another_secret_is_refused_at_the_start(join: Join, tmp_path: Path) -> None:
    join("one")
    (tmp_path / "other").write_text("a secret of some other fleet")
    with pytest.raises(ConfigError) as caught:
        join("two", **{"fleet-secret": str(tmp_path / "other")})
    assert "some other fleet" not in str(caught.value)


SIGNED: dict[str, Any] = {
    "method": "POST",
    "path": WARM_PATH,
    "tenant": "acme",
    "body": b'{"job": "00000000000000000000000000000000", "token_ids": [1]}',
}


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A replica of a fleet of its own, which has the internal endpoints. The tests share it."""
    folder = tmp_path_factory.mktemp("member")
    (folder / "secret").write_bytes(SECRET)
    store = RedisServer(need_binary(), folder)
    fleet = {"redis": store.url, "replica": "member", "fleet-secret": str(folder / "secret")}
    try:
        with service_in_thread(**{"num-blocks": "256", **fleet}) as running:
            yield running
    finally:
        store.kill()


def forged(live: Running, **changes: Any) -> dict[str, str]:
    """The headers of a request to ``live``, signed with the fleet's secret, with ``changes`` applied."""
    own = live.service.fleet
    fields = {**SIGNED, "audience": own.coordinator.info().audience, "timestamp_s": time.time(), **changes}
    secret = fields.pop("secret", own.secret)
    return sign_request(secret, **fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"secret": b"x" * 32},
        {"audience": "other@1"},
        {"path": "/v1/warm"},
        {"method": "GET"},
        {"body": b'{"token_ids": [2]}'},
        {"timestamp_s": 1.0},
    ],
)
def test_a_signature_for_anything_else_is_401(member: Running, changes: dict[str, Any]) -> None:
    headers = {**forged(member, **changes), "content-type": "application/json"}
    answer = member.nobody.post(WARM_PATH, content=SIGNED["body"], headers=headers)
    assert answer.status_code == 401


def test_a_signed_request_is_accepted_once_and_bearer_keys_never(member: Running) -> None:
    headers = {**forged(member), "content-type": "application/json"}
    first, again = (member.nobody.post(WARM_PATH, content=SIGNED["body"], headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (404, 401), (
        "there is no such job, and a repeated request is refused"
    )
    assert member.operator.post(WARM_PATH, json={"token_ids": [1]}).status_code == 401
    tenant = {**headers, **forged(member, tenant="nobody")}
    assert member.nobody.post(WARM_PATH, content=SIGNED["body"], headers=tenant).status_code == 404


def test_a_replica_cannot_ask_for_a_further_fan_out(member: Running) -> None:
    body = b'{"job": "00000000000000000000000000000000", "token_ids": [1], "replicas": "all"}'
    headers = {**forged(member, body=body), "content-type": "application/json"}
    answer = member.nobody.post(WARM_PATH, content=body, headers=headers)
    assert answer.status_code == 422 and answer.json()["error"]["field"] == "replicas"


def test_an_order_for_an_earlier_or_later_tenant_of_the_name_is_refused(
    member: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two replicas hasn't seen yet that the tenant was removed and made again."""

    def missing(incarnation: str) -> str:
        body = json.dumps({"job": "0" * 32, "token_ids": [1], "incarnation": incarnation}).encode()
        headers = {**forged(member, body=body), "content-type": "application/json"}
        answer = member.nobody.post(WARM_PATH, content=body, headers=headers)
        assert answer.status_code == 404
        return str(answer.json()["error"]["message"])

    monkeypatch.setattr(Keyring, "incarnation", lambda ring, tenant: "1" * 16)
    assert "tenant" in missing("2" * 16)
    assert "job" in missing("1" * 16) and "job" in missing("")


INTERNAL = (WARM_PATH, PURGE_PATH, PIN_PATH, PROVE_PATH)


def announced(live: Running, path: str, headers: dict[str, str], size: int = 4 * 2**20) -> bytes:
    """Send the head of a request but no body, and return the status line of the answer."""
    place = urlsplit(live.url)
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {size}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection((place.hostname, place.port), timeout=LIMIT_S) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return connection.recv(65_536).split(b"\r\n")[0]


@pytest.mark.parametrize("path", INTERNAL)
def test_internal_paths_do_not_exist_without_a_fleet(live: Running, path: str) -> None:
    headers = forged(live, path=path, body=b"")
    answers = [live.nobody.post(each, headers=headers) for each in (path, "/internal/other")]
    assert answers[0].status_code == 404 and answers[0].content == answers[1].content
    assert live.nobody.get(path).status_code == 404
    assert announced(live, path, headers).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("path", INTERNAL)
@pytest.mark.parametrize(
    "changes", [{"secret": b"x" * 32}, {"audience": "other@1"}, {"timestamp_s": 1.0}, {"path": "/internal"}]
)
def test_no_body_is_read_before_the_signature_is_verified(
    member: Running, path: str, changes: dict[str, Any]
) -> None:
    headers, num_nonces = forged(member, **{"path": path, **changes}), member.service.fleet.num_nonces
    assert announced(member, path, headers).startswith(b"HTTP/1.1 401")
    assert member.service.fleet.num_nonces == num_nonces


def test_a_body_that_was_not_signed_is_401(member: Running) -> None:
    headers = {**forged(member), "content-type": "application/json"}
    assert member.nobody.post(WARM_PATH, content=b"{}", headers=headers).status_code == 401
    query = {**forged(member), "content-type": "application/json"}
    answer = member.nobody.post(f"{WARM_PATH}?x=1", content=SIGNED["body"], headers=query)
    assert answer.status_code == 401, "the signature covers the query"


@pytest.mark.parametrize("name", SIGNED_HEADERS)
def test_a_signed_header_that_occurs_twice_is_401(member: Running, name: str) -> None:
    headers = [*forged(member).items(), ("content-type", "application/json")]
    twice = [*headers, (name, dict(headers)[name])]
    assert member.nobody.post(WARM_PATH, content=SIGNED["body"], headers=twice).status_code == 401


def test_few_internal_requests_are_read_at_once() -> None:
    async def occupy() -> str:
        fleet = Fleet(cast("Any", None), SECRET)
        async with AsyncExitStack() as stack:
            for _ in range(MAX_AT_ONCE):
                await stack.enter_async_context(fleet.admitted(WARM_PATH, 1.0))
            async with fleet.admitted(PURGE_PATH, 0.0):  # purges have their own limit
                pass
            with pytest.raises(ApiError) as refused:
                await stack.enter_async_context(fleet.admitted(WARM_PATH, 0.0))
        async with fleet.admitted(WARM_PATH, 1.0):
            return str(refused.value.body["type"])

    assert asyncio.run(occupy()) == "busy"


@pytest.mark.slow
def test_a_complete_purge_has_ended_the_pins_of_the_fleet(join: Join) -> None:
    one, two = join("one"), join("two")
    eventually(lambda: reachable(one, "one", "two") and reachable(two, "one", "two"))
    for each in (one, two):
        assert each.operator.put("/v1/tenants/acme", json={"max_pinned_blocks": 64}).status_code == 200
    body = {"token_ids": IDS[:256], "ttl_s": 600, "replicas": "all"}
    pinned = post(one, "/v1/pins", body).json()
    assert [each["state"] for each in pinned["replicas"]] == ["done", "done"]
    purge = "/v1/tenants/acme/purge"
    assert answered(lambda: one.operator.post(purge)).status_code == 200
    eventually(lambda: answered(lambda: one.operator.get(purge)).json()["complete"], "no replica is pending")
    for each in (one, two):
        assert each.acme.get("/v1/pins").json() == {"pins": []}
    again = post(two, "/v1/pins", body).json()
    assert again["id"] != pinned["id"] and [each["state"] for each in again["replicas"]] == ["done", "done"]
    assert matched(one) == matched(two) == 256


@pytest.mark.slow
def test_a_purge_that_reuses_a_lost_number_still_ends_pins(join: Join) -> None:
    """Redis loses the purge that preceded the pins, and then assigns its number to another purge."""
    one, two = join("one"), join("two")
    eventually(lambda: reachable(one, "one", "two") and reachable(two, "one", "two"))
    for each in (one, two):
        assert each.operator.put("/v1/tenants/acme", json={"max_pinned_blocks": 64}).status_code == 200
    purge = "/v1/tenants/acme/purge"
    assert answered(lambda: one.operator.post(purge)).json()["generation"] == 1
    eventually(lambda: answered(lambda: one.operator.get(purge)).json()["complete"], "no replica is pending")
    pinned = post(one, "/v1/pins", {"token_ids": IDS[:256], "ttl_s": 600, "replicas": "all"}).json()
    assert [each["state"] for each in pinned["replicas"]] == ["done", "done"]
    coordinator = one.service.fleet.coordinator
    signed.raise_generation(coordinator.store, coordinator.keys, coordinator.keys.tenant("acme"))
    for each in (one, two):
        eventually(lambda each=each: each.acme.get("/v1/pins").json() == {"pins": []}, "the pins have ended")
        eventually(
            lambda each=each: each.service.cache.tenant_stats("acme").pinned_blocks == 0,
            "the blocks are unpinned",
        )
    assert coordinator.purges.generation("acme") == 1


def quota(replica: Process | Running, tenant: str = "acme") -> tuple[int | None, int | None]:
    """A tenant's limit over the fleet and this replica's share, as this replica reports them."""
    with client(replica.url, "demo-operator") as operator:
        rows = {each["tenant"]: each for each in operator.get("/v1/tenants").json()["tenants"]}
    return rows[tenant]["settings"]["fleet_blocks"], rows[tenant]["granted_blocks"]


def put(replica: Process | Running, tenant: str = "acme", **settings: Any) -> httpx.Response:
    with client(replica.url, "demo-operator") as operator:
        answer = operator.put(f"/v1/tenants/{tenant}", json=settings)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.slow
def test_a_quota_set_on_one_replica_binds_all(start: Start, redis_server: RedisServer) -> None:
    """The replicas share no keys file. Each has its own demo keys, which define no quota."""
    one, two = start("one"), start("two")
    eventually(lambda: reachable(one, "one", "two") and reachable(two, "one", "two"))
    assert put(one, fleet_blocks=100).json()["settings"]["fleet_blocks"] == 100
    eventually(lambda: quota(one) == quota(two) == (100, 50))
    long = {"token_ids": list(range(5, 5 + 16 * 60))}
    with client(two.url, "demo-acme") as acme:
        refused = acme.post("/v1/warm", json=long)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "quota_exceeded")
    assert refused.json()["error"]["allowed"] == "at most 50 blocks"

    two.kill()
    two = start("two")
    eventually(lambda: quota(one) == quota(two) == (100, 50), "a restarted replica learns the quota")
    one.kill()
    one = start("one")
    eventually(lambda: quota(one) == quota(two) == (100, 50), "so does the replica where it was set")

    redis_server.restart()
    eventually(lambda: reachable(one, "one", "two") and reachable(two, "one", "two"))
    three = start("three")
    eventually(
        lambda: quota(three) == (100, 33), "Redis restarted empty, and the replicas wrote the quota again"
    )

    put(two, fleet_blocks=60)
    eventually(lambda: [quota(each) for each in (one, two, three)] == [(60, 20)] * 3)
    put(three, weight=2.0)  # a PUT replaces all settings: no quota
    eventually(lambda: [quota(each) for each in (one, two, three)] == [(None, None)] * 3)
    put(two, fleet_blocks=60)
    eventually(lambda: [quota(each) for each in (one, two, three)] == [(60, 20)] * 3, "set once more")


@pytest.mark.slow
def test_a_tenant_that_was_removed_leaves_no_quota_behind() -> None:
    with service_in_thread() as live:
        put(live, "brief", fleet_blocks=90)
        eventually(lambda: quota(live, "brief") == (90, 90))
        assert live.service.fleet.coordinator.limits() == {"brief": 90}
        assert live.operator.delete("/v1/tenants/brief").status_code == 204
        eventually(lambda: live.service.fleet.coordinator.limits() == {})
        put(live, "brief")
        assert quota(live, "brief") == (None, None)
        eventually(lambda: not live.service.quotas._said)
        assert quota(live, "brief") == (None, None)


@pytest.mark.slow
def test_a_forged_generation_cannot_falsify_a_purge(
    join: Join, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The first purge is refused and logs the tenant's digest, but it reaches all replicas.

    A second request then succeeds.
    """
    one, two = join("one"), join("two")
    eventually(lambda: reachable(one, "one", "two") and reachable(two, "one", "two"))
    purge, digest = "/v1/tenants/acme/purge", one.service.fleet.coordinator.keys.tenant("acme").hex()
    for value in ("9999999999999999", "999999999999999", "-1"):
        for each in (one, two):
            assert each.acme.post("/v1/warm", json={"token_ids": IDS}).json()["tokens"] == len(IDS)
        caplog.clear()
        redis_server.command(f"HSET rk1:{{t:{digest}}}:q generation {value}")
        refused = one.operator.post(purge)
        # unless a replica that knows the generation corrected it first, with a beat
        if refused.status_code == 503:
            assert refused.json()["error"]["type"] == "store_unavailable" and digest in caplog.text
            assert matched(one) == matched(two) == 0, "the replicas were told directly"
            refused = one.operator.post(purge)
        assert refused.status_code == 200
        assert matched(one) == matched(two) == 0
        eventually(lambda: one.operator.get(purge).json()["complete"])
        assert one.operator.get(purge).json()["confirmed"] == ["one", "two"]
    assert one.operator.get(purge).json()["generation"] >= 3


class Listener:
    """A stranger at a replica's former address. It sends a fixed answer and records everything that it receives."""

    def __init__(self, port: int, answer: bytes) -> None:
        self.received, self.is_over = b"", threading.Event()
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", port))
        self._socket.settimeout(0.1)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self.is_over.is_set():
            with suppress(OSError):
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(LIMIT_S)
                    while part := connection.recv(65_536):
                        self.received += part
                        if b"\r\n\r\n" in part:
                            connection.sendall(self._answer)

    def close(self) -> None:
        self.is_over.set()
        ended(self._thread)
        self._socket.close()


@pytest.mark.slow
@pytest.mark.parametrize("body", [b"{}", b'{"proof": "%s"}' % (b"0" * 64), b"x" * 10**6], ids=len)
def test_a_dead_replicas_address_gets_no_prompt_and_no_tenants_name(
    join: Join, redis_server: RedisServer, body: bytes
) -> None:
    """Redis again holds the dead replica's registration, and a stranger listens at its address."""
    one = join("one")
    with ExitStack() as life:
        secret = one.service.fleet.secret
        path = Path(redis_server.folder) / "secret of the dead"
        path.write_bytes(secret)
        fleet = {"redis": redis_server.url, "replica": "two", "fleet-secret": str(path)}
        two = life.enter_context(service_in_thread(**{"num-blocks": "256", **fleet}))
        eventually(lambda: reachable(one, "one", "two"))
        assert post(one, "/v1/warm", {"token_ids": IDS, "replicas": "all"}).json()["replicas"][1]["tokens"]
        port = httpx.URL(two.url).port
        client = redis.Redis.from_url(redis_server.url)
        fields = client.hgetall("rk1:{r:two}:meta")
    one.service.fleet._proven.clear()  # as if the last proof had expired
    assert port is not None
    status = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
    status += b"content-length: %d\r\n\r\n" % len(body)
    with closing(Listener(port, status + body)) as listener:
        client.hset("rk1:{r:two}:meta", mapping=fields)
        client.set("rk1:{r:two}:lease", fields[b"nonce"], px=3_600_000)
        client.zadd("rk1:replicas", {"two": int(time.time() * 1000) + 3_600_000})
        eventually(lambda: reachable(one, "one", "two"), "its last report is not outdated yet")
        warmed = post(one, "/v1/warm", {"token_ids": IDS, "replicas": "all", "salt": "a salt"}).json()
        outcomes = {each["replica"]: each["error"] for each in warmed["replicas"]}
        assert outcomes["one"] is None and outcomes["two"] in ("unproven", "unreachable")
        one.operator.post("/v1/tenants/acme/purge")
    assert b"POST /internal/prove" in listener.received
    for private in (b"/internal/warm", b"/internal/purge", b"acme", b"acme".hex().encode(), b"a salt", b"[5"):
        assert private not in listener.received
    client.close()


def test_a_proof_is_valid_for_one_replica_and_one_challenge(member: Running) -> None:
    own = member.service.fleet
    info, challenge = own.coordinator.info(), "ab" * 32
    body = json.dumps({"challenge": challenge}).encode()
    headers = forged(member, path=PROVE_PATH, tenant="", body=body) | {"content-type": "application/json"}
    proof = member.nobody.post(PROVE_PATH, content=body, headers=headers).json()["proof"]
    proofs = own.coordinator.proofs
    assert proofs.is_answer(proof, challenge, info.audience, info.address or "")
    assert not proofs.is_answer(proof, "cd" * 32, info.audience, info.address or "")
    assert not proofs.is_answer(proof, challenge, info.audience, "http://another")
    assert not proofs.is_answer(proof, challenge, "member@1.nonce", info.address or "")
    assert member.nobody.post(PROVE_PATH, content=body).status_code == 401
