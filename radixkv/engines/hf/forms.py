"""Answers bound to a form: which tokens may follow, as masks over the vocabulary.

Each output row has a matcher of its request's grammar. Before a step chooses, the masks of all rows of all requests are
computed in one call, in parallel and outside of the interpreter's lock. On a GPU the forward runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor

from radixkv.engines.grammars import Grammar


class FormRows(LogitsProcessor):
    """The matchers of a request's rows. As a logits processor it leaves the tokens that may follow.

    ``eos_token_ids``: any of them ends an answer where the grammar lets it end.
    """

    def __init__(self, grammar: Grammar, num_rows: int, eos_token_ids: Collection[int]) -> None:
        self._grammar, self._eos_token_ids = grammar, sorted(eos_token_ids)
        self._matchers = [grammar.matcher() for _ in range(num_rows)]
        self._num_followed = [0] * num_rows
        self.num_words = -(-grammar.num_ids // 32)
        self._masks = np.zeros((0, self.num_words), np.int32)
        self._rows: list[int] = []

    def follow(self, answers: Mapping[int, Sequence[int]], masks: NDArray[np.int32]) -> list[LLMatcher]:
        """Bring rows to the end of their answers so far, and return their matchers, which will fill ``masks``.

        ``masks``: ``[rows, words]``. What a row has followed before isn't followed again.
        """
        self._rows, self._masks = list(answers), masks
        for row, token_ids in answers.items():
            for token_id in token_ids[self._num_followed[row] :]:
                self._matchers[row].consume_token(token_id)
            self._num_followed[row] = len(token_ids)
        return [self._matchers[row] for row in self._rows]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the scores ``[rows, vocab_size]`` with -inf for tokens that may not follow. ``input_ids`` is not read.

        Raises ArgumentError if the grammar needs more than its limits, or if no token may follow.
        """
        for row in self._rows:
            self._grammar.require_sound(self._matchers[row])
        bits = np.unpackbits(self._masks.view(np.uint8), axis=1, bitorder="little")
        may_end = bits[:, self._grammar.eos_token_id].copy()
        bits[:, self._grammar.eos_token_id] = 0
        bits[:, self._eos_token_ids] = may_end[:, None]
        blocked = torch.from_numpy(bits[:, : scores.shape[1]]).to(scores.device) == 0
        if len(self._rows) < len(scores):  # other rows are over, and choose anything
            every = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
            every[self._rows] = blocked
            blocked = every
        found: Tensor = scores.masked_fill(blocked, float("-inf"))
        if bool(found.amax(-1).isneginf().any()):
            raise self._grammar.error("no token of the model may follow")
        return found


class FormInLoop(LogitsProcessor):
    """A form in transformers' own loop. ``width``: tokens of the padded prompts."""

    def __init__(self, form: FormRows, num_rows: int, eos_token_ids: Collection[int], width: int) -> None:
        self._form, self._eos_token_ids, self._width = form, frozenset(eos_token_ids), width
        self._going = list(range(num_rows))

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the scores ``[rows, vocab_size]`` after the ids ``[rows, tokens]``: see ``FormRows``."""
        answers = input_ids[:, self._width :].tolist()
        self._going = [
            row for row in self._going if not answers[row] or answers[row][-1] not in self._eos_token_ids
        ]
        fill_masks([(self._form, {row: answers[row] for row in self._going})])
        return self._form(input_ids, scores)


def fill_masks(asked: Sequence[tuple[FormRows, Mapping[int, Sequence[int]]]]) -> None:
    """Compute the masks of some rows of some requests, which have these answers so far, by the number of the row."""
    if not asked:
        return
    masks = np.empty((sum(len(answers) for _, answers in asked), asked[0][0].num_words), np.int32)
    jobs: list[tuple[LLMatcher, int]] = []
    for form, answers in asked:
        start = len(jobs)
        matchers = form.follow(answers, masks[start : start + len(answers)])
        jobs += [(matcher, start + number) for number, matcher in enumerate(matchers)]
    fill_next_token_bitmask_par(_executor(), jobs, masks)


@cache
def _executor() -> LLExecutor:
    return LLExecutor()
