"""What a JSON schema allows at a place in a body, in words: one form for all messages about bodies.

The words come from the schemas that ``/openapi.json`` shows, so a message never contradicts the description.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

Schema = Mapping[str, Any]


def allowed_at(model: type[BaseModel], loc: Sequence[int | str]) -> str | None:
    """Return what a body may have at a place; None if the schema doesn't say. Tags of unions in ``loc`` are skipped."""
    words = _Words(schema_of(model))
    return words.at(loc)


@cache
def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a body. Made once."""
    return model.model_json_schema()


class _Words:
    def __init__(self, document: Schema) -> None:
        self._document = document

    def at(self, loc: Sequence[int | str]) -> str | None:
        found: list[Schema] = [self._document]
        for part in loc:
            found = self._inside(found, part) or found
        return self._any(found) if found != [self._document] or not loc else None

    def _inside(self, schemas: Sequence[Schema], part: int | str) -> list[Schema]:
        """Return the schemas behind a name or an index; none for the tag of a union."""
        options = [option for schema in schemas for option in self._options(schema)]
        if isinstance(part, int):
            return [option["items"] for option in options if "items" in option]
        return [option["properties"][part] for option in options if part in option.get("properties", {})]

    def _options(self, schema: Schema) -> list[Schema]:
        if "$ref" in schema:
            return self._options(self._document["$defs"][schema["$ref"].rsplit("/", 1)[-1]])
        if "properties" in schema:
            return [schema]
        alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        return [option for each in alternatives for option in self._options(each)] or [schema]

    def _any(self, schemas: Sequence[Schema]) -> str | None:
        options = [option for schema in schemas for option in self._options(schema)]
        words = [_words(option) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(word for word in words if word)) or None


def _words(schema: Schema) -> str | None:
    if "const" in schema or "enum" in schema:
        return " or ".join(json.dumps(each) for each in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "integer":
            return _number("an integer", schema)
        case "number":
            return _number("a number", schema)
        case "boolean":
            return "true or false"
        case "string":
            return _text(schema)
        case "array":
            return _counted("a list", "items", schema.get("minItems", 0), schema.get("maxItems"))
        case "object":
            return "an object"
    return None


def _number(kind: str, schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if kind == "an integer":  # [low, high) as [low, high]
        high = schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else high
    if low is not None and high is not None:
        return f"{kind} from {low} to {high}"
    bounds = [("≥", low), (">", schema.get("exclusiveMinimum")), ("≤", high)]
    if kind == "a number":
        bounds.append(("<", schema.get("exclusiveMaximum")))
    said = " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
    return f"{kind} {said}".rstrip()


def _text(schema: Schema) -> str:
    if "pattern" in schema:
        return f"a string of {schema.get('description') or 'the form ' + schema['pattern']}"
    return _counted("a string", "characters", schema.get("minLength", 0), schema.get("maxLength"))


def _counted(kind: str, what: str, low: int, high: int | None) -> str:
    if high is None:
        return f"{kind} of at least {low} {what[:-1] if low == 1 else what}" if low else kind
    return f"{kind} of {low} to {high} {what}" if low else f"{kind} of at most {high} {what}"
