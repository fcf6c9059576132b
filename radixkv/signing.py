"""Everything that is signed: MACs over framed fields, keys by purpose, and requests from replica to replica.

**Keys.** The fleet's secret stays with the fleet. A key of a purpose is HMAC-SHA256(secret, ("key", purpose)). Fields
are framed with type and length, and every use has its own label, so inputs of two uses never coincide. An engine that
runs elsewhere gets a ``KeySet``: the keys of PURPOSES, from which neither the secret nor another key can be computed.

    salts      MACs of cache salts                 ``radixkv.tenancy.salt``
    digests    digests of tenants in salts         ``radixkv.tenancy.salt``
    control    both sides of the control channel   ``radixkv.engines.control.server``
    events     messages about an engine's blocks
    records    hashes of blocks in recorded traffic

To rotate, give each side the keys of the new secret and of the previous one, in this order. A signer uses the first,
a verifier accepts all. When every side has them, drop the previous one.

**Signed requests** are fresh, and valid once. The receiver takes the tenant from the signature instead of a bearer key.
So the signature covers everything that decides what happens: method, path with query, tenant, digest of the body, time,
nonce, and the audience. The audience names one registration of one replica. A recorded request is useless at another
replica, after a restart, a second time, or ``max_skew_s`` later.

The body's digest is a separate header. So the receiver verifies the headers before it reads the body
(``RequestVerifier.verify_head``), and compares the body with the digest afterwards (``SignedHead.check_body``).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from radixkv.clock import Clock, monotonic
from radixkv.errors import ArgumentError, ConfigError, UnverifiedRequest
from radixkv.uncopied import refuse_copies

__all__ = ["PURPOSES", "KeySet"]  # public; the rest is for the packages above

MIN_SECRET_BYTES: Final = 16
_MAX_SECRET_BYTES: Final = 65_536
PURPOSES: Final = ("salts", "digests", "control", "events", "records")
"""Purposes of the keys that an engine may get."""
MAX_KEYS: Final = 4
"""Most keys of one purpose: the current one, and some that are still accepted."""
KEY_BYTES: Final = 32

_MAX_FILE_BYTES = 16_384

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


def is_text(value: object) -> bool:
    """Whether it is a string without lone surrogates, which have no UTF-8 form and can't be framed."""
    return isinstance(value, str) and (value.isascii() or value.encode("utf-8", "ignore").decode() == value)


def frame(*fields: str | int | bytes) -> bytes:
    """Encode the fields as unambiguous bytes: type, length and content of each."""
    parts = []
    for value in fields:
        kind, content = _content(value)
        parts.append(kind + len(content).to_bytes(8, "little") + content)
    return b"".join(parts)


def _content(value: str | int | bytes) -> tuple[bytes, bytes]:
    if isinstance(value, str):
        return b"s", value.encode()
    if isinstance(value, int):
        return b"i", b"%d" % value
    return b"b", value


def checked_secret(secret: object) -> bytes:
    """Return ``secret``. Raises ConfigError, without quoting it, if it is not bytes or too short."""
    if not isinstance(secret, bytes) or len(secret) < MIN_SECRET_BYTES:
        size = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ConfigError("fleet_secret", size, f"at least {MIN_SECRET_BYTES} bytes")
    return secret


def shown_path(text: str) -> str:
    """Return the path of a secret's file for messages, or "…" for a text that may be the secret itself. Never raises.

    Shown are existing paths, and misspelled names in an existing folder. Not in the root: a secret in base64 may begin
    with a slash.
    """
    folder = text.rpartition("/")[0]
    is_path = mode_of(text) is not None or (folder.strip("/") and stat.S_ISDIR(mode_of(folder) or 0))
    return text if is_path or not text else "…"


def mode_of(path: str) -> int | None:
    """Return the mode of what is at a path; None if nothing is, or nothing can be. Never raises, unlike Path.exists."""
    try:
        return Path(path).stat().st_mode
    except (OSError, ValueError):  # for example a name that is too long
        return None


def read_secret(
    option: str, path: str, least: int = MIN_SECRET_BYTES, most: int = _MAX_SECRET_BYTES
) -> bytes:
    """Return the secret in a file, without the white space around it: ``least`` to ``most`` bytes.

    Raises ConfigError, which names ``option``. It shows no secret, also where ``path`` is the secret itself.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ConfigError(option, shown_path(path), "a regular file")  # a FIFO would be waited for
        with Path(path).open("rb") as file:
            secret = file.read(most + 1).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        raise ConfigError(option, shown_path(path), f"a file that can be read ({reason})") from None
    if not least <= len(secret) <= most:
        raise ConfigError(option, shown_path(path), f"a file that holds {least} to {most:,} bytes")
    return secret


def mac(secret: bytes, label: str, *fields: str | int | bytes) -> bytes:
    """Return the HMAC-SHA256 of the framed label and fields: 32 bytes.

    It doesn't use ``hmac.digest``, because that releases the interpreter's lock for its microsecond. If another thread
    is busy, it takes milliseconds to get the lock back, for each of several digests of every tenant that the publisher
    meets.
    """
    return hmac.new(secret, frame(label, *fields), "sha256").digest()


def derived(secret: bytes, purpose: str) -> bytes:
    """Return the key of one purpose: 32 bytes, from which the secret can't be computed."""
    return mac(secret, "key", purpose)


class KeySet:
    """Keys by purpose, of each the current one first and then those that are still accepted. Immutable.

    ``keys``: for each purpose 1 to MAX_KEYS keys of 32 bytes. Raises ConfigError, which quotes no key.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: Mapping[str, Sequence[bytes]]) -> None:
        self._keys = {purpose: tuple(of) for purpose, of in keys.items()}
        for purpose, of in self._keys.items():
            if purpose not in PURPOSES:
                raise ConfigError("purpose", purpose, ", ".join(PURPOSES))
            is_key = [isinstance(key, bytes) and len(key) == KEY_BYTES for key in of]
            if not 1 <= len(of) <= MAX_KEYS or not all(is_key) or len(set(of)) < len(of):
                raise ConfigError(
                    f"keys of {purpose}", "…", f"1 to {MAX_KEYS} different keys of {KEY_BYTES} bytes"
                )

    def __repr__(self) -> str:
        return f"KeySet({', '.join(f'{purpose}: {len(of)}' for purpose, of in self._keys.items())})"

    @classmethod
    def derive(cls, fleet_secrets: Sequence[bytes], purposes: Iterable[str] = PURPOSES) -> KeySet:
        """Derive the keys of some purposes from the fleet's secrets: the current one, then previous ones.

        Raises ConfigError for an unknown purpose and for invalid or too many secrets.
        """
        for secret in fleet_secrets:
            checked_secret(secret)
        return cls({purpose: [derived(secret, purpose) for secret in fleet_secrets] for purpose in purposes})

    @classmethod
    def load(cls, path: Path | str) -> KeySet:
        """Read the file that ``write`` wrote. O(1): at most 16 KiB are read.

        Raises ConfigError if the file can't be read, isn't such a file, isn't owned by this user (or root), or if its
        group or others have any access to it.
        """
        try:
            with open(path, "rb", opener=open_private) as file:
                content = file.read(_MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no path"
            allowed = f"a file of keys that can be read ({reason})"
            raise ConfigError("keys", shown_path(str(path)), allowed) from None
        try:
            keys = _parsed_keys(content)
        except (ValueError, RecursionError):
            raise ConfigError("keys", str(path), "a file that `radixkv keys derive` wrote") from None
        return cls(keys)

    def write(self, path: Path | str) -> None:
        """Write the keys to a file that only this user can read (mode 0600), and replace it atomically.

        Raises OSError.
        """
        document = {purpose: [key.hex() for key in of] for purpose, of in self._keys.items()}
        write_private(path, json.dumps(document, indent=2).encode() + b"\n")

    @property
    def purposes(self) -> tuple[str, ...]:
        """The purposes that this set has keys of."""
        return tuple(self._keys)

    def accepted(self, purpose: str) -> tuple[bytes, ...]:
        """Return the keys that a verifier accepts; the first is the signer's. Raises ConfigError if there are none."""
        if purpose not in self._keys:
            raise ConfigError("keys", list(self._keys), f"keys of the purpose {purpose!r}")
        return self._keys[purpose]


def write_private(path: Path | str, content: bytes, is_current: Callable[[], bool] = lambda: True) -> None:
    """Replace a file by one that only this user can read (mode 0600). A symbolic link stays, and its target changes.

    Readers find the old content or the new one, also after a crash. ``is_current()``: asked just before; if False,
    BlockingIOError is raised. Raises OSError; then the old file is there.
    """
    target = Path(path).resolve()
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if not is_current():
            raise BlockingIOError(errno.EAGAIN, "another writer has just changed it; try again")
        new.replace(target)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def key_id(key: bytes) -> bytes:
    """Return 16 bytes that name a key and reveal nothing else of it."""
    return mac(key, "key id")[:16]


def _parsed_keys(content: bytes) -> dict[str, list[bytes]]:
    """Return the keys in the content of a file. Raises ValueError, RecursionError."""
    document = json.loads(content) if len(content) <= _MAX_FILE_BYTES else None
    if not isinstance(document, dict):
        raise ValueError("not an object")
    keys: dict[str, list[bytes]] = {}
    for purpose, texts in document.items():
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise ValueError("not a list of texts")
        keys[purpose] = [bytes.fromhex(each) for each in texts]
    return keys


def open_private(path: str, flags: int) -> int:
    """Open a regular file that only this user (or root) owns and can access; a new one has mode 0600.

    Returns its descriptor. Raises OSError; a pipe or a device can't block it.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "it is not a regular file"
    elif status.st_uid not in (os.geteuid(), 0):
        problem = "another user owns it"
    elif status.st_mode & 0o077:
        problem = "other users can access it; run chmod 600 on it"
    if problem is not None:
        os.close(descriptor)
        raise PermissionError(0, problem)
    return descriptor


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
        if not is_text(value):
            raise ArgumentError(name, value, "a string")
    if not isinstance(body, bytes):
        raise ArgumentError("body", body, "a bytes")
    if not _is_number(timestamp_s, 0.0, 1e12) or timestamp_s == 0.0:
        raise ArgumentError("timestamp_s", timestamp_s, "a number of seconds > 0, at most 1e+12")
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
        if not _is_number(max_skew_s, 1e-3, 3600):
            raise ConfigError("max_skew_s", max_skew_s, "0.001 to 3600 seconds")
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


refuse_copies(RequestVerifier, "a copy would accept a request that this one has seen. Pass it on")


class ReplayGuard:
    """Remembers nonces for ``keep_s`` seconds: at least twice the allowed skew.

    Holds at most ``max_nonces``. When full it admits nothing, because forgetting a nonce would allow a replay. Only
    nonces under a valid signature are kept, so an outsider can't fill it. Time is monotonic: a wall clock that jumps
    ahead makes it forget nothing.
    """

    def __init__(self, keep_s: float, *, max_nonces: int = 65_536, clock: Clock = monotonic) -> None:
        if not _is_number(keep_s, 1e-3, 7200):
            raise ConfigError("keep_s", keep_s, "0.001 to 7200 seconds")
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


refuse_copies(ReplayGuard, "a copy would accept a request that this one has seen. Pass it on")


def _is_number(value: float, low: float, high: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and bool(low <= value <= high)


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
