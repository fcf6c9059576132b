"""Bases: prefixes that an operator publishes once, for named tenants to read.

    the operator's tree    root ─▶ system prompt ◀─ a lease of the base's: resident until it is unpublished
                                        ┊
    a reader's tree behind it      head ┊ root at depth 64 ─▶ a conversation        the reader's own blocks
                                        ┊                 └─▶ another one

A reader has the tree of each of its namespaces. It has further trees for each base and each position at which its
requests leave that base. Such a tree *continues* the base's blocks (``RadixTree.head_ids``) and owns only the blocks
behind them. A request's block table begins with the operator's blocks and continues with the reader's. Every change
that the request makes (leases, commits, splits, evictions, counts) happens in the reader's tree. So reads of a base are
invisible to other readers, and a commit can't add to the base.

A request uses the tree in which most of its prefix is resident (``longest``): the namespace's own tree or a tree behind
a base. If several are equal, it uses the one where the base gives most. A tenant that held the prefix before it was
published keeps using its own blocks until they are evicted. Nothing is moved.

When a base is unpublished, or a reader is removed, the trees behind the base are cleared like a namespace's
(``PrefixCache.clear``). The base releases its blocks when the last sequence in such a tree is released.

KV depend on ids, model, adapter and the version of the weights. So a base serves the namespaces that have its own
model, adapter and weights, whatever their salt.
A salt separates what a tenant's requests leave in the cache, and reading a base leaves nothing there. An account that
publishes can't read bases. So the blocks that a base leases are always its account's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from radixkv._compiled import mypyc_attr
from radixkv.errors import ArgumentError
from radixkv.index.residency import Claim
from radixkv.index.tenants import Base, NamespaceTree, Readable, TenantState
from radixkv.index.tokens import ID_BYTES
from radixkv.index.tree import num_common_bytes

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.holders import SequenceState


@mypyc_attr(native_class=False)  # compiled, it could not be copied
@dataclass(frozen=True, slots=True)
class BaseInfo:
    """A base, as the operator sees it. It contains whole blocks of the published ids."""

    base_id: str
    namespace: Namespace
    """The namespace of the account that publishes. Its model, adapter and weights are those of the readers."""
    readers: tuple[str, ...]
    num_blocks: int
    num_tokens: int
    is_readable: bool
    """False while it is being computed."""


MAX_BASE_ID_BYTES: Final = 256
"""Longest UTF-8 form of a base's id."""


class Publication:
    """A base that is being computed by ``sequence``. It is given up if the sequence is released too early."""

    __slots__ = ("base_id", "key", "namespace", "readers", "sequence")

    def __init__(self, base_id: str, namespace: Namespace, key: bytes, readers: frozenset[str]) -> None:
        self.base_id, self.namespace, self.key, self.readers = base_id, namespace, key, readers
        self.sequence: SequenceState | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether its sequence can still complete it."""
        return self.sequence is not None and self.sequence._is_open


class Bases:
    """The bases of one cache. All methods are called under its lock."""

    __slots__ = ("_block_bytes", "ended", "published", "publishing")

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.published: dict[str, Base] = {}
        self.publishing: dict[SequenceState, Publication] = {}
        self.ended: set[Base] = set()  # unpublished; some are still held

    def under_way(self) -> list[Publication]:
        """Return the bases that are being computed. Forgets those that were given up."""
        for sequence in [
            each for each, publication in self.publishing.items() if not publication.is_under_way
        ]:
            del self.publishing[sequence]
        return list(self.publishing.values())

    def all(self) -> list[Base | Publication]:
        """Return the published bases and those being computed."""
        found: list[Base | Publication] = list(self.published.values())
        found += self.under_way()
        return found

    def held(self) -> list[Base]:
        """Return the bases that hold blocks: published, or unpublished and still in use. Forgets the others."""
        self.ended = {base for base in self.ended if base.is_held}
        return [*self.published.values(), *self.ended]

    def require_new(self, publication: Publication) -> None:
        """Raise ArgumentError unless this base can be published with the others."""
        others = self.all()
        if any(other.base_id == publication.base_id for other in others):
            raise ArgumentError("base_id", publication.base_id, "an id that no base has")
        tenant = publication.namespace.tenant
        if any(tenant in other.readers for other in others):
            raise ArgumentError("namespace", publication.namespace, "a namespace whose tenant reads no base")
        self.require_readers(publication.readers, [*others, publication])

    def require_readers(self, readers: frozenset[str], others: Iterable[Base | Publication]) -> None:
        """Raise ArgumentError if one of the readers publishes."""
        for publisher in sorted(readers & {other.namespace.tenant for other in others}):
            raise ArgumentError("readers", publisher, "tenants that publish no base")

    def find(self, base_id: object) -> Base | Publication:
        """Return the base with an id. Raises ArgumentError."""
        for base in self.all():
            if isinstance(base_id, str) and base.base_id == base_id:
                return base
        raise ArgumentError("base_id", base_id, "the id of a base")

    def add(self, base: Base, tenants: Mapping[str, TenantState]) -> None:
        """Make a base readable. O(readers)."""
        self.published[base.base_id] = base
        self.show(base, base.readers, tenants)

    def end(self, base: Base, tenants: Mapping[str, TenantState]) -> list[NamespaceTree]:
        """Hide a base from all requests. Returns the trees behind it that must be detached. O(readers)."""
        base.is_over = True
        self.ended.add(base)
        self.published.pop(base.base_id, None)
        self.show(base, base.readers, tenants)
        return [tree for tree in base.trees if not tree.detached]

    def show(self, base: Base, tenant_ids: Iterable[str], tenants: Mapping[str, TenantState]) -> None:
        """Show a base to those of the tenants that may read it, and hide it from the others."""
        place = self._place(base)
        for tenant_id in tenant_ids:
            state = tenants.get(tenant_id)
            if state is not None:
                bases = dict(state.bases or {})
                found = [each for each in bases.pop(place, ()) if each is not base]
                if tenant_id in base.readers and not base.is_over:
                    found.append(base)
                if found:
                    bases[place] = sorted(found, key=_num_bytes, reverse=True)
                state.bases = bases or None
                self.settle_heads(state, base.key[: self._block_bytes])

    def settle_heads(self, tenant: TenantState, first: bytes = b"") -> None:
        """Note what bases give of a tenant's announced prompts that begin with ``first``. O(claims × bases)."""
        if tenant.waiting is not None:
            for claim in tenant.waiting.by_number.values():
                if claim.key.startswith(first):
                    tenant.waiting.set_head(claim, self.num_head_bytes(tenant, claim))

    def num_head_bytes(self, tenant: TenantState, claim: Claim) -> int:
        """Return how many bytes of an announced prompt the tenant's bases give. O(bases with its first block)."""
        step = self._block_bytes
        if tenant.bases is None or claim.size < step:
            return 0
        found = tenant.bases.get(_place(claim.namespace, claim.key, step), [])
        return max([num_common_bytes(base.key, claim.key, 0, claim.size, step) for base in found], default=0)

    def _place(self, base: Base) -> tuple[Any, Any, bytes]:
        return _place(base.namespace, base.key, self._block_bytes)

    def readable_by(self, tenant: str) -> Readable | None:
        """Return the bases that a tenant may read; None if there are none. O(bases)."""
        found: Readable = {}
        for base in sorted(self.published.values(), key=_num_bytes, reverse=True):
            if tenant in base.readers:
                found.setdefault(self._place(base), []).append(base)
        return found or None

    def head(self, namespace: Namespace, key: bytes) -> tuple[bytes, bytes]:
        """Return the longest prefix of a key that a base has for a namespace, and its blocks. O(bases)."""
        step, best = self._block_bytes, (b"", b"")
        found = self.readable_by(namespace.tenant) or {}
        for base in found.get(_place(namespace, key, step), ()):
            size = num_common_bytes(base.key, key, 0, len(key), step)
            if size > len(best[0]):
                best = base.key[:size], base.block_ids[: size // step * ID_BYTES]
        return best

    def infos(self) -> list[BaseInfo]:
        """Return what the operator sees of each base."""
        found: list[BaseInfo] = []
        for base in self.all():
            num_blocks = len(base.key) // self._block_bytes
            readers, is_readable = tuple(sorted(base.readers)), isinstance(base, Base)
            found.append(
                BaseInfo(base.base_id, base.namespace, readers, num_blocks, len(base.key) // 4, is_readable)
            )
        return found


def _place(namespace: Namespace, key: bytes, step: int) -> tuple[Any, Any, bytes]:
    """Return the key of the bases that serve a namespace: all that KV depend on, with the ids' first block."""
    return namespace.model, (namespace.adapter, namespace.weights), key[:step]


def _num_bytes(base: Base) -> int:
    return len(base.key)


def longest(
    tenant: TenantState, namespace: Namespace, own: NamespaceTree | None, key: bytes, stop: int, step: int
) -> NamespaceTree | None:
    """Return the tree in which most of ``key[:stop]`` is resident: the namespace's ``own``, or one behind a base.

    The result may be an empty tree that isn't registered. If several are equal, the one that owns least. ``step``:
    bytes of a block. Changes nothing. O(bases with this first block × nodes on the path). Walks nothing if there is one
    such base and no other tree.
    """
    assert tenant.bases is not None
    found = tenant.bases.get(_place(namespace, key, step))
    if found is None or stop < step:
        return own
    best, reached = own, 0
    is_alone = len(found) == 1
    if own is not None and own.child_of(own.root, key[:step]) is not None:
        is_alone, reached = False, _reach(own, key, stop)
    for base in found:
        size = len(base.key)
        if not key.startswith(base.key, 0, stop):
            size = num_common_bytes(base.key, key, 0, stop, step)
        behind = tenant.trees.get((namespace, base, size))
        if behind is None:
            behind = NamespaceTree(namespace, tenant, step, base, size)
        # a prompt that ended here left its last block to be computed, so its continuation is one block earlier
        before = tenant.trees.get((namespace, base, size - step))
        if is_alone and before is None:
            return behind
        for each in (behind, before):
            reach = 0 if each is None else _reach(each, key, stop)
            if each is not None and (reach > reached or (reach == reached and _owns_less(each, best))):
                best, reached = each, reach
    return best


def _owns_less(tree: NamespaceTree, than: NamespaceTree | None) -> bool:
    return than is None or len(tree.head_key) > len(than.head_key)


def _reach(tree: NamespaceTree, key: bytes, stop: int) -> int:
    """Return how many bytes of ``key[:stop]`` are resident in a tree, including its head."""
    _, at, _, common = tree.walk(key, stop, bytearray())
    return at + common


def detach(tree: NamespaceTree) -> None:
    """Make a tree unreachable, like a cleared namespace."""
    tree.tenant.detach(tree)
    tree.tenant.drop_if_empty(tree)
