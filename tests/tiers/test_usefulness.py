"""Verdicts over tiers are right for the facts, say what to do, and forget what was long ago."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.clock import ManualClock
from radixkv.tiers import usefulness
from radixkv.tiers.disk.durations import Durations
from radixkv.tiers.disk.slots import Evicted
from radixkv.tiers.tier import TierDetails
from radixkv.tiers.usefulness import (
    LEAST_BLOCKS,
    LEAST_S,
    REASONS,
    SAID_AGAIN_S,
    WINDOW_S,
    TierFacts,
    TierWatch,
    facts_of,
    judge,
)

HOUR = 3_600.0
UNREAD = TierFacts(
    state="open", owed_purges=0, block_bytes=2_000_000, block_tokens=16, capacity_blocks=400_000, num_found=0,
    num_foreign=0, seconds=26 * HOUR, written_blocks=251_000, hit_blocks=0, worked=251_000, failed=0, loads=0,
    timeouts=0, num_returned=0,
)  # fmt: skip
"""The report of a user: 502 GB stored, 0 read back."""

VERDICTS: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({}, "useless", "never_read", "502 GB were written in 26 hours, and nothing was read back: prompts share no"),
    ({"hit_blocks": 250}, "useless", "never_read", "requests used 250 blocks: prompts share no"),
    ({"hit_blocks": 251}, "useful", None, "502 GB were written in 26 hours, and requests used 251 blocks"),
    ({"written_blocks": 0, "hit_blocks": 1}, "useful", None, "0 bytes were written"),
    ({"seconds": LEAST_S - 1}, "too early", None, "251,000 blocks were written in 60 minutes"),
    ({"written_blocks": LEAST_BLOCKS - 1}, "too early", None, "ask again after 3,000 blocks and 60 minutes"),
    ({"written_blocks": LEAST_BLOCKS, "seconds": LEAST_S}, "useless", "never_read", "6 GB were written in 60 min"),
    ({"num_returned": 10}, "useless", "too_old", "10 requests asked for blocks that had been evicted before"),
    ({"num_returned": 9}, "useless", "never_read", "share no beginnings longer than 16 tokens"),
    ({"num_returned": 10, "hit_blocks": 10_000}, "useful", None, "10,000 blocks"),
    ({"num_found": 300_000, "num_foreign": 252_000, "seconds": 5.0, "written_blocks": 3}, "useless",
     "identity_changed", "252,000 of the 300,000 records that it held at the start belong to another model"),
    ({"num_found": 300_000, "num_foreign": 100_000, "seconds": 5.0}, "too early", None, "ask again"),
    ({"num_found": 300_000, "num_foreign": 250_000}, "useless", "never_read", "nothing was read"),
    ({"loads": 10, "timeouts": 5}, "useless", "too_slow", "5 of 10 loads ended early"),
    ({"loads": 10, "timeouts": 5, "hit_blocks": 90_000}, "useless", "too_slow", "5 of 10 loads ended early"),
    ({"loads": 11, "timeouts": 5, "hit_blocks": 90_000}, "useful", None, "90,000 blocks"),
    ({"loads": 4, "timeouts": 4}, "useless", "never_read", "nothing was read"),
    ({"state": "resting", "hit_blocks": 90_000, "loads": 90, "timeouts": 1}, "useful", None, "90,000"),
    ({"failed": 5, "worked": 5, "seconds": 5.0}, "useless", "errors", "5 operations failed, 5 worked"),
    ({"failed": 5, "worked": 6}, "useless", "never_read", "nothing"),
    ({"failed": 4, "worked": 0, "written_blocks": 0}, "too early", None, "0 blocks"),
    ({"state": "degraded", "hit_blocks": 90_000}, "useless", "errors", "0 operations failed"),
    ({"owed_purges": 2}, "useless", "closed", "the purges of 2 tenants are pending"),
    ({"owed_purges": 2, "hit_blocks": 90_000}, "useful", None, "90,000 blocks"),
    ({"state": "unusable", "seconds": 1.0}, "useless", "closed", "it couldn't be opened at the start"),
    ({"state": "awaiting-generations", "hit_blocks": 90_000}, "useless", "closed", "waits for the fleet's store"),
    ({"state": "fenced"}, "useless", "closed", "another process has opened its folder"),
    ({"state": "closed"}, "useless", "closed", "it was closed"),
    ({"state": "off"}, "useless", "closed", "an error in radixkv"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "worth", "reason", "text"), VERDICTS)
def test_a_verdict_has_a_reason_and_a_sentence(
    changed: dict[str, Any], worth: str, reason: str | None, text: str
) -> None:
    found = judge(UNREAD._replace(**changed))
    assert (found.worth, found.reason) == (worth, reason)
    assert text in found.text
    assert str(found).startswith(f"{worth} ({reason}): " if reason else f"{worth}: ")


def test_the_table_has_all_reasons() -> None:
    assert {reason for _, _, reason, _ in VERDICTS} == {*REASONS, None}


COUNTS = st.integers(0, 10**9)


@given(
    st.builds(
        TierFacts,
        st.sampled_from(["open", "resting", "degraded", "closed", "unusable", "fenced", "off"]),
        *[COUNTS] * 6,
        st.floats(0, 1e9),
        *[COUNTS] * 7,
    )
)
def test_only_what_is_useless_has_a_reason(facts: TierFacts) -> None:
    found = judge(facts)
    assert (found.worth == "useless") == (found.reason is not None)
    assert found.text
    if found.worth == "useful":
        assert facts.hit_blocks


def counts(**changed: float) -> dict[str, float]:
    return {
        "capacity_blocks": 100, "read_bytes": 0, "written_bytes": 0, "hit_blocks": 0, "loads": 0, "errors": 0,
        "owed_purges": 0, **changed,
    }  # fmt: skip


def details(**changed: Any) -> TierDetails:
    return TierDetails(Durations(), **{"block_bytes": 10, "block_tokens": 4, "age_s": 9e9, **changed})


def test_facts_are_of_counts_and_details() -> None:
    given_counts = counts(read_bytes=30, written_bytes=50, hit_blocks=2, loads=7, errors=4, owed_purges=1)
    given_details = details(
        state="resting", age_s=8.0, num_found=6, num_foreign=5, num_returned=9, timeouts=3
    )
    found = facts_of(given_counts, given_details)
    assert found == TierFacts("resting", 1, 10, 4, 100, 6, 5, 8.0, 5, 2, 8, 1, 7, 3, 9)
    assert found.since(found) == TierFacts("resting", 1, 10, 4, 100, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0)


def test_what_was_long_ago_counts_no_more() -> None:
    clock = ManualClock(0.0)
    watch = TierWatch(clock)
    written, hits = 0.0, 5_000.0

    def worth() -> str:
        found = watch.verdicts(
            {"disk": counts(written_bytes=written, hit_blocks=hits)}, {"disk": details(age_s=clock())}
        )
        return found["disk"].worth

    seen = []
    for _ in range(4):
        seen.append(worth())
        clock.advance(WINDOW_S)
        written += 10 * LEAST_BLOCKS
    assert seen == ["useful", "useless", "useless", "useless"], "it was used before the first look alone"
    hits += 100
    assert worth() == "useful"
    clock.advance(WINDOW_S)
    assert worth() == "too early", "nobody wrote or read since"


def test_a_log_hears_once_a_day_of_a_reason() -> None:
    clock = ManualClock(0.0)
    watch = TierWatch(clock)
    bad, other = judge(UNREAD), judge(UNREAD._replace(state="fenced"))
    good = judge(UNREAD._replace(hit_blocks=9_999))
    assert watch.unsaid({"host": good, "disk": bad}) == {"disk": bad}
    clock.advance(300.0)
    assert watch.unsaid({"host": bad, "disk": bad}) == {"host": bad}
    assert watch.unsaid({"disk": other}) == {"disk": other}
    assert watch.unsaid({"disk": bad}) == {}, "it comes and goes"
    clock.advance(SAID_AGAIN_S - 300.0)
    assert watch.unsaid({"host": bad, "disk": bad}) == {"disk": bad}


def locator(number: int) -> bytes:
    return number.to_bytes(4) + bytes(12)


def test_a_record_that_is_asked_for_after_its_eviction_counts_once() -> None:
    evicted = Evicted(3)
    for number in range(5):
        evicted.add(locator(number))
    evicted.add(locator(2))
    for number in (0, 1, 2, 2, 9):
        evicted.asked(locator(number))
    assert evicted.num_asked == 1, "as many are remembered as there are slots"
    for number in (3, 4):
        evicted.asked(locator(number))
    assert evicted.num_asked == 3


def test_a_large_disk_remembers_a_bounded_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tiers.disk.slots.MAX_REMEMBERED", 10)
    evicted = Evicted(95)
    for number in range(1_000):
        evicted.add(locator(number))
    assert len(evicted._locators) == 10
    for number in range(1_000):
        evicted.asked(locator(number))
    assert evicted.num_asked == 100


def test_the_thresholds_agree() -> None:
    """The rule of three: none of n used means a share below 3 / n, with 95 % confidence."""
    assert 3 / usefulness.LEAST_BLOCKS <= usefulness.LEAST_SHARE
