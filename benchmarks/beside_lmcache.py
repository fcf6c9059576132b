"""Storing and loading KV in host memory and on a disk, beside LMCache's back ends, in one run.

    python -m benchmarks.beside_lmcache --python /path/to/lmcache/bin/python [--mib 1024] [--pairs 5] [--folder DIR]

``--python``: of an environment with LMCache (0.5.6 was measured) and torch; it needs neither radixkv nor a GPU. Each
side runs in a process of its own, with one thread for numerics; the two take turns. Prints a line of JSON: by side and
figure the best wall and CPU seconds, and radixkv's as a share of LMCache's.

    host_store   blocks of 1 MiB are copied from an engine's memory, and kept
    host_load    and copied back
    disk_store   the same blocks are written; the time ends with the last one
    disk_load    read, 16 at a time (LMCache: 64, as its pool of threads takes them), and copied into other memory

radixkv's figures in host memory contain the whole requests: lookup, index, eviction. Its disk encrypts and proves each
record; LMCache writes plain bytes. Both use O_DIRECT.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

SIDES: Final = ("radixkv", "lmcache")
FIGURES: Final = ("host_store", "host_load", "disk_store", "disk_load")
NUM_TOKENS: Final = 256
NUM_BLOCKS: Final = 64
"""Blocks of a prompt, and of the engine."""
MIB: Final = 1 << 20
_IN_FLIGHT: Final = 16
_WAIT_S: Final = 600.0

Measured = dict[str, tuple[float, float]]
"""Wall and CPU seconds by figure."""


@contextmanager
def _timed(found: Measured, name: str) -> Iterator[None]:
    began, cpu = time.perf_counter(), _cpu_s()
    yield
    found[name] = time.perf_counter() - began, _cpu_s() - cpu


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# --- radixkv


def radixkv_side(mib: int, folder: Path) -> Measured:
    """Measure radixkv. ``mib``: a multiple of ``NUM_BLOCKS``."""
    import numpy as np

    found, length = Measured(), NUM_BLOCKS * NUM_TOKENS
    prompts = [
        np.arange(length + 1, dtype=np.uint32) + number * (length + 1) for number in range(mib // NUM_BLOCKS)
    ]
    _host_of_ours(prompts, length, found)
    _disk_of_ours(prompts, length, folder, found)
    return found


def _host_of_ours(prompts: list[Any], length: int, found: Measured) -> None:
    from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache

    namespace, mib = Namespace("bench", "toy"), NUM_BLOCKS * len(prompts)
    layout = KVLayout(num_layers=4, num_kv_heads=4, head_dim=64)
    cache = PrefixCache(CacheConfig(NUM_BLOCKS + 1, NUM_TOKENS, layout, host_blocks=mib + 8))
    with _timed(found, "host_store"):
        for prompt in prompts:
            with cache.open(namespace, prompt) as sequence:
                sequence.commit(length)
            cache.evict(NUM_BLOCKS)
    with _timed(found, "host_load"):
        for prompt in prompts:
            with cache.open(namespace, prompt) as sequence:
                assert sequence.loading is not None and sequence.loading.wait()
                assert sequence.num_committed_tokens == length
            cache.evict(NUM_BLOCKS)


def _disk_of_ours(prompts: list[Any], length: int, folder: Path, found: Measured) -> None:
    import numpy as np

    from radixkv import Namespace
    from radixkv.files.system import round_up
    from radixkv.tiers.disk.identity import fingerprint_of
    from radixkv.tiers.disk.records import DiskRecords, DiskSettings
    from radixkv.tiers.disk.slab import HEADER_BYTES

    namespace, mib = Namespace("bench", "toy"), NUM_BLOCKS * len(prompts)
    disk_bytes = 8_192 + (mib + 8) * (round_up(MIB) + HEADER_BYTES)
    settings = DiskSettings(
        folder / "kv",
        disk_bytes,
        MIB,
        NUM_TOKENS,
        fingerprint=fingerprint_of(bench="random bytes"),
        sync_s=3_600.0,
        hang_s=60.0,
    )
    blocks = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, MIB), np.uint8)
    rows, out = np.zeros_like(blocks), np.zeros_like(blocks)
    with DiskRecords(settings, [b"the secret of a benchmark"]) as tier:
        for name in ("disk_store", "disk_load"):
            with _timed(found, name):
                for prompt in prompts:
                    key, jobs = prompt[:length].tobytes(), deque[Any]()
                    for at in range(NUM_BLOCKS + _IN_FLIGHT):
                        if at < NUM_BLOCKS and name == "disk_store":
                            jobs.append(tier.store(namespace, key, at, memoryview(blocks[at])))
                        elif at < NUM_BLOCKS:
                            jobs.append(tier.load(namespace, key, at, memoryview(rows[at])))
                        if at >= _IN_FLIGHT:
                            assert jobs.popleft().wait(_WAIT_S)
                            out[at - _IN_FLIGHT] = rows[at - _IN_FLIGHT]
        assert (out == blocks).all()


# --- LMCache


def lmcache_side(mib: int, folder: Path) -> Measured:
    """Measure LMCache's ``LocalCPUBackend`` and ``LocalDiskBackend``."""
    torch, utils, memory = map(
        importlib.import_module, ("torch", "lmcache.utils", "lmcache.v1.memory_management")
    )
    torch.set_num_threads(1)
    found, shape = Measured(), torch.Size([2, 4, NUM_TOKENS, 256])
    host, disk = _lmcache_back_ends(mib, folder, torch)
    kv = torch.randn(NUM_BLOCKS, *shape).to(torch.float16)
    out, objects = torch.zeros_like(kv), []
    keys = [utils.CacheEngineKey("toy", 1, 0, number + 1, torch.float16) for number in range(mib)]
    with _timed(found, "host_store"):
        for at, key in enumerate(keys):
            kept = host.allocate(shape, torch.float16, memory.MemoryFormat.KV_2LTD)
            kept.tensor.copy_(kv[at % NUM_BLOCKS])
            host.submit_put_task(key, kept)
            objects.append(kept)
    with _timed(found, "host_load"):
        for at, key in enumerate(keys):
            kept = host.get_blocking(key)
            out[at % NUM_BLOCKS].copy_(kept.tensor)
            kept.ref_count_down()
    assert torch.equal(out, kv)
    written = threading.Semaphore(0)
    with _timed(found, "disk_store"):
        for key, kept in zip(keys, objects, strict=True):
            disk.submit_put_task(key, kept, on_complete_callback=lambda _: written.release())
        for _ in keys:
            assert written.acquire(timeout=_WAIT_S)
    for key, kept in zip(keys, objects, strict=True):
        host.remove(key)
        kept.ref_count_down()
    out.zero_()
    with _timed(found, "disk_load"):
        for first in range(0, mib, NUM_BLOCKS):
            for at, kept in enumerate(disk.batched_get_blocking(keys[first : first + NUM_BLOCKS])):
                out[at].copy_(kept.tensor)
                kept.ref_count_down()
    assert torch.equal(out, kv)
    return found


def _lmcache_back_ends(mib: int, folder: Path, torch: Any) -> tuple[Any, Any]:
    config, metadata, cpu_backend, disk_backend = (
        importlib.import_module(f"lmcache.v1.{name}")
        for name in (
            "config",
            "metadata",
            "storage_backend.local_cpu_backend",
            "storage_backend.local_disk_backend",
        )
    )
    settings = config.LMCacheEngineConfig.from_defaults(
        chunk_size=NUM_TOKENS,
        local_cpu=True,
        max_local_cpu_size=mib / 1_024 + 0.5,
        local_disk=str(folder),
        max_local_disk_size=2 * mib / 1_024 + 1,
        extra_config={"use_odirect": True},
    )
    facts = metadata.LMCacheMetadata("toy", 1, 1, 0, 0, torch.float16, (4, 2, NUM_TOKENS, 4, 64))
    host = cpu_backend.LocalCPUBackend(settings, facts, "cpu")
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return host, disk_backend.LocalDiskBackend(settings, loop, host, "cpu", None, facts)


# --- both, in turns


def measure(side: str, python: str, mib: int, folder: Path) -> Measured:
    """Measure one side in a process of its own. Raises RuntimeError with what it said if it fails."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [python, __file__, "--side", side, "--mib", str(mib), "--folder", place]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)} if side == "radixkv" else {}
        done = subprocess.run(
            command,
            env={**os.environ, **threads, **paths, "LMCACHE_LOG_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{side}, by {python}: {done.stderr.strip()[-2_000:]}")
    return {name: (wall, cpu) for name, (wall, cpu) in json.loads(done.stdout.splitlines()[-1]).items()}


def run(python: str, mib: int, pairs: int, folder: Path) -> dict[str, Any]:
    """Measure both sides in turns. Returns a dict that JSON can encode."""
    best: dict[str, Measured] = {side: {} for side in SIDES}
    for number in range(pairs):
        for side in SIDES if number % 2 else SIDES[::-1]:
            for name, each in measure(
                side, python if side == "lmcache" else sys.executable, mib, folder
            ).items():
                wall, cpu = best[side].get(name, each)
                best[side][name] = min(wall, each[0]), min(cpu, each[1])
    ours, theirs = (best[side] for side in SIDES)
    share = {
        name: [one / other for one, other in zip(ours[name], theirs[name], strict=True)] for name in FIGURES
    }
    return {"benchmark": "beside lmcache", "mib": mib, "pairs": pairs, **best, "share": share}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--mib", type=int, default=1_024)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--side", choices=SIDES)
    given = parser.parse_args()
    if given.mib < NUM_BLOCKS or given.mib % NUM_BLOCKS or given.pairs < 1:
        parser.error(f"--mib is a multiple of {NUM_BLOCKS}, and --pairs at least 1")
    folder = given.folder or Path(tempfile.gettempdir())
    if given.side is None:
        found: Any = run(given.python, given.mib, given.pairs, folder)
    else:
        found = (radixkv_side if given.side == "radixkv" else lmcache_side)(given.mib, folder)
    print(json.dumps(found), flush=True)
    if given.side is not None:
        os._exit(0)  # LMCache's threads don't end


if __name__ == "__main__":
    main()
