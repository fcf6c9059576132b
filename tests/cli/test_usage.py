"""``radixkv usage show`` and ``export``."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from radixkv.cli.main import commands
from radixkv.errors import ConfigError
from radixkv.metering.folder import day_of
from tests.metering.support import (
    HOUR,
    appending,
    chained,
    found,
    record,
    record_files,
    summed,
    sums_of,
    written,
)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["usage", *arguments])


def test_records_of_an_earlier_version_are_copied_once(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    given = [record(number, time_s=HOUR + number * 40_000) for number in range(8)]
    chained(old, given)
    for expected in ("8 records copied", "0 records copied"):
        done = invoke("export", str(old), str(new))
        assert done.exit_code == 0 and done.output.startswith(expected), done.output
    assert found(new) == given
    assert [each.name[6:16] for each in record_files(new)] == [
        day_of(HOUR + day * 86_400) for day in range(4)
    ]
    assert summed(new) == sums_of(given)
    assert isinstance(invoke("export", str(old), str(old)).exception, ConfigError)
    assert isinstance(invoke("export", str(tmp_path / "nothing"), str(new)).exception, ConfigError)


def test_a_removed_command_says_what_is_in_its_place() -> None:
    done = invoke("verify", "/var/lib/usage", "--fleet-secret", "fleet.secret", "--json")
    assert isinstance(done.exception, ConfigError) and "show or export" in str(done.exception)
    assert "verify" not in invoke("--help").output


def test_records_are_summed_by_any_columns(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with appending(folder) as appender:
        for number, tenant in enumerate(["acme", "globex", "acme"]):
            appender.append([record(number, tenant, time_s=HOUR + 3_600 * number)], HOUR + 3_600 * number)
    by_tenant = json.loads(invoke("show", str(folder), "--json").output)
    assert [(row["tenant"], row["requests"], row["read"], row["written"]) for row in by_tenant] == [
        ("acme", 2, 2, 32),
        ("globex", 1, 1, 16),
    ]
    lines = invoke("show", str(folder), "--by", "hour, kind", "--tenant", "acme").output.splitlines()
    assert len(lines) == 3 and lines[1].startswith("2026-01-31T09:00Z") and "completion" in lines[1]
    later = json.loads(
        invoke("show", str(folder), "--json", "--from", "2026-01-31T10:30", "--to", "2026-02-01").output
    )
    assert [row["tenant"] for row in later] == ["acme"]
    for wrong in (["--by", "id"], ["--by", "key,key"], ["--from", "soon"]):
        assert isinstance(invoke("show", str(folder), *wrong).exception, ConfigError)


def test_a_malformed_line_is_told_and_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    written(folder, [1, 2])
    (path,) = record_files(folder)
    path.write_bytes(path.read_bytes().replace(b'"read":1', b'"read":-1'))
    done = invoke("show", str(folder), "--json")
    assert json.loads(done.stdout)[0]["requests"] == 1
    assert done.stderr.startswith("1 lines are no records") and f"{path.name}, bytes 0 to" in done.stderr
