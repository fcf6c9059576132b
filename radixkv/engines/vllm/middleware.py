"""A reason for requests that vLLM's own HTTP server refuses where salts are required.

    RADIXKV_KEYS=engine.keys RADIXKV_ANONYMOUS=0 python -m vllm.entrypoints.openai.api_server \\
        --scheduler-cls radixkv.engines.vllm.Scheduler --middleware radixkv.engines.vllm.middleware.RequireSalt …

The scheduler ends such a request by itself, but vLLM then answers 500 without a reason. This answers 400 before vLLM
reads the request. Requests whose body is not a JSON object go on to vLLM. Each body is scanned for its salt, about
1 GB/s, without an object for anything else. A body of more than 64 MiB is answered with 413 before it is read whole.

A salt from before a purge is refused here once this process has seen a newer one of the tenant, otherwise by the
scheduler.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

import msgspec

from radixkv.errors import SaltError
from radixkv.signing import KeySet
from radixkv.tenancy.salt import SaltReader

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

_GENERATING: Final = ("/completions", "/responses", "/messages", "/generate")
"""How paths end that let the model generate."""

MAX_BODY: Final = 64 * 2**20
"""Bytes of the longest request that is read. Images in a prompt are the longest."""


class _Asked(msgspec.Struct):
    cache_salt: Any = None


_DECODER: Final = msgspec.json.Decoder(_Asked)


class RequireSalt:
    """ASGI middleware. Does nothing unless RADIXKV_ANONYMOUS is 0. Raises ConfigError for keys that can't be used."""

    def __init__(self, app: App) -> None:
        self._app, self._salts = app, _salts()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        is_asked = (
            scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(_GENERATING)
        )
        if self._salts is None or not is_asked:
            return await self._app(scope, receive, send)
        messages, size = [await receive()], 0
        while True:
            size += len(messages[-1].get("body", b""))
            if size > MAX_BODY:
                return await _refuse(
                    send, 413, f"the request has more than {MAX_BODY} bytes. Send less.", None
                )
            if not messages[-1].get("more_body", False):
                break
            messages.append(await receive())
        problem = _problem(self._salts, b"".join(each.get("body", b"") for each in messages))
        if problem is not None:
            return await _refuse(send, 400, problem, "cache_salt")
        waiting = iter(messages)

        async def receive_again() -> Message:
            message = next(waiting, None)
            return await receive() if message is None else message

        await self._app(scope, receive_again, send)


def _salts() -> SaltReader | None:
    path = os.environ.get("RADIXKV_KEYS")
    is_off = os.environ.get("RADIXKV_ANONYMOUS") != "0" or os.environ.get("RADIXKV_OFF") == "1"
    return None if is_off or path is None else SaltReader(KeySet.load(path), allows_anonymous=False)


def _problem(salts: SaltReader, body: bytes) -> str | None:
    """Return why a request is refused."""
    try:
        salt = _DECODER.decode(body).cache_salt
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    try:
        salts.read(salt)
    except SaltError as error:
        return f"{error}. {error.hint}"
    return None


async def _refuse(send: Send, status: int, problem: str, parameter: str | None) -> None:
    error = {"message": problem, "type": "BadRequestError", "param": parameter, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
