"""What a coordinator of replicas promises: types and the protocol. Imports no store's client.

    coordinator = connect(url, replica_id="a", fleet_secret=secret, address="http://127.0.0.1:8400",
                          fingerprint=engine.fingerprint, block_size=16, lease_s=10.0)
    cache = PrefixCache(config, journal=coordinator.journal)     # None where nobody could listen
    coordinator.attach(cache)                                    # where a lost journal is rebuilt from
    coordinator.register()              # ConfigError: the fleet differs; a store that is down: see health()
    coordinator.info()                  # ReplicaInfo of this process (.epoch 0 until registered)
    coordinator.health()                # Health: .state, .reason, counters; never touches the store
    coordinator.replicas()              # ReplicaInfo of all that are known, this one first; local, quick
    coordinator.peers()                 # only those a request may be sent to (live, proven, compatible)
    coordinator.hints(ns, token_ids)    # [Hint(replica, num_tokens)], longest first; local, quick
    coordinator.report_load(Load(...))  # goes out with the next beat
    job = coordinator.create_job(ns, num_tokens, ["a", "b"])     # StoreUnavailable
    coordinator.report_job(job.id, "running", 512)               # this replica's part; StoreUnavailable
    coordinator.job(job.id, tenant)     # WarmJob | None (also for another tenant's); StoreUnavailable
    coordinator.leave(); coordinator.close()                     # close() leaves by itself, ends the threads

    headers = sign_request(secret, method="POST", path="/v1/warm", tenant="acme", body=body,
                           audience=peer.audience, timestamp_s=time.time())
    tenant = verifier.verify(request.headers, method="POST", path="/v1/warm", body=body,
                             audience=coordinator.info().audience)     # verifier = RequestVerifier(secret)

Rules that every implementation keeps:

1. A replica is the only writer of its own facts: what it holds, its load, its part of a job.
2. What is known of another replica is a hint. It may be forgotten at any time, and never persistently wrong.
3. A registration has an epoch, greater than all before it of the same id. Entries of an older epoch count
   for nothing, and whoever still writes with one is fenced: StaleEpoch, and nothing more is written. It takes
   its id again if nobody has held a lease of it for two: then a registration had come after its sender was gone.
4. A replica that stops beating leaves every view within its lease. Liveness is compared when it is read.
5. No token id, tenant name or KV byte reaches the store: digests of ``keys.py`` do.
6. An address counts only with the proof of a beat that is no older than its lease and 30 s of skew; a purge and its
   confirmation count only with theirs. A writer to the store without the fleet secret can neither attract requests
   nor purge a tenant nor confirm a purge.

With the store gone everything local goes on; the views of others run out with their leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from radixkv.errors import ArgumentError

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.coordination.purges import Purge
    from radixkv.coordination.store.protocol import Durable, Grant
    from radixkv.coordination.store.wire import Raised
    from radixkv.index.changes import Journal
    from radixkv.index.snapshot import Snapshot
    from radixkv.index.tokens import TokenIds

SEGMENT_TOKENS: Final = 256
"""Tokens a published digest covers. A block size must divide it, so that a segment ends at a block's end."""

WIRE_VERSION = 5
"""Version of keys, entries and snapshots in the store. Replicas that differ don't share a fleet."""

MAX_CLOCK_SKEW_S: Final = 30.0
"""How far the wall clocks of two replicas may be apart: beats that are older than their lease and this count for
nothing, and so do those from further ahead."""

State = Literal["new", "ok", "unavailable", "refused", "fenced", "left", "failed"]
"""Standing of a coordinator.

``new``: not registered yet · ``ok`` · ``unavailable``: the store can't be reached, retried with backoff ·
``refused``: the fleet in the store differs from this replica · ``fenced``: a younger process has this id ·
``left``: by its own will · ``failed``: a thread ended by a bug of ours.
"""

JobState = Literal["queued", "running", "done", "failed", "lost"]
"""Standing of one replica's part of a warm job. ``lost`` is only ever read: the replica died or restarted."""

JOB_STATES: frozenset[str] = frozenset({"queued", "running", "done", "failed"})


class Writer(NamedTuple):
    """One registration, as it signs its writes.

    The nonce tells apart those that a store which lost one of them, and whose clock went back, has given one epoch.
    """

    replica_id: str
    epoch: int
    nonce: str

    @property
    def audience(self) -> str:
        """Whom a signed request is for: this registration, and no other process."""
        return f"{self.replica_id}@{self.epoch}.{self.nonce}"


NOBODY = Writer("", 0, "")
"""The owner of a job that was given up: no further replica will be asked."""


MAX_AMOUNT = 10**15 - 1
"""15 digits: what a store keeps of a number, and a reader takes for one."""
MAX_FLEET_PINS: Final = 256
"""Pins of the fleet that a tenant may have."""


def check_amount(name: str, value: object) -> None:
    """Raises ArgumentError unless it is an integer, ≥ 0, that every store can keep."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= MAX_AMOUNT:
        raise ArgumentError(name, value, f"an integer from 0 to {MAX_AMOUNT}")


@dataclass(frozen=True, slots=True)
class Load:
    """What routing costs need to know of a replica; absolute values, sent with each beat."""

    queued_prefill_tokens: int = 0
    decode_blocks: int = 0
    resident_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("queued_prefill_tokens", "decode_blocks", "resident_blocks"):
            check_amount(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One registration, as seen by the replica that was asked, at that moment."""

    id: str
    epoch: int
    """Fencing number of the registration; 0 before the first one."""
    address: str | None
    """Base URL of its HTTP service, or None if it has none. Send nothing there unless ``reachable``."""
    fingerprint: str
    """Model fingerprint; only replicas with the same one can warm the same prefix."""
    block_size: int
    wire_version: int
    live: bool
    """Its lease had not run out when this was read."""
    last_seq: int
    """Sequence number of the last entry in its log that the reader knows of."""
    lease_remaining_s: float
    proven: bool
    """Its last beat is signed with the fleet secret, address included, and no older than its lease and the skew."""
    incompatible: str | None = None
    """Why it can't share a fleet with the reader (another secret, block size or wire version), or None."""
    is_self: bool = False
    load: Load = field(default_factory=Load)
    nonce: str = ""
    """Of the registration, which it names together with the epoch; empty until registered."""

    @property
    def reachable(self) -> bool:
        """A request may be sent to ``address``."""
        return self.live and self.proven and self.incompatible is None and self.address is not None

    @property
    def audience(self) -> str:
        """Whom a signed request is for: this registration, and no other process."""
        return self.writer.audience

    @property
    def writer(self) -> Writer:
        """The registration."""
        return Writer(self.id, self.epoch, self.nonce)


@dataclass(frozen=True, slots=True)
class Hint:
    """``replica`` probably holds the first ``num_tokens`` tokens of the prefix that was asked about."""

    replica: ReplicaInfo
    num_tokens: int


@dataclass(frozen=True, slots=True)
class JobPart:
    """One replica's part of a warm job."""

    replica_id: str
    epoch: int
    nonce: str
    """With the epoch: the registration that owns this part."""
    state: JobState
    num_tokens_done: int = 0
    error: str = ""
    """A short code (``[a-z_]``), never a text that could carry a prompt or a name."""
    num_tokens_cached: int = 0
    """Of those done, how many were resident before."""
    ms: int = 0
    """Milliseconds it took."""

    @property
    def writer(self) -> Writer:
        """The registration that owns this part."""
        return Writer(self.replica_id, self.epoch, self.nonce)

    @property
    def is_open(self) -> bool:
        """Queued or running."""
        return self.state in ("queued", "running")


@dataclass(frozen=True, slots=True)
class WarmJob:
    """A warm job of several replicas. Holds no ids and no names."""

    id: str
    tenant_digest: bytes
    namespace_digest: bytes
    num_tokens: int
    parts: tuple[JobPart, ...]
    owner: Writer = NOBODY
    """The registration that sees to it; another takes over when its lease is over."""
    num_wanted: int = 0
    """How many replicas are to hold the prefix in the end; a part that is lost or failed can be replaced."""
    num_left_out: int = 0
    """Tokens of the prompt that are not warmed, as they fill no block."""
    request: str = ""
    """A keyed digest of what was asked, so that one id can't stand for two requests."""

    @property
    def is_over(self) -> bool:
        """Nothing of it is queued or running."""
        return not any(part.is_open for part in self.parts)

    @property
    def is_ended(self) -> bool:
        """Nothing of it is queued or running, and nobody will be asked any more."""
        return self.is_over and (not self.num_missing or self.owner == NOBODY)

    @property
    def num_missing(self) -> int:
        """How many replicas more must be asked so that ``num_wanted`` can come to hold it."""
        hopeful = sum(part.state in ("queued", "running", "done") for part in self.parts)
        return max(0, self.num_wanted - hopeful)


@dataclass(frozen=True, slots=True)
class FleetPin:
    """A prefix of a tenant's that several replicas keep resident for a time. Holds no ids and no names."""

    id: str
    namespace_digest: bytes
    """See ``Coordinator.pin_digest``: the pin ends with the purge that follows."""
    num_tokens: int
    wanted: str
    """Where: ``all``, how many, or ``=a,b``: these, by name."""
    remaining_s: float = 0.0
    is_ended: bool = False
    """It was ended before its time, and is kept so that every replica hears of it."""
    parts: tuple[JobPart, ...] = ()
    """What each replica says: ``done`` where it is pinned."""


@dataclass(frozen=True, slots=True)
class Health:
    """Standing and counters of a coordinator since it was made."""

    state: State
    reason: str = ""
    epoch: int = 0
    last_seq: int = 0
    num_live_peers: int = 0
    num_queued: int = 0
    """Journal records not yet digested."""
    num_overflows: int = 0
    """Times the journal's queue was full, so that what this replica holds was published anew."""
    num_published: int = 0
    """Entries written to the log."""
    num_snapshots: int = 0
    num_outages: int = 0
    """Times the store was lost after it had been reached."""
    num_script_reloads: int = 0
    num_mirror_digests: int = 0
    """Segments that this replica holds."""
    num_view_digests: int = 0
    """Segments that the others hold, as far as the view's budget goes."""
    num_view_gaps: int = 0
    """Times a log had a gap that a snapshot had to heal."""
    num_view_forgotten: int = 0
    """Segments left out of the view because its budget was spent."""
    num_unreplicated: int = 0
    """Writes that must not be lost (epoch, limit, generation) that no second copy of the store confirmed in time."""
    num_jobs: int = 0
    """Warm jobs that the store kept when this replica last made one; at most 4,096."""
    queue_bytes: int = 0
    """What the journal's queue takes, roughly; at most ``queue_bytes`` of the settings."""
    mirror_bytes: int = 0
    """What this replica remembers of what it published, roughly: it holds one digest for 256 resident tokens."""
    log_bytes: int = 0
    """What this replica's log takes in the store, roughly; at most about two snapshots."""
    snapshot_bytes: int = 0
    """What its snapshot takes in the store; at most 64 MiB."""
    view_bytes: int = 0
    """What the view of the others takes, roughly; at most ``view_digests`` of the settings."""
    tenant_bytes: int = 0
    """What shares, limits and generations of tenants take, roughly; at most some 45 MB."""
    namespace_bytes: int = 0
    """What keys and generations of the namespaces that this replica publishes take, roughly; at most some 60 MB, or
    as much as its resident namespaces need."""

    @property
    def is_ok(self) -> bool:
        """Registered, beating, and heard by the others."""
        return self.state == "ok"


class Resident(Protocol):
    """What a lost journal is rebuilt from: a PrefixCache."""

    def snapshot(self) -> Snapshot:
        """All that is resident, at one moment."""

    def tenants(self) -> Iterable[str]:
        """All that have something, or may come to have something of what runs now."""


class Coordinator(Protocol):
    """See the module's docstring. Every method may be called from any thread.

    Each raises ArgumentError, and changes nothing, for an argument of another type or range; a job or a pin of an id
    that none can have is one that isn't there.
    """

    @property
    def replica_id(self) -> str:
        """The name that this replica registers with."""

    @property
    def journal(self) -> Journal | None:
        """What the cache reports its changes to; None where no other replica could ever read them."""

    def attach(self, resident: Resident, on_purge: Callable[[str, int], None] | None = None) -> None:
        """Say where to rebuild from when the journal has overflowed. Without it the others only forget.

        ``on_purge(tenant, generation)`` is called when the fleet purges a tenant that was met here: it returns
        when nothing of the tenant can be matched any more. Without it such a purge is never confirmed.
        """

    def register(self, address: str | None = None) -> ReplicaInfo:
        """Take the id with a new epoch, start beating and publishing. ``address`` replaces the setting.

        Raises ConfigError if a live replica of the fleet has another secret, block size or wire version,
        StaleEpoch if another process took the id at the same moment.
        A store that can't be reached is no error: ``health().state`` is ``"unavailable"``, and the
        registration is tried again in the background.
        """

    def beat(self) -> None:
        """Extend the lease now. Raises StaleEpoch if fenced, StoreUnavailable if the store is gone.

        A store that has forgotten this replica is registered with anew. Raises ConfigError then, as ``register`` does.
        """

    def publish(self) -> None:
        """Write what the journal has queued, now. Raises what ``beat`` does."""

    def leave(self) -> None:
        """Give the lease back, so that the others forget this replica at once. A lost store is no error."""

    def close(self) -> None:
        """Leave, end the threads and the connections. Idempotent."""

    def health(self) -> Health:
        """Standing and counters; local."""

    def info(self) -> ReplicaInfo:
        """This replica; local."""

    def replicas(self) -> list[ReplicaInfo]:
        """All that are known, this one first, then by id; local. O(replicas)."""

    def peers(self) -> list[ReplicaInfo]:
        """The others that are ``reachable``, by id; local. O(replicas)."""

    def hints(self, namespace: Namespace, token_ids: TokenIds) -> list[Hint]:
        """Which reachable others hold how much of the prefix: longest first, then by id; local.

        Counts whole segments of ``SEGMENT_TOKENS`` tokens; those that hold none are left out.
        O(segments × replicas), and a digest a segment.
        """

    def report_load(self, load: Load) -> None:
        """State the load that the next beat carries. Raises ArgumentError."""

    def create_job(
        self,
        namespace: Namespace,
        num_tokens: int,
        replica_ids: Sequence[str],
        *,
        job_id: str | None = None,
        num_wanted: int | None = None,
        num_left_out: int = 0,
        request: str = "",
    ) -> WarmJob:
        """Record a warm job with a part, queued, for each replica; this replica sees to it.

        ``job_id`` (32 hex digits, random by default) makes it idempotent: a job that the tenant has under this
        id already is returned as it is, also if its ``request`` (a digest, 64 hex digits) is another.
        ``num_wanted``: how many replicas are to hold the prefix in the end; 0 if nobody stands in for another.
        Raises ArgumentError for a replica that isn't live, StoreUnavailable.
        """

    def take_job(self, job_id: str, tenant: str) -> WarmJob | None:
        """See to a job whose owner's lease is over, or this replica's own: the job, or None if another does.

        Of all who try, one gets it. Raises StoreUnavailable.
        """

    def extend_job(self, job_id: str, replica_id: str) -> bool:
        """Ask one more replica, or one that was restarted since: a queued part. False unless this replica sees to it.

        Raises ArgumentError for a replica that isn't live, StoreUnavailable.
        """

    def hand_job(self, job_id: str, to: ReplicaInfo) -> bool:
        """Let another replica see to a job. False unless this replica did. Raises StoreUnavailable."""

    def end_job(self, job_id: str) -> bool:
        """Nobody is asked any more. False unless this replica sees to the job. Raises StoreUnavailable."""

    def forget_job(self, job_id: str) -> None:
        """Nobody asks for the job any more. Raises StoreUnavailable."""

    def give_up(self, job_id: str, part: JobPart, error: str) -> bool:
        """A part that couldn't be delivered has failed; what its replica says later counts more.

        Raises StoreUnavailable.
        """

    def report_job(
        self,
        job_id: str,
        state: JobState,
        num_tokens_done: int = 0,
        error: str = "",
        *,
        num_tokens_cached: int = 0,
        ms: int = 0,
    ) -> bool:
        """State this replica's part. False if the job is unknown (or expired). Raises StoreUnavailable."""

    def job(self, job_id: str, tenant: str) -> WarmJob | None:
        """The job, or None if there is none of that tenant since it was purged last. Raises StoreUnavailable."""

    def job_owner(self, tenant: str) -> bytes:
        """What jobs of a tenant bear, 32 bytes: another value after each purge of it; local."""

    def keep_pin(
        self, tenant: str, pin: FleetPin, ttl_s: float, *, anew: bool = True, most: int = MAX_FLEET_PINS
    ) -> bool:
        """State that a prefix is to be kept resident for ``ttl_s`` from now on; ``anew=False``: unless that stands.

        False if the tenant has ``most`` others, 0 to 256. Raises ArgumentError, StoreUnavailable.
        """

    def end_pin(self, tenant: str, pin: FleetPin, keep_s: float) -> bool:
        """End one before its time, and keep for ``keep_s`` that it has ended where the store knows nothing of it.

        At most 366 days, and a millisecond where none is left.

        False if there was none. Raises StoreUnavailable.
        """

    def state_pin(
        self, tenant: str, pin_id: str, state: JobState, num_tokens: int = 0, error: str = ""
    ) -> bool:
        """What has become of it on this replica. False if there is none. Raises ArgumentError, StoreUnavailable."""

    def pin_digest(self, namespace: Namespace) -> bytes:
        """What a pin of the namespace bears, 32 bytes: another one after each purge of the tenant; local."""

    def fleet_pins(self, tenant: str) -> list[FleetPin]:
        """Those of a tenant, by id; also those that were ended. Raises StoreUnavailable."""

    @property
    def knows_generations(self) -> bool:
        """No purge can be complete that this replica hasn't obeyed: it heard of all within a lease. Local."""

    def purge(self, tenant: str) -> Purge:
        """Forget a tenant in the whole fleet: raises its generation, obeys, and says who has confirmed so far.

        Repeat after StoreUnavailable; UnreadableRecord is one: what stood in the store of the tenant's generation was
        no replica's writing, and was replaced. Raises StaleEpoch, ArgumentError.
        """

    def obey(self, tenant: str, raised: Raised) -> None:
        """Obey and confirm a raise that another replica tells of, be it that the store doesn't have it.

        Raises ArgumentError unless its proof is right, StaleEpoch or StoreUnavailable once it is obeyed.
        """

    def heed(self) -> None:
        """Obey and confirm what was purged elsewhere, now. Raises StaleEpoch or StoreUnavailable."""

    def purge_report(self, tenant: str) -> Purge:
        """How far the tenant's last purge has come. Raises StoreUnavailable, UnreadableRecord."""

    def set_limit(self, tenant: str, blocks: int | None) -> Durable:
        """The tenant's limit over all replicas, in blocks; None: none. Raises ArgumentError, StoreUnavailable.

        Every replica that has met the tenant knows it within a beat or two (256 tenants a beat), and tells a store
        that has lost it.
        """

    def limits(self) -> dict[str, int]:
        """The limits over all replicas of tenants met here, whoever was told; as known here. Local; O(limits)."""

    def reserve(self, tenant: str, blocks: int) -> Grant:
        """State how many blocks this replica wants to hold of a tenant's quota; ``.blocks`` of them are granted.

        Stated again with each beat; it counts for a lease. While the store is away the last grant holds.
        Raises ArgumentError, CapacityError, StaleEpoch, StoreUnavailable.
        """
