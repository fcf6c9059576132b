"""A gateway for OpenAI-compatible clients: each request goes to the replica that a router ranks first.

    radixkv route --redis redis://127.0.0.1:6379 --fleet-secret secret --port 8500
    python examples/gateway.py http://127.0.0.1:8500 8600

The gateway asks the router's ``/v1/route`` with the client's own key, so a tenant is routed only by its own prefixes.
Then it proxies the request, including streams. The next best replica gets the request if one can't be reached,
answers 429 or 5xx, or hangs before the first byte. A replica hangs if its ``/healthz`` doesn't answer for two
seconds. If the router can't be reached, the last known replicas take turns. A client that disconnects also ends the
request at the replica. The header ``x-radixkv-replica`` of an answer names the replica.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

NOT_FORWARDED = {
    "host",
    "date",
    "content-length",
    "connection",
    "transfer-encoding",
    "content-encoding",
    "accept-encoding",
}
TIMEOUT = httpx.Timeout(None, connect=2.0)
LIMITS = httpx.Limits(max_connections=None)
LOOK_EVERY_S = ANSWERS_WITHIN_S = 2.0


class Gateway:
    """Proxies requests to replicas, in the router's order."""

    def __init__(self, router_url: str) -> None:
        self.router_url = router_url
        self.client = httpx.AsyncClient(timeout=TIMEOUT, limits=LIMITS, trust_env=False)
        self.last_known: list[tuple[str, str]] = []
        self.turn = itertools.count()

    async def proxy(self, request: Request) -> Response:
        """Answer a request from the first replica that can."""
        body = await request.body()
        headers = [(name, value) for name, value in request.headers.items() if name not in NOT_FORWARDED]
        found = await self.candidates(request, body)
        if isinstance(found, Response):
            return found
        said = {"error": {"type": "no_replica", "message": "no replica could be reached"}}
        refusal: Response = JSONResponse(said, 503)
        for name, address in found:
            url = httpx.URL(address + request.url.path, query=request.url.query.encode() or None)
            sent = self.client.build_request(request.method, url, content=body, headers=headers)
            try:
                answer = await self.answer(sent, address, request)
                if answer.status_code != 429 and answer.status_code < 500:
                    return streamed(answer, name)
                await answer.aread()
            except httpx.TransportError:
                continue
            except ClientDisconnect:
                return Response(status_code=499)  # the client doesn't read it
            refusal = Response(answer.content, answer.status_code, kept(answer, name))
        return refusal

    async def answer(self, sent: httpx.Request, address: str, request: Request) -> httpx.Response:
        """Return a replica's answer once it begins. Raises TransportError and ClientDisconnect.

        A replica that hangs raises TransportError too.
        """
        sending = asyncio.create_task(self.client.send(sent, stream=True))
        try:
            while not (await asyncio.wait([sending], timeout=LOOK_EVERY_S))[0]:
                if await request.is_disconnected():
                    raise ClientDisconnect
                await self.client.get(f"{address}/healthz", timeout=ANSWERS_WITHIN_S)
            return sending.result()
        finally:
            sending.cancel()

    async def candidates(self, request: Request, body: bytes) -> list[tuple[str, str]] | Response:
        """Names and addresses of replicas, the best first; or the router's answer if no replica is known."""
        headers = {"authorization": request.headers.get("authorization", "")}
        try:
            found = await self.client.post(
                f"{self.router_url}/v1/route", json=question(body), headers=headers, timeout=2.0
            )
        except httpx.HTTPError:
            found = None
        if found is not None and found.status_code == 200:
            ranked = [(each["replica"], each["address"]) for each in found.json()["candidates"]]
            self.last_known = [(name, address) for name, address in ranked if address]
            return self.last_known
        if not self.last_known and found is not None:
            return Response(found.content, found.status_code, kept(found))
        start = next(self.turn) % max(len(self.last_known), 1)
        return self.last_known[start:] + self.last_known[:start]


def question(body: bytes) -> dict[str, Any]:
    """The router's request for an OpenAI request: its (first) prompt or messages, and its namespace."""
    try:
        fields = json.loads(body)
    except ValueError:
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    asked = {name: fields[name] for name in ("salt", "adapter", "messages") if fields.get(name)}
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        asked["prompt"] = prompt
    elif prompt:
        asked["token_ids"] = prompt
    return asked


def kept(answer: httpx.Response, replica: str | None = None) -> dict[str, str]:
    """The headers of an answer that are passed on."""
    found = {name: value for name, value in answer.headers.items() if name not in NOT_FORWARDED}
    return found if replica is None else {**found, "x-radixkv-replica": replica}


def streamed(answer: httpx.Response, replica: str) -> StreamingResponse:
    """A replica's answer, passed on as it arrives."""
    background = BackgroundTask(answer.aclose)
    return StreamingResponse(
        answer.aiter_bytes(), answer.status_code, kept(answer, replica), background=background
    )


def make_app(router_url: str) -> Starlette:
    """The gateway as an application."""
    gateway = Gateway(router_url)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await gateway.client.aclose()

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(
        routes=[Route(path, gateway.proxy, methods=["POST"]) for path in paths], lifespan=lifespan
    )


if __name__ == "__main__":
    url, port = sys.argv[1:]
    uvicorn.run(make_app(url), host="127.0.0.1", port=int(port), log_level="warning")
