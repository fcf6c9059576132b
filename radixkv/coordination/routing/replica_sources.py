"""Where a router knows its replicas from: members with their load, and the view of what they hold.

    Followed    over a reader that somebody polls
    Observer    over a store: a reader and its thread, for a router that is no replica
    LocalSource for a router inside a replica: the reader is its coordinator's, and the replica itself is a
                member, whose cache is asked directly

A source's members are made anew when the reader has fetched the registrations, and are the same object until
then, so that a router can keep arrays of them.
"""

from __future__ import annotations

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

_LIVE_AGAIN_S = 1e-3
"""A lease that ends this much later than before was extended by a beat."""
_KEPT_S = 10.0
_TENANT_BYTES = 150
_CHECKED_A_FETCH = 64

Match = Callable[["Namespace", bytes], int]
"""How many tokens of a key this process itself has resident."""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that prompts may be sent to. Times are those of the source's clock."""

    info: ReplicaInfo
    live_until: float
    log: RemoteLog | None = None
    """Its column in the view; None if its log is not followed."""
    match: Match | None = None
    """Instead of a log, for the replica that asks."""
    loaded_at: float = float("-inf")
    """When its load was last heard."""
    heard_at: float = float("-inf")
    """When its registration was last heard."""
    current_at: float = float("-inf")
    """When the view last had all that its log was known to have."""

    @property
    def column(self) -> int:
        """Its column in the view, −1 if there is none now."""
        column = None if self.log is None else self.log.column
        return -1 if column is None else column

    def lag_s(self, now: float) -> float:
        """How long the view has lacked some of them."""
        return max(0.0, now - self.current_at) if self.num_behind else 0.0

    def staleness_s(self, now: float) -> float:
        """Since anything was heard of it; 0 for the replica that asks."""
        return 0.0 if self.match is not None else max(0.0, now - self.heard_at)

    @property
    def num_behind(self) -> int:
        """Entries of its log that the view is known to lack."""
        return 0 if self.log is None else max(0, self.info.last_seq - self.log.seq)


class Source(Protocol):
    """See the module's docstring. Everything is local."""

    keys: FleetKeys
    view: View

    @property
    def clock(self) -> Clock:
        """Seconds, as in the members' times."""

    @property
    def is_lost(self) -> bool:
        """The store didn't answer the last time."""

    def members(self) -> Sequence[Member]:
        """All replicas that may be sent prompts while they live. The same object again if nothing has changed."""

    def generation(self, tenant: str) -> int:
        """The tenant's generation, as far as it is known."""

    def close(self) -> None:
        """End what was started for it. Idempotent."""


class Followed:
    """A source over a reader that somebody polls."""

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
        """Seconds, as in the members' times."""
        return self._clock

    @property
    def is_lost(self) -> bool:
        """The store didn't answer the last time, nor does it now, or came back without knowing any replica."""
        return self.reader.is_lost or self._is_kept

    def members(self) -> Sequence[Member]:
        """Replicas whose address is proven and whose fleet is this one.

        A store that comes back empty, as after a restart, takes none away for ten seconds: they register again.
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
            self._members = self._members if self._is_kept else found
            self._remotes = remotes
        return self._members

    def generation(self, tenant: str) -> int:
        """The tenant's generation, as far as it is known."""
        return self._generation(tenant)

    def close(self) -> None:
        """Who made the reader ends it."""

    def _member(self, remote: Remote, before: Member | None) -> Member:
        heard_at, log = self.reader.fetched_at, remote.log
        loaded_at = current_at = heard_at
        if before is not None and remote.live_until <= before.live_until + _LIVE_AGAIN_S:
            loaded_at = before.loaded_at
        if before is not None and log is not None and log.seq < remote.info.last_seq:
            current_at = before.current_at
        return Member(remote.info, remote.live_until, log, None, loaded_at, heard_at, current_at)


class Observer(Followed):
    """A source over a store, that registers nothing and writes nothing; closes the store at the end.

    ``background=False`` starts no thread: the caller then calls ``poll``. A store that can't be reached is no
    error: there are no members until it can.
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
        self._loop = Loop(settings.replica_id, self._step)
        self.poll()
        if background:
            self._loop.start()

    @property
    def tenant_bytes(self) -> int:
        """What the generations of tenants take, roughly; at most some 30 MB."""
        return self._generations.num_bytes

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread: a bug of ours."""
        return self._loop.failure

    def poll(self) -> None:
        """Fetch the registrations and read all logs now, as far as the store can be reached."""
        with suppress(StoreUnavailable):
            self.reader.refresh()
            self._generations.follow(self.reader.registrations())

    def close(self) -> None:
        """End the thread and the connections. Idempotent."""
        self._loop.stop()
        self._store.close()

    def _step(self) -> float:
        pause_s = self.reader.step()
        if self._asked_at != self.reader.fetched_at:
            self._asked_at = self.reader.fetched_at
            with suppress(StoreUnavailable):
                self._generations.follow(self.reader.registrations())
        return pause_s


class LocalSource(Followed):
    """A source for the router of a replica: its coordinator's reader, and the replica itself."""

    def __init__(self, coordinator: Coordinator, match: Match) -> None:
        super().__init__(
            coordinator.reader, coordinator.keys, coordinator.clock, coordinator.purges.generation
        )
        self._coordinator, self._match = coordinator, match
        self._others: Sequence[Member] = ()
        self._all: list[Member] = []

    def members(self) -> Sequence[Member]:
        """This replica, which lives as long as it answers, and the others."""
        others, info = super().members(), self._coordinator.info()
        known = self._all[0].info if self._all else None
        if (
            known is None
            or others is not self._others
            or (known.load, known.writer) != (info.load, info.writer)
        ):
            now = self.clock()
            self._all = [Member(info, float("inf"), None, self._match, now, now, now), *others]
            self._others = others
        return self._all


class Generations:
    """The generations of tenants that are asked about, followed over a store by one thread.

    A tenant whose first purge was before it was asked about has generation 0 until the next ``follow``. Bounded:
    beyond 65,536 tenants that were purged, those purged longest ago go first.
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
        """What all of this takes, roughly."""
        return (len(self._known) + len(self._announced) + len(self._wanted)) * _TENANT_BYTES

    def __call__(self, tenant: str) -> int:
        """The generation of a tenant; local."""
        if not self._announced:
            return 0
        digest = self._keys.tenant(tenant)
        known = self._known.get(digest)
        if known is None and digest in self._announced:
            self._wanted.add(digest)
        return known or 0

    def follow(self, registrations: frozenset[Writer]) -> None:
        """Read what was raised since the last time; everything, if replicas have come. Raises StoreUnavailable.

        They also come anew where the store has lost something: then generations that only this one has met are void.
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
        """Keep the greatest generation that a replica has raised; ``is_void``: what stands counts, be it less."""
        is_raise = self._proofs.is_raise(digest, looked.raised)
        if looked.standing != NOTHING and not is_raise:
            return
        found = looked.raised.generation
        self._known[digest] = found if is_void else max(found, self._known.get(digest, 0))
        self._wanted.discard(digest)

    def _in_turn(self) -> set[bytes]:
        """The next of those that are known: a store that went back to what it had a while ago says nothing."""
        self._unchecked = self._unchecked or list(self._known)
        some = self._unchecked[-_CHECKED_A_FETCH:]
        del self._unchecked[-_CHECKED_A_FETCH:]
        return self._known.keys() & some

    def _announce(self, digests: list[bytes]) -> None:
        """These were raised, in this order; keep the last of all."""
        for digest in digests:
            self._announced[digest] = None
            self._announced.move_to_end(digest)
        while len(self._announced) > MAX_PURGES:
            oldest, _ = self._announced.popitem(last=False)
            self._known.pop(oldest, None)
            self._wanted.discard(oldest)
