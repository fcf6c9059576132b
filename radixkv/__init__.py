"""radixkv: a prefix cache for LLM serving.

A radix tree for each tenant namespace maps token-id prefixes to reference-counted KV blocks; sequences fork
by copy-on-write. Importing this package needs NumPy and xxhash: storage, engines, coordination, the service and the
audit are loaded when they are used.

    from radixkv import CacheConfig, Namespace, PrefixCache

    cache = PrefixCache(CacheConfig(num_blocks=4096))
    with cache.open(Namespace(tenant="acme", model="llama"), prompt_ids) as seq:
        ...  # compute the KV of tokens [seq.num_cached_tokens, seq.num_tokens) into seq.block_table
        seq.commit(seq.num_tokens)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from radixkv._compiled import prefer_compiled

COMPILED: Final = prefer_compiled(__path__)
"""Whether the index runs compiled, or as pure Python."""

from radixkv.config import CacheConfig, KVLayout, Namespace, Tenant
from radixkv.errors import (
    AnnouncementLimitExceeded,
    ArgumentError,
    CapacityError,
    ClosedByFork,
    ConfigError,
    CoordinationError,
    FlushRequired,
    IntegrityError,
    KernelError,
    LeaseError,
    NamespaceError,
    NotResident,
    OutOfBlocks,
    PinBudgetExceeded,
    PinLimitExceeded,
    QuotaExceeded,
    RadixKVError,
    ReentrantCall,
    SequenceLent,
    StaleEpoch,
    StaleGeneration,
    StoreUnavailable,
    TokenError,
)
from radixkv.index.announcements import Announcement
from radixkv.index.below import Loading
from radixkv.index.cache import PrefixCache, RequestHints, TokenRange
from radixkv.index.changes import Journal
from radixkv.index.engine_blocks import Inserted
from radixkv.index.fences import Fence
from radixkv.index.key_material import Material, key_of
from radixkv.index.leases import Lease
from radixkv.index.lent_beams import LentBeams
from radixkv.index.match import End, Match
from radixkv.index.pins import Pin
from radixkv.index.sequence import Sequence
from radixkv.index.sessions import Session
from radixkv.index.stats import CacheStats, TenantStats
from radixkv.index.tenants import TenantBlocks
from radixkv.storage.plan import BeamsState, StepPlan

if TYPE_CHECKING:
    from radixkv import audit as audit

__version__ = "0.1.0"

__all__ = [
    "COMPILED",
    "Announcement",
    "AnnouncementLimitExceeded",
    "ArgumentError",
    "BeamsState",
    "CacheConfig",
    "CacheStats",
    "CapacityError",
    "ClosedByFork",
    "ConfigError",
    "CoordinationError",
    "End",
    "Fence",
    "FlushRequired",
    "Inserted",
    "IntegrityError",
    "Journal",
    "KVLayout",
    "KernelError",
    "Lease",
    "LeaseError",
    "LentBeams",
    "Loading",
    "Match",
    "Material",
    "Namespace",
    "NamespaceError",
    "NotResident",
    "OutOfBlocks",
    "Pin",
    "PinBudgetExceeded",
    "PinLimitExceeded",
    "PrefixCache",
    "QuotaExceeded",
    "RadixKVError",
    "ReentrantCall",
    "RequestHints",
    "Sequence",
    "SequenceLent",
    "Session",
    "StaleEpoch",
    "StaleGeneration",
    "StepPlan",
    "StoreUnavailable",
    "Tenant",
    "TenantBlocks",
    "TenantStats",
    "TokenError",
    "TokenRange",
    "audit",
    "key_of",
]


_MOVED = {
    "cache": "radixkv.index.cache",
    "metrics": "radixkv.service.metrics",
    "namespaces": "radixkv.config",
    "plan": "radixkv.storage.plan",
    "policies": "radixkv.config",
    "types": "radixkv.index",
}
"""Modules that stood here before, and where their content is."""

_REMOVED = {"PendingError": "PrefixCache.open(ahead=True)"}
"""Public names that stood here before, and what replaces them."""


def __getattr__(name: str) -> Any:
    """``radixkv.audit`` and the other packages are imported when first named."""
    if name in {"audit", "bench", "coordination", "engines", "service", "storage", "tokenizer"}:
        return import_module(f"radixkv.{name}")
    if name in _REMOVED:  # "from radixkv import" would drop the text of an AttributeError
        raise ImportError(f"radixkv.{name} was removed: use {_REMOVED[name]}", name=name)
    where = f"; it moved to {_MOVED[name]}" if name in _MOVED else ""
    raise AttributeError(f"module 'radixkv' has no attribute {name!r}{where}")
