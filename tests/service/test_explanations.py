"""Explanations: every planted cause is named, with its place in the body and in tokens, and no other one is."""

from __future__ import annotations

import copy
import json
import random
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from radixkv.service.explanations.bodies import Rendering
from radixkv.service.explanations.causes import WORDS
from radixkv.service.explanations.explain import MAX_CAUSES, MAX_RENDERINGS, Explanation, explain
from radixkv.service.explanations.lines import aligned, without_thoughts
from radixkv.service.problems import ApiError
from radixkv.service.prompt_lines import DEFAULT_RULES
from radixkv.service.prompts import PromptRules
from radixkv.tokenizer import Tokenizer, load_tokenizer
from tests.service.planted_causes import (
    ALL,
    MODELS,
    OF_CACHES,
    OF_HISTORY,
    OF_MESSAGES,
    OF_TOOLS,
    VOLATILE,
    Planted,
    Talk,
    Writer,
    num_equal,
    prepared,
)
from tests.service.running import service_in_thread
from tests.service.test_breakpoints import DROPS_EARLIER_THOUGHTS
from tests.tokenizer.folders import CHATML, write

APIS = tuple(MODELS)
BLOCK = 16
RULES = "Answer politely, and name the page of the manual. " * 8
Found = list[tuple[str, str, int]]


@cache
def rendering(folder: str | None = None) -> Rendering:
    return rendering_of(load_tokenizer(folder))


def rendering_of(tokenizer: Tokenizer) -> Rendering:
    return Rendering(tokenizer, PromptRules(tokenizer.vocab_size, 2**20, BLOCK, lines=DEFAULT_RULES))


def explained(new: Any, *earlier: Any, using: Rendering | None = None) -> Explanation:
    """Explain a body by earlier ones, the oldest first."""
    using = using or rendering()
    raw = [each.raw() if isinstance(each, Talk) else json.dumps(each).encode() for each in (new, *earlier)]
    return explain(using.read(raw[0]), [using.read(each) for each in raw[1:]], BLOCK)


def causes(found: Explanation) -> Found:
    return [(each.cause, each.difference.place, each.offset) for each in found.findings]


def chat(*turns: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **fields}


# ---- planted causes


def planted(seed: int, api: str, names: tuple[str, ...], num_exchanges: int = 5) -> tuple[Talk, Talk, Found]:
    """Return a conversation, the next request with these causes, and what is to be found."""
    writer, tokenizer = Writer(seed), rendering().tokenizer
    talk = writer.talk(api, num_exchanges)
    talk.fields = {"model": "m"}
    changes: list[Planted] = [prepared(writer, talk, name) for name in names]
    new, expected = copy.deepcopy(talk), []
    for each in changes:
        each.change(new)
        alone = copy.deepcopy(talk)
        each.change(alone)
        is_cache = each.cause in OF_CACHES
        offset = 0 if is_cache else num_equal(talk.ids(tokenizer), alone.ids(tokenizer))
        expected.append((each.cause, each.place, offset))
    expected.sort(key=lambda each: each[2])
    return talk, writer.continued(new), expected


def check_planted(talk: Talk, new: Talk, expected: Found) -> Explanation:
    """Explain, and check all names, places and numbers."""
    tokenizer = rendering().tokenizer
    found = explained(new, talk)
    assert causes(found) == expected
    whole, ids = talk.ids(tokenizer), new.ids(tokenizer)
    is_other_cache = any(each[0] in OF_CACHES for each in expected)
    common = 0 if is_other_cache else num_equal(whole, ids)
    assert (found.num_tokens, found.earlier_tokens) == (len(ids), len(whole))
    assert (found.matched_tokens, found.matched_blocks) == (common, common // BLOCK)
    assert found.lost_tokens == len(whole) - common, "nothing else was changed"
    ends = [*(each[2] for each in expected[1:]), len(whole)]
    for finding, (name, _, offset), end in zip(found.findings, expected, ends, strict=True):
        if name != "volatile_line":  # it isn't put back, but moved
            assert finding.saved_tokens == end - offset
        else:
            assert 0 < finding.saved_tokens < end - offset + 1
    return found


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ALL)
def test_a_cause_is_named_with_its_place(name: str, api: str) -> None:
    check_planted(*planted(7, api, (name,)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_causes_in_generated_conversations_are_named(name: str) -> None:
    for seed in range(8):
        check_planted(*planted(1000 + seed, APIS[seed % 4], (name,)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_several_causes_are_named_in_the_order_of_the_prompt(part: int) -> None:
    for seed in range(part * 16, part * 16 + 16):
        writer = Writer(seed)
        groups = (OF_TOOLS, ("system_changed",), VOLATILE, OF_MESSAGES)
        names = [writer.random.choice(group) for group in groups]
        chosen = tuple(writer.random.sample(names, k=writer.random.randint(2, 4)))
        check_planted(*planted(5000 + seed, APIS[seed % 4], chosen, num_exchanges=8))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_HISTORY)
def test_a_changed_history_is_named_beside_tools_and_lines(name: str) -> None:
    for seed in range(12):
        writer = Writer(seed)
        names = (name, writer.random.choice(OF_TOOLS), writer.random.choice(VOLATILE))
        check_planted(*planted(9000 + seed, APIS[seed % 4], names))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_what_only_goes_on_has_no_cause(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        writer, api = Writer(seed), APIS[seed % 4]
        talk = writer.talk(api, writer.random.randint(1, 6))
        kind = seed % 5
        new = talk if kind == 0 else writer.continued(talk)
        if kind == 1:  # asked again from an earlier question on
            talk, new = new, talk
        if kind == 2:  # fields that change no prompt
            new.fields = {"contents": {"labels": {"run": "b"}}}.get(api, {"temperature": 0.5})
        found = explained(new, talk)
        assert (causes(found), found.lost_tokens) == ([], 0) and found.verdict.startswith("Nothing is lost")
        assert found.excerpt is None and found.unrelated == tuple(new.fields if kind == 2 else ())


@pytest.mark.slow
def test_another_conversation_is_named_as_one() -> None:
    for seed in range(60):
        writer, api = Writer(seed), APIS[seed % 4]
        talk = writer.talk(api, 3)
        other = copy.deepcopy(talk)
        other.turns = writer.talk(api, seed % 3).turns
        found = explained(other, talk)
        common = num_equal(talk.ids(rendering().tokenizer), other.ids(rendering().tokenizer))
        assert causes(found) == [("other_conversation", other.place(0), common)]
        assert found.lost_tokens == found.findings[0].saved_tokens == 0


# ---- the service

SERVED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "chat": (
        "/v1/chat/completions",
        {"model": "radixkv-demo", "max_tokens": 1},
        ("usage", "prompt_tokens"),
        ("usage", "prompt_tokens_details", "cached_tokens"),
    ),
    "messages": (
        "/v1/messages",
        {"model": "radixkv-demo", "max_tokens": 1},
        ("usage", "input_tokens"),
        ("usage", "cache_read_input_tokens"),
    ),
    "responses": (
        "/v1/responses",
        {"model": "radixkv-demo", "max_output_tokens": 1},
        ("usage", "input_tokens"),
        ("usage", "input_tokens_details", "cached_tokens"),
    ),
    "contents": (
        "/v1beta/models/radixkv-demo:generateContent",
        {"generationConfig": {"maxOutputTokens": 1}},
        ("usageMetadata", "promptTokenCount"),
        ("usageMetadata", "cachedContentTokenCount"),
    ),
}
"""The path of each API, fields of its requests, and where its answers tell the prompt's tokens and the cached ones."""


def at(document: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


@pytest.mark.slow
def test_a_service_finds_as_many_tokens_as_is_told() -> None:
    with service_in_thread() as live:
        for api, (path, fields, whole, cached) in SERVED.items():
            for name in ("tools_reordered", "volatile_line:date", "messages_truncated", "reasoning_stripped"):
                talk, new, _ = planted(21, api, (name,))
                for each in (talk, new):
                    each.fields = {**fields, "salt": f"{api} {name}"}
                told = explained(new, talk)
                answers = [live.acme.post(path, json=each.body()).json() for each in (talk, new)]
                assert at(answers[1], cached) == told.matched_blocks * BLOCK, (api, name)
                uncached = at(answers[1], whole) + (at(answers[1], cached) if api == "messages" else 0)
                assert uncached == told.num_tokens


# ---- bytes


def test_the_bytes_that_differ_are_told() -> None:
    talk = chat(("system", f"Schön: ä.\n{RULES}"), ("user", "one"))
    new = chat(("system", f"Schön: öü.\n{RULES}"), ("user", "one"))
    (finding,) = explained(new, talk).findings
    assert finding.difference.span is not None
    for body, (start, end), text in (
        (talk, finding.difference.span.earlier, "ä"),
        (new, finding.difference.span.new, "öü"),
    ):
        content = body["messages"][0]["content"].encode()
        assert text.encode()[1:] in content[start:end] or content[start:end].decode() == text
    assert finding.difference.span.new == (8, 12)


# ---- lines that change


def test_a_rule_of_the_service_moves_a_line_and_saves_what_is_told() -> None:
    for kind in VOLATILE:
        talk, new, _ = planted(11, "chat", (kind,))
        found = check_planted(talk, new, planted(11, "chat", (kind,))[2])
        (finding,) = found.findings
        assert len(finding.rules) == 1, kind
        rules = replace(rendering().rules, lines=finding.rules)
        ruled = Rendering(rendering().tokenizer, rules)
        moved = explained(new, talk, using=ruled)
        assert moved.matched_tokens == found.matched_tokens + finding.saved_tokens


def test_a_line_that_changes_each_time_is_volatile_whatever_it_says() -> None:
    bodies = [
        chat(("system", f"Be brief.\nThe mood is {mood}.\n{RULES}"), ("user", "Where is it?"))
        for mood in ("good", "grim", "mixed", "odd")
    ]
    found = explained(bodies[3], *bodies[:3])
    assert found.earlier == 2
    (finding,) = found.findings
    assert (finding.cause, finding.difference.place) == ("volatile_line", "messages[0]")
    assert [(each.kind, each.new) for each in finding.difference.lines] == [("text", "The mood is odd.")]
    alone = explained(bodies[3], bodies[2])
    assert [each.cause for each in alone.findings] == ["system_changed"]
    unchanged = chat(*[(each["role"], each["content"]) for each in bodies[2]["messages"]])
    assert [each.cause for each in explained(bodies[3], bodies[1], bodies[2], unchanged).findings] == [
        "system_changed"
    ], "from one request to the next it stayed"


def test_words_that_change_within_a_long_line_are_moved_alone() -> None:
    talk, new = (chat(("system", f"It is {day}. {RULES}"), ("user", "one")) for day in ("Monday", "Tuesday"))
    (finding,) = explained(new, talk).findings
    assert (
        finding.cause == "volatile_line"
        and not finding.rules
        and finding.change.startswith("Move what changes")
    )
    size = len(rendering().tokenizer.encode(RULES))
    assert size - 10 < finding.saved_tokens <= size + 10


def test_a_line_that_changes_in_history_is_to_be_sent_back_as_it_was() -> None:
    turns = ("user", "one"), ("assistant", "two"), ("user", "three")
    talk, new = (
        chat(("system", RULES), ("user", f"{RULES}\nNow: {at}\n{RULES}"), *turns[1:], *more)
        for at, more in (("10:01", ()), ("10:02", (("assistant", "four"), ("user", "five"))))
    )
    found = explained(new, talk)
    (finding,) = found.findings
    assert finding.cause == "volatile_line" and finding.change.startswith("Send the line back")
    assert finding.saved_tokens == found.lost_tokens > 80


def test_a_date_in_a_tool_is_a_line_that_changes() -> None:
    def body(day: str) -> dict[str, Any]:
        function = {"name": "find", "description": f"Find a page.\nToday is {day}."}
        return chat(("user", RULES), tools=[{"type": "function", "function": function}])

    (finding,) = explained(body("2026-01-02"), body("2026-01-01")).findings
    assert (finding.cause, finding.difference.place) == ("volatile_line", "tools[0]")
    document = finding.document(with_content=True)
    assert document["anthropic"] == document["openai"] == "tools_changed" and "tools" in finding.change


def test_a_line_that_a_rule_drops_is_no_cause() -> None:
    talk, new = (
        chat(("system", f"x-anthropic-billing-header: {number}\n{RULES}"), ("user", "one"))
        for number in (1, 2)
    )
    assert explained(new, talk).findings == ()
    dropped = [
        chat(("system", f"x-anthropic-billing-header: {number}"), ("system", RULES + end), ("user", "one"))
        for number, end in ((1, "A"), (2, "B"))
    ]
    assert [each.difference.place for each in explained(dropped[1], dropped[0]).findings] == ["messages[1]"]


# ---- which earlier request


def test_the_request_is_explained_by_the_earlier_one_of_which_it_finds_the_most() -> None:
    near, far = chat(("system", RULES), ("user", "one")), chat(("system", "Other. " + RULES), ("user", "one"))
    new = chat(("system", RULES), ("user", "one"), ("assistant", "two"), ("user", "three"))
    assert explained(new, far, near).earlier == 1 and explained(new, near, far).earlier == 0
    assert explained(new, near, near, far).earlier == 1, "of equal ones the latest"
    assert explained(new, near, {**near, "salt": "s"}).earlier == 0, "the other one's cache isn't its own"


def test_the_first_request_is_told_what_a_warm_saves() -> None:
    found = explained(chat(("system", RULES), ("user", "A question.")))
    (finding,) = found.findings
    assert (finding.cause, found.earlier, found.lost_tokens) == ("first_request", None, 0)
    others = [chat(("system", RULES), ("user", text)) for text in ("A question.", "Which?")]
    ids = [rendering().read(json.dumps(each).encode()).ids.tolist() for each in others]
    assert finding.saved_tokens == num_equal(*ids) // BLOCK * BLOCK == finding.saved_blocks * BLOCK > 0


def test_prompts_shorter_than_a_block_are_told() -> None:
    assert [each[0] for each in causes(explained(chat(("user", "a")), chat(("user", "a"))))] == [
        "shorter_than_block"
    ]
    found = explained(chat(("user", "a")), chat(("system", RULES), ("user", "a")))
    assert [each[0] for each in causes(found)] == ["system_changed"], "with it the prompt has blocks"


def test_requests_of_several_caches_have_all_their_causes() -> None:
    talk = chat(("system", RULES), ("user", "a"), model="m", salt="s", adapter="x")
    new = {**talk, "model": "n", "salt": "t", "adapter": None}
    found = explained(new, talk)
    assert [each.cause for each in found.findings] == ["model_changed", "adapter_changed", "salt_changed"]
    assert [each.is_joint for each in found.findings] == [True, True, False]
    assert [each.saved_tokens for each in found.findings] == [0, 0, found.earlier_tokens]
    assert found.matched_tokens == 0 and found.lost_tokens == found.earlier_tokens
    assert explained({**talk, "model": None}, talk).findings == (), "null names the model that is served"


@pytest.mark.parametrize("is_new", [True, False])
def test_explicit_mode_without_breakpoints_uses_no_cache(is_new: bool) -> None:
    talk = chat(("system", RULES), ("user", "a"))
    explicit = {**talk, "prompt_cache_options": {"mode": "explicit"}}
    found = explained(*((explicit, talk) if is_new else (talk, explicit)))
    (finding,) = found.findings
    assert (finding.cause, found.matched_tokens) == ("cache_not_used", 0)
    assert "messages[1]" in finding.change and finding.saved_tokens == found.earlier_tokens
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
    marked = {**explicit, "messages": [talk["messages"][0], {"role": "user", "content": [part]}]}
    assert explained(*((marked, talk) if is_new else (talk, marked))).lost_tokens == 0


def test_apis_are_compared_with_each_other() -> None:
    talk = Writer(3).talk("chat", 2)
    talk.turns = [each for each in talk.turns if "call" not in each and each["role"] != "tool"]
    talk.tools = []
    for api in APIS:
        found = explained(replace(copy.deepcopy(talk), api=api), talk)
        assert (causes(found), found.lost_tokens) == ([], 0), api


# ---- plain prompts


def test_plain_prompts_are_compared_line_by_line() -> None:
    talk = {"prompt": f"Date: 2026-01-01\n{RULES}\nQ: one"}
    found = explained({"prompt": f"Date: 2026-01-02\n{RULES}\nQ: one\nA: two"}, talk)
    (finding,) = found.findings
    assert (finding.cause, finding.difference.place) == ("volatile_line", "prompt")
    moved = [f"{RULES}\nQ: one\nDate: 2026-01-01", f"{RULES}\nQ: one\nA: two\nDate: 2026-01-02"]
    ids = [rendering().tokenizer.encode(each) for each in moved]
    assert finding.saved_tokens == num_equal(*ids) - found.matched_tokens > 0
    changed = explained({"prompt": f"{RULES}Q: two."}, {"prompt": f"{RULES}Q: one."})
    assert [each[:2] for each in causes(changed)] == [("prompt_changed", "prompt")]
    assert causes(explained({"prompt": talk["prompt"][:200]}, talk)) == []
    ids = explained({"prompt": [*range(50), 7]}, {"prompt": [*range(40), 8]})
    assert causes(ids) == [("prompt_changed", "prompt[40]", 40)]
    form = explained({"prompt": RULES}, chat(("user", RULES)))
    assert [each.cause for each in form.findings] == ["form_changed"]


def test_a_text_whose_last_tokens_change_is_told() -> None:
    tokenizer = rendering().tokenizer
    text = RULES + "docu"
    found = explained({"prompt": f"{text}ment"}, {"prompt": text})
    ids, others = tokenizer.encode(text), tokenizer.encode(f"{text}ment")
    (finding,) = found.findings
    assert (finding.cause, finding.offset) == ("retokenised", num_equal(ids, others))
    assert found.lost_tokens == len(ids) - finding.offset
    assert finding.saved_tokens == max(len(tokenizer.stable_prefix(text)[0]) - finding.offset, 0)


# ---- templates


def folder(place: Path, template: str) -> str:
    place.mkdir()
    write(place, "gpt2", template)
    return str(place)


@pytest.mark.slow
def test_reasoning_that_a_template_drops_is_told(tmp_path: Path) -> None:
    using = rendering_of(load_tokenizer(folder(tmp_path / "drops", DROPS_EARLIER_THOUGHTS)))
    thought = "<think>" + "I will look for the page. " * 8 + "</think>\n\nI look."
    turns = ("system", RULES), ("user", "Which page?"), ("assistant", thought), ("tool", "page 5")
    talk, new = chat(*turns), chat(*turns, ("assistant", "Page 5."), ("user", "Thanks."))
    found = explained(new, talk, using=using)
    assert [each[:2] for each in causes(found)] == [("reasoning_stripped", "messages[2]")]
    plain = [(role, without_thoughts(text) if role == "assistant" else text) for role, text in turns]
    bodies = chat(*plain), chat(*plain, ("assistant", "Page 5."), ("user", "Thanks."))
    ids = [using.read(json.dumps(each).encode()).ids.tolist() for each in bodies]
    assert found.findings[0].saved_tokens == num_equal(*ids) - found.matched_tokens
    assert found.lost_tokens == found.earlier_tokens - found.matched_tokens


@pytest.mark.slow
def test_a_template_that_writes_messages_differently_later_is_told(tmp_path: Path) -> None:
    template = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if loop.index0 == 1 and messages | length > 2 %}Earlier: {% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    using = rendering_of(load_tokenizer(folder(tmp_path / "rewrites", template)))
    turns = ("system", RULES), ("user", RULES)
    found = explained(chat(*turns, ("assistant", "b"), ("user", "c")), chat(*turns), using=using)
    assert [each[:2] for each in causes(found)] == [("template_rewrites", "messages[1]")]
    assert found.lost_tokens > 50 and found.findings[0].saved_tokens == 0


def test_the_opening_of_an_answer_that_did_not_come_is_not_lost() -> None:
    """The opening is one token. Here it is the last of a block, so it decides whether that is found."""
    tokenizer = rendering().tokenizer
    for number in range(40):
        talk = chat(("system", RULES), ("user", " one" * number))
        new = chat(("system", RULES), ("user", " one" * number), ("user", "Are you there?"))
        if explained(new, talk).earlier_tokens % BLOCK == 0:
            break
    found = explained(new, talk)
    assert found.findings == () and found.matched_tokens == found.earlier_tokens - 1 == len(
        tokenizer.encode_messages(talk["messages"], False)
    )


@pytest.mark.slow
def test_other_templates_and_tokenizers_are_told_apart(tmp_path: Path) -> None:
    raw = json.dumps(chat(("system", RULES), ("user", "a"))).encode()
    one = rendering_of(load_tokenizer(folder(tmp_path / "one", CHATML)))
    ended = folder(tmp_path / "two", CHATML.replace("<|im_end|>", "<|end|>"))
    two = rendering_of(load_tokenizer(ended))
    for new, earlier, cause in ((two, one, "template_changed"), (rendering(), one, "tokenizer_changed")):
        found = explain(new.read(raw), [earlier.read(raw)], BLOCK)
        assert causes(found) == [(cause, "", 0)] and found.matched_tokens == 0
        assert found.findings[0].saved_tokens == new.read(raw).num_tokens


@pytest.mark.slow
def test_parts_and_texts_that_a_template_writes_alike_are_no_difference(tmp_path: Path) -> None:
    using = rendering_of(load_tokenizer(folder(tmp_path / "parts", CHATML)))
    parts = [{"type": "text", "text": RULES[:100]}, {"type": "text", "text": RULES[100:]}]
    talk, new = chat(("user", RULES)), chat(("user", parts), ("assistant", "b"), ("user", "c"))
    assert causes(explained(new, talk, using=using)) == causes(explained(new, talk)) == []


# ---- hostile


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "line 1"),
        (b"{", "line 1 column 1"),
        (b'{"prompt": "\xff"}', "line 1 column"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 1 column"),
        (b"[" * 100_000, "brackets"),
        (b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", "recursion limit"),
        (b"[" + b"1," * 3_000_000 + b"1]", "values"),
        (b"[1]", "one JSON object"),
        (b'{"foo": 1}', "'foo'"),
        (b'{"foo\\u001b[2J": 1}', "foo"),
        (b'{"messages": [], "input": "x"}', "input, messages"),
        (b'{"messages": []}', "messages"),
        (b'{"prompt": ["a", "b"]}', "one prompt"),
        (b'{"prompt": "a", "colour": 1}', "unknown field colour"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content[0]"),
        (b'{"contents": [{"parts": [{"text": "x"}]}], "cachedContent": "c"}', "cachedContent"),
        (b'{"input": "x", "previous_response_id": "r"}', "previous_response_id"),
    ],
)
def test_bodies_that_cannot_be_compared_are_refused_by_name(raw: bytes, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendering().read(raw)
    assert words in str(caught.value)


def mutated(value: Any, chance: random.Random) -> Any:
    """Return a JSON value with a few of its parts replaced, left out, doubled or exchanged."""
    odd = (
        None,
        "",
        "x\n\nToday 2026-01-01",
        [],
        {},
        0,
        True,
        ["a"],
        {"type": "text", "text": "<think>"},
        [{}],
    )
    if chance.random() < 0.008:
        return copy.deepcopy(chance.choice(odd))
    if isinstance(value, dict):
        items = [(name, mutated(each, chance)) for name, each in value.items() if chance.random() > 0.004]
        return dict(chance.sample(items, k=len(items)) if chance.random() < 0.05 else items)
    if isinstance(value, list):
        found = [mutated(each, chance) for each in value if chance.random() > 0.02]
        return [*found, copy.deepcopy(chance.choice(found))] if found and chance.random() < 0.05 else found
    return value


@pytest.mark.slow
def test_any_two_bodies_are_explained_or_refused() -> None:
    num_explained = 0
    for seed in range(300):
        chance, writer = random.Random(seed), Writer(seed % 40)
        talk = writer.talk(APIS[seed % 4], 3)
        if seed % 2:
            talk.turns[1]["text"] = f"<think>{talk.turns[1]['text']}</think>{talk.turns[1]['text']}"
        bodies = [mutated(talk.body(), chance) for _ in range(3)]
        read = []
        for each in bodies:
            with suppress(ApiError):
                read.append(rendering().read(json.dumps(each).encode()))
        if read:
            found = explain(read[0], read[1:], BLOCK)
            num_explained += found.earlier is not None
            assert (
                0 <= found.matched_tokens <= found.matched_tokens + found.lost_tokens <= found.earlier_tokens
            )
            assert all(each.saved_tokens >= 0 for each in found.findings)
            assert "template_rewrites" not in {each.cause for each in found.findings}, "this model has none"
            json.dumps(found.document(with_content=True))
    assert num_explained > 100


def test_an_api_that_is_told_is_used() -> None:
    raw = json.dumps(chat(("user", RULES), max_tokens=1)).encode()
    assert rendering().read(raw).api == "chat" and rendering().read(raw, "messages").api == "messages"
    with pytest.raises(ApiError, match="messages"):
        rendering().read(raw, "responses")


@pytest.mark.slow
def test_many_differences_cost_a_bounded_number_of_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [("user" if at % 2 == 0 else "assistant", f"{at} {RULES[:40]}") for at in range(401)]
    others = [(role, text + ("!" if at % 3 else "")) for at, (role, text) in enumerate(turns)]
    calls = []
    original = Rendering.ids
    monkeypatch.setattr(Rendering, "ids", lambda self, content: calls.append(1) or original(self, content))
    found = explained(chat(*others), chat(*turns))
    assert len(found.findings) == MAX_CAUSES and found.num_more > 200
    assert len(calls) <= MAX_RENDERINGS
    parts = [(role, [{"type": "text", "text": text}]) for role, text in turns]
    assert explained(chat(*parts), chat(*turns)).findings == ()


def test_a_text_of_which_all_lines_change_was_changed() -> None:
    lines = "\n".join(f"{at} was at 10:00:{at % 60:02}" for at in range(3_000))
    found = explained(
        chat(("system", lines.replace("10:", "11:")), ("user", "one")),
        chat(("system", lines), ("user", "one")),
    )
    assert [each.cause for each in found.findings] == ["system_changed"]


def test_lists_that_differ_everywhere_are_aligned_in_linear_time() -> None:
    one, other = (["a", "b"] * 20_000, ["b", "c"] * 20_000)
    assert [each[0] for each in aligned(one, other)] == ["delete", "equal", "insert"]
    cut = [str(at) for at in range(10_000)]
    assert aligned(cut, [*cut[700:], "x"]) == [
        ("delete", 0, 700, 0, 0),
        ("equal", 700, 10_000, 0, 9300),
        ("insert", 10_000, 10_000, 9300, 9301),
    ]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>a</think>\n\nb", "b"),
        ("a</think>b", "b"),
        ("x <thinking>a</thinking> y <thinking>b</thinking> z", "x  y  z"),
        ("<think>a", "<think>a"),
        ("plain", "plain"),
        ("<think>" * 100_000, "<think>" * 100_000),
        ("</think>" * 50_000, "</think>" * 49_999),
    ],
)
def test_reasoning_is_left_out(text: str, left: str) -> None:
    assert without_thoughts(text) == left


# ---- what is told


def test_nothing_is_quoted_without_content() -> None:
    secret = "Zanzibar"
    talk, new = (
        chat(("system", f"{secret} {day}\n{RULES}"), ("user", f"{secret} {day}"), tools=[
            {"type": "function", "function": {"name": name, "description": secret}} for name in names])
        for day, names in (("2026-01-01", (secret, "f")), ("2026-01-02", ("f", secret, secret + "2")))
    )  # fmt: skip
    found = explained(new, talk)
    assert {each.cause for each in found.findings} >= {"volatile_line", "tools_reordered", "tools_added"}
    assert secret in json.dumps(found.document(with_content=True))
    assert secret not in json.dumps(found.document(with_content=False))


def test_the_document_has_stable_names() -> None:
    document = explained(*reversed(planted(7, "chat", ("tools_reordered",))[:2])).document(with_content=True)
    assert list(document) == [
        "verdict", "tokens", "earlier", "earlier_tokens", "block_size", "matched_tokens", "matched_blocks",
        "lost_tokens", "lost_blocks", "causes", "more_differences", "unrelated_fields", "excerpt",
    ]  # fmt: skip
    (cause,) = document["causes"]
    assert list(cause) == [
        "cause", "anthropic", "openai", "part", "place", "earlier_place", "bytes", "offset", "num", "num_new", "said",
        "change", "saved_tokens", "saved_blocks", "is_joint", "lines", "names", "rules",
    ]  # fmt: skip


def test_the_providers_names_are_theirs() -> None:
    reasons = {
        "model_changed", "system_changed", "tools_changed", "messages_changed", "previous_message_not_found",
        "unavailable", None,
    }  # fmt: skip
    assert {each.anthropic for each in WORDS.values()} <= reasons
    known = {"model_changed", "tools_changed", "context_compacted", "input_changed", None}
    assert {each.openai for each in WORDS.values()} <= known
