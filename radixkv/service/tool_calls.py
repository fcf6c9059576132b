"""Finds tool calls in the text that a model generates: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

The models of the Hermes family and Qwen write calls so, and tools that are listed as text ask for it. A text between
the tags that isn't such a JSON object stays text. Text is handed out as soon as it can't be the beginning of a call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

_BEGIN, _END = "<tool_call>", "</tool_call>"
CALL_TAGS = (_BEGIN, _END)
"""What stands before and after a call."""
_MAX_CALL_CHARS = 64 * 1024
"""A longer text between tags is text."""


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
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))
