"""A ``tokenizer.json`` of the library ``tokenizers`` as a ``Tokenizer``.

``encode`` gives what the library gives: added tokens are parsed in a text, special ones too, and the post-processor
adds what it adds before and behind. A stable prefix has no end, so it has nothing of what is added there. In
conversations a control token that a caller typed is encoded as text.

**Stable boundaries.** The rules of such a pipeline can't be read from its file. So two kinds of boundary are tested
when it is loaded:

- before a space that follows a character that isn't whitespace;
- after a single newline between two characters that aren't whitespace. (A byte-level tokenizer encodes a run of
  newlines as one token. So the end of a text after a newline is *not* stable, unlike in the shipped model.)

A kind is rejected if any token of the vocabulary decodes to a text that spans it. It is also rejected if one of
some hundred fixed probes (words, digits, punctuation, other scripts, on both sides) gets other leading ids when it
continues. For this, loading decodes the vocabulary once: 0.1 s for 100,000 tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import tokenizers

from radixkv.errors import ConfigError
from radixkv.tokenizer.base import BaseTokenizer
from radixkv.tokenizer.chat import Chat, PlainChat
from radixkv.tokenizer.control import Control
from radixkv.tokenizer.protocol import check_text, digest_of
from radixkv.tokenizer.templates import Rendered, Strings

_OPENINGS = ("", "The quick brown fox, ", "x = f(1)\n")
_LEFTS = (
    "word",
    "Word,",
    "x1",
    "2048",
    "naïve",
    "日本",
    "end.",
    "(a)",
    "don't",
    "!!!",
    "_",
    "a-b",
    "😀",
    '"q"',
    "ing",
)
_AFTER_SPACE = ("", "word", " two", "\n", ".", "12", "  \n\n x", "'s", "日本", "\t", "   ", "(", "_x", "😀")
_AFTER_NEWLINE = ("word", "Word", "12", ".", "日本", "_", "'s", "(", "#", "}", "😀", "e.g.")


class Boundary(NamedTuple):
    """A kind of boundary: its condition, the pattern of tokens that span it, and texts around it as probes."""

    is_at: Callable[[str, int], bool]
    """``is_at(text, cut)`` for ``0 < cut < len(text)``."""

    spanned: re.Pattern[str]
    probes: tuple[tuple[str, str], ...]


def _is_before_space(text: str, cut: int) -> bool:
    return text[cut] == " " and not text[cut - 1].isspace()


def _is_after_newline(text: str, cut: int) -> bool:
    alone = cut > 1 and not text[cut - 2].isspace() and not text[cut].isspace()
    return alone and text[cut - 1] == "\n"


BEFORE_SPACE = Boundary(
    _is_before_space,
    re.compile("[^\\s\ufffd] "),
    tuple((a + b, " " + c) for a, b, c in product(_OPENINGS, _LEFTS, _AFTER_SPACE)),
)
AFTER_NEWLINE = Boundary(
    _is_after_newline,
    re.compile("\n[^\\s\ufffd]"),
    tuple((a + b + "\n", c) for a, b, c in product(_OPENINGS, _LEFTS, _AFTER_NEWLINE)),
)


class FastTokenizer(BaseTokenizer):
    """Implements ``Tokenizer``. ``control``: what only a chat may write."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        digest: str,
        chat: Chat,
        control: Control,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        self._backend, self._control = backend, control
        self._control_ids = np.array(sorted(control.ids), np.int64)
        num_ids = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        super().__init__(digest, num_ids, bos_token_id, eos_token_id, _leading_ids(backend), chat)
        added = (token.content for token in backend.get_added_tokens_decoder().values())
        self._added_pairs = frozenset(left + right for content in added for left, right in pairwise(content))
        self._boundaries = self._held_boundaries()

    @property
    def num_plain_ids(self) -> int:
        """See ``Tokenizer.num_plain_ids``."""
        return int(self._backend.get_vocab_size(with_added_tokens=False))

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``."""
        return list(self._backend.encode(check_text(text), add_special_tokens=True).ids)

    def rendered_ids(self, rendered: Rendered) -> list[int]:
        """Return the ids of a conversation. Where a caller typed a control token, its text is encoded instead."""
        encoding = self._backend.encode(rendered.text, add_special_tokens=False)
        ids: list[int] = list(encoding.ids)
        if not rendered.typed:
            return ids
        places = np.flatnonzero(np.isin(np.array(ids, np.int64), self._control_ids)).tolist()
        if not places:
            return ids
        offsets, typed, found, done = encoding.offsets, rendered.typed, [], 0
        for place in places:
            start, end = offsets[place]
            first = bisect_left(typed, start)
            text = rendered.text[start:end]
            if first < len(typed) and typed[first] < end and self._control.is_spelt(ids[place], text):
                found += [*ids[done:place], *self._control.as_text(text)]
                done = place + 1
        return found + ids[done:]

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _text(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def stable_cut(self, text: str) -> int:
        """See ``BaseTokenizer``."""
        return next((cut for cut in range(len(text) - 1, 0, -1) if self._is_stable(text, cut)), 0)

    def _is_stable(self, text: str, cut: int) -> bool:
        if not any(boundary.is_at(text, cut) for boundary in self._boundaries):
            return False
        return text[cut - 1 : cut + 1] not in self._added_pairs

    def _held_boundaries(self) -> list[Boundary]:
        tokens = self._backend.decode_batch([[token_id] for token_id in range(self.vocab_size)])
        return [
            boundary
            for boundary in (BEFORE_SPACE, AFTER_NEWLINE)
            if not any(map(boundary.spanned.search, tokens)) and self._all_hold(boundary.probes)
        ]

    def _all_hold(self, probes: Iterable[tuple[str, str]]) -> bool:
        for prefix, continuation in probes:
            ids = self._ids(prefix)
            if self._ids(prefix + continuation)[: len(ids)] != ids:
                return False
        return True


def load_file(content: bytes, name: str, path: str) -> FastTokenizer:
    """Load a ``tokenizer.json`` by itself. Raises ConfigError for an invalid one, or one without a vocabulary."""
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ConfigError("tokenizer", path, f"a tokenizer.json: {error}") from error
    check_backend(backend, path)
    added = backend.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    control = Control(special, Strings((), ()), encode)
    return FastTokenizer(backend, digest_of([(name, content)]), PlainChat(), control)


def check_backend(backend: tokenizers.Tokenizer, name: str) -> None:
    """Let a tokenizer truncate and pad nothing. Raises ConfigError if it has no vocabulary."""
    if not backend.get_vocab_size(with_added_tokens=True):
        raise ConfigError("tokenizer", name, "a tokenizer with a vocabulary; this one has none")
    backend.no_truncation()
    backend.no_padding()


def _leading_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """Return the ids that the post-processor adds in front of a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    processed = backend.encode("a", add_special_tokens=True).ids
    starts = range(len(processed) - len(plain) + 1)
    start = next((start for start in starts if processed[start : start + len(plain)] == plain), 0)
    return list(processed[:start])
