"""The compiled index and policies: when they are used instead of the sources, their wheel, and errors of the build.

Tests that build a wheel or run the compiler are for releases. The others use what is compiled in the source tree.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import radixkv
from tests.packaging.building import ROOT, build, files_of, hasty_compiler
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

CODE = """
import radixkv
cache = radixkv.PrefixCache(radixkv.CacheConfig(num_blocks=4))
namespace = radixkv.Namespace(tenant="a", model="m")
with cache.open(namespace, range(40)) as sequence:
    sequence.commit(40)
import radixkv.coordination.publisher
import radixkv.engines.vllm.cache
import radixkv_policies.lrfu
files = radixkv.index.tree.__file__, radixkv_policies.lrfu.__file__, radixkv.coordination.publisher.__file__
files += (radixkv.engines.vllm.cache.__file__,)
print(radixkv.COMPILED, cache.match(namespace, range(40)).num_tokens, *files)
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, even if several processes run these tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = next(folder.glob("dist/*.whl"), None)
        return made or build(ROOT, "wheel", folder / "dist", RADIXKV_COMPILE="1", CC=hasty_compiler(folder))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The packages with what is compiled beside their sources, as a wheel installs them."""
    if not radixkv.COMPILED:
        pytest.skip("nothing is compiled")
    for package in (ROOT / "radixkv", ROOT / "policies" / "radixkv_policies"):
        shutil.copytree(package, tmp_path / package.name)
    return tmp_path


@pytest.fixture
def unpacked(wheel: Path, tmp_path: Path) -> Path:
    """The wheel, unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path


HELP = """
import dataclasses, importlib, inspect, json, radixkv, radixkv.coordination, sys
from radixkv._compiled import BUILDS

def shown(default):
    if default is inspect.Parameter.empty:
        return ""
    is_literal = default is not ... and not callable(default)
    return repr(default) if is_literal else "..."  # a signature in C holds literals only

def signature(what):
    is_hidden = dataclasses.is_dataclass(what) and sys.version_info < (3, 11, 4)  # Python shows no fields of C's
    if not callable(what) or is_hidden:
        return None
    return [
        (each.name, "" if each.name in ("self", "cls") else str(each.kind), shown(each.default))
        for each in inspect.signature(what).parameters.values()
    ]

def public(owner):
    return [name for name in dir(owner) if not name.startswith("_")]

found = {"COMPILED": radixkv.COMPILED}
for build in BUILDS:
    for module in (importlib.import_module(f"{build.package}.{name}".replace("/", ".")) for name in build.compiled):
        found[module.__name__] = inspect.getdoc(module)
        for name in public(module):
            made = getattr(module, name)
            if getattr(made, "__module__", None) != module.__name__ or not callable(made):
                continue
            found[f"{module.__name__}.{name}"] = inspect.getdoc(made), signature(made)
            if not inspect.isclass(made) or issubclass(made, tuple):  # a NamedTuple stays a Python class
                continue
            for attribute in public(made):
                value = getattr(made, attribute)
                if inspect.isroutine(value) or isinstance(value, property) or inspect.isgetsetdescriptor(value):
                    found[f"{module.__name__}.{name}.{attribute}"] = inspect.getdoc(value), signature(value)
print(json.dumps(found))
"""
"""Prints docstring and signature of every public name in the compiled modules."""

COMPILED = (
    "True",
    *(f"{name}{EXTENSION_SUFFIXES[0]}" for name in ("tree", "lrfu", "publisher", "cache")),
)
PURE = ("False", "tree.py", "lrfu.py", "publisher.py", "cache.py")


def output_of(code: str, site: Path, **environment: str) -> str:
    """Return the output of a fresh process that runs ``code`` with the packages installed at ``site``."""
    inherited = {name: value for name, value in os.environ.items() if name != "RADIXKV_PURE"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**inherited, "PYTHONPATH": str(site), **environment},
        cwd=site,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def use(site: Path, **environment: str) -> tuple[str, ...]:
    """Return whether a fresh process uses the compiled modules, and a file of each package. It works in any case."""
    compiled, matched, *files = output_of(CODE, site, **environment).split()
    assert matched == "32" and all(file.startswith(str(site)) for file in files)
    return compiled, *(Path(file).name for file in files)


def test_the_compiled_modules_are_used_unless_asked_otherwise(site: Path) -> None:
    assert use(site) == use(site, RADIXKV_PURE="0") == COMPILED
    assert use(site, RADIXKV_PURE="1") == PURE


def is_compiled(site: Path) -> bool:
    """Return whether a fresh process would use the compiled modules."""
    return output_of("import radixkv; print(radixkv.COMPILED)", site) == "True\n"


def test_the_sources_are_used_after_an_edit(site: Path) -> None:
    """This includes a source that the compiler only reads. With the same bytes again, the compiled modules are used."""
    for edited in (
        "radixkv/index/tree.py",
        "radixkv/errors.py",
        "radixkv_policies/hints.py",
        "radixkv/coordination/store/wire.py",
        "radixkv/engines/__init__.py",
    ):
        source = site / edited
        text = source.read_bytes()
        source.write_bytes(text + b"\n")
        assert not is_compiled(site), edited
        source.write_bytes(text)
    assert is_compiled(site)


def test_a_build_for_another_interpreter_is_ignored(site: Path) -> None:
    for file in (site / "radixkv_policies" / "_native").iterdir():
        file.rename(file.with_name(file.name.replace(EXTENSION_SUFFIXES[0], ".cpython-30-other.so")))
    assert use(site) == PURE


# --- the wheel


@pytest.mark.release
def test_the_wheel_is_for_this_interpreter_and_holds_every_module_twice(wheel: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{python}-{python}-linux_" in wheel.name
    files = files_of(wheel)
    for package, prefix, some in (
        ("radixkv/index", "index_", {"blocks", "cache", "eviction", "tree"}),
        ("radixkv_policies", "policies_", {"learned", "leaves", "lru", "policy"}),
        ("radixkv/coordination", "publisher_", {"store/holdings", "keys", "publisher"}),
        ("radixkv", "engines_", {"engines/sglang/cache", "engines/vllm/cache", "tenancy/request_keys"}),
    ):
        native = {
            name.removeprefix(f"{package}/_native/").partition(".")[0]
            for name in files
            if name.startswith(f"{package}/_native/")
        }
        (library,) = {name for name in native if name.startswith(prefix)}
        assert some <= native - {library}
        assert {f"{package}/{name}.py" for name in native - {library}} <= files


@pytest.mark.release
def test_the_compiled_modules_of_the_wheel_are_used(unpacked: Path) -> None:
    assert use(unpacked) == COMPILED
    assert use(unpacked, RADIXKV_PURE="1") == PURE


@pytest.mark.release
def test_compiled_modules_have_the_docstrings_and_signatures_of_the_sources(unpacked: Path) -> None:
    """All but annotations, and defaults that are no literals. Editors read both in the ``.py`` files beside."""
    compiled, pure = (json.loads(output_of(HELP, unpacked, RADIXKV_PURE=wish)) for wish in ("0", "1"))
    assert (compiled.pop("COMPILED"), pure.pop("COMPILED")) == (True, False)
    assert {name: compiled.get(name) for name in pure} == pure
    doc, signature = compiled["radixkv.index.cache.PrefixCache.open"]
    assert len(pure) > 300 and doc and ["hints", "KEYWORD_ONLY", "None"] in signature


# --- the build hook, on a copy of the source tree


@pytest.fixture
def tree(wheel: Path, tmp_path: Path) -> Path:
    """The part of the source tree that the compiler needs. All but the index is compiled."""
    for script in ("hatch_build.py", "hatch_docstrings.py"):
        shutil.copy(ROOT / script, tmp_path)
    for package in ("radixkv", "policies/radixkv_policies"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("_native", "__pycache__")
        )
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.match("radixkv/(coordination/)?_native/", name):
                archive.extract(name, tmp_path)
            elif name.startswith("radixkv_policies/_native/"):
                archive.extract(name, tmp_path / "policies")
    return tmp_path


def compile_in(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RADIXKV_COMPILE", "CC")}
    return subprocess.run(
        [sys.executable, "hatch_build.py"],
        capture_output=True,
        text=True,
        env={**inherited, "RADIXKV_BUILDS": "", **environment},
        cwd=tree,
        timeout=LIMIT_S,
    )


@pytest.mark.release
@pytest.mark.parametrize("compiler, why", [("/no/such/cc", "no C compiler"), ("false", "CompileError")])
def test_without_a_working_compiler_the_build_prints_one_line(tree: Path, compiler: str, why: str) -> None:
    done = compile_in(tree, CC=compiler)
    (line,) = done.stderr.splitlines()
    assert line.startswith("radixkv: the index stays pure Python") and why in line
    assert done.returncode == 0 and not (tree / "radixkv" / "index" / "_native").exists()
    done = compile_in(tree, CC=compiler, RADIXKV_COMPILE="1")
    assert done.returncode != 0 and why in done.stderr
    assert compile_in(tree, CC=compiler, RADIXKV_COMPILE="0").stderr == ""


@pytest.mark.release
def test_a_failed_build_keeps_the_old_libraries(tree: Path) -> None:
    native = tree / "radixkv" / "index" / "_native"
    native.mkdir()
    (native / f"tree{EXTENSION_SUFFIXES[0]}").touch()
    with (tree / "radixkv" / "index" / "tree.py").open("a") as source:
        source.write("\nWRONG: int = 'text'\n")
    done = compile_in(tree, RADIXKV_COMPILE="1")
    assert done.returncode != 0 and "Incompatible types in assignment" in done.stderr
    assert [file.name for file in native.iterdir()] == [f"tree{EXTENSION_SUFFIXES[0]}"]
