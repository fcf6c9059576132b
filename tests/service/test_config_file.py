"""The configuration file: what it may hold, and what happens to everything else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from radixkv.configuration.errors import each_of, raise_all
from radixkv.configuration.urls import without_password
from radixkv.errors import ConfigError
from radixkv.service import config_file
from radixkv.service.config_file import MAX_BYTES, MAX_ERRORS, FileValue
from radixkv.service.options import SETTINGS
from radixkv.service.precedence import Sources


def load(folder: Path, text: str | bytes, command: str = "serve") -> dict[str, str]:
    path = folder / "radixkv.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    values, errors = config_file.load(str(path), command)
    raise_all(errors)
    return {name: str(value.value) for name, value in values.items()}


def refusal(folder: Path, text: str | bytes, command: str = "serve") -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, command)
    message = str(caught.value).replace(f"{folder}/", "")
    assert message.startswith(("radixkv.yaml", "config=")), message
    return message


def test_values_are_texts_with_their_lines(tmp_path: Path) -> None:
    text = "# a comment\nport: 8401\n\nmodel: models/llama\nreplica: '7'\ntimeout-s: 1e2\nlease-s: 2.5\n"
    assert load(tmp_path, text) == {
        "port": "8401",
        "model": "models/llama",
        "replica": "7",
        "timeout-s": "1e2",
        "lease-s": "2.5",
    }
    path = str(tmp_path / "radixkv.yaml")
    assert config_file.load(path, "serve")[0]["model"] == FileValue("models/llama", f"{path}:4")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}", "---\n# nothing\n...\n", "\ufeff{}"])
def test_a_file_may_be_empty(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text) == {}


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("num-bloks", "num-blocks"),
        ("num_blocks", "num-blocks"),
        ("PORT", "port"),
        ("max_body_byte", "max-body-bytes"),
        ("fleet-secrets", "fleet-secret"),
        ("x" * 100_000, ""),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path, wrong: str, nearest: str) -> None:
    message = refusal(tmp_path, f"host: 127.0.0.1\n{wrong}: 1\n" if nearest else f'? "{wrong}"\n: 1\n')
    assert "is not a setting of `radixkv serve`; the nearest is " + nearest in message
    assert message.startswith("radixkv.yaml:2: '" if nearest else "radixkv.yaml:1: '") and len(message) < 300


def test_a_setting_of_the_other_command_is_named(tmp_path: Path) -> None:
    assert "not a setting of `radixkv route`, but of `radixkv serve`" in refusal(
        tmp_path, "num-blocks: 8", "route"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nport: 2", "radixkv.yaml:2 sets port a second time"),
        ('port: 1\n"port": 1', "radixkv.yaml:2 sets port a second time"),
        ("port: &a 1", "has an anchor"),
        ("&a port: 1", "has an anchor"),
        ("&a {port: 1}", "has an anchor"),
        ("port: *a", "has an alias"),
        ("*a : 1", "has an alias"),
        ("port: !!int 1", "has a tag"),
        ("port: !!python/object/apply:os.system [id]", "has a tag"),
        ("!!python/object:radixkv.Cache {}", "has a tag"),
        ("<<: {port: 1}", "'<<' is not a setting"),
        ("port: 1\n---\nport: 2", "radixkv.yaml:2 begins a second document"),
        ("port: [1]", "port is a list"),
        ("port: {a: 1}", "port is a map"),
        ("? [port]\n: 1", "has a list or a map as a name"),
        ("- port: 1", "is not a map of settings"),
        ("port", "is not a map of settings"),
        ("port: 1\n\tburst: 2", "is not YAML"),
        ("port: 1\n}", "is not YAML"),
        ("port: '1'", "an integer from 0 to 65535, without quotes"),
        ("replica: 7", "YAML reads as int"),
        ("replica: 1.5", "YAML reads as float"),
        ("log-level: off", "YAML reads as bool"),
        ("events-topic: 2026-01-01", "YAML reads as timestamp"),
        ("keys: null", "YAML reads as null"),
        ("keys:", "keys has no value"),
        ("model: ~", "YAML reads as null"),
        ("port: 1\x00", "is not YAML"),
        (b"port: \xff", "text in UTF-8; byte 6 is not"),
        ("port: 1".encode("utf-16"), "text in UTF-8"),
        (b"#" * (MAX_BYTES + 1), f"at most {MAX_BYTES} bytes"),
    ],
)
def test_other_content_is_refused_by_name(tmp_path: Path, text: str | bytes, words: str) -> None:
    assert words in refusal(tmp_path, text)


def test_all_errors_are_reported_with_their_lines(tmp_path: Path) -> None:
    """A setting that has an error counts as given: no rule complains that it is missing."""
    path = tmp_path / "radixkv.yaml"
    path.write_text(
        "prot: 1\nport: [1, {a: 2}]\nhost: 0.0.0.0\nkeys: {a: 1}\nburst: 0\nburst: 2\ndisk: &a kv\nreplica: 7\n"
        "? [a]\n: 1\nlossy-disk: kv\nmodel: /nowhere\nlog-level: loud\n"
    )
    with pytest.raises(ConfigError) as caught:
        Sources("serve", {"burst": "x"}, {}, str(path)).read().parsed()
    said = [str(each).removeprefix(f"{path}:") for each in each_of(caught.value)]
    assert [each.partition(" ")[0].rstrip(":") for each in said] == [
        *("1", "2", "4", "6", "7", "8", "9", "11"),  # of the file
        *("12", "--burst='x'", "13"),  # of the values, in the order of lists
        *("--host-memory", "--disk-size", "--fleet-secret"),
    ], said
    assert said[0] == "1: 'prot' is not a setting of `radixkv serve`; the nearest is port"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("}", "is not YAML"),
        ("port: [" + "1," * 9_999 + "]", "too long"),
        ("a: 1\n" * MAX_ERRORS, "100 errors"),
    ],
)
def test_what_ends_the_reading_is_reported_after_the_errors_before_it(
    tmp_path: Path, end: str, words: str
) -> None:
    """No rule then complains of a setting that is missing: it may be in the rest."""
    path = tmp_path / "radixkv.yaml"
    path.write_text(f"prot: 1\nhost: 0.0.0.0\n{end}\nkeys: {path}\n")
    with pytest.raises(ConfigError) as caught:
        Sources("serve", {}, {}, str(path)).read().parsed()
    first, *_, last = each_of(caught.value)
    assert "the nearest is port" in str(first) and words in str(last)
    assert len(each_of(caught.value)) <= MAX_ERRORS + 1


@pytest.mark.parametrize(
    "text",
    [
        "port: " + "[" * (MAX_BYTES - 10),
        "? " * (MAX_BYTES // 2 - 10),
        "port: " + "{a: " * (MAX_BYTES // 4 - 10),
        "- " * (MAX_BYTES // 2 - 10),
        "".join(f"unknown-{number}: 1\n" for number in range(50_000)),
        "port: &a [" + "*a," * 300_000,
        "host: '" + "a\n\n" * 300_000 + "'",
    ],
    ids=["lists", "names", "maps", "items", "unknown", "aliases", "folds"],
)
def test_a_hostile_file_costs_little(tmp_path: Path, text: str) -> None:
    began = time.process_time()
    try:
        load(tmp_path, text)
    except ConfigError as error:
        assert (
            all(len(str(each)) < 1_000 for each in each_of(error)) and len(each_of(error)) <= MAX_ERRORS + 1
        )
    assert time.process_time() - began < 5


@pytest.mark.parametrize("setting", ["redis", "advertise"])
@pytest.mark.parametrize(
    "url", ["redis://:pa55word@host/0", "redis://me:pa55word@host", "redis://host?password=pa55word"]
)
def test_a_url_in_the_file_has_no_password(tmp_path: Path, setting: str, url: str) -> None:
    message = refusal(tmp_path, f"{setting}: {url}")
    assert "pa55word" not in message and "a URL without a password" in message
    variable = SETTINGS["serve"][setting].variable
    assert variable in message, "it says where the password may be"


@pytest.mark.parametrize("setting", ["fleet-secret", "keys", "tls-key", "redis-password"])
def test_an_inline_secret_is_refused_and_not_shown(tmp_path: Path, setting: str) -> None:
    secret = "bG9uZyBlbm91Z2ggdG8gYmUgYSBzZWNyZXQ="
    path = tmp_path / "radixkv.yaml"
    path.write_text(f"{setting}: {secret}\ntls-cert: {path}\n")
    found = Sources("serve", {}, {}, str(path)).read()
    assert secret not in found.values[setting].displayed
    with pytest.raises(ConfigError) as caught:
        found.parsed()
    assert secret not in str(caught.value) and f"radixkv.yaml:1: {setting}=" in str(caught.value)
    assert SETTINGS["serve"][setting].displayed(str(path)) == str(path), "a path is no secret"


@pytest.mark.parametrize("secret", ["1234567890123456", "0x1f1f1f1f", "2026-01-01", "1.5", "true"])
@pytest.mark.parametrize("setting", ["fleet-secret", "previous-secrets", "redis-password", "keys", "tls-key"])
def test_an_inline_secret_that_yaml_reads_as_another_type_is_not_shown(
    tmp_path: Path, setting: str, secret: str
) -> None:
    message = refusal(tmp_path, f"{setting}: {secret}")
    assert secret not in message and "YAML reads as" in message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis+cluster://a:1,b:2", "redis+cluster://a:1,b:2"),
        ("redis://me:pa55word@host/0", "redis://…@host/0"),
        ("redis://:pa55word@x@host/0", "redis://…@host/0"),
        ("redis://:pa55//word@host/0", "redis://…@host/0"),
        ("redis://host?password=pa55word&db=1", "redis://host?password=…&db=1"),
        ("me:pa55word@host", "…@host"),
        ("me:pa55//word@host", "…@host"),
        ("redis:me:pa55word@host", "…@host"),
        ("redis:/me:pa55word@host", "…@host"),
        ("127.0.0.1:6379", "127.0.0.1:6379"),
        ("redis://me:pa55word", "redis://…"),
        ("redis://:pa55word", "redis://…"),
        ("redis://me:12pa55word/0", "redis://…"),
        ("redis://me:12/pa55word", "redis://…"),
        ("redis://me:12?pa55word", "redis://…"),
        ("redis://me:12#pa55word", "redis://…"),
        ("redis://me:123456789", "redis://…"),
        ("redis://me:pa55word,b:2", "redis://…"),
        ("redis+cluster://a:1,me:pa55word", "redis+cluster://…"),
        ("redis+sentinel://me:pa55/word", "redis+sentinel://…"),
        ("redis://[me:pa55word]", "redis://…"),
        ("redis://me@me:pa55word", "redis://…@…"),
        ("me:pa55word", "…"),
        ("redis:/me:pa55word", "…"),
        ("redis://host/0?passwd=pa55word", "redis://host/0?passwd=…"),
        ("redis://host/0?pasword=pa55word", "redis://host/0?pasword=…"),
        ("rediss://[::1]:6379/0?ssl_ca_certs=/ca", "rediss://[::1]:6379/0?ssl_ca_certs=/ca"),
        ("redis+sentinel://a:1,b:2/service/0", "redis+sentinel://a:1,b:2/service/0"),
        ("unix:///run/a:b.sock?db=1", "unix:///run/a:b.sock?db=1"),
        ("http://10.0.0.7:8400/a:b", "http://10.0.0.7:8400/a:b"),
        ("http://me:pa55word", "http://…"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown == SETTINGS["serve"]["redis"].displayed(url)


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing", "device", "nul"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other"
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    name = {"device": "/dev/zero", "nul": "a\0b"}.get(kind, str(path))
    with pytest.raises(ConfigError, match="a file that can be read"):
        config_file.load(name, "serve")


def test_flags_win_over_the_environment_then_the_file_then_the_default(tmp_path: Path) -> None:
    path = tmp_path / "radixkv.yaml"
    path.write_text("port: 1\nburst: 1\nmax-queued: 1\n")
    values = Sources("serve", {"port": "3"}, {"port": "2", "burst": "2"}, str(path)).resolve()
    found = {
        name: (values[name].text, values[name].source) for name in ("port", "burst", "max-queued", "threads")
    }
    assert found == {
        "port": ("3", "flag"),
        "burst": ("2", "environment"),
        "max-queued": ("1", "file"),
        "threads": ("0", "default"),
    }
    assert [values[name].name for name in found] == [
        "--port",
        "RADIXKV_BURST",
        f"{path}:3: max-queued",
        "--threads",
    ]
