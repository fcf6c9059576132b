"""The optimum equals exhaustive search, and no policy beats it."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from radixkv.config import policy_names
from radixkv.simulator.optimum import optimum
from radixkv.simulator.replay import replay
from radixkv.simulator.trace import Outcome, Trace, events
from tests.simulator.traces import FITTED, small

Blocks = frozenset[int]


def exhaustive(trace: Trace, capacity: int, *, bypass: bool) -> int:
    """Return the most hit blocks over every choice of blocks to keep, at every step."""
    paths = [trace.blocks[a:b].tolist() for a, b in zip(trace.starts, trace.starts[1:], strict=False)]
    prompts = [path[:size] for path, size in zip(paths, trace.num_prompt_blocks.tolist(), strict=True)]
    parents = {block: path[at - 1] if at else None for path in paths for at, block in enumerate(path)}
    steps = list(events(trace))

    def kept(resident: Blocks, used: list[int], forced: Blocks) -> list[Blocks]:
        """Return every set that may be resident after ``used`` was computed: no orphans, and no larger than fits."""
        free = sorted((resident | frozenset(used)) - forced)
        room = min(capacity - len(forced), len(free))
        sets = [forced | frozenset(some) for size in range(room + 1) for some in combinations(free, size)]
        return [
            each for each in sets if all(parents[block] in each or parents[block] is None for block in each)
        ]

    @cache
    def best(at: int, resident: Blocks, running: frozenset[int]) -> int:
        if at == len(steps):
            return 0
        number, ends = steps[at]
        leased = frozenset(block for each in running for block in prompts[each])
        if not ends:
            hits = next(
                (i for i, block in enumerate(prompts[number]) if block not in resident), len(prompts[number])
            )
            if bypass:
                return hits + max(
                    best(at + 1, each, running) for each in kept(resident, prompts[number], frozenset())
                )
            forced = leased | frozenset(prompts[number])
            if len(forced) > capacity:
                return best(at + 1, resident, running)
            after = kept(resident, prompts[number], forced)
            return hits + max(best(at + 1, each, running | {number}) for each in after)
        if not bypass and number not in running:
            return best(at + 1, resident, running)
        answer = paths[number][len(prompts[number]) :]
        forced = frozenset() if bypass else leased | frozenset(answer)
        if len(forced) > capacity:
            answer, forced = [], leased
        return max(best(at + 1, each, running - {number}) for each in kept(resident, answer, forced))

    return best(0, frozenset(), frozenset())


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_equals_exhaustive_search_with_leases(capacity: int) -> None:
    for seed in range(100):
        trace = small(seed)
        found = optimum(trace, capacity)
        assert int(found.hit_blocks.sum()) == exhaustive(trace, capacity, bypass=False), seed


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_equals_exhaustive_search_with_bypass(capacity: int) -> None:
    for seed in range(100):
        trace = small(seed, requests=10, lasting=False)
        found = optimum(trace, capacity, bypass=True)
        assert int(found.hit_blocks.sum()) == exhaustive(trace, capacity, bypass=True), seed
        assert found.refused == 0


@cache
def bests(seed: int) -> tuple[Trace, dict[int, Outcome]]:
    """A trace, and the optimum of each capacity: the same for every policy."""
    trace = small(seed, requests=40)
    return trace, {capacity: optimum(trace, capacity) for capacity in (2, 5, 9)}


@pytest.mark.slow
@pytest.mark.parametrize("policy", policy_names())
def test_no_policy_beats_it(policy: str) -> None:
    for seed in range(8 if policy in FITTED else 30):
        trace, by_capacity = bests(seed)
        for capacity, best in by_capacity.items():
            ours = replay(trace, policy, capacity)
            assert ours.hit_blocks.sum() <= best.hit_blocks.sum(), (seed, capacity)
            assert ours.refused == best.refused, (seed, capacity)


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_bypass_is_an_upper_bound_where_answers_come_late(capacity: int) -> None:
    for seed in range(40):
        trace = small(seed)
        found = optimum(trace, capacity, bypass=True)
        assert int(found.hit_blocks.sum()) >= exhaustive(trace, capacity, bypass=True), seed
        assert (found.hit_blocks <= trace.num_prompt_blocks).all()


def test_bypass_is_never_worse_when_nothing_lasts() -> None:
    for seed in range(60):
        trace = small(seed, requests=40, lasting=False)
        without, with_bypass = optimum(trace, 4), optimum(trace, 4, bypass=True)
        assert without.hit_blocks.sum() <= with_bypass.hit_blocks.sum()


def test_with_enough_capacity_everything_is_found() -> None:
    trace = small(1, requests=60, lasting=False)
    endless = trace.num_different_blocks
    assert optimum(trace, endless).evicted_blocks == 0
    assert optimum(trace, endless).hit_blocks.sum() == replay(trace, "lru", endless).hit_blocks.sum()
