"""Breakpoints ask for promises of tokens that the next request can read again, and of no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.service.prompt_times import NO_TIMES, Times
from radixkv.service.prompts import Prompt, PromptRules
from radixkv.service.reading import Reader
from radixkv.service.schemas.messages import MessagesRequest
from radixkv.service.schemas.prompts import LookupRequest
from radixkv.tokenizer import load_tokenizer
from tests.tokenizer.folders import write

pytestmark = [pytest.mark.slow]
DROPS_EARLIER_THOUGHTS = """{% set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if loop.index0 < ns.last and m.content and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content or '' }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS_BEFORE_THE_LAST_QUESTION = """{%- for m in messages %}
{%- if tools and m.role == 'user' and loop.last %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>{% endif %}<|im_start|>{{ m.role }}
{{ m.content or '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SHOWS_THE_HOUR = """<|im_start|>system
On {{ strftime_now('%d %B') }}: {{ messages[0].content }} It is {{ strftime_now('%H:%M') }}.<|im_end|>
{%- for m in messages[1:] %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SHOWS_THE_DATE = """<|im_start|>system
On {{ strftime_now('%A, %d %B') }}: {{ messages[0].content }}<|im_end|>
{%- for m in messages[1:] %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "find", "description": "Find a page.", "input_schema": {"type": "object"}}
RULES = "Answer politely, and name the page. " * 10


def reader_of(place: Path, template: str) -> Reader:
    write(place, "gpt2", template)
    tokenizer = load_tokenizer(str(place))
    return Reader(tokenizer, PromptRules(tokenizer.vocab_size, 8192, 16))


def prompt_of(
    reader: Reader, messages: list[Any], times: Times = NO_TIMES, tools: Any = None, **more: Any
) -> Prompt:
    body = {"model": "m", "max_tokens": 1, "messages": messages, **more} | ({"tools": tools} if tools else {})
    (found,) = reader.read(json.dumps(body).encode(), MessagesRequest, times).prompts
    return found


def num_common(left: Prompt, right: Prompt) -> int:
    pairs = zip(left.ids.tolist(), right.ids.tolist(), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(left.num_tokens, right.num_tokens))


def block(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, **more}]


def test_a_template_that_drops_reasoning_later_has_none_of_it_promised(tmp_path: Path) -> None:
    """In the middle of a loop of tools the reasoning is still there. The next question drops it."""
    reader = reader_of(tmp_path, DROPS_EARLIER_THOUGHTS)
    call = {"type": "tool_use", "id": "1", "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "Page 7. " * 40, **MARK}
    loop = [
        {"role": "user", "content": RULES},
        {"role": "assistant", "content": [*block(f"<think>{'Hm. ' * 60}</think>I look."), call]},
        {"role": "user", "content": [result]},
    ]
    now = prompt_of(reader, loop)
    following = [*loop, {"role": "assistant", "content": "Page 7."}, {"role": "user", "content": "And pins?"}]
    later = prompt_of(reader, following)
    (promise,) = now.asked
    assert 40 < promise.num_tokens == num_common(now, later) < now.num_tokens / 2
    plain = [{**loop[0]}, {"role": "assistant", "content": [*block("I look."), call]}, loop[2]]
    (promise,) = prompt_of(reader, plain).asked
    assert promise.num_tokens > 150, "without reasoning all of it is promised"


def test_what_a_template_writes_before_the_last_question_alone_is_not_promised(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, TOOLS_BEFORE_THE_LAST_QUESTION)
    asks = [
        {"role": "user", "content": RULES},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": block("Which page?", **MARK)},
    ]
    more = [{"role": "assistant", "content": "Page 7."}, {"role": "user", "content": "And pins?"}]
    now, later = prompt_of(reader, asks, tools=[TOOL]), prompt_of(reader, [*asks, *more], tools=[TOOL])
    (promise,) = now.asked
    assert 40 < promise.num_tokens <= num_common(now, later)


def test_what_follows_the_hour_is_neither_promised_nor_warmed(tmp_path: Path) -> None:
    """The date may be: a promise keeps it."""
    reader = reader_of(tmp_path, SHOWS_THE_HOUR)
    asks = [{"role": "user", "content": block("Which page?", **MARK)}]
    now, later = (
        prompt_of(reader, asks, Times(f"2026-03-01T{at}:07"), system=RULES) for at in ("10:01", "11:22")
    )
    (promise,) = now.asked
    assert 40 < promise.num_tokens <= num_common(now, later) < now.num_tokens
    body = {"messages": [{"role": "system", "content": RULES}, {"role": "user", "content": RULES}]}
    (warmed,) = reader.read(json.dumps(body).encode(), LookupRequest, Times("2026-03-01T10:01:07")).prompts
    text = load_tokenizer(str(tmp_path)).decode(warmed.ids.tolist())
    assert "On 01 March" in text and "It is 1" not in text


def test_breakpoints_of_an_earlier_date_are_those_of_a_rendering_with_it(tmp_path: Path) -> None:
    """Although they aren't rendered again: before, in and behind a date that has another length."""
    reader = reader_of(tmp_path, SHOWS_THE_DATE)
    system = [*block("Be brief.", **MARK), *block(RULES, **MARK)]
    asks = [{"role": "user", "content": block("Which page?", **MARK)}]
    present = prompt_of(
        reader, asks, Times("2026-05-01T00:10:00", ("2026-04-30", "2026-03-31")), system=system
    )
    assert [each.date for each in present.others] == ["2026-04-30", "2026-03-31"]
    for other in present.others:
        alone = prompt_of(reader, asks, Times(f"{other.date}T00:10:00"), system=system)
        assert (other.key, other.asked) == (alone.key, alone.asked)
        assert other.num_shared == num_common(present, other) > 0
        assert other.asked[-1].num_tokens > other.num_shared + 40 and other.asked[0].num_tokens > 0


def test_a_breakpoint_before_a_dropped_line_is_that_of_what_the_model_reads(tmp_path: Path) -> None:
    from radixkv.service.prompt_lines import DEFAULT_RULES

    write(tmp_path, "gpt2", DROPS_EARLIER_THOUGHTS)
    tokenizer = load_tokenizer(str(tmp_path))
    reader = Reader(tokenizer, PromptRules(tokenizer.vocab_size, 8192, 16, lines=DEFAULT_RULES))
    billing = block("x-anthropic-billing-header: a;", **MARK)
    asks = [{"role": "user", "content": "Which page?"}]
    with_line = prompt_of(reader, asks, system=[*billing, *block(RULES, **MARK)])
    without = prompt_of(reader, asks, system=block(RULES, **MARK))
    assert with_line.key == without.key and with_line.rules == ("claude-code-billing",)
    assert with_line.asked[-1] == without.asked[0] and with_line.asked[0].num_tokens < 16
