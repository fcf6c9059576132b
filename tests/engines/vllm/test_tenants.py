"""Behind an engine that knows no tenants, settings of the control channel count in host memory and on the disk."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest

from radixkv.config import Tenant
from radixkv.engines.control.client import ControlClient
from radixkv.engines.control.server import ControlServer
from radixkv.engines.vllm.tenants import OWED
from radixkv.errors import ConfigError, ControlError
from radixkv.files.system import Files
from radixkv.signing import KeySet
from radixkv.tenancy.request_keys import RequestFacts
from radixkv.tenancy.salt import SaltReader, make_salt
from radixkv.tiers.disk.slots import NO_QUOTA, Quota
from radixkv.tiers.host.index import NO_SLOT
from radixkv.tiers.pending import Pending
from tests.engines.patience import patient_channels as patient_channels
from tests.engines.vllm.test_steps import KEYS, SIZE, ids_of
from tests.tiers.disk.test_tier import DiskEngine
from tests.tiers.support import FaultyFiles, failing, num_of
from tests.tiers.support import patience as patience
from tests.waiting import LIMIT_S, eventually, is_set

pytestmark = pytest.mark.slow

DESTROYING = "write rename remove"
"""System calls without which a folder can't destroy a key."""
NUM_SLOTS, DISK_SLOTS = 64, 192
"""Of host memory, and of the disk."""


def facts_of(tenant: str) -> RequestFacts:
    return RequestFacts(cache_salt=make_salt(KEYS, tenant))


class ControlledEngine(DiskEngine):
    """An engine with a disk, whose tenants come from salts."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self.salts = SaltReader(KEYS)
        super().__init__(folder / "disk", NUM_SLOTS, files=files, salts=self.salts, disk_slots=DISK_SLOTS)

    def id_of(self, tenant: str) -> str:
        (found,) = self.salts.tenant_ids(tenant)
        return found

    def records(self, tenant: str) -> int:
        """The slots that a tenant has on the disk."""
        tier = self.disk.records
        return num_of(tier._table, bytes.fromhex(tier.folder.tag(self.id_of(tenant))))

    def quota(self, tenant: str) -> Quota:
        tier = self.disk.records
        owner = tier._table._owners.get(bytes.fromhex(tier.folder.tag(self.id_of(tenant))))
        return NO_QUOTA if owner is None else owner.quota

    def part(self, num_blocks: int) -> int:
        """The slots of the disk that are as much of it as these blocks are of host memory."""
        return num_blocks * self.disk.records.num_slots // NUM_SLOTS

    def later(self, condition: Callable[[], bool]) -> bool:
        """Let time go on until this is so."""

        def is_so() -> bool:
            self.clock.advance(1.0)
            return condition()

        return eventually(is_so)

    def flood(self, tenant: str, num_prompts: int, num_blocks: int = 4) -> None:
        """Let a tenant ask prompts that begin differently, one after the other."""
        for at in range(num_prompts):
            ids = ids_of(num_blocks * SIZE + 1, 1_000 + at)
            self.again(f"{tenant}-{at}", [5_000 + at, *ids[1:]], facts_of(tenant))


@contextmanager
def controlled(
    folder: Path, files: Files | None = None, tenants: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[tuple[ControlledEngine, ControlClient]]:
    """An engine and a client of its control channel, which run in two threads. ``tenants``: its configured ones."""
    KEYS.write(folder / "engine.keys")
    engine = ControlledEngine(folder, files)
    engine.tenants.configure(tenants or {}, KEYS)
    with (
        ControlServer(
            engine.level.cache,
            folder / "control",
            folder / "engine.keys",
            salts=engine.salts,
            patience_s=0.0,
            forgetting_below=engine.tenants.forgetting,
            knows_below=engine.tenants.is_on_disk,
            follow_below=engine.tenants.follow,
            tiers=engine.level.tiers,
            on_keys=partial(engine.tenants.configure, tenants or {}),
        ) as server,
        ControlClient(server.path, KEYS, timeout_s=LIMIT_S) as client,
    ):
        yield engine, client
    engine.stop()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[ControlledEngine, ControlClient]]:
    with controlled(tmp_path) as found:
        yield found


def test_quotas_are_set_changed_and_taken_back(both: tuple[ControlledEngine, ControlClient]) -> None:
    engine, client = both
    given = {"tenant": "acme", "guaranteed_blocks": 8, "max_blocks": 16, "weight": 2.0}
    client.call("set_tenant", given)
    settings = engine.level.cache.tenant(engine.id_of("acme"))
    assert settings is not None and (settings.guaranteed_blocks, settings.max_blocks) == (8, 16)
    assert engine.quota("acme") == Quota(engine.part(8), engine.part(16), 2.0) != Quota(8, 16, 2.0)
    client.call("set_tenant", {"tenant": "acme", "max_blocks": 32})
    assert engine.quota("acme") == Quota(0, engine.part(32), 1.0)
    client.call("remove_tenant", {"tenant": "acme"})
    assert engine.quota("acme") == engine.quota("globex") == NO_QUOTA


def test_a_refused_setting_changes_nothing_below(both: tuple[ControlledEngine, ControlClient]) -> None:
    engine, client = both
    client.call("set_tenant", {"tenant": "acme", "guaranteed_blocks": 40})
    before = engine.quota("acme")
    with pytest.raises(Exception, match="guaranteed_blocks"):
        client.call("set_tenant", {"tenant": "globex", "guaranteed_blocks": 40})
    assert engine.quota("acme") == before == Quota(engine.part(40), None, 1.0)
    assert engine.quota("globex") == NO_QUOTA


def test_a_limit_and_a_guarantee_hold_on_the_disk(both: tuple[ControlledEngine, ControlClient]) -> None:
    engine, client = both
    client.call("set_tenant", {"tenant": "acme", "max_blocks": 4})
    client.call("set_tenant", {"tenant": "globex", "guaranteed_blocks": 8})
    engine.flood("globex", engine.part(8) // 4)
    num_guaranteed = engine.records("globex")
    assert num_guaranteed == engine.part(8) // 4 * 4
    engine.flood("acme", engine.part(4) // 4 + 5)
    assert engine.records("acme") == engine.part(4)
    client.call("set_tenant", {"tenant": "other", "weight": 100.0})
    engine.flood("other", engine.disk.records.num_slots // 4 + 5)
    assert engine.disk.records.is_full and engine.records("globex") == num_guaranteed
    assert engine.records("acme") < engine.part(4), "it has neither a guarantee nor that weight"


def test_a_removed_tenants_records_are_destroyed_by_its_fleets_name(tmp_path: Path) -> None:
    """The tiers know it by the id that its salts have."""
    with controlled(tmp_path) as (engine, client):
        client.call("set_tenant", {"tenant": "acme"})
        engine.flood("acme", 2)
        engine.flood("globex", 2)
        assert engine.records("acme") == engine.records("globex") == 8
        client.call("remove_tenant", {"tenant": "acme"})
        assert engine.records("acme") == 0 and engine.records("globex") == 8
    with controlled(tmp_path) as (engine, _):
        assert engine.records("acme") == 0 and engine.records("globex") == 8


@pytest.mark.parametrize("command", ["clear", "purge", "remove_tenant"])
def test_what_is_forgotten_over_the_channel_is_forgotten_on_the_disk(tmp_path: Path, command: str) -> None:
    """Also what was on its way from the disk at that moment. A clear is of the whole tenant there."""
    prompt = ids_of(8 * SIZE + 1)
    with controlled(tmp_path) as (engine, _):
        engine.again("first", prompt, facts_of("acme"))
        engine.flood("globex", 2)
        assert engine.records("acme") == engine.records("globex") == 8
    with controlled(tmp_path) as (engine, client):
        client.call("set_tenant", {"tenant": "acme"})
        before = engine.num_computed
        engine.add("again", prompt, facts_of("acme"))
        engine.promoting()
        where = {"model": "vllm", "cache_salt": make_salt(KEYS, "acme", client_salt="other")}
        client.call(command, where if command == "clear" else {"tenant": "acme"})
        eventually(lambda: engine.records("acme") == 0, "the slot that is being read is free")
        assert engine.records("globex") == 8
        engine.run()
        assert engine.num_computed - before == len(prompt)


@pytest.mark.parametrize("command", ["clear", "purge", "remove_tenant"])
def test_what_a_failing_disk_owes_is_told_and_tried_again(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, files = ids_of(8 * SIZE + 1), FaultyFiles()
    where = {"model": "vllm", "cache_salt": make_salt(KEYS, "acme")}
    with controlled(tmp_path, files) as (engine, client):
        client.call("set_tenant", {"tenant": "acme"})
        engine.again("first", prompt, facts_of("acme"))
        files.before = failing(DESTROYING)
        answer = client.call(command, where if command == "clear" else {"tenant": "acme"})
        assert answer["owed"] and engine.disk.purges.owed == {engine.id_of("acme")}
        assert engine.again("meanwhile", prompt, facts_of("acme")) == len(prompt)
        files.before = lambda call: None
        assert engine.disk.purges.owed, "nobody has tried again yet"
        monkeypatch.setattr(engine.disk.purges, "_retries_at", 0.0)
        engine.step()
        assert Pending([engine.disk.purges], engine.id_of("acme")).wait(LIMIT_S)
        assert client.call("clear", where)["owed"] is False


def test_an_operator_tells_whose_the_records_are(tmp_path: Path) -> None:
    prompt = ids_of(8 * SIZE + 1)
    for incarnation, is_there in (("first", False), ("first", True), ("second", False)):
        with controlled(tmp_path) as (engine, client):
            client.call("set_tenant", {"tenant": "acme", "incarnation": incarnation})
            assert (engine.again("asked", prompt, facts_of("acme")) < len(prompt)) == is_there
    with controlled(tmp_path) as (engine, client):
        known = [client.call("purge", {"tenant": each})["known"] for each in ("acme", "acme", "nobody")]
        assert known == [True, False, False], "only the disk had something"


def failing_told(tried: threading.Event) -> Callable[[str], None]:
    """Files that can't destroy a key, and tell of each try."""

    def before(call: str) -> None:
        if call in DESTROYING.split():
            tried.set()
            raise OSError(errno.EIO, "planted")

    return before


def test_an_idle_engine_s_disk_pays_what_it_owes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step comes any more. The channel's ``stats`` tell when it is paid, and the counts of the next step do."""
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    files, tried = FaultyFiles(), threading.Event()
    with controlled(tmp_path, files) as (engine, client):

        def num_owed() -> float:
            found: float = client.call("stats")["tiers"]["disk"]["owed_purges"]
            return found

        engine.disk.purges.keep_retrying()
        engine.again("first", ids_of(8 * SIZE + 1), facts_of("acme"))
        assert num_owed() == 0 and engine.tenants.take_owed() == {}
        files.before = failing_told(tried)
        assert client.call("purge", {"tenant": "acme"})["owed"] and num_owed() == 1
        assert engine.tenants.take_owed() == {OWED: 1} and engine.tenants.take_owed() == {}
        tried.clear()
        assert engine.later(tried.is_set), "it is tried by time"
        assert num_owed() == 1 and not engine.disk.purges.is_open_for(engine.id_of("acme"))
        files.before = lambda call: None
        assert engine.later(lambda: num_owed() == 0)
        assert engine.tenants.take_owed() == {OWED: 0} and engine.records("acme") == 0


def test_an_idle_engine_s_disk_tries_a_reset_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    files, tried = FaultyFiles(), threading.Event()
    with controlled(tmp_path, files) as (engine, _):
        engine.disk.purges.keep_retrying()
        engine.again("first", ids_of(8 * SIZE + 1), facts_of("acme"))
        files.before = failing_told(tried)
        engine.level.reset()
        for _ in range(2):
            tried.clear()
            is_set(tried)
        assert engine.disk.purges.is_resetting
        files.before = lambda call: None
        assert eventually(lambda: not engine.disk.purges.is_resetting)
        assert engine.records("acme") == 0


def test_an_idle_engine_s_disk_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    files, synced = FaultyFiles(), threading.Event()
    with controlled(tmp_path, files) as (engine, _):
        engine.again("first", ids_of(8 * SIZE + 1), facts_of("acme"))
        tier = engine.disk.records
        assert eventually(lambda: tier._sync_job is None or tier._sync_job.is_done)
        files.before = lambda call: synced.set() if call == "sync" else None
        tier._synced_at, tier._sealed_at_sync = -inf, -1
        assert not synced.wait(0.05), "nobody makes a step"
        engine.disk.purges.keep_retrying()
        is_set(synced)


def test_stats_show_what_the_tiers_have(both: tuple[ControlledEngine, ControlClient]) -> None:
    engine, client = both
    engine.again("first", ids_of(8 * SIZE + 1), facts_of("acme"))
    tiers = client.call("stats")["tiers"]
    assert tiers["host"] == {"capacity_blocks": NUM_SLOTS, "resident_blocks": 8}
    disk = tiers["disk"]
    assert (disk["resident_blocks"], disk["open"], disk["errors"]) == (8, 1, 0) and disk["written_bytes"] > 0


def test_what_a_failing_disk_still_owes_at_the_stop_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    with controlled(tmp_path, files) as (engine, client):
        engine.again("first", ids_of(8 * SIZE + 1), facts_of("acme"))
        files.before = failing(DESTROYING)
        assert client.call("purge", {"tenant": "acme"})["owed"]
    (told,) = [each.message for each in caplog.records if "was closed" in each.message]
    assert engine.id_of("acme") in told and "Purge them again at the next start" in told


def test_a_strict_tenant_has_slots_of_its_own_and_nothing_on_the_disk(
    both: tuple[ControlledEngine, ControlClient],
) -> None:
    engine, client = both
    index, acme = engine.level.index, engine.id_of("acme")
    client.call("set_tenant", {"tenant": "acme", "mode": "strict", "guaranteed_blocks": 8})
    assert index.own_slots(acme) == 0, "from the next step on"
    prompt = ids_of(8 * SIZE + 1)
    assert engine.again("first", prompt, facts_of("acme")) == len(prompt)
    assert index.own_slots(acme) == 8 and engine.records("acme") == 0 and engine.quota("acme") == NO_QUOTA
    engine.flood("globex", 20)
    assert engine.again("again", prompt, facts_of("acme")) == 1
    assert engine.records("acme") == 0 and engine.records("globex") > 0
    client.call("set_tenant", {"tenant": "acme", "guaranteed_blocks": 8})
    other = [77, *ids_of(8 * SIZE + 1)[1:]]
    engine.again("burst", other, facts_of("acme"))
    assert index.own_slots(acme) == 0 and engine.records("acme") >= 8
    assert engine.quota("acme") == Quota(engine.part(8), None, 1.0)
    index.check()


def test_a_strict_tenant_that_has_no_slots_yet_keeps_nothing(
    both: tuple[ControlledEngine, ControlClient],
) -> None:
    """Two tenants' changes come in another order than to the cache: one has the slots that the other is to get."""
    engine, client = both
    index, prompt = engine.level.index, ids_of(8 * SIZE + 1)
    strict = {"mode": "strict", "guaranteed_blocks": 40}
    client.call("set_tenant", {"tenant": "globex", **strict})
    engine.step()
    engine.level.cache.add_tenant(Tenant(engine.id_of("globex")))  # ``follow`` hasn't come yet
    client.call("set_tenant", {"tenant": "acme", **strict})
    assert engine.again("first", prompt, facts_of("acme")) == len(prompt)
    assert index.own_slots(engine.id_of("acme")) == index.num_used == 0
    assert engine.again("second", prompt, facts_of("acme")) == len(prompt)
    engine.tenants.follow(engine.id_of("globex"))
    assert engine.again("third", prompt, facts_of("acme")) == len(prompt)
    assert engine.again("fourth", prompt, facts_of("acme")) == 1
    assert index.own_slots(engine.id_of("acme")) == 40 and engine.records("acme") == 0


STRICT: dict[str, Any] = {"mode": "strict", "guaranteed_blocks": 16}


def test_a_tenant_that_is_configured_as_strict_is_so_from_the_first_step(tmp_path: Path) -> None:
    prompt = ids_of(8 * SIZE + 1)
    with controlled(tmp_path) as (engine, _):
        assert engine.again("burst", prompt, facts_of("acme")) == len(prompt)
        assert engine.records("acme") == 8
    for _ in range(2):
        with controlled(tmp_path, tenants={"acme": STRICT}) as (engine, _):
            assert engine.again("first", prompt, facts_of("acme")) == len(prompt), (
                "nothing comes from the disk"
            )
            assert engine.level.index.own_slots(engine.id_of("acme")) == 16
            other = [77, *ids_of(7 * SIZE + 1)[1:]]
            engine.again("other", other, facts_of("acme"))
            assert eventually(lambda: engine.records("acme") == 0), "what was there is destroyed"
            engine.flood("globex", 20)
            assert engine.again("again", prompt, facts_of("acme")) == 1
            assert engine.again("other again", other, facts_of("acme")) == 1


def test_other_keys_of_the_fleet_name_a_strict_tenant_too(tmp_path: Path) -> None:
    """A rotated secret gives the tenant another id, which has its settings before a request can have it."""
    secrets = [b"a third secret of the fleet", b"the next secret of the fleet", b"a secret of the fleet"]
    assert KeySet.derive(secrets[2:]).accepted("salts") == KEYS.accepted("salts")
    new = KeySet.derive(secrets[1:])
    facts, prompt = RequestFacts(cache_salt=make_salt(new, "acme")), ids_of(8 * SIZE + 1)
    with controlled(tmp_path, tenants={"acme": STRICT}) as (engine, client):
        new.write(tmp_path / "engine.keys")
        client.call("reload_keys")
        assert engine.again("first", prompt, facts) == len(prompt)
        assert engine.disk.counts()["resident_blocks"] == 0
        assert engine.again("again", prompt, facts) == 1
        client.call("set_tenant", {"tenant": "globex", "guaranteed_blocks": NUM_SLOTS // 4})
        KeySet.derive(secrets).write(tmp_path / "engine.keys")
        with pytest.raises(ControlError, match=r"tenants\['acme'\] .*guaranteed_blocks"):
            client.call("reload_keys")
        assert len(client.call("keys")["keys"]) == 2 * len(KEYS.purposes), "the keys are as they were"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"mode": "strict"}, "guaranteed_blocks"),
        ({"mode": "tight", "guaranteed_blocks": 1}, "mode"),
        ({"guaranteed_blocks": NUM_SLOTS + 1}, "guaranteed_blocks"),
        ({"guaranteed_blocks": "many"}, "guaranteed_blocks"),
        ({"policy": "none such"}, "policy"),
        ({"tier_dtype": "fp8"}, "tier_dtype"),
    ],
)
def test_a_configured_tenant_that_cannot_be_kept_is_refused_by_name(
    both: tuple[ControlledEngine, ControlClient], given: dict[str, Any], problem: str
) -> None:
    engine, _ = both
    with pytest.raises(ConfigError, match=rf"^tenants\['acme'\] {problem}"):
        engine.tenants.configure({"acme": given}, KEYS)


def test_slots_that_a_slow_disk_still_reads_are_not_those_of_a_strict_tenant(
    both: tuple[ControlledEngine, ControlClient],
) -> None:
    engine, client = both
    index, prompt = engine.level.index, ids_of(8 * SIZE + 1)
    client.call("set_tenant", {"tenant": "acme", "mode": "strict", "guaranteed_blocks": 8})
    engine.flood("globex", 20)
    read = index._slot_of[index._slot_of != NO_SLOT].copy()
    index.use(read)
    assert len(read) > 40
    engine.level.cache.purge(engine.id_of("globex"))  # its entries go, and its slots are still read
    engine.flood("other", 20)
    assert engine.again("first", prompt, facts_of("acme")) == len(prompt)
    assert engine.again("again", prompt, facts_of("acme")) == 1, "it was saved"
    index.unuse(read)


def test_without_a_disk_settings_count_in_host_memory(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path / "disk", NUM_SLOTS)
    disk, engine.level.disk = engine.disk, None
    engine.level.cache.add_tenant(Tenant("a", mode="strict", guaranteed_blocks=5))
    engine.tenants.follow("a")
    engine.step()
    assert engine.level.index.own_slots("a") == 5
    engine.level.cache.remove_tenant("a")
    engine.tenants.follow("a")
    engine.step()
    assert engine.level.index.own_slots("a") == 0
    engine.level.disk = disk
    engine.stop()


def test_a_strict_tenant_gives_no_slot_to_a_disk_that_it_has_not(tmp_path: Path) -> None:
    """Over a full disk some slots are kept free for what leaves: of tenants whose blocks it takes."""
    with controlled(tmp_path) as (engine, client):
        client.call("set_tenant", {"tenant": "a", "guaranteed_blocks": 4, "max_blocks": 4, "mode": "strict"})
        engine.flood("b", engine.disk.records.num_slots // 4 + 5)
        assert engine.disk.records.is_full
        stores = engine.disk.demotions
        reserves = [stores.reserve_for(engine.id_of(name), 1, NUM_SLOTS) for name in ("a", "b")]
        assert reserves[1] > 0 == reserves[0]
