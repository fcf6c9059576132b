"""The audit of a cache in this process: its verdict on a sound cache, and on one with a bug for each check.

The bugs are made from outside, in the cache's public calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from radixkv import CacheConfig, PrefixCache, Tenant
from radixkv.audit import inprocess
from radixkv.audit.inprocess import InProcess
from radixkv.audit.properties import has_loading, has_lossy
from radixkv.audit.verdict import Verdict
from radixkv.errors import ConfigError
from radixkv.index import ghost_keys
from radixkv.index.tokens import encode
from radixkv.tiers.host.index import HostIndex
from radixkv.tiers.ladder import Ladder
from tests.isolation.test_lossy_machine import LOSSY_BUGS, scales_of_another_vector

pytestmark = pytest.mark.slow

Check = Callable[[InProcess], inprocess.Found]


def audit_of(factory: Any, lives: int = 30, seed: int = 0) -> InProcess:
    return InProcess(factory, lives, 30, seed, lambda phase, done, of: None, shrink=False)


@pytest.fixture(autouse=True)
def _others_log_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check compares logs: threads that other tests left behind must not add to them."""
    others, handle = set(threading.enumerate()) - {threading.current_thread()}, logging.Logger.handle

    def handle_its(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.current_thread() not in others:
            handle(logger, record)

    monkeypatch.setattr(logging.Logger, "handle", handle_its)


@pytest.fixture
def _one_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one policy, with fewer repetitions."""
    monkeypatch.setattr(inprocess, "policy_names", lambda: ("lru",))
    monkeypatch.setattr(inprocess, "HAND_OVERS", 60)
    monkeypatch.setattr(inprocess, "TRIALS", 20)


class Unscrubbed(PrefixCache):
    """New blocks still hold the bytes of other tenants."""

    def __init__(self, config: CacheConfig, **named: Any) -> None:
        super().__init__(replace(config, scrub="never"), **named)


class OneForAll(PrefixCache):
    """The tenant is left out of the lookup."""

    def open(self, namespace: Any, *args: Any, **named: Any) -> Any:
        return super().open(namespace._replace(tenant="a"), *args, **named)

    def match(self, namespace: Any, *args: Any, **named: Any) -> Any:
        return super().match(namespace._replace(tenant="a"), *args, **named)


class Unsalted(PrefixCache):
    """The salt is left out of the lookup."""

    def open(self, namespace: Any, *args: Any, **named: Any) -> Any:
        return super().open(namespace._replace(salt=""), *args, **named)

    def match(self, namespace: Any, *args: Any, **named: Any) -> Any:
        return super().match(namespace._replace(salt=""), *args, **named)


class DigestTrusted(PrefixCache):
    """A prefix is identified by a digest that is computed piece by piece, like the keys of evicted segments."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.asked: dict[int, tuple[Any, Any]] = {}

    def match(self, namespace: Any, ids: Any) -> Any:
        state = ghost_keys.xxh3_64(namespace.framed())
        state.update(encode(ids))
        return super().match(*self.asked.setdefault(state.intdigest(), (namespace, ids)))


class HashTrusted(PrefixCache):
    """Namespaces are told apart only by their hashes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.first: dict[int, Any] = {}

    def open(self, namespace: Any, *args: Any, **named: Any) -> Any:
        return super().open(self.first.setdefault(hash(namespace), namespace), *args, **named)

    def match(self, namespace: Any, *args: Any, **named: Any) -> Any:
        return super().match(self.first.setdefault(hash(namespace), namespace), *args, **named)


class LastIdUnseen(PrefixCache):
    """The last id of a prompt is not compared."""

    def match(self, namespace: Any, ids: Any) -> Any:
        ids = list(ids)
        best = max((super(LastIdUnseen, self).match(namespace, [*ids[:-1], last]) for last in range(3)),
                   key=lambda match: match.num_tokens)  # fmt: skip
        return best if ids else super().match(namespace, ids)


class Counting(PrefixCache):
    """Matches are numbered across all tenants."""

    total = 0

    def open(self, *args: Any, **named: Any) -> Any:
        self.total += 1
        return super().open(*args, **named)

    def match(self, namespace: Any, ids: Any) -> Any:
        return _Numbered(super().match(namespace, ids), self.total)

    def lease(self, match: Any) -> Any:
        return super().lease(match.match)


class _Numbered:
    def __init__(self, match: Any, number: int) -> None:
        self.match, self.number = match, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.match, name)

    def __repr__(self) -> str:
        return f"match {self.number}"


class Talkative(PrefixCache):
    """Every request is logged, whichever tenant made it."""

    def open(self, namespace: Any, *args: Any, **named: Any) -> Any:
        logging.getLogger("radixkv.index.cache").warning("open of %s", namespace.tenant)
        return super().open(namespace, *args, **named)


class Silent(PrefixCache):
    """No match is ever found, so no control can detect anything."""

    def match(self, namespace: Any, ids: Any) -> Any:
        return super().match(namespace, [])


class Lossless(PrefixCache):
    """Host memory is exact, whatever the configuration says."""

    def __init__(self, config: CacheConfig, **named: Any) -> None:
        super().__init__(replace(config, tier_dtype="exact"), **named)


class Bottomless(PrefixCache):
    """There is nothing below, whatever the configuration says."""

    def __init__(self, config: CacheConfig, **named: Any) -> None:
        super().__init__(replace(config, host_blocks=0, tier_dtype="exact"), **named)


class ExactAlone(PrefixCache):
    """There is host memory below, and it says that none is lossy."""

    def __init__(self, config: CacheConfig, **named: Any) -> None:
        if config.tier_dtype != "exact":
            raise ConfigError("tier_dtype", config.tier_dtype, "'exact' in this engine")
        super().__init__(config, **named)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "check", "verdict"),
    [
        (PrefixCache, InProcess.laws, Verdict.ISOLATED),
        (PrefixCache, InProcess.host_memory, Verdict.ISOLATED),
        (PrefixCache, InProcess.lossy_memory, Verdict.ISOLATED),
        (PrefixCache, InProcess.two_runs, Verdict.ISOLATED),
        (PrefixCache, InProcess.cross_tenant_probe, Verdict.ISOLATED),
        (PrefixCache, InProcess.fresh_blocks, Verdict.ISOLATED),
        (PrefixCache, InProcess.short_digests, Verdict.ISOLATED),
        (PrefixCache, InProcess.token_boundaries, Verdict.ISOLATED),
        (PrefixCache, InProcess.names, Verdict.ISOLATED),
        (PrefixCache, InProcess.scrapes, Verdict.ISOLATED),
        (PrefixCache, InProcess.two_strict_runs, Verdict.ISOLATED),
        (PrefixCache, InProcess.two_strict_runs_below, Verdict.ISOLATED),
        (PrefixCache, InProcess.eviction_signal, Verdict.ISOLATED),
        (PrefixCache, InProcess.order, Verdict.ISOLATED),
        (OneForAll, InProcess.laws, Verdict.LEAKS),
        (OneForAll, InProcess.lossy_memory, Verdict.LEAKS),
        (OneForAll, InProcess.two_runs, Verdict.LEAKS),
        (OneForAll, InProcess.cross_tenant_probe, Verdict.LEAKS),
        (Unsalted, InProcess.cross_tenant_probe, Verdict.LEAKS),
        (Unscrubbed, InProcess.fresh_blocks, Verdict.LEAKS),
        (HashTrusted, InProcess.short_digests, Verdict.LEAKS),
        (DigestTrusted, InProcess.short_digests, Verdict.LEAKS),
        (LastIdUnseen, InProcess.token_boundaries, Verdict.LEAKS),
        (Counting, InProcess.names, Verdict.LEAKS),
        (Talkative, InProcess.scrapes, Verdict.LEAKS),
        (Silent, InProcess.cross_tenant_probe, Verdict.BLIND),
        (Lossless, InProcess.lossy_memory, Verdict.BLIND),
        (Bottomless, InProcess.host_memory, Verdict.BLIND),
        (Bottomless, InProcess.two_strict_runs_below, Verdict.BLIND),
        (Bottomless, InProcess.lossy_memory, Verdict.NOT_CHECKED),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.usefixtures("_one_policy")
def test_each_check_separates_a_sound_cache_from_one_with_its_bug(
    factory: Any, check: Check, verdict: Verdict
) -> None:
    lives = 600 if verdict is Verdict.LEAKS else 5  # the run ends with the first life that finds it
    found, detail, figures = inprocess.found_by(lambda: check(audit_of(factory, lives)))
    assert found is verdict, (detail, figures)
    assert detail and (figures or verdict in (Verdict.NOT_CHECKED, Verdict.BLIND))


@pytest.mark.release
@pytest.mark.parametrize("plant", LOSSY_BUGS, ids=lambda plant: plant.__name__)
def test_the_check_of_lossy_memory_finds_its_bugs(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lives that `radixkv audit run` plays by itself. The machine alone finds them in tests/isolation."""
    plant(monkeypatch)
    audit = InProcess(PrefixCache, 200, 50, 0, lambda phase, done, of: None, shrink=False)
    verdict, detail, figures = inprocess.found_by(audit.lossy_memory)
    assert verdict is Verdict.LEAKS and detail, figures


@pytest.mark.slow
@pytest.mark.usefixtures("_one_policy")
def test_a_bug_of_lossy_memory_is_the_verdict_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without shrinking the life that finds it, which takes minutes. The second life from this seed does."""
    scales_of_another_vector(monkeypatch)
    monkeypatch.setattr(inprocess, "InProcess", partial(InProcess, shrink=False))
    report = inprocess.run(PrefixCache, examples=3, steps=50, seed=1)
    assert report.verdict is Verdict.LEAKS and report.exit_code == 1
    leaks = {check.name for check in report.checks if check.verdict is Verdict.LEAKS}
    assert leaks == {"laws and contents, lossy host memory below"}


class Refusing(PrefixCache):
    """There is nothing below, and it says so."""

    def __init__(self, config: CacheConfig, **named: Any) -> None:
        if config.host_blocks:
            raise ConfigError("host_blocks", config.host_blocks, "0: this engine has no host memory")
        super().__init__(config, **named)


@pytest.mark.usefixtures("_one_policy")
def test_slots_that_a_strict_tenant_shares_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ladder, "_set_own_slots", lambda self, tenant, num_slots: None)
    monkeypatch.setattr(HostIndex, "_pool_number", lambda self, tenant: 0)
    verdict, detail, figures = inprocess.found_by(audit_of(PrefixCache, 60, seed=2).two_strict_runs_below)
    assert verdict is Verdict.LEAKS, (detail, figures)


@pytest.mark.usefixtures("_one_policy")
def test_a_cache_that_refuses_host_memory_has_no_check_of_it() -> None:
    assert has_loading(PrefixCache) and not has_loading(Refusing) and not has_lossy(Refusing)
    report = inprocess.run(Refusing, examples=1, steps=2)
    assert report.checks and not [check.name for check in report.checks if "host memory" in check.name]


def test_a_cache_that_refuses_lossy_memory_has_no_check_of_it() -> None:
    assert has_lossy(PrefixCache)
    assert not has_lossy(ExactAlone)


def test_bits_of_burst_mode_are_measured_and_not_judged() -> None:
    verdict, detail, figures = audit_of(PrefixCache).burst_bits()
    assert verdict is None and "bits" in detail
    assert 0 <= figures["bits"]["low"] <= figures["bits"]["estimate"] <= figures["bits"]["high"] <= 1


@pytest.mark.slow
def test_a_full_run_reports_every_check_and_its_progress() -> None:
    told: list[tuple[str, int, int]] = []
    report = inprocess.run(PrefixCache, examples=1, steps=10, progress=lambda *each: told.append(each))
    assert [check.number for check in report.checks] == [1, 1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12]
    assert told and all(0 < done <= of + 1 for _, done, of in told)
    assert all(check.detail and check.seconds >= 0 for check in report.checks)
    assert not [check for check in report.checks if check.verdict is Verdict.LEAKS]


def test_a_check_of_a_failing_cache_is_inconclusive() -> None:
    class Broken(PrefixCache):
        def match(self, namespace: Any, ids: Any) -> Any:
            raise KeyError("lost")

    verdict, detail, _ = inprocess.found_by(audit_of(Broken).cross_tenant_probe)
    assert verdict is Verdict.INCONCLUSIVE and "KeyError: 'lost'" in detail


def test_checks_that_need_strict_tenants_say_so() -> None:
    audit = audit_of(lambda config, **named: Untenanted(PrefixCache(config, **named)))
    for check in (audit.two_strict_runs, audit.two_strict_runs_below, audit.eviction_signal, audit.order):
        verdict, detail, _ = check()
        assert verdict is Verdict.NOT_CHECKED and "strict" in detail


@pytest.mark.slow
@pytest.mark.usefixtures("_one_policy")
def test_a_run_without_strict_tenants_names_the_omitted_checks() -> None:
    report = inprocess.run(
        lambda config, **named: Untenanted(PrefixCache(config, **named)), examples=1, steps=2
    )
    assert {1, 2, 11} <= {check.number for check in report.not_checked}
    assert report.verdict is not Verdict.ISOLATED


class Untenanted:
    """A cache without ``add_tenant``."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        if name == "add_tenant":
            raise AttributeError(name)
        return getattr(self.cache, name)


class OnlyInName(PrefixCache):
    """It accepts strict tenants but lets them borrow."""

    def add_tenant(self, tenant: Any) -> None:
        """Do nothing."""


class Borrowing(PrefixCache):
    """Strict tenants have a limit, but their guarantee is forgotten."""

    def add_tenant(self, tenant: Tenant) -> None:
        super().add_tenant(Tenant(tenant.id, max_blocks=2 * tenant.guaranteed_blocks))


@pytest.mark.parametrize("factory", [OnlyInName, Borrowing])
def test_tenants_that_are_strict_only_in_name_are_detected(factory: Any) -> None:
    audit = audit_of(factory, lives=300)  # the run ends with the first life that finds it
    for check in (audit.two_strict_runs, audit.eviction_signal, audit.order):
        verdict, detail, figures = inprocess.found_by(check)
        assert verdict is Verdict.LEAKS, (detail, figures)
