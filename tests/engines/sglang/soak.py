"""A mixed load of one SGLang for some time, while operators pin and purge. Prints what came out as JSON.

Run by ``test_ranks.py``. Arguments: those of ``in_process``, with the workloads

    table      each prompt once, alone
    soak       prompts of three tenants at random, 1 to 8 at once, for RADIXKV_TEST_SECONDS
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

from tests.engines.sglang.in_process import WORKLOADS, client_tenant, draw, generate, main

TENANTS = ("acme", "globex", "initech")
NUM_NEW = 16


def prompts_of(dice: random.Random) -> list[list[int]]:
    """48 prompts of 100 to 900 tokens, behind 6 beginnings."""
    begins = [draw(dice, dice.randrange(60, 600)) for _ in range(6)]
    return [[*begins[at % 6], *draw(dice, dice.randrange(40, 300))] for at in range(48)]


def _table(engine: Any, dice: random.Random) -> dict[str, Any]:
    """The answer to each prompt."""
    return {"outputs": [generate(engine, [prompt], NUM_NEW)[0]["output_ids"] for prompt in prompts_of(dice)]}


class Operators:
    """What operators ask at any time: pins that end soon, and purges."""

    def __init__(self, keys: Any, prompts: list[list[int]], seed: int) -> None:
        self._keys, self._prompts, self._dice = keys, prompts, random.Random(seed)
        self.stopping, self.counts = threading.Event(), Counter[str]()

    def run(self) -> None:
        from radixkv.engines.control.client import ControlClient
        from radixkv.errors import RadixKVError

        with ControlClient(os.environ["RADIXKV_SOCKET"], self._keys) as client:
            while not self.stopping.wait(0.05):
                try:
                    self._ask(client)
                except RadixKVError as error:  # such as: nothing of this prefix is resident
                    self.counts[type(error).__name__] += 1
            self.counts["violations"] = len(client.call("audit")["violations"])

    def _ask(self, client: Any) -> None:
        from radixkv.tenancy.salt import make_salt

        dice, tenant = self._dice, self._dice.choice(TENANTS)
        if dice.random() < 0.1:
            client.call("purge", {"tenant": tenant})
            self.counts["purges"] += 1
            return
        salt = make_salt(self._keys, tenant)
        where = {"model": "sglang", "cache_salt": salt, "ttl_s": dice.uniform(0.2, 2.0)}
        client.call("pin", where, dice.choice(self._prompts)[:64])
        self.counts["pins"] += 1


def _soak(engine: Any, dice: random.Random) -> dict[str, Any]:
    """All answers that each prompt ever got, how much was cached, and what operators did."""
    from radixkv.engines.control.client import ControlClient
    from radixkv.signing import KeySet
    from radixkv.tenancy.salt import make_salt

    keys, prompts = KeySet.load(os.environ["RADIXKV_KEYS"]), prompts_of(dice)
    operators = Operators(keys, prompts, 1)
    thread = threading.Thread(target=operators.run)
    thread.start()
    outputs: list[list[list[int]]] = [[] for _ in prompts]
    end_s = time.monotonic() + float(os.environ["RADIXKV_TEST_SECONDS"])
    num_requests = num_cached = 0
    while time.monotonic() < end_s:
        asked = [dice.randrange(len(prompts)) for _ in range(dice.randint(1, 8))]
        salts = [make_salt(keys, dice.choice(TENANTS)) for _ in asked]
        for at, answer in zip(
            asked, generate(engine, [prompts[at] for at in asked], NUM_NEW, cache_salt=salts), strict=True
        ):
            num_requests += 1
            num_cached += answer["meta_info"]["cached_tokens"]
            if answer["output_ids"] not in outputs[at]:
                outputs[at].append(answer["output_ids"])
    operators.stopping.set()
    thread.join()
    with ControlClient(os.environ["RADIXKV_SOCKET"], keys) as client:
        evicted = client.call("stats")["cache"]["evicted_blocks"]
        pinned = len(client.call("pins", {"tenant": client_tenant(keys, "acme")})["pins"])
    told = {"requests": num_requests, "cached": num_cached, "evicted": evicted, "pinned": pinned}
    return {"outputs": outputs, **told, "operators": operators.counts}


WORKLOADS |= {"table": _table, "soak": _soak}

if __name__ == "__main__":
    print("FOUND", json.dumps(main(json.loads(sys.argv[1]))))
