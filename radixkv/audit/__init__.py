"""The audit: the laws of a cache, checked on a live one; and the machine that attacks caches with them.

``check(cache)`` raises IntegrityError naming the broken laws, ``inspect(cache)`` reports. Both take one snapshot and
cost time linear in the resident nodes. ``radixkv.audit.properties`` holds the Hypothesis state machine; it is
imported only by who asks for it, because it needs Hypothesis (extra ``audit``).
"""

from __future__ import annotations

from radixkv.audit.invariants import BrokenLaws, Report, Violation, check, inspect

__all__ = ["BrokenLaws", "Report", "Violation", "check", "inspect"]
