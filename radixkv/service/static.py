"""Answers that never change while the process runs: pages, and their scripts and stylesheets.

Each has a strong ETag, and exists twice: as it is, and compressed once with gzip, in a thread, when it is first asked
for. A client that has it gets 304. Long ones are sent in pieces, each in the request's turn, so a client that doesn't
read costs no more memory than a piece.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from starlette.responses import Response

from radixkv.service.endpoint import Call, Host, Streamed

PIECE_BYTES = 16 * 1024
_GZIP = "gzip"


@dataclass(frozen=True, slots=True)
class _Form:
    """What is sent: the content in one encoding, and its ETag."""

    content: bytes
    etag: str
    encoding: str | None = None


class StaticContent:
    """Some content, and how it is answered. ``headers``: those of every answer, also of 304."""

    def __init__(self, content: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self._media_type, self._headers = media_type, {**(headers or {}), "Vary": "Accept-Encoding"}
        self._etag = hashlib.blake2b(content, digest_size=12).hexdigest()
        self._plain = _Form(content, f'"{self._etag}"')
        self._packed: _Form | None = None
        self._packing = threading.Lock()

    async def answer(self, call: Call[Host]) -> Response:
        """Answer with the content, or with 304."""
        form = self._plain
        if accepts_gzip(call.request.headers.getlist("accept-encoding")):
            packed = self._packed
            form = packed if packed is not None else await call.host.threads.administer(self._pack)
        headers = {**self._headers, "ETag": form.etag}
        if _has(call.request.headers.getlist("if-none-match"), form.etag):
            return Response(status_code=304, headers=headers)
        if form.encoding is not None:
            headers["Content-Encoding"] = form.encoding
        headers["Content-Length"] = str(len(form.content))
        if len(form.content) <= PIECE_BYTES or call.request.method == "HEAD":
            content = b"" if call.request.method == "HEAD" else form.content
            return Response(content, media_type=self._media_type, headers=headers)
        return Streamed(_pieces(form.content), media_type=self._media_type, headers=headers)

    def _pack(self) -> _Form:
        """Return the compressed form; the plain one if it is no longer. From a thread."""
        with self._packing:
            if self._packed is None:
                packed = gzip.compress(self._plain.content, mtime=0)
                is_shorter = len(packed) < len(self._plain.content)
                self._packed = _Form(packed, f'"{self._etag}-gzip"', _GZIP) if is_shorter else self._plain
            return self._packed


async def _pieces(content: bytes) -> AsyncIterator[memoryview]:
    view = memoryview(content)
    for start in range(0, len(content), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]
        await asyncio.sleep(0)  # each piece is a step


def accepts_gzip(values: list[str]) -> bool:
    """Whether the values of ``Accept-Encoding`` allow gzip. A weight of 0 forbids it."""
    weights: dict[str, bool] = {}
    for part in ",".join(values).lower().split(","):
        name, _, parameter = part.partition(";")
        weight = parameter.strip().removeprefix("q=").strip()
        weights[name.strip()] = not weight or weight.strip("0.") != ""
    return weights.get(_GZIP, weights.get("*", False))


def _has(values: list[str], etag: str) -> bool:
    """Whether the values of ``If-None-Match`` name an ETag; a weak one counts as the strong one."""
    known = [each.strip().removeprefix("W/") for each in ",".join(values).split(",")]
    return etag in known or "*" in known
