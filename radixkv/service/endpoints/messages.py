"""``POST /v1/messages``: Anthropic's messages, over the same generation as completions.

Breakpoints (``cache_control``) become promises. With ``max_tokens: 0`` the prompt is computed as ``/v1/warm`` does it,
and nothing is generated. A stream's events begin with the usage as far as it is known, and end with the exact one.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Literal

from starlette.responses import Response

from radixkv.metering.records import Counts
from radixkv.service.dialects import ANTHROPIC
from radixkv.service.endpoint import Call, Endpoint, reply
from radixkv.service.endpoints.completions import check, check_model, event
from radixkv.service.endpoints.one_answer import OneAnswer, computed_ahead
from radixkv.service.problems import ApiError, Json, refused
from radixkv.service.prompts import Prompt
from radixkv.service.schemas.completions import Choice, CompletionRequest, Timings
from radixkv.service.schemas.messages import (
    CacheCreation,
    CountTokensReply,
    CountTokensRequest,
    DiagnosticsReply,
    MessageReply,
    MessagesRequest,
    MessageUsage,
    TextAnswer,
    ToolUseAnswer,
    parsed,
)
from radixkv.service.tool_calls import ToolCall
from radixkv.service.usage import TTL_1H, TTL_5M

if TYPE_CHECKING:
    from radixkv.engines import Generation
    from radixkv.service.core import Service

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


async def messages(call: Call[Service]) -> Response:
    """Answer a conversation, with the fields of Anthropic's API: as one answer, or as a stream of server-sent events.

    The prefix up to each `cache_control` stays resident for its TTL, within the budget of the tenant's pins. Beyond it,
    the request is served all the same, and the header `x-cache-write-refused` has the reason.
    """
    reading = await call.read(MessagesRequest)
    body, prompt = reading.body, reading.prompts[0]
    order = body.order()
    check(call.host, order, [prompt])
    if not body.max_tokens:
        return await _precomputed(call, body, prompt)
    run = MessageRun(call, order, prompt, has_diagnostics=body.diagnostics is not None)
    return await (run.streamed() if body.stream else run.whole())


async def count_tokens(call: Call[Service]) -> Response:
    """Count the tokens that a conversation has for this model, up to the opening of the answer."""
    reading = await call.read(CountTokensRequest)
    check_model(call.host, reading.body.model)
    return reply(CountTokensReply(input_tokens=reading.prompts[0].num_tokens))


async def _precomputed(call: Call[Service], body: MessagesRequest, prompt: Prompt) -> Response:
    """Compute a prompt and promise what its breakpoints ask for."""
    if body.stream:
        raise refused("stream", True, "with max_tokens=0 nothing is generated", "false with max_tokens=0")
    usage, kept = await computed_ahead(call, body.salt, body.adapter, prompt)
    answer = MessageReply(
        id=_message_id(),
        model=call.host.model_name,
        content=[],
        stop_reason="max_tokens",
        diagnostics=_diagnostics(body.diagnostics is not None),
        usage=_shown(usage),
    )
    response = reply(answer)
    response.headers.update(kept.headers)
    return response


class MessageRun(OneAnswer):
    """One message being answered. In a stream it numbers the blocks of the content."""

    def __init__(
        self, call: Call[Service], body: CompletionRequest, prompt: Prompt, *, has_diagnostics: bool
    ) -> None:
        super().__init__(call, body, prompt)
        self.id = _message_id()
        self._diagnostics = _diagnostics(has_diagnostics)
        self._num_blocks, self._is_text_open = 0, False

    def _answer(self, generation: Generation) -> Response:
        text, calls = self._read_all()
        content: list[TextAnswer | ToolUseAnswer] = [_tool_use(each) for each in calls]
        if text is not None:
            content.insert(0, TextAnswer(text=text))
        answer = self._message(content, _shown(self.request_usage(generation)))
        reason, stop_text = self._ended(generation)
        return self._sent(answer.model_copy(update={"stop_reason": reason, "stop_sequence": stop_text}))

    def _message(self, content: list[TextAnswer | ToolUseAnswer], usage: MessageUsage) -> MessageReply:
        return MessageReply(
            id=self.id,
            model=self.service.model_name,
            content=content,
            stop_reason=None,
            diagnostics=self._diagnostics,
            usage=usage,
        )

    def _ended(self, generation: Generation) -> tuple[StopReason, str | None]:
        stop_text = self.texts[0].stop_text
        if self.has_calls:
            return "tool_use", None
        if stop_text is not None:
            return "stop_sequence", stop_text
        return ("max_tokens" if self._was_cut(generation) else "end_turn"), None

    # ---- a stream

    async def _first_events(self) -> list[bytes]:
        message = self._message([], _shown(self._first_usage()))
        return [_event("message_start", message=message.model_dump())]

    def _chunk(self, choices: list[Choice], timings: Timings | None = None, kind: type[Json] = Json) -> bytes:
        found = [each for choice in choices for each in self._read(choice.text, is_last=False)]
        return b"".join(map(self._part, found))

    def _part(self, part: str | ToolCall) -> bytes:
        """Return the events of the next text or call."""
        if isinstance(part, str):
            begun = b"" if self._is_text_open else self._begun({"type": "text", "text": ""})
            self._is_text_open = True
            return begun + self._delta({"type": "text_delta", "text": part})
        ended = self._ended_text()
        block = {"type": "tool_use", "id": _call_id(), "name": part.name, "input": {}}
        begun = self._begun(block)
        delta = self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        return ended + begun + delta + self._stopped()

    def _ended_text(self) -> bytes:
        ended = self._stopped() if self._is_text_open else b""
        self._is_text_open = False
        return ended

    def _begun(self, block: dict[str, Any]) -> bytes:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _stopped(self) -> bytes:
        return _event("content_block_stop", index=self._num_blocks - 1)

    def _last_events(self, generation: Generation) -> list[bytes]:
        events = [self._part(each) for each in self._read(self.texts[0].take(), is_last=True)]
        if not self._num_blocks:
            events.append(self._part(""))
        events.append(self._ended_text())
        reason, stop_text = self._ended(generation)
        usage = _shown(self.request_usage(generation)).model_dump(exclude={"service_tier"})
        delta = {"stop_reason": reason, "stop_sequence": stop_text}
        return [*events, _event("message_delta", delta=delta, usage=usage), _event("message_stop")]

    def _error_event(self, error: ApiError) -> bytes:
        return b"event: error\n" + event(ANTHROPIC.write(error, self.call.id)[1])


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\n".encode() + event({"type": name, **fields})


def _message_id() -> str:
    return f"msg_{secrets.token_hex(12)}"


def _call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _tool_use(call: ToolCall) -> ToolUseAnswer:
    return ToolUseAnswer(id=_call_id(), name=call.name, input=parsed(call.arguments))


def _diagnostics(is_asked: bool) -> DiagnosticsReply | None:
    return DiagnosticsReply() if is_asked else None


def _shown(usage: Counts) -> MessageUsage:
    written = CacheCreation(
        ephemeral_5m_input_tokens=usage.written.get(TTL_5M, 0),
        ephemeral_1h_input_tokens=usage.written.get(TTL_1H, 0),
    )
    return MessageUsage(
        input_tokens=usage.uncached,
        cache_creation_input_tokens=usage.num_written,
        cache_read_input_tokens=usage.read,
        cache_creation=written,
        output_tokens=usage.generated,
    )


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/messages",
        messages,
        "Answer a chat in Anthropic's form",
        "tenant",
        {200: {"application/json": MessageReply, "text/event-stream": "events"}},
        body=MessagesRequest,
        errors=(404, 409, 429, 501, 503),
        dialect=ANTHROPIC,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Count the tokens of a chat",
        "tenant",
        {200: CountTokensReply},
        body=CountTokensRequest,
        errors=(404,),
        dialect=ANTHROPIC,
    ),
)
