"""What holds for tenants, their counts, and their purges."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from radixkv.config import MAX_PINS, Tenant, require_loaded
from radixkv.errors import ArgumentError
from radixkv.service.schemas.base import ReplyBody, RequestBody


class TenantSettings(RequestBody):
    """What a tenant is promised and held to. A rate or a size that is null, or left out, is what holds for all."""

    weight: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] = Field(
        default=1.0, description="its part, beside others' weights, of what nobody is guaranteed"
    )
    guaranteed_blocks: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="blocks that it can always have"
    )
    max_blocks: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="blocks that it may use at most; null: no limit of its own"
    )
    mode: Literal["burst", "strict"] = Field(
        default="burst",
        description="strict: borrows nothing, and nothing that others do changes what it sees",
    )
    max_pinned_blocks: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="blocks that it may pin; null: as many as it is guaranteed"
    )
    max_pins: Annotated[int, Field(ge=0, le=65_536)] = Field(
        default=MAX_PINS,
        description="pins that it may have on a replica at a time, those of the fleet included",
    )
    policy: Annotated[str, Field(min_length=1, max_length=64, pattern="^[^:]*$")] | None = Field(
        default=None,
        description="name of its eviction policy, built in or registered, not a class; null: the server's",
    )
    fleet_blocks: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None,
        description="blocks that it may use on all replicas together, an equal share on each; null: no limit",
    )
    on_unconfirmed_generation: Literal["serve", "refuse"] = Field(
        default="serve",
        description="what a replica does that can't know whether the tenant was purged, its lease being over",
    )
    requests_per_s: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None, description="requests a second, in the long run"
    )
    burst: Annotated[int, Field(ge=1, le=10**6)] | None = Field(default=None, description="requests at once")
    max_body_bytes: Annotated[int, Field(ge=1, le=2**30)] | None = None

    def tenant(self, name: str, granted_blocks: int | None = None) -> Tenant:
        """The tenant as the cache knows it: held to what is granted here of its quota over the fleet, if it has one.

        One block it always has. Raises ArgumentError for settings that can't go together, and for a policy that isn't
        loaded: none is imported for a name that comes over HTTP or from a keys file.
        """
        if self.policy is not None:
            require_loaded("policy", self.policy)
        whole = Tenant(
            name,
            self.weight,
            self.guaranteed_blocks,
            self.max_blocks,
            self.mode,
            self.max_pinned_blocks,
            self.policy,
            self.max_pins,
        )
        if self.fleet_blocks is not None and self.fleet_blocks < self.guaranteed_blocks:
            allowed = f"at least {self.guaranteed_blocks}, which each replica guarantees, or null"
            raise ArgumentError("fleet_blocks", self.fleet_blocks, allowed)
        if granted_blocks is None:
            return whole
        granted = max(granted_blocks, 1)
        guaranteed = min(self.guaranteed_blocks, granted)
        is_strict = self.mode == "strict"
        limit = None if is_strict else min(self.max_blocks or granted, granted)
        pinned = self.max_pinned_blocks
        if pinned is not None:
            pinned = min(pinned, guaranteed if is_strict else granted)
        return replace(whole, guaranteed_blocks=guaranteed, max_blocks=limit, max_pinned_blocks=pinned)


class TenantStatsReply(ReplyBody):
    """A tenant's own counts: blocks at this moment, tokens and requests since the start."""

    tenant: str
    mode: Literal["burst", "strict"] = Field(
        description="strict: nothing that others do changes these counts"
    )
    used_blocks: int
    resident_blocks: int
    sequence_blocks: int
    evictable_blocks: int
    num_namespaces: int
    requests: int
    hit_tokens: int
    missed_tokens: int
    evicted_blocks: int
    declined_blocks: int
    pinned_blocks: int
    num_pins: int


class OperatorStatsReply(ReplyBody):
    """All tenants' counts and the pool's."""

    cache: dict[str, int]
    tenants: list[TenantStatsReply]


class TenantReply(ReplyBody):
    """A tenant, what holds for it, and how many keys it has."""

    tenant: str
    settings: TenantSettings
    num_keys: int
    granted_blocks: int | None = Field(
        description="this replica's share of fleet_blocks; null without a limit"
    )


class TenantsReply(ReplyBody):
    """All tenants."""

    tenants: list[TenantReply]


class PurgeStateReply(ReplyBody):
    """How far a tenant's last purge has come: which replicas match nothing of before any more."""

    generation: int = Field(description="how often the tenant was purged; grows with each")
    complete: bool = Field(description="every live replica has confirmed")
    confirmed: list[str]
    pending: list[str] = Field(description="live replicas that haven't confirmed yet; ask again")
    unconfirmed: list[str] = Field(
        description="replicas whose lease is over; one that comes back purges first, one that is only cut off still "
        "serves the tenant what it has, unless on_unconfirmed_generation is refuse"
    )


class PurgeReply(PurgeStateReply):
    """What was forgotten here, and how far the purge has come."""

    blocks: int
