"""The table of warm jobs whose prompts this process has, by tenant and id.

A job's id is a secret of 128 bits. It can't be guessed and counts nothing. A job is looked up together with the tenant
that asks. So another tenant's job looks like one that doesn't exist.

Each tenant has its own bounded table. Finished jobs leave after ``ttl_s``, or earlier, oldest first, when the table is
full. If unfinished jobs fill it, the tenant gets Busy. If a client asked this process for a job, the job's record in
the store is deleted too when the job leaves the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.coordination.values import JobState, WarmJob, Writer
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.service.engine_loop import Busy
from radixkv.service.problems import ApiError
from radixkv.service.warming import Share, Warmed

if TYPE_CHECKING:
    from radixkv.service.owner import Owner


@dataclass(frozen=True, slots=True)
class Stated:
    """A replica's part of a job, as written to the store."""

    state: JobState = "queued"
    num_done: int = 0
    error: str = ""
    num_cached: int = 0
    ms: int = 0


class Job:
    """A warm in the background.

    - ``record``: the last record read from the store; None if the store never had it.
    - ``owner``: who asked for it, here or at another replica.
    - ``era``: see ``JobTable``.
    - ``is_mine``: a client asked this process for it.
    - ``is_followed``: other replicas have parts in it, so this process reads its record.
    - ``is_known``: set once another replica knows the job, or none can be told.
    - ``changed``: set when there is something to write to the store.
    """

    def __init__(
        self, job_id: str, owner: Owner, namespace: Namespace, prompt_key: bytes, num_left_out: int
    ) -> None:
        self.id, self.owner, self.namespace, self.num_left_out = job_id, owner, namespace, num_left_out
        self.prompt_key: bytes | None = prompt_key
        self.num_tokens = len(prompt_key) // TOKEN_BYTES
        self.request = ""
        self.era: object = None
        self.is_mine = self.is_followed = False
        self.record: WarmJob | None = None
        self.delivered: set[Writer] = set()
        self.num_telling = 0
        self.is_known = asyncio.Event()
        self.changed = asyncio.Event()
        self.share: Share | None = None
        self.warmed: Warmed | None = None
        self.error: ApiError | None = None
        self.took_s = 0.0
        self.stated: Stated | None = None
        self.stated_at = float("-inf")
        self.ended_at: float | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def has_part(self) -> bool:
        """Whether this replica has a part in it."""
        return self.share is not None or self.is_worked

    @property
    def is_worked(self) -> bool:
        """Whether that part has ended."""
        return self.warmed is not None or self.error is not None

    def part(self) -> Stated:
        """The present state of this replica's part."""
        ms = int(self.took_s * 1000)
        if self.error is not None:
            code = self.error.type if self.error.type.isascii() else "failed"
            return Stated("failed", error=code, ms=ms)
        if self.warmed is not None:
            return Stated("done", self.warmed.num_tokens, "", self.warmed.num_cached, ms)
        if self.share is None or not self.share.warming.started:
            return Stated()
        return Stated("running", self.share.warming.num_ready)


class JobTable:
    """Jobs by tenant and id. To be used from the event loop's thread.

    ``on_left(job)`` is called for each job that leaves the table. ``era_of(tenant)``: a value that changes when the
    tenant is purged or removed. A job of another era is never found.
    """

    def __init__(
        self,
        clock: Clock,
        on_left: Callable[[Job], object],
        *,
        ttl_s: float = 600.0,
        max_jobs: int = 256,
        era_of: Callable[[str], object] = lambda tenant: None,
    ) -> None:
        self.ttl_s, self.max_jobs, self._era_of = ttl_s, max_jobs, era_of
        self._clock, self._on_left = clock, on_left
        self._tenants: dict[str, dict[str, Job]] = {}

    @property
    def num_unfinished(self) -> int:
        """Number of jobs that are queued or running."""
        return sum(job.ended_at is None for jobs in self._tenants.values() for job in jobs.values())

    @property
    def num_kept(self) -> int:
        """Number of all jobs in the table."""
        return sum(map(len, self._tenants.values()))

    def get(self, tenant: str, job_id: str) -> Job | None:
        """Return a tenant's own job, or None. O(1)."""
        job = self._tenants.get(tenant, {}).get(job_id)
        if job is not None and job.era != self._era_of(tenant):
            self._cancel(tenant, job)
            return None
        if job is not None and self._expired(job):
            self.drop(tenant, job)
            return None
        return job

    def keep(self, tenant: str, job: Job) -> None:
        """Add a new job. Raises Busy if unfinished jobs fill the table."""
        jobs = self._tenants.setdefault(tenant, {})
        job.era = self._era_of(tenant)
        for each in [each for each in jobs.values() if each.era != job.era]:
            self._cancel(tenant, each)
        for each in [each for each in jobs.values() if self._expired(each)]:
            self.drop(tenant, each)
        while len(jobs) >= self.max_jobs:
            ended = next((each for each in jobs.values() if each.ended_at is not None), None)
            if ended is None:
                raise Busy
            self.drop(tenant, ended)
        jobs[job.id] = job

    def drop(self, tenant: str, job: Job) -> None:
        """Remove a job from the table."""
        if self._tenants.get(tenant, {}).pop(job.id, None) is not None:
            self._on_left(job)

    def forget(self, tenant: str) -> None:
        """Remove a purged tenant's jobs, and cancel those that run."""
        for job in list(self._tenants.get(tenant, {}).values()):
            self._cancel(tenant, job)

    def sweep(self) -> None:
        """Do the same for every tenant that was purged or removed since. O(jobs)."""
        for tenant, jobs in list(self._tenants.items()):
            era = self._era_of(tenant)
            for job in [job for job in jobs.values() if job.era != era]:
                self._cancel(tenant, job)
            if not jobs:
                del self._tenants[tenant]

    def _cancel(self, tenant: str, job: Job) -> None:
        self.drop(tenant, job)
        for task in job.tasks:
            task.cancel()
        job.is_known.set()  # nobody will learn of it any more

    def run(self, job: Job, task: Coroutine[Any, Any, None]) -> None:
        """Run a task of a job until it ends or the table is closed."""
        running = asyncio.create_task(task, name="radixkv-warm-job")
        job.tasks.add(running)
        running.add_done_callback(job.tasks.discard)

    def end(self, job: Job) -> None:
        """Mark a job as finished. Its prompt is no longer needed."""
        job.ended_at, job.prompt_key = self._clock(), None

    async def close(self) -> None:
        """Cancel all unfinished tasks and wait for their end."""
        tasks = [task for jobs in self._tenants.values() for job in jobs.values() for task in job.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _expired(self, job: Job) -> bool:
        return job.ended_at is not None and self._clock() - job.ended_at > self.ttl_s
