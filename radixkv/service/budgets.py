"""Bounds on the content of a body, checked before it is parsed.

A parser allocates an object for every value of a body, and holds the interpreter's lock while it runs. So the number of
values is bounded first, on the raw bytes. The bounds follow from the schema alone, so a new endpoint needs no further
code. A schema with a list, a map or a string without a maximum is refused when its budget is made. Fields that don't
reach the event loop (``RequestBody.without_prompts``) need no maximum of characters.

Chats have as many turns, parts and calls as fit (``RequestBody.value_bytes``): providers bound the bytes of a body, and
so does this service. Beyond FREE_VALUES a chat needs some bytes for each of its values, as real ones have. A body of
brackets alone doesn't.

The count is exact: brackets, braces and commas inside strings don't count. Cost: a few passes of ``bytes.count``,
about 0.5 ms a megabyte each. A body with many strings is also scanned by one regular expression: 40 ms a megabyte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from radixkv.service.problems import ApiError, invalid
from radixkv.service.schemas.base import RequestBody

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)', re.DOTALL)
"""A string, or the rest of the body if a string doesn't end. Possessive, so it never backtracks: linear time."""
_MAX_NUMBER_BYTES: Final = 400
_MAX_CHAR_BYTES: Final = 12
"""A character outside of the basic plane as two escapes."""
_MAX_PATTERN_CHARS: Final = 1024
_SPARE_VALUES: Final = 256
FREE_VALUES: Final = 64_000
"""Values that a chat may have, however short it is."""
_MIN_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of a body: JSON values, and bytes (None: strings of the schema have no maximum).

    Both are at least twice the need of a valid body. So a body that is slightly too long still gets an answer that
    names the field. With ``value_bytes``, a long body may have one more value for so many bytes.
    """

    max_values: int
    max_bytes: int | None
    value_bytes: int | None = None

    def check(self, raw: bytes) -> None:
        """Raise ApiError 422 for a body with too many values, 400 if its brackets don't match."""
        most = self.max_values + (len(raw) // self.value_bytes if self.value_bytes else 0)
        if _num_separators(raw) <= most:
            return
        num_quotes = raw.count(b'"') - raw.count(b'\\"')
        if num_quotes <= 4 * most:  # a value has one name at most
            outside = _STRING.sub(b"0", raw)
            if not _is_balanced(outside):
                raise ApiError(
                    400, "invalid_json", "the brackets of the body don't match", allowed="one JSON object"
                )
            if (found := _num_separators(outside)) <= most:
                return
        else:
            found = num_quotes // 4
        message = f"the body has {found} values or more, more than {most}"
        raise invalid(message, None, found, f"at most {most} values")


@cache
def budget_of(model: type[RequestBody], max_ids: int) -> Budget:
    """Return the budget of a schema; ``max_ids``: token ids that all prompts of a body may have together.

    Raises AssertionError for a schema that doesn't bound its bodies.
    """
    schema = model.model_json_schema()
    need = _Need(schema.get("$defs", {}))
    fields = schema.get("properties", {})
    if model.value_bytes is not None:
        fields = {name: field for name, field in fields.items() if name not in model.without_prompts}
    for name, field in fields.items():
        is_bounded = need.of(field)[1] is not None or name in model.without_prompts
        assert is_bounded, f"{model.__name__}.{name}: a string without maxLength"
    if model.value_bytes is not None:
        return Budget(FREE_VALUES + _SPARE_VALUES, None, model.value_bytes)
    values, size = need.of(schema)
    values += max_ids if need.has_ids else 0
    return Budget(
        2 * values + _SPARE_VALUES,
        None if size is None or need.has_ids else max(2 * size, _MIN_BYTES),
    )


def _num_separators(raw: bytes) -> int:
    """Count commas and opening brackets: at least the number of values, less one."""
    return raw.count(b",") + raw.count(b"{") + raw.count(b"[")


def _is_balanced(outside: bytes) -> bool:
    return outside.count(b"[") == outside.count(b"]") and outside.count(b"{") == outside.count(b"}")


class _Need:
    """The need of valid bodies of a JSON schema: the most values, and the most bytes or None."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions, self.has_ids = definitions, False

    def of(self, schema: Mapping[str, Any]) -> tuple[int, int | None]:
        """Return the need of one schema. Lists of integers without a maximum are token ids, which are counted once."""
        if "$ref" in schema:
            return self.of(self._definitions[schema["$ref"].rsplit("/", 1)[-1]])
        alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        if alternatives and "type" not in schema:
            return _most([self.of(each) for each in alternatives])
        if "const" in schema or "enum" in schema:
            return 1, max(
                _MAX_CHAR_BYTES * len(str(each)) for each in schema.get("enum", [schema.get("const")])
            )
        match schema.get("type"):
            case "object":
                return self._of_object(schema)
            case "array":
                return self._of_list(schema)
            case "string":
                return 1, _string_bytes(schema)
            case _:
                return 1, _MAX_NUMBER_BYTES

    def _of_object(self, schema: Mapping[str, Any]) -> tuple[int, int | None]:
        parts = [self.of(each) for each in schema.get("properties", {}).values()]
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            assert "maxProperties" in schema, f"a map without maxProperties: {schema}"
            values, size = self.of(others)
            num, name = schema["maxProperties"], self.of(schema.get("propertyNames", {"type": "string"}))[1]
            parts.append((num * values, _times(num, None if size is None or name is None else size + name)))
        names = _MAX_CHAR_BYTES * sum(map(len, schema.get("properties", {})))
        sizes = [size for _, size in parts]
        known = [size for size in sizes if size is not None]
        return 1 + sum(values for values, _ in parts), sum(known) + names if len(known) == len(
            sizes
        ) else None

    def _of_list(self, schema: Mapping[str, Any]) -> tuple[int, int | None]:
        items = schema["items"]
        if "maxItems" not in schema and items.get("type") == "integer":
            self.has_ids = True
            return 1, None
        assert "maxItems" in schema, f"a list without maxItems: {schema}"
        values, size = self.of(items)
        return 1 + schema["maxItems"] * values, _times(schema["maxItems"], size)


def _string_bytes(schema: Mapping[str, Any]) -> int | None:
    length = schema.get("maxLength", _MAX_PATTERN_CHARS if "pattern" in schema else None)
    return None if length is None else _MAX_CHAR_BYTES * length + 2


def _times(number: int, size: int | None) -> int | None:
    return 0 if not number else None if size is None else number * size


def _most(needs: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    sizes = [size for _, size in needs]
    known = [size for size in sizes if size is not None]
    return max(values for values, _ in needs), max(known) if len(known) == len(sizes) else None
