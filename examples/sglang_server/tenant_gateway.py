"""A gateway that knows tenants, in front of one SGLang that knows only their salts.

    SGLANG_API_KEY=… python examples/sglang_server/tenant_gateway.py http://127.0.0.1:30000 FOLDER 8500

FOLDER has the ``engine.keys`` of the salts, and SGLang's control socket at ``control/control.sock``. The bearer key
decides the tenant (TENANTS). Tenants reach these paths and the fields in FORWARDED, and nothing else of SGLang: its
``/server_info`` counts what all tenants do, and its ``/generate`` takes any salt.

    POST /v1/completions, /v1/chat/completions      SGLang's, also as streams; ``salt`` names a cache of the tenant
    GET  /v1/models                                 SGLang's
    POST /v1/warm    prompt, salt                   compute a prompt ahead of traffic
    POST /v1/pins    prompt, salt, ttl_s            keep a resident prompt; GET lists the tenant's pins, DELETE ends one
    POST /v1/tenants/NAME/purge                     for the operator: forget a tenant, and refuse its older salts
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from radixkv.engines.control.client import ControlClient
from radixkv.errors import RadixKVError
from radixkv.signing import KeySet
from radixkv.tenancy.salt import SaltReader, make_salt

TENANTS = {"demo-acme": "acme", "demo-globex": "globex"}
"""Tenants by their keys. A service reads them from a file that only it can read."""
OPERATOR = "demo-operator"
MODEL = "sglang"
"""RADIXKV_MODEL of the SGLang."""
MAX_BODY = 2**20
"""Bytes of the longest request."""
FORWARDED = {
    *("model", "prompt", "messages", "stream", "stream_options", "n", "seed", "stop", "echo", "ignore_eos"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "top_logprobs"),
    *("response_format", "tools", "tool_choice", "return_token_ids"),
}
"""Fields that clients may set. Others can name another request, session, adapter or salt."""


class Gateway:
    """Requests of tenants, as SGLang gets them. ``url``: SGLang's. ``folder``: of its keys and its control socket."""

    def __init__(self, url: str, folder: Path, api_key: str) -> None:
        headers = {"authorization": f"Bearer {api_key}"}
        self.client = httpx.AsyncClient(base_url=url, headers=headers, timeout=300, trust_env=False)
        self.keys, self.socket = KeySet.load(folder / "engine.keys"), folder / "control" / "control.sock"
        self.generations = dict.fromkeys(TENANTS.values(), 0)

    # --- tenants

    async def generate(self, request: Request) -> Response:
        """Pass a request on with its tenant's salt, and the answer back as it comes."""
        body = await self.asked(request)
        path = request.url.path
        sent = self.client.build_request("POST", path, json=body)
        answer = await self.client.send(sent, stream=True)
        media, closing = answer.headers.get("content-type"), BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_bytes(), answer.status_code, None, media, closing)

    async def models(self, request: Request) -> Response:
        """List the models."""
        tenant_of(request)
        answer = await self.client.get("/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def warm(self, request: Request) -> Response:
        """Have SGLang compute a prompt, and one token behind it."""
        body = {**await self.asked(request), "max_tokens": 1, "stream": False}
        usage = (await self.post("/v1/completions", body))["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return JSONResponse({"tokens": usage["prompt_tokens"], "cached_before": cached})

    async def pin(self, request: Request) -> Response:
        """Keep the whole pages of a resident prompt for some seconds."""
        body = await self.asked(request, "ttl_s")
        ids = body.get("prompt")
        if isinstance(ids, str):
            ids = (await self.post("/v1/tokenize", {"prompt": ids}))["tokens"]
        where = {"model": MODEL, "cache_salt": body["cache_salt"], "ttl_s": body.get("ttl_s")}
        pin = await self.control("pin", where, ids)
        return JSONResponse(pin_answer(pin))

    async def pins(self, request: Request) -> Response:
        """List the tenant's pins."""
        found = (await self.control("pins", {"tenant": self.name_of(request)}))["pins"]
        return JSONResponse({"pins": [pin_answer(each) for each in found]})

    async def unpin(self, request: Request) -> Response:
        """End one of the tenant's pins."""
        await self.control("unpin", {"tenant": self.name_of(request), "id": request.path_params["pin"]})
        return Response(status_code=204)

    def name_of(self, request: Request) -> str:
        """The cache's name of a request's tenant. Raises HTTPException."""
        (name,) = SaltReader(self.keys).tenant_ids(tenant_of(request))
        return name

    async def asked(self, request: Request, *more: str) -> dict[str, Any]:
        """The fields of a request that are passed on, and the salt of its tenant. Raises HTTPException."""
        tenant = tenant_of(request)
        fields = await fields_of(request)
        given = fields.get("salt", fields.get("cache_salt")) or ""
        try:
            salt = make_salt(self.keys, tenant, self.generations[tenant], client_salt=given)
        except RadixKVError as error:
            raise HTTPException(400, str(error)) from None
        kept = {name: value for name, value in fields.items() if name in FORWARDED or name in more}
        return {**kept, "cache_salt": salt}

    # --- the operator

    async def purge(self, request: Request) -> Response:
        """Forget a tenant. Its requests get salts of the next generation first, so none fills the cache again."""
        tenant = request.path_params["tenant"]
        if bearer(request) != OPERATOR:
            raise HTTPException(403, "only the operator purges")
        if tenant not in self.generations:
            raise HTTPException(404, "there is no such tenant")
        self.generations[tenant] += 1
        fields = {"tenant": tenant, "generation": self.generations[tenant]}
        answer = await self.control("purge", fields)
        return JSONResponse({"tenant": tenant, "generation": answer["generation"]})

    # --- SGLang

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """SGLang's answer. Raises HTTPException with its status."""
        answer = await self.client.post(path, json=body)
        if answer.status_code != 200:
            raise HTTPException(answer.status_code, answer.text)
        found: dict[str, Any] = answer.json()
        return found

    async def control(self, command: str, fields: dict[str, Any], ids: Any = b"") -> dict[str, Any]:
        """The cache's answer to a command. It waits for the next step, so it isn't called in the event loop."""

        def call() -> dict[str, Any]:
            with ControlClient(self.socket, self.keys) as client:
                return client.call(command, fields, ids)

        try:
            return await run_in_threadpool(call)
        except RadixKVError as error:
            raise HTTPException(409, str(error)) from None


def pin_answer(pin: dict[str, Any]) -> dict[str, Any]:
    """What a tenant sees of its pin."""
    return {"id": pin["id"], "tokens": pin["num_tokens"], "ttl_s": pin["ttl_s"]}


def bearer(request: Request) -> str:
    """The key of a request; empty if it has none."""
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def tenant_of(request: Request) -> str:
    """Whose request it is. Raises HTTPException."""
    tenant = TENANTS.get(bearer(request))
    if tenant is None:
        raise HTTPException(401, "this key is not known")
    return tenant


async def fields_of(request: Request) -> dict[str, Any]:
    """The JSON object of a body. Raises HTTPException, for a body that is too long before it is read whole."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a body has at most {MAX_BODY} bytes")
    try:
        fields = await run_in_threadpool(json.loads, bytes(body))
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise HTTPException(400, "the body is not a JSON object")
    return fields


async def refused(request: Request, error: Exception) -> Response:
    """An error in the form of OpenAI's."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": {"message": error.detail}}, error.status_code)
    return JSONResponse({"error": {"message": "SGLang can't be reached"}}, 502)


def make_app(url: str, folder: Path, api_key: str) -> Starlette:
    """The gateway as an application."""
    gateway = Gateway(url, folder, api_key)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await gateway.client.aclose()

    def post(path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, answer, methods=["POST"])

    routes = [
        post("/v1/completions", gateway.generate),
        post("/v1/chat/completions", gateway.generate),
        Route("/v1/models", gateway.models),
        post("/v1/warm", gateway.warm),
        post("/v1/pins", gateway.pin),
        Route("/v1/pins", gateway.pins),
        Route("/v1/pins/{pin:int}", gateway.unpin, methods=["DELETE"]),
        post("/v1/tenants/{tenant}/purge", gateway.purge),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HTTPException: refused, httpx.TransportError: refused},
    )


if __name__ == "__main__":
    url, place, port = sys.argv[1:]
    app = make_app(url, Path(place), os.environ["SGLANG_API_KEY"])
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
