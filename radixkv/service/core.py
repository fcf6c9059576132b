"""The parts of one service process, wired together. It has no HTTP code.

event loop:  handlers, lookups, jobs, fleet      one thread:  the model, with all requests
     └───────────────────── engine_loop (an inbox) ─────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio.to_thread

from radixkv.clock import Clock, monotonic
from radixkv.config import MAX_BLOCKS
from radixkv.coordination import Load, ReplicaInfo, Router
from radixkv.coordination.routing.replica_sources import LocalSource
from radixkv.engines.calls import is_stepping
from radixkv.engines.protocol import Closing, Prefetching, Queueing, Tiered, pending_of
from radixkv.errors import CapacityError, ControlError, CoordinationError, IntegrityError, TierError
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.metering.meter import OPERATOR, Level, Meter, Payer, usage_levels
from radixkv.service.auth import OPERATOR_ACCOUNT, Keyring
from radixkv.service.draining import Drain
from radixkv.service.engine_loop import EngineLoop
from radixkv.service.failures import Failures
from radixkv.service.fitting import Room, based_blocks, blocks_needed
from radixkv.service.fleet.peers import Fleet
from radixkv.service.fleet.pins import FleetPins
from radixkv.service.fleet.placement import Placement
from radixkv.service.fleet.purges import TenantPurges
from radixkv.service.fleet.quotas import Quotas
from radixkv.service.fleet.warm_jobs import WarmJobs
from radixkv.service.intake import Intake
from radixkv.service.key_store import KeyStore, key_levels
from radixkv.service.limits import Gate, Limits
from radixkv.service.metrics import Metrics
from radixkv.service.owner import Owner
from radixkv.service.problems import generation_unconfirmed, not_supported
from radixkv.service.promises import Promises
from radixkv.service.prompt_lines import DEFAULT_RULES, LineRule
from radixkv.service.prompt_times import WallClock, wall_clock
from radixkv.service.prompts import Prompt, PromptRules
from radixkv.service.recording import Recorder
from radixkv.service.reload_counts import ReloadCounts, reload_levels
from radixkv.service.schemas.base import RequestBody
from radixkv.service.schemas.chat import DEFAULT_MAX_TOKENS
from radixkv.service.schemas.replicas import RouteRequest
from radixkv.service.tenant_sync import TenantSync
from radixkv.service.threads import Threads
from radixkv.service.turns import Turns
from radixkv.service.vocabulary import vocabulary_of
from radixkv.service.warming import Warmer
from radixkv.tiers.usefulness import TierWatch, Verdict

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.engines import Ability, Engine, EngineCache
    from radixkv.events.event_publisher import EventPublisher
    from radixkv.tokenizer import Tokenizer

_log = logging.getLogger("radixkv.service")
_UPKEEP_EVERY_S = 1.0
_LOOK_EVERY_S = 300.0
"""Seconds between looks at what tiers bring, for the log. What a start needs to open them is over before the first."""
_ASK_EVERY_S = 10.0
"""How often a cache in another process is asked what each tenant holds."""


class Service:
    """Everything that handlers use. ``close`` it when done."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        keys: KeyStore,
        fleet: Fleet,
        tenant_sync: TenantSync,
        *,
        model_name: str,
        limits: Limits | None = None,
        clock: Clock = monotonic,
        recorder: Recorder | None = None,
        events: EventPublisher | None = None,
        tokenizer_path: str | None = None,
        meter: Meter | None = None,
        cors_origins: Sequence[str] = (),
        answer_tokens: int = DEFAULT_MAX_TOKENS,
        time_zone: str | None = None,
        lines: tuple[LineRule, ...] = DEFAULT_RULES,
        wall: WallClock = wall_clock,
    ) -> None:
        """``tokenizer_path``: the path from which ``load_tokenizer`` loads the same tokenizer.

        ``time_zone``, ``wall``: the zone and the clock of the time that chat templates show; None: the machine's zone.
        ``lines``: rules for lines of conversations that change.

        ``answer_tokens``: most tokens of an answer if the request doesn't say.
        """
        self.engine, self.tokenizer, self.keys, self.fleet = engine, tokenizer, keys, fleet
        self.model_name, self.clock, self.cors_origins = model_name, clock, tuple(cors_origins)
        self.answer_tokens = answer_tokens
        self.limits, self.reloads = limits or Limits(), ReloadCounts()
        self.failures, self.threads, self.drain = Failures(), Threads(engine.limits.cache_waits), Drain()
        self.quotas = Quotas(engine.limits.num_blocks, fleet.coordinator, lambda: self.keyring, tenant_sync)
        self.gate, self.turns = Gate(self.limits.max_concurrent, clock), Turns(clock)
        self.rules = self._rules(time_zone, lines)
        self.intake = Intake(tokenizer, self.rules, tokenizer_path, wall=wall)
        self.engine_loop = EngineLoop(
            self.limits.max_queued,
            self.failures.note,
            engine.limits.num_together,
            engine if is_stepping(engine) else None,
        )
        self.recorder, self.events = recorder, events
        self.vocabulary = vocabulary_of(tokenizer)
        self.meter = meter or Meter(
            model_name,
            removals=tenant_sync.num_removals,
            incarnation=lambda tenant: self.keyring.incarnation(tenant),
            clock=clock,
        )
        tiers = engine.cache.tier_counts() if isinstance(engine.cache, Tiered) else {}
        self._unusable = [name for name, counts in tiers.items() if not counts["capacity_blocks"]]
        """Disks that couldn't be opened."""
        self.left_undone: TierError | None = None
        """What ``close`` couldn't do."""
        self._sample_at = 0.0
        self.warmer = Warmer(engine, self.engine_loop, self.meter, self.threads, recorder)
        self.promises = Promises(engine, clock, lambda tenant: self.quotas.room(tenant).most)
        self.tenant_sync = tenant_sync
        self.router = Router(LocalSource(fleet.coordinator, self._resident, self._prefetch))
        placement = Placement(fleet.coordinator, self.router)
        self.warm_jobs = WarmJobs(
            fleet,
            placement,
            self.threads,
            tenant_sync,
            self.warmer,
            self.failures,
            self.limits,
            clock,
        )
        self.fleet_pins = FleetPins(
            fleet,
            placement,
            self.threads,
            tenant_sync,
            engine,
            self.warmer,
            self.promises,
            keys,
            self.quotas,
            self.failures,
            clock,
        )
        self.purges = TenantPurges(
            fleet,
            self.cache,
            self.threads,
            tenant_sync,
            self.gate,
            self.warm_jobs.table,
            self.fleet_pins,
            clock,
        )
        self.tier_watch, self._looks_at = TierWatch(clock), clock() + _LOOK_EVERY_S
        self.metrics = Metrics(
            engine, lambda: keys.ring.tenants, fleet.coordinator, self._levels(), self.tier_watch
        )
        self.metrics.show_rules(lambda: self.intake.rule_uses)

    @property
    def cache(self) -> EngineCache:
        """The engine's cache."""
        return self.engine.cache

    @property
    def keyring(self) -> Keyring:
        """The keyring in force now."""
        return self.keys.ring

    @property
    def num_endings(self) -> int:
        """How often something was purged, cleared or removed here."""
        return self.cache.endings.num

    def owner(self, tenant: str | None, key_id: str, as_of: int) -> Owner:
        """Return who a request belongs to that came at ``as_of``; a tenant of None is the operator.

        A key that isn't known here, such as that of another replica's request, can't be revoked here.
        """
        payer = Payer(OPERATOR, key_id) if tenant is None else self.meter.payer(tenant, key_id)
        is_known = key_id in self.keyring.key_ids
        return Owner(payer, as_of, self.engine, (lambda: self.keyring.key_ids) if is_known else None)

    def set_limits(self, limits: Limits) -> None:
        """Replace the bounds on requests; those of jobs stay. Requests in progress and queues are not cut."""
        self.limits = replace(limits, max_jobs=self.limits.max_jobs, job_ttl_s=self.limits.job_ttl_s)
        self.gate.max_concurrent, self.engine_loop.max_queued = limits.max_concurrent, limits.max_queued

    def require_fit(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        field: str,
        num_rows: int = 1,
        max_tokens: int = 0,
        *,
        is_here: bool = True,
    ) -> None:
        """Raise ApiError 400 if prompts with their answers can never fit into the blocks that their tenant can have.

        503 if they don't fit with its present share of a quota. ``field``: of the request, which says how much it is.
        ``is_here``: False if other replicas may serve it, whose pools may be larger.
        """
        room, size = self.quotas.room(namespace.tenant), self.engine.limits.block_size
        if not is_here:
            room = Room(room.own, None, MAX_BLOCKS)
        needed = blocks_needed(keys, num_rows, max_tokens, size)
        if needed > room.most and "publish" in self.engine.abilities:
            based = based_blocks(self.cache, namespace, keys)
            needed = blocks_needed(keys, num_rows, max_tokens, size, based)
        room.require(needed, size, field)

    def require(self, ability: Ability) -> None:
        """Raise ApiError unless the engine can do what a request needs."""
        if ability not in self.engine.abilities:
            raise not_supported(ability)

    def namespace(self, tenant: str, salt: str, adapter: str | None) -> Namespace:
        """Return the namespace of a request. Raises ApiError if the tenant can't be served now."""
        own = self.keyring.settings.get(tenant)
        refuses = own is not None and own.on_unconfirmed_generation == "refuse"
        if refuses and not self.fleet.coordinator.knows_generations:
            raise generation_unconfirmed()
        return self.engine.namespace(tenant, adapter=adapter, salt=salt)

    def current(self, namespace: Namespace) -> Namespace:
        """Return the namespace with the present version of the weights, for work that waited for the model."""
        return namespace._replace(weights=self.engine.weights_version)

    def promised_dates(self, tenant: str, today: str) -> tuple[str, ...]:
        """Return dates before today on which something was promised to a tenant that still holds; two at most."""
        return self.promises.dates.before(tenant, today)

    def as_promised(self, tenant: str, body: RequestBody, prompt: Prompt) -> Prompt:
        """Return the prompt or one of its ``others``: the one of which promises that hold cover most.

        If several are covered alike, it is the one with the newest date.
        """
        salt, adapter = getattr(body, "salt", ""), getattr(body, "adapter", None)
        namespace = self.engine.namespace(tenant, adapter=adapter, salt=salt)
        dates = [each.date for each in (prompt, *prompt.others)]

        def num_covered(each: Prompt) -> int:
            if each.num_shared is None:
                return self.promises.dates.cover(namespace, dates, each.key).num_bytes
            shared = each.num_shared * TOKEN_BYTES
            return self.promises.dates.cover(namespace, [each.date], each.key, shared).num_bytes

        return replace(max((prompt, *prompt.others), key=num_covered), others=())

    def replicas(self) -> list[ReplicaInfo]:
        """Return this replica, and all other known ones."""
        return self.fleet.coordinator.replicas()

    def routed_to(self, tenant: str, body: RouteRequest) -> Namespace:
        """Return the namespace of a prompt for routing; its model may have the name that completions use.

        Raises ApiError.
        """
        namespace = self.namespace(tenant, body.salt, body.adapter)
        if body.model not in (None, self.model_name, namespace.model):
            namespace = namespace._replace(model=body.model, weights=self.router.newest_weights(body.model))
        return namespace

    def _resident(self, namespace: Namespace, prompt_key: bytes) -> int:
        return self.cache.match(self.current(namespace), prompt_key).num_tokens

    def _prefetch(self, namespace: Namespace, prompt_key: bytes) -> None:
        """Let the cache prepare for a prompt that a client will send here."""
        if isinstance(self.cache, Prefetching):
            self.cache.prefetch(self.current(namespace), prompt_key)

    def owes(self, tenant: str) -> bool:
        """Whether a disk here may still have records of a tenant that a purge or a clear was to destroy."""
        return bool(pending_of(self.cache, tenant))

    def sickness(self) -> list[str]:
        """Return the reasons to replace this process; empty if it is healthy."""
        try:
            reasons = self.engine.health()
        except IntegrityError as error:
            reasons = []
            self.failures.note(error)
        if self.failures.has_broken_laws:
            reasons.append("integrity: an invariant of the cache is broken")
        health = self.fleet.coordinator.health()
        if health.state in ("fenced", "failed"):
            reasons.append(f"coordination: {health.state}")
        return reasons

    def warnings(self) -> list[str]:
        """Return what an operator should look at, without names, numbers or reasons: anybody may read it."""
        text = "tiers: {} can't be used until the next start, and requests go on without it; the log says why"
        return [*self.keys.warnings(), *map(text.format, self._unusable)]

    def tier_verdicts(self) -> dict[str, Verdict]:
        """Return whether each tier below the cache is useful, and why not. Any thread."""
        cache = self.cache
        return (
            self.tier_watch.verdicts(cache.tier_counts(), cache.tier_details())
            if isinstance(cache, Tiered)
            else {}
        )

    def coordination(self) -> str:
        """Return the state of this process in the fleet."""
        return self.fleet.coordinator.health().state

    def unreadiness(self) -> list[str]:
        """Return the reasons to send no requests here now; empty if it is ready."""
        reasons = self.sickness()
        if self.drain.is_stopping:
            reasons.append("stopping")
        health = self.fleet.coordinator.health()
        if health.state not in ("ok", "unavailable", "fenced", "failed"):
            reasons.append(f"coordination: {health.state}")
        elif health.state == "unavailable" and not self.fleet.coordinator.info().epoch:
            reasons.append("coordination: not registered yet")
        return reasons

    async def upkeep(self) -> None:
        """Until cancelled, repeat: report the load to the coordinator, apply quotas and pins of the fleet."""
        while True:
            try:
                await self._look_after()
            except (CoordinationError, CapacityError, ControlError):
                pass  # an outage, not enough blocks, or an engine that starts again: try again next time
            except Exception as error:  # noqa: BLE001 a bug in radixkv must not end upkeep for good
                self.failures.log(error)
            await asyncio.sleep(_UPKEEP_EVERY_S)

    async def _look_after(self) -> None:
        version = self.engine.weights_version
        self.fleet.coordinator.report_weights(version)
        self.fleet_pins.weights_changed(version)
        self.fleet_pins.tick()
        self.warm_jobs.table.sweep()
        with suppress(CoordinationError):  # try again next time
            await self.purges.purge_removed()
        stats = await self.threads.ask_cache(None, self.cache.stats)
        queued, whole = self._num_queued_tokens(1.0), self._num_queued_tokens(0.0)
        load = Load(queued, stats.sequence_blocks, stats.resident_blocks, max(queued - whole, 0))
        self.fleet.coordinator.report_load(load)
        await self.threads.administer(self.quotas.step)
        await self.threads.administer(self._sample)
        if self.clock() >= self._looks_at:
            self._looks_at = self.clock() + _LOOK_EVERY_S
            for tier, verdict in self.tier_watch.unsaid(self.tier_verdicts()).items():
                _log.warning("tier %s is %s", tier, verdict)

    def _num_queued_tokens(self, missing: float) -> int:
        """Return the prompt tokens to compute before those of a new request, of which this share isn't resident."""
        known = self.engine.prefill_tokens(missing) if isinstance(self.engine, Queueing) else None
        return (
            self.engine_loop.num_prefill_tokens
            if known is None
            else self.engine_loop.num_unbegun_tokens + known
        )

    def _sample(self) -> None:
        """Tell the meter what each tenant, and the account of bases, has resident now. O(tenants)."""
        if self.clock() < self._sample_at:
            return
        limits, has_bases = self.engine.limits, "publish" in self.engine.abilities
        self._sample_at = self.clock() + (_ASK_EVERY_S if limits.cache_waits else 0.0)
        names = {tenant: tenant for tenant in self.keyring.tenants} | (
            {OPERATOR: OPERATOR_ACCOUNT} if has_bases else {}
        )
        levels = {}
        for tenant, account in names.items():
            stats = self.cache.tenant_stats(account)
            held, pinned = stats.resident_blocks, stats.pinned_blocks
            levels[tenant] = Level(held * limits.block_size, pinned * limits.block_size)
        self.meter.sample(levels)

    async def close(self) -> None:
        """Cancel jobs and work, leave the fleet. The event loop keeps running during this.

        If a disk still has what a purge was to destroy, ``left_undone`` says so.
        """
        self.intake.close()
        await anyio.to_thread.run_sync(self.keys.close)
        await self.warm_jobs.table.close()
        await self.fleet_pins.close()
        await anyio.to_thread.run_sync(self.engine_loop.close)
        await anyio.to_thread.run_sync(self.meter.close)
        await self.fleet.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.events is not None:
            await anyio.to_thread.run_sync(self.events.close)
        if isinstance(self.engine, Closing):
            try:
                await anyio.to_thread.run_sync(self.engine.close)
            except TierError as error:
                self.left_undone = error

    def _levels(self) -> list[tuple[str, str, Callable[[], float]]]:
        return [
            (
                "model_work_unfinished",
                "Work for the model that is waiting or running",
                lambda: self.engine_loop.num_unfinished,
            ),
            (
                "warm_jobs_unfinished",
                "Warm jobs queued or running",
                lambda: self.warm_jobs.table.num_unfinished,
            ),
            (
                "warm_jobs_kept",
                "Warm jobs in this process, at most max_jobs a tenant",
                lambda: self.warm_jobs.table.num_kept,
            ),
            (
                "fleet_pin_bytes",
                "Memory of the fleet's pins: prompts and contents; at most 20 bytes a token of the pool and tenant",
                lambda: self.fleet_pins.num_bytes,
            ),
            (
                "bodies_waiting",
                "Bodies that wait for a process to read them",
                lambda: self.intake.num_waiting,
            ),
            (
                "router_predicted_bytes",
                "Memory of the index of predicted prefixes",
                lambda: self.router.predicted_bytes,
            ),
            (
                "signed_requests_kept",
                "Remembered nonces of other replicas' requests, at most 65,536: each is accepted once",
                lambda: self.fleet.num_nonces,
            ),
            (
                "event_queue_bytes",
                "Changes of the cache that wait to be published as KV events; at most 64 MiB",
                lambda: 0 if self.events is None else self.events.journal.queued_bytes,
            ),
            (
                "event_overflows",
                "Times that KV events were dropped, and everything was stated again",
                lambda: 0 if self.events is None else self.events.journal.num_overflows,
            ),
            *reload_levels(lambda: self.reloads),
            *key_levels(lambda: self.keys),
            *usage_levels(lambda: self.meter.log_state),
            (
                "has_broken_laws",
                "1 after an invariant of the cache was found broken: a bug",
                lambda: self.failures.has_broken_laws,
            ),
        ]

    def _rules(self, time_zone: str | None, lines: tuple[LineRule, ...]) -> PromptRules:
        limits = self.engine.limits
        pool_tokens = limits.num_cache_tokens
        vocab_size = min(limits.vocab_size, self.tokenizer.vocab_size)
        max_tokens = min(limits.max_model_len, pool_tokens)
        return PromptRules(
            vocab_size, max_tokens, limits.block_size, pool_tokens, self.tokenizer.roles, time_zone, lines
        )
