"""Anthropic's SDK, unchanged and pinned, against ``radixkv serve``: messages, streams, tools, TTLs, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.running import KEYS, requested, served

pytestmark = pytest.mark.slow

anthropic = pytest.importorskip("anthropic")

MODEL = "radixkv-demo"
SYSTEM = "".join(f"Rule {number}: answer politely, name the page, ask if in doubt.\n" for number in range(12))
ASKED = [{"role": "user", "content": "Which page explains pins?"}]
TOOL = {
    "name": "find_page",
    "description": "Find a page",
    "input_schema": {"type": "object", "properties": {"topic": {"type": "string"}}},
}
FEW: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "extra_body": {"temperature": 0}}


def few(**own: Any) -> dict[str, Any]:
    """A short greedy answer. The SDK has no arguments for the temperature and for fields of our own."""
    return {**FEW, "extra_body": {"temperature": 0, **own}}


def marked(text: str, ttl: str | None = None) -> dict[str, Any]:
    """A text block with a breakpoint."""
    control = {"type": "ephemeral"} | ({} if ttl is None else {"ttl": ttl})
    return {"type": "text", "text": text, "cache_control": control}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("sdk")
    keys = folder / "keys.json"
    pinning = {"keys": [KEYS["acme"]], "max_pinned_blocks": 512}
    tenants = {"acme": pinning, "globex": {"keys": [KEYS["globex"]], "max_pinned_blocks": 3}}
    keys.write_text(json.dumps({"operator": KEYS["operator"], "tenants": tenants}))
    with served(folder / "log", "--num-blocks", "1024", "--keys", str(keys)) as process:
        yield process.url
    assert "demo-acme" not in process.output.partition("Ctrl-C")[2], "no key is logged"


def client_of(url: str, who: str) -> Any:
    return anthropic.Anthropic(base_url=url, api_key=KEYS[who], max_retries=0)


@pytest.fixture(scope="module")
def acme(url: str) -> Iterator[Any]:
    with client_of(url, "acme") as client:
        yield client


def prompt_tokens(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


def test_a_message_has_the_fields_of_the_sdk_and_reports_what_was_read(acme: Any) -> None:
    asked = {"system": SYSTEM, "messages": ASKED, **few(salt="plain")}
    cold, warm = (acme.messages.create(**asked) for _ in range(2))
    assert (cold.type, cold.role, cold.model) == ("message", "assistant", MODEL) and cold.id.startswith(
        "msg_"
    )
    assert [block.type for block in cold.content] == ["text"] and cold.content == warm.content
    assert cold.stop_reason in ("end_turn", "max_tokens") and cold.stop_sequence is None
    assert cold.usage.cache_creation_input_tokens == cold.usage.cache_read_input_tokens == 0
    assert warm.usage.cache_read_input_tokens % 16 == 0
    assert prompt_tokens(warm.usage) == prompt_tokens(cold.usage) == cold.usage.input_tokens
    assert cold.usage.input_tokens - 16 <= warm.usage.cache_read_input_tokens < cold.usage.input_tokens
    assert warm._request_id.startswith("req_") and warm._request_id != cold._request_id


def test_blocks_and_texts_are_the_same_prompt(acme: Any) -> None:
    half = len(SYSTEM) // 2
    blocks = [{"type": "text", "text": SYSTEM[:half]}, {"type": "text", "text": SYSTEM[half:]}]
    asked = [{"role": "user", "content": [{"type": "text", "text": ASKED[0]["content"]}]}]
    counts = {
        acme.messages.count_tokens(model=MODEL, system=system, messages=messages).input_tokens
        for system in (SYSTEM, blocks)
        for messages in (ASKED, asked)
    }
    reply = acme.messages.create(system=blocks, messages=asked, **few(salt="blocks"))
    assert counts == {prompt_tokens(reply.usage)}


@pytest.mark.parametrize("ttl", [None, "5m", "1h"])
def test_a_breakpoint_is_written_for_its_ttl_and_then_read(acme: Any, url: str, ttl: str | None) -> None:
    asked = {"messages": ASKED, **few(salt=f"ttl-{ttl}")}
    wrote, read = (acme.messages.create(system=[marked(SYSTEM, ttl)], **asked) for _ in range(2))
    written = wrote.usage.cache_creation_input_tokens
    assert written % 16 == 0 and written > 0 and read.usage.cache_creation_input_tokens == 0
    creation = wrote.usage.cache_creation
    by_ttl = (creation.ephemeral_5m_input_tokens, creation.ephemeral_1h_input_tokens)
    assert by_ttl == ((0, written) if ttl == "1h" else (written, 0))
    assert prompt_tokens(wrote.usage) == prompt_tokens(read.usage)
    assert read.usage.cache_read_input_tokens >= written
    headers = {"X-Api-Key": KEYS["acme"]}
    pins = requested("GET", f"{url}/v1/pins", headers=headers).json()["pins"]
    (mine,) = (pin for pin in pins if pin["salt"] == f"ttl-{ttl}")
    assert mine["tokens"] == written
    assert (300 < mine["ttl_s"] <= 3600) if ttl == "1h" else (0 < mine["ttl_s"] <= 300)


def test_breakpoints_of_several_ttls_are_counted_apart(acme: Any) -> None:
    turns = [{"role": "user", "content": [marked("Which page explains pins, and why? " * 4, "5m")]}]
    reply = acme.messages.create(system=[marked(SYSTEM, "1h")], messages=turns, **few(salt="two ttls"))
    creation = reply.usage.cache_creation
    assert creation.ephemeral_1h_input_tokens > 0 and creation.ephemeral_5m_input_tokens > 0
    total = creation.ephemeral_1h_input_tokens + creation.ephemeral_5m_input_tokens
    assert total == reply.usage.cache_creation_input_tokens


def test_the_top_level_breakpoint_is_the_whole_prompt(acme: Any) -> None:
    reply = acme.messages.create(
        system=SYSTEM,
        messages=ASKED,
        cache_control={"type": "ephemeral"},
        **few(salt="top"),
    )
    assert reply.usage.input_tokens < 16 <= reply.usage.cache_creation_input_tokens


def test_a_prompt_is_computed_ahead_with_no_token_of_an_answer(acme: Any) -> None:
    asked = {"system": [marked(SYSTEM, "1h")], "messages": ASKED, **few(salt="ahead")}
    ahead = acme.messages.create(**{**asked, "max_tokens": 0})
    assert (ahead.content, ahead.stop_reason, ahead.usage.output_tokens) == ([], "max_tokens", 0)
    reply = acme.messages.create(**asked)
    assert ahead.usage.cache_creation.ephemeral_1h_input_tokens > 0
    assert reply.usage.cache_read_input_tokens >= prompt_tokens(ahead.usage) - 16
    assert prompt_tokens(reply.usage) == prompt_tokens(ahead.usage)


def test_beyond_the_budget_a_message_is_served_and_a_header_says_why_nothing_was_written(url: str) -> None:
    with client_of(url, "globex") as globex:
        raw = globex.messages.with_raw_response.create(system=[marked(SYSTEM)], messages=ASKED, **FEW)
        reply = raw.parse()
    assert raw.headers["x-cache-write-refused"] == "pin_budget_exceeded"
    assert reply.usage.cache_creation_input_tokens == 0 and reply.content[0].type == "text"
    assert reply.usage.cache_creation.ephemeral_5m_input_tokens == 0


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_stream_joins_to_the_whole_message(acme: Any, tools: list[Any]) -> None:
    asked = {
        "system": [marked(SYSTEM, "1h")], "messages": ASKED, "tools": tools,
        "extra_body": {"salt": f"stream-{len(tools)}", "seed": 5}, "max_tokens": 12, "model": MODEL,
    }  # fmt: skip
    with acme.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "input_json")]
        streamed = stream.get_final_message()
        assert stream.request_id.startswith("req_")
    whole = acme.messages.create(**asked)
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(streamed.usage) == prompt_tokens(whole.usage)
    assert streamed.usage.cache_creation.ephemeral_1h_input_tokens > 0
    assert (
        streamed.usage.cache_creation.ephemeral_1h_input_tokens == streamed.usage.cache_creation_input_tokens
    )
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tools_and_results_are_part_of_the_prompt(acme: Any) -> None:
    turns = [
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "find_page", "input": {"topic": "pins"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [marked("page 12")]},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]

    def count(**fields: Any) -> int:
        return int(acme.messages.count_tokens(model=MODEL, system=SYSTEM, **fields).input_tokens)

    plain, tools = count(messages=ASKED), count(messages=ASKED, tools=[TOOL])
    assert plain < tools < count(messages=turns, tools=[TOOL])
    assert count(messages=ASKED, tools=[TOOL], tool_choice={"type": "none"}) == plain
    reply = acme.messages.create(
        system=SYSTEM, messages=turns, tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}], **FEW
    )
    assert reply.usage.cache_creation_input_tokens > 0, "the breakpoint of the tool covers the system text"


def test_a_stop_sequence_is_named(acme: Any) -> None:
    asked = {"messages": ASKED, **few(), "max_tokens": 12}
    text = acme.messages.create(**asked).content[0].text
    stop = text[2:5]
    reply = acme.messages.create(**asked, stop_sequences=["\x00", stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert reply.content[0].text == text[: text.index(stop)]


def test_the_model_is_listed_in_pages(acme: Any) -> None:
    page = acme.models.list(limit=5)
    (listed,) = page.data
    assert (listed.id, listed.type, listed.display_name, listed.lifecycle) == (
        MODEL,
        "model",
        MODEL,
        "active",
    )
    assert listed.max_input_tokens == 8192 and listed.created_at.year > 2000
    assert page.first_id == page.last_id == MODEL and not page.has_more and len(list(page)) == 1
    assert acme.models.retrieve(MODEL) == listed and acme.beta.models.retrieve(MODEL).id == MODEL
    for place in ({"after_id": MODEL}, {"before_id": MODEL}):
        assert acme.models.list(**place).data == []
    with pytest.raises(anthropic.BadRequestError):
        acme.models.list(limit=0)
    with pytest.raises(anthropic.NotFoundError) as missing:
        acme.models.retrieve("another")
    assert missing.value.body["error"]["type"] == "not_found_error"


def test_a_runner_of_tools_goes_on_without_threads(acme: Any) -> None:
    @anthropic.beta_tool
    def find_page(topic: str) -> str:
        """Find a page."""
        return f"page of {topic}"

    runner = acme.beta.messages.tool_runner(
        model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Which page?"}], tools=[find_page]
    )
    assert runner.until_done().role == "assistant"


def test_batches_are_not_found(acme: Any) -> None:
    for ask in (acme.messages.batches.list, lambda: acme.messages.batches.retrieve("msgbatch_1")):
        with pytest.raises(anthropic.NotFoundError) as missing:
            ask()
        assert missing.value.body["error"]["type"] == "not_found_error"


def test_hints_of_clients_change_nothing(acme: Any) -> None:
    hints = {
        "metadata": {"user_id": "ada"}, "service_tier": "auto", "thinking": {"type": "disabled"},
        "extra_headers": {"anthropic-beta": "context-management-2025-06-27"},
    }  # fmt: skip
    body = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "salt": "hints",
    }
    control = {"type": "ephemeral", "scope": "global"}
    system = [{"type": "text", "text": SYSTEM, "cache_control": control}]
    reply = acme.messages.create(
        **{**FEW, "extra_body": {**body, "temperature": 0}}, **hints, system=system, messages=ASKED
    )
    plain = acme.messages.create(system=SYSTEM, messages=ASKED, **few(salt="hints"))
    assert reply.content == plain.content and prompt_tokens(reply.usage) == prompt_tokens(plain.usage)


def test_diagnostics_are_unavailable(acme: Any) -> None:
    reply = acme.messages.create(messages=ASKED, diagnostics={"previous_message_id": None}, **FEW)
    assert reply.diagnostics.cache_miss_reason.type == "unavailable"
    assert acme.messages.create(messages=ASKED, **FEW).diagnostics is None


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/secret"}}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": []}, "messages"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "The page is"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [marked(str(n)) for n in range(5)]}]}, "cache_control"),
        ({"messages": [{"role": "user", "content": "x " * 400_000}]}, "messages"),
        ({"max_tokens": 20_000}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"extra_body": {"tenant": "globex"}}, "tenant"),
    ],
)  # fmt: skip
def test_a_refusal_is_a_bad_request_that_names_the_field(
    acme: Any, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        acme.messages.create(**{"messages": ASKED, **FEW, **changed})
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error" and named in error["message"], error
    assert caught.value.body["request_id"] == caught.value.request_id and caught.value.request_id


def test_other_errors_have_the_classes_of_the_sdk(acme: Any, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        acme.messages.create(**{**FEW, "messages": ASKED, "model": "another"})
    stranger = anthropic.Anthropic(base_url=url, api_key="nobody", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError) as unknown:
        stranger.messages.create(messages=ASKED, **FEW)
    assert unknown.value.body["error"]["type"] == "authentication_error"
    with client_of(url, "operator") as operator, pytest.raises(anthropic.PermissionDeniedError):
        operator.messages.create(messages=ASKED, **FEW)
    headers = {"X-Api-Key": KEYS["acme"], "Authorization": f"Bearer {KEYS['globex']}"}
    both = requested("POST", f"{url}/v1/messages", json={}, headers=headers)
    assert both.status_code == 401 and both.json()["error"]["type"] == "authentication_error"


def deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


BLOCK = '{"type":"text","text":"x","cache_control":{"type":"ephemeral"}}'


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'{"messages": "x"}', b'{"max_tokens": 1, "messages": [[]]}',
        f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": [{",".join([BLOCK] * 20_000)}]}}]}}'.encode(),
        f'{{"max_tokens": 1, "messages": [{",".join([f"""{{"role":"user","content":[{BLOCK}]}}"""] * 512)}]}}'.encode(),
        f'{{"max_tokens": 1, "system": {"[" * 100_000}'.encode(),
        f'{{"max_tokens": 1, "messages": [{{"role": "assistant", "content": [{{"type": "tool_use", "id": "a", '
        f'"name": "f", "input": {deep(5000)}}}]}}]}}'.encode(),
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "' + b"x" * (5 << 20) + b'"}]}',
    ],
)  # fmt: skip
def test_a_hostile_body_is_refused_in_anthropics_form(url: str, body: bytes) -> None:
    headers = {"X-Api-Key": KEYS["acme"], "Content-Type": "application/json"}
    answer = requested("POST", f"{url}/v1/messages", content=body, headers=headers)
    assert 400 <= answer.status_code < 500, answer.text
    assert set(answer.json()) == {"type", "error", "request_id"}
    assert set(answer.json()["error"]) == {"type", "message"}
    assert answer.headers["request-id"] == answer.json()["request_id"]
