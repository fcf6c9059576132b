"""A fork of a process that uses a cache: in the child every call says at once that the cache is closed there."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from radixkv import (
    CacheConfig,
    ClosedByFork,
    Fence,
    KVLayout,
    Namespace,
    PrefixCache,
    RequestHints,
    Tenant,
    audit,
)
from radixkv.forks import OwnLock
from tests.waiting import LIMIT_S, ended, is_set

NS = Namespace("a", "m")
IDS = list(range(16))
Calls = dict[str, Callable[[], object]]

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_child(work: Callable[[], object]) -> Any:
    """Do some work in a forked child and return what it returned, or fail if it doesn't end."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            with contextlib.suppress(BaseException):
                os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as answer:
            assert select.select([answer], [], [], LIMIT_S)[0], "the child hangs"
            told = answer.read()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert told, "the child's work raised an error"
    return json.loads(told)


def outcomes(calls: Calls) -> dict[str, str]:
    """Make the calls and return the names of the errors that they raised."""
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - its name is the result
            found[name] = type(error).__name__
        else:
            found[name] = ""
    return found


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """Let another thread hold a lock meanwhile."""
    holds, may_leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            is_set(may_leave)

    thread = threading.Thread(target=hold)
    thread.start()
    is_set(holds)
    try:
        yield
    finally:
        may_leave.set()
        ended(thread)


def calls_of(cache: PrefixCache, handles: contextlib.ExitStack) -> Calls:
    """Every call of a cache and its handles that waits for its lock."""
    sequence = handles.enter_context(cache.open(NS, IDS))
    sequence.commit(16)
    match = cache.match(NS, IDS)
    lease, pin = handles.enter_context(cache.lease(match)), cache.pin(NS, IDS[:4], 9.0)
    session = handles.enter_context(cache.session(NS, "s"))
    announcement = cache.announce(NS, [*IDS, 1])
    fence = Fence()
    handles.callback(fence.lift)
    cache.open(NS, IDS).release(after=fence)
    return {
        "match": lambda: cache.match(NS, IDS),
        "lease": lambda: cache.lease(match),
        "match_and_lease": lambda: cache.match_and_lease(NS, IDS),
        "match_ahead": lambda: cache.match_ahead(NS, IDS),
        "touch": lambda: cache.touch(NS, IDS),
        "announce": lambda: cache.announce(NS, IDS),
        "changed_announcements": cache.changed_announcements,
        "note": lambda: cache.note(NS, IDS, RequestHints({"turn": 1})),
        "session": lambda: cache.session(NS).open(IDS),
        "session.close": session.close,
        "open": lambda: cache.open(NS, IDS),
        "step_done": lambda: cache.step_done(1),
        "step_failed": lambda: cache.step_failed(1),
        "forget": lambda: cache.forget(sequence, 4),
        "append": lambda: cache.append([sequence], [1]),
        "flush": cache.flush,
        "reorder": lambda: cache.reorder([sequence], [0]),
        "evict": lambda: cache.evict(1),
        "allocate": lambda: cache.allocate(1),
        "free": lambda: cache.free([]),
        "insert": lambda: cache.insert(NS, IDS[:4], [1]),
        "pin": lambda: cache.pin(NS, IDS[:4], 9.0),
        "unpin": lambda: cache.unpin(pin),
        "pins": cache.pins,
        "add_tenant": lambda: cache.add_tenant(Tenant("b")),
        "remove_tenant": lambda: cache.remove_tenant("b"),
        "tenant": lambda: cache.tenant("a"),
        "tenants": cache.tenants,
        "namespaces": cache.namespaces,
        "clear": lambda: cache.clear(NS),
        "purge": lambda: cache.purge("a"),
        "generation": lambda: cache.generation("a"),
        "publish": lambda: cache.publish("base", NS, IDS, ["b"]),
        "unpublish": lambda: cache.unpublish("base"),
        "set_readers": lambda: cache.set_readers("base", []),
        "bases": cache.bases,
        "stats": cache.stats,
        "tenant_stats": lambda: cache.tenant_stats("a"),
        "snapshot": cache.snapshot,
        "audit": lambda: audit.check(cache),
        "maintain": cache.maintain,
        "require_alive": cache.require_alive,
        "end_waiting": lambda: cache.endings.end_waiting("a"),
        "lift": fence.lift,
        "sequence.commit": lambda: sequence.commit(16),
        "sequence.append": lambda: sequence.append(1),
        "sequence.extend": lambda: sequence.extend([1]),
        "sequence.reserve": lambda: sequence.reserve(1),
        "sequence.fork": lambda: sequence.fork(1),
        "sequence.truncate": lambda: sequence.truncate(16),
        "sequence.computing": lambda: sequence.computing(16, step=1),
        "sequence.block_table": lambda: sequence.block_table,
        "sequence.token_ids": lambda: sequence.token_ids,
        "sequence.release": sequence.release,
        "lease.release": lease.release,
        "withdraw": announcement.withdraw,
    }


def test_every_call_says_at_once_that_the_cache_is_closed() -> None:
    cache = PrefixCache(CacheConfig(64, 4))
    with contextlib.ExitStack() as handles:
        calls = calls_of(cache, handles)
        with held(cache._lock):
            found = in_child(lambda: [outcomes(calls), outcomes(calls), cache.is_dead, repr(cache)])
        assert set(found[0].values()) == {"ClosedByFork"}, found[0]
        assert {name for name, error in found[1].items() if error != "ClosedByFork"} <= {
            "lift",
            "session.close",
        }
        assert found[2:] == [True, "<PrefixCache, closed by a fork>"]
    audit.check(cache)
    assert cache.match(NS, IDS).num_tokens == 16, "the parent's goes on"


def test_the_error_says_what_to_do_instead() -> None:
    cache = PrefixCache(CacheConfig(16, 4))

    def work() -> str:
        try:
            cache.match(NS, IDS)
        except ClosedByFork as error:
            return f"{error} {error.hint}"
        return ""

    told = in_child(work)
    assert "forked" in told and "spawn" in told


def test_also_while_no_thread_is_in_the_cache() -> None:
    cache = PrefixCache(CacheConfig(64, 4))
    assert in_child(lambda: outcomes({"match": lambda: cache.match(NS, IDS)})) == {"match": "ClosedByFork"}


def test_a_cache_that_the_child_makes_works() -> None:
    PrefixCache(CacheConfig(16, 4)).match(NS, IDS)

    def work() -> int:
        own = PrefixCache(CacheConfig(16, 4))
        with own.open(NS, IDS) as sequence:
            sequence.commit(16)
        audit.check(own)
        return own.match(NS, IDS).num_tokens

    assert in_child(work) == 16
    assert in_child(lambda: in_child(work)) == 16


def test_handles_of_the_parent_end_silently_in_the_child() -> None:
    cache, fence = PrefixCache(CacheConfig(64, 4)), Fence()
    handles: list[Any] = [cache.open(NS, IDS), cache.match_and_lease(NS, IDS), fence]
    cache.open(NS, IDS).release(after=fence)

    def work() -> list[str]:
        nonlocal fence
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for each in handles[:2]:
                with each:
                    pass
            del each, fence
            handles.clear()
            gc.collect()
        return [str(each.message) for each in told]

    assert in_child(work) == []
    fence.lift()
    for each in handles[:2]:
        each.release()
    audit.check(cache)


def test_a_fork_in_a_callback_ends_that_call_in_the_child() -> None:
    cache: PrefixCache

    def clock() -> float:
        nonlocal is_child
        if forks and not (forked := os.fork()):
            is_child = True
        elif forks:
            os.waitpid(forked, 0)
        forks.clear()
        return 1.0

    forks, is_child = list[int](), False
    cache = PrefixCache(CacheConfig(16, 4, policy="lru"), clock=clock)
    reading, writing = os.pipe()
    forks.append(1)
    try:
        cache.announce(NS, IDS)
        if is_child:
            os.write(writing, json.dumps(outcomes({"match": lambda: cache.match(NS, IDS)})).encode())
    finally:
        if is_child:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        assert json.loads(answer.read()) == {"match": "ClosedByFork"}
    assert cache.match(NS, IDS).num_tokens == 0


def test_what_lies_below_is_closed_too() -> None:
    layout = KVLayout(1, 1, 8, "float32")
    cache = PrefixCache(CacheConfig(8, 4, layout=layout, host_blocks=16))
    for first in range(3):
        with cache.open(NS, [first, *IDS]) as sequence:
            sequence.commit(17)
    below: Any = cache.below
    waiting = cache.open(NS, [0, *IDS])
    loading = waiting.loading
    assert loading is not None
    calls: Calls = {
        "open": lambda: cache.open(NS, IDS),
        "evict": lambda: cache.evict(1),
        "extend": lambda: waiting.extend([1]),
        "clear": lambda: cache.clear(NS),
        "purge": lambda: cache.purge("a"),
        "remove_tenant": lambda: cache.remove_tenant("a"),
        "add_tenant": lambda: cache.add_tenant(Tenant("b", max_blocks=4)),
        "namespaces": lambda: cache.namespaces("a"),
        "maintain": cache.maintain,
        "poll": loading.poll,
        "wait": loading.wait,
        "claim": lambda: loading.claim(4),
        "cancel": loading.cancel,
        "close": below.close,
        "counts": below.counts,
    }
    with held(cache._lock), held(below.gate), held(below._lock):
        assert set(in_child(lambda: outcomes(calls)).values()) == {"ClosedByFork"}
    waiting.release()
    audit.check(cache)


def test_a_lock_costs_nothing_more_than_another() -> None:
    """In its own process its ``__enter__`` is that of the C lock."""
    assert "__enter__" not in vars(OwnLock) and "__exit__" not in vars(OwnLock)


@pytest.mark.slow
def test_the_other_build_too() -> None:
    """The lock of each build has its own code."""
    other = {"RADIXKV_PURE": "0" if os.environ.get("RADIXKV_PURE") == "1" else "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "every_call or below",
    ]
    done = subprocess.run(command, env={**os.environ, **other}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
