"""Each check stands alone: a server that fails, or a stop, ends checks, and never what others found."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest

from radixkv import PrefixCache
from radixkv.audit import handles, inprocess, operators, remote
from radixkv.audit.crossing import EVERY_WAY
from radixkv.audit.handles import Handles
from radixkv.audit.identity import ALMOST, NAMED, Identity
from radixkv.audit.limit import Limit, Stopped
from radixkv.audit.probe_prompts import Prompts
from radixkv.audit.remote import Row
from radixkv.audit.scrapes import NAME as SCRAPED
from radixkv.audit.scrapes import Scrapes
from radixkv.audit.target import Target
from radixkv.audit.timing import NAMES, TimingAudit, TimingPlan
from radixkv.audit.verdict import EXIT_CODES, Check, Verdict, alone, not_checked, worst
from radixkv.clock import ManualClock
from tests.audit.openai_server import Behaviour
from tests.audit.planted_server import OPERATOR, PlantedServer, in_place_of_a_socket
from tests.audit.test_remote import audited

pytestmark = pytest.mark.slow

CROSSING = "cross-tenant probe"


def by_number(checks: Any) -> dict[int, Check]:
    return {check.number: check for check in checks}


# a server that leaks, and fails in the timing part


@pytest.mark.parametrize(
    ("at_streams", "said"),
    [
        ("no stream", "doesn't stream"),
        ("refused", "answered 400"),
        ("busy", "stayed busy: it answered 429"),
        ("dies", "can't be reached"),
    ],
)
def test_a_leak_stays_if_the_timing_part_fails(
    at_streams: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_each", lambda *_: [])  # of the checks by counts, the first is enough
    report = audited(Behaviour(shares=True, at_streams=at_streams))
    assert report.verdict is Verdict.LEAKS and report.exit_code == 1
    found = by_number(report.checks)
    assert found[3].verdict is Verdict.LEAKS and "3 of 3 prompts" in found[3].detail
    for number in NAMES:
        assert found[number].verdict is Verdict.NOT_CHECKED
    assert said in found[9].detail and said not in found[10].detail, "each reason once"


def test_a_server_that_never_completes_has_no_verdict() -> None:
    server = PlantedServer(absent=("/v1/completions", "/v1/chat/completions"))
    with in_place_of_a_socket(server) as url, pytest.raises(remote.TargetError):
        remote.run(url, ("Key-a", "Key-b"), TimingPlan(), timing=False)


# one that fails in any request of any check


def row_of(name: str, url: str, limit: Limit | None = None) -> tuple[list[Target], Row]:
    """One check of a planted server, and its targets."""
    a, b = (Target(url, key, limit=limit) for key in ("Key-a", "Key-b"))
    operator = Target(url, OPERATOR, limit=limit)
    prompts = Prompts(12)
    identity = Identity(a, b, prompts, "text", ["globex"])
    handled = Handles(a, b, prompts, "text")
    rows: dict[str, Row] = {
        NAMED: partial(identity.named, "zq000000000000"),
        ALMOST: identity.almost,
        operators.NAME: partial(operators.bases, a, b, operator, prompts, "text"),
        SCRAPED: lambda _: Scrapes(a, b, prompts, "text", []).check(),
        handles.NAMES_NAME: lambda _: handles.names(a, b, prompts),
        handles.PINS: handled.pins,
        handles.JOBS: handled.jobs,
        handles.KEYS: handled.idempotency,
        handles.CLEARS: lambda _: handled.clears(True),
    }
    a.endpoint(), b.endpoint()
    return [a, b, operator], rows[name]


def result(
    name: str, leak: str | None, fails_after: float = float("inf"), failure: str = "dies"
) -> tuple[list[Check], int]:
    """The checks of one row, and the requests that they made, if the server fails after so many of them."""
    server = PlantedServer(leak)
    with in_place_of_a_socket(server) as url:
        _, row = row_of(name, url)
        before = server.num_requests
        server.fails_from, server.failure = before + fails_after, failure
        checks = alone(8, name, row)
    return checks, server.num_requests - before


ROWS = (NAMED, ALMOST, operators.NAME, SCRAPED, handles.NAMES_NAME, handles.PINS, handles.JOBS, handles.KEYS,
        handles.CLEARS)  # fmt: skip
LEAKS = {
    "the field tenant": NAMED,
    "keys in any case": ALMOST,
    "bases for all": operators.NAME,
    "pins exist": handles.PINS,
    "pins listed": handles.PINS,
    "jobs exist": handles.JOBS,
    "a clear of a salt": handles.CLEARS,
}


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["dies", "busy", "broken"])
@pytest.mark.parametrize("name", ROWS)
def test_a_sound_server_that_fails_is_not_checked(name: str, failure: str, monkeypatch: Any) -> None:
    """After any of its requests. It is never called isolated, leaking or blind because it stopped answering."""
    monkeypatch.setattr("radixkv.audit.target.time.sleep", lambda seconds: None)
    whole, num_requests = result(name, None)
    assert {check.verdict for check in whole} == {Verdict.ISOLATED}
    # the last requests of these remove what they made
    cleaning = {handles.PINS: 2, operators.NAME: 2, SCRAPED: 20}.get(name, 0)
    step = max(num_requests // 12, 1)
    for fails_after in range(0, num_requests - cleaning, step):
        checks, _ = result(name, None, fails_after, failure)
        done = [check for check in checks if check.verdict is not Verdict.NOT_CHECKED]
        assert len(done) < len(checks), (fails_after, checks)
        assert {check.verdict for check in done} <= {Verdict.ISOLATED}, (fails_after, done)
        assert all(check.detail for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_stays_if_its_check_fails_later(leak: str) -> None:
    whole, num_requests = result(LEAKS[leak], leak)
    assert Verdict.LEAKS in {check.verdict for check in whole}
    checks, _ = result(LEAKS[leak], leak, num_requests - 3)
    leaking = [check for check in checks if check.verdict is Verdict.LEAKS]
    assert leaking and leaking[0].detail


def test_a_check_that_raises_anything_is_not_checked() -> None:
    def odd(leaks: list[str]) -> Check:
        raise KeyError("job")

    def late(leaks: list[str]) -> Check:
        leaks.append("A could")
        raise ValueError("odd")

    (check,) = alone(8, "handles", odd)
    assert check.verdict is Verdict.NOT_CHECKED and "KeyError: 'job'" in check.detail
    (check,) = alone(8, "handles", late)
    assert check.verdict is Verdict.LEAKS and check.detail.startswith("A could (then the check ended")


# ids of completions


@pytest.mark.parametrize("name", ["cmpl-0", ""])
def test_constant_ids_are_not_applicable(name: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        return httpx.Response(200, json={"id": name, "choices": [{"text": "x"}], "usage": usage})

    server: Any = answer
    with in_place_of_a_socket(server) as url:
        check = handles.names(Target(url, "a"), Target(url, "b"), Prompts(4))
    assert check.verdict is Verdict.NOT_APPLICABLE and check.detail
    assert worst([Verdict.ISOLATED, check.verdict, None]) is Verdict.ISOLATED
    assert worst([Verdict.NOT_CHECKED, check.verdict]) is Verdict.INCONCLUSIVE
    assert set(EXIT_CODES) == set(Verdict) - {Verdict.NOT_CHECKED}


@pytest.mark.slow
def test_a_server_with_constant_ids_is_isolated() -> None:
    report = audited(Behaviour(constant_ids=True), timing=False)
    assert report.check(8).verdict is Verdict.NOT_APPLICABLE, "pins and jobs are absent"
    assert report.verdict is Verdict.PARTIAL


# stops


def stopping(limit: Limit, phase: str) -> remote.Progress:
    """A progress that stops the audit as a signal does, when a check begins."""

    def progress(name: str, done: int, of: int) -> None:
        if name == phase and limit.stopped is None:
            limit.stop("Ctrl-C")

    return progress


@pytest.mark.parametrize("phase", [CROSSING, EVERY_WAY, f"{EVERY_WAY}, tried", SCRAPED, handles.PINS])
def test_a_stopped_audit_reports_what_it_knows(phase: str) -> None:
    server, limit = PlantedServer("no salt"), Limit()
    with in_place_of_a_socket(server) as url:
        plan, progress = TimingPlan(prompt_words=4), stopping(limit, phase)
        report = remote.run(url, ("Key-a", "Key-b"), plan, probes=2, progress=progress, limit=limit)
    base = next(check for check in report.checks if check.name == CROSSING)
    assert base.verdict is Verdict.LEAKS and report.exit_code == 1
    for number in (*NAMES, 8):
        assert report.check(number).verdict is Verdict.NOT_CHECKED or phase == handles.PINS
    assert any("stopped by Ctrl-C" in check.detail for check in report.not_checked)
    own = {space[0] for space in server.known} & {"acme", "globex"}
    assert not own, "it cleared what it had cached"


def test_a_stop_before_the_first_check_says_so() -> None:
    limit = Limit()
    limit.stop("SIGTERM")
    with in_place_of_a_socket(PlantedServer("no salt")) as url:
        report = remote.run(url, ("Key-a", "Key-b"), TimingPlan(), limit=limit)
    assert {check.detail for check in report.checks} == {"stopped by SIGTERM"}
    assert {check.number for check in report.checks} == {3, 9, 10, 12}
    assert report.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("name", [handles.PINS, operators.NAME])
def test_a_stopped_check_removes_what_it_made(name: str) -> None:
    """After any of its requests."""
    _, num_requests = result(name, None)
    for stops_after in range(num_requests):
        server, limit = PlantedServer(), Limit()
        with in_place_of_a_socket(server) as url:
            targets, row = row_of(name, url, limit)
            before, seen = server.num_requests, list[int]()

            def at_exchange(_: httpx.Response) -> None:
                seen.append(server.num_requests - before)  # noqa: B023 - called in this round only
                if seen[-1] == stops_after + 1:  # noqa: B023
                    limit.stopped = "stopped by Ctrl-C"  # noqa: B023

            for target in targets:
                target.on_exchange = at_exchange
            alone(8, name, row)
        assert not server.pins and not server.bases, stops_after


def test_a_signal_interrupts_only_a_wait() -> None:
    limit = Limit()
    with limit.waiting(), pytest.raises(Stopped, match="by Ctrl-C"):
        limit.stop("Ctrl-C")
    again = Limit()
    again.stop("SIGTERM")
    with pytest.raises(Stopped, match="by SIGTERM"):
        again.check()
    with again.cleaning():
        again.check()
    with pytest.raises(Stopped), again.waiting():
        pass


# the limit of time


class Slow(PlantedServer):
    """Each answer takes so many seconds of the clock."""

    def __init__(self, clock: ManualClock, answer_s: float, leak: str | None = None) -> None:
        super().__init__(leak)
        self.clock, self.answer_s = clock, answer_s

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.clock.advance(self.answer_s)
        return super().__call__(request)


@pytest.mark.slow
@pytest.mark.parametrize(("leak", "verdict"), [(None, Verdict.PARTIAL), ("the same salt", Verdict.LEAKS)])
def test_a_slow_server_is_audited_within_the_limit(leak: str | None, verdict: Verdict) -> None:
    clock = ManualClock()
    server, limit = Slow(clock, 0.1, leak), Limit(180, clock)
    began = clock()
    with in_place_of_a_socket(server) as url:
        report = remote.run(url, ("Key-a", "Key-b"), TimingPlan(prompt_words=12), timing=False, limit=limit)
    assert clock() - began <= 190
    assert report.verdict is verdict, report.checks
    names = {check.name for check in report.checks if check.verdict is not Verdict.NOT_CHECKED}
    assert names >= {CROSSING, f"{CROSSING}, no salt", ALMOST, handles.NAMES_NAME, handles.PINS, handles.JOBS}
    (cut,) = (check for check in report.checks if check.name == EVERY_WAY)
    assert "ways were tried" in cut.detail and "180 s" in cut.detail


def test_a_part_leaves_time_to_those_after_it() -> None:
    clock = ManualClock()
    limit = Limit(100, clock)
    with limit.part(0.25):
        assert limit.left_s == 25
        clock.advance(30)
        with pytest.raises(Stopped, match="100 s"):
            limit.check()
    assert limit.left_s == 70
    limit.check()
    assert Limit().left_s == float("inf")


# timing


class Times:
    """What the timing audit asks of a target: times by whether a prompt is known, on a clock, until it fails."""

    def __init__(
        self, limit: Limit, clock: ManualClock, known: set[str], fails_after: float = float("inf")
    ) -> None:
        self.limit, self.clock, self.known, self.left, self.num_retries = limit, clock, known, fails_after, 0

    def complete(self, prompt: str) -> None:
        self._count()
        self.known.add(prompt)

    def first_token_s(self, prompt: str) -> float:
        self._count()
        before = self.clock()
        self.clock.advance(0.01 + hash(prompt) % 97 / 1e5 + (0 if prompt in self.known else 0.02))
        self.known.add(prompt)
        return self.clock() - before

    def _count(self) -> None:
        self.limit.check()
        self.clock.advance(0.01)
        self.left -= 1
        if self.left < 0:
            raise remote.TargetError("the server died")


def timed(
    *, shared: bool, fails_after: float = float("inf"), limit_s: float | None = None, samples: int = 200
) -> tuple[dict[int, Check], TimingAudit]:
    clock = ManualClock()
    limit, known = Limit(limit_s, clock), set[str]()
    a: Any = Times(limit, clock, known, fails_after)
    b: Any = Times(limit, clock, known if shared else set())
    audit = TimingAudit(a, b, TimingPlan(samples=samples, prompt_words=4), lambda done: None)
    return by_number(audit.run()), audit


def test_the_control_ends_when_it_has_seen_its_hits() -> None:
    checks, audit = timed(shared=False)
    assert len(audit.samples.hit) == len(audit.samples.own_miss) == 50
    assert checks[9].verdict is None and checks[9].figures["num_hits"] == 50


@pytest.mark.parametrize("shared", [True, False])
def test_a_server_that_dies_between_samples(shared: bool) -> None:
    """The samples until then count, if they show a leak at the level of an early stop."""
    checks, audit = timed(shared=shared, fails_after=4 * (50 + 4) + 45)
    assert len(audit.samples.cross) >= 20
    assert checks[10].verdict is (Verdict.LEAKS if shared else Verdict.NOT_CHECKED), checks[10]
    assert "the server died" in checks[10].detail
    few, audit = timed(shared=shared, fails_after=4 * (50 + 4) + 10)
    assert few[10].verdict is Verdict.NOT_CHECKED and few[12].verdict is Verdict.NOT_CHECKED


def test_a_server_that_dies_in_the_control() -> None:
    checks, _ = timed(shared=True, fails_after=30)
    assert {checks[number].verdict for number in (9, 10, 12)} == {Verdict.NOT_CHECKED}
    assert "the server died" in checks[9].detail


@pytest.mark.parametrize("shared", [True, False])
def test_samples_that_fit_in_the_time_that_is_left(shared: bool) -> None:
    """Their number is fixed before they are taken. Too few of them aren't inconclusive: the check was not done."""
    checks, audit = timed(shared=shared, limit_s=12.0)
    assert 20 <= len(audit.samples.miss) < 200
    assert checks[10].verdict is (Verdict.LEAKS if shared else Verdict.NOT_CHECKED), checks[10]
    assert shared or "of 200 samples fit" in checks[10].detail
    none, audit = timed(shared=shared, limit_s=6.0)
    assert none[10].verdict is Verdict.NOT_CHECKED


# a cache in this process


@pytest.mark.slow
def test_a_stopped_audit_of_a_cache_reports_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneForAll(PrefixCache):
        """The tenant is left out of the lookup."""

        def match(self, namespace: Any, *args: Any, **named: Any) -> Any:
            return super().match(namespace._replace(tenant="a"), *args, **named)

        def open(self, namespace: Any, *args: Any, **named: Any) -> Any:
            return super().open(namespace._replace(tenant="a"), *args, **named)

    monkeypatch.setattr(inprocess, "policy_names", lambda: ("lru",))
    monkeypatch.setattr(inprocess, "InProcess", partial(inprocess.InProcess, shrink=False))
    limit, told = Limit(), list[str]()

    def progress(name: str, done: int, of: int) -> None:
        told.append(name)
        if name == "eviction signal":
            limit.stopped = "stopped by Ctrl-C"

    report = inprocess.run(OneForAll, examples=30, steps=30, progress=progress, limit=limit)
    assert report.verdict is Verdict.LEAKS and report.exit_code == 1
    assert report.checks[0].verdict is Verdict.LEAKS, "it was found before"
    assert {check.verdict for check in report.checks[7:]} == {Verdict.NOT_CHECKED}
    assert "stopped by Ctrl-C" in report.checks[-1].detail


@pytest.mark.slow
def test_an_audit_of_a_cache_ends_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines share the time. One that couldn't play all of its lives says so."""
    monkeypatch.setattr(inprocess, "policy_names", lambda: ("lru", "lfu"))
    monkeypatch.setattr(inprocess, "HAND_OVERS", 60)
    monkeypatch.setattr(inprocess, "TRIALS", 20)
    clock = ManualClock()
    limit = Limit(30, clock)

    def progress(name: str, done: int, of: int) -> None:
        clock.advance(0.5 if of > 1 else 0.0)  # a life

    report = inprocess.run(PrefixCache, examples=200, steps=2, limit=limit, progress=progress)
    first = report.checks[0]
    assert clock() <= 30 + 5
    assert first.verdict is Verdict.ISOLATED and 2 <= first.figures["examples"] < 50
    assert "200 were planned" in first.detail and first.figures["steps"] >= first.figures["examples"]
    assert "That is little" in report.tried
    assert not [check for check in report.checks if check.verdict is Verdict.NOT_CHECKED]


@pytest.mark.slow
def test_little_is_called_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess, "policy_names", lambda: ("lru",))
    monkeypatch.setattr(inprocess, "HAND_OVERS", 60)
    monkeypatch.setattr(inprocess, "TRIALS", 20)
    report = inprocess.run(PrefixCache, examples=1, steps=1)
    assert report.verdict is Verdict.ISOLATED
    assert report.tried.startswith("6 calls in 6 random lives, at most 1 in each. That is little")
    enough = Check(1, "laws and contents", Verdict.ISOLATED, "nothing", {"examples": 208, "steps": 9_000})
    assert inprocess._tried([enough], inprocess.STEPS) == "9000 calls in 208 random lives, at most 50 in each"
    assert report.as_dict()["tried"] == report.tried
    assert "little" in remote._tried([], 1, {}) and "little" not in remote._tried([], remote.PROBES, {})
    assert "little" in remote._tried([], remote.PROBES, {"cross": [0.1] * 20, "miss": [0.1] * 20})


def test_checks_are_shown_with_what_leaks_first() -> None:
    report = remote.AuditReport(
        "x", "0", {}, (not_checked(9, "time", "left out"), Check(1, "one", Verdict.ISOLATED, "no"),
                       Check(3, "three", Verdict.LEAKS, "yes"))
    )  # fmt: skip
    assert [check.number for check in report.evidence] == [3, 1]
    assert [check.number for check in report.not_checked] == [9]
