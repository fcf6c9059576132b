"""The gateway of the example with SGLang, in front of a server that shows what it was asked."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from starlette.testclient import TestClient

from radixkv.signing import KeySet
from radixkv.tenancy.salt import SaltReader, make_salt
from tests.examples.running import ROOT

pytestmark = pytest.mark.slow

KEYS = KeySet.derive([b"the fleet's own secret"])
ACME, GLOBEX = ({"authorization": f"Bearer demo-{name}"} for name in ("acme", "globex"))


class Shown(BaseHTTPRequestHandler):
    """Answers a POST with what it was asked."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = json.dumps(
            {"path": self.path, "key": self.headers["authorization"], "asked": asked}
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "tenant_gateway", ROOT / "examples" / "sglang_server" / "tenant_gateway.py"
    )
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def gateway(module: ModuleType, tmp_path: Path) -> Iterator[TestClient]:
    KEYS.write(tmp_path / "engine.keys")
    with ThreadingHTTPServer(("127.0.0.1", 0), Shown) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            with TestClient(module.make_app(url, tmp_path, "inside")) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()


def asked(gateway: TestClient, headers: dict[str, str], **body: Any) -> dict[str, Any]:
    answer = gateway.post("/v1/completions", json={"prompt": "x", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    assert told["path"] == "/v1/completions" and told["key"] == "Bearer inside"
    return dict(told["asked"])


def test_the_key_decides_the_salt_and_clients_cannot(gateway: TestClient) -> None:
    reader = SaltReader(KEYS, allows_anonymous=False)
    stolen = make_salt(KEYS, "globex")
    bodies: list[dict[str, Any]] = [
        {},
        {"salt": "v2"},
        {"cache_salt": "v2"},
        {"cache_salt": stolen},
        {"salt": None},
    ]
    owners = [reader.read(asked(gateway, ACME, **body)["cache_salt"]) for body in bodies]
    assert {each.tenant for each in owners} == set(reader.tenant_ids("acme"))
    assert owners[0] == owners[4] and owners[1] == owners[2] and len(set(owners)) == 3
    assert reader.read(asked(gateway, GLOBEX)["cache_salt"]).tenant == reader.tenant_ids("globex")[0]


def test_only_harmless_fields_are_passed_on(gateway: TestClient) -> None:
    unwanted = (
        "extra_key",
        "rid",
        "session_params",
        "lora_path",
        "priority",
        "custom_logit_processor",
        "user",
    )
    found = asked(gateway, ACME, max_tokens=3, stream=False, **dict.fromkeys(unwanted, "1"))
    assert found.keys() == {"prompt", "max_tokens", "stream", "cache_salt"}


@pytest.mark.parametrize(
    "path", ["/server_info", "/get_server_info", "/generate", "/flush_cache", "/metrics", "/v1/tokenize", "/"]
)
def test_nothing_else_of_the_engine_is_there(gateway: TestClient, path: str) -> None:
    assert {gateway.get(path, headers=ACME).status_code, gateway.post(path, headers=ACME).status_code} == {
        404
    }


@pytest.mark.parametrize("key", [None, "", "demo-acm", "demo-acme ", "demo-operator", "Bearer demo-acme"])
def test_a_key_that_is_not_known_is_refused(gateway: TestClient, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for path in ("/v1/completions", "/v1/warm", "/v1/pins"):
        assert gateway.post(path, json={"prompt": "x"}, headers=headers).status_code == 401
    assert gateway.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"[1]", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"salt": ' + b"7" * 5_000 + b"}", 400),
        (b'{"salt": "' + b"x" * 2_000 + b'"}', 400),
        (b'{"salt": ["x"]}', 400),
        (b'{"prompt": "' + b"x" * 2**20 + b'"}', 413),
    ],
)
def test_hostile_bodies_are_refused(gateway: TestClient, content: bytes, status: int) -> None:
    answer = gateway.post("/v1/completions", content=content, headers=ACME)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_only_the_operator_purges_and_older_salts_end(module: ModuleType, gateway: TestClient) -> None:
    assert gateway.post("/v1/tenants/acme/purge", headers=GLOBEX).status_code == 403
    operator = {"authorization": f"Bearer {module.OPERATOR}"}
    assert gateway.post("/v1/tenants/nobody/purge", headers=operator).status_code == 404
    reader = SaltReader(KEYS)
    before = reader.read(asked(gateway, ACME)["cache_salt"])
    assert gateway.post("/v1/tenants/acme/purge", headers=operator).status_code == 409  # no engine listens
    after = reader.read(asked(gateway, ACME)["cache_salt"])
    assert (before.generation, after.generation) == (0, 1)
