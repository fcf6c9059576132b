"""Generations of tenants: how a purge is raised in the store, applied here and confirmed.

    raise_purge     an operator's call on one replica: raises the tenant's generation in the store, announces it to all
    apply_purges    on every replica: forgets here what the store has raised since, and confirms it
    apply_purge     the same for one raise that another replica sent, whether or not the store has it
    report          which replicas have confirmed the last raise

A replica confirms one specific raise, identified by its token, for its own registration. Namespace digests depend on
the generation, so records that other replicas still publish under an older generation never match. If the store loses
a raise, any replica that has applied it writes it again (``restore``). Until then no purge of that tenant is complete.

A raise and a confirmation count only with their proof (``proofs.py``), so a writer to the store without the fleet
secret can make neither. A store that lost a raise may reuse its number. The token distinguishes the two raises: its
first half names the purge and begins with the purge's time, its second half names the raise. The raise in the store is
compared with the last raise that was applied here (``Raised.relation``):

    later                  apply and confirm it
    same                   already applied: only confirm it, because another replica may have written it again
    earlier, or nothing    lost, or put back by an outsider: write the known one again
    apart                  the two are unordered, so it is unknown which one all replicas applied: raise another purge

A purge may be applied here while something is left to do, because a disk failed. It is confirmed when that is done:
with a later beat, or when its progress is asked.

An announcement only says where to look. If the record in a raise's place can't be read (``UnreadableRecord``), that
tenant's purge and ``report`` fail. The record is logged with the tenant's digest, and the next raise replaces it.

Bounds: 65,536 purged tenants and as many names of tenants met here, about 200 bytes each (``num_bytes``). The cache
itself lists the tenants that it holds, so no purge depends on names that were forgotten here.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.proofs import Proofs
from radixkv.coordination.quotas import Limits
from radixkv.coordination.store.protocol import MAX_PURGES, Looked, Store, TenantFacts
from radixkv.coordination.store.wire import NEVER, NOTHING, Raised, new_token
from radixkv.coordination.validation import check_tenant
from radixkv.coordination.values import Resident, Writer
from radixkv.coordination.view.reader import Reader
from radixkv.errors import ArgumentError, StoreUnavailable, UnreadableRecord

log = logging.getLogger("radixkv.coordination")

OnPurge = Callable[[str, Raised], None]
"""Called with a tenant and the raise of its generation. Returns when nothing of the tenant can be matched here."""

_MAX_NAMES = 65_536
_ITEM_BYTES = 200
_CHECKED_A_BEAT = 256
_TRIES = 8
"""Each failed try means that another replica raised the generation at the same moment."""
_MAX_TOLD = 1_024
_NONE: Final[Mapping[bytes, Raised]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Purge:
    """Progress of a purge. Each replica's name is in one of the lists."""

    generation: int
    confirmed: tuple[str, ...]
    pending: tuple[str, ...]
    """Live replicas that haven't confirmed, even if the store has lost them. The purge waits for these.

    Also ids that were taken over from a process whose lease may still run, even if the new process has confirmed.
    """
    unconfirmed: tuple[str, ...]
    """Replicas whose lease is over without a confirmation.

    While cut off they serve the tenant, unless it forbids that.
    """
    replicated: bool | None = None
    """Whether a second copy of the store has the generation; None if there is no second copy, or this call didn't
    raise it."""

    @property
    def is_complete(self) -> bool:
        """Whether every live replica has confirmed; ``unconfirmed`` lists the replicas that were absent."""
        return not self.pending


class Raising(NamedTuple):
    """A raise that was just written. ``replicated``: see ``Durable``.

    ``was_unreadable``: it replaced a record that no replica wrote, so a greater number may have been lost.
    """

    raised: Raised
    replicated: bool | None
    was_unreadable: bool


class _Applied(NamedTuple):
    """The last purge of a tenant that is known here, the position of its announcement, and whether all of it is
    gone here."""

    raised: Raised
    position: int
    is_done: bool


_NOTHING_APPLIED = _Applied(NEVER, 0, True)


class Purges:
    """Purges of all tenants, as known to one replica; see the module's docstring.

    ``apply_purges`` and ``restore`` may be called by one thread at a time, the rest from any thread.
    """

    def __init__(
        self,
        keys: FleetKeys,
        store: Store,
        reader: Reader,
        limits: Limits,
        on_raise: Callable[[str, int], None],
    ) -> None:
        """``reader``: knows how long leases run by this replica's clock.

        ``limits``: checked together with the generations.

        ``on_raise``: called with each new generation of a tenant met here, before ``on_purge`` is.
        """
        self._keys, self._store, self._reader, self._limits = keys, store, reader, limits
        self._on_raise = on_raise
        self._proofs = Proofs(keys)
        self._unreadable: set[bytes] = set()
        self._names: OrderedDict[bytes, str] = OrderedDict()
        self._meeting = threading.Lock()
        self._applied: OrderedDict[bytes, _Applied] = OrderedDict()
        self._unchecked: list[bytes] = []
        self._cursor = 0
        self._late: set[bytes] = set()
        self.on_purge: OnPurge | None = None
        self.owed: Callable[[], Collection[str]] = tuple
        """Returns tenants of whose purge something is left to do here."""
        self.owes_removed: Callable[[], bool] = bool
        """Returns whether something may be left here of tenants that weren't met: no purge of theirs is confirmed."""
        self.resident: Resident | None = None

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of all records kept here."""
        return (len(self._names) + len(self._applied)) * _ITEM_BYTES

    def generation(self, tenant: str) -> int:
        """Return the generation of a tenant as known here; local."""
        return self.raised(tenant).generation

    def applied(self, tenant: str) -> int | None:
        """Return the number of a tenant's last purge, 0 before the first; None until it is applied here. Local."""
        last = self._last(self._keys.tenant(tenant))
        return last.raised.number if last.is_done else None

    def raised(self, tenant: str) -> Raised:
        """Return the last raise of a tenant that is known here; local."""
        return self._last(self._keys.tenant(tenant)).raised

    def name(self, digest: bytes) -> str | None:
        """Return the name of a tenant, if it was met here; local."""
        return self._names.get(digest)

    def first_met(self, tenant: str) -> int:
        """Return the generation of a tenant that has something here from now on; local."""
        self.meet([tenant])
        return self.generation(tenant)

    def meet(self, tenants: Iterable[str]) -> None:
        """Remember tenants that hold, or may come to hold, something here."""
        named = [(self._keys.tenant(tenant), tenant) for tenant in tenants]
        with self._meeting:
            for digest, tenant in named:
                self._names[digest] = tenant
                self._names.move_to_end(digest)
            while len(self._names) > _MAX_NAMES:
                self._names.popitem(last=False)

    def raise_purge(self, writer: Writer, tenant: str) -> Raising:
        """Raise a tenant's generation in the store, to purge it in the whole fleet; call ``apply_purges`` next.

        Raises ArgumentError, StoreUnavailable; after StoreUnavailable it may be repeated.
        """
        check_tenant(tenant)
        digest = self._keys.tenant(tenant)
        self.meet([tenant])
        for _ in range(_TRIES):
            (looked,) = self._store.look_at([digest])
            if looked is None:
                raise _shard_is_away()
            stands = self._proven(digest, looked)
            above = max(stands.generation, self.generation(tenant))
            token = new_token(after=[stands, self.raised(tenant)])
            raised = self._signed(writer, digest, above + 1, token)
            written = self._store.raise_generation(digest, raised, looked.standing)
            if written.value:
                return Raising(raised, written.replicated, self._is_unreadable(looked, stands))
        raise StoreUnavailable("other replicas keep purging this tenant; try again")

    def apply_purges(
        self, writer: Writer, *, is_new: bool = False, raised: Mapping[bytes, Raised] = _NONE
    ) -> None:
        """Apply and confirm what was raised since the last call; ``is_new``: nothing was confirmed under this epoch
        yet. Confirm late purges too.

        ``raised``: raises that the store had before, announced or not. Raises StoreUnavailable.
        """
        announced = self._store.purges(0 if is_new else self._cursor)
        if is_new:
            self._cursor = 0
        positions = {digest: self._last(digest).position for digest in raised}
        found = self._raised_in_store(writer, [*(positions | dict(announced))])
        here = self._here() if found else {}
        for digest, position in announced:
            if digest in found:
                tenant = here.get(digest) or self.name(digest)
                self._apply(writer, digest, tenant, found[digest], position)
            self._cursor = position  # smaller than before if the store has lost announcements
        for digest, position in positions.items():
            known = self._last(digest)
            if digest in found and (known.raised != found[digest] or not known.is_done):
                tenant = here.get(digest) or self.name(digest)
                self._apply(writer, digest, tenant, found[digest], position)
        for digest in self._late.copy():
            self._confirm_late(writer, digest)

    def apply_own(self, writer: Writer, tenant: str, raised: Raised) -> None:
        """Apply a raise right after ``raise_purge``. Raises StoreUnavailable.

        It also raises StoreUnavailable if the store has already lost the raise: no other replica would ever learn of
        it.
        """
        self.apply_purges(writer, raised={self._keys.tenant(tenant): raised})
        if self.raised(tenant).relation(raised) not in ("same", "later"):
            raise StoreUnavailable("the store loses what is written to it")

    def apply_purge(self, writer: Writer, tenant: str, raised: Raised) -> None:
        """Apply and confirm a raise that another replica sent, whatever the store says. An earlier raise is ignored.

        A raise made without knowledge of the last one applied here is applied too; ``apply_purges`` then resolves the
        two.

        Raises ArgumentError if its proof is wrong. Raises StoreUnavailable if it is applied but can't be confirmed.
        """
        check_tenant(tenant)
        digest = self._keys.tenant(tenant)
        if not self._proofs.is_raise(digest, raised):
            raise ArgumentError("raised", raised.generation, "a raise of the generation with its proof")
        known = self._last(digest)
        relation = raised.relation(known.raised)
        if relation == "later" or (relation == "same" and not known.is_done):
            self.meet([tenant])
            self._apply(writer, digest, tenant, raised, known.position)
        elif relation == "apart" and self.on_purge is not None:
            self.on_purge(tenant, raised)

    def is_late(self, tenant: str) -> bool:
        """Whether a purge is applied here, and its confirmation waits for what the tenant was ``owed``. Local.

        Raises ArgumentError.
        """
        check_tenant(tenant)
        return self._keys.tenant(tenant) in self._late

    def confirm_late(self, writer: Writer, tenant: str) -> None:
        """Confirm a purge that ``is_late``, if nothing is left to do for it. Raises StoreUnavailable."""
        self._confirm_late(writer, self._keys.tenant(tenant))

    def _confirm_late(self, writer: Writer, digest: bytes) -> None:
        known = self._last(digest)
        if known.is_done and known.raised != NEVER:
            self._confirm(writer, digest, known.raised)

    def report(self, tenant: str, living: Iterable[str] = (), replicated: bool | None = None) -> Purge:
        """Return the progress of the last purge.

        An id that was taken over counts as unconfirmed while its previous process may still serve.

        ``living``: replicas whose lease runs by this replica's clock, this one included. The purge waits for them,
        whatever the store says. A registration without its proof may be damaged: the purge waits one lease for it, then
        lists it as ``unconfirmed``. Raises StoreUnavailable, UnreadableRecord.
        """
        check_tenant(tenant)
        alive, digest = set(living), self._keys.tenant(tenant)
        facts, known = self._store.tenant(digest), self.raised(tenant)
        stands = self._proven(digest, facts)
        if self._is_unreadable(facts, stands):
            raise _unreadable(digest)
        generation = max(stands.generation, known.generation)
        is_kept = not self._is_lost(stands, known)  # otherwise the store lost it, with its confirmations
        confirmed = self._confirmed(digest, facts) if is_kept else {}
        lists: dict[str, list[str]] = {"confirmed": [], "pending": [], "unconfirmed": []}
        fetched = self._store.fetch()
        signed, unsigned = self._reader.sorted_out(fetched.seen)
        replaced = self._reader.replaced(signed) if generation else set()
        lists["pending"] += fetched.unread
        for seen in signed:
            name, nonce = seen.registration.replica_id, seen.registration.nonce
            if (confirmed.get(name) == nonce and name not in replaced) or generation == 0:
                lists["confirmed"].append(name)
            else:
                may_serve = name in alive | replaced or self._reader.remaining_s(seen) > 0
                lists["pending" if may_serve else "unconfirmed"].append(name)
        for name, is_waited_for in unsigned.items():
            lists["pending" if generation and (is_waited_for or name in alive) else "unconfirmed"].append(
                name
            )
        epochs = {seen.registration.replica_id: seen.registration.epoch for seen in signed}
        for name in self._reader.forgotten(epochs).difference(fetched.unread):
            for names in lists.values():
                names[:] = [each for each in names if each != name]
            lists["pending"].append(name)
        named = epochs.keys() | unsigned.keys() | set(fetched.unread)
        unlisted = (alive | replaced) - named - set(lists["pending"])
        lists["pending"] += [name for name in unlisted if generation]
        sorted_lists = {kind: tuple(sorted(found)) for kind, found in lists.items()}
        return Purge(generation, **sorted_lists, replicated=replicated)

    def restore(self, writer: Writer, *, everything: bool) -> dict[bytes, Raised]:
        """Write known generations and limits again, if the store has lost them: all of them, or 256 in turn.

        All are checked when a replica has joined that may not know them. Otherwise they are checked in turn, because a
        store may go back to an earlier state, or lose one shard, with all registrations still in it. Lost confirmations
        of this replica are written again. Limits that other replicas set are taken over.

        Returns the raises in the store that weren't applied here, announced or not. Reasons: the replica that raised
        one may have died before the announcement, and a store that lost a position or a number may give it again.
        Raises StoreUnavailable.
        """
        taken = self._in_turn()
        if everything:
            taken = list({*taken, *self._applied, *self._limits.known()})
        known = {digest: self._last(digest) for digest in taken}
        positions = {digest: last.position for digest, last in known.items() if last.raised.generation}
        unannounced = self._store.unannounced(positions) if positions else set()
        news = {}
        found = self._store.look_at(taken, writer.replica_id) if taken else ()
        for (digest, mine), looked in zip(known.items(), found, strict=True):
            if looked is None:
                continue
            self._limits.compare(digest, looked.limit)
            stands = self._proven(digest, looked)
            if self._is_lost(stands, mine.raised):
                self._give_back(writer, digest, looked, stands, mine.raised)
                continue
            if digest in unannounced:
                self._store.announce(digest)
            if stands != mine.raised or not mine.is_done:
                news[digest] = stands
            elif stands.generation and not self._has_confirmed(writer, digest, looked):
                self._confirm(writer, digest, stands)
        return news

    def _has_confirmed(self, writer: Writer, digest: bytes, looked: Looked) -> bool:
        nonce, proof = looked.confirmed
        is_proof = self._proofs.is_confirmation
        return nonce == writer.nonce and is_proof(proof, digest, looked.raised, writer.replica_id, nonce)

    def _confirmed(self, digest: bytes, facts: TenantFacts) -> dict[str, str]:
        """Return, for each replica that confirmed the current raise with a valid proof, the nonce that it confirmed
        under."""
        is_proof = self._proofs.is_confirmation
        return {
            name: said.nonce
            for name, said in facts.confirmed.items()
            if is_proof(said.proof, digest, facts.raised, name, said.nonce)
        }

    def _proven(self, digest: bytes, found: Looked | TenantFacts) -> Raised:
        """Return the raise in the store, or ``NEVER`` if its proof is invalid; logs a record that is not a raise."""
        if self._proofs.is_raise(digest, found.raised):
            self._unreadable.discard(digest)
            return found.raised
        if found.standing != NOTHING and digest not in self._unreadable:
            if len(self._unreadable) >= _MAX_TOLD:
                self._unreadable.clear()
            self._unreadable.add(digest)
            log.warning(
                "the generation of tenant %s in the store can't be read, or no replica of this wire version raised it: "
                "it is ignored, and the next purge replaces it",
                digest.hex(),
            )
        return NEVER

    def _is_unreadable(self, found: Looked | TenantFacts, stands: Raised) -> bool:
        return stands == NEVER and found.standing != NOTHING

    def _signed(self, writer: Writer, digest: bytes, generation: int, token: str) -> Raised:
        raised = Raised(generation, token, writer.replica_id, writer.nonce)
        return raised._replace(proof=self._proofs.of_raise(digest, raised))

    def _is_lost(self, stands: Raised, known: Raised) -> bool:
        """Whether the store's record shows that ``known`` was lost."""
        return known != NEVER and (stands == NEVER or stands.relation(known) in ("earlier", "apart"))

    def _give_back(
        self, writer: Writer, digest: bytes, looked: Looked, stands: Raised, known: Raised
    ) -> Raised | None:
        """Replace the store's record by what is known here; None if another replica was faster.

        If the two raises are unordered, a new purge replaces both.
        """
        number, token = known.generation, new_token(known.purge)
        if stands != NEVER and stands.relation(known) == "apart":
            number = max(stands.generation, known.generation) + 1
            token = new_token(after=[stands, known])
        raised = self._signed(writer, digest, number, token)
        return raised if self._store.raise_generation(digest, raised, looked.standing).value else None

    def _confirm(self, writer: Writer, digest: bytes, raised: Raised) -> None:
        """Confirm a raise, or note that its confirmation has to wait."""
        if self._is_owed(digest):
            self._late.add(digest)
            return
        self._late.discard(digest)
        proof = self._proofs.of_confirmation(digest, raised, writer.replica_id, writer.nonce)
        self._store.confirm(digest, writer, raised, proof)

    def _is_owed(self, digest: bytes) -> bool:
        owed, name = self.owed(), self.name(digest)
        if self.owes_removed() and (name is None or digest in self._late):
            return True
        return name in owed if name is not None else any(self._keys.tenant(each) == digest for each in owed)

    def _in_turn(self) -> list[bytes]:
        """Return the next 256 of the tenants that were met or purged."""
        if not self._unchecked:
            with self._meeting:
                self._unchecked = list(self._names.keys() | self._applied.keys())
        taken = self._unchecked[-_CHECKED_A_BEAT:]
        del self._unchecked[-_CHECKED_A_BEAT:]
        return taken

    def _raised_in_store(self, writer: Writer, digests: Sequence[bytes]) -> dict[bytes, Raised]:
        """Return the raises to apply; first write back what the store has lost.

        A tenant is left out if it was never raised, or if another replica is raising it now. Raises StoreUnavailable if
        a record can't be read because its shard is away.
        """
        found = {}
        for digest, looked in zip(digests, self._store.look_at(digests) if digests else (), strict=True):
            if looked is None:
                raise _shard_is_away()
            stands, known = self._proven(digest, looked), self._last(digest).raised
            raised: Raised | None = stands
            if self._is_lost(stands, known):
                raised = self._give_back(writer, digest, looked, stands, known)
            if raised is not None and raised.generation:
                found[digest] = raised
        return found

    def _here(self) -> dict[bytes, str]:
        """Return the tenants that have something here.

        Called after the raises are read: later tenants have a later generation.
        """
        resident = () if self.resident is None else self.resident.tenants()
        return {self._keys.tenant(tenant): tenant for tenant in resident}

    def _last(self, digest: bytes) -> _Applied:
        return self._applied.get(digest, _NOTHING_APPLIED)

    def _apply(
        self, writer: Writer, digest: bytes, tenant: str | None, raised: Raised, position: int
    ) -> None:
        """Forget here what a raise purges, and confirm it; ``tenant`` is None if the tenant has nothing here.

        A raise that was applied before is only confirmed, also if it was written again.
        """
        known = self._last(digest)
        is_done = known.is_done and raised.relation(known.raised) == "same"
        self._note(digest, _Applied(raised, position, is_done))
        if not is_done:
            if tenant is not None:
                self._on_raise(tenant, raised.generation)
                if self.on_purge is None:
                    return
                self.on_purge(tenant, raised)
            self._applied[digest] = _Applied(raised, position, is_done=True)
        self._confirm(writer, digest, raised)

    def _note(self, digest: bytes, applied: _Applied) -> None:
        self._applied[digest] = applied
        self._applied.move_to_end(digest)
        if len(self._applied) > MAX_PURGES:
            self._applied.popitem(last=False)


def _shard_is_away() -> StoreUnavailable:
    return StoreUnavailable("a tenant's record can't be read: its shard can't be reached")


def _unreadable(digest: bytes) -> UnreadableRecord:
    return UnreadableRecord(
        f"the generation of tenant {digest.hex()} in the store can't be read: purge the tenant again"
    )
