"""Turns a conversation into token ids.

There are three kinds of ``Chat``:

- ``MarkerChat``, of the shipped tokenizer: ``<s>``, then for each message the id of its role, its content and the
  id of ``<|end|>``. The generation prompt is the id of the assistant's role.
- ``TemplateChat``: a model's chat template, rendered and encoded as transformers does (``templates``).
- ``PlainChat``, for a model without a template: a message is ``role: content`` and a newline. Further lines of the
  content are indented by two spaces, so that none of them can look like the line of a role. The generation prompt
  is ``assistant:``.

**Roles can't be forged.** Some tokens separate the messages of a conversation. Only the chat writes them: what a
message holds is encoded as ordinary text, also where it spells such a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from radixkv.errors import ArgumentError
from radixkv.tokenizer import templates
from radixkv.tokenizer.control import Control
from radixkv.tokenizer.protocol import Message, Tool, Turn, check_messages, check_text, text_of, to_json
from radixkv.tokenizer.templates import Rendered, Template

_CONTINUATIONS: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("assistant",),
    ("system",),
    ("tool",),
    ("user", "assistant"),
    ("assistant", "user"),
)
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles of every template. Others may not be a part of a control string."""


_TOOLS_BEGIN = "You may call these functions:"
_TOOLS_END = (
    "To call one, answer with its name and arguments as JSON:\n<tool_call>\n"
    '{"name": "NAME", "arguments": {}}\n</tool_call>'
)


class RenderingTooLong(ArgumentError):
    """The chat template needs more time, memory or text than it may for a conversation."""


class NotRendered(Exception):
    """This tokenizer renders no chat template: its caller must not be blocked."""


class Codec(Protocol):
    """Encodes texts for a chat."""

    def plain_ids(self, text: str) -> list[int]:
        """Return the ids of a text without leading ones, in which nothing is a control token."""
        ...

    def rendered_ids(self, rendered: Rendered) -> list[int]:
        """Return the ids of a rendered conversation."""
        ...

    def stable_cut(self, text: str) -> int:
        """Return the position of the text's last stable boundary; 0 if it has none."""
        ...

    @property
    def leading(self) -> list[int]:
        """The ids before every text."""
        ...


class Chat(Protocol):
    """Turns conversations into ids."""

    @property
    def roles(self) -> tuple[str, ...] | None:
        """The allowed roles; None if only the template knows them."""
        ...

    @property
    def forgeable(self) -> str | None:
        """Why a message can look like several messages to the model; None if none can."""
        ...

    @property
    def uses_clock(self) -> bool:
        """Whether ids may depend on the time."""
        ...

    def ids(
        self, codec: Codec, turns: Sequence[Turn], tools: Sequence[Tool], opens: bool, now: str | None = None
    ) -> list[int]:
        """Return the ids of a conversation, with the opening of the assistant's answer if ``opens``."""
        ...

    def stable(
        self, codec: Codec, messages: Sequence[Message], now: str | None = None
    ) -> tuple[list[int], int]:
        """Return the ids with which every continuation begins, and the number of ids after them.

        ``now``: every continuation that is rendered on this day; None: on whichever day.
        """
        ...


class MarkerChat:
    """Roles and ends are single ids of the vocabulary."""

    forgeable = None
    uses_clock = False

    def __init__(self, bos_id: int, role_ids: Mapping[str, int], end_id: int) -> None:
        self._bos_id, self._role_ids, self._end_id = bos_id, role_ids, end_id
        self.roles = tuple(sorted(role_ids))

    def ids(
        self, codec: Codec, turns: Sequence[Turn], tools: Sequence[Tool], opens: bool, now: str | None = None
    ) -> list[int]:
        messages = with_tools_as_text(turns, tools)
        check_messages(messages, self._role_ids)
        found = [self._bos_id]
        for message in messages:
            found += [self._role_ids[message["role"]], *codec.plain_ids(message["content"]), self._end_id]
        return [*found, self._role_ids["assistant"]] if opens else found

    def stable(
        self, codec: Codec, messages: Sequence[Message], now: str | None = None
    ) -> tuple[list[int], int]:
        return self.ids(codec, messages, (), False), 0


class UnrenderedChat:
    """Stands for a chat that blocks: every conversation raises NotRendered."""

    def __init__(self, chat: Chat) -> None:
        self.roles, self.forgeable, self.uses_clock = chat.roles, chat.forgeable, chat.uses_clock

    def ids(
        self, codec: Codec, turns: Sequence[Turn], tools: Sequence[Tool], opens: bool, now: str | None = None
    ) -> list[int]:
        raise NotRendered

    def stable(
        self, codec: Codec, messages: Sequence[Message], now: str | None = None
    ) -> tuple[list[int], int]:
        raise NotRendered


class PlainChat:
    """Roles are words at the start of a line."""

    roles = None
    forgeable = None
    uses_clock = False

    def ids(
        self, codec: Codec, turns: Sequence[Turn], tools: Sequence[Tool], opens: bool, now: str | None = None
    ) -> list[int]:
        return codec.leading + codec.plain_ids(self._text(with_tools_as_text(turns, tools), opens))

    def stable(
        self, codec: Codec, messages: Sequence[Message], now: str | None = None
    ) -> tuple[list[int], int]:
        text = self._text(with_tools_as_text(messages, ()), False)
        whole = codec.plain_ids(text)
        ids = codec.plain_ids(text[: codec.stable_cut(text)])
        if not ids or whole[: len(ids)] != ids:
            return [], len(codec.leading) + len(whole)
        return codec.leading + ids, len(whole) - len(ids)

    def _text(self, messages: Sequence[Message], opens: bool) -> str:
        check_messages(messages)
        for index, message in enumerate(messages):
            if not message["role"].isidentifier():
                raise ArgumentError(f"messages[{index}].role", message["role"], "a word")
        turns = [f"{message['role']}: {self._indented(message['content'])}\n" for message in messages]
        return "".join(turns) + ("assistant:" if opens else "")

    @staticmethod
    def _indented(content: str) -> str:
        return "".join(
            line if not number else f"  {line}" for number, line in enumerate(content.splitlines(True))
        )


class TemplateChat:
    """A model's chat template. ``control``: what only the template may write."""

    roles = None

    def __init__(self, template: Template, control: Control) -> None:
        self._template, self._control, self._guard = template, control, control.guard
        self._takes_parts = self._renders_alike([{"type": "text", "text": "Qx7 w"}], "Qx7 w")
        self._wants_parts = self._takes_parts is False and self._needs_parts()
        self.forgeable = self._why_forgeable()
        sources = template.source.values() if isinstance(template.source, Mapping) else [template.source]
        self.uses_clock = any("strftime_now" in source for source in sources)

    def ids(
        self, codec: Codec, turns: Sequence[Turn], tools: Sequence[Tool], opens: bool, now: str | None = None
    ) -> list[int]:
        return codec.rendered_ids(self._rendered(turns, tools, opens, now))

    def stable(
        self, codec: Codec, messages: Sequence[Message], now: str | None = None
    ) -> tuple[list[int], int]:
        """A template may write a message differently once it isn't the last, for example without its reasoning.

        So the conversation is rendered with several continuations. Those that the template refuses don't count. The
        text that all have in common is cut beside its last control token, or at a later stable boundary.
        """
        other = _OTHER_DAY if now is None else at_other_time(now)
        now = now or datetime.now().isoformat()
        base = self._rendered(messages, (), False, now)
        grown = [base.text]
        for more in ((), *_CONTINUATIONS):
            try:
                turns = [*messages, *({"role": role, "content": "x"} for role in more)]
                grown.append(self._rendered(turns, (), not more, now).text)
            except RenderingTooLong:
                raise
            except ArgumentError:
                continue
        if self.uses_clock:
            grown.append(self._rendered(messages, (), False, other).text)
        common = _common_prefix(grown)
        whole = codec.rendered_ids(base)
        cuts = {
            codec.stable_cut(common),
            self._control.last_end(common, base.typed),
            self._control.common_start(grown, len(common)),
        }
        for cut in sorted(cuts - {0}, reverse=True):
            typed = [at for at in base.typed if at < cut]
            ids = codec.rendered_ids(Rendered(base.text[:cut], typed))
            if whole[: len(ids)] == ids:
                return ids, len(whole) - len(ids)
        return [], len(whole)

    def _rendered(
        self, turns: Sequence[Turn], tools: Sequence[Tool], opens: bool, now: str | None
    ) -> Rendered:
        check_messages(turns, has_parts=True)
        self._check_roles(turns)
        if not self._takes_parts:
            turns = [self._shaped(turn) for turn in turns]
        roles = [turn["role"] for turn in turns]
        try:
            rendered = self._tried(turns, tools, opens, now)
        except templates.Refused as error:
            raise ArgumentError(
                "messages", roles, f"a chat that the model's template allows: {error}"
            ) from None
        except templates.Failed as error:
            raise ArgumentError(
                "messages", roles, f"a chat that the model's template can render; it failed with {error}"
            ) from None
        except templates.TooLong as error:
            raise RenderingTooLong(
                "messages", len(turns), f"a conversation that can be rendered: {error}"
            ) from None
        check_text(rendered.text)
        return rendered

    def _tried(self, turns: Sequence[Turn], tools: Sequence[Tool], opens: bool, now: str | None) -> Rendered:
        """Render. If the template fails on parts, or on an answer without content, each content is one text."""
        try:
            return templates.render(self._template, self._guard, turns, tools, opens, now)
        except templates.Failed:
            if self._wants_parts or all(isinstance(turn.get("content"), str) for turn in turns):
                raise
            texts = [{**turn, "content": text_of(turn.get("content"))} for turn in turns]
            return templates.render(self._template, self._guard, texts, tools, opens, now)

    def _shaped(self, turn: Turn) -> Turn:
        """Return a turn with its content as the template wants it."""
        content = turn.get("content")
        if self._wants_parts:
            return (
                {**turn, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else turn
            )
        return {**turn, "content": text_of(content)} if isinstance(content, list | tuple) else turn

    def _check_roles(self, turns: Sequence[Turn]) -> None:
        """Refuse a role that could complete a control string (``'<|' + role + '|>'``)."""
        for index, role in enumerate(turn["role"] for turn in turns):
            if role not in _ROLES and any(role in each for each in self._control.strings):
                allowed = f"a role that is no part of a control token, such as {', '.join(sorted(_ROLES))}"
                raise ArgumentError(f"messages[{index}].role", role, allowed)

    # ---- what the template does, by trying

    def _try(self, turns: Sequence[Turn], opens: bool = False) -> str | None:
        try:
            return templates.render(self._template, self._guard, turns, (), opens).text
        except (templates.Refused, templates.Failed, templates.TooLong):
            return None

    def _renders_alike(self, parts: Sequence[Mapping[str, str]], text: str) -> bool:
        """Whether a content as parts is rendered as one text is."""
        as_text, as_parts = (self._try([{"role": "user", "content": each}]) for each in (text, parts))
        return as_text is not None and as_text == as_parts

    def _needs_parts(self) -> bool:
        """Whether only contents as parts are shown to the model."""
        text = "Qx7 w"
        as_parts = self._try([{"role": "user", "content": [{"type": "text", "text": text}]}])
        as_text = self._try([{"role": "user", "content": text}])
        shows = as_parts is not None and text in as_parts and "'type'" not in as_parts
        return shows and (as_text is None or text not in as_text)

    def _why_forgeable(self) -> str | None:
        asked, answered, again = "Qx7 asks", "Zk4 answers", "Vj9 asks"
        chat = [("user", asked), ("assistant", answered), ("user", again)]
        turns = [self._shaped({"role": role, "content": text}) for role, text in chat]
        for first in ([], [{"role": "system", "content": "Wn2 rules"}]):
            text = self._try([*first, *turns])
            if text is not None:
                break
        if text is None:
            return (
                "the chat template renders no chat of user, assistant and user, so nothing shows how it does"
            )
        places = [text.find(each) for each in (asked, answered, again)]
        if -1 in places or places != sorted(places):
            return "the chat template doesn't show the messages of a chat one after the other"
        for (_, content), start, end in zip(chat, places, places[1:], strict=False):
            shown = text[start + len(content) : end]
            if not self._control.find.search(shown):
                return f"the chat template separates messages by text that anybody can type: {shown!r}"
        return self._control.untypable


def _common_prefix(texts: Sequence[str]) -> str:
    """Return the characters with which all texts begin."""
    first, last = min(texts), max(texts)  # between these two lie all others
    low, high = 0, min(len(first), len(last))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == last[:middle] else (low, middle - 1)
    return first[:low]


_OTHER_DAY = "2001-02-03T04:05:06"


def at_other_time(now: str) -> str:
    """Return another time of the same day, with another hour, minute and second."""
    at = datetime.fromisoformat(now)
    return at.replace(hour=23 - at.hour, minute=59 - at.minute, second=59 - at.second).isoformat()


def with_tools_as_text(turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Message]:
    """Return messages of system, user and assistant alone, for a model whose chat has no form for tools.

    Tools are listed in the system message. Calls and results are written between tags, as the models of the Hermes
    family and Qwen do; results are the user's.
    """
    check_messages(turns, has_parts=True)
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
    content = text_of(turn.get("content"))
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{to_json(call['function'])}\n</tool_call>" for call in turn.get("tool_calls") or ()
    ]
    return {
        "role": turn["role"],
        "content": "\n".join([*([content] if content or not calls else []), *calls]),
    }
