"""The values of coordination, and the bounds of their fields. Imports no store client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from radixkv.errors import ArgumentError

if TYPE_CHECKING:
    from radixkv.index.snapshot import Snapshot

WIRE_VERSION = 7
"""Version of keys, entries and snapshots in the store. Replicas of different versions don't share a fleet."""

MAX_CLOCK_SKEW_S: Final = 30.0
"""Allowed difference between the wall clocks of two replicas. Beats are ignored if they are older than their lease plus
this, or further in the future."""

State = Literal["new", "ok", "unavailable", "refused", "fenced", "left", "failed"]
"""State of a coordinator.

``new``: not registered yet · ``ok`` · ``unavailable``: the store can't be used, retried with backoff ·
``refused``: the fleet in the store differs from this replica · ``fenced``: a newer process has this id ·
``left``: it called ``leave`` · ``failed``: a bug in radixkv ended a thread.
"""

JobState = Literal["queued", "running", "done", "failed", "lost"]
"""State of one replica's part of a warm job. ``lost`` is never written, only read: the replica died or restarted."""

JOB_STATES: frozenset[str] = frozenset({"queued", "running", "done", "failed"})


class Writer(NamedTuple):
    """One registration, as it signs its writes.

    If a store loses a registration and its clock goes back, it may give the same epoch twice. The nonce distinguishes
    them.
    """

    replica_id: str
    epoch: int
    nonce: str

    @property
    def audience(self) -> str:
        """The addressee of a signed request: this registration, and no other process."""
        return f"{self.replica_id}@{self.epoch}.{self.nonce}"


NOBODY = Writer("", 0, "")
"""The owner of a job that was given up: no further replica will be asked."""


MAX_AMOUNT = 10**15 - 1
"""The greatest number, 15 digits, that a store keeps and a reader accepts."""
MAX_FLEET_PINS: Final = 256
"""Most pins of the fleet that a tenant may have."""


def check_amount(name: str, value: object) -> None:
    """Raise ArgumentError unless it is an integer, ≥ 0, that every store can keep."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= MAX_AMOUNT:
        raise ArgumentError(name, value, f"an integer from 0 to {MAX_AMOUNT}")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a replica, for routing costs; absolute values, sent with each beat.

    ``queued_cold_tokens``: those of ``queued_prefill_tokens`` that let a prompt go first of which most is resident
    (``radixkv.scheduling``).
    """

    queued_prefill_tokens: int = 0
    decode_blocks: int = 0
    resident_blocks: int = 0
    queued_cold_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("queued_prefill_tokens", "decode_blocks", "resident_blocks", "queued_cold_tokens"):
            check_amount(name, getattr(self, name))
        if self.queued_cold_tokens > self.queued_prefill_tokens:
            allowed = f"at most queued_prefill_tokens, {self.queued_prefill_tokens}"
            raise ArgumentError("queued_cold_tokens", self.queued_cold_tokens, allowed)


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One registration, as seen by the replica that was asked, at that moment."""

    id: str
    epoch: int
    """Fencing number of the registration; 0 before the first one."""
    address: str | None
    """Base URL of its HTTP service, or None if it has none. Send nothing there unless ``answers``."""
    fingerprint: str
    """Model fingerprint; only replicas with the same one can warm the same prefix."""
    block_size: int
    wire_version: int
    live: bool
    """Whether its lease was still running when this was read."""
    last_seq: int
    """Sequence number of the last entry in its log that the reader knows of."""
    lease_remaining_s: float
    proven: bool
    """Whether its last beat, with the address, is signed with the fleet secret and no older than its lease plus the
    skew."""
    incompatible: str | None = None
    """Why it can't share a fleet with the reader (another secret, block size or wire version), or None."""
    is_self: bool = False
    load: Load = field(default_factory=Load)
    nonce: str = ""
    """Nonce of the registration; with the epoch it identifies the registration. Empty until registered."""
    weights: int = 0
    """Version of the weights that it serves, as of its last beat. It holds nothing of another version."""
    draining: bool = False
    """Whether it is about to leave: it ends the requests that it has, and takes no new ones of clients."""

    @property
    def answers(self) -> bool:
        """Whether requests of replicas may be sent to ``address``, such as purges."""
        return self.live and self.proven and self.incompatible is None and self.address is not None

    @property
    def reachable(self) -> bool:
        """Whether prompts may be sent to ``address``."""
        return self.answers and not self.draining

    @property
    def audience(self) -> str:
        """The addressee of a signed request: this registration, and no other process."""
        return self.writer.audience

    @property
    def writer(self) -> Writer:
        """The registration."""
        return Writer(self.id, self.epoch, self.nonce)


@dataclass(frozen=True, slots=True)
class Hint:
    """``replica`` probably holds the first ``num_tokens`` tokens of the requested prefix."""

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
    """Number of the done tokens that were already resident."""
    ms: int = 0
    """Milliseconds it took."""

    @property
    def writer(self) -> Writer:
        """The registration that owns this part."""
        return Writer(self.replica_id, self.epoch, self.nonce)

    @property
    def is_open(self) -> bool:
        """Whether it is queued or running."""
        return self.state in ("queued", "running")


@dataclass(frozen=True, slots=True)
class WarmJob:
    """A warm job of several replicas. Holds no token ids and no names."""

    id: str
    tenant_digest: bytes
    namespace_digest: bytes
    num_tokens: int
    parts: tuple[JobPart, ...]
    owner: Writer = NOBODY
    """The registration that drives it; another takes over when its lease is over."""
    num_wanted: int = 0
    """How many replicas should hold the prefix in the end; a part that is lost or failed can be replaced."""
    num_left_out: int = 0
    """Tokens of the prompt that are not warmed, because they fill no block."""
    request: str = ""
    """A keyed digest of the request, so that one id can't be used for two requests."""

    @property
    def is_over(self) -> bool:
        """Whether no part is queued or running."""
        return not any(part.is_open for part in self.parts)

    @property
    def is_ended(self) -> bool:
        """Whether no part is queued or running, and no further replica will be asked."""
        return self.is_over and (not self.num_missing or self.owner == NOBODY)

    @property
    def num_missing(self) -> int:
        """How many more replicas must be asked to reach ``num_wanted``."""
        hopeful = sum(part.state in ("queued", "running", "done") for part in self.parts)
        return max(0, self.num_wanted - hopeful)


@dataclass(frozen=True, slots=True)
class FleetPin:
    """A prefix of a tenant that several replicas keep resident for a time. Holds no token ids and no names."""

    id: str
    namespace_digest: bytes
    """See ``Coordinator.pin_digest``: the pin ends with the tenant's next purge."""
    num_tokens: int
    wanted: str
    """The replicas: ``all``, a number, or ``=a,b`` for these names."""
    remaining_s: float = 0.0
    is_ended: bool = False
    """Whether it was ended early. It is kept so that every replica learns of it."""
    parts: tuple[JobPart, ...] = ()
    """Each replica's state; ``done`` means that it is pinned there."""


@dataclass(frozen=True, slots=True)
class Health:
    """State and counters of a coordinator since it was made."""

    state: State
    reason: str = ""
    epoch: int = 0
    last_seq: int = 0
    num_live_peers: int = 0
    num_queued: int = 0
    """Journal records not yet digested."""
    num_overflows: int = 0
    """Times the journal's queue was full, so that this replica's holdings were published again."""
    num_published: int = 0
    """Entries written to the log."""
    num_snapshots: int = 0
    num_outages: int = 0
    """Times the store was lost after it had been reached."""
    num_script_reloads: int = 0
    num_mirror_digests: int = 0
    """Segments that this replica holds."""
    num_view_digests: int = 0
    """Segments that the others hold, within the view's budget."""
    num_view_gaps: int = 0
    """Times a log had a gap that a snapshot had to repair."""
    num_view_forgotten: int = 0
    """Segments left out of the view because its budget was used up."""
    num_unreplicated: int = 0
    """Writes that must not be lost (epoch, limit, generation) and that no second copy of the store confirmed in
    time."""
    num_jobs: int = 0
    """Warm jobs that the store kept when this replica last made one; at most 4,096."""
    queue_bytes: int = 0
    """Approximate bytes of the journal's queue; at most ``queue_bytes`` of the settings."""
    mirror_bytes: int = 0
    """Approximate bytes of the mirror of what this replica published: one digest for 256 resident tokens."""
    log_bytes: int = 0
    """Approximate bytes of this replica's log in the store; at most about two snapshots."""
    snapshot_bytes: int = 0
    """Bytes of its snapshot in the store; at most 64 MiB."""
    view_bytes: int = 0
    """Approximate bytes of the view of the others; bounded by ``view_digests`` of the settings."""
    tenant_bytes: int = 0
    """Approximate bytes of tenants' shares, limits and generations; at most about 45 MB."""
    namespace_bytes: int = 0
    """Approximate bytes for keys and generations of the namespaces that this replica publishes; at most about 60
    MB, or as much as its resident namespaces need."""

    @property
    def is_ok(self) -> bool:
        """Whether it is registered, beating, and heard by the others."""
        return self.state == "ok"


class Resident(Protocol):
    """The source for rebuilding a lost journal: a PrefixCache."""

    def snapshot(self) -> Snapshot:
        """Return all that is resident, at one moment."""

    def tenants(self) -> Iterable[str]:
        """Return all tenants that hold something, or may come to hold something of what runs now."""
