"""What every tokenizer can do, and the few things that all of them share.

**Stable boundaries.** A prefix cached under the ids of a text is found again only if a longer text that
starts with it gets the same ids in front. Cut anywhere, most texts don't: a token may span the cut. A
boundary is *stable* if no continuation changes the ids before it. ``stable_prefix`` gives the ids up to the
last one, and says how many tokens that leaves out; each implementation's docstring says which boundaries it
takes and why.

**Roles can't be forged.** The markers between the messages of a conversation are ids that ``encode_messages``
puts there; the same marker typed inside a message is text like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from radixkv.errors import ArgumentError

ROLE_PIECES: Mapping[str, str] = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
"""Role -> the control symbol that opens its messages, in the shipped tokenizer."""

END_PIECE = "<|end|>"
"""The control symbol that closes a message, in the shipped tokenizer."""

Message = Mapping[str, str]
"""A message of a conversation: ``{"role": …, "content": …}``."""


class Tokenizer(Protocol):
    """Text to token ids and back. Immutable and safe to use from several threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
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
        """SHA-256, in hex, of the files that the tokenizer was made of."""
        ...

    @property
    def roles(self) -> tuple[str, ...] | None:
        """The roles that messages may have; None where only the chat template knows."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises ArgumentError if it isn't Unicode (a lone surrogate)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones left out. Raises ArgumentError for an id out of the vocabulary."""
        ...

    def encode_messages(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        """The ids of a conversation, and of the opening of the assistant's answer if asked for.

        Raises ArgumentError for a message without role or content, or with a role that there isn't.
        """
        ...

    def stable_prefix(self, text: str) -> tuple[list[int], int]:
        """``(ids, left_out)``: the ids up to the text's last stable boundary, which ``encode`` of every
        continuation begins with too, and how many tokens of ``encode(text)`` come after them."""
        ...

    def stable_messages(self, messages: Sequence[Message]) -> tuple[list[int], int]:
        """The same for a conversation that goes on with further messages; ``left_out`` counts against
        ``encode_messages(messages, False)``."""
        ...


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256, in hex, of named files, each framed by its name and its length."""
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def check_text(text: str) -> str:
    """The text itself, once it is known to be Unicode; an ArgumentError otherwise."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = text[max(error.start - 10, 0) : error.start + 1]
        raise ArgumentError(
            "text", shown, f"Unicode text; a lone surrogate stands at {error.start}"
        ) from None
    return text


def check_messages(messages: Sequence[Message], roles: Iterable[str] | None = None) -> None:
    """Raises an ArgumentError unless each message has a role (one of ``roles``, if given) and a content."""
    if not messages:
        raise ArgumentError("messages", list(messages), "at least one message")
    known = None if roles is None else sorted(roles)
    for index, message in enumerate(messages):
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise ArgumentError(f"messages[{index}].{field}", message.get(field), "a string")
        check_text(message["role"])
        check_text(message["content"])
        if known is not None and message["role"] not in known:
            raise ArgumentError(f"messages[{index}].role", message["role"], f"one of {', '.join(known)}")
