"""LeafPolicy: shared state for policies whose order alone doesn't put a child before its parent.

It tracks the parent of each node, its number of children, and whether it is evictable. So it knows the *evictable
leaves*. A subclass gets events of those only (``entered``, ``left``) and ranks them.

A node is a list of *pieces*, the deepest last. A piece is a run of blocks with one history:

    blocks   [ seen before, evicted, computed again )[ never seen )
    pieces   [ 3 uses                               )[ 1 use      )

A leaf ranks by its last piece, and loses no more than that piece before it is ranked again (``most``). The memory of
a piece may survive eviction. ``memory`` passes it to the ``Ghosts``, under the keys of its segments, and ``made``
gets it back. Blocks that a request adds to its own leaf join the last piece, if no other request used that piece.

``LeafHeap`` orders leaves by a key that doesn't grow while a leaf is in it. ``LeafQueue`` is for keys that mostly
arrive in order.

State a node: about 300 bytes with one piece, plus the subclass's. Cost: O(1) a hook, O(pieces) for ``touched`` and
``split``, plus the subclass's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.policy import GhostKeys, Handle, Policy

Keys = tuple[Any, ...]
"""Ghost keys: opaque integers."""

MIN_GHOSTS: Final = 16_384
"""Ghosts that any policy with memories may keep, about 2 MB, because they are useful in a small cache too."""

GHOSTS_PER_SEGMENT: Final = 4
"""Ghosts for each segment that the cache can hold, if that is more."""


@mypyc_attr(acyclic=True)
class _Run:
    """Segments that were evicted together, shallowest first. Only the first ``size`` of them are remembered."""

    __slots__ = ("keys", "line", "memory", "size")

    def __init__(self, keys: Keys, memory: object, line: GhostLine) -> None:
        self.keys, self.memory, self.line, self.size = keys, memory, line, len(keys)


class GhostLine:
    """Runs in the order in which they are forgotten, at most ``max_ghosts`` segments. ``num``: their segments.

    A forgotten run has size 0. It stays in the lists until its turn comes, or until most runs are forgotten.
    """

    __slots__ = ("_at", "_first", "_max", "_row", "num")

    def __init__(self, max_ghosts: int) -> None:
        self._max, self.num = max_ghosts, 0
        self._row: list[_Run] = []
        self._at = 0  # earlier ones were removed
        self._first: list[_Run] = []  # they come before _row, the last one first

    def append(self, run: _Run) -> None:
        """Add a run that is forgotten last."""
        self._row.append(run)

    def prepend(self, run: _Run) -> None:
        """Add a run that is forgotten next."""
        self._first.append(run)

    def shrink(self, runs: dict[object, _Run]) -> None:
        """Forget segments above the maximum, the deepest of a run first. Amortised O(1) a run that was added."""
        if len(self._row) + len(self._first) > 2 * len(runs) + 64:
            self._row, self._at = [run for run in self._row if run.size], 0
            self._first = [run for run in self._first if run.size]
        while self.num > self._max:
            run = self._first[-1] if self._first else self._row[self._at]
            excess = self.num - self._max
            if run.size > excess:
                run.size -= excess
                self.num -= excess
                return
            if self._first:
                self._first.pop()
            else:
                self._at += 1
            if run.size:
                del runs[run.keys[0]]
                self.num -= run.size
                run.keys, run.memory, run.size = (), None, 0


@mypyc_attr(allow_interpreted_subclasses=True)
class Ghosts:
    """Memories of evicted segments by key, at most ``max_ghosts``. The oldest is forgotten first.

    Segments that were evicted together are one *run*, stored under its shallowest key. A request that computes any of
    them again computes that one too, so it finds the run: O(1) a run, and one look-up in a small dict for each key.
    """

    __slots__ = ("_runs", "line")

    def __init__(self, max_ghosts: int) -> None:
        self._runs: dict[object, _Run] = {}
        self.line = GhostLine(max_ghosts)

    def __len__(self) -> int:
        return self.line.num

    def line_of(self, memory: object) -> GhostLine:
        """The line of ghosts with this memory."""
        return self.line

    def take(self, keys: Keys) -> list[object] | None:
        """Return the memory of each key, None for unknown ones, and forget them. Returns None if all are unknown."""
        runs = self._runs
        if not runs:
            return None
        found: list[object] | None = None
        at, end = 0, len(keys)
        while at < end:
            key = keys[at]
            if key not in runs:
                at += 1
                continue
            if found is None:
                found = [None] * end
            run = runs[key]
            remembered, memory, line = run.keys[: run.size], run.memory, run.line
            same = _num_equal(remembered, keys, at)
            found[at : at + same] = [memory] * same
            self._forget(run)
            if same < len(remembered):  # the prompts differ here, so the rest of the run stays
                line.prepend(self._keep(remembered[same:], memory, line))
            at += same
        return found

    def put(self, keys: Keys, memory: object) -> None:
        """Remember ``memory`` for each key. There is at least one key, and they are consecutive on one path."""
        line = self.line_of(memory)
        line.append(self._keep(keys, memory, line))
        line.shrink(self._runs)

    def _keep(self, keys: Keys, memory: object, line: GhostLine) -> _Run:
        run = _Run(keys, memory, line)
        known = self._runs.setdefault(keys[0], run)
        if known is not run:
            self._forget(known)
            self._runs[keys[0]] = run
        line.num += run.size
        return run

    def _forget(self, run: _Run) -> None:
        del self._runs[run.keys[0]]
        run.line.num -= run.size
        run.keys, run.memory, run.size = (), None, 0


def _num_equal(run: Keys, keys: Keys, at: int) -> int:
    """The number of keys of a run that equal ``keys`` from ``at`` on."""
    if keys[at : at + len(run)] == run:
        return len(run)
    return next(i for i, key in enumerate(run) if at + i == len(keys) or keys[at + i] != key)


@mypyc_attr(allow_interpreted_subclasses=True, acyclic=True)
class Piece:
    """Blocks of a node with one history.

    keys: ghost keys of the segments that end within, shallowest first. is_new: made in the current use of its node,
    with no other use and no ghost.
    """

    __slots__ = ("is_new", "keys", "num_blocks")

    num_blocks: int
    keys: Keys
    is_new: bool

    def twin(self) -> Piece:
        """Return another piece with the same history. The caller sets its blocks."""
        raise NotImplementedError


P = TypeVar("P", bound=Piece)


class State(Generic[P]):
    """The state of a node. ``depth``: blocks from the root to its end."""

    __slots__ = ("depth", "evictable", "num_children", "parent", "pieces")

    def __init__(self, parent: Handle | None, depth: int, pieces: list[P], num_children: int) -> None:
        self.parent, self.depth, self.pieces, self.num_children = parent, depth, pieces, num_children
        self.evictable = False


@mypyc_attr(allow_interpreted_subclasses=True)
class LeafPolicy(Policy, Generic[P]):
    """A policy over evictable leaves. A subclass defines ``made``, ``entered``, ``left`` and ``victim``."""

    ranks_by_depth: ClassVar[bool] = False
    """Whether a leaf is ranked again after each trim, not only when its last piece is gone."""

    def begin(self) -> None:
        super().begin()
        self._states: dict[Handle, State[P]] = {}
        self._num_evictable = self._stamp = 0
        self._hears_of_losses = type(self).lost is not LeafPolicy.lost
        self._ghosts = self.make_ghosts(
            max(MIN_GHOSTS, GHOSTS_PER_SEGMENT * self._capacity // self._segment_blocks)
        )

    def next_stamp(self) -> int:
        """A number greater than all before, to order events."""
        self._stamp += 1
        return self._stamp

    # --- defined by subclasses

    def made(self, start: int, num_blocks: int, hints: object, memory: object) -> P:
        """Make a piece of blocks ``[start, start + num_blocks)``. ``memory``: that of their ghosts, or None."""
        raise NotImplementedError

    def entered(self, node: Handle, piece: P, depth: int) -> None:
        """The node became an evictable leaf that ends with ``piece`` at ``depth``."""
        raise NotImplementedError

    def left(self, node: Handle, piece: P) -> None:
        """The evictable leaf came into use, is gone, or will be ranked again."""
        raise NotImplementedError

    def used(self, piece: P) -> None:
        """A request found the piece resident."""

    def ended(self, piece: P) -> None:
        """The last use of the piece's node ended."""

    def memory(self, piece: P) -> object:
        """The memory that should survive the eviction of its blocks, equal for equal histories. None for none."""
        return None

    def uncovered(self, parent: P, child: P) -> None:
        """All blocks of ``child`` are gone. It came right after ``parent``."""

    def lost(self, piece: P, num_blocks: int) -> None:
        """The last blocks of the piece are gone; ``piece.num_blocks`` are left."""

    def alike(self, last: P, piece: P) -> bool:
        """Whether a new piece right after the new piece ``last`` can be merged into it."""
        return True

    def make_ghosts(self, max_ghosts: int) -> Ghosts:
        """Make the store of memories."""
        return Ghosts(max_ghosts)

    # --- hooks

    def touched(self, nodes: Sequence[Handle]) -> None:
        states = self._states
        for node in nodes:
            for piece in states[node].pieces:
                piece.is_new = False
                self.used(piece)

    def inserted(
        self,
        node: Handle,
        num_blocks: int,
        depth: int,
        hints: object = None,
        ghost_keys: GhostKeys = (),
        parent: Handle | None = None,
    ) -> None:
        states = self._states
        states[node] = State(parent, depth, self._pieces(num_blocks, depth, hints, tuple(ghost_keys)), 0)
        if parent is not None:
            states[parent].num_children += 1

    def extended(
        self, node: Handle, num_blocks: int, hints: object = None, ghost_keys: GhostKeys = ()
    ) -> None:
        state = self._states[node]
        state.depth += num_blocks
        for piece in self._pieces(num_blocks, state.depth, hints, tuple(ghost_keys)):
            last = state.pieces[-1]
            if last.is_new and piece.is_new and self.alike(last, piece):
                last.num_blocks += piece.num_blocks
                last.keys += piece.keys
            else:
                state.pieces.append(piece)

    def split(self, upper: Handle, lower: Handle, num_blocks: int) -> None:
        state = self._states[lower]
        pieces, cut = state.pieces, num_blocks
        above: list[P] = []
        while cut and pieces[0].num_blocks <= cut:
            cut -= pieces[0].num_blocks
            above.append(pieces.pop(0))
        depth = state.depth - sum(piece.num_blocks for piece in pieces) + cut
        if cut:
            above.append(self._halve(pieces[0], cut, depth))
        new = self._states[upper] = State(state.parent, depth, above, 1)
        state.parent = upper
        if state.evictable:
            new.evictable = True
            self._num_evictable += 1

    def leased(self, node: Handle) -> None:
        state = self._states[node]
        state.evictable = False
        self._num_evictable -= 1
        if not state.num_children:
            self.left(node, state.pieces[-1])

    def unleased(self, node: Handle) -> None:
        state = self._states[node]
        state.evictable = True
        self._num_evictable += 1
        for piece in state.pieces:
            piece.is_new = False
            self.ended(piece)
        if not state.num_children:
            self.entered(node, state.pieces[-1], state.depth)

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        state = self._states[node]
        piece = state.pieces[-1]
        anew = self.ranks_by_depth or num_blocks >= piece.num_blocks
        if anew:
            self.left(node, piece)
        self._cut(state, piece, num_blocks)
        piece = state.pieces[-1]
        if anew and piece.num_blocks:
            self.entered(node, piece, state.depth)

    def _cut(self, state: State[P], piece: P, num_blocks: int) -> None:
        """Remove the last blocks of a node that ends with ``piece``."""
        pieces = state.pieces
        while num_blocks:
            taken = min(num_blocks, piece.num_blocks)
            if piece.keys:
                self._bury(piece, state.depth, taken)
            num_blocks -= taken
            state.depth -= taken
            piece.num_blocks -= taken
            if self._hears_of_losses:
                self.lost(piece, taken)
            if not piece.num_blocks and len(pieces) > 1:
                pieces.pop()
                self.uncovered(pieces[-1], piece)
                piece = pieces[-1]

    def removed(self, node: Handle) -> None:
        state = self._states[node]
        del self._states[node]
        self._num_evictable -= 1
        last = state.pieces[-1]
        if last.num_blocks:
            self._cleared(node, state)
        if state.parent is not None:
            above = self._states[state.parent]
            self.uncovered(above.pieces[-1], last)
            above.num_children -= 1
            if above.evictable and not above.num_children:
                self.entered(state.parent, above.pieces[-1], above.depth)

    def _cleared(self, node: Handle, state: State[P]) -> None:
        """The node is removed without an eviction, so nothing is remembered."""
        if not state.num_children:
            self.left(node, state.pieces[-1])
        for piece in state.pieces:
            size, piece.num_blocks = piece.num_blocks, 0
            self.lost(piece, size)

    def most(self, node: Handle) -> int:
        return self._states[node].pieces[-1].num_blocks

    def __len__(self) -> int:
        return self._num_evictable

    # --- pieces and ghosts

    def pieces(self, node: Handle) -> Sequence[P]:
        """The pieces of a node, deepest last."""
        return self._states[node].pieces

    @property
    def num_ghosts(self) -> int:
        """The number of remembered segments."""
        return len(self._ghosts)

    def num_blocks(self, node: Handle) -> int:
        """The number of blocks of a node."""
        return sum(piece.num_blocks for piece in self._states[node].pieces)

    def _pieces(self, num_blocks: int, depth: int, hints: object, keys: Keys) -> list[P]:
        """Make pieces of new blocks that end at ``depth``: one for each run of segments with equal memories."""
        memories = self._ghosts.take(keys) if keys else None
        if memories is None:
            piece = self.made(depth - num_blocks, num_blocks, hints, None)
            piece.num_blocks, piece.keys, piece.is_new = num_blocks, keys, True
            return [piece]
        size, pieces = self._segment_blocks, []
        at, first = depth - num_blocks, 0
        end = at - at % size  # the end of the segment before the first key's
        for i, memory in enumerate(memories):
            end += size
            if i + 1 == len(keys) or memories[i + 1] != memory:
                stop = depth if i + 1 == len(keys) and memory is None else end
                pieces.append(self._new(at, stop - at, hints, keys[first : i + 1], memory))
                at, first = stop, i + 1
        if at < depth:
            pieces.append(self._new(at, depth - at, hints, (), None))
        return pieces

    def _new(self, start: int, num_blocks: int, hints: object, keys: Keys, memory: object) -> P:
        piece = self.made(start, num_blocks, hints, memory)
        piece.num_blocks, piece.keys, piece.is_new = num_blocks, keys, memory is None
        return piece

    def _halve(self, lower: P, num_blocks: int, depth: int) -> P:
        """Split the first blocks, up to ``depth``, off a piece."""
        upper = cast(P, lower.twin())
        size = self._segment_blocks
        num_keys = depth // size - (depth - num_blocks) // size if lower.keys else 0
        upper.num_blocks, upper.keys, upper.is_new = num_blocks, lower.keys[:num_keys], lower.is_new
        lower.num_blocks, lower.keys = lower.num_blocks - num_blocks, lower.keys[num_keys:]
        return upper

    def _bury(self, piece: P, depth: int, num_blocks: int) -> None:
        """Remember the last blocks of a piece with keys. They end at ``depth``."""
        keys = piece.keys
        if num_blocks == piece.num_blocks:
            piece.keys = ()
        else:
            size = self._segment_blocks
            num_keys = depth // size - (depth - num_blocks) // size
            if not num_keys:
                return
            keys, piece.keys = keys[-num_keys:], keys[:-num_keys]
        memory = self.memory(piece)
        if memory is not None:
            self._ghosts.put(keys, memory)


class Place:
    """A leaf's place in an order, by ``(key, second, serial)``. ``node``: None once the leaf has left."""

    __slots__ = ("key", "node", "second", "serial")

    def __init__(self, node: Handle, key: float, second: float, serial: int) -> None:
        self.node: Handle | None = node
        self.key, self.second, self.serial = key, second, serial

    def is_before(self, other: Place) -> bool:
        """Whether its leaf comes first."""
        if self.key != other.key:
            return self.key < other.key
        return self.second < other.second or (self.second == other.second and self.serial < other.serial)


class Heap:
    """A binary heap of places. Compiled, it compares C numbers, which takes a fifth of ``heapq``'s time for tuples."""

    __slots__ = ("places",)

    def __init__(self, places: list[Place]) -> None:
        self.places = places  # must be ordered as a heap

    def push(self, place: Place) -> None:
        """Add a place. O(log n); O(1) if it is the last."""
        places = self.places
        at = len(places)
        places.append(place)
        while at:
            up = (at - 1) >> 1
            above = places[up]
            if not place.is_before(above):
                break
            places[at] = above
            at = up
        places[at] = place

    def first(self) -> Place | None:
        """The first place with a leaf, or None. O(log n) for each place that is skipped."""
        places = self.places
        while places:
            place = places[0]
            if place.node is not None:
                return place
            self.pop()
        return None

    def pop(self) -> None:
        """Remove the first place."""
        places = self.places
        last = places.pop()
        end, at = len(places), 0
        if not end:
            return
        down = 1
        while down < end:
            below = places[down]
            if down + 1 < end and places[down + 1].is_before(below):
                down += 1
                below = places[down]
            if last.is_before(below):
                break
            places[at] = below
            at, down = down, 2 * down + 1
        places[at] = last

    def sweep(self) -> None:
        """Remove all places without a leaf. O(n log n)."""
        self.places = sorted(
            [place for place in self.places if place.node is not None],
            key=lambda place: (place.key, place.second, place.serial),
        )


class LeafHeap:
    """Leaves by ``(key, stamp)``, the smallest first. O(log n), amortised."""

    __slots__ = ("_heap", "_places", "_serial")

    def __init__(self) -> None:
        self._heap = Heap([])
        self._places: dict[Handle, Place] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, node: Handle) -> bool:
        return node in self._places

    def add(self, node: Handle, key: float, stamp: float = 0.0) -> None:
        """Add a leaf that isn't in it."""
        if len(self._heap.places) > 2 * len(self._places) + 64:
            self._heap.sweep()
        self._serial += 1
        self._places[node] = place = Place(node, key, stamp, self._serial)
        self._heap.push(place)

    def discard(self, node: Handle) -> None:
        """Remove a leaf."""
        self._places[node].node = None
        del self._places[node]

    def lower(self, node: Handle, key: float) -> None:
        """Lower the key of a leaf, or keep it. O(1) if it is the first."""
        place = self._places[node]
        if place is self._heap.places[0]:
            place.key = key
        else:
            self.discard(node)
            self.add(node, key, place.second)

    def first(self) -> Handle | None:
        """The first leaf, or None."""
        place = self._heap.first()
        return None if place is None else place.node

    def first_key(self) -> tuple[float, float] | None:
        """Key and stamp of the first leaf, or None."""
        place = self._heap.first()
        return None if place is None else (place.key, place.second)


class LeafQueue:
    """Leaves by ``(key, stamp)``, the smallest first. O(1) for leaves that arrive in order, else amortised O(log n).

    A leaf's key is of its last use or of its insertion. So most new leaves are the youngest and are appended. A
    parent that became a leaf is older, and goes to a separate heap.
    """

    __slots__ = ("_at", "_last", "_late", "_places", "_row", "_serial")

    def __init__(self) -> None:
        self._places: dict[Handle, Place] = {}
        self._row: list[Place] = []
        self._at = 0  # earlier ones were removed
        self._last = Place(None, -inf, 0.0, 0)  # the last one of _row
        self._late = Heap([])
        self._serial = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, node: Handle) -> bool:
        return node in self._places

    def add(self, node: Handle, key: float, stamp: float = 0.0, now: float = inf) -> None:
        """Add a leaf that isn't in it. now: the key of new leaves; leaves with a greater key go to the heap."""
        self._serial += 1
        self._places[node] = place = Place(node, key, stamp, self._serial)
        if key <= now and self._last.is_before(place):
            self._last = place
            self._row.append(place)
        else:
            self._late.push(place)
        if len(self._row) + len(self._late.places) > 2 * len(self._places) + 64:
            self._row, self._at = [each for each in self._row if each.node is not None], 0
            self._late.sweep()

    def discard(self, node: Handle) -> None:
        """Remove a leaf."""
        self._places[node].node = None
        del self._places[node]

    def first(self) -> Handle | None:
        """The first leaf, or None."""
        row, at = self._row, self._at
        while at < len(row) and row[at].node is None:
            at += 1
        self._at = at
        late = self._late.first()
        if at == len(row):
            return None if late is None else late.node
        oldest = row[at]
        return oldest.node if late is None or oldest.is_before(late) else late.node
