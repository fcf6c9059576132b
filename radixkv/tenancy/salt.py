"""Cache salts: the tenant of a request, for an engine that knows no tenants. A salt can't be made without the key.

vLLM and SGLang pass one free text of a request to their cache, its ``cache_salt``. A gateway that knows the tenant sets
it (``make_salt``). The adapter inside the engine reads it (``SaltReader``):

    rks1.      the prefix
    16 bytes   digest of the tenant, of HMAC-SHA256(key "digests", ("tenant", name)); the name itself is not in it
     7 bytes   generation of the tenant, big-endian
    16 bytes   digest of the name of a published base; zeros: none
    16 bytes   digest of the client's own salt, for this tenant
    32 bytes   HMAC-SHA256(key "salts", ("salt", all of the above)), compared in constant time

The bytes follow the prefix in URL-safe base64: always 116 characters, without padding or spare bits. So a salt has one
text, of SALT_CHARACTERS. vLLM's HTTP server takes at most 128.

A text that begins with ``rks``, in upper or lower case, is a salt or refused. Any other text is the tenant ANONYMOUS,
and names a namespace of that tenant; so does the absence of a salt. No digest has the name ANONYMOUS.

A salt is a bearer credential. The gateway must overwrite the field in every request, and show a salt to no client.

**Generations.** A purge raises the tenant's generation, and older salts are refused from then on. An engine learns the
newest generation from the control channel's purge (``SaltReader.raise_generation``), and from valid salts. The
generation is a part of the namespace, so a salt of a newer one finds nothing from before, even if the purge never
arrived. Generation 0 needs no memory. An engine that restarts forgets generations, together with all KV.
"""

from __future__ import annotations

import hmac
import re
import threading
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, NamedTuple

from radixkv.config import MAX_FIELD_BYTES, TENANT_ID_ALLOWED, Namespace, is_tenant_id
from radixkv.errors import ArgumentError, ConfigError, SaltError, StaleSaltError
from radixkv.signing import KeySet, is_text, mac

__all__ = ["ANONYMOUS", "SALT_CHARACTERS", "SaltOwner", "SaltReader", "make_salt"]

ANONYMOUS: Final = "anonymous"
"""The tenant of requests without a salt of the fleet."""
PREFIX: Final = "rks1."
SALT_CHARACTERS: Final = 121
"""Length of every salt."""
MAX_SALT_BYTES: Final = 512
"""Most bytes of a request's ``cache_salt``, also of an anonymous request."""
MAX_GENERATION: Final = 2**53 - 1
"""The highest generation: JSON and Redis keep it exactly."""

_DIGEST_BYTES = 16
_MAC_BYTES = 32
_GENERATION_BYTES = 7
_NO_BASE = bytes(_DIGEST_BYTES)
_SALT = re.compile(re.escape(PREFIX) + "[A-Za-z0-9_-]{116}")
_CLAIMED = re.compile("rks", re.IGNORECASE | re.ASCII)
_TENANT_ID = re.compile("t-[0-9a-f]{32}")


class SaltOwner(NamedTuple):
    """Whose request it is.

    - ``tenant``: ``t-`` and 32 hex digits, or ANONYMOUS. The cache's tenant id.
    - ``salt``: the namespace's salt: the generation, the base and the client's salt.
    - ``generation``: 0 for ANONYMOUS.
    - ``base``: ``b-`` and 32 hex digits of the base that the tenant may read; None: none.
    """

    tenant: str
    salt: str
    generation: int
    base: str | None

    def namespace(self, model: str, adapter: str | None = None, weights: int = 0) -> Namespace:
        """Return the owner's namespace. Raises NamespaceError."""
        return Namespace(self.tenant, model, adapter, self.salt, weights)


def make_salt(
    keys: KeySet, tenant: str, generation: int = 0, base: str | None = None, client_salt: str = ""
) -> str:
    """Return the salt of a tenant's request: SALT_CHARACTERS of ASCII, the same for the same arguments. About 15 µs.

    - ``keys``: of the purposes ``salts`` and ``digests``. The first of each is used.
    - ``base``: name of the published base that the tenant may read.
    - ``client_salt``: what the client sent, at most 1,024 bytes of UTF-8. Each has a namespace of its own.

    Raises ArgumentError, and ConfigError if keys are missing.
    """
    if not is_tenant_id(tenant) or is_engine_tenant(tenant):
        raise ArgumentError("tenant", tenant, f"{TENANT_ID_ALLOWED}; not the name of a tenant of engines")
    _check_generation(generation)
    for name, value in (("base", "" if base is None else base), ("client_salt", client_salt)):
        if not is_text(value) or len(value.encode()) > MAX_FIELD_BYTES:
            raise ArgumentError(name, value, f"a text of at most {MAX_FIELD_BYTES:,} bytes of UTF-8")
    digests, salts = keys.accepted("digests")[0], keys.accepted("salts")[0]
    payload = b"".join(
        (
            mac(digests, "tenant", tenant)[:_DIGEST_BYTES],
            generation.to_bytes(_GENERATION_BYTES, "big"),
            _NO_BASE if base is None else mac(digests, "base", base)[:_DIGEST_BYTES],
            mac(digests, "client salt", tenant, client_salt)[:_DIGEST_BYTES],
        )
    )
    return _signed(payload, salts)


def _signed(payload: bytes, key: bytes) -> str:
    return PREFIX + urlsafe_b64encode(payload + mac(key, "salt", payload)).decode()


def is_engine_tenant(name: str) -> bool:
    """Whether it is a tenant id that a SaltReader gives: ANONYMOUS, or made of a digest."""
    return name == ANONYMOUS or _TENANT_ID.fullmatch(name) is not None


class SaltReader:
    """Reads the salts of requests inside an engine. Thread-safe.

    - ``keys``: of the purpose ``salts``; of ``digests`` too if tenants are purged by name.
    - ``allows_anonymous``: whether requests without a salt of the fleet are served, as ANONYMOUS.
    - ``max_tenants``: most tenants with a generation above 0, about 250 bytes each. No generation is ever forgotten in
      favour of another one. When all are in use, further such tenants are refused.

    Raises ConfigError.
    """

    def __init__(self, keys: KeySet, *, allows_anonymous: bool = True, max_tenants: int = 65_536) -> None:
        if not isinstance(max_tenants, int) or isinstance(max_tenants, bool) or max_tenants < 1:
            raise ConfigError("max_tenants", max_tenants, "an integer, at least 1")
        self.allows_anonymous, self._max_tenants = bool(allows_anonymous), max_tenants
        self._generations: dict[str, int] = {}
        self._lock = threading.Lock()
        self.use(keys)

    @property
    def num_tenants(self) -> int:
        """Tenants whose generation is above 0."""
        return len(self._generations)

    def use(self, keys: KeySet) -> None:
        """Accept these keys from now on, and no others. Known generations stay. Raises ConfigError."""
        digests = keys.accepted("digests") if "digests" in keys.purposes else ()
        self._salts, self._digests = keys.accepted("salts"), digests

    def read(self, cache_salt: str | None) -> SaltOwner:
        """Return whose request it is. About 10 µs with one key.

        Raises SaltError for a salt that no holder of an accepted key made, or of an older generation than the newest
        known. Raises it for an anonymous request too, if those are switched off or ``cache_salt`` has more than
        MAX_SALT_BYTES.
        """
        if cache_salt is None:
            return self._anonymous("")
        is_short = isinstance(cache_salt, str) and len(cache_salt) <= MAX_SALT_BYTES
        if not is_short or not is_text(cache_salt):
            raise SaltError(f"cache_salt is not a text of at most {MAX_SALT_BYTES} bytes of UTF-8")
        if _CLAIMED.match(cache_salt) is None:
            return self._anonymous(cache_salt)
        payload = self._verified(cache_salt)
        tenant = f"t-{payload[:_DIGEST_BYTES].hex()}"
        end = _DIGEST_BYTES + _GENERATION_BYTES
        generation = int.from_bytes(payload[_DIGEST_BYTES:end], "big")
        self._meet(tenant, generation)
        base, client_salt = payload[end : end + _DIGEST_BYTES], payload[end + _DIGEST_BYTES :]
        salt = f"{generation}.{base.hex()}.{client_salt.hex()}"
        return SaltOwner(tenant, salt, generation, None if base == _NO_BASE else f"b-{base.hex()}")

    def cache_salt(self, tenant: str, salt: str) -> str | None:
        """Return the ``cache_salt`` of a tenant id and its namespaces' salt; None if there is none. About 15 µs."""
        if tenant == ANONYMOUS:
            return salt or None
        generation, base, client_salt = salt.split(".")
        payload = b"".join(
            (
                bytes.fromhex(tenant.removeprefix("t-")),
                int(generation).to_bytes(_GENERATION_BYTES, "big"),
                bytes.fromhex(base),
                bytes.fromhex(client_salt),
            )
        )
        return _signed(payload, self._salts[0])

    def generation(self, tenant: str) -> int:
        """Return the newest known generation of a tenant id, 0 if none is known."""
        return self._generations.get(tenant, 0)

    def tenant_ids(self, tenant: str) -> list[str]:
        """Return the ids of a tenant by its name, under each accepted key. An id is returned as it is.

        Raises ArgumentError for what can't be a tenant's name. Raises ConfigError for a name if there are no keys of
        the purpose ``digests``.
        """
        if not is_tenant_id(tenant):
            raise ArgumentError("tenant", tenant, TENANT_ID_ALLOWED)
        if is_engine_tenant(tenant):
            return [tenant]
        if not self._digests:
            raise ConfigError("keys", "…", "keys of the purpose 'digests', to find a tenant by its name")
        return [f"t-{mac(key, 'tenant', tenant)[:_DIGEST_BYTES].hex()}" for key in self._digests]

    def raise_generation(self, tenant: str, generation: int) -> int:
        """Refuse the salts of a tenant id that are older than ``generation``.

        Returns the newest known generation, which never falls. Raises ArgumentError, and SaltError if ``max_tenants``
        others have one.
        """
        if not isinstance(tenant, str) or not _TENANT_ID.fullmatch(tenant):
            raise ArgumentError("tenant", tenant, "a tenant id of this reader, other than ANONYMOUS")
        _check_generation(generation)
        self._note(tenant, generation)
        return self.generation(tenant)

    def _anonymous(self, text: str) -> SaltOwner:
        if len(text.encode()) > MAX_SALT_BYTES:
            raise SaltError(f"cache_salt is not a text of at most {MAX_SALT_BYTES} bytes of UTF-8")
        if not self.allows_anonymous:
            raise SaltError(
                "this engine serves no request without a cache_salt that the fleet's gateway made"
            )
        return SaltOwner(ANONYMOUS, text, 0, None)

    def _verified(self, text: str) -> bytes:
        """Return what the MAC of a salt covers. Raises SaltError, the same for every forgery."""
        is_formed = _SALT.fullmatch(text) is not None
        content = urlsafe_b64decode(text[len(PREFIX) :]) if is_formed else bytes(0)
        payload, found = content[:-_MAC_BYTES], content[-_MAC_BYTES:]
        is_made = [hmac.compare_digest(mac(key, "salt", payload), found) for key in self._salts]
        if not any(is_made):
            raise SaltError("cache_salt was not made with a key of this fleet")
        return payload

    def _meet(self, tenant: str, generation: int) -> None:
        if generation > self.generation(tenant):
            self._note(tenant, generation)
        if generation < self.generation(tenant):
            raise StaleSaltError("cache_salt is older than the last purge of its tenant")

    def _note(self, tenant: str, generation: int) -> None:
        with self._lock:
            known = self._generations.get(tenant, 0)
            if not known and generation and len(self._generations) >= self._max_tenants:
                raise SaltError(
                    f"{self._max_tenants} other tenants have generations, and none may be forgotten"
                )
            if generation > known:
                self._generations[tenant] = generation


def _check_generation(generation: object) -> None:
    if (
        not isinstance(generation, int)
        or isinstance(generation, bool)
        or not 0 <= generation <= MAX_GENERATION
    ):
        raise ArgumentError("generation", generation, f"an integer from 0 to {MAX_GENERATION}")
