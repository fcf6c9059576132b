"""The audit checks the laws (invariants) of a live cache, and attacks caches and servers with machines and probes.

``check(cache)`` raises IntegrityError, which names the broken laws. ``inspect(cache)`` returns a report. Both take
one snapshot in slices, and requests continue between slices. The cost is linear in the resident nodes.
``Watch(cache)`` does the same in the background, within a budget.

Modules that need more than NumPy (extra ``audit``) are imported on their own:

- ``radixkv.audit.properties``: Hypothesis state machines, also for other systems than this cache.
- ``radixkv.audit.inprocess`` and ``radixkv.audit.remote``: the two audits behind ``radixkv audit run``.
- ``radixkv.audit.page``: their report as HTML.
"""

from __future__ import annotations

from radixkv.audit.background import Watch
from radixkv.audit.invariants import BrokenLaws, Report, Violation, check, inspect

__all__ = ["BrokenLaws", "Report", "Violation", "Watch", "check", "inspect"]
