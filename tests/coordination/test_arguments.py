"""Every public method of a coordinator, a router and a signer, called with invalid arguments.

Each call raises an error of this package that names the argument, and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixkv import CacheConfig, PrefixCache
from radixkv.clock import ManualClock
from radixkv.coordination import Load, RequestVerifier, Router, Settings, connect, sign_request
from radixkv.coordination.memory_coordinator import MemoryCoordinator
from radixkv.coordination.routing.replica_sources import LocalSource
from radixkv.coordination.store.memory import MemoryStore
from radixkv.coordination.values import MAX_AMOUNT, FleetPin
from radixkv.errors import ArgumentError, ConfigError, TokenError
from radixkv.signing import ReplayGuard
from tests.coordination.contract import ACME, SECRET

HALF = "half of a pair: \ud800"
ODD: tuple[Any, ...] = (
    b"x", b"x" * 32, math.nan, math.inf, -math.inf, -1.5, 10**400, -(10**400), np.bool_(True), np.float64("nan"),
    np.array(5), np.array([1, 2]), np.array(["a"]), [], [-1], ["x"], [None], {}, (1, 2), object(), print, HALF,
)  # fmt: skip
"""Values that no argument below accepts, except where ``ALLOWED`` says so."""
NO_TEXT = (None, True, 5, np.int64(5))
NO_NUMBER = (True, "5", -1)


class Fleet:
    """Two replicas on a store in memory, a job, a pin and a router."""

    def __init__(self) -> None:
        self.store = MemoryStore(ManualClock(1_000.0))
        self.a, self.b = self.join("a"), self.join("b")
        self.a.beat()
        self.job = self.a.create_job(ACME, 512, ["a", "b"])
        self.pin = FleetPin("1f" * 16, self.a.pin_digest(ACME), 512, "all")
        assert self.a.keep_pin("acme", self.pin, 60.0)
        self.cache = PrefixCache(CacheConfig(num_blocks=4, block_size=16))
        self.router = Router(LocalSource(self.a, lambda namespace, key: 0))

    def join(self, name: str) -> MemoryCoordinator:
        settings = Settings(name, SECRET, "fp:model", 16, f"http://{name}", background=False)
        replica = MemoryCoordinator(settings, self.store)
        replica.register()
        return replica

    def state(self) -> object:
        store, purges, quotas = self.store, self.a.purges, self.a.quotas
        kept = store.records, store.accounts, store.announced, store.jobs, store.pinned, self.a.info()
        known = dict(quotas._wanted), purges.num_bytes, quotas.num_bytes
        return deepcopy((kept, known, self.router.predicted_bytes))


def calls(f: Fleet) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each method with valid arguments."""
    a, job, ids = f.a, f.job.id, [1, 2, 3]
    done = {"state": "done", "error": ""}
    return {
        "hints": (a.hints, {"namespace": ACME, "token_ids": ids}),
        "report_load": (a.report_load, {"load": Load()}),
        "create_job": (
            a.create_job,
            {"namespace": ACME, "num_tokens": 3, "replica_ids": ["a"], "job_id": "2" * 32, "num_wanted": 1,
             "num_left_out": 0, "request": ""},
        ),
        "take_job": (a.take_job, {"job_id": job, "tenant": "acme"}),
        "extend_job": (a.extend_job, {"job_id": job, "replica_id": "b"}),
        "hand_job": (a.hand_job, {"job_id": job, "to": f.b.info()}),
        "end_job": (a.end_job, {"job_id": job}),
        "forget_job": (a.forget_job, {"job_id": job}),
        "give_up": (a.give_up, {"job_id": job, "part": f.job.parts[0], "error": "x"}),
        "report_job": (
            a.report_job, {"job_id": job, **done, "num_tokens_done": 3, "num_tokens_cached": 1, "ms": 1}
        ),
        "job": (a.job, {"job_id": job, "tenant": "acme"}),
        "keep_pin": (a.keep_pin, {"tenant": "acme", "pin": f.pin, "ttl_s": 5.0, "anew": True}),
        "end_pin": (a.end_pin, {"tenant": "acme", "pin": f.pin, "keep_s": 5.0}),
        "state_pin": (a.state_pin, {"tenant": "acme", "pin_id": f.pin.id, **done, "num_tokens": 1}),
        "pin_digest": (a.pin_digest, {"namespace": ACME}),
        "fleet_pins": (a.fleet_pins, {"tenant": "acme"}),
        "purge": (a.purge, {"tenant": "acme"}),
        "purge_report": (a.purge_report, {"tenant": "acme"}),
        "set_limit": (a.set_limit, {"tenant": "acme", "blocks": 5}),
        "reserve": (a.reserve, {"tenant": "acme", "blocks": 5}),
        "attach": (a.attach, {"resident": f.cache, "on_purge": None}),
        "rank": (
            f.router.rank,
            {"namespace": ACME, "token_ids": ids, "cost": "linear", "temperature": 0.0, "limit": 1,
             "ignore_load": False},
        ),
        "routed": (f.router.routed, {"namespace": ACME, "token_ids": ids, "replica_id": "b"}),
        "sign_request": (
            sign_request,
            {"secret": SECRET, "method": "POST", "path": "/x", "tenant": "acme", "body": b"", "audience": "a",
             "timestamp_s": 1.0, "nonce": None},
        ),
        "RequestVerifier": (RequestVerifier, {"secret": SECRET, "max_skew_s": 3.0}),
        "ReplayGuard": (ReplayGuard, {"keep_s": 3.0}),
        "connect": (
            connect, {"url": None, "replica_id": "a", "fleet_secret": SECRET, "fingerprint": "fp", "block_size": 16}
        ),
    }  # fmt: skip


TEXTS = ("tenant", "job_id", "pin_id", "method", "path", "audience", "fingerprint")
CHOICES = ("state", "cost", "nonce", "error", "request")
COUNTS = ("num_tokens", "num_left_out", "num_wanted", "num_tokens_done", "num_tokens_cached", "ms", "blocks")
SECONDS = ("ttl_s", "keep_s", "timestamp_s", "max_skew_s", "temperature")
KEYS = ([], (1, 2), b"x" * 32, np.array([1, 2]))
ALLOWED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("create_job", "replica_ids"): ([],), ("create_job", "job_id"): (None,), ("create_job", "num_wanted"): (None,),
    ("set_limit", "blocks"): (None,), ("rank", "limit"): (10**400,), ("rank", "token_ids"): KEYS,
    ("hints", "token_ids"): KEYS, ("routed", "token_ids"): KEYS, ("sign_request", "nonce"): (None,),
    ("attach", "on_purge"): (print, None), ("sign_request", "body"): (b"x", b"x" * 32), ("rank", "cost"): (None,),
    ("sign_request", "secret"): (b"x" * 32,), ("connect", "fleet_secret"): (b"x" * 32,), ("connect", "url"): (None,),
    ("RequestVerifier", "secret"): (b"x" * 32,), ("routed", "replica_id"): (HALF,), ("end_pin", "keep_s"): (-1.5, -1),
    ("rank", "temperature"): (None,), ("connect", "block_size"): (10**400,), ("ReplayGuard", "keep_s"): (5,),
}  # fmt: skip

NAMED = {("connect", "replica_id"): "replica", ("connect", "url"): "redis", ("sign_request", "secret"): "fleet_secret",
         ("RequestVerifier", "secret"): "fleet_secret"}  # fmt: skip
"""The name in the error, for arguments that are also settings."""


def wrongs() -> Iterator[tuple[str, str, Any]]:
    for name, (_, arguments) in calls(Fleet()).items():
        for argument in arguments:
            values = list(ODD)
            values += NO_TEXT if argument in (*TEXTS, *CHOICES) else ()
            values += ("x",) if argument in CHOICES and argument != "error" else ()
            values += (*NO_NUMBER, None, 1.5) if argument in COUNTS else ()
            values += (*NO_NUMBER, None) if argument in SECONDS else ()
            values += ("",) if argument == "tenant" and name != "sign_request" else ()
            values += (10**15,) if argument in COUNTS else ()
            values += (None, 0, 1, "yes") if argument in ("anew", "ignore_load") else ()
            allowed = [repr(each) for each in ALLOWED.get((name, argument), ())]
            for value in values:
                if repr(value) not in allowed and not (
                    argument == "token_ids" and repr(value) == "array([1, 2])"
                ):
                    yield name, argument, value


@pytest.mark.parametrize("name", calls(Fleet()))
def test_an_invalid_argument_is_named_and_changes_nothing(name: str) -> None:
    f = Fleet()
    before, num_tried = f.state(), 0
    for method, argument, value in wrongs():
        if method != name:
            continue
        act, arguments = calls(f)[name]
        with pytest.raises((ArgumentError, ConfigError, TokenError)) as refused:
            act(**{**arguments, argument: value})
            pytest.fail(f"{name}({argument}={value!r}) was taken")
        error: Any = refused.value
        told = (
            "token_ids" if isinstance(error, TokenError) else getattr(error, "argument", "") or error.setting
        )
        assert told == NAMED.get((name, argument), argument), (argument, value)
        num_tried += 1
    assert num_tried > 10 and f.state() == before


def test_valid_arguments_are_accepted() -> None:
    for act, arguments in calls(Fleet()).values():
        act(**arguments)


@pytest.mark.parametrize("job_id", ["", "x", "F" * 32, "1" * 31, "é" * 32])
def test_a_malformed_job_id_is_unknown(job_id: str) -> None:
    f = Fleet()
    assert f.a.job(job_id, "acme") is f.a.take_job(job_id, "acme") is None
    assert (
        not f.a.hand_job(job_id, f.b.info()) and not f.a.end_job(job_id) and not f.a.extend_job(job_id, "b")
    )
    assert not f.a.report_job(job_id, "done") and not f.a.give_up(job_id, f.job.parts[0], "x")
    f.a.forget_job(job_id)
    assert not f.a.state_pin("acme", job_id, "done")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", None), ("id", "x"), ("namespace_digest", "n" * 32), ("namespace_digest", b"n"), ("num_tokens", -1),
        ("num_tokens", 1.5), ("wanted", None), ("wanted", "0"), ("wanted", "=a,,b"), ("wanted", ["a"]),
    ],
)  # fmt: skip
def test_an_invalid_field_of_a_pin_is_named(field: str, value: Any) -> None:
    f = Fleet()
    before, bad = f.state(), replace(f.pin, **{field: value})
    for act in (f.a.keep_pin, f.a.end_pin):
        with pytest.raises(ArgumentError, match=rf"pin\.{field}="):
            act("acme", bad, 5.0)
    assert f.state() == before


def test_numbers_beyond_what_every_store_can_keep_are_refused() -> None:
    assert Load(MAX_AMOUNT).queued_prefill_tokens == MAX_AMOUNT
    with pytest.raises(ArgumentError, match="queued_prefill_tokens"):
        Load(MAX_AMOUNT + 1)
