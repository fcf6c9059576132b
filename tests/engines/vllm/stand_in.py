"""A pytest plug-in for vLLM's own tests: their schedulers are radixkv's. ``vllm_own_tests.py`` runs it.

radixkv caches also where vLLM's prefix caching is off, because then nothing is hashed. Tests that switch it off count
on that nothing is found, so the manager follows the switch here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import vllm.v1.core.sched.async_scheduler as vllm_async
import vllm.v1.core.sched.scheduler as vllm_scheduler
from radixkv.engines.vllm import manager as shell
from radixkv.tenancy.request_keys import RequestFacts


class _AsSwitched(shell.RadixManager):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.enable_caching = named.get("enable_caching", True)

    def _facts(self, request: Any) -> RequestFacts:
        facts = super()._facts(request)
        return facts if self.enable_caching else replace(facts, looks_up=False)


shell.RadixManager = _AsSwitched  # type: ignore[misc]
vllm_scheduler.Scheduler = shell.Scheduler  # type: ignore[misc]
vllm_async.AsyncScheduler = shell.AsyncScheduler  # type: ignore[misc]
