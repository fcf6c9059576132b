"""Slots of host memory that a worker is still to fill: until it has, they hold other bytes than their entries say.

    begin         a promotion gives slots to the present step
    begin_step    the step gets its number, and goes to the worker
    filled        the worker has filled the slots of steps

The entries count as filled from ``begin`` on, because the worker fills slots before it loads them. Threads that read
slots beside the worker must not take these.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixkv.tiers.host.memory import Slots


class FillingSlots:
    """Those of ``num_slots`` slots that are being filled. A slot may be in several steps. O(slots of the call)."""

    def __init__(self, num_slots: int) -> None:
        self._num_fills = np.zeros(num_slots, np.int32)
        self._now: list[Slots] = []
        self._by_step: dict[int, list[Slots]] = {}

    def begin(self, slots: Slots) -> None:
        """Take that the present step fills these slots."""
        self._now.append(slots)
        np.add.at(self._num_fills, slots, 1)

    def begin_step(self, step: int) -> None:
        """Give the step that begins its number."""
        if self._now:
            self._by_step[step], self._now = self._now, []

    def filled(self, steps: Iterable[int]) -> None:
        """Take that the worker has filled the slots of these steps."""
        for step in steps:
            for slots in self._by_step.pop(step, ()):
                np.subtract.at(self._num_fills, slots, 1)

    def undo(self) -> None:
        """Take that no worker fills slots any more. O(all slots)."""
        self._now, self._by_step = [], {}
        self._num_fills[:] = 0

    def num_ready(self, slots: Slots) -> int:
        """Return how many of these slots, from the first on, aren't being filled."""
        is_filling = self._num_fills[slots] > 0
        return int(is_filling.argmax()) if is_filling.any() else len(slots)
