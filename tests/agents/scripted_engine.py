"""An engine whose answers are given, with room for the prompts of real agents. It remembers what it was asked.

The model's context is as long as the hosted models' of those agents. The cache is a real one: a prompt and its answer
are committed as an engine does it, so the next request of a conversation finds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.clock import monotonic
from radixkv.engines import Ability, EngineSettings, Generation
from radixkv.index.changes import Journal
from radixkv.index.tokens import decode, encode
from tests.service.toy_engine import ToyEngine, ToyModel

MAX_MODEL_LEN = 262_144
CHOOSING = frozenset(("do_sample", "temperature", "top_k", "top_p", "seed", "eos_token_id"))
"""Arguments of ``generate`` that say how tokens are chosen."""
ENTRY = "[radixkv.engines]\nscripted = tests.agents.scripted_engine:load_engine\n"
"""The entry point of a package that brings this engine."""


class Asked(NamedTuple):
    """One call of ``generate``.

    ``prompt``, ``answer``: token ids. ``cached``: how many of the prompt's were found. ``options``: how to choose.
    ``form``: the forms that the answer may have, None for any.
    """

    prompt: list[int]
    answer: list[int]
    cached: int
    max_new_tokens: int
    options: dict[str, Any]
    form: Any


def load_engine(settings: EngineSettings) -> ScriptedModel:
    """Load nothing."""
    return ScriptedModel(settings)


class ScriptedModel(ToyModel):
    """A model that computes no KV."""

    def start(self, journal: Journal | None) -> ScriptedEngine:
        """Make the engine."""
        settings = self._settings
        config = CacheConfig(
            settings.num_blocks, settings.block_size, policy=settings.policy, default_tenant=None
        )
        return ScriptedEngine(PrefixCache(config, journal=journal), self.fingerprint, settings.vocab_size)


class ScriptedEngine(ToyEngine):
    """See ``radixkv.engines.Engine``. ``says``: the token ids of the next answer. ``asked``: all calls so far."""

    abilities: Collection[Ability] = frozenset(("as_of", "forms", "pins", "prefill"))

    def __init__(self, cache: PrefixCache, fingerprint: str, vocab_size: int) -> None:
        super().__init__(cache, fingerprint, vocab_size)
        self.limits = replace(self.limits, max_model_len=MAX_MODEL_LEN)
        self.says: Sequence[int] = ()
        self.asked: list[Asked] = []

    def form(self, tenant: str, alternatives: str, field: str) -> Any:
        """Return the forms that an answer may have. What it says has one of them, since the recorder's answers do."""
        return json.loads(alternatives)

    def generate(
        self,
        ns: Namespace,
        ids: Any,
        max_new_tokens: int,
        *,
        on_step: Callable[[list[list[int]]], None] | None = None,
        stop: Callable[[], bool] | None = None,
        hints: Any = None,
        as_of: int | None = None,
        form: Any = None,
        **options: Any,
    ) -> Generation:
        """Say what was given, a token a step."""
        (prompt,) = ids
        key, answer, began = encode(prompt), list(self.says)[:max_new_tokens], monotonic()
        told: list[int] = []
        with self.cache.open(ns, key, hints=hints, as_of=as_of) as sequence:
            cached = sequence.num_cached_tokens
            sequence.commit(sequence.num_tokens)
            for token_id in answer:
                told.append(token_id)
                sequence.append(token_id)
                if on_step is not None:
                    on_step([[token_id]])
                if stop is not None and stop():
                    break
            sequence.commit(sequence.num_tokens)
        chosen = {name: value for name, value in options.items() if name in CHOOSING}
        self.asked.append(Asked([*map(int, decode(key))], told, cached, max_new_tokens, chosen, form))
        seconds = monotonic() - began
        reason: Any = "length" if len(self.says) > max_new_tokens else "stop"
        return Generation([told], [len(key) // 4], [cached], [reason], seconds, seconds)
