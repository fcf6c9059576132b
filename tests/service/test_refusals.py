"""Bad requests get a 4xx answer of one format, with the field, the value and the allowed values.

They never get a 500.
"""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.errors import StoreUnavailable
from radixkv.service.schemas.errors import CompletionErrorReply, ErrorReply
from tests.service.running import Running
from tests.waiting import LIMIT_S

MESSAGE = {"role": "user", "content": "x"}
FORMS = "prompt, messages, token_ids"
PATHS = ("/v1/warm", "/v1/lookup", "/v1/completions")
OPENAI_TYPES = {
    **dict.fromkeys((400, 408, 409, 413, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def refused_status(path: str) -> int:
    """The status of a body that can't be served: OpenAI's on its path, else 422."""
    return 400 if path == "/v1/completions" else 422


def refusal(answer: httpx.Response) -> dict[str, Any]:
    """Check the format of an error answer and return its error object, in radixkv's own form."""
    document = answer.json()
    if answer.request.url.path == "/v1/completions" and answer.status_code != 405:
        document = own_form(answer)
    ErrorReply.model_validate(document)
    assert set(document) == {"error"} and set(document["error"]) == {
        "type",
        "message",
        "field",
        "value",
        "allowed",
        "docs_url",
    }
    assert document["error"]["docs_url"] == f"/docs/errors#{document['error']['type']}"
    assert 400 <= answer.status_code < 500 and len(answer.content) < 1500
    return dict(document["error"])


def own_form(answer: httpx.Response) -> dict[str, Any]:
    """Check an error in OpenAI's form with radixkv's beside it, and return radixkv's."""
    document = answer.json()
    CompletionErrorReply.model_validate(document)
    error = document["error"]
    assert error.pop("param") == error["field"] and answer.headers["x-request-id"].startswith("req_")
    assert error.pop("code") and error["type"] == OPENAI_TYPES.get(answer.status_code, "server_error")
    return {"error": {**error, "type": error["docs_url"].rpartition("#")[2]}}


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
        ("/v1/completions", {"prompt": "x", "stop": ["a"] * 17}, "stop", "a list of 17"),
        ("/v1/completions", {"prompt": "x", "stop": ""}, "stop", ""),
        ("/v1/completions", {"prompt": "x", "stop": "s" * 257}, "stop", "s" * 80 + "…"),
        ("/v1/completions", {"prompt": "x", "stop": ["a", "s" * 257]}, "stop[1]", "s" * 80 + "…"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs", 21),
        ("/v1/completions", {"prompt": "x", "logprobs": True}, "logprobs", True),
        ("/v1/completions", {"prompt": "x", "logprobs": 1, "echo": True}, "logprobs", 1),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias", "an object with 1 names"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"9000": 1}}, "logit_bias", "9000"),
        ("/v1/completions", {"prompt": "x", "presence_penalty": 2.5}, "presence_penalty", 2.5),
        ("/v1/completions", {"prompt": "x", "presence_penalty": False}, "presence_penalty", False),
        ("/v1/completions", {"prompt": "x", "frequency_penalty": -3}, "frequency_penalty", -3),
        ("/v1/completions", {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", 0),
        ("/v1/completions", {"prompt": "x", "suffix": "end"}, "suffix", "end"),
        ("/v1/completions", {"prompt": "x", "best_of": 2}, "best_of", 2),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", None),
        ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", 1),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "temperature": 1.0}, "temperature", 1.0),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "top_p": 0.5}, "top_p", 0.5),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "stream": True}, "stream", True),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 3, "best_of": 2}, "best_of", 2),
        ("/v1/completions", {"prompt": "x", "min_tokens": 17}, "min_tokens", 17),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ("/v1/completions", {"prompt": "x", "hints": 5}, "hints", 5),
        ("/v1/completions", {"prompt": "x", "hints": {"rank": 5}}, "hints.rank", 5),
        ("/v1/completions", {"prompt": "x", "hints": {"priority": 101}}, "hints.priority", 101),
        ("/v1/completions", {"prompt": "x", "hints": {"priority": True}}, "hints.priority", True),
        ("/v1/completions", {"prompt": "x", "hints": {"priority": 5, "duration_s": 0}}, "hints.duration_s", 0),
        ("/v1/completions", {"prompt": "x", "hints": {"duration_s": 5.0}}, "hints.duration_s", 5.0),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_served_is_refused(
    live: Running, path: str, body: Any, field: str, value: Any
) -> None:
    answer = live.acme.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = refusal(answer)
    assert answer.status_code == refused_status(path)
    assert (error["type"], error["field"], error["value"]) == ("validation_error", field, value)
    assert error["allowed"] and error["message"]


NEUTRAL = {
    "suffix": "", "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "length_penalty": 1, "min_p": 0.0, "min_tokens": 0, "stop_token_ids": [],
    "user": "u" * 99,
    "top_k": -1, "best_of": 1, "n": 1, "skip_special_tokens": True, "include_stop_str_in_output": False,
    "response_format": {"type": "text"}, "stop": None, "seed": None, "echo": False, "ignore_eos": True,
}  # fmt: skip
"""Fields that clients often send with values that change nothing."""


@pytest.mark.slow
def test_neutral_values_of_common_fields_change_nothing(live: Running) -> None:
    asked = {"prompt": "Say it", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "salt": "neutral"}
    plain = live.acme.post("/v1/completions", json=asked).json()["choices"]
    for fields in (NEUTRAL, dict.fromkeys(NEUTRAL), *({name: value} for name, value in NEUTRAL.items())):
        answer = live.acme.post("/v1/completions", json={**asked, **fields, "ignore_eos": True})
        assert answer.status_code == 200, (fields, answer.text)
        assert answer.json()["choices"] == plain, fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 0.1), ("suffix", "end"), ("tools", [{}]), ("prompt_logprobs", 1), ("top_logprobs", 1),
        ("length_penalty", 2), ("stop_token_ids", [5]),
    ],
)  # fmt: skip
def test_an_unsupported_field_is_refused_as_unsupported(live: Running, field: str, value: Any) -> None:
    error = refusal(live.acme.post("/v1/completions", json={"prompt": "x", field: value}))
    assert error["field"] == field and "left out" in error["allowed"]
    assert error["message"].startswith(f"{field}=") and "is not supported; allowed: " in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/lookup", "/v1/warm", "/v1/route", "/v1/pins"])
def test_cache_salt_is_another_name_of_salt(live: Running, path: str) -> None:
    """``cache_salt`` is another name of ``salt``. If both are given, they must be equal."""
    least = {"/v1/pins": {"ttl_s": 5}}.get(path, {})
    error = refusal(live.acme.post(path, json={"prompt": "x", "salt": "a", "cache_salt": "b", **least}))
    assert (error["field"], error["value"]) == ("cache_salt", "b") and "salt" in error["allowed"]
    error = refusal(live.acme.post(path, json={"prompt": "x", "cache_salt": 5, **least}))
    assert (error["field"], error["value"]) == ("cache_salt", 5)


def test_cache_salt_names_the_namespace_and_max_completion_tokens_the_length(live: Running) -> None:
    ids = list(range(40))
    assert live.acme.post("/v1/warm", json={"token_ids": ids, "cache_salt": "other name"}).status_code == 200
    for fields in (
        {"salt": "other name"},
        {"cache_salt": "other name"},
        {"salt": None, "cache_salt": "other name"},
    ):
        found = live.acme.post("/v1/lookup", json={"token_ids": ids, **fields}).json()
        assert found["matched_tokens"] == 32
    assert live.acme.post("/v1/lookup", json={"token_ids": ids}).json()["matched_tokens"] == 0
    body = {"prompt": ids, "temperature": 0, "ignore_eos": True}
    for fields in ({"max_completion_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 2}):
        usage = live.acme.post("/v1/completions", json={**body, **fields}).json()["usage"]
        assert usage["completion_tokens"] == 2
    error = refusal(
        live.acme.post("/v1/completions", json={**body, "max_tokens": 3, "max_completion_tokens": 2})
    )
    assert error["field"] == "max_completion_tokens"


def test_usage_in_every_event_of_a_stream(live: Running) -> None:
    body = {"prompt": "Go on", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    for continuous in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        answer = live.acme.post("/v1/completions", json={**body, "stream_options": options})
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        usages = [event["usage"] for event in events]
        assert all((usage is not None) == continuous for usage in usages[:-1])
        assert usages[-1]["completion_tokens"] == 4 and usages[-1]["prompt_tokens_details"] is not None


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "x", "n": 0}, "n=0 is not allowed; allowed: an integer from 1 to 32"),
        ("/v1/completions", {"prompt": "x", "stream": "no"}, 'stream="no" is not allowed; allowed: true or false'),
        ("/v1/completions", {"prompt": "x", "best_of": 2},
         "best_of=2 is not allowed, because it differs from n; allowed: 1, or another number with use_beam_search"),
        ("/v1/lookup", {"token_ids": [1.5]},
         "token_ids[0]=1.5 is not allowed; allowed: an integer from 0 to 4294967295"),
        ("/v1/lookup", {}, "prompt, messages, token_ids: none given; allowed: exactly one of them"),
        ("/v1/lookup", {"token_ids": [1, 9999]},
         "token_ids[1]=9999 is not in the vocabulary; allowed: an integer from 0 to 7999"),
    ],
)  # fmt: skip
def test_messages_name_the_field_the_value_and_the_allowed_values(
    live: Running, path: str, body: dict[str, Any], message: str
) -> None:
    assert refusal(live.acme.post(path, json=body))["message"] == message


def test_a_number_with_a_fraction_of_zero_is_an_integer(live: Running) -> None:
    """JSON has only one number type. Values that are not integers are refused."""
    body = b'{"prompt": [5.0, 6], "max_tokens": 2.0, "n": 1.0}'
    headers = {"content-type": "application/json"}
    answer = live.acme.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 2
    for wrong in (b"[5.5]", b"[1e400]", b"[true]", b'["5"]', b"[5.0, 1e30]"):
        answer = live.acme.post("/v1/lookup", content=b'{"token_ids": %s}' % wrong, headers=headers)
        assert answer.status_code == 422, wrong


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
def test_invalid_labels_are_refused(live: Running, labels: dict[str, Any]) -> None:
    answer = live.acme.post("/v1/completions", json={"prompt": "x", "hints": {"labels": labels}})
    error = refusal(answer)
    assert answer.status_code == 400 and error["field"] == "hints.labels"
    assert error["value"] == f"an object with {len(labels)} names"
    assert error["allowed"].startswith("at most 16 strings of at most 256 characters, numbers within ±1e+15")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_beyond_the_limit_names_the_limit(live: Running, path: str) -> None:
    limit = live.service.rules.max_tokens
    field = "prompt" if path == "/v1/completions" else "token_ids"
    answer = live.acme.post(path, json={field: [5] * (limit + 1)})
    error = refusal(answer)
    assert answer.status_code == refused_status(path)
    assert (error["field"], error["value"]) == (field, limit + 1) and str(limit) in error["allowed"]
    error = refusal(live.acme.post(path, json={"prompt": "many words " * limit}))
    assert error["field"] == "prompt" and str(limit) in error["allowed"]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_text_beyond_any_tokenizer_is_not_tokenized(live: Running, path: str) -> None:
    answer = live.acme.post(path, json={"prompt": "x" * 1_000_000})
    assert answer.status_code == refused_status(path)
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
def test_a_body_that_is_not_json_is_refused(
    live: Running, path: str, content: bytes, kind: str, status: int
) -> None:
    answer = live.acme.post(path, content=content, headers={"content-type": kind})
    assert answer.status_code == (refused_status(path) if status == 422 else status), answer.text
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


def test_bytes_that_are_not_http_do_no_harm(live: Running) -> None:
    place = urlsplit(live.url)
    with socket.create_connection((place.hostname, place.port), timeout=LIMIT_S) as raw:
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


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), body=st.dictionaries(FIELDS, JSON, max_size=4))
def test_no_body_causes_a_server_error(live: Running, path: str, body: dict[str, Any]) -> None:
    if isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 3)
    content = json.dumps(body)
    answer = live.acme.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        refusal(answer)


def test_openapi_describes_which_fields_go_together(live: Running) -> None:
    """The schema has ``oneOf`` for the form of a prompt, the limits of the served model, and the values of queries and
    headers.
    """
    document = live.nobody.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for name in ("LookupRequest", "WarmRequest", "PinRequest", "RouteRequest", "PublishRequest"):
        forms = schemas[name]["oneOf"]
        assert [each["required"] for each in forms] == [["prompt"], ["messages"], ["token_ids"]]
        for form, required in zip(forms, ("prompt", "messages", "token_ids"), strict=True):
            null = {other for other, what in form["properties"].items() if what == {"type": "null"}}
            assert null == {"prompt", "messages", "token_ids"} - {required}
        (ids, _) = schemas[name]["properties"]["token_ids"]["anyOf"]
        assert ids["items"]["exclusiveMaximum"] == 8000 and ids["maxItems"] == live.service.rules.max_tokens
    assert schemas["Message"]["properties"]["role"]["enum"] == ["assistant", "system", "user"]
    assert len(schemas["CompletionRequest"]["allOf"]) == 4
    parameters = document["paths"]["/v1/replicas"]["get"]["parameters"]
    assert parameters[0]["schema"]["enum"] == ["true", "false"]


def test_an_operator_is_told_why_the_store_fails(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "Redis: OutOfMemoryError: command not allowed when used memory > 'maxmemory'."

    def full(*_: object) -> Any:
        raise StoreUnavailable(reason)

    for name in ("purge", "purge_report"):
        monkeypatch.setattr(type(live.service.fleet.coordinator), name, full)
    path = "/v1/tenants/acme/purge"
    for answer in (live.operator.post(path), live.operator.get(path)):
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (503, "store_unavailable")
        assert reason in error["message"]
