"""An exception at any point of any call: what ``docs/concepts/recovery.md`` guarantees holds.

Each call of ``operations`` is made again and again in a busy cache, and an exception is raised at another point each
time: a step of the code in the pure build (``stepper``), or a call that the cache makes to code of others. After each,
``World.settle`` and ``World.check`` look at the call's own sequences, at everybody else's, and at the laws. Then the
call is repeated, life goes on, and at the end every block must be free.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import radixkv
from radixkv import CacheConfig, IntegrityError, PrefixCache, RadixKVError, audit
from radixkv.index import recovery
from radixkv.index.recovery import MAX_FAILED_REPAIRS
from tests.index.operations import OP, OPERATIONS, READER, READS, VALUES, A, B, World
from tests.index.stepper import ALL, ERRORS, NEVER, Interrupted, Place, Stepper
from tests.index.support import collect_leftovers
from tests.model import resident_prefixes

pytestmark = pytest.mark.filterwarnings("ignore:a fence was never lifted:ResourceWarning")
STRIDE = 97
LIVES = max(int(os.environ.get("RADIXKV_EXAMPLES", "40")) // 4, 4)
OOM_LIVES = int(os.environ.get("OOM_LIVES", "10"))
"""The number of lives in which memory runs out, of each kind."""
WINDOWS = (1, 2, 5, 20, 100, 1_000)
"""The numbers of consecutive allocations that fail."""


def number_of(*names: str) -> int:
    """A fixed number for an operation, for choices that look random."""
    return zlib.crc32(" ".join(names).encode())


def made(kind: str, name: str, policy: str = "") -> tuple[World, Callable[[], Any]]:
    """Return a new world, and the call that is ready in it."""
    chosen = "learned" if name.startswith("Session.") else ("lru", "lfu")[number_of(kind, name) % 2]
    world = World(policy or chosen, kind)
    make = OPERATIONS[kind, name](world)
    world.begin()
    return world, make


@functools.cache
def surveyed(kind: str, name: str) -> tuple[list[Place], dict[str, tuple[int, ...]]]:
    """Return the places of a call's steps, and what is counted after it."""
    world, make = made(kind, name)
    survey = Stepper(world.cache, NEVER)
    result = survey.run(make)
    counts = world.counts()
    world.settle(result, is_done=True)
    return survey.places, counts


@functools.cache
def firsts() -> dict[Place, tuple[str, str]]:
    """Return the first operation that reaches each place."""
    found: dict[Place, tuple[str, str]] = {}
    for operation in OPERATIONS:
        for place in surveyed(*operation)[0]:
            found.setdefault(place, operation)
    return found


def stops(kind: str, name: str) -> Iterator[int]:
    """Yield the steps at which a call is interrupted: with INTERRUPT_ALL all of them.

    Otherwise each place in the first call that reaches it, and some of the rest. Nothing changes between the beginning
    of a line and a return that is the next step.
    """
    known, offset, before = set[Place](), number_of(kind, name), None
    for number, place in enumerate(surveyed(kind, name)[0], 1):
        is_new = place not in known and firsts()[place] == (kind, name)
        is_idle = place.event == "return" and before == place._replace(event="line")
        if ALL or (is_new and not is_idle) or not (number + offset) % STRIDE:
            yield number
        known.add(place)
        before = place


def play(world: World, make: Callable[[], Any], run: Callable[[Any], Any]) -> bool:
    """Make a call that may be interrupted or refused, and check what must hold. Return whether it was done."""
    result, is_done = None, True
    try:
        result = run(make)
    except (Interrupted, RadixKVError):  # at its end nothing holds the frames of the call any more
        is_done = False
    world.settle(result, is_done=is_done)
    world.check()
    return is_done


def holds(kind: str, name: str, policy: str, runner: Callable[[World], Any], goes_on: bool) -> None:
    """Make a call once, perhaps interrupted by a runner, and check everything."""
    world, make = made(kind, name, policy)
    runs, before, after = runner(world), world.counts(), surveyed(kind, name)[1]
    try:
        is_done = play(world, make, runs.run)
        assert is_done or runs.where, "the call is refused"
        for tenant, now in world.counts().items():
            known = [each.get(tenant, (0, 0, 0, 0)) for each in (before, after)]
            assert all(min(each) <= number <= max(each) for number, *each in zip(now, *known, strict=True)), (
                tenant
            )
        if goes_on:
            if not is_done:
                world.repeat(make)
            world.go_on()
    except BaseException as error:
        error.add_note(f"after an interruption at step {runs.num_steps}: {runs.where or 'none'}")
        raise


def calling(world: World, stop: int, error: type[Interrupted]) -> Any:
    """Return what interrupts a call at a call of code of others."""
    world.callbacks.stop, world.callbacks.error = stop, error
    return world.callbacks


@pytest.mark.pure
@pytest.mark.parametrize("kind, name", OPERATIONS)
def test_an_exception_at_any_step(kind: str, name: str) -> None:
    for at, stop in enumerate((*stops(kind, name), NEVER)):
        error = ERRORS[(stop + number_of(kind, name)) % len(ERRORS)]
        runner = functools.partial(Stepper, stop=stop, error=error)
        holds(kind, name, "", lambda world, runner=runner: runner(world.cache), at % 24 == 0 or stop == NEVER)


@pytest.mark.parametrize("kind, name", OPERATIONS)
def test_an_error_of_what_the_cache_calls(kind: str, name: str) -> None:
    """The journal, the clock, the policy, or what zeroes and copies blocks."""
    world, make = made(kind, name, "faulty")
    world.settle(world.callbacks.run(make), is_done=True)
    stops = range(1, world.callbacks.num_steps + 1)
    for stop in stops if ALL else random.Random(name).sample(stops, min(len(stops), 1)):
        runner = functools.partial(calling, stop=stop, error=ERRORS[stop % len(ERRORS)])
        holds(kind, name, "faulty", runner, stop % 4 == 0)


def test_every_public_call_is_an_operation_or_changes_nothing() -> None:
    """Those of all classes that have a cache. Properties change nothing, except ``Sequence.loading``."""
    names = {name.partition(":")[0].partition(",")[0] for _, name in OPERATIONS}
    tried = {name if "." in name else f"PrefixCache.{name}" for name in names}
    known = {f"{each}.{name}" for each, its in READS.items() for name in its.split()}
    classes = {each for each in vars(radixkv).values() if inspect.isclass(each)}
    for each in (each for each in classes if each.__name__ in {name.partition(".")[0] for name in tried}):
        for name in (f"{each.__name__}.{name}" for name in dir(each) if callable(getattr(each, name))):
            if name.partition("._")[2] in ("", "_enter__", "_exit__"):
                assert (name in tried) != (name in known), name
    ours = {each.__name__ for each in classes if each.__module__.startswith("radixkv.index.")}
    assert ours == {*READS, *VALUES.split()}, "a class is new: name its calls in OPERATIONS or READS"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(LIVES))
def test_lives_with_many_interruptions(seed: int) -> None:
    """Calls in a cache that was interrupted and repaired before. The laws hold, and nobody else notices."""

    def chosen(world: World) -> Any:
        error = rng.choice(ERRORS)
        if not radixkv.COMPILED and rng.randrange(2):
            return Stepper(world.cache, rng.randrange(1, 600), error).run
        return calling(world, rng.randrange(1, 20), error).run

    rng = random.Random(seed)
    live(World("faulty", rng.choice(("plain", "plain", "stored", "engine"))), rng, chosen)


def live(world: World, rng: random.Random, runner: Callable[[World], Callable[[Any], Any]]) -> None:
    """Make random calls in one cache, and let ``runner`` make each."""
    names = [name for kind, name in OPERATIONS if kind == world.kind]
    for _ in range(20):
        world.end_loose()
        world.end(*rng.sample(world.runs, max(len(world.runs) - 12, 0)))
        name = rng.choice(names)
        try:
            make = OPERATIONS[world.kind, name](world)
        except (RadixKVError, LookupError):  # after what came before, there is no such situation
            world.involved, world.forgets, world.given, world.freed = [], (), [], []
            continue
        world.begin()
        try:
            if not rng.randrange(4):  # a repair of a cache in which nothing is broken changes nothing
                with world.cache._lock:
                    recovery.mend(world.cache, KeyboardInterrupt())
                world.check()
            play(world, make, runner(world))
        except BaseException as error:
            error.add_note(f"{name}: {world.callbacks.where}")
            raise
    world.go_on()


# --- what points of calls can't reach: the repair itself


@pytest.mark.pure
@pytest.mark.slow
def test_an_exception_during_a_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second exception strikes in the repair, which starts again. The second exception is raised."""
    rng, original, num_second = random.Random(0), recovery._mend, 0

    def mend(cache: Any) -> None:
        if second.num_steps:
            original(cache)
        else:
            second.run(lambda: original(cache))

    monkeypatch.setattr(recovery, "_mend", mend)
    for kind, name in rng.sample(list(OPERATIONS), len(OPERATIONS) if ALL else 30):
        world, make = made(kind, name)
        second = Stepper(world.cache, rng.randrange(1, 2_500), rng.choice(ERRORS))
        play(world, make, Stepper(world.cache, rng.randrange(1, len(surveyed(kind, name)[0]) + 1)).run)
        num_second += bool(second.where)
        world.go_on()
    assert num_second > 10


@pytest.mark.parametrize("namespaces", [(A, B), (A, READER, READER)])
def test_repairs_change_no_order_of_eviction(namespaces: tuple[Any, ...]) -> None:
    """Under LRU, a cache that is repaired after every request evicts the same blocks as one that never is."""
    rng, caches = random.Random(0), [PrefixCache(CacheConfig(28, 2)) for _ in range(2)]
    for at in range(200):
        ids, namespace = [rng.randrange(2) for _ in range(rng.randrange(2, 14))], rng.choice(namespaces)
        for cache in caches:
            if READER in namespaces and at % 30 == 0:
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


def broken(monkeypatch: pytest.MonkeyPatch, num_failures: int, function: str = "_mend") -> World:
    """Return a world after an interrupted commit. So many calls of a function of the repair fail."""
    world, make = made("plain", "Sequence.commit: alone")
    original, left = getattr(recovery, function), [num_failures]

    def fails(cache: PrefixCache) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise MemoryError
        return original(cache)

    monkeypatch.setattr(recovery, function, fails)
    world.callbacks.stop, world.callbacks.error = 1, ERRORS[0]
    with pytest.raises((Interrupted, MemoryError)):
        world.callbacks.run(make)
    return world


def test_the_next_call_repairs_a_cache_after_a_failed_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so before anything else. If the repair didn't come to know what the call concerned, it closes all."""
    world = broken(monkeypatch, recovery.ATTEMPTS + 1)
    assert world.cache.is_broken and not world.cache.is_dead
    assert (
        world.cache.stats().num_sequences == len(world.runs) and not world.cache.is_broken
    )  # one waits for a fence
    world.settle(is_done=False)
    world.check()
    world.go_on()
    world = broken(monkeypatch, 1, "_was_refused")
    assert world.cache.is_broken
    assert world.cache.stats().num_sequences == 0 and not world.cache.is_broken and not world.cache.pins()
    assert not any(each.is_open for each in (*(run.sequence for run in world.runs), world.leases[0][0]))
    audit.check(world.cache)


@pytest.mark.slow
def test_a_cache_that_cannot_be_repaired_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before so many calls have tried. Then every call says what to do, and hides no error that ends a ``with``."""
    world = broken(monkeypatch, 1_000_000)
    cache, sequence = world.cache, world.runs[0].sequence
    for left in range(MAX_FAILED_REPAIRS - 1, 0, -1):
        with pytest.raises(IntegrityError, match=rf"the next call tries again. After {left} more"):
            cache.stats()
        assert cache.is_broken and not cache.is_dead
    calls: list[Callable[[], Any]] = [
        *(cache.stats, cache.snapshot, cache.flush, cache.tenants, cache.maintain, sequence.release),
        *(functools.partial(call, A, [1]) for call in (cache.match, cache.open, cache.announce)),
        *(
            functools.partial(call, 1)
            for call in (sequence.commit, sequence.append, sequence.fork, cache.evict)
        ),
        *(functools.partial(getattr, sequence, name) for name in ("block_table", "token_ids")),
        *(
            functools.partial(call, what)
            for call, what in ((cache.clear, A), (cache.purge, "a"), (audit.check, cache))
        ),
    ]
    said = r"the cache is dead: .* every call fails: replace the cache"
    for call in calls:
        with pytest.raises(IntegrityError, match=said):
            call()
        assert cache.is_dead
    with pytest.raises(ZeroDivisionError), sequence:
        _ = 1 / 0
    with sequence:
        pass


@pytest.mark.pure
@pytest.mark.parametrize("window", WINDOWS)
def test_lives_without_memory(window: int) -> None:
    """MemoryErrors at any allocation, one or many, also during a repair.

    At most one call in a hundred may end in a dead cache. In practice none does.
    """
    command = [sys.executable, "-m", "tests.index.lives_without_memory", str(window), str(OOM_LIVES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    found = {"alive": 0, "dead": 0, **json.loads(done.stdout)}
    assert found["alive"] > 4 * OOM_LIVES and found["dead"] <= found["alive"] // 100, found


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the collector: an exception in its callbacks (Hypothesis has one) or in a finaliser reaches no test."""
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
    rng, armed, num_interrupted, cache = random.Random(1), [False], 0, PrefixCache(CacheConfig(40, 2))

    def handler(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise Interrupted

    old = signal.signal(signal.SIGVTALRM, handler)
    try:
        while num_interrupted < 150:
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
    assert cache.stats().free_blocks == 40


def _some_requests(cache: PrefixCache, rng: random.Random) -> None:
    with cache.open(A, [rng.randrange(2) for _ in range(rng.randrange(1, 12))]) as sequence:
        sequence.commit(sequence.num_tokens)
        children = sequence.fork(2)
        cache.append(children, [1, 2])
        for child in cache.reorder(children, [1, 1]):
            child.commit(child.num_tokens)
            child.release()
    cache.flush()
