"""What happens to a request before its endpoint: its key is looked up, and it takes its place on the event loop.

    head parsed ─▶ key, account ─▶ line (``turns``) ─▶ 429 above the tenant's share of the loop, or the endpoint

The key decides only the account here; the endpoint checks it (``endpoint``). All requests without a valid key have one
account, those of other replicas another one until their signature is verified. The 429 is made without routing, so it
is cheap, and it stands in line as the request would. Strict tenants and the operator go first.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.service import turns
from radixkv.service.endpoint import ARRIVAL, Arrival, Endpoint, Host, account_of, arrived
from radixkv.service.problems import above_share

_PARAMETER: Final = "{"


class Arrivals:
    """The middleware around an application of ``endpoints``."""

    def __init__(self, app: ASGIApp, host: Host, endpoints: Sequence[Endpoint[Any]]) -> None:
        self._app, self._host, self._endpoints = app, host, _Endpoints(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, in turn, or with 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = self._host
        scope[ARRIVAL] = arrival = arrived(host, scope)
        account = account_of(host, scope["path"], arrival.key)
        if account.rank == turns.FIRST:
            scope.setdefault("state", {})[turns.READ_FIRST] = True
        tenant = None if arrival.key is None else arrival.key.principal.tenant

        async def answer() -> None:
            wait_s = 0.0 if tenant is None else host.turns.wait_s(account)
            await (
                self._refuse(wait_s, arrival, scope, receive, send)
                if wait_s
                else self._app(scope, receive, send)
            )

        await turns.run(host.turns, account, answer())

    async def _refuse(
        self, wait_s: float, arrival: Arrival, scope: Scope, receive: Receive, send: Send
    ) -> None:
        payer = turns.payer()
        assert payer is not None
        payer.is_refused = True
        endpoint = self._endpoints.find(scope["method"], scope["path"])
        error = above_share(wait_s)
        if endpoint is None:
            await error.response()(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        response = endpoint.dialect.answer(error, request_id)
        if endpoint.dialect.id_header is not None:
            response.headers.setdefault(endpoint.dialect.id_header, request_id)
        seconds = self._host.clock() - arrival.at
        self._host.metrics.answered(endpoint.method, endpoint.path, response.status_code, seconds)
        await response(scope, receive, send)


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
