"""Host memory for blocks under a lossy ``tier_dtype``: ``HostBlocks`` whose rows are records of a codec.

Blocks are quantised and restored on the engine's device, so only records pass between it and the host.
"""

from __future__ import annotations

import logging

import torch

from radixkv.storage.lossy_codec import LossyCodec
from radixkv.tiers.host.memory import HostBlocks, Save, Slots

_log = logging.getLogger(__name__)


class LossyBlocks(HostBlocks):
    """``num_slots`` slots for records of ``codec``. ``num_staging``, threads: see HostBlocks.

    A save with a block that isn't finite fails as a whole: it is counted, and nothing of it is found.
    """

    def __init__(self, num_slots: int, codec: LossyCodec, num_blocks: int, *, num_staging: int = 0) -> None:
        self._codec = codec
        self._begin(num_slots, num_staging, codec.record_bytes, codec.tensors, num_blocks)

    @property
    def engine_bytes(self) -> int:
        """See HostBlocks. A block is computed in float32."""
        return self._codec.work_bytes

    def _read(self, blocks: Slots) -> list[torch.Tensor]:
        return [self._codec.encode(torch.from_numpy(blocks).to(self._device))]

    def _copied_back(self, host: list[torch.Tensor], slots: Slots) -> list[torch.Tensor]:
        (records,) = super()._copied_back(host, slots)
        return self._codec.decode(records)

    def _write(self, save: Save) -> None:
        (records,) = save.copies
        if self._codec.is_whole(records):
            super()._write(save)
        else:
            _log.warning("%d blocks aren't kept: they have values that can't be quantised", len(save.slots))
            self._leave_out(save.step, len(save.slots))
