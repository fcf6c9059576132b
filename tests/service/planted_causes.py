"""Conversations with planted causes: each request is written in the shapes of all APIs, and changed in a known place.

The place in tokens is known from the planted change alone: the earlier request is rendered with and without it, by the
schema and the tokenizer, and the ids are compared one by one.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from radixkv.service.schemas.chat import ChatRequest
from radixkv.service.schemas.contents import CountedRequest
from radixkv.service.schemas.messages import MessagesRequest
from radixkv.service.schemas.responses import ResponsesRequest
from radixkv.tokenizer import Tokenizer

WORDS = (
    *("parcel", "order", "manual", "refund", "page", "address", "courier", "warehouse", "label", "receipt"),
    *("invoice", "stock", "size", "colour", "return", "customer", "delivery", "shop", "price", "letter"),
    *("morning", "street", "answer", "question", "notice", "summary"),
)
MODELS: dict[str, Any] = {
    "chat": ChatRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
    "contents": CountedRequest,
}
Turn = dict[str, Any]


@dataclass
class Talk:
    """A request without the shape of an API: the system's lines, turns and tools."""

    api: str
    system: list[str]
    turns: list[Turn]
    tools: list[dict[str, Any]]
    fields: dict[str, Any] = field(default_factory=dict)
    hides_tools: bool = False

    def body(self) -> dict[str, Any]:
        """Return the body in the API's shape."""
        return {**getattr(self, f"_{self.api}")(), **self.fields}

    def raw(self) -> bytes:
        return json.dumps(self.body(), ensure_ascii=False).encode()

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Render the request, with nothing of the explanations."""
        body = MODELS[self.api].model_validate_json(self.raw())
        return tokenizer.encode_chat(body.turns(), body.tool_specs())

    def place(self, index: int) -> str:
        """Return the field of a turn."""
        if self.api == "responses":
            return f"input[{sum(1 + ('call' in each) for each in self.turns[:index])}]"
        name = {"chat": "messages", "messages": "messages", "contents": "contents"}[self.api]
        return f"{name}[{index + (self.api == 'chat')}]"

    @property
    def system_place(self) -> str:
        return {
            "chat": "messages[0]",
            "messages": "system",
            "responses": "instructions",
            "contents": "systemInstruction",
        }[self.api]

    def tool_place(self, index: int) -> str:
        return f"tools[0].functionDeclarations[{index}]" if self.api == "contents" else f"tools[{index}]"

    def _chat(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "\n".join(self.system)}]
        for each in self.turns:
            message = {"role": each["role"], "content": each["text"]}
            if "call" in each:
                function = {"name": each["call"][0], "arguments": json.dumps(each["call"][1])}
                message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
            if each["role"] == "tool":
                message["tool_call_id"] = "c1"
            messages.append(message)
        tools = [{"type": "function", "function": dict(each)} for each in self.tools]
        hidden = {"tool_choice": "none"} if self.hides_tools else {}
        return {"messages": messages, "tools": tools, **hidden}

    def _messages(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for each in self.turns:
            if each["role"] == "tool":
                result = {"type": "tool_result", "tool_use_id": "c1", "content": each["text"]}
                messages.append({"role": "user", "content": [result]})
            elif "call" in each:
                name, arguments = each["call"]
                call = {"type": "tool_use", "id": "c1", "name": name, "input": arguments}
                text = {"type": "text", "text": each["text"]}
                messages.append({"role": "assistant", "content": [text, call]})
            else:
                messages.append({"role": each["role"], "content": each["text"]})
        tools = [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
            for each in self.tools
        ]
        hidden = {"tool_choice": {"type": "none"}} if self.hides_tools else {}
        return {
            "max_tokens": 9,
            "system": "\n".join(self.system),
            "messages": messages,
            "tools": tools,
            **hidden,
        }

    def _responses(self) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for each in self.turns:
            if each["role"] == "tool":
                items.append({"type": "function_call_output", "call_id": "c1", "output": each["text"]})
                continue
            items.append({"role": each["role"], "content": each["text"]})
            if "call" in each:
                name, arguments = each["call"]
                call = {"call_id": "c1", "name": name, "arguments": json.dumps(arguments)}
                items.append({"type": "function_call", **call})
        tools = [{"type": "function", **each} for each in self.tools]
        hidden = {"tool_choice": "none"} if self.hides_tools else {}
        return {"instructions": "\n".join(self.system), "input": items, "tools": tools, **hidden}

    def _contents(self) -> dict[str, Any]:
        contents: list[dict[str, Any]] = []
        for each in self.turns:
            if each["role"] == "tool":
                response = {"name": "f", "response": {"output": each["text"]}}
                contents.append({"role": "user", "parts": [{"functionResponse": response}]})
                continue
            parts: list[dict[str, Any]] = [{"text": each["text"]}]
            if "call" in each:
                parts.append({"functionCall": {"name": each["call"][0], "args": each["call"][1]}})
            contents.append({"role": "model" if each["role"] == "assistant" else "user", "parts": parts})
        config = {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}} if self.hides_tools else {}
        system = {"parts": [{"text": "\n".join(self.system)}]}
        tools = [{"functionDeclarations": [dict(each) for each in self.tools]}]
        return {"systemInstruction": system, "contents": contents, "tools": tools, **config}


# ---- conversations


class Writer:
    """Writes texts and conversations from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def words(self, least: int = 4, most: int = 12) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(least, most))) + "."

    def tool(self, name: str) -> dict[str, Any]:
        properties = {"street": {"type": "string"}, "count": {"type": "integer"}}
        parameters = {"type": "object", "properties": properties, "required": ["street"]}
        return {"name": name, "description": self.words(), "parameters": parameters}

    def question(self) -> Turn:
        return {"role": "user", "text": f"{self.random.randrange(10**5)} {self.words()}"}

    def answer(self) -> Turn:
        return {"role": "assistant", "text": f"{self.random.randrange(10**5)} {self.words()}"}

    def exchange(self) -> list[Turn]:
        """Return a question and its answer, some with a call of a tool or with reasoning."""
        if self.random.random() < 0.4:
            call = ("f", {"street": self.words(1, 2), "count": self.random.randrange(99)})
            return [
                self.question(),
                {**self.answer(), "call": call},
                {"role": "tool", "text": self.words()},
                self.answer(),
            ]
        return [self.question(), self.answer()]

    def talk(self, api: str, num_exchanges: int = 5) -> Talk:
        """Return a conversation that ends with a question."""
        system = [self.words() for _ in range(self.random.randint(4, 9))]
        turns = [turn for _ in range(num_exchanges) for turn in self.exchange()]
        names = self.random.sample(["f", "find", "order", "cancel", "track", "refund"], k=4)
        return Talk(api, system, [*turns, self.question()], [self.tool(name) for name in names])

    def continued(self, talk: Talk) -> Talk:
        """Return the next request of a conversation."""
        found = copy.deepcopy(talk)
        found.turns += [
            self.answer(),
            *(self.exchange() if self.random.random() < 0.5 else []),
            self.question(),
        ]
        return found


# ---- causes


@dataclass
class Planted:
    """A planted cause: its name, its field in the new body, and the change alone."""

    cause: str
    place: str
    change: Callable[[Talk], None]


def _line_of(kind: str, version: int) -> str:
    return {
        "date": f"Today is 2026-03-{10 + version}.",
        "time": f"Now: 09:{10 + version}:07.",
        "id": f"Session 8c1f5d0a-7be2-4c99-930d-1a6f2b3c{1000 + version}.",
        "checksum": f"Build checksum {0xA1B2C3D4E5 + 77 * version:x}.",
        "number": f"Request {1775000000 + 977 * version}.",
    }[kind]


def prepared(writer: Writer, talk: Talk, cause: str) -> Planted:
    """Change a conversation so that a cause can be planted in it; return the cause."""
    chance = writer.random
    if cause.startswith("volatile_line"):
        kind = cause.partition(":")[2]
        talk.system.insert(chance.randrange(1, len(talk.system)), _line_of(kind, 0))

        def changed(each: Talk) -> None:
            each.system[each.system.index(_line_of(kind, 0))] = _line_of(kind, 1)

        return Planted("volatile_line", talk.system_place, changed)
    return getattr(_Planting(writer, talk), cause)()  # type: ignore[no-any-return]


class _Planting:
    """Plants each cause; its methods have the causes' names."""

    def __init__(self, writer: Writer, talk: Talk) -> None:
        self.writer, self.chance, self.talk = writer, writer.random, talk

    def model_changed(self) -> Planted:
        return Planted("model_changed", "", lambda each: each.fields.update(model="another"))

    def adapter_changed(self) -> Planted:
        return Planted("adapter_changed", "", lambda each: each.fields.update(adapter="another"))

    def salt_changed(self) -> Planted:
        return Planted("salt_changed", "", lambda each: each.fields.update(salt="another"))

    def tools_reordered(self) -> Planted:
        first = self.chance.randrange(len(self.talk.tools) - 1)

        def change(each: Talk) -> None:
            each.tools[first:] = [*each.tools[:first:-1], each.tools[first]]

        return Planted("tools_reordered", self.talk.tool_place(first), change)

    def tool_keys_reordered(self) -> Planted:
        at = self.chance.randrange(len(self.talk.tools))

        def change(each: Talk) -> None:
            parameters = each.tools[at]["parameters"]
            properties = dict(reversed(parameters["properties"].items()))
            each.tools[at]["parameters"] = {**parameters, "properties": properties}

        return Planted("tool_keys_reordered", self.talk.tool_place(at), change)

    def tools_added(self) -> Planted:
        at, tool = self.chance.randrange(len(self.talk.tools) + 1), self.writer.tool("added")
        return Planted("tools_added", self.talk.tool_place(at), lambda each: each.tools.insert(at, tool))

    def tools_removed(self) -> Planted:
        at = self.chance.randrange(len(self.talk.tools))

        def change(each: Talk) -> None:
            del each.tools[at]

        return Planted("tools_removed", "", change)

    def tools_hidden(self) -> Planted:
        place = "toolConfig" if self.talk.api == "contents" else "tool_choice"
        return Planted("tools_hidden", place, lambda each: setattr(each, "hides_tools", True))

    def tools_changed(self) -> Planted:
        at = self.chance.randrange(len(self.talk.tools))
        text = self.writer.words()
        return Planted(
            "tools_changed", self.talk.tool_place(at), lambda each: each.tools[at].update(description=text)
        )

    def system_changed(self) -> Planted:
        lines = [each for each in self.talk.system if each.split()[0] in WORDS]
        line, text = self.chance.choice(lines), self.writer.words() + " Really."

        def change(each: Talk) -> None:
            each.system[each.system.index(line)] = text

        return Planted("system_changed", self.talk.system_place, change)

    def message_changed(self) -> Planted:
        at, text = self._inner(lambda turn: "call" not in turn), self.writer.words() + " Really."
        return Planted("message_changed", self.talk.place(at), lambda each: each.turns[at].update(text=text))

    def reasoning_stripped(self) -> Planted:
        at = self._inner(lambda turn: turn["role"] == "assistant")
        text = self.talk.turns[at]["text"]
        thought = self.writer.words()
        opened = self.chance.choice(["<think>", "<think>", ""])  # some templates open it themselves
        self.talk.turns[at]["text"] = f"{opened}{thought}</think>\n\n{text}"
        return Planted(
            "reasoning_stripped", self.talk.place(at), lambda each: each.turns[at].update(text=text)
        )

    def argument_keys_reordered(self) -> Planted:
        self.talk.turns[2:2] = [
            self.writer.question(),
            {**self.writer.answer(), "call": ("f", {"street": "Main", "count": 7})},
            {"role": "tool", "text": "none"},
            self.writer.answer(),
        ]
        at = 3
        if self.talk.turns[1].get("call"):  # a call and its result stay together
            self.talk.turns[1].pop("call")

        def change(each: Talk) -> None:
            each.turns[at]["call"] = ("f", {"count": 7, "street": "Main"})

        return Planted("argument_keys_reordered", f"{self.talk.place(at)}.tool_calls", change)

    def messages_truncated(self) -> Planted:
        first, num = self.chance.randrange(3), self.chance.randint(1, 4)
        while self.talk.turns[first + num]["role"] != "user":  # APIs join answers that follow each other
            num += 1

        def change(each: Talk) -> None:
            del each.turns[first : first + num]

        return Planted("messages_truncated", self.talk.place(first), change)

    def messages_compacted(self) -> Planted:
        first, num = self.chance.randrange(3), self.chance.randint(3, 5)
        summary = {"role": "user", "text": "Summary: " + self.writer.words()}

        def change(each: Talk) -> None:
            each.turns[first : first + num] = [copy.deepcopy(summary)]

        return Planted("messages_compacted", self.talk.place(first), change)

    def message_inserted(self) -> Planted:
        first, turn = self.chance.randint(1, 4), {"role": "user", "text": "Notice: " + self.writer.words()}
        return Planted(
            "message_inserted",
            self.talk.place(first),
            lambda each: each.turns.insert(first, copy.deepcopy(turn)),
        )

    def _inner(self, fits: Callable[[Turn], bool]) -> int:
        """Return the index of a turn that is neither the first nor the last ones."""
        at = [
            index
            for index, turn in enumerate(self.talk.turns[:-2])
            if index > 0 and turn["role"] in ("user", "assistant") and fits(turn)
        ]
        return self.chance.choice(at)


VOLATILE = tuple(f"volatile_line:{kind}" for kind in ("date", "time", "id", "checksum", "number"))
OF_TOOLS = (
    "tools_reordered",
    "tool_keys_reordered",
    "tools_added",
    "tools_removed",
    "tools_hidden",
    "tools_changed",
)
OF_SYSTEM = ("system_changed", *VOLATILE)
OF_MESSAGES = ("message_changed", "reasoning_stripped", "argument_keys_reordered")
OF_HISTORY = ("messages_truncated", "messages_compacted", "message_inserted")
OF_CACHES = ("model_changed", "adapter_changed", "salt_changed")
ALL = (*OF_CACHES, *OF_TOOLS, *OF_SYSTEM, *OF_MESSAGES, *OF_HISTORY)


def num_equal(left: list[int], right: list[int]) -> int:
    """Compare one id after the other."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
