"""Settings of tenants, their statistics, and their purges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from radixkv.config import MAX_PINS, NO_OWN_DTYPE, Tenant, require_loaded
from radixkv.errors import ArgumentError
from radixkv.service.schemas.base import ReplyBody, RequestBody
from radixkv.tiers.usefulness import Reason, Worth


class TenantSettings(RequestBody):
    """Guarantees and limits of a tenant. A rate or a size that is null or left out has the server's value."""

    removed: ClassVar[Mapping[str, str]] = {"tier_dtype": NO_OWN_DTYPE}

    weight: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] = Field(
        default=1.0,
        description="share of the blocks that no tenant is guaranteed, relative to other tenants' weights",
    )
    guaranteed_blocks: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="blocks that the tenant can always have"
    )
    max_blocks: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="most blocks that the tenant may use; null: no limit"
    )
    mode: Literal["burst", "strict"] = Field(
        default="burst",
        description="burst: borrows idle blocks; strict: borrows nothing, others change nothing that it sees, and it "
        "has no disk",
    )
    max_pinned_blocks: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None,
        description="most blocks that the tenant may pin, fewer than it may use; null: as many as it is guaranteed, "
        "and in burst mode at least its part of a quarter of the pool. An eighth of what it can have stays free for "
        "its requests",
    )
    max_pins: Annotated[int, Field(ge=0, le=65_536)] = Field(
        default=MAX_PINS,
        description="most pins of the tenant on a replica at a time, those of the fleet included",
    )
    policy: Annotated[str, Field(min_length=1, max_length=64, pattern="^[^:]*$")] | None = Field(
        default=None,
        description="name of the tenant's eviction policy, built in or registered, not a class; null: the server's",
    )
    fleet_blocks: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None,
        description="most blocks of the tenant on all replicas together, an equal share on each; null: no limit",
    )
    on_unconfirmed_generation: Literal["serve", "refuse"] = Field(
        default="serve",
        description="what a replica does while its own lease has expired, so that it can't know whether the tenant was "
        "purged",
    )
    requests_per_s: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None, description="requests a second, on average"
    )
    burst: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        default=None, description="most requests at once"
    )
    max_body_bytes: Annotated[int, Field(ge=1, le=2**30)] | None = Field(
        default=None, description="most bytes of a body"
    )

    def tenant(self, name: str, granted_blocks: int | None = None, pin_share: int = 0) -> Tenant:
        """Return the tenant for the cache. If it has a quota over the fleet, its limit is the share granted here.

        ``pin_share``: blocks that it may pin at least, if the settings don't say.

        The share is at least one block. Raises ArgumentError for settings that contradict each other, and for a policy
        that isn't loaded: a name from HTTP or a keys file imports nothing.
        """
        if self.policy is not None:
            require_loaded("policy", self.policy)
        whole = Tenant(
            name,
            self.weight,
            self.guaranteed_blocks,
            self.max_blocks,
            self.mode,
            self._pinned_blocks(pin_share),
            self.policy,
            self.max_pins,
        )
        if whole.max_pinned_blocks and whole.limit is not None and whole.max_pinned_blocks >= whole.limit:
            allowed = f"at most {whole.limit - 1}: pins on all {whole.limit} blocks would leave none to its requests"
            raise ArgumentError("max_pinned_blocks", whole.max_pinned_blocks, allowed)
        if self.fleet_blocks is not None and self.fleet_blocks < self.guaranteed_blocks:
            allowed = f"at least {self.guaranteed_blocks}, which each replica guarantees, or null"
            raise ArgumentError("fleet_blocks", self.fleet_blocks, allowed)
        if granted_blocks is None:
            return whole
        granted = max(granted_blocks, 1)
        guaranteed = min(self.guaranteed_blocks, granted)
        is_strict = self.mode == "strict"
        limit = None if is_strict else min(self.max_blocks or granted, granted)
        pinned = whole.max_pinned_blocks
        if pinned is not None:
            pinned = min(pinned, guaranteed if is_strict else granted)
        return replace(whole, guaranteed_blocks=guaranteed, max_blocks=limit, max_pinned_blocks=pinned)

    def _pinned_blocks(self, pin_share: int) -> int | None:
        """Return the most blocks to pin; None for as many as are guaranteed."""
        if self.max_pinned_blocks is not None or self.mode == "strict":
            return self.max_pinned_blocks
        most = pin_share if self.max_blocks is None else min(pin_share, self.max_blocks - 1)
        return most if most > self.guaranteed_blocks else None


class TenantStatsReply(ReplyBody):
    """A tenant's own statistics: blocks now, tokens and requests since the start."""

    tenant: str
    mode: Literal["burst", "strict"] = Field(description="strict: other tenants don't change these numbers")
    used_blocks: int = Field(description="blocks that count against the tenant's limit")
    resident_blocks: int = Field(description="blocks of cached prefixes")
    sequence_blocks: int = Field(description="blocks of running requests")
    evictable_blocks: int = Field(description="cached blocks that no lease protects")
    num_namespaces: int
    requests: int
    hit_tokens: int = Field(
        description="prompt tokens that were found in the cache, or came back from the tiers below it"
    )
    missed_tokens: int = Field(description="prompt tokens that were not found")
    evicted_blocks: int = Field(description="blocks that were evicted")
    declined_blocks: int = Field(description="blocks that the policy refused to keep")
    failed_policies: int = Field(
        description="policies of the tenant that raised an error and were replaced by lru"
    )
    pinned_blocks: int
    num_pins: int


class UsageLogReply(ReplyBody):
    """State of the usage records' folder since the start."""

    written: int = Field(description="records in files")
    durable: int = Field(description="those of them that were synced: a crash of the machine leaves them")
    waiting: int = Field(description="records that wait to be written")
    lost: int = Field(description="records that were never written, because too many waited for the disk")
    errors: int = Field(description="failed writes and syncs")
    skipped: int = Field(description="lines found at the start that were no records, as a crash leaves one")
    problem: str | None = Field(description="why records can't be written now; null: they can")


class PromptRuleReply(ReplyBody):
    """A rule for lines of conversations that change."""

    name: str
    starts_with: str = Field(description="the text with which such a line begins")
    role: str = Field(description="whose turns are looked through")
    lines: str = Field(description="first: the first line of each block of text; all: every line")
    do: str = Field(
        description="drop: the model doesn't see the line; move: it is at the end of the user's last turn"
    )
    uses: int = Field(description="conversations that it has changed in this process")


class TierVerdictReply(ReplyBody):
    """Whether a tier below the cache is worth what it costs."""

    worth: Worth = Field(description="too early: it has had too little time, or too little was written")
    reason: Reason | None = Field(description="why it is useless; else null")
    text: str = Field(description="what it brought, or why it is useless and what to do, for people")


class OperatorStatsReply(ReplyBody):
    """Statistics of all tenants, and of the cache as a whole."""

    cache: dict[str, int]
    tenants: list[TenantStatsReply]
    usage_log: UsageLogReply | None = Field(description="null: no usage records are written")
    tiers: dict[str, dict[str, int | float]] = Field(
        description="counts by tier below the cache, as in the metrics; empty without one"
    )
    tier_verdicts: dict[str, TierVerdictReply] = Field(
        description="by tier, whether it was useful in the last 12 to 24 hours"
    )
    prompt_rules: list[PromptRuleReply]


class TenantReply(ReplyBody):
    """A tenant, its settings, and the number of its keys."""

    tenant: str
    settings: TenantSettings
    num_keys: int
    granted_blocks: int | None = Field(
        description="this replica's share of fleet_blocks; null without a limit"
    )
    pending: str | None = Field(
        description="why not all that the keys file says of the tenant is in force on this replica, which tries again "
        "every second; null: all is. `settings` are those in force here"
    )


class UnservedTenantReply(ReplyBody):
    """A tenant of the keys file that this replica doesn't serve."""

    tenant: str
    pending: str = Field(description="why; this replica tries again every second")


class TenantsReply(ReplyBody):
    """All tenants."""

    tenants: list[TenantReply]
    unserved: list[UnservedTenantReply] = Field(
        description="new tenants whose settings this replica can't keep or read yet. Their requests get 503 here"
    )


class PurgeStateReply(ReplyBody):
    """Progress of a tenant's last purge: a confirmed replica has nothing from before it, in no tier."""

    generation: int = Field(description="grows with each purge of the tenant")
    complete: bool = Field(description="whether every live replica has confirmed")
    confirmed: list[str] = Field(description="replicas that have purged the tenant")
    pending: list[str] = Field(description="live replicas that have not confirmed yet; look again later")
    unconfirmed: list[str] = Field(
        description="replicas whose lease has expired. One that comes back purges first. One that is only cut off "
        "from the store still serves the tenant from its cache, unless on_unconfirmed_generation is refuse"
    )
    owed: bool = Field(
        description="whether this replica's disk may still have records of the tenant. It serves none of them, and "
        "goes on destroying them"
    )


class PurgeReply(PurgeStateReply):
    """The blocks that this replica freed, and the progress of the purge."""

    blocks: int = Field(description="blocks that this replica freed")
