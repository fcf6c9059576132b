"""Learned: keeps blocks that are likely to return soon, by a model learned online from past returns. Our own policy.

When a use ends, its blocks get a class. Its features come from the cache's own observations: the number of earlier
uses, the turn of the conversation, the pause before it, the number of new tokens in the request, its length. After
``MIN_PAUSES`` pauses of a conversation, the pause that its past makes likely replaces the last one. It is
``exp((n · own + 2 · all) ÷ (n + 2))`` of the logarithms of pauses, apart for those after a tool's call. A pause that
is expected replaces both. Labels are added, if there are any, also those that come at a request's end. When a
conversation continues elsewhere (``Facts.superseded``), the blocks that it leaves behind move to another class.

``hazard`` learns when each class returns, from the cache's own past, ghosts included. It ranks a class at each age by
the expected hits per block-second of keeping it. The lowest rank is evicted first. Ranks change with age, differently
for each class: a conversation returns after a minute or not at all. So ``maintain`` ranks all leaves again, about
once a second, and a new leaf is ranked at once. While an LRU would hit more (``hazard.Standing``), all leaves rank by
age alone, as in LRU.

It needs no training in advance and no labels, and uses no randomness. policies/README.md describes how it works and
its weaknesses.

State a node: six values a piece, an entry of a heap. State a tenant: the model's 6 MB; at least 32,768 ghosts, 3 MB
when full; and 8,192 labelled sessions, 5 MB when full. Cost: O(log n) a hook; O(nodes of a path) to move an abandoned
branch. Learning and ranking all leaves, O(leaves), run in ``maintain``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from math import log
from typing import ClassVar, Final

import numpy as np

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.facts import Facts, labels_of, places_in_blocks
from radixkv_policies.hazard import EDGES_S, MAX_CLASSES, Floats, HazardModel, ranks_at
from radixkv_policies.leaves import Ghosts, Heap, LeafPolicy, Piece, Place
from radixkv_policies.policy import Handle

COUNT_EVERY_S: Final = 1.0
FIT_EVERY_S: Final = 5.0
FIT_SHARE: Final = 0.03

LEARNED_GHOSTS: Final = 32_768
"""Minimum of ghosts, even in a small cache. Without its ghost, a return counts as a new block."""

MAX_SESSIONS: Final = 8_192
"""Labelled sessions with a known last request."""

MAX_TYPES: Final = 7
"""Types of requests that the model distinguishes, by label."""

_Key = tuple[int, int, int, int, int, bool, object, bool, bool]
"""Key of a class. Indices of ranges: uses, turn, new tokens, length, pause. Then superseded, type, session over,
tool pending.
"""

_USES: Final = (1, 2, 3, 4, 6, 9, 14, 24, 48)
_TURNS: Final = [1, 2, 3, 4, 5, 7, 10]
_NEW_TOKENS: Final = (0, 512, 1_024, 1_536, 2_048, 4_096, 8_192, 16_384)
_TOKENS: Final = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
_PAUSES_S: Final = [0.0, 10.0, 30.0, 60.0, 120.0, 300.0]
"""Limits of the pause before a turn. The first range means that the request opens a conversation."""

MIN_PAUSES: Final = 6
"""After this many pauses of a conversation, the pause that is typical for it replaces the last one."""

_TYPICAL_LOGS: Final = [log(pause_s) for pause_s in (3.0, 6.0, 12.0, 24.0, 48.0, 96.0, 192.0)]
"""Limits of the pause that is typical for a conversation."""

_PLACE_OF_USES: Final = [bisect_left(_USES, num_uses) for num_uses in range(_USES[-1] + 2)]

_EDGES_S: Final[list[float]] = EDGES_S.tolist()


@mypyc_attr(acyclic=True)
class Returning(Piece):
    """``num_uses``: total. ``facts``: of the last request. ``number`` (−1 in use), ``group``: of the ended use."""

    __slots__ = ("ended_s", "facts", "group", "num_uses", "number")

    def __init__(self, num_uses: int, facts: Facts) -> None:
        self.num_uses, self.facts = num_uses, facts
        self.number, self.group, self.ended_s = -1, 0, 0.0

    def twin(self) -> Returning:
        twin = Returning(self.num_uses, self.facts)
        twin.ended_s, twin.group, twin.number = self.ended_s, self.group, self.number
        return twin


@mypyc_attr(allow_interpreted_subclasses=True)
class Learned(LeafPolicy[Returning]):
    """Evicts by expected hits per block-second. ``yields``: falls back to LRU while LRU hits more."""

    uses_ghost_keys: ClassVar[bool] = True

    def begin(self) -> None:
        super().begin()
        self._model = HazardModel()
        self._groups: dict[object, int] = {}
        self._types: dict[object, int] = {None: 0}
        self._sessions: OrderedDict[object, Facts] = OrderedDict()
        self._leaf_of: dict[Facts, Handle] = {}  # per request: the evictable leaf that ends with its blocks
        self.moved: list[Returning] = []  # pieces that the last ``opened`` or ``noted`` gave another class
        self._undescribed: deque[tuple[int, _Key]] = deque()
        self._all_logs, self._all_nums = [log(20.0), log(20.0)], [0, 0]
        self._num_ended = 0  # ended uses so far
        self._num_waiting = 0  # blocks that no request uses
        self.yields = True
        self._new_blocks = places_in_blocks(_NEW_TOKENS, self._block_tokens)
        self._num_blocks = places_in_blocks(_TOKENS, self._block_tokens)
        self._last_facts: Facts | None = None
        self._last_group, self._last_s, self._last_number = 0, 0.0, 0
        self._now_s = self._clock()  # read once for all pieces of a call
        self._leaves = Leaves(self._model.rank)
        self._counted_s = self._fitted_s = self._started_s = self._clock()

    # --- a request

    def opened(self, nodes: Sequence[Handle], num_blocks: int, hints: object) -> object:
        facts = Facts(labels_of(hints), self._segment_blocks)
        left_behind = self._before(facts)
        earlier_pending = False
        if nodes:
            state = self._states[nodes[-1]]
            last = state.pieces[-1]
            earlier = last.facts
            earlier_pending = earlier.is_pending
            facts.found(state.depth, earlier, self._clock() - last.ended_s)
            if facts.supersedes(earlier, state.depth, last.num_uses - 1):
                left_behind = earlier
            for node in nodes:
                for piece in self._states[node].pieces:
                    piece.facts = facts
        self.moved.clear()
        if facts.gap_s > 0.0:
            self._note_pause(earlier_pending, facts.gap_s)
        if left_behind is not None:
            self._supersede(left_behind)
        return facts

    def _note_pause(self, is_pending: bool, pause_s: float) -> None:
        """Add a pause to those of all conversations."""
        kind = 1 if is_pending else 0
        self._all_nums[kind] += 1
        weight = 1.0 / min(self._all_nums[kind] + 10, 2_000)
        self._all_logs[kind] += (log(max(pause_s, 0.1)) - self._all_logs[kind]) * weight

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

    def touched(self, nodes: Sequence[Handle]) -> None:
        self._now_s = self._clock()
        super().touched(nodes)

    def unleased(self, node: Handle) -> None:
        self._now_s = self._clock()
        super().unleased(node)

    def used(self, piece: Returning) -> None:
        piece.num_uses += 1
        if piece.number >= 0:
            self._model.log.append((piece.number, self._now_s, -1, piece.num_blocks / self._segment_blocks))
            piece.number = -1
            self._num_waiting -= piece.num_blocks

    def ended(self, piece: Returning) -> None:
        if piece.number < 0:
            self._num_waiting += piece.num_blocks
        now_s = piece.ended_s = self._now_s
        facts = piece.facts
        group = piece.group = self._group_of(piece)
        if facts is not self._last_facts or group != self._last_group or now_s != self._last_s:
            self._last_facts, self._last_group, self._last_s = facts, group, now_s
            self._last_number = self._num_ended
            self._num_ended += 1
        piece.number = self._last_number
        self._model.log.append((piece.number, now_s, group, piece.num_blocks / self._segment_blocks))

    def lost(self, piece: Returning, num_blocks: int) -> None:
        if piece.number >= 0:
            self._num_waiting -= num_blocks

    def make_ghosts(self, max_ghosts: int) -> Ghosts:
        return super().make_ghosts(max(LEARNED_GHOSTS, max_ghosts))

    def memory(self, piece: Returning) -> object:
        return piece.num_uses, piece.facts, piece.number, piece.ended_s

    # --- the order

    def entered(self, node: Handle, piece: Returning, depth: int) -> None:
        self._leaves.add(node, piece.group, piece.ended_s, self._clock())
        self._leaf_of[piece.facts] = node

    def left(self, node: Handle, piece: Returning) -> None:
        self._leaves.discard(node)
        self._leaf_of.pop(piece.facts, None)

    def announced(
        self, request: Handle, node: Handle | None, num_blocks: int, missing: float, hints: object
    ) -> None:
        self.wait(request, node, num_blocks, missing)

    def withdrawn(self, request: Handle) -> None:
        self.wait_no_longer(request)

    def victim(self) -> Handle | None:
        return self.pick(self._leaves.first())

    @property
    def rank(self) -> Floats:
        """The rank of each class at each age. While LRU hits more, it is the same for all classes."""
        return self._model.by_age if self.yields and not self._model.standing.leads else self._model.rank

    def maintain(self) -> None:
        now_s = self._clock()
        if now_s - self._counted_s >= COUNT_EVERY_S:
            fit = now_s - self._fitted_s >= min(max(FIT_EVERY_S, FIT_SHARE * (now_s - self._started_s)), 60.0)
            self._counted_s, self._fitted_s = now_s, now_s if fit else self._fitted_s
            self._describe_classes()
            self._model.update(now_s, fit=fit, room=self._num_waiting / self._segment_blocks)
            self._leaves.rank_anew(now_s, self.rank)

    # --- conversations that continued elsewhere

    def _before(self, facts: Facts) -> Facts | None:
        """The request before this one in its labelled session. This one becomes the session's last."""
        session = facts.labels.get("session") if facts.labels else None
        if session is None:
            return None
        before = self._sessions.pop(session, None)
        self._sessions[session] = facts
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return before

    def noted(self, request: object, hints: object, node: Handle | None = None) -> None:
        self.moved.clear()
        if node is not None:
            request = self._states[node].pieces[-1].facts
        if isinstance(request, Facts) and request.note(labels_of(hints)):
            self._move(request)

    def _supersede(self, facts: Facts) -> None:
        """Move the blocks of an abandoned request to another class."""
        if not facts.superseded:
            facts.superseded = True
            facts.groups.clear()
            self._move(facts)

    def _move(self, facts: Facts) -> None:
        """Give the blocks that only this request used last the class that its facts say now."""
        leaf = node = self._leaf_of.get(facts)
        now_s = self._clock()
        while node is not None:
            state = self._states[node]
            theirs = [piece for piece in state.pieces if piece.facts is facts and piece.number >= 0]
            for piece in theirs:
                piece.group = self._group_of(piece)
                self._model.log.append((piece.number, now_s, piece.group, 0.0))
            if node is leaf:
                self._leaves.discard(node)
                self._leaves.add(node, state.pieces[-1].group, state.pieces[-1].ended_s, now_s)
            self.moved += theirs
            node = state.parent if theirs else None

    # --- classes

    def _group_of(self, piece: Returning) -> int:
        """The class of a piece now."""
        facts = piece.facts
        place = _PLACE_OF_USES[piece.num_uses] if piece.num_uses <= _USES[-1] else len(_USES)
        group = facts.groups.get(place)
        if not isinstance(group, int):
            group = facts.groups[place] = self._group(place, facts)
        return group

    def _describe_classes(self) -> None:
        """Pass the features of new classes to the model."""
        types = self._types
        while self._undescribed:
            group, key = self._undescribed.popleft()
            if len(types) <= MAX_TYPES:
                types.setdefault(key[6], len(types))
            self._model.describe(group, _features(key, types.get(key[6], 0)))

    def _group(self, place: int, facts: Facts) -> int:
        """The class of blocks that a request used. ``place``: index of the range of uses."""
        labels = facts.labels
        turn, new = _place(_TURNS, facts.turn), _place(self._new_blocks, facts.num_new)
        length = _place(self._num_blocks, facts.end)
        pause = self._place_of_pause(facts)
        places = ((((place << 4 | turn) << 4 | new) << 4 | length) << 4 | pause) << 1 | facts.superseded
        if not labels:
            group = self._groups.get(places)
            return (
                self._new_group(
                    places, (place, turn, new, length, pause, facts.superseded, None, False, False)
                )
                if group is None
                else group
            )
        kind, is_over, is_pending = (
            labels.get("type"),
            bool(labels.get("session_over")),
            bool(labels.get("tool_pending")),
        )
        labelled = places, kind, is_over, is_pending
        group = self._groups.get(labelled)
        if group is None:
            return self._new_group(
                labelled, (place, turn, new, length, pause, facts.superseded, kind, is_over, is_pending)
            )
        return group

    def _place_of_pause(self, facts: Facts) -> int:
        """The range of the last pause of its conversation, 0 without one. Or, behind these, of the pause to expect."""
        expected = facts.expected_log
        if expected is not None:
            return len(_PAUSES_S) + 1 + bisect_left(_TYPICAL_LOGS, expected)
        if facts.gap_s <= 0.0:
            return 0
        kind = 1 if facts.is_pending else 0
        if facts.pauses.nums[0] + facts.pauses.nums[1] < MIN_PAUSES:
            return bisect_left(_PAUSES_S, facts.gap_s)
        return (
            len(_PAUSES_S)
            + 1
            + bisect_left(_TYPICAL_LOGS, facts.pauses.typical(facts.is_pending, self._all_logs[kind]))
        )

    def _new_group(self, name: object, key: _Key) -> int:
        """Add a class. Returns class 0 if there are already MAX_CLASSES."""
        if self._model.num_classes >= MAX_CLASSES:
            return 0
        group = self._groups[name] = self._model.add_class()
        self._undescribed.append((group, key))
        return group


def _place(edges: list[int], number: int) -> int:
    """The number of edges below the number. Compiled, a loop over about eight is faster than a call of ``bisect``."""
    place = 0
    for edge in edges:
        if edge >= number:
            break
        place += 1
    return place


def _features(key: _Key, kind: int) -> list[float]:
    """The model's features of a class. ``kind``: the number of its type, 0 for none."""
    uses, turn, new, length, pause, superseded, _, is_over, is_pending = key
    u, t, n, s = (
        2 * place / len(places) - 1
        for place, places in ((uses, _USES), (turn, _TURNS), (new, _NEW_TOKENS), (length, _TOKENS))
    )
    is_known = pause > len(_PAUSES_S)
    if is_known:
        p = 2 * (pause - len(_PAUSES_S) - 1) / len(_TYPICAL_LOGS) - 1
    else:
        p = 2 * (pause - 1) / (len(_PAUSES_S) - 1) - 1 if pause else 0.0
    numbers = [u, t, n, s, p, u * u, t * t, n * n, s * s, p * p]
    products = [u * t, u * n, t * n, n * s, u * s, t * s]
    flags = [uses == 0, turn == 0, new == 0, pause == 0, superseded, is_over, is_pending, is_known]
    return [*numbers, *products, *map(float, flags), *(float(kind == i) for i in range(1, MAX_TYPES + 1))]


class Ranked(Place):
    """A leaf, ordered by the rank of its class at its age, then by the end of its use (``second``)."""

    __slots__ = ("group",)

    def __init__(self, node: Handle, key: float, second: float, serial: int, group: int) -> None:
        super().__init__(node, key, second, serial)
        self.group = group


class Leaves:
    """The evictable leaves, the lowest rank first; of equals, the one whose use ended first. O(log n), amortised.

    A rank is for the leaf's class and age when it was added, or when ``rank_anew`` last ran. That may run in another
    thread, and the next call applies its result.
    """

    def __init__(self, rank: Floats) -> None:
        self._rank = rank
        self._places: dict[Handle, Ranked] = {}
        self._heap = Heap([])  # a place is valid only if its serial is the leaf's in _places
        self._ranked: tuple[int, list[Place]] | None = None
        self._serial = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, node: Handle) -> bool:
        return node in self._places

    def add(self, node: Handle, group: int, ended_s: float, now_s: float) -> None:
        """Add a leaf that isn't in it."""
        self._serial += 1
        age_s = now_s - ended_s
        age = 0 if age_s < _EDGES_S[1] else bisect_right(_EDGES_S, age_s) - 1  # most uses have just ended
        rank: float = self._rank.item(group, age)
        place = self._places[node] = Ranked(node, rank, ended_s, self._serial, group)
        if len(self._heap.places) > 2 * len(self._places) + 64:
            for each in self._heap.places:
                if not self._is_valid(each):
                    each.node = None
            self._heap.sweep()
        self._heap.push(place)

    def discard(self, node: Handle) -> None:
        """Remove a leaf."""
        del self._places[node]  # its place in the heap is skipped later

    def first(self) -> Handle | None:
        """The first leaf, or None."""
        if self._ranked is not None:
            self._take_up()
        places = self._heap.places
        while places:
            if self._is_valid(places[0]):
                return places[0].node
            self._heap.pop()
        return None

    def _is_valid(self, place: Place) -> bool:
        found = self._places.get(place.node)
        return found is not None and found.serial == place.serial

    def rank_anew(self, now_s: float, rank: Floats) -> None:
        """Rank all leaves by their age. O(n log n)."""
        self._rank = rank
        upto = self._serial
        places = list(self._places.values())
        ended_s = np.array([place.second for place in places])
        groups = np.array([place.group for place in places], np.int64)
        serials = np.array([place.serial for place in places], np.int64)
        ranks = ranks_at(rank, groups, now_s - ended_s)
        order, worth = np.lexsort((serials, ended_s, ranks)).tolist(), ranks.tolist()
        heap = [Place(places[at].node, worth[at], places[at].second, places[at].serial) for at in order]
        self._ranked = upto, heap

    def _take_up(self) -> None:
        """Replace the old ranks by the new ones. Leaves that were added meanwhile keep their rank."""
        assert self._ranked is not None
        upto, places = self._ranked
        self._ranked, self._heap = None, Heap(places)
        for place in reversed(self._places.values()):  # in reverse order of serials
            if place.serial <= upto:
                break
            self._heap.push(place)
