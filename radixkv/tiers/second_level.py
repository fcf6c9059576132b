"""A second level of KV in host memory, behind an engine's own cache: what is saved and loaded. Imports nothing of vLLM.

    an engine's scheduler                         here
    how much more of a prompt could be loaded     found
    the engine allocated blocks for it            load        leases the slots until the load has ended
    a request computes up to a token              save        whole blocks that aren't here yet
    the work of all workers in this step          take_work   (``host_blocks.StepWork``)
    what became of it                             reported, loads_ended
    the request ended                             forget

An engine that knows namespaces and keys itself saves by ``save_key``, and loads by itself.

The index is a PrefixCache, whose entries have slots of host memory, the same on each worker (``host.index``). So
tenants, policies and the audit are those of the first level. ``radixkv.engines.vllm_connector`` is the shell that vLLM
loads.

An engine that tells what it evicts calls ``demote``. Then what both levels hold takes host memory only as long as there
is some to spare.

**Complete saves only.** A step's blocks are committed after all workers have reported the step as saved. Until then no
load finds them; other requests don't save them again. If blocks that another connector loads are wrong, no running
step is committed.

**Loads** happen between steps: a request waits until its load has ended, and computes afterwards. Requests of one
namespace never load a slot at the same time: the second waits, and finds it in the engine's own cache. If a
load fails, the index forgets its blocks and everything behind them. The request asks again, and computes.

**A disk** may lie below (``disk_level``): what it has is brought into slots before ``found`` answers.

**A purge** or a reset reaches loads that no worker has begun: they fail. A request that computes on what was there
before saves nothing. Slots that change tenant are zeroed first, with
``scrub="always"`` all slots as soon as they are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias, get_args

import numpy as np

from radixkv.clock import Clock, monotonic
from radixkv.config import Namespace, Tenant
from radixkv.configuration.private_files import read_secrets
from radixkv.errors import CapacityError, ConfigError, LeaseError
from radixkv.index.leases import Lease
from radixkv.index.match import Match
from radixkv.index.sequence import Sequence as Held
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.tenancy.request_keys import RequestFacts, RequestKey, RequestKeys
from radixkv.tenancy.salt import SaltReader
from radixkv.tiers.host.index import NO_SLOT, ONE_MORE, HostIndex, Scrub
from radixkv.tiers.host.memory import NEVER, Slots, StepReport, StepWork
from radixkv.tiers.settings import bytes_of, rate_of
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.storage.plan import BlockIds
    from radixkv.tiers.disk_level import DiskLevel

MAX_SLOTS: Final = 2**31 - 1
MAX_STAGED_BLOCKS: Final = 256
"""Rows of host memory for blocks that come from the disk; at most a quarter of the slots, at least one."""
Blocks: TypeAlias = "Sequence[int] | BlockIds"
"""Ids of the engine's blocks."""
_NO_BLOCKS: Final = np.empty(0, np.int64)
_NO_WORK: Final = StepWork(0)


@dataclass(frozen=True, slots=True)
class SecondLevelSettings:
    """Settings of the second level. Raises ConfigError.

    - ``host_memory``: bytes on each worker, or a text such as ``"8GiB"``. ``host.memory``: blocks, in its place.
    - ``policy``: the eviction policy. ``scrub``: see CacheConfig.
    - ``keys``: file of the engine's keys (``radixkv keys derive``): tenants come from salts. ``anonymous``: whether
      requests without such a salt are served.
    - ``tenants``: settings of tenants from the start on, by the fleet's names: fields of ``config.Tenant``; needs
      ``keys``.
    - ``model``: identity of model and tokenizer in namespaces.
    - ``control``: folder of a control channel; needs ``keys``.
    - ``disk``: folder of a disk tier below. ``disk_size``: its bytes, or a text such as ``"200GiB"``. ``fleet_secret``:
      file of the secret under which its keys are sealed. All three, or none. ``previous_secrets``: files of previous
      ones, between commas.
    - ``disk_writes``: the most that the disk tier writes on average, first come, first served: ``"2TB/day"``.
    """

    host_memory: int | str | None = None
    host_blocks: int | None = None
    policy: str = "learned"
    scrub: Scrub = "cross-tenant"
    keys: str | None = None
    anonymous: bool = True
    tenants: Mapping[str, Mapping[str, Any]] | None = None
    model: str = "vllm"
    control: str | None = None
    disk: str | None = None
    disk_size: int | str | None = None
    disk_writes: str | None = None
    fleet_secret: str | None = None
    previous_secrets: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Return settings by name. Raises ConfigError for other names too."""
        names = [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                raise ConfigError("kv_connector_extra_config", name, f"only {', '.join(names)}")
        return cls(**given)

    def __post_init__(self) -> None:
        if (self.host_memory is None) == (self.host_blocks is None):
            allowed = "one of the two: bytes, or blocks, of host memory"
            raise ConfigError("host_memory, host_blocks", (self.host_memory, self.host_blocks), allowed)
        if self.host_blocks is not None and not _is_count(self.host_blocks):
            raise ConfigError("host_blocks", self.host_blocks, f"an integer from 1 to {MAX_SLOTS}")
        if self.host_memory is not None:
            bytes_of("host_memory", self.host_memory)
        for name in ("policy", "model"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(name, getattr(self, name), "a text")
        for name in ("keys", "control", "disk", "fleet_secret", "previous_secrets"):
            value = getattr(self, name)
            if not isinstance(value, str | None) or value == "":
                is_shown = name in ("control", "disk") or value == ""  # others may be the secret itself
                raise ConfigError(name, value if is_shown else "…", "a path")
        if not isinstance(self.anonymous, bool):
            raise ConfigError("anonymous", self.anonymous, "true or false")
        if self.scrub not in get_args(Scrub):
            raise ConfigError("scrub", self.scrub, f"one of {', '.join(get_args(Scrub))}")
        if self.control is not None and self.keys is None:
            raise ConfigError("control", self.control, "with keys, of the purpose 'control'")
        if self.tenants is not None:
            self._check_tenants(self.tenants)
        below = (self.disk, self.disk_size, self.fleet_secret)
        if None in below and below != (None, None, None):
            raise ConfigError("disk, disk_size, fleet_secret", below[:2], "all three, or none")
        if self.previous_secrets is not None and self.fleet_secret is None:
            raise ConfigError("previous_secrets", "…", "with fleet_secret")
        if self.disk_size is not None:
            bytes_of("disk_size", self.disk_size)
        if self.disk_writes is not None:
            rate_of("disk_writes", self.disk_writes)
            if self.disk is None:
                raise ConfigError("disk_writes", self.disk_writes, "with disk")

    def _check_tenants(self, tenants: object) -> None:
        if self.keys is None or not isinstance(tenants, Mapping):
            allowed = """settings by name, such as {"acme": {"mode": "strict", "guaranteed_blocks": 64}}, with keys"""
            raise ConfigError("tenants", tenants, allowed)
        names = [each.name for each in fields(Tenant) if each.name != "id"]
        for tenant, given in tenants.items():
            if not isinstance(given, Mapping) or not given.keys() <= set(names):
                raise ConfigError(f"tenants[{tenant!r}]", given, f"only {', '.join(names)}, by name")

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk tier; 0 without one."""
        return 0 if self.disk_size is None else bytes_of("disk_size", self.disk_size)

    @property
    def disk_bytes_per_s(self) -> float | None:
        """The most that the disk tier writes on average; None for no bound."""
        return None if self.disk_writes is None else rate_of("disk_writes", self.disk_writes)

    def secrets(self) -> list[bytes]:
        """Read the fleet's secrets, the current one first. Warns of files that others can access.

        Raises ConfigError.
        """
        assert self.fleet_secret is not None
        previous = () if self.previous_secrets is None else self.previous_secrets.split(",")
        files = [("previous_secrets", each) for each in previous]
        return read_secrets([("fleet_secret", self.fleet_secret), *files])

    def num_slots(self, block_bytes: int) -> int:
        """Return the number of slots, for blocks of so many bytes on a worker. Raises ConfigError if none fits."""
        if self.host_memory is None:
            assert self.host_blocks is not None
            return self.host_blocks
        num_slots = bytes_of("host_memory", self.host_memory) // block_bytes
        if not _is_count(num_slots):
            raise ConfigError("host_memory", self.host_memory, f"at least a block, {block_bytes:,} bytes")
        return num_slots


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SLOTS


class _Request(RequestKey):
    """A request that the engine has named.

    ``num_local``: tokens in the engine's own cache. ``num_saved``: leading blocks that are here, or were handed to a
    save. ``generation``: its tenant's.
    """

    __slots__ = ("generation", "num_local", "num_saved")

    def __init__(self, namespace: Namespace, facts: RequestFacts, block_size: int, generation: int) -> None:
        super().__init__(namespace, facts, block_size)
        self.num_local = self.num_saved = 0
        self.generation = generation


class _Load(NamedTuple):
    """A load, from its decision until all workers have ended it. ``lease``: None if nothing could be leased.

    ``num_failed``: the last blocks of it that a worker couldn't load.
    """

    namespace: Namespace
    generation: int
    key: bytes
    start: int
    slots: Slots
    lease: Lease | None
    blocks: Slots
    num_failed: int = 0


class _Save(NamedTuple):
    """Blocks of a prompt that a step saves, at positions ``at``, with their ``entries``. ``key``: up to the last.

    ``start``: the first block that the disk may not have, at most the first of them.
    ``held``: holds the entries. A sequence commits them when they are saved; those of a lease are committed.
    ``is_above``: whether the engine has these blocks too.
    """

    request_id: str
    namespace: Namespace
    generation: int
    key: bytes
    start: int
    at: Slots
    entries: Slots
    held: Held | Lease
    is_above: bool


class SecondLevel:
    """The index of ``num_slots`` slots for blocks of ``block_size`` tokens, which ``num_workers`` workers hold.

    ``salts``: reads whose request it is. None: all requests are of one tenant, by their salts in namespaces.

    ``num_above``: blocks of an engine that calls ``demote`` before it evicts; 0 for another one.

    ``weights`` is the version of the model's weights, in the namespaces of requests that begin now.

    Raises ConfigError. One thread uses it, except for what a control channel does with ``cache``.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        *,
        model: str = "vllm",
        salts: SaltReader | None = None,
        policy: str = "learned",
        scrub: Scrub = "cross-tenant",
        num_workers: int = 1,
        num_above: int = 0,
        clock: Clock = monotonic,
    ) -> None:
        self.index = HostIndex(
            num_slots, block_size, num_above=num_above, policy=policy, scrub=scrub, clock=clock
        )
        self.cache, self._has_above = self.index.cache, num_above > 0
        self._size, self._num_workers = block_size, num_workers
        self._keys = RequestKeys(model, salts)
        self._requests: dict[str, _Request] = {}
        self._stamps = np.zeros(num_slots, np.int64)
        self._is_loading = np.zeros(num_slots, np.bool_)
        self._loads: dict[str, _Load] = {}
        self._new_loads: list[str] = []
        self._saves: dict[int, list[_Save]] = {}
        self._reports: dict[int, int] = {}
        self._work, self._taken = StepWork(1), _NO_WORK
        self._failed: set[int] = set()
        """Steps of which nothing is kept."""
        self._save_blocks: list[Slots] = []
        self._save_slots: list[Slots] = []
        self.weights = 0
        self.disk: DiskLevel | None = None
        """Set before the first request."""
        self.counts = dict.fromkeys(("loads", "failed_loads", "refused_saves", "refused_requests"), 0)
        self._num_lost = 0

    # --- requests

    def found(self, request_id: str, facts: RequestFacts, ids: Sequence[int], num_local: int) -> int | None:
        """Return how many tokens behind the first ``num_local`` could be loaded, always less than all of ``ids``.

        None if another request loads some of them, or they come from the disk: ask again after the step.
        """
        request = self._requests.get(request_id)
        if request is None or not self._is_current(request.namespace, request.generation):
            namespace, facts = self._keys.read(facts, self.weights)
            request = _Request(namespace, facts, self._size, self.cache.generation(namespace.tenant))
            self._requests[request_id] = request
        request.read(ids)
        request.num_local = num_local
        if request.facts.is_private:
            return 0
        key = request.between(0, self._usable(len(ids)))
        if request.facts.looks_up and self.disk is not None:
            promotions = self.disk.promotions
            if promotions.is_waiting(request_id, request.namespace, request.generation, key, num_local):
                return None
        match = self.cache.match(request.namespace, key)
        request.num_saved = match.num_blocks
        num_found = self._num_loadable(match, num_local) if request.facts.looks_up else 0
        if num_found == 0 and self.disk is not None:
            self.disk.promotions.used(request_id, 0)
        return num_found

    def load(self, request_id: str, blocks: Sequence[int], num_tokens: int) -> None:
        """Load ``num_tokens`` tokens, as ``found`` said, to the engine's ``blocks``: all blocks of the request.

        What was evicted or purged since then fails.
        """
        request = self._requests[request_id]
        start, stop = request.num_local // self._size, (request.num_local + num_tokens) // self._size
        namespace, key = request.namespace, request.between(0, stop * self._size)
        to = np.array(blocks[start:stop], np.int64)
        slots = np.full(len(to), NO_SLOT, np.int64)
        try:
            lease = self.cache.match_and_lease(namespace, key)
        except CapacityError:
            lease = None
        if lease is not None:
            with self._released_after_error(lease):
                found = self.index.slots_of(lease.block_ids[start : start + len(to)].astype(np.int64))
                slots[: len(found)] = found
                self._is_loading[slots[slots != NO_SLOT]] = True
                self.index.use(slots[slots != NO_SLOT])
        self._loads[request_id] = _Load(namespace, request.generation, key, start, slots, lease, to)
        self._new_loads.append(request_id)
        self.counts["loads"] += 1

    def save(
        self, request_id: str, ids: Sequence[int], num_computed: int, blocks: Callable[[], Blocks]
    ) -> None:
        """Save whole blocks among the first ``num_computed`` tokens, which exist at the end of the present step.

        ``blocks``: returns the engine's blocks of the request, in order. O(1) unless a block is full since the last
        call.
        """
        request = self._requests.get(request_id)
        if request is None or request.facts.is_private:
            return
        stop = min(num_computed, len(ids)) // self._size
        if stop <= request.num_saved:
            return
        request.read(ids)
        if request.facts.is_private:
            return
        before, request.num_saved = request.num_saved, stop
        namespace, generation = request.namespace, request.generation
        self.save_key(
            namespace,
            generation,
            request.between(0, stop * self._size),
            blocks,
            lambda: self._is_current(namespace, generation),
            request_id,
            before,
        )

    def save_key(
        self,
        namespace: Namespace,
        generation: int,
        key: bytes,
        blocks: Callable[[], Blocks],
        is_current: Callable[[], bool],
        request_id: str = "",
        before: int = 0,
    ) -> None:
        """Save the whole blocks of a key that aren't here. The first ``before`` were here, or are being saved.

        ``is_current``: whether nothing was purged since the KV was begun. If all of it is here: O(1), or O(blocks)
        with an engine that calls ``demote``.
        """
        stop = len(key) // (self._size * TOKEN_BYTES)
        if self.cache.match_ahead(namespace, key + ONE_MORE) >= stop * self._size:
            if self._has_above:
                self.index.touch(namespace, key, np.asarray(blocks()[:stop]))
            return
        try:
            sequence = self.cache.open(namespace, key, ahead=True)
        except CapacityError:
            self.counts["refused_saves"] += 1
            return
        with self._released_after_error(sequence):
            start = (sequence.num_cached_tokens + sequence.num_ahead_tokens) // self._size
            self._save_missing(
                namespace, generation, key, start, sequence, blocks, is_current, request_id, before
            )

    def _save_missing(
        self,
        namespace: Namespace,
        generation: int,
        key: bytes,
        start: int,
        sequence: Held,
        blocks: Callable[[], Blocks],
        is_current: Callable[[], bool],
        request_id: str,
        before: int,
    ) -> None:
        """Save the blocks of a key from block ``start`` on. It takes the sequence over."""
        stop = len(key) // (self._size * TOKEN_BYTES)
        entries = sequence.block_table[start:].astype(np.int64)
        slots = source = _NO_BLOCKS
        leans = sequence.num_ahead_tokens > 0  # on a step that isn't done
        try:
            sequence.computing(stop * self._size, step=self._work.step)
            if is_current():
                slots = self.index.give(namespace.tenant, entries, may_evict=not self._has_above)
                source = np.asarray(blocks()[start:stop], np.int64)
        except LeaseError:  # purged since it was opened
            pass
        if self._has_above and len(source):
            self.index.join(source, entries)
            if not len(slots) and not leans:
                sequence.commit(stop * self._size)  # known, without a copy
        if not len(slots):
            sequence.release()
            return
        source, entries, is_above = source[: len(slots)], entries[: len(slots)], self._has_above
        at = np.arange(start, start + len(slots))
        save = _Save(
            request_id, namespace, generation, key, min(before, start), at, entries, sequence, is_above
        )
        self._begin_save(save, slots, source)

    def demote(self, namespace: Namespace, key: bytes, start: int, blocks: BlockIds) -> None:
        """Save the engine's blocks of a key from block ``start`` on, which leave it, unless they are here.

        What finds no slot is lost: it is computed again. O(nodes on the path + blocks).
        """
        lease = self.index.hold(namespace, key)
        if lease is None:
            self._num_lost += len(blocks)
            return
        with self._released_after_error(lease):
            entries = lease.block_ids[start : start + len(blocks)].astype(np.int64)
            self.index.demoted(entries)
            at = self.index.lacking(entries)
            slots = self.index.give(namespace.tenant, entries[at], may_evict=True) if len(at) else at
            self._num_lost += len(at) - len(slots)
            if not len(slots):
                lease.release()
                return
            at = at[: len(slots)]
            generation = self.cache.generation(namespace.tenant)
            first = start + int(at[0])
            save = _Save("", namespace, generation, key, first, start + at, entries[at], lease, False)
            self._begin_save(save, slots, blocks[at].astype(np.int64))

    def _begin_save(self, save: _Save, slots: Slots, source: Slots) -> None:
        """Begin a save, which has what it holds from now on."""
        self._save_blocks.append(source)
        self._save_slots.append(slots)
        self._stamps[slots] = self._work.step
        self._saves.setdefault(self._work.step, []).append(save)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended. Its loads and saves that run go on."""
        self._requests.pop(request_id, None)
        if self.disk is not None:
            self.disk.promotions.forget(request_id)

    # --- steps

    def fill(self, slots: Slots, rows: Slots) -> None:
        """Copy rows of staging memory into slots in the present step, before its loads. For ``DiskLevel``."""
        work = self._work
        work.fill_slots, work.fill_rows = np.append(work.fill_slots, slots), np.append(work.fill_rows, rows)
        self._stamps[slots] = work.step

    def take_work(self, num_tokens: int | None = 0) -> StepWork:
        """Return what the workers do in the present step, and begin the next step.

        ``num_tokens``: tokens that the step computes; None if the engine computes elsewhere, at other times.
        """
        work = self._work
        if self.disk is not None:
            self.disk.begin_step(work.step, num_tokens)
        for request_id in self._new_loads:
            load = self._loads[request_id]
            is_there = self._is_current(load.namespace, load.generation) & (load.slots != NO_SLOT)
            stamps = np.where(is_there, self._stamps[load.slots], NEVER)
            work.loads += ((request_id, len(load.blocks)),)
            work.load_slots = np.append(work.load_slots, load.slots)
            work.load_stamps = np.append(work.load_stamps, stamps)
            work.load_blocks = np.append(work.load_blocks, load.blocks)
        if self._saves.get(work.step):
            work.save_slots = np.concatenate(self._save_slots)
            work.save_blocks = np.concatenate(self._save_blocks)
            self._reports[work.step] = 0
        self._taken = work
        work.zero = self.index.take_to_zero(work.fill_slots)
        self._new_loads, self._save_blocks, self._save_slots = [], [], []
        self._work = StepWork(work.step + 1)
        return work

    def work_done(self) -> None:
        """Take that all that was taken was done. Only ``undo`` needs to know."""
        self._taken = _NO_WORK

    def reported(self, report: StepReport, invalid: Iterable[int] = ()) -> None:
        """Take the workers' report: commit what all of them saved, forget what couldn't be loaded.

        ``invalid``: the engine's blocks that were reported as not loaded, by whomever. Blocks that this level didn't
        load may be read by running steps, so nothing of these is committed.
        """
        if self.disk is not None:
            self.disk.patience.computed(report.ended)
            self.disk.filled(report.filled)
        others = set(invalid)
        for request_id, position in report.failed.items():
            others.difference_update(self._load_failed(request_id, position).tolist())
        if others:
            self._fail_running()
        for step in report.unsaved:
            self._fail(step)
        for step, num_workers in report.ended.items():
            if step in self._reports:
                self._reports[step] += num_workers
                if self._reports[step] >= self._num_workers:
                    self._end(step)

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """Release the slots of loads that all workers have ended. Ids without a load are ignored."""
        for request_id in request_ids:
            load = self._loads.pop(request_id, None)
            if load is not None and load.lease is not None:
                self._release_load(load, load.lease)
            if load is not None and self.disk is not None:
                promotions = self.disk.promotions  # the last blocks came from there
                num_brought = min(promotions.num_brought(request_id), len(load.blocks))
                promotions.used(request_id, max(num_brought - load.num_failed, 0))

    def _release_load(self, load: _Load, lease: Lease) -> None:
        slots = load.slots[load.slots != NO_SLOT]
        self._is_loading[slots] = False
        self.index.unuse(slots)
        lease.release()

    def reset(self, weights: int | None = None) -> bool:
        """Forget everything: the model's weights may be others. Returns False if a load still runs.

        ``weights``: their version; None for the next number.
        """
        self.weights = self.weights + 1 if weights is None else weights
        for namespace in self.cache.namespaces():
            self.cache.clear(namespace)
        self._fail_running()
        if self.disk is not None:
            self.disk.reset()
        return not self._loads

    @property
    def num_running(self) -> int:
        """Loads and steps with saves that haven't ended."""
        return len(self._loads) + len(self._reports)

    def undo(self) -> None:
        """Undo what was decided and isn't done, after an error: nothing of it is found, and nothing is held for it.

        What was taken last may be done in part, unless ``work_done`` was called. The workers must have dropped it.
        """
        self._fail_running()
        for saves in self._saves.values():
            while saves:
                saves.pop().held.release()
        while self._loads:
            _, load = self._loads.popitem()
            if load.lease is not None:
                self._release_load(load, load.lease)
        self._saves, self._reports, self._failed = {}, {}, set()
        self._new_loads, self._save_blocks, self._save_slots = [], [], []
        self._is_loading[:] = False
        unsure = np.concatenate((self._taken.fill_slots, self._work.fill_slots))
        self.index.undo(unsure, self._taken.zero)
        self._work, self._taken = StepWork(self._work.step + 1), _NO_WORK
        if self.disk is not None:
            self.disk.undo()

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        taken, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        taken["refused_requests"], self._keys.num_refused = self._keys.num_refused, 0
        if self.disk is not None:
            taken |= self.disk.take_counts()
        return taken

    def tiers(self) -> dict[str, dict[str, float]]:
        """Return what host memory and a disk have, by the names of ``Ladder.counts``. Any thread.

        What was loaded and saved counts in ``take_counts``.
        """
        found: dict[str, dict[str, float]] = {
            "host": {"capacity_blocks": self.index.num_slots, "resident_blocks": self.index.num_used}
        }
        if (disk := self.disk) is not None:
            found["disk"] = disk.counts()
        return found

    def take_lost(self) -> int:
        """Return how many blocks left the engine and found no slot, since the last call."""
        lost, self._num_lost = self._num_lost, 0
        return lost

    # --- inside

    @contextmanager
    def _released_after_error(self, held: Held | Lease) -> Iterator[None]:
        """Release it after an error in here, unless a save has it by then."""
        try:
            yield
        except BaseException:
            if not any(save.held is held for saves in self._saves.values() for save in saves):
                held.release()
            raise

    def _num_loadable(self, match: Match, num_local: int) -> int | None:
        """Return the tokens that a load would bring. None if another load reads some of their slots."""
        slots = self.index.slots_of(match.block_ids[num_local // self._size :])
        num = len(slots) if (slots != NO_SLOT).all() else int((slots == NO_SLOT).argmax())
        return None if self._is_loading[slots[:num]].any() else num * self._size

    def _usable(self, num_tokens: int) -> int:
        """Return whole blocks of tokens before the last one, which is computed for its logits."""
        return max(num_tokens - 1, 0) // self._size * self._size

    def _is_current(self, namespace: Namespace, generation: int) -> bool:
        """Whether there was no purge of the tenant since then, and no reset."""
        return namespace.weights == self.weights and self.cache.generation(namespace.tenant) == generation

    def _end(self, step: int) -> None:
        """Commit and release what a step saved."""
        del self._reports[step]
        self.cache.step_done(step)
        is_good = step not in self._failed
        self._failed.discard(step)
        saves = self._saves.get(step, [])
        while saves:
            self._end_save(saves[0], is_good)
            saves.pop(0).held.release()
        self._saves.pop(step, None)

    def _end_save(self, save: _Save, is_good: bool) -> None:
        num = len(save.entries)
        if isinstance(save.held, Held):
            num = int(np.searchsorted(save.at, save.held.num_committed_tokens // self._size))
        if not is_good or not num:
            self.index.take_away(save.entries)
            return
        self.index.filled(save.entries)
        if save.is_above:
            self.index.loaded(save.entries)
        if self.disk is None:
            return
        at = save.at[:num]
        for first, stop in _ranges_of(np.concatenate((np.arange(save.start, at[0]), at))):
            self.disk.stores.note_saved(save.namespace, save.generation, save.key, first, stop)

    def _fail_running(self) -> None:
        for step in list(self._saves):
            self._fail(step)

    def _fail(self, step: int) -> None:
        """Keep nothing of a step. Its slots stay taken until all workers have ended it."""
        self.cache.step_failed(step)
        self._failed.add(step)
        for save in self._saves.get(step, ()):
            if (request := self._requests.get(save.request_id)) is not None:
                request.num_saved = min(request.num_saved, save.start)

    def _load_failed(self, request_id: str, position: int) -> Slots:
        """Forget the block that failed, and everything behind it. Returns the engine's blocks of the load."""
        load = self._loads.get(request_id)
        if load is None:
            return _NO_BLOCKS
        self.counts["failed_loads"] += 1
        self._loads[request_id] = load._replace(num_failed=len(load.blocks) - position)
        good = load.start + position
        if (request := self._requests.get(request_id)) is not None:
            request.num_saved = min(request.num_saved, good)
        try:
            with self.cache.open(load.namespace, load.key + ONE_MORE) as sequence:
                if sequence.num_cached_tokens > good * self._size:
                    self.cache.forget(sequence, good * self._size)
        except (CapacityError, LeaseError):  # no room to keep the good blocks, or a purge in between
            self.cache.clear(load.namespace)
        return load.blocks


refuse_copies(SecondLevel, "it follows the requests of one cache. Make another")


def _ranges_of(positions: Slots) -> list[tuple[int, int]]:
    """Return the ranges of rising positions, of which there is at least one."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
