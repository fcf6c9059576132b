"""A policy whose simulation doesn't end, for tests of worker processes that are ended."""

from __future__ import annotations

import time
from typing import Any

from radixkv_policies import LRU
from tests.waiting import LIMIT_S


class Endless(LRU):
    """LRU, after longer than any test."""

    def __init__(self, *given: Any, **named: Any) -> None:
        time.sleep(4 * LIMIT_S)
        super().__init__(*given, **named)
