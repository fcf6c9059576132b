"""Sources of a router: the replicas with their load, and the view of what they hold.

    Followed    over a reader that its owner polls
    Observer    over a store: a reader and its thread, for a router that is not a replica
    LocalSource for a router inside a replica: uses its coordinator's reader. The replica itself is a member, and
                its cache is asked directly

The members are made again after each fetch of the registrations. Until then ``members`` returns the same object, so
that a router can keep arrays of them.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from radixkv.clock import Clock, monotonic
from radixkv.coordination.keys import SEGMENT_TOKENS, FleetKeys
from radixkv.coordination.loop import Loop
from radixkv.coordination.proofs import Proofs
from radixkv.coordination.settings import Settings
from radixkv.coordination.store.protocol import MAX_PURGES, Looked
from radixkv.coordination.store.wire import NOTHING
from radixkv.coordination.values import ReplicaInfo, Writer
from radixkv.coordination.view.reader import Reader
from radixkv.errors import StoreUnavailable

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.coordination.coordinator import Coordinator
    from radixkv.coordination.store.protocol import Store
    from radixkv.coordination.view.reader import Remote
    from radixkv.coordination.view.view import RemoteLog, View

log = logging.getLogger("radixkv.coordination")

_LIVE_AGAIN_S = 1e-3
"""A lease that ends this much later than before was extended by a beat."""
_KEPT_S = 10.0
_TENANT_BYTES = 150
_CHECKED_A_FETCH = 64

Match = Callable[["Namespace", bytes], int]
"""Returns how many tokens of a key this process has resident."""
Sent = Callable[["Namespace", bytes], None]
"""Hears of a key whose request is sent to this process. Must not wait."""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that prompts may be sent to. Times are those of the source's clock."""

    info: ReplicaInfo
    live_until: float
    log: RemoteLog | None = None
    """Its log, with its column in the view; None if its log is not followed."""
    match: Match | None = None
    """Used instead of a log for the replica that runs the router."""
    loaded_at: float = float("-inf")
    """When its last load report arrived."""
    heard_at: float = float("-inf")
    """When its last registration arrived."""
    current_at: float = float("-inf")
    """When the view last had all entries that its log was known to have."""
    sent: Sent | None = None
    """Called with each prompt that is sent there; only for the replica that runs the router."""

    @property
    def column(self) -> int:
        """Its column in the view, −1 if there is none now."""
        column = None if self.log is None else self.log.column
        return -1 if column is None else column

    def lag_s(self, now: float) -> float:
        """Return how long the view has lacked entries of its log."""
        return max(0.0, now - self.current_at) if self.num_behind else 0.0

    def staleness_s(self, now: float) -> float:
        """Return the seconds since its last news; 0 for the replica that runs the router."""
        return 0.0 if self.match is not None else max(0.0, now - self.heard_at)

    @property
    def num_behind(self) -> int:
        """Return the number of its log's entries that the view is known to lack."""
        return 0 if self.log is None else max(0, self.info.last_seq - self.log.seq)


class Source(Protocol):
    """Replicas and what they hold; see the module's docstring. Everything is local."""

    keys: FleetKeys
    view: View

    @property
    def clock(self) -> Clock:
        """Seconds, on the same clock as the members' times."""

    @property
    def is_lost(self) -> bool:
        """Whether the store didn't answer the last time."""

    def members(self) -> Sequence[Member]:
        """Return all replicas that may be sent prompts while they live; the same object if nothing has changed."""

    def generation(self, tenant: str) -> int:
        """Return the tenant's generation, as far as it is known."""

    def close(self) -> None:
        """End what the source started. Idempotent."""


class Followed:
    """A source over a reader that its owner polls."""

    def __init__(
        self, reader: Reader, keys: FleetKeys, clock: Clock, generation: Callable[[str], int]
    ) -> None:
        self.reader, self.keys, self.view = reader, keys, reader.view
        self._clock, self._generation = clock, generation
        self._remotes: object = None
        self._is_kept = False
        self._members: list[Member] = []

    @property
    def clock(self) -> Clock:
        """Seconds, on the same clock as the members' times."""
        return self._clock

    @property
    def is_lost(self) -> bool:
        """Whether the store didn't answer the last time, doesn't answer now, or came back without any replica."""
        return self.reader.is_lost or self._is_kept

    def members(self) -> Sequence[Member]:
        """Return the replicas with a proven address in this fleet, except those that drain.

        If a store comes back empty, as after a restart, known members are kept for ten seconds, while they register
        again.
        """
        remotes = self.reader.remotes
        if remotes is not self._remotes:
            before = {each.info.writer: each for each in self._members}
            found = [
                self._member(remote, before.get(remote.info.writer))
                for remote in remotes.values()
                if remote.info.proven and remote.info.incompatible is None
            ]
            self._is_kept = not found and self.reader.fetched_at < self.reader.failed_at + _KEPT_S
            known = self._members if self._is_kept else found
            self._members = [each for each in known if not each.info.draining]
            self._remotes = remotes
        return self._members

    def generation(self, tenant: str) -> int:
        """Return the tenant's generation, as far as it is known."""
        return self._generation(tenant)

    def close(self) -> None:
        """Do nothing: the reader's owner ends it."""

    def _member(self, remote: Remote, before: Member | None) -> Member:
        heard_at, log = self.reader.fetched_at, remote.log
        loaded_at = current_at = heard_at
        if before is not None and remote.live_until <= before.live_until + _LIVE_AGAIN_S:
            loaded_at = before.loaded_at
        if before is not None and log is not None and log.seq < remote.info.last_seq:
            current_at = before.current_at
        return Member(remote.info, remote.live_until, log, None, loaded_at, heard_at, current_at)


class Observer(Followed):
    """A source over a store. It registers nothing and writes nothing; ``close`` closes the store.

    ``background=False`` starts no thread: the caller then calls ``poll``. An unreachable store is no error: there are
    no members until it is reachable.
    """

    def __init__(
        self,
        store: Store,
        fleet_secret: bytes,
        *,
        clock: Clock = monotonic,
        max_segments: int = 2_000_000,
        background: bool = True,
    ) -> None:
        settings = Settings(
            replica_id=f"router-{secrets.token_hex(8)}",
            fleet_secret=fleet_secret,
            fingerprint="none",
            block_size=SEGMENT_TOKENS,
            view_digests=max_segments,
        )
        keys = FleetKeys(fleet_secret)
        self._generations = Generations(keys, store)
        reader = Reader(settings, keys, store, clock, any_block_size=True)
        super().__init__(reader, keys, clock, self._generations)
        self._store, self._asked_at = store, float("-inf")
        self._has_told = False
        self._loop = Loop(settings.replica_id, self._step)
        self.poll()
        if background:
            self._loop.start()

    @property
    def tenant_bytes(self) -> int:
        """Approximate bytes for the generations of tenants; at most about 30 MB."""
        return self._generations.num_bytes

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the thread: a bug in radixkv."""
        return self._loop.failure

    def poll(self) -> None:
        """Fetch the registrations and read all logs now, as far as the store can be reached."""
        with suppress(StoreUnavailable):
            self.reader.refresh()
            self._generations.follow(self.reader.registrations())
        self._tell()

    def close(self) -> None:
        """End the thread and the connections. Idempotent."""
        self._loop.stop()
        self._store.close()

    def _step(self) -> float:
        pause_s = self.reader.step()
        self._tell()
        if self._asked_at != self.reader.fetched_at:
            self._asked_at = self.reader.fetched_at
            with suppress(StoreUnavailable):
                self._generations.follow(self.reader.registrations())
        return pause_s

    def _tell(self) -> None:
        """Log the beginning of an outage and its end."""
        failure = self.reader.failure
        if failure and not self._has_told:
            log.warning("router: the store is unavailable: %s", failure)
        elif self._has_told and not failure:
            log.warning("router: the store is available again")
        self._has_told = bool(failure)


class LocalSource(Followed):
    """A source for the router of a replica: its coordinator's reader, and the replica itself.

    ``match``: asks its cache. ``sent``: hears of the prompts that ``Router.routed`` says are sent here.
    """

    def __init__(self, coordinator: Coordinator, match: Match, sent: Sent | None = None) -> None:
        super().__init__(
            coordinator.reader, coordinator.keys, coordinator.clock, coordinator.purges.generation
        )
        self._coordinator, self._match, self._sent = coordinator, match, sent
        self._others: Sequence[Member] = ()
        self._all: list[Member] = []

    def members(self) -> Sequence[Member]:
        """Return this replica, which is live as long as it answers, unless it drains, and the others."""
        others, info = super().members(), self._coordinator.info()
        if info.draining:
            return others
        known = self._all[0].info if self._all else None
        same = known is not None and (known.load, known.writer, known.weights) == (
            info.load,
            info.writer,
            info.weights,
        )
        if others is not self._others or not same:
            now = self.clock()
            self._all = [Member(info, float("inf"), None, self._match, now, now, now, self._sent), *others]
            self._others = others
        return self._all


class Generations:
    """The generations of tenants that were asked about; one thread follows them over a store.

    A tenant that was purged before its first question has generation 0 until the next ``follow``. Bound: 65,536 purged
    tenants; beyond it, those purged longest ago are forgotten.
    """

    def __init__(self, keys: FleetKeys, store: Store) -> None:
        self._keys, self._store, self._proofs = keys, store, Proofs(keys)
        self._known: dict[bytes, int] = {}
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._wanted: set[bytes] = set()
        self._unchecked: list[bytes] = []
        self._cursor = 0
        self._met: frozenset[Writer] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of all generations kept here."""
        return (len(self._known) + len(self._announced) + len(self._wanted)) * _TENANT_BYTES

    def __call__(self, tenant: str) -> int:
        """Return the generation of a tenant; local."""
        if not self._announced:
            return 0
        digest = self._keys.tenant(tenant)
        known = self._known.get(digest)
        if known is None and digest in self._announced:
            self._wanted.add(digest)
        return known or 0

    def follow(self, registrations: frozenset[Writer]) -> None:
        """Read raises since the last call; read everything if replicas have joined. Raises StoreUnavailable.

        Replicas also register again if the store has lost something. Then generations that only this object knows are
        dropped.
        """
        if registrations - self._met:
            self._cursor = 0
            self._wanted |= self._known.keys()
        raised = self._store.purges(self._cursor)
        digests = {digest for digest, _ in raised}
        self._announce([digest for digest, _ in raised])
        asked = [
            *((digests & self._known.keys()) | (self._wanted & self._announced.keys()) | self._in_turn())
        ]
        for digest, looked in zip(asked, self._store.look_at(asked), strict=True):
            if looked is not None:
                self._read(digest, looked, is_void=bool(registrations - self._met))
        self._met = registrations
        if raised:
            self._cursor = raised[-1][1]

    def _read(self, digest: bytes, looked: Looked, *, is_void: bool) -> None:
        """Keep the greatest raised generation; ``is_void``: the store's value counts even if it is smaller."""
        is_raise = self._proofs.is_raise(digest, looked.raised)
        if looked.standing != NOTHING and not is_raise:
            return
        found = looked.raised.generation
        self._known[digest] = found if is_void else max(found, self._known.get(digest, 0))
        self._wanted.discard(digest)

    def _in_turn(self) -> set[bytes]:
        """Return the next known tenants to check: a store that went back to an earlier state doesn't announce it."""
        self._unchecked = self._unchecked or list(self._known)
        some = self._unchecked[-_CHECKED_A_FETCH:]
        del self._unchecked[-_CHECKED_A_FETCH:]
        return self._known.keys() & some

    def _announce(self, digests: list[bytes]) -> None:
        """Record the order of these raises; keep the latest ones."""
        for digest in digests:
            self._announced[digest] = None
            self._announced.move_to_end(digest)
        while len(self._announced) > MAX_PURGES:
            oldest, _ = self._announced.popitem(last=False)
            self._known.pop(oldest, None)
            self._wanted.discard(oldest)
