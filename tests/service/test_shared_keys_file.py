"""Replicas that share a keys file: what one of them can't keep or read never hides what the file takes away.

Another user of the machine can't hold its lock, and a process that holds it for too long blocks nothing but changes.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.coordination import connect
from radixkv.errors import ArgumentError, ConfigError, ControlError
from radixkv.service.auth import Keyring, Principal
from radixkv.service.key_store import FileBusy, KeyStore, Refused
from radixkv.service.schemas.tenants import TenantSettings
from radixkv.service.tenant_sync import TenantSync
from tests.service.running import KEYS, Running, client, service_in_thread
from tests.waiting import LIMIT_S, eventually

STRICT = TenantSettings(mode="strict", guaranteed_blocks=40)
LOCK = ".keys.json.lock"


def entry(who: str, **fields: Any) -> dict[str, Any]:
    return {"keys": [KEYS[who]], **fields}


def write(path: Path, **tenants: Any) -> None:
    """Replace the file as an editor does: what stands in it has no incarnations."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"operator": KEYS["operator"], "tenants": tenants}))
    new.chmod(0o600)
    new.replace(path)


def changed(path: Path, **tenants: dict[str, Any] | None) -> None:
    """Edit some entries of the file as it is; None: remove one."""
    document = json.loads(path.read_text())
    for name, fields in tenants.items():
        if fields is None:
            del document["tenants"][name]
        else:
            document["tenants"].setdefault(name, {}).update(fields)
    write(path, **document["tenants"])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    write(path, acme=entry("acme"), globex=entry("globex"))
    return path


class Replica:
    """The keys and the cache of a service, without the rest. It looks at the file when a test says so."""

    def __init__(self, path: Path, num_blocks: int) -> None:
        self.cache = PrefixCache(
            CacheConfig(num_blocks=num_blocks, block_size=4, default_tenant=None),
            scrub_blocks=lambda ids: None,
        )
        fleet = connect(None, replica_id="a", fleet_secret=b"0" * 16, fingerprint="f", block_size=4)
        self.tenant_sync = TenantSync(self.cache, fleet)
        self.store = KeyStore.open(path)
        self.store.on_change = self.tenant_sync.take
        assert not self.store.apply()

    def look(self) -> Keyring:
        self.store._look_again()
        audit.check(self.cache)
        return self.store._ring

    def serves(self, who: str) -> bool:
        ring = self.store._ring
        return ring.authenticate(f"Bearer {KEYS[who]}") == Principal(who) and who in ring.settings


@pytest.fixture
def pair(keys: Path) -> tuple[Replica, Replica]:
    return Replica(keys, 100), Replica(keys, 30)


def test_a_setting_that_a_smaller_replica_cannot_keep_hides_no_revocation(
    pair: tuple[Replica, Replica],
) -> None:
    a, b = pair
    a.store.put_tenant("acme", STRICT)
    ring = b.look()
    assert "guaranteed_blocks" in ring.pending["acme"] and not a.look().pending
    assert ring.settings["acme"] == TenantSettings() and b.serves("acme"), "it goes on with what it had"
    text, key = a.store.create(Principal("acme"))
    b.look()
    assert b.store.ring.authenticate(f"Bearer {text}") == Principal("acme")
    a.store.revoke(key.id)
    a.store.remove_tenant("globex")
    ring = b.look()
    assert ring.authenticate(f"Bearer {text}") is None and b.serves("acme") and not b.serves("globex")
    assert b.tenant_sync.unpurged == {"globex"}
    a.store.put_tenant("initech", STRICT)
    ring = b.look()
    assert {*ring.pending} == {"acme", "initech"} and "initech" not in ring.settings
    assert b.cache.tenant("initech") is None, "a new strict tenant is never served as another one"
    smaller = TenantSettings(mode="strict", guaranteed_blocks=4)
    a.store.put_tenant("initech", smaller)
    ring = b.look()
    assert {*ring.pending} == {"acme"} and ring.settings["initech"] == smaller
    a.store.remove_tenant("acme")
    assert not b.look().pending and not b.serves("acme")


def test_a_setting_that_running_requests_prevent_is_tried_again_at_each_look(keys: Path) -> None:
    a, b = Replica(keys, 64), Replica(keys, 64)
    with b.cache.open(Namespace("globex", "f"), list(range(160))):
        a.store.put_tenant("acme", STRICT)
        for _ in range(2):
            assert {*b.look().pending} == {"acme"}
        with pytest.raises(ArgumentError):
            b.store.put_tenant("acme", TenantSettings(mode="strict", guaranteed_blocks=41))
        assert {*b.look().pending} == {"acme"} and "41" not in keys.read_text(), (
            "a refused change changes nothing"
        )
    ring = b.look()
    assert not ring.pending and ring.settings["acme"] == STRICT
    assert b.cache.tenant("acme") == replace(STRICT.tenant("acme"), incarnation=ring.incarnation("acme"))


@pytest.mark.parametrize(
    "fields",
    [
        {"quota_of_a_later_version": 7},
        {"burst": "many"},
        {"mode": "strict"},
        {"policy": "not:loaded"},
        {"guaranteed_blocks": 10**6},
        {"incarnation": "0" * 17},
        {"incarnation": None},
    ],
)
def test_an_entry_that_cannot_be_applied_concerns_its_tenant_alone(
    keys: Path, fields: dict[str, Any]
) -> None:
    """Known tenants go on with what they had, even if the file loses their incarnation. A new one isn't served."""
    a = Replica(keys, 64)
    old = a.store.ring.incarnation("acme")
    write(keys, acme=entry("acme", **fields), initech=entry("globex", weight=2))
    ring = a.look()
    assert {*ring.pending} == {"acme"} and ring.settings["acme"] == TenantSettings() and a.serves("acme")
    assert ring.incarnation("acme") == old and not a.tenant_sync.num_removals("acme")
    assert ring.settings["initech"].weight == 2 and a.tenant_sync.num_removals("globex") == 1
    key = ring.authenticate(f"Bearer {KEYS['globex']}")
    assert key == Principal("initech")
    made, _ = a.store.create(Principal("acme"))
    a.store.put_tenant("initech", TenantSettings(weight=3))
    after = json.loads(keys.read_text())["tenants"]["acme"]
    assert fields.items() <= after.items(), "what can't be read stays in the file"
    changed(keys, acme={"keys": []})
    ring = a.look()
    assert ring.authenticate(f"Bearer {made}") is None and not a.serves("acme"), "its keys are revoked"
    write(keys, acme=entry("acme"), hooli=entry("globex", **fields))
    ring = a.look()
    assert {*ring.pending} == {"hooli"} and a.serves("acme") and ring.tenants == ("acme",)
    write(keys, acme=entry("acme", weight=4))
    assert not a.look().pending and a.store.ring.settings["acme"].weight == 4


def test_a_key_that_cannot_be_read_opens_nothing_and_stays_in_the_file(keys: Path) -> None:
    a, later = Replica(keys, 64), {"sha256": "0" * 64, "expires": "2030-01-01"}
    write(keys, acme=entry("acme", keys=[later, KEYS["acme"]], weight=2), globex=entry("globex", keys="none"))
    ring = a.look()
    assert {*ring.pending} == {"acme", "globex"} and ring.settings["acme"].weight == 2 and a.serves("acme")
    assert [*map(len, (ring.of(Principal("acme")), ring.of(Principal("globex"))))] == [1, 0]
    _, key = a.store.create(Principal("globex"))
    assert later in json.loads(keys.read_text())["tenants"]["acme"]["keys"]
    a.store.revoke(key.id)
    assert not a.look().of(Principal("globex"))


def test_what_two_entries_have_counts_for_neither(keys: Path) -> None:
    a = Replica(keys, 64)
    old = a.store.ring.incarnation("acme")
    write(keys, acme=entry("acme", incarnation=old), globex=entry("acme", incarnation=old))
    ring = a.look()
    assert ring.authenticate(f"Bearer {KEYS['acme']}") is None and {*ring.pending} == {"acme", "globex"}
    assert ring.incarnation("acme") == old != ring.incarnation("globex") != ""
    write(keys, acme=entry("acme"), **{"a/b": entry("globex")})
    ring = a.look()
    assert a.serves("acme") and ring.tenants == ("acme",) and {*ring.pending} == {"a/b"}
    with pytest.raises(ConfigError, match="a/b"):
        KeyStore.open(keys)


def test_an_operator_whose_entry_is_malformed_loses_only_what_cannot_be_read(keys: Path) -> None:
    a = Replica(keys, 64)
    document = json.loads(keys.read_text())
    keys.write_text(json.dumps({**document, "operator": {"keys": [KEYS["operator"], 5]}, "later": 1}))
    a.look()
    assert a.store.ring.authenticate(f"Bearer {KEYS['operator']}") == Principal(None)
    assert a.store.problem is not None and a.store.warnings()
    a.store.put_tenant("acme", TenantSettings(weight=2))
    after = json.loads(keys.read_text())
    assert after["later"] == 1 and after["operator"]["keys"][1] == 5
    keys.write_text(json.dumps(document))
    a.look()
    assert a.store.problem is None and not a.store.warnings()


def test_a_file_that_is_no_keys_file_is_reported_and_tried_again(
    keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a = Replica(keys, 64)
    for content in ("{", "[]", '{"tenants": 5}'):
        keys.write_text(content)
        for _ in range(2):
            a.look()
            assert a.store.problem is not None and a.serves("acme") and a.serves("globex")
    assert len([each for each in caplog.records if "not wholly in force" in each.getMessage()]) == 3, (
        "once each"
    )
    write(keys, acme=entry("acme"))
    with monkeypatch.context() as patch:

        def failing(*_: object) -> str:
            raise OSError(5, "Input/output error")

        patch.setattr(Path, "read_text", failing)
        a.look()
        assert a.store.problem is not None and a.serves("globex")
    a.look()
    assert a.store.problem is None and not a.serves("globex"), "the same file is read again"


def test_keys_are_revoked_while_the_engine_takes_no_change(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine still has is removed when it answers. A tenant of that name waits for this."""
    a = Replica(keys, 64)

    def away(*_: object) -> None:
        raise ControlError("away")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "remove_tenant", away)
        write(keys, acme=entry("acme"))
        assert {*a.look().pending} == {"globex"} and not a.serves("globex")
        assert a.cache.tenant("globex") is not None
        write(keys, acme=entry("acme"), globex=entry("globex"))
        assert {*a.look().pending} == {"globex"} and not a.serves("globex")
    assert not a.look().pending and a.serves("globex") and a.tenant_sync.num_removals("globex") == 1


def test_keys_are_revoked_and_the_rest_is_tried_again_if_applying_it_fails(keys: Path) -> None:
    a = Replica(keys, 64)

    def crash(_: Keyring) -> Refused:
        raise ValueError("a bug")

    a.store.on_change, take = crash, a.store.on_change
    write(keys, acme=entry("acme", weight=2))
    with pytest.raises(ValueError):
        a.look()
    assert not a.serves("globex") and a.store._ring.settings["acme"].weight == 1
    with pytest.raises(ValueError):
        a.store.put_tenant("acme", TenantSettings(weight=3))
    a.store.on_change = take
    assert a.look().settings["acme"].weight == 2 and a.tenant_sync.num_removals("globex") == 1


def test_a_file_that_cannot_be_written_has_the_same_incarnations_everywhere(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it can be written, they stay."""

    def read_only(*_: object, **named: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("radixkv.service.key_store.write_private", read_only)
        a, b = Replica(keys, 64), Replica(keys, 64)
        names = {name: a.store.ring.incarnation(name) for name in ("acme", "globex")}
        assert names == {name: b.store.ring.incarnation(name) for name in names}
        assert len({*names.values()}) == 2 and "incarnation" not in keys.read_text()
    changed(keys, acme={"weight": 2})
    for each in (a, b):
        assert {name: each.look().incarnation(name) for name in names} == names
        assert not each.tenant_sync.unpurged
    assert all(each in keys.read_text() for each in names.values())


def test_a_new_tenant_waits_for_its_incarnation_while_the_file_is_locked(keys: Path) -> None:
    a = Replica(keys, 64)
    with held(keys):
        write(keys, acme=entry("acme"), initech=entry("globex"))
        ring = a.look()
        assert "initech" not in ring.settings and a.serves("acme") and not a.serves("globex")
        assert LOCK in str(a.store.problem)
    ring = a.look()
    assert ring.incarnation("initech") and a.store.problem is None


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock of a keys file, as another process would."""
    descriptor = os.open(path.with_name(LOCK), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def test_a_lock_on_the_folder_stops_nothing(keys: Path) -> None:
    store = KeyStore.open(keys)
    folder = os.open(keys.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        store.revoke(store.ring.of(Principal("acme"))[0].id)
    finally:
        os.close(folder)
    assert store.ring.authenticate(f"Bearer {KEYS['acme']}") is None


def test_a_change_waits_for_the_lock_no_longer_than_its_limit(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.service.key_store.LOCK_WAIT_S", 3.0)
    ticks = itertools.count()
    store = KeyStore(KeyStore.open(keys).ring, keys, clock=lambda: float(next(ticks)))
    before = keys.read_text()
    with held(keys), pytest.raises(FileBusy, match=LOCK):
        store.create(Principal("acme"))
    assert keys.read_text() == before and len(store._ring.keys) == 3
    store.create(Principal("acme"))
    assert len(store._ring.keys) == 4


def test_an_edit_by_hand_is_not_overwritten(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor takes no lock: what it saves while a change is written stands, and the change is refused."""
    a = Replica(keys, 64)

    with monkeypatch.context() as patch:
        patch.setattr("radixkv.signing.os.fsync", lambda _: write(keys, acme=entry("acme")))
        with pytest.raises(OSError, match="changed"):
            a.store.put_tenant("acme", TenantSettings(weight=2))
        assert "globex" not in keys.read_text() and a.store.ring.settings["acme"] == TenantSettings()
        write(keys, acme=entry("acme"), initech=entry("globex"))
        assert a.look().tenants == ("acme",) and a.store.problem is not None
        assert "initech" not in keys.read_text()
    assert a.look().tenants == ("acme",) and a.store.problem is None


@pytest.mark.parametrize("kind", ["a link", "open to others", "a pipe"])
def test_a_lock_that_others_could_hold_is_refused(keys: Path, kind: str) -> None:
    store, lock = KeyStore.open(keys), keys.with_name(LOCK)
    lock.unlink()
    if kind == "a link":
        lock.symlink_to(keys.with_name("elsewhere"))
    elif kind == "a pipe":
        os.mkfifo(lock, 0o600)
    else:
        lock.touch()
        lock.chmod(0o666)
    with pytest.raises(OSError):
        store.create(Principal("acme"))
    assert not keys.with_name("elsewhere").exists() and len(store.ring.keys) == 3


@pytest.fixture
def live(keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A service that looks at the keys file when a test says so."""
    monkeypatch.setattr("radixkv.service.key_store.LOOK_EVERY_S", 3600.0)
    with service_in_thread(keys=str(keys), **{"num-blocks": "64"}) as running:
        yield running


def gauge(live: Running, name: str) -> float:
    (line,) = [
        line
        for line in live.operator.get("/metrics").text.splitlines()
        if line.startswith(f"radixkv_{name} ")
    ]
    return float(line.split()[1])


def test_pending_settings_are_shown_and_nobody_is_served_without_them(live: Running, keys: Path) -> None:
    changed(keys, acme={"guaranteed_blocks": 65}, initech={"keys": ["of-initech"], "mode": "lenient"})
    live.service.keys._look_again()
    shown = live.operator.get("/v1/tenants").json()
    tenants = {each["tenant"]: each for each in shown["tenants"]}
    assert "guaranteed_blocks" in tenants["acme"]["pending"] and tenants["globex"]["pending"] is None
    assert tenants["acme"]["settings"]["guaranteed_blocks"] == 0 and "initech" not in tenants
    assert [each["tenant"] for each in shown["unserved"]] == ["initech"]
    assert live.acme.get("/v1/stats").status_code == 200
    with client(live.url, "of-initech") as initech:
        refused = initech.get("/v1/stats")
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "settings_pending"
        assert initech.get("/v1/tenants").status_code == 403
    for path in ("/healthz", "/readyz"):
        health = live.nobody.get(path)
        assert health.status_code == 200 and health.json()["status"] == "ok"
        (warning,) = health.json()["warnings"]
        assert "pending" in warning and not any(each in warning for each in ("acme", "initech", "2"))
    assert gauge(live, "tenants_pending") == 2 and gauge(live, "keys_file_failing") == 0
    put = live.operator.put("/v1/tenants/globex", json={"weight": 2})
    assert put.status_code == 200 and put.json()["pending"] is None
    same = live.operator.put("/v1/tenants/acme", json={"guaranteed_blocks": 65})
    assert same.status_code == 200 and "guaranteed_blocks" in same.json()["pending"], "as it was in the file"
    assert live.operator.delete("/v1/tenants/initech").status_code == 204
    put = live.operator.put("/v1/tenants/acme", json={"guaranteed_blocks": 8})
    assert put.json()["pending"] is None and put.json()["settings"]["guaranteed_blocks"] == 8
    assert live.nobody.get("/healthz").json()["warnings"] == [] and gauge(live, "tenants_pending") == 0
    keys.write_text("{")
    live.service.keys._look_again()
    assert live.nobody.get("/readyz").json()["warnings"] and gauge(live, "keys_file_failing") == 1
    assert live.acme.get("/v1/stats").status_code == 200


def test_a_held_lock_refuses_changes_and_stops_no_other_work(
    live: Running, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(keys):
        with monkeypatch.context() as patch:
            patch.setattr("radixkv.service.key_store.LOCK_WAIT_S", 0.0)
            refused = live.operator.post("/v1/tenants/acme/keys")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        error = refused.json()["error"]
        assert (
            error["type"] == "not_saved"
            and LOCK in error["message"]
            and "end that process" in error["message"]
        )
    monkeypatch.setattr("radixkv.service.key_store.LOCK_WAIT_S", LIMIT_S)

    def create(_: int) -> httpx.Response:
        with client(live.url, KEYS["operator"]) as operator:
            return operator.post("/v1/tenants/globex/keys")

    with ThreadPoolExecutor(12) as pool, ExitStack() as lock:
        lock.enter_context(held(keys))
        waiting = [pool.submit(create, number) for number in range(12)]
        eventually(live.service.keys._lock.locked, "a change waits for the lock")
        assert live.operator.post("/v1/tenants/acme/purge").status_code == 200
        assert live.operator.get("/v1/tenants").status_code == 200
        assert live.acme.get("/v1/stats").status_code == 200 and not any(each.done() for each in waiting)
        lock.close()
        assert {each.result(LIMIT_S).status_code for each in waiting} == {201}
