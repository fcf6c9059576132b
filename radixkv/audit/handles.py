"""Check 8 over HTTP: names of completions, pins and jobs. Also a part of check 7: what A's clear forgets.

For A, a handle of B's must behave exactly like one that was never issued: the same status and the same body. So
each request is made twice: with B's handle, and with an invented one of the same shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from radixkv.audit.probe_prompts import Prompt, Prompts, canary
from radixkv.audit.surfaces import LOOKUP, READERS, Extra, Surface, ended_job, pin, warm
from radixkv.audit.target import Reply, Target, answered, granted
from radixkv.audit.verdict import Check, Verdict, alone, not_checked

NAMES_NAME = "handles"
PINS = "handles, pins"
JOBS = "handles, jobs"
KEYS = "handles, Idempotency-Key"
CLEARS = "what A's clear forgets"
NUM_NAMES = 12
LONG_TTL_S = 3600


def names(a: Target, b: Target, prompts: Prompts) -> Check:
    """Ids of A's requests, with B's requests in between: they must be unique and must not count B's requests."""
    found = []
    for at in range(NUM_NAMES):
        found.append(a.complete(prompts.text()).id)
        if at % 2:
            b.complete(prompts.text())
    figures = {"names": NUM_NAMES, "shortest": min(map(len, found))}
    if len(set(found)) == 1:
        told = "the same id" if found[0] else "no id"
        detail = f"all completions have {told}, which can't show anything of another tenant"
        return Check(8, NAMES_NAME, Verdict.NOT_APPLICABLE, detail, figures)
    if len(set(found)) < len(found):
        return Check(8, NAMES_NAME, Verdict.INCONCLUSIVE, "some completions have the same id", figures)
    for part in zip(*(re.findall(r"\d+", name) for name in found), strict=False):
        counted = counts_others([int(each) for each in part])
        if counted:
            return Check(8, NAMES_NAME, Verdict.LEAKS, "ids of A's completions count B's requests", figures)
        if counted is None:
            detail = "ids rise; it is unknown whether with time or with other tenants' requests"
            return Check(8, NAMES_NAME, Verdict.INCONCLUSIVE, detail, figures)
    return Check(8, NAMES_NAME, Verdict.ISOLATED, f"{NUM_NAMES} ids of A's in no order", figures)


def counts_others(values: list[int]) -> bool | None:
    """Whether a number in ids also counts B's requests, which lie in every other gap. None if it rises otherwise.

    Twelve random values rise by chance in one of 479 million cases.
    """
    gaps = [after - before for before, after in pairwise(values)]
    if min(gaps) <= 0:
        return False
    alone, beside = set(gaps[::2]), set(gaps[1::2])
    if len(alone) == len(beside) == 1:
        return alone != beside
    return None


def made_up(name: str) -> str:
    """Return a name that was never issued, of the same shape."""
    if name.isdecimal():
        return str(9_000_000 + int(name[:6]))
    kept = name[: max(name.rfind("-"), name.rfind("_")) + 1]
    drawn = "".join(canary()[2:] for _ in range(len(name) // 12 + 1))
    return kept + drawn[: len(name) - len(kept)]


class Handles:
    """The checks of pins, jobs and clears of both tenants. They add what they find to ``leaks`` as they find it."""

    def __init__(self, a: Target, b: Target, prompts: Prompts, form: str) -> None:
        self._a, self._b, self._prompts, self._form = a, b, prompts, form

    def _same(self, method: str, path: str, theirs: str, **named: Any) -> str | None:
        """None if A gets the same answer for B's handle as for an invented one; otherwise the difference."""
        other = made_up(theirs)
        told, unknown = (
            answered(self._a.send(method, path.format(name), **named)) for name in (theirs, other)
        )
        one, two = (
            (reply.status, reply.text.replace(name, "")) for reply, name in ((told, theirs), (unknown, other))
        )
        if one == two:
            return None
        return f"{method} {path.format('ID')} answers {told.status} for B's id, {unknown.status} for an unknown one"

    # pins

    def pins(self, leaks: list[str]) -> Check:
        """B pins a prefix. A must not see, end, renew or change that pin."""
        with self._pinning() as (a_pin, b_pin, b_prompt):
            if not (a_pin.is_ok and b_pin.is_ok):
                refused = b_pin if a_pin.is_ok else a_pin
                if len(entries(self._a.send("GET", "/v1/pins"))) > self._a_before + a_pin.is_ok:
                    return Check(8, PINS, Verdict.LEAKS, "A's list has more pins than A's own")
                return not_checked(8, PINS, f"no prefix could be pinned, {refused.reason}")
            return self._pins_of(a_pin, b_pin, b_prompt, leaks)

    def _pins_of(self, a_pin: Reply, b_pin: Reply, b_prompt: Prompt, leaks: list[str]) -> Check:
        listed = self._a.send("GET", "/v1/pins")
        if not listed.is_ok:
            return not_checked(8, PINS, f"pins can't be listed, {listed.reason}")
        if len(entries(listed)) < 1:
            return Check(8, PINS, Verdict.BLIND, "A's own pin isn't in its list")
        leaks += [] if len(entries(listed)) == self._a_before + 1 else ["A's list has more pins than A's own"]
        name, own = str(b_pin.document.get("id")), str(a_pin.document.get("id"))
        self._a.send("DELETE", f"/v1/pins/{own}")  # ids may be counted per tenant, so B's id may be A's too
        before = self._standing(name)
        for method, path, body in self._acts():
            told = self._same(method, path, name, **({} if body is None else {"body": body}))
            leaks += [] if told is None else [told]
        unwarmed = pin(self._a, b_prompt, Extra())
        if unwarmed.is_ok:
            leaks.append("A could pin a prompt that only B had computed")
            self._unpin(unwarmed)
        warm(self._a, b_prompt, Extra())
        renewed = self._a.send("POST", "/v1/pins", {**b_prompt.of_prefix(), "ttl_s": LONG_TTL_S})
        self._unpin(renewed)
        after = self._standing(name)
        if before is None:
            return Check(8, PINS, Verdict.BLIND, "B's own pin isn't in its list")
        if after is None:
            leaks.append("A ended B's pin")
        elif after > before:
            leaks.append("A renewed B's pin")
        figures = {"leaks": leaks, "own pins seen": len(entries(listed))}
        if leaks:
            return Check(8, PINS, Verdict.LEAKS, "; ".join(leaks), figures)
        return Check(
            8, PINS, Verdict.ISOLATED, "A sees only its own pins, and can't end or renew B's", figures
        )

    @staticmethod
    def _acts() -> list[tuple[str, str, dict[str, Any] | None]]:
        ttl = {"ttl_s": LONG_TTL_S}
        return [
            ("GET", "/v1/pins/{}", None),
            ("PUT", "/v1/pins/{}", ttl),
            ("PATCH", "/v1/pins/{}", ttl),
            ("POST", "/v1/pins/{}", ttl),
            ("POST", "/v1/pins/{}/renew", ttl),
            ("DELETE", "/v1/pins/{}", None),
        ]

    @contextmanager
    def _pinning(self) -> Iterator[tuple[Reply, Reply, Prompt]]:
        """One pin of each tenant. Both end afterwards."""
        self._a_before = len(entries(self._a.send("GET", "/v1/pins")))
        prompts = self._prompts.fresh(self._form), self._prompts.fresh(self._form)
        made: list[Reply] = []
        try:
            for target, prompt in zip((self._a, self._b), prompts, strict=True):
                warm(target, prompt, Extra())
                made.append(pin(target, prompt, Extra()))
            yield made[0], made[1], prompts[1]
        finally:
            for target, reply in zip((self._a, self._b), made, strict=False):
                if reply.is_ok:
                    with target.cleaning():
                        target.send("DELETE", f"/v1/pins/{reply.document.get('id')}")

    def _unpin(self, reply: Reply) -> None:
        if reply.is_ok:
            self._a.send("DELETE", f"/v1/pins/{reply.document.get('id')}")

    def _standing(self, name: str) -> float | None:
        """Return the seconds that B's pin still holds; None if it has ended."""
        for each in entries(answered(self._b.send("GET", "/v1/pins"))):
            if str(each.get("id")) == name:
                left = each.get("ttl_s")
                return float(left) if isinstance(left, int | float) else 0.0
        return None

    # jobs

    def jobs(self, leaks: list[str]) -> Check:
        """For A, B's job must behave like a job that doesn't exist."""
        started = [self._job(target) for target in (self._a, self._b)]
        refused = next((each for each in started if each.document.get("job") is None), None)
        if refused is not None:
            return not_checked(8, JOBS, f"no job could be started, {refused.reason}")
        own, theirs = (str(each.document["job"]) for each in started)
        if not ended_job(self._a, started[0]).is_ok:
            return Check(8, JOBS, Verdict.BLIND, "A can't read its own job")
        ended_job(self._b, started[1])
        acts = [
            ("GET", "/v1/warm/{}"),
            ("GET", "/v1/jobs/{}"),
            ("DELETE", "/v1/warm/{}"),
            ("POST", "/v1/warm/{}/cancel"),
        ]
        for method, path in acts:
            told = self._same(method, path, theirs)
            leaks += [] if told is None else [told]
        if not answered(self._b.send("GET", f"/v1/warm/{theirs}")).is_ok:
            leaks.append("A's requests ended B's job")
        figures = {"leaks": leaks, "length of ids": len(own)}
        if leaks:
            return Check(8, JOBS, Verdict.LEAKS, "; ".join(leaks), figures)
        return Check(
            8,
            JOBS,
            Verdict.ISOLATED,
            "for A, B's job looks like a job that doesn't exist; A reads its own job",
            figures,
        )

    def _job(
        self, target: Target, prompt: Prompt | None = None, key: str | None = None, *, wait: bool = False
    ) -> Reply:
        body = {**(prompt or self._prompts.fresh(self._form)).of_prefix(), "wait": wait}
        headers = {} if key is None else {"Idempotency-Key": key}
        return answered(target.send("POST", "/v1/warm", body, headers=headers))

    def idempotency(self, leaks: list[str]) -> Check:
        """An Idempotency-Key that B used must be new for A."""
        key, prompt = canary(), self._prompts.fresh(self._form)
        theirs = self._job(self._b, prompt, key)
        again = self._job(self._b, prompt, key)
        name = theirs.document.get("job")
        if name is None or again.document.get("job") != name:
            return not_checked(8, KEYS, "the server ignores an Idempotency-Key")
        ended_job(self._b, theirs)
        other = self._job(self._a, None, key)
        if not other.is_ok:
            leaks.append(f"a key that B used is refused to A, {other.status}")
        same_key = canary()
        ended_job(self._b, self._job(self._b, prompt, same_key))
        mine = self._job(self._a, prompt, same_key)
        result = ended_job(self._a, mine) if mine.is_ok else mine
        if name in (other.document.get("job"), mine.document.get("job")) or not mine.is_ok:
            leaks.append("A was given B's job for a key that B used")
        elif _cached_before(result) != 0:
            leaks.append("A's warm with a key that B used found B's prefix")
        fresh = self._job(self._a, self._prompts.fresh(self._form), canary())
        if not fresh.is_ok:
            return Check(8, KEYS, Verdict.BLIND, f"an unused key is refused to A, {fresh.reason}")
        if leaks:
            return Check(8, KEYS, Verdict.LEAKS, "; ".join(leaks), {"leaks": leaks})
        return Check(
            8, KEYS, Verdict.ISOLATED, "keys that B used are new for A; B gets its job again with them"
        )

    # clears

    def clears(self, a_is_empty: bool) -> list[Check]:
        """A clears what it has under a salt, under an adapter, and everything. B must keep its own."""
        reader = self._telling()
        if reader is None:
            return [not_checked(7, CLEARS, "A's own prompts aren't reported as cached")]
        salt, adapter = canary(), canary()
        ways: list[tuple[str, dict[str, str], dict[str, str]]] = [
            ("a salt", {"salt": salt}, {"salt": salt}),
            ("an adapter", {"adapter": adapter}, {"adapter": adapter}),
            ("no salt", {}, {"salt": ""}),
            ("everything", {}, {}),
        ]
        found: list[Check] = []
        for what, fields, params in ways:
            name = f"{CLEARS}, {what}"
            if fields or a_is_empty:
                cleared = partial(self._cleared, reader, name, fields, params)
                found += alone(7, name, lambda _, cleared=cleared: cleared())  # type: ignore[misc]
            else:
                found.append(not_checked(7, name, "A had cached prefixes that this check would have cleared"))
        return found

    def _telling(self) -> Surface | None:
        """Return a surface that shows A its own prompt: a completion, or else a lookup."""
        prompt = self._prompts.fresh(self._form)
        READERS[0].ask(self._a, prompt, Extra())
        for surface in (READERS[0], LOOKUP):
            if surface.found(surface.ask(self._a, prompt, Extra())):
                return surface
        return None

    def _cleared(self, reader: Surface, name: str, fields: dict[str, str], params: dict[str, str]) -> Check:
        extra = Extra(fields)
        prompts = [self._prompts.fresh(self._form) for _ in range(2)]
        for target, prompt in zip((self._a, self._b), prompts, strict=True):
            reply = READERS[0].ask(target, prompt, extra)
            if not reply.is_ok:
                return not_checked(7, name, f"the server refuses it, {reply.reason}")
        cleared = self._a.send("DELETE", "/v1/cache", params=params)
        if not cleared.is_ok:
            return not_checked(7, name, f"A can't clear, {cleared.reason}")
        own, theirs = (
            reader.found(granted(reader.ask(target, prompt, extra))) or 0
            for target, prompt in zip((self._a, self._b), prompts, strict=True)
        )
        again = []
        for target, prompt in zip((self._a, self._b), prompts, strict=True):
            READERS[0].ask(target, prompt, extra)
            again.append(reader.found(granted(reader.ask(target, prompt, extra))) or 0)
        figures = {"A's before": again[0], "A's after": own, "B's after": theirs, "B's again": again[1]}
        if 2 * theirs < again[1]:
            return Check(7, name, Verdict.LEAKS, "A's clear removed B's prefixes", figures)
        if 2 * own >= again[0]:
            return Check(7, name, Verdict.BLIND, "A's clear removed none of A's prefixes", figures)
        return Check(7, name, Verdict.ISOLATED, "A's clear removed A's prefixes, and none of B's", figures)


def _cached_before(reply: Reply) -> int:
    result = reply.document.get("result")
    found = result.get("cached_before") if isinstance(result, dict) else 0
    return found if isinstance(found, int) else 0


def entries(reply: Reply) -> list[dict[str, Any]]:
    """Return the entries of a list of pins."""
    found = reply.document.get("pins") if reply.is_ok else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
