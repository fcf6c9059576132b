"""The contract of a metadata store for replicas: atomic operations, and the types of their answers.

``memory.MemoryStore`` is the specification; ``redis.RedisStore`` is compared with it operation by operation.

    a replica's own facts     boot, beat, append, snapshot, leave         refused unless (epoch, nonce) are the last
    reading                   fetch, read, load
    a tenant                  set_limit, reserve, raise_generation, announce, confirm, tenant, look_at, purges, identity
    a warm job                save_job, own_job, add_part, save_part, drop_job, load_job
    pins of a tenant          keep_pin, end_pin, state_pin, pins
    a disk's folder           keep_notes, notes

Every operation except ``fetch`` and ``read`` concerns one replica, one tenant, one job or one folder, so a store can
put these on any shard. Each operation may raise StoreUnavailable; then it is unknown whether it happened. All writes
may be repeated: a second write has no further effect, or gets a verdict (``GAP``) that reports it.
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
"""Most warm jobs kept at a time; beyond it the oldest is forgotten."""
MAX_PINS = MAX_FLEET_PINS
"""Most pins of the fleet that a tenant may have. As many ended pins are kept; those that expire last stay."""
MAX_CONFIRMED = 4 * MAX_REPLICAS
"""Most replicas' confirmations kept of a tenant's purge.

Beyond it, those of replicas that aren't listed are forgotten.
"""
MAX_PURGES = 65_536
"""Most announced raises. A replica that boots after more purges than this gets no hint of the oldest."""
MAX_NOTES = 65_536
"""Most notes kept of a disk's folder; beyond it, no further ones are."""
ENTRIES_A_READ = 512

Verdict = Literal["OK", "GAP", "LOST", "FENCED"]


class WriteResult(NamedTuple):
    """The answer to a write, and the last sequence number of the log after it.

    - ``GAP``: the log doesn't end where the writer expects.
    - ``LOST``: the store has no registration, or only an older one.
    - ``FENCED``: a newer registration has the id.

    Nothing was written unless ``OK``. ``last_seq`` is 0 for LOST and FENCED.
    """

    verdict: Verdict
    last_seq: int


class Seen(NamedTuple):
    """A registration as read: the remaining seconds of its lease, and its load."""

    registration: Registration
    remaining_s: float
    load: Load


class Fetched(NamedTuple):
    """Registrations as read, and the ids of those that could not be read because their shard is unreachable."""

    seen: list[Seen]
    unread: list[str]


class Logged(NamedTuple):
    """One position of a log; ``entry`` is None if the stored entry doesn't have this version's format."""

    epoch: int
    seq: int
    entry: Entry | None


class SavedSnapshot(NamedTuple):
    """All that a replica held at number ``seq`` of its log; reading continues after it."""

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
    """The answer to ``reserve``: ``blocks`` may be used until the share is written again or expires."""

    verdict: Literal["OK", "FENCED", "STALE"]
    """STALE: the store has another limit than the one that was given."""
    blocks: int
    """0 unless OK."""
    others: int
    """Blocks that the other replicas hold, of the same fingerprint."""
    limit: int | None


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """The store's facts about a tenant: ``confirmed`` has the confirmations of ``raised``, by replica.

    None of it is proven. ``standing``: see ``Looked``.
    """

    limit: int | None = None
    raised: Raised = NEVER
    shares: tuple[Share, ...] = ()
    confirmed: Mapping[str, Confirmed] = field(default_factory=dict)
    standing: bytes = NOTHING

    @property
    def generation(self) -> int:
        """The generation's number."""
        return self.raised.generation


class Looked(NamedTuple):
    """The facts of a tenant that each replica reads again and again."""

    raised: Raised = NEVER
    """The last raise of its generation, by any writer; ``NEVER`` also if it doesn't have this version's format."""
    confirmed: Confirmed = Confirmed()
    """The asking replica's confirmation."""
    limit: Limit = NO_LIMIT
    """The last limit that was set, by any replica."""
    standing: bytes = NOTHING
    """The raw record in the raise's place, readable or not: ``raise_generation`` replaces this value only."""


class Durable(NamedTuple):
    """A write that must not be lost. ``replicated``: whether a second copy has it; None if there is no second copy."""

    value: int
    replicated: bool | None


class Store(Protocol):
    """A metadata store; see the module's docstring. Every method may be called from any thread."""

    num_jobs: int
    """Number of jobs that were kept when this object last saved one."""

    def boot(self, registration: Registration) -> Durable:
        """Register with an epoch greater than ``registration.epoch`` and all before it; its ``value``.

        Fences the last registration, drops its lease, load and snapshot, and begins a new log: a ``clear`` at number 1.
        The lease comes with the first beat. Its ``replaced_ms`` is the remaining time of the last registration's lease,
        or of earlier ones; leases of the same process don't count.
        """

    def beat(self, registration: Registration, load: Load) -> WriteResult:
        """Extend the lease by ``lease_ms``, write the registration with its proof and the load again, and list the
        replica.

        Its ``beats`` is greater than in any earlier beat of this registration, also one that didn't arrive or was lost.
        So no two beats look alike to a reader, even if the store lost some between them.

        Its ``replaced_ms`` is the remaining time, and never grows.

        ``last_seq`` is 0 if the log doesn't begin where the snapshot ends, because readers from there on would lack
        entries. It is also 0 if the log has entries after its last number.
        """

    def append(self, writer: Writer, first_seq: int, entries: Sequence[Entry]) -> WriteResult:
        """Append to the log; GAP unless ``first_seq`` is the next number."""

    def snapshot(
        self, writer: Writer, seq: int, keep_from: int, holdings: Holdings, *, anew: bool
    ) -> WriteResult:
        """Keep ``holdings`` as of number ``seq``, and trim the log before ``keep_from``.

        GAP unless ``seq`` is the last number.

        ``anew``: they replace all that was written. The snapshot then gets a number after ``seq`` and after the log's
        last number, which no reader has seen. The log holds one empty entry after it, so that every reader meets the
        gap.
        """

    def leave(self, writer: Writer, proof: str) -> WriteResult:
        """Give the lease back, and end the listing, except while a process that had the id before may serve.

        ``proof``: see ``Proofs.of_farewell``.
        """

    def fetch(self, replica_ids: Sequence[str] | None = None) -> Fetched:
        """Return the registrations of these replicas; by default the listed ones, at most 1,024."""

    def read(self, cursors: Mapping[str, tuple[int, int]], block_s: float = 0.0) -> dict[str, list[Logged]]:
        """Return the entries of each log after its ``(epoch, seq)``: at most 512 entries of each log, in order.

        Waits up to ``block_s`` for new entries.
        """

    def load(self, replica_id: str, epoch: int, after_seq: int) -> SavedSnapshot | None:
        """Return the snapshot of that epoch, if there is one after ``after_seq`` and it is complete."""

    def set_limit(self, tenant: bytes, limit: Limit, expected: int) -> Durable:
        """Set the tenant's limit over all replicas if ``expected`` is the stamp of the present one; ``value`` 1 if
        it was set.

        The stamp of a missing or malformed limit is 0.
        """

    def reserve(self, tenant: bytes, share: Share, keep_s: float, limit: Limit = NO_LIMIT) -> Grant:
        """Request blocks for a replica to hold, as an absolute number.

        Grants what ``limit`` leaves after the other shares.

        The grant counts until the next request, or for ``keep_s``. STALE, and nothing is written, if the store has
        another limit, unless no blocks are requested. FENCED by a share of a greater epoch. A share with the same epoch
        but another nonce blocks new grants until it expires, because it is unknown which of the two is newer. A share
        that would count for longer than the longest lease is dropped: no replica writes one.
        """

    def raise_generation(self, tenant: bytes, raised: Raised, standing: bytes) -> Durable:
        """Replace the stored raise by a new one and announce it to all; ``value`` 1 if ``standing`` was the stored
        value.

        The new raise has no confirmations yet.
        """

    def announce(self, tenant: bytes) -> None:
        """Announce the stored raise of the tenant's generation once more."""

    def confirm(self, tenant: bytes, writer: Writer, raised: Raised, proof: str) -> bool:
        """Confirm that a registration has nothing from before ``raised``; False if that isn't the last raise.

        ``proof``: see ``Proofs.of_confirmation``.

        The last confirmation by any registration of a replica counts. Beyond 4,096 replicas, confirmations of replicas
        that are no longer listed are forgotten.
        """

    def tenant(self, tenant: bytes) -> TenantFacts:
        """Return all facts about the tenant; of shares, those that haven't expired."""

    def look_at(self, tenants: Sequence[bytes], replica_id: str = "") -> list[Looked | None]:
        """Return the facts for ``replica_id`` about each tenant; None for a tenant whose shard is unreachable."""

    def unannounced(self, positions: Mapping[bytes, int]) -> set[bytes]:
        """Return the tenants that ``purges(0)`` doesn't have, or only at an earlier position than the given one."""

    def purges(self, after: int) -> list[tuple[bytes, int]]:
        """Return the tenants whose generation was raised after position ``after``, in order, each with its position.

        Returns all of them if the last position is before ``after``: then the store has lost some. At most 65,536.
        """

    def identity(self) -> str:
        """Return the store's random id, 32 hex digits. A store that lost everything, purges too, has another one."""

    def save_job(self, job: WarmJob) -> WarmJob:
        """Keep a new job for an hour, at most 4,096 jobs; return the stored job if the id is known."""

    def own_job(self, job_id: str, owner: Writer, expected: Writer) -> bool:
        """Hand a job from one registration to another, if ``expected`` still owns it."""

    def add_part(self, job_id: str, owner: Writer, part: JobPart) -> bool:
        """Add a part for a replica that has none, or whose part is of another registration; only for the owner.

        Doesn't replace a part of a greater epoch.
        """

    def save_part(self, job_id: str, part: JobPart) -> bool:
        """Replace the part of that replica; False if there is no such job or part."""

    def drop_job(self, job_id: str) -> None:
        """Forget a job; a missing job is no error."""

    def load_job(self, job_id: str) -> WarmJob | None:
        """Return the job as stored."""

    def keep_pin(
        self, tenant: bytes, pin: FleetPin, ttl_s: float, *, anew: bool, most: int = MAX_PINS
    ) -> Durable:
        """Keep a pin for ``ttl_s`` from now. Unless ``anew``, only if no record of it exists.

        The result's ``value`` is 1 if it is kept, also if it was kept already. It is 0 if the tenant has ``most`` other
        pins, at most MAX_PINS. The pin's parts stay.
        """

    def end_pin(self, tenant: bytes, pin: FleetPin, keep_s: float) -> Durable:
        """End a pin, and keep its end until it would have expired, or ``keep_s`` if it is unknown; ``value`` 1 if so.

        Its parts are forgotten. ``value`` is 0 if it was ended before.
        """

    def state_pin(self, tenant: bytes, pin_id: str, part: JobPart) -> bool:
        """Set the part of a replica; False if the pin doesn't exist, or the replica has a newer part."""

    def pins(self, tenant: bytes) -> list[FleetPin]:
        """Return the pins that haven't expired, by id, with their parts by replica."""

    def keep_notes(self, folder: bytes, notes: Mapping[bytes, bytes]) -> Durable:
        """Keep notes of a disk's folder, by their tags of 16 bytes; ``value`` is how many have no room.

        What they say is known to the folder alone. Each replaces that of the same tag. None expires.
        """

    def notes(self, folder: bytes, tags: Sequence[bytes]) -> list[bytes | None]:
        """Return the notes of a folder with these tags."""

    def close(self) -> None:
        """Close the connections."""
