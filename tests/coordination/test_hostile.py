"""An attacker who can write to Redis overwrites each field of each key in turn with values that no replica writes.

None of these writes purges a tenant, makes an incomplete purge look complete, or stops a replica or a purge for good.
The tests at the end give the attacker old signed records too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from radixkv.clock import ManualClock
from radixkv.coordination.purges import Purge
from radixkv.coordination.redis_coordinator import RedisCoordinator
from radixkv.coordination.values import FleetPin
from radixkv.errors import ArgumentError, StaleEpoch, StoreUnavailable, UnreadableRecord
from tests.coordination.contract import ACME, OTHER, by_hand, hinted, names, prompt, store
from tests.coordination.test_redis_coordinator import RedisFleet
from tests.redis_server import RedisServer

VALUES = [
    b"", b"0", b"-1", b"1.5", b"1e400", b"nan", b" 7", b"0x10", b"9" * 15, b"9" * 16, b"9" * 400, b"\xff\xfe",
    b"x" * 5_000, b"7:live:" + b"0" * 64, b"999999999999999:nonce:9:999999999999999:fp:model",
]  # fmt: skip
SCORES = [-1.0, 0.5, 9e14, 1e15, 1e300, float("inf"), float("-inf")]
ROUNDS = 30
IDS = prompt(512)


class Attacked:
    """Two replicas that work only when a test calls them, and a client that attacks their server."""

    def __init__(self, fleet: RedisFleet) -> None:
        self.fleet, self.client = fleet, fleet.client
        self.a, self.b = by_hand(fleet, "a"), by_hand(fleet, "b")
        self.fill()

    def fill(self) -> None:
        """Write records of every kind to the server."""
        self.heal()
        a = self.a.replica
        a.set_limit("acme", 100)
        for each in (self.a, self.b):
            each.replica.reserve("acme", 10)
            store(each.replica, ACME, prompt(512, seed=1))
            each.replica.publish()
            each.warm(ACME, IDS)
            each.warm(OTHER, IDS)
        a._publisher.suspend()
        a.publish()
        self.job = a.create_job(ACME, 512, ["a", "b"])
        pin = FleetPin("1f" * 16, a.pin_digest(ACME), 512, "all")
        assert a.keep_pin("acme", pin, 600.0) and a.state_pin("acme", pin.id, "done", 512)

    def heal(self) -> None:
        """Let both replicas work until both are healthy."""
        for _ in range(ROUNDS):
            for each in (self.a.replica, self.b.replica):
                with suppress(StoreUnavailable, StaleEpoch):
                    if each.health().state == "fenced":
                        each._step()
                    else:
                        each.beat()
                        each.publish()
                        each.poll()
            if all(each.replica.health().is_ok for each in (self.a, self.b)) and self.see_each_other():
                return
        states = [each.replica.health() for each in (self.a, self.b)]
        raise AssertionError(f"the replicas did not recover: {states}")

    def see_each_other(self) -> bool:
        return "b" in names(self.a.replica.peers()) and "a" in names(self.b.replica.peers())

    def purge(self, tenant: str) -> Purge:
        """Purge like an operator that repeats the request, until both replicas have confirmed.

        Each report must be true.
        """
        for _ in range(ROUNDS):
            with suppress(StoreUnavailable, StaleEpoch):
                report = self.a.replica.purge(tenant)
                for _ in range(ROUNDS):
                    self.check(report, tenant)
                    if report.is_complete and report.confirmed == ("a", "b"):
                        return report
                    with suppress(StoreUnavailable, StaleEpoch):
                        self.heal()
                        report = self.a.replica.purge_report(tenant)
        raise AssertionError(f"no purge of {tenant} was ever complete")

    def check(self, report: Purge, tenant: str) -> None:
        """If a report calls a purge complete, or a replica confirmed, that replica has nothing of the tenant."""
        for each in (self.a, self.b):
            name = each.replica.replica_id
            if report.is_complete or name in report.confirmed:
                assert not each.cache.namespaces(tenant), (
                    f"{name} has confirmed or isn't waited for: {report}"
                )

    def survive(self) -> None:
        """Check the invariants after any write: no tenant was purged, and the replicas recover and can purge."""
        purged = [list(each.purged) for each in (self.a, self.b)]
        with suppress(StoreUnavailable):
            report = self.a.replica.purge_report("acme")
            assert report.generation <= self.a.replica.purges.generation("acme")
        self.heal()
        assert [each.purged for each in (self.a, self.b)] == purged, "an attacker has purged a tenant"
        assert self.a.replica.limits() == {"acme": 100}
        for tenant in ("acme", "other"):
            generation = self.a.replica.purges.generation(tenant)
            assert self.purge(tenant).generation > generation
        self.fill()


@pytest.fixture
def attacked(redis_server: RedisServer) -> Iterator[Attacked]:
    with closing(RedisFleet(redis_server)) as fleet:
        yield Attacked(fleet)


SHARE = 6
"""`make test` tries one of this many writes."""


def tries(client: Any) -> list[tuple[Any, ...]]:
    """Commands that each overwrite one thing, for every key that exists."""
    found: list[tuple[Any, ...]] = []
    for number, key in enumerate(sorted(client.scan_iter("*"))):
        kind = client.type(key)
        if kind == b"hash":
            fields = sorted(client.hgetall(key))
            # All values for each field would take minutes. Each field gets a third of them, each kind of key gets all.
            for at, field in enumerate(fields):
                found += [("HSET", key, field, value) for value in VALUES[(at + number) % 3 :: 3]]
                found.append(("HDEL", key, field))
        elif kind == b"zset":
            members = client.zrange(key, 0, 0)
            found += [("ZADD", key, score, member) for score in SCORES for member in (*members, b"x")]
        elif kind == b"stream":
            for entry in (b"999999999999999-1", b"18446744073709551615-1", b"*"):
                found += [("XADD", key, entry, b"o", b"store"), ("DEL", key)]
        else:
            found += [("SET", key, value) for value in VALUES[number % 3 :: 3]]
        found += [("DEL", key), ("WRONG", key, kind)]
    return found


def write(client: Any, command: tuple[Any, ...]) -> None:
    if command[0] == "WRONG":
        _, key, kind = command
        client.delete(key)
        if kind == b"string":
            client.hset(key, "x", "y")
        else:
            client.set(key, b"x")
    else:
        with suppress(Exception):  # an id that the stream no longer accepts
            client.execute_command(*command)


@pytest.mark.slow
@pytest.mark.parametrize("step", [SHARE, pytest.param(1, marks=pytest.mark.release)])
def test_no_write_to_redis_purges_a_tenant_or_stops_a_replica(attacked: Attacked, step: int) -> None:
    attacked.purge("acme")
    attacked.fill()
    tried = tries(attacked.client)[::step]
    kinds = {command[1].rpartition(b":")[2] for command in tried}
    assert kinds >= {b"meta", b"lease", b"ev", b"load", b"snapmeta", b"q", b"p", b"job", b"purges"}
    for command in tried:
        write(attacked.client, command)
        try:
            attacked.survive()
        except Exception as error:
            error.add_note(f"after {command}")
            raise


@pytest.mark.parametrize("value", [b"9" * 16, b"9" * 15, b"-1", b"x", b"1.5", b"0"])
def test_an_unreadable_generation_fails_only_that_tenants_purge(
    attacked: Attacked, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The unreadable record makes that tenant's purge fail, and the log names the tenant's digest.

    The raise that found it repairs it.
    """
    a, b = attacked.a.replica, attacked.b.replica
    digest = a.keys.tenant("acme")
    attacked.client.hset(f"rk1:{{t:{digest.hex()}}}:q", "generation", value)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(UnreadableRecord, match=digest.hex()):
            b.purge_report("acme")
        assert digest.hex() in caplog.text and "acme" not in caplog.text
        with pytest.raises(UnreadableRecord, match=digest.hex()):
            a.purge("acme")
    assert a.health().is_ok, "the store is reachable"
    report = a.purge("acme")
    assert report.generation == 2 and report.pending == ("b",)
    b.beat()
    assert a.purge_report("acme").confirmed == ("a", "b") and not attacked.b.cache.namespaces("acme")
    assert a.purge("other").generation == 1, "the records of other tenants are readable"


def test_an_announced_purge_that_was_never_raised_is_ignored(attacked: Attacked) -> None:
    digest = attacked.a.replica.keys.tenant("acme").hex()
    for score in (1, 2_000_000_000_000):
        attacked.client.zadd("rk1:purges", {digest: score})
        attacked.heal()
    assert attacked.a.purged == attacked.b.purged == []
    assert attacked.b.cache.match(ACME, IDS).num_tokens == 512


def later_by(seconds: float) -> Callable[[], float]:
    clock = time.time
    return lambda: clock() + seconds


def test_restored_old_records_neither_purge_nor_confirm(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, client = attacked.a.replica, attacked.b.replica, attacked.client
    key = f"rk1:{{t:{a.keys.tenant('acme').hex()}}}:q"
    attacked.purge("acme")
    first = client.hgetall(key)
    monkeypatch.setattr("time.time", later_by(60.0))  # more apart than the clocks of replicas may be
    attacked.purge("acme")
    second = client.hgetall(key)
    attacked.fill()
    monkeypatch.setattr("time.time", later_by(60.0))
    a.purge("acme")
    attacked.a.warm(ACME, IDS)
    for old in (first, second, first, second):
        client.delete(key)
        client.hset(key, mapping=old)
        report = a.purge_report("acme")
        assert report.generation == 3 and report.pending == ("a", "b"), (
            "the confirmations are for an earlier purge"
        )
        a.beat()
        report = a.purge_report("acme")
        assert report.generation == 3 and report.pending == ("b",)
    assert attacked.a.cache.match(ACME, IDS).num_tokens == 512, "a has applied the third purge and no other"
    b.beat()
    assert a.purge_report("acme").is_complete and not attacked.b.cache.namespaces("acme")
    third = client.hgetall(key)
    attacked.fill()
    for old in (first, third, second, third):
        client.delete(key)
        client.hset(key, mapping=old)
        attacked.heal()
        client.delete(key)
        attacked.heal()
    assert attacked.b.cache.match(ACME, IDS).num_tokens == attacked.a.cache.match(ACME, IDS).num_tokens == 512
    assert a.purge("acme").generation == 4


def test_a_confirmation_cannot_be_forged_for_a_stopped_replica(attacked: Attacked) -> None:
    """A stopped replica cannot be confirmed by its name alone, with another replica's words, or with those of its
    earlier registration.
    """
    a, b, client = attacked.a.replica, attacked.b.replica, attacked.client
    key, meta = f"rk1:{{t:{a.keys.tenant('acme').hex()}}}:q", "rk1:{r:b}:meta"
    attacked.purge("acme")
    earlier, confirmed = client.hgetall(meta), client.hget(key, "c:b")
    b.register()
    attacked.heal()
    attacked.fill()
    a.purge("acme")
    nonce = b.info().nonce.encode()
    of_a = client.hget(key, "c:a").partition(b":")[2]
    for said in (nonce, nonce + b":" + b"0" * 64, nonce + b":" + of_a, confirmed, client.hget(key, "c:a")):
        client.hset(key, "c:b", said)
        assert a.purge_report("acme").pending == ("b",)
    client.hset(key, "c:b", confirmed)
    client.delete(meta)
    client.hset(meta, mapping=earlier)
    client.set("rk1:{r:b}:lease", earlier[b"nonce"], px=60_000)
    assert a.purge_report("acme").pending == ("b",), "the old registration is back, so the purge waits for it"
    for gone in (("beats", b"0"), ("proof", b""), ("lease_ms", b"1"), ("nonce", b"other"), ("epoch", b"1")):
        client.hset(meta, *gone)
        client.delete("rk1:{r:b}:lease")
        a.poll()
        assert not a.purge_report("acme").is_complete, gone
    attacked.heal()
    assert a.purge_report("acme").is_complete and not attacked.b.cache.namespaces("acme")


def with_manual_clock(attacked: Attacked, name: str) -> tuple[RedisCoordinator, ManualClock]:
    """One more replica that works only when the test calls it, with a clock of its own."""
    clock, fleet = ManualClock(1000.0), attacked.fleet
    replica = fleet.make_at(
        fleet.server.url, fleet.settings(name, {"background": False, "lease_s": 600.0}), clock
    )
    fleet.members.append(replica)
    replica.register()
    return replica, clock


def test_a_forged_replica_delays_a_purge_only_for_a_lease(attacked: Attacked) -> None:
    client = attacked.client
    fields = client.hgetall("rk1:{r:b}:meta")
    a, clock = with_manual_clock(attacked, "c")
    client.hset("rk1:{r:evil}:meta", mapping=fields)
    client.set("rk1:{r:evil}:lease", fields[b"nonce"])
    client.persist("rk1:{r:evil}:lease")
    client.zadd("rk1:replicas", {"evil": 9e15})
    assert "evil" in a.purge("acme").pending, "only for a lease: the registration could be a damaged one"
    clock.advance(a.settings.lease_s - 1)
    a.beat()
    assert "evil" in a.purge_report("acme").pending
    clock.advance(2)
    a.beat()
    assert "evil" in a.purge_report("acme").unconfirmed


def test_a_raise_sent_by_a_replica_must_be_signed(attacked: Attacked) -> None:
    a, b = attacked.a.replica, attacked.b.replica
    b._stop_threads()
    a.purge("acme")
    raised = a.purges.raised("acme")
    for forged in (
        raised._replace(generation=9), raised._replace(token="0" * 32), raised._replace(proof="0" * 64),
        raised._replace(replica_id="b"), raised._replace(nonce="0" * 32),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            b.apply_purge("acme", forged)
    with pytest.raises(ArgumentError):
        b.apply_purge("other", raised)
    assert attacked.b.purged == []
    attacked.client.delete(f"rk1:{{t:{a.keys.tenant('acme').hex()}}}:q", "rk1:purges")
    b.apply_purge("acme", raised)
    assert attacked.b.purged == [("acme", 1)] and not attacked.b.cache.namespaces("acme")
    b.apply_purge("acme", raised)
    assert attacked.b.purged == [("acme", 1)]
    attacked.heal()
    assert a.purge_report("acme").is_complete, "the replicas wrote the purge to the store again"


def test_a_forged_log_entry_does_not_keep_a_reader_busy(attacked: Attacked) -> None:
    b, client = attacked.b.replica, attacked.client
    a, clock = with_manual_clock(attacked, "c")
    client.xadd("rk1:{r:b}:ev", {"o": "store"}, id=f"{b.info().epoch + 5}-1")
    a.poll()
    num_fetches, fetch = [0], a.store.fetch

    def counted(*ids: Any) -> Any:
        num_fetches[0] += 1
        return fetch(*ids)

    a.store.fetch = counted  # type: ignore[method-assign]
    for _ in range(200):
        a.reader.poll()
        clock.advance(0.01)
    assert 0 < num_fetches[0] <= 40, "at most one fetch in 50 ms"
    attacked.heal()
    store(b, ACME, prompt(1024, seed=5))
    b.publish()
    a.poll()
    assert hinted(a, ACME, prompt(1024, seed=5)) == {"b": 1024}
