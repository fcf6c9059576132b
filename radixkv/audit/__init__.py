"""The audit: the laws of a cache, checked on a live one; machines and probes that attack caches and servers.

``check(cache)`` raises IntegrityError naming the broken laws, ``inspect(cache)`` reports; both take one snapshot, in
slices between which requests go on, and cost time linear in the resident nodes. ``Watch(cache)`` does so in the
background within a budget.

What needs more than NumPy is imported only by who asks for it (extra ``audit``): ``radixkv.audit.properties``, the
Hypothesis state machines, also for other systems than this cache; ``radixkv.audit.inprocess`` and
``radixkv.audit.remote``, what ``radixkv audit run`` does; ``radixkv.audit.page``, its report.
"""

from __future__ import annotations

from radixkv.audit.background import Watch
from radixkv.audit.invariants import BrokenLaws, Report, Violation, check, inspect

__all__ = ["BrokenLaws", "Report", "Violation", "Watch", "check", "inspect"]
