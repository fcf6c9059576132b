"""Usage by hour, tenant, key, model and kind of request."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from radixkv.service.schemas.base import ReplyBody, Seconds


class UsageCounts(ReplyBody):
    """Tokens of some requests. Read, written and uncached tokens add up to the prompts."""

    requests: int
    read_tokens: int = Field(description="prompt tokens that were read from the cache")
    read_host_tokens: int = Field(description="those of read_tokens that came back from host memory")
    read_disk_tokens: int = Field(description="those of read_tokens that came back from the disk")
    written_tokens: dict[str, int] = Field(
        description="by TTL in seconds: prompt tokens that were computed, and promised to stay that long"
    )
    uncached_tokens: int = Field(description="other prompt tokens that were computed")
    generated_tokens: int
    held_token_s: Seconds = Field(
        description="resident tokens, times the seconds that they were. In burst mode other tenants may evict them"
    )
    pinned_token_s: Seconds = Field(description="those of held_token_s that pins and promises kept")


class UsageRow(UsageCounts):
    """Usage of one hour."""

    hour: str = Field(description="when the hour began, UTC")
    tenant: str | None = Field(description="null: the operator, for bases")
    key: str | None = Field(description="id of the key, as in /v1/keys; null: no key, as for what is held")
    model: str
    kind: Literal["completion", "warm", "pin", "base", "held", "removed"] = Field(
        description="pin: what a pin read, or wrote if it is of the fleet; held: what the tenant kept resident; "
        "removed: the tenant was removed, and a later one of its name doesn't see earlier rows"
    )


class UsageReply(ReplyBody):
    """Rows in the order of their hours, and the sum of all rows, also of those on other pages."""

    mode: Literal["burst", "strict"] | None = Field(
        description="the caller's. burst: what others evict isn't read later, but computed; strict: others change "
        "nothing. null: the operator asks"
    )
    rows: list[UsageRow]
    total: UsageCounts
