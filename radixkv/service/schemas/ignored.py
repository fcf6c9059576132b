"""What requests may say that changes nothing in what is generated here: one table for the APIs of all providers.

Clients send many fields that only concern the provider's own servers: who the end user is, what is stored, how much is
told of a stream. Such a field is accepted and dropped, so that the client works. A field that *would* change the answer
is accepted with the values that ask for what this service does anyway. Every other value is refused by name, with the
reason: nothing that a client asks for is dropped in silence.

A schema names its part of the table in ``drops``. ``RequestBody`` checks and drops these fields before it looks at the
others, and shows them in the JSON schema. The documentation lists the table (``docs/_generate.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import PydanticCustomError

NOT_SUPPORTED: Final = "not_supported"
"""Type of the error of a value that isn't supported. Its context has ``allowed``, and for a field of this table also
``name``, ``value`` and ``reason``."""


def refusal(name: str, value: Any, allowed: str, reason: str) -> PydanticCustomError:
    """Return the error of a value that isn't supported, in the object that is being checked."""
    found = {"name": name, "value": value, "allowed": allowed, "reason": reason}
    return PydanticCustomError(NOT_SUPPORTED, "not supported", found)


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that is dropped.

    - ``about``: why nothing depends on it, or why only these values are accepted.
    - ``values``: the accepted values; None: any value.
    - ``names``: the names of an object, each with its own entry. The object may have no others.
    - ``many``: the value is a list of such values.
    """

    about: str
    values: tuple[Any, ...] | None = None
    names: Mapping[str, Ignored] = field(default_factory=dict)
    many: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise PydanticCustomError unless the value changes nothing. O(size of the value)."""
        if value is None:
            return
        if self.many:
            if not isinstance(value, list):
                raise self._refusal(name, value)
            for index, each in enumerate(value):
                self._check_one(f"{name}[{index}]", each)
        else:
            self._check_one(name, value)

    def _check_one(self, name: str, value: Any) -> None:
        if not self.names:
            if self.values is not None and not any(_is_same(value, each) for each in self.values):
                raise self._refusal(name, value)
            return
        if not isinstance(value, dict):
            raise self._refusal(name, value)
        for inner, given in value.items():
            entry = self.names.get(inner) or self.names.get(_camel(inner))
            if entry is None:
                raise self._refusal(f"{name}.{inner}", given)
            entry.check(f"{name}.{inner}", given)

    def _refusal(self, name: str, value: Any) -> PydanticCustomError:
        return refusal(name, value, self.allowed, self.about)

    @property
    def allowed(self) -> str:
        """The accepted values in words."""
        if self.names:
            words = f"an object with {', '.join(self.names)}"
        elif self.values is None:
            words = "any value"
        else:
            words = " or ".join(map(json.dumps, self.values))
        if self.many:
            words = f"a list of {words}" if words else "[]"
        return f"{words} or left out" if words else "left out"

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the field."""
        described = {"description": self.about}
        if self.names:
            inner = {name: entry.schema() for name, entry in self.names.items()}
            one: dict[str, Any] = {"type": "object", "properties": inner, "additionalProperties": False}
        elif self.values is None:
            return described
        else:
            one = {"enum": list(self.values)}
        if self.many:
            one = {"type": "array", "items": one, "maxItems": MAX_ITEMS if self.values != () else 0}
        return (
            {"anyOf": [one, {"type": "null"}], **described}
            if one != {"enum": []}
            else {"type": "null", **described}
        )


Drops = Mapping[str, Ignored]
"""The fields of an object that are dropped, by name."""

MAX_ITEMS: Final = 64
"""Items that the JSON schema says of a list. No body is refused for it."""


def _is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 0 and 0.0 are, but false is no number."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _camel(name: str) -> str:
    return re.sub("_([a-z])", lambda letter: letter[1].upper(), name)


def without_ignored(data: dict[str, Any], drops: Drops) -> dict[str, Any]:
    """Return an object without these fields. Raises PydanticCustomError for a value that would change the answer."""
    kept = {}
    for name, value in data.items():
        entry = drops.get(name)
        if entry is None:
            kept[name] = value
        else:
            entry.check(name, value)
    return kept


def _any(about: str) -> Ignored:
    return Ignored(about)


def _only(*values: Any, about: str) -> Ignored:
    return Ignored(about, values)


def _object(about: str, **names: Ignored) -> Ignored:
    return Ignored(about, names=names)


_WHO = "who the end user is: the key says who pays"
_FACTS = "notes of the client"
_TIER = "every request has the same service"
_STORED = "nothing is stored"
_THINKING = "the model has no thoughts of its own to spend tokens on"
_THOUGHTS = "there are no thoughts to show"
_MODERATED = "nothing is moderated"
_MEDIA = "only text is served"
_SERVERS = "tools of the provider's servers aren't served"
_SHORT = "the prompt has no instructions about the length of the answer"
_ORIGINS = "a call is the model's own"
_SHOWN = "all tools are shown to the model from the start"
_STRICT = "arguments are what the model writes: only a forced call follows the schema"
_PAD = "the events of a stream are never padded"
_REPEATED = "what the client read in a text that is sent too"
_STATUS = "the state of an item that was answered before"

CACHE_CONTROL: Final[Drops] = {"scope": _any("a cache is never shared beyond its tenant")}

OPENAI: Final[Drops] = {
    "user": _any(_WHO),
    "safety_identifier": _any(_WHO),
    "metadata": _any(_FACTS),
    "service_tier": _any(_TIER),
    "store": _only(False, about=_STORED),
    "moderation": _only(about=_MODERATED),
    "prompt_cache_retention": _only(
        "in_memory", "24h", about="a longest time, so it promises nothing: prompt_cache_options.ttl does"
    ),
}
"""What chats and responses have in common."""

STREAM: Final[Drops] = {"include_obfuscation": _any(_PAD)}

CHAT: Final[Drops] = {
    **OPENAI,
    "reasoning_effort": _only("none", about=_THINKING),
    "verbosity": _any(_SHORT),
    "modalities": _only(["text"], about=_MEDIA),
    "audio": _only(about=_MEDIA),
    "prediction": _any("a guess at the answer, which only makes it faster"),
    "functions": _only([], about="the older form of tools isn't served: send tools"),
    "function_call": _only("none", "auto", about="the older form of tool_choice isn't served"),
    "web_search_options": _only(about=_SERVERS),
}

CHAT_MESSAGE: Final[Drops] = {
    "parsed": _any(_REPEATED),
    "annotations": _any("notes on an answer that was given before"),
    "refusal": _only(about="refusals aren't part of what templates render"),
    "audio": _only(about=_MEDIA),
    "function_call": _only(about="the older form of tool_calls isn't served"),
}

CHAT_CALL: Final[Drops] = {"index": _any("the number of the call in a stream")}

CHAT_CALLED: Final[Drops] = {"parsed_arguments": _any(_REPEATED)}

CHAT_FUNCTION: Final[Drops] = {"strict": _any(_STRICT)}

RESPONSES: Final[Drops] = {
    **OPENAI,
    "client_metadata": _any(_FACTS),
    "stream_options": _object(_PAD, **STREAM),
    "reasoning": _object(
        _THINKING,
        effort=_only("none", about=_THINKING),
        summary=_any(_THOUGHTS),
        generate_summary=_any(_THOUGHTS),
        context=_any(_THOUGHTS),
    ),
    "max_tool_calls": _any("it counts calls of the provider's own tools"),
    "truncation": _only(
        "disabled", "auto", about="a conversation that is too long is refused, and nothing is left out of one"
    ),
    "background": _only(False, about="an answer is sent to the client that waits for it"),
    "background_options": _any("nothing runs in the background"),
    "context_management": _only([], about="nothing is left out of a conversation"),
    "previous_response_id": _only(about=f"{_STORED}: send the whole conversation"),
    "conversation": _only(about=f"{_STORED}: send the whole conversation"),
    "prompt": _only(about="no prompts are stored here"),
    "image": _any("there are no images to compress"),
    "access_programs": _any(_TIER),
}

RESPONSE_TEXT: Final[Drops] = {"verbosity": _any(_SHORT)}

RESPONSE_PART: Final[Drops] = {
    "annotations": _any("notes on an answer that was given before"),
    "logprobs": _any("probabilities of an answer that was given before"),
}

_ITEM: Final[Drops] = {"id": _any(_STATUS), "status": _any(_STATUS)}

RESPONSE_MESSAGE: Final[Drops] = {**_ITEM, "phase": _any(_STATUS)}

RESPONSE_CALL: Final[Drops] = {
    **_ITEM,
    "caller": _only({"type": "direct"}, about=_ORIGINS),
    "async": _only(False, about=_ORIGINS),
}

RESPONSE_OUTPUT: Final[Drops] = {**_ITEM, "caller": _only({"type": "direct"}, about=_ORIGINS)}

RESPONSE_TOOL: Final[Drops] = {
    "strict": _any(_STRICT),
    "allowed_callers": _only(["direct"], about=_ORIGINS),
    "defer_loading": _any(_SHOWN),
    "output_schema": _only({}, about="templates show the schema of the arguments alone"),
}

MESSAGES: Final[Drops] = {
    "metadata": _any(_WHO),
    "user_profile_id": _any(_WHO),
    "service_tier": _any(_TIER),
    "speed": _only("standard", about=_TIER),
    "betas": _any(
        "what is served doesn't depend on the names of betas, here or in the header anthropic-beta"
    ),
    "anthropic_beta": _any("as betas"),
    "anthropic_version": _any("one version is served"),
    "thinking": _object(
        _THINKING, type=_only("disabled", "adaptive", about=_THINKING), display=_any(_THOUGHTS)
    ),
    "context_management": _object(
        "nothing is left out of a conversation",
        edits=Ignored(
            "nothing is left out of a conversation, and it has no thoughts to clear",
            names={
                "type": _only("clear_thinking_20251015", about="nothing is left out of a conversation"),
                "keep": _any(_THOUGHTS),
            },
            many=True,
        ),
    ),
    "thread": _only(about="no messages are stored: send the whole conversation"),
    "container": _only(about=_SERVERS),
    "mcp_servers": _only([], about=_SERVERS),
    "inference_geo": _only("global", about="the operator decides where it runs"),
}

MESSAGE_OUTPUT: Final[Drops] = {"effort": _any("the prompt has no instructions about effort")}

MESSAGE_TEXT: Final[Drops] = {"citations": _only([], about="documents aren't served")}

MESSAGE_CALL: Final[Drops] = {
    "caller": _only({"type": "direct"}, about=_ORIGINS),
    "toolset_name": _only(about=_SERVERS),
}

MESSAGE_RESULT: Final[Drops] = {
    "is_error": _any("the model reads the content"),
    "toolset_name": _only(about=_SERVERS),
}

MESSAGE_TOOL: Final[Drops] = {
    "strict": _any(_STRICT),
    "eager_input_streaming": _any("a call is sent once it is whole"),
    "allowed_callers": _only(["direct"], about=_ORIGINS),
    "defer_loading": _any(_SHOWN),
    "input_examples": _only([], about="templates show the schema of the arguments alone"),
}

CONTENTS: Final[Drops] = {
    "labels": _any(_FACTS),
    "safetySettings": _any(_MODERATED),
    "serviceTier": _any(_TIER),
    "store": _only(False, about=_STORED),
}

GENERATION: Final[Drops] = {
    "candidateCount": _only(1, about="a request has one answer"),
    "responseModalities": _only(["TEXT"], about=_MEDIA),
    "speechConfig": _only(about=_MEDIA),
    "imageConfig": _only(about=_MEDIA),
    "mediaResolution": _any("there are no media"),
    "audioTimestamp": _any("there are no media"),
    "enableEnhancedCivicAnswers": _only(False, about=_SERVERS),
    "thinkingConfig": _object(
        _THINKING,
        thinkingBudget=_only(0, about=_THINKING),
        includeThoughts=_any(_THOUGHTS),
        thinkingLevel=_only("THINKING_LEVEL_UNSPECIFIED", about=_THINKING),
    ),
}

CONTENT_PART: Final[Drops] = {
    "thought": _only(False, about=_THOUGHTS),
    "thoughtSignature": _any("clients send one with each call, and this model has no thoughts"),
    "partMetadata": _any(_FACTS),
}

CONTENT_CALL: Final[Drops] = {
    "willContinue": _only(False, about="a call is sent once it is whole"),
    "partialArgs": _only([], about="a call is sent once it is whole"),
}

CONTENT_RESULT: Final[Drops] = {
    "willContinue": _only(False, about="a result is one message"),
    "scheduling": _any("the model reads a result when its turn comes"),
    "parts": _only([], about=_MEDIA),
}

CONTENT_TOOL: Final[Drops] = {
    "behavior": _only("BLOCKING", "UNSPECIFIED", about="the model waits for a result"),
    "response": _any("templates show the schema of the arguments; the model reads a result when it comes"),
    "responseJsonSchema": _any(
        "templates show the schema of the arguments; the model reads a result when it comes"
    ),
}

COMPLETIONS: Final[Drops] = {
    "user": _any(_WHO),
    "metadata": _any(_FACTS),
    "service_tier": _any(_TIER),
    "store": _only(False, about=_STORED),
}

TABLE: Final[Mapping[str, Mapping[str, Drops]]] = {
    "`/v1/chat/completions`": {
        "": CHAT,
        "stream_options": STREAM,
        "messages[]": CHAT_MESSAGE,
        "messages[].tool_calls[]": CHAT_CALL,
        "messages[].tool_calls[].function": CHAT_CALLED,
        "tools[].function": CHAT_FUNCTION,
    },
    "`/v1/completions`": {"": COMPLETIONS, "stream_options": STREAM},
    "`/v1/responses`": {
        "": RESPONSES,
        "text": RESPONSE_TEXT,
        "input[] (messages)": RESPONSE_MESSAGE,
        "input[] (calls)": RESPONSE_CALL,
        "input[] (results)": RESPONSE_OUTPUT,
        "input[].content[]": RESPONSE_PART,
        "tools[]": RESPONSE_TOOL,
    },
    "`/v1/messages`": {
        "": MESSAGES,
        "cache_control": CACHE_CONTROL,
        "output_config": MESSAGE_OUTPUT,
        "content[] (texts)": MESSAGE_TEXT,
        "content[] (calls)": MESSAGE_CALL,
        "content[] (results)": MESSAGE_RESULT,
        "tools[]": MESSAGE_TOOL,
    },
    "`:generateContent`": {
        "": CONTENTS,
        "generationConfig": GENERATION,
        "parts[]": CONTENT_PART,
        "parts[].functionCall": CONTENT_CALL,
        "parts[].functionResponse": CONTENT_RESULT,
        "functionDeclarations[]": CONTENT_TOOL,
    },
}
"""The whole table, by API and place."""


def rows(drops: Drops, place: str) -> Iterator[tuple[str, str, str]]:
    """Yield the path, the accepted values and the reason of each entry, for the documentation."""
    for name, entry in drops.items():
        path = f"{place}.{name}" if place else name
        if entry.names:
            yield from rows(entry.names, f"{path}[]" if entry.many else path)
        else:
            yield path, entry.allowed.removesuffix(" or left out"), entry.about
