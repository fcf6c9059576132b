"""The audit of a server over HTTP with the keys of two tenants: radixkv's service or any OpenAI-compatible one.

An engine without keys is audited with two salts (``Principal.salted``): each request carries one as ``cache_salt``.

A, the first key, observes. B, the second, must stay invisible to A. Checks 3, 7 and 8 of the table in
docs/guides/security.md use what answers contain; 9, 10 and 12 use how long they take:

    crossing   3  B writes a prompt, A reads it: with each salt, adapter, form of prompt and endpoint
    identity   3  tenants that the client names, keys that are almost A's
    operators  3  bases
    scrapes    7  everything that A can read, before and after B's requests; quotes of B's words
    handles    8  names of completions, pins and jobs; 7: what A's clear forgets
    timing     9, 10, 12  the time to the first token

Each has a positive control. A check can't be done if the server lacks what it needs, or if a key was not given. The
report then lists it as *not checked*, and the verdict is at best *isolated in what was checked*.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from radixkv.audit import handles, operators
from radixkv.audit.crossing import NAME, Crossing, Space, spaces
from radixkv.audit.handles import Handles
from radixkv.audit.identity import ALMOST, NAMED, Identity, names_of
from radixkv.audit.probe_prompts import Prompt, Prompts, canary, unknown_at_most
from radixkv.audit.scrapes import NAME as SCRAPED
from radixkv.audit.scrapes import Listener, Scrapes
from radixkv.audit.surfaces import Extra, completion, lookup
from radixkv.audit.target import COMPLETIONS, Completion, Principal, Target, TargetError, count
from radixkv.audit.timing import NAMES, TimingAudit, TimingPlan
from radixkv.audit.verdict import AuditReport, Check, Verdict, not_checked
from radixkv.errors import ArgumentError

PROBES = 20
CONTENT_WORDS = 12
"""Maximum number of words in prompts that aren't timed. It grows if A doesn't find its own prompts."""
THOROUGH_PROBES = 10
"""With at least this many probes, the audit tries every pair of writer and reader, and longer prompts."""
LENGTHENINGS = 6
"""Prompt lengths to try, each twice the one before, until A finds its own prompts."""
Progress = Callable[[str, int, int], None]
"""Called as ``progress(phase, done, of)``."""


@dataclass(frozen=True, slots=True)
class Options:
    """Optional facts about a server. ``operator_key``: for bases. ``adapter``: an adapter that the server has.

    ``tenant_names``: the names of A and B on the server.
    """

    model: str | None = None
    operator_key: str | None = None
    adapter: str | None = None
    tenant_names: tuple[str | None, str | None] = (None, None)


def run(
    url: str,
    keys: tuple[str | Principal, str | Principal],
    plan: TimingPlan,
    *,
    model: str | None = None,
    version: str = "0",
    probes: int = PROBES,
    timing: bool = True,
    options: Options | None = None,
    progress: Progress = lambda phase, done, of: None,
) -> AuditReport:
    """Audit the server at ``url``. Requests go only there. Raises ArgumentError, ConfigError, TargetError.

    ``keys``: of two different tenants, best made for the audit. At the end a tenant's cache is cleared if it was
    empty at the start. Otherwise only what the audit asked with a salt or an adapter is cleared; the rest stays
    until it is evicted.
    """
    if keys[0] == keys[1]:
        raise ArgumentError("keys", "the same twice", "the keys, or the salts, of two tenants")
    known = options or Options(model)
    with _targets(url, keys, replace(known, model=model or known.model)) as sides:
        checks = sides.content(plan, probes, progress)
        samples: dict[str, list[float]] = {}
        if timing:
            timed = TimingAudit(sides.a, sides.b, plan, lambda done: progress("timing", done, plan.steps))
            checks += timed.run()
            samples = {arm: getattr(timed.samples, arm) for arm in timed.samples.__slots__}
        else:
            checks += [not_checked(number, name, "left out (--no-timing)") for number, name in NAMES.items()]
    settings = {"probes": probes, "timing": plan.as_dict() if timing else None}
    checks.sort(
        key=lambda check: check.verdict is not Verdict.NOT_CHECKED
    )  # not-checked ones first, otherwise in order
    return AuditReport(url, version, settings, tuple(checks), samples)


@contextmanager
def _targets(url: str, keys: tuple[str | Principal, str | Principal], options: Options) -> Iterator[Sides]:
    with ExitStack() as open_targets:
        a, b = (open_targets.enter_context(Target(url, key, model=options.model)) for key in keys)
        key = options.operator_key
        operator = None if key is None else open_targets.enter_context(Target(url, key))
        refused = a.request("POST", "/v1/lookup", json={"prompt": "hello"}).status_code
        if refused in (401, 403):
            raise TargetError(f"{a.url} refuses the key: {refused}")
        sides = Sides(a, b, operator, options)
        try:
            yield sides
        finally:
            sides.clean()


class Sides:
    """A and B, the operator if its key is known, and the checks of what answers contain."""

    def __init__(self, a: Target, b: Target, operator: Target | None, options: Options) -> None:
        self.a, self.b, self._operator, self._options = a, b, operator, options
        self._salt, self._adapter = f"audit-{canary()}", options.adapter or f"audit-{canary()}"
        self._were_empty = [(target, _is_empty(target)) for target in (a, b)]

    def content(self, plan: TimingPlan, probes: int, progress: Progress) -> list[Check]:
        """Checks 3, 7 and 8. Raises TargetError if the server answers no completions at all."""
        listener = Listener(self.a, self.b)
        base = _Base(self.a, self.b, Prompts(min(plan.prompt_words, CONTENT_WORDS)), probes, progress)
        checks = [_timed(base.check)]
        prompts, form = base.prompts, self._form(base)
        crossing = Crossing(
            self.a,
            self.b,
            prompts,
            self._spaces(),
            light=probes < THOROUGH_PROBES,
            seed=plan.seed,
            progress=lambda done, of: progress("ways", done, of),
        )
        checks += _each(3, f"{NAME}, every way", crossing.run)
        b_names = names_of(self.b.principal.key, self._options.tenant_names[1])
        identity = Identity(self.a, self.b, prompts, form, b_names)
        handled = Handles(self.a, self.b, prompts, form)
        rows: list[tuple[int, str, Callable[[], Check | list[Check]]]] = [
            (3, NAMED, lambda: identity.named(canary())),
            (3, ALMOST, identity.almost),
            (3, operators.NAME, lambda: operators.bases(self.a, self.b, self._operator, prompts, form)),
            (7, SCRAPED, Scrapes(self.a, self.b, prompts, form, b_names).check),
            (8, handles.NAMES_NAME, lambda: handles.names(self.a, self.b, prompts)),
            (8, handles.PINS, handled.pins),
            (8, handles.JOBS, handled.jobs),
            (8, handles.KEYS, handled.idempotency),
            (7, handles.CLEARS, lambda: handled.clears(self._were_empty[0][1])),
        ]
        if base.is_blind and form != "ids":
            why = "prompts that were never sent are mostly cached already"
            rows = [(number, name, partial(not_checked, number, name, why)) for number, name, _ in rows]
        for done, (number, name, check) in enumerate(rows, 1):
            checks += _each(number, name, check)
            progress("content checks", done, len(rows))
        checks.append(listener.check())
        self.a.on_exchange = self.b.on_exchange = None
        return checks

    def _form(self, base: _Base) -> str:
        """Return the form of prompts for the other checks: ids, if all texts look the same to the server."""
        if self.a.endpoint() != COMPLETIONS:
            return "messages"
        if base.is_blind:
            with suppress(TargetError):
                found = [completion(self.a, base.prompts.fresh("ids"), Extra()) for _ in range(3)]
                if all(each.is_ok and 2 * (each.cached_tokens or 0) < each.prompt_tokens for each in found):
                    return "ids"
        return "text"

    def _spaces(self) -> tuple[Space, ...]:
        known = spaces(self._salt, self._adapter)
        other = _other_model(self.a)
        if other is None:
            return known
        extra = Extra({"model": other})
        return (*known, Space("another model", "another model", extra, extra))

    def clean(self) -> None:
        """Clear what the audit asked: everything of a tenant that was empty, otherwise the audit's salt and adapter."""
        with suppress(TargetError):
            for target, was_empty in self._were_empty:
                for params in ({"salt": self._salt}, {"adapter": self._adapter}):
                    target.send("DELETE", "/v1/cache", params=params)
                if was_empty:
                    target.send("DELETE", "/v1/cache")


def _is_empty(target: Target) -> bool:
    """Whether a tenant of radixkv's service has nothing cached."""
    with suppress(TargetError):
        reply = target.send("GET", "/v1/stats")
        return reply.is_ok and reply.document.get("used_blocks") == 0
    return False


def _other_model(target: Target) -> str | None:
    """Return an adapter that the server lists as a model, as vLLM does; None if it lists none."""
    with suppress(TargetError):
        listed = target.send("GET", "/v1/models").document.get("data")
        for each in listed if isinstance(listed, list) else ():
            if isinstance(each, dict) and each.get("parent") and isinstance(each.get("id"), str):
                return str(each["id"])
    return None


def _timed(check: Callable[[], Check]) -> Check:
    began = time.perf_counter()
    return replace(check(), seconds=time.perf_counter() - began)


def _each(number: int, name: str, check: Callable[[], Check | list[Check]]) -> list[Check]:
    """Run the checks, and add the time that they took. If a request fails, they are *not checked*."""
    began = time.perf_counter()
    try:
        found = check()
    except TargetError as error:
        found = not_checked(number, name, f"aborted: {error}")
    checks = found if isinstance(found, list) else [found]
    seconds = (time.perf_counter() - began) / max(len(checks), 1)
    return [replace(each, seconds=seconds) for each in checks]


class _Base:
    """Check 3 in its simplest form: completions of texts without a salt. It also finds a sufficient prompt length."""

    def __init__(self, a: Target, b: Target, prompts: Prompts, probes: int, progress: Progress) -> None:
        self._a, self._b, self.prompts, self._probes, self._progress = a, b, prompts, probes, progress
        self.is_blind = False
        """Prompts that were never sent are mostly cached: the server can't tell texts apart."""

    def check(self) -> Check:
        """B computes P, then A asks for P twice. If the second time doesn't find P, the probe was blind."""
        first = self._a.complete(self.prompts.text())
        if first.cached_tokens is None:
            reason = "the server doesn't report the number of cached tokens; only timing can detect leaks"
            return Check(3, NAME, Verdict.INCONCLUSIVE, reason)
        blind = self._lengthen()
        found = self._probed()
        if found.verdict is Verdict.LEAKS or blind is None:
            return found
        return replace(found, verdict=Verdict.BLIND, detail=blind)

    def _lengthen(self) -> str | None:
        """Double the prompts until A finds its own and a fresh one is mostly new. The reason if that never happens."""
        reason = None
        start = self.prompts.words
        for at in range(LENGTHENINGS):
            words = start << at
            try:
                reason = self._blindness(words)
            except TargetError:
                break
            if reason is None:
                self.prompts.words = words
                return None
        return reason

    def _blindness(self, words: int) -> str | None:
        fresh = [self._a.complete(self.prompts.text(words)) for _ in range(2)]
        prompt = self.prompts.text(words)
        first, again = self._a.complete(prompt), self._a.complete(prompt)
        longer = self._a.complete(self.prompts.text(2 * words))
        self.is_blind = any(_mostly_cached(each) for each in (*fresh[1:], first))
        if self.is_blind:
            told = f"{first.cached_tokens} of {first.prompt_tokens} tokens"
            return f"prompts that were never sent are mostly cached already ({told})"
        if again.prompt_tokens and longer.prompt_tokens <= again.prompt_tokens:
            told = f"{again.prompt_tokens} for {words} words, {longer.prompt_tokens} for {2 * words}"
            return f"prompt_tokens doesn't grow with the prompt: {told}"
        if (again.cached_tokens or 0) <= (first.cached_tokens or 0):
            return f"A didn't find its own prompt of {words} words again"
        return None

    def _probed(self) -> Check:
        self._a.complete(self.prompts.text())
        probes = []
        for done in range(1, self._probes + 1):
            fresh = self._a.complete(self.prompts.text())
            prompt = self.prompts.text()
            self._b.complete(prompt)
            found = _looked_up(self._a, prompt)
            probes.append((fresh, found, self._a.complete(prompt), self._a.complete(prompt)))
            self._progress("content probes", done, self._probes)
        bound = unknown_at_most(
            [_cached(each[0]) for each in probes], min(each[0].prompt_tokens for each in probes)
        )
        leaks = sum(max(_cached(seen), found) > bound for _, found, seen, _ in probes)
        blind = sum(
            2 * _cached(again) < again.prompt_tokens or _cached(again) <= bound for *_, again in probes
        )
        known = sum(_mostly_cached(fresh) for fresh, *_ in probes)
        most = max(max(_cached(seen), found) for _, found, seen, _ in probes)
        figures: dict[str, Any] = {
            "probes": self._probes,
            "leaks": leaks,
            "blind": blind,
            "most_tokens_leaked": max(most - bound, 0),
            "fresh prompts mostly cached": known,
            "prompt_words": self.prompts.words,
        }
        if leaks:
            return Check(
                3, NAME, Verdict.LEAKS, f"{leaks} of {self._probes} prompts of B were cached for A", figures
            )
        if known:
            why = f"{known} of {self._probes} prompts that were never sent were mostly cached already"
            return Check(3, NAME, Verdict.BLIND, why, figures)
        if blind:
            why = f"A didn't find its own prompt again in {blind} probes"
            return Check(3, NAME, Verdict.BLIND, why, figures)
        detail = f"none of {self._probes} prompts of B was cached for A; its own prompts were"
        return Check(3, NAME, Verdict.ISOLATED, detail, figures)


def _cached(completion: Completion) -> int:
    return completion.cached_tokens or 0


def _mostly_cached(completion: Completion) -> bool:
    return 0 < completion.prompt_tokens <= 2 * _cached(completion)


def _looked_up(target: Target, prompt: str) -> int:
    """Return the number of tokens that a lookup finds; 0 if the server has no lookups."""
    reply = lookup(target, Prompt("text", prompt), Extra())
    return (count(reply.document.get("matched_tokens")) or 0) if reply.is_ok else 0
