"""Eviction policies: one algorithm a file. Each docstring names the paper and the differences from it.

``POLICIES`` maps the name in a configuration to the class. To add a policy, see ``policies/README.md``.
"""

from __future__ import annotations

from radixkv_policies.arc import ARC
from radixkv_policies.auto import Auto
from radixkv_policies.doorkeeper import Doorkeeper
from radixkv_policies.fifo import FIFO
from radixkv_policies.gdsf import GDSF, LLAMA_8B, PrefillProfile
from radixkv_policies.hints import RequestHints, TokenRange
from radixkv_policies.learned import Learned
from radixkv_policies.lfu import LFU
from radixkv_policies.lrfu import LRFU
from radixkv_policies.lru import LRU
from radixkv_policies.policy import Clock, GhostKeys, Handle, Policy
from radixkv_policies.prefix_first import PrefixFirst
from radixkv_policies.priority import Priority
from radixkv_policies.s3fifo import S3FIFO
from radixkv_policies.sieve import SIEVE
from radixkv_policies.slru import SLRU
from radixkv_policies.survival import Survival
from radixkv_policies.tail_lru import TailLRU

POLICIES: dict[str, type[Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "lrfu": LRFU,
    "survival": Survival,
    "arc": ARC,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "sieve": SIEVE,
    "gdsf": GDSF,
    "tail_lru": TailLRU,
    "priority": Priority,
    "prefix_first": PrefixFirst,
    "doorkeeper": Doorkeeper,
    "learned": Learned,
    "auto": Auto,
}

__all__ = [
    "ARC",
    "Auto",
    "FIFO",
    "GDSF",
    "LFU",
    "Learned",
    "LLAMA_8B",
    "LRFU",
    "LRU",
    "POLICIES",
    "Clock",
    "Doorkeeper",
    "GhostKeys",
    "Handle",
    "Policy",
    "PrefillProfile",
    "PrefixFirst",
    "Priority",
    "RequestHints",
    "S3FIFO",
    "SIEVE",
    "SLRU",
    "Survival",
    "TailLRU",
    "TokenRange",
]
