"""``GET /v1/usage``: a tenant's own sums, or all tenants' for the operator.

Sums are made in a thread: a tenant may have many rows. A tenant's answer takes its own rows only, so neither its
content nor its size depends on others.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlencode

from starlette.responses import Response

from radixkv.metering.records import Counts
from radixkv.metering.sums import Sum, total
from radixkv.service.endpoint import Call, Endpoint, reply
from radixkv.service.problems import ApiError, invalid
from radixkv.service.schemas.tenants import TenantSettings
from radixkv.service.schemas.usage import UsageCounts, UsageReply, UsageRow

if TYPE_CHECKING:
    from radixkv.metering.meter import Meter
    from radixkv.service.core import Service

MAX_ROWS: Final = 1_000
"""Most rows in one answer."""
_LIMIT = re.compile(r"[1-9][0-9]{0,3}")
_PAGE = re.compile(r"([0-9]{1,12})-([0-9a-f]{16})")
_SECONDS = re.compile(r"[0-9]{1,11}")
_TIME_ALLOWED = "a time such as 2026-01-31T09:00:00Z, or Unix seconds"
_MAX_TIME_CHARS = 40


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a query asks for. ``after``: the hour and the place of the last row of the page before."""

    start_s: float
    end_s: float
    limit: int
    after: tuple[int, str] | None
    tenant: str | None


async def usage(call: Call[Service]) -> Response:
    """Return the caller's own usage on this replica by hour, key, model and kind; for the operator that of all tenants.

    A request counts in the hour in which it ended. An answer has at most `limit` rows. If there are more, the header
    `Link` has the address of the next page.
    """
    assert call.principal is not None
    tenant = call.principal.tenant
    query = call.query("from", "to", "limit", "page", "tenant")
    if tenant is not None and "tenant" in query:
        message = "the parameter tenant needs the operator's key"
        raise ApiError(403, "forbidden", message, field="authorization")
    wanted = _Wanted(
        _time(query, "from", 0.0),
        _time(query, "to", math.inf),
        _limit(query.get("limit")),
        _after(query.get("page")),
        query.get("tenant"),
    )
    settings = None if tenant is None else call.host.keyring.settings.get(tenant, TenantSettings())
    mode = None if settings is None else settings.mode
    answer = partial(_answer, call.host.meter, tenant, wanted, mode)
    found, page = await (
        call.host.threads.administer(answer) if tenant is None else call.host.threads.run(tenant, answer)
    )
    response = reply(found)
    if page is not None:
        following = urlencode({**query, "page": page})
        response.headers["link"] = f'</v1/usage?{following}>; rel="next"'
    return response


def _answer(
    meter: Meter, tenant: str | None, wanted: _Wanted, mode: Literal["burst", "strict"] | None
) -> tuple[UsageReply, str | None]:
    """Return the reply, and the next page if there is one. In a thread."""
    if tenant is None:
        sums = meter.all(wanted.tenant, wanted.start_s, wanted.end_s)
    else:
        sums = meter.of(tenant, wanted.start_s, wanted.end_s)
    left = [each for each in sums if wanted.after is None or (each.row.hour, each.place) > wanted.after]
    rows = left[: wanted.limit]
    shown, summed = [_shown(each) for each in rows], UsageCounts(**_counts(total(sums)))
    found = UsageReply(mode=mode, rows=shown, total=summed)
    return found, rows[-1].place if len(left) > wanted.limit else None


def _shown(each: Sum) -> UsageRow:
    row = each.row
    return UsageRow(
        hour=f"{datetime.fromtimestamp(row.hour, UTC):%Y-%m-%dT%H:%M:%SZ}",
        tenant=row.tenant or None,
        key=row.key or None,
        model=row.model,
        kind=row.kind,
        **_counts(each.counts),
    )


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        "requests": counts.requests,
        "read_tokens": counts.read,
        "read_host_tokens": counts.read_host,
        "read_disk_tokens": counts.read_disk,
        "written_tokens": {str(ttl_s): tokens for ttl_s, tokens in counts.written.items()},
        "uncached_tokens": counts.uncached,
        "generated_tokens": counts.generated,
        "held_token_s": counts.held_token_ms / 1000,
        "pinned_token_s": counts.pinned_token_ms / 1000,
    }


def _time(query: dict[str, str], name: str, default: float) -> float:
    """Return a time of the query in Unix seconds. Raises ApiError."""
    text = query.get(name)
    if text is None:
        return default
    try:
        if _SECONDS.fullmatch(text):
            return float(text)
        if len(text) > _MAX_TIME_CHARS or not text.isascii():
            raise ValueError(text)
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise invalid(f"{name} is not a time", name, text, _TIME_ALLOWED) from None


def _limit(text: str | None) -> int:
    if text is None:
        return MAX_ROWS
    if not _LIMIT.fullmatch(text) or int(text) > MAX_ROWS:
        raise invalid("limit is out of range", "limit", text, f"an integer from 1 to {MAX_ROWS}")
    return int(text)


def _after(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    found = _PAGE.fullmatch(text)
    if found is None:
        raise invalid("page is not the place of a row", "page", text, "the one in the header Link")
    return int(found[1]), text


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/usage",
        usage,
        "Get usage",
        "either",
        {200: UsageReply},
        query={
            "from": "only hours that begin at this time or later: a time, or Unix seconds",
            "to": "only hours that begin before this time",
            "tenant": "only this tenant, removed ones of its name too; for the operator",
            "limit": f"most rows in an answer, 1 to {MAX_ROWS}",
            "page": "only rows after this one; the header Link has it",
        },
        errors=(403, 422),
    ),
)
