"""``meter``: who pays for what, what is held over time, and tenants that are removed and made again."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace

from radixkv.clock import ManualClock
from radixkv.metering.meter import KEEP_S, TELL_EVERY_S, TTL_CLASSES, Level, Meter, Payer
from radixkv.metering.records import HOUR_S, Counts, Row
from radixkv.metering.sums import Sum, UsageSums, total
from radixkv.service.usage import TTL_1H, TTL_5M, TTL_12H, TTL_30M, Promise, usage_of
from tests.waiting import ended

NOW = 1_769_850_000.0
"""The beginning of an hour."""
EVER = 10.0**12


class Metered:
    """A meter whose time stands still until the test moves it."""

    def __init__(self, sums: UsageSums | None = None) -> None:
        self.clock, self.removals = ManualClock(), Counter[str]()
        self.sums = sums or UsageSums(KEEP_S)
        self.meter = Meter(
            "m", self.sums, None, lambda tenant: self.removals[tenant],
            wall=lambda: NOW + self.clock(), clock=self.clock,
        )  # fmt: skip

    def bill(self, tenant: str, read: int, key: str = "k") -> None:
        self.meter.bill("completion", self.meter.payer(tenant, key), Counts(read=read))

    def of(self, tenant: str) -> list[Sum]:
        return self.meter.of(tenant, 0, EVER)


def test_ten_thousand_random_requests_add_up_exactly() -> None:
    chance, metered = random.Random(3), Metered()
    expected: dict[tuple[str, str], Counts] = {}
    for _ in range(10_000):
        tenant, key = chance.choice("ab"), chance.choice("kl")
        tokens = chance.randrange(2_000)
        cached = chance.randrange(tokens + 1)
        promises = [Promise(chance.randrange(tokens + 1), ttl_s) for ttl_s in (TTL_5M, TTL_1H)]
        usage = usage_of(tokens, cached, promises, chance.randrange(50))
        assert usage.num_prompt_tokens == tokens
        expected[tenant, key] = expected.get((tenant, key), Counts()) + usage
        metered.meter.bill("completion", metered.meter.payer(tenant, key), usage)
        if chance.random() < 0.01:
            metered.clock.advance(chance.randrange(2_000))
    for tenant in "ab":
        for key in "kl":
            counts = total(each for each in metered.of(tenant) if each.row.key == key)
            assert replace(counts, requests=0) == expected[tenant, key]
    assert len({each.row.hour for each in metered.of("a")}) > 3
    assert total(metered.meter.all(None, 0, EVER)).requests == 10_000


def test_each_tenant_sees_its_own_rows_and_nothing_of_others() -> None:
    metered = Metered()
    metered.bill("acme", 16)
    before = metered.of("acme")
    for number in range(50):
        metered.bill("globex", 32, f"k{number}")
    assert (
        metered.of("acme")
        == before
        == [Sum(Row(int(NOW), "acme", 0, "k", "m", "completion"), Counts(16, requests=1))]
    )
    assert metered.of("nobody") == []
    assert {each.row.tenant for each in metered.meter.all(None, 0, EVER)} == {"acme", "globex"}
    assert metered.meter.all("acme", 0, EVER) == before
    assert metered.of("acme") == before and metered.meter.of("acme", NOW + 1, EVER) == []


def test_a_tenant_of_a_removed_name_sees_nothing_of_before() -> None:
    metered = Metered()
    metered.bill("acme", 16)
    late = metered.meter.payer("acme", "k")
    metered.removals["acme"] += 1
    assert metered.of("acme") == []
    metered.bill("acme", 5)
    metered.meter.bill("completion", late, Counts(read=99))
    assert [each.counts.read for each in metered.of("acme")] == [5], (
        "a late request pays for the earlier tenant"
    )
    everything = metered.meter.all("acme", 0, EVER)
    assert sorted(each.row.kind for each in everything) == ["completion", "completion", "removed"]
    again = Metered(metered.sums)
    again.meter.forget_absent(["globex"])
    assert again.of("acme") == [], "the process was away while the tenant was removed"
    again.meter.forget_absent(["globex"])
    assert len(again.meter.all("acme", 0, EVER)) == 4


def test_a_tenant_that_was_made_again_while_the_process_was_away_sees_nothing_of_before() -> None:
    sums = UsageSums(KEEP_S)
    for incarnation, expected in (
        ("first", [16]),
        ("first", [32]),
        ("second", [16]),
        ("", [16, 16]),
        ("third", [16]),
    ):
        meter = Meter("m", sums, incarnation=lambda tenant, now=incarnation: now)  # type: ignore[misc]
        meter.forget_absent(["acme"])
        meter.bill("completion", meter.payer("acme", "k"), Counts(read=16))
        assert [each.counts.read for each in meter.of("acme", 0, EVER)] == expected, incarnation


def test_held_tokens_count_for_the_time_between_samples() -> None:
    metered = Metered()
    metered.meter.sample({"acme": Level(100, 40), "globex": Level(7, 0)})
    assert metered.of("acme") == []
    metered.clock.advance(10)
    assert metered.of("acme")[0].counts == Counts(held_token_ms=1_000_000, pinned_token_ms=400_000)
    metered.meter.sample({"acme": Level(0, 0), "globex": Level(7, 0)})
    metered.clock.advance(TELL_EVERY_S)
    metered.meter.sample({"acme": Level(1, 0), "globex": Level(7, 0)})
    metered.clock.advance(HOUR_S - 75)
    metered.meter.sample({"acme": Level(1, 0)})
    (held,) = metered.of("acme")
    assert held.row == Row(int(NOW), "acme", 0, "", "m", "held")
    assert held.counts == Counts(held_token_ms=1_000_000 + 1_000 * (HOUR_S - 75), pinned_token_ms=400_000)
    assert total(metered.of("globex")).held_token_ms == 7_000 * (HOUR_S - 5), "it is gone, and told"


def test_what_is_held_across_hours_is_told_in_each() -> None:
    metered = Metered()
    metered.meter.sample({"acme": Level(2, 0)})
    for _ in range(3 * 60):
        metered.clock.advance(60)
        metered.meter.sample({"acme": Level(2, 0)})
    counts = [each.counts.held_token_ms for each in metered.of("acme")]
    assert counts == [2_000 * HOUR_S] * 3


def test_other_ttls_are_billed_as_the_next_class() -> None:
    metered = Metered()
    payer = metered.meter.payer("acme")
    written = {1: 1, 300: 2, 301: 4, 90_000: 8, 366 * 86_400: 16}
    metered.meter.bill("completion", payer, Counts(written=written))
    assert total(metered.of("acme")).written == {300: 3, 1_800: 4, 172_800: 8, TTL_CLASSES[-1]: 16}
    assert {TTL_5M, TTL_30M, TTL_1H, TTL_12H} <= {*TTL_CLASSES}, (
        "TTLs that providers have are billed as they are"
    )


def test_threads_lose_no_request() -> None:
    metered = Metered()

    def work() -> None:
        for _ in range(500):
            metered.meter.bill("warm", Payer("acme"), Counts(read=1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        ended(thread)
    assert total(metered.of("acme")) == Counts(2_000, requests=2_000)
