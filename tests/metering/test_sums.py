"""``sums``: rows of old hours are dropped, pages have places, and earlier tenants of a name stay apart."""

from __future__ import annotations

import pytest

from radixkv.metering.records import Counts
from radixkv.metering.sums import MOST_ROWS, UsageSums, total
from tests.metering.support import EVER, HOUR, record

DAY = 86_400.0
KEEP_S = 35 * DAY


def test_old_hours_and_the_oldest_of_too_many_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = UsageSums(KEEP_S)
    for day in range(50):
        sums.add(record(1, time_s=HOUR + day * DAY))
    assert len(sums.of("acme", 0, EVER)) == 36, "hours that began at most 35 days ago"
    monkeypatch.setattr("radixkv.metering.sums.MOST_ROWS", 20)
    for number in range(30):
        sums.add(record(2, time_s=HOUR + 50 * DAY, key=f"k{number}"))
    assert [each.counts.read for each in sums.of("acme", 0, EVER)] == [2] * 30, "the newest hour is whole"
    assert MOST_ROWS > 30


def test_rows_are_in_the_order_of_their_places_and_each_has_its_own() -> None:
    sums = UsageSums(KEEP_S)
    for number in range(200):
        sums.add(record(1, time_s=HOUR + number % 5 * 3_600, key=f"k{number % 20}", model=f"m{number % 3}"))
    rows = sums.all(None, 0, EVER)
    places = [(each.row.hour, each.place) for each in rows]
    assert places == sorted(set(places)) and total(rows).read == 200
    assert sums.of("acme", HOUR + 3_600, HOUR + 7_200) == [
        each for each in rows if each.row.hour == HOUR + 3_600
    ]


def test_a_tenant_is_known_to_be_a_later_one_of_its_name_by_any_record() -> None:
    """The record that says so may be too old to be read at a start."""
    sums = UsageSums(KEEP_S)
    sums.add(record(1, tenancy=0))
    sums.add(record(2, tenancy=1, incarnation="second"))
    assert (sums.tenancy("acme"), sums.incarnation("acme")) == (1, "second")
    assert [each.counts.read for each in sums.of("acme", 0, EVER)] == [2]
    sums.add(record(4, tenancy=0))
    assert [each.counts.read for each in sums.of("acme", 0, EVER)] == [2], "a late request of the earlier one"
    sums.add(record(0, tenancy=1, kind="removed", counts=Counts()))
    assert (sums.tenancy("acme"), sums.incarnation("acme")) == (2, "") and sums.of("acme", 0, EVER) == []
    assert sums.tenants() == [] and total(sums.all("acme", 0, EVER)).read == 7
