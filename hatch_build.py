"""Compiles the modules on a request's path with mypyc, for wheels and editable installs.

``radixkv/_compiled.py`` chooses the build.

    RADIXKV_COMPILE   unset: compile if possible, otherwise leave the pure build and print the reason in a line
                      1: fail if compiling isn't possible     0: don't compile
    RADIXKV_BUILDS    a folder that keeps what was compiled, for other checkouts of the same sources, under a digest of
                      all that went into it. By default ~/.cache/radixkv/builds; empty: keep nothing

As a script (``make compile``) it updates the ``_native/`` folders of the packages to the current sources.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
SOURCES = {"radixkv": ROOT, "radixkv_policies": ROOT / "policies"}
"""The import path of each top-level package."""
REQUIRES = ["mypy>=2.4,<3", "setuptools>=77"]
WISH = os.environ.get("RADIXKV_COMPILE", "")
USUAL_BUILDS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "radixkv", "builds")
NUM_KEPT = 24
"""How many builds are kept: those that were used last. The four of one checkout have 5 MB."""

# Modules outside a build are not read. NumPy's types would take a minute and make no faster code. The compiled code
# would check known argument types before radixkv can report the error.
MYPY = "[mypy]\nno_site_packages = True\nignore_missing_imports = True\nfollow_imports = skip\n"
READ = "[mypy-{}]\nfollow_imports = silent\n"


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the compiled modules to a wheel, or to the source tree of an editable install."""

    def dependencies(self) -> list[str]:
        """Return the packages needed to compile, if compiling is possible."""
        return [] if self.target_name != "wheel" or obstacle() else REQUIRES

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Prepare the wheel. ``version`` is "editable" for a wheel that points to the tree."""
        if self.target_name != "wheel":
            return
        if version == "editable":
            bring_up_to_date()
            return
        self._folder = tempfile.TemporaryDirectory()  # deleted with the hook
        made = bring_up_to_date(Path(self._folder.name))
        for package, folder in made.items():
            build_data["force_include"][str(folder)] = f"{_path(package)}/{folder.name}"
        if made:
            build_data["pure_python"], build_data["infer_tag"] = False, True


def obstacle() -> str | None:
    """Return the reason why the index can't or must not be compiled here; None if no reason is known."""
    if WISH == "0":
        return "RADIXKV_COMPILE=0"
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "only CPython with its global lock runs it compiled"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    return None if shutil.which(compiler) else f"no C compiler ({compiler})"


def bring_up_to_date(target: Path | None = None) -> dict[str, Path]:
    """Compile everything that isn't compiled yet, beside its sources or into ``target``.

    Libraries that are compiled beside the present sources are copied to ``target``. Returns the folders by package;
    none if compiling isn't possible.
    """
    plan = _plan()
    folders = {
        build.package: (_place(build.package) if target is None else target / build.package) / plan.FOLDER
        for build in plan.BUILDS
    }
    if target is not None and WISH != "0":
        for build in plan.BUILDS:
            made = build.library(_place(build.package))
            if made.is_file():
                _replace(made.parent, folders[build.package])
    missing = [
        build
        for build in plan.BUILDS
        if not (folders[build.package] / build.library(_place(build.package)).name).is_file()
    ]
    if missing and WISH == "0":
        return {}
    why = obstacle() if missing else None
    if why is None and missing:
        missing = [build for build in missing if not _fetch(build, folders[build.package])]
    if why is None and missing:
        print("radixkv: compiling the index: half a minute, on a busy machine some minutes ...", flush=True)
        with ThreadPoolExecutor() as pool:
            why = next(
                filter(None, pool.map(lambda build: _compile(build, folders[build.package]), missing)), None
            )
    if why is None:
        return folders
    if WISH == "1":
        raise SystemExit(f"radixkv: the index could not be compiled, and RADIXKV_COMPILE=1: {why}")
    print(f"radixkv: the index stays pure Python, at half the speed: {why.splitlines()[-1]}", file=sys.stderr)
    return {}


def _path(package: str) -> str:
    return package.replace(".", "/")


def _dotted(path: str) -> str:
    """Return the module of a path without ``.py``. ``package/__init__`` is the package."""
    return os.path.normpath(path).replace("/", ".").removesuffix(".__init__")


def _place(package: str) -> Path:
    """Return the folder of a package's sources."""
    return SOURCES[package.partition(".")[0]] / _path(package)


def _plan() -> ModuleType:
    """Load ``radixkv._compiled`` without importing the package around it."""
    spec = importlib.util.spec_from_file_location("_compiled", ROOT / "radixkv" / "_compiled.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(build: Any, folder: Path) -> str | None:
    """Compile in a separate process, because mypyc ends its process if it fails. Returns its output in that case."""
    package = _place(build.package)
    name = f"{build.package}.{build.library_name(package)}".removesuffix("__mypyc")
    sources = [f"{_path(build.package)}/{module}.py" for module in build.compiled]
    read = [_dotted(f"{_path(build.package)}/{module}") for module in build.read]
    before = _kept(build)
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "mypy.ini").write_text(MYPY + "".join(map(READ.format, read)))
        done = subprocess.run(
            [sys.executable, __file__, "--in-process", scratch, name, *sources],
            cwd=SOURCES[build.package.partition(".")[0]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            return done.stdout.strip() or f"mypyc ended with {done.returncode}"
        made = Path(scratch, "lib", _path(build.package))
        if _kept(build) == before:  # nobody edited a source meanwhile
            _keep(build, made)
        _replace(made, folder)
    return None


def _kept(build: Any) -> Path | None:
    """Return the folder of a build among those that are kept. It may not exist. None if none is kept."""
    kept = os.environ.get("RADIXKV_BUILDS", str(USUAL_BUILDS))
    return Path(kept, _digest(build)) if kept else None


def _digest(build: Any) -> str:
    """Return a digest of all that decides what the compiler makes of a build."""
    package = _place(build.package)
    parts = [*_tools(), build.package, *build.compiled]
    files = [*(package / f"{name}.py" for name in (*build.compiled, *build.read))]
    files += [ROOT / "hatch_build.py", ROOT / "hatch_docstrings.py"]
    whole = hashlib.sha256()
    for part in (*map(str.encode, parts), *(file.read_bytes() for file in files)):
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


@functools.cache
def _tools() -> tuple[str, ...]:
    """Return what is known of the interpreter, mypy and the C compiler."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    said = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=False)
    flags = (os.environ.get(name, "") for name in ("CFLAGS", "CPPFLAGS", "LDFLAGS", "MYPYC_OPT_LEVEL"))
    versions = (importlib.metadata.version(name) for name in ("mypy", "setuptools"))
    return (sys.version, EXTENSION_SUFFIXES[0], platform.machine(), command, said.stdout, *flags, *versions)


def _fetch(build: Any, folder: Path) -> bool:
    """Copy a build that is kept, if there is one."""
    with contextlib.suppress(OSError, importlib.metadata.PackageNotFoundError):
        kept = _kept(build)
        if kept is not None and kept.is_dir():
            _replace(kept, folder)
            os.utime(kept)
            return True
    return False


def _keep(build: Any, made: Path) -> None:
    """Keep a build for others, whole or not at all. Without room or permission it is not kept."""
    with contextlib.suppress(OSError):
        if (kept := _kept(build)) is None or kept.exists():
            return
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=kept.parent, prefix="unfinished-"))
        _replace(made, scratch / "build")
        (scratch / "build").rename(kept)
        scratch.rmdir()
        by_use = sorted(kept.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in by_use[NUM_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)


def _replace(made: Path, folder: Path) -> None:
    """Replace earlier files for this interpreter by new ones, the library last."""
    files = sorted(made.rglob(f"*{EXTENSION_SUFFIXES[0]}"), key=lambda file: "__mypyc" in file.name)
    for old in folder.rglob(f"*{EXTENSION_SUFFIXES[0]}"):
        old.unlink()
    for file in files:
        place = folder / file.relative_to(made)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, place.with_name(f".{file.name}"))
        place.with_name(f".{file.name}").rename(place)


def _compile_in_process(scratch: Path, name: str, sources: list[str]) -> None:
    from mypyc.build import mypycify
    from setuptools import Distribution

    from hatch_docstrings import document

    extensions = mypycify(
        [f"--config-file={scratch / 'mypy.ini'}", "--cache-dir=/dev/null", *sources],
        debug_level="0",
        group_name=name,
        target_dir=str(scratch / "c"),
    )
    document(scratch / "c", Path.cwd(), sources)
    build = Distribution({"name": "radixkv", "ext_modules": extensions}).get_command_obj("build_ext")
    build.build_lib, build.build_temp = str(scratch / "lib"), str(scratch / "o")
    build.ensure_finalized()
    build.run()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-process"]:
        _compile_in_process(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        bring_up_to_date()
