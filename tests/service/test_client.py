"""The HTTP client of the command line: arguments that it refuses, and bodies that JSON cannot express."""

from __future__ import annotations

import math
from typing import Any

import pytest

from radixkv.errors import ArgumentError, ConfigError
from radixkv.service.api_client import Client, ServiceError


@pytest.mark.parametrize("url", [None, 5, b"http://x", "", "x", "ftp://x", "http://", "http://\ud800/"])
def test_an_invalid_url_is_named(url: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        Client(url, "key")
    assert refused.value.setting == "--url"


@pytest.mark.parametrize("key", ["", "a b", "é", "a\n", 987_654, b"key", True, "x" * 513, None])
def test_an_invalid_key_is_refused_without_showing_it(key: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        Client("http://192.0.2.1:1", key)
    assert refused.value.setting == "--key" and (key is None or repr(key) not in str(refused.value))


@pytest.mark.parametrize("value", [math.nan, object(), {1, 2}, b"x", 1j])
def test_a_body_that_json_cannot_express_is_refused(value: Any) -> None:
    with Client("http://127.0.0.1:1", None) as client, pytest.raises(ArgumentError, match="body="):
        client.call("POST", "/v1/warm", {"prompt": value})


def test_an_invalid_host_cannot_be_reached() -> None:
    with Client("http://[", "key") as client, pytest.raises(ServiceError, match="can't be reached"):
        client.call("GET", "/healthz")
