"""Sessions: requests of one agent or conversation, so that policies know its pauses and its end frees its blocks.

    open     a request of the session; it resumes after a pause
    pause    the policy hears that the session continues, and when
    fork     a session for a subagent; both are of one family
    close    frees what no other session used
    note     without a session: the policy hears more of the last request of a prompt

A session protects nothing and promises nothing. Matches, refusals, guarantees and limits are the same with and without
it. It marks the nodes that only its requests used (``tree.SoleUser``): a request marks the nodes that it adds, and
a use of a marked node by anybody else removes the mark. What only sessions of one family used is marked as the
family's, and freed when all of them are closed.

There is no list of sessions. A session is its handle and the marks, one a node, so the pool bounds them. A handle
that is dropped without ``close`` leaves ordinary blocks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, cast

from radixkv.errors import ArgumentError, LeaseError
from radixkv.index import announcements, requests
from radixkv.index.opening import open_handle
from radixkv.index.recovery import Mending
from radixkv.index.state import CacheState
from radixkv.index.tokens import ID_BYTES, TokenIds, encode
from radixkv.index.tree import SoleUser, give_to, note_use
from radixkv.index.validation import require_flags, require_hints
from radixkv.uncopied import refuse_copies
from radixkv_policies import RequestHints

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.announcements import Announcement
    from radixkv.index.sequence import Sequence
    from radixkv.index.tenants import NamespaceTree, TenantState
    from radixkv.index.tree import Node

MAX_NAME_LENGTH: Final = 256
"""Longest name of a session, in characters."""

MAX_GAP_S: Final = 366 * 86_400.0
"""Longest pause that can be expected."""

SLICE_NODES: Final = 256
"""Nodes that ``close`` visits before other threads may take the lock."""

_NO_HINTS: Final = RequestHints()


class Session:
    """The requests of one agent or conversation. Made by ``PrefixCache.session``; use it in a ``with``.

    It is safe to use from several threads. Calls other than ``close`` raise LeaseError after ``close``.
    """

    __slots__ = ("_cache", "_key", "_last", "_user", "name", "namespace", "num_requests")

    def __init__(self, cache: CacheState, namespace: Namespace, name: str, family: SoleUser) -> None:
        self._cache, self._user = cache, SoleUser(namespace, family)
        self.namespace, self.name, self.num_requests = namespace, name, 0
        self._last: object = None  # its last request, as the policy knows it
        self._key = b""  # of its last prompt, if something lies below the cache

    def __repr__(self) -> str:
        return (
            f"<Session {self.name!r}, {'open' if self.is_open else 'closed'}: {self.num_requests} requests>"
        )

    @property
    def is_open(self) -> bool:
        """False after ``close``."""
        return self._user.num_open > 0

    @property
    def own_blocks(self) -> int:
        """Resident blocks that no other session and no other request used. O(their nodes)."""
        with self._cache._lock:
            return sum([node.num_blocks for node in self._user.nodes])

    def open(
        self,
        ids: TokenIds,
        *,
        hints: RequestHints | None = None,
        lookup: bool = True,
        ahead: bool = False,
        announcement: Announcement | None = None,
    ) -> Sequence:
        """Open the session's next request. See ``PrefixCache.open``.

        Its hints get the labels ``session`` and ``turn``. Raises LeaseError, and like ``PrefixCache.open``, and then
        changes nothing. Costs 3 µs more than that, and O(1) a node that others shared with a session.
        """
        require_hints(hints)
        require_flags(lookup=lookup, ahead=ahead)
        if announcement is not None:
            announcements.require_own(self._cache, announcement, self.namespace)
            hints = cast("RequestHints | None", announcement.hints) if hints is None else hints
        self._require_open()
        turn, known = self.num_requests + 1, hints or _NO_HINTS
        hints = replace(known, labels={**known.labels, "session": self.name, "turn": turn})
        key = encode(ids)
        sequence = open_handle(
            self._cache, self.namespace, key, hints, None, lookup, ahead, announcement, self._user
        )
        self._last, self.num_requests = sequence._state._hints, turn
        if self._cache._below is not None:
            self._key = key
        return sequence

    def pause(self, expected_gap_s: float | None = None, *, for_tool: bool = True) -> None:
        """Tell the policy that the session continues. Call it when the last request ends, or later.

        - ``expected_gap_s``: seconds until the next request, if known, up to a year. What only a disk has of the last
          prompt then comes into host memory shortly before.
        - ``for_tool``: it waits for a tool's answer, not for a person.

        ``learned`` and ``auto`` use it, with the session's own past pauses. Raises ArgumentError, LeaseError. O(nodes
        of the last request).
        """
        require_flags(for_tool=for_tool)
        labels: dict[str, str | float | bool] = {"tool_pending": for_tool}
        if expected_gap_s is not None:
            labels["expected_gap_s"] = _checked_gap(expected_gap_s)
        hints, cache = RequestHints(labels), self._cache
        self._require_open()
        with cache._lock, Mending(cache):
            tenant = cache._tenants.get(self.namespace.tenant)
            if tenant is not None and tenant.on_noted is not None:
                tenant.on_noted(self._last, hints)
        _bring_back(cache, self.namespace, self._key, hints)

    def fork(self, name: str | None = None) -> Session:
        """Make a session for a subagent. What both use counts as theirs, until both are closed.

        ``name``: as for ``PrefixCache.session``. Raises ArgumentError, LeaseError. O(1).
        """
        _check_name(name)
        cache, family = self._cache, self._user.family
        assert family is not None
        with cache._lock, Mending(cache):
            self._require_open()
            child = Session(cache, self.namespace, name or _next_name(cache, self.namespace), family)
            family.num_open += 1
            return child

    def close(self) -> int:
        """End the session, and free at once what no other session and no other request used.

        What running sequences, leases, pins and bases hold stays. What its running sequences hold, and still add,
        belongs to its family while that has an open session, and then to nobody alone. Returns how many blocks were
        freed. A second call frees what an interrupted one left. O(nodes that only it used, and running sequences with
        their nodes), in slices.
        """
        cache, freed = self._cache, 0
        with cache._lock, Mending(cache):
            ended = _end(cache, self._user)
        for user in ended:
            freed += _free(cache, user)
        return freed

    def _require_open(self) -> None:
        if not self.is_open:
            raise LeaseError("this session is closed")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._cache.is_dead:
            self.close()


refuse_copies(Session, "a copy would not count the requests of this one. Pass it on, or fork() it")


def make(cache: CacheState, namespace: Namespace, name: Any) -> Session:
    """See PrefixCache.session."""
    _check_name(name)
    with cache._lock, Mending(cache):
        next_name = _next_name(cache, namespace)
        return Session(cache, namespace, name or next_name, SoleUser(namespace, None))


def note(cache: CacheState, namespace: Namespace, key: bytes, hints: RequestHints) -> None:
    """See PrefixCache.note."""
    with cache._lock, Mending(cache):
        tree = cache._registry.resident_tree(namespace, key, len(key))
        if tree is not None and tree.tenant.on_noted is not None:
            node, _, child, _ = tree.walk(key, len(key), bytearray())
            end = node if child is None else child
            if end is not tree.root:
                tree.tenant.on_noted(None, hints, end)
    _bring_back(cache, namespace, key, hints)


def _bring_back(cache: CacheState, namespace: Namespace, key: bytes, hints: RequestHints) -> None:
    """Let what lies below bring a prompt near again before the expected end of a pause, if there is one."""
    below, pause_s = cache._below, hints.pause_s
    if below is None or pause_s is None or not key:
        return

    def resident_tokens() -> int:
        with cache._lock:
            return requests.find(cache, namespace, key).num_tokens

    below.prefetch(namespace, key, resident_tokens, pause_s)


def _next_name(cache: CacheState, namespace: Namespace) -> str:
    """Return a name that the tenant's sessions don't have. The tenant is known afterwards. Raises NamespaceError."""
    tenant: TenantState | None = cache._tenants.get(namespace.tenant)
    if tenant is None or not cache._registry.admits(namespace.tenant):
        tenant = cache._registry.new_tree(namespace).tenant
        cache._tenants[namespace.tenant] = tenant
    tenant.num_sessions += 1
    return f"session {tenant.num_sessions}"


def _check_name(name: object) -> None:
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH):
        raise ArgumentError("name", name, f"a string of 1 to {MAX_NAME_LENGTH} characters, or None")


def _checked_gap(gap_s: object) -> float:
    if isinstance(gap_s, bool) or not isinstance(gap_s, (int, float)) or not 0 < gap_s <= MAX_GAP_S:
        raise ArgumentError("expected_gap_s", gap_s, f"seconds > 0, at most {MAX_GAP_S:.0f}, or None")
    return float(gap_s)


def _end(cache: CacheState, user: SoleUser) -> list[SoleUser]:
    """End a session. Its running sequences continue as its family's. Returns the sole users that are over."""
    family = user.family
    assert family is not None
    if user.num_open:
        user.num_open = 0
        family.num_open -= 1
    ended = [each for each in (user, family) if not each.num_open]
    heir = _heir(user)
    for sequence in cache._sequences:
        if sequence._user is not None and sequence._user in ended:
            sequence._user = heir
            tenant = sequence._tree.tenant
            cache._recorder.note(tenant, note_use(sequence._node, heir))
    return ended


def _heir(user: SoleUser) -> SoleUser | None:
    """Return whose the nodes in use are after the end of a session: its family's, or nobody's alone."""
    return user.family if user.family is not None and user.family.num_open else None


def _free(cache: CacheState, user: SoleUser) -> int:
    """Free the unused nodes of a sole user that is over, slice by slice. Returns how many blocks were freed."""
    with cache._lock:
        pending = list(user.nodes)
    num_blocks = 0
    while pending:
        with cache._lock, Mending(cache):
            num_blocks += _free_slice(cache, user, pending)
        if pending:
            requests.let_others()
    while user.nodes:
        with cache._lock, Mending(cache):
            for node in list(islice(user.nodes, SLICE_NODES)):
                give_to(node, _heir(user))
                cache._recorder.note(cast("NamespaceTree", node.tree).tenant, [node])
    return num_blocks


def _free_slice(cache: CacheState, user: SoleUser, pending: list[Node]) -> int:
    """Free the leaves among the last of these nodes, and their ancestors. Others may have used them meanwhile."""
    freed = bytearray()
    for _ in range(min(len(pending), SLICE_NODES)):
        node = pending.pop()
        tree = cast("NamespaceTree", node.tree)
        while node.sole_user is user and not node.uses and node.children is None and not tree.detached:
            above = node.parent
            assert above is not None
            cache._evictor.drop(node, tree, freed)
            node = above
        if tree.root.children is None:
            tree.tenant.drop_if_empty(tree)
            if tree.base is not None:
                cache._evictor.let_go(tree.base)
    cache._pool.give(freed)
    return len(freed) // ID_BYTES
