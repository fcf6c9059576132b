"""The shared part of all implementations.

An implementation has three methods: ``_ids(text)`` returns the ids of plain text without special ones.
``_text(ids)`` is the reverse. ``_stable_cut(text)`` returns the number of characters before the last stable
boundary. The ids of a text are the ``leading`` ids, usually none or the BOS, and then ``_ids(text)``. The ids of a
conversation are those of its segments: texts, and special ids between them. A ``Chat`` makes the segments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy

from radixkv.errors import ArgumentError
from radixkv.tokenizer.chat import Chat, Segment, TemplateChat, UnrenderedChat, common_segments
from radixkv.tokenizer.protocol import Message, Tool, Turn, check_text


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
        self._leading, self._chat = list(leading), chat
        self.roles = chat.roles

    def without_blocking(self) -> BaseTokenizer:
        """Return the same tokenizer for an event loop: it raises NotRendered where a template would be rendered."""
        if not isinstance(self._chat, TemplateChat):
            return self
        found = copy(self)
        found._chat = UnrenderedChat()
        return found

    @abstractmethod
    def _ids(self, text: str) -> list[int]:
        """Return the ids of valid Unicode text. Special tokens are neither added nor parsed."""

    @abstractmethod
    def _text(self, ids: list[int]) -> str:
        """Return the text of ids, which are all in the vocabulary."""

    @abstractmethod
    def _stable_cut(self, text: str) -> int:
        """Return the position of the text's last stable boundary; 0 if it has none."""

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``. O(n log n) at worst; about 1 µs a token."""
        return self._leading + self._ids(check_text(text))

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer.decode``."""
        plain = [int(token_id) for token_id in ids]
        for index, token_id in enumerate(plain):
            if not 0 <= token_id < self.vocab_size:
                raise ArgumentError(f"ids[{index}]", token_id, f"0 to {self.vocab_size - 1}")
        return self._text(plain)

    def stable_prefix(self, text: str) -> tuple[list[int], int]:
        """See ``Tokenizer.stable_prefix``. Encodes the text and its prefix, once each."""
        ids, left_out = self._stable_ids(check_text(text))
        return (self._leading + ids, left_out) if ids else ([], len(self._leading) + left_out)

    def encode_messages(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        """See ``Tokenizer.encode_messages``."""
        return self._join(self._chat.segments(messages, add_generation_prompt))

    def encode_chat(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[int]:
        """See ``Tokenizer.encode_chat``."""
        return self._join(self._chat.chat_segments(turns, tools))

    def stable_messages(self, messages: Sequence[Message]) -> tuple[list[int], int]:
        """See ``Tokenizer.stable_messages``. A template renders the conversation and a few continuations of it.

        Encodes each segment once, and the last text that is kept twice.
        """
        segments = self._chat.segments(messages, False)
        kept, open_text = common_segments(self._chat, messages, segments)
        ids = self._join(kept)
        rest = segments[len(kept) :]
        num_left_out = len(self._opening()) if rest and not kept else 0
        num_left_out += sum(1 if isinstance(each, int) else len(self._ids(each)) for each in rest)
        if open_text is not None and (tail := self._stable_ids(open_text)[0]):
            stable = [*([] if kept else self._opening()), *tail]
            ids, num_left_out = ids + stable, num_left_out - len(stable)
        return ids, num_left_out

    def _stable_ids(self, text: str) -> tuple[list[int], int]:
        whole = self._ids(text)
        cut = self._stable_cut(text)
        ids = self._ids(text[:cut]) if cut < len(text) else whole
        if not cut or whole[: len(ids)] != ids:  # the second: for pipelines that break the rules
            return [], len(whole)
        return ids, len(whole) - len(ids)

    def _opening(self) -> list[int]:
        return self._leading if self._chat.opens_like_text else []

    def _join(self, segments: Sequence[Segment]) -> list[int]:
        """Return the ids of segments. A conversation that is plain text begins with the leading ids of plain text."""
        ids = list(self._opening()) if segments else []
        for segment in segments:
            ids += [segment] if isinstance(segment, int) else self._ids(segment)
        return ids
