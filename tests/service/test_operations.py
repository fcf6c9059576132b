"""Health, metrics, the OpenAPI document, and models from local directories."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.errors import IntegrityError
from radixkv.index import recovery
from radixkv.service.app import ENDPOINTS
from radixkv.service.engine_loop import Work
from tests.service.running import Running, service_in_thread
from tests.tokenizer.kinds import train_byte_level
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow


def test_a_running_service_is_healthy_and_ready(live: Running) -> None:
    for path in ("/healthz", "/readyz"):
        answer = live.nobody.get(path)
        assert (answer.status_code, answer.json()) == (
            200,
            {"status": "ok", "reasons": [], "warnings": [], "coordination": "ok"},
        )


def test_a_broken_invariant_makes_the_service_unhealthy() -> None:
    with service_in_thread() as live:

        def broken(_: Work[None]) -> None:
            raise IntegrityError("a law")

        assert live.service.engine_loop.call("acme", broken).future.exception(LIMIT_S), (
            "nobody waits for it, yet it counts"
        )
        assert live.nobody.get("/healthz").status_code == live.nobody.get("/readyz").status_code == 503
        assert live.nobody.get("/healthz").json()["status"] == "unhealthy"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_cache_that_cannot_be_repaired_makes_the_service_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request meets the error: the health check itself looks for it.

    The maintenance thread reports the error too.
    """
    with service_in_thread() as live:
        cache = live.service.cache

        def fails(_: Any) -> None:
            raise MemoryError

        monkeypatch.setattr(recovery, "_mend", fails)
        with cache._lock, pytest.raises(MemoryError):
            recovery.mend(cache, MemoryError())
        assert live.nobody.get("/healthz").status_code == 503
        monkeypatch.undo()
        assert cache.stats().num_sequences == 0, (
            "the next call repairs it, and the process is still to be replaced"
        )
        assert live.nobody.get("/healthz").status_code == 503


def test_a_stopping_service_is_not_ready(live: Running) -> None:
    live.service.drain.is_stopping = True
    try:
        assert live.nobody.get("/readyz").json()["reasons"] == ["stopping"]
        assert live.nobody.get("/readyz").json()["status"] == "not_ready"
        assert live.nobody.get("/healthz").status_code == 200
    finally:
        live.service.drain.is_stopping = False


def test_a_replica_lists_itself(live: Running) -> None:
    for who in (live.acme, live.operator):
        (own,) = who.get("/v1/replicas").json()["replicas"]
        assert own["is_self"] and own["live"] and own["address"] == live.url and own["epoch"] > 0


def samples(live: Running) -> dict[str, float]:
    text = live.operator.get("/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_metrics_count_what_happened(live: Running, salt: str, text: str) -> None:
    before = samples(live)
    live.acme.post(
        "/v1/completions", json={"prompt": text, "salt": salt, "max_tokens": 3, "ignore_eos": True}
    )
    live.acme.get("/nowhere")
    after = samples(live)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('radixkv_http_requests_total{method="POST",path="/v1/completions",status="200"}') == 1
    assert grown('radixkv_completion_tokens_total{kind="generated",tenant="acme"}') == 3
    assert grown('radixkv_tenant_requests_total{tenant="acme"}') == 1
    assert grown('radixkv_tenant_requests_total{tenant="globex"}') == 0
    assert after["radixkv_cache_num_blocks"] == 1024 and after["radixkv_has_broken_laws"] == 0
    assert not any("nowhere" in name for name in after), "text of a client is never a label"


def document(live: Running) -> dict[str, Any]:
    return dict(live.nobody.get("/openapi.json").json())


def test_openapi_names_every_public_endpoint(live: Running) -> None:
    api = document(live)
    assert api["openapi"].startswith("3.1") and api["info"]["version"] == radixkv.__version__
    described = {(method.upper(), path) for path, item in api["paths"].items() for method in item}
    expected = {(each.method, each.path) for each in ENDPOINTS if not each.internal}
    assert described == expected | {("GET", "/openapi.json")}


def test_openapi_refers_to_what_it_defines(live: Running) -> None:
    api = document(live)
    references = set(
        re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', live.nobody.get("/openapi.json").text)
    )
    assert references and references <= set(api["components"]["schemas"])


def test_openapi_forbids_what_the_service_refuses(live: Running) -> None:
    schemas = document(live)["components"]["schemas"]
    for name in ("WarmRequest", "LookupRequest", "CompletionRequest", "Message", "StreamOptions", "Hints"):
        assert schemas[name]["additionalProperties"] is False, name
    assert "tenant" not in schemas["WarmRequest"]["properties"]
    completion = schemas["CompletionRequest"]
    assert completion["required"] == ["prompt"]
    assert completion["properties"]["max_tokens"]["default"] == 16
    assert {"type": "null"} in completion["properties"]["n"]["anyOf"]
    assert schemas["Hints"]["properties"]["labels"]["anyOf"][0]["maxProperties"] == 16
    assert [each["type"] for each in completion["properties"]["prompt"]["oneOf"]] == [
        "string",
        "array",
        "array",
        "array",
    ]


def test_every_status_that_is_answered_is_described(live: Running, text: str) -> None:
    api = document(live)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/warm", {"prompt": text}),
        ("/v1/warm", {"prompt": text, "wait": False}),
        ("/v1/warm", {"prompt": text, "replicas": "all"}),
        ("/v1/lookup", {"prompt": text}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x", "model": "none"}),
        ("/v1/warm", {}),
    ]
    for path, body in bodies:
        answer = live.acme.post(path, json=body)
        operation = api["paths"][path]["post"]
        content = operation["responses"][str(answer.status_code)]["content"]
        assert answer.headers["content-type"].partition(";")[0] in content


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local model as transformers saves it, with a tokenizer of one of the two kinds."""
    from radixkv.engines.hf import demo_model

    folder = tmp_path_factory.mktemp("models") / "small-llama"
    model = demo_model(seed=5, num_layers=2, hidden_size=64, intermediate_size=128, max_model_len=1024)
    model.save_pretrained(folder)
    if request.param == "tokenizer.json":
        train_byte_level().save(str(folder / "tokenizer.json"))
    else:
        shipped = Path(radixkv.__file__).parent / "tokenizer" / "radixkv-8k.model"
        (folder / "tokenizer.model").write_bytes(shipped.read_bytes())
    return folder


def test_a_local_directory_is_served(model_folder: Path, text: str) -> None:
    with service_in_thread(model=str(model_folder)) as live:
        warmed = live.acme.post("/v1/warm", json={"prompt": text}).json()
        reply = live.acme.post(
            "/v1/completions", json={"prompt": text, "temperature": 0, "max_tokens": 6}
        ).json()
        assert reply["model"] == "small-llama"
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == warmed["tokens"] > 0
        chat = {"messages": [{"role": "user", "content": text}]}
        assert live.acme.post("/v1/warm", json=chat).json()["tokens"] > 0
        long = live.acme.post("/v1/completions", json={"prompt": [5] * 1020, "max_tokens": 5})
        assert long.status_code == 400 and "1024" in long.json()["error"]["allowed"]
        assert (
            live.acme.post("/v1/completions", json={"model": "small-llama", "prompt": "x"}).status_code == 200
        )


def test_models_have_namespaces_of_their_own(model_folder: Path, live: Running) -> None:
    with service_in_thread(model=str(model_folder)) as other:
        fingerprints = {
            each.acme.get("/v1/replicas").json()["replicas"][0]["model"] for each in (other, live)
        }
        assert len(fingerprints) == 2
