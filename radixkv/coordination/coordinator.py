"""The coordinator of one replica: its guarantees, and how to call it.

    coordinator = connect(url, replica_id="a", fleet_secret=secret, address="http://127.0.0.1:8400",
                          fingerprint=engine.fingerprint, block_size=16, lease_s=10.0)
    cache = PrefixCache(config, journal=coordinator.journal)     # None if no other replica could read it
    coordinator.attach(cache)                                    # source for rebuilding a lost journal
    coordinator.register()              # ConfigError: the fleet differs; a store that is down: see health()
    coordinator.info()                  # ReplicaInfo of this process (.epoch 0 until registered)
    coordinator.health()                # Health: .state, .reason, counters; never touches the store
    coordinator.replicas()              # ReplicaInfo of all known replicas, this one first; local, quick
    coordinator.peers()                 # those that prompts may be sent to: live, proven, compatible, not draining
    coordinator.hints(ns, token_ids)    # [Hint(replica, num_tokens)], longest first; local, quick
    coordinator.report_load(Load(...))  # goes out with the next beat
    job = coordinator.create_job(ns, num_tokens, ["a", "b"])     # StoreUnavailable
    coordinator.report_job(job.id, "running", 512)               # this replica's part; StoreUnavailable
    coordinator.job(job.id, tenant)     # WarmJob | None (also for another tenant's); StoreUnavailable
    coordinator.drain()                 # no new prompts; still beats, and obeys purges
    coordinator.leave(); coordinator.close()                     # close() also leaves, and ends the threads

    headers = sign_request(secret, method="POST", path="/v1/warm", tenant="acme", body=body,
                           audience=peer.audience, timestamp_s=time.time())
    tenant = verifier.verify(request.headers, method="POST", path="/v1/warm", body=body,
                             audience=coordinator.info().audience)     # verifier = RequestVerifier(secret)

``replica.py`` has the registration, ``jobs.py`` warm jobs, ``pins.py`` pins; the rest is here. The subclass chooses
the store: ``memory_coordinator.py``, ``redis_coordinator.py``.

Rules that hold over every store:

1. A replica is the only writer of its own facts: what it holds, its load, its part of a job.
2. Knowledge of another replica is a hint. It may be forgotten at any time. It is never wrong for good.
3. A registration has an epoch, greater than all earlier epochs of the same id. Entries of an older epoch are ignored.
   A replica that still writes with an older epoch is fenced: it gets StaleEpoch and writes nothing more. A fenced
   replica takes its id back once no other process has held a lease of the id for two leases. The process that
   fenced it was then already gone.
4. A replica that stops beating leaves every view within its lease. Liveness is checked at each read.
5. No token id, tenant name or KV byte reaches the store. The store sees only the digests of ``keys.py``.
6. An address counts only with the proof of a beat that is no older than its lease plus 30 s of clock skew. A purge
   and its confirmation count only with their proofs. A writer to the store without the fleet secret can't attract
   requests, purge a tenant or confirm a purge.

While the store is unreachable, all local work continues. What is known of the others expires with their leases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from radixkv.coordination.jobs import JobRecords
from radixkv.coordination.pins import PinRecords
from radixkv.coordination.purges import Purge
from radixkv.coordination.quotas import check_limit
from radixkv.coordination.store.protocol import Durable, Grant
from radixkv.coordination.store.wire import Raised
from radixkv.coordination.validation import check_namespace
from radixkv.coordination.values import Hint
from radixkv.errors import UnreadableRecord
from radixkv.index import tokens

if TYPE_CHECKING:
    from radixkv.config import Namespace


class Coordinator(JobRecords, PinRecords):
    """Coordinator of one replica; see the module's docstring. Every method may be called from any thread.

    Every method raises ArgumentError, and changes nothing, for an argument of a wrong type or range. A malformed id of
    a job or a pin is treated as an unknown one.
    """

    def hints(self, namespace: Namespace, token_ids: tokens.TokenIds) -> list[Hint]:
        """Return the other reachable replicas that hold a part of the prefix: longest first, then by id; local.

        Counts whole segments of ``SEGMENT_TOKENS`` tokens, and leaves out replicas that hold none.
        O(segments × replicas), plus one digest a segment.
        """
        check_namespace(namespace)
        key = tokens.encode(token_ids)
        holders = [known for known in self._others() if known.column is not None and known.info.reachable]
        if not holders:
            return []
        generation = self.purges.generation(namespace.tenant)
        digests = self.keys.digests(namespace, key, generation=generation)
        held = self.reader.view.leading(b"".join(digests)).counts().sum(axis=1) * self._publisher.grain_tokens
        found = [Hint(known.info, int(held[known.column])) for known in holders if held[known.column] > 0]
        return sorted(found, key=lambda hint: (-hint.num_tokens, hint.replica.id))

    # ---- notes of a disk's folder

    def disk_notes(self, folder: bytes, tags: Sequence[bytes]) -> list[bytes | None]:
        """Return what the folder of a disk noted under these tags last. Raises StoreUnavailable."""
        return self.store.notes(folder, tags)

    def note_disk(self, folder: bytes, notes: Mapping[bytes, bytes]) -> int:
        """Keep notes of the folder of a disk; return how many have no room. Raises StoreUnavailable.

        The folder reads them when it is opened again, perhaps as an older copy of itself.
        """
        return self._counted(self.store.keep_notes(folder, notes)).value

    # ---- tenants of the fleet

    def purge(self, tenant: str) -> Purge:
        """Forget a tenant in the whole fleet: raise its generation, apply that here, report which replicas have
        confirmed.

        Call it again after StoreUnavailable or UnreadableRecord. UnreadableRecord is a kind of StoreUnavailable: the
        store held a generation of this tenant that no replica wrote, and it was replaced. Raises StaleEpoch,
        ArgumentError.
        """
        with self._writing, self._storing():
            self._require_registration()
            raising = self.purges.raise_purge(self._writer, tenant)
            self._num_unreplicated += raising.replicated is False
            self.purges.apply_own(self._writer, tenant, raising.raised)
            if raising.was_unreadable:
                raise UnreadableRecord(
                    f"the generation of tenant {self.keys.tenant(tenant).hex()} in the store couldn't be read: "
                    f"{raising.raised.generation} replaces it; purge the tenant again"
                )
            return self._reported(tenant, raising.replicated)

    def apply_purge(self, tenant: str, raised: Raised) -> None:
        """Apply and confirm a raise that another replica sent, even if the store doesn't have it.

        Raises ArgumentError if its proof is wrong. Raises StaleEpoch or StoreUnavailable only after it is applied.
        """
        with self._writing, self._storing():
            self._require_registration()
            self.purges.apply_purge(self._writer, tenant, raised)

    def apply_purges(self) -> None:
        """Apply and confirm now what other replicas purged. Raises StaleEpoch or StoreUnavailable."""
        with self._writing, self._storing():
            self._require_registration()
            self.purges.apply_purges(self._writer)

    def purge_report(self, tenant: str) -> Purge:
        """Return the progress of the tenant's last purge. Raises StoreUnavailable, UnreadableRecord, StaleEpoch.

        It is confirmed first, if that had to wait for what the tenant was ``owed`` here.
        """
        if self.purges.is_late(tenant):
            with self._writing, self._storing():
                self._require_registration()
                self.purges.confirm_late(self._writer, tenant)
        return self._reported(tenant)

    def _reported(self, tenant: str, replicated: bool | None = None) -> Purge:
        """Report on the last purge.

        A replica that the store has forgotten counts until its last known lease is over.
        """
        known = [info.id for info in self.replicas() if info.live]
        return self.purges.report(tenant, known, replicated)

    def set_limit(self, tenant: str, blocks: int | None) -> Durable:
        """Set the tenant's limit over all replicas, in blocks; None removes it. Raises ArgumentError, StoreUnavailable.

        Every replica that has met the tenant learns the limit within a beat or two (256 tenants a beat). If the store
        loses the limit, such a replica writes it again.
        """
        check_limit(tenant, blocks)
        self.purges.meet([tenant])
        return self._counted(self.quotas.set_limit(tenant, blocks))

    def limits(self) -> dict[str, int]:
        """Return the limits over all replicas, of tenants met here, as known here. Local; O(limits).

        Limits that were set on another replica are included.
        """
        known = [
            (self.purges.name(digest), each.blocks) for digest, each in self.quotas.limits.known().items()
        ]
        return {tenant: blocks for tenant, blocks in known if tenant is not None and blocks is not None}

    def reserve(self, tenant: str, blocks: int) -> Grant:
        """Request blocks of a tenant's quota for this replica; ``.blocks`` of them are granted.

        The request is repeated with each beat; a grant lasts one lease. While the store is unreachable the last grant
        stays valid. Raises ArgumentError, CapacityError, StaleEpoch, StoreUnavailable.
        """
        with self._writing, self._storing():
            self._require_registration()
            return self.quotas.reserve(self._writer, tenant, blocks, self.lease_s)
