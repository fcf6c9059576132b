"""Kills processes that write a usage log: ``python -m tests.billing.kill_driver FOLDER KILLS SEED``.

Each life is a fork of this process. It continues the log that the lives before it left, and reports over a pipe the id
of each record that was said to be written. SIGKILL comes at a chosen system call: before it, after it, or with half of
a write done; or from another thread at any time. Then this process checks the log. It prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

from radixkv.billing.usage_writer import UsageWriter
from tests.billing.support import KEY, checked, found, record
from tests.tiers.disk.crash_driver import KillingFiles, tell
from tests.tiers.support import FaultyFiles
from tests.waiting import LIMIT_S

NEW_FOLDER_EVERY = 10


def live(folder: Path, pipe: int, number: int, chance: random.Random) -> None:
    """Write records until the kill."""
    files: FaultyFiles = FaultyFiles()
    if chance.random() < 0.7:
        how = chance.choice(["before", "half", "after"])
        files = KillingFiles(int(chance.expovariate(1 / 12)) + 1, how, pipe)
    else:
        kill = threading.Timer(chance.random() / 20, lambda: os.kill(os.getpid(), signal.SIGKILL))
        kill.start()
    hour = [0.0]
    writer = UsageWriter(folder, KEY, chance.choice([800, 4_000]), files=files, wall=lambda: hour[0])
    for at in range(10**9):
        hour[0] += chance.choice([0, 0, 0, 3_600])
        record_id = f"{number}-{at}"
        future = writer.record(record(at, tenant=chance.choice(["acme", "globex"]), id=record_id))
        if future is not None and chance.random() < 0.5:
            future.result(LIMIT_S)
            tell(pipe, ["written", record_id])


def reports_of_a_life(folder: Path, number: int, seed: int) -> list[list[str]]:
    """Fork a process that writes and is killed; return what it reported."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            live(folder, writing, number, random.Random(seed))
        finally:
            os._exit(3)
    os.close(writing)
    with os.fdopen(reading) as lines:
        reports: list[list[str]] = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (status, reports[-3:])
    return reports


def main(root: Path, kills: int, seed: int) -> dict[str, object]:
    """Do all lives; return the counts."""
    counts: Counter[str] = Counter(lost=0, twice=0, bad=0, written=0)
    verdicts: Counter[str] = Counter()
    folder, promised = root, set[str]()
    for number in range(kills):
        if number % NEW_FOLDER_EVERY == 0:
            folder, promised = root / f"log{number}", set()
        reports = reports_of_a_life(folder, number, seed * 1_000_003 + number)
        promised |= {text for kind, text in reports if kind == "written"}
        there = [each.id for each in found(folder)]
        check = checked(folder)
        verdicts[check.verdict] += 1
        counts["lost"] += len(promised - set(there))
        counts["twice"] += len(there) - len(set(there))
        counts["bad"] += check.num_tampered + check.num_missing
        counts["written"] += sum(kind == "written" for kind, _ in reports)
    return {"kills": kills, **counts, "verdicts": dict(verdicts)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
