"""Behind an engine that knows no tenants, settings of the control channel count in host memory and on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixkv.config import Tenant
from radixkv.engines.control import ControlServer
from radixkv.engines.control_client import ControlClient
from radixkv.engines.host_index import NO_SLOT
from radixkv.engines.request_keys import RequestFacts
from radixkv.engines.salt import SaltReader, make_salt
from radixkv.tiers.files import Files
from radixkv.tiers.slot_owners import NO_QUOTA, Quota
from tests.engines.test_disk_level import DiskEngine
from tests.engines.test_second_level import KEYS, SIZE, ids_of
from tests.tiers.support import FaultyFiles, failing, num_of
from tests.tiers.support import patience as patience

DESTROYING = "write rename remove"
"""System calls without which a folder can't destroy a key."""
NUM_SLOTS = 64
"""Of host memory. The disk has some times as many."""


def facts_of(tenant: str) -> RequestFacts:
    return RequestFacts(cache_salt=make_salt(KEYS, tenant))


class ControlledEngine(DiskEngine):
    """An engine with a disk, whose tenants come from salts."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self.salts = SaltReader(KEYS)
        super().__init__(folder / "disk", NUM_SLOTS, files=files, salts=self.salts)

    def id_of(self, tenant: str) -> str:
        (found,) = self.salts.tenant_ids(tenant)
        return found

    def records(self, tenant: str) -> int:
        """The slots that a tenant has on the disk."""
        tier = self.disk.tier
        return num_of(tier._table, bytes.fromhex(tier._folder.tag(self.id_of(tenant))))

    def quota(self, tenant: str) -> Quota:
        tier = self.disk.tier
        owner = tier._table._owners.get(bytes.fromhex(tier._folder.tag(self.id_of(tenant))))
        return NO_QUOTA if owner is None else owner.quota

    def part(self, num_blocks: int) -> int:
        """The slots of the disk that are as much of it as these blocks are of host memory."""
        return num_blocks * self.disk.tier.num_slots // NUM_SLOTS

    def flood(self, tenant: str, num_prompts: int, num_blocks: int = 4) -> None:
        """Let a tenant ask prompts that begin differently, one after the other."""
        for at in range(num_prompts):
            ids = ids_of(num_blocks * SIZE + 1, 1_000 + at)
            self.again(f"{tenant}-{at}", [5_000 + at, *ids[1:]], facts_of(tenant))


@contextmanager
def controlled(folder: Path, files: Files | None = None) -> Iterator[tuple[ControlledEngine, ControlClient]]:
    """An engine and a client of its control channel, which run in two threads."""
    KEYS.write(folder / "engine.keys")
    engine = ControlledEngine(folder, files)
    with (
        ControlServer(
            engine.level.cache,
            folder / "control",
            folder / "engine.keys",
            salts=engine.salts,
            patience_s=0.0,
            owe_below=engine.tenants.owe,
            pay_below=engine.tenants.pay,
            follow_below=engine.tenants.follow,
        ) as server,
        ControlClient(server.path, KEYS) as client,
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
    engine.flood("other", engine.disk.tier.num_slots // 4 + 5)
    assert engine.disk.tier.is_full and engine.records("globex") == num_guaranteed
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
        while not engine.disk.num_running:
            engine.step()
        where = {"model": "vllm", "cache_salt": make_salt(KEYS, "acme", client_salt="other")}
        client.call(command, where if command == "clear" else {"tenant": "acme"})
        assert engine.records("acme") == 0 and engine.records("globex") == 8
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
        assert answer["owed"] and engine.disk.debts.owed == {engine.id_of("acme")}
        assert engine.again("meanwhile", prompt, facts_of("acme")) == len(prompt)
        files.before = lambda call: None
        assert engine.disk.debts.owed, "nobody has tried again yet"
        monkeypatch.setattr(engine.disk.debts, "_pays_at", 0.0)
        engine.step()
        assert engine.disk.debts.pay(engine.id_of("acme"), 10.0)
        assert client.call("clear", where)["owed"] is False


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
    engine.tenants.shares = None
    engine.level.cache.add_tenant(Tenant("a", mode="strict", guaranteed_blocks=5))
    engine.tenants.follow("a")
    engine.step()
    assert engine.level.index.own_slots("a") == 5 and not engine.tenants.serves("a")
    engine.level.cache.remove_tenant("a")
    engine.tenants.follow("a")
    engine.step()
    assert engine.level.index.own_slots("a") == 0 and engine.tenants.serves("a")
    engine.stop()


def test_a_strict_tenant_gives_no_slot_to_a_disk_that_it_has_not(tmp_path: Path) -> None:
    """Over a full disk some slots are kept free for what leaves: of tenants whose blocks it takes."""
    with controlled(tmp_path) as (engine, client):
        client.call("set_tenant", {"tenant": "a", "guaranteed_blocks": 4, "max_blocks": 4, "mode": "strict"})
        engine.flood("b", engine.disk.tier.num_slots // 4 + 5)
        assert engine.disk.tier.is_full
        stores = engine.disk.shared.stores
        reserves = [stores.reserve_for(engine.id_of(name), 1, NUM_SLOTS) for name in ("a", "b")]
        assert reserves[1] > 0 == reserves[0]
