"""Facts: what is known of a request, gathered while it runs, for policies that predict from it whether it returns.

One object a request, shared by all pieces that it used last. ``opened`` makes it; the pieces that its computed
blocks become add what ghosts remember (``found``, ``computed``). By the time that anything of it is evictable it is
complete.

A request *continues* an earlier one if the deepest blocks that were seen before, resident or ghosts, are the last of
that one; then its turn is one more. Otherwise it opens a conversation, whatever it shares with others. Where both are
labelled with a session, the turn goes by that: an answer that was rewritten doesn't end it, nor does an equal beginning
make two of them one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Final

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.hints import Label, RequestHints

LABELS: Final = ("type", "turn", "session", "session_over", "tool_pending")
"""Labels that policies look at."""

_NO_LABELS: Final[dict[str, Label]] = {}


@mypyc_attr(acyclic=True)
class Facts:
    """A request. ``end``: blocks so far. ``num_new``: those nobody had sent before. ``turn``: from 1.
    ``superseded``: the conversation went on, but not from its end. ``groups``: for a policy to note what it makes of
    them. In no cycle: it holds no node.
    """

    __slots__ = ("_slack", "end", "gap_s", "groups", "labels", "num_new", "number", "superseded")

    def __init__(self, labels: dict[str, Label], slack: int) -> None:
        self.labels, self._slack = labels, slack
        self.end, self.num_new, self.number, self.gap_s = 0, 0, 1, 0.0
        self.groups: dict[int, object] = {}
        self.superseded = False

    def found(self, end: int, earlier: Facts, gap_s: float) -> None:
        """Blocks up to ``end`` were last used by ``earlier``, ``gap_s`` ago; told shallowest first."""
        self.end = max(self.end, end)
        is_its_end = earlier is not self and earlier.end - end <= self._slack
        self.gap_s = gap_s if is_its_end else 0.0
        self.number = earlier.number + 1 if self._continues(earlier, is_its_end) else 1

    def _continues(self, earlier: Facts, is_its_end: bool) -> bool:
        if self.labels and earlier.labels and earlier is not self:
            ours, theirs = self.labels.get("session"), earlier.labels.get("session")
            if ours is not None and theirs is not None:
                return ours == theirs
        return is_its_end

    def supersedes(self, earlier: Facts, depth: int, num_uses: int) -> bool:
        """Whether this request goes on where the conversation of ``earlier`` was before it: an answer was asked for
        again, or a question put in other words. They part at ``depth``, behind blocks that were used ``num_uses``
        times by then: no oftener than that conversation has turns, so by nobody else.

        Where a request says its session, that tells better.
        """
        if earlier is self or "session" in self.labels:
            return False
        return earlier.end - depth > self._slack and num_uses <= earlier.number

    def computed(self, num_blocks: int, end: int) -> None:
        """New blocks, up to ``end``."""
        self.num_new += num_blocks
        self.end = max(self.end, end)

    @property
    def turn(self) -> int:
        """The number of the turn, as labelled or as seen."""
        turn = self.labels.get("turn") if self.labels else None
        return turn if isinstance(turn, int) else self.number


def places_in_blocks(tokens: Sequence[int], block_tokens: float) -> list[int]:
    """Numbers of tokens as whole blocks: a number of blocks is above one if its tokens are above the other."""
    return [floor(each / block_tokens) for each in tokens]


def labels_of(hints: object) -> dict[str, Label]:
    """Those labels of a request's hints that are looked at. Ghosts keep them, so no others."""
    if hints is None or not isinstance(hints, RequestHints) or not hints.labels:
        return _NO_LABELS
    labels = hints.labels
    return {name: labels[name] for name in LABELS if name in labels}
