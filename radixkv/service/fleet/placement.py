"""The choice of replicas for a job or a pin."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.coordination import Router
    from radixkv.coordination.coordinator import Coordinator


class Placement:
    """Chooses among this replica and the other live replicas."""

    def __init__(self, coordinator: Coordinator, router: Router) -> None:
        self._coordinator, self._router = coordinator, router

    def asked(self, namespace: Namespace, prompt_key: bytes, where: str | int | list[str]) -> list[str]:
        """Return the replicas that ``where`` names at this moment."""
        own = self._coordinator.replica_id
        if where == "self" or not prompt_key:
            return [own]
        if where == "all":
            return [own, *(peer.id for peer in self._coordinator.peers())]
        if isinstance(where, int):
            return self.best(namespace, prompt_key)[:where]
        return list(dict.fromkeys(where)) if isinstance(where, list) else [where]

    def best(self, namespace: Namespace, prompt_key: bytes) -> list[str]:
        """Return the replicas that could hold the prefix, the best first, as for routing."""
        reachable = {self._coordinator.replica_id, *(peer.id for peer in self._coordinator.peers())}
        if len(reachable) == 1:
            return list(reachable)
        ranked = [each.replica.id for each in self._router.rank(namespace, prompt_key)]
        return [name for name in ranked if name in reachable]
