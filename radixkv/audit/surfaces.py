"""Surfaces of a server: the requests that take a prompt, and how their replies show what was cached.

A surface takes a prompt from one tenant. Most surfaces compute the prompt, and most replies report how much of it
was cached. The audit lets B write a prompt through one surface and A read it through another. The report names each
surface that the server lacks, or that doesn't show A its own prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from radixkv.audit.probe_prompts import Prompt, Prompts
from radixkv.audit.target import CHAT, COMPLETIONS, Reply, Target, answered, count

JOB_POLLS = 500
PIN_TTL_S = 60
_TEXTS = frozenset({"text", "ids"})
_ALL = _TEXTS | {"messages"}


@dataclass(frozen=True, slots=True)
class Extra:
    """What a request carries in addition to its prompt: fields of the body, headers, query parameters."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)


PLAIN = Extra()
"""Nothing in addition to the prompt."""
Ask = Callable[[Target, Prompt, Extra], Reply]
Found = Callable[[Reply], int | None]


@dataclass(frozen=True, slots=True)
class Surface:
    """One way to send a prompt.

    - ``found``: reads the number of cached tokens from a reply; None if the reply doesn't say it.
    - ``computes``: whether the prompt is resident afterwards.
    - ``is_common``: whether the report mentions it if the server doesn't have it.
    - ``trial``: a call that finds out whether the server has it; None: ``ask`` does.
    - ``undo``: removes state that would disturb later probes.
    """

    name: str
    ask: Ask
    found: Found
    forms: frozenset[str] = _ALL
    computes: bool = True
    is_common: bool = True
    undo: Callable[[Target, Reply], None] | None = None
    trial: Ask | None = None


def _post(target: Target, path: str, body: Mapping[str, Any], extra: Extra) -> Reply:
    named: dict[str, Any] = {"headers": dict(extra.headers), "params": dict(extra.params)}
    return target.send("POST", path, {**body, **extra.fields}, **named)


def completion(
    target: Target, prompt: Prompt, extra: Extra, options: Mapping[str, Any] | None = None
) -> Reply:
    """Return a completion of one token."""
    path = CHAT if prompt.form == "messages" else COMPLETIONS
    return _post(target, path, {**target.options(), **prompt.of_completion(), **(options or {})}, extra)


def _with(**options: Any) -> Ask:
    return functools.partial(completion, options=options)


def _batch(target: Target, prompt: Prompt, extra: Extra) -> Reply:
    size = len(prompt.content) // 6 if prompt.form == "ids" else len(prompt.content.split())
    other = Prompts(max(size, 1)).fresh(prompt.form)
    return completion(target, prompt, extra, {"prompt": [prompt.content, other.content]})


def _prefix(path: str, **options: Any) -> Ask:
    def ask(target: Target, prompt: Prompt, extra: Extra) -> Reply:
        return _post(target, path, {**prompt.of_prefix(), **options}, extra)

    return ask


lookup, warm = _prefix("/v1/lookup"), _prefix("/v1/warm")
pin = _prefix("/v1/pins", ttl_s=PIN_TTL_S)


def _twice(ask: Ask) -> Ask:
    def again(target: Target, prompt: Prompt, extra: Extra) -> Reply:
        ask(target, prompt, extra)
        return ask(target, prompt, extra)

    return again


def _job(target: Target, prompt: Prompt, extra: Extra) -> Reply:
    reply = _prefix("/v1/warm", wait=False)(target, prompt, extra)
    return ended_job(target, reply) if reply.is_ok else reply


def ended_job(target: Target, accepted: Reply) -> Reply:
    """Poll a job until it has ended, and return the last reply. Raises TargetError if the server is busy."""
    name = accepted.document.get("job")
    for _ in range(JOB_POLLS):
        reply = answered(target.send("GET", f"/v1/warm/{name}"))
        if not reply.is_ok or reply.document.get("state") not in ("queued", "running"):
            return reply
        target.pause(0.02)
    return reply


def _pinned(target: Target, prompt: Prompt, extra: Extra) -> Reply:
    """Warm, then pin."""
    reply = warm(target, prompt, extra)
    return pin(target, prompt, extra) if reply.is_ok else reply


def _unpin(target: Target, reply: Reply) -> None:
    name = reply.document.get("id")
    if reply.is_ok and name is not None:
        target.send("DELETE", f"/v1/pins/{name}")


def _field(name: str) -> Found:
    def found(reply: Reply) -> int | None:
        return count(reply.document.get(name))

    return found


def _job_found(reply: Reply) -> int | None:
    result = reply.document.get("result")
    return count(result.get("cached_before")) if isinstance(result, dict) else None


def _pin_found(reply: Reply) -> int | None:
    """The server refuses to pin what isn't resident."""
    return count(reply.document.get("tokens")) if reply.is_ok else 0 if reply.status in (404, 409) else None


def _route_found(reply: Reply) -> int | None:
    candidates = reply.document.get("candidates")
    if not isinstance(candidates, list):
        return None
    held = (each.get("matched_tokens") for each in candidates if isinstance(each, dict))
    return max((_sum(each) for each in held if isinstance(each, dict)), default=None)


def _sum(tiers: Mapping[str, Any]) -> int:
    return sum(count(each) or 0 for each in tiers.values())


def _cached(reply: Reply) -> int | None:
    return reply.cached_tokens


_USAGE = {"include_usage": True}
PIN = Surface("a pin", _pinned, _pin_found, undo=_unpin)
"""A writer only: it warms the prompt, then pins it."""
ROUTED = Surface("a route", _prefix("/v1/route"), _route_found, computes=False)
"""A writer only: the server expects the prompt on the replica that it chose."""

LOOKUP = Surface("a lookup", lookup, _field("matched_tokens"), computes=False)
READERS = (
    Surface("a completion", completion, _cached),
    Surface("a stream", _with(stream=True, stream_options=_USAGE), _cached),
    Surface("two choices", _with(n=2, temperature=1), _cached, is_common=False),
    Surface("a batch", _batch, _cached, _TEXTS, is_common=False),
    Surface("an echo", _with(echo=True), _cached, _TEXTS, is_common=False),
    Surface("a beam search", _with(use_beam_search=True, n=2), _cached, _TEXTS, is_common=False),
    LOOKUP,
    Surface("a second lookup", _twice(lookup), _field("matched_tokens"), computes=False, is_common=False),
    Surface("a warm", warm, _field("cached_before")),
    Surface("a warm job", _job, _job_found),
    Surface("a warm of all replicas", _prefix("/v1/warm", replicas="all"), _field("cached_before"), is_common=False),
    Surface("a pin", pin, _pin_found, computes=False, undo=_unpin, trial=_pinned),
    Surface("a route", _prefix("/v1/route", predict=False), _route_found, computes=False),
)  # fmt: skip
"""Surfaces through which A reads."""

WRITERS = (*(each for each in READERS if each.computes), PIN, ROUTED)
"""Surfaces through which B writes."""
