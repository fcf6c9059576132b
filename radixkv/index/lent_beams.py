"""LentBeams: sequences that the device advances by beam steps. The user's handle of a ``Lending`` (``holders``)."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, SupportsIndex

from radixkv.errors import IntegrityError, LeaseError, ReentrantCall
from radixkv.index import device_beams
from radixkv.index.blocks import unpack
from radixkv.index.holders import Lending, SequenceState
from radixkv.index.locking import Guard, defer
from radixkv.index.recovery import mend
from radixkv.index.sequence import Sequence
from radixkv.index.state import CacheState
from radixkv.index.tenants import TenantState
from radixkv.index.validation import require_between
from radixkv.storage.plan import BeamsState
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    import torch

    from radixkv.storage.beams import DeviceBeams


class LentBeams:
    """Sequences that the device advances by itself. Made by ``PrefixCache.lend``; use it in a ``with``.

    - ``tables``: int32 ``[num_beams, columns]``, block ids. Columns behind a beam's length hold arbitrary values.
    - ``lengths``: int32 ``[num_beams]``, rows.

    Both are on the device, for paged attention to read. They show the last enqueued step, at addresses that don't
    change. Use one thread at a time.

    If beams are garbage-collected before they were taken back, they give a ResourceWarning. The next call of the cache
    takes them back; it waits for the device, under the lock.
    """

    __slots__ = ("_cache", "_guard", "_lending", "sequences")
    _guard: Guard  # set only by the finaliser

    def __init__(self, cache: CacheState, sequences: list[Sequence], lending: Lending) -> None:
        if not isinstance(lending, Lending):
            raise TypeError("LentBeams is made by PrefixCache.lend")
        self._cache, self.sequences, self._lending = cache, tuple(sequences), lending

    def __del__(self) -> None:
        lending: Lending | None = getattr(self, "_lending", None)  # None if __init__ didn't end
        if lending is not None and not lending.is_over:
            self._guard = Guard(self._cache, lending)

    @property
    def is_over(self) -> bool:
        """Whether the beams are taken back."""
        return self._lending.is_over

    @property
    def block_ids(self) -> bytearray:
        """Packed int32 ids of the blocks that were lent in addition to the sequences' own."""
        return self._lending.block_ids

    @property
    def tenant(self) -> TenantState:
        """The tenant that is charged."""
        return self._lending.tenant

    @property
    def _device(self) -> DeviceBeams | None:
        return self._lending.device

    def __repr__(self) -> str:
        return f"<LentBeams {'taken back' if self.is_over else 'lent'}: {len(self.sequences)} beams>"

    @property
    def tables(self) -> torch.Tensor:
        """See the class."""
        return self._on_device().books.tables

    @property
    def lengths(self) -> torch.Tensor:
        """See the class."""
        return self._on_device().books.lengths

    def step(self, parents: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Make a step: beam i continues beam ``parents[i]`` and gets a row for ``token_ids[i]`` (``reorder``, then
        ``append``).

        ``parents``: int32, ``token_ids``: int32 or int64, both ``[num_beams]``, contiguous, on the storage's device.
        Enqueues three launches on the current stream and doesn't wait. So a graph may capture the step, and be replayed
        after the tensors were filled again.

        The device checks the values. A step that can't be made changes nothing. The following steps change nothing
        either, until ``lend_more`` or ``clear``; ``state`` has the reason. Raises ArgumentError for tensors of another
        form, KernelError, LeaseError after the beams were taken back, StaleGeneration after a purge.
        """
        self._on_device().step(parents, token_ids)

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the place of each beam's newest KV row: block ids, and rows in them, int64 ``[num_beams]``.

        Enqueued.
        """
        return self._on_device().slots()

    def state(self) -> BeamsState:
        """Return how far the beams are, and what stopped them, if anything did. Waits for the device."""
        return self._on_device().state()

    def clear(self) -> None:
        """Allow steps again after one that couldn't be made. ``lend_more`` does this too."""
        self._on_device().clear()

    def lend_more(self, num_blocks: SupportsIndex) -> None:
        """Lend further blocks to the device, charged to the tenant, and allow steps again. Enqueued.

        Raises QuotaExceeded and OutOfBlocks, and then changes nothing.
        """
        device, num_blocks, taken = (
            self._on_device(),
            require_between("num_blocks", num_blocks, 1, None),
            bytearray(),
        )
        cache, lending, evictor = self._cache, self._lending, self._cache._evictor
        with cache._lock:
            try:
                device_beams.require_lent(cache, lending)
                evictor.take(num_blocks, lending.tenant, taken)
                evictor.charge(lending.tenant, num_blocks)
                lending.block_ids += taken
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, lending.sequences)
                raise
        device.lend(unpack(taken))

    def reconcile(self) -> BeamsState:
        """Take the beams back: each sequence gets the state of its beam, with the token ids of the steps.

        Returns how far the device came. Steps that it couldn't make are not included. Blocks that no beam holds are
        free again. No step is made after this, not even by a captured graph. Waits for the device without the lock.
        Raises LeaseError if the beams are taken back already. O(beams × (steps + blocks)).
        """
        if self.is_over:
            raise LeaseError("these beams were already taken back")
        if self._cache.is_broken or self._cache._lock.is_mine:
            self._cache.require_alive()
        assert self._device is not None
        state = self._device.state()
        device_beams.take_back(self._cache, self._lending)
        return state

    def __enter__(self) -> LentBeams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_over and not self._cache.is_dead:
            try:
                self.reconcile()
            except ReentrantCall as reentrant:
                defer(self._cache, self._lending, reentrant)
            except IntegrityError:
                if error is None or not self._cache.is_dead:
                    raise  # otherwise the error that ended the block propagates

    def _on_device(self) -> DeviceBeams:
        device_beams.require_lent(self._cache, self._lending)
        assert self._device is not None
        return self._device


refuse_copies(LentBeams, "a copy would take the beams back twice. Pass it on")


def lend_beams(
    cache: CacheState,
    sequences: list[Sequence],
    states: list[SequenceState],
    max_steps: SupportsIndex,
    num_blocks: SupportsIndex | None,
    groups: Iterable[SupportsIndex] | None,
) -> LentBeams:
    """See PrefixCache.lend. ``states``: those of the sequences."""
    lending = device_beams.lend(cache, states, max_steps, num_blocks, groups)
    try:
        return LentBeams(cache, sequences, lending)
    except BaseException:
        device_beams.take_back(cache, lending)
        raise
