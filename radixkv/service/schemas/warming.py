"""Warming prefixes, here or on several replicas, and the jobs that do it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from radixkv.coordination.settings import REPLICA_ID
from radixkv.service.schemas.base import ReplyBody, Seconds
from radixkv.service.schemas.errors import ErrorDetail
from radixkv.service.schemas.prompts import PromptFields, PromptOrder

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


class WarmRequest(PromptFields):
    """What to warm, where, and whether to wait for it."""

    wait: bool = Field(True, description="false: answer 202 with a job at once")
    replicas: Where = Field(
        "self",
        description="self: the one that is asked; all: every live one; a number: so many, the best first, and others "
        "in the place of those that fail; a list: these, by name",
    )


class OrderRequest(PromptOrder):
    """What a replica is to warm as its part of a job, or to know in case the one that sees to the job dies."""

    job: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    left_out: int = Field(0, ge=0)


class ReplicaOutcome(ReplyBody):
    """What became of a warm on one replica, or how far it has come there."""

    replica: str
    state: Literal["queued", "running", "done", "failed"]
    tokens: int = 0
    cached_before: int = 0
    computed: int = 0
    seconds: Seconds = 0.0
    error: str | None = None


class WarmReply(ReplyBody):
    """A prefix that is resident now: ``tokens`` = ``cached_before`` + ``computed``, in ``blocks`` whole blocks."""

    tokens: int
    cached_before: int
    computed: int
    left_out: int = Field(
        description="tokens of the prompt behind the last stable boundary and the last whole block"
    )
    blocks: int
    seconds: Seconds


class FleetWarmReply(WarmReply):
    """A warm that was asked for on several replicas; its counts are those of the first that is done."""

    replicas: list[ReplicaOutcome]


class JobAccepted(ReplyBody):
    """A warm that goes on in the background."""

    job: str = Field(description="what to ask any replica for, at /v1/warm/{job}")


class Progress(ReplyBody):
    """How far a warm is, in tokens of all replicas; those that were resident before count as computed."""

    computed: int
    total: int


class JobReply(ReplyBody):
    """A job of the caller's."""

    job: str
    state: Literal["queued", "running", "done", "failed"]
    progress: Progress
    replicas: list[ReplicaOutcome]
    result: FleetWarmReply | None = Field(description="once it is done: on one replica at least")
    error: ErrorDetail | None = Field(description="if it failed on all")
