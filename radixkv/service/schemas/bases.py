"""Published prefixes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from radixkv.service.schemas.base import MAX_NAME, ReplyBody, RequestBody, Seconds
from radixkv.service.schemas.prompts import Adapter, PromptForms

BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$", description="letters, digits and . _ -")]

Readers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_NAME)]],
    Field(max_length=10_000, fail_fast=True, description="tenants that may read it"),
]


class PublishRequest(PromptForms):
    """A prefix for tenants to read: cut where a warm cuts it."""

    id: BaseName
    readers: Readers
    adapter: Adapter | None = None


class ReadersRequest(RequestBody):
    """Who may read a base from now on."""

    readers: Readers


class BaseReply(ReplyBody):
    """A base of this replica."""

    id: str
    readers: list[str]
    adapter: str | None
    tokens: int
    blocks: int
    state: Literal["computing", "readable"]


class BasesReply(ReplyBody):
    """All bases of this replica."""

    bases: list[BaseReply]


class PublishedReply(BaseReply):
    """A base that was just published."""

    computed: int = Field(description="tokens that weren't resident")
    left_out: int = Field(description="tokens behind the last stable boundary and the last whole block")
    seconds: Seconds
