"""Prompts for the audit over HTTP: random, never sent before, and hard to confuse.

A tokenizer may know no letters, no digits or only some kinds of words, and then gives different texts the same ids.
So a prompt mixes several kinds of words, and differs from other prompts in each of them, from its start. Each
prompt carries a canary: a random word that a reply contains only if the server repeats what it was sent.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CANARY = re.compile(r"zq[0-9a-f]{12}")
IDS_A_WORD = 6
CHANCE_TOKENS = 8
"""More than the first tokens that random prompts share. A cache that finds tokens inside blocks reports them."""
_LOWEST_ID, _HIGHEST_ID = 5, 250
"""Ids that every vocabulary has, and that are not special tokens in most."""
_WORDS = [
    "rule",
    "page",
    "answer",
    "manual",
    "order",
    "return",
    "price",
    "letter",
    "number",
    "question",
    "water",
    "house",
    "school",
    "family",
    "music",
    "market",
    "winter",
    "summer",
    "morning",
    "evening",
    "doctor",
    "teacher",
    "paper",
    "window",
    "garden",
    "river",
    "mountain",
    "city",
    "country",
    "island",
    "story",
    "picture",
    "table",
    "chair",
    "kitchen",
    "bridge",
    "street",
    "train",
    "ticket",
    "report",
    "office",
    "engine",
    "weather",
    "history",
    "science",
    "language",
]
_draw = random.SystemRandom()


def canary() -> str:
    """Return a random word that was never used before."""
    return f"zq{_draw.getrandbits(48):012x}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in one form: ``text`` (a string), ``ids`` (token ids) or ``messages`` (of a chat)."""

    form: str
    content: Any

    def of_completion(self) -> dict[str, Any]:
        """Return the prompt as a field of a completion's body."""
        return {"messages" if self.form == "messages" else "prompt": self.content}

    def of_prefix(self) -> dict[str, Any]:
        """Return the prompt as a field of radixkv's own endpoints: lookups, warms, pins, routes."""
        return {{"text": "prompt", "ids": "token_ids", "messages": "messages"}[self.form]: self.content}


FORMS: Mapping[str, str] = {"text": "a prompt as text", "ids": "a prompt as ids", "messages": "messages"}


class Prompts:
    """Makes fresh prompts of ``words`` words each."""

    def __init__(self, words: int) -> None:
        self.words = words

    def text(self, words: int | None = None) -> str:
        """Return a fresh prompt as text. The canary is its second word, if it has two."""
        found = [_word(at) for at in range(words or self.words)]
        found[0], found[1:2] = _first(), [canary()] * len(found[1:2])
        return " ".join(found)

    def fresh(self, form: str, words: int | None = None) -> Prompt:
        """Return a fresh prompt in this form."""
        if form == "ids":
            length = IDS_A_WORD * (words or self.words)
            return Prompt(form, [_draw.randint(_LOWEST_ID, _HIGHEST_ID) for _ in range(length)])
        text = self.text(words)
        return Prompt(form, text if form == "text" else [{"role": "user", "content": text}])


def _first() -> str:
    """Seven letters and seven digits: prompts begin differently for a tokenizer that knows only one of the two."""
    return "".join(_draw.choices(string.ascii_lowercase, k=7)) + "".join(_draw.choices(string.digits, k=7))


def _word(at: int) -> str:
    """The kinds alternate: two common words and a number, letters, digits with signs, mixed case."""
    kind = at % 4
    if kind == 0:
        return f"{_draw.choice(_WORDS)} {_draw.choice(_WORDS)} {_draw.randrange(100, 1000)}."
    if kind == 1:
        return "".join(_draw.choices(string.ascii_lowercase, k=5))
    if kind == 2:
        return f"{_draw.randrange(10, 100)}{_draw.choice('-+/=')}{_draw.randrange(10, 100)},"
    return "".join(_draw.choices(string.ascii_letters + string.digits, k=4))


def chance_tokens(prompt_tokens: int) -> int:
    """Return how many more tokens of a prompt than of another may be cached by chance: at most a quarter of it."""
    return min(CHANCE_TOKENS, prompt_tokens // 4)


def unknown_at_most(fresh: Sequence[int], prompt_tokens: int) -> int:
    """Return the most cached tokens that a prompt which was never sent may report, by those that ``fresh`` ones did.

    Their maximum plus their spread (maximum − minimum), or plus ``chance_tokens``.
    """
    return max(fresh) + max(max(fresh) - min(fresh), chance_tokens(prompt_tokens))
