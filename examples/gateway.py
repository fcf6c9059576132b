"""A gateway for OpenAI-compatible clients: each request goes to the replica that a router ranks first.

    radixkv route --redis redis://127.0.0.1:6379 --fleet-secret secret --port 8500
    python examples/gateway.py http://127.0.0.1:8500 8600

Asks the router's ``/v1/route`` with the client's own key, so that a tenant is routed by its own prefixes alone, and
proxies the request, streams included. A replica that can't be reached, or answers 429 or 5xx before the
first byte, is passed over for the next best; a router that can't be reached, for the replicas last heard of, in
turn. The answer says in ``x-radixkv-replica`` who gave it.
"""

from __future__ import annotations

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
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

NOT_FORWARDED = {
    "host",
    "content-length",
    "connection",
    "transfer-encoding",
    "content-encoding",
    "accept-encoding",
}
TIMEOUT = httpx.Timeout(None, connect=2.0)


class Gateway:
    """Proxies requests to replicas, in the order that a router names."""

    def __init__(self, router_url: str) -> None:
        self.router_url = router_url
        self.client = httpx.AsyncClient(timeout=TIMEOUT, trust_env=False)
        self.last_known: list[tuple[str, str]] = []
        self.turn = itertools.count()

    async def proxy(self, request: Request) -> Response:
        """Answer one request from the first replica that can."""
        body = await request.body()
        headers = [(name, value) for name, value in request.headers.items() if name not in NOT_FORWARDED]
        answer: httpx.Response | None = None
        for name, address in await self.candidates(request, body):
            sent = self.client.build_request(
                request.method, address + request.url.path, content=body, headers=headers
            )
            try:
                answer = await self.client.send(sent, stream=True)
            except httpx.TransportError:
                continue
            if answer.status_code == 429 or answer.status_code >= 500:
                await answer.aread()
                continue
            return streamed(answer, name)
        if answer is not None:
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        return JSONResponse({"error": {"type": "no_replica", "message": "no replica could be reached"}}, 503)

    async def candidates(self, request: Request, body: bytes) -> list[tuple[str, str]]:
        """Names and addresses of replicas, the best first."""
        headers = {"authorization": request.headers.get("authorization", "")}
        try:
            found = await self.client.post(
                f"{self.router_url}/v1/route", json=question(body), headers=headers, timeout=2.0
            )
            found.raise_for_status()
        except httpx.HTTPError:
            start = next(self.turn) % max(len(self.last_known), 1)
            return self.last_known[start:] + self.last_known[:start]
        ranked = [
            (each["replica"], each["address"]) for each in found.json()["candidates"] if each["address"]
        ]
        self.last_known = ranked
        return ranked


def question(body: bytes) -> dict[str, Any]:
    """What the router is asked about an OpenAI request: its (first) prompt or messages, and its namespace."""
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


def streamed(answer: httpx.Response, replica: str) -> StreamingResponse:
    """A replica's answer, passed on as it comes."""
    kept = {name: value for name, value in answer.headers.items() if name not in NOT_FORWARDED}
    headers = {**kept, "x-radixkv-replica": replica}
    return StreamingResponse(
        answer.aiter_bytes(), answer.status_code, headers, background=BackgroundTask(answer.aclose)
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
