"""What tests plant in a real SGLang: clocks that differ, a rank that decides otherwise, salts that are left out.

SGLang loads it as a plug-in. Environment:

    RADIXKV_TEST_SKEW_S    each process reads its clock up to so many seconds too late or too early
    RADIXKV_TEST_DIFFERS   rank 1 evicts a page on its own at its so-many-th match
    RADIXKV_TEST_SALTLESS  1: the salt of a request is checked, and then left out of the namespace
"""

from __future__ import annotations

import os
import random
from typing import Any

from radixkv.clock import monotonic
from radixkv.tenancy.salt import SaltOwner, SaltReader


def register() -> None:
    """Plant what the environment asks for. SGLang calls this in each of its processes."""
    if (skew_s := float(os.environ.get("RADIXKV_TEST_SKEW_S", "0"))) > 0:
        _skew(random.Random(os.getpid()).uniform(-skew_s, skew_s))
    if (number := int(os.environ.get("RADIXKV_TEST_DIFFERS", "0"))) > 0:
        _differ(number)
    if os.environ.get("RADIXKV_TEST_SALTLESS") == "1":
        _leave_out_salts()


def _skew(seconds: float) -> None:
    from radixkv.engines.control import steps

    begin = steps.EngineSteps.__init__

    def skewed(self: Any, clock: Any = None) -> None:
        begin(self, clock, lambda: monotonic() + seconds)

    steps.EngineSteps.__init__ = skewed  # type: ignore[assignment,method-assign]


def _differ(number: int) -> None:
    from radixkv.engines.sglang import plugin as shell
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sglang.srt.runtime_context import get_parallel

    match, seen = shell.RadixCache.match_prefix, [0]

    def differing(self: Any, params: Any) -> Any:
        seen[0] += get_parallel().tp_rank
        if seen[0] == number:
            self.evict(EvictParams(num_tokens=self.page_size))
        return match(self, params)

    shell.RadixCache.match_prefix = differing  # type: ignore[method-assign]


def _leave_out_salts() -> None:
    read = SaltReader.read

    def without_owner(self: SaltReader, cache_salt: str | None) -> SaltOwner:
        return read(self, cache_salt)._replace(tenant=f"t-{'0' * 32}", salt="")

    SaltReader.read = without_owner  # type: ignore[method-assign]
