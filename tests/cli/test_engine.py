"""``radixkv keys derive``, and the commands over an engine's control channel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner, Result

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.cli.main import commands, main
from radixkv.engines.control.server import ControlServer
from radixkv.errors import ConfigError, ControlError, RadixKVError
from radixkv.signing import PURPOSES, KeySet, derived
from radixkv.tenancy.salt import SaltReader, make_salt
from radixkv.tiers.pending import Pending

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


@pytest.mark.parametrize("secret", ["S3cret-pa55word", "/S3cret/of/base64==", "S3cret-" + "a" * 300])
@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--port", "0", "--fleet-secret"),
        ("route", "--redis", "redis://127.0.0.1:1", "--fleet-secret"),
        ("config", "show", "--fleet-secret"),
        ("config", "show", "--redis-password"),
        ("keys", "derive", "--output", "keys", "--fleet-secret"),
        ("keys", "derive", "--output", "keys", "--fleet-secret", __file__, "--previous"),
        ("disk", "check", "folder", "--fleet-secret"),
        ("disk", "forget", "folder", "--yes", "--tenant", "acme", "--fleet-secret"),
    ],
    ids=" ".join,
)
def test_no_command_shows_a_secret_in_place_of_its_path(
    command: tuple[str, ...], secret: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, secret])
    said = "".join(capfd.readouterr())
    assert "S3cret" not in said and "…" in said
    assert ended.value.code == (0 if command[0] == "config" else 2)
    assert command[0] == "config" or f"{command[-1]}=" in said


class Engine:
    """A cache whose tenants come from salts, and its control channel."""

    def __init__(self, folder: Path) -> None:
        self.keys_file = folder / "engine.keys"
        KeySet.derive([SECRET]).write(self.keys_file)
        self.keys = KeySet.load(self.keys_file)
        self.cache, self.reader = PrefixCache(CacheConfig(64, block_size=4)), SaltReader(self.keys)
        self.owes = False
        self.control = ControlServer(
            self.cache,
            folder / "control",
            self.keys_file,
            salts=self.reader,
            patience_s=0.0,
            forgetting_below=lambda scope: nullcontext(Pending([self], scope.tenant)),
        )

    # a disk below it that can't destroy anything

    num_removed = 0

    @property
    def owed(self) -> frozenset[str]:
        return frozenset(self.reader.tenant_ids("acme")) if self.owes else frozenset()

    def retry(self, tenant: str) -> None:
        """It can't."""

    def retry_removed(self) -> None:
        """It can't."""

    def problem(self, tenant: str) -> str:
        return "the disk doesn't answer"

    def compute(self, salt: str) -> Namespace:
        namespace = self.reader.read(salt).namespace("m")
        with self.cache.open(namespace, range(8)) as sequence:
            sequence.commit(8)
        return namespace

    def run(self, *command: str) -> Result:
        return invoke(*command, "--socket", str(self.control.path), "--engine-keys", str(self.keys_file))

    def complaint(self, *command: str) -> RadixKVError:
        done = self.run(*command)
        assert isinstance(done.exception, RadixKVError), done.output
        return done.exception


@pytest.fixture
def engine() -> Iterator[Engine]:
    """In a folder with a short path: that of a socket has at most 107 bytes."""
    with TemporaryDirectory(dir="/tmp") as folder:
        made = Engine(Path(folder))
        with made.control:
            yield made


def test_statistics_of_an_engine(engine: Engine) -> None:
    assert "num_blocks" in engine.run("stats").stdout, "before the first request"
    acme = engine.compute(make_salt(engine.keys, "acme"))
    engine.compute("a client's own salt")
    done = json.loads(engine.run("stats", "--json").stdout)
    assert [each["tenant"] for each in done["tenants"]] == [acme.tenant, "anonymous"]
    assert [each["resident_blocks"] for each in done["tenants"]] == [2, 2]
    assert done["cache"]["resident_blocks"] == 4
    shown = engine.run("stats").stdout
    assert acme.tenant in shown and "evicted_blocks" in shown and "resident_blocks" in shown


def test_a_tenant_of_an_engine_is_purged(engine: Engine) -> None:
    salt = make_salt(engine.keys, "acme")
    namespace = engine.compute(salt)
    done = json.loads(engine.run("purge", "acme", "--generation", "2", "--json").stdout)
    assert done["blocks"] == 2 and done["generation"] == 2 and done["complete"]
    assert done["confirmed"] == [str(engine.control.path)] and done["pending"] == done["unconfirmed"] == []
    assert engine.cache.match(namespace, range(8)).num_tokens == 0
    with pytest.raises(ValueError, match="older"):
        engine.reader.read(salt)
    shown = engine.run("purge", namespace.tenant)
    assert shown.exit_code == 0 and namespace.tenant in shown.stdout, shown.output
    assert not shown.stderr and done["known"]
    unknown = engine.run("purge", "nobody")
    assert (
        unknown.exit_code == 0
        and unknown.stderr == "nothing was there: the engine knows no tenant 'nobody'\n"
    )
    assert json.loads(engine.run("purge", "nobody", "--json").stdout)["known"] is False
    assert isinstance(engine.complaint("purge", "a/b"), ControlError)


def test_a_purge_that_an_engines_disk_owes_is_not_complete(engine: Engine) -> None:
    engine.compute(make_salt(engine.keys, "acme"))
    engine.owes = True
    owed = engine.run("purge", "acme", "--json")
    done = json.loads(owed.stdout)
    assert owed.exit_code == 1 and "its disk owes it" in owed.stderr
    assert done["owed"] and not done["complete"] and done["blocks"] == 2
    assert done["pending"] == [str(engine.control.path)] and done["confirmed"] == []
    engine.owes = False
    assert engine.run("purge", "acme").exit_code == 0


def test_an_engines_live_cache_is_audited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    done = engine.run("audit", "run")
    assert done.exit_code == 0 and done.stdout.startswith("all laws hold: 64 blocks"), done.output
    assert json.loads(engine.run("audit", "run", "--json").stdout)["ok"]
    broken = audit.Report((audit.Violation("labels", "node 3"),), {"blocks": 64}, 0.001)
    monkeypatch.setattr("radixkv.engines.control.server.inspect", lambda cache, pause: broken)
    done = engine.run("audit", "run")
    assert done.exit_code == 1 and "labels: node 3" in done.stdout and "1 violations" in done.stdout
    for other in (
        ["--url", "http://127.0.0.1:8400"],
        ["--cache", "radixkv:PrefixCache"],
        ["--html", "r.html"],
    ):
        assert isinstance(engine.complaint("audit", "run", *other), ConfigError)


def test_keys_of_an_engine_rotate(engine: Engine, secrets: tuple[str, str]) -> None:
    before = json.loads(engine.run("keys", "list", "--json").stdout)
    assert {each["purpose"] for each in before} == set(PURPOSES)
    derive = ["keys", "derive", "--fleet-secret", secrets[1], "--previous", secrets[0]]
    assert invoke(*derive, "--output", str(engine.keys_file)).exit_code == 0
    after = json.loads(engine.run("keys", "reload", "--json").stdout)
    assert len(after) == 2 * len(before) and {each["id"] for each in before} < {each["id"] for each in after}
    shown = engine.run("keys", "list").stdout
    assert "current" in shown and "previous" in shown
    assert engine.reader.read(make_salt(KeySet.derive([OLD]), "acme"))
    for key in KeySet.load(engine.keys_file).accepted("control"):
        assert key.hex() not in shown


def test_what_a_command_over_a_socket_needs(engine: Engine) -> None:
    path, keys = str(engine.control.path), str(engine.keys_file)
    for command in (["stats"], ["keys", "list"], ["purge", "acme"], ["audit", "run"]):
        done = invoke(*command, "--socket", path)
        assert isinstance(done.exception, ConfigError) and "--engine-keys" in str(done.exception)
        done = invoke(
            *command, "--socket", str(engine.keys_file.with_name("none.sock")), "--engine-keys", keys
        )
        assert isinstance(done.exception, ControlError) and "No such file" in str(done.exception)
        done = invoke(*command, "--socket", keys, "--engine-keys", keys)
        assert isinstance(done.exception, ControlError) and "not a socket" in str(done.exception)
    done = invoke("purge", "acme", "--generation", "1")
    assert isinstance(done.exception, ConfigError) and "--generation" in str(done.exception)
    KeySet.derive([OLD]).write(engine.keys_file)
    assert "keys" in str(engine.complaint("stats")), "the engine still has the other fleet's"
