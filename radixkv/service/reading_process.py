"""A process that reads bodies for a service. ``reading_pool`` starts it; it ends when the service closes its socket.

It imports no torch and holds no key: it has the schemas, a tokenizer and the rules for prompts. A terminal or a
supervisor may send SIGINT and SIGTERM to the service and to this process at once. It ignores them; the service ends it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module

from radixkv.service.failures import log_unforeseen
from radixkv.service.frames import receive, send
from radixkv.service.problems import ApiError, internal
from radixkv.service.prompt_times import NO_TIMES, Times
from radixkv.service.prompts import PromptRules
from radixkv.service.reading import Reader, packed, packed_problem
from radixkv.service.schemas.base import RequestBody
from radixkv.tokenizer import load_tokenizer


def main(descriptor: int, specification: str) -> None:
    """Answer messages on a socket until it is closed. ``specification``: JSON, see ``reading_pool.Specification``."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would load it, which takes seconds
    wanted = json.loads(specification)
    os.nice(wanted["niceness"])
    tokenizer = load_tokenizer(wanted["tokenizer"])
    if tokenizer.digest != wanted["digest"]:
        sys.exit("the tokenizer's files have changed since the service started: restart it")
    reader = Reader(tokenizer, PromptRules.of_document(wanted["rules"]))
    with socket.socket(fileno=descriptor) as connection:
        while (parts := receive(connection)) is not None:
            send(connection, answer(reader, parts))


def answer(reader: Reader, parts: Sequence[memoryview]) -> list[bytes]:
    """Return the answer to one message: the name of a schema, a body, and its times if it has any."""
    module, _, name = bytes(parts[0]).decode().partition(":")
    model: type[RequestBody] = getattr(import_module(module), name)
    try:
        given = json.loads(bytes(parts[2])) if len(parts) > 2 else None
        times = NO_TIMES if given is None else Times(given["now"], tuple(given["earlier"]))
        return packed(reader.read(bytes(parts[1]), model, times))
    except ApiError as error:
        return packed_problem(error)
    except Exception as error:  # noqa: BLE001 a bug in radixkv must not end the process
        log_unforeseen(error)
        return packed_problem(internal())
