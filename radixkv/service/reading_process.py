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
from typing import BinaryIO

from radixkv.service.failures import log_unforeseen
from radixkv.service.problems import ApiError, internal
from radixkv.service.prompts import PromptRules
from radixkv.service.reading import Reader, packed_problem, read_asked
from radixkv.service.reading_pool import HEAD
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
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as incoming:
        while (parts := _received(incoming)) is not None:
            found = answer(reader, *parts)
            connection.sendall(HEAD.pack(len(found), 0))
            connection.sendall(found)


def _received(incoming: BinaryIO) -> tuple[bytes, bytes] | None:
    """Return the parts of the next message; None once the service has closed the socket."""
    sizes = incoming.read(HEAD.size)
    if len(sizes) < HEAD.size:
        return None
    lengths = HEAD.unpack(sizes)
    first, second = map(incoming.read, lengths)
    return (first, second) if (len(first), len(second)) == lengths else None


def answer(reader: Reader, head: bytes, raw: bytes) -> bytes:
    """Return the answer to one message: what ``reading.asked`` made."""
    try:
        return read_asked(reader, head, raw)
    except ApiError as error:
        return packed_problem(error)
    except Exception as error:  # noqa: BLE001 a bug in radixkv must not end the process
        log_unforeseen(error)
        return packed_problem(internal())
