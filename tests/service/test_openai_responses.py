"""OpenAI's Responses through its SDK, unchanged and pinned: texts, tools, streams, prompt caching, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.running import KEYS, requested, served

openai = pytest.importorskip("openai")

MODEL = "radixkv-demo"
RULES = "".join(f"Rule {number}: answer politely, name the page, ask if in doubt.\n" for number in range(12))
ASKED = "Which page explains pins?"
TOOL = {
    "type": "function",
    "name": "find_page",
    "description": "Find a page",
    "parameters": {"type": "object", "properties": {"topic": {"type": "string"}}},
    "strict": True,
}
FEW: dict[str, Any] = {"model": MODEL, "max_output_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log: Path = tmp_path_factory.mktemp("sdk") / "log"
    with served(log, "--num-blocks", "1024") as process:
        yield process.url


@pytest.fixture(scope="module")
def acme(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS["acme"], max_retries=0) as client:
        yield client


@pytest.mark.slow
def test_a_response_has_the_fields_of_the_sdk_and_is_the_answer_of_a_chat(acme: Any) -> None:
    asked = {"instructions": RULES, "input": ASKED, "extra_body": {"salt": "same"}}
    reply = acme.responses.create(**asked, **FEW)
    assert (reply.object, reply.model) == ("response", MODEL) and reply.id.startswith("resp_")
    assert reply.status == ("incomplete" if reply.usage.output_tokens == 6 else "completed")
    assert (reply.incomplete_details is None) == (reply.status == "completed")
    chat = acme.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": RULES}, {"role": "user", "content": ASKED}],
        extra_body={"salt": "same"},
        max_tokens=6,
        temperature=0,
    )
    assert reply.output_text == chat.choices[0].message.content
    assert reply.usage.input_tokens == chat.usage.prompt_tokens
    assert (
        chat.usage.prompt_tokens_details.cached_tokens > reply.usage.input_tokens_details.cached_tokens == 0
    )
    assert reply._request_id.startswith("req_")


@pytest.mark.parametrize(("ttl", "field"), [("30m", "ttl_30m_tokens"), ("12h", "ttl_12h_tokens")])
def test_a_ttl_is_written_by_name_and_then_read(acme: Any, ttl: str, field: str) -> None:
    asked = {"instructions": RULES, "input": ASKED, "prompt_cache_options": {"ttl": ttl}}
    wrote, read = (acme.responses.create(**asked, extra_body={"salt": ttl}, **FEW).usage for _ in range(2))
    details = wrote.input_tokens_details
    assert details.cache_write_tokens > 0 == details.cached_tokens
    assert getattr(details.cache_write_tokens_details, field) == details.cache_write_tokens
    assert read.input_tokens_details.cached_tokens == details.cache_write_tokens
    assert read.input_tokens_details.cache_write_tokens == 0


def test_a_prewarmed_prompt_is_read(acme: Any) -> None:
    asked = {"instructions": RULES, "input": ASKED, "extra_body": {"salt": "prewarmed"}}
    ahead = acme.responses.create(
        **asked, prompt_cache_options={"prewarm": True, "comparison_response_id": "resp_1"}, **FEW
    )
    assert ahead.output == [] and ahead.usage.output_tokens == 0
    assert ahead.prompt_cache_diagnostics.type == "unavailable"
    reply = acme.responses.create(**asked, **FEW)
    assert (
        reply.usage.input_tokens_details.cached_tokens
        == ahead.usage.input_tokens_details.cache_write_tokens
        > 0
    )


def test_explicit_without_breakpoints_uses_no_cache(acme: Any) -> None:
    asked = {"input": RULES, "prompt_cache_options": {"mode": "explicit"}, "extra_body": {"salt": "unused"}}
    for _ in range(2):
        details = acme.responses.create(**asked, **FEW).usage.input_tokens_details
        assert details.cached_tokens == details.cache_write_tokens == 0


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_stream_joins_to_the_whole_response(acme: Any, tools: list[Any]) -> None:
    asked = {
        "model": MODEL, "instructions": RULES, "input": ASKED, "tools": tools, "max_output_tokens": 12,
        "extra_body": {"seed": 5, "salt": f"stream-{len(tools)}"},
    }  # fmt: skip
    with acme.responses.stream(**asked) as stream:
        events = list(stream)
    whole = acme.responses.create(**asked)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}" and last.status == whole.status
    assert last.output_text == whole.output_text
    assert (
        "".join(each.delta for each in events if each.type == "response.output_text.delta")
        == whole.output_text
    )
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.input_tokens == whole.usage.input_tokens


def test_items_of_calls_and_results_are_part_of_the_prompt(acme: Any) -> None:
    call = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "find_page",
        "arguments": '{"topic": "pins"}',
    }
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": "page 12"},
    ]
    few = {**FEW, "instructions": RULES}
    plain = acme.responses.create(input=ASKED, **few).usage.input_tokens
    shown = acme.responses.create(input=ASKED, tools=[TOOL], **few).usage.input_tokens
    called = acme.responses.create(input=items, tools=[TOOL], **few).usage.input_tokens
    hidden = acme.responses.create(input=ASKED, tools=[TOOL], tool_choice="none", **few).usage.input_tokens
    assert plain == hidden < shown < called


def test_tokens_of_an_input_are_counted(acme: Any) -> None:
    asked = {"model": MODEL, "instructions": RULES, "input": ASKED, "tools": [TOOL]}
    counted = acme.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == acme.responses.create(**asked, max_output_tokens=1).usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        acme.responses.input_tokens.count(model="another", input=ASKED)


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/secret"}]}


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"store": True}, "store", "validation_error"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "validation_error"),
        ({"conversation": "conv_1"}, "conversation", "validation_error"),
        ({"background": True}, "background", "validation_error"),
        ({"input": [IMAGE]}, "input[0].content[0].type", "validation_error"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type", "validation_error"),
        ({"input": []}, "input", "validation_error"),
        ({"input": "x " * 400_000}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 2**30}, "max_output_tokens", "context_length_exceeded"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "validation_error"),
        ({"tool_choice": "required"}, "tool_choice", "validation_error"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "validation_error"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "validation_error"),
        ({"prompt_cache_options": {"ttl": "1m"}}, "prompt_cache_options.ttl", "validation_error"),
        ({"extra_body": {"nonsense": 1}}, "nonsense", "validation_error"),
    ],
)
def test_a_refusal_is_a_bad_request_that_names_the_field(
    acme: Any, changed: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        acme.responses.create(**{"input": ASKED, **FEW, **changed})
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id


@pytest.mark.parametrize(
    "body",
    [
        b"", b'{"input": 5}', b'{"input": [[]]}', b'{"input": "\\ud800"}',
        ('{"input": [' + ",".join(['{"role":"user","content":"x"}'] * 20_000) + "]}").encode(),
        ('{"input": ' + "[" * 100_000).encode(),
        json.dumps({"input": [{"type": "function_call", "call_id": "c", "name": "f",
                               "arguments": '{"a":' * 5000 + "1" + "}" * 5000}]}).encode(),
    ],
)  # fmt: skip
def test_a_hostile_body_is_refused_in_openais_form(url: str, body: bytes) -> None:
    headers = {"Authorization": "Bearer demo-acme", "Content-Type": "application/json"}
    answer = requested("POST", f"{url}/v1/responses", content=body, headers=headers)
    assert 400 <= answer.status_code < 500, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
