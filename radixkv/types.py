"""What the cache hands out and what it talks to: counts, snapshots, the journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from radixkv.namespaces import Namespace

BlockIds: TypeAlias = NDArray[np.int32]
Key: TypeAlias = bytes | tuple[bytes, ...]
"""Key bytes, whole or in pieces that follow each other."""

ID_BYTES: Final = 4
"""Bytes of a packed block id."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of a whole cache at one moment. Blocks unless the name says otherwise; tokens since the start."""

    num_blocks: int
    free_blocks: int
    resident_blocks: int
    """Owned by trees and matchable."""
    sequence_blocks: int
    """Private to running sequences."""
    quarantined_blocks: int
    """Of cleared namespaces, held by running sequences; or freed and read by a copy that waits for ``flush``, on no
    tenant's account."""
    lent_blocks: int
    """Lent to the engine."""
    evictable_blocks: int
    """Owned by trees and protected by no lease."""
    num_nodes: int
    num_sequences: int
    num_namespaces: int
    num_tenants: int
    """Added or seen since the start; one that was removed counts on."""
    requests: int
    hit_tokens: int
    missed_tokens: int
    evicted_blocks: int
    copied_blocks: int
    """Copies that copy-on-write decided on; one that waits, for a block that is given up meanwhile, is not made."""
    scrubbed_blocks: int
    """Zeroed, because they changed tenant or a strict tenant freed them."""
    declined_blocks: int
    """Given up as soon as nobody used them, since the policy didn't admit them."""
    pinned_blocks: int
    """Kept by pins, each counted once. A pin whose time is over counts until upkeep comes by, about a second."""
    num_pins: int
    num_bases: int
    """Published, computed or not."""
    device_blocks: int
    """Lent to the device for beam steps, besides those that the sequences had; part of ``sequence_blocks``."""
    base_blocks: int
    """Held by bases that are published, or were and are still read; resident ones, charged to who publishes."""


class BeamsState(NamedTuple):
    """How far lent beams are, and what keeps their steps from being made, if something does.

    ``out_of_blocks``: a step needed more free blocks than there were (``lend_more``); ``table_full``: there is no
    column for a further one, or no memory of it; ``bad_parent``: a parent that is no beam of the group; ``bad_token``:
    an id that is none.
    """

    num_steps: int
    num_free_blocks: int
    out_of_blocks: bool
    table_full: bool
    bad_parent: bool
    bad_token: bool


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


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Counts of one tenant; says nothing of others or of the pool."""

    tenant: str
    used_blocks: int
    resident_blocks: int
    sequence_blocks: int
    evictable_blocks: int
    num_namespaces: int
    requests: int
    hit_tokens: int
    missed_tokens: int
    evicted_blocks: int
    declined_blocks: int
    pinned_blocks: int
    num_pins: int


class Journal(Protocol):
    """Hears what becomes resident and what leaves, at a coarse grain.

    Called under the cache's lock: an implementation waits for nothing and takes a microsecond or so, for an append to
    a queue and at most a pass over a short key. Ranges are in tokens and are reported only if they contain a multiple
    of ``grain_tokens`` (itself a multiple of the block size): the segment that ends at token ``e`` is resident from a
    ``stored`` with ``start < e ≤ stop`` until a ``removed`` with ``start < e ≤ stop``, or a ``cleared``. ``key`` begins
    with the key (uint32 bytes, see ``tokens``) of the ids ``[0, stop)``, and is at most twice as long: it is what the
    cache has already, and nothing is copied for it.
    """

    grain_tokens: int

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Tokens ``[start, stop)`` of the prefix became resident."""

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Tokens ``[start, stop)`` of the prefix left."""

    def cleared(self, namespace: Namespace) -> None:
        """Everything of the namespace left."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node: ``parent`` is its index in the tree's list (None below the root), ``depth`` in blocks to its end."""

    parent: int | None
    label: bytes
    block_ids: bytes
    depth: int
    uses: int
    child_key: bytes
    """The key under which the parent's children hold it."""
    num_children: int
    """How many children it holds."""


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """A tree, parents before children. ``num_blocks``, ``root_uses`` and ``root_children`` are the cache's counts."""

    namespace: Namespace
    detached: bool
    num_blocks: int
    root_uses: int
    root_children: int
    nodes: tuple[NodeSnapshot, ...]
    base: int | None = None
    """The base that it stands behind, an index into the snapshot's bases."""
    head_ids: bytes = b""
    """The blocks of that base that it continues."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Blocks ``[start, start + n)`` of some sequences. ``parent`` is an index into the snapshot's runs.

    ``node`` is the (tree, node) whose lease it holds once a tree owns its blocks; None while they are private.
    """

    parent: int | None
    start: int
    block_ids: bytes
    owners: int
    node: tuple[int, int | None] | None


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """A running sequence. ``node`` is the leased (tree, node), node None being the root; ``run`` its last run."""

    namespace: Namespace
    node: tuple[int, int | None]
    run: int | None
    block_ids: bytes
    num_tokens: int
    num_cached_tokens: int
    num_committed_tokens: int
    key: bytes
    is_lent: bool = False
    """To the device: the sequence is as it was when it was lent."""


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """A lease on a match."""

    node: tuple[int, int | None]
    block_ids: bytes


@dataclass(frozen=True, slots=True)
class PinSnapshot:
    """A pin: the node whose lease it holds, among the snapshot's leases. ``until``: on the cache's clock."""

    tenant: str
    node: tuple[int, int | None]
    block_ids: bytes
    until: float


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """A tenant's counts as the cache keeps them; ``policy_nodes`` is how many nodes its policy calls evictable.

    ``max_blocks`` is None for a tenant that may use the whole pool.
    """

    tenant: str
    used_blocks: int
    evictable_blocks: int
    policy_nodes: int
    guaranteed_blocks: int
    max_blocks: int | None
    pinned_blocks: int = 0


@dataclass(frozen=True, slots=True)
class BaseSnapshot:
    """A base that holds blocks; ``node`` is the (tree, node) that it leases. ``is_over`` once it is unpublished."""

    base_id: str
    node: tuple[int, int | None]
    key: bytes
    block_ids: bytes
    readers: frozenset[str]
    is_over: bool


@dataclass(frozen=True, slots=True)
class LendingSnapshot:
    """Sequences that are lent to the device, as indices, their tenant, and the blocks that were lent besides."""

    tenant: str
    sequences: tuple[int, ...]
    block_ids: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the audit needs, taken at one moment. In-process only: labels are token ids.

    (tree, node) pairs index ``trees`` and the tree's ``nodes``.
    """

    num_blocks: int
    block_size: int
    free_ids: BlockIds
    lent_ids: tuple[int, ...]
    held_ids: BlockIds
    trees: tuple[TreeSnapshot, ...]
    runs: tuple[RunSnapshot, ...]
    sequences: tuple[SequenceSnapshot, ...]
    leases: tuple[LeaseSnapshot, ...]
    tenants: tuple[TenantSnapshot, ...]
    pins: tuple[PinSnapshot, ...] = ()
    bases: tuple[BaseSnapshot, ...] = ()
    lendings: tuple[LendingSnapshot, ...] = ()
