"""What one replica has to do with tenants of the fleet: its share of their quotas, and their generations.

A share is absolute and stated anew with every beat, so a number that got lost heals by itself; what was
granted last holds while the store is away. What a limit is, ``limits.py`` says. A generation is raised by a purge and
announced to all; every replica forgets what it has of the tenant, and then confirms that very raise, by its token, for
its registration. Since namespace digests depend on the generation, what others still publish of an older one is met by
nobody. What a store has lost of that is told to it again by who obeyed it (``restore``), and no purge of it is complete
meanwhile.

A store that lost a raise may give its number to another one. The token tells them apart: every raise has one of its
own, be it that it gives a lost number back. So who obeyed one of them obeys the other too, and a confirmation that
was on its way meanwhile is not counted for it. Of two raises of one number the one that stands in the store is the
later: the other had been lost when it was made.

Bounded: 65,536 purged tenants, as many names of tenants met here and as many limits, 4,096 tenants with a share; about
200 bytes each (``num_bytes``). The cache says itself whom it has something of, so no purge depends on what was
forgotten here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from radixkv.coordination.checks import check_tenant
from radixkv.coordination.limits import Limits
from radixkv.coordination.protocol import Writer
from radixkv.coordination.store import MAX_PURGES, Durable, Grant, Share, Store
from radixkv.coordination.wire import NEVER, Raised, new_token
from radixkv.errors import ArgumentError, CapacityError, StaleEpoch, StoreUnavailable

if TYPE_CHECKING:
    from radixkv.coordination.keys import FleetKeys
    from radixkv.coordination.protocol import Resident
    from radixkv.coordination.reader import Reader

OnPurge = Callable[[str, int], None]
"""Told of a tenant whose generation was raised: returns when nothing of it can be matched here any more."""

_MAX_SHARES = 4_096
_MAX_NAMES = 65_536
_MAX_BLOCKS = 10**15 - 1
_ITEM_BYTES = 200
_CHECKED_A_BEAT = 256
_NONE: Final[Mapping[bytes, Raised]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Purge:
    """How far a purge has come. Each name is in one of the lists."""

    generation: int
    confirmed: tuple[str, ...]
    pending: tuple[str, ...]
    """Live replicas that haven't confirmed, be it that the store has lost them: the purge waits for these.

    Also ids that were taken from a process whose lease may still run, whoever has confirmed since.
    """
    unconfirmed: tuple[str, ...]
    """Replicas whose lease is over, and that never confirmed: cut off, they serve the tenant unless it refuses that."""
    replicated: bool | None = None
    """Whether a second copy of the store has the generation; None where there is none, or it wasn't raised now."""

    @property
    def is_complete(self) -> bool:
        """Every live replica has confirmed; ``unconfirmed`` says who was not there to."""
        return not self.pending


class _Obeyed(NamedTuple):
    """The last purge of a tenant that was heard of here, where it was announced, and whether all of it is gone."""

    raised: Raised
    position: int
    is_done: bool


_NEVER = _Obeyed(NEVER, 0, True)


class Tenants:
    """See the module's docstring. ``follow`` by one thread at a time; the rest from any."""

    def __init__(
        self,
        keys: FleetKeys,
        store: Store,
        fingerprint: str,
        tell: Callable[[str, int], None],
        reader: Reader,
    ) -> None:
        """``tell`` hears of each generation that is raised of a tenant met here, before ``on_purge`` does.

        ``reader``: knows how long leases run by this replica's clock.
        """
        self._keys, self._store, self._fingerprint, self._tell = keys, store, fingerprint, tell
        self._reader = reader
        self._limits = Limits(keys, store)
        self._names: OrderedDict[bytes, str] = OrderedDict()
        self._meeting = threading.Lock()
        self._generations: OrderedDict[bytes, _Obeyed] = OrderedDict()
        self._unchecked: list[bytes] = []
        self._wanted: dict[str, int] = {}
        self._grants: dict[str, Grant] = {}
        self._cursor = 0
        self.on_purge: OnPurge | None = None
        self.resident: Resident | None = None

    @property
    def num_bytes(self) -> int:
        """What all of this takes, roughly."""
        num_items = len(self._names) + len(self._generations) + len(self._wanted) + len(self._grants)
        return (num_items + len(self._limits)) * _ITEM_BYTES

    def generation(self, tenant: str) -> int:
        """The generation of a tenant as known here; local."""
        return self.raised(tenant).generation

    def raised(self, tenant: str) -> Raised:
        """The last purge of a tenant that was heard of here; local."""
        return self._generations.get(self._keys.tenant(tenant), _NEVER).raised

    def first_met(self, tenant: str) -> int:
        """The generation of a tenant that has something here now; local."""
        self.meet([tenant])
        return self.generation(tenant)

    def meet(self, tenants: Iterable[str]) -> None:
        """These tenants have, or may come to have, something here."""
        named = [(self._keys.tenant(tenant), tenant) for tenant in tenants]
        with self._meeting:
            for digest, tenant in named:
                self._names[digest] = tenant
                self._names.move_to_end(digest)
            while len(self._names) > _MAX_NAMES:
                self._names.popitem(last=False)

    def granted(self, tenant: str) -> Grant | None:
        """What was granted last; local."""
        return self._grants.get(tenant)

    def set_limit(self, tenant: str, blocks: int | None) -> Durable:
        """The tenant's limit over the fleet. Raises ArgumentError, StoreUnavailable."""
        check_tenant(tenant)
        if blocks is not None:
            _check_blocks(blocks)
        self.meet([tenant])
        return self._limits.state(self._keys.tenant(tenant), blocks)

    def limits(self) -> dict[str, int]:
        """The limits over the fleet of tenants met here, as known here. Local; O(limits)."""
        known = [(self._names.get(digest), each.blocks) for digest, each in self._limits.known().items()]
        return {tenant: blocks for tenant, blocks in known if tenant is not None and blocks is not None}

    def reserve(self, writer: Writer, tenant: str, blocks: int, keep_s: float) -> Grant:
        """State how many blocks this replica wants to hold. Raises ArgumentError, CapacityError, StoreUnavailable.

        CapacityError: 4,096 other tenants hold a share here.
        """
        check_tenant(tenant)
        _check_blocks(blocks)
        if tenant not in self._wanted and len(self._wanted) >= _MAX_SHARES:
            raise CapacityError(
                f"{_MAX_SHARES} tenants hold a share here, which is the most that a replica keeps"
            )
        grant = self._reserve(writer, tenant, blocks, keep_s)
        if blocks:
            self._wanted[tenant], self._grants[tenant] = blocks, grant
        else:
            self._wanted.pop(tenant, None)
            self._grants.pop(tenant, None)
        return grant

    def restate(self, writer: Writer, keep_s: float) -> None:
        """State every share again. Raises StoreUnavailable."""
        for tenant, blocks in list(self._wanted.items()):
            self._grants[tenant] = self._reserve(writer, tenant, blocks, keep_s)

    def follow(self, writer: Writer, *, is_new: bool, raised: Mapping[bytes, Raised] = _NONE) -> None:
        """Purge what was raised since the last time, and confirm it; ``is_new``: under this epoch nothing was.

        ``raised``: what the store had before, announced or not.
        """
        announced = self._store.purges(0 if is_new else self._cursor)
        if is_new:
            self._cursor = 0
        positions = {digest: self._generations.get(digest, _NEVER).position for digest in raised}
        standing = self._standing([*(positions | dict(announced))])
        here = self._here() if standing else {}
        for digest, position in announced:
            tenant = here.get(digest) or self._names.get(digest)
            self._obey(writer, digest, tenant, standing[digest], position)
            self._cursor = position  # smaller than before where the store has lost what it announced
        for digest, position in positions.items():
            known = self._generations.get(digest, _NEVER)
            if known.raised != standing[digest] or not known.is_done:
                tenant = here.get(digest) or self._names.get(digest)
                self._obey(writer, digest, tenant, standing[digest], position)

    def raise_generation(self, tenant: str) -> Durable:
        """Purge a tenant in the whole fleet; ``follow_own`` comes next.

        Raises ArgumentError, StoreUnavailable; may be repeated then.
        """
        check_tenant(tenant)
        digest = self._keys.tenant(tenant)
        self.meet([tenant])
        above = max(self._store.tenant(digest).generation, self.generation(tenant))
        return self._store.raise_generation(digest, above, new_token())

    def follow_own(self, writer: Writer, tenant: str, written: Durable) -> None:
        """``follow``, and what was raised here a moment ago is obeyed. Raises StoreUnavailable.

        StoreUnavailable too if the store has lost it meanwhile, so that nobody would ever hear of it.
        """
        raised = Raised(written.value, written.token)
        self.follow(writer, is_new=False, raised={self._keys.tenant(tenant): raised})
        if self.generation(tenant) < raised.generation:
            raise StoreUnavailable("the store does not keep what is written to it")

    def report(self, tenant: str, living: Iterable[str] = (), replicated: bool | None = None) -> Purge:
        """How far the last purge has come. An id that was taken over hasn't confirmed while who had it may serve.

        ``living``: whose lease runs by the clock of this replica, it among them; these are waited for, whatever the
        store says of them. Raises StoreUnavailable.
        """
        check_tenant(tenant)
        alive = set(living)
        facts = self._store.tenant(self._keys.tenant(tenant))
        generation = max(facts.generation, self.generation(tenant))
        is_kept = facts.generation == generation  # otherwise the store has lost it, and who confirmed
        confirmed = facts.confirmed if is_kept and facts.raised.token else {}
        lists: dict[str, list[str]] = {"confirmed": [], "pending": [], "unconfirmed": []}
        fetched = self._store.fetch()
        replaced = self._reader.replaced(fetched.seen) if generation else set()
        lists["pending"] += fetched.unread
        for seen in fetched.seen:
            name, nonce = seen.registration.replica_id, seen.registration.nonce
            if (confirmed.get(name) == nonce and name not in replaced) or generation == 0:
                lists["confirmed"].append(name)
            else:
                may_serve = name in alive | replaced or self._reader.remaining_s(seen) > 0
                lists["pending" if may_serve else "unconfirmed"].append(name)
        epochs = {seen.registration.replica_id: seen.registration.epoch for seen in fetched.seen}
        for name in self._reader.forgotten(epochs).difference(fetched.unread):
            for names in lists.values():
                names[:] = [each for each in names if each != name]
            lists["pending"].append(name)
        unlisted = (alive | replaced) - epochs.keys() - set(fetched.unread) - set(lists["pending"])
        lists["pending"] += [name for name in unlisted if generation]
        sorted_lists = {kind: tuple(sorted(found)) for kind, found in lists.items()}
        return Purge(generation, **sorted_lists, replicated=replicated)

    def restore(self, writer: Writer, *, everything: bool) -> dict[bytes, Raised]:
        """Give generations and limits that are known here back to a store that has lost them: all, or 256 in turn.

        All of them where a replica has come that may not know them. In turn, since a store may go back to what it had
        a while ago, or lose one shard, with every registration still in it. Where it has lost that they were confirmed
        here, that is said again. Limits that others stated are taken.

        Returns those generations that the store has and nobody has told here, of tenants that were met too: who raised
        one may have died before it was announced, and a position or a number that a store has lost may be given again.
        Raises StoreUnavailable.
        """
        taken = self._in_turn()
        if everything:
            taken = list({*taken, *self._generations, *self._limits.known()})
        known = {digest: self._generations.get(digest, _NEVER) for digest in taken}
        positions = {digest: obeyed.position for digest, obeyed in known.items() if obeyed.raised.generation}
        unannounced = self._store.unannounced(positions) if positions else set()
        news = {}
        found = self._store.look_at(taken, writer.replica_id) if taken else ()
        for (digest, mine), looked in zip(known.items(), found, strict=True):
            if looked is None:
                continue
            raised, nonce, limit = looked
            self._limits.compare(digest, limit)
            if raised.generation < mine.raised.generation or digest in unannounced:
                token = new_token(mine.raised.purge)
                self._store.raise_generation(digest, mine.raised.generation - 1, token)
            elif raised != mine.raised or not mine.is_done:
                news[digest] = raised
            elif nonce != writer.nonce and raised.generation:
                self._store.confirm(digest, writer, raised)
        return news

    def _in_turn(self) -> list[bytes]:
        """The next 256 of those that were met or purged."""
        if not self._unchecked:
            with self._meeting:
                self._unchecked = list(self._names.keys() | self._generations.keys())
        taken = self._unchecked[-_CHECKED_A_BEAT:]
        del self._unchecked[-_CHECKED_A_BEAT:]
        return taken

    def _standing(self, digests: Sequence[bytes]) -> dict[bytes, Raised]:
        """What there is to obey of each.

        Where the store has lost its generations, a smaller number than is known may stand for a later purge, and so may
        none, which is raised then, as is one without a token. Raises StoreUnavailable if one can't be read.
        """
        found = {}
        for digest, looked in zip(digests, self._store.look_at(digests) if digests else (), strict=True):
            if looked is None:
                raise StoreUnavailable("a tenant's generation can't be read: its shard is away")
            raised, known = looked.raised, self._generations.get(digest, _NEVER).raised
            if raised.generation < known.generation or not raised.token:
                above = max(raised.generation, known.generation)
                written = self._store.raise_generation(digest, above, new_token())
                raised = Raised(written.value, written.token)
            found[digest] = raised
        return found

    def _here(self) -> dict[bytes, str]:
        """Who has something here. Asked once it is known what is to be obeyed: what comes after that is younger."""
        resident = () if self.resident is None else self.resident.tenants()
        return {self._keys.tenant(tenant): tenant for tenant in resident}

    def _obey(self, writer: Writer, digest: bytes, tenant: str | None, raised: Raised, position: int) -> None:
        """Purge what was raised and announced there, and confirm it; ``tenant`` None: it has nothing here.

        Also what was purged already: that may be the last purge given back to a store that had lost it, or another one.
        """
        self._generations[digest] = obeyed = _Obeyed(raised, position, False)
        self._generations.move_to_end(digest)
        if len(self._generations) > MAX_PURGES:
            self._generations.popitem(last=False)
        if tenant is not None:
            self._tell(tenant, raised.generation)
            if self.on_purge is None:
                return
            self.on_purge(tenant, raised.generation)
        self._generations[digest] = obeyed._replace(is_done=True)
        self._store.confirm(digest, writer, raised)

    def _reserve(self, writer: Writer, tenant: str, blocks: int, keep_s: float) -> Grant:
        share = Share(*writer, self._fingerprint, blocks)
        grant = self._store.reserve(self._keys.tenant(tenant), share, keep_s)
        if grant.verdict == "FENCED":
            raise StaleEpoch(f"replica {writer.replica_id} is fenced: a younger process holds its share")
        return grant


def _check_blocks(blocks: object) -> None:
    if not isinstance(blocks, int) or isinstance(blocks, bool) or not 0 <= blocks <= _MAX_BLOCKS:
        raise ArgumentError("blocks", blocks, f"an integer from 0 to {_MAX_BLOCKS}")
