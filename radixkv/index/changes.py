"""Notification of changes in the trees: the journal of a cache, and the changes that snapshots need.

A snapshot in progress is a *gathering*. It uses the hooks that report a tenant's nodes to its policy. ``Recorder`` puts
itself before these hooks while there is a gathering, and removes itself afterwards. So requests pay nothing otherwise.
The hooks report every node that is added, removed, cut or grown, or that changes between used and unused. The node's
parent is read again with it. The hooks don't report a further lease on a used node. So a node that was leased when it
was read, or is leased at the end, is read in the last hold of the lock. After an interrupted call (``recovery``),
everything is rewritten and a gathering starts again.
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
"""Tenants whose hooks are changed under one hold of the lock."""

_TELLING = ("leased", "unleased", "removed", "inserted", "extended", "split", "trimmed")
"""The hooks that report a change. ``split`` reports two nodes, the others their first argument."""


class Journal(Protocol):
    """Receives which prefixes become resident and which leave, at a coarse grain.

    It is called under the cache's lock. So an implementation must not wait, and should take about a microsecond: an
    append to a queue and at most a pass over a short key.

    Ranges are in tokens. A range is reported only if it contains a multiple of ``grain_tokens`` (itself a multiple of
    the block size). A segment that ends at token ``e`` becomes resident with a ``stored`` with ``start < e ≤ stop``. It
    leaves with a ``removed`` with ``start < e ≤ stop``, or with a ``cleared``.

    ``key`` begins with the key (uint32 bytes, see ``tokens``) of the ids ``[0, stop)``. It is at most twice as long.
    The cache passes a key that it has already, so nothing is copied.
    """

    grain_tokens: int

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Tokens ``[start, stop)`` of the prefix became resident."""

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Tokens ``[start, stop)`` of the prefix left."""

    def cleared(self, namespace: Namespace) -> None:
        """Everything of the namespace left."""


class Changes:
    """The changes that were reported to one gathering since its last ``take``.

    ``is_lost``: some changes are missing.
    """

    __slots__ = ("is_lost", "removed", "told")

    def __init__(self) -> None:
        self.told: set[Node] = set()
        self.removed: set[Node] = set()
        self.is_lost = False

    def take(self) -> tuple[set[Node], set[Node]]:
        """Return nodes that changed, and those of them that are gone. Forgets them here."""
        taken = self.told, self.removed
        self.told, self.removed, self.is_lost = set(), set(), False
        return taken


class Recorder:
    """Reports changes in the trees of tenants to gatherings. Its methods are called under the cache's lock."""

    def __init__(self) -> None:
        self._heard_by: list[Changes] = []
        self._recorded: dict[TenantState, None] = {}

    def begin(self, changes: Changes, tenants: Iterable[TenantState]) -> None:
        """From now on, report changes of these tenants to ``changes`` too. O(tenants)."""
        if changes not in self._heard_by:
            self._heard_by.append(changes)
        for tenant in tenants:
            if tenant not in self._recorded:
                self._record(tenant)

    def follow(self, tenant: TenantState) -> None:
        """Put the recorder before the hooks of the tenant's policy again, since the tenant took them anew."""
        if tenant in self._recorded:
            self._record(tenant)

    def end(self, changes: Changes) -> bool:
        """Stop reports to ``changes``.

        After the last one, policies get their hooks back, SLICE_TENANTS per call. Returns whether all have them.
        """
        if changes in self._heard_by:
            self._heard_by.remove(changes)
        if self._heard_by:
            return True
        for tenant in list(islice(self._recorded, SLICE_TENANTS)):
            tenant.take_hooks()
            del self._recorded[tenant]
        return not self._recorded

    def start_over(self) -> None:
        """Mark everything as changed, because the policies are new. Gatherings must start again."""
        self.lose()
        self._recorded = {}

    def lose(self) -> None:
        """Let gatherings start again, because nodes moved from one tree to another."""
        for changes in self._heard_by:
            changes.is_lost = True

    def note(self, tenant: TenantState, nodes: Iterable[Node]) -> None:
        """Report nodes of a tenant that changed in a way of which no policy hears. O(nodes)."""
        if tenant in self._recorded:
            for changes in self._heard_by:
                changes.told.update(nodes)

    def _record(self, tenant: TenantState) -> None:
        self._recorded[tenant] = None
        for name in _TELLING:
            setattr(tenant, f"on_{name}", self._hook(name, getattr(tenant, f"on_{name}")))

    def _hook(self, name: str, policys: Callable[..., object] | None) -> Callable[..., None]:
        """Make a hook that records its node, and then calls the policy's hook, if there is one."""
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
