"""Routing and known replicas: the endpoints of replicas and of routers alike.

A tenant's matches come from that tenant's namespaces alone. Loads are those of whole replicas, so only the operator
sees them. A tenant sees the order that results from them; a strict tenant sees an order that ignores loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from starlette.responses import Response

from radixkv.service.endpoint import Call, Endpoint, Host, reply
from radixkv.service.metrics import CONTENT_TYPE
from radixkv.service.problems import no_replica, refused
from radixkv.service.schemas.replicas import (
    CandidateReply,
    HealthReply,
    LoadReply,
    ReplicaReply,
    ReplicasReply,
    RouteReply,
    RouteRequest,
)

if TYPE_CHECKING:
    from radixkv.coordination import Candidate, Load, ReplicaInfo
    from radixkv.coordination.routing.replica_sources import Member

_LOOP_TOKENS = 2**16
"""Prompts of up to this many tokens are ranked on the event loop, in a millisecond or two; longer ones in a thread."""


async def route(call: Call[Host]) -> Response:
    """Rank the replicas for a prompt, the best first.

    Later rankings assume that the first one gets the prompt, and this replica prepares for it if it is that one, unless
    `predict` is false.
    """
    reading = await call.read(RouteRequest)
    body, prompt, router = reading.body, reading.prompts[0], call.host.router
    namespace = call.host.routed_to(call.tenant, body)
    own = call.host.keyring.settings.get(call.tenant)

    def rank() -> list[Candidate]:
        ranked = router.rank(
            namespace,
            prompt.key,
            cost=body.cost,
            temperature=body.temperature,
            limit=body.limit,
            ignore_load=own is not None and own.mode == "strict",
        )
        if ranked and body.predict:
            router.routed(namespace, prompt.key, ranked[0].replica.id)
        return ranked

    threads = call.host.threads
    found = await (threads.ask_cache if prompt.num_tokens <= _LOOP_TOKENS else threads.run)(call.tenant, rank)
    if not found:
        raise no_replica("no live replica that serves this model is known")
    return reply(
        RouteReply(
            prompt_tokens=prompt.num_tokens,
            model=namespace.model,
            by_load=router.is_blind,
            candidates=[_candidate(each, prompt.num_tokens) for each in found],
        )
    )


def _candidate(candidate: Candidate, num_tokens: int) -> CandidateReply:
    name, held = candidate.why.partition(":")[0], dict(candidate.matched_tokens)
    predicted = held.pop("predicted", 0)
    why = f"{name}: holds {sum(held.values())} of {num_tokens} tokens, {predicted} more predicted"
    return CandidateReply(
        replica=candidate.replica.id,
        address=candidate.replica.address,
        matched_tokens=candidate.matched_tokens,
        why=why,
    )


def _load(load: Load) -> LoadReply:
    return LoadReply(
        queued_prefill_tokens=load.queued_prefill_tokens,
        decode_blocks=load.decode_blocks,
        resident_blocks=load.resident_blocks,
        queued_cold_tokens=load.queued_cold_tokens,
    )


async def replicas(call: Call[Host]) -> Response:
    """List the replicas that this process knows. Only the operator sees their load."""
    wanted = call.query("all").get("all", "false")
    if wanted not in ("true", "false"):
        raise refused("all", wanted, None, "true or false")
    assert call.principal is not None
    source = call.host.router.source
    members, now = {each.info.id: each for each in source.members()}, source.clock()
    known = [each for each in call.host.replicas() if wanted == "true" or each.live or each.is_self]
    to_operator = call.principal.is_operator
    rows = [_replica(info, members.get(info.id), now, to_operator) for info in known]
    return reply(ReplicasReply(replicas=rows))


def _replica(info: ReplicaInfo, member: Member | None, now: float, to_operator: bool) -> ReplicaReply:
    followed = to_operator and member is not None and (member.log is not None or info.is_self)
    return ReplicaReply(
        id=info.id,
        is_self=info.is_self,
        live=info.live,
        reachable=info.reachable,
        draining=info.draining,
        address=info.address if info.proven or info.is_self else None,
        epoch=info.epoch,
        last_seq=info.last_seq if to_operator else None,
        lease_remaining_s=info.lease_remaining_s,
        lag_entries=member.num_behind if member is not None and followed else None,
        lag_s=member.lag_s(now) if member is not None and followed else None,
        staleness_s=None if member is None else member.staleness_s(now),
        load=_load(info.load) if to_operator else None,
        model=info.fingerprint,
        weights=info.weights,
        block_size=info.block_size,
        incompatible=info.incompatible,
    )


async def metrics(call: Call[Host]) -> Response:
    """Return all metrics in the text format of Prometheus."""
    await call.host.threads.ask_cache(None, call.host.metrics.read_cache)
    return Response(call.host.metrics.render(), media_type=CONTENT_TYPE)


async def healthz(call: Call[Host]) -> Response:
    """Answer 200 if this process is healthy. Replace the process if the answer is 503."""
    return _health(call, "unhealthy", call.host.sickness())


async def health(call: Call[Host]) -> Response:
    """Answer as `/healthz` does: the path that other servers have."""
    return await healthz(call)


async def readyz(call: Call[Host]) -> Response:
    """Answer 200 if requests may be sent to this process."""
    return _health(call, "not_ready", call.host.unreadiness())


def _health(call: Call[Host], otherwise: Literal["unhealthy", "not_ready"], reasons: list[str]) -> Response:
    status = otherwise if reasons else "ok"
    told = HealthReply(
        status=status,
        reasons=reasons,
        warnings=call.host.warnings(),
        coordination=call.host.coordination(),
    )
    return reply(told, 503 if reasons else 200)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/route",
        route,
        "Rank the replicas for a prompt",
        "tenant",
        {200: RouteReply},
        body=RouteRequest,
        errors=(503,),
    ),
    Endpoint(
        "GET",
        "/v1/replicas",
        replicas,
        "List replicas",
        "either",
        {200: ReplicasReply},
        query={"all": "true: also replicas whose lease has expired"},
        errors=(422,),
    ),
    Endpoint("GET", "/metrics", metrics, "Get metrics", "operator", {200: CONTENT_TYPE}),
    Endpoint(
        "GET",
        "/healthz",
        healthz,
        "Check health",
        "anyone",
        {200: HealthReply, 503: HealthReply},
    ),
    Endpoint(
        "GET",
        "/health",
        health,
        "Answer as /healthz does, at the usual path",
        "anyone",
        {200: HealthReply, 503: HealthReply},
    ),
    Endpoint(
        "GET",
        "/readyz",
        readyz,
        "Check readiness",
        "anyone",
        {200: HealthReply, 503: HealthReply},
    ),
)
