"""Purges that a disk hasn't carried out yet, and what it must learn of the fleet before it may serve.

``Pending`` is what callers see of it.

    add, retry       a purged tenant's keys are destroyed; what fails is tried again until it is done
    add_all_but      the same for tenants that were removed while no process had the folder
    set_incarnation  the same for records of an earlier tenant of the same name
    is_known         the folder has applied a tenant's purges, those in the cache and those in the fleet
    reset            all records are forgotten, in a thread
    follows          the folder knows from which store the fleet's purges come, and isn't older than that store's notes
    notes            the store keeps a note of each generation that was raised here, so that an older copy of the folder
                     shows. A clear raises one of this folder alone

What fails is tried again at the engine's steps, or by time (``keep_retrying``).

Only threads of its own wait for the disk.

**Weights.** Version 0 is what the engine loaded at its start; the fingerprint of the records says what that is. A later
version gets a random number, so nothing of it is found after a restart.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from radixkv.clock import Clock, monotonic
from radixkv.config import MAX_WEIGHTS, Namespace
from radixkv.errors import CoordinationError, TierError
from radixkv.forks import OwnLock
from radixkv.index.cache import PrefixCache
from radixkv.tiers.disk.io_threads import IOThreads, Job

if TYPE_CHECKING:
    from radixkv.tiers.disk.records import DiskRecords

LEARNING_S: Final = 0.1
"""The longest time for which a request waits until the folder has applied its tenant's purges."""
FORGET_S: Final = 5.0
"""The longest time for which a purge or a clear waits for disks. It is repeated until it is done."""
NOTE_S: Final = 1.0
"""The longest time for which a purge or a clear waits until the fleet's store has noted it."""
RETRY_S: Final = 5.0
"""Seconds until the keys of a purged tenant are destroyed again, if that failed. The same for a fleet's store."""
_MAX_KNOWN: Final = 65_536
_MOST_NAMED: Final = 8
_FAILED: Final = Job.ended(False)

_log = logging.getLogger(__name__)


class _Learning(NamedTuple):
    """A try to learn these generations of a tenant. ``waits_until``: of requests, ``again_at``: if it fails."""

    job: Job
    waits_until: float
    again_at: float
    generations: tuple[int, int]


class Forgetful(Protocol):
    """A disk that may have to destroy records, which it doesn't serve meanwhile."""

    @property
    def owed(self) -> frozenset[str]:
        """Purged or cleared tenants whose records it may still have."""

    @property
    def num_removed(self) -> int:
        """How many tenants, removed before it was opened, may still have records here."""

    def retry(self, tenant: str) -> Job | None:
        """Begin to destroy what it has of a tenant. None if it can't."""

    def retry_removed(self) -> Job | None:
        """Begin to destroy what it has of removed tenants. None if it can't, or has nothing of them."""

    def problem(self, tenant: str) -> str:
        """Return why a tenant's records aren't destroyed yet; empty: those of removed tenants."""


class FolderNotes(Protocol):
    """A store that keeps notes of the folders of disks. From any thread; may wait. Raises CoordinationError."""

    def disk_notes(self, folder: bytes, tags: Sequence[bytes]) -> list[bytes | None]:
        """Return the notes of a folder with these tags; None for one that isn't there."""

    def note_disk(self, folder: bytes, notes: Mapping[bytes, bytes]) -> int:
        """Keep notes of a folder, by tag; return how many have no room."""


class Pending:
    """What tiers still have to destroy of what was forgotten. They serve nothing of it, and try until it is done.

    It is true as long as something is left. ``tenant``: of this tenant alone; None: of all. Any thread.
    """

    def __init__(self, disks: Iterable[Forgetful] = (), tenant: str | None = None) -> None:
        self.disks, self._tenant = tuple(disks), tenant

    @property
    def tenants(self) -> frozenset[str]:
        """Purged or cleared tenants whose records a disk may still have."""
        owed = frozenset[str]().union(*(each.owed for each in self.disks))
        return owed if self._tenant is None else owed & {self._tenant}

    @property
    def num_removed(self) -> int:
        """How many tenants that were removed before the start may still have records on a disk."""
        return sum(each.num_removed for each in self.disks) if self._tenant is None else 0

    def __bool__(self) -> bool:
        return bool(self.tenants or self.num_removed)

    def _problem(self, tenant: str) -> str:
        return ", ".join(
            each.problem(tenant)
            for each in self.disks
            if (tenant in each.owed if tenant else each.num_removed)
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Try again now, and wait for at most this time; None: ``FORGET_S``. Returns whether nothing is left.

        It goes on without anybody who waits.
        """
        jobs: list[Job | None] = []
        for disk in self.disks:
            jobs += [disk.retry(each) for each in self.tenants & disk.owed]
            if self._tenant is None:
                jobs.append(disk.retry_removed())
        ends_at = monotonic() + (FORGET_S if timeout_s is None else timeout_s)
        for job in jobs:
            if job is not None:
                job.poll(max(ends_at - monotonic(), 0.0))
        return not self

    def __str__(self) -> str:
        if not self:
            return "nothing is pending"
        told = [f"of {each!r}: {self._problem(each)}" for each in sorted(self.tenants)[:_MOST_NAMED]]
        if self.num_removed:
            told.append(f"of {self.num_removed} tenants that it doesn't keep: {self._problem('')}")
        return f"the disk still has to destroy the records {'; '.join(told)}. It serves nothing of them meanwhile"


class PendingPurges:
    """The purges that ``records`` still have to carry out, for tenants of ``cache``.

    See DiskTier for ``fleet_generation``.
    """

    def __init__(
        self,
        records: DiskRecords,
        cache: PrefixCache,
        fleet_generation: Callable[[str], int | None],
        clock: Clock,
    ) -> None:
        self._records, self._folder, self._cache, self._clock = records, records.folder, cache, clock
        self._fleet_generation = fleet_generation
        self._known: dict[str, tuple[int, int]] = {}
        """The generations, of the cache and of the salts, for which the folder is known to be up to date."""
        self._learning: dict[str, _Learning] = {}
        self._owed: dict[str, int] = {}
        """Tenants whose records must be destroyed, and a number of the last call that asked for it."""
        self._unadopted: set[str] = set()
        """Tenants whose records the folder has without an incarnation."""
        self._removed: set[str] = set()
        """Tags of tenants that have nothing here any more, and whose records must be destroyed."""
        self._removing: Job | None = None
        self._adopting: Job | None = None
        self._num_owed, self._owing = 0, OwnLock()
        self._retries_at = self._meets_at = clock()
        self._problems: dict[str, str] = {}
        """Why tenants are still owed."""
        self._meeting: Job | None = None
        self.notes: FolderNotes | None = None
        """The fleet's store, if it keeps notes."""
        self._noted_by = ""
        """The id of the store with whose notes the folder was compared."""
        self._noting: Job | None = None
        self._note_problem = ""
        """Why the store couldn't note something the last time."""
        self._noters = IOThreads(1, 1)
        self._admin = IOThreads(1, 1)
        self._removals: IOThreads | None = None
        self._must_reset = False
        self._resetting: Job | None = None
        self._retrying, self._is_over = OwnLock(), threading.Event()
        self._retries = threading.Thread(target=self._retry_by_time, name="radixkv-purges", daemon=True)
        self._weights = {0: 0}

    # --- questions

    def is_owed(self, tenant: str) -> bool:
        """Whether a tenant's records may still be on the disk, though it was purged, cleared or removed. O(1)."""
        return tenant in self._owed or (bool(self._removed) and self._folder.tag(tenant) in self._removed)

    def is_open_for(self, tenant: str) -> bool:
        """Whether the disk may be asked for a tenant's records now."""
        return not self.is_owed(tenant) and self._records.state == "open" and not self.is_resetting

    def known(self, tenant: str) -> tuple[int, int] | None:
        """Return the generations of a tenant that the folder knows, of the cache and of the salts."""
        return self._known.get(tenant)

    def may_wait(self, tenant: str) -> bool:
        """Whether a request may wait for what ``is_known`` began: not if one has already waited in vain."""
        learning = self._learning.get(tenant)
        return learning is not None and self._clock() < learning.waits_until

    def has_failed(self, tenant: str) -> bool:
        """Whether the last try to learn a tenant's purges has ended, and it isn't known what they are."""
        learning = self._learning.get(tenant)
        return learning is not None and learning.job.is_done and not learning.job.wait(0)

    def is_known(self, tenant: str) -> bool:
        """Whether the folder has applied the tenant's purges. If not, a thread begins to; once in ``RETRY_S`` again
        if it failed.

        Requests wait for the first try alone (``may_wait``), so a tenant whose purges can't be learned delays nobody.
        """
        fleet_generation = self._fleet_generation(tenant)
        if fleet_generation is None:
            return False  # learned now, it would outlive a crash before the cache has forgotten the tenant
        generations = self._cache.generation(tenant), fleet_generation
        if self._known.get(tenant) == generations:
            self._learning.pop(tenant, None)
            return True
        now = self._clock()
        before = self._learning.get(tenant) or _Learning(_FAILED, now + LEARNING_S, now, generations)
        is_news = before.generations != generations
        if before.job.is_done and (is_news or now >= before.again_at or before.job.wait(0)):
            job = self._admin.submit(lambda job, memory: self._learned(tenant, generations), is_load=True)
            if tenant not in self._learning and len(self._learning) >= _MAX_KNOWN:
                self._learning = {}
            again_at = now if job is None else now + RETRY_S
            self._learning[tenant] = _Learning(job or _FAILED, before.waits_until, again_at, generations)
        return False

    @property
    def is_resetting(self) -> bool:
        """Whether all records are to be forgotten, and aren't yet."""
        return self._must_reset or self._resetting is not None

    def on_disk(self, namespace: Namespace) -> Namespace:
        """Return the namespace of the records: later versions of the weights are of this process alone."""
        if namespace.weights not in self._weights:
            self._weights[namespace.weights] = 1 + secrets.randbelow(MAX_WEIGHTS)
        return namespace._replace(weights=self._weights[namespace.weights])

    # --- purges

    def add(self, tenant: str) -> None:
        """Serve nothing of a tenant, and destroy the keys of its records as soon as the disk can. By any thread."""
        with self._owing:
            self._num_owed += 1
            self._owed[tenant] = self._num_owed

    def retry(self, tenant: str) -> Job | None:
        """Begin to destroy the keys of a tenant that ``add`` named. Never waits.

        The job ends when that was done or has failed; what failed is tried again. None if the disk hangs.
        """
        return self._admin.submit(lambda job, memory: self._forgot(tenant), is_load=True)

    def set_incarnation(self, tenant: str, incarnation: str) -> None:
        """Serve only records of this incarnation of a tenant, if it isn't empty. Any thread; never waits.

        Records of another one are owed. Records without one are adopted, in a thread, before they are served.
        """
        self._folder.set_incarnation(tenant, incarnation)
        theirs = self._folder.incarnation_of_keys(tenant)
        if not incarnation or theirs is None or theirs == incarnation:
            return
        if theirs:
            _log.info("the disk forgets what an earlier tenant %r has, which was removed", tenant)
            self.add(tenant)
            self.retry(tenant)
        else:
            self._unadopted.add(tenant)
            self._begin_to_adopt()

    def add_all_but(self, tenants: Collection[str]) -> None:
        """Owe the records of all other tenants in the folder, and begin to destroy their keys. Before the disk serves.

        What fails is repeated. A thread of its own does it, so it delays nobody's purge.
        """
        self._removed = self._records.tags_but(tenants)
        if self._removed:
            _log.info("the disk forgets %d tenants that it doesn't keep any more", len(self._removed))
            self._forget_removed()

    def retry_removed(self) -> Job | None:
        """Begin to destroy the keys of what ``add_all_but`` found. Returns what runs."""
        self._forget_removed()
        return self._removing

    @property
    def num_removed(self) -> int:
        """How many of the tenants that ``add_all_but`` found may still have records here. None is served."""
        return len(self._removed)

    @property
    def owed(self) -> frozenset[str]:
        """Tenants whose records may still be on the disk, though it was to destroy them. None is served."""
        with self._owing:
            return frozenset(self._owed)

    @property
    def num_owed(self) -> int:
        """How many tenants' records may still be on the disk, though they were purged, cleared or removed."""
        return len(self._owed) + len(self._removed)

    def problem(self, tenant: str) -> str:
        """Return why an owed tenant isn't paid yet; empty: why the removed ones aren't."""
        return self._problems.get(tenant, "the disk doesn't answer")

    # --- all records

    def retry_due(self) -> None:
        """Begin again what failed, if it is time: a reset, and what is owed. Any thread; never waits for the disk."""
        with self._retrying:
            self._reset_if_due()
            self._retry_owed()

    def keep_retrying(self) -> None:
        """Retry, and sync, by time too, in a thread, until ``close``: an engine without requests makes no steps."""
        self._retries.start()

    def follows(self, store_id: str) -> bool:
        """Whether the folder knows that the fleet's purges come from this store; empty: from none. Never waits.

        If not, a thread lets it forget what another store's purges were to destroy (``DiskRecords.meet_store``), and
        what was forgotten before, if the folder is an older copy of itself (``compare_notes``).
        """
        if self._meeting is not None and not self._meeting.is_done:
            return False
        if not store_id or self._noted_by == store_id:
            return True
        if self._clock() >= self._meets_at:
            self._meets_at = self._clock() + RETRY_S
            self._meeting = self._admin.submit(lambda job, memory: self._met(store_id), is_load=True)
        return False

    def reset(self) -> None:
        """Forget all records, in a thread. Until that is done, the disk is closed to everybody."""
        with self._retrying:
            self._must_reset = True
            self._reset_if_due()

    def know_generations(self) -> None:
        """Serve from now on: all purges of the fleet are known, by ``fleet_generation``."""
        self._records.apply_generations({})

    def close(self, timeout_s: float) -> bool:
        """End the threads. Returns whether they ended within the time."""
        self._is_over.set()
        if self._retries.is_alive():
            self._retries.join()
        ends_at, threads = self._clock() + timeout_s, [self._admin]
        if self._removals is not None:
            threads.append(self._removals)
        have_ended = [each.close(max(ends_at - self._clock(), 0.0)) for each in threads]
        self._begin_to_note()
        self._noters.close(min(max(ends_at - self._clock(), 0.0), NOTE_S))  # it uses nothing of the folder
        return all(have_ended)

    # --- inside

    def _retry_by_time(self) -> None:
        while not self._is_over.wait(RETRY_S):
            self.retry_due()
            self._records.maintain()

    def _met(self, store_id: str) -> bool:
        try:
            self._records.meet_store(store_id)
        except (OSError, TierError) as error:
            _log.error("the disk can't forget what it knew from another store, and stays closed: %s", error)
            return False
        try:
            self._compare_notes()
        except (OSError, TierError, CoordinationError) as error:
            _log.error("the disk can't tell whether its folder is an older copy, and stays closed: %s", error)
            return False
        self._noted_by = store_id
        self._begin_to_note()
        return True

    def _compare_notes(self) -> None:
        if self.notes is not None:
            tags = self._folder.purged_tags()
            notes = self.notes.disk_notes(self._folder.id, [bytes.fromhex(tag) for tag in tags])
            self._records.compare_notes(dict(zip(tags, notes, strict=True)))

    def _begin_to_note(self) -> Job | None:
        """Let the store note what was forgotten here, in a thread of its own, if there is such a store."""
        if not self._noted_by or self.notes is None or not self._folder.has_unnoted:
            return None
        self._noting = self._noters.submit(lambda job, memory: self._note(), is_load=True)
        return self._noting

    def _wait_until_noted(self) -> None:
        """Do so, and wait for it in a thread, unless the store didn't answer the last time."""
        job = self._begin_to_note()
        if job is not None and not self._note_problem and not job.poll(NOTE_S):
            self._note_problem = "it doesn't answer"

    def _note(self) -> bool:
        """Let the store note what was forgotten here. Returns whether that is done; else it is tried again."""
        notes = self._folder.unnoted()
        if self.notes is None or not notes:
            return True
        given = {bytes.fromhex(tag): note for tag, note in notes.items()}
        try:
            num_left_out = self.notes.note_disk(self._folder.id, given)
        except CoordinationError as error:
            if self._note_problem != str(error):
                _log.warning("the store can't note what the disk forgot, which is tried again: %s", error)
            self._note_problem = str(error)
            return False
        self._note_problem = ""
        if num_left_out:
            text = "the fleet's store has no room to note %d tenants: an older copy of the disk's folder has them again"
            _log.error(text, num_left_out)
        self._folder.noted(notes)
        return True

    def _learned(self, tenant: str, generations: tuple[int, int]) -> bool:
        """Learn a tenant's purges, in a thread. Returns whether that is done."""
        try:
            return self._learn(tenant, generations)
        except (OSError, TierError) as error:
            if len(self._problems) >= _MAX_KNOWN:
                self._problems = {
                    each: told for each, told in self._problems.copy().items() if each in self._owed
                }
            if self._problems.get(tenant) != str(error):
                _log.error(
                    "the disk can't learn the purges of tenant %r, and has nothing of it: %s", tenant, error
                )
            self._problems[tenant] = str(error)
            return False

    def _learn(self, tenant: str, generations: tuple[int, int]) -> bool:
        """Purge the tenant in the folder, if it was purged in the cache or in the fleet since. In a thread."""
        self._records.adopt(tenant)
        before = self._known.get(tenant, (0, generations[1]))
        if before[0] < generations[0]:
            self._records.purge(tenant)
        if generations[1]:
            self._records.learn_generation(tenant, generations[1])
        self._begin_to_note()
        if len(self._known) >= _MAX_KNOWN:
            # a purge in the cache isn't to be repeated, because it would destroy what was stored since
            self._known = {each: known for each, known in self._known.copy().items() if known[0]}
        self._known[tenant] = generations
        if tenant not in self._owed:
            self._problems.pop(tenant, None)
        return True

    def _forgot(self, tenant: str) -> bool:
        """Destroy the keys of a tenant, in a thread. Returns whether that is done."""
        asked, generation = self._owed.get(tenant), self._cache.generation(tenant)
        if asked is None:
            return True
        try:
            self._records.purge(tenant)
        except (OSError, TierError) as error:
            if self._problems.get(tenant) != str(error):
                _log.error("the disk can't forget tenant %r, which is tried again: %s", tenant, error)
            self._problems[tenant] = str(error)
            return False
        self._problems.pop(tenant, None)
        self._removed.discard(self._folder.tag(tenant))
        known = self._known.get(tenant)
        if known is not None:
            self._known[tenant] = generation, known[1]
        with self._owing:
            if self._owed.get(tenant) == asked:
                del self._owed[tenant]
        self._wait_until_noted()
        return True

    def _forget_removed(self) -> None:
        """Begin to destroy the keys of all ``_removed``, unless that runs."""
        if self._removed and (self._removing is None or self._removing.is_done):
            self._removals = self._removals or IOThreads(1, 1)
            self._removing = self._removals.submit(lambda job, memory: self._forgot_removed(), is_load=True)

    def _forgot_removed(self) -> bool:
        """Destroy the keys of all ``_removed``, in a thread. Returns whether that is done."""
        problem: Exception | None = None
        for tag in sorted(self._removed.copy()):
            try:
                self._records.purge_tag(tag)
            except (OSError, TierError) as error:
                problem = error
            else:
                self._removed.discard(tag)
        if problem is None:
            self._problems.pop("", None)
            return True
        if self._problems.get("") != str(problem):
            text = "the disk can't forget %d tenants that it doesn't keep, which is tried again: %s"
            _log.error(text, len(self._removed), problem)
        self._problems[""] = str(problem)
        return False

    def _begin_to_adopt(self) -> None:
        """Let the folder adopt all ``_unadopted``, unless that runs."""
        if self._unadopted and (self._adopting is None or self._adopting.is_done):
            self._adopting = self._admin.submit(lambda job, memory: self._adopted(), is_load=True)

    def _adopted(self) -> bool:
        """Let the folder adopt all ``_unadopted``, in a thread. Returns whether that is done."""
        while self._unadopted:
            tenant = next(iter(self._unadopted))
            try:
                self._records.adopt(tenant)
            except (OSError, TierError) as error:
                _log.error(
                    "the disk has nothing of tenant %r, as it can't note whose it is: %s", tenant, error
                )
                return False
            self._unadopted.discard(tenant)
        return True

    def _retry_owed(self) -> None:
        """Try again what failed, once in ``RETRY_S``. It queues behind a call that hangs."""
        is_behind = bool(self._owed or self._removed or self._unadopted) or self._folder.has_unnoted
        if is_behind and self._clock() >= self._retries_at:
            if self._noting is None or self._noting.is_done:
                self._begin_to_note()
            self._begin_to_adopt()
            self._forget_removed()
            self._retries_at = self._clock() + RETRY_S
            for tenant in self.owed:
                self.retry(tenant)

    def _forgot_all(self) -> bool:
        """Forget all records, in a thread. Raises as ``DiskRecords.purge_all``."""
        try:
            return self._records.purge_all()
        finally:
            self._wait_until_noted()

    def _reset_if_due(self) -> None:
        """Begin a reset that is due, and end one that is over. One that failed is repeated."""
        if self._resetting is not None and self._resetting.is_done:
            self._must_reset |= not self._resetting.wait(0)
            self._resetting = None
        if self._must_reset and self._resetting is None:
            self._resetting = self._admin.submit(lambda job, memory: self._forgot_all(), is_load=True)
            self._must_reset = self._resetting is None
