"""Replays a recording against a service: the same requests, and the model says what the recorder answered.

What the client read then is compared with that: texts and calls, through the types of the providers' own SDKs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from google.genai import types as google
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import InputTokenCountResponse, Response, ResponseStreamEvent
from pydantic import TypeAdapter

from radixkv.service.schemas.chat import DEFAULT_MAX_TOKENS
from radixkv.tokenizer.protocol import to_json
from tests.agents.answers import Answer, Call
from tests.agents.recordings import KEY, Recording, Request
from tests.agents.scripted_engine import ENTRY, Asked, ScriptedEngine
from tests.service.running import KEYS, Running, service_in_thread

NUM_BLOCKS = "32768"


@contextmanager
def scripted_service(folder: Path) -> Iterator[Running]:
    """A service over the scripted engine, which comes from a package in ``folder``."""
    info = folder / "scripted_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    sys.path.insert(0, str(folder))
    try:
        with service_in_thread(engine="scripted", **{"num-blocks": NUM_BLOCKS}) as live:
            live.service.answer_tokens = DEFAULT_MAX_TOKENS  # the demo model's answers are cut sooner
            yield live
    finally:
        sys.path.remove(str(folder))


@dataclass(frozen=True)
class Replayed:
    """What a request was answered, and how the engine was asked; None if it wasn't."""

    request: Request
    response: httpx.Response
    asked: Asked | None


def replayed(live: Running, recording: Recording) -> list[Replayed]:
    """Send all requests of a recording, in order, with nothing of the tenant in the cache before them."""
    live.acme.delete("/v1/cache")
    return [sent(live, each) for each in recording.requests]


def sent(live: Running, request: Request) -> Replayed:
    """Send one request as the client did, and let the model say what the recorder answered."""
    engine: Any = live.service.engine
    assert isinstance(engine, ScriptedEngine)
    if request.answer is not None:
        engine.says = live.service.tokenizer.encode(said(request.answer))
    before = len(engine.asked)
    headers = {name: value.replace(KEY, KEYS["acme"]) for name, value in request.headers.items()}
    content = None if request.body is None else json.dumps(request.body, ensure_ascii=False).encode()
    response = live.nobody.request(request.method, request.path, headers=headers, content=content)
    return Replayed(request, response, engine.asked[before] if len(engine.asked) > before else None)


def said(answer: Answer) -> str:
    """Return the text in which the model says an answer: calls between tags, as the service finds them."""
    calls = [
        f"<tool_call>\n{to_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
        for call in answer.calls
    ]
    return "\n".join([*([answer.text] if answer.text or not calls else []), *calls])


# --- what the client reads


@dataclass(frozen=True)
class Read:
    """What a client reads of an answer: text, calls, and the cached tokens of its usage; None without usage."""

    text: str
    calls: tuple[Call, ...]
    cached: int | None

    def is_answer(self, answer: Answer) -> bool:
        """Whether it says the same. White space around a text may differ."""
        return (self.text.strip(), self.calls) == (answer.text, answer.calls)


def read(request: Request, response: httpx.Response) -> Read:
    """Read the answer to a request with the types of the provider's SDK. Raises what they raise."""
    is_stream = request.is_stream
    assert response.headers["content-type"].startswith(
        "text/event-stream" if is_stream else "application/json"
    )
    return _READERS[request.api, is_stream](response)


def read_other(request: Request, response: httpx.Response) -> None:
    """Read an answer to a count or a list with the types of the provider's SDK. Raises what they raise."""
    path, found = request.path.partition("?")[0], response.json()
    if path.endswith("/count_tokens"):
        assert MessageTokensCount.model_validate(found).input_tokens > 0
    elif path.endswith(":countTokens"):
        assert (google.CountTokensResponse.model_validate(found).total_tokens or 0) > 0
    elif path.endswith("/input_tokens"):
        assert InputTokenCountResponse.model_validate(found).input_tokens > 0
    else:
        assert "/models" in path, f"no type for the answer to {path}"
        _read_models(request.headers, found, is_list=path.endswith("/models"))


def _read_models(headers: Mapping[str, str], found: Any, *, is_list: bool) -> None:
    """Read a model or a list of models, in the form of the provider whose client asked, as its headers tell."""
    if "x-goog-api-key" in headers:
        models = found["models"] if is_list else [found]
        assert models and all(each["name"].startswith("models/") for each in models)
        assert all("generateContent" in each["supportedGenerationMethods"] for each in models)
        assert all(each["inputTokenLimit"] > 0 and each["outputTokenLimit"] > 0 for each in models)
    else:
        kind = ModelInfo if "anthropic-version" in headers else Model
        known = [kind.model_validate(each) for each in (found["data"] if is_list else [found])]
        assert known and all(each.id for each in known)


def read_refusal(response: httpx.Response) -> None:
    """Read the answer to a request that continues a stored conversation: what makes Anthropic's SDK send it whole."""
    details = response.json()["error"]["details"]
    assert details["error_code"] == "thread_unsupported_request" and details["unsupported"] == ["thread"]


def _events(response: httpx.Response) -> list[Any]:
    """Return the documents of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _chat(response: httpx.Response) -> Read:
    found = ChatCompletion.model_validate(response.json())
    (choice,) = found.choices
    functions = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
    calls = tuple(Call(each.name, json.loads(each.arguments)) for each in functions)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    return Read(choice.message.content or "", calls, _details(found.usage))


def _details(usage: Any) -> int | None:
    return None if usage is None else int(usage.prompt_tokens_details.cached_tokens)


def _chat_stream(response: httpx.Response) -> Read:
    chunks = [ChatCompletionChunk.model_validate(each) for each in _events(response)]
    assert response.text.rstrip().endswith("data: [DONE]")
    text, names, arguments, reasons, cached = "", {}, {}, [], None
    for chunk in chunks:
        cached = cached if chunk.usage is None else _details(chunk.usage)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for part in choice.delta.tool_calls or ():
                assert part.function is not None
                names[part.index] = names.get(part.index, "") + (part.function.name or "")
                arguments[part.index] = arguments.get(part.index, "") + (part.function.arguments or "")
    calls = tuple(Call(names[index], json.loads(arguments[index])) for index in sorted(names))
    assert reasons == ["tool_calls" if calls else "stop"]
    return Read(text, calls, cached)


def _response(response: httpx.Response) -> Read:
    return _of_response(Response.model_validate(response.json()))


def _of_response(found: Response) -> Read:
    assert found.status == "completed" and found.usage is not None
    called = [each for each in found.output if each.type == "function_call"]
    calls = tuple(Call(each.name, json.loads(each.arguments)) for each in called)
    return Read(found.output_text, calls, found.usage.input_tokens_details.cached_tokens)


_ResponseEvent: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_MessageEvent: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def _response_stream(response: httpx.Response) -> Read:
    events = [_ResponseEvent.validate_python(each) for each in _events(response)]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    done = [each.item for each in events if each.type == "response.output_item.done"]
    assert [each.id for each in done] == [each.id for each in events[-1].response.output]
    pieces = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    found = _of_response(events[-1].response)
    assert pieces == found.text
    return found


def _message(response: httpx.Response) -> Read:
    found = Message.model_validate(response.json())
    return _of_message(found.content, found.stop_reason, found.usage)


def _of_message(content: Any, stop_reason: str | None, usage: Any) -> Read:
    text = "".join(each.text for each in content if each.type == "text")
    calls = tuple(Call(each.name, each.input) for each in content if each.type == "tool_use")
    assert stop_reason == ("tool_use" if calls else "end_turn")
    return Read(text, calls, usage.cache_read_input_tokens)


def _message_stream(response: httpx.Response) -> Read:
    events = [_MessageEvent.validate_python(each) for each in _events(response) if each["type"] != "ping"]
    assert events[0].type == "message_start" and events[-1].type == "message_stop"
    content, inputs = {}, {}
    for event in events:
        if event.type == "content_block_start":
            content[event.index] = event.content_block
            inputs[event.index] = ""
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            content[event.index].text += event.delta.text
        elif event.type == "content_block_delta":
            inputs[event.index] += event.delta.partial_json
    for index, block in content.items():
        if block.type == "tool_use":
            block.input = json.loads(inputs[index] or "{}")
    (last,) = (event for event in events if event.type == "message_delta")
    return _of_message(content.values(), last.delta.stop_reason, last.usage)


def _content(response: httpx.Response) -> Read:
    return _of_contents([google.GenerateContentResponse.model_validate(response.json())])


def _content_stream(response: httpx.Response) -> Read:
    return _of_contents([google.GenerateContentResponse.model_validate(each) for each in _events(response)])


def _of_contents(found: list[google.GenerateContentResponse]) -> Read:
    candidates = [each for chunk in found for each in chunk.candidates or ()]
    parts = [part for each in candidates if each.content for part in each.content.parts or ()]
    functions = [part.function_call for part in parts if part.function_call]
    calls = tuple(Call(str(each.name), each.args or {}) for each in functions)
    assert candidates[-1].finish_reason == google.FinishReason.STOP
    usage = found[-1].usage_metadata
    assert usage is not None
    return Read("".join(part.text or "" for part in parts), calls, usage.cached_content_token_count or 0)


_READERS: Mapping[tuple[str, bool], Callable[[httpx.Response], Read]] = {
    ("chat", False): _chat,
    ("chat", True): _chat_stream,
    ("responses", False): _response,
    ("responses", True): _response_stream,
    ("messages", False): _message,
    ("messages", True): _message_stream,
    ("contents", False): _content,
    ("contents", True): _content_stream,
}
