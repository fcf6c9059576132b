"""Answers to the audit, from an adapter and from a server. False and malformed ones are findings, never crashes.

A malformed answer of an adapter fails the state machine with AssertionError. That of a server raises TargetError.
"""

from __future__ import annotations

import json
import ssl
from contextlib import suppress
from copy import copy
from typing import Any

import httpx

from fuzz.targets.material import Material
from radixkv.audit import scrapes
from radixkv.audit.oracle import Oracle
from radixkv.audit.properties import Player
from radixkv.audit.target import Target, TargetError

_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_TARGET = Target("http://127.0.0.1:1", "key")
"""Made once: TLS takes longer than everything else."""


class RandomAnswers:
    """An adapter with random answers."""

    block_size = 4

    def __init__(self, material: Material) -> None:
        self._material = material

    def match(self, *_: Any) -> Any:
        return self._material.value()

    def open(self, *_: Any) -> Any:
        return (object(), self._material.value()) if self._material.byte() % 4 else self._material.value()

    def fork(self, *_: Any) -> Any:
        return self._material.value()

    commit = release = append = truncate = clear = purge = read = stats = name = fork


def one(data: bytes) -> None:
    """Make a few calls on an adapter, or a request to a server."""
    material = Material(data)
    if material.byte() % 2:
        _adapter(material)
    else:
        _server(material)


def _adapter(material: Material) -> None:
    player = Player("a", RandomAnswers(material), Oracle(4))
    ids = [0, 0, 1, 0, 0, 0, 0, 2]
    calls = (
        lambda: player.open(0, ids, 8),
        lambda: player.match(0, ids),
        lambda: player.commit(0, 4),
        lambda: player.append(0, 1),
        lambda: player.truncate(0, 1),
        lambda: player.fork(0),
        lambda: player.release(0),
        lambda: player.clear(0),
        player.purge,
        player.standing,
    )
    try:
        while material.left:
            calls[material.byte() % len(calls)]()
    except AssertionError:
        return


def _server(material: Material) -> None:
    status = (200, 200, 200, 400, 404, 500)[material.byte() % 6]
    shape = material.byte() % 3
    retry_after = material.chunk().decode("latin-1")
    if shape == 0:
        body = material.rest()
    else:
        document = json.dumps(material.document(), default=repr).encode("utf-8", "replace")
        body = b"data: " + document + b"\n\n" if shape == 1 else document

    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"Retry-After": retry_after} if retry_after.isprintable() and retry_after.isascii() else {}
        return httpx.Response(status, content=body, headers=headers)

    target = copy(_TARGET)
    target._http = httpx.Client(
        base_url="http://127.0.0.1:1", transport=httpx.MockTransport(answer), verify=_TLS
    )
    for call in (target.complete, target.first_token_s):
        with suppress(TargetError):
            call("prompt")
    text = body.decode("utf-8", "replace")
    scrapes.compared([(status, {}, text)] * 4, (status, {}, text[::-1]))
