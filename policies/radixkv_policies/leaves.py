"""LeafPolicy: shared state for policies whose order alone doesn't put a child before its parent.

It tracks the parent of each node, its number of children, and whether it is evictable. So it knows the *evictable
leaves*. A subclass gets events of those only (``entered``, ``left``) and ranks them.

A node is a list of *pieces*, the deepest last. A piece is a run of blocks with one history:

    blocks   [ seen before, evicted, computed again )[ never seen )
    pieces   [ 3 uses                               )[ 1 use      )

A leaf ranks by its last piece, and loses no more than that piece before it is ranked again (``most``). The memory of
a piece may survive eviction. ``memory`` passes it to the ``Ghosts``, under the keys of its segments, and ``made``
gets it back. Blocks that a request adds to its own leaf join the last piece, if no other request used that piece.

``heaps`` has orders of leaves.

State a node: about 300 bytes with one piece, plus the subclass's. Cost: O(1) a hook, O(pieces) for ``touched`` and
``split``, plus the subclass's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.heaps import Heap as Heap
from radixkv_policies.heaps import LeafHeap as LeafHeap
from radixkv_policies.heaps import LeafQueue as LeafQueue
from radixkv_policies.heaps import Place as Place
from radixkv_policies.policy import GhostKeys, Handle, Policy
from radixkv_policies.queue import Queue

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
    """Runs in the order in which they are forgotten. ``num``: their segments; ``max_ghosts``: the most of them.

    A forgotten run has size 0. It stays in the lists until its turn comes, or until most runs are forgotten.
    """

    __slots__ = ("_at", "_first", "_row", "max_ghosts", "num")

    def __init__(self, max_ghosts: int) -> None:
        self.max_ghosts, self.num = max_ghosts, 0
        self._row: list[_Run] = []
        self._at = 0  # earlier ones were removed
        self._first: list[_Run] = []  # they come before _row, the last one first

    def append(self, run: _Run) -> None:
        """Add a run that is forgotten last."""
        self._row.append(run)

    def prepend(self, run: _Run) -> None:
        """Add a run that is forgotten next."""
        self._first.append(run)

    def shrink(self, runs: dict[object, _Run], most: int) -> None:
        """Forget segments above ``most``, the deepest of a run first. Amortised O(1) a run that was added."""
        if len(self._row) + len(self._first) > 2 * len(runs) + 64:
            self._row, self._at = [run for run in self._row if run.size], 0
            self._first = [run for run in self._first if run.size]
        while self.num > most:
            run = self._first[-1] if self._first else self._row[self._at]
            excess = self.num - most
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
        line.shrink(self._runs, line.max_ghosts)

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
        self._queue: Queue | None = None  # of waiting requests, for policies that heed them
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
            self._leave(node, state.pieces[-1])

    def unleased(self, node: Handle) -> None:
        state = self._states[node]
        state.evictable = True
        self._num_evictable += 1
        for piece in state.pieces:
            piece.is_new = False
            self.ended(piece)
        if not state.num_children:
            self._enter(node, state)

    def trimmed(self, node: Handle, num_blocks: int) -> None:
        state = self._states[node]
        piece = state.pieces[-1]
        anew = self.ranks_by_depth or num_blocks >= piece.num_blocks
        if anew:
            self._leave(node, piece)
        self._cut(state, piece, num_blocks)
        if anew and state.pieces[-1].num_blocks:
            self._enter(node, state)

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
                self._enter(state.parent, above)

    def _cleared(self, node: Handle, state: State[P]) -> None:
        """The node is removed without an eviction, so nothing is remembered."""
        if not state.num_children:
            self._leave(node, state.pieces[-1])
        for piece in state.pieces:
            size, piece.num_blocks = piece.num_blocks, 0
            self.lost(piece, size)

    def most(self, node: Handle) -> int:
        most = self._states[node].pieces[-1].num_blocks
        if self._queue is None:
            return most
        free = self.num_blocks(node) - self._queue.covered(node)
        return min(most, free) if free > 0 else most

    def __len__(self) -> int:
        return self._num_evictable

    # --- waiting requests: leaves that they need are in the queue, the others in the subclass's order

    def _enter(self, node: Handle, state: State[P]) -> None:
        queue = self._queue
        if queue is not None and queue.covered(node) >= self.num_blocks(node):
            queue.enter(node)
        else:
            self.entered(node, state.pieces[-1], state.depth)

    def _leave(self, node: Handle, piece: P) -> None:
        if self._queue is None or not self._queue.leave(node):
            self.left(node, piece)

    def wait(self, request: Handle, node: Handle | None, num_blocks: int, missing: float) -> None:
        """Heed a waiting request. For ``announced`` of a subclass whose ``victim`` asks ``pick``."""
        if self._queue is None:
            self._queue = Queue()
        was = self._queue.announced(request, node, num_blocks, missing)
        self._enter_again(was)
        if node != was:
            self._enter_again(node)

    def wait_no_longer(self, request: Handle) -> None:
        """Forget a waiting request. For ``withdrawn``."""
        if self._queue is not None:
            self._enter_again(self._queue.withdrawn(request))

    def _enter_again(self, node: Handle | None) -> None:
        state = None if node is None else self._states.get(node)
        if node is not None and state is not None and state.evictable and not state.num_children:
            self._leave(node, state.pieces[-1])
            self._enter(node, state)

    def pick(self, idle: Handle | None) -> Handle | None:
        """The victim: ``idle``, the first of the subclass's order, unless waiting requests change that."""
        queue = self._queue
        if queue is None:
            return idle
        cold = queue.first()
        if cold is not None:
            return cold
        return queue.last() if idle is None else idle

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
