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

Each check stands alone: if one fails, the others are still made, and count. Under a ``Limit`` each may use a share of
the time that is left, by its weight. If the audit is stopped, the report has what is known so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from radixkv.audit import handles, operators
from radixkv.audit.crossing import EVERY_WAY, NAME, Crossing, Space, spaces
from radixkv.audit.handles import Handles
from radixkv.audit.identity import ALMOST, NAMED, Identity, names_of
from radixkv.audit.limit import Limit, Stopped
from radixkv.audit.probe_prompts import Prompt, Prompts, canary, unknown_at_most
from radixkv.audit.scrapes import NAME as SCRAPED
from radixkv.audit.scrapes import QUOTES, Listener, Scrapes
from radixkv.audit.surfaces import Extra, completion, lookup
from radixkv.audit.target import COMPLETIONS, Completion, Principal, Target, TargetError, count
from radixkv.audit.timing import NAMES, TimingAudit, TimingPlan
from radixkv.audit.verdict import AuditReport, Check, Verdict, alone, not_checked
from radixkv.errors import ArgumentError

PROBES = 20
CONTENT_WORDS = 12
"""Maximum number of words in prompts that aren't timed. It grows if A doesn't find its own prompts."""
THOROUGH_PROBES = 10
"""With at least this many probes, the audit tries every pair of writer and reader, and longer prompts."""
LENGTHENINGS = 6
"""Prompt lengths to try, each twice the one before, until A finds its own prompts."""
WEIGHTS = {
    NAME: 5, EVERY_WAY: 10, NAMED: 3, ALMOST: 1, operators.NAME: 1, SCRAPED: 3, handles.NAMES_NAME: 1, handles.PINS: 1,
    handles.JOBS: 1, handles.KEYS: 1, handles.CLEARS: 2,
}  # fmt: skip
"""The checks in order → the share of the time that each may use. What one doesn't use is left to those after it."""
TIMING_WEIGHT = 15
QUICK_SAMPLES, QUICK_MARGIN = 1_200, 0.05
"""Timed requests of each kind, and the margin that they suffice for. ``TimingPlan`` has those of a thorough audit."""
Progress = Callable[[str, int, int], None]
"""Called as ``progress(phase, done, of)``."""
Row = Callable[[list[str]], Check | list[Check]]
"""One or several checks. It adds a leak to the list as soon as it finds one."""


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
    limit: Limit | None = None,
) -> AuditReport:
    """Audit the server at ``url``. Requests go only there. Raises ArgumentError, ConfigError, TargetError.

    ``keys``: of two different tenants, best made for the audit. At the end a tenant's cache is cleared if it was
    empty at the start. Otherwise only what the audit asked with a salt or an adapter is cleared; the rest stays
    until it is evicted.

    TargetError means that no check could be made. If some could, the others are *not checked*. ``limit.stop`` ends the
    audit early, from a signal handler too.
    """
    if keys[0] == keys[1]:
        raise ArgumentError("keys", "the same twice", "the keys, or the salts, of two tenants")
    known, limit = options or Options(model), limit or Limit()
    checks: list[Check] = []
    samples: dict[str, list[float]] = {}
    try:
        with _targets(url, keys, replace(known, model=model or known.model), limit) as sides:
            checks += sides.content(plan, probes, progress, TIMING_WEIGHT if timing else 0)
            if timing:
                timed = TimingAudit(sides.a, sides.b, plan, lambda done: progress("timing", done, plan.steps))
                checks += timed.run()
                samples = {arm: getattr(timed.samples, arm) for arm in timed.samples.__slots__}
    except Stopped as stopped:  # before the first check
        missing = {3: NAME, **(NAMES if timing else {})}
        checks += [not_checked(number, name, str(stopped)) for number, name in missing.items()]
    if not timing:
        checks += [not_checked(number, name, "left out (--no-timing)") for number, name in NAMES.items()]
    settings = {"probes": probes, "timing": plan.as_dict() if timing else None, "limit_s": limit.seconds}
    checks.sort(
        key=lambda check: check.verdict is not Verdict.NOT_CHECKED
    )  # not-checked ones first, otherwise in order
    return AuditReport(url, version, settings, tuple(checks), samples, tried=_tried(checks, probes, samples))


def _tried(checks: list[Check], probes: int, samples: dict[str, list[float]]) -> str:
    """Say how much was tried, and if it was less than by default."""
    crossed = sum(check.figures.get("probes", 0) for check in checks if check.number == 3)
    timed = min((len(samples[arm]) for arm in ("cross", "miss") if arm in samples), default=0)
    tried = f"{crossed} prompts of B looked for, {timed} timed pairs"
    if probes >= PROBES and not 0 < timed < QUICK_SAMPLES:
        return tried
    return f"{tried}. That is little: the default is {PROBES} probes and {QUICK_SAMPLES} timed pairs"


@contextmanager
def _targets(
    url: str, keys: tuple[str | Principal, str | Principal], options: Options, limit: Limit
) -> Iterator[Sides]:
    with ExitStack() as open_targets:
        a, b = (
            open_targets.enter_context(Target(url, key, model=options.model, limit=limit)) for key in keys
        )
        key = options.operator_key
        operator = None if key is None else open_targets.enter_context(Target(url, key, limit=limit))
        refused = a.request("POST", "/v1/lookup", json={"prompt": "hello"}).status_code
        if refused in (401, 403):
            raise TargetError(f"{a.url} refuses the key: {refused}")
        a.endpoint()
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

    def content(self, plan: TimingPlan, probes: int, progress: Progress, later: int) -> list[Check]:
        """Checks 3, 7 and 8. ``later``: the weight of what follows. Raises TargetError if completions fail at once."""
        for target in (self.a, self.b):
            target.complete(Prompts(CONTENT_WORDS).text())
        listener = Listener(self.a, self.b)
        base = _Base(
            self.a, self.b, Prompts(min(plan.prompt_words, CONTENT_WORDS)), probes, partial(progress, NAME)
        )
        left = sum(WEIGHTS.values()) + later
        with self.a.limit.part(WEIGHTS[NAME] / left):
            checks = alone(3, NAME, base.check)
        left -= WEIGHTS[NAME]
        for number, name, check in self._rows(base, plan, probes, progress):
            if self.a.limit.stopped is None:
                progress(name, 0, 1)
            with self.a.limit.part(WEIGHTS[name] / left):
                checks += _each(number, name, check)
            left -= WEIGHTS[name]
        checks += alone(7, QUOTES, lambda _: listener.check())
        self.a.on_exchange = self.b.on_exchange = None
        return checks

    def _rows(
        self, base: _Base, plan: TimingPlan, probes: int, progress: Progress
    ) -> list[tuple[int, str, Row]]:
        """Return the checks after the first, in order."""
        prompts, form = base.prompts, self._form(base)
        b_names = names_of(self.b.principal.key, self._options.tenant_names[1])
        crossing = Crossing(
            self.a,
            self.b,
            prompts,
            self._spaces,
            light=probes < THOROUGH_PROBES,
            seed=plan.seed,
            progress=partial(progress, f"{EVERY_WAY}, tried"),
        )
        identity = Identity(self.a, self.b, prompts, form, b_names)
        handled = Handles(self.a, self.b, prompts, form)
        every_way: tuple[int, str, Row] = (3, EVERY_WAY, lambda _: crossing.run())
        others: list[tuple[int, str, Row]] = [
            (3, NAMED, lambda leaks: identity.named(canary(), leaks)),
            (3, ALMOST, identity.almost),
            (3, operators.NAME, partial(operators.bases, self.a, self.b, self._operator, prompts, form)),
            (7, SCRAPED, lambda _: Scrapes(self.a, self.b, prompts, form, b_names).check()),
            (8, handles.NAMES_NAME, lambda _: handles.names(self.a, self.b, prompts)),
            (8, handles.PINS, handled.pins),
            (8, handles.JOBS, handled.jobs),
            (8, handles.KEYS, handled.idempotency),
            (7, handles.CLEARS, lambda _: handled.clears(self._were_empty[0][1])),
        ]
        if base.is_blind and form != "ids":
            why = "prompts that were never sent are mostly cached already"
            others = [(number, name, _left_out(number, name, why)) for number, name, _ in others]
        return [every_way, *others]

    def _form(self, base: _Base) -> str:
        """Return the form of prompts for the other checks: ids, if all texts look the same to the server."""
        if self.a.endpoint() != COMPLETIONS:
            return "messages"
        if base.is_blind:
            with suppress(TargetError, Stopped):
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
        with self.a.cleaning():
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


def _left_out(number: int, name: str, why: str) -> Row:
    return lambda _: not_checked(number, name, why)


def _each(number: int, name: str, check: Row) -> list[Check]:
    """Make the check, or the checks, of one row."""
    return alone(number, name, check)


class _Base:
    """Check 3 in its simplest form: completions of texts without a salt. It also finds a sufficient prompt length."""

    def __init__(
        self, a: Target, b: Target, prompts: Prompts, probes: int, progress: Callable[[int, int], None]
    ) -> None:
        self._a, self._b, self.prompts, self._probes, self._progress = a, b, prompts, probes, progress
        self.is_blind = False
        """Prompts that were never sent are mostly cached: the server can't tell texts apart."""

    def check(self, leaks: list[str]) -> Check:
        """B computes P, then A asks for P twice. If the second time doesn't find P, the probe was blind.

        If something ends it, the probes until then count.
        """
        first = self._a.complete(self.prompts.text())
        if first.cached_tokens is None:
            reason = "the server doesn't report the number of cached tokens; only timing can detect leaks"
            return Check(3, NAME, Verdict.INCONCLUSIVE, reason)
        blind = self._lengthen()
        found = self._judged(self._probed(leaks))
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

    def _probed(self, leaks: list[str]) -> list[tuple[Completion, int, Completion, Completion]]:
        """Return what A found of each prompt: of a fresh one; of B's, by a lookup and by a completion; of its own."""
        self._a.complete(self.prompts.text())
        probes: list[tuple[Completion, int, Completion, Completion]] = []
        for done in range(1, self._probes + 1):
            try:
                fresh = self._a.complete(self.prompts.text())
                prompt = self.prompts.text()
                self._b.complete(prompt)
                found = _looked_up(self._a, prompt)
                probes.append((fresh, found, self._a.complete(prompt), self._a.complete(prompt)))
            except (TargetError, Stopped) as error:
                if probes and isinstance(error, Stopped) and self._a.limit.stopped is None:
                    break  # the time was up: the probes until then count
                judged = self._judged(probes) if probes else None
                leaks += [judged.detail] if judged is not None and judged.verdict is Verdict.LEAKS else []
                raise
            self._progress(done, self._probes)
        return probes

    def _judged(self, probes: list[tuple[Completion, int, Completion, Completion]]) -> Check:
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
            "probes": len(probes),
            "leaks": leaks,
            "blind": blind,
            "most_tokens_leaked": max(most - bound, 0),
            "fresh prompts mostly cached": known,
            "prompt_words": self.prompts.words,
        }
        if leaks:
            return Check(
                3, NAME, Verdict.LEAKS, f"{leaks} of {len(probes)} prompts of B were cached for A", figures
            )
        if known:
            why = f"{known} of {len(probes)} prompts that were never sent were mostly cached already"
            return Check(3, NAME, Verdict.BLIND, why, figures)
        if blind:
            why = f"A didn't find its own prompt again in {blind} probes"
            return Check(3, NAME, Verdict.BLIND, why, figures)
        detail = f"none of {len(probes)} prompts of B was cached for A; its own prompts were"
        if len(probes) < self._probes:
            detail += f"; {self._probes} were planned, and the time was up"
        return Check(3, NAME, Verdict.ISOLATED, detail, figures)


def _cached(completion: Completion) -> int:
    return completion.cached_tokens or 0


def _mostly_cached(completion: Completion) -> bool:
    return 0 < completion.prompt_tokens <= 2 * _cached(completion)


def _looked_up(target: Target, prompt: str) -> int:
    """Return the number of tokens that a lookup finds; 0 if the server has no lookups."""
    reply = lookup(target, Prompt("text", prompt), Extra())
    return (count(reply.document.get("matched_tokens")) or 0) if reply.is_ok else 0
