"""From the fields of a body to prompt keys, and the checks of token ids.

A **prompt key** is the canonical form of token ids (``radixkv.index.tokens``). It is made here, once for a prompt. The
same object is used in lookup, warm, pin, completion and route, in the engine and in the cache.

Warm, lookup, pin and route use the same **prefix** of a prompt: the part with which every continuation begins, cut to
whole blocks.

    [0, prefix)  whole blocks before the last stable boundary: warmed, looked up
    [prefix, n)  left out: may be tokenized differently once the text continues, or is shorter than a block

Ids given as ids are stable anywhere. A completion takes its whole prompt.

Nothing here uses an event loop: ``prompts_of`` runs on it for short bodies, and in a separate process for others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel

from radixkv.errors import ArgumentError
from radixkv.index.tokens import TOKEN_BYTES, decode, encode
from radixkv.service.answer_forms import Form, form_of
from radixkv.service.problems import ApiError, invalid
from radixkv.service.prompt_lines import LineRule, applied, of_documents
from radixkv.service.prompt_times import NO_TIMES, Times
from radixkv.service.schemas.completions import CompletionRequest
from radixkv.service.schemas.conversations import Breakpoint, ConversationBody, num_chars
from radixkv.service.schemas.prompts import Message, PromptForms, PromptOrder
from radixkv.service.schemas.structured import Wanted
from radixkv.service.schemas.tokenizing import DetokenizeRequest, TokenizeRequest
from radixkv.service.usage import Promise
from radixkv.tokenizer import Tokenizer
from radixkv.tokenizer.chat import RenderingTooLong, at_other_time
from radixkv.tokenizer.protocol import Tool, Turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

MAX_CHARS_PER_TOKEN = 64
"""A text with more characters than this for each token that a prompt may have is refused before it is tokenized."""

_NEXT_REQUEST: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}),
    ({"role": "user", "content": "x"},),
)
"""What the next request of a conversation adds to it; the second one if it ends with the assistant's turn."""

_AFTER_BREAKPOINT: tuple[tuple[dict[str, str], ...], ...] = (
    (),
    ({"role": "user", "content": "x"},),
    ({"role": "assistant", "content": "x"},),
)

_LIKELY_CHARS_PER_TOKEN = 8
"""If a text has more characters than this for each token, its beginning is tokenized alone first."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The key of a prompt, and the number of its tokens after the key.

    - ``text``: what a completion may echo, or a chat as JSON, to which another one is joined.
    - ``asked``: the promises that a chat's breakpoints ask for, not rounded to blocks.
    - ``has_tools``: whether the model was shown tools.
    - ``form``: what the answer has to be; None: anything.
    - ``date``: that of the time with which it was rendered; empty if its template doesn't ask for the time.
    - ``others``: the same conversation, rendered with earlier dates.
    - ``num_shared``: if it is one of these, with how many tokens it begins whatever the date is; None: it isn't.
    - ``rules``: the names of the rules that changed its lines.
    """

    key: bytes
    left_out: int
    text: str = ""
    asked: tuple[Promise, ...] = ()
    has_tools: bool = False
    form: Form | None = None
    date: str = ""
    others: tuple[Prompt, ...] = ()
    num_shared: int | None = None
    rules: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the key."""
        return len(self.key) // TOKEN_BYTES

    @property
    def ids(self) -> NDArray[np.uint32]:
        """The token ids ``[num_tokens]``, a view of the key."""
        return decode(self.key)


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Rules for prompts.

    - ``vocab_size``: ids are below it.
    - ``max_tokens``: the most tokens of a prompt.
    - ``block_size``: tokens a block.
    - ``max_total_tokens``: the most tokens of all prompts of one body; None means ``max_tokens``.
    - ``roles``: allowed roles of messages, for the description; None if only the chat template knows them.
    - ``time_zone``: in which templates show the time, by its IANA name; None: the machine's.
    - ``lines``: rules for lines of conversations that change.
    """

    vocab_size: int
    max_tokens: int
    block_size: int
    max_total_tokens: int | None = None
    roles: tuple[str, ...] | None = None
    time_zone: str | None = None
    lines: tuple[LineRule, ...] = ()

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> PromptRules:
        """Return rules from their fields, as ``dataclasses.asdict`` and JSON write them."""
        return cls(**{**document, "lines": of_documents(document["lines"])})

    @property
    def max_ids(self) -> int:
        """Most token ids that a body may have."""
        return max(self.max_tokens, self.max_total_tokens or 0)

    def key_of(self, ids: Sequence[int], field: str) -> bytes:
        """Return the key of 1 to ``max_tokens`` ids.

        An ApiError (422) names the first id that isn't in the vocabulary.
        """
        self.check_length(len(ids), field)
        key = encode(ids)
        found = decode(key)
        if int(found.max()) >= self.vocab_size:
            index = int((found >= self.vocab_size).argmax())
            allowed = f"an integer from 0 to {self.vocab_size - 1}"
            place, value = f"{field}[{index}]", int(found[index])
            raise invalid(f"{place}={value} is not in the vocabulary", place, value, allowed)
        return key

    def check_length(self, num_tokens: int, field: str) -> None:
        """Raise ApiError (422) unless a prompt may have this many tokens."""
        if not num_tokens:
            raise invalid(f"{field} has no tokens", field, 0, f"1 to {self.max_tokens} tokens")
        if num_tokens > self.max_tokens:
            message = f"{field} has {num_tokens} tokens, more than {self.max_tokens}"
            allowed = f"at most {self.max_tokens} tokens"
            raise invalid(message, field, num_tokens, allowed, is_too_long=True)

    def check_total(self, num_tokens: int, field: str) -> None:
        """Raise ApiError (422) unless all prompts of a body together may have this many tokens."""
        if num_tokens > self.max_ids:
            message = f"the prompts have {num_tokens} tokens or more together, more than {self.max_ids}"
            raise invalid(message, field, num_tokens, f"at most {self.max_ids} tokens")

    def check_text(self, num_chars: int, field: str) -> None:
        """Raise ApiError (422) for a text that is too long for any tokenizer, before it is tokenized."""
        limit = self.max_tokens * MAX_CHARS_PER_TOKEN
        if num_chars > limit:
            message = f"{field} has {num_chars} characters, more than {limit}"
            allowed = f"at most {limit} characters and {self.max_tokens} tokens"
            raise invalid(message, field, num_chars, allowed, is_too_long=True)

    def check_beginning(self, text: str, field: str, tokenizer: Tokenizer) -> None:
        """Raise ApiError (422) if the beginning of a long text has too many tokens already; the rest isn't
        tokenized."""
        self.check_text(len(text), field)
        likely = self.max_tokens * _LIKELY_CHARS_PER_TOKEN
        if len(text) > likely:
            ids, _ = tokenizer.stable_prefix(text[:likely])
            if len(ids) > self.max_tokens:
                message = f"{field} has {len(ids)} tokens or more, more than {self.max_tokens}"
                allowed = f"at most {self.max_tokens} tokens"
                raise invalid(message, field, len(ids), allowed, is_too_long=True)

    def whole_blocks(self, prompt_key: bytes, left_out: int) -> Prompt:
        """Cut the key to whole blocks."""
        num_cut = len(prompt_key) // TOKEN_BYTES % self.block_size
        return Prompt(prompt_key[: len(prompt_key) - num_cut * TOKEN_BYTES], left_out + num_cut)


def prompts_of(
    body: BaseModel, tokenizer: Tokenizer, rules: PromptRules, times: Times = NO_TIMES
) -> list[Prompt]:
    """Return all prompts of a body, as keys; about 1 µs a token of a text. Raises ApiError (422).

    ``times``: with which its conversations are rendered, each as often as there are times.
    """
    if isinstance(body, PromptForms):
        return [_prefix_of(body, tokenizer, rules, times)]
    if isinstance(body, PromptOrder):
        return [rules.whole_blocks(rules.key_of(body.token_ids, "token_ids"), 0)]
    if isinstance(body, CompletionRequest):
        return _completed(body, tokenizer, rules)
    if isinstance(body, ConversationBody):
        return [_conversation(body, tokenizer, rules, times)]
    if isinstance(body, TokenizeRequest):
        return [_tokens_of(body, tokenizer, rules, times)]
    if isinstance(body, DetokenizeRequest):
        return [Prompt(rules.key_of(body.tokens, "tokens"), 0, tokenizer.decode(body.tokens))]
    return []


def _prefix_of(body: PromptForms, tokenizer: Tokenizer, rules: PromptRules, times: Times) -> Prompt:
    field = _the_one_field(body)
    if body.token_ids is not None:
        return rules.whole_blocks(rules.key_of(body.token_ids, field), 0)

    def cut(stable: Callable[[], tuple[list[int], int]]) -> Prompt:
        ids, left_out = _tokenized(field, stable)
        rules.check_length(len(ids) + left_out, field)
        return rules.whole_blocks(encode(ids), left_out)

    if body.prompt is not None:
        return cut(lambda: _stable_prefix(str(body.prompt), tokenizer, rules))
    rules.check_text(sum(len(each.content) for each in body.messages or ()), "messages")
    given, used = applied(rules.lines, _turns_of(body.messages), is_beginning=True)

    def render(now: str | None) -> Prompt:
        return replace(cut(lambda: tokenizer.stable_messages(given, now)), rules=used)

    if not body.is_dated:
        return render(None)
    times = times.of(body.day_of_prompt)
    return _rendered(times, render, lambda prompt, now: (), follows=body.follows_promises)


def _rendered(
    times: Times,
    render: Callable[[str | None], Prompt],
    asked: Callable[[Prompt, str | None], tuple[Promise, ...]],
    *,
    follows: bool,
) -> Prompt:
    """Return a conversation's prompt, rendered with the present time; if it follows promises, with earlier dates too.

    What can't be rendered with an earlier date, or is the same then, has no prompt of that date. What its breakpoints
    ask for follows from the present prompt, so an earlier date costs one rendering.
    """
    found = render(times.now)
    found = replace(found, date=times.date, asked=asked(found, times.now))
    others: list[Prompt] = []
    for date in times.earlier if follows else ():
        try:
            other = render(times.on(date))
        except ApiError:
            continue
        if other.key != found.key:
            others.append(_with_date(other, date, found))
    return replace(found, others=tuple(others))


def _with_date(other: Prompt, date: str, present: Prompt) -> Prompt:
    """Return the prompt of an earlier date, with what its breakpoints ask for.

        present  [0 ─ the same ─ a)[─ its date ─)[─ the same ─ n)
        other    [0 ─ the same ─ a)[─ its date ──)[─ the same ─ m)

    A promise that ends behind the date ends as far before the end of the prompt. One that ends in it ends before it.
    """
    ours, theirs = present.ids.tolist(), other.ids.tolist()
    num_shared = _num_equal(ours, theirs)
    most = min(len(ours), len(theirs)) - num_shared
    num_after = min(_num_equal(ours[::-1], theirs[::-1]), most)

    def moved(num_tokens: int) -> int:
        if len(ours) - num_tokens <= num_after:
            return len(theirs) - (len(ours) - num_tokens)
        return min(num_tokens, num_shared)

    asked = tuple(Promise(moved(each.num_tokens), each.ttl_s) for each in present.asked)
    return replace(other, date=date, num_shared=num_shared, asked=asked)


def _stable_prefix(text: str, tokenizer: Tokenizer, rules: PromptRules) -> tuple[list[int], int]:
    rules.check_beginning(text, "prompt", tokenizer)
    return tokenizer.stable_prefix(text)


def _the_one_field(body: PromptForms) -> str:
    forms = ("prompt", "messages", "token_ids")
    given = [form for form in forms if getattr(body, form) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        message = f"{', '.join(forms)}: {found} given"
        raise invalid(message, ", ".join(forms), found, "exactly one of them")
    return given[0]


def _conversation(body: ConversationBody, tokenizer: Tokenizer, rules: PromptRules, times: Times) -> Prompt:
    """Return the prompt of a chat with its tools, uncut, up to the opening of the assistant's answer."""
    asked, tools, field = body.turns(), body.tool_specs(), body.prompt_field
    rules.check_text(sum(map(num_chars, (*asked, *tools))), field)
    turns, used = applied(rules.lines, asked, is_beginning=body.is_beginning)
    form = form_of(body.wanted(), tools)
    if body.continues is not None:
        return Prompt(b"", 0, chat_document(asked, tools), has_tools=bool(tools), form=form)
    if body.is_beginning:
        ids = _tokenized(field, lambda: _beginning(turns, tools, tokenizer, times.now))
        return Prompt(rules.key_of(ids, field), 0, chat_document(asked, tools, times.now), rules=used)
    breakpoints = [
        replace(each, turns=applied(rules.lines, each.turns, is_beginning=True)[0])
        for each in body.breakpoints()
    ]

    def render(now: str | None) -> Prompt:
        ids = _tokenized(field, lambda: tokenizer.encode_chat(turns, tools, now))
        return Prompt(rules.key_of(ids, field), 0, has_tools=bool(tools), form=form, rules=used)

    def promises(prompt: Prompt, now: str | None) -> tuple[Promise, ...]:
        return _asked(breakpoints, turns, tools, prompt.ids.tolist(), tokenizer, now) if breakpoints else ()

    if body.rendered_at is not None and times.now is not None:
        return render(body.rendered_at)
    return _rendered(times, render, promises, follows=True)


def chat_document(turns: Sequence[Turn], tools: Sequence[Tool], now: str | None = None) -> str:
    """Return a chat as JSON, in the form of ``schemas.contents.ChatDocument``."""
    document = {"turns": turns, "tools": tools} | ({} if now is None else {"now": now})
    return json.dumps(document, ensure_ascii=False)


def _beginning(
    turns: Sequence[Turn], tools: Sequence[Tool], tokenizer: Tokenizer, now: str | None
) -> list[int]:
    """Return the ids with which every continuation of a chat begins.

    Raises ArgumentError if the chat can't be rendered with any continuation.
    """
    ids = tokenizer.encode_chat([*turns, *_AFTER_BREAKPOINT[1]], tools, now)
    for more in (_AFTER_BREAKPOINT[0], _AFTER_BREAKPOINT[2]):
        try:
            other = tokenizer.encode_chat([*turns, *more], tools, now)
        except RenderingTooLong:
            raise
        except ArgumentError:
            continue
        ids = ids[: _num_equal(ids, other)]
    return ids


def _asked(
    breakpoints: Sequence[Breakpoint],
    turns: Sequence[Turn],
    tools: Sequence[Tool],
    ids: Sequence[int],
    tokenizer: Tokenizer,
    now: str | None,
) -> tuple[Promise, ...]:
    """Return the promises that breakpoints ask for: no further than what the next request can read again."""
    most = _num_read_again(turns, tools, ids, tokenizer, now)
    return tuple(
        Promise(min(_num_before(each, ids, tokenizer, now), most), each.ttl_s) for each in breakpoints
    )


def _num_read_again(
    turns: Sequence[Turn], tools: Sequence[Tool], ids: Sequence[int], tokenizer: Tokenizer, now: str | None
) -> int:
    """Return with how many ids of a prompt the prompt of the conversation's next request begins.

    A template may write a turn differently once a question follows, for example without its reasoning. It may also show
    the hour, so a later request of the same day begins differently. None of what can't be rendered again is counted.
    """
    found = len(ids)
    try:
        for more in _NEXT_REQUEST:
            try:
                later = tokenizer.encode_chat([*turns, *more], tools, now)
            except RenderingTooLong:
                raise
            except ArgumentError:
                continue
            found = _num_equal(later, ids)
            break
        if now is not None:
            found = min(found, _num_equal(tokenizer.encode_chat(turns, tools, at_other_time(now)), ids))
    except RenderingTooLong:
        return 0
    return found


def _num_before(breakpoint: Breakpoint, ids: Sequence[int], tokenizer: Tokenizer, now: str | None) -> int:
    """Return how many ids of a prompt a chat up to a breakpoint has in common with it; 0 if it can't be rendered.

    A template may refuse a chat that ends there. Then the chat goes on with a short message.
    """
    for more in _AFTER_BREAKPOINT:
        try:
            before = tokenizer.encode_chat([*breakpoint.turns, *more], breakpoint.tools, now)
        except RenderingTooLong:
            raise
        except ArgumentError:
            continue
        return _num_equal(before, ids)
    return 0


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    size = min(len(left), len(right))
    differs = np.array(left[:size]) != np.array(right[:size])
    return int(np.argmax(differs)) if differs.any() else size


def _tokens_of(body: TokenizeRequest, tokenizer: Tokenizer, rules: PromptRules, times: Times) -> Prompt:
    given = [name for name in ("prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise invalid(f"prompt, messages: {found} given", "prompt, messages", found, "exactly one of them")
    if body.prompt is not None:
        return _whole(body.prompt, "prompt", tokenizer, rules, echo=False)
    rules.check_text(sum(len(each.content) for each in body.messages or ()), "messages")
    messages, used = applied(rules.lines, _turns_of(body.messages))
    ids = _tokenized(
        "messages", lambda: tokenizer.encode_messages(messages, body.add_generation_prompt, times.now)
    )
    return Prompt(rules.key_of(ids, "messages"), 0, rules=used)


def _turns_of(messages: Sequence[Message] | None) -> list[dict[str, str]]:
    return [{"role": each.role, "content": each.content} for each in messages or ()]


def _completed(body: CompletionRequest, tokenizer: Tokenizer, rules: PromptRules) -> list[Prompt]:
    """Return the prompts of a completion, uncut."""
    is_batch = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    given: list[Any] = list(body.prompt) if is_batch else [body.prompt]
    names = ["prompt"] if len(given) == 1 else [f"prompt[{index}]" for index in range(len(given))]
    found: list[Prompt] = []
    wanted = body.response_format
    schema = None if wanted is None else wanted.schema_of_answer
    form = form_of(Wanted(schema, "response_format"), ())
    for each, field in zip(given, names, strict=True):
        found.append(replace(_whole(each, field, tokenizer, rules, echo=body.echo), form=form))
        rules.check_total(sum(prompt.num_tokens for prompt in found), "prompt")
    return found


def _whole(
    given: str | list[int], field: str, tokenizer: Tokenizer, rules: PromptRules, *, echo: bool
) -> Prompt:
    if isinstance(given, str):
        text = given

        def encoded() -> list[int]:
            rules.check_beginning(text, field, tokenizer)
            return tokenizer.encode(text)

        return Prompt(rules.key_of(_tokenized(field, encoded), field), 0, text if echo else "")
    key = rules.key_of(given, field)
    return Prompt(key, 0, tokenizer.decode(given) if echo else "")


def _tokenized(field: str, tokenize: Callable[[], T]) -> T:
    """Return ``tokenize()``; its errors become an ApiError on ``field``."""
    try:
        return tokenize()
    except ArgumentError as error:
        name = error.argument if error.argument.startswith(field) else field
        raise invalid(str(error), name, error.value, error.allowed) from None
