"""Priorities reach a policy by ``opened`` and ``inserted`` alone, whether blocks are computed or inserted by hand."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.clock import ManualClock
from radixkv_policies import Priority, RequestHints, TokenRange

BLOCK_SIZE = 2


def make(clock: ManualClock | None = None) -> Priority:
    """A new policy."""
    return Priority(64, clock or ManualClock(), 0, block_size=BLOCK_SIZE)


def insert(
    policy: Priority, node: str, num_blocks: int, hints: RequestHints | None, path: Sequence[str] = ()
) -> None:
    """Make the calls of an insertion of computed blocks below a resident path of nodes with two blocks each."""
    for above in reversed(path):
        policy.leased(above)
    if path:
        policy.touched(path)
    depth = 2 * len(path) + num_blocks
    told = policy.opened(path, depth, hints)
    policy.inserted(node, num_blocks, depth, told, (), path[-1] if path else None)
    for used in (node, *reversed(path)):
        policy.unleased(used)


def evicted(policy: Priority) -> list[tuple[str, int]]:
    """All victims in order, each with the blocks that it loses at once."""
    order = []
    while (node := policy.victim()) is not None:
        assert isinstance(node, str)
        size = policy.most(node)
        is_last = policy.num_blocks(node) == size
        policy.trimmed(node, size)
        if is_last:
            policy.removed(node)
        order.append((node, size))
    return order


def test_inserted_blocks_have_the_priority_of_their_hints() -> None:
    """The lowest priority goes first. Blocks without hints have the default, 35."""
    policy = make()
    insert(policy, "high", 2, RequestHints(priority=80))
    insert(policy, "default", 2, None)
    insert(policy, "low", 2, RequestHints(priority=10))
    assert evicted(policy) == [("low", 2), ("default", 2), ("high", 2)]


def test_the_priority_of_an_insertion_ends() -> None:
    """Its duration counts from the end of the insertion."""
    clock = ManualClock()
    policy = make(clock)
    insert(policy, "short", 2, RequestHints(priority=80, duration_s=5.0))
    insert(policy, "default", 2, None)
    clock.advance(4.0)
    assert policy.victim() == "default"
    clock.advance(1.0)
    assert policy.victim() == "short"


def test_ranges_of_an_insertion_count_from_the_start_of_the_prompt() -> None:
    """The second block of four is kept longest, so the blocks above it are not evicted before it."""
    policy = make()
    insert(policy, "other", 1, RequestHints(priority=60))
    insert(policy, "ranges", 4, RequestHints(priority=20, ranges=(TokenRange(2, 4, 90),)))
    assert evicted(policy) == [("ranges", 2), ("other", 1), ("ranges", 1), ("ranges", 1)]


def test_an_insertion_sets_the_priority_of_the_blocks_above() -> None:
    """``opened`` gets the resident path. Without hints, an insertion leaves its priority as it was."""
    policy = make()
    insert(policy, "shared", 2, None)
    insert(policy, "other", 2, RequestHints(priority=50))
    insert(policy, "child", 2, RequestHints(priority=90), path=["shared"])
    assert evicted(policy) == [("other", 2), ("child", 2), ("shared", 2)]
    insert(policy, "shared", 2, RequestHints(priority=90))
    insert(policy, "other", 2, RequestHints(priority=50))
    insert(policy, "child", 2, None, path=["shared"])
    assert evicted(policy) == [("child", 2), ("other", 2), ("shared", 2)]


def test_hints_at_opening_are_not_enough() -> None:
    """Without the value of ``opened``, ``inserted`` gives new blocks the default."""
    policy = make()
    policy.opened([], 2, RequestHints(priority=80))
    policy.inserted("node", 2, 2)
    policy.unleased("node")
    assert [piece.priority for piece in policy.pieces("node")] == [35]
