"""What an answer has to be: JSON of a schema, or calls of tools; and the log probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from radixkv.service.schemas.base import TWO_VALUES, ReplyBody, RequestBody

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
"""The schema of JSON mode."""
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1_024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0

JsonSchema = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "description": "a JSON schema, which the answer follows"}),
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a chat's request says of the form of its answer.

    - ``response_schema``: a JSON schema that the answer's text follows; ``field``: which field has it.
    - ``must_call``: whether the answer has to call a tool. ``names``: which ones; None: any. ``one_call``: just once.
      ``choice_field``: which field says so.
    """

    response_schema: Mapping[str, Any] | None = None
    field: str = ""
    must_call: bool = False
    names: tuple[str, ...] | None = None
    one_call: bool = False
    choice_field: str = "tool_choice"


class JsonSchemaFormat(RequestBody):
    """A schema with a name."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="changes nothing")]
    description: str | None = Field(None, description="changes nothing")
    schema_: JsonSchema | None = Field(None, validation_alias="schema", description="null: any object")
    strict: bool | None = Field(None, description="changes nothing: the answer always follows the schema")


class ResponseFormat(RequestBody):
    """The form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="with the type json_schema")

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            allowed = "json_schema with the type json_schema, and only with it"
            found = {"name": "json_schema", "value": self.json_schema and "given", "allowed": allowed}
            raise PydanticCustomError(TWO_VALUES, "a schema without its type", found)
        return self

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """The schema of the answer; None for text."""
        if self.type == "text":
            return None
        return ANY_OBJECT if self.json_schema is None else self.json_schema.schema_ or ANY_OBJECT


class TextFormat(RequestBody):
    """The form of the answer in a response: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="changes nothing")] | None = None
    description: str | None = Field(None, description="changes nothing")
    schema_: JsonSchema | None = Field(
        None, validation_alias="schema", description="with the type json_schema"
    )
    strict: bool | None = Field(None, description="changes nothing: the answer always follows the schema")

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            allowed = "a schema with the type json_schema, and only with it"
            found = {"name": "schema", "value": self.schema_ and "given", "allowed": allowed}
            raise PydanticCustomError(TWO_VALUES, "a schema without its type", found)
        return self

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """The schema of the answer; None for text."""
        return None if self.type == "text" else self.schema_ or ANY_OBJECT


class TopLogprob(ReplyBody):
    """A token that was likely."""

    token: str = Field(description="its text; � for a part of a character")
    logprob: float
    bytes: list[int] = Field(description="its text in UTF-8")


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob] = Field(description="the likeliest tokens there, likeliest first")


class ChoiceLogprobs(ReplyBody):
    """The log probabilities of an answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(ReplyBody):
    """The log probabilities of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] = Field(
        description="of each token the likeliest ones there, by text"
    )
    text_offset: list[int] = Field(description="where each token begins in the text")
