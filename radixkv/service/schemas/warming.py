"""Requests to warm prefixes, here or on several replicas, and their jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from radixkv.coordination.settings import REPLICA_ID
from radixkv.service.schemas.base import ReplyBody, Seconds
from radixkv.service.schemas.errors import ErrorDetail
from radixkv.service.schemas.prompts import DayFields, PromptOrder

MAX_NAMED_REPLICAS = 64


def _place_form(value: Any) -> str | None:
    if isinstance(value, list):
        return "names"
    if isinstance(value, int) and not isinstance(value, bool):
        return "count"
    return "place" if value in ("self", "all") else None


ReplicaName = Annotated[str, Field(pattern=f"^{REPLICA_ID}$")]

Where = Annotated[
    Annotated[Literal["self", "all"], Tag("place")]
    | Annotated[int, Field(ge=1, le=1024), Tag("count")]
    | Annotated[list[ReplicaName], Field(min_length=1, max_length=MAX_NAMED_REPLICAS), Tag("names")],
    Discriminator(
        _place_form,
        custom_error_type="where",
        custom_error_message="Input should be 'self', 'all', a number of replicas or a list of their names",
    ),
]


class WarmRequest(DayFields):
    """The prompt to warm, the replicas, and whether to wait."""

    wait: bool = Field(
        True, description="true: answer when the prefix is resident; false: answer 202 with a job"
    )
    replicas: Where = Field(
        "self",
        description="self: the replica that receives the request; all: every live replica; a number: so many, the "
        "best first, and others replace those that fail; a list: these replicas, by name",
    )


class OrderRequest(PromptOrder):
    """The prefix that a replica warms as its part of a job, or keeps in case the owner of the job dies."""

    job: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    left_out: int = Field(0, ge=0)


class ReplicaOutcome(ReplyBody):
    """The state of a warm on one replica."""

    replica: str = Field(description="id of the replica")
    state: Literal["queued", "running", "done", "failed"]
    tokens: int = Field(0, description="tokens that are resident so far")
    cached_before: int = Field(0, description="tokens that were resident before")
    computed: int = Field(0, description="tokens that were computed, once it is done")
    seconds: Seconds = Field(0.0, description="duration of the work")
    error: str | None = Field(None, description="a type of /docs/errors, if the state is failed")


class WarmReply(ReplyBody):
    """A prefix that is resident now: ``tokens`` = ``cached_before`` + ``computed``, in ``blocks`` whole blocks."""

    tokens: int = Field(description="tokens of the prefix that are resident now")
    cached_before: int = Field(description="tokens that were resident before")
    computed: int = Field(description="tokens that this warm computed")
    left_out: int = Field(
        description="tokens at the end of the prompt that are not warmed: after the last stable boundary, or less "
        "than a block"
    )
    blocks: int = Field(description="blocks of the prefix")
    seconds: Seconds = Field(description="time from the request to the end of the warm")


class FleetWarmReply(WarmReply):
    """A warm on several replicas. Its counts are those of the first replica that is done."""

    replicas: list[ReplicaOutcome] = Field(description="the state on each replica")


class JobAccepted(ReplyBody):
    """A warm that continues in the background."""

    job: str = Field(description="id of the job: any replica answers GET /v1/warm/{job}")


class Progress(ReplyBody):
    """Progress in tokens, over all replicas. Tokens that were resident before count as computed."""

    computed: int
    total: int


class JobReply(ReplyBody):
    """A job of the caller."""

    job: str
    state: Literal["queued", "running", "done", "failed"]
    progress: Progress
    replicas: list[ReplicaOutcome]
    result: FleetWarmReply | None = Field(
        description="the result, if at least one replica is done; null before"
    )
    error: ErrorDetail | None = Field(description="the error, if the warm failed on all replicas")
