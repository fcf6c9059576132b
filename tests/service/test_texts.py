"""The texts in YAML: what they say is complete, fits the models, and is used."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from radixkv.service import texts
from radixkv.service.app import ENDPOINTS
from radixkv.service.error_types import ERROR_TYPES, ErrorType
from radixkv.service.openapi import document
from radixkv.service.operations import OPERATIONS, PARAMETERS, STATUSES, TAGS
from radixkv.service.prompts import PromptRules
from radixkv.service.schemas.base import RequestBody
from radixkv.service.schemas.ignored import TABLE, Drops

FILES = sorted(Path(texts.__file__).parent.glob("*.yaml"))
PUBLIC = {(each.method, each.path): each for each in ENDPOINTS if not each.internal}
IN_PATH = re.compile(r"{(\w+)}")


def nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    yield node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from (*nodes(key), *nodes(value))
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from nodes(value)


def twice(content: str) -> list[str]:
    """Return the keys that a map of a document has twice, of which a parser would keep the last."""
    found = []
    for node in nodes(yaml.compose(content, yaml.SafeLoader)):
        if isinstance(node, yaml.MappingNode):
            counts = Counter(key.value for key, _ in node.value)
            found += [key for key, count in counts.items() if count > 1]
    return found


def unused(content: str) -> set[str]:
    """Return the anchors, and the keys of ``shared``, to which nothing refers."""
    events = list(yaml.parse(content, yaml.SafeLoader))
    used = {each.anchor for each in events if isinstance(each, yaml.AliasEvent)}
    anchors = {each.anchor for each in events if isinstance(each, yaml.NodeEvent) and each.anchor is not None}
    shared = dict(yaml.safe_load(content)).get("shared", {}) if "shared:" in content else {}
    return (anchors | shared.keys()) - used


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_nothing_twice_and_shares_only_what_is_used(path: Path) -> None:
    content = path.read_text("utf-8")
    assert not twice(content)
    assert not unused(content)


def test_what_is_said_twice_or_unused_would_be_found() -> None:
    assert twice("a: 1\nb: {c: 1, c: 2}\na: 2") == ["a", "c"]
    assert unused("shared: {a: &a 1, b: &b 2, c: 3}\nd: *a") == {"b", "c"}


def test_a_file_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(texts, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "wrong.yaml").write_text("- {type: x, statuses: [400], meaning: a., acton: b.}")
    with pytest.raises(ValidationError, match="acton"):
        texts.load("wrong", list[ErrorType])


def test_every_error_type_has_its_text_its_status_and_its_remedy() -> None:
    assert len(ERROR_TYPES) == len(texts.load("errors", list[ErrorType])), "a name stands once"
    for each in ERROR_TYPES.values():
        assert all(400 <= status < 600 for status in each.statuses), each.type
        assert each.meaning.endswith(".") and each.action.endswith("."), each.type
        assert each.example.keys() <= {"message", "field", "value", "allowed"}, each.type
        assert bool(each.statuses) == bool(each.example.get("message")), each.type
    assert [name for name, each in ERROR_TYPES.items() if not each.statuses] == ["cleared"]


def test_every_example_of_a_request_fits_its_model() -> None:
    num_checked = 0
    for place, operation in OPERATIONS.items():
        body = PUBLIC[place].body if place in PUBLIC else None
        assert bool(operation.requests) == (body is not None), place
        for example in operation.requests:
            assert body is not None and example.summary and not example.summary.endswith("."), place
            body.model_validate_json(json.dumps(example.body))
            num_checked += 1
    assert num_checked > 40


def forms(reply: Any) -> list[TypeAdapter[Any]]:
    """Return the forms of an answer in JSON, by the replies of an endpoint. Those of a text have none."""
    if isinstance(reply, dict):
        return [form for each in reply.values() for form in forms(each)]
    return [] if reply is None or isinstance(reply, str) else [TypeAdapter(reply)]


def fits(form: TypeAdapter[Any], example: Any) -> bool:
    try:
        form.validate_json(json.dumps(example))
    except ValidationError:
        return False
    return True


def test_every_example_of_an_answer_fits_a_model_of_its_status() -> None:
    num_checked = 0
    for place, operation in OPERATIONS.items():
        if place not in PUBLIC:
            continue
        for status, example in operation.replies.items():
            known = forms(PUBLIC[place].replies[status])
            assert not known or any(fits(form, example) for form in known), (place, status)
            num_checked += bool(known)
    assert num_checked > 40


def test_operations_name_what_there_is() -> None:
    assert PUBLIC.keys() <= OPERATIONS.keys()
    assert OPERATIONS.keys() - PUBLIC.keys() <= {("GET", "/openapi.json")}
    assert {each.tag for each in OPERATIONS.values()} == TAGS.keys()
    for place, operation in OPERATIONS.items():
        for name in operation.errors:
            assert {409, 503} & {*ERROR_TYPES[name].statuses}, (place, name)
        assert {*operation.replies, *(each.status for each in operation.requests)} <= STATUSES.keys(), place


def test_every_parameter_is_one_of_an_endpoint() -> None:
    in_paths = {name for _, path in PUBLIC for name in IN_PATH.findall(path)}
    others = {name for each in PUBLIC.values() for name in (*each.query, *each.headers)}
    assert PARAMETERS.keys() == in_paths | others
    assert {name for name, each in PARAMETERS.items() if each.about} == in_paths
    for name, each in PARAMETERS.items():
        assert all(name in PUBLIC["GET", path].query for path in each.at), name


def bodies(model: type[RequestBody] = RequestBody) -> Iterator[type[RequestBody]]:
    for each in model.__subclasses__():
        yield each
        yield from bodies(each)


def test_every_entry_of_the_ignored_fields_is_in_a_schema() -> None:
    used: list[Drops] = [each.drops for each in bodies()]
    for api, places in TABLE.items():
        for place, drops in places.items():
            assert drops in used, (api, place)


def test_every_status_is_said_of_an_answer() -> None:
    made = document(list(PUBLIC.values()), "1", PromptRules(8000, 8192, 16, 16384))
    said = {
        int(status)
        for path in made["paths"].values()
        for each in path.values()
        for status in each["responses"]
    }
    assert said == STATUSES.keys()
