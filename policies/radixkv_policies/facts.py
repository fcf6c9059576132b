"""Facts: properties of a request, collected while it runs, for policies that predict whether its blocks return.

All pieces that a request used last share one object. ``opened`` creates it. The pieces of its computed blocks add the
memories of ghosts (``found``, ``computed``). It is complete before any of its blocks are evictable.

A request *continues* an earlier one if its deepest known blocks, resident or ghosts, are the last blocks of that one.
Its turn is then one higher. Otherwise it starts a conversation, even if it shares blocks with others. If both have a
session label, the session decides the turn. So a rewritten answer doesn't end a session, and an equal beginning
doesn't join two.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf, log
from typing import Final

from radixkv_policies._mypyc import mypyc_attr
from radixkv_policies.hints import Label, RequestHints

LABELS: Final = ("type", "turn", "session", "session_over", "tool_pending", "expected_gap_s")
"""Labels that policies use."""

PACE: Final = 0.3
"""The weight of a conversation's last pause among its pauses."""

OTHERS: Final = 2
"""The pauses of all conversations weigh as much as this many of its own."""

SHORTEST_PAUSE_S: Final = 0.1

_NO_LABELS: Final[dict[str, Label]] = {}


class Pauses:
    """The past pauses of a conversation: the mean of their logarithms, after a tool's call and otherwise.

    ``logs``, ``nums``: mean and number of each kind.
    """

    __slots__ = ("logs", "nums")

    def __init__(self, logs: tuple[float, float] = (0.0, 0.0), nums: tuple[int, int] = (0, 0)) -> None:
        self.logs, self.nums = logs, nums

    def after(self, pause_s: float, is_pending: bool) -> Pauses:
        """Return the pauses with one more."""
        new = log(max(pause_s, SHORTEST_PAUSE_S))
        (plain, pending), (num_plain, num_pending) = self.logs, self.nums
        if is_pending:
            pending += (new - pending) * (PACE if num_pending else 1.0)
            return Pauses((plain, pending), (num_plain, num_pending + 1))
        plain += (new - plain) * (PACE if num_plain else 1.0)
        return Pauses((plain, pending), (num_plain + 1, num_pending))

    def typical(self, is_pending: bool, all_log: float) -> float:
        """The logarithm of the next pause, from its own pauses and those of all."""
        kind = 1 if is_pending else 0
        num = self.nums[kind]
        return (num * self.logs[kind] + OTHERS * all_log) / (num + OTHERS)


@mypyc_attr(acyclic=True)
class Facts:
    """Facts about one request.

    ``end``: blocks so far. ``num_new``: blocks that no request had before. ``turn``: from 1. ``superseded``: the
    conversation continued, but not from its end. ``groups``: for a policy's own classes. It holds no node, so it is
    in no reference cycle.
    """

    __slots__ = ("_slack", "end", "gap_s", "groups", "labels", "num_new", "number", "pauses", "superseded")

    def __init__(self, labels: dict[str, Label], slack: int) -> None:
        self.labels, self._slack = labels, slack
        self.end, self.num_new, self.number, self.gap_s = 0, 0, 1, 0.0
        self.pauses = Pauses()
        self.groups: dict[int, object] = {}
        self.superseded = False

    def found(self, end: int, earlier: Facts, gap_s: float) -> None:
        """Add blocks up to ``end`` that ``earlier`` used last, ``gap_s`` ago. Add the shallowest blocks first."""
        self.end = max(self.end, end)
        is_its_end = earlier is not self and earlier.end - end <= self._slack
        self.gap_s = gap_s if is_its_end else 0.0
        continues = self._continues(earlier, is_its_end)
        self.number = earlier.number + 1 if continues else 1
        if earlier is not self:
            self.pauses = earlier.pauses.after(gap_s, earlier.is_pending) if continues else Pauses()

    @property
    def is_pending(self) -> bool:
        """Whether a tool's answer continues the conversation, by its label."""
        return bool(self.labels) and bool(self.labels.get("tool_pending"))

    def note(self, labels: dict[str, Label]) -> bool:
        """Add labels that became known later. Returns whether that changes anything."""
        updated = {**self.labels, **labels}
        if updated == self.labels:
            return False
        self.labels = updated
        self.groups.clear()
        return True

    @property
    def expected_log(self) -> float | None:
        """The logarithm of the expected pause after it, by its label."""
        gap_s = self.labels.get("expected_gap_s") if self.labels else None
        return log(gap_s) if isinstance(gap_s, (int, float)) and 0.0 < gap_s < inf else None

    def _continues(self, earlier: Facts, is_its_end: bool) -> bool:
        if self.labels and earlier.labels and earlier is not self:
            ours, theirs = self.labels.get("session"), earlier.labels.get("session")
            if ours is not None and theirs is not None:
                return ours == theirs
        return is_its_end

    def supersedes(self, earlier: Facts, depth: int, num_uses: int) -> bool:
        """Whether this request continues the conversation of ``earlier`` from before its end.

        Examples: an answer was requested again, or a question rephrased. The two differ after ``depth``. The last
        shared blocks had ``num_uses`` uses before. If that is at most the number of turns, no other conversation used
        them. A session label overrides this.
        """
        if earlier is self or "session" in self.labels:
            return False
        return earlier.end - depth > self._slack and num_uses <= earlier.number

    def computed(self, num_blocks: int, end: int) -> None:
        """Add new blocks, up to ``end``."""
        self.num_new += num_blocks
        self.end = max(self.end, end)

    @property
    def turn(self) -> int:
        """The number of the turn: the label's, or the detected one."""
        turn = self.labels.get("turn") if self.labels else None
        return turn if isinstance(turn, int) else self.number


def places_in_blocks(tokens: Sequence[int], block_tokens: float) -> list[int]:
    """Convert limits in tokens to whole blocks. A number of blocks exceeds a limit if its tokens exceed it."""
    return [floor(each / block_tokens) for each in tokens]


def labels_of(hints: object) -> dict[str, Label]:
    """The labels of a request's hints that policies use. Ghosts keep them, so others are left out."""
    if hints is None or not isinstance(hints, RequestHints) or not hints.labels:
        return _NO_LABELS
    labels = hints.labels
    return {name: labels[name] for name in LABELS if name in labels}
