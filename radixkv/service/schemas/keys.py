"""Keys, without the keys."""

from __future__ import annotations

from pydantic import Field

from radixkv.service.schemas.base import ReplyBody


class KeyReply(ReplyBody):
    """A key, without the key."""

    id: str = Field(description="what it is called in /v1/keys/{key}")
    tenant: str | None = Field(description="whose it is; null: the operator's")
    prefix: str | None = Field(
        description="how it begins, if that is known; of a key shorter than 32 characters also 6 digits of its id"
    )
    created: str | None = Field(description="when it was made, if that is known")


class KeysReply(ReplyBody):
    """All keys."""

    keys: list[KeyReply]


class NewKeyReply(KeyReply):
    """A key that was just made: the only time that it is shown."""

    key: str
