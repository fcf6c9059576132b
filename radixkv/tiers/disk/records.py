"""The disk tier: sealed records of evicted KV in a folder, which survive a restart.

    located = tier.locate(namespace, key, first, most)   how many segments in a row are there: memory only
    job = tier.load(namespace, key, segment, into)       a thread reads, verifies and decrypts into memory
    job = tier.store(namespace, key, segment, payload)   a thread encrypts, writes and seals
    tier.purge(tenant)                                   nothing of the tenant can be found or decrypted any more

A *segment* is ``segment_tokens`` tokens of a prompt, and its KV is one record. ``key`` has the prompt's ids as uint32
bytes. A full disk, an error, a wrong record or a thread that never returns is a miss, and is counted. No call raises
it, waits for the disk, or holds the lock during I/O.

**Who decides.** A locator, 16 bytes of a keyed digest, says where to look. The tag of AES-GCM decides, over payload,
header and the identity that the *reader* computes (``identity``). So a record of another identity doesn't open:
of another tenant, namespace, generation, version of the weights, fingerprint, scheme or prefix. Nor does one that was
torn, flipped, exchanged or replayed. Memory that a failed decryption may have written is zeroed.

**When it is sealed.** A store clears the slot's old header, writes the payload, then the header. Then the record can be
found. ``sync`` makes all records durable at once. ``maintain`` does it every ``sync_s`` seconds, in its own thread.

**When it stops.** After ``MOST_ERRORS`` errors in a row the tier is closed for ``retry_s`` seconds. It closes for good
once another process took the folder over. With ``awaits_generations`` it is closed until
``apply_generations``: a replica that was down during a purge must not serve before it knows of the purge.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from hmac import compare_digest
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from radixkv.clock import Clock, monotonic
from radixkv.config import Namespace
from radixkv.errors import ArgumentError, ConfigError, TierError
from radixkv.files.system import Files, round_up
from radixkv.forks import OwnLock
from radixkv.tiers.disk.durations import Durations
from radixkv.tiers.disk.folder import InvalidTag, TenantKeys, TierFolder
from radixkv.tiers.disk.identity import FINGERPRINT_BYTES, SCHEMES, TOKEN_BYTES, segment_identity
from radixkv.tiers.disk.io_threads import IOThreads, Job, Work
from radixkv.tiers.disk.slab import (
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    MAX_SEQUENCE,
    MAX_SLOTS,
    TAG_BYTES,
    Header,
    Slab,
    buffer_bytes,
    is_sealed,
    slots_in,
)
from radixkv.tiers.disk.slots import Quota, SlotTable
from radixkv.uncopied import refuse_copies

MAX_THREADS: Final = 64
MOST_ERRORS: Final = 8
_NONCE_BYTES: Final = 12
_MOST_DROPPED: Final = 4_096
"""Records that are forgotten under one hold of the lock: some milliseconds."""
_MOST_CHECKED: Final = 2_048
"""Slots that are checked under one hold of the lock: some milliseconds."""
_LAST_SYNC: Final = 0.25
"""Part of the time of ``close`` that is for the last sync, if what is queued takes that long."""

MISSED: Final = (
    "absent", "refused", "mismatched", "stale", "abandoned", "read_errors", "closed", "too_busy"
)  # fmt: skip
"""Why a load found nothing: see ``DiskRecords.missed``."""
UNSTORED: Final = ("no_slot", "stale", "abandoned", "write_errors", "damaged", "closed", "too_busy")
"""Why a store kept nothing: see ``DiskRecords.unstored``."""
OPERATIONS: Final = ("read", "write", "sync")
"""What ``DiskRecords.durations`` measures."""

TierState = Literal["open", "awaiting-generations", "degraded", "fenced", "closed"]

log = logging.getLogger("radixkv.tiers")


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """Settings of a disk tier.

    - ``folder``: made if it is missing (its parent must exist); empty, or a disk tier's.
    - ``disk_bytes``: size of the slab with its headers; at least one record. Another size, another ``record_bytes``
      or another ``scheme`` makes a new slab: the old records are lost.
    - ``record_bytes``: bytes of the KV of one segment.
    - ``segment_tokens``: tokens of a segment.
    - ``fingerprint``: of what computes the KV, 32 bytes (``fingerprint_of``). Records of another one are never read.
    - ``scheme``: how records stand for KV.
    - ``num_threads``: threads for I/O, each with a buffer of a record, 1 to 64.
    - ``sync_s``: seconds between syncs. A crash loses at most what was sealed since the last.
    - ``hang_s``: an operation that takes longer counts as hanging.
    - ``retry_s``: seconds for which the tier is closed after errors, and until a failed sync is repeated.
    - ``awaits_generations``: closed until ``apply_generations``.
    - ``direct``: bypass the page cache where the file system can.

    Raises ConfigError.
    """

    folder: Path | str
    disk_bytes: int
    record_bytes: int
    segment_tokens: int = 256
    fingerprint: bytes = field(kw_only=True)
    scheme: str = "exact"
    num_threads: int = 4
    sync_s: float = 5.0
    hang_s: float = 5.0
    retry_s: float = 30.0
    awaits_generations: bool = False
    direct: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (
            ("disk_bytes", 1, 2**62),
            ("record_bytes", 1, MAX_RECORD_BYTES),
            ("segment_tokens", 1, 2**20),
            ("num_threads", 1, MAX_THREADS),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(name, value, f"an integer from {low} to {high}")
        if self.scheme not in SCHEMES:
            raise ConfigError("scheme", self.scheme, f"one of {', '.join(SCHEMES)}")
        given: object = self.fingerprint
        if not isinstance(given, bytes) or len(given) != FINGERPRINT_BYTES:
            value = len(given) if isinstance(given, bytes) else type(given).__name__
            raise ConfigError("fingerprint", value, f"{FINGERPRINT_BYTES} bytes, from fingerprint_of")
        for name in ("sync_s", "hang_s", "retry_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
                raise ConfigError(name, value, "a number of seconds > 0, at most 86400")
        for name in ("awaits_generations", "direct"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "True or False")
        if not 1 <= self.num_slots <= MAX_SLOTS:
            least, most = self._bytes_of(1), self._bytes_of(MAX_SLOTS)
            allowed = f"at least {least:,} bytes, one record; at most {most:,} bytes"
            raise ConfigError("disk_bytes", self.disk_bytes, allowed)

    @property
    def num_slots(self) -> int:
        """Records that fit."""
        return slots_in(self.disk_bytes, self.record_bytes)

    def _bytes_of(self, num_slots: int) -> int:
        return 2 * 4096 + num_slots * (round_up(self.record_bytes) + HEADER_BYTES)


class DiskRecords:
    """A disk tier over a folder. Thread-safe. ``close`` it, or use it in a ``with``.

    ``secrets_``: the fleet's secret, then previous ones, at least 16 bytes each. Opening reads all headers: 0.2 s for
    100,000 slots. Raises ConfigError (see ``TierFolder``), and OSError if the disk fails.
    """

    def __init__(
        self,
        settings: DiskSettings,
        secrets_: Sequence[bytes],
        *,
        files: Files | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self.folder = TierFolder(
            settings.folder,
            secrets_,
            num_slots=settings.num_slots,
            record_bytes=settings.record_bytes,
            scheme=settings.scheme,
            files=files,
        )
        try:
            self._slab = Slab(self.folder, direct=settings.direct, disk_bytes=settings.disk_bytes)
            self._table = SlotTable(self._slab.num_slots)
            self._io = IOThreads(
                settings.num_threads, buffer_bytes(settings.record_bytes), hang_s=settings.hang_s, clock=clock
            )
            self._syncs = IOThreads(1, 1, hang_s=settings.hang_s, clock=clock)
            self._errors_in_a_row = 0
            self._opens_at: float | None = None
            """Until when it is closed after errors."""
            self._counts: Counter[str] = Counter()
            self._missed, self._unstored = Counter[str](), Counter[str]()
            self._purges: Counter[str] = Counter()
            self._purging: Counter[str] = Counter()
            """Tags of tenants that are being purged."""
            self._num_purges_of_all = self._sequence = 0
            self._origin = _origin(settings, self.folder.id)
            self.num_found = self.num_foreign = 0
            """Records that were there at the opening, and those of them that others made, and that can't be read."""
            self._restore()
        except BaseException as error:
            self.folder.close(is_refused=isinstance(error, ConfigError))
            raise
        self._lock = OwnLock()
        self._writing_headers = OwnLock()
        self._part = secrets.randbits(64)  # each opening has data keys of its own, so nonces never run out
        self._is_fenced = self._is_closed = False
        self._awaits = settings.awaits_generations
        self._num_sealed = self._sealed_at_sync = 0
        """Records that were sealed since the opening, and how many of them are durable."""
        self._synced_at = self._syncs_at = clock()
        self._sync_job: Job | None = None
        self._has_failed_sync = False
        self.durations = {name: Durations() for name in OPERATIONS}
        """How long operations of the disk took, also those that failed: the read of a record, the write of one with
        its header, and a sync. One that hangs counts when it returns."""

    def __enter__(self) -> DiskRecords:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- questions

    @property
    def state(self) -> TierState:
        """Whether the tier serves, or why not."""
        if self._is_closed:
            return "closed"
        if self._is_fenced:
            return "fenced"
        if self._awaits:
            return "awaiting-generations"
        return "degraded" if self._is_resting or self._io.is_stuck else "open"

    @property
    def _is_resting(self) -> bool:
        """Whether it is closed for a while after errors."""
        opens_at = self._opens_at  # once: other threads change it
        return opens_at is not None and self._clock() < opens_at

    @property
    def num_slots(self) -> int:
        """Records that fit."""
        return self._slab.num_slots

    @property
    def is_direct(self) -> bool:
        """Whether records bypass the page cache."""
        return self._slab.is_direct

    def __len__(self) -> int:
        """Number of sealed records."""
        with self._lock:
            return len(self._table)

    @property
    def is_full(self) -> bool:
        """Whether a record takes the slot of another one from now on."""
        return not self._table.num_free

    def counts(self) -> dict[str, int]:
        """Return what happened since the opening, by name. Every refused or failed record is in one of them.

        ``loaded``, ``stored``, ``evicted``, ``read_bytes``, ``written_bytes``; the sums of ``missed`` and ``unstored``.
        """
        with self._lock:
            sealed, free = len(self._table), self._table.num_free
            found = self._counts.copy()
            found.update(self._missed)
            found.update(self._unstored)
            num_hung = self._io.num_hung + self._syncs.num_hung
        found.update(sealed=sealed, free=free, hung_threads=num_hung)
        return dict(sorted(found.items()))

    def missed(self) -> dict[str, int]:
        """Return how many loads found nothing, by each reason of ``MISSED``.

        - ``absent``: gone since it was located. ``refused``: didn't open. ``mismatched``: another identity at the
          locator. ``stale``: purged meanwhile.
        - ``abandoned``: the caller no longer waited. ``read_errors``. ``closed``, ``too_busy``: not begun.
        """
        with self._lock:
            return {reason: self._missed[reason] for reason in MISSED}

    def unstored(self) -> dict[str, int]:
        """Return how many records were not stored, by each reason of ``UNSTORED``.

        ``no_slot`` (all are in use, or others' by guarantee), ``damaged`` (the tenant's generation can't be read),
        ``write_errors``; the others as in ``missed``.
        """
        with self._lock:
            return {reason: self._unstored[reason] for reason in UNSTORED}

    @property
    def num_returned(self) -> int:
        """Requests for a record that had been evicted: see ``locate``, ``evicted``."""
        return self._table.evicted.num_asked

    def locate(
        self, namespace: Namespace, key: bytes, first: int, most: int | None = None, *, is_asked: bool = False
    ) -> int:
        """Return how many segments of a prompt in a row, from segment ``first`` on, are on this disk.

        ``most``: look at no more. ``is_asked``: a request needs them; the first one that is missing counts in
        ``num_returned`` if it was evicted. A hint: only ``load`` decides. No I/O: a tenant's keys are in memory. O(the
        tokens before the first miss); about 2 µs if nothing is there.
        """
        return sum(takewhile(bool, self._are_here(namespace, key, first, most, is_asked=is_asked)))

    def num_missing(self, namespace: Namespace, key: bytes, first: int) -> int:
        """Return how many segments of a prompt from segment ``first`` on are not on this disk. See ``locate``.

        All of them if it isn't open. O(tokens).
        """
        num_segments = len(key) // (self.settings.segment_tokens * TOKEN_BYTES)
        return max(num_segments - first, 0) - sum(self._are_here(namespace, key, first))

    def _are_here(
        self, namespace: Namespace, key: bytes, first: int, most: int | None = None, *, is_asked: bool = False
    ) -> Iterator[bool]:
        """Return for each segment from ``first`` on whether it is on this disk; nothing if the disk isn't open."""
        num_segments = len(key) // (self.settings.segment_tokens * TOKEN_BYTES)
        stop = num_segments if most is None else min(num_segments, first + most)
        is_shut = self._is_closed or self._is_fenced or self._awaits or self._is_resting
        if is_shut or not 0 <= first < stop:
            return
        keys = self.folder.keys(namespace.tenant)
        if keys is None:
            return
        size = self.settings.segment_tokens * TOKEN_BYTES
        view = memoryview(key)
        stream = xxh3_128(view[: first * size])
        started, find = self._locator_start(keys, namespace), self._table.find
        for segment in range(first, stop):
            stream.update(view[segment * size : (segment + 1) * size])
            digest = started.copy()
            digest.update(stream.digest())
            is_here = find(locator := digest.digest()) is not None
            if is_asked and not is_here:
                self._table.evicted.asked(locator)
            yield is_here

    def violations(self, pause: Callable[[], None] = lambda: None) -> list[tuple[str, str]]:
        """Return the laws that the table of slots breaks now, and where: see ``radixkv.audit.invariants``. No I/O.

        O(slots), about 1 µs each, some milliseconds under one hold of the lock. ``pause`` is called in between.
        """
        with self._lock:
            found = self._table.violations()
        for first in range(0, self.num_slots, _MOST_CHECKED):
            pause()
            stop = first + _MOST_CHECKED
            with self._lock:
                wrong = self._table.wrong_slots(first, stop)
                found += wrong or self._wrong_records(first, stop)
        return found

    def _wrong_records(self, first: int, stop: int) -> list[tuple[str, str]]:
        """Return whether sealed slots of a range have headers of other records, or of another generation."""
        headers, wrong = self._slab.headers[first:stop], list[int]()
        locators, key_ids = headers["locator"].tolist(), headers["key_id"].tolist()
        for slot, entry in self._table.sealed_in(first, stop):
            keys, at = self.folder.keys_of(tag := entry.owner.hex()), slot - first
            is_old = keys is not None and not self._purging[tag] and key_ids[at] != keys.key_id
            if is_old or locators[at] != entry.locator:
                wrong.append(slot)
        if not wrong:
            return []
        where = f"{len(wrong)} slots, slot {wrong[0]} first"
        return [
            ("records", f"{where}: the header is of another record, or of another generation of the tenant")
        ]

    # --- work

    def load(
        self,
        namespace: Namespace,
        key: bytes,
        segment: int,
        into: memoryview,
        *,
        is_awaited: bool = True,
        begun: list[Job] | None = None,
    ) -> Job | None:
        """Begin to load a segment's record into ``into``, exactly as many bytes as were stored.

        ``is_awaited``: somebody waits for it. Other loads go behind all that are. ``begun``: gets the job before it can
        touch the memory, which stays its own until the job has ended or is cancelled, also after an error in here.

        The job's result says whether all bytes are there and proven. Otherwise nothing of them may be used. Returns
        None, a miss, if the tier is not open or too busy. Raises ArgumentError for a segment outside of ``key``, or
        memory that is read-only or too large.
        """
        _, stop = self._range(key, segment)
        target = into.cast("B") if into.format != "B" or into.ndim != 1 else into
        if target.readonly or not 1 <= len(target) <= self.settings.record_bytes:
            allowed = f"writable memory of 1 to {self.settings.record_bytes} bytes"
            raise ArgumentError("into", len(target), allowed)
        prefix = memoryview(key)[: stop * TOKEN_BYTES]  # not a copy: a caller may be an engine's step

        def work(job: Job, memory: memoryview) -> bool:
            return self._load(job, memory, namespace, prefix, segment, target)

        return self._submit(work, self._missed, is_load=is_awaited, begun=begun)

    def num_purges(self, tenant: str) -> int:
        """Return how often a tenant was purged since the opening, with a purge that runs. O(1)."""
        return self._purges[self.folder.tag(tenant)] + self._num_purges_of_all

    def store(
        self,
        namespace: Namespace,
        key: bytes,
        segment: int,
        payload: memoryview,
        *,
        since: int | None = None,
        begun: list[Job] | None = None,
    ) -> Job | None:
        """Begin to store a segment's KV. The payload must not change until ``Job.wait_for_memory`` or ``wait`` returns.

        ``since``: the tenant's ``num_purges`` when its KV was taken; None for now. After a purge since then nothing is
        stored. ``begun``: see ``load``.

        The job's result says whether the record is sealed, or another job is about to seal it. Returns None if the tier
        is not open or too busy. Raises ArgumentError for a segment outside of ``key``, or a payload that doesn't fit.
        """
        _, stop = self._range(key, segment)
        source = payload.cast("B") if payload.format != "B" or payload.ndim != 1 else payload
        if not 1 <= len(source) <= self.settings.record_bytes:
            raise ArgumentError("payload", len(source), f"1 to {self.settings.record_bytes} bytes")
        prefix = memoryview(key)[: stop * TOKEN_BYTES]  # not a copy: a caller may be an engine's step
        before = self.num_purges(namespace.tenant) if since is None else since

        def work(job: Job, memory: memoryview) -> bool:
            return self._store(job, memory, namespace, prefix, segment, source, before)

        return self._submit(work, self._unstored, is_load=False, begun=begun)

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """Give a tenant a quota of slots from now on; ``NO_QUOTA`` takes it back. Repeat it after each opening.

        Records within the guarantee are never evicted for other tenants. A tenant with ``most`` records evicts its own
        oldest one for the next, and two while it has more. Else a full disk evicts the oldest record of the tenant that
        is furthest above its guarantee, by its weight. No I/O. O(log tenants).

        Raises ArgumentError, and changes nothing, for a guarantee that doesn't fit beside the others'.
        """
        with self._lock:
            self._table.set_quota(self._owner_of(tenant), quota)

    def purge(self, tenant: str) -> int:
        """Forget everything of a tenant, durably. Returns the number of its records.

        When it returns, no record can be found, and none can be decrypted, also not from an older copy of the slab
        with all keys that are left. A load that runs ends as a miss. Costs about four syncs, and O(its slots). Raises
        OSError or TierError if the disk fails: then repeat it; the tenant's records are not served meanwhile. Raises
        TierError after ``close``.
        """
        self._require_folder()
        return self._forget(tenant, None)

    def purge_all(self) -> bool:
        """Forget everything of all tenants, durably. Returns True. Costs a ``purge`` for each.

        Raises as ``purge``, after it has tried all; then repeat it.
        """
        self._require_folder()
        with self._lock:
            self._num_purges_of_all += 1  # also of tenants whose first keys a store makes now
        problem: OSError | TierError | None = None
        for tag in self.folder.tags():
            try:
                self.purge_tag(tag)
            except (OSError, TierError) as error:
                problem = error
        if problem is not None:
            raise problem
        return True

    def tags_but(self, tenants: Iterable[str]) -> set[str]:
        """Return the tags of all tenants that have keys here, without these tenants'. O(tenants), no I/O."""
        named = {self.folder.tag(tenant) for tenant in tenants}
        return {owner.hex() for owner in self.folder.owners().values()} - named

    def adopt(self, tenant: str) -> None:
        """Note durably that a tenant's records are of its incarnation, where the folder doesn't know. Costs four syncs.

        Nothing happens without records, and once it is known. Raises OSError, TierError; then repeat it.
        """
        self._require_folder()
        if self.folder.incarnation_of_keys(tenant) == "":
            self.folder.make_keys(tenant)

    def purge_tag(self, tag: str) -> int:
        """Forget everything of the tenant with this tag, as ``purge`` does."""
        self._require_folder()
        return self._forget_tag(tag, partial(self.folder.raise_generation_of, tag), is_certain=True)

    def apply_generations(self, generations: Mapping[str, int]) -> int:
        """Learn the fleet's generations of tenants: purge each tenant that was purged since. Then the tier may open.

        Returns the number of records that were forgotten. Raises as ``purge``; then the tier stays closed.
        """
        self._require_folder()
        forgotten = sum(self.learn_generation(*each) for each in generations.items())
        self._awaits = False
        return forgotten

    def learn_generation(self, tenant: str, generation: int) -> int:
        """Do that for one tenant, without opening the tier."""
        self._require_folder()
        return self._forget(tenant, generation)

    def meet_store(self, store_id: str) -> None:
        """Learn which store the fleet's purges come from, durably. If the folder knows another one, forget everything.

        The purges of the other store may be lost. So the tier is closed before it forgets, and opens by
        ``apply_generations``. Raises as ``purge``; then repeat it.
        """
        self._require_folder()
        known = self.folder.store
        if known == store_id:
            return
        if known is not None:
            self._awaits = True
            log.warning("the fleet's store is another one, and may lack purges: the disk forgets everything")
            self.purge_all()
        self.folder.remember_store(store_id)

    def compare_notes(self, notes: Mapping[str, bytes | None]) -> int:
        """Forget tenants of which a note tells a later generation than the folder: it is an older copy of itself.

        ``notes``: by tag, what ``unnoted`` returned last for each, perhaps in another process; None for none. Returns
        the number of these tenants. O(tenants), and a ``purge`` for each of them. Raises as ``purge``, after it has
        tried all; then repeat it.
        """
        self._require_folder()
        problem: OSError | TierError | None = None
        num_older = 0
        for tag, note in notes.items():
            generation = self.folder.generation_in(tag, note)
            if not self.folder.compare_note(tag, generation):
                continue
            num_older += 1
            raised = partial(self.folder.raise_generation_of, tag, above=generation)
            try:
                self._forget_tag(tag, raised, is_certain=True)
            except (OSError, TierError) as error:
                problem = error
        if problem is not None:
            raise problem
        if num_older:
            log.warning("%s is an older copy: it forgets %d tenants", self.folder.path, num_older)
        return num_older

    def sync(self) -> None:
        """Make every record durable that is sealed by now. Waits for the disk. Raises OSError, TierError."""
        with self._lock:
            num_sealed = self._num_sealed
        began_at = self._clock()
        try:
            if not self.folder.is_ours():
                self._is_fenced = True
                raise TierError(f"another process opened {self.folder.path}: this one no longer uses it")
            self._rewrite_headers()
            self._slab.sync()
        except OSError:
            self._has_failed_sync, self._syncs_at = True, self._clock() + self.settings.retry_s
            self._count(sync_errors=1)
            raise
        finally:
            with self._lock:
                self.durations["sync"].add(self._clock() - began_at)
        self._sealed_at_sync, self._synced_at = num_sealed, self._clock()

    def _rewrite_headers(self) -> None:
        """After a failed sync: write all headers again, which the system may have dropped as if they were written."""
        if self._has_failed_sync:
            with self._writing_headers:
                self._slab.write_headers([0, self._slab.num_slots - 1])
            self._has_failed_sync = False

    def maintain(self) -> None:
        """Sync in a thread if ``sync_s`` seconds have passed and something was sealed; after a failed one, ``retry_s``.

        Doesn't wait. Call it often, by any thread.
        """
        now = self._clock()
        is_due = now - self._synced_at >= self.settings.sync_s and now >= self._syncs_at
        is_running = self._sync_job is not None and not self._sync_job.is_done
        if is_due and not is_running and self.state == "open":
            self._submit_sync()

    def close(self, timeout_s: float = 10.0, *, is_in_use: bool = False) -> None:
        """Finish what is queued, sync, and give the folder back, unless a purge of it still runs. Idempotent.

        A thread that hangs keeps the files and the lock until the process ends. Else its descriptor might be another
        file's by the time it goes on.
        """
        if self._is_closed:
            return
        self._is_closed = True
        ends_at = self._clock() + timeout_s
        has_ended = self._io.close((1 - _LAST_SYNC) * timeout_s)
        self._submit_sync()
        has_ended &= self._syncs.close(max(ends_at - self._clock(), 0.0))
        if has_ended and not is_in_use:
            self.folder.close()
        else:
            log.error("the disk tier's I/O hangs; its folder stays locked until the process ends")

    # --- in the threads

    def _load(
        self,
        job: Job,
        memory: memoryview,
        namespace: Namespace,
        prefix: memoryview,
        segment: int,
        into: memoryview,
    ) -> bool:
        keys = self.folder.keys(namespace.tenant)
        found = None if keys is None else self._leased(self._locator(keys, namespace, prefix))
        if keys is None or found is None:
            return self._miss("absent")
        slot, header = found
        seconds: float | None = None
        try:
            identity = self._identity(keys, namespace, prefix, segment, len(into))
            if header.payload_bytes != len(into) or not compare_digest(identity, header.identity):
                return self._miss("mismatched")
            began_at = self._clock()
            try:
                self._slab.read_slot(slot, memory, header.payload_bytes)
            except OSError as error:
                self._failed(error)
                return self._miss("read_errors")
            finally:
                seconds = self._clock() - began_at
            self._errors_in_a_row = 0
            if not job.claim():
                return self._miss("abandoned")
            return self._opened(keys, namespace.tenant, slot, header, memory, identity, into)
        finally:
            with self._lock:
                self._table.release(slot)
                if seconds is not None:
                    self.durations["read"].add(seconds)

    def _opened(
        self,
        keys: TenantKeys,
        tenant: str,
        slot: int,
        header: Header,
        memory: memoryview,
        identity: bytes,
        into: memoryview,
    ) -> bool:
        """Decrypt what was read; whether it is proven, and not purged meanwhile. Otherwise ``into`` is zeroed."""
        size = header.payload_bytes
        memory[size : size + TAG_BYTES] = header.tag
        try:
            keys.data_key(header.part).decrypt_into(
                header.nonce, memory[: size + TAG_BYTES], header.associated(identity), into
            )
        except InvalidTag:
            _zero(into)
            self._drop(slot, header)
            log.warning("a record of the disk tier was refused: its bytes are not those that were sealed")
            return self._miss("refused")
        if not self._is_current(keys, tenant):
            _zero(into)
            return self._miss("stale")
        self._count(loaded=1, read_bytes=size)
        return True

    def _store(
        self,
        job: Job,
        memory: memoryview,
        namespace: Namespace,
        prefix: memoryview,
        segment: int,
        payload: memoryview,
        num_purges: int,
    ) -> bool:
        try:
            keys = self.folder.make_keys(namespace.tenant)
        except TierError:
            return self._leave_out("damaged")
        except OSError as error:
            self._failed(error)
            return self._leave_out("write_errors")
        if self.num_purges(namespace.tenant) != num_purges:  # these may be the keys after the purge
            return self._leave_out("stale")
        locator = self._locator(keys, namespace, prefix)
        with self._lock:
            if (there := self._table.find(locator)) is not None:
                self._table.touch(there)
                return True
            if self._table.is_filling(locator):
                return True  # the other job counts if it fails
            before = len(self._table)
            slot = self._table.take(locator, self._owner_of(namespace.tenant))
            self._counts["evicted"] += before - len(self._table)
            if slot is not None:  # a forged header may have the last number: then all further ones have it
                self._sequence = min(self._sequence + 1, MAX_SEQUENCE - 1)
            sequence = self._sequence
        if slot is None:
            return self._leave_out("no_slot")
        try:
            identity = self._identity(keys, namespace, prefix, segment, len(payload))
            header = Header(
                len(payload), sequence, locator, keys.key_id, self._part, b"", b"", identity, self._origin
            )
            sealed = self._sealed(job, memory, payload, keys, header)
            began_at = self._clock()
            is_written = sealed is not None and self._written(slot, memory, sealed)
        except BaseException:
            self._give_up(slot)
            raise
        if sealed is None:
            self._give_up(slot)
            return self._leave_out("abandoned")
        with self._lock:
            self.durations["write"].add(self._clock() - began_at)
            if not is_written:
                self._table.give_up(slot)
            elif not self._is_current(keys, namespace.tenant):
                self._table.drop(slot)
            is_there = is_written and self._table.seal(slot)
            self._num_sealed += is_there
        if not is_there:
            return self._leave_out("stale" if is_written else "write_errors")
        self._count(stored=1, written_bytes=len(payload))
        return True

    def _sealed(
        self, job: Job, memory: memoryview, payload: memoryview, keys: TenantKeys, header: Header
    ) -> Header | None:
        """Encrypt a payload into ``memory``. Return its header, now with nonce and tag; None if it is abandoned."""
        if not job.claim():
            return None
        header = header._replace(nonce=secrets.token_bytes(_NONCE_BYTES))
        sealed = memory[: len(payload) + TAG_BYTES]
        associated = header.associated(header.identity)
        keys.data_key(header.part).encrypt_into(header.nonce, payload, associated, sealed)
        job.unclaim()
        return header._replace(tag=bytes(sealed[len(payload) :]))

    def _written(self, slot: int, memory: memoryview, header: Header) -> bool:
        """Clear the old header, then write the payload, then its header. Return whether the disk took all."""
        try:
            self._put_header(slot, None)
            self._slab.write_slot(slot, memory, header.payload_bytes)
            self._put_header(slot, header)
        except OSError as error:
            self._failed(error)
            return False
        self._errors_in_a_row = 0
        return True

    def _failed(self, error: OSError) -> None:
        """Count an error of the disk. After ``MOST_ERRORS`` in a row the tier is closed for a while."""
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= MOST_ERRORS:
            self._opens_at = self._clock() + self.settings.retry_s
            self._errors_in_a_row = 0
            log.error(
                "the disk tier is closed for %g s after %d errors, then tried again; the last: %s",
                self.settings.retry_s,
                MOST_ERRORS,
                error,
            )

    # --- parts

    def _require_folder(self) -> None:
        if self._is_closed:
            raise TierError("the disk tier is closed: open it again, then purge")

    def _owner_of(self, tenant: str) -> bytes:
        return bytes.fromhex(self.folder.tag(tenant))

    def _range(self, key: bytes | memoryview, segment: int) -> tuple[int, int]:
        """Return the tokens of a segment. Raises ArgumentError."""
        size = self.settings.segment_tokens
        most = len(key) // (size * TOKEN_BYTES)
        if not 0 <= segment < most:
            raise ArgumentError("segment", segment, f"a whole segment of the prompt, 0 to {most - 1}")
        return segment * size, (segment + 1) * size

    def _is_current(self, keys: TenantKeys, tenant: str) -> bool:
        """Whether the tenant wasn't purged since these keys were taken."""
        return self.folder.keys(tenant) is keys

    def _locator(self, keys: TenantKeys, namespace: Namespace, prefix: memoryview) -> bytes:
        digest = self._locator_start(keys, namespace)
        digest.update(xxh3_128(prefix).digest())
        return digest.digest()

    def _locator_start(self, keys: TenantKeys, namespace: Namespace) -> blake2b:
        """Return the start of locators. Another fingerprint has others: its records don't stand in the way."""
        digest = keys.locator(namespace).copy()
        digest.update(self.settings.fingerprint)
        return digest

    def _identity(
        self, keys: TenantKeys, namespace: Namespace, prefix: memoryview, segment: int, payload_bytes: int
    ) -> bytes:
        start, stop = self._range(prefix, segment)
        settings = self.settings
        found = segment_identity(
            namespace, keys.generation, settings.fingerprint, settings.scheme, prefix, start, stop
        )
        return keys.identity(found.packed(payload_bytes))

    def _leased(self, locator: bytes) -> tuple[int, Header] | None:
        with self._lock:
            slot = self._table.find(locator)
            if slot is None:
                return None
            self._table.lease(slot)
            self._table.touch(slot)
            return slot, self._slab.header(slot)

    def _drop(self, slot: int, header: Header) -> None:
        """Forget a record that didn't open. Its slot is leased, so nobody else writes it meanwhile."""
        with self._lock:
            is_there = self._table.find(header.locator) == slot
            if is_there:
                self._table.drop(slot)
        if is_there:
            try:
                self._put_header(slot, None)
            except OSError as error:
                self._failed(error)

    def _give_up(self, slot: int) -> None:
        with self._lock:
            self._table.give_up(slot)

    def _put_header(self, slot: int, header: Header | None) -> None:
        """Write a header, or clear it, in memory and in the file. Raises OSError; then it is cleared in memory.

        Headers are written by one thread at a time: a purge writes many at once, as they are in memory.
        """
        packed = bytes(HEADER_BYTES) if header is None else header.packed()
        with self._writing_headers:
            if header is None and self._slab.is_clear(slot):
                return
            self._slab.set_header(slot, packed)
            try:
                self._slab.write_header(slot, packed)
            except OSError:
                self._slab.set_header(slot, bytes(HEADER_BYTES))
                raise

    def _forget(self, tenant: str, fleet: int | None) -> int:
        raised = partial(self.folder.raise_generation, tenant, fleet)
        return self._forget_tag(self.folder.tag(tenant), raised, is_certain=fleet is None)

    def _forget_tag(self, tag: str, raised: Callable[[], bool], *, is_certain: bool) -> int:
        """Forget the records of the tenant with this tag; ``raised`` raises its generation, or finds it raised."""
        owner, keys = bytes.fromhex(tag), self.folder.keys_of(tag)
        with self._lock:
            self._purges[tag] += 1
            self._purging[tag] += 1
        try:
            forgotten = self._drop_owner(owner) if is_certain else set()
            if not raised():
                return 0
            forgotten |= self._drop_owner(owner)  # again: something may have been sealed in between
        finally:
            with self._lock:
                self._purging -= Counter([tag])  # which drops a count of 0
        if keys is not None and forgotten:
            self._clear_headers(np.array(sorted(forgotten)), keys.key_id)
        return len(forgotten)

    def _drop_owner(self, owner: bytes) -> set[int]:
        """Forget the records of an owner, in slices: nobody else waits long for the lock. Returns their slots."""
        dropped = set[int]()
        with self._lock:
            slots = self._table.slots_of(owner)
        for at in range(0, len(slots), _MOST_DROPPED):
            with self._lock:
                dropped.update(self._table.drop_of(owner, slots[at : at + _MOST_DROPPED]))
        return dropped

    def _clear_headers(self, slots: NDArray[np.int64], key_id: bytes) -> None:
        """Clear headers under a key that was destroyed, in one write. A slot may have another record by now."""
        headers = self._slab.headers
        with self._writing_headers:
            theirs = slots[headers["key_id"][slots] == np.void(key_id)]
            if len(theirs):
                headers[theirs] = np.zeros((), headers.dtype)
                self._slab.write_headers(theirs.tolist())

    def _restore(self) -> None:
        """Find the records that the folder has, the newest first. O(slots)."""
        headers, owners = self._slab.headers, self.folder.owners()
        whole = is_sealed(headers, self.settings.record_bytes)
        self._counts["torn"] = int((headers["magic"] != 0).sum() - whole.sum())
        at = np.flatnonzero(whole)
        at = at[np.argsort(headers["sequence"][at], kind="stable")[::-1]]
        owned = zip(
            at.tolist(),
            headers["locator"][at].tolist(),
            map(owners.get, headers["key_id"][at].tolist()),
            strict=True,
        )
        kept = self._table.restore(
            (slot, locator, owner) for slot, locator, owner in owned if owner is not None
        )
        self._counts["orphaned"] = len(at) - len(kept)
        origins = headers["origin"][kept]
        self.num_found = len(kept)
        self.num_foreign = int(((origins != 0) & (origins != self._origin)).sum())
        self._sequence = int(headers["sequence"][kept].max(initial=0))
        is_lost = np.ones(len(headers), np.bool_)
        is_lost[kept] = False
        headers[is_lost] = np.zeros((), headers.dtype)

    def _submit_sync(self) -> None:
        """Sync in a thread, if something was sealed since the last time."""
        if self._sealed_at_sync == self._num_sealed or self._is_fenced:
            return

        def work(_job: Job, _memory: memoryview) -> bool:
            try:
                self.sync()
            except (OSError, TierError) as error:
                log.warning("the disk tier could not sync: %s", error)
                return False
            return True

        self._sync_job = self._syncs.submit(work, is_load=True)

    def _submit(
        self, work: Work, reasons: Counter[str], *, is_load: bool, begun: list[Job] | None
    ) -> Job | None:
        """Begin a job, unless the tier is closed or too busy. What comes to nothing counts in ``reasons``."""
        is_open, job = self.state == "open", None
        if is_open:
            job = self._io.submit(
                work, is_load=is_load, unwanted=partial(self._count_in, reasons, "abandoned"), begun=begun
            )
        if job is None:
            self._count_in(reasons, "too_busy" if is_open else "closed")
        return job

    def _miss(self, reason: str) -> bool:
        return self._count_in(self._missed, reason)

    def _leave_out(self, reason: str) -> bool:
        return self._count_in(self._unstored, reason)

    def _count_in(self, reasons: Counter[str], reason: str) -> bool:
        with self._lock:
            reasons[reason] += 1
        return False

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)


refuse_copies(DiskRecords, "it holds threads and files. Make another in another folder")


def _origin(settings: DiskSettings, folder_id: bytes) -> int:
    """Return the ``origin`` of a tier's records, from 1 to 2³² - 1."""
    made_by = settings.fingerprint + settings.segment_tokens.to_bytes(8)
    return int.from_bytes(blake2b(made_by, digest_size=4, key=folder_id).digest()) or 1


def _zero(memory: memoryview) -> None:
    np.frombuffer(memory, np.uint8)[:] = 0
