"""The fuzz drivers start, end in time and find nothing in a short run; committed corpora find nothing either."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.coverage_guided import TARGETS
from fuzz.targets.material import Material

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "fuzz" / "corpus"


def driven(driver: str, *options: str) -> str:
    """What a driver prints."""
    command = [sys.executable, str(ROOT / "fuzz" / driver), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_state_machine_driver() -> None:
    assert driven("state_machine.py", "--seconds", "1", "--batch", "10").endswith("nothing found")


@pytest.mark.parametrize("target", ["tokens", "replies", "answers"])
def test_coverage_guided_driver(target: str) -> None:
    pytest.importorskip("atheris")
    said = driven("coverage_guided.py", "--seconds", "1", "--target", target)
    assert said.startswith(f"{target}: ") and said.endswith("nothing found") and "unknown" not in said


def test_openapi_driver() -> None:
    pytest.importorskip("schemathesis")
    lines = driven("openapi.py", "--seconds", "5").splitlines()
    found = [line for line in lines if "requests in" in line]
    assert len(found) == 3 and all(line.endswith("nothing found") for line in found), lines


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_finds_nothing(target: str) -> None:
    one = importlib.import_module(f"fuzz.targets.{target}").one
    inputs = sorted((CORPUS / target).iterdir())
    assert len(inputs) >= 8
    for path in inputs:
        one(path.read_bytes())


def test_a_corpus_is_read_as_it_is_written() -> None:
    material = Material(bytes([3, 200]) + (-7).to_bytes(8, "little", signed=True) + bytes([2]) + b"abc")
    assert (material.byte(), material.number(), material.chunk(), material.rest()) == (3, -7, b"ab", b"c")
    assert (material.byte(), material.number(), material.chunk(), material.value()) == (0, 0, b"", None)
