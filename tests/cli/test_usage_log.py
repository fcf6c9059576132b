"""``radixkv usage verify`` and ``show``."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from radixkv.billing.usage_folder import key_from
from radixkv.cli.main import commands
from radixkv.errors import ConfigError
from tests.billing.support import HOUR, appending, log_files, record, written


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["usage", *arguments])


def test_a_log_is_checked_by_the_key_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    written(folder, range(3), key=None)
    done = invoke("verify", str(folder))
    assert done.exit_code == 0 and "3 records in 1 files, ended" in done.output, done.output
    (path,) = log_files(folder)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"read":2', b'"read":9'))
    done = invoke("verify", str(folder))
    assert done.exit_code == 1 and "TAMPERED" in done.output and f"{path.name}:4" in done.output
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:3]))
    done = invoke("verify", str(folder), "--json")
    found = json.loads(done.output)
    assert done.exit_code == 1 and found["verdict"] == "truncated" and found["num_missing"] == 3


def test_a_log_is_checked_by_the_fleets_secrets(tmp_path: Path) -> None:
    folder, secrets = tmp_path / "log", [tmp_path / "new", tmp_path / "old"]
    for path, letter in zip(secrets, "no", strict=True):
        path.write_text(letter * 32)
    written(folder, [1], key=key_from(b"o" * 32))
    written(folder, [2], key=key_from(b"n" * 32), previous=[key_from(b"o" * 32)])
    new, old = map(str, secrets)
    assert invoke("verify", str(folder), "--fleet-secret", new, "--previous", old).exit_code == 0
    assert invoke("verify", str(folder), "--fleet-secret", new).exit_code == 1
    assert isinstance(invoke("verify", str(folder)).exception, ConfigError), "the folder has no key"
    assert isinstance(invoke("verify", str(tmp_path / "nothing")).exception, ConfigError)


def test_lines_under_the_folders_key_are_trusted_only_if_the_caller_says_so(tmp_path: Path) -> None:
    folder, secret = tmp_path / "log", tmp_path / "secret"
    secret.write_text("n" * 32)
    written(folder, [1, 2], key=None)
    written(folder, [3], key=key_from(b"n" * 32))
    arguments = ["verify", str(folder), "--fleet-secret", str(secret)]
    done = invoke(*arguments)
    said = "5 lines are proven only by the key in the folder: anybody who can write to the folder could have made them"
    assert done.exit_code == 1 and "UNPROVEN" in done.output and said in done.output
    found = json.loads(invoke(*arguments, "--json").output)
    assert (found["verdict"], found["num_by_folder_key"], found["trusts_folder_key"]) == (
        "unproven",
        5,
        False,
    )
    done = invoke(*arguments, "--trust-folder-key")
    assert done.exit_code == 0 and done.output.startswith("intact") and said in done.output
    (folder / "key").unlink()
    assert invoke(*arguments, "--trust-folder-key").exit_code == 1


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
    (path,) = log_files(folder)
    path.write_bytes(path.read_bytes().replace(b'"read":1', b'"read":-1'))
    done = invoke("show", str(folder), "--json")
    assert json.loads(done.stdout)[0]["requests"] == 1 and f"{path.name}:2" in done.stderr
