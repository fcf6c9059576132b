"""Which build of the index is used: the one compiled by mypyc, or its source in pure Python.

Both are the same modules. Where a compiler is there, ``hatch_build.py`` compiles ``COMPILED`` into one library in
``radixkv/_native/``, with one extension module each that stands for the source of the same name. The library's name
ends with a digest of every source that the compiler read, made with the interpreter's own key, so the question
whether there is a build of exactly these sources for this interpreter is whether a file exists: after an edit
there is none, and the sources are what runs, until ``make compile``. ``RADIXKV_PURE=1`` asks for the sources.
"""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import source_hash
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**_):
        """What a class is to be when it is compiled; nothing as pure Python."""
        return lambda cls: cls


COMPILED = (
    "bases",
    "blocks",
    "cache",
    "eviction",
    "leases",
    "plan",
    "registry",
    "runs",
    "sequence",
    "tenants",
    "tokens",
    "tree",
)
"""The modules that are compiled: what a request runs."""

READ = (
    "_compiled",
    "clock",
    "config",
    "errors",
    "gathering",
    "lending",
    "pins",
    "recovery",
    "scrubbing",
    "segments",
    "snapshots",
    "storage/layout",
    "types",
    "upkeep",
)
"""Modules whose types and constants the compiler reads; it reads no others."""

FOLDER = "_native"


def library_name(package: Path) -> str:
    """The name, in the package, of the library that its sources make as they are now. 0.3 ms."""
    sources = b"\0".join((package / f"{name}.py").read_bytes() for name in (*COMPILED, *READ))
    return f"index_{source_hash(sources).hex()}__mypyc"


def library(package: Path) -> Path:
    """The file that the library of the package's sources lies in, once they are compiled for this interpreter."""
    return package / FOLDER / (library_name(package) + EXTENSION_SUFFIXES[0])


def prefer_compiled(path: list[str]) -> bool:
    """Put the compiled modules before the sources in a package's search path, if they say the same; whether so."""
    if os.environ.get("RADIXKV_PURE", "0") not in ("", "0"):
        return False
    found = library(Path(path[0]))
    if not found.is_file():
        return False
    path.insert(0, str(found.parent))
    return True
