"""Small disk tiers for tests, prompts and payloads for them, and files that fail."""

from __future__ import annotations

import errno
import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.clock import ManualClock
from radixkv.config import Namespace
from radixkv.files.system import Files
from radixkv.tiers.disk.identity import fingerprint_of
from radixkv.tiers.disk.io_threads import IOThreads
from radixkv.tiers.disk.records import DiskRecords, DiskSettings
from radixkv.tiers.disk.slots import Owner, SlotTable
from tests.waiting import LIMIT_S

SECRET = b"a secret of the fleet, for tests"
SEGMENT_TOKENS = 4
RECORD_BYTES = 600
NUM_SLOTS = 16
WAIT_S = LIMIT_S
PATIENT_S = 4 * LIMIT_S
"""For how long a patient disk is waited for: longer than any wait of a test."""
ATTACKS = int(os.environ.get("RADIXKV_ATTACKS", "20"))
"""How often each attack is tried: RADIXKV_ATTACKS=1000 for many."""

WAITS: dict[str, float] = {
    "engines.control.client._CONNECT_S": PATIENT_S,
    "tiers.pending.LEARNING_S": PATIENT_S,
    "tiers.disk.tier.CLOSING_S": PATIENT_S,
    "tiers.disk.tier._ADMIN_S": PATIENT_S,
    "tiers.disk.patience.LEAST_WAIT_S": PATIENT_S,
    "tiers.disk.patience.MOST_REST_S": 32 * PATIENT_S,
    "tiers.disk.patience.REST_S": PATIENT_S,
    "tiers.disk.promotions.AHEAD_S": PATIENT_S,
    "tiers.disk.demotions.STORE_S": PATIENT_S,
    "tiers.ladder.ASKED_S": PATIENT_S,
    "tiers.ladder.ERRORS_S": PATIENT_S,
    "tiers.pending.FORGET_S": PATIENT_S,
    "tiers.ladder.REST_S": PATIENT_S,
    "tiers.loading.COMPUTING_S": PATIENT_S,
    "tiers.loading.IDLE_S": PATIENT_S,
}
"""Times of ``radixkv`` that a busy machine could exceed, as ``patient_disks`` sets them."""

ACME = Namespace("acme", "model", salt="s")
GLOBEX = Namespace("globex", "model", salt="s")


@contextmanager
def patient_threads() -> Iterator[None]:
    """No operation of a tier's threads counts as hanging, and a tier that is closed waits for them."""
    with pytest.MonkeyPatch.context() as patch:
        _give(patch, IOThreads, "__init__", hang_s=PATIENT_S)
        _give(patch, IOThreads, "close", timeout_s=PATIENT_S)
        _give(patch, DiskRecords, "close", timeout_s=PATIENT_S)
        yield


@contextmanager
def patient_disks() -> Iterator[None]:
    """Nothing gives a disk up, or takes it for one that hangs or fails: a busy machine may need long for anything.

    A test of what happens when a time is over sets that one, or moves the clock.
    """
    with patient_threads(), pytest.MonkeyPatch.context() as patch:
        for name, seconds in WAITS.items():
            patch.setattr(f"radixkv.{name}", seconds)
        _give(patch, DiskSettings, "__init__", hang_s=PATIENT_S, retry_s=PATIENT_S)
        yield


def _give(patch: pytest.MonkeyPatch, kind: type, method: str, **defaults: float) -> None:
    """Give a method other defaults."""
    original = getattr(kind, method)
    signature = inspect.signature(original)

    def call(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        for name, value in defaults.items():
            bound.arguments.setdefault(name, value)
        return original(*bound.args, **bound.kwargs)

    patch.setattr(kind, method, call)


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """For all tests of a module that imports it: see ``patient_disks``."""
    with patient_disks():
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The clock of the tiers below caches that are made from now on. They wait for the disk by it."""
    from radixkv.tiers.ladder import Ladder

    made = ManualClock(1_000.0)
    monkeypatch.setattr(Ladder, "__init__", partialmethod(Ladder.__init__, clock=made))
    return made


def settings(folder: Path, **others: Any) -> DiskSettings:
    """Settings of a tier with NUM_SLOTS slots."""
    given: dict[str, Any] = {
        "disk_bytes": 2 * 4096 + NUM_SLOTS * (4096 + 128),
        "record_bytes": RECORD_BYTES,
        "segment_tokens": SEGMENT_TOKENS,
        "fingerprint": fingerprint_of(weights=b"w", layout="2x2x8"),
        "num_threads": 2,
        "hang_s": PATIENT_S,
    }
    return DiskSettings(folder, **{**given, **others})


@contextmanager
def tier_in(
    folder: Path, *, files: Files | None = None, secrets: tuple[bytes, ...] = (SECRET,), **others: Any
) -> Iterator[DiskRecords]:
    """An opened tier, closed afterwards."""
    tier = DiskRecords(settings(folder, **others), secrets, files=files)
    try:
        yield tier
    finally:
        tier.close(PATIENT_S)


def prompt(number: int, segments: int = 1) -> bytes:
    """The key bytes of a prompt of its own."""
    ids = np.arange(segments * SEGMENT_TOKENS, dtype="<u4") + np.uint32(1000 * number)
    return ids.tobytes()


def kv(namespace: Namespace, key: bytes, segment: int = 0, size: int = RECORD_BYTES) -> bytes:
    """The KV of a segment: other bytes for every namespace, prefix and segment."""
    seed = repr((tuple(namespace), key[: (segment + 1) * 4 * SEGMENT_TOKENS], segment))
    return random.Random(seed).randbytes(size)


def store(tier: DiskRecords, namespace: Namespace, key: bytes, segment: int = 0) -> bool:
    """Store the KV of a segment, and wait for it."""
    job = tier.store(namespace, key, segment, memoryview(kv(namespace, key, segment)))
    return job is not None and job.wait(WAIT_S)


def load(tier: DiskRecords, namespace: Namespace, key: bytes, segment: int = 0) -> bytes | None:
    """Load a segment and wait for it. None for a miss, after which nothing may be left in the memory."""
    into = bytearray(RECORD_BYTES)
    job = tier.load(namespace, key, segment, memoryview(into))
    if job is not None and job.wait(WAIT_S):
        return bytes(into)
    assert not any(into), "a failed load left bytes behind"
    return None


def right_or_missing(tier: DiskRecords, namespace: Namespace, key: bytes, segment: int = 0) -> bool:
    """Whether a segment is there. Fails if other bytes are."""
    found = load(tier, namespace, key, segment)
    assert found is None or found == kv(namespace, key, segment), "WRONG KV"
    return found is not None


class FaultyFiles(Files):
    """Files that call ``before`` with the name of a system call before each, which may raise or block.

    ``most``: bytes that one read or write handles at most. ``calls``: names so far. They don't really sync: the page
    cache outlives a process, and the tests have no power failure but the one that ``LossyFiles`` plays.
    """

    def __init__(self, before: Callable[[str], None] | None = None, most: int | None = None) -> None:
        self.before = before or (lambda call: None)
        self.most = most
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)

    def open(self, name: str, flags: int, folder: int | None) -> int:
        self._call("open")
        return super().open(name, flags, folder)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        self._call("read")
        return super().read(descriptor, into[: self.most], offset)

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        self._call("write")
        return super().write(descriptor, content[: self.most], offset)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        self._call("allocate")
        super().allocate(descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        self._call("sync")

    def sync_folder(self, folder: int) -> None:
        self._call("sync_folder")

    def rename(self, old: str, new: str, folder: int) -> None:
        self._call("rename")
        super().rename(old, new, folder)

    def remove(self, name: str, folder: int) -> None:
        self._call("remove")
        super().remove(name, folder)


def failing(
    calls: str, code: int = errno.EIO, *, times: int = 10**9, after: int = 0
) -> Callable[[str], None]:
    """A function for FaultyFiles: these calls fail with an error, so many times, after so many that work."""
    left = [after, times]

    def before(name: str) -> None:
        if name not in calls.split():
            return
        if left[0]:
            left[0] -= 1
        elif left[1]:
            left[1] -= 1
            raise OSError(code, os.strerror(code))

    return before


def counted(tier: DiskRecords, expected: Mapping[str, int]) -> bool:
    """Whether these counts of the tier are as expected."""
    counts = tier.counts()
    return {name: counts.get(name, 0) for name in expected} == dict(expected)


NAMESPACES = {each.tenant: each for each in (ACME, GLOBEX)}
NUM_PROMPTS = 24
Record = tuple[str, int]
"""The tenant and the number of a prompt of a crash test."""


def held(tier: DiskRecords) -> list[Record]:
    """The sealed records of crash tests by tenants, the least recently used first."""
    found = records_by_locator(tier)
    return [found[locator] for owner in tier._table._owners.values() for locator in owner.order]


def records_by_locator(tier: DiskRecords) -> dict[bytes, Record]:
    """The records that crash tests could store under the keys that there are now."""
    found = {}
    for tenant, namespace in NAMESPACES.items():
        keys = tier.folder.keys(tenant)
        if keys is not None:
            for number in range(NUM_PROMPTS):
                found[tier._locator(keys, namespace, prompt(number))] = tenant, number
    return found


def num_of(table: SlotTable, name: bytes) -> int:
    """Number of slots of an owner, in any state but free."""
    return len(table._owners[name].slots) if name in table._owners else 0


def next_victim(table: SlotTable, name: bytes) -> int | None:
    """The sealed slot that the owner's next ``take`` evicts; None if it needs none, or finds none."""
    owner = table._owners.get(name) or Owner(name)
    return table._victim(owner) if owner.is_full or not table.num_free else None


def evicted_by(tier: DiskRecords, record: Record) -> Record | None:
    """The record that storing this one next will evict, if only one thread stores."""
    found, table = records_by_locator(tier), tier._table
    if any(each == record and table.find(locator) is not None for locator, each in found.items()):
        return None
    victim = next_victim(table, bytes.fromhex(tier.folder.tag(record[0])))
    return None if victim is None else found[table._entries[victim].locator]
