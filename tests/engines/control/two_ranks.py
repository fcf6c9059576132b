"""One of two ranks that serve the same requests with a cache each. Run by ``test_engine_steps.py``.

Rank 0 sends each step to rank 1 through a pipe. A thread asks it for pins, purges and limits, the same ones at the same
steps in each run. The clock of rank 1 is 100 ms ahead. Arguments: rank, its end of the pipe, seed, and "agree", or
"differ": then rank 1 evicts once on its own. Prints a JSON object.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import threading
import time
from functools import partial
from itertools import pairwise

import numpy as np

from radixkv import Tenant, audit
from radixkv.clock import ManualClock
from radixkv.engines.control.steps import EngineSteps, Step, StepClock, SteppedCache, SteppedSalts
from radixkv.engines.sglang.cache import SglangCache
from radixkv.errors import IntegrityError, RadixKVError
from radixkv.signing import KeySet
from radixkv.tenancy.salt import make_salt

PAGE, NUM_PAGES, NUM_STEPS = 4, 160, 500
STEP_S = 0.003
ASKED_EVERY = 2
"""Steps from one command to the next."""
KEYS = KeySet.derive([b"a secret of the fleet"])
TENANTS = ("acme", "globex", "initech")


class Commands:
    """What operators ask of rank 0. Each command has a thread of its own, which waits for the next steps."""

    def __init__(self, cache: SglangCache, salts: SteppedSalts, seed: int) -> None:
        self.cache, self.salts, self.dice = cache, salts, random.Random(seed)
        self.counts = dict.fromkeys(("pins", "purges", "limits", "refused"), 0)
        self._thread = threading.Thread()

    @property
    def is_asking(self) -> bool:
        """Whether a command goes on."""
        return self._thread.is_alive()

    def begin(self) -> None:
        """Begin a command, unless one goes on."""
        if not self.is_asking:
            self._thread = threading.Thread(target=self.run, daemon=True)
            self._thread.start()

    def run(self) -> None:
        """Make one command."""
        try:
            self.ask()
        except RadixKVError:
            self.counts["refused"] += 1

    def next_step(self, steps: EngineSteps) -> Step:
        """Return the next step of rank 0, which has the next change of the command that goes on."""
        step = steps.begin()
        while self.is_asking and not step.changes:
            time.sleep(0.0001)
            step = steps.begin()
        return step

    def ask(self) -> None:
        dice, cache = self.dice, self.cache.cache
        tenant = dice.choice(TENANTS)
        what = dice.random()
        if what < 0.8:
            namespaces = cache.namespaces()
            if namespaces:
                cache.pin(dice.choice(namespaces), prompt(dice)[:PAGE], 0.05)
                self.counts["pins"] += 1
        elif what < 0.9:
            (name,) = self.salts.tenant_ids(tenant)
            cache.add_tenant(
                Tenant(name, max_blocks=dice.randrange(60, NUM_PAGES), max_pinned_blocks=30, max_pins=9)
            )
            self.counts["limits"] += 1
        else:
            (name,) = self.salts.tenant_ids(tenant)
            self.salts.raise_generation(name, self.salts.generation(name) + 1)
            cache.purge(name)
            self.counts["purges"] += 1


def prompt(dice: random.Random) -> list[int]:
    """One of 6 beginnings, and something new."""
    begin = random.Random(int(6 * dice.random() ** 2))
    shared = [begin.randrange(50) for _ in range(dice.randrange(1, 10) * PAGE)]
    return [*shared, *(dice.randrange(50) for _ in range(dice.randrange(16)))]


class Rank:
    """The requests of one rank."""

    def __init__(self, cache: SglangCache, salts: SteppedSalts, seed: int) -> None:
        self.cache, self.salts, self.dice = cache, salts, random.Random(seed)
        self.free = list(range(1, NUM_PAGES))

    def serve(self) -> None:
        """One request: it matches, locks, gets pages, leaves them and unlocks."""
        cache, ids = self.cache, prompt(self.dice)
        tenant = self.dice.choice(TENANTS)
        (name,) = self.salts.tenant_ids(tenant)
        age = self.dice.random() < 0.1  # an older salt: refused after a purge
        generation = max(self.salts.generation(name) - age, 0)
        namespace = cache.namespace(make_salt(KEYS, tenant, generation=generation), None)
        node = cache.match(namespace, ids)
        lock, num = cache.lock(node), node.num_tokens // PAGE
        num_pages = len(ids) // PAGE
        if (short := num_pages - num - len(self.free)) > 0:
            self.free += cache.reclaim(short).tolist()
        if num_pages - num <= len(self.free):
            pages, self.free = self.free[: num_pages - num], self.free[num_pages - num :]
            whole = ids[: num_pages * PAGE]
            taken = None
            if pages:
                taken = cache.insert(namespace, whole, np.array(pages, np.int32), num * PAGE)
            self.free += pages if taken is None else [*taken.surplus.tolist(), *taken.evicted.tolist()]
        if lock is not None:
            lock.release()
        if cache.has_freed:
            self.free += cache.reclaim(0).tolist()


def main(rank: int, pipe: int, seed: int, is_agreed: bool) -> dict[str, object]:
    clock, now = StepClock(), ManualClock(0.1 * rank)
    steps = EngineSteps(clock, now)
    salts = SteppedSalts(KEYS, steps)
    cache = SglangCache(
        NUM_PAGES,
        PAGE,
        model="m",
        salts=salts,
        policy="learned",
        make=partial(SteppedCache, steps=steps, clock=clock),
    )
    steps.decisions = lambda: cache.decisions
    requests, commands = Rank(cache, salts, seed), Commands(cache, salts, seed)
    pinned: list[int] = []
    with os.fdopen(pipe, "wb" if rank == 0 else "rb") as other:
        for number in range(NUM_STEPS):
            now.advance(STEP_S)
            if rank == 0:
                if number % ASKED_EVERY == 0:
                    commands.begin()
                step = commands.next_step(steps)
                pickle.dump(step, other)
                other.flush()
            else:
                step = pickle.load(other)
            try:
                steps.apply(step)
            except IntegrityError as error:
                return {"error": str(error), "number": number}
            pinned.append(len(cache.cache.pins()))
            for _ in range(2):
                requests.serve()
            if number == NUM_STEPS // 2 and rank == 1 and not is_agreed:
                requests.free += cache.reclaim(1).tolist()
    audit.check(cache.cache)
    stats = cache.cache.stats()
    ended = sum(max(before - after, 0) for before, after in pairwise(pinned))
    return {
        "decisions": cache.decisions,
        "resident": cache.resident_tokens,
        "evicted": stats.evicted_blocks,
        "ended": ended,
        "counts": commands.counts,
    }


if __name__ == "__main__":
    given = sys.argv[1:]
    print(json.dumps(main(*map(int, given[:3]), given[3] == "agree")), flush=True)
