"""Bearer keys, and the principals that they belong to.

A Keyring maps SHA-256 digests of keys to principals: the operator, or one tenant. The keys themselves are not kept. A
presented key is hashed and compared with *every* digest in constant time. So the time reveals neither how much of a key
was right nor its owner. The tenant of a request comes only from here, and so do a tenant's settings.

The file is JSON: ``{"operator": ENTRY, "tenants": {"acme": ENTRY}}``. An entry is a key, or an object with a list of
``keys`` and, for a tenant, its settings (``schemas.tenants.TenantSettings``). A key is its text, or ``sha256:`` and
the 64 hex digits of its digest, or an object with ``sha256``, ``prefix`` and ``created``, the form that radixkv writes.
Without ``operator``, the operator's endpoints can't be used.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from radixkv.config import is_tenant_id
from radixkv.errors import ConfigError, shown
from radixkv.service.problems import place_of
from radixkv.service.schemas.tenants import TenantSettings

DEMO_KEYS: Mapping[str, str] = {"acme": "demo-acme", "globex": "demo-globex"}
"""Keys of the two demo tenants. Public knowledge: served on loopback only."""
DEMO_OPERATOR_KEY = "demo-operator"
OPERATOR_ACCOUNT = "\x00operator"
"""The operator's name where tenants are identified by name: for its lanes and its bases.

No tenant can have this name, because names of tenants are printable.
"""
DEMO_PINNED_BLOCKS = 1024
"""Blocks that each demo tenant may pin: a quarter of the default pool."""

KEY_HEADERS = ("authorization", "x-api-key", "x-goog-api-key")
"""Headers that may have the key: of OpenAI's clients, of Anthropic's and of Google's. A query never has it."""

_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}\Z")
_KEY = re.compile(r"[\x21-\x7e]{1,512}\Z")
_KEY_ALLOWED = "a key of 1 to 512 visible ASCII characters without spaces, or sha256: and 64 hex digits"
_NOTE = re.compile(r"[\x21-\x7e]{0,40}\Z")
_NOTE_ALLOWED = "an object with sha256 (64 hex digits), and prefix and created as up to 40 ASCII characters"
_MAX_TENANT_BYTES = 256
TENANT_ALLOWED = (
    f"an id of 1 to {_MAX_TENANT_BYTES} bytes of printable text without '/', without a space at either end, "
    "other than '.' and '..'"
)


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller: a tenant, or the operator (``tenant`` is None)."""

    tenant: str | None

    @property
    def is_operator(self) -> bool:
        """Whether this is the operator."""
        return self.tenant is None

    @property
    def place(self) -> str:
        """The place of its entry in a keys file."""
        return "operator" if self.tenant is None else f"tenants.{self.tenant}"


@dataclass(frozen=True, slots=True)
class Key:
    """A key without its text: its digest, owner, beginning, and creation time if known."""

    digest: bytes
    principal: Principal
    prefix: str | None = None
    created: str | None = None

    @classmethod
    def of(cls, text: str, principal: Principal, created: str | None = None) -> Key:
        """Make the record of a key. Its prefix has at most a quarter of the key.

        If that is fewer than 8 characters, 6 digits of the id identify the key.
        """
        key = cls(hashlib.sha256(text.encode("ascii")).digest(), principal, created=created)
        beginning = text[: min(8, len(text) // 4)]
        return replace(key, prefix=beginning if len(beginning) == 8 else f"{beginning}..{key.id[:6]}")

    @property
    def id(self) -> str:
        """The key's name for the operator: 16 hex digits that reveal neither key nor digest."""
        return hashlib.blake2b(self.digest, digest_size=8, person=b"radixkv key id").hexdigest()

    def document(self) -> dict[str, str | None]:
        """Return the key in the form of a keys file."""
        return {"sha256": self.digest.hex(), "prefix": self.prefix, "created": self.created}


class Keyring:
    """Keys and tenants.

    Immutable; ``authenticate`` is O(keys). Raises ConfigError if two principals have the same key.
    """

    def __init__(
        self, keys: Iterable[Key], settings: Mapping[str, TenantSettings], place: str = "keys"
    ) -> None:
        self.keys, self.settings = tuple(keys), dict(settings)
        _refuse_shared_keys(self.keys, place)
        self.key_ids = frozenset(key.id for key in self.keys)

    @classmethod
    def demo(cls) -> Keyring:
        """Make a keyring of two demo tenants, which may pin, and a demo operator, with public keys."""
        tenants = {
            tenant: {"keys": [key], "max_pinned_blocks": DEMO_PINNED_BLOCKS}
            for tenant, key in DEMO_KEYS.items()
        }
        return cls.from_document({"operator": DEMO_OPERATOR_KEY, "tenants": tenants}, "demo keys")

    @classmethod
    def load(cls, path: Path) -> Keyring:
        """Load the keyring of a keys file. Raises ConfigError with the place, never with a key."""
        place = str(path)
        try:
            document = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique_names)
        except OSError as error:
            raise ConfigError("keys", place, f"a readable file ({error.strerror})") from None
        except _DuplicateName as error:
            raise ConfigError("keys", place, f"each name once; {error.name!r} occurs twice") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError("keys", place, f"a JSON object ({_reason(error)})") from None
        return cls.from_document(document, place)

    @classmethod
    def from_document(cls, document: object, place: str) -> Keyring:
        """Make the keyring of a parsed keys file; errors name ``place`` as its source. Raises ConfigError."""
        if not isinstance(document, dict):
            raise ConfigError("keys", place, "a JSON object with operator and tenants")
        _refuse_unknown(document, ("operator", "tenants"), place)
        tenants = document.get("tenants")
        if not isinstance(tenants, dict) or not (tenants or "operator" in document):
            raise ConfigError("keys", f"{place}: tenants", "an object that names at least one tenant")
        keys: list[Key] = []
        settings: dict[str, TenantSettings] = {}
        for name, entry in tenants.items():
            principal = tenant_named(name)
            if principal is None:
                problem = (
                    f"{place}: tenants: the id {shown(name, 80)} is not allowed; allowed: {TENANT_ALLOWED}"
                )
                raise ConfigError("keys", place, TENANT_ALLOWED, problem=problem)
            found, rest = _entry(entry, principal, f"{place}: {principal.place}")
            keys += found
            settings[name] = _settings(rest, f"{place}: {principal.place}")
        if "operator" in document:
            found, rest = _entry(document["operator"], Principal(None), f"{place}: operator")
            _refuse_unknown(rest, (), f"{place}: operator")
            keys += found
        return cls(keys, settings, place)

    def document(self) -> dict[str, Any]:
        """Return the keys file of this keyring: digests, no keys."""
        keys: dict[Principal, list[dict[str, str | None]]] = {}
        for key in self.keys:
            keys.setdefault(key.principal, []).append(key.document())
        return {
            "operator": {"keys": keys.get(Principal(None), [])},
            "tenants": {
                name: {
                    "keys": keys.get(Principal(name), []),
                    **settings.model_dump(exclude_defaults=True),
                }
                for name, settings in self.settings.items()
            },
        }

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of all tenants, in the file's order."""
        return tuple(self.settings)

    def of(self, principal: Principal) -> list[Key]:
        """Return the keys of one principal. O(keys)."""
        return [key for key in self.keys if key.principal == principal]

    def authenticate(self, authorization: str | None) -> Principal | None:
        """Return the principal of an ``Authorization`` header, or None. Always compares every digest."""
        key = self.find(authorization)
        return None if key is None else key.principal

    def find(self, authorization: str | None) -> Key | None:
        """Return the key in an ``Authorization`` header, or None. Always compares every digest."""
        scheme, _, key = (authorization or "").partition(" ")
        presented = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Key | None = None
        for each in self.keys:
            if hmac.compare_digest(each.digest, presented):
                found = each
        return found if scheme.lower() == "bearer" and key.strip() else None


def presented_key(headers: Mapping[str, Sequence[str]]) -> str | None:
    """Return the one key of a request, as an ``Authorization`` header; None if it has none, or different ones.

    ``headers``: the values of each of KEY_HEADERS that the request has. A header that occurs twice counts as no key.
    """
    if any(len(values) != 1 for values in headers.values()):
        return None
    found = {_authorization(name, values[0]) for name, values in headers.items()}
    return found.pop() if len(found) == 1 else None


def _authorization(name: str, value: str) -> str:
    scheme, _, key = value.partition(" ") if name == "authorization" else ("Bearer", "", value)
    return f"{scheme.capitalize()} {key.strip()}"


def is_key(text: str) -> bool:
    """Whether it may be a key's text."""
    return _KEY.match(text) is not None


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
    """Return a JSON error's message without the text that it quotes, which may be a key."""
    return (
        str(error).splitlines()[0][:120] if isinstance(error, json.JSONDecodeError) else type(error).__name__
    )


def _entry(entry: object, principal: Principal, place: str) -> tuple[list[Key], dict[str, Any]]:
    """Return the keys of an entry, and its other fields."""
    if not isinstance(entry, dict):
        return [_key(entry, principal, place)], {}
    keys = entry.get("keys")
    if not isinstance(keys, list):
        raise ConfigError("keys", f"{place}.keys", "a list of keys")
    found = [_key(key, principal, f"{place}.keys[{index}]") for index, key in enumerate(keys)]
    return found, {name: value for name, value in entry.items() if name != "keys"}


def _key(value: object, principal: Principal, place: str) -> Key:
    if isinstance(value, dict):
        return _written_key(value, principal, place)
    if isinstance(value, str) and _DIGEST.match(value):
        return Key(bytes.fromhex(value.removeprefix("sha256:")), principal)
    if not isinstance(value, str) or value.startswith("sha256:") or not is_key(value):
        raise ConfigError("keys", place, _KEY_ALLOWED)
    return Key.of(value, principal)


def _written_key(value: Mapping[str, Any], principal: Principal, place: str) -> Key:
    _refuse_unknown(value, ("sha256", "prefix", "created"), place)
    digest, notes = value.get("sha256"), (value.get("prefix"), value.get("created"))
    is_digest = isinstance(digest, str) and _DIGEST.match(f"sha256:{digest}")
    if not is_digest or not all(
        note is None or (isinstance(note, str) and _NOTE.match(note)) for note in notes
    ):
        raise ConfigError("keys", place, _NOTE_ALLOWED)
    return Key(bytes.fromhex(str(digest)), principal, *notes)


def _settings(values: Mapping[str, Any], place: str) -> TenantSettings:
    try:
        return TenantSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join((place, *map(str, place_of(first))))
        raise ConfigError("keys", where, f"settings of a tenant ({first['msg']})") from None


def tenant_named(name: str) -> Principal | None:
    """Return the tenant of that id; None if no tenant can have it (see TENANT_ALLOWED)."""
    is_short = (
        name.isprintable() and len(name.encode()) <= _MAX_TENANT_BYTES
    )  # text without a UTF-8 form isn't printable
    return Principal(name) if is_short and name == name.strip() and is_tenant_id(name) else None


def _refuse_unknown(document: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    unknown = sorted(set(document) - set(known))
    if unknown:
        names = " and ".join(known) or "keys"
        raise ConfigError("keys", place, f"only the names {names}; it has {unknown[0]!r}")


def _refuse_shared_keys(keys: Iterable[Key], place: str) -> None:
    owners: dict[bytes, str] = {}
    for key in keys:
        who = key.principal.place
        if key.digest in owners:
            raise ConfigError(
                "keys", f"{place}: {who}", f"a key that no other entry has; {owners[key.digest]} has the same"
            )
        owners[key.digest] = who
