"""Misuses every class of some packages, and copies what can't be copied, in a process of its own.

    python misuse.py PACKAGE …

A compiled class could end the process. So it prints the name of each class before it is tried, and a line ``FAULT …``
for each thing that is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import radixkv

LEFT_OUT = ("__main__", "train", "manager", "hashes", "connector", "plugin", "locking")
"""Modules that need an engine. ``locking.Guard`` is of the handles alone."""
DEAR = ("hf", "batch", "properties")
"""Beginnings of the names of modules that import transformers or Hypothesis."""
MOST_ARGUMENTS = 8
ONCE = {
    "radixkv.index.lent_beams": ["LentBeams"],
    "radixkv.index.load_target": ["LoadTarget"],
    "radixkv.storage.device": ["BlockStorage", "DeviceStorage"],
    "radixkv.storage.beams": ["DeviceBeams"],
    "radixkv.tiers.tiered_cache": ["TieredCache"],
    "radixkv.tiers.loading": ["TierLoading"],
    "radixkv.tiers.ladder": ["Ladder"],
    "radixkv.tiers.host.memory": ["HostBlocks"],
    "radixkv.tiers.disk.tier": ["DiskTier"],
    "radixkv.engines.vllm.steps": ["VllmSteps"],
    "radixkv.engines.vllm.cache": ["VllmCache"],
    "radixkv.engines.sglang.cache": ["SglangCache"],
    "radixkv.engines.vllm.serve": ["VllmEngine"],
    "radixkv.engines.vllm.completion_stream": ["CompletionStream"],
    "radixkv.engines.control.server": ["ControlServer"],
    "radixkv.engines.control.client": ["ControlClient"],
    "radixkv.engines.control.remote_cache": ["ControlCache"],
    "radixkv.engines.control.outlets": ["Outlets"],
    "radixkv.events.event_publisher": ["EventPublisher"],
    "radixkv.events.event_subscriber": ["EventSubscriber"],
    "radixkv.events.event_stream": ["EventStream"],
    "radixkv.tiers.disk.records": ["DiskRecords"],
    "radixkv.tiers.disk.folder": ["TierFolder"],
    "radixkv.coordination.memory_coordinator": ["MemoryCoordinator"],
    "radixkv.coordination.redis_coordinator": ["RedisCoordinator"],
    "radixkv.coordination.routing.router": ["Router"],
    "radixkv.coordination.store.memory": ["MemoryStore"],
    "radixkv.coordination.store.redis_connection": ["Connection"],
    "radixkv.signing": ["RequestVerifier", "ReplayGuard"],
    "radixkv.audit.background": ["Watch"],
    "radixkv.metering.writer": ["UsageWriter"],
    "radixkv.metering.appender": ["UsageAppender"],
    "radixkv.metering.folder": ["UsageFolder"],
    "radixkv.service.api_client": ["Client"],
}
"""Classes whose objects exist once, beside those that ``copies`` makes."""
NS = radixkv.Namespace("acme", "model")
_trying = ""


@dataclasses.dataclass
class Request:
    """An object of a user that holds a handle."""

    sequence: object


class OwnCache(radixkv.PrefixCache):
    """A user's cache."""


def modules(package: str) -> Iterator[str]:
    """Return the public modules of a package."""
    yield package
    for each in pkgutil.walk_packages(getattr(import_module(package), "__path__", ()), f"{package}."):
        *_, name = each.name.split(".")
        if not name.startswith(("_", *DEAR)) and name not in LEFT_OUT and "__mypyc" not in name:
            yield each.name


def classes(package: str) -> Iterator[type]:
    """Return the classes that are defined there."""
    for name in modules(package):
        with contextlib.suppress(ModuleNotFoundError):
            for each in list(vars(import_module(name)).values()):
                if isinstance(each, type) and each.__module__ == name:
                    yield each


def trying(what: str) -> None:
    """Say what is tried next."""
    global _trying
    _trying = what
    print(what, flush=True)


def unraisable(error: Any) -> None:
    """Report what a finaliser raised."""
    print(f"FAULT {_trying}: its finaliser raised {error.exc_value!r}", flush=True)


def use(half: object) -> None:
    """Use an object whose ``__init__`` didn't run. Any exception is right."""
    for name in dir(half):
        with contextlib.suppress(Exception):
            getattr(half, name)
    for call in (repr, hash, copy.copy, copy.deepcopy, pickle.dumps):
        with contextlib.suppress(Exception):
            call(half)


def misuse(kind: Any) -> None:
    """Make objects of a class with wrong arguments and without ``__init__``, use them and drop them."""
    for number in range(MOST_ARGUMENTS):
        with contextlib.suppress(Exception):
            kind(*[object() for _ in range(number)])
    with contextlib.suppress(Exception):
        use(kind.__new__(kind))


def refuses(what: object, *ways: Any) -> None:
    """Copy an object in these ways, by default in all. Each must raise a TypeError with the reason."""
    trying(f"copies of {type(what).__name__}")
    protocols = [partial(pickle.dumps, protocol=each) for each in range(pickle.HIGHEST_PROTOCOL + 1)]
    for way in ways or (copy.copy, copy.deepcopy, *protocols):
        try:
            way(what)
        except Exception as error:  # noqa: BLE001 - any other one is a fault
            if not isinstance(error, TypeError) or "can't be copied or pickled: " not in str(error):
                print(f"FAULT {_trying}: {way} raises {error!r}", flush=True)
        else:
            print(f"FAULT {_trying}: {way} works", flush=True)


def copy_handles() -> None:
    """Copy a cache and its open handles. The originals stay whole."""
    ids = list(range(20))
    cache, fence = OwnCache(radixkv.CacheConfig(num_blocks=64, block_size=4)), radixkv.Fence()
    with cache.open(NS, ids) as sequence, cache.session(NS) as session, sequence.fork(1)[0] as fork:
        sequence.commit(20)
        announcement, counts = cache.announce(NS, [*ids, 1]), cache.blocks_of("acme")
        inserted = cache.insert(NS, [7, *ids[1:]], cache.allocate(5), lease=True)
        with cache.match_and_lease(NS, ids) as lease, inserted.lease:
            for each in (cache, sequence, fork, session, lease, inserted, announcement, fence, counts):
                refuses(each)
            refuses(Request(sequence), copy.deepcopy, pickle.dumps, dataclasses.asdict)
            if not all(each.is_open for each in (sequence, fork, session, lease, announcement)):
                print("FAULT a copy that was refused ended its original", flush=True)
    radixkv.audit.check(cache)


if __name__ == "__main__":
    warnings.simplefilter("error", ResourceWarning)
    sys.unraisablehook = unraisable
    copy_handles()
    for package in sys.argv[1:]:
        for kind in classes(package):
            trying(f"{kind.__module__}.{kind.__qualname__}")
            misuse(kind)
    for module, names in ONCE.items():
        if module.startswith(tuple(sys.argv[1:])):
            for kind in map(vars(import_module(module)).__getitem__, names):
                refuses(kind.__new__(kind))
