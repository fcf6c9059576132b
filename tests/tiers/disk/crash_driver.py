"""Kills processes at steps of a disk tier's write path: ``python -m tests.tiers.disk.crash_driver FOLDER KILLS SEED``.

Each life is a fork of this process, which has imported everything. It opens the folder that the lives before it left,
works at random, reports over a pipe what has to be found later, and kills itself with SIGKILL at a chosen system call:
before it, after it, or with half of a write done. Then this process opens the folder and checks everything. It prints
one JSON object.

``python -m tests.tiers.disk.crash_driver FOLDER learn`` kills processes at each step of learning a purge of the fleet.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from radixkv.files.system import Files
from tests.tiers.support import (
    ACME,
    GLOBEX,
    NAMESPACES,
    NUM_PROMPTS,
    FaultyFiles,
    evicted_by,
    held,
    kv,
    load,
    prompt,
    store,
    tier_in,
)

KILLING = ("write", "sync", "rename", "sync_folder", "remove", "allocate")
NEW_FOLDER_EVERY = 20


class KillingFiles(FaultyFiles):
    """Files that kill the process at the ``at``-th call that changes something."""

    def __init__(self, at: int, how: str, pipe: int) -> None:
        super().__init__(self._count)
        self._left, self._how, self._pipe = at, how, pipe
        self._is_due = False

    def _count(self, name: str) -> None:
        if name in KILLING:
            self._left -= 1
            self._is_due = self._left <= 0  # also the next call, if this one fails
            if self._is_due and (self._how == "before" or (self._how == "half" and name != "write")):
                self._kill(name)

    def _kill(self, name: str) -> NoReturn:
        tell(self._pipe, ["killed", name])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        self._call("write")
        if self._is_due and self._how == "half":
            Files.write(self, descriptor, content[: len(content) // 2], offset)
            self._kill("write")
        return self._after("write", Files.write(self, descriptor, content, offset))

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._after("sync", 0)

    def sync_folder(self, folder: int) -> None:
        super().sync_folder(folder)
        self._after("sync_folder", 0)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        super().allocate(descriptor, num_bytes)
        self._after("allocate", 0)

    def rename(self, old: str, new: str, folder: int) -> None:
        super().rename(old, new, folder)
        self._after("rename", 0)

    def remove(self, name: str, folder: int) -> None:
        super().remove(name, folder)
        self._after("remove", 0)

    def _after(self, name: str, result: int) -> int:
        if self._is_due:
            self._kill(name)
        return result


def tell(pipe: int, message: list[object]) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")


def live(folder: Path, pipe: int, chance: random.Random) -> None:
    """Work until the kill."""
    files = KillingFiles(
        int(chance.expovariate(1 / 25)) + 1, chance.choice(["before", "half", "after"]), pipe
    )
    with tier_in(folder, files=files, direct=False, num_threads=1) as tier:
        while True:
            tenant, number = chance.choice(list(NAMESPACES)), chance.randrange(NUM_PROMPTS)
            deed = chance.random()
            if deed < 0.7:
                tell(pipe, ["storing", tenant, number, evicted_by(tier, (tenant, number))])
                assert store(tier, NAMESPACES[tenant], prompt(number))
            elif deed < 0.93:
                tier.sync()
                tell(pipe, ["synced", held(tier)])
            else:
                tell(pipe, ["purging", tenant])
                if deed < 0.965:
                    tier.purge(tenant)
                else:
                    tier.learn_generation(tenant, tier.folder.fleet_generation(tenant) + 1)
                tell(pipe, ["purged", tenant])


def learn(folder: Path, pipe: int, step: int, how: str) -> None:
    """Store and learn purge 1 of the fleet, store again, and learn purge 2 until the kill in this step of it."""
    files = KillingFiles(10**9, how, pipe)
    with tier_in(folder, files=files, direct=False, num_threads=1) as tier:
        assert store(tier, ACME, prompt(1)) and store(tier, GLOBEX, prompt(1))
        tier.learn_generation("acme", 1)
        assert store(tier, ACME, prompt(2))
        files._left = step
        tier.learn_generation("acme", 2)
        files._left = 10**9
        tell(pipe, ["learned"])
        os.kill(os.getpid(), signal.SIGKILL)


def kill_while_learning(root: Path) -> dict[str, object]:
    """Kill at each step of ``learn``, in three ways; return what the next opening has found."""
    counts: Counter[str] = Counter(found_in_spite_of_2=0, found_after_all=0, others_lost=0)
    by_call: Counter[str] = Counter()
    for how in ("before", "half", "after"):
        for step in range(1, 1_000):
            folder = root / f"{how}{step}"
            messages = messages_of_a_life(partial(learn, folder, step=step, how=how))
            by_call.update(str(facts[0]) for kind, *facts in messages if kind == "killed")
            with tier_in(folder, files=FaultyFiles(), direct=False, num_threads=1) as tier:
                known = tier.folder.fleet_generation("acme")
                assert known in (1, 2) and load(tier, ACME, prompt(1)) is None, "purge 1 holds"
                counts[f"knows_{known}"] += 1
                counts["found_in_spite_of_2"] += known == 2 and load(tier, ACME, prompt(2)) is not None
                tier.learn_generation("acme", 2)
                counts["found_after_all"] += load(tier, ACME, prompt(2)) is not None
                counts["others_lost"] += load(tier, GLOBEX, prompt(1)) is None
            if ["learned"] in messages:
                break
    return {**counts, "kills_by_call": dict(by_call)}


def messages_of_a_life(work: Callable[[int], None]) -> list[list[object]]:
    """Fork a process that works and is killed; return what it reported. ``work`` takes the pipe to report over."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            work(writing)
        finally:
            os._exit(3)
    os.close(writing)
    with os.fdopen(reading) as lines:
        messages = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (status, messages[-3:])
    return messages


def main(root: Path, kills: int, seed: int) -> dict[str, object]:
    """Do all lives; return the counts."""
    counts: Counter[str] = Counter(wrong=0, lost=0, purged_found=0, kept=0)
    by_call: Counter[str] = Counter()
    synced: list[tuple[str, int]] = []
    gone: set[tuple[str, int]] = set()
    folder = root / "none"
    for number in range(kills):
        if number % NEW_FOLDER_EVERY == 0:
            folder, synced, gone = root / f"t{number}", [], set()
        for kind, *facts in messages_of_a_life(
            partial(live, folder, chance=random.Random(seed * 1_000_003 + number))
        ):
            if kind == "synced":
                synced = [(each[0], each[1]) for each in facts[0]]  # type: ignore[attr-defined]
            elif kind == "storing":
                synced = [each for each in synced if list(each) != facts[2]]
                gone.discard((str(facts[0]), int(str(facts[1]))))
            elif kind == "purging":
                synced = [each for each in synced if each[0] != facts[0]]
            elif kind == "purged":
                gone |= {(str(facts[0]), each) for each in range(NUM_PROMPTS)}
            else:
                by_call[str(facts[0])] += 1
        with tier_in(folder, files=FaultyFiles(), direct=False, num_threads=1) as tier:
            there: set[tuple[str, int]] = set()
            for tenant, namespace in NAMESPACES.items():
                for each in range(NUM_PROMPTS):
                    found = load(tier, namespace, prompt(each))
                    counts["wrong"] += found not in (None, kv(namespace, prompt(each)))
                    counts["purged_found"] += found is not None and (tenant, each) in gone
                    there |= {(tenant, each)} if found is not None else set()
            counts["lost"] += len(set(synced) - there)
            counts["kept"] += len(synced)
            synced = sorted(there)
            tier._table.check()
    return {"kills": kills, **counts, "kills_by_call": dict(by_call)}


if __name__ == "__main__":
    if sys.argv[2] == "learn":
        print(json.dumps(kill_while_learning(Path(sys.argv[1]))))
    else:
        print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
