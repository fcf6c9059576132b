"""Settings of what lies below an engine's own cache: host memory, and a disk under it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from radixkv import sizes
from radixkv.config import TierDtype
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.files.system import Files
    from radixkv.tiers.tier import Records, Tier

_RATE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT])(i?)B\s*/\s*(s|hour|day)")
_POWERS: Final = {"K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS: Final = {"s": 1, "hour": 3_600, "day": 86_400}
_NUMBER: Final = re.compile(r"[0-9]{1,15}")

UNCACHED_SALT: Final = "uncached-"
"""Salts that begin so are of requests that leave nothing. Their KV never goes below."""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """A disk tier: its folder, its bytes, and the fleet's secret, at least 16 bytes.

    - ``awaits_generations``: serve nothing before the fleet's purges are known. Some may have been missed.
    - ``files``: its system calls, in place of the usual ones.
    - ``previous_secrets``: previous secrets of the fleet. A folder under one of them is sealed under ``secret`` again.
    - ``bytes_per_s``: the most that is written on average; None for no bound. It is spent on what returns most often.

    Raises ConfigError for a rate that isn't a finite number above 0.
    """

    folder: Path
    num_bytes: int
    secret: bytes = field(repr=False)
    awaits_generations: bool = False
    files: Files | None = None
    bytes_per_s: float | None = None
    previous_secrets: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        require_rate("bytes_per_s", self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What lies below an engine's cache.

    - ``host_bytes``: host memory for KV, at least two blocks. ``host.memory``: the same in blocks; 0 to use the bytes.
    - ``disk``: the disk below it; None without one.
    - ``dtype``: how KV are kept: see ``CacheConfig.tier_dtype``.
    - ``further``: more tiers, in the order in which they are asked for what host memory and the disk don't have.
    """

    host_bytes: int
    disk: DiskOptions | None = None
    host_blocks: int = 0
    dtype: TierDtype = "exact"
    further: tuple[Tier[Records, memoryview], ...] = ()


def require_rate(name: str, rate: object) -> None:
    """Raise ConfigError unless this is a finite number of bytes a second above 0, or None."""
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and not (is_number and 0 < rate < float("inf")):  # type: ignore[operator]
        raise ConfigError(name, rate, "a finite number above 0, or None")


@contextmanager
def disk_errors(folder: Path | str, size: int | str | None) -> Iterator[None]:
    """Let errors of a disk tier name the settings of a disk below an engine. OSError becomes a ConfigError.

    ``size``: of the disk, as it was given. Errors show it in place of the bytes of whole records.
    """
    try:
        yield
    except ConfigError as error:
        named = {"folder": "disk", "disk_bytes": "disk_size"}.get(error.setting, error.setting)
        value = size if error.setting == "disk_bytes" else error.value
        raise ConfigError(named, value, error.allowed, problem=error.problem) from None
    except OSError as error:
        allowed = f"a folder that can be used ({error.strerror or error}: {error.filename or 'a file in it'})"
        raise ConfigError("disk", str(folder), allowed) from error


def require_fingerprint(fingerprint: object) -> None:
    """Raise ConfigError unless this is a fingerprint for a disk: a text that isn't blank."""
    if not isinstance(fingerprint, str) or not fingerprint.strip():
        allowed = (
            "a text that names what computes the KV: model, weights, precision. A disk outlives the process"
        )
        raise ConfigError("fingerprint", fingerprint, allowed)


def bytes_of(name: str, value: object) -> int:
    """Return bytes, given as a number or a text such as ``"8GiB"`` or ``"8GB"``. Raises ConfigError."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        if _NUMBER.fullmatch(str(value)):
            return int(value)
        if isinstance(value, str):
            return sizes.bytes_of(name, value)
    raise ConfigError(name, value, "bytes, or a text such as '8GiB'")


def rate_of(name: str, value: object) -> float:
    """Return bytes a second, given as a text such as ``"2TB/day"`` or ``"500 GiB/hour"``. Raises ConfigError."""
    found = _RATE.fullmatch(value) if isinstance(value, str) else None
    num_bytes = 0.0
    if found is not None:
        num_bytes = float(found[1]) * (1_024 if found[3] else 1_000) ** _POWERS[found[2]]
    if found is None or not num_bytes:
        raise ConfigError(name, value, "bytes in a time, such as '2TB/day', '80GiB/hour' or '20MB/s'")
    return num_bytes / _SECONDS[found[4]]
