"""Random lives of bases and of requests behind them. A slow reference gives the exact matches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv import ArgumentError, CacheConfig, Namespace, PrefixCache
from radixkv import Sequence as CacheSequence
from radixkv.audit import invariants
from radixkv.audit.oracle import Engine, chain
from tests.index.test_bases import OP, SALTED, A, B


class Reference:
    """A plain reference: each place is a set of prefixes, and nothing is evicted.

    A place is a namespace's own tree, or the point behind a base where a request left it. A request uses the place with
    the longest match. Among equal matches it uses the place that shares the most of a base.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.bases: dict[str, tuple[tuple[int, ...], set[str], str | None]] = {}
        self.places: dict[tuple[Namespace, str | None, int], set[tuple[int, ...]]] = {}

    def find(self, namespace: Namespace, ids: Sequence[int], stop: int) -> tuple[int, tuple[str | None, int]]:
        """The number of matched tokens of ``ids[:stop]``, and their place."""
        stop -= stop % self.block_size
        found = [(self._reach(namespace, None, 0, ids, stop), 0, None)]
        for base_id, (prefix, readers, adapter) in self.bases.items():
            if namespace.tenant in readers and namespace.adapter == adapter:
                cut = next((at for at in range(min(len(prefix), stop)) if prefix[at] != ids[at]), None)
                cut = min(len(prefix), stop) if cut is None else cut
                cut -= cut % self.block_size
                for at in (cut, cut - self.block_size):
                    if at > 0 and (at == cut or (namespace, base_id, at) in self.places):
                        found.append((self._reach(namespace, base_id, at, ids, stop), at, base_id))
        reach, at, base_id = max(found, key=lambda each: each[:2])
        return reach, (base_id, at)

    def _reach(
        self, namespace: Namespace, base_id: str | None, at: int, ids: Sequence[int], stop: int
    ) -> int:
        known = self.places.get((namespace, base_id, at), set())
        return max([len(each) for each in known if each == tuple(ids[: min(len(each), stop)])], default=at)


LETTERS = st.lists(st.integers(0, 1), max_size=9)


class BaseMachine(RuleBasedStateMachine):
    """Requests of two readers and of other tenants, while bases come and go."""

    @initialize(block_size=st.sampled_from((1, 2)), policy=st.sampled_from(("lru", "lfu", "arc")))
    def make(self, block_size: int, policy: str) -> None:
        self.cache = self.cache_of(CacheConfig(4_096, block_size, policy=policy))
        self.engine = Engine(self.cache)
        self.reference, self.block_size = Reference(block_size), block_size
        self.running: list[tuple[CacheSequence, Namespace, list[int], tuple[str | None, int], list[int]]] = []
        self.kv: dict[str, list[int]] = {}
        self.gone: set[CacheSequence] = set()

    def cache_of(self, config: CacheConfig) -> PrefixCache:
        """The cache under test."""
        return PrefixCache(config)

    @rule(
        base_id=st.sampled_from("xyz"),
        ids=LETTERS,
        readers=st.sets(st.sampled_from("ab")),
        adapter=st.sampled_from((None, None, "t")),
    )
    def publish(self, base_id: str, ids: list[int], readers: set[str], adapter: str | None) -> None:
        size = len(ids) // self.block_size * self.block_size
        if base_id in self.reference.bases or not size:
            with pytest.raises(ArgumentError):
                self.cache.publish(base_id, OP, ids[:size], readers)
            return
        with self.cache.publish(base_id, OP._replace(adapter=adapter), ids, readers) as sequence:
            states = chain(sequence.namespace, ids[:size])
            self.engine.write(sequence.block_table, 0, states)
            sequence.commit(size)
        self.reference.bases[base_id] = (tuple(ids[:size]), set(readers), adapter)
        self.kv[base_id] = states

    @rule(base_id=st.sampled_from("xyz"))
    def unpublish(self, base_id: str) -> None:
        if self.reference.bases.pop(base_id, None) is not None:
            self.cache.unpublish(base_id)
            self._forget(lambda place: place[1] == base_id)

    @rule(base_id=st.sampled_from("xyz"), readers=st.sets(st.sampled_from("ab")))
    def set_readers(self, base_id: str, readers: set[str]) -> None:
        if base_id in self.reference.bases:
            self.cache.set_readers(base_id, readers)
            ids, _, adapter = self.reference.bases[base_id]
            self.reference.bases[base_id] = (ids, set(readers), adapter)
            self._forget(lambda place: place[1] == base_id and place[0].tenant not in readers)

    @rule(
        who=st.sampled_from((A, B, A, B, SALTED, Namespace("a", "m", "t"), Namespace("c", "m"))), ids=LETTERS
    )
    def open(self, who: Namespace, ids: list[int]) -> None:
        reach, place = self.reference.find(who, ids, max(len(ids) - 1, 0))
        sequence = self.cache.open(who, ids)
        assert sequence.num_cached_tokens == reach, (place, self.reference.bases, self.reference.places)
        base_id, cut = place
        states = (self.kv[base_id][:cut] if base_id else []) + chain(who, ids)[cut:]
        assert self.engine.holds(sequence.block_table, states[:reach])
        if place[0] is not None:
            self.reference.places.setdefault((who, *place), set())
        self.running.append((sequence, who, [*ids], place, states))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), more=st.integers(0, 3), ends=st.booleans())
    def go_on(self, which: int, more: int, ends: bool) -> None:
        """Extend a request by ids that no base has, compute it and commit it."""
        at = which % len(self.running)
        sequence, who, ids, place, states = self.running[at]
        before = sequence.num_committed_tokens
        sequence.extend([7] * more)
        states += chain(who, [7] * more, states[-1] if states else None)
        ids += [7] * more
        self.engine.write(sequence.block_table, before, states[before:])
        sequence.commit(len(ids))
        known = self.reference.places.get((who, *place))
        if place[0] is None:
            known = self.reference.places.setdefault((who, None, 0), set())
        if known is not None and sequence not in self.gone:
            first = place[1] + self.block_size
            known |= {tuple(ids[:stop]) for stop in range(first, len(ids) + 1, self.block_size)}
        if ends:
            del self.running[at]
            sequence.release()
            self._drop_empty()

    @rule(who=st.sampled_from((A, SALTED, B)), purges=st.booleans())
    def forget(self, who: Namespace, purges: bool) -> None:
        if purges:
            self.cache.purge(who.tenant)
            for sequence, *_ in [each for each in self.running if each[1].tenant == who.tenant]:
                sequence.release()
            self.running = [each for each in self.running if each[1].tenant != who.tenant]
        else:
            self.cache.clear(who)
        self._forget(lambda place: place[0] == who or (purges and place[0].tenant == who.tenant))

    def _forget(self, is_gone: Callable[[tuple[Namespace, str | None, int]], bool]) -> None:
        """Requests that were opened in a forgotten place are cut off: their blocks are never found."""
        self.gone |= {each[0] for each in self.running if is_gone((each[1], *each[3]))}
        for place in [place for place in self.reference.places if is_gone(place)]:
            del self.reference.places[place]

    def _drop_empty(self) -> None:
        """Drop places behind a base that hold no prefix and no request."""
        used = {(each[1], *each[3]) for each in self.running}
        for place, known in list(self.reference.places.items()):
            if not known and place not in used:
                del self.reference.places[place]

    @invariant()
    def the_laws_hold_and_matches_are_what_they_should_be(self) -> None:
        if not hasattr(self, "cache"):
            return
        invariants.check(self.cache)
        for ids in ([0] * 9, [1, 0] * 4, [0, 1, 1, 0, 1, 0, 0, 7, 7]):
            for who in (A, B, SALTED):
                reach, _ = self.reference.find(who, ids, len(ids))
                assert self.cache.match(who, ids).num_tokens == reach, (who, ids, self.reference.bases)
        for sequence, *_, states in self.running:
            self.engine.settle()
            assert self.engine.holds(sequence.block_table, states[: sequence.num_committed_tokens])

    def teardown(self) -> None:
        """End everything. The bases must release all blocks."""
        if not hasattr(self, "cache"):
            return
        for base_id in list(self.reference.bases):
            self.cache.unpublish(base_id)
        for sequence, *_ in self.running:
            sequence.release()
        assert self.cache.stats().base_blocks == 0
        self.cache.evict(4_096)
        assert self.cache.stats().free_blocks == 4_096
        invariants.check(self.cache)


TestBases = BaseMachine.TestCase
TestBases.settings = settings(max_examples=40, stateful_step_count=30)
