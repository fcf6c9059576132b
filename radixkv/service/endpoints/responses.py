"""``POST /v1/responses``: OpenAI's responses, over the same generation as completions. Nothing is stored.

A stream's events are numbered. Each item and each text is announced, comes in pieces, and is repeated as a whole.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from radixkv.metering.records import Counts
from radixkv.service.dialects import OPENAI
from radixkv.service.endpoint import Call, Endpoint, reply
from radixkv.service.endpoints.completions import check, check_model, default_tokens, event
from radixkv.service.endpoints.one_answer import OneAnswer, computed_ahead
from radixkv.service.problems import ApiError, Json, refused
from radixkv.service.prompts import Prompt
from radixkv.service.schemas.completions import Choice, CompletionRequest, Timings
from radixkv.service.schemas.prompt_caching import uses_cache
from radixkv.service.schemas.responses import (
    IN_NAMESPACE,
    CacheDiagnosis,
    IncompleteDetails,
    InputDetails,
    InputTokensReply,
    InputTokensRequest,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseReply,
    ResponsesRequest,
    ResponseUsage,
    WriteDetails,
)
from radixkv.service.schemas.structured import TokenLogprob
from radixkv.service.token_logprobs import shown_tokens
from radixkv.service.tool_calls import ToolCall
from radixkv.service.usage import TTL_12H, TTL_30M

if TYPE_CHECKING:
    from radixkv.engines import Generation
    from radixkv.service.core import Service


async def responses(call: Call[Service]) -> Response:
    """Answer a conversation, with the fields of OpenAI's Responses: as one answer, or as server-sent events.

    The request has the whole conversation: `store: true` and `previous_response_id` are refused.
    """
    reading = await call.read(ResponsesRequest)
    body, prompt = reading.body, reading.prompts[0]
    options = body.prompt_cache_options
    order = body.order(_room(call, prompt))
    check(call.host, order, [prompt], most="max_output_tokens")
    has_diagnosis = options is not None and options.comparison_response_id is not None
    if options is not None and options.prewarm:
        return await _prewarmed(call, body, prompt, has_diagnosis=has_diagnosis)
    run = ResponseRun(call, order, prompt, has_diagnosis=has_diagnosis)
    run.uses_cache = uses_cache(options, len(prompt.asked))
    return await (run.streamed() if body.stream else run.whole())


async def count_input_tokens(call: Call[Service]) -> Response:
    """Count the tokens that a conversation has for this model, up to the opening of the answer."""
    reading = await call.read(InputTokensRequest)
    check_model(call.host, reading.body.model)
    return reply(InputTokensReply(input_tokens=reading.prompts[0].num_tokens))


def _room(call: Call[Service], prompt: Prompt) -> int:
    """Return the most tokens of an answer if the request doesn't say. Raises ApiError if there is no room."""
    limit = call.host.rules.max_tokens
    if prompt.num_tokens >= limit:
        reason = f"it has {prompt.num_tokens} tokens"
        allowed = f"fewer than {limit} tokens, with room for an answer"
        raise refused("input", None, reason, allowed, is_too_long=True)
    return default_tokens(call, prompt)


async def _prewarmed(
    call: Call[Service], body: ResponsesRequest, prompt: Prompt, *, has_diagnosis: bool
) -> Response:
    if body.stream:
        raise refused("stream", True, "with prewarm nothing is generated", "false with prewarm")
    usage, kept = await computed_ahead(call, body.salt, body.adapter, prompt)
    response = reply(
        ResponseReply(
            id=_new_id("resp"),
            created_at=int(time.time()),
            status="completed",
            model=call.host.model_name,
            output=[],
            prompt_cache_diagnostics=CacheDiagnosis() if has_diagnosis else None,
            usage=_shown(usage),
        )
    )
    response.headers.update(kept.headers)
    return response


class ResponseRun(OneAnswer):
    """One response being made. A stream numbers its events, and keeps its finished items and its open text."""

    most = "max_output_tokens"

    def __init__(
        self, call: Call[Service], body: CompletionRequest, prompt: Prompt, *, has_diagnosis: bool
    ) -> None:
        super().__init__(call, body, prompt)
        self.id = _new_id("resp")
        self._diagnosis = CacheDiagnosis() if has_diagnosis else None
        self._num_events = 0
        self._items: list[OutputMessage | OutputCall] = []
        self._open: str | None = None
        self._pieces_of_text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        """Of the open text."""

    def _answer(self, generation: Generation) -> Response:
        text, calls = self._read_all()
        was_cut = self._was_cut(generation)
        output: list[OutputMessage | OutputCall] = [_call_of(each) for each in calls]
        if text is not None:
            message = _message(_new_id("msg"), text, self._told_logprobs(), was_cut=was_cut)
            output.insert(0, message)
        return self._sent(self._response(output, generation))

    def _response(
        self, output: list[OutputMessage | OutputCall], generation: Generation | None
    ) -> ResponseReply:
        was_cut = generation is not None and self._was_cut(generation)
        return ResponseReply(
            id=self.id,
            created_at=self.created,
            status="in_progress" if generation is None else "incomplete" if was_cut else "completed",
            incomplete_details=IncompleteDetails() if was_cut else None,
            model=self.service.model_name,
            output=output,
            prompt_cache_diagnostics=self._diagnosis,
            usage=None if generation is None else _shown(self.request_usage(generation)),
        )

    # ---- a stream

    async def _first_events(self) -> list[bytes]:
        begun = self._response([], None).model_dump()
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._num_events += 1
        return _named(kind, sequence_number=self._num_events - 1, **fields)

    def _chunk(self, choices: list[Choice], timings: Timings | None = None, kind: type[Json] = Json) -> bytes:
        found = [each for choice in choices for each in self._read(choice.text, is_last=False)]
        return b"".join(map(self._part, found))

    def _part(self, part: str | ToolCall) -> bytes:
        """Return the events of the next text or call."""
        if isinstance(part, ToolCall):
            return self._text_ended(was_cut=False) + self._called(_call_of(part))
        begun = self._text_begun()
        self._pieces_of_text.append(part)
        new = self._told_logprobs()
        self._logprobs += new
        told = [each.model_dump() for each in new]
        return begun + self._event("response.output_text.delta", **self._place, delta=part, logprobs=told)

    def _told_logprobs(self) -> list[TokenLogprob]:
        """Return the log probabilities of the tokens since the last call."""
        return shown_tokens(self.service.vocabulary, self._new_logprobs(0))

    @property
    def _place(self) -> dict[str, Any]:
        """The place of the open text."""
        return {"item_id": self._open, "output_index": len(self._items), "content_index": 0}

    def _text_begun(self) -> bytes:
        if self._open is not None:
            return b""
        self._open = _new_id("msg")
        message = OutputMessage(id=self._open, status="in_progress", content=[]).model_dump()
        added = self._event("response.output_item.added", output_index=len(self._items), item=message)
        part = OutputText(text="").model_dump()
        return added + self._event("response.content_part.added", **self._place, part=part)

    def _text_ended(self, *, was_cut: bool) -> bytes:
        if self._open is None:
            return b""
        text = "".join(self._pieces_of_text)
        message = _message(self._open, text, self._logprobs, was_cut=was_cut)
        (part,) = (each.model_dump() for each in message.content)
        done = self._event("response.output_text.done", **self._place, text=text, logprobs=part["logprobs"])
        done += self._event("response.content_part.done", **self._place, part=part)
        self._open, self._pieces_of_text, self._logprobs = None, [], []
        return done + self._done(message)

    def _called(self, item: OutputCall) -> bytes:
        begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
        place = {"item_id": item.id, "output_index": len(self._items)}
        name = "response.function_call_arguments"
        events = self._event(
            "response.output_item.added", output_index=len(self._items), item=begun.model_dump()
        )
        events += self._event(f"{name}.delta", **place, delta=item.arguments)
        events += self._event(f"{name}.done", **place, name=item.name, arguments=item.arguments)
        return events + self._done(item)

    def _done(self, item: OutputMessage | OutputCall) -> bytes:
        self._items.append(item)
        return self._event(
            "response.output_item.done", output_index=len(self._items) - 1, item=item.model_dump()
        )

    def _last_events(self, generation: Generation) -> list[bytes]:
        events = [self._part(each) for each in self._read(self.texts[0].take(), is_last=True)]
        was_cut = self._was_cut(generation)
        if not self._items:
            events.append(self._text_begun())
        events.append(self._text_ended(was_cut=was_cut))
        name = "response.incomplete" if was_cut else "response.completed"
        whole = self._response(self._items, generation).model_dump()
        return [*events, self._event(name, response=whole)]

    def _error_event(self, error: ApiError) -> bytes:
        written = OPENAI.write(error, self.call.id)[1]["error"]
        return self._event("error", **{name: written[name] for name in ("code", "message", "param")})


def _named(kind: str, /, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, **fields})


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _message(item_id: str, text: str, logprobs: list[TokenLogprob], *, was_cut: bool) -> OutputMessage:
    content = [OutputText(text=text, logprobs=logprobs)]
    return OutputMessage(id=item_id, status="incomplete" if was_cut else "completed", content=content)


def _call_of(call: ToolCall) -> OutputCall:
    namespace, _, name = call.name.partition(IN_NAMESPACE)
    is_inside = bool(namespace and name)
    return OutputCall(
        id=_new_id("fc"),
        call_id=_new_id("call"),
        namespace=namespace if is_inside else None,
        name=name if is_inside else call.name,
        arguments=call.arguments,
        status="completed",
    )


def _shown(usage: Counts) -> ResponseUsage:
    written = WriteDetails(
        ttl_30m_tokens=usage.written.get(TTL_30M, 0), ttl_12h_tokens=usage.written.get(TTL_12H, 0)
    )
    return ResponseUsage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details=InputDetails(
            cached_tokens=usage.read,
            cache_write_tokens=usage.num_written,
            cache_write_tokens_details=written,
        ),
        output_tokens=usage.generated,
        total_tokens=usage.num_prompt_tokens + usage.generated,
    )


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/responses",
        responses,
        "Answer a chat in the form of OpenAI's Responses",
        "tenant",
        {200: {"application/json": ResponseReply, "text/event-stream": "events"}},
        body=ResponsesRequest,
        errors=(404, 409, 429, 501, 503),
        dialect=OPENAI,
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        "Count the tokens of a response's input",
        "tenant",
        {200: InputTokensReply},
        body=InputTokensRequest,
        errors=(404,),
        dialect=OPENAI,
    ),
)
