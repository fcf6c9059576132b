"""The shared part of all implementations.

An implementation has these methods: ``_ids(text)`` returns the ids of a text without what is added before or behind it.
``_text(ids)`` is the reverse. ``stable_cut(text)`` returns the number of characters before the last stable boundary.
``rendered_ids`` encodes a conversation, and what a caller typed in it is no control token. A ``Chat`` makes the ids
of a conversation with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy

from radixkv.errors import ArgumentError
from radixkv.tokenizer.chat import Chat, TemplateChat, UnrenderedChat
from radixkv.tokenizer.protocol import Message, Tool, Turn, check_messages, check_text
from radixkv.tokenizer.templates import Rendered


class BaseTokenizer(ABC):
    """The shared part of a ``Tokenizer``."""

    def __init__(
        self,
        digest: str,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_id: int | None,
        leading: Sequence[int],
        chat: Chat,
    ) -> None:
        self.digest, self.vocab_size = digest, vocab_size
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self.leading, self._chat = list(leading), chat

    @property
    def num_plain_ids(self) -> int:
        """See ``Tokenizer.num_plain_ids``."""
        return self.vocab_size

    @property
    def roles(self) -> tuple[str, ...] | None:
        """See ``Tokenizer.roles``."""
        return self._chat.roles

    @property
    def forgeable(self) -> str | None:
        """See ``Tokenizer.forgeable``."""
        return self._chat.forgeable

    @property
    def uses_clock(self) -> bool:
        """See ``Tokenizer.uses_clock``."""
        return self._chat.uses_clock

    def without_blocking(self) -> BaseTokenizer:
        """Return the same tokenizer for an event loop: it raises NotRendered where a template would be rendered."""
        if not isinstance(self._chat, TemplateChat):
            return self
        found = copy(self)
        found._chat = UnrenderedChat(self._chat)
        return found

    @abstractmethod
    def _ids(self, text: str) -> list[int]:
        """Return the ids of valid Unicode text, without leading or trailing ones."""

    @abstractmethod
    def _text(self, ids: list[int]) -> str:
        """Return the text of ids, which are all in the vocabulary."""

    @abstractmethod
    def stable_cut(self, text: str) -> int:
        """Return the position of the text's last stable boundary; 0 if it has none."""

    def rendered_ids(self, rendered: Rendered) -> list[int]:
        """Return the ids of a rendered conversation."""
        return self._ids(rendered.text)

    def plain_ids(self, text: str) -> list[int]:
        """Return the ids of a text without leading ones, in which nothing is a control token."""
        return self.rendered_ids(Rendered(text, range(len(text))))

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``. O(n log n) at worst; about 1 µs a token."""
        return self.leading + self._ids(check_text(text))

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer.decode``."""
        plain = [int(token_id) for token_id in ids]
        for index, token_id in enumerate(plain):
            if not 0 <= token_id < self.vocab_size:
                raise ArgumentError(f"ids[{index}]", token_id, f"0 to {self.vocab_size - 1}")
        return self._text(plain)

    def stable_prefix(self, text: str) -> tuple[list[int], int]:
        """See ``Tokenizer.stable_prefix``. Encodes the text and its prefix, once each."""
        whole = self.encode(text)
        cut = self.stable_cut(text)
        if cut:
            ids = self.leading + self._ids(text[:cut])
            if whole[: len(ids)] == ids:  # not so for pipelines that break the rules
                return ids, len(whole) - len(ids)
        return [], len(whole)

    def encode_messages(
        self, messages: Sequence[Message], add_generation_prompt: bool, now: str | None = None
    ) -> list[int]:
        """See ``Tokenizer.encode_messages``."""
        check_messages(messages, self.roles, has_parts=isinstance(self._chat, TemplateChat))
        return self._chat.ids(self, messages, (), add_generation_prompt, now)

    def encode_chat(self, turns: Sequence[Turn], tools: Sequence[Tool], now: str | None = None) -> list[int]:
        """See ``Tokenizer.encode_chat``."""
        return self._chat.ids(self, turns, tools, True, now)

    def stable_messages(self, messages: Sequence[Message], now: str | None = None) -> tuple[list[int], int]:
        """See ``Tokenizer.stable_messages``. A template renders the conversation and a few continuations of it."""
        return self._chat.stable(self, messages, now)
