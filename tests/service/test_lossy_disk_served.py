"""``radixkv serve --lossy-disk``: KV of lossy tenants outlives a restart, and no exact tenant ever gets such KV."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from radixkv.cli import main as cli
from radixkv.engines import EngineSettings, find_engine
from radixkv.errors import ConfigError
from radixkv.files.private_folder import PrivateFolder
from radixkv.files.system import PAGE_BYTES, Files, round_up
from radixkv.service.options import ServeSettings
from radixkv.tiers.disk.slab import HEADER_BYTES
from radixkv.tiers.settings import DiskOptions, TierSettings
from tests.redis_server import RedisServer
from tests.service.running import KEYS, Process, Running, client, served, service_in_thread
from tests.service.test_tiers_served import ask, evict_all, loaded_of, metric, set_dtype
from tests.tiers.support import failing
from tests.waiting import LIMIT_S, eventually

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from radixkv.tiers.tiers_by_dtype import TiersByDtype

SECRET = "s" * 40


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the fleet's secret, and keys by which acme is lossy and globex exact."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    write_keys(tmp_path, "int8")
    return tmp_path


def write_keys(place: Path, dtype: str, **settings: Any) -> None:
    acme = {"keys": [KEYS["acme"]], "tier_dtype": dtype, "max_pins": 8, **settings}
    keys = {"operator": KEYS["operator"], "tenants": {"acme": acme, "globex": KEYS["globex"]}}
    (place / "keys.json").write_text(json.dumps(keys))
    (place / "keys.json").chmod(0o600)


def options(place: Path) -> dict[str, str]:
    return {
        "keys": str(place / "keys.json"), "fleet-secret": str(place / "secret"),
        "host-memory": "16MiB", "disk": str(place / "kv"), "disk-size": "64MiB",
        "lossy-host-memory": "8MiB", "lossy-disk": str(place / "lossy"), "lossy-disk-size": "64MiB",
    }  # fmt: skip


@contextmanager
def serving(place: Path, **others: str) -> Iterator[Running]:
    with service_in_thread(None, **{**options(place), **others}) as live:
        yield live


def refused(place: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message), serving(place):
        pass


def on_disk(live: Running, dtype: str) -> float:
    return metric(live.operator, "resident_blocks", "disk" if dtype == "exact" else f"disk_{dtype}")


def test_a_start_destroys_what_removed_tenants_left_on_every_disk(place: Path) -> None:
    with serving(place) as live:
        ask(live.acme), ask(live.globex)
        eventually(lambda: on_disk(live, "int8") > 0 and on_disk(live, "exact") > 0)
    given = json.loads((place / "keys.json").read_text())
    (place / "keys.json").write_text(json.dumps({"operator": given["operator"], "tenants": {}}))
    with serving(place) as live:
        assert on_disk(live, "int8") == on_disk(live, "exact") == 0
    (place / "keys.json").write_text(json.dumps(given))
    with serving(place) as live:
        assert ask(live.acme)[1] == ask(live.globex)[1] == 0


def are_open(live: Running) -> None:
    """Wait until the disks know their fleet's purges, and serve."""
    for tier in ("disk", "disk_int8"):
        eventually(lambda tier=tier: metric(live.operator, "open", tier) == 1, f"{tier} is open")


def tiers_of_service(live: Running) -> TiersByDtype:
    from radixkv.tiers.tiered_cache import TieredCache
    from radixkv.tiers.tiers_by_dtype import TiersByDtype

    cache = live.service.engine.cache
    assert isinstance(cache, TieredCache) and isinstance(cache.lower, TiersByDtype)
    return cache.lower


def filled(place: Path, dtype: str = "int8", **others: str) -> tuple[str, int]:
    """Let both tenants ask, and wait until their disks have it. Returns the answer and the blocks of the prompt."""
    write_keys(place, dtype)
    with serving(place, **others) as live:
        text, _ = ask(live.globex)
        ask(live.acme)
        num_blocks = int(on_disk_soon(live, dtype))
        assert on_disk_soon(live, "exact") == num_blocks
        others_of = {"fp8", "int8"} - {dtype}
        assert all(not on_disk(live, each) for each in others_of), "nothing of another dtype"
    return text, num_blocks


def on_disk_soon(live: Running, dtype: str) -> float:
    """Wait until the disk has all that host memory has of a dtype, and return how many blocks that are."""
    tier = "host" if dtype == "exact" else f"host_{dtype}"
    num_blocks = metric(live.operator, "resident_blocks", tier)
    assert num_blocks > 6
    eventually(lambda: on_disk(live, dtype) == num_blocks)
    return num_blocks


# --- what comes back, and for whom


@pytest.mark.slow
def test_a_lossy_disk_survives_the_process(place: Path) -> None:
    given = [each for name, text in options(place).items() for each in (f"--{name}", text)]
    with served(place / "first.log", *given) as process:
        with client(process.url, KEYS["acme"]) as acme, client(process.url, KEYS["globex"]) as globex:
            assert ask(acme)[1] == ask(globex)[1] == 0 and loaded_of(acme) == (0, 0)
        assert process.stop() == 0, process.output
    for each in ("lossy", "lossy/fp8", "lossy/int8"):
        assert (place / each).stat().st_mode & 0o777 == 0o700
    with (
        served(place / "second.log", *given) as process,
        client(process.url, KEYS["acme"]) as acme,
        client(process.url, KEYS["globex"]) as globex,
        client(process.url, KEYS["operator"]) as operator,
    ):
        assert all(metric(operator, "open", tier) == 1 for tier in ("disk", "disk_fp8", "disk_int8"))
        assert loaded_of(globex)[1] == 0, "it asked in the chat's form only"
        host_tokens, disk_tokens = loaded_of(acme)
        assert disk_tokens > 100 and host_tokens == 0
        hits = metric(operator, "hit_blocks_total", "disk_int8")
        assert hits == disk_tokens // 16 and metric(operator, "hit_blocks_total", "disk") == 0
        rows = [row for row in acme.get("/v1/usage").json()["rows"] if row["kind"] == "completion"]
        assert sum(row["read_disk_tokens"] for row in rows) == disk_tokens
        assert ask(globex)[1] > 100
        assert metric(operator, "hit_blocks_total", "disk") > 6
        assert metric(operator, "hit_blocks_total", "disk_int8") == hits, "the exact tenant has its own disk"
        assert metric(operator, "hit_blocks_total", "disk_fp8") == 0


def test_a_restart_finds_each_tenant_on_its_own_disk(place: Path) -> None:
    text, num_blocks = filled(place)
    with serving(place) as live:
        assert ask(live.acme)[1] == num_blocks * 16
        assert ask(live.globex) == (text, num_blocks * 16)
        for tier in ("disk", "disk_int8"):
            assert metric(live.operator, "hit_blocks_total", tier) == num_blocks
            assert metric(live.operator, "errors_total", tier) == 0
        assert metric(live.operator, "hit_blocks_total", "disk_fp8") == 0
        evict_all(live)
        assert ask(live.acme)[1] == num_blocks * 16, "host memory has it too"
        assert metric(live.operator, "hit_blocks_total", "host_int8") >= num_blocks


def test_a_tenant_that_is_exact_after_a_restart_gets_nothing_lossy(place: Path) -> None:
    text, num_blocks = filled(place)
    write_keys(place, "exact")
    with serving(place) as live:
        assert on_disk(live, "int8") == 0, "destroyed before the first request"
        assert ask(live.globex)[1] > 100, "others notice nothing"
        assert ask(live.acme) == (text, 0)
        assert metric(live.operator, "hit_blocks_total", "disk_int8") == 0
        set_dtype(live, "acme", "int8").raise_for_status()
        assert ask(live.acme) == (text, 0), "the change has forgotten it"
    with serving(place) as live:
        assert ask(live.acme)[1] == num_blocks * 16, "and what was computed since is there"


def test_exact_kv_alone_may_have_no_disk(place: Path) -> None:
    none = options(place)
    for name in ("host-memory", "disk", "disk-size"):
        del none[name]
    for cached in (0, 1):
        with service_in_thread(None, **none) as live:
            assert (ask(live.acme)[1] > 0) == bool(cached)
            assert ask(live.globex)[1] == 0
            on_disk_soon(live, "int8")
            assert 'tier="disk"' not in live.operator.get("/metrics").text


def test_a_strict_lossy_tenant_has_host_memory_alone(place: Path) -> None:
    write_keys(place, "int8", mode="strict", guaranteed_blocks=128)
    with serving(place) as live:
        ask(live.acme)
        evict_all(live)
        assert ask(live.acme)[1] > 100, "it has its share of host memory"
        ask(live.globex)
        on_disk_soon(live, "exact")
    with serving(place) as live:
        assert ask(live.acme)[1] == 0 and ask(live.globex)[1] > 100
        assert metric(live.operator, "resident_blocks", "disk_int8") == 0


# --- purges


@pytest.mark.parametrize("how", ["purge", "clear", "remove"])
def test_a_purge_reaches_the_lossy_disk(place: Path, how: str) -> None:
    text, num_blocks = filled(place)
    with serving(place) as live:
        if how == "purge":
            live.operator.post("/v1/tenants/acme/purge").raise_for_status()
        elif how == "clear":
            ask(live.acme)
            live.acme.delete("/v1/cache").raise_for_status()
        else:
            live.operator.delete("/v1/tenants/acme").raise_for_status()
        for tier in ("disk", "disk_fp8", "disk_int8"):
            eventually(lambda tier=tier: metric(live.operator, "owed_purges", tier) == 0)  # type: ignore[misc]
        if how != "remove":
            assert ask(live.acme)[1] == 0
            live.operator.post("/v1/tenants/acme/purge").raise_for_status()
    write_keys(place, "int8")
    with serving(place) as live:
        assert ask(live.acme)[1] == 0, "also after a restart"
        assert metric(live.operator, "hit_blocks_total", "disk_int8") == 0
        assert ask(live.globex) == (text, num_blocks * 16), "another tenant's stays"


def test_a_purge_of_a_tenant_that_is_exact_now_reaches_what_was_lossy(place: Path) -> None:
    filled(place)
    write_keys(place, "exact")
    with serving(place) as live:
        live.operator.post("/v1/tenants/acme/purge").raise_for_status()
    write_keys(place, "int8")
    with serving(place) as live:
        assert ask(live.acme)[1] == 0
        assert metric(live.operator, "hit_blocks_total", "disk_int8") == 0


@pytest.mark.slow
def test_a_purge_in_the_fleet_holds_for_a_lossy_disk_that_was_down(
    place: Path, redis_server: RedisServer
) -> None:
    fleet = {"redis": redis_server.url, "replica": "one"}
    _, num_blocks = filled(place, **fleet)
    with serving(place, **fleet) as live:
        are_open(live)
        assert ask(live.acme)[1] == num_blocks * 16, "nothing was purged"
    alone = {"keys": str(place / "keys.json"), "fleet-secret": str(place / "secret")}
    with service_in_thread(None, **alone, redis=redis_server.url, replica="two") as other:
        other.operator.post("/v1/tenants/acme/purge").raise_for_status()
    with serving(place, **fleet) as live:
        are_open(live)
        assert ask(live.acme)[1] == 0
        assert metric(live.operator, "hit_blocks_total", "disk_int8") == 0
        assert ask(live.globex)[1] == num_blocks * 16


def test_a_purge_in_the_fleet_that_a_lossy_disk_has_paid_costs_nothing_at_the_next_start(
    place: Path, redis_server: RedisServer
) -> None:
    fleet = {"redis": redis_server.url, "replica": "b"}
    with serving(place, **fleet) as live:
        are_open(live)
        ask(live.acme)
        live.operator.post("/v1/tenants/acme/purge").raise_for_status()
        assert ask(live.acme)[1] == 0
    with serving(place, **fleet) as live:
        are_open(live)
        assert ask(live.acme)[1] > 100
        assert metric(live.operator, "hit_blocks_total", "disk_int8") > 0


def test_with_a_fleet_each_lossy_disk_is_closed_until_the_purges_are_known(place: Path) -> None:
    from radixkv.tiers.lossy_folder import disks_in

    settings = ServeSettings.parse({**options(place), "redis": "redis://127.0.0.1:1"}).tiers
    assert settings is not None and settings.lossy_disk is not None
    assert all(disk.awaits_generations for disk in disks_in(settings.lossy_disk).values())
    alone = ServeSettings.parse(options(place)).tiers
    assert alone is not None and alone.lossy_disk is not None and not alone.lossy_disk.awaits_generations


# --- attacks on the folder


def swap(place: Path) -> None:
    lossy = place / "lossy"
    (lossy / "fp8").rename(place / "aside")
    (lossy / "int8").rename(lossy / "fp8")
    (place / "aside").rename(lossy / "int8")


def test_a_folder_in_the_place_of_another_dtype_serves_nothing_and_never_again(place: Path) -> None:
    """Its records are of the same tenant, of the same size, under the same secret."""
    text, num_blocks = filled(place, "fp8")
    swap(place)
    write_keys(place, "int8")
    with serving(place) as live:
        assert on_disk(live, "int8") == on_disk(live, "fp8") == 0, "made anew"
        assert ask(live.acme) == (text, 0)
        assert metric(live.operator, "hit_blocks_total", "disk_int8") == 0
        assert eventually(lambda: on_disk(live, "int8") == num_blocks), "no old record is in the way"
    swap(place)
    write_keys(place, "fp8")
    with serving(place) as live:
        assert on_disk(live, "fp8") == 0 and ask(live.acme)[1] == 0


def test_a_folder_of_exact_records_in_the_place_of_a_lossy_one_serves_nothing(place: Path) -> None:
    text, _ = filled(place)
    shutil.rmtree(place / "lossy" / "int8")
    (place / "kv").rename(place / "lossy" / "int8")
    with serving(place) as live:
        assert on_disk(live, "int8") == 0, "of another size: made anew"
        assert ask(live.acme)[1] == ask(live.globex)[1] == 0
        assert ask(live.globex)[0] == text


def foreign_file(place: Path) -> None:
    (place / "lossy" / "notes.txt").touch()


def foreign_file_inside(place: Path) -> None:
    (place / "lossy" / "fp8" / "notes.txt").touch()


def without_lock(place: Path) -> None:
    (place / "lossy" / "lock").unlink()


def open_to_others(place: Path) -> None:
    (place / "lossy").chmod(0o750)


def open_inside(place: Path) -> None:
    (place / "lossy" / "int8").chmod(0o701)


def linked(place: Path) -> None:
    (place / "lossy").rename(place / "elsewhere")
    (place / "lossy").symlink_to(place / "elsewhere")


def linked_inside(place: Path) -> None:
    (place / "lossy" / "int8").rename(place / "elsewhere")
    (place / "lossy" / "int8").symlink_to(place / "elsewhere")


def linked_lock(place: Path) -> None:
    (place / "lossy" / "lock").rename(place / "elsewhere")
    (place / "lossy" / "lock").symlink_to(place / "elsewhere")


def linked_slab(place: Path) -> None:
    (place / "lossy" / "int8" / "slab").rename(place / "elsewhere")
    (place / "lossy" / "int8" / "slab").symlink_to(place / "elsewhere")


def file_inside(place: Path) -> None:
    shutil.rmtree(place / "lossy" / "int8")
    (place / "lossy" / "int8").write_text("years of work")


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (
            foreign_file,
            r"^lossy_disk='.*lossy' is not allowed; .*a lossy disk's files alone; it has 'notes.txt'",
        ),
        (foreign_file_inside, r"^lossy_disk='.*fp8' is not allowed; .*files alone; it has 'notes.txt'"),
        (
            without_lock,
            r"^lossy_disk='.*lossy' is not allowed; .*an empty folder, or one of a lossy disk; it has 'fp8'",
        ),
        (open_to_others, r"^lossy_disk='.*lossy' is not allowed; .*mode 0700"),
        (open_inside, r"^lossy_disk='.*int8' is not allowed; .*mode 0700"),
        (linked, r"^lossy_disk='.*lossy' is not allowed; .*no symbolic link"),
        (linked_inside, r"^lossy_disk='.*int8' is not allowed; .*no symbolic link"),
        (linked_lock, r"^lossy_disk='.*lossy' is not allowed; .*'lock' can be written .*symbolic links"),
        (linked_slab, r"^lossy_disk='.*int8' is not allowed; .*'slab' is a regular file"),
        (file_inside, r"^lossy_disk='.*int8' is not allowed; .*Not a directory"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_folder_that_was_tampered_with_is_refused_and_left_alone(
    place: Path, attack: Callable[[Path], None], message: str
) -> None:
    with serving(place):
        pass
    attack(place)
    before = sorted(str(each) for each in place.rglob("*"))
    refused(place, message)
    assert sorted(str(each) for each in place.rglob("*")) == before


def test_the_folder_of_another_kind_of_disk_is_refused(place: Path) -> None:
    with serving(place):
        pass
    for name, other, it_has in (
        ("lossy-disk", "kv", "a lossy disk's files alone; it has 'generations'"),
        ("disk", "lossy", "a disk tier's files alone; it has 'fp8'"),
    ):
        given = {**options(place), "disk": str(place / "a"), "lossy-disk": str(place / "b")}
        with (
            pytest.raises(ConfigError, match=it_has),
            service_in_thread(None, **{**given, name: str(place / other)}),
        ):
            pass
    with serving(place) as live:
        assert metric(live.operator, "open", "disk") == metric(live.operator, "open", "disk_int8") == 1


def test_a_folder_belongs_to_one_process(place: Path) -> None:
    with serving(place):
        other = {**options(place), "disk": str(place / "kv2")}
        with (
            pytest.raises(ConfigError, match=r"^lossy_disk=.* no other process uses"),
            service_in_thread(None, **other),
        ):
            pass
    with serving(place):
        pass  # what was opened before the error is free again


# --- sizes, rates and combinations


def tiers(place: Path, **others: str) -> TierSettings:
    found = ServeSettings.parse({**options(place), **others}).tiers
    assert found is not None and found.disk is not None and found.lossy_disk is not None
    return found


def test_the_size_and_the_writes_are_shared(place: Path) -> None:
    """192 MiB exact and 64 lossy: three quarters of the writes, and two eighths."""
    from radixkv.tiers.lossy_folder import disks_in

    found = tiers(place, **{"disk-size": "192MiB", "disk-writes": "80MB/s"})
    assert found.disk is not None and found.lossy_disk is not None
    assert (found.disk.bytes_per_s, found.lossy_disk.bytes_per_s) == (6e7, 2e7)
    parts = disks_in(found.lossy_disk)
    assert {name: (part.folder, part.num_bytes, part.bytes_per_s) for name, part in parts.items()} == {
        name: (place / "lossy" / name, 32 << 20, 1e7) for name in ("fp8", "int8")
    }
    unbounded = tiers(place)
    assert unbounded.lossy_disk is not None and unbounded.lossy_disk.bytes_per_s is None
    assert all(part.bytes_per_s is None for part in disks_in(unbounded.lossy_disk).values())
    alone = options(place) | {"disk-writes": "80MB/s"}
    for name in ("host-memory", "disk", "disk-size"):
        del alone[name]
    lossy = ServeSettings.parse(alone).tiers
    assert lossy is not None and lossy.lossy_disk is not None and lossy.lossy_disk.bytes_per_s == 8e7


def test_the_files_have_the_given_size_and_the_budget_is_shown(place: Path) -> None:
    with serving(place, **{"disk-writes": "128MB/s"}) as live:
        ask(live.acme), ask(live.globex)
        on_disk_soon(live, "int8"), on_disk_soon(live, "exact")
        exact, lossy = (metric(live.operator, "budget_bytes", tier) for tier in ("disk", "disk_int8"))
        assert 0 < lossy < 60 * 32e6 < 60 * 64e6 and 0 < exact < 60 * 64e6
    sizes = [(place / "lossy" / dtype / "slab").stat().st_size for dtype in ("fp8", "int8")]
    assert sizes[0] == sizes[1] and 31 << 20 < sizes[0] <= 32 << 20


@pytest.mark.parametrize(
    ("without", "changed", "message"),
    [
        (["lossy-host-memory"], {}, "--lossy-host-memory is not set; allowed: .*because --lossy-disk is set"),
        (["lossy-disk-size"], {}, "--lossy-disk-size is not set; allowed: .*because --lossy-disk is set"),
        (["lossy-disk"], {}, "--lossy-disk is not set; allowed: .*because --lossy-disk-size is set"),
        (["fleet-secret", "disk", "disk-size"], {}, "--fleet-secret is not set; .*because --lossy-disk is set"),
        ([], {"lossy-disk-size": "64MB"}, "--lossy-disk-size='64MB' is not allowed; allowed: bytes, or a text"),
        ([], {"lossy-disk-size": "0"}, "--lossy-disk-size='0' is not allowed; allowed: at least one record"),
        ([], {"lossy-disk-size": "-1"}, "--lossy-disk-size='-1' is not allowed"),
        ([], {"lossy-disk-size": "9" * 16}, "--lossy-disk-size='9999999999999999' is not allowed"),
        ([], {"lossy-disk": ""}, "--lossy-disk='' is not allowed; allowed: a folder, or the path of a new one"),
        ([], {"lossy-disk": "a\0b"}, "--lossy-disk='.*' is not allowed; allowed: a folder, or the path of a new"),
        ([], {"lossy-disk": "loop/lossy"}, "--lossy-disk='.*loop/lossy' is not allowed; allowed: a folder, or the"),
        ([], {"lossy-disk": "no/lossy"}, "--lossy-disk='.*no/lossy' is not allowed; allowed: a folder, or"),
        ([], {"lossy-disk": "secret"}, "--lossy-disk='.*secret' is not allowed; allowed: a folder, or"),
        ([], {"lossy-disk": "kv"}, "--lossy-disk='.*kv' is not allowed; allowed: a folder outside of --disk"),
        ([], {"lossy-disk": "./x/../kv"}, "--lossy-disk='.*kv' is not allowed; allowed: a folder outside"),
        ([], {"disk": "lossy/kv"}, "--lossy-disk='.*lossy' is not allowed; .*outside of --disk, and not around"),
        ([], {"lossy-disk": "kv/lossy"}, "--lossy-disk='.*kv/lossy' is not allowed; .*outside of --disk"),
        ([], {"lossy-disk": "link"}, "--lossy-disk='.*link' is not allowed; allowed: a folder outside of --disk"),
        (["disk", "disk-size", "lossy-disk", "lossy-disk-size"], {"disk-writes": "2TB/day"},
         "--disk is not set; allowed: a value, or --lossy-disk with one, because --disk-writes is set"),
        ([], {"disk-writes": "2TB"}, "--disk-writes='2TB' is not allowed"),
        ([], {"disk-size": "0", "disk-writes": "2TB/day"}, "--disk-size='0' is not allowed"),
    ],
)  # fmt: skip
def test_combinations_that_are_refused(
    place: Path, without: list[str], changed: dict[str, str], message: str
) -> None:
    for folder in ("x", "kv", "lossy"):
        (place / folder).mkdir(0o700)
    (place / "link").symlink_to(place / "kv")
    (place / "loop").symlink_to(place / "loop")
    for name in ("disk", "lossy-disk"):
        if changed.get(name):
            changed = {**changed, name: str(place) + "/" + changed[name]}
    given = {name: text for name, text in {**options(place), **changed}.items() if name not in without}
    with pytest.raises(ConfigError, match=message):
        ServeSettings.parse(given)
    assert not any(any((place / folder).iterdir()) for folder in ("kv", "lossy"))


def test_a_size_that_is_too_small_is_shown_as_it_was_given(place: Path) -> None:
    message = (
        r"lossy_disk_size=4096 is not allowed; allowed: two halves, for fp8 and int8; for each .* one record"
    )
    with pytest.raises(ConfigError, match=message), serving(place, **{"lossy-disk-size": "4096"}):
        pass
    with serving(place):
        pass  # nothing is held


@pytest.mark.slow
def test_the_command_line_names_the_option(place: Path) -> None:
    """What is found only when the folder is opened, too."""
    (place / "lossy").mkdir(0o755)
    given = [each for name, text in options(place).items() for each in (f"--{name}", text)]
    process = Process(["--port", "0", *given], place / "log")
    assert process.process.wait(LIMIT_S) == 2
    told = f"radixkv: --lossy-disk='{place}/lossy' is not allowed; allowed: a folder of mode 0700"
    assert told in process.output


def test_settings_come_from_the_environment_and_a_file_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "radixkv.yaml").write_text(
        f"keys: {place}/keys.json\nlossy-host-memory: 8MiB\nlossy-disk: {place}/lossy\nlossy-disk-size: lots\n"
    )
    monkeypatch.setenv("RADIXKV_FLEET_SECRET", str(place / "secret"))
    run = CliRunner().invoke(cli.commands, ["serve", "--config", str(place / "radixkv.yaml")])
    assert run.exit_code != 0 and "radixkv.yaml:4: lossy-disk-size='lots' is not allowed" in str(
        run.exception
    )
    monkeypatch.setenv("RADIXKV_LOSSY_DISK_SIZE", "plenty")
    run = CliRunner().invoke(cli.commands, ["serve", "--config", str(place / "radixkv.yaml")])
    assert "RADIXKV_LOSSY_DISK_SIZE='plenty' is not allowed" in str(run.exception)


def test_in_a_process_a_disk_needs_memory_of_its_dtype(place: Path) -> None:
    from radixkv.tiers.tiers_by_dtype import tiers_of

    disk = DiskOptions(place / "lossy", 1 << 20, SECRET.encode())

    def make(_: TierSettings) -> Any:
        raise AssertionError("nothing is made")

    with pytest.raises(ConfigError, match=r"lossy_disk='.*none without lossy_host_bytes"):
        tiers_of(TierSettings(1 << 20, lossy_disk=disk), make, "exact")
    with pytest.raises(ConfigError, match=r"^disk='.*none without host_bytes"):
        tiers_of(TierSettings(0, disk, lossy_host_bytes=1 << 20), make, "exact")
    assert not (place / "lossy").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (TierSettings(1 << 20, lossy_host_bytes=1 << 20), "--host-memory=1048576"),
        (TierSettings(0, lossy_host_bytes=2 << 20), "--lossy-host-memory=2097152"),
    ],
)
def test_an_engine_with_tiers_of_its_own_refuses_them_by_name(
    place: Path, settings: TierSettings, named: str
) -> None:
    (place / "config.json").write_text('{"vocab_size": 100}')
    loaded = find_engine("vllm")(EngineSettings(place, "", 100, 64, 16, tiers=settings))
    with pytest.raises(ConfigError, match=f"^{named} is not allowed; allowed: none with the engine vllm"):
        loaded.start(None)


@pytest.mark.parametrize("after", [1, 2])
def test_a_half_for_which_there_is_no_space_leaves_no_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Also if the other half was made before. The disk of exact tenants, which came first, is whole."""
    no_space, allocate = failing("allocate", errno.ENOSPC, after=after), Files.allocate

    def short(self: Files, descriptor: int, num_bytes: int) -> None:
        no_space("allocate")
        allocate(self, descriptor, num_bytes)

    monkeypatch.setattr(Files, "allocate", short)
    refused(place, r"lossy_disk_size=.*two halves.*has space")
    assert not (place / "lossy").exists() and (place / "kv" / "master").exists()


def test_the_folder_is_given_back_if_a_tier_cannot_be_made(place: Path) -> None:
    from radixkv.tiers.tiers_by_dtype import tiers_of

    disk = DiskOptions(place / "lossy", 1 << 20, SECRET.encode())

    def make(_: TierSettings) -> Any:
        raise ConfigError("lossy_host_memory", 1, "more")

    for _ in range(2):
        with pytest.raises(ConfigError, match="lossy_host_memory"):
            tiers_of(TierSettings(0, lossy_host_bytes=1, lossy_disk=disk), make, "exact")


def test_all_disks_are_closed_before_their_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = PrivateFolder.close

    def told(self: PrivateFolder) -> None:
        closed.append(Path(self.path).name)
        close(self)

    monkeypatch.setattr(PrivateFolder, "close", told)
    with serving(place) as live:
        tiers_of_service(live)
    assert closed[-1] == "lossy" and sorted(closed) == ["fp8", "int8", "kv", "lossy"]


# --- commands


def disk(place: Path, *arguments: str) -> Any:
    secret = ["--fleet-secret", str(place / "secret")]
    return CliRunner().invoke(cli.commands, ["disk", *arguments, *secret])


def damage(slab: Path, num_slots: int) -> None:
    """Flip a bit of the first record that has any."""
    content = bytearray(slab.read_bytes())
    first = round_up(num_slots * HEADER_BYTES) + PAGE_BYTES
    at = next(at for at in range(first, len(content)) if content[at])
    content[at] ^= 1
    slab.write_bytes(content)


def test_commands_for_the_folders_of_a_lossy_disk(place: Path) -> None:
    _, num_blocks = filled(place)
    lossy = place / "lossy"
    found = disk(place, "check", str(lossy / "int8"), "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["num_good"] == num_blocks
    found = disk(place, "check", str(lossy / "fp8"), "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["num_good"] == 0
    for command in ("check", "repair", "forget"):
        told_by = disk(place, command, str(lossy), *(["--yes"] if command == "forget" else []))
        told = (
            f"FOLDER='{lossy}' is not allowed; allowed: one of the folders in it: {lossy}/fp8 or {lossy}/int8"
        )
        assert told_by.exit_code and told in str(told_by.exception)
    damage(lossy / "int8" / "slab", json.loads(found.stdout)["num_slots"])
    found = disk(place, "check", str(lossy / "int8"), "--json")
    assert found.exit_code == 1 and json.loads(found.stdout)["num_damaged"] == 1
    assert disk(place, "repair", str(lossy / "int8")).exit_code == 0
    found = disk(place, "forget", str(lossy / "int8"), "--tenant", "acme", "--yes")
    assert f"forgot {num_blocks - 1} records of tenant 'acme'" in found.stdout
    with serving(place) as live:
        assert disk(place, "check", str(lossy / "int8")).exit_code, "a server uses it"
        assert ask(live.acme)[1] == 0 and ask(live.globex)[1] == num_blocks * 16
        on_disk_soon(live, "int8")
    assert disk(place, "forget", str(lossy / "int8"), "--yes").exit_code == 0
    with serving(place) as live:
        assert ask(live.acme)[1] == 0
