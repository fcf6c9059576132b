"""KV events of a cache in SGLang's own shape: ``--kv-events-config``. They show prompts, as SGLang's do.

A block's hash equals that of an SGLang with its own cache: SHA-256 over the hash of the page before it (or, for the
first one, a digest of the salt) and the page's ids. The cache's journal only appends; events are made when SGLang
takes them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, Literal

from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames

from radixkv.config import Namespace
from radixkv.engines.sglang.cache import MAX_NAMED, Origin, framed_extra_key
from radixkv.events.engine_hashes import EngineHashes, Extra
from radixkv.events.event_messages import Hash
from radixkv.index.tokens import TOKEN_BYTES, Key, decode

_SALTED: Final = b"sglang-cache-salt-v1\0"

Record = tuple[Literal["store", "remove", "clear"], Namespace, Key, int, int]


class Recorder(KVCacheEventRecorder):
    """SGLang's recorder, and a cache's journal. ``origin``: what SGLang called the requests of a namespace."""

    def __init__(
        self,
        page_size: int,
        origin: Callable[[Namespace], Origin],
        *,
        enabled: bool,
        dynamo_format: bool = False,
        lora_names: KvEventLoraNames | None = None,
    ) -> None:
        super().__init__(
            enabled=enabled, page_size=page_size, dynamo_format=dynamo_format, lora_names=lora_names
        )
        self.grain_tokens, self._page_bytes = page_size, page_size * TOKEN_BYTES
        self._origin = lru_cache(MAX_NAMED)(origin)
        self._records: deque[Record] = deque()
        self._held: dict[Namespace, set[int]] = {}
        self._hashes = EngineHashes(
            page_size, _hash_page, self._first_of, lambda *_: (None, None), lambda digest: digest
        )

    # --- the journal

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Queue stored pages. O(1)."""
        self._records.append(("store", namespace, key, start, stop))

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Queue removed pages. O(1)."""
        self._records.append(("remove", namespace, key, start, stop))

    def cleared(self, namespace: Namespace) -> None:
        """Queue a cleared namespace. O(1)."""
        self._records.append(("clear", namespace, b"", 0, 0))

    def record_all_cleared(self) -> None:
        """Say that everything left, in place of each namespace."""
        self._records.clear()
        self._held.clear()
        super().record_all_cleared()

    # --- events

    def take(self) -> list[Any]:
        """Return the events since the last call. O(changed pages), a few µs each."""
        while self._records:
            op, namespace, key, start, stop = self._records.popleft()
            if op == "clear":
                self._remove(list(self._held.pop(namespace, ())))
                continue
            first = start // self.page_size
            before, hashes = self._hashed(namespace, key, first, stop)
            held = self._held.setdefault(namespace, set())
            if op == "store":
                held.update(hashes)
                self._store(namespace, before, hashes, _joined(key, stop)[first * self._page_bytes :])
            else:
                held.difference_update(hashes)
                self._remove(hashes)
        found: list[Any] = super().take()
        return found

    def _hashed(self, namespace: Namespace, key: Key, first: int, stop: int) -> tuple[int | None, list[int]]:
        """Return the hash before page ``first``, and those of the pages up to token ``stop``."""
        whole, state = _joined(key, stop), self._hashes.begin(namespace)
        self._hashes.skip(state, whole, first)
        before = None if state.before is None else self._shown(namespace, state.before)
        digests = self._hashes.extend(state, whole, first, len(whole) // self._page_bytes)
        return before, [self._shown(namespace, each) for each in digests]

    def _store(self, namespace: Namespace, before: int | None, hashes: list[int], ids: bytes) -> None:
        origin = self._origin(namespace)
        framed = framed_extra_key(origin.extra_key, origin.adapter)
        names = self.lora_names
        self.enqueue(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=before,
                token_ids=decode(ids).tolist(),
                block_size=self.page_size,
                lora_id=None,
                medium=StorageMedium.GPU,
                cache_salt=origin.cache_salt,
                lora_name=names.resolve(framed) if self.dynamo_format else names.get(framed),
            )
        )

    def _remove(self, hashes: list[int]) -> None:
        if hashes:
            self.enqueue(BlockRemoved(block_hashes=hashes, medium=StorageMedium.GPU))

    def _shown(self, namespace: Namespace, digest: Hash) -> int:
        """Return a hash as SGLang's events show it."""
        origin = self._origin(namespace)
        assert isinstance(digest, bytes)
        given, seed = int.from_bytes(digest[:8], "big", signed=True), None
        joined = _joined_extra_key(origin)
        if self.dynamo_format:
            seed = kv_event_namespace_seed(extra_key=joined, cache_salt=origin.cache_salt)
        elif self.lora_names.get(framed_extra_key(origin.extra_key, origin.adapter)) is not None:
            seed = kv_event_namespace_seed(extra_key=joined, cache_salt=None)
        found: int = namespaced_block_hash(given, namespace_seed=seed)
        return found

    def _first_of(self, namespace: Namespace, is_first: bool) -> Extra:
        """Return what stands before a prompt's first page: a digest of its salt."""
        salt = self._origin(namespace).cache_salt if is_first else None
        return None if salt is None else (sha256(_SALTED + salt.encode()).digest(),)


def _hash_page(before: bytes | None, ids: tuple[int, ...], extra: Extra) -> bytes:
    seed = before or (extra[0] if extra else b"")
    return sha256(seed + array("I", ids).tobytes()).digest()


def _joined_extra_key(origin: Origin) -> str | None:
    """Return the extra key as SGLang joins it."""
    if origin.extra_key is None and origin.adapter is None:
        return None
    return f"{origin.extra_key or ''}{origin.adapter or ''}"


def _joined(key: Key, stop: int) -> bytes:
    whole = key if isinstance(key, bytes) else b"".join(key)
    return whole[: stop * TOKEN_BYTES]
