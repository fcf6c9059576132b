"""An engine without torch that another package could bring: it counts on from the last token of a prompt.

It has one answer to each prompt, computes prefixes ahead, and can do nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from radixkv import CacheConfig, Namespace, PrefixCache, audit
from radixkv.clock import monotonic
from radixkv.engines import Ability, EngineLimits, EngineSettings, Generation, Prefill
from radixkv.index.changes import Journal
from radixkv.index.tokens import decode, encode


def load_engine(settings: EngineSettings) -> ToyModel:
    """Load nothing."""
    return ToyModel(settings)


class ToyModel:
    """A model that computes no KV."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.fingerprint = f"toy:{settings.tokenizer_digest[:16]}:{settings.block_size}"

    def start(self, journal: Journal | None) -> ToyEngine:
        """Make the engine."""
        settings = self._settings
        config = CacheConfig(
            settings.num_blocks, settings.block_size, policy=settings.policy, default_tenant=None
        )
        return ToyEngine(PrefixCache(config, journal=journal), self.fingerprint, settings.vocab_size)


class ToyEngine:
    """See ``radixkv.engines.Engine``."""

    abilities: Collection[Ability] = frozenset(("as_of", "prefill"))

    def __init__(self, cache: PrefixCache, fingerprint: str, vocab_size: int) -> None:
        self.cache, self.fingerprint = cache, fingerprint
        config = cache.config
        self.limits = EngineLimits(vocab_size, 4_096, config.num_blocks, config.block_size)
        self.weights_version = 0
        self.sick: list[str] = []

    def namespace(self, tenant: str, adapter: str | None = None, salt: str = "") -> Namespace:
        return Namespace(tenant, self.fingerprint, adapter, salt)

    def generate(
        self,
        ns: Namespace,
        ids: Any,
        max_new_tokens: int,
        *,
        on_step: Callable[[list[list[int]]], None] | None = None,
        stop: Callable[[], bool] | None = None,
        hints: Any = None,
        eos_token_id: Any = None,
        as_of: int | None = None,
        **others: Any,
    ) -> Generation:
        assert not {each for each, value in others.items() if value not in (None, False, 1)} - {"on_no_room"}
        rows: list[list[int]] = [[] for _ in ids]
        keys, began = [encode(each) for each in ids], monotonic()
        cached = [self.prefill(ns, key, hints=hints, as_of=as_of).num_cached_tokens for key in keys]
        lasts = [int(decode(key)[-1]) for key in keys]
        while len(rows[0]) < max_new_tokens and not (stop is not None and stop()):
            new = [
                [(last + len(row) + 1) % self.limits.vocab_size]
                for last, row in zip(lasts, rows, strict=True)
            ]
            for row, (token,) in zip(rows, new, strict=True):
                row.append(token)
            if on_step is not None:
                on_step(new)
        reasons: list[Any] = ["length" if len(row) == max_new_tokens else "stop" for row in rows]
        seconds = monotonic() - began
        return Generation(rows, [len(key) // 4 for key in keys], cached, reasons, seconds, seconds)

    def prefill(
        self,
        ns: Namespace,
        ids: Any,
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        on_no_room: Any = None,
        hints: Any = None,
        as_of: int | None = None,
    ) -> Prefill:
        with self.cache.open(ns, ids, hints=hints, as_of=as_of) as sequence:
            cached, total = sequence.num_cached_tokens, sequence.num_tokens
            sequence.commit(total)
            if on_chunk is not None:
                on_chunk(total, total)
            return Prefill(total, cached, total - cached, sequence.num_blocks, 0.0)

    def publish(self, base_id: str, ns: Namespace, ids: Any, readers: Iterable[str], **_: Any) -> Prefill:
        raise AssertionError("it has no bases")

    def health(self) -> list[str]:
        return self.sick

    def audit(self) -> list[str]:
        return [str(each) for each in audit.inspect(self.cache).violations]
