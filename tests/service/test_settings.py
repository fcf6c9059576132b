"""Settings: which values the server accepts, and how it reports invalid ones."""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path
from typing import IO, Any

import pytest
import trustme

from radixkv.clock import ManualClock
from radixkv.configuration.errors import ConfigErrors, each_of
from radixkv.errors import ConfigError
from radixkv.service.auth import Keyring
from radixkv.service.key_store import KeyStore
from radixkv.service.limits import Limits
from radixkv.service.options import COMMANDS, SETTINGS, ServeSettings, shown_paths
from radixkv.service.server import bind


def test_settings_have_defaults() -> None:
    settings = ServeSettings.parse({})
    assert (settings.host, settings.port, settings.num_blocks, settings.block_size) == (
        "127.0.0.1",
        8400,
        4096,
        16,
    )
    assert (settings.policy, settings.device, settings.lease_s) == ("learned", "cpu", 10.0)
    assert settings.model is settings.keys is settings.redis is None
    assert settings.limits == Limits()
    secret = settings.fleet_secret.get_secret_value()
    assert len(secret) == 32 and secret != ServeSettings.parse({}).fleet_secret.get_secret_value()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_setting_has_a_default_or_says_what_holds_without(command: str) -> None:
    """The given defaults, as texts, are the defaults."""
    settings = SETTINGS[command]
    assert all((each.default is None) == bool(each.unset) for each in settings.values())
    required = {"redis": "redis://h", "fleet-secret": __file__}
    texts = {name: each.default for name, each in settings.items()}
    with_texts, without = (COMMANDS[command].parse({**given, **required}) for given in (texts, {}))
    assert vars(with_texts) | {"replica": ""} == vars(without) | {"replica": ""}
    assert without.limits == Limits()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("port", "x"), ("port", ""), ("port", "-1"), ("port", "65536"), ("port", "8400.0"), ("port", "٣"),
        ("host", ""), ("host", "no such host"), ("host", "256.1.1.1"),
        ("drain-s", "-1"), ("drain-s", "nan"), ("drain-s", "soon"), ("drain-s", "86401"), ("drain-s", ""),
        ("lease-s", "0"), ("lease-s", "nan"), ("lease-s", "inf"), ("lease-s", "soon"),
        ("num-blocks", "0"), ("num-blocks", "many"), ("num-blocks", str(2**31)),
        ("block-size", "0"), ("policy", "mru"), ("policy", ""), ("scrub", "some"),
        ("device", "gpu"), ("device", "cuda:x"), ("dtype", "int8"), ("threads", "-1"),
        ("model", "/nowhere"), ("model", ""), ("keys", "/nowhere"), ("keys", "/"),
        ("redis", "127.0.0.1:6379"), ("redis", "http://x"), ("replica", "a b"), ("replica", ""),
        ("fleet-secret", "/nowhere"), ("advertise", "10.0.0.1:8400"), ("advertise", "http://"),
        ("advertise", "http://a/?q"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_named(setting: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeSettings.parse({setting: value})
    shown = (
        "…" if value == "/nowhere" and setting in ("keys", "fleet-secret") else value
    )  # it may be the secret
    assert caught.value.setting == f"--{setting}" and caught.value.value == shown and caught.value.allowed


def test_all_errors_are_raised_together() -> None:
    """Of values, of rules that span settings, and of settings that need others; the rules that can be checked."""
    with pytest.raises(ConfigErrors) as caught:
        ServeSettings.parse(
            {
                "port": "x",
                "lease-s": "0",
                "dtype": "int4",
                "host": "0.0.0.0",
                "disk": "/nowhere/kv",
                "events": "5557",
            },
            {"port": "RADIXKV_PORT", "lease-s": "radixkv.yaml:3: lease-s"},
        )
    assert [each.setting for each in each_of(caught.value)] == [
        *("RADIXKV_PORT", "--keys", "radixkv.yaml:3: lease-s", "--disk", "--dtype", "--events"),
        *("--host-memory", "--disk-size", "--fleet-secret"),
    ]
    assert str(caught.value).startswith(
        "RADIXKV_PORT='x' is not allowed; allowed: an integer from 0 to 65535; --keys"
    )
    assert caught.value.setting == "RADIXKV_PORT"


def test_no_secret_is_shown_by_accident(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("S3cret-of-the-fleet")
    (tmp_path / "password").write_text("S3cret-of-redis/")
    given = {
        "redis": "redis://me@h/0",
        "redis-password": str(tmp_path / "password"),
        "fleet-secret": str(tmp_path / "secret"),
        "previous-secrets": str(tmp_path / "secret"),
        "host-memory": "8MiB",
        "disk": str(tmp_path / "disk"),
        "disk-size": "8MiB",
    }
    settings = ServeSettings.parse(given)
    assert settings.store_url is not None and settings.tiers is not None
    assert settings.store_url.get_secret_value() == "redis://me:S3cret-of-redis%2F@h/0"
    url = ServeSettings.parse({**given, "redis": "redis://:S3cret@h", "redis-password": None})
    for shown in (
        settings,
        url,
        settings.store_url,
        settings.tiers,
        vars(settings),
        settings.model_dump_json(),
    ):
        assert "S3cret" not in f"{shown} {shown!r}"


def test_redis_needs_the_secret_of_the_fleet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeSettings.parse({"redis": "redis://127.0.0.1"})
    assert caught.value.setting == "--fleet-secret"
    secret = tmp_path / "secret"
    for content in (b"", b"short", b" " * 40):
        secret.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            ServeSettings.parse({"redis": "redis://127.0.0.1", "fleet-secret": str(secret)})
        assert caught.value.setting == "--fleet-secret"
    secret.write_bytes(b"long enough to be one\n")
    settings = ServeSettings.parse({"redis": "redis://127.0.0.1", "fleet-secret": str(secret)})
    assert settings.fleet_secret.get_secret_value() == b"long enough to be one"


def test_a_fleet_has_one_secret(tmp_path: Path) -> None:
    one, other = secret_files(tmp_path, "n", "o")
    with pytest.raises(ConfigError, match=r"^--fleet-secret='…' is not allowed"):
        ServeSettings.parse({"fleet-secret": f"{one},{other}"})


def test_the_address_of_a_replica_ends_without_a_slash() -> None:
    assert ServeSettings.parse({"advertise": "http://10.0.0.7:8400/a/"}).advertise == "http://10.0.0.7:8400/a"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_demo_keys_stay_on_loopback(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeSettings.parse({"host": host})
    assert caught.value.setting == "--keys"
    keys = tmp_path / "keys.json"
    keys.write_text('{"tenants": {"acme": "k"}}')
    assert ServeSettings.parse({"host": host, "keys": str(keys)}).keys == keys


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert ServeSettings.parse({"host": host}).keys is None


def test_a_port_that_is_taken_is_named() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind("127.0.0.1", port)
    assert (caught.value.setting, caught.value.value) == ("--port", port)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        bind("192.0.2.7", 0)
    assert caught.value.setting == "--host"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o644, 0o640, 0o604, 0o622])
@pytest.mark.parametrize("setting", ["fleet-secret", "keys", "tls-key"])
def test_a_secret_that_others_can_read_is_warned_of(
    setting: str, mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    authority = trustme.CA().issue_cert("127.0.0.1")
    authority.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    content = {
        "fleet-secret": b"a secret that is long enough",
        "keys": b'{"tenants": {"acme": "a-key-of-acme"}}',
        "tls-key": authority.private_key_pem.bytes(),
    }
    path.write_bytes(content[setting])
    path.chmod(mode)
    given = {setting: str(path)} | ({"tls-cert": str(tmp_path / "cert")} if setting == "tls-key" else {})
    KeyStore.open(ServeSettings.parse(given).keys)
    warnings = [each.getMessage() for each in caplog.records]
    assert len(warnings) == (mode & 0o077 != 0)
    assert all(str(path) in each and f"mode {mode:04o}" in each for each in warnings)
    assert not any("secret that is" in each or "a-key-of" in each for each in warnings)


def secret_files(folder: Path, *letters: str) -> list[Path]:
    """Private files with secrets of these letters."""
    found = [folder / f"{letter}.secret" for letter in letters]
    for path, letter in zip(found, letters, strict=True):
        path.write_text(letter * 32 + "\n")
        path.chmod(0o600)
    return found


def test_a_disk_gets_previous_secrets(tmp_path: Path) -> None:
    new, old, oldest = secret_files(tmp_path, "n", "o", "p")
    settings = ServeSettings.parse({
        "disk": str(tmp_path / "disk"),
        "disk-size": "1GiB",
        "host-memory": "1GiB",
        "fleet-secret": str(new),
        "previous-secrets": f"{old},{oldest}",
    })  # fmt: skip
    tiers = settings.tiers
    assert tiers is not None and tiers.disk is not None
    assert settings.fleet_secret.get_secret_value() == tiers.disk.secret == b"n" * 32
    assert tiers.disk.previous_secrets == (b"o" * 32, b"p" * 32)


def test_previous_secrets_that_can_not_be_used_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new, old = secret_files(tmp_path, "n", "o")
    (tmp_path / "short").write_text("short")
    for given, named in (
        (
            {"previous-secrets": str(old)},
            "--fleet-secret is not set; allowed: a file that holds the secret, because --previous-secrets",
        ),
        (
            {"fleet-secret": str(new), "previous-secrets": ""},
            "--previous-secrets='' is not allowed; allowed: existing files",
        ),
        ({"fleet-secret": str(new), "previous-secrets": f"{old},"}, "existing files, between commas"),
        (
            {"fleet-secret": str(new), "previous-secrets": f"{old},/nowhere"},
            "--previous-secrets='…' is not allowed; allowed: a file that can be read (No such file",
        ),
        (
            {"fleet-secret": str(new), "previous-secrets": f"{tmp_path}"},
            f"--previous-secrets='{tmp_path}' is not allowed; allowed: a regular file",
        ),
        (
            {"fleet-secret": str(new), "previous-secrets": f"{old},{tmp_path}/short"},
            f"--previous-secrets='{tmp_path}/short' is not allowed; allowed: a file that holds 16 to 65,536 bytes",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            ServeSettings.parse(given)
        assert named in str(caught.value), str(caught.value)
        assert "o" * 32 not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        ServeSettings.parse(
            {"fleet-secret": str(new), "previous-secrets": f"{old},c2VjcmV0IG9mIHRoZSBmbGVldA=="}
        )
    assert "c2Vj" not in str(caught.value), "it may be the secret itself"
    caplog.clear()
    old.chmod(0o644)
    ServeSettings.parse({"fleet-secret": str(new), "previous-secrets": f"{new},{old}"})
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith(f"--previous-secrets {old}") and "mode 0644" in warning


PASTED = {
    "short": "S3cret-pa55word",
    "long": "S3cret-" + "a" * 300,
    "very long": "S3cret-" + "a" * 100_000,
    "slash": "/S3cretWithASlash==",
    "slashes": "//S3cretWithSlashes/of/base64==",
    "nul": "S3cret\0nul",
    "surrogate": "S3cret\udcff\ud800",
    "lines": "S3cret\nof two lines",
    "beside a file": f"S3cret,{__file__}",
}
"""Texts that were given in place of the path of a secret's file."""
SECRET_FILES = [
    (command, each.name)
    for command, settings in SETTINGS.items()
    for each in settings.values()
    if each.displayed is shown_paths
]


@pytest.mark.parametrize("kind", PASTED)
@pytest.mark.parametrize(("command", "setting"), SECRET_FILES)
def test_a_secret_in_place_of_its_path_is_never_shown(
    command: str, setting: str, kind: str, tmp_path: Path
) -> None:
    (secret,) = secret_files(tmp_path, "n")
    given = {"fleet-secret": str(secret), "redis": "redis://127.0.0.1", "tls-cert": str(secret)}
    given[setting] = PASTED[kind]
    with pytest.raises(ConfigError) as caught:
        COMMANDS[command].parse(given)
    message = "".join(traceback.format_exception(caught.value)) + repr(caught.value.value)
    assert "S3cret" not in message and caught.value.setting == f"--{setting}"
    assert "S3cret" not in SETTINGS[command][setting].displayed(PASTED[kind])


@pytest.mark.parametrize("text", ["a" * 300, "a" * 300 + "/b", "a\0b"], ids=["name", "folder", "nul"])
@pytest.mark.parametrize("setting", ["model", "tls-cert", "record", "usage", "disk"])
def test_an_impossible_path_is_refused_by_name(setting: str, text: str, tmp_path: Path) -> None:
    (secret,) = secret_files(tmp_path, "n")
    given = {"fleet-secret": str(secret), "host-memory": "1GiB", setting: text}
    if setting == "disk":
        given["disk-size"] = "1GiB"
    with pytest.raises(ConfigError, match=f"^--{setting}="):
        ServeSettings.parse(given)


@pytest.mark.parametrize("setting", ["fleet-secret", "previous-secrets", "redis-password"])
def test_every_file_of_a_secret_is_read_by_the_same_rules(setting: str, tmp_path: Path) -> None:
    (secret,) = secret_files(tmp_path, "n")
    given, path = {"fleet-secret": str(secret), "redis": "redis://127.0.0.1"}, tmp_path / "file"
    given[setting] = str(path)

    def refusal() -> str:
        with pytest.raises(ConfigError, match=f"^--{setting}='{path}' is not allowed") as caught:
            ServeSettings.parse(given)
        return str(caught.value)

    path.write_bytes(b"x" * 93_000)
    assert "a file that holds 1" in refusal()
    path.write_bytes(b" \n")
    assert "a file that holds 1" in refusal()
    path.unlink()
    os.mkfifo(path)
    assert "a regular file" in refusal()
    path.unlink()
    path.symlink_to(path)
    assert "file" in refusal()


def test_an_unreadable_secret_is_refused_by_the_name_of_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, other = secret_files(tmp_path, "n", "o")

    open_path = Path.open

    def opened(path: Path, mode: str) -> IO[Any]:
        if path == other:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_path(path, mode)

    monkeypatch.setattr(Path, "open", opened)
    for setting in ("fleet-secret", "redis-password", "previous-secrets"):
        given = {"redis": "redis://127.0.0.1", "fleet-secret": str(secret), setting: str(other)}
        with pytest.raises(ConfigError, match=rf"^--{setting}='.*can be read \(Permission denied\)"):
            ServeSettings.parse(given)


def test_a_keys_file_that_becomes_readable_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys.json", ManualClock()
    path.write_text('{"tenants": {"acme": "a-key-of-acme"}}')
    path.chmod(0o600)
    keys = KeyStore(Keyring.load(path), path, clock=clock)
    path.write_text('{"tenants": {"acme": "another-key"}}')
    path.chmod(0o644)
    clock.advance(2)
    assert keys.ring.tenants == ("acme",)
    assert ["mode 0644" in each.getMessage() for each in caplog.records] == [True]
