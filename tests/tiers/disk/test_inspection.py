"""`radixkv disk`: damage is found and repaired, records are forgotten, and nothing else is touched."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from radixkv.cli.main import commands
from radixkv.errors import ConfigError
from radixkv.files.private_folder import KEYS
from radixkv.files.system import PAGE_BYTES
from radixkv.tiers.disk import inspection
from radixkv.tiers.disk.slab import HEADER_BYTES
from tests.tiers.support import (
    ACME,
    GLOBEX,
    NUM_SLOTS,
    SECRET,
    FaultyFiles,
    counted,
    failing,
    load,
    prompt,
    right_or_missing,
    store,
    tier_in,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with four records of acme and one of globex, in the slots 0 to 4."""
    with tier_in(tmp_path / "t") as tier:
        for number in range(4):
            assert store(tier, ACME, prompt(number))
        assert store(tier, GLOBEX, prompt(0))
        slots_at, slot_bytes = tier._slab.slots_at, tier._slab.slot_bytes
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    assert (slots_at, slot_bytes) == (2 * PAGE_BYTES, PAGE_BYTES)
    return tmp_path / "t"


def damage(folder: Path) -> None:
    """Flip a bit of the record in slot 0, and one of the header of slot 1."""
    with (folder / "slab").open("r+b") as file:
        for at in (2 * PAGE_BYTES + 5, PAGE_BYTES + HEADER_BYTES + 20):
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))


def test_a_good_folder_is_good(folder: Path) -> None:
    found = inspection.inspect(folder, [SECRET])
    assert found.is_good and (found.num_slots, found.num_good, found.num_free) == (
        NUM_SLOTS,
        5,
        NUM_SLOTS - 5,
    )
    assert found.num_tenants == 2


def test_damage_is_found_changed_by_a_repair_only_and_gone_after_it(folder: Path) -> None:
    damage(folder)
    for repair in (False, True):
        found = inspection.inspect(folder, [SECRET], repair=repair)
        assert not found.is_good and (found.num_damaged, found.num_torn, found.num_good) == (1, 1, 3)
    found = inspection.inspect(folder, [SECRET])
    assert found.is_good and (found.num_good, found.num_free) == (3, NUM_SLOTS - 3)
    with tier_in(folder) as tier:
        assert [right_or_missing(tier, ACME, prompt(number)) for number in range(4)] == [
            False,
            False,
            True,
            True,
        ]


def test_what_the_disk_does_not_read_is_counted(folder: Path) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        inspection.inspect(folder, [SECRET], files=FaultyFiles(failing("read")))
    num_reads = FaultyFiles()
    inspection.inspect(folder, [SECRET], files=num_reads)
    before_records = num_reads.calls.count("read") - 5
    found = inspection.inspect(folder, [SECRET], files=FaultyFiles(failing("read", after=before_records)))
    assert found.num_unreadable == 5 and not found.is_good


def test_orphans_and_damaged_tenants(folder: Path) -> None:
    first, second = sorted((folder / KEYS).iterdir())
    first.unlink()
    second.write_bytes(b"?" * 100)
    found = inspection.inspect(folder, [SECRET], repair=True)
    assert (found.num_orphaned, found.num_damaged_tenants, found.num_tenants) == (5, 1, 0)
    found = inspection.inspect(folder, [SECRET])
    assert found.is_good and found.num_free == NUM_SLOTS


def test_a_tenant_is_forgotten_alone(folder: Path) -> None:
    assert inspection.forget_tenant(folder, [SECRET], "acme") == 4
    assert inspection.forget_tenant(folder, [SECRET], "nobody") == 0
    with tier_in(folder) as tier:
        assert load(tier, ACME, prompt(1)) is None and right_or_missing(tier, GLOBEX, prompt(0))
        assert counted(tier, {"orphaned": 0, "torn": 0, "sealed": 1})


def test_all_is_forgotten_without_a_secret_and_the_folder_can_be_used_again(folder: Path) -> None:
    old = (folder / "slab").read_bytes()
    assert inspection.forget(folder) == len(old)
    assert sorted(each.name for each in folder.iterdir()) == ["generations", "keys", "lock"]
    assert not list((folder / KEYS).iterdir())
    with tier_in(folder, secrets=(b"another secret of the fleet",)) as tier:
        assert len(tier) == 0 and store(tier, ACME, prompt(1))


def test_a_folder_in_use_and_one_that_is_not_ours_are_left_alone(folder: Path, tmp_path: Path) -> None:
    with tier_in(folder) as tier:
        for act in (inspection.forget, lambda path: inspection.inspect(path, [SECRET])):
            with pytest.raises(ConfigError, match="no other process uses"):
                act(folder)
        assert right_or_missing(tier, ACME, prompt(1))
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"it has 'thesis\.tex'"):
        inspection.forget(tmp_path / "mine")
    with pytest.raises(ConfigError, match="there is none"):
        inspection.forget(tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


def run(*arguments: str, answer: str | None = None) -> tuple[int, str]:
    done = CliRunner().invoke(commands, ["disk", *arguments], input=answer)
    return done.exit_code, done.output


def test_the_commands(folder: Path, tmp_path: Path) -> None:
    secret = ("--fleet-secret", str(tmp_path / "secret"))
    code, said = run("check", str(folder), *secret)
    assert code == 0 and "5  records that open" in said and said.endswith("good\n")
    damage(folder)
    code, said = run("check", str(folder), *secret, "--json")
    assert code == 1 and json.loads(said)["num_damaged"] == 1
    assert run("repair", str(folder), *secret)[0] == 0 and run("check", str(folder), *secret)[0] == 0
    code, said = run("forget", str(folder), "--tenant", "globex", *secret, "--yes")
    assert code == 0 and "forgot 1 records of tenant 'globex'" in said


def test_forget_asks_first(folder: Path) -> None:
    code, said = run("forget", str(folder), answer="n\n")
    assert code == 1 and "Forget the records of all tenants" in said and (folder / "slab").exists()
    code, said = run("forget", str(folder), answer="y\n")
    assert code == 0 and not (folder / "slab").exists()


def test_reset_shows_what_it_deletes_and_asks(folder: Path) -> None:
    """It needs no whole file, and takes nobody else's."""
    (folder / "master").write_bytes(b"?")
    slab_bytes = (folder / "slab").stat().st_size
    code, said = run("reset", str(folder), answer="n\n")
    assert code == 1 and (folder / "master").exists() and (folder / "slab").exists()
    rows = [line.split() for line in said.splitlines() if line.startswith("  ")]
    assert ["master", "1", "file", "1", "bytes"] in rows
    assert ["slab", "1", "file", f"{slab_bytes:,}", "bytes"] in rows
    assert [row[:3] for row in rows if row[0] == "keys/"] == [["keys/", "2", "files"]]
    code, said = run("reset", str(folder), answer="y\n")
    assert code == 0 and "deleted 4 files" in said
    assert run("reset", str(folder), "--yes") == (0, f"{folder} has nothing to delete\n")
    with tier_in(folder, secrets=(b"another secret of the fleet",)) as tier:
        assert store(tier, ACME, prompt(1))
        assert "no other process uses" in refused_reset(folder) and right_or_missing(tier, ACME, prompt(1))
    (folder / "thesis.tex").touch()
    assert "it has 'thesis.tex'" in refused_reset(folder) and (folder / "slab").exists()
    assert "there is none" in refused_reset(folder.with_name("typo"))


def refused_reset(folder: Path) -> str:
    return str(CliRunner().invoke(commands, ["disk", "reset", str(folder), "--yes"]).exception)


@pytest.mark.parametrize("command", ["check", "repair", "forget"])
def test_a_secret_that_others_can_read_is_warned_of(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"a secret from before, of the fleet")
    old.chmod(0o640)
    others = ("--tenant", "acme", "--yes") if command == "forget" else ()
    arguments = (command, str(folder), "--fleet-secret", str(tmp_path / "secret"), *others)
    assert run(*arguments)[0] == 0 and not caplog.records
    assert run(*arguments, "--previous", str(old))[0] == 0
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith(f"--previous {old}: ") and "mode 0640" in warning and "chmod 600" in warning


def test_records_are_counted_by_tenant_and_the_last_write_is_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier_in(folder) as tier:
        acme, globex = (tier.folder.tag(each.tenant) for each in (ACME, GLOBEX))
    now = SimpleNamespace(time=lambda: (folder / "slab").stat().st_mtime + 1_000)
    monkeypatch.setattr(inspection, "time", now)
    secret = ("--fleet-secret", str(tmp_path / "secret"))
    _, said = run("check", str(folder), *secret)
    assert f"\n{4:>10}  records of tenant {acme}\n{1:>10}  records of tenant {globex}\n" in said
    assert "last written 1,000 s ago" in said
    damage(folder)
    found = inspection.inspect(folder, [SECRET])
    assert found.records_of == {acme: 2, globex: 1}, "those that open"
    assert list(found.records_of) == [acme, globex] and found.written_s == pytest.approx(1_000)
    monkeypatch.setattr("radixkv.cli.disk._MOST_SHOWN", 1)
    _, said = run("check", str(folder), *secret)
    assert f"records of tenant {acme}\n{1:>10}  records of 1 other tenants\n" in said and globex not in said
    inspection.forget_tenant(folder, [SECRET], "acme")
    assert inspection.inspect(folder, [SECRET]).records_of == {globex: 1}
