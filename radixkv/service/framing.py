"""Refuses requests with a length that can be read in two ways.

If a proxy and this server read a request's length differently, they see different requests on one connection. One
client's body is then another client's request. So ``Content-Length`` together with ``Transfer-Encoding``, and a second
``Content-Length``, are answered with 400, and the connection is closed.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.service.problems import ApiError


class Framing:
    """The middleware around an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, or with 400."""
        if scope["type"] == "http":
            names = [name for name, _ in scope["headers"]]
            lengths, encodings = names.count(b"content-length"), names.count(b"transfer-encoding")
            if lengths + encodings > 1:
                await _refused().response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refused() -> ApiError:
    return ApiError(
        400,
        "ambiguous_length",
        "the request states its length more than once",
        field="content-length",
        allowed="one of Content-Length and Transfer-Encoding, once",
        headers={"Connection": "close"},
    )
