"""What one usage record says: who used how much, of which model, in which hour.

``Counts`` add up exactly: all of them are integers. A record of several requests has their sum; ``requests`` says how
many. Records are merged only while the disk fails, see ``pending``.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple, get_args

Kind = Literal["completion", "warm", "pin", "base", "held", "removed"]
"""``pin``: a pin: it reads what is resident, and computes the rest if it is of the fleet. ``held``: blocks that a
tenant kept. ``removed``: the tenant was removed."""
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
HOUR_S: Final = 3_600
MAX_TTLS: Final = 64
_MAX_COUNT: Final = 2**63
_MAX_NAME: Final = 4_096


class Row(NamedTuple):
    """What sums are made of. ``tenancy`` counts how often a tenant of this name was removed before.

    ``incarnation``: of the tenant in the keys file; empty without one.
    """

    hour: int
    tenant: str
    tenancy: int
    key: str
    model: str
    kind: Kind
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens, and tokens times milliseconds. ``written``: TTL in seconds → tokens.

    ``read_host``, ``read_disk``: of ``read``, those that came back from host memory and from a disk.
    """

    requests: int = 0
    read: int = 0
    written: Mapping[int, int] = field(default_factory=dict)
    uncached: int = 0
    generated: int = 0
    held_token_ms: int = 0
    pinned_token_ms: int = 0
    read_host: int = 0
    read_disk: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the sum."""
        ttls = sorted({*self.written, *other.written})
        return Counts(
            self.requests + other.requests,
            self.read + other.read,
            {ttl_s: self.written.get(ttl_s, 0) + other.written.get(ttl_s, 0) for ttl_s in ttls},
            self.uncached + other.uncached,
            self.generated + other.generated,
            self.held_token_ms + other.held_token_ms,
            self.pinned_token_ms + other.pinned_token_ms,
            self.read_host + other.read_host,
            self.read_disk + other.read_disk,
        )


_NUMBERS: Final = tuple(each.name for each in fields(Counts) if each.name != "written")


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One record.

    - ``time_s``: Unix seconds at the end of the request.
    - ``key``: the id of the key that was used; empty if there was none.
    """

    time_s: float
    tenant: str
    kind: Kind
    model: str
    key: str = ""
    tenancy: int = 0
    counts: Counts = field(default_factory=Counts)
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    incarnation: str = ""

    @property
    def row(self) -> Row:
        """The row of sums that it belongs to."""
        hour = int(self.time_s // HOUR_S) * HOUR_S
        return Row(hour, self.tenant, self.tenancy, self.key, self.model, self.kind, self.incarnation)

    def fields(self) -> dict[str, Any]:
        """Return it as JSON fields. Counts of 0 are left out."""
        counts = {name: getattr(self.counts, name) for name in _NUMBERS}
        found: dict[str, Any] = {
            "id": self.id,
            "time": datetime.fromtimestamp(self.time_s, UTC).isoformat(timespec="milliseconds"),
            "kind": self.kind,
            "tenant": self.tenant,
            "tenancy": self.tenancy,
            "key": self.key,
            "model": self.model,
            **{name: count for name, count in counts.items() if count},
        }
        if self.incarnation:
            found["incarnation"] = self.incarnation
        if self.counts.written:
            found["written"] = {str(ttl_s): count for ttl_s, count in self.counts.written.items()}
        return found


def summed(row: Row, counts: Counts) -> UsageRecord:
    """Return the record of all requests of a row. It has no id."""
    return UsageRecord(
        float(row.hour), row.tenant, row.kind, row.model, row.key, row.tenancy, counts, "", row.incarnation
    )


def record_of(found: Mapping[str, Any]) -> UsageRecord | None:
    """Return the record in a line's fields; None if the line has none. Raises ValueError for a malformed one."""
    if "kind" not in found:
        return None
    record_id, tenant, key, model = (_name(found.get(name)) for name in ("id", "tenant", "key", "model"))
    if found["kind"] not in KINDS:
        raise ValueError("an unknown kind")
    time_s = datetime.fromisoformat(str(found.get("time"))).timestamp()
    counts = Counts(
        **{name: _count(found.get(name, 0)) for name in _NUMBERS}, written=_written(found.get("written", {}))
    )
    tenancy = _count(found.get("tenancy", 0))
    incarnation = _name(found.get("incarnation", ""))
    return UsageRecord(time_s, tenant, found["kind"], model, key, tenancy, counts, record_id, incarnation)


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise ValueError("a name is not a short text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_COUNT:
        raise ValueError("a count is not a number of tokens")
    return value


def _written(value: object) -> dict[int, int]:
    if not isinstance(value, dict) or len(value) > MAX_TTLS:
        raise ValueError("written is no object of few TTLs")
    return {_count(int(str(ttl_s)[:20])): _count(count) for ttl_s, count in value.items()}
