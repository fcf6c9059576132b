"""What one process of the service consists of, wired together; it knows no HTTP.

event loop:  handlers, lookups, jobs, fleet      one thread at a time:  the model
     └────────────── worker (fair, bounded lanes) ─────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread

from radixkv.clock import Clock, monotonic
from radixkv.coordination import Load, ReplicaInfo, Router
from radixkv.coordination.routing.replica_sources import Beside
from radixkv.errors import CapacityError, CoordinationError, IntegrityError
from radixkv.service.auth import Keyring
from radixkv.service.draining import Drain
from radixkv.service.endpoint import log_unforeseen, problem_of
from radixkv.service.fleet.job_table import Job, JobTable
from radixkv.service.fleet.peers import Fleet
from radixkv.service.fleet.pins import Keeper
from radixkv.service.fleet.quotas import Quotas
from radixkv.service.fleet.warm_jobs import Orders
from radixkv.service.intake import Intake
from radixkv.service.key_store import KeyStore
from radixkv.service.limits import Gate, Limits
from radixkv.service.metrics import Metrics
from radixkv.service.problems import ApiError, generation_unconfirmed, store_unavailable
from radixkv.service.prompts import PromptRules
from radixkv.service.recording import Recorder
from radixkv.service.schemas.replicas import RouteRequest
from radixkv.service.tenant_sync import Tenancy
from radixkv.service.threads import Threads
from radixkv.service.warming import Warmer
from radixkv.service.worker import ModelWorker

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.coordination.purges import Purge
    from radixkv.engines.hf import HFEngine
    from radixkv.index.cache import PrefixCache
    from radixkv.tokenizer import Tokenizer

_UPKEEP_EVERY_S = 1.0
_PURGE_AGAIN_S = 5.0


class Service:
    """Everything that handlers use. ``close`` it when done."""

    def __init__(
        self,
        engine: HFEngine,
        tokenizer: Tokenizer,
        keys: KeyStore,
        fleet: Fleet,
        tenancy: Tenancy,
        *,
        model_name: str,
        limits: Limits | None = None,
        clock: Clock = monotonic,
        recorder: Recorder | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """``tokenizer_path``: where ``load_tokenizer`` finds the same tokenizer."""
        self.engine, self.tokenizer, self.keys, self.fleet = engine, tokenizer, keys, fleet
        self.model_name, self.clock = model_name, clock
        self.limits = limits or Limits()
        self.quotas = Quotas(self.cache, fleet.coordinator, lambda: self.keyring, tenancy)
        self.gate = Gate(self.limits.max_concurrent, clock)
        self.rules = self._rules()
        self.intake = Intake(tokenizer, self.rules, tokenizer_path)
        self.threads = Threads()
        self.has_broken_laws = False
        self.worker = ModelWorker(self.limits.max_queued, self._note)
        self.recorder = recorder
        self.warmer = Warmer(engine, self.worker, recorder)
        self.tenancy = tenancy
        self.jobs = JobTable(
            clock,
            self._left,
            ttl_s=self.limits.job_ttl_s,
            max_jobs=self.limits.max_jobs,
            era_of=self.era,
        )
        self.metrics = Metrics(self.cache, lambda: keys.ring.tenants, fleet.coordinator, self._levels())
        self.router = Router(Beside(fleet.coordinator, self._resident))
        self.orders = Orders(self)
        self.keeper = Keeper(self)
        self._forgetting: set[asyncio.Task[None]] = set()
        self._purge_again_at = float("-inf")
        self.drain = Drain()

    @property
    def cache(self) -> PrefixCache:
        """The engine's cache."""
        return self.engine.cache

    @property
    def keyring(self) -> Keyring:
        """Who may call now."""
        return self.keys.ring

    def namespace(self, tenant: str, salt: str, adapter: str | None) -> Namespace:
        """The key space of a request. Raises ApiError where the tenant isn't to be served now."""
        own = self.keyring.settings.get(tenant)
        refuses = own is not None and own.on_unconfirmed_generation == "refuse"
        if refuses and not self.fleet.coordinator.knows_generations:
            raise generation_unconfirmed()
        return self.engine.namespace(tenant, adapter=adapter, salt=salt)

    def replicas(self) -> list[ReplicaInfo]:
        """This replica, and all others that are known."""
        return self.fleet.coordinator.replicas()

    def routed_to(self, tenant: str, body: RouteRequest) -> Namespace:
        """The namespace of a prompt that is to be routed; its model may have the name that completions give it.

        Raises ApiError.
        """
        namespace = self.namespace(tenant, body.salt, body.adapter)
        if body.model is not None and body.model != self.model_name:
            namespace = namespace._replace(model=body.model)
        return namespace

    def _resident(self, namespace: Namespace, key: bytes) -> int:
        return self.cache.match(namespace, key).num_tokens

    def problem(self, error: Exception) -> ApiError:
        """The answer to an error; remembers broken laws, which make this process unhealthy."""
        self._note(error)
        return problem_of(error)

    def unforeseen(self, error: Exception) -> None:
        """An error that nobody waits for: told to the log."""
        self._note(error)
        log_unforeseen(error)

    def _note(self, error: Exception) -> None:
        if isinstance(error, IntegrityError):
            self.has_broken_laws = True

    def sickness(self) -> list[str]:
        """Why this process ought to be replaced; empty if it is well."""
        if self.cache.is_broken:
            try:
                self.cache.require_alive()  # repairs it, if that can be done
            except IntegrityError as error:
                self._note(error)
        reasons = ["integrity: a law of the cache was found broken"] if self.has_broken_laws else []
        health = self.fleet.coordinator.health()
        if health.state in ("fenced", "failed"):
            reasons.append(f"coordination: {health.state}")
        return reasons

    def coordination(self) -> str:
        """Standing in the fleet."""
        return self.fleet.coordinator.health().state

    def unreadiness(self) -> list[str]:
        """Why no requests should be sent here now; empty if it is ready."""
        reasons = self.sickness()
        if self.drain.is_stopping:
            reasons.append("stopping")
        health = self.fleet.coordinator.health()
        if health.state not in ("ok", "unavailable", "fenced", "failed"):
            reasons.append(f"coordination: {health.state}")
        elif health.state == "unavailable" and not self.fleet.coordinator.info().epoch:
            reasons.append("coordination: not registered yet")
        return reasons

    def era(self, tenant: str) -> tuple[int, bytes]:
        """A value that differs after a tenant was purged, anywhere, or removed here. Local."""
        return self.tenancy.num_removals(tenant), self.fleet.coordinator.job_owner(tenant)

    def require_purged(self, tenant: str) -> None:
        """Raise ApiError 503 while the fleet may have records of a removed tenant of this name."""
        if tenant in self.tenancy.unpurged:
            message = (
                "a tenant of this name was removed, and its records aren't purged everywhere yet; try again"
            )
            raise store_unavailable(message)

    async def purge(self, tenant: str) -> tuple[int, Purge]:
        """Forget all that a tenant has, here and on all replicas: how many blocks went here, and how far it has come.

        Raises CoordinationError if the store can't be reached: then it is forgotten here, and where that could be told.
        """
        coordinator, administer = self.fleet.coordinator, self.threads.administer
        num_blocks = await administer(partial(self.cache.purge, tenant))
        self.warmer.forget_tenant(tenant)
        self.jobs.forget(tenant)
        try:
            pins = await administer(partial(coordinator.fleet_pins, tenant))
            purge = await administer(partial(coordinator.purge, tenant))
            self.jobs.sweep()
            await self.keeper.purged(tenant, pins)
            await self.fleet.spread_purge(tenant, coordinator.tenants.raised(tenant))
            if not purge.is_complete:
                purge = await administer(partial(coordinator.purge_report, tenant))
        except CoordinationError:
            await self.fleet.spread_purge(tenant)
            raise
        return num_blocks, purge

    async def purge_removed(self) -> None:
        """Purge the tenants that were removed, as by an edit of the keys file; after a failure not before 5 seconds."""
        if not self.tenancy.unpurged or self.clock() < self._purge_again_at:
            return
        for tenant in self.tenancy.unpurged:
            self.gate.forget(tenant)
            self.jobs.forget(tenant)
            self.keeper.removed(tenant)
            self._purge_again_at = self.clock() + _PURGE_AGAIN_S
            await self.purge(tenant)
            self._purge_again_at = float("-inf")
            self.tenancy.purged(tenant)

    async def upkeep(self) -> None:
        """Again and again, until cancelled: tell the coordinator the load, and keep to quotas and pins of the fleet."""
        while True:
            try:
                await self._look_after()
            except (CoordinationError, CapacityError):
                pass  # an outage, or no room: the next time
            except Exception as error:  # noqa: BLE001 a bug of ours, which must not end upkeep for good
                self.unforeseen(error)
            await asyncio.sleep(_UPKEEP_EVERY_S)

    async def _look_after(self) -> None:
        self.keeper.tick()
        self.jobs.sweep()
        with suppress(CoordinationError):  # the next time
            await self.purge_removed()
        stats = self.cache.stats()
        load = Load(self.worker.num_prefill_tokens, stats.sequence_blocks, stats.resident_blocks)
        self.fleet.coordinator.report_load(load)
        await self.threads.administer(self.quotas.step)

    async def close(self) -> None:
        """Cancel jobs and work, leave the fleet. The event loop goes on meanwhile."""
        self.intake.close()
        await self.jobs.close()
        await self.keeper.close()
        await anyio.to_thread.run_sync(self.worker.close)
        await self.fleet.close()
        if self.recorder is not None:
            self.recorder.close()

    def _left(self, job: Job) -> None:
        """A job left the table: if it was asked for here, nobody will ask for it any more."""
        if job.is_mine and not self.drain.is_stopping:
            task = asyncio.create_task(self._forget(job.id))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _forget(self, job_id: str) -> None:
        with suppress(CoordinationError):  # the store forgets it within an hour
            await self.orders.call(self.fleet.coordinator.forget_job, job_id)

    def _levels(self) -> list[tuple[str, str, Callable[[], float]]]:
        return [
            (
                "model_work_unfinished",
                "Pieces of work that wait for the model or run",
                lambda: self.worker.num_unfinished,
            ),
            ("warm_jobs_unfinished", "Warm jobs queued or running", lambda: self.jobs.num_unfinished),
            (
                "warm_jobs_kept",
                "Warm jobs that this process knows of, at most max_jobs a tenant",
                lambda: self.jobs.num_kept,
            ),
            (
                "fleet_pin_bytes",
                "What the prompts of the fleet's pins take, at most 4 bytes a token of the pool for each tenant",
                lambda: self.keeper.num_bytes,
            ),
            (
                "bodies_waiting",
                "Bodies that wait for a process to read them",
                lambda: self.intake.num_waiting,
            ),
            (
                "router_predicted_bytes",
                "What the predicted index takes",
                lambda: self.router.predicted_bytes,
            ),
            (
                "signed_requests_kept",
                "Nonces of other replicas' requests, at most 65,536: none is taken twice",
                lambda: self.fleet.num_nonces,
            ),
            (
                "has_broken_laws",
                "1 once a law of the cache was found broken: a bug",
                lambda: self.has_broken_laws,
            ),
        ]

    def _rules(self) -> PromptRules:
        config = self.cache.config
        pool_tokens = config.num_blocks * config.block_size
        vocab_size = min(self.engine.vocab_size, self.tokenizer.vocab_size)
        max_tokens = min(self.engine.max_model_len, pool_tokens)
        return PromptRules(vocab_size, max_tokens, config.block_size, pool_tokens, self.tokenizer.roles)
