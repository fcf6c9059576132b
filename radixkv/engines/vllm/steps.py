"""Host memory behind vLLM's own cache: which requests load and save, decided in vLLM's steps. Imports nothing of vLLM.

    an engine's scheduler                         here
    how much more of a prompt could be loaded     found
    the engine allocated blocks for it            load        leases the slots until the load has ended
    a request computes up to a token              save        whole blocks that aren't here yet
    the work of all workers in this step          take_work   (``host.memory.StepWork``)
    what became of it                             reported, loads_ended
    the request ended                             forget

``engines.vllm.connector`` is the shell that vLLM loads. The workers are other processes, so all that they do travels as
a step's work, and comes back as its report. In one process ``Sequence.loading`` does the same without steps.

**Loads** happen between steps: a request waits until its load has ended, and computes afterwards. Requests of one
namespace never load a slot at the same time: the second waits, and finds it in the engine's own cache. If a load fails,
the index forgets its blocks and everything behind them. The request asks again, and computes. If blocks that another
connector loads are wrong, no running step is committed.

**A disk** may lie below: what it has is brought into slots before ``found`` answers.

**A purge** or a reset reaches loads that no worker has begun: they fail. A request that computes on what was there
before saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from radixkv.clock import Clock, monotonic
from radixkv.config import Namespace
from radixkv.errors import CapacityError, LeaseError
from radixkv.index.leases import Lease
from radixkv.index.match import Match
from radixkv.tenancy.request_keys import RequestFacts, RequestKey, RequestKeys
from radixkv.tenancy.salt import SaltReader
from radixkv.tiers.host.index import NO_SLOT, ONE_MORE, Scrub
from radixkv.tiers.host.memory import NEVER, Slots, StepReport, StepWork
from radixkv.tiers.host.steps import Blocks, HostSteps

COUNTS: Final = {
    "loads": "requests that loaded KV from host memory",
    "failed_loads": "loads of requests of which a block failed; its tokens were computed",
    "refused_saves": "saves for which host memory had no room",
    "refused_requests": "requests without this cache: their salt or adapter was refused",
    "loaded_blocks": "blocks loaded, by each worker",
    "failed_blocks": "blocks that failed to load",
    "saved_blocks": "blocks saved",
    "unsaved_blocks": "blocks that failed to be saved",
    "loaded_bytes": "bytes loaded",
    "saved_bytes": "bytes saved",
    "disk_loaded_blocks": "blocks from the disk that requests used",
    "disk_failed_blocks": "blocks on the disk that could not be read, or came too late",
    "disk_timeouts": "requests that stopped waiting for the disk",
    "disk_unstored_blocks": "saved blocks that the disk did not take",
    "disk_load_us": "microseconds that loads from the disk took",
    "disk_loads": "loads from the disk",
    "disk_unchosen_blocks": "saved blocks for which the disk's write budget had no bytes",
}
"""Names of the counts of the scheduler's half and of the workers, and what each means."""
_NO_BLOCKS: Final = np.empty(0, np.int64)


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


class VllmSteps(HostSteps):
    """See HostSteps. ``salts``: reads whose request it is. None: all requests are of one tenant, by their salts in
    namespaces.

    ``weights`` is the version of the model's weights, in the namespaces of requests that begin now.
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
        clock: Clock = monotonic,
    ) -> None:
        super().__init__(
            num_slots, block_size, policy=policy, scrub=scrub, num_workers=num_workers, clock=clock
        )
        self._keys = RequestKeys(model, salts)
        self._requests: dict[str, _Request] = {}
        self._is_loading = np.zeros(num_slots, np.bool_)
        self._loads: dict[str, _Load] = {}
        self._new_loads: list[str] = []
        self.counts_since |= dict.fromkeys(("loads", "failed_loads"), 0)

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
        self.counts_since["loads"] += 1

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

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended. Its loads and saves that run go on."""
        self._requests.pop(request_id, None)
        if self.disk is not None:
            self.disk.promotions.forget(request_id)

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

    # --- steps

    def take_work(self, num_tokens: int | None = 0) -> StepWork:
        """See HostSteps. The new loads are in it."""
        work = self._work
        for request_id in self._new_loads:
            load = self._loads[request_id]
            is_there = self._is_current(load.namespace, load.generation) & (load.slots != NO_SLOT)
            stamps = np.where(is_there, self._stamps[load.slots], NEVER)
            work.loads += ((request_id, len(load.blocks)),)
            work.load_slots = np.append(work.load_slots, load.slots)
            work.load_stamps = np.append(work.load_stamps, stamps)
            work.load_blocks = np.append(work.load_blocks, load.blocks)
        self._new_loads = []
        return super().take_work(num_tokens)

    def reported(self, report: StepReport, invalid: Iterable[int] = ()) -> None:
        """See HostSteps. What couldn't be loaded is forgotten.

        ``invalid``: the engine's blocks that were reported as not loaded, by whomever. Blocks that weren't loaded here
        may be read by running steps, so nothing of these is committed.
        """
        others = set(invalid)
        for request_id, position in report.failed.items():
            others.difference_update(self._load_failed(request_id, position).tolist())
        if others:
            self._fail_running()
        super().reported(report)

    @property
    def is_loading(self) -> bool:
        """Whether a load hasn't ended."""
        return bool(self._loads)

    @property
    def num_running(self) -> int:
        """Loads and steps with saves that haven't ended."""
        return len(self._loads) + super().num_running

    def undo(self) -> None:
        """See HostSteps."""
        while self._loads:
            _, load = self._loads.popitem()
            if load.lease is not None:
                self._release_load(load, load.lease)
        self._new_loads = []
        self._is_loading[:] = False
        super().undo()

    def take_counts(self) -> dict[str, int]:
        """See HostSteps. vLLM doesn't tell what it evicts, so nothing of that is lost."""
        taken = super().take_counts()
        del taken["lost_blocks"]
        taken["refused_requests"], self._keys.num_refused = self._keys.num_refused, 0
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

    # --- inside

    def _is_current(self, namespace: Namespace, generation: int) -> bool:
        """Whether there was no purge of the tenant since then, and no reset."""
        return namespace.weights == self.weights and self.cache.generation(namespace.tenant) == generation

    def _fail(self, step: int) -> None:
        super()._fail(step)
        for save in self._saves.get(step, ()):
            if (request := self._requests.get(save.request_id)) is not None:
                request.num_saved = min(request.num_saved, save.start)

    def _release_load(self, load: _Load, lease: Lease) -> None:
        slots = load.slots[load.slots != NO_SLOT]
        self._is_loading[slots] = False
        self.index.unuse(slots)
        lease.release()

    def _num_loadable(self, match: Match, num_local: int) -> int | None:
        """Return the tokens that a load would bring. None if another load reads some of their slots."""
        slots = self.index.slots_of(match.block_ids[num_local // self._size :])
        num = len(slots) if (slots != NO_SLOT).all() else int((slots == NO_SLOT).argmax())
        return None if self._is_loading[slots[:num]].any() else num * self._size

    def _usable(self, num_tokens: int) -> int:
        """Return whole blocks of tokens before the last one, which is computed for its logits."""
        return max(num_tokens - 1, 0) // self._size * self._size

    def _load_failed(self, request_id: str, position: int) -> Slots:
        """Forget the block that failed, and everything behind it. Returns the engine's blocks of the load."""
        load = self._loads.get(request_id)
        if load is None:
            return _NO_BLOCKS
        self.counts_since["failed_loads"] += 1
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
