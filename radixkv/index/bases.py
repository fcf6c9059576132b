"""Bases: prefixes that an operator publishes once, for named tenants to read.

    the operator's tree    root ─▶ system prompt ◀─ a lease of the base's: resident until it is unpublished
                                        ┊
    a reader's tree behind it      head ┊ root at depth 64 ─▶ a conversation        the reader's own blocks
                                        ┊                 └─▶ another one

A reader has, beside the tree of each of its namespaces, one for each base and each position at which its requests
leave that base: a tree that *continues* the base's blocks (``RadixTree.head_ids``) and owns only what comes behind
them. So a request's block table begins with the operator's blocks and goes on with the reader's, while everything that
changes when it runs (leases, commits, splits, evictions, counts) happens in the reader's tree: reading a base changes
nothing that another reader could see, and a commit can't add to it.

A request goes where most of it is resident (``longest``): in the namespace's own tree or behind a base, of equals
behind the one that gives most. Who held the prefix before it was published goes on with what it has until that is
evicted; nothing is moved.

When a base is unpublished, or a reader struck from its list, the trees behind it are cleared like a namespace's
(``PrefixCache.clear``); the base lets go of its blocks when the last sequence in such a tree is released.

KV depends on ids, model and adapter, so a base is for the namespaces of its own model and adapter, whatever their salt:
a salt keeps apart what a tenant's requests leave behind, and reading a base leaves nothing behind. Who publishes from
an account reads no bases with it: so what a base leases is its account's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from radixkv.errors import ArgumentError
from radixkv.index.tenants import Base, NamespaceTree, Readable, TenantState
from radixkv.index.tokens import ID_BYTES
from radixkv.index.tree import num_common_bytes

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.holders import SequenceState


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """A base, as its operator is told of it: whole blocks of the ids that were published."""

    base_id: str
    namespace: Namespace
    """The account's that publishes; model and adapter are those of its readers."""
    readers: tuple[str, ...]
    num_blocks: int
    num_tokens: int
    is_readable: bool
    """False while it is computed."""


MAX_BASE_ID_BYTES: Final = 256
"""Longest UTF-8 form of a base's id."""


class Publication:
    """A base on its way: ``sequence`` computes it, and gives it up when it is released before."""

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
        self.ended: set[Base] = set()  # some of them still held

    def under_way(self) -> list[Publication]:
        """Those that are being computed; forgets those that were given up."""
        for sequence in [
            each for each, publication in self.publishing.items() if not publication.is_under_way
        ]:
            del self.publishing[sequence]
        return list(self.publishing.values())

    def all(self) -> list[Base | Publication]:
        """Those that are published and those that are computed."""
        found: list[Base | Publication] = list(self.published.values())
        found += self.under_way()
        return found

    def held(self) -> list[Base]:
        """Those that hold blocks: published, or unpublished and still in use; forgets the others."""
        self.ended = {base for base in self.ended if base.is_held}
        return [*self.published.values(), *self.ended]

    def require_new(self, publication: Publication) -> None:
        """Raise ArgumentError unless this one can be published beside the others."""
        others = self.all()
        if any(other.base_id == publication.base_id for other in others):
            raise ArgumentError("base_id", publication.base_id, "an id that no base has")
        tenant = publication.namespace.tenant
        if any(tenant in other.readers for other in others):
            raise ArgumentError("namespace", publication.namespace, "one whose tenant reads no base")
        self.require_readers(publication.readers, [*others, publication])

    def require_readers(self, readers: frozenset[str], others: Iterable[Base | Publication]) -> None:
        """Raise ArgumentError if one of them publishes."""
        for publisher in sorted(readers & {other.namespace.tenant for other in others}):
            raise ArgumentError("readers", publisher, "tenants that publish no base")

    def find(self, base_id: object) -> Base | Publication:
        """The base with an id. Raises ArgumentError."""
        for base in self.all():
            if isinstance(base_id, str) and base.base_id == base_id:
                return base
        raise ArgumentError("base_id", base_id, "the id of a base")

    def add(self, base: Base, tenants: Mapping[str, TenantState]) -> None:
        """From now on it is read. O(readers)."""
        self.published[base.base_id] = base
        self.show(base, base.readers, tenants)

    def end(self, base: Base, tenants: Mapping[str, TenantState]) -> list[NamespaceTree]:
        """Nobody finds it any more. Returns the trees behind it that have to be detached. O(readers)."""
        base.is_over = True
        self.ended.add(base)
        self.published.pop(base.base_id, None)
        self.show(base, base.readers, tenants)
        return [tree for tree in base.trees if not tree.detached]

    def show(self, base: Base, tenant_ids: Iterable[str], tenants: Mapping[str, TenantState]) -> None:
        """Let these tenants find a base if they may read it, and otherwise not."""
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

    def _place(self, base: Base) -> tuple[Any, Any, bytes]:
        return base.namespace.model, base.namespace.adapter, base.key[: self._block_bytes]

    def readable_by(self, tenant: str) -> Readable | None:
        """What a tenant may read; None if there is nothing. O(bases)."""
        found: Readable = {}
        for base in sorted(self.published.values(), key=_num_bytes, reverse=True):
            if tenant in base.readers:
                found.setdefault(self._place(base), []).append(base)
        return found or None

    def head(self, namespace: Namespace, key: bytes) -> tuple[bytes, bytes]:
        """The longest beginning of a key that a base has for a namespace, and its blocks. O(bases)."""
        step, best = self._block_bytes, (b"", b"")
        found = self.readable_by(namespace.tenant) or {}
        for base in found.get((namespace.model, namespace.adapter, key[:step]), ()):
            size = num_common_bytes(base.key, key, 0, len(key), step)
            if size > len(best[0]):
                best = base.key[:size], base.block_ids[: size // step * ID_BYTES]
        return best

    def infos(self) -> list[BaseInfo]:
        """What the operator is told of each."""
        found: list[BaseInfo] = []
        for base in self.all():
            num_blocks = len(base.key) // self._block_bytes
            readers, is_readable = tuple(sorted(base.readers)), isinstance(base, Base)
            found.append(
                BaseInfo(base.base_id, base.namespace, readers, num_blocks, len(base.key) // 4, is_readable)
            )
        return found


def _num_bytes(base: Base) -> int:
    return len(base.key)


def longest(
    tenant: TenantState, namespace: Namespace, own: NamespaceTree | None, key: bytes, stop: int, step: int
) -> NamespaceTree | None:
    """The tree in which most of ``key[:stop]`` is resident: the namespace's ``own``, if there is one, or behind a base.

    That may be an empty one that isn't registered. Of equals the one that owns least. ``step``: bytes of a block.
    Changes nothing. O(bases with this first block × nodes on the path); no walk for one such base and nothing else.
    """
    assert tenant.bases is not None
    found = tenant.bases.get((namespace.model, namespace.adapter, key[:step]))
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
        # a prompt that ended here left its last block to be computed: what followed stands one block before
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
    """Bytes of ``key[:stop]`` that are resident in a tree, with its head."""
    _, at, _, common = tree.walk(key, stop, bytearray())
    return at + common


def detach(tree: NamespaceTree) -> None:
    """Make a tree unreachable, as when its namespace is cleared."""
    tree.tenant.detach(tree)
    tree.tenant.drop_if_empty(tree)
