"""The texts of a vocabulary's tokens, for llguidance and for log probabilities.

A tokenizer is given as the JSON of the library tokenizers, from which llguidance derives the bytes of each token, or as
pieces, whose bytes are known. It is read when it is first needed: a vocabulary of 128,000 tokens takes about a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Pieces(NamedTuple):
    """A vocabulary as the bytes of each id, and the ids that aren't text; their bytes are names."""

    tokens: Sequence[bytes]
    special_ids: Collection[int]


class Vocabulary:
    """Reads a vocabulary when it is needed. Thread-safe.

    ``source``: returns the JSON of a tokenizer, or pieces. It may raise ValueError, and so do the methods then. They
    also raise it for JSON of which llguidance doesn't know the bytes of tokens.
    """

    def __init__(self, source: Callable[[], str | Pieces]) -> None:
        self._source = source
        self._plain: LLTokenizer | None = None
        self._lock = Lock()

    def tokenizer(self, eos_token_id: int, num_ids: int) -> LLTokenizer:
        """Return llguidance's tokenizer with at least ``num_ids`` ids, of which this one ends an answer."""
        return _made(self._source(), eos_token_id, max(num_ids, self._read().vocab_size))

    def bytes_of(self, token_id: int) -> bytes:
        """Return the text of a token, which may be a part of a character. Of a special one its name."""
        return bytes(self._read().decode_bytes([token_id]))

    def added(self) -> Mapping[str, int]:
        """Return the tokens that stand for a text as a whole, such as ``<tool_call>``, and that a decoder writes."""
        source = self._source()
        if not isinstance(source, str):
            return {}
        added = json.loads(source).get("added_tokens", ())
        return {each["content"]: each["id"] for each in added if not each.get("special")}

    def _read(self) -> LLTokenizer:
        with self._lock:
            if self._plain is None:
                self._plain = _made(self._source(), 0, None)
            return self._plain


def _made(source: str | Pieces, eos_token_id: int, num_ids: int | None) -> LLTokenizer:
    import llguidance

    if isinstance(source, str):
        return llguidance.LLTokenizer(source, n_vocab=num_ids, eos_token=eos_token_id)
    wrapped = llguidance.TokenizerWrapper(_Wrapped(source, eos_token_id, num_ids or 0))
    return llguidance.LLTokenizer(wrapped)


class _Wrapped:
    """Pieces in the form that llguidance takes."""

    bos_token_id: int | None = None

    def __init__(self, pieces: Pieces, eos_token_id: int, num_ids: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [*pieces.tokens, *[b""] * (num_ids - len(pieces.tokens))]
        self.special_token_ids = sorted(pieces.special_ids)

    def __call__(self, text: Any) -> list[int]:
        """Never called: no grammar here forces tokens, so llguidance encodes no text."""
        raise NotImplementedError
