"""HFEngine: transformers models served through the prefix cache.

    prompts ──open──▶ leased prefix + blocks ──prefill──▶ PagedCache ──model.generate──▶ tokens
                              one row at a time: only what              all rows together
                              isn't cached, committed
                              chunk by chunk

The engine computes a prompt's KV up to its last token, each row by itself, because rows differ in what is cached. Then
transformers' own ``generate`` runs the loop over a PagedCache, from the last token on. So sampling, beams, logits
processors and stopping are stock code. The tokens are those of ``model.generate`` on the same prompts (left-padded,
with their attention mask). Keys and values are stored in the cache's blocks alone. Beams are forks of one sequence.

When a request ends, the KV of its output rows is committed, so that the next turn of a conversation finds it. This
covers all tokens of a row except the newest, which was never computed. Every sequence is released in any case: after a
normal end, a stop or an error.

One thread uses an engine at a time; the cache may be shared. While ``on_step``, ``stop``, ``on_chunk`` or
``on_no_room`` runs, other threads may use the engine, one at a time. So requests can be interleaved step by step, and
each gets the tokens that it would get alone.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.engines.hf", "hf")

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from radixkv.audit.invariants import inspect as inspect_laws
from radixkv.clock import Clock, monotonic
from radixkv.config import MAX_WEIGHTS, Namespace
from radixkv.engines.control import ControlServer
from radixkv.engines.engine_protocol import ABILITIES, Ability, EngineLimits, Generation, Prefill, WaitForRoom
from radixkv.engines.hf_cache import CACHE_ARGUMENT, PagedCache, layout_of
from radixkv.engines.hf_models import demo_model, fingerprint, load_model, max_model_len_of
from radixkv.engines.validation import check_arguments, eos_ids_of, is_batch
from radixkv.errors import ArgumentError, CapacityError, ConfigError, TokenError, wrong_count
from radixkv.index import tokens
from radixkv.index.cache import PrefixCache, RequestHints
from radixkv.index.sequence import Sequence
from radixkv.storage.device import DeviceStorage

__all__ = ["Generation", "HFEngine", "Prefill", "demo_model", "fingerprint", "layout_of", "load_model"]

Ids = NDArray[np.uint32]
R = TypeVar("R")

_STOCK_SETTINGS: dict[str, Any] = {
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


class _Prompt(NamedTuple):
    """A checked prompt: its key for the cache, and its ids for the model, which are a view of the key."""

    key: bytes
    ids: Ids


@dataclass(frozen=True, slots=True)
class _Request:
    """The validated arguments of a ``generate`` call."""

    namespace: Namespace
    prompts: list[_Prompt]
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

    @property
    def fanout(self) -> int:
        """Rows that decode each prompt."""
        return max(self.num_beams, self.num_return_sequences)

    @property
    def num_rows(self) -> int:
        """Rows that decode together."""
        return len(self.prompts) * self.fanout


class HFEngine:
    """Prefill and generation of one transformers model over one PrefixCache with storage.

    - ``tokenizer_digest``: SHA-256 of the tokenizer's files, a part of the fingerprint.
    - ``chunk_tokens``: prefill runs in chunks of this many tokens. Each is committed after it is computed.
    - ``lends_beams``: whether the device makes the steps of beam searches by itself (``PrefixCache.lend``). None: only
      if it is a GPU.
    - ``control``: the cache's control channel. Its commands run between steps of prefill and generation.

    Raises ConfigError if the cache has no storage or another layout or device, and if the model can't be served (see
    ``layout_of``).
    """

    abilities: Collection[Ability] = ABILITIES
    """All of them: see ``Engine``."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PrefixCache,
        *,
        tokenizer_digest: str = "",
        chunk_tokens: int = 512,
        clock: Clock = monotonic,
        lends_beams: bool | None = None,
        control: ControlServer | None = None,
    ) -> None:
        if not isinstance(chunk_tokens, int) or isinstance(chunk_tokens, bool) or chunk_tokens < 1:
            raise ConfigError("chunk_tokens", chunk_tokens, "an integer ≥ 1")
        if model.training:
            raise ConfigError("model.training", True, "a model in eval mode: model.eval()")
        layout = layout_of(model)
        storage = cache.storage
        if not isinstance(storage, DeviceStorage) or cache.config.layout != layout:
            raise ConfigError("cache.config.layout", cache.config.layout, f"the model's: {layout}")
        if storage.device != model.device:
            raise ConfigError("cache.config.device", cache.config.device, f"the model's: {model.device}")
        self._lends_beams = storage.device.type == "cuda" if lends_beams is None else bool(lends_beams)
        self.model, self.cache, self._control = model, cache, control
        self._storage, self._chunk_tokens, self._clock = storage, chunk_tokens, clock
        self.fingerprint = fingerprint(model, tokenizer_digest, cache.config.block_size)
        self.vocab_size = int(cast(Any, model.get_input_embeddings()).weight.shape[0])
        limit = max_model_len_of(model)
        self.max_model_len = cache.config.num_blocks * cache.config.block_size if limit is None else limit
        declared = eos_ids_of(model.generation_config.eos_token_id)
        self.eos_token_ids = frozenset(token_id for token_id in declared if 0 <= token_id < self.vocab_size)
        self._pad_token_id: int | None = model.generation_config.pad_token_id
        self._keeps_logits = "logits_to_keep" in _parameters(model)
        self._weights_version = 0

    @property
    def limits(self) -> EngineLimits:
        """What a request may need: see ``EngineLimits``."""
        config = self.cache.config
        return EngineLimits(self.vocab_size, self.max_model_len, config.num_blocks, config.block_size)

    def health(self) -> list[str]:
        """Return no reason to replace the process. Raises IntegrityError if the cache can't be repaired. O(1)."""
        if self.cache.is_broken:
            self.cache.require_alive()  # repairs it, if possible
        return []

    def audit(self) -> list[str]:
        """Return which laws the cache breaks now (``radixkv.audit.invariants``). O(resident blocks), in slices."""
        return [str(violation) for violation in inspect_laws(self.cache).violations]

    @property
    def weights_version(self) -> int:
        """Version of the weights, 0 when the engine is made. It is in each of its namespaces."""
        return self._weights_version

    def weights_changed(self, version: int | None = None) -> int:
        """Raise the version of the weights, after they were changed in place. Returns the new version.

        ``version``: a higher number that all replicas give to these weights, such as a training step. None: the next
        number.

        Call it before the next request, while the engine computes nothing. The cache forgets all KV of this model's
        earlier versions, with their pins and bases: see ``PrefixCache.clear``. Requests that are running continue
        with the KV that they have, and nothing of that is matched later. The fingerprint stays. Raises ArgumentError,
        and changes nothing, for another ``version``.
        """
        least, wanted = self._weights_version + 1, self._weights_version + 1 if version is None else version
        if not isinstance(wanted, int) or isinstance(wanted, bool) or not least <= wanted <= MAX_WEIGHTS:
            raise ArgumentError("version", wanted, f"an integer from {least} to {MAX_WEIGHTS}")
        self._weights_version = wanted
        for namespace in self.cache.namespaces():
            if namespace.model == self.fingerprint and namespace.weights < self._weights_version:
                self.cache.clear(namespace)
        return self._weights_version

    def namespace(self, tenant: str, adapter: str | None = None, salt: str = "") -> Namespace:
        """Return the tenant's namespace for this model and its present weights.

        Its ``model`` is the engine's fingerprint.
        """
        return Namespace(tenant, self.fingerprint, adapter, salt, self._weights_version)

    # Prefill --------------------------------------------------------------------------------------------------

    def prefill(
        self,
        ns: Namespace,
        ids: tokens.TokenIds,
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        on_no_room: WaitForRoom | None = None,
        hints: RequestHints | None = None,
    ) -> Prefill:
        """Compute the KV of all tokens of ``ids`` that aren't cached, and commit it chunk by chunk.

        - ``on_chunk(done, total)`` is called after each chunk with the tokens that are done.
        - ``on_no_room(error)`` is called if there are too few blocks; True tries again.
        - ``hints``: see ``PrefixCache.open``.

        Raises TokenError and ArgumentError for ids that the model can't process, and CapacityError for too few blocks.
        Nothing stays open.
        """
        self._check_namespace(ns)
        prompt = self._check_prompt(ids, "ids", self.max_model_len)
        return self._prefill(
            prompt, on_chunk, on_no_room, lambda: self.cache.open(self._now(ns), prompt.key, hints=hints)
        )

    def publish(
        self,
        base_id: str,
        ns: Namespace,
        ids: tokens.TokenIds,
        readers: Iterable[str],
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        on_no_room: WaitForRoom | None = None,
    ) -> Prefill:
        """Compute the whole blocks of ``ids``, and publish them for other tenants: see ``PrefixCache.publish``.

        The base is readable when this returns. Raises like ``PrefixCache.publish`` and ``prefill``; then nothing is
        published.
        """
        self._check_namespace(ns)
        prompt = self._check_prompt(ids, "ids", self.max_model_len)
        size = self.cache.config.block_size
        num_tokens = len(prompt.ids)
        num_tokens = max(num_tokens // size * size, min(num_tokens, 1))
        prompt = _Prompt(prompt.key[: num_tokens * tokens.TOKEN_BYTES], prompt.ids[:num_tokens])
        return self._prefill(
            prompt,
            on_chunk,
            on_no_room,
            lambda: self.cache.publish(base_id, self._now(ns), prompt.key, readers),
        )

    def _prefill(
        self,
        prompt: _Prompt,
        on_chunk: Callable[[int, int], None] | None,
        on_no_room: WaitForRoom | None,
        open_sequence: Callable[[], Sequence],
    ) -> Prefill:
        started, num_tokens = self._clock(), len(prompt.ids)
        with _with_room(open_sequence, on_no_room) as sequence:
            cached = sequence.num_cached_tokens
            paged = self._paged([sequence], [cached])
            with paged.attached(self.model):
                for done in self._compute(paged, prompt.ids):
                    if on_chunk is not None:
                        on_chunk(done, num_tokens)
            num_blocks = sequence.num_blocks
        return Prefill(num_tokens, cached, num_tokens - cached, num_blocks, self._clock() - started)

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
        request: _Request | None = None,
        watcher: _Watcher | None = None,
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

    # Generation -----------------------------------------------------------------------------------------------

    def generate(
        self,
        ns: Namespace,
        ids: Any,
        max_new_tokens: int,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        num_beams: int = 1,
        num_return_sequences: int = 1,
        eos_token_id: int | Iterable[int] | None = None,
        on_step: Callable[[list[list[int]]], None] | None = None,
        stop: Callable[[], bool] | None = None,
        on_no_room: WaitForRoom | None = None,
        hints: RequestHints | None = None,
    ) -> Generation:
        """Continue one prompt (ids in any form) or a batch of them (a list of prompts).

        The tokens are those of ``model.generate`` with these arguments, on the left-padded prompts with their attention
        mask. ``top_k=None`` means no top-k. With ``do_sample`` and a ``seed``, they are the tokens after
        ``torch.manual_seed(seed)``, and torch's random state is restored afterwards. Without a ``seed``, torch's random
        state is used and advanced.

        - ``eos_token_id``: None for the model's own; -1 or an empty list for never.
        - ``on_step``: called after each step with the new token of each output row, ``[]`` for rows that ended. Not
          with beams.
        - ``stop``: called after each prefill chunk and each step. True ends the request with the tokens so far.
        - ``on_no_room``: called with the error when a step finds too few blocks. True tries the step again.
        - ``hints``: what eviction policies may use of these requests, the same for all: see ``PrefixCache.open``.

        Raises before it changes anything: TokenError for ids that aren't token ids or lie outside the vocabulary, and
        ArgumentError for everything else. Raises CapacityError if the pool can't hold the rows, also in the middle. In
        any case nothing stays open, and what was committed stays matchable.
        """
        started = self._clock()
        request = self._check_request(
            ns,
            ids,
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            eos_token_ids=self.eos_token_ids if eos_token_id is None else eos_ids_of(eos_token_id),
            on_step=on_step,
            stop=stop,
            on_no_room=on_no_room,
            hints=hints,
        )
        watcher = _Watcher(request, self._clock, _Random(request.seed, self.model.device), self._control)
        with ExitStack() as stack:
            pages = self._prefill_rows(request, watcher, stack)
            cached = [page.sequences[0].num_cached_tokens for page in pages]
            rows = None if watcher.stopped else self._decode(request, watcher, pages, stack)
        seconds = self._clock() - started
        return _generation(request, rows, cached, watcher, started, seconds)

    def _prefill_rows(self, request: _Request, watcher: _Watcher, stack: ExitStack) -> list[PagedCache]:
        """Open each prompt and compute all but its last token. Ends early if the caller asks to stop."""
        pages: list[PagedCache] = []
        for prompt in request.prompts:
            opening = partial(self._open, request, prompt)
            sequence = stack.enter_context(_with_room(opening, request.on_no_room))
            page = self._paged([sequence], [sequence.num_cached_tokens], request, watcher)
            pages.append(page)
            with page.attached(self.model):
                for _ in self._compute(page, prompt.ids[:-1]):
                    if watcher.ask_to_stop():
                        return pages
            if request.num_rows > 1:
                page.drop_working_copy()
        return pages

    def _open(self, request: _Request, prompt: _Prompt) -> Sequence:
        return self.cache.open(self._now(request.namespace), prompt.key, hints=request.hints)

    def _now(self, ns: Namespace) -> Namespace:
        """Return a request's namespace with the present version: the weights may have changed while it waited."""
        return ns._replace(weights=self._weights_version)

    def _decode(
        self, request: _Request, watcher: _Watcher, pages: list[PagedCache], stack: ExitStack
    ) -> list[list[int]]:
        """Run transformers' own loop over all rows. Returns the new tokens of each output row."""
        if request.num_rows == 1:
            paged = pages[0]
        else:
            computed = [len(prompt.ids) - 1 for prompt in request.prompts]
            sequences = [page.sequences[0] for page in pages]
            paged = self._paged(sequences, computed, request, watcher, fanout=request.fanout)
        stack.callback(paged.release)
        input_ids, attention_mask = self._pad(request.prompts)
        with paged.attached(self.model), watcher.random.inside():
            output: Tensor = cast(Any, self.model).generate(
                input_ids,
                attention_mask=attention_mask,
                stopping_criteria=StoppingCriteriaList([watcher]),
                **{CACHE_ARGUMENT: paged},
                **self._settings(request),
            )
        paged.settle()
        rows = [_until_end(row, request.eos_token_ids) for row in output[:, input_ids.shape[1] :].tolist()]
        _commit_outputs(paged, request, rows)
        return rows

    def _settings(self, request: _Request) -> dict[str, Any]:
        """Generation settings by name, as arguments of ``model.generate``."""
        return {
            **_STOCK_SETTINGS,
            "max_new_tokens": request.max_new_tokens,
            "do_sample": request.do_sample,
            "temperature": request.temperature if request.do_sample else None,
            "top_k": (request.top_k or 0) if request.do_sample else None,
            "top_p": request.top_p if request.do_sample else None,
            "num_beams": request.num_beams,
            "num_return_sequences": request.num_return_sequences,
            "eos_token_id": sorted(request.eos_token_ids) or None,
            "pad_token_id": self._pad_token_id,
        }

    def _pad(self, prompts: list[_Prompt]) -> tuple[Tensor, Tensor]:
        """Return the prompts left-padded, ``[prompts, longest]``, and the mask of the positions that aren't padding."""
        width = max(len(prompt.ids) for prompt in prompts)
        ids = np.full((len(prompts), width), self._pad_token_id or 0, dtype=np.int64)
        mask = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = prompt.ids
            mask[row, width - len(prompt.ids) :] = 1
        return torch.from_numpy(ids).to(self.model.device), torch.from_numpy(mask).to(self.model.device)

    # Checks ---------------------------------------------------------------------------------------------------

    def _check_request(self, ns: Namespace, ids: Any, **arguments: Any) -> _Request:
        self._check_namespace(ns)
        check_arguments(arguments)
        outside = [token_id for token_id in arguments["eos_token_ids"] if not 0 <= token_id < self.vocab_size]
        if outside:
            raise ArgumentError(
                "eos_token_id", outside[0], f"ids from 0 to {self.vocab_size - 1}, or -1 for never"
            )
        if not is_batch(ids):
            prompts = [self._check_prompt(ids, "ids", self.max_model_len - 1)]
        else:
            prompts = [
                self._check_prompt(row, f"ids[{index}]", self.max_model_len - 1)
                for index, row in enumerate(ids)
            ]
        longest = max(len(prompt.ids) for prompt in prompts)
        if longest + arguments["max_new_tokens"] > self.max_model_len:
            allowed = f"1 to {self.max_model_len - longest} after a prompt of {longest} tokens"
            raise ArgumentError("max_new_tokens", arguments["max_new_tokens"], allowed)
        return _Request(namespace=ns, prompts=prompts, **arguments)

    def _check_namespace(self, ns: Namespace) -> None:
        if not isinstance(ns, Namespace):
            raise ArgumentError("ns", ns, "a Namespace")
        if ns.model != self.fingerprint:
            raise ArgumentError("ns.model", ns.model, f"this engine's fingerprint, {self.fingerprint}")
        if ns.weights != self._weights_version:
            allowed = f"the version of this engine's weights, {self._weights_version}"
            raise ArgumentError("ns.weights", ns.weights, allowed)

    def _check_prompt(self, ids: tokens.TokenIds, field: str, max_tokens: int) -> _Prompt:
        """Check a prompt and convert it once. A prompt that is a key already isn't converted."""
        try:
            key = tokens.encode(ids)
        except TokenError as error:
            raise TokenError(f"{field}: {error}", error.index) from None
        found = tokens.decode(key)
        if not 1 <= len(found) <= max_tokens:
            raise wrong_count(field, len(found), f"1 to {max_tokens} tokens")
        if int(found.max()) >= self.vocab_size:
            index = int(np.argmax(found >= self.vocab_size))
            allowed = f"ids of the vocabulary, 0 to {self.vocab_size - 1}"
            raise TokenError(
                f"{field}[{index}]={int(found[index])} is not allowed; allowed: {allowed}", index
            )
        return _Prompt(key, found)


class _Watcher(StoppingCriteria):
    """A hook in transformers' loop: records the first token's time, reports steps, and asks whether to stop."""

    def __init__(
        self, request: _Request, clock: Clock, random: _Random, control: ControlServer | None
    ) -> None:
        self._request, self._clock, self.random, self._control = request, clock, random, control
        self._ended = [False] * request.num_rows
        self.first_token_at: float | None = None
        self.stopped = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """For each row of ``input_ids``, ``[rows, tokens so far]``: whether it ends here."""
        if self.first_token_at is None:
            self.first_token_at = self._clock()
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


class _Random:
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


def _with_room(step: Callable[[], R], on_no_room: WaitForRoom | None) -> R:
    """Return the result of a step. It is tried again as long as it finds too few blocks and ``on_no_room`` says so."""
    while True:
        try:
            return step()
        except CapacityError as error:
            if on_no_room is None or not on_no_room(error):
                raise


def _commit_outputs(paged: PagedCache, request: _Request, rows: list[list[int]]) -> None:
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


def _generation(
    request: _Request,
    rows: list[list[int]] | None,
    cached: list[int],
    watcher: _Watcher,
    started: float,
    seconds: float,
) -> Generation:
    if rows is None:  # stopped before the first token
        rows = [[] for _ in range(len(request.prompts) * request.num_return_sequences)]
    return Generation(
        token_ids=rows,
        num_prompt_tokens=[len(prompt.ids) for prompt in request.prompts],
        num_cached_tokens=cached + [0] * (len(request.prompts) - len(cached)),
        finish_reasons=[_finish_reason(row, request) for row in rows],
        time_to_first_token_s=seconds if watcher.first_token_at is None else watcher.first_token_at - started,
        seconds=seconds,
    )


def _finish_reason(row: list[int], request: _Request) -> Literal["stop", "length"]:
    is_whole = len(row) == request.max_new_tokens
    return "length" if is_whole and row[-1] not in request.eos_token_ids else "stop"


def _until_end(row: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """Return the row up to and including its end-of-sequence token; padding follows it."""
    for index, token_id in enumerate(row):
        if token_id in eos_token_ids:
            return row[: index + 1]
    return row


def _parameters(model: PreTrainedModel) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)
