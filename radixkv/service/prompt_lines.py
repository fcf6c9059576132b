"""Rules for lines of a prompt that change from request to request, written by the operator.

A line that changes at the beginning of a prompt leaves nothing of it to share. Some clients write lines that aren't
meant for the model at all, such as a checksum for billing. A rule drops such a line, or moves it behind the rest.

    {"claude-code-billing": false,
     "clock": {"starts_with": "Current time:", "lines": "all", "do": "move"}}

A rule is applied to the turns of a conversation before they are rendered, wherever they come from. So the model, the
cache, a warm and a lookup see the same ids. A prompt given as text or as ids isn't a conversation: it stays as it is.

A line is compared with a fixed text, never with a pattern. So a rule costs O(characters), whatever a client sends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from radixkv.errors import ConfigError

Role = Literal["system", "user"]
Lines = Literal["first", "all"]
Action = Literal["drop", "move"]

MAX_BYTES: Final = 2**16
MAX_RULES: Final = 64
_TEXT_CHARS: Final = range(4, 257)
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_ROLES: Final[Mapping[str, frozenset[str]]] = {
    "system": frozenset({"system", "developer"}),
    "user": frozenset({"user"}),
}
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "role": get_args(Role),
    "lines": get_args(Lines),
    "do": get_args(Action),
}
_FIELDS: Final = ("starts_with", *_CHOICES)


@dataclass(frozen=True, slots=True)
class LineRule:
    """One rule.

    - ``starts_with``: the text with which the line begins, upper and lower case being different.
    - ``role``: whose turns are looked through; the system's include the developer's.
    - ``lines``: the first one of each block of text, or all.
    - ``do``: drop the line, or move it to the end of the user's last turn.
    """

    name: str
    starts_with: str
    role: Role = "system"
    lines: Lines = "first"
    do: Action = "drop"


DEFAULT_RULES: Final = (LineRule("claude-code-billing", "x-anthropic-billing-header:"),)
"""Claude Code begins its system prompt with a line for billing, which has a checksum of the first question."""


def load(setting: str, path: Path) -> tuple[LineRule, ...]:
    """Return the default rules and those of a file.

    The file may replace a default rule, or switch it off: its value is ``false``. Raises ConfigError.
    """

    def refused(value: object, allowed: str) -> ConfigError:
        return ConfigError(setting, value, f"{allowed} (in {path})")

    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise refused(len(raw), f"a file of at most {MAX_BYTES} bytes")
        found = json.loads(raw, object_pairs_hook=_without_twins)
    except (OSError, ValueError, RecursionError) as error:
        raise refused(str(error), "a file with one JSON object of rules by name") from None
    if not isinstance(found, dict) or len(found) > MAX_RULES:
        raise refused(type(found).__name__, f"one JSON object of at most {MAX_RULES} rules by name")
    rules = {each.name: each for each in DEFAULT_RULES}
    for name, given in found.items():
        if not _NAME.fullmatch(name):
            raise refused(name, "names of 1 to 64 small letters, digits, dashes and underscores")
        if given is False:
            if rules.pop(name, None) is None:
                raise refused(name, "false only for " + ", ".join(each.name for each in DEFAULT_RULES))
        else:
            rules[name] = _rule(name, given, refused)
    return tuple(rules.values())


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


def _rule(name: str, given: object, refused: Any) -> LineRule:
    if not isinstance(given, dict) or not set(given) <= set(_FIELDS):
        raise refused(given, f"for {name} false, or an object with fields of {', '.join(_FIELDS)}")
    text = given.get("starts_with")
    if not isinstance(text, str) or len(text) not in _TEXT_CHARS or "\n" in text or not text.isprintable():
        allowed = f"{_TEXT_CHARS[0]} to {_TEXT_CHARS[-1]} printable characters of one line"
        raise refused(text, f"for {name}.starts_with {allowed}")
    for field, choices in _CHOICES.items():
        if given.get(field, choices[0]) not in choices:
            raise refused(given[field], f"for {name}.{field} one of {', '.join(choices)}")
    rule = LineRule(name, **given)
    if (rule.role, rule.do) == ("user", "move"):
        raise refused("move", f"for {name}.do drop, because its role is user")
    return rule


def applied(
    rules: Sequence[LineRule], turns: Sequence[Mapping[str, Any]], *, is_beginning: bool = False
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the turns as the model reads them, and the names of the rules that changed them. O(characters).

    ``is_beginning``: other turns follow, so that what a rule moves comes later. A conversation of which nothing would
    be left stays as it is.
    """
    found: list[dict[str, Any]] = [dict(turn) for turn in turns]
    used, moved = list[str](), list[str]()
    for rule in rules:
        left, is_used = list[dict[str, Any]](), False
        for turn in found:
            is_meant = turn.get("role") in _ROLES[rule.role]
            content, lines = _without(rule, turn.get("content")) if is_meant else (None, [])
            if not lines:
                left.append(turn)
                continue
            is_used = True
            if content:
                left.append({**turn, "content": content})
            if rule.do == "move":
                moved += lines
        found = left
        used += [rule.name] if is_used else []
    if not found:
        return [dict(turn) for turn in turns], ()
    if moved and not is_beginning:
        _append(found, "\n".join(moved))
    return found, tuple(used)


def _without(rule: LineRule, content: Any) -> tuple[Any, list[str]]:
    """Return a content without the lines of a rule, and these lines."""
    if isinstance(content, str):
        return _lines_without(rule, content)
    if not isinstance(content, list):
        return content, []
    parts, taken = list[Any](), list[str]()
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        rest, lines = _lines_without(rule, text) if isinstance(text, str) else ("", [])
        taken += lines
        if not lines:
            parts.append(part)
        elif rest:
            parts.append({**part, "text": rest})
    return parts, taken


def _lines_without(rule: LineRule, text: str) -> tuple[str, list[str]]:
    if rule.lines == "first":
        if not text.startswith(rule.starts_with):
            return text, []
        line, _, rest = text.partition("\n")
        return rest, [line]
    if rule.starts_with not in text:
        return text, []
    lines = text.split("\n")
    taken = [line for line in lines if line.startswith(rule.starts_with)]
    return "\n".join(line for line in lines if not line.startswith(rule.starts_with)), taken


def _append(turns: list[dict[str, Any]], text: str) -> None:
    """Append a text to the user's last turn, or to the last turn if the user has none."""
    last = next((at for at in range(len(turns) - 1, -1, -1) if turns[at].get("role") == "user"), -1)
    content = turns[last].get("content")
    if isinstance(content, list):
        turns[last] = {**turns[last], "content": [*content, {"type": "text", "text": f"\n{text}"}]}
    else:
        turns[last] = {**turns[last], "content": f"{content or ''}\n{text}"}


def of_documents(rules: Sequence[Mapping[str, Any]]) -> tuple[LineRule, ...]:
    """Return rules from their fields, as ``dataclasses.asdict`` writes them."""
    return tuple(replace(LineRule("", ""), **rule) for rule in rules)
