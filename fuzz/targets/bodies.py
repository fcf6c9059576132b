"""HTTP bodies of a tenant: the service answers any of them in its documented form, and stays healthy.

The target calls the real application with the demo model as an ASGI application. The first byte chooses the path, the
presence of a key, and the content type. The rest is the body.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

from fuzz.targets.material import Material

_PATHS = ("/v1/lookup", "/v1/completions", "/v1/warm", "/v1/lookup")
_ERROR_FIELDS = {"type", "message", "field", "value", "allowed", "docs_url"}
_FIELDS_OF = {"/v1/completions": _ERROR_FIELDS | {"param", "code"}}
_ALLOWED = {200, 202, 400, 401, 404, 409, 413, 415, 422, 429, 503}


@cache
def _application() -> tuple[Any, Any, asyncio.AbstractEventLoop]:
    import torch

    from radixkv.service.app import create_app
    from radixkv.service.build import build_service
    from radixkv.service.options import ServeSettings

    torch.set_num_threads(1)
    service = build_service(ServeSettings.parse({"num-blocks": "256", "threads": "1"}), None)
    return service, create_app(service), asyncio.new_event_loop()


def one(data: bytes) -> None:
    """Send one request."""
    material = Material(data)
    choice = material.byte()
    body = material.rest()
    headers = [(b"content-type", b"text/plain" if choice & 16 else b"application/json")]
    if not choice & 8:
        headers.append((b"authorization", b"Bearer demo-acme"))
    service, app, loop = _application()
    path = _PATHS[choice % 4]
    status, content = loop.run_until_complete(_ask(app, path, headers, body))
    assert status in _ALLOWED, (status, content)
    if content[:5] == b"data:":
        assert content.endswith(b"\n\n")
    else:
        document = json.loads(content)
        if status >= 400:
            assert set(document["error"]) == _FIELDS_OF.get(path, _ERROR_FIELDS), content
    if choice & 8:
        assert status == 401, "answered without a key"
    assert not service.failures.has_broken_laws


async def _ask(app: Any, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[int, bytes]:
    sent: list[dict[str, Any]] = []
    given = [{"type": "http.request", "body": body, "more_body": False}]
    over = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 60)
    over.set()
    status = next(message["status"] for message in sent if message["type"] == "http.response.start")
    return status, b"".join(message.get("body", b"") for message in sent)
