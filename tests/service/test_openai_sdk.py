"""OpenAI's SDK, unchanged and pinned, against ``radixkv serve``: chats, completions, models, errors, streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.running import KEYS, requested, served

openai = pytest.importorskip("openai")

MODEL = "radixkv-demo"
SYSTEM = "".join(f"Rule {number}: answer politely, name the page, ask if in doubt.\n" for number in range(12))
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which page explains pins?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "find_page",
        "description": "Find a page",
        "parameters": {"type": "object", "properties": {"topic": {"type": "string"}}},
    },
}
FEW: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log: Path = tmp_path_factory.mktemp("sdk") / "log"
    with served(log, "--num-blocks", "1024") as process:
        yield process.url
    assert "demo-acme" not in process.output.partition("Ctrl-C")[2], "no key is logged"


@pytest.fixture(scope="module")
def acme(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS["acme"], max_retries=0) as client:
        yield client


@pytest.mark.slow
def test_a_chat_has_the_fields_of_the_sdk_and_reports_what_was_cached(acme: Any) -> None:
    salt = {"salt": "the fields"}
    cold, warm = (acme.chat.completions.create(messages=CHAT, extra_body=salt, **FEW) for _ in range(2))
    assert cold.object == "chat.completion" and cold.model == MODEL and cold.id.startswith("chatcmpl-")
    (choice,) = warm.choices
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert choice.message.content == cold.choices[0].message.content and choice.message.tool_calls is None
    usage = warm.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    cached = usage.prompt_tokens_details.cached_tokens
    assert cold.usage.prompt_tokens_details.cached_tokens == 0 and cached % 16 == 0
    assert usage.prompt_tokens - 16 <= cached < usage.prompt_tokens
    assert warm._request_id.startswith("req_") and warm._request_id != cold._request_id


def test_a_chat_warmed_by_messages_is_cached(acme: Any, url: str) -> None:
    salt = {"salt": "warmed"}
    body = {"messages": CHAT, **salt}
    headers = {"X-Api-Key": KEYS["acme"]}
    warmed = requested("POST", f"{url}/v1/warm", json=body, headers=headers).json()
    reply = acme.chat.completions.create(messages=CHAT, extra_body=salt, **FEW)
    assert warmed["tokens"] == reply.usage.prompt_tokens_details.cached_tokens > 0


def test_contents_as_parts_are_the_same_prompt(acme: Any) -> None:
    middle = len(SYSTEM) // 2
    parts = [{"type": "text", "text": SYSTEM[:middle]}, {"type": "text", "text": SYSTEM[middle:]}]
    as_parts = [{"role": "developer", "content": parts}, CHAT[1]]
    salt = {"salt": "parts"}
    whole, split = (
        acme.chat.completions.create(messages=m, extra_body=salt, **FEW) for m in (CHAT, as_parts)
    )
    assert whole.choices[0].message == split.choices[0].message
    assert split.usage.prompt_tokens == whole.usage.prompt_tokens
    assert split.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_joins_to_the_whole_answer(acme: Any, n: int) -> None:
    options = {**FEW, "temperature": 0.9, "seed": 5, "n": n}
    whole = acme.chat.completions.create(messages=CHAT, **options)
    chunks = list(
        acme.chat.completions.create(
            messages=CHAT, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    texts, reasons = [""] * n, [""] * n
    for chunk in chunks:
        assert (chunk.object, chunk.id) == ("chat.completion.chunk", chunks[0].id)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [each.delta.role for chunk in chunks for each in chunk.choices if each.delta.role] == [
        "assistant"
    ] * n


def test_tools_and_results_are_part_of_the_prompt(acme: Any) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "find_page", "arguments": '{"topic": "pins"}'},
    }
    turns = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "page 12"},
    ]
    plain = acme.chat.completions.create(messages=CHAT, **FEW).usage.prompt_tokens
    with_tools = acme.chat.completions.create(messages=CHAT, tools=[TOOL], **FEW).usage.prompt_tokens
    with_calls = acme.chat.completions.create(messages=turns, tools=[TOOL], **FEW).usage.prompt_tokens
    hidden = acme.chat.completions.create(messages=CHAT, tools=[TOOL], tool_choice="none", **FEW)
    assert plain < with_tools < with_calls and hidden.usage.prompt_tokens == plain


def marked(text: str, **fields: str) -> dict[str, Any]:
    """A part that ends with a breakpoint."""
    return {"type": "text", "text": text, "prompt_cache_breakpoint": {"mode": "explicit", **fields}}


def written_and_read(acme: Any, messages: list[Any], salt: str, **fields: Any) -> tuple[int, int]:
    """The written tokens of a first request, and what a second one reads. The sums are checked."""
    replies = [
        acme.chat.completions.create(messages=messages, extra_body={"salt": salt}, **fields, **FEW)
        for _ in range(2)
    ]
    first, second = (each.usage.prompt_tokens_details for each in replies)
    assert first.cached_tokens == second.cache_write_tokens == 0
    assert first.cache_write_tokens <= replies[0].usage.prompt_tokens == replies[1].usage.prompt_tokens
    return first.cache_write_tokens, second.cached_tokens


def test_without_options_nothing_is_promised_and_yet_it_is_read_again(acme: Any) -> None:
    written, read = written_and_read(acme, CHAT, "no options", prompt_cache_retention="24h")
    assert written == 0 < read


def test_implicit_writes_the_whole_prompt(acme: Any) -> None:
    written, read = written_and_read(acme, CHAT, "implicit", prompt_cache_options={"ttl": "30m"})
    assert written == read > 0


def test_explicit_writes_up_to_its_breakpoints(acme: Any) -> None:
    chat = [{"role": "system", "content": [marked(SYSTEM, ttl="12h")]}, CHAT[1]]
    written, read = written_and_read(acme, chat, "explicit", prompt_cache_options={"mode": "explicit"})
    assert 0 < written <= read and written % 16 == 0


def test_explicit_without_breakpoints_uses_no_cache(acme: Any, url: str) -> None:
    warmed = {"messages": CHAT, "salt": "unused"}
    headers = {"X-Api-Key": KEYS["acme"]}
    assert requested("POST", f"{url}/v1/warm", json=warmed, headers=headers).status_code == 200
    before = requested("GET", f"{url}/v1/stats", headers=headers).json()
    written, read = written_and_read(acme, CHAT, "unused", prompt_cache_options={"mode": "explicit"})
    after = requested("GET", f"{url}/v1/stats", headers=headers).json()
    assert (written, read) == (0, 0)
    assert after["resident_blocks"] == before["resident_blocks"]
    assert after["num_namespaces"] == before["num_namespaces"]


def test_only_the_latest_breakpoints_are_written(acme: Any, url: str) -> None:
    parts = [marked(f"Rule {number}: answer politely and name the page. " * 2) for number in range(6)]
    chat = [{"role": "user", "content": parts}]
    written, _ = written_and_read(acme, chat, "latest", prompt_cache_options={"mode": "explicit"})
    pins = requested("GET", f"{url}/v1/pins", headers={"X-Api-Key": KEYS["acme"]}).json()["pins"]
    assert [pin["tokens"] for pin in pins if pin["salt"] == "latest"] == [written]


def test_completions_and_models(acme: Any) -> None:
    reply = acme.completions.create(prompt="Once upon a time", **FEW)
    assert reply.object == "text_completion" and reply.usage.prompt_tokens_details.cached_tokens >= 0
    chunks = acme.completions.create(prompt="Once upon a time", stream=True, **FEW)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == reply.choices[0].text
    (listed,) = acme.models.list().data
    assert listed == acme.models.retrieve(MODEL) and listed.id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        acme.models.retrieve("another")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_an_answer_says_what_the_rate_leaves(acme: Any) -> None:
    headers = acme.chat.completions.with_raw_response.create(messages=CHAT, **FEW).headers
    burst = headers["x-ratelimit-limit-requests"]
    assert burst == "2000" and 0 < int(headers["x-ratelimit-remaining-requests"]) < int(burst)


def test_hints_of_clients_change_nothing(acme: Any) -> None:
    hints = {
        "metadata": {"a": "b"}, "user": "ada", "safety_identifier": "x", "verbosity": "low", "store": False,
        "service_tier": "flex", "parallel_tool_calls": False, "reasoning_effort": "none",
        "response_format": {"type": "text"},
    }  # fmt: skip
    plain = acme.chat.completions.create(messages=CHAT, **FEW)
    body = {"stream_options": {"include_usage": True}}  # without a stream, as some clients send it
    reply = acme.chat.completions.create(messages=CHAT, **FEW, **hints, extra_body=body)
    assert reply.choices == plain.choices and reply.usage.prompt_tokens == plain.usage.prompt_tokens


def test_completions_report_what_the_cache_did(acme: Any) -> None:
    """Whole and streamed, and for several prompts in one request."""
    fields: dict[str, Any] = {"prompt": [SYSTEM, SYSTEM[::-1]], "extra_body": {"salt": "usage"}, **FEW}
    cold, warm = (acme.completions.create(**fields).usage for _ in range(2))
    *_, last = acme.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert (cold.prompt_tokens_details.cached_tokens, cold.prompt_tokens_details.cache_write_tokens) == (0, 0)
    read = warm.prompt_tokens_details.cached_tokens
    assert warm.prompt_tokens - 2 * 16 <= read < warm.prompt_tokens and read % 16 == 0
    assert last.usage == warm and warm.prompt_tokens_details.cache_write_tokens == 0


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"prompt": []}, "prompt", "validation_error"),
        ({"prompt": "word " * 100_000}, "prompt", "context_length_exceeded"),
        ({"prompt": [5] * 9000}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 2**30}, "max_tokens", "context_length_exceeded"),
        ({"logprobs": 21}, "logprobs", "validation_error"),
        ({"best_of": 3}, "best_of", "validation_error"),
        ({"extra_body": {"nonsense": 1}}, "nonsense", "validation_error"),
        ({"extra_body": {"hints": {"labels": {"a": []}}}}, "hints.labels", "validation_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_that_is_refused_is_a_bad_request_that_names_the_field(
    acme: Any, changed: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        acme.completions.create(**{"prompt": "x", "stream": stream, **FEW, **changed})
    error = caught.value
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert error.request_id is not None and error.request_id.startswith("req_")
    assert error.body["field"] == param and error.body["allowed"], "radixkv's own facts stay beside"


def test_completions_have_the_sdks_classes_of_errors(acme: Any, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        acme.completions.create(**{**FEW, "prompt": "x", "model": "another"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="nobody", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError) as unknown:
        stranger.completions.create(prompt="x", **FEW)
    assert unknown.value.code == "invalid_api_key" and unknown.value.request_id.startswith("req_")


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/secret"}}


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "validation_error"),
        ({"messages": []}, "messages", "validation_error"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role", "validation_error"),
        ({"messages": [{"role": "user", "content": "x " * 400_000}]}, "messages", "context_length_exceeded"),
        ({"max_tokens": 2**30}, "max_tokens", "context_length_exceeded"),
        ({"temperature": 3}, "temperature", "validation_error"),
        ({"tool_choice": "required"}, "tool_choice", "validation_error"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "validation_error"),
        ({"extra_body": {"nonsense": 1}}, "nonsense", "validation_error"),
        ({"store": True}, "store", "validation_error"),
        ({"prompt_cache_options": {"ttl": "1m"}}, "prompt_cache_options.ttl", "validation_error"),
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention", "validation_error"),
    ],
)  # fmt: skip
def test_a_refusal_is_a_bad_request_that_names_the_field(
    acme: Any, changed: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        acme.chat.completions.create(**{"messages": CHAT, **FEW, **changed})
    error = caught.value
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert error.request_id is not None and error.request_id.startswith("req_") and error.body["message"]


def test_other_errors_have_the_classes_of_the_sdk(acme: Any, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        acme.chat.completions.create(**{**FEW, "messages": CHAT, "model": "another"})
    assert missing.value.code == "model_not_found"
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="nobody", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError) as unknown:
        stranger.models.list()
    assert unknown.value.code == "invalid_api_key" and "nobody" not in str(unknown.value)
    operator = openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS["operator"], max_retries=0)
    with operator, pytest.raises(openai.PermissionDeniedError):
        operator.chat.completions.create(messages=CHAT, **FEW)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("X-Api-Key", "demo-acme")], 200),
        ([("x-goog-api-key", "demo-acme")], 200),
        ([("Authorization", "Bearer demo-acme"), ("X-Api-Key", "demo-acme")], 200),
        ([("Authorization", "Bearer demo-acme"), ("X-Api-Key", "demo-globex")], 401),
        ([("Authorization", "Bearer demo-acme"), ("x-goog-api-key", "nobody")], 401),
        ([("X-Api-Key", "demo-acme"), ("X-Api-Key", "demo-acme")], 401),
        ([("X-Api-Key", "")], 401),
        ([], 401),
    ],
)
def test_a_key_has_three_headers_and_two_keys_are_none(
    url: str, headers: list[tuple[str, str]], status: int
) -> None:
    answer = requested("GET", f"{url}/v1/models", headers=headers)
    assert answer.status_code == status
    assert requested("GET", f"{url}/v1/models?key=demo-acme").status_code == 401


def deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": "x"}', b'{"messages": {}}', b'{"messages": [[]]}',
        b'{"messages": [{"role": "user", "content": 5}]}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        ('{"messages": [' + ",".join(['{"role":"user","content":"x"}'] * 5000) + "]}").encode(),
        ('{"messages": ' + "[" * 100_000).encode(),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", '
         f'"parameters": {deep(5000)}' "}}]}").encode(),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", '
         '"parameters": {' + ",".join(f'"k{i}": 1' for i in range(2000)) + "}}}]}").encode(),
        json.dumps({"messages": [{"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep(5000)}}]}]}).encode(),
        b'{"messages": [{"role": "user", "content": "' + b"x" * (5 << 20) + b'"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}',
    ],
)  # fmt: skip
def test_a_hostile_body_is_refused_in_openais_form(url: str, body: bytes) -> None:
    headers = {"Authorization": "Bearer demo-acme", "Content-Type": "application/json"}
    answer = requested("POST", f"{url}/v1/chat/completions", content=body, headers=headers)
    assert 400 <= answer.status_code < 500, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_newline_in_a_text_begins_no_event(acme: Any, url: str) -> None:
    """Also in an error in the middle of a stream: each line of a stream is an event or empty."""
    body = {"messages": [{"role": "user", "content": "\n\ndata: [DONE]\n\n"}], "stream": True, **FEW}
    headers = {"X-Api-Key": "demo-acme"}
    answer = requested("POST", f"{url}/v1/chat/completions", json=body, headers=headers)
    lines = [line for line in answer.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1])


def test_health_and_version_need_no_key(url: str) -> None:
    assert requested("GET", f"{url}/health").json()["status"] == "ok"
    assert set(requested("GET", f"{url}/version").json()) == {"version"}
