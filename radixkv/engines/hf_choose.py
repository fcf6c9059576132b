"""The choice of next tokens: transformers' own logits processors, and a generator for each request.

All rows of a request are chosen together, as transformers' loop does: also rows that ended draw a random number. So a
request has the tokens of ``model.generate`` on its rows after ``torch.manual_seed(seed)``, whatever else is in the
batch. Greedy requests without processors are chosen in one call for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

Ids = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request chooses: greedy, or by sampling. ``top_k`` and ``top_p``: None for all tokens."""

    do_sample: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None


class Chooser:
    """Chooses the next tokens of one request.

    ``settings``: of ``model.generate``. ``prompts``: the ids before the first token, one a row. ``is_plain``: whether
    the model's generation config has no processors of its own: see ``has_own_processors``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling,
        settings: dict[str, Any],
        prompts: list[Ids],
        is_plain: bool,
    ) -> None:
        self._sampling, self._prompts, self._device = sampling, prompts, model.device
        self._pad_token_id = settings["pad_token_id"] or 0
        self._needs_ids = not is_plain
        width = max(len(prompt) for prompt in prompts)
        if is_plain:
            self._processors = _warpers(sampling)
        else:
            ids = self._ids([[] for _ in prompts])
            columns = torch.arange(width, device=self._device)
            pads = torch.tensor([width - len(prompt) for prompt in prompts], device=self._device)
            mask = (columns >= pads[:, None]).long()
            self._processors = _stock_processors(model, settings, ids, mask)
        self._generator: torch.Generator | None = None
        if sampling.do_sample and sampling.seed is not None:
            self._generator = torch.Generator(self._device).manual_seed(sampling.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is the choice."""
        return not self._sampling.do_sample and not self._processors

    def choose(self, logits: Tensor, chosen: list[list[int]]) -> list[int]:
        """Return the next token of each row. ``logits``: ``[rows, vocab_size]``; ``chosen``: the tokens so far.

        With a seed, torch's random state doesn't change.
        """
        scores = logits.float()
        if self._processors:
            ids: Any = self._ids(chosen) if self._needs_ids else None  # warpers read none
            scores = self._processors(ids, cast(Any, scores))
        if not self._sampling.do_sample:
            return cast(list[int], scores.argmax(-1).tolist())
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        return cast(list[int], drawn[:, 0].tolist())

    def _ids(self, chosen: list[list[int]]) -> Tensor:
        """The rows so far, ``[rows, tokens]``: padded on the left up to the longest prompt, and after their end."""
        width, steps = max(map(len, self._prompts)), max(map(len, chosen))
        ids = np.full((len(chosen), width + steps), self._pad_token_id, dtype=np.int64)
        for row, (prompt, tokens) in enumerate(zip(self._prompts, chosen, strict=True)):
            ids[row, width - len(prompt) : width] = prompt
            ids[row, width : width + len(tokens)] = tokens
        return torch.from_numpy(ids).to(self._device)


def has_own_processors(model: PreTrainedModel, settings: dict[str, Any]) -> bool:
    """Whether the model's generation config has processors, such as a repetition penalty, beside ``settings``."""
    ids = torch.ones((1, 1), dtype=torch.long, device=model.device)
    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 1}
    return bool(_stock_processors(model, settings | neutral, ids, ids))


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """Those of transformers for these settings, in its order."""
    found = LogitsProcessorList()
    if sampling.do_sample:
        if sampling.temperature != 1.0:
            found.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k is not None:
            found.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1.0:
            found.append(TopPLogitsWarper(sampling.top_p))
    return found


def _stock_processors(
    model: PreTrainedModel, settings: dict[str, Any], ids: Tensor, mask: Tensor
) -> LogitsProcessorList:
    """Those that ``model.generate`` would make for prompts ``[rows, tokens]`` with this attention mask."""
    stock: Any = model
    config, _ = stock._prepare_generation_config(None, **settings)
    stock._prepare_special_tokens(config, True, device=ids.device)
    config.max_length = ids.shape[1] + config.max_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = ids.shape[1] + config.min_new_tokens
    found: LogitsProcessorList = stock._get_logits_processor(
        config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        device=ids.device,
        model_kwargs={"attention_mask": mask},
    )
    return found
