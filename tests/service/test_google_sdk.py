"""Google's SDK, unchanged and pinned, against ``radixkv serve``: cached contents, generation from them, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.running import KEYS, client, requested, served
from tests.waiting import eventually

genai = pytest.importorskip("google.genai")
from google.genai import errors, types  # noqa: E402 after the check that it is installed

MODEL = "radixkv-demo"
RULES = "".join(f"Rule {number}: answer politely, name the page, ask if in doubt.\n" for number in range(12))
ASKED = "Which page explains pins?"
WIDE_S = 200
"""What may pass between a request and its answer, in seconds."""
FEW: dict[str, Any] = {"max_output_tokens": 6, "temperature": 0}
TOOL = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="find_page",
            description="Find a page",
            parameters=types.Schema(type="OBJECT", properties={"topic": types.Schema(type="STRING")}),
        )
    ]
)


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


def client_of(url: str, who: str, version: str = "v1beta") -> Any:
    return genai.Client(api_key=KEYS[who], http_options=types.HttpOptions(base_url=url, api_version=version))


@pytest.fixture(scope="module")
def acme(url: str) -> Any:
    return client_of(url, "acme")


def created(client: Any, ttl: str = "600s", **fields: Any) -> Any:
    config = types.CreateCachedContentConfig(**{"system_instruction": RULES, "ttl": ttl, **fields})
    return client.caches.create(model=MODEL, config=config)


def generated(client: Any, contents: Any = ASKED, **fields: Any) -> Any:
    return client.models.generate_content(
        model=MODEL, contents=contents, config=types.GenerateContentConfig(**FEW, **fields)
    )


def pinned_blocks(url: str) -> int:
    headers = {"x-goog-api-key": KEYS["acme"]}
    return int(requested("GET", f"{url}/v1/stats", headers=headers).json()["pinned_blocks"])


@pytest.mark.parametrize("version", ["v1beta", "v1"])
def test_a_content_lives_from_create_to_delete(url: str, version: str) -> None:
    client = client_of(url, "acme", version)
    content = created(client, display_name="rules", contents=[ASKED])
    assert content.name.startswith("cachedContents/") and content.model == f"models/{MODEL}"
    assert content.display_name == "rules" and content.usage_metadata.total_token_count % 16 == 0
    assert (content.expire_time - content.create_time).total_seconds() == pytest.approx(600, abs=WIDE_S)
    found = client.caches.get(name=content.name)
    assert (found.name, found.display_name, found.create_time) == (content.name, "rules", content.create_time)
    assert found.usage_metadata == content.usage_metadata
    later = client.caches.update(name=content.name, config=types.UpdateCachedContentConfig(ttl="3600.5s"))
    assert (later.expire_time - found.expire_time).total_seconds() == pytest.approx(3000, abs=WIDE_S)
    assert client.caches.get(name=content.name).expire_time.timestamp() == pytest.approx(
        later.expire_time.timestamp(), abs=WIDE_S
    )
    assert content.name in {each.name for each in client.caches.list()}
    client.caches.delete(name=content.name)
    with pytest.raises(errors.ClientError) as gone:
        client.caches.get(name=content.name)
    assert (gone.value.code, gone.value.status) == (404, "NOT_FOUND")
    assert content.name not in {each.name for each in client.caches.list()}


def test_a_generation_reads_the_content_and_is_that_of_the_whole_chat(acme: Any) -> None:
    rules = f"The other manual.\n{RULES}"
    content = created(acme, system_instruction=rules)
    reply = generated(acme, cached_content=content.name)
    usage = reply.usage_metadata
    assert usage.cached_content_token_count == content.usage_metadata.total_token_count > 0
    assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
    whole = generated(acme, system_instruction=rules)
    assert reply.text == whole.text and usage.prompt_token_count == whole.usage_metadata.prompt_token_count
    assert reply.candidates[0].finish_reason.value in ("STOP", "MAX_TOKENS")
    assert reply.model_version == MODEL and reply.response_id.startswith("req_")
    acme.caches.delete(name=content.name)


def test_a_stream_joins_to_the_whole_answer(acme: Any) -> None:
    content = created(acme)
    config = types.GenerateContentConfig(**FEW, cached_content=content.name)
    chunks = list(acme.models.generate_content_stream(model=MODEL, contents=ASKED, config=config))
    whole = generated(acme, cached_content=content.name)
    assert "".join(chunk.text or "" for chunk in chunks) == whole.text
    assert [bool(chunk.usage_metadata) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage_metadata.prompt_token_count == whole.usage_metadata.prompt_token_count
    assert chunks[-1].candidates[0].finish_reason == whole.candidates[0].finish_reason
    acme.caches.delete(name=content.name)


def test_contents_of_one_chat_have_names_and_ends_of_their_own(acme: Any, url: str) -> None:
    before, rules = pinned_blocks(url), f"The third manual.\n{RULES}"
    one, other = (created(acme, system_instruction=rules) for _ in range(2))
    assert one.name != other.name
    assert pinned_blocks(url) - before == one.usage_metadata.total_token_count // 16, "blocks count once"
    acme.caches.delete(name=one.name)
    assert pinned_blocks(url) - before == other.usage_metadata.total_token_count // 16
    assert generated(acme, cached_content=other.name).text
    acme.caches.delete(name=other.name)
    assert pinned_blocks(url) == before


def test_tools_and_results_are_part_of_the_prompt(acme: Any) -> None:
    content = created(acme, tools=[TOOL])
    turns = [
        types.Content(role="user", parts=[types.Part(text=ASKED)]),
        types.Content(
            role="model",
            parts=[types.Part(function_call=types.FunctionCall(name="find_page", args={"topic": "pins"}))],
        ),
        types.Content(
            role="user",
            parts=[
                types.Part(
                    function_response=types.FunctionResponse(name="find_page", response={"result": "page 12"})
                )
            ],
        ),
    ]
    signed = [turns[0], turns[1].model_copy(deep=True), turns[2]]
    signed[1].parts[0].thought_signature = b"no validator"
    plain = generated(acme, system_instruction=RULES).usage_metadata.prompt_token_count
    shown = generated(acme, cached_content=content.name).usage_metadata.prompt_token_count
    called = generated(acme, turns, cached_content=content.name).usage_metadata.prompt_token_count
    assert plain < shown < called
    again = generated(acme, signed, cached_content=content.name).usage_metadata
    assert again.prompt_token_count == called, "a signature, which clients add to each call, changes nothing"
    with pytest.raises(errors.ClientError) as beside:
        generated(acme, cached_content=content.name, tools=[TOOL])
    assert beside.value.code == 400 and "tools" in beside.value.message
    acme.caches.delete(name=content.name)


def test_tokens_of_contents_are_counted(acme: Any, url: str) -> None:
    counted = acme.models.count_tokens(model=MODEL, contents=ASKED).total_tokens
    assert counted == generated(acme).usage_metadata.prompt_token_count
    request = {"contents": [{"parts": [{"text": ASKED}]}], "systemInstruction": {"parts": [{"text": RULES}]}}
    headers, path = {"x-goog-api-key": KEYS["acme"]}, f"{url}/v1beta/models/{MODEL}:countTokens"
    body = {"generateContentRequest": {"model": f"models/{MODEL}", **request}}
    whole = requested("POST", path, headers=headers, json=body).json()["totalTokens"]
    assert whole == generated(acme, system_instruction=RULES).usage_metadata.prompt_token_count > counted
    for wrong in ({}, {**body, "contents": request["contents"]}):
        answer = requested("POST", path, headers=headers, json=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["details"][0]["fieldViolations"]


@pytest.mark.parametrize("version", ["v1beta", "v1"])
def test_the_model_is_listed(url: str, version: str) -> None:
    acme = client_of(url, "acme", version)
    (listed,) = acme.models.list()
    assert listed == acme.models.get(model=MODEL) and listed.name == f"models/{MODEL}"
    assert acme.models.count_tokens(model=MODEL, contents=ASKED).total_tokens > 0
    assert listed.input_token_limit == 8192 and "generateContent" in listed.supported_actions
    with pytest.raises(errors.ClientError) as missing:
        acme.models.get(model="another")
    assert (missing.value.code, missing.value.status) == (404, "NOT_FOUND")


@pytest.mark.parametrize("alt", ["", "?alt=json"])
def test_a_stream_is_one_array_unless_events_are_asked_for(acme: Any, url: str, alt: str) -> None:
    path, headers = f"{url}/v1beta/models/{MODEL}:streamGenerateContent", {"x-goog-api-key": KEYS["acme"]}
    body = {
        "contents": [{"parts": [{"text": ASKED}]}],
        "generationConfig": {"maxOutputTokens": 6, "temperature": 0},
    }
    answer = requested("POST", path + alt, headers=headers, json=body)
    assert answer.headers["content-type"] == "application/json"
    chunks = answer.json()
    parts = [part["text"] for each in chunks for part in each["candidates"][0]["content"]["parts"]]
    assert len(chunks) > 1 and "".join(parts) == generated(acme).text
    assert chunks[-1]["usageMetadata"] and chunks[-1]["candidates"][0]["finishReason"]
    assert requested("POST", path + "?alt=xml", headers=headers, json=body).status_code == 400


def test_pages_of_a_list(acme: Any) -> None:
    names = {created(acme).name for _ in range(3)}
    pager = acme.caches.list(config=types.ListCachedContentsConfig(page_size=2))
    assert len(pager.page) == 2
    listed = [each.name for each in pager]
    assert names <= set(listed) and len(listed) == len(set(listed))
    for name in names:
        acme.caches.delete(name=name)


def test_another_tenants_name_is_answered_as_an_unknown_one(acme: Any, url: str) -> None:
    content = created(acme)
    unknown = "cachedContents/" + "0" * 32
    with client(url, None) as globex:
        globex.headers["x-goog-api-key"] = KEYS["globex"]
        for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"ttl": "60s"})):
            theirs = globex.request(method, f"/v1beta/{content.name}", json=body)
            missing = globex.request(method, f"/v1beta/{unknown}", json=body)
            assert theirs.status_code == missing.status_code == 404
            assert theirs.content == missing.content
        path = f"/v1beta/models/{MODEL}:generateContent"
        asked = {"contents": [{"parts": [{"text": "x"}]}]}
        theirs, missing, odd = (
            globex.post(path, json={**asked, "cachedContent": name})
            for name in (content.name, unknown, "../../etc")
        )
        assert theirs.status_code == 404 and theirs.content == missing.content == odd.content
    assert acme.caches.get(name=content.name).name == content.name
    acme.caches.delete(name=content.name)


def test_beyond_the_budget_a_content_is_refused_and_not_kept(url: str) -> None:
    globex = client_of(url, "globex")
    with pytest.raises(errors.ClientError) as caught:
        created(globex)
    assert (caught.value.code, caught.value.status) == (429, "RESOURCE_EXHAUSTED")
    assert list(globex.caches.list()) == []


def status(call: Callable[..., Any], *arguments: Any, **fields: Any) -> int:
    """The status of a call of the SDK."""
    try:
        call(*arguments, **fields)
    except errors.ClientError as error:
        return int(error.code)
    return 200


def test_a_content_that_ends_while_it_is_made_is_no_error(acme: Any) -> None:
    for _ in range(2):
        content = created(acme, ttl="0.001s")
        assert content.name.startswith("cachedContents/")
        eventually(lambda name=content.name: status(acme.caches.get, name=name) == 404)


@pytest.mark.slow
def test_a_content_ends_with_its_time(acme: Any) -> None:
    content = created(acme, ttl="1.5s")
    eventually(lambda: status(acme.caches.get, name=content.name) == 404)
    assert status(generated, acme, cached_content=content.name) == 404


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ttl": "0s"}, "ttl"),
        ({"ttl": "1h"}, "ttl"),
        ({"ttl": "99999999s"}, "ttl"),
        ({"ttl": "60s", "expireTime": "2099-01-01T00:00:00Z"}, "expireTime"),
        ({"expireTime": "2001-01-01T00:00:00Z"}, "expireTime"),
        ({"expireTime": "soon"}, "expireTime"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}]}, "inlineData"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "http://127.0.0.1:1/"}}]}]}, "fileData"),
        ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0]"),
        ({"systemInstruction": {"parts": [{"text": "x"}]}}, "contents"),
        ({"tools": [{"googleSearch": {}}]}, "googleSearch"),
        ({"nonsense": 1}, "nonsense"),
        ({"model": None}, "model"),
    ],
)
def test_a_refusal_names_the_field_in_googles_form(url: str, changed: dict[str, Any], named: str) -> None:
    body = {"model": MODEL, "systemInstruction": {"parts": [{"text": RULES}]}, **changed}
    headers = {"x-goog-api-key": KEYS["acme"]}
    answer = requested("POST", f"{url}/v1beta/cachedContents", json=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT"), error
    assert named in error["details"][0]["fieldViolations"][0]["field"], error


def test_names_in_snake_case_are_the_same_fields(url: str) -> None:
    headers, path = {"x-goog-api-key": KEYS["acme"]}, f"{url}/v1beta/models/{MODEL}:generateContent"
    body = {
        "contents": [{"parts": [{"text": ASKED}]}],
        "system_instruction": {"parts": [{"text": "Be short."}]},
        "generation_config": {"max_output_tokens": 2, "temperature": 0, "top_k": 5},
    }

    def ask(**changed: Any) -> httpx.Response:
        return requested("POST", path, json={**body, **changed}, headers=headers)

    usage = ask().json()["usageMetadata"]
    assert usage["candidatesTokenCount"] <= 2 and usage["promptTokenCount"] > 10
    both = ask(generationConfig={"maxOutputTokens": 1})
    assert both.status_code == 400 and "generation_config" in both.json()["error"]["message"]
    assert ask(nonsense_name=1).status_code == 400


def test_keys_and_queries(url: str) -> None:
    path = f"{url}/v1beta/cachedContents"
    key, other = {"x-goog-api-key": KEYS["acme"]}, {"Authorization": f"Bearer {KEYS['globex']}"}
    assert requested("GET", path, headers=key).status_code == 200
    for headers in ({}, {**key, **other}):
        answer = requested("GET", path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
    assert requested("GET", f"{path}?key={KEYS['acme']}").status_code == 401
    assert requested("GET", f"{path}?pageSize=0", headers=key).status_code == 400
    assert requested("GET", f"{path}?pageToken=x", headers=key).status_code == 400
    assert requested("GET", f"{path}/", headers=key).status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1beta/cachedContents", f"/v1beta/models/{MODEL}:generateContent"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'{"contents": 5}', b'{"contents": [[]]}', b'{"contents": [{"parts": [{"text": "\\ud800"}]}]}',
        ('{"contents": [' + ",".join(['{"parts":[{"text":"x"}]}'] * 20_000) + "]}").encode(),
        ('{"contents": [{"parts": [' + ",".join(['{"text":"x"}'] * 50_000) + "]}]}").encode(),
        ('{"contents": ' + "[" * 100_000).encode(),
        ('{"contents": [{"parts": [{"functionCall": {"name": "f", "args": ' + '{"a":' * 5000 + "1" + "}" * 5000
         + "}}]}]}").encode(),
        b'{"contents": [{"parts": [{"text": "' + b"x" * (5 << 20) + b'"}]}]}',
    ],
)  # fmt: skip
def test_a_hostile_body_is_refused_in_googles_form(url: str, path: str, body: bytes) -> None:
    headers = {"x-goog-api-key": KEYS["acme"], "Content-Type": "application/json"}
    answer = requested("POST", f"{url}{path}", content=body, headers=headers)
    assert 400 <= answer.status_code < 500, answer.text
    assert set(answer.json()["error"]) == {"code", "message", "status", "details"}
