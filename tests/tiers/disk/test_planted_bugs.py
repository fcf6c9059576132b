"""The checks of these tests find planted bugs: each mutant gives what the checks refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.files.private_folder import PrivateFolder
from radixkv.tiers.disk import records as disk_records
from radixkv.tiers.disk.folder import Generations, TierFolder
from radixkv.tiers.disk.records import DiskRecords
from radixkv.tiers.disk.slab import Header
from radixkv.tiers.disk.slots import SlotTable
from tests.tiers.disk.test_records import Medium, slot_of
from tests.tiers.support import ACME, GLOBEX, load, prompt, right_or_missing, store, tier_in


def check_other_namespaces(folder: Path) -> None:
    """A record of one salt is not found under another."""
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1))
        assert not right_or_missing(tier, ACME._replace(salt="t"), prompt(1))


def check_flipped_bits(folder: Path) -> None:
    """A changed record is a miss."""
    with tier_in(folder, direct=False) as tier:
        assert store(tier, ACME, prompt(1))
        at, _ = (medium := Medium(folder, tier)).payload(slot_of(tier, ACME, prompt(1)))
        medium.write(at, b"other")
        assert not right_or_missing(tier, ACME, prompt(1))


def check_unsealed(folder: Path) -> None:
    """A record is not found while it is written."""
    found: list[int] = []
    with tier_in(folder) as tier, pytest.MonkeyPatch.context() as patch:
        write = tier._slab.write_slot

        def looking(slot: int, content: memoryview, num_bytes: int) -> None:
            found.append(tier.locate(ACME, prompt(1), 0))
            write(slot, content, num_bytes)

        patch.setattr(tier._slab, "write_slot", looking)
        store(tier, ACME, prompt(1))
    assert found == [0]


def check_purge(folder: Path) -> None:
    """A purged record is not found after a restart, also if the headers are as they were."""
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
    old = (folder / "slab").read_bytes()
    with tier_in(folder) as tier:
        tier.purge("acme")
    (folder / "slab").write_bytes(old)
    with tier_in(folder) as tier:
        assert load(tier, ACME, prompt(1)) is None and right_or_missing(tier, GLOBEX, prompt(1))


CHECKS = (check_other_namespaces, check_flipped_bits, check_unsealed, check_purge)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_checks_accept_the_tier(tmp_path: Path, check: object) -> None:
    assert callable(check)
    check(tmp_path / "t")


def test_associated_data_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskRecords, "_locator", lambda *_: b"the same for all")
    check_other_namespaces(tmp_path / "good")
    monkeypatch.setattr(disk_records, "compare_digest", lambda *_: True)
    check_other_namespaces(tmp_path / "still good")
    monkeypatch.setattr(Header, "associated", lambda *_: b"")
    with pytest.raises(AssertionError, match="WRONG KV"):
        check_other_namespaces(tmp_path / "bad")


def test_a_salt_lost_one_level_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces of one tenant are told apart by nothing any more."""
    monkeypatch.setattr(type(ACME), "framed", lambda namespace: namespace.tenant.encode())
    with pytest.raises(AssertionError, match="WRONG KV"):
        check_other_namespaces(tmp_path / "bad")


def test_a_failed_load_counted_as_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskRecords, "_miss", lambda *_: True)
    with pytest.raises(AssertionError, match="WRONG KV"):
        check_flipped_bits(tmp_path / "bad")


def test_a_store_visible_before_it_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = SlotTable.take

    def visible(table: SlotTable, locator: bytes, owner: bytes) -> int | None:
        slot = take(table, locator, owner)
        if slot is not None:
            table.seal(slot)
        return slot

    monkeypatch.setattr(SlotTable, "take", visible)
    with pytest.raises(AssertionError):
        check_unsealed(tmp_path / "bad")


def test_a_generation_forgotten_at_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that isn't read is harmless, because the key is gone, or marked. With the key, records come back."""
    monkeypatch.setattr(TierFolder, "_read_generations", lambda *_: Generations())
    check_purge(tmp_path / "good")
    monkeypatch.setattr(PrivateFolder, "destroy", lambda *_: None)
    check_purge(tmp_path / "marked")
    monkeypatch.setattr(TierFolder, "_mark", lambda *_: None)
    with pytest.raises(AssertionError):
        check_purge(tmp_path / "bad")


def test_a_key_that_is_not_destroyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the generation, records under a key of the past are not served either."""
    monkeypatch.setattr(PrivateFolder, "destroy", lambda *_: None)
    check_purge(tmp_path / "good")
