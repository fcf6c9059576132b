"""Replicas: their state, and the ranking for a prompt."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from radixkv.coordination.routing.costs import MAX_TEMPERATURE, CostName
from radixkv.service.schemas.base import MAX_NAME, ReplyBody, Seconds
from radixkv.service.schemas.prompts import PromptFields


class RouteRequest(PromptFields):
    """A prompt for which replicas are ranked."""

    follows_promises: ClassVar[bool] = True

    cost: CostName | None = Field(None, description="the cost that ranks the replicas; null: the server's")
    temperature: float | None = Field(
        None, ge=0.0, le=MAX_TEMPERATURE, description="0: the best first; above 0: chance has more influence"
    )
    limit: int | None = Field(None, ge=1, description="most candidates in the answer")
    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = Field(
        None,
        description="fingerprint of the model; at a replica also its served name. Required if replicas serve several "
        "models",
    )
    predict: bool = Field(
        True,
        description="true: later rankings assume that the first candidate gets this prompt; if it is the replica that "
        "answers, its disk begins to bring the prompt into host memory. false: a mere question",
    )


class LoadReply(ReplyBody):
    """The load of a replica, as of its last heartbeat."""

    queued_prefill_tokens: int = Field(description="prompt tokens that wait for the model")
    decode_blocks: int = Field(description="blocks of running requests")
    resident_blocks: int = Field(description="blocks that hold cached prefixes")
    queued_cold_tokens: int = Field(
        description="those of queued_prefill_tokens that let a prompt go first of which most is cached"
    )


class CandidateReply(ReplyBody):
    """A replica that the prompt may be sent to. Its load shows only in the order."""

    replica: str = Field(description="id of the replica")
    address: str | None = Field(description="base URL for requests")
    matched_tokens: dict[str, int] = Field(
        description="leading tokens of the prompt by the tier that holds them; predicted: tokens of prompts that were "
        "just sent there"
    )
    why: str = Field(description="the cost that ranked the replica, and the tokens that it holds")


class RouteReply(ReplyBody):
    """Replicas for a prompt, the best first."""

    prompt_tokens: int = Field(description="tokens of the prompt that can be cached")
    model: str = Field(description="fingerprint of the model, or its served name as the request gave it")
    by_load: bool = Field(
        description="true: the store is lost, so only the load ranks the replicas, not what they hold"
    )
    candidates: list[CandidateReply]


class ReplicaReply(ReplyBody):
    """One replica, as the replica that answers sees it."""

    id: str
    is_self: bool = Field(description="whether this replica answers the request")
    live: bool = Field(description="whether its lease has not expired")
    reachable: bool = Field(
        description="whether requests may be sent there: it is live and compatible, its address is proven, and it "
        "doesn't drain"
    )
    draining: bool = Field(description="whether it is about to end: it takes no new requests")
    address: str | None = Field(description="base URL; null: it has none, or the address isn't proven")
    epoch: int = Field(description="grows with each registration of the same id")
    last_seq: int | None = Field(
        description="number of its last log entry; null for tenants, because it counts all tenants' entries"
    )
    lease_remaining_s: Seconds = Field(description="until its lease expires, unless it renews it")
    lag_entries: int | None = Field(
        description="entries of its log that the view is known to lack; null: not followed, and for tenants"
    )
    lag_s: Seconds | None = Field(description="how long the view has lacked entries; null as lag_entries")
    staleness_s: Seconds | None = Field(description="since its registration and load were last read")
    load: LoadReply | None = Field(description="null for tenants, because it is all tenants' load")
    model: str = Field(description="fingerprint of model, tokenizer and block size")
    weights: int = Field(description="version of its weights, as of its last heartbeat")
    block_size: int = Field(description="tokens in a block")
    incompatible: str | None = Field(description="why it can't be used from here; null: it can")


class ReplicasReply(ReplyBody):
    """This replica and the live ones that it knows. With ``all=true`` also those whose lease has expired."""

    replicas: list[ReplicaReply]


class HealthReply(ReplyBody):
    """Whether the process is healthy, or ready, and the reasons if not."""

    status: Literal["ok", "unhealthy", "not_ready"]
    reasons: list[str] = Field(description="empty if the status is ok")
    warnings: list[str] = Field(
        description="what an operator should look at, although the process may serve: the keys file is not wholly in "
        "force, or a disk can't be used"
    )
    coordination: str = Field(
        description="ok, or the problem: unavailable (the store is lost, local work continues), fenced, …"
    )
