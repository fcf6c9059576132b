"""Advice: what a simulation's rows mean for the choice of a policy and of memory."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import log
from typing import Any

from radixkv.simulator.score import BASELINES, LRU

Row = Mapping[str, Any]

_WORTH_SAYING = 0.01


def advise(result: Mapping[str, Any]) -> list[str]:
    """Return sentences about a result, the most useful first."""
    lru = [row for row in result["baselines"] if row["policy"] == LRU]
    online = [row for row in result["results"] if row["policy"] not in BASELINES]
    best = {
        row["capacity"]: max(_at(online, row["capacity"]), key=_rate)
        for row in lru
        if _at(online, row["capacity"])
    }
    said = [_less_memory(row, best[row["capacity"]], result) for row in lru if row["capacity"] in best]
    return [*filter(None, said), *_best_overall(online), *_more_memory(lru, best), *_enough(lru, result)]


def _at(rows: list[Row], capacity: int) -> list[Row]:
    return [row for row in rows if row["capacity"] == capacity]


def _rate(row: Row) -> float:
    return float(row["token_hit_rate"])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def size(num_blocks: float, result: Mapping[str, Any]) -> str:
    """Format a number of blocks and their bytes."""
    gigabytes = num_blocks * result["block_bytes"] / 1e9
    weight = f"{gigabytes:,.{0 if gigabytes >= 10 else 1}f}\N{NO-BREAK SPACE}GB"
    return f"{num_blocks:,.0f} block{'' if num_blocks == 1 else 's'} ({weight})"


def _less_memory(lru: Row, best: Row, result: Mapping[str, Any]) -> str | None:
    """Return a sentence, or None if LRU itself has that rate with less memory, which another sentence says."""
    saved, capacity = best["memory_saved"], lru["capacity"]
    if not _rate(lru):
        return _instead_of_nothing(best, size(capacity, result)) if _rate(best) else None
    if lru["memory_saved"] >= _WORTH_SAYING:
        return None
    if saved is None or saved < _WORTH_SAYING:
        return f"At {size(capacity, result)}, no simulated policy beats LRU's {_percent(_rate(lru))}."
    needed = best["capacity_for_lru_rate"]
    least = min(row["capacity"] for row in result["baselines"])
    guess = "" if needed >= least else f", an estimate: no capacity below {least:,} was simulated"
    return (
        f"At {size(capacity, result)}, {best['policy']} has the same hit rate as LRU "
        f"with {100 * saved:.0f}\N{NO-BREAK SPACE}% less memory: "
        f"{size(needed, result)} for {_percent(_rate(lru))}{guess}. "
        f"With all of it, {_percent(_rate(best))}."
    )


def _instead_of_nothing(best: Row, capacity: str) -> str:
    return f"At {capacity}, LRU has no hits, and {best['policy']} has {_percent(_rate(best))}."


def _best_overall(online: list[Row]) -> list[str]:
    """Name the policy with the highest mean share of the gap, and its deepest dip."""
    shares: dict[str, list[float]] = {}
    for row in online:
        if row["share_of_gap"] is not None:
            shares.setdefault(row["policy"], []).append(row["share_of_gap"])
    if not shares:
        return []
    means = {name: sum(each) / len(each) for name, each in shares.items()}
    name = max(means, key=means.__getitem__)
    if means[name] <= 0:
        return ["Over all capacities, LRU is the best simulated policy."]
    worst = min(
        (row for row in online if row["policy"] == name), key=lambda row: row["worst_slice"]["above_lru"]
    )
    dip = worst["worst_slice"]
    said = (
        f"Of the simulated policies, {name} closes the largest part of the gap from LRU to the optimum: "
        f"{_percent(means[name])} on average over all capacities."
    )
    if dip["above_lru"] < 0:
        said += (
            f" In its worst stretch, {dip['from_s']:,.0f}–{dip['to_s']:,.0f}\N{NO-BREAK SPACE}s "
            f"at {worst['capacity']:,} blocks, it is {-100 * dip['above_lru']:.1f} points below LRU."
        )
    return [said]


def _more_memory(lru: list[Row], best: Mapping[int, Row]) -> list[str]:
    """Name the step at which each doubling of memory gains most, and what the best policy gains there."""
    steps = [(row, more) for row, more in pairwise(lru) if row["capacity"] in best]
    if not steps:
        return []
    row, more = max(
        steps,
        key=lambda step: (_rate(step[1]) - _rate(step[0])) / log(step[1]["capacity"] / step[0]["capacity"]),
    )
    policy = best[row["capacity"]]
    return [
        f"More memory pays most from {row['capacity']:,} to {more['capacity']:,} blocks: "
        f"{100 * (_rate(more) - _rate(row)):.1f} points with LRU; at {row['capacity']:,}, "
        f"{policy['policy']} instead of LRU brings {100 * (_rate(policy) - _rate(row)):.1f}."
    ]


def _enough(lru: list[Row], result: Mapping[str, Any]) -> list[str]:
    """Name the capacity above which more memory gains little."""
    endless = result["endless_token_hit_rate"]
    for row in lru:
        if _rate(row) >= endless - _WORTH_SAYING:
            return [
                f"More than {size(row['capacity'], result)} brings little: LRU has {_percent(_rate(row))} there, "
                f"an endless cache would have {_percent(endless)}."
            ]
    return [
        f"An endless cache would have {_percent(endless)}, with {size(result['different_blocks'], result)}."
    ]
