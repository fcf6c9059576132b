"""A long answer is made outside of the event loop, so other requests do not wait for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from radixkv.engines import Generation
from radixkv.engines.steps import Steps
from radixkv.service.endpoints import completions
from radixkv.service.fitting import Room
from radixkv.service.problems import Json, LongJson
from tests.service.running import Running

NUM_ROWS, NUM_TOKENS = 4, 6_000


def is_on_a_loop() -> bool:
    """Whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def test_a_big_answer_does_not_block_the_event_loop(
    live: Running, salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test makes up the model's tokens: the demo model would take minutes for this many."""
    word = live.service.tokenizer.encode("word word")[-1]

    def generate(
        ns: Any, prompts: list[bytes], max_new_tokens: int, *_: Any, **options: Any
    ) -> Steps[Generation]:
        yield from ()
        rows = [[word] * max_new_tokens] * options["num_return_sequences"]
        return Generation(rows, [2], [0], ["length"] * len(rows), 0.0, 0.0)

    monkeypatch.setattr(live.service.engine, "generating", generate)
    monkeypatch.setattr(completions, "_check_room", lambda *_: None)
    monkeypatch.setattr(Room, "require", lambda *_: None)
    body = {"prompt": "one", "n": NUM_ROWS, "max_tokens": NUM_TOKENS, "temperature": 1.0, "salt": salt}
    made_on_loop: list[bool] = []

    class Watched(LongJson):
        def render(self, content: Any) -> bytes:
            made_on_loop.append(is_on_a_loop())
            return super().render(content)

    monkeypatch.setattr(completions, "LongJson", Watched)
    answer = live.acme.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [each["index"] for each in answer.json()["choices"]] == list(range(NUM_ROWS))
    assert {len(each["text"]) for each in answer.json()["choices"]} == {NUM_TOKENS * len(" word")}
    assert answer.headers["content-type"] == "application/json" and answer.content.endswith(b"}\n")
    assert made_on_loop == [False]


@pytest.mark.parametrize(
    "content", [{"a": [1, 2.5, None, True, 'é\u0001"\n漢'], "b": {}}, [], "text", {"nested": [{"x": []}]}]
)
def test_a_long_answer_has_the_same_bytes(content: Any) -> None:
    assert LongJson(content).body == Json(content).body
