"""The adapter protocol: the ten lines of the example, engines that leak, and every optional call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from examples import audit_your_engine
from radixkv import ArgumentError, CacheConfig, PrefixCache
from radixkv.audit import properties
from radixkv.audit.properties import CacheAdapter
from radixkv.clock import ManualClock


class DictEngine:
    """A prefix cache in a dict, with every call that an adapter may have."""

    block_size = 8
    shares, reads_other, remembers, tells = False, False, False, False

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], None] = {}
        self.count = 0

    def _key(self, namespace: Any) -> Any:
        return namespace[1:] if self.shares else namespace

    def match(self, namespace: Any, ids: Sequence[int]) -> int:
        size, found = self.block_size, 0
        while found + size <= len(ids) and (self._key(namespace), *ids[: found + size]) in self.known:
            found += size
        return found

    def open(self, namespace: Any, ids: Sequence[int]) -> tuple[Any, int]:
        self.count += 1
        request = {"namespace": namespace, "ids": list(ids), "number": self.count}
        return request, min(self.match(namespace, ids), max(len(ids) - 1, 0) // 8 * 8)

    def commit(self, request: Any, num_tokens: int) -> None:
        for stop in range(8, num_tokens + 1, 8):
            self.known[(self._key(request["namespace"]), *request["ids"][:stop])] = None

    def release(self, request: Any) -> None:
        request.clear()

    def append(self, request: Any, token_id: int) -> None:
        request["ids"].append(token_id)

    def truncate(self, request: Any, num_tokens: int) -> None:
        del request["ids"][num_tokens:]

    def fork(self, request: Any) -> Any:
        return {**request, "ids": list(request["ids"])}

    def clear(self, namespace: Any) -> int:
        gone = [key for key in self.known if key[0] == self._key(namespace) and not self.remembers]
        for key in gone:
            del self.known[key]
        return len(gone)

    def purge(self, tenant: str) -> None:
        for key in [key for key in self.known if key[0][0] == tenant and not self.remembers]:
            del self.known[key]

    def read(self, request: Any, num_tokens: int) -> bytes:
        shown = repr(request["ids"][:num_tokens])
        return (shown + str(len(self.known)) if self.reads_other else shown).encode()

    def stats(self, tenant: str) -> Any:
        return self.count if self.tells else sum(key[0][0] == tenant for key in self.known)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ({}, None),
        ({"shares": True}, "never committed|A observes|depend"),
        ({"reads_other": True}, "other bytes|depend"),
        ({"remembers": True}, "never committed"),
        ({"tells": True}, "depend on B"),
    ],
    ids=str,
)
def test_an_engine_behind_an_adapter(bug: dict[str, bool], said: str | None) -> None:
    engine = type("Engine", (DictEngine,), bug)
    report = properties.run_adapter(engine, 30, 40, shrink=False)
    if said is None:
        assert report.ok, report.failure
        assert report.examples >= 30 and report.steps > 500
    else:
        assert report.failure is not None
        assert any(each in report.failure for each in said.split("|")), report.failure


@pytest.mark.slow
def test_four_calls_are_enough() -> None:
    class Bare:
        block_size = 8

        def __init__(self) -> None:
            engine = DictEngine()
            self.match, self.open, self.commit, self.release = (
                engine.match, engine.open, engine.commit, engine.release,
            )  # fmt: skip

    report = properties.run_adapter(Bare, 15, 30)
    assert report.ok, report.failure


@pytest.mark.slow
def test_radixkv_behind_its_adapter_in_a_large_and_in_a_small_pool() -> None:
    def roomy() -> CacheAdapter:
        return CacheAdapter(PrefixCache(CacheConfig(num_blocks=512, block_size=4)))

    def tiny() -> CacheAdapter:
        return CacheAdapter(PrefixCache(CacheConfig(num_blocks=12, block_size=4), clock=ManualClock()))

    assert properties.run_adapter(roomy, 15, 40).ok
    assert properties.run_adapter(tiny, 15, 40, contents_only=True).ok
    report = properties.run_adapter(tiny, 40, 50, shrink=False)
    assert report.failure is not None, "in a full pool of burst tenants, one tenant can see how full it is"


@pytest.mark.slow
def test_a_refusal_is_observed_and_any_other_error_is_a_finding() -> None:
    class Full(DictEngine):
        def open(self, namespace: Any, ids: Sequence[int]) -> tuple[Any, int]:
            if len(ids) > 12:
                raise BufferError("no room")
            return super().open(namespace, ids)

    class Declared(Full):
        refusals = (BufferError,)

    assert properties.run_adapter(Declared, 15, 30).ok
    failure = properties.run_adapter(Full, 40, 30, shrink=False).failure
    assert failure is not None and "BufferError: no room" in failure


@pytest.mark.slow
def test_the_ten_lines_of_the_example() -> None:
    assert audit_your_engine.audit(examples=15).ok


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("policies", ("lru", "nope")),
        ("policies", ()),
        ("modes", ("lax",)),
        ("with_storage", ()),
        ("max_examples", 0),
        ("max_examples", 1.5),
        ("steps", True),
    ],
)
def test_an_invalid_run_is_an_error_and_no_finding(argument: str, wrong: Any) -> None:
    with pytest.raises(ArgumentError) as told:
        properties.run(PrefixCache, **{argument: wrong})
    assert (told.value.argument, told.value.value) == (argument, wrong)
