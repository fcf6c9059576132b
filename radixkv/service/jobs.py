"""Warm jobs that nobody waits for, and what a tenant may ask about them.

A job's id is a secret of 192 bits: it can't be guessed, counts nothing, and is looked up together with the
tenant that asks, so another tenant's job and one that doesn't exist are the same. Each tenant has a table of
its own, bounded: finished jobs leave after ``ttl_s`` or, oldest first, when the table is full; if all that
fill it are unfinished, the tenant is told Busy.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Literal

from radixkv.clock import Clock
from radixkv.service.problems import ApiError
from radixkv.service.schemas import ErrorDetail, FleetWarmReply, JobReply, Progress, WarmReply
from radixkv.service.warming import Warming
from radixkv.service.worker import Busy

State = Literal["queued", "running", "done", "failed"]
Outcome = WarmReply | FleetWarmReply


class Job:
    """A warm in the background: its id, its share in a warming, and how it ended."""

    def __init__(self, warming: Warming) -> None:
        self.id = secrets.token_urlsafe(24)
        self.warming = warming
        self.task: asyncio.Task[None] | None = None
        self.ended_at: float | None = None
        self.outcome: Outcome | None = None
        self.error: ApiError | None = None

    @property
    def state(self) -> State:
        """Where it stands."""
        if self.ended_at is not None:
            return "failed" if self.error else "done"
        return "running" if self.warming.started else "queued"

    def reply(self) -> JobReply:
        """What its tenant is told."""
        return JobReply(
            job=self.id,
            state=self.state,
            progress=Progress(computed=self.warming.num_ready, total=self.warming.num_tokens),
            result=self.outcome,
            error=ErrorDetail.model_validate(self.error.body) if self.error else None,
        )


class JobTable:
    """Jobs by tenant and id. To be used from the event loop's thread."""

    def __init__(
        self,
        clock: Clock,
        to_error: Callable[[Exception], ApiError],
        *,
        ttl_s: float = 600.0,
        max_jobs: int = 256,
    ) -> None:
        self.ttl_s, self.max_jobs = ttl_s, max_jobs
        self._clock, self._to_error = clock, to_error
        self._tenants: dict[str, dict[str, Job]] = {}

    @property
    def num_unfinished(self) -> int:
        """Jobs that are queued or running."""
        return sum(job.ended_at is None for jobs in self._tenants.values() for job in jobs.values())

    def get(self, tenant: str, job_id: str) -> Job | None:
        """A tenant's own job. O(1)."""
        job = self._tenants.get(tenant, {}).get(job_id)
        return None if job is None or self._expired(job) else job

    def start(self, tenant: str, job: Job, run: Callable[[Job], Awaitable[Outcome]]) -> None:
        """Keep the job and run it as a task. Raises Busy if the table is full of unfinished ones."""
        jobs = self._tenants.setdefault(tenant, {})
        self._make_room(jobs)
        jobs[job.id] = job
        job.task = asyncio.create_task(self._settle(job, run), name="radixkv-warm-job")

    async def close(self) -> None:
        """Cancel what is unfinished and wait for it to end."""
        tasks = [job.task for jobs in self._tenants.values() for job in jobs.values() if job.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self, job: Job, run: Callable[[Job], Awaitable[Outcome]]) -> None:
        try:
            job.outcome = await run(job)
        except Exception as error:  # noqa: BLE001 no request is there to answer: the job carries it
            job.error = self._to_error(error)
        finally:
            job.ended_at = self._clock()

    def _expired(self, job: Job) -> bool:
        return job.ended_at is not None and self._clock() - job.ended_at > self.ttl_s

    def _make_room(self, jobs: dict[str, Job]) -> None:
        for job_id in [job_id for job_id, job in jobs.items() if self._expired(job)]:
            del jobs[job_id]
        while len(jobs) >= self.max_jobs:
            ended = next((job_id for job_id, job in jobs.items() if job.ended_at is not None), None)
            if ended is None:
                raise Busy
            del jobs[ended]
