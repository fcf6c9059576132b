"""From new token ids to text, a piece at a time, and stop strings across pieces.

A token's text depends on what stands before it, and a character may span tokens. So a piece is what decoding a
short run of ids *with* the newest one adds to decoding it *without*, and nothing is handed out while the text
ends in the middle of a character. Streamed pieces joined are the text that a request without streaming gets:
both come from here.

    ids:   … prompt tail | new …
                ▲ start        ▲ done      decode([start, now)) − decode([start, done)) is the next piece
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixkv.tokenizer import Tokenizer

_CONTEXT = 6
"""Ids of the prompt that the first piece is decoded after."""
_UNFINISHED = "\ufffd"


class TextStream:
    """The text of one completion. ``push`` ids, take ``text[emitted:]`` when it may be shown."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Iterable[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids = [int(token_id) for token_id in prompt_ids[-_CONTEXT:]]
        self._start, self._done = 0, len(self._ids)
        self._emitted = 0
        self.text = ""
        self.num_tokens = 0
        self.stopped = False

    def push(self, ids: Iterable[int]) -> None:
        """Add new ids; those behind a stop string are ignored. O(1) decodes an id."""
        for token_id in ids:
            if self.stopped:
                return
            self.num_tokens += 1
            if token_id < self._tokenizer.vocab_size:  # a model may have more ids than its tokenizer
                self._ids.append(int(token_id))
                self._decode(final=False)

    def close(self) -> None:
        """No more ids: what was held back is text now."""
        if not self.stopped:
            self._decode(final=True)

    def take(self, *, final: bool = False) -> str:
        """The text that may be shown and was not taken yet; what may become a stop string is held back."""
        end = len(self.text) if final or self.stopped else len(self.text) - self._held_back()
        piece, self._emitted = self.text[self._emitted : end], max(end, self._emitted)
        return piece

    def _decode(self, *, final: bool) -> None:
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        after = self._tokenizer.decode(self._ids[self._start :])
        if len(after) <= len(before) or (after.endswith(_UNFINISHED) and not final):
            return
        searched = len(self.text)
        self.text += after[len(before) :]
        self._start, self._done = self._done, len(self._ids)
        self._find_stop(searched)

    def _find_stop(self, searched: int) -> None:
        """Cut the text before the first stop string, if one ends behind ``searched``."""
        found = [
            at for stop in self._stops if (at := self.text.find(stop, max(searched - len(stop) + 1, 0))) >= 0
        ]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held_back(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return size
        return 0
