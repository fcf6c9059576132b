"""Conversations that real agents and SDKs have had, replayed against a service, request by request.

``README.md`` says what a recording is. What the service refuses today is listed in ``refused.json``, and expected to
fail: whoever mends it takes its line out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from radixkv.service.schemas import ignored
from tests.agents import recordings
from tests.agents.answers import Answer
from tests.agents.recordings import FEATURES, Request, features, load, num_spoken
from tests.agents.replaying import Replayed, read, read_other, read_refusal, replayed, scripted_service, sent
from tests.agents.sent_texts import bound_names, choosing, names_in, texts
from tests.service.running import Running

BLOCK = 16
NAMES = recordings.names()
REFUSED = recordings.refused()
IN_QUICK = ("openai-chat", "openai-responses", "anthropic", "google-genai")
"""Short conversations, one of each API, that also run in `make quick`."""

CHANGING: dict[str, dict[int, str]] = {
    "claude-code": {5: "a text of the system follows the first question, so it isn't shared"},
    "gemini-cli": {3: "a session that goes on in another process repeats the responses of its functions"},
}
"""Turns that don't begin as they could, by the numbers of their requests, and what the client has changed there."""

DROPPED = "x-anthropic-billing-header:"
"""The beginning of Claude Code's first system block. It ends with digits that depend on the first question, and isn't
meant for the model: the service's default rule for prompts drops it."""

HINTS = {
    "chat": ignored.CHAT,
    "responses": ignored.RESPONSES,
    "messages": ignored.MESSAGES,
    "contents": ignored.CONTENTS,
}
"""Fields that the service says it ignores."""
CACHED = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
READ = {
    "chat": ("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    "responses": ("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "include"),
    "messages": ("messages", "system", "tools", "tool_choice", "output_config"),
    "contents": ("contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "cachedContent"),
}
CHOSEN = {
    "chat": ("model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed"),
    "responses": ("model", "max_output_tokens", "temperature", "top_p"),
    "messages": ("model", "max_tokens", "temperature", "top_p", "top_k", "stop_sequences"),
    "contents": (),
}
TYPES = ("ARRAY", "BOOLEAN", "INTEGER", "NUMBER", "OBJECT", "STRING")
"""Google's names of types in schemas. The model may read them as JSON schemas have them."""
FORM = ("stream", "stream_options", "cache_control", "model")
"""Fields of how an answer is sent, and of what stays in the cache."""


def is_refused(name: str, index: int) -> str | None:
    """Return why the service refuses a request today; None if it doesn't."""
    found = [each for each in REFUSED.get(name, ()) if index in each["requests"]]
    return "; ".join(f"{each['field']}: {each['reason']}" for each in found) or None


def _marks(name: str, why: str | None) -> list[pytest.MarkDecorator]:
    slow = [] if name in IN_QUICK else [pytest.mark.slow]
    return slow if why is None else [*slow, pytest.mark.xfail(strict=True, reason=why)]


def _each(requests: Sequence[tuple[str, int]]) -> list[Any]:
    return [
        pytest.param(name, index, id=f"{name}-{index}", marks=_marks(name, is_refused(name, index)))
        for name, index in requests
    ]


ALL = [(name, index) for name in NAMES for index in range(len(load(name).requests))]
OF_THE_MODEL = [(name, index) for name, index in ALL if load(name).requests[index].answer is not None]


def _conversations(num_turns: int | None = None) -> list[Any]:
    """Return the recordings as parameters; those are expected to fail of whose first turns one is refused."""
    found = []
    for name in NAMES:
        turns = load(name).turns[:num_turns]
        why = next((reason for index in turns if (reason := is_refused(name, index))), None)
        found.append(pytest.param(name, id=name, marks=_marks(name, why)))
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose model says what it is told to."""
    with scripted_service(tmp_path_factory.mktemp("site")) as running:
        yield running


@pytest.fixture(scope="module")
def replays(live: Running) -> Any:
    """A function that replays a recording, once."""
    return cache(lambda name: replayed(live, load(name)))


def answered(each: Replayed) -> Replayed:
    """Return a replayed request, if it was answered with the status that it had when it was recorded."""
    assert each.response.status_code == each.request.status, each.response.text
    return each


@pytest.mark.parametrize(("name", "index"), _each(ALL))
def test_a_request_is_answered_as_the_client_reads_it(replays: Any, name: str, index: int) -> None:
    each = answered(replays(name)[index])
    if each.request.status != 200:
        read_refusal(each.response)
        return
    if each.request.answer is None:
        read_other(each.request, each.response)
        return
    assert each.asked is not None
    found = read(each.request, each.response)
    assert found.is_answer(each.request.answer)
    if "usage with cached tokens" in features(each.request):
        assert found.cached == each.asked.cached


@pytest.mark.parametrize("name", _conversations())
def test_a_turn_reads_from_the_cache_what_the_turns_before_it_wrote(replays: Any, name: str) -> None:
    """At least the whole blocks of the longest prefix that it shares with an earlier prompt and its answer.

    That is the whole turn before it, with its answer. Of a new conversation it is all but the question.
    """
    numbers, before, kept = load(name).turns, list[list[int]](), {}
    assert len(numbers) >= 3
    for number in numbers:
        turn = answered(replays(name)[number])
        assert turn.asked is not None
        prompt = turn.asked.prompt
        if before:
            shared = max(num_common(prompt, each) for each in before)
            assert turn.asked.cached >= min(shared, len(prompt) - 1) // BLOCK * BLOCK
            is_new = not num_spoken(turn.request.api, turn.request.body)
            kept[number] = shared >= (0.9 * len(prompt) if is_new else len(before[-1]))
        before.append([*prompt, *turn.asked.answer])
    changed = {number for number, is_kept in kept.items() if not is_kept}
    assert changed == {*CHANGING.get(name, ())}


@pytest.mark.slow
def test_two_conversations_of_claude_code_share_all_before_their_questions(
    replays: Any, live: Running
) -> None:
    """Without the rule for its first line they would share 27 of 17,000 tokens."""
    first, again = (answered(replays("claude-code")[number]).asked for number in (0, 5))
    assert first is not None and again is not None
    assert live.service.intake.rule_uses["claude-code-billing"] > 0
    shared = num_common(first.prompt, again.prompt)
    rest = live.service.tokenizer.decode(first.prompt[shared:])
    assert rest.startswith("Which page of notes.txt") and shared > 0.8 * len(first.prompt)
    assert again.cached == shared // BLOCK * BLOCK


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


@pytest.mark.parametrize(("name", "index"), _each(OF_THE_MODEL))
def test_the_model_reads_every_text_and_chooses_as_asked(
    replays: Any, live: Running, name: str, index: int
) -> None:
    each = answered(replays(name)[index])
    assert each.asked is not None
    prompt = live.service.tokenizer.decode(each.asked.prompt)
    assert DROPPED not in prompt
    missing = {text for text in texts(each.request) if text not in prompt and not text.startswith(DROPPED)}
    assert not {text for text in missing if text not in TYPES or text.lower() not in prompt}
    bound = features(each.request) & {"structured output", "forced calls"}
    assert (each.asked.form is not None) == bool(bound)
    assert not {*bound_names(each.request)} - {*names_in(each.asked.form)}
    wanted, options = choosing(each.request), each.asked.options
    assert each.asked.max_new_tokens == wanted.pop("most", each.asked.max_new_tokens)
    if wanted.get("temperature") == 0:
        assert not options.get("do_sample")
    else:
        for field, value in wanted.items():
            assert options[field] == (None if (field, value) == ("top_p", 1) else value)


COUNTS = {"/count_tokens": "", "/input_tokens": "", ":countTokens": ":generateContent"}
"""How the paths that count tokens end, and those that answer the same body."""


@pytest.mark.parametrize(
    ("name", "index"),
    _each([each for each in ALL if "counting tokens" in features(load(each[0]).requests[each[1]])]),
)
def test_a_count_is_the_length_of_the_prompt(replays: Any, live: Running, name: str, index: int) -> None:
    each = answered(replays(name)[index])
    counted, path = each.response.json(), each.request.path
    for ending, other in COUNTS.items():
        path = path.replace(ending, other)
    body = {**each.request.body, **({"max_tokens": 8} if path == "/v1/messages" else {})}
    asked = answered(sent(live, Request("POST", path, each.request.headers, body, Answer("x")))).asked
    assert asked is not None
    assert counted.get("input_tokens", counted.get("totalTokens")) == len(asked.prompt)


@pytest.mark.parametrize("name", _conversations(1))
def test_hints_change_neither_prompt_nor_choice(replays: Any, live: Running, name: str) -> None:
    """Fields of the first turn that are hints, and every other field is one whose effect the tests above see."""
    first = answered(replays(name)[load(name).turns[0]])
    api = first.request.api
    hints = {*HINTS[api], *CACHED}
    known = {*hints, *READ[api], *CHOSEN[api], *FORM}
    assert {*first.request.body} - known == set()
    without = {field: value for field, value in first.request.body.items() if field not in hints}
    headers = {
        field: value
        for field, value in first.request.headers.items()
        if field in ("content-type", "authorization", "x-api-key", "x-goog-api-key")
    }
    bare = Request(first.request.method, first.request.path, headers, without, first.request.answer)
    again = answered(sent(live, bare)).asked
    assert first.asked is not None and again is not None
    assert again.prompt == first.asked.prompt and again.options == first.asked.options
    assert again.max_new_tokens == first.asked.max_new_tokens


def test_recordings_use_what_the_table_of_clients_shows() -> None:
    used = {feature for name in NAMES for request in load(name).requests for feature in features(request)}
    assert used == {*FEATURES}


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_has_turns_with_tools_and_nothing_of_its_machine(name: str) -> None:
    recording = load(name)
    assert len(recording.turns) >= 5
    text = json.dumps([(each.path, each.headers, each.body) for each in recording.requests])
    assert "radixkv-agents" not in text and "sk-recorded" not in text


def test_what_is_refused_is_in_a_recording() -> None:
    assert all(
        name in NAMES and 0 <= index < len(load(name).requests)
        for name, found in REFUSED.items()
        for each in found
        for index in each["requests"]
    )
