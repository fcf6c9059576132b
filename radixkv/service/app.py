"""``create_app``: the service as a Starlette application, and the table of its endpoints.

Who may call what: prompts and caches are for tenants' keys (the operator owns no namespace and gets 403), counts
and replicas for either (a tenant sees its own), ``/metrics`` for the operator (a tenant gets 403); health and
the interface's description need no key; ``/internal/warm`` takes only requests that the fleet's secret signed.
What a tenant may not know of answers 404, byte for byte like what doesn't exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixkv.metrics import CONTENT_TYPE
from radixkv.service import handlers
from radixkv.service.completions import completions
from radixkv.service.core import Service
from radixkv.service.endpoint import Call, Endpoint, serve
from radixkv.service.fleet import WARM_PATH
from radixkv.service.openapi import document
from radixkv.service.problems import Json
from radixkv.service.schemas import (
    ClearReply,
    CompletionReply,
    CompletionRequest,
    FleetWarmReply,
    HealthReply,
    JobAccepted,
    JobReply,
    LookupReply,
    LookupRequest,
    OperatorStatsReply,
    ReplicasReply,
    TenantStatsReply,
    WarmReply,
    WarmRequest,
)

ENDPOINTS: Sequence[Endpoint] = (
    Endpoint(
        "POST",
        "/v1/warm",
        handlers.warm,
        "Warm a prefix",
        "tenant",
        {200: WarmReply | FleetWarmReply, 202: JobAccepted},
        body=WarmRequest,
        errors=(409, 429, 503),
    ),
    Endpoint(
        "GET",
        "/v1/warm/{job}",
        handlers.warm_job,
        "State of a warm job",
        "tenant",
        {200: JobReply},
        errors=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/lookup",
        handlers.lookup,
        "Look a prefix up",
        "tenant",
        {200: LookupReply},
        body=LookupRequest,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        "Complete prompts",
        "tenant",
        {200: {"application/json": CompletionReply, "text/event-stream": "events"}},
        body=CompletionRequest,
        errors=(404, 429, 503),
    ),
    Endpoint(
        "DELETE",
        "/v1/cache",
        handlers.clear,
        "Forget namespaces",
        "tenant",
        {200: ClearReply},
        query={"salt": "only namespaces with this salt", "adapter": "only namespaces of this adapter"},
        errors=(404, 422),
    ),
    Endpoint(
        "GET",
        "/v1/stats",
        handlers.stats,
        "Counts",
        "either",
        {200: TenantStatsReply | OperatorStatsReply},
        errors=(422,),
    ),
    Endpoint(
        "GET",
        "/v1/replicas",
        handlers.replicas,
        "Replicas",
        "either",
        {200: ReplicasReply},
        query={"all": "true: those whose lease ran out too"},
        errors=(422,),
    ),
    Endpoint("GET", "/metrics", handlers.metrics, "Prometheus metrics", "operator", {200: CONTENT_TYPE}),
    Endpoint(
        "GET",
        "/healthz",
        handlers.healthz,
        "Is it well",
        "anyone",
        {200: HealthReply, 503: HealthReply},
    ),
    Endpoint(
        "GET",
        "/readyz",
        handlers.readyz,
        "Is it ready",
        "anyone",
        {200: HealthReply, 503: HealthReply},
    ),
    Endpoint(
        "POST",
        WARM_PATH,
        handlers.warm_for_replica,
        "Warm for another replica",
        "replica",
        {200: WarmReply},
        body=LookupRequest,
        internal=True,
    ),
)


def create_app(service: Service, *, version: str = "0") -> Starlette:
    """The application that serves ``service``, and closes it when the application ends."""
    endpoints = [*ENDPOINTS, _openapi(version)]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        reporting = asyncio.create_task(service.report_load())
        try:
            yield
        finally:
            reporting.cancel()
            await service.close()

    app = Starlette(
        routes=[_route(service, endpoint) for endpoint in endpoints],
        exception_handlers={
            404: handlers.unknown_path,
            405: handlers.wrong_method,
            Exception: handlers.crashed,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _route(service: Service, endpoint: Endpoint) -> Route:
    async def answer(request: Request) -> Response:
        return await serve(service, endpoint, request)

    return Route(endpoint.path, answer, methods=[endpoint.method], name=endpoint.handler.__name__)


def _openapi(version: str) -> Endpoint:
    described: list[dict[str, Any]] = []

    async def openapi(call: Call) -> Response:
        """This document."""
        return Json(described[0])

    endpoint = Endpoint("GET", "/openapi.json", openapi, "The interface", "anyone", {200: dict})
    described.append(document([*ENDPOINTS, endpoint], version))
    return endpoint
