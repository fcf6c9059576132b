"""The dates of promised prefixes: until when they are kept, what they cover, and how much is remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from radixkv import Namespace
from radixkv.index.endings import Endings
from radixkv.index.tokens import encode
from radixkv.service.promised_dates import MAX_DATES, MAX_PREFIXES, NO_COVER, Cover, PromisedDates
from radixkv.service.promises import DATE_ENDS, Promises
from radixkv.service.usage import TTL_1H, TTL_5M, Promise
from tests.service.test_promises import IDS, KEY, NS, World

OLD, TODAY, TOMORROW = "2026-03-01", "2026-03-02", "2026-03-03"


class Dates:
    """Dates on a clock that the test sets."""

    def __init__(self) -> None:
        self.now, self.endings = 1000.0, Endings()
        self.kept = PromisedDates(lambda: self.now, self.endings)

    def covered(self, ids: list[int], date: str = OLD, namespace: Namespace = NS) -> int:
        return self.kept.cover(namespace, [date], encode(ids)).num_bytes // 4


@pytest.fixture
def dates() -> Dates:
    return Dates()


def test_the_longest_prefix_that_is_promised_covers_a_prompt(dates: Dates) -> None:
    for size, ttl_s in ((4, 9000.0), (12, 300.0), (8, 100.0)):
        dates.kept.keep(NS, OLD, encode(IDS[:size]), ttl_s)
    assert dates.kept.cover(NS, [OLD], KEY) == Cover(48, 10_000.0)
    assert dates.covered(IDS[:11]) == 8 and dates.covered(IDS[:3]) == 0
    assert dates.covered([*IDS[:11], 7]) == 8 and dates.covered([7, *IDS]) == 0
    assert dates.covered(IDS, TODAY) == 0 and dates.covered(IDS, namespace=NS._replace(salt="x")) == 0
    dates.now += 300
    assert dates.covered(IDS) == 4


def test_what_is_the_same_on_all_dates_says_nothing_about_the_date(dates: Dates) -> None:
    dates.kept.keep(NS, OLD, encode(IDS[:8]), 9000.0)
    dates.kept.keep(NS, OLD, encode(IDS[:12]), 300.0)
    assert dates.kept.cover(NS, [OLD], KEY, 8 * 4) == Cover(48, 1300.0)
    assert dates.kept.cover(NS, [OLD], KEY, 12 * 4) is NO_COVER
    assert dates.kept.cover(NS, [TODAY, OLD], encode([*IDS[:9], 7])) == Cover(32, 10_000.0)


def test_dates_before_today_end_with_their_promises(dates: Dates) -> None:
    assert dates.kept.before("acme", TODAY) == ()
    for date in (OLD, TODAY, TOMORROW):
        dates.kept.keep(NS, date, KEY, 300.0)
    assert dates.kept.before("acme", TODAY) == (OLD,)
    assert dates.kept.before("globex", TODAY) == ()
    assert dates.kept.before("acme", TOMORROW) == (TODAY, OLD)
    dates.now += 300
    assert dates.kept.before("acme", TOMORROW) == () and dates.kept.cover(NS, [TODAY], KEY) is NO_COVER


def test_a_shorter_renewal_shortens_nothing_and_an_end_does(dates: Dates) -> None:
    dates.kept.keep(NS, OLD, KEY, 3600.0)
    dates.kept.keep(NS, OLD, KEY, 60.0)
    dates.now += 100
    assert dates.covered(IDS) == len(IDS)
    dates.kept.end(NS, KEY, 50.0)
    assert dates.covered(IDS) == len(IDS)
    dates.now += 50
    assert dates.covered(IDS) == 0 and dates.kept.before("acme", TODAY) == ()


@pytest.mark.parametrize("purges", [True, False])
def test_what_was_purged_or_cleared_keeps_no_date(dates: Dates, purges: bool) -> None:
    dates.kept.keep(NS, OLD, KEY, 3600.0)
    dates.endings.end_tenant("globex")
    assert dates.covered(IDS) == len(IDS)
    if purges:
        dates.endings.end_tenant("acme")
    else:
        dates.endings.end_namespace(NS)
    assert dates.covered(IDS) == 0 and dates.kept.before("acme", TODAY) == ()


def test_a_tenant_with_many_promises_takes_a_bounded_place(dates: Dates) -> None:
    """The newest of them are known. Another tenant's stay."""
    other = Namespace("globex", "model")
    dates.kept.keep(other, OLD, KEY, 3600.0)
    for number in range(3 * MAX_PREFIXES):
        dates.kept.keep(NS, OLD, encode([number, number]), 3600.0)
    for day in range(1, 29):
        dates.kept.keep(NS, f"2026-02-{day:02}", KEY, 3600.0)
    (kept,) = (each for tenant, each in dates.kept._tenants.items() if tenant == "acme")
    assert len(kept) <= 8 and max(map(len, kept.values())) <= MAX_PREFIXES
    assert dates.covered([3 * MAX_PREFIXES - 1] * 2) == 2 and dates.covered([0, 0]) == 0
    assert dates.covered(IDS, namespace=other) == len(IDS)
    assert len(dates.kept.before("acme", TODAY)) == MAX_DATES


# ---- promises


@pytest.fixture
def world() -> World:
    found = World()
    found.compute(IDS)
    return found


def test_an_earlier_date_is_promised_only_what_ends_before_it(world: World) -> None:
    keep = world.promises.keep
    assert keep(NS, KEY, [Promise(20, TTL_1H)], date=OLD).granted == (Promise(20, TTL_1H),)
    world.now += 600
    found = keep(NS, KEY, [Promise(40, TTL_1H), Promise(24, TTL_5M)], date=OLD, num_shared=3)
    assert found.granted == (Promise(24, TTL_5M),) and found.refusal == DATE_ENDS
    world.now += 2900
    found = keep(NS, KEY, [Promise(24, TTL_5M)], date=OLD, num_shared=3)
    assert found.granted == () and found.headers == {"x-cache-write-refused": DATE_ENDS}
    assert world.promises.dates.before("acme", TODAY) == (OLD,)
    world.now += 101
    assert world.promises.dates.before("acme", TODAY) == ()


def test_a_pin_that_ends_before_its_time_ends_its_date(world: World) -> None:
    dates = world.promises.dates
    for end in ("release", "unpin"):
        pin = world.promises.hold("pin", NS, KEY, 3600.0, date=OLD)
        assert dates.before("acme", TODAY) == (OLD,)
        if end == "release":
            world.promises.release("pin", NS, KEY, pin)
        else:
            world.promises.unpin(pin)
        assert dates.before("acme", TODAY) == () and not world.cache.pins("acme")


def test_without_a_date_nothing_is_remembered(world: World) -> None:
    world.promises.keep(NS, KEY, [Promise(20, TTL_1H)])
    assert not world.promises.dates._tenants


def test_an_engine_far_away_is_not_asked_for_dates() -> None:
    """The event loop asks for them."""
    cache = SimpleNamespace(endings=Endings())
    engine = SimpleNamespace(cache=cache, abilities=(), limits=SimpleNamespace(block_size=4))
    promises = Promises(cast(Any, engine), lambda: 0.0)
    assert promises.dates.before("acme", TODAY) == () and promises.dates.cover(NS, [OLD], KEY) is NO_COVER
