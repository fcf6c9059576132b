"""``radixkv config show`` and ``config check``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from radixkv.cli.main import commands, main
from radixkv.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [each for each in os.environ if each.startswith("RADIXKV_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "radixkv.yaml"
    path.write_text("port: 8401\nburst: 7\nmax-queued: 3\n")
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["config", *arguments])


def shown(*arguments: str) -> dict[str, dict[str, Any]]:
    done = run("show", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return {each["setting"]: each for each in json.loads(done.stdout)}


def test_show_says_where_each_value_comes_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_BURST", "8")
    found = shown("serve", "--config", str(file), "--port", "9000")
    assert found["port"] | {"value": "9000", "source": "flag", "place": "--port"} == found["port"]
    assert (
        found["burst"] | {"value": "8", "source": "environment", "place": "RADIXKV_BURST"} == found["burst"]
    )
    assert found["max-queued"] | {"value": "3", "source": "file", "place": f"{file}:3"} == found["max-queued"]
    assert found["threads"] | {"value": "0", "source": "default", "place": None} == found["threads"]
    assert found["keys"] | {"value": None, "unset": "demo keys"} == found["keys"]
    text = run("show", "--config", str(file)).output.splitlines()
    assert any(line.split() == ["max-queued", "3", "file", f"{file}:3", "SIGHUP"] for line in text)
    assert any(line.split()[:2] == ["host", "127.0.0.1"] and line.endswith("restart") for line in text)


def test_show_takes_the_command_and_the_file_from_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXKV_CONFIG", str(file))
    assert shown()["port"]["value"] == "8401"
    assert shown("route", "--cost", "lmetric")["cost"]["source"] == "flag"


def test_show_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_REDIS", "redis://me:pa55word@host/0")
    monkeypatch.setenv("RADIXKV_FLEET_SECRET", "a-secret-in-place-of-a-path")
    done = run("show")
    assert done.exit_code == 0 and "redis://…@host/0" in done.output
    assert "pa55word" not in done.output and "a-secret-in" not in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stats"], "command='stats'"),
        (["serve", "--colour", "red"], "No such option"),
        (["serve", "--config", "/nowhere.yaml"], "a file that can be read"),
    ],
)
def test_show_refuses(arguments: list[str], words: str) -> None:
    done = run("show", *arguments)
    said = done.output + (str(done.exception) if isinstance(done.exception, ConfigError) else "")
    assert done.exit_code != 0 and words in said


def test_check_accepts_a_valid_file(file: Path) -> None:
    assert run("check", str(file)).stdout == f"{file} is valid for `radixkv serve`\n"
    refused = run("check", str(file), "--command", "route").exception
    assert isinstance(refused, ConfigError) and "but of `radixkv serve`" not in str(refused)


@pytest.mark.parametrize("words", [["config", "check"], ["serve", "--port", "9000", "--config"]])
def test_all_errors_are_listed_one_a_line(
    words: list[str], file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.write_text("prot: 8401\nburst: 0\nmodel: nowhere\nevents-topic: kv\n")
    with pytest.raises(SystemExit) as ended:
        main([*words, str(file)])
    assert ended.value.code == 2
    assert capfd.readouterr().err.splitlines() == [
        f"radixkv: {file}:1: 'prot' is not a setting of `radixkv serve`; the nearest is port",
        f"radixkv: {file}:3: model='nowhere' is not allowed; allowed: an existing directory",
        f"radixkv: {file}:2: burst='0' is not allowed; allowed: an integer from 1 to 1000000",
        "radixkv: --events is not set; allowed: an endpoint: tcp://IP:PORT, or ipc:// and an absolute path, "
        f"because {file}:4: events-topic is set",
    ]


def test_the_environment_does_not_change_a_check(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_PORT", "not a port")
    assert run("check", str(file)).exit_code == 0


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("disk-bandwidth", "3GB/s", "strict tenants have no part of the disk"),
        (
            "disk-bandwidth",
            "3GB/s",
            "host memory alone (--host-memory); --disk-writes bounds what is written",
        ),
        ("lossy-host-memory", "8MiB", "--host-memory with --tier-dtype fp8 or int8, for all tenants"),
        ("lossy-disk", "/kv", "--disk with --tier-dtype fp8 or int8"),
        ("lossy-disk", "/kv", "`radixkv disk reset` empties the old folder"),
        ("lossy-disk-size", "1GiB", "--disk-size with --tier-dtype fp8 or int8"),
    ],
)
def test_a_setting_that_was_removed_is_refused_with_what_to_do_instead(
    name: str, value: str, instead: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an option, a variable or a line of a file; no help names it."""
    file.write_text(f"port: 1\n{name}: {value}\n")
    said = [str(run("check", str(file)).exception), str(run("show", f"--{name}", value).exception)]
    variable = f"RADIXKV_{name.upper().replace('-', '_')}"
    monkeypatch.setenv(variable, value)
    said.append(str(run("show").exception))
    for each, place in zip(said, (f"{file}:2: {name}", f"--{name}", variable), strict=True):
        assert each.startswith(place) and instead in each
    assert name not in CliRunner().invoke(commands, ["serve", "--help"]).output
    assert run("show", "route").exit_code == 0
