"""``POST /v1/completions``: OpenAI's shape over the engine, whole or as a stream of server-sent events.

    event loop:  validate ─▶ submit ─▶ wait, or forward pieces ─▶ reply
    model thread:              generate ─▶ each step: ids → text, stop strings ─▶ pieces to the event loop

A client that hangs up cancels the work: the generation ends at its next step and releases what it holds. A
stream begins once the first token is there, so that a refusal is still an HTTP status.

A stream that isn't read is suspended after MAX_STEPS_AHEAD steps, and continues once it is read. It gives its room up,
or is ended, if another request needs it first; it is ended if its time is over.

Temperatures below 0.001 are greedy (dividing logits by less overflows fp32). Greedy completions of one prompt
are equal, so ``n`` of them cost one. Beam search takes no temperature, top_p or top_k and isn't streamed:
no beam is final before the end. Beams that differ only behind a stop string are one answer: the best of them counts.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.config import Namespace
from radixkv.engines.calls import generating
from radixkv.engines.protocol import Forming, Logprobs, Noting, Penalties, Tally, TokenLogprobs
from radixkv.errors import QuotaExceeded
from radixkv.index.cache import RequestHints
from radixkv.metering.records import Counts
from radixkv.service.dialects import OPENAI_COMPLETION
from radixkv.service.endpoint import Call, Endpoint, Streamed, until_disconnect
from radixkv.service.engine_loop import EngineLoop, Work, finished
from radixkv.service.fitting import blocks_needed, of_quota
from radixkv.service.problems import ApiError, Json, LongJson, invalid, refused, timed_out
from radixkv.service.promises import Kept
from radixkv.service.prompts import Prompt
from radixkv.service.recording import COMPLETION, Recorder
from radixkv.service.schemas.completions import (
    Choice,
    CompletionReply,
    CompletionRequest,
    Hints,
    LoadedTokens,
    PromptTokensDetails,
    StreamOptions,
    Timings,
    Usage,
)
from radixkv.service.schemas.structured import MAX_BIAS, CompletionLogprobs
from radixkv.service.textstream import Stop, TextStream
from radixkv.service.token_logprobs import shown_completion
from radixkv.service.usage import usage_of, usage_so_far, with_loaded
from radixkv.tiers.settings import UNCACHED_SALT
from radixkv_policies.hints import Label

if TYPE_CHECKING:
    from radixkv.engines import Ability, EngineLimits, Generation
    from radixkv.engines.steps import Steps
    from radixkv.service.core import Service

MAX_ROWS = 64
MAX_STEPS_AHEAD = 16
"""Steps that the model makes for a stream before the event loop has taken the text of the first of them."""
_TEXT_SLICE = 64
"""Tokens whose text is made before other tenants have a turn, once the generation is over."""
MAX_ECHOED_CHARS = 2**20
"""Most characters of prompts that an answer repeats."""
_LOOP_CHARS = 2**14
"""Answers of up to this many generated tokens and repeated characters are written on the event loop, in a
millisecond or two; longer ones in a thread."""
_LOGPROB_CHARS = 16
"""The cost of a token's log probability in an answer, as a number of characters."""
_GREEDY_BELOW = 1e-3
_LINE_ENDS: Final = tuple((each.encode(), f"\\u{ord(each):04x}".encode()) for each in "\x85\u2028\u2029")
_READING_S = 5.0
"""Time for a stream's reader to read the end of the stream, beyond the time of the answer."""
_CALLS_A_TOOL: Final = RequestHints({"tool_pending": True})
_NO_PENALTY: Final[Mapping[str, float | None]] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "min_tokens": 0,
}
FinishReason = Literal["stop", "length"]
T = TypeVar("T")


async def completions(call: Call[Service]) -> Response:
    """Complete prompts, with the fields of OpenAI's API: as one answer, or as a stream of server-sent events.

    A stream begins with the first token, so a refusal is still an HTTP status. A later error is an event of the stream.
    """
    reading = await call.read(CompletionRequest)
    check(call.host, reading.body, reading.prompts)
    run = Run(call, reading.body, reading.prompts)
    return await (run.streamed() if reading.body.stream else run.whole())


def check(
    service: Service, body: CompletionRequest, prompts: Sequence[Prompt], *, most: str = "max_tokens"
) -> None:
    """Refuse what this service can't complete. Raises ApiError 404 (model) or 422.

    ``most``: the field of the request that bounds the answer.
    """
    check_model(service, body.model)
    _check_options(body)
    _check_form(body, prompts)
    _check_abilities(body, prompts, service.engine.abilities)
    _check_bias(body, service.engine.limits)
    _check_room(body, prompts, service.engine.limits, most)


def check_model(service: Service, model: str | None) -> None:
    """Raise ApiError 404 for another model than the one that is served."""
    if model not in (None, service.model_name):
        raise ApiError(
            404, "not_found", "no such model", field="model", value=model, allowed=service.model_name
        )


def default_tokens(call: Call[Service], prompt: Prompt, num_rows: int = 1) -> int:
    """Return the most tokens of an answer if the request doesn't say: those that fit after its prompt."""
    service = call.host
    room, size = service.quotas.room(call.tenant), service.engine.limits.block_size
    left = service.rules.max_tokens - prompt.num_tokens
    return min(service.answer_tokens, left, room.tokens_left(prompt.num_tokens, num_rows, size))


class EventStream(Streamed):
    """Server-sent events of some work, which is cancelled when the response ends, even if it never began.

    The connection is closed if a client reads too slowly to finish in ``timeout_s``.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        work: Work[Any],
        headers: dict[str, str],
        timeout_s: float | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(events, media_type=media_type, headers=headers)
        self._work, self._timeout_s = work, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                await super().__call__(scope, receive, send)
        except TimeoutError:
            if not timeout.expired():
                raise
        finally:
            self._work.cancel()


class Progress:
    """Steps that were made for a stream and not yet taken by it. The model's thread writes, the event loop reads."""

    def __init__(self, engine_loop: EngineLoop) -> None:
        self._loop, self._engine_loop = asyncio.get_running_loop(), engine_loop
        self._changed = asyncio.Event()
        self._lock = threading.Lock()
        self._num_ahead = 0
        self.was_full = False  # whether the model had to wait since this was last made False

    def made(self) -> None:
        """Count a step, in the model's thread. The stream is woken together with those of other requests."""
        with self._lock:
            self._num_ahead += 1
        self._engine_loop.tell(self._loop, self._changed.set)

    def tell(self) -> None:
        """Wake the stream, from any thread."""
        self._loop.call_soon_threadsafe(self._changed.set)

    def is_full(self) -> bool:
        """Whether the model is so far ahead that it has to wait."""
        is_full = self._num_ahead >= MAX_STEPS_AHEAD
        self.was_full |= is_full
        return is_full

    def taken(self) -> None:
        """Record that the stream takes all text that there is."""
        with self._lock:
            self._num_ahead = 0

    async def wait(self) -> None:
        """Wait until something has happened since the last wait."""
        await self._changed.wait()
        self._changed.clear()


class Run:
    """One request being generated. Rows are prompt-major: row = prompt × choices + choice.

    - ``answered``: the rows that the answer has, each with its index there. All, except with beams and stop strings.
    - ``kept``: the promises for its first prompt, once they were granted or refused.
    - ``num_found``: tokens of its prompts that were resident just before the generation, for usage in a stream's
      beginning.
    - ``uses_cache``: False: it reads nothing from the cache and leaves nothing in it.
    - ``most``: the field of the request that bounds the answer.
    """

    most: ClassVar[str] = "max_tokens"
    media_type = "text/event-stream"
    """Of the answer as a stream."""

    def __init__(self, call: Call[Service], body: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self.call, self.body, self.prompts = call, body, prompts
        self.service = call.host
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.greedy = _is_greedy(body)
        self.copies = body.n if self.greedy else 1
        given = body.hints or Hints()
        labels: dict[str, Label] = {"type": COMPLETION}
        if body.prompt_cache_key is not None:
            labels["session"] = body.prompt_cache_key
        self.hints = RequestHints(labels | given.labels, given.priority, given.duration_s)
        self._cuts_beams = body.use_beam_search and bool(body.stops)
        rows = (body.best_of or body.n) if self._cuts_beams else body.n // self.copies
        self.answered = {row: row * self.copies for row in range(len(prompts) * rows)}
        stops = [Stop(each) for each in dict.fromkeys(body.stops)]
        self.progress: Progress | None = None
        self.kept: Kept | None = None
        self.num_found = 0
        self.uses_cache = True
        self.texts = [
            TextStream(self.service.tokenizer, prompt.ids[-16:].tolist(), stops)
            for prompt in prompts
            for _ in range(rows)
        ]
        self.began_at = call.started_at
        self.owner = call.owner
        self.namespace = self.service.namespace(call.tenant, body.salt, body.adapter)
        self.tally = Tally()
        self.form: object = None
        """What the answers are bound to, once it was compiled."""
        self.logprobs = None if body.logprobs is None else Logprobs(body.logprobs)
        self._num_told = [0 for _ in self.texts]
        self._num_told_chars = [0 for _ in self.texts]
        self.is_whole = False  # whether all texts have all tokens of the generation
        self._first_token_s: float | None = None  # after its arrival
        self._record_number = 0  # of its usage record
        self.served_in: Namespace | None = None  # set when it starts

    async def whole(self) -> Response:
        """Return the reply as one JSON body."""
        await self._prepared()
        work = self._submit()
        try:
            generation = await until_disconnect(self.call.request, self._finished(work))
        finally:
            work.cancel()
        answer = await self._written(lambda: self._answer(generation))
        self.owner.require()
        return self._told(answer)

    async def _prepared(self) -> None:
        """Compile the form of the answers, and read the vocabulary, in a thread of the tenant. Raises ArgumentError."""
        form, engine = self.prompts[0].form, self.service.engine
        if form is not None:
            assert isinstance(engine, Forming)
            compiled = partial(engine.form, self.call.tenant, form.alternatives, form.field)
            self.form = await self._in_thread(compiled)
        if self.logprobs is not None:
            try:
                await self._in_thread(lambda: self.service.vocabulary.bytes_of(0))
            except ValueError as error:
                reason = f"the tokens of this model aren't known: {error}"
                raise refused("logprobs", self.body.logprobs, reason, "left out") from None

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await until_disconnect(self.call.request, self.service.threads.run(self.call.tenant, call))

    def _told(self, response: Response) -> Response:
        """Add the header that says why a promise was refused."""
        response.headers.update((self.kept or Kept()).headers)
        return response

    def _answer(self, generation: Generation) -> Response:
        choices = [
            self._choice(row, self._echo(row) + self.texts[row].take(), self._reason(generation, row))
            for row in self.answered
        ]
        answer = self._reply(choices, self._usage(generation), self._timings(generation)).model_dump()
        return LongJson(answer) if self._is_long else Json(answer)

    @property
    def _is_long(self) -> bool:
        num_chars = sum(len(self._echo(row)) + self.texts[row].num_tokens for row in self.answered)
        if self.logprobs is not None:
            num_tokens = sum(text.num_tokens for text in self.texts)
            num_chars += num_tokens * (self.logprobs.num_top + 1) * _LOGPROB_CHARS
        return self.copies * num_chars > _LOOP_CHARS

    async def _written(self, write: Callable[[], T]) -> T:
        """Return ``write()``; for a long answer in a thread, so that it doesn't block other requests."""
        return await self.service.threads.run(self.call.tenant, write) if self._is_long else write()

    async def streamed(self) -> Response:
        """Return the reply as server-sent events, begun once the first step is done."""
        self.progress = progress = Progress(self.service.engine_loop)
        await self._prepared()
        work = self._submit()
        work.future.add_done_callback(lambda _: progress.tell())
        try:
            await until_disconnect(self.call.request, progress.wait())
            if work.future.done():
                await finished(work)
        except BaseException:
            work.cancel()
            raise
        headers = {"X-Accel-Buffering": "no"}
        time_s = self._time_left() + _READING_S
        stream = EventStream(self._events(work, progress), work, headers, time_s, self.media_type)
        return self._told(stream)

    async def _finished(self, work: Work[Generation]) -> Generation:
        """Return the generation, or raise its error, once the record of its use is in its file."""
        try:
            return await finished(work)
        finally:
            await self.service.meter.written(self._record_number)

    def _time_left(self) -> float:
        return self.call.started_at + self.service.limits.timeout_s - self.service.clock()

    async def _events(self, work: Work[Generation], progress: Progress) -> AsyncIterator[bytes]:
        try:
            first = await self._first_events()
            self.owner.require()
            for each in first:
                yield each
            while not work.future.done():
                progress.taken()
                work.resume()
                if pieces := self._pieces():
                    self.owner.require()
                    yield self._chunk(pieces)
                await self._next(progress)
            generation = await self._finished(work)
            self.owner.require()
            for each in self._last_events(generation):
                yield each
        except Exception as error:  # noqa: BLE001 too late for a status: the stream reports it
            yield self._error_event(self.service.failures.answer(error))

    async def _first_events(self) -> list[bytes]:
        if not self.body.echo:
            return []
        echoes = [self._choice(row, self._echo(row), None) for row in range(len(self.texts))]
        return [await self._written(lambda: self._chunk(echoes, kind=LongJson))]

    def _error_event(self, error: ApiError) -> bytes:
        return event(self.call.endpoint.dialect.write(error, self.call.id)[1])

    async def _next(self, progress: Progress) -> None:
        """Wait for a step. Raises ApiError when the answer's time is over."""
        try:
            await asyncio.wait_for(progress.wait(), self._time_left())
        except TimeoutError:
            raise timed_out(self.service.limits.timeout_s) from None

    def _last_events(self, generation: Generation) -> list[bytes]:
        rest = [text.take() for text in self.texts]
        choices = [self._choice(row, text, self._reason(generation, row)) for row, text in enumerate(rest)]
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        timings = self._timings(generation)
        usage = self._usage(generation)
        events = [self._chunk(choices, timings=None if with_usage else timings)]
        if with_usage:
            events.append(event(self._reply([], usage, timings).model_dump()))
        return [*events, b"data: [DONE]\n\n"]

    def _submit(self) -> Work[Generation]:
        namespace = self.namespace
        keys, most = [each.key for each in self.prompts], self.body.max_tokens
        self.service.require_fit(namespace, keys, self.most, _width(self.body), most)
        lacking = sum(each.num_tokens for each in self.prompts)
        if not self.service.engine.limits.cache_waits:
            lacking -= sum(self.service.cache.match(namespace, each.key).num_tokens for each in self.prompts)
        return self.service.engine_loop.submit(self.call.tenant, self._generate, lacking)

    def _generate(self, work: Work[Generation]) -> Steps[Generation]:
        """Generate, in the model's thread."""
        if self.progress is not None:
            work.is_ahead = self.progress.is_full
        if self.uses_cache:
            return (yield from self._generate_in(work))
        self.namespace = self.namespace._replace(salt=f"{UNCACHED_SALT}{secrets.token_hex(16)}")
        try:
            return (yield from self._generate_in(work))
        finally:
            self.service.cache.clear(self.namespace)

    def _generate_in(self, work: Work[Generation]) -> Steps[Generation]:
        self.began_at = self.service.clock()
        progress, clock, stepped_at = self.progress, self.service.clock, 0.0
        between = self.service.metrics.between_tokens(
            self.call.tenant, max(prompt.num_tokens for prompt in self.prompts)
        )
        if self.body.use_beam_search:  # beams report no steps: their prefill would seem to last to the end
            work.num_prefill_tokens = 0

        def may_start() -> None:
            self.namespace = self.service.current(self.namespace)
            self.owner.require(self.namespace)
            if self.uses_cache:
                self.served_in = self.namespace
            self._look(self.namespace)

        def on_step(new_ids: Sequence[Sequence[int]]) -> None:
            nonlocal stepped_at
            work.num_prefill_tokens, now = 0, clock()
            if self._first_token_s is None:
                self._first_token_s = now - self.call.started_at
            elif progress is None or not progress.was_full:
                between.observe(now - stepped_at)
            stepped_at = now
            self._keep()
            for text, ids in zip(self.texts, new_ids, strict=True):
                text.push(ids)
            if progress is not None:
                progress.was_full = False
                progress.made()

        def is_over() -> bool:
            self.owner.require()
            return work.stopping or all(text.stopped for text in self.texts)

        may_start()
        generation: Generation | None = None
        try:
            generation = yield from generating(
                self.service.engine,
                self.namespace,
                [prompt.key for prompt in self.prompts],
                self.body.max_tokens,
                work.admission(may_start),
                on_step=None if self.body.use_beam_search else on_step,
                stop=is_over,
                hints=self.hints,
                **self._sampling(),
                **self.owner.tallied(self.tally),
            )
            self.owner.require()
            self._keep(is_last=True)
            yield from self._complete(generation, work)
        except QuotaExceeded as error:
            raise of_quota(error, self.service.cache, self.call.tenant) from None
        finally:  # a request pays whichever way it ends
            self._pay(generation)
        if self.service.recorder is not None:
            self._record(self.service.recorder, self.namespace, generation)
        return generation

    def _pay(self, generation: Generation | None) -> None:
        """Record and count what was read, computed and generated. None: the engine has raised an error."""
        usage = self._spent(generation)
        if usage.is_nothing:
            return
        self._record_number = self.service.meter.bill(COMPLETION, self.owner.payer, usage)
        if generation is not None and usage.generated:
            self._first_token_s = self._timings(generation).time_to_first_token_s
        self.service.metrics.completed(
            self.call.tenant,
            prompt=usage.num_prompt_tokens,
            cached=usage.read,
            generated=usage.generated,
            first_token_s=self._first_token_s,
            queued_s=None if generation is None else self._timings(generation).queued_s,
        )

    def _spent(self, generation: Generation | None) -> Counts:
        """Return what was read, computed and generated until now. An engine without tallies tells it at the end."""
        granted = () if self.kept is None else self.kept.granted
        generated = self._num_generated
        if self.tally.num_cached or ("tally" in self.service.engine.abilities and not generated):
            return usage_so_far(self.tally, granted, generated)
        if generation is not None:
            return self.request_usage(generation)
        if not generated:
            return Counts()
        return Counts(uncached=sum(each.num_tokens for each in self.prompts), generated=generated)

    @property
    def _num_generated(self) -> int:
        """Tokens of the answers until now. Beams report none of them before the end."""
        chosen = self.tally.num_chosen if self.body.use_beam_search and not self.is_whole else 0
        return self.copies * sum(max(self.texts[row].num_tokens, chosen) for row in self.answered)

    def _look(self, namespace: Namespace) -> None:
        """Note what is resident before the generation, if the beginning of a stream says so."""

    def _keep(self, *, is_last: bool = False) -> None:
        """Promise what the prompt's breakpoints ask for, once it is resident: from the first step on.

        The request's own lease protects it until then. An engine may commit it later: then at the end.
        """
        is_early = self.kept is not None and self.kept.refusal == "not_resident"
        if self.kept is None or (is_early and is_last):
            prompt = self.prompts[0]
            self.kept = self.service.promises.keep(
                self.namespace,
                prompt.key,
                prompt.asked,
                self.owner.as_of,
                prompt.date,
                num_shared=prompt.num_shared,
            )

    def request_usage(self, generation: Generation) -> Counts:
        """Return what the request read, wrote under promises, computed and generated."""
        granted = () if self.kept is None else self.kept.granted
        usage = Counts(generated=self._num_generated)
        for prompt, cached in zip(self.prompts, generation.num_cached_tokens, strict=True):
            usage += usage_of(prompt.num_tokens, cached, granted)
        return with_loaded(usage, generation.loaded)

    def note_calls(self) -> None:
        """Tell the eviction policy that a tool's answer continues the conversation of the first prompt."""
        cache = self.service.cache
        if self.served_in is not None and isinstance(cache, Noting):
            cache.note(self.served_in, self.prompts[0].key, _CALLS_A_TOOL)

    def _complete(self, generation: Generation, work: Work[Generation]) -> Steps[None]:
        """Complete the texts up to the last token; the steps of beams don't report them. Raises Cancelled."""
        for text, ids in zip(self.texts, generation.token_ids, strict=True):
            while not text.stopped and text.num_tokens < len(ids):
                text.push(ids[text.num_tokens : text.num_tokens + _TEXT_SLICE])
                yield None
                work.check()
            text.close()
        self.is_whole = True
        work.check()
        if self._cuts_beams:
            self._leave_out_twins()

    def _leave_out_twins(self) -> None:
        """Answer with the ``n`` best beams of each prompt that are different up to their stop string.

        There are fewer if the search has found fewer. An index still tells the prompt.
        """
        rows, self.answered = len(self.texts) // len(self.prompts), {}
        for prompt in range(len(self.prompts)):
            best = {self.texts[row].text: row for row in reversed(range(prompt * rows, (prompt + 1) * rows))}
            for choice, row in enumerate(sorted(best.values())[: self.body.n]):
                self.answered[row] = prompt * self.body.n + choice

    def _record(self, recorder: Recorder, namespace: Namespace, generation: Generation) -> None:
        rows = len(generation.token_ids) // len(self.prompts)
        seconds = self.service.clock() - self.began_at
        for number, prompt in enumerate(self.prompts):
            recorder.record(namespace, prompt.key, generation.token_ids[number * rows], seconds, self.hints)

    def _sampling(self) -> dict[str, Any]:
        body = self.body
        options: dict[str, Any] = {"eos_token_id": -1} if body.ignore_eos else {}
        penalties = _penalties(body)
        options |= {} if penalties == Penalties() else {"penalties": penalties}
        options |= {} if self.form is None else {"form": self.form}
        options |= {} if self.logprobs is None else {"logprobs": self.logprobs}
        if body.use_beam_search:
            num_beams = body.best_of or body.n
            return options | {
                "num_beams": num_beams,
                "num_return_sequences": num_beams if self._cuts_beams else body.n,
            }
        if self.greedy:
            return options
        top_p = body.top_p if body.top_p < 1 else None
        return options | {
            "do_sample": True,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": top_p,
            "seed": body.seed,
            "num_return_sequences": body.n,
        }

    def _pieces(self) -> list[Choice]:
        taken = [(row, text.take()) for row, text in enumerate(self.texts)]
        return [self._choice(row, piece, None) for row, piece in taken if piece]

    def _choice(self, row: int, text: str, reason: FinishReason | None) -> Choice:
        return Choice(
            index=self.answered[row], text=text, finish_reason=reason, logprobs=self._shown_logprobs(row)
        )

    def _shown_logprobs(self, row: int) -> CompletionLogprobs | None:
        """Return the log probabilities of the tokens that a choice adds to a row, in the form of completions."""
        if self.logprobs is None:
            return None
        shown = shown_completion(self.service.vocabulary, self._new_logprobs(row), self._num_told_chars[row])
        self._num_told_chars[row] += sum(map(len, shown.tokens))
        return shown

    def _new_logprobs(self, row: int) -> list[TokenLogprobs]:
        """Return the log probabilities of a row's tokens since the last call; of those up to a stop string."""
        if self.logprobs is None or row >= len(self.logprobs.rows):
            return []
        start, found = self._num_told[row], self.logprobs.rows[row]
        self._num_told[row] = stop = max(min(self.texts[row].num_tokens, len(found)), start)
        return found[start:stop]

    def _reason(self, generation: Generation, row: int) -> FinishReason:
        return "stop" if self.texts[row].stopped or generation.finish_reasons[row] == "stop" else "length"

    def _echo(self, row: int) -> str:
        return self.prompts[row * len(self.prompts) // len(self.texts)].text if self.body.echo else ""

    def _usage(self, generation: Generation) -> Usage:
        usage = self.request_usage(generation)
        details = PromptTokensDetails(cached_tokens=usage.read, cache_write_tokens=usage.num_written)
        return self._usage_so_far().model_copy(update={"prompt_tokens_details": details})

    def _usage_so_far(self) -> Usage:
        """Return the usage during the generation; the cached tokens are reported at the end."""
        prompt = sum(prompt.num_tokens for prompt in self.prompts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._num_generated,
            total_tokens=prompt + self._num_generated,
            prompt_tokens_details=None,
        )

    def _timings(self, generation: Generation) -> Timings:
        loaded = generation.loaded
        before = self.began_at - self.call.started_at
        return Timings(
            queued_s=before + generation.queued_s,
            time_to_first_token_s=before + generation.time_to_first_token_s,
            total_s=self.service.clock() - self.call.started_at,
            loaded=None if loaded is None else LoadedTokens(**asdict(loaded)),
        )

    def _reply(self, choices: list[Choice], usage: Usage | None, timings: Timings | None) -> CompletionReply:
        copied = [
            choice.model_copy(update={"index": choice.index + copy})
            for choice in choices
            for copy in range(self.copies)
        ]
        return CompletionReply(
            id=self.id,
            created=self.created,
            model=self.service.model_name,
            choices=copied,
            usage=usage,
            timings=timings,
        )

    def _chunk(self, choices: list[Choice], timings: Timings | None = None, kind: type[Json] = Json) -> bytes:
        options = self.body.stream_options or StreamOptions()
        unset = set() if options.include_usage else {"usage"}
        if timings is None:
            unset |= {"timings"}
        usage = self._usage_so_far() if options.continuous_usage_stats else None
        return event(self._reply(choices, usage, timings).model_dump(exclude=unset), kind)


def event(document: dict[str, Any], kind: type[Json] = Json) -> bytes:
    """Return a server-sent event. JSON has no newline, so no text can begin another event.

    Other characters at which Unicode ends a line are escaped: clients in Python split lines there too.
    """
    content = bytes(kind(document).body)
    for character, escape in _LINE_ENDS:
        if character in content:
            content = content.replace(character, escape)
    return b"data: " + content + b"\n"


def _is_greedy(body: CompletionRequest) -> bool:
    return body.temperature < _GREEDY_BELOW and not body.use_beam_search


def _width(body: CompletionRequest) -> int:
    """Return the rows that may come to differ after each prompt."""
    return 1 if _is_greedy(body) else max(body.n, body.best_of or 0)


def _check_options(body: CompletionRequest) -> None:
    """Refuse unsupported combinations of options. Raises ApiError 422."""
    if body.stream_options is not None and not body.stream:
        problem = "stream_options is not allowed without stream; allowed: stream: true with it"
        raise invalid(problem, "stream_options", None, "stream: true with it")
    hints = body.hints
    if hints is not None and hints.duration_s is not None and hints.priority is None:
        reason = "hints.priority is not set"
        raise refused("hints.duration_s", hints.duration_s, reason, "hints.priority with it")
    if not body.use_beam_search:
        if body.best_of not in (None, body.n):
            raise refused(
                "best_of",
                body.best_of,
                "it differs from n",
                f"{body.n}, or another number with use_beam_search",
            )
        return
    if body.stream:
        raise refused("stream", True, "beam search can't be streamed", "false with use_beam_search")
    draws_nothing = "beam search draws no tokens"
    if "temperature" in body.model_fields_set and body.temperature != 0:
        raise refused("temperature", body.temperature, draws_nothing, "0 with use_beam_search")
    for field, neutral in (("top_p", 1.0), ("top_k", None)):
        if getattr(body, field) != neutral:
            raise refused(field, getattr(body, field), draws_nothing, "left out with use_beam_search")
    if body.best_of is not None and body.best_of < body.n:
        raise refused("best_of", body.best_of, "it is less than n", f"at least {body.n}")


def _penalties(body: CompletionRequest) -> Penalties:
    bias = {int(name): value for name, value in (body.logit_bias or {}).items()}
    return Penalties(
        body.presence_penalty, body.frequency_penalty, body.repetition_penalty, bias, body.min_tokens
    )


def _check_form(body: CompletionRequest, prompts: Sequence[Prompt]) -> None:
    """Refuse what doesn't go together with log probabilities, or with an answer of a given form.

    Raises ApiError 422.
    """
    if body.min_tokens > body.max_tokens:
        raise refused("min_tokens", body.min_tokens, f"max_tokens is {body.max_tokens}", "at most max_tokens")
    if body.logprobs is not None and (body.echo or body.use_beam_search):
        reason, field = ("prompts have none", "echo") if body.echo else ("beams have none", "use_beam_search")
        raise refused("logprobs", body.logprobs, reason, f"left out with {field}")
    form = prompts[0].form
    if form is None:
        return
    for field, neutral in (("use_beam_search", False), ("ignore_eos", False), ("min_tokens", 0)):
        if (value := getattr(body, field)) != neutral:
            reason = f"{form.field} asks for an answer of a given form"
            raise refused(field, value, reason, f"{json.dumps(neutral)} with it")


def _check_bias(body: CompletionRequest, limits: EngineLimits) -> None:
    """Refuse ids that the model doesn't have. Raises ApiError 422."""
    for name in body.logit_bias or ():
        if int(name) >= limits.vocab_size:
            reason = "it is not in the vocabulary"
            allowed = f"ids below {limits.vocab_size}, with numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            raise refused("logit_bias", name, reason, allowed)


def _check_abilities(
    body: CompletionRequest, prompts: Sequence[Prompt], abilities: Collection[Ability]
) -> None:
    """Refuse what the engine can't do. Raises ApiError 422."""
    form = prompts[0].form
    if form is not None and "forms" not in abilities:
        raise refused(form.field, None, "the engine of this service binds no answer to a form", "left out")
    if body.logprobs is not None and "logprobs" not in abilities:
        reason = "the engine of this service tells no log probabilities"
        raise refused("logprobs", body.logprobs, reason, "left out")
    for field, neutral in _NO_PENALTY.items():
        value = getattr(body, field)
        if (value or neutral) != neutral and "penalties" not in abilities:
            raise refused(field, value, "the engine of this service changes no scores of tokens", "left out")
    if body.use_beam_search and "beams" not in abilities:
        raise refused("use_beam_search", True, "the engine of this service has no beam search", "false")
    if not _is_greedy(body) and body.n > 1 and not body.use_beam_search and "samples" not in abilities:
        raise refused("n", body.n, "the engine of this service draws one sample of a prompt", "1")


def _check_room(body: CompletionRequest, prompts: Sequence[Prompt], limits: EngineLimits, most: str) -> None:
    """Refuse a request that even an empty server could not serve. Raises ApiError 422."""
    if len(prompts) * body.n > MAX_ROWS:
        reason = f"{len(prompts)} prompts have {len(prompts) * body.n} completions then"
        raise refused("n", body.n, reason, f"at most {MAX_ROWS} completions, prompts × n")
    echoed = body.n * sum(len(prompt.text) for prompt in prompts)
    if echoed > MAX_ECHOED_CHARS:
        reason = f"it would repeat {echoed} characters in the answer"
        raise refused("echo", True, reason, f"at most {MAX_ECHOED_CHARS} characters, prompts × n")
    limit = limits.max_model_len
    longest = max(prompt.num_tokens for prompt in prompts)
    if longest + body.max_tokens > limit:
        reason = f"a prompt of {longest} tokens leaves {limit - longest} tokens"
        allowed = f"prompt and {most} within {limit} tokens"
        raise refused(most, body.max_tokens, reason, allowed, is_too_long=True)
    keys = [prompt.key for prompt in prompts]
    needed = blocks_needed(keys, _width(body), body.max_tokens, limits.block_size)
    if needed > limits.num_blocks:
        reason = f"{needed} blocks are needed, and the cache has {limits.num_blocks}"
        allowed = f"prompts and completions that fit into {limits.num_cache_tokens} tokens"
        raise refused(most, body.max_tokens, reason, allowed)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        "Complete prompts",
        "tenant",
        {200: {"application/json": CompletionReply, "text/event-stream": "events"}},
        body=CompletionRequest,
        errors=(404, 409, 429, 503),
        dialect=OPENAI_COMPLETION,
    ),
)
