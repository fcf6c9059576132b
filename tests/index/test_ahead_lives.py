"""Random lives of sequences that compute ahead, with an engine that writes KV when its steps end.

Each row of a block has a tag: the prefix that its token ends, and the step that wrote it. A step writes when it is
scheduled, in order with all other work, and garbage if it will fail. Whatever is committed or matched must have the
right tags of steps that are done, at any time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from radixkv import Namespace, OutOfBlocks, PrefixCache, Sequence, audit
from radixkv.errors import FlushRequired
from radixkv.index import ahead, requests
from radixkv.index.state import CacheState
from tests.index.support import make_cache

LIVES = 150
NAMESPACES = (Namespace("a", "m"), Namespace("a", "m", None, "s"), Namespace("b", "m"))


class Wrong(Exception):
    """The cache shows KV that nobody computed."""


class Work(NamedTuple):
    """Tokens ``[start, stop)`` of a sequence that a step computes into its blocks of that moment."""

    namespace: Namespace
    ids: list[int]
    table: list[int]
    start: int
    stop: int


class Life:
    """One cache, its engine, and what runs."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.size = self.chance.choice((1, 2, 4))
        self.same_step = self.chance.random() < 0.5
        self.cache: PrefixCache = make_cache(
            self.chance.choice((12, 24, 48)), self.size, writes_before_reads=self.same_step
        )
        self.rows: dict[int, list[Any]] = {}
        self.running: list[Sequence] = []
        self.scheduled: dict[Sequence, int] = {}
        self.steps: dict[int, bool] = {}  # whether it fails
        self.done = {-1}
        self.num_steps = self.num_leaned = 0

    def live(self, num_calls: int) -> None:
        calls: list[Callable[[], None]] = [
            self.open,
            self.open,
            self.schedule,
            self.schedule,
            self.end,
            self.end,
        ]
        calls += [
            self.burst,
            self.end,
            self.append,
            self.truncate,
            self.fork,
            self.release,
            self.lookup,
            self.forget,
        ]
        for _ in range(num_calls):
            try:
                self.chance.choice(calls)()
            except FlushRequired:
                self.settle()
            except OutOfBlocks:
                if self.running:
                    self.release()
            self.check()
        while self.steps:
            self.end()
        while self.running:
            self.release()
        self.check()
        assert self.cache._steps == {} and self.cache._computing == {}

    # ---- calls

    def prompt(self) -> list[int]:
        """Mostly a beginning of one of two texts, so that prompts meet."""
        text = [self.chance.randrange(2)] * (5 * self.size)
        cut = self.chance.randrange(len(text))
        return text[:cut] + [self.chance.randrange(2) for _ in range(self.chance.randrange(1, 3))]

    def somewhere(self) -> Namespace:
        return NAMESPACES[0] if self.chance.random() < 0.7 else self.chance.choice(NAMESPACES)

    def open(self) -> None:
        if len(self.running) < 6:
            sequence = self.cache.open(self.somewhere(), self.prompt(), ahead=True)
            self.num_leaned += sequence.num_ahead_tokens
            self.running.append(sequence)

    def burst(self) -> None:
        """Requests that come together, each put into the step of the moment when it comes."""
        for _ in range(3):
            self.open()
            self.schedule()

    def schedule(self) -> None:
        """Put some sequences into a step."""
        step, fails = self.num_steps, self.chance.random() < 0.2
        self.settle()
        for sequence in [*self.running[-1:], *self.chance.sample(self.running, min(len(self.running), 2))]:
            if not sequence.is_open:
                continue
            start = self.known(sequence)
            if start >= sequence.num_tokens:
                continue
            stop = self.chance.randint(start + 1, sequence.num_tokens)
            try:
                sequence.computing(stop, step=step)
            except ValueError:  # it leans on this very step
                assert not self.same_step
                continue
            self.scheduled[sequence] = stop
            self.steps[step] = fails
            self.num_steps = step + 1
            work = Work(
                sequence.namespace, sequence.token_ids.tolist(), sequence.block_table.tolist(), start, stop
            )
            self.write(work, step, fails)

    def end(self) -> None:
        """End a step, mostly the oldest one. What a failed step was to compute is computed again."""
        if not self.steps:
            return
        step = min(self.steps) if self.chance.random() < 0.7 else self.chance.choice(list(self.steps))
        if not self.steps.pop(step):
            self.done.add(step)
            self.cache.step_done(step)
            return
        self.cache.step_failed(step)
        for each in self.running:
            entries = each._state._ahead
            ends = [entry.end for entry in entries or ()]
            known = max([*ends, each.num_committed_tokens])
            self.scheduled[each] = min(self.scheduled.get(each, 0), known)

    def append(self) -> None:
        open_ones = [each for each in self.running if each.is_open]
        if open_ones:
            self.cache.append([self.chance.choice(open_ones)], [self.chance.randrange(2)])

    def truncate(self) -> None:
        open_ones = [each for each in self.running if each.is_open and self.scheduled.get(each, 0) == 0]
        if open_ones:
            each = self.chance.choice(open_ones)
            low = each.num_committed_tokens + each.num_ahead_tokens
            if low <= each.num_tokens:
                each.truncate(self.chance.randint(low, each.num_tokens))

    def fork(self) -> None:
        """Fork what is computed or in a step. Otherwise both would compute, and write, the same blocks."""
        ready = [each for each in self.running if each.is_open and self.known(each) >= each.num_tokens]
        if ready and len(self.running) < 6:
            self.running += self.chance.choice(ready).fork(1)

    def known(self, sequence: Sequence) -> int:
        """Leading tokens that are computed, or that a step computes."""
        return max(self.scheduled.get(sequence, 0), sequence.num_committed_tokens + sequence.num_ahead_tokens)

    def release(self) -> None:
        if self.running:
            each = self.running.pop(self.chance.randrange(len(self.running)))
            self.scheduled.pop(each, None)
            each.release()

    def lookup(self) -> None:
        """An ordinary request that is computed at once."""
        self.settle()
        namespace, ids = self.somewhere(), self.prompt()
        with self.cache.open(namespace, ids) as sequence:
            work = Work(namespace, ids, sequence.block_table.tolist(), sequence.num_cached_tokens, len(ids))
            self.write(work, -1, False)
            sequence.commit(len(ids))

    def forget(self) -> None:
        chance = self.chance.random()
        if chance < 0.5:
            self.cache.evict(self.chance.randrange(6))
        elif chance < 0.7:
            self.cache.clear(self.chance.choice(NAMESPACES))
        elif chance < 0.8:
            self.cache.purge(self.chance.choice("ab"))
            for each in [each for each in self.running if not each.is_open]:
                self.running.remove(each)
                self.scheduled.pop(each, None)
                each.release()

    # ---- the engine

    def settle(self) -> None:
        for source, target, num_rows in self.cache.flush():
            rows = self.rows.setdefault(target, [None] * self.size)
            rows[:num_rows] = self.rows.get(source, [None] * self.size)[:num_rows]

    def write(self, work: Work, step: int, fails: bool) -> None:
        for at in range(work.start, work.stop):
            tag = "garbage" if fails else (work.namespace, *work.ids[: at + 1])
            rows = self.rows.setdefault(work.table[at // self.size], [None] * self.size)
            rows[at % self.size] = tag, step

    # ---- checks

    def check(self) -> None:
        audit.check(self.cache)
        for each in self.running:
            if each.is_open:
                self.holds(
                    each.namespace, each.token_ids.tolist(), each.block_table, each.num_committed_tokens
                )
                assert each.num_committed_tokens + each.num_ahead_tokens <= each.num_tokens
        for namespace in NAMESPACES:
            ids = self.prompt()
            match = self.cache.match(namespace, ids)
            self.holds(namespace, ids, match.block_ids, match.num_tokens)

    def holds(self, namespace: Namespace, ids: list[int], table: Any, num_tokens: int) -> None:
        for at in range(num_tokens // self.size * self.size):
            found = self.rows.get(int(table[at // self.size]), [None] * self.size)[at % self.size]
            tag, step = found or (None, None)
            if tag != (namespace, *ids[: at + 1]) or step not in self.done:
                raise Wrong(f"token {at} of {num_tokens}: {tag} of step {step}")


def test_random_lives() -> None:
    num_leaned = 0
    for seed in range(LIVES):
        life = Life(seed)
        life.live(50)
        num_leaned += life.num_leaned
    assert num_leaned > LIVES  # otherwise the lives prove little


def _failed_blocks_matched(cache: CacheState, step: int) -> int:
    return ahead.step_done(cache, step)


def _leaning_not_cut(cache: CacheState, step: int) -> int:
    for sequence in cache._steps.pop(step, {}):
        requests.keep_ahead(cache, sequence, [])
    return 0


def _shown_by_commit(cache: CacheState, sequence: Any, num_tokens: int, step: int) -> None:
    requests.commit(cache, sequence, num_tokens)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("step_failed", _failed_blocks_matched),
        ("step_failed", _leaning_not_cut),
        ("computing", _shown_by_commit),
    ],
)
def test_planted_bugs_are_found(name: str, planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step whose blocks match; sequences that still lean on them; blocks that match when offered."""
    from radixkv.index import cache as cache_module

    monkeypatch.setattr(ahead, name, planted)
    if hasattr(cache_module, name):
        monkeypatch.setattr(cache_module, name, planted)
    with pytest.raises((Wrong, AssertionError)):
        test_random_lives()
