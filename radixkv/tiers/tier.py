"""The protocol of a tier, and what it tells those who run it.

    HostTier    takes the cache's blocks, and gives them back into blocks
    DiskTier    takes what host memory has, as bytes, and gives bytes back
    others      take and give bytes too: docs/concepts/ladder.md has one of 60 lines

``Ladder`` moves blocks between them, from the top to the bottom and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar

from radixkv.tiers.disk.durations import Durations

if TYPE_CHECKING:
    from radixkv.config import Namespace, Tenant
    from radixkv.index.below import Scope
    from radixkv.tiers.disk.io_threads import Job
    from radixkv.tiers.pending import Pending


def may_lie_below(settings: Tenant | None) -> bool:
    """Whether a tenant's blocks may lie below host memory. Those of strict tenants may not.

    How long a disk takes to read, to store or to forget would tell them of others' traffic.
    """
    return settings is None or settings.mode != "strict"


Source = TypeVar("Source", contravariant=True)
Into = TypeVar("Into", contravariant=True)
Records: TypeAlias = "Iterable[tuple[int, memoryview]]"
"""Blocks of a prompt and their bytes, which are read when the iterable is, and valid until its next step."""


class Offer(NamedTuple):
    """Blocks ``[first, stop)`` of a prompt, which the tier above has. ``key``: the prompt's ids as uint32 bytes, up to
    block ``stop`` at least. ``generation``: the tenant's in the tier above, when they were computed.
    """

    namespace: Namespace
    generation: int
    key: bytes
    first: int
    stop: int

    @property
    def num_blocks(self) -> int:
        """How many blocks these are."""
        return self.stop - self.first


class Tier(Protocol[Source, Into]):
    """A place for evicted KV, in blocks of equally many tokens. Any thread may ask it; none of its calls raises.

    ``Source``: how it gets blocks: the ids of the cache's blocks, or ``Records``. ``Into``: where it writes them: a
    function that fills blocks, or a block's memory.

    A tier finds a block only under the namespace and the ids, all of them from the first on, under which it got it. It
    evicts what it wants when it needs room.
    """

    def offer(self, offer: Offer, source: Source) -> None:
        """Take blocks of a tenant, as many as it has room and time for, or none. Never waits."""

    def find(self, namespace: Namespace, key: bytes, first: int) -> int:
        """Return how many blocks of a prompt in a row, from block ``first`` on, it has. A hint: ``read`` decides."""

    def read(
        self, namespace: Namespace, key: bytes, block: int, into: Into, *, begun: list[Job] | None = None
    ) -> Job | None:
        """Begin to read a block into memory. The job's result says whether all of it is there, and is right.

        ``begun``: gets the job before it may touch the memory. That is the job's until it has ended or is cancelled.
        None: it has no time, or not the block. Never waits.
        """

    def forget(self, scope: Scope) -> Pending:
        """Serve nothing of a scope any more, from now on and also after a restart. Returns what is still to destroy.

        The tier goes on until that is done, and is asked to try again: see ``pending.Forgetful``. Never waits. Called
        before the tiers above forget, and once more after.
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait until what was offered is kept or given up. Returns whether that is so."""

    def counts(self) -> Mapping[str, float]:
        """Return counts, by the names of ``Ladder.counts``; those that it leaves out are 0."""

    def close(self) -> None:
        """End. Nothing is offered, found or read any more."""


@dataclass(frozen=True, slots=True)
class TierDetails:
    """What happened in a tier, by reasons and by durations. All grow, also while they are read.

    - ``state``: "open"; why it serves nothing now (``TierState``, "unusable", "off"); or "resting".
    - ``age_s``: seconds since it was opened. ``block_bytes``, ``block_tokens``: of a block.
    - ``num_found``: records that were there when it was opened. ``num_foreign``: those of them that are of another
      identity, and can't be read. ``num_returned``: requests for a record that had been evicted (``disk.slots``).
    - ``timeouts``: loads that ended early, because the tier was slower than computing.
    - ``missed``: loads of records that found nothing, by reason. ``unstored``: the same of stores.
    - ``loads``: how long requests' loads took, from begin to end, also those that found nothing.
    - ``operations``: how long the tier's medium took, by operation.
    """

    loads: Durations
    missed: Mapping[str, int] = field(default_factory=dict)
    unstored: Mapping[str, int] = field(default_factory=dict)
    operations: Mapping[str, Durations] = field(default_factory=dict)
    state: str = "open"
    age_s: float = 0.0
    block_bytes: int = 0
    block_tokens: int = 0
    num_found: int = 0
    num_foreign: int = 0
    num_returned: int = 0
    timeouts: int = 0
