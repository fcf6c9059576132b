"""``records``: what is written is read again, whatever names it has; other lines are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixkv.metering.records import MAX_LINE_BYTES, Counts, UsageRecord, record_of
from tests.metering.support import HOUR, record

NAMES = [
    "",
    "two\nlines",
    "\r\n\u2028\x85\x00",
    '"}\n{"kind":"held"',
    "\ud800",
    "Zoë 🙂",
    "x" * 4_096,
    "a" * 255,
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_one_line_and_is_read_again(name: str) -> None:
    given = record(7, tenant=name, key=name[:255], model=name[:255], incarnation=name[:64])
    line = given.line()
    assert line.isascii() and line.count(b"\n") == 1 and line.endswith(b"\n") and b"\r" not in line
    assert record_of(line) == given


def test_the_longest_names_that_the_service_allows_fit_into_a_line() -> None:
    most = 2**63 - 1
    counts = Counts(most, dict.fromkeys(range(64), most), *[most] * 7)
    tenant, model = "🙂" * 64, "🙂" * 63
    line = record(0, tenant, model=model, counts=counts, incarnation="~" * 64, tenancy=most).line()
    assert len(line) < MAX_LINE_BYTES and record_of(line) is not None


def test_a_record_has_names_and_counts_and_nothing_else() -> None:
    """Whoever adds a field must think of what it tells of a tenant's content."""
    given = record(5, counts=Counts(1, {300: 2}, 3, 4, 5, 6, 7, 8, 9), incarnation="i")
    assert json.loads(given.line()) == {
        "id": f"{5:024x}",
        "time": "2026-01-31T09:00:05.000+00:00",
        "kind": "completion",
        "tenant": "acme",
        "tenancy": 0,
        "key": "0123456789abcdef",
        "model": "m",
        "incarnation": "i",
        "requests": 7,
        "read": 1,
        "written": {"300": 2},
        "uncached": 3,
        "generated": 4,
        "read_host": 5,
        "read_disk": 6,
        "held_token_ms": 8,
        "pinned_token_ms": 9,
    }


def test_ids_are_random() -> None:
    made = {UsageRecord(HOUR, "acme", "warm", "m").id for _ in range(1_000)}
    assert len(made) == 1_000 and {len(each) for each in made} == {24}


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "gift"}, {"kind": ["held"]}, {"read": -1}, {"read": True}, {"read": 1.5}, {"read": 2**63},
        {"tenant": None}, {"tenant": "x" * 4_097}, {"key": 7}, {"id": None}, {"time": "soon"}, {"time": None},
        {"time": 10**400}, {"written": [1]}, {"written": {"x": 1}}, {"written": {"-1": 1}}, {"written": {"1": -1}},
        {"written": {f"{each}": 1 for each in range(65)}}, {"tenancy": "0"}, {"incarnation": 1},
    ],
)  # fmt: skip
def test_a_malformed_record_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        record_of(json.dumps({**json.loads(record().line()), **changed}).encode() + b"\n")


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"[]\n", b"null\n", b"\xff\n", b"\x00" * 100 + b"\n", b"[" * 15_000 + b"\n", b"{" + b"\n",
     record().line()[:-1], record().line()[:40] + b"\n", b'{"kind":' + b"1" * 5_000 + b"}\n"],
)  # fmt: skip
def test_what_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        record_of(line)


def test_an_object_without_a_kind_is_no_record() -> None:
    assert record_of(b'{"n":1,"file":1}\n') is None
