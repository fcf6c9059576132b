"""The settings of ``radixkv serve`` and ``radixkv route``, validated when made and frozen from then on.

Every setting comes as text, from an option, the environment or a file (``radixkv.configuration``).
``ServeSettings.parse`` turns all of them into one frozen value. The first invalid setting raises ConfigError with its
name as the user wrote it (``--port``, ``RADIXKV_PORT`` or ``radixkv.yaml:3: port``), its value and what is allowed.
Imports neither torch nor starlette.

Rules that span settings: ``--redis`` needs ``--fleet-secret`` (a fleet without a shared secret can't prove anything).
An address that is not loopback needs ``--keys`` (the demo keys are public knowledge).
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import quote, urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from radixkv.config import Scrub, TierDtype, resolve
from radixkv.configuration.definitions import COMMANDS, defaults, displayed, without_password
from radixkv.configuration.private_files import read_secrets, warn_unless_private
from radixkv.coordination.routing.costs import COSTS
from radixkv.coordination.settings import REDIS_SCHEMES, REPLICA_ID
from radixkv.errors import ConfigError
from radixkv.events.event_settings import EventSettings
from radixkv.service.limits import Limits
from radixkv.service.logs import LogFormat
from radixkv.service.prompt_lines import DEFAULT_RULES, LineRule, load
from radixkv.signing import mode_of, read_secret
from radixkv.sizes import Amount, amount_of, memory_of, physical_bytes
from radixkv.tiers.settings import DiskOptions, TierSettings, rate_of

DEFAULTS: Mapping[str, str] = defaults("serve")
ROUTE_DEFAULTS: Mapping[str, str] = defaults("route")
"""Default values. Settings that are not here have no default."""

_DEVICE = re.compile(r"(cpu|mps|(cuda|xpu)(:\d+)?)\Z")
_ENGINE = re.compile(r"[a-z][a-z0-9_-]{0,63}\Z")
_MAX_PASSWORD_BYTES = 4096
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
"""As browsers send it: a scheme and a host, perhaps with a port, no path and no slash at the end."""

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
class UsageSettings:
    """The folder of usage records, and the bytes after which a file is full."""

    folder: Path
    file_bytes: int


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """One valid configuration of a service process.

    - ``engine``: its name, see ``radixkv.engines.find_engine``.
    - ``fleet_secret``: at least MIN_SECRET_BYTES long; random if no file named one.
    - ``kv_memory``: memory of the cache, in place of ``num_blocks``; None: these.
    - ``threads``: compute threads; 0 for torch's own choice.
    - ``advertise``: base URL at which other replicas reach this one; None for the bound address.
    - ``record``: the file for a trace of the traffic; None for no trace.
    - ``usage``: where usage records are written; None: nowhere.
    - ``tiers``: host memory and a disk below the cache; None: nothing.
    - ``events``: where KV events are published; None: nowhere.
    - ``tls``: None serves HTTP without TLS.
    - ``log_level``: a level name of ``logging``. ``log_format``, ``access_log``: see ``service.logs``.
    - ``cors_origins``: origins of web pages that may call; ``*`` for all.
    - ``time_zone``: of the date that chat templates show; None: the machine's.
    - ``prompt_rules``: rules for lines of prompts that change.
    """

    host: str
    port: int
    lease_s: float
    num_blocks: int
    kv_memory: Amount | None
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
    usage: UsageSettings | None
    tiers: TierSettings | None
    events: EventSettings | None
    tls: Tls | None
    limits: Limits
    log_level: str
    log_format: LogFormat
    access_log: bool
    cors_origins: tuple[str, ...]
    time_zone: str | None
    prompt_rules: tuple[LineRule, ...]

    @classmethod
    def parse(cls, values: Mapping[str, str | None], names: Mapping[str, str] | None = None) -> ServeSettings:
        """Parse settings from text. ``values`` maps names such as ``num-blocks`` to text or None (the default).

        ``names`` gives each setting's name in errors; the default is ``--num-blocks``.
        Raises ConfigError.
        """
        reader = _Reader("serve", values, names)
        settings = cls(
            host=reader.host(),
            port=reader.integer("port"),
            lease_s=reader.number("lease-s"),
            num_blocks=reader.integer("num-blocks"),
            kv_memory=reader.kv_memory(),
            block_size=reader.integer("block-size"),
            engine=reader.pattern("engine", _ENGINE, "hf, or the name of an engine that a package brings"),
            policy=reader.policy(),
            scrub=cast("Scrub", reader.choice("scrub")),
            device=reader.pattern("device", _DEVICE, "cpu, mps, cuda, cuda:N, xpu or xpu:N"),
            dtype=reader.choice("dtype"),
            threads=reader.integer("threads"),
            model=reader.path("model", directory=True),
            keys=reader.path("keys", directory=False),
            redis=reader.redis_url(),
            replica=reader.replica(),
            fleet_secret=(secret := reader.secret()),
            advertise=reader.base_url("advertise"),
            record=reader.new_path("record"),
            usage=reader.usage(),
            tiers=reader.tiers(secret, reader.previous_secrets()),
            events=reader.events(),
            tls=reader.tls(),
            limits=reader.limits(),
            log_level=reader.choice("log-level"),
            log_format=cast("LogFormat", reader.choice("log-format")),
            access_log=reader.choice("access-log") == "all",
            cors_origins=reader.origins(),
            time_zone=reader.time_zone(),
            prompt_rules=reader.prompt_rules(),
        )
        _require_keys(settings.keys, settings.host, reader)
        return settings


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
    log_format: LogFormat
    access_log: bool
    cors_origins: tuple[str, ...]
    time_zone: str | None
    prompt_rules: tuple[LineRule, ...]

    @classmethod
    def parse(cls, values: Mapping[str, str | None], names: Mapping[str, str] | None = None) -> RouteSettings:
        """Parse settings from text, as ``ServeSettings.parse`` does. Raises ConfigError."""
        reader = _Reader("route", values, names)
        redis = reader.redis_url()
        if redis is None:
            raise ConfigError(reader.name("redis"), None, "the URL of the Redis that the replicas use")
        settings = cls(
            host=reader.host(),
            port=reader.integer("port"),
            redis=redis,
            fleet_secret=reader.secret(),
            keys=reader.path("keys", directory=False),
            model=reader.path("model", directory=True),
            cost=reader.one_of("cost", tuple(COSTS)),
            temperature=reader.number("temperature"),
            max_segments=reader.integer("max-segments"),
            tls=reader.tls(),
            limits=reader.limits(),
            log_level=reader.choice("log-level"),
            log_format=cast("LogFormat", reader.choice("log-format")),
            access_log=reader.choice("access-log") == "all",
            cors_origins=reader.origins(),
            time_zone=reader.time_zone(),
            prompt_rules=reader.prompt_rules(),
        )
        _require_keys(settings.keys, settings.host, reader)
        return settings


def _require_keys(keys: Path | None, host: str, reader: _Reader) -> None:
    if keys is None and not is_loopback(host):
        problem = f"is not set, but the host {host} is not loopback; set a keys file, or use a loopback address as host"
        raise ConfigError(reader.name("keys"), None, "a keys file", problem=problem)


class _Reader:
    """Reads one setting after the other out of text; each method raises ConfigError."""

    def __init__(
        self, command: str, values: Mapping[str, str | None], names: Mapping[str, str] | None
    ) -> None:
        given = {name: value for name, value in values.items() if value is not None}
        self._settings, self._names = COMMANDS[command], names or {}
        self._values = {**defaults(command), **given}

    def name(self, setting: str) -> str:
        return self._names.get(setting, f"--{setting}")

    def text(self, setting: str) -> str | None:
        return self._values.get(setting)

    def refuse(self, setting: str, allowed: str) -> ConfigError:
        text = self.text(setting)
        shown = None if text is None else displayed(self._settings[setting], text)
        return ConfigError(self.name(setting), shown, allowed)

    def integer(self, setting: str) -> int:
        text, bounds = self._values[setting].strip(), self._settings[setting]
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not bounds.low <= int(text) <= bounds.high:
            raise self.refuse(setting, bounds.allowed)
        return int(text)

    def number(self, setting: str) -> float:
        bounds = self._settings[setting]
        try:
            value = float(self._values[setting])
        except ValueError:
            value = float("nan")
        if not bounds.low <= value <= bounds.high:
            raise self.refuse(setting, bounds.allowed)
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

    def choice(self, setting: str) -> str:
        return self.one_of(setting, self._settings[setting].choices)

    def one_of(self, setting: str, allowed: tuple[str, ...]) -> str:
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

    def origins(self) -> tuple[str, ...]:
        """Return the origins of web pages that may call."""
        text = self.text("cors-origin")
        found = () if text is None else tuple(each.strip() for each in text.split(","))
        if not all(each == "*" or _ORIGIN.fullmatch(each) for each in found):
            raise self.refuse("cors-origin", "an origin such as https://chat.example.org, or * for all")
        return found

    def time_zone(self) -> str | None:
        """Return the name of a zone that this machine's database, or the package tzdata, has."""
        text = self.text("time-zone")
        if text is None:
            return None
        try:
            return ZoneInfo(text).key
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise self.refuse(
                "time-zone", "a zone of this machine's IANA database (tzdata), such as Europe/Berlin or UTC"
            ) from None

    def prompt_rules(self) -> tuple[LineRule, ...]:
        path = self.path("prompt-rules", directory=False)
        return DEFAULT_RULES if path is None else load(self.name("prompt-rules"), path)

    def path(self, setting: str, *, directory: bool) -> Path | None:
        text = self.text(setting)
        if text is None:
            return None
        mode = mode_of(text) if text else None
        if mode is None or stat.S_ISDIR(mode) != directory:
            raise self.refuse(setting, "an existing directory" if directory else "an existing file")
        return Path(text)

    def new_path(self, setting: str) -> Path | None:
        text = self.text(setting)
        if text is None:
            return None
        path = Path(text)
        if not _can_be_made(text) or path.is_dir() or not path.parent.is_dir():
            raise self.refuse(setting, "a file in an existing directory")
        return path

    def usage(self) -> UsageSettings | None:
        text, file_bytes = self.text("usage"), self.integer("usage-file-bytes")
        return None if text is None else UsageSettings(self._new_folder("usage", text), file_bytes)

    def _new_folder(self, setting: str, text: str) -> Path:
        path = Path(text)
        if not _can_be_made(text) or (path.exists() and not path.is_dir()) or not path.parent.is_dir():
            raise self.refuse(setting, "a folder, or the path of a new one in an existing directory")
        return path

    def tiers(self, secret: bytes, previous: tuple[bytes, ...]) -> TierSettings | None:
        """``secret``: the fleet's, under which the disk's keys are sealed."""
        self._require_parts_of_disk()
        host_bytes, disk = self._memory(), self._disk(secret, previous)
        dtype = cast("TierDtype", self.choice("tier-dtype"))
        if not host_bytes:
            if dtype != "exact":
                raise self.refuse("host-memory", f"a value, because {self.name('tier-dtype')} is set")
            return None
        return TierSettings(host_bytes, disk, dtype=dtype)

    def _require_parts_of_disk(self) -> None:
        """Refuse a disk without its size, its memory or the secret, and what only a disk needs without one."""
        given = self._values.keys()  # none of these has a default
        for name, other in (
            ("host-memory", "disk"),
            ("disk-size", "disk"),
            ("disk", "disk-size"),
            ("fleet-secret", "disk"),
            ("disk", "disk-writes"),
        ):
            if other in given and name not in given:
                raise self.refuse(name, f"a value, because {self.name(other)} is set")

    def kv_memory(self) -> Amount | None:
        """Return the memory of the cache; None without."""
        text = self.text("kv-memory")
        return None if text is None else amount_of(self.name("kv-memory"), text)

    def _memory(self) -> int:
        """Return the bytes of host memory; 0 without."""
        text = self.text("host-memory")
        num_bytes = 0 if text is None else memory_of(self.name("host-memory"), text, physical_bytes())
        if text is not None and not num_bytes:
            raise self.refuse("host-memory", "at least two blocks")
        return num_bytes

    def _disk(self, secret: bytes, previous: tuple[bytes, ...]) -> DiskOptions | None:
        text, size, writes = (self.text(name) for name in ("disk", "disk-size", "disk-writes"))
        if text is None or size is None:
            return None
        path = self._new_folder("disk", text)
        file_system = os.statvfs(path if path.exists() else path.parent)
        num_bytes = memory_of(self.name("disk-size"), size, file_system.f_blocks * file_system.f_frsize)
        if not num_bytes:
            raise self.refuse("disk-size", "at least one record")
        awaits = self.text("redis") is not None
        rate = None if writes is None else self._rate("disk-writes", writes)
        return DiskOptions(path, num_bytes, secret, awaits, bytes_per_s=rate, previous_secrets=previous)

    def _rate(self, setting: str, text: str) -> float:
        try:
            return rate_of(setting, text)
        except ConfigError as error:
            raise self.refuse(setting, error.allowed) from None

    def events(self) -> EventSettings | None:
        content = self.choice("events-content")
        scope = self.choice("events-scope")
        endpoint, topic, replay = (self.text(name) for name in ("events", "events-topic", "events-replay"))
        if endpoint is None:
            for name, value in (("events-topic", topic), ("events-replay", replay)):
                if value is not None:
                    raise self.refuse("events", f"an endpoint, because {self.name(name)} is set")
            return None
        try:
            return EventSettings(
                block_size=self.integer("block-size"),
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
            requests_per_s=self.number("requests-per-s"),
            burst=self.integer("burst"),
            max_concurrent=self.integer("max-concurrent"),
            max_queued=self.integer("max-queued"),
            max_body_bytes=self.integer("max-body-bytes"),
            timeout_s=self.number("timeout-s"),
            body_timeout_s=self.number("body-timeout-s"),
            drain_s=self.number("drain-s"),
        )

    def tls(self) -> Tls | None:
        cert, key = self.path("tls-cert", directory=False), self.path("tls-key", directory=False)
        if cert is None and key is None:
            return None
        if cert is None or key is None:
            missing, given = ("tls-key", "tls-cert") if key is None else ("tls-cert", "tls-key")
            raise self.refuse(missing, f"an existing file, because {self.name(given)} is set")
        tls = Tls(cert, key)
        try:
            tls_context(tls)
        except (OSError, ValueError):
            allowed = f"a certificate in PEM that belongs to the unencrypted key of {self.name('tls-key')}"
            raise self.refuse("tls-cert", allowed) from None
        warn_unless_private(key, self.name("tls-key"))
        return tls

    def redis_url(self) -> str | None:
        text = self.text("redis")
        if text is not None and text.partition("://")[0] not in REDIS_SCHEMES:
            allowed = "a URL such as redis://127.0.0.1:6379/0, or one that begins with " + ", ".join(
                REDIS_SCHEMES
            )
            raise self.refuse("redis", allowed)
        return self._with_password(text)

    def _with_password(self, url: str | None) -> str | None:
        """Return the URL with the password of the file ``redis-password``, if there is one."""
        path = self.path("redis-password", directory=False)
        if path is None:
            return url
        if url is None:
            raise self.refuse("redis", f"a URL, because {self.name('redis-password')} is set")
        scheme, _, rest = url.partition("://")
        user, at, host = rest.rpartition("@")
        if without_password(url) != url and (":" in user or "password=" in url):
            allowed = f"a URL without a password, because {self.name('redis-password')} is set"
            raise self.refuse("redis", allowed)
        warn_unless_private(path, self.name("redis-password"))
        content = read_secret(self.name("redis-password"), str(path), 1, _MAX_PASSWORD_BYTES)
        return f"{scheme}://{user if at else ''}:{quote(content, safe='')}@{host}"

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
        text = self.text("fleet-secret")
        if text is None:
            if self.text("redis") is not None:
                raise self.refuse(
                    "fleet-secret", "a file with the secret that all replicas share, because --redis is set"
                )
            return secrets.token_bytes(32)
        return self._secrets_in("fleet-secret", [text])[0]

    def previous_secrets(self) -> tuple[bytes, ...]:
        """Return the fleet's previous secrets, the latest first."""
        text = self.text("previous-secrets")
        if text is None:
            return ()
        if self.text("fleet-secret") is None:
            raise self.refuse("fleet-secret", f"a value, because {self.name('previous-secrets')} is set")
        paths = text.split(",")
        if not all(paths):
            raise self.refuse("previous-secrets", "existing files, between commas")
        return tuple(self._secrets_in("previous-secrets", paths))

    def _secrets_in(self, setting: str, paths: list[str]) -> list[bytes]:
        """Return the secrets in files. Warns of files that other users can access."""
        return read_secrets((self.name(setting), each) for each in paths)


def _can_be_made(path: str) -> bool:
    """Whether something is there, or may be: a path without NUL, whose names aren't too long."""
    try:
        Path(path).lstat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return bool(path)


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return a server's context with the certificate. Raises OSError or ValueError if the files don't fit."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key, password=lambda: b"")  # never prompt for a password
    return context


def is_loopback(host: str) -> bool:
    """Whether every address that ``host`` resolves to is loopback. One name lookup."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return bool(found) and all(
        ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in found
    )
