"""Bases: prefixes that the operator publishes for tenants to read."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from radixkv.service.schemas.base import MAX_NAME, ReplyBody, RequestBody, Seconds
from radixkv.service.schemas.prompts import Adapter, PromptForms

BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$", description="letters, digits and . _ -")]

Readers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_NAME)]],
    Field(max_length=10_000, fail_fast=True, description="tenants that may read the base"),
]


class PublishRequest(PromptForms):
    """A prefix for tenants to read. It ends where a warm ends, and before a date that the chat template shows."""

    is_dated: ClassVar[bool] = False

    id: BaseName
    readers: Readers
    adapter: Adapter | None = None


class ReadersRequest(RequestBody):
    """The tenants that may read a base from now on."""

    readers: Readers


class BaseReply(ReplyBody):
    """A base of this replica."""

    id: str
    readers: list[str] = Field(description="tenants that may read it")
    adapter: str | None
    tokens: int = Field(description="tokens of the prefix, in whole blocks")
    blocks: int = Field(description="blocks of the prefix")
    state: Literal["computing", "readable"] = Field(description="readable: its readers' matches use it")


class BasesReply(ReplyBody):
    """All bases of this replica."""

    bases: list[BaseReply]


class PublishedReply(BaseReply):
    """A base that this request published."""

    computed: int = Field(description="tokens that were computed, because they were not resident")
    left_out: int = Field(description="tokens at the end of the prompt that are not part of the base")
    seconds: Seconds = Field(description="since the request arrived")
