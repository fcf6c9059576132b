"""Test a demo service with schemathesis against its own description, ``/openapi.json``, for a given time.

  python fuzz/openapi.py --seconds 600

Checks that no answer has status 500, and that status, content type and body agree with the description. A request that
agrees with the description must not be refused. ``schemathesis.toml`` has the exceptions: where 503 is no failure, and
which requests may be refused.

Runs with a tenant's key, with the operator's key and without a key. Prints a line for each. The exit code is 1 if it
found something.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from radixkv.service.auth import DEMO_KEYS, DEMO_OPERATOR_KEY
from radixkv.service.local import demo_service

CHECKS = ",".join(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "positive_data_acceptance",
    ]
)
KEYS = {"tenant": next(iter(DEMO_KEYS.values())), "operator": DEMO_OPERATOR_KEY, "anonymous": None}
NUM_BLOCKS = 2_048
"""More than the pins of a demo tenant and the longest prompt together: 503 for lack of room is a failure."""
MOST_SHOWN = 400
"""Characters of a line of the report: bodies may be long."""
SHARES = {"tenant": 0.6, "operator": 0.2, "anonymous": 0.2}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default 60)")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    with demo_service(**{"num-blocks": str(NUM_BLOCKS), "threads": "1"}) as url:
        return max(run(url, who, max(int(chosen.seconds * SHARES[who]), 1), chosen.seed) for who in KEYS)


def run(url: str, who: str, seconds: int, seed: int) -> int:
    """Run as one of the principals. Return the exit code."""
    tool = str(Path(sys.executable).with_name("st"))
    command = [
        *(tool, "--config-file", str(Path(__file__).with_name("schemathesis.toml"))),
        *("run", f"{url}/openapi.json", "--max-time", str(seconds), "--seed", str(seed), "--no-color"),
        *("--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all"),
        *("--warnings", "off", "--request-timeout", "30", "--generation-database", "none"),
    ]
    if KEYS[who] is not None:
        command += ["-H", f"Authorization: Bearer {KEYS[who]}"]
    done = subprocess.run(command, capture_output=True, text=True)
    counted = re.search(r"(\d+) generated", done.stdout)
    print(f"{who}: {counted[1] if counted else 'unknown'} requests in {seconds} s", end="")
    said = "\n".join(line[:MOST_SHOWN] for line in done.stdout.splitlines())
    print(
        ": nothing found" if done.returncode == 0 else f"\n{said[-20_000:]}\n{done.stderr[-2000:]}",
        flush=True,
    )
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
