"""The cache of SGLang's scheduler, without SGLang: pages, locks and salts, in PrefixCache's terms.

    SGLang asks                                      here
    which prefix of a request is resident            match
    take the pages of a request up to a position     insert     what the tree has already is handed back
    hold a prefix while a request uses it            lock, unlock
    give back pages                                  reclaim

``radixkv.engines.sglang.plugin`` is the shell that SGLang loads. SGLang owns the pool: each page is its own until it is
inserted, and its own again after ``reclaim``. Page 0 is its padding page and never comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple
from zlib import crc32

from radixkv._compiled import mypyc_attr
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import NamespaceError, NotResident, OutOfBlocks, QuotaExceeded, TokenError
from radixkv.index.cache import PrefixCache, RequestHints
from radixkv.index.engine_blocks import Inserted
from radixkv.index.leases import Lease
from radixkv.index.match import End, Match
from radixkv.index.tokens import TOKEN_BYTES, encode
from radixkv.storage.plan import BlockIds
from radixkv.tenancy.request_keys import Label, RequestFacts, RequestKeys, hints_of
from radixkv.tenancy.salt import SaltReader
from radixkv.uncopied import refuse_copies

MAX_NAMED: Final = 4096
"""Pairs of salt and extra key whose namespaces are remembered."""

_FRAME: Final = "radixkv:"
_UNFRAMED: Final = "unframed:"
_MIDDLE: Final = 50
"""The policy's priority for SGLang's 0."""

_NO_HINTS: Final = RequestHints()

_NAMES: Final = {"mru": "radixkv_policies.newest:MRU", "filo": "radixkv_policies.newest:FILO"}
"""SGLang's names of policies that have others here."""


def framed_extra_key(extra_key: str | None, lora_id: str | None) -> str | None:
    """Return one text for a client's extra key and the id of its adapter, from which both can be read back.

    SGLang itself joins them, so that a client could name another adapter's KV. None if both are missing.
    """
    if extra_key is None and lora_id is None:
        return None
    given = extra_key or ""
    return f"{_FRAME}{len(given)}:{given}{lora_id or ''}"


def unframed_extra_key(text: str | None) -> tuple[str, str | None]:
    """Return a client's extra key and the id of its adapter. A text without a frame is an extra key."""
    if text is None:
        return "", None
    size, colon, rest = text.removeprefix(_FRAME).partition(":")
    if not (text.startswith(_FRAME) and colon and size.isdecimal() and int(size) <= len(rest)):
        return f"{_UNFRAMED}{text}", None
    return rest[: int(size)], rest[int(size) :] or None


def _salt_with(salt: str, extra_key: str) -> str:
    """Return the salt of a namespace for a request's salt and extra key. Without the latter it is the salt."""
    if not extra_key and not salt.startswith(_FRAME):
        return salt
    return f"{_FRAME}{len(salt)}:{salt}{extra_key}"


def _salt_without(text: str) -> tuple[str, str]:
    """Return the salt and the extra key from which ``_salt_with`` made a text."""
    if not text.startswith(_FRAME):
        return text, ""
    size, _, rest = text.removeprefix(_FRAME).partition(":")
    return rest[: int(size)], rest[int(size) :]


class Node:
    """Where a match ends. Nodes of equal prefixes are equal, also after splits and evictions.

    ``match``: None for the root. ``num_tokens``: tokens before it. ``inserted``: the insert that ended here, if one
    returned it.
    """

    __slots__ = ("_key", "inserted", "match", "num_tokens")

    def __init__(
        self, match: Match | None = None, key: bytes = b"", inserted: Inserted | None = None
    ) -> None:
        self.match, self._key, self.inserted = match, key, inserted
        self.num_tokens = 0 if match is None else match.num_tokens

    @property
    def key(self) -> bytes:
        """The key of the tokens before it. O(tokens)."""
        return self._key[: self.num_tokens * TOKEN_BYTES]

    @property
    def namespace(self) -> Namespace | None:
        """The namespace of its tokens; None for the root."""
        return None if self.match is None else self.match.namespace

    @property
    def end(self) -> End | None:
        """The same position for the cache; None for the root."""
        return None if self.match is None else self.match.end

    @property
    def block_ids(self) -> BlockIds | None:
        """The pages of its tokens, int32, valid while the node is locked; None for the root."""
        return None if self.match is None else self.match.block_ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.end == other.end

    def __hash__(self) -> int:
        return hash(self.end)

    def __repr__(self) -> str:
        return f"<Node after {self.num_tokens} tokens>"


ROOT: Final = Node()


class Origin(NamedTuple):
    """What SGLang called the requests of a namespace: the client's salt and extra key, and the adapter's id."""

    cache_salt: str | None
    extra_key: str | None
    adapter: str | None


class Taken(NamedTuple):
    """What ``insert`` did.

    - ``num_resident_tokens``: leading tokens that were resident before.
    - ``node``: where the inserted prefix ends.
    - ``lease``: holds it, if that was asked for.
    - ``surplus``: given pages that the tree didn't take, as it has others; int32. They stay SGLang's.
    - ``evicted``: pages that the insert evicted; int32. They are SGLang's again.
    """

    num_resident_tokens: int
    node: Node
    lease: Lease | None
    surplus: BlockIds
    evicted: BlockIds


@mypyc_attr(allow_interpreted_subclasses=True)
class SglangCache:
    """A pool of ``num_pages`` pages of ``page_size`` tokens, the padding page included.

    - ``model``: identity of model and tokenizer, for the namespaces.
    - ``salts``: reads whose request it is. None: all requests are of one tenant, by their salts in namespaces.
    - ``policy``: the eviction policy, by radixkv's name or SGLang's.

    Raises ConfigError. One thread uses it at a time, except for what the control channel does with ``cache``.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        model: str,
        salts: SaltReader | None = None,
        policy: str = "learned",
        make: Callable[..., PrefixCache] = PrefixCache,
    ) -> None:
        self._page_size = page_size
        self._keys, self._has_salts = RequestKeys(model, salts), salts is not None
        self._has_priorities = policy == "priority"
        self.decisions = 0
        """A digest of all matches, and of all pages taken and given back. Ranks that decide alike have the same."""
        self._named: dict[tuple[str | None, str | None], Namespace | None] = {}
        self.cache = make(
            CacheConfig(
                num_pages,
                page_size,
                policy=_NAMES.get(policy, policy),
                default_tenant=Tenant("default"),
                blocks="engine",
            )
        )

    @property
    def num_refused_salts(self) -> int:
        """Salts that were refused. Their requests find nothing and leave nothing."""
        return self._keys.num_refused

    # --- requests

    def namespace(self, cache_salt: str | None, extra_key: str | None) -> Namespace | None:
        """Return the namespace of a request; None if its salt or its adapter is refused."""
        if self._has_salts:  # a purge ends their generation
            return self._read(cache_salt, extra_key)
        named = (cache_salt, extra_key)
        if named in self._named:
            return self._named[named]
        if len(self._named) >= MAX_NAMED:
            del self._named[next(iter(self._named))]
        found = self._named[named] = self._read(cache_salt, extra_key)
        return found

    def _read(self, cache_salt: str | None, extra_key: str | None) -> Namespace | None:
        salt, adapter = unframed_extra_key(extra_key)
        namespace, facts = self._keys.read(RequestFacts(cache_salt, adapter))
        if facts.is_private:
            return None
        try:
            return namespace._replace(salt=_salt_with(namespace.salt, salt))
        except NamespaceError:
            return None

    def origin(self, namespace: Namespace) -> Origin:
        """Return what SGLang called the requests of a namespace. A salt too long for one comes back as its digest."""
        salt, extra_key = _salt_without(namespace.salt)
        found = self._keys.cache_salt(namespace.tenant, salt)
        return Origin(found, extra_key.removeprefix(_UNFRAMED) or None, namespace.adapter)

    def match(self, namespace: Namespace | None, ids: Any) -> Node:
        """Return where the longest resident prefix ends. ``ids``: token ids, an ``array`` or a list."""
        if namespace is None or len(ids) < self._page_size:
            return ROOT
        try:
            key = encode(ids)
        except TokenError:  # ids ≥ 2³² or below 0: no key can hold them
            return ROOT
        found = self.cache.match(namespace, key)
        node = Node(found, key)
        self._decided(node.num_tokens, b"")
        return node if node.num_tokens else ROOT

    def touch(self, namespace: Namespace | None, ids: Any) -> None:
        """Tell the policy that a prefix waits to be used."""
        if namespace is not None and len(ids) >= self._page_size:
            try:
                self.cache.touch(namespace, ids)
            except (TokenError, OutOfBlocks):
                return

    def insert(
        self,
        namespace: Namespace | None,
        ids: Any,
        pages: BlockIds,
        start: int = 0,
        *,
        after: Node | None = None,
        lease: bool = False,
        priority: int = 0,
        labels: tuple[tuple[str, Label], ...] = (),
    ) -> Taken | None:
        """Take the pages of a prefix from position ``start``; what comes before is locked by the caller.

        - ``after``: a node of the namespace, or the root. The prefix is its tokens, and ``ids`` behind them. Only
          ``ids`` are encoded. Together they are whole pages. If an insert returned the node, this one goes on with
          the same request.
        - ``priority``: for the policy of that name, SGLang's; higher ones stay longer, from -50 to 50.
        - ``labels``: what the client says of its session (``request_keys.labels_of``).

        None if the tree can't take them: the salt was refused, the tenant has no room, or a purge took what comes
        before. Then nothing changed.
        """
        if namespace is None:
            return None
        try:
            key = encode(ids) if after is None else after.key + encode(ids)
            if not key:
                return None
            earlier = None if after is None else after.inserted
            hints = None if earlier is not None else self._hints(namespace, priority, labels)
            done = self.cache.insert(
                namespace, key, pages, start=start, lease=lease, hints=hints, request=earlier
            )
        except (TokenError, NamespaceError, NotResident, QuotaExceeded, OutOfBlocks):
            return None
        node = Node(done.match, key, done)
        taken = Taken(done.num_resident_tokens, node, done.lease, done.surplus, done.evicted)
        self._decided(taken.num_resident_tokens, taken.surplus.tobytes() + taken.evicted.tobytes())
        return taken

    def _hints(
        self, namespace: Namespace, priority: int, labels: tuple[tuple[str, Label], ...]
    ) -> RequestHints:
        hints = hints_of(namespace, labels) or _NO_HINTS
        if not self._has_priorities:
            return hints
        return replace(hints, priority=min(max(_MIDDLE + priority, 0), 2 * _MIDDLE))

    def lock(self, node: Node) -> Lease | None:
        """Hold a prefix. None for the root."""
        return None if node.match is None else self.cache.lease(node.match)

    # --- pages

    def reclaim(self, num_pages: int) -> BlockIds:
        """Return pages that are SGLang's again, at least ``num_pages`` if so many can go; int32."""
        found = self.cache.reclaim(num_pages)
        self._decided(len(found), found.tobytes())
        return found

    def _decided(self, number: int, pages: bytes) -> None:
        self.decisions = crc32(number.to_bytes(4, "big") + pages, self.decisions)

    def purged(self) -> None:
        """Do nothing: SGLang takes freed pages back at its next question, and running requests keep theirs."""

    def reset(self) -> None:
        """Forget everything. Only while no request holds a page: SGLang's allocator then has all of them."""
        for namespace in self.cache.namespaces():
            self.cache.clear(namespace)
        self.cache.reclaim(0)

    @property
    def evictable_tokens(self) -> int:
        """Tokens of pages that can be evicted. O(1)."""
        return self.cache.evictable_blocks * self._page_size

    @property
    def protected_tokens(self) -> int:
        """Tokens of resident pages that are held. O(1)."""
        return (self.cache.resident_blocks - self.cache.evictable_blocks) * self._page_size

    @property
    def resident_tokens(self) -> int:
        """Tokens of all resident pages. O(1)."""
        return self.cache.resident_blocks * self._page_size

    @property
    def has_freed(self) -> bool:
        """Whether pages wait for ``reclaim`` that other calls freed, such as a purge."""
        return self.cache.free_blocks > 0


refuse_copies(SglangCache, "it holds the leases of a cache. Make another")
