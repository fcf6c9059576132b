"""The warm jobs that this process knows the prompts of, and what a tenant may ask about them.

A job's id is a secret of 128 bits: it can't be guessed, counts nothing, and is looked up together with the tenant
that asks, so another tenant's job and one that doesn't exist are the same. Each tenant has a table of its own,
bounded: finished jobs leave after ``ttl_s`` or, oldest first, when the table is full; if all that fill it are
unfinished, the tenant is told Busy. What leaves here is forgotten in the store too, where it was asked for here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.coordination.values import JobState, WarmJob, Writer
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.service.problems import ApiError
from radixkv.service.warming import Warmed, Warming
from radixkv.service.worker import Busy


@dataclass(frozen=True, slots=True)
class Stated:
    """A replica's part of a job, as it stated it to the store."""

    state: JobState = "queued"
    num_done: int = 0
    error: str = ""
    num_cached: int = 0
    ms: int = 0


class Job:
    """A warm in the background. ``record`` is what the store had last; None where it never had it.

    ``era``: see ``JobTable``. ``is_mine``: it was asked for here. ``is_followed``: others have parts in it, so that
    the store is looked at.
    ``is_known``: another replica knows it, or none can be told. ``changed``: there is something to state.
    """

    def __init__(self, job_id: str, namespace: Namespace, prompt_key: bytes, num_left_out: int) -> None:
        self.id, self.namespace, self.num_left_out = job_id, namespace, num_left_out
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
        self.warming: Warming | None = None
        self.warmed: Warmed | None = None
        self.error: ApiError | None = None
        self.took_s = 0.0
        self.stated: Stated | None = None
        self.stated_at = float("-inf")
        self.ended_at: float | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def has_part(self) -> bool:
        """This replica has a part in it."""
        return self.warming is not None or self.is_worked

    @property
    def is_worked(self) -> bool:
        """That part is over."""
        return self.warmed is not None or self.error is not None

    def part(self) -> Stated:
        """Where this replica's part stands."""
        ms = int(self.took_s * 1000)
        if self.error is not None:
            code = self.error.type if self.error.type.isascii() else "failed"
            return Stated("failed", error=code, ms=ms)
        if self.warmed is not None:
            return Stated("done", self.warmed.num_tokens, "", self.warmed.num_cached, ms)
        if self.warming is None or not self.warming.started:
            return Stated()
        return Stated("running", self.warming.num_ready)


class JobTable:
    """Jobs by tenant and id. To be used from the event loop's thread.

    ``on_left(job)`` is called for each that leaves the table. ``era_of(tenant)``: a value that differs after the tenant
    was purged or removed; no job of another era is ever found.
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
        """Jobs that are queued or running."""
        return sum(job.ended_at is None for jobs in self._tenants.values() for job in jobs.values())

    @property
    def num_kept(self) -> int:
        """All that are kept."""
        return sum(map(len, self._tenants.values()))

    def get(self, tenant: str, job_id: str) -> Job | None:
        """A tenant's own job. O(1)."""
        job = self._tenants.get(tenant, {}).get(job_id)
        if job is not None and job.era != self._era_of(tenant):
            self._cancel(tenant, job)
            return None
        if job is not None and self._expired(job):
            self.drop(tenant, job)
            return None
        return job

    def keep(self, tenant: str, job: Job) -> None:
        """Keep a new job. Raises Busy if the table is full of unfinished ones."""
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
        """Keep it no more."""
        if self._tenants.get(tenant, {}).pop(job.id, None) is not None:
            self._on_left(job)

    def forget(self, tenant: str) -> None:
        """A tenant is purged: drop its jobs, and cancel those that run."""
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

    def run(self, job: Job, task: Coroutine[Any, Any, None]) -> None:
        """Do something for a job, until it is done or the table closed."""
        running = asyncio.create_task(task, name="radixkv-warm-job")
        job.tasks.add(running)
        running.add_done_callback(job.tasks.discard)

    def end(self, job: Job) -> None:
        """It is finished: its prompt isn't needed any more."""
        job.ended_at, job.prompt_key = self._clock(), None

    async def close(self) -> None:
        """Cancel what is unfinished and wait for it to end."""
        tasks = [task for jobs in self._tenants.values() for job in jobs.values() for task in job.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _expired(self, job: Job) -> bool:
        return job.ended_at is not None and self._clock() - job.ended_at > self.ttl_s
