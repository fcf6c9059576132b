"""Checks of arguments that aren't on a request's path. Each raises ArgumentError unless its docstring says otherwise.

The types of these arguments, as callers see them, are in ``arguments``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.config import TENANT_ID_ALLOWED, CacheConfig, Namespace, is_tenant_id, resolve
from radixkv.errors import ArgumentError, ConfigError, wrong_count
from radixkv.index.bases import MAX_BASE_ID_BYTES
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.storage.plan import BlockIds
from radixkv_policies import RequestHints

if TYPE_CHECKING:
    from radixkv.storage.device import BlockStorage


def require_namespace(namespace: object) -> None:
    """Raise unless this is a Namespace."""
    if not isinstance(namespace, Namespace):
        raise ArgumentError("namespace", namespace, "a Namespace")


def require_tenant_id(tenant: object) -> None:
    """Raise unless this is a valid tenant id. The tenant need not exist."""
    if not is_tenant_id(tenant):
        raise ArgumentError("tenant", tenant, TENANT_ID_ALLOWED)


def require_parts(config: object, clock: object, journal: Any) -> None:
    """Raise unless a cache can be made with these. Raises ConfigError for the configuration."""
    if not isinstance(config, CacheConfig):
        raise ConfigError("config", config, "a CacheConfig")
    if not callable(clock):
        raise ArgumentError("clock", clock, "a function that returns seconds")
    if journal is not None:
        grain = getattr(journal, "grain_tokens", None)
        if not isinstance(grain, int) or grain < 1 or grain % config.block_size:
            raise ArgumentError(
                "journal.grain_tokens", grain, f"a multiple of block_size {config.block_size}"
            )


def require_flags(**flags: object) -> None:
    """Raise unless these named arguments are booleans."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ArgumentError(name, flag, "True or False")


def require_hints(hints: object) -> None:
    """Raise unless these are a request's hints, or None."""
    if hints is not None and not isinstance(hints, RequestHints):
        raise ArgumentError("hints", hints, "a RequestHints, or None")


def require_noted(hints: object) -> None:
    """Raise unless these are hints."""
    if not isinstance(hints, RequestHints):
        raise ArgumentError("hints", hints, "a RequestHints")


def require_policy(policy: object) -> None:
    """Raise for an unknown policy name. Imports a policy that isn't built in, before any lock is taken."""
    if isinstance(policy, str):
        try:
            resolve("policy", policy)
        except ConfigError as error:
            raise ArgumentError("policy", policy, error.allowed) from None


def require_base_id(base_id: Any) -> str:
    """Return the id of a base unchanged, after a check."""
    if not isinstance(base_id, str) or not 0 < _num_utf8_bytes(base_id) <= MAX_BASE_ID_BYTES:
        raise ArgumentError("base_id", base_id, f"a string of 1 to {MAX_BASE_ID_BYTES} bytes of UTF-8")
    return base_id


def _num_utf8_bytes(text: str) -> int:
    """Return the length in UTF-8; 0 for a string without a UTF-8 form."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def require_between(argument: str, value: Any, low: int, high: int | None) -> int:
    """Return an integer of any type but bool, from ``low`` to ``high``. None means no upper end."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high) or isinstance(value, bool):
        allowed = f"an integer ≥ {low}" if high is None else f"an integer from {low} to {high}"
        raise ArgumentError(argument, value, allowed)
    return number


def require_seconds(argument: str, value: Any) -> float:
    """Return a time of 0 seconds or more, as a float; infinity is one too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(argument, value, "seconds ≥ 0")
    return float(value)


def list_of(argument: str, values: Any) -> list[Any]:
    """Return a list of Python values, from any iterable or from an array or tensor with ``tolist``."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, Iterable):
        raise ArgumentError(argument, values, "an iterable")
    return list(plain)


def block_ids_of(values: Any) -> BlockIds:
    """Return block ids, int32 ``[n]``, from any one-dimensional integers."""
    try:
        ids = np.asarray(values)
    except ValueError:  # nested lists of different lengths
        raise ArgumentError("block_ids", values, "a one-dimensional array of integers") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ArgumentError("block_ids", values, "a one-dimensional array of integers")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 2**31 - 1):
        raise ArgumentError("block_ids", values, "block ids from 0 to 2³¹ − 1")
    return ids.astype(np.int32)


def packed_ids(values: Any) -> bytes:
    """Return block ids packed, from any one-dimensional integers. An int32 array is only copied."""
    if type(values) is np.ndarray and values.dtype == np.int32 and values.ndim == 1:
        return values.tobytes()
    return block_ids_of(values).tobytes()


def first_block(start: Any, num_bytes: int, block_size: int) -> int:
    """Return the block that begins at token ``start`` of a key of this length."""
    if type(start) is int and not start:
        return 0
    last = num_bytes // TOKEN_BYTES // block_size * block_size
    first = require_between("start", start, 0, last)
    if first % block_size:
        raise ArgumentError("start", start, f"a multiple of the block size, {block_size}")
    return first // block_size


def readers_of(readers: Any, namespace: Namespace) -> frozenset[str]:
    """Return the ids of tenants other than the publisher. Raises NamespaceError for an invalid id."""
    if isinstance(readers, (str, bytes)):
        raise ArgumentError("readers", readers, "ids of tenants, in an iterable")
    named = [Namespace(reader, namespace.model).tenant for reader in list_of("readers", readers)]
    if namespace.tenant in named:
        raise ArgumentError("readers", namespace.tenant, "tenants other than the one that publishes")
    return frozenset(named)


def storage_of(config: CacheConfig, given: Any) -> BlockStorage | None:
    """Return the storage that the layout asks for, or the engine's after a check; None without both.

    Raises ConfigError.
    """
    if config.layout is None and given is None:
        return None
    from radixkv.storage.device import BlockStorage, DeviceStorage

    if config.layout is not None:
        if given is not None:
            raise ConfigError("storage", given, "None with a layout: the cache makes its own")
        return DeviceStorage(config.layout, config.num_blocks, config.block_size, config.device)
    wanted = (config.num_blocks, config.block_size)
    if not isinstance(given, BlockStorage) or (given.num_blocks, given.block_size) != wanted:
        raise ConfigError("storage", given, f"a BlockStorage of {wanted[0]} blocks of {wanted[1]} tokens")
    return given


def whole_blocks(key: bytes, block_size: int) -> bytes:
    """Return the part of a key that is whole blocks. Raises if there is no whole block."""
    size = block_size * TOKEN_BYTES
    if len(key) < size:
        raise wrong_count("ids", len(key) // TOKEN_BYTES, f"at least {block_size} token ids, one block")
    return key[: len(key) // size * size]
