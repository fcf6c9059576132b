"""The contract on a real redis-server in real time, and failures that only a server can have."""

from __future__ import annotations

import random
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import trustme

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.clock import Clock
from radixkv.coordination import Load, Router, Settings, connect
from radixkv.coordination.coordinator import Coordinator
from radixkv.coordination.purges import Purge
from radixkv.coordination.redis_coordinator import RedisCoordinator
from radixkv.coordination.store.holdings import Holdings
from radixkv.coordination.store.protocol import Durable, Share
from radixkv.coordination.store.redis import RedisStore
from radixkv.coordination.store.redis_connection import Address, _greet
from radixkv.coordination.store.wire import NOTHING, Entry, Limit, Raised, Registration
from radixkv.coordination.values import WIRE_VERSION, FleetPin, JobPart, WarmJob, Writer
from radixkv.errors import ConfigError, StaleEpoch, StoreUnavailable
from tests.coordination.contract import (
    ACME,
    OTHER,
    SECRET,
    CoordinatorContract,
    CoordinatorEssentials,
    Fleet,
    Purged,
    agrees,
    hinted,
    names,
    prompt,
    random_step,
    remove,
    store,
    works,
)
from tests.redis_server import ClusterServers, RedisServer, SentinelServers, need_binary
from tests.tcp_proxy import TcpProxy
from tests.waiting import LIMIT_S, ended, eventually

pytestmark = pytest.mark.slow

BEAT_S = 0.2
WITH_REDIS_REPLICAS_S = 4.0
"""The timeout for a reply where servers have had replicas: important writes wait half of it for one that is gone."""
_HOUR_MS = 3_600_000
ROOT = Path(__file__).parents[2]


def answered(holds: Callable[[], object]) -> Callable[[], object]:
    """The same condition, not yet true while the store doesn't answer."""

    def condition() -> object:
        with suppress(StoreUnavailable):
            return holds()
        return False

    return condition


@contextmanager
def patient_stores(reply_timeout_s: float = LIMIT_S) -> Iterator[None]:
    """Coordinators that are made meanwhile wait for replies this long: a server that stalls is no outage for them."""

    def patient(url: str, _reply_timeout_s: float) -> RedisStore:
        return RedisStore(url, reply_timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixkv.coordination.redis_coordinator.RedisStore", patient)
        yield


class Brisk(Settings):
    """Settings with frequent beats, so that tests wait little, and a long lease that a busy machine does not end."""

    @property
    def beat_s(self) -> float:
        return BEAT_S


class RedisFleet(Fleet):
    """Coordinators with their threads, on one server or on several that form one store.

    With a lease of its own, a replica sends three beats per lease, as in production. ``reply_timeout_s``: how long they
    wait for a reply; None: as long as in production.
    """

    lease_s, brief_s = 120.0, 3.0

    def __init__(
        self, server: RedisServer | ClusterServers | SentinelServers, reply_timeout_s: float | None = LIMIT_S
    ) -> None:
        super().__init__()
        self.server, self.reply_timeout_s = server, reply_timeout_s
        self.client: Any = client_of(server)

    def make(self, settings: dict[str, Any]) -> RedisCoordinator:
        return self.make_at(self.server.url, settings)

    def make_at(self, url: str, settings: dict[str, Any], clock: Clock = time.monotonic) -> RedisCoordinator:
        kind = Brisk if settings["lease_s"] == self.lease_s else Settings
        if self.reply_timeout_s is None:
            return RedisCoordinator(kind(**settings), url, clock)
        with patient_stores(self.reply_timeout_s):
            return RedisCoordinator(kind(**settings), url, clock)

    def close(self) -> None:
        self.server.resume()
        self.server.come_back()
        super().close()
        self.client.close()

    def eventually(self, holds: Callable[[], object]) -> None:
        try:
            eventually(answered(holds))
        except AssertionError as error:
            for member in self.members:
                error.add_note(f"{member.replica_id}: {member.health()}")
            raise

    def settle(self) -> None:
        eventually(lambda: all(member.health().num_queued == 0 for member in self.members))

    def kill(self, coordinator: Coordinator) -> None:
        """The last beat states a short lease, and the others see it, so that tests wait little for its end."""
        coordinator._stop_threads()
        settings = coordinator.settings
        coordinator.settings = replace(settings, lease_s=1.0)
        eventually(lambda: works(coordinator.beat))
        coordinator.settings = settings
        for other in self.members:
            is_working = other.settings.background and other.health().is_ok
            if isinstance(other, RedisCoordinator) and other is not coordinator and is_working:
                other.poll()

    def forge(self, victim: str, name: str, address: str) -> None:
        fields = self.client.hgetall(f"rk1:{{r:{victim}}}:meta")
        self.client.hset(f"rk1:{{r:{name}}}:meta", mapping=fields | {b"address": address.encode()})
        self.client.set(f"rk1:{{r:{name}}}:lease", fields[b"nonce"], px=_HOUR_MS)
        self.client.zadd("rk1:replicas", {name: int(time.time() * 1000) + _HOUR_MS})

    def go_down(self) -> None:
        self.server.go_away()

    def come_back(self) -> None:
        self.server.come_back()

    def lose(self) -> None:
        self.server.restart()

    def forget(self, name: str) -> None:
        self.client.delete(
            *(f"rk1:{{r:{name}}}:{kind}" for kind in ("meta", "lease", "ev", "snapmeta", "load"))
        )

    def remember(self, digest: bytes) -> Callable[[], None]:
        key, member = f"rk1:{{t:{digest.hex()}}}:q", digest.hex()
        held, position = self.client.dump(key), self.client.zscore("rk1:purges", member)

        def go_back() -> None:
            self.client.delete(key)
            self.client.zrem("rk1:purges", member)
            if held is not None:
                self.client.restore(key, 0, held)
            if position is not None:
                self.client.zadd("rk1:purges", {member: position})

        return go_back

    def key(self, name: str, what: str) -> str:
        return f"rk1:{{r:{name}}}:{what}"

    def log(self, name: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found: list[tuple[bytes, dict[bytes, bytes]]] = self.client.xrange(self.key(name, "ev"))
        return found


def client_of(server: RedisServer | ClusterServers | SentinelServers) -> Any:
    """A client for the test itself."""
    if isinstance(server, ClusterServers):
        return redis.RedisCluster(host=server.nodes[0].host, port=server.nodes[0].port, protocol=2)
    single = server.master if isinstance(server, SentinelServers) else server
    return redis.Redis.from_url(single.url, protocol=2)


@pytest.fixture
def fleet(redis_server: RedisServer) -> Iterator[RedisFleet]:
    with closing(RedisFleet(redis_server)) as fleet:
        yield fleet


@pytest.mark.slow
class TestRedisCoordinator(CoordinatorContract):
    """The contract on one server."""


class OnCluster:
    """The fixture of tests on a Cluster with three primaries."""

    @pytest.fixture
    def fleet(self, redis_cluster: ClusterServers) -> Iterator[RedisFleet]:
        with closing(RedisFleet(redis_cluster)) as fleet:
            yield fleet


class OnSentinel:
    """The fixture of tests on a master that sentinels name."""

    @pytest.fixture
    def fleet(self, redis_sentinel: SentinelServers) -> Iterator[RedisFleet]:
        with closing(RedisFleet(redis_sentinel)) as fleet:
            yield fleet


@pytest.mark.slow
class TestClusterEssentials(OnCluster, CoordinatorEssentials):
    """On a Cluster: what uses every kind of key, and what connects again to each shard."""


@pytest.mark.slow
class TestSentinelEssentials(OnSentinel, CoordinatorEssentials):
    """The same on a master that sentinels name."""


@pytest.mark.release
class TestClusterCoordinator(OnCluster, CoordinatorContract):
    """The whole contract on a Cluster. `test_specification` compares each operation of the store."""


@pytest.mark.release
class TestSentinelCoordinator(OnSentinel, CoordinatorContract):
    """The whole contract on a master that sentinels name."""


def reader_only(fleet: RedisFleet, name: str = "reader", **overrides: Any) -> RedisCoordinator:
    """A replica that reads only when called. Its lease is long, as nothing extends it."""
    settings = fleet.settings(name, {"lease_s": 60.0, "background": False} | overrides)
    coordinator = RedisCoordinator(Settings(**settings), fleet.server.url)
    fleet.members.append(coordinator)
    coordinator.register()
    return coordinator


# ---- the content of the server


@pytest.mark.parametrize("content", [b"", b"z" * 32, b"a" * 31, b"a" * 10_000_000, ["a" * 32]])
def test_an_id_of_the_store_that_no_replica_wrote_is_replaced(fleet: RedisFleet, content: Any) -> None:
    a = fleet.join("a")
    fleet.eventually(lambda: a.store_id)
    fleet.client.delete("rk1:store")
    if isinstance(content, list):
        fleet.client.rpush("rk1:store", *content)
    else:
        fleet.client.set("rk1:store", content)
    before = a.store_id
    fleet.eventually(lambda: a.store_id != before)
    assert re.fullmatch("[0-9a-f]{32}", a.store_id) and fleet.client.get("rk1:store") == a.store_id.encode()


def test_notes_of_a_folder_in_a_key_of_another_type_are_none(fleet: RedisFleet) -> None:
    a, b = fleet.join("a"), fleet.join("b")
    folder, tags = b"f" * 16, [b"t" * 16, b"u" * 16]
    assert a.note_disk(folder, {tags[0]: b"note"}) == 0
    assert b.disk_notes(folder, tags) == [b"note", None] and b.disk_notes(b"g" * 16, tags) == [None, None]
    key = f"rk1:{{d:{folder.hex()}}}:n"
    for _ in range(2):
        fleet.client.delete(key)
        fleet.client.rpush(key, "x")
        assert b.disk_notes(folder, tags) == [None, None]
    fleet.client.rpush(key, "x")
    assert a.note_disk(folder, {tags[1]: b"later"}) == 0
    assert b.disk_notes(folder, tags) == [None, b"later"]


def test_the_keys_are_those_of_the_protocol(fleet: RedisFleet) -> None:
    a = fleet.join("a")
    store(a, ACME, prompt(512))
    job = a.create_job(ACME, 512, ["a"])
    fleet.eventually(lambda: len(fleet.log("a")) == 2)
    a._publisher.suspend()
    a.publish()
    kinds = {key.decode(): fleet.client.type(key).decode() for key in fleet.client.scan_iter("*")}
    assert kinds == {
        "rk1:{r:a}:meta": "hash",
        "rk1:{r:a}:lease": "string",
        "rk1:{r:a}:ev": "stream",
        "rk1:{r:a}:snap:0": "string",
        "rk1:{r:a}:snapmeta": "hash",
        "rk1:{r:a}:load": "hash",
        "rk1:replicas": "zset",
        "rk1:jobs": "zset",
        f"rk1:{{w:{job.id}}}:job": "hash",
        "rk1:store": "string",
    }
    week_ms = 7 * 24 * 3600 * 1000
    a.beat()
    for what in ("meta", "ev", "snapmeta", "snap:0", "load"):
        assert week_ms - 60_000 < fleet.client.pttl(fleet.key("a", what)) <= week_ms
    assert 0 < fleet.client.pttl(fleet.key("a", "lease")) <= fleet.lease_s * 1000
    assert 0 < fleet.client.pttl(f"rk1:{{w:{job.id}}}:job") <= 3600 * 1000


def test_an_entry_packs_a_run_of_digests(fleet: RedisFleet) -> None:
    a = fleet.join("a")
    ids = prompt(256 * 130)
    store(a, ACME, ids)
    remove(a, ACME, ids, 256 * 128)
    fleet.eventually(lambda: len(fleet.log("a")) == 5)
    epoch = a.info().epoch
    log = fleet.log("a")
    assert [entry_id.decode() for entry_id, _ in log] == [f"{epoch}-{seq}" for seq in range(1, 6)]
    fields = [entry for _, entry in log]
    assert [entry[b"o"] for entry in fields] == [b"clear", b"store", b"store", b"store", b"remove"]
    assert [len(entry[b"b"]) // 16 for entry in fields] == [0, 64, 64, 2, 2]
    assert {entry[b"n"] for entry in fields[1:]} == {a.keys.namespace(ACME)}
    assert fields[1][b"p"] == b"" and fields[2][b"p"] == fields[1][b"b"][-16:]
    assert fields[3][b"p"] == fields[4][b"p"] == fields[2][b"b"][-16:]
    assert fields[3][b"b"] == fields[4][b"b"]
    meta = fleet.client.hgetall(fleet.key("a", "meta"))
    assert (meta[b"epoch"], meta[b"last_seq"]) == (b"%d" % epoch, b"5")
    assert meta[b"canary"].decode() == a.keys.canary


def test_the_server_holds_no_ids_names_or_contents(fleet: RedisFleet) -> None:
    """The test searches every key and every value for every form in which ids and names could occur."""
    tenant, salt, adapter = "tenant-of-ours", "a-salt-to-hide", "an-adapter-to-hide"
    namespace = Namespace(tenant, "fp:secret-model", adapter=adapter, salt=salt)
    a, b = fleet.replica("a", snapshot_entries=2), fleet.join("b")
    cache = PrefixCache(CacheConfig(num_blocks=256, block_size=16), journal=a.journal)
    a.attach(cache)
    a.register()
    ids = [31_000 + i for i in prompt(1024)]
    for size in (300, 700, 1024):
        with cache.open(namespace, ids[:size]) as sequence:
            sequence.commit(size)
    fleet.eventually(lambda: hinted(b, namespace, ids) == {"a": 1024})
    job = a.create_job(namespace, 1024, ["a"])
    a.report_job(job.id, "failed", 512, error="out_of_blocks")
    a.set_limit(tenant, 100)
    assert a.reserve(tenant, 64).blocks == b.reserve(tenant, 36).blocks + 28
    pin = FleetPin("1" * 32, b.keys.namespace(namespace), 1024, "=a,b")
    assert a.keep_pin(tenant, pin, 60.0) and a.state_pin(tenant, pin.id, "failed", 0, "out_of_blocks")
    assert a.purge(tenant).generation == 1
    with cache.open(namespace, ids) as sequence:
        sequence.commit(len(ids))
    a.report_load(Load(1, 2, 3))
    cache.evict(30)
    fleet.settle()
    a.publish()
    a.beat()
    kinds = {key.decode().rpartition(":")[2] for key in fleet.client.scan_iter("*")}
    assert kinds >= {"meta", "lease", "ev", "snapmeta", "0", "load", "q", "p", "job"}
    assert kinds >= {"replicas", "purges", "jobs"}
    dump = b"\n".join(everything(fleet.client))
    assert len(dump) > 1000 and job.id.encode() in dump
    for text in (tenant, salt, adapter, "secret-model", SECRET.decode()):
        assert text.encode() not in dump and text.encode().hex().encode() not in dump
        assert text.encode("utf-16-le") not in dump
    for form in id_forms(ids):
        assert form not in dump


def everything(client: Any) -> Iterator[bytes]:
    """All keys and values of a server as bytes."""
    for key in client.scan_iter("*"):
        yield bytes(key)
        yield bytes(client.dump(key))
        kind = client.type(key)
        if kind == b"hash":
            for pair in client.hgetall(key).items():
                yield from pair
        elif kind == b"string":
            yield bytes(client.get(key))
        elif kind == b"stream":
            for entry_id, fields in client.xrange(key):
                yield bytes(entry_id)
                for pair in fields.items():
                    yield from pair
        else:
            assert kind == b"zset"
            yield from (member for member, _ in client.zrange(key, 0, -1, withscores=True))


def id_forms(ids: list[int]) -> Iterator[bytes]:
    """All runs of 3 ids, in binary forms, as decimal text and as hexadecimal text."""
    for at in range(len(ids) - 3):
        run = ids[at : at + 3]
        for kind in ("<u4", ">u4", "<u2", ">u2", "<u8"):
            binary = np.asarray(run, np.int64).astype(kind).tobytes()
            yield binary
            yield binary.hex().encode()
        for separator in (",", ", ", " "):
            yield separator.join(map(str, run)).encode()


def test_snapshots_bound_the_log(fleet: RedisFleet) -> None:
    a, b = fleet.join("a", snapshot_entries=10), fleet.join("b")
    for seed in range(100):
        store(a, ACME, prompt(256, seed))
        if seed % 5 == 0:
            a.publish()
            assert fleet.client.xlen(fleet.key("a", "ev")) <= 2 * 10 + 5
            fleet.eventually(lambda seed=seed: hinted(b, ACME, prompt(256, seed)))  # the reader keeps up
    a.publish()
    assert a.health().num_snapshots >= 5
    fleet.eventually(lambda: all(hinted(b, ACME, prompt(256, seed)) for seed in range(100)))
    assert b.health().num_view_gaps == 0, "a reader that keeps up needs no snapshot"
    assert fleet.join("late").health().num_view_digests == 100


# ---- gaps


def written(
    fleet: RedisFleet, **overrides: Any
) -> tuple[Coordinator, RedisCoordinator, list[int], list[int]]:
    """A writer and a reader. The reader has seen ``gone``, but not its removal nor the addition of ``new``."""
    writer = fleet.join("a", **overrides)
    gone, new = prompt(512), prompt(1024, seed=1)
    store(writer, ACME, gone)
    writer.publish()
    reader = reader_only(fleet)
    assert hinted(reader, ACME, gone) == {"a": 512}
    remove(writer, ACME, gone, 0)
    store(writer, ACME, new)
    writer.publish()
    return writer, reader, gone, new


def test_a_reader_that_slept_through_a_trim_loads_the_snapshot(fleet: RedisFleet) -> None:
    writer, reader, gone, new = written(fleet, snapshot_entries=4)
    for seed in range(2, 40):
        store(writer, ACME, prompt(256, seed))
        writer.publish()
    assert fleet.log("a")[0][1][b"s"] != b"1"
    reader.poll()
    assert hinted(reader, ACME, new) == {"a": 1024} and hinted(reader, ACME, gone) == {}
    assert reader.health().num_view_gaps == 1 and reader.health().num_view_digests == 4 + 38
    store(writer, ACME, gone)
    writer.publish()
    reader.poll()
    assert hinted(reader, ACME, gone) == {"a": 512} and reader.health().num_view_gaps == 1


def test_a_log_trimmed_to_nothing_is_noticed(fleet: RedisFleet) -> None:
    _, reader, gone, new = written(fleet, snapshot_entries=2, lease_s=60.0)
    assert fleet.client.hget(fleet.key("a", "snapmeta"), "seq") == fleet.log("a")[-1][1][b"s"] == b"4"
    fleet.client.xtrim(fleet.key("a", "ev"), maxlen=0, approximate=False)
    reader.poll()
    assert hinted(reader, ACME, new) == {"a": 1024} and hinted(reader, ACME, gone) == {}
    assert reader.health().num_view_gaps == 1


def test_a_log_that_lost_its_beginning_is_replaced(fleet: RedisFleet) -> None:
    """The writer replaces the log with its next beat.

    New readers could not read the old log, and others have forgotten it.
    """
    _, reader, gone, new = written(fleet)
    fleet.client.xtrim(fleet.key("a", "ev"), maxlen=0, approximate=False)
    reader.poll()
    late = fleet.join("late")
    fleet.eventually(lambda: hinted(late, ACME, new) == {"a": 1024} and hinted(late, ACME, gone) == {})
    reader.poll()
    assert hinted(reader, ACME, new) == {"a": 1024} and hinted(reader, ACME, gone) == {}


def test_a_gap_without_a_snapshot_drops_the_hints(fleet: RedisFleet) -> None:
    writer, reader, gone, new = written(fleet, lease_s=60.0)
    removal = fleet.log("a")[2][0]
    fleet.client.xdel(fleet.key("a", "ev"), removal)
    reader.poll()
    assert hinted(reader, ACME, gone) == {}, "the missing entry may have been the removal, and was"
    assert hinted(reader, ACME, new) == {"a": 1024} and reader.health().num_view_gaps == 1
    fleet.client.xtrim(fleet.key("a", "ev"), maxlen=0, approximate=False)
    store(writer, OTHER, gone)
    writer.publish()
    fleet.client.xtrim(fleet.key("a", "ev"), maxlen=0, approximate=False)
    reader.poll()
    assert hinted(reader, ACME, new) == hinted(reader, OTHER, gone) == {}
    store(writer, OTHER, new)
    writer.publish()
    reader.poll()
    assert hinted(reader, OTHER, new) == {"a": 1024}


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "foreign", "count"])
def test_a_damaged_snapshot_is_ignored(fleet: RedisFleet, damage: str) -> None:
    writer, _, gone, new = written(fleet, lease_s=60.0)  # without a beat, which would notice
    writer._dirty = True
    writer.publish()
    chunk, meta = fleet.key("a", "snap:0"), fleet.key("a", "snapmeta")
    data = fleet.client.get(chunk)
    if damage == "cut":
        fleet.client.set(chunk, data[:-5])
    elif damage == "flip":
        fleet.client.set(chunk, data[:20] + bytes([data[20] ^ 1]) + data[21:])
    elif damage == "missing":
        fleet.client.delete(chunk)
    elif damage == "foreign":
        fleet.client.hset(meta, "epoch", "x" * 100)
    else:
        fleet.client.hset(meta, "count", "999999999999")
    late = reader_only(fleet, "late")
    assert hinted(late, ACME, new) == hinted(late, ACME, gone) == {}
    store(writer, OTHER, gone)
    writer.publish()
    late.poll()
    assert hinted(late, OTHER, gone) == {"a": 512}


def test_a_log_with_a_wrong_last_number_is_replaced(fleet: RedisFleet) -> None:
    """A failover can lose acknowledged writes. Here the server forgets the last two sequence numbers."""
    writer, reader, gone, new = written(fleet)
    reader.poll()
    log = fleet.log("a")
    fleet.client.xdel(fleet.key("a", "ev"), *(entry_id for entry_id, _ in log[-2:]))
    fleet.client.hset(fleet.key("a", "meta"), "last_seq", "2")
    epoch = writer.info().epoch
    fleet.eventually(lambda: writer.health().num_snapshots == 1)
    store(writer, OTHER, gone)
    writer.publish()
    reader.poll()
    assert hinted(reader, ACME, new) == {"a": 1024} and hinted(reader, OTHER, gone) == {"a": 512}
    assert hinted(reader, ACME, gone) == {} and writer.info().epoch == epoch


# ---- records that an attacker may have written


def test_records_that_no_replica_wrote_are_ignored(fleet: RedisFleet) -> None:
    a, b = fleet.join("a"), fleet.join("b")
    client = fleet.client
    soon = int(time.time() * 1000) + _HOUR_MS
    bad_names = {
        "nobody": soon,
        "wrong-type": soon,
        "broken": soon,
        "a b": soon,
        "\xff": soon,
        "x" * 300: soon,
    }
    client.zadd("rk1:replicas", bad_names)
    client.set(fleet.key("wrong-type", "meta"), "text")
    fields = client.hgetall(fleet.key("a", "meta"))
    client.hset(fleet.key("broken", "meta"), mapping=fields | {b"epoch": b"-1"})
    b.poll()  # type: ignore[attr-defined]
    assert names(b.replicas()) == ["b", "a"]
    ids = prompt(512)
    store(a, ACME, ids)
    fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})


def test_a_malformed_entry_costs_the_hints_before_it(fleet: RedisFleet) -> None:
    writer, reader, gone, new = written(fleet)
    epoch, seq = writer.info().epoch, writer.info().last_seq
    fleet.client.xadd(fleet.key("a", "ev"), {"o": "store", "b": "x"}, id=f"{epoch}-{seq + 1}")
    reader.poll()
    assert hinted(reader, ACME, new) == hinted(reader, ACME, gone) == {}


def test_the_view_keeps_to_its_budget(fleet: RedisFleet) -> None:
    a = fleet.join("a")
    reader = reader_only(fleet, view_digests=5)
    ids, others = prompt(1024), prompt(1024, seed=1)
    store(a, ACME, ids)
    store(a, ACME, others)
    a.publish()
    reader.poll()
    assert hinted(reader, ACME, ids) == {"a": 1024} and hinted(reader, ACME, others) == {"a": 256}
    health = reader.health()
    assert (health.num_view_digests, health.num_view_forgotten) == (5, 3)
    a.leave()
    reader.poll()
    assert reader.health().num_view_digests == 0


# ---- the server itself


def test_scripts_are_loaded_again_after_a_flush(fleet: RedisFleet) -> None:
    a, b = fleet.join("a"), fleet.join("b")
    before = a.health().num_script_reloads
    ids = prompt(512)
    fleet.client.script_flush()
    store(a, ACME, ids)
    fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})
    assert a.health().num_script_reloads > before and a.health().num_outages == 0


@pytest.mark.slow
def test_a_server_killed_and_restarted_is_filled_again(fleet: RedisFleet) -> None:
    a, b = (fleet.join(name, lease_s=fleet.brief_s) for name in "ab")
    kept, gone = prompt(512), prompt(512, seed=1)
    store(a, ACME, kept)
    store(a, ACME, gone)
    fleet.eventually(lambda: hinted(b, ACME, kept) and hinted(b, ACME, gone))
    fleet.server.kill()
    fleet.eventually(lambda: a.health().state == b.health().state == "unavailable")
    fleet.eventually(lambda: a.peers() == [] and b.peers() == [])
    remove(a, ACME, gone, 0)
    fleet.eventually(lambda: a.health().num_queued == 0)
    fleet.server.restart()
    fleet.eventually(lambda: a.health().is_ok and b.health().is_ok)
    fleet.eventually(lambda: hinted(b, ACME, kept) == {"a": 512})
    assert hinted(b, ACME, gone) == {}


def test_a_replica_that_starts_before_its_server_joins_later(fleet: RedisFleet) -> None:
    fleet.server.kill()
    a = fleet.join("a")
    assert a.health().state == "unavailable"
    fleet.server.restart()
    fleet.eventually(lambda: a.health().is_ok and a.info().epoch > 0)


@pytest.mark.slow
def test_a_store_that_another_fleet_took_over_refuses_a_replica(fleet: RedisFleet) -> None:
    fleet.server.kill()
    a = fleet.join("a", lease_s=fleet.brief_s)
    fleet.server.restart()
    stranger = fleet.replica("stranger", fleet_secret=b"another secret of some length")
    with suppress(ConfigError):  # the other replica registered first
        stranger.register()
    fleet.eventually(lambda: stranger.health().is_ok or a.health().is_ok)
    if not a.health().is_ok:
        fleet.eventually(lambda: a.health().state == "refused")
        assert "stranger" in a.health().reason
        stranger.leave()
    fleet.eventually(lambda: a.health().is_ok)


def test_one_of_several_replicas_that_claim_one_id_remains(fleet: RedisFleet) -> None:
    claimants = [fleet.replica("a") for _ in range(4)]

    def claim(claimant: Coordinator) -> None:
        with suppress(StaleEpoch):
            claimant.register()

    threads = [threading.Thread(target=claim, args=(claimant,)) for claimant in claimants]
    for thread in threads:
        thread.start()
    for thread in threads:
        ended(thread)
    fleet.eventually(lambda: sum(c.health().state == "fenced" for c in claimants) == 3)
    winner = next(c for c in claimants if c.health().state != "fenced")
    assert winner.info().epoch == max(c.info().epoch for c in claimants)
    winner.beat()


@pytest.mark.parametrize("seed", [1, 2])
def test_no_false_hint_remains_after_random_faults(fleet: RedisFleet, seed: int) -> None:
    """Kills, pauses, trims, lost scripts and lost numbers in random order, while prefixes come and go."""
    chance = random.Random(seed)
    a, b = fleet.join("a", snapshot_entries=8, queue_records=50), fleet.join("b")
    prompts = [prompt(256 * chance.randint(1, 20), seed=i) for i in range(4)]
    held: dict[tuple[Namespace, int], int] = {}
    faults: list[Callable[[], object]] = [
        fleet.server.restart,
        fleet.client.script_flush,
        lambda: fleet.client.xtrim(fleet.key("a", "ev"), maxlen=chance.randint(0, 5), approximate=False),
        lambda: fleet.client.hset(fleet.key("a", "meta"), "last_seq", chance.randint(0, 9)),
        lambda: fleet.client.delete(
            fleet.key("a", chance.choice(["meta", "lease", "ev", "snapmeta", "snap:0"]))
        ),
        lambda: fleet.client.delete("rk1:replicas"),
        fleet.server.pause,
    ]
    for _ in range(12):
        for _ in range(chance.randint(0, 5)):
            random_step(a, chance, prompts, held)
        if chance.random() < 0.3:
            fleet.settle()
        chance.choice(faults)()
        for _ in range(chance.randint(0, 3)):
            random_step(a, chance, prompts, held)
        fleet.server.resume()
    fleet.eventually(lambda: a.health().is_ok and b.health().is_ok)
    fleet.eventually(
        lambda: all(
            hinted(b, namespace, ids).get("a", 0) <= held.get((namespace, index), 0)
            for namespace in (ACME, OTHER)
            for index, ids in enumerate(prompts)
        )
    )
    a._dirty = True
    fleet.eventually(lambda: agrees(b, prompts, held))


CHILD = """
import sys, threading
from radixkv import Namespace
from radixkv.coordination import connect
assert "torch" not in sys.modules
import numpy as np
url, secret, seed = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
me = connect(url, replica_id="child", fleet_secret=secret, fingerprint="fp:model", block_size=16,
             address="http://127.0.0.1:1/child", lease_s=3.0)
me.register()
ids = np.random.default_rng(seed).integers(0, 32_000, 512).astype("<u4").tobytes()
me.journal.stored(Namespace("acme", "fp:model"), ids, 0, 512)
while me.health().num_queued or not me.health().is_ok:
    threading.Event().wait(0.01)
print(me.info().epoch, flush=True)
threading.Event().wait()
"""


def child(fleet: RedisFleet, seed: int) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", CHILD, fleet.server.url, SECRET.hex(), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.slow
def test_a_killed_process_leaves_the_view_and_its_restart_counts_anew(fleet: RedisFleet) -> None:
    b = fleet.join("b")
    first, first_epoch = child(fleet, 0)
    try:
        fleet.eventually(lambda: hinted(b, ACME, prompt(512, 0)) == {"child": 512})
        first.kill()
        first.wait()
        fleet.eventually(lambda: b.peers() == [])
        assert hinted(b, ACME, prompt(512, 0)) == {}
        second, second_epoch = child(fleet, 1)
        try:
            assert second_epoch > first_epoch
            fleet.eventually(lambda: hinted(b, ACME, prompt(512, 1)) == {"child": 512})
            assert hinted(b, ACME, prompt(512, 0)) == {}
        finally:
            end(second)
    finally:
        end(first)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_process_that_slept_through_its_successor_is_fenced(fleet: RedisFleet) -> None:
    """Two processes with one id. Here the older one is a paused writer with queued entries."""
    older = fleet.join("a")
    ids = prompt(512)
    fleet.kill(older)
    younger = fleet.join("a")
    store(older, ACME, ids)
    with pytest.raises(StaleEpoch):
        older.publish()
    assert [fields[b"e"] for _, fields in fleet.log("a")] == [b"%d" % younger.info().epoch]


def test_announcements_that_were_lost_are_applied_once(fleet: RedisFleet) -> None:
    """Positions then start again. Later announcements must be neither missed nor repeated with every beat."""
    a, purged = fleet.replica("a"), list[tuple[str, int]]()
    a.attach(
        PrefixCache(CacheConfig(num_blocks=64, block_size=16)),
        lambda tenant, raised: purged.append((tenant, raised.generation)),
    )
    a.register()
    for _ in range(3):
        a.purge("acme")
    fleet.client.delete("rk1:purges", f"rk1:{{t:{a.keys.tenant('acme').hex()}}}:q")
    b = fleet.join("b")
    assert b.purge("acme").generation in (1, 4), "whether or not the purge was restored before"
    fleet.eventually(
        lambda: "a" in b.purge_report("acme").confirmed and b.purge_report("acme").generation >= 3
    )
    assert purged[:3] == [("acme", 1), ("acme", 2), ("acme", 3)] and len(purged) > 3
    num_beats = a._num_beats
    fleet.eventually(lambda: a._num_beats > num_beats + 6)
    num_purged = len(purged)
    fleet.eventually(lambda: a._num_beats > num_beats + 15)
    assert len(purged) == num_purged, "the purge was applied with every beat"


def test_a_server_restored_to_an_old_state_gets_the_purge_again(fleet: RedisFleet) -> None:
    """Every registration is still there, and one replica has not seen the purge."""
    a, b = Purged(fleet, "a"), Purged(fleet, "b")
    b.warm(ACME, prompt(512))
    fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {"b": 512})
    until, epochs = a.replica._lease_until, (a.replica.info().epoch, b.replica.info().epoch)
    fleet.eventually(lambda: a.replica._lease_until > until)  # it has sent b everything that it knows
    assert isinstance(fleet.server, RedisServer)
    fleet.server.command("SAVE")
    b.replica._stop_threads()
    a.replica.purge("acme")
    a.replica._stop_threads()
    fleet.server.kill()
    fleet.server.come_back()
    assert not fleet.client.exists(f"rk1:{{t:{a.replica.keys.tenant('acme').hex()}}}:q")
    a.replica._start_threads()
    b.replica._start_threads()
    fleet.eventually(lambda: b.purged and works(lambda: a.replica.purge_report("acme")))
    fleet.eventually(lambda: a.replica.purge_report("acme").confirmed == ("a", "b"))
    assert epochs == (a.replica.info().epoch, b.replica.info().epoch)
    b.warm(ACME, prompt(512))
    fleet.eventually(lambda: hinted(a.replica, ACME, prompt(512)) == {"b": 512})


# ---- clocks


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_replica_works_on_after_its_clock_jumps_by_an_hour(fleet: RedisFleet, seconds: float) -> None:
    """A replica's clock jumps. The replica still sends beats, reads, and notices dead replicas."""
    turned = [0.0]
    a = fleet.make_at(fleet.server.url, fleet.settings("a", {}), lambda: time.monotonic() + turned[0])
    b, gone = fleet.join("b"), fleet.join("gone")
    fleet.members.append(a)
    a.register()
    fleet.eventually(lambda: names(a.peers()) == ["b", "gone"] and names(b.peers()) == ["a", "gone"])
    turned[0] = seconds
    fleet.kill(gone)
    beats = a._lease_until
    fleet.eventually(lambda: a._lease_until != beats and a.knows_generations)
    fleet.eventually(lambda: names(a.peers()) == ["b"] and names(b.peers()) == ["a"])
    store(b, ACME, prompt(512))
    store(a, OTHER, prompt(512))
    fleet.eventually(lambda: hinted(a, ACME, prompt(512)) == {"b": 512})
    fleet.eventually(lambda: hinted(b, OTHER, prompt(512)) == {"a": 512})


@pytest.mark.slow
def test_a_lease_ends_even_if_the_server_does_not_end_it(fleet: RedisFleet) -> None:
    """This happens after the server's clock was turned back: only beats extend a lease."""
    a, b = fleet.join("a"), fleet.join("b")
    fleet.eventually(lambda: names(b.peers()) == ["a"])
    job = b.create_job(ACME, 512, ["a"])
    fleet.kill(a)
    fleet.client.pexpire(fleet.key("a", "lease"), 3_600_000)
    fleet.eventually(lambda: b.peers() == [])
    fleet.client.pexpire(fleet.key("a", "lease"), 3_600_000)
    b.poll()  # type: ignore[attr-defined]
    assert b.peers() == []
    found = b.job(job.id, "acme")
    assert found is not None and found.parts[0].state == "lost"
    b.purge("acme")
    fleet.eventually(lambda: b.purge_report("acme").unconfirmed == ("a",))
    assert b.job(job.id, "acme") is None, "a purge drops the jobs of its tenant"
    late = fleet.join("late")
    fleet.eventually(lambda: names(late.peers()) == ["b"])


# ---- writes that must not be lost


def test_writes_do_not_wait_without_a_redis_replica(fleet: RedisFleet) -> None:
    a = fleet.join("a")
    assert a.set_limit("acme", 5).replicated is None and a.purge("acme").replicated is None
    assert a.health().num_unreplicated == 0
    assert "cmdstat_wait" not in fleet.server.text("INFO commandstats")  # type: ignore[union-attr]


def test_important_writes_wait_for_the_redis_replica(redis_sentinel: SentinelServers) -> None:
    with closing(RedisFleet(redis_sentinel, WITH_REDIS_REPLICAS_S)) as fleet:
        master, replica = redis_sentinel.master, redis_sentinel.replica
        master.command("CONFIG RESETSTAT")
        a, told = fleet.join("a", lease_s=60.0), list[bool | None]()

        def is_replicated(durable: Durable | Purge) -> bool:
            told.append(durable.replicated)
            return durable.replicated is True

        fleet.eventually(
            lambda: is_replicated(a.set_limit("acme", 5))
        )  # unless the replica stalls for a moment
        fleet.eventually(lambda: is_replicated(a.purge("acme")))
        assert None not in told and a.health().num_unreplicated - told.count(False) in (0, 1), (
            "or the epoch was not replicated"
        )
        before = num_waits(master)
        store(a, ACME, prompt(512))
        fleet.eventually(lambda: works(a.publish) and works(a.beat))
        assert num_waits(master) == before >= 3, "only the epoch, the limit and the generation wait"
        replica.pause()
        try:
            num_unreplicated = a.health().num_unreplicated
            fleet.eventually(lambda: a.set_limit("acme", 6).replicated is False)
            assert a.health().num_unreplicated > num_unreplicated
            fleet.eventually(lambda: works(a.beat) and a.health().is_ok)
        finally:
            replica.resume()


def num_waits(server: RedisServer) -> int:
    """How often the server was asked to wait for its replica."""
    return int(server.text("INFO commandstats").split("cmdstat_wait:calls=")[1].split(",")[0])


@pytest.mark.slow
def test_the_fleet_recovers_from_a_failover(tmp_path: Path) -> None:
    """The master dies, and the sentinels promote the replica. Clients learn of it only from the sentinels."""
    servers = SentinelServers(need_binary(), tmp_path)
    try:
        with closing(RedisFleet(servers, WITH_REDIS_REPLICAS_S)) as fleet:
            old = servers.master
            a, b = fleet.join("a"), fleet.join("b")
            kept, gone = prompt(512), prompt(512, seed=1)
            store(a, ACME, kept)
            store(a, ACME, gone)
            fleet.eventually(lambda: a.set_limit("acme", 7).replicated and a.purge("other").replicated)
            generation = a.purges.generation("other")
            fleet.eventually(lambda: hinted(b, ACME, kept) and hinted(b, ACME, gone))
            old.kill()
            remove(a, ACME, gone, 0)
            servers.fail_over()
            fleet.eventually(lambda: a.health().is_ok and b.health().is_ok)
            fleet.eventually(lambda: hinted(b, ACME, kept) == {"a": 512} and not hinted(b, ACME, gone))
            fleet.eventually(lambda: a.store.tenant(a.keys.tenant("acme")).limit == 7)
            fleet.eventually(lambda: a.store.tenant(a.keys.tenant("other")).generation == generation)
    finally:
        servers.kill()


@pytest.mark.slow
@pytest.mark.parametrize("is_lagging", [False, True])
def test_the_fleet_recovers_when_all_primaries_are_replaced(tmp_path: Path, is_lagging: bool) -> None:
    """The replicas take over one after the other, with the data that they have.

    Lagging replicas lack the last writes.
    """
    servers = ClusterServers(need_binary(), tmp_path, has_replicas=True)
    try:
        with closing(RedisFleet(servers, WITH_REDIS_REPLICAS_S)) as fleet:
            a, b = fleet.join("a"), fleet.join("b")
            kept, gone = prompt(512), prompt(512, seed=1)
            store(a, ACME, gone)
            fleet.eventually(lambda: a.set_limit("acme", 7))
            for node in servers.nodes:  # a plain URL may name any of them
                with closing(RedisStore(node.url, LIMIT_S)) as plain:
                    assert plain.tenant(a.keys.tenant("acme")).limit == 7
            home = fleet.client.keyslot(fleet.key("a", "meta")) * 3 // 16_384
            fleet.eventually(lambda: a.purge("other"))
            generation = a.purges.generation("other")
            fleet.eventually(lambda: hinted(b, ACME, gone) and a.health().is_ok)
            for shard, old in enumerate(list(servers.primaries)):
                fleet.eventually(lambda old=old, new=servers.replicas[shard]: offset(old) == offset(new))
                if is_lagging:
                    servers.replicas[shard].pause()
                if shard == home:
                    store(a, ACME, kept)
                    remove(a, ACME, gone, 0)
                    fleet.eventually(lambda: hinted(b, ACME, kept) and not hinted(b, ACME, gone))
                old.kill()
                servers.replicas[shard].resume()
                servers.take_over(shard)
            fleet.eventually(lambda: works(lambda: a.set_limit("other", 3)))
            fleet.eventually(lambda: a.health().is_ok and b.health().is_ok)
            fleet.eventually(lambda: hinted(b, ACME, kept) == {"a": 512} and not hinted(b, ACME, gone))
            fleet.eventually(lambda: a.store.tenant(a.keys.tenant("acme")).limit == 7)
            fleet.eventually(lambda: a.store.tenant(a.keys.tenant("other")).generation == generation)
    finally:
        servers.kill()


def offset(server: RedisServer) -> str:
    """The replication offset of a server."""
    return server.text("INFO replication").split("master_repl_offset:")[1].split()[0]


# ---- a match never waits for Redis


def test_a_server_that_does_not_answer_delays_no_local_call(fleet: RedisFleet) -> None:
    """Local calls continue while the writing thread waits for a reply and holds the writers' lock."""
    a = fleet.replica("a")
    cache = PrefixCache(CacheConfig(num_blocks=512, block_size=16), journal=a.journal)
    a.attach(cache)
    a.register()
    fleet.server.pause()
    fleet.eventually(lambda: is_waiting(a))
    for seed in range(200):
        ids = prompt(512, seed)
        with cache.open(ACME, ids) as sequence:
            sequence.commit(512)
        cache.match(ACME, ids)
        a.hints(ACME, ids)
        a.peers()
        a.health()
    assert is_waiting(a) and a.health().num_outages == 0, "no local call waited for the answer or its timeout"


def is_waiting(coordinator: Coordinator) -> bool:
    """Whether one of its threads holds the writers' lock. With a paused server that means it waits for a reply."""
    is_free = coordinator._writing.acquire(blocking=False)
    if is_free:
        coordinator._writing.release()
    return not is_free


@pytest.mark.slow
def test_replicas_recover_when_a_paused_server_resumes(fleet: RedisFleet) -> None:
    fleet.reply_timeout_s = None
    a, b = (fleet.replica(name, lease_s=fleet.brief_s) for name in "ab")
    cache = PrefixCache(CacheConfig(num_blocks=512, block_size=16), journal=a.journal)
    a.attach(cache)
    a.register()
    b.register()
    fleet.server.pause()
    fleet.eventually(lambda: a.health().state == b.health().state == "unavailable")
    ids = prompt(512)
    with cache.open(ACME, ids) as sequence:
        sequence.commit(512)
    fleet.eventually(lambda: not a.info().live and not a.knows_generations)
    fleet.eventually(lambda: a.peers() == [] and a.hints(ACME, ids) == [])
    fleet.server.resume()
    fleet.eventually(lambda: a.health().is_ok and b.health().is_ok)
    fleet.eventually(lambda: hinted(b, ACME, ids) == {"a": 512})


# ---- access: TLS, users, passwords


def test_a_user_with_the_documented_rules_can_do_everything(fleet: RedisFleet) -> None:
    documented = (ROOT / "docs" / "guides" / "operators.md").read_text(encoding="utf-8")
    rules = documented.split("```acl\n")[1].split("```")[0].replace("\n", " ").strip()
    server = fleet.server
    assert isinstance(server, RedisServer)
    server.command(rules.replace(">PASSWORD", ">a-password"))
    try:
        url = f"redis://radixkv:a-password@{server.host}:{server.port}/0"
        a, b = (fleet.make_at(url, fleet.settings(name, {"snapshot_entries": 2})) for name in "ab")
        fleet.members += [a, b]
        cache = PrefixCache(CacheConfig(num_blocks=64, block_size=16), journal=a.journal)
        a.attach(cache)
        a.register()
        b.register()
        fleet.client.script_flush()
        for seed in range(6):
            with cache.open(ACME, prompt(512, seed)) as sequence:
                sequence.commit(512)
        fleet.eventually(lambda: hinted(b, ACME, prompt(512, 5)) == {"a": 512})
        a.set_limit("acme", 5)
        assert a.reserve("acme", 6).blocks == 5 and a.purge("other").generation == 1
        job = a.create_job(ACME, 512, ["a"])
        fleet.eventually(lambda: names(a.peers()) == ["b"])
        assert a.report_job(job.id, "done", 512) and a.extend_job(job.id, "b")
        assert a.job(job.id, "acme") is not None
        until = a._lease_until
        fleet.eventually(lambda: a._lease_until > until or not a.health().is_ok)
        with closing(Router.connect(url, fleet_secret=SECRET, background=False)) as router:
            ranked = partial(router.rank, ACME, prompt(512, 5))
            fleet.eventually(lambda: {each.replica.id for each in ranked()} == {"a", "b"})
        assert a.health().is_ok and b.health().is_ok and a.health().num_outages == 0
        a.leave()
        wrong = RedisCoordinator(Settings(**fleet.settings("c", {})), url.replace("a-password", "wrong"))
        fleet.members.append(wrong)
        wrong.register()
        assert wrong.health().state == "unavailable" and "wrong" not in wrong.health().reason
    finally:
        server.command("ACL DELUSER radixkv")


def test_a_connection_that_is_reset_while_a_read_waits_is_unavailable(redis_server: RedisServer) -> None:
    with (
        closing(TcpProxy(redis_server.host, redis_server.port)) as proxy,
        closing(RedisStore(f"redis://{redis_server.host}:{proxy.port}/0", LIMIT_S)) as store,
    ):
        assert store.read({"one": (1, 0)}, 0.01) == {}, "a read waits in the server"
        proxy.reset = proxy.refuse = True
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                while True:
                    store.read({"one": (1, 0)}, 0.2)
        proxy.reset = proxy.refuse = False
        assert store.read({"one": (1, 0)}, 0.01) == {}


def test_a_read_from_an_earlier_position_does_not_wait_for_a_later_one(fleet: RedisFleet) -> None:
    for seq in (1, 2, 3):
        fleet.client.xadd(fleet.key("one", "ev"), {"o": "clear"}, id=f"1-{seq}")
    with closing(RedisStore(fleet.server.url, LIMIT_S)) as store:
        assert store.read({"one": (1, 3)}, 0.01) == {}, "a read waits in the server"
        assert [each.seq for each in store.read({"one": (1, 1)}, LIMIT_S)["one"]] == [2, 3]


def test_a_client_notices_that_it_is_connected_to_itself() -> None:
    """A client that connects from a port to the same port, without a listener, is connected to itself."""
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", 0))
        alone.connect(alone.getsockname())
        connection = redis.Connection(*alone.getsockname(), redis_connect_func=_greet)
        connection._sock = alone
        with pytest.raises(redis.ConnectionError, match="itself"):
            _greet(connection)


def test_a_restarted_server_gets_its_port_back(redis_server: RedisServer) -> None:
    """The port stays free, however often clients tried to connect meanwhile."""
    with closing(RedisStore(redis_server.url, LIMIT_S)) as store:
        store.tenant(b"t" * 32)
        redis_server.kill()
        for _ in range(200):
            with pytest.raises(StoreUnavailable):
                store.tenant(b"t" * 32)
        redis_server.restart()
        eventually(lambda: works(lambda: store.tenant(b"t" * 32)))


GARBAGE = (
    b"",
    b":x\r\n",
    b":1\r\n",
    b"$x\r\n",
    b"$-1\r\n",
    b"$3\r\nabc\r\n",
    b"*-7\r\n",
    b"*0\r\n",
    b"*1\r\n" * 5_000,
    b"*2\r\n$-1\r\n:1\r\n",
    b"*3\r\n+OK\r\n+x\r\n+y\r\n",
    b"*5\r\n+OK\r\n:1\r\n:-1\r\n+x\r\n$-1\r\n",
    b"*1\r\n*2\r\n+rk1:{r:a}:ev\r\n*1\r\n*2\r\n+1-1\r\n$-1\r\n",
    b"*1\r\n*2\r\n+\xff\r\n*1\r\n:7\r\n",
    b"\x00" * 100,
    b"%1\r\n+a\r\n+b\r\n",
    b"+OK\r\n",
    b"-\r\n",
    b"-MOVED\r\n",
    b"-MOVED x y\r\n",
    b"-ASK 1 :\r\n",
    b"-LOADING Redis is loading the dataset in memory\r\n",
    b"-READONLY You can't write against a read only replica.\r\n",
    b"-NOSCRIPT No matching script.\r\n",
)


FIVE = Limit(5, 1, "0" * 64)


def operations(store: RedisStore) -> Iterator[Callable[[], object]]:
    """Every operation of a store."""
    writer, holdings = Writer("a", 1, "nonce"), Holdings()
    holdings.store(b"n" * 32, [b"d" * 16])
    tenant, job = (
        b"t" * 32,
        WarmJob("1" * 32, b"t" * 32, b"n" * 32, 9, (JobPart(*writer, "queued"),), writer, 1),
    )
    registration = Registration("a", 0, "nonce", "http://h", "fp", 16, WIRE_VERSION, "canary")
    yield lambda: store.boot(registration)
    beat = replace(registration, epoch=1, proof="proof", lease_ms=60_000, beats=1)
    yield lambda: store.beat(beat, Load())
    yield lambda: store.append(writer, 2, [Entry("clear", b"")])
    yield lambda: store.snapshot(writer, 1, 1, holdings, anew=True)
    yield lambda: store.fetch(["a", "b"])
    yield store.fetch
    yield lambda: store.read({"a": (0, 0)})
    yield lambda: store.read({"a": (0, 0)}, 0.02)
    yield lambda: store.load("a", 1, 0)
    yield lambda: store.set_limit(tenant, FIVE, 0)
    yield lambda: store.reserve(tenant, Share(*writer, "fp", 3), 60.0)
    raised = Raised(1, "0" * 32, "a", "nonce", "0" * 64)
    yield lambda: store.raise_generation(tenant, raised, NOTHING)
    yield lambda: store.announce(tenant)
    yield lambda: store.confirm(tenant, writer, raised, "0" * 64)
    yield lambda: store.tenant(tenant)
    yield lambda: store.purges(0)
    yield lambda: store.look_at([tenant], "a")
    yield lambda: store.unannounced({tenant: 1})
    yield lambda: store.save_job(job)
    yield lambda: store.own_job(job.id, Writer("b", 1, "nonce"), writer)
    yield lambda: store.add_part(job.id, writer, JobPart("b", 1, "nonce", "queued"))
    yield lambda: store.save_part(job.id, job.parts[0])
    yield lambda: store.load_job(job.id)
    yield lambda: store.leave(writer, "proof")


@pytest.mark.slow
def test_any_reply_of_a_server_is_an_answer_or_store_unavailable(redis_server: RedisServer) -> None:
    """The proxy returns garbage instead of a reply, for the first or for a later reply of a connection."""
    num_refused = 0
    with (
        closing(TcpProxy(redis_server.host, redis_server.port)) as proxy,
        closing(RedisStore(f"redis://{redis_server.host}:{proxy.port}/0", LIMIT_S)) as store,
    ):
        for number, garbage in enumerate(GARBAGE):
            for operation in operations(store):
                if number % 2:
                    with suppress(StoreUnavailable):
                        store.tenant(b"t" * 32)  # a connection that works
                proxy.garble = garbage
                for _ in range(2):
                    try:
                        operation()
                    except StoreUnavailable:
                        num_refused += 1
                proxy.garble = None
        for operation in operations(store):
            eventually(partial(works, operation))
    assert num_refused > 100


@pytest.mark.parametrize("garbage", GARBAGE[1::3])
def test_garbage_from_a_cluster_or_a_sentinel_makes_the_store_unavailable(
    redis_cluster: ClusterServers, redis_sentinel: SentinelServers, garbage: bytes
) -> None:
    """The garbage replaces the map of slots, or the master's name."""
    for kind, server, path in (
        ("cluster", redis_cluster.nodes[0], ""),
        ("sentinel", redis_sentinel.sentinels[0], f"/{redis_sentinel.SERVICE}"),
    ):
        with (
            closing(TcpProxy(server.host, server.port)) as proxy,
            closing(RedisStore(f"redis+{kind}://127.0.0.1:{proxy.port}{path}", LIMIT_S)) as store,
        ):
            proxy.garble = garbage
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    store.set_limit(b"t" * 32, FIVE, 0)
            proxy.garble = None
            eventually(partial(works, lambda store=store: store.set_limit(b"t" * 32, FIVE, 0)))
            eventually(lambda store=store: store.tenant(b"t" * 32).limit == 5)


@pytest.fixture
def tls_proxy(redis_server: RedisServer, tmp_path: Path) -> Iterator[tuple[TcpProxy, str]]:
    """A TLS proxy in front of the server, which is built without TLS, and the file with its authority's certificate."""
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(trusted)
    proxy = TcpProxy(redis_server.host, redis_server.port, context)
    yield proxy, str(trusted)
    proxy.close()


def test_tls_with_a_user_and_a_password(tls_proxy: tuple[TcpProxy, str], fleet: RedisFleet) -> None:
    """The proxy is created first and closed last: Python leaks a connection that is reset before its handshake."""
    proxy, trusted = tls_proxy
    server = fleet.server
    assert isinstance(server, RedisServer)
    server.command("ACL SETUSER with-tls on >p%40ss ~* +@all".replace("%40", "@"))
    try:
        url = f"rediss://with-tls:p%40ss@127.0.0.1:{proxy.port}/0?ssl_ca_certs={trusted}"
        a, b = (fleet.make_at(url, fleet.settings(name, {})) for name in "ab")
        fleet.members += [a, b]
        a.register()
        b.register()
        store(a, ACME, prompt(512))
        fleet.eventually(lambda: hinted(b, ACME, prompt(512)) == {"a": 512})
        assert "user=with-tls" in server.text("CLIENT LIST")
        for wrong in (
            f"rediss://with-tls:p%40ss@127.0.0.1:{proxy.port}/0",  # the certificate's authority is not trusted
            url.replace("p%40ss", "other"),
            url.replace("rediss", "redis").split("?")[0],
        ):
            stranger = RedisCoordinator(Settings(**fleet.settings("c", {"background": False})), wrong)
            fleet.members.append(stranger)
            stranger.register()
            assert stranger.health().state == "unavailable" and "p@ss" not in stranger.health().reason
    finally:
        server.command("ACL DELUSER with-tls")


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "service", "options"),
    [
        ("redis://h", "single", [("h", 6379)], "", {}),
        ("redis://u:p%20w@h:1/3", "single", [("h", 1)], "", {"username": "u", "password": "p w", "db": 3}),
        ("rediss://h:1", "single", [("h", 1)], "", {"ssl": True}),
        ("redis://[::1]:7", "single", [("::1", 7)], "", {}),
        ("redis+cluster://h:1,i:2", "cluster", [("h", 1), ("i", 2)], "", {}),
        ("rediss+cluster://:w@h:1,i", "cluster", [("h", 1), ("i", 6379)], "", {"password": "w", "ssl": True}),
        ("redis+sentinel://h,i:2/main/4", "sentinel", [("h", 26379), ("i", 2)], "main", {"db": 4}),
        (
            "rediss+sentinel://u:w@h/main?sentinel_password=x&ssl_ca_certs=/ca",
            "sentinel",
            [("h", 26379)],
            "main",
            {"username": "u", "password": "w", "ssl": True, "sentinel_password": "x", "ssl_ca_certs": "/ca"},
        ),
    ],
)
def test_urls_of_every_form_are_parsed(
    url: str, kind: str, hosts: list[tuple[str, int]], service: str, options: dict[str, Any]
) -> None:
    address = Address.parse(url)
    assert (address.kind, list(address.hosts), address.service) == (kind, hosts, service)
    assert {name: value for name, value in address.options.items() if value is not None} == options


@pytest.mark.parametrize(
    "url",
    [
        "redis://h,i",
        "redis+sentinel://h:1",
        "redis+cluster://h:port",
        "redis+nothing://h",
        "redis://u:secret@h:x",
        "redis://u:secret/secret@h",
        "redis+cluster://u:secret?@h:1,i:2",
        "redis://h:0",
        "redis://h/three",
        "redis://h/-1",
        "redis://h?no_such_option=1",
        "redis+cluster://h?no_such_option=1&password=secret",
        "redis+sentinel://h/?sentinel_password=secret",
        "redis+sentinel://u:w@h/?sentinel_password=an@secret",
        "unix:///place?no_such_option=1",
        "redis://h?retry=1&password=secret",
        "redis://u:secret",
        "redis://:secret",
        "redis://u:1/secret",
        "redis://u:1?secret=1",
        "redis://h?secret_option=1",
        "redis://h?no_such_option=secret",
        "redis://h?db=secret",
        "redis+cluster://h:1,u:secret",
        "redis+sentinel://u:secret/service",
        "redis://[u:secret]",
        "u:secret",
        "ftp://u:secret",
        "ftp://h",
        "",
    ],
)
def test_invalid_urls_are_refused_without_their_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Address.parse(url)
    assert "secret" not in str(refusal.value)
    with pytest.raises(ConfigError):
        RedisStore(url)


def test_a_url_of_another_type_is_refused_without_its_secret() -> None:
    with pytest.raises(ConfigError) as refusal:
        Address.parse(b"redis://u:secret@h")  # type: ignore[arg-type]
    assert "secret" not in str(refusal.value)


def test_url_options_cannot_change_the_reply_format(fleet: RedisFleet) -> None:
    url = f"{fleet.server.url}?decode_responses=true&protocol=3&encoding=latin1"
    with closing(RedisCoordinator(Settings(**fleet.settings("a", {})), url)) as a:
        a.register()
        assert a.health().is_ok, a.health().reason
        a.create_job(ACME, 512, ["a"])


def test_a_plain_url_finds_a_cluster(redis_cluster: ClusterServers) -> None:
    with closing(RedisFleet(redis_cluster)) as fleet:
        stores = [RedisStore(node.url, LIMIT_S) for node in redis_cluster.nodes]
        try:
            for index in range(30):
                tenant = bytes([index]) * 32
                limit = Limit(index, 1, "0" * 64)
                with suppress(StoreUnavailable):
                    stores[0].set_limit(tenant, limit, 0)
                stores[0].set_limit(tenant, limit, 0)
                assert [each.tenant(tenant).limit for each in stores] == [index] * 3
            sizes = [int(node.command("DBSIZE")[1:]) for node in redis_cluster.nodes]
            assert sum(sizes) == 30 and min(sizes) > 0
        finally:
            for each in stores:
                each.close()
        assert fleet.members == []


@pytest.mark.slow
def test_the_other_shards_work_while_one_is_away(redis_cluster: ClusterServers) -> None:
    """The logs and registrations of the other shards are still read.

    The leases of replicas on the lost shard expire.
    """
    with closing(RedisFleet(redis_cluster, reply_timeout_s=None)) as fleet:
        homes = {fleet.client.get_node_from_key(key).port for key in ("rk1:replicas", "rk1:purges")}
        names_of = {
            node.port: [
                name
                for name in (f"replica-{index}" for index in range(60))
                if fleet.client.get_node_from_key(f"rk1:{{r:{name}}}:meta").port == node.port
            ]
            for node in redis_cluster.nodes
        }
        lost = next(node for node in redis_cluster.nodes if node.port not in homes)
        staying = [name for node in redis_cluster.nodes if node is not lost for name in names_of[node.port]]
        a, c = fleet.join(staying[0], lease_s=4.0), fleet.join(names_of[lost.port][0], lease_s=4.0)
        reader = fleet.join(staying[-1], lease_s=4.0)
        fleet.eventually(lambda: set(names(reader.peers())) == {a.replica_id, c.replica_id})
        lost.pause()
        try:
            fleet.eventually(lambda: names(reader.peers()) == [a.replica_id])
            store(a, ACME, prompt(512))
            fleet.eventually(lambda: hinted(reader, ACME, prompt(512)) == {a.replica_id: 512})
            fleet.eventually(lambda: a.health().is_ok)
        finally:
            lost.resume()
        fleet.eventually(lambda: set(names(reader.peers())) == {a.replica_id, c.replica_id})


# ---- connect()


def test_connect_in_memory_does_not_import_redis() -> None:
    script = "import sys, radixkv.coordination as c; c.connect(None, replica_id='a', fleet_secret=b'x' * 32, "
    script += "fingerprint='f', block_size=16); assert 'redis' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.parametrize("url", ["http://host", "redis://user:hunter2@host:port/0", "nonsense"])
def test_an_invalid_url_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        connect(url, replica_id="a", fleet_secret=SECRET, fingerprint="f", block_size=16)
    assert refusal.value.setting == "redis" and "hunter2" not in str(refusal.value)


def test_connect_gives_a_coordinator_over_redis(fleet: RedisFleet) -> None:
    a = connect(fleet.server.url, replica_id="a", fleet_secret=SECRET, fingerprint="f", block_size=16)
    assert a.health().state == "new" and a.register().live
    a.close()
    assert a.health().state == "left"
    with pytest.raises(ConfigError, match="block_size"):
        connect(fleet.server.url, replica_id="a", fleet_secret=SECRET, fingerprint="f", block_size=24)
