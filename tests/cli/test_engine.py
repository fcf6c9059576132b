"""``radixkv keys derive``, and the commands over an engine's control channel."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from radixkv.cli.main import commands
from radixkv.engines.salt import SaltReader, make_salt
from radixkv.errors import ConfigError
from radixkv.signing import PURPOSES, KeySet, derived

SECRET, OLD = b"the fleet's secret" * 2, b"the fleet's previous secret"


@pytest.fixture
def secrets(tmp_path: Path) -> tuple[str, str]:
    paths = tmp_path / "fleet.secret", tmp_path / "old.secret"
    for path, secret in zip(paths, (SECRET, OLD), strict=True):
        path.write_bytes(secret + b"\n")
        path.chmod(0o600)
    return str(paths[0]), str(paths[1])


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments)


def test_keys_are_derived_into_a_private_file(secrets: tuple[str, str], tmp_path: Path) -> None:
    output = tmp_path / "engine.keys"
    done = invoke("keys", "derive", "--fleet-secret", secrets[0], "--output", str(output))
    assert done.exit_code == 0 and done.stdout == "" and "salts" in done.stderr, done.output
    assert output.stat().st_mode & 0o777 == 0o600
    keys = KeySet.load(output)
    assert keys.purposes == PURPOSES and keys.accepted("salts") == (derived(SECRET, "salts"),)
    assert SECRET.hex() not in output.read_text() and SECRET.decode() not in output.read_text()
    assert SaltReader(keys).read(make_salt(KeySet.derive([SECRET]), "acme")).generation == 0


def test_a_rotation_overlaps(secrets: tuple[str, str], tmp_path: Path) -> None:
    output = tmp_path / "engine.keys"
    arguments = ["--fleet-secret", secrets[0], "--previous", secrets[1], "--purpose", "salts"]
    assert invoke("keys", "derive", *arguments, "--output", str(output)).exit_code == 0
    keys = KeySet.load(output)
    assert keys.purposes == ("salts",)
    assert keys.accepted("salts") == (derived(SECRET, "salts"), derived(OLD, "salts"))
    reader = SaltReader(keys)
    assert all(reader.read(make_salt(KeySet.derive([secret]), "acme")) for secret in (SECRET, OLD))


@pytest.mark.parametrize("content", [None, b"", b"short", b"  \n" * 20, b"x" * 70_000])
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path, output = tmp_path / "secret", tmp_path / "engine.keys"
    if content is not None:
        path.write_bytes(content)
    done = invoke("keys", "derive", "--fleet-secret", str(path), "--output", str(output))
    assert isinstance(done.exception, ConfigError) and "--fleet-secret" in str(done.exception)
    assert not output.exists()
