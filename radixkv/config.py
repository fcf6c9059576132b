"""The configuration of a cache: KVLayout, Namespace, Tenant, CacheConfig, and the names of eviction policies.

All are frozen, and validated when they are made. This module needs no torch.

A policy has one of three names:

    lru, learned, …        built in
    NAME                   an entry point of the group ``radixkv.policies``; imported at the first use of the name
    package.module:Class   imported at the first use

Only ``resolve`` imports. It is for names from code, the command line and the configuration file. A name from HTTP, a
keys file, Redis or a trace goes to ``require_loaded``, which imports nothing. It accepts built-in policies, and entry
points that were loaded before (``load_registered``, at the start of a service).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeVar

from radixkv.errors import ArgumentError, ConfigError, NamespaceError, shown
from radixkv_policies import POLICIES, Policy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layers, KV heads (not query heads), head size and element type of a model's KV.

    ``dtype`` is the name of a torch dtype, with or without ``torch.``, or a ``torch.dtype``. Raises ConfigError for
    counts below 1 and dtypes outside ELEMENT_BYTES.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"

    def __post_init__(self) -> None:
        for setting in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, setting)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"KVLayout.{setting}", value, "an integer ≥ 1")
        name = str(self.dtype).removeprefix("torch.")
        if name not in ELEMENT_BYTES:
            raise ConfigError("KVLayout.dtype", self.dtype, f"one of {', '.join(ELEMENT_BYTES)}")
        object.__setattr__(self, "dtype", name)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """2 × layers × KV heads × head size × bytes of an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    def block_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """``[num_layers, 2, block_size, num_kv_heads, head_dim]``."""
        return (self.num_layers, 2, block_size, self.num_kv_heads, self.head_dim)


MAX_FIELD_BYTES: Final = 1_024
"""Longest UTF-8 form of a field of a namespace."""

TENANT_ID_ALLOWED: Final = (
    f"the id of a tenant, a string of 1 to {MAX_FIELD_BYTES:,} bytes of UTF-8 "
    "without '/', other than '.' and '..'"
)

MAX_WEIGHTS: Final = 2**53 - 1
"""The highest version of the weights of a namespace: JSON and Redis keep it exactly."""

MIN_WEIGHT: Final = 1e-100
MAX_WEIGHT: Final = 1e100
"""Bounds of a tenant's weight. Within them, quotients and products with any number of blocks are finite."""


MAX_PINS: Final = 1_024
"""The most pins of a tenant, unless its settings give another number."""
_INCARNATION: Final = re.compile(r"[ -~]{0,64}")

Mode = Literal["burst", "strict"]

TierDtype = Literal["exact", "fp8", "int8"]
"""How the tiers below a cache keep KV: bit for bit, or with 8 bits a value."""

LOSSY_DTYPES: Final[tuple[TierDtype, ...]] = ("fp8", "int8")
QUANTIZABLE: Final = ("float32", "float16", "bfloat16")
"""Element types of KV that can be kept with a lossy ``tier_dtype``."""

NO_OWN_DTYPE: Final = (
    "none for a tenant alone: CacheConfig.tier_dtype, or --tier-dtype, is that of all tenants of a cache"
)
"""What an error says of a tenant's own ``tier_dtype``, which earlier versions had."""

_Class = TypeVar("_Class", bound=type)


def _refuses(
    error: type[ArgumentError] | type[ConfigError], argument: str, allowed: str
) -> Callable[[_Class], _Class]:
    """Return a decorator for a class that had an ``argument``. Who still gives it gets an error: see ``allowed``."""

    def decorated(made: _Class) -> _Class:
        take = vars(made)["__init__"]

        @wraps(take)
        def checked(self: object, *args: Any, **named: Any) -> None:
            if argument in named:
                raise error(argument, named[argument], allowed)
            take(self, *args, **named)

        setattr(made, "__init__", checked)  # noqa: B010 mypy lets nobody assign to a method
        return made

    return decorated


class _Fields(NamedTuple):
    tenant: str
    model: str
    adapter: str | None
    salt: str
    weights: int


class Namespace(_Fields):
    """The key space of a tenant: ``(tenant, model, adapter=None, salt="", weights=0)``.

    - ``tenant``: a non-empty string without ``/``, other than ``.`` and ``..``.
    - ``model``: a non-empty string.
    - ``adapter``: a non-empty string, or None for the base model.
    - ``salt``: any string.
    - ``weights``: version of the weights, 0 to 2⁵³ − 1. Raise it whenever the model's or the adapter's weights change.
      KV of another version are never matched.

    Immutable and hashable. Namespaces that differ in one field have separate trees. Raises NamespaceError for anything
    else, and for texts whose UTF-8 form exceeds 1,024 bytes.
    """

    __slots__ = ()

    def __new__(
        cls, tenant: str, model: str, adapter: str | None = None, salt: str = "", weights: int = 0
    ) -> Self:
        _check_tenant_id(tenant)
        _check_field("model", model, may_be_empty=False)
        if adapter is not None:
            _check_field("adapter", adapter, may_be_empty=False)
        _check_field("salt", salt, may_be_empty=True)
        _check_weights(weights)
        return super().__new__(cls, tenant, model, adapter, salt, weights)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]
        """Make a checked namespace. ``_replace`` calls this."""
        return cls(*iterable)

    def framed(self) -> bytes:
        """Return the namespace as unique bytes: each field is preceded by its type and length."""
        parts: list[bytes] = []
        for name, value in zip(self._fields, self, strict=True):
            if value is None:
                parts.append(f"{name}:none:0:".encode())
            elif isinstance(value, int):
                number = b"%d" % value
                parts.append(f"{name}:int:{len(number)}:".encode() + number)
            else:
                field = value.encode()
                parts.append(f"{name}:str:{len(field)}:".encode() + field)
        return b"".join(parts)


def is_tenant_id(value: object) -> bool:
    """Whether this is a valid tenant id: see TENANT_ID_ALLOWED."""
    try:
        _check_tenant_id(value)
    except NamespaceError:
        return False
    return True


def _check_tenant_id(value: object) -> None:
    """Check a tenant id. Ids are used in URL paths, where ``/``, ``.`` and ``..`` have another meaning."""
    _check_field("tenant", value, may_be_empty=False)
    if "/" in value or value in (".", ".."):  # type: ignore[operator]  # a string by now
        raise NamespaceError(f"tenant={shown(value)} is not allowed; allowed: {TENANT_ID_ALLOWED}")


def _check_field(name: str, value: object, *, may_be_empty: bool) -> None:
    if not isinstance(value, str):
        raise NamespaceError(f"namespace field {name} is a {type(value).__name__}; allowed: a string")
    if not value and not may_be_empty:
        raise NamespaceError(f"namespace field {name} is empty; allowed: a string of at least one character")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise NamespaceError(
            f"namespace field {name} has no UTF-8 form; allowed: text without lone surrogates"
        ) from None
    if size > MAX_FIELD_BYTES:
        raise NamespaceError(f"namespace field {name} has {size} bytes; allowed: at most {MAX_FIELD_BYTES}")


def _check_weights(value: object) -> None:
    allowed = f"allowed: an integer from 0 to {MAX_WEIGHTS}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise NamespaceError(f"namespace field weights is a {type(value).__name__}; {allowed}")
    if not 0 <= value <= MAX_WEIGHTS:
        raise NamespaceError(f"namespace field weights is out of range; {allowed}")


@_refuses(ArgumentError, "tier_dtype", NO_OWN_DTYPE)
@dataclass(frozen=True, slots=True)
class Tenant:
    """The guarantee, the limits and the policy of a tenant: see ``PrefixCache.add_tenant``.

    - ``id``: the tenant's name in its namespaces: 1 to 1,024 bytes of UTF-8 without ``/``, neither ``.`` nor ``..``.
    - ``weight``: its part, relative to the other tenants' weights, of the blocks that are guaranteed to no tenant.
      From 1e-100 to 1e100.
    - ``guaranteed_blocks``: blocks that it can always have. Requests of other tenants never evict them.
    - ``max_blocks``: the most blocks that it may use, at least the guaranteed ones; None for the whole pool.
    - ``mode``: ``"burst"`` borrows idle blocks above its guarantee and gives them back first. ``"strict"`` never
      borrows, so that other tenants can't change what it sees. Its limit is its guarantee, at least one block. Below
      the cache it has host memory for itself, and no disk.
    - ``max_pinned_blocks``: blocks that it may pin (``PrefixCache.pin``), at most its limit. None for its guarantee,
      or, for a tenant that wasn't added, for half of what it may use. Pinned blocks count against the limit like all
      used blocks, and are borrowed above the guarantee.
    - ``max_pins``: the most pins at a time, ≥ 0; 1,024 by default. A pin of blocks that another pin or a base holds
      already uses nothing of ``max_pinned_blocks``, but about 2 KiB of memory.
    - ``incarnation``: at most 64 printable ASCII characters, by which tenants of one name differ, if one was removed
      and another one made later; empty for none. Another one forgets what the tenant has, also on a disk that no
      process had meanwhile. It is no setting: two that differ in it alone are equal.
    - ``policy``: the name of its eviction policy, as in ``CacheConfig.policy``, or a function that makes one, called
      like a ``radixkv_policies.Policy``. None: the cache's.

    Raises NamespaceError for the id and ArgumentError for the rest.
    """

    id: str
    weight: float = 1.0
    guaranteed_blocks: int = 0
    max_blocks: int | None = None
    mode: Mode = "burst"
    max_pinned_blocks: int | None = None
    policy: str | Callable[..., Any] | None = None
    max_pins: int = MAX_PINS
    incarnation: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check_tenant_id(self.id)
        incarnation: object = self.incarnation
        if not isinstance(incarnation, str) or not _INCARNATION.fullmatch(incarnation):
            raise ArgumentError("incarnation", incarnation, "at most 64 printable ASCII characters, or none")
        weight: object = self.weight
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ArgumentError("weight", weight, f"a finite number > 0, {MIN_WEIGHT} to {MAX_WEIGHT}")
        if not isinstance(self.mode, str) or self.mode not in ("burst", "strict"):
            raise ArgumentError("mode", self.mode, "'burst' or 'strict'")
        least = 1 if self.mode == "strict" else 0
        _check_count("guaranteed_blocks", self.guaranteed_blocks, least)
        if self.max_blocks is not None:
            _check_count("max_blocks", self.max_blocks, max(self.guaranteed_blocks, 1))
            if self.mode == "strict" and self.max_blocks != self.guaranteed_blocks:
                allowed = f"{self.guaranteed_blocks}, its guarantee, or None, because a strict tenant borrows nothing"
                raise ArgumentError("max_blocks", self.max_blocks, allowed)
        _check_count("max_pins", self.max_pins, 0)
        if self.policy is not None and not isinstance(self.policy, str) and not callable(self.policy):
            raise ArgumentError(
                "policy", self.policy, "the name of a policy, a callable that makes one, or None"
            )
        if self.max_pinned_blocks is not None:
            _check_count("max_pinned_blocks", self.max_pinned_blocks, 0)
            if self.limit is not None and self.max_pinned_blocks > self.limit:
                raise ArgumentError(
                    "max_pinned_blocks", self.max_pinned_blocks, f"at most {self.limit}, its limit"
                )

    @property
    def limit(self) -> int | None:
        """The most blocks that it may use: ``max_blocks``, in strict mode the guarantee; None for the whole pool."""
        return self.guaranteed_blocks if self.mode == "strict" else self.max_blocks

    @property
    def pin_budget(self) -> int:
        """Blocks that it may pin after it is added: ``max_pinned_blocks``, or its guarantee."""
        return self.guaranteed_blocks if self.max_pinned_blocks is None else self.max_pinned_blocks


def _check_count(argument: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(argument, value, f"an integer ≥ {least}")


Scrub = Literal["cross-tenant", "always", "never"]

MAX_BLOCKS = 2**31 - 1
"""Block ids are int32."""

MAX_ANNOUNCEMENTS: Final = 16_384
"""The most announcements of a tenant, unless the configuration gives another number."""


@_refuses(ConfigError, "lossy_host_blocks", "host_blocks, with a tier_dtype of 'fp8' or 'int8'")
@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of one PrefixCache.

    - ``num_blocks``: capacity of the pool, 1 … 2³¹ − 1 blocks.
    - ``block_size``: tokens per block, ≥ 1.
    - ``layout``: the shape of the KV; None for an engine that owns its KV (index and block ids only).
    - ``device``: the torch device of the storage; unused without a layout.
    - ``policy``: name of an eviction policy: of ``radixkv_policies``, of an entry point of the group
      ``radixkv.policies``, or ``package.module:Class``. A name that isn't built in is imported. Each tenant gets
      its own instance.
    - ``seed``: seed of the random numbers of policies.
    - ``default_tenant``: settings of tenants that weren't added (the id doesn't matter; no guarantee), or None to
      refuse such tenants.
    - ``scrub``: which blocks are zeroed before they are handed out. ``"cross-tenant"``: blocks that held another
      tenant's KV; blocks of strict tenants as soon as they are freed. ``"always"``: all, as soon as they are freed.
      ``"never"``: none; refuses strict tenants. The storage zeroes them, or the engine's ``scrub_blocks``.
    - ``blocks``: ``"cache"``: the cache has the free blocks and hands them out. ``"engine"``: the engine has every
      block until it inserts it, and gets evicted blocks back by ``reclaim``; there are no sequences. Needs no layout.
    - ``writes_before_reads``: whether each layer of the engine writes the KV of a whole batch before any sequence reads
      them, as vLLM does. Then a sequence may read blocks that its own step computes (``Sequence.computing``).
    - ``segment_tokens``: the grain at which a policy may remember evicted prefixes, rounded down to whole blocks, at
      least one.
    - ``max_announcements``: the most announcements of a tenant at a time (``PrefixCache.announce``), ≥ 0. Each holds
      its ids, 4 bytes a token.
    - ``host.memory``: blocks of host memory below the pool, 0 or at least 2. It keeps what the pool evicts, and copies
      of what the pool has while there is room. What was evicted comes back by ``Sequence.loading``. Needs a layout or a
      storage.
    - ``tier_dtype``: how all tiers below keep KV. ``"exact"``: bit for bit. ``"fp8"``, ``"int8"``: with 8 bits a value.
      What comes back has small errors then. Needs ``host_blocks``, and KV of float32, float16 or bfloat16.
    """

    num_blocks: int
    block_size: int = 16
    layout: KVLayout | None = None
    device: str = "cpu"
    policy: str = "lru"
    seed: int = 0
    segment_tokens: int = 512
    default_tenant: Tenant | None = field(default_factory=lambda: Tenant("default"))
    scrub: Scrub = "cross-tenant"
    blocks: Literal["cache", "engine"] = "cache"
    writes_before_reads: bool = False
    max_announcements: int = MAX_ANNOUNCEMENTS
    host_blocks: int = 0
    tier_dtype: TierDtype = "exact"

    @property
    def segment_blocks(self) -> int:
        """Blocks of a segment."""
        return max(self.segment_tokens // self.block_size, 1)

    def __post_init__(self) -> None:
        _require_int("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        _require_int("block_size", self.block_size, 1, 2**20)
        _require_int("seed", self.seed, 0, 2**63 - 1)
        _require_int("segment_tokens", self.segment_tokens, 1, 2**20)
        _require_int("max_announcements", self.max_announcements, 0, 2**20)
        _require_int("host_blocks", self.host_blocks, 0, MAX_BLOCKS)
        if self.host_blocks and self.blocks == "engine":
            raise ConfigError(
                "host_blocks", self.host_blocks, "0 with blocks='engine': there are no sequences"
            )
        if self.scrub not in ("cross-tenant", "always", "never"):
            raise ConfigError("scrub", self.scrub, "'cross-tenant', 'always' or 'never'")
        if self.blocks not in ("cache", "engine"):
            raise ConfigError("blocks", self.blocks, "'cache' or 'engine'")
        if self.blocks == "engine" and self.layout is not None:
            raise ConfigError("blocks", self.blocks, "'cache' with a layout: its storage is the cache's")
        default: object = self.default_tenant
        if default is not None and (not isinstance(default, Tenant) or default.guaranteed_blocks):
            raise ConfigError("default_tenant", default, "a burst Tenant without a guarantee, or None")
        if self.layout is not None and not isinstance(self.layout, KVLayout):
            raise ConfigError("layout", self.layout, "a KVLayout, or None for an engine that owns its KV")
        self._require_dtype()
        object.__setattr__(self, "device", str(self.device))
        resolve("policy", self.policy)
        own = None if self.default_tenant is None else self.default_tenant.policy
        if isinstance(own, str):
            resolve("default_tenant.policy", own)

    def _require_dtype(self) -> None:
        dtype, elements = self.tier_dtype, None if self.layout is None else self.layout.dtype
        if not isinstance(dtype, str) or dtype not in ("exact", *LOSSY_DTYPES):
            raise ConfigError("tier_dtype", dtype, "'exact', 'fp8' or 'int8'")
        if dtype != "exact" and not self.host_blocks:
            raise ConfigError("tier_dtype", dtype, "'exact' without host_blocks: nothing is kept below")
        if dtype != "exact" and elements is not None and elements not in QUANTIZABLE:
            allowed = f"'exact' with KV of {elements}: only {', '.join(QUANTIZABLE)} can be quantised"
            raise ConfigError("tier_dtype", dtype, allowed)


def _require_int(setting: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(setting, value, f"an integer from {low} to {high}")


def policy_names() -> tuple[str, ...]:
    """Return the names of the built-in policies."""
    return tuple(POLICIES)


GROUP: Final = "radixkv.policies"
"""Entry points of this group are policies, each under its name."""

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_loaded: dict[str, type[Policy]] = {}
"""Policies that were imported in this process, by the name used."""


def resolve(setting: str, name: object, others: Iterable[str] = ()) -> type[Policy]:
    """Return the policy with a name. May import its module, so don't use it for names from outside: see
    ``require_loaded``.

    ``others``: further names that the caller accepts; the error lists them too. Raises ConfigError, with ``setting``,
    for an unknown name, a module that can't be imported, and an object that is no policy.
    """
    if isinstance(name, str):
        found = POLICIES.get(name) or _loaded.get(name)
        if found is not None:
            return found
        if _CLASS.fullmatch(name):
            _loaded[name] = _imported(setting, name)
            return _loaded[name]
        for entry in _registered():
            if entry.name == name:
                _loaded[name] = _from_entry_point(setting, entry)
                return _loaded[name]
    raise ConfigError(setting, name, _allowed([*others, *(entry.name for entry in _registered())]))


def require_loaded(argument: str, name: str) -> None:
    """Raise ArgumentError unless this policy is built in, or its entry point was loaded. Imports nothing."""
    if name not in loaded_names():
        raise ArgumentError(argument, name, f"one of {', '.join(loaded_names())}")


def loaded_names() -> tuple[str, ...]:
    """Return the built-in names, and the names of loaded entry points."""
    return (*POLICIES, *(name for name in _loaded if not _CLASS.fullmatch(name)))


def load_registered() -> None:
    """Load all entry points of the group, so that ``require_loaded`` accepts them. Broken ones are logged."""
    import logging  # here: `import radixkv` needs no log

    for entry in _registered():
        if entry.name not in POLICIES and entry.name not in _loaded:
            try:
                _loaded[entry.name] = _from_entry_point("policy", entry)
            except ConfigError as error:
                logging.getLogger("radixkv.policies").warning("%s", error)


def is_class(name: str) -> bool:
    """Whether a name has the form ``package.module:Class``."""
    return _CLASS.fullmatch(name) is not None


def _registered() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # here: it takes 20 ms, an eighth of `import radixkv`

    return entry_points(group=GROUP)


def _allowed(others: Iterable[str]) -> str:
    return f"one of {', '.join(dict.fromkeys((*POLICIES, *others)))}, or package.module:Class"


def _imported(setting: str, name: str) -> type[Policy]:
    module_name, _, path = name.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 any error of a foreign module becomes a ConfigError
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            setting, name, f"a module that can be imported; {module_name} can't ({why})"
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(setting, name, f"a class that the module has; {module_name} has no {path}")
        found = getattr(found, part)
    return _checked(setting, name, found)


def _from_entry_point(setting: str, entry: EntryPoint) -> type[Policy]:
    whose = f"entry point {entry.value!r} of {entry.dist.name if entry.dist else 'an unknown distribution'}"
    try:
        found: object = entry.load()
    except Exception as error:  # noqa: BLE001 the same
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            setting, entry.name, f"an entry point that can be loaded; {whose} can't ({why})"
        ) from None
    try:
        return _checked(setting, entry.name, found)
    except ConfigError as error:
        raise ConfigError(setting, entry.name, f"{error.allowed} (the {whose})") from None


def _checked(setting: str, name: str, found: object) -> type[Policy]:
    if not isinstance(found, type):
        raise ConfigError(setting, name, f"a class; this is a {type(found).__name__}")
    if not issubclass(found, Policy):
        raise ConfigError(setting, name, "a subclass of radixkv_policies.Policy; this class isn't one")
    missing = [each for each in found.required if getattr(found, each) is getattr(Policy, each)]
    if missing:
        allowed = f"a policy with {', '.join(found.required)}; this one lacks {', '.join(missing)}"
        raise ConfigError(setting, name, allowed)
    return found
