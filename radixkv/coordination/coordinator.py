"""The coordinator of one replica: what it promises, and how to call it.

    coordinator = connect(url, replica_id="a", fleet_secret=secret, address="http://127.0.0.1:8400",
                          fingerprint=engine.fingerprint, block_size=16, lease_s=10.0)
    cache = PrefixCache(config, journal=coordinator.journal)     # None where nobody could listen
    coordinator.attach(cache)                                    # where a lost journal is rebuilt from
    coordinator.register()              # ConfigError: the fleet differs; a store that is down: see health()
    coordinator.info()                  # ReplicaInfo of this process (.epoch 0 until registered)
    coordinator.health()                # Health: .state, .reason, counters; never touches the store
    coordinator.replicas()              # ReplicaInfo of all that are known, this one first; local, quick
    coordinator.peers()                 # only those a request may be sent to (live, proven, compatible)
    coordinator.hints(ns, token_ids)    # [Hint(replica, num_tokens)], longest first; local, quick
    coordinator.report_load(Load(...))  # goes out with the next beat
    job = coordinator.create_job(ns, num_tokens, ["a", "b"])     # StoreUnavailable
    coordinator.report_job(job.id, "running", 512)               # this replica's part; StoreUnavailable
    coordinator.job(job.id, tenant)     # WarmJob | None (also for another tenant's); StoreUnavailable
    coordinator.leave(); coordinator.close()                     # close() leaves by itself, ends the threads

    headers = sign_request(secret, method="POST", path="/v1/warm", tenant="acme", body=body,
                           audience=peer.audience, timestamp_s=time.time())
    tenant = verifier.verify(request.headers, method="POST", path="/v1/warm", body=body,
                             audience=coordinator.info().audience)     # verifier = RequestVerifier(secret)

What concerns the registration is in ``replica.py``, jobs in ``jobs.py``, pins in ``pins.py``, the rest here. The
store is chosen by the subclass: ``memory_coordinator.py``, ``redis_coordinator.py``.

Rules that hold over every store:

1. A replica is the only writer of its own facts: what it holds, its load, its part of a job.
2. What is known of another replica is a hint. It may be forgotten at any time, and never persistently wrong.
3. A registration has an epoch, greater than all before it of the same id. Entries of an older epoch count
   for nothing, and a replica that still writes with one is fenced: StaleEpoch, and nothing more is written. It takes
   its id again once no other process has held a lease of it for two leases: the registration that fenced it then came
   from a process that was gone.
4. A replica that stops beating leaves every view within its lease. Liveness is compared when it is read.
5. No token id, tenant name or KV byte reaches the store: digests of ``keys.py`` do.
6. An address counts only with the proof of a beat that is no older than its lease and 30 s of skew; a purge and its
   confirmation count only with theirs. A writer to the store without the fleet secret can neither attract requests
   nor purge a tenant nor confirm a purge.

With the store gone everything local goes on; the views of others run out with their leases.
"""

from __future__ import annotations

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
    """See the module's docstring. Every method may be called from any thread.

    Each raises ArgumentError, and changes nothing, for an argument of another type or range; a job or a pin of an id
    that none can have is one that isn't there.
    """

    def hints(self, namespace: Namespace, token_ids: tokens.TokenIds) -> list[Hint]:
        """Which reachable others hold how much of the prefix: longest first, then by id; local.

        Counts whole segments of ``SEGMENT_TOKENS`` tokens; those that hold none are left out.
        O(segments × replicas), and a digest a segment.
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

    # ---- tenants of the fleet

    def purge(self, tenant: str) -> Purge:
        """Forget a tenant in the whole fleet: raise its generation, apply that, report who has confirmed.

        Repeat after StoreUnavailable; UnreadableRecord is one: what stood in the store of the tenant's generation was
        no replica's writing, and was replaced. Raises StaleEpoch, ArgumentError.
        """
        with self._writing, self._storing():
            self._require_registration()
            raising = self.purges.raise_purge(self._writer, tenant)
            self._num_unreplicated += raising.replicated is False
            self.purges.apply_own(self._writer, tenant, raising.raised)
            if raising.was_unreadable:
                raise UnreadableRecord(
                    f"the generation of tenant {self.keys.tenant(tenant).hex()} in the store couldn't be read: "
                    f"{raising.raised.generation} takes its place; purge the tenant again"
                )
            return self._reported(tenant, raising.replicated)

    def apply_purge(self, tenant: str, raised: Raised) -> None:
        """Apply and confirm a raise that another replica sent, even if the store doesn't have it.

        Raises ArgumentError unless its proof is right, StaleEpoch or StoreUnavailable once it is applied.
        """
        with self._writing, self._storing():
            self._require_registration()
            self.purges.apply_purge(self._writer, tenant, raised)

    def apply_purges(self) -> None:
        """Apply and confirm what was purged elsewhere, now. Raises StaleEpoch or StoreUnavailable."""
        with self._writing, self._storing():
            self._require_registration()
            self.purges.apply_purges(self._writer)

    def purge_report(self, tenant: str) -> Purge:
        """How far the tenant's last purge has come. Raises StoreUnavailable, UnreadableRecord."""
        return self._reported(tenant)

    def _reported(self, tenant: str, replicated: bool | None = None) -> Purge:
        """A replica that a store has forgotten is waited for, as long as its lease runs by what was read of it."""
        known = [info.id for info in self.replicas() if info.live]
        return self.purges.report(tenant, known, replicated)

    def set_limit(self, tenant: str, blocks: int | None) -> Durable:
        """The tenant's limit over all replicas, in blocks; None: none. Raises ArgumentError, StoreUnavailable.

        Every replica that has met the tenant knows it within a beat or two (256 tenants a beat), and tells a store
        that has lost it.
        """
        check_limit(tenant, blocks)
        self.purges.meet([tenant])
        return self._counted(self.quotas.set_limit(tenant, blocks))

    def limits(self) -> dict[str, int]:
        """The limits over all replicas of tenants met here, whoever was told; as known here. Local; O(limits)."""
        known = [
            (self.purges.name(digest), each.blocks) for digest, each in self.quotas.limits.known().items()
        ]
        return {tenant: blocks for tenant, blocks in known if tenant is not None and blocks is not None}

    def reserve(self, tenant: str, blocks: int) -> Grant:
        """State how many blocks this replica wants to hold of a tenant's quota; ``.blocks`` of them are granted.

        Stated again with each beat; it counts for a lease. While the store is away the last grant holds.
        Raises ArgumentError, CapacityError, StaleEpoch, StoreUnavailable.
        """
        with self._writing, self._storing():
            self._require_registration()
            return self.quotas.reserve(self._writer, tenant, blocks, self.settings.lease_s)
