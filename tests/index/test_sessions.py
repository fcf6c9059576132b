"""Sessions free at their end what only they used, and change no answer."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from radixkv import (
    ArgumentError,
    CacheConfig,
    LeaseError,
    Namespace,
    NamespaceError,
    PrefixCache,
    RequestHints,
    Session,
    Tenant,
    TokenError,
    audit,
)
from radixkv.clock import ManualClock
from radixkv_policies import Policy
from radixkv_policies.learned import Learned
from tests.index.support import NS, compute, same

OTHER = Namespace("b", "m")


def make(num_blocks: int = 64, policy: str = "lru", **settings: Any) -> PrefixCache:
    """A cache with its own clock."""
    return PrefixCache(CacheConfig(num_blocks, 4, policy=policy, **settings), clock=ManualClock())


def step(session: Session, ids: Any, **arguments: Any) -> int:
    """A request of a session, from its start to its end. Returns its cached tokens."""
    with session.open(ids, **arguments) as sequence:
        sequence.commit(sequence.num_tokens)
        return sequence.num_cached_tokens


def resident(cache: PrefixCache, ids: Any, namespace: Namespace = NS) -> int:
    return cache.match(namespace, ids).num_tokens


def test_close_frees_what_no_other_session_used() -> None:
    cache = make()
    with cache.session(NS) as first, cache.session(NS) as second:
        assert step(first, range(16)) == 0
        assert step(first, range(33)) == 16
        assert step(second, [*range(8), *range(50, 62)]) == 8
        assert (first.own_blocks, second.own_blocks) == (6, 3)
        assert first.close() == 6 and not first.is_open
        assert resident(cache, range(33)) == 8
        assert resident(cache, [*range(8), *range(50, 62)]) == 20
        assert first.close() == 0
        audit.check(cache)
    assert resident(cache, [*range(8), *range(50, 62)]) == 8
    assert cache.free_blocks == 62 and cache.evictable_blocks == 2
    audit.check(cache)


@pytest.mark.parametrize("use", ["open", "lease", "pin", "touch", "insert"])
def test_what_others_used_stays(use: str) -> None:
    cache = make(blocks="cache")
    session = cache.session(NS)
    step(session, range(20))
    if use == "open":
        compute(cache, range(12))
    elif use == "lease":
        cache.match_and_lease(NS, range(12)).release()
    elif use == "pin":
        cache.unpin(cache.pin(NS, range(12), 5.0))
    elif use == "touch":
        cache.touch(NS, range(12))
    else:
        ids = cache.allocate(4)
        cache.free(cache.insert(NS, [*range(12), 7, 7, 7, 7], ids).surplus)
    audit.check(cache)
    assert session.close() == 2
    assert resident(cache, range(20)) == 12
    audit.check(cache)


def test_a_session_that_was_there_first_keeps_nothing_from_others() -> None:
    """Blocks that were resident before a session used them stay."""
    cache = make()
    compute(cache, range(12))
    with cache.session(NS) as session:
        assert step(session, range(21)) == 12
        assert session.own_blocks == 2
    assert resident(cache, range(21)) == 12


def test_what_is_held_stays() -> None:
    cache = make()
    session = cache.session(NS)
    step(session, range(20))
    running = session.open(range(24))
    running.commit(24)
    pin = cache.pin(NS, range(8), 100.0)
    assert session.close() == 0
    assert resident(cache, range(24)) == 24
    running.append(24)
    running.commit(25)
    running.release()
    audit.check(cache)
    assert resident(cache, range(24)) == 24  # ordinary blocks by now
    cache.unpin(pin)
    assert cache.evict(64) == 6


def test_a_running_sequence_of_another_session() -> None:
    cache = make()
    first, second = cache.session(NS), cache.session(NS)
    step(first, range(20))
    running = second.open(range(13))
    assert running.num_cached_tokens == 12
    assert first.close() == 2
    running.commit(13)
    audit.check(cache)
    running.release()
    assert second.close() == 0 and resident(cache, range(20)) == 12


def test_equal_prompts_at_the_same_time() -> None:
    """The session that commits second uses the blocks of the first."""
    cache = make()
    first, second = cache.session(NS), cache.session(NS)
    one, other = first.open(range(16)), second.open([*range(12), 1, 1, 1, 1])
    one.commit(16)
    other.commit(16)
    one.release()
    other.release()
    audit.check(cache)
    assert first.close() == 1 and second.close() == 1
    assert resident(cache, range(16)) == 12


def test_forks_of_a_sequence_belong_to_its_session() -> None:
    cache = make()
    session = cache.session(NS)
    parent = session.open(range(10))
    parent.commit(10)
    (child,) = parent.fork(1)
    cache.append([parent, child], [1, 2])
    cache.flush()
    for sequence in (parent, child):
        sequence.extend(range(6))
        sequence.commit(sequence.num_tokens)
    for sequence in (parent, child):
        sequence.release()
    audit.check(cache)
    assert session.close() == cache.config.num_blocks - 58 == 6
    assert cache.free_blocks == 64


def test_requests_that_lean_belong_to_their_own_session() -> None:
    cache = make(writes_before_reads=True)
    first, second = cache.session(NS), cache.session(NS)
    one = first.open(range(16), ahead=True)
    one.computing(16, step=1)
    other = second.open([*range(12), 9, 9, 9, 9], ahead=True)
    assert other.num_ahead_tokens == 12
    other.computing(16, step=2)
    cache.step_done(1)
    cache.step_done(2)
    audit.check(cache)
    one.release()
    other.release()
    assert (first.close(), second.close()) == (1, 1)
    assert resident(cache, range(16)) == 12


def test_a_family_shares_until_all_are_closed() -> None:
    cache = make()
    agent = cache.session(NS)
    step(agent, range(16))
    helper, other = agent.fork(), agent.fork("named")
    assert step(helper, [*range(16), *range(50, 59)]) == 16
    assert step(other, [*range(16), *range(50, 54), 9, 9, 9, 9]) == 20
    audit.check(cache)
    assert (agent.own_blocks, helper.own_blocks, other.own_blocks) == (0, 1, 1)
    assert helper.close() == 1 and agent.close() == 0
    assert resident(cache, [*range(16), *range(50, 54)]) == 20
    assert other.close() == 6
    assert cache.free_blocks == 64
    assert helper.name != agent.name and other.name == "named"


@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize("last", ["family", "stranger"])
def test_a_running_sequence_of_a_closed_member_is_its_familys(last: str, computes: bool) -> None:
    cache = make()
    parent = cache.session(NS)
    child = parent.fork()
    step(parent, range(17))
    running = child.open(range(33))
    running.commit(24)
    assert (parent.own_blocks, child.own_blocks) == (0, 2)
    assert child.close() == 0
    audit.check(cache)
    if computes:
        running.commit(33)
        audit.check(cache)
    if last == "stranger":
        with cache.open(NS, range(21)):
            audit.check(cache)
        running.release()
        assert parent.close() == (3 if computes else 1)
    else:
        assert parent.close() == 0  # the sequence still runs
        audit.check(cache)
        running.release()
        assert cache.evictable_blocks == (8 if computes else 6)
    audit.check(cache)


def test_a_stranger_takes_blocks_out_of_the_family() -> None:
    cache = make()
    agent = cache.session(NS)
    step(agent, range(16))
    with agent.fork() as helper:
        step(helper, [*range(16), 5, 5, 5, 5])
        with cache.session(NS) as stranger:
            step(stranger, [*range(8), 6, 6, 6, 6])
        audit.check(cache)
    agent.close()
    assert resident(cache, range(16)) == 8


def test_long_prompts_and_slices() -> None:
    """A prompt of several nodes, whose blocks are evicted in slices, and a close in slices."""
    cache = make(20_000)
    other = cache.session(NS)
    step(other, range(1_000_000, 1_060_000))
    session = cache.session(NS)
    step(session, range(70_000))
    assert session.own_blocks == 17_500
    audit.check(cache)
    for at in range(600):
        step(session, [7, 7, 7, 7, *[at + 100] * 4, 1])
    assert session.own_blocks > 1_000
    num_own = session.own_blocks
    assert session.close() == num_own
    audit.check(cache)
    other.close()
    assert cache.free_blocks == 20_000


def test_behind_a_base() -> None:
    cache = make(scrub="never")
    with cache.publish("base", Namespace("op", "m"), range(8), ["a"]) as sequence:
        sequence.commit(8)
    session = cache.session(NS)
    assert step(session, range(20)) == 8
    assert session.own_blocks == 3
    audit.check(cache)
    assert session.close() == 3 and resident(cache, range(20)) == 8
    cache.unpublish("base")
    audit.check(cache)


def test_evicted_cleared_and_purged_blocks_are_no_longer_its_own() -> None:
    cache = make()
    session = cache.session(NS)
    step(session, range(20))
    cache.evict(2)
    assert session.own_blocks == 3
    cache.evict(9)
    assert session.own_blocks == 0 and session.close() == 0
    for forget in (lambda: cache.clear(NS), lambda: cache.purge(NS.tenant)):
        session = cache.session(NS)
        step(session, range(20))
        with session.open(range(24)) as running:
            forget()
            audit.check(cache)
            assert session.own_blocks <= 5
            assert running.num_tokens == 24
        assert session.own_blocks == 0
        assert step(session, range(20)) == 0  # it goes on
        assert session.close() == 5 and cache.free_blocks == 64


def test_a_forgotten_load() -> None:
    """Blocks that left their tree because their KV are wrong are freed by who holds them."""
    cache = make()
    session = cache.session(NS)
    step(session, range(16))
    one, other = session.open(range(17)), session.open([*range(17), 1])
    assert cache.forget(one, 8) == 2
    audit.check(cache)
    assert session.close() == 0
    one.release()
    other.release()
    assert resident(cache, range(16)) == 8
    cache.evict(9)
    assert cache.free_blocks == 64
    audit.check(cache)


def test_a_dropped_handle_leaves_ordinary_blocks() -> None:
    cache = make()
    step(cache.session(NS), range(20))
    gc.collect()
    assert resident(cache, range(20)) == 20
    assert step(cache.session(NS), range(21)) == 20
    audit.check(cache)


def test_tenants_and_namespaces_are_apart() -> None:
    cache = make()
    salted = NS._replace(salt="s")
    mine, theirs, elsewhere = cache.session(NS, "s"), cache.session(OTHER, "s"), cache.session(salted, "s")
    for session in (mine, theirs, elsewhere):
        step(session, range(8))
    audit.check(cache)
    assert mine.close() == 2
    assert resident(cache, range(8), OTHER) == resident(cache, range(8), salted) == 8
    assert cache.session(OTHER).name == "session 2"  # names tell nothing of other tenants


def test_refusals_change_nothing() -> None:
    cache = make(4)
    session = cache.session(NS)
    before = cache.snapshot()
    wrong: list[tuple[Any, type[Exception]]] = [
        (lambda: session.open([-1]), TokenError),
        (lambda: session.open(range(4), lookup=1), ArgumentError),  # type: ignore[arg-type]
        (lambda: session.open(range(4), hints={}), ArgumentError),  # type: ignore[arg-type]
        (lambda: session.open(range(4), announcement=5), ArgumentError),  # type: ignore[arg-type]
        (lambda: session.pause(0), ArgumentError),
        (lambda: session.pause(float("nan")), ArgumentError),
        (lambda: session.pause(True), ArgumentError),
        (lambda: session.pause(for_tool="no"), ArgumentError),  # type: ignore[arg-type]
        (lambda: session.fork(""), ArgumentError),
        (lambda: cache.session(NS, "x" * 257), ArgumentError),
        (lambda: cache.session(NS, 5), ArgumentError),  # type: ignore[arg-type]
        (lambda: cache.session("a"), ArgumentError),  # type: ignore[arg-type]
    ]
    for call, error in wrong:
        with pytest.raises(error):
            call()
    assert same(before, cache)
    assert session.num_requests == 0
    session.close()
    for call in (lambda: session.open([1]), session.pause, session.fork):
        with pytest.raises(LeaseError, match="closed"):
            call()
    with session:
        pass
    assert "closed" in repr(session)


def test_unknown_tenants_are_refused() -> None:
    cache = make(default_tenant=None)
    with pytest.raises(NamespaceError):
        cache.session(NS)
    with pytest.raises(NamespaceError):
        cache.session(NS, "name")
    cache.add_tenant(Tenant("a"))
    assert step(cache.session(NS), range(4)) == 0


def test_the_hints_of_its_requests() -> None:
    """The session's labels are added to the request's, or to those of its announcement."""
    cache = make(policy=f"{__name__}:Noting")
    session = cache.session(NS, "s-1")
    waits = cache.announce(NS, range(8), RequestHints({"type": "agent"}, priority=50))
    step(session, range(8), announcement=waits)
    step(session, range(12), hints=RequestHints({"turn": 9}))
    session.pause(4, for_tool=False)
    assert not waits.is_open
    policy: Any = cache._tenants["a"].policy
    assert policy.told == [
        RequestHints({"type": "agent", "session": "s-1", "turn": 1}, priority=50),
        RequestHints({"session": "s-1", "turn": 2}),
        (
            RequestHints({"session": "s-1", "turn": 2}),
            RequestHints({"tool_pending": False, "expected_gap_s": 4.0}),
        ),
    ]


class Noting(Learned):
    """Notes the hints that it gets."""

    def begin(self) -> None:
        super().begin()
        self.told: list[object] = []

    def opened(self, nodes: Any, num_blocks: int, hints: object) -> object:
        self.told.append(hints)
        return hints

    def noted(self, request: object, hints: object, node: object = None) -> None:
        self.told.append((request, hints))


def test_policies_without_the_hook() -> None:
    cache = make(policy="lru")
    assert cache._tenants == {} and Policy.noted is not Learned.noted
    with cache.session(NS) as session:
        session.pause()
        step(session, range(8))
        session.pause(3.0)


def test_a_closed_session_does_not_slow_the_audit_down() -> None:
    """Nothing of a closed session is left in a snapshot."""
    cache = make()
    session = cache.session(NS)
    step(session, range(20))
    assert len(cache.snapshot().sole_users) == 2
    compute(cache, range(8))
    session.close()
    assert cache.snapshot().sole_users == ()


@pytest.mark.parametrize("policy", ["learned", "auto"])
def test_a_note_reaches_the_last_request_of_a_prompt(policy: str) -> None:
    """The blocks get another class, as if the request had been opened with the label."""
    cache, told = make(policy=policy), make(policy=policy)
    labels = {"session": "s", "turn": 1}
    for each, more in ((cache, {}), (told, {"tool_pending": True})):
        with each.open(NS, range(20), hints=RequestHints({**labels, **more})) as sequence:
            sequence.commit(20)
    assert _labels(cache) != _labels(told)
    before = cache.snapshot()
    cache.note(NS, range(18), RequestHints({"tool_pending": True, "unknown": 5}))
    assert same(before, cache) and _labels(cache) == _labels(told)
    for namespace, ids in ((OTHER, range(20)), (NS, range(50, 70)), (NS, [])):
        cache.note(namespace, ids, RequestHints({"tool_pending": False}))
    assert _labels(cache) == _labels(told)
    for wrong in (None, {"tool_pending": True}):
        with pytest.raises(ArgumentError, match="hints"):
            cache.note(NS, range(18), wrong)  # type: ignore[arg-type]
    with pytest.raises(TokenError):
        cache.note(NS, [-1], RequestHints())


def _labels(cache: PrefixCache) -> list[tuple[Any, int]]:
    """The labels and the class of each piece."""
    policy: Any = cache._tenants["a"].policy
    learned = policy if isinstance(policy, Learned) else policy._learned
    pieces = [piece for state in learned._states.values() for piece in state.pieces]
    names = {number: name for name, number in learned._groups.items()}
    return [(piece.facts.labels, names[piece.group]) for piece in pieces]


def test_a_note_of_a_running_request_counts_at_its_end() -> None:
    cache = make(policy="learned")
    session = cache.session(NS)
    sequence = session.open(range(20))
    sequence.commit(20)
    session.pause(2.0)
    sequence.release()
    ((labels, name),) = _labels(cache)
    assert labels == {"session": "session 1", "turn": 1, "tool_pending": True, "expected_gap_s": 2.0}
    assert name[-1] is True


def test_an_expected_pause_ranks_as_a_typical_one() -> None:
    """A short pause and a long one are different classes; the policy learns what each means."""
    cache = make(policy="learned")
    for at, gap_s in enumerate((2.0, 2.5, 150.0, None)):
        session = cache.session(NS)
        step(session, range(100 * at, 100 * at + 8))
        session.pause(gap_s)
    names = [name for _, name in _labels(cache)]
    assert names[0] == names[1] and len(set(names)) == 3
