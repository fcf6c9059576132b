"""Completions: the format of OpenAI's API, the engine's tokens, streams, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from radixkv import audit
from radixkv.engines.steps import Steps
from radixkv.service.endpoints.completions import EventStream
from radixkv.service.engine_loop import EngineLoop, Work
from tests.service.running import Running, client, model_held, sent
from tests.waiting import eventually


def complete(live: Running, **body: Any) -> dict[str, Any]:
    answer = live.acme.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(live: Running, **body: Any) -> list[Any]:
    """The parsed events of a stream, including ``[DONE]``."""
    with live.acme.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def joined(stream: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in stream:
        for choice in event["choices"] if event != "[DONE]" else ():
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_the_format_and_the_defaults_are_openais(live: Running, salt: str) -> None:
    reply = complete(live, prompt="Once upon a time", salt=salt)
    assert set(reply) == {"id", "object", "created", "model", "choices", "usage", "timings"}
    assert reply["id"].startswith("cmpl-") and reply["object"] == "text_completion"
    assert reply["model"] == "radixkv-demo" and isinstance(reply["created"], int)
    (choice,) = reply["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert (choice["index"], choice["logprobs"]) == (0, None) and choice["finish_reason"] in (
        "length",
        "stop",
    )
    usage = reply["usage"]
    assert usage["completion_tokens"] <= 16 and usage["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "cache_write_tokens": 0,
    }
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    timings = reply["timings"]
    assert 0 <= timings["queued_s"] <= timings["time_to_first_token_s"] <= timings["total_s"]


def test_greedy_text_is_that_of_the_engines_tokens(live: Running, salt: str, text: str) -> None:
    tokenizer, engine = live.service.tokenizer, live.service.engine
    prompt = tokenizer.encode(text)
    made = engine.generate(
        live.service.namespace("globex", salt, None), prompt, 12, eos_token_id=-1
    ).token_ids[0]
    reply = complete(live, prompt=text, salt=salt, max_tokens=12, temperature=0, ignore_eos=True)
    whole = tokenizer.decode([*prompt, *made])
    assert text + reply["choices"][0]["text"] == whole
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (len(prompt), 12)
    by_ids = complete(live, prompt=prompt, salt=salt, max_tokens=12, temperature=0, ignore_eos=True)
    assert by_ids["choices"] == reply["choices"]


def test_cold_and_warm_completions_are_equal(live: Running, salt: str, text: str) -> None:
    warmed = live.acme.post("/v1/warm", json={"prompt": text, "salt": salt}).json()
    body = {"prompt": text, "max_tokens": 8, "temperature": 0}
    warm, cold = complete(live, **body, salt=salt), complete(live, **body, salt=salt + "-cold")
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == warmed["tokens"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_seed_repeats_and_another_differs(live: Running, salt: str) -> None:
    body = {"prompt": "Roll the dice:", "salt": salt, "max_tokens": 12, "n": 3, "ignore_eos": True}
    first, again, other = (complete(live, **body, seed=seed)["choices"] for seed in (7, 7, 8))
    assert first == again != other
    assert [choice["index"] for choice in first] == [0, 1, 2]
    assert len({choice["text"] for choice in first}) == 3


def test_greedy_choices_are_equal_and_counted(live: Running, salt: str) -> None:
    reply = complete(live, prompt="Same", salt=salt, n=3, max_tokens=4, temperature=0, ignore_eos=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in reply["choices"]}) == 1
    assert reply["usage"]["completion_tokens"] == 12


def test_a_batch_equals_its_prompts_one_by_one(live: Running, salt: str) -> None:
    prompts = ["The first prompt", "And a second, longer one than the first"]
    body = {"salt": salt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    batch = complete(live, prompt=prompts, **body)
    single = [complete(live, prompt=prompt, **body) for prompt in prompts]
    assert [choice["text"] for choice in batch["choices"]] == [each["choices"][0]["text"] for each in single]
    ids = [live.service.tokenizer.encode(prompt) for prompt in prompts]
    assert complete(live, prompt=ids, **body)["choices"] == batch["choices"]
    assert batch["usage"]["prompt_tokens"] == sum(len(each) for each in ids)


def test_beams_are_the_engines_best_first(live: Running, salt: str) -> None:
    prompt = live.service.tokenizer.encode("Search with beams")
    namespace = live.service.namespace("globex", salt, None)
    made = live.service.engine.generate(namespace, prompt, 6, num_beams=4, num_return_sequences=2)
    reply = complete(live, prompt=prompt, salt=salt, max_tokens=6, use_beam_search=True, n=2, best_of=4)
    decode = live.service.tokenizer.decode
    assert [choice["text"] for choice in reply["choices"]] == [
        decode([*prompt, *ids])[len(decode(prompt)) :] for ids in made.token_ids
    ]


@pytest.mark.slow
def test_beams_that_are_equal_up_to_their_stop_string_are_one_answer(live: Running, salt: str) -> None:
    body = {
        "prompt": ["Search with beams", "Another"],
        "salt": salt,
        "max_tokens": 8,
        "use_beam_search": True,
    }
    whole = [choice["text"] for choice in complete(live, n=4, **body)["choices"]]
    characters = sorted({character for text in whole for character in text})
    twins = 0
    for stop in characters:
        reply = complete(live, n=2, best_of=4, stop=stop, **body)
        expected = {}
        for prompt, texts in enumerate((whole[:4], whole[4:])):
            cut = list(dict.fromkeys(text.partition(stop)[0] for text in texts))
            twins += 4 - len(cut)
            expected |= {2 * prompt + choice: text for choice, text in enumerate(cut[:2])}
        assert {choice["index"]: choice["text"] for choice in reply["choices"]} == expected
        assert [choice["index"] for choice in reply["choices"]] == sorted(expected)
        assert reply["usage"]["completion_tokens"] <= 8 * len(expected)
    assert twins > 0


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"seed": 3, "n": 2}, {"seed": 4, "echo": True}, {"seed": 5, "stop": [" a", "e"]}],
)
def test_the_pieces_of_a_stream_join_to_the_whole_completion(
    live: Running, salt: str, options: dict[str, Any]
) -> None:
    body = {"prompt": "Tell me more about", "salt": salt, "max_tokens": 24, **options}
    whole = complete(live, **body)
    stream = events(live, **body)
    assert stream[-1] == "[DONE]" and joined(stream) == {
        each["index"]: each["text"] for each in whole["choices"]
    }
    chunks = stream[:-1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    reasons = {each["index"]: each["finish_reason"] for each in chunks[-1]["choices"]}
    assert reasons == {each["index"]: each["finish_reason"] for each in whole["choices"]}
    assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])
    assert all("usage" not in chunk for chunk in chunks) and set(chunks[-1]["timings"]) == set(
        whole["timings"]
    )


def test_a_stream_ends_with_usage_if_asked(live: Running, salt: str) -> None:
    body = {"prompt": "Count", "salt": salt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    stream = events(live, **body, stream_options={"include_usage": True})
    last = stream[-2]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3 and "timings" in last
    assert all(chunk["usage"] is None for chunk in stream[:-2])


def test_a_stop_string_ends_the_text_before_it(live: Running, salt: str) -> None:
    body = {"prompt": "Stop somewhere", "salt": salt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    free = complete(live, **body)["choices"][0]["text"]
    stop = free[len(free) // 2 :][:3]
    stopped = complete(live, **body, stop=stop)
    (choice,) = stopped["choices"]
    assert choice["text"] == free[: free.index(stop)] and choice["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 12


def test_echo_puts_the_prompt_in_front(live: Running, salt: str) -> None:
    body = {"prompt": "Mirror, mirror", "salt": salt, "max_tokens": 3, "temperature": 0}
    plain, echoed = complete(live, **body), complete(live, **body, echo=True)
    assert echoed["choices"][0]["text"] == "Mirror, mirror" + plain["choices"][0]["text"]
    by_ids = {**body, "prompt": live.service.tokenizer.encode("Mirror, mirror")}
    assert complete(live, **by_ids, echo=True)["choices"] == echoed["choices"]


def test_null_is_the_default_and_user_changes_nothing(live: Running, salt: str) -> None:
    body = {"prompt": "Nothing", "salt": salt, "temperature": 0}
    nulls = dict.fromkeys(
        ("n", "max_tokens", "top_p", "seed", "stop", "logprobs", "suffix", "stream", "best_of", "adapter")
    )
    assert (
        complete(live, **body)["choices"]
        == complete(live, **body, **nulls, user="u", model="radixkv-demo")["choices"]
    )


def test_the_next_turn_finds_the_last_one(live: Running, salt: str, text: str) -> None:
    prompt = live.service.tokenizer.encode(text)
    complete(live, prompt=prompt, salt=salt, max_tokens=40, temperature=0, ignore_eos=True)
    found = live.acme.post("/v1/lookup", json={"token_ids": prompt, "salt": salt}).json()["matched_tokens"]
    assert found == len(prompt) // 16 * 16


def test_a_stream_ends_when_its_client_hangs_up(live: Running, salt: str) -> None:
    body = {"prompt": "Go on for ever", "salt": salt, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with (
        client(live.url, "demo-acme") as leaving,
        leaving.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert live.service.cache.stats().num_sequences > 0
    eventually(lambda: live.service.engine_loop.num_unfinished == 0)
    assert live.service.cache.stats().num_sequences == 0
    audit.check(live.service.cache)


def test_a_completion_ends_when_its_client_hangs_up(live: Running, salt: str) -> None:
    body = {"prompt": "Go on for ever", "salt": salt, "max_tokens": 8000, "ignore_eos": True}
    with sent(live, "acme", "/v1/completions", body):
        eventually(lambda: live.service.cache.stats().num_sequences > 0, "it runs")
    eventually(lambda: live.service.engine_loop.num_unfinished == 0)
    assert live.service.cache.stats().num_sequences == 0


def num_wanted(live: Running) -> int:
    """The number of work items that run, or wait and are not cancelled."""
    return sum(not work.future.cancelled() for work in list(live.service.engine_loop._unfinished))


def test_a_waiting_completion_never_starts_after_its_client_hangs_up(live: Running, salt: str) -> None:
    with model_held(live.service):
        for stream in (False, True):
            body = {"prompt": "Never", "salt": salt, "stream": stream}
            with sent(live, "acme", "/v1/completions", body):
                eventually(lambda: num_wanted(live) == 2, "it waits")
            eventually(lambda: num_wanted(live) == 1, "it is given up")
    eventually(lambda: live.service.engine_loop.num_unfinished == 0)
    assert live.acme.post("/v1/lookup", json={"prompt": "Never", "salt": salt}).json()["matched_tokens"] == 0


def test_a_stream_that_never_began_is_cancelled_too() -> None:
    def never(_: Work[None]) -> Steps[None]:
        yield None

    work = Work(EngineLoop(), "acme", never)

    async def events() -> AsyncIterator[bytes]:
        yield b"data: never\n\n"

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        await asyncio.Event().wait()

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(EventStream(events(), work, {})(scope, receive, send))
    assert work.stopping


def test_an_error_before_the_first_token_sets_the_status_of_a_stream(live: Running, salt: str) -> None:
    cache = live.service.cache
    held = cache.open(
        live.service.namespace("globex", salt, None), [5] * (16 * (cache.config.num_blocks - 4))
    )
    try:
        body = {"prompt": [6] * 160, "salt": salt, "stream": True}
        answer = live.acme.post("/v1/completions", json=body)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_capacity"
    finally:
        held.release()
