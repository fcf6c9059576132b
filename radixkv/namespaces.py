"""Namespaces and tenants. The only module where two tenants meet: in the choice of whose blocks go.

A namespace is the key space of one tenant, model, adapter and salt, and has a tree of its own; no lookup
starts anywhere else. A tenant's state (its trees, its policy, its counts) is one object that another tenant's
calls never reach.

Whose blocks go: the tenant that uses most has its blocks evicted first, down to the level of the next one.
With equal weights and no guarantees that is the weighted fair share ``(used − share) ÷ weight``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from radixkv.errors import NamespaceError
from radixkv.tree import RadixTree

if TYPE_CHECKING:
    from radixkv_policies import Policy

MAX_FIELD_BYTES: Final = 1_024
"""Longest UTF-8 form of a field of a namespace."""


class _Fields(NamedTuple):
    tenant: str
    model: str
    adapter: str | None
    salt: str


class Namespace(_Fields):
    """The key space of one tenant, model, adapter and salt: ``(tenant, model, adapter=None, salt="")``.

    ``tenant`` and ``model`` are non-empty strings; ``adapter`` is a non-empty string, or None for the base model;
    ``salt`` any string. Immutable and hashable. Raises NamespaceError for anything else, and for fields
    whose UTF-8 form exceeds 1,024 bytes.
    """

    __slots__ = ()

    def __new__(cls, tenant: str, model: str, adapter: str | None = None, salt: str = "") -> Namespace:
        _check_field("tenant", tenant, may_be_empty=False)
        _check_field("model", model, may_be_empty=False)
        if adapter is not None:
            _check_field("adapter", adapter, may_be_empty=False)
        _check_field("salt", salt, may_be_empty=True)
        return super().__new__(cls, tenant, model, adapter, salt)

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


class TenantState:
    """What one tenant has in the cache: its trees, its policy, its counts.

    ``used_blocks``: blocks in its trees, detached ones included, and private to its sequences.
    ``evictable_blocks``: those of them that no lease protects.
    """

    __slots__ = (
        "detached",
        "evictable_blocks",
        "evicted_blocks",
        "hit_tokens",
        "missed_tokens",
        "policy",
        "requests",
        "tenant_id",
        "trees",
        "used_blocks",
    )

    def __init__(self, tenant_id: str, policy: Policy) -> None:
        self.tenant_id = tenant_id
        self.policy = policy
        self.trees: dict[Namespace, NamespaceTree] = {}
        self.detached: set[NamespaceTree] = set()
        self.used_blocks = 0
        self.evictable_blocks = 0
        self.evicted_blocks = 0
        self.hit_tokens = 0
        self.missed_tokens = 0
        self.requests = 0

    @property
    def resident_blocks(self) -> int:
        """Blocks that a match can reach."""
        return sum(tree.num_blocks for tree in self.trees.values())

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of cleared namespaces that running sequences still hold."""
        return sum(tree.num_blocks for tree in self.detached)

    def detach(self, tree: NamespaceTree) -> None:
        """Make a tree unreachable; it lives on for the sequences that lease it. O(1)."""
        del self.trees[tree.namespace]
        tree.detached = True
        self.detached.add(tree)

    def drop_if_empty(self, tree: NamespaceTree) -> None:
        """Forget a tree in which nothing is resident and nothing leased. O(1)."""
        if tree.is_empty:
            if tree.detached:
                self.detached.discard(tree)
            else:
                self.trees.pop(tree.namespace, None)


class NamespaceTree(RadixTree):
    """The tree of a namespace, with its owner. ``detached`` once it was cleared and can't be reached any more."""

    __slots__ = ("detached", "namespace", "tenant")

    def __init__(self, namespace: Namespace, tenant: TenantState, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self.namespace = namespace
        self.tenant = tenant
        self.detached = False


def next_victim(
    tenants: dict[str, TenantState], requester: TenantState | None
) -> tuple[TenantState, int] | None:
    """Whose blocks go next, and how many before it is somebody else's turn; None if nothing is evictable.

    The tenant with the most used blocks among those that have something evictable, the requester on ties, down
    to the level of the next one. O(tenants).
    """
    first: TenantState | None = None
    second_used = -1
    for tenant in tenants.values():
        if not tenant.evictable_blocks:
            continue
        used = tenant.used_blocks
        if first is None or used > first.used_blocks or (used == first.used_blocks and tenant is requester):
            if first is not None:
                second_used = max(second_used, first.used_blocks)
            first = tenant
        else:
            second_used = max(second_used, used)
    if first is None:
        return None
    turn = first.used_blocks - second_used if second_used >= 0 else first.evictable_blocks
    return first, min(max(turn, 1), first.evictable_blocks)
