"""``radixkv serve`` with host memory and a disk: what was evicted comes back, and outlives a restart."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from click.testing import CliRunner

from radixkv.cli.main import commands
from radixkv.errors import ConfigError, TierError
from radixkv.files.system import Files
from radixkv.index.cache import PrefixCache
from radixkv.service.banner import banner
from radixkv.service.local import running
from radixkv.service.options import ServeSettings
from radixkv.tiers.disk.records import MISSED, DiskRecords
from radixkv.tiers.settings import TierSettings
from tests.redis_server import RedisServer
from tests.service.running import ALWAYS, KEYS, Running, client, served, service_in_thread
from tests.tiers.support import FaultyFiles, failing
from tests.waiting import LIMIT_S, ended, eventually, is_set

pytestmark = pytest.mark.slow

PROMPT = "".join(f"Rule {number}: answer politely, and name page {7 * number}.\n" for number in range(20))


def ask(acme: httpx.Client, prompt: str = PROMPT) -> tuple[str, int]:
    """Return an answer, and the cached tokens of its prompt."""
    answer = acme.post("/v1/chat/completions", json={
        "messages": [{"role": "user", "content": prompt}], "max_tokens": 4, "temperature": 0,
    })  # fmt: skip
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    loaded = body["timings"]["loaded"]
    assert 0 <= loaded["host_tokens"] + loaded["disk_tokens"] <= cached and loaded["seconds"] >= 0
    return body["choices"][0]["message"]["content"], cached


def loaded_of(acme: httpx.Client) -> tuple[int, int]:
    """Return the tokens of a completion that came from host memory and from the disk, in a stream too."""
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    found = acme.post("/v1/completions", json=body).json()["timings"]["loaded"]
    with acme.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if '"timings"' in line]
    assert json.loads(lines[-1].removeprefix("data: "))["timings"]["loaded"]["host_tokens"] == 0, (
        "resident now"
    )
    assert found["seconds"] > 0 or not found["host_tokens"] + found["disk_tokens"]
    return found["host_tokens"], found["disk_tokens"]


def billed(acme: httpx.Client, kind: str = "completion") -> tuple[int, int]:
    """Return the tokens of all requests of a kind that came from host memory and from the disk."""
    rows = [row for row in acme.get("/v1/usage").json()["rows"] if row["kind"] == kind]
    assert all(row["read_host_tokens"] + row["read_disk_tokens"] <= row["read_tokens"] for row in rows)
    return sum(row["read_host_tokens"] for row in rows), sum(row["read_disk_tokens"] for row in rows)


def metric(operator: httpx.Client, name: str, tier: str, **labels: str) -> float:
    named = ",".join(f'{label}="{value}"' for label, value in sorted({"tier": tier, **labels}.items()))
    found = re.search(
        rf"^radixkv_tier_{name}{{{re.escape(named)}}} (\S+)$", operator.get("/metrics").text, re.M
    )
    assert found is not None, name
    return float(found[1])


def the_counts_agree(live: Running) -> None:
    """Statistics and metrics of a tenant have the tokens of its bills, with those that the tiers brought back."""
    stats, rows = live.acme.get("/v1/stats").json(), live.acme.get("/v1/usage").json()["rows"]
    read = sum(row["read_tokens"] for row in rows)
    computed = sum(row["uncached_tokens"] + sum(row["written_tokens"].values()) for row in rows)
    assert (stats["hit_tokens"], stats["missed_tokens"]) == (read, computed)
    told = live.operator.get("/metrics").text
    for name, tokens in (("hit", read), ("missed", computed)):
        assert re.search(rf'^radixkv_tenant_{name}_tokens_total{{tenant="acme"}} {tokens}\.0$', told, re.M), (
            name
        )


def evict_all(live: Running) -> None:
    cache = live.service.engine.cache
    assert isinstance(cache, PrefixCache)
    cache.evict(1_000_000)


def test_host_memory_below_a_service() -> None:
    with service_in_thread(**{"host-memory": "16MiB"}) as live:
        first, cached = ask(live.acme)
        assert cached == 0
        evict_all(live)
        again, cached = ask(live.acme)
        assert again == first and cached > 100
        assert billed(live.acme) == (cached, 0)
        assert metric(live.operator, "hit_blocks_total", "host") == cached // 16
        assert metric(live.operator, "open", "host") == 1
        assert metric(live.operator, "errors_total", "host") == 0
        assert metric(live.operator, "load_seconds_count", "host") > 0
        tiers = live.operator.get("/v1/stats").json()["tiers"]
        assert list(tiers) == ["host"] and tiers["host"]["hit_blocks"] == cached // 16
        shown = CliRunner().invoke(commands, ["stats", "--url", live.url, "--key", KEYS["operator"]]).stdout
        assert re.search(rf"^hit_blocks +{cached // 16}$", shown, re.M), shown
        assert (
            0
            < metric(live.operator, "resident_blocks", "host")
            < metric(live.operator, "capacity_blocks", "host")
        )
        assert loaded_of(live.acme) == (0, 0), "computed, as another prompt"
        evict_all(live)
        host_tokens, disk_tokens = loaded_of(live.acme)
        assert host_tokens > 100 and disk_tokens == 0
        assert billed(live.acme) == (cached + host_tokens, 0)
        the_counts_agree(live)
        evict_all(live)
        warmed = live.acme.post("/v1/warm", json={"prompt": PROMPT}).json()
        assert warmed["computed"] < 32
        assert billed(live.acme, "warm") == (host_tokens - warmed["computed"], 0)
        evict_all(live)
        assert ask(live.globex) == (first, 0), "another tenant"
        live.operator.post("/v1/tenants/acme/purge").raise_for_status()
        assert ask(live.acme) == (first, 0), "purged"


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_lossy_host_memory_below_a_service(dtype: str) -> None:
    written = {}
    for each in ("exact", dtype):
        with service_in_thread(**{"host-memory": "16MiB", "tier-dtype": each}) as live:
            first, _ = ask(live.acme)
            evict_all(live)
            again, cached = ask(live.acme)
            assert cached > 100 and (again == first or each != "exact")
            assert metric(live.operator, "hit_blocks_total", "host") == cached // 16
            written[each] = metric(live.operator, "written_bytes_total", "host")
            assert list(live.operator.get("/v1/stats").json()["tiers"]) == ["host"]
    assert written[dtype] == written["exact"] * (16 + 4) / (16 * 4), (
        "heads of 16 floats: 16 codes and a scale"
    )


def test_a_tenants_own_dtype_is_refused_with_what_is_in_its_place(tmp_path: Path) -> None:
    """In a call, and in a keys file at the start."""
    with service_in_thread(**{"host-memory": "16MiB"}) as live:
        answer = live.operator.put("/v1/tenants/acme", json={"tier_dtype": "exact"})
        assert answer.status_code == 422
        told = answer.json()["error"]
        assert (told["field"], told["value"]) == ("tier_dtype", "exact")
        assert "--tier-dtype, is that of all tenants" in told["message"]
        assert "--tier-dtype" in told["allowed"]
        live.operator.put("/v1/tenants/acme", json={"tier_dtype": None}).raise_for_status()
        assert "tier_dtype" not in live.operator.get("/v1/tenants/acme").text
    document = {
        "operator": KEYS["operator"],
        "tenants": {"acme": {"keys": [KEYS["acme"]], "tier_dtype": "int8"}},
    }
    (tmp_path / "keys.json").write_text(json.dumps(document))
    (tmp_path / "keys.json").chmod(0o600)
    with (
        pytest.raises(ConfigError, match=r"tenants\.acme\.tier_dtype.*--tier-dtype, is that of all tenants"),
        service_in_thread(None, keys=str(tmp_path / "keys.json")),
    ):
        pass


def test_the_banner_says_how_large_the_tiers_are_and_what_they_have(tmp_path: Path) -> None:
    options = tier_options(tmp_path)
    with service_in_thread(**options) as live:
        ask(live.acme)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") == 26)
    with service_in_thread(**options) as live:
        shown = banner(ServeSettings.parse(options), live.service, live.url)
    sizes = [int(size) for size in re.findall(r"of (\d+) blocks", shown)]
    assert re.search(r"^  tiers    host: 0 of \d+ blocks, disk: 26 of \d+ blocks$", shown, re.M), shown
    assert all(size > 26 for size in sizes)
    lossy = ServeSettings.parse({**options, "tier-dtype": "fp8"})
    assert banner(lossy, live.service, live.url).count(" blocks; KV as fp8\n") == 1


def test_without_tiers_nothing_is_said_of_them(live: Running) -> None:
    assert "radixkv_tier_" not in live.operator.get("/metrics").text
    assert live.operator.get("/v1/stats").json()["tiers"] == {}
    assert "tiers" not in live.acme.get("/v1/stats").json()
    done = live.acme.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}).json()
    assert "loaded" not in done["timings"]


@pytest.mark.slow
def test_a_disk_survives_the_process(tmp_path: Path) -> None:
    secret = tmp_path / "fleet.secret"
    secret.write_text("s" * 40)
    secret.chmod(0o600)
    options = (
        *("--host-memory", "16MiB", "--disk", str(tmp_path / "kv"), "--disk-size", "64MiB"),
        *("--fleet-secret", str(secret), "--disk-writes", "100GB/s"),
    )
    with served(tmp_path / "first.log", *options) as process:
        with client(process.url, KEYS["acme"]) as acme:
            first, cached = ask(acme)
            assert cached == 0 and loaded_of(acme) == (0, 0)
        assert process.stop() == 0, process.output
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    with (
        served(tmp_path / "second.log", *options) as process,
        client(process.url, KEYS["acme"]) as acme,
        client(process.url, KEYS["globex"]) as globex,
        client(process.url, KEYS["operator"]) as operator,
    ):
        assert metric(operator, "open", "disk") == 1
        host_tokens, disk_tokens = loaded_of(acme)
        assert disk_tokens > 100 and host_tokens == 0 and billed(acme) == (0, disk_tokens)
        again, cached = ask(acme)
        assert again == first and cached > 100
        assert metric(operator, "hit_blocks_total", "disk") == (cached + disk_tokens) // 16
        assert metric(operator, "hit_blocks_total", "host") == 0, "a block counts where it was found"
        num_loads = metric(operator, "load_seconds_count", "disk")
        assert num_loads == metric(operator, "load_seconds_bucket", "disk", le="+Inf") > 0
        assert metric(operator, "load_seconds_bucket", "disk", le="0.0001") < num_loads
        assert metric(operator, "load_seconds_sum", "disk") > 0
        num_reads = metric(operator, "operation_seconds_count", "disk", operation="read")
        assert num_reads >= (cached + disk_tokens) // 16
        assert ask(globex) == (first, 0)
        eventually(lambda: metric(operator, "resident_blocks", "disk") > cached // 16)
        operator.post("/v1/tenants/acme/purge").raise_for_status()
        assert (
            metric(operator, "owed_purges", "disk") == metric(operator, "unchosen_blocks_total", "disk") == 0
        )
        assert metric(operator, "budget_bytes", "disk") > 0
        assert ask(acme) == (first, 0)


def tier_options(folder: Path) -> dict[str, str]:
    """The options of a service with a disk."""
    secret = folder / "fleet.secret"
    secret.write_text("s" * 40)
    secret.chmod(0o600)
    sizes = {"host-memory": "16MiB", "disk-size": "64MiB"}
    return {**sizes, "disk": str(folder / "kv"), "fleet-secret": str(secret)}


@contextmanager
def with_files(options: dict[str, str], files: Files) -> Iterator[Running]:
    """A service whose disk makes its system calls by ``files``."""

    class WithFiles(ServeSettings):
        @property
        def tiers(self) -> TierSettings | None:
            tiers = super().tiers
            assert tiers is not None and tiers.disk is not None
            return replace(tiers, disk=replace(tiers.disk, files=files))

    with running(WithFiles.parse({**ALWAYS, **options})) as (service, url):
        found = Running(service, url)
        try:
            yield found
        finally:
            found.close()


def test_what_the_disk_lacks_is_counted_by_reason(tmp_path: Path) -> None:
    files = FaultyFiles()
    with with_files(tier_options(tmp_path), files) as live:
        operator = live.operator
        reasons = re.findall(r'^radixkv_tier_missed_records_total{reason="(\w+)",tier="disk"} 0.0$',
                             operator.get("/metrics").text, re.M)  # fmt: skip
        assert sorted(reasons) == sorted(MISSED), "each is there before it happens"
        files.before = failing("write", times=3)
        ask(live.acme)
        eventually(lambda: metric(operator, "unstored_records_total", "disk", reason="write_errors") > 0)
        eventually(lambda: metric(operator, "operation_seconds_count", "disk", operation="write") > 0)
        eventually(lambda: metric(operator, "operation_seconds_count", "disk", operation="sync") > 0)
        assert metric(operator, "missed_records_total", "disk", reason="read_errors") == 0
    with with_files(tier_options(tmp_path), files := FaultyFiles()) as live:
        files.before = failing("read", times=1)
        ask(live.acme)
        assert metric(live.operator, "missed_records_total", "disk", reason="read_errors") == 1
        assert metric(live.operator, "operation_seconds_count", "disk", operation="read") > 1
        assert metric(live.operator, "unstored_records_total", "disk", reason="write_errors") == 0
        assert 'reason="absent",tier="host"' not in live.operator.get("/metrics").text


def test_a_rotated_secret_opens_the_disk_with_the_previous_one(tmp_path: Path) -> None:
    options = tier_options(tmp_path)
    new = tmp_path / "new.secret"
    new.write_text("n" * 40)
    new.chmod(0o600)
    with service_in_thread(**options) as live:
        first, _ = ask(live.acme)
    rotated = {**options, "fleet-secret": str(new)}
    with pytest.raises(ConfigError, match="fleet_secret doesn't open"), service_in_thread(**rotated):
        pass
    with service_in_thread(**rotated, **{"previous-secrets": options["fleet-secret"]}) as live:
        again, cached = ask(live.acme)
        assert again == first and cached > 100 and metric(live.operator, "hit_blocks_total", "disk") > 0
    with service_in_thread(**rotated) as live:
        assert ask(live.acme)[1] == cached, "it is sealed under the new secret alone"
    with pytest.raises(ConfigError, match="fleet_secret doesn't open"), service_in_thread(**options):
        pass


def purge_by_command(url: str, timeout_s: float = 0.5) -> tuple[int, str, str]:
    """Run ``radixkv purge acme``. Returns the exit code and what it printed."""
    options = ["--url", url, "--key", KEYS["operator"], "--timeout", str(timeout_s)]
    result = CliRunner().invoke(commands, ["purge", "acme", *options])
    return result.exit_code, result.stdout, result.stderr


def test_a_purge_that_the_disk_owes_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    options, files = tier_options(tmp_path), FaultyFiles()
    with with_files(options, files) as live:
        _, cached = ask(live.acme)
        assert cached == 0
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 0)
        files.before = failing("write")
        done = live.operator.post("/v1/tenants/acme/purge")
        assert done.status_code == 200, done.text
        found = done.json()
        assert not found["complete"] and found["owed"] and len(found["pending"]) == 1
        state = live.operator.get("/v1/tenants/acme/purge").json()
        assert not state["complete"] and state["owed"] and state["pending"] == found["pending"]
        assert metric(live.operator, "owed_purges", "disk") == 1
        code, _, complaint = purge_by_command(live.url)
        assert code == 1 and "not confirmed by" in complaint and "disk of the replica" in complaint
        assert ask(live.acme)[1] == 0, "nothing of it is served"
        cleared = live.acme.delete("/v1/cache").json()
        assert cleared["namespaces"] == 1 and cleared["owed"]
        assert not live.operator.get("/v1/tenants/globex/purge").json()["owed"]
        removed = live.operator.delete("/v1/tenants/acme")
        assert removed.status_code == 503 and removed.json()["error"]["type"] == "not_saved", removed.text
        assert ask(live.acme)[1] == 0, "the tenant stays"
        files.before = lambda call: None
        state = eventually(
            lambda: (now := live.operator.get("/v1/tenants/acme/purge").json())["complete"] and now
        )
        assert not state["owed"] and state["confirmed"] == found["pending"] and not state["pending"]
        assert purge_by_command(live.url)[0] == 0
        assert live.acme.delete("/v1/cache").json()["owed"] is False
        assert live.operator.delete("/v1/tenants/acme").status_code == 204


def test_a_purge_waits_for_the_disk_of_another_replica(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    options, files = tier_options(tmp_path), FaultyFiles()
    fleet = {"redis": redis_server.url}
    secret = {"fleet-secret": options["fleet-secret"]}
    with (
        with_files({**options, **fleet, "replica": "b"}, files) as b,
        service_in_thread(**fleet, **secret, replica="a") as a,
    ):
        eventually(lambda: metric(b.operator, "open", "disk") == 1)
        ask(b.acme)
        eventually(lambda: metric(b.operator, "resident_blocks", "disk") > 0)
        files.before = failing("write")
        a.operator.post("/v1/tenants/acme/purge").raise_for_status()
        eventually(lambda: metric(b.operator, "owed_purges", "disk") == 1)

        def state(asked: Running) -> Any:
            return asked.operator.get("/v1/tenants/acme/purge").json()

        assert state(a) == {
            "generation": 1, "complete": False, "confirmed": ["a"], "pending": ["b"], "unconfirmed": [],
            "owed": False,
        }  # fmt: skip
        assert state(b)["owed"] and purge_by_command(a.url)[0] == 1
        files.before = lambda call: None
        eventually(lambda: state(a)["confirmed"] == ["a", "b"])
        assert not state(b)["owed"] and purge_by_command(a.url, LIMIT_S)[0] == 0


def test_a_stop_with_an_owed_purge_fails_and_the_next_start_finds_it(tmp_path: Path) -> None:
    options, files = tier_options(tmp_path), FaultyFiles()
    message = r"kv was closed and may still have the records of 1 .*'acme'"
    with pytest.raises(TierError, match=message), with_files(options, files) as live:
        first, _ = ask(live.acme)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 0)
        files.before = failing("write")
        assert live.operator.post("/v1/tenants/acme/purge").json()["owed"]
    with service_in_thread(**options) as live:
        assert ask(live.acme) == (first, 0)


class Refusing:
    """A method of a disk that fails, until ``is_over``."""

    def __init__(self, works: Callable[[DiskRecords, str], object], is_over: threading.Event) -> None:
        self._works, self._is_over = works, is_over

    def __get__(self, tier: DiskRecords, owner: type) -> Callable[[str], object]:
        def purge(of: str) -> object:
            if not self._is_over.is_set():
                raise TierError("the disk fails")
            return self._works(tier, of)

        return purge


def refused_purges(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no disk purge anybody, by name or tag, until the event is set."""
    is_over = threading.Event()
    for method in (DiskRecords.purge, DiskRecords.purge_tag):
        monkeypatch.setattr(DiskRecords, method.__name__, Refusing(method, is_over))
    return is_over


def hanging(is_over: threading.Event) -> Callable[[str], None]:
    """For FaultyFiles: a disk that only reads, until the event is set."""
    return lambda call: None if call == "read" else is_set(is_over)


def write_keys(path: Path, *tenants: str) -> dict[str, str]:
    """Write a keys file with these tenants. Returns the option that names it."""
    keys = {"operator": KEYS["operator"], "tenants": {each: f"demo-{each}" for each in tenants}}
    path.write_text(json.dumps(keys))
    path.chmod(0o600)
    return {"keys": str(path)}


def ask_as_new_tenant(live: Running, tenant: str) -> int:
    """Create a tenant, and return the cached tokens of its first prompt."""
    live.operator.put(f"/v1/tenants/{tenant}", json={}).raise_for_status()
    with client(live.url, live.operator.post(f"/v1/tenants/{tenant}/keys").json()["key"]) as new:
        return ask(new)[1]


def test_a_tenant_that_is_removed_while_the_service_is_down_leaves_nothing(tmp_path: Path) -> None:
    options = tier_options(tmp_path)
    both = write_keys(tmp_path / "keys.json", "acme", "globex")
    with service_in_thread(**options, **both) as live:
        ask(live.acme), ask(live.globex)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 40)
    keys = write_keys(tmp_path / "keys.json", "globex")
    with service_in_thread(**options, **keys) as live:
        assert 0 < metric(live.operator, "resident_blocks", "disk") < 40, "destroyed before the first request"
        assert ask_as_new_tenant(live, "acme") == 0
        assert ask(live.globex)[1] > 100


def test_a_strict_tenant_is_kept_in_host_memory_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a start finds of it on the disk is destroyed, and the log says so once."""
    caplog.set_level(logging.INFO, logger="radixkv.service")
    told = "strict tenants have no disk, their KV is kept in host memory alone"
    options = tier_options(tmp_path)
    keys = write_keys(tmp_path / "keys.json", "acme", "globex")
    with service_in_thread(**options, **keys) as live:
        ask(live.acme), ask(live.globex)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 40)
    assert told not in caplog.text
    document = json.loads((tmp_path / "keys.json").read_text())
    before = document["tenants"]["acme"]
    own = before if isinstance(before, dict) else {"keys": before}
    document["tenants"]["acme"] = {**own, "mode": "strict", "guaranteed_blocks": 64}
    (tmp_path / "keys.json").write_text(json.dumps(document))
    for _ in range(2):
        with service_in_thread(**options, **keys) as live:
            eventually(lambda: 0 < metric(live.operator, "resident_blocks", "disk") < 40)
            eventually(lambda: metric(live.operator, "owed_purges", "disk") == 0)
            assert ask(live.acme)[1] == 0 and ask(live.globex)[1] > 100
            evict_all(live)
            assert ask(live.acme)[1] > 100, "from host memory"
    assert caplog.text.count(f"{told}: 'acme'") == 2


def test_a_disk_that_cannot_destroy_a_removed_tenants_records_serves_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    options, files = tier_options(tmp_path), FaultyFiles()
    both = write_keys(tmp_path / "keys.json", "acme", "globex")
    with service_in_thread(**options, **both) as live:
        ask(live.acme), ask(live.globex)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 40)
    keys = write_keys(tmp_path / "keys.json", "globex")
    is_well = refused_purges(monkeypatch)
    message = "1 tenants that were removed before the start"
    with pytest.raises(TierError, match=message), with_files({**options, **keys}, files) as live:
        assert metric(live.operator, "owed_purges", "disk") == 1
        assert ask_as_new_tenant(live, "acme") == 0
        assert ask(live.globex)[1] > 100, "others notice nothing"
    write_keys(tmp_path / "keys.json", "globex")
    with with_files({**options, **keys}, files) as live:
        assert metric(live.operator, "owed_purges", "disk") == 1
        is_well.set()
        eventually(lambda: metric(live.operator, "owed_purges", "disk") == 0)
        assert ask_as_new_tenant(live, "acme") == 0


def test_a_tenant_that_the_fleet_purged_while_the_service_was_down_is_confirmed_when_its_keys_are_destroyed(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    options, fleet = tier_options(tmp_path), {"redis": redis_server.url}
    secret = {"fleet-secret": options["fleet-secret"]}
    both = write_keys(tmp_path / "keys.json", "acme", "globex")
    with service_in_thread(**options, **fleet, **both, replica="b") as b:
        eventually(lambda: metric(b.operator, "open", "disk") == 1)
        ask(b.acme)
        eventually(lambda: metric(b.operator, "resident_blocks", "disk") > 0)
    keys = write_keys(tmp_path / "other.json", "globex")
    is_well = refused_purges(monkeypatch)
    with (
        service_in_thread(**fleet, **secret, **both, replica="a") as a,
        service_in_thread(**options, **fleet, **keys, replica="b") as b,
    ):
        eventually(lambda: metric(b.operator, "open", "disk") == 1)
        assert a.operator.post("/v1/tenants/acme/purge").json()["pending"] == ["b"]
        b.service.fleet.coordinator.beat()
        assert a.operator.get("/v1/tenants/acme/purge").json()["pending"] == ["b"]
        is_well.set()
        eventually(lambda: a.operator.get("/v1/tenants/acme/purge").json()["complete"])
        assert metric(b.operator, "resident_blocks", "disk") == 0


def test_a_removed_tenant_is_unpurged_until_the_disk_has_destroyed_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    options, files = tier_options(tmp_path), FaultyFiles()
    keys = write_keys(tmp_path / "keys.json", "acme", "globex")
    with with_files({**options, **keys}, files) as live:
        sync, coordinator = live.service.tenant_sync, live.service.fleet.coordinator
        ask(live.acme)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 0)
        files.before = failing("write")
        write_keys(tmp_path / "keys.json", "globex")
        eventually(lambda: live.acme.get("/v1/stats").status_code == 401)
        eventually(lambda: coordinator.purges.generation("acme") == 1)
        ticks, tick = [], live.service.fleet_pins.tick
        live.service.fleet_pins.tick = lambda: (tick(), ticks.append(1))[0]  # type: ignore[method-assign]
        eventually(lambda: len(ticks) >= 3, "upkeep looks after it")
        assert sync.unpurged == {"acme"} and metric(live.operator, "owed_purges", "disk") == 1
        assert coordinator.purges.generation("acme") == 1, "purged in the fleet once"
        files.before = lambda call: None
        eventually(lambda: not sync.unpurged)
        assert metric(live.operator, "owed_purges", "disk") == 0
    message = r"For a tenant that was removed: `radixkv disk forget .*kv --tenant NAME`"
    with pytest.raises(TierError, match=message), with_files({**options, **keys}, files) as live:
        ask(live.globex)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 0)
        files.before = failing("write")
        write_keys(tmp_path / "keys.json", "acme")
        eventually(lambda: live.globex.get("/v1/stats").status_code == 401)
    with service_in_thread(**options, **keys) as live:
        assert ask_as_new_tenant(live, "globex") == 0


@pytest.mark.parametrize("query", [{}, {"salt": "never-used"}])
def test_a_clear_forgets_what_lies_only_on_the_disk(tmp_path: Path, query: dict[str, str]) -> None:
    options = tier_options(tmp_path)
    with service_in_thread(**options) as live:
        ask(live.acme), ask(live.globex)
    with service_in_thread(**options) as live:
        before = metric(live.operator, "resident_blocks", "disk")
        answer = live.acme.delete("/v1/cache", params=query)
        assert answer.json() == {"namespaces": 0, "blocks": 0, "owed": False}, answer.text
        assert 0 < metric(live.operator, "resident_blocks", "disk") < before
        assert ask(live.acme)[1] == 0
        assert ask(live.globex)[1] > 100
    with service_in_thread(**{"host-memory": "16MiB"}) as live:
        ask(live.acme)
        assert live.acme.delete("/v1/cache", params={"salt": "never-used"}).status_code == 404


def test_a_clear_of_what_lies_only_on_a_disk_that_fails_is_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    options, files = tier_options(tmp_path), FaultyFiles()
    with service_in_thread(**options) as live:
        ask(live.acme)
    with with_files(options, files) as live:
        files.before = failing("write")
        assert live.acme.delete("/v1/cache").json() == {"namespaces": 0, "blocks": 0, "owed": True}
        assert ask(live.acme)[1] == 0
        files.before = lambda call: None
        eventually(lambda: metric(live.operator, "owed_purges", "disk") == 0)


def test_a_disk_that_hangs_costs_no_lease(redis_server: RedisServer, tmp_path: Path) -> None:
    options, files, is_over = tier_options(tmp_path), FaultyFiles(), threading.Event()
    fleet = {"redis": redis_server.url}
    secret = {"fleet-secret": options["fleet-secret"]}
    with (
        with_files({**options, **fleet, "replica": "b"}, files) as b,
        service_in_thread(**fleet, **secret, replica="a") as a,
    ):
        coordinator = b.service.fleet.coordinator

        def num_beats() -> int:
            return int(redis_server.text("HGET rk1:{r:b}:meta beats"))

        eventually(lambda: metric(b.operator, "open", "disk") == 1)
        ask(b.acme), ask(b.globex)
        eventually(lambda: metric(b.operator, "resident_blocks", "disk") > 40)
        files.before = hanging(is_over)
        posts = [
            threading.Thread(target=a.operator.post, args=(f"/v1/tenants/{tenant}/purge",))
            for tenant in ("acme", "globex")
        ]
        for each in posts:
            each.start()
        for _ in range(3):
            before = num_beats()
            eventually(lambda before=before: num_beats() > before)  # type: ignore[misc]
            assert (coordinator.health().state, coordinator.knows_generations) == ("ok", True)
        assert a.operator.get("/v1/tenants/acme/purge").json()["pending"] == ["b"]
        is_over.set()
        for each in posts:
            ended(each)
        for tenant in ("acme", "globex"):
            path = f"/v1/tenants/{tenant}/purge"
            eventually(lambda path=path: a.operator.get(path).json()["complete"])  # type: ignore[misc]
        assert metric(b.operator, "owed_purges", "disk") == 0


def test_a_keys_file_that_loses_tenants_takes_effect_while_the_disk_hangs(tmp_path: Path) -> None:
    options, files, is_over = tier_options(tmp_path), FaultyFiles(), threading.Event()
    keys = write_keys(tmp_path / "keys.json", "acme", "globex", "one", "two")
    with with_files({**options, **keys}, files) as live:
        ask(live.acme)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 0)
        files.before = hanging(is_over)
        write_keys(tmp_path / "keys.json", "globex")
        eventually(lambda: live.acme.get("/v1/stats").status_code == 401)
        ticks, tick = [], live.service.fleet_pins.tick
        live.service.fleet_pins.tick = lambda: (tick(), ticks.append(1))[0]  # type: ignore[method-assign]
        eventually(lambda: len(ticks) >= 3 and live.nobody.get("/healthz").is_success, "upkeep goes on")
        assert metric(live.operator, "owed_purges", "disk") > 0
        is_over.set()
        eventually(lambda: metric(live.operator, "owed_purges", "disk") == 0)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk_destroys_the_keys_of_a_purged_tenant(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=72m", "tmpfs", str(tmp_path / "mount")]
    subprocess.run(mount, check=True)
    options = {**tier_options(tmp_path), "disk": str(tmp_path / "mount" / "kv")}
    given = [each for name, value in options.items() for each in (f"--{name}", value)]
    try:
        with served(tmp_path / "first.log", *given) as process:
            with client(process.url, KEYS["acme"]) as acme:
                first, _ = ask(acme)
            with client(process.url, KEYS["operator"]) as operator:
                eventually(lambda: metric(operator, "resident_blocks", "disk") > 0)
            with suppress(OSError), (tmp_path / "mount" / "fill").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            assert purge_by_command(process.url, LIMIT_S)[0] == 0, "the key's space is enough"
            process.kill()
        with served(tmp_path / "second.log", *given) as process, client(process.url, KEYS["acme"]) as acme:
            assert ask(acme) == (first, 0)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path / "mount")], check=True)


@pytest.mark.slow
def test_a_process_that_ends_with_an_owed_purge_says_so(tmp_path: Path) -> None:
    """Its folder was removed under it."""
    options = tier_options(tmp_path)
    given = [each for name, value in options.items() for each in (f"--{name}", value)]
    with served(tmp_path / "first.log", *given) as process:
        with client(process.url, KEYS["acme"]) as acme:
            ask(acme)
        with client(process.url, KEYS["operator"]) as operator:
            eventually(lambda: metric(operator, "resident_blocks", "disk") > 0)
        shutil.rmtree(tmp_path / "kv")
        code, _, complaint = purge_by_command(process.url)
        assert code == 1 and "disk of the replica" in complaint
        assert process.stop() == 1
        assert "may still have the records of 1 purged or cleared tenants ('acme')" in process.output
        assert "Traceback" not in process.output


def test_a_replica_that_was_down_while_redis_lost_a_purge_serves_nothing(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    fleet = {"redis": redis_server.url}
    options = {**tier_options(tmp_path), **fleet, "replica": "b"}
    with service_in_thread(**options) as live:
        first, cached = ask(live.acme)
        assert cached == 0
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 0)
    with service_in_thread(**options) as live:
        eventually(lambda: metric(live.operator, "open", "disk") == 1)
        assert ask(live.acme)[1] > 100, "the same store: nothing was lost"
    with service_in_thread(**fleet, **{"replica": "a", "fleet-secret": options["fleet-secret"]}) as live:
        assert live.operator.post("/v1/tenants/acme/purge").json()["generation"] == 1
    with closing(redis.Redis.from_url(redis_server.url)) as store:
        store.flushall()
    with service_in_thread(**options) as live:
        eventually(lambda: metric(live.operator, "open", "disk") == 1)
        assert ask(live.acme) == (first, 0)
        assert metric(live.operator, "hit_blocks_total", "disk") == 0


WHOLE = {"disk": "kv", "host-memory": "1GiB", "disk-size": "1GiB", "fleet-secret": "secret"}


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("2TB/day", 2e12 / 86_400), ("1.5 GiB/hour", 1.5 * 2**30 / 3_600), ("20MB/s", 2e7)],
)
def test_a_write_budget_is_given_as_a_rate(text: str, bytes_per_s: float, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s" * 40)
    given = WHOLE | {"disk": str(tmp_path / "kv"), "fleet-secret": str(tmp_path / "secret")}
    tiers = ServeSettings.parse({**given, "disk-writes": text}).tiers
    assert tiers is not None and tiers.disk is not None and tiers.disk.bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"host-memory": "8GXB"}, "--host-memory"),
        ({"host-memory": ""}, "--host-memory"),
        ({"host-memory": "0"}, "--host-memory"),
        ({"tier-dtype": "int8"}, "--host-memory"),
        ({"tier-dtype": "int4", "host-memory": "1GiB"}, "--tier-dtype"),
        ({"disk": "kv"}, "--host-memory"),
        ({"disk-size": "1GiB", "host-memory": "1GiB"}, "--disk"),
        ({"disk": "kv", "host-memory": "1GiB"}, "--disk-size"),
        ({"disk": "kv", "host-memory": "1GiB", "disk-size": "1GiB"}, "--fleet-secret"),
        ({"disk": "no/kv", "host-memory": "1GiB", "disk-size": "1GiB", "fleet-secret": "secret"}, "--disk"),
        ({"disk": "secret", "host-memory": "1GiB", "disk-size": "1GiB", "fleet-secret": "secret"}, "--disk"),
        ({"disk": "kv", "host-memory": "1GiB", "disk-size": "lots", "fleet-secret": "secret"}, "--disk-size"),
        ({**WHOLE, "disk-writes": "2TB"}, "--disk-writes"),
        ({**WHOLE, "disk-writes": "0TB/day"}, "--disk-writes"),
        ({**WHOLE, "disk-writes": "-2TB/day"}, "--disk-writes"),
        ({"disk-writes": "2TB/day", "host-memory": "1GiB"}, "--disk"),
    ],
)
def test_settings_that_are_refused(given: dict[str, str], named: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s" * 40)
    values = {
        name: str(tmp_path / text) if name in ("disk", "fleet-secret") else text
        for name, text in given.items()
    }
    with pytest.raises(ConfigError) as found:
        ServeSettings.parse(values)
    assert found.value.setting == named
    assert not (tmp_path / "kv").exists()


def test_memory_that_the_machine_has_not() -> None:
    with (
        pytest.raises(ConfigError, match="what the machine has"),
        service_in_thread(**{"host-memory": "900TiB"}),
    ):
        pass
