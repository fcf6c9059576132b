"""What a metadata store does for replicas: the operations, each of them atomic, and the types they answer with.

``memory.MemoryStore`` is the specification; ``redis.RedisStore`` is compared with it operation by operation.

    a replica's own facts     boot, beat, append, snapshot, leave         refused unless (epoch, nonce) are the last
    reading                   fetch, read, load
    a tenant                  set_limit, reserve, raise_generation, announce, confirm, tenant, look_at, purges
    a warm job                save_job, own_job, add_part, save_part, drop_job, load_job
    pins of a tenant          keep_pin, end_pin, state_pin, pins

Every operation but ``fetch`` and ``read`` concerns one replica, one tenant or one job, so that a store can
place these anywhere. Each may raise StoreUnavailable; then it isn't known whether it happened. All writes
may be repeated: what was done already is done once, or answered by a verdict (``GAP``) that says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from radixkv.coordination.store.wire import (
    NEVER,
    NO_LIMIT,
    NOTHING,
    Confirmed,
    Entry,
    Groups,
    Limit,
    Raised,
    Registration,
)
from radixkv.coordination.values import MAX_FLEET_PINS, FleetPin, JobPart, Load, WarmJob, Writer

if TYPE_CHECKING:
    from radixkv.coordination.store.holdings import Holdings

JOB_TTL_S = 3600.0
LISTED_S = 3600.0
"""A replica that is gone is listed, as not live, for this long."""
MAX_REPLICAS = 1024
MAX_PARTS = 1024
MAX_JOBS = 4096
"""Warm jobs that are kept at a time; beyond it the oldest is forgotten."""
MAX_PINS = MAX_FLEET_PINS
"""Pins of the fleet that a tenant may have; of those that were ended as many are kept, the longest."""
MAX_CONFIRMED = 4 * MAX_REPLICAS
"""What a tenant's purge may keep of replicas; beyond it those that aren't listed any more are forgotten."""
MAX_PURGES = 65_536
"""Raised generations that are announced. Who boots later than so many purges misses hints of the oldest."""
ENTRIES_A_READ = 512

Verdict = Literal["OK", "GAP", "LOST", "FENCED"]


class WriteResult(NamedTuple):
    """The answer to a write, and the last sequence number of the log after it.

    ``GAP``: the log isn't where the writer thinks. ``LOST``: the store knows no registration, or an older
    one only. ``FENCED``: a younger one has the id. Nothing was written unless ``OK``; ``last_seq`` is 0 for
    LOST and FENCED.
    """

    verdict: Verdict
    last_seq: int


class Seen(NamedTuple):
    """A registration as read: the seconds that its lease still runs, and its load."""

    registration: Registration
    remaining_s: float
    load: Load


class Fetched(NamedTuple):
    """Registrations as read, and the ids of those that could not be: the shard they stand on is away."""

    seen: list[Seen]
    unread: list[str]


class Logged(NamedTuple):
    """One position of a log; ``entry`` is None where it has not the form of this version."""

    epoch: int
    seq: int
    entry: Entry | None


class SavedSnapshot(NamedTuple):
    """All that a replica held at number ``seq`` of its log: reading goes on behind it."""

    epoch: int
    seq: int
    groups: Groups


class Share(NamedTuple):
    """Absolute blocks, in the blocks of ``fingerprint``, that one registration holds of a tenant's quota."""

    replica_id: str
    epoch: int
    nonce: str
    fingerprint: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to ``reserve``: ``blocks`` may be used until the share is stated again or runs out."""

    verdict: Literal["OK", "FENCED", "STALE"]
    """STALE: another limit stands in the store than the one that was given."""
    blocks: int
    """0 unless OK."""
    others: int
    """Blocks that the other replicas hold, of the same fingerprint."""
    limit: int | None


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """What the store says of a tenant: ``confirmed`` has what was confirmed of ``raised``, by replica.

    Nothing of it is proven. ``standing``: see ``Looked``.
    """

    limit: int | None = None
    raised: Raised = NEVER
    shares: tuple[Share, ...] = ()
    confirmed: Mapping[str, Confirmed] = field(default_factory=dict)
    standing: bytes = NOTHING

    @property
    def generation(self) -> int:
        """Its number."""
        return self.raised.generation


class Looked(NamedTuple):
    """What each replica looks at of each tenant, again and again."""

    raised: Raised = NEVER
    """The last raise of its generation, whoever wrote it; ``NEVER`` also if it has not this version's form."""
    confirmed: Confirmed = Confirmed()
    """What the replica that asks has confirmed that with."""
    limit: Limit = NO_LIMIT
    """The last limit that was stated, whoever stated it."""
    standing: bytes = NOTHING
    """What stands in the place of a raise, whatever that is: ``raise_generation`` replaces that and nothing else."""


class Durable(NamedTuple):
    """A write that must not be lost. ``replicated``: a second copy has it; None where there is no second."""

    value: int
    replicated: bool | None


class Store(Protocol):
    """See the module's docstring. Every method may be called from any thread."""

    num_jobs: int
    """Jobs that were kept when one was last saved from here."""

    def boot(self, registration: Registration) -> Durable:
        """Register with an epoch greater than ``registration.epoch`` and all before it; its ``value``.

        Fences the last registration, drops its lease, load and snapshot, and begins the log anew: a
        ``clear`` at number 1. No lease yet: that comes with the first beat. Its ``replaced_ms`` is what is then left
        of the last one's lease, or of those before it, but for leases of the same process.
        """

    def beat(self, registration: Registration, load: Load) -> WriteResult:
        """Extend the lease by ``lease_ms``, state the registration once more, its proof and the load, and be listed.

        Its ``beats`` are more than those of any beat of this registration, be it one that didn't arrive or was
        lost: so no two beats look alike to who reads them before and after the store has lost some.

        Its ``replaced_ms`` is what is left of it, and never grows.

        ``last_seq`` is 0 if the log doesn't begin where the snapshot ends, so that who reads it from there on lacks
        something, and if it has anything behind its last number.
        """

    def append(self, writer: Writer, first_seq: int, entries: Sequence[Entry]) -> WriteResult:
        """Append to the log; GAP unless ``first_seq`` is the next number."""

    def snapshot(
        self, writer: Writer, seq: int, keep_from: int, holdings: Holdings, *, anew: bool
    ) -> WriteResult:
        """Keep ``holdings`` as of number ``seq``, and trim the log before ``keep_from``.

        GAP unless ``seq`` is the last number.

        ``anew``: they take the place of all that was written. The snapshot then stands at a number after
        ``seq`` and the log's last, which nobody has read, and the log holds one empty entry behind it, so
        that every reader meets the gap.
        """

    def leave(self, writer: Writer, proof: str) -> WriteResult:
        """Give the lease back, and be listed no more than a process may serve that had the id before.

        ``proof``: see ``Proofs.of_farewell``.
        """

    def fetch(self, replica_ids: Sequence[str] | None = None) -> Fetched:
        """The registrations of these replicas; by default the listed ones, at most 1,024."""

    def read(self, cursors: Mapping[str, tuple[int, int]], block_s: float = 0.0) -> dict[str, list[Logged]]:
        """What the logs have behind the ``(epoch, seq)`` of each: at most 512 entries of each, in order.

        Waits up to ``block_s`` for news.
        """

    def load(self, replica_id: str, epoch: int, after_seq: int) -> SavedSnapshot | None:
        """The snapshot of that epoch, if there is one behind ``after_seq`` and it is whole."""

    def set_limit(self, tenant: bytes, limit: Limit, expected: int) -> Durable:
        """The tenant's limit over all replicas, if ``expected`` is the stamp of the one that stands; ``value`` 1 if so.

        Of none, or of one without its form, the stamp is 0.
        """

    def reserve(self, tenant: bytes, share: Share, keep_s: float, limit: Limit = NO_LIMIT) -> Grant:
        """State the blocks that a replica wants to hold, absolute; grants what ``limit`` leaves beside the others.

        The grant counts until it is stated again, or ``keep_s`` are over. STALE, and nothing is done, where another
        limit stands, unless no blocks are wanted. FENCED by a share of a greater epoch. A share with the
        same epoch but another nonce blocks new grants until it expires: nobody knows which of the two is the younger.
        A share that would count for longer than the longest lease is dropped: no replica states one.
        """

    def raise_generation(self, tenant: bytes, raised: Raised, standing: bytes) -> Durable:
        """Put a raise in the place of what stands there, and announce it to all; ``value`` 1 if ``standing`` stood.

        Nobody has confirmed it yet.
        """

    def announce(self, tenant: bytes) -> None:
        """Announce once more what stands of the tenant's generation."""

    def confirm(self, tenant: bytes, writer: Writer, raised: Raised, proof: str) -> bool:
        """State that a registration has nothing of before ``raised``; False if that isn't the last one.

        ``proof``: see ``Proofs.of_confirmation``.

        Of a replica's registrations the last to say so counts. Where more than 4,096 replicas have said it, those that
        aren't listed any more are forgotten.
        """

    def tenant(self, tenant: bytes) -> TenantFacts:
        """All that is known; of shares those that count."""

    def look_at(self, tenants: Sequence[bytes], replica_id: str = "") -> list[Looked | None]:
        """What ``replica_id`` is to know of each. None of those that could not be read, as their shard is away."""

    def unannounced(self, positions: Mapping[bytes, int]) -> set[bytes]:
        """Those of these tenants that ``purges(0)`` doesn't have, or only at a position before the one given."""

    def purges(self, after: int) -> list[tuple[bytes, int]]:
        """The tenants whose generation was raised, in this order, each with its position; those behind ``after``.

        All of them if the last one's position is before ``after``: then the store has lost some. At most 65,536.
        """

    def save_job(self, job: WarmJob) -> WarmJob:
        """Keep a new job for an hour, and at most 4,096; what is kept already if the id is known."""

    def own_job(self, job_id: str, owner: Writer, expected: Writer) -> bool:
        """Hand a job from one registration to another, if it is still ``expected`` who owns it."""

    def add_part(self, job_id: str, owner: Writer, part: JobPart) -> bool:
        """Add a part for a replica that has none, or whose part is of another registration; only for the owner.

        Not in the place of one of a greater epoch.
        """

    def save_part(self, job_id: str, part: JobPart) -> bool:
        """Replace the part of that replica; False if there is no such job or part."""

    def drop_job(self, job_id: str) -> None:
        """Forget a job; none is no error."""

    def load_job(self, job_id: str) -> WarmJob | None:
        """The job as stored."""

    def keep_pin(
        self, tenant: bytes, pin: FleetPin, ttl_s: float, *, anew: bool, most: int = MAX_PINS
    ) -> Durable:
        """Keep a pin for ``ttl_s`` from now on; unless ``anew``, only if nothing is kept of it. ``value`` 0: too many.

        Too many: ``most`` others of the tenant's, at most MAX_PINS.
        Its parts stay. 1 also where it was kept already.
        """

    def end_pin(self, tenant: bytes, pin: FleetPin, keep_s: float) -> Durable:
        """End a pin, and keep that until its time is over, ``keep_s`` if nothing is known of it; ``value`` 1 if so.

        Its parts are forgotten. 0 if it was ended before.
        """

    def state_pin(self, tenant: bytes, pin_id: str, part: JobPart) -> bool:
        """Set the part of a replica; False if the pin isn't there, or the replica has a younger one."""

    def pins(self, tenant: bytes) -> list[FleetPin]:
        """Those whose time isn't over, by id, with their parts by replica."""

    def close(self) -> None:
        """Let go of connections."""
