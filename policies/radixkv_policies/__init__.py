"""Eviction policies: one algorithm a file, its paper and its departures in the docstring.

``POLICIES`` maps the name that a configuration gives to the class. To add one, see ``policies/README.md``.
"""

from __future__ import annotations

from radixkv_policies.lfu import LFU
from radixkv_policies.lru import LRU
from radixkv_policies.policy import Clock, Handle, Policy

POLICIES: dict[str, type[Policy]] = {"lru": LRU, "lfu": LFU}

__all__ = ["LFU", "LRU", "POLICIES", "Clock", "Handle", "Policy"]
