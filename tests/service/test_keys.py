"""Keys while the service runs: the operator alone creates, lists, rotates and revokes them.

They are stored as digests.
"""

from __future__ import annotations

import hashlib
import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from radixkv import CacheConfig, PrefixCache, Tenant, audit
from radixkv.coordination import connect
from radixkv.errors import ArgumentError, ConfigError, NamespaceError
from radixkv.service.auth import Keyring, KeysFile, Principal
from radixkv.service.key_store import LOOK_EVERY_S, MAX_KEYS, KeyStore, Refused, UnknownKey
from radixkv.service.schemas.tenants import TenantSettings
from radixkv.service.tenant_sync import TenantSync
from tests.service.running import Running, client, service_in_thread
from tests.service.test_refusals import refusal
from tests.waiting import LIMIT_S, ended, eventually

BOSS, ACME = "the-operator-of-all-this", "the-first-key-of-acme"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"operator": BOSS, "tenants": {"acme": ACME}}))
    return path


@pytest.fixture
def service(keys_file: Path) -> Iterator[Running]:
    with service_in_thread(keys=str(keys_file), **{"num-blocks": "64"}) as running:
        running.operator = client(running.url, BOSS)
        yield running
        running.operator.close()


def works(service: Running, key: str) -> bool:
    with client(service.url, key) as http:
        answer = http.get("/v1/stats")
    assert answer.status_code in (200, 401)
    return answer.status_code == 200


def make(service: Running, tenant: str = "acme") -> dict[str, Any]:
    answer = service.operator.post(f"/v1/tenants/{quote(tenant, safe='')}/keys")
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_a_key_can_be_created_rotated_and_revoked_without_a_restart(
    service: Running, keys_file: Path
) -> None:
    made = make(service)
    assert works(service, made["key"]) and works(service, ACME)
    rotated = service.operator.post(f"/v1/keys/{made['id']}/rotate").json()
    assert works(service, rotated["key"]) and not works(service, made["key"])
    assert service.operator.post(f"/v1/keys/{made['id']}/rotate").status_code == 404
    assert service.operator.delete(f"/v1/keys/{rotated['id']}").status_code == 204
    assert not works(service, rotated["key"]) and works(service, ACME)
    assert service.operator.delete(f"/v1/keys/{rotated['id']}").status_code == 404
    assert len(Keyring.load(keys_file).keys) == 2


def test_the_list_has_prefixes_and_neither_keys_nor_digests(service: Running) -> None:
    made = make(service)
    answer = service.operator.get("/v1/keys")
    listed = {each["id"]: each for each in answer.json()["keys"]}
    assert len(listed) == 3 and listed[made["id"]]["tenant"] == "acme" and listed[made["id"]]["created"]
    assert made["key"].startswith(made["prefix"]) and len(made["prefix"]) == 8 and len(made["key"]) > 40
    prefixes = [each["prefix"] for each in listed.values()]
    assert len(set(prefixes)) == 3, "the prefixes differ"
    for key in (made["key"], BOSS, ACME):
        assert key[len(key) // 4 + 1 :] not in answer.text
        assert hashlib.sha256(key.encode()).hexdigest()[:16] not in answer.text


def test_the_keys_file_holds_digests_and_only_its_owner_can_read_it(
    service: Running, keys_file: Path
) -> None:
    keys_file.chmod(0o644)
    made = make(service)
    text = keys_file.read_text()
    assert made["key"] not in text and ACME not in text and BOSS not in text
    assert hashlib.sha256(made["key"].encode()).hexdigest() in text
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600
    lock = keys_file.with_name(".keys.json.lock")
    assert {*keys_file.parent.iterdir()} == {keys_file, lock}, "no other file is left"
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600 and not lock.stat().st_size


def test_changes_survive_a_restart(service: Running, keys_file: Path) -> None:
    made = make(service, "initech east")
    assert service.operator.put("/v1/tenants/initech%20east", json={"requests_per_s": 5}).status_code == 200
    with service_in_thread(keys=str(keys_file), **{"num-blocks": "64"}) as again:
        assert works(again, made["key"]) and works(again, ACME)
        assert again.service.keyring.settings["initech east"].requests_per_s == 5


def test_a_tenant_is_created_and_deleted(service: Running, text: str) -> None:
    made = make(service, "globex")
    with client(service.url, made["key"]) as globex:
        assert globex.get("/v1/stats").json()["tenant"] == "globex"
        assert globex.post("/v1/warm", json={"prompt": text}).json()["tokens"] > 0
        assert 'tenant="globex"' in service.operator.get("/metrics").text
        assert service.operator.delete("/v1/tenants/globex").status_code == 204
        assert globex.get("/v1/stats").status_code == 401
    assert [each["tenant"] for each in service.operator.get("/v1/tenants").json()["tenants"]] == ["acme"]
    assert service.service.cache.tenant_stats("globex").resident_blocks == 0
    assert service.operator.delete("/v1/tenants/globex").status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/keys"),
        ("POST", "/v1/keys"),
        ("POST", "/v1/keys/x/rotate"),
        ("DELETE", "/v1/keys/x"),
        ("GET", "/v1/tenants"),
        ("PUT", "/v1/tenants/acme"),
        ("DELETE", "/v1/tenants/acme"),
        ("POST", "/v1/tenants/acme/keys"),
        ("POST", "/v1/tenants/acme/purge"),
    ],
)
def test_only_the_operator_manages_keys(live: Running, method: str, path: str) -> None:
    assert live.acme.request(method, path).status_code == 403
    assert live.nobody.request(method, path).status_code == 401
    assert live.operator.request(method, path, params={"tenant": "acme"}).status_code == 422


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tenant": "acme"}, "tenant"),
        ({"tenant": None}, "tenant"),
        ({"burst": 0}, "burst"),
        ({"requests_per_s": 0}, "requests_per_s"),
        ({"requests_per_s": "5"}, "requests_per_s"),
        ({"max_body_bytes": 1.5}, "max_body_bytes"),
        ({"weight": 0}, "weight"),
        ({"mode": "loose"}, "mode"),
        ({"mode": "strict"}, "guaranteed_blocks"),
        ({"guaranteed_blocks": 1025}, "guaranteed_blocks"),
        ({"guaranteed_blocks": 5, "max_blocks": 4}, "max_blocks"),
        ({"fleet_blocks": 0}, "fleet_blocks"),
        ({"guaranteed_blocks": 5, "fleet_blocks": 4}, "fleet_blocks"),
        ({"on_unconfirmed_generation": "hope"}, "on_unconfirmed_generation"),
    ],
)
def test_invalid_settings_are_named(live: Running, body: dict[str, Any], field: str) -> None:
    answer = live.operator.put("/v1/tenants/acme", json=body)
    assert answer.status_code == 422 and refusal(answer)["field"] == field


@pytest.mark.parametrize("name", ["", "x" * 257, "a%07b", "%0Aa", "a%0A"])
def test_an_invalid_tenant_name_is_422(live: Running, name: str) -> None:
    for answer in (
        live.operator.put(f"/v1/tenants/{name}", json={}),
        live.operator.post(f"/v1/tenants/{name}/keys"),
    ):
        assert answer.status_code == 422 and refusal(answer)["field"] == "tenant"


def test_the_operator_is_not_locked_out(service: Running) -> None:
    (own,) = [each for each in service.operator.get("/v1/keys").json()["keys"] if each["tenant"] is None]
    assert refusal(service.operator.delete(f"/v1/keys/{own['id']}"))["type"] == "conflict"
    further = service.operator.post("/v1/keys").json()
    assert service.operator.delete(f"/v1/keys/{own['id']}").status_code == 204
    assert not works(service, BOSS) and works(service, further["key"])


def test_the_number_of_keys_of_a_tenant_is_limited(service: Running) -> None:
    statuses = [service.operator.post("/v1/tenants/acme/keys").status_code for _ in range(MAX_KEYS)]
    assert statuses == [201] * (MAX_KEYS - 1) + [409]


def test_a_file_that_cannot_be_written_changes_nothing(service: Running, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("radixkv.signing.os.fsync", full)
        answer = service.operator.post("/v1/tenants/acme/keys")
    assert answer.status_code == 503 and "No space left" in answer.json()["error"]["message"]
    assert len(service.service.keyring.keys) == 2
    make(service)


def test_an_edited_keys_file_takes_effect(keys_file: Path) -> None:
    now = [0.0]
    store = KeyStore(Keyring.load(keys_file), keys_file, clock=lambda: now[0])
    keys_file.write_text(json.dumps({"operator": BOSS, "tenants": {"globex": "the-key-of-globex"}}))
    assert store.ring.tenants == ("acme",)
    now[0] += LOOK_EVERY_S
    assert store.ring.tenants == ("globex",)
    keys_file.write_text('{"tenants": {"globex": ')
    now[0] += LOOK_EVERY_S
    assert store.ring.tenants == ("globex",), "an unreadable file is ignored"
    keys_file.unlink()
    now[0] += LOOK_EVERY_S
    assert store.ring.tenants == ("globex",)


def test_a_thread_follows_the_keys_file_and_outlives_errors(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.service.key_store.LOOK_EVERY_S", 0.01)
    store = KeyStore.open(keys_file)
    threads, problems = set[str](), [ValueError("a bug")]

    def take(_: Keyring) -> Refused:
        threads.add(threading.current_thread().name)
        if problems:
            raise problems.pop()
        return {}

    store.on_change = take
    store.follow(), store.follow()
    try:
        for tenant in ("globex", "initech"):
            keys_file.write_text(json.dumps({"operator": BOSS, "tenants": {tenant: f"the-key-of-{tenant}"}}))
            eventually(lambda: not problems)
        eventually(lambda: store.ring.tenants == ("initech",))
        assert threads == {"radixkv-keys"}
    finally:
        store.close()
    keys_file.write_text(json.dumps({"operator": BOSS, "tenants": {}}))
    assert store.ring.tenants == ("initech",), "it ended"


def test_stores_that_share_a_file_lose_nothing(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.service.key_store.LOCK_WAIT_S", LIMIT_S)
    stores = [KeyStore.open(keys_file) for _ in range(4)]

    def change(store: KeyStore, number: int) -> None:
        for index in range(5):
            store.put_tenant(f"t-{number}-{index}", TenantSettings(burst=number + 1))
            store.create(Principal(f"t-{number}-{index}"))

    threads = [threading.Thread(target=change, args=(s, n)) for n, s in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        ended(thread)
    ring = Keyring.load(keys_file)
    assert len(ring.tenants) == 21 and len(ring.keys) == 22


def test_a_change_that_is_refused_is_not_written(keys_file: Path) -> None:
    store, before = KeyStore.open(keys_file), keys_file.read_text()

    store.on_change = lambda ring: {name: ConfigError("tenants", name, "less") for name in ring.tenants}
    with pytest.raises(ConfigError):
        store.create(Principal("globex"))
    with pytest.raises(ConfigError):
        store.put_tenant("acme", TenantSettings(burst=2))
    with pytest.raises(UnknownKey):
        store.rotate("none")
    assert keys_file.read_text() == before and len(store.ring.keys) == 2


def test_a_symbolic_link_to_the_keys_file_stays_a_link(keys_file: Path) -> None:
    link = keys_file.with_name("link.json")
    link.symlink_to(keys_file)
    text, _ = KeyStore.open(link).create(Principal("acme"))
    assert link.is_symlink() and Keyring.load(keys_file).authenticate(f"Bearer {text}") == Principal("acme")


def test_changes_of_demo_keys_last_as_long_as_the_process() -> None:
    store = KeyStore.open(None)
    text, key = store.create(Principal("acme"))
    assert store.ring.authenticate(f"Bearer {text}") == Principal("acme")
    store.revoke(key.id)
    assert store.ring.authenticate(f"Bearer {text}") is None
    assert KeyStore.open(None).ring.keys == store.ring.keys


def test_settings_of_a_file_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"tenants": {"acme": {"keys": [ACME, "sha256:" + "0" * 64], "burst": 3}}}))
    ring = Keyring.load(path)
    assert len(ring.keys) == 2 and ring.settings["acme"] == TenantSettings(burst=3)
    assert Keyring.from_document(KeysFile.of(ring).document(), "again").keys == ring.keys
    for entry, place in (
        ({"keys": [ACME], "burst": "3"}, "tenants.acme.burst"),
        ({"keys": [ACME], "weigth": 3}, "tenants.acme.weigth"),
        ({"keys": ACME}, "tenants.acme.keys"),
        ({"keys": [{"sha256": ACME}]}, "tenants.acme.keys[0]"),
        ({"keys": [{"sha256": "0" * 64, "key": ACME}]}, "tenants.acme.keys[0]"),
    ):
        with pytest.raises(ConfigError) as caught:
            Keyring.from_document({"tenants": {"acme": entry}}, "keys.json")
        assert place in str(caught.value) and ACME not in str(caught.value)


def test_an_unknown_key_and_a_revoked_one_answer_the_same(service: Running) -> None:
    made = make(service)
    service.operator.delete(f"/v1/keys/{made['id']}")
    answers: list[httpx.Response] = []
    for key in (made["key"], "never-was"):
        with client(service.url, key) as http:
            answers.append(http.get("/v1/stats"))
    assert answers[0].content == answers[1].content and answers[0].status_code == 401


def test_keys_become_tenants_of_the_cache(service: Running, keys_file: Path) -> None:
    settings = {"mode": "strict", "guaranteed_blocks": 8, "weight": 2}
    answer = service.operator.put("/v1/tenants/acme", json=settings)
    assert answer.status_code == 200 and answer.json()["settings"].items() >= settings.items()
    cache = service.service.cache
    assert cache.tenant("acme") == Tenant("acme", 2.0, 8, None, "strict")
    over = service.operator.put("/v1/tenants/globex", json={"guaranteed_blocks": 57})
    assert over.status_code == 422 and refusal(over)["field"] == "guaranteed_blocks"
    assert cache.tenant("globex") is None and "globex" not in keys_file.read_text()
    assert service.operator.put("/v1/tenants/globex", json={"guaranteed_blocks": 56}).status_code == 200
    with client(service.url, ACME) as acme:
        refused = acme.post("/v1/warm", json={"token_ids": [5] * 16 * 9})
        assert refused.status_code == 400 and "retry-after" not in refused.headers, "it can never fit"
        error = refused.json()["error"]
        assert error["type"] == "quota_exceeded" and error["allowed"] == "at most 8 blocks"
        assert acme.post("/v1/warm", json={"token_ids": [5] * 16 * 8}).json()["blocks"] == 8
    assert service.operator.delete("/v1/tenants/globex").status_code == 204
    assert service.operator.put("/v1/tenants/initech", json={"guaranteed_blocks": 56}).status_code == 200


@pytest.mark.slow
def test_a_strict_tenant_needs_a_service_that_scrubs() -> None:
    with service_in_thread(scrub="never") as running:
        answer = running.operator.put("/v1/tenants/acme", json={"mode": "strict", "guaranteed_blocks": 8})
        assert answer.status_code == 409 and refusal(answer)["field"] == "mode"
        assert running.operator.put("/v1/tenants/acme", json={"guaranteed_blocks": 8}).status_code == 200


def test_the_cache_knows_only_the_tenants_of_the_keys(service: Running) -> None:
    with pytest.raises(NamespaceError, match="not known"):
        service.service.cache.open(service.service.namespace("nobody", "", None), [1] * 32)


def test_a_keys_file_with_impossible_guarantees_is_refused(keys_file: Path) -> None:
    document = {"operator": BOSS, "tenants": {"acme": {"keys": [ACME], "guaranteed_blocks": 65}}}
    keys_file.write_text(json.dumps(document))
    with (
        pytest.raises(ConfigError, match="guaranteed_blocks"),
        service_in_thread(keys=str(keys_file), **{"num-blocks": "64"}),
    ):
        pass


def test_guarantees_move_between_tenants_in_one_step() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=10, block_size=4, default_tenant=None))
    tenant_sync = TenantSync(
        cache, connect(None, replica_id="a", fleet_secret=b"0" * 16, fingerprint="f", block_size=4)
    )

    def ring(**guarantees: int) -> Keyring:
        return Keyring([], {name: TenantSettings(guaranteed_blocks=g) for name, g in guarantees.items()})

    tenant_sync.take(ring(a=7, b=3))
    tenant_sync.take(ring(a=2, b=8))
    tenant_sync.take(ring(c=10))
    assert cache.tenant("c") == Tenant("c", guaranteed_blocks=10)
    tenant_sync.take(ring(a=2, b=8))
    refused = tenant_sync.take(ring(a=1, b=8, c=1, d=1))
    assert [*refused] == ["d"] and isinstance(refused["d"], ArgumentError) and cache.tenant("d") is None
    assert [cache.tenant(name).guaranteed_blocks for name in "abc"] == [1, 8, 1]  # type: ignore[union-attr]
    assert not tenant_sync.take(ring(a=1, b=8, d=1)) and cache.tenant("d") == Tenant("d", guaranteed_blocks=1)
    audit.check(cache)


def test_a_purge_takes_effect_at_once_and_lists_the_replicas_that_confirmed(
    service: Running, text: str
) -> None:
    with client(service.url, ACME) as acme:
        warmed = acme.post("/v1/warm", json={"prompt": text}).json()
        purged = service.operator.post("/v1/tenants/acme/purge").json()
        assert purged["blocks"] == warmed["blocks"] and purged["generation"] >= 1
        assert purged["confirmed"] == [service.service.fleet.coordinator.replica_id] and not purged["pending"]
        assert acme.post("/v1/lookup", json={"prompt": text}).json()["matched_tokens"] == 0
        assert acme.post("/v1/warm", json={"prompt": text}).json()["cached_before"] == 0
    assert service.operator.post("/v1/tenants/nobody/purge").status_code == 404
    audit.check(service.service.cache)
