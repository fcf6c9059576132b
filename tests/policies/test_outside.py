"""Policies that are not built in: by class and by entry point. Names from outside never cause an import."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from radixkv import ArgumentError, CacheConfig, ConfigError, Namespace, PrefixCache, Tenant, audit, config
from radixkv.cli.main import commands
from radixkv.service.auth import Keyring
from radixkv.service.schemas.tenants import TenantSettings
from tests.index.support import compute
from tests.waiting import LIMIT_S

README = Path(__file__).parents[2] / "policies" / "README.md"
NS = Namespace("a", "m")
CANARY = "from pathlib import Path\nPath({path!r}).write_text('imported')\nfrom radixkv_policies import LRU as Canary\n"
BROKEN = {
    "not_there:Policy": "not_there can't (ModuleNotFoundError",
    "bad_policies:Missing": "bad_policies has no Missing",
    "bad_policies:number": "a class; this is a int",
    "bad_policies:Other": "a subclass of radixkv_policies.Policy",
    "bad_policies:Half": "lacks unleased, removed, victim, __len__",
    "raising_policies:Any": "raising_policies can't (ZeroDivisionError",
    "my_policies.DeepestFirst": "or package.module:Class",
    "my_policies:": "or package.module:Class",
    "../x:Y": "or package.module:Class",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Importable modules for one test. Modules that were loaded are unloaded at the end."""
    found = re.match(r"# Eviction policies\n\n```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert found is not None, "the README begins with the example"
    (tmp_path / "my_policies.py").write_text(found[1], encoding="utf-8")
    (tmp_path / "bad_policies.py").write_text(
        "from radixkv_policies import Policy\nnumber = 3\nclass Other: ...\n"
        "class Half(Policy):\n    def leased(self, node): ...\n"
    )
    (tmp_path / "raising_policies.py").write_text("1 / 0\n")
    (tmp_path / "canary_policies.py").write_text(CANARY.format(path=str(tmp_path / "imported")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(config, "_loaded", {})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("_policies") and name != "radixkv_policies":
            del sys.modules[name]


def register(monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    """Register entry points of a distribution called ``others-policies``."""
    found = [importlib.metadata.EntryPoint(name, value, config.GROUP) for name, value in entries.items()]

    class Dist:
        name = "others-policies"

    for each in found:
        vars(each).update(dist=Dist())
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: found if group == config.GROUP else []
    )


def test_the_example_in_the_readme(folder: Path) -> None:
    """It evicts the deepest leaf in any insertion order, as the policy of a cache and of a tenant."""
    tenant = Tenant("a", policy="my_policies:DeepestFirst")
    for made in (CacheConfig(8, 1, policy="my_policies:DeepestFirst"), CacheConfig(8, 1)):
        cache = PrefixCache(made)
        if made.policy == "lru":
            cache.add_tenant(tenant)
        compute(cache, [1, 2], NS)
        compute(cache, [3, 4, 5], NS)
        compute(cache, [6], NS)
        compute(cache, [7, 8], NS)
        found = [len(cache.match(NS, ids).block_ids) for ids in ([1, 2], [3, 4, 5], [6], [7, 8])]
        assert sum(found) == 8 == cache.stats().resident_blocks
        assert cache.evict(1) == 1
        assert [cache.match(NS, ids).num_tokens for ids in ([1, 2], [3, 4, 5], [6], [7, 8])] == [2, 2, 1, 2]
        audit.check(cache)


def test_a_policy_class_for_the_default_tenant(folder: Path) -> None:
    default_tenant = Tenant("default", policy="my_policies:DeepestFirst")
    cache = PrefixCache(CacheConfig(8, 1, default_tenant=default_tenant))
    compute(cache, [1, 2], NS)
    assert type(cache._tenants["a"].policy).__name__ == "DeepestFirst"


@pytest.mark.parametrize("name", BROKEN)
def test_an_invalid_policy_name_is_refused_and_named(folder: Path, name: str) -> None:
    for setting, make in (
        ("policy", lambda: CacheConfig(8, policy=name)),
        ("default_tenant.policy", lambda: CacheConfig(8, default_tenant=Tenant("x", policy=name))),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert (caught.value.setting, caught.value.value) == (setting, name)
        assert BROKEN[name] in caught.value.allowed
    cache = PrefixCache(CacheConfig(8))
    with pytest.raises(ArgumentError, match="policy"):
        cache.add_tenant(Tenant("a", policy=name))
    assert cache.tenants() == []


def test_an_entry_point_is_loaded_on_first_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(
        monkeypatch,
        deepest="my_policies:DeepestFirst",
        canary="canary_policies:Canary",
        lru="bad_policies:Other",
    )
    CacheConfig(8, policy="lru")
    assert not (folder / "imported").exists() and "my_policies" not in sys.modules
    with pytest.raises(ArgumentError):
        config.require_loaded("policy", "deepest")
    cache = PrefixCache(CacheConfig(8, policy="deepest"))
    compute(cache, [1, 2], NS)
    assert type(cache._tenants["a"].policy).__name__ == "DeepestFirst"
    config.require_loaded("policy", "deepest")
    assert not (folder / "imported").exists()
    with pytest.raises(ConfigError, match=r"lru, .*deepest, canary, or package\.module:Class"):
        CacheConfig(8, policy="nothing")


def test_a_broken_entry_point_names_its_distribution(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register(
        monkeypatch,
        broken="raising_policies:Any",
        other="bad_policies:Other",
        fine="my_policies:DeepestFirst",
    )
    for name, what in (("broken", "ZeroDivisionError"), ("other", "a subclass of")):
        with pytest.raises(ConfigError, match=what) as caught:
            CacheConfig(8, policy=name)
        assert "others-policies" in caught.value.allowed and caught.value.value == name
    with caplog.at_level(logging.WARNING, logger="radixkv.policies"):
        config.load_registered()
    assert caplog.text.count("others-policies") == 2
    assert config.loaded_names()[-1] == "fine"


def test_names_from_outside_import_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This concerns settings over HTTP and in keys files. They cannot name a class that code has loaded either."""
    register(monkeypatch, canary="canary_policies:Canary")
    CacheConfig(8, policy="my_policies:DeepestFirst")
    for name in ("canary_policies:Canary", "canary", "my_policies:DeepestFirst"):
        document = {"tenants": {"acme": {"keys": [], "policy": name}}}
        with pytest.raises((ConfigError, ArgumentError)) as caught:
            Keyring.from_document(document, "keys.json").settings["acme"].tenant("acme")
        assert "policy" in str(caught.value)
    assert not (folder / "imported").exists() and "canary_policies" not in sys.modules
    config.load_registered()
    assert TenantSettings(policy="canary").tenant("acme").policy == "canary"


def test_a_trace_cannot_name_a_policy(folder: Path) -> None:
    """Its records may contain anything: nothing is imported for them."""
    trace = folder / "trace.jsonl"
    record = {
        "timestamp": 0,
        "input_length": 16,
        "output_length": 1,
        "hash_ids": [1],
        "policy": "canary_policies:Canary",
        "tenant": "canary_policies:Canary",
    }
    trace.write_text("".join(json.dumps({**record, "timestamp": at}) + "\n" for at in range(4)))
    CliRunner().invoke(
        commands, ["simulate", str(trace), "--policy", "lru", "--capacity", "8", "--jobs", "1"]
    )
    assert not (folder / "imported").exists()


@pytest.mark.slow
def test_the_simulator_with_processes(folder: Path) -> None:
    """The command as it is run: spawned workers also import the policy from the working directory."""
    trace = folder / "trace.jsonl"
    lines = [
        {"timestamp": at * 1000, "input_length": 1024, "output_length": 1, "hash_ids": [at % 3, at % 2 + 9]}
        for at in range(12)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = "import sys; sys.path = [each for each in sys.path if each]; from radixkv.cli.main import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code, "simulate", str(trace), "--policy", "lru,my_policies:DeepestFirst",
         "--capacity", "64,128", "--jobs", "2", "--json"],
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert {row["policy"] for row in json.loads(ran.stdout)["results"]} == {"lru", "my_policies:DeepestFirst"}


@pytest.mark.parametrize("name", ["not_there:Policy", "raising_policies:Any", "bad_policies:Half"])
def test_the_command_line_reports_an_invalid_policy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "trace.jsonl").write_text("{}\n")
    for arguments in (["serve", "--port", "0"], ["simulate", str(folder / "trace.jsonl")]):
        refused = CliRunner().invoke(commands, [*arguments, "--policy", name])
        assert isinstance(refused.exception, ConfigError), refused.output
        assert (refused.exception.setting, refused.exception.value) == ("--policy", name)
