"""A tenant that is removed and created again under the same name is a new tenant. It has no data of the old one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import audit
from radixkv.errors import StoreUnavailable
from radixkv.service.key_store import LOOK_EVERY_S
from tests.service.running import KEYS, Running, client, model_held, service_in_thread
from tests.waiting import eventually

pytestmark = pytest.mark.slow

PROMPT = {"token_ids": [*range(100, 164)]}
SETTINGS = {"guaranteed_blocks": 8, "max_pinned_blocks": 8}
NEVER = "0" * 32


def document(*tenants: str) -> str:
    return json.dumps(
        {
            "operator": KEYS["operator"],
            "tenants": {name: {"keys": [KEYS[name]], **SETTINGS} for name in tenants},
        }
    )


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(document("acme", "globex"))
    path.chmod(0o600)
    return path


@pytest.fixture
def live(keys: Path) -> Iterator[Running]:
    with service_in_thread(keys=str(keys), **{"num-blocks": "64"}) as running:
        yield running
        audit.check(running.service.cache)


def over_http(live: Running, keys: Path) -> None:
    """Remove the tenant and create it again with the operator's key. It gets a new key."""
    assert live.operator.delete("/v1/tenants/acme").status_code == 204
    assert live.operator.put("/v1/tenants/acme", json=SETTINGS).status_code == 200
    key = live.operator.post("/v1/tenants/acme/keys").json()["key"]
    live.acme.close()
    live.acme = client(live.url, key)


def by_the_file(live: Running, keys: Path) -> None:
    """Remove the tenant and create it again with two edits of the keys file. The service must notice each edit."""
    for tenants in (("globex",), ("acme", "globex")):
        keys.write_text(document(*tenants))
        live.service.keys._look_again_at = live.service.clock()
        wanted = set(tenants)
        eventually(lambda wanted=wanted: set(live.service.keyring.tenants) == wanted)  # type: ignore[misc]
    assert LOOK_EVERY_S <= 1.0


@pytest.fixture(params=[over_http, by_the_file], ids=["over HTTP", "by the file"])
def make_again(request: pytest.FixtureRequest) -> Callable[[Running, Path], None]:
    found: Callable[[Running, Path], None] = request.param
    return found


def noticed(replica: Running) -> None:
    """Let a replica look at the keys file now."""
    replica.service.keys._look_again()


@pytest.fixture
def pair(keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, Running]]:
    """Two services that share a keys file. Each looks at it when a test says so."""
    monkeypatch.setattr("radixkv.service.key_store.LOOK_EVERY_S", 3600.0)
    settings = {"keys": str(keys), "num-blocks": "64"}
    with service_in_thread(**settings) as a, service_in_thread(**settings) as b:
        yield a, b
        for each in (a, b):
            audit.check(each.service.cache)


def test_replicas_that_share_a_file_give_a_tenant_one_incarnation(
    pair: tuple[Running, Running], keys: Path
) -> None:
    """The second replica takes what the first one wrote. An edit that leaves it out changes nothing."""
    rings = [each.service.keyring for each in pair]
    for tenant in ("acme", "globex"):
        assert rings[0].incarnation(tenant) == rings[1].incarnation(tenant) != ""
    assert rings[0].incarnation("acme") != rings[0].incarnation("globex")
    assert {*json.loads(keys.read_text())["tenants"]["acme"]["keys"]} == {KEYS["acme"]}, "as it was written"
    keys.write_text(document("acme", "globex"))
    for each in pair:
        noticed(each)
        assert each.service.keyring.incarnation("acme") == rings[0].incarnation("acme")
        assert not each.service.tenant_sync.num_removals("acme")
    assert rings[0].incarnation("acme") in keys.read_text(), "it is in the file again"
    shown = [pair[0].operator.get(path).text for path in ("/v1/tenants", "/v1/keys")]
    assert rings[0].incarnation("acme") not in "".join([*shown, pair[0].acme.get("/v1/stats").text])


def test_a_tenant_made_again_on_one_replica_is_a_new_one_on_the_other(
    pair: tuple[Running, Running], keys: Path
) -> None:
    """The other replica looks at the file only after both changes."""
    a, b = pair
    fresh = {**b.globex.get("/v1/stats").json(), "tenant": "acme"}
    base = {"id": "base", **PROMPT, "readers": ["acme"]}
    assert b.operator.post("/v1/bases", json=base).status_code == 201
    assert warm(b).status_code == 200 and b.acme.get("/v1/usage").json()["rows"]
    assert b.acme.post("/v1/lookup", json=PROMPT).json()["matched_tokens"] == 64
    over_http(a, keys)
    noticed(b)
    with client(b.url, a.acme.headers["authorization"].removeprefix("Bearer ")) as acme:
        assert acme.post("/v1/lookup", json=PROMPT).json()["matched_tokens"] == 0
        assert acme.get("/v1/stats").json() == fresh and not acme.get("/v1/usage").json()["rows"]
    assert b.acme.get("/v1/stats").status_code == 401
    assert a.service.keyring.incarnation("acme") == b.service.keyring.incarnation("acme")
    assert b.service.tenant_sync.num_removals("acme") == 1


def warm(live: Running, key: str | None = None, **fields: Any) -> Any:
    headers = {"Idempotency-Key": key} if key else {}
    return live.acme.post("/v1/warm", json={**PROMPT, **fields}, headers=headers)


def purged(live: Running) -> None:
    """Wait until maintenance has finished the purge."""
    eventually(lambda: not live.service.tenant_sync.unpurged)


def test_a_new_tenant_has_no_job_and_no_idempotency_key_of_the_old_one(
    live: Running, keys: Path, make_again: Callable[[Running, Path], None]
) -> None:
    done = warm(live, "once", wait=False).json()["job"]
    eventually(lambda: live.acme.get(f"/v1/warm/{done}").json()["state"] == "done")
    with model_held(live.service, "globex"):
        running = warm(live, wait=False, salt="s").json()["job"]
        (job,) = [job for job in live.service.warm_jobs.table._tenants["acme"].values() if job.id == running]
        make_again(live, keys)
        purged(live)
        eventually(lambda: not job.tasks, "the running job is cancelled")
        assert job.share is not None and not job.share.warming.num_shares
    never = live.acme.get(f"/v1/warm/{NEVER}")
    for each in (done, running):
        answer = live.acme.get(f"/v1/warm/{each}")
        assert answer.status_code == 404 and answer.content == never.content
    assert live.service.warm_jobs.table.num_kept == 0
    again = warm(live, "once", wait=False)
    assert again.status_code == 202 and again.json()["job"] != done
    other = live.acme.post("/v1/warm", json={**PROMPT, "salt": "other"}, headers={"Idempotency-Key": "twice"})
    assert other.status_code == 200


def test_a_new_tenant_has_no_pin_no_count_and_no_block_of_the_old_one(
    live: Running, keys: Path, make_again: Callable[[Running, Path], None]
) -> None:
    assert warm(live).status_code == 200
    fresh = {**live.globex.get("/v1/stats").json(), "tenant": "acme"}
    for salt, replicas in (("", "self"), ("fleet", "all")):
        pin = {**PROMPT, "salt": salt, "ttl_s": 600, "replicas": replicas}
        assert live.acme.post("/v1/pins", json=pin).status_code == 201
    assert len(live.acme.get("/v1/pins").json()["pins"]) == 2
    policy = live.service.cache._tenants["acme"].policy
    make_again(live, keys)
    purged(live)
    assert live.acme.get("/v1/pins").json() == {"pins": []}
    assert live.acme.post("/v1/lookup", json=PROMPT).json()["matched_tokens"] == 0
    assert live.acme.get("/v1/stats").json() == fresh, "its requests and hits belong to the old tenant"
    assert live.service.cache._tenants["acme"].policy is not policy, (
        "what the policy learned belongs to the old tenant"
    )
    assert not live.service.fleet_pins._tenants


def test_a_new_tenant_reads_no_base_of_the_old_one(
    live: Running, keys: Path, make_again: Callable[[Running, Path], None]
) -> None:
    base = {"id": "base", **PROMPT, "readers": ["acme", "globex"]}
    assert live.operator.post("/v1/bases", json=base).status_code == 201
    assert live.acme.post("/v1/lookup", json=PROMPT).json()["matched_tokens"] == 64
    make_again(live, keys)
    purged(live)
    assert live.acme.post("/v1/lookup", json=PROMPT).json()["matched_tokens"] == 0
    assert live.globex.post("/v1/lookup", json=PROMPT).json()["matched_tokens"] == 64
    (shown,) = live.operator.get("/v1/bases").json()["bases"]
    assert shown["readers"] == ["globex"]


def test_a_purge_drops_the_jobs(live: Running) -> None:
    """A purge drops the jobs of that tenant alone. The same idempotency key then starts a new job."""
    job = warm(live, "key", wait=False).json()["job"]
    other = live.globex.post("/v1/warm", json={**PROMPT, "wait": False}).json()["job"]
    eventually(lambda: live.acme.get(f"/v1/warm/{job}").json()["state"] == "done")
    assert live.operator.post("/v1/tenants/acme/purge").status_code == 200
    assert live.acme.get(f"/v1/warm/{job}").status_code == 404
    assert live.globex.get(f"/v1/warm/{other}").status_code == 200
    assert warm(live, "key", wait=False).json()["job"] != job


def test_a_purge_cancels_running_jobs(live: Running) -> None:
    with model_held(live.service, "globex"):
        job = warm(live, wait=False, salt="running").json()["job"]
        found = live.service.warm_jobs.table._tenants["acme"][job]
        assert live.operator.post("/v1/tenants/acme/purge").status_code == 200
        assert live.acme.get(f"/v1/warm/{job}").status_code == 404
        eventually(lambda: not found.tasks)
        assert found.share is not None and not found.share.warming.num_shares


def test_a_new_tenant_waits_for_the_purge_while_the_store_is_away(
    live: Running, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet may still have records of the old tenant.

    Requests that read such records are refused until they are purged.
    """
    coordinator = live.service.fleet.coordinator

    def away(*_: object) -> Any:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(type(coordinator), "purge", away)
        by_the_file(live, keys)
        assert live.service.tenant_sync.unpurged == {"acme"}
        for answer in (
            live.acme.get("/v1/pins"),
            live.acme.get(f"/v1/warm/{NEVER}"),
            warm(live, "once", wait=False),
        ):
            assert answer.status_code == 503 and answer.json()["error"]["type"] == "store_unavailable"
        assert warm(live).status_code == 200, "a request that reads no record is served"
    purged(live)
    assert live.acme.get("/v1/pins").json() == {"pins": []}
