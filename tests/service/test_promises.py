"""Promises against a cache with a budget: TTLs are kept, holders of one pin don't end each other's time."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache, Tenant
from radixkv.errors import LeaseError
from radixkv.index.tokens import encode
from radixkv.service.promises import Kept, Promises
from radixkv.service.usage import TTL_1H, TTL_5M, Promise
from tests.waiting import ended, is_set

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
NS = Namespace("acme", "model")
BLOCK = 4
IDS = list(range(100, 140))
KEY = encode(IDS)


class World:
    """A cache of 64 blocks, in which acme may pin some, and its promises, on a clock that the test sets."""

    def __init__(self, budget: int = 16, max_pins: int = 64, abilities: tuple[str, ...] = ("pins",)) -> None:
        self.now = 1000.0
        config = CacheConfig(num_blocks=64, block_size=BLOCK, layout=LAYOUT, device="cpu", policy="lru")
        self.cache = PrefixCache(config, clock=lambda: self.now)
        self.cache.add_tenant(Tenant("acme", max_pinned_blocks=budget, max_pins=max_pins))
        engine = SimpleNamespace(
            cache=self.cache, abilities=abilities, limits=SimpleNamespace(block_size=BLOCK)
        )
        self.promises = Promises(cast(Any, engine), lambda: self.now)

    def compute(self, ids: list[int], namespace: Namespace = NS) -> None:
        with self.cache.open(namespace, ids) as sequence:
            sequence.commit(sequence.num_tokens)

    def flood(self, num: int = 300) -> None:
        """Other prompts, of many times the cache's capacity."""
        draw = random.Random(7)
        for _ in range(num):
            self.compute(
                [draw.randrange(5000, 9000) for _ in range(BLOCK * 4)],
                Namespace("acme", "model", salt="flood"),
            )

    def resident(self, ids: list[int] = IDS) -> int:
        return self.cache.match(NS, ids).num_tokens

    def ends(self) -> list[float]:
        return sorted(round(self.now + pin.ttl_s) for pin in self.cache.pins("acme"))


@pytest.fixture
def world() -> World:
    found = World()
    found.compute(IDS)
    return found


def test_a_ttl_is_kept_under_a_flood_and_then_over(world: World) -> None:
    kept = world.promises.keep(NS, KEY, [Promise(22, TTL_5M)])
    assert kept == Kept((Promise(20, TTL_5M),)) and kept.headers == {}
    world.flood()
    assert world.resident() == 20
    world.now += TTL_5M - 1
    world.flood()
    assert world.resident() == 20
    world.now += 2
    world.flood()
    assert world.resident() == 0


def test_a_short_ttl_never_ends_a_long_one(world: World) -> None:
    world.promises.keep(NS, KEY, [Promise(20, TTL_1H)])
    world.promises.keep(NS, KEY, [Promise(20, TTL_5M)])
    assert world.ends() == [1000 + TTL_1H]
    world.now += TTL_1H - 60
    world.promises.keep(NS, KEY, [Promise(20, TTL_5M)])
    assert world.ends() == [world.now + TTL_5M], "the short one goes on after the long one"


def test_a_longer_prefix_with_a_longer_ttl_needs_one_pin(world: World) -> None:
    kept = world.promises.keep(NS, KEY, [Promise(12, TTL_5M), Promise(40, TTL_1H)])
    assert kept.granted == (Promise(40, TTL_1H),) and len(world.cache.pins("acme")) == 1
    kept = world.promises.keep(NS, KEY, [Promise(12, TTL_1H), Promise(40, TTL_5M)])
    assert kept.granted == (Promise(40, TTL_5M), Promise(12, TTL_1H))


def test_beyond_the_budget_what_fits_is_promised_and_the_rest_refused() -> None:
    world = World(budget=4)
    world.compute(IDS)
    kept = world.promises.keep(NS, KEY, [Promise(40, TTL_5M), Promise(16, TTL_5M)])
    assert kept == Kept((Promise(16, TTL_5M),), "pin_budget_exceeded")
    assert kept.headers == {"x-cache-write-refused": "pin_budget_exceeded"}
    assert world.cache.tenant_stats("acme").pinned_blocks == 4


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_pins": 0}, "pin_limit_exceeded"),
        ({"budget": 0}, "pin_budget_exceeded"),
        ({"abilities": ()}, "not_supported"),
    ],
)
def test_a_refusal_has_a_reason(limits: dict[str, Any], reason: str) -> None:
    world = World(**limits)
    world.compute(IDS)
    assert world.promises.keep(NS, KEY, [Promise(40, TTL_5M)]) == Kept((), reason)
    assert world.promises.keep(NS, KEY, [Promise(3, TTL_5M)]) == Kept(), "less than a block is nothing"


def test_what_isnt_resident_is_not_promised(world: World) -> None:
    assert world.promises.keep(NS, encode(range(40)), [Promise(40, TTL_5M)]) == Kept((), "not_resident")


def test_holders_leave_the_pin_to_each_other(world: World) -> None:
    own = world.promises.hold("pin", NS, KEY, 60)
    world.promises.keep(NS, KEY, [Promise(40, TTL_5M)])
    assert world.ends() == [1000 + TTL_5M]
    world.promises.hold("pin", NS, KEY, 5)
    assert world.ends() == [1000 + TTL_5M], "a shorter pin doesn't end the promise"
    world.promises.release("pin", NS, KEY, own)
    assert world.ends() == [1000 + TTL_5M]
    world.promises.release(f"promise-{TTL_5M}", NS, KEY, own)
    assert world.ends() == []
    with pytest.raises(LeaseError):
        world.promises.release("pin", NS, KEY, own)


@pytest.mark.parametrize("end", ["unpin", "clear", "purge"])
def test_after_a_deletion_old_promises_count_no_more(world: World, end: str) -> None:
    world.promises.keep(NS, KEY, [Promise(40, TTL_1H)])
    (pin,) = world.cache.pins("acme")
    call = {
        "unpin": lambda: world.cache.unpin(pin),
        "clear": lambda: world.cache.clear(NS),
        "purge": lambda: world.cache.purge("acme"),
    }[end]
    call()
    assert world.ends() == []
    world.compute(IDS)
    world.promises.hold("pin", NS, KEY, 60)
    assert world.ends() == [1060]


def test_what_is_over_is_forgotten(world: World) -> None:
    for number in range(500):
        ids = [number + 200, *range(3)]
        world.compute(ids)
        world.promises.keep(NS, encode(ids), [Promise(BLOCK, TTL_5M)])
        world.now += TTL_5M
    assert len(world.promises._tenants["acme"].shares) < 100


class Promised:
    """Tenants that promise prefixes within their budgets, on one cache that all of them overfill."""

    def __init__(self, policy: str, seed: int) -> None:
        self.draw, self.now = random.Random(seed), 0.0
        config = CacheConfig(num_blocks=256, block_size=BLOCK, layout=LAYOUT, device="cpu", policy=policy)
        self.cache = PrefixCache(config, clock=lambda: self.now)
        for name in self.tenants:
            mode = "strict" if name.startswith("strict") else "burst"
            self.cache.add_tenant(Tenant(name, guaranteed_blocks=32, mode=mode, max_pinned_blocks=16))
        engine = SimpleNamespace(
            cache=self.cache, abilities=("pins",), limits=SimpleNamespace(block_size=BLOCK)
        )
        self.promises = Promises(cast(Any, engine), lambda: self.now)
        self.standing: dict[tuple[Namespace, tuple[int, ...]], float] = {}
        self.num_granted = self.num_fitting = self.num_early = self.num_blocks = 0

    @property
    def tenants(self) -> list[str]:
        return [f"{mode}-{number}" for mode in ("strict", "burst") for number in range(4)]

    def request(self) -> None:
        """One request, with a breakpoint in a third of them. The promise is made while the request runs."""
        self.now += self.draw.random()
        ns = Namespace(self.draw.choice(self.tenants), "model")
        shared = [self.draw.randrange(3)] * (BLOCK * self.draw.randint(0, 2))
        ids = [*shared, *(self.draw.randrange(5000, 9000) for _ in range(BLOCK * self.draw.randint(1, 4)))]
        with self.cache.open(ns, ids) as sequence:
            sequence.commit(sequence.num_tokens)
            self.num_blocks += sequence.num_blocks
            if self.draw.random() < 0.3:
                self.promise(ns, tuple(ids))

    def promise(self, ns: Namespace, ids: tuple[int, ...]) -> None:
        pinned = self.cache.tenant_stats(ns.tenant).pinned_blocks
        does_fit = pinned + len(ids) // BLOCK <= 16
        kept = self.promises.keep(ns, encode(ids), [Promise(len(ids), TTL_5M)])
        self.num_fitting += does_fit
        self.num_granted += does_fit and bool(kept.granted)
        for each in kept.granted:
            self.standing[ns, ids[: each.num_tokens]] = self.now + each.ttl_s

    def check(self) -> None:
        """Count promises whose prefix is gone before its end, and forget those that are over."""
        for (ns, ids), end in list(self.standing.items()):
            if end <= self.now:
                del self.standing[ns, ids]
            elif self.cache.match(ns, ids).num_tokens < len(ids):
                self.num_early += 1


@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_promises_of_many_tenants_hold_under_ten_times_the_capacity(policy: str) -> None:
    world = Promised(policy, seed=23)
    while world.num_blocks < 10 * 256:
        world.request()
        world.check()
    assert world.num_fitting > 50 and world.num_early == 0
    assert world.num_granted >= 0.95 * world.num_fitting


def test_a_pin_that_takes_long_holds_up_no_other_tenant(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in another process may answer late."""
    other, pin = Namespace("globex", "model"), world.cache.pin
    world.cache.add_tenant(Tenant("globex", max_pinned_blocks=16, max_pins=8))
    world.compute(IDS, other)
    is_asked, may_answer = threading.Event(), threading.Event()

    def late(namespace: Namespace, key: bytes, ttl_s: float, *, as_of: int | None) -> Any:
        if namespace == NS:
            is_asked.set()
            is_set(may_answer)
        return pin(namespace, key, ttl_s)

    monkeypatch.setattr(world.promises, "_engine", SimpleNamespace(cache=SimpleNamespace(pin=late)))
    slow = threading.Thread(target=world.promises.hold, args=("a", NS, KEY, 60.0))
    slow.start()
    try:
        is_set(is_asked)
        assert world.promises.hold("b", other, KEY, 60.0).num_tokens == len(IDS)
    finally:
        may_answer.set()
        ended(slow)
    assert len(world.cache.pins("acme")) == len(world.cache.pins("globex")) == 1
