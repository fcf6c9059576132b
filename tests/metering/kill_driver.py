"""Kills processes that write usage records: ``python -m tests.metering.kill_driver FOLDER KILLS SEED``.

Each life is a fork of this process. It writes to the folder that the lives before it left, and reports over a pipe how
many of its records are said to be written. SIGKILL comes at a chosen system call: before it, after it, or with half of
a write done; or from another thread at any time. Then this process reads the folder. It prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from radixkv.metering.folder import UsageFolder
from radixkv.metering.writer import UsageWriter
from tests.metering.support import HOUR, record, sums_of
from tests.tiers.disk.crash_driver import KillingFiles, tell
from tests.tiers.support import FaultyFiles

NEW_FOLDER_EVERY = 10


def live(path: Path, pipe: int, number: int, chance: random.Random) -> None:
    """Write records until the kill."""
    files: FaultyFiles = FaultyFiles()
    if chance.random() < 0.7:
        how = chance.choice(["before", "half", "after"])
        files = KillingFiles(int(chance.expovariate(1 / 12)) + 1, how, pipe)
    else:
        kill = threading.Timer(chance.random() / 20, lambda: os.kill(os.getpid(), signal.SIGKILL))
        kill.start()
    day = [HOUR]
    folder = UsageFolder(path, files, writes=True)
    list(folder.sums(0))  # a start reads what is there
    writer = UsageWriter(folder, chance.choice([800, 4_000]), wall=lambda: day[0])
    for at in range(10**9):
        day[0] += chance.choice([0, 0, 0, 86_400])
        writer.record(record(at, tenant=chance.choice(["acme", "globex"]), id=f"{number}-{at}"))
        if chance.random() < 0.5:
            while writer.state().num_written <= at:
                time.sleep(0.0005)
            tell(pipe, ["written", f"{at}"])


def reports_of_a_life(path: Path, number: int, seed: int) -> list[list[str]]:
    """Fork a process that writes and is killed; return what it reported."""
    reading_end, writing_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading_end)
            live(path, writing_end, number, random.Random(seed))
        finally:
            os._exit(3)
    os.close(writing_end)
    with os.fdopen(reading_end) as lines:
        reports: list[list[str]] = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (status, reports[-3:])
    return reports


def main(root: Path, kills: int, seed: int) -> dict[str, object]:
    """Do all lives; return the counts."""
    counts: Counter[str] = Counter(lost=0, twice=0, wrong=0, torn=0, written=0)
    path, promised = root, set[str]()
    for number in range(kills):
        if number % NEW_FOLDER_EVERY == 0:
            path, promised = root / f"records{number}", set()
        reports = reports_of_a_life(path, number, seed * 1_000_003 + number)
        for kind, text in reports:
            if kind == "written":
                promised |= {f"{number}-{at}" for at in range(int(text) + 1)}
                counts["written"] += 1
        with closing(UsageFolder(path)) as folder:
            records = list(folder.records())
        lines = sum(each.read_bytes().count(b"\n") for each in path.glob("*.jsonl"))
        with closing(UsageFolder(path, writes=True)) as starting:
            counts["wrong"] += sums_of(starting.sums(0)) != sums_of(records)
        counts["lost"] += len(promised - {each.id for each in records})
        counts["twice"] += lines - len(records)
        counts["torn"] += folder.num_skipped
    return {"kills": kills, **counts}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
