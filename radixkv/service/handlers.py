"""What each endpoint does, except completions. One function an endpoint, in the order of a prefix's life.

Lookups run on the event loop: a match takes microseconds and never waits for the model's thread.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from radixkv.errors import RadixKVError
from radixkv.namespaces import Namespace
from radixkv.service.endpoint import Call, reply, until_disconnect
from radixkv.service.fleet import WARM_PATH, own_outcome
from radixkv.service.jobs import Job
from radixkv.service.problems import ApiError, Json, not_found
from radixkv.service.prompts import Ids, prefix_of
from radixkv.service.schemas import (
    ClearReply,
    FleetWarmReply,
    JobAccepted,
    LookupReply,
    LookupRequest,
    OperatorStatsReply,
    ReplicaOutcome,
    TenantStatsReply,
    WarmReply,
    WarmRequest,
)
from radixkv.service.warming import Warmed, Warming
from radixkv.service.worker import Busy

if TYPE_CHECKING:
    from radixkv.service.core import Service


async def warm(call: Call) -> Response:
    """Compute a prefix, or join one under way; answer when it is resident, or with a job."""
    body = call.read(WarmRequest)
    service = call.service
    prefix = await prefix_of(body, service.tokenizer, service.rules)
    namespace = service.namespace(call.tenant, body.salt, body.adapter)
    order = _Order(service, namespace, prefix.ids, prefix.left_out, body.replicas == "all", call.started_at)
    with ExitStack() as shares:
        warming = shares.enter_context(service.warmer.join(namespace, prefix.ids))
        if body.wait:
            return reply(await until_disconnect(call.request, order.run(warming)))
        job, held = Job(warming), shares.pop_all()
    try:
        service.jobs.start(call.tenant, job, lambda job: order.run_job(job, held))
    except Busy:
        held.close()
        raise
    return reply(JobAccepted(job=job.id), 202)


class _Order:
    """A warm as one client asked for it: where, and what of its prompt is left out."""

    def __init__(
        self,
        service: Service,
        namespace: Namespace,
        ids: Ids,
        left_out: int,
        everywhere: bool,
        started_at: float,
    ) -> None:
        self.service, self.namespace, self.ids = service, namespace, ids
        self.left_out, self.everywhere, self.started_at = left_out, everywhere, started_at

    async def run(self, warming: Warming) -> WarmReply | FleetWarmReply:
        """Wait for the prefix here, and for the other replicas if they were asked for."""
        if not self.everywhere:
            return await self._here(warming)
        others = asyncio.create_task(self.service.fleet.warm_others(self.namespace, self.ids))
        try:
            return await self._everywhere(warming, others)
        finally:
            others.cancel()

    async def _everywhere(
        self, warming: Warming, others: asyncio.Task[list[ReplicaOutcome]]
    ) -> FleetWarmReply:
        """All outcomes; a failure here is this replica's outcome, and the answer only if all others failed too."""
        name = self.service.fleet.coordinator.replica_id
        try:
            here = await self._here(warming)
            own = own_outcome(name, here)
        except RadixKVError as error:
            outcomes = await others
            if not any(each.state == "done" for each in outcomes):
                raise
            here = self._reply(Warmed(0, 0, 0))
            own = ReplicaOutcome(replica=name, state="failed", error=self.service.problem(error).type)
        return FleetWarmReply(**here.model_dump(), replicas=[own, *await others])

    async def run_job(self, job: Job, held: ExitStack) -> WarmReply | FleetWarmReply:
        """The same for a job, which holds its share until the end."""
        with held:
            return await self.run(job.warming)

    async def _here(self, warming: Warming) -> WarmReply:
        return self._reply(await warming.result())

    def _reply(self, warmed: Warmed) -> WarmReply:
        return WarmReply(
            tokens=warmed.num_tokens,
            cached_before=warmed.num_cached,
            computed=warmed.num_computed,
            left_out=self.left_out,
            blocks=warmed.num_blocks,
            seconds=self.service.clock() - self.started_at,
        )


async def warm_for_replica(call: Call) -> Response:
    """Warm for a tenant that another replica's signed request names; never asks further replicas."""
    service = call.service
    tenant = service.fleet.tenant_of(call.request.headers, WARM_PATH, call.body)
    if tenant not in service.keyring.tenants:
        raise not_found("tenant")
    body = call.read(LookupRequest)
    prefix = await prefix_of(body, service.tokenizer, service.rules)
    namespace = service.namespace(tenant, body.salt, body.adapter)
    order = _Order(service, namespace, prefix.ids, prefix.left_out, False, call.started_at)
    with service.warmer.join(namespace, prefix.ids) as warming:
        return reply(await until_disconnect(call.request, order.run(warming)))


async def warm_job(call: Call) -> Response:
    """State and progress of a job of the caller's."""
    job = call.service.jobs.get(call.tenant, call.request.path_params["job"])
    if job is None:
        raise not_found("job")
    return reply(job.reply())


async def lookup(call: Call) -> Response:
    """How much of a prompt is resident for the caller; it is cut where warm cuts it. Counts and touches nothing."""
    body = call.read(LookupRequest)
    service = call.service
    prefix = await prefix_of(body, service.tokenizer, service.rules)
    match = service.cache.match(service.namespace(call.tenant, body.salt, body.adapter), prefix.ids)
    return reply(LookupReply(matched_tokens=match.num_tokens, matched_blocks=match.num_blocks))


async def clear(call: Call) -> Response:
    """Forget the caller's namespaces: all, or those with the salt and the adapter in the query."""
    wanted = call.query("salt", "adapter")
    service = call.service
    found = [
        namespace
        for namespace in service.cache.namespaces(call.tenant)
        if wanted.get("salt", namespace.salt) == namespace.salt
        and wanted.get("adapter", namespace.adapter) == namespace.adapter
    ]
    if wanted and not found:
        raise not_found("namespace")
    num_blocks = 0
    for namespace in found:
        service.warmer.forget(namespace)
        num_blocks += await anyio.to_thread.run_sync(service.cache.clear, namespace)
    return reply(ClearReply(namespaces=len(found), blocks=num_blocks))


async def stats(call: Call) -> Response:
    """The caller's own counts; everybody's for the operator."""
    call.query()
    service = call.service
    assert call.principal is not None
    if call.principal.tenant is not None:
        return reply(_tenant_stats(service, call.principal.tenant))
    tenants = [_tenant_stats(service, tenant) for tenant in service.keyring.tenants]
    return reply(OperatorStatsReply(cache=asdict(service.cache.stats()), tenants=tenants))


def _tenant_stats(service: Service, tenant: str) -> TenantStatsReply:
    return TenantStatsReply(**asdict(service.cache.tenant_stats(tenant)))


async def unknown_path(request: Request, error: Exception) -> Response:
    """404 for a path that there isn't, in the shape of all errors."""
    return not_found("path").response()


async def wrong_method(request: Request, error: Exception) -> Response:
    """405, in the shape of all errors, with the methods that there are."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
    problem = ApiError(
        405, "method_not_allowed", "this path has no such method", field="method", value=request.method,
        allowed=allowed, headers={"Allow": allowed},
    )  # fmt: skip
    return problem.response()


async def crashed(request: Request, error: Exception) -> Response:
    """500 for what is a bug of ours; nothing of it is told."""
    return Json(
        {"error": ApiError(500, "internal", "an error inside the server; its log says more").body}, 500
    )
