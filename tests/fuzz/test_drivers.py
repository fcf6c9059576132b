"""The fuzz drivers start, end in time and find nothing in a short run. The committed corpora find nothing either.

Runs of whole drivers are for releases: each is a process of its own, and ends by the clock.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuzz import state_machine
from fuzz.coverage_guided import TARGETS
from fuzz.faults import Ranked
from fuzz.fleet import history, plan
from fuzz.targets.material import Material
from radixkv.audit.properties import PropertyReport
from tests import forked
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "fuzz" / "corpus"
SEED, FAULTS_S = 296, 5.0


def output_of(driver: str, *options: str) -> str:
    """Return a driver's output."""
    command = [sys.executable, str(ROOT / "fuzz" / driver), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state machine's driver runs three batches of two short lives, one for each machine, by a clock of its own."""
    given = ["--seconds", "5.5", "--batch", "2", "--steps", "10"]
    monkeypatch.setattr(sys, "argv", ["state_machine.py", *given])
    monkeypatch.setattr(state_machine, "time", SimpleNamespace(monotonic=itertools.count().__next__))


@pytest.mark.usefixtures("short_runs")
def test_state_machine_driver(capsys: pytest.CaptureFixture[str]) -> None:
    assert state_machine.main() == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("seed 1000002: nothing found")


@pytest.mark.usefixtures("short_runs")
def test_state_machine_driver_reports_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = PropertyReport(examples=1, steps=3, seconds=0.5, seed=7, failure="what went wrong")
    monkeypatch.setattr(state_machine.properties, "run", lambda *given, **named: failed)
    assert state_machine.main() == 1
    assert capsys.readouterr().err == "seed 1000000, TwoRuns:\nwhat went wrong\n"


@pytest.mark.release
def test_state_machine_driver_ends_by_the_clock() -> None:
    assert output_of("state_machine.py", "--seconds", "1", "--batch", "10").endswith("nothing found")


@pytest.mark.release
@pytest.mark.parametrize("target", ["tokens", "replies", "answers"])
def test_coverage_guided_driver(target: str) -> None:
    pytest.importorskip("atheris")
    output = output_of("coverage_guided.py", "--seconds", "1", "--target", target)
    assert output.startswith(f"{target}: ") and output.endswith("nothing found") and "unknown" not in output


@pytest.mark.release
def test_openapi_driver(tmp_path: Path) -> None:
    """It runs in a process that already has torch, which only this driver needs."""
    pytest.importorskip("schemathesis")
    command = [str(ROOT / "fuzz" / "openapi.py"), "--seconds", "5"]
    done = forked.run(command, os.environ, tmp_path, LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    found = [line for line in lines if "requests in" in line]
    assert len(found) == 3 and all(line.endswith("nothing found") for line in found), lines


@pytest.mark.release
def test_faults_driver() -> None:
    """Replicas are killed, stopped and cut off.

    Redis is paused and restarted, also with old data. See ``fuzz/fleet/plan.py``.
    """
    lines = output_of(
        "faults.py", "--rounds", "1", "--length", str(FAULTS_S), "--store", "single", "--seed", str(SEED)
    ).splitlines()
    assert lines[0].startswith(f"seed {SEED}, single: ") and lines[-1] == "1 rounds: nothing found"


def test_the_schedule_of_the_run_has_many_kinds_of_steps() -> None:
    assert len({step.what for step in plan.draw(SEED, "single", FAULTS_S)}) >= 6


def test_a_schedule_depends_on_its_seed_only() -> None:
    for store in plan.STORES:
        drawn = [plan.draw(seed, store, 20.0) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        assert all(0 <= step.at_s < 20 for step in drawn[0])


def test_histories_show_stale_and_wrong_kv(tmp_path: Path) -> None:
    def append(replica: str, **facts: Any) -> None:
        with (tmp_path / f"{replica}.1.history").open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(
                    {"t": 0, "event": "served", "tenant": "serves", "wrong": 0, "cached": 512}
                    | {"epoch": 5, "knew": False}
                    | facts
                )
                + "\n"
            )

    append("a", began=5.0, oldest=4.0)
    append("a", began=9.0, oldest=7.0)
    append("b", began=5.0, oldest=0.5)
    (tmp_path / "c.2.history").write_text('{"t": 1, "event": "ser')
    append("a", began=4.0, oldest=0.5, epoch=4)  # another process had taken its id, and confirmed
    purge = history.Purged("serves", 1.0, 3.0, {"a": 5}, float("inf"))
    assert history.wrongs(tmp_path, [purge]) == ([], 4), "b was cut off, and may not have heard of the purge"
    append("a", began=4.0, oldest=0.5)
    append("a", began=2.0, oldest=0.5)
    append("b", began=4.0, oldest=3.5, wrong=1)
    found, _ = history.wrongs(tmp_path, [purge])
    assert len(found) == 2 and found[0].startswith("purged KV") and found[1].startswith("wrong KV")
    append("a", began=4.0, oldest=0.5, epoch=4, knew=True)
    assert len(history.wrongs(tmp_path, [purge])[0]) == 3, (
        "the replica believed that no purge could complete without it"
    )
    append("b", tenant="refuses", began=4.0, oldest=0.5, knew=True)
    append("b", tenant="refuses", began=9.0, oldest=0.5, knew=True)
    forgotten = history.Purged("refuses", 1.0, 3.0, {"a": 5}, 8.0)
    assert len(history.wrongs(tmp_path, [forgotten])[0]) == 2, "one of these two, and the wrong KV"


def test_a_stall_excuses_a_late_ranking_of_a_dead_replica() -> None:
    """A replica was ranked 2.5 s after its death, with a lease of 1.5 s."""
    late = Ranked("a", dead_since=10.0, asked_at=12.5)
    assert late.is_excused_by((9.5, 11.0))
    assert not late.is_excused_by((9.5, 10.7)), "its lease would have ended by then"
    assert not late.is_excused_by((10.5, 12.0)), "the router had its messages before"


BODIES = pytest.param("bodies", marks=pytest.mark.release)
"""It needs a whole service. Tests of the service send it such bodies too."""


@pytest.mark.parametrize("target", [BODIES if target == "bodies" else target for target in TARGETS])
def test_the_corpus_finds_nothing(target: str) -> None:
    one = importlib.import_module(f"fuzz.targets.{target}").one
    inputs = sorted((CORPUS / target).iterdir())
    assert len(inputs) >= 8
    for path in inputs:
        one(path.read_bytes())


def test_material_reads_a_corpus_entry() -> None:
    material = Material(bytes([3, 200]) + (-7).to_bytes(8, "little", signed=True) + bytes([2]) + b"abc")
    assert (material.byte(), material.number(), material.chunk(), material.rest()) == (3, -7, b"ab", b"c")
    assert (material.byte(), material.number(), material.chunk(), material.value()) == (0, 0, b"", None)
