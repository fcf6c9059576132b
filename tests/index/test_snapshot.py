"""Snapshots in slices. Any calls may run between the slices: the result equals a snapshot under one hold at the end."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from radixkv import CacheConfig, Namespace, OutOfBlocks, PrefixCache, Tenant, audit
from radixkv.audit import invariants, properties
from radixkv.index import changes, recovery
from radixkv.index import snapshot as snapshot_module
from radixkv.index.snapshot import Gathering, Snapshot
from radixkv_policies import POLICIES
from tests.index.operations import EITHER, PLAIN, World
from tests.index.stepper import Interrupted, Stepper
from tests.waiting import ended

NS = Namespace("a", "m")
EXAMPLES = max(int(os.environ.get("RADIXKV_EXAMPLES", "400")) // 60, 10)


def plain(snapshot: Snapshot) -> Any:
    """A snapshot without the order of a tree's nodes: each node is named by its whole key."""
    paths = [_paths(tree.nodes) for tree in snapshot.trees]
    trees = []
    for tree, path in zip(snapshot.trees, paths, strict=True):
        nodes = {
            key: (*_facts(node), None if node.parent is None else path[node.parent])
            for key, node in zip(path, tree.nodes, strict=True)
        }
        assert len(nodes) == len(tree.nodes)
        counts = (tree.detached, tree.num_blocks, tree.root_uses, tree.root_children)
        trees.append((tree.namespace, *counts, nodes))

    def named(at: tuple[int, int | None] | None) -> Any:
        return None if at is None else (at[0], None if at[1] is None else paths[at[0]][at[1]])

    used: dict[int | None, list[tuple[int, bytes]]] = defaultdict(list)
    for at, tree in enumerate(snapshot.trees):
        for node, path in zip(tree.nodes, paths[at], strict=True):
            used[node.sole_user].append((at, path))

    def told(at: int | None) -> Any:
        """What a session and its family alone used. The order of sole users doesn't count."""
        if at is None:
            return None
        user = snapshot.sole_users[at]
        return user.namespace, sorted(used[at]), told(user.family)

    return (
        trees,
        [replace(run, node=named(run.node)) for run in snapshot.runs],
        [
            (replace(sequence, node=named(sequence.node), sole_user=None), told(sequence.sole_user))
            for sequence in snapshot.sequences
        ],
        sorted((told(at) for at in range(len(snapshot.sole_users))), key=repr),
        [replace(lease, node=named(lease.node)) for lease in snapshot.leases],
        [replace(pin, node=named(pin.node)) for pin in snapshot.pins],
        snapshot.tenants,
        sorted(snapshot.free_ids.tolist()),
        sorted(snapshot.lent_ids),
        (snapshot.num_blocks, snapshot.block_size),
    )


def _paths(nodes: Any) -> list[bytes]:
    found: list[bytes] = []
    for node in nodes:
        found.append((b"" if node.parent is None else found[node.parent]) + node.label)
    return found


def _facts(node: Any) -> tuple[Any, ...]:
    return node.label, node.block_ids, node.depth, node.uses, node.child_key, node.num_children


class SlowlyRead(properties.CacheMachine):
    """The machine while two gatherings read its cache, one a slice after each step, the other after some steps."""

    seen: ClassVar[Counter[str]] = Counter()

    def laws(self) -> None:
        """Check the laws at once. When a gathering ends, compare it with a snapshot under one hold."""
        audit.check(self.cache, at_once=True)
        self._ages = getattr(self, "_ages", 0) + 1
        self._readers: list[Gathering | None] = getattr(self, "_readers", [None, None])
        for at, reader in enumerate(self._readers):
            if at and self._ages % 3:
                continue
            if reader is None:
                self._readers[at] = Gathering(self.cache)
            elif reader.step():
                reader.close()
                self._compare(reader)
                self._readers[at] = None
        self.seen["recorded"] += bool(self.cache._recorder._recorded)

    def _compare(self, reader: Gathering) -> None:
        assert plain(reader.snapshot()) == plain(self.cache.snapshot())
        self.seen["ends"] += 1
        self.seen["late ends"] += reader._num_steps > 5
        self.seen["evictions"] += self.cache.stats().evicted_blocks > 0

    def teardown(self) -> None:
        """Close the gatherings. The policies must have their hooks back."""
        for reader in getattr(self, "_readers", []):
            if reader is not None:
                reader.close()
        if hasattr(self, "cache") and sys.exc_info()[0] is None:
            assert all(hooks_are_the_policys(state) for state in self.cache._tenants.values())
        super().teardown()


def hooks_are_the_policys(state: Any) -> bool:
    own = state.policy
    leased, _, removed = own.order()
    return (state.on_leased, state.on_removed, state.on_inserted, state.on_split) == (
        leased, removed, own.hook("inserted"), own.hook("split"),
    )  # fmt: skip


@pytest.fixture
def _tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "SLICE_NODES", 2)
    monkeypatch.setattr(snapshot_module, "SLICE_TENANTS", 1)
    monkeypatch.setattr(changes, "SLICE_TENANTS", 1)
    monkeypatch.setattr(snapshot_module, "PATIENCE", 8)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_a_snapshot_in_slices_is_one_of_its_last_moment(part: int, _tiny_slices: None) -> None:
    """Random lives of every policy continue between slices of two nodes. Each result is compared field by field."""
    SlowlyRead.seen = Counter()
    wanted = ("recorded", "ends", "late ends", "evictions")
    for seed in range(part, 30, 3):  # until all relevant events have occurred
        report = properties.run(
            PrefixCache, EXAMPLES, 50, seed=seed, machine=SlowlyRead, policies=tuple(POLICIES)[part::3]
        )
        assert report.ok, report.failure
        if all(SlowlyRead.seen[each] for each in wanted):
            break
    assert all(SlowlyRead.seen[each] for each in wanted), SlowlyRead.seen


def busy(policy: str = "lru") -> PrefixCache:
    """A cache with many nodes, two tenants and no running sequence."""
    cache = PrefixCache(CacheConfig(num_blocks=600, block_size=1, policy=policy))
    for at in range(500):
        with cache.open(Namespace("ab"[at % 2], "m"), [at % 7, at, 1]) as sequence:
            sequence.commit(3)
    return cache


@pytest.mark.usefixtures("_tiny_slices")
def test_a_repair_restarts_a_snapshot_in_slices() -> None:
    """A call is interrupted between two slices. Then nothing that was read before counts."""
    cache, paused = busy(), Counter[str]()
    kept = [cache.open(NS, [at, at, at]) for at in range(5)]

    def pause() -> None:
        paused["slices"] += 1
        if paused["slices"] == 20:
            with cache._lock:
                recovery.mend(cache, KeyboardInterrupt(), [kept[0]._state])
            cache.evict(30)

    assert plain(cache.snapshot_in_slices(pause)) == plain(cache.snapshot())
    assert paused["slices"] > 100 and not kept[0].is_open
    audit.check(cache)


@pytest.mark.usefixtures("_tiny_slices")
def test_tenants_and_trees_that_come_and_go_between_slices() -> None:
    cache, paused = busy(), Counter[str]()

    def pause() -> None:
        at = paused["slices"] = paused["slices"] + 1
        if at < 60:
            with cache.open(Namespace(f"new{at % 9}", "m", None, str(at)), [at, 2, 3]) as sequence:
                sequence.commit(2)
        if at == 30:
            cache.clear(NS)
        if at == 40:
            cache.purge("new3")
            cache.add_tenant(Tenant("promised", guaranteed_blocks=4))
        if at == 45:
            cache.add_tenant(Tenant("b", policy="fifo"))

    assert plain(cache.snapshot_in_slices(pause)) == plain(cache.snapshot())
    assert paused["slices"] > 60
    assert all(hooks_are_the_policys(state) for state in cache._tenants.values())


@pytest.mark.usefixtures("_tiny_slices")
@pytest.mark.parametrize("policy", ["lru", "gdsf", "learned"])
def test_a_tenants_first_announcement_between_slices(policy: str) -> None:
    """It takes the hooks of the policy anew. What follows must still be reported."""
    cache, paused = busy(policy), Counter[str]()

    def pause() -> None:
        paused["slices"] += 1
        if paused["slices"] == 120:
            cache.announce(Namespace("a", "m"), [1, 2, 3])
            cache.evict(300)

    assert plain(cache.snapshot_in_slices(pause)) == plain(cache.snapshot())
    assert paused["slices"] > 150
    assert all(hooks_are_the_policys(state) for state in cache._tenants.values())


@pytest.mark.parametrize("num_slices", [1, 100])
def test_a_tree_that_is_a_circle_is_reported(num_slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader does not loop forever in it."""
    monkeypatch.setattr(snapshot_module, "SLICE_NODES", 200 // num_slices)
    cache = PrefixCache(CacheConfig(num_blocks=300, block_size=1))
    for at in range(100):
        with cache.open(NS, [at, 1, 2]) as sequence:
            sequence.commit(3)
    first, *_, last = cache._tenants["a"].trees[NS].nodes()
    last.children, first.children = first, last
    for at_once in (False, True):
        with pytest.raises(audit.BrokenLaws):
            audit.check(cache, at_once=at_once)


@pytest.mark.slow
def test_many_tenants_are_recorded_and_released_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hold changes the hooks of more than SLICE_TENANTS tenants."""
    cache = PrefixCache(CacheConfig(num_blocks=600, block_size=1))
    for at in range(500):
        with cache.open(Namespace(f"t{at}", "m"), [at]) as sequence:
            sequence.commit(1)
    changed: list[int] = []
    begin, end = changes.Recorder.begin, changes.Recorder.end

    def counted_begin(self: Any, told: Any, tenants: Any) -> None:
        changed.append(len(tenants))
        begin(self, told, tenants)

    def counted_end(self: Any, told: Any) -> bool:
        before = len(self._recorded)
        done = end(self, told)
        changed.append(before - len(self._recorded))
        return done

    monkeypatch.setattr(changes.Recorder, "begin", counted_begin)
    monkeypatch.setattr(changes.Recorder, "end", counted_end)
    assert plain(cache.snapshot_in_slices()) == plain(cache.snapshot())
    assert max(changed) == changes.SLICE_TENANTS and 2 * (500 - 64) <= sum(changed) <= 2 * 500
    assert all(hooks_are_the_policys(state) for state in cache._tenants.values())


def test_a_pause_that_raises_leaves_nothing_behind() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=3000, block_size=1))
    for at in range(1500):
        with cache.open(NS, [at, 1]) as sequence:
            sequence.commit(1)

    def pause() -> None:
        assert not hooks_are_the_policys(cache._tenants["a"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.snapshot_in_slices(pause)
    assert hooks_are_the_policys(cache._tenants["a"]) and not cache._recorder._heard_by


def test_a_small_cache_is_read_under_one_hold() -> None:
    """Nothing is recorded, and the reader does not pause."""
    cache = PrefixCache(CacheConfig(num_blocks=200, block_size=1))
    for at in range(200):
        with cache.open(NS, [at]) as sequence:
            sequence.commit(1)
    told: list[None] = []
    reader = Gathering(cache)
    assert reader.step() and not cache._recorder._recorded
    assert plain(cache.snapshot_in_slices(lambda: told.append(None))) == plain(cache.snapshot())
    assert not told


def test_no_hold_reads_more_than_a_slice_and_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is in nodes, not in seconds: a slice, the parents of its nodes, and finally what sequences hold."""
    holds: list[int] = []
    ends = [False]
    read, step = Gathering._read, Gathering.step

    def counted_read(self: Gathering, nodes: Any) -> None:
        holds[-1] += len(nodes)
        read(self, nodes)

    def counted_step(self: Gathering) -> bool:
        holds.append(0)
        ends.append(step(self))
        return ends[-1]

    monkeypatch.setattr(Gathering, "_read", counted_read)
    monkeypatch.setattr(Gathering, "step", counted_step)
    cache = PrefixCache(CacheConfig(num_blocks=9000, block_size=1))
    for at in range(4000):
        with cache.open(NS, [at % 50, at, 1]) as sequence:
            sequence.commit(3)
    kept = [cache.open(NS, [at % 50, at, 1, 1]) for at in range(100)]

    def pause() -> None:
        for at in range(0 if ends[-1] else 20):
            with cache.open(NS, [at % 50, len(holds), at, 1]) as sequence:
                sequence.commit(3)

    found, most = cache.snapshot_in_slices(pause), snapshot_module.SLICE_NODES
    assert len(holds) > 4000 // most and max(holds) <= 3 * most + len(kept)
    assert plain(found) == plain(cache.snapshot())


@pytest.mark.slow
@pytest.mark.pure
@pytest.mark.filterwarnings("ignore:a fence was never lifted:ResourceWarning")
@pytest.mark.parametrize("name", [*PLAIN, *EITHER][::2])
def test_a_call_interrupted_during_a_snapshot_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any call, interrupted at every thirty-first step.

    The reader starts again or continues, and its result is right.
    """
    monkeypatch.setattr(snapshot_module, "SLICE_NODES", 1)
    num_interrupted = 0
    for stop in range(1, 10_000, 31):
        world = World("lfu")
        call, reader = (PLAIN | EITHER)[name](world), Gathering(world.cache)
        assert not any(reader.step() for _ in range(3))
        try:
            Stepper(world.cache, stop).run(call)
        except Interrupted:
            num_interrupted += 1
        else:
            break
        while not reader.step():
            pass
        reader.close()
        found = reader.snapshot()
        assert invariants.violations_of(found) == () and plain(found) == plain(world.cache.snapshot())
        assert all(hooks_are_the_policys(state) for state in world.cache._tenants.values())
    assert num_interrupted


class Hammer(threading.Thread):
    """Makes requests, forks, evictions and clears without a pause, until the event is set."""

    def __init__(self, cache: PrefixCache, seed: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.cache, self.draw, self.over = cache, random.Random(seed), over
        self.num_done, self.error = 0, None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self._request()
                self.num_done += 1
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error: Any = error

    def _request(self) -> None:
        draw = self.draw
        namespace = Namespace(draw.choice("abc"), "m", None, draw.choice(("", "s")))
        if draw.random() < 0.02:
            self.cache.clear(namespace)
        if draw.random() < 0.05:
            self.cache.evict(draw.randrange(20))
        ids = [draw.randrange(4), draw.randrange(6), *(draw.randrange(3) for _ in range(draw.randrange(12)))]
        try:
            with self.cache.open(namespace, ids) as sequence:
                sequence.commit(draw.randrange(sequence.num_committed_tokens, len(ids) + 1))
                (child,) = sequence.fork(1)
                with child:
                    child.append(7)
                    child.commit(len(ids) + 1)
        except OutOfBlocks:
            return


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_no_false_alarm_while_threads_hammer(
    policy: str, monkeypatch: pytest.MonkeyPatch, _eager_switches: None
) -> None:
    """The slices alone give a sound result each time, without a second look."""
    monkeypatch.setattr(snapshot_module, "SLICE_NODES", 50)
    cache, over = PrefixCache(CacheConfig(num_blocks=400, block_size=1, policy=policy)), threading.Event()
    hammers = [Hammer(cache, seed, over) for seed in range(3)]
    for hammer in hammers:
        hammer.start()
    try:
        num_checks = 0
        while num_checks < 8 or sum(each.num_done for each in hammers) < 2000:
            snapshot = cache.snapshot_in_slices()
            found = list(invariants.violations_of(snapshot))
            assert found == [], found
            num_checks += 1
            if any(not hammer.is_alive() for hammer in hammers):
                break
    finally:
        over.set()
        for hammer in hammers:
            ended(hammer)
    assert [hammer.error for hammer in hammers] == [None] * 3
    audit.check(cache)
    audit.check(cache, at_once=True)


class MisreadOnce(PrefixCache):
    """A cache that loses a block when it is read in slices, although nothing is broken."""

    def snapshot_in_slices(self, pause: Any = None) -> Snapshot:
        found = super().snapshot_in_slices(pause)
        return replace(found, free_ids=found.free_ids[1:])


def test_a_violation_found_in_slices_is_checked_again() -> None:
    """A reading mistake raises no alarm. A broken law does, in either mode."""
    cache = MisreadOnce(CacheConfig(num_blocks=8, block_size=1))
    assert audit.check(cache).ok
    cache._pool.take(4, bytearray())
    for at_once in (False, True):
        with pytest.raises(audit.BrokenLaws, match="conservation"):
            audit.check(cache, at_once=at_once)
