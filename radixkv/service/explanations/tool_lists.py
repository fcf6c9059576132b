"""What differs between two lists of tools: their order, their keys' order, or what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from radixkv.service.explanations.lines import Span, VolatileKind, kind_of_changing, span_of, volatile_kind
from radixkv.tokenizer.protocol import Tool

Change = Literal["keys", "volatile", "edited", "added", "removed", "order"]
_Key = tuple[str, int]
"""The name of a tool, and how many of that name come before it."""


@dataclass(frozen=True, slots=True)
class ToolChange:
    """A kind of change, with the first tool that has it: its indexes in the earlier and in the new list.

    ``span``: the bytes that differ in its JSON. ``line``: of a volatile one, the kind and the two versions of its line.
    """

    change: Change
    names: tuple[str, ...]
    earlier: int | None
    new: int | None
    span: Span | None = None
    line: tuple[VolatileKind, str, str] | None = None


class ToolLists:
    """Two lists of tools. O(size of both)."""

    def __init__(self, earlier: Sequence[Tool], new: Sequence[Tool]) -> None:
        self._earlier, self._new = dict(_keyed(earlier)), dict(_keyed(new))
        self._changes = {
            key: _change_of(self._earlier[key], tool)
            for key, tool in self._new.items()
            if key in self._earlier
        }

    def changes(self) -> list[ToolChange]:
        """Return what has changed, in the order in which it is repaired best."""
        both = [key for key in self._new if key in self._earlier]
        groups: list[tuple[Change, list[_Key]]] = [
            ("keys", [key for key in both if self._changes[key] == "keys"]),
            ("volatile", [key for key in both if self._changes[key] == "volatile"]),
            ("edited", [key for key in both if self._changes[key] == "edited"]),
            ("added", [key for key in self._new if key not in self._earlier]),
            ("removed", [key for key in self._earlier if key not in self._new]),
        ]
        found = [self._told(change, keys) for change, keys in groups if keys]
        old_order = [key for key in self._earlier if key in self._new]
        moved = [new for new, old in zip(both, old_order, strict=True) if new != old]
        return [*found, *([self._told("order", moved)] if moved else [])]

    def built(self, repaired: frozenset[Change]) -> list[Tool]:
        """Return the new tools with some changes undone; with all undone, the earlier ones."""
        tools = {
            key: self._earlier[key] if key in self._earlier and self._is_repaired(key, repaired) else tool
            for key, tool in self._new.items()
            if key in self._earlier or "added" not in repaired
        }
        order = list(tools)
        if "order" in repaired:
            old = iter([key for key in self._earlier if key in tools])
            order = [next(old) if key in self._earlier else key for key in order]
        if "removed" in repaired:
            for index, key in enumerate(self._earlier):
                if key not in tools:
                    order.insert(index, key)
        return [tools.get(key, self._earlier.get(key, {})) for key in order]

    def _is_repaired(self, key: _Key, repaired: frozenset[Change]) -> bool:
        change = self._changes[key]
        return change is None or change in repaired

    def _told(self, change: Change, keys: list[_Key]) -> ToolChange:
        first = keys[0]
        span = line = None
        if change in ("edited", "volatile", "keys"):
            earlier, new = _text(self._earlier[first]), _text(self._new[first])
            span = span_of(earlier, new)
            if change == "volatile":
                line = next(_volatile_lines(self._earlier[first], self._new[first]))
        earlier_at, at = (
            list(each).index(first) if first in each else None for each in (self._earlier, self._new)
        )
        return ToolChange(change, tuple(name for name, _ in keys), earlier_at, at, span, line)


def _keyed(tools: Sequence[Tool]) -> Iterator[tuple[_Key, Tool]]:
    seen: dict[str, int] = {}
    for tool in tools:
        name = str(tool["function"]["name"])
        yield (name, seen.get(name, 0)), tool
        seen[name] = seen.get(name, 0) + 1


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _change_of(earlier: Tool, new: Tool) -> Literal["keys", "volatile", "edited"] | None:
    """Return what differs between two tools of one name."""
    if _text(earlier) == _text(new):
        return None
    if is_same_but_for_order(earlier, new):
        return "keys"
    pairs = list(_leaves(earlier, new))
    changed = [(old, text) for old, text in pairs if old != text]
    is_volatile = changed and all(_is_volatile(old, text) for old, text in changed)
    return "volatile" if is_volatile and _shape(earlier) == _shape(new) else "edited"


def _volatile_lines(earlier: Tool, new: Tool) -> Iterator[tuple[VolatileKind, str, str]]:
    """Yield the lines that differ in the texts of two tools."""
    for old, text in _leaves(earlier, new):
        for other, line in zip(old.split("\n"), text.split("\n"), strict=True):
            if other != line:
                yield kind_of_changing(other, line), other, line


def _is_volatile(earlier: str, new: str) -> bool:
    lines, others = new.split("\n"), earlier.split("\n")
    return len(lines) == len(others) and all(
        line == other or volatile_kind(other, line) is not None
        for line, other in zip(lines, others, strict=True)
    )


def is_same_but_for_order(earlier: object, new: object) -> bool:
    """Whether two JSON values are equal but for the order of their keys."""
    return json.dumps(earlier, sort_keys=True) == json.dumps(new, sort_keys=True)


def _leaves(earlier: Any, new: Any) -> Iterator[tuple[str, str]]:
    """Yield the strings at equal places of two values of one shape."""
    if isinstance(earlier, str) and isinstance(new, str):
        yield earlier, new
    elif isinstance(earlier, Mapping) and isinstance(new, Mapping):
        for name in new:
            if name in earlier:
                yield from _leaves(earlier[name], new[name])
    elif isinstance(earlier, list | tuple) and isinstance(new, list | tuple):
        for one, other in zip(earlier, new, strict=False):
            yield from _leaves(one, other)


def _shape(value: Any) -> Any:
    """Return a value with its strings left out."""
    if isinstance(value, Mapping):
        return [(name, _shape(each)) for name, each in value.items()]
    if isinstance(value, list | tuple):
        return [_shape(each) for each in value]
    return str if isinstance(value, str) else value
