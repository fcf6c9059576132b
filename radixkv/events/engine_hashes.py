"""Hashes of blocks as an engine computes them, for consumers that compute them too. They show prompts.

A block's hash covers the hash of the block before it, its ids, and extra keys: the adapter, and the salt in a prompt's
first block. The engine brings the function (``hash_block``), so its algorithm and its seed are the engine's own.

A new block behind a long prefix needs the hash of the block before it. The last hashes are kept, by a digest of their
prefixes, so that a growing prompt isn't hashed from its start again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Protocol

from radixkv.config import Namespace
from radixkv.events.event_messages import Hash
from radixkv.index.tokens import TOKEN_BYTES, decode

__all__ = ["BlockHashes", "EngineHashes"]

_MAX_KEPT: Final = 65_536
"""Prefixes whose last hash is kept, about 250 bytes each."""

Extra = tuple[Any, ...] | None
"""What the engine hashes into a block besides ids; None: nothing."""


class BlockHashes(Protocol):
    """Names for blocks. A state is the place before a block of a namespace; ``skip`` and ``extend`` advance it."""

    def begin(self, namespace: Namespace) -> Any:
        """Return the state before the first block. It has ``copy``."""

    def skip(self, state: Any, key: bytes, num_blocks: int) -> None:
        """Advance over the first blocks of a key."""

    def extend(self, state: Any, key: bytes, first: int, stop: int) -> list[Any]:
        """Advance over blocks ``[first, stop)`` of a key. Returns their names."""


class _State:
    """The hash before the next block; None before the first one."""

    __slots__ = ("before", "namespace")

    def __init__(self, namespace: Namespace, before: bytes | None = None) -> None:
        self.namespace, self.before = namespace, before

    def copy(self) -> _State:
        return _State(self.namespace, self.before)


class EngineHashes:
    """An engine's hashes of blocks of ``block_size`` tokens. One thread at a time.

    - ``hash_block``: from the hash before (None: none), the ids and the extra keys of a block to its hash.
    - ``extra_of``: the extra keys of a namespace's blocks, in the first block of a prompt (True) and in others (False).
    - ``shown_of``: a namespace's adapter and extra keys as events show them, likewise.
    - ``external``: from a hash to its form in events.
    """

    def __init__(
        self,
        block_size: int,
        hash_block: Callable[[bytes | None, tuple[int, ...], Extra], bytes],
        extra_of: Callable[[Namespace, bool], Extra],
        shown_of: Callable[[Namespace, bool], tuple[str | None, Extra]],
        external: Callable[[bytes], Hash],
    ) -> None:
        self._block_size, self._block_bytes = block_size, block_size * TOKEN_BYTES
        self._hash_block, self._extra_of, self._shown_of = hash_block, extra_of, shown_of
        self._external = external
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def begin(self, namespace: Namespace) -> _State:
        """Return the state before the first block."""
        return _State(namespace)

    def skip(self, state: _State, key: bytes, num_blocks: int) -> None:
        """Advance from the start over the first blocks of a key. O(bytes), or O(blocks) hashes if none is kept."""
        if not num_blocks:
            return
        state.before = self._kept.get(self._name(state.namespace, key, num_blocks))
        if state.before is None:
            self._hashed(state, key, 0, num_blocks)

    def extend(self, state: _State, key: bytes, first: int, stop: int) -> list[Hash]:
        """Advance over blocks ``[first, stop)`` of a key. Returns their hashes, a few µs each."""
        found = [self._external(each) for each in self._hashed(state, key, first, stop)]
        if state.before is not None:
            name = self._name(state.namespace, key, stop)
            self._kept[name] = state.before
            self._kept.move_to_end(name)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def shown(
        self, namespace: Namespace, num_blocks: int, starts_prompt: bool
    ) -> tuple[str | None, list[Extra] | None]:
        """Return the adapter, and the extra keys of each block of an event; None if no block has any."""
        adapter, others = self._shown_of(namespace, False)
        first = self._shown_of(namespace, True)[1] if starts_prompt else others
        return adapter, [first, *[others] * (num_blocks - 1)]

    def _hashed(self, state: _State, key: bytes, first: int, stop: int) -> list[bytes]:
        ids = decode(key[first * self._block_bytes : stop * self._block_bytes]).tolist()
        found, size = [], self._block_size
        others = self._extra_of(state.namespace, False)
        for at in range(first, stop):
            extra = others if at else self._extra_of(state.namespace, True)
            block = tuple(ids[(at - first) * size : (at - first + 1) * size])
            state.before = self._hash_block(state.before, block, extra)
            found.append(state.before)
        return found

    def _name(self, namespace: Namespace, key: bytes, num_blocks: int) -> bytes:
        name = hashlib.blake2b(namespace.framed(), digest_size=16)
        name.update(memoryview(key)[: num_blocks * self._block_bytes])
        return name.digest()
