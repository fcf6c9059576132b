"""What one usage record says: who used how much, of which model, at which time.

    {"id": "…", "time": "2026-01-31T09:00:00.000+00:00", "kind": "completion", "tenant": "acme", "tenancy": 0,
     "key": "…", "model": "m", "read": 64, "uncached": 17, "generated": 5, "requests": 1, "written": {"300": 16}}

A line has a number for each count that isn't 0, and ``incarnation`` if the keys file has one. All counts are integers,
so sums are exact. ``id`` is random: no other record of any process has it, and the same record has it wherever it is
written again.
"""

from __future__ import annotations

import json
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
MAX_LINE_BYTES: Final = 16_384
"""Lines that radixkv writes are shorter: a tenant's id has at most 256 bytes, and a model has the name of a folder."""
_MAX_TTLS: Final = 64
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
    """Tokens of one request, or of several; and tokens times milliseconds.

    - ``read``, ``written``, ``uncached``: of the prompt, which they add up to; see ``radixkv.service.usage``. The keys
      of ``written`` are TTLs in seconds.
    - ``read_host``, ``read_disk``: of ``read``, those that came back from host memory and from a disk.
    - ``requests``: 0 until the request is billed.
    """

    read: int = 0
    written: Mapping[int, int] = field(default_factory=dict)
    uncached: int = 0
    generated: int = 0
    read_host: int = 0
    read_disk: int = 0
    requests: int = 0
    held_token_ms: int = 0
    pinned_token_ms: int = 0

    @property
    def num_written(self) -> int:
        """Tokens written under all TTLs."""
        return sum(self.written.values())

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.read + self.num_written + self.uncached

    @property
    def is_nothing(self) -> bool:
        """Whether nothing was read, computed or generated."""
        return not (self.num_prompt_tokens or self.generated)

    def __add__(self, other: Counts) -> Counts:
        """Return the sum."""
        ttls = sorted({*self.written, *other.written})
        written = {ttl_s: self.written.get(ttl_s, 0) + other.written.get(ttl_s, 0) for ttl_s in ttls}
        return Counts(
            written=written, **{name: getattr(self, name) + getattr(other, name) for name in _NUMBERS}
        )


_NUMBERS: Final = tuple(each.name for each in fields(Counts) if each.name != "written")


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One record.

    - ``time_s``: Unix seconds at the end of the request.
    - ``key``: the id of the key that was used; empty if there was none.
    - ``id``: empty for a sum of several records.
    """

    time_s: float
    tenant: str
    kind: Kind
    model: str
    key: str = ""
    tenancy: int = 0
    counts: Counts = field(default_factory=Counts)
    incarnation: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def row(self) -> Row:
        """The row of sums that it belongs to."""
        hour = int(self.time_s // HOUR_S) * HOUR_S
        return Row(hour, self.tenant, self.tenancy, self.key, self.model, self.kind, self.incarnation)

    def line(self) -> bytes:
        """Return it as a line of ASCII: JSON escapes whatever else a name has, also the ends of lines."""
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
        return json.dumps(found, separators=(",", ":")).encode("ascii") + b"\n"


def summed(row: Row, counts: Counts) -> UsageRecord:
    """Return the sum of all records of a row as one."""
    return UsageRecord(
        float(row.hour), row.tenant, row.kind, row.model, row.key, row.tenancy, counts, row.incarnation, ""
    )


def record_of(line: bytes) -> UsageRecord | None:
    """Return the record in a line; None if it is an object without one. Raises ValueError for any other bytes."""
    if not line.endswith(b"\n"):
        raise ValueError("a part of a line")
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("no object")
        return _record(found) if "kind" in found else None
    except (OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _record(found: Mapping[str, Any]) -> UsageRecord:
    if found["kind"] not in KINDS:
        raise ValueError("an unknown kind")
    record_id, tenant, key, model = (_name(found.get(name)) for name in ("id", "tenant", "key", "model"))
    counts = Counts(
        **{name: _count(found.get(name, 0)) for name in _NUMBERS}, written=_written(found.get("written", {}))
    )
    time_s = datetime.fromisoformat(str(found.get("time"))).timestamp()
    tenancy, incarnation = _count(found.get("tenancy", 0)), _name(found.get("incarnation", ""))
    return UsageRecord(time_s, tenant, found["kind"], model, key, tenancy, counts, incarnation, record_id)


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise ValueError("a name is not a short text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_COUNT:
        raise ValueError("a count is not a number of tokens")
    return value


def _written(value: object) -> dict[int, int]:
    if not isinstance(value, dict) or len(value) > _MAX_TTLS:
        raise ValueError("written is no object of few TTLs")
    return {_count(int(str(ttl_s)[:20])): _count(count) for ttl_s, count in value.items()}
