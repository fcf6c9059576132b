"""The ids of a prompt become a key once between HTTP and the cache. Nothing converts or checks them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixkv.index import tokens
from tests.service.running import Running

pytestmark = pytest.mark.pure

NUM_TOKENS = 64
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/lookup", {}),
    ("/v1/warm", {}),
    ("/v1/warm", {"replicas": "all"}),
    ("/v1/pins", {"ttl_s": 5}),
    ("/v1/pins", {"ttl_s": 5, "replicas": "all", "wait": True}),
    ("/v1/route", {}),
    ("/v1/completions", {"max_tokens": 3}),
    ("/v1/completions", {"max_tokens": 3, "stream": True}),
    ("/v1/completions", {"max_tokens": 3, "use_beam_search": True, "n": 2, "temperature": 0}),
]


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The conversions and range checks of at least as many ids as the prompt has, in call order."""
    found: list[tuple[str, int]] = []

    def noting(name: str, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def note(ids: Any) -> Any:
            if len(ids) >= NUM_TOKENS:
                found.append((name, len(ids)))
            return original(ids)

        return note

    for name in ("_from_array", "_from_items", "_from_numpy", "_from_torch", "_narrowed", "_check_range"):
        monkeypatch.setattr(tokens, name, noting(name, getattr(tokens, name)))
    return found


@pytest.mark.parametrize(("path", "fields"), BODIES)
@pytest.mark.parametrize("place", ["loop", "process"])
def test_ids_become_a_key_once(
    live: Running,
    salt: str,
    converted: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    place: str,
) -> None:
    """The first request computes, the second one hits.

    If a reading process parses the body, the process makes the key.
    """
    wait_s = 0.0 if place == "loop" else 1.0
    monkeypatch.setattr(live.service.intake._loop_time, "wait_s", lambda lane: wait_s)
    ids = list(range(100, 100 + NUM_TOKENS))
    body = {"prompt" if path == "/v1/completions" else "token_ids": ids, "salt": salt, **fields}
    if path == "/v1/pins":
        live.acme.post("/v1/warm", json={"token_ids": ids, "salt": salt})
    converted.clear()
    for _ in range(2):
        answer = live.acme.post(path, json=body)
        assert answer.is_success, answer.text
    assert converted == ([("_from_items", NUM_TOKENS)] * 2 if place == "loop" else [])


def test_conversions_are_counted(converted: list[tuple[str, int]]) -> None:
    """A positive control: every form of ids except a key is converted."""
    ids = np.arange(NUM_TOKENS)
    key = tokens.encode(ids)
    assert [name for name, _ in converted] == ["_from_numpy", "_narrowed"]
    converted.clear()
    assert tokens.encode(key) is key and not converted
