"""The audit of a server over HTTP, with the keys of two tenants: radixkv's service, or any OpenAI-compatible one.

A, the first key, looks; B, the second, is who must not be seen. Checks 3, 7 and 8 of the table in docs/security.md by
what answers say, 9, 10 and 12 by how long they take. Each has its positive control. What only radixkv's
service has (salts, lookups, jobs) is used where it is there.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from radixkv.audit.target import Target, TargetError
from radixkv.audit.timing import TimingAudit, TimingPlan
from radixkv.audit.verdict import AuditReport, Check, Verdict
from radixkv.errors import ArgumentError

PROBES = 20
SCRAPES = 3
NAMES = 12
_VOLATILE_HEADERS = frozenset(
    {"date", "x-request-id", "x-process-time", "cf-ray", "x-envoy-upstream-service-time"}
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")
_EVICTION_COUNTS = re.compile(r'"(?:used|resident|evictable|evicted)_blocks":\s*\d+,?')
Answer = tuple[int, Mapping[str, str], str]
Progress = Callable[[str, int, int], None]
"""``progress(phase, done, of)``."""


def run(
    url: str,
    keys: tuple[str, str],
    plan: TimingPlan,
    *,
    model: str | None = None,
    version: str = "0",
    probes: int = PROBES,
    timing: bool = True,
    progress: Progress = lambda phase, done, of: None,
) -> AuditReport:
    """Audit the server at ``url``. Sends requests there and nowhere else. Raises ConfigError, TargetError.

    On a radixkv service everything is asked under a salt of the audit's own, which is forgotten at the end.
    """
    if keys[0] == keys[1]:
        raise ArgumentError("keys", "the same key twice", "the keys of two tenants")
    with _targets(url, keys, model) as (a, b):
        audit = _Content(a, b, plan, probes, progress)
        checks = [audit.cross_tenant_probe(), audit.scrapes(), audit.names()]
        samples: dict[str, list[float]] = {}
        if timing:
            timed = TimingAudit(a, b, plan, lambda done: progress("timing", done, plan.steps))
            checks += timed.run()
            samples = {arm: getattr(timed.samples, arm) for arm in timed.samples.__slots__}
    settings = {"probes": probes, "timing": plan.as_dict() if timing else None}
    return AuditReport(url, version, settings, tuple(checks), samples)


@contextmanager
def _targets(url: str, keys: tuple[str, str], model: str | None) -> Iterator[tuple[Target, Target]]:
    salt = f"audit-{secrets.token_hex(8)}"
    with Target(url, keys[0]) as asking:
        is_radixkv = _is_radixkv(asking)
    extra = {"salt": salt} if is_radixkv else {}
    with (
        Target(url, keys[0], model=model, extra=extra) as a,
        Target(url, keys[1], model=model, extra=extra) as b,
    ):
        try:
            yield a, b
        finally:
            if is_radixkv:
                for each in (a, b):
                    each.request("DELETE", f"/v1/cache?salt={salt}")


def _is_radixkv(target: Target) -> bool:
    answer = target.request("POST", "/v1/lookup", json={"prompt": "hello", "salt": "audit"})
    if answer.status_code in (401, 403):
        raise TargetError(f"{target.url} refuses the key: {answer.status_code}")
    return answer.status_code == 200


def _checked(number: int, name: str, check: Callable[[], tuple[Verdict, str, dict[str, Any]]]) -> Check:
    began = time.perf_counter()
    verdict, detail, figures = check()
    return Check(number, name, verdict, detail, figures, time.perf_counter() - began)


class _Content:
    """What answers say."""

    def __init__(self, a: Target, b: Target, plan: TimingPlan, probes: int, progress: Progress) -> None:
        self._a, self._b, self._probes, self._progress = a, b, probes, progress
        self._prompt = TimingAudit(a, b, plan, lambda done: None).prompt

    # 3: does A find what B computed?

    def cross_tenant_probe(self) -> Check:
        """B computes P, A asks for P; then A asks again, and must find it, or the probe was blind."""
        return _checked(3, "cross-tenant probe", self._cross_tenant_probe)

    def _cross_tenant_probe(self) -> tuple[Verdict, str, dict[str, Any]]:
        baseline = self._a.complete(self._prompt()).cached_tokens
        if baseline is None:
            reason = "the server doesn't say how many tokens were cached; timing alone can tell"
            return Verdict.INCONCLUSIVE, reason, {}
        leaks = blind = most = 0
        for done in range(1, self._probes + 1):
            prompt = self._prompt()
            self._b.complete(prompt)
            found = self._a.matched_tokens(prompt)
            seen, again = self._a.complete(prompt), self._a.complete(prompt)
            leaks += (seen.cached_tokens or 0) > baseline or found > baseline
            most = max(most, (seen.cached_tokens or 0) - baseline)
            blind += 2 * (again.cached_tokens or 0) < again.prompt_tokens
            self._progress("content probes", done, self._probes)
        figures = {"probes": self._probes, "leaks": leaks, "blind": blind, "most_tokens_leaked": most}
        if leaks:
            return Verdict.LEAKS, f"{leaks} of {self._probes} prompts of B's were cached for A", figures
        if blind:
            return Verdict.BLIND, f"A didn't find its own prompt again in {blind} probes", figures
        return (
            Verdict.ISOLATED,
            f"none of {self._probes} prompts of B's was cached for A; its own were",
            figures,
        )

    # 7: does anything that A can scrape change with what B does?

    def scrapes(self) -> Check:
        """All that A can read without asking for tokens, before and after B's requests, less what changes anyway."""
        return _checked(7, "errors and metrics", self._scrapes)

    def _scrapes(self) -> tuple[Verdict, str, dict[str, Any]]:
        quiet = [self._scrape() for _ in range(SCRAPES + 1)]
        for _ in range(5):
            self._b.complete(self._prompt())
        self._b.request("POST", "/v1/completions", json={"prompt": ""})
        after = self._scrape()
        changed: list[str] = []
        masked: list[str] = []
        for name, answer in after.items():
            found = _compared([each[name] for each in quiet], answer)
            changed += [f"{name}: {what}" for what in found[0]]
            masked += [f"{name}: {what}" for what in found[1]]
        figures = {"compared": sorted(after), "changed": changed[:50], "not_compared": masked[:50]}
        if changed:
            return Verdict.LEAKS, f"{len(changed)} things that A can read change with what B does", figures
        if len(masked) and len(masked) >= len(after):
            return Verdict.BLIND, "everything that A can read changes by itself", figures
        detail = f"nothing of {len(after)} answers that A can read changes with what B does"
        return (
            Verdict.ISOLATED,
            detail + (f"; {len(masked)} lines change by themselves" if masked else ""),
            figures,
        )

    def _scrape(self) -> dict[str, Answer]:
        asks: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", path, {})
            for path in ("/metrics", "/v1/stats", "/v1/models", "/healthz", "/health", "/readyz", "/version")
        ]
        asks += [
            ("GET", "/v1/warm/" + "x" * 32, {}),
            ("GET", "/v1/nowhere", {}),
            ("DELETE", "/v1/cache?salt=audit-of-nobody", {}),
            ("POST", "/v1/completions", {"json": {"prompt": "", "tenant": "other"}}),
            ("POST", "/v1/completions", {"content": b"{", "headers": {"Content-Type": "application/json"}}),
            ("POST", "/v1/completions", {"json": {"prompt": "x", "max_tokens": 10**8}}),
        ]
        found: dict[str, Answer] = {}
        for at, (method, path, named) in enumerate(asks):
            answer = self._a.request(method, path, **named)
            headers = {name: value for name, value in answer.headers.items() if name not in _VOLATILE_HEADERS}
            body = _without_evictions(answer.text) if path == "/v1/stats" else answer.text
            found[f"{method} {path} #{at}"] = (answer.status_code, headers, body)
        return found

    # 8: do names count what others do?

    def names(self) -> Check:
        """Ids of A's requests, with B's requests between them: they must neither rise nor share what is random."""
        return _checked(8, "handles", self._names)

    def _names(self) -> tuple[Verdict, str, dict[str, Any]]:
        names = []
        for at in range(NAMES):
            names.append(self._a.complete(self._prompt()).id)
            if at % 2:
                self._b.complete(self._prompt())
        figures = {"names": NAMES, "shortest": min(map(len, names))}
        if not all(names) or len(set(names)) < len(names):
            return Verdict.INCONCLUSIVE, "completions have no ids of their own", figures
        for part in zip(*(re.findall(r"\d+", name) for name in names), strict=False):
            counted = _counts_others([int(each) for each in part])
            if counted:
                return Verdict.LEAKS, "ids of A's completions count B's requests", figures
            if counted is None:
                return (
                    Verdict.INCONCLUSIVE,
                    "ids rise; whether with time or with others can't be told",
                    figures,
                )
        return Verdict.ISOLATED, f"{NAMES} ids of A's in no order", figures


def _without_evictions(stats: str) -> str:
    """A tenant's own counts without those that a neighbour's evictions change, unless its mode is strict.

    In burst mode a full pool lets one tenant's requests evict another's blocks: documented, and no content.
    """
    if '"mode":"strict"' in stats.replace(" ", ""):
        return stats
    return _EVICTION_COUNTS.sub("", stats)


def _counts_others(values: list[int]) -> bool | None:
    """Whether a number in names counts B's requests too, which lie in every other gap; None if it rises otherwise.

    Twelve random values rise by chance in one of 479 million cases.
    """
    gaps = [after - before for before, after in pairwise(values)]
    if min(gaps) <= 0:
        return False
    alone, beside = set(gaps[::2]), set(gaps[1::2])
    if len(alone) == len(beside) == 1:
        return alone != beside
    return None


def _compared(quiet: list[Answer], after: Answer) -> tuple[list[str], list[str]]:
    """What differs after B's requests though it was steady before, and what wasn't steady.

    Status and headers are compared whole, bodies line by line: a line without its numbers must be the same,
    and each number steady, or rising by the same step each time.
    """
    changed: list[str] = []
    masked: list[str] = []
    for what, place in (("status", 0), ("headers", 1)):
        before = [each[place] for each in quiet]
        if any(each != before[0] for each in before):
            masked.append(what)
        elif after[place] != before[0]:
            changed.append(what)
    tables = [_lines(each[2]) for each in (*quiet, after)]
    for line in dict.fromkeys(key for table in tables for key in table):
        series = [table.get(line) for table in tables]
        steady = _steps(series[:-1])
        if steady is None:
            masked.append(line)
        elif _steps(series) is None:
            changed.append(line)
    return changed, masked


def _lines(body: str) -> dict[str, tuple[float, ...]]:
    """Each line without its numbers, and its numbers; equal lines get the place among them."""
    found: dict[str, tuple[float, ...]] = {}
    for line in body.splitlines():
        key, numbers = _NUMBER.sub("#", line)[:200], tuple(float(each) for each in _NUMBER.findall(line))
        name, copy = key, 1
        while name in found:
            name, copy = f"{key} ({copy})", copy + 1
        found[name] = numbers
    return found


def _steps(series: list[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    """The step by which each number rises, if it is the same each time; None if it isn't, or a line comes or goes."""
    steps = set()
    for before, after in pairwise(series):
        if before is None or after is None or len(before) != len(after):
            return None
        steps.add(tuple(round(high - low, 9) for low, high in zip(before, after, strict=True)))
    return steps.pop() if len(steps) == 1 else None
