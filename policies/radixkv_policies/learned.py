"""Learned: keeps what is likely to return soon, as learned online from what returned so far. Our own.

When a use ends, its blocks get a class by what the cache itself saw: how often they were used, the turn of the
conversation, how many tokens of the request nobody had sent before, its length; and by the labels, if there are
any. ``hazard`` learns of each class when it returns, from the cache's own past, ghosts included, and ranks it at
each age by the hits a block-second that keeping it yields. The worst of ``NUM_SAMPLED`` leaves goes: ranks change
with age, each class in its own way (a conversation returns after a minute or not at all), so no order would stay
sorted.

Nothing is trained beforehand, no label is needed. See policies/README.md for how it works and where it loses.

State a node: five values a piece and a place in three arrays; a tenant: the model's 3 MB and the ghosts. Cost: O(1)
a hook; ``victim`` draws a sample for every ``NUM_KEPT`` victims. Learning is in ``maintain``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import count
from typing import Final

import numpy as np

from radixkv_policies.facts import Facts, labels_of
from radixkv_policies.hazard import EDGES_S, MAX_CLASSES, Floats, HazardModel
from radixkv_policies.leaves import LeafPolicy, Piece
from radixkv_policies.policy import Clock, Handle

NUM_SAMPLED: Final = 64
NUM_KEPT: Final = 4
"""Victims taken of one sample."""

COUNT_EVERY_S: Final = 1.0
FIT_EVERY_S: Final = 5.0
FIT_SHARE: Final = 0.03

MAX_TYPES: Final = 7
"""Types of requests that the model tells apart, by their label."""

_Key = tuple[int, int, int, int, object, bool, bool]
"""Of a class: places of uses, turn, new tokens, length; type, session over, tool pending."""

_USES: Final = (1, 2, 3, 5, 9, 17)
_TURNS: Final = (1, 2, 3, 4, 6)
_NEW_TOKENS: Final = (512, 1_024, 2_048, 4_096, 12_288)
_TOKENS: Final = (2_048, 8_192, 24_576)


class Returning(Piece):
    """``num_uses``: in all. ``facts``: of the last request. ``number``, ``group``: of the use that ended, −1 while
    in use.
    """

    __slots__ = ("ended_s", "facts", "group", "num_uses", "number")

    def __init__(self, num_uses: int, facts: Facts) -> None:
        self.num_uses, self.facts = num_uses, facts
        self.number, self.group, self.ended_s = -1, 0, 0.0


class Learned(LeafPolicy[Returning]):
    """Hits per block-second, by a hazard learned online."""

    uses_ghost_keys = True

    def __init__(
        self, capacity: int, clock: Clock, seed: int, *, block_size: int = 16, segment_blocks: int = 1
    ) -> None:
        super().__init__(capacity, clock, seed, block_size=block_size, segment_blocks=segment_blocks)
        self._model = HazardModel()
        self._groups: dict[_Key, int] = {}
        self._types: dict[object, int] = {None: 0}
        self._numbers = count()
        self._last: tuple[Facts | None, int, float, int] = (None, 0, 0.0, 0)
        self._leaves = Leaves(seed)
        self._best: list[tuple[Handle, int]] = []  # next victims, the last first, with their serials
        self._counted_s = self._fitted_s = self._started_s = clock()

    # --- a request

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        facts = Facts(labels_of(hints), self._segment_blocks)
        if nodes:
            state = self._states[nodes[-1]]
            last = state.pieces[-1]
            facts.found(state.depth, last.facts, self._clock() - last.ended_s)
            for node in nodes:
                for piece in self._states[node].pieces:
                    piece.facts = facts
        return facts

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Returning:
        facts = hints if isinstance(hints, Facts) else Facts(labels_of(hints), self._segment_blocks)
        if not isinstance(memory, tuple):
            facts.computed(num_blocks, start + num_blocks)
            return Returning(1, facts)
        num_uses, earlier, number, ended_s = memory
        now_s = self._clock()
        facts.found(start + num_blocks, earlier, now_s - ended_s)
        self._model.log.append((number, now_s, -1, num_blocks / self._segment_blocks))
        return Returning(num_uses + 1, facts)

    def used(self, piece: Returning) -> None:
        piece.num_uses += 1
        if piece.number >= 0:
            self._model.log.append((piece.number, self._clock(), -1, piece.num_blocks / self._segment_blocks))
            piece.number = -1

    def ended(self, piece: Returning) -> None:
        now_s = piece.ended_s = self._clock()
        group = piece.group = self._group(piece)
        facts, last_group, last_s, number = self._last
        if facts is not piece.facts or last_group != group or last_s != now_s:
            number = next(self._numbers)
            self._last = (piece.facts, group, now_s, number)
        piece.number = number
        self._model.log.append(
            (piece.number, piece.ended_s, piece.group, piece.num_blocks / self._segment_blocks)
        )

    def memory(self, piece: Returning) -> object:
        return piece.num_uses, piece.facts, piece.number, piece.ended_s

    # --- the order

    def entered(self, node: Handle, piece: Returning, depth: int) -> None:
        self._leaves.add(node, piece.group, piece.ended_s)

    def left(self, node: Handle, piece: Returning) -> None:
        self._leaves.discard(node)

    def victim(self) -> Handle | None:
        best, leaves = self._best, self._leaves
        while best:
            node, serial = best[-1]
            if leaves.serial_of(node) == serial:
                return node
            best.pop()
        best.extend(leaves.worst(self._clock(), self._model.rank))
        return best[-1][0] if best else None

    @property
    def rank(self) -> Floats:
        """What each class is worth at each age."""
        return self._model.rank

    def maintain(self) -> None:
        now_s = self._clock()
        if now_s - self._counted_s >= COUNT_EVERY_S:
            fit = now_s - self._fitted_s >= min(max(FIT_EVERY_S, FIT_SHARE * (now_s - self._started_s)), 60.0)
            self._counted_s, self._fitted_s = now_s, now_s if fit else self._fitted_s
            self._model.update(now_s, fit=fit)

    # --- classes

    def _group(self, piece: Returning) -> int:
        facts, size = piece.facts, self._block_tokens
        labels = facts.labels
        key: _Key = (
            bisect_left(_USES, piece.num_uses),
            bisect_left(_TURNS, facts.turn),
            bisect_left(_NEW_TOKENS, facts.num_new * size),
            bisect_left(_TOKENS, facts.end * size),
            labels.get("type"),
            bool(labels.get("session_over")),
            bool(labels.get("tool_pending")),
        )
        group = self._groups.get(key)
        if group is None:
            if self._model.num_classes >= MAX_CLASSES:
                return 0
            types = self._types
            if len(types) <= MAX_TYPES:
                types.setdefault(key[4], len(types))
            group = self._groups[key] = self._model.add_class(_features(key, types.get(key[4], 0)))
        return group


def _features(key: _Key, kind: int) -> list[float]:
    """What the model sees of a class; ``kind``: the number of its type, 0 for none."""
    uses, turn, new, length, _, is_over, is_pending = key
    numbers = [uses / 3 - 1, turn / 2.5 - 1, new / 2.5 - 1, length / 1.5 - 1]
    flags = [uses == 0, is_over, is_pending, *(kind == known for known in range(1, MAX_TYPES + 1))]
    return [*numbers, *map(float, flags)]


class Leaves:
    """The evictable leaves with class and time, so that a sample is scored at once. O(1); ``worst`` O(sample)."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[Handle] = []
        self._places: dict[Handle, tuple[int, int]] = {}  # place and serial
        self._groups = np.zeros(64, np.int64)
        self._ended_s = np.zeros(64)
        self._serial = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Handle) -> bool:
        return node in self._places

    def serial_of(self, node: Handle) -> int:
        """Of its last entry; −1 if it isn't in."""
        place = self._places.get(node)
        return place[1] if place is not None else -1

    def add(self, node: Handle, group: int, ended_s: float) -> None:
        place = len(self._nodes)
        if place == len(self._groups):
            self._groups, self._ended_s = (
                np.resize(self._groups, 2 * place),
                np.resize(self._ended_s, 2 * place),
            )
        self._serial += 1
        self._nodes.append(node)
        self._places[node] = (place, self._serial)
        self._groups[place], self._ended_s[place] = group, ended_s

    def discard(self, node: Handle) -> None:
        place, _ = self._places.pop(node)
        last, end = self._nodes.pop(), len(self._nodes)
        if place != end:
            self._nodes[place] = last
            self._places[last] = (place, self._places[last][1])
            self._groups[place], self._ended_s[place] = self._groups[end], self._ended_s[end]

    def worst(self, now_s: float, rank: Floats) -> list[tuple[Handle, int]]:
        num = len(self._nodes)
        if not num:
            return []
        places = np.arange(num) if num <= NUM_SAMPLED else self._random.integers(0, num, NUM_SAMPLED)
        ages = now_s - self._ended_s[places]
        ranks = rank[self._groups[places], np.searchsorted(EDGES_S, ages, "right") - 1]
        order = np.lexsort((-ages, ranks))[:NUM_KEPT]
        found = []
        for place in dict.fromkeys(places[order].tolist()):
            node = self._nodes[place]
            found.append((node, self._places[node][1]))
        return found[::-1]
