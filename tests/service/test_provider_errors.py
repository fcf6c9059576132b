"""Errors that clients of providers look for: unknown paths, chats that are too long, compressed bodies, rates."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest

from tests.service.running import Running, service_in_thread
from tests.service.test_shapes import BODIES, CHAT, CONTENTS, MESSAGES, RESPONSES


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/v1/messages/batches", {}),
        ("POST", "/v1/messages/batches", {}),
        ("GET", "/v1/files", {"anthropic-version": "2023-06-01"}),
        ("GET", "/v1/models/another", {"anthropic-version": "2023-06-01"}),
    ],
)
def test_an_unknown_path_of_anthropics_client(
    live: Running, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = live.acme.request(method, path, headers=headers)
    found = answer.json()
    assert answer.status_code == 404 and found["type"] == "error"
    assert found["error"]["type"] == "not_found_error"
    assert answer.headers["request-id"] == found["request_id"]


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/chat/else", "/v1/responses/resp_1", "/v1/models/another"]
)
def test_an_unknown_path_of_openais_client(live: Running, path: str) -> None:
    answer = live.acme.get(path)
    assert answer.status_code == 404 and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/v1beta/files", {}), ("/v1beta/models/another", {}), ("/else", {"x-goog-api-key": "demo-acme"})],
)
def test_an_unknown_path_of_googles_client(live: Running, path: str, headers: dict[str, str]) -> None:
    answer = live.acme.get(path, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["status"]) == (404, 404, "NOT_FOUND")


def test_a_wrong_method_has_the_providers_form_too(live: Running) -> None:
    answer = live.acme.get("/v1/messages")
    assert answer.status_code == 405 and answer.headers["Allow"] == "POST"
    assert answer.json()["error"]["type"] == "invalid_request_error"


LONG = "word " * 20_000


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "this model's maximum context length is"),
        (RESPONSES, {"input": LONG}, "this model's maximum context length is"),
        (MESSAGES, {"messages": [{"role": "user", "content": LONG}]}, "prompt is too long"),
        (
            CONTENTS,
            {"contents": [{"role": "user", "parts": [{"text": LONG}]}]},
            "exceeds the maximum number of tokens allowed",
        ),
        (MESSAGES, {"max_tokens": 10**6}, "input length and `max_tokens` exceed context limit"),
        (CHAT, {"max_tokens": 10**6}, "this model's maximum context length is"),
    ],
)
def test_what_is_too_long_has_the_providers_words(
    live: Running, path: str, body: dict[str, object], words: str
) -> None:
    answer = live.acme.post(path, json={**BODIES[path], **body})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and words in message.lower().replace("Max", "max"), message
    assert "tokens" in message and "8192" in message


@pytest.mark.parametrize("path", [*BODIES, "/v1/lookup"])
@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip"])
def test_a_compressed_body_is_refused(live: Running, path: str, coding: str) -> None:
    content = gzip.compress(json.dumps(BODIES.get(path, {"prompt": "x"})).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    answer = live.acme.post(path, content=content, headers=headers)
    assert answer.status_code == 415 and "content-encoding" in answer.text
    assert answer.headers["Accept-Encoding"] == "identity"


def test_identity_is_no_compression(live: Running) -> None:
    answer = live.acme.post("/v1/lookup", json={"prompt": "x"}, headers={"Content-Encoding": "identity"})
    assert answer.status_code == 200


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    limits = {"requests-per-s": "0.001", "burst": "3", "num-blocks": "64"}
    with service_in_thread(**limits) as running:
        yield running


def test_openais_answers_say_what_the_rate_leaves(slow: Running) -> None:
    seen = []
    for _ in range(4):
        answer = slow.acme.get("/v1/models")
        names = ("limit", "remaining", "reset")
        seen.append([answer.headers[f"x-ratelimit-{name}-requests"] for name in names])
    assert answer.status_code == 429 and "Retry-After" in answer.headers
    assert [(limit, left) for limit, left, _ in seen] == [("3", "2"), ("3", "1"), ("3", "0"), ("3", "0")]
    assert all(reset.endswith("s") and 900 < float(reset[:-1]) <= 3000 for _, _, reset in seen), seen
    other = slow.globex.get("/v1/models")
    assert other.headers["x-ratelimit-remaining-requests"] == "2", "each tenant has its own"


def test_other_answers_say_nothing_of_it(live: Running) -> None:
    for answer in (live.nobody.get("/healthz"), live.nobody.get("/v1/models"), live.acme.get("/v1/stats")):
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
