"""The service over an engine that it doesn't know: a package brings it, and it can do little."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from radixkv.engines import Engine, EngineCache, find_engine
from radixkv.errors import ConfigError
from radixkv.index.cache import PrefixCache
from tests.service.running import Running, service_in_thread
from tests.service.toy_engine import ToyEngine

ENTRY = "[radixkv.engines]\ntoy = tests.service.toy_engine:load_engine\nbroken = tests.service.nowhere:load_engine\n"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose engine comes from an installed package."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "toy_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    sys.path.insert(0, str(folder))
    try:
        with service_in_thread(engine="toy") as running:
            yield running
    finally:
        sys.path.remove(str(folder))


def test_the_engine_of_a_package_is_found_by_its_name(toy: Running) -> None:
    assert type(toy.service.engine) is ToyEngine
    with pytest.raises(ConfigError, match="an engine that is installed: broken, hf, toy, vllm"):
        find_engine("vllm9")
    with pytest.raises(ConfigError, match=r"--engine.*broken.*can be imported"):
        find_engine("broken")


def test_types_are_those_of_the_protocol(toy: Running) -> None:
    """mypy compares the methods."""
    from radixkv.engines.hf import HFEngine

    engines: list[Engine] = [toy.service.engine]
    caches: list[EngineCache] = [each.cache for each in engines]
    made: type[Engine] = HFEngine
    cache: type[EngineCache] = PrefixCache
    assert made is HFEngine and cache is PrefixCache and isinstance(caches[0], PrefixCache)


def test_it_completes_and_streams_prompts(toy: Running, text: str) -> None:
    body = {"prompt": list(range(100, 140)), "max_tokens": 5, "temperature": 0}
    whole = toy.acme.post("/v1/completions", json=body).json()
    again = toy.acme.post("/v1/completions", json=body).json()
    assert whole["choices"][0]["text"] == again["choices"][0]["text"]
    assert whole["choices"][0]["text"] == toy.service.tokenizer.decode(list(range(140, 145)))
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (whole, again)]
    assert cached == [0, 32]
    with toy.acme.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200 and lines[-1] == "data: [DONE]" and len(lines) > 1


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_of_a_tool_reaches_the_policy(
    toy: Running, salt: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its conversation is pending at once, with the session of its key; other answers tell nothing."""
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    body = {
        "messages": [{"role": "user", "content": "Which page explains pins? " * 20}],
        "tools": [tool],
        "prompt_cache_key": f"s-{salt}",
        "salt": salt,
        "max_completion_tokens": 100,
        "stream": streams,
    }
    assert toy.acme.post("/v1/chat/completions", json=body).status_code == 200
    assert _pending(toy, f"s-{salt}") == [False]
    called = toy.service.tokenizer.encode('<tool_call>{"name": "find", "arguments": {}}</tool_call>')
    original = ToyEngine.generate

    def generate(self: ToyEngine, ns: Any, ids: Any, most: int, *, on_step: Any, **options: Any) -> Any:
        generation = original(self, ns, ids, 1, **options)
        generation.token_ids[0][:] = list(called)
        on_step([list(called)])
        return generation

    monkeypatch.setattr(ToyEngine, "generate", generate)
    answer = toy.acme.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and '"finish_reason":"tool_calls"' in answer.text
    assert _pending(toy, f"s-{salt}") == [True]


def _pending(toy: Running, session: str) -> list[bool]:
    """Whether a tool's answer continues the session, by the policy's facts of its blocks."""
    cache: Any = toy.service.cache
    learned = cache._tenants["acme"].policy
    pieces = [piece for state in learned._states.values() for piece in state.pieces]
    return list({each.facts.is_pending for each in pieces if each.facts.labels.get("session") == session})


def test_it_warms_looks_up_and_clears(toy: Running, text: str, salt: str) -> None:
    where = {"prompt": text, "salt": salt}
    warm = toy.acme.post("/v1/warm", json=where).json()
    assert warm["computed"] > 0 and warm["cached_before"] == 0
    assert toy.acme.post("/v1/lookup", json=where).json()["matched_tokens"] == warm["tokens"]
    assert toy.globex.post("/v1/lookup", json=where).json()["matched_tokens"] == 0
    assert toy.acme.post("/v1/warm", json=where).json()["computed"] == 0
    assert toy.acme.delete("/v1/cache").status_code == 200
    assert toy.acme.post("/v1/lookup", json=where).json()["matched_tokens"] == 0


@pytest.mark.parametrize(
    ("who", "path", "body", "ability"),
    [
        ("acme", "/v1/pins", {"token_ids": list(range(64)), "ttl_s": 60}, "pins"),
        (
            "operator",
            "/v1/bases",
            {"id": "base", "token_ids": list(range(64)), "readers": ["acme"]},
            "publish",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    toy: Running, who: str, path: str, body: dict[str, Any], ability: str
) -> None:
    answer = getattr(toy, who).post(path, json=body)
    assert answer.status_code == 501, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["value"]) == ("not_supported", ability)
    assert error["message"] == f"the engine of this service has no {ability}"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"use_beam_search": True, "n": 2, "temperature": 0}, "use_beam_search"),
        ({"n": 2, "temperature": 1}, "n"),
    ],
)
def test_completions_that_it_cannot_make_name_their_field(
    toy: Running, options: dict[str, Any], field: str
) -> None:
    answer = toy.acme.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **options})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert "the engine of this service" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.5),
        ("logit_bias", {"5": 1.0}),
        ("min_tokens", 1),
        ("logprobs", 0),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_scores_and_forms_that_it_cannot_change_are_named(toy: Running, field: str, value: Any) -> None:
    """Neutral values are served: clients often send them."""
    neutral = {
        "repetition_penalty": 1.0,
        "logprobs": None,
        "response_format": {"type": "text"},
        "logit_bias": {},
    }
    body = {"prompt": "x", "max_tokens": 2, "temperature": 0}
    error = toy.acme.post("/v1/completions", json={**body, field: value}).json()["error"]
    assert error["field"] == field and "the engine of this service" in error["message"], error
    assert toy.acme.post("/v1/completions", json={**body, field: neutral.get(field, 0)}).status_code == 200


def test_greedy_copies_need_no_ability(toy: Running) -> None:
    body = {"prompt": [5, 6], "max_tokens": 2, "n": 3, "temperature": 0}
    choices = toy.acme.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 3 and len({each["text"] for each in choices}) == 1


def test_a_sick_engine_shows(toy: Running) -> None:
    engine = toy.service.engine
    assert isinstance(engine, ToyEngine)
    assert toy.nobody.get("/healthz").status_code == 200 and engine.audit() == []
    engine.sick.append("engine: its process ended")
    try:
        answer = toy.nobody.get("/healthz")
        assert answer.status_code == 503 and "its process ended" in answer.text
    finally:
        engine.sick.clear()


@pytest.mark.slow
def test_the_service_needs_no_torch_without_hf() -> None:
    code = (
        "import sys, radixkv.service.build, radixkv.service.core, radixkv.engines;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
