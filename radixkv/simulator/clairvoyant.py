"""Clairvoyant eviction for the simulator of serving: it evicts the blocks whose next use is farthest.

It knows the requests of every live session, and when the next one comes. Those after it are taken to follow at the
session's own pauses, without waiting. Blocks that no later request of their session uses go first, then those of the
farthest request, the tail of a prompt first. That is Belady's rule. But the future depends on the order of service, so
it is a yardstick and no bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from radixkv.simulator.packed_sessions import Session
from radixkv_policies import RequestHints
from radixkv_policies.leaves import LeafPolicy, Piece
from radixkv_policies.policy import Handle

_NEVER = 2**15 - 1
"""The turn of blocks that are used no more. Sessions are looked ahead for this many turns."""


class Future:
    """What will happen in a live session. ``turn``: the next request, or the one that waits. ``at``: when it comes."""

    def __init__(self, session: Session, at: float) -> None:
        self._session, self.turn, self.at = session, 0, at
        self._sums = list(accumulate(turn.pause_s for turn in session.turns))
        self._next = _next_turns(session)

    def next_turns(self, turn: int, low: int, high: int) -> NDArray[np.int16]:
        """Return the turn that uses each of the blocks ``[low, high)`` of a turn's prompt next."""
        found: NDArray[np.int16] = self._next[self.turn][self._session.turns[turn].blocks[low:high]]
        return found

    def time_of(self, turn: int) -> float:
        """Return when a turn comes, at the earliest."""
        return inf if turn >= len(self._sums) else self.at + self._sums[turn] - self._sums[self.turn]


def _next_turns(session: Session) -> list[NDArray[np.int16]]:
    """Return for each turn, and after the last, the turn from it on that uses each block next."""
    following = np.full(session.num_blocks, _NEVER, np.int16)
    found = [following]
    for turn in range(len(session.turns) - 1, -1, -1):
        following = following.copy()
        following[session.turns[turn].blocks] = min(turn, _NEVER)
        found.append(following)
    return found[::-1]


class _Known(Piece):
    """``live``, ``turn``: the request that computed the blocks."""

    __slots__ = ("live", "turn")

    def __init__(self, live: int, turn: int) -> None:
        self.live, self.turn = live, turn

    def twin(self) -> _Known:
        return _Known(self.live, self.turn)


class Clairvoyant(LeafPolicy[_Known]):
    """Evicts the farthest next use first. Requests carry the labels ``live`` and ``at``. O(leaves) a victim."""

    futures: ClassVar[dict[int, Future]]
    """By the number of the live session. The simulator's subclass sets it."""

    ranks_by_depth: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._leaves: dict[Handle, tuple[_Known, int]] = {}

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        return hints

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> _Known:
        assert isinstance(hints, RequestHints)
        labels: Any = hints.labels
        return _Known(labels["live"], labels["at"])

    def alike(self, last: _Known, piece: _Known) -> bool:
        return False

    def entered(self, node: Handle, piece: _Known, depth: int) -> None:
        self._leaves[node] = piece, depth

    def left(self, node: Handle, piece: _Known) -> None:
        self._leaves.pop(node, None)

    def victim(self) -> Handle | None:
        return max(self._leaves, key=self._next_use, default=None)

    def most(self, node: Handle) -> int:
        piece, depth = self._leaves[node]
        future = self.futures.get(piece.live)
        if future is None:
            return piece.num_blocks
        turns = future.next_turns(piece.turn, depth - piece.num_blocks, depth)
        others = np.flatnonzero(turns != turns[-1])
        return len(turns) - (int(others[-1]) + 1 if len(others) else 0)

    def _next_use(self, node: Handle) -> float:
        piece, depth = self._leaves[node]
        future = self.futures.get(piece.live)
        if future is None:
            return inf
        return future.time_of(int(future.next_turns(piece.turn, depth - 1, depth)[0]))
