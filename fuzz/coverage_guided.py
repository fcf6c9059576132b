"""Run each target of ``fuzz/targets`` under atheris for a given time, from the committed corpus.

  python fuzz/coverage_guided.py --seconds 600 [--target tokens]

Each target runs in a process of its own. The driver prints executions and seconds. An input that finds something is
written to ``fuzz/found/``, and its name is printed. The run then ends with exit code 1.

To make such an input a regression test, move it into the corpus, which the tests replay. New inputs of libFuzzer go to
a temporary folder, unless ``--keep`` names a folder.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FUZZ = Path(__file__).parent
TARGETS = ("tokens", "replies", "answers", "bodies")
SLOWEST_S = 120
_DONE = re.compile(r"stat::number_of_executed_units:\s+(\d+)")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=int, default=60, help="how long each target goes on (default 60)")
    options.add_argument("--target", choices=TARGETS, help="only this one")
    options.add_argument("--seed", type=int, default=1, help="of libFuzzer (default 1)")
    options.add_argument("--keep", type=Path, help="folder for inputs that reach new code, by target")
    options.add_argument("--drive", choices=TARGETS, help=argparse.SUPPRESS)
    chosen, rest = options.parse_known_args()
    if chosen.drive:
        return drive(chosen.drive, rest)
    found = [run(target, chosen) for target in ([chosen.target] if chosen.target else TARGETS)]
    return max(found)


def run(target: str, chosen: argparse.Namespace) -> int:
    """Run one target in a process of its own. Return its exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        grown = chosen.keep / target if chosen.keep else Path(scratch)
        for folder in (grown, FUZZ / "found"):
            folder.mkdir(parents=True, exist_ok=True)
        command = [
            *(
                sys.executable,
                str(Path(__file__)),
                "--drive",
                target,
                str(grown),
                str(FUZZ / "corpus" / target),
            ),
            *(f"-max_total_time={chosen.seconds}", f"-seed={chosen.seed}", f"-timeout={SLOWEST_S}"),
            *(f"-artifact_prefix={FUZZ / 'found'}/{target}-", "-print_final_stats=1", "-verbosity=0"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    executions = _DONE.search(done.stderr)
    print(f"{target}: {executions[1] if executions else 'unknown'} executions in {chosen.seconds} s", end="")
    print(": nothing found" if done.returncode == 0 else f"\n{done.stdout}{done.stderr[-3000:]}")
    return 1 if done.returncode else 0


def drive(target: str, arguments: list[str]) -> int:
    """Run libFuzzer over ``one``, in the process of a target."""
    import atheris

    sys.path.insert(0, str(FUZZ.parent))
    with atheris.instrument_imports(include=["radixkv", "fuzz.targets"]):
        one = importlib.import_module(f"fuzz.targets.{target}").one
    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
