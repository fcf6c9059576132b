"""HFEngine: transformers models served through the prefix cache.

    prompts ──open──▶ leased prefix + blocks ──┐
    newest tokens of running requests ─────────┴─▶ one forward a step ──▶ next tokens

Requests step together: see ``batch``. A prompt's KV are computed in chunks beside the other requests' next tokens, and
committed chunk by chunk. The tokens are those of ``model.generate`` on the same prompts (left-padded, with their
attention mask). Keys and values are stored in the cache's blocks. A beam search is transformers' loop, whose forwards
are a part of the batch's steps, or the device's own steps on a GPU. Models with an attention of their own run in that
loop alone: see ``stock``.

When a request ends, the KV of its output rows is committed, so that the next turn of a conversation finds it. This
covers all tokens of a row except the newest, which was never computed. Every sequence is released in any case: after a
normal end, a stop or an error.

Several threads may use an engine. Requests of one batch that are in their callbacks (``on_step``, ``stop``,
``on_chunk``, ``on_no_room``) don't keep the others from going on. Each gets the tokens that it would get alone. One
thread may also run all requests: each call is steps first of all (``generating``), and ``generate`` makes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from inspect import signature
from typing import Any, Final, Literal, TypeVar, cast

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from radixkv.audit.invariants import inspect as inspect_laws
from radixkv.clock import Clock, monotonic
from radixkv.config import MAX_WEIGHTS, Namespace
from radixkv.engines.control.server import ControlServer
from radixkv.engines.grammars import Grammar, Grammars
from radixkv.engines.hf.batch import NUM_TOGETHER, Batch
from radixkv.engines.hf.choose import Chooser, Sampling, has_own_processors, penalty_settings
from radixkv.engines.hf.driven import driven_twin
from radixkv.engines.hf.forms import FormRows
from radixkv.engines.hf.models import demo_model, fingerprint, load_model, max_model_len_of
from radixkv.engines.hf.packed import Newest, PackedForward, serves
from radixkv.engines.hf.paged_cache import layout_of
from radixkv.engines.hf.request import (
    BatchRequest,
    ChunkDone,
    Failed,
    Filled,
    NoRoom,
    Prompt,
    Row,
    StepDone,
)
from radixkv.engines.hf.stock import STOCK_SETTINGS, Random, Request, StockLoop, Watcher
from radixkv.engines.protocol import (
    ABILITIES,
    Ability,
    Admission,
    EngineLimits,
    Generation,
    Logprobs,
    Penalties,
    Preemption,
    Prefill,
    Tally,
    TokenLogprobs,
    WaitForRoom,
)
from radixkv.engines.steps import Pause, Steps, Wait, in_thread, run
from radixkv.engines.validation import check_arguments, eos_ids_of, is_batch
from radixkv.engines.vocabulary import Vocabulary
from radixkv.errors import (
    ArgumentError,
    CapacityError,
    ConfigError,
    StaleGeneration,
    TokenError,
    wrong_count,
)
from radixkv.index import tokens
from radixkv.index.cache import PrefixCache, RequestHints
from radixkv.index.sequence import Sequence
from radixkv.storage.device import DeviceStorage
from radixkv.tiers.fair_lock import FairLock
from radixkv.tiers.settings import TierSettings
from radixkv.tiers.tiered_cache import TieredCache

__all__ = ["Generation", "HFEngine", "Prefill", "demo_model", "fingerprint", "layout_of", "load_model"]

R = TypeVar("R")


class HFEngine(StockLoop):
    """Prefill and generation of one transformers model over one PrefixCache with storage.

    - ``tokenizer_digest``: SHA-256 of the tokenizer's files, a part of the fingerprint.
    - ``chunk_tokens``: prefill runs in chunks of this many tokens. Each is committed after it is computed.
    - ``lends_beams``: whether the device makes the steps of beam searches by itself (``PrefixCache.lend``). None: only
      if it is a GPU.
    - ``control``: the cache's control channel. Its commands run between steps of prefill and generation.
    - ``tiers``: host memory, and a disk, below the cache, which is a TieredCache then (``TieredCache.add_tiers``).
      Evicted KV comes back from there. ``close`` gives the disk's folder back.
    - ``vocabulary``: the texts of the model's tokens. Without them it lacks the ability ``forms``. So does a model
      without an end-of-sequence token. A model with an attention of its own lacks ``logprobs``.

    Raises ConfigError if the cache has no storage or another layout or device, if the model can't be served (see
    ``layout_of``), and for tiers that can't be had (see ``Ladder``).
    """

    abilities: Collection[Ability] = ABILITIES
    """See ``Engine``. All of them, unless the model or its vocabulary allows less."""

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
        tiers: TierSettings | None = None,
        vocabulary: Vocabulary | None = None,
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
        lends = storage.device.type == "cuda" if lends_beams is None else bool(lends_beams)
        super().__init__(model, cache, storage, chunk_tokens, clock, control, lends)
        self.fingerprint = fingerprint(model, tokenizer_digest, cache.config.block_size)
        self.vocab_size = int(cast(Any, model.get_input_embeddings()).weight.shape[0])
        limit = max_model_len_of(model)
        self.max_model_len = cache.config.num_blocks * cache.config.block_size if limit is None else limit
        declared = eos_ids_of(model.generation_config.eos_token_id)
        self.eos_token_ids = frozenset(token_id for token_id in declared if 0 <= token_id < self.vocab_size)
        self._gate, self._batch = FairLock(), None
        self._owns_tiers = tiers is not None
        if tiers is not None:
            if not isinstance(cache, TieredCache):
                kind, allowed = type(cache).__name__, "a TieredCache, because there are tiers below it"
                raise ConfigError("cache", kind, allowed)
            cache.add_tiers(tiers, self.fingerprint)
        self._tiers = cache.lower if isinstance(cache, TieredCache) else None
        if serves(model, layout):
            forward, after_step = PackedForward(model, storage), self._run_commands
            computed = None if self._tiers is None else self._tiers.computed
            self._batch = Batch(cache, forward, chunk_tokens, self._gate, after_step, clock, computed)
            self._is_plain = not has_own_processors(
                model, {**STOCK_SETTINGS, "eos_token_id": None, "pad_token_id": self._pad_token_id}
            )
        self._grammars: Grammars | None = None
        if vocabulary is None or not self.eos_token_ids:
            self.abilities = frozenset(self.abilities) - {"forms"}
        else:
            self._grammars = Grammars(vocabulary, min(self.eos_token_ids), self.vocab_size)
        if self._batch is None:
            self.abilities = frozenset(self.abilities) - {"logprobs"}

    def close(self) -> None:
        """Give a disk's folder back, after all calls. Waits some seconds for what isn't stored yet."""
        if self._owns_tiers and isinstance(self.cache, TieredCache):
            self.cache.close()

    @property
    def limits(self) -> EngineLimits:
        """What a request may need: see ``EngineLimits``."""
        config = self.cache.config
        together = 1 if self._batch is None else NUM_TOGETHER
        return EngineLimits(
            self.vocab_size, self.max_model_len, config.num_blocks, config.block_size, together
        )

    def prefill_tokens(self, missing: float = 1.0) -> int | None:
        """Return the prompt tokens to compute before those of a new request with this missing share.

        None if it doesn't batch. O(running requests).
        """
        return None if self._batch is None else self._batch.prefill_tokens(missing)

    @property
    def makes_steps(self) -> bool:
        """Whether one thread can run it with all requests: see ``Stepping``. Not if the model has its own attention."""
        return self._batch is not None

    def make_step(self) -> float | None:
        """Make a step of all requests whose steps wait for it: see ``Stepping``."""
        assert self._batch is not None, "it makes no steps"
        return self._batch.make_step()

    @property
    def _caller(self) -> Pause:
        """How a synchronous call waits: its thread makes steps meanwhile."""
        return _Caller(self._batch)

    @staticmethod
    def _admission(on_no_room: WaitForRoom | None) -> Admission:
        """How a synchronous call is admitted."""

        def waiting(error: CapacityError) -> Steps[bool]:
            yield from ()
            return on_no_room is not None and on_no_room(error)

        return Admission(lambda: None, None if on_no_room is None else waiting, in_steps=False)

    def preemptions(self) -> dict[tuple[str, Preemption], int]:
        """Return how often running requests gave their room up, by tenant and reason. O(tenants)."""
        return {} if self._batch is None else self._batch.preemptions.copy()

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
        if self._tiers is not None:
            self._tiers.weights_changed(self.fingerprint, wanted)
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
        as_of: int | None = None,
        tally: Tally | None = None,
    ) -> Prefill:
        """Compute the KV of all tokens of ``ids`` that aren't cached, and commit it chunk by chunk.

        - ``on_chunk(done, total)`` is called after each chunk with the tokens that are done.
        - ``on_no_room(error)`` is called if there are too few blocks; True tries again.
        - ``hints``, ``as_of``: see ``PrefixCache.open``. ``tally``: see ``Engine.generate``.

        Raises TokenError and ArgumentError for ids that the model can't process, and CapacityError for too few blocks.
        Nothing stays open.
        """
        admission = self._admission(on_no_room)
        steps = self.prefilling(ns, ids, admission, on_chunk=on_chunk, hints=hints, as_of=as_of, tally=tally)
        return run(steps, self._caller)

    def prefilling(
        self,
        ns: Namespace,
        ids: tokens.TokenIds,
        admission: Admission,
        /,
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        hints: RequestHints | None = None,
        as_of: int | None = None,
        tally: Tally | None = None,
    ) -> Steps[Prefill]:
        """Do what ``prefill`` does, in steps: see ``Stepping``."""
        self._check_namespace(ns)
        prompt = self._check_prompt(ids, "ids", self.max_model_len)

        def opened() -> Sequence:
            return self.cache.open(self._now(ns), prompt.key, hints=hints, as_of=as_of)

        return self._compute_prompt(ns, prompt, admission, on_chunk, opened, self._begun(tally))

    def form(self, tenant: str, alternatives: str, field: str) -> Grammar:
        """Return a form for the argument ``form`` of ``generate``: see ``Forming``. From any thread.

        A form that the tenant used lately costs nothing. Another one is compiled twice: in a process of its own, which
        bounds the CPU time and the memory (0.1 s at least), and here. Raises ArgumentError, which names ``field``.
        """
        if self._grammars is None:
            raise ArgumentError(field, None, "none: this engine can't bind its answers to a form")
        return self._grammars.grammar(tenant, self.cache.generation(tenant), alternatives, field)

    def publish(
        self,
        base_id: str,
        ns: Namespace,
        ids: tokens.TokenIds,
        readers: Iterable[str],
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        on_no_room: WaitForRoom | None = None,
        as_of: int | None = None,
        tally: Tally | None = None,
    ) -> Prefill:
        """Compute the whole blocks of ``ids``, and publish them for other tenants: see ``PrefixCache.publish``.

        The base is readable when this returns. Raises like ``PrefixCache.publish`` and ``prefill``; then nothing is
        published.
        """
        admission = self._admission(on_no_room)
        steps = self.publishing(
            base_id, ns, ids, readers, admission, on_chunk=on_chunk, as_of=as_of, tally=tally
        )
        return run(steps, self._caller)

    def publishing(
        self,
        base_id: str,
        ns: Namespace,
        ids: tokens.TokenIds,
        readers: Iterable[str],
        admission: Admission,
        /,
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        as_of: int | None = None,
        tally: Tally | None = None,
    ) -> Steps[Prefill]:
        """Do what ``publish`` does, in steps: see ``Stepping``."""
        self._check_namespace(ns)
        prompt = self._check_prompt(ids, "ids", self.max_model_len)
        size = self.cache.config.block_size
        num_tokens = len(prompt.ids)
        num_tokens = max(num_tokens // size * size, min(num_tokens, 1))
        prompt = Prompt(prompt.key[: num_tokens * tokens.TOKEN_BYTES], prompt.ids[:num_tokens])

        def opened() -> Sequence:
            return self.cache.publish(base_id, self._now(ns), prompt.key, readers, as_of=as_of)

        return self._compute_prompt(ns, prompt, admission, on_chunk, opened, self._begun(tally))

    def _compute_prompt(
        self,
        ns: Namespace,
        prompt: Prompt,
        admission: Admission,
        on_chunk: Callable[[int, int], None] | None,
        open_sequence: Callable[[], Sequence],
        tally: Tally,
    ) -> Steps[Prefill]:
        if (batch := self._batch) is None:
            told, waiting = self._opened(on_chunk), self._opened(_no_room(admission, self._caller))
            with self._gate:
                return self._prefill(prompt, told, waiting, open_sequence, tally)
        started, total, done = self._clock(), len(prompt.ids), 0
        member = BatchRequest(
            ns, [prompt], lambda request, row: open_sequence(), admission=admission, tally=tally
        )
        with batch.joined(member):
            while done < total:
                match batch.take(member):
                    case None:
                        yield member.has_news
                        if on_chunk is not None and not member.news:
                            on_chunk(done or self.cache.match(ns, prompt.key).num_tokens, total)
                    case NoRoom(error):
                        yield from _wait_for_room(error, admission)
                    case Failed(error):
                        raise error
                    case ChunkDone(done, _):
                        if on_chunk is not None:
                            on_chunk(done, total)
        cached, num_blocks = tally.num_cached[0], -(-total // self.cache.config.block_size)
        seconds = self._clock() - started
        return Prefill(total, cached, total - cached, num_blocks, seconds, tally.loaded)

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
        as_of: int | None = None,
        tally: Tally | None = None,
        penalties: Penalties | None = None,
        form: Grammar | None = None,
        logprobs: Logprobs | None = None,
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
        - ``hints``: what eviction policies may use of these requests, the same for all: see ``PrefixCache.open``. With
          ``expected_gap_s``, a disk brings what it has of prompt and answer near before that time: ``TieredCache``.
        - ``as_of``: see ``PrefixCache.open``. It also holds if the request gives its room up and starts again.
        - ``tally``: kept up until the call ends, also by an error: see ``Tally``. What it has at the end counts in the
          tenant's statistics.
        - ``penalties``: see ``Penalties``. Those that transformers has are its own.
        - ``form``: what ``form`` returned: each row follows it, unless ``max_new_tokens`` cut it off. Not with beams.
        - ``logprobs``: kept up as the tokens come: see ``Logprobs``. Not with beams.

        Raises before it changes anything: TokenError for ids that aren't token ids or lie outside the vocabulary, and
        ArgumentError for everything else. Raises CapacityError if the pool can't hold the rows, and StaleGeneration
        after a purge, also in the middle. In any case nothing stays open, and what was committed stays matchable.
        """
        options = {
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "num_beams": num_beams,
            "num_return_sequences": num_return_sequences,
            "eos_token_id": eos_token_id,
            "on_step": on_step,
            "stop": stop,
            "hints": hints,
            "as_of": as_of,
            "tally": tally,
            "penalties": penalties,
            "form": form,
            "logprobs": logprobs,
        }
        steps = self.generating(ns, ids, max_new_tokens, self._admission(on_no_room), **options)
        return run(steps, self._caller)

    def generating(
        self, ns: Namespace, ids: Any, max_new_tokens: int, admission: Admission, /, **options: Any
    ) -> Steps[Generation]:
        """Do what ``generate`` does, in steps: see ``Stepping``. The loop of a beam search has a thread of its own."""
        started = self._clock()
        request = self._check_request(ns, ids, max_new_tokens, options)
        if self._batch is None:
            made = self._generate_alone(self._pausing(request, admission, self._caller), started)
        elif request.num_beams > 1:
            made = yield from self._search_together(self._batch, request, started, admission)
        else:
            made = yield from self._generate_together(self._batch, request, started, admission)
        self._bring_back(request, made)
        return made

    def _bring_back(self, request: Request, made: Generation) -> None:
        """Let a disk bring the conversations near again before the expected end of a pause, if there is one."""
        pause_s = None if request.hints is None else request.hints.pause_s
        if pause_s is not None and isinstance(self.cache, TieredCache):
            namespace, num_rows = self._now(request.namespace), len(made.token_ids) // len(request.prompts)
            if request.as_of is not None:
                try:
                    self.cache.endings.require_current(namespace, request.as_of)
                except StaleGeneration:  # a clear; the answer stays
                    return
            for prompt, answer in zip(request.prompts, made.token_ids[::num_rows], strict=True):
                self.cache.prefetch(namespace, prompt.key + tokens.encode(answer), in_s=pause_s)

    def _generate_alone(self, request: Request, started: float) -> Generation:
        """In transformers' loop. Other requests go on in the callbacks."""
        request = self._with_opened_calls(request)
        watcher = Watcher(request, self._clock, Random(request.seed, self.model.device), self._control)
        with self._gate, ExitStack() as stack:
            begun = self._clock()
            pages = self._prefill_rows(request, watcher, stack)
            rows = None if watcher.stopped else self._decode(request, watcher, pages, stack)
        seconds = self._clock() - started
        return _generation(request, rows, watcher.first_token_at, started, seconds, begun)

    def _generate_together(
        self, batch: Batch, request: Request, started: float, admission: Admission
    ) -> Steps[Generation]:
        """In the batch."""
        member = self._member(request, admission)
        rows: list[list[int]] = [[] for _ in range(request.num_rows)]
        if request.logprobs is not None:
            request.logprobs.rows = [[] for _ in rows]
        first_token_at, stop = None, request.stop or _never
        with batch.joined(member):
            while member.state != "over" or member.news:
                match batch.take(member):
                    case None:
                        yield member.has_news
                        if member.news:
                            continue
                    case NoRoom(error):
                        yield from _wait_for_room(error, admission)
                        continue
                    case Failed(error):
                        raise error
                    case StepDone(step, logprobs):
                        first_token_at = self._clock() if first_token_at is None else first_token_at
                        if logprobs is not None and request.logprobs is not None:
                            _keep_logprobs(request.logprobs, step, logprobs, request.eos_token_ids)
                        for row, new in zip(rows, step, strict=True):
                            row += new
                        if request.on_step is not None:
                            request.on_step(step)
                if stop():
                    break
            sizes = [len(prompt.ids) for prompt in request.prompts for _ in range(request.fanout)]
            batch.finish(member, [size + len(row) - 1 for size, row in zip(sizes, rows, strict=True)])
        seconds = self._clock() - started
        return _generation(request, rows, first_token_at, started, seconds, member.started_at)

    def _search_together(
        self, batch: Batch, request: Request, started: float, admission: Admission
    ) -> Steps[Generation]:
        """A beam search: transformers' loop, whose forwards are a part of the batch's steps."""
        member = BatchRequest(
            request.namespace,
            request.prompts,
            self._open_row,
            fanout=request.fanout,
            max_new_tokens=request.max_new_tokens,
            admission=admission,
            hints=request.hints,
            as_of=request.as_of,
            tally=request.tally,
            is_driven=True,
        )

        def searched(pause: Pause) -> tuple[list[list[int]], float | None]:
            own = self._pausing(request, admission, pause)
            random, opened = Random(request.seed, self.model.device), self._with_opened_calls(own)
            watcher = Watcher(opened, self._clock, random, self._control)
            with self._gate, ExitStack() as stack:
                return self._search(batch, member, own, watcher, pause, stack), watcher.first_token_at

        found: tuple[list[list[int]] | None, float | None] = None, None
        with batch.joined(member):
            if (yield from self._fill_prompts(batch, member, request, admission)):
                found = (yield from in_thread(searched)) if admission.in_steps else searched(self._caller)
        seconds = self._clock() - started
        return _generation(request, *found, started, seconds, member.started_at)

    def _begun(self, tally: Tally | None) -> Tally:
        """The tally of a call, the caller's or one of its own."""
        tally = Tally() if tally is None else tally
        if self._tiers is not None or self.cache.config.host_blocks:
            tally.num_loaded = {"host": 0, "disk": 0}
        return tally

    @staticmethod
    def _fill_prompts(
        batch: Batch, member: BatchRequest, request: Request, admission: Admission
    ) -> Steps[bool]:
        """Compute the prompts up to their last token. False: the caller has stopped the request."""
        stop = request.stop or _never
        while True:
            match batch.take(member):
                case None:
                    yield member.has_news
                    if member.news:
                        continue
                case Filled():
                    return True
                case NoRoom(error):
                    yield from _wait_for_room(error, admission)
                    continue
                case Failed(error):
                    raise error
            if stop():
                return False

    def _search(
        self,
        batch: Batch,
        member: BatchRequest,
        request: Request,
        watcher: Watcher,
        pause: Pause,
        stack: ExitStack,
    ) -> list[list[int]]:
        """Run the loop, within the gate."""
        sequences = [row.hand_over() for row in member.rows]
        for row, sequence in zip(member.rows, sequences, strict=True):
            stack.callback(member.count, row, sequence)
        computed = [len(prompt.ids) - 1 for prompt in request.prompts]
        paged = self._paged(sequences, computed, request, watcher, fanout=request.fanout)
        stack.callback(paged.release)
        if self._lends_beams:  # the device makes the steps
            with paged.attached(self.model):
                return self._loop(self.model, request, watcher, paged)

        def ask() -> None:
            watcher.stopped = watcher.stopped or (request.stop is not None and request.stop())

        def compute(asked: list[Newest]) -> Tensor:
            with watcher.random.outside(), self._gate.outside():
                return batch.logits(member, asked, pause, ask)

        paged.on_no_room = lambda error: batch.make_room(member, error) or watcher.wait_for_room(error)
        twin = driven_twin(self.model, paged, compute, batch.new_key)
        return self._loop(twin, request, watcher, paged)

    def _pausing(self, request: Request, admission: Admission, pause: Pause) -> Request:
        """The request with callbacks that let others go on. Between steps of the batch it waits anyway."""
        stop = request.stop

        def asked() -> bool:
            pause()
            return stop is not None and stop()

        on_no_room = _no_room(admission, pause)
        return replace(request, stop=asked if self._lends_beams else stop, on_no_room=on_no_room)

    def _with_opened_calls(self, request: Request) -> Request:
        """The request with callbacks that run outside the gate."""
        return replace(
            request,
            on_step=self._opened(request.on_step),
            stop=self._opened(request.stop),
            on_no_room=self._opened(request.on_no_room),
        )

    def _member(self, request: Request, admission: Admission) -> BatchRequest:
        sampling = Sampling(
            request.do_sample, request.temperature, request.top_k, request.top_p, request.seed
        )
        prompts = [prompt.ids for prompt in request.prompts for _ in range(request.fanout)]
        settings, own = self.settings_of(request), self.processors_of(request)
        form = None
        if request.form is not None:
            form = FormRows(request.form, request.num_rows, request.eos_token_ids)
        chooser = Chooser(
            self.model,
            sampling,
            settings,
            prompts,
            self._is_plain and not penalty_settings(request.penalties),
            own if form is None else [*own, form],
            form,
            None if request.logprobs is None else request.logprobs.num_top,
        )
        return BatchRequest(
            request.namespace,
            request.prompts,
            self._open_row,
            chooser=chooser,
            fanout=request.fanout,
            max_new_tokens=request.max_new_tokens,
            eos_token_ids=request.eos_token_ids,
            admission=admission,
            hints=request.hints,
            as_of=request.as_of,
            tally=request.tally,
        )

    def _open_row(self, request: BatchRequest, row: Row) -> Sequence:
        namespace = self._now(request.namespace)
        return self.cache.open(namespace, row.cache_key, hints=request.hints, as_of=request.as_of)

    def _run_commands(self) -> None:
        if self._control is not None:
            self._control.run_pending()

    def _opened(self, call: Callable[..., R] | None) -> Callable[..., R] | None:
        return None if call is None else self._gate.opened(call)

    # Checks ---------------------------------------------------------------------------------------------------

    def _check_request(
        self,
        ns: Namespace,
        ids: Any,
        max_new_tokens: int,
        options: Mapping[str, Any],
    ) -> Request:
        self._check_namespace(ns)
        arguments = {**_DEFAULTS, **options, "max_new_tokens": max_new_tokens}
        eos = arguments.pop("eos_token_id")
        arguments["eos_token_ids"] = self.eos_token_ids if eos is None else eos_ids_of(eos)
        arguments["tally"] = self._begun(arguments["tally"])
        if arguments["penalties"] is None:
            arguments["penalties"] = Penalties()
        check_arguments(arguments)
        outside = [token_id for token_id in arguments["eos_token_ids"] if not 0 <= token_id < self.vocab_size]
        if outside:
            raise ArgumentError(
                "eos_token_id", outside[0], f"ids from 0 to {self.vocab_size - 1}, or -1 for never"
            )
        self._check_abilities(arguments)
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
        return Request(namespace=ns, prompts=prompts, on_no_room=None, **arguments)

    def _check_abilities(self, arguments: dict[str, Any]) -> None:
        """Raise ArgumentError for what this model can't do, or for token ids outside of its vocabulary."""
        for name, ability in (("form", "forms"), ("logprobs", "logprobs")):
            if arguments[name] is not None and ability not in self.abilities:
                raise ArgumentError(name, arguments[name], f"None: this engine lacks the ability {ability}")
        form, least = arguments["form"], arguments["penalties"].min_new_tokens
        if form is not None and not arguments["eos_token_ids"]:
            raise ArgumentError(
                "eos_token_id", None, "an end-of-sequence token, which ends an answer of a form"
            )
        if form is not None and least:
            raise ArgumentError("penalties.min_new_tokens", least, "0 with a form, which says where it ends")
        for token_id in arguments["penalties"].bias:
            if not 0 <= token_id < self.vocab_size:
                raise ArgumentError("penalties.bias", token_id, f"ids from 0 to {self.vocab_size - 1}")

    def _check_namespace(self, ns: Namespace) -> None:
        if not isinstance(ns, Namespace):
            raise ArgumentError("ns", ns, "a Namespace")
        if ns.model != self.fingerprint:
            raise ArgumentError("ns.model", ns.model, f"this engine's fingerprint, {self.fingerprint}")
        if ns.weights != self._weights_version:
            allowed = f"the version of this engine's weights, {self._weights_version}"
            raise ArgumentError("ns.weights", ns.weights, allowed)

    def _check_prompt(self, ids: tokens.TokenIds, field: str, max_tokens: int) -> Prompt:
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
        return Prompt(key, found)


_DEFAULTS: Final[Mapping[str, Any]] = {
    name: each.default
    for name, each in signature(HFEngine.generate).parameters.items()
    if each.kind is each.KEYWORD_ONLY and name != "on_no_room"
}


def _never() -> bool:
    return False


def _keep_logprobs(
    kept: Logprobs, step: list[list[int]], found: list[TokenLogprobs], eos_token_ids: frozenset[int]
) -> None:
    """Add the log probabilities of a step's tokens to those of their rows, except of tokens that end a row."""
    told = iter(found)
    for row, new in zip(kept.rows, step, strict=True):
        row += [each for _ in new if (each := next(told)).token_id not in eos_token_ids]


def _wait_for_room(error: CapacityError, admission: Admission) -> Steps[None]:
    """Raise the error, unless the caller wants to try again."""
    if admission.on_no_room is None or not (yield from admission.on_no_room(error)):
        raise error


def _no_room(admission: Admission, pause: Pause) -> WaitForRoom | None:
    """``on_no_room`` for a synchronous loop."""
    waiting = admission.on_no_room
    return None if waiting is None else lambda error: run(waiting(error), pause)


class _Caller:
    """The thread of a synchronous call: it makes steps while its own request waits."""

    def __init__(self, batch: Batch | None) -> None:
        self._batch = batch
        self._offered_at: int | None = None

    def __call__(self, wait: Wait | None = None, /) -> None:
        """See ``Pause``."""
        if wait is not None and self._batch is not None:
            self._offered_at = self._batch.advance(wait, self._offered_at)


def _generation(
    request: Request,
    rows: list[list[int]] | None,
    first_token_at: float | None,
    started: float,
    seconds: float,
    begun: float | None,
) -> Generation:
    if rows is None:  # stopped before the first token
        rows = [[] for _ in range(len(request.prompts) * request.num_return_sequences)]
    cached = request.tally.num_cached
    return Generation(
        token_ids=rows,
        num_prompt_tokens=[len(prompt.ids) for prompt in request.prompts],
        num_cached_tokens=cached + [0] * (len(request.prompts) - len(cached)),
        finish_reasons=[_finish_reason(row, request) for row in rows],
        time_to_first_token_s=seconds if first_token_at is None else first_token_at - started,
        seconds=seconds,
        queued_s=seconds if begun is None else begun - started,
        loaded=request.tally.loaded,
    )


def _finish_reason(row: list[int], request: Request) -> Literal["stop", "length"]:
    is_whole = len(row) == request.max_new_tokens
    return "length" if is_whole and row[-1] not in request.eos_token_ids else "stop"
