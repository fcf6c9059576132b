"""``create_app``: the service as a Starlette application, and the table of its endpoints.

Access: prompts and caches need a tenant's key (the operator owns no namespace and gets 403). Counts and replicas accept
either key (a tenant sees its own). ``/metrics``, keys, tenants and bases need the operator's key (a tenant gets 403).
Health, the OpenAPI document and the pages of ``/docs`` need no key. ``/internal/…`` accepts only requests signed with
the fleet secret, and exists only if a fleet is configured. Anything that a tenant may not know of answers 404, with the
same bytes as something that doesn't exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.service.arrivals import Arrivals
from radixkv.service.core import Service
from radixkv.service.dialects import dialect_of
from radixkv.service.endpoint import (
    ENCODED_SLASH,
    Call,
    Endpoint,
    H,
    has_encoded_slash,
    new_request_id,
    serve,
)
from radixkv.service.endpoints import (
    admin,
    bases,
    chat,
    completions,
    contents,
    docs,
    messages,
    models,
    pins,
    prefixes,
    responses,
    routing,
    tokenizing,
    usage,
)
from radixkv.service.openapi import document
from radixkv.service.problems import ApiError, Json, internal, not_found
from radixkv.service.prompts import PromptRules

SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


_SECURITY = tuple((name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items())
_ONLY_HTTPS = (b"strict-transport-security", b"max-age=31536000")
_CONTENTS = "/v1/cachedContents"
_MODELS = "/v1/models"
_GOOGLES_HEADER = b"x-goog-api-client"
_GEMINI_METHODS = (":generateContent", ":streamGenerateContent", ":countTokens")


class _Segment(StringConvertor):
    """One segment of a path. It may be empty: an empty segment is no tenant's id, and is refused as one."""

    regex = "[^/]*"


class _Model(StringConvertor):
    """A model's name at the end of one of Gemini's paths. With a method behind it, it is another path."""

    regex = f"[^/]+(?<!{')(?<!'.join(_GEMINI_METHODS)})"


register_url_convertor("segment", _Segment())
register_url_convertor("model", _Model())

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]

ENDPOINTS: Sequence[Endpoint[Service]] = (
    *prefixes.ENDPOINTS,
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *messages.ENDPOINTS,
    *contents.ENDPOINTS,
    *models.ENDPOINTS,
    *tokenizing.ENDPOINTS,
    *pins.ENDPOINTS,
    *routing.ENDPOINTS,
    *admin.ENDPOINTS,
    *usage.ENDPOINTS,
    *bases.ENDPOINTS,
)


def create_app(service: Service, *, version: str = "0") -> Starlette:
    """Make the application that serves ``service``, and closes it when the application ends."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.keys.follow()
        upkeep = asyncio.create_task(service.upkeep())
        try:
            yield
        finally:
            upkeep.cancel()
            await service.close()

    served = [each for each in ENDPOINTS if not (each.internal and service.fleet.is_alone)]
    return make_app(service, served, version, lifespan)


def make_app(
    host: H, endpoints: Sequence[Endpoint[H]], version: str, lifespan: Lifespan | None = None
) -> Starlette:
    """Make an application of some endpoints, with ``/openapi.json`` about them and ``/docs``.

    Raises AssertionError for a request schema that doesn't bound its body.
    """
    for endpoint in endpoints:
        if endpoint.body is not None:
            host.intake.max_bytes(endpoint.body)
    described = _openapi(endpoints, version, host.rules)
    routes = [_route(host, endpoint) for endpoint in (*endpoints, described)]
    routes += [_route(host, endpoint) for endpoint in docs.ENDPOINTS]
    app = Starlette(
        routes=routes,
        exception_handlers={
            404: _unknown_path,
            405: _wrong_method,
            Exception: _crashed,
        },
        middleware=[
            Middleware(SecurityHeaders),
            Middleware(EncodedSlashes),
            Middleware(Versions),
            Middleware(Arrivals, host, (*endpoints, described, *docs.ENDPOINTS)),
        ],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


async def _unknown_path(request: Request, error: Exception) -> Response:
    """Answer 404 for an unknown path, in the form of the client's provider."""
    return _refused(request, not_found("path"))


def _refused(request: Request, error: ApiError) -> Response:
    return dialect_of(request.scope["path"], request.headers).answer(error, new_request_id())


async def _wrong_method(request: Request, error: Exception) -> Response:
    """Answer 405, in the form of the client's provider, with the allowed methods."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
    problem = ApiError(
        405, "method_not_allowed", "this path has no such method", field="method", value=request.method,
        allowed=allowed, headers={"Allow": allowed},
    )  # fmt: skip
    return _refused(request, problem)


async def _crashed(request: Request, error: Exception) -> Response:
    """Answer 500 for a bug in radixkv, without details."""
    return internal().response()


class SecurityHeaders:
    """Adds SECURITY_HEADERS to every answer that doesn't set them: the client may be a browser."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, with the headers."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = list(message["headers"])
                names = {name.lower() for name, _ in given}
                added = _SECURITY if scope["scheme"] != "https" else (*_SECURITY, _ONLY_HTTPS)
                message["headers"] = given + [each for each in added if each[0] not in names]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class EncodedSlashes:
    """Keeps a slash that the client encoded inside its segment: ``/v1/tenants/a%2Fkeys`` isn't ``…/a/keys``.

    Servers decode ``path``, so without this the first path would be routed as the second. In ``path`` the slash stays
    ``%2F``; ``Call.path_text`` decodes it. Cost for all other requests: one search in the path.
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


class Versions:
    """Serves Gemini's paths under ``/v1`` as under ``/v1beta``: clients may be set to either.

    Models are at ``/v1/models`` for all providers. Google's client tells itself by its headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, at the path under ``/v1beta``."""
        path = scope.get("path", "")
        is_model = path == _MODELS or path.startswith(f"{_MODELS}/")
        is_method = is_model and (
            path.endswith(_GEMINI_METHODS) or any(name == _GOOGLES_HEADER for name, _ in scope["headers"])
        )
        if is_method or path == _CONTENTS or path.startswith(f"{_CONTENTS}/"):
            scope = {**scope, "path": path.replace("/v1/", "/v1beta/", 1)}
        await self._app(scope, receive, send)


def _route(host: H, endpoint: Endpoint[H]) -> Route:
    async def answer(request: Request) -> Response:
        return await serve(host, endpoint, request)

    path = endpoint.path.replace("{tenant}", "{tenant:segment}")
    if path.endswith("/v1beta/models/{model}"):
        path = path.replace("{model}", "{model:model}")
    return Route(path, answer, methods=[endpoint.method], name=endpoint.handler.__name__)


def _openapi(endpoints: Sequence[Endpoint[H]], version: str, rules: PromptRules) -> Endpoint[H]:
    rendered: list[bytes] = []

    async def openapi(call: Call[H]) -> Response:
        """Return this document: OpenAPI 3.1."""
        return Response(rendered[0], media_type="application/json")

    endpoint = Endpoint("GET", "/openapi.json", openapi, "Get this document", "anyone", {200: dict})
    rendered.append(bytes(Json(document([*endpoints, endpoint], version, rules)).body))
    return endpoint
