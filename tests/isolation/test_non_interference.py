"""Two runs: the same calls of tenant A give A the same bytes with and without other tenants.

If the pool is large enough, everything that A observes is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixkv import CacheConfig, Namespace, OutOfBlocks, PrefixCache, Tenant, audit
from radixkv.audit import properties
from radixkv.audit.oracle import Engine, chain
from radixkv.audit.properties import CacheAdapter
from radixkv.config import Mode
from radixkv.errors import RadixKVError
from radixkv_policies import POLICIES, Policy
from tests.index.support import make_cache
from tests.isolation.lives import EXAMPLES, MOST_RUNS, SEED


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_observations_of_a_do_not_depend_on_b(stored: bool) -> None:
    """The two-run machine finds nothing, for both policies."""
    report = properties.run(
        PrefixCache,
        max(EXAMPLES // 10, 12),
        50,
        seed=2 * SEED + stored,
        machine=properties.TwoRuns,
        with_storage=[stored],
    )
    assert report.ok, report.failure


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_strict_tenants_observations_do_not_depend_on_others(policy: str) -> None:
    """Step for step, with storage and without.

    The others are strict, borrowing or unknown, and change while they run.
    """
    report = properties.run(
        PrefixCache,
        max(EXAMPLES // (5 * len(POLICIES)), 3),
        50,
        seed=SEED,
        policies=[policy],
        modes=["strict"],
        machine=properties.TwoRuns,
    )
    assert report.ok, report.failure


@pytest.mark.slow
def test_two_runs_make_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the machine is made, succeeds, and is refused where that is possible."""
    seen: Counter[str] = Counter()
    for name in CALLS:
        monkeypatch.setattr(CacheAdapter, name, _counted(name, getattr(CacheAdapter, name), seen))
    modes = ["burst", "strict"]
    wanted = CALLS | {"OutOfBlocks", "StaleGeneration"}
    for seed in range(
        6, 6 + MOST_RUNS
    ):  # until all of it has occurred: some of it is rare, and not from seed 6
        report = properties.run(PrefixCache, 40, 50, seed=seed, machine=properties.TwoRuns, modes=modes)
        assert report.ok, report.failure
        if wanted <= seen.keys():
            break
    assert wanted <= seen.keys(), wanted - seen.keys()


CALLS = {
    "open", "match", "commit", "append", "append_all", "truncate", "fork", "reorder", "lease", "end_lease", "release",
    "insert", "evict", "clear", "_purge", "_restart", "read", "stats",
}  # fmt: skip


def _counted(name: str, call: Callable[..., Any], seen: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        try:
            found = call(*args)
        except RadixKVError as error:
            seen.update([f"{name} refused", type(error).__name__])
            raise
        seen[name] += 1
        return found

    return counted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["strict", "burst"])
def test_a_flood_of_ten_times_the_capacity(policy: str, mode: Mode) -> None:
    """A strict tenant's hits do not change at all. A borrowing tenant keeps as many blocks as it is guaranteed."""
    hits = {flooded: _hits(policy, mode, flooded) for flooded in (False, True)}
    kept = {"strict": 12 * 4, "burst": 24 * 4}[mode]
    has_a_door = (
        POLICIES[policy].admit is not Policy.admit
    )  # declined blocks are never kept, with or without a flood
    assert sum(hits[False]) == kept or (has_a_door and 0 < sum(hits[False]) < kept)
    if mode == "strict":
        assert hits[True] == hits[False]
    else:
        assert sum(hits[True]) == 12 * 4


def _hits(policy: str, mode: Mode, flooded: bool) -> list[int]:
    """The matched tokens of each of A's prompts. A asked for more than its guarantee."""
    cache = make_cache(num_blocks=32, block_size=4, policy=policy, segment_tokens=4)
    cache.add_tenant(Tenant("a", guaranteed_blocks=12, mode=mode))
    cache.add_tenant(Tenant("b", weight=1e6))  # its share is everything that A is not guaranteed
    prompts = [[at, *range(11)] for at in range(8)]
    for prompt in prompts:
        _serve(cache, "a", prompt)
    for at in range(10 * 32 // 4 if flooded else 0):
        _serve(cache, "b", [at, *range(15)])
    audit.check(cache)
    return [cache.match(Namespace("a", "m"), prompt).num_tokens for prompt in prompts]


def _serve(cache: PrefixCache, tenant: str, prompt: list[int]) -> None:
    with cache.open(Namespace(tenant, "m"), prompt) as sequence:
        sequence.commit(len(prompt))


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_same_prompt_in_two_tenants_never_matches(policy: str) -> None:
    """B computes a prompt, and A gets nothing of it. B gets all of it again, or the test would be void."""
    cache = PrefixCache(CacheConfig(num_blocks=64, block_size=4, policy=policy))
    prompt = list(range(33))
    mine, theirs = Namespace("a", "m"), Namespace("b", "m")
    with cache.open(theirs, prompt) as sequence:
        sequence.commit(33)
    assert cache.match(mine, prompt).num_tokens == 0
    with cache.open(mine, prompt) as sequence:
        assert sequence.num_cached_tokens == 0
        assert not set(sequence.block_table) & set(cache.match(theirs, prompt).block_ids)
    assert cache.match(theirs, prompt).num_tokens == 32
    audit.check(cache)


@pytest.mark.parametrize(
    "other",
    [
        Namespace("a", "m", None, "s"),
        Namespace("a", "m", "s", ""),
        Namespace("a", "ms", None, ""),
        Namespace("am", "m", None, ""),
        Namespace("a", "M", None, ""),
        Namespace("a", "m", None, " "),
        Namespace("a", "m\x00", None, ""),
        Namespace("a", "m", "None", ""),
    ],
)
def test_look_alike_namespaces_never_match(other: Namespace) -> None:
    """Fields shifted into each other, case, white space, zero bytes, and a None that is a string."""
    cache = PrefixCache(CacheConfig(num_blocks=64, block_size=2))
    with cache.open(Namespace("a", "m"), [1, 2, 3, 4, 5]) as sequence:
        sequence.commit(5)
    assert cache.match(other, [1, 2, 3, 4, 5]).num_tokens == 0
    assert other.framed() != Namespace("a", "m").framed()
    audit.check(cache)


def test_a_flood_of_another_tenant_costs_hits_and_never_bytes() -> None:
    """B asks for ten times the pool. All blocks that A still matches afterwards are A's, bit for bit."""
    cache = PrefixCache(CacheConfig(num_blocks=32, block_size=4))
    engine, mine, theirs = Engine(cache), Namespace("a", "m"), Namespace("b", "m")
    prompts = [[tenth, *range(15)] for tenth in range(6)]
    for prompt in prompts:
        with cache.open(mine, prompt) as sequence:
            engine.write(sequence.block_table, 0, chain(mine, prompt))
            sequence.commit(16)
    for at in range(100):
        with cache.open(theirs, [at % 7, *range(at, at + 12)]) as sequence:
            cached = sequence.num_cached_tokens
            states = chain(theirs, sequence.token_ids.tolist())
            assert engine.holds(sequence.block_table, states[:cached])
            engine.write(sequence.block_table, cached, states[cached:])
            sequence.commit(13)
    matched = [cache.match(mine, prompt) for prompt in prompts]
    for prompt, match in zip(prompts, matched, strict=True):
        assert engine.holds(match.block_ids, chain(mine, prompt[: match.num_tokens]))
    assert 0 < sum(match.num_tokens for match in matched) < 96
    audit.check(cache)


def test_tenant_stats_show_nothing_of_other_tenants() -> None:
    """A's counts do not depend on B's calls, in a pool large enough for both."""
    seen = []
    for num_others in (0, 5):
        cache = PrefixCache(CacheConfig(num_blocks=512, block_size=4))
        for at in range(5):
            with cache.open(Namespace("a", "m"), [1, 2, 3, 4, at]) as sequence:
                sequence.commit(5)
            for other in range(num_others):
                with cache.open(Namespace(f"b{other}", "m"), [1, 2, 3, 4, at, other]) as sequence:
                    sequence.commit(5)
        seen.append((cache.tenant_stats("a"), cache.namespaces("a")))
        assert cache.tenant_stats("nobody").requests == 0
    assert seen[0] == seen[1]


def test_a_refusal_contains_only_counts_of_blocks() -> None:
    """An OutOfBlocks error contains numbers, but no tenant, namespace or id."""
    cache = PrefixCache(CacheConfig(num_blocks=2, block_size=4))
    with cache.open(Namespace("somebody-else", "m"), np.arange(8)), pytest.raises(OutOfBlocks) as error:
        cache.open(Namespace("a", "m"), [777_777])
    assert "somebody" not in str(error.value) and "777" not in str(error.value)
    audit.check(cache)
