"""The document's tags and examples: each example is valid, and a running service answers it as the document says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from radixkv.service.app import ENDPOINTS
from radixkv.service.error_types import ERROR_TYPES
from radixkv.service.operations import OPERATIONS, PARAMETERS, TAGS
from tests.service.running import Running, answered, service_in_thread

pytestmark = pytest.mark.slow

jsonschema_rs = pytest.importorskip("jsonschema_rs")
JSON = "application/json"


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    """A service of its own: the examples make tenants, pins and bases."""
    with service_in_thread() as running:
        yield running


@pytest.fixture(scope="module")
def document(live: Running) -> dict[str, Any]:
    return dict(live.nobody.get("/openapi.json").json())


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raise unless a value is valid for a schema of the document."""
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "components": document["components"],
        **schema,
    }
    jsonschema_rs.validator_for(whole).validate(value)


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    found = operations(document)
    assert set(found) == set(OPERATIONS), "the table has exactly the operations of the document"
    assert [each["name"] for each in document["tags"]] == list(TAGS)
    assert all(each["description"] for each in document["tags"])
    for place, operation in found.items():
        assert operation["tags"][0] in TAGS, place
        assert operation["summary"] and operation["description"], place
        assert not operation["summary"].endswith("."), place
    names = {name for each in ENDPOINTS for name in (*each.query, *each.headers)}
    assert names <= set(PARAMETERS), names - set(PARAMETERS)


def test_every_body_has_an_example(document: dict[str, Any]) -> None:
    for place, operation in operations(document).items():
        if "requestBody" in operation:
            assert operation["requestBody"]["content"][JSON]["examples"], place
        done = [status for status in operation["responses"] if status < "300"]
        for content in (operation["responses"][each].get("content", {}) for each in done):
            if place != ("GET", "/openapi.json"):
                assert all("example" in each for kind, each in content.items() if kind == JSON), place


def test_every_example_is_valid(document: dict[str, Any]) -> None:
    num_checked = 0
    for operation in operations(document).values():
        contents = [operation.get("requestBody", {}), *operation["responses"].values()]
        for content in (each.get("content", {}).get(JSON, {}) for each in contents):
            examples = list(content.get("examples", {}).values())
            values = [
                document["components"]["examples"][each["$ref"].rpartition("/")[2]]
                if "$ref" in each
                else each
                for each in examples
            ]
            given = [each["value"] for each in values] + (
                [content["example"]] if "example" in content else []
            )
            for value in given:
                check(document, content["schema"], value)
                num_checked += 1
        for parameter in operation.get("parameters", ()):
            value = parameter["example"]
            check(document, parameter["schema"], value)
    assert num_checked > 100


def test_an_invalid_example_would_be_found(document: dict[str, Any]) -> None:
    request = {"$ref": "#/components/schemas/WarmRequest"}
    check(document, request, {"prompt": "x"})
    for wrong in (
        {},
        {"prompt": "x", "token_ids": [1]},
        {"token_ids": [8000]},
        {"prompt": "x", "tenant": "acme"},
    ):
        with pytest.raises(jsonschema_rs.ValidationError):
            check(document, request, wrong)


def filled(path: str) -> str:
    return re.sub(r"{(\w+)}", lambda found: str(PARAMETERS[found[1]].example), path)


def test_a_running_service_answers_each_example_with_its_status(
    live: Running, document: dict[str, Any]
) -> None:
    endpoints = {(each.method, each.path): each for each in ENDPOINTS}
    clients = {"tenant": live.acme, "operator": live.operator}
    num_sent = 0
    for (method, path), operation in OPERATIONS.items():
        described = document["paths"][path][method.lower()]
        for number, example in enumerate(operation.requests, 1):
            stated = described["requestBody"]["content"][JSON]["examples"][str(number)]
            assert stated["value"] == example.body and str(stated["x-status"]) in stated["description"]
            client = clients[endpoints[method, path].who]
            answer = answered(partial(client.request, method, filled(path), json=stated["value"]))
            assert answer.status_code == stated["x-status"], (method, path, example.summary, answer.text)
            kind = answer.headers["content-type"].partition(";")[0]
            content = described["responses"][str(answer.status_code)]["content"][kind]
            if kind == JSON:
                check(document, content["schema"], answer.json())
            num_sent += 1
    assert num_sent > 15


def test_answers_without_a_body_fit_their_schema_too(live: Running, document: dict[str, Any]) -> None:
    clients = {"tenant": live.acme, "operator": live.operator, "either": live.operator, "anyone": live.nobody}
    for endpoint in ENDPOINTS:
        if endpoint.method != "GET" or "{" in endpoint.path or endpoint.path == "/metrics":
            continue
        answer = clients[endpoint.who].get(endpoint.path)
        content = document["paths"][endpoint.path]["get"]["responses"][str(answer.status_code)]["content"]
        check(document, content[JSON]["schema"], answer.json())


def test_errors_have_the_types_that_their_status_says(document: dict[str, Any]) -> None:
    schema = document["components"]["schemas"]["ErrorDetail"]
    assert "docs_url" in schema["required"] and "docs_url" in schema["properties"]
    named = {each["value"]["error"]["type"] for each in document["components"]["examples"].values()}
    assert named == {each.type for each in ERROR_TYPES.values() if each.statuses}
    for place, operation in operations(document).items():
        for status, response in operation["responses"].items():
            if status < "400" or "examples" not in response["content"][JSON]:
                continue
            examples = response["content"][JSON]["examples"]
            assert examples, (place, status)
            assert all(int(status) in ERROR_TYPES[name].statuses for name in examples), (place, status)


def test_the_query_of_usage_is_described_as_it_is_read(live: Running, document: dict[str, Any]) -> None:
    described = {each["name"]: each["schema"] for each in document["paths"]["/v1/usage"]["get"]["parameters"]}
    texts = [
        "",
        "x",
        "0",
        "99999999999",
        "2026-02-28T23:59:59Z",
        "2026-02-30T00:00:00Z",
        "2026-04-31T00:00:00Z",
        "2026-12-31T00:00:00Z",
        "2026-13-01",
        "5-" + "0" * 16,
    ]
    texts += ["1000", "1001", "1024"]
    for name in ("from", "to", "page", "limit"):
        schema = described[name]
        for text in texts:
            value = int(text) if schema["type"] == "integer" and text.isdigit() else text
            is_fine = jsonschema_rs.validator_for(schema).is_valid(value)
            status = live.acme.get("/v1/usage", params={name: text}).status_code
            assert status in (200, 422)
            assert status == 200 or not is_fine, (name, text)
        fitting = {"from": "0", "to": "2026-02-28T23:59:59Z", "page": "5-" + "0" * 16, "limit": "1000"}[name]
        assert re.fullmatch(schema.get("pattern", ".*"), fitting), "the description allows something"
