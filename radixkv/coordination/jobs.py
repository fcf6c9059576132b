"""Warm jobs of several replicas, as records in the store: which replicas warm a prefix, and their progress.

A job has an owner, which drives it, and a part for each replica that was asked. Every replica writes its own part; the
owner writes the parts of replicas that it couldn't reach. When an owner's lease expires, another replica takes the
job. If several try, exactly one gets it. A job without an owner was given up: no further replica will be asked.

    create ──▶ report (each its own part) ──▶ extend (one more) ──▶ … ──▶ end
                   take, hand: another owner        give_up: a part that could not be delivered
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.coordination.replica import Replica
from radixkv.coordination.store.protocol import MAX_PARTS
from radixkv.coordination.store.wire import NEVER
from radixkv.coordination.validation import (
    check_error,
    check_instance,
    check_namespace,
    check_state,
    check_tenant,
    check_text,
    is_job_id,
)
from radixkv.coordination.values import (
    NOBODY,
    JobPart,
    JobState,
    ReplicaInfo,
    WarmJob,
    Writer,
    check_amount,
)
from radixkv.errors import ArgumentError, StoreUnavailable
from radixkv.signing import mac

if TYPE_CHECKING:
    from radixkv.config import Namespace

_DIGEST = re.compile(r"([0-9a-f]{64})?")


class JobRecords(Replica):
    """Operations of a replica on warm jobs."""

    def job_owner(self, tenant: str) -> bytes:
        """Return the 32-byte tag of a tenant's jobs; it changes with each purge of the tenant; local."""
        check_tenant(tenant)
        digest, raised = self.keys.tenant(tenant), self.purges.raised(tenant)
        return digest if raised == NEVER else mac(digest, "jobs", raised.generation, raised.purge)

    def create_job(
        self,
        namespace: Namespace,
        num_tokens: int,
        replica_ids: Sequence[str],
        *,
        job_id: str | None = None,
        num_wanted: int | None = None,
        num_left_out: int = 0,
        request: str = "",
    ) -> WarmJob:
        """Record a warm job with a queued part for each replica; this replica becomes its owner.

        ``job_id`` (32 hex digits, random by default) makes the call idempotent. If the tenant already has a job with
        this id, that job is returned unchanged. This is so even if its ``request`` (a digest, 64 hex digits) differs.
        ``num_wanted``: how many replicas should hold the prefix in the end; 0 if a lost part isn't replaced. Raises
        ArgumentError for a replica that isn't live, StoreUnavailable.
        """
        wanted = 0 if num_wanted is None else num_wanted
        amounts = {"num_tokens": num_tokens, "num_left_out": num_left_out, "num_wanted": wanted}
        for name, value in amounts.items():
            check_amount(name, value)
        check_namespace(namespace)
        if job_id is not None and not is_job_id(job_id):
            raise ArgumentError("job_id", job_id, "32 hex digits")
        if not isinstance(request, str) or not _DIGEST.fullmatch(request):
            raise ArgumentError("request", request, "64 hex digits")
        if isinstance(replica_ids, str) or not isinstance(replica_ids, Sequence):
            raise ArgumentError("replica_ids", replica_ids, "a list of names")
        if len(set(replica_ids)) > MAX_PARTS:
            raise ArgumentError("replica_ids", len(set(replica_ids)), f"at most {MAX_PARTS} replicas")
        asked = self._asked(replica_ids)
        job = WarmJob(
            id=job_id or secrets.token_hex(16),
            tenant_digest=self.job_owner(namespace.tenant),
            namespace_digest=self.keys.namespace(namespace, self.purges.generation(namespace.tenant)),
            num_tokens=num_tokens,
            parts=tuple(JobPart(*asked[name], "queued") for name in sorted(asked)),
            owner=self._mine,
            num_wanted=len(asked) if num_wanted is None else num_wanted,
            num_left_out=num_left_out,
            request=request,
        )
        kept = self.store.save_job(job)
        if kept.tenant_digest != job.tenant_digest:
            raise ArgumentError("job_id", job_id, "an id that no other tenant's job has")
        return kept

    def take_job(self, job_id: str, tenant: str) -> WarmJob | None:
        """Take a job whose owner's lease has expired, or return this replica's own job; None if another replica
        owns it.

        If several replicas try, exactly one gets the job. Raises StoreUnavailable.
        """
        job = self.job(job_id, tenant)
        if job is None or job.owner == NOBODY:
            return None
        if job.owner == self._mine:
            return job
        if job.owner in self._living([job.owner.replica_id]):
            return None
        return replace(job, owner=self._mine) if self.store.own_job(job_id, self._mine, job.owner) else None

    def hand_job(self, job_id: str, to: ReplicaInfo) -> bool:
        """Make another replica the owner of a job. False unless this replica was the owner. Raises StoreUnavailable."""
        check_instance("to", to, ReplicaInfo)
        return is_job_id(job_id) and self.store.own_job(job_id, to.writer, self._mine)

    def end_job(self, job_id: str) -> bool:
        """End a job: no further replica is asked. False unless this replica owns it. Raises StoreUnavailable."""
        return is_job_id(job_id) and self.store.own_job(job_id, NOBODY, self._mine)

    def forget_job(self, job_id: str) -> None:
        """Delete the record of a job that is no longer needed. Raises StoreUnavailable."""
        if is_job_id(job_id):
            self.store.drop_job(job_id)

    def extend_job(self, job_id: str, replica_id: str) -> bool:
        """Add a queued part for one more replica, or for one that restarted since.

        False unless this replica owns the job.

        Raises ArgumentError for a replica that isn't live, StoreUnavailable.
        """
        asked = self._asked([replica_id], "replica_id")[replica_id]
        return is_job_id(job_id) and self.store.add_part(job_id, self._mine, JobPart(*asked, "queued"))

    def report_job(
        self,
        job_id: str,
        state: JobState,
        num_tokens_done: int = 0,
        error: str = "",
        *,
        num_tokens_cached: int = 0,
        ms: int = 0,
    ) -> bool:
        """Write this replica's part. False if the job is unknown (or expired). Raises StoreUnavailable."""
        check_state(state)
        numbers = {"num_tokens_done": num_tokens_done, "num_tokens_cached": num_tokens_cached, "ms": ms}
        for name, value in numbers.items():
            check_amount(name, value)
        check_error(error)
        part = JobPart(*self._mine, state, num_tokens_done, error, num_tokens_cached, ms)
        return is_job_id(job_id) and self.store.save_part(job_id, part)

    def give_up(self, job_id: str, part: JobPart, error: str) -> bool:
        """Mark a part that couldn't be delivered as failed; a later report of its replica overrides this.

        Raises StoreUnavailable.
        """
        check_instance("part", part, JobPart)
        check_error(error)
        failed = replace(part, state="failed", error=error)
        return is_job_id(job_id) and self.store.save_part(job_id, failed)

    def job(self, job_id: str, tenant: str) -> WarmJob | None:
        """Return the job, or None if the tenant has none of this id since its last purge. Raises StoreUnavailable."""
        check_tenant(tenant)
        job = self.store.load_job(job_id) if is_job_id(job_id) else None
        if job is None or job.tenant_digest != self.job_owner(tenant):
            return None
        is_seen_to = job.num_wanted > 0 and job.owner != NOBODY
        asked = [part.replica_id for part in job.parts if is_seen_to or part.is_open]
        living = self._living(asked + [job.owner.replica_id] * is_seen_to)
        read = replace(job, parts=tuple(_as_read(part, living) for part in job.parts))
        return replace(read, owner=NOBODY) if is_seen_to and _is_orphan(read, living) else read

    @property
    def _mine(self) -> Writer:
        return self.info().writer

    def _asked(self, replica_ids: Sequence[str], argument: str = "replica_ids") -> dict[str, Writer]:
        """Return the registrations of live replicas that don't drain.

        Raises ArgumentError, or StoreUnavailable if the store can't tell.
        """
        for each in replica_ids:
            check_text(argument, each, "names of replicas, strings")
        live = {
            info.id: info.writer
            for info in self.replicas()
            if (info.live and not info.draining) or info.is_self
        }
        unknown = next((name for name in replica_ids if name not in live), None)
        if unknown is not None and self.unavailable is not None:
            raise StoreUnavailable(self.unavailable)
        if unknown is not None:
            raise ArgumentError(argument, unknown, f"live replicas: {', '.join(sorted(live)) or 'none'}")
        return {name: live[name] for name in replica_ids}

    def _living(self, replica_ids: Sequence[str]) -> set[Writer]:
        """Return the registrations of those replicas that are live, as the store says now."""
        seen = self.store.fetch(sorted(set(replica_ids))).seen if replica_ids else []
        return {
            each.registration.writer
            for each in seen
            if each.remaining_s > 0  # the store's clock may be wrong
            and self.reader.is_signed(each.registration)
            and self.reader.remaining_s(each) > 0
        }


def _as_read(part: JobPart, living: set[Writer]) -> JobPart:
    """Return the part as read: an open part of a registration that isn't live is lost."""
    if part.is_open and part.writer not in living:
        return replace(part, state="lost")
    return part


def _is_orphan(job: WarmJob, living: set[Writer]) -> bool:
    """Whether the job can't continue: neither its owner nor any replica that was asked is live, so its prompt is
    lost."""
    return living.isdisjoint([job.owner, *(part.writer for part in job.parts)])
