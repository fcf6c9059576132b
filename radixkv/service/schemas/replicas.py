"""Replicas: their standing, and where a prompt is best sent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from radixkv.coordination.routing.costs import MAX_TEMPERATURE, CostName
from radixkv.service.schemas.base import MAX_NAME, ReplyBody, Seconds
from radixkv.service.schemas.prompts import PromptFields


class RouteRequest(PromptFields):
    """A prompt that is to be sent to a replica."""

    cost: CostName | None = Field(None, description="what ranks the replicas; null: the server's")
    temperature: float | None = Field(
        None, ge=0.0, le=MAX_TEMPERATURE, description="0: the best first; above, by chance"
    )
    limit: int | None = Field(None, ge=1, description="most candidates in the answer")
    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = Field(
        None, description="fingerprint, or the served name at a replica; needed where replicas serve several"
    )
    predict: bool = Field(True, description="false: the prompt won't be sent, so don't count on it")


class LoadReply(ReplyBody):
    """What a replica has to do; absolute, as of its last beat."""

    queued_prefill_tokens: int
    decode_blocks: int
    resident_blocks: int


class CandidateReply(ReplyBody):
    """A replica that the prompt may be sent to. What others make it do shows in the order at most."""

    replica: str
    address: str | None
    matched_tokens: dict[str, int] = Field(
        description="leading tokens by the tier that holds them; predicted: just sent there"
    )
    why: str = Field(description="the cost that ranked it, and what it holds")


class RouteReply(ReplyBody):
    """Replicas for a prompt, best first. ``by_load``: the store is lost, and what they hold isn't known."""

    prompt_tokens: int
    model: str
    by_load: bool
    candidates: list[CandidateReply]


class ReplicaReply(ReplyBody):
    """One replica as this one sees it."""

    id: str
    is_self: bool
    live: bool
    reachable: bool = Field(description="live, its address proven, compatible: requests may be sent there")
    address: str | None
    epoch: int = Field(description="grows with each registration of the same id")
    last_seq: int | None = Field(
        description="number of its last entry; null for tenants, as it counts everybody's"
    )
    lease_remaining_s: Seconds
    lag_entries: int | None = Field(
        description="entries of its log that the view is known to lack; null: not followed, and for tenants"
    )
    lag_s: Seconds | None = Field(description="how long the view has lacked any; null with lag_entries")
    staleness_s: Seconds | None = Field(description="since its registration and load were last heard")
    load: LoadReply | None = Field(description="null for tenants, as it is everybody's")
    model: str = Field(description="fingerprint")
    block_size: int
    incompatible: str | None


class ReplicasReply(ReplyBody):
    """This replica and the live ones that it sees; with ``all=true`` those whose lease ran out, too."""

    replicas: list[ReplicaReply]


class HealthReply(ReplyBody):
    """Whether the process is well, or ready, and why not."""

    status: Literal["ok", "unhealthy", "not_ready"]
    reasons: list[str]
    coordination: str = Field(
        description="ok, or what is wrong: unavailable (the store is lost, everything local goes on), fenced, …"
    )
