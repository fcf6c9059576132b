"""An exception between any two steps of a call that concerns a base. See ``test_recovery``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.index import recovery
from tests.index.test_bases_lives import BaseMachine
from tests.index.test_recovery import BASIC, ZEROS, A, Call, Plan, Run, Scenario, World, _end, _holds, _steps
from tests.model import chain, resident_prefixes

OP, R = Namespace("op", "m"), Namespace("r", "m")
BASE = (1, 1, 1, 1, 2, 2)
BEHIND = (*BASE, 0, 0, 0)


class BasedWorld(World):
    """The world with a base, a prefix that its account computed twice, and its reader's requests behind it."""

    def __post_init__(self) -> None:
        self.blocks: list[list[int]] = []  # the blocks of each base
        super().__post_init__()
        self.publish("base", BASE, ["r"])
        parent = self.open_behind(BEHIND)
        self.commit(parent, 9)
        child = self.add(parent.sequence.fork(1)[0], parent.ids)
        self.append([child], [1])
        self.oracle.commit(R, BASE, 6)
        half = self.open_behind((*BASE[:4], 0, 0))
        self.commit(half, 6)
        half.sequence.release()
        self.runs.remove(half)
        self.leased: Any = self.cache.lease(self.cache.match(R, BASE[:4]))

    def publish(self, base_id: str, ids: tuple[int, ...], readers: list[str]) -> None:
        """Publish a base and compute it."""
        with self.cache.publish(base_id, OP, ids, readers) as sequence:
            self.blocks.append(sequence.block_table.tolist())
            self.engine.write(sequence.block_table, 0, chain(OP, ids))
            self.oracle.commit(OP, ids, len(ids))
            sequence.commit(len(ids))

    def open_behind(self, ids: tuple[int, ...]) -> Run:
        """Open a request of the reader and compute it."""
        run = self.add(self.cache.open(R, ids), list(ids))
        start = run.sequence.num_cached_tokens
        self.engine.write(run.sequence.block_table, start, chain(R, ids)[start:])
        return run

    def reads(self, namespace: Namespace, table: Any, ids: Any) -> bool:
        """Like the parent's method, with the account's KV in the base's blocks."""
        states, at = chain(namespace, ids), 0
        for blocks in self.blocks if namespace == R else ():
            same = 0
            while same < min(len(blocks), len(table)) and blocks[same] == table[same]:
                same += 1
            at = max(at, 2 * same)
        return self.engine.holds(table, [*chain(OP, ids[:at]), *states[at:]][: len(states)])

    def check(self) -> None:
        """Also check the base, its reader and its account."""
        super().check()
        if self.leased is not None:
            assert self.leased.is_open and self.reads(R, self.leased.block_ids, BASE[:4])
        for ids in (BASE, BEHIND, (*BASE[:4], 0, 0, 0), (1, 1, 0, 0)):
            self.check_match(OP, ids)
            self.check_match(R, ids)
        for info in self.cache.bases():
            assert not info.is_readable or self.cache.match(OP, BASE).num_tokens == 6

    def go_on(self) -> None:
        """Also release the lease. At the end the account's namespace is cleared, which ends the base."""
        self.cache.open(R, BEHIND).release()
        self.leased.release()
        self.leased = None
        super().go_on()
        assert self.cache.bases() == [] and self.cache.stats().base_blocks == 0


def _behind(ids: tuple[int, ...], call: Callable[[BasedWorld, Run], Callable[[], Any]]) -> Scenario:
    def scenario(world: World) -> Call:
        assert isinstance(world, BasedWorld)
        run = world.open_behind(ids)
        world.oracle.commit(R, ids, len(ids))
        return Call(call(world, run), [run], keep=lambda _: _end(run))

    return scenario


def _publish(ids: tuple[int, ...]) -> Scenario:
    return lambda world: Call(
        lambda: world.cache.publish("new", OP, ids, ["r", "new"]), keep=lambda sequence: sequence.release()
    )


def _complete(ids: tuple[int, ...]) -> Scenario:
    """The commit that makes a base readable, of a sequence that continues. Its reader already had the prefix."""

    def scenario(world: World) -> Call:
        assert isinstance(world, BasedWorld)
        run = world.add(world.cache.publish("new", OP, ids, ["r"]), list(ids))
        world.blocks.append(run.sequence.block_table.tolist())
        world.write(run, run.sequence.num_cached_tokens)
        for namespace in (OP, R):
            world.oracle.commit(namespace, ids, len(ids))
        return Call(lambda: run.sequence.commit(len(ids)), [run], keep=lambda _: _end(run))

    return scenario


def _last_behind(world: World) -> Call:
    """The last release behind an unpublished base."""
    assert isinstance(world, BasedWorld)
    world.publish("new", (2, 2, 2, 2), ["r"])
    world.oracle.commit(R, (2, 2, 2, 2), 4)
    run = world.open_behind((2, 2, 2, 2, 0, 0))
    run.sequence.commit(6)
    world.cache.unpublish("new")
    return Call(run.sequence.release, [run])


def _fork(world: World) -> Call:
    assert isinstance(world, BasedWorld)
    run = world.open_behind((*BASE, 2, 2))

    def keep(children: list[Any]) -> None:
        for sequence in (run.sequence, *children):
            sequence.release()

    return Call(lambda: run.sequence.fork(2), [run], keep)


def _insert(world: World) -> Call:
    ids = (*BASE, 2, 2)
    blocks = world.cache.allocate(4)
    world.engine.write(blocks, 0, chain(R, ids))
    world.oracle.commit(R, ids, 8)

    def after() -> None:
        world.lent += set(world.cache.snapshot().lent_ids) & set(blocks.tolist())

    return Call(lambda: world.cache.insert(R, ids, blocks), after=after)


SCENARIOS: dict[str, Scenario] = {
    "open": lambda world: Call(lambda: world.cache.open(R, (*BASE, 2, 2, 2)), keep=lambda it: it.release()),
    "open half way": lambda world: Call(
        lambda: world.cache.open(R, (1, 1, 2, 2, 2)), keep=lambda it: it.release()
    ),
    "lease": lambda world: Call(
        lambda: world.cache.lease(world.cache.match(R, BASE[:2])), keep=lambda it: it.release()
    ),
    "insert": _insert,
    "commit": _behind((*BASE, 2, 2, 2), lambda _, run: lambda: run.sequence.commit(9)),
    "commit, growing": _behind((*BASE, 0, 0, 2, 2), lambda _, run: lambda: run.sequence.commit(10)),
    "extend": _behind((*BASE, 2, 2, 2), lambda _, run: lambda: run.sequence.extend([1, 2])),
    "fork": _fork,
    "release": _behind((*BASE, 2, 2, 2), lambda _, run: run.sequence.release),
    "release the last": _last_behind,
    "publish": _publish((2, 2, 2, 2)),
    "publish a longer one": _publish((*BASE, 0, 0)),
    "complete": _complete((2, 2, 2, 2)),
    "complete a longer one": _complete((*BASE, 0, 0)),
    "complete a shorter one": _complete(BASE[:4]),
    "unpublish": lambda world: Call(lambda: world.cache.unpublish("base")),
    "strike a reader": lambda world: Call(lambda: world.cache.set_readers("base", ["x"])),
    "add a reader": lambda world: Call(lambda: world.cache.set_readers("base", ["r", "x"])),
    "purge the account": lambda world: Call(lambda: world.cache.purge("op")),
    "clear the account's": lambda world: Call(lambda: world.cache.clear(OP)),
    "clear the reader's": lambda world: Call(lambda: world.cache.clear(R)),
    "another's open, evicting": lambda world: Call(
        lambda: world.cache.open(A, (*ZEROS[:8], *range(3, 23))), keep=lambda it: it.release()
    ),
}


PLAN = Plan(SCENARIOS, make=BasedWorld, after=BASIC)


@pytest.mark.pure
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_exception_between_any_two_steps(name: str) -> None:
    """No step of a call that changes a base, or that a reader makes, may break anything."""
    for at, (world, _, stepper) in enumerate(_steps(PLAN, name, "lru")):
        _holds(world, stepper, goes_on=at % 8 == 0 or stepper.where == "")
    assert stepper.where == "" and stepper.num_steps > 5


class Mended(PrefixCache):
    """A cache that is repaired before each snapshot, although nothing is broken."""

    def snapshot(self) -> Any:
        """Repair, then take the snapshot."""
        with self._lock:
            recovery.mend(self, KeyboardInterrupt())
        return super().snapshot()


class MendedMachine(BaseMachine):
    """The machine of ``test_bases_lives`` over a cache that is repaired."""

    def cache_of(self, config: CacheConfig) -> PrefixCache:
        """A cache that is repaired."""
        return Mended(config)


TestRepairsOfAnIntactCache = MendedMachine.TestCase
TestRepairsOfAnIntactCache.settings = settings(max_examples=20, stateful_step_count=30)


def test_repairs_do_not_change_evictions_with_bases() -> None:
    """A cache with bases that is repaired after every call evicts the same blocks as one that never is."""
    rng = random.Random(0)
    caches = [PrefixCache(CacheConfig(28, 2)) for _ in range(2)]
    for at in range(200):
        ids, namespace = [rng.randrange(2) for _ in range(rng.randrange(2, 14))], rng.choice((A, R, R))
        for cache in caches:
            if at % 30 == 0:
                for info in cache.bases():
                    cache.unpublish(info.base_id)
                with cache.publish(f"{at}", OP, ids[:4], ["r"]) as sequence:
                    sequence.commit(sequence.num_tokens)
            with cache.open(namespace, ids) as sequence:
                sequence.commit(len(ids))
        with caches[0]._lock:
            recovery.mend(caches[0], KeyboardInterrupt())
        assert resident_prefixes(caches[0]) == resident_prefixes(caches[1])
        audit.check(caches[0])
    assert caches[0].stats().evicted_blocks > 200
