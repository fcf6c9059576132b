"""Finds tool calls in the text that a model generates: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

The models of the Hermes family and Qwen write calls so, and tools that are listed as text ask for it. Some models write
``parameters`` in place of ``arguments``, or the arguments as a text that is JSON: both are read. A text between the
tags that isn't such a JSON object stays text. Text is handed out as soon as it can't be the beginning of a call.

A call is one that each API can answer and that the next request may send back: its arguments are an object, without
lone surrogates (they are no Unicode text), infinite numbers and deep nesting.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

_BEGIN, _END = "<tool_call>", "</tool_call>"
CALL_TAGS = (_BEGIN, _END)
"""What stands before and after a call."""
_MAX_CALL_CHARS = 64 * 1024
"""A longer text between tags is text."""
_MAX_NAME_CHARS: Final = 256
_BODY_DEPTH: Final = 32
"""More levels than a body has around a call's arguments."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: the name of the tool, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolCallReader:
    """Splits one answer into texts and calls, piece by piece. Linear time."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def push(self, piece: str) -> list[str | ToolCall]:
        """Return the texts and calls that are complete with this piece."""
        self._held += piece
        found: list[str | ToolCall] = []
        while (step := self._step()) is not None:
            found += [step] if step else []
        return found

    def close(self) -> list[str | ToolCall]:
        """Return the text that was held back."""
        rest = (_BEGIN if self._inside else "") + self._held
        self._held, self._inside = "", False
        return [rest] if rest else []

    def _step(self) -> str | ToolCall | None:
        """Return the next text or call; an empty text for progress without either, None without progress."""
        if not self._inside:
            before, begin, after = self._held.partition(_BEGIN)
            if begin:
                self._held, self._inside = after, True
                return before
            cut = len(self._held) - _num_begun(self._held)
            shown, self._held = self._held[:cut], self._held[cut:]
            return shown or None
        content, end, after = self._held.partition(_END)
        if not end:
            return self._given_up() if len(self._held) > _MAX_CALL_CHARS else None
        self._held, self._inside = after, False
        return _parsed(content) or f"{_BEGIN}{content}{_END}"

    def _given_up(self) -> str:
        text, self._held, self._inside = _BEGIN + self._held, "", False
        return text


def _num_begun(text: str) -> int:
    """Return the length of the longest beginning of a tag that the text ends with."""
    return next((size for size in range(len(_BEGIN) - 1, 0, -1) if text.endswith(_BEGIN[:size])), 0)


def _parsed(content: str) -> ToolCall | None:
    """Return the call; None if it is none, or if a body couldn't have it."""
    try:
        call = json.loads(content)
        name, arguments = call["name"], _arguments_in(call)
        text = _SURROGATE.sub("\ufffd", json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        from_json("[" * _BODY_DEPTH + text + "]" * _BODY_DEPTH)
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    is_call = isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS and isinstance(arguments, dict)
    return ToolCall(_SURROGATE.sub("\ufffd", name), text) if is_call else None


def _arguments_in(call: dict[str, Any]) -> Any:
    arguments = call.get("parameters") if call.get("arguments") is None else call["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {} if arguments is None else arguments
