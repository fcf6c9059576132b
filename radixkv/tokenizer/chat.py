"""Turns a conversation into segments: texts, and the special ids between them.

There are three kinds of ``Chat``:

- ``MarkerChat``, of the shipped tokenizer: ``<s>``, then for each message the id of its role, its content and the
  id of ``<|end|>``. The generation prompt is the id of the assistant's role.
- ``TemplateChat``: a model's Jinja template, rendered in Jinja's sandbox in a process of its own (``templates``). The
  special tokens that the template writes become ids. The same strings inside a message stay text.
- ``PlainChat``, for a model without a template: a message is ``role: content`` and a newline. Further lines of the
  content are indented by two spaces, so that none of them can look like the line of a role. The generation prompt
  is ``assistant:``.

Each text segment is encoded by itself: an id between two texts separates them for every tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from radixkv.errors import ArgumentError
from radixkv.tokenizer import templates
from radixkv.tokenizer.protocol import Message, Tool, Turn, check_messages
from radixkv.tokenizer.templates import to_json

Segment = str | int

_CONTINUATIONS: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("assistant",),
    ("system",),
    ("tool",),
    ("user", "assistant"),
    ("assistant", "user"),
)


_TOOLS_BEGIN = "You may call these functions:"
_TOOLS_END = (
    "To call one, answer with its name and arguments as JSON:\n<tool_call>\n"
    '{"name": "NAME", "arguments": {}}\n</tool_call>'
)


class RenderingTooLong(ArgumentError):
    """The chat template needs more time, memory or text than it may for a conversation."""


class NotRendered(Exception):
    """This tokenizer renders no chat template: its caller must not be blocked."""


class Chat(Protocol):
    """Turns conversations into segments."""

    opens_like_text: bool
    """Whether a conversation begins with the same leading ids as a plain text."""

    only_grows: bool
    """Whether every continuation begins with the conversation's segments.

    If the last segment is text, it may grow.
    """

    @property
    def roles(self) -> tuple[str, ...] | None:
        """The allowed roles; None if only rendering shows which are."""
        ...

    def segments(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[Segment]:
        """Return the segments of a conversation. Raises ArgumentError for messages that it can't render."""
        ...

    def chat_segments(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Segment]:
        """Return the segments of a conversation with tools, and of the opening of the assistant's answer."""
        ...


class MarkerChat:
    """Roles and ends are single ids of the vocabulary."""

    opens_like_text = False
    only_grows = True

    def __init__(self, bos_id: int, role_ids: Mapping[str, int], end_id: int) -> None:
        self._bos_id, self._role_ids, self._end_id = bos_id, role_ids, end_id
        self.roles = tuple(sorted(role_ids))

    def segments(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[Segment]:
        check_messages(messages, self._role_ids)
        found: list[Segment] = [self._bos_id]
        for message in messages:
            found += [self._role_ids[message["role"]], message["content"], self._end_id]
        return [*found, self._role_ids["assistant"]] if add_generation_prompt else found

    def chat_segments(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Segment]:
        return self.segments(with_tools_as_text(turns, tools), True)


class UnrenderedChat:
    """Stands for a chat that blocks: every conversation raises NotRendered."""

    opens_like_text = False
    only_grows = False
    roles = None

    def segments(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[Segment]:
        raise NotRendered

    def chat_segments(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Segment]:
        raise NotRendered


class PlainChat:
    """Roles are words at the start of a line."""

    opens_like_text = True
    only_grows = True
    roles = None

    def segments(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[Segment]:
        check_messages(messages)
        for index, message in enumerate(messages):
            if not message["role"].isidentifier():
                raise ArgumentError(f"messages[{index}].role", message["role"], "a word")
        turns = [f"{message['role']}: {self._indented(message['content'])}\n" for message in messages]
        return ["".join(turns) + ("assistant:" if add_generation_prompt else "")]

    def chat_segments(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Segment]:
        return self.segments(with_tools_as_text(turns, tools), True)

    @staticmethod
    def _indented(content: str) -> str:
        return "".join(
            line if not number else f"  {line}" for number, line in enumerate(content.splitlines(True))
        )


class TemplateChat:
    """A Jinja chat template. ``special_ids``: strings that become ids where the template writes them."""

    opens_like_text = False
    only_grows = False
    roles = None

    def __init__(
        self, template: str, special_ids: Mapping[str, int], variables: Mapping[str, object]
    ) -> None:
        self._made_of = template, special_ids, variables
        templates.check(template)
        self._template = template
        self._ids = {piece: token_id for piece, token_id in special_ids.items() if piece}
        self._variables = dict(variables)
        longest_first = sorted(self._ids, key=lambda piece: (-len(piece), piece))
        either = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._special = re.compile(f"({either})")
        self._start_of_special = re.compile(f"(?=(?:{either}))(.)", re.DOTALL)

    def __reduce__(self) -> tuple[Any, ...]:
        return TemplateChat, self._made_of

    def segments(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[Segment]:
        return self._segments(messages, (), add_generation_prompt)

    def chat_segments(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Segment]:
        return self._segments(turns, tools, True)

    def _segments(
        self, turns: Sequence[Turn], tools: Sequence[Tool], add_generation_prompt: bool
    ) -> list[Segment]:
        check_messages(turns)
        mark = _unused_mark((*turns, *tools))
        rendered = self._render(
            self._disarmed(list(turns), mark), self._disarmed(list(tools), mark), add_generation_prompt
        )
        rearm = re.compile(f"{mark}([0-9]+){mark}")
        found: list[Segment] = []
        for number, part in enumerate(self._special.split(rendered)):
            if number % 2:
                found.append(self._ids[part])
            elif part:
                found.append(rearm.sub(lambda escaped: chr(int(escaped[1])), part))
        return found

    def _disarmed(self, value: Any, mark: str) -> Any:
        """Return a JSON value, with the first character of every special string in it written as a number."""
        if isinstance(value, str):
            return self._start_of_special.sub(lambda start: f"{mark}{ord(start[1])}{mark}", value)
        if isinstance(value, Mapping):
            return {self._disarmed(name, mark): self._disarmed(each, mark) for name, each in value.items()}
        return [self._disarmed(each, mark) for each in value] if isinstance(value, list | tuple) else value

    def _render(
        self, turns: list[dict[str, Any]], tools: list[dict[str, Any]], add_generation_prompt: bool
    ) -> str:
        variables = {
            **self._variables,
            "messages": turns,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        roles = [turn["role"] for turn in turns]
        try:
            return templates.render(self._template, variables)
        except templates.Refused as error:
            raise ArgumentError("messages", roles, f"roles that the chat template allows: {error}") from error
        except templates.TooLong as error:
            raise RenderingTooLong(
                "messages", len(turns), f"a conversation that can be rendered: {error}"
            ) from None


def _unused_mark(value: object) -> str:
    """Return a run of U+FDD0, a code point that no text uses. It is longer than any such run in a JSON value."""
    return "\ufdd0" * (1 + _longest_mark(value))


def _longest_mark(value: object) -> int:
    if isinstance(value, str):
        return max(map(len, re.findall("\ufdd0+", value)), default=0)
    parts = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
    return max(map(_longest_mark, parts), default=0) if isinstance(parts, list | tuple) else 0


def with_tools_as_text(turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Message]:
    """Return messages of system, user and assistant alone, for a model whose chat has no form for tools.

    Tools are listed in the system message. Calls and results are written between tags, as the models of the Hermes
    family and Qwen do; results are the user's.
    """
    messages = [_turn_as_text(turn) for turn in turns]
    if not tools:
        return messages
    listed = "\n".join(to_json(tool) for tool in tools)
    text = f"{_TOOLS_BEGIN}\n<tools>\n{listed}\n</tools>\n{_TOOLS_END}"
    if messages and messages[0]["role"] == "system":
        first = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _turn_as_text(turn: Turn) -> Message:
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{to_json(call['function'])}\n</tool_call>" for call in turn.get("tool_calls") or ()
    ]
    content = "\n".join([*([turn["content"]] if turn["content"] or not calls else []), *calls])
    return {"role": turn["role"], "content": content}


def common_segments(
    chat: Chat, messages: Sequence[Message], segments: list[Segment]
) -> tuple[list[Segment], str | None]:
    """``(kept, open_text)``: the segments that every continuation of the conversation keeps, and the text after them.

    ``kept`` ends with a special id. ``open_text`` is None if a continuation may do more than extend that text. A
    template may write a message differently once it isn't the last, for example without its reasoning. So the
    conversation is rendered with several continuations. Continuations that the template refuses don't count. If
    ``chat.only_grows``, nothing is rendered again.
    """
    if chat.only_grows:
        last = segments[-1]
        return (segments[:-1], last) if isinstance(last, str) else (segments, None)
    grown = [chat.segments(messages, True)]
    for roles in _CONTINUATIONS:
        try:
            grown.append(
                chat.segments([*messages, *({"role": role, "content": "x"} for role in roles)], False)
            )
        except RenderingTooLong:
            raise
        except ArgumentError:
            continue
    kept = min(_num_common(segments, other) for other in grown)
    if kept < len(segments) and isinstance(text := segments[kept], str):
        others = [other[kept] if kept < len(other) else None for other in grown]
        if all(isinstance(other, str) and other.startswith(text) for other in others):
            return segments[:kept], text
    if kept and isinstance(text := segments[kept - 1], str):
        return segments[: kept - 1], text
    return segments[:kept], None


def _num_common(left: list[Segment], right: list[Segment]) -> int:
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
