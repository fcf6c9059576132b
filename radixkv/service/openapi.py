"""``/openapi.json``, generated from the same endpoints and models that serve the requests. OpenAPI 3.1.

Tags and examples come from ``operations``, the errors of each status from ``error_types``.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from radixkv.service.endpoint import Endpoint, H, Who
from radixkv.service.error_types import ERROR_TYPES
from radixkv.service.operations import DESCRIPTION, OPERATIONS, PARAMETERS, STATUSES, TAGS, Operation
from radixkv.service.prompts import PromptRules
from radixkv.service.schemas.base import RequestBody
from radixkv.service.schemas.errors import ErrorReply
from radixkv.service.schemas.prompts import Message, TokenIds

_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)}")


def document(endpoints: Sequence[Endpoint[H]], version: str, rules: PromptRules) -> dict[str, Any]:
    """Return the OpenAPI document of the public endpoints, for prompts of these rules. Made once at start."""
    public = [endpoint for endpoint in endpoints if not endpoint.internal]
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in public:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    used = {_described(endpoint).tag for endpoint in public}
    return {
        "openapi": "3.1.0",
        "info": {"title": "radixkv", "version": version, "description": DESCRIPTION},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items() if name in used],
        "paths": paths,
        "components": {
            "schemas": _bounded(_schemas(*_models_of(public)), rules),
            "examples": {
                each.type: {"summary": f"{each.type}: {each.meaning}", "value": each.example_body()}
                for each in ERROR_TYPES.values()
                if each.statuses
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(endpoint: Endpoint[H]) -> Operation:
    return OPERATIONS[endpoint.method, endpoint.path]


def _operation(endpoint: Endpoint[H]) -> dict[str, Any]:
    described = _described(endpoint)
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "tags": [described.tag],
        "summary": endpoint.summary,
        "description": inspect.cleandoc(endpoint.handler.__doc__ or ""),
        "security": [] if endpoint.who == "anyone" else [{"key": []}],
        "responses": {str(status): _response(status, model) for status, model in endpoint.replies.items()},
    }
    for status, reply in described.replies.items():
        for kind, content in operation["responses"][str(status)]["content"].items():
            if kind != "text/event-stream":
                content["example"] = reply
    for status in _error_statuses(endpoint):
        response = _response(status, endpoint.dialect.reply)
        if endpoint.dialect.reply is ErrorReply:
            response["content"]["application/json"]["examples"] = _error_examples(
                status, described, endpoint.who
            )
        operation["responses"].setdefault(str(status), response)
    parameters = [_parameter(endpoint, name, "query", text) for name, text in endpoint.query.items()]
    parameters += [_parameter(endpoint, name, "header", text) for name, text in endpoint.headers.items()]
    parameters += [
        _parameter(endpoint, name, "path", PARAMETERS[name].about)
        for name in _PARAMETER.findall(endpoint.path)
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {"schema": _reference(endpoint.body), "examples": _request_examples(described)}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    return operation


def _request_examples(described: Operation) -> dict[str, Any]:
    """Return the examples of a body. ``x-status`` is the status of the answer that a new demo service gives."""
    return {
        str(number): {
            "summary": example.summary,
            "description": f"Answered with {example.status}.",
            "value": example.body,
            "x-status": example.status,
        }
        for number, example in enumerate(described.requests, 1)
    }


def _error_examples(status: int, described: Operation, who: Who) -> dict[str, dict[str, str]]:
    """Return references to the examples of errors. Those of 409 and 503 only if the operation can have them."""
    always = ("shutting_down", "settings_pending") if who in ("tenant", "either") else ("shutting_down",)
    possible = (*described.errors, *always)
    return {
        each.type: {"$ref": f"#/components/examples/{each.type}"}
        for each in ERROR_TYPES.values()
        if status in each.statuses and (each.type in possible or not {409, 503} & {*each.statuses})
    }


def _error_statuses(endpoint: Endpoint[H]) -> list[int]:
    statuses = {*endpoint.errors, 504}
    if endpoint.who != "anyone":
        statuses |= {401, 503}
    if endpoint.who in ("tenant", "operator"):
        statuses.add(403)
    if endpoint.who in ("tenant", "either"):
        statuses.add(429)
    if endpoint.body is not None:
        statuses |= {400, 408, 413, 415, 422, 429, 503}
    return sorted({endpoint.dialect.status(status) for status in statuses})


_EVENT = {
    "type": "object",
    "description": "one server-sent event: a chunk of the reply as JSON, or [DONE]",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def _response(status: int, model: Any) -> dict[str, Any]:
    if model is None:
        return {"description": STATUSES[status]}
    if isinstance(model, str):
        content: dict[str, Any] = {model: {"schema": {"type": "string"}}}
    elif isinstance(model, dict):
        content = {
            kind: {"schema": _EVENT if kind == "text/event-stream" else _schema_of(each)}
            for kind, each in model.items()
        }
    else:
        content = {"application/json": {"schema": _schema_of(model)}}
    response: dict[str, Any] = {"description": STATUSES[status], "content": content}
    if status in (409, 429, 503, 529):
        text = "seconds after which to try again, if that may help"
        response["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": text}}
    return response


def _schema_of(model: Any) -> dict[str, Any]:
    if typing.get_origin(model) is list:
        return {"type": "array", "items": _schema_of(typing.get_args(model)[0])}
    models = _models(model)
    if not models:
        return {"type": "string"} if isinstance(model, str) else {"type": "object"}
    references = [_reference(each) for each in models]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _models(model: Any) -> list[type[BaseModel]]:
    if typing.get_origin(model) is list:
        return _models(typing.get_args(model)[0])
    if isinstance(model, types.UnionType):
        return [part for part in typing.get_args(model) if isinstance(part, type)]
    if isinstance(model, dict):
        return [part for each in model.values() for part in _models(each)]
    return [model] if isinstance(model, type) and issubclass(model, BaseModel) else []


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _parameter(endpoint: Endpoint[H], name: str, place: str, text: str | None) -> dict[str, Any]:
    known = PARAMETERS[name]
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "description": text,
        "schema": known.at.get(endpoint.path, known.schema),
        "example": known.example,
    }


def _models_of(
    endpoints: Sequence[Endpoint[H]],
) -> tuple[frozenset[type[RequestBody]], frozenset[type[BaseModel]]]:
    """Return the models of the bodies, and those of the replies."""
    bodies = frozenset(endpoint.body for endpoint in endpoints if endpoint.body is not None)
    replies = (reply for endpoint in endpoints for reply in endpoint.replies.values())
    errors = frozenset(endpoint.dialect.reply for endpoint in endpoints)
    return bodies, frozenset(model for reply in replies for model in _models(reply)) | errors | {ErrorReply}


@functools.cache
def _schemas(inputs: frozenset[type[RequestBody]], outputs: frozenset[type[BaseModel]]) -> dict[str, Any]:
    """Return the schemas of models by name, which the caller must not change: a tenth of a second's work."""
    wanted: list[tuple[type[BaseModel], typing.Literal["validation", "serialization"]]] = []
    wanted += [(model, "validation") for model in inputs]
    wanted += [(model, "serialization") for model in outputs]
    _, definitions = models_json_schema(sorted(wanted, key=lambda each: each[0].__name__), ref_template=_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    for name in _request_names(inputs):
        _admit_null(schemas[name])
    return dict(sorted(schemas.items()))


def _bounded(schemas: Any, rules: PromptRules) -> Any:
    """Bound the schemas: token ids of this service's vocabulary, and at most as many as a prompt may have."""
    if isinstance(schemas, list):
        return [_bounded(each, rules) for each in schemas]
    if not isinstance(schemas, dict):
        return schemas
    if schemas.get("items", {}) == _ANY_ID:
        return {
            **schemas,
            "items": {**_ANY_ID, "exclusiveMaximum": rules.vocab_size},
            "maxItems": rules.max_tokens,
        }
    if (
        schemas.get("items") == _MESSAGE and rules.roles is not None
    ):  # each has at least two markers of its role
        return {**schemas, "maxItems": min(schemas["maxItems"], max((rules.max_tokens - 1) // 2, 1))}
    bounded = {name: _bounded(each, rules) for name, each in schemas.items()}
    role = schemas.get("role")
    if rules.roles is not None and isinstance(role, dict) and not {"enum", "const"} & set(role):
        bounded["role"] = {"type": "string", "enum": list(rules.roles)}
    return bounded


_MESSAGE = {"$ref": _REF.format(model=Message.__name__)}
_ANY_ID = TypeAdapter(TokenIds).json_schema()["items"]


def _request_names(inputs: Iterable[type[RequestBody]]) -> set[str]:
    """Return the names of the request bodies and of their parts."""
    names: set[str] = set()
    for model in inputs:
        names.add(model.__name__)
        names |= set(model.model_json_schema().get("$defs", {}))
    return names


def _admit_null(schema: dict[str, Any]) -> None:
    """Allow null for an optional field, with the meaning of leaving it out (see ``schemas.base.RequestBody``)."""
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        types_ = [field.get("type"), *(each.get("type") for each in field.get("anyOf", ()))]
        if name in required or "null" in types_:
            continue
        kept = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
        inner = dict(field)
        field.clear()
        field.update({"anyOf": [inner, {"type": "null"}], **kept})
