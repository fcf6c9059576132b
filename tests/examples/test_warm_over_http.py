"""The example that warms over HTTP runs against a real service and prints the expected lines."""

from __future__ import annotations

import re

import pytest

from tests.examples.running import printed
from tests.forked import small_demo_model
from tests.service.patience import patient_services
from tests.service.running import service_in_thread


@pytest.mark.slow
def test_warm_over_http_example() -> None:
    with small_demo_model(), patient_services(), service_in_thread() as live:
        warmed, found, cold, warm = printed("warm_over_http.py", live.url).splitlines()
    tokens = re.match(r"warmed (\d+) tokens in (\d+) blocks \(\d+ left out\)", warmed)
    assert tokens and int(tokens[1]) == 16 * int(tokens[2]) > 1000
    assert found == f"a continuation finds {tokens[1]} of them"
    assert cold.startswith("cold: 0 of ") and warm.startswith(f"warm: {tokens[1]} of ")
