"""One journal of two readers: KV events want every block, other replicas every segment of 256 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.changes import Journal
    from radixkv.index.tokens import Key


class JournalPair:
    """Passes every change to ``fine``, and to ``coarse`` those that reach its grain, a multiple of the other's."""

    def __init__(self, fine: Journal, coarse: Journal) -> None:
        self.grain_tokens = fine.grain_tokens
        self._fine, self._coarse = fine, coarse

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Pass stored blocks on."""
        self._fine.stored(namespace, key, start, stop)
        if self._is_coarse(start, stop):
            self._coarse.stored(namespace, key, start, stop)

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Pass removed blocks on."""
        self._fine.removed(namespace, key, start, stop)
        if self._is_coarse(start, stop):
            self._coarse.removed(namespace, key, start, stop)

    def cleared(self, namespace: Namespace) -> None:
        """Pass a cleared namespace on."""
        self._fine.cleared(namespace)
        self._coarse.cleared(namespace)

    def _is_coarse(self, start: int, stop: int) -> bool:
        grain = self._coarse.grain_tokens
        return start // grain < stop // grain
