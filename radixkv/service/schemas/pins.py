"""Pins of one replica, and of the fleet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from radixkv.index.pins import MAX_TTL_S
from radixkv.service.schemas.base import ReplyBody, RequestBody, Seconds
from radixkv.service.schemas.prompts import DayFields, PromptOrder
from radixkv.service.schemas.warming import Where


class PinRequest(DayFields):
    """The prefix to pin, the time, and the replicas."""

    ttl_s: float = Field(gt=0.0, le=MAX_TTL_S, description="seconds until the pin ends by itself")
    replicas: Where = Field(
        "self",
        description="self: the replica that receives the request, if the prefix is resident there; all: every "
        "replica, also those that join later; a number: so many, and others replace those that leave; a list: these "
        "replicas. Except for self, a replica computes the prefix if it lacks it",
    )
    wait: bool = Field(
        True, description="false: answer before the replicas have computed it; no effect for self"
    )


MAX_CONTENT_CHARS = 2**20
_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class PinContentOrder(RequestBody):
    """What a pin of its own name has beside its prefix: see ``fleet.pins.PinContent``."""

    nonce: _Hex
    about: Annotated[str, Field(max_length=MAX_CONTENT_CHARS)]
    chat: Annotated[str, Field(max_length=MAX_CONTENT_CHARS)]


class PinOrder(PromptOrder):
    """The prefix that a replica keeps resident as its part of a pin of the fleet."""

    pin: _Hex
    content: PinContentOrder | None = None
    date: Annotated[str, Field(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$")] = ""
    """That the model's chat template showed in the prefix; empty: none."""


class PinPart(ReplyBody):
    """The state of a pin of the fleet on one replica. The prefix is resident there if the state is done."""

    replica: str
    state: Literal["queued", "running", "done", "failed"]
    error: str | None = Field(None, description="a type of /docs/errors, if the state is failed")


class PinReply(ReplyBody):
    """A pin of the caller: a prefix of ``tokens`` tokens in ``blocks`` blocks, for ``ttl_s`` more seconds."""

    id: str = Field(description="id of the pin, for DELETE /v1/pins/{pin}")
    salt: str | None = Field(
        description="null: this replica doesn't hold the prefix, so it doesn't know the salt"
    )
    adapter: str | None
    tokens: int
    blocks: int
    ttl_s: Seconds
    replicas: list[PinPart] | None = Field(
        None, description="state on each replica, for a pin of the fleet; null: a pin of this replica alone"
    )


class PinsReply(ReplyBody):
    """The caller's pins on this replica and in the fleet. If there are many, only one page of them."""

    pins: list[PinReply]
