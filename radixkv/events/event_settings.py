"""Settings of a publisher of KV events: frozen, flat, validated when made.

ZMQ authenticates nobody, and bounds neither the connections nor the parts of a message. So whoever reaches an endpoint
can read the events and use up this process's memory. Without ``allows_network``, an endpoint is a loopback address,
or a socket in a directory that only this user can enter.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from radixkv.errors import ConfigError, shown
from radixkv.signing import is_text

__all__ = ["EventSettings"]

ENDPOINTS: Final = "tcp://IP:PORT (PORT *: any free one), or ipc:// and an absolute path"
_LOCAL = "a loopback address, or ipc:// with a directory that only this user can enter; allow the network for others"
_TCP = re.compile(r"tcp://(\*|[0-9.]+|\[[0-9a-fA-F:.]+\]):(\*|[1-9][0-9]{0,4})")
MAX_SOCKET_PATH_BYTES: Final = 107
"""Most bytes of a Unix socket's path, by the kernel."""
_MAX_TOPIC_BYTES = 256
_COUNTS = {
    "block_size": 2**20,
    "queue_records": 2**31,
    "queue_bytes": 2**40,
    "replay_batches": 2**20,
    "replay_bytes": 2**40,
}


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Settings of one publisher. Raises ConfigError with the setting, its value and what is allowed."""

    block_size: int
    """Tokens in a block of the cache."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Where consumers subscribe: ``tcp://IP:PORT`` or ``ipc:///path``."""
    replay_endpoint: str | None = None
    """Where consumers ask for batches that they missed. None: the next port, or the path with ``.replay``."""
    allows_network: bool = False
    """Whether the endpoints may be other addresses than loopback. Everybody who reaches them reads the events."""
    publishes_prompts: bool = False
    """Whether token ids, adapters and salts are published too, in clear. They are the prompts of all tenants."""
    topic: str = ""
    """Topic of each message; llm-d expects ``kv@POD@MODEL``."""
    data_parallel_rank: int = 0
    medium: str = "GPU"
    """Name of the tier of the blocks, for consumers."""
    queue_records: int = 65_536
    """Most records that wait for the thread. Beyond it they are dropped, and everything is stated again."""
    queue_bytes: int = 64 << 20
    """Most bytes of keys that wait for the thread."""
    replay_batches: int = 1_024
    """Most batches that are kept for replays."""
    replay_bytes: int = 32 << 20
    """Most bytes of batches that are kept for replays."""
    restate_s: float = 5.0
    """Least seconds between two statements of everything resident."""

    def __post_init__(self) -> None:
        for name, most in _COUNTS.items():
            _check_integer(name, getattr(self, name), 1, most)
        _check_integer("data_parallel_rank", self.data_parallel_rank, 0, 2**20)
        for name in ("allows_network", "publishes_prompts"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "True or False")
        for name in ("topic", "medium"):
            text = getattr(self, name)
            if not is_text(text) or len(text.encode()) > _MAX_TOPIC_BYTES:
                raise ConfigError(name, text, f"a text of at most {_MAX_TOPIC_BYTES} bytes of UTF-8")
        seconds = self.restate_s
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds <= 3600:
            raise ConfigError("restate_s", seconds, "0 to 3600 seconds")
        check_endpoint("endpoint", self.endpoint, self.allows_network)
        if self.replay_endpoint is not None:
            check_endpoint("replay_endpoint", self.replay_endpoint, self.allows_network)
        check_endpoint("endpoint", self.replays, self.allows_network)

    @property
    def replays(self) -> str:
        """The endpoint for replays."""
        if self.replay_endpoint is not None:
            return self.replay_endpoint
        scheme, _, rest = self.endpoint.partition("://")
        if scheme == "ipc":
            return f"{self.endpoint}.replay"
        host, _, port = rest.rpartition(":")
        return self.endpoint if port == "*" else f"tcp://{host}:{int(port) + 1}"


def check_endpoint(name: str, endpoint: object, allows_network: bool = True) -> None:
    """Raise ConfigError unless it is an endpoint, and a local one unless the network is allowed."""
    if not isinstance(endpoint, str) or not endpoint.isascii() or not endpoint.isprintable():
        raise ConfigError(name, endpoint, ENDPOINTS)
    tcp = _TCP.fullmatch(endpoint)
    if tcp is not None:
        host, port = tcp.groups()
        if port != "*" and int(port) > 65_535:
            raise ConfigError(name, endpoint, "ports up to 65535, also for replays")
        if not (allows_network or _is_loopback(name, endpoint, host)):
            raise ConfigError(name, endpoint, _LOCAL)
    elif endpoint.startswith("ipc:///"):
        path = endpoint.removeprefix("ipc://")
        if (problem := too_long(path)) is not None:
            raise ConfigError(name, endpoint, ENDPOINTS, problem=problem)
        if not (allows_network or _is_private(Path(path).parent)):
            raise ConfigError(name, endpoint, _LOCAL)
    else:
        raise ConfigError(name, endpoint, ENDPOINTS)


def too_long(path: str | Path) -> str | None:
    """Say that the path of a Unix socket is too long for the kernel; None if it isn't."""
    size = len(os.fsencode(path))
    if size <= MAX_SOCKET_PATH_BYTES:
        return None
    most = f"a Unix socket's has {MAX_SOCKET_PATH_BYTES} at most"
    return f"needs a shorter path: {shown(str(path))} has {size} bytes, and {most}"


def _is_loopback(name: str, endpoint: str, host: str) -> bool:
    if host == "*":
        return False
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        raise ConfigError(name, endpoint, ENDPOINTS) from None


def _is_private(directory: Path) -> bool:
    """Whether only this user can enter a directory."""
    try:
        found = directory.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(name, value, f"an integer from {least} to {most}")
