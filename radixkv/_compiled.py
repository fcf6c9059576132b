"""Choice of the build of the modules on a request's path: compiled by mypyc, or the pure Python sources.

Both builds are the same modules. If there is a compiler, ``hatch_build.py`` compiles each of ``BUILDS`` into one
library in the ``_native/`` folder of its package. Each module gets an extension module that replaces the source of the
same name.

The library's name ends with a digest of every source that the compiler read, made with the interpreter's own key. So if
this file exists, it is a build of exactly these sources for this interpreter. After an edit the file doesn't exist, and
the sources of all builds run until ``make compile``. ``RADIXKV_PURE=1`` selects the sources.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import find_spec, module_from_spec, source_hash
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path  # it takes 3 ms to import

    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_):
        """Set how a class is compiled. Does nothing in pure Python."""
        return lambda cls: cls


FOLDER = "_native"


class Build(NamedTuple):
    """Modules of a package that are compiled into one library.

    ``compiled``: the modules on a request's path. ``read``: modules whose types and constants the compiler reads; it
    reads no others. Both are paths from the package's folder, without ``.py``.
    """

    package: str
    name: str
    compiled: tuple[str, ...]
    read: tuple[str, ...]

    def library_name(self, package: Path | str) -> str:
        """Return the name, in the package, of the library for its current sources. 0.3 ms."""
        sources = b"\0".join([_content(f"{package}/{name}.py") for name in (*self.compiled, *self.read)])
        return f"{self.name}_{source_hash(sources).hex()}__mypyc"

    def library(self, package: Path) -> Path:
        """Return the file of the library for the package's sources, compiled for this interpreter. It may not exist."""
        return package / FOLDER / (self.library_name(package) + EXTENSION_SUFFIXES[0])

    def is_made(self, package: str) -> bool:
        """Whether there is such a file."""
        name = self.library_name(package) + EXTENSION_SUFFIXES[0]
        return os.path.isfile(f"{package}/{FOLDER}/{name}")  # noqa: PTH113


def _content(file: str) -> bytes:
    with open(file, "rb") as opened:  # noqa: PTH123
        return opened.read()


INDEX = Build(
    "radixkv.index",
    "index",
    (
        "ahead",
        "announcements",
        "bases",
        "blocks",
        "cache",
        "cachelock",
        "engine_blocks",
        "eviction",
        "ghost_keys",
        "holders",
        "leases",
        "match",
        "opening",
        "purge",
        "ranking",
        "registry",
        "requests",
        "residency",
        "runs",
        "sequence",
        "state",
        "tails",
        "tenants",
        "tokens",
        "tree",
    ),
    (
        "../_compiled",
        "../clock",
        "../errors",
        "../storage/plan",
        "__init__",
        "below",
        "changes",
        "device_beams",
        "fences",
        "forgotten",
        "guarded",
        "lent_beams",
        "load_target",
        "locking",
        "maintenance",
        "pins",
        "recovery",
        "scrubbing",
        "sessions",
        "snapshot",
        "stats",
        "tenant_settings",
        "validation",
    ),
)

POLICIES = Build(
    "radixkv_policies",
    "policies",
    (
        "arc",
        "auto",
        "doorkeeper",
        "facts",
        "fifo",
        "gdsf",
        "hazard",
        "heaps",
        "learned",
        "leaves",
        "lfu",
        "lrfu",
        "lru",
        "policy",
        "prefix_first",
        "priority",
        "queue",
        "s3fifo",
        "sieve",
        "slru",
        "survival",
        "tail_lru",
    ),
    ("_mypyc", "hints"),
)

PUBLISHER = Build(
    "radixkv.coordination",
    "publisher",
    ("keys", "publisher", "store/holdings"),
    ("store/wire", "values"),
)

ENGINES = Build(
    "radixkv",
    "engines",
    ("engines/sglang/cache", "engines/vllm/cache", "tenancy/request_keys"),
    ("_compiled", "engines/__init__", "engines/sglang/__init__", "engines/vllm/__init__", "tenancy/__init__"),
)

BUILDS = (INDEX, POLICIES, PUBLISHER, ENGINES)

is_compiled = False
"""The result of ``prefer_compiled``."""


def prefer_compiled(path: list[str]) -> bool:
    """Put the compiled policies before their sources, if all builds match their sources. Returns whether they do.

    ``path`` is the search path of radixkv. Packages below it ``follow`` when they are imported. Policies that were
    imported before don't change.
    """
    global is_compiled
    policies = find_spec(POLICIES.package)
    if os.environ.get("RADIXKV_PURE", "0") not in ("", "0") or policies is None:
        return False
    places = policies.submodule_search_locations
    if not places:
        return False
    folders = f"{path[0]}/index", places[-1], f"{path[0]}/coordination", path[0]
    if not all(build.is_made(folder) for build, folder in zip(BUILDS, folders, strict=True)):
        return False
    is_compiled = True
    path.append(f"{path[0]}/{FOLDER}")  # last: it has folders of packages, but only their compiled modules
    if POLICIES.package not in sys.modules:
        places.insert(0, f"{places[-1]}/{FOLDER}")
        _load(policies)
    return True


def follow(path: list[str], below: str = "") -> None:
    """Let a package use the same build as radixkv: compiled modules, or the sources.

    ``below``: its path from a package above it, if its modules are compiled with those of that package.
    """
    if is_compiled:
        above = path[0].removesuffix(f"/{below}")
        path.insert(0, f"{above}/{FOLDER}/{below}".removesuffix("/"))


def _load(spec: ModuleSpec) -> None:
    """Import a package from its spec. An import statement would search for it again."""
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
