"""What the process of ``templates`` does: it renders chat templates with transformers' own function.

    question ─▶ transformers: text ───────────────────────────▶ answer: text, and where callers typed control strings
             └▶ guarded template with disarmed values: the same text, whose control strings say where they are from

**Who wrote a control string?** A template is a program, so its output doesn't say which parts a caller typed. Therefore
a conversation whose values could hold a control string is rendered a second time, with these differences:

- In the callers' strings, each character that begins a control string is *disarmed*: written as a mark and a number.
  The mark is a run of digits that occurs nowhere else; digits pass through JSON, changes of case and trimming.
- Strings that the template itself looks for in contents (``content.split('</think>')``) stay as they are, or it would
  do something else. Instead, those of them that the *template* writes are written as a mark and a number.

When marks are replaced again, this text must equal the first one. Then each control string in it has a known writer. If
it differs, the template does something else with disarmed strings. Then the text of the second rendering is used, in
which nothing that a caller typed can be a control token.

Nothing here is imported by the process that asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

import jinja2
from jinja2 import nodes
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

_MAX_COMPILED: Final = 8
_DIGITS: Final = 18
_WRITTEN: Final = "radixkv_written_"
"""The beginning of the variables that stand for strings in a guarded template."""


class _Clock(datetime):
    """The clock of templates: ``at`` if it is set."""

    at: datetime | None = None

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls.at if cls.at is not None else datetime.now(tz)


def prepare() -> None:
    """Give templates a clock that can be set."""
    chat_template_utils.datetime = _Clock  # type: ignore[attr-defined]


class _Folder:
    """As much of a tokenizer as transformers' function needs."""

    chat_control_tokens = None
    apply_chat_template: Any = PreTrainedTokenizerBase.apply_chat_template
    get_chat_template: Any = PreTrainedTokenizerBase.get_chat_template

    def __init__(self, chat_template: Any, variables: Mapping[str, Any]) -> None:
        self.chat_template, self.special_tokens_map = chat_template, dict(variables)


def analyse(question: Mapping[str, Any]) -> dict[str, Any]:
    """Compile templates. Return the strings that they may write, and those that they look for; or a syntax error."""
    given = question["template"]
    written: set[str] = set()
    searched: set[str] = set()
    for source in given.values() if isinstance(given, dict) else [given]:
        try:
            tree = _environment(source).parse(source)
        except jinja2.TemplateSyntaxError as error:
            return {"syntax": str(error)}
        for text, is_written in _strings(tree):
            (written if is_written else searched).add(text)
    return {"written": sorted(written), "searched": sorted(searched)}


def render(question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer with ``text`` and ``typed`` (positions in it), or with ``refused`` or ``failed``."""
    _Clock.at = None if question["now"] is None else datetime.fromisoformat(question["now"])
    folder = _Folder(question["template"], question["variables"])
    messages, tools, opens = question["messages"], question["tools"], question["add_generation_prompt"]
    try:
        text = folder.apply_chat_template(messages, tools=tools, add_generation_prompt=opens, tokenize=False)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 a template may raise anything
        if type(error) is jinja2.TemplateError:
            return {"refused": str(error)}
        return {"failed": f"{type(error).__name__}: {error}"}
    if question["guard"] is None:
        return {"text": text, "typed": []}
    mark = _unused_digits(json.dumps((text, messages, tools)))
    found = _guarded(folder, question, mark, text)
    if found is None:
        return {"failed": "it cannot be told which control tokens of the text the caller typed"}
    return {"text": found[0], "typed": found[1]}


def _guarded(
    folder: _Folder, question: Mapping[str, Any], mark: str, text: str
) -> tuple[str, list[int]] | None:
    """Return the text to use, and the positions in it at which a caller typed what begins a control string.

    None if no rendering tells them apart.
    """
    guard, last = question["guard"], None
    source = folder.get_chat_template(None, question["tools"])
    for left, replaced in ((guard["searched"], guard["replaced"]), ([], [])):
        try:
            rendered = _render_guarded(folder, source, replaced, question, _Disarm(guard, left, mark), mark)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 the template fails where strings are disarmed
            continue
        restored, typed = _restored(rendered, mark, guard, replaced)
        if mark in restored:
            continue
        if restored == text:
            return text, typed
        if not left:
            last = restored, typed
    return last


def _render_guarded(
    folder: _Folder,
    source: str,
    replaced: list[str],
    question: Mapping[str, Any],
    disarm: _Disarm,
    mark: str,
) -> str:
    """Render the guarded template with disarmed values, as transformers renders the original one."""
    original = chat_template_utils._compile_jinja_template
    compiled = _compiled_guarded(source, tuple(replaced))
    written = {f"{_WRITTEN}{at}": f"{mark}1{at:03d}" for at in range(len(replaced))}
    module: Any = chat_template_utils
    module._compile_jinja_template = lambda _: compiled
    try:
        rendered: str = folder.apply_chat_template(
            disarm(question["messages"]),
            tools=disarm(question["tools"]),
            add_generation_prompt=question["add_generation_prompt"],
            tokenize=False,
            **written,
        )
        return rendered
    finally:
        module._compile_jinja_template = original


class _Disarm:
    """Writes what may begin a control string in a JSON value as a mark and a number. ``left``: stays as it is."""

    def __init__(self, guard: Mapping[str, Any], left: list[str], mark: str) -> None:
        self._first, self._mark = guard["first"], mark
        longest_first = sorted(left, key=len, reverse=True)
        longer = [
            each
            for each in guard["control"]
            if any(each.startswith(other) and each != other for other in left)
        ]
        whole = "|".join(f"(?={re.escape(each)})" for each in longer) or "(?!)"
        stay = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._find = re.compile(f"(?:{whole}).|(?P<stay>{stay})|[{re.escape(self._first)}]", re.DOTALL)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._find.sub(self._written, value)
        if isinstance(value, dict):
            return {self(name): self(each) for name, each in value.items()}
        return [self(each) for each in value] if isinstance(value, list) else value

    def _written(self, found: re.Match[str]) -> str:
        if found["stay"] is not None:
            return found[0]
        return f"{self._mark}0{self._first.index(found[0]):03d}"


def _restored(
    rendered: str, mark: str, guard: Mapping[str, Any], replaced: list[str]
) -> tuple[str, list[int]]:
    """Replace marks by what they stand for. Also return the positions of what a caller typed."""
    either = "|".join(map(re.escape, sorted(replaced, key=len, reverse=True))) or "(?!)"
    parts: list[str] = []
    typed: list[int] = []
    size = end = 0
    for found in re.finditer(f"{mark}([01])([0-9]{{3}})|(?:{either})", rendered):
        before = rendered[end : found.start()]
        size, end = size + len(before), found.end()
        parts.append(before)
        if found[1] is None:  # the caller's, since the template's is a mark
            part = found[0]
            typed.append(size)
        elif found[1] == "0":
            part = guard["first"][int(found[2])]
            typed.append(size)
        else:
            part = replaced[int(found[2])]
        parts.append(part)
        size += len(part)
    return "".join([*parts, rendered[end:]]), typed


def _unused_digits(text: str) -> str:
    """Return digits that a text doesn't contain. They are drawn from its hash, so that nobody can foresee them."""
    drawn = text
    while True:
        drawn = sha256(drawn.encode("utf-8", errors="surrogatepass")).hexdigest()
        digits = str(int(drawn, 16))[:_DIGITS]
        if digits not in text:
            return digits


# ---- templates


def _environment(source: str) -> jinja2.Environment:
    """Return the environment in which transformers compiles a template."""
    environment: jinja2.Environment = chat_template_utils._compile_jinja_template(source).environment
    return environment


@lru_cache(_MAX_COMPILED)
def _compiled_guarded(source: str, replaced: tuple[str, ...]) -> jinja2.Template:
    """Compile a template that writes variables in the places of these strings."""
    environment = _environment(source)
    tree = environment.parse(source)
    if replaced:
        pattern = re.compile("|".join(map(re.escape, sorted(replaced, key=len, reverse=True))))
        numbers = {each: at for at, each in enumerate(replaced)}
        _replace(tree, pattern, numbers)
    return environment.from_string(tree)


def _replace(tree: nodes.Node, pattern: re.Pattern[str], numbers: Mapping[str, int]) -> None:
    """Replace in a tree the strings that it writes."""
    for parent, name, at, node in list(_places(tree)):
        text = node.data if isinstance(node, nodes.TemplateData) else node.value
        if not isinstance(text, str) or not pattern.search(text):
            continue
        pieces: list[nodes.Expr] = []
        end = 0
        for found in pattern.finditer(text):
            if found.start() > end:
                pieces.append(nodes.Const(text[end : found.start()], lineno=node.lineno))
            pieces.append(nodes.Name(f"{_WRITTEN}{numbers[found[0]]}", "load", lineno=node.lineno))
            end = found.end()
        if end < len(text):
            pieces.append(nodes.Const(text[end:], lineno=node.lineno))
        whole = nodes.Concat(pieces, lineno=node.lineno)
        assert tree.environment is not None
        whole.set_environment(tree.environment)
        if at is None:
            setattr(parent, name, whole)
        else:
            getattr(parent, name)[at] = whole


def _strings(tree: nodes.Node) -> Iterator[tuple[str, bool]]:
    """Yield the strings of a template, and whether it writes them or looks for them."""
    written = {id(node) for _, _, _, node in _places(tree)}
    for data in tree.find_all(nodes.TemplateData):
        yield data.data, id(data) in written
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value, id(constant) in written


def _places(node: nodes.Node) -> Iterator[tuple[nodes.Node, str, int | None, Any]]:
    """Yield ``(parent, field, index, node)`` for each string that is written or kept, not compared or looked for."""
    searching = _searching_fields(node)
    for name, value in node.iter_fields():
        if name in searching:
            continue
        for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, nodes.TemplateData | nodes.Const):
                yield node, name, at, child
            elif isinstance(child, nodes.Node):
                yield from _places(child)


def _searching_fields(node: nodes.Node) -> frozenset[str]:
    """Return the fields of a node whose strings decide something, and are not written."""
    if isinstance(node, nodes.Compare):
        return frozenset({"expr", "ops"})
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        is_namespace_or_join = node.node.attr in ("join", "append", "format")
        return frozenset() if is_namespace_or_join else frozenset({"args", "kwargs"})
    if isinstance(node, nodes.Filter):
        return frozenset() if node.name in ("join", "default", "d") else frozenset({"args", "kwargs"})
    if isinstance(node, nodes.Test):
        return frozenset({"node", "args", "kwargs"})
    if isinstance(node, nodes.If | nodes.CondExpr):
        return frozenset({"test"})
    if isinstance(node, nodes.Getitem):
        return frozenset({"arg"})
    return frozenset({"key"}) if isinstance(node, nodes.Pair) else frozenset()
