"""``create_app``: the service as a Starlette application, and the table of its endpoints.

Who may call what: prompts and caches are for tenants' keys (the operator owns no namespace and gets 403), counts
and replicas for either (a tenant sees its own), ``/metrics``, keys, tenants and bases for the operator (a tenant gets
403); health and the interface's description need no key; ``/internal/…`` takes only requests that the fleet's secret
signed, and exists only where a fleet is configured. What a tenant may not know of answers 404, byte for byte like
what doesn't exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.service.core import Service
from radixkv.service.endpoint import ENCODED_SLASH, Call, Endpoint, Host, has_encoded_slash, serve
from radixkv.service.endpoints import admin, bases, pins, prefixes, routing
from radixkv.service.endpoints.completions import completions
from radixkv.service.fleet.peers import PROVE_PATH, PURGE_PATH, WARM_PATH
from radixkv.service.framing import Framing
from radixkv.service.openapi import document
from radixkv.service.problems import Json
from radixkv.service.prompts import PromptRules
from radixkv.service.schemas.completions import CompletionReply, CompletionRequest
from radixkv.service.schemas.fleet import Challenge, ProofReply, ToldPurge
from radixkv.service.schemas.prompts import ClearReply, LookupReply, LookupRequest
from radixkv.service.schemas.tenants import OperatorStatsReply, TenantStatsReply
from radixkv.service.schemas.warming import (
    FleetWarmReply,
    JobAccepted,
    JobReply,
    OrderRequest,
    WarmReply,
    WarmRequest,
)

SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class _Segment(StringConvertor):
    """One segment of a path, the empty one too: that is no tenant's id, and refused as one."""

    regex = "[^/]*"


register_url_convertor("segment", _Segment())

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]

ENDPOINTS: Sequence[Endpoint] = (
    Endpoint(
        "POST",
        "/v1/warm",
        prefixes.warm,
        "Warm a prefix",
        "tenant",
        {200: WarmReply | FleetWarmReply, 202: JobAccepted},
        body=WarmRequest,
        headers={"Idempotency-Key": "repeated with the same one, a warm is the same job"},
        errors=(409, 429, 503),
    ),
    Endpoint(
        "GET",
        "/v1/warm/{job}",
        prefixes.warm_job,
        "State of a warm job",
        "tenant",
        {200: JobReply},
        errors=(404, 503),
    ),
    Endpoint(
        "POST",
        "/v1/lookup",
        prefixes.lookup,
        "Look a prefix up",
        "tenant",
        {200: LookupReply},
        body=LookupRequest,
        errors=(503,),
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        "Complete prompts",
        "tenant",
        {200: {"application/json": CompletionReply, "text/event-stream": "events"}},
        body=CompletionRequest,
        errors=(404, 409, 429, 503),
    ),
    Endpoint(
        "DELETE",
        "/v1/cache",
        prefixes.clear,
        "Forget namespaces",
        "tenant",
        {200: ClearReply},
        query={"salt": "only namespaces with this salt", "adapter": "only namespaces of this adapter"},
        errors=(404, 422),
    ),
    Endpoint(
        "GET",
        "/v1/stats",
        prefixes.stats,
        "Counts",
        "either",
        {200: TenantStatsReply | OperatorStatsReply},
        errors=(422,),
    ),
    *pins.ENDPOINTS,
    *routing.ENDPOINTS,
    *admin.ENDPOINTS,
    *bases.ENDPOINTS,
    Endpoint(
        "POST",
        WARM_PATH,
        prefixes.warm_for_replica,
        "Warm for another replica",
        "replica",
        {202: JobAccepted},
        body=OrderRequest,
        internal=True,
    ),
    Endpoint(
        "POST",
        PURGE_PATH,
        prefixes.purge_for_replica,
        "Hear of a purge",
        "replica",
        {204: None},
        body=ToldPurge,
        internal=True,
    ),
    Endpoint(
        "POST",
        PROVE_PATH,
        prefixes.prove,
        "Answer a challenge",
        "replica",
        {200: ProofReply},
        body=Challenge,
        internal=True,
    ),
)


def create_app(service: Service, *, version: str = "0") -> Starlette:
    """The application that serves ``service``, and closes it when the application ends."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        upkeep = asyncio.create_task(service.upkeep())
        try:
            yield
        finally:
            upkeep.cancel()
            await service.close()

    served = [each for each in ENDPOINTS if not (each.internal and service.fleet.is_alone)]
    return make_app(service, served, version, lifespan)


def make_app(
    host: Host, endpoints: Sequence[Endpoint], version: str, lifespan: Lifespan | None = None
) -> Starlette:
    """An application of some endpoints, and ``/openapi.json`` about them.

    Raises AssertionError for a body whose schema doesn't bound it.
    """
    for endpoint in endpoints:
        if endpoint.body is not None:
            host.intake.max_bytes(endpoint.body)
    app = Starlette(
        routes=[
            _route(host, endpoint) for endpoint in [*endpoints, _openapi(endpoints, version, host.rules)]
        ],
        exception_handlers={
            404: prefixes.unknown_path,
            405: prefixes.wrong_method,
            Exception: prefixes.crashed,
        },
        middleware=[Middleware(SecurityHeaders), Middleware(Framing), Middleware(EncodedSlashes)],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class SecurityHeaders:
    """Puts SECURITY_HEADERS on every answer that doesn't have its own: a browser may be what asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, with the headers."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if scope["scheme"] == "https":
                    headers.setdefault("Strict-Transport-Security", "max-age=31536000")
            await send(message)

        await self._app(scope, receive, send_with_headers)


class EncodedSlashes:
    """Keeps a slash that the client encoded inside its segment: ``/v1/tenants/a%2Fkeys`` isn't ``…/a/keys``.

    Servers decode ``path``, so without this the one path would be routed as the other. In ``path`` the slash stays
    ``%2F``; ``Call.path_text`` decodes it. One search in the path for all other requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, with the segments as the client sent them."""
        if has_encoded_slash(scope):
            segments = scope["raw_path"].decode("ascii", "replace").split("/")
            path = "/".join(unquote(segment).replace("/", ENCODED_SLASH) for segment in segments)
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


def _route(host: Host, endpoint: Endpoint) -> Route:
    async def answer(request: Request) -> Response:
        return await serve(host, endpoint, request)

    path = endpoint.path.replace("{tenant}", "{tenant:segment}")
    return Route(path, answer, methods=[endpoint.method], name=endpoint.handler.__name__)


def _openapi(endpoints: Sequence[Endpoint], version: str, rules: PromptRules) -> Endpoint:
    described: list[dict[str, Any]] = []

    async def openapi(call: Call) -> Response:
        """This document."""
        return Json(described[0])

    endpoint = Endpoint("GET", "/openapi.json", openapi, "The interface", "anyone", {200: dict})
    described.append(document([*endpoints, endpoint], version, rules))
    return endpoint
