"""An sdist, then a pure wheel from it: the wheel has every module of the three packages, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from tests.packaging.building import ROOT, build, files_of
from tests.waiting import LIMIT_S

SOURCES = {"radixkv": ROOT, "radixkv_kernels": ROOT / "kernels", "radixkv_policies": ROOT / "policies"}
PAGES = {
    f"radixkv/service/pages/{name}" for name in ("docs.css", "docs.html", "docs.js", "errors.css", "icon.svg")
}
TEXTS = {f"radixkv/service/texts/{name}.yaml" for name in ("errors", "ignored", "operations")}
DATA = {"radixkv/tokenizer/radixkv-8k.model", "radixkv/tokenizer/LICENSE-TEXT", *PAGES, *TEXTS}
TYPED = {f"{package}/py.typed" for package in SOURCES}
NEVER = {".pyc", ".so", ".rdb", ".log"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 or newer
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(unpacked)
    (source,) = unpacked.iterdir()
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"), RADIXKV_COMPILE="0")


def modules_of_the_tree() -> set[str]:
    """Return every module of the source trees, by its name in the wheel."""
    return {
        path.relative_to(parent).as_posix()
        for package, parent in SOURCES.items()
        for path in (parent / package).rglob("*.py")
    }


@pytest.mark.release
def test_the_wheel_holds_exactly_the_three_packages(wheel: Path) -> None:
    """No tests, and no benchmarks for developers."""
    tops = {PurePosixPath(name).parts[0] for name in files_of(wheel)}
    (info,) = {top for top in tops if top.endswith(".dist-info")}
    assert tops == {*SOURCES, info}


@pytest.mark.release
def test_the_wheel_holds_every_module_its_data_and_nothing_else(wheel: Path) -> None:
    files = {name for name in files_of(wheel) if ".dist-info/" not in name}
    assert files == modules_of_the_tree() | DATA | TYPED


@pytest.mark.release
def test_the_wheel_has_its_licence_and_its_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {
            name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name
        }
        licence = archive.read(names["licenses/LICENSE"]).decode()
        commands = archive.read(names["entry_points.txt"]).decode()
    assert "Apache License" in licence and "Version 2.0" in licence
    assert "radixkv = radixkv.cli.main:main" in commands


@pytest.mark.release
def test_the_sdist_has_the_files_that_a_packager_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "pyproject.toml",
        "hatch_build.py",
        "hatch_docstrings.py",
        "Makefile",
        "README.md",
        "LICENSE",
        "benchmarks/policies.py",
        "tests/conftest.py",
    }
    assert wanted <= files
    assert not {name for name in files if Path(name).suffix in NEVER or "__pycache__" in name}


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without an __init__.py would be imported by chance, and no tool would check its types."""
    folders = {
        ROOT / PurePosixPath(name).parent for name in modules_of_the_tree() if name.startswith("radixkv/")
    }
    assert not {str(folder) for folder in folders if not (folder / "__init__.py").is_file()}


@pytest.mark.release
def test_the_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    """Unpacked and imported from there, away from the source tree."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import radixkv, radixkv_policies
from radixkv.tokenizer import load_tokenizer
cache = radixkv.PrefixCache(radixkv.CacheConfig(num_blocks=4))
namespace = radixkv.Namespace(tenant="a", model="m")
with cache.open(namespace, range(40)) as sequence:
    sequence.commit(40)
print(radixkv.__file__, cache.match(namespace, range(40)).num_tokens, load_tokenizer().vocab_size)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=LIMIT_S
    )
    assert done.stdout == f"{tmp_path / 'radixkv' / '__init__.py'} 32 8000\n", done.stderr
