"""The oracle: a simple model of what a cache may serve.

It is a dict of namespaces, each with a set of committed prefixes in whole blocks, and a dict of bases. A cache may
serve less than the oracle holds, because it evicts. It must never serve anything that the oracle doesn't hold.

A deterministic engine computes the KV. The KV of a token is a number made from the namespace's five fields and all
ids up to and including that token. So the bytes identify their owner, and contents are compared bit for bit.

    state(-1) = seed(tenant, model, adapter, salt, weights)      state(i) = mix(state(i-1), id(i))
    key row of token i = upper 52 bits of state(i)      value row = minus that

52 bits fit a float64 exactly. This module uses no code of the cache, so an error there can't hide itself here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from radixkv.clock import Clock
    from radixkv.config import CacheConfig
    from radixkv.storage.plan import StepPlan

_MASK = 2**64 - 1
_REMEMBERED = 1_024
"""Results that are kept: tests ask for the same prompts again and again."""


class NamespaceLike(Protocol):
    """The five fields that distinguish namespaces."""

    @property
    def tenant(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def salt(self) -> str: ...
    @property
    def weights(self) -> int: ...


Fields = tuple[str, str, str | None, str, int]


def fields_of(namespace: NamespaceLike) -> Fields:
    """Return the five fields as a tuple: the oracle's own key, which doesn't use the cache's framing."""
    return (namespace.tenant, namespace.model, namespace.adapter, namespace.salt, namespace.weights)


def kv_of(namespace: NamespaceLike) -> tuple[str, str | None, int]:
    """Return the fields that a base must have in common with its readers."""
    return (namespace.model, namespace.adapter, namespace.weights)


def chain(namespace: NamespaceLike, ids: Iterable[int], start: int | None = None) -> list[int]:
    """Return the states of ``ids``, one 64-bit integer a token. ``start`` is the state before them. O(len(ids))."""
    return list(_chained(_first_state(fields_of(namespace)) if start is None else start, tuple(ids)))


@lru_cache(_REMEMBERED)
def _first_state(fields: Fields) -> int:
    return int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:8], "little")


@lru_cache(_REMEMBERED)
def _chained(state: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    states = []
    for token_id in ids:
        state = (state * 6364136223846793005 + token_id * 1442695040888963407 + 1) & _MASK
        state ^= state >> 29
        states.append(state)
    return tuple(states)


def rows_of(states: Sequence[int]) -> NDArray[np.float64]:
    """KV rows of the tokens with these states: float64 ``[2, len(states)]``, keys then values. Read-only."""
    return _rows_of(tuple(states))


@lru_cache(_REMEMBERED)
def _rows_of(states: tuple[int, ...]) -> NDArray[np.float64]:
    keys = (np.array(states, dtype=np.uint64) >> np.uint64(12)).astype(np.float64)
    rows = np.stack([keys, -keys])
    rows.flags.writeable = False
    return rows


class Oracle:
    """The prefixes that were committed in each namespace since it was last cleared.

    This is a model for small tests: ``commit`` costs O(len(ids)² ÷ block_size), ``served_lie`` O(len(ids) × bases).
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._prefixes: dict[Fields, set[tuple[int, ...]]] = {}
        self._bases: dict[str, tuple[NamespaceLike, tuple[int, ...], frozenset[str]]] = {}

    def commit(self, namespace: NamespaceLike, ids: Sequence[int], num_tokens: int) -> None:
        """The KV of ``ids[:num_tokens]`` exists: the cache may serve its whole blocks from now on."""
        known = self._prefixes.setdefault(fields_of(namespace), set())
        for stop in range(self.block_size, num_tokens + 1, self.block_size):
            known.add(tuple(ids[:stop]))

    def clear(self, namespace: NamespaceLike) -> None:
        """From now on the cache may serve nothing of this namespace."""
        self._prefixes.pop(fields_of(namespace), None)

    def publish(
        self, base_id: str, namespace: NamespaceLike, ids: Sequence[int], readers: Iterable[str]
    ) -> None:
        """From now on the cache may serve whole blocks of ``ids`` to these tenants, for the same model, adapter and
        weights."""
        size = len(ids) // self.block_size * self.block_size
        self._bases[base_id] = (namespace, tuple(ids[:size]), frozenset(readers))

    def unpublish(self, base_id: str) -> None:
        """Undo ``publish``."""
        self._bases.pop(base_id, None)

    def _is_based(self, namespace: NamespaceLike, ids: tuple[int, ...]) -> bool:
        return any(
            namespace.tenant in readers and kv_of(namespace) == kv_of(owner) and base[: len(ids)] == ids
            for owner, base, readers in self._bases.values()
        )

    def served_lie(self, namespace: NamespaceLike, ids: Sequence[int], num_tokens: int) -> str | None:
        """Return why serving ``num_tokens`` of ``ids`` would be wrong; None if it is right."""
        if num_tokens % self.block_size:
            return f"{num_tokens} tokens are no whole blocks of {self.block_size}"
        if num_tokens > len(ids):
            return f"{num_tokens} tokens served of {len(ids)} asked for"
        served = tuple(ids[:num_tokens])
        known = self._prefixes.get(fields_of(namespace), ())
        if num_tokens and served not in known and not self._is_based(namespace, served):
            return f"{tuple(ids[:num_tokens])} was never committed in {fields_of(namespace)}"
        return None


def cache_with_engine(
    factory: Callable[..., Any], config: CacheConfig, *, clock: Clock
) -> tuple[Any, Engine]:
    """Make a cache and its engine. An engine that owns its KV zeroes the blocks that the cache scrubs."""
    if config.layout is not None:
        cache = factory(config, clock=clock)
        return cache, Engine(cache)
    made: list[Engine] = []
    cache = factory(config, clock=clock, scrub_blocks=lambda block_ids: made[0].scrub(block_ids))
    made.append(Engine(cache))
    return cache, made[0]


class Engine:
    """A deterministic engine over a cache's blocks, ``rows[block, key or value, row]``.

    With a layout, the engine writes into the cache's own storage (float64 or float32, one layer, one head, head size 1,
    on the CPU), and the cache executes its copies. Without one, the engine owns the rows, and executes ``flush()``
    before it touches them. It executes the last copy first: copies of a plan must not depend on each other, and this
    tests it.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._owned = cache.storage is None
        config = cache.config
        shape = (config.num_blocks, 2, config.block_size)
        if self._owned:
            self._rows: NDArray[Any] = np.zeros(shape, dtype=np.float64)
        else:
            self._rows = cache.storage.data.numpy().reshape(shape)
        self._copied_when_settled = 0

    @property
    def is_behind(self) -> bool:
        """Whether copies wait for ``settle``. An engine that owns its KV executes them before its next write."""
        return self._owned and self._cache.stats().copied_blocks != self._copied_when_settled

    def scrub(self, block_ids: NDArray[np.int32]) -> None:
        """Zero these blocks. Only for an engine that owns its KV."""
        self._rows[block_ids] = 0

    def settle(self) -> None:
        """Execute the waiting copies."""
        if self._owned:
            self._execute(self._cache.flush())
            self._copied_when_settled = self._cache.stats().copied_blocks

    def write(self, block_table: NDArray[np.int32], start: int, states: Sequence[int]) -> None:
        """Compute tokens ``[start, start + len(states))`` into their blocks."""
        self.settle()
        blocks, rows = self._where(block_table, start, start + len(states))
        self._rows[blocks, :, rows] = rows_of(states).T

    def holds(self, block_table: NDArray[np.int32], states: Sequence[int], within: float = 0.0) -> bool:
        """Whether the first ``len(states)`` rows under ``block_table`` are those of ``states``, bit for bit.

        ``within``: the relative error that is allowed, in place of equal bits. It doesn't execute waiting copies, so
        the blocks must be settled.
        """
        blocks, rows = self._where(block_table, 0, len(states))
        found, wanted = self._rows[blocks, :, rows], rows_of(states).T.astype(self._rows.dtype)
        if within:
            return bool((np.abs(found - wanted) <= within * np.abs(wanted)).all())
        return bool(np.array_equal(found, wanted))

    def read(self, block_ids: NDArray[np.int32]) -> NDArray[Any]:
        """Return a copy of whole blocks, ``[len(block_ids), 2, block_size]``.

        As in ``holds``, they must be settled.
        """
        return self._rows[block_ids]

    def _where(
        self, table: NDArray[np.int32], start: int, stop: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        positions = np.arange(start, stop)
        size = self._rows.shape[2]
        return table[positions // size], positions % size

    def _execute(self, plan: StepPlan) -> None:
        copies = list(plan)
        targets = [target for _, target, _ in copies]
        if len(set(targets)) != len(targets) or {source for source, _, _ in copies} & set(targets):
            raise AssertionError(f"copies of one plan depend on each other: {copies}")
        for source, target, num_rows in reversed(copies):
            if not 0 < num_rows < self._rows.shape[2]:
                raise AssertionError(f"a copy of {num_rows} rows of {self._rows.shape[2]}: {copies}")
            self._rows[target, :, :num_rows] = self._rows[source, :, :num_rows]
