"""A disk that is damaged, read-only or new at the start: the service says it, and serves."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from radixkv.cli.main import commands
from radixkv.errors import ConfigError, TierError
from radixkv.files.system import Files
from radixkv.service.banner import banner
from radixkv.service.options import ServeSettings
from tests.service.running import Running, service_in_thread
from tests.service.test_tiers_served import ask, metric, tier_options, with_files

pytestmark = pytest.mark.slow


def filled(folder: Path) -> dict[str, str]:
    """Serve once, so that the folder has records. Returns the options."""
    options = tier_options(folder)
    with service_in_thread(**options) as live:
        assert ask(live.acme)[1] == 0
    return options


def is_without_disk(live: Running) -> bool:
    """Whether a service serves, and says everywhere that it has no disk."""
    health = live.operator.get("/healthz").json()
    assert health["status"] == "ok"
    (warning,) = health["warnings"]
    assert warning.startswith("tiers: disk can't be used")
    assert live.operator.get("/readyz").status_code == 200
    assert (
        metric(live.operator, "capacity_blocks", "disk") == 0 < metric(live.operator, "errors_total", "disk")
    )
    assert live.operator.get("/v1/stats").json()["tiers"]["disk"]["open"] == 0
    return metric(live.operator, "open", "disk") == 0 and metric(live.operator, "open", "host") == 1


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(content: bytes) -> bytes:
    return content[:60] + bytes([content[60] ^ 1]) + content[61:]


@pytest.mark.parametrize("damage", [cut, flip, lambda _: b"", lambda content: bytes(len(content))])
def test_a_damaged_key_file_costs_hits_until_the_folder_is_reset(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    options = filled(tmp_path)
    folder = Path(options["disk"])
    master = folder / "master"
    whole = master.read_bytes()
    master.write_bytes(damage(whole))
    with service_in_thread(**options) as live:
        assert is_without_disk(live) and ask(live.acme)[1] == 0
        assert "key file 'master' is damaged" in caplog.text
        assert f"`radixkv disk reset {folder}`" in caplog.text
        assert live.operator.post("/v1/tenants/acme/purge").json()["owed"] is False, "nothing can be read"
        assert "can't be used, see the log" in banner(ServeSettings.parse(options), live.service, live.url)
    kept = sorted(each.relative_to(folder) for each in folder.rglob("*"))
    said = CliRunner().invoke(commands, ["disk", "reset", str(folder)], input="n\n")
    assert said.exit_code == 1 and kept == sorted(each.relative_to(folder) for each in folder.rglob("*"))
    for shown in ("master ", "keys/ ", "slab ", "1 file", "Delete all of it?"):
        assert shown in said.output
    assert CliRunner().invoke(commands, ["disk", "reset", str(folder), "--yes"]).exit_code == 0
    assert not [each for each in folder.rglob("*") if each.is_file() and each.name != "lock"]
    caplog.clear()
    for cached in (0, 1):
        with service_in_thread(**options) as live:
            assert live.operator.get("/healthz").json()["warnings"] == []
            assert (ask(live.acme)[1] > 0) == bool(cached)
    assert not [each for each in caplog.records if each.name == "radixkv.tiers"]


def test_another_secret_is_no_damage(tmp_path: Path) -> None:
    options = filled(tmp_path)
    Path(options["fleet-secret"]).write_text("t" * 40)
    with (
        pytest.raises(ConfigError, match="fleet_secret doesn't open") as refused,
        service_in_thread(**options),
    ):
        pass
    assert "damaged" not in str(refused.value)


def test_a_missing_key_file_is_cleaned_up_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = filled(tmp_path)
    folder = Path(options["disk"])
    (folder / "master").unlink()
    (old,) = (folder / "keys").iterdir()
    with service_in_thread(**options) as live:
        assert "key file 'master' is missing" in caplog.text and not old.exists()
        assert ask(live.acme)[1] == 0 and live.operator.get("/healthz").json()["warnings"] == []
    caplog.clear()
    with service_in_thread(**options) as live:
        assert ask(live.acme)[1] > 0
    assert not [each for each in caplog.records if each.name == "radixkv.tiers"]


class ReadOnly(Files):
    """A disk that was mounted read-only."""

    def open(self, name: str, flags: int, folder: int | None) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        return super().open(name, flags, folder)

    def make_folder(self, name: str, folder: int | None) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_read_only_disk_costs_hits_until_the_next_start(
    tmp_path: Path, is_new: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = tier_options(tmp_path) if is_new else filled(tmp_path)
    with with_files(options, ReadOnly()) as live:
        assert is_without_disk(live) and ask(live.acme)[1] == 0
        assert "Read-only file system" in caplog.text
    with service_in_thread(**options) as live:
        assert (ask(live.acme)[1] > 0) != is_new, "the records are still there"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_file_system_that_is_mounted_read_only(tmp_path: Path) -> None:
    """A real one, once with the folder and once without."""
    place = tmp_path / "mounted"
    place.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=128m,mode=0700", "none", str(place)]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    try:
        options = {**tier_options(tmp_path), "disk": str(place / "kv")}
        for is_there in (False, True):
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            with service_in_thread(**options) as live:
                assert is_without_disk(live) and ask(live.acme)[1] == 0
            subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
            with service_in_thread(**options) as live:
                assert (ask(live.acme)[1] > 0) == is_there
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_purge_beside_a_read_only_disk_stays_pending(tmp_path: Path) -> None:
    options = filled(tmp_path)
    left_undone = pytest.raises(TierError, match=r"2 purged or cleared tenants \('acme', 'globex'\)")
    with left_undone, with_files(options, ReadOnly()) as live:
        assert live.operator.post("/v1/tenants/acme/purge").json()["owed"] is True
        assert metric(live.operator, "owed_purges", "disk") == 1
        assert live.globex.delete("/v1/cache").json()["owed"] is True
        assert metric(live.operator, "owed_purges", "disk") == 2


def test_a_new_file_system_is_taken(tmp_path: Path) -> None:
    options = tier_options(tmp_path)
    folder = Path(options["disk"])
    (folder / "lost+found").mkdir(parents=True, mode=0o755)
    folder.chmod(0o700)
    for cached in (0, 1):
        with service_in_thread(**options) as live:
            assert (ask(live.acme)[1] > 0) == bool(cached)
    assert CliRunner().invoke(commands, ["disk", "reset", str(folder), "--yes"]).exit_code == 0
    assert (folder / "lost+found").stat().st_mode & 0o777 == 0o755, "it is left alone"


def test_a_check_of_the_settings_warns_of_another_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while a service uses the folder."""
    options = tier_options(tmp_path)
    with service_in_thread(**options):
        for size, is_other in (("64MiB", False), ("32MiB", True)):
            caplog.clear()
            file = tmp_path / "radixkv.yaml"
            lines = [f"{name}: {value}" for name, value in {**options, "disk-size": size}.items()]
            file.write_text("\n".join(lines))
            done = CliRunner().invoke(commands, ["config", "check", str(file)])
            assert done.exit_code == 0, done.output
            assert ("the next start drops all records" in caplog.text + done.output) == is_other


@pytest.mark.parametrize(("setting", "value"), [("disk-size", "32MiB"), ("block-size", "32")])
def test_what_another_size_drops_is_said_before(
    tmp_path: Path,
    setting: str,
    value: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = filled(tmp_path)
    slab = Path(options["disk"]) / "slab"
    before, said = slab.stat().st_ino, list[bool]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "all its records are lost" in record.getMessage():
                said.append(slab.stat().st_ino == before)

    monkeypatch.setattr(logging.getLogger("radixkv.tiers"), "handlers", [Listener()])
    with caplog.at_level(logging.WARNING), service_in_thread(**{**options, setting: value}) as live:
        assert ask(live.acme)[1] == 0
    assert said == [True]
    shown = CliRunner().invoke(commands, ["serve", "--help"]).output
    assert "drops all its records" in " ".join(shown.split())
