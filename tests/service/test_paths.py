"""Paths and methods: the endpoint that a path names, ids that would name another path, and 405 with allowed methods."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from radixkv.errors import ConfigError
from radixkv.service.app import ENDPOINTS
from radixkv.service.auth import Keyring
from radixkv.service.dialects import OWN, dialect_of
from radixkv.service.key_store import KeyStore
from tests.service.running import Running
from tests.service.test_refusals import refusal

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "LOCK")
PATHS = sorted({endpoint.path for endpoint in ENDPOINTS if not endpoint.internal} | {"/openapi.json"})
"""The paths of a service without a fleet. Internal paths exist only in a fleet."""

NO_IDS = (
    *("", "acme/keys", "/", "/acme", "acme/", "a//b", "..", ".", "../acme", "acme/..", " ", " acme", "acme ", "a\nb"),
    *("\n", "\0", "a\0", "a\x1fb", "a\x7fb", "\u200b", "\u2028", "\u202eacme", "a\tb", "é" * 129, "x" * 257),
)  # fmt: skip
"""Strings that are not valid tenant ids."""


def allowed_at(path: str) -> set[str]:
    methods = {endpoint.method for endpoint in ENDPOINTS if endpoint.path == path} or {"GET"}
    return methods | {"HEAD"} if "GET" in methods else methods


@pytest.mark.parametrize("path", PATHS)
def test_a_path_allows_only_its_methods_and_lists_them(live: Running, path: str) -> None:
    """All methods at all paths, also at paths with several endpoints."""
    allowed = allowed_at(path)
    for method in METHODS:
        if method in allowed:
            continue
        answer = live.nobody.request(method, re.sub(r"{\w+}", "x", path))
        assert answer.status_code == 405, (method, path)
        assert set(answer.headers["Allow"].split(", ")) == allowed, (method, path)
        if dialect_of(path, {}) is not OWN:  # the form of the provider has no place for the facts
            assert method == "HEAD" or "this path has no such method" in answer.text
        elif method != "HEAD":
            error = refusal(answer)
            assert (error["field"], error["value"]) == ("method", method)
            assert error["allowed"] == answer.headers["Allow"]


def test_the_path_of_a_tenants_keys_is_not_a_tenant(live: Running) -> None:
    answer = live.operator.put("/v1/tenants/acme/keys", json={})
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    answer = live.operator.delete("/v1/tenants/acme/purge")
    assert (answer.status_code, set(answer.headers["Allow"].split(", "))) == (405, {"GET", "HEAD", "POST"})
    assert live.operator.put("/v1/tenants/acme/x/y", json={}).status_code == 404
    assert live.operator.put("/v1/tenants/", json={}).status_code == 422


@pytest.mark.parametrize("tenant", NO_IDS)
def test_an_invalid_id_creates_no_tenant(live: Running, tenant: str) -> None:
    """This includes ids with an encoded slash, which a server decodes before it routes."""
    encoded = quote(tenant, safe="").replace(".", "%2e")
    before = live.operator.get("/v1/tenants").json(), live.operator.get("/v1/keys").json()
    for method, path in (
        ("PUT", f"/v1/tenants/{encoded}"),
        ("DELETE", f"/v1/tenants/{encoded}"),
        ("POST", f"/v1/tenants/{encoded}/keys"),
        ("POST", f"/v1/tenants/{encoded}/purge"),
    ):
        answer = live.operator.request(method, path, json={} if method == "PUT" else None)
        assert answer.status_code == 422, (method, path)
        error = refusal(answer)
        assert error["field"] == "tenant" and "without '/'" in error["allowed"]
        assert repr(tenant)[:40] in error["message"]
    assert (live.operator.get("/v1/tenants").json(), live.operator.get("/v1/keys").json()) == before


def test_an_encoded_slash_is_no_separator(live: Running) -> None:
    """An encoded slash separates nothing, in any path. A literal ``%2F`` is allowed in an id."""
    for path in ("/v1/tenants%2Facme/purge", "/v1%2Fstats", "/v1/keys/x%2Frotate", "/v1/pins%2fx"):
        assert live.operator.get(path).status_code in (404, 405), path
    assert live.operator.post("/v1/tenants/acme%2Fpurge").status_code == 405
    assert live.operator.put("/v1/tenants/a%252Fb", json={}).json()["tenant"] == "a%2Fb"
    assert live.operator.delete("/v1/tenants/a%252Fb").status_code == 204


@pytest.mark.parametrize("tenant", NO_IDS)
def test_a_keys_file_with_an_invalid_id_is_refused_with_file_id_and_rule(tmp_path: Path, tenant: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"operator": "boss", "tenants": {"fine": "one", tenant: "two"}}))
    with pytest.raises(ConfigError) as error:
        KeyStore.open(path)
    said = str(error.value)
    assert str(path) in said and repr(tenant)[:40] in said and "without '/'" in said
    assert "'two'" not in said and error.value.setting == "keys"


@pytest.mark.parametrize(
    "tenant", ["acme", "a.b", "...", "a b", "a%2Fb", "é" * 128, "x" * 256, "租户", "a\\b", "~"]
)
def test_valid_ids_are_accepted(tenant: str) -> None:
    assert Keyring.from_document({"tenants": {tenant: "key"}}, "here").tenants == (tenant,)
