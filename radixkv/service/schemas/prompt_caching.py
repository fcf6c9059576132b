"""OpenAI's options of prompt caching, for chats and responses.

A request writes what its breakpoints mark: the latest four of the content, or with ``mode: implicit`` the latest three
and the whole prompt. Without options and breakpoints nothing is promised: the cache may keep the prompt all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.service.schemas.base import MAX_NAME, RequestBody
from radixkv.service.schemas.conversations import Breakpoint, TextPart
from radixkv.service.usage import TTL_12H, TTL_30M

MAX_WRITES = 4
_Ttl = Literal["30m", "12h"]
_SECONDS: Mapping[str, int] = {"30m": TTL_30M, "12h": TTL_12H}


class PartBreakpoint(RequestBody):
    """A breakpoint: the prefix up to the end of the part stays resident, within the tenant's budget."""

    mode: Literal["explicit"]
    ttl: _Ttl | None = Field(None, description="null: that of prompt_cache_options")


class MarkedPart(TextPart):
    """A text that may end with a breakpoint."""

    prompt_cache_breakpoint: PartBreakpoint | None = None


class CacheOptions(RequestBody):
    """What a request writes, and for how long."""

    mode: Literal["implicit", "explicit"] = Field(
        default="implicit",
        description="implicit: the whole prompt, and the latest three breakpoints; explicit: the latest four "
        "breakpoints. Without breakpoints an explicit request doesn't use the cache",
    )
    ttl: _Ttl = Field(default="30m", description="the shortest time that it stays resident")


class ResponseCacheOptions(CacheOptions):
    """The same for responses."""

    comparison_response_id: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="asks for a diagnosis, which is unavailable"
    )
    prewarm: bool = Field(False, description="compute the prompt, and generate nothing")


Mark = tuple[int, int, PartBreakpoint]
"""A breakpoint's place: the index of the message, the number of its parts up to there, and the breakpoint."""


def marks_of(contents: Sequence[object]) -> list[Mark]:
    """Return the breakpoints in contents, in order."""
    return [
        (index, number, part.prompt_cache_breakpoint)
        for index, content in enumerate(contents)
        if isinstance(content, list)
        for number, part in enumerate(content, 1)
        if isinstance(part, MarkedPart) and part.prompt_cache_breakpoint is not None
    ]


def latest(marks: Sequence[Mark], options: CacheOptions | None) -> list[Mark]:
    """Return the breakpoints that are written."""
    is_explicit = options is not None and options.mode == "explicit"
    return list(marks[-MAX_WRITES:] if is_explicit else marks[-MAX_WRITES + 1 :])


def ttl_of(mark: PartBreakpoint, options: CacheOptions | None) -> int:
    """Return the seconds of a breakpoint."""
    return _SECONDS[mark.ttl or (options or CacheOptions()).ttl]


def whole_prompt(
    turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], options: CacheOptions | None
) -> list[Breakpoint]:
    """Return the breakpoint of the whole prompt, if the options ask for it."""
    if options is None or options.mode == "explicit":
        return []
    return [Breakpoint(turns, tools, _SECONDS[options.ttl])]


def uses_cache(options: CacheOptions | None, num_asked: int) -> bool:
    """Whether a request reads and writes at all."""
    return options is None or options.mode == "implicit" or num_asked > 0
