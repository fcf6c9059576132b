"""Signed requests: the signature covers each part, and old or repeated requests are refused. Keys by purpose."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.clock import ManualClock
from radixkv.errors import ConfigError, CoordinationError, UnverifiedRequest
from radixkv.signing import (
    DIGEST_HEADER,
    NONCE_HEADER,
    PURPOSES,
    SIGNATURE_HEADER,
    TENANT_HEADER,
    TIMESTAMP_HEADER,
    KeySet,
    ReplayGuard,
    RequestVerifier,
    derived,
    frame,
    is_signed,
    key_id,
    read_secret,
    shown_path,
    sign_request,
)

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


fields = st.lists(st.one_of(st.text(), st.binary(), st.integers()), max_size=4)


@given(fields, fields)
def test_a_frame_belongs_to_one_list_of_fields(
    one: list[str | int | bytes], other: list[str | int | bytes]
) -> None:
    typed = [[(type(field), field) for field in fields] for fields in (one, other)]
    assert (frame(*one) == frame(*other)) == (typed[0] == typed[1])


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=8))
def test_moving_a_boundary_changes_the_frame(left: str, right: str, both: str) -> None:
    assert frame(left, right) != frame(left + right)
    assert frame(left, right) != frame(left + right, "") or right == ""
    assert frame(both) != frame(both.encode())


def test_an_engine_gets_keys_from_which_no_other_can_be_computed() -> None:
    keys, others = KeySet.derive([SECRET]), KeySet.derive([SECRET[::-1]])
    made = [key for each in (keys, others) for purpose in PURPOSES for key in each.accepted(purpose)]
    assert len(set(made)) == len(made) == 2 * len(PURPOSES) and all(len(key) == 32 for key in made)
    assert SECRET not in made and keys.accepted("salts") == (derived(SECRET, "salts"),)
    (salts_only,) = KeySet.derive([SECRET], ["salts"]).purposes
    assert salts_only == "salts"
    with pytest.raises(ConfigError, match="'control'"):
        KeySet.derive([SECRET], ["salts"]).accepted("control")


def test_the_first_key_is_the_current_secrets() -> None:
    old, new = SECRET, SECRET[::-1]
    accepted = KeySet.derive([new, old]).accepted("salts")
    assert accepted == (derived(new, "salts"), derived(old, "salts"))
    assert len({key_id(key) for key in accepted}) == 2


@pytest.mark.parametrize(
    ("secrets", "purposes"),
    [
        ([], ["salts"]),
        ([b"short"], ["salts"]),
        ([SECRET, SECRET], ["salts"]),
        ([SECRET + bytes([at]) for at in range(5)], ["salts"]),
        ([SECRET], ["sugar"]),
    ],
)
def test_secrets_and_purposes_are_checked(secrets: list[bytes], purposes: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        KeySet.derive(secrets, purposes)
    assert "0123" not in str(refusal.value)


def test_a_file_of_keys_is_private_and_read_back(tmp_path: Path) -> None:
    path, keys = tmp_path / "engine.keys", KeySet.derive([SECRET, SECRET[::-1]])
    path.write_text("an older file")
    keys.write(path)
    assert path.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [path]
    read = KeySet.load(path)
    assert {purpose: read.accepted(purpose) for purpose in PURPOSES} == {
        purpose: keys.accepted(purpose) for purpose in PURPOSES
    }
    for key in read.accepted("salts"):
        assert key.hex() not in repr(read) and repr(key) not in repr(read)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o601])
def test_a_file_that_others_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "engine.keys"
    KeySet.derive([SECRET]).write(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeySet.load(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.keys"
    KeySet.derive([SECRET]).write(path)
    os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match="another user"):
        KeySet.load(path)


def test_a_pipe_in_place_of_the_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "engine.keys", 0o600)
    with pytest.raises(ConfigError, match="regular"):
        KeySet.load(tmp_path / "engine.keys")


KEY = "ab" * 32


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 16_000,
        b" " * 20_000 + b"{}",
        json.dumps({"salts": KEY}).encode(),
        json.dumps({"salts": []}).encode(),
        json.dumps({"salts": [1]}).encode(),
        json.dumps({"salts": ["xy" * 32]}).encode(),
        json.dumps({"salts": [KEY[2:]]}).encode(),
        json.dumps({"salts": [KEY, KEY.upper()]}).encode(),
        json.dumps({"salts": [f"{at:064x}" for at in range(5)]}).encode(),
        json.dumps({"sugar": [KEY]}).encode(),
    ],
)
def test_a_malformed_file_is_refused_without_quoting_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "engine.keys"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as refusal:
        KeySet.load(path)
    assert KEY[2:] not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeySet.load(tmp_path / "none")


@pytest.mark.parametrize(
    "text",
    [
        "S3cret",
        "S3cret/",
        "S3cret/" * 100,
        "S3cret" * 100,
        "/S3cret+/a==",
        "/S3cret",
        "//S3cret",
        "S3c\0ret",
        "\ud800S3cret",
    ],
)
def test_a_secret_in_place_of_its_path_is_not_shown(text: str) -> None:
    for read in (lambda: read_secret("--fleet-secret", text), lambda: KeySet.load(text)):
        with pytest.raises((ConfigError, ValueError)) as caught:
            read()
        assert "S3c" not in str(caught.value)
    assert shown_path(text) == "…"


def test_a_path_is_shown_also_if_the_name_is_misspelled(tmp_path: Path) -> None:
    (tmp_path / "fleet.secret").touch()
    for path in (tmp_path / "fleet.secret", tmp_path / "fleet.secrte", tmp_path):
        assert shown_path(str(path)) == str(path)
    with pytest.raises(ConfigError, match=f"^--fleet-secret='{tmp_path}/fleet.secrte' .*No such file"):
        read_secret("--fleet-secret", f"{tmp_path}/fleet.secrte")
    with pytest.raises(ConfigError, match="a file that holds 16 to 65,536 bytes"):
        read_secret("--fleet-secret", f"{tmp_path}/fleet.secret")
