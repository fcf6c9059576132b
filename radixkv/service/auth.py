"""Bearer keys, and the principals that they belong to.

A Keyring maps SHA-256 digests of keys to principals: the operator, or one tenant. The keys themselves are not kept. A
presented key is hashed and compared with *every* digest in constant time. So the time reveals neither how much of a key
was right nor its owner. The tenant of a request comes only from here, and so do a tenant's settings.

The file is JSON: ``{"operator": ENTRY, "tenants": {"acme": ENTRY}}``. An entry is a key, or an object with a list of
``keys`` and, for a tenant, its settings (``schemas.tenants.TenantSettings``) and its ``incarnation``. A key is its
text, or ``sha256:`` and the 64 hex digits of its digest, or an object with ``sha256``, ``prefix`` and ``created``, the
form that radixkv writes. Without ``operator``, the operator's endpoints can't be used.

The incarnation is 16 hex digits that radixkv makes when it first sees a tenant. A tenant that is removed and made again
under the same name has another one, so nobody takes the new tenant for the old one.

A ``KeysFile`` is what a file says, read as far as it can be: one bad entry hides no other. What can't be read stays in
the file when radixkv writes it. A ``Keyring`` is what is in force.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_INCARNATION = re.compile(r"[0-9a-f]{16}\Z")
_INCARNATION_ALLOWED = (
    "the 16 hex digits that radixkv wrote, which no other tenant has; leave it out of an entry that you write"
)
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
    """The keys and tenants in force. Immutable; ``authenticate`` is O(keys).

    ``pending``: names of tenants of whose entries not everything is in force, and the reasons. Such a tenant has the
    settings that it had before. If it had none, it isn't in ``settings``, and isn't served.
    """

    def __init__(
        self,
        keys: Iterable[Key],
        settings: Mapping[str, TenantSettings],
        incarnations: Mapping[str, str] | None = None,
        pending: Mapping[str, str] | None = None,
    ) -> None:
        self.keys, self.settings = tuple(keys), dict(settings)
        self._incarnations, self.pending = dict(incarnations or {}), dict(pending or {})
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
        return cls.from_document(read_document(path), str(path))

    @classmethod
    def from_document(cls, document: object, place: str) -> Keyring:
        """Make the keyring of a parsed keys file; errors name ``place`` as its source. Raises ConfigError."""
        file = KeysFile.parse(document, place)
        file.require_sound()
        return file.ring()

    def incarnation(self, tenant: str) -> str:
        """Return the 16 hex digits that tell a tenant from an earlier one of its name.

        Empty for a tenant that isn't in force, and for one that no keys file names, such as those of the demo.
        """
        return self._incarnations.get(tenant, "")

    def less(self, wanted: Keyring) -> Keyring:
        """Return this ring without the keys and the tenants that ``wanted`` no longer has."""
        same = {
            name
            for name in self.settings
            if name in wanted.settings and self.incarnation(name) == wanted.incarnation(name)
        }
        left = {(key.digest, key.principal) for key in wanted.keys}
        keys = [
            key
            for key in self.keys
            if (key.digest, key.principal) in left
            and (key.principal.tenant in same or key.principal.tenant not in self.settings)
        ]
        settings = {name: each for name, each in self.settings.items() if name in same}
        return Keyring(keys, settings, self._incarnations, self.pending)

    def refusing(self, refused: Mapping[str, str], before: Keyring) -> Keyring:
        """Return this ring with the settings of ``before`` for tenants whose own were refused for a reason."""
        settings = {
            name: before.settings[name] if name in refused else each
            for name, each in self.settings.items()
            if name not in refused or name in before.settings
        }
        return Keyring(self.keys, settings, self._incarnations, {**self.pending, **refused})

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of all tenants that are served, in the file's order."""
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


@dataclass(frozen=True, slots=True)
class Entry:
    """What a keys file says of one principal, read as far as it can be.

    ``settings``: None if they can't be read. ``rest``, ``unread``: the fields and the keys that can't be read, as they
    stand in the file.
    """

    keys: tuple[Key, ...] = ()
    incarnation: str = ""
    settings: TenantSettings | None = field(default_factory=TenantSettings)
    rest: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[Any, ...] = ()
    problems: tuple[ConfigError, ...] = ()

    @classmethod
    def parse(cls, value: object, principal: Principal, place: str) -> Entry:
        """Read an entry of a parsed file."""
        keys: list[Key] = []
        unread: list[Any] = []
        problems: list[ConfigError] = []
        fields = dict(value) if isinstance(value, dict) else {}
        given = fields.pop("keys", None) if isinstance(value, dict) else [value]
        if not isinstance(given, list):
            problems.append(ConfigError("keys", f"{place}.keys", "a list of keys"))
            given, unread = [], [] if given is None else [[given]]
        for index, each in enumerate(given):
            try:
                keys.append(
                    _key(each, principal, f"{place}.keys[{index}]" if isinstance(value, dict) else place)
                )
            except ConfigError as error:
                problems.append(error)
                unread.append(each)
        incarnation, rest = "", {}
        if principal.tenant is not None and "incarnation" in fields:
            incarnation = fields.pop("incarnation")
            if not isinstance(incarnation, str) or not _INCARNATION.match(incarnation):
                problems.append(ConfigError("keys", f"{place}.incarnation", _INCARNATION_ALLOWED))
                incarnation, rest = "", {"incarnation": incarnation}
        settings: TenantSettings | None = None
        try:
            if principal.tenant is None:
                _refuse_unknown(fields, (), place)
            settings = _settings(fields, place)
        except ConfigError as error:
            problems.append(error)
            rest = {**fields, **rest}
        return cls(tuple(keys), incarnation, settings, rest, tuple(unread), tuple(problems))

    def without(self, key: Key, problem: ConfigError) -> Entry:
        """Return the entry with a key that counts as unreadable."""
        keys = tuple(each for each in self.keys if each is not key)
        unread = (*self.unread, key.document())
        return replace(self, keys=keys, unread=unread, problems=(*self.problems, problem))

    def set(self, settings: TenantSettings) -> Entry:
        """Return the entry with other settings."""
        rest = {name: value for name, value in self.rest.items() if name == "incarnation"}
        return replace(self, settings=settings, rest=rest)

    def document(self) -> dict[str, Any]:
        """Return the entry as radixkv writes it."""
        settings = {} if self.settings is None else self.settings.model_dump(exclude_defaults=True)
        named = {"incarnation": self.incarnation} if self.incarnation else {}
        return {
            "keys": [*(key.document() for key in self.keys), *self.unread],
            **named,
            **settings,
            **self.rest,
        }


@dataclass(frozen=True, slots=True)
class KeysFile:
    """What a keys file says. Immutable.

    ``rest``: names beside ``operator`` and ``tenants``. ``problems``: what is wrong outside the entries of tenants.
    """

    operator: Entry | None
    tenants: Mapping[str, Entry]
    rest: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[ConfigError, ...] = ()

    @classmethod
    def parse(cls, document: object, place: str) -> KeysFile:
        """Read a parsed file; errors name ``place`` as its source. Raises ConfigError if it isn't a keys file."""
        if not isinstance(document, dict):
            raise ConfigError("keys", place, "a JSON object with operator and tenants")
        rest = {name: value for name, value in document.items() if name not in ("operator", "tenants")}
        problems = []
        try:
            _refuse_unknown(document, ("operator", "tenants"), place)
        except ConfigError as error:
            problems.append(error)
        tenants = document.get("tenants")
        allowed = "an object that names at least one tenant"
        if not isinstance(tenants, dict):
            raise ConfigError("keys", f"{place}: tenants", allowed)
        if not tenants and "operator" not in document:
            problems.append(ConfigError("keys", f"{place}: tenants", allowed))
        entries = {
            name: Entry.parse(value, Principal(name), f"{place}: tenants.{name}")
            for name, value in tenants.items()
        }
        for name in entries:
            if tenant_named(name) is None:
                entries[name] = replace(entries[name], problems=(_misnamed(name, place),))
        operator = None
        if "operator" in document:
            operator = Entry.parse(document["operator"], Principal(None), f"{place}: operator")
            problems += operator.problems
        return cls(operator, entries, rest, tuple(problems))._told_apart(place)

    @classmethod
    def of(cls, ring: Keyring) -> KeysFile:
        """Return a file that says what a ring has. O(keys + tenants)."""
        keys: dict[Principal, list[Key]] = {}
        for key in ring.keys:
            keys.setdefault(key.principal, []).append(key)
        tenants = {
            name: Entry(tuple(keys.get(Principal(name), ())), ring.incarnation(name), settings)
            for name, settings in ring.settings.items()
        }
        own = keys.get(Principal(None))
        return cls(None if own is None else Entry(tuple(own)), tenants)

    def require_sound(self) -> None:
        """Raise the first ConfigError of anything that is wrong in the file."""
        for problem in (
            *(each for entry in self.tenants.values() for each in entry.problems),
            *self.problems,
        ):
            raise problem

    def ring(self, before: Keyring | None = None) -> Keyring:
        """Return the keyring of this file. O(keys + tenants).

        A tenant whose settings can't be read has those of ``before``, if it is the same tenant there. Otherwise it is
        left out of ``settings``.
        """
        keys = [] if self.operator is None else [*self.operator.keys]
        settings: dict[str, TenantSettings] = {}
        incarnations: dict[str, str] = {}
        pending: dict[str, str] = {}
        before = before or Keyring((), {})
        taken = {entry.incarnation for entry in self.tenants.values()}
        for name, entry in self.tenants.items():
            if entry.problems:
                pending[name] = str(entry.problems[0])
            if tenant_named(name) is None:
                continue
            keys += entry.keys
            known = before.incarnation(name)
            incarnations[name] = entry.incarnation or ("" if known in taken else known)
            found, is_known = entry.settings, name in before.settings and incarnations[name] == known
            if found is None or (not incarnations[name] and "incarnation" in entry.rest):
                found = before.settings[name] if is_known else None
            if found is not None:
                settings[name] = found
        return Keyring(keys, settings, incarnations, pending)

    def document(self) -> dict[str, Any]:
        """Return the file as radixkv writes it: digests, no keys."""
        tenants = {name: entry.document() for name, entry in self.tenants.items()}
        own = {} if self.operator is None else {"operator": self.operator.document()}
        return {**own, "tenants": tenants, **self.rest}

    def with_entry(self, principal: Principal, entry: Entry) -> KeysFile:
        """Return the file with another entry of a principal. A new tenant gets an incarnation."""
        if principal.tenant is None:
            return replace(self, operator=entry)
        if principal.tenant not in self.tenants:
            entry = replace(entry, incarnation=new_incarnation())
        return replace(self, tenants={**self.tenants, principal.tenant: entry})

    def entry(self, principal: Principal) -> Entry:
        """Return the entry of a principal; an empty one if the file has none."""
        found = self.operator if principal.tenant is None else self.tenants.get(principal.tenant)
        return Entry() if found is None else found

    def find(self, key_id: str) -> tuple[Entry, Key] | None:
        """Return a key and the entry that has it. O(keys)."""
        for entry in (*self.tenants.values(), self.entry(Principal(None))):
            for key in entry.keys:
                if key.id == key_id:
                    return entry, key
        return None

    @property
    def unnamed(self) -> list[str]:
        """Names of tenants that have no incarnation yet."""
        return [
            name
            for name, entry in self.tenants.items()
            if not entry.incarnation and "incarnation" not in entry.rest and tenant_named(name) is not None
        ]

    def named(self, incarnations: Mapping[str, str]) -> KeysFile:
        """Return the file with these incarnations, by tenant."""
        tenants = {
            name: replace(entry, incarnation=incarnations.get(name, entry.incarnation))
            for name, entry in self.tenants.items()
        }
        return replace(self, tenants=tenants)

    def without(self, names: Iterable[str]) -> KeysFile:
        """Return the file without these tenants."""
        left_out = set(names)
        tenants = {name: entry for name, entry in self.tenants.items() if name not in left_out}
        return replace(self, tenants=tenants)

    def _told_apart(self, place: str) -> KeysFile:
        """Return the file where no two tenants have one key or one incarnation: what two have counts for neither."""
        tenants, operator, problems = dict(self.tenants), self.operator, self.problems
        holders: dict[bytes, list[Key]] = {}
        for entry in (*tenants.values(), self.entry(Principal(None))):
            for key in entry.keys:
                holders.setdefault(key.digest, []).append(key)
        for first, *others in holders.values():
            if not others:
                continue
            allowed = f"a key that no other entry has; {first.principal.place} has the same"
            problem = ConfigError("keys", f"{place}: {others[0].principal.place}", allowed)
            is_ones_own = all(key.principal == first.principal for key in others)
            for key in others if is_ones_own else (first, *others):
                if key.principal.tenant is not None:
                    tenants[key.principal.tenant] = tenants[key.principal.tenant].without(key, problem)
                elif operator is not None:
                    operator, problems = operator.without(key, problem), (*problems, problem)
        owners: dict[str, list[str]] = {}
        for name, entry in tenants.items():
            owners.setdefault(entry.incarnation, []).append(name)
        for incarnation, names in owners.items():
            for name in names if incarnation and len(names) > 1 else ():
                problem = ConfigError("keys", f"{place}: tenants.{name}.incarnation", _INCARNATION_ALLOWED)
                rest = {**tenants[name].rest, "incarnation": incarnation}
                problems_of = (*tenants[name].problems, problem)
                tenants[name] = replace(tenants[name], incarnation="", rest=rest, problems=problems_of)
        return replace(self, tenants=tenants, operator=operator, problems=problems)


def read_document(path: Path) -> object:
    """Return what a file has as JSON, with each name once. Raises ConfigError, which quotes no key."""
    place = str(path)
    try:
        return json.loads(path.read_text("utf-8"), object_pairs_hook=_unique_names)
    except OSError as error:
        raise ConfigError("keys", place, f"a readable file ({error.strerror})") from None
    except _DuplicateName as error:
        raise ConfigError("keys", place, f"each name once; {shown(error.name, 80)} occurs twice") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("keys", place, f"a JSON object ({_reason(error)})") from None


def with_incarnations(document: Any, incarnations: Mapping[str, str]) -> dict[str, Any]:
    """Return a parsed keys file with incarnations, by tenant. All else is as it was, also keys in plain text."""
    tenants = dict(document["tenants"])
    for name, incarnation in incarnations.items():
        entry = tenants[name]
        tenants[name] = {
            **(entry if isinstance(entry, dict) else {"keys": [entry]}),
            "incarnation": incarnation,
        }
    return {**document, "tenants": tenants}


def new_incarnation() -> str:
    """Return a random incarnation."""
    return secrets.token_hex(8)


def lasting_incarnation(tenant: str) -> str:
    """Return the incarnation of a tenant that a file names without one at the start, or that can't be written.

    It depends on the name alone, because nothing else of an entry stays when its keys and settings change.
    """
    return hashlib.blake2b(tenant.encode(), digest_size=8, person=b"radixkv tenant").hexdigest()


def _misnamed(name: str, place: str) -> ConfigError:
    problem = f"{place}: tenants: the id {shown(name, 80)} is not allowed; allowed: {TENANT_ALLOWED}"
    return ConfigError("keys", place, TENANT_ALLOWED, problem=problem)


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
