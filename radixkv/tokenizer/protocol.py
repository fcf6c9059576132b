"""The protocol of a tokenizer, and what all tokenizers share.

**Stable boundaries.** A cached prefix is found again only if a longer text that begins with it gets the same
leading ids. After a cut at an arbitrary place it often doesn't, because a token may span the cut. A boundary is
*stable* if no continuation changes the ids before it. ``stable_prefix`` returns the ids up to the last stable
boundary, and how many tokens that leaves out. Each implementation's docstring says which boundaries it uses and
why.

**Roles can't be forged.** The markers between the messages of a conversation are ids that ``encode_messages``
inserts. The same marker typed inside a message is encoded as ordinary text. Some models separate messages by text
alone, so this can't be done for them: ``forgeable`` says so.

**Equal to transformers.** A model's folder gives the ids that ``transformers.AutoTokenizer`` gives: ``encode`` those of
its ``encode``, ``encode_messages`` and ``encode_chat`` those of its ``apply_chat_template``. The one exception is a
marker typed inside a message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from radixkv.errors import ArgumentError

ROLE_PIECES: Mapping[str, str] = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
"""Role -> the control symbol that opens its messages, in the shipped tokenizer."""

END_PIECE = "<|end|>"
"""The control symbol that closes a message, in the shipped tokenizer."""

Message = Mapping[str, str]
"""A message of a conversation: ``{"role": …, "content": …}``."""


Turn = Mapping[str, Any]
"""A message whose content may be a list of parts (``{"type": "text", "text": …}``), and that may have ``tool_calls``
(each ``{"id", "type", "function": {"name", "arguments": {…}}}``), a
``tool_call_id`` or a ``name``: the form that chat templates take."""

Tool = Mapping[str, Any]
"""A tool that the model may call: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


class Tokenizer(Protocol):
    """Text to token ids and back. Immutable; several threads may use it."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def num_plain_ids(self) -> int:
        """Ids of the vocabulary without added tokens: texts may get any of them."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if there is one."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if there is one."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the files of the tokenizer."""
        ...

    @property
    def roles(self) -> tuple[str, ...] | None:
        """The roles that messages may have; None if only the chat template knows them."""
        ...

    @property
    def forgeable(self) -> str | None:
        """Why a message can look like several messages to the model; None if none can."""
        ...

    @property
    def uses_clock(self) -> bool:
        """Whether the ids of a conversation may depend on the time."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises ArgumentError if it isn't Unicode (a lone surrogate).

        In a text for a model's folder, the names of its special tokens are these tokens.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special ones. Raises ArgumentError for an id outside the vocabulary."""
        ...

    def encode_messages(
        self, messages: Sequence[Message], add_generation_prompt: bool, now: str | None = None
    ) -> list[int]:
        """Return the ids of a conversation, and of the opening of the assistant's answer if requested.

        now: as ``encode_chat`` has it. Raises ArgumentError for a message without role or content, or with an unknown
        role.
        """
        ...

    def encode_chat(self, turns: Sequence[Turn], tools: Sequence[Tool], now: str | None = None) -> list[int]:
        """Return the ids of a conversation with tools, and of the opening of the assistant's answer.

        Without tools and calls it is ``encode_messages(turns, True)``. now: the local time that a chat template shows,
        in ISO 8601; by default the present. Raises ArgumentError as that does.
        """
        ...

    def stable_prefix(self, text: str) -> tuple[list[int], int]:
        """``(ids, left_out)``: the ids up to the text's last stable boundary, and how many tokens follow them.

        ``encode`` of every continuation begins with ``ids``. ``left_out`` counts tokens of ``encode(text)``.
        """
        ...

    def stable_messages(self, messages: Sequence[Message], now: str | None = None) -> tuple[list[int], int]:
        """Return the same for a conversation that continues with further messages.

        now: a local time in ISO 8601; then it holds for continuations that are rendered on this day. Without it, it
        holds for those of every day, so it ends before a date that a chat template shows. ``left_out`` counts tokens
        of ``encode_messages(messages, False, now)``.
        """
        ...


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256, in hex, of named files. Each is preceded by its name and its length."""
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def check_text(text: str) -> str:
    """Return the text if it is valid Unicode. Raises ArgumentError otherwise."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = text[max(error.start - 10, 0) : error.start + 1]
        raise ArgumentError(
            "text", shown, f"Unicode text; there is a lone surrogate at index {error.start}"
        ) from None
    return text


def text_of(content: object) -> str:
    """Return a content as one text: its parts follow each other."""
    if content is None or isinstance(content, str):
        return content or ""
    assert isinstance(content, list | tuple)
    return "".join(part["text"] for part in content)


def to_json(value: Any) -> str:
    """Return JSON as models read it."""
    return json.dumps(value, ensure_ascii=False)


def check_messages(
    messages: Sequence[Turn], roles: Iterable[str] | None = None, *, has_parts: bool = False
) -> None:
    """Raise ArgumentError unless each message has a role (one of ``roles``, if given) and a content.

    has_parts: a content may also be a list of ``{"type": "text", "text": …}``, and an assistant may have none.
    """
    if not messages:
        raise ArgumentError("messages", list(messages), "at least one message")
    known = None if roles is None else sorted(roles)
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise ArgumentError(f"messages[{index}].role", role, "a string")
        if content is None and has_parts and role == "assistant":
            content = ""
        parts = content if has_parts and isinstance(content, list | tuple) else [{"text": content}]
        check_text(role)
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                allowed = 'a string, or a list of {"type": "text", "text": …}' if has_parts else "a string"
                raise ArgumentError(f"messages[{index}].content", content, allowed)
            check_text(text)
        if known is not None and message["role"] not in known:
            raise ArgumentError(f"messages[{index}].role", message["role"], f"one of {', '.join(known)}")
