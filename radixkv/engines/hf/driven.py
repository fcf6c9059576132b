"""transformers' loop over a model whose forwards something else computes: a beam search that steps with others.

A twin of the model shares its weights and settings, but its ``forward`` asks for the logits of one token a row. So beam
scores, logits processors and stopping are stock code, and the KV of all beams is written by the batch's own forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from radixkv.engines.hf.packed import Newest
from radixkv.engines.hf.paged_cache import CACHE_ARGUMENT, PagedCache


def driven_twin(
    model: PreTrainedModel,
    paged: PagedCache,
    compute: Callable[[list[Newest]], Tensor],
    new_key: Callable[[], int],
) -> PreTrainedModel:
    """Return a twin of ``model`` whose forward takes one token a row, ``[rows, 1]``, of the rows of ``paged``.

    ``compute``: writes the KV of some tokens and returns the logits after them, ``[tokens, vocab_size]``.
    """
    twin: Any = copy(model)
    twin._forward_pre_hooks, twin._forward_hooks = OrderedDict(), OrderedDict()

    @wraps(model.forward)
    def forward(*args: Any, input_ids: Tensor, **others: Any) -> CausalLMOutputWithPast:
        begun = paged.with_room(paged.begin_packed_step, input_ids)
        asked = [
            Newest(new_key(), token_id, position, sequence.block_table)
            for token_id, position, sequence in begun
        ]
        logits = compute(asked)
        paged.end_packed_step()
        repeated = torch.repeat_interleave(logits, input_ids.shape[0] // len(asked), 0)
        output: Any = CausalLMOutputWithPast
        answer: CausalLMOutputWithPast = output(**{"logits": repeated[:, None], CACHE_ARGUMENT: paged})
        return answer

    twin.forward = forward
    made: PreTrainedModel = twin
    return made
