"""The exported Hypothesis state machines: random lives of requests, against the oracle and the laws.

The only door to Hypothesis in the package (extra ``audit``). Four machines:

- ``CacheMachine`` attacks one PrefixCache with every call there is, also those that must be refused. After each step
  every law of ``radixkv.audit`` holds, what was served is no lie (committed before, in that namespace, since
  it was last cleared), every open sequence reads the KV of its own ids bit for bit, what a running sequence
  committed is still matched, a refused call changed nothing and was refused truly, and copies are as many as
  the formula says.
- ``BeamMachine`` does so too, and lends some of its requests to the device, which moves them on by itself.
- ``TwoRuns`` plays one tenant on two caches that others use differently, and compares all that it observes.
- ``TwoAdapters`` does the same to whatever stands behind an ``Adapter``: an engine's integration, another cache.

An integrator hands in a factory and gets it attacked::

    report = properties.run(PrefixCache, max_examples=500)             # or what wraps or extends one
    report = properties.run_adapter(MyEngineAdapter, max_examples=500) # anything that can match and open
    assert report.ok, report.failure

``material`` holds prompts and namespaces, ``checked`` what holds after each step, ``machine`` the steps on one cache,
``beams`` those of beams on the device, ``adapter`` the protocol, ``two_systems`` the comparison, ``runner`` the runs.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.audit.properties", "audit")

from radixkv.audit.properties.adapter import (
    Adapter,
    CacheAdapter,
    has_strict_tenants,
    strict_halves,
    strict_system,
)
from radixkv.audit.properties.beam_machine import BeamMachine
from radixkv.audit.properties.machine import CacheMachine
from radixkv.audit.properties.material import LAYOUT, NAMESPACES, CacheFactory, Held, Mirror, expect, prompts
from radixkv.audit.properties.runner import PropertyReport, run, run_adapter
from radixkv.audit.properties.two_systems import Observed, Player, TwoAdapters, TwoRuns, TwoSystems

__all__ = [
    "LAYOUT",
    "NAMESPACES",
    "Adapter",
    "BeamMachine",
    "CacheAdapter",
    "CacheFactory",
    "CacheMachine",
    "Held",
    "Mirror",
    "Observed",
    "Player",
    "PropertyReport",
    "TwoAdapters",
    "TwoRuns",
    "TwoSystems",
    "expect",
    "has_strict_tenants",
    "prompts",
    "run",
    "run_adapter",
    "strict_halves",
    "strict_system",
]
