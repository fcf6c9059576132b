"""From the fields of a body to token ids, and the checks that ids have to pass.

Warm and lookup look at the same **prefix** of a prompt: what every continuation of it begins with, down to a
whole block.

    [0, prefix)  whole blocks before the last stable boundary: warmed, looked up
    [prefix, n)  left out: may be tokenized differently once the text goes on, or is shorter than a block

Ids given as ids are stable anywhere. A completion takes its prompt as it is, without cutting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from radixkv.errors import ArgumentError
from radixkv.service.problems import invalid
from radixkv.service.schemas.prompts import PromptForms
from radixkv.tokenizer import Tokenizer

Ids = NDArray[np.uint32]
T = TypeVar("T")

MAX_CHARS_PER_TOKEN = 64
"""A text with more characters for each token that a prompt may have is refused before it is tokenized."""

_INLINE_CHARS = 4096
"""Texts up to this length (well under a millisecond) are tokenized on the event loop, longer ones in a thread."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Whole blocks of a prompt, and how many of its tokens come after them."""

    ids: Ids
    left_out: int


@dataclass(frozen=True, slots=True)
class PromptRules:
    """What a prompt may be: ids below ``vocab_size``, at most ``max_tokens`` of them, blocks of ``block_size``."""

    vocab_size: int
    max_tokens: int
    block_size: int

    def check(self, ids: Sequence[int] | Ids, field: str) -> Ids:
        """The ids as uint32, ``[n]``, n ≥ 1. An ApiError (422) names the first bad index and its value."""
        found = np.asarray(ids, dtype=np.int64)
        self.check_length(len(found), field)
        bad = np.flatnonzero((found < 0) | (found >= self.vocab_size))
        if len(bad):
            index = int(bad[0])
            allowed = f"an integer from 0 to {self.vocab_size - 1}"
            raise invalid(
                f"{field}[{index}] is not in the vocabulary", f"{field}[{index}]", int(found[index]), allowed
            )
        return found.astype(np.uint32)

    def check_length(self, num_tokens: int, field: str) -> None:
        """An ApiError (422) unless a prompt may have so many tokens."""
        if not num_tokens:
            raise invalid(f"{field} has no tokens", field, 0, f"1 to {self.max_tokens} tokens")
        if num_tokens > self.max_tokens:
            message = f"{field} has {num_tokens} tokens, more than {self.max_tokens}"
            raise invalid(message, field, num_tokens, f"at most {self.max_tokens} tokens")

    def check_text(self, num_chars: int, field: str) -> None:
        """An ApiError (422) for a text that is not worth tokenizing, being too long for any tokenizer."""
        limit = self.max_tokens * MAX_CHARS_PER_TOKEN
        if num_chars > limit:
            message = f"{field} has {num_chars} characters, more than {limit}"
            raise invalid(
                message, field, num_chars, f"at most {limit} characters and {self.max_tokens} tokens"
            )

    def whole_blocks(self, ids: Ids, left_out: int) -> Prefix:
        """Cut down to a whole block."""
        cut = len(ids) // self.block_size * self.block_size
        return Prefix(ids[:cut], left_out + len(ids) - cut)


async def prefix_of(body: PromptForms, tokenizer: Tokenizer, rules: PromptRules) -> Prefix:
    """The prefix that a body names. Raises ApiError (422)."""
    field = _the_one_field(body)
    if body.token_ids is not None:
        return rules.whole_blocks(rules.check(body.token_ids, field), 0)
    if body.prompt is not None:
        text = body.prompt
        rules.check_text(len(text), field)
        ids, left_out = await tokenized(len(text), field, lambda: tokenizer.stable_prefix(text))
    else:
        messages = [{"role": each.role, "content": each.content} for each in body.messages or ()]
        size = sum(len(each["content"]) for each in messages)
        rules.check_text(size, field)
        ids, left_out = await tokenized(size, field, lambda: tokenizer.stable_messages(messages))
    rules.check_length(len(ids) + left_out, field)
    return rules.whole_blocks(np.asarray(ids, dtype=np.uint32), left_out)


def _the_one_field(body: PromptForms) -> str:
    forms = ("prompt", "messages", "token_ids")
    given = [form for form in forms if getattr(body, form) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise invalid(f"one of {', '.join(forms)} is needed", ", ".join(forms), found, "exactly one of them")
    return given[0]


async def tokenized(num_chars: int, field: str, encode: Callable[[], T]) -> T:
    """``encode()``, off the event loop if it may take long; what it refuses becomes an ApiError on ``field``."""
    try:
        return encode() if num_chars <= _INLINE_CHARS else await anyio.to_thread.run_sync(encode)
    except ArgumentError as error:
        name = error.argument if error.argument.startswith(field) else field
        raise invalid(str(error), name, error.value, error.allowed) from None
