"""The exported Hypothesis state machines: random sequences of calls (lives), checked against the oracle and the laws.

Only this subpackage imports Hypothesis (extra ``audit``). It has eight machines:

- ``CacheMachine`` attacks one PrefixCache with every call, also with calls that must be refused. It checks after
  each step: every law of ``radixkv.audit`` holds. What was served was committed before, in that namespace, since it
  was last cleared. Every open sequence reads the KV of its own ids, bit for bit. What a running sequence committed
  still matches. A refused call changed nothing, and its reason was true. The number of copies is what the formula
  says.
- ``BeamMachine`` does the same. It also lends some of its requests to the device, which advances them by itself.
- ``LoadingMachine`` does it with host memory below: what was evicted comes back.
- ``LossyMachine`` does that too, with a lossy ``tier_dtype``: what comes back has small errors.
- ``EngineMachine`` attacks a cache whose blocks the engine owns: every block is the engine's, resident or to reclaim.
- ``TwoRuns`` plays one tenant on two caches that other tenants use differently, and compares everything that it
  observes. ``TwoLoadingRuns`` does it with host memory below them.
- ``TwoAdapters`` does the same with any system behind an ``Adapter``: an engine's integration, another cache.

An integrator passes a factory, and the machines attack what it makes::

    report = properties.run(PrefixCache, max_examples=500)             # or what wraps or extends one
    report = properties.run_adapter(MyEngineAdapter, max_examples=500) # anything that can match and open
    assert report.ok, report.failure

The modules:

- ``material``: prompts and namespaces.
- ``checked``: checks after each step.
- ``lookups``, ``steps_ahead``, ``machine``: calls on one cache. ``beam_machine``, ``loading_machine``,
  ``lossy_machine``, ``engine_machine``: with beams on the device, with host memory below, with errors there, and where
  the engine owns the blocks.
- ``adapter``, ``two_systems``: the protocol of a system, and the comparison of two.
- ``runner``: the runs.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.audit.properties", "audit")

from radixkv.audit.properties.adapter import (
    Adapter,
    CacheAdapter,
    has_loading,
    has_lossy,
    has_strict_tenants,
    strict_halves,
    strict_system,
)
from radixkv.audit.properties.beam_machine import BeamMachine
from radixkv.audit.properties.engine_machine import EngineMachine
from radixkv.audit.properties.loading_machine import LoadingMachine
from radixkv.audit.properties.lossy_machine import LossyMachine
from radixkv.audit.properties.machine import CacheMachine
from radixkv.audit.properties.material import LAYOUT, NAMESPACES, CacheFactory, Held, Mirror, expect, prompts
from radixkv.audit.properties.runner import PropertyReport, run, run_adapter
from radixkv.audit.properties.two_systems import (
    Observed,
    Player,
    TwoAdapters,
    TwoLoadingRuns,
    TwoRuns,
    TwoSystems,
)

__all__ = [
    "LAYOUT",
    "NAMESPACES",
    "Adapter",
    "BeamMachine",
    "CacheAdapter",
    "CacheFactory",
    "CacheMachine",
    "EngineMachine",
    "Held",
    "LoadingMachine",
    "LossyMachine",
    "Mirror",
    "Observed",
    "Player",
    "PropertyReport",
    "TwoAdapters",
    "TwoLoadingRuns",
    "TwoRuns",
    "TwoSystems",
    "expect",
    "has_loading",
    "has_lossy",
    "has_strict_tenants",
    "prompts",
    "run",
    "run_adapter",
    "strict_halves",
    "strict_system",
]
