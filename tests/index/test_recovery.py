"""An exception between any two steps of a call: the laws hold, bystanders notice nothing, and nothing is lost.

Each call is made repeatedly on the same small world, and interrupted at one of its steps each time: see ``Plan``.
After each interruption the test checks the following:

- The lock is free and the audit is clean.
- Sequences and leases that the call did not use are unchanged and read their KV bit for bit.
- The journal equals what is resident, and every match is right.
- Sequences that the call used are closed, or unchanged if the work had not begun.

Then more calls follow, and at the end every block is free.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest

from radixkv import CacheConfig, LeaseError, Namespace, Pin, PrefixCache, Sequence, Tenant, audit
from radixkv.audit import properties
from radixkv.audit.properties import LAYOUT
from radixkv.clock import ManualClock
from radixkv.index import purge, recovery, requests
from radixkv.index.engine_blocks import own_room
from tests.index.stepper import ALL, NEVER, Interrupted, Place, Stepper, Survey
from tests.index.support import Declining, collect_leftovers
from tests.index.test_changes import EXAMPLES, JournalMachine, Recorded, Recorder, resident_segments
from tests.model import Engine, Oracle, chain, resident_prefixes

A, B, NEW = Namespace("a", "m"), Namespace("b", "m"), Namespace("c", "m")
NUM_BLOCKS, BLOCK_SIZE = 40, 2
ZEROS = (0,) * 12

OPCODES = os.environ.get("INTERRUPT_OPCODES") == "1"
"""Interrupt between any two bytecode instructions, not only between lines and calls.

This takes minutes instead of seconds.
"""


@dataclass
class Run:
    """A sequence, and the KV that it must read."""

    sequence: Sequence
    ids: list[int]
    num_computed: int = 0

    def state(self) -> tuple[Any, ...]:
        """The state that must not change."""
        sequence = self.sequence
        return (
            sequence.is_open,
            sequence.num_tokens,
            sequence.num_cached_tokens,
            sequence.num_committed_tokens,
            sequence.num_reserved_tokens,
            sequence.block_table.tolist(),
            sequence.token_ids.tolist(),
        )


@dataclass
class World:
    """A small, busy cache: two tenants, forks, waiting copies, leases, lent blocks and a journal."""

    policy: str
    stored: bool = False
    runs: list[Run] = field(default_factory=list)
    leases: list[Any] = field(default_factory=list)
    pins: list[tuple[Pin, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = LAYOUT if self.stored else None
        default_tenant = Tenant("default", max_pinned_blocks=10)
        config = CacheConfig(
            NUM_BLOCKS, BLOCK_SIZE, layout, policy=self.policy, default_tenant=default_tenant
        )
        self.journal, self.clock = Recorder(BLOCK_SIZE), ManualClock()
        self.cache = PrefixCache(config, journal=self.journal, clock=self.clock)
        self.engine, self.oracle = Engine(self.cache), Oracle(BLOCK_SIZE)
        self.serve(A, ZEROS[:8])
        self.serve(A, (*ZEROS[:6], 1, 0))
        self.serve(B, ZEROS[:6])
        self.serve(B, (1, 1, 1, 1, 1, 1))
        self.cache.open(A, ZEROS[:7]).release()
        parent = self.open(A, (*ZEROS[:4], 2, 2, 2))
        self.commit(parent, 6)
        child, writer = (self.add(child, parent.ids) for child in parent.sequence.fork(2))
        self.append([writer], [1])  # its copy waits
        self.commit(child, 7)
        self.leases.append(self.cache.lease(self.cache.match(A, ZEROS[:5])))
        self.lent = self.cache.allocate(2).tolist()
        self.pin(A, (*ZEROS[:6], 1, 0))

    def pin(self, namespace: Namespace, ids: tuple[int, ...], ttl_s: float = 60.0) -> Pin:
        """Pin a prefix that must stay."""
        pin = self.cache.pin(namespace, ids, ttl_s)
        self.pins.append((pin, ids))
        return pin

    def serve(self, namespace: Namespace, ids: tuple[int, ...]) -> None:
        """Make a whole request."""
        run = self.open(namespace, ids)
        self.commit(run, len(ids))
        run.sequence.release()
        self.runs.remove(run)

    def open(self, namespace: Namespace, ids: tuple[int, ...]) -> Run:
        """Open a request and compute it."""
        run = self.add(self.cache.open(namespace, ids), list(ids))
        self.write(run, run.sequence.num_cached_tokens)
        return run

    def add(self, sequence: Sequence, ids: list[int]) -> Run:
        """Add a sequence that must not notice the interruption."""
        self.runs.append(Run(sequence, list(ids), len(ids)))
        return self.runs[-1]

    def write(self, run: Run, start: int) -> None:
        """Compute the KV from ``start`` on."""
        states = chain(run.sequence.namespace, run.ids)
        self.engine.write(run.sequence.block_table, start, states[start:])
        run.num_computed = len(states)

    def append(self, runs: list[Run], ids: list[int]) -> None:
        """Append one id to each sequence."""
        self.cache.append([run.sequence for run in runs], ids)
        for run, token_id in zip(runs, ids, strict=True):
            run.ids.append(token_id)

    def commit(self, run: Run, num_tokens: int) -> None:
        """Commit tokens. Committed tokens may be matched."""
        self.oracle.commit(run.sequence.namespace, run.ids, num_tokens)
        run.sequence.commit(num_tokens)

    # --- invariants after any interruption

    def check(self) -> None:
        """Check the laws, the bystanders, the matches and the journal."""
        audit.check(self.cache)
        snapshot = self.cache.snapshot()
        held = resident_segments(snapshot, BLOCK_SIZE)
        assert self.journal.held == held, "the journal differs from the trees"
        self.engine.settle()
        for run in self.runs:
            assert run.sequence.is_open
            computed = run.ids[: run.num_computed]
            assert self.reads(run.sequence.namespace, run.sequence.block_table, computed), run
        for lease in self.leases:
            assert lease.is_open and self.reads(A, lease.block_ids, ZEROS[: lease.num_tokens])
        for pin, ids in self.pins:
            assert pin.id in {each.id for each in self.cache.pins(pin.namespace.tenant)}
            assert self.cache.match(pin.namespace, ids).num_tokens == len(ids)
        assert set(self.lent) <= set(snapshot.lent_ids)
        for namespace in (A, B, NEW):
            for at in range(0, 9, 2):
                for other in range(3):
                    self.check_match(namespace, (*ZEROS[:at], other, *ZEROS[:2], other, *ZEROS[:3]))

    def reads(self, namespace: Namespace, table: Any, ids: Any) -> bool:
        """Whether these blocks hold the KV of these ids, bit for bit."""
        return self.engine.holds(table, chain(namespace, ids))

    def check_match(self, namespace: Namespace, ids: tuple[int, ...]) -> None:
        """Check that a match is allowed by the oracle and reads right."""
        match = self.cache.match(namespace, ids)
        assert self.oracle.served_lie(namespace, ids, match.num_tokens) is None
        assert self.reads(namespace, match.block_ids, ids[: match.num_tokens])

    def go_on(self) -> None:
        """All bystanders write and commit, new requests come, and blocks are evicted.

        At the end all blocks are free.
        """
        for run in self.runs:
            start = run.num_computed
            run.sequence.extend([1, 2, 3])
            run.ids += [1, 2, 3]
            self.write(run, start)
            self.commit(run, len(run.ids))
        for namespace in (A, B, NEW):
            self.serve(namespace, (3, *ZEROS))
            self.serve(namespace, ZEROS)
        self.cache.evict(3)
        self.check()
        for run in self.runs:
            run.sequence.release()
        for lease in self.leases:
            lease.release()
        self.cache.free(self.lent)
        for pin in self.cache.pins():
            self.cache.unpin(pin)
        self.runs, self.leases, self.lent, self.pins = [], [], [], []
        left = [self.cache.evict(1) for _ in range(3)]
        for namespace in self.cache.namespaces():
            if namespace != A:
                self.cache.clear(namespace)
        left.append(self.cache.evict(NUM_BLOCKS))
        stats = self.cache.stats()
        assert stats.free_blocks == NUM_BLOCKS and left[:3] == [1, 1, 1], stats
        assert (stats.num_sequences, stats.sequence_blocks, stats.lent_blocks, stats.num_nodes) == (
            0,
            0,
            0,
            0,
        )
        if self.stored:
            with self.cache.open(Namespace("last", "m"), [0] * (NUM_BLOCKS * BLOCK_SIZE)) as sequence:
                assert not self.engine.read(sequence.block_table).any(), "bytes of another tenant"
        audit.check(self.cache)


@dataclass
class Call:
    """A call, and the sequences that it uses. They may be closed after it."""

    make: Callable[[], Any]
    involved: list[Run] = field(default_factory=list)
    keep: Callable[[Any], None] = lambda result: None
    """Handles the result if the call completed."""
    after: Callable[[], None] = lambda: None
    """Runs after the call in any case."""


Scenario = Callable[[Any], Call]


def _open(namespace: Namespace, ids: tuple[int, ...], lookup: bool = True) -> Scenario:
    return lambda world: Call(
        lambda: world.cache.open(namespace, ids, lookup=lookup), keep=lambda sequence: sequence.release()
    )


def _opened(ids: tuple[int, ...], call: Callable[[World, Run], Callable[[], Any]]) -> Scenario:
    """A call on a sequence of its own."""

    def scenario(world: World) -> Call:
        run = world.open(A, ids)
        world.oracle.commit(A, ids, len(ids))
        return Call(call(world, run), [run], keep=lambda _: _end(run))

    return scenario


def _roomy(call: Callable[[Sequence], Any], ids: tuple[int, ...] = ZEROS[:5]) -> Scenario:
    """A call on a sequence that has room for five tokens more."""

    def make(world: World, run: Run) -> Callable[[], Any]:
        run.sequence.reserve(5)
        return lambda: call(run.sequence)

    return _opened(ids, make)


def _end(run: Run) -> None:
    if run.sequence.is_open:
        run.sequence.release()


def _on_a_fork(call: Callable[[World, Run], Callable[[], Any]]) -> Scenario:
    """A call on one of three sequences that share blocks. The others notice nothing."""

    def scenario(world: World) -> Call:
        parent = world.open(A, (*ZEROS[:6], 2, 2, 2))
        world.oracle.commit(A, parent.ids, 9)
        for child in parent.sequence.fork(2):
            run = world.add(child, parent.ids)
        return Call(call(world, run), [run], keep=lambda _: _end(run))

    return scenario


def _commit_after_a_twin(world: World) -> Call:
    """Another sequence committed half of the tokens first."""
    run, twin = world.open(A, (2, *ZEROS[:8])), world.open(A, (2, *ZEROS[:8]))
    world.commit(twin, 5)
    world.oracle.commit(A, run.ids, 9)
    run.sequence.commit(2)
    return Call(lambda: run.sequence.commit(9), [run], keep=lambda _: run.sequence.release())


def _commit_between_forks(world: World) -> Call:
    """Another sequence committed some of the shared blocks, and some are duplicates."""
    twin = world.open(A, (2, *ZEROS[:5]))
    parent = world.open(A, (2, *ZEROS[:9]))
    world.commit(twin, 6)
    child, run = (world.add(each, parent.ids) for each in parent.sequence.fork(2))
    world.commit(child, 8)
    world.oracle.commit(A, run.ids, 10)
    return Call(lambda: run.sequence.commit(10), [run], keep=lambda _: run.sequence.release())


def _append(world: World) -> Call:
    """A batch: two of three sequences that share a tail, one with a free row, and one that needs a block."""
    parent = world.open(A, (2, *ZEROS[:4]))
    children = [world.add(child, parent.ids) for child in parent.sequence.fork(2)]
    batch = [*children, world.open(A, (2, 2, 2)), world.open(B, ZEROS[:8])]
    sequences = [run.sequence for run in batch]

    def keep(_: None) -> None:
        for sequence in sequences:
            sequence.release()

    return Call(lambda: world.cache.append(sequences, [1, 2, 1, 2]), batch, keep)


def _reorder(world: World) -> Call:
    """One input continues twice, one once, one not at all."""
    parent = world.open(A, (2, *ZEROS[:4]))
    inputs = [parent, *(world.add(child, parent.ids) for child in parent.sequence.fork(1))]
    inputs.append(world.open(B, (2, 2, 2)))
    bystander = parent.sequence.fork(1)[0]
    world.add(bystander, parent.ids)

    def keep(results: list[Sequence]) -> None:
        for sequence in results:
            sequence.release()

    sequences = [run.sequence for run in inputs]
    return Call(lambda: world.cache.reorder(sequences, [0, 1, 0]), inputs, keep)


def _fork(world: World) -> Call:
    run = world.open(A, (2, *ZEROS[:4]))

    def keep(children: list[Sequence]) -> None:
        for sequence in (run.sequence, *children):
            sequence.release()

    return Call(lambda: run.sequence.fork(3), [run], keep)


def _clear(namespace: Namespace) -> Scenario:
    def scenario(world: World) -> Call:
        world.pins = [(pin, ids) for pin, ids in world.pins if pin.namespace != namespace]
        return Call(lambda: world.cache.clear(namespace))

    return scenario


def _release_after_clear(world: World) -> Call:
    run = world.open(B, ZEROS[:8])
    run.sequence.commit(8)
    world.cache.clear(B)
    world.oracle.clear(B)
    return Call(run.sequence.release, [run])


def _insert(ids: tuple[int, ...]) -> Scenario:
    def scenario(world: World) -> Call:
        num_tokens = len(ids) // BLOCK_SIZE * BLOCK_SIZE
        blocks = world.cache.allocate(num_tokens // BLOCK_SIZE)
        world.engine.write(blocks, 0, chain(B, ids[:num_tokens]))
        world.oracle.commit(B, ids, num_tokens)

        return Call(
            lambda: world.cache.insert(B, ids, blocks), after=lambda: _check_ownership(world, ids, blocks)
        )

    return scenario


def _insert_after(lease: bool) -> Scenario:
    """From the second block on: the tree's own block, one that it has already, and new ones."""

    def scenario(world: World) -> Call:
        ids = (*ZEROS[:6], 1, 2, 1, 2)
        theirs, blocks = world.cache.match(B, ids).block_ids, world.cache.allocate(3)
        given = [int(theirs[1]), *blocks.tolist()]
        world.engine.write(np.array([theirs[0], *given], np.int32), 0, chain(B, ids))
        world.oracle.commit(B, ids, len(ids))
        return Call(
            lambda: world.cache.insert(B, ids, given, start=BLOCK_SIZE, lease=lease),
            keep=lambda done: done.lease.release() if lease else None,
            after=lambda: _check_ownership(world, ids, blocks),
        )

    return scenario


def _insert_free(world: World) -> Call:
    """One of the blocks is free: the cache has it, and the engine filled it all the same."""
    ids = (2, *ZEROS[:5])
    blocks = world.cache.allocate(3)
    world.cache.free(blocks[:1])
    world.engine.write(blocks, 0, chain(B, ids))
    world.oracle.commit(B, ids, len(ids))
    return Call(
        lambda: world.cache.insert(B, ids, blocks),
        after=lambda: _check_ownership(world, ids, blocks[1:]),
    )


def _match_and_lease(ids: tuple[int, ...]) -> Scenario:
    return lambda world: Call(lambda: world.cache.match_and_lease(B, ids), keep=lambda lease: lease.release())


def _touch(ids: tuple[int, ...]) -> Scenario:
    return lambda world: Call(lambda: world.cache.touch(B, ids))


def _check_ownership(world: World, ids: tuple[int, ...], blocks: Any) -> None:
    """Each inserted block is the tree's or still the engine's. Duplicates are the engine's."""
    lent = set(world.cache.snapshot().lent_ids) & set(blocks.tolist())
    resident = set(world.cache.match(B, ids).block_ids.tolist())
    assert lent | resident >= set(blocks.tolist())
    world.lent += lent


def _lease(ids: tuple[int, ...]) -> Scenario:
    def scenario(world: World) -> Call:
        match = world.cache.match(B, ids)
        assert match.num_tokens
        return Call(lambda: world.cache.lease(match), keep=lambda lease: lease.release())

    return scenario


def _release_lease(world: World) -> Call:
    lease = world.cache.lease(world.cache.match(B, ZEROS[:4]))
    return Call(lease.release, after=lambda: lease.__exit__(None, None, None))


def _free(world: World) -> Call:
    blocks = world.cache.allocate(3)

    def after() -> None:
        world.lent += set(world.cache.snapshot().lent_ids) & set(blocks.tolist())

    return Call(lambda: world.cache.free(blocks), after=after)


def _allocate(num_blocks: int) -> Scenario:
    return lambda world: Call(lambda: world.cache.allocate(num_blocks), keep=world.cache.free)


def _pin(namespace: Namespace, ids: tuple[int, ...]) -> Scenario:
    return lambda world: Call(lambda: world.cache.pin(namespace, ids, 60.0), keep=world.cache.unpin)


def _pin_again(world: World) -> Call:
    """The pin stays, with its old end or its new one."""
    (pin, ids), *_ = world.pins
    world.pin(B, ZEROS[:4], 10.0)
    return Call(lambda: world.cache.pin(A, ids, 5.0), after=lambda: _ends_in(world, pin, (5.0, 60.0)))


def _ends_in(world: World, pin: Pin, allowed: tuple[float, ...]) -> None:
    assert {each.id: each.ttl_s for each in world.cache.pins("a")}[pin.id] in allowed


def _unpin(world: World) -> Call:
    world.pin(B, ZEROS[:2])
    pin = world.cache.pin(B, ZEROS[:6], 60.0)
    return Call(lambda: world.cache.unpin(pin))


def _forget_pinned(call: Callable[[World], Any]) -> Scenario:
    def scenario(world: World) -> Call:
        for ids in (ZEROS[:2], ZEROS[:6], (1, 1)):
            world.cache.pin(B, ids, 60.0)
        return Call(lambda: call(world))

    return scenario


def _needing_pinned(call: Callable[[World], Any]) -> Scenario:
    """A request needs blocks that only expired pins hold."""

    def scenario(world: World) -> Call:
        for ids in (ZEROS[:6], (1, 1, 1, 1, 1, 1)):
            world.cache.pin(B, ids, 1.0)
        world.clock.advance(2.0)
        return Call(lambda: call(world))

    return scenario


SCENARIOS: dict[str, Scenario] = {
    "open a hit": _open(A, ZEROS[:9]),
    "open, splitting a node": _open(A, (0, 0, 1, 1, 1)),
    "open, splitting a node that nobody uses": _open(B, (*ZEROS[:4], 1, 1, 1)),
    "open, evicting": _open(A, (*ZEROS[:8], *range(3, 33))),
    "open in a namespace that is new": _open(NEW, ZEROS[:5]),
    "open nothing": _open(A, ()),
    "commit, growing": _opened((2, *ZEROS[:8]), lambda world, run: _twice(run)),
    "commit, attaching": _opened((*ZEROS[:6], 2, 2, 2), lambda world, run: lambda: run.sequence.commit(9)),
    "commit what is there": _opened((*ZEROS[:8],), lambda world, run: lambda: run.sequence.commit(8)),
    "commit after a twin": _commit_after_a_twin,
    "commit what is shared": _on_a_fork(lambda world, run: lambda: run.sequence.commit(9)),
    "commit part of what is shared": _on_a_fork(lambda world, run: lambda: run.sequence.commit(8)),
    "commit between forks": _commit_between_forks,
    "extend": _opened(ZEROS[:5], lambda world, run: lambda: run.sequence.extend([1, 2, 3])),
    "extend, evicting": _opened(ZEROS[:5], lambda world, run: lambda: run.sequence.extend(range(30))),
    "extend, copying": _on_a_fork(lambda world, run: lambda: run.sequence.extend([1, 2, 3])),
    "append one": _opened(ZEROS[:5], lambda world, run: lambda: run.sequence.append(1)),
    "append": _append,
    "truncate": _opened((2, *ZEROS[:9]), lambda world, run: lambda: run.sequence.truncate(5)),
    "truncate what is shared": _on_a_fork(lambda world, run: lambda: run.sequence.truncate(7)),
    "fork": _fork,
    "reorder": _reorder,
    "release": _opened((2, *ZEROS[:8]), lambda world, run: run.sequence.release),
    "release what is shared": _on_a_fork(lambda world, run: run.sequence.release),
    "release what was cleared": _release_after_clear,
    "leave with": _opened(
        (2, *ZEROS[:8]), lambda world, run: lambda: run.sequence.__exit__(None, None, None)
    ),
    "lease": _lease(ZEROS[:6]),
    "lease, splitting a node": _lease(ZEROS[:2]),
    "release a lease": _release_lease,
    "match": lambda world: Call(lambda: world.cache.match(A, ZEROS)),
    "evict": lambda world: Call(lambda: world.cache.evict(7)),
    "room of a tenant's own": lambda world: Call(lambda: own_room(world.cache, "a", 12)),
    "allocate": _allocate(2),
    "allocate, evicting": _allocate(22),
    "free": _free,
    "insert": _insert((2, *ZEROS[:6])),
    "insert, splitting a node": _insert((*ZEROS[:4], 1, 2, 1)),
    "insert after a position": _insert_after(lease=False),
    "insert after a position, with a lease": _insert_after(lease=True),
    "insert a free block": _insert_free,
    "match and lease": _match_and_lease(ZEROS[:6]),
    "match and lease, splitting a node": _match_and_lease(ZEROS[:2]),
    "touch": _touch(ZEROS[:6]),
    "touch, splitting a node": _touch(ZEROS[:2]),
    "open without a lookup": _open(A, (*ZEROS[:8], 1), lookup=False),
    "open without a lookup, evicting": _open(A, (*ZEROS[:8], *range(3, 27)), lookup=False),
    "reserve": _opened(ZEROS[:5], lambda world, run: lambda: run.sequence.reserve(7)),
    "reserve, evicting": _opened(ZEROS[:5], lambda world, run: lambda: run.sequence.reserve(30)),
    "reserve, copying": _on_a_fork(lambda world, run: lambda: run.sequence.reserve(3)),
    "fill": _roomy(lambda sequence: sequence.fill([1, 2, 3])),
    "drop": _roomy(lambda sequence: sequence.drop()),
    "extend beyond the room": _roomy(lambda sequence: sequence.extend([1] * 8)),
    "truncate with room": _roomy(lambda sequence: sequence.truncate(5)),
    "commit with room": _roomy(lambda sequence: sequence.commit(9), (2, *ZEROS[:8])),
    "release with room": _roomy(lambda sequence: sequence.release()),
    "clear what is in use": _clear(A),
    "clear": _clear(B),
    "flush": lambda world: Call(world.cache.flush, keep=world.engine._execute),
    "pin": _pin(B, ZEROS[:6]),
    "pin, splitting a node": _pin(A, ZEROS[:2]),
    "pin again": _pin_again,
    "unpin": _unpin,
    "clear what is pinned": _forget_pinned(lambda world: world.cache.clear(B)),
    "purge what is pinned": _forget_pinned(lambda world: world.cache.purge("b")),
    "ending pins, evicting": _needing_pinned(lambda world: world.cache.evict(3)),
    "ending pins, in upkeep": _needing_pinned(lambda world: world.cache.maintain()),
    "ending pins, counting": _needing_pinned(lambda world: world.cache.tenant_stats("b")),
}


class EngineWorld(World):
    """A cache whose blocks the engine owns. ``lent``: what the engine has, apart from what the call was given."""

    def __post_init__(self) -> None:
        declining = Tenant("c", policy=Declining)
        config = CacheConfig(
            NUM_BLOCKS,
            BLOCK_SIZE,
            policy=self.policy,
            default_tenant=Tenant("default", max_pinned_blocks=10, max_blocks=16),
            blocks="engine",
        )
        self.journal, self.clock = Recorder(BLOCK_SIZE), ManualClock()
        self.cache = PrefixCache(config, journal=self.journal, clock=self.clock)
        self.cache.add_tenant(declining)
        self.engine, self.oracle = Engine(self.cache), Oracle(BLOCK_SIZE)
        self.lent, self.given = list(range(NUM_BLOCKS)), []
        self.insert(A, ZEROS[:8])
        self.insert(A, (*ZEROS[:6], 1, 0))
        self.insert(B, ZEROS[:6])
        self.insert(B, (1, 1, 1, 1, 1, 1))
        self.insert(NEW, ZEROS[:4])
        self.leases.append(self.cache.match_and_lease(A, ZEROS[:5]))
        self.pin(A, (*ZEROS[:6], 1, 0))

    def take(self, number: int) -> list[int]:
        """Take blocks that the engine has."""
        given, self.lent = self.lent[:number], self.lent[number:]
        return given

    def insert(self, namespace: Namespace, ids: tuple[int, ...]) -> None:
        """Fill and insert whole blocks. What isn't taken and what is evicted is the engine's."""
        given = self.take(len(ids) // BLOCK_SIZE)
        self.engine.write(np.array(given, np.int32), 0, chain(namespace, ids))
        self.oracle.commit(namespace, ids, len(ids))
        done = self.cache.insert(namespace, ids, given)
        self.lent += [*done.surplus.tolist(), *done.evicted.tolist()]

    def check(self) -> None:
        """No block is lost: it is the engine's, resident, or to be reclaimed."""
        lent = self.cache.snapshot().lent_ids
        assert set(self.lent) <= set(lent) <= {*self.lent, *self.given}
        super().check()

    def go_on(self) -> None:
        """The engine inserts more and reclaims. At the end it has every block, each once."""
        self.lent = list(self.cache.snapshot().lent_ids)
        self.given = []
        for namespace in (A, B, NEW):
            if len(self.lent) < 12:
                self.lent += self.cache.reclaim(12, namespace.tenant).tolist()
            self.insert(namespace, (3, *ZEROS[:7]))
        self.check()
        for lease in self.leases:
            lease.release()
        for pin in self.cache.pins():
            self.cache.unpin(pin)
        self.leases, self.pins = [], []
        self.lent += self.cache.reclaim(NUM_BLOCKS).tolist()
        assert sorted(self.lent) == list(range(NUM_BLOCKS)) and self.cache.resident_blocks == 0
        audit.check(self.cache)


def _engine_insert(
    namespace: Namespace, ids: tuple[int, ...], *, start: int = 0, own: int = 0, lease: bool = False
) -> Callable[[EngineWorld], Call]:
    """An insert from block ``start`` on; the first ``own`` blocks after it are the tree's."""

    def scenario(world: EngineWorld) -> Call:
        theirs = world.cache.match(namespace, ids).block_ids.tolist()[: start + own]
        world.given = world.take(len(ids) // BLOCK_SIZE - len(theirs))
        table = [*theirs, *world.given]
        world.engine.write(np.array(table, np.int32), 0, chain(namespace, ids))
        world.oracle.commit(namespace, ids, len(ids))

        def keep(done: Any) -> None:
            world.lent += [*done.surplus.tolist(), *done.evicted.tolist()]
            world.given = []
            if done.lease is not None:
                done.lease.release()
                world.lent += world.cache.reclaim(0).tolist()

        return Call(
            lambda: world.cache.insert(namespace, ids, table[start:], start=start * BLOCK_SIZE, lease=lease),
            keep=keep,
        )

    return scenario


def _reclaim(num_blocks: int, tenant: str | None = None) -> Callable[[EngineWorld], Call]:
    def scenario(world: EngineWorld) -> Call:
        world.cache.clear(NEW)
        world.oracle.clear(NEW)
        assert world.cache.free_blocks

        def keep(back: Any) -> None:
            world.lent += back.tolist()

        return Call(lambda: world.cache.reclaim(num_blocks, tenant), keep=keep)

    return scenario


ENGINE_SCENARIOS: dict[str, Callable[[Any], Call]] = {
    "insert": _engine_insert(B, (2, *ZEROS[:5])),
    "insert, splitting a node": _engine_insert(B, (*ZEROS[:4], 1, 2)),
    "insert after a position": _engine_insert(B, (*ZEROS[:6], 1, 2), start=1, own=1),
    "insert with a lease": _engine_insert(B, (*ZEROS[:6], 1, 2), own=1, lease=True),
    "insert, evicting": _engine_insert(B, (3,) * 26),
    "insert with a lease, evicting": _engine_insert(B, (*ZEROS[:6], *(3,) * 22), lease=True),
    "insert what is declined": _engine_insert(NEW, (*ZEROS[:4], 1, 1, 2, 2)),
    "reclaim what was freed": _reclaim(1),
    "reclaim, evicting": _reclaim(12),
    "reclaim for a tenant": _reclaim(9, "b"),
    "reclaim for a new tenant": _reclaim(9, "new"),
    "match and lease": _match_and_lease(ZEROS[:2]),
    "touch": _touch(ZEROS[:4]),
}


def _twice(run: Run) -> Callable[[], None]:
    run.sequence.commit(2)
    return lambda: run.sequence.commit(9)


def _closed_or_untouched(world: World, run: Run, before: tuple[Any, ...]) -> None:
    """The sequence is closed and its errors say why, or nothing had begun and it is unchanged."""
    if run.sequence.is_open:
        grown = world.stored and run.sequence.num_tokens > before[1]  # it needed no copy, while others did
        assert grown or run.state() == before
        return
    world.runs.remove(run)
    for use in (lambda: run.sequence.commit(1), lambda: run.sequence.extend([1]), run.sequence.release):
        with pytest.raises(LeaseError, match="interrupted"):
            use()
    with run.sequence:
        pass


POLICIES = ("lru", "lfu")
STRIDE = 29


@dataclass(eq=False)
class Plan:
    """Which steps of calls are interrupted: with INTERRUPT_ALL all of them.

    Otherwise each line, for each line that calls its function, in the first call that reaches it; and some of the rest.
    """

    scenarios: Mapping[str, Scenario]
    policies: tuple[str, ...] = ("lru",)
    stored: bool = False
    make: type[World] = World
    after: Plan | None = None
    """A plan whose calls come first."""

    @functools.cached_property
    def firsts(self) -> dict[Place, tuple[Plan, str, str]]:
        """The first call that reaches each place, and its policy."""
        found = {} if self.after is None else dict(self.after.firsts)
        for policy in self.policies:
            for name in self.scenarios:
                for place in self.places(name, policy):
                    found.setdefault(place, (self, name, policy))
        return found

    def places(self, name: str, policy: str) -> list[Place]:
        """The places of the steps of a call."""
        world = self.make(policy, self.stored)
        call, survey = self.scenarios[name](world), Survey(world.cache, opcodes=OPCODES)
        result = survey.run(call.make)
        call.after()
        call.keep(result)
        return survey.places

    def stops(self, name: str, policy: str) -> list[int]:
        """The steps at which a call is interrupted."""
        places, offset, known, stops = self.places(name, policy), zlib.crc32(name.encode()), set[Place](), []
        for number, place in enumerate(places, 1):
            is_first = self.firsts.get(place, (self, name, policy)) == (self, name, policy)
            if ALL or OPCODES or (is_first and place not in known) or (number + offset) % STRIDE == 0:
                stops.append(number)
            known.add(place)
        return stops


BASIC = Plan(SCENARIOS, POLICIES)
"""The calls of this file. Those of others come after them."""


def _steps(plan: Plan, name: str, policy: str) -> Iterator[tuple[World, Call, Stepper]]:
    """Yield the world after an interruption at each planned step, then after the call without one."""
    for stop in (*plan.stops(name, policy), NEVER):
        world = plan.make(policy, plan.stored)
        call = plan.scenarios[name](world)
        before = [run.state() for run in call.involved]
        stepper = Stepper(world.cache, stop, opcodes=OPCODES)
        result, was_interrupted = None, False
        try:
            result = stepper.run(call.make)
        except Interrupted:  # at its end nothing holds the frames of the call any more
            was_interrupted = True
        if was_interrupted:
            assert not world.cache._lock.locked(), f"the lock is held after {stepper.where}"
            call.after()
            for run, state in zip(call.involved, before, strict=True):
                _closed_or_untouched(world, run, state)
        else:
            call.after()
            call.keep(result)
            for run in call.involved:
                world.runs.remove(run)
        yield world, call, stepper


@pytest.mark.pure
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_exception_between_any_two_steps(name: str, policy: str) -> None:
    """No step of any call may break anything."""
    for at, (world, _, stepper) in enumerate(_steps(BASIC, name, policy)):
        if name.startswith(("clear", "purge")) and stepper.where == "":
            world.oracle.clear(A if "in use" in name else B)
        _holds(world, stepper, goes_on=at % 6 == 0 or stepper.where == "")
    assert stepper.where == "" and stepper.num_steps > 5


STORED = Plan(
    {
        name: SCENARIOS[name]
        for name in ("append", "extend, copying", "fork", "reorder", "release what is shared")
    },
    stored=True,
    after=BASIC,
)


@pytest.mark.pure
@pytest.mark.parametrize("name", STORED.scenarios)
def test_an_exception_between_any_two_steps_with_storage(name: str) -> None:
    """With storage, copies are launched at once. A batch may have grown; sequences that need no copy then stay open."""
    for world, call, stepper in _steps(STORED, name, "lru"):
        for run in call.involved:
            if run in world.runs:
                run.ids = run.sequence.token_ids.tolist()
        _holds(world, stepper)


@pytest.mark.pure
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["open, evicting", "extend, evicting", "evict", "clear what is in use"])
def test_an_exception_between_any_two_steps_in_slices(
    name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for calls so long that they release the lock on the way."""
    assert BASIC.firsts  # without these slices
    monkeypatch.setattr(requests, "MAX_VICTIMS_AT_ONCE", 0)
    for slices in ("MAX_BLOCKS_AT_ONCE", "SLICE_BLOCKS"):
        monkeypatch.setattr(requests, slices, 2)
    monkeypatch.setattr(purge, "SLICE_NODES", 2)
    test_an_exception_between_any_two_steps(name, policy)


OWNED = Plan(ENGINE_SCENARIOS, make=EngineWorld, after=BASIC)


@pytest.mark.pure
@pytest.mark.parametrize("name", ENGINE_SCENARIOS)
def test_an_exception_when_the_engine_owns_the_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is lost, also between slices."""
    assert BASIC.firsts  # without these slices
    monkeypatch.setattr(requests, "SLICE_BLOCKS", 4)
    for at, (world, _, stepper) in enumerate(_steps(OWNED, name, "lru")):
        _holds(world, stepper, goes_on=at % 6 == 0 or stepper.where == "")
    assert stepper.where == "" and stepper.num_steps > 5


def _holds(world: World, stepper: Stepper, goes_on: bool = True) -> None:
    try:
        world.check()
        if goes_on:
            world.go_on()
    except BaseException as error:
        error.add_note(f"after an interruption at step {stepper.num_steps}: {stepper.where or 'none'}")
        raise


@pytest.mark.pure
@pytest.mark.parametrize(
    "name", ["open, splitting a node", "commit between forks", "append", "clear", "evict"]
)
def test_an_exception_during_a_repair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second exception strikes inside ``mend``. The repair starts again, and the second exception is raised."""
    rng = random.Random(name)
    original = recovery._mend
    second: list[Stepper] = []

    def interrupted(*args: Any) -> None:
        if second[-1].num_steps:
            original(*args)
        else:
            second[-1].run(lambda: original(*args))

    monkeypatch.setattr(recovery, "_mend", interrupted)
    num_second = 0
    for stop in range(1, 10_000, 7):
        world = World("lru")
        second.append(Stepper(world.cache, rng.randrange(1, 700)))
        call = SCENARIOS[name](world)
        before = [run.state() for run in call.involved]
        stepper = Stepper(world.cache, stop)
        try:
            stepper.run(call.make)
        except Interrupted:
            num_second += bool(second[-1].where)
            for run, state in zip(call.involved, before, strict=True):
                _closed_or_untouched(world, run, state)
            _holds(world, stepper)
        else:
            break
    assert num_second > 3


class Mended(Recorded):
    """A cache that is repaired before each snapshot, although nothing is broken."""

    def snapshot(self) -> Any:
        """Repair, then take the snapshot."""
        with self._lock:
            recovery.mend(self, KeyboardInterrupt())
        return super().snapshot()

    def snapshot_in_slices(self, pause: Any = None) -> Any:
        """Repair, then take the snapshot in slices."""
        self.snapshot()
        return super().snapshot_in_slices(pause)


@pytest.mark.slow
def test_repairing_an_intact_cache_changes_nothing() -> None:
    """Such a repair changes nothing.

    Over random lives every law holds, every byte is right, and the number of copies is equal.
    """
    report = properties.run(Mended, EXAMPLES, 40, machine=JournalMachine)
    assert report.ok, report.failure


def test_the_eviction_order_survives_repairs() -> None:
    """Under LRU, a cache that is repaired after every request evicts the same blocks as one that never is."""
    rng = random.Random(0)
    caches = [PrefixCache(CacheConfig(24, 2)) for _ in range(2)]
    for _ in range(400):
        namespace = rng.choice((A, B))
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        for cache in caches:
            with cache.open(namespace, ids) as sequence:
                sequence.commit(len(ids))
        with caches[0]._lock:
            recovery.mend(caches[0], KeyboardInterrupt())
        assert resident_prefixes(caches[0]) == resident_prefixes(caches[1])
    assert caches[0].stats().evicted_blocks > 500


class Fails:
    """Wraps a policy or a journal so that one method fails once, at its n-th call."""

    def __init__(self, owner: Any, at: int) -> None:
        self.left = at
        for name in dir(type(owner)):
            method = getattr(owner, name)
            if not name.startswith("_") and name not in ("hook", "order") and callable(method):
                setattr(owner, name, functools.partial(self.call, method))

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Fail before or after the method did its work, in turn."""
        self.left -= 1
        if self.left == 0:
            raise MemoryError
        result = method(*args)
        if self.left == 1:
            self.left = 0
            raise MemoryError
        return result


@pytest.mark.parametrize(
    "name", ["open, evicting", "commit after a twin", "insert, splitting a node", "clear", "evict"]
)
@pytest.mark.parametrize(
    "who", ["journal", *(pytest.param(f"policy {tenant}", marks=pytest.mark.pure) for tenant in "ab")]
)
def test_a_policy_or_a_journal_that_fails(who: str, name: str) -> None:
    """The policy or journal fails at each of its calls. The error is raised, and the laws hold."""
    for at in range(1, 100):
        world = World("lfu")
        call = SCENARIOS[name](world)
        owners = {
            "journal": world.journal,
            **{f"policy {t}": s.policy for t, s in world.cache._tenants.items()},
        }
        fails = Fails(owners[who], at)
        for state in world.cache._tenants.values():
            state.follow(state.policy)
        before = [run.state() for run in call.involved]
        try:
            call.make()
        except MemoryError:
            vars(world.journal).pop("cleared", None)
            call.after()
            for run, state in zip(call.involved, before, strict=True):
                _closed_or_untouched(world, run, state)
            world.check()
        else:
            assert fails.left > 0
            return


NUM_SIGNALS = 150


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the collector.

    An exception inside its callbacks (Hypothesis has one) or in a finaliser never reaches the test.
    """
    collect_leftovers()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_real_signals() -> None:
    """A timer's signal handler raises wherever the interpreter allows it. The lock is free and the laws hold.

    Python reports an exception in a finaliser, such as that of a handle, as unraisable and continues. Then another
    signal comes.
    """
    rng = random.Random(1)
    armed = [False]

    def handler(_: int, frame: FrameType | None) -> None:
        if armed[0]:
            armed[0] = False
            raise Interrupted

    cache = PrefixCache(CacheConfig(NUM_BLOCKS, BLOCK_SIZE))
    num_interrupted = 0
    old = signal.signal(signal.SIGVTALRM, handler)
    try:
        while num_interrupted < NUM_SIGNALS:
            armed[0] = True
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, rng.uniform(1e-5, 1e-3))
                while armed[0]:
                    _some_requests(cache, rng)
            except Interrupted:
                num_interrupted += 1
            finally:
                armed[0] = False
            assert not cache._lock.locked()
            audit.check(cache)
            # a sequence that was returned at the very moment of the signal was dropped, and is released
            assert cache.stats().num_sequences == 0
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)
    cache.flush()
    cache.clear(A)
    assert cache.stats().free_blocks == NUM_BLOCKS


def _some_requests(cache: PrefixCache, rng: random.Random) -> None:
    with cache.open(A, [rng.randrange(2) for _ in range(rng.randrange(1, 12))]) as sequence:
        sequence.commit(sequence.num_tokens)
        children = sequence.fork(2)
        cache.append(children, [1, 2])
        for child in cache.reorder(children, [1, 1]):
            child.commit(child.num_tokens)
            child.release()
    cache.flush()
