"""``/tokenize`` and ``/detokenize``: the ids are those of completions and chats. There and back is the same text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.running import Running


def test_a_text_has_the_ids_of_a_completion_and_comes_back(live: Running, text: str, salt: str) -> None:
    found = live.acme.post("/tokenize", json={"prompt": text}).json()
    few = {"prompt": text, "max_tokens": 1, "salt": salt}
    usage = live.acme.post("/v1/completions", json=few).json()["usage"]
    assert found["count"] == len(found["tokens"]) == usage["prompt_tokens"]
    back = live.acme.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": text}
    assert found["max_model_len"] == live.service.engine.limits.max_model_len


@pytest.mark.parametrize("add", [True, False])
def test_messages_have_the_ids_of_a_chat(live: Running, text: str, salt: str, add: bool) -> None:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Which page?"}]
    found = live.acme.post("/tokenize", json={"messages": messages, "add_generation_prompt": add}).json()
    few = {"messages": messages, "max_tokens": 1, "salt": salt}
    usage = live.acme.post("/v1/chat/completions", json=few).json()["usage"]
    assert found["count"] == usage["prompt_tokens"] - (not add)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt, messages"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt, messages"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [8000]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 20_000}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_what_has_no_ids_is_refused(live: Running, path: str, body: dict[str, Any], field: str) -> None:
    answer = live.acme.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field), answer.text


def test_other_models_and_callers_are_refused(live: Running) -> None:
    assert live.acme.post("/tokenize", json={"prompt": "x", "model": "another"}).status_code == 404
    assert live.nobody.post("/tokenize", json={"prompt": "x"}).status_code == 401
    assert live.operator.post("/detokenize", json={"tokens": [1]}).status_code == 403
