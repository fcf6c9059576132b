"""Changed contents: what the requests would look like if a line were moved, or reasoning left out.

Each is rendered and compared as the given ones are, so that what a change saves is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from radixkv.service.explanations.bodies import Chat, Content, Ids, Request, num_common
from radixkv.service.explanations.differences import ChangedLine, Difference
from radixkv.service.explanations.lines import chars_of, without_thoughts
from radixkv.service.problems import ApiError
from radixkv.service.prompt_lines import LineRule, applied
from radixkv.tokenizer.protocol import Turn, text_of

_RULE_CHARS: Final = range(4, 257)
_MOST_LINE_CHARS: Final = 400
"""A longer line isn't moved as a whole: only its words that change are."""
_SYSTEM: Final = ("system", "developer")
_AT_END: Final = "Move the line to the end of the last message, behind all that stays the same"


@dataclass(frozen=True, slots=True)
class Moved:
    """Both contents with what changes behind the rest, and the sentence that says so."""

    earlier: Content
    new: Content
    change: str
    rules: tuple[LineRule, ...] = ()


def moves(difference: Difference, earlier: Content, new: Content) -> Iterator[Moved]:
    """Yield ways to move a volatile line, the best one first. None for lines that can't be moved."""
    lines = difference.lines
    if isinstance(earlier, str) and isinstance(new, str):
        changed = (
            _at_end(earlier, [each.earlier for each in lines]),
            _at_end(new, [each.new for each in lines]),
        )
        yield Moved(*changed, "Move the line to the end of the prompt, behind all that stays the same.")
        return
    if not isinstance(earlier, Chat) or not isinstance(new, Chat) or difference.part != "system":
        return
    rules = _rules(lines)
    if rules:
        told = f"{_AT_END}; or let the service do it, with the rules in --prompt-rules."
        yield Moved(_ruled(earlier, rules), _ruled(new, rules), told, rules)
    words = "Move what changes in the line to the end of the last message, behind all that stays the same."
    yield Moved(
        _words_moved(earlier, [(each.earlier, each.new) for each in lines]),
        _words_moved(new, [(each.new, each.earlier) for each in lines]),
        words,
    )


def kept(difference: Difference) -> str:
    """Return what to do about a volatile line that stays where it is."""
    if difference.part == "tools":
        return "Keep what changes out of the tools: put it at the end of the last message."
    if difference.is_at_end:
        return "Little: it is in the last message already. Send that back later with the line as it was."
    return "Send the line back as it was sent first, or put it into the last message alone and keep it there."


def _rules(lines: Sequence[ChangedLine]) -> tuple[LineRule, ...]:
    """Return rules of the service that move the lines; none if a line has no fixed beginning."""
    found = list[LineRule]()
    for number, each in enumerate(lines, 1):
        start, _, _ = chars_of(each.earlier, each.new)
        fixed = each.new[:start]
        while fixed and fixed[-1].isalnum():  # what changes may begin with the same characters
            fixed = fixed[:-1]
        while fixed and fixed[-1] in "-:/.+" and any(letter.isdigit() for letter in fixed[-5:]):
            fixed = fixed[:-1].rstrip("0123456789")
        fixed = fixed.rstrip(" ")
        is_short = max(len(each.earlier), len(each.new)) <= _MOST_LINE_CHARS
        if not is_short or len(fixed) not in _RULE_CHARS or not fixed.isprintable():
            return ()
        found.append(LineRule(f"volatile-{number}", fixed, "system", "all", "move"))
    return tuple(found)


def _ruled(chat: Chat, rules: Sequence[LineRule]) -> Chat:
    return Chat(applied(rules, chat.turns)[0], chat.tools)


def _words_moved(chat: Chat, lines: Sequence[tuple[str, str]]) -> Chat:
    """Return a chat in which the words that differ from another version of a line are at the end."""
    turns: list[dict[str, Any]] = [dict(turn) for turn in chat.turns]
    rules = list[LineRule]()
    for line, other in lines:
        start, end, _ = chars_of(line, other)
        while start and not line[start - 1].isspace():
            start -= 1
        while end < len(line) and not line[end].isspace():
            end += 1
        words = line[start:end]
        if not words:
            continue
        for turn in turns:
            if turn.get("role") in _SYSTEM and _replace_line(
                turn, line, f"{line[:start]}{line[end:]}", words
            ):
                rules.append(LineRule("words", words, "system", "first", "move"))
                break
    return _ruled(Chat(turns, chat.tools), rules)


def _replace_line(turn: dict[str, Any], line: str, rest: str, words: str) -> bool:
    """Put what is left of a line in its place, and its words in front of the text, from where a rule takes them."""

    def replaced(text: str) -> str | None:
        lines = text.split("\n")
        if line not in lines:
            return None
        lines[lines.index(line)] = rest
        return "\n".join([words, *lines])

    content = turn.get("content")
    if isinstance(content, str):
        text = replaced(content)
        turn |= {} if text is None else {"content": text}
        return text is not None
    parts = content or []
    for index, part in enumerate(parts):
        if (text := replaced(part["text"])) is not None:
            turn["content"] = [*parts[:index], {**part, "text": text}, *parts[index + 1 :]]
            return True
    return False


def _at_end(text: str, moved: Sequence[str]) -> str:
    lines = text.split("\n")
    for each in moved:
        if each in lines:
            lines.remove(each)
    return "\n".join([*lines, *moved])


# ---- reasoning, templates, borders


def has_thoughts(turn: Turn) -> bool:
    """Whether an answer has its reasoning."""
    text = text_of(turn.get("content"))
    return without_thoughts(text) != text.strip()


def without_reasoning(chat: Content) -> Content:
    """Return a conversation whose answers have no reasoning."""
    if not isinstance(chat, Chat):
        return chat
    turns = [
        {**turn, "content": without_thoughts(text_of(turn.get("content")))}
        if turn.get("role") == "assistant" and has_thoughts(turn)
        else turn
        for turn in chat.turns
    ]
    return Chat(turns, chat.tools)


def turn_at(
    chat: Chat,
    ids: Ids,
    offset: int,
    render: Callable[[Content], Ids | None],
) -> int | None:
    """Return the index of the turn that has a token; None if what follows the turns has it. O(log n) renderings."""
    turns, tools = chat.turns, chat.tools

    def reaches(given: Sequence[Turn]) -> bool:
        found = render(Chat(given, tools))
        return found is not None and num_common(found, ids) > offset

    last = {**turns[-1], "content": text_of(turns[-1].get("content")) + "x"}
    if not reaches([*turns[:-1], last]):
        return None
    low, high = 0, len(turns)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(turns[:middle]) else (middle, high)
    return high - 1


def num_at_boundary(earlier: Request, ids: Ids, current: Ids, common: int) -> int:
    """Return the tokens that are found if the earlier text ends at its last stable boundary, or else what is found."""
    if not isinstance(earlier.content, str):
        return common
    stable = len(earlier.rendering.tokenizer.stable_prefix(earlier.content)[0])
    return max(common, min(stable, len(ids), len(current)))


def num_of_beginning(request: Request) -> int:
    """Return with how many tokens a request begins whatever its last message says."""
    content = request.content
    if not isinstance(content, Chat):
        return 0
    other = Chat([*content.turns[:-1], {**content.turns[-1], "content": "x"}], content.tools)
    try:
        ids = request.rendering.ids(other)
    except ApiError:
        return 0
    return num_common(ids, request.ids)
