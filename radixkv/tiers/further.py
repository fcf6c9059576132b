"""Tiers that somebody brings, below host memory and the disk: a remote store, say. What reaches them, and when.

They are offered what host memory saves (``host.tier``), and asked for what neither host memory nor the disk has
(``loading``). Here is what they must forget, and how they are named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.index.below import Scope
from radixkv.tiers.pending import RETRY_S, Forgetful, Pending
from radixkv.tiers.tier import Records, Tier

_MAX_KNOWN: Final = 65_536
_log: Final = logging.getLogger(__name__)


class Further:
    """``tiers`` below host memory, without the disk. Any thread, but for ``is_open_for`` and ``has``.

    ``fleet_generation``: see DiskTier.
    """

    def __init__(
        self,
        tiers: Sequence[Tier[Records, memoryview]],
        fleet_generation: Callable[[str], int | None],
        clock: Clock,
    ) -> None:
        self.tiers, self._fleet_generation, self._clock = tuple(tiers), fleet_generation, clock
        self._known: dict[str, int] = {}
        """The generations of tenants that they were told of."""
        self.forgetful: tuple[Forgetful, ...] = ()
        """What may have to destroy something, once it was asked to forget."""
        self._retries_at = clock()

    def name_of(self, number: int) -> str:
        """Return the name of a tier in counts and metrics: its class, and its number if it isn't the only one."""
        name = type(self.tiers[number]).__name__
        return name if len(self.tiers) == 1 else f"{name}-{number + 1}"

    def is_open_for(self, namespace: Namespace) -> bool:
        """Whether they may be offered and asked for a namespace now. Within the tiers' gate.

        Not while the fleet's purges of the tenant aren't known. One that they weren't told of, because no process was
        there, they are told of first. Nor for weights that were changed in this process: their number means others
        after a restart.
        """
        if not self.tiers or namespace.weights:
            return False
        generation = self._fleet_generation(namespace.tenant)
        if generation is None:
            return False
        if self._known.get(namespace.tenant, 0) != generation:
            if self._forget(Scope(namespace.tenant, generation=generation)):
                return False
            if len(self._known) >= _MAX_KNOWN:
                self._known = {}
            self._known[namespace.tenant] = generation
        return True

    def has(self, namespace: Namespace, key: bytes, block: int) -> bool:
        """Whether one of them has a block of a prompt. Within the tiers' gate."""
        return self.is_open_for(namespace) and any(tier.find(namespace, key, block) for tier in self.tiers)

    @contextmanager
    def forgetting(self, scope: Scope) -> Iterator[None]:
        """Within this, what lies above forgets a scope. They forget it before, and once more afterwards.

        What they forgot early may have been offered to them again. An error of one is raised, after all have forgotten
        what they can.
        """
        self._forget(scope)
        try:
            yield
        finally:
            errors = self._forget(scope)
        if errors:
            raise errors[0]

    def _forget(self, scope: Scope) -> list[Exception]:
        errors = list[Exception]()
        for tier in self.tiers:
            try:
                pending = tier.forget(scope)
            except Exception as error:  # noqa: BLE001 the others must forget too; it is raised at the end
                _log.exception("a tier can't forget")
                errors.append(error)
            else:
                self.forgetful = tuple(dict.fromkeys((*self.forgetful, *pending.disks)))
        return errors

    def retry_due(self) -> None:
        """Let them try again what they couldn't destroy, once in ``RETRY_S``. Never waits."""
        if self.forgetful and self._clock() >= self._retries_at:
            self._retries_at = self._clock() + RETRY_S
            Pending(self.forgetful).wait(0)

    def close(self) -> None:
        """Close them."""
        for tier in self.tiers:
            tier.close()
