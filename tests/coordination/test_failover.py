"""Another Redis server takes the place of one, under the same address. Clients keep their connections to the old one.

So do managed Redis and a Service of Kubernetes: no connection breaks, and the old server goes on answering reads.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from radixkv.coordination.routing.replica_sources import Observer
from radixkv.coordination.store.memory import MemoryStore
from radixkv.coordination.store.redis import RedisStore
from radixkv.coordination.store.redis_connection import is_refusal
from radixkv.errors import StoreUnavailable
from tests.coordination.contract import ACME, SECRET, Purged, hinted, prompt, store
from tests.coordination.test_redis_coordinator import WITH_REDIS_REPLICAS_S, RedisFleet, operations
from tests.redis_server import HOST, RedisServer, follows, need_binary
from tests.tcp_proxy import TcpProxy
from tests.waiting import LIMIT_S, ended, eventually

pytestmark = pytest.mark.slow

NOWHERE = f"REPLICAOF {HOST} 1"
"""Makes a server a replica of one that doesn't exist: it never hears more."""
MINUTES = float(os.environ.get("RADIXKV_FAILOVER_MINUTES", "0.2"))
"""How long the random failovers go on."""


class OneAddress:
    """Two servers behind one address. Connections stay with the server that they were made to."""

    def __init__(self, folder: Path) -> None:
        options = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
        self.servers = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            self.servers.append(RedisServer(need_binary(), folder / name, *options))
        self.proxy = TcpProxy(HOST, self.master.port)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.proxy.port}/0"

    @property
    def master(self) -> RedisServer:
        """The server to which new connections lead."""
        return self.servers[0]

    @property
    def other(self) -> RedisServer:
        return self.servers[1]

    def swap(self) -> None:
        """New connections lead to the other server."""
        self.servers.reverse()
        self.proxy.target = HOST, self.master.port

    def replace(self) -> None:
        """Let the other server take the address, with its own data. The old one becomes a replica of nobody."""
        self.other.command("REPLICAOF NO ONE")
        self.master.command(NOWHERE)
        self.swap()

    def replicate(self) -> None:
        """Let the other server have the data of the master."""
        self.other.command(f"REPLICAOF {HOST} {self.master.port}")
        eventually(lambda: follows(self.other), "a replica that follows")

    def fail_over(self, *, is_early: bool = False, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Promote the replica, demote the master, and give the address to the new master: before that, or after.

        ``meanwhile``: what to do while the address leads to the demoted server.
        """
        old, new = self.servers
        new.command("REPLICAOF NO ONE")
        if is_early:
            self.swap()
        old.command(f"REPLICAOF {HOST} {new.port}")
        if not is_early:
            meanwhile()
            self.swap()

    def reset(self) -> None:
        for each in self.servers:
            each.command("REPLICAOF NO ONE")
            each.reset()

    def resume(self) -> None:
        """Do nothing: no test pauses these."""

    def come_back(self) -> None:
        """Do nothing: no test ends these."""

    def close(self) -> None:
        self.proxy.close()
        for each in self.servers:
            each.kill()


@pytest.fixture(scope="module")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneAddress]:
    with closing(OneAddress(tmp_path_factory.mktemp("one-address"))) as servers:
        yield servers


@pytest.fixture
def servers(_servers: OneAddress) -> OneAddress:
    """Two empty servers behind one address, both masters."""
    _servers.reset()
    return _servers


@pytest.fixture
def fleet(servers: OneAddress) -> Iterator[RedisFleet]:
    """A fleet on the two servers, one of which follows the other."""
    servers.replicate()
    with closing(RedisFleet(servers)) as fleet:  # type: ignore[arg-type]
        yield fleet


def generation(server: RedisServer, digest: bytes) -> int:
    """The generation of a tenant on one server."""
    with closing(redis.Redis.from_url(server.url, protocol=2)) as client:
        return int(client.hget(f"rk1:{{t:{digest.hex()}}}:q", "generation") or 0)  # type: ignore[arg-type]


class Beats:
    """Counts the beats that fail, of one replica."""

    def __init__(self, coordinator: Any) -> None:
        self.num_failed = self.num_done = 0
        self._beat = coordinator.store.beat
        coordinator.store.beat = self

    def __call__(self, *args: Any) -> Any:
        try:
            result = self._beat(*args)
        except StoreUnavailable:
            self.num_failed += 1
            raise
        self.num_done += 1
        return result


# ---- the store


def test_every_operation_reaches_the_server_that_got_the_address(servers: OneAddress) -> None:
    """Over a connection that leads to the old one: what it refuses is tried again, and no caller sees it."""
    with closing(RedisStore(servers.url, LIMIT_S)) as connected:
        for operation in operations(connected):
            connected.tenant(b"t" * 32)
            servers.replace()
            operation()


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_a_read_leaves_a_server_that_became_a_replica(servers: OneAddress, waits: bool) -> None:
    """Whether it waits there at that moment, or comes over a connection that is kept there."""
    with (
        closing(RedisStore(servers.url, LIMIT_S)) as connected,
        closing(redis.Redis.from_url(servers.other.url, protocol=2)) as new,
    ):
        assert connected.read({"one": (1, 0)}, 0.01 if waits else 0.0) == {}
        servers.replace()
        new.xadd("rk1:{r:one}:ev", {"o": "clear"}, id="1-1")

        def found() -> list[int]:
            with suppress(StoreUnavailable):
                return [each.seq for each in connected.read({"one": (1, 0)}, 0.05).get("one", ())]
            return []

        assert eventually(found) == [1]


def test_a_router_leaves_a_server_that_became_a_replica(servers: OneAddress) -> None:
    """It only reads, and a replica answers that; but what it asks about purges is refused there."""
    with (
        closing(Observer(RedisStore(servers.url, LIMIT_S), SECRET, background=False)) as observer,
        closing(RedisFleet(servers)) as fleet,  # type: ignore[arg-type]
    ):
        servers.replace()
        a = fleet.join("a")
        for _ in range(2):
            observer.poll()
        assert observer.reader.registrations() == {a.info().writer}


def test_a_replica_is_not_used(servers: OneAddress) -> None:
    """Nor for what it would answer: it may be old."""
    servers.master.command(NOWHERE)
    with closing(RedisStore(servers.url, LIMIT_S)) as connected:
        for operation in (connected.fetch, lambda: connected.read({"one": (1, 0)}, 0.05)):
            with pytest.raises(StoreUnavailable, match="is a replica"):
                operation()
        servers.replace()
        for operation in (connected.fetch, lambda: connected.read({"one": (1, 0)}, 0.05)):
            operation()


def parsed(reply: str) -> Exception:
    """The error as which the client raises an error reply."""
    parser: Any = redis.connection.DefaultParser
    error: Exception = parser.parse_error(reply)
    return error


@pytest.mark.parametrize(
    "reason",
    [
        "READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_ab): @user_script:3: -READONLY You can't write against a replica.",
        "READONLY You can't write against a read only replica. script: ab, on @user_script:3.",
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "NOREPLICAS Not enough good replicas to write.",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "MOVED 1 127.0.0.1:1",
    ],
)
def test_a_refusal_is_recognized_in_any_form(reason: str) -> None:
    error = parsed(reason)
    assert is_refusal(error), repr(error)


@pytest.mark.parametrize(
    "reason",
    [
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "NOSCRIPT No matching script. Please use EVAL.",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "NOPERM this user has no permissions to run the 'evalsha' command",
        "ERR Error running script (call to f_ab): Script killed by user with SCRIPT KILL...",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    ],
)
def test_other_errors_are_no_refusal(reason: str) -> None:
    """What the server did before is unknown, or another server would answer the same."""
    assert not is_refusal(parsed(reason))


# ---- the fleet


@pytest.mark.slow
@pytest.mark.parametrize("address", ["early", "at once", "late"])
def test_the_fleet_moves_to_the_server_that_got_the_address(
    servers: OneAddress, fleet: RedisFleet, address: str
) -> None:
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    digest = a.replica.keys.tenant("acme")
    fleet.eventually(lambda: a.replica.purge("acme").replicated)
    before = a.replica.purges.generation("acme")
    a.warm(ACME, prompt(512))
    fleet.eventually(lambda: hinted(b.replica, ACME, prompt(512)) == {"a": 512})
    epochs = [each.replica.info().epoch for each in (a, b)]
    old = servers.master

    def is_noticed() -> bool:
        return all(each.replica.health().state == "unavailable" for each in (a, b))

    def notice() -> None:
        if address == "late":
            fleet.eventually(is_noticed)

    servers.fail_over(is_early=address == "early", meanwhile=notice)
    beats = [Beats(each.replica) for each in (a, b)]
    fleet.eventually(lambda: all(each.num_done for each in beats))
    assert all(each.num_failed <= 1 for each in beats), "one that was under way when the address moved"
    purge = b.replica.purge("acme")
    assert purge.generation > before and generation(servers.master, digest) == purge.generation
    fleet.eventually(lambda: a.replica.purge_report("acme").confirmed == ("a", "b"))
    a.warm(ACME, prompt(512, seed=1))
    fleet.eventually(lambda: hinted(b.replica, ACME, prompt(512, seed=1)) == {"a": 512})
    assert [each.replica.info().epoch for each in (a, b)] == epochs, "no replica had to register again"
    eventually(lambda: not is_used(old), "the old server is left")


def is_used(server: RedisServer) -> bool:
    """Whether a replica of ours has a connection to a server: one that asks nothing but the role is none."""
    lines = server.text("CLIENT LIST").splitlines()
    return any("cmd=xread" in line or "cmd=evalsha" in line or "cmd=hmget" in line for line in lines)


def test_a_log_goes_on_at_the_server_that_got_the_address(servers: OneAddress, fleet: RedisFleet) -> None:
    """The refusal of an entry is no sign that the store has lost the registration."""
    a = fleet.join("a", background=False)
    epoch = a.info().epoch
    for seed in range(3):
        store(a, ACME, prompt(512, seed))
        a.publish()
        eventually(lambda seed=seed: numbers(servers.other, "a") == list(range(1, seed + 3)), "a copy")
        servers.fail_over()
    assert a.info().epoch == epoch and a.health().num_outages == a.health().num_snapshots == 0


def numbers(server: RedisServer, name: str) -> list[int]:
    """The numbers of a replica's log on one server."""
    with closing(redis.Redis.from_url(server.url, protocol=2)) as client:
        log: Any = client.xrange(f"rk1:{{r:{name}}}:ev")
        return [int(fields[b"s"]) for _, fields in log]


# ---- what is told of an outage


@pytest.mark.parametrize(
    ("begin", "end", "reason"),
    [
        (("CONFIG SET maxmemory 1",), ("CONFIG SET maxmemory 0",), "OOM command not allowed"),
        (("ACL SETUSER with-rights -evalsha",), ("ACL SETUSER with-rights +evalsha",), "NoPermissionError"),
        ((NOWHERE,), ("REPLICAOF NO ONE",), "ReadOnlyError: the server at this address is a replica"),
        (
            ("ACL SETUSER with-rights off", "CLIENT KILL USER with-rights"),
            ("ACL SETUSER with-rights on",),
            "AuthenticationError: invalid username-password",
        ),
    ],
)
def test_an_outage_is_logged_once_with_its_reason(
    servers: OneAddress,
    begin: tuple[str, ...],
    end: tuple[str, ...],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Health has the reason too. No secret of the URL is in either."""
    servers.master.command("ACL SETUSER with-rights on >hidden allkeys allcommands")
    url = servers.url.replace("redis://", "redis://with-rights:hidden@")
    with closing(RedisFleet(servers)) as fleet:  # type: ignore[arg-type]
        a: Any = fleet.make_at(url, fleet.settings("a", {}))
        fleet.members.append(a)
        a.register()
        assert a.health().is_ok, a.health().reason
        beats = Beats(a)
        for line in begin:
            servers.master.command(line)
        fleet.eventually(lambda: beats.num_failed >= 3)
        health, unavailable = a.health(), a.unavailable
        assert health.state == "unavailable" and reason in health.reason and unavailable == health.reason
        assert "script" not in health.reason, "only what Redis said"
        assert health.num_outages == 1
        for line in end:
            servers.master.command(line)
        fleet.eventually(lambda: a.health().is_ok)
    begun, ended_ = (record.getMessage() for record in caplog.records)
    assert begun.startswith("replica a: the store is unavailable: Redis: ") and reason in begun
    assert ended_ == "replica a: the store is available again"
    assert "hidden" not in caplog.text + health.reason


def test_a_router_logs_an_outage_once(caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryStore()
    with closing(Observer(memory, SECRET, background=False)) as observer:
        memory.is_reachable = False
        for _ in range(3):
            observer.poll()
        memory.is_reachable = True
        for _ in range(3):
            observer.poll()
    assert [record.getMessage() for record in caplog.records] == [
        "router: the store is unavailable: the memory store is switched off",
        "router: the store is available again",
    ]


# ---- again and again


class Purger:
    """Purges tenants at random replicas, one after the other, and notes what was acknowledged."""

    def __init__(self, members: list[Purged], seed: int) -> None:
        self.acknowledged: dict[str, int] = {}
        self.num_purges = self.num_refused = 0
        self.failure: BaseException | None = None
        self._members, self._chance = members, random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._chance.uniform(0.0, 0.1)):
                tenant, at = f"tenant {self._chance.randrange(20)}", self._chance.choice(self._members)
                try:
                    purge = at.replica.purge(tenant)
                except StoreUnavailable:
                    self.num_refused += 1
                    continue
                assert purge.generation > self.acknowledged.get(tenant, 0), "an acknowledged purge was lost"
                self.acknowledged[tenant] = purge.generation
                self.num_purges += 1
        except BaseException as failure:
            self.failure = failure
            raise

    def stop(self) -> None:
        self._stopping.set()
        ended(self._thread)


@pytest.mark.release
def test_no_purge_is_lost_in_many_failovers(servers: OneAddress, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is in the fleet again before two leases' beats are over, and keeps every purge that was acknowledged.

    ``RADIXKV_FAILOVER_MINUTES``: how long.
    """
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    servers.replicate()
    most_failed, longest_s, num_failovers = 0, 0.0, 0
    with closing(RedisFleet(servers, WITH_REDIS_REPLICAS_S)) as fleet:  # type: ignore[arg-type]
        members = [Purged(fleet, name, lease_s=fleet.brief_s) for name in "abc"]
        purger = Purger(members, seed)
        try:
            until = time.monotonic() + 60 * MINUTES
            while time.monotonic() < until:
                threading.Event().wait(chance.uniform(0.0, 3.0))
                late_s = chance.choice([0.0, chance.uniform(0.0, 2 * fleet.brief_s)])
                servers.fail_over(
                    is_early=chance.random() < 0.3,
                    meanwhile=lambda late_s=late_s: threading.Event().wait(late_s),
                )
                moved_at = time.monotonic()
                beats = [Beats(each.replica) for each in members]
                fleet.eventually(lambda beats=beats: all(each.num_done for each in beats))
                longest_s = max(longest_s, time.monotonic() - moved_at)
                most_failed = max(most_failed, *(each.num_failed for each in beats))
                for each, beat in zip(members, beats, strict=True):
                    each.replica.store.beat = beat._beat  # type: ignore[method-assign]
                num_failovers += 1
                eventually(lambda: follows(servers.other), "a replica that follows")
        finally:
            purger.stop()
        assert purger.failure is None
        for tenant, acknowledged in purger.acknowledged.items():
            fleet.eventually(lambda tenant=tenant: members[0].replica.purge_report(tenant).is_complete)
            report = members[0].replica.purge_report(tenant)
            assert report.generation >= acknowledged and report.confirmed == ("a", "b", "c")
            assert generation(servers.master, members[0].replica.keys.tenant(tenant)) >= acknowledged
            for each in members:
                assert each.replica.purges.generation(tenant) >= acknowledged
    with capsys.disabled():
        print(
            f"\nseed {seed}: {num_failovers} failovers, {purger.num_purges} purges acknowledged, "
            f"{purger.num_refused} refused; until all beat again at most {longest_s:.2f} s and "
            f"{most_failed} failed beats of one replica"
        )
    assert most_failed <= 6, "two leases have six beats"
