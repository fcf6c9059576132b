"""``as_of``: a request that waited is refused if what it belongs to was forgotten meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from radixkv import ArgumentError, CacheConfig, Namespace, PrefixCache, StaleGeneration, Tenant, audit
from radixkv.index.endings import Endings

ACME = Namespace("acme", "m", "lora", "s")
OTHERS = [
    Namespace("globex", "m", "lora", "s"),
    Namespace("acme", "m", None, "t"),
    Namespace("acme", "n", "adapter", ""),
]
IDS = range(40)


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    made = PrefixCache(CacheConfig(64, 4))
    for name in ("acme", "globex"):
        made.add_tenant(Tenant(name, incarnation="first"))
    yield made
    audit.check(made)


Ending = Callable[[PrefixCache], object]
ENDINGS: list[Ending] = [
    lambda cache: cache.purge("acme"),
    lambda cache: cache.clear(ACME),
    lambda cache: cache.remove_tenant("acme"),
    lambda cache: cache.add_tenant(Tenant("acme", incarnation="second")),
    lambda cache: cache.endings.end_waiting("acme"),
    lambda cache: cache.endings.end_waiting("acme", salt="s"),
    lambda cache: cache.endings.end_waiting("acme", adapter="lora"),
    lambda cache: cache.endings.end_waiting("acme", salt="s", adapter="lora"),
]
WHOLE = {0, 2, 3, 4}
"""Endings of all namespaces of the tenant."""


@pytest.mark.parametrize("which", range(len(ENDINGS)))
def test_a_request_that_came_before_is_refused(cache: PrefixCache, which: int) -> None:
    as_of = cache.endings.num
    ENDINGS[which](cache)
    assert cache.endings.num > as_of
    for begin in (
        lambda: cache.open(ACME, IDS, as_of=as_of),
        lambda: cache.open(ACME, range(40_000), as_of=as_of),
        lambda: cache.publish("base", ACME, IDS, ["globex"], as_of=as_of),
        lambda: cache.pin(ACME, IDS, 60, as_of=as_of),
        lambda: cache.endings.require_current(ACME, as_of),
    ):
        with pytest.raises((StaleGeneration, ArgumentError) if which == 2 else StaleGeneration):
            begin()
    assert cache.free_blocks == 64 and not cache.bases()
    for other in OTHERS:
        if other.tenant == "acme" and which in WHOLE:
            with pytest.raises(StaleGeneration):
                cache.endings.require_current(other, as_of)
        else:
            cache.open(other, IDS, as_of=as_of).release()
    if which in (0, 2, 3):
        with pytest.raises(StaleGeneration):
            cache.endings.require_current("acme", as_of)
    else:
        cache.endings.require_current("acme", as_of)
    cache.endings.require_current("globex", as_of)
    cache.open(ACME, IDS, as_of=cache.endings.num).release()
    cache.open(ACME, IDS).release()


def test_the_first_request_of_an_unknown_tenant_is_refused_after_a_purge() -> None:
    cache, ns = PrefixCache(CacheConfig(16, 4)), Namespace("new", "m")
    as_of = cache.endings.num
    cache.purge("new")
    with pytest.raises(StaleGeneration):
        cache.open(ns, IDS, as_of=as_of)
    cache.open(ns, IDS).release()


def test_endings_are_bounded_and_what_waited_longer_is_refused() -> None:
    ended = Endings(most=8)
    for number in range(9):
        ended.end_namespace(Namespace("globex", "m", None, f"{number}"))
    with pytest.raises(StaleGeneration):
        ended.require_current(OTHERS[0], 0)
    ended.require_current(OTHERS[0], 1)
    ended.require_current(ACME, 0)  # what another tenant clears ends nothing of it


@pytest.mark.parametrize("value", [-1, 1.0, "1", True])
def test_as_of_is_a_count(cache: PrefixCache, value: object) -> None:
    with pytest.raises(ArgumentError, match="as_of"):
        cache.open(ACME, IDS, as_of=value)  # type: ignore[arg-type]
