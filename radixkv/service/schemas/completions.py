"""OpenAI's completions, with radixkv's additional fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from radixkv.errors import shown
from radixkv.index.pins import MAX_TTL_S
from radixkv.service.schemas.base import (
    MAX_NAME,
    Neutral,
    ReplyBody,
    RequestBody,
    Seconds,
    first_at_most,
)
from radixkv.service.schemas.ignored import COMPLETIONS, TABLE, Drops
from radixkv.service.schemas.prompts import Adapter, Salted, Text, TokenIds, either
from radixkv.service.schemas.structured import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    MAX_TOP_LOGPROBS,
    CompletionLogprobs,
    ResponseFormat,
)

MAX_CHOICES = 32
MAX_STOPS = 16
"""Each costs time for each character of an answer. OpenAI documents 4 as the most, Google 5, Anthropic none."""
MAX_STOP_CHARS = 256
MAX_PROMPTS = 64
MAX_LABELS = 16
MAX_LABEL_NAME = 64
MAX_LABEL_NUMBER = 1e15


def _prompt_form(value: Any) -> str:
    if isinstance(value, list):
        first = value[0] if value else 0
        return "texts" if isinstance(first, str) else "batch" if isinstance(first, list) else "ids"
    return "text"


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("batch")],
    Discriminator(_prompt_form),
]


def _stop_form(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[_StopText, Tag("one")]
    | Annotated[list[_StopText], Field(max_length=MAX_STOPS, fail_fast=True), Tag("many")],
    Discriminator(_stop_form),
]


class StreamOptions(RequestBody):
    """Options of a stream."""

    drops: ClassVar[Drops] = TABLE["/v1/completions"]["stream_options"]

    include_usage: bool = Field(default=False, description="one more event at the end, with the usage")
    continuous_usage_stats: bool = Field(
        default=False, description="with include_usage: every event has the usage so far"
    )


_OWN_FIELDS = ("priority", "priority_duration_s")
"""Labels of a trace that a request may not have as labels: ``Hints`` has fields for them."""
_LABEL_ALLOWED = (
    f"at most {MAX_LABELS} strings of at most {MAX_NAME} characters, numbers within ±{MAX_LABEL_NUMBER:g} and "
    f"booleans, by names of 1 to {MAX_LABEL_NAME} characters other than {' and '.join(_OWN_FIELDS)}"
)


def _is_label(name: str, value: Any) -> bool:
    if not 1 <= len(name) <= MAX_LABEL_NAME or name in _OWN_FIELDS:
        return False
    if isinstance(value, str):
        return len(value) <= MAX_NAME
    return isinstance(value, int | float) and abs(value) <= MAX_LABEL_NUMBER


def _checked_labels(labels: dict[str, Any]) -> dict[str, Any]:
    bad = next((name for name, value in labels.items() if not _is_label(name, value)), None)
    if bad is not None or len(labels) > MAX_LABELS:
        which = "" if bad is None else f" (wrong: {shown(bad, MAX_LABEL_NAME)})"
        raise ValueError(_LABEL_ALLOWED + which)
    return labels


Labels = Annotated[
    dict[str, Any],
    AfterValidator(_checked_labels),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LABELS,
            "propertyNames": {
                "minLength": 1,
                "maxLength": MAX_LABEL_NAME,
                "not": {"enum": list(_OWN_FIELDS)},
            },
            "additionalProperties": {
                "anyOf": [
                    {"type": "string", "maxLength": MAX_NAME},
                    {"type": "number", "minimum": -MAX_LABEL_NUMBER, "maximum": MAX_LABEL_NUMBER},
                    {"type": "boolean"},
                ]
            },
        }
    ),
]


def _duration_needs_priority(schema: dict[str, Any]) -> None:
    null, number = {"type": "null"}, {"type": "integer"}
    schema["anyOf"] = [
        {"properties": {"duration_s": null}},
        {"required": ["priority"], "properties": {"priority": number}},
    ]


class Hints(RequestBody):
    """Facts about a request for the tenant's eviction policy. They change no answer and no other tenant's cache."""

    model_config = ConfigDict(json_schema_extra=_duration_needs_priority)

    labels: Labels = Field(
        default_factory=dict,
        description="facts by name. Policies use type (default: completion), session, turn, session_over, "
        "tool_pending and expected_gap_s (seconds until the session's next request), and ignore others",
    )
    priority: int | None = Field(
        default=None, ge=0, le=100, description="for all its blocks: 0 is evicted first"
    )
    duration_s: float | None = Field(
        default=None,
        gt=0.0,
        le=MAX_TTL_S,
        description="seconds that the priority lasts after the last use; null: it never ends",
    )


def related(schema: dict[str, Any]) -> None:
    """Add to the JSON schema which fields may occur together."""
    unset = {"enum": [False, None]}
    beams = {"use_beam_search": {"const": True}, "stream": unset, "temperature": {"enum": [0, None]}}
    beams |= {"top_p": {"enum": [1, None]}, "top_k": {"enum": [-1, None]}}
    drawn = [{"properties": {"use_beam_search": unset, **each}} for each in _choices({"const": 1})]
    searched = [
        {"required": ["use_beam_search"], "properties": {**beams, **each}}
        for each in _choices({"minimum": 1})
    ]
    answered(schema)
    streamed = {"required": ["stream"], "properties": {"stream": {"const": True}}}
    schema["allOf"] += [
        {"anyOf": [*drawn, *searched]},
        {"anyOf": [{"properties": {"stream_options": {"type": "null"}}}, streamed]},
    ]


def answered(schema: dict[str, Any]) -> None:
    """Add to the JSON schema what holds for every request of an answer: one of two names."""
    schema["allOf"] = [either("cache_salt", "salt"), either("max_completion_tokens", "max_tokens")]


def _choices(best_of_one: dict[str, Any]) -> list[dict[str, Any]]:
    """``best_of`` is null, or n is 1. For other n its bounds depend on n, and the message of a 422 says them."""
    return [{"best_of": {"type": "null"}}, {"n": {"enum": [1, None]}, "best_of": best_of_one}]


def _top_k(value: int) -> int | None:
    if value == 0:
        raise PydanticCustomError("top_k", "an integer ≥ 1, or -1 for all tokens")
    return None if value == -1 else value


TopK = Annotated[
    int,
    Field(ge=-1, le=2**31 - 1),
    AfterValidator(_top_k),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, {"const": -1}]}),
]


def _num_logprobs(value: Any) -> Any:
    return None if value is False else value


NumLogprobs = Annotated[
    Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None,
    BeforeValidator(_num_logprobs),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}, {"const": False}]}
    ),
]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10.0)]


def _bias_ids(biases: dict[str, float]) -> dict[str, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise ValueError('token ids as text, such as "42", with numbers')
    return biases


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    first_at_most(MAX_BIASES),
    AfterValidator(_bias_ids),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "propertyNames": {"type": "string", "pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        }
    ),
]


class CompletionRequest(Salted):
    """OpenAI's completion request with OpenAI's defaults, and salt, adapter, hints, top_k, use_beam_search, ignore_eos.

    Fields of other servers that would change the output and aren't supported allow only their neutral values.
    ``prompt_cache_key`` changes no answer: it labels the session.
    """

    model_config = ConfigDict(json_schema_extra=related)
    other_names: ClassVar[Mapping[str, str]] = {**Salted.other_names, "max_completion_tokens": "max_tokens"}

    without_prompts: ClassVar[Mapping[str, object]] = {"prompt": "-", "response_format": None}
    drops: ClassVar[Drops] = COMPLETIONS

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="name of the served model; null: that model"
    )
    prompt: Prompt = Field(description="text or token ids, or a list of texts or of lists of token ids")
    adapter: Adapter | None = None
    hints: Hints | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="completions of each prompt")
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="number of beams; equal to n when sampling"
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="another name of max_tokens"
    )
    max_tokens: int = Field(16, ge=1, le=2**31 - 1, description="most tokens of a completion")
    temperature: float = Field(
        1.0, ge=0.0, le=2.0, description="0 is greedy; with beam search only 0 is allowed"
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: TopK | None = Field(None, description="-1: all tokens, as if left out")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="the same seed draws the same tokens; null: random"
    )
    stop: Stop | None = Field(None, description="the completion ends before the first of these texts")
    stream: bool = Field(False, description="answer with server-sent events, while tokens are generated")
    stream_options: StreamOptions | None = None
    use_beam_search: bool = Field(
        False,
        description="n beams (or best_of); the n best are returned, best first. With stop, beams that are equal up to "
        "it are one answer, so there may be fewer than n",
    )
    ignore_eos: bool = Field(False, description="go on to max_tokens, also after the end-of-sequence token")
    echo: bool = Field(False, description="begin each completion with its prompt")
    prompt_cache_key: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="the session, for the tenant's eviction policy, unless the hints have that label"
    )
    suffix: Annotated[Any, Neutral("")] = None
    logprobs: NumLogprobs | None = Field(
        None,
        description="log probabilities of the tokens, and of as many of the likeliest ones at each place",
    )
    top_logprobs: Annotated[Any, Neutral(0)] = None
    prompt_logprobs: Annotated[Any, Neutral()] = None
    logit_bias: LogitBias | None = Field(None, description="added to the scores of tokens, by id as text")
    presence_penalty: Penalty = Field(
        0.0, description="subtracted from the scores of tokens that the answer has"
    )
    frequency_penalty: Penalty = Field(0.0, description="the same, for each time")
    repetition_penalty: RepetitionPenalty = Field(
        1.0, description="scores of tokens of prompt and answer are divided by it, negative ones multiplied"
    )
    length_penalty: Annotated[Any, Neutral(1)] = None
    min_p: Annotated[Any, Neutral(0)] = None
    min_tokens: int = Field(
        0, ge=0, le=2**31 - 1, description="no end-of-sequence token before so many tokens"
    )
    stop_token_ids: Annotated[Any, Neutral([])] = None
    bad_words: Annotated[Any, Neutral([])] = None
    allowed_token_ids: Annotated[Any, Neutral()] = None
    include_stop_str_in_output: Annotated[Any, Neutral(False)] = None
    skip_special_tokens: Annotated[Any, Neutral(True)] = None
    spaces_between_special_tokens: Annotated[Any, Neutral(True)] = None
    truncate_prompt_tokens: Annotated[Any, Neutral()] = None
    return_token_ids: Annotated[Any, Neutral(False)] = None
    response_format: ResponseFormat | None = Field(None, description="JSON, or JSON of a schema")
    early_stopping: Annotated[Any, Neutral(False)] = None
    tools: Annotated[Any, Neutral([])] = None

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


class Choice(ReplyBody):
    """One completion."""

    index: int = Field(description="prompt-major: index of the prompt × n + number of the completion")
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = Field(
        description="stop: a stop text or the end-of-sequence token; length: max_tokens; null: not finished yet"
    )


class PromptTokensDetails(ReplyBody):
    """Tokens of the prompts by what the cache did."""

    cached_tokens: int = Field(description="read from the cache")
    cache_write_tokens: int = Field(description="computed, and promised for a TTL")


class Usage(ReplyBody):
    """Tokens of the prompts and of the completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = Field(
        description="null in all events of a stream but the last"
    )


class LoadedTokens(ReplyBody):
    """What of the cached tokens came back from the tiers below the cache."""

    host_tokens: int = Field(description="from host memory")
    disk_tokens: int = Field(description="from the disk")
    seconds: Seconds = Field(description="spent on looking for them and loading them")


class Timings(ReplyBody):
    """Seconds since the request arrived, with the wait for the model."""

    queued_s: Seconds = Field(description="until the model began, with the wait for room in its batch")
    time_to_first_token_s: Seconds = Field(description="until the first token")
    total_s: Seconds = Field(description="until the answer")
    loaded: LoadedTokens | None = Field(
        default=None, description="with tiers below the cache", exclude_if=lambda loaded: loaded is None
    )


class CompletionReply(ReplyBody):
    """OpenAI's completion object, with timings. In a stream: one chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    timings: Timings | None = None
