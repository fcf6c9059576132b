"""A tenant that was removed, and another one of the same name: nothing of the first is the second's, in no tier."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from radixkv import ArgumentError, CacheConfig, KVLayout, Namespace, PrefixCache, Tenant
from radixkv.engines.control.tenants import SETTINGS
from radixkv.index.tokens import encode
from tests.tiers.support import FaultyFiles, failing
from tests.tiers.support import patience as patience
from tests.tiers.test_loading import DiskOwner, on_disk
from tests.tiers.test_loading import folder as folder
from tests.tiers.test_tiered_cache import NS, OTHER, PROMPT, Owner
from tests.waiting import eventually

FIRST, SECOND = Tenant("a", incarnation="first"), Tenant("a", incarnation="second")


def found(owner: DiskOwner, namespace: Namespace = NS) -> int:
    """How many tokens of the prompt come from the disk."""
    with owner.cache.open(namespace, PROMPT) as sequence:
        loading = sequence.loading
        return 0 if loading is None or not loading.wait() else loading.num_loaded_tokens


def fill(owner: DiskOwner) -> None:
    assert owner.ask(PROMPT) == (0, 41)
    assert eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] == 10)


def test_a_disk_knows_whose_records_it_has(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    with on_disk(kv) as owner:
        owner.cache.add_tenant(FIRST)
        fill(owner)
    (key,) = (kv / "keys").iterdir()
    for tenant in (FIRST, Tenant("a")):
        with on_disk(kv) as owner:
            owner.cache.add_tenant(tenant)
            assert found(owner) == 40
    content = key.read_bytes()
    held = tmp_path / "held"
    os.link(key, held)
    with on_disk(kv) as owner:
        owner.cache.add_tenant(SECOND)
        assert found(owner) == 0
        assert eventually(lambda: not owner.cache.pending())
        assert not key.exists() and held.read_bytes() == bytes(len(content)), "the key is destroyed"
        fill(owner)
    with on_disk(kv) as owner:
        owner.cache.add_tenant(SECOND)
        assert found(owner) == 40
    with on_disk(kv) as owner:
        owner.cache.add_tenant(FIRST)
        assert found(owner) == 0, "nor has the first one anything of the second"


def test_a_folder_that_knows_no_incarnation_adopts_the_first(folder: Path, tmp_path: Path) -> None:
    before = {each.name: each.read_bytes() for each in (folder / "keys").iterdir()}
    for name in before:
        os.link(folder / "keys" / name, tmp_path / name)
    with on_disk(folder) as owner:
        owner.cache.add_tenant(FIRST)
        owner.known()
        assert found(owner) == found(owner, OTHER) == 40
        tier = owner.disk.records
        assert (
            tier.folder.incarnation_of_keys("a"),
            tier.folder.incarnation_of_keys("b"),
            tier.folder.incarnation_of_keys("c"),
        ) == ("first", "", None)
    left = {name: (tmp_path / name).read_bytes() for name in before}
    (adopted,) = (name for name in before if left[name] != before[name])
    assert left[adopted] == bytes(len(before[adopted])), "the key's former file was overwritten"
    with on_disk(folder) as owner:
        owner.cache.add_tenant(SECOND)
        assert (found(owner), found(owner, OTHER)) == (0, 40)


def test_tenants_without_requests_are_adopted_too(folder: Path) -> None:
    with on_disk(folder) as owner:
        owner.cache.add_tenant(FIRST)
        assert eventually(lambda: owner.disk.records.folder.incarnation_of_keys("a") == "first")
    with on_disk(folder) as owner:
        owner.cache.add_tenant(SECOND)
        assert found(owner) == 0


def test_nothing_is_served_before_the_folder_says_whose_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start, after a crash, could take it for another one's."""
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.01)
    files = FaultyFiles()
    with on_disk(folder, files=files) as owner:
        files.before = failing("rename", errno.ENOSPC)
        owner.cache.add_tenant(FIRST)
        assert eventually(lambda: "rename" in files.calls)
        tier, key = owner.disk.records, encode(PROMPT)
        assert (tier.locate(NS, key, 0), tier.locate(OTHER, key, 0)) == (0, 10)
        files.before = lambda call: None
        assert eventually(lambda: tier.locate(NS, key, 0) == 10)
        assert tier.folder.incarnation_of_keys("a") == "first" and found(owner) == 40


def test_a_tenant_that_comes_again_while_the_process_runs(tmp_path: Path) -> None:
    with on_disk(tmp_path / "kv") as owner:
        owner.cache.add_tenant(FIRST)
        fill(owner)
        owner.cache.remove_tenant("a")
        owner.cache.add_tenant(SECOND)
        fill(owner)
        assert owner.disk.records.folder.incarnation_of_keys("a") == "second", (
            "it came with the key, before the first record"
        )
    with on_disk(tmp_path / "kv") as owner:
        owner.cache.add_tenant(SECOND)
        assert found(owner) == 40


@pytest.mark.parametrize("has_disk", [False, True])
def test_another_incarnation_forgets_all_without_a_removal(tmp_path: Path, has_disk: bool) -> None:
    owner = DiskOwner(tmp_path / "kv") if has_disk else Owner(40)
    owner.cache.add_tenant(FIRST)
    for namespace in (NS, OTHER):
        owner.ask(PROMPT, namespace)
    owner.cache.add_tenant(Tenant("a", weight=2.0, incarnation="first"))
    owner.cache.add_tenant(Tenant("a", weight=2.0))
    assert owner.cache.match(NS, PROMPT).num_tokens == 40, "no other one was named"
    owner.cache.add_tenant(FIRST)
    owner.cache.add_tenant(SECOND)
    owner.evict()
    assert owner.ask(PROMPT) == (0, 41) and owner.ask(PROMPT, OTHER) == (40, 1)
    owner.check()
    owner.cache.close()


def test_a_cache_with_nothing_below_forgets_too() -> None:
    cache = PrefixCache(CacheConfig(16, 4, KVLayout(1, 1, 8)))
    cache.add_tenant(FIRST)
    running = cache.open(NS, PROMPT)
    running.commit(40)
    cache.add_tenant(SECOND)
    assert cache.match(NS, PROMPT).num_tokens == 0
    running.release()
    assert cache.resident_blocks == 0


@pytest.mark.parametrize("wrong", ["x" * 65, "tab\t", "é", 1, None])
def test_what_is_no_incarnation(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="at most 64 printable ASCII characters"):
        Tenant("a", incarnation=wrong)  # type: ignore[arg-type]


def test_an_engine_s_operator_may_name_it() -> None:
    assert "incarnation" in SETTINGS
