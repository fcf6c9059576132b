"""The cache of vLLM's scheduler, driven by a small scheduler that behaves like vLLM's, without vLLM.

Each KV is a hash of everything before it, so a wrong block shows in every later token. A step writes all its KV before
it reads any, as vLLM does. Its output may come a step late, as with async scheduling.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest

from radixkv import Tenant, audit
from radixkv.engines.vllm.cache import NULL_BLOCK, VllmCache
from radixkv.errors import ConfigError
from radixkv.index.cache import PrefixCache
from radixkv.index.fences import Fence
from radixkv.signing import KeySet
from radixkv.tenancy.request_keys import RequestFacts, labels_of
from radixkv.tenancy.salt import SaltReader, make_salt

pytestmark = pytest.mark.slow

SIZE = 4
PLAIN = RequestFacts()
KEYS = KeySet.derive([b"a secret of the fleet"])
OTHERS = KeySet.derive([b"another fleet, other secret"])


def kv_of(facts: RequestFacts, ids: list[int], weights: int = 0) -> list[int]:
    """The KV of each token: a hash of what it depends on."""
    found, state = [], hash((facts.adapter, tuple(sorted(facts.material)), weights))
    for token in ids:
        state = hash((state, token))
        found.append(state)
    return found


_KV: dict[VllmCache, dict[tuple[int, int], int]] = {}
"""The KV in the blocks of each cache."""


@dataclass
class Request:
    """A request of the small scheduler. The worker knows its ``answer`` before the scheduler gets it."""

    name: str
    facts: RequestFacts
    ids: list[int]
    answer: list[int]
    num_computed: int = 0
    num_waiting: int = 0
    """Samples of which the ids haven't come."""
    is_running: bool = False
    table: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)
    every_id: list[int] = field(default_factory=list)
    max_ids: int = 0

    def __post_init__(self) -> None:
        self.every_id = [*self.ids, *self.answer]
        self.max_ids = len(self.every_id)
        self.begin(0)

    def begin(self, weights: int) -> None:
        """Compute nothing so far, and all with these weights."""
        self.is_running, self.num_computed, self.num_waiting, self.table = False, 0, 0, []
        self.kv = kv_of(self.facts, self.every_id, weights)


@dataclass
class Row:
    """What a step computes of a request. ``num_right`` of the tokens are right: the others are rejected drafts."""

    request: Request
    start: int
    num_new: int
    num_right: int
    num_preempted: int
    num_samples: int


class Engine:
    """Schedules requests in steps of at most ``budget`` tokens. With ``late`` an output comes after the next step."""

    def __init__(
        self, cache: VllmCache, budget: int = 24, late: bool = False, drafts: int = 0, seed: int = 0
    ) -> None:
        self.cache, self.budget, self.late, self.drafts = cache, budget, late, drafts
        self.dice = random.Random(seed)
        self.kv = _KV.setdefault(cache, {})
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps: deque[tuple[int, list[Row]]] = deque()
        self.num_cached = self.num_computed = self.num_preempted = self.num_copied = 0
        self.fences: list[Fence] = []
        self.weights = 0

    def new_weights(self) -> None:
        """Change the weights. What runs goes on, and gets KV that are right for nobody else."""
        self.cache.weights_change()
        self.weights += 1
        for request in self.waiting:
            request.begin(self.weights)
        for request in self.running:
            rest = range(request.num_computed, request.max_ids)
            request.kv[request.num_computed :] = [hash((request.name, self.weights, at)) for at in rest]

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self.waiting.append(request)

    def schedule(self) -> None:
        """Schedule a step, preempt requests if there are too few blocks, and compute it."""
        step, left, before = self.cache.begin_step(), self.budget, self.num_preempted
        rows: list[Row] = []
        for request in list(self.running):
            if not request.is_running:
                continue
            known = len(request.ids) + request.num_waiting
            end = min(known + self._num_drafts(request), request.max_ids - 1)
            num_new = min(end - request.num_computed, left)
            if num_new <= 0:
                continue
            blocks = self._grow(request, num_new)
            rows = [row for row in rows if row.request.is_running]
            if blocks is not None:
                request.table += blocks
                rows.append(self._row(request, known, num_new))
                left -= num_new
        while self.waiting and left > 0 and self.num_preempted == before:
            request = self.waiting[0]
            _, found = self.cache.lookup(request.name, request.facts, request.ids)
            num_new = min(len(request.ids) - found, left)
            blocks = self.cache.allocate(
                request.name,
                request.facts,
                request.ids,
                found,
                num_new,
                num_rows=found % SIZE,
                must_fit=True,
            )
            if blocks is None:
                break
            self.num_copied += found % SIZE > 0
            self.running.append(self.waiting.popleft())
            request.table, request.num_computed = self.cache.blocks(request.name), found
            request.is_running = True
            rows.append(self._row(request, len(request.ids), num_new))
            self.num_cached += found
            left -= num_new
        for source, target, hold in self.cache.take_copies():
            self.kv.update({(target, row): self.kv.get((source, row), -1) for row in range(SIZE)})
            hold.lift()
        self._compute(rows)
        self.steps.append((step, rows))
        audit.check(self.cache.cache)

    def _num_drafts(self, request: Request) -> int:
        return self.drafts if request.num_computed + 1 >= len(request.ids) else 0

    def _grow(self, request: Request, num_new: int) -> list[int] | None:
        """Return new blocks; preempts the last requests until there are enough, or this one itself."""
        while True:
            blocks = self.cache.allocate(
                request.name, request.facts, request.ids, request.num_computed, num_new
            )
            if blocks is not None:
                return blocks
            victim = self.running.pop()
            self.cache.release(victim.name)
            victim.begin(self.weights)
            self.waiting.appendleft(victim)
            self.num_preempted += 1
            if victim is request:
                return None

    def _row(self, request: Request, known: int, num_new: int) -> Row:
        """Note a row: it samples if it computes all known tokens, and takes some of its drafts."""
        start = request.num_computed
        request.num_computed += num_new
        num_drafts = max(request.num_computed - known, 0)
        num_kept = self.dice.randrange(num_drafts + 1)
        samples = 1 + num_kept if request.num_computed >= known else 0
        if samples and not num_drafts:
            request.num_waiting += 1
        return Row(request, start, num_new, num_new - num_drafts + num_kept, self.num_preempted, samples)

    def _compute(self, rows: list[Row]) -> None:
        for row in rows:
            for at in range(row.start, row.start + row.num_new):
                block = row.request.table[at // SIZE]
                assert block != NULL_BLOCK
                is_right = at < row.start + row.num_right
                self.kv[block, at % SIZE] = row.request.kv[at] if is_right else -1
        for row in rows:
            for at in range(row.start + row.num_right):
                found = self.kv.get((row.request.table[at // SIZE], at % SIZE))
                assert found == row.request.kv[at], (row.request.name, at)
            self.num_computed += row.num_new

    def update(self) -> None:
        """Take the output of the oldest step: its blocks exist now, and requests get their next ids."""
        step, rows = self.steps.popleft()
        self.cache.end_step(step)
        for row in rows:
            request = row.request
            if not request.is_running or not row.num_samples or row.start >= request.num_computed:
                continue
            request.num_waiting = max(request.num_waiting - 1, 0)
            have = request.max_ids - len(request.answer)
            for _ in range(min(row.num_samples, request.max_ids - len(request.ids))):
                request.ids.append(request.answer[len(request.ids) - have])
            if self.drafts:
                request.num_computed = min(request.num_computed, row.start + row.num_right)
            self.cache.commit(request.name, request.ids, request.num_computed - request.num_waiting)
            if len(request.ids) >= request.max_ids:
                self._finish(request)
        audit.check(self.cache.cache)

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        request.is_running = False
        if self.late:
            self.fences.append(Fence())
        self.cache.release(request.name, self.fences[-1] if self.late else None)

    def run(self, changes: float = 0) -> None:
        """Run all requests to their end. ``changes``: how probably the weights change before a step."""
        for _ in range(2_000):
            if not (self.waiting or self.running or self.steps):
                break
            if changes and self.dice.random() < changes:
                self.new_weights()
            if self.waiting or self.running:
                self.schedule()
            while len(self.steps) > self.late or (self.steps and not (self.waiting or self.running)):
                self.update()
            if self.dice.random() < 0.3:
                self._lift()
        self._lift()
        assert not self.waiting and not self.running, "it makes no progress"

    def _lift(self) -> None:
        for fence in self.fences:
            fence.lift()
        self.fences = []


def make(num_blocks: int = 40, **settings: Any) -> VllmCache:
    """A cache whose time goes on by a millisecond each time that it is asked for."""
    times = count()
    cache = partial(PrefixCache, clock=lambda: next(times) / 1_000)
    return VllmCache(num_blocks, SIZE, 512, model="m", make=cache, **{"policy": "lru", **settings})


def served(cache: VllmCache, ids: list[int], facts: RequestFacts = PLAIN, name: str = "r") -> int:
    """Serve one request of one answer token. Return its cached tokens."""
    engine = Engine(cache)
    engine.add(Request(name, facts, list(ids), [1]))
    engine.run()
    return engine.num_cached


def test_a_request_finds_what_another_computed() -> None:
    cache, ids = make(), list(range(20))
    assert served(cache, ids) == 0
    assert served(cache, ids) == 16
    assert served(cache, [*ids, 1, 2, 3, 4, 5]) == 20
    assert not cache.has_requests and cache.usage == 0


def test_a_tail_is_found_as_often_as_it_is_asked_for() -> None:
    cache, ids = make(copies=True), list(range(18))
    assert [served(cache, ids) for _ in range(4)] == [0, 17, 17, 17]


def test_blocks_are_committed_when_their_step_is_over_not_before() -> None:
    cache, ids = make(), list(range(20))
    step = cache.begin_step()
    assert len(cache.allocate("a", RequestFacts(), ids, 0, 20) or ()) == 5
    assert cache.cache.resident_blocks == 0 and cache.num_committed("a") == 0
    cache.end_step(step)
    assert cache.cache.resident_blocks == 5 and cache.num_committed("a") == 20
    cache.release("a")


def test_a_burst_computes_a_prompt_once() -> None:
    cache = make(200)
    engine = Engine(cache, budget=2_000)
    for number in range(8):
        engine.add(Request(f"r{number}", PLAIN, list(range(100)), [1]))
    engine.run()
    assert engine.num_computed == 100 + 7 * 4


def test_an_aborted_owner_leaves_those_that_lean_on_it() -> None:
    cache, ids = make(), list(range(20))
    step = cache.begin_step()
    cache.allocate("a", RequestFacts(), ids, 0, 20)
    found = cache.lookup("b", RequestFacts(), ids)
    assert found == ([], 16)
    assert len(cache.allocate("b", RequestFacts(), ids, 16, 4) or ()) == 1
    cache.release("a")
    cache.end_step(step)
    assert cache.num_committed("b") == 20
    cache.release("b")
    assert cache.usage == 0


def test_the_worker_s_blocks_keep_their_ids_while_drafts_come_and_go() -> None:
    cache, ids = make(), list(range(10))
    first = cache.allocate("a", RequestFacts(), ids, 0, 10, num_lookahead=5)
    assert first is not None and len(first) == 4
    ids += [1, 2]
    more = cache.allocate("a", PLAIN, ids, 10, 2, num_lookahead=5)
    assert more is not None and len(more) == 1
    assert cache.blocks("a") == first + more
    ids += [3]
    assert cache.allocate("a", PLAIN, ids, 12, 1, num_lookahead=5) == []
    cache.release("a")


def test_too_few_blocks_are_no_error_and_leave_nothing() -> None:
    cache = make(6)
    assert cache.allocate("a", RequestFacts(), list(range(16)), 0, 16) is not None
    assert cache.allocate("b", RequestFacts(), list(range(50, 66)), 0, 16) is None
    assert cache.allocate("b", RequestFacts(), list(range(50, 54)), 0, 4, spare_blocks=1) is None
    assert cache.allocate("b", RequestFacts(), list(range(50, 62)), 0, 4, must_fit=True) is None
    assert cache.allocate("b", RequestFacts(), list(range(50, 54)), 0, 4) is not None
    assert cache.allocate("a", RequestFacts(), list(range(17)), 16, 1) is None
    for name in "ab":
        cache.release(name)
    assert cache.usage == 0 and audit.check(cache.cache).ok


def test_block_0_is_never_handed_out() -> None:
    cache = make(9)
    blocks = cache.allocate("a", RequestFacts(), list(range(32)), 0, 32)
    assert blocks is not None and sorted(blocks) == list(range(1, 9))
    cache.release("a")
    with pytest.raises(ConfigError, match="null block"):
        make(1)


# --- whose request it is


def test_salts_decide_the_tenant_and_forged_ones_get_no_cache() -> None:
    cache, ids = make(salts=SaltReader(KEYS)), list(range(20))
    acme, globex = (RequestFacts(make_salt(KEYS, who)) for who in ("acme", "globex"))
    assert [served(cache, ids, acme), served(cache, ids, globex), served(cache, ids, acme)] == [0, 0, 16]
    forged = RequestFacts(make_salt(OTHERS, "acme"))
    for _ in range(2):
        assert served(cache, ids, forged) == 0
    assert cache.num_refused_salts == 2 and len(cache.cache.namespaces()) == 2
    assert served(cache, ids) == 0 and served(cache, ids) == 16
    assert served(cache, ids, RequestFacts("any text")) == 0


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize(
    "salt", ["\ud800", "a\udfff" * 50, "\x00", "x" * 5_000_000, "rks1.", "rks1." + "A" * 180]
)
def test_no_salt_of_a_client_stops_the_engine(salt: str, has_keys: bool) -> None:
    cache, ids = make(salts=SaltReader(KEYS) if has_keys else None), list(range(20))
    served(cache, ids, RequestFacts(salt))
    served(cache, ids, RequestFacts(salt))
    assert served(cache, ids) == 0, "what was served under another salt is found"
    assert served(cache, ids) == 16


@pytest.mark.parametrize(
    "facts",
    [
        RequestFacts(material=((0, 8, "x"), (4, 8, "y"))),
        RequestFacts(material=((0, 0, "x"),)),
        RequestFacts(material=((-1, 4, "x"),)),
        RequestFacts(adapter="\ud800"),
        RequestFacts(adapter="x" * 5_000),
    ],
)
def test_facts_that_no_key_can_hold_get_no_cache(facts: RequestFacts) -> None:
    cache, ids = make(), list(range(20))
    assert [served(cache, ids, facts), served(cache, ids, facts)] == [0, 0]
    assert cache.cache.resident_blocks == 0


def test_images_may_come_in_any_order() -> None:
    cache, ids = make(), list(range(20))
    one, other = ((8, 4, "dog"), (0, 4, "\ud800")), ((0, 4, "\ud800"), (8, 4, "dog"))
    assert [served(cache, ids, RequestFacts(material=each)) for each in (one, other)] == [0, 16]


def test_without_keys_each_salt_is_apart() -> None:
    cache, ids = make(), list(range(20))
    assert [served(cache, ids, RequestFacts(salt)) for salt in (None, "a", "b", "a", None)] == [
        0,
        0,
        0,
        16,
        16,
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RequestFacts(adapter="x:1"), RequestFacts(adapter="y:2")),
        (RequestFacts(adapter="x:1"), RequestFacts(cache_salt="x:1")),
        (RequestFacts(material=((0, 8, "cat"),)), RequestFacts(material=((0, 8, "dog"),))),
        (RequestFacts(material=((0, 8, "cat"),)), RequestFacts()),
    ],
)
def test_what_kv_depend_on_keeps_requests_apart(one: RequestFacts, other: RequestFacts) -> None:
    cache, ids = make(), [7] * 8 + list(range(12))
    assert [served(cache, ids, each) for each in (one, other, one, other)] == [0, 0, 16, 16]


def test_requests_that_must_not_look_up_or_share() -> None:
    cache, ids = make(), list(range(20))
    assert served(cache, ids, RequestFacts(is_private=True)) == 0
    assert cache.cache.resident_blocks == 0
    assert served(cache, ids, RequestFacts(looks_up=False)) == 0 and cache.cache.resident_blocks == 5
    assert served(cache, ids, RequestFacts(looks_up=False)) == 0
    assert served(cache, [*ids[:10], 2**32, 5, 6, 7, 8, 9]) == 0, "no key can hold such an id"
    assert served(cache, ids) == 16


def test_a_reset_waits_for_requests() -> None:
    cache, ids = make(), list(range(20))
    cache.allocate("a", RequestFacts(), ids, 0, 20)
    assert not cache.reset()
    cache.release("a")
    served(cache, ids)
    assert cache.reset() and cache.cache.resident_blocks == 0 and served(cache, ids) == 0


def test_blocks_that_change_tenant_are_named_to_be_zeroed() -> None:
    cache = make(6, salts=SaltReader(KEYS), scrub=True)
    acme, globex = (RequestFacts(make_salt(KEYS, who)) for who in ("acme", "globex"))
    for prompt in (range(16), range(20, 36)):
        served(cache, list(prompt), acme)
    cache.take_blocks_to_zero()  # at first all blocks were the engine's
    served(cache, list(range(16)), acme)
    assert cache.take_blocks_to_zero() == []
    served(cache, list(range(16)), globex)
    assert len(cache.take_blocks_to_zero()) >= 3 and cache.take_blocks_to_zero() == []


# --- random traffic


@pytest.mark.parametrize("copies", [False, True], ids=["whole", "copies"])
@pytest.mark.parametrize(
    ("late", "drafts"), [(False, 0), (False, 2), (True, 0)], ids=["sync", "drafts", "async"]
)
@pytest.mark.parametrize("changes", [0, 0.1], ids=["", "weights"])
@pytest.mark.parametrize("seeds", [range(12, 22), pytest.param(range(30), marks=pytest.mark.release)])
def test_random_traffic_reads_the_right_kv_and_leaves_nothing(
    late: bool, drafts: int, copies: bool, changes: float, seeds: range
) -> None:
    preempted = cached = copied = 0
    for seed in seeds:
        dice = random.Random(seed)
        cache = make(dice.choice((12, 20, 60)), policy=dice.choice(("lru", "learned")), copies=copies)
        engine = Engine(cache, dice.choice((6, 16, 64)), late, drafts, seed)
        for number in range(14):
            length = dice.randrange(1, 26)
            ids = [number % 2] * (length // 2) + [dice.randrange(3) for _ in range(length - length // 2)]
            facts = RequestFacts(
                dice.choice((None, None, "a")), is_private=dice.random() < 0.1, looks_up=dice.random() < 0.9
            )
            answer = [dice.randrange(3) for _ in range(dice.randrange(1, 12))]
            engine.add(Request(f"r{number}", facts, ids, answer))
        engine.run(changes)
        assert not cache.has_requests and cache.usage == 0, seed
        assert cache.cache.stats().num_sequences == 0
        preempted += engine.num_preempted
        cached += engine.num_cached
        copied += engine.num_copied
    assert preempted > 20 and cached > 100, (preempted, cached)
    assert (copied > (5 if changes else 20)) == copies, copied


def limited(num_blocks: int = 12) -> VllmCache:
    cache = VllmCache(64, SIZE, 256, model="m")
    cache.cache.add_tenant(Tenant("default", max_blocks=num_blocks, max_pinned_blocks=num_blocks))
    return cache


def begun(cache: VllmCache, name: str, num_ids: int, num_most: int) -> bool | None:
    """Let a request begin if its tenant's limit allows it."""
    ids, facts = list(range(num_ids)), RequestFacts(name, num_most=num_most)
    fits = cache.fits_its_tenant(name, facts, ids)
    if fits:
        _, found = cache.lookup(name, facts, ids)
        assert cache.allocate(name, facts, ids, found, num_ids - found) is not None
    return fits


def released(cache: VllmCache) -> None:
    for name in list(cache._requests):
        cache.release(name)
    assert not cache.has_requests and set(cache._most_blocks.values()) <= {0}


def test_a_running_request_never_meets_its_tenants_limit() -> None:
    """vLLM would preempt requests of other tenants, where there is no room to gain."""
    cache = limited()
    cache.begin_step()
    assert begun(cache, "a", 8, 28) and begun(cache, "b", 9, 20)
    assert begun(cache, "c", 4, 4) is False
    for end in range(9, 29):
        for name, start, most in (("a", 8, 28), ("b", 9, 20)):
            if start < end <= most:
                got = cache.allocate(name, RequestFacts(name), list(range(end)), end - 1, 1)
                assert got is not None
    cache.release("b")
    assert begun(cache, "c", 4, 4) is True
    assert cache.fits_its_tenant("a", PLAIN, list(range(28))) is True, "it runs"
    released(cache)


def test_a_request_that_no_limit_can_hold_is_told_so() -> None:
    cache = limited()
    assert begun(cache, "a", 8, 12 * SIZE + 1) is None
    assert begun(cache, "b", 8, 12 * SIZE) is True
    other = VllmCache(64, SIZE, 256, model="m")
    assert begun(other, "a", 8, 10_000) is True, "no limit"
    released(cache)
    released(other)


def test_pinned_blocks_count_unless_the_request_finds_them() -> None:
    cache = limited()
    cache.begin_step()
    ids = list(range(8 * SIZE))
    assert begun(cache, "s", len(ids), len(ids))
    cache.end_step(1)
    pin = cache.cache.pin(cache._requests["s"].namespace, ids, 60)
    cache.release("s")
    cache.begin_step()
    assert begun(cache, "another", 8, 5 * SIZE) is False
    assert begun(cache, "s", len(ids) + 1, 12 * SIZE) is True
    cache.release("s")
    cache.cache.unpin(pin)
    assert begun(cache, "another", 8, 5 * SIZE) is False, "pins are counted once a step"
    cache.begin_step()
    assert begun(cache, "another", 8, 5 * SIZE) is True
    released(cache)


def test_a_request_that_finds_more_than_it_was_told_begins_all_the_same() -> None:
    """It would be told the same at each step, and keep all others waiting."""
    cache, ids = VllmCache(64, SIZE, 256, model="m"), list(range(3 * SIZE + 1))
    step = cache.begin_step()
    assert cache.lookup("late", PLAIN, ids) == ([], 0)
    assert cache.allocate("early", PLAIN, ids, 0, len(ids)) is not None
    cache.end_step(step)
    cache.begin_step()
    blocks = cache.allocate("late", PLAIN, ids, 0, len(ids))
    assert blocks is not None and len(blocks) == 4
    assert not set(blocks) & set(cache.blocks("early")), "it writes its KV into blocks of its own"
    cache.end_step(2)
    released(cache)


def test_steps_that_are_only_noted_leave_what_allocated_steps_leave() -> None:
    """One step is late, as with async scheduling. The request ends while its last step runs."""
    left = []
    for notes in (False, True):
        cache = VllmCache(64, 4, 200, model="m", policy="lru", copies=True)
        ids, num_noted, running = [*range(6)], 0, list[int]()
        assert cache.lookup("a", RequestFacts(), ids) == ([], 0)
        for computed in [0, *range(6, 31)]:
            running.append(cache.begin_step())
            end = len(ids)
            if notes and cache.goes_on("a", ids, end):
                num_noted += 1
            else:
                assert cache.allocate("a", RequestFacts(), ids, computed, end - computed) is not None
            ids.append(100 + computed)
            if len(running) > 1:
                cache.end_step(running.pop(0))
        blocks = cache.blocks("a")
        cache.release("a")
        cache.end_step(running.pop())
        found = cache.lookup("b", RequestFacts(), [*ids, 7])
        left.append((blocks, found, cache.cache.resident_blocks))
        assert (num_noted > 10) == notes and found[1] == 30
        audit.check(cache.cache)
    assert left[0] == left[1]


def test_labels_of_a_session_reach_the_policy_of_its_tenant() -> None:
    """vLLM's session, and numbers of the client's. Equal names in other namespaces are other sessions."""
    given = {
        "radixkv_turn": 2,
        "radixkv_tool_pending": 1,
        "radixkv_unknown": 5,
        "radixkv_session_over": "yes",
    }
    labels = labels_of("s-17", given)
    assert labels == (("session", "s-17"), ("turn", 2), ("tool_pending", 1))
    for session, numbers in ((None, None), (7, []), ("", {}), ("x" * 100_000, "radixkv_turn")):
        assert labels_of(session, numbers) == ()
    cache = VllmCache(64, SIZE, 128, model="m", policy="learned")
    names = set[object]()
    for at, salt in enumerate((None, "other", None)):
        facts, ids = RequestFacts(cache_salt=salt, labels=labels), list(range(100 * at, 100 * at + 20))
        step = cache.begin_step()
        assert cache.allocate(f"{at}", facts, ids, 0, 20) is not None
        cache.end_step(step)
        cache.release(f"{at}")
        policy: Any = cache.cache._tenants["default"].policy
        found = [piece.facts.labels for state in policy._states.values() for piece in state.pieces][-1]
        assert found["turn"] == 2 and found["tool_pending"] == 1
        names.add(found["session"])
    assert len(names) == 2 and "s-17" not in names
