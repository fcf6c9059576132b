"""The settings of ``radixkv serve``, validated when made and frozen from then on.

Every setting comes as text, from an option or from the environment; ``ServeSettings.parse`` turns all of them into one
frozen value. The first invalid setting raises ConfigError with its name as the user wrote it (``--port`` or
``RADIXKV_PORT``), its value and what is allowed. Imports neither torch nor starlette.

Rules that span settings: ``--redis`` needs ``--fleet-secret`` (a fleet without a shared secret can't prove anything).
An address that is not loopback needs ``--keys`` (the demo keys are public knowledge).
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args
from urllib.parse import urlsplit

from radixkv.config import Scrub, resolve
from radixkv.coordination.routing.costs import COSTS, MAX_TEMPERATURE
from radixkv.coordination.settings import REDIS_SCHEMES, REPLICA_ID, without_password
from radixkv.errors import ConfigError
from radixkv.events.event_settings import EventSettings
from radixkv.service.limits import Limits
from radixkv.service.private import warn_unless_private
from radixkv.signing import MIN_SECRET_BYTES

HTTP_DEFAULTS: Mapping[str, str] = {
    "requests-per-s": "1000",
    "burst": "2000",
    "max-concurrent": "256",
    "max-queued": "32",
    "max-body-bytes": str(4 * 2**20),
    "timeout-s": "600",
    "body-timeout-s": "30",
    "drain-s": "20",
    "log-level": "warning",
}
"""Settings of services and routers alike."""

DEFAULTS: Mapping[str, str] = {
    "host": "127.0.0.1",
    "port": "8400",
    "lease-s": "10",
    "num-blocks": "4096",
    "block-size": "16",
    "engine": "hf",
    "policy": "learned",
    "scrub": "cross-tenant",
    "device": "cpu",
    "dtype": "float32",
    "threads": "0",
    "events-content": "digests",
    "events-scope": "loopback",
    **HTTP_DEFAULTS,
}
"""Default values. Settings that are not here have no default."""

_OPTIONAL = (
    "model",
    "keys",
    "tls-cert",
    "tls-key",
    "redis",
    "replica",
    "fleet-secret",
    "advertise",
    "record",
    "events",
    "events-replay",
    "events-topic",
)
SETTINGS = (*DEFAULTS, *_OPTIONAL)
_DEVICE = re.compile(r"(cpu|mps|(cuda|xpu)(:\d+)?)\Z")
_ENGINE = re.compile(r"[a-z][a-z0-9_-]{0,63}\Z")
_DTYPES = ("float32", "bfloat16", "float16")
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")

EVENT_OPTIONS: Mapping[str, str] = {
    "endpoint": "events",
    "replay_endpoint": "events-replay",
    "topic": "events-topic",
    "block_size": "block-size",
}
"""Settings of KV events, and the names of their options."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: a certificate with its chain, and its key, unencrypted."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """One valid configuration of a service process.

    - ``engine``: its name, see ``radixkv.engines.find_engine``.
    - ``fleet_secret``: at least MIN_SECRET_BYTES long; random if no file named one.
    - ``threads``: compute threads; 0 for torch's own choice.
    - ``advertise``: base URL at which other replicas reach this one; None for the bound address.
    - ``record``: the file for a trace of the traffic; None for no trace.
    - ``events``: where KV events are published; None: nowhere.
    - ``tls``: None serves HTTP without TLS.
    - ``log_level``: a level name of ``logging``.
    """

    host: str
    port: int
    lease_s: float
    num_blocks: int
    block_size: int
    engine: str
    policy: str
    scrub: Scrub
    device: str
    dtype: str
    threads: int
    model: Path | None
    keys: Path | None
    redis: str | None
    replica: str
    fleet_secret: bytes
    advertise: str | None
    record: Path | None
    events: EventSettings | None
    tls: Tls | None
    limits: Limits
    log_level: str

    @classmethod
    def parse(cls, values: Mapping[str, str | None], names: Mapping[str, str] | None = None) -> ServeSettings:
        """Parse settings from text. ``values`` maps names such as ``num-blocks`` to text or None (the default).

        ``names`` gives each setting's name in errors; the default is ``--num-blocks``.
        Raises ConfigError.
        """
        reader = _Reader({**DEFAULTS, **{k: v for k, v in values.items() if v is not None}}, names or {})
        settings = cls(
            host=reader.host(),
            port=reader.integer("port", 0, 65_535),
            lease_s=reader.seconds("lease-s", 0.5, 3600.0),
            num_blocks=reader.integer("num-blocks", 2, 2**31 - 1),
            block_size=reader.integer("block-size", 1, 1024),
            engine=reader.pattern("engine", _ENGINE, "hf, or the name of an engine that a package brings"),
            policy=reader.policy(),
            scrub=cast("Scrub", reader.choice("scrub", get_args(Scrub))),
            device=reader.pattern("device", _DEVICE, "cpu, mps, cuda, cuda:N, xpu or xpu:N"),
            dtype=reader.choice("dtype", _DTYPES),
            threads=reader.integer("threads", 0, 1024),
            model=reader.path("model", directory=True),
            keys=reader.path("keys", directory=False),
            redis=reader.redis_url(),
            replica=reader.replica(),
            fleet_secret=reader.secret(),
            advertise=reader.base_url("advertise"),
            record=reader.new_path("record"),
            events=reader.events(),
            tls=reader.tls(),
            limits=reader.limits(),
            log_level=reader.choice("log-level", _LOG_LEVELS),
        )
        _require_keys(settings.keys, settings.host, reader)
        return settings


ROUTE_DEFAULTS: Mapping[str, str] = {
    "host": "127.0.0.1",
    "port": "8500",
    "cost": "linear",
    "temperature": "0",
    "max-segments": "2000000",
    **HTTP_DEFAULTS,
}


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """One valid configuration of a router's process; ``max_segments`` bounds its view."""

    host: str
    port: int
    redis: str
    fleet_secret: bytes
    keys: Path | None
    model: Path | None
    cost: str
    temperature: float
    max_segments: int
    tls: Tls | None
    limits: Limits
    log_level: str

    @classmethod
    def parse(cls, values: Mapping[str, str | None], names: Mapping[str, str] | None = None) -> RouteSettings:
        """Parse settings from text, as ``ServeSettings.parse`` does. Raises ConfigError."""
        given = {name: value for name, value in values.items() if value is not None}
        reader = _Reader({**ROUTE_DEFAULTS, **given}, names or {})
        redis = reader.redis_url()
        if redis is None:
            raise ConfigError(reader.name("redis"), None, "the URL of the Redis that the replicas use")
        settings = cls(
            host=reader.host(),
            port=reader.integer("port", 0, 65_535),
            redis=redis,
            fleet_secret=reader.secret(),
            keys=reader.path("keys", directory=False),
            model=reader.path("model", directory=True),
            cost=reader.choice("cost", tuple(COSTS)),
            temperature=reader.number("temperature", 0.0, MAX_TEMPERATURE),
            max_segments=reader.integer("max-segments", 1, 10**9),
            tls=reader.tls(),
            limits=reader.limits(),
            log_level=reader.choice("log-level", _LOG_LEVELS),
        )
        _require_keys(settings.keys, settings.host, reader)
        return settings


def _require_keys(keys: Path | None, host: str, reader: _Reader) -> None:
    if keys is None and not is_loopback(host):
        problem = f"is not set, but the host {host} is not loopback; set a keys file, or use a loopback address as host"
        raise ConfigError(reader.name("keys"), None, "a keys file", problem=problem)


class _Reader:
    """Reads one setting after the other out of text; each method raises ConfigError."""

    def __init__(self, values: Mapping[str, str], names: Mapping[str, str]) -> None:
        self._values, self._names = values, names

    def name(self, setting: str) -> str:
        return self._names.get(setting, f"--{setting}")

    def text(self, setting: str) -> str | None:
        return self._values.get(setting)

    def refuse(self, setting: str, allowed: str) -> ConfigError:
        return ConfigError(self.name(setting), self.text(setting), allowed)

    def integer(self, setting: str, low: int, high: int) -> int:
        text = self._values[setting].strip()
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise self.refuse(setting, f"an integer from {low} to {high}")
        return int(text)

    def seconds(self, setting: str, low: float, high: float) -> float:
        return self.number(setting, low, high, "a number of seconds")

    def number(self, setting: str, low: float, high: float, what: str = "a number") -> float:
        try:
            value = float(self._values[setting])
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise self.refuse(setting, f"{what} from {low:g} to {high:g}")
        return value

    def pattern(self, setting: str, pattern: re.Pattern[str], allowed: str) -> str:
        text = self._values[setting]
        if not pattern.match(text):
            raise self.refuse(setting, allowed)
        return text

    def policy(self) -> str:
        """Return the name of a policy, which is imported if it isn't built in."""
        name = self._values["policy"]
        try:
            resolve("policy", name)
        except ConfigError as error:
            raise self.refuse("policy", error.allowed) from None
        return name

    def choice(self, setting: str, allowed: tuple[str, ...]) -> str:
        if self._values[setting] not in allowed:
            raise self.refuse(setting, f"one of {', '.join(allowed)}")
        return self._values[setting]

    def host(self) -> str:
        text = self._values["host"].strip()
        try:
            socket.getaddrinfo(text, 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise self.refuse("host", "an address of this machine, such as 127.0.0.1 or ::1") from None
        return text

    def path(self, setting: str, *, directory: bool) -> Path | None:
        text = self.text(setting)
        if text is None:
            return None
        path = Path(text)
        if not text or not path.exists() or path.is_dir() != directory:
            raise self.refuse(setting, "an existing directory" if directory else "an existing file")
        return path

    def new_path(self, setting: str) -> Path | None:
        text = self.text(setting)
        if text is None:
            return None
        path = Path(text)
        if not text or path.is_dir() or not path.parent.is_dir():
            raise self.refuse(setting, "a file in an existing directory")
        return path

    def events(self) -> EventSettings | None:
        content = self.choice("events-content", ("digests", "prompts-in-clear"))
        scope = self.choice("events-scope", ("loopback", "network"))
        endpoint, topic, replay = (self.text(name) for name in ("events", "events-topic", "events-replay"))
        if endpoint is None:
            for name, value in (("events-topic", topic), ("events-replay", replay)):
                if value is not None:
                    raise self.refuse("events", f"an endpoint, because {self.name(name)} is set")
            return None
        try:
            return EventSettings(
                block_size=self.integer("block-size", 1, 1024),
                endpoint=endpoint,
                replay_endpoint=replay,
                topic=topic or "",
                publishes_prompts=content == "prompts-in-clear",
                allows_network=scope == "network",
            )
        except ConfigError as error:
            raise ConfigError(self.name(EVENT_OPTIONS[error.setting]), error.value, error.allowed) from None

    def limits(self) -> Limits:
        return Limits(
            requests_per_s=self.number("requests-per-s", 0.001, 1e6),
            burst=self.integer("burst", 1, 10**6),
            max_concurrent=self.integer("max-concurrent", 1, 10**6),
            max_queued=self.integer("max-queued", 1, 10**6),
            max_body_bytes=self.integer("max-body-bytes", 1, 2**30),
            timeout_s=self.seconds("timeout-s", 0.001, 1e6),
            body_timeout_s=self.seconds("body-timeout-s", 0.001, 1e6),
            drain_s=self.seconds("drain-s", 0.0, 86_400.0),
        )

    def tls(self) -> Tls | None:
        cert, key = self.path("tls-cert", directory=False), self.path("tls-key", directory=False)
        if cert is None and key is None:
            return None
        if cert is None or key is None:
            missing, given = ("tls-key", "tls-cert") if key is None else ("tls-cert", "tls-key")
            raise self.refuse(missing, f"an existing file, because {self.name(given)} is set")
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key, password=lambda: b"")  # never prompt for a password
        except (OSError, ValueError):
            allowed = f"a certificate in PEM that belongs to the unencrypted key of {self.name('tls-key')}"
            raise self.refuse("tls-cert", allowed) from None
        warn_unless_private(key, self.name("tls-key"))
        return Tls(cert, key)

    def redis_url(self) -> str | None:
        text = self.text("redis")
        if text is not None and text.partition("://")[0] not in REDIS_SCHEMES:
            allowed = "a URL such as redis://127.0.0.1:6379/0, or one that begins with " + ", ".join(
                REDIS_SCHEMES
            )
            raise ConfigError(self.name("redis"), without_password(text), allowed)
        return text

    def base_url(self, setting: str) -> str | None:
        text = self.text(setting)
        if text is None:
            return None
        url = urlsplit(text)
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise self.refuse(setting, "a base URL such as http://10.0.0.7:8400")
        return text.rstrip("/")

    def replica(self) -> str:
        text = self.text("replica")
        if text is None:
            return f"replica-{secrets.token_hex(4)}"
        if not re.fullmatch(REPLICA_ID, text):
            raise self.refuse("replica", "1 to 64 letters, digits, dots, dashes or underscores")
        return text

    def secret(self) -> bytes:
        path = self.path("fleet-secret", directory=False)
        if path is None:
            if self.text("redis") is not None:
                raise self.refuse(
                    "fleet-secret", "a file with the secret that all replicas share, because --redis is set"
                )
            return secrets.token_bytes(32)
        warn_unless_private(path, self.name("fleet-secret"))
        secret = path.read_bytes().strip()
        if len(secret) < MIN_SECRET_BYTES:
            raise self.refuse("fleet-secret", f"a file that holds at least {MIN_SECRET_BYTES} bytes")
        return secret


def is_loopback(host: str) -> bool:
    """Whether every address that ``host`` resolves to is loopback. One name lookup."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return bool(found) and all(
        ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in found
    )
