"""What was compiled is kept outside the checkout, and found again only by the same sources and tools."""

from __future__ import annotations

import os
import subprocess
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hatch_build

LIBRARY = f"made{EXTENSION_SUFFIXES[0]}"


class Planned(NamedTuple):
    """A build as ``radixkv._compiled`` plans them, of one source."""

    package: str = "radixkv.planned"
    compiled: tuple[str, ...] = ("source",)
    read: tuple[str, ...] = ()

    def library_name(self, package: Path) -> str:
        return "library__mypyc"


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """A build whose source is in ``tmp_path/radixkv/planned``, with an empty folder of kept builds."""
    monkeypatch.setattr(hatch_build, "SOURCES", {"radixkv": tmp_path})
    monkeypatch.setenv("RADIXKV_BUILDS", str(tmp_path / "kept"))
    hatch_build._tools.cache_clear()
    (tmp_path / "radixkv" / "planned").mkdir(parents=True)
    (tmp_path / "radixkv" / "planned" / "source.py").write_text("x = 1\n")
    return Planned()


def made_in(folder: Path, content: str = "compiled") -> Path:
    """A folder with a library, as the compiler leaves it."""
    folder.mkdir()
    (folder / LIBRARY).write_text(content)
    return folder


def test_what_was_kept_is_found_by_another_checkout(planned: Planned, tmp_path: Path) -> None:
    assert not hatch_build._fetch(planned, tmp_path / "place")
    hatch_build._keep(planned, made_in(tmp_path / "lib"))
    assert hatch_build._fetch(planned, tmp_path / "place")
    assert (tmp_path / "place" / LIBRARY).read_text() == "compiled"


def test_an_edit_finds_nothing(planned: Planned, tmp_path: Path) -> None:
    hatch_build._keep(planned, made_in(tmp_path / "lib"))
    (tmp_path / "radixkv" / "planned" / "source.py").write_text("x = 2\n")
    assert not hatch_build._fetch(planned, tmp_path / "place")


@pytest.mark.parametrize("edited", [False, True])
def test_what_was_edited_while_it_was_compiled_is_not_kept(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: bool
) -> None:
    run = subprocess.run

    def compiling(command: list[str], **options: Any) -> Any:
        if "--in-process" not in command:
            return run(command, **options)
        made = Path(command[3], "lib", "radixkv", "planned")
        made.mkdir(parents=True)
        (made / LIBRARY).write_text("compiled")
        if edited:
            (tmp_path / "radixkv" / "planned" / "source.py").write_text("x = 3\n")
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(hatch_build.subprocess, "run", compiling)
    assert hatch_build._compile(planned, tmp_path / "place") is None
    assert (tmp_path / "place" / LIBRARY).read_text() == "compiled"
    assert hatch_build._fetch(planned, tmp_path / "another") is not edited


@pytest.mark.parametrize("variable", ["CC", "CFLAGS", "MYPYC_OPT_LEVEL"])
def test_another_compiler_or_other_flags_find_nothing(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    hatch_build._keep(planned, made_in(tmp_path / "lib"))
    monkeypatch.setenv(variable, "echo" if variable == "CC" else "1")
    hatch_build._tools.cache_clear()
    assert not hatch_build._fetch(planned, tmp_path / "place")


@pytest.mark.parametrize("kept", ["", "/dev/null/nowhere"])
def test_without_a_folder_nothing_is_kept_and_nothing_fails(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    monkeypatch.setenv("RADIXKV_BUILDS", kept)
    hatch_build._keep(planned, made_in(tmp_path / "lib"))
    assert not hatch_build._fetch(planned, tmp_path / "place") and not (tmp_path / "kept").exists()


def test_the_builds_used_last_stay(planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hatch_build, "NUM_KEPT", 2)
    digests: list[Any] = []
    for number, content in enumerate(("x = 1\n", "x = 2\n", "x = 3\n")):
        (tmp_path / "radixkv" / "planned" / "source.py").write_text(content)
        digests.append(hatch_build._digest(planned))
        hatch_build._keep(planned, made_in(tmp_path / f"lib{number}"))
        os.utime(tmp_path / "kept" / digests[-1], (number, number))
    assert {each.name for each in (tmp_path / "kept").iterdir()} == set(digests[1:])
