"""Routing over HTTP: by a replica, by a separate router, and by a gateway in front of real replicas."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest

from radixkv import Namespace
from radixkv.coordination import connect
from radixkv.coordination.routing.costs import COSTS, CostName
from radixkv.errors import ConfigError
from radixkv.service.options import RouteSettings
from tests.forked import Forked
from tests.redis_server import RedisServer, free_port
from tests.service.running import LEASE_S, Running, client, model_held, sent, served, service_in_thread
from tests.waiting import LIMIT_S, eventually

SECRET = b"a secret of this test's fleet"
IDS = list(range(5, 5 + 16 * 40))
EXAMPLES = Path(__file__).parents[2] / "examples"

Join = Callable[..., Running]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    place = tmp_path / "secret"
    place.write_bytes(SECRET)
    return place


@pytest.fixture
def join(redis_server: RedisServer, secret: Path) -> Iterator[Join]:
    """Add a service in a thread to one fleet: ``join(name)``."""
    with ExitStack() as stack:

        def begin(name: str, **settings: str) -> Running:
            fleet = {"redis": redis_server.url, "replica": name, "fleet-secret": str(secret)}
            return stack.enter_context(service_in_thread(**{"num-blocks": "256", **fleet, **settings}))

        yield begin


class Started:
    """A command line in a process of its own, which the test started: ``radixkv`` or a script, and arguments."""

    def __init__(self, log: Path, *command: str) -> None:
        self.log = log
        log.touch()
        self.process = Forked(command, log)

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(LIMIT_S) in (0, -signal.SIGTERM), self.log.read_text()


@pytest.fixture
def router(redis_server: RedisServer, secret: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """``radixkv route`` in a process of its own."""
    url = f"http://127.0.0.1:{free_port()}"
    options = ["--port", url.rpartition(":")[2], "--redis", redis_server.url, "--fleet-secret", str(secret)]
    with (
        closing(Started(tmp_path / "router.log", "radixkv", "route", *options)),
        client(url, "demo-acme") as acme,
    ):
        eventually(lambda: answers(acme, "/healthz"), "the router listens")
        yield acme


def answers(someone: httpx.Client, path: str) -> bool:
    try:
        return someone.get(path).status_code == 200
    except httpx.TransportError:
        return False


def ranked(someone: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    answer = someone.post("/v1/route", json={"token_ids": IDS, "predict": False, **fields})
    return list(answer.json()["candidates"]) if answer.status_code == 200 else []


def best(someone: httpx.Client) -> str | None:
    return next((str(each["replica"]) for each in ranked(someone)), None)


def entry_of(someone: httpx.Client, name: str, key: str = "demo-operator") -> dict[str, Any]:
    """Return the entry of the replica ``name`` in the answer of the caller's replica or router."""
    with client(str(someone.base_url), key) as asking:
        rows = asking.get("/v1/replicas").json()["replicas"]
    return {each["id"]: dict(each) for each in rows}[name]


def test_a_replica_alone_routes_to_itself(live: Running, salt: str) -> None:
    name = live.acme.get("/v1/replicas").json()["replicas"][0]["id"]
    cold = live.acme.post("/v1/route", json={"token_ids": IDS, "salt": salt}).json()
    assert cold["prompt_tokens"] == len(IDS) and not cold["by_load"]
    assert [each["replica"] for each in cold["candidates"]] == [name]
    live.acme.post("/v1/warm", json={"token_ids": IDS, "salt": salt})
    (warm,) = ranked(live.acme, salt=salt)
    assert warm["matched_tokens"] == {"device": len(IDS), "host": 0, "disk": 0}
    assert warm["address"] == live.url
    assert warm["why"] == f"linear: holds {len(IDS)} of {len(IDS)} tokens, 0 more predicted"
    assert not {"load", "cost"} & set(warm), "load and cost would show other tenants' traffic"
    (other,) = ranked(live.globex, salt=salt)
    assert sum(other["matched_tokens"].values()) == 0, "another tenant's prefix stays hidden"


@pytest.mark.slow
def test_waiting_prompts_count_as_load(live: Running, salt: str) -> None:
    def queued() -> int:
        (row,) = live.operator.get("/v1/replicas").json()["replicas"]
        return int(row["load"]["queued_prefill_tokens"])

    eventually(lambda: queued() == 0)
    live.acme.post("/v1/warm", json={"token_ids": IDS[:320], "salt": salt})
    with ExitStack() as stack:
        with model_held(live.service):
            body = {"prompt": IDS, "max_tokens": 2, "salt": salt}
            stack.enter_context(sent(live, "acme", "/v1/completions", body))
            eventually(lambda: queued() == len(IDS) - 320, "tokens that are not resident are queued")
            stack.enter_context(sent(live, "globex", "/v1/completions", {**body, "stream": True}))
            eventually(lambda: queued() == 2 * len(IDS) - 320, "another tenant's prompt counts")
            stack.enter_context(sent(live, "acme", "/v1/warm", {"token_ids": IDS[::-1], "salt": salt}))
            eventually(lambda: queued() == 3 * len(IDS) - 320, "a warm counts")
            gone = sent(live, "globex", "/v1/completions", {**body, "salt": f"{salt}-gone"})
            eventually(lambda: queued() == 4 * len(IDS) - 320)
            gone.close()
            eventually(
                lambda: queued() == 3 * len(IDS) - 320, "a request whose client hung up does not count"
            )
        eventually(lambda: queued() == 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cost", "cheap"),
        ("temperature", -1),
        ("limit", 0),
        ("tenant", "globex"),
        ("predict", "yes"),
        ("model", ""),
    ],
)
def test_an_invalid_routing_request_is_422(live: Running, field: str, value: object) -> None:
    answer = live.acme.post("/v1/route", json={"token_ids": IDS, field: value})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)


def test_only_tenants_may_ask_for_routes(live: Running) -> None:
    body = {"token_ids": IDS}
    assert live.nobody.post("/v1/route", json=body).status_code == 401
    assert live.operator.post("/v1/route", json=body).status_code == 403
    unknown = live.acme.post("/v1/route", json={**body, "model": "another"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (503, "no_replica")
    assert unknown.headers["Retry-After"] == "5"


def test_a_route_accepts_the_served_name_of_a_model(live: Running) -> None:
    """A client may send the model name of a completion with a routing request."""
    told = live.acme.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["model"]
    plain, named = (
        live.acme.post("/v1/route", json={"token_ids": IDS, **body}).json() for body in ({}, {"model": told})
    )
    assert named["model"] == plain["model"] != told
    assert [each["replica"] for each in named["candidates"]] == [
        each["replica"] for each in plain["candidates"]
    ]


@pytest.mark.slow
def test_replicas_and_routers_rank_alike(join: Join, router: httpx.Client) -> None:
    unready = {"status": "not_ready", "reasons": ["replicas: none is known"], "warnings": []}
    assert router.get("/readyz").json() == {**unready, "coordination": "ok"}
    assert router.post("/v1/route", json={"token_ids": IDS}).json()["error"]["type"] == "no_replica"
    one, two = join("one"), join("two")
    two.acme.post("/v1/warm", json={"token_ids": IDS})

    def matched(someone: httpx.Client) -> dict[str, int]:
        return {each["replica"]: each["matched_tokens"]["device"] for each in ranked(someone)}

    eventually(lambda: matched(router) == {"one": 0, "two": 512}, "the router knows what two holds")
    eventually(lambda: matched(one.acme) == {"one": 0, "two": 512}, "one knows it too")
    assert matched(two.acme) == {"one": 0, "two": 640}, "two looks into its own cache"
    for someone in (router, one.acme):
        eventually(
            lambda someone=someone: best(someone) == "two", "the idle replica that holds the prefix is best"
        )
    assert [each["address"] for each in ranked(router, limit=1)] == [two.url]
    text = router.post(
        "/v1/route", json={"prompt": "Some words, and some more. " * 9, "cost": "random"}
    ).json()
    assert text["prompt_tokens"] > 9 and text["candidates"][0]["why"].startswith("random")
    for someone in (router, one.acme):
        eventually(lambda someone=someone: entry_of(someone, "two")["staleness_s"] is not None, "it reports")
        row = entry_of(someone, "two", "demo-acme")
        for other in ("load", "lag_entries", "lag_s", "last_seq"):
            assert row[other] is None, "these values would show other tenants' traffic"
        row = entry_of(someone, "two")
        assert row["load"]["resident_blocks"] >= 0 and row["last_seq"] > 0
        assert row["lag_entries"] is not None and row["lag_s"] is not None
    with client(str(router.base_url), "demo-operator") as operator:
        metrics = operator.get("/metrics").text
    assert "radixkv_router_replicas 2.0" in metrics and "radixkv_router_view_segments 2.0" in metrics
    assert router.get("/readyz").status_code == 200
    document = router.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/route",
        "/v1/replicas",
        "/metrics",
        "/health",
        "/healthz",
        "/readyz",
        "/openapi.json",
    }
    assert [each["name"] for each in document["tags"]] == ["Fleet", "Process"]
    assert router.get("/docs").status_code == router.get("/docs/errors").status_code == 200
    assert router.get("/docs/assets/swagger-ui.css").status_code == 200


@pytest.mark.slow
def test_a_lost_store_makes_a_router_route_by_load(
    join: Join, router: httpx.Client, redis_server: RedisServer
) -> None:
    one = join("one", **{"lease-s": "3"})  # the router waits for its end
    one.acme.post("/v1/warm", json={"token_ids": IDS})
    eventually(lambda: ranked(router) and ranked(router)[0]["matched_tokens"]["device"] == 512)
    redis_server.kill()

    def blind() -> bool:
        answer = router.post("/v1/route", json={"token_ids": IDS, "predict": False})
        return answer.status_code == 200 and bool(answer.json()["by_load"])

    eventually(blind, "the replicas known last are ranked by load")
    assert [(each["replica"], each["matched_tokens"]["device"]) for each in ranked(router)] == [("one", 0)]
    redis_server.restart()

    def healed() -> bool:
        found = ranked(router)
        return bool(found) and found[0]["matched_tokens"]["device"] == 512

    eventually(healed, "the router reconnects")


@pytest.mark.slow
def test_a_gateway_follows_the_router_and_falls_back(
    join: Join, router: httpx.Client, redis_server: RedisServer, secret: Path, tmp_path: Path
) -> None:
    join("one")
    url = f"http://127.0.0.1:{free_port()}"
    command = [str(EXAMPLES / "gateway.py"), str(router.base_url).rstrip("/"), url.rpartition(":")[2]]
    fleet = ["--redis", redis_server.url, "--fleet-secret", str(secret)]
    with (
        served(
            tmp_path / "two.log",
            "--port",
            "0",
            "--replica",
            "two",
            "--num-blocks",
            "256",
            *fleet,
        ) as two,
        closing(Started(tmp_path / "gateway.log", *command)),
        client(two.url, "demo-acme") as direct,
        client(url, "demo-acme") as acme,
    ):
        direct.post("/v1/warm", json={"token_ids": IDS})
        done = {
            "queued_prefill_tokens": 0,
            "decode_blocks": 0,
            "resident_blocks": len(IDS) // 16,
            "queued_cold_tokens": 0,
        }
        eventually(lambda: best(router) == "two" and entry_of(router, "two")["load"] == done)
        eventually(lambda: reaches(acme), "the gateway listens")
        body = {"prompt": IDS, "max_tokens": 3, "temperature": 0}
        answer = acme.post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.headers["x-radixkv-replica"] == "two"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        events = acme.post("/v1/completions", json={**body, "stream": True})
        assert events.text.rstrip().endswith("data: [DONE]") and events.headers["x-radixkv-replica"] == "two"
        assert acme.post("/v1/completions", json={"prompt": IDS, "n": 0}).status_code == 400
        two.kill()
        again = acme.post("/v1/completions", json=body)
        assert again.status_code == 200 and again.headers["x-radixkv-replica"] == "one", (
            "two is dead, but leased"
        )
        assert again.json()["choices"] == answer.json()["choices"]


@pytest.mark.slow
def test_a_gateway_avoids_a_hung_replica_and_ends_abandoned_requests(
    join: Join, router: httpx.Client, redis_server: RedisServer, tmp_path: Path
) -> None:
    one = join("one")
    (row,) = one.acme.get("/v1/replicas").json()["replicas"]
    url = f"http://127.0.0.1:{free_port()}"
    command = [str(EXAMPLES / "gateway.py"), str(router.base_url).rstrip("/"), url.rpartition(":")[2]]
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        closing(Started(tmp_path / "gateway.log", *command)),
        client(url, "demo-acme") as acme,
        client(url, "no key") as stranger,
    ):
        eventually(lambda: reaches(acme), "the gateway listens")

        def reached(someone: httpx.Client) -> httpx.Response | None:
            """An answer, or None if all replicas stalled for so long that the gateway treated them as hung."""
            answer = someone.post("/v1/completions?x=y", json={"prompt": IDS, "max_tokens": 3})
            return None if answer.status_code == 503 else answer

        refused = eventually(lambda: reached(stranger), "the router's answer")
        assert refused.status_code == 401 and refused.headers["www-authenticate"], (
            "the gateway passes on the router's answer"
        )
        hung = connect(
            redis_server.url, replica_id="hung", fleet_secret=SECRET, fingerprint=row["model"], block_size=16,
            address=f"http://127.0.0.1:{mute.getsockname()[1]}", lease_s=float(LEASE_S),
        )  # fmt: skip
        with closing(hung):
            hung.register()
            assert hung.journal is not None
            ids = np.array(IDS, np.uint32)
            hung.journal.stored(Namespace("acme", row["model"]), ids.tobytes(), 0, len(ids))
            eventually(lambda: best(router) == "hung")
            answer = eventually(lambda: reached(acme), "the other replica's answer")
            assert answer.status_code == 200 and answer.headers["x-radixkv-replica"] == "one"
            assert len(answer.headers.get_list("date")) == 1
        with model_held(one.service):
            with sent(Running(one.service, url), "acme", "/v1/completions", {"prompt": IDS[::-1]}):
                eventually(lambda: one.service.engine_loop.num_prefill_tokens, "it waits for the model")
            eventually(
                lambda: not one.service.engine_loop.num_prefill_tokens, "the request ends on its replica"
            )


def reaches(someone: httpx.Client) -> bool:
    try:
        return someone.post("/v1/completions", json={}).status_code in (422, 503)  # the router refuses it
    except httpx.TransportError:
        return False


def test_settings_of_a_router(tmp_path: Path) -> None:
    good = {"redis": "redis://127.0.0.1:1", "fleet-secret": str(tmp_path / "secret")}
    (tmp_path / "secret").write_bytes(SECRET)
    parsed = RouteSettings.parse(good)
    assert (parsed.port, parsed.cost, parsed.temperature, parsed.keys) == (8500, "linear", 0.0, None)
    assert set(COSTS) == set(get_args(CostName))
    for wrong in (
        {"redis": None},
        {"fleet-secret": None},
        {"cost": "cheap"},
        {"temperature": "-1"},
        {"max-segments": "0"},
        {"host": "0.0.0.0"},
    ):
        name = "keys" if "host" in wrong else next(iter(wrong))
        with pytest.raises(ConfigError, match=f"--{name}"):
            RouteSettings.parse({**good, **wrong})


@pytest.mark.slow
def test_a_router_reports_why_its_store_does_not_answer(secret: Path, tmp_path: Path) -> None:
    """It reports the store as lost for as long as it is, even before it knows any replica."""
    url, store = f"http://127.0.0.1:{free_port()}", f"redis://someone:hidden@127.0.0.1:{free_port()}"
    options = ["--port", url.rpartition(":")[2], "--redis", store, "--fleet-secret", str(secret)]
    with (
        closing(Started(tmp_path / "router.log", "radixkv", "route", *options)) as started,
        client(url, "demo-operator") as operator,
    ):
        eventually(lambda: answers(operator, "/healthz"), "the router listens")
        for _ in range(30):
            ready = operator.get("/readyz")
            assert ready.status_code == 503 and ready.json()["reasons"] == ["store: lost"]
            assert ready.json()["coordination"] == "unavailable"
            assert "radixkv_router_store_lost 1.0" in operator.get("/metrics").text
        printed = eventually(lambda: started.log.read_text())
        assert "the store is unavailable: Redis: ConnectionError" in printed and "hidden" not in printed


@pytest.mark.slow
def test_the_router_needs_no_torch() -> None:
    code = "import radixkv.service.standalone, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=LIMIT_S)
