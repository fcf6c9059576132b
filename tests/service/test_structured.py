"""Answers of a given form, over the SDKs of all providers: JSON of schemas, forced calls, and what is refused.

The demo model's text is noise. So a schema that leaves little open shows that the form holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from radixkv.service.answer_forms import form_of
from radixkv.service.schemas.contents import json_schema_of
from radixkv.service.schemas.structured import Wanted
from tests.service.loop_watch import loop_watched
from tests.service.running import KEYS, Running

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
genai = pytest.importorskip("google.genai")

MODEL = "radixkv-demo"
CHAT = [{"role": "user", "content": "Which page explains pins?"}]
FEW: dict[str, Any] = {"model": MODEL, "temperature": 0}
GREEDY: dict[str, Any] = {"model": MODEL, "extra_body": {"temperature": 0}}
"""The same for Anthropic's SDK, which has no argument for it."""


class Verdict(BaseModel, extra="forbid"):
    """An answer without free text."""

    page: Annotated[int, Field(ge=1, le=99)]
    tone: Literal["polite", "short"]
    is_sure: bool
    tags: Annotated[list[Literal["pins", "forks"]], Field(max_length=2)]


class Place(BaseModel, extra="forbid"):
    """Arguments of a call."""

    page: Literal[1, 2]
    is_next: bool


PLACE = Place.model_json_schema()
TOOLS = [("find_page", "Find a page"), ("turn_to", "Turn to a page")]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "description": about, "parameters": PLACE}}
    for name, about in TOOLS
]
RESPONSE_TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": about, "parameters": PLACE, "strict": True}
    for name, about in TOOLS
]
MESSAGE_TOOLS: list[Any] = [
    {"name": name, "description": about, "input_schema": PLACE} for name, about in TOOLS
]
NAMES = {name for name, _ in TOOLS}


@pytest.fixture
def client(live: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEYS["acme"], max_retries=0) as found:
        yield found


@pytest.fixture
def claude(live: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=live.url, api_key=KEYS["acme"], max_retries=0) as found:
        yield found


@pytest.fixture
def gemini(live: Running) -> Any:
    options = genai.types.HttpOptions(base_url=live.url, api_version="v1beta")
    return genai.Client(api_key=KEYS["acme"], http_options=options)


# --- JSON of a schema


@pytest.mark.slow
def test_a_chat_answers_a_type(client: Any) -> None:
    """Whole, several at once, and streamed: the same answer."""
    asked = {"messages": CHAT, "response_format": Verdict, "max_tokens": 500, **FEW}
    reply = client.chat.completions.parse(**asked)
    (choice,) = reply.choices
    assert isinstance(choice.message.parsed, Verdict) and choice.finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == choice.message.parsed
    drawn = {**asked, "temperature": 1, "n": 3, "seed": 5}
    several = [client.chat.completions.parse(**drawn).choices for _ in range(2)]
    assert [each.message.content for each in several[0]] == [each.message.content for each in several[1]]
    assert all(isinstance(each.message.parsed, Verdict) for each in several[0])


@pytest.mark.slow
def test_a_response_answers_a_type(client: Any) -> None:
    asked = {"input": "Which page?", "text_format": Verdict, "max_output_tokens": 500, **FEW}
    reply = client.responses.parse(**asked)
    assert isinstance(reply.output_parsed, Verdict) and reply.status == "completed"
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == reply.output_parsed


@pytest.mark.slow
def test_a_message_answers_a_type(claude: Any) -> None:
    """Anthropic's SDK leaves bounds of numbers and lists to the text, so they aren't in this type."""

    class Plain(BaseModel):
        tone: Literal["polite", "short"]
        is_sure: bool

    asked: dict[str, Any] = {"messages": CHAT, "output_format": Plain, "max_tokens": 500, **GREEDY}
    reply = claude.messages.parse(**asked)
    assert isinstance(reply.parsed_output, Plain) and reply.stop_reason == "end_turn"
    with claude.messages.stream(**asked) as stream:
        assert stream.get_final_message().parsed_output == reply.parsed_output


@pytest.mark.slow
def test_contents_answer_a_type(gemini: Any) -> None:
    """As a schema of Google's, and as a JSON schema."""
    config = {"response_mime_type": "application/json", "max_output_tokens": 500, "temperature": 0}
    schemas = [{"response_schema": Verdict}, {"response_json_schema": Verdict.model_json_schema()}]
    replies = [
        gemini.models.generate_content(model=MODEL, contents="Which?", config={**config, **schema})
        for schema in schemas
    ]
    assert replies[0].parsed == Verdict.model_validate_json(replies[1].text)
    streamed = gemini.models.generate_content_stream(
        model=MODEL, contents="Which?", config={**config, **schemas[0]}
    )
    assert "".join(each.text or "" for each in streamed) == replies[0].text


@pytest.mark.slow
def test_a_completion_answers_a_schema(live: Running) -> None:
    body = {
        "prompt": ["One:", "Two:"], "max_tokens": 500, "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "v", "schema": Verdict.model_json_schema()}},
    }  # fmt: skip
    choices = live.acme.post("/v1/completions", json=body).json()["choices"]
    for choice in choices:
        Verdict.model_validate_json(choice["text"])


@pytest.mark.slow
def test_json_mode_begins_an_object(client: Any) -> None:
    """Of noise an object needn't end within the most tokens."""
    json_mode = {"type": "json_object"}
    reply = client.chat.completions.create(messages=CHAT, response_format=json_mode, max_tokens=16, **FEW)
    assert reply.choices[0].message.content.startswith("{")
    response = client.responses.create(
        input="Which?", text={"format": json_mode}, max_output_tokens=16, **FEW
    )
    assert response.output_text.startswith("{")


# --- forced calls


def check_place(name: str, arguments: Any) -> None:
    assert name in NAMES
    Place.model_validate(json.loads(arguments) if isinstance(arguments, str) else arguments)


@pytest.mark.slow
def test_a_chat_has_to_call_a_tool(client: Any) -> None:
    asked = {"messages": CHAT, "tools": CHAT_TOOLS, "max_tokens": 400, **FEW}
    reply = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    (choice,) = reply.choices
    (call,) = choice.message.tool_calls
    check_place(call.function.name, call.function.arguments)
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    named = {"type": "function", "function": {"name": "turn_to"}}
    (choice,) = client.chat.completions.create(**asked, tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "turn_to"
    chunks = list(client.chat.completions.create(**asked, tool_choice=named, stream=True))
    (streamed,) = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert (streamed.function.name, streamed.function.arguments) == ("turn_to", call.function.arguments)


@pytest.mark.slow
def test_a_response_has_to_call_a_function(client: Any) -> None:
    asked = {"input": "Which?", "tools": RESPONSE_TOOLS, "max_output_tokens": 400, **FEW}
    one = client.responses.create(**asked, tool_choice="required", parallel_tool_calls=False)
    (call,) = one.output
    check_place(call.name, call.arguments)
    named = client.responses.create(**asked, tool_choice={"type": "function", "name": "turn_to"})
    assert [each.name for each in named.output] == ["turn_to"]


@pytest.mark.slow
def test_a_message_has_to_use_a_tool(claude: Any) -> None:
    asked: dict[str, Any] = {"messages": CHAT, "tools": MESSAGE_TOOLS, "max_tokens": 400, **GREEDY}
    choice: dict[str, Any] = {"type": "any", "disable_parallel_tool_use": True}
    reply = claude.messages.create(**asked, tool_choice=choice)
    (block,) = reply.content
    check_place(block.name, block.input)
    assert reply.stop_reason == "tool_use"
    reply = claude.messages.create(**asked, tool_choice={"type": "tool", "name": "turn_to"})
    assert [each.name for each in reply.content] == ["turn_to"]


@pytest.mark.slow
def test_contents_have_to_call_a_function(gemini: Any) -> None:
    types = genai.types
    page = types.Schema(type="INTEGER", minimum=1, maximum=2)
    schema = types.Schema(
        type="OBJECT",
        properties={"is_next": types.Schema(type="BOOLEAN"), "page": page},
        required=["page", "is_next"],
        property_ordering=["page", "is_next"],
    )
    tools = [types.Tool(function_declarations=[
        types.FunctionDeclaration(name=name, description=about, parameters=schema) for name, about in TOOLS
    ])]  # fmt: skip
    calling = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["turn_to"])
    config = types.GenerateContentConfig(
        tools=tools,
        tool_config=types.ToolConfig(function_calling_config=calling),
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        max_output_tokens=400,
        temperature=0,
    )
    reply = gemini.models.generate_content(model=MODEL, contents="Which?", config=config)
    assert reply.function_calls and {each.name for each in reply.function_calls} == {"turn_to"}
    for each in reply.function_calls:
        check_place(each.name, each.args)
        assert list(each.args) == ["page", "is_next"]


@pytest.mark.slow
def test_a_long_body_is_bound_too(live: Running) -> None:
    """It is read in another process, with its schema or its tools."""
    long = [{"role": "user", "content": "Which page explains pins? " * 600}]
    body: dict[str, Any] = {"messages": long, "max_tokens": 500, "temperature": 0}
    schema = {"name": "v", "schema": Verdict.model_json_schema()}
    fields = {"response_format": {"type": "json_schema", "json_schema": schema}}
    answer = live.acme.post("/v1/chat/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    Verdict.model_validate_json(choice["message"]["content"])
    named = {"type": "function", "function": {"name": "turn_to"}}
    fields = {"tools": CHAT_TOOLS, "tool_choice": named}
    choice = live.acme.post("/v1/chat/completions", json={**body, **fields}).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    check_place(call["function"]["name"], call["function"]["arguments"])


def test_the_forms_of_what_is_wanted() -> None:
    """A schema, or calls of tools in the form that is read; with both and no force, one or the other."""

    def parts(wanted: Wanted) -> list[tuple[list[str], Any]]:
        form = form_of(wanted, CHAT_TOOLS)
        found = [] if form is None else json.loads(form.alternatives)
        return [([each["before"] for each in one["parts"]], one["separator"]) for one in found]

    begun = [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name, _ in TOOLS]
    assert parts(Wanted()) == []
    assert parts(Wanted(must_call=True)) == [(begun, "\n")]
    assert parts(Wanted(must_call=True, names=("turn_to",), one_call=True)) == [(begun[1:], None)]
    assert parts(Wanted({"type": "object"}, "text.format")) == [([""], None), (begun, "\n")]
    assert parts(Wanted({"type": "object"}, "text.format", must_call=True)) == [(begun, "\n")]
    alone = form_of(Wanted({}, "text.format"), [])
    assert alone is not None and alone.field == "text.format" and len(json.loads(alone.alternatives)) == 1


# --- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "v"}}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "v", "schema": {"type": "date"}},
                }
            },
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "v", "schema": {"not": {}}}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "v", "schema": {"enum": ["x" * 300_000]}},
                }
            },
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "leave"}}},
            "tool_choice",
        ),
        ({"tools": CHAT_TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_what_cannot_be_followed_is_a_bad_request(live: Running, fields: dict[str, Any], param: str) -> None:
    answer = live.acme.post("/v1/chat/completions", json={"messages": CHAT, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert error["message"]


def test_a_beam_search_follows_no_schema(live: Running) -> None:
    body = {"prompt": "x", "use_beam_search": True, "n": 2, "response_format": {"type": "json_object"}}
    error = live.acme.post("/v1/completions", json=body).json()["error"]
    assert error["param"] == "use_beam_search"


@pytest.mark.slow
def test_a_hostile_schema_holds_up_nobody(live: Running) -> None:
    """It is tried in a process of its own, off the event loop, and the words of the refusal are the library's."""
    union = [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(12)]
    schema = {"allOf": [{"anyOf": union} for _ in range(12)]}
    form = {"type": "json_schema", "json_schema": {"name": "v", "schema": schema}}
    with loop_watched(live.service) as watch:
        answer = live.acme.post("/v1/chat/completions", json={"messages": CHAT, "response_format": form})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format", answer.text
    assert watch.longest_work_s < 0.2
    assert live.acme.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_schemas_of_google_become_json_schemas() -> None:
    given = {
        "type": "OBJECT",
        "properties": {
            "b": {"type": "STRING", "nullable": True, "maxLength": "5"},
            "a": {
                "type": "ARRAY",
                "min_items": 1,
                "items": {"any_of": [{"type": "INTEGER"}, {"type": "NULL"}]},
            },
            "c": {"type": "STRING", "format": "enum", "enum": ["x"]},
        },
        "propertyOrdering": ["a", "b"],
        "required": ["a"],
        "example": {},
    }
    found = json_schema_of(given)
    assert list(found["properties"]) == ["a", "b", "c"]
    assert found["properties"] == {
        "a": {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "b": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "c": {"type": "string", "enum": ["x"]},
    }
    assert found["type"] == "object" and found["required"] == ["a"] and "example" not in found
    assert found["additionalProperties"] is False
    plain = Verdict.model_json_schema()
    assert json_schema_of(plain) == plain


# --- scores of tokens


@pytest.mark.slow
def test_penalties_and_biases_change_the_tokens(live: Running, client: Any) -> None:
    asked = {"messages": CHAT, "max_tokens": 12, **FEW}

    def text(**fields: Any) -> str:
        return str(client.chat.completions.create(**asked, **fields).choices[0].message.content)

    plain = text()
    token = live.acme.post("/tokenize", json={"prompt": "page"}).json()["tokens"][0]
    assert "page" in text(logit_bias={str(token): 100})
    neutral = {
        "logit_bias": {},
        "presence_penalty": 0,
        "extra_body": {"repetition_penalty": 1.0, "min_tokens": 0},
    }
    assert text(**neutral) == plain
    twice = {"logit_bias": {str(token): 100}, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    assert text(**twice) == text(logit_bias={str(token): 100}), "no penalty outweighs this bias"
    assert text(logit_bias={str(token): -100}) == plain, "the likeliest tokens are others"


@pytest.mark.slow
def test_log_probabilities_of_a_chat(client: Any) -> None:
    asked = {"messages": CHAT, "max_tokens": 8, "logprobs": True, "top_logprobs": 3, **FEW}
    (choice,) = client.chat.completions.create(**asked).choices
    tokens = choice.logprobs.content
    assert b"".join(bytes(each.bytes) for each in tokens).decode(errors="replace") == choice.message.content
    for each in tokens:
        assert each.logprob <= 0 and len(each.top_logprobs) == 3
        assert each.top_logprobs[0].logprob == pytest.approx(each.logprob), "greedy: the likeliest is chosen"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    told = [
        one for chunk in chunks for each in chunk.choices if each.logprobs for one in each.logprobs.content
    ]
    assert [each.model_dump() for each in told] == [each.model_dump() for each in tokens]
    without = client.chat.completions.create(messages=CHAT, max_tokens=8, **FEW).choices[0]
    assert without.logprobs is None and without.message.content == choice.message.content


@pytest.mark.slow
def test_log_probabilities_of_the_other_shapes(client: Any, gemini: Any) -> None:
    """Of completions, responses and contents."""
    asked = {"prompt": "Say it", "max_tokens": 8, "logprobs": 2, **FEW}
    choice = client.completions.create(**asked).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text and len(told.token_logprobs) == len(told.tokens)
    assert [
        choice.text[at : at + len(each)] for at, each in zip(told.text_offset, told.tokens, strict=True)
    ] == told.tokens
    streamed = [each for chunk in client.completions.create(**asked, stream=True) for each in chunk.choices]
    assert sum((each.logprobs.tokens for each in streamed if each.logprobs), []) == told.tokens
    include = ["message.output_text.logprobs"]
    reply = client.responses.create(input="Say", include=include, top_logprobs=2, max_output_tokens=8, **FEW)
    (part,) = reply.output[0].content
    assert "".join(each.token for each in part.logprobs) == part.text
    events = list(
        client.responses.create(
            input="Say", include=include, top_logprobs=2, max_output_tokens=8, stream=True, **FEW
        )
    )
    deltas = [
        each for event in events if event.type == "response.output_text.delta" for each in event.logprobs
    ]
    assert [each.token for each in deltas] == [each.token for each in part.logprobs]
    config = {"response_logprobs": True, "logprobs": 2, "max_output_tokens": 8, "temperature": 0}
    candidate = gemini.models.generate_content(model=MODEL, contents="Say", config=config).candidates[0]
    chosen = candidate.logprobs_result.chosen_candidates
    assert "".join(each.token for each in chosen) == candidate.content.parts[0].text
    assert candidate.avg_logprobs == pytest.approx(sum(each.log_probability for each in chosen) / len(chosen))
    assert all(len(each.candidates) == 2 for each in candidate.logprobs_result.top_candidates)
