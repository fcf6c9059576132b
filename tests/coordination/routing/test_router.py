"""The router ranks replicas by their blocks, their load and the latest requests, with its own clock."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.clock import ManualClock
from radixkv.coordination import Load, Router, connect
from radixkv.coordination.coordinator import Coordinator
from radixkv.coordination.keys import SEGMENT_TOKENS, FleetKeys
from radixkv.coordination.routing.costs import COSTS, Facts
from radixkv.coordination.routing.replica_sources import Generations, LocalSource, Observer
from radixkv.coordination.routing.router import Predicted, Predictions
from radixkv.coordination.store.memory import MemoryStore
from radixkv.coordination.values import MAX_AMOUNT
from radixkv.errors import ArgumentError, ConfigError, StoreUnavailable, TokenError
from radixkv.index import tokens
from tests.coordination import signed
from tests.redis_server import free_port
from tests.waiting import ended, is_set

SECRET = b"the secret of this fleet"
ACME = Namespace("acme", "fp")
LEASE_S = 90.0


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 32_000, num_tokens, dtype=np.uint32)


class Fleet:
    """Replicas on one memory store, and a router. Time passes and messages move only in ``settle``."""

    def __init__(self, *names: str) -> None:
        self.clock = ManualClock(100.0)
        self.store = MemoryStore(self.clock)
        self.replicas: dict[str, tuple[Coordinator, PrefixCache]] = {}
        for name in names:
            self.join(name)
        self.source = Observer(self.store, SECRET, clock=self.clock, background=False)
        self.router = Router(self.source, seed=0)

    def join(self, name: str, fingerprint: str = "fp") -> Coordinator:
        replica = connect(
            None,
            replica_id=name,
            fleet_secret=SECRET,
            fingerprint=fingerprint,
            block_size=16,
            address=f"http://{name}",
            lease_s=LEASE_S,
            background=False,
            store=self.store,
        )
        assert isinstance(replica, Coordinator)
        replica.register()
        self.replicas[name] = replica, PrefixCache(CacheConfig(num_blocks=4096), journal=replica.journal)
        return replica

    def hold(self, name: str, ids: np.ndarray[Any, Any], namespace: Namespace = ACME) -> None:
        with self.replicas[name][1].open(namespace, ids) as sequence:
            sequence.commit(len(ids))

    def load(self, name: str, queued: int = 0, decode: int = 0) -> None:
        self.replicas[name][0].report_load(Load(queued, decode))

    def settle(self) -> None:
        for replica, _ in self.replicas.values():
            replica.beat()
            replica.publish()
        self.source.poll()

    def best(self, ids: np.ndarray[Any, Any], **options: Any) -> str:
        return self.router.rank(ACME, ids, **options)[0].replica.id


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet("a", "b", "c")
    yield made
    for replica, _ in made.replicas.values():
        replica.close()
    made.router.close()


def test_versions_of_the_weights_are_not_mixed(fleet: Fleet) -> None:
    """A replica counts as holding what it computed with the weights of the prompt's namespace, and nothing else."""
    ids, new = prompt(8192), ACME._replace(weights=1)
    fleet.hold("a", ids)
    fleet.hold("b", ids[:4096], new)
    fleet.replicas["b"][0].report_weights(1)
    fleet.settle()

    def held(namespace: Namespace, tier: str = "device") -> dict[str, int]:
        ranked = fleet.router.rank(namespace, ids)
        return {each.replica.id: each.matched_tokens.get(tier, 0) for each in ranked}

    assert held(ACME) == {"a": 8192, "b": 0, "c": 0}
    assert held(new) == {"a": 0, "b": 4096, "c": 0}
    assert held(ACME._replace(weights=2)) == {"a": 0, "b": 0, "c": 0}
    assert {each.info.id: each.info.weights for each in fleet.source.members()} == {"a": 0, "b": 1, "c": 0}
    assert (fleet.router.newest_weights("fp"), fleet.router.newest_weights("none")) == (1, 0)
    fleet.router.routed(ACME, ids, "c")
    assert (held(ACME, "predicted")["c"], held(new, "predicted")["c"]) == (8192, 0)


def test_the_longest_match_wins_until_its_load_weighs_more(fleet: Fleet) -> None:
    ids = prompt(8192)
    fleet.hold("b", ids)
    fleet.hold("c", ids[:4096])
    fleet.settle()
    found = fleet.router.rank(ACME, ids)
    assert [(each.replica.id, each.matched_tokens["device"], each.cost) for each in found] == [
        ("b", 8192, 0.0),
        ("c", 4096, 4096.0),
        ("a", 0, 8192.0),
    ]
    assert "holds 8192 of 8192 tokens" in found[0].why and found[0].replica.address == "http://b"
    assert len(fleet.router.rank(ACME, ids, limit=2)) == 2
    fleet.load("b", queued=5000, decode=3)
    fleet.settle()
    again = fleet.router.rank(ACME, ids)
    assert [(each.replica.id, each.cost) for each in again] == [("c", 4096.0), ("b", 5003.0), ("a", 8192.0)]
    assert again[1].load == Load(5000, 3)


def test_ignore_load_hides_the_load_of_other_tenants(fleet: Fleet) -> None:
    ids = prompt(1024)
    fleet.hold("b", ids)
    fleet.settle()
    quiet = [(each.replica.id, each.cost) for each in fleet.router.rank(ACME, ids, ignore_load=True)]
    fleet.load("b", queued=50_000, decode=300)
    fleet.settle()
    fleet.router.routed(ACME, prompt(2048, seed=1), "b")
    assert fleet.best(ids) != "b"
    for cost in ("linear", "lmetric", "threshold", "stddev"):
        assert fleet.best(ids, cost=cost, ignore_load=True) == "b"
    busy = [(each.replica.id, each.cost) for each in fleet.router.rank(ACME, ids, ignore_load=True)]
    assert sorted(busy) == sorted(quiet) and busy[0] == quiet[0]
    in_turn = Counter(fleet.best(ids, cost="round_robin", ignore_load=True) for _ in range(60))
    assert set(in_turn) == {"a", "b", "c"} and max(in_turn.values()) > 20, "at random, not in turn"


def test_namespaces_and_models_are_separate(fleet: Fleet) -> None:
    ids = prompt(1024)
    fleet.join("d", fingerprint="other model")
    fleet.hold("a", ids)
    fleet.hold("d", ids, Namespace("acme", "other model"))
    fleet.settle()
    assert sum(fleet.router.rank(ACME, ids)[0].matched_tokens.values()) == 1024
    others = fleet.router.rank(Namespace("globex", "fp"), ids)
    assert len(others) == 3 and not any(sum(each.matched_tokens.values()) for each in others)
    assert [each.replica.id for each in fleet.router.rank(Namespace("acme", "other model"), ids)] == ["d"]
    assert fleet.router.rank(Namespace("acme", "no model"), ids) == []


def test_a_killed_replica_is_ranked_until_its_lease_ends(fleet: Fleet) -> None:
    ids = prompt(1024)
    fleet.hold("a", ids)
    fleet.settle()
    fleet.clock.advance(LEASE_S - 0.01)
    assert fleet.best(ids) == "a", "no beat arrived, but all leases are valid"
    for name in ("b", "c"):
        fleet.replicas[name][0].beat()
    fleet.source.poll()
    fleet.clock.advance(0.02)
    assert {each.replica.id for each in fleet.router.rank(ACME, ids)} == {"b", "c"}
    fleet.replicas["a"][0].register()
    fleet.settle()
    assert fleet.best(ids) == "a", "a returning replica reports what it has"


def test_the_router_ranks_by_load_without_the_store(fleet: Fleet) -> None:
    ids = prompt(1024)
    fleet.hold("a", ids)
    fleet.load("a", queued=100)
    fleet.load("b", queued=10)
    fleet.load("c", queued=50)
    fleet.settle()
    fleet.store.is_reachable = False
    fleet.source.poll()
    assert fleet.best(ids) == "a" and fleet.source.is_lost, "replicas with valid leases are known"
    fleet.clock.advance(LEASE_S + 1)
    fleet.source.poll()
    found = fleet.router.rank(ACME, ids)
    assert [each.replica.id for each in found] == ["b", "c", "a"]
    assert not any(sum(each.matched_tokens.values()) for each in found)
    assert found[0].why.startswith("least_loaded")
    fleet.store.lose()
    fleet.store.is_reachable = True
    fleet.source.poll()
    assert fleet.best(ids) == "b", "a store that restarted empty does not mean that all replicas are dead"
    fleet.settle()
    assert fleet.best(ids) == "a" and not fleet.source.is_lost


def test_a_stalled_store_counts_as_lost_before_its_client_times_out(fleet: Fleet) -> None:
    """So the router always ranks some replica, also between the end of the last lease and the client's timeout."""
    fleet.settle()
    asked, go_on = threading.Event(), threading.Event()

    class Paused(MemoryStore):
        def fetch(self, replica_ids: Any = None) -> Any:
            asked.set()
            is_set(go_on)
            return super().fetch(replica_ids)

    fleet.store.__class__ = Paused
    polling = threading.Thread(target=fleet.source.poll)
    polling.start()
    is_set(asked)
    fleet.clock.advance(LEASE_S - 1)
    assert fleet.source.is_lost and fleet.router.rank(ACME, prompt(512)) and not fleet.router.is_blind
    fleet.clock.advance(1.1)
    assert len(fleet.router.rank(ACME, prompt(512))) == 3 and fleet.router.is_blind
    go_on.set()
    ended(polling)
    assert not fleet.source.is_lost and fleet.router.rank(ACME, prompt(512)) == []


def test_a_lost_store_is_reported_before_any_replica_is_known(fleet: Fleet) -> None:
    store = MemoryStore(fleet.clock)
    store.is_reachable = False
    source = Observer(store, SECRET, clock=fleet.clock, background=False)
    for _ in range(20):
        assert source.is_lost, "also between two fetches"
        fleet.clock.advance(0.3)
        with suppress(StoreUnavailable):
            source.reader.poll()
    store.is_reachable = True
    fleet.clock.advance(1.0)
    source.poll()
    assert not source.is_lost and not source.members()


def test_a_replica_that_leaves_is_no_longer_ranked(fleet: Fleet) -> None:
    fleet.settle()
    for name in ("a", "b", "c"):
        fleet.replicas[name][0].leave()
    fleet.source.poll()
    assert fleet.router.rank(ACME, prompt(512)) == [] and not fleet.source.is_lost


def test_a_replica_that_drains_is_no_longer_ranked(fleet: Fleet) -> None:
    fleet.settle()
    fleet.replicas["b"][0].drain()
    fleet.source.poll()
    assert sorted(each.replica.id for each in fleet.router.rank(ACME, prompt(512))) == ["a", "c"]


def test_equal_prompts_go_to_one_replica_before_its_first_event(fleet: Fleet) -> None:
    ids = prompt(1024)
    fleet.settle()
    fleet.router.routed(ACME, ids, "c")
    first = fleet.router.rank(ACME, ids)[0]
    assert (first.replica.id, first.matched_tokens["predicted"], first.load) == (
        "c",
        1024,
        Load(1024, queued_cold_tokens=1024),
    )
    assert "1024 more predicted" in first.why
    assert {fleet.best(prompt(2048, seed)) for seed in range(1, 21)} == {"a", "b"}, "c is busy"
    fleet.clock.advance(5.1)
    fleet.settle()
    assert "predicted" not in fleet.router.rank(ACME, ids)[0].matched_tokens
    assert len({fleet.best(prompt(2048, seed)) for seed in range(40)}) == 3


@pytest.mark.parametrize("cost", ["linear", "lmetric"])
@pytest.mark.parametrize("num_tokens", [300, 640, 1024, 8000])
def test_a_burst_of_siblings_goes_to_one_replica(fleet: Fleet, cost: str, num_tokens: int) -> None:
    """This holds for any length of the last partial segment, and for any text after the shared prefix."""
    for name in "abc":
        fleet.load(name, queued=500, decode=7)
    fleet.settle()
    shared = prompt(num_tokens)
    chosen = Counter[str]()
    for number in range(4):
        ids = np.concatenate([shared, prompt(20, seed=number)])
        best = fleet.best(ids, cost=cost)
        fleet.router.routed(ACME, ids, best)
        chosen[best] += 1
    assert len(chosen) == 1
    others = Counter(fleet.best(prompt(num_tokens, seed), cost=cost) for seed in range(100, 140))
    assert len(others) == 2 and not others & chosen, "other prompts go to less loaded replicas"
    fleet.load(best, queued=500 + num_tokens, decode=7)
    fleet.clock.advance(2.0)
    fleet.settle()
    assert fleet.best(shared, cost=cost) == best, "the replica has reported them and computes the prefix"
    fleet.load(best, queued=500 + 3 * num_tokens, decode=7)
    fleet.settle()
    assert fleet.best(shared, cost=cost) != best, "a queue longer than the prefix outweighs it"


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 640, 8191])
def test_a_repeated_prompt_stays_on_its_replica(fleet: Fleet, num_tokens: int) -> None:
    ids, other = prompt(num_tokens), Namespace("globex", "fp")
    fleet.settle()
    best = fleet.best(ids)
    for _ in range(12):
        fleet.router.routed(ACME, ids, best)
        first = fleet.router.rank(ACME, ids)[0]
        assert first.replica.id == best and first.load == Load(num_tokens, queued_cold_tokens=num_tokens), (
            "the prompt is computed once"
        )
        assert first.matched_tokens["predicted"] == num_tokens
    longer = {each.replica.id: each for each in fleet.router.rank(ACME, np.append(ids, 7))}[best]
    assert longer.matched_tokens.get("predicted", 0) == num_tokens // 256 * 256
    assert not any("predicted" in each.matched_tokens for each in fleet.router.rank(other, ids))
    fleet.hold(best, ids)
    fleet.settle()
    held = {each.replica.id: each for each in fleet.router.rank(ACME, ids)}[best].matched_tokens
    assert sum(held.values()) == num_tokens and held["device"] == num_tokens // 256 * 256


def test_a_prompt_that_goes_first_does_not_avoid_a_queue_of_cold_ones(fleet: Fleet) -> None:
    ids = prompt(4096)
    fleet.hold("a", ids[:3072])
    for queued_cold, best in ((8_000, {"a"}), (4_000, {"b", "c"})):
        fleet.replicas["a"][0].report_load(Load(8_000, queued_cold_tokens=queued_cold))
        fleet.settle()
        assert {fleet.best(ids, cost="linear") for _ in range(20)} == best
        assert {fleet.best(prompt(4096, 1)) for _ in range(20)} == {"b", "c"}, "a cold prompt waits for all"
        assert {fleet.best(ids, cost="least_loaded") for _ in range(20)} == {"b", "c"}


def test_cold_prompts_that_were_just_sent_let_a_whole_one_go_first(fleet: Fleet) -> None:
    ids = prompt(4096)
    fleet.hold("a", ids[:3072])
    fleet.settle()
    fleet.router.routed(ACME, prompt(8192, 1), "a")
    (first, *_) = fleet.router.rank(ACME, ids)
    assert first.replica.id == "a" and first.cost == 1024
    assert first.load == Load(8192, queued_cold_tokens=8192)
    fleet.router.routed(ACME, ids, "a")
    (first, *_) = fleet.router.rank(ACME, ids)
    assert first.cost == 0, "all of it was sent there, and a prompt doesn't wait for its own prefix"


def test_least_loaded_ignores_predicted_prefixes(fleet: Fleet) -> None:
    ids = prompt(2048)
    fleet.settle()
    fleet.router.routed(ACME, ids, "c")
    assert {fleet.best(ids, cost="least_loaded") for _ in range(20)} == {"a", "b"}
    assert {fleet.best(ids, cost=cost) for cost in ("linear", "lmetric", "threshold", "stddev")} == {"c"}


def test_predictions_for_a_replica_end_when_it_restarts(fleet: Fleet) -> None:
    ids = prompt(2048)
    fleet.settle()
    fleet.router.routed(ACME, ids, "a")
    (sent, _, _) = fleet.router.rank(ACME, ids)
    assert sent.replica.id == "a" and sent.matched_tokens["predicted"] == 2048
    fleet.clock.advance(1.0)
    fleet.replicas["a"][0].close()
    fleet.join("a")
    fleet.settle()
    restarted = {each.replica.id: each for each in fleet.router.rank(ACME, ids)}["a"]
    assert "predicted" not in restarted.matched_tokens and restarted.cost == 2048.0
    assert restarted.load == Load()
    fleet.router.routed(ACME, ids, "gone")
    assert fleet.router.predicted_bytes > 0, "predictions are kept for a while, even for an unknown replica"


def test_a_newer_load_report_replaces_predictions(fleet: Fleet) -> None:
    ids = prompt(1024)
    fleet.settle()
    fleet.router.routed(ACME, ids, "a")
    fleet.clock.advance(2)
    assert max(each.load.queued_prefill_tokens for each in fleet.router.rank(ACME, ids)) == 1024
    fleet.settle()
    assert max(each.load.queued_prefill_tokens for each in fleet.router.rank(ACME, ids)) == 0


def test_ties_are_broken_at_random_and_heat_spreads(fleet: Fleet) -> None:
    ids = prompt(1024)
    fleet.settle()
    ties = Counter(fleet.best(ids) for _ in range(300))
    assert set(ties) == {"a", "b", "c"} and min(ties.values()) > 50
    fleet.hold("a", ids)
    fleet.settle()
    assert Counter(fleet.best(ids) for _ in range(50)) == {"a": 50}
    warm = Counter(fleet.best(ids, temperature=1.0) for _ in range(300))
    assert len(warm) == 3 and warm["a"] == max(warm.values())
    assert Counter(fleet.best(ids, temperature=1e-3) for _ in range(50)) == {"a": 50}


def test_round_robin_takes_each_in_turn(fleet: Fleet) -> None:
    fleet.settle()
    picked = [fleet.best(prompt(600), cost="round_robin") for _ in range(6)]
    assert len(set(picked[:3])) == 3 and picked[:3] == picked[3:]
    assert len({fleet.best(prompt(600), cost="random") for _ in range(40)}) == 3


def test_matches_in_slower_tiers_weigh_less(fleet: Fleet) -> None:
    view, members = fleet.source.view, None
    ids = prompt(1024)
    fleet.hold("a", ids)
    fleet.settle()
    members = {each.info.id: each for each in fleet.source.members()}
    column = members["a"].column
    keys = fleet.source.keys
    digests = b"".join(keys.digests(ACME, ids.tobytes()))
    view.load(
        column, [(keys.namespace(ACME), "host", digests[:32]), (keys.namespace(ACME), "disk", digests[32:48])]
    )
    found = fleet.router.rank(ACME, ids)[0]
    assert found.matched_tokens == {"device": 256, "host": 512, "disk": 256}
    assert found.cost == 1024 - (256 + 0.75 * 512 + 0.25 * 256)


def test_a_purged_tenant_matches_nothing(fleet: Fleet) -> None:
    ids = prompt(1024)
    fleet.hold("a", ids)
    fleet.settle()
    assert sum(fleet.router.rank(ACME, ids)[0].matched_tokens.values()) == 1024
    signed.raise_generation(fleet.store, fleet.source.keys, fleet.source.keys.tenant("acme"))
    fleet.source.poll()
    fleet.router.rank(ACME, ids)
    fleet.source.poll()
    assert not any(sum(each.matched_tokens.values()) for each in fleet.router.rank(ACME, ids))


def test_a_router_inside_a_replica_asks_its_own_cache(fleet: Fleet) -> None:
    replica, cache = fleet.replicas["a"]
    router = Router(
        LocalSource(replica, lambda namespace, key: cache.match(namespace, key).num_tokens), seed=0
    )
    ids = prompt(1040)
    fleet.hold("a", ids)
    fleet.hold("b", ids[:512])
    fleet.settle()
    replica.reader.refresh()
    found = {each.replica.id: each.matched_tokens["device"] for each in router.rank(ACME, ids)}
    assert found == {"a": 1040, "b": 512, "c": 0}
    replica.report_load(Load(7))
    assert router.rank(ACME, ids, cost="least_loaded")[-1].replica.id == "a"
    replica.drain()
    assert {each.replica.id for each in router.rank(ACME, ids)} == {"b", "c"}, "nor does it rank itself then"


def test_a_replica_hears_of_the_prompts_that_are_sent_to_it(fleet: Fleet) -> None:
    """Not of those that are only ranked, nor of those that others get."""
    replica, heard = fleet.replicas["a"][0], list[tuple[Namespace, bytes]]()
    source = LocalSource(
        replica, lambda namespace, key: 0, lambda namespace, key: heard.append((namespace, key))
    )
    router, ids = Router(source, seed=0), prompt(300)
    fleet.settle()
    replica.reader.refresh()
    assert {each.replica.id for each in router.rank(ACME, ids)} == {"a", "b", "c"}
    for name in ("b", "nobody"):
        router.routed(ACME, ids, name)
    with pytest.raises(TokenError):
        router.routed(ACME, [-1], "a")
    assert heard == []
    router.routed(ACME, ids, "a")
    assert heard == [(ACME, tokens.encode(ids))]


def test_a_router_inside_a_replica_falls_back_to_load_too(fleet: Fleet) -> None:
    """Otherwise clients of this replica would send it everything while the store is lost."""
    replica, cache = fleet.replicas["a"]
    router = Router(
        LocalSource(replica, lambda namespace, key: cache.match(namespace, key).num_tokens), seed=0
    )
    ids = prompt(1024)
    fleet.hold("a", ids)
    fleet.load("a", queued=100)
    fleet.load("b", queued=10)
    fleet.settle()
    replica.reader.refresh()
    fleet.store.is_reachable = False
    with pytest.raises(StoreUnavailable):
        replica.reader.refresh()
    assert router.rank(ACME, ids)[0].replica.id == "a" and not router.is_blind, (
        "the leases of the others are valid"
    )
    fleet.clock.advance(LEASE_S + 1)
    found = router.rank(ACME, ids)
    assert [each.replica.id for each in found] == ["c", "b", "a"] and router.is_blind
    fleet.store.is_reachable = True
    fleet.settle()
    replica.reader.refresh()
    assert router.rank(ACME, ids)[0].replica.id == "a" and not router.is_blind


def test_invalid_settings_are_named(fleet: Fleet) -> None:
    ids = prompt(16)
    for wrong in ({"cost": "cheap"}, {"temperature": -1.0}, {"temperature": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            fleet.router.rank(ACME, ids, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="limit"):
        fleet.router.rank(ACME, ids, limit=0)
    with pytest.raises(ConfigError, match="tier_weights"):
        Router(fleet.source, tier_weights={"device": 1.0})
    with pytest.raises(ConfigError, match="predict_s"):
        Router(fleet.source, predict_s=-1)
    for wrong in (
        {"temperature": True}, {"temperature": 10**400}, {"predict_s": True}, {"predict_s": 10**400}, {"seed": -1},
        {"seed": True}, {"seed": "x"}, {"tier_weights": {"device": True, "host": 1, "disk": 0}},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Router(fleet.source, **wrong)  # type: ignore[arg-type]


def test_numpy_numbers_are_accepted(fleet: Fleet) -> None:
    fleet.settle()
    router = Router(
        fleet.source,
        temperature=np.float32(0.5),
        predict_s=np.int64(3),
        seed=np.int64(3),  # type: ignore[arg-type]
    )
    assert len(router.rank(ACME, prompt(16), temperature=np.int64(1), limit=np.int64(2))) == 2  # type: ignore[arg-type]
    with np.errstate(all="raise"):
        for heat in (1e-320, 1e-8, 1e6):
            fleet.load("a", queued=MAX_AMOUNT)
            fleet.settle()
            found = [each.replica.id for each in router.rank(ACME, prompt(512), temperature=heat)]
            assert sorted(found) == ["a", "b", "c"] and (heat > 1 or found[-1] == "a")


def facts(prompt: int, *rows: tuple[float, float, float], turn: int = 0) -> Facts:
    credit, queued, decode = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    return Facts(prompt, credit, queued, decode, turn)


def test_costs_match_their_formulas() -> None:
    some = facts(1000, (800, 100, 5), (0, 0, 9), (2000, 0, 0))
    assert COSTS["linear"](some).tolist() == [305, 1009, 0]
    assert COSTS["lmetric"](some).tolist() == [1800, 10_000, 0]
    assert COSTS["least_loaded"](some).tolist() == [105, 9, 0]
    assert COSTS["round_robin"](some._replace(turn=4)).tolist() == [2, 0, 1]
    assert COSTS["random"](some).tolist() == [0, 0, 0]


def best(name: str, some: Facts) -> int:
    return int(np.argmin(COSTS[name](some)))


def test_threshold_follows_a_long_match_within_the_load_bound() -> None:
    assert best("threshold", facts(1000, (301, 0, 140), (0, 0, 100))) == 0
    assert best("threshold", facts(1000, (300, 0, 140), (0, 0, 100))) == 1, (
        "exactly 0.3 of the prompt is not enough"
    )
    assert best("threshold", facts(1000, (900, 0, 151), (0, 0, 100))) == 1, "above 1.5 × the least"
    assert best("threshold", facts(1000, (900, 0, 265), (0, 0, 200))) == 1, "above the least + 64"
    assert best("threshold", facts(1000, (900, 0, 900), (400, 0, 120), (0, 0, 100))) == 1, "longest in bounds"
    assert best("threshold", facts(1000, (0, 0, 9), (100, 0, 8))) == 1, (
        "without a long match the load decides"
    )


def test_threshold_follows_a_long_match_though_another_is_idle() -> None:
    assert best("threshold", facts(1000, (900, 0, 1), (0, 0, 0))) == 0
    assert best("threshold", facts(1000, (900, 0, 64), (0, 0, 0), (400, 0, 2))) == 0
    assert best("threshold", facts(1000, (900, 0, 65), (0, 0, 0), (400, 0, 2))) == 2, "above the least + 64"
    assert best("threshold", facts(1000, (900, 0, 65), (0, 0, 0), (300, 0, 2))) == 1, (
        "without a long match the load decides"
    )
    assert best("threshold", facts(1000, (900, 0, 96), (0, 0, 50))) == 0
    assert best("threshold", facts(1000, (900, 0, 97), (0, 0, 50))) == 1, "above 1.5 × 64"


def test_stddev_takes_the_longest_match_of_ordinary_load() -> None:
    assert best("stddev", facts(1000, (500, 0, 10), (200, 0, 10), (0, 0, 10))) == 0
    assert best("stddev", facts(1000, (500, 0, 90), (200, 0, 10), (0, 0, 10))) == 1


def test_the_predicted_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.coordination.routing.router._MAX_PREDICTED_EACH", 10)
    predicted = Predicted(5.0)
    for number in range(200):
        digests = [bytes([number, at]) * 8 for at in range(3)]
        for name in ("a", "b"):
            predicted.add(digests, name, 100, number * 0.001, True)
        assert predicted.num_bytes <= 10 * 400 + 2 * 130 * 21, "200 ms are 20 numbers for each replica"
    assert predicted.leading(digests, 0.2) == {"a": 3 * SEGMENT_TOKENS, "b": 3 * SEGMENT_TOKENS}
    assert predicted._sent["a", True].since(-1.0) == 200 * 100, "no prediction is lost"
    assert predicted._sent["a", True].since(0.1) == pytest.approx(100 * 100, rel=0.1)
    predicted.add([], "c", 0, 20.0, True)
    assert predicted.num_bytes <= 130, "all predictions have expired"


def test_a_tenant_with_many_predictions_evicts_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.coordination.routing.router._MAX_PREDICTED", 30)
    predictions = Predictions(5.0)
    mine = [bytes([255, at]) * 8 for at in range(8)]
    predictions.add("victim", mine, "a", 100, 0.0, True)
    for number in range(100):
        predictions.add(
            "attacker", [bytes([number, at]) * 8 for at in range(3)], "b", 100, number * 0.001, True
        )
        assert predictions._num_held <= 30
        assert predictions._num_held == sum(each.num_held for each, _ in predictions._tenants.values())
    assert predictions.of("victim").leading(mine, 0.2) == {"a": 8 * SEGMENT_TOKENS}
    assert predictions.of("nobody").leading(mine, 0.2) == {}
    predictions.add("other", [], "c", 0, 20.0, True)
    assert predictions.num_bytes <= 130 and predictions._num_held == 0, "all predictions have expired"


@pytest.mark.parametrize("cost", ["linear", "lmetric", "threshold", "stddev", "least_loaded", "round_robin"])
def test_predictions_of_one_tenant_do_not_change_another_tenants_routes(cost: str) -> None:
    """Two fleets. In one of them another tenant floods the router with predictions and requests."""

    def routes(*, flooded: bool) -> list[list[tuple[str, float, dict[str, int], str]]]:
        fleet, found = Fleet("a", "b", "c"), []
        fleet.load("a", queued=100)
        fleet.load("b", queued=200)
        fleet.load("c", queued=300)
        fleet.settle()
        other = Namespace("globex", ACME.model)
        fleet.router.rank(ACME, prompt(600))
        for number in range(12):
            for name in ("a", "b", "b") if flooded else ():
                fleet.router.routed(other, prompt(4096, seed=100 + number), name)
                fleet.router.routed(other, prompt(1024, seed=number), name)
                fleet.router.rank(other, prompt(600), cost=cost)
            ranked = fleet.router.rank(ACME, prompt(1024, seed=number), cost=cost)
            ranked.sort(key=lambda each: (each.cost, each.replica.id))  # ties are broken at random
            found.append([(each.replica.id, each.cost, each.matched_tokens, each.why) for each in ranked])
            fleet.router.routed(ACME, prompt(1024, seed=number), ranked[0].replica.id)
        for replica, _ in fleet.replicas.values():
            replica.close()
        fleet.router.close()
        return found

    quiet, flooded = routes(flooded=False), routes(flooded=True)
    if cost == "round_robin":
        starts = [each[0][0] for each in flooded]
        assert starts[:9] == starts[3:], "the turn continues from the tenant's own start"
    else:
        assert flooded == quiet


def test_generations_of_a_router_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.coordination.routing.replica_sources.MAX_PURGES", 4)
    store, keys = MemoryStore(), FleetKeys(SECRET)
    generations = Generations(keys, store)
    for number in range(9):
        signed.raise_generation(store, keys, keys.tenant(f"tenant-{number}"))
        generations.follow(frozenset())
        generations(f"tenant-{number}")
        generations.follow(frozenset())
        assert generations(f"tenant-{number}") == 1
    assert generations.num_bytes == 2 * 4 * 150 and generations("tenant-0") == 0


def test_a_router_with_invalid_settings_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())  # threads of other tests may end meanwhile
    for name, options in (
        ("cost", {"cost": "cheap"}), ("max_segments", {"max_segments": 0}), ("max_segments", {"max_segments": "9"}),
        ("predict_s", {"predict_s": "5"}), ("temperature", {"temperature": "hot"}), ("redis", {"url": None}),
        ("tier_weights", {"tier_weights": 1}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            Router.connect(**{"url": f"redis://127.0.0.1:{free_port()}", "fleet_secret": SECRET, **options})
    started = set(threading.enumerate()) - before
    assert not [thread.name for thread in started if thread.name.startswith("router-")]


def test_invalid_routing_arguments_are_refused(fleet: Fleet) -> None:
    fleet.settle()
    for options in (
        {"limit": "2"},
        {"limit": 1.5},
        {"limit": True},
        {"namespace": "acme"},
        {"namespace": None},
    ):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            fleet.router.rank(**{"namespace": ACME, "token_ids": [1, 2], **options})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="temperature='hot'"):
        fleet.router.rank(ACME, [1, 2], temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="namespace"):
        fleet.router.routed("acme", [1, 2], "a")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="replica_id"):
        fleet.router.routed(ACME, [1, 2], None)  # type: ignore[arg-type]
    assert len(fleet.router.rank(ACME, [])) == 3, "an empty prompt is held by no replica"
