"""The policies that evict the newest first keep the contract, and the order of their slow references."""

from __future__ import annotations

from radixkv.clock import ManualClock
from radixkv_policies import Policy
from radixkv_policies.newest import FILO, MRU
from tests.policies.contract import CAPACITY, Block, PolicyContract
from tests.policies.test_classics import InsertedFirst
from tests.policies.test_lru import LastUseEndedFirst


class InsertedLast(InsertedFirst):
    """The block that was inserted last."""

    def key(self, block: Block) -> tuple[float, ...]:
        """The place in the queue, from its end."""
        return (-block.stamp,)


class LastUseEndedLast(LastUseEndedFirst):
    """The block whose last use ended last."""

    def key(self, block: Block) -> tuple[float, ...]:
        """The end of its last use, newest first."""
        return tuple(-each for each in super().key(block))


class TestFILO(PolicyContract):
    """First in, last out."""

    name = "radixkv_policies.newest:FILO"
    reference = InsertedLast

    def make(self, clock: ManualClock | None = None) -> Policy:
        """A new policy."""
        return FILO(CAPACITY, clock or ManualClock(), 7, block_size=2)


class TestMRU(PolicyContract):
    """Most recently used."""

    name = "radixkv_policies.newest:MRU"
    reference = LastUseEndedLast

    def make(self, clock: ManualClock | None = None) -> Policy:
        """A new policy."""
        return MRU(CAPACITY, clock or ManualClock(), 7, block_size=2)
