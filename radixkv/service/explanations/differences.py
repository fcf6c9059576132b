"""What differs between two conversations, as a list of differences that can be undone one by one.

    earlier  [system][ a ][ b ][ c ][ d ]
    new      [system'][ a ][ c ][ d'][ e ][ f ]
              pair          cut  pair  └────┴─ what the new one adds: no difference

Turns are aligned: what both have, what was edited in its place, cut out, put in, or replaced by fewer. ``Comparison``
builds the new conversation with any of its differences undone: so each can be rendered with and without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Literal

from radixkv.service.explanations.bodies import Chat, Content, Request, num_common
from radixkv.service.explanations.lines import (
    Span,
    VolatileKind,
    aligned,
    chars_of,
    kind_of_changing,
    span_of,
    volatile_kind,
    without_thoughts,
)
from radixkv.service.explanations.tool_lists import Change, ToolLists, is_same_but_for_order
from radixkv.tokenizer.protocol import Tool, Turn, text_of

Cause = Literal[
    "first_request",
    "shorter_than_block",
    "model_changed",
    "adapter_changed",
    "salt_changed",
    "cache_not_used",
    "tokenizer_changed",
    "template_changed",
    "form_changed",
    "tools_reordered",
    "tool_keys_reordered",
    "tools_added",
    "tools_removed",
    "tools_hidden",
    "tools_changed",
    "system_changed",
    "volatile_line",
    "message_changed",
    "argument_keys_reordered",
    "reasoning_stripped",
    "message_inserted",
    "messages_truncated",
    "messages_compacted",
    "prompt_changed",
    "retokenised",
    "template_rewrites",
    "other_conversation",
]

MAX_LINES: Final = 16
"""Lines of a text that change by their nature. If there are more, the text was changed."""
Part = Literal["request", "tools", "system", "messages", "prompt"]
_SYSTEM = ("system", "developer")
_OF_TOOLS: dict[Change, Cause] = {
    "keys": "tool_keys_reordered",
    "volatile": "volatile_line",
    "edited": "tools_changed",
    "added": "tools_added",
    "removed": "tools_removed",
    "order": "tools_reordered",
}


@dataclass(frozen=True, slots=True)
class ChangedLine:
    """A line that changes: where, of which kind, and its two versions."""

    kind: VolatileKind
    span: Span
    earlier: str
    new: str


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    - ``place``, ``earlier_place``: the field of each body; empty if it has none.
    - ``span``: the bytes that differ in the text of that field; None if it isn't a text.
    - ``num``: how many turns or tools it is about; ``num_new``: how many there are in their place.
    - ``lines``: of a volatile line. ``names``: of tools.
    - ``turn``: the index of its turn in the new conversation; None for tools and prompts.
    - ``part``: of what it is a part. ``is_form``: whether only the form of a content differs, and no text.
    - ``is_at_end``: whether it is in the last turn of the earlier conversation.
    - ``can_undo``: whether the new conversation can be built without it.
    """

    cause: Cause
    place: str
    earlier_place: str
    span: Span | None = None
    num: int = 1
    num_new: int = 1
    lines: tuple[ChangedLine, ...] = ()
    names: tuple[str, ...] = ()
    turn: int | None = None
    part: Part = "messages"
    is_form: bool = False
    is_at_end: bool = False
    can_undo: bool = True


Undone = frozenset[int]
"""Differences that are undone, by their index."""
_Builder = Callable[[Undone], list[Turn]]


@dataclass(slots=True)
class Comparison:
    """The differences between two contents.

    - ``extends``: whether the new content has all of the earlier one once its differences are undone.
    """

    differences: list[Difference] = field(default_factory=list)
    extends: bool = True
    _parts: list[_Builder] = field(default_factory=list)
    _tools: Callable[[Undone], list[Tool]] = lambda undone: []
    _text: Callable[[Undone], Content] | None = None

    def built(self, undone: Undone) -> Content:
        """Return the new content with some differences undone."""
        if self._text is not None:
            return self._text(undone)
        return Chat([turn for part in self._parts for turn in part(undone)], self._tools(undone))

    def add(self, difference: Difference) -> int:
        """Add a difference and return its index."""
        self.differences.append(difference)
        return len(self.differences) - 1


def compared(earlier: Request, new: Request, history: Sequence[Request]) -> Comparison:
    """Return the differences between two requests. O(size of the bodies), and 16,384 comparisons of turns at most.

    ``history``: all earlier requests, oldest first, for lines that change each time.
    """
    if isinstance(earlier.content, Chat) and isinstance(new.content, Chat):
        return _Chats(earlier, new, history).comparison
    found = Comparison()
    if isinstance(earlier.content, str) and isinstance(new.content, str):
        _compare_texts(found, earlier.content, new.content, history)
        return found
    new_content = new.content
    found._text = lambda undone: new_content
    is_form = isinstance(earlier.content, Chat) != isinstance(new.content, Chat)
    common, size = num_common(earlier.ids, new.ids), min(earlier.num_tokens, new.num_tokens)
    if is_form:
        found.add(
            Difference("form_changed", new.places[0], earlier.places[0], part="request", can_undo=False)
        )
    elif common < size:
        place = f"prompt[{common}]"
        found.add(Difference("prompt_changed", place, place, part="prompt", can_undo=False))
    found.extends = new.num_tokens >= earlier.num_tokens
    return found


def _compare_texts(found: Comparison, earlier: str, new: str, history: Sequence[Request]) -> None:
    """Compare two prompts that are texts. What the new one adds at its end is no difference."""
    if earlier.startswith(new):
        found.extends = False
        found._text = lambda undone: new
        return
    versions = [each.content for each in history if isinstance(each.content, str)]
    pieces = _Pieces(found, [earlier], [new], [[each] for each in versions], is_open=True)
    pieces.add_differences(
        lambda is_volatile, span, lines: Difference(
            "volatile_line" if is_volatile else "prompt_changed",
            "prompt",
            "prompt",
            span,
            lines=lines,
            part="prompt",
        )
    )
    found._text = lambda undone: pieces.texts(undone)[0]


class _Chats:
    """Fills the comparison of two conversations."""

    def __init__(self, earlier: Request, new: Request, history: Sequence[Request]) -> None:
        self._earlier, self._new, self.comparison = earlier, new, Comparison()
        assert isinstance(earlier.content, Chat) and isinstance(new.content, Chat)
        self._chats = earlier.content, new.content
        self._history = [each.content for each in history if isinstance(each.content, Chat)]
        self._compare_tools()
        old_head, new_head = (_num_head(each.turns) for each in self._chats)
        self._compare_heads(old_head, new_head)
        self._compare_bodies(old_head, new_head)

    # ---- tools

    def _compare_tools(self) -> None:
        earlier, new = self._chats
        if self._new.hides_tools and earlier.tools:
            place = "tool_choice" if self._new.api != "contents" else "toolConfig"
            first = self._earlier.tool_places[0]
            index = self.comparison.add(
                Difference("tools_hidden", place, first, num=len(earlier.tools), part="tools")
            )
            self.comparison._tools = lambda undone: list(earlier.tools if index in undone else new.tools)
            return
        lists = ToolLists(earlier.tools, new.tools)
        by_index: dict[int, Change] = {}
        for each in lists.changes():
            places = (
                _place(self._new.tool_places, each.new, "tools"),
                _place(self._earlier.tool_places, each.earlier, "tools"),
            )
            lines: tuple[ChangedLine, ...] = ()
            if each.line is not None and each.span is not None:
                lines = (ChangedLine(each.line[0], each.span, *each.line[1:]),)
            names = each.names
            found = Difference(
                _OF_TOOLS[each.change], *places, each.span, len(names), lines=lines, names=names, part="tools"
            )
            by_index[self.comparison.add(found)] = each.change
        self.comparison._tools = lambda undone: lists.built(
            frozenset(change for index, change in by_index.items() if index in undone)
        )

    # ---- the system's turns, at the beginning

    def _compare_heads(self, old_head: int, new_head: int) -> None:
        for index in range(min(old_head, new_head)):
            self._pair(index, index, "system_changed")
        most = min(old_head, new_head)
        if old_head != new_head:
            self._block("system_changed", most, old_head, most, new_head)

    # ---- the others

    def _compare_bodies(self, old_head: int, new_head: int) -> None:
        earlier, new = self._chats
        old_keys = [_key_of(turn) for turn in earlier.turns[old_head:]]
        new_keys = [_key_of(turn) for turn in new.turns[new_head:]]
        operations = aligned(old_keys, new_keys)
        if self._is_other(operations, old_head, new_head):
            place = _place(self._new.places, new_head, "messages")
            self.comparison.add(
                Difference(
                    "other_conversation",
                    place,
                    _place(self._earlier.places, old_head, "messages"),
                    turn=new_head,
                    can_undo=False,
                )
            )
            self._keep(new_head, len(new.turns))
            self.comparison.extends = False
            return
        for kind, start, end, new_start, new_end in operations:
            is_last = end == len(old_keys)
            self._operation(
                kind, start + old_head, end + old_head, new_start + new_head, new_end + new_head, is_last
            )

    def _operation(
        self, kind: str, start: int, end: int, new_start: int, new_end: int, is_last: bool
    ) -> None:
        num, num_new = end - start, new_end - new_start
        if kind == "equal":
            for index in range(num):
                self._pair(start + index, new_start + index, "message_changed")
        elif kind == "insert" and is_last:
            self._keep(new_start, new_end)
        elif kind == "insert":
            self._block("message_inserted", start, end, new_start, new_end)
        elif kind == "delete" and is_last:
            self.comparison.extends = False
        elif kind == "delete":
            self._block("messages_truncated", start, end, new_start, new_end)
        elif num == num_new or is_last:
            both = min(num, num_new)
            for index in range(both):
                self._pair(start + index, new_start + index, "message_changed")
            self._keep(new_start + both, new_end)
            self.comparison.extends &= num_new >= num
        else:
            cause: Cause = "messages_compacted" if num_new < num else "message_changed"
            self._block(cause, start, end, new_start, new_end)

    def _is_other(
        self, operations: Sequence[tuple[str, int, int, int, int]], old_head: int, new_head: int
    ) -> bool:
        """Whether no turn of the earlier conversation is left. A single turn may have been edited, if it is similar."""
        earlier, new = self._chats
        num = len(earlier.turns) - old_head
        if any(each[0] == "equal" for each in operations) or not num or new_head == len(new.turns):
            return False
        first, other = (
            text_of(turn.get("content")) for turn in (earlier.turns[old_head], new.turns[new_head])
        )
        start, earlier_end, _ = chars_of(first, other)
        shared = len(first) - (earlier_end - start)
        return num > 1 or not shared or 2 * shared < min(len(first), len(other))

    # ---- parts

    def _keep(self, start: int, end: int) -> None:
        turns = list(self._chats[1].turns[start:end])
        self.comparison._parts.append(lambda undone: turns)

    def _block(self, cause: Cause, start: int, end: int, new_start: int, new_end: int) -> None:
        old, new = list(self._chats[0].turns[start:end]), list(self._chats[1].turns[new_start:new_end])
        place = _place(self._new.places, new_start, "messages")
        index = self.comparison.add(
            Difference(
                cause,
                place,
                _place(self._earlier.places, start, "messages"),
                num=len(old),
                num_new=len(new),
                turn=new_start,
                part="system" if cause == "system_changed" else "messages",
            )
        )
        self.comparison._parts.append(lambda undone: old if index in undone else new)

    def _pair(self, index: int, new_index: int, cause: Cause) -> None:
        """Compare a turn with the one in its place."""
        earlier, new = self._chats[0].turns[index], self._chats[1].turns[new_index]
        if earlier == new and _key_of(earlier) == _key_of(new):
            self.comparison._parts.append(lambda undone: [new])
            return
        place = self._new.places[new_index]
        is_at_end = index == len(self._chats[0].turns) - 1
        pair = _Pair(
            self.comparison, earlier, new, self._versions(index, earlier), new_index, is_at_end=is_at_end
        )
        pair.add_differences(cause, place, self._earlier.places[index])
        self.comparison._parts.append(lambda undone: [pair.turn(undone)])

    def _versions(self, index: int, earlier: Turn) -> list[list[str]]:
        """Return the texts of the turn at this place in the requests before the earlier one and in that one."""
        found = list[list[str]]()
        for chat in self._history:
            if index < len(chat.turns) and chat.turns[index].get("role") == earlier.get("role"):
                found.append(_texts(chat.turns[index].get("content")))
            else:
                return []
        return found


def _num_head(turns: Sequence[Turn]) -> int:
    return next((at for at, turn in enumerate(turns) if turn.get("role") not in _SYSTEM), len(turns))


def _key_of(turn: Turn) -> str:
    """Return what a turn says, whether its content is one text or parts."""
    return json.dumps({**turn, "content": text_of(turn.get("content"))}, ensure_ascii=False)


def _texts(content: object) -> list[str]:
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    assert isinstance(content, list | tuple)
    return [part["text"] for part in content]


def _place(places: Sequence[str], index: int | None, otherwise: str) -> str:
    if index is None:
        return ""
    return places[index] if index < len(places) else otherwise


class _Pair:
    """Two turns in one place: their contents, their calls and the rest, each of which may differ."""

    def __init__(
        self,
        comparison: Comparison,
        earlier: Turn,
        new: Turn,
        versions: Sequence[Sequence[str]],
        index: int,
        *,
        is_at_end: bool,
    ) -> None:
        self._comparison, self._earlier, self._new, self._index = comparison, earlier, new, index
        self._versions, self._is_at_end = versions, is_at_end
        self._pieces: _Pieces | None = None
        self._whole: int | None = None
        self._rest: dict[str, int] = {}

    def add_differences(self, cause: Cause, place: str, earlier_place: str) -> None:
        """Add what differs to the comparison."""
        part: Part = "system" if cause == "system_changed" else "messages"
        self._add_content(cause, part, place, earlier_place)
        for name in sorted({*self._earlier, *self._new} - {"content"}):
            earlier, new = self._earlier.get(name), self._new.get(name)
            if json.dumps(earlier) == json.dumps(new):
                continue
            is_order = is_same_but_for_order(earlier, new)
            span = span_of(json.dumps(earlier, ensure_ascii=False), json.dumps(new, ensure_ascii=False))
            self._rest[name] = self._comparison.add(
                Difference(
                    "argument_keys_reordered" if is_order else cause,
                    f"{place}.{name}",
                    f"{earlier_place}.{name}",
                    span,
                    turn=self._index,
                    part=part,
                )
            )

    def _add_content(self, cause: Cause, part: Part, place: str, earlier_place: str) -> None:
        earlier, new = self._earlier.get("content"), self._new.get("content")
        if earlier == new:
            return
        texts, new_texts = _texts(earlier), _texts(new)
        text, new_text = "".join(texts), "".join(new_texts)
        is_stripped = (
            self._earlier.get("role") == "assistant"
            and without_thoughts(text) != text.strip()
            and without_thoughts(text) == new_text.strip()
        )
        if is_stripped or len(texts) != len(new_texts) or isinstance(earlier, str) != isinstance(new, str):
            found = Difference(
                "reasoning_stripped" if is_stripped else cause,
                place,
                earlier_place,
                span_of(text, new_text),
                turn=self._index,
                part=part,
                is_form=text == new_text,
            )
            self._whole = self._comparison.add(found)
            return
        self._pieces = _Pieces(self._comparison, texts, new_texts, self._versions, is_open=False)
        self._pieces.add_differences(
            lambda is_volatile, span, lines: Difference(
                "volatile_line" if is_volatile else cause,
                place,
                earlier_place,
                span,
                lines=lines,
                turn=self._index,
                part=part,
                is_at_end=self._is_at_end,
            )
        )

    def turn(self, undone: Undone) -> Turn:
        """Return the new turn with some differences undone."""
        turn = dict(self._new)
        for name, index in self._rest.items():
            if index in undone:
                turn.pop(name, None)
                turn |= {name: self._earlier[name]} if name in self._earlier else {}
        if self._whole in undone:
            turn["content"] = self._earlier.get("content")
        elif self._pieces is not None:
            texts = self._pieces.texts(undone)
            content = self._new["content"]
            is_text = isinstance(content, str)
            turn["content"] = (
                texts[0]
                if is_text
                else [{**part, "text": text} for part, text in zip(content, texts, strict=True)]
            )
        return turn


@dataclass(frozen=True, slots=True)
class _Piece:
    """Lines of both texts in one place. ``kind``: None if they are equal or what the new text adds."""

    kind: Literal["volatile", "edited"] | None
    earlier: tuple[str, ...]
    new: tuple[str, ...]
    starts: tuple[int, int]
    volatile: VolatileKind | None = None


class _Pieces:
    """Two lists of as many texts, cut in pieces of lines."""

    def __init__(
        self,
        comparison: Comparison,
        earlier: Sequence[str],
        new: Sequence[str],
        versions: Sequence[Sequence[str]],
        *,
        is_open: bool,
    ) -> None:
        """``versions``: all earlier texts in this place, oldest first. ``is_open``: the last one may go on."""
        self._comparison, self._earlier, self._new = comparison, "".join(earlier), "".join(new)
        self._pieces: list[list[_Piece]] = []
        self._indexes: dict[str, int] = {}
        starts = 0, 0
        for number, (old, text) in enumerate(zip(earlier, new, strict=True)):
            others = [each[number] if number < len(each) else "" for each in versions]
            pieces = list(_pieces_of(old, text, [*others, text], starts, is_open=is_open))
            self._pieces.append(pieces)
            starts = starts[0] + len(old.encode()), starts[1] + len(text.encode())

    def add_differences(
        self, make: Callable[[bool, Span | None, tuple[ChangedLine, ...]], Difference]
    ) -> None:
        """Add one difference for all volatile lines, if they aren't too many, and one for all other edits."""
        volatile = [each for pieces in self._pieces for each in pieces if each.kind == "volatile"]
        if len(volatile) > MAX_LINES:
            self._pieces = [
                [replace(each, kind=each.kind and "edited") for each in pieces] for pieces in self._pieces
            ]
            volatile = []
        edited = [each for pieces in self._pieces for each in pieces if each.kind == "edited"]
        lines = tuple(
            ChangedLine(each.volatile or "text", _span(each), each.earlier[0], each.new[0])
            for each in volatile
        )
        if lines:
            self._indexes["volatile"] = self._comparison.add(make(True, lines[0].span, lines))
        if edited:
            first, last = _span(edited[0]), _span(edited[-1])
            span = Span((first.earlier[0], last.earlier[1]), (first.new[0], last.new[1]))
            if not lines:
                span = span_of(self._earlier, self._new)
            self._indexes["edited"] = self._comparison.add(make(False, span, ()))

    def texts(self, undone: Undone) -> list[str]:
        """Return the new texts with some differences undone."""
        found = list[str]()
        for pieces in self._pieces:
            lines = list[str]()
            for each in pieces:
                is_undone = each.kind is not None and self._indexes[each.kind] in undone
                lines += each.earlier if is_undone else each.new
            found.append("\n".join(lines))
        return found


def _span(piece: _Piece) -> Span:
    earlier, new = "\n".join(piece.earlier), "\n".join(piece.new)
    found = span_of(earlier, new)
    start, new_start = piece.starts
    return Span(
        (found.earlier[0] + start, found.earlier[1] + start),
        (found.new[0] + new_start, found.new[1] + new_start),
    )


def _pieces_of(
    earlier: str, new: str, versions: Sequence[str], starts: tuple[int, int], *, is_open: bool
) -> Iterator[_Piece]:
    """Yield the pieces of two texts. ``starts``: the bytes before each."""
    old_lines, lines = earlier.split("\n"), new.split("\n")
    changing = _changing(versions, earlier)
    start, new_start = starts
    for kind, first, end, new_first, new_end in aligned(old_lines, lines):
        ours, theirs = lines[new_first:new_end], old_lines[first:end]
        is_last = is_open and end == len(old_lines)
        num = min(len(ours), len(theirs))
        pairs: list[tuple[Sequence[str], Sequence[str]]] = [(theirs, ours)]
        if kind == "replace" and (len(ours) == len(theirs) or is_last):
            pairs = [([old], [line]) for old, line in zip(theirs, ours, strict=False)]
            pairs += [(theirs[num:], ours[num:])] if len(ours) != len(theirs) else []
        number = first
        for old, line in pairs:
            volatile = None
            found: Literal["volatile", "edited"] | None = None if kind == "equal" else "edited"
            is_end = is_last and number + len(old) == len(old_lines)
            if is_end and (not old or (len(old) == 1 and bool(line) and line[0].startswith(old[0]))):
                found = None  # what the new text adds
            elif kind == "replace" and len(old) == len(line) == 1:
                volatile = volatile_kind(old[0], line[0])
                if volatile is None and number in changing and first == new_first:
                    volatile = kind_of_changing(old[0], line[0])
                found = "edited" if volatile is None else "volatile"
            yield _Piece(found, tuple(old), tuple(line), (start, new_start), volatile)
            start += sum(len(each.encode()) + 1 for each in old)
            new_start += sum(len(each.encode()) + 1 for each in line)
            number += len(old)


def _changing(versions: Sequence[str], earlier: str) -> frozenset[int]:
    """Return the numbers of the lines that differ in each version from the one before it, if others never do."""
    if len(versions) < 3:
        return frozenset()
    lines = [each.split("\n") for each in versions]
    num = len(earlier.split("\n"))
    if any(len(each) != num for each in lines):
        return frozenset()
    steps = list(pairwise(lines))
    always = {at for at in range(num) if all(one[at] != other[at] for one, other in steps)}
    never = any(all(one[at] == other[at] for one, other in steps) for at in range(num))
    return frozenset(always) if never else frozenset()
