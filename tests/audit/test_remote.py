"""The audit over HTTP: OpenAI-compatible servers that isolate, that leak, and that cannot be judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.audit import remote
from radixkv.audit import target as target_module
from radixkv.audit.identity import ALMOST, NAMED
from radixkv.audit.probe_prompts import unknown_at_most
from radixkv.audit.target import Principal, Target, TargetError
from radixkv.audit.timing import TimingPlan
from radixkv.audit.verdict import AuditReport, Verdict
from radixkv.errors import ArgumentError, ConfigError
from tests.audit.openai_server import Behaviour, openai_server

pytestmark = pytest.mark.slow

PLAN = TimingPlan(samples=40, control=30, prompt_words=4)


def audited(behaviour: Behaviour, sides: Any = ("key-a", "key-b"), **named: Any) -> AuditReport:
    """The audit's report about a server, measured with that server's clock."""
    with openai_server(behaviour) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            target_module,
            "time",
            SimpleNamespace(perf_counter=behaviour.clock, sleep=behaviour.clock.advance),
        )
        return remote.run(url, sides, PLAN, probes=3, **named)


@pytest.mark.slow
def test_a_server_that_isolates() -> None:
    report = audited(Behaviour())
    verdicts = {check.number: check.verdict for check in report.checks}
    assert verdicts[3] is verdicts[7] is verdicts[8] is Verdict.ISOLATED
    assert verdicts[9] is None and verdicts[12] is None
    assert verdicts[10] in (Verdict.INCONCLUSIVE, Verdict.ISOLATED), "40 samples are too few to decide"
    sizes = report.check(10).figures
    assert (sizes["num_hits"], sizes["num_own_misses"]) == (30, 30)
    assert (sizes["num_cross"], sizes["num_misses"]) == (40, 40) and not sizes["stopped_early"]
    assert {arm: len(times) for arm, times in report.samples.items()} == {
        "hit": 30, "own_miss": 30, "cross": 40, "miss": 40,
    }  # fmt: skip
    assert report.settings["timing"]["stopping_rule"] and report.settings["timing"]["samples"] == 40


@pytest.mark.slow
def test_a_server_that_shares_its_cache_leaks_by_content_and_by_time() -> None:
    report = audited(Behaviour(shares=True))
    assert report.verdict is Verdict.LEAKS and report.exit_code == 1
    assert report.check(3).verdict is Verdict.LEAKS and report.check(3).figures["leaks"] == 3
    timing = report.check(10)
    assert timing.verdict is Verdict.LEAKS and timing.figures["auc"]["low"] > 0.52
    assert timing.figures["stopped_early"] and timing.figures["num_cross"] < 40
    assert report.check(12).figures["cross"]["low"] > 0.2


@pytest.mark.slow
def test_without_counts_only_timing_shows_a_leak() -> None:
    report = audited(Behaviour(shares=True, tells_cached=False))
    assert report.check(3).verdict is Verdict.INCONCLUSIVE
    assert report.check(10).verdict is Verdict.LEAKS


def test_a_server_without_a_cache_leaves_the_instrument_blind() -> None:
    report = audited(Behaviour(caches=False))
    assert report.check(3).verdict is Verdict.BLIND
    assert report.check(9).verdict is report.check(10).verdict is Verdict.BLIND
    assert report.verdict is Verdict.BLIND and "cross" in report.samples and not report.samples["cross"]


@pytest.mark.slow
def test_open_metrics_of_all_tenants_are_a_leak() -> None:
    report = audited(Behaviour(global_metrics=True), timing=False)
    assert report.check(7).verdict is Verdict.LEAKS
    assert any("tokens #" in line for line in report.check(7).figures["changed"]), report.check(7)


@pytest.mark.slow
def test_ids_that_count_all_requests_are_a_leak() -> None:
    assert audited(Behaviour(counts_in_ids=True), timing=False).check(8).verdict is Verdict.LEAKS


@pytest.mark.slow
def test_chat_only_servers_and_busy_ones() -> None:
    report = audited(Behaviour(chat_only=True, shares=True, busy_every=7))
    assert report.check(3).verdict is report.check(10).verdict is Verdict.LEAKS
    assert report.check(10).figures["num_busy_retries"] > 0


SALTS = (Principal.salted("rks1.salt-of-a"), Principal.salted("rks1.salt-of-b"))


def test_an_engine_without_keys_is_audited_with_two_salts() -> None:
    report = audited(Behaviour(salt_chars=64), sides=SALTS, timing=False)
    found = {check.name: check for check in report.checks if check.number == 3}
    assert {check.verdict for check in found.values()} <= {Verdict.ISOLATED, Verdict.NOT_CHECKED}
    assert found[ALMOST].verdict is Verdict.ISOLATED
    assert found[ALMOST].figures.keys() == {
        "A's salt in another case", "A's salt without its end", "A's salt with more characters at its end", "no salt",
    }  # fmt: skip
    assert "the field cache_salt" not in found[NAMED].figures["refused"]
    assert report.verdict is Verdict.PARTIAL, "there are no pins, jobs and timings to check"


@pytest.mark.parametrize(("chars", "name"), [(0, "cross-tenant probe"), (12, ALMOST)])
def test_an_engine_that_reads_only_part_of_a_salt_leaks(chars: int, name: str) -> None:
    salts = SALTS if not chars else tuple(Principal.salted(f"{who}1.salt-of-{who}") for who in "ab")
    report = audited(Behaviour(salt_chars=chars), sides=salts, timing=False)
    assert report.verdict is Verdict.LEAKS
    assert name in {check.name for check in report.checks if check.verdict is Verdict.LEAKS}


def test_the_audit_ignores_proxy_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    behaviour = Behaviour()
    with openai_server(behaviour) as url, Target(f"{url}/v1/", "key") as target:
        assert target.complete("a b c").prompt_tokens == 3
        assert target.first_token_s("a b c") > 0


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError):
        Target("localhost", "key")
    with pytest.raises(ArgumentError):
        remote.run("http://127.0.0.1:9", ("same", "same"), PLAN)
    with pytest.raises(TargetError, match="can't be reached"):
        remote.run("http://127.0.0.1:9", ("a", "b"), PLAN)
    for named in ({"samples": 5}, {"control": 1}, {"prompt_words": 0}, {"margin": 0.5}):
        with pytest.raises(ArgumentError):
            TimingPlan(**named)
    with openai_server(Behaviour()) as url, Target(url, "key", model="another") as target:
        with pytest.raises(TargetError, match="400"):
            target.complete("x")
        with pytest.raises(TargetError, match="400"):
            target.first_token_s("x")


def test_a_few_shared_first_tokens_are_chance() -> None:
    """Of caches that find tokens inside blocks. A quarter of a short prompt is a leak."""
    assert unknown_at_most([0, 1, 0], 84) == 9
    assert unknown_at_most([16, 16], 84) == 24
    assert unknown_at_most([0, 30], 84) == 60
    assert unknown_at_most([0, 0], 12) == 3
