"""Check 3 over HTTP, identity: can a client choose its tenant, and is a key that is almost A's accepted as A's?

A tenant must follow from the key alone. So both sides name the same invented tenant, in fields of the body,
headers, cookies and parameters that servers are known to read. A also names B by B's possible names. If A then
finds B's prompt, the server used the name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.audit.probe_prompts import Prompts, chance_tokens
from radixkv.audit.surfaces import PLAIN, READERS, Extra, Surface
from radixkv.audit.target import Principal, Target, TargetError, answered
from radixkv.audit.verdict import Check, Verdict, ended_early, not_checked

NAMED = "cross-tenant probe, tenants named by the client"
ALMOST = "cross-tenant probe, keys that are almost A's"
FIELDS = (
    "tenant", "tenant_id", "user", "user_id", "org", "organization", "project", "account", "customer", "namespace",
    "cache_salt", "cache_key", "prompt_cache_key", "safety_identifier", "session_id", "api_key",
)  # fmt: skip
HEADERS = (
    "X-Tenant", "X-Tenant-Id", "Tenant", "X-User", "X-User-Id", "X-Org-Id", "X-Organization-Id", "X-Project-Id",
    "X-Account-Id", "X-Namespace", "X-Cache-Salt", "X-Forwarded-User", "X-Remote-User", "X-Consumer-Username",
    "OpenAI-Organization", "OpenAI-Project", "X-Session-Id",
)  # fmt: skip
KEY_HEADERS = ("X-Api-Key", "Api-Key")
SHORT_KEY = 20
GIVE_UP_AFTER = 5
"""Requests without an answer, after which the server has stopped answering."""
_WANTED = ("a completion", "a stream", "a lookup", "a warm")


@dataclass(frozen=True, slots=True)
class Claim:
    """A tenant that requests name: what A's requests and B's requests carry."""

    name: str
    a: Extra
    b: Extra


def headers_of(value: str) -> dict[str, str]:
    """Return all headers that may name a tenant, with this value."""
    return dict.fromkeys(HEADERS, value)


def names_of(key: str | None, given: str | None) -> list[str]:
    """Return the possible names of a tenant: the given one, and parts of a short key.

    Long keys are secrets and aren't sent.
    """
    guesses = [key, key.rpartition("-")[2], key.rpartition("_")[2]] if key and len(key) <= SHORT_KEY else []
    return [each for each in dict.fromkeys([given, *guesses]) if each]


def claims(shared: str, b_names: list[str]) -> Iterator[Claim]:
    """First both sides name the same tenant; then A alone names B."""
    for name in FIELDS:
        yield _both(f"the field {name}", Extra({name: shared}))
    yield _both("the field metadata", Extra({"metadata": {"tenant": shared, "user_id": shared}}))
    yield _both("headers", Extra(headers=headers_of(shared)))
    yield _both("a cookie", Extra(headers={"Cookie": f"tenant={shared}; user={shared}"}))
    yield _both("a parameter of the query", Extra(params={"tenant": shared, "user": shared}))
    for header in KEY_HEADERS:
        yield _both(f"the header {header}", Extra(headers={header: shared}))
    for known in b_names:
        for name in FIELDS:
            yield Claim(f"the field {name} that names B", Extra({name: known}), Extra())
        yield Claim("headers that name B", Extra(headers=headers_of(known)), Extra())
        yield Claim("a parameter of the query that names B", Extra(params={"tenant": known}), Extra())


def _both(name: str, extra: Extra) -> Claim:
    return Claim(name, extra, extra)


class Identity:
    """Both checks. ``b_names``: possible names of B."""

    def __init__(self, a: Target, b: Target, prompts: Prompts, form: str, b_names: list[str]) -> None:
        self._a, self._b, self._prompts, self._form, self._b_names = a, b, prompts, form, b_names
        self._failed: list[TargetError] = []
        """Why requests got no answer. To be refused is an answer."""

    def named(self, shared: str, leaks: list[str]) -> Check:
        """Whether the server uses a tenant that a request names. It adds what it finds to ``leaks``."""
        readers = self._telling()
        if not readers:
            return not_checked(3, NAMED, "A's own prompts aren't reported as cached")
        readers = [
            (surface, fresh)
            for surface, fresh in readers
            if (self._tried(surface, self._a, PLAIN, self._b, PLAIN) or 0) <= fresh
        ]
        if not readers:
            return not_checked(3, NAMED, "A finds B's prompts without naming a tenant")
        tried, refused = 0, []
        for claim in claims(shared, self._b_names):
            if self._a.principal.fields.keys() & claim.a.fields.keys():
                continue  # it is how this server tells tenants apart
            accepted, leaking = self._claimed(claim, readers)
            leaks += [f"A found B's prompt with {claim.name}, by {name}" for name in leaking]
            tried += accepted
            refused += [] if accepted else [claim.name]
        figures: dict[str, Any] = {"leaks": leaks, "taken": tried, "refused": refused}
        if leaks:
            return Check(3, NAMED, Verdict.LEAKS, "; ".join(leaks[:5]), figures)
        if self._failed:
            return ended_early(3, NAMED, [], self._failed[0])
        detail = f"{len(refused)} ways to name a tenant are refused, and {tried} have no effect"
        return Check(3, NAMED, Verdict.ISOLATED, detail, figures)

    def _telling(self) -> list[tuple[Surface, int]]:
        """Return the surfaces by which A finds its own prompt, and the most that they may report for a fresh one."""
        found = []
        for surface in READERS:
            if surface.name in _WANTED and self._form in surface.forms:
                fresh = self._fresh(surface, self._a, Extra())
                own = self._tried(surface, self._a, Extra(), by=self._a)
                bound = None if fresh is None or own is None else fresh + chance_tokens(own)
                if bound is not None and own is not None and own > bound:
                    found.append((surface, bound))
        return found

    def _fresh(self, surface: Surface, reader: Target, extra: Extra) -> int | None:
        """Return the most that a reader finds of two fresh prompts; None if it is refused."""
        found = [self._tried(surface, reader, extra) for _ in range(2)]
        return None if found[0] is None else max(each or 0 for each in found)

    def _tried(self, surface: Surface, reader: Target, extra: Extra, by: Target | None = None,
               by_extra: Extra = PLAIN) -> int | None:  # fmt: skip
        try:
            return self._ask(surface, reader, extra, by, by_extra)
        except TargetError as error:
            self._failed.append(error)
            if len(self._failed) >= GIVE_UP_AFTER:
                raise
            return None

    def _ask(self, surface: Surface, reader: Target, extra: Extra, by: Target | None = None,
             by_extra: Extra = PLAIN) -> int | None:  # fmt: skip
        """Return what a reader finds of a fresh prompt, after ``by`` wrote it; None if a request was refused."""
        prompt = self._prompts.fresh(self._form)
        if by is not None:
            written = answered(self._writer(surface).ask(by, prompt, by_extra))
            if not written.is_ok:
                return None
        reply = answered(surface.ask(reader, prompt, extra))
        return (surface.found(reply) or 0) if reply.is_ok else None

    @staticmethod
    def _writer(surface: Surface) -> Surface:
        return surface if surface.computes else READERS[0]

    def _claimed(self, claim: Claim, readers: list[tuple[Surface, int]]) -> tuple[bool, list[str]]:
        """Whether the server accepted any request with this claim, and the surfaces by which A found B's prompt."""
        accepted, leaking = False, []
        for surface, fresh in readers:
            claimed = self._tried(surface, self._a, claim.a)
            if claimed is None:
                continue
            accepted, bound = True, max(fresh, claimed)
            theirs = self._tried(surface, self._a, claim.a, self._b, claim.b) or 0
            if theirs > bound and theirs > (self._fresh(surface, self._a, claim.a) or 0):
                leaking.append(surface.name)
        return accepted, leaking

    # keys

    def almost(self, leaks: list[str]) -> Check:
        """Whether a key or a salt that differs slightly from A's, or none, reads what A wrote.

        It adds what it finds to ``leaks``.
        """
        self._failed.clear()
        readers, own = self._telling(), self._a.principal
        kind, secret = ("key", own.key) if own.salt is None else ("salt", own.salt)
        if not readers or secret is None:
            return not_checked(3, ALMOST, "A's own prompts aren't reported as cached, or A has no key")
        found = {}
        for name, near in almost(secret, kind).items():
            found[name] = self._as(_with(own, near), readers)
            leaks += [f"A's prompts are found with {name}"] if found[name] == "reads A's prompts" else []
        if leaks:
            return Check(3, ALMOST, Verdict.LEAKS, "; ".join(leaks), found)
        if self._failed:
            return ended_early(3, ALMOST, [], self._failed[0])
        detail = f"{len(found)} {kind}s that are almost A's find nothing"
        return Check(3, ALMOST, Verdict.ISOLATED, detail, found)

    def _as(self, principal: Principal, readers: list[tuple[Surface, int]]) -> str:
        with Target(self._a.url, principal, model=self._a.model, limit=self._a.limit) as other:
            answered = False
            for surface, fresh in readers:
                own = self._tried(surface, other, Extra(), by=self._a)
                answered = answered or own is not None
                if (own or 0) > fresh and (own or 0) > (self._fresh(surface, other, Extra()) or 0):
                    return "reads A's prompts"
        return "finds nothing" if answered else "is refused"


def _with(own: Principal, near: str | None) -> Principal:
    """Return a side like this one, with another salt if it has one, otherwise with another key."""
    if own.salt is None:
        return Principal(near)
    return Principal(own.key) if near is None else Principal.salted(near, own.key)


def almost(secret: str, kind: str = "key") -> Mapping[str, str | None]:
    """Return keys, or salts, that the server must not accept as this one."""
    near: dict[str, str | None] = {
        f"A's {kind} in another case": secret.swapcase(),
        f"A's {kind} without its end": secret[:-1],
        f"A's {kind} with more characters at its end": f"{secret}x",
        f"no {kind}": None,
    }
    return {name: each for name, each in near.items() if each != secret and each != ""}
