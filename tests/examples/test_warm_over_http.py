"""The example that warms over HTTP runs against a real service and prints what it claims."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.service.running import service_in_thread

EXAMPLE = Path(__file__).parents[2] / "examples" / "warm_over_http.py"


def test_warm_over_http_example() -> None:
    with service_in_thread() as live:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), live.url], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    warmed, found, cold, warm = done.stdout.splitlines()
    tokens = re.match(r"warmed (\d+) tokens in (\d+) blocks \(\d+ left out\)", warmed)
    assert tokens and int(tokens[1]) == 16 * int(tokens[2]) > 1000
    assert found == f"a continuation finds {tokens[1]} of them"
    assert cold.startswith("cold: 0 of ") and warm.startswith(f"warm: {tokens[1]} of ")
