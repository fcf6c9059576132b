"""``radixkv serve --tier-dtype int8 --disk``: KV with 8 bits a value outlive a restart, of this dtype alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from radixkv.cli import main as cli
from radixkv.engines import EngineSettings, find_engine
from radixkv.errors import ConfigError
from radixkv.files.private_folder import OLD_DISKS, PrivateFolder
from radixkv.service.options import ServeSettings
from radixkv.tiers.settings import TierSettings
from tests.redis_server import RedisServer
from tests.service.running import KEYS, Process, Running, client, served, service_in_thread
from tests.service.test_tiers_served import ask, evict_all, loaded_of, metric
from tests.waiting import LIMIT_S, eventually

pytestmark = pytest.mark.slow

SECRET = "s" * 40


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the fleet's secret, and keys."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    write_keys(tmp_path)
    return tmp_path


def write_keys(place: Path) -> None:
    tenants = {name: KEYS[name] for name in ("acme", "globex")}
    (place / "keys.json").write_text(json.dumps({"operator": KEYS["operator"], "tenants": tenants}))
    (place / "keys.json").chmod(0o600)


def options(place: Path) -> dict[str, str]:
    return {
        "keys": str(place / "keys.json"), "fleet-secret": str(place / "secret"),
        "host-memory": "16MiB", "disk": str(place / "kv"), "disk-size": "64MiB", "tier-dtype": "int8",
    }  # fmt: skip


def flags(place: Path) -> list[str]:
    return [each for name, text in options(place).items() for each in (f"--{name}", text)]


@contextmanager
def serving(place: Path, **others: str) -> Iterator[Running]:
    with service_in_thread(None, **{**options(place), **others}) as live:
        yield live


def on_disk(live: Running) -> float:
    return metric(live.operator, "resident_blocks", "disk")


def on_disk_soon(live: Running) -> int:
    """Wait until the disk has all that host memory has, and return how many blocks that are."""
    num_blocks = metric(live.operator, "resident_blocks", "host")
    assert num_blocks > 6
    eventually(lambda: on_disk(live) == num_blocks)
    return int(num_blocks)


def filled(place: Path, **others: str) -> int:
    """Let both tenants ask, and wait until the disk has it. Returns the tokens that each can get back."""
    with serving(place, **others) as live:
        ask(live.globex), ask(live.acme)
        return on_disk_soon(live) // 2 * 16


def is_open(live: Running) -> None:
    """Wait until the disk knows its fleet's purges, and serves."""
    eventually(lambda: metric(live.operator, "open", "disk") == 1, "the disk is open")


def test_it_survives_the_process(place: Path) -> None:
    with served(place / "first.log", *flags(place)) as process:
        with client(process.url, KEYS["acme"]) as acme:
            assert ask(acme)[1] == 0 and loaded_of(acme) == (0, 0)
        assert process.stop() == 0, process.output
    with (
        served(place / "second.log", *flags(place)) as process,
        client(process.url, KEYS["acme"]) as acme,
        client(process.url, KEYS["operator"]) as operator,
    ):
        assert metric(operator, "open", "disk") == 1
        host_tokens, disk_tokens = loaded_of(acme)
        assert disk_tokens > 100 and host_tokens == 0
        assert metric(operator, "hit_blocks_total", "disk") == disk_tokens // 16
        rows = [row for row in acme.get("/v1/usage").json()["rows"] if row["kind"] == "completion"]
        assert sum(row["read_disk_tokens"] for row in rows) == disk_tokens


def test_a_restart_finds_it_in_both_tiers(place: Path) -> None:
    num_tokens = filled(place)
    with serving(place) as live:
        assert ask(live.acme)[1] == ask(live.globex)[1] == num_tokens
        assert metric(live.operator, "hit_blocks_total", "disk") == num_tokens // 8
        assert metric(live.operator, "errors_total", "disk") == 0
        evict_all(live)
        assert ask(live.acme)[1] == num_tokens, "host memory has it too"
        assert metric(live.operator, "hit_blocks_total", "host") >= num_tokens // 16


@pytest.mark.parametrize("dtype", ["exact", "fp8"])
def test_another_dtype_after_a_restart_begins_anew(
    place: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    num_tokens = filled(place)
    (place / "radixkv.yaml").write_text(
        "".join(f"{name}: {text}\n" for name, text in {**options(place), "tier-dtype": dtype}.items())
    )
    with caplog.at_level(logging.WARNING):
        assert (
            CliRunner().invoke(cli.commands, ["config", "check", str(place / "radixkv.yaml")]).exit_code == 0
        )
    assert "another disk-size or tier-dtype: the next start drops all records" in caplog.text
    with serving(place, **{"tier-dtype": dtype}) as live:
        assert on_disk(live) == 0 and ask(live.acme)[1] == 0
        assert metric(live.operator, "hit_blocks_total", "disk") == 0
        on_disk_soon(live)
    assert "all its records are lost" in caplog.text
    with serving(place) as live:
        assert on_disk(live) == 0 and ask(live.acme)[1] == ask(live.globex)[1] == 0
        on_disk_soon(live)
    with serving(place) as live:
        assert ask(live.acme)[1] == num_tokens


@pytest.mark.parametrize("how", ["purge", "clear", "remove"])
def test_a_purge_reaches_the_disk(place: Path, how: str) -> None:
    num_tokens = filled(place)
    with serving(place) as live:
        if how == "purge":
            live.operator.post("/v1/tenants/acme/purge").raise_for_status()
        elif how == "clear":
            ask(live.acme)
            live.acme.delete("/v1/cache").raise_for_status()
        else:
            live.operator.delete("/v1/tenants/acme").raise_for_status()
        eventually(lambda: metric(live.operator, "owed_purges", "disk") == 0)
        if how != "remove":
            assert ask(live.acme)[1] == 0
            live.operator.post("/v1/tenants/acme/purge").raise_for_status()
    write_keys(place)
    with serving(place) as live:
        assert ask(live.acme)[1] == 0, "also after a restart"
        assert metric(live.operator, "hit_blocks_total", "disk") == 0
        assert ask(live.globex)[1] == num_tokens, "another tenant's stays"


def test_a_purge_in_the_fleet_holds_for_a_disk_that_was_down(place: Path, redis_server: RedisServer) -> None:
    fleet = {"redis": redis_server.url, "replica": "one"}
    num_tokens = filled(place, **fleet)
    with serving(place, **fleet) as live:
        is_open(live)
        assert ask(live.acme)[1] == num_tokens, "nothing was purged"
    alone = {"keys": str(place / "keys.json"), "fleet-secret": str(place / "secret")}
    with service_in_thread(None, **alone, redis=redis_server.url, replica="two") as other:
        other.operator.post("/v1/tenants/acme/purge").raise_for_status()
    with serving(place, **fleet) as live:
        is_open(live)
        assert ask(live.acme)[1] == 0 and ask(live.globex)[1] == num_tokens


# --- settings


def test_the_dtype_comes_from_the_environment_and_a_file_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "radixkv.yaml").write_text("host-memory: 8MiB\ntier-dtype: int4\n")
    given = ["config", "show", "--config", str(place / "radixkv.yaml")]
    run = CliRunner().invoke(cli.commands, ["config", "check", str(place / "radixkv.yaml")])
    assert "radixkv.yaml:2: tier-dtype='int4' is not allowed; allowed: one of exact, fp8, int8" in str(
        run.exception
    )
    monkeypatch.setenv("RADIXKV_TIER_DTYPE", "fp8")
    assert "fp8" in CliRunner().invoke(cli.commands, given).output
    parsed = ServeSettings.parse({"host-memory": "8MiB", "tier-dtype": "fp8"}).tiers
    assert parsed == TierSettings(8 << 20, dtype="fp8")


def test_an_engine_with_tiers_of_its_own_refuses_host_memory_by_name(place: Path) -> None:
    (place / "config.json").write_text('{"vocab_size": 100}')
    loaded = find_engine("vllm")(EngineSettings(place, "", 100, 64, 16, tiers=TierSettings(1 << 20)))
    with pytest.raises(
        ConfigError, match=r"^--host-memory=1048576 is not allowed; allowed: none with the engine"
    ):
        loaded.start(None)


# --- commands, and the folder of --lossy-disk of an earlier version


def disk(place: Path, *arguments: str) -> Any:
    secret = [] if arguments[0] == "reset" else ["--fleet-secret", str(place / "secret")]
    return CliRunner().invoke(cli.commands, ["disk", *arguments, *secret])


def test_an_old_folder_is_refused_until_it_is_emptied(place: Path) -> None:
    filled(place)
    with closing(PrivateFolder(place / "old", contents=OLD_DISKS)):
        (place / "kv").rename(place / "old" / "int8")
    (place / "old").rename(place / "kv")
    process = Process(["--port", "0", *flags(place)], place / "log")
    assert process.process.wait(LIMIT_S) == 2
    told = f"radixkv: --disk='{place}/kv' is not allowed; allowed: the folder of one disk tier"
    assert told in process.output and f"`radixkv disk reset {place}/kv`" in process.output
    assert (place / "kv" / "int8" / "master").exists()
    run = disk(place, "reset", str(place / "kv"), "--yes")
    assert run.exit_code == 0 and "int8/slab" in run.output
    assert [each.name for each in (place / "kv").iterdir()] == ["lock"]
    with serving(place) as live:
        assert ask(live.acme)[1] == 0
        on_disk_soon(live)


def test_commands_know_its_records(place: Path) -> None:
    num_tokens = filled(place)
    found = disk(place, "check", str(place / "kv"), "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["num_good"] == num_tokens // 8
    found = disk(place, "forget", str(place / "kv"), "--tenant", "acme", "--yes")
    assert "records of tenant 'acme'" in found.stdout
    with serving(place) as live:
        assert disk(place, "check", str(place / "kv")).exit_code, "a server uses it"
        assert ask(live.acme)[1] == 0 and ask(live.globex)[1] == num_tokens
