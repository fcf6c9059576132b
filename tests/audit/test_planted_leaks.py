"""Each planted leak is found by its check, a sound server of the same kind is clean, and a blind probe is reported."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest

from radixkv.audit import remote
from radixkv.audit.scrapes import QUOTES
from radixkv.audit.timing import TimingPlan
from radixkv.audit.verdict import AuditReport, Check, Verdict
from tests.audit.planted_server import OPERATOR, PlantedServer, in_place_of_a_socket

pytestmark = pytest.mark.slow

PLAN = TimingPlan(samples=20, control=20, prompt_words=4)
CROSSING = "cross-tenant probe"
NAMED = f"{CROSSING}, tenants named by the client"
ALMOST = f"{CROSSING}, keys that are almost A's"
BASES = f"{CROSSING}, bases"
SCRAPED = "errors and metrics"
LEAKS = {
    "no salt": CROSSING,
    "the same salt": f"{CROSSING}, a salt",
    "an adapter": f"{CROSSING}, an adapter",
    "an adapter without a salt": f"{CROSSING}, an adapter",
    "a salt is a tenant": f"{CROSSING}, a salt",
    "salts and adapters are one": f"{CROSSING}, two namespaces",
    "long prompts": f"{CROSSING}, no salt",
    "prompts as ids": f"{CROSSING}, no salt",
    "messages": f"{CROSSING}, no salt",
    "streams": f"{CROSSING}, no salt",
    "two choices": f"{CROSSING}, no salt",
    "echoes": f"{CROSSING}, no salt",
    "batches": f"{CROSSING}, no salt",
    "the second use": f"{CROSSING}, no salt",
    "warms share": f"{CROSSING}, no salt",
    "jobs share": f"{CROSSING}, no salt",
    "pins share": f"{CROSSING}, no salt",
    "lookups": f"{CROSSING}, no salt",
    "lookups of messages": f"{CROSSING}, no salt",
    "warms tell": f"{CROSSING}, no salt",
    "routes": f"{CROSSING}, no salt",
    "predictions": f"{CROSSING}, no salt",
    "pins": f"{CROSSING}, no salt",
    "a header": f"{CROSSING}, no salt",
    "bases for all": BASES,
    "bases outlive": BASES,
    "the header X-Tenant": NAMED,
    "the header X-Tenant of tenants": NAMED,
    "the field tenant": NAMED,
    "the field user": NAMED,
    "the field cache_salt": NAMED,
    "a parameter": NAMED,
    "keys in any case": ALMOST,
    "keys compared by their beginning": ALMOST,
    "no key is the first tenant": ALMOST,
    "stats": SCRAPED,
    "stats of a header": SCRAPED,
    "metrics": SCRAPED,
    "tenants": SCRAPED,
    "text": SCRAPED,
    "pins listed": "handles, pins",
    "a pin ended by id": "handles, pins",
    "a pin renewed by id": "handles, pins",
    "pins exist": "handles, pins",
    "jobs": "handles, jobs",
    "jobs exist": "handles, jobs",
    "jobs listed": QUOTES,
    "Idempotency-Key": "handles, Idempotency-Key",
    "errors quote the last prompt": QUOTES,
    "a clear of all": "what A's clear forgets, everything",
    "a clear of a salt": "what A's clear forgets, a salt",
}


def audited(server: PlantedServer, probes: int = 2, **named: Any) -> AuditReport:
    options = remote.Options(operator_key=OPERATOR, tenant_names=("acme", "globex"))
    with in_place_of_a_socket(server) as url:
        keys = ("Key-a", "Key-b")
        return remote.run(url, keys, PLAN, probes=probes, timing=False, **{"options": options, **named})


def verdicts(report: AuditReport) -> dict[str, Verdict | None]:
    return {check.name: check.verdict for check in report.checks}


def reports(row: str, check: str) -> bool:
    """Whether this row of the audit reports a check. All of them contribute to the check of quotes."""
    if row == f"{CROSSING}, every way":
        return check.startswith(CROSSING) and check not in (NAMED, ALMOST, BASES)
    return check.startswith(row) or check == QUOTES


@pytest.mark.parametrize("leak", LEAKS)
def test_each_planted_leak_is_found_by_its_check(leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the audit that report other checks are left out: most of its time."""
    each = remote._each

    def alone(number: int, row: str, check: Any) -> list[Check]:
        return each(number, row, check) if reports(row, LEAKS[leak]) else []

    monkeypatch.setattr(remote, "_each", alone)
    report = audited(PlantedServer(leak))
    assert verdicts(report)[LEAKS[leak]] is Verdict.LEAKS, {
        check.name: (str(check.verdict), check.detail) for check in report.checks
    }
    assert report.verdict is Verdict.LEAKS and report.exit_code == 1


def test_a_sound_server_is_isolated_in_every_check_but_timing() -> None:
    report = audited(PlantedServer())
    assert {check.number for check in report.not_checked} == {9, 10, 12}, report.not_checked
    assert set(verdicts(report).values()) == {Verdict.ISOLATED, Verdict.NOT_CHECKED}
    assert report.verdict is Verdict.PARTIAL and str(report.verdict) == "isolated in what was checked"
    assert report.exit_code == 6


@pytest.mark.parametrize("num_a_step", range(20, 61, 4))
def test_what_a_tenants_own_rate_leaves_is_no_leak(num_a_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the same while A alone asks, and another after B acted, because time went by or A asked more."""
    each = remote._each
    monkeypatch.setattr(
        remote, "_each", lambda number, row, check: each(number, row, check) if row == SCRAPED else []
    )
    found = verdicts(audited(PlantedServer(num_a_step=num_a_step)))
    assert found[SCRAPED] is Verdict.ISOLATED


def test_very_long_prompts_and_every_pair_of_surfaces_need_more_probes() -> None:
    assert audited(PlantedServer("very long prompts"), probes=10).verdict is Verdict.LEAKS
    sound = audited(PlantedServer(), probes=10)
    assert sound.verdict is Verdict.PARTIAL, [
        each for each in sound.checks if each.verdict is not Verdict.ISOLATED
    ]


def one_word(text: str) -> list[int]:
    """A tokenizer that knows no word: texts of equal length have equal ids."""
    return [0] * len(text.split()) * 8


def only_digits(text: str) -> list[int]:
    """A tokenizer that knows only digits. Each other character is one unknown token."""
    return [ord(each) if each.isdigit() else 0 for each in text]


def only_letters(text: str) -> list[int]:
    """A tokenizer that knows only lower-case letters."""
    return [ord(each) if each.islower() else 0 for each in text]


@pytest.mark.parametrize("tokenizer", [only_digits, only_letters])
def test_prompts_differ_for_tokenizers_that_know_little(tokenizer: Callable[[str], list[int]]) -> None:
    assert audited(PlantedServer(tokenizer=tokenizer)).check(3).verdict is Verdict.ISOLATED
    assert audited(PlantedServer("no salt", tokenizer=tokenizer)).check(3).verdict is Verdict.LEAKS


@pytest.mark.parametrize("leak", [None, "no salt"])
def test_prompts_with_equal_ids_leave_the_probe_blind(leak: str | None) -> None:
    """Text cannot show whether it leaks. Ids can."""
    report = audited(PlantedServer(leak, tokenizer=one_word))
    base = next(check for check in report.checks if check.name == CROSSING)
    assert base.verdict is Verdict.BLIND and "mostly cached" in base.detail
    assert report.verdict is (Verdict.BLIND if leak is None else Verdict.LEAKS)


def test_missing_caches_and_counts_leave_the_probe_blind() -> None:
    report = audited(PlantedServer(caches=False))
    assert report.check(3).verdict is Verdict.BLIND and report.verdict is Verdict.BLIND
    uncounted = audited(PlantedServer(counts_prompts=False))
    assert uncounted.verdict is Verdict.BLIND and "doesn't grow" in uncounted.check(3).detail


def test_short_prompts_are_lengthened_until_they_are_cached() -> None:
    server = PlantedServer(tokenizer=lambda text: [zlib.crc32(each.encode()) for each in text.split()])
    report = audited(server)
    base = next(check for check in report.checks if check.name == CROSSING)
    assert base.verdict is Verdict.ISOLATED and base.figures["prompt_words"] > PLAN.prompt_words


def test_a_server_that_never_reports_cached_tokens_is_not_isolated() -> None:
    report = audited(PlantedServer(tells=False))
    assert report.check(3).verdict is Verdict.INCONCLUSIVE and report.verdict is Verdict.INCONCLUSIVE


ABSENT = {
    "/v1/pins": ("cross-tenant probe, a pin", "handles, pins"),
    "/v1/warm": ("cross-tenant probe, a warm", "handles, jobs", "handles, Idempotency-Key"),
    "/v1/lookup": ("cross-tenant probe, a lookup",),
    "/v1/route": ("cross-tenant probe, a route",),
    "/v1/cache": ("what A's clear forgets, a salt", "what A's clear forgets, everything"),
    "/v1/bases": (BASES,),
}


@pytest.mark.parametrize(
    "paths", [tuple(ABSENT), *(pytest.param((path,), marks=pytest.mark.release) for path in ABSENT)], ids=str
)
def test_missing_endpoints_are_named(paths: tuple[str, ...]) -> None:
    report = audited(PlantedServer(absent=paths))
    named = {check.name for check in report.not_checked}
    assert named >= {name for path in paths for name in ABSENT[path]} and report.verdict is Verdict.PARTIAL
    assert all(check.detail for check in report.not_checked)


def test_without_the_operators_key_bases_are_not_checked() -> None:
    report = audited(PlantedServer(), options=remote.Options())
    assert BASES in {check.name for check in report.not_checked}


def test_the_audit_does_not_clear_a_tenant_with_cached_prompts() -> None:
    server = PlantedServer()
    server.known["acme", "", ""] = {1}
    report = audited(server)
    assert server.known["acme", "", ""] >= {1} and server.known.get(("globex", "", "")) is None
    assert "what A's clear forgets, everything" in {check.name for check in report.not_checked}
