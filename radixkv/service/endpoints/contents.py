"""Gemini's shape: ``cachedContents``, and ``generateContent`` from them.

A cached content is a pin of the fleet with a name of its own. Every replica holds its prefix and its chat; the store
has neither. A generation joins the cached chat and the request's contents, and renders both as one chat. So the cached
content is a prefix of the prompt like any other, and usage says what was really read.

These are the only promises that are refused with a status: a content beyond the budget of the tenant's pins is 429.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from radixkv.coordination.store.wire import is_pin_id
from radixkv.errors import LeaseError
from radixkv.index.pins import MAX_TTL_S
from radixkv.metering.records import Counts
from radixkv.service.dialects import GOOGLE
from radixkv.service.endpoint import Call, Endpoint, reply, until_disconnect
from radixkv.service.endpoints.completions import check, default_tokens, event
from radixkv.service.endpoints.one_answer import OneAnswer
from radixkv.service.fleet.pins import PinContent, PinReplica
from radixkv.service.problems import ApiError, Json, invalid, not_found, refused
from radixkv.service.prompts import Prompt
from radixkv.service.schemas.completions import Choice, Timings
from radixkv.service.schemas.contents import (
    AnswerContent,
    CachedContentReply,
    CachedContentRequest,
    CachedContentsReply,
    CachedContentUpdate,
    CachedContentUsage,
    CallAnswerPart,
    Candidate,
    ContentModelReply,
    ContentModelsReply,
    ContentUsage,
    CountContentsReply,
    CountContentsRequest,
    FunctionCallAnswer,
    GenerateContentReply,
    GenerateContentRequest,
    JoinedChat,
    LogprobsCandidate,
    LogprobsResult,
    NoReply,
    TextAnswerPart,
    TopCandidates,
)
from radixkv.service.schemas.pins import MAX_CONTENT_CHARS
from radixkv.service.token_logprobs import text_of
from radixkv.service.tool_calls import ToolCall

if TYPE_CHECKING:
    from radixkv.coordination.values import FleetPin
    from radixkv.engines import Generation
    from radixkv.service.core import Service

PREFIX: Final = "cachedContents/"
MAX_PAGE: Final = 1_000
_DEFAULT_PAGE = 50
_DEFAULT_TTL_S = 3_600.0
_PAGE_SIZE = re.compile(r"[1-9][0-9]{0,3}")
_WHAT = "cached content"
Held = tuple["FleetPin", PinReplica]


async def create_cached_content(call: Call[Service]) -> Response:
    """Compute a chat and keep it resident under a name, on every replica, for a time. The answer has the name.

    It counts against the budget of the tenant's pins; beyond it the answer is 429.
    """
    call.query()
    service = call.host
    service.require("pins")
    service.require("prefill")
    reading = await call.read(CachedContentRequest)
    body, prompt = reading.body, reading.prompts[0]
    _check_model(service, body.model)
    ttl_s = _ttl_s(body.ttl, body.expireTime, _DEFAULT_TTL_S)
    key = service.rules.whole_blocks(prompt.key, 0).key
    if not key or len(prompt.text) > MAX_CONTENT_CHARS:
        reason = f"the chat has {prompt.num_tokens} tokens and {len(prompt.text)} characters as JSON"
        allowed = f"at least {service.rules.block_size} tokens, and at most {MAX_CONTENT_CHARS} characters"
        raise refused("contents", None, reason, allowed)
    created = time.time()
    about = {"displayName": body.displayName or "", "created": created}
    content = PinContent(secrets.token_hex(16), json.dumps(about), prompt.text)
    namespace = service.namespace(call.tenant, body.salt, None)
    pin_id = await service.fleet_pins.start(call.owner, namespace, key, ttl_s, "all", content)
    num_tokens = service.rules.whole_blocks(prompt.key, 0).num_tokens
    await _settled(call, pin_id)
    return reply(_described(service, pin_id, content, num_tokens, created, ttl_s))


async def _settled(call: Call[Service], pin_id: str) -> None:
    """Wait until the replicas hold a content. Raises ApiError if none does; then it is ended, as if its client is gone.

    A content whose time ends meanwhile is over: it was held as long as it was promised.
    """
    fleet_pins, tenant = call.host.fleet_pins, call.tenant
    try:
        fact, mine = await until_disconnect(call.request, fleet_pins.settled(call.owner, pin_id))
    except (ClientDisconnect, asyncio.CancelledError, ApiError, LeaseError) as error:
        if isinstance(error, ApiError) and error.status == 404:
            return
        with suppress(ApiError):
            await asyncio.shield(fleet_pins.end(tenant, pin_id))
        raise
    if mine is not None and mine.state == "failed" and not any(part.state == "done" for part in fact.parts):
        with suppress(ApiError):
            await fleet_pins.end(tenant, pin_id)
        raise _failed(mine.error)


def _failed(reason: str) -> ApiError:
    message = f"the content isn't held: {reason}"
    is_budget = reason in ("pin_budget_exceeded", "pin_limit_exceeded")
    return ApiError(409 if is_budget else 503, reason, message)


async def list_cached_contents(call: Call[Service]) -> Response:
    """List the caller's cached contents, by name. `nextPageToken` leads to the next page."""
    query = call.query("pageSize", "pageToken")
    size, after = _page_size(query.get("pageSize")), query.get("pageToken", "")
    if after and not is_pin_id(after):
        raise invalid(
            "pageToken is not one of a page before", "pageToken", after, "the nextPageToken of a page"
        )
    found = [each for each in await _all(call) if each[0].id > after]
    page = found[:size]
    shown = [_shown(call.host, *each) for each in page]
    token = page[-1][0].id if len(found) > size else ""
    return reply(CachedContentsReply(cachedContents=shown, nextPageToken=token))


async def get_cached_content(call: Call[Service]) -> Response:
    """Return a cached content of the caller."""
    call.query()
    return reply(_shown(call.host, *await _held(call, call.path_text("content"))))


async def update_cached_content(call: Call[Service]) -> Response:
    """Set a new end of a cached content: `ttl` from now on, or `expireTime`."""
    call.query("updateMask")
    reading = await call.read(CachedContentUpdate)
    body = reading.body
    if body.ttl is None and body.expireTime is None:
        raise refused("ttl", None, "expireTime is left out too", "one of ttl and expireTime")
    ttl_s = _ttl_s(body.ttl, body.expireTime, _DEFAULT_TTL_S)
    fact, mine = await _held(call, call.path_text("content"))
    assert mine.prompt_key is not None and mine.content is not None
    key, content = mine.prompt_key, mine.content
    await call.host.fleet_pins.start(call.owner, mine.namespace, key, ttl_s, "all", content)
    await _settled(call, fact.id)
    created = json.loads(mine.content.about)["created"]
    return reply(_described(call.host, fact.id, mine.content, fact.num_tokens, created, ttl_s))


async def delete_cached_content(call: Call[Service]) -> Response:
    """End a cached content of the caller before its time."""
    call.query()
    fact, _ = await _held(call, call.path_text("content"))
    await call.host.fleet_pins.end(call.tenant, fact.id)
    return reply(NoReply())


async def _all(call: Call[Service]) -> list[Held]:
    """Return the caller's cached contents that this replica holds, by id."""
    known = await call.host.fleet_pins.known(call.tenant)
    held = [(fact, mine) for fact, mine in known if mine is not None and _is_content(mine)]
    return sorted(held, key=lambda each: each[0].id)


def _is_content(mine: PinReplica) -> bool:
    return mine.content is not None and mine.prompt_key is not None and mine.state != "failed"


async def _held(call: Call[Service], name: str) -> Held:
    """Return a cached content of the caller. An unknown name and another tenant's raise the same ApiError 404."""
    for fact, mine in await _all(call) if is_pin_id(name) else ():
        if fact.id == name:
            return fact, mine
    raise not_found(_WHAT)


def _check_model(service: Service, model: str) -> None:
    if model.removeprefix("models/") != service.model_name:
        raise ApiError(404, "not_found", "no such model", field="model", value=model)


def _ttl_s(ttl: str | None, end: str | None, default_s: float) -> float:
    """Return the seconds of a content. Raises ApiError 422."""
    if ttl is not None and end is not None:
        raise refused("expireTime", end, "ttl is given too", "one of ttl and expireTime")
    field, given = ("ttl", ttl) if end is None else ("expireTime", end)
    seconds = default_s if given is None else float(given[:-1]) if end is None else _seconds_until(given)
    if not 0 < seconds <= MAX_TTL_S:
        raise refused(field, given, None, f"more than 0 seconds from now, at most {MAX_TTL_S:.0f}")
    return seconds


def _seconds_until(text: str) -> float:
    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        end = None
    if end is None or end.tzinfo is None:
        raise refused("expireTime", text, None, "a time such as 2026-01-31T09:30:00Z")
    return end.timestamp() - time.time()


def _page_size(text: str | None) -> int:
    if text is None:
        return _DEFAULT_PAGE
    if not _PAGE_SIZE.fullmatch(text) or int(text) > MAX_PAGE:
        raise invalid("pageSize is out of range", "pageSize", text, f"an integer from 1 to {MAX_PAGE}")
    return int(text)


def _shown(service: Service, fact: FleetPin, mine: PinReplica) -> CachedContentReply:
    assert mine.content is not None
    updated = mine.renewed_at
    return _described(service, fact.id, mine.content, fact.num_tokens, updated, fact.remaining_s, time.time())


def _described(
    service: Service,
    pin_id: str,
    content: PinContent,
    num_tokens: int,
    updated: float,
    ttl_s: float,
    now: float | None = None,
) -> CachedContentReply:
    about = json.loads(content.about)
    return CachedContentReply(
        name=PREFIX + pin_id,
        model=f"models/{service.model_name}",
        displayName=about["displayName"],
        createTime=_time(about["created"]),
        updateTime=_time(updated),
        expireTime=_time((time.time() if now is None else now) + ttl_s),
        usageMetadata=CachedContentUsage(totalTokenCount=num_tokens),
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# ---- generation


async def generate_content(call: Call[Service]) -> Response:
    """Answer contents, with the fields of Gemini's API. `cachedContent` names a content that comes before them."""
    alt = call.query("alt").get("alt", "json")
    if alt != "json":
        raise invalid("this answer is JSON", "alt", alt, "json")
    return await (await _run(call)).whole()


async def stream_generate_content(call: Call[Service]) -> Response:
    """Answer contents as a stream: one JSON array, or with `alt=sse` server-sent events."""
    alt = call.query("alt").get("alt", "json")
    if alt not in ("json", "sse"):
        raise invalid("a stream is an array or server-sent events", "alt", alt, "json or sse")
    run = await _run(call)
    if alt == "json":
        run.become_array()
    return await run.streamed()


async def count_contents(call: Call[Service]) -> Response:
    """Count the tokens that contents have for this model, up to the opening of the answer."""
    call.query()
    _check_model(call.host, call.path_text("model"))
    reading = await call.read(CountContentsRequest)
    return reply(CountContentsReply(totalTokens=reading.prompts[0].num_tokens))


async def list_content_models(call: Call[Service]) -> Response:
    """List the model that this service serves, in Gemini's form."""
    query = call.query("pageSize", "pageToken")
    _page_size(query.get("pageSize"))
    if query.get("pageToken"):
        token = query["pageToken"]
        raise invalid(
            "pageToken is not one of a page before", "pageToken", token, "left out: there is one page"
        )
    return reply(ContentModelsReply(models=[_content_model(call.host)]))


async def get_content_model(call: Call[Service]) -> Response:
    """Return the model with this name, in Gemini's form."""
    call.query()
    _check_model(call.host, call.path_text("model"))
    return reply(_content_model(call.host))


def _content_model(service: Service) -> ContentModelReply:
    most = service.rules.max_tokens
    return ContentModelReply(
        name=f"models/{service.model_name}",
        baseModelId=service.model_name,
        displayName=service.model_name,
        inputTokenLimit=most,
        outputTokenLimit=most,
    )


async def _run(call: Call[Service]) -> ContentRun:
    service = call.host
    _check_model(service, call.path_text("model"))
    reading = await call.read(GenerateContentRequest)
    body, prompt, salt = reading.body, reading.prompts[0], reading.body.salt
    if body.cachedContent is not None:
        _, mine = await _held(call, body.cachedContent.removeprefix(PREFIX))
        joined, salt = await _joined(call, mine, prompt.text), mine.namespace.salt
        prompt = replace(joined, form=prompt.form)
    limit = service.rules.max_tokens
    if prompt.num_tokens >= limit:
        reason, allowed = f"they have {prompt.num_tokens} tokens", f"fewer than {limit} tokens"
        raise refused("contents", None, reason, allowed, is_too_long=True)
    order = body.order(salt, default_tokens(call, prompt))
    check(service, order, [prompt], most="maxOutputTokens")
    return ContentRun(call, order, prompt)


async def _joined(call: Call[Service], mine: PinReplica, after: str) -> Prompt:
    """Return the prompt of a cached chat and the chat that continues it. Both are JSON already."""
    assert mine.content is not None
    raw = f'{{"before":{mine.content.chat},"after":{after}}}'.encode()
    return (await call.read_bytes(raw, JoinedChat)).prompts[0]


class ContentRun(OneAnswer):
    """One answer to contents."""

    most = "maxOutputTokens"
    _is_array = False
    _num_chunks = 0

    def become_array(self) -> None:
        """Let its stream be one JSON array, whose items are the chunks."""
        self._is_array, self.media_type = True, "application/json"

    def _framed(self, chunk: dict[str, Any], *, is_last: bool = False) -> bytes:
        if not self._is_array:
            return event(chunk)
        self._num_chunks += 1
        begun = b"[" if self._num_chunks == 1 else b",\n"
        return begun + bytes(Json(chunk).body).rstrip() + (b"]\n" if is_last else b"")

    def _answer(self, generation: Generation) -> Response:
        text, calls = self._read_all()
        parts: list[TextAnswerPart | CallAnswerPart] = [_call_part(each) for each in calls]
        if text is not None:
            parts.insert(0, TextAnswerPart(text=text))
        return self._sent(self._generated(parts, generation))

    def _generated(
        self, parts: list[TextAnswerPart | CallAnswerPart], generation: Generation | None
    ) -> GenerateContentReply:
        reason = None if generation is None else "MAX_TOKENS" if self._was_cut(generation) else "STOP"
        candidate = {"content": AnswerContent(parts=parts), "finishReason": reason, **self._told_logprobs()}
        return GenerateContentReply(
            candidates=[Candidate.model_validate(candidate)],
            usageMetadata=None if generation is None else _usage(self.request_usage(generation)),
            modelVersion=self.service.model_name,
            responseId=self.call.id,
        )

    def _told_logprobs(self) -> dict[str, Any]:
        """Return the fields of the tokens' log probabilities, of those since the last call."""
        found, vocabulary = self._new_logprobs(0), self.service.vocabulary
        if not found:
            return {}

        def shown(token_id: int, logprob: float) -> LogprobsCandidate:
            text = text_of(vocabulary, token_id)
            return LogprobsCandidate(token=text, tokenId=token_id, logProbability=logprob)

        result = LogprobsResult(
            topCandidates=[TopCandidates(candidates=[shown(*top) for top in each.top]) for each in found],
            chosenCandidates=[shown(each.token_id, each.logprob) for each in found],
        )
        mean = sum(each.logprob for each in found) / len(found)
        return {"avgLogprobs": mean, "logprobsResult": result}

    async def _first_events(self) -> list[bytes]:
        return []

    def _chunk(self, choices: list[Choice], timings: Timings | None = None, kind: type[Json] = Json) -> bytes:
        parts = [_part(each) for choice in choices for each in self._read(choice.text, is_last=False)]
        return self._framed(self._generated(parts, None).model_dump(exclude_none=True)) if parts else b""

    def _last_events(self, generation: Generation) -> list[bytes]:
        parts = [_part(each) for each in self._read(self.texts[0].take(), is_last=True)]
        return [self._framed(self._generated(parts, generation).model_dump(), is_last=True)]

    def _error_event(self, error: ApiError) -> bytes:
        return self._framed(GOOGLE.write(error, self.call.id)[1], is_last=True)


def _part(part: str | ToolCall) -> TextAnswerPart | CallAnswerPart:
    return TextAnswerPart(text=part) if isinstance(part, str) else _call_part(part)


def _call_part(call: ToolCall) -> CallAnswerPart:
    function = FunctionCallAnswer(
        id=f"call_{secrets.token_hex(12)}", name=call.name, args=json.loads(call.arguments)
    )
    return CallAnswerPart(functionCall=function)


def _usage(usage: Counts) -> ContentUsage:
    return ContentUsage(
        promptTokenCount=usage.num_prompt_tokens,
        cachedContentTokenCount=usage.read,
        candidatesTokenCount=usage.generated,
        totalTokenCount=usage.num_prompt_tokens + usage.generated,
    )


_ONE: Final = "/v1beta/cachedContents/{content}"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1beta/cachedContents",
        create_cached_content,
        "Keep a chat resident under a name",
        "tenant",
        {200: CachedContentReply},
        body=CachedContentRequest,
        errors=(404, 409, 429, 501, 503),
        dialect=GOOGLE,
    ),
    Endpoint(
        "GET",
        "/v1beta/cachedContents",
        list_cached_contents,
        "List cached contents",
        "tenant",
        {200: CachedContentsReply},
        query={
            "pageSize": f"most contents in an answer, 1 to {MAX_PAGE}; default {_DEFAULT_PAGE}",
            "pageToken": "the nextPageToken of the page before",
        },
        errors=(422, 503),
        dialect=GOOGLE,
    ),
    Endpoint(
        "GET",
        _ONE,
        get_cached_content,
        "Get a cached content",
        "tenant",
        {200: CachedContentReply},
        errors=(404, 422, 503),
        dialect=GOOGLE,
    ),
    Endpoint(
        "PATCH",
        _ONE,
        update_cached_content,
        "Set a new end of a cached content",
        "tenant",
        {200: CachedContentReply},
        body=CachedContentUpdate,
        query={"updateMask": "changes nothing: what the body has is updated"},
        errors=(404, 409, 503),
        dialect=GOOGLE,
    ),
    Endpoint(
        "DELETE",
        _ONE,
        delete_cached_content,
        "End a cached content",
        "tenant",
        {200: NoReply},
        errors=(404, 422, 503),
        dialect=GOOGLE,
    ),
    Endpoint(
        "POST",
        "/v1beta/models/{model}:generateContent",
        generate_content,
        "Answer contents in Gemini's form",
        "tenant",
        {200: GenerateContentReply},
        body=GenerateContentRequest,
        errors=(404, 409, 429, 503),
        dialect=GOOGLE,
    ),
    Endpoint(
        "POST",
        "/v1beta/models/{model}:streamGenerateContent",
        stream_generate_content,
        "Answer contents as a stream",
        "tenant",
        {200: {"application/json": list[GenerateContentReply], "text/event-stream": "events"}},
        body=GenerateContentRequest,
        query={"alt": "sse: server-sent events; json, or left out: one JSON array"},
        errors=(404, 409, 429, 503),
        dialect=GOOGLE,
    ),
    Endpoint(
        "POST",
        "/v1beta/models/{model}:countTokens",
        count_contents,
        "Count the tokens of contents",
        "tenant",
        {200: CountContentsReply},
        body=CountContentsRequest,
        errors=(404,),
        dialect=GOOGLE,
    ),
    Endpoint(
        "GET",
        "/v1beta/models",
        list_content_models,
        "List models in Gemini's form",
        "tenant",
        {200: ContentModelsReply},
        query={
            "pageSize": f"most models in an answer, 1 to {MAX_PAGE}",
            "pageToken": "left out: there is one page",
        },
        errors=(422,),
        dialect=GOOGLE,
    ),
    Endpoint(
        "GET",
        "/v1beta/models/{model}",
        get_content_model,
        "Get a model in Gemini's form",
        "tenant",
        {200: ContentModelReply},
        errors=(404, 422),
        dialect=GOOGLE,
    ),
)
