"""What others hear of changes in the trees: the journal of a cache, and snapshots that are being taken.

Snapshots: The hooks by which a tenant's policy hears of its nodes. ``Recorder`` puts itself before them while
somebody gathers and takes itself away afterwards, so requests pay nothing while nobody does. The hooks tell of every
node that comes, goes, is cut, grows, or turns from used to unused or back; its parent is read again with it. They
don't tell of a further lease on a node in use: so a node that was held when it was read, or is in the end, is read
in the last hold. After an interrupted call (``recovery``), which rewrites everything, a gathering begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.tenants import TenantState
    from radixkv.index.tokens import Key
    from radixkv.index.tree import Node

SLICE_TENANTS = 64
"""Tenants whose hooks are changed under one hold."""

_TELLING = ("leased", "unleased", "removed", "inserted", "extended", "split", "trimmed")
"""The hooks that tell of a change; ``split`` of two nodes, the others of their first argument."""


class Journal(Protocol):
    """Hears what becomes resident and what leaves, at a coarse grain.

    Called under the cache's lock: an implementation waits for nothing and takes a microsecond or so, for an append to
    a queue and at most a pass over a short key. Ranges are in tokens and are reported only if they contain a multiple
    of ``grain_tokens`` (itself a multiple of the block size): the segment that ends at token ``e`` is resident from a
    ``stored`` with ``start < e ≤ stop`` until a ``removed`` with ``start < e ≤ stop``, or a ``cleared``. ``key`` begins
    with the key (uint32 bytes, see ``tokens``) of the ids ``[0, stop)``, and is at most twice as long: it is what the
    cache has already, and nothing is copied for it.
    """

    grain_tokens: int

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Tokens ``[start, stop)`` of the prefix became resident."""

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Tokens ``[start, stop)`` of the prefix left."""

    def cleared(self, namespace: Namespace) -> None:
        """Everything of the namespace left."""


class Changes:
    """What one gathering was told since it asked last. ``is_lost``: there is more than it was told."""

    __slots__ = ("is_lost", "removed", "told")

    def __init__(self) -> None:
        self.told: set[Node] = set()
        self.removed: set[Node] = set()
        self.is_lost = False

    def take(self) -> tuple[set[Node], set[Node]]:
        """Nodes that changed, and those of them that are gone; they are forgotten here."""
        taken = self.told, self.removed
        self.told, self.removed, self.is_lost = set(), set(), False
        return taken


class Recorder:
    """Tells gatherings what changes in the trees of tenants. Its methods are called under the cache's lock."""

    def __init__(self) -> None:
        self._heard_by: list[Changes] = []
        self._recorded: dict[TenantState, None] = {}

    def begin(self, changes: Changes, tenants: Iterable[TenantState]) -> None:
        """Tell ``changes`` of these tenants, too, from now on. O(tenants)."""
        if changes not in self._heard_by:
            self._heard_by.append(changes)
        for tenant in tenants:
            if tenant not in self._recorded:
                self._record(tenant)

    def follow(self, tenant: TenantState) -> None:
        """The tenant has another policy, with hooks of its own."""
        if tenant in self._recorded:
            self._record(tenant)

    def end(self, changes: Changes) -> bool:
        """Tell it no more. After the last one policies get their hooks back, SLICE_TENANTS a call; whether all have."""
        if changes in self._heard_by:
            self._heard_by.remove(changes)
        if self._heard_by:
            return True
        for tenant in list(islice(self._recorded, SLICE_TENANTS)):
            tenant.follow(tenant.policy)
            del self._recorded[tenant]
        return not self._recorded

    def start_over(self) -> None:
        """Everything may be different, and the policies are new: who gathers has to begin anew."""
        for changes in self._heard_by:
            changes.is_lost = True
        self._recorded = {}

    def _record(self, tenant: TenantState) -> None:
        self._recorded[tenant] = None
        for name in _TELLING:
            setattr(tenant, f"on_{name}", self._hook(name, getattr(tenant, f"on_{name}")))

    def _hook(self, name: str, policys: Callable[..., object] | None) -> Callable[..., None]:
        """A hook that tells of its node, and then the policy, if that listens."""
        heard_by = self._heard_by

        def tell(node: Node, *facts: Any) -> None:
            for changes in heard_by:
                changes.told.add(node)
                if name == "removed":
                    changes.removed.add(node)
                elif name == "split":
                    changes.told.add(facts[0])
            if policys is not None:
                policys(node, *facts)

        return tell
