"""vLLM's own hashes of blocks, for KV events in clear: they equal those of a vLLM with its own cache.

The algorithm is ``--prefix-caching-hash-algo``; the seed is vLLM's, from PYTHONHASHSEED. Prompts with images or sounds
have other hashes than in vLLM, since their keys hold digests in place of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from radixkv.config import Namespace
from radixkv.events.engine_hashes import EngineHashes, Extra


def vllm_hashes(
    algorithm: str,
    block_size: int,
    salt_of: Callable[[Namespace], str | None],
    adapters: Mapping[str, tuple[str, str]],
) -> EngineHashes:
    """Return vLLM's hashes. ``adapters``: name and path of each adapter, by its name in namespaces."""
    hash_value = get_hash_fn_by_name(algorithm)
    if not hasattr(kv_cache_utils, "NONE_HASH"):
        kv_cache_utils.init_none_hash(hash_value)

    def hash_block(before: bytes | None, ids: tuple[int, ...], extra: Extra) -> bytes:
        found: bytes = kv_cache_utils.hash_block_tokens(hash_value, before, ids, extra)
        return found

    def tagged(namespace: Namespace, is_first: bool) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        if namespace.adapter is not None:
            found.append(("lora", *adapters.get(namespace.adapter, (namespace.adapter, ""))))
        salt = salt_of(namespace) if is_first else None
        return [*found, ("cache_salt", salt)] if salt else found

    def extra_of(namespace: Namespace, is_first: bool) -> Extra:
        return tuple(tagged(namespace, is_first)) or None

    def shown_of(namespace: Namespace, is_first: bool) -> tuple[str | None, Extra]:
        keys: list[Any] = [each[1] for each in tagged(namespace, is_first)]
        return (None if namespace.adapter is None else keys[0]), tuple(keys) or None

    return EngineHashes(block_size, hash_block, extra_of, shown_of, kv_cache_utils.maybe_convert_block_hash)
