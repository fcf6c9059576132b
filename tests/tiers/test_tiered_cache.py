"""Host memory below the cache of any engine: what was evicted comes back by ``Sequence.loading``, bit for bit."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch

from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache, Sequence, Tenant, audit
from radixkv.audit.oracle import Engine, chain
from radixkv.audit.properties.material import LAYOUT
from radixkv.clock import ManualClock
from radixkv.errors import ArgumentError, ConfigError, LeaseError
from radixkv.index.below import Loading, Scope
from radixkv.index.load_target import LoadTarget
from radixkv.storage.device import BlockStorage
from radixkv.tiers import ladder
from radixkv.tiers.host.memory import HostBlocks
from radixkv.tiers.host.tier import HostTier
from radixkv.tiers.ladder import MOST_ERRORS, Ladder
from radixkv.tiers.pending import Pending
from radixkv.tiers.tiered_cache import TieredCache
from radixkv_kernels import Pool
from radixkv_policies import LRU, Policy
from tests.tiers.support import patience as patience
from tests.waiting import ended

SIZE = 4
NS, OTHER = Namespace("a", "m"), Namespace("b", "m")
PROMPT = list(range(41))


class Owner:
    """An engine of one's own: a cache, and the deterministic KV of its sequences."""

    error = 0.0
    """The relative error that KV may have."""

    def __init__(self, num_blocks: int = 16, host_blocks: int = 64, **settings: Any) -> None:
        config = CacheConfig(num_blocks, SIZE, LAYOUT, host_blocks=host_blocks, **settings)
        self.cache = TieredCache(config)
        self.engine = Engine(self.cache)

    def compute(self, sequence: Sequence, stop: int) -> None:
        """Compute tokens behind the committed ones, and commit them."""
        start = sequence.num_committed_tokens
        states = chain(sequence.namespace, sequence.token_ids.tolist())
        self.engine.write(sequence.block_table, start, states[start:stop])
        sequence.commit(stop)

    def ask(self, ids: list[int], namespace: Namespace = NS) -> tuple[int, int]:
        """Serve a prompt as the guide says. Returns the tokens that were loaded, and those that were computed."""
        with self.cache.open(namespace, ids) as sequence:
            loading, computed = sequence.loading, 0
            while sequence.num_committed_tokens < sequence.num_tokens:
                stop = sequence.num_tokens if loading is None else loading.claim(8)
                computed += stop - sequence.num_committed_tokens
                self.compute(sequence, stop)
            assert self.is_right(sequence)
            return 0 if loading is None else loading.num_loaded_tokens, computed

    def evicted(self, ids: list[int], namespace: Namespace = NS) -> None:
        """Compute a prompt, and evict it."""
        self.ask(ids, namespace)
        self.evict()

    def evict(self) -> None:
        self.cache.evict(1_000)
        assert self.cache.resident_blocks == 0 or self.cache.evictable_blocks == 0

    def is_right(self, sequence: Sequence) -> bool:
        """Whether the committed tokens of a sequence have their own KV."""
        stop = sequence.num_committed_tokens
        states = chain(sequence.namespace, sequence.token_ids.tolist()[:stop])
        return self.engine.holds(sequence.block_table, states, self.error)

    @property
    def below(self) -> Ladder:
        assert self.cache.lower is not None
        return self.cache.lower

    def check(self, errors: int = 0) -> None:
        """Nothing is held, in either tier, and every law holds."""
        for each in (self.cache, self.below.host.cache):
            stats = each.stats()
            assert stats.num_sequences == 0
            assert stats.evictable_blocks == stats.resident_blocks
            assert audit.check(each).ok
        assert self.below.counts()["host"]["errors"] == errors


def loading_of(sequence: Sequence) -> Loading:
    assert sequence.loading is not None
    return sequence.loading


def test_what_was_evicted_comes_back() -> None:
    owner = Owner()
    assert owner.ask(PROMPT) == (0, 41)
    assert owner.ask(PROMPT) == (0, 1), "what is resident isn't loaded"
    owner.evict()
    assert owner.ask(PROMPT) == (40, 1)
    assert owner.cache.match(NS, PROMPT).num_tokens == 40, "what was loaded is resident"
    assert owner.cache.tier_counts()["host"]["hit_blocks"] == 10
    owner.check()


def test_a_plain_cache_has_it_too() -> None:
    cache = PrefixCache(CacheConfig(16, SIZE, LAYOUT, host_blocks=32))
    engine = Engine(cache)
    with cache.open(NS, PROMPT) as sequence:
        assert sequence.loading is None
        engine.write(sequence.block_table, 0, chain(NS, PROMPT))
        sequence.commit(41)
    cache.evict(16)
    assert cache.namespaces() == [NS]
    with cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        assert (loading.num_tokens, loading.num_loaded_tokens, loading.is_done) == (40, 0, False)
        assert loading.wait() and sequence.loading is loading
        assert sequence.num_committed_tokens == 40
        assert engine.holds(sequence.block_table, chain(NS, PROMPT[:40]))


def test_what_comes_back_counts_as_found() -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    before = owner.cache.tenant_stats(NS.tenant)
    with owner.cache.open(NS, PROMPT) as sequence:
        opened = owner.cache.tenant_stats(NS.tenant)
        assert opened.missed_tokens - before.missed_tokens == len(PROMPT)
        assert loading_of(sequence).wait()
    after = owner.cache.tenant_stats(NS.tenant)
    assert after.hit_tokens - before.hit_tokens == 40
    assert after.missed_tokens - before.missed_tokens == len(PROMPT) - 40
    assert owner.cache.stats().hit_tokens == after.hit_tokens


def test_what_comes_back_counts_for_its_own_request_alone() -> None:
    """A recount replaces it. Tokens behind the prompt, and requests of a tenant that is gone, count for nobody."""
    owner = Owner()

    def counted() -> tuple[int, int]:
        stats = owner.cache.tenant_stats(NS.tenant)
        return stats.hit_tokens, stats.missed_tokens

    owner.evicted(PROMPT)
    assert counted() == (0, 41)
    with owner.cache.open(NS, PROMPT) as sequence:
        assert loading_of(sequence).wait() and counted() == (40, 42)
        sequence.recount(1, 40, 1)
        assert counted() == (40, 42)
        sequence.recount(1, 40, 0)
        assert counted() == (40, 41)
        sequence.recount(0, 0, 0)
        assert counted() == (0, 41)
    owner.evict()
    with owner.cache.open(NS, PROMPT[:10]) as sequence:
        sequence.extend(PROMPT[10:])
        assert loading_of(sequence).wait() and loading_of(sequence).num_loaded_tokens == 40
        assert counted() == (10, 41), "the rest was appended"
    owner.evict()
    with owner.cache.open(NS, PROMPT, lookup=False) as sequence:
        assert loading_of(sequence).wait() and counted() == (10, 41), "nothing was missed"
    owner.evict()
    owner.cache.add_tenant(Tenant(NS.tenant))
    with owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        owner.cache.remove_tenant(NS.tenant)
        owner.cache.add_tenant(Tenant(NS.tenant))
        assert counted() == (0, 0)
        loading.poll()
        assert counted() == (0, 0)
    owner.check()


def test_nothing_lies_below_without_host_blocks() -> None:
    cache = PrefixCache(CacheConfig(16, SIZE, LAYOUT))
    with cache.open(NS, PROMPT) as sequence:
        assert sequence.loading is None


def sent_below(
    cache: PrefixCache, layers: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Fill the blocks of a prompt, evict them, and let them come back. Returns each layer's before and afterwards."""
    with cache.open(NS, PROMPT) as sequence:
        for layer in layers:
            layer.copy_(torch.rand(layer.shape) - 0.5)
        before = [layer[sequence.block_table[:10].tolist()] for layer in layers]
        sequence.commit(41)
    cache.evict(16)
    for layer in layers:
        layer.zero_()
    with cache.open(NS, PROMPT) as sequence:
        assert loading_of(sequence).wait() and sequence.num_committed_tokens == 40
        return before, [layer[sequence.block_table[:10].tolist()] for layer in layers]


@pytest.mark.parametrize("together", [False, True])
def test_the_tensors_may_be_the_engines(together: bool) -> None:
    shape = (16, 2, SIZE, 3, 8) if together else (16, SIZE, 3, 8)
    layers = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(4)]
    pool = Pool.together(layers, dim=1) if together else Pool(layers[:2], layers[2:])
    cache = PrefixCache(CacheConfig(16, SIZE, host_blocks=32), storage=BlockStorage(pool))
    wanted, found = sent_below(cache, layers)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_it_may_be_awaited() -> None:
    owner = Owner()
    owner.evicted(PROMPT)

    async def ask() -> int:
        with owner.cache.open(NS, PROMPT) as sequence:
            return await loading_of(sequence)

    assert asyncio.run(ask()) == 40
    owner.check()


def test_it_may_be_ignored_or_cancelled() -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    with owner.cache.open(NS, PROMPT) as sequence:
        assert loading_of(sequence).num_tokens == 40
        owner.compute(sequence, 41)
        assert owner.is_right(sequence)
    owner.evict()
    with owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        loading.cancel()
        assert loading.is_done and loading.claim(100) == 41 and loading.num_loaded_tokens == 0
        owner.compute(sequence, 41)
    owner.check()


def test_a_block_that_is_claimed_or_committed_is_never_written() -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    with owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        owner.compute(sequence, 14)  # unclaimed: two tokens of block 3 are computed, two are not
        seen: list[int] = []
        original = owner.below.memory.put
        owner.below.memory.put = lambda staged, ids: (seen.extend(ids.tolist()), original(staged, ids))[1]  # type: ignore[method-assign,assignment,func-returns-value]
        assert loading.claim(100) == 16, "up to what was loaded"
        assert seen == sequence.block_table[4:10].tolist()
        owner.compute(sequence, 16)
        assert loading.claim(100) == 41 and sequence.num_committed_tokens == 40
        owner.compute(sequence, 41)
        assert owner.is_right(sequence)
    owner.check()


@pytest.mark.parametrize("num_tokens", [0, -1, True, "1"])
def test_a_claim_of_nothing_is_refused(num_tokens: Any) -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    with owner.cache.open(NS, PROMPT) as sequence, pytest.raises(ArgumentError, match="num_tokens"):
        loading_of(sequence).claim(num_tokens)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), True, "a"])
def test_a_wait_for_no_time_is_refused(timeout_s: Any) -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    with owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        with pytest.raises(ArgumentError, match="timeout_s"):
            loading.wait(timeout_s)
        assert loading.wait(float("inf")) and loading.num_loaded_tokens == 40


def test_the_next_turn_finds_the_answer() -> None:
    owner = Owner()
    with owner.cache.open(NS, PROMPT) as sequence:
        owner.compute(sequence, 41)
        for token_id in range(500, 508):
            sequence.append(token_id)
            owner.compute(sequence, sequence.num_tokens)
    owner.evict()
    assert owner.ask([*PROMPT, *range(500, 510)]) == (48, 3)
    owner.check()


def test_steps_are_kept_too() -> None:
    owner = Owner()
    with owner.cache.open(NS, PROMPT) as sequence:
        owner.engine.write(sequence.block_table, 0, chain(NS, PROMPT))
        sequence.computing(41, step=1)
        assert owner.cache.step_done(1) == 41
    owner.evict()
    assert owner.ask(PROMPT) == (40, 1)


def test_tenants_and_salts_share_nothing_below() -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    for namespace in (OTHER, Namespace("a", "m", salt="x"), Namespace("a", "m", weights=1)):
        assert owner.ask(PROMPT, namespace) == (0, 41)
        owner.evict()
        assert owner.ask(PROMPT, namespace) == (40, 1), "each has its own"


@pytest.mark.parametrize("forget", ["purge", "clear", "remove", "forget"])
def test_what_was_forgotten_does_not_come_back(forget: str) -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    owner.evicted(PROMPT, OTHER)
    match forget:
        case "purge":
            owner.cache.purge("a")
        case "clear":
            owner.cache.clear(NS)
        case "remove":
            owner.cache.add_tenant(Tenant("a"))
            owner.cache.remove_tenant("a")
        case _:
            with owner.cache.open(NS, PROMPT) as sequence:
                assert loading_of(sequence).wait()
                owner.cache.forget(sequence, 0)
            owner.evict()
    assert owner.ask(PROMPT) == (0, 41)
    assert owner.ask(PROMPT, OTHER) == (40, 1), "another tenant's stays"
    owner.check()


def changed(owner: Owner, sequence: Sequence, change: str) -> list[Sequence]:
    """Change a sequence whose load has begun. Returns its forks."""
    match change:
        case "purge":
            owner.cache.purge("a")
        case "clear":
            owner.cache.clear(NS)
        case "truncate":
            sequence.truncate(10)
            sequence.extend(range(900, 931))
        case "forget":
            owner.cache.forget(sequence, 8)
        case "fork":
            return sequence.fork(2)
        case "release":
            sequence.release()
    return []


@pytest.mark.parametrize("change", ["purge", "clear", "truncate", "forget", "fork", "release"])
def test_a_load_ends_with_what_it_was_for(change: str) -> None:
    """Nothing is written afterwards, and nothing wrong is committed."""
    owner = Owner()
    owner.evicted(PROMPT)
    sequence = owner.cache.open(NS, PROMPT)
    loading = loading_of(sequence)
    others = changed(owner, sequence, change)
    before = owner.engine.read(list(range(16))).tolist()  # type: ignore[arg-type]
    assert loading.poll() and loading.num_loaded_tokens == 0
    assert [each.loading for each in others] == [None] * len(others)
    assert owner.engine.read(list(range(16))).tolist() == before  # type: ignore[arg-type]
    if sequence.is_open:
        owner.compute(sequence, 41)
        assert owner.is_right(sequence)
    for each in (sequence, *others):
        if each.is_open or change == "purge":
            each.release()
    owner.check()


def test_wrong_kv_are_not_loaded_while_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request of the namespace, which began before, takes nothing of what is being forgotten."""
    owner = Owner(48)
    owner.evicted(PROMPT)
    with owner.cache.open(NS, PROMPT) as other, owner.cache.open(NS, PROMPT) as sequence:
        loading, original = loading_of(other), HostTier.forget

        def forget(self: HostTier, scope: Scope) -> Pending:
            assert loading.poll() and loading.num_loaded_tokens == 0
            with owner.cache.open(NS, PROMPT) as late:
                assert late.loading is None
            return original(self, scope)

        monkeypatch.setattr(HostTier, "forget", forget)
        assert loading_of(sequence).wait()
        owner.cache.forget(sequence, 0)
    owner.check()


def test_what_is_computed_after_a_clear_is_not_kept() -> None:
    owner = Owner()
    with owner.cache.open(NS, PROMPT) as sequence:
        owner.compute(sequence, 20)
        owner.cache.clear(NS)
        owner.compute(sequence, 41)
    assert owner.below.host.cache.namespaces() == []
    with owner.cache.open(NS, PROMPT) as sequence:
        owner.cache.purge("a")
        with pytest.raises(LeaseError):
            owner.compute(sequence, 41)
    assert owner.below.host.cache.namespaces() == []


@pytest.mark.parametrize("at", ["its beginning", "its end"])
def test_an_interrupted_purge_leaves_the_tenant_usable(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()

    @contextmanager
    def interrupt(self: Ladder, scope: Scope) -> Iterator[None]:
        if at == "its beginning":
            raise KeyboardInterrupt
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(Ladder, "_forgetting_below", interrupt)
    before = owner.below.mark("a")
    with pytest.raises(KeyboardInterrupt):
        owner.cache.purge("a")
    monkeypatch.undo()
    assert owner.below.mark("a") not in (None, before), "rows that began before keep nothing"
    owner.evicted(PROMPT)
    assert owner.ask(PROMPT) == (40, 1)
    assert not owner.below._changing, "nothing stays of a tenant"


def test_readers_of_a_base_keep_nothing() -> None:
    owner = Owner(32)
    with owner.cache.publish("base", NS, PROMPT, ["b"]) as sequence:
        owner.compute(sequence, 40)
    assert owner.cache.match(OTHER, PROMPT).num_tokens == 40
    with owner.cache.open(OTHER, [*PROMPT, *range(700, 720)]) as sequence:
        sequence.commit(61)
    assert owner.below.host.cache.namespaces() == [NS]


def test_a_strict_tenant_has_its_own_share() -> None:
    owner = Owner(32, 64)
    owner.cache.add_tenant(Tenant("a", guaranteed_blocks=12, max_blocks=12, mode="strict"))
    owner.evicted(PROMPT)
    for seed in range(20):
        owner.ask([seed, *PROMPT], OTHER)
    owner.evict()
    assert owner.ask(PROMPT) == (40, 1)
    owner.check()


@pytest.mark.parametrize("mode", ["burst", "strict"])
def test_a_share_that_does_not_fit_yet_is_given_later(mode: Literal["burst", "strict"]) -> None:
    """The tiers may hear of two tenants' changes in another order than the cache."""
    owner = Owner(16, 16)
    owner.cache.add_tenant(Tenant("a", guaranteed_blocks=12))
    owner.below.add_tenant(Tenant("b", guaranteed_blocks=10, max_blocks=10, mode=mode))
    assert not owner.below.keeps(OTHER)
    owner.below.add_tenant(Tenant("c"))
    assert not owner.below.keeps(OTHER), "there is no room yet"
    owner.cache.add_tenant(Tenant("a", guaranteed_blocks=2))
    assert owner.below.keeps(OTHER)
    assert owner.below.host.index.own_slots("b") == (10 if mode == "strict" else 0)
    owner.evicted(PROMPT[:21], OTHER)
    assert owner.ask(PROMPT[:21], OTHER) == (20, 1)
    owner.below.add_tenant(Tenant("c", guaranteed_blocks=5))
    assert not owner.below.keeps(Namespace("c", "m"))
    owner.below.add_tenant(Tenant("a"))
    assert owner.below.keeps(Namespace("c", "m"))


def test_a_failed_copy_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fails in the middle leaves wrong bytes in blocks, and nothing of it is committed."""
    owner = Owner()
    owner.evicted(PROMPT)

    def tear(self: HostBlocks, staged: Any, blocks: Any) -> None:
        for tensor in self._engine:
            tensor.index_fill_(0, torch.from_numpy(blocks[:3].astype("int64")), 7)
        raise OSError("torn")

    monkeypatch.setattr(HostBlocks, "put", tear)
    assert owner.ask(PROMPT) == (0, 41)
    monkeypatch.undo()
    owner.evict()
    assert owner.ask(PROMPT) == (40, 1), "the tiers go on"
    owner.check(errors=1)


def test_errors_of_a_save_cost_hits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()

    def fail(*arguments: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(HostBlocks, "save", fail)
    for _ in range(MOST_ERRORS):
        assert owner.ask(PROMPT) == (0, 41)
        owner.evict()
    assert owner.below.counts()["host"]["open"] == 0, "it is tried some times, and not more"
    owner.check(errors=MOST_ERRORS)


def test_too_much_host_memory_is_refused_with_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "MAX_SLOTS", 8)
    Owner(host_blocks=8)
    with pytest.raises(
        ConfigError, match=r"host_blocks=9 is not allowed; allowed: 2 to 8 blocks, \S+ to \S+ bytes"
    ):
        Owner(host_blocks=9)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_blocks"):
        CacheConfig(16, host_blocks=-1)
    with pytest.raises(ConfigError, match="engine"):
        CacheConfig(16, host_blocks=4, blocks="engine")
    with pytest.raises(ConfigError, match="a layout or a storage"):
        PrefixCache(CacheConfig(16, host_blocks=4))
    with pytest.raises(ConfigError, match="2 to 2,147,483,647 blocks"):
        PrefixCache(CacheConfig(16, SIZE, LAYOUT, host_blocks=1))
    with pytest.raises(ConfigError, match="what the machine has"):
        PrefixCache(CacheConfig(16, 16, KVLayout(32, 8, 128), host_blocks=2**31 - 1))


# --- threads


def test_one_sequence_may_load_in_several_threads() -> None:
    """Two threads claim, poll and wait, and a third purges: nothing wrong is served, nothing is lost."""
    owner, wrong, stops = Owner(64, 128), list[object](), threading.Event()
    prompts = [[seed, *PROMPT] for seed in range(3)]
    for each in prompts:
        owner.ask(each)

    def requests(namespace: Namespace, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            try:
                owner.ask(chance.choice(prompts), namespace)
            except LeaseError:  # purged
                continue
            except BaseException as error:
                wrong.append(error)
                raise

    def forgets() -> None:
        while not stops.wait(0.002):
            owner.cache.evict(20)
            owner.cache.purge("a")

    forgetting = threading.Thread(target=forgets)
    threads = [
        threading.Thread(target=requests, args=(each, seed)) for seed, each in enumerate((NS, OTHER, NS))
    ]
    for thread in (forgetting, *threads):
        thread.start()
    for thread in threads:
        ended(thread)
    stops.set()
    ended(forgetting)
    assert not wrong
    owner.check()


# --- random lives against the engine's own KV


STEMS = [[random.Random(seed).randrange(2) for _ in range(30)] for seed in range(2)]


class Life:
    """Random requests of two tenants that open, claim, compute, cancel, fork, cut back and forget."""

    def __init__(self, owner: Owner, seed: int) -> None:
        self.owner, self.chance = owner, random.Random(seed)
        self.open: list[Sequence] = []
        self.num_loaded = 0

    def run(self, num_steps: int) -> None:
        acts = (
            [self.begin] * 8
            + [self.work] * 12
            + [self.end] * 5
            + [self.cancel, self.fork, self.cut, self.grow]
        )
        acts += [self.evict] * 4 + [self.forget]
        try:
            for _ in range(num_steps):
                self.chance.choice(acts)()
                for each in self.open:
                    assert not each.is_open or self.owner.is_right(each), "a committed block holds other KV"
        finally:
            while self.open:
                self.end()
        self.check()

    def check(self) -> None:
        """Nothing is left."""
        self.owner.check()

    def begin(self) -> None:
        """Open a request. Prompts share prefixes."""
        ids = self.chance.choice(STEMS)[: self.chance.randrange(1, 30)]
        ids = ids + [self.chance.randrange(2) for _ in range(self.chance.randrange(4))]
        namespace = self.chance.choice([NS, OTHER, Namespace("a", "m", salt="x")])
        if len(self.open) < 2:
            self.open.append(sequence := self.owner.cache.open(namespace, ids))
            if self.chance.random() < 0.7:
                assert sequence.loading is None or not sequence.loading.is_done  # begins it

    def work(self) -> None:
        """Go on with a request: by claims, by waiting, or without its load."""
        sequence = self._any()
        if sequence is None or not sequence.is_open:
            return
        loading = sequence.loading
        how = self.chance.choice(["claim", "claim", "wait", "compute"])
        if loading is not None and how == "wait":
            self.wait(loading)
        if loading is not None and how == "claim":
            self._compute(sequence, loading.claim(self.chance.randrange(1, 9)))
        elif loading is None or how == "compute":
            stop = sequence.num_committed_tokens + self.chance.randrange(1, 9)
            self._compute(sequence, min(stop, sequence.num_tokens))
        self.num_loaded += 0 if loading is None else loading.num_loaded_tokens

    def wait(self, loading: Loading) -> None:
        """Wait for a load."""
        loading.wait(0.001)

    def _compute(self, sequence: Sequence, stop: int) -> None:
        self.owner.compute(sequence, max(stop, sequence.num_committed_tokens))

    def end(self) -> None:
        if (sequence := self._any()) is not None:
            self.open.remove(sequence)
            sequence.release()

    def cancel(self) -> None:
        sequence = self._any()
        if sequence is not None and sequence.is_open and (loading := sequence.loading) is not None:
            loading.cancel()

    def fork(self) -> None:
        sequence = self._any()
        if sequence is not None and sequence.is_open and len(self.open) < 3:
            self.open += sequence.fork(1)

    def cut(self) -> None:
        """Cut a request back, and continue it otherwise."""
        sequence = self._any()
        if sequence is not None and sequence.is_open:
            sequence.truncate(self.chance.randint(sequence.num_committed_tokens, sequence.num_tokens))
            self._grow(sequence)

    def grow(self) -> None:
        sequence = self._any()
        if sequence is not None and sequence.is_open:
            self._grow(sequence)

    def _grow(self, sequence: Sequence) -> None:
        room = max(34 - sequence.num_tokens, 0)
        sequence.extend([self.chance.randrange(2) for _ in range(min(self.chance.randrange(6), room))])

    def evict(self) -> None:
        self.owner.cache.evict(self.chance.choice([5, 40]))

    def forget(self) -> None:
        if self.chance.random() < 0.5:
            return
        match self.chance.randrange(4):
            case 0:
                self.owner.cache.purge(self.chance.choice("ab"))
            case 1:
                self.owner.cache.clear(self.chance.choice([NS, OTHER]))
            case _:
                sequence = self._any()
                if sequence is not None and sequence.is_open and len(self.open) == 1:
                    self.owner.cache.forget(sequence, self.chance.randint(0, sequence.num_tokens))

    def _any(self) -> Sequence | None:
        return self.chance.choice(self.open) if self.open else None


def lives(num: int, num_steps: int = 300) -> int:
    """Live random lives. Returns the tokens that were loaded in them."""
    loaded = 0
    for seed in range(num):
        life = Life(Owner(40, 48), seed)
        life.run(num_steps)
        loaded += life.num_loaded
    return loaded


@pytest.mark.slow
def test_random_lives_commit_only_their_own_kv() -> None:
    assert lives(25) > 1_000


# --- planted bugs


def a_failed_load_counted_as_loaded(patch: pytest.MonkeyPatch) -> None:
    """The last block of each part isn't copied."""
    original = HostBlocks.put

    def none(self: HostBlocks, staged: Any, blocks: Any) -> None:
        original(self, [each[:-1] for each in staged], blocks[:-1])

    patch.setattr(HostBlocks, "put", none)


def a_load_into_claimed_blocks(patch: pytest.MonkeyPatch) -> None:
    """A load begins at the first block, and nobody compares it with what was computed. Its bytes are torn."""
    original = HostBlocks.put

    def put(self: LoadTarget, start: int, stop: int, copy: Callable[[Any], None]) -> bool:
        copy(self._state.block_table[:stop][: stop - start])
        return True

    patch.setattr(LoadTarget, "put", put)
    patch.setattr(
        HostBlocks, "put", lambda self, staged, ids: original(self, [each * 0 for each in staged], ids)
    )


def a_load_that_survives_a_cut(patch: pytest.MonkeyPatch) -> None:
    """A sequence that was cut back and continued otherwise still takes what was loaded for it."""
    patch.setattr(LoadTarget, "is_current", property(lambda self: self._state._is_open))


def a_purge_that_skips_the_tier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "forget", lambda self, scope: Pending())


def a_mark_that_nobody_compares(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ladder, "is_current", lambda self, mark, tenant: True)


@pytest.mark.parametrize(
    "plant",
    [a_failed_load_counted_as_loaded, a_load_into_claimed_blocks, a_load_that_survives_a_cut],
    ids=lambda plant: plant.__name__,
)
def test_random_lives_find_planted_bugs(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        lives(25)


def test_a_purge_that_skips_the_tier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    a_purge_that_skips_the_tier(monkeypatch)
    with pytest.raises(AssertionError):
        test_what_was_forgotten_does_not_come_back("purge")


def test_a_mark_that_nobody_compares_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    a_mark_that_nobody_compares(monkeypatch)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        test_wrong_kv_are_not_loaded_while_they_are_forgotten(patch)


@pytest.mark.parametrize("kind", [PrefixCache, TieredCache])
def test_the_policy_of_host_memory_follows_the_caches_clock(kind: type[PrefixCache]) -> None:
    """On another clock, what comes back would depend on how fast the machine is."""
    clock = ManualClock()
    cache = kind(CacheConfig(16, SIZE, LAYOUT, host_blocks=32, policy="lrfu"), clock=clock)
    below = cache._below
    assert isinstance(below, Ladder) and below.host.cache._clock is clock


def test_with_a_clock_of_its_own_maintain_reaches_host_memory() -> None:
    """No thread maintains it then. Without this, its policy would never learn."""
    learned: list[Policy] = []

    class Learning(LRU):
        def maintain(self) -> None:
            learned.append(self)

    cache = PrefixCache(CacheConfig(16, SIZE, LAYOUT, host_blocks=32), clock=ManualClock())
    cache.add_tenant(Tenant("a", policy=Learning))
    cache.maintain()
    assert len(learned) == len(set(map(id, learned))) == 2, "that of the cache, and that of host memory"
