"""LentBeams: sequences whose beam steps the device makes. The user's handle of a ``Lending`` (``holders``)."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, SupportsIndex

from radixkv.errors import IntegrityError, LeaseError, ReentrantCall
from radixkv.index import device_beams
from radixkv.index.blocks import unpack
from radixkv.index.holders import Lending
from radixkv.index.locking import Guard, defer
from radixkv.index.recovery import mend
from radixkv.index.sequence import Sequence
from radixkv.index.state import CacheState
from radixkv.index.tenants import TenantState
from radixkv.index.validation import require_between
from radixkv.storage.plan import BeamsState

if TYPE_CHECKING:
    import torch

    from radixkv.storage.beams import DeviceBeams


class LentBeams:
    """Sequences whose beam steps the device makes by itself. Made by ``PrefixCache.lend``; use it in a ``with``.

    ``tables``: int32 ``[num_beams, columns]``, block ids, and ``lengths``: int32 ``[num_beams]``, rows: on the device,
    always as of the last step that was enqueued, at the same addresses: what paged attention reads. Columns behind a
    beam's length hold anything. Used by one thread at a time.

    Beams that are forgotten (collected before they were taken back) give a ResourceWarning, and the next call of the
    cache takes them back: it waits for the device, under the lock.
    """

    __slots__ = ("_cache", "_guard", "_lending", "sequences")
    _guard: Guard  # set only by the finaliser

    def __init__(self, cache: CacheState, sequences: list[Sequence], lending: Lending) -> None:
        self._cache, self.sequences, self._lending = cache, tuple(sequences), lending

    def __del__(self) -> None:
        lending: Lending | None = getattr(self, "_lending", None)  # None if its making was interrupted
        if lending is not None and not lending.is_over:
            self._guard = Guard(self._cache, lending)

    @property
    def is_over(self) -> bool:
        """Whether they are taken back."""
        return self._lending.is_over

    @property
    def block_ids(self) -> bytearray:
        """Packed int32 ids of the blocks that were lent besides those that the sequences had."""
        return self._lending.block_ids

    @property
    def tenant(self) -> TenantState:
        """Who is charged."""
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
        """Beam i goes on from beam ``parents[i]`` and gets a row for ``token_ids[i]``: ``reorder``, then ``append``.

        ``parents``: int32, ``token_ids``: int32 or int64, ``[num_beams]``, contiguous, on the storage's device.
        Enqueues three launches on the current stream and waits for nothing, so that a graph may capture it, to be
        replayed after the tensors were filled anew. Values are checked on the device: a step that can't be made
        changes nothing, nor do those after it, until ``lend_more`` or ``clear``; ``state`` tells. Raises ArgumentError
        for tensors of another form, KernelError, LeaseError once taken back, StaleGeneration once purged.
        """
        self._on_device().step(parents, token_ids)

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the KV of each beam's newest row goes: block ids, and rows in them, int64 ``[num_beams]``; enqueued."""
        return self._on_device().slots()

    def state(self) -> BeamsState:
        """How far the beams are, and what stopped them, if something did. Waits for the device."""
        return self._on_device().state()

    def clear(self) -> None:
        """Let steps go on after one that couldn't be made, as ``lend_more`` does."""
        self._on_device().clear()

    def lend_more(self, num_blocks: SupportsIndex) -> None:
        """Lend further blocks to the device, charged to the tenant, and let steps go on. Enqueued.

        Raises QuotaExceeded and OutOfBlocks, and changes nothing.
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
        """Take the books back: each sequence is what its beam is, with the ids that the steps were told.

        Returns how far the device came: steps that it couldn't make are in nobody's books. Blocks that no beam holds
        are free again. From then on no step is made, nor by a graph that was captured. Waits for the device, not
        under the lock. Raises LeaseError if they are taken back already. O(beams × (steps + blocks)).
        """
        if self.is_over:
            raise LeaseError("these beams are taken back already")
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
                    raise  # else the error that ends the block goes on

    def _on_device(self) -> DeviceBeams:
        device_beams.require_lent(self._cache, self._lending)
        assert self._device is not None
        return self._device
