"""TLS, headers, logs without secrets, no pickle."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from radixkv.clock import ManualClock
from radixkv.errors import ArgumentError, ConfigError
from radixkv.service.api_client import Client
from radixkv.service.app import SECURITY_HEADERS
from radixkv.service.connection import Noise
from radixkv.service.engine_loop import Work
from radixkv.service.failures import answer_to
from radixkv.service.options import RouteSettings, ServeSettings
from tests.service.running import KEYS, Running, client, served, service_in_thread
from tests.waiting import LIMIT_S, eventually


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1, its key, the certificate of its authority, and the key encrypted.

    Return the paths of the certificate and the key.
    """
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = key.private_bytes(pem, form, serialization.BestAvailableEncryption(b"secret"))
    (folder / "locked.pem").write_bytes(locked)
    return folder / "cert.pem", folder / "key.pem"


def test_it_serves_https(tls: tuple[Path, Path], monkeypatch: Any, text: str) -> None:
    cert, key = tls
    files = {"tls-cert": str(cert), "tls-key": str(key)}
    with service_in_thread(**files, **{"num-blocks": "64"}) as live:
        assert live.url.startswith("https://127.0.0.1:")
        with pytest.raises(httpx.ConnectError):
            live.acme.get("/v1/stats")
        headers = {"Authorization": f"Bearer {KEYS['acme']}"}
        trust = ssl.create_default_context(cafile=str(cert.with_name("authority.pem")))
        secure = httpx.Client(
            base_url=live.url, headers=headers, verify=trust, timeout=LIMIT_S, trust_env=False
        )
        with secure as acme:
            answer = acme.post("/v1/warm", json={"prompt": text})
            assert answer.status_code == 200 and answer.json()["tokens"] > 0
            assert answer.headers["Strict-Transport-Security"] == "max-age=31536000"
            (own,) = acme.get("/v1/replicas").json()["replicas"]
            assert own["address"] == live.url
        with pytest.raises(httpx.HTTPError):
            httpx.get(live.url.replace("https", "http") + "/healthz", timeout=LIMIT_S, trust_env=False)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert.with_name("authority.pem")))
        with Client(live.url, KEYS["acme"]) as command_line:
            assert command_line.call("GET", "/v1/stats")["tenant"] == "acme"


@pytest.mark.slow
def test_the_command_serves_https_too(tls: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = tls
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--num-blocks", "64")
    with served(tmp_path / "log", *options) as process:
        trust = ssl.create_default_context(cafile=str(cert.with_name("authority.pem")))
        assert process.url.startswith("https://")
        answer = httpx.get(f"{process.url}/readyz", verify=trust, timeout=LIMIT_S, trust_env=False)
        assert answer.status_code == 200


@pytest.mark.parametrize("settings", [ServeSettings, RouteSettings])
@pytest.mark.parametrize(
    ("cert", "key", "named"),
    [
        ("cert.pem", None, "--tls-key"),
        (None, "key.pem", "--tls-cert"),
        ("cert.pem", "cert.pem", "--tls-cert"),
        ("cert.pem", "locked.pem", "--tls-cert"),
        ("key.pem", "key.pem", "--tls-cert"),
        ("none.pem", "key.pem", "--tls-cert"),
    ],
)
def test_unusable_tls_files_are_named(
    tls: tuple[Path, Path], settings: Any, cert: str | None, key: str | None, named: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    values = {"redis": "redis://127.0.0.1", "fleet-secret": str(tmp_path / "secret")}
    for name, file in (("tls-cert", cert), ("tls-key", key)):
        values |= {name: str(tls[0].parent / file)} if file else {}
    with pytest.raises(ConfigError) as caught:
        settings.parse(values)
    assert caught.value.setting == named


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/healthz", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/v1/stats", 200),
        ("POST", "/v1/lookup", 415),
        ("GET", "/nowhere", 404),
        ("PUT", "/v1/stats", 405),
        ("GET", "/metrics", 403),
    ],
)
def test_every_answer_has_the_headers(live: Running, method: str, path: str, status: int) -> None:
    answer = live.acme.request(method, path)
    assert answer.status_code == status and "server" not in answer.headers
    assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    assert "Strict-Transport-Security" not in answer.headers, "there is no TLS"


def test_a_stream_has_the_headers(live: Running) -> None:
    answer = live.acme.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "stream": True})
    assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS


def test_a_wrong_method_lists_all_allowed_methods(live: Running) -> None:
    assert live.operator.put("/v1/keys").headers["Allow"] == "GET, HEAD, POST"


SECRET_KEY, OPERATOR_KEY = "rk-tenant-key-9f8e7d6c5b4a", "rk-operator-key-1a2b3c4d5e"
FLEET_SECRET = "fleet-secret-0123456789abcdef"
WORDS = "the emerald lies under the seventh flagstone "
IDS = [7919, 7907, 7901, 7883, 7879, 7877, 7873, 7867] * 8
"""Values that rarely occur together in counts, ports or times."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The debug log of a busy process: good and bad requests, streams, a fan-out, changed keys."""
    folder = tmp_path_factory.mktemp("logs")
    (folder / "keys.json").write_text(
        json.dumps({"operator": OPERATOR_KEY, "tenants": {"acme": SECRET_KEY, "globex": "k2"}})
    )
    (folder / "secret").write_text(FLEET_SECRET)
    options = {
        "--keys": str(folder / "keys.json"), "--fleet-secret": str(folder / "secret"), "--log-level": "debug",
        "--num-blocks": "64", "--requests-per-s": "0.001", "--burst": "40",
    }  # fmt: skip
    made: list[str] = []
    with served(folder / "log", *[part for option in options.items() for part in option]) as process:
        with client(process.url, SECRET_KEY) as acme, client(process.url, OPERATOR_KEY) as operator:
            be_busy(acme)
            made.append(operator.post("/v1/tenants/initech/keys").json()["key"])
            operator.post(f"/v1/keys/{SECRET_KEY}/rotate")
            with client(process.url, made[0]) as initech:
                initech.get("/v1/stats")
            with client(process.url, f"{SECRET_KEY}x") as wrong:
                wrong.get("/v1/stats")
        assert process.stop() == 0
        text = process.output.replace(
            f"process [{process.process.pid}]", "process"
        )  # a process id may be any number
    assert made[0] not in text
    yield text


def be_busy(acme: httpx.Client) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": WORDS * 9, "salt": WORDS},
        {"token_ids": IDS, "salt": WORDS},
        {"messages": [{"role": "user", "content": WORDS * 9}]},
        {"token_ids": [*IDS, 10**9]},
        {"prompt": WORDS, "token_ids": IDS},
        {"prompt": WORDS, WORDS: WORDS},
        {"token_ids": IDS * 100},
    ]
    for body in bodies:
        acme.post("/v1/warm", json={**body, "replicas": "all"})
        acme.post("/v1/lookup", json=body)
        job = acme.post("/v1/warm", json={**body, "wait": False}).json().get("job", WORDS)
        acme.get(f"/v1/warm/{job}")
    for stream in (False, True):
        body = {"prompt": IDS, "max_tokens": 4, "stream": stream, "stop": WORDS, "user": WORDS}
        acme.post("/v1/completions", json=body)
    acme.post("/v1/completions", json={"prompt": WORDS, "model": WORDS})
    acme.post("/v1/completions", content=WORDS.encode(), headers={"content-type": "application/json"})
    acme.get(f"/{WORDS}", params={"q": WORDS})
    acme.delete("/v1/cache", params={"salt": WORDS})
    for _ in range(20):
        acme.get("/v1/stats", params={"tenant": WORDS})


@pytest.mark.slow
def test_a_busy_service_logs_at_the_level_debug(logs: str) -> None:
    for line in (
        "POST /v1/warm: 200",
        "POST /v1/completions: 200",
        "POST /v1/lookup: 422",
        "GET /v1/stats: 429",
    ):
        assert line in logs, "a positive control"


@pytest.mark.slow
def test_logs_have_no_secret_and_no_token_id(logs: str) -> None:
    for secret in (SECRET_KEY, OPERATOR_KEY, FLEET_SECRET, "emerald", "flagstone", "rk_"):
        assert secret not in logs, secret
    together = r"\D+".join(str(each) for each in IDS[:2])
    assert not re.search(together, logs) and not re.search(r"\b(7919|7907|7901|7883)\b", logs)


def test_an_internal_error_is_logged_with_its_place_but_not_its_text(caplog: Any) -> None:
    def crash(ids: list[int]) -> None:
        try:
            raise KeyError(ids)
        except KeyError:
            raise RuntimeError(f"no prompt {ids} of {WORDS}") from None

    with caplog.at_level(logging.DEBUG), service_in_thread(**{"num-blocks": "64"}) as live:

        def work(_: Work[None]) -> None:
            crash(IDS)

        error = live.service.engine_loop.call("acme", work).future.exception(LIMIT_S)
        assert isinstance(error, RuntimeError) and answer_to(error).status == 500
    assert "RuntimeError" in caplog.text and "in crash" in caplog.text, "the log has the type and the place"
    assert "emerald" not in caplog.text and str(IDS[0]) not in caplog.text


@pytest.mark.pure
def test_an_error_inside_a_request_is_500_and_its_text_is_not_logged(caplog: Any, monkeypatch: Any) -> None:
    with caplog.at_level(logging.DEBUG), service_in_thread(**{"num-blocks": "64"}) as live:

        def match(namespace: Any, ids: Any) -> None:
            raise ValueError(f"{namespace} {list(ids)}")

        monkeypatch.setattr(live.service.cache, "match", match, raising=False)
        answer = live.acme.post("/v1/lookup", json={"token_ids": IDS, "salt": WORDS})
    assert answer.status_code == 500 and answer.json()["error"]["message"].endswith("its log has the details")
    assert "ValueError" in caplog.text and "emerald" not in caplog.text and "7919" not in caplog.text


@pytest.mark.slow
def test_maintenance_continues_after_an_internal_error(caplog: Any) -> None:
    """One failing step must not end the maintenance.

    Without load reports a replica would be sent every request, and a new replica would not learn of the pins.
    """
    with caplog.at_level(logging.ERROR), service_in_thread(**{"num-blocks": "64"}) as live:
        reported = []

        def fail() -> None:
            reported.append(live.service.fleet.coordinator.info().load)
            raise ArgumentError("limit", WORDS, "what there is")

        live.service.quotas.step = fail  # type: ignore[method-assign]
        eventually(lambda: len(reported) > 1, "another step")
    assert "ArgumentError" in caplog.text and "in fail" in caplog.text and "emerald" not in caplog.text


def test_there_is_no_pickle() -> None:
    root = Path(__file__).parents[2]
    asked = re.compile(
        r"^\s*(import|from)\s+(_?c?pickle|pickletools|dill|cloudpickle|shelve|marshal|joblib|jsonpickle)\b"
        r"|torch\.load\(|allow_pickle\s*=\s*True|read_pickle|\.loads?\([^)]*weights_only\s*=\s*False",
        re.MULTILINE,
    )
    files = [
        file
        for folder in ("radixkv", "kernels", "policies", "examples")
        for file in (root / folder).rglob("*.py")
    ]
    assert len(files) > 80
    assert [str(file) for file in files if asked.search(file.read_text("utf-8"))] == []
    assert asked.search("import pickle") and asked.search("x = torch.load(f)"), "a positive control"


def test_the_service_is_healthy_afterwards(live: Running) -> None:
    assert eventually(lambda: live.nobody.get("/healthz").status_code == 200)


def raw_answer(live: Running, request: bytes) -> bytes:
    """Send a request and return everything that the server sends until it closes the connection."""
    place = urlsplit(live.url)
    received = b""
    with socket.create_connection((place.hostname, place.port), timeout=LIMIT_S) as connection:
        connection.sendall(request)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65_536):
                received += part
    return received


SMUGGLED = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("path", [b"/v1/lookup", b"/healthz", b"/nowhere"])
@pytest.mark.parametrize(
    "lengths",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5, 6\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    ],
)
def test_a_request_with_an_ambiguous_length_is_refused(live: Running, path: bytes, lengths: bytes) -> None:
    for key in (b"", b"authorization: Bearer demo-acme\r\ncontent-type: application/json\r\n"):
        head = b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n" + key + lengths + b"\r\n"
        answer = raw_answer(live, head + b"0\r\n\r\n" + SMUGGLED)
        assert re.match(rb"HTTP/1.1 (400|501) ", answer), answer
        assert answer.count(b"HTTP/1.1 ") == 1, "the rest is not read as a second request"


RUBBISH = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\nconnection: close\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n\r\n",
    b"POST /v1/lookup HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/lookup HTTP/1.1\r\nhost: x\r\nauthorization: Bearer demo-acme\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n5\r\n{}\r\n\r\nzz",
    b"GET /v1/stats HTTP/1.1\r\nhost: x\r\nauthorization: Bearer rubbish\r\nconnection: close\r\n\r\n",
    b"PUT /v1/stats HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n\xff\xff\r\n\r\n",
)


def test_invalid_requests_do_not_write_one_log_line_each(live: Running, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    for request in RUBBISH * 5:
        raw_answer(live, request)
    assert len(caplog.records) <= 2, [each.getMessage() for each in caplog.records]
    assert not any(each.exc_info for each in caplog.records)
    assert live.nobody.get("/healthz").status_code == 200


def test_invalid_requests_are_counted_in_one_log_line_a_minute() -> None:
    clock = ManualClock()
    noise = Noise(clock)

    def heard(msg: str, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("uvicorn.error", level, "", 0, msg, (), None)
        return record.getMessage() if noise.filter(record) else None

    assert (
        heard("Invalid HTTP request received.") == "1 requests were not valid HTTP since the last such line"
    )
    assert [heard("Invalid HTTP request received.") for _ in range(40)] == [None] * 40
    assert heard("Unsupported upgrade request.") is None
    assert heard("Something else") == "Something else"
    clock.advance(61)
    assert (
        heard("Invalid HTTP request received.") == "42 requests were not valid HTTP since the last such line"
    )
