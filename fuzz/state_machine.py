"""Test the cache with random lives for a given time, each batch under a new seed.

  python fuzz/state_machine.py --seconds 600

The state machine is that of the tests (``radixkv.audit.properties``), with longer lives. Prints the lives, steps and
seconds spent. A failure is shrunk and printed with its seed, and the run ends with exit code 1. The shrunk example can
then become a regression test.
"""

from __future__ import annotations

import argparse
import sys
import time

from radixkv import PrefixCache
from radixkv.audit import properties


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default 60)")
    options.add_argument("--steps", type=int, default=100, help="longest life, in calls (default 100)")
    options.add_argument("--batch", type=int, default=50, help="lives under one seed (default 50)")
    options.add_argument("--seed", type=int, default=1_000_000, help="first seed (default 1000000)")
    chosen = options.parse_args()
    started, seed, lives, steps = time.monotonic(), chosen.seed, 0, 0
    while time.monotonic() - started < chosen.seconds:
        machine = (properties.CacheMachine, properties.TwoRuns, properties.EngineMachine)[seed % 3]
        report = properties.run(PrefixCache, chosen.batch, chosen.steps, seed, machine=machine)
        lives, steps = lives + report.examples, steps + report.steps
        if not report.ok:
            print(f"seed {seed}, {machine.__name__}:\n{report.failure}", file=sys.stderr)
            return 1
        seed += 1
        spent = time.monotonic() - started
        print(f"\r{lives} lives, {steps} steps, {spent:.0f} s, seed {seed - 1}", end="", flush=True)
    print(": nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
