"""What happens to a request before its endpoint: its key is looked up, and it takes its place on the event loop.

    head parsed ─▶ key, account ─▶ line (``turns``) ─▶ 429 above the tenant's share of the loop, or the endpoint

Preflights of browsers are answered behind the line too (``with_cors``).

The key decides only the account here; the endpoint checks it (``endpoint``). All requests without a valid key have one
account, those of other replicas another one until their signature is verified. The 429 is made without routing, so it
is cheap, and it stands in line as the request would. Strict tenants and the operator go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.service import turns
from radixkv.service.dialects import OWN, dialect_of
from radixkv.service.endpoint import (
    ARRIVAL,
    REQUEST_ID,
    Arrival,
    Endpoint,
    Host,
    account_of,
    arrived,
    new_request_id,
)
from radixkv.service.logs import ACCESS, log_access
from radixkv.service.problems import above_share

_PARAMETER: Final = "{"
_WAIT: Final = "radixkv.wait"
"""The name of a refused request's seconds to wait in its scope."""
_METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_EXPOSED: Final = (
    "request-id",
    "retry-after",
    "x-cache-write-refused",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-request-id",
)
"""Headers of answers that pages may read, beside those that they always may."""


class Arrivals:
    """The middleware around an application of ``endpoints``."""

    def __init__(self, app: ASGIApp, host: Host, endpoints: Sequence[Endpoint[Any]]) -> None:
        self._host, self._endpoints = host, _Endpoints(endpoints)
        self._app, self._refusal = (with_cors(each, host.cors_origins) for each in (app, self._refuse))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, in turn, or with 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = self._host
        scope[ARRIVAL] = arrival = arrived(host, scope)
        if ACCESS.disabled:
            await self._answer(scope, receive, send, arrival)
            return
        line = _AccessLine(send)
        try:
            await self._answer(scope, receive, line.send, arrival)
        finally:
            line.write(scope, arrival, self._endpoints.find(scope["method"], scope["path"]), host.clock())

    async def _answer(self, scope: Scope, receive: Receive, send: Send, arrival: Arrival) -> None:
        host = self._host
        account = account_of(host, scope["path"], arrival.key)
        if account.rank == turns.FIRST:
            scope.setdefault("state", {})[turns.READ_FIRST] = True
        tenant = None if arrival.key is None else arrival.key.principal.tenant

        async def answer() -> None:
            wait_s = 0.0 if tenant is None else host.turns.wait_s(account)
            if wait_s:
                scope[_WAIT] = wait_s
            await (self._refusal if wait_s else self._app)(scope, receive, send)

        await turns.run(host.turns, account, answer())

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait_s: float = scope[_WAIT]
        arrival: Arrival = scope[ARRIVAL]
        payer = turns.payer()
        assert payer is not None
        payer.is_refused = True
        endpoint = self._endpoints.find(scope["method"], scope["path"])
        dialect = OWN if endpoint is None else endpoint.dialect
        if endpoint is None or endpoint.has_clients_dialect:
            dialect = dialect_of(scope["path"], Headers(scope=scope), dialect)
        response = dialect.answer(above_share(wait_s), new_request_id())
        if endpoint is None:
            await response(scope, receive, send)
            return
        seconds = self._host.clock() - arrival.at
        self._host.metrics.answered(endpoint.method, endpoint.path, response.status_code, seconds)
        await response(scope, receive, send)


class _AccessLine:
    """Counts what is sent of an answer, for the access log."""

    def __init__(self, send: Send) -> None:
        self._send, self._status, self._num_bytes = send, 499, 0

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        await self._send(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
        else:
            self._num_bytes += len(message.get("body", b""))

    def write(self, scope: Scope, arrival: Arrival, endpoint: Endpoint[Any] | None, now: float) -> None:
        """Write the line. Without an endpoint the path is left out, since it is the client's own text."""
        key = arrival.key
        log_access(
            {
                "method": scope["method"] if scope["method"] in _METHODS else None,
                "path": None if endpoint is None else endpoint.path,
                "status": self._status,
                "bytes": self._num_bytes,
                "seconds": round(now - arrival.at, 6),
                "request_id": scope.get(REQUEST_ID),
                "key": None if key is None else key.prefix,
                "tenant": None if key is None else key.principal.tenant,
            }
        )


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the application with the answers to browsers whose pages are of other origins; the same without origins.

    A preflight has no key, so it takes its turn as a request without one does.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=["*"],
        expose_headers=_EXPOSED,
    )


class _Endpoints:
    """Finds the endpoint of a path without its parameters: enough for the form of an error."""

    def __init__(self, endpoints: Sequence[Endpoint[Any]]) -> None:
        self._whole: dict[tuple[str, str], Endpoint[Any]] = {}
        self._beginnings: list[tuple[str, str, Endpoint[Any]]] = []
        for each in endpoints:
            beginning, brace, _ = each.path.partition(_PARAMETER)
            if brace:
                self._beginnings.append((each.method, beginning, each))
            else:
                self._whole[each.method, each.path] = each

    def find(self, method: str, path: str) -> Endpoint[Any] | None:
        """Return the endpoint that a request goes to; None if no path begins like it. O(1) without parameters."""
        method = "GET" if method == "HEAD" else method
        found = self._whole.get((method, path))
        if found is not None:
            return found
        return next(
            (each for known, start, each in self._beginnings if known == method and path.startswith(start)),
            None,
        )
