"""What every answer looks like that is not a success."""

from __future__ import annotations

from typing import Any

from radixkv.service.schemas.base import ReplyBody


class ErrorDetail(ReplyBody):
    """What was wrong."""

    type: str
    message: str
    field: str | None
    value: Any
    allowed: str | None


class ErrorReply(ReplyBody):
    """Every answer that is not a success."""

    error: ErrorDetail
