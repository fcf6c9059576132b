"""The advice of a simulation: each sentence follows from the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixkv.simulator.advice import advise

SIZES = (1_000, 2_000, 4_000)
LRU = {1_000: 0.10, 2_000: 0.20, 4_000: 0.25}
OPTIMUM = dict.fromkeys(SIZES, 0.30)
SAME = {size: float(size) for size in SIZES}


def rows(policy: str, rates: dict[int, float], needed: Mapping[int, float | None]) -> list[dict[str, Any]]:
    return [
        {
            "policy": policy,
            "capacity": size,
            "token_hit_rate": rate,
            "share_of_gap": (rate - LRU[size]) / (OPTIMUM[size] - LRU[size]),
            "capacity_for_lru_rate": needed[size],
            "memory_saved": None if needed[size] is None else 1 - needed[size] / size,
            "worst_slice": {"from_s": 0.0, "to_s": 1_200.0, "above_lru": -0.02 if size == 4_000 else 0.01},
        }
        for size, rate in rates.items()
    ]


def advice_for(
    *online: dict[str, Any],
    endless: float = 0.3,
    lru: Mapping[int, float] = LRU,
    same: Mapping[int, float] = SAME,
) -> str:
    result = {
        "results": list(online),
        "baselines": [*rows("lru", dict(lru), same), *rows("optimum", OPTIMUM, same)],
        "block_bytes": 2**26,
        "endless_token_hit_rate": endless,
        "different_blocks": 9_000,
    }
    return "\n".join(advise(result)).replace("\N{NO-BREAK SPACE}", " ")


def test_less_memory_for_the_same_hit_rate() -> None:
    text = advice_for(
        *rows("good", {1_000: 0.15, 2_000: 0.25, 4_000: 0.26}, {1_000: 700, 2_000: 1_400, 4_000: 2_000})
    )
    assert (
        "At 2,000 blocks (134 GB), good has the same hit rate as LRU with 30 % less memory: "
        "1,400 blocks (94 GB) for 20.0 %. With all of it, 25.0 %."
    ) in text
    assert "700 blocks (47 GB) for 10.0 %, an estimate: no capacity below 1,000 was simulated." in text
    assert (
        "good closes the largest part of the gap from LRU to the optimum: 31.7 % on average over all capacities."
        in text
    )
    assert "In its worst stretch, 0–1,200 s at 4,000 blocks, it is 2.0 points below LRU." in text


def test_no_memory_is_saved_where_lru_needs_no_more() -> None:
    good = rows("good", {1_000: 0.15, 2_000: 0.25, 4_000: 0.26}, {1_000: 700, 2_000: 1_400, 4_000: 1_400})
    flat = {1_000: 0.10, 2_000: 0.20, 4_000: 0.20}
    text = advice_for(*good, lru=flat, same={1_000: 1_000, 2_000: 2_000, 4_000: 2_000})
    assert "At 2,000 blocks (134 GB), good has the same hit rate as LRU with 30 % less" in text
    assert "At 4,000 blocks" not in text


def test_no_memory_is_saved_where_lru_hits_nothing() -> None:
    good = rows("good", {1_000: 0.15, 2_000: 0.0, 4_000: 0.26}, {1_000: 0, 2_000: 0, 4_000: 1_400})
    text = advice_for(
        *good, lru={1_000: 0.0, 2_000: 0.0, 4_000: 0.25}, same={1_000: 0, 2_000: 0, 4_000: 4_000}
    )
    assert "At 1,000 blocks (67 GB), LRU has no hits, and good has 15.0 %." in text
    assert "At 2,000 blocks" not in text and "100 % less" not in text and "0 blocks (0" not in text


def test_the_best_at_each_capacity_is_named() -> None:
    needed = {1_000: 900.0, 2_000: 1_900.0, 4_000: 3_900.0}
    text = advice_for(
        *rows("early", {1_000: 0.14, 2_000: 0.21, 4_000: 0.26}, needed),
        *rows("late", {1_000: 0.11, 2_000: 0.25, 4_000: 0.27}, needed),
    )
    assert "At 1,000 blocks (67 GB), early" in text and "At 2,000 blocks (134 GB), late" in text
    assert "late closes the largest part of the gap" in text and "early closes" not in text


def test_a_policy_below_lru_is_not_recommended() -> None:
    text = advice_for(*rows("bad", {1_000: 0.05, 2_000: 0.2, 4_000: 0.2}, dict.fromkeys(SIZES)))
    assert "At 1,000 blocks (67 GB), no simulated policy beats LRU's 10.0 %." in text
    assert "LRU is the best simulated policy" in text and "closes most" not in text


def test_the_advice_says_where_more_memory_pays_most() -> None:
    needed = dict.fromkeys(SIZES, 1_000.0)
    text = advice_for(*rows("good", {1_000: 0.15, 2_000: 0.25, 4_000: 0.26}, needed))
    assert (
        "More memory pays most from 1,000 to 2,000 blocks: 10.0 points with LRU; "
        "at 1,000, good instead of LRU brings 5.0."
    ) in text


def test_the_advice_says_where_memory_is_enough() -> None:
    assert "An endless cache would have 30.0 %, with 9,000 blocks (604 GB)." in advice_for()
    assert "More than 4,000 blocks (268 GB) brings little: LRU has 25.0 % there" in advice_for(endless=0.255)
