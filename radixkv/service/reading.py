"""From the bytes of a body to a validated body and the keys of its prompts: the same code on the loop and in processes.

    bytes ─▶ budget (values, before anything is parsed) ─▶ JSON and schema ─▶ prompts as keys ─▶ Reading

A process sends back JSON and prompt keys, never a pickle. A refusal is sent as the fields of its ApiError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from radixkv.service import problems
from radixkv.service.answer_forms import Form
from radixkv.service.budgets import budget_of
from radixkv.service.problems import ApiError
from radixkv.service.prompt_times import NO_TIMES, Times
from radixkv.service.prompts import Prompt, PromptRules, prompts_of
from radixkv.service.schemas.base import RequestBody
from radixkv.service.usage import Promise
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


def name_of(model: type[RequestBody]) -> bytes:
    """Return the name of a schema in messages to a process."""
    return f"{model.__module__}:{model.__qualname__}".encode()


def packed(reading: Reading[Any]) -> list[bytes]:
    """Pack a reading as parts to send: a JSON header, then the key of each prompt, then its text."""
    prompts = [one for each in reading.prompts for one in (each, *each.others)]
    header = {
        "body": reading.body.model_dump(mode="json", exclude_unset=True),
        "left_out": [each.left_out for each in prompts],
        "asked": [[(one.num_tokens, one.ttl_s) for one in each.asked] for each in prompts],
        "has_tools": [each.has_tools for each in prompts],
        "forms": [each.form and (each.form.field, each.form.alternatives) for each in prompts],
        "dates": [(each.date, each.num_shared) for each in prompts],
        "rules": [each.rules for each in prompts],
    }
    parts = [json.dumps(header).encode()]
    for each in prompts:
        parts += [each.key, each.text.encode()]
    return parts


def packed_problem(error: ApiError) -> list[bytes]:
    """Pack a refusal as the one part to send."""
    return [json.dumps({"status": error.status, "is_too_long": error.is_too_long, **error.body}).encode()]


def unpacked(parts: Sequence[memoryview], model: type[B]) -> Reading[B]:
    """Unpack the result of ``packed``; copies each key once. Raises the ApiError of ``packed_problem``."""
    header = json.loads(bytes(parts[0]))
    if "status" in header:
        status, kind, message = header.pop("status"), header.pop("type"), header.pop("message")
        del header["docs_url"]  # follows from the type
        raise ApiError(status, kind, message, **header)
    names = ("left_out", "asked", "has_tools", "forms", "dates", "rules")
    facts = zip(*(header[name] for name in names), strict=True)
    prompts: list[Prompt] = []
    for (left_out, asked, has_tools, form, (date, num_shared), rules), key, text in zip(
        facts, parts[1::2], parts[2::2], strict=True
    ):
        found = Prompt(
            bytes(key),
            left_out,
            bytes(text).decode(),
            tuple(Promise(*each) for each in asked),
            has_tools,
            form and Form(*form),
            date,
            num_shared=num_shared,
            rules=tuple(rules),
        )
        if num_shared is not None:
            prompts[-1] = replace(prompts[-1], others=(*prompts[-1].others, found))
        else:
            prompts.append(found)
    return Reading(model.model_validate(header["body"]), tuple(prompts))
