"""Survival: first evicts the class with the smallest probability to return within a horizon; of equals, as LRU.

When a use ends, its blocks get a class. Features: the number of uses, the turn of the conversation, the number of new
blocks in the request, and its labels (``type``, ``session_over``, ``tool_pending``; ``session`` and ``turn`` give the
turn). One horizon later the returned and the other blocks are counted together, and the shares are the probabilities.
For older blocks the probability is zero. Frequency and turn survive eviction with the ghosts.

After the workload-aware eviction of "KVCache cache in the wild" (ATC 2025, 2506.02634). Differences: the classes; no
category of request is required; the horizon is learned: ``HORIZON`` half-lives as in ``lrfu``.

State a node: five values a piece, an entry of two heaps; two numbers a class; at most ``MAX_EVENTS`` events that wait
for their horizon. Cost: O(log n), amortised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import ClassVar, Final

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.facts import Facts, labels_of, places_in_blocks
from radixkv_policies.leaves import LeafHeap, LeafPolicy, Piece
from radixkv_policies.lrfu import HalfLife
from radixkv_policies.policy import Handle

HORIZON: Final = 2.0
"""The horizon in half-lives."""

MAX_EVENTS: Final = 16_384
MAX_CLASSES: Final = 512

PRIOR: Final = 0.3
"""The probability for a class without evidence, with the weight of PRIOR_TOKENS."""

PRIOR_TOKENS: Final = 16_384

KEPT: Final = 0.998
"""A class's counts are multiplied by this at each event of the class."""

_USES: Final = (1, 2, 4, 8)
_TURNS: Final = (1, 2, 3, 5)
_NEW_TOKENS: Final = (512, 1_024, 2_048, 8_192)


class Class:
    """A class of blocks: counts, returned counts, the probability to return (``chance``), and its leaves."""

    __slots__ = ("chance", "is_placed", "leaves", "num_counted", "num_returned", "number", "serial")

    def __init__(self, number: int, prior_blocks: float) -> None:
        self.number = number
        self.num_counted, self.num_returned = prior_blocks, PRIOR * prior_blocks
        self.chance = PRIOR
        self.leaves = LeafHeap()
        self.serial = 0  # of its place in the order of classes
        self.is_placed = True

    def count(self, num_blocks: int, num_returned: int) -> None:
        """Count blocks after their horizon, and how many of them returned."""
        self.num_counted = KEPT * self.num_counted + num_blocks
        self.num_returned = KEPT * self.num_returned + num_returned
        self.chance = self.num_returned / self.num_counted


@mypyc_attr(acyclic=True)
class Event:
    """Blocks that wait for their horizon since their use ended. ``group``: the number of their class."""

    __slots__ = ("ended_s", "group", "num_blocks", "num_returned")

    def __init__(self, group: int, ended_s: float) -> None:
        self.group, self.ended_s = group, ended_s
        self.num_blocks = self.num_returned = 0


@mypyc_attr(acyclic=True)
class Living(Piece):
    """``num_uses``: total. ``facts``: of the last request. ``event``: of the end of its last use, None while in use."""

    __slots__ = ("event", "facts", "num_uses", "stamp")

    def __init__(self, num_uses: int, facts: Facts) -> None:
        self.num_uses, self.facts = num_uses, facts
        self.event: Event | None = None
        self.stamp = 0

    def twin(self) -> Living:
        twin = Living(self.num_uses, self.facts)
        twin.event, twin.stamp = self.event, self.stamp
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class Survival(LeafPolicy[Living]):
    """Evicts by the probability of a class to return."""

    uses_ghost_keys: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._half_life = HalfLife()
        self._classes: dict[object, Class] = {}
        self.classes: list[Class] = []  # pieces hold numbers of these: the collector skips them
        self._events: deque[Event] = deque()
        self._new_blocks = places_in_blocks(_NEW_TOKENS, self._block_tokens)
        self._by_age = LeafHeap()  # the leaves of all classes
        self._order: list[tuple[float, float, float, int, Class]] = []  # key: chance, first leaf, serial
        self._to_place: list[Class] = []
        self._serial = 0

    @property
    def horizon_s(self) -> float:
        """Blocks older than this have probability 0."""
        return HORIZON * self._half_life.seconds

    # --- a request

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        facts = Facts(labels_of(hints), self._segment_blocks)
        if nodes:
            state = self._states[nodes[-1]]
            facts.found(state.depth, state.pieces[-1].facts, 0.0)
            for node in nodes:
                for piece in self._states[node].pieces:
                    piece.facts = facts
        return facts

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> Living:
        facts = hints if isinstance(hints, Facts) else Facts(labels_of(hints), self._segment_blocks)
        if not isinstance(memory, tuple):
            facts.computed(num_blocks, start + num_blocks)
            return Living(1, facts)
        num_uses, earlier, event = memory
        facts.found(start + num_blocks, earlier, 0.0)
        self._returned(event, num_blocks)
        return Living(num_uses + 1, facts)

    def used(self, piece: Living) -> None:
        piece.num_uses += 1
        if piece.event is not None:
            self._returned(piece.event, piece.num_blocks)
            piece.event = None

    def ended(self, piece: Living) -> None:
        now_s = self._clock()
        piece.stamp = self.next_stamp()
        last = self._events[-1] if self._events else None
        group = self._class(piece)
        if last is None or last.group != group.number or last.ended_s != now_s:
            last = Event(group.number, now_s)
            self._events.append(last)
            self._count(now_s)
        last.num_blocks += piece.num_blocks
        piece.event = last

    def memory(self, piece: Living) -> object:
        return piece.num_uses, piece.facts, piece.event

    # --- the order

    def entered(self, node: Handle, piece: Living, depth: int) -> None:
        assert piece.event is not None
        group = self.classes[piece.event.group]
        group.leaves.add(node, piece.event.ended_s, piece.stamp)
        self._changed(group)
        self._by_age.add(node, piece.event.ended_s, piece.stamp)

    def left(self, node: Handle, piece: Living) -> None:
        assert piece.event is not None
        group = self.classes[piece.event.group]
        group.leaves.discard(node)
        self._changed(group)
        self._by_age.discard(node)

    def victim(self) -> Handle | None:
        oldest = self._by_age.first_key()
        if oldest is None or oldest[0] < self._clock() - self.horizon_s:
            return self._by_age.first()
        for group in self._to_place:
            self._place(group)
        self._to_place.clear()
        order = self._order
        while order[0][3] != order[0][4].serial:
            heappop(order)
        return order[0][4].leaves.first()

    def _changed(self, group: Class) -> None:
        """Mark the class for ``_place``: its chance or its first leaf may have changed."""
        if group.is_placed:
            group.is_placed = False
            self._to_place.append(group)

    def _place(self, group: Class) -> None:
        """Put the class at its place in the order. Its earlier place is skipped later."""
        group.is_placed = True
        self._serial = group.serial = self._serial + 1
        first = group.leaves.first_key()
        if len(self._order) > 2 * len(self._classes) + 64:
            self._order = [entry for entry in self._order if entry[3] == entry[4].serial]
            heapify(self._order)
        if first is not None:
            heappush(self._order, (group.chance, *first, group.serial, group))

    # --- learning

    def _class(self, piece: Living) -> Class:
        facts, labels = piece.facts, piece.facts.labels
        place = bisect_left(_USES, piece.num_uses)
        known = facts.groups.get(place)
        if isinstance(known, int):
            return self.classes[known]
        key: object = (
            place,
            bisect_left(_TURNS, facts.turn),
            bisect_left(self._new_blocks, facts.num_new),
            labels.get("type") if labels else None,
            bool(labels and labels.get("session_over")),
            bool(labels and labels.get("tool_pending")),
        )
        group = self._classes.get(key)
        if group is None:
            if len(self._classes) >= MAX_CLASSES:
                key = None
            group = self._classes.get(key)
        if group is None:
            group = self._classes[key] = Class(len(self.classes), PRIOR_TOKENS / self._block_tokens)
            self.classes.append(group)
        facts.groups[place] = group.number
        return group

    def _returned(self, event: Event, num_blocks: int) -> None:
        age_s = self._clock() - event.ended_s
        self._half_life.saw(age_s, num_blocks)
        if age_s <= self.horizon_s:
            event.num_returned += num_blocks

    def _count(self, now_s: float) -> None:
        """Count the events whose horizon has come."""
        events, until_s = self._events, now_s - self.horizon_s
        while events and (events[0].ended_s <= until_s or len(events) > MAX_EVENTS):
            event = events.popleft()
            group = self.classes[event.group]
            group.count(event.num_blocks, min(event.num_returned, event.num_blocks))
            self._changed(group)
