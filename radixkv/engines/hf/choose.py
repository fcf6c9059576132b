"""The choice of next tokens: transformers' own logits processors, and a generator for each request.

All rows of a request are chosen together, as transformers' loop does: also rows that ended draw a random number. So a
request has the tokens of ``model.generate`` on its rows after ``torch.manual_seed(seed)``, whatever else is in the
batch. Greedy requests without processors are chosen in one call for all.

transformers has no processor for OpenAI's presence and frequency penalties, so there is one here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixkv.engines.hf.forms import FormRows
from radixkv.engines.protocol import Penalties, TokenLogprobs

Ids = NDArray[np.uint32]

_GROWTH_STEPS = 256


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

    - ``settings``: of ``model.generate``. ``prompts``: the ids before the first token, one a row.
    - ``is_plain``: whether neither the model's generation config nor ``settings`` has processors beside warpers: see
      ``has_own_processors``.
    - ``own``: processors of the request that aren't transformers'. ``form``: the form of its answers, one of them.
    - ``num_top``: the most likely tokens whose log probabilities ``logprobs`` has; None: it isn't called.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling,
        settings: dict[str, Any],
        prompts: list[Ids],
        is_plain: bool,
        own: list[LogitsProcessor],
        form: FormRows | None = None,
        num_top: int | None = None,
    ) -> None:
        self._sampling, self._prompts, self._device = sampling, prompts, model.device
        self.form, self.num_top = form, num_top
        self._pad_token_id = settings["pad_token_id"] or 0
        self._needs_ids = not is_plain or any(each is not form for each in own)
        self._known_ids: Tensor | None = None
        self._num_steps = 0
        width = max(len(prompt) for prompt in prompts)
        if is_plain:
            self._processors = LogitsProcessorList([*own, *_warpers(sampling)])
        else:
            ids = self._ids([[] for _ in prompts])
            columns = torch.arange(width, device=self._device)
            pads = torch.tensor([width - len(prompt) for prompt in prompts], device=self._device)
            mask = (columns >= pads[:, None]).long()
            self._processors = _stock_processors(model, settings, ids, mask, own)
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
            found = scores.argmax(-1)
        else:
            found = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[:, 0]
        return cast(list[int], found.tolist())

    def logprobs(self, logits: Tensor, token_ids: list[int]) -> list[TokenLogprobs]:
        """Return the log probabilities of tokens and of the likeliest ones. ``logits``: ``[tokens, vocab_size]``."""
        found = logits.float().log_softmax(-1)
        chosen = found.gather(1, torch.tensor(token_ids, device=found.device)[:, None])[:, 0].tolist()
        tops: list[list[tuple[int, float]]] = [[] for _ in token_ids]
        if self.num_top:
            values, ids = found.topk(min(self.num_top, found.shape[1]))
            tops = [list(zip(*each, strict=True)) for each in zip(ids.tolist(), values.tolist(), strict=True)]
        return [TokenLogprobs(*each) for each in zip(token_ids, chosen, tops, strict=True)]

    def _ids(self, chosen: list[list[int]]) -> Tensor:
        """The rows so far, ``[rows, tokens]``: padded on the left up to the longest prompt, and after their end.

        They are kept, and a step writes its column. So it costs nothing for the tokens before, except now and then.
        """
        width, steps = max(map(len, self._prompts)), max(map(len, chosen))
        if self._known_ids is None or self._known_ids.shape[1] < width + steps:
            self._known_ids = self._made_ids(chosen, width, steps + _GROWTH_STEPS)
        else:
            for step in range(self._num_steps, steps):
                column = [row[step] if step < len(row) else self._pad_token_id for row in chosen]
                self._known_ids[:, width + step] = torch.tensor(column, device=self._device)
        self._num_steps = steps
        return self._known_ids[:, : width + steps]

    def _made_ids(self, chosen: list[list[int]], width: int, steps: int) -> Tensor:
        ids = np.full((len(chosen), width + steps), self._pad_token_id, dtype=np.int64)
        for row, (prompt, tokens) in enumerate(zip(self._prompts, chosen, strict=True)):
            ids[row, width - len(prompt) : width] = prompt
            ids[row, width : width + len(tokens)] = tokens
        return torch.from_numpy(ids).to(self._device)


class OpenAIPenalties(LogitsProcessor):
    """Presence and frequency penalties: ``score − count · frequency − (count > 0) · presence``.

    ``count``: how often the answer has the token so far. The formula is that of OpenAI's guide "Advanced usage",
    "Frequency and presence penalties". ``width``: tokens of the padded prompts.
    """

    def __init__(self, presence: float, frequency: float, width: int) -> None:
        self._presence, self._frequency, self._width = presence, frequency, width

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the scores ``[rows, vocab_size]`` after the ids ``[rows, tokens]``.

        O(rows · (vocabulary + answer)).
        """
        answer = input_ids[:, self._width :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - counts * self._frequency - (counts > 0) * self._presence


def penalty_settings(penalties: Penalties) -> dict[str, Any]:
    """Return the settings of ``model.generate`` by which transformers' own processors apply penalties."""
    settings: dict[str, Any] = {}
    if penalties.repetition != 1.0:
        settings["repetition_penalty"] = float(penalties.repetition)
    if penalties.bias:
        settings["sequence_bias"] = [[[token_id], float(bias)] for token_id, bias in penalties.bias.items()]
    if penalties.min_new_tokens:
        settings["min_new_tokens"] = penalties.min_new_tokens
    return settings


def has_own_processors(model: PreTrainedModel, settings: dict[str, Any]) -> bool:
    """Whether the model's generation config has processors, such as a repetition penalty, beside ``settings``."""
    ids = torch.ones((1, 1), dtype=torch.long, device=model.device)
    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 1}
    return bool(_stock_processors(model, settings | neutral, ids, ids, []))


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
    model: PreTrainedModel, settings: dict[str, Any], ids: Tensor, mask: Tensor, own: list[LogitsProcessor]
) -> LogitsProcessorList:
    """Those that ``model.generate`` would make for prompts ``[rows, tokens]`` with this attention mask.

    ``own``: its argument ``logits_processor``.
    """
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
        logits_processor=LogitsProcessorList(own),
        device=ids.device,
        model_kwargs={"attention_mask": mask},
    )
    return found
