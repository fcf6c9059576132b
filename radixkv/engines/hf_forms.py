"""Answers bound to a form: which tokens may follow, as masks over the vocabulary.

Each output row has a matcher of its request's grammar. Before a step chooses, the masks of all rows of all requests are
computed in one call, in parallel and outside of the interpreter's lock. On a GPU the forward runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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

    def __init__(
        self, grammar: Grammar, num_rows: int, eos_token_id: int, eos_token_ids: Collection[int], num_ids: int
    ) -> None:
        self._grammar, self._eos_token_id, self._eos_token_ids = grammar, eos_token_id, sorted(eos_token_ids)
        self.matchers: list[LLMatcher] = [grammar.matcher() for _ in range(num_rows)]
        self.num_words = -(-num_ids // 32)
        self._masks = np.zeros((0, self.num_words), np.int32)
        self._rows: list[int] = []

    def take_masks(self, rows: list[int], masks: NDArray[np.int32]) -> None:
        """Take the masks of some rows, ``[rows, words]``, which are filled afterwards."""
        self._rows, self._masks = rows, masks

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the scores ``[rows, vocab_size]`` with -inf for tokens that may not follow. ``input_ids`` is not read.

        Raises ArgumentError if the grammar needs more than its limits.
        """
        for row in self._rows:
            self._grammar.require_sound(self.matchers[row])
        bits = np.unpackbits(self._masks.view(np.uint8), axis=1, bitorder="little")
        may_end = bits[:, self._eos_token_id].copy()
        bits[:, self._eos_token_id] = 0
        bits[:, self._eos_token_ids] = may_end[:, None]
        blocked = torch.from_numpy(bits[:, : scores.shape[1]] == 0).to(scores.device)
        found: Tensor = scores.clone()
        found[self._rows] = found[self._rows].masked_fill_(blocked, float("-inf"))
        return found

    def advance(self, token_ids: Sequence[int]) -> None:
        """Go on after the next token of each row whose mask was taken."""
        for row in self._rows:
            if token_ids[row] not in self._eos_token_ids:
                self.matchers[row].consume_token(token_ids[row])
                self._grammar.require_sound(self.matchers[row])


def fill_masks(asked: list[tuple[FormRows, list[int]]]) -> None:
    """Compute the masks of these rows of some requests."""
    if not asked:
        return
    masks = np.empty((sum(len(rows) for _, rows in asked), asked[0][0].num_words), np.int32)
    jobs, at = [], 0
    for form, rows in asked:
        form.take_masks(rows, masks[at : at + len(rows)])
        jobs += [(form.matchers[row], at + number) for number, row in enumerate(rows)]
        at += len(rows)
    fill_next_token_bitmask_par(_executor(), jobs, masks)


@cache
def _executor() -> LLExecutor:
    return LLExecutor()
