"""What host memory saves and zeroes, decided in steps: the scheduler's half, which has an index and no bytes.

    blocks of a prompt were computed     save_key    those that aren't here get slots, and are copied in this step
    blocks leave the cache above         demote      the same for what has no copy here yet
    the worker's part of a step          take_work   (``host.memory.StepWork``)
    what became of it                    reported    what all workers saved can be found from now on

The index is a PrefixCache, whose entries have slots of host memory (``host.index``). So tenants, policies and the audit
are those of the cache above. In a process of its own ``HostTier`` carries every step out at once. Behind vLLM the
workers are other processes, and ``engines.vllm.steps`` adds requests and their loads.

**Complete saves only.** A step's blocks are committed after all workers have reported the step as saved. Until then no
load finds them; other requests don't save them again.

An engine that tells what it evicts calls ``demote``. Then what both hold takes host memory only as long as there is
some to spare.

**A purge** lets what is being saved end, and nothing of it is found. Slots that change tenant are zeroed first, with
``scrub="always"`` all slots as soon as they are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from radixkv.clock import Clock, monotonic
from radixkv.config import Namespace
from radixkv.errors import CapacityError, LeaseError
from radixkv.index.leases import Lease
from radixkv.index.sequence import Sequence as Held
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.tiers.host.index import ONE_MORE, HostIndex, Scrub
from radixkv.tiers.host.memory import Slots, StepReport, StepWork
from radixkv.tiers.tier import Offer
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.storage.plan import BlockIds
    from radixkv.tiers.disk.tier import DiskTier

MAX_STAGED_BLOCKS: Final = 256
"""Rows of host memory for blocks that come from the disk; at most a quarter of the slots, at least one."""
Blocks: TypeAlias = "Sequence[int] | BlockIds"
"""Ids of the engine's blocks."""
_NO_BLOCKS: Final = np.empty(0, np.int64)
_NO_WORK: Final = StepWork(0)


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


class HostSteps:
    """The index of ``num_slots`` slots for blocks of ``block_size`` tokens, which ``num_workers`` workers hold.

    ``num_above``: blocks of an engine that calls ``demote`` before it evicts; 0 for another one. ``weights``: the
    version of the model's weights. Raises ConfigError. One thread uses it, except for ``cache``.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        *,
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
        self._stamps = np.zeros(num_slots, np.int64)
        self._saves: dict[int, list[_Save]] = {}
        self._reports: dict[int, int] = {}
        self._work, self._taken = StepWork(1), _NO_WORK
        self._failed: set[int] = set()
        """Steps of which nothing is kept."""
        self._save_blocks: list[Slots] = []
        self._save_slots: list[Slots] = []
        self.weights = 0
        self.disk: DiskTier | None = None
        """Set before the first request."""
        self.counts_since = dict.fromkeys(("refused_saves", "lost_blocks"), 0)

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
            self.counts_since["refused_saves"] += 1
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
            self.counts_since["lost_blocks"] += len(blocks)
            return
        with self._released_after_error(lease):
            entries = lease.block_ids[start : start + len(blocks)].astype(np.int64)
            self.index.demoted(entries)
            at = self.index.lacking(entries)
            slots = self.index.give(namespace.tenant, entries[at], may_evict=True) if len(at) else at
            self.counts_since["lost_blocks"] += len(at) - len(slots)
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

    # --- steps

    def fill(self, slots: Slots, rows: Slots) -> None:
        """Copy rows of staging memory into slots in the present step, before its loads. For ``DiskTier``."""
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
        if self._saves.get(work.step):
            work.save_slots = np.concatenate(self._save_slots)
            work.save_blocks = np.concatenate(self._save_blocks)
            self._reports[work.step] = 0
        self._taken = work
        work.zero = self.index.take_to_zero(work.fill_slots)
        self._save_blocks, self._save_slots = [], []
        self._work = StepWork(work.step + 1)
        return work

    def work_done(self) -> None:
        """Take that all that was taken was done. Only ``undo`` needs to know."""
        self._taken = _NO_WORK

    def reported(self, report: StepReport) -> None:
        """Take the workers' report: commit what all of them saved."""
        if self.disk is not None:
            self.disk.patience.computed(report.ended)
            self.disk.filled(report.filled)
        for step in report.unsaved:
            self._fail(step)
        for step, num_workers in report.ended.items():
            if step in self._reports:
                self._reports[step] += num_workers
                if self._reports[step] >= self._num_workers:
                    self._end(step)

    def reset(self, weights: int | None = None) -> None:
        """Forget everything: the model's weights may be others.

        ``weights``: their version; None for the next number.
        """
        self.weights = self.weights + 1 if weights is None else weights
        for namespace in self.cache.namespaces():
            self.cache.clear(namespace)
        self._fail_running()
        if self.disk is not None:
            self.disk.reset()

    @property
    def num_running(self) -> int:
        """Steps with saves that haven't ended."""
        return len(self._reports)

    def undo(self) -> None:
        """Undo what was decided and isn't done, after an error: nothing of it is found, and nothing is held for it.

        What was taken last may be done in part, unless ``work_done`` was called. The workers must have dropped it.
        """
        self._fail_running()
        for saves in self._saves.values():
            while saves:
                saves.pop().held.release()
        self._saves, self._reports, self._failed = {}, {}, set()
        self._save_blocks, self._save_slots = [], []
        unsure = np.concatenate((self._taken.fill_slots, self._work.fill_slots))
        self.index.undo(unsure, self._taken.zero)
        self._work, self._taken = StepWork(self._work.step + 1), _NO_WORK
        if self.disk is not None:
            self.disk.undo()

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        taken, self.counts_since = self.counts_since, dict.fromkeys(self.counts_since, 0)
        if self.disk is not None:
            taken |= self.disk.take_counts()
        return taken

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
        at = save.at[:num]
        for first, stop in _ranges_of(np.concatenate((np.arange(save.start, at[0]), at))):
            self._offer_below(Offer(save.namespace, save.generation, save.key, first, stop))

    def _offer_below(self, offer: Offer) -> None:
        if self.disk is not None:
            self.disk.offer(offer)

    def _fail_running(self) -> None:
        for step in list(self._saves):
            self._fail(step)

    def _fail(self, step: int) -> None:
        """Keep nothing of a step. Its slots stay taken until all workers have ended it."""
        self.cache.step_failed(step)
        self._failed.add(step)


refuse_copies(HostSteps, "it follows the steps of one cache. Make another")


def _ranges_of(positions: Slots) -> list[tuple[int, int]]:
    """Return the ranges of rising positions, of which there is at least one."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
