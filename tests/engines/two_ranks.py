"""One of two ranks that serve the same requests with a cache each, over gloo. Run by ``test_engine_steps.py``.

Rank 0 is asked by a thread for pins, purges, touches and limits. The clock of rank 1 is 100 ms ahead. Arguments: rank,
port, seed, and "agree", or "differ": then rank 1 evicts once on its own. Prints a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from functools import partial
from itertools import pairwise

import numpy as np
import torch.distributed as dist

from radixkv import Tenant, audit
from radixkv.engines.engine_steps import EngineSteps, Step, StepClock, SteppedCache, SteppedSalts
from radixkv.engines.salt import make_salt
from radixkv.engines.sglang_cache import SglangCache
from radixkv.errors import IntegrityError, RadixKVError
from radixkv.signing import KeySet

PAGE, NUM_PAGES, NUM_STEPS = 4, 160, 500
KEYS = KeySet.derive([b"a secret of the fleet"])
TENANTS = ("acme", "globex", "initech")


class Commands:
    """What operators ask of rank 0, at any time."""

    def __init__(self, cache: SglangCache, salts: SteppedSalts, seed: int) -> None:
        self.cache, self.salts, self.dice = cache, salts, random.Random(seed)
        self.counts = dict.fromkeys(("pins", "purges", "limits", "refused"), 0)
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            time.sleep(0.002)
            try:
                self.ask()
            except RadixKVError:
                self.counts["refused"] += 1

    def ask(self) -> None:
        dice, cache = self.dice, self.cache.cache
        tenant = dice.choice(TENANTS)
        what = dice.random()
        if what < 0.85:
            namespaces = cache.namespaces()
            if namespaces:
                cache.pin(dice.choice(namespaces), prompt(dice)[:PAGE], 0.05)
                self.counts["pins"] += 1
        elif what < 0.95:
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


def main(rank: int, port: int, seed: int, is_agreed: bool) -> dict[str, object]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    clock = StepClock()
    steps = EngineSteps(clock, lambda: time.monotonic() + 0.1 * rank)
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
    thread = threading.Thread(target=commands.run)
    if rank == 0:
        thread.start()
    pinned: list[int] = []
    number, goes_on = 0, True
    try:
        while goes_on:
            sent = [steps.begin(), thread.is_alive()] if rank == 0 else [None, None]
            dist.broadcast_object_list(sent, src=0)
            step, is_asked = sent
            assert isinstance(step, Step)
            steps.apply(step)
            number += 1
            pinned.append(len(cache.cache.pins()))
            for _ in range(2):
                requests.serve()
            if number == NUM_STEPS // 2 and rank == 1 and not is_agreed:
                requests.free += cache.reclaim(1).tolist()
            is_enough = min(commands.counts[each] for each in ("pins", "purges", "limits")) > 5
            commands.is_over = number >= (NUM_STEPS if is_enough else 20 * NUM_STEPS)
            goes_on = number < NUM_STEPS or bool(is_asked)
            time.sleep(0.001)
    except IntegrityError as error:
        return {"error": str(error), "number": number}
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
    found = main(*map(int, given[:3]), given[3] == "agree")
    print(json.dumps(found), flush=True)
    with contextlib.suppress(RuntimeError):  # the other rank may have left
        dist.destroy_process_group()
