"""The cost of the disk tier: CPU a MiB, opening a folder, a purge, and the share of fio's speed.

- ``write``, ``read``: records of ``record_mib`` MiB through the tier, encrypted, one after the other. CPU time of the
  whole process. Reads bypass the page cache where the file system can.
- ``open``: from opening the folder until the first record is located, with ``num_slots`` sealed slots.
- ``purge``: of a tenant with ``num_purged`` records.
- ``share``: bytes a second of the tier, with as many jobs as its threads in flight, over those of fio (psync, direct,
  as many jobs) on a file of the same size. The tier and fio alternate; the best of the rounds counts. Where fio isn't
  installed, threads that only read or write at random, past the page cache if possible, stand for it (``baseline``).

Small slots of 4 KiB stand for the slots of ``open`` and ``purge``: their cost depends on their number.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.bench.measure import heading, surroundings
from radixkv.config import Namespace
from radixkv.files.system import Files, aligned, read_exactly, round_up, write_exactly
from radixkv.tiers.disk.identity import fingerprint_of
from radixkv.tiers.disk.records import DiskRecords, DiskSettings
from radixkv.tiers.disk.slab import HEADER_BYTES

_NAMESPACE = Namespace("acme", "bench")
_OTHER = Namespace("globex", "bench")
_SECRET = b"a secret for measurements"
_SEED = 1
_WAIT_S = 120.0
REACH = {
    "write_us_per_mib": 400.0,
    "read_us_per_mib": 450.0,
    "open_s": 1.0,
    "purge_s": 0.1,
    "write_share": 0.75,
    "read_share": 0.7,
}
"""What each figure should reach: at most, shares at least."""


def run(
    *,
    folder: Path | None = None,
    record_mib: int = 1,
    num_records: int = 256,
    num_slots: int = 100_000,
    num_purged: int = 10_000,
    rounds: int = 5,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Measure everything in a new folder under ``folder``. Returns a dict that JSON can encode.

    Raises ConfigError, OSError. ``progress`` gets the number of finished steps, ``rounds`` + 1 in all.
    """
    tell = progress or (lambda done: None)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        speeds = _speeds(Path(place), record_mib, num_records, rounds, tell)
        tables = _tables(Path(place) / "small", num_slots, num_purged)
        tell(rounds + 1)
    return {
        "benchmark": "tiers",
        "seed": _SEED,
        **surroundings(),
        "record_mib": record_mib,
        "num_records": num_records,
        "num_slots": num_slots,
        "num_purged": num_purged,
        "rounds": rounds,
        "reach": REACH,
        "results": {**speeds, **tables},
    }


def _settings(folder: Path, num_slots: int, record_bytes: int, segment_tokens: int) -> DiskSettings:
    disk_bytes = 2 * 4096 + num_slots * (round_up(record_bytes) + HEADER_BYTES)
    return DiskSettings(
        folder,
        disk_bytes,
        record_bytes,
        segment_tokens,
        fingerprint=fingerprint_of(bench="random bytes"),
        sync_s=3600.0,
        hang_s=60.0,
    )


def _key(number: int, segment_tokens: int) -> bytes:
    return (np.arange(segment_tokens, dtype="<u4") + np.uint32(number * segment_tokens)).tobytes()


# --- bytes


def _speeds(
    place: Path, record_mib: int, num_records: int, rounds: int, tell: Callable[[int], None]
) -> dict[str, Any]:
    size = record_mib << 20
    best = {"write": 0.0, "read": 0.0}
    cpu = {"write": float("inf"), "read": float("inf")}
    alone = {"write": 0.0, "read": 0.0}
    baseline = _plain if shutil.which("fio") is None else _fio
    is_direct = False
    for number in range(rounds):
        with DiskRecords(_settings(place / f"t{number}", num_records, size, 256), [_SECRET]) as tier:
            is_direct = tier.is_direct
            for kind in ("write", "read"):
                wall_s, cpu_s = _work(tier, kind, num_records, size)
                cpu[kind] = min(cpu[kind], 1e6 * cpu_s / (num_records * record_mib))
                best[kind] = max(best[kind], num_records * size / wall_s)
                alone[kind] = max(
                    alone[kind], baseline(place, kind, num_records, size, tier.settings.num_threads)
                )
        shutil.rmtree(place / f"t{number}")
        tell(number + 1)
    found: dict[str, Any] = {
        "is_direct": is_direct,
        "baseline": "fio" if baseline is _fio else "plain threads",
    }
    for kind in ("write", "read"):
        found |= {f"{kind}_us_per_mib": cpu[kind], f"{kind}_mb_per_s": best[kind] / 1e6}
        found[f"{kind}_share"] = best[kind] / alone[kind] if alone[kind] else None
    return found


def _work(tier: DiskRecords, kind: str, num_records: int, size: int) -> tuple[float, float]:
    """Store or load all records, as many in flight as there are threads. Returns wall and CPU seconds."""
    payload = np.random.default_rng(_SEED).integers(0, 256, size, np.uint8)
    in_flight = tier.settings.num_threads
    memory = [np.empty_like(payload) for _ in range(in_flight)]
    keys = [_key(number, 256) for number in range(num_records)]
    began, cpu = time.perf_counter(), time.process_time()
    for first in range(0, num_records, in_flight):
        jobs = [
            tier.store(_NAMESPACE, key, 0, payload.data)
            if kind == "write"
            else tier.load(_NAMESPACE, key, 0, into.data)
            for key, into in zip(keys[first : first + in_flight], memory, strict=False)
        ]
        if not all(job is not None and job.wait(_WAIT_S) for job in jobs):
            raise OSError(f"the disk tier could not {kind}: {tier.counts()}")
    if kind == "write":
        tier.sync()
    return time.perf_counter() - began, time.process_time() - cpu


def _fio(place: Path, kind: str, num_records: int, size: int, num_jobs: int) -> float:
    """Return bytes a second of fio; 0 where it can't run."""
    file = place / "fio"
    command = [
        *("fio", "--name=tier", f"--filename={file}", f"--rw=rand{kind}", f"--bs={size}", "--direct=1"),
        *("--ioengine=psync", f"--numjobs={num_jobs}", f"--size={num_records * size}", "--thread"),
        *(f"--io_size={num_records * size // num_jobs}", "--group_reporting", "--output-format=json"),
        *(["--end_fsync=1"] if kind == "write" else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return 0.0
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][kind]["bw_bytes"])


def _plain(place: Path, kind: str, num_records: int, size: int, num_jobs: int) -> float:
    """Return bytes a second of threads that read or write the records of a file in a random order."""
    files, file = Files(), place / "plain"
    descriptor = _opened(file)
    try:
        if os.fstat(descriptor).st_size < num_records * size:
            files.allocate(descriptor, num_records * size)
        order = np.random.default_rng(_SEED).permutation(num_records)
        memory = [aligned(size) for _ in range(num_jobs)]
        for each in memory:
            each[:] = np.random.default_rng(_SEED).bytes(len(each))

        def work(number: int) -> None:
            for record in order[number::num_jobs].tolist():
                call = write_exactly if kind == "write" else read_exactly
                call(files, descriptor, memory[number], record * size)

        began = time.perf_counter()
        with ThreadPoolExecutor(num_jobs) as pool:
            list(pool.map(work, range(num_jobs)))
        if kind == "write":
            files.sync(descriptor)
        return num_records * size / (time.perf_counter() - began)
    finally:
        files.close(descriptor)


def _opened(file: Path) -> int:
    """Open a file past the page cache, if the file system can."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        return Files().open(str(file), flags | os.O_DIRECT, None)
    except OSError:
        return Files().open(str(file), flags, None)


# --- slots


def _tables(folder: Path, num_slots: int, num_purged: int) -> dict[str, float]:
    """Fill a folder with small records, most of one tenant; open it, and purge the other tenant."""
    settings = _settings(folder, num_slots, 64, 16)
    payload = memoryview(bytes(64))
    with DiskRecords(settings, [_SECRET]) as tier:
        for first in range(0, num_slots, 200):
            numbers = range(first, min(first + 200, num_slots))
            owners = [_OTHER if number < num_purged else _NAMESPACE for number in numbers]
            jobs = [
                tier.store(owner, _key(number, 16), 0, payload)
                for owner, number in zip(owners, numbers, strict=True)
            ]
            if not all(job is not None and job.wait(_WAIT_S) for job in jobs):
                raise OSError(f"the disk tier could not write: {tier.counts()}")
    began = time.perf_counter()
    with DiskRecords(settings, [_SECRET]) as tier:
        is_there = tier.locate(_NAMESPACE, _key(num_slots - 1, 16), 0)
        open_s = time.perf_counter() - began
        began = time.perf_counter()
        num_forgotten = tier.purge(_OTHER.tenant)
        purge_s = time.perf_counter() - began
    if (is_there, num_forgotten) != (1, num_purged):
        raise OSError(f"the disk tier found {is_there} record, and forgot {num_forgotten}")
    return {"open_s": open_s, "purge_s": purge_s}


def table(result: dict[str, Any]) -> str:
    """Format a result as text."""
    found, reach = result["results"], result["reach"]
    lines = [heading(result), ""]
    for kind in ("write", "read"):
        share = found[f"{kind}_share"]
        beside = found["baseline"]
        said = (
            f"{beside} failed"
            if share is None
            else f"{share:.0%} of {beside}, reach {reach[f'{kind}_share']:.0%} of fio"
        )
        cpu = f"{found[f'{kind}_us_per_mib']:.0f} µs of CPU a MiB, reach {reach[f'{kind}_us_per_mib']:.0f}"
        lines.append(f"{kind}: {cpu}; {found[f'{kind}_mb_per_s']:,.0f} MB/s, {said}")
    lines.append(f"open {result['num_slots']:,} slots: {found['open_s']:.3f} s, reach {reach['open_s']:g}")
    lines.append(
        f"purge {result['num_purged']:,} slots: {found['purge_s']:.3f} s, reach {reach['purge_s']:g}"
    )
    return "\n".join(lines)
