"""Replies about keys. Only the reply to a creation or a rotation has the key itself."""

from __future__ import annotations

from pydantic import Field

from radixkv.service.schemas.base import ReplyBody


class KeyReply(ReplyBody):
    """A key's record, without the key itself."""

    id: str = Field(description="id of the key in /v1/keys/{key}")
    tenant: str | None = Field(description="the tenant that it belongs to; null: the operator")
    prefix: str | None = Field(
        description="the first characters of the key, if they are known; for a key shorter than 32 characters also 6 "
        "digits of its id"
    )
    created: str | None = Field(description="time of its creation (UTC), if it is known")


class KeysReply(ReplyBody):
    """All keys."""

    keys: list[KeyReply]


class NewKeyReply(KeyReply):
    """A new key. It is shown only in this reply."""

    key: str = Field(description="the key: send it as `Authorization: Bearer KEY`")
