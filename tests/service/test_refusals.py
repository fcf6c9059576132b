"""Bad requests: 4xx in one shape, naming field, value and what is allowed; never 500."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.service.schemas.errors import ErrorReply
from tests.service.running import DEADLINE_S, Running

MESSAGE = {"role": "user", "content": "x"}
FORMS = "prompt, messages, token_ids"
PATHS = ("/v1/warm", "/v1/lookup", "/v1/completions")


def refusal(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, once its shape is known to be right."""
    document = answer.json()
    ErrorReply.model_validate(document)
    assert set(document) == {"error"} and set(document["error"]) == {
        "type",
        "message",
        "field",
        "value",
        "allowed",
    }
    assert 400 <= answer.status_code < 500 and len(answer.content) < 1500
    return dict(document["error"])


@pytest.mark.parametrize(
    ("path", "body", "field", "value"),
    [
        ("/v1/warm", {"prompt": "x", "tenant": "globex"}, "tenant", "globex"),
        ("/v1/warm", {"prompt": "x", "tenant": "acme"}, "tenant", "acme"),
        ("/v1/warm", {"prompt": "x", "tenant": None}, "tenant", None),
        ("/v1/lookup", {"prompt": "x", "tenant": "globex"}, "tenant", "globex"),
        ("/v1/lookup", {"prompt": "x", "wait": True}, "wait", True),
        ("/v1/completions", {"prompt": "x", "tenant": "globex"}, "tenant", "globex"),
        ("/v1/warm", {}, "prompt, messages, token_ids", "none"),
        ("/v1/warm", {"prompt": None}, "prompt, messages, token_ids", "none"),
        ("/v1/warm", {"prompt": "x", "token_ids": [1]}, "prompt, messages, token_ids", "prompt and token_ids"),
        ("/v1/lookup", {"messages": [MESSAGE], "token_ids": [1]}, FORMS, "messages and token_ids"),
        ("/v1/warm", {"prompt": ""}, "prompt", ""),
        ("/v1/warm", {"prompt": 5}, "prompt", 5),
        ("/v1/warm", {"token_ids": []}, "token_ids", "a list of 0"),
        ("/v1/warm", {"token_ids": [1, 2, 8000]}, "token_ids[2]", 8000),
        ("/v1/warm", {"token_ids": [1, -1]}, "token_ids[1]", -1),
        ("/v1/warm", {"token_ids": [1, 2**32]}, "token_ids[1]", 2**32),
        ("/v1/warm", {"token_ids": [10**400]}, "token_ids[0]", "an integer of 1329 bits"),
        ("/v1/warm", {"token_ids": [1.5]}, "token_ids[0]", 1.5),
        ("/v1/warm", {"token_ids": [True]}, "token_ids[0]", True),
        ("/v1/warm", {"token_ids": ["1"]}, "token_ids[0]", "1"),
        ("/v1/warm", {"token_ids": "1,2"}, "token_ids", "1,2"),
        ("/v1/warm", {"messages": []}, "messages", "a list of 0"),
        ("/v1/warm", {"messages": [{"role": "user"}]}, "messages[0].content", None),
        ("/v1/warm", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
        ("/v1/warm", {"messages": [{**MESSAGE, "name": "y"}]}, "messages[0].name", "y"),
        ("/v1/warm", {"messages": [{**MESSAGE, "content": [{"type": "text"}]}]}, "messages[0].content", "a list of 1"),
        ("/v1/warm", {"prompt": "x", "salt": 7}, "salt", 7),
        ("/v1/warm", {"prompt": "x", "salt": "s" * 300}, "salt", "s" * 80 + "…"),
        ("/v1/warm", {"prompt": "x", "adapter": ""}, "adapter", ""),
        ("/v1/warm", {"prompt": "x", "wait": "no"}, "wait", "no"),
        ("/v1/warm", {"prompt": "x", "replicas": "some"}, "replicas", "some"),
        ("/v1/completions", {}, "prompt", None),
        ("/v1/completions", {"prompt": []}, "prompt", "a list of 0"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt[1]", 1),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt[1]", "a"),
        ("/v1/completions", {"prompt": [[1], [9000]]}, "prompt[1][0]", 9000),
        ("/v1/completions", {"prompt": {"x": 1}}, "prompt", "an object with 1 names"),
        ("/v1/completions", {"prompt": "x", "n": 0}, "n", 0),
        ("/v1/completions", {"prompt": "x", "n": 33}, "n", 33),
        ("/v1/completions", {"prompt": ["x"] * 40, "n": 2}, "n", 2),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", 0),
        ("/v1/completions", {"prompt": "x", "max_tokens": 9000}, "max_tokens", 9000),
        ("/v1/completions", {"prompt": "x", "n": 32, "max_tokens": 4000}, "max_tokens", 4000),
        ("/v1/completions", {"prompt": "x", "temperature": -0.1}, "temperature", -0.1),
        ("/v1/completions", {"prompt": "x", "temperature": 2.1}, "temperature", 2.1),
        ("/v1/completions", {"prompt": "x", "top_p": 0}, "top_p", 0),
        ("/v1/completions", {"prompt": "x", "top_k": 0}, "top_k", 0),
        ("/v1/completions", {"prompt": "x", "seed": 2**63}, "seed", "an integer of 64 bits"),
        ("/v1/completions", {"prompt": "x", "stop": ["a"] * 5}, "stop", "a list of 5"),
        ("/v1/completions", {"prompt": "x", "stop": ""}, "stop", ""),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, "logprobs", 1),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias", "an object with 1 names"),
        ("/v1/completions", {"prompt": "x", "presence_penalty": 0.5}, "presence_penalty", 0.5),
        ("/v1/completions", {"prompt": "x", "frequency_penalty": -0.5}, "frequency_penalty", -0.5),
        ("/v1/completions", {"prompt": "x", "suffix": "end"}, "suffix", "end"),
        ("/v1/completions", {"prompt": "x", "best_of": 2}, "best_of", 2),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", None),
        ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", 1),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "temperature": 1.0}, "temperature", 1.0),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "top_p": 0.5}, "top_p", 0.5),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "stream": True}, "stream", True),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 3, "best_of": 2}, "best_of", 2),
        ("/v1/completions", {"prompt": "x", "min_tokens": 3}, "min_tokens", 3),
        ("/v1/completions", {"prompt": "x", "hints": 5}, "hints", 5),
        ("/v1/completions", {"prompt": "x", "hints": {"rank": 5}}, "hints.rank", 5),
        ("/v1/completions", {"prompt": "x", "hints": {"priority": 101}}, "hints.priority", 101),
        ("/v1/completions", {"prompt": "x", "hints": {"priority": True}}, "hints.priority", True),
        ("/v1/completions", {"prompt": "x", "hints": {"priority": 5, "duration_s": 0}}, "hints.duration_s", 0),
        ("/v1/completions", {"prompt": "x", "hints": {"duration_s": 5.0}}, "hints.duration_s", 5.0),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_served_is_422(
    live: Running, path: str, body: Any, field: str, value: Any
) -> None:
    answer = live.acme.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = refusal(answer)
    assert answer.status_code == 422
    assert (error["type"], error["field"], error["value"]) == ("validation_error", field, value)
    assert error["allowed"] and error["message"]


@pytest.mark.parametrize(
    "labels",
    [
        {"a": None},
        {"a": [1]},
        {"a": 1.1e15},
        {"a": 10**400},
        {"a": "v" * 257},
        {"": 1},
        {"k" * 4000: 1},
        {"priority": 3},
        {f"a{number}": number for number in range(17)},
    ],
)
def test_labels_that_cannot_be_are_422(live: Running, labels: dict[str, Any]) -> None:
    answer = live.acme.post("/v1/completions", json={"prompt": "x", "hints": {"labels": labels}})
    error = refusal(answer)
    assert answer.status_code == 422 and error["field"] == "hints.labels"
    assert error["value"] == f"an object with {len(labels)} names"
    assert error["allowed"].startswith("at most 16 strings of at most 256 characters, numbers within ±1e+15")


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_beyond_the_limit_names_the_limit(live: Running, path: str) -> None:
    limit = live.service.rules.max_tokens
    field = "prompt" if path == "/v1/completions" else "token_ids"
    answer = live.acme.post(path, json={field: [5] * (limit + 1)})
    error = refusal(answer)
    assert answer.status_code == 422
    assert (error["field"], error["value"]) == (field, limit + 1) and str(limit) in error["allowed"]
    error = refusal(live.acme.post(path, json={"prompt": "many words " * limit}))
    assert error["field"] == "prompt" and str(limit) in error["allowed"]


@pytest.mark.parametrize("path", PATHS)
def test_a_text_beyond_any_tokenizer_is_not_tokenized(live: Running, path: str) -> None:
    answer = live.acme.post(path, json={"prompt": "x" * 1_000_000})
    assert answer.status_code == 422
    assert (error := refusal(answer))["field"] == "prompt" and error["value"] == 1_000_000


def test_another_model_is_404(live: Running) -> None:
    answer = live.acme.post("/v1/completions", json={"model": "gpt-x", "prompt": "x"})
    assert answer.status_code == 404 and refusal(answer)["allowed"] == "radixkv-demo"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b'{"prompt": "x"} {}', "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 422),
        (b'{"prompt": "x", "temperature": NaN}', "application/json", 422),
        (b"[" * 100_000, "application/json", 400),
        (b"null", "application/json", 422),
        (b'"x"', "application/json", 422),
        (b'{"prompt": "x"}', "text/plain", 415),
        (b'{"prompt": "x"}', "application/x-www-form-urlencoded", 415),
        (b'{"prompt": "x"}', "", 415),
    ],
)
def test_a_body_that_is_not_json(live: Running, path: str, content: bytes, kind: str, status: int) -> None:
    answer = live.acme.post(path, content=content, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    refusal(answer)


def test_a_body_that_is_too_large_is_413(live: Running) -> None:
    limit = live.service.limits.max_body_bytes
    stated = live.acme.post(
        "/v1/warm", content=b" " * (limit + 1), headers={"content-type": "application/json"}
    )
    chunks = (b" " * 2**20 for _ in range(limit // 2**20 + 1))
    chunked = live.acme.post("/v1/warm", content=chunks, headers={"content-type": "application/json"})
    for answer in (stated, chunked):
        assert answer.status_code == 413 and str(limit) in refusal(answer)["allowed"]


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/warm/", "/v1/cache/x", "/metrics/", "/v1/warm/a/b", "/internal", "/%00"]
)
def test_an_unknown_path_is_404(live: Running, path: str) -> None:
    answer = live.acme.get(path)
    assert answer.status_code == 404 and refusal(answer)["message"] == "no such path"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/warm", "POST"),
        ("POST", "/v1/cache", "DELETE"),
        ("PUT", "/v1/stats", "GET, HEAD"),
        ("PATCH", "/healthz", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_405(live: Running, method: str, path: str, allowed: str) -> None:
    answer = live.acme.request(method, path)
    assert answer.status_code == 405 and refusal(answer)["field"] == "method"
    assert set(answer.headers["Allow"].split(", ")) == set(allowed.split(", "))


@pytest.mark.parametrize(
    ("query", "field"),
    [("?tenant=globex", "tenant"), ("?salt=a&salt=b", "salt"), ("?sal=x", "sal"), ("?" + "x" * 500, None)],
)
def test_an_unknown_query_is_422(live: Running, query: str, field: str | None) -> None:
    answer = live.acme.delete("/v1/cache" + query)
    assert answer.status_code == 422
    assert refusal(answer)["field"] == (field or "x" * 80 + "…")


def test_what_is_no_http_does_no_harm(live: Running) -> None:
    place = urlsplit(live.url)
    with socket.create_connection((place.hostname, place.port), timeout=DEADLINE_S) as raw:
        raw.sendall(b"\x00\x01 nonsense\r\n\r\n")
        raw.recv(1000)
    assert live.nobody.get("/healthz").status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["prompt", "messages", "token_ids", "salt", "adapter", "wait", "replicas", "n", "max_tokens", "temperature", "seed",
     "stream", "use_beam_search", "stop", "top_p", "top_k", "echo", "best_of", "tenant", "hints"]
)  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), body=st.dictionaries(FIELDS, JSON, max_size=4))
def test_no_body_is_an_error_of_the_server(live: Running, path: str, body: dict[str, Any]) -> None:
    if isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 3)
    content = json.dumps(body)
    answer = live.acme.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        refusal(answer)
