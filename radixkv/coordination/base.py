"""What coordinators over any store have in common: the writer of one replica's facts, and the questions.

The writer is a small state machine under one lock, driven by a thread (``_step``) or by a caller (``beat``,
``publish``). A store answers each write with a verdict:

    OK       written
    GAP      the log isn't where the writer thinks: the holdings are written anew, whole (``_replace``)
    LOST     the store has forgotten this registration: register again, with a greater epoch, and replace
    FENCED   a younger process has the id: say so, and write no more

After any failed write it isn't known what arrived, so the holdings are replaced too: one path heals an
overflow, an outage, a failover that lost writes, and a restart of the store. Questions never take that lock,
since it is held while the store is waited for.
"""

from __future__ import annotations

import random
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from radixkv import tokens
from radixkv.clock import Clock
from radixkv.coordination.holdings import Holdings, leading
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.loop import Loop
from radixkv.coordination.protocol import (
    JOB_STATES,
    WIRE_VERSION,
    Health,
    Hint,
    JobPart,
    JobState,
    Load,
    ReplicaInfo,
    Resident,
    State,
    WarmJob,
)
from radixkv.coordination.publisher import DRAIN_RECORDS, Publisher
from radixkv.coordination.settings import Settings, check_address
from radixkv.coordination.wire import Entry, Registration, is_code
from radixkv.errors import (
    ArgumentError,
    ConfigError,
    CoordinationError,
    StaleEpoch,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from radixkv.namespaces import Namespace
    from radixkv.types import Journal

JOB_TTL_S = 3600.0
_JOB_ID = re.compile(r"[0-9a-f]{32}")
_ENTRIES_A_WRITE = 256
_LINGER_S = 0.005
"""The publisher waits this long after the first record, so that a burst goes out in one write."""

Verdict = Literal["OK", "GAP", "LOST", "FENCED"]


class Standing(NamedTuple):
    """A store's answer to a write, and the last sequence number of the log after it."""

    verdict: Verdict
    last_seq: int


class Known(NamedTuple):
    """Another replica as the local view has it: its registration, when it runs out, and what it holds."""

    info: ReplicaInfo
    holdings: Holdings | None


class BaseCoordinator(ABC):
    """See ``protocol.Coordinator``. A store is joined by the abstract methods at the end of this class."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self.keys = FleetKeys(settings.fleet_secret)
        self.clock = clock
        self._loop = Loop(f"radixkv-publisher-{settings.replica_id}", self._step)
        self._publisher = Publisher(
            self.keys,
            max_records=settings.queue_records,
            max_bytes=settings.queue_bytes,
            wake=self._loop.wake,
        )
        self._writing = threading.RLock()
        self._resident: Resident | None = None
        self._load = Load()
        self._address = settings.address
        self._state: State = "new"
        self._reason = ""
        self._closed = False
        self._registered = False
        self._dirty = False
        self._epoch = self._seq = 0
        self._nonce = self._proof = ""
        self._lease_until = self._next_beat = self._retry_at = 0.0
        self._num_failures = 0
        self._num_published = self._num_replaced = self._num_outages = 0

    # ---- the protocol, in the order of a replica's life

    @property
    def replica_id(self) -> str:
        """The name that this replica registers with."""
        return self.settings.replica_id

    @property
    def journal(self) -> Journal | None:
        """What the cache reports its changes to."""
        return self._publisher

    def attach(self, resident: Resident) -> None:
        """Say where to rebuild from when the journal has overflowed."""
        self._resident = resident

    def register(self, address: str | None = None) -> ReplicaInfo:
        """Take the id with a new epoch, start beating and publishing. See the protocol."""
        check_address(address)
        with self._writing:
            if self._closed:
                raise CoordinationError(f"the coordinator of replica {self.replica_id} is closed")
            self._address = self._address if address is None else address
            self._registered = False
            self._set_state("new")
            try:
                self._join()
            except StoreUnavailable:
                self._retry_at = self.clock() + self._backoff_s()
        if self.settings.background:
            self._start_threads()
        return self.info()

    def beat(self) -> None:
        """Extend the lease now."""
        with self._writing, self._storing():
            self._require_registration()
            self._beat_now()
            self._heal()

    def publish(self) -> None:
        """Write what the journal has queued, now."""
        with self._writing, self._storing():
            self._require_standing()
            self._digest()
            self._require_registration()
            self._heal()
            self._compact()

    def leave(self) -> None:
        """Give the lease back. A store that is lost forgets this replica by itself."""
        with self._writing:
            if self._registered and self._state != "fenced":
                try:
                    with self._storing():
                        self._retire()
                except StoreUnavailable:
                    pass
            self._registered = False
            self._publisher.suspend()
            self._lease_until = 0.0
            if self._state != "fenced":
                self._set_state("left")

    def close(self) -> None:
        """Leave, end the threads and the connections. Idempotent."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
        self._stop_threads()
        self.leave()
        self._disconnect()

    def health(self) -> Health:
        """Standing and counters; local."""
        state, reason = self._state, self._reason
        failure = next((loop.failure for loop in self._loops() if loop.failure is not None), None)
        if failure is not None:
            state, reason = "failed", repr(failure)
        return Health(
            state=state,
            reason=reason,
            epoch=self._epoch,
            last_seq=self._seq,
            num_live_peers=len(self.peers()),
            num_queued=self._publisher.num_queued,
            num_overflows=self._publisher.num_overflows,
            num_published=self._num_published,
            num_snapshots=self._num_replaced,
            num_outages=self._num_outages,
            num_mirror_digests=self._publisher.mirror.num_digests,
        )

    def info(self) -> ReplicaInfo:
        """This replica; local."""
        remaining_s = max(0.0, self._lease_until - self.clock())
        return ReplicaInfo(
            id=self.replica_id,
            epoch=self._epoch,
            address=self._address,
            fingerprint=self.settings.fingerprint,
            block_size=self.settings.block_size,
            wire_version=WIRE_VERSION,
            live=self._registered and self._state != "fenced" and remaining_s > 0,
            last_seq=self._seq,
            lease_remaining_s=remaining_s,
            proven=True,
            is_self=True,
            load=self._load,
        )

    def replicas(self) -> list[ReplicaInfo]:
        """All that are known, this one first, then by id."""
        return [self.info(), *sorted((known.info for known in self._others()), key=lambda info: info.id)]

    def peers(self) -> list[ReplicaInfo]:
        """The others that a request may be sent to, by id."""
        return [info for info in self.replicas()[1:] if info.reachable]

    def hints(self, namespace: Namespace, token_ids: tokens.TokenIds) -> list[Hint]:
        """Which reachable others hold how much of the prefix: longest first, then by id."""
        digest = self.keys.namespace(namespace)
        holders = [
            (known.info, known.holdings.of(digest))
            for known in self._others()
            if known.holdings is not None and known.info.reachable
        ]
        holders = [(info, held) for info, held in holders if held]
        if not holders:
            return []
        digests = self.keys.digests(namespace, tokens.encode(token_ids))
        counts = leading([held for _, held in holders], digests)
        grain = self._publisher.grain_tokens
        found = [
            Hint(info, count * grain) for (info, _), count in zip(holders, counts, strict=True) if count > 0
        ]
        return sorted(found, key=lambda hint: (-hint.num_tokens, hint.replica.id))

    def report_load(self, load: Load) -> None:
        """State the load that the next beat carries."""
        self._load = load

    def create_job(self, namespace: Namespace, num_tokens: int, replica_ids: Sequence[str]) -> WarmJob:
        """Record a warm job with a part, queued, for each replica."""
        if num_tokens < 0:
            raise ArgumentError("num_tokens", num_tokens, "an integer ≥ 0")
        live = {info.id: info for info in self.replicas() if info.live or info.is_self}
        unknown = next((name for name in replica_ids if name not in live), None)
        if unknown is not None and self._state == "unavailable":
            raise StoreUnavailable(self._reason)
        if unknown is not None:
            raise ArgumentError("replica_ids", unknown, f"live replicas: {', '.join(sorted(live)) or 'none'}")
        job = WarmJob(
            id=secrets.token_hex(16),
            tenant_digest=self.keys.tenant(namespace.tenant),
            namespace_digest=self.keys.namespace(namespace),
            num_tokens=num_tokens,
            parts=tuple(JobPart(name, live[name].epoch, "queued") for name in sorted(set(replica_ids))),
        )
        self._save_job(job)
        return job

    def report_job(self, job_id: str, state: JobState, num_tokens_done: int = 0, error: str = "") -> bool:
        """State this replica's part. False if the job, or its part for this replica, is unknown."""
        if state not in JOB_STATES:
            raise ArgumentError("state", state, ", ".join(sorted(JOB_STATES)))
        if num_tokens_done < 0:
            raise ArgumentError("num_tokens_done", num_tokens_done, "an integer ≥ 0")
        if not is_code(error):
            raise ArgumentError("error", error, "a code of up to 64 of a-z and _")
        if not _JOB_ID.fullmatch(job_id):
            return False
        return self._save_part(job_id, JobPart(self.replica_id, self._epoch, state, num_tokens_done, error))

    def job(self, job_id: str, tenant: str) -> WarmJob | None:
        """The job, or None if there is none of that tenant."""
        job = self._load_job(job_id) if _JOB_ID.fullmatch(job_id) else None
        if job is None or job.tenant_digest != self.keys.tenant(tenant):
            return None
        open_parts = [part for part in job.parts if part.state in ("queued", "running")]
        epochs = self._live_epochs([part.replica_id for part in open_parts])
        return replace(job, parts=tuple(_as_read(part, epochs) for part in job.parts))

    # ---- the writer

    def _step(self) -> float | None:
        """What the thread repeats: the seconds until it has something to do again."""
        if self._publisher.num_queued:
            time.sleep(_LINGER_S)
        with self._writing:
            if self._state in ("fenced", "left") or self._closed:
                return None
            now = self.clock()
            try:
                if now < self._retry_at:
                    self._digest_only()
                    return self._retry_at - now
                self._work(now)
            except StoreUnavailable:
                return self._wait_s(self._backoff_s())
            except ConfigError:
                return self._wait_s(self.settings.lease_s)
            except StaleEpoch:
                return None
            self._num_failures = 0
            return max(0.0, self._next_beat - self.clock())

    def _work(self, now: float) -> None:
        if not self._registered:
            self._join()
        elif now >= self._next_beat:
            self.beat()
        if self._publisher.num_queued or self._publisher.is_lost:
            self.publish()

    def _wait_s(self, seconds: float) -> float:
        self._retry_at = self.clock() + seconds
        return seconds

    def _backoff_s(self) -> float:
        """Doubling from 50 ms to a beat's time (at most 2 s), with jitter against herds."""
        longest = min(2.0, max(0.05, self.settings.beat_s))
        delay = min(longest, 0.05 * 2 ** min(self._num_failures, 10))
        self._num_failures += 1
        return float(delay * random.uniform(0.5, 1.0))

    def _join(self) -> None:
        """Compare with the fleet, boot, and be seen."""
        with self._storing():
            self._refuse_if_different()
            self._boot_now()
            self._beat_now()
            self._heal()

    def _refuse_if_different(self) -> None:
        mine = self._registration(0)
        for other in self._live_registrations():
            difference = mine.difference(other)
            if difference is not None:
                setting, own, theirs = difference
                raise ConfigError(setting, own, f"what the live replica {other.replica_id} has: {theirs}")

    def _registration(self, epoch: int) -> Registration:
        return Registration(
            replica_id=self.replica_id,
            epoch=epoch,
            nonce=self._nonce,
            address=self._address or "",
            fingerprint=self.settings.fingerprint,
            block_size=self.settings.block_size,
            wire_version=WIRE_VERSION,
            canary=self.keys.canary,
            last_seq=self._seq,
            proof=self._proof,
        )

    def _boot_now(self) -> None:
        """Fence whoever had the id before. Its log begins with a clear, at 1."""
        self._nonce = secrets.token_hex(16)
        self._epoch = self._boot(self._registration(self._epoch))
        self._seq = 1
        self._proof = self.keys.proof(self.replica_id, self._epoch, self._nonce, self._address or "")
        self._registered = True
        self._dirty = self._dirty or self._publisher.mirror.num_digests > 0

    def _beat_now(self) -> None:
        before = self.clock()
        standing = self._send_beat(self._registration(self._epoch), self._load)
        self._obey(standing)
        if standing.verdict == "OK":
            self._lease_until = before + self.settings.lease_s
            self._next_beat = before + self.settings.beat_s
            self._dirty = self._dirty or standing.last_seq != self._seq

    def _heal(self) -> None:
        """Register again if the store forgot it, replace the holdings if the log can't be trusted."""
        if not self._registered:
            self._boot_now()
            self._beat_now()
        if self._registered and self._dirty:
            self._send_holdings()
        if not self._registered or self._dirty:
            raise StoreUnavailable("the store does not keep what is written to it")

    def _send_holdings(self) -> None:
        standing = self._replace(self._publisher.mirror, self._seq)
        self._obey(standing)
        if standing.verdict == "OK":
            self._seq = standing.last_seq
            self._dirty = False
            self._num_replaced += 1

    def _digest(self) -> None:
        """Digest what is queued now; write it unless the holdings are to be replaced anyway."""
        for _ in range(1 + self._publisher.num_queued // DRAIN_RECORDS):
            entries = self._drained()
            for start in range(0, len(entries), _ENTRIES_A_WRITE):
                self._write(entries[start : start + _ENTRIES_A_WRITE])
            self._beat_meanwhile()

    def _digest_only(self) -> None:
        """While the store is away: keep the queue short and the mirror true."""
        while self._publisher.num_queued or self._publisher.is_lost:
            self._dirty = bool(self._drained()) or self._dirty

    def _drained(self) -> list[Entry]:
        """The next entries; none if records were lost: the mirror is then made anew, and sent whole."""
        entries, lost = self._publisher.drain()
        if lost:
            self._dirty = True
            if self._resident is not None:
                self._publisher.rebuild(self._resident, self._beat_meanwhile)
        return entries

    def _beat_meanwhile(self) -> None:
        """Long work must not cost the lease. A store that is away will be met again by who called."""
        if self._state != "ok" or self.clock() < self._next_beat:
            return
        self._next_beat = self.clock() + self.settings.beat_s
        try:
            self._beat_now()
        except StoreUnavailable:
            self._dirty = True

    def _write(self, entries: list[Entry]) -> None:
        if self._dirty or not self._registered:
            self._dirty = True
            return
        self._dirty = True
        standing = self._append(entries, self._seq + 1)
        self._dirty = False
        self._obey(standing)
        if standing.verdict == "OK":
            self._seq += len(entries)
            self._num_published += len(entries)

    def _obey(self, standing: Standing) -> None:
        if standing.verdict == "FENCED":
            self._lease_until = 0.0
            self._publisher.suspend()
            self._set_state("fenced", "a younger process has registered this id")
            raise StaleEpoch(f"replica {self.replica_id} is fenced: epoch {self._epoch} is not the last one")
        if standing.verdict == "LOST":
            self._registered = False
        self._dirty = self._dirty or standing.verdict != "OK"

    def _require_standing(self) -> None:
        if self._state == "fenced":
            raise StaleEpoch(f"replica {self.replica_id} is fenced: epoch {self._epoch} is not the last one")
        if self._closed or self._state == "left":
            raise CoordinationError(f"replica {self.replica_id} has left")

    def _require_registration(self) -> None:
        self._require_standing()
        if self._epoch == 0 or self._state == "refused":
            raise StoreUnavailable(
                f"replica {self.replica_id} is not registered: {self._reason or self._state}"
            )

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Keeps the state in step with what the store lets happen."""
        try:
            yield
        except StoreUnavailable as error:
            if self._state == "ok":
                self._num_outages += 1
            self._set_state("unavailable", str(error))
            raise
        except ConfigError as error:
            self._set_state("refused", str(error))
            raise
        if self._registered:
            self._set_state("ok")

    def _set_state(self, state: State, reason: str = "") -> None:
        self._reason = reason
        self._state = state

    def _loops(self) -> list[Loop]:
        return [self._loop]

    def _start_threads(self) -> None:
        for loop in self._loops():
            loop.start()
            loop.wake()

    def _stop_threads(self) -> None:
        for loop in self._loops():
            loop.stop()

    # ---- what a store has to do; each may raise StoreUnavailable

    @abstractmethod
    def _live_registrations(self) -> list[Registration]:
        """All whose lease runs, that of this id included."""

    @abstractmethod
    def _boot(self, registration: Registration) -> int:
        """Store it with an epoch greater than ``registration.epoch`` and any before it; no lease yet."""

    @abstractmethod
    def _send_beat(self, registration: Registration, load: Load) -> Standing:
        """Extend the lease, state the proof and the load."""

    @abstractmethod
    def _append(self, entries: list[Entry], first_seq: int) -> Standing:
        """Append to the log, if ``first_seq`` is the next number."""

    @abstractmethod
    def _replace(self, mirror: Holdings, seq: int) -> Standing:
        """Let ``mirror`` take the place of all that was written, at a number after ``seq``."""

    @abstractmethod
    def _retire(self) -> None:
        """Give the lease back, if it is still this registration's."""

    @abstractmethod
    def _others(self) -> list[Known]:
        """The local view; never touches the store if that may wait."""

    @abstractmethod
    def _save_job(self, job: WarmJob) -> None:
        """Keep a new job for ``JOB_TTL_S``."""

    @abstractmethod
    def _save_part(self, job_id: str, part: JobPart) -> bool:
        """Replace one part; False if there is no such job or part."""

    @abstractmethod
    def _load_job(self, job_id: str) -> WarmJob | None:
        """The job as stored."""

    @abstractmethod
    def _live_epochs(self, replica_ids: Sequence[str]) -> dict[str, int]:
        """The epochs of those of them that are live, from the store itself."""

    @abstractmethod
    def _compact(self) -> None:
        """Shorten what the store keeps of this replica's past, where it keeps any."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of connections."""


def _as_read(part: JobPart, epochs: dict[str, int]) -> JobPart:
    """A part that is under way belongs to a live registration, or it is lost."""
    if part.state in ("queued", "running") and epochs.get(part.replica_id) != part.epoch:
        return replace(part, state="lost")
    return part


def describe(
    registration: Registration, mine: Registration, keys: FleetKeys, remaining_s: float, load: Load
) -> ReplicaInfo:
    """Another replica's registration, judged by the one who reads it."""
    difference = mine.difference(registration)
    address = registration.address
    return ReplicaInfo(
        id=registration.replica_id,
        epoch=registration.epoch,
        address=address or None,
        fingerprint=registration.fingerprint,
        block_size=registration.block_size,
        wire_version=registration.wire_version,
        live=remaining_s > 0,
        last_seq=registration.last_seq,
        lease_remaining_s=max(0.0, remaining_s),
        proven=keys.is_proof(
            registration.proof, registration.replica_id, registration.epoch, registration.nonce, address
        ),
        incompatible=None if difference is None else "another {}: {} here, {} there".format(*difference),
        load=load,
    )
