"""A busy cache, and everything that can be done to it. ``test_recovery`` interrupts each of these calls.

``World`` is a small cache in which all kinds of holders are at work. It knows what each of them must find afterwards.
``OPERATIONS`` has each public call that changes a cache: those of a sequence in several SITUATIONS, the others in each
state that takes another way through the code. READS names the calls that change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from radixkv import (
    ArgumentError,
    CacheConfig,
    Fence,
    LeaseError,
    Namespace,
    Pin,
    PrefixCache,
    RequestHints,
    Sequence,
    StepPlan,
    Tenant,
    audit,
)
from radixkv.audit.oracle import cache_with_engine
from radixkv.audit.properties import LAYOUT
from radixkv.clock import ManualClock
from radixkv.index import purge, requests, sessions, tails
from radixkv.index.engine_blocks import own_room
from radixkv.index.load_target import LoadTarget
from radixkv.index.tokens import encode
from radixkv_policies import LRU
from tests.index.stepper import Callbacks
from tests.index.support import Declining
from tests.index.test_changes import Recorder, resident_segments
from tests.index.test_device_beams import beams_read, reads, step
from tests.model import Oracle, chain

A, B, NEW, OP, READER = (Namespace(tenant, "m") for tenant in ("a", "b", "c", "op", "r"))
NUM_BLOCKS, BLOCK_SIZE = 120, 2
Ids = tuple[int, ...]
ZEROS: Ids = (0,) * 12
TWOS: Ids = (2, *ZEROS[:8])
BASE: Ids = (1, 1, 1, 1, 2, 2)
AHEAD: Ids = (4, *ZEROS[:6], 1)
LEANED: Ids = (4, 4, *ZEROS[:5], 1)
OTHER = Tenant("c", incarnation="2")
TALK: Ids = (5, 5, 1, 1, 0, 0)
COLD: Ids = (7,) * 10
PINNED: Ids = (*ZEROS[:6], 1, 0)
SERVED = ((A, ZEROS[:8]), (A, PINNED), (B, ZEROS[:6]), (B, (1,) * 6))
WAITING = (*SERVED, (A, TWOS), (B, (*ZEROS[:4], 1, 1, 1, 1)), (NEW, ZEROS[:5]), (READER, (*BASE, 0, 0, 0)))


@dataclass(eq=False)
class Run:
    """A sequence, the ids whose KV it must read, and its state before the call."""

    sequence: Sequence
    ids: list[int]
    num_computed: int
    before: tuple[Any, ...] = ()

    def state(self) -> tuple[Any, ...]:
        it = self.sequence
        counts = it.num_tokens, it.num_cached_tokens, it.num_committed_tokens, it.num_reserved_tokens
        return it.is_open, it.is_lent, *counts, it.block_table.tolist(), it.token_ids.tolist()


def faulty(callbacks: Callbacks) -> type[LRU]:
    """Return LRU with hooks that may be interrupted. It isn't built in, so an Exception of it interrupts no call."""

    class Faulty(LRU):
        def order(self) -> Any:
            return tuple(map(callbacks.wrap, super().order()))

        def hook(self, name: str) -> Any:
            return callbacks.wrap(hook) if (hook := super().hook(name)) else None

        def victim(self) -> Any:
            return callbacks.wrap(super().victim)()

    return Faulty


class World:
    """A busy cache: forks and copies that wait, reserved room, leases, pins, lent blocks, a base and its reader,
    sessions, prompts that wait, steps that compute ahead, a fence, a tail, and a tenant with a guarantee.

    ``kind``: "plain"; "stored", with copies that are made at once and with beams on the device; "engine", in which the
    engine owns the blocks. ``policy``: a name, or "faulty" for one that ``callbacks`` may interrupt.

    An operation notes the sequences that its call works on (``involved``), the namespaces and bases of which it ends
    everything (``forgets``), what it may end or not (``loose``), blocks that it gives to the cache (``given``), which
    are the engine's or resident afterwards, and blocks that may also be free then (``freed``).
    """

    def __init__(self, policy: str = "lru", kind: str = "plain", scrub: str = "cross-tenant") -> None:
        self.kind, self.callbacks, self.journal = kind, Callbacks(), Recorder(BLOCK_SIZE)
        self.runs, self.involved, self.forgets = list[Run](), list[Run](), tuple[Namespace | str, ...]()
        self.leases, self.pins, self.waits, self.loose = list[Any](), list[Any](), list[Any](), list[Any]()
        self.sessions, self.based, self.given, self.freed = list[Any](), list[Any](), list[int](), list[int]()
        self.beams, self.next_step, self.clock, wrap = None, 1, ManualClock(), self.callbacks.wrap
        owns, own = kind == "engine", faulty(self.callbacks) if policy == "faulty" else policy
        self.lent, self.dropped = list(range(NUM_BLOCKS)) if owns else [], list[Any]()
        config = CacheConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            layout=LAYOUT if kind == "stored" else None,
            default_tenant=Tenant("d", policy=own, max_pinned_blocks=14, max_blocks=16 if owns else None),
            blocks="engine" if owns else "cache",
            scrub=scrub,
        )
        make = partial(PrefixCache, journal=self.journal)
        self.cache, self.engine = cache_with_engine(make, config, clock=wrap(self.clock))
        self.oracle, storage = Oracle(BLOCK_SIZE), self.cache.storage
        for what, name in ((self.journal, "stored"), (self.journal, "removed"), (self.journal, "cleared")):
            setattr(what, name, wrap(getattr(what, name)))
        if storage is None:
            self.engine.scrub = wrap(self.engine.scrub)
        else:
            storage.execute = wrap(storage.execute)
        self.cache.add_tenant(Tenant("g", guaranteed_blocks=3))
        if owns:
            self.cache.add_tenant(Tenant("c", policy=Declining))
        for namespace, ids in (*SERVED, (NEW, ZEROS[:4])) if owns else (*((A, COLD), (B, COLD)), *SERVED):
            self.serve(namespace, ids)
        self.leases.append((self.cache.match_and_lease(A, ZEROS[:5]), A, ZEROS[:4]))
        self.pins.append((self.cache.pin(A, PINNED, 600.0), PINNED))
        if not owns:
            self._work()

    def _work(self) -> None:
        parent = self.open(A, (*ZEROS[:4], 2, 2, 2), commit=6)
        child, writer = self.fork(parent, 2)
        self.cache.append([writer.sequence], [1])  # its copy waits
        writer.ids.append(1)
        self.commit(child, 7)
        self.open(A, (0, 0, 3)).sequence.reserve(4)
        self.lent = self.cache.allocate(2).tolist()
        self.publish("base", BASE)
        self.fork(self.open(READER, (*BASE, 0, 0, 0), commit=9), 1)
        self.serve(READER, (*BASE[:4], 0, 0))
        for namespace, ids in ((READER, BASE[:4]), (B, ZEROS[:4])):
            self.leases.append((self.cache.lease(self.cache.match(namespace, ids)), namespace, ids))
        self.agent, self.other = self.cache.session(A), self.cache.session(A)
        self.helper = self.agent.fork()
        self.sessions = [self.agent, self.helper, self.other]
        for at, session in enumerate(self.sessions):
            self.end(self.open(A, (*TALK[: 2 * (3 - at)], at), by=session, commit=2 * (3 - at)))
        self.lean(AHEAD)
        self.open(B, ZEROS[:7], commit=5)
        self.fence = Fence()
        self.cache.open(A, TWOS[:7]).release(after=self.fence)
        tailed = self.open(A, (*COLD, 1), commit=11)
        tails.keep(self.cache, tailed.sequence)
        self.end(tailed)
        if self.kind == "stored":  # beams that share blocks with a sequence on the host, and make two steps
            self.beams = self.cache.lend(parent.sequence.fork(3), 8, num_blocks=8)
            self.ids = [list(parent.ids)] * 3
            step(self.beams, self.engine, self.ids, [0, 1, 2], [1, 2, 0])
            step(self.beams, self.engine, self.ids, [2, 0, 0], [2, 2, 1])
        self.waits = [(self.cache.announce(namespace, ids), ids) for namespace, ids in WAITING]
        for ids in (COLD, (1,) * 6, COLD[:4]):  # the time of these ends first
            self.cache.pin(B, ids, 100.0)
            self.cache.announce(B, ids, ttl_s=100.0)

    # --- what its holders do

    def open(
        self, where: Namespace, ids: Ids, *, by: Any = None, commit: int = 0, room: int = 0, **how: Any
    ) -> Run:
        """Open a request, perhaps of a session, and compute what no step of another one computes."""
        sequence = self.cache.open(where, ids, **how) if by is None else by.open(ids)
        run = self.add(sequence, ids)
        self.write(run, sequence.num_cached_tokens + sequence.num_ahead_tokens)
        if commit > sequence.num_committed_tokens:
            self.commit(run, commit)
        sequence.reserve(room)
        return run

    def serve(self, namespace: Namespace, ids: Ids) -> None:
        if self.kind != "engine":
            self.end(self.open(namespace, ids, commit=len(ids)))
            return
        self.oracle.commit(namespace, ids, len(ids))
        given, self.lent = self.lent[: len(ids) // BLOCK_SIZE], self.lent[len(ids) // BLOCK_SIZE :]
        self.engine.write(np.array(given, np.int32), 0, chain(namespace, ids))
        self.end(self.cache.insert(namespace, ids, given))

    def lean(self, ids: Ids) -> list[Run]:
        """Open a sequence that a step computes, and two that lean on it. One of them computes in the next step."""
        owner, at = self.open(A, ids), self.next_step
        self.next_step += 2
        owner.sequence.computing(len(ids), step=at)
        leaning = [self.open(A, ids, ahead=True) for _ in range(2)]
        leaning[0].sequence.computing(len(ids), step=at + 1)
        self.oracle.commit(A, ids, len(ids))
        return [owner, *leaning]

    def publish(self, base_id: str, ids: Ids, *, completes: bool = True) -> Run:
        run = self.add(self.cache.publish(base_id, OP, ids, ["r"]), ids)
        self.based.append(run.sequence.block_table.tolist())
        self.write(run, run.sequence.num_cached_tokens)
        self.oracle.publish(base_id, OP, ids, ["r"])
        if completes:
            self.commit(run, len(ids))
            self.end(run)
        return run

    def add(self, sequence: Sequence, ids: Any) -> Run:
        self.runs.append(Run(sequence, list(ids), len(ids)))
        return self.runs[-1]

    def fork(self, run: Run, number: int) -> list[Run]:
        return [self.add(child, run.ids) for child in run.sequence.fork(number)]

    def write(self, run: Run, start: int) -> None:
        states = chain(run.sequence.namespace, run.ids)
        self.engine.write(run.sequence.block_table, start, states[start:])
        run.num_computed = len(states)

    def commit(self, run: Run, num_tokens: int) -> None:
        """Commit tokens. Committed tokens may be matched."""
        self.oracle.commit(run.sequence.namespace, run.ids, num_tokens)
        run.sequence.commit(num_tokens)

    def clear(self, namespace: Namespace) -> None:
        self.cache.clear(namespace)
        self.oracle.clear(namespace)
        self.pins = [each for each in self.pins if each[0].namespace != namespace]

    def end(self, *ended: Any) -> None:
        """End what a call returned, or what a holder has, unless it has ended."""
        for what in ended:
            if isinstance(what, Run):
                self.runs.remove(what)
                what = what.sequence
            if isinstance(what, list):
                self.end(*what)
            elif isinstance(what, Pin):
                self.cache.unpin(what)
            elif isinstance(what, np.ndarray):
                self.lent += what.tolist()
            elif isinstance(what, StepPlan):
                self.engine._execute(what)
            elif hasattr(what, "surplus"):
                self.end(what.lease)
                self.lent += [
                    *what.evicted.tolist(),
                    *(what.surplus.tolist() if self.kind == "engine" else []),
                ]
            elif hasattr(what, "sequences"):
                self.end(*what.sequences)
            elif hasattr(what, "withdraw"):
                what.withdraw()
            elif hasattr(what, "__exit__"):
                what.__exit__(None, None, None)

    def end_loose(self) -> None:
        self.end(*self.loose)
        self.waits, self.loose = [each for each in self.waits if each[0] not in self.loose], []
        self.leases = [each for each in self.leases if each[0].is_open]

    # --- a call

    def on(
        self, call: Callable[..., Any], *args: Any, runs: Any = (), forgets: Any = (), **how: Any
    ) -> Callable[[], Any]:
        """Return a call that is ready. Note what it forgets, and its sequences, whose KV exist."""
        self.involved, self.forgets = list(runs), forgets
        for run in runs:
            self.oracle.commit(run.sequence.namespace, run.ids, len(run.ids))
        return partial(call, *args, **how)

    def begin(self) -> None:
        """Note the state of all sequences and what the operation noted, before its call. Drop what is to be dropped."""
        for run in self.runs:
            run.before = run.state()
        self.noted = list(self.involved), self.forgets, list(self.given), list(self.freed)
        self.dropped.clear()

    def settle(self, result: Any = None, *, is_done: bool) -> None:
        """After a call: its sequences are closed, or as they were. Those of a call that is done end."""
        for run in self.involved:
            it = run.sequence
            if is_done or not it.is_open:
                for use in () if is_done else (partial(it.commit, 1), partial(it.extend, [1])):
                    with pytest.raises(LeaseError, match=r"interrupted|purged"):
                        use()
                self.end(run)
            elif (
                run.state() != run.before
            ):  # it was committed, or grew without a copy, while those of others failed
                ids = it.token_ids.tolist()
                assert (self.kind == "stored" and ids[:-1] == run.ids) or run.state()[:4] == run.before[:4]
                run.ids, run.before = ids, run.state()
        self.end(result)
        for each in self.forgets:
            self.pins = [held for held in self.pins if held[0].namespace != each]
            self.waits = [held for held in self.waits if held[0].is_open or held[0].namespace != each]
            if is_done:
                self.oracle.unpublish(each) if isinstance(each, str) else self.oracle.clear(each)
        if self.kind != "engine":
            lent = set(self.cache.snapshot().lent_ids)
            assert lent | self._resident() >= set(self.given), "an inserted block is nobody's"
            self.lent += [
                block for block in (*self.given, *self.freed) if block in lent and block not in self.lent
            ]
            self.given = []
        self.waits = [each for each in self.waits if each[0].is_open or each[0] not in self.loose]
        self.leases = [each for each in self.leases if each[0].is_open or each[0] not in self.loose]
        self.involved, self.forgets, self.freed = [], (), []

    def repeat(self, make: Callable[[], Any]) -> None:
        """Make an interrupted call again. It succeeds, or says that it has been done, or that its sequences are closed.
        In the last case their requests begin anew.
        """
        involved, self.forgets, self.given, self.freed = self.noted
        self.lent = [block for block in self.lent if block not in (*self.given, *self.freed)]
        self.involved, result = [run for run in involved if run in self.runs], None
        self.begin()
        with suppress(ArgumentError, LeaseError):
            result = make()
        self.settle(result, is_done=True)
        for run in involved:
            self.serve(run.sequence.namespace, tuple(run.ids))
        self.check()

    # --- what must hold

    def counts(self) -> dict[str, tuple[int, ...]]:
        """Return what is counted of the requests of each tenant."""
        tenants = self.cache._tenants.items()
        return {name: (it.requests, it.hit_tokens, it.missed_tokens, it.generation) for name, it in tenants}

    def check(self) -> None:
        """Check the laws, and that those whom the call didn't concern find everything as it was."""
        cache, engine = self.cache, self.engine
        assert not cache._lock.locked() and not cache.is_broken
        audit.check(cache, at_once=True)
        snapshot = cache.snapshot()
        self._check_sums()
        assert self.journal.held == resident_segments(snapshot, BLOCK_SIZE), (
            "the journal differs from the trees"
        )
        if self.kind != "stored":
            engine.settle()
        for run in self.runs:
            it = run.sequence
            assert not run.before or run.state() == run.before, "another request's sequence has changed"
            assert self.reads(it.namespace, it.block_table, run.ids[: run.num_computed]), (
                "another request's KV"
            )
        for lease, namespace, ids in self.leases:
            assert lease.is_open and self.reads(namespace, lease.block_ids, ids)
        for pin, ids in self.pins:
            assert pin.id in {each.id for each in cache.pins("a")} and cache.match(A, ids).num_tokens == len(
                ids
            )
        lent = set(snapshot.lent_ids)
        assert set(self.lent) <= lent and (self.kind != "engine" or lent <= {*self.lent, *self.given})
        found = [(*ZEROS[:at], other, *ZEROS[:2], other, 0) for at in (0, 2, 4, 6) for other in (1, 2)]
        for ids in (*found, (*BASE[:4], 0, 0, 0), TALK, AHEAD, COLD):
            for namespace in (A, B, NEW, OP, READER):
                match = cache.match(namespace, ids)
                assert self.oracle.served_lie(namespace, ids, match.num_tokens) is None
                assert self.reads(namespace, match.block_ids, ids[: match.num_tokens])
        told = set(cache.changed_announcements())
        for waits, ids in self.waits:
            assert waits.is_open and waits.resident_tokens == cache.match(waits.namespace, ids).num_tokens
        assert all(each.is_open for each in told)
        if self.beams is not None:
            self._check_beams(self.beams)

    def _check_sums(self) -> None:
        """Check what the audit can't see: sums over all tenants, and which blocks must not be handed out."""
        evictor, pool, pins = self.cache._evictor, self.cache._pool, self.cache._pins
        tenants = self.cache._tenants.values()
        assert evictor.evictable_blocks == sum(each.evictable_blocks for each in tenants)
        assert evictor.resident_blocks == sum(each.resident_blocks for each in tenants)
        promised = sum(max(each.protected_blocks, each.guaranteed_blocks) for each in tenants)
        assert evictor.promised_blocks == promised and len(pool.lent) == len(pool.lent.ids())
        assert bool(evictor.on_need) == bool(pins._num_held) and pins._num_held == pins.num_pins()
        assert pool.copies.named_among(self._resident()) <= pool.exposed
        assert not pool.copies.named_among(set(pool.free_ids().tolist())), (
            "a copy waits that names a free block"
        )

    def _resident(self) -> set[int]:
        packed = b"".join(node.block_ids for tree in self.cache.snapshot().trees for node in tree.nodes)
        return set(np.frombuffer(packed, np.int32).tolist())

    def _check_beams(self, beams: Any) -> None:
        """Lent beams equal the device's state. Others are sequences with these tokens, or all are closed."""
        sequences, device = beams.sequences, beams._device
        if not beams.is_over:
            assert all(each.is_lent for each in sequences) and beams_read(beams, self.engine, self.ids)
            device.books.check()
            return
        alive = [(each, ids) for each, ids in zip(sequences, self.ids, strict=True) if each.is_open]
        assert not alive or len(alive) >= len(sequences) - 1  # one may have been released
        assert all(each.token_ids.tolist() == ids and reads(self.engine, each) for each, ids in alive)
        device.step(device.books.tables.new_tensor([0] * 3), device.books.lengths)  # makes no step any more

    def reads(self, namespace: Namespace, table: Any, ids: Any) -> bool:
        """Whether these blocks hold the KV of these ids, bit for bit. Those of a base are its account's."""
        states = chain(namespace, ids)
        if self.engine.holds(table, states):
            return True
        at = 0
        for blocks in self.based if namespace == READER else ():
            same = [one == other for one, other in zip(blocks, table, strict=False)]
            at = max(at, BLOCK_SIZE * [*same, False].index(False))
        return self.engine.holds(table, [*chain(OP, ids[:at]), *states[at:]][: len(states)])

    # --- life goes on

    def go_on(self) -> None:
        """All go on with their work, new requests come, and all ends. Then every block is free."""
        self.end_loose()
        if self.kind == "engine":
            self.lent = list(self.cache.snapshot().lent_ids)  # after an interruption, the cache says it
            for namespace in (A, B, NEW):
                if len(self.lent) < 12:
                    self.lent += self.cache.reclaim(12, namespace.tenant).tolist()
                self.serve(namespace, (3, *ZEROS[:7]))
        else:
            self._go_on_working()
        self.check()
        self.end(*self.runs[:], *(lease for lease, *_ in self.leases), *self.cache.pins(), *self.sessions)
        assert not any(session.own_blocks for session in self.sessions)
        if self.kind == "engine":
            self.lent += self.cache.reclaim(NUM_BLOCKS).tolist()
            assert sorted(self.lent) == list(range(NUM_BLOCKS)) and not self.cache.resident_blocks
            return
        left = [self.cache.evict(1) for _ in range(3)]
        for namespace in self.cache.namespaces():
            if namespace != A:
                self.cache.clear(namespace)
        left.append(self.cache.evict(NUM_BLOCKS))
        stats = self.cache.stats()
        assert stats.free_blocks == NUM_BLOCKS and left[:3] == [1, 1, 1] and not self.cache.bases(), stats
        assert not (stats.num_sequences or stats.sequence_blocks or stats.lent_blocks or stats.num_nodes), (
            stats
        )
        number = NUM_BLOCKS - self.cache.blocks_of("last").guaranteed_to_others
        with self.cache.open(Namespace("last", "m"), [0] * (number * BLOCK_SIZE)) as sequence:
            is_zeroed = not self.engine.read(sequence.block_table).any()
            assert is_zeroed or self.cache.config.scrub == "never", "bytes of another tenant"
        audit.check(self.cache)

    def _go_on_working(self) -> None:
        self.fence.lift()
        self.cache.free(self.lent)
        self.lent = []
        for at in range(self.next_step + 1):
            self.cache.step_done(at)
        if self.beams is not None:
            beams, self.beams = self.beams, None
            if not beams.is_over:
                step(beams, self.engine, self.ids, [1, 1, 0], [0, 1, 2])
                beams.reconcile()
            for sequence, ids in zip(beams.sequences, self.ids, strict=True):
                assert not sequence.is_open or (
                    sequence.token_ids.tolist() == ids and reads(self.engine, sequence)
                )
                self.end(sequence)
        for waits, ids in self.waits:
            self.cache.open(waits.namespace, ids, announcement=waits).release()
            assert not waits.is_open
        self.waits = []
        for session in self.sessions:
            if session.is_open:
                self.end(self.open(A, (*TALK, 2, 2), by=session, commit=8))
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
        self.begin()


# --- the operations: each makes a call ready. It doesn't make it.

Operation = Callable[[World], Callable[[], Any]]


def _twin(world: World) -> Run:
    run = world.open(A, TWOS)
    world.open(A, TWOS, commit=5)
    run.sequence.commit(2)
    return run


def _between(world: World) -> Run:
    """Another sequence committed some of the shared blocks, and some are duplicates."""
    twin, parent = world.open(A, TWOS[:6]), world.open(A, (*TWOS, 0))
    world.commit(twin, 6)
    child, run = world.fork(parent, 2)
    world.commit(child, 8)
    return run


def _talked(world: World, who: str) -> Run:
    """The sequence of a session, after another session committed a part of it."""
    run = world.open(A, (*TALK, 0, 1, 0), by=world.agent)
    world.end(world.open(A, (*TALK, 0, 1), by=getattr(world, who), commit=8))
    return run


def _cleared(world: World) -> Run:
    run = world.open(B, ZEROS[:9], commit=8)
    world.clear(B)
    return run


def _behind(world: World) -> Run:
    base = f"base {len(world.based)}"
    world.publish(base, (2, 2, 2, 2))
    run = world.open(READER, (2, 2, 2, 2, 0, 0, 2), commit=6)
    world.cache.unpublish(base)
    return run


def _committed(world: World, *, held: bool = False) -> Run:
    """Others computed behind what it committed. They may also hold it: a request, a fork, a lease, a pin."""
    run = world.open(A, TWOS, commit=8)
    world.serve(A, (*TWOS[:8], 1, 1, 1))
    world.serve(A, (*TWOS[:4], 1, 1))
    if held:
        world.open(A, (*TWOS[:8], 2, 2))
        world.fork(run, 1)
        world.loose.append(world.cache.lease(world.cache.match(A, TWOS[:8])))
        world.cache.pin(A, TWOS[:8], 60.0)
    return run


def _forgot(world: World) -> Run:
    """Another sequence forgot before, and less."""
    first = world.open(A, TWOS[:8], commit=8)
    run, _ = world.open(A, (*TWOS[:8], 2, 2)), world.open(A, (*TWOS[:8], 1, 2))
    world.cache.forget(first.sequence, 5)
    world.end(first)
    return run


SITUATIONS: dict[str, Callable[[World], Run]] = {
    "alone": lambda world: world.open(A, TWOS),
    "sharing": lambda world: world.fork(world.open(A, (*ZEROS[:6], 2, 2, 2)), 2)[-1],
    "with room": lambda world: world.open(A, TWOS, room=5),
    "that hits": lambda world: world.open(A, ZEROS[:8]),
    "half committed": lambda world: world.open(A, TWOS, commit=2),
    "after a twin": _twin,
    "between forks": _between,
    "behind a base": lambda world: world.open(READER, (*BASE, 2, 2, 2)),
    "growing behind a base": lambda world: world.open(READER, (*BASE, 0, 0, 2, 2, 2)),
    "behind what was a base": _behind,
    "publishing": lambda world: world.publish("new", (2, 2, 2, 2), completes=False),
    "publishing more": lambda world: world.publish("new", (*BASE, 0, 0), completes=False),
    "publishing less": lambda world: world.publish("new", BASE[:4], completes=False),
    "of a session": lambda world: world.open(A, (*TALK, 0, 1, 0), by=world.agent),
    "after a session": partial(_talked, who="other"),
    "after its family": partial(_talked, who="helper"),
    "leaned on": lambda world: world.lean(LEANED)[0],
    "cleared": _cleared,
    "committed": _committed,
    "committed, held": partial(_committed, held=True),
    "that forgot": _forgot,
}
"""What a sequence may be, when a call works on it."""


def _load(world: World, sequence: Sequence) -> Any:
    state = sequence._state
    state._loading = LoadTarget(world.cache, state, state.key_between(0, 32))
    return state._loading.commit(8)


def in_slices(make: Callable[[], Any]) -> Any:
    """Make a call with slices of a few blocks and nodes, so that it releases the lock on the way."""
    small = patch.multiple(requests, MAX_VICTIMS_AT_ONCE=0, MAX_BLOCKS_AT_ONCE=2, SLICE_BLOCKS=2)
    with small, patch.object(purge, "SLICE_NODES", 2), patch.object(sessions, "SLICE_NODES", 1):
        return make()


ALL, SOME = tuple(SITUATIONS), ("alone", "sharing", "with room")
WRONG = ("alone", "half committed", "committed", "committed, held", "that forgot")
ON_SEQUENCES: tuple[tuple[str, Callable[[World, Sequence], Any], tuple[str, ...]], ...] = (
    ("Sequence.commit", lambda _, it: it.commit(it.num_tokens), ALL),
    ("Sequence.release", lambda _, it: it.release(), ALL),
    ("Sequence.extend", lambda _, it: it.extend([1, 2, 3]), (*SOME, "behind a base", "leaned on")),
    ("Sequence.truncate", lambda _, it: it.truncate(max(5, it.num_committed_tokens)), (*SOME, "leaned on")),
    ("Sequence.fork", lambda _, it: it.fork(2), (*ALL[:2], "behind a base", "leaned on", "of a session")),
    ("forget", lambda world, it: world.cache.forget(it, 3) and None, WRONG),
    ("forget, all", lambda world, it: world.cache.forget(it, 0) and None, WRONG),
    ("Sequence.commit, partly", lambda _, it: it.commit(it.num_tokens - 1), SOME),
    ("Sequence.computing", lambda world, it: it.computing(it.num_tokens - 1, step=world.next_step), SOME),
    ("Sequence.append", lambda _, it: it.append(1), SOME),
    ("Sequence.extend, far", lambda _, it: it.extend(range(3, 9)), SOME),
    ("Sequence.extend, in slices", lambda _, it: in_slices(partial(it.extend, range(3, 130))), SOME),
    ("Sequence.reserve", lambda _, it: it.reserve(3), SOME),
    ("Sequence.reserve, much", lambda _, it: it.reserve(120), SOME),
    ("Sequence.fill", lambda _, it: it.fill([1, 2, 3]), ("with room",)),
    ("Sequence.drop", lambda _, it: it.drop(), ("with room",)),
    ("Sequence.recount", lambda _, it: it.recount(1, 2, 3), ("alone",)),
    ("Sequence.release, later", lambda world, it: it.release(after=world.fence), SOME),
    ("Sequence.__exit__", lambda _, it: it.__exit__(None, None, None), ("alone",)),
    ("LoadTarget.commit", _load, SOME),
    ("tails.keep", lambda world, it: tails.keep(world.cache, it), ("alone", "sharing", "committed")),
)
"""Calls on a sequence, and the situations in which they are tried. Without a class, they are the cache's."""


def on_sequence(call: Callable[[World, Sequence], Any], situation: str) -> Operation:
    return lambda world: world.on(call, world, (run := SITUATIONS[situation](world)).sequence, runs=[run])


def cached(method: str, *args: Any, **how: Any) -> Operation:
    """A call of the cache that works on no sequence."""
    return lambda world: world.on(getattr(world.cache, method), *args, **how)


def batch(call: Callable[[World, list[Sequence]], Any]) -> Operation:
    """A call on two of three that share a tail, one with a free row, and one of another tenant that needs a block."""

    def operation(world: World) -> Callable[[], Any]:
        forks = world.fork(world.open(A, TWOS[:5]), 2)
        runs = [*forks, world.open(A, (2, 2, 2)), world.open(B, ZEROS[:8])]
        return world.on(call, world, [run.sequence for run in runs], runs=runs)

    return operation


def stepping(method: str) -> Operation:
    """The end of a step, with the sequence that it computed and those that lean on it."""
    return lambda world: world.on(getattr(world.cache, method), world.next_step, runs=world.lean(LEANED))


def due(operation: Operation) -> Operation:
    """A call when the time of some pins and announcements is over."""
    return lambda world: (world.clock.advance(200.0), operation(world))[1]


def sliced(operation: Operation) -> Operation:
    return lambda world: partial(in_slices, operation(world))


def loosely(call: str, *args: Any) -> Operation:
    """A call that ends a lease, or an announcement. After an interruption it has ended, or is as before."""

    def operation(world: World) -> Callable[[], Any]:
        world.loose.append(world.waits[0][0] if call in ("withdraw", "open") else world.leases[-1][0])
        if call == "open":
            return partial(world.cache.open, *WAITING[0], announcement=world.loose[-1])
        return partial(getattr(world.loose[-1], call), *args)

    return operation


def insert(
    where: Namespace, ids: Ids, start: int = 0, own: int = 0, *, lease: bool = False, free: bool = False
) -> Operation:
    """An insert from block ``start`` on. The first ``own`` blocks after it are the tree's. With ``free`` another one is
    the cache's, and the engine filled it all the same.
    """

    def operation(world: World) -> Callable[[], Any]:
        theirs = world.cache.match(where, ids).block_ids.tolist()[: start + own]
        number = len(ids) // BLOCK_SIZE - len(theirs)
        if world.kind == "engine":
            given, world.lent = world.lent[:number], world.lent[number:]
        else:
            given = world.cache.allocate(number).tolist()
        world.given += given[free:]
        if free:
            world.cache.free(given[:1])
            world.freed += given[:1]
        table = [*theirs, *given]
        world.engine.write(np.array(table, np.int32), 0, chain(where, ids[: len(table) * BLOCK_SIZE]))
        world.oracle.commit(where, ids, len(ids))
        return partial(world.cache.insert, where, ids, table[start:], start=start * BLOCK_SIZE, lease=lease)

    return operation


def settings(method: str, now: Any, before: Tenant | None = None) -> Operation:
    """A change of a tenant that has some blocks. If it was another one, they are forgotten."""

    def operation(world: World) -> Callable[[], Any]:
        where = B if before is None else NEW
        if before is not None:
            world.cache.add_tenant(before)
        world.serve(where, (2, *range(24)))
        return world.on(getattr(world.cache, method), now, forgets=() if before is None else (NEW,))

    return operation


def _close(world: World) -> Callable[[], Any]:
    """The last session of a family, with a running request."""
    world.helper.close()
    world.open(A, (*TALK, 2, 2), by=world.agent, commit=8)
    return world.agent.close


def _dropped(world: World) -> Callable[[], Any]:
    """The next call releases what was dropped: a sequence, a lease, beams."""
    world.dropped += [world.cache.open(A, TWOS), world.cache.lease(world.cache.match(B, ZEROS[:4]))]
    if world.kind == "stored":
        world.dropped.append(world.cache.lend(world.cache.open(A, TWOS[:5]).fork(2), 4, num_blocks=4))
    return world.cache.require_alive


def _free(world: World) -> Callable[[], Any]:
    world.freed = world.cache.allocate(3).tolist()
    return partial(world.cache.free, list(world.freed))


def _drop_tail(world: World) -> Callable[[], Any]:
    found = tails.find(world.cache, A, encode([*COLD, 1, 1]), with_rows=True)
    return partial(tails.drop, world.cache, A, encode(COLD) + found.tail_key)


def _reclaim(number: int, tenant: str | None = None) -> Operation:
    return lambda world: (world.clear(NEW), partial(world.cache.reclaim, number, tenant))[1]


def _full(world: World, more: int) -> Ids:
    """Ids that take all free blocks and so many more."""
    return (*ZEROS[:8], *range(3, 3 + 2 * (world.cache.free_blocks + more)))


PLAIN: dict[str, Operation] = {
    "open: a hit": cached("open", A, ZEROS[:9]),
    "open: splitting a node": cached("open", A, (0, 0, 1, 1, 1)),
    "open: splitting a node that nobody uses": cached("open", B, (*ZEROS[:4], 1, 1, 1)),
    "open: of a new tenant": cached("open", Namespace("new", "m"), ZEROS[:5]),
    "open: without a lookup": cached("open", A, (*ZEROS[:8], 1), lookup=False),
    "open: leaning on a step": cached("open", A, (*AHEAD, 2, 2), ahead=True),
    "open: behind a base": cached("open", READER, (*BASE, 2, 2, 2)),
    "open: half way behind a base": cached("open", READER, (1, 1, 2, 2, 2)),
    "open: what waits": loosely("open"),
    "open: in slices": lambda world: partial(in_slices, partial(world.cache.open, A, _full(world, 5))),
    "open: evicting, without a lookup": lambda world: partial(
        world.cache.open, A, _full(world, 1), lookup=False
    ),
    "match_and_lease: splitting a node": cached("match_and_lease", B, COLD[:2]),
    "lease: splitting a node": lambda world: partial(world.cache.lease, world.cache.match(B, COLD[:2])),
    "lease: of a base": lambda world: partial(world.cache.lease, world.cache.match(READER, BASE[:2])),
    "Lease.release": loosely("release"),
    "Lease.__exit__": loosely("__exit__", None, None, None),
    "touch": cached("touch", B, COLD[:2]),
    "count_reads": cached("count_reads", "a", 4, as_of=0),
    "note": cached("note", A, TALK, RequestHints({"tool_pending": True})),
    "announce": cached("announce", A, (*ZEROS[:8], 1)),
    "announce: of a new tenant": cached("announce", Namespace("new", "m"), ZEROS[:5]),
    "changed_announcements": due(lambda world: lambda: world.cache.changed_announcements() and None),
    "Announcement.withdraw": loosely("withdraw"),
    "session": cached("session", A),
    "Session.open": lambda world: partial(world.agent.open, (*TALK, 2, 2)),
    "Session.open: on another's path": lambda world: partial(world.other.open, (*TALK[:4], 1, 2, 2)),
    "Session.pause": lambda world: partial(world.agent.pause, 4.0),
    "Session.fork": lambda world: world.agent.fork,
    "Session.close": lambda world: world.other.close,
    "Session.close: the last of a family": sliced(_close),
    "Session.__exit__": lambda world: partial(world.helper.__exit__, None, None, None),
    "Fence.lift": lambda world: world.fence.lift,
    "require_alive: after handles were dropped": _dropped,
    "step_done": stepping("step_done"),
    "step_failed": stepping("step_failed"),
    "flush": cached("flush"),
    "evict: in slices": sliced(cached("evict", 7)),
    "evict: what was pinned": due(cached("evict", 3)),
    "maintain": due(cached("maintain")),
    "tenant_stats": due(lambda world: lambda: world.cache.tenant_stats("b") and None),
    "allocate: evicting": lambda world: partial(world.cache.allocate, world.cache.free_blocks + 4),
    "free": _free,
    "own_room": lambda world: partial(own_room, world.cache, "a", world.cache.free_blocks + 5),
    "insert": insert(B, (2, *ZEROS[:6])),
    "insert: splitting a node": insert(B, (*ZEROS[:4], 1, 2, 1)),
    "insert: with a lease": insert(B, (*ZEROS[:6], 1, 2, 1, 2), 1, 1, lease=True),
    "insert: a free block": insert(B, (2, *ZEROS[:5]), free=True),
    "insert: behind a base": insert(READER, (*BASE, 2, 2)),
    "pin": cached("pin", B, COLD[:8], 60.0),
    "pin: splitting a node": cached("pin", A, ZEROS[:2], 60.0),
    "pin: again": lambda world: lambda: world.cache.pin(A, PINNED, 500.0) and None,
    "unpin": lambda world: partial(world.cache.unpin, world.cache.pin(B, COLD[:6], 60.0)),
    "clear": cached("clear", B, forgets=(B,)),
    "clear: what is in use, in slices": sliced(cached("clear", A, forgets=(A,))),
    "clear: with a base": cached("clear", OP, forgets=(OP, READER, "base")),
    "clear: behind a base": cached("clear", READER, forgets=(READER,)),
    "purge": lambda world: world.on(
        world.cache.purge, "b", runs=[run for run in world.runs if run.sequence.namespace == B], forgets=(B,)
    ),
    "purge: with a base": cached("purge", "op", forgets=(OP, READER, "base")),
    "publish: a longer one": cached("publish", "new", OP, (*BASE, 0, 0), ["r", "new"]),
    "unpublish": cached("unpublish", "base", forgets=(READER, "base")),
    "set_readers: striking one": cached("set_readers", "base", ["x"], forgets=(READER, "base")),
    "set_readers: adding one": cached("set_readers", "base", ["r", "x"]),
    "add_tenant: with another policy": settings("add_tenant", Tenant("b", policy="lfu")),
    "add_tenant: with a lower limit": settings("add_tenant", Tenant("b", max_blocks=24, guaranteed_blocks=4)),
    "add_tenant: that is strict": settings("add_tenant", Tenant("b", mode="strict", guaranteed_blocks=24)),
    "add_tenant: another of this name": settings(
        "add_tenant", Tenant("c", incarnation="2"), Tenant("c", incarnation="1")
    ),
    "remove_tenant": settings("remove_tenant", "c", Tenant("c", guaranteed_blocks=2, policy="lfu")),
    "tails.drop": _drop_tail,
}
"""Calls of a cache with copies that wait."""

EITHER: dict[str, Operation] = {
    "open: evicting": lambda world: partial(world.cache.open, A, _full(world, 1)),
    "append": batch(lambda world, sequences: world.cache.append(sequences, [1, 2, 1, 2])),
    "reorder": batch(lambda world, sequences: world.cache.reorder(sequences, [0, 1, 0])),
    "evict": cached("evict", 7),
}
"""Calls of a cache with copies that wait, and of one with storage and lent beams."""

STORED: dict[str, Operation] = {
    "lend": batch(lambda world, sequences: world.cache.lend(sequences[:3], 4, num_blocks=4)),
    "LentBeams.lend_more": lambda world: partial(world.beams.lend_more, 2),
    "LentBeams.reconcile": lambda world: lambda: world.beams.reconcile() and None,
    "LentBeams.__exit__": lambda world: partial(world.beams.__exit__, None, None, None),
    "Sequence.release: one of lent beams": lambda world: world.beams.sequences[1].release,
    "require_alive: after beams were dropped": _dropped,
    "clear: beside beams": cached("clear", A, forgets=(A,)),
}
"""Calls of a cache with storage and lent beams."""

OWNED: dict[str, Operation] = {
    "insert": insert(B, (2, *ZEROS[:5])),
    "insert: splitting a node": insert(B, (*ZEROS[:4], 1, 2)),
    "insert: after a position": insert(B, (*ZEROS[:6], 1, 2), 1, 1),
    "insert: evicting": insert(B, (3,) * 26),
    "insert: with a lease": insert(B, (*ZEROS[:6], *(3,) * 22), lease=True),
    "insert: declined": insert(NEW, (*ZEROS[:4], 1, 1, 2, 2)),
    "reclaim: what was freed": _reclaim(1),
    "reclaim: in slices": sliced(_reclaim(12)),
    "reclaim: for a tenant": _reclaim(9, "b"),
    "reclaim: for a new tenant": _reclaim(9, "new"),
    "touch": cached("touch", B, ZEROS[:4]),
    "match_and_lease": cached("match_and_lease", B, ZEROS[:2]),
}
"""Calls of a cache whose blocks the engine owns."""

OPERATIONS: dict[tuple[str, str], Operation] = {
    **{("plain", name): operation for name, operation in (PLAIN | EITHER).items()},
    **{("stored", name): operation for name, operation in (EITHER | STORED).items()},
    **{("engine", name): operation for name, operation in OWNED.items()},
    **{("plain", f"{name}: {it}"): on_sequence(call, it) for name, call, its in ON_SEQUENCES for it in its},
    **{("stored", f"{name}: sharing"): on_sequence(call, "sharing") for name, call, _ in ON_SEQUENCES[:5]},
}
"""All of them, by the kind of the ``World`` and the name."""

READS = {
    "PrefixCache": "match match_ahead bases blocks_of generation namespaces pins snapshot snapshot_in_slices stats "
    "tenant tenants",
    "Sequence": "__enter__",
    "Session": "__enter__",
    "Lease": "__enter__",
    "LentBeams": "__enter__ state slots clear step",
    "Fence": "hold",
    "Announcement": "",
}
"""Calls that change nothing of a cache. Those of beams change the device alone, and the cache alone calls ``hold``."""

VALUES = "CacheStats End Inserted Journal Loading Match Material Pin TenantBlocks TenantStats"
"""Other classes of the index: records, and what others implement."""
