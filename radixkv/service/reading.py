"""From the bytes of a body to a validated body and the keys of its prompts: the same code on the loop and in processes.

    bytes ─▶ budget (values, before anything is parsed) ─▶ JSON and schema ─▶ prompts as keys ─▶ Reading

A process gets the name of the schema and the body, and sends back msgpack, never a pickle: a Reading, or the fields of
the ApiError that refuses the body.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import ValidationError

from radixkv.service import problems
from radixkv.service.budgets import budget_of
from radixkv.service.problems import ApiError
from radixkv.service.prompt_times import NO_TIMES, Times
from radixkv.service.prompts import Prompt, PromptRules, prompts_of
from radixkv.service.schemas.base import RequestBody
from radixkv.tokenizer import Tokenizer

B = TypeVar("B", bound=RequestBody)

_MAX_REPARSED_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Reading(Generic[B]):
    """A valid body, with its prompt fields replaced as in ``without_prompts``, and its prompts."""

    body: B
    prompts: tuple[Prompt, ...]


class Reader:
    """Reads bodies for one tokenizer and one set of rules. Immutable."""

    def __init__(self, tokenizer: Tokenizer, rules: PromptRules) -> None:
        self._tokenizer, self.rules = tokenizer, rules

    def read(self, raw: bytes, model: type[B], times: Times = NO_TIMES) -> Reading[B]:
        """Return the body and its prompts. Raises ApiError 400 or 422, for the first error.

        At worst it takes about a second for 4 MB of text or short strings, mostly with the interpreter's lock held.
        """
        budget_of(model, self.rules.max_ids).check(raw)
        try:
            body = _validated(raw, model)
        except ValidationError as error:
            raise problems.of_validation(error, model) from None
        prompts = tuple(prompts_of(body, self._tokenizer, self.rules, times))
        return Reading(body.without_long(), prompts)


def _validated(raw: bytes, model: type[B]) -> B:
    """Return the validated body.

    In a short one, numbers such as ``5.0`` count as integers: JSON has one kind of number.

    pydantic's strict mode refuses those. Only a body that it has refused is parsed again, in 1 ms at most.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        is_short = len(raw) <= _MAX_REPARSED_BYTES
        if not is_short or not any(_is_integral(each["input"]) for each in error.errors(include_url=False)):
            raise
    return model.model_validate(json.loads(raw, parse_float=_number))


def _is_integral(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if abs(value) < 2**63 and value.is_integer() else value


class _Asked(msgspec.Struct):
    """The first part of a message to a process; the second one is the body."""

    module: str
    schema: str
    times: Times


class _Answer(msgspec.Struct, omit_defaults=True):
    """``body``: JSON, because its integers may have any size. ``refusal``: what to make an ApiError of instead."""

    body: str = ""
    prompts: tuple[Prompt, ...] = ()
    refusal: tuple[int, str, str, dict[str, Any]] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_asked = msgspec.msgpack.Decoder(_Asked).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


def asked(raw: bytes, model: type[RequestBody], times: Times = NO_TIMES) -> tuple[bytes, bytes]:
    """Return the message that asks a process to read a body. The body isn't copied."""
    return _encode(_Asked(model.__module__, model.__qualname__, times)), raw


def read_asked(reader: Reader, head: bytes, raw: bytes) -> bytes:
    """Read the body of a message, and return the answer. Raises ApiError."""
    found = _decode_asked(head)
    model: type[RequestBody] = getattr(import_module(found.module), found.schema)
    reading = reader.read(raw, model, found.times)
    body = json.dumps(reading.body.model_dump(mode="json", exclude_unset=True))
    return _encode(_Answer(body, reading.prompts))


def packed_problem(error: ApiError) -> bytes:
    """Return a refusal as an answer."""
    more = {name: error.body[name] for name in ("field", "value", "allowed")}
    more["is_too_long"] = error.is_too_long
    return _encode(_Answer(refusal=(error.status, error.type, str(error), more)))


def unpacked(answer: bytes | bytearray, model: type[B]) -> Reading[B]:
    """Return the reading of an answer; copies each key once. Raises the ApiError of ``packed_problem``."""
    found = _decode_answer(answer)
    if found.refusal is not None:
        status, kind, message, more = found.refusal
        raise ApiError(status, kind, message, **more)
    return Reading(model.model_validate(json.loads(found.body)), found.prompts)
