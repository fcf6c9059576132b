"""Bearer keys, and who they stand for.

A Keyring maps SHA-256 digests of keys to principals: the operator, or one tenant. Keys themselves are not
kept. A presented key is hashed and compared with *every* digest in constant time, so the time it takes tells
neither how much of a key was right nor whose it is. The tenant of a request comes from here and from nowhere
else.

The file is JSON: ``{"operator": "…", "tenants": {"acme": "…"}}``; each value is a key or ``sha256:`` and the
64 hex digits of its digest. ``operator`` may be left out: then nobody may use the operator's endpoints.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

DEMO_KEYS: Mapping[str, str] = {"acme": "demo-acme", "globex": "demo-globex"}
"""Keys of the two demo tenants. Public knowledge: served on loopback only."""
DEMO_OPERATOR_KEY = "demo-operator"

_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}\Z")
_KEY = re.compile(r"[\x21-\x7e]{1,512}\Z")
_KEY_ALLOWED = "a key of 1 to 512 visible ASCII characters without spaces, or sha256: and 64 hex digits"
_MAX_TENANT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is calling: a tenant, or the operator (``tenant`` is None)."""

    tenant: str | None

    @property
    def is_operator(self) -> bool:
        """Whether this is the operator."""
        return self.tenant is None


class Keyring:
    """Digests of keys and whom they stand for. Immutable; ``authenticate`` is O(keys)."""

    def __init__(self, digests: Iterable[tuple[bytes, Principal]]) -> None:
        self._digests = tuple(digests)

    @classmethod
    def demo(cls) -> Keyring:
        """Two demo tenants and a demo operator, with keys that everybody knows."""
        return cls.from_document({"operator": DEMO_OPERATOR_KEY, "tenants": dict(DEMO_KEYS)}, "demo keys")

    @classmethod
    def load(cls, path: Path) -> Keyring:
        """The keyring of a keys file. Raises ConfigError that names the place, never a key."""
        place = str(path)
        try:
            document = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique_names)
        except OSError as error:
            raise ConfigError("keys", place, f"a readable file ({error.strerror})") from None
        except _DuplicateName as error:
            raise ConfigError("keys", place, f"each name once; {error.name!r} is there twice") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError("keys", place, f"a JSON object ({_reason(error)})") from None
        return cls.from_document(document, place)

    @classmethod
    def from_document(cls, document: object, place: str) -> Keyring:
        """The keyring of a parsed keys file; ``place`` is where errors say it came from. Raises ConfigError."""
        if not isinstance(document, dict):
            raise ConfigError("keys", place, "a JSON object with operator and tenants")
        unknown = sorted(set(document) - {"operator", "tenants"})
        if unknown:
            raise ConfigError("keys", place, f"the names operator and tenants only; it has {unknown[0]!r}")
        tenants = document.get("tenants")
        if not isinstance(tenants, dict) or not tenants:
            raise ConfigError("keys", f"{place}: tenants", "an object that names at least one tenant")
        entries = [
            (_digest(key, f"{place}: tenants.{name}"), _tenant(name, place)) for name, key in tenants.items()
        ]
        if "operator" in document:
            entries.append((_digest(document["operator"], f"{place}: operator"), Principal(None)))
        _refuse_shared_keys(entries, place)
        return cls(entries)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of all tenants, in the file's order."""
        return tuple(principal.tenant for _, principal in self._digests if principal.tenant is not None)

    def authenticate(self, authorization: str | None) -> Principal | None:
        """Whom an ``Authorization`` header stands for, or None. Looks at every digest, whatever it finds."""
        scheme, _, key = (authorization or "").partition(" ")
        presented = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Principal | None = None
        for digest, principal in self._digests:
            if hmac.compare_digest(digest, presented):
                found = principal
        return found if scheme.lower() == "bearer" and key.strip() else None


class _DuplicateName(Exception):
    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _DuplicateName(name)
        found[name] = value
    return found


def _reason(error: Exception) -> str:
    """What a JSON error says, without the text it is about (that may be a key)."""
    return (
        str(error).splitlines()[0][:120] if isinstance(error, json.JSONDecodeError) else type(error).__name__
    )


def _digest(key: object, place: str) -> bytes:
    if isinstance(key, str) and _DIGEST.match(key):
        return bytes.fromhex(key.removeprefix("sha256:"))
    if not isinstance(key, str) or key.startswith("sha256:") or not _KEY.match(key):
        raise ConfigError("keys", place, _KEY_ALLOWED)
    return hashlib.sha256(key.encode("ascii")).digest()


def _tenant(name: str, place: str) -> Principal:
    if not name or not name.isprintable() or len(name.encode("utf-8")) > _MAX_TENANT_BYTES:
        raise ConfigError("keys", f"{place}: tenants", "tenant names of 1 to 256 bytes of printable text")
    return Principal(name)


def _refuse_shared_keys(entries: list[tuple[bytes, Principal]], place: str) -> None:
    owners: dict[bytes, str] = {}
    for digest, principal in entries:
        who = "operator" if principal.tenant is None else f"tenants.{principal.tenant}"
        if digest in owners:
            raise ConfigError("keys", f"{place}: {who}", f"a key of its own; {owners[digest]} has the same")
        owners[digest] = who
