"""The settings of ``radixkv serve`` and ``radixkv route``: each is one field of a pydantic model.

    flag > environment > file > default

A field has the type of a setting, its bounds, its default, and its meaning as docstring. A setting without a default
says in brackets what holds then. The options of the command line, the environment variables, the keys of the file, the
checks, ``radixkv config`` and the reference are made of the fields (``SETTINGS``). The field ``num_blocks`` is
``--num-blocks``, ``RADIXKV_NUM_BLOCKS`` and ``num-blocks: 4096``.

Every value that is given comes as text (``precedence`` says from where). ``parse`` turns all texts into one frozen
value, or raises ConfigError for every invalid one, with its name as the user wrote it (``--port``, ``RADIXKV_PORT`` or
``radixkv.yaml:3: port``), its value and what is allowed. Secrets are ``SecretStr`` and ``SecretBytes``, which no
message and no list shows.

The sources aren't those of pydantic-settings, which forgets where a value came from: errors, ``config show`` and
SIGHUP need the flag, the variable or the line. Imports neither torch nor starlette.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, get_args
from urllib.parse import quote, urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SecretBytes,
    SecretStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from radixkv.config import Scrub, TierDtype, resolve
from radixkv.configuration.errors import raise_all
from radixkv.configuration.private_files import read_secrets, warn_unless_private
from radixkv.configuration.urls import without_password
from radixkv.coordination.routing.costs import MAX_TEMPERATURE, CostName
from radixkv.coordination.settings import REDIS_SCHEMES, REPLICA_ID
from radixkv.errors import ConfigError
from radixkv.events.event_settings import EventSettings
from radixkv.metering.appender import FILE_BYTES
from radixkv.service.prompt_lines import DEFAULT_RULES, LineRule, load
from radixkv.signing import mode_of, read_secret, shown_path
from radixkv.sizes import Amount, allowed_amounts, amount_of, memory_of, physical_bytes
from radixkv.tiers.settings import DiskOptions, TierSettings, rate_of

if TYPE_CHECKING:
    from radixkv.service.limits import Limits

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
class Setting:
    """What the sources and the lists know of a setting.

    - ``text``: its meaning, one sentence. ``allowed``: the allowed values in words.
    - ``default``: its value if nobody gives one; None: it has none, and ``unset`` says what happens then.
    - ``displayed``: returns a value for messages and lists, without secrets. Never raises.
    - ``reloads``: a running process takes a new value at SIGHUP. Others need a restart.
    - ``many``: the option may be given several times. Elsewhere commas separate the values.
    """

    name: str
    variable: str
    text: str
    allowed: str
    default: str | None
    unset: str
    displayed: Callable[[str], str]
    is_number: bool
    reloads: bool
    many: bool


def variable_of(setting: str) -> str:
    """Return the environment variable of a setting."""
    return "RADIXKV_" + setting.replace("-", "_").upper()


def shown_paths(text: str) -> str:
    """Return paths of files of secrets for display. A text that isn't a path may be the secret itself."""
    return text if all(shown_path(each) == each for each in text.split(",")) else "…"


@dataclass(frozen=True)
class _From:
    """How the text of a setting becomes its value.

    - ``parse``: gets the setting's name, for errors, and the text. It raises ValueError for a text that isn't what is
      ``allowed``, by default the choices or bounds of the type, and ConfigError where there is more to say. Of what it
      returns, pydantic makes the field's type.
    - ``check``: gets a valid value, and in ``data`` the valid values of the fields before. It raises ConfigError, but
      doesn't if a value that it needs is missing there.
    """

    allowed: str = ""
    parse: Callable[[str, str], Any] = lambda name, text: text
    displayed: Callable[[str], str] = str
    check: Callable[[Any, ValidationInfo], None] = lambda value, info: None
    many: bool = False

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(self._value, handler(source))

    def _value(self, text: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            value = handler(self.parse(_name(info), text) if isinstance(text, str) else text)
            self.check(value, info)
        except ConfigError as error:  # pydantic collects it so
            raise PydanticCustomError("setting", "{error}", {"error": error}) from None
        return value


def _name(info: ValidationInfo, setting: str | None = None) -> str:
    """Return a setting's name as its user wrote it; by default of the one that is validated."""
    assert info.context is not None and info.field_name is not None, "parse validates"
    return str(info.context[setting or info.field_name.replace("_", "-")])


def _if(is_allowed: Callable[[str], object]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if not is_allowed(text):
            raise ValueError
        return text

    return parse


def _matches(pattern: str) -> Callable[[str, str], str]:
    return _if(re.compile(pattern).fullmatch)


def _is_folder(path: str) -> bool | None:
    """Whether a path is that of a folder; None if nothing is there."""
    mode = mode_of(path) if path else None
    return None if mode is None else stat.S_ISDIR(mode)


def _is_file(path: str) -> bool:
    return _is_folder(path) is False


def _can_be_file(path: str) -> bool:
    return _can_be_made(path) and not _is_folder(path)


def _can_be_folder(path: str) -> bool:
    return _can_be_made(path) and not _is_file(path)


def _can_be_made(path: str) -> bool:
    """Whether something is at the path, or may be: no NUL, no name that is too long, and its folder exists."""
    try:
        Path(path).lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        return False
    return bool(path) and Path(path).parent.is_dir()


def _host(name: str, text: str) -> str:
    try:
        socket.getaddrinfo(text.strip(), 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError from None
    return text.strip()


def _policy(name: str, text: str) -> str:
    """Return the name of a policy, which is imported if it isn't built in."""
    resolve(name, text)
    return text


def _origins(name: str, text: str) -> list[str]:
    found = [each.strip() for each in text.split(",")]
    if not all(each == "*" or _ORIGIN.fullmatch(each) for each in found):
        raise ValueError
    return found


def _time_zone(name: str, text: str) -> str:
    """Return the name of a zone that this machine's database, or the package tzdata, has."""
    try:
        return ZoneInfo(text).key
    except (ZoneInfoNotFoundError, OSError):
        raise ValueError from None


def _host_memory(name: str, text: str) -> int:
    if not (num_bytes := memory_of(name, text, physical_bytes())):
        raise ValueError
    return num_bytes


def _disk_size(name: str, text: str) -> str:
    """Return the size as written: what a share is of depends on the disk."""
    if not memory_of(name, text, 1 << 50):
        raise ValueError
    return text


def _rules(name: str, text: str) -> tuple[LineRule, ...]:
    if not _is_file(text):
        raise ValueError
    return load(name, Path(text))


def _base_url(name: str, text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise ValueError
    return text.rstrip("/")


def _secrets(name: str, text: str) -> list[bytes]:
    """Return the secrets in files. Warns of files that other users can access."""
    if not all(paths := text.split(",")):
        raise ValueError
    return read_secrets((name, path) for path in paths)


def _password(name: str, text: str) -> bytes:
    if not _is_file(text):
        raise ValueError
    warn_unless_private(Path(text), name)
    return read_secret(name, text, 1, _MAX_PASSWORD_BYTES)


# rules that span settings ---------------------------------------------------------------------------------------------


def _no_demo_keys_outside(keys: Path | None, info: ValidationInfo) -> None:
    """An address that is not loopback needs ``--keys``: the demo keys are public knowledge."""
    host = info.data.get("host")
    if keys is None and host is not None and not is_loopback(host):
        problem = f"is not set, but the host {host} is not loopback; set a keys file, or use a loopback address as host"
        raise ConfigError(_name(info), None, "a keys file", problem=problem)


def _one_password(password: SecretBytes | None, info: ValidationInfo) -> None:
    given = info.data.get("redis")
    url = "" if given is None else given.get_secret_value()
    user = url.partition("://")[2].rpartition("@")[0]
    if password is not None and without_password(url) != url and (":" in user or "password=" in url):
        allowed = f"a URL without a password, because {_name(info)} is set"
        raise ConfigError(_name(info, "redis"), without_password(url), allowed)


def _lossy_somewhere(dtype: TierDtype, info: ValidationInfo) -> None:
    if dtype != "exact" and info.data.get("host_memory", 1) is None:
        raise ConfigError(_name(info, "host-memory"), None, f"a value, because {_name(info)} is set")


def _key_of_certificate(key: Path | None, info: ValidationInfo) -> None:
    cert = info.data.get("tls_cert")
    if key is None or cert is None:
        return
    try:
        tls_context(Tls(cert, key))
    except (OSError, ValueError):
        allowed = f"a certificate in PEM that belongs to the unencrypted key of {_name(info)}"
        raise ConfigError(_name(info, "tls-cert"), str(cert), allowed) from None
    warn_unless_private(key, _name(info))


def _publishable(scope: str, info: ValidationInfo) -> None:
    """All settings of events are checked together, at the last one."""
    try:
        _event_settings({**info.data, "events_scope": scope})
    except KeyError:
        return  # one of them is invalid
    except ConfigError as error:
        raise ConfigError(_name(info, EVENT_OPTIONS[error.setting]), error.value, error.allowed) from None


def _event_settings(found: Mapping[str, Any]) -> EventSettings | None:
    """Return where events are published, by fields. Raises KeyError, ConfigError with a name of EventSettings."""
    if found["events"] is None:
        return None
    return EventSettings(
        block_size=found["block_size"],
        endpoint=found["events"],
        replay_endpoint=found["events_replay"],
        topic=found["events_topic"] or "",
        publishes_prompts=found["events_content"] == "prompts-in-clear",
        allows_network=found["events_scope"] == "network",
    )


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: a certificate with its chain, and its key, unencrypted."""

    cert: Path
    key: Path


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


# models ---------------------------------------------------------------------------------------------------------------

Integer = Annotated[int, _From(parse=_matches(r"\s*[+-]?[0-9]{1,18}\s*"))]
Count = Annotated[Integer, Field(ge=1, le=10**6)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(ge=0.001, le=1e6)]
Endpoint = Annotated[str | None, _From("an endpoint: tcp://IP:PORT, or ipc:// and an absolute path")]
File = Annotated[Path | None, _From("an existing file", _if(_is_file))]
Folder = Annotated[Path | None, _From("an existing directory", _if(_is_folder))]
_NEW_FOLDER = _From("a folder, or the path of a new one in an existing directory", _if(_can_be_folder))
NewFolder = Annotated[Path | None, _NEW_FOLDER]
Keys = Annotated[Path | None, _From("an existing file", _if(_is_file), shown_paths, _no_demo_keys_outside)]
_SECRET = _From(
    "a file that holds the secret", lambda name, text: read_secrets([(name, text)])[0], shown_paths
)
Secret = Annotated[SecretBytes, _SECRET]
Url = Annotated[
    SecretStr | None,
    _From(
        f"a URL such as redis://127.0.0.1:6379/0, or one that begins with {', '.join(REDIS_SCHEMES)}",
        _if(lambda url: url.partition("://")[0] in REDIS_SCHEMES),
        without_password,
    ),
]


class Reloaded(BaseModel):
    """The settings that a running process takes at SIGHUP. They are the last in lists."""

    model_config = ConfigDict(
        frozen=True,
        validate_default=True,
        hide_input_in_errors=True,
        defer_build=True,
        use_attribute_docstrings=True,
        alias_generator=lambda name: name.replace("_", "-"),
    )

    tls_cert: File = None
    """Certificate in PEM, with its chain; serves HTTPS. [none: HTTP]"""
    tls_key: Annotated[
        Path | None, _From("an existing file", _if(_is_file), shown_paths, _key_of_certificate)
    ] = None
    """Private key of the certificate in PEM, unencrypted. [none: HTTP]"""
    requests_per_s: Positive = 1000
    """Requests a second for each tenant, on average."""
    burst: Count = 2000
    """Most requests of a tenant at once."""
    max_concurrent: Count = 256
    """Most requests of a tenant in progress."""
    max_queued: Count = 32
    """Most requests of a tenant that wait for the model."""
    max_body_bytes: Annotated[Integer, Field(ge=1, le=2**30)] = 4 * 2**20
    """Most bytes of a body."""
    timeout_s: Positive = 600
    """Seconds after which a request is cancelled."""
    body_timeout_s: Positive = 30
    """Seconds for a body to arrive."""
    drain_s: Annotated[Number, Field(ge=0, le=86_400)] = 20
    """Seconds for requests in progress to finish after SIGTERM."""
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "warning"
    """critical, error, warning, info or debug."""

    @property
    def limits(self) -> Limits:
        """The bounds on requests."""
        from radixkv.service.limits import Limits  # `--help` needs neither it nor the worker behind it

        names = {each.name for each in fields(Limits)} & Reloaded.model_fields.keys()
        return Limits(**{name: getattr(self, name) for name in names})

    @property
    def tls(self) -> Tls | None:
        """None serves HTTP without TLS."""
        return None if self.tls_cert is None or self.tls_key is None else Tls(self.tls_cert, self.tls_key)


class Settings(Reloaded):
    """Settings of services and routers alike. Made by ``parse``, and frozen."""

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "redis": ("fleet-secret",),
        "redis-password": ("redis",),
        "tls-cert": ("tls-key",),
        "tls-key": ("tls-cert",),
    }
    """What must be given too if a setting is; with "" what must always be."""

    host: Annotated[str, _From("an address of this machine, such as 127.0.0.1 or ::1", _host)] = "127.0.0.1"
    """Address to bind; an address other than loopback needs --keys."""
    port: Annotated[Integer, Field(ge=0, le=65_535)] = 8400
    """Port to bind; 0: any free port."""
    model: Folder = None
    """Directory of a transformers causal LM and its tokenizer. [a small demo model, random weights]"""
    keys: Keys = None
    """JSON file of keys: {"operator": "…", "tenants": {"acme": "…"}}. [demo keys]"""
    redis: Url = None
    """URL of the Redis that all replicas share. [none: one replica alone]"""
    redis_password: Annotated[
        SecretBytes | None, _From("an existing file", _password, shown_paths, _one_password)
    ] = None
    """File with the password for Redis, if the URL has none. [none]"""
    fleet_secret: Secret = Field(default_factory=lambda: SecretBytes(secrets.token_bytes(32)))
    """File with the secret that all replicas share; required with --redis. [random]"""
    log_format: Literal["text", "json"] = "text"
    """Log lines as text, or as JSON."""
    access_log: Literal["none", "all"] = "none"
    """Which answered requests are lines of the log."""
    time_zone: Annotated[
        str | None,
        _From("a zone of this machine's IANA database (tzdata), such as Europe/Berlin or UTC", _time_zone),
    ] = None
    """Zone of the date that chat templates show, such as Europe/Berlin; the same at all replicas and routers. [the
    machine's]"""
    prompt_rules: Annotated[tuple[LineRule, ...], _From("an existing file", _rules)] = DEFAULT_RULES
    """JSON file of rules for lines of prompts that change; the same at all replicas and routers. [one rule,
    claude-code-billing]"""
    cors_origin: Annotated[
        tuple[str, ...],
        _From("an origin such as https://chat.example.org, or * for all", _origins, many=True),
    ] = ()
    """Origin of web pages that may call, such as https://chat.example.org; may be given several times. [none]"""

    @classmethod
    def parse(
        cls,
        values: Mapping[str, str | ConfigError | None],
        names: Mapping[str, str] | None = None,
        errors: Iterable[ConfigError] = (),
    ) -> Self:
        """Parse settings. ``values`` maps names such as ``num-blocks`` to text or None (the default).

        ``names`` gives each setting's name in errors; the default is ``--num-blocks``. ``errors``: those of the
        sources; a value that is one of them counts as given. Raises ConfigError, or ConfigErrors for several.
        """
        known = cls.settings()
        given = {name: text for name, text in values.items() if text is not None}
        named = {name: f"--{name}" for name in known} | dict(names or {})
        made, found = None, [*errors]
        try:
            made = cls.model_validate(given, context=named)
        except ValidationError as error:
            # A given value's place is its alias, a default's is the field.
            refused = {str(each["loc"][0]).replace("_", "-"): each.get("ctx", {}) for each in error.errors()}
            for name in (name for name in known if name in refused):
                text, said = given.get(name), refused[name].get("error")
                if isinstance(said, ConfigError):
                    found.append(said)
                elif isinstance(text, str):  # if not, it is an error of its source
                    found.append(ConfigError(named[name], known[name].displayed(text), known[name].allowed))
        missing: dict[str, ConfigError] = {}
        for by, needed in ((by, each) for by, those in cls.needs.items() for each in those):
            if needed not in given and (by in given or not by):
                allowed = known[needed].allowed + (f", because {named[by]} is set" if by else "")
                missing.setdefault(needed, ConfigError(named[needed], None, allowed))
        raise_all([*found, *missing.values()])
        assert made is not None, "pydantic's errors are in found"
        return made

    @classmethod
    def settings(cls) -> Mapping[str, Setting]:
        """Return all settings, by name, in the order of lists."""
        found = [_described(name, field) for name, field in cls.model_fields.items()]
        return {each.name: each for each in sorted(found, key=lambda each: each.reloads)}

    @property
    def store_url(self) -> SecretStr | None:
        """The URL of the Redis, with the password of ``redis_password``; None without."""
        if self.redis is None or self.redis_password is None:
            return self.redis
        scheme, _, rest = self.redis.get_secret_value().partition("://")
        user, at, host = rest.rpartition("@")
        password = quote(self.redis_password.get_secret_value(), safe="")
        return SecretStr(f"{scheme}://{user if at else ''}:{password}@{host}")


def _described(field_name: str, field: FieldInfo) -> Setting:
    name = field_name.replace("_", "-")
    text, _, unset = " ".join((field.description or "").split()).removesuffix("]").partition(" [")
    how = next((each for each in field.metadata if isinstance(each, _From)), _From())
    bounds = {at: getattr(each, at) for each in field.metadata for at in ("ge", "le") if hasattr(each, at)}
    if field.annotation is int:
        allowed = "an integer from {ge} to {le}".format(**bounds)
    elif field.annotation is float:
        unit = " of seconds" if name.endswith("-s") and not name.endswith("-per-s") else ""
        allowed = "a number{} from {ge:g} to {le:g}".format(unit, **bounds)
    else:
        allowed = how.allowed or f"one of {', '.join(get_args(field.annotation))}"
    return Setting(
        name,
        variable_of(name),
        text,
        allowed,
        default=str(field.default) if isinstance(field.default, str | int) else None,
        unset=unset,
        displayed=how.displayed,
        is_number=bool(bounds),
        reloads=field_name in Reloaded.model_fields,
        many=how.many,
    )


class ServeSettings(Settings):
    """One valid configuration of a service process."""

    needs = {
        **Settings.needs,
        "disk": ("host-memory", "disk-size", "fleet-secret"),
        "disk-size": ("disk",),
        "disk-writes": ("disk",),
        "previous-secrets": ("fleet-secret",),
        "events-topic": ("events",),
        "events-replay": ("events",),
    }

    replica: Annotated[
        str, _From("1 to 64 letters, digits, dots, dashes or underscores", _matches(REPLICA_ID))
    ] = Field(default_factory=lambda: f"replica-{secrets.token_hex(4)}")
    """Name of this replica in its fleet. [random]"""
    lease_s: Annotated[Number, Field(ge=0.5, le=3600)] = 10
    """Seconds without a heartbeat after which a replica counts as gone."""
    num_blocks: Annotated[Integer, Field(ge=2, le=2**31 - 1)] = 4096
    """Blocks in the cache, without --kv-memory."""
    kv_memory: Annotated[
        Amount | None, _From(allowed_amounts(("bytes", "share", "auto", "blocks")), amount_of)
    ] = None
    """Memory of the cache: bytes such as 20GiB, a share of what the model leaves such as 60%, auto, or blocks.
    [--num-blocks]"""
    block_size: Annotated[Integer, Field(ge=1, le=1024)] = 16
    """Tokens in a block. At the next start another number drops all records of a disk."""
    engine: Annotated[
        str, _From("hf, or the name of an engine that a package brings", _matches("[a-z][a-z0-9_-]{0,63}"))
    ] = "hf"
    """Engine: hf (transformers), vllm, or the name of one that an installed package brings."""
    policy: Annotated[str, _From("the name of a policy, or package.module:Class", _policy)] = "learned"
    """Eviction policy; policies/README.md compares them."""
    host_memory: Annotated[
        int | None, _From("at least two blocks: bytes, 8GiB, a share such as 25%, or auto", _host_memory)
    ] = None
    """Host memory for evicted KV, which comes back from there: 8GiB, a share of the machine's such as 25%, or auto.
    [none]"""
    tier_dtype: Annotated[TierDtype, _From(check=_lossy_somewhere)] = "exact"
    """How host memory and disk keep KV: exact, or fp8 or int8, with 8 bits a value and small errors. Another one drops
    all records of a disk at the next start."""
    disk: NewFolder = None
    """Keep KV in this folder too, sealed, also across restarts; needs --host-memory and --fleet-secret. [none]"""
    disk_size: Annotated[
        str | None, _From("at least one record: bytes, 200GiB, a share such as 60%, or auto", _disk_size)
    ] = None
    """Size of the disk tier: 200GiB, a share of its file system such as 60%, or auto. Another size drops all its
    records at the next start. [none]"""
    disk_writes: Annotated[
        float | None, _From("bytes in a time, such as '2TB/day', '80GiB/hour' or '20MB/s'", rate_of)
    ] = None
    """Most bytes written to the disk on average, such as 2TB/day, first come, first served. [no bound]"""
    scrub: Scrub = "cross-tenant"
    """Zero reused blocks: cross-tenant (if the tenant changes), always or never."""
    device: Annotated[
        str, _From("cpu, mps, cuda, cuda:N, xpu or xpu:N", _matches(r"cpu|mps|(cuda|xpu)(:\d+)?"))
    ] = "cpu"
    """Torch device of model and cache."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Element type of --model: float32, bfloat16 or float16."""
    threads: Annotated[Integer, Field(ge=0, le=1024)] = 0
    """Compute threads; 0: torch chooses."""
    previous_secrets: Annotated[
        tuple[SecretBytes, ...], _From("existing files, between commas", _secrets, shown_paths)
    ] = ()
    """Files with previous fleet secrets, between commas: disks know them still. [none]"""
    advertise: Annotated[
        str | None, _From("a base URL such as http://10.0.0.7:8400", _base_url, without_password)
    ] = None
    """Base URL at which other replicas reach this one. [the bound address]"""
    record: Annotated[Path | None, _From("a file in an existing directory", _if(_can_be_file))] = None
    """Append a trace of the traffic to this file: keyed hashes of blocks, no token ids. [no]"""
    usage: NewFolder = None
    """Write usage records to this folder, as JSON lines; made with mode 0700 if it is missing. [no]"""
    usage_file_bytes: Annotated[Integer, Field(ge=2**16, le=2**40)] = FILE_BYTES
    """Bytes after which a new file of usage records is begun, as on each day."""
    events: Endpoint = None
    """Publish KV events of vLLM's format at this ZMQ endpoint: tcp://127.0.0.1:5557 or ipc:///path. [no]"""
    events_replay: Endpoint = None
    """Endpoint that answers requests for missed events. [the next port, or the path with .replay]"""
    events_topic: Annotated[str | None, _From("text")] = None
    """Topic of the events. [none]"""
    events_content: Literal["digests", "prompts-in-clear"] = "digests"
    """digests (keyed), or prompts-in-clear: all tenants' token ids, adapters and salts."""
    events_scope: Annotated[Literal["loopback", "network"], _From(check=_publishable)] = "loopback"
    """Endpoints may be loopback, or any address of the network."""

    @property
    def event_settings(self) -> EventSettings | None:
        """Where KV events are published; None: nowhere."""
        return _event_settings(vars(self))

    @property
    def tiers(self) -> TierSettings | None:
        """Host memory and a disk below the cache; None: nothing."""
        disk = None
        if self.disk is not None and self.disk_size is not None:
            there = os.statvfs(self.disk if self.disk.exists() else self.disk.parent)
            disk = DiskOptions(
                self.disk,
                memory_of("--disk-size", self.disk_size, there.f_blocks * there.f_frsize),
                self.fleet_secret.get_secret_value(),
                awaits_generations=self.redis is not None,
                bytes_per_s=self.disk_writes,
                previous_secrets=tuple(each.get_secret_value() for each in self.previous_secrets),
            )
        return (
            None if self.host_memory is None else TierSettings(self.host_memory, disk, dtype=self.tier_dtype)
        )


class RouteSettings(Settings):
    """One valid configuration of a router's process; ``max_segments`` bounds its view."""

    needs = {"": ("redis", "fleet-secret"), **Settings.needs}

    port: Annotated[Integer, Field(ge=0, le=65_535)] = 8500
    """Port to bind; 0: any free port."""
    model: Folder = None
    """Directory with the tokenizer of the replicas' model. [the demo model's]"""
    keys: Keys = None
    """JSON file of keys of the replicas. [demo keys]"""
    redis: Url = None
    """URL of the Redis that the replicas share. [required]"""
    fleet_secret: Secret = SecretBytes(b"")
    """File with the secret that all replicas share. [required]"""
    cost: CostName = "linear"
    """linear, lmetric, threshold, stddev, least_loaded, round_robin or random."""
    temperature: Annotated[Number, Field(ge=0, le=MAX_TEMPERATURE)] = 0
    """0: the best replica first; above 0: chance has more influence."""
    max_segments: Annotated[Integer, Field(ge=1, le=10**9)] = 2_000_000
    """Most different segments in the view, about 20 bytes each."""


COMMANDS: Final[Mapping[str, type[ServeSettings] | type[RouteSettings]]] = {
    "serve": ServeSettings,
    "route": RouteSettings,
}
SETTINGS: Final = {command: kind.settings() for command, kind in COMMANDS.items()}
"""The settings of each command, by name."""

REMOVED: Final[Mapping[str, Mapping[str, str]]] = {
    "serve": {
        "disk-bandwidth": "no value any more: strict tenants have no part of the disk, their KV is kept in host memory "
        "alone (--host-memory); --disk-writes bounds what is written for the others",
        "lossy-host-memory": "--host-memory with --tier-dtype fp8 or int8, for all tenants",
        "lossy-disk": "--disk with --tier-dtype fp8 or int8, for all tenants; `radixkv disk reset` empties the old "
        "folder, or one of the two in it goes on: --disk FOLDER/int8",
        "lossy-disk-size": "--disk-size with --tier-dtype fp8 or int8, for all tenants",
    },
    "route": {},
}
"""Settings that a command had in earlier versions, and what to use in their place. A start that has one is refused."""
