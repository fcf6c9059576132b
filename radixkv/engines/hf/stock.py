"""transformers' own loop over the paged cache: for beam searches, and models that a packed forward doesn't serve.

    prompts ──open──▶ leased prefix + blocks ──prefill──▶ PagedCache ──model.generate──▶ tokens
                              one row at a time: only what              all rows together
                              isn't cached, committed
                              chunk by chunk

The prompts' KV are computed up to the last token, each row by itself, because rows differ in what is cached. Then
transformers' own ``generate`` runs the loop over a PagedCache, from the last token on. So sampling, beams, logits
processors and stopping are stock code. Beams are forks of one sequence.

A request runs alone. In its callbacks others may go on, so requests are interleaved step by step. Where the batch
computes the forwards of a beam search (``driven``), only the loop is this one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.engines.control.server import ControlServer
from radixkv.engines.grammars import Grammar
from radixkv.engines.hf.choose import OpenAIPenalties, penalty_settings
from radixkv.engines.hf.forms import FormInLoop, FormRows
from radixkv.engines.hf.paged_cache import CACHE_ARGUMENT, PagedCache
from radixkv.engines.hf.request import Ids, Prompt
from radixkv.engines.protocol import Logprobs, Penalties, Prefill, Tally, WaitForRoom
from radixkv.errors import CapacityError
from radixkv.index.cache import PrefixCache, RequestHints
from radixkv.index.sequence import Sequence
from radixkv.storage.device import DeviceStorage
from radixkv.uncopied import refuse_copies

R = TypeVar("R")

STOCK_SETTINGS: dict[str, Any] = {
    "use_cache": True,
    "cache_implementation": None,
    "prefill_chunk_size": None,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "assistant_early_exit": None,
    "constraints": None,
    "dola_layers": None,
    "force_words_ids": None,
    "low_memory": None,
    "num_beam_groups": None,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "use_mtp": None,
    "guidance_scale": None,
    "stop_strings": None,
    "token_healing": False,
    "max_time": None,
}
"""Settings of a model's own generation config that would change the loop or what it returns."""


@dataclass(frozen=True, slots=True)
class Request:
    """The validated arguments of a ``generate`` call."""

    namespace: Namespace
    prompts: list[Prompt]
    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None
    num_beams: int
    num_return_sequences: int
    eos_token_ids: frozenset[int]
    on_step: Callable[[list[list[int]]], None] | None
    stop: Callable[[], bool] | None
    on_no_room: WaitForRoom | None
    hints: RequestHints | None
    as_of: int | None
    tally: Tally
    penalties: Penalties
    form: Grammar | None
    logprobs: Logprobs | None

    @property
    def fanout(self) -> int:
        """Rows that decode each prompt."""
        return max(self.num_beams, self.num_return_sequences)

    @property
    def num_rows(self) -> int:
        """Rows that decode together."""
        return len(self.prompts) * self.fanout


class StockLoop:
    """Prefill and generation of one request at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PrefixCache,
        storage: DeviceStorage,
        chunk_tokens: int,
        clock: Clock,
        control: ControlServer | None,
        lends_beams: bool,
    ) -> None:
        self.model, self.cache, self._control = model, cache, control
        self._storage, self._chunk_tokens, self._clock = storage, chunk_tokens, clock
        self._lends_beams = lends_beams
        self._weights_version = 0
        self._pad_token_id: int | None = model.generation_config.pad_token_id
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def _prefill(
        self,
        prompt: Prompt,
        on_chunk: Callable[[int, int], None] | None,
        on_no_room: WaitForRoom | None,
        open_sequence: Callable[[], Sequence],
        tally: Tally,
    ) -> Prefill:
        started, num_tokens = self._clock(), len(prompt.ids)
        with ExitStack() as stack:
            sequence = _begun(stack, open_sequence, on_no_room, tally, self._clock)
            paged = self._paged([sequence], [tally.num_cached[0]])
            with paged.attached(self.model):
                for done in self._compute(paged, prompt.ids):
                    tally.reach(0, done)
                    if on_chunk is not None:
                        on_chunk(done, num_tokens)
            num_blocks = sequence.num_blocks
        cached, seconds = tally.num_cached[0], self._clock() - started
        return Prefill(num_tokens, cached, num_tokens - cached, num_blocks, seconds, tally.loaded)

    @torch.no_grad()
    def _compute(self, paged: PagedCache, ids: Ids) -> Iterator[int]:
        """Prefill the one row of an attached ``paged`` to the end of ``ids``. Yields the tokens done so far."""
        settings: dict[str, Any] = {CACHE_ARGUMENT: paged, "use_cache": True}
        if self._keeps_logits:
            settings["logits_to_keep"] = 1
        while paged.width < len(ids):
            chunk = ids[paged.width : paged.width + self._chunk_tokens]
            input_ids = torch.from_numpy(chunk.astype(np.int64)).to(self.model.device)[None]
            self.model(input_ids=input_ids, **settings)
            paged.commit()
            if self._control is not None:
                self._control.run_pending()
            yield paged.width

    def _paged(
        self,
        sequences: list[Sequence],
        num_computed: list[int],
        request: Request | None = None,
        watcher: Watcher | None = None,
        fanout: int = 1,
    ) -> PagedCache:
        # A beam that ends leaves the running beams, so an end-of-sequence token never ends a running one.
        eos = request.eos_token_ids if request is not None and request.num_beams == 1 else frozenset[int]()
        is_search = self._lends_beams and fanout > 1 and request is not None and request.num_beams > 1
        return PagedCache(
            self.cache,
            self._storage,
            sequences,
            num_computed,
            fanout=fanout,
            eos_token_ids=eos,
            beam_steps=request.max_new_tokens if request is not None and is_search else 0,
            on_no_room=None if watcher is None else watcher.wait_for_room,
        )

    def _prefill_rows(self, request: Request, watcher: Watcher, stack: ExitStack) -> list[PagedCache]:
        """Open each prompt and compute all but its last token. Ends early if the caller asks to stop."""
        pages: list[PagedCache] = []
        for prompt in request.prompts:
            opening, tally = partial(self._open, request, prompt), request.tally
            sequence = _begun(stack, opening, request.on_no_room, tally, self._clock)
            page = self._paged([sequence], [tally.num_cached[-1]], request, watcher)
            pages.append(page)
            with page.attached(self.model):
                for done in self._compute(page, prompt.ids[:-1]):
                    tally.reach(len(pages) - 1, done)
                    if watcher.ask_to_stop():
                        return pages
            if request.num_rows > 1:
                page.drop_working_copy()
        return pages

    def _open(self, request: Request, prompt: Prompt) -> Sequence:
        namespace = self._now(request.namespace)
        return self.cache.open(namespace, prompt.key, hints=request.hints, as_of=request.as_of)

    def _now(self, ns: Namespace) -> Namespace:
        """Return a request's namespace with the present version: the weights may have changed while it waited."""
        return ns._replace(weights=self._weights_version)

    def _decode(
        self, request: Request, watcher: Watcher, pages: list[PagedCache], stack: ExitStack
    ) -> list[list[int]]:
        """Run transformers' own loop over all rows. Returns the new tokens of each output row."""
        if request.num_rows == 1:
            paged = pages[0]
        else:
            computed = [len(prompt.ids) - 1 for prompt in request.prompts]
            sequences = [page.sequences[0] for page in pages]
            paged = self._paged(sequences, computed, request, watcher, fanout=request.fanout)
        stack.callback(paged.release)
        with paged.attached(self.model):
            return self._loop(self.model, request, watcher, paged)

    def _loop(
        self, model: PreTrainedModel, request: Request, watcher: Watcher, paged: PagedCache
    ) -> list[list[int]]:
        """Run the loop of ``model``, whose forward fills ``paged``. Returns the new tokens of each output row."""
        input_ids, attention_mask = self._pad(request.prompts)
        with watcher.random.inside():
            output: Tensor = cast(Any, model).generate(
                input_ids,
                attention_mask=attention_mask,
                stopping_criteria=StoppingCriteriaList([watcher]),
                logits_processor=LogitsProcessorList([*self.processors_of(request), *_bound(request)]),
                **{CACHE_ARGUMENT: paged},
                **self.settings_of(request),
            )
        paged.settle()
        rows = [until_end(row, request.eos_token_ids) for row in output[:, input_ids.shape[1] :].tolist()]
        _commit_outputs(paged, request, rows)
        return rows

    def settings_of(self, request: Request) -> dict[str, Any]:
        """Generation settings by name, as arguments of ``model.generate``."""
        return {
            **STOCK_SETTINGS,
            "max_new_tokens": request.max_new_tokens,
            "do_sample": request.do_sample,
            "temperature": request.temperature if request.do_sample else None,
            "top_k": (request.top_k or 0) if request.do_sample else None,
            "top_p": request.top_p if request.do_sample else None,
            "num_beams": request.num_beams,
            "num_return_sequences": request.num_return_sequences,
            "eos_token_id": sorted(request.eos_token_ids) or None,
            "pad_token_id": self._pad_token_id,
            **penalty_settings(request.penalties),
        }

    def processors_of(self, request: Request) -> list[LogitsProcessor]:
        """Logits processors of a request that transformers doesn't have."""
        penalties = request.penalties
        if not penalties.presence and not penalties.frequency:
            return []
        width = max(len(prompt.ids) for prompt in request.prompts)
        return [OpenAIPenalties(penalties.presence, penalties.frequency, width)]

    def _pad(self, prompts: list[Prompt]) -> tuple[Tensor, Tensor]:
        """Return the prompts left-padded, ``[prompts, longest]``, and the mask of the positions that aren't padding."""
        width = max(len(prompt.ids) for prompt in prompts)
        ids = np.full((len(prompts), width), self._pad_token_id or 0, dtype=np.int64)
        mask = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = prompt.ids
            mask[row, width - len(prompt.ids) :] = 1
        return torch.from_numpy(ids).to(self.model.device), torch.from_numpy(mask).to(self.model.device)


refuse_copies(StockLoop, "it holds a model, threads and a cache. Make another")


class Watcher(StoppingCriteria):
    """A hook in transformers' loop: records the first token's time, reports steps, and asks whether to stop."""

    def __init__(self, request: Request, clock: Clock, random: Random, control: ControlServer | None) -> None:
        self._request, self._clock, self.random, self._control = request, clock, random, control
        self._ended = [False] * request.num_rows
        self.first_token_at: float | None = None
        self.stopped = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """For each row of ``input_ids``, ``[rows, tokens so far]``: whether it ends here."""
        tally = self._request.tally
        if self.first_token_at is None:
            self.first_token_at = self._clock()
            for at, prompt in enumerate(self._request.prompts):
                tally.reach(at, len(prompt.ids))
        tally.num_chosen += 1
        if self._request.on_step is not None:
            step = self._step(input_ids[:, -1].tolist())
            with self.random.outside():
                self._request.on_step(step)
        if self._control is not None:
            self._control.run_pending()
        self.ask_to_stop()
        return torch.full((input_ids.shape[0],), self.stopped, dtype=torch.bool, device=input_ids.device)

    def ask_to_stop(self) -> bool:
        """Ask the caller whether to stop. After the first yes, the answer stays yes."""
        if self._request.stop is not None and not self.stopped:
            with self.random.outside():
                self.stopped = bool(self._request.stop())
        return self.stopped

    def wait_for_room(self, error: CapacityError) -> bool:
        """Whether the caller wants to try again."""
        if self._request.on_no_room is None:
            return False
        with self.random.outside():
            return self._request.on_no_room(error)

    def _step(self, newest: list[int]) -> list[list[int]]:
        step = [[] if ended else [token_id] for token_id, ended in zip(newest, self._ended, strict=True)]
        for row, token_id in enumerate(newest):
            self._ended[row] = self._ended[row] or token_id in self._request.eos_token_ids
        return step


class Random:
    """The device's random state of a request with a seed. It is set in ``inside``, except within ``outside``.

    So the caller, and other requests that run in its callbacks, find the state that they left; so does this request.
    Without a seed nothing is set. Each ``outside`` copies a state of 5 kB twice.
    """

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._outer: list[Tensor] | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Set the random state to that after ``torch.manual_seed(seed)``; afterwards, restore the previous state."""
        if self._seed is None:
            yield
            return
        self._outer = self._state()
        try:
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):
                    torch.cuda.manual_seed(self._seed)
            else:
                torch.default_generator.manual_seed(self._seed)
            yield
        finally:
            self._set(self._outer)
            self._outer = None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Set the caller's random state, within ``inside``."""
        if self._outer is None:
            yield
            return
        own = self._state()
        self._set(self._outer)
        try:
            yield
        finally:
            self._outer = self._state()
            self._set(own)

    def _state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)


def _bound(request: Request) -> list[LogitsProcessor]:
    """Return what binds the rows of a request to its form, in the loop."""
    if request.form is None:
        return []
    rows, eos_token_ids = (
        FormRows(request.form, request.num_rows, request.eos_token_ids),
        request.eos_token_ids,
    )
    return [
        FormInLoop(rows, request.num_rows, eos_token_ids, max(len(prompt.ids) for prompt in request.prompts))
    ]


def _with_room(step: Callable[[], R], on_no_room: WaitForRoom | None) -> R:
    """Return the result of a step. It is tried again as long as it finds too few blocks and ``on_no_room`` says so."""
    while True:
        try:
            return step()
        except CapacityError as error:
            if on_no_room is None or not on_no_room(error):
                raise


def _begun(
    stack: ExitStack,
    open_sequence: Callable[[], Sequence],
    on_no_room: WaitForRoom | None,
    tally: Tally,
    clock: Clock,
) -> Sequence:
    """Open the next prompt for the time of a stack. In the end the tenant's statistics get what the tally has."""
    sequence = stack.enter_context(_with_room(open_sequence, on_no_room))
    at, found = len(tally.num_cached), sequence.num_cached_tokens
    tally.begin(found)
    _load(sequence, tally, clock)
    stack.callback(lambda: sequence.recount(1, tally.num_cached[at], tally.num_computed[at]))
    return sequence


def _load(sequence: Sequence, tally: Tally, clock: Clock) -> None:
    """Load what the tiers have of a sequence that was just opened. Waits for a disk, for less than computing takes."""
    loading = sequence.loading
    if loading is None:
        return
    began_at, found = clock(), sequence.num_committed_tokens
    loading.wait()
    num_tokens = sequence.num_committed_tokens - found
    num_host = min(num_tokens, loading.num_host_tokens)
    tally.num_cached[-1] += num_tokens
    tally.loading_s += clock() - began_at
    if tally.num_loaded is not None:
        tally.num_loaded["host"] += num_host
        tally.num_loaded["disk"] += num_tokens - num_host


def _commit_outputs(paged: PagedCache, request: Request, rows: list[list[int]]) -> None:
    """Commit the KV of the output rows, as far as a decoded row holds it.

    A sampled row is a decoded row. A beam that ended before others may have no row left. Then what the closest row
    shares with it is committed.
    """
    group = len(paged.sequences) // len(request.prompts)
    for index, row in enumerate(rows):
        prompt = index // request.num_return_sequences
        wanted = np.concatenate([request.prompts[prompt].ids, np.array(row, dtype=np.uint32)])
        shared, closest = max(
            (_num_shared(paged.sequences[at].token_ids[: paged.lengths[at]], wanted), at)
            for at in range(prompt * group, (prompt + 1) * group)
        )
        sequence = paged.sequences[closest]
        if shared > sequence.num_committed_tokens:
            sequence.commit(shared)


def _num_shared(left: Ids, right: Ids) -> int:
    """Return the number of equal leading ids."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(np.argmax(differs)) if differs.any() else length


def until_end(row: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """Return the row up to and including its end-of-sequence token; padding follows it."""
    for index, token_id in enumerate(row):
        if token_id in eos_token_ids:
            return row[: index + 1]
    return row
