"""Requests from replica to replica: signed, fresh, and valid once.

The receiver takes the tenant from the signature instead of a bearer key. So the signature covers everything that
decides what happens: method, path with query, tenant, digest of the body, time, nonce, and the audience. The audience
names one registration of one replica. A recorded request is useless at another replica, after a restart, a second
time, or ``max_skew_s`` later.

The body's digest is a separate header. So the receiver verifies the headers before it reads the body
(``RequestVerifier.verify_head``), and compares the body with the digest afterwards (``SignedHead.check_body``).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from radixkv.clock import Clock, monotonic
from radixkv.coordination.keys import checked_secret, mac
from radixkv.coordination.settings import check_number
from radixkv.coordination.validation import check_instance, check_text, checked_seconds
from radixkv.errors import ArgumentError, UnverifiedRequest

TENANT_HEADER = "x-radixkv-tenant"
TIMESTAMP_HEADER = "x-radixkv-timestamp"
NONCE_HEADER = "x-radixkv-nonce"
DIGEST_HEADER = "x-radixkv-content-sha256"
SIGNATURE_HEADER = "x-radixkv-signature"
SIGNED_HEADERS = (TENANT_HEADER, TIMESTAMP_HEADER, NONCE_HEADER, DIGEST_HEADER, SIGNATURE_HEADER)
"""Headers of a signed request; each may occur once."""

_TIMESTAMP = re.compile(r"[0-9]{1,15}")
_HEX_16 = re.compile(r"[0-9a-f]{32}")
_HEX_32 = re.compile(r"[0-9a-f]{64}")


class SignedHead(NamedTuple):
    """The verified headers of a request: the tenant that it acts for, and the digest of its body."""

    tenant: str
    body_digest: bytes

    def check_body(self, body: bytes) -> None:
        """Raise UnverifiedRequest unless ``body`` is the one that was signed. O(body)."""
        if not hmac.compare_digest(hashlib.sha256(body).digest(), self.body_digest):
            raise UnverifiedRequest("the signature covers another body")


def sign_request(
    secret: bytes,
    *,
    method: str,
    path: str,
    tenant: str,
    body: bytes,
    audience: str,
    timestamp_s: float,
    nonce: str | None = None,
) -> dict[str, str]:
    """Return the headers that authenticate one request.

    ``path`` includes the query, ``audience`` is the receiver's ``ReplicaInfo.audience``, ``timestamp_s``
    Unix seconds, ``nonce`` 32 hex digits (random by default). The tenant travels as the hex of its UTF-8.
    Raises ConfigError for an invalid secret, ArgumentError for any other invalid argument.
    """
    checked_secret(secret)
    texts = {"method": method, "path": path, "tenant": tenant, "audience": audience}
    for name, value in texts.items():
        check_text(name, value)
    check_instance("body", body, bytes)
    checked_seconds("timestamp_s", timestamp_s, 1e12, above=0.0)
    nonce = secrets.token_hex(16) if nonce is None else nonce
    if not isinstance(nonce, str) or not _HEX_16.fullmatch(nonce):
        raise ArgumentError("nonce", nonce, "32 hex digits, or None")
    timestamp_ms = int(timestamp_s * 1000)
    digest = hashlib.sha256(body).digest()
    signature = _signature(secret, method, path, tenant, digest, audience, timestamp_ms, nonce)
    return {
        TENANT_HEADER: tenant.encode().hex(),
        TIMESTAMP_HEADER: str(timestamp_ms),
        NONCE_HEADER: nonce,
        DIGEST_HEADER: digest.hex(),
        SIGNATURE_HEADER: signature,
    }


def is_signed(headers: Mapping[str, str]) -> bool:
    """Whether a request claims to come from a replica; ``headers`` with lower-case names."""
    return SIGNATURE_HEADER in headers


def verify_head(
    secret: bytes,
    headers: Mapping[str, str],
    *,
    method: str,
    path: str,
    audience: str,
    now_s: float,
    guard: ReplayGuard,
    max_skew_s: float = 30.0,
) -> SignedHead:
    """Verify the headers of a signed request, without its body, and return what they say.

    ``headers`` have lower-case names (or ignore case); ``now_s`` is Unix seconds. Raises UnverifiedRequest if a header
    is missing or malformed, the signature is wrong, the time is off by more than ``max_skew_s``, or the nonce was seen
    before. The error has the reason, for the log and not for the sender.
    """
    tenant, timestamp_ms, nonce, digest, signature = _parsed(headers)
    expected = _signature(secret, method, path, tenant, digest, audience, timestamp_ms, nonce)
    if not hmac.compare_digest(expected.encode(), signature.encode()):
        raise UnverifiedRequest("the signature is not that of the request")
    if abs(now_s - timestamp_ms / 1000) > max_skew_s:
        raise UnverifiedRequest(f"signed more than {max_skew_s} s from now")
    if not guard.admit(nonce):
        raise UnverifiedRequest("seen before, or too many signed requests at once")
    return SignedHead(tenant, digest)


class RequestVerifier:
    """``verify_head`` with the secret, the clock and the guard of one process. Thread-safe."""

    def __init__(
        self, secret: bytes, *, max_skew_s: float = 30.0, wall: Clock = time.time, clock: Clock = monotonic
    ) -> None:
        self._secret = checked_secret(secret)
        check_number("max_skew_s", max_skew_s, 1e-3, 3600, "0.001 to 3600 seconds")
        self._max_skew_s = max_skew_s
        self._wall = wall
        self._guard = ReplayGuard(2 * max_skew_s, clock=clock)

    @property
    def num_nonces(self) -> int:
        """Number of remembered nonces."""
        return len(self._guard)

    def verify_head(self, headers: Mapping[str, str], *, method: str, path: str, audience: str) -> SignedHead:
        """Return the tenant and the body's digest, before the body is read. Raises UnverifiedRequest."""
        return verify_head(
            self._secret,
            headers,
            method=method,
            path=path,
            audience=audience,
            now_s=self._wall(),
            guard=self._guard,
            max_skew_s=self._max_skew_s,
        )

    def verify(
        self, headers: Mapping[str, str], *, method: str, path: str, body: bytes, audience: str
    ) -> str:
        """Return the tenant that a request with this body acts for. Raises UnverifiedRequest.

        A body that was not signed uses up no nonce.
        """
        digest = _parsed(headers)[3]
        SignedHead("", digest).check_body(body)
        return self.verify_head(headers, method=method, path=path, audience=audience).tenant


class ReplayGuard:
    """Remembers nonces for ``keep_s`` seconds: at least twice the allowed skew.

    Holds at most ``max_nonces``. When full it admits nothing, because forgetting a nonce would allow a replay. Only
    nonces under a valid signature are kept, so an outsider can't fill it. Time is monotonic: a wall clock that jumps
    ahead makes it forget nothing.
    """

    def __init__(self, keep_s: float, *, max_nonces: int = 65_536, clock: Clock = monotonic) -> None:
        check_number("keep_s", keep_s, 1e-3, 7200, "0.001 to 7200 seconds")
        self._keep_s = keep_s
        self._max_nonces = max_nonces
        self._clock = clock
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of remembered nonces; at most ``max_nonces``."""
        return len(self._seen)

    def admit(self, nonce: str) -> bool:
        """Return whether ``nonce`` is new, and remember it. Amortised O(1)."""
        with self._lock:
            now = self._clock()
            while self._seen and next(iter(self._seen.values())) <= now:
                self._seen.popitem(last=False)
            if nonce in self._seen or len(self._seen) >= self._max_nonces:
                return False
            self._seen[nonce] = now + self._keep_s
            return True


def _parsed(headers: Mapping[str, str]) -> tuple[str, int, str, bytes, str]:
    values = [headers.get(name) for name in SIGNED_HEADERS]
    missing = [name for name, value in zip(SIGNED_HEADERS, values, strict=True) if value is None]
    if missing:
        raise UnverifiedRequest(f"headers missing: {', '.join(missing)}")
    tenant, timestamp, nonce, digest, signature = (value or "" for value in values)
    is_formed = _TIMESTAMP.fullmatch(timestamp) and _HEX_16.fullmatch(nonce)
    if not (is_formed and _HEX_32.fullmatch(digest) and _HEX_32.fullmatch(signature)):
        raise UnverifiedRequest("a header is malformed")
    try:
        return bytes.fromhex(tenant).decode(), int(timestamp), nonce, bytes.fromhex(digest), signature
    except ValueError:
        raise UnverifiedRequest("the tenant header is malformed") from None


def _signature(
    secret: bytes,
    method: str,
    path: str,
    tenant: str,
    digest: bytes,
    audience: str,
    timestamp_ms: int,
    nonce: str,
) -> str:
    return mac(secret, "request", method.upper(), path, tenant, digest, audience, timestamp_ms, nonce).hex()
