"""The forms of a prompt, and the requests about a prefix that compute nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from radixkv.config import MAX_WEIGHTS
from radixkv.service.prompt_times import Day
from radixkv.service.schemas.base import MAX_NAME, ReplyBody, RequestBody

MAX_MESSAGES = 4096
"""Messages of one conversation. Each costs its markers or its part of a template, even if it is empty."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Salt = Annotated[str, Field(max_length=MAX_NAME, description="name of one of the tenant's own namespaces")]
Adapter = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_NAME,
        description="name of an adapter: its prefixes are separate; loads no weights",
    ),
]


class Message(RequestBody):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str


class Salted(RequestBody):
    """A namespace of the tenant, named by its salt."""

    other_names: ClassVar[Mapping[str, str]] = {"cache_salt": "salt"}

    cache_salt: Salt | None = Field(None, description="another name of salt")
    salt: Salt = ""


def either(one: str, other: str) -> dict[str, Any]:
    """Return a JSON schema: of two names of a field, one is null or left out."""
    return {"anyOf": [{"properties": {name: {"type": "null"}}} for name in (one, other)]}


_FORMS = ("prompt", "messages", "token_ids")


def _exactly_one_form(schema: dict[str, Any]) -> None:
    """Add the rule to the JSON schema: one form is required, and the others are null or left out."""
    shapes = {form: {"not": {"type": "null"}} for form in _FORMS}
    schema["oneOf"] = [
        {
            "required": [form],
            "properties": {each: shapes[each] if each == form else {"type": "null"} for each in _FORMS},
        }
        for form in _FORMS
    ]
    if "cache_salt" in schema["properties"]:
        schema["allOf"] = [either("cache_salt", "salt")]


class PromptForms(RequestBody):
    """A prompt in exactly one of three forms: text, messages of a chat, or token ids."""

    model_config = ConfigDict(json_schema_extra=_exactly_one_form)

    without_prompts: ClassVar[Mapping[str, object]] = {"prompt": None, "messages": None, "token_ids": None}

    is_dated: ClassVar[bool] = True
    """Whether its messages are rendered with the present time. If not, it ends before a date that a template shows."""
    follows_promises: ClassVar[bool] = False
    """Whether it stands for a conversation that comes now, which keeps the date of what was promised."""

    @property
    def day_of_prompt(self) -> Day:
        """The day that a template shows."""
        return "today"

    prompt: Text | None = Field(
        None, description="the prompt as text; exactly one of prompt, messages and token_ids"
    )
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = Field(None, description="the prompt as messages of a chat; the model's chat template makes its text")
    token_ids: TokenIds | None = Field(None, description="the prompt as ids of the model's vocabulary")


class PromptFields(Salted, PromptForms):
    """A prompt in exactly one of three forms, and its namespace."""

    adapter: Adapter | None = None


class DayFields(PromptFields):
    """The same, for a day."""

    day: Day = Field(
        "today",
        description="the date that the model's chat template shows to messages: today's, or tomorrow's, to prepare a "
        "prompt before midnight; no effect on other prompts and templates",
    )

    @property
    def day_of_prompt(self) -> Day:
        """The day that a template shows."""
        return self.day


class PromptOrder(RequestBody):
    """A prefix as token ids, in a request of another replica for a tenant."""

    without_prompts: ClassVar[Mapping[str, object]] = {"token_ids": [0]}

    token_ids: TokenIds
    salt: Salt = ""
    adapter: Adapter | None = None
    weights: int = Field(
        0,
        ge=0,
        le=MAX_WEIGHTS,
        description="version of the sender's weights: the receiver's must be the same",
    )
    key_id: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")] = ""
    """Of the key that pays; empty: none was used."""
    incarnation: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")] = ""
    """Of the tenant, as the sender's keys file names it: the receiver may not have seen yet that it was made again."""


class LookupRequest(PromptFields):
    """The prompt to look up."""

    follows_promises: ClassVar[bool] = True


class LookupReply(ReplyBody):
    """How much of a prompt is resident for the caller."""

    matched_tokens: int = Field(description="leading tokens that are resident, in whole blocks")
    matched_blocks: int = Field(description="the same in blocks")


class ClearReply(ReplyBody):
    """What was removed from the cache."""

    namespaces: int = Field(description="namespaces that were removed")
    blocks: int = Field(description="blocks that they had")
    owed: bool = Field(
        description="whether this replica's disk may still have some of it. It serves none, and goes on destroying it"
    )
