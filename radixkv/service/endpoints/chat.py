"""``POST /v1/chat/completions``: OpenAI's chat, over the same generation as completions.

The body is read into the one form of a chat (``schemas.conversations``), and its prompt is made where bodies are read.
What to generate is a ``CompletionRequest``. ``ChatRun`` only writes the answer in the form of a chat.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from radixkv.engines.protocol import TokenLogprobs
from radixkv.metering.records import Counts
from radixkv.service.dialects import OPENAI
from radixkv.service.endpoint import Call, Endpoint
from radixkv.service.endpoints.completions import Run, check, default_tokens, event
from radixkv.service.problems import Json, LongJson, refused
from radixkv.service.prompts import Prompt
from radixkv.service.schemas.chat import (
    AnswerMessage,
    CallReply,
    ChatChoice,
    ChatReply,
    ChatRequest,
    ChatUsage,
    FunctionReply,
)
from radixkv.service.schemas.completions import Choice, CompletionRequest, PromptTokensDetails, Timings
from radixkv.service.schemas.prompt_caching import uses_cache
from radixkv.service.schemas.structured import ChoiceLogprobs
from radixkv.service.token_logprobs import shown_tokens
from radixkv.service.tool_calls import ToolCall, ToolCallReader

if TYPE_CHECKING:
    from radixkv.engines import Generation
    from radixkv.service.core import Service


async def chat_completions(call: Call[Service]) -> Response:
    """Answer a conversation, with the fields of OpenAI's API: as one answer, or as a stream of server-sent events.

    Contents are texts, or parts that are texts. The model's chat template renders messages and tools. Breakpoints of
    `prompt_cache_options` and of parts stay resident for their TTL, within the budget of the tenant's pins.
    """
    reading = await call.read(ChatRequest)
    body, prompt = reading.body, reading.prompts[0]
    left = call.host.rules.max_tokens - prompt.num_tokens
    if left < 1:
        limit = call.host.rules.max_tokens
        reason = f"they have {prompt.num_tokens} tokens"
        allowed = f"fewer than {limit} tokens, with room for an answer"
        raise refused("messages", None, reason, allowed, is_too_long=True)
    order = body.order(default_tokens(call, prompt, body.n))
    check(call.host, order, [prompt])
    run = ChatRun(call, order, prompt)
    run.uses_cache = uses_cache(body.prompt_cache_options, len(prompt.asked))
    return await (run.streamed() if body.stream else run.whole())


class ChatRun(Run):
    """One chat being answered. Each row has one reader of calls if the request has tools."""

    def __init__(self, call: Call[Service], body: CompletionRequest, prompt: Prompt) -> None:
        super().__init__(call, body, [prompt])
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._readers = [ToolCallReader() for _ in self.texts] if prompt.has_tools else None
        self._num_calls = [0 for _ in self.texts]
        self._untold: list[list[TokenLogprobs]] = [[] for _ in self.texts]

    def _answer(self, generation: Generation) -> Response:
        choices = [
            self._answered(row, text.take(), self._reason(generation, row))
            for row, text in enumerate(self.texts)
        ]
        answer = ChatReply(
            id=self.id,
            created=self.created,
            model=self.service.model_name,
            choices=[
                choice.model_copy(update={"index": row * self.copies + copy})
                for row, choice in enumerate(choices)
                for copy in range(self.copies)
            ],
            usage=_chat_usage(self.request_usage(generation)),
            timings=self._timings(generation),
        )
        shown = answer.model_dump(
            exclude={"choices": {"__all__": {"message": {"tool_calls": {"__all__": {"index"}}}}}}
        )
        return LongJson(shown) if self._is_long else Json(shown)

    def _answered(self, row: int, text: str, reason: str) -> ChatChoice:
        found = self._read(row, text, is_last=True)
        calls = [_shown(each, index) for index, each in enumerate(_calls(found))]
        if calls:
            self.note_calls()
        content = "".join(each for each in found if isinstance(each, str))
        message = AnswerMessage(
            content=content if content.strip() or not calls else None, tool_calls=calls or None
        )
        return ChatChoice.model_validate(
            {
                "index": row,
                "message": message,
                "logprobs": self._told_logprobs(row),
                "finish_reason": "tool_calls" if calls else reason,
            }
        )

    def _shown_logprobs(self, row: int) -> None:
        """Keep a row's new log probabilities for its next event: a choice of a chat has none itself."""
        self._untold[row] += self._new_logprobs(row)

    def _told_logprobs(self, row: int) -> ChoiceLogprobs | None:
        """Return the log probabilities of a row that no event had yet."""
        if self.logprobs is None:
            return None
        found, self._untold[row] = [*self._untold[row], *self._new_logprobs(row)], []
        return ChoiceLogprobs(content=shown_tokens(self.service.vocabulary, found))

    def _read(self, row: int, text: str, *, is_last: bool) -> list[str | ToolCall]:
        """Return the texts and calls of a row's next text."""
        if self._readers is None:
            return [text] if text else []
        reader = self._readers[row]
        return [*reader.push(text), *(reader.close() if is_last else ())]

    async def _first_events(self) -> list[bytes]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._delta(row, delta, None) for row in range(len(self.texts))]

    def _chunk(self, choices: list[Choice], timings: Timings | None = None, kind: type[Json] = Json) -> bytes:
        events = b""
        for choice in choices:
            row, reason = choice.index // self.copies, choice.finish_reason
            for each in self._read(row, choice.text, is_last=reason is not None):
                events += self._delta(row, self._part(row, each), None)
            if reason is not None:
                if self._num_calls[row]:
                    self.note_calls()
                events += self._delta(row, {}, "tool_calls" if self._num_calls[row] else reason)
        return events

    def _part(self, row: int, each: str | ToolCall) -> dict[str, Any]:
        if isinstance(each, str):
            return {"content": each}
        index, self._num_calls[row] = self._num_calls[row], self._num_calls[row] + 1
        return {"tool_calls": [_shown(each, index).model_dump()]}

    def _delta(self, row: int, delta: dict[str, Any], reason: str | None) -> bytes:
        told = self._told_logprobs(row) if delta.keys() & {"content", "tool_calls"} or reason else None
        logprobs = told.model_dump() if told is not None and told.content else None
        choices = [
            {"index": row * self.copies + copy, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            for copy in range(self.copies)
        ]
        return self._chat_event(choices, None)

    def _chat_event(self, choices: list[dict[str, Any]], usage: ChatUsage | None) -> bytes:
        options = self.body.stream_options
        chunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }
        if options is not None and options.include_usage:
            chunk["usage"] = None if usage is None else usage.model_dump()
        return event(chunk)

    def _last_events(self, generation: Generation) -> list[bytes]:
        rest = [text.take() for text in self.texts]
        choices = [self._choice(row, text, self._reason(generation, row)) for row, text in enumerate(rest)]
        events = [self._chunk(choices)]
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            events.append(self._chat_event([], _chat_usage(self.request_usage(generation))))
        return [*events, b"data: [DONE]\n\n"]


def _calls(found: list[str | ToolCall]) -> list[ToolCall]:
    return [each for each in found if isinstance(each, ToolCall)]


def _shown(call: ToolCall, index: int) -> CallReply:
    function = FunctionReply(name=call.name, arguments=call.arguments)
    return CallReply(index=index, id=f"call_{secrets.token_hex(12)}", function=function)


def _chat_usage(usage: Counts) -> ChatUsage:
    return ChatUsage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.generated,
        total_tokens=usage.num_prompt_tokens + usage.generated,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=usage.read, cache_write_tokens=usage.num_written
        ),
    )


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a chat",
        "tenant",
        {200: {"application/json": ChatReply, "text/event-stream": "events"}},
        body=ChatRequest,
        errors=(404, 409, 429, 503),
        dialect=OPENAI,
    ),
)
