"""What a request asks the model to read, and how it asks it to choose: each API's own names, in one form.

Written from the APIs' documentation, and not from the service's schemas, so that it finds what those drop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.agents.recordings import Request

Json = Mapping[str, Any]


def texts(request: Request) -> Iterator[str]:
    """Yield every text that the model must read: of the system, of all turns, of calls, results and tools."""
    yield from _TEXTS[request.api](request.body)


def _parts(content: Any) -> Iterator[str]:
    """Yield the texts of a content: a text, or parts that have one."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part.get("text"), str):
            yield part["text"]


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts and the names in a JSON value, as they are written in JSON."""
    if isinstance(value, str):
        yield json.dumps(value, ensure_ascii=False)[1:-1]
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)


def _called(name: str, arguments: Any) -> Iterator[str]:
    yield name
    yield from _leaves(json.loads(arguments) if isinstance(arguments, str) else arguments)


def _tool(name: str, description: str | None, schema: Any) -> Iterator[str]:
    yield name
    yield from _leaves(description or "")
    yield from _leaves(schema)


def _chat(body: Json) -> Iterator[str]:
    for message in body["messages"]:
        yield from _parts(message.get("content"))
        for call in message.get("tool_calls") or ():
            yield from _called(call["function"]["name"], call["function"]["arguments"])
    for tool in body.get("tools") or ():
        function = tool["function"]
        yield from _tool(function["name"], function.get("description"), function.get("parameters"))


def _responses(body: Json) -> Iterator[str]:
    yield body.get("instructions") or ""
    items = body["input"] if isinstance(body["input"], list) else [{"content": body["input"]}]
    for item in items:
        yield from _parts(item.get("content"))
        yield from _parts(item.get("output"))
        if item.get("type") == "function_call":
            yield from _called(item["name"], item["arguments"])
    tools = [each for tool in body.get("tools") or () for each in (tool, *tool.get("tools", ()))]
    for tool in tools:
        if tool["type"] == "function":
            yield from _tool(tool["name"], tool.get("description"), tool.get("parameters"))


def _messages(body: Json) -> Iterator[str]:
    yield from _parts(body.get("system"))
    for message in body["messages"]:
        yield from _parts(message["content"])
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block["type"] == "tool_use":
                yield from _called(block["name"], block["input"])
            elif block["type"] == "tool_result":
                yield from _parts(block.get("content"))
    for tool in body.get("tools") or ():
        yield from _tool(tool["name"], tool.get("description"), tool.get("input_schema"))


def _contents(body: Json) -> Iterator[str]:
    turns = [body.get("systemInstruction") or body.get("system_instruction") or {}, *body["contents"]]
    for part in [part for turn in turns for part in turn.get("parts", ())]:
        yield part.get("text") or ""
        call = part.get("functionCall") or part.get("function_call")
        if call:
            yield from _called(call["name"], call.get("args") or {})
        returned = part.get("functionResponse") or part.get("function_response")
        if returned:
            response = returned["response"]
            result = response.get("output", response.get("result", response))
            yield from [result] if isinstance(result, str) else _leaves(result)
    for function in [each for tool in body.get("tools") or () for each in _declared(tool)]:
        names = ("parametersJsonSchema", "parameters_json_schema", "parameters")
        schema = next((function[name] for name in names if function.get(name)), None)
        yield from _tool(function["name"], function.get("description"), schema)


def _declared(tool: Json) -> list[Json]:
    """Return the functions of a tool: bodies may have Gemini's names in camel case or in snake case."""
    return list(tool.get("functionDeclarations") or tool.get("function_declarations") or ())


_TEXTS = {"chat": _chat, "responses": _responses, "messages": _messages, "contents": _contents}


def bound_names(request: Request) -> Iterator[str]:
    """Yield names that an answer must have: those of its schema's fields, or of the tool that it must call."""
    body = request.body
    config = body.get("generationConfig") or {}
    formats = [(body.get("response_format") or {}).get("json_schema"), (body.get("text") or {}).get("format")]
    formats.append((body.get("output_config") or {}).get("format"))
    schemas = [each.get("schema") for each in formats if each]
    schemas += [config.get("responseSchema"), config.get("responseJsonSchema")]
    for schema in schemas:
        yield from (schema or {}).get("properties", {})
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        names = (tool["name"] for tool in body.get("tools") or () if tool.get("name") == choice.get("name"))
        yield from names


def names_in(value: Any) -> Iterator[str]:
    """Yield every name in a JSON value, and the names of tools that its texts begin with."""
    if isinstance(value, str):
        yield from re.findall(r'"name": "([^"]+)"', value)
    elif isinstance(value, Mapping):
        yield from value
        for each in value.values():
            yield from names_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from names_in(each)


def choosing(request: Request) -> dict[str, Any]:
    """Return how a request wants tokens chosen: its own values of ``temperature``, ``top_p``, ``top_k``, ``most``."""
    body = request.body
    if request.api == "contents":
        config = body.get("generationConfig") or {}
        names = {
            "temperature": ("temperature",),
            "top_p": ("topP", "top_p"),
            "top_k": ("topK", "top_k"),
            "most": ("maxOutputTokens", "max_output_tokens"),
        }
        return {
            name: config[each]
            for name, both in names.items()
            for each in both
            if config.get(each) is not None
        }
    found = {name: body[name] for name in ("temperature", "top_p", "top_k") if body.get(name) is not None}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if body.get(name) is not None:
            found["most"] = body[name]
    return found
