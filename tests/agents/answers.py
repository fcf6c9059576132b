"""The answers of a provider, in the wire formats of the four APIs: whole, and as a stream of server-sent events.

``record.py`` answers real clients with them, as the provider would. They are written for the recorder alone, and share
no code with the service under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

JSON = "application/json"
EVENTS = "text/event-stream"
_CREATED = 1_767_225_600
_USAGE = (120, 96, 16)
"""Tokens of each prompt, of them cached, and of each answer. No client does more with them than to show them."""


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What the model says: a text, and calls of tools."""

    text: str = ""
    calls: tuple[Call, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Answer:
        """Return the answer of a document."""
        return cls(document["text"], tuple(Call(**call) for call in document["calls"]))


@dataclass
class Ids:
    """Ids of what an answer has. They depend on the number of the answer alone, so that recordings don't change."""

    number: int
    _counts: dict[str, int] = field(default_factory=dict)

    def new(self, prefix: str) -> str:
        """Return the next id with a prefix."""
        self._counts[prefix] = self._counts.get(prefix, 0) + 1
        return f"{prefix}{self.number:04d}{self._counts[prefix]:02d}"


def _event(document: Mapping[str, Any], name: str | None = None) -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(document)}\n\n"


def _halves(text: str) -> list[str]:
    """Return a text in two pieces, as a stream has several."""
    middle = len(text) // 2
    return [piece for piece in (text[:middle], text[middle:]) if piece]


# --- OpenAI's chat completions


def chat(answer: Answer, body: Mapping[str, Any], ids: Ids) -> tuple[str, str]:
    """Return the content type and the body of a chat completion."""
    prompt, cached, generated = _USAGE
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
    calls = [
        {
            "id": ids.new("call_"),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in answer.calls
    ]
    reason = "tool_calls" if calls else "stop"
    head = {
        "id": ids.new("chatcmpl-"),
        "created": _CREATED,
        "model": body["model"],
        "service_tier": "default",
    }
    if not body.get("stream"):
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return JSON, json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage})

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event({**head, "object": "chat.completion.chunk", "choices": [choice]})

    events = [chunk({"role": "assistant", "content": "", "refusal": None})]
    events += [chunk({"content": piece}) for piece in _halves(answer.text)]
    for index, call in enumerate(calls):
        function = {"name": call["function"]["name"], "arguments": ""}
        events.append(chunk({"tool_calls": [{**call, "index": index, "function": function}]}))
        events += [
            chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
            for piece in _halves(call["function"]["arguments"])
        ]
    events.append(chunk({}, reason))
    if (body.get("stream_options") or {}).get("include_usage"):
        last = {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        events.append(_event(last))
    return EVENTS, "".join([*events, "data: [DONE]\n\n"])


# --- OpenAI's responses


def responses(answer: Answer, body: Mapping[str, Any], ids: Ids) -> tuple[str, str]:
    """Return the content type and the body of a response."""
    prompt, cached, generated = _USAGE
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }
    repeated = ("instructions", "max_output_tokens", "previous_response_id", "text", "tools", "tool_choice")
    head = {
        "id": ids.new("resp_"),
        "object": "response",
        "created_at": _CREATED,
        "model": body["model"],
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "store": False,
        "metadata": {},
        **{name: body.get(name) for name in repeated},
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
    }
    items: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"id": ids.new("msg_"), "type": "message", "status": "completed", "role": "assistant"}
        items.append({**message, "content": [part]})
    items += [
        {
            "id": ids.new("fc_"),
            "type": "function_call",
            "status": "completed",
            "call_id": ids.new("call_"),
            "name": call.name,
            "arguments": json.dumps(call.arguments),
        }
        for call in answer.calls
    ]
    whole = {**head, "status": "completed", "output": items, "usage": usage}
    if not body.get("stream"):
        return JSON, json.dumps(whole)
    begun = {**head, "status": "in_progress", "output": [], "usage": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(items):
        events += _item_events(item, index)
    events.append(("response.completed", {"response": whole}))
    numbered = enumerate(events)
    return EVENTS, "".join(
        _event({"type": kind, "sequence_number": number, **fields}, kind)
        for number, (kind, fields) in numbered
    )


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
    begun = {**item, **empty, "status": "in_progress"}
    yield "response.output_item.added", {"output_index": index, "item": begun}
    if item["type"] == "message":
        (part,) = item["content"]
        inside = {**at, "content_index": 0}
        yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
        for piece in _halves(part["text"]):
            yield "response.output_text.delta", {**inside, "delta": piece, "logprobs": []}
        yield "response.output_text.done", {**inside, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**inside, "part": part}
    else:
        for piece in _halves(item["arguments"]):
            yield "response.function_call_arguments.delta", {**at, "delta": piece}
        done = {**at, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
    yield "response.output_item.done", {"output_index": index, "item": item}


# --- Anthropic's messages


def messages(answer: Answer, body: Mapping[str, Any], ids: Ids) -> tuple[str, str]:
    """Return the content type and the body of a message."""
    prompt, cached, generated = _USAGE
    usage = {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": generated,
        "service_tier": "standard",
    }
    blocks: list[dict[str, Any]] = []
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    blocks += [
        {"type": "tool_use", "id": ids.new("toolu_"), "name": call.name, "input": dict(call.arguments)}
        for call in answer.calls
    ]
    ended = {"stop_reason": "tool_use" if answer.calls else "end_turn", "stop_sequence": None}
    head = {"id": ids.new("msg_"), "type": "message", "role": "assistant", "model": body["model"]}
    if not body.get("stream"):
        return JSON, json.dumps({**head, "content": blocks, **ended, "usage": usage})
    begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
    events = [("message_start", {"message": {**begun, "usage": {**usage, "output_tokens": 1}}})]
    for index, block in enumerate(blocks):
        is_text = block["type"] == "text"
        empty = {**block, **({"text": ""} if is_text else {"input": {}})}
        events.append(("content_block_start", {"index": index, "content_block": empty}))
        name, kind = ("text", "text_delta") if is_text else ("partial_json", "input_json_delta")
        for piece in _halves(block["text"] if is_text else json.dumps(block["input"])):
            events.append(("content_block_delta", {"index": index, "delta": {"type": kind, name: piece}}))
        events.append(("content_block_stop", {"index": index}))
    events.append(("message_delta", {"delta": ended, "usage": usage}))
    events.append(("message_stop", {}))
    return EVENTS, "".join(_event({"type": kind, **fields}, kind) for kind, fields in events)


# --- Gemini's contents


def contents(answer: Answer, body: Mapping[str, Any], ids: Ids, *, is_stream: bool) -> tuple[str, str]:
    """Return the content type and the body of an answer of ``generateContent`` or ``streamGenerateContent``."""
    prompt, cached, generated = _USAGE
    usage = {
        "promptTokenCount": prompt,
        "cachedContentTokenCount": cached,
        "candidatesTokenCount": generated,
        "totalTokenCount": prompt + generated,
    }
    head = {"modelVersion": "radixkv-demo", "responseId": ids.new("answer-")}
    calls = [
        {"functionCall": {"id": ids.new("call-"), "name": call.name, "args": dict(call.arguments)}}
        for call in answer.calls
    ]

    def reply(parts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        candidate = {"content": {"role": "model", "parts": parts}, "index": 0, **more}
        return {"candidates": [candidate], "usageMetadata": usage, **head}

    if not is_stream:
        parts = [*([{"text": answer.text}] if answer.text else []), *calls]
        return JSON, json.dumps(reply(parts, finishReason="STOP"))
    chunks = [[{"text": piece}] for piece in _halves(answer.text)]
    chunks += [calls] if calls else []
    chunks = chunks or [[{"text": ""}]]
    last = len(chunks) - 1
    return EVENTS, "".join(
        _event(reply(parts, **({"finishReason": "STOP"} if number == last else {})))
        for number, parts in enumerate(chunks)
    )


WRITERS: Mapping[str, Callable[..., tuple[str, str]]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "contents": contents,
}
"""The functions that write an answer, by the name of the API."""
