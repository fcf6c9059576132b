"""What publishers of KV events hold: how much of a prefix each of them has.

    view = EventView(keys, block_size=16)
    subscriber = EventSubscriber(endpoint, replay_endpoint, view.follow("engine-a"))
    subscriber.start()
    view.held(namespace, token_ids)     # {"engine-a": 4096}: leading tokens

It needs the publishers' key of the purpose ``events``. All publishers share one ``View``, with one column each and the
digests of blocks as its segments: about 20 bytes a block. The answers are hints (``event_messages`` says what a liar on
the wire can do). Blocks behind a base are in no journal, so they are never counted.
"""

from __future__ import annotations

import threading

from radixkv.config import Namespace
from radixkv.coordination.settings import check_count
from radixkv.coordination.store.wire import Entry
from radixkv.coordination.validation import check_namespace
from radixkv.coordination.view.view import View
from radixkv.errors import ArgumentError
from radixkv.events.event_messages import BlockDigests, Change
from radixkv.index import tokens
from radixkv.signing import KeySet

__all__ = ["EventView", "PublisherView"]


class EventView:
    """Leading tokens that publishers hold, by the names that ``follow`` gave them. Thread-safe.

    - ``keys``: of the purpose ``events``; the first is used.
    - ``block_size``: the publishers' tokens in a block.
    - ``max_blocks``: most different blocks. What exceeds them is forgotten (``num_forgotten``).

    Raises ConfigError.
    """

    def __init__(self, keys: KeySet, block_size: int, *, max_blocks: int = 2_000_000) -> None:
        check_count("block_size", block_size)
        check_count("max_blocks", max_blocks)
        self._digests, self._block_size = BlockDigests(keys, block_size), block_size
        self._view = View(max_blocks)
        self._publishers: dict[str, PublisherView] = {}
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Blocks, each counted once for every publisher that holds it. O(rows)."""
        return self._view.num_digests

    @property
    def num_forgotten(self) -> int:
        """Blocks left out because there were too many."""
        return self._view.num_forgotten

    def follow(self, name: str) -> PublisherView:
        """Return the part of one publisher, which a reader fills. Raises ArgumentError for a name in use."""
        with self._lock:
            if name in self._publishers:
                raise ArgumentError("name", name, "a name that no other publisher has")
            found = self._publishers[name] = PublisherView(self._view)
        return found

    def unfollow(self, name: str) -> None:
        """Forget a publisher, whose reader must be closed. Does nothing for an unknown name."""
        with self._lock:
            found = self._publishers.pop(name, None)
        if found is not None:
            self._view.close(found.column)

    def held(self, namespace: Namespace, token_ids: tokens.TokenIds) -> dict[str, int]:
        """Return how many leading tokens of a prefix each publisher holds, in whole blocks; only those that hold any.

        Raises TokenError, ArgumentError. About 1 µs a block.
        """
        check_namespace(namespace)
        key = tokens.encode(token_ids)
        with self._lock:
            digests, publishers = self._digests.of(namespace, key), list(self._publishers.items())
        counts = self._view.leading(b"".join(digests)).counts().sum(axis=1)
        found = {name: int(counts[each.column]) for name, each in publishers if each.column < len(counts)}
        return {name: count * self._block_size for name, count in found.items() if count}


class PublisherView:
    """The part of one publisher: a ``Sink`` of its reader."""

    def __init__(self, view: View) -> None:
        self.column = view.open()
        self._view = view

    def apply(self, changes: list[Change]) -> None:
        """Apply the changes of a batch, in order. O(blocks), in slices."""
        self._view.apply(self.column, [Entry(op, b"", b"", packed) for op, packed in changes])

    def forget(self) -> None:
        """Forget everything of this publisher. O(holder sets)."""
        self._view.clear(self.column)
