"""Random lives of a cache in which memory runs out. This is a separate program, as the whole process loses its memory.

``_testcapi.set_nomemory`` makes the k-th allocation from now on fail, and a number of allocations after it. Each call
of a life loses its memory somewhere.

  python -m tests.index.lives_without_memory WINDOW LIVES    WINDOW allocations fail; prints the outcomes as JSON
"""

from __future__ import annotations

import _testcapi
import gc
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from radixkv import IntegrityError
from radixkv.index.locking import later
from tests.index.operations import World
from tests.index.stepper import Interrupted
from tests.index.test_recovery import live

FAILED = (MemoryError, SystemError)
"""The second one is NumPy's, which may forget to set an error."""


def call(
    world: World, make: Callable[[], Any], *, rng: random.Random, window: int, outcomes: Counter[str]
) -> Any:
    """Make a call, of which some allocations fail."""
    start = rng.randrange(60)
    gc.disable()  # a collection may allocate at any time
    _testcapi.set_nomemory(start, start + window)
    try:
        return make()
    except FAILED:
        pass
    finally:
        _testcapi.remove_mem_hooks()
        gc.enable()
    lose(world)
    outcomes["alive"] += 1
    raise Interrupted


def lose(world: World) -> None:
    """Expect nothing more of what is closed: an error in the handling of an error may cost more than its own call.

    The finalisers of handles may have failed too: release what nobody has.
    """
    cache = world.cache
    cache.require_alive()
    world.given = list(cache.snapshot().lent_ids)  # the cache says what the engine has
    world.involved = [run for run in world.involved if run.sequence.is_open]
    world.runs = [run for run in world.runs if run.sequence.is_open]
    world.leases = [each for each in world.leases if each[0].is_open]
    pins = {(pin.namespace, pin.id) for pin in cache.pins()}
    world.pins = [each for each in world.pins if (each[0].namespace, each[0].id) in pins]
    world.waits = [each for each in world.waits if each[0].is_open]
    held = [*(run.sequence for run in world.runs), *(lease for lease, *_ in world.leases), *world.loose]
    known: set[Any] = {each._state for each in held if hasattr(each, "_state")}
    known |= {held.lease for own in cache._pins.tenants.values() for held in own.by_id.values()}
    for state in (*cache._sequences, *cache._leases):
        if state not in known and not getattr(state, "_is_fenced", False):
            later(cache, state)


def main(window: int, num_lives: int) -> None:
    """Run ``num_lives`` lives and print how often each outcome occurred."""
    warnings.simplefilter("ignore", ResourceWarning)  # sequences that a failed call left to their finaliser
    sys.unraisablehook = lambda _: None  # the finaliser may fail for lack of memory too
    outcomes = Counter[str]()
    gc.collect()
    gc.freeze()  # repairs collect
    for seed in range(num_lives):
        rng, kind = random.Random(seed), ("plain", "plain", "engine")[seed % 3]
        # without zeroing: NumPy would crash in it
        world = World(rng.choice(("lru", "lfu")), kind, scrub="never")
        try:
            live(world, rng, partial(partial, call, rng=rng, window=window, outcomes=outcomes))
        except IntegrityError as error:
            if type(error) is not IntegrityError:  # a law is broken, but the cache still accepts calls
                raise
            outcomes["dead"] += 1
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
