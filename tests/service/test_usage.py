"""The arithmetic of reads, writes and uncached tokens, against a count token by token."""

from __future__ import annotations

import random

import pytest

from radixkv.errors import ArgumentError
from radixkv.metering.records import Counts
from radixkv.service.usage import TTL_1H, TTL_5M, Promise, usage_of


def by_token(num_tokens: int, num_cached: int, granted: list[Promise]) -> Counts:
    """The slow reference: one token after the other."""
    written: dict[int, int] = {}
    uncached = 0
    for token in range(num_cached, num_tokens):
        ttl_s = max((each.ttl_s for each in granted if each.num_tokens > token), default=0)
        if ttl_s:
            written[ttl_s] = written.get(ttl_s, 0) + 1
        else:
            uncached += 1
    return Counts(num_cached, written, uncached)


def test_10_000_random_requests_add_up_exactly() -> None:
    draw = random.Random(23)
    total, prompts = Counts(), 0
    for _ in range(10_000):
        num_tokens = draw.randint(1, 60)
        granted = [
            Promise(draw.randint(0, num_tokens), draw.choice((TTL_5M, TTL_1H, 1_800)))
            for _ in range(draw.randint(0, 4))
        ]
        num_cached = draw.choice((0, num_tokens, draw.randint(0, num_tokens)))
        found = usage_of(num_tokens, num_cached, granted)
        assert found == by_token(num_tokens, num_cached, granted), (num_tokens, num_cached, granted)
        assert found.num_prompt_tokens == num_tokens and all(found.written.values())
        total, prompts = total + found, prompts + num_tokens
    assert total.num_prompt_tokens == prompts


def test_a_longer_ttl_behind_covers_the_shorter_one_before() -> None:
    assert usage_of(100, 16, [Promise(32, TTL_5M), Promise(64, TTL_1H)]).written == {TTL_1H: 48}
    assert usage_of(100, 16, [Promise(32, TTL_1H), Promise(64, TTL_5M)]).written == {TTL_5M: 32, TTL_1H: 16}
    assert usage_of(100, 64, [Promise(64, TTL_1H)]) == Counts(64, {}, 36)


@pytest.mark.parametrize(("cached", "promise"), [(-1, 0), (101, 0), (0, 101), (0, -1)])
def test_impossible_counts_are_refused(cached: int, promise: int) -> None:
    with pytest.raises(ArgumentError):
        usage_of(100, cached, [Promise(promise, TTL_5M)])
