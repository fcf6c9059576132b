"""Errors travel between processes and are copied: all that can be raised, with the arguments that they are raised with.

``multiprocessing`` pickles what a worker raises. If the parent can't unpickle it, it waits for ever.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import pytest
import torch

import radixkv
import radixkv_kernels
import radixkv_policies
from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache, Tenant, audit
from radixkv.audit import Report, Violation
from tests.waiting import LIMIT_S

NS = Namespace("a", "m")
EXAMPLES: Mapping[str, object] = {
    "str": "text",
    "int": 7,
    "float": 0.5,
    "float | None": 0.5,
    "object": [1],
    "Mapping[str, int]": {"free": 1},
    "Mapping[str, str] | None": {"Allow": "GET"},
    "bool": True,
    "Report": Report((Violation("law", "where"),), {}, 1.0),
}
"""By annotation; "text" for others."""


def kinds() -> list[type[Exception]]:
    """All exceptions of the packages, public or not. Modules inside an engine that isn't installed are left out."""
    for package in (radixkv, radixkv_kernels, radixkv_policies):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "_native" not in module.name and not module.name.endswith("__main__"):
                with suppress(ModuleNotFoundError):
                    import_module(module.name)
    found, pending = set[type[Exception]](), [Exception]
    while pending:
        for kind in pending.pop().__subclasses__():
            if kind not in found:
                found.add(kind)
                pending.append(kind)
    return sorted((kind for kind in found if kind.__module__.startswith("radixkv")), key=repr)


def made(kind: type[Exception]) -> Exception:
    """Make an error with all arguments that it takes."""
    taken = list(inspect.signature(kind.__init__).parameters.values())[1:]
    named = {
        each.name: EXAMPLES.get(each.annotation, "text")
        for each in taken
        if each.annotation is not each.empty
    }
    error = kind(**named) if named else kind("text")
    error.add_note("a note")
    return error


def content(error: BaseException) -> tuple[object, ...]:
    """What another process must find of it."""
    return type(error), str(error), error.args, vars(error), getattr(error, "hint", None)


def returned(error: Exception) -> Exception:
    """Send it back."""
    return error


def raised(error: Exception) -> None:
    """Raise it in the other process."""
    raise error


def opened(cache: PrefixCache, num_tokens: int, first: int = 0) -> Any:
    """Open a prompt of its own."""
    return cache.open(NS, [first, *range(1, num_tokens)])


def failing() -> Iterator[Callable[[], object]]:
    """Calls that raise errors of the library, with the arguments that users meet."""
    small = Tenant("a", max_blocks=4, max_pinned_blocks=1, max_pins=1)
    cache = PrefixCache(CacheConfig(8, 4, max_announcements=1))
    cache.add_tenant(small)
    released = opened(cache, 9)
    released.commit(9)
    released.release()
    dead = PrefixCache(CacheConfig(8, 4))
    dead._lock.death, dead._lock.broken = "the cache is dead", dead
    purged = cache.open(Namespace("b", "m"), [1, 2])
    cache.purge("b")
    cache.announce(NS, [1])
    yield lambda: CacheConfig(0)
    yield lambda: CacheConfig(8, policy="none")
    yield lambda: Namespace("", "m")
    yield lambda: cache.match("no namespace", [1])  # type: ignore[arg-type]
    yield lambda: cache.match(NS, [1, -1])
    yield lambda: cache.evict(-1)
    yield lambda: cache.append([], [1, 2])
    yield lambda: opened(cache, 99)
    yield lambda: cache.open(Namespace("c", "m"), range(99))
    yield lambda: cache.pin(NS, range(8, 16), 9.0)
    yield lambda: cache.pin(NS, range(8), 9.0)
    yield lambda: cache.announce(NS, [1])
    yield lambda: released.commit(1)
    yield lambda: purged.commit(1)
    yield lambda: dead.match(NS, [1])
    yield lambda: radixkv.storage.DeviceStorage(KVLayout(1, 1, 8), -1)
    yield lambda: radixkv_kernels.scrub(torch.zeros(1), [0])
    purged.release()
    yield lambda: audit.check(5)  # type: ignore[arg-type]


def arguments() -> list[Exception]:
    """Errors of every kind, and those that calls raise."""
    found = [made(kind) for kind in kinds()]
    for call in failing():
        with pytest.raises(Exception) as caught:
            call()
        found.append(caught.value.with_traceback(None))
    return found


@pytest.mark.slow
def test_every_error_survives_pickle_and_copy_in_both_directions() -> None:
    all_errors = arguments()
    assert len({type(error) for error in all_errors}) > 40
    for error in all_errors:
        for way in (copy.copy, copy.deepcopy):
            assert content(way(error)) == content(error)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert content(pickle.loads(pickle.dumps(error, protocol))) == content(error)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        back = pool.map(returned, all_errors, timeout=LIMIT_S, chunksize=len(all_errors))
        assert [content(error) for error in back] == [content(error) for error in all_errors]
        for error in all_errors:
            with pytest.raises(type(error)) as caught:
                pool.submit(raised, error).result(LIMIT_S)
            assert content(caught.value)[:3] == content(error)[:3]
