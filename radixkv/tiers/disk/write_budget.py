"""Chooses what a disk with a write budget takes: prompts of the kinds that come back most often for each byte.

    offered    blocks of a prompt could be written: whether they should be
    can_spend  some of them could be written now: whether the budget has bytes left
    spend      some of them are written now
    asked      a request needs blocks that memory doesn't have: what was offered before has come back

**Kinds.** Blocks are of one kind if they agree in three facts. Has a later prompt used them? Did their prompt begin
with known blocks? How large is their prompt, in powers of two? For each kind the budget learns which
share of what was offered comes back, written or not. The kinds with the largest shares are written, as many as the
bytes allow. If the bytes don't suffice for all of the last kind, every n-th of its prompts is written.

**Points.** A prompt is watched after 1, 2, 3, 4, 6, 8, 12, 16 … blocks. A point stands for the blocks since the one
before. So a prompt costs O(log blocks), and a tenant's memory is bounded.

**Tenants.** Each learns from its own prompts. The tenants that have offered something within ``ACTIVE_S`` get equal
parts of the budget. What one leaves over, everybody may take. So one tenant's flood takes no other's part.

The rule is pure: no I/O, its clock an argument. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

BURST_S: Final = 60.0
"""Seconds of the budget that may be saved up."""
ACTIVE_S: Final = 3_600.0
MAX_TENANTS: Final = 1_024
MAX_POINTS: Final = 16_384
"""Points that are watched for a tenant; the oldest are forgotten first. About 200 bytes each."""
MAX_SIZE: Final = 24
"""The size of all prompts of 2²⁴ blocks and more."""
_PLAN_EVERY: Final = 16
_FEW: Final = 8.0
"""Blocks of a kind, below which it is written, to learn of it."""
_AHEAD: Final = 1.2
"""Part of the income that is planned for while more than half of the burst is saved up."""


class Kind(NamedTuple):
    """What is known of blocks when they could be written. See the module."""

    is_used: bool
    continues: bool
    size: int


class Point(NamedTuple):
    """A prefix of a prompt, by a digest of all its ids and its namespace, and how many blocks it stands for."""

    digest: bytes
    num_blocks: int


def point_positions(first: int, stop: int) -> list[tuple[int, int]]:
    """Return the points in blocks ``(first, stop]`` of a prompt: after how many blocks, and for how many each stands.

    O(log stop).
    """
    found, before, power = [], 0, 1
    while power <= stop:
        for at in (power, power * 3 // 2):
            if before < at <= stop:
                if at > first:
                    found.append((at, at - before))
                before = at
        power *= 2
    return found


def kind_of(*, is_used: bool, continues: bool, num_blocks: int) -> Kind:
    """Return the kind of blocks of a prompt of ``num_blocks`` blocks."""
    return Kind(is_used, continues, min(max(num_blocks, 1).bit_length(), MAX_SIZE))


class _Learned:
    """Of one kind, decayed: blocks that were watched and came back, bytes that were offered, and its share now."""

    __slots__ = ("num_bytes", "returned", "share", "turn", "watched")

    def __init__(self) -> None:
        self.watched = self.returned = self.num_bytes = self.turn = 0.0
        self.share = 1.0

    @property
    def value(self) -> float:
        """The share of its blocks that comes back; 1 of 4 before anything is known."""
        return (self.returned + 0.5) / (self.watched + 2.0)


class _Tenant:
    """One tenant's points, kinds and bytes."""

    def __init__(self) -> None:
        self.points: OrderedDict[bytes, Kind] = OrderedDict()
        self.kinds: dict[Kind, _Learned] = {}
        self.credit = self.income = 0.0
        self.num_offers = self.num_blocks = 0
        self.offered_at = float("-inf")

    def plan(self, half_life_blocks: int, is_rich: bool) -> None:
        """Choose the kinds to write for as many bytes as came in, and let what was learned fade. O(kinds log kinds)."""
        kept = 0.5 ** (self.num_blocks / half_life_blocks)
        self.num_blocks = 0
        left = self.income * (_AHEAD if is_rich else 1.0)
        for each in sorted(self.kinds.values(), key=lambda each: -each.value):
            is_new = each.watched < _FEW
            each.share = 1.0 if is_new else min(max(left, 0.0) / max(each.num_bytes, 1.0), 1.0)
            left -= each.share * each.num_bytes
        self.income *= kept
        for each in self.kinds.values():
            each.watched, each.returned, each.num_bytes = (
                each.watched * kept, each.returned * kept, each.num_bytes * kept,
            )  # fmt: skip


class WriteBudget:
    """Spends ``bytes_per_s`` on what comes back most often. ``num_blocks``: of the disk; a quarter of so many blocks
    offered halves the weight of what was learned. Times are seconds on any clock that doesn't go back. It begins with
    the bytes of a second, so that no number of restarts writes much more.
    """

    def __init__(self, bytes_per_s: float, num_blocks: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._half_life_blocks = max(num_blocks // 4, 256)
        self._most = bytes_per_s * BURST_S
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._common = 0.0
        self._filled_at: float | None = None

    def left_bytes(self, now: float) -> float:
        """Return the bytes that could be written now, by all tenants together. O(tenants)."""
        self._fill(now)
        return max(self._common, 0.0) + sum(max(each.credit, 0.0) for each in self._tenants.values())

    def offered(
        self, tenant: str, kind: Kind, points: Iterable[Point], num_blocks: int, num_bytes: int, now: float
    ) -> bool:
        """Return whether blocks of a prompt should be written; ``points`` are theirs. O(log blocks), amortised."""
        self._fill(now)
        one = self._tenant(tenant, now)
        learned = one.kinds.setdefault(kind, _Learned())
        for point in points:
            learned.watched += point.num_blocks
            one.points[point.digest] = kind
            one.points.move_to_end(point.digest)
        while len(one.points) > MAX_POINTS:
            one.points.popitem(last=False)
        learned.num_bytes += num_bytes
        one.num_offers, one.num_blocks = one.num_offers + 1, one.num_blocks + num_blocks
        if one.num_offers % _PLAN_EVERY == 0:
            one.plan(self._half_life_blocks, one.credit + self._common > self._most / 2)
        learned.turn += learned.share
        if learned.turn < 1.0:
            return False
        learned.turn -= 1.0
        return one.credit + self._common > 0

    def can_spend(self, tenant: str, now: float) -> bool:
        """Return whether there are bytes left for a tenant."""
        self._fill(now)
        return self._tenant(tenant, now).credit + max(self._common, 0.0) > 0

    def spend(self, tenant: str, num_bytes: int, now: float) -> bool:
        """Take bytes off the budget; False if it has none left. The last call before that may overdraw it."""
        if not self.can_spend(tenant, now):
            return False
        one = self._tenant(tenant, now)
        from_common = min(max(num_bytes - max(one.credit, 0.0), 0.0), max(self._common, 0.0))
        self._common -= from_common
        one.credit -= num_bytes - from_common
        return True

    def asked(self, tenant: str, points: Iterable[Point]) -> None:
        """Take that a request needs these points of its prompt, which memory doesn't have."""
        one = self._tenants.get(tenant)
        if one is not None:
            for point in points:
                kind = one.points.get(point.digest)
                if kind is not None:
                    one.kinds[kind].returned += point.num_blocks

    def _tenant(self, name: str, now: float) -> _Tenant:
        one = self._tenants.get(name)
        if one is None:
            while len(self._tenants) >= MAX_TENANTS:
                self._tenants.popitem(last=False)
            one = self._tenants[name] = _Tenant()
        one.offered_at = now
        self._tenants.move_to_end(name)
        return one

    def _fill(self, now: float) -> None:
        """Give each active tenant its part of what came in since. O(tenants), at most once a second."""
        if self._filled_at is None:
            self._filled_at = now - 1.0
        if now - self._filled_at < 1.0:
            return
        income = min((now - self._filled_at) * self.bytes_per_s, self._most)
        self._filled_at = now
        active = [each for each in self._tenants.values() if now - each.offered_at < ACTIVE_S]
        part = income / max(len(active), 1)
        over = income - part * len(active)
        for each in active:
            each.income += part
            credit = each.credit + part
            each.credit = min(credit, self._most / len(active))
            over += credit - each.credit
        self._common = min(self._common + over, self._most)
