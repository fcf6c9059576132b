"""Check 7 over HTTP: does anything that A can read depend on what B does, or quote what only B sent?

*Differences*: A reads everything that it can read, several times while no other tenant acts. It reads again after B
has used every surface of the server, and once more while a stream of B's is open. Then A acts itself, as the
control: its own requests must show.

*Quotes*: the prompts, salts and ids of the audit are random words. A reply to A leaks if it contains a word that
only B sent or received. Every reply counts: a list, an error, a header, generated text.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import httpx

from radixkv.audit.identity import headers_of
from radixkv.audit.limit import Stopped
from radixkv.audit.probe_prompts import CANARY, Prompts, canary
from radixkv.audit.surfaces import WRITERS, Extra
from radixkv.audit.target import COMPLETIONS, Reply, Target, TargetError, answered
from radixkv.audit.verdict import Check, Verdict, not_checked

NAME, QUOTES = "errors and metrics", "replies that quote another tenant"
SCRAPES = 3
MAX_LINE = 200
LONGEST_ID, SHORTEST_ID = 200, 12
READ = (
    "/metrics", "/v1/stats", "/v1/usage", "/v1/models", "/v1/pins", "/v1/pins?all=true", "/v1/warm", "/v1/jobs",
    "/v1/warm?all=true", "/v1/cache", "/v1/namespaces", "/v1/sessions", "/v1/batches", "/v1/files", "/v1/replicas",
    "/v1/bases", "/v1/keys", "/v1/tenants", "/v1/route", "/v1/lookup", "/healthz", "/health", "/readyz", "/version",
    "/stats", "/status", "/load", "/get_server_info", "/server_info", "/debug", "/openapi.json",
)  # fmt: skip
"""Paths that A reads. Most servers have few of them."""
OPERATORS = ("/v1/bases", "/v1/keys", "/v1/tenants")
"""Paths that radixkv shows only to the operator."""
_VOLATILE_HEADERS = re.compile(
    "date|x-request-id|x-process-time|openai-processing-ms|cf-ray|x-envoy-upstream-service-time"
    "|.*ratelimit.*(remaining|reset).*",
    re.IGNORECASE,
)
"""Headers that differ from answer to answer. What a rate limit leaves grows with the time between A's own requests."""
_VOLATILE_FIELDS = frozenset({"id", "created", "timings", "seconds"})
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")
_EVICTION_COUNTS = re.compile(
    r'"(?:(?:used|resident|evictable|evicted)_blocks|(?:hit|missed|read|read_host|read_disk|uncached)_tokens|held_token_s|num_namespaces)"'
    r":\s*\d+(?:\.\d+)?,?"
)
_COUNTED = ("/v1/stats", "/v1/usage")
"""Paths whose answers are counts of the caller."""
Answer = tuple[int, Mapping[str, str], str]


class Listener:
    """Inspects all answers to A and B, and records where an answer to A contains what only B knows."""

    def __init__(self, a: Target, b: Target) -> None:
        self._sent: dict[str, set[str]] = {"a": set(), "b": set()}
        self._given: set[str] = set()
        """Ids that the server gave to B."""
        self._own_ids: set[str] = set()
        self.num_replies = self.num_own_quotes = 0
        self.leaks: list[str] = []
        a.on_exchange, b.on_exchange = self._to_a, self._to_b

    def _to_b(self, answer: httpx.Response) -> None:
        self._sent["b"].update(_canaries_sent(answer.request))
        self._given |= _ids(answer)

    def _to_a(self, answer: httpx.Response) -> None:
        self._sent["a"].update(_canaries_sent(answer.request))
        self._own_ids |= _ids(answer)
        told = f"{answer.headers}\n{answer.text}"
        quoted = set(CANARY.findall(told))
        self.num_replies += 1
        self.num_own_quotes += bool(quoted & self._sent["a"])
        known = (self._sent["b"] & quoted) | {each for each in self._given if each in told}
        sent = f"{answer.request.url}{_body(answer.request)}"
        foreign = [each for each in known - self._sent["a"] - self._own_ids if each not in sent]
        if foreign:
            self.leaks.append(f"{answer.request.method} {answer.request.url.path} told {foreign[0]}")

    def check(self) -> Check:
        """Whether A received what only B knows. Call it after all other checks."""
        figures = {
            "replies": self.num_replies,
            "quotes of A's own": self.num_own_quotes,
            "leaks": self.leaks[:20],
        }
        if self.leaks:
            what = (
                f"{len(self.leaks)} replies to A contain text that only B sent or received: {self.leaks[0]}"
            )
            return Check(7, QUOTES, Verdict.LEAKS, what, figures)
        if not self.num_own_quotes:
            return not_checked(7, QUOTES, "no reply repeats what A itself sent, so none could repeat B's")
        detail = (
            f"none of {self.num_replies} replies to A contains text that only B sent; "
            f"{self.num_own_quotes} contain A's own text"
        )
        return Check(7, QUOTES, Verdict.ISOLATED, detail, figures)


def _canaries_sent(request: httpx.Request) -> set[str]:
    return set(CANARY.findall(f"{request.url}{request.headers}{_body(request)}"))


def _body(request: httpx.Request) -> str:
    try:
        return request.content.decode("utf-8", "replace")
    except httpx.RequestNotRead:
        return ""


def _ids(answer: httpx.Response) -> set[str]:
    """Return the names that the reply to a POST gives to what it made."""
    if answer.request.method != "POST":
        return set()
    documents = Reply(answer.status_code, answer.headers, answer.text).documents[:1]
    found = [each.get(name) for each in documents for name in ("id", "job", "job_id")]
    return {each for each in found if isinstance(each, str) and SHORTEST_ID <= len(each) <= LONGEST_ID}


ANSWER_SHARE, ANSWER_S = 1 / 8, 5.0
"""Share of the time that is left, or seconds, which one answer may take."""
ABORTED = 0
"""The status of a request without an answer."""


class Scrapes:
    """Compares what A reads with and without B's actions. ``b_names``: possible names of B."""

    def __init__(self, a: Target, b: Target, prompts: Prompts, form: str, b_names: list[str]) -> None:
        self._a, self._b, self._prompts, self._form, self._b_names = a, b, prompts, form, b_names
        self._own = prompts.fresh(form)
        """A's own prompt, sent in each scrape."""
        self._was_read = False
        self._undo: list[Callable[[], None]] = []
        self._failed: TargetError | Stopped | None = None
        """Why the last request without an answer has none."""

    def check(self) -> Check:
        """Compare what A reads after B acted with what it read before. Differences are checked a second time.

        Raises TargetError if the server stops answering: then nothing can be compared.
        """
        first = self._scrape()
        try:
            found = self._round(first)
            if found.changed:
                again = {_answer_of(each) for each in self._round(first).changed}
                found.changed = [each for each in found.changed if _answer_of(each) in again]
        finally:
            self._undo_all()
        return found.check()

    def _undo_all(self) -> None:
        with self._a.cleaning():
            while self._undo:
                self._undo.pop()()
        self._undo.clear()

    def _round(self, first: dict[str, Answer]) -> Round:
        quiet = [self._scrape(first) for _ in range(SCRAPES + 1)]
        self._act(self._b)
        after = self._scrape()
        changed, masked = differences(quiet, after)
        if beside := self._scrape_beside():
            changed += differences([*quiet[1:], after], beside)[0]
        changed += [f"GET {path} #: shown to a tenant" for path in OPERATORS if _shows(after, path)]
        self._act(self._a)
        control = self._scrape(first)
        self._undo_all()
        self._require_answers([*quiet, after, *([beside] if beside else []), control])
        seen = differences(quiet, control)[0] + differences([first, first], quiet[-1])[0]
        return Round(list(dict.fromkeys(changed)), masked, seen, sorted(after))

    def _require_answers(self, scrapes: list[dict[str, Answer]]) -> None:
        """Raise TargetError if a request has an answer in one scrape and none in another, or if none has an answer."""
        statuses = {name: {scrape[name][0] == ABORTED for scrape in scrapes} for name in scrapes[0]}
        came_and_went = [name for name, aborted in statuses.items() if len(aborted) > 1]
        if self._failed is not None and (
            came_and_went or all(aborted == {True} for aborted in statuses.values())
        ):
            what = came_and_went[0].partition(" #")[0] if came_and_went else "requests"
            raise TargetError(f"the server doesn't always answer {what}: {self._failed}")

    def _act(self, target: Target) -> None:
        """Use everything that makes a server work or count, with fresh prompts and names, and with A's own prompt."""
        names = {"salt": canary(), "adapter": canary()}
        extras = [Extra(), Extra({"salt": names["salt"]}), Extra(names)]
        with suppress(TargetError):
            target.send("POST", target.endpoint(), {**target.options(), "prompt": "", "user": canary()})
            target.send("GET", "/v1/stats")
            for _ in range(2):
                WRITERS[0].ask(target, self._own, Extra())
        for writer in (each for each in WRITERS if self._form in each.forms):
            for extra in extras:
                with suppress(TargetError):
                    reply = writer.ask(target, self._prompts.fresh(self._form), extra)
                    if not reply.is_ok:
                        break
                    if writer.undo is not None:
                        self._undo.append(partial(writer.undo, target, reply))

    def _scrape_beside(self) -> dict[str, Answer]:
        """Return a scrape while a stream of B's is open."""
        body = {**self._b.options(), **self._prompts.fresh(self._form).of_completion()}
        try:
            with self._b.open_stream({**body, "stream": True, "max_tokens": 16}):
                return self._scrape()
        except TargetError:
            return {}

    def _scrape(self, absent: Mapping[str, Answer] | None = None) -> dict[str, Answer]:
        """Return everything that A can read. Paths that were absent in an earlier scrape are skipped.

        From the second scrape on, A's own prompt is computed again before it is compared: other tenants' requests may
        have evicted it.
        """
        own, options = self._own.of_completion(), self._a.options()
        path = self._a.endpoint()
        asks: list[tuple[str, str, dict[str, Any]]] = [("GET", each, {}) for each in READ]
        asks += [
            ("GET", each, {"headers": headers_of(name)})
            for name in self._b_names
            for each in ("/v1/stats", "/v1/pins", "/v1/warm")
        ]
        asks += [
            ("GET", "/v1/warm/" + "x" * 32, {}),
            ("GET", "/v1/nowhere", {}),
            ("DELETE", "/v1/cache?salt=audit-of-nobody", {}),
            ("POST", COMPLETIONS, {"json": {"prompt": "", "tenant": "other"}}),
            ("POST", COMPLETIONS, {"content": b"{", "headers": {"Content-Type": "application/json"}}),
            ("POST", COMPLETIONS, {"json": {"prompt": "x", "max_tokens": 10**8}}),
        ]  # fmt: skip
        of_own: list[tuple[str, str, dict[str, Any]]] = [
            ("POST", path, {"json": {**options, **own, "max_tokens": 4}}),
            ("POST", path, {"json": {**options, **own, "max_tokens": 4, "echo": True}}),
            ("POST", path, {"json": {**options, **own, "max_tokens": 4, "stream": True,
                                     "stream_options": {"include_usage": True}}}),
            ("POST", "/v1/route", {"json": {**self._own.of_prefix(), "predict": False}}),
            ("POST", "/v1/lookup", {"json": self._own.of_prefix()}),
        ]  # fmt: skip
        found = {}
        for at, (method, each, named) in enumerate([*asks, *of_own]):
            if at == len(asks):
                self._compute_again()
            name = f"{method} {each} #{at}"
            before = (absent or {}).get(name)
            is_absent = before is not None and method == "GET" and before[0] in (404, 405)
            found[name] = before if is_absent and before else self._answer(method, each, named)
        return found

    def _compute_again(self) -> None:
        """Let A compute its own prompt, except in the first scrape, which shows the prompt when it is new."""
        if self._was_read:
            with suppress(TargetError):
                WRITERS[0].ask(self._a, self._own, Extra())
        self._was_read = True

    def _answer(self, method: str, path: str, named: dict[str, Any]) -> Answer:
        try:
            with self._a.limit.part(ANSWER_SHARE, ANSWER_S):
                reply = (
                    self._a.send(method, path, **named) if "json" not in named else self._posted(path, named)
                )
            answered(reply)
        except (TargetError, Stopped) as error:
            self._a.limit.check()
            self._failed = error
            return ABORTED, {}, "aborted"
        headers = {
            name: text for name, text in reply.headers.items() if not _VOLATILE_HEADERS.fullmatch(name)
        }
        text = reply.text
        if path.startswith(_COUNTED):
            headers.pop("content-length", None)  # of the counts that are left out too
            text = without_evictions(text)
        if reply.is_ok and "json" in named:
            headers.pop("content-length", None)
            text = summary(reply)
        return reply.status, headers, text

    def _posted(self, path: str, named: dict[str, Any]) -> Reply:
        return self._a.send("POST", path, named["json"])


def _shows(after: Mapping[str, Answer], path: str) -> bool:
    """Whether an operator's endpoint lists anything to A."""
    status, _, text = next(answer for name, answer in after.items() if name.startswith(f"GET {path} #"))
    documents = Reply(status, {}, text).documents if status == 200 else []
    return any(isinstance(value, list) and value for each in documents for value in each.values())


def _answer_of(change: str) -> str:
    return change.partition(": ")[0]


def differences(quiet: list[dict[str, Answer]], after: dict[str, Answer]) -> tuple[list[str], list[str]]:
    """Return what changed in any answer, and what wasn't steady before."""
    changed: list[str] = []
    masked: list[str] = []
    for name, answer in after.items():
        found = compared([each[name] for each in quiet], answer)
        changed += [f"{name}: {what}" for what in found[0]]
        masked += [f"{name}: {what}" for what in found[1]]
    return changed, masked


@dataclass(slots=True)
class Round:
    """What changed as B acted, what could not be compared, and what changed as A acted."""

    changed: list[str]
    masked: list[str]
    seen: list[str]
    names: list[str]

    def check(self) -> Check:
        """Return the check for the report."""
        figures = {
            "compared": self.names,
            "changed": self.changed[:50],
            "not_compared": self.masked[:50],
            "changed by A's own requests": self.seen[:20],
        }
        if self.changed:
            what = f"{len(self.changed)} values that A can read change with B's requests: {self.changed[0]}"
            return Check(7, NAME, Verdict.LEAKS, what, figures)
        if not self.seen:
            return Check(
                7,
                NAME,
                Verdict.BLIND,
                "no value that A can read changes with A's own requests either",
                figures,
            )
        detail = f"nothing in {len(self.names)} answers to A changes with B's requests; A's own requests change some"
        detail += f"; {len(self.masked)} lines change by themselves" if self.masked else ""
        return Check(7, NAME, Verdict.ISOLATED, detail, figures)


def summary(reply: Reply) -> str:
    """Return a completion or a lookup as lines that are equal for two equal requests.

    The lines are the generated text, the usage and other fields. For a stream: the text of all events, and the last
    value of each field.
    """
    text: list[str] = []
    fields: dict[str, str] = {}
    for document in reply.documents:
        choices = document.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            text.append(_text_of(choice))
        for name, value in document.items():
            if name not in _VOLATILE_FIELDS and name != "choices" and value is not None:
                fields[name] = json.dumps(value, sort_keys=True)
    return "\n".join([json.dumps("".join(text)), *(f"{name} {fields[name]}" for name in sorted(fields))])


def _text_of(choice: object) -> str:
    if not isinstance(choice, dict):
        return ""
    inner = choice.get("delta", choice.get("message"))
    told = inner if isinstance(inner, dict) else choice
    return str(told.get("text") or told.get("content") or "")


def without_evictions(stats: str) -> str:
    """Return a tenant's own counts, without those that other tenants' evictions change in burst mode.

    In burst mode, one tenant's requests may evict another's blocks if the pool is full, so later requests hit less.
    This is documented, and reveals no content.
    """
    if '"mode":"strict"' in stats.replace(" ", ""):
        return stats
    return _EVICTION_COUNTS.sub("", stats)


def compared(quiet: list[Answer], after: Answer) -> tuple[list[str], list[str]]:
    """Return what differs after B's requests although it was steady before, and what wasn't steady.

    Status and headers are compared as a whole, bodies line by line. A line without its numbers must be the same.
    Each number in it must be steady, or rise by the same step each time.
    """
    changed: list[str] = []
    masked: list[str] = []
    for what, place in (("status", 0), ("headers", 1)):
        before = [each[place] for each in quiet]
        if any(each != before[0] for each in before):
            masked.append(what)
        elif after[place] != before[0]:
            changed.append(what)
    bodies = [each[2] for each in (*quiet, after)]
    if len(quiet) > 1 and len(set(bodies)) == 1:
        return changed, masked  # every line is steady
    tables_of = {body: _lines(body) for body in set(bodies)}
    tables = [tables_of[body] for body in bodies]
    comes_and_goes = any(set(table) != set(tables[0]) for table in tables[:-1])
    for line in dict.fromkeys(key for table in tables for key in table):
        series = [table.get(line) for table in tables]
        is_new = all(each is None for each in series[:-1])
        if (is_new and comes_and_goes) or (not is_new and _steps(series[:-1]) is None):
            masked.append(line)
        elif _steps(series) is None:
            changed.append(line)
    return changed, masked


def _lines(body: str) -> dict[str, tuple[float, ...]]:
    """Each line without its numbers → its numbers. Equal lines get a running number. JSON is indented first."""
    found: dict[str, tuple[float, ...]] = {}
    for line in _laid_out(body).splitlines():
        key, numbers = _NUMBER.sub("#", line), tuple(float(each) for each in _NUMBER.findall(line))
        if len(key) > MAX_LINE:
            key = f"{key[:MAX_LINE]}… ({len(key)} characters, {zlib.crc32(key.encode('utf-8', 'replace')):x})"
        name, copy = key, 1
        while name in found:
            name, copy = f"{key} ({copy})", copy + 1
        found[name] = numbers
    return found


def _laid_out(body: str) -> str:
    try:
        return json.dumps(json.loads(body), indent=1, sort_keys=True)
    except (ValueError, RecursionError):
        return body


def _steps(series: list[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    """Return the step by which each number rises, if it is always the same.

    None if it isn't, or if a line comes or goes.
    """
    steps = set()
    for before, after in pairwise(series):
        if before is None or after is None or len(before) != len(after):
            return None
        steps.add(tuple(round(high - low, 9) for low, high in zip(before, after, strict=True)))
    return steps.pop() if len(steps) == 1 else None
