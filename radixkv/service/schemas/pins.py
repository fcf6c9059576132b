"""Pins of a replica, and of the fleet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from radixkv.index.pins import MAX_TTL_S
from radixkv.service.schemas.base import ReplyBody, Seconds
from radixkv.service.schemas.prompts import PromptFields, PromptOrder
from radixkv.service.schemas.warming import Where


class PinRequest(PromptFields):
    """What to pin, and for how long."""

    ttl_s: float = Field(gt=0.0, le=MAX_TTL_S, description="seconds until the pin ends by itself")
    replicas: Where = Field(
        "self",
        description="self: the one that is asked, where it is resident already; all: every one, also those that "
        "join; a number: so many, with others in the place of those that are gone; a list: these. All but self "
        "compute it first",
    )
    wait: bool = Field(True, description="false: answer before the replicas have it; no difference for self")


class PinOrder(PromptOrder):
    """What a replica is to keep resident as its part of a pin of the fleet."""

    pin: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class PinPart(ReplyBody):
    """What became of a pin of the fleet on one replica: it holds where it is done."""

    replica: str
    state: Literal["queued", "running", "done", "failed"]
    error: str | None = None


class PinReply(ReplyBody):
    """A pin of the caller's: a prefix of ``tokens`` tokens in ``blocks`` blocks, for ``ttl_s`` more seconds."""

    id: str
    salt: str | None = Field(description="null: not known on a replica that doesn't keep it")
    adapter: str | None
    tokens: int
    blocks: int
    ttl_s: Seconds
    replicas: list[PinPart] | None = Field(
        None, description="of a pin of several replicas; null: this one's own"
    )


class PinsReply(ReplyBody):
    """The caller's pins on this replica, and those of the fleet: a part of them where there are many."""

    pins: list[PinReply]
