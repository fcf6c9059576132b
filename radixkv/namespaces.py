"""Namespaces and tenants: the key spaces that no lookup leaves, and what those who own them are promised.

A namespace is the key space of one tenant, model, adapter and salt, and has a tree of its own
(``tenants.NamespaceTree``); no lookup starts anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Self

from radixkv.errors import ArgumentError, NamespaceError, shown

MAX_FIELD_BYTES: Final = 1_024
"""Longest UTF-8 form of a field of a namespace."""

TENANT_ID_ALLOWED: Final = (
    f"the id of a tenant, a string of 1 to {MAX_FIELD_BYTES:,} bytes of UTF-8 "
    "without '/', other than '.' and '..'"
)

MIN_WEIGHT: Final = 1e-100
MAX_WEIGHT: Final = 1e100
"""Bounds of a tenant's weight: quotients and products of it with any number of blocks are finite."""


MAX_PINS: Final = 1_024
"""Pins that a tenant may have unless its settings say otherwise."""

Mode = Literal["burst", "strict"]


class _Fields(NamedTuple):
    tenant: str
    model: str
    adapter: str | None
    salt: str


class Namespace(_Fields):
    """The key space of one tenant, model, adapter and salt: ``(tenant, model, adapter=None, salt="")``.

    ``tenant`` is a non-empty string without ``/``, other than ``.`` and ``..``; ``model`` is a non-empty string;
    ``adapter`` is a non-empty string, or None for the base model; ``salt`` is any string. Immutable and hashable.
    Raises NamespaceError for anything else, and for fields whose UTF-8 form exceeds 1,024 bytes.
    """

    __slots__ = ()

    def __new__(cls, tenant: str, model: str, adapter: str | None = None, salt: str = "") -> Self:
        _check_tenant_id(tenant)
        _check_field("model", model, may_be_empty=False)
        if adapter is not None:
            _check_field("adapter", adapter, may_be_empty=False)
        _check_field("salt", salt, may_be_empty=True)
        return super().__new__(cls, tenant, model, adapter, salt)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]
        """Checked like any other: what ``_replace`` makes."""
        return cls(*iterable)

    def framed(self) -> bytes:
        """The namespace as bytes that no other namespace has: each field with its type and length in front."""
        parts: list[bytes] = []
        for name, value in zip(self._fields, self, strict=True):
            if value is None:
                parts.append(f"{name}:none:0:".encode())
            else:
                field = value.encode()
                parts.append(f"{name}:str:{len(field)}:".encode() + field)
        return b"".join(parts)


def is_tenant_id(value: object) -> bool:
    """Whether this can be a tenant's id: see TENANT_ID_ALLOWED."""
    try:
        _check_tenant_id(value)
    except NamespaceError:
        return False
    return True


def _check_tenant_id(value: object) -> None:
    """Ids stand in paths of URLs, where ``/``, ``.`` and ``..`` would name something else."""
    _check_field("tenant", value, may_be_empty=False)
    if "/" in value or value in (".", ".."):  # type: ignore[operator]  # a string by now
        raise NamespaceError(f"tenant={shown(value)} is not allowed; allowed: {TENANT_ID_ALLOWED}")


def _check_field(name: str, value: object, *, may_be_empty: bool) -> None:
    if not isinstance(value, str):
        raise NamespaceError(f"namespace field {name} is a {type(value).__name__}: allowed is a string")
    if not value and not may_be_empty:
        raise NamespaceError(
            f"namespace field {name} is empty: allowed is a string of at least one character"
        )
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise NamespaceError(
            f"namespace field {name} has no UTF-8 form: allowed is text without lone surrogates"
        ) from None
    if size > MAX_FIELD_BYTES:
        raise NamespaceError(
            f"namespace field {name} has {size} bytes: allowed are at most {MAX_FIELD_BYTES}"
        )


@dataclass(frozen=True, slots=True)
class Tenant:
    """What a tenant is promised and held to: see ``PrefixCache.add_tenant``.

    id: the name that its namespaces carry: 1 to 1,024 bytes of UTF-8 without ``/``, neither ``.`` nor ``..``.
    weight: its part, beside the other tenants' weights, of what nobody is guaranteed; > 0, 1e-100 to 1e100.
    guaranteed_blocks: blocks that it can always have, and that another's request never evicts.
    max_blocks: blocks that it may use at most; None for the whole pool. At least the guaranteed ones.
    mode: ``"burst"`` borrows what is idle above its guarantee and gives it back first; ``"strict"`` never borrows, so
    that nothing that others do changes what it sees: its limit is its guarantee, which is at least one block.
    max_pinned_blocks: blocks that it may pin (``PrefixCache.pin``), at most its limit; None for its guarantee, or, of a
    tenant that nobody added, for half of what it may use. What is pinned is used like the rest: it counts against the
    limit, and is borrowed beyond the guarantee.
    max_pins: pins that it may have at a time, ≥ 0; 1,024 unless it is set. A pin of blocks that another pin, or a base,
    has already takes nothing from ``max_pinned_blocks``, and about 2 KiB of memory.
    policy: its eviction policy's name, as ``CacheConfig.policy`` takes it, or what makes one, called like a
    ``radixkv_policies.Policy``; None: the cache's.

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

    def __post_init__(self) -> None:
        _check_tenant_id(self.id)
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
                allowed = f"{self.guaranteed_blocks}, its guarantee, or None: a strict tenant borrows nothing"
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
        """Blocks that it may use at most: ``max_blocks``, in strict mode the guarantee; None for the whole pool."""
        return self.guaranteed_blocks if self.mode == "strict" else self.max_blocks

    @property
    def pin_budget(self) -> int:
        """Blocks that it may pin once it is added: ``max_pinned_blocks``, or its guarantee."""
        return self.guaranteed_blocks if self.max_pinned_blocks is None else self.max_pinned_blocks


def _check_count(argument: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(argument, value, f"an integer ≥ {least}")
