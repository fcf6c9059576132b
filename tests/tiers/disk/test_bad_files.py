"""Bad files in a disk tier's folder: each is refused or harms its tenant alone. None is waited for."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.files.system import Files, aligned
from radixkv.signing import read_secret
from radixkv.tiers.disk import inspection, io_threads
from radixkv.tiers.disk.io_threads import MOST_LOADS, IOThreads, Job
from radixkv.tiers.disk.records import DiskRecords
from radixkv.tiers.settings import disk_errors
from tests.tiers.support import (
    ACME,
    GLOBEX,
    SECRET,
    WAIT_S,
    FaultyFiles,
    failing,
    load,
    prompt,
    settings,
    store,
    tier_in,
)

BAD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to("/dev/null"),
    "folder": Path.mkdir,
}


def used(folder: Path) -> str:
    """Make a folder with a record of acme and one of globex. Returns the name of acme's key."""
    with tier_in(folder) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        keys = tier.folder.keys("acme")
        assert keys is not None
        return keys.key_id.hex()


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_key_file_harms_its_tenant_alone(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "t"
    key = folder / "keys" / used(folder)
    key.unlink()
    BAD[kind](key)
    with tier_in(folder) as tier:
        assert load(tier, ACME, prompt(1)) is None and load(tier, GLOBEX, prompt(1)) is not None


@pytest.mark.parametrize("kind", BAD)
def test_forget_and_repair_go_on_to_the_end(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "t"
    used(folder)
    (bad := folder / "keys" / ("0" * 32)).parent.mkdir(exist_ok=True)
    BAD[kind](bad)
    if kind == "folder":
        with pytest.raises(IsADirectoryError):
            inspection.inspect(folder, [SECRET], repair=True)
        with pytest.raises(IsADirectoryError):
            inspection.forget(folder)
        assert [each.name for each in (folder / "keys").iterdir()] == [bad.name]
    else:
        assert inspection.inspect(folder, [SECRET], repair=True).num_damaged_tenants == 1
        BAD[kind](bad)  # again: the repair has removed it
        inspection.forget(folder)
        assert not list((folder / "keys").iterdir())
    assert not (folder / "slab").exists() and not (folder / "master").exists()


class UnreadableName(Files):
    """Files of which one can't be read."""

    name = ""

    def open(self, name: str, flags: int, folder: int | None) -> int:
        if name == self.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return super().open(name, flags, folder)


def test_a_key_that_the_disk_does_not_read_harms_its_tenant_alone(tmp_path: Path) -> None:
    files = UnreadableName()
    files.name = used(tmp_path / "t")
    with tier_in(tmp_path / "t", files=files) as tier:
        assert load(tier, ACME, prompt(1)) is None and load(tier, GLOBEX, prompt(1)) is not None


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", ["slab", "lock", "master"])
def test_bad_files_of_the_folder_are_errors_at_once(tmp_path: Path, kind: str, name: str) -> None:
    folder = tmp_path / "t"
    used(folder)
    (folder / name).unlink()
    BAD[kind](folder / name)
    with pytest.raises((ConfigError, OSError)):
        DiskRecords(settings(folder), [SECRET])
    with pytest.raises((ConfigError, OSError)):
        inspection.inspect(folder, [SECRET])
    assert not (folder / "slab.new").exists()


def test_a_secret_that_is_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret")
    with pytest.raises(ConfigError, match="regular file"):
        read_secret("--fleet-secret", str(tmp_path / "secret"))


def test_a_refused_size_leaves_no_file_and_is_shown_as_it_was_given(tmp_path: Path) -> None:
    given = 2**50 + 1  # no whole records
    with pytest.raises(ConfigError, match=rf"^disk_bytes={given} .* has space"):
        DiskRecords(settings(tmp_path / "a", disk_bytes=given, record_bytes=2**30), [SECRET])
    files = FaultyFiles()
    files.before = failing("allocate", errno.ENOSPC)
    with pytest.raises(ConfigError, match=r"^disk_bytes=81920 .* has space"):
        DiskRecords(settings(tmp_path / "b", disk_bytes=81_920), [SECRET], files=files)
    assert not list(tmp_path.glob("*/slab*"))


def test_below_an_engine_a_refused_size_is_shown_as_it_was_given(tmp_path: Path) -> None:
    files = FaultyFiles(failing("allocate", errno.ENOSPC))
    refused = pytest.raises(ConfigError, match=r"^disk_size='80kiB' is not allowed; allowed: .* has space")
    with refused, disk_errors(tmp_path / "a", "80kiB"):
        DiskRecords(settings(tmp_path / "a", disk_bytes=80 * 1024), [SECRET], files=files)
    refused = pytest.raises(ConfigError, match=r"^disk='.*/b' is not allowed; allowed: an empty folder")
    (tmp_path / "b").mkdir(mode=0o700)
    (tmp_path / "b" / "other").touch()
    with refused, disk_errors(tmp_path / "b", "80kiB"):
        DiskRecords(settings(tmp_path / "b"), [SECRET])


def test_a_slab_of_another_size_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used(tmp_path / "t")
    with caplog.at_level(logging.WARNING), tier_in(tmp_path / "t", record_bytes=601) as tier:
        assert len(tier) == 0 and "all its records are lost" in caplog.text


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    for look in (
        lambda path: inspection.inspect(path, [SECRET]),
        lambda path: inspection.forget_tenant(path, [SECRET], "acme"),
    ):
        with pytest.raises(ConfigError, match="there is none"):
            look(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_slash_at_the_end_follows_no_link(tmp_path: Path) -> None:
    used(tmp_path / "t")
    (tmp_path / "link").symlink_to(tmp_path / "t")
    with pytest.raises(ConfigError, match="symbolic link"):
        DiskRecords(settings(f"{tmp_path}/link/"), [SECRET])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        {"sync_s": "5"},
        {"awaits_generations": "no"},
        {"fingerprint": "f" * 32},
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        settings(tmp_path / "t", **bad)


def test_headers_are_written_again_after_a_failed_sync(tmp_path: Path) -> None:
    folder, files = tmp_path / "t", FaultyFiles()
    with tier_in(folder, files=files) as tier:
        assert store(tier, ACME, prompt(1))
        files.before = failing("sync", times=1)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            tier.sync()
        with (folder / "slab").open("r+b") as file:  # the system drops what it couldn't write
            file.seek(4096)
            file.write(bytes(4096))
        tier.sync()
    with tier_in(folder) as tier:
        assert load(tier, ACME, prompt(1)) is not None


def test_a_store_has_its_turn_among_loads() -> None:
    order: list[str] = []

    def named(name: str) -> Callable[[Job, memoryview], bool]:
        def work(_job: Job, _memory: memoryview) -> bool:
            order.append(name)
            return True

        return work

    threads, go = IOThreads(1, 4096), Job(lambda _job, _memory: True)
    first = threads.submit(lambda _job, _memory: go.wait_for_memory(WAIT_S), is_load=True)
    jobs = [threads.submit(named("load"), is_load=True) for _ in range(3 * MOST_LOADS)]
    jobs.append(threads.submit(named("store"), is_load=False))
    go.end(True)
    assert first is not None and all(job is not None and job.wait(WAIT_S) for job in jobs)
    assert order.index("store") <= MOST_LOADS
    assert threads.close()


def test_a_thread_without_memory_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [1]

    def scarce(num_bytes: int) -> memoryview:
        if left:
            left.pop()
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return aligned(num_bytes)

    monkeypatch.setattr(io_threads, "aligned", scarce)
    threads = IOThreads(1, 4096)
    first, second = (threads.submit(lambda _job, _memory: True, is_load=True) for _ in range(2))
    assert first is not None and not first.wait(WAIT_S)
    assert second is not None and second.wait(WAIT_S)
    assert threads.close()


@pytest.mark.parametrize("name", ["", "a" * 100_000, "\udcff"])
def test_names_that_no_tenant_can_have_change_nothing(tmp_path: Path, name: str) -> None:
    used(tmp_path / "t")
    with pytest.raises(ConfigError, match="a name that a tenant can have"):
        inspection.forget_tenant(tmp_path / "t", [SECRET], name)
    assert not list((tmp_path / "t" / "generations").iterdir())
