"""Prefixes that are being computed, and requests that wait for them.

A ``Warming`` computes one prefix of one namespace. Requests for the same prefix join it while it is in progress,
instead of computing again. Each request holds a share. When the last share is released before the end, the computation
is cancelled (what it has committed stays). So a client that hangs up never takes the prefix from another, and an
unneeded prefix costs nothing.

    absent ──join──▶ queued ──thread──▶ running ──▶ done | failed | cancelled
                        ▲ join: one share more        the entry is gone from the table
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.clock import monotonic
from radixkv.config import Namespace
from radixkv.errors import LeaseError
from radixkv.index.cache import RequestHints
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.service.recording import WARM, Recorder
from radixkv.service.worker import ModelWorker, Work, finished

if TYPE_CHECKING:
    from radixkv.engines import Engine


class ClearedMeanwhile(LeaseError):
    """The namespace was cleared, or the weights changed, meanwhile. So the prefix isn't resident."""


_Key = tuple[Namespace, bytes]
_HINTS = RequestHints({"type": WARM})


@dataclass(frozen=True, slots=True)
class Warmed:
    """A resident prefix: ``num_tokens`` of it, of which ``num_cached`` were resident before."""

    num_tokens: int
    num_cached: int
    num_blocks: int

    @property
    def num_computed(self) -> int:
        """Tokens that had to be computed."""
        return self.num_tokens - self.num_cached


class Warming:
    """A prefix in progress. ``num_ready`` tokens of ``num_tokens`` are computed; made by ``Warmer.join``."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_ready = 0
        self.num_shares = 0
        self.started = False
        self.work: Work[Warmed] | None = None

    async def result(self) -> Warmed:
        """Wait for the end. Raises what the computation raised, or Cancelled."""
        if self.work is None:
            return Warmed(0, 0, 0)
        return await finished(self.work)


class Warmer:
    """The table of prefixes in progress. To be used from the event loop's thread."""

    def __init__(self, engine: Engine, worker: ModelWorker, recorder: Recorder | None = None) -> None:
        self._engine, self._worker, self._recorder = engine, worker, recorder
        self._under_way: dict[_Key, Warming] = {}

    @property
    def num_under_way(self) -> int:
        """Number of prefixes that wait or are computed."""
        return len(self._under_way)

    def under_way(self) -> list[Warming]:
        """Return the prefixes that wait or are computed."""
        return list(self._under_way.values())

    @contextmanager
    def join(self, namespace: Namespace, prompt_key: bytes) -> Iterator[Warming]:
        """Take a share in computing a prompt (whole blocks), until the ``with`` ends. Raises Busy or Closed."""
        key = (namespace, prompt_key)
        warming = self._under_way.get(key) or self._begin(namespace, prompt_key)
        warming.num_shares += 1
        try:
            yield warming
        finally:
            warming.num_shares -= 1
            if not warming.num_shares:
                self._end(key, warming)

    def forget(self, namespaces: Collection[Namespace]) -> None:
        """Forget cleared namespaces: no request can join their prefixes in progress from now on."""
        for key in [key for key in self._under_way if key[0] in namespaces]:
            del self._under_way[key]

    def forget_tenant(self, tenant: str) -> None:
        """Forget all namespaces of a purged tenant in the same way."""
        for key in [key for key in self._under_way if key[0].tenant == tenant]:
            del self._under_way[key]

    def _begin(self, namespace: Namespace, prompt_key: bytes) -> Warming:
        warming = Warming(len(prompt_key) // TOKEN_BYTES)
        if prompt_key:
            warming.work = self._worker.submit(
                namespace.tenant,
                lambda work: self._compute(namespace, prompt_key, warming, work),
                warming.num_tokens,
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
    ) -> Warmed:
        """Compute a prefix, in the model's thread."""
        warming.started, began_at, num_tokens = True, monotonic(), warming.num_tokens

        def on_chunk(num_ready: int, _total: int) -> None:
            warming.num_ready, work.num_prefill_tokens = num_ready, num_tokens - num_ready
            work.turn()
            work.check()

        if namespace.weights != self._engine.weights_version:
            raise ClearedMeanwhile
        cache = self._engine.cache
        match = cache.match(namespace, prompt_key)
        warming.num_ready, work.num_prefill_tokens = match.num_tokens, num_tokens - match.num_tokens
        if match.num_tokens < num_tokens:
            self._engine.prefill(
                namespace, prompt_key, on_chunk=on_chunk, on_no_room=work.wait_for_room, hints=_HINTS
            )
            if cache.match(namespace, prompt_key).num_tokens < num_tokens:
                raise ClearedMeanwhile
        elif cache.touch(namespace, prompt_key) < num_tokens:
            raise ClearedMeanwhile
        warming.num_ready = num_tokens
        if self._recorder is not None:
            self._recorder.record(namespace, prompt_key, (), monotonic() - began_at, _HINTS)
        return Warmed(num_tokens, match.num_tokens, num_tokens // self._engine.limits.block_size)
