"""What a service says of a tenant's tokens in four places: answers, usage records, ``/metrics`` and ``/v1/stats``."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tests.service.running import Running, requested
from tests.waiting import eventually

_SAMPLE = re.compile(r'radixkv_completion_tokens_total\{kind="(\w+)",tenant="([^"]+)"\} (\d+)')


ROUNDS = 10
"""Later connections that are answered before what came on earlier ones has surely been read."""


def is_idle(live: Running) -> bool:
    """Whether nothing waits or runs, also of what was ended and isn't settled yet."""
    service = live.service
    is_answering = service.drain._tasks or service.warmer._under_way
    return not is_answering and service.engine_loop.num_unfinished == 0


def settled(live: Running) -> None:
    """Wait until all that was asked has ended, also what came on connections that were closed at once."""
    for _ in range(ROUNDS):
        assert requested("GET", f"{live.url}/healthz").status_code == 200
    eventually(lambda: is_idle(live), "nothing waits or runs")
    eventually(lambda: live.service.cache.stats().num_sequences == 0, "no sequence is open")


def billed(live: Running, tenant: str = "acme", *kinds: str) -> Counter[str]:
    """Sums of usage records of all tenants that had this name: of some kinds, or of all but ``held``."""
    found = Counter[str]()
    rows = live.operator.get("/v1/usage", params={"tenant": tenant, "limit": "1000"}).json()["rows"]
    for row in rows:
        if row["kind"] in kinds or (not kinds and row["kind"] != "held"):
            computed = row["uncached_tokens"] + sum(row["written_tokens"].values())
            found.update(
                requests=row["requests"],
                read=row["read_tokens"],
                computed=computed,
                generated=row["generated_tokens"],
            )
    return found


def metered(live: Running, tenant: str = "acme") -> Counter[str]:
    """Tokens of completions by ``/metrics``."""
    names = {"cached": "read", "prefilled": "computed", "generated": "generated"}
    samples = _SAMPLE.findall(live.operator.get("/metrics").text)
    return Counter({names[kind]: int(count) for kind, whose, count in samples if whose == tenant})


def counted(live: Running, tenant: str = "acme") -> Counter[str]:
    """Hits and misses by ``/v1/stats``, since the tenant was made."""
    rows: list[dict[str, Any]] = live.operator.get("/v1/stats").json()["tenants"]
    row = next(each for each in rows if each["tenant"] == tenant)
    return Counter(read=row["hit_tokens"], computed=row["missed_tokens"])


class Accounts:
    """What has grown since it was made, in each place."""

    def __init__(self, live: Running, tenant: str = "acme") -> None:
        self.live, self.tenant = live, tenant
        self._before = [billed(live, tenant), metered(live, tenant), counted(live, tenant)]

    def grown(self) -> list[Counter[str]]:
        """Usage records, ``/metrics`` and ``/v1/stats``; a count that didn't grow is left out."""
        settled(self.live)
        now = [
            billed(self.live, self.tenant),
            metered(self.live, self.tenant),
            counted(self.live, self.tenant),
        ]
        return [after - before for after, before in zip(now, self._before, strict=True)]
