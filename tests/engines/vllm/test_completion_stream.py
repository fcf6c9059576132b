"""The client of vLLM's completions against a server that lies."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.engines.vllm.completion_stream import CompletionStream, fetched
from radixkv.errors import ControlError
from tests.waiting import LIMIT_S

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
PROMPT_TOKENS = 10
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": PROMPT_TOKENS, "prompt_tokens_details": {"cached_tokens": 8}},
}
DONE = b"data: [DONE]\n\n"


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def choice(ids: Any, reason: Any = None, index: Any = 0) -> bytes:
    return event({"choices": [{"index": index, "token_ids": ids, "finish_reason": reason}], "usage": None})


@pytest.fixture
def answering(short_folder: Path) -> Iterator[Callable[..., Path]]:
    """Make a real server on a Unix socket, which answers a connection with these bytes.

    ``asked``: it sets this event when it has a request. ``go_on``: it waits for this one after each piece.
    """
    listeners: list[socket.socket] = []

    def serve(
        *pieces: bytes, asked: threading.Event | None = None, go_on: threading.Event | None = None
    ) -> Path:
        path = short_folder / f"{len(listeners)}.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        listeners.append(listener)

        def run() -> None:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)
                    if asked is not None:
                        asked.set()
                    for each in pieces:
                        connection.sendall(each)
                        if go_on is not None:
                            go_on.wait(LIMIT_S)
            except OSError:
                return  # the client hung up, as it should

        threading.Thread(target=run, daemon=True).start()
        return path

    yield serve
    for each in listeners:
        each.close()


def read(path: Path, num_rows: int = 1) -> tuple[list[list[int]], CompletionStream]:
    """Read a completion to its end."""
    stream = CompletionStream(
        path, {}, num_rows=num_rows, num_prompt_tokens=PROMPT_TOKENS, max_new_tokens=4, vocab_size=100
    )
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    try:
        while not stream.is_over:
            assert select.select([stream], [], [], LIMIT_S)[0]
            for row, ids in stream.take():
                rows[row] += ids
    finally:
        stream.close()
    return rows, stream


def test_an_answer_in_small_pieces(answering: Callable[..., Path]) -> None:
    whole = HEAD + choice([1, 2]) + choice([3], index=1) + choice([4], "stop", 1) + choice([5], "length")
    whole += event(USAGE) + DONE
    rows, stream = read(answering(*[whole[at : at + 7] for at in range(0, len(whole), 7)]), num_rows=2)
    assert rows == [[1, 2, 5], [3, 4]] and stream.reasons == ["length", "stop"]
    assert stream.num_cached_tokens == 8


NESTED = b'data: {"choices": ' + b"[" * 50_000 + b"\n\n"
LIES = {
    "no HTTP": b"hello\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000,
    "another status": b"HTTP/1.1 500 no\r\nconnection: close\r\n\r\n",
    "nothing": b"",
    "an endless line": HEAD + b"data: " + b"7" * 400_000,
    "endless events": HEAD + choice([]) * 1_000,
    "no event": HEAD + b": hello\n\n",
    "no JSON": HEAD + b"data: {\n\n",
    "nested": HEAD + NESTED,
    "a list": HEAD + event([]),
    "an error": HEAD + event({"error": {"message": "x"}}),
    "no choices": HEAD + event({"usage": None}),
    "many choices": HEAD + event({"choices": [{}] * 9}),
    "a choice that is a number": HEAD + event({"choices": [7]}),
    "another row": HEAD + choice([1], index=1),
    "a row that is true": HEAD + choice([1], index=True),
    "ids in a text": HEAD + choice("12"),
    "ids that are texts": HEAD + choice(["1"]),
    "an id that is true": HEAD + choice([True]),
    "an id outside the vocabulary": HEAD + choice([100]),
    "a huge id": HEAD + choice([10**4_000]),
    "a negative id": HEAD + choice([-1]),
    "too many ids": HEAD + choice([1] * 5),
    "too many ids in parts": HEAD + choice([1] * 3) + choice([1] * 2),
    "another reason": HEAD + choice([1], "abort"),
    "a row after its end": HEAD + choice([1], "stop") + choice([1]),
    "an early end": HEAD + choice([1]),
    "an end without reasons": HEAD + choice([1]) + event(USAGE) + DONE,
    "an end without usage": HEAD + choice([1], "stop") + DONE,
    "another prompt": HEAD + choice([1], "stop") + event({"choices": [], "usage": {"prompt_tokens": 9}}),
    "cached beyond the prompt": HEAD
    + event({"choices": [], "usage": {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 11}}}),
    "a usage that is a list": HEAD + event({"choices": [], "usage": [1]}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused(answering: Callable[..., Path], lie: str) -> None:
    with pytest.raises(ControlError):
        read(answering(LIES[lie]))


def test_reading_never_waits(answering: Callable[..., Path]) -> None:
    """The server goes on only after the test has read nothing."""
    go_on = threading.Event()
    path = answering(HEAD, choice([1])[:5], go_on=go_on)
    stream = CompletionStream(
        path, {}, num_rows=1, num_prompt_tokens=PROMPT_TOKENS, max_new_tokens=4, vocab_size=100
    )
    assert all(stream.take() == [] for _ in range(10))
    stream.close()
    go_on.set()


def test_a_socket_that_cannot_be_reached(short_folder: Path) -> None:
    """Its path may be too long for the kernel: then the error says so."""
    for path, said in (
        (short_folder / "none", "can't be reached"),
        (short_folder / ("x" * 107), rf"{short_folder}/x+. has \d+ bytes, .* has 107 at most"),
    ):
        with pytest.raises(ControlError, match=said):
            CompletionStream(path, {}, num_rows=1, num_prompt_tokens=1, max_new_tokens=1, vocab_size=2)


def test_short_answers_are_bounded_too(answering: Callable[..., Path]) -> None:
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
    assert fetched(answering(head + b"{}"), "/health") == b"{}"
    for lie in (head + b"x" * 100_000, b"HTTP/1.1 404 no\r\nconnection: close\r\n\r\n", b"x\r\n\r\n", b""):
        with pytest.raises(ControlError):
            fetched(answering(lie), "/health")
    go_on = threading.Event()
    with pytest.raises(ControlError, match="timed out"):
        fetched(answering(b"", go_on=go_on), "/health", timeout_s=0.05)
    go_on.set()
