"""CacheConfig: what a cache is made with. Frozen, flat, validated when made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from radixkv.errors import ConfigError
from radixkv.namespaces import Tenant
from radixkv.policies import resolve
from radixkv.storage.layout import KVLayout

Scrub = Literal["cross-tenant", "always", "never"]

MAX_BLOCKS = 2**31 - 1
"""Block ids are int32."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of one PrefixCache.

    num_blocks: capacity of the pool, 1 … 2³¹ − 1 blocks.
    block_size: tokens a block, ≥ 1.
    layout: the shape of the KV; None for an engine that owns its KV (index and block ids only).
    device: a torch device, where the storage lives; unused without a layout.
    policy: name of an eviction policy, one instance a tenant: of ``radixkv_policies``, of an entry point of the group
    ``radixkv.policies``, or ``package.module:Class``. A name that isn't built in is imported.
    seed: of whatever a policy draws at random.
    default_tenant: what a tenant that nobody added is held to (its id doesn't matter; no guarantee), or None to
    refuse such tenants.
    scrub: which blocks are zeroed before they are handed out: those that held another tenant's KV
    (``"cross-tenant"``; those of strict tenants as soon as they are freed), all (``"always"``, as soon as they are
    freed), or none (``"never"``; refuses strict tenants). By the storage, or by an engine's ``scrub_blocks``.
    segment_tokens: grain at which a policy may remember what was evicted, rounded down to whole blocks, at least one.
    """

    num_blocks: int
    block_size: int = 16
    layout: KVLayout | None = None
    device: str = "cpu"
    policy: str = "lru"
    seed: int = 0
    segment_tokens: int = 512
    default_tenant: Tenant | None = field(default_factory=lambda: Tenant("default"))
    scrub: Scrub = "cross-tenant"

    @property
    def segment_blocks(self) -> int:
        """Blocks of a segment."""
        return max(self.segment_tokens // self.block_size, 1)

    def __post_init__(self) -> None:
        _require_int("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        _require_int("block_size", self.block_size, 1, 2**20)
        _require_int("seed", self.seed, 0, 2**63 - 1)
        _require_int("segment_tokens", self.segment_tokens, 1, 2**20)
        if self.scrub not in ("cross-tenant", "always", "never"):
            raise ConfigError("scrub", self.scrub, "'cross-tenant', 'always' or 'never'")
        default: object = self.default_tenant
        if default is not None and (not isinstance(default, Tenant) or default.guaranteed_blocks):
            raise ConfigError("default_tenant", default, "a burst Tenant without a guarantee, or None")
        if self.layout is not None and not isinstance(self.layout, KVLayout):
            raise ConfigError("layout", self.layout, "a KVLayout, or None for an engine that owns its KV")
        object.__setattr__(self, "device", str(self.device))
        resolve("policy", self.policy)
        own = None if self.default_tenant is None else self.default_tenant.policy
        if isinstance(own, str):
            resolve("default_tenant.policy", own)


def _require_int(setting: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(setting, value, f"an integer from {low} to {high}")


def policy_names() -> tuple[str, ...]:
    """The names of the policies that are built in."""
    from radixkv_policies import POLICIES

    return tuple(POLICIES)
