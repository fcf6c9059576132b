"""From new token ids to text, a piece at a time, and stop strings across pieces.

A token's text depends on the text before it, and a character may span tokens. So a piece is the difference between
decoding a short run of ids *with* the newest id and *without* it. Nothing is handed out while the text ends in the
middle of a character. Joined streamed pieces equal the text of a request without streaming: both come from here.

    ids:   … prompt tail | new …
                ▲ start        ▲ done      decode([start, now)) − decode([start, done)) is the next piece

Stop strings are matched by the automaton of Knuth, Morris and Pratt. It looks at each character of the text once for
each stop string, whatever the strings' lengths are. Its state is the length of the text's end that may become a stop
string. So a completion costs O(text × stop strings).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from radixkv.tokenizer import Tokenizer

_CONTEXT = 6
"""Ids of the prompt that precede the first piece when it is decoded."""
_UNFINISHED = "\ufffd"
_MAX_UNFINISHED = 16
"""Most ids that may wait for the end of a character; a character has at most 4 bytes, so more ids mean broken text."""


class Stop:
    """A stop string and its failure function: O(length) to make, shared by all rows of a request."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.fallback = [0] * len(text)
        length = 0
        for place in range(1, len(text)):
            while length and text[place] != text[length]:
                length = self.fallback[length - 1]
            length += text[place] == text[length]
            self.fallback[place] = length


class _Matcher:
    """Tracks how much of a stop string the text so far ends with."""

    __slots__ = ("matched", "stop")

    def __init__(self, stop: Stop) -> None:
        self.stop, self.matched = stop, 0

    def feed(self, piece: str) -> int | None:
        """Return where in ``piece`` the stop string first ends, or None. O(piece), amortised."""
        text, fallback, matched = self.stop.text, self.stop.fallback, self.matched
        for place, character in enumerate(piece, 1):
            while matched and text[matched] != character:
                matched = fallback[matched - 1]
            matched += text[matched] == character
            if matched == len(text):
                return place
        self.matched = matched
        return None


class TextStream:
    """The text of one completion: ``push`` ids, ``take`` the text that may be shown.

    One thread pushes and another may take.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Iterable[Stop] = ()) -> None:
        self._tokenizer = tokenizer
        self._matchers = [_Matcher(stop) for stop in stops]
        self._ids = [int(token_id) for token_id in prompt_ids[-_CONTEXT:]]
        self._start, self._done = 0, len(self._ids)
        self._ready: deque[str] = deque()
        self._held = ""
        self.num_tokens = 0
        self.stop_text: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self.stop_text is not None

    def push(self, ids: Iterable[int]) -> None:
        """Add new ids; ids after a stop string are ignored. O(1) decodes an id."""
        for token_id in ids:
            if self.stopped:
                return
            self.num_tokens += 1
            if token_id < self._tokenizer.vocab_size:  # a model may have more ids than its tokenizer
                self._ids.append(int(token_id))
                self._decode(final=False)

    def close(self) -> None:
        """End the ids: text that was held back is released."""
        if not self.stopped:
            self._decode(final=True)
            self._show(self._held)
            self._held = ""

    @property
    def text(self) -> str:
        """The text that may be shown and was not taken yet."""
        return "".join(self._ready)

    def take(self) -> str:
        """Return the text that may be shown and was not taken yet; a possible stop string is held back."""
        parts = []
        while self._ready:
            parts.append(self._ready.popleft())
        return "".join(parts)

    def _decode(self, *, final: bool) -> None:
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        after = self._tokenizer.decode(self._ids[self._start :])
        if len(after) <= len(before) or (after.endswith(_UNFINISHED) and not final):
            if len(self._ids) - self._done > _MAX_UNFINISHED:
                self._move_on(before, after)
            return
        self._add(after[len(before) :])
        self._start, self._done = self._done, len(self._ids)

    def _move_on(self, before: str, after: str) -> None:
        """Hand out the text of all but the last ids, where it can be split: it is broken and won't become whole."""
        for done in range(len(self._ids) - 1, len(self._ids) - 9, -1):
            text = self._tokenizer.decode(self._ids[self._start : done])
            if len(text) > len(before) and text + self._tokenizer.decode(self._ids[done:]) == after:
                self._add(text[len(before) :])
                self._start, self._done = self._done, done
                return

    def _add(self, piece: str) -> None:
        """Add text: show it up to the first stop string in it, or up to a possible one."""
        found = [
            (end - len(each.stop.text), each.stop.text)
            for each in self._matchers
            if (end := each.feed(piece)) is not None
        ]
        text = self._held + piece
        if found:
            start, self.stop_text = min(found)
            self._held = ""
            self._show(text[: len(text) - len(piece) + start])
            return
        shown = len(text) - max((each.matched for each in self._matchers), default=0)
        self._held = text[shown:]
        self._show(text[:shown])

    def _show(self, piece: str) -> None:
        if piece:
            self._ready.append(piece)
