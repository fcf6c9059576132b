"""From what a request says of its answer to the form that the engine binds it to.

A call has the form that ``tool_calls`` reads. With tools and a schema the answer is one or the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from radixkv.engines.protocol import AnswerForm, Part
from radixkv.service.problems import refused
from radixkv.service.schemas.structured import ANY_OBJECT, Wanted
from radixkv.service.tool_calls import CALL_TAGS

MAX_FORM_CHARS: Final = 256 * 1024
"""Most characters of all schemas of a request, as JSON."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer: JSON text for ``Forming.form``, and the field that errors name."""

    field: str
    alternatives: str


def form_of(wanted: Wanted, tools: Sequence[Mapping[str, Any]]) -> Form | None:
    """Return the form of an answer, None if it may be anything. ``tools``: what the model may call.

    Raises ApiError 422 for a tool that isn't there, and for schemas that are too long.
    """
    forms: list[AnswerForm] = []
    if wanted.response_schema is not None and not wanted.must_call:
        forms.append(AnswerForm([Part("", wanted.response_schema)]))
    if wanted.must_call or (forms and tools):
        forms.append(_calls(wanted, tools))
    if not forms:
        return None
    field = "tools" if wanted.must_call else wanted.field
    text = json.dumps([asdict(form) for form in forms], ensure_ascii=False)
    if len(text) > MAX_FORM_CHARS:
        reason = f"the schemas that the answer has to follow have {len(text):,} characters"
        raise refused(field, None, reason, f"at most {MAX_FORM_CHARS:,} characters together")
    return Form(field, text)


def _calls(wanted: Wanted, tools: Sequence[Mapping[str, Any]]) -> AnswerForm:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or ANY_OBJECT for tool in tools}
    names = tuple(schemas) if wanted.names is None else wanted.names
    missing = next((name for name in names if name not in schemas), None)
    if missing is not None or not names:
        reason = "there are no tools" if missing is None else "no tool has this name"
        allowed = f"one of {', '.join(schemas)}" if schemas else "tools with it"
        raise refused(wanted.choice_field, missing, reason, allowed)
    begin, end = CALL_TAGS
    parts = [
        Part(f'{begin}\n{{"name": {json.dumps(name)}, "arguments": ', schemas[name], f"}}\n{end}")
        for name in names
    ]
    return AnswerForm(parts, None if wanted.one_call else "\n")
