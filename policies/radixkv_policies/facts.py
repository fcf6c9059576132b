"""Facts: what is known of a request, gathered while it runs, for policies that predict from it whether it returns.

One object a request, shared by all pieces that it used last. ``opened`` makes it; the pieces that its computed
blocks become add what ghosts remember (``found``, ``computed``). By the time that anything of it is evictable it is
complete.

A request *continues* an earlier one if the deepest blocks that were seen before, resident or ghosts, are the last of
that one; then its turn is one more. Otherwise it opens a conversation, whatever it shares with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.hints import Label, RequestHints


@mypyc_attr(acyclic=True)
class Facts:
    """A request. ``end``: blocks so far. ``num_new``: those nobody had sent before. ``turn``: from 1.
    ``groups``: for a policy to note what it makes of them.
    """

    __slots__ = ("_seen", "_slack", "end", "gap_s", "groups", "labels", "num_new", "number")

    def __init__(self, labels: dict[str, Label], slack: int) -> None:
        self.labels, self._slack = labels, slack
        self.end, self.num_new, self.number, self.gap_s = 0, 0, 1, 0.0
        self._seen = 0
        self.groups: dict[int, object] = {}

    def found(self, end: int, earlier: Facts, gap_s: float) -> None:
        """Blocks up to ``end`` were last used by ``earlier``, ``gap_s`` ago; told shallowest first."""
        self._seen, self.end = end, max(self.end, end)
        continues = earlier is not self and earlier.end - end <= self._slack
        self.number = earlier.number + 1 if continues else 1
        self.gap_s = gap_s if continues else 0.0

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
    """The labels of a request's hints, if it has any."""
    return dict(hints.labels) if isinstance(hints, RequestHints) else {}
