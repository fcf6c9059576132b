"""Control tokens: those that separate messages, so that only a chat template may write them.

Which tokens they are is found from the tokenizer and from what the template writes:

- each special token;
- each other added token that stands in the template, or in what it renders (DeepSeek's roles aren't special);
- each string in angle or square brackets in the template that is one token of the vocabulary (a user-defined symbol).

What a message holds is never one of them. If it spells one, that text is encoded in two parts, neither of which is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

from radixkv.errors import ArgumentError
from radixkv.tokenizer.templates import Guard, Strings

_BRACKETED = re.compile(r"<[^<>\s]{1,64}>|\[[A-Za-z_/]{1,64}\]|<\|[^|\s]{1,64}\|>")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token for one byte of a character that isn't in the vocabulary."""
_MAX_KEPT = 1024


class Control:
    """The control tokens of a tokenizer, for one template.

    - encode: from a text to its ids, without what a tokenizer adds to a text.
    - unknown: ids of what isn't in the vocabulary. Any text may become these.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        strings: Strings,
        encode: Callable[[str], Sequence[int]],
        unknown: Iterable[int] = (),
    ) -> None:
        self._encode, self._unknown = encode, frozenset(unknown)
        self._ids_of = dict(ids)
        self.strings = sorted(self._ids_of, key=lambda each: (-len(each), each))
        self.ids = frozenset(self._ids_of.values())
        self.find = re.compile("|".join(map(re.escape, self.strings)) or "(?!)")
        places = {each: _place(each) for each in self.strings}
        begins = "".join(sorted({each[place] for each, place in places.items() if not each[place].isalnum()}))
        self._begins = re.compile(f"[{re.escape(begins)}]") if begins else re.compile("(?!)")
        searched = [each for each in strings.searched if self._begins.search(each) and self._may_stay(each)]
        replaced = [each for each in self.strings if any(each in other for other in searched)]
        whole = [
            each
            for each, place in places.items()
            if each[place].isalnum() or any(each.startswith(other) and each != other for other in searched)
        ]
        self.guard = Guard(begins, {each: places[each] for each in whole}, sorted(searched), replaced)
        self._written = "\0".join(strings.written)
        self.as_text = lru_cache(_MAX_KEPT)(self._as_text)

    @cached_property
    def untypable(self) -> str | None:
        """Why a control token that the template writes can't be encoded as text; None if all can."""
        for each in self.strings:
            if each in self._written:
                try:
                    self.as_text(each)
                except ArgumentError:
                    return f"the tokenizer makes a control token of {each!r}, however it is typed"
        return None

    def last_end(self, text: str, typed: Sequence[int]) -> int:
        """Return where the last control string ends that nobody typed; 0 if there is none."""
        known = set(typed)
        return max((each.end() for each in self.find.finditer(text) if each.start() not in known), default=0)

    def common_start(self, texts: Iterable[str], place: int) -> int:
        """Return where in all texts a control string begins that ends after ``place``; 0 if in some of them none does.

        The texts must be equal before ``place``. A text that ends there has any.
        """
        longest = max(map(len, self.strings), default=0)
        starts = set()
        for text in texts:
            if len(text) > place:
                near = (
                    each for each in self.find.finditer(text, max(place - longest, 0)) if each.end() > place
                )
                first = next(near, None)
                starts.add(first.start() if first is not None and first.start() <= place else 0)
        return place if not starts else starts.pop() if len(starts) == 1 else 0

    def is_spelt(self, token_id: int, text: str) -> bool:
        """Whether a text became this control token because it spells one."""
        return token_id not in self._unknown or self._ids_of.get(text.strip()) == token_id

    def _may_stay(self, searched: str) -> bool:
        """Whether a string can be left in contents: no control string can be completed from its end."""
        tails = [searched[each.start() :] for each in self._begins.finditer(searched)]
        return not any(each.startswith(tail) and each != tail for tail in tails for each in self.strings)

    def _as_text(self, text: str) -> tuple[int, ...]:
        """Return ids of a text that spells a control token, none of which is one.

        Raises ArgumentError if there are none.
        """
        for allowed in (frozenset[int](), self._unknown):
            for cut in range(1, len(text)):
                ids = (*self._inner(text[:cut]), *self._inner(text[cut:]))
                if self.ids.intersection(ids) <= allowed:
                    return ids
        raise ArgumentError("messages", text, "text that the tokenizer doesn't turn into a control token")

    def _inner(self, text: str) -> Sequence[int]:
        """Return the ids of a text that isn't at a beginning, where some tokenizers put a space."""
        before, both = list(self._encode("\n")), list(self._encode("\n" + text))
        return both[len(before) :] if before and both[: len(before)] == before else self._encode(text)


def _place(control: str) -> int:
    """Return the position of the character that is marked: the first that is no letter or digit, if there is one."""
    return next((at for at, each in enumerate(control) if not each.isalnum()), 0)


def control_ids(
    special: Mapping[str, int],
    added: Mapping[str, int],
    strings: Strings,
    rendered: Iterable[str],
    one_token: Callable[[str], int | None],
) -> dict[str, int]:
    """Return the control strings and their ids, as this module says.

    - ``special``, ``added``: special tokens, and other added ones.
    - ``rendered``: some conversations as the template renders them.
    - ``one_token``: the id of a string that is one token of the vocabulary, spelt alike.
    """
    texts = [*strings.written, *strings.searched, *rendered]
    found = dict(special)
    for content, token_id in added.items():
        if not content.isspace() and any(content in text for text in texts):
            found[content] = token_id
    for bracketed in {each[0] for text in texts for each in _BRACKETED.finditer(text)} - found.keys():
        if (single := one_token(bracketed)) is not None:
            found[bracketed] = single
    return {
        content: token_id for content, token_id in found.items() if content and not _BYTE.fullmatch(content)
    }
