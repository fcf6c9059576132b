"""Warming on several replicas: one job with a part for each replica, and one owner.

    client's request ──▶ record in the store ──▶ signed request to each replica; one has it ──▶ 202, or wait for the end
                                                      │
                          each replica with a part: compute, write its own part, watch the job
                          the owner: if a number of replicas was requested, replace failed parts by other replicas
                          the owner's lease has expired: a replica that has the prompt takes the job

The store never has the prompt, so a job lives as long as a replica that has it. If only the owner of a job for a number
of replicas has the prompt, it hands the job to another replica, which becomes the owner. A part is always written as a
whole, and repeatedly until the store has it. After three replicas died on a prompt, no replacement is asked.

Without the store, a job belongs to this process alone: it warms here, and its parts on other replicas fail.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from radixkv.coordination.values import NOBODY, JobPart, WarmJob, Writer
from radixkv.errors import ArgumentError, CoordinationError, LeaseError, StoreUnavailable
from radixkv.index.tokens import decode
from radixkv.service.engine_loop import Busy, Closed
from radixkv.service.error_types import docs_url
from radixkv.service.fleet.job_table import Job, JobTable, Stated
from radixkv.service.problems import RETRY_AFTER_S, ApiError, cleared, invalid, not_found, store_unavailable
from radixkv.service.schemas.errors import ErrorDetail
from radixkv.service.schemas.warming import FleetWarmReply, JobReply, OrderRequest, Progress, ReplicaOutcome
from radixkv.signing import mac

if TYPE_CHECKING:
    from radixkv.clock import Clock
    from radixkv.config import Namespace
    from radixkv.coordination.values import ReplicaInfo
    from radixkv.service.failures import Failures
    from radixkv.service.fleet.peers import Fleet
    from radixkv.service.fleet.placement import Placement
    from radixkv.service.limits import Limits
    from radixkv.service.owner import Owner
    from radixkv.service.tenant_sync import TenantSync
    from radixkv.service.threads import Threads
    from radixkv.service.warming import Warmer

MAX_LOST = 3
"""After this many parts were lost with their replicas, no replacement is asked."""
_PAUSES_S = (0.02, 1.0)
_ANSWER_WITHIN_S = 0.2
_PROGRESS_EVERY_S = 0.5
_KNOWN_WITHIN_S = 2.0
"""The answer to a request for a job waits at most this long for another replica to learn of the job."""


@dataclass(frozen=True, slots=True)
class Order:
    """A client's request for a warm.

    - ``key``: a repeated request with the same key is the same job, as long as the weights stay.
    """

    owner: Owner
    namespace: Namespace
    prompt_key: bytes
    num_left_out: int
    where: str | int | list[str]
    key: str | None = None


class WarmJobs:
    """See the module's docstring. ``table``: the jobs known here. To be used from the event loop's thread."""

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        threads: Threads,
        tenant_sync: TenantSync,
        warmer: Warmer,
        failures: Failures,
        limits: Limits,
        clock: Clock,
    ) -> None:
        self._fleet, self._coordinator, self._placement = fleet, fleet.coordinator, placement
        self._ask_store, self._tenant_sync = threads.ask_store, tenant_sync
        self._warmer, self._failures, self._clock = warmer, failures, clock
        self.table = JobTable(
            clock,
            self._left,
            ttl_s=limits.job_ttl_s,
            max_jobs=limits.max_jobs,
            era_of=tenant_sync.era,
        )
        self._forgetting: set[asyncio.Task[None]] = set()

    # ---- requests of clients

    async def start(self, order: Order) -> str:
        """Begin a job, or find the one that this order began before. Returns its id.

        Raises ApiError, Busy, Closed, and an error if it can't begin to compute.
        """
        tenant, job_id = order.namespace.tenant, self._id_of(order)
        self._tenant_sync.require_purged(tenant)
        known = self.table.get(tenant, job_id)
        if known is not None:
            _require_same(known.request, self._digest(order))
            return job_id
        if self._coordinator.unavailable is None:
            with suppress(StoreUnavailable):
                return await self._recorded(order, job_id)
        return self._unrecorded(order)

    async def reply(self, tenant: str, job_id: str) -> JobReply | None:
        """Return state, progress and results of a tenant's job, on whichever replica it began; None if there is none.

        Raises ApiError if the job isn't known here and the store can't be reached.
        """
        self._tenant_sync.require_purged(tenant)
        job = self.table.get(tenant, job_id)
        if job is not None and job.record is None:
            return self._reply(job, self._as_known(job))
        try:
            record = await self._ask_store(self._coordinator.job, job_id, tenant)
        except StoreUnavailable:
            if job is None:
                raise store_unavailable("the store of jobs can't be reached; try again") from None
            record = None
        if record is None and job is not None:
            record = self._as_known(job)
        return None if record is None else self._reply(job, record)

    async def result(self, owner: Owner, job_id: str) -> FleetWarmReply:
        """Wait for the end of a job that an owner began, and return its result. Raises ApiError, StaleGeneration."""
        tenant = owner.tenant
        began_at, era = self._clock(), self._tenant_sync.era(tenant)
        while True:
            owner.require()  # if it ended before this call, the store knows no such job any more
            if era != self._tenant_sync.era(tenant):
                raise cleared()
            reply = await self.reply(tenant, job_id)
            if reply is None:
                owner.require()  # it may have ended while the store was asked
                raise not_found("job") if era == self._tenant_sync.era(tenant) else cleared()
            job = self.table.get(tenant, job_id)
            if reply.result is not None:
                return reply.result
            if reply.error is not None:
                raise job.error if job is not None and job.error is not None else _failed(reply.error)
            await asyncio.sleep(min(self._pause_s(began_at), _ANSWER_WITHIN_S))

    def _id_of(self, order: Order) -> str:
        if order.key is None:
            return secrets.token_hex(16)
        owner = self._coordinator.job_owner(order.namespace.tenant)
        return mac(self._fleet.secret, "job", owner, order.key, order.namespace.weights).hex()[:32]

    def _digest(self, order: Order) -> str:
        owner = self._coordinator.job_owner(order.namespace.tenant)
        fields = owner, order.namespace.framed(), order.prompt_key, json.dumps(order.where)
        return mac(self._fleet.secret, "warm", *fields).hex()

    async def _recorded(self, order: Order, job_id: str) -> str:
        tenant, digest = order.namespace.tenant, self._digest(order)
        if order.key is not None:
            earlier = await self._ask_store(self._coordinator.job, job_id, tenant)
            if earlier is not None:
                _require_same(earlier.request, digest)
                return job_id
        names = self._placement.asked(order.namespace, order.prompt_key, order.where)
        job = self._new(order, job_id)
        with ExitStack() as undo:
            undo.callback(self.table.drop, tenant, job)
            held = undo.enter_context(self._begin(job)) if self._name in names else None
            wanted = order.where if isinstance(order.where, int) else 0
            record = await self._saved(job, names, wanted)
            await self._require_current(order, job)
            _require_same(record.request, digest)
            if record.owner != self._me:  # another request with the same key was faster
                return job_id
            undo.pop_all()
        job.record, job.is_mine = record, True
        job.is_followed = record.num_wanted > 0 or names != [self._name]
        if held is not None:
            self._work(job, held)
        self.table.run(job, self._watch(job))
        if job.is_followed:
            with suppress(TimeoutError):
                async with asyncio.timeout(_KNOWN_WITHIN_S):
                    await job.is_known.wait()
            order.owner.require()
        return job_id

    async def _require_current(self, order: Order, job: Job) -> None:
        """Raise, and delete the job's record, if the order ended while it was written: it may look like a later one."""
        try:
            order.owner.require()
        except (ApiError, LeaseError):
            if self.table.get(order.owner.tenant, job.id) in (job, None):
                await self._forget(job.id)
            raise

    async def _saved(self, job: Job, names: list[str], wanted: int) -> WarmJob:
        try:
            return await self._ask_store(
                self._coordinator.create_job, job.namespace, job.num_tokens, names, job_id=job.id,
                num_wanted=wanted, num_left_out=job.num_left_out, request=job.request,
            )  # fmt: skip
        except ArgumentError as error:
            raise invalid("no such live replica", "replicas", error.value, error.allowed) from None

    def _unrecorded(self, order: Order) -> str:
        """Begin a job of this process alone, because the store is lost."""
        if order.key is not None or (isinstance(order.where, list) and self._name not in order.where):
            raise store_unavailable("the store of jobs can't be reached; nothing was started")
        job = self._new(order, secrets.token_hex(16))  # the other id may be in the store after all
        with ExitStack() as undo:
            undo.callback(self.table.drop, order.namespace.tenant, job)
            held = undo.enter_context(self._begin(job))
            undo.pop_all()
        if order.where == "all":
            job.delivered = {peer.writer for peer in self._coordinator.peers()}
        elif isinstance(order.where, list):
            job.delivered = {Writer(name, 0, "") for name in order.where if name != self._name}
        self._work(job, held)
        self.table.run(job, self._watch(job))
        return job.id

    def _new(self, order: Order, job_id: str) -> Job:
        job = Job(job_id, order.owner, order.namespace, order.prompt_key, order.num_left_out)
        job.request = self._digest(order)
        order.owner.require()
        self.table.keep(order.namespace.tenant, job)
        return job

    @property
    def _name(self) -> str:
        return self._coordinator.replica_id

    @property
    def _me(self) -> Writer:
        return self._coordinator.info().writer

    # ---- requests of other replicas

    async def receive(
        self, owner: Owner, namespace: Namespace, prompt_key: bytes, body: OrderRequest
    ) -> None:
        """Take part in a job, or learn of it, at another replica's request.

        Raises ApiError 404, Busy, StoreUnavailable.
        """
        tenant, table = namespace.tenant, self.table
        record = await self._ask_store(self._coordinator.job, body.job, tenant)
        if record is None:  # it may have been made after a purge that isn't known here yet
            await self._ask_store(self._coordinator.apply_purges)
            record = await self._ask_store(self._coordinator.job, body.job, tenant)
        if record is None:
            raise not_found("job")
        known = table.get(tenant, body.job)
        if known is not None and known.ended_at is None:
            known.changed.set()
            return
        owner.require(namespace)
        job = Job(body.job, owner, namespace, prompt_key, body.left_out)
        job.record, job.request, job.is_followed = record, record.request, True
        table.keep(tenant, job)
        table.run(job, self._watch(job))

    # ---- jobs that leave the table

    def _left(self, job: Job) -> None:
        """Handle a job that left the table. If a client asked for it here, delete its record."""
        if job.is_mine:
            task = asyncio.create_task(self._forget(job.id))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _forget(self, job_id: str) -> None:
        with suppress(CoordinationError):  # the store forgets it within an hour
            await self._ask_store(self._coordinator.forget_job, job_id)

    # ---- this replica's part

    def _begin(self, job: Job) -> ExitStack:
        """Join the computation of the job's prefix. Raises Busy or Closed."""
        assert job.prompt_key is not None
        held = ExitStack()
        job.share = held.enter_context(
            self._warmer.join(job.namespace, job.prompt_key, job.owner, is_job=True)
        )
        return held

    def _begin_late(self, job: Job) -> None:
        """The same for a part that another replica gave to this one."""
        try:
            self._work(job, self._begin(job))
        except (ApiError, LeaseError, Busy, Closed) as error:
            job.error = self._failures.answer(error)
            job.changed.set()

    def _work(self, job: Job, held: ExitStack) -> None:
        """Wait for the prefix, in a task."""

        async def work() -> None:
            began_at, share = self._clock(), job.share
            assert share is not None
            with held:
                try:
                    warmed = await share.result()
                    await share.settled()
                    job.warmed = warmed
                except Exception as error:  # noqa: BLE001 no request waits for it: the job has the error
                    job.error = self._failures.answer(error)
                finally:
                    job.took_s = self._clock() - began_at
                    job.changed.set()

        self.table.run(job, work())

    async def _state(self, job: Job) -> None:
        """Write the present state of this replica's part to the store. Raises StoreUnavailable."""
        part, now = job.part(), self._clock()
        if job.record is None or not job.has_part or part == job.stated:
            return
        is_progress = job.stated is not None and part.state == job.stated.state
        if is_progress and now - job.stated_at < _PROGRESS_EVERY_S:
            return
        job.stated_at = now
        numbers = {"num_tokens_cached": part.num_cached, "ms": part.ms}
        report = self._coordinator.report_job
        await self._ask_store(report, job.id, part.state, part.num_done, part.error, **numbers)
        job.stated = part

    # ---- the job as a whole

    async def _watch(self, job: Job) -> None:
        """Until the job has ended: write this replica's part; as the owner, ask other replicas for theirs."""
        began_at = self._clock()
        try:
            while not await self._has_settled(job):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s(began_at)):
                        await job.changed.wait()
                job.changed.clear()
        except Exception as error:  # noqa: BLE001 a bug in radixkv must not leave a job unfinished for ever
            problem = self._failures.answer(error)
            job.error = job.error or problem
        job.is_known.set()
        self.table.end(job)

    def _pause_s(self, began_at: float) -> float:
        """Return an eighth of the time that the job has taken so far, within bounds."""
        least, most = _PAUSES_S
        return min(max(least, (self._clock() - began_at) / 8), most)

    async def _has_settled(self, job: Job) -> bool:
        try:
            await self._state(job)
            if job.is_followed:
                return await self._is_handled(job)
            return job.is_worked and (job.record is None or job.stated == job.part())
        except (StoreUnavailable, ArgumentError):  # an outage, or a replica that has just left
            return False

    async def _is_handled(self, job: Job) -> bool:
        """Make one step of a job. Returns whether it has ended. Raises StoreUnavailable, ArgumentError."""
        record = await self._ask_store(self._coordinator.job, job.id, job.namespace.tenant)
        is_idle = job.is_worked or not job.has_part
        if record is None:
            return is_idle
        job.record = record
        mine = next((part for part in record.parts if part.replica_id == self._name), None)
        if mine is not None and not job.has_part:
            if mine.is_open and mine.writer == self._me:
                self._begin_late(job)
                return False
        elif mine is not None and job.stated is not None and self._differs(mine, job.stated):
            job.stated = None  # the store has lost it, or another replica marked it as failed
            return False
        if record.is_ended:
            return is_idle
        if await self._owns(job, record):
            await self._assign(job, record)
        return False

    def _differs(self, part: JobPart, stated: Stated) -> bool:
        return (part.writer, part.state) != (self._me, stated.state)

    async def _owns(self, job: Job, record: WarmJob) -> bool:
        """Whether this replica owns the job. It takes the job if the owner is gone."""
        if record.owner == self._me:
            return True
        if any(each.writer == record.owner and each.live for each in self._coordinator.replicas()):
            return False
        return await self._ask_store(self._coordinator.take_job, job.id, job.namespace.tenant) is not None

    async def _assign(self, job: Job, record: WarmJob) -> None:
        """Ask the replicas that weren't asked yet, and replacements for those that failed."""
        self._deliver(job, record)
        if record.num_missing:
            spare = self._spare(job, record)
            if not spare:
                if record.is_over:
                    await self._ask_store(self._coordinator.end_job, job.id)
                return
            for name in spare[: record.num_missing]:
                await self._ask_store(self._coordinator.extend_job, job.id, name)
            extended = await self._ask_store(self._coordinator.job, job.id, job.namespace.tenant)
            if extended is not None:
                self._deliver(job, extended)
            return
        await self._hand_over(job, record)
        if not job.num_telling:
            job.is_known.set()

    def _spare(self, job: Job, record: WarmJob) -> list[str]:
        """Return replacements for failed parts, the best first; none if the tenant was purged."""
        num_lost = sum(part.state == "lost" for part in record.parts)
        if (
            job.prompt_key is None
            or num_lost >= MAX_LOST
            or any(part.error == "conflict" for part in record.parts)
        ):
            return []
        asked = {part.replica_id for part in record.parts}
        return [name for name in self._placement.best(job.namespace, job.prompt_key) if name not in asked]

    def _deliver(self, job: Job, record: WarmJob) -> None:
        """Ask each replica that has a part and wasn't asked. Each has its own task, so a slow one delays no other."""
        for part in record.parts:
            to = part.writer
            if part.state == "queued" and part.replica_id != self._name and to not in job.delivered:
                job.delivered.add(to)
                job.num_telling += 1
                self.table.run(job, self._deliver_part(job, part))

    async def _deliver_part(self, job: Job, part: JobPart) -> None:
        to = part.writer
        peer = next((peer for peer in self._coordinator.peers() if peer.writer == to), None)
        error = "left" if peer is None else await self._tell(job, peer)
        job.num_telling -= 1
        if error is None or not job.num_telling:
            job.is_known.set()
        if error is not None:
            try:
                await self._ask_store(self._coordinator.give_up, job.id, part, error)
            except StoreUnavailable:
                job.delivered.discard(to)
        job.changed.set()

    async def _tell(self, job: Job, peer: ReplicaInfo) -> str | None:
        """Send the job to a replica. Returns None, or a code with the reason why the replica doesn't have it now."""
        if peer.fingerprint != job.namespace.model:
            return "other_model"
        if job.prompt_key is None:
            return "left"
        try:
            job.owner.require()
        except (ApiError, LeaseError) as error:
            return self._failures.answer(error).type
        namespace = job.namespace
        document = {
            "job": job.id,
            "token_ids": decode(job.prompt_key).tolist(),
            "salt": namespace.salt,
            "adapter": namespace.adapter,
            "weights": namespace.weights,
            "left_out": job.num_left_out,
            "key_id": job.owner.key_id,
            **job.owner.names_tenant,
        }
        return await self._fleet.order(peer, namespace.tenant, json.dumps(document).encode())

    async def _hand_over(self, job: Job, record: WarmJob) -> None:
        """Hand over a job that may need replacements, if only this replica has its prompt."""
        knowing = {part.writer for part in record.parts if part.is_open or part.state == "done"}
        if not record.num_wanted or record.owner != self._me or knowing - {self._me}:
            return
        for peer in self._coordinator.peers():
            if await self._tell(job, peer) is None:
                await self._ask_store(self._coordinator.hand_job, job.id, peer)
                return

    # ---- the state of a job

    def _reply(self, job: Job | None, record: WarmJob) -> JobReply:
        own = job.error.body if job is not None and job.error is not None else None
        return reply_of(record, self._coordinator.info().block_size, own)

    def _as_known(self, job: Job) -> WarmJob:
        """Return a job without the store: this replica's part, and others' as last read, until their leases expire."""
        record, living = job.record, {each.writer for each in self._coordinator.peers(draining=True)}
        if record is None:
            others = [JobPart(*each, "failed", error="store_unavailable") for each in sorted(job.delivered)]
            record = WarmJob(job.id, b"", b"", job.num_tokens, tuple(others), num_left_out=job.num_left_out)
        parts = [
            replace(part, state="lost") if part.is_open and part.writer not in living else part
            for part in record.parts
            if not job.has_part or part.replica_id != self._name
        ]
        if job.has_part:
            own = job.part()
            parts.append(JobPart(*self._me, own.state, own.num_done, own.error, own.num_cached, own.ms))
        known = replace(record, parts=tuple(sorted(parts, key=lambda part: part.replica_id)))
        return replace(known, owner=NOBODY) if known.is_over else known


def reply_of(record: WarmJob, block_size: int, own_error: Mapping[str, Any] | None = None) -> JobReply:
    """Return a job as its tenant sees it. ``own_error`` has more details of a failure than its code."""
    outcomes = [_outcome(part) for part in record.parts]
    done = [each for each in outcomes if each.state == "done"]
    hopeful = [each for each in outcomes if each.state != "failed"]
    progress = Progress(
        computed=sum(each.tokens for each in hopeful),
        total=record.num_tokens * max(len(hopeful), record.num_wanted, 1),
    )
    result = error = None
    state: Literal["queued", "running", "done", "failed"]
    if not record.is_ended:
        state = "queued" if all(each.state == "queued" for each in outcomes) else "running"
    elif done:
        state, result = "done", _result(record, done[0], outcomes, block_size)
        progress = Progress(computed=progress.computed, total=sum(each.tokens for each in done))
    else:
        state, error = "failed", _error(outcomes, own_error)
    return JobReply(
        job=record.id, state=state, progress=progress, replicas=outcomes, result=result, error=error
    )


def _outcome(part: JobPart) -> ReplicaOutcome:
    is_done = part.state == "done"
    return ReplicaOutcome(
        replica=part.replica_id,
        state="failed" if part.state == "lost" else part.state,
        tokens=part.num_tokens_done,
        cached_before=part.num_tokens_cached,
        computed=part.num_tokens_done - part.num_tokens_cached if is_done else 0,
        seconds=part.ms / 1000,
        error="left" if part.state == "lost" else part.error or None,
    )


def _result(
    record: WarmJob, first: ReplicaOutcome, outcomes: list[ReplicaOutcome], block_size: int
) -> FleetWarmReply:
    return FleetWarmReply(
        tokens=first.tokens,
        cached_before=first.cached_before,
        computed=first.computed,
        left_out=record.num_left_out,
        blocks=first.tokens // block_size,
        seconds=max(each.seconds for each in outcomes),
        replicas=outcomes,
    )


def _error(outcomes: list[ReplicaOutcome], own_error: Mapping[str, Any] | None) -> ErrorDetail:
    if own_error is not None:
        return ErrorDetail.model_validate(own_error)
    codes = sorted({each.error for each in outcomes if each.error})
    message = "no replica could warm it: " + (", ".join(codes) or "there was none")
    kind = codes[0] if len(codes) == 1 else "failed"
    return ErrorDetail(
        type=kind, message=message, field=None, value=None, allowed=None, docs_url=docs_url(kind)
    )


def _failed(error: ErrorDetail) -> ApiError:
    return ApiError(503, error.type, error.message, retry_after_s=RETRY_AFTER_S)


def _require_same(known: str, asked: str) -> None:
    if known != asked:
        message = "this Idempotency-Key was already sent with another request"
        raise ApiError(
            409, "conflict", message, field="Idempotency-Key", allowed="a new key, or the same request"
        )
