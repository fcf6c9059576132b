"""The endpoints of prefixes and counts, in the order of a prefix's life, and those that other replicas call.

Lookups run on the event loop: a match takes microseconds and never waits for the model's thread. Where the cache is in
another process they run in threads (``Threads.ask_cache``).
"""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from starlette.responses import Response

from radixkv.coordination.store.wire import Raised
from radixkv.engines.protocol import Tiered
from radixkv.errors import ArgumentError, CoordinationError, StoreUnavailable
from radixkv.index.below import Scope
from radixkv.service.endpoint import Call, Endpoint, reply, until_disconnect
from radixkv.service.fleet.peers import PROVE_PATH, PURGE_PATH, WARM_PATH
from radixkv.service.fleet.warm_jobs import Order
from radixkv.service.problems import invalid, not_found, other_weights, store_unavailable
from radixkv.service.schemas.fleet import Challenge, ProofReply, ToldPurge
from radixkv.service.schemas.pins import PinOrder
from radixkv.service.schemas.prompts import ClearReply, LookupReply, LookupRequest
from radixkv.service.schemas.tenants import (
    OperatorStatsReply,
    PromptRuleReply,
    TenantSettings,
    TenantStatsReply,
    TierVerdictReply,
    UsageLogReply,
)
from radixkv.service.schemas.warming import (
    FleetWarmReply,
    JobAccepted,
    JobReply,
    OrderRequest,
    WarmReply,
    WarmRequest,
)
from radixkv.service.warming import Warmed

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.engines import EngineCache
    from radixkv.metering.writer import WriterState
    from radixkv.service.auth import Keyring
    from radixkv.service.core import Service
    from radixkv.service.owner import Owner

Ordered = TypeVar("Ordered", OrderRequest, PinOrder)
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


async def warm(call: Call[Service]) -> Response:
    """Compute a prefix, or join its computation. The answer comes when it is resident, or at once with a job.

    On several replicas it is always a job, with `wait` too: it continues if the client hangs up. With the header
    `Idempotency-Key` it is also a job. The same key at any replica gives the same job, as long as the job is kept.
    """
    service = call.host
    service.require("prefill")
    key = _idempotency_key(call)
    reading = await call.read(WarmRequest)
    body, prompt = reading.body, reading.prompts[0]
    namespace = service.namespace(call.tenant, body.salt, body.adapter)
    field, is_here = "prompt, messages, token_ids", body.replicas == "self"
    service.require_fit(namespace, [prompt.key], field, is_here=is_here)
    if body.wait and body.replicas == "self" and key is None:
        with service.warmer.join(namespace, prompt.key, call.owner) as share:
            warmed = await until_disconnect(call.request, share.result())
            await share.settled()
        call.owner.require(namespace)
        return reply(_warm_reply(warmed, prompt.left_out, service.clock() - call.started_at))
    order = Order(call.owner, namespace, prompt.key, prompt.left_out, body.replicas, key)
    job = await service.warm_jobs.start(order)
    if not body.wait:
        return reply(JobAccepted(job=job), 202)
    result = await until_disconnect(call.request, service.warm_jobs.result(call.owner, job))
    return reply(result.model_copy(update={"seconds": round(service.clock() - call.started_at, 6)}))


def _idempotency_key(call: Call[Service]) -> str | None:
    keys = call.request.headers.getlist("idempotency-key")
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        shown = keys[0] if len(keys) == 1 else f"{len(keys)} keys"
        allowed = "one key of 1 to 255 visible ASCII characters"
        raise invalid("Idempotency-Key is not a key", "Idempotency-Key", shown, allowed)
    return keys[0]


def _warm_reply(warmed: Warmed, left_out: int, seconds: float) -> WarmReply:
    return WarmReply(
        tokens=warmed.num_tokens,
        cached_before=warmed.num_cached,
        computed=warmed.num_computed,
        left_out=left_out,
        blocks=warmed.num_blocks,
        seconds=seconds,
    )


async def warm_for_replica(call: Call[Service]) -> Response:
    """Take part in a job for a tenant that another replica's signed request names; never asks further replicas."""
    body, owner, namespace, prompt_key = await ordered(call, OrderRequest)
    try:
        await call.host.warm_jobs.receive(owner, namespace, prompt_key, body)
    except StoreUnavailable:
        raise store_unavailable("the store of jobs can't be reached") from None
    return reply(JobAccepted(job=body.job), 202)


async def ordered(call: Call[Service], schema: type[Ordered]) -> tuple[Ordered, Owner, Namespace, bytes]:
    """Read another replica's signed order for a tenant: the body, who it belongs to, its prompt's namespace and key.

    Raises ApiError.
    """
    service, tenant = call.host, call.signed_tenant
    service.require("prefill")
    if tenant not in service.keyring.tenants:
        raise not_found("tenant")
    reading = await call.read(schema)
    body, namespace = reading.body, service.namespace(tenant, reading.body.salt, reading.body.adapter)
    if body.incarnation and service.keyring.incarnation(tenant) not in ("", body.incarnation):
        raise not_found("tenant")  # the keys file was changed, and one of the two hasn't seen it yet
    if body.weights != namespace.weights:
        raise other_weights()
    return body, service.owner(tenant, body.key_id, call.as_of), namespace, reading.prompts[0].key


async def purge_for_replica(call: Call[Service]) -> Response:
    """Forget a tenant as another replica's signed request asks, then apply what the store says."""
    told = (await call.read(ToldPurge)).body
    try:
        await call.host.purges.receive(call.signed_tenant, Raised(**told.model_dump()))
    except ArgumentError as error:
        raise invalid(str(error), "proof", None, error.allowed) from None
    except CoordinationError:
        raise store_unavailable("purged here; the store can't be reached") from None
    return Response(status_code=204)


async def prove(call: Call[Service]) -> Response:
    """Prove to another replica that this is the expected registration, before it sends anything of a tenant."""
    body = (await call.read(Challenge)).body
    return reply(ProofReply(proof=call.host.fleet.prove(body.challenge)))


async def warm_job(call: Call[Service]) -> Response:
    """Return state, progress and results of a job of the caller. Any replica answers."""
    found = await call.host.warm_jobs.reply(call.tenant, call.request.path_params["job"])
    if found is None:
        raise not_found("job")
    return reply(found)


async def lookup(call: Call[Service]) -> Response:
    """Return how much of a prompt is resident for the caller. It is cut where a warm cuts it. Changes nothing."""
    reading = await call.read(LookupRequest)
    service, body, prompt = call.host, reading.body, reading.prompts[0]
    namespace = service.namespace(call.tenant, body.salt, body.adapter)
    match = await service.threads.ask_cache(call.tenant, service.cache.match, namespace, prompt.key)
    return reply(LookupReply(matched_tokens=match.num_tokens, matched_blocks=match.num_blocks))


async def clear(call: Call[Service]) -> Response:
    """Remove the caller's namespaces on this replica: all, or those with the salt and the adapter in the query.

    On disk, all of the caller's is removed, also what lies nowhere else.
    """
    wanted = call.query("salt", "adapter")
    service, tenant, cache = call.host, call.tenant, call.host.cache

    def found() -> list[Namespace]:
        return [each for each in cache.namespaces(tenant) if _is_wanted(each, wanted)]

    cache.endings.end_waiting(tenant, **wanted)
    known = await service.threads.ask_cache(tenant, found)
    on_disk = cache if isinstance(cache, Tiered) and cache.has_disk else None
    if wanted and not known and on_disk is None:
        raise not_found("namespace")
    cleared = set(known)
    service.fleet_pins.cleared(tenant, cleared)
    num_blocks = 0
    if on_disk is None:
        for namespace in known:
            num_blocks += await service.threads.run(tenant, partial(cache.clear, namespace))
    else:
        own = service.engine.namespace(tenant, adapter=wanted.get("adapter"), salt=wanted.get("salt", ""))
        scope = Scope(tenant, own)

        def clear_all() -> int:
            on_disk.forget_in_tiers(scope, 0.0)  # from now on nothing comes from the disk
            cleared.update(found())
            num_blocks = sum(on_disk.clear(each, wait_s=0.0) for each in cleared)
            on_disk.forget_in_tiers(scope)
            return num_blocks

        num_blocks = await service.threads.run(tenant, clear_all)
    return reply(ClearReply(namespaces=len(cleared), blocks=num_blocks, owed=service.owes(tenant)))


def _is_wanted(namespace: Namespace, wanted: dict[str, str]) -> bool:
    return all(getattr(namespace, part) == text for part, text in wanted.items())


async def stats(call: Call[Service]) -> Response:
    """Return the caller's own statistics on this replica; for the operator those of all tenants."""
    call.query()
    service = call.host
    assert call.principal is not None
    tenant, ring = call.principal.tenant, service.keyring
    if tenant is not None:
        return reply(await service.threads.ask_cache(tenant, _tenant_stats, ring, service.cache, tenant))

    def everybody() -> OperatorStatsReply:
        tenants = [_tenant_stats(ring, service.cache, tenant) for tenant in ring.tenants]
        # The cache also counts the account of bases, and tenants that were removed.
        cache = {**asdict(service.cache.stats()), "num_tenants": len(tenants)}
        below = service.cache.tier_counts() if isinstance(service.cache, Tiered) else {}
        tiers = {name: dict(counts) for name, counts in below.items()}
        verdicts = {name: TierVerdictReply(**asdict(each)) for name, each in service.tier_verdicts().items()}
        log = _usage_log(service.meter.log_state)
        uses = service.intake.rule_uses
        rules = [PromptRuleReply(**asdict(each), uses=uses[each.name]) for each in service.rules.lines]
        return OperatorStatsReply(
            cache=cache,
            tenants=tenants,
            usage_log=log,
            tiers=tiers,
            tier_verdicts=verdicts,
            prompt_rules=rules,
        )

    return reply(await service.threads.administer(everybody))


def _usage_log(state: WriterState | None) -> UsageLogReply | None:
    if state is None:
        return None
    return UsageLogReply(
        written=state.num_written,
        durable=state.num_durable,
        waiting=state.num_waiting,
        lost=state.num_lost,
        errors=state.num_errors,
        skipped=state.num_skipped,
        problem=state.problem or None,
    )


def _tenant_stats(ring: Keyring, cache: EngineCache, tenant: str) -> TenantStatsReply:
    mode = ring.settings.get(tenant, TenantSettings()).mode
    return TenantStatsReply(mode=mode, **asdict(cache.tenant_stats(tenant)))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/warm",
        warm,
        "Warm a prefix",
        "tenant",
        {200: WarmReply | FleetWarmReply, 202: JobAccepted},
        body=WarmRequest,
        headers={
            "Idempotency-Key": "a warm with the same key is the same job; 1 to 255 visible ASCII characters"
        },
        errors=(409, 429, 501, 503),
    ),
    Endpoint(
        "GET",
        "/v1/warm/{job}",
        warm_job,
        "Get a warm job",
        "tenant",
        {200: JobReply},
        errors=(404, 503),
    ),
    Endpoint(
        "POST",
        "/v1/lookup",
        lookup,
        "Look up a prefix",
        "tenant",
        {200: LookupReply},
        body=LookupRequest,
        errors=(503,),
    ),
    Endpoint(
        "DELETE",
        "/v1/cache",
        clear,
        "Clear namespaces",
        "tenant",
        {200: ClearReply},
        query={"salt": "only namespaces with this salt", "adapter": "only namespaces of this adapter"},
        errors=(404, 422),
    ),
    Endpoint(
        "GET",
        "/v1/stats",
        stats,
        "Get statistics",
        "either",
        {200: TenantStatsReply | OperatorStatsReply},
        errors=(422,),
    ),
    Endpoint(
        "POST",
        WARM_PATH,
        warm_for_replica,
        "Warm for another replica",
        "replica",
        {202: JobAccepted},
        body=OrderRequest,
        internal=True,
    ),
    Endpoint(
        "POST",
        PURGE_PATH,
        purge_for_replica,
        "Receive a purge",
        "replica",
        {204: None},
        body=ToldPurge,
        internal=True,
        while_draining=True,
    ),
    Endpoint(
        "POST",
        PROVE_PATH,
        prove,
        "Answer a challenge",
        "replica",
        {200: ProofReply},
        body=Challenge,
        internal=True,
        while_draining=True,
    ),
)
