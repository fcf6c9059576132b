"""Each extra runs the commands that the docs assign to it, in an environment with exactly its requirements.

An environment is a venv without pip. Its site-packages link to the distributions of the extra's closure: the
requirements of ``pyproject.toml``, their requirements, and so on, as installed here. Nothing is downloaded. Making one
takes some 0.1 s. Distributions that share a folder (``nvidia``) are linked together. `make test` runs the tests of what
a plain installation refuses; the rest is for releases.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
import venv
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from radixkv.errors import EXTRA_LIBRARIES
from tests.packaging.building import ROOT
from tests.redis_server import RedisServer
from tests.waiting import LIMIT_S, eventually

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from tests.service.running import Running

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DEVELOPMENT = {"fuzz", "browser", "build", "docs", "dev"}
"""Extras for work on radixkv itself. No command of ``radixkv`` belongs to them."""


def requirements(extra: str) -> set[str]:
    """Return the names of the distributions that ``pip install radixkv[extra]`` installs. ``""`` for no extra."""
    wanted = [Requirement(each) for each in PROJECT["dependencies"] + (EXTRAS[extra] if extra else [])]
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        requirement = wanted.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name == "radixkv":
            wanted += [Requirement(each) for extra in extras for each in EXTRAS[extra]]
            continue
        found.add(name)
        for text in metadata.requires(name) or []:
            each = Requirement(text)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                wanted.append(each)
    return found


def _applies(text: str) -> bool:
    marker = Requirement(text).marker
    return marker is None or marker.evaluate()


EXTRAS = {extra: [text for text in listed if _applies(text)] for extra, listed in EXTRAS.items()}


class Environment:
    """A Python with the requirements of an extra, and radixkv from the source tree."""

    def __init__(self, extra: str, folder: Path) -> None:
        self.extra = extra
        venv.create(folder, symlinks=True, with_pip=False)
        (site,) = folder.glob("lib/python*/site-packages")
        for name in requirements(extra):
            distribution = metadata.distribution(name)
            for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                link, target = site / top, Path(str(distribution.locate_file(top)))
                if not link.exists():
                    link.symlink_to(target)
        paths = (ROOT, ROOT / "kernels", ROOT / "policies")
        (site / "radixkv-tree.pth").write_text("".join(f"{path}\n" for path in paths))
        self.python = folder / "bin" / "python"
        unset = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        kept = {k: v for k, v in os.environ.items() if k not in unset and not k.startswith("RADIXKV_")}
        self.variables = {**kept, "PYTHONWARNINGS": "error", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run ``radixkv`` with these arguments. Fails unless the exit code is ``code``."""
        command = [str(self.python), "-m", "radixkv", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=self.variables)
        assert done.returncode == code, (arguments, done.stdout[-2000:], done.stderr[-2000:])
        return done

    def evaluate(self, code: str, *arguments: str) -> str:
        """Run this code with these arguments, and return what it prints."""
        command = [str(self.python), "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=self.variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def serves(self, *arguments: str, log: Path) -> None:
        """Check that the command starts, and ends at a signal."""
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(self.python), "-m", "radixkv", *arguments], stdout=out, stderr=out, env=self.variables
            )
        try:
            eventually(lambda: "Ctrl-C" in log.read_text() or process.poll() is not None, "the banner")
            assert process.poll() is None, log.read_text()
            process.terminate()
            assert process.wait(LIMIT_S) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    @cache
    def made(extra: str) -> Environment:
        return Environment(extra, tmp_path_factory.mktemp(extra or "base") / "venv")

    return made


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    from tests.service.running import service_in_thread

    with service_in_thread(**{"num-blocks": "64"}) as running:
        yield running


Make = Callable[[str], Environment]


def test_the_table_of_libraries_agrees_with_the_extras() -> None:
    """Each extra installs the modules that the table looks for."""
    assert {*EXTRA_LIBRARIES, "all"} == {*EXTRAS} - DEVELOPMENT
    names = {
        "prometheus_client": "prometheus-client",
        "swagger_ui": "swagger-ui-py",
        "yaml": "pyyaml",
        "zmq": "pyzmq",
    }
    for extra, modules in EXTRA_LIBRARIES.items():
        brought = requirements(extra)
        assert {names.get(module, module) for module in modules} <= brought, extra


def test_every_extra_named_in_docs_and_code_exists() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "radixkv").rglob("*.py")]
    named = {
        extra
        for path in texts
        for found in re.findall(r"(?:radixkv|'\.)\[([a-z,]+)\]", path.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert named <= set(EXTRAS), named - set(EXTRAS)
    assert {"all", "audit", "bench", "route"} <= named


@pytest.mark.release
def test_a_plain_installation_runs_the_command_line(environment: Make, tmp_path: Path) -> None:
    base = environment("")
    assert base.run("--version").stdout.startswith("radixkv ")
    assert "Commands:" in base.run("--help").stdout
    trace = tmp_path / "trace.jsonl"
    base.run("workload", "--duration", "20s", "--output", str(trace))
    assert (
        "lru" in base.run("simulate", str(trace), "--policy", "lru", "--capacity", "50", "--jobs", "1").stdout
    )
    base.run("bench", "index", "--limit", "20", "--no-figures")


NEEDED_BY_COMMANDS = {
    "serve": "service",
    "route": "route",
    "warm x.txt": "http",
    "stats": "http",
    "keys list": "http",
    "keys create": "http",
    "keys rotate x": "http",
    "keys revoke x": "http",
    "purge acme": "http",
    "audit run": "audit",
    "audit run --url http://127.0.0.1:9 --key a --key b": "audit",
    "bench ttft": "http",
    "bench fork": "storage",
    "bench kernels": "storage",
    "bench replicas": "redis",
    "bench hostile": "service",
    "disk check FOLDER --fleet-secret FILE": "tiers",
    "disk forget FOLDER": "tiers",
    "simulate TRACE --html report.html": "bench",
    "simulate TRACE --svg curves.svg": "bench",
}
"""The extra that a command needs."""
_RUN_COMMANDS = """
import contextlib, io, json, sys
from radixkv.cli.main import main
for line in sys.argv[1:]:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main(line.split())
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, out.getvalue(), errors.getvalue()]))
"""


def test_a_missing_extra_is_one_line_that_names_it(environment: Make) -> None:
    said = environment("").evaluate(_RUN_COMMANDS, *NEEDED_BY_COMMANDS).splitlines()
    for (arguments, extra), line in zip(NEEDED_BY_COMMANDS.items(), said, strict=True):
        code, output, errors = json.loads(line)
        assert (code, output) == (2, ""), arguments
        (error,) = errors.splitlines()
        words = arguments.split()[:2]
        command = " ".join(word for word in words if word.isalpha() and word.islower() and word != "acme")
        assert error.startswith(f"radixkv: radixkv {command}")
        assert f"needs the extra '{extra}': pip install 'radixkv[{extra}]'" in error


def test_a_command_without_its_extra_ends_with_2(environment: Make) -> None:
    done = environment("").run("serve", code=2)
    (line,) = done.stderr.splitlines()
    assert "needs the extra 'service'" in line and not done.stdout


NEEDED_BY_MODULES = {
    "radixkv.engines.hf.engine": "hf",
    "radixkv.engines.hf.paged_cache": "hf",
    "radixkv.events.event_stream": "events",
    "radixkv.events.event_publisher": "events",
    "radixkv.events.event_subscriber": "events",
    "radixkv.coordination.view.event_view": "events",
    "radixkv.service": "http",
    "radixkv.service.app": "http",
    "radixkv.service.api_client": "http",
    "radixkv.service.metrics": "http",
    "radixkv.coordination.store.redis": "redis",
    "radixkv.storage.device": "storage",
    "radixkv.tiers.disk.records": "tiers",
    "radixkv.tiers.disk.inspection": "tiers",
    "radixkv.audit.properties": "audit",
    "radixkv.audit.inprocess": "audit",
    "radixkv.audit.remote": "audit",
}
"""The extra that a module needs."""
_IMPORT_MODULES = """
import importlib, sys
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
        print("imported")
    except ImportError as error:
        print(error)
"""


def test_an_import_error_names_the_missing_extra(environment: Make) -> None:
    said = environment("").evaluate(_IMPORT_MODULES, *NEEDED_BY_MODULES).splitlines()
    for (module, extra), line in zip(NEEDED_BY_MODULES.items(), said, strict=True):
        assert line.startswith("radixkv."), module
        assert f"needs the extra '{extra}': pip install 'radixkv[{extra}]'" in line, module


def test_other_errors_name_the_missing_extra(environment: Make) -> None:
    code = """
import radixkv, sys
from radixkv.coordination import Router, connect
from radixkv.tokenizer import load_tokenizer
known = dict(replica_id="a", fleet_secret=b"s" * 16, fingerprint="f", block_size=16)
for call in (
    lambda: connect("redis://127.0.0.1:1", **known),
    lambda: Router.connect("redis://127.0.0.1:1", fleet_secret=b"s" * 16),
    load_tokenizer,
    lambda: radixkv.storage.DeviceStorage,
    lambda: radixkv.PrefixCache(radixkv.CacheConfig(num_blocks=2, layout=radixkv.KVLayout(1, 1, 2, "float32"))),
):
    try:
        call()
    except (radixkv.ConfigError, ImportError) as error:
        print(error)
"""
    lines = environment("").evaluate(code).splitlines()
    wanted = ["redis", "redis", "tokenizer", "storage", "storage"]
    assert [re.findall(r"needs the extra '(\w+)': pip install 'radixkv\[\1\]'", line) for line in lines] == [
        [extra] for extra in wanted
    ]


@pytest.mark.release
def test_storage_and_engines(environment: Make) -> None:
    environment("storage").evaluate("from radixkv.storage import DeviceStorage")
    sizes = (
        "--device cpu --num-layers 1 --num-kv-heads 1 --head-dim 8 --block-size 2 --num-blocks 8 --repeats 1"
    )
    assert "as the reference" in environment("storage").run("bench", "kernels", *sizes.split()).stdout
    environment("hf").evaluate("import radixkv.engines.hf.engine")


@pytest.mark.release
def test_tokenizer_and_redis(environment: Make) -> None:
    assert (
        environment("tokenizer").evaluate(
            "from radixkv.tokenizer import load_tokenizer; print(load_tokenizer().vocab_size)"
        )
        == "8000"
    )
    environment("redis").evaluate("import radixkv.coordination.store.redis")


@pytest.mark.release
def test_events_need_nothing_else(environment: Make) -> None:
    code = """
import radixkv
from radixkv.coordination.view.event_view import EventView
from radixkv.events.event_publisher import EventPublisher
from radixkv.events.event_settings import EventSettings
from radixkv.events.event_subscriber import EventSubscriber
from radixkv.signing import KeySet
keys = KeySet.derive([b"s" * 16])
publisher = EventPublisher(keys, EventSettings(16, "tcp://127.0.0.1:*"))
publisher.start(radixkv.PrefixCache(radixkv.CacheConfig(num_blocks=2), journal=publisher.journal))
publisher.close()
"""
    environment("events").evaluate(code)


@pytest.mark.release
def test_http_runs_the_commands_that_talk_to_a_service(
    environment: Make, live: Running, tmp_path: Path
) -> None:
    http, at = environment("http"), ("--url", live.url)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("A line of a prompt.\n" * 20)
    http.run("warm", str(prompt), *at)
    assert "acme" in http.run("stats", *at).stdout
    made = json.loads(http.run("keys", "create", "acme", *at, "--json").stdout)
    assert made["id"] in http.run("keys", "list", *at).stdout
    made = json.loads(http.run("keys", "rotate", made["id"], *at, "--json").stdout)
    http.run("keys", "revoke", made["id"], *at)
    http.run("purge", "acme", *at)
    http.run("bench", "ttft", *at, "--tokens", "40", "--pairs", "1")


@pytest.mark.release
def test_audit_runs_both_audits(environment: Make, tmp_path: Path) -> None:
    """Each gives a verdict, no matter which: so few samples may not be enough for a check."""
    from radixkv.audit.verdict import EXIT_CODES
    from tests.audit.openai_server import Behaviour, openai_server

    audit, page = environment("audit"), tmp_path / "report.html"
    few = ["--probes", "1", "--samples", "20", "--control", "20", "--prompt-words", "3"]
    with openai_server(Behaviour()) as url:
        for arguments in (
            ["--examples", "1", "--steps", "5"],
            ["--url", url, "--key", "a-key", "--key", "b-key", *few],
        ):
            command = [str(audit.python), "-m", "radixkv", "audit", "run", *arguments, "--html", str(page)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, env=audit.variables
            )
            said = (arguments, done.stdout[-2000:], done.stderr[-2000:])
            assert done.returncode in EXIT_CODES.values() and "Traceback" not in done.stderr, said
            assert page.read_text().startswith("<!doctype html>")
            page.unlink()


@pytest.mark.release
def test_bench_draws_a_simulation(environment: Make, tmp_path: Path) -> None:
    bench, trace = environment("bench"), tmp_path / "trace.jsonl"
    bench.run("workload", "--duration", "20s", "--output", str(trace))
    options = ["--policy", "lru", "--capacity", "50", "--jobs", "1"]
    bench.run(
        "simulate", str(trace), *options, "--html", str(tmp_path / "a.html"), "--svg", str(tmp_path / "a.svg")
    )
    assert (tmp_path / "a.html").stat().st_size and "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.release
def test_route_routes(environment: Make, redis_server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 32)
    arguments = [
        "route",
        "--port",
        "0",
        "--redis",
        redis_server.url,
        "--fleet-secret",
        str(tmp_path / "secret"),
    ]
    environment("route").serves(*arguments, log=tmp_path / "log")


@pytest.mark.release
def test_service_serves(environment: Make, tmp_path: Path) -> None:
    environment("service").serves("serve", "--port", "0", "--num-blocks", "64", log=tmp_path / "log")
    said = environment("service").run(
        "serve", "--redis", "redis://127.0.0.1:1", "--fleet-secret", str(ROOT / "README.md"), code=2
    )
    assert "needs the extra 'redis'" in said.stderr.splitlines()[-1]
    said = environment("service").run("serve", "--events", "tcp://127.0.0.1:*", code=2)
    assert "needs the extra 'events'" in said.stderr.splitlines()[-1]


def test_all_includes_every_extra(environment: Make) -> None:
    everything = requirements("all")
    for extra in set(EXTRAS) - DEVELOPMENT:
        assert requirements(extra) <= everything, extra
