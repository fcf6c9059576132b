"""Durations are counted in cumulative buckets, each with its bound."""

from __future__ import annotations

from math import inf, nextafter

from radixkv.tiers.disk.durations import BOUNDS_S, Durations


def test_a_bucket_counts_all_that_took_no_longer_than_its_bound() -> None:
    durations = Durations()
    assert durations.count == 0 and [count for _, count in durations.buckets()] == [0] * (len(BOUNDS_S) + 1)
    for seconds in (0.0, 0.01, nextafter(0.01, 1), 5.0, 60.0):
        durations.add(seconds)
    found = dict(durations.buckets())
    assert list(found) == [*BOUNDS_S, inf] and durations.count == found[inf] == 5
    assert [found[bound] for bound in (BOUNDS_S[0], 0.005, 0.01, 0.025, 2.5, 5.0)] == [1, 1, 2, 3, 3, 4]
    assert durations.seconds == 0.01 + nextafter(0.01, 1) + 65.0
