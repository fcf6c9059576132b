"""Every setting of ``radixkv serve`` and ``radixkv route``, defined once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from radixkv.signing import shown_path

Kind = Literal[
    "text", "integer", "number", "choice", "file", "secret file", "folder", "new file", "new folder", "url"
]  # fmt: skip

FORMS: Final[Mapping[Kind, str]] = {
    "text": "text",
    "file": "the path of a file",
    "secret file": "the path of a file that holds the secret",
    "folder": "the path of a folder",
    "new file": "the path of a file to write",
    "new folder": "the path of a folder to write into",
    "url": "a URL",
}
"""The kinds that have no bounds, in words."""

_PASSWORD = re.compile(r"((?:pas|pw)\w{0,8}=)[^&#]*", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PLACE = r"(?:\[[0-9a-f:.]+(?:%\w+)?\]|[\w.~%-]*)(?::[0-9]{0,5})?"
_PLACES = rf"{_PLACE}(?:,{_PLACE})*"
_DATABASE = re.compile(rf"{_PLACES}(?:/[0-9/]*)?(?:\?(?:[a-z_]+=[^&#]*(?:&|$))*)?", re.IGNORECASE)
_ANY_PATH = re.compile(rf"{_PLACES}(?:/.*)?", re.IGNORECASE)
_HAS_ANY_PATH = ("http:", "https:", "unix:", "redis+sentinel:", "rediss+sentinel:")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. All values are texts; the kind says what a text must look like.

    - ``text``: its meaning, one sentence.
    - ``default``: its value if nobody gives one; None: it has none, and ``unset`` says what happens then.
    - ``low``, ``high``: bounds of an integer or a number, both allowed.
    - ``reloads``: a running process takes a new value at SIGHUP. Others need a restart.
    - ``many``: the option may be given several times. Elsewhere commas separate the values.
    """

    name: str
    text: str
    kind: Kind
    default: str | None = None
    unset: str = ""
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()
    reloads: bool = False
    many: bool = False

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return variable_of(self.name)

    @property
    def help(self) -> str:
        """Its meaning, and its default in brackets."""
        return f"{self.text}  [{self.unset if self.default is None else self.default}]"

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.kind == "integer":
            return f"an integer from {self.low:.0f} to {self.high:.0f}"
        if self.kind == "number":
            return f"a number{' of seconds' if self.name.endswith('-s') else ''} from {self.low:g} to {self.high:g}"
        return f"one of {', '.join(self.choices)}" if self.kind == "choice" else FORMS[self.kind]


def variable_of(setting: str) -> str:
    """Return the environment variable of a setting."""
    return "RADIXKV_" + setting.replace("-", "_").upper()


def without_password(url: str) -> str:
    """Return the URL for display: without what is before its last @, and without the value of ``…password=``.

    What doesn't begin with a scheme and ``://`` may be a password up to the @. The rest is shown only if it is hosts
    with ports, a path and options. If not, there may be a password without an @.
    """
    text = _PASSWORD.sub(r"\1…", url)
    scheme = "" if (found := _SCHEME.match(text)) is None else found[0]
    _, at, place = text[len(scheme) :].rpartition("@")
    form = _ANY_PATH if scheme.lower().startswith(_HAS_ANY_PATH) else _DATABASE
    return f"{scheme}{'…@' if at else ''}{place if form.fullmatch(place) else '…'}"


def displayed(setting: Setting, text: str) -> str:
    """Return a value for messages and lists.

    A URL has no password there. Where the file of a secret is wanted, a text that isn't a path may be the secret
    itself, so it isn't shown. Never raises.
    """
    if setting.kind == "url":
        return without_password(text)
    if setting.kind != "secret file":
        return text
    return text if all(shown_path(each) == each for each in text.split(",")) else "…"


def _integer(name: str, text: str, default: int, low: int, high: int, *, reloads: bool = False) -> Setting:
    return Setting(name, text, "integer", str(default), low=low, high=high, reloads=reloads)


def _number(
    name: str, text: str, default: float, low: float, high: float, *, reloads: bool = False
) -> Setting:
    return Setting(name, text, "number", f"{default:g}", low=low, high=high, reloads=reloads)


def _choice(name: str, text: str, default: str, *choices: str, reloads: bool = False) -> Setting:
    return Setting(name, text, "choice", default, choices=choices, reloads=reloads)


_TIME_ZONE: Final = Setting(
    "time-zone",
    "Zone of the date that chat templates show, such as Europe/Berlin; the same at all replicas and routers.",
    "text",
    unset="the machine's",
)

_PROMPT_RULES: Final = Setting(
    "prompt-rules",
    "JSON file of rules for lines of prompts that change; the same at all replicas and routers.",
    "file",
    unset="one rule, claude-code-billing",
)

HTTP: Final = (
    Setting(
        "tls-cert",
        "Certificate in PEM, with its chain; serves HTTPS.",
        "file",
        unset="none: HTTP",
        reloads=True,
    ),
    Setting(
        "tls-key",
        "Private key of the certificate in PEM, unencrypted.",
        "secret file",
        unset="none: HTTP",
        reloads=True,
    ),
    Setting(
        "cors-origin",
        "Origin of web pages that may call, such as https://chat.example.org; may be given several times.",
        "text",
        unset="none",
        many=True,
    ),
    _number(
        "requests-per-s",
        "Requests a second for each tenant, on average.",
        1000,
        0.001,
        1e6,
        reloads=True,
    ),
    _integer("burst", "Most requests of a tenant at once.", 2000, 1, 10**6, reloads=True),
    _integer("max-concurrent", "Most requests of a tenant in progress.", 256, 1, 10**6, reloads=True),
    _integer("max-queued", "Most requests of a tenant that wait for the model.", 32, 1, 10**6, reloads=True),
    _integer("max-body-bytes", "Most bytes of a body.", 4 * 2**20, 1, 2**30, reloads=True),
    _number("timeout-s", "Seconds after which a request is cancelled.", 600, 0.001, 1e6, reloads=True),
    _number("body-timeout-s", "Seconds for a body to arrive.", 30, 0.001, 1e6, reloads=True),
    _number(
        "drain-s",
        "Seconds for requests in progress to finish after SIGTERM.",
        20,
        0,
        86_400,
        reloads=True,
    ),
    _choice(
        "log-level",
        "critical, error, warning, info or debug.",
        "warning",
        *("critical", "error", "warning", "info", "debug"),
        reloads=True,
    ),
    _choice("log-format", "Log lines as text, or as JSON.", "text", "text", "json"),
    _choice("access-log", "Which answered requests are lines of the log.", "none", "none", "all"),
)
"""Settings of services and routers alike."""

_HOST = Setting("host", "Address to bind; an address other than loopback needs --keys.", "text", "127.0.0.1")
_REDIS_PASSWORD = Setting(
    "redis-password", "File with the password for Redis, if the URL has none.", "secret file", unset="none"
)

SERVE: Final = (
    _HOST,
    _integer("port", "Port to bind; 0: any free port.", 8400, 0, 65_535),
    Setting(
        "model",
        "Directory of a transformers causal LM and its tokenizer.",
        "folder",
        unset="a small demo model, random weights",
    ),
    Setting(
        "keys",
        'JSON file of keys: {"operator": "…", "tenants": {"acme": "…"}}.',
        "secret file",
        unset="demo keys",
    ),
    Setting("redis", "URL of the Redis that all replicas share.", "url", unset="none: one replica alone"),
    _REDIS_PASSWORD,
    Setting("replica", "Name of this replica in its fleet.", "text", unset="random"),
    _number("lease-s", "Seconds without a heartbeat after which a replica counts as gone.", 10, 0.5, 3600),
    _integer("num-blocks", "Blocks in the cache, without --kv-memory.", 4096, 2, 2**31 - 1),
    Setting(
        "kv-memory",
        "Memory of the cache: bytes such as 20GiB, a share of what the model leaves such as 60%, auto, or blocks.",
        "text",
        unset="--num-blocks",
    ),
    _integer(
        "block-size",
        "Tokens in a block. At the next start another number drops all records of a disk.",
        16,
        1,
        1024,
    ),
    Setting(
        "engine",
        "Engine: hf (transformers), vllm, or the name of one that an installed package brings.",
        "text",
        "hf",
    ),
    Setting("policy", "Eviction policy; policies/README.md compares them.", "text", "learned"),
    Setting(
        "host-memory",
        "Host memory for evicted KV, which comes back from there: 8GiB, a share of the machine's such as 25%, or auto.",
        "text",
        unset="none",
    ),
    _choice(
        "tier-dtype",
        "How host memory and disk keep KV: exact, or fp8 or int8, with 8 bits a value and small errors. Another one "
        "drops all records of a disk at the next start.",
        "exact",
        *("exact", "fp8", "int8"),
    ),
    Setting(
        "disk",
        "Keep KV in this folder too, sealed, also across restarts; needs --host-memory and --fleet-secret.",
        "new folder",
        unset="none",
    ),
    Setting(
        "disk-size",
        "Size of the disk tier: 200GiB, a share of its file system such as 60%, or auto. Another size drops all its "
        "records at the next start.",
        "text",
        unset="none",
    ),
    Setting(
        "disk-writes",
        "Most bytes written to the disk on average, such as 2TB/day, first come, first served.",
        "text",
        unset="no bound",
    ),
    _choice(
        "scrub",
        "Zero reused blocks: cross-tenant (if the tenant changes), always or never.",
        "cross-tenant",
        *("cross-tenant", "always", "never"),
    ),
    Setting("device", "Torch device of model and cache.", "text", "cpu"),
    _choice(
        "dtype",
        "Element type of --model: float32, bfloat16 or float16.",
        "float32",
        *("float32", "bfloat16", "float16"),
    ),
    _integer("threads", "Compute threads; 0: torch chooses.", 0, 0, 1024),
    Setting(
        "fleet-secret",
        "File with the secret that all replicas share; required with --redis.",
        "secret file",
        unset="random",
    ),
    Setting(
        "previous-secrets",
        "Files with previous fleet secrets, between commas: disks know them still.",
        "secret file",
        unset="none",
    ),
    Setting(
        "advertise",
        "Base URL at which other replicas reach this one.",
        "url",
        unset="the bound address",
    ),
    Setting(
        "record",
        "Append a trace of the traffic to this file: keyed hashes of blocks, no token ids.",
        "new file",
        unset="no",
    ),
    Setting(
        "usage",
        "Write usage records to this folder, as JSON lines; made with mode 0700 if it is missing.",
        "new folder",
        unset="no",
    ),
    _integer(
        "usage-file-bytes",
        "Bytes after which a new file of usage records is begun, as on each day.",
        2**24,
        2**16,
        2**40,
    ),
    _TIME_ZONE,
    _PROMPT_RULES,
    Setting(
        "events",
        "Publish KV events of vLLM's format at this ZMQ endpoint: tcp://127.0.0.1:5557 or ipc:///path.",
        "text",
        unset="no",
    ),
    Setting(
        "events-replay",
        "Endpoint that answers requests for missed events.",
        "text",
        unset="the next port, or the path with .replay",
    ),
    Setting("events-topic", "Topic of the events.", "text", unset="none"),
    _choice(
        "events-content",
        "digests (keyed), or prompts-in-clear: all tenants' token ids, adapters and salts.",
        "digests",
        *("digests", "prompts-in-clear"),
    ),
    _choice(
        "events-scope",
        "Endpoints may be loopback, or any address of the network.",
        "loopback",
        *("loopback", "network"),
    ),
    *HTTP,
)
"""Settings of ``radixkv serve``."""

ROUTE: Final = (
    Setting("redis", "URL of the Redis that the replicas share.", "url", unset="required"),
    _REDIS_PASSWORD,
    Setting("fleet-secret", "File with the secret that all replicas share.", "secret file", unset="required"),
    _HOST,
    _integer("port", "Port to bind; 0: any free port.", 8500, 0, 65_535),
    Setting("keys", "JSON file of keys of the replicas.", "secret file", unset="demo keys"),
    Setting(
        "model",
        "Directory with the tokenizer of the replicas' model.",
        "folder",
        unset="the demo model's",
    ),
    _TIME_ZONE,
    _PROMPT_RULES,
    Setting(
        "cost",
        "linear, lmetric, threshold, stddev, least_loaded, round_robin or random.",
        "text",
        "linear",
    ),
    _number(
        "temperature",
        "0: the best replica first; above 0: chance has more influence.",
        0,
        0,
        1e6,
    ),
    _integer(
        "max-segments",
        "Most different segments in the view, about 20 bytes each.",
        2_000_000,
        1,
        10**9,
    ),
    *HTTP,
)
"""Settings of ``radixkv route``."""

COMMANDS: Final[Mapping[str, Mapping[str, Setting]]] = {
    "serve": {each.name: each for each in SERVE},
    "route": {each.name: each for each in ROUTE},
}
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


def defaults(command: str) -> dict[str, str]:
    """Return the settings that have a default, with it."""
    return {each.name: each.default for each in COMMANDS[command].values() if each.default is not None}
