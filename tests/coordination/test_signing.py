"""Signed requests: the signature covers each part, and old or repeated requests are refused."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from radixkv.clock import ManualClock
from radixkv.coordination.signing import (
    DIGEST_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    TENANT_HEADER,
    TIMESTAMP_HEADER,
    ReplayGuard,
    RequestVerifier,
    is_signed,
    sign_request,
)
from radixkv.errors import ConfigError, CoordinationError, UnverifiedRequest

SECRET = b"0123456789abcdef0123456789abcdef"
NOW_S = 1_700_000_000.25
REQUEST = {"method": "POST", "path": "/v1/warm?x=1", "body": b'{"prompt": "p"}', "audience": "b@17"}


def signed(**changes: Any) -> dict[str, str]:
    return sign_request(SECRET, **({**REQUEST, "tenant": "acmé", "timestamp_s": NOW_S} | changes))


class Receiver:
    """A verifier with its own clocks."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.wall, self.clock = ManualClock(NOW_S), ManualClock()
        self.verifier = RequestVerifier(secret, max_skew_s=30.0, wall=self.wall, clock=self.clock)

    def verify(self, headers: dict[str, str], **changes: Any) -> str:
        return self.verifier.verify(headers, **(REQUEST | changes))

    def refuses(self, headers: dict[str, str], **changes: Any) -> str:
        with pytest.raises(UnverifiedRequest) as refusal:
            self.verify(headers, **changes)
        return str(refusal.value)


def test_a_signed_request_names_its_tenant() -> None:
    headers = signed()
    assert Receiver().verify(headers) == "acmé"
    assert Receiver().verify(headers, method="post") == "acmé"
    assert is_signed(headers) and not is_signed({"authorization": "Bearer x"})
    assert all(value.isascii() for value in headers.values())
    assert issubclass(UnverifiedRequest, CoordinationError)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "DELETE"},
        {"path": "/v1/warm"},
        {"path": "/v1/warm?x=2"},
        {"body": b""},
        {"body": REQUEST["body"] + b" "},  # type: ignore[operator]
        {"audience": "b@18"},
        {"audience": "c@17"},
    ],
)
def test_each_part_of_the_request_is_covered(changes: dict[str, Any]) -> None:
    assert "signature" in Receiver().refuses(signed(), **changes)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (TENANT_HEADER, b"other".hex()),
        (TENANT_HEADER, ""),
        (TIMESTAMP_HEADER, str(int(NOW_S * 1000) + 1)),
        (NONCE_HEADER, "0" * 32),
        (DIGEST_HEADER, "0" * 64),
        (SIGNATURE_HEADER, "0" * 64),
    ],
)
def test_each_header_is_covered(header: str, value: str) -> None:
    assert "signature" in Receiver().refuses(signed() | {header: value})


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (TENANT_HEADER, "xyz"),
        (TENANT_HEADER, "ff"),
        (TIMESTAMP_HEADER, "soon"),
        (TIMESTAMP_HEADER, "-1"),
        (TIMESTAMP_HEADER, "1" * 400),
        (TIMESTAMP_HEADER, "٣"),
        (NONCE_HEADER, "short"),
        (DIGEST_HEADER, "0" * 63),
        (SIGNATURE_HEADER, "é" * 64),
        (SIGNATURE_HEADER, ""),
    ],
)
def test_malformed_headers_are_refused(header: str, value: str) -> None:
    assert "malformed" in Receiver().refuses(signed() | {header: value})


@pytest.mark.parametrize(
    "header", [TENANT_HEADER, TIMESTAMP_HEADER, NONCE_HEADER, DIGEST_HEADER, SIGNATURE_HEADER]
)
def test_missing_headers_are_named(header: str) -> None:
    headers = signed()
    del headers[header]
    assert header in Receiver().refuses(headers)


def test_another_fleets_signature_is_refused() -> None:
    assert "signature" in Receiver(SECRET[::-1]).refuses(signed())


@pytest.mark.parametrize(("skew_s", "fits"), [(-29.0, True), (29.0, True), (-31.0, False), (31.0, False)])
def test_the_time_may_be_off_by_the_skew(skew_s: float, fits: bool) -> None:
    receiver = Receiver()
    receiver.wall.now += skew_s
    if fits:
        receiver.verify(signed())
    else:
        assert "30.0 s" in receiver.refuses(signed())


def test_a_request_is_accepted_once() -> None:
    receiver, headers = Receiver(), signed()
    receiver.verify(headers)
    assert "before" in receiver.refuses(headers)
    receiver.verify(signed())
    receiver.clock.advance(59.0)
    receiver.wall.advance(29.0)
    assert "before" in receiver.refuses(headers)


def test_a_forged_request_uses_up_no_nonce() -> None:
    receiver, headers = Receiver(), signed()
    receiver.refuses(headers, body=b"forged")
    receiver.verify(headers)


def test_a_wall_clock_that_jumps_ahead_forgets_no_nonce() -> None:
    receiver, headers = Receiver(), signed()
    receiver.verify(headers)
    receiver.wall.advance(3600)
    receiver.verify(signed(timestamp_s=NOW_S + 3600))
    receiver.wall.now = NOW_S
    assert "before" in receiver.refuses(headers)


def test_a_full_guard_admits_nothing_until_time_has_passed() -> None:
    clock = ManualClock()
    guard = ReplayGuard(10.0, max_nonces=3, clock=clock)
    assert [guard.admit(nonce) for nonce in "abca"] == [True, True, True, False]
    assert not guard.admit("d")
    clock.advance(10.0)
    assert guard.admit("d") and guard.admit("a")
    with pytest.raises(ConfigError):
        ReplayGuard(0.0)


def test_signatures_depend_on_a_random_nonce() -> None:
    assert signed()[SIGNATURE_HEADER] != signed()[SIGNATURE_HEADER]
    assert signed(nonce="0" * 32) == signed(nonce="0" * 32)


def test_the_head_is_verified_without_the_body() -> None:
    receiver, headers = Receiver(), signed()
    place = {name: REQUEST[name] for name in ("method", "path", "audience")}
    head = receiver.verifier.verify_head(headers, **place)
    assert head.tenant == "acmé"
    head.check_body(REQUEST["body"])  # type: ignore[arg-type]
    with pytest.raises(UnverifiedRequest, match="another body"):
        head.check_body(b"other")
    with pytest.raises(UnverifiedRequest, match="before"):
        receiver.verifier.verify_head(headers, **place)


def test_a_digest_of_another_body_breaks_the_signature() -> None:
    other = hashlib.sha256(b"other").hexdigest()
    assert "signature" in Receiver().refuses(signed() | {DIGEST_HEADER: other}, body=b"other")
