"""The folder: who may open it, secrets and their rotation, and a purge that holds."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from radixkv.errors import ConfigError, TierError
from radixkv.files.private_folder import KEYS
from radixkv.tiers.disk import inspection
from radixkv.tiers.disk.folder import DamagedMaster, TierFolder
from radixkv.tiers.disk.records import DiskRecords
from tests.tiers.support import (
    ACME,
    ATTACKS,
    GLOBEX,
    SECRET,
    WAIT_S,
    FaultyFiles,
    counted,
    failing,
    kv,
    load,
    prompt,
    right_or_missing,
    settings,
    store,
    tier_in,
)
from tests.waiting import ended, is_set

NEW = b"the fleet's next secret, longer"


def refused(folder: Path, message: str, **others: object) -> None:
    with pytest.raises(ConfigError, match=message), tier_in(folder, **others):
        pass


def flipped(file: Path) -> bytes:
    """The content of a file with one bit changed."""
    content = file.read_bytes()
    return content[:-1] + bytes([content[-1] ^ 1])


# --- who may open it


def test_a_folder_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "thesis.tex").write_text("years of work")
    refused(tmp_path, "an empty folder, or one of a disk tier; it has 'thesis.tex'")
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_of_ours_with_other_files_is_refused(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t"):
        pass
    (tmp_path / "t" / "notes.txt").touch()
    refused(tmp_path / "t", "a disk tier's files alone; it has 'notes.txt'")


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir(mode=0o755)
    refused(tmp_path / "t", "a folder of mode 0700")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir(mode=0o700)
    os.chown(tmp_path / "t", 12345, 12345)
    refused(tmp_path / "t", "a folder of this user")


@pytest.mark.parametrize("name", ["", "slab", "lock", "master", "keys"])
def test_symbolic_links_are_not_followed(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
    path = tmp_path / "t" / name if name else tmp_path / "t"
    shutil.move(path, victim)
    before = victim.read_bytes() if victim.is_file() else b""
    path.symlink_to(victim)
    with pytest.raises((ConfigError, OSError)), tier_in(tmp_path / "t"):
        pass
    assert (victim.read_bytes() if victim.is_file() else b"") == before


def test_a_missing_parent_and_a_file_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "no" / "t", "a folder that can be made or opened")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "Not a directory")


def test_two_openings_exclude_each_other(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        refused(tmp_path / "t", "a folder that no other process uses")
        assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))
    with tier_in(tmp_path / "t") as tier:
        assert right_or_missing(tier, ACME, prompt(1))


def test_two_processes_exclude_each_other(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.tiers.support import tier_in; from pathlib import Path\n"
        "with tier_in(Path(sys.argv[1])): print('opened', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "opened\n"
        refused(tmp_path / "t", "a folder that no other process uses")
        other.communicate("")
    with tier_in(tmp_path / "t"):
        pass


def test_a_process_that_was_overtaken_where_flock_does_nothing_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.files.private_folder.fcntl.flock", lambda *_: None)
    with tier_in(tmp_path / "t") as first:
        assert store(first, ACME, prompt(1))
        with tier_in(tmp_path / "t"):
            with pytest.raises(TierError, match="another process opened"):
                first.sync()
            assert first.state == "fenced" and load(first, ACME, prompt(1)) is None
            assert first.locate(ACME, prompt(1), 0) == 0 and counted(first, {"closed": 1})


def test_an_unfinished_folder_is_made_again(tmp_path: Path) -> None:
    """A first opening that ended anywhere before its last step."""
    calls = FaultyFiles()
    with tier_in(tmp_path / "whole", files=calls):
        pass
    for after in range(1, calls.calls.count("write") + calls.calls.count("rename")):
        folder = tmp_path / f"t{after}"
        with (
            pytest.raises(OSError, match="Input/output error"),
            tier_in(folder, files=FaultyFiles(failing("write rename", after=after))),
        ):
            pass
        with tier_in(folder) as tier:
            assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))


def test_no_space_for_the_slab_is_a_clear_refusal(tmp_path: Path) -> None:
    files = FaultyFiles(failing("allocate", errno.ENOSPC))
    refused(tmp_path / "t", "disk_bytes=.* a size for which .* has space", files=files)
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))


# --- secrets


def test_the_secret_rotates_and_the_old_one_opens_nothing_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
    refused(tmp_path / "t", "fleet_secret doesn't open .*previous secret", secrets=(NEW,))
    for _ in range(2):
        with tier_in(tmp_path / "t", secrets=(NEW, SECRET)) as tier:
            assert right_or_missing(tier, ACME, prompt(1))
    with tier_in(tmp_path / "t", secrets=(NEW,)) as tier:
        assert right_or_missing(tier, ACME, prompt(1))
    assert caplog.text.count("is sealed under the current secret now: it needs no previous one") == 1
    refused(tmp_path / "t", "fleet_secret doesn't open", secrets=(SECRET,))


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"radixkv tier 1\0\0" + bytes(80), bytes(5000)])
def test_a_damaged_master_is_refused_and_never_read_whole(tmp_path: Path, content: bytes) -> None:
    with tier_in(tmp_path / "t"):
        pass
    (tmp_path / "t" / "master").write_bytes(content)
    refused(tmp_path / "t", "fleet_secret doesn't open")


def test_a_damaged_master_is_told_from_another_secret(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
    master = tmp_path / "t" / "master"
    whole = master.read_bytes()
    for damaged in (flipped(master), whole[:-9], whole + b"x", whole[:40] + bytes(8) + whole[48:]):
        master.write_bytes(damaged)
        with (
            pytest.raises(DamagedMaster, match=r"key file 'master' is damaged.*disk reset"),
            tier_in(tmp_path / "t"),
        ):
            pass
    master.write_bytes(whole)
    with pytest.raises(ConfigError) as refused, tier_in(tmp_path / "t", secrets=(NEW,)):
        pass
    assert not isinstance(refused.value, DamagedMaster)
    with tier_in(tmp_path / "t") as tier:
        assert right_or_missing(tier, ACME, prompt(1)), "a whole copy of it opens the folder"


def test_a_master_of_an_earlier_release_is_opened_and_another_secret_may_be_damage(tmp_path: Path) -> None:
    """It has no checksum."""
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
    master = tmp_path / "t" / "master"
    master.write_bytes(master.read_bytes()[:-8])
    with tier_in(tmp_path / "t") as tier:
        assert right_or_missing(tier, ACME, prompt(1))
    refused(
        tmp_path / "t", r"fleet_secret doesn't open .*\. If it is that one, .* is damaged", secrets=(NEW,)
    )
    with tier_in(tmp_path / "t", secrets=(NEW, SECRET)):
        pass
    with tier_in(tmp_path / "t", secrets=(NEW,)) as tier:
        assert right_or_missing(tier, ACME, prompt(1))
    assert len(master.read_bytes()) > 108, "the rotation has written a checksum"


def test_what_nobody_can_read_any_more_is_removed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        keys = tier.folder.keys("acme")
        assert keys is not None
    damaged = tmp_path / "t" / KEYS / keys.key_id.hex()
    damaged.write_bytes(flipped(damaged))
    with pytest.raises(ConfigError), tier_in(tmp_path / "t", secrets=(NEW,)):
        pass
    assert damaged.exists(), "a refused opening changes nothing"
    for said in (1, 0):
        caplog.clear()
        with tier_in(tmp_path / "t") as tier:
            assert load(tier, ACME, prompt(1)) is None and right_or_missing(tier, GLOBEX, prompt(1))
        assert caplog.text.count("is damaged: the records under that key are lost") == said
    assert not damaged.exists()


# --- purge


def test_after_a_purge_nothing_is_found_also_after_a_restart(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        for number in range(3):
            assert store(tier, ACME, prompt(number)) and store(tier, GLOBEX, prompt(number))
        assert tier.purge("acme") == 3 and tier.purge("nobody") == 0
        assert tier.locate(ACME, prompt(1), 0) == 0 and load(tier, ACME, prompt(1)) is None
        assert all(right_or_missing(tier, GLOBEX, prompt(number)) for number in range(3))
        assert len(tier) == 3
    with tier_in(tmp_path / "t") as tier:
        assert load(tier, ACME, prompt(1)) is None and tier.folder.generation("acme") > 0
        assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))


def test_an_older_slab_with_all_keys_that_are_left_cannot_be_decrypted(tmp_path: Path) -> None:
    """The slab as it was before the purge is put back, and the purged tenant's prompts are known."""
    folder, copy = tmp_path / "t", tmp_path / "copy"
    for round_ in range(max(ATTACKS // 10, 2)):
        with tier_in(folder) as tier:
            assert store(tier, ACME, prompt(round_)) and store(tier, GLOBEX, prompt(round_))
        shutil.copy(folder / "slab", copy)
        with tier_in(folder) as tier:
            tier.purge("acme")
        shutil.copy(copy, folder / "slab")
        with tier_in(folder) as tier:
            assert load(tier, ACME, prompt(round_)) is None and tier.counts()["orphaned"] == 1
            assert right_or_missing(tier, GLOBEX, prompt(round_))
            for keys in tier.folder._keys.values():  # every key that is left, on every record
                for header in tier._slab.headers[tier._slab.headers["magic"] != 0]:
                    assert header["key_id"].tobytes() == keys.key_id


def test_an_older_folder_put_back_is_detected_with_the_generations_of_the_fleet(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
    shutil.copytree(folder, tmp_path / "old")
    with tier_in(folder) as tier:
        assert tier.apply_generations({"acme": 7}) == 1 and tier.apply_generations({"acme": 7}) == 0
    shutil.rmtree(folder)
    (tmp_path / "old").rename(folder)
    with tier_in(folder, awaits_generations=True) as tier:
        assert tier.state == "awaiting-generations"
        assert load(tier, ACME, prompt(1)) is None and tier.locate(ACME, prompt(1), 0) == 0
        assert not store(tier, ACME, prompt(2))
        assert tier.apply_generations({"acme": 7, "globex": 0}) == 1 and tier.state == "open"
        assert load(tier, ACME, prompt(1)) is None and right_or_missing(tier, GLOBEX, prompt(1))


def test_the_next_opening_knows_the_fleets_generation_that_was_learned_last(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    with tier_in(folder) as tier:
        assert tier.folder.fleet_generation("acme") == 0
        tier.learn_generation("acme", 7)
        tier.learn_generation("globex", 2**63 + 5)
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
    shutil.copytree(folder, tmp_path / "old")
    with tier_in(folder) as tier:
        assert (tier.folder.fleet_generation("acme"), tier.folder.fleet_generation("globex")) == (
            7,
            2**63 + 5,
        )
        tier.learn_generation("acme", 8)
        tier.purge("acme")
    with tier_in(folder) as tier:
        assert tier.folder.fleet_generation("acme") == 8, (
            "a purge that isn't the fleet's changes nothing of it"
        )
    shutil.rmtree(folder)
    (tmp_path / "old").rename(folder)
    with tier_in(folder) as tier:
        assert tier.folder.fleet_generation("acme") == 7, "an older folder knows an older one"


@pytest.mark.parametrize(
    "change", ["flip", "cut", "too large", "other tenant's", "other folder's", "removed"]
)
def test_a_wrong_file_of_generations_says_nothing_of_the_fleets(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "t"
    for each in (folder, tmp_path / "other"):
        with tier_in(each) as tier:
            tier.learn_generation("acme", 7)
            tier.learn_generation("globex", 7)
            mine, others = (tier.folder.tag(tenant) for tenant in ("acme", "globex"))
            if each == folder:
                file, theirs = folder / "generations" / mine, folder / "generations" / others
    foreign = tmp_path / "other" / "generations" / mine
    if change == "removed":
        file.unlink()
    else:
        content = {
            "flip": flipped(file),
            "cut": file.read_bytes()[:-1],
            "too large": file.read_bytes() * 100,
            "other tenant's": theirs.read_bytes(),
            "other folder's": foreign.read_bytes(),
        }
        file.write_bytes(content[change])
    with tier_in(folder) as tier:
        assert (tier.folder.fleet_generation("acme"), tier.folder.fleet_generation("globex")) == (0, 7)
        tier.purge("acme")
        tier.learn_generation("acme", 7)
        assert tier.folder.fleet_generation("acme") == 7 and store(tier, ACME, prompt(1))


def test_a_purge_that_fails_makes_the_fleets_generation_unknown(tmp_path: Path) -> None:
    files = FaultyFiles()
    with tier_in(tmp_path / "t", files=files) as tier:
        tier.learn_generation("acme", 7)
        assert store(tier, ACME, prompt(1))
        files.before = failing("write")
        with pytest.raises(OSError, match="Input/output"):
            tier.learn_generation("acme", 8)
        assert tier.folder.fleet_generation("acme") == 0
        files.before = lambda call: None
        tier.learn_generation("acme", 8)
        assert tier.folder.fleet_generation("acme") == 8


@pytest.mark.parametrize("change", ["removed", "flip"])
def test_a_key_of_the_past_stays_useless_if_the_generations_were_damaged_meanwhile(
    tmp_path: Path, change: str
) -> None:
    """Key and slab of long ago are put back when the folder has counted anew."""
    folder = tmp_path / "t"
    with tier_in(folder) as tier:
        tier.purge("acme")
        assert store(tier, ACME, prompt(0)) and tier.purge("acme") == 1, "now there is a file"
        assert store(tier, ACME, prompt(1))
    shutil.copytree(folder / KEYS, tmp_path / "keys")
    shutil.copy(folder / "slab", tmp_path / "slab")
    with tier_in(folder) as tier:
        tier.learn_generation("acme", 7)
    (file,) = (folder / "generations").iterdir()
    file.unlink() if change == "removed" else file.write_bytes(flipped(file))
    with tier_in(folder) as tier:
        tier.learn_generation("acme", 7)
        assert store(tier, ACME, prompt(2))
    shutil.copytree(tmp_path / "keys", folder / KEYS, dirs_exist_ok=True)
    shutil.copy(tmp_path / "slab", folder / "slab")
    with tier_in(folder) as tier:
        assert load(tier, ACME, prompt(1)) is None and tier.folder.fleet_generation("acme") == 7


def test_a_local_purge_does_not_hide_a_later_one_of_the_fleet(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        for _ in range(3):
            tier.purge("acme")
        assert store(tier, ACME, prompt(1)) and tier.apply_generations({"acme": 1}) == 1
        assert load(tier, ACME, prompt(1)) is None


@pytest.mark.parametrize("deed", ["load", "store"])
def test_a_purge_during_a_load_or_a_store_wins(tmp_path: Path, deed: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def before(call: str) -> None:
        if threading.current_thread().name.startswith("radixkv-tier") and call == deed_calls and armed:
            reached.set()
            is_set(go_on)

    armed: list[bool] = []
    deed_calls = {"load": "read", "store": "write"}[deed]
    with tier_in(tmp_path / "t", files=FaultyFiles(before)) as tier:
        assert store(tier, ACME, prompt(1))
        armed.append(True)
        into = bytearray(kv(ACME, prompt(1)))
        if deed == "load":
            job = tier.load(ACME, prompt(1), 0, memoryview(into))
        else:
            job = tier.store(ACME, prompt(2), 0, memoryview(bytes(10)))
        assert job is not None
        is_set(reached)
        armed.clear()
        tier.purge("acme")
        go_on.set()
        assert not job.wait(WAIT_S) and counted(tier, {"stale": 1, "sealed": 0})
        assert deed == "store" or not any(into), "what was decrypted after a purge is zeroed"
        assert load(tier, ACME, prompt(2)) is None
        tier._table.check()
    with tier_in(tmp_path / "t") as tier:
        assert len(tier) == 0


def test_a_record_that_takes_a_purged_slot_at_once_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_slot = {"disk_bytes": 2 * 4096 + 4096 + 128}
    with tier_in(tmp_path / "t", **one_slot) as tier:
        assert store(tier, ACME, prompt(1))
        raised = tier.folder.raise_generation

        def slow(tenant: str, fleet: int | None = None) -> bool:
            done = raised(tenant, fleet)
            assert store(tier, GLOBEX, prompt(1))
            return done

        monkeypatch.setattr(tier.folder, "raise_generation", slow)
        assert tier.purge("acme") == 1 and right_or_missing(tier, GLOBEX, prompt(1))
    with tier_in(tmp_path / "t", **one_slot) as tier:
        assert right_or_missing(tier, GLOBEX, prompt(1))


STEPS = "write sync rename sync_folder remove"


@pytest.mark.parametrize("times", [1, 10**9])
def test_a_purge_that_the_disk_interrupts_anywhere_holds(tmp_path: Path, times: int) -> None:
    """Whether it is repeated in the process, or the folder opened again after a crash in between.

    A disk that fails from the first step on is the exception: then it holds when it is repeated.
    """
    calls = FaultyFiles()
    with tier_in(tmp_path / "count", files=calls) as tier:
        assert store(tier, ACME, prompt(1))
        calls.calls.clear()
        tier.purge("acme")
        most = len([each for each in calls.calls if each in STEPS.split()])
    assert most >= 9
    num_refused = 0
    for after in range(most - 1):
        for again in (True, False):
            folder = tmp_path / f"t{after}{again}"
            files = FaultyFiles()
            with tier_in(folder, files=files) as tier:
                assert store(tier, ACME, prompt(1))
                files.before = failing(STEPS, after=after, times=times)
                try:
                    tier.purge("acme")
                    is_done = True
                except OSError as error:
                    assert error.errno == errno.EIO
                    is_done, num_refused = False, num_refused + 1
                assert load(tier, ACME, prompt(1)) is None, "not served before it is repeated"
                files.before = lambda call: None
                if again:
                    tier.purge("acme")
                if is_done or again:
                    assert tier.folder.generation("acme") > 0
                    assert not list((folder / KEYS).iterdir())
            with tier_in(folder) as tier:
                if not is_done and not again and after == 0 and times > 1:
                    assert right_or_missing(tier, ACME, prompt(1)), "the disk did nothing at all"
                    continue
                assert load(tier, ACME, prompt(1)) is None and not list((folder / KEYS).iterdir())
                assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))
    assert num_refused == (2 * (most - 1) if times > 1 else 8), (
        "what is written again raises only the second time"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk_keeps_no_key(tmp_path: Path) -> None:
    """The generation can't be written, or only after the key's file is gone."""
    with small_disk(tmp_path / "disk") as folder, tier_in(folder / "t") as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        tier.sync()
        fill(folder)
        assert tier.purge("acme") == 1, "the key's space is enough"
        fill(folder)
        assert tier.purge("acme") == 0, "there is nothing to write"
        assert not store(tier, ACME, prompt(1)) and right_or_missing(tier, GLOBEX, prompt(1))
        with pytest.raises(OSError, match="No space left"):
            tier.apply_generations({"acme": 7})
        shutil.copytree(folder / "t", tmp_path / "killed")
        (folder / "fill").unlink()
        assert tier.apply_generations({"acme": 7}) == 0 and store(tier, ACME, prompt(1))
    with tier_in(tmp_path / "killed") as tier:
        assert load(tier, ACME, prompt(1)) is None and right_or_missing(tier, GLOBEX, prompt(1))


def test_a_purge_of_a_tenant_without_a_key_writes_nothing(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert tier.purge("nobody") == 0 and not list((tmp_path / "t" / "generations").iterdir())
        assert store(tier, ACME, prompt(1))
        (file,) = (tmp_path / "t" / KEYS).iterdir()
        content = file.read_bytes()
        assert tier.purge("acme") == 1 and tier.purge("acme") == 0
        file.write_bytes(content)  # an older copy, put back
        assert tier.purge("acme") == 0 and not list((tmp_path / "t" / KEYS).iterdir())


@contextmanager
def small_disk(at: Path) -> Iterator[Path]:
    """A file system of 256 KiB in memory."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(folder: Path) -> None:
    """Take all space that a file system has left."""
    with suppress(OSError), (folder / "fill").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_purge_that_hangs_is_finished_by_the_next_opening(tmp_path: Path, call: str) -> None:
    """The process is killed while the call hangs, so a copy of the folder is what the next one finds."""
    reached, go_on = threading.Event(), threading.Event()

    def hanging(name: str) -> None:
        if name == call:
            reached.set()
            is_set(go_on)

    files = FaultyFiles()
    with tier_in(tmp_path / "t", files=files) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        tier.sync()
        files.before = hanging
        purging = threading.Thread(target=tier.purge, args=("acme",))
        purging.start()
        is_set(reached)
        shutil.copytree(tmp_path / "t", tmp_path / "killed")
        go_on.set()
        ended(purging)
    with tier_in(tmp_path / "killed") as tier:
        assert load(tier, ACME, prompt(1)) is None and right_or_missing(tier, GLOBEX, prompt(1))
        assert tier.folder.generation("acme") > 0
        assert len(list((tmp_path / "killed" / KEYS).iterdir())) == 1
        assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))


def test_a_purge_after_the_close_is_refused(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
        tier.close()
        for call in (lambda: tier.purge("acme"), tier.purge_all, lambda: tier.apply_generations({"acme": 1})):
            with pytest.raises(TierError, match="closed: open it again, then purge"):
                call()
    with tier_in(tmp_path / "t") as tier:
        assert right_or_missing(tier, ACME, prompt(1)), "a refused call changes nothing"


def test_a_purge_of_all_that_failed_is_done_when_it_is_repeated(tmp_path: Path) -> None:
    files, keys = FaultyFiles(), tmp_path / "t" / KEYS
    with tier_in(tmp_path / "t", files=files) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        tier.sync()
        files.before = failing("write sync rename remove")
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                tier.purge_all()
        assert len(list(keys.iterdir())) == 2
        files.before = lambda call: None
        assert tier.purge_all() and not list(keys.iterdir())
    with tier_in(tmp_path / "t") as tier:
        assert load(tier, ACME, prompt(1)) is None and load(tier, GLOBEX, prompt(1)) is None


@pytest.mark.parametrize("bad", ["acme", "globex"])
def test_a_tenant_that_cannot_be_purged_holds_up_no_other(
    tmp_path: Path, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        purge_tag = tier.purge_tag

        def failing_for_one(tag: str) -> int:
            if tag == tier.folder.tag(bad):
                raise OSError(errno.EIO, "planted")
            return purge_tag(tag)

        monkeypatch.setattr(tier, "purge_tag", failing_for_one)
        with pytest.raises(OSError, match="planted"):
            tier.purge_all()
        assert right_or_missing(tier, ACME, prompt(1)) == (bad == "acme")
        assert right_or_missing(tier, GLOBEX, prompt(1)) == (bad == "globex")


# --- the store of the fleet's purges


def test_another_store_forgets_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        assert tier.folder.store is None
        tier.meet_store("a" * 32)
        assert right_or_missing(tier, ACME, prompt(1)), "the first store is taken as it is"
    with tier_in(tmp_path / "t", awaits_generations=True) as tier:
        tier.meet_store("a" * 32)
        tier.apply_generations({})
        assert right_or_missing(tier, ACME, prompt(1)) and not caplog.records
        tier.meet_store("b" * 32)
        assert "may lack purges: the disk forgets everything" in caplog.text
        assert tier.state == "awaiting-generations" and tier.folder.store == "b" * 32
        tier.apply_generations({})
        assert load(tier, ACME, prompt(1)) is None and load(tier, GLOBEX, prompt(1)) is None
        assert store(tier, ACME, prompt(1))
    with tier_in(tmp_path / "t") as tier:
        assert tier.folder.store == "b" * 32 and right_or_missing(tier, ACME, prompt(1))


def test_another_store_stays_closed_until_all_is_forgotten(tmp_path: Path) -> None:
    files = FaultyFiles()
    with tier_in(tmp_path / "t", files=files) as tier:
        assert store(tier, ACME, prompt(1))
        tier.meet_store("a" * 32)
        files.before = failing("write sync rename remove")
        with pytest.raises(OSError, match="Input/output error"):
            tier.meet_store("b" * 32)
        assert tier.state == "awaiting-generations" and tier.folder.store == "a" * 32
        assert tier.locate(ACME, prompt(1), 0) == 0 and load(tier, ACME, prompt(1)) is None
        files.before = lambda call: None
    with tier_in(tmp_path / "t", awaits_generations=True) as tier:
        assert tier.folder.store == "a" * 32, "so the next process forgets too"


@pytest.mark.parametrize("change", ["flip", "empty", "copied"])
def test_a_damaged_note_of_the_store_forgets_everything(tmp_path: Path, change: str) -> None:
    for name in ("t", "other"):
        with tier_in(tmp_path / name) as tier:
            assert store(tier, ACME, prompt(1))
            tier.meet_store("a" * 32)
    file = tmp_path / "t" / "store"
    content = {"flip": flipped(file), "empty": b"", "copied": (tmp_path / "other" / "store").read_bytes()}
    file.write_bytes(content[change])
    with tier_in(tmp_path / "t") as tier:
        assert tier.folder.store == ""
        tier.meet_store("a" * 32)
        tier.apply_generations({})
        assert load(tier, ACME, prompt(1)) is None and tier.folder.store == "a" * 32


def test_a_damaged_generation_serves_nothing_until_a_purge(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(2))
        tier.purge("acme")
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
    (file,) = (tmp_path / "t" / "generations").iterdir()
    file.write_bytes(flipped(file))
    with tier_in(tmp_path / "t") as tier:
        assert load(tier, ACME, prompt(1)) is None and not store(tier, ACME, prompt(1))
        assert counted(tier, {"damaged": 1}) and right_or_missing(tier, GLOBEX, prompt(1))
        tier.purge("acme")
        assert load(tier, ACME, prompt(1)) is None and store(tier, ACME, prompt(1))
        assert right_or_missing(tier, ACME, prompt(1))
        assert len(list((tmp_path / "t" / KEYS).iterdir())) == 2


@pytest.mark.parametrize("change", ["flip", "empty", "other tenant's", "removed"])
def test_a_damaged_key_loses_its_records_alone(tmp_path: Path, change: str) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        keys = tier.folder.keys("acme"), tier.folder.keys("globex")
    mine, other = (tmp_path / "t" / KEYS / each.key_id.hex() for each in keys if each is not None)
    if change == "removed":
        mine.unlink()
    else:
        content = {"flip": flipped(mine), "empty": b"", "other tenant's": other.read_bytes()}
        mine.write_bytes(content[change])
    with tier_in(tmp_path / "t") as tier:
        assert load(tier, ACME, prompt(1)) is None and right_or_missing(tier, GLOBEX, prompt(1))
        assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))


def test_a_record_under_a_key_of_another_generation_is_refused(tmp_path: Path) -> None:
    """The generation's file is removed: the folder counts from 0 again, with a new random key."""
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(2))
        tier.purge("acme")
        assert store(tier, ACME, prompt(1))
    (file,) = (tmp_path / "t" / "generations").iterdir()
    file.unlink()
    with tier_in(tmp_path / "t") as tier:
        assert load(tier, ACME, prompt(1)) is None and store(tier, ACME, prompt(1))
        assert right_or_missing(tier, ACME, prompt(1))


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All there is in a folder, by path: its mode and its bytes."""
    return {
        str(each.relative_to(folder)): (each.stat().st_mode, b"" if each.is_dir() else each.read_bytes())
        for each in (folder, *folder.rglob("*"))
    }


@pytest.mark.parametrize("inner", [KEYS, "generations"])
@pytest.mark.parametrize("name", ["notes", "0" * 31, "0" * 32 + "~", "A" * 32, ".new", ".gone", "lock"])
def test_foreign_names_in_the_folders_of_keys_are_refused_and_left_alone(
    tmp_path: Path, inner: str, name: str
) -> None:
    folder = tmp_path / "t"
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1))
    (folder / inner / name).write_text("mine")
    before = state_of(folder)
    refused(folder, f"a disk tier's files alone; it has '{inner}/{name}'")
    for act in (inspection.forget, lambda path: inspection.inspect(path, [SECRET], repair=True)):
        with pytest.raises(ConfigError, match=f"it has '{inner}/{name}'"):
            act(folder)
    assert state_of(folder) == before
    (folder / inner / name).unlink()
    with tier_in(folder) as tier:
        assert right_or_missing(tier, ACME, prompt(1))


def test_what_a_crash_leaves_in_the_folders_of_keys_is_not_foreign(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
    (tmp_path / "t" / KEYS / ("0" * 32 + ".new")).write_text("half")
    (tmp_path / "t" / KEYS / ("0" * 32 + ".gone")).write_text("destroyed")
    (tmp_path / "t" / "generations" / ("0" * 32)).mkdir()
    with tier_in(tmp_path / "t") as tier:
        assert right_or_missing(tier, ACME, prompt(1))


def test_files_that_others_could_read_become_private_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "t"
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        tier.purge("globex")
    (key,), (generation,) = ((folder / name).iterdir() for name in (KEYS, "generations"))
    private = {path: mode for path, (mode, _) in state_of(folder).items()}
    others = [folder / KEYS / ("0" * 31 + digit) for digit in "123"]
    for path in (key, generation, folder / "master", folder / "slab", *others):
        path.touch()
        path.chmod(0o644)
    (folder / KEYS).chmod(0o755)
    with tier_in(folder) as tier:
        assert right_or_missing(tier, ACME, prompt(1))
    now = {path: mode for path, (mode, _) in state_of(folder).items()}
    assert {path: now[path] for path in private} == private
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folder.rglob("*"))
    warned = sorted(message for each in caplog.records if "rights" in (message := each.getMessage()))
    assert len(warned) == 3, "one for each folder"
    assert f"{generation} (mode 0644) and 0 more had rights for others" in warned[0]
    assert warned[1].startswith(f"{folder}/keys/") and "(mode 0644) and 3 more had" in warned[1]
    assert warned[2].startswith(f"{folder}/") and "and 2 more had rights for others" in warned[2]


# --- a refusal changes nothing


@pytest.mark.parametrize("deed", ["open", "resize", "check", "repair", "forget"])
def test_a_wrong_secret_changes_nothing(tmp_path: Path, deed: str) -> None:
    folder = tmp_path / "t"
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        tier.purge("globex")
    shutil.rmtree(folder / "generations")  # it isn't made again either
    (folder / "master").chmod(0o644)
    before = state_of(folder)
    deeds = {
        "open": lambda: DiskRecords(settings(folder), [NEW]),
        "resize": lambda: DiskRecords(settings(folder, record_bytes=601), [NEW]),
        "check": lambda: inspection.inspect(folder, [NEW]),
        "repair": lambda: inspection.inspect(folder, [NEW], repair=True),
        "forget": lambda: inspection.forget_tenant(folder, [NEW], "acme"),
    }
    with pytest.raises(ConfigError, match="fleet_secret doesn't open"):
        deeds[deed]()
    assert state_of(folder) == before


REFUSED_SIZES = {
    "less than a record": {"disk_bytes": 4096},
    "more than slots": {"disk_bytes": 2**62},
    "more than the disk": {"disk_bytes": 2**50, "record_bytes": 2**30},
    "more than it takes": {"files": FaultyFiles(failing("allocate", errno.ENOSPC))},
    "more than its quota": {"files": FaultyFiles(failing("allocate", errno.EDQUOT))},
}


@pytest.mark.parametrize("size", REFUSED_SIZES)
@pytest.mark.parametrize("has_folder", [True, False])
def test_a_refused_size_leaves_a_new_folder_as_it_was(tmp_path: Path, size: str, has_folder: bool) -> None:
    if has_folder:
        (tmp_path / "t").mkdir(mode=0o700)
    before = state_of(tmp_path)
    refused(tmp_path / "t", "disk_bytes=", **REFUSED_SIZES[size])
    assert state_of(tmp_path) == before
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))


def test_a_refused_size_keeps_the_records_that_are_there(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
    before = state_of(tmp_path)
    refused(tmp_path / "t", "disk_bytes=.*bytes are free", disk_bytes=2**50, record_bytes=2**30)
    after = state_of(tmp_path)
    assert before.pop("t/lock") != after.pop("t/lock") and after == before, "the lock has the last opening"
    with tier_in(tmp_path / "t") as tier:
        assert right_or_missing(tier, ACME, prompt(1))


def test_a_slab_whose_headers_do_not_fit_in_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(num_bytes: int) -> bytearray:
        raise MemoryError

    monkeypatch.setattr("radixkv.tiers.disk.slab.bytearray", scarce, raising=False)
    refused(tmp_path / "t", "disk_bytes=.*headers fit in memory, 128 bytes a record")
    assert not (tmp_path / "t").exists()


def test_looking_at_an_empty_folder_leaves_it_empty(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="a folder that a disk tier has used"):
        inspection.inspect(tmp_path / "t", [SECRET])
    assert not list((tmp_path / "t").iterdir())


def test_a_refusal_removes_nothing_of_a_process_that_came_first(tmp_path: Path) -> None:
    """Both found the folder empty, where flock does nothing, or the lock was removed between open and flock."""
    first, folder = FaultyFiles(), tmp_path / "t"
    opened: list[DiskRecords] = []

    def overtaken(call: str) -> None:
        if call == "allocate" and not opened:
            opened.append(DiskRecords(settings(folder), [SECRET]))
            assert store(opened[0], ACME, prompt(1))
            raise OSError(errno.ENOSPC, "full")

    first.before = overtaken
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixkv.files.private_folder.fcntl.flock", lambda *_: None)
        refused(folder, "has space", files=first)
    opened[0].close()
    with tier_in(folder) as tier:
        assert right_or_missing(tier, ACME, prompt(1))


def test_a_lock_that_was_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "radixkv.files.private_folder.fcntl.flock", lambda *_: (tmp_path / "t" / "lock").unlink()
    )
    refused(tmp_path / "t", "a folder that no other process uses")


def test_a_folder_that_was_never_used_is_not_made_to_look_at_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder that a disk tier has used"):
        TierFolder(tmp_path / "t", [SECRET])


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        tier.close()
        assert tier.state == "closed" and load(tier, ACME, prompt(1)) is None
        assert isinstance(tier, DiskRecords)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_purge_marks_the_key_before_it_reads_anything(tmp_path: Path, code: int) -> None:
    """The tenant's generation can't be read, and the process is killed: the next one finds no record of it."""

    class Unread(FaultyFiles):
        is_armed = False

        def open(self, name: str, flags: int, folder: int | None) -> int:
            if self.is_armed and folder == tier.folder._in_generations and not flags & os.O_CREAT:
                raise OSError(code, os.strerror(code))
            return super().open(name, flags, folder)

    files = Unread()
    tier = DiskRecords(settings(tmp_path / "t"), [SECRET], files=files)
    assert store(tier, ACME, prompt(1))
    tier.purge("acme")  # there is a generation to read from now on
    assert store(tier, ACME, prompt(2)) and store(tier, GLOBEX, prompt(2))
    tier.sync()
    files.is_armed = True
    with pytest.raises(OSError, match=os.strerror(code)):
        tier.purge("acme")
    assert load(tier, ACME, prompt(2)) is None and not store(tier, ACME, prompt(3))
    shutil.copytree(tmp_path / "t", tmp_path / "killed")
    (tmp_path / "killed").chmod(0o700)
    with tier_in(tmp_path / "killed") as other:
        assert load(other, ACME, prompt(2)) is None and right_or_missing(other, GLOBEX, prompt(2))
    files.is_armed = False
    tier.purge("acme")
    assert store(tier, ACME, prompt(3)) and right_or_missing(tier, ACME, prompt(3))
    tier.close()


def test_one_tenants_generation_opens_no_tier_that_is_closed_to_all(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t", awaits_generations=True) as tier:
        tier.learn_generation("globex", 3)
        assert tier.state == "awaiting-generations" and not store(tier, ACME, prompt(1))
        tier.apply_generations({"globex": 3})
        assert tier.state == "open" and store(tier, ACME, prompt(1))
        tier.meet_store("one")
        tier.meet_store("another")
        tier.learn_generation("acme", 1)
        assert tier.state == "awaiting-generations"


def test_all_is_forgotten_also_of_a_tenant_whose_keys_are_made_meanwhile(tmp_path: Path) -> None:
    gate, begun = threading.Event(), threading.Event()

    def hold(job: object, memory: memoryview) -> bool:
        begun.set()
        return gate.wait(WAIT_S)

    with tier_in(tmp_path / "t", num_threads=1) as tier:
        tier.meet_store("one")
        assert tier._io.submit(hold, is_load=True)
        is_set(begun)
        job = tier.store(ACME, prompt(1), 0, memoryview(kv(ACME, prompt(1))))
        tier.meet_store("another")
        gate.set()
        assert job is not None and not job.wait(WAIT_S) and counted(tier, {"stale": 1})
        tier.apply_generations({})
        assert load(tier, ACME, prompt(1)) is None
        assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))


# --- notes of generations, kept outside of the folder


class Notes(dict[str, bytes]):
    """What a store keeps of a folder: it survives when an older copy of the folder is put back."""

    def compare(self, tier: DiskRecords) -> int:
        """What a process does first. Returns how many tenants have to be forgotten."""
        num_older = tier.compare_notes({tag: self.get(tag) for tag in tier.folder.purged_tags()})
        self.take(tier)
        return num_older

    def take(self, tier: DiskRecords) -> int:
        """Keep what the tier has to note. Returns of how many tenants."""
        notes = tier.folder.unnoted()
        self.update(notes)
        tier.folder.noted(notes)
        assert not tier.folder.has_unnoted and not tier.folder.unnoted()
        return len(notes)


def put_back(old: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(old, folder)


def test_an_older_copy_forgets_the_tenants_that_were_purged_since(tmp_path: Path) -> None:
    folder, notes = tmp_path / "t", Notes()
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        assert notes.compare(tier) == notes.take(tier) == 0, "nothing was purged"
    shutil.copytree(folder, tmp_path / "oldest")
    with tier_in(folder) as tier:
        tier.purge("acme")
        assert notes.take(tier) == 1
        assert store(tier, ACME, prompt(2))
        folder_id = tier.folder.id
    shutil.copytree(folder, tmp_path / "older")
    with tier_in(folder) as tier:
        assert notes.compare(tier) == 0
        assert right_or_missing(tier, ACME, prompt(2))
        tier.purge("acme")
        notes.take(tier)
    for old in ("oldest", "older"):
        put_back(tmp_path / old, folder)
        with tier_in(folder) as tier:
            assert tier.folder.id == folder_id and notes.compare(tier) == 1
            assert load(tier, ACME, prompt(1)) is load(tier, ACME, prompt(2)) is None
            assert right_or_missing(tier, GLOBEX, prompt(1)), "only what was purged"
            assert store(tier, ACME, prompt(3))
        with tier_in(folder) as tier:
            assert notes.compare(tier) == 0 and right_or_missing(tier, ACME, prompt(3)), "once is enough"
    with tier_in(tmp_path / "another") as tier:
        assert tier.folder.id != folder_id


def test_a_tenant_without_keys_in_an_older_copy_is_compared_too(tmp_path: Path) -> None:
    folder, notes = tmp_path / "t", Notes()
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1))
        tier.purge("acme")
    shutil.copytree(folder, tmp_path / "old")
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1))
        assert notes.compare(tier) == 0 and len(notes) == 1, "what an earlier process could not note"
        tier.purge("acme")
        notes.take(tier)
    put_back(tmp_path / "old", folder)
    with tier_in(folder) as tier:
        assert notes.compare(tier) == 1 and store(tier, ACME, prompt(2))
    with tier_in(folder) as tier:
        assert notes.compare(tier) == 0 and right_or_missing(tier, ACME, prompt(2))


@pytest.mark.parametrize("forged", ["torn", "another tenant's", "another folder's", "nothing"])
def test_a_note_that_no_folder_made_counts_as_none(tmp_path: Path, forged: str) -> None:
    """A writer to the store can't let a disk forget, nor make its generation unusable."""
    notes, other = Notes(), Notes()
    with tier_in(tmp_path / "t") as tier, tier_in(tmp_path / "other") as stranger:
        for each, kept in ((tier, notes), (stranger, other)):
            assert store(each, ACME, prompt(1)) and store(each, GLOBEX, prompt(1))
            each.purge("globex")
            kept.take(each)
        ((_, note),) = notes.items()
        content = {"torn": note[:-1], "another tenant's": note, "nothing": b""}
        bad = content.get(forged, next(iter(other.values())))
        assert tier.compare_notes({tier.folder.tag("acme"): bad}) == 0
        assert right_or_missing(tier, ACME, prompt(1))


def test_an_older_copy_that_cannot_forget_tries_all_and_again(tmp_path: Path) -> None:
    folder, notes, files = tmp_path / "t", Notes(), FaultyFiles()
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
    shutil.copytree(folder, tmp_path / "old")
    with tier_in(folder) as tier:
        tier.purge_all()
        assert notes.take(tier) == 2
    put_back(tmp_path / "old", folder)
    with tier_in(folder, files=files) as tier:
        files.before = failing("write sync rename remove")
        with pytest.raises(OSError, match="Input/output error"):
            notes.compare(tier)
        assert load(tier, ACME, prompt(1)) is load(tier, GLOBEX, prompt(1)) is None
        files.before = lambda call: None
        assert notes.compare(tier) == 2
