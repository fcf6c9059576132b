"""Settings of a coordinator: frozen, flat, validated when made."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any
from urllib.parse import urlsplit

from radixkv.configuration.urls import without_password
from radixkv.coordination.keys import SEGMENT_TOKENS
from radixkv.errors import ConfigError
from radixkv.signing import checked_secret, is_text

REPLICA_ID = "[A-Za-z0-9._-]{1,64}"
"""Allowed names of a replica, as a regular expression."""
_MAX_TEXT = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one coordinator. Raises ConfigError with the setting, its value and what is allowed."""

    replica_id: str
    fleet_secret: bytes = field(repr=False)
    """Shared by the fleet; the key of every digest and proof. Never leaves the process."""
    fingerprint: str
    block_size: int
    address: str | None = None
    """Base URL under which other replicas reach this one's HTTP service."""
    lease_s: float = 10.0
    """A replica that doesn't beat for this long is no longer live. It beats three times in a lease."""
    background: bool = True
    queue_records: int = 65_536
    """Most journal records that wait for the publisher. Beyond it they are lost, and everything is rebuilt."""
    queue_bytes: int = 64 << 20
    """Most bytes of keys that wait for the publisher."""
    view_digests: int = 2_000_000
    """Most segments of others in the view, about 120 bytes each."""
    snapshot_entries: int = 4_096
    """After this many entries, a snapshot is written, and the log is trimmed before the previous snapshot."""

    def __post_init__(self) -> None:
        if not isinstance(self.replica_id, str) or not re.fullmatch(REPLICA_ID, self.replica_id):
            raise ConfigError("replica", self.replica_id, "1 to 64 characters of A-Z a-z 0-9 . _ -")
        checked_secret(self.fleet_secret)
        if not is_text(self.fingerprint) or not 0 < len(self.fingerprint) <= _MAX_TEXT:
            raise ConfigError("fingerprint", self.fingerprint, f"1 to {_MAX_TEXT} characters")
        check_number("lease_s", self.lease_s, 0.05, 3600, "0.05 to 3600 seconds")
        check_address(self.address)
        if not isinstance(self.background, bool):
            raise ConfigError("background", self.background, "True or False")
        for name in ("block_size", "queue_records", "queue_bytes", "view_digests", "snapshot_entries"):
            check_count(name, getattr(self, name))

    @property
    def beat_s(self) -> float:
        """Time between two beats."""
        return self.lease_s / 3


def check_count(name: str, value: Any) -> None:
    """Raise ConfigError unless a setting is an integer, at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigError(name, value, "an integer, at least 1")


def check_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    """Raise ConfigError unless a setting is a number from ``low`` to ``high``."""
    number: Any = value
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= number <= high:
        raise ConfigError(name, value, allowed)


def check_address(address: object) -> None:
    """Raise ConfigError unless it is None or the base URL of an HTTP service."""
    if address is None:
        return
    if not isinstance(address, str) or not _is_base_url(address):
        shown = without_password(address) if isinstance(address, str) else address
        raise ConfigError("address", shown, "http(s)://host[:port][/path], or none")


def _is_base_url(address: str) -> bool:
    if len(address) > _MAX_TEXT or not address.isascii() or not address.isprintable() or " " in address:
        return False
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return False
    is_plain = "@" not in parts.netloc and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_plain and port != 0


REDIS_SCHEMES = (
    "redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel",
)  # fmt: skip
"""Allowed beginnings of a store's URL."""


def check_published_block_size(block_size: int) -> None:
    """Raise ConfigError unless a published segment ends at a block's end."""
    if SEGMENT_TOKENS % block_size:
        raise ConfigError(
            "block_size", block_size, f"a divisor of {SEGMENT_TOKENS} where replicas coordinate"
        )
