"""Prefixes that are being computed, and requests that wait for them.

A ``Warming`` computes one prefix of one namespace. Requests for the same prefix join it while it is in progress,
instead of computing again. Each request holds a share. When the last share is released before the end, the computation
is cancelled (what it has committed stays). So a client that hangs up never takes the prefix from another, and an
unneeded prefix costs nothing.

    absent ──join──▶ queued ──thread──▶ running ──▶ done | failed | cancelled
                        ▲ join: one share more        the entry is gone from the table

**Bills.** What is computed is billed once: to the first share that is left at the end, also if that is an error. The
others read it. If all left before, the last one pays for what was computed until then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from radixkv.clock import monotonic
from radixkv.config import Namespace
from radixkv.engines.calls import prefilling
from radixkv.engines.protocol import Tally
from radixkv.errors import LeaseError, QuotaExceeded
from radixkv.index.cache import RequestHints
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.metering.meter import Meter
from radixkv.metering.records import Counts
from radixkv.service.engine_loop import EngineLoop, Work, finished
from radixkv.service.fitting import of_quota
from radixkv.service.problems import ApiError
from radixkv.service.recording import WARM, Recorder
from radixkv.service.threads import Threads
from radixkv.service.usage import Promise, usage_of, usage_so_far, with_loaded

if TYPE_CHECKING:
    from radixkv.engines import Engine
    from radixkv.engines.protocol import Loaded
    from radixkv.engines.steps import Steps
    from radixkv.service.owner import Owner


class ClearedMeanwhile(LeaseError):
    """The namespace was cleared, or the weights changed, meanwhile. So the prefix isn't resident."""


WarmKind = Literal["warm", "pin"]
_Key = tuple[Namespace, bytes]
_HINTS = RequestHints({"type": WARM})
PATIENCE_S = 10.0
"""Seconds that a job lets its tenant's other work go first, if the engine batches."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """A resident prefix: ``num_tokens`` of it, of which ``num_cached`` were resident before, or below (``loaded``).

    ``has_run``: whether the engine ran for it; otherwise all of it was resident.
    """

    num_tokens: int
    num_cached: int
    num_blocks: int
    loaded: Loaded | None = None
    has_run: bool = False

    @property
    def num_computed(self) -> int:
        """Tokens that had to be computed."""
        return self.num_tokens - self.num_cached


class Warming:
    """A prefix in progress. ``num_ready`` tokens of ``num_tokens`` are computed; made by ``Warmer.join``.

    - ``num_cached``: tokens that were resident when it began.
    - ``first``: the owner of the request that began it.
    - ``shares``: of the requests that wait, in the order in which they came. ``last``: the last that left.
    """

    def __init__(self, num_tokens: int, owner: Owner) -> None:
        self.num_tokens, self.first = num_tokens, owner
        self.num_ready = self.num_cached = 0
        self.shares: list[Share] = []
        self.last: Share | None = None
        self.started = False
        self.tally = Tally()
        self.work: Work[Warmed] | None = None
        self._paid = threading.Lock()  # held once it is paid

    @property
    def num_shares(self) -> int:
        """Number of requests that wait for it."""
        return len(self.shares)

    def is_current(self, namespace: Namespace) -> bool:
        """Whether a request that comes now may join it: nothing has ended it since it began."""
        with suppress(LeaseError):
            self.first.engine.cache.endings.require_current(namespace, self.first.as_of)
            return True
        return False

    def require_wanted(self) -> None:
        """Raise ApiError 401 if the keys of all requests that wait for it were revoked. From any thread."""
        for share in list(self.shares):
            with suppress(ApiError):
                return share.owner.require_key()
        self.first.require_key()

    def bill_spent(self, share: Share) -> None:
        """Bill a share for what was read and computed, however it ended, unless that is paid. From any thread."""
        if "tally" in self.first.engine.abilities:
            usage = usage_so_far(self.tally)
        else:
            is_any = self.num_ready > self.num_cached
            usage = usage_of(self.num_ready, self.num_cached) if is_any else Counts()
        if not usage.is_nothing and self.pay():
            share.bill(usage)

    def pay(self) -> bool:
        """Return True to the first caller, which bills what was computed. From any thread."""
        return self._paid.acquire(blocking=False)

    def done(self) -> Warmed | None:
        """Return the result, if it ended well."""
        future = None if self.work is None else self.work.future
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()


class Share:
    """What one request has of a warming. It is billed once, to its owner, as a request of ``kind``."""

    def __init__(
        self, warming: Warming, meter: Meter, threads: Threads, owner: Owner, kind: WarmKind
    ) -> None:
        self.warming, self.owner, self._meter, self._threads, self._kind = (
            warming,
            owner,
            meter,
            threads,
            kind,
        )

    async def result(self) -> Warmed:
        """Wait for the end. Raises what the computation raised, or Cancelled."""
        if self.warming.work is None:
            return Warmed(0, 0, 0)
        return await finished(self.warming.work)

    async def settled(self, granted: Iterable[Promise] = (), *, num_tokens: int | None = None) -> Counts:
        """Bill the request, and return what was billed. Call it after the end.

        - ``granted``: the promises that hold now.
        - ``num_tokens``: of the whole prompt, if that is more than the prefix.
        """
        warmed = self.warming.done()
        if warmed is None and num_tokens is None:
            return Counts()
        warmed = warmed or Warmed(0, 0, 0)
        is_first = self.warming.shares[:1] == [self] and self.warming.pay()
        cached = warmed.num_cached if is_first else warmed.num_tokens
        usage = usage_of(num_tokens or warmed.num_tokens, cached, granted)
        usage = with_loaded(usage, warmed.loaded) if is_first else usage
        if cached and not (is_first and warmed.has_run):

            def bill() -> int:
                self.owner.count_reads(cached)
                return self.bill(usage)

            number = await self._threads.ask_cache(self.owner.tenant, bill)
        else:
            number = self.bill(usage)
        await self._meter.written(number)
        return usage

    def bill(self, usage: Counts) -> int:
        """Bill the request. From any thread. Returns the number of its record, see ``Meter.written``."""
        return self._meter.bill(self._kind, self.owner.payer, usage)

    def leave(self) -> None:
        """Stop waiting. What was computed is billed, if nobody else will."""
        shares, warming = self.warming.shares, self.warming
        was_first = shares[:1] == [self]
        warming.last = self
        shares.remove(self)
        if was_first and warming.done() is not None:
            warming.bill_spent(self)


class Warmer:
    """The table of prefixes in progress. To be used from the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        engine_loop: EngineLoop,
        meter: Meter,
        threads: Threads,
        recorder: Recorder | None = None,
    ) -> None:
        self._engine, self._loop, self._meter, self._threads = engine, engine_loop, meter, threads
        self._recorder = recorder
        self._under_way: dict[_Key, Warming] = {}

    @property
    def num_under_way(self) -> int:
        """Number of prefixes that wait or are computed, and that a request may join."""
        return len(self.under_way())

    def under_way(self) -> list[Warming]:
        """Return the prefixes that wait or are computed, and that a request may join."""
        found = list(self._under_way.items())
        return [warming for (namespace, _), warming in found if warming.is_current(namespace)]

    @contextmanager
    def join(
        self,
        namespace: Namespace,
        prompt_key: bytes,
        owner: Owner,
        kind: WarmKind = WARM,
        *,
        is_job: bool = False,
    ) -> Iterator[Share]:
        """Take a share in computing a prompt (whole blocks), until the ``with`` ends. Raises Busy or Closed.

        The owner's key pays, for a warm or for a pin. ``is_job``: no client waits for it, so what the tenant's
        clients wait for goes first, for PATIENCE_S.
        """
        key = (namespace, prompt_key)
        owner.require(namespace)
        warming = self._under_way.get(key)
        if warming is None or not warming.is_current(namespace):
            warming = self._begin(namespace, prompt_key, owner, is_job)
        if warming.work is not None and not is_job:
            warming.work.hurry()
        share = Share(warming, self._meter, self._threads, owner, kind)
        warming.shares.append(share)
        if warming.num_shares == 1 and warming.work is not None:
            warming.work.future.add_done_callback(lambda future: _bill_abandoned(warming, future))
        try:
            yield share
        finally:
            share.leave()
            if not warming.shares:
                self._end(key, warming)

    def _begin(self, namespace: Namespace, prompt_key: bytes, owner: Owner, is_job: bool) -> Warming:
        warming = Warming(len(prompt_key) // TOKEN_BYTES, owner)
        if prompt_key:
            warming.work = self._loop.submit(
                namespace.tenant,
                lambda work: self._compute(namespace, prompt_key, warming, work),
                warming.num_tokens,
                patience_s=PATIENCE_S if is_job else 0.0,
            )
            self._under_way[namespace, prompt_key] = warming
        return warming

    def _end(self, key: _Key, warming: Warming) -> None:
        if self._under_way.get(key) is warming:
            del self._under_way[key]
        if warming.work is not None:
            warming.work.cancel()

    def _compute(
        self, namespace: Namespace, prompt_key: bytes, warming: Warming, work: Work[Warmed]
    ) -> Steps[Warmed]:
        """Compute a prefix, in the model's thread."""
        num_tokens, cache = warming.num_tokens, self._engine.cache

        def require() -> None:
            if namespace.weights != self._engine.weights_version:
                raise ClearedMeanwhile
            warming.require_wanted()
            cache.endings.require_current(namespace, warming.first.as_of)

        def may_start() -> None:
            require()
            warming.started = True

        def on_chunk(num_ready: int, _total: int) -> None:
            warming.num_ready, work.num_prefill_tokens = num_ready, num_tokens - num_ready
            work.check()
            warming.require_wanted()

        require()
        began_at, match = monotonic(), cache.match(namespace, prompt_key)
        has_run = match.num_tokens < num_tokens
        num_cached = warming.num_cached = match.num_tokens
        warming.num_ready, work.num_prefill_tokens = match.num_tokens, num_tokens - match.num_tokens
        loaded: Loaded | None = None
        if has_run:
            try:
                computed = yield from prefilling(
                    self._engine,
                    namespace,
                    prompt_key,
                    work.admission(may_start),
                    on_chunk=on_chunk,
                    hints=_HINTS,
                    **warming.first.tallied(warming.tally),
                )
            except QuotaExceeded as error:
                raise of_quota(error, cache, namespace.tenant) from None
            num_cached, loaded = min(computed.num_cached_tokens, num_tokens), computed.loaded
            if cache.match(namespace, prompt_key).num_tokens < num_tokens:
                raise ClearedMeanwhile
        elif cache.touch(namespace, prompt_key) < num_tokens:
            raise ClearedMeanwhile
        warming.num_ready = num_tokens
        if self._recorder is not None:
            self._recorder.record(namespace, prompt_key, (), monotonic() - began_at, _HINTS)
        num_blocks = num_tokens // self._engine.limits.block_size
        return Warmed(num_tokens, num_cached, num_blocks, loaded, has_run)


def _bill_abandoned(warming: Warming, future: Future[Warmed]) -> None:
    """Bill what was computed if no request is left to do it, or if it ended in an error."""
    if future.cancelled():
        return  # it never began
    waiting = list(warming.shares)  # others leave meanwhile
    share = waiting[0] if waiting else warming.last
    is_whole = warming.done() is not None
    if share is None or (is_whole and waiting):
        return
    warming.bill_spent(share)
