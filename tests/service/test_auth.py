"""API keys: how they are stored, the form of a keys file, and the endpoints that each key allows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.service.auth import Keyring, Principal
from tests.service.running import Running, client


def digest(key: bytes) -> str:
    """The digest of a key, in the form that a keys file may contain."""
    return "sha256:" + hashlib.sha256(key).hexdigest()


DIGEST = digest(b"acme's")


def keyring(document: Any, tmp_path: Path) -> Keyring:
    path = tmp_path / "keys.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return Keyring.load(path)


def test_a_key_or_its_digest_authenticates_its_principal(tmp_path: Path) -> None:
    of_globex = "sha256:" + digest(b"of-globex").removeprefix("sha256:").upper()
    ring = keyring({"operator": "boss", "tenants": {"acme": "of-acme", "globex": of_globex}}, tmp_path)
    assert ring.authenticate("Bearer boss") == Principal(None)
    assert ring.authenticate("bearer of-acme") == Principal("acme")
    assert ring.authenticate("BEARER  of-globex ") == Principal("globex")
    assert ring.tenants == ("acme", "globex")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic boss", "boss", "Bearer Boss", "Bearer boss2", "Bearer " + DIGEST],
)
def test_a_wrong_key_authenticates_no_principal(header: str | None, tmp_path: Path) -> None:
    assert keyring({"operator": "boss", "tenants": {"acme": DIGEST}}, tmp_path).authenticate(header) is None


def test_a_keyring_does_not_keep_the_keys(tmp_path: Path) -> None:
    ring = keyring({"operator": "boss-secret", "tenants": {"acme": "acme-secret"}}, tmp_path)
    assert "secret" not in repr(vars(ring))


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ("", "keys.json"),
        ("[]", "keys.json"),
        ("{", "keys.json"),
        ("[" * 100_000, "keys.json"),
        ({}, "tenants"),
        ({"tenants": {}}, "tenants"),
        ({"tenants": []}, "tenants"),
        ({"tenants": {"acme": 5}}, "tenants.acme"),
        ({"tenants": {"acme": ""}}, "tenants.acme"),
        ({"tenants": {"acme": "two words"}}, "tenants.acme"),
        ({"tenants": {"acme": "sha256:12"}}, "tenants.acme"),
        ({"tenants": {"": "k"}}, "tenants"),
        ({"tenants": {"acme": "k"}, "operator": None}, "operator"),
        ({"tenants": {"acme": "k"}, "admin": "x"}, "admin"),
        ({"tenants": {"acme": "k", "globex": "k"}}, "tenants.globex"),
        ({"tenants": {"acme": "acme's key", "globex": DIGEST}}, "tenants.acme"),
        ({"tenants": {"acme": "acme's", "globex": digest(b"acme's")}}, "tenants.globex"),
        ({"tenants": {"acme": "k"}, "operator": "k"}, "operator"),
        ('{"tenants": {"acme": "k", "acme": "l"}}', "acme"),
        ('{"operator": "a", "operator": "b", "tenants": {"acme": "k"}}', "operator"),
    ],
)  # fmt: skip
def test_a_malformed_keys_file_is_refused_naming_the_place(document: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        keyring(document, tmp_path)
    assert place in str(caught.value)


def test_an_error_about_keys_quotes_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        keyring({"tenants": {"acme": "hush hush"}}, tmp_path)
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        keyring('{"tenants": {"acme": "hush"', tmp_path)
    assert "hush" not in str(caught.value)


def test_a_keys_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(b'{"tenants": {"acme": "\xff"}}')
    with pytest.raises(ConfigError, match="keys"):
        Keyring.load(tmp_path / "keys.json")


TENANT_ONLY = [
    ("POST", "/v1/warm"),
    ("GET", "/v1/warm/x"),
    ("POST", "/v1/lookup"),
    ("POST", "/v1/completions"),
    ("DELETE", "/v1/cache"),
]
EITHER = [("GET", "/v1/stats"), ("GET", "/v1/replicas")]


@pytest.mark.parametrize(("method", "path"), [*TENANT_ONLY, *EITHER, ("GET", "/metrics")])
def test_without_a_key_there_is_401_before_anything_else(live: Running, method: str, path: str) -> None:
    answers = []
    for key in (None, "wrong", "demo-acm", "demo-acmee"):
        with client(live.url, key) as someone:
            answers.append(someone.request(method, path, content=b"{bad"))
    assert {answer.status_code for answer in answers} == {401}
    assert {answer.headers["WWW-Authenticate"] for answer in answers} == {'Bearer realm="radixkv"'}
    assert len({answer.content for answer in answers}) == 1


@pytest.mark.parametrize(("method", "path"), TENANT_ONLY)
def test_the_operator_cannot_use_tenant_endpoints(live: Running, method: str, path: str) -> None:
    assert live.operator.request(method, path).status_code == 403


def test_a_tenant_cannot_read_the_metrics(live: Running) -> None:
    assert live.acme.get("/metrics").status_code == 403


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/openapi.json"])
def test_some_paths_need_no_key(live: Running, path: str) -> None:
    assert live.nobody.get(path).status_code == 200


def test_a_key_that_is_not_ascii_is_refused(live: Running) -> None:
    assert live.nobody.get("/v1/stats", headers={b"Authorization": "Bearer ключ".encode()}).status_code == 401


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        ("demo-acme", "demo-acme", "/v1/stats"),
        ("demo-acme", "demo-globex", "/v1/stats"),
        ("demo-acme", "rubbish", "/v1/stats"),
        ("rubbish", "demo-acme", "/v1/stats"),
        ("demo-operator", "demo-operator", "/metrics"),
        ("demo-operator", "demo-acme", "/v1/stats"),
    ],
)
def test_a_request_with_two_keys_is_refused(live: Running, first: str, second: str, path: str) -> None:
    both = [("authorization", f"Bearer {key}") for key in (first, second)]
    assert live.nobody.get(path, headers=both).status_code == 401
    assert (
        live.nobody.get(path, headers={"authorization": f"Bearer {first}, Bearer {second}"}).status_code
        == 401
    )


def test_a_request_with_two_idempotency_keys_is_refused(live: Running) -> None:
    twice = [("idempotency-key", "one"), ("idempotency-key", "one")]
    refused = live.acme.post("/v1/warm", json={"token_ids": [1], "wait": False}, headers=twice)
    assert refused.status_code == 422 and refused.json()["error"]["field"] == "Idempotency-Key"


def test_prefixes_tell_the_demo_keys_apart() -> None:
    """A quarter of a short key is too short to tell the keys apart.

    A longer prefix would make the key easier to guess.
    """
    keys = Keyring.demo().keys
    assert len({key.prefix for key in keys}) == len(keys) == 3
    for key in keys:
        beginning, _, digits = str(key.prefix).partition("..")
        assert "demo".startswith(beginning) and digits == key.id[:6]
