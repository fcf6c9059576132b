"""Commands of the control channel about tenants: their settings, counts and pins. ``control`` says what each answers.

A tenant has the cache's name, or with a SaltReader also the fleet's: then a command is about its ids under all
keys that the engine accepts. Commands that change settings do so for each id, or for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from hashlib import sha256
from typing import Any, Final

from radixkv.config import MAX_PINS, NO_OWN_DTYPE, Namespace, Tenant, require_loaded
from radixkv.errors import ArgumentError, RadixKVError
from radixkv.index.cache import PrefixCache
from radixkv.index.pins import Pin
from radixkv.index.tenant_settings import require_removable
from radixkv.tenancy.salt import SaltReader
from radixkv.tiers.tiered_cache import TieredCache

MAX_PAGE: Final = 32
"""Most tenants or pins in an answer: half a millisecond of an engine's step."""
MAX_NAMES: Final = 1_000
"""Most namespaces in an answer."""

Fields = Mapping[str, Any]
Answer = dict[str, Any]

SETTINGS: Final = frozenset(each.name for each in dataclass_fields(Tenant)) - {"id"}


class TenantCommands:
    """The commands about the tenants of one cache. ``follow``: called with each whose settings have changed."""

    def __init__(
        self,
        cache: PrefixCache,
        salts: SaltReader | None,
        follow: Callable[[str], None] = lambda tenant: None,
    ) -> None:
        self._cache, self._salts, self._follow = cache, salts, follow

    def names(self, fields: Fields) -> list[str]:
        """Return the cache's names of the tenant in a command. Raises ArgumentError, ConfigError."""
        tenant = text_of(fields, "tenant")
        return [tenant] if self._salts is None else self._salts.tenant_ids(tenant)

    def counts(self, fields: Fields, ids: bytes) -> Answer:
        """``after``: how many tenants to skip, in the order in which the cache met them. ``tenant``: only this one."""
        if "tenant" in fields:
            return {"tenants": [self._counts(name) for name in self.names(fields)], "next": None}
        after = number_of(fields, "after", 0, 2**53, 0)
        limit = number_of(fields, "limit", 1, MAX_PAGE, MAX_PAGE)
        names = self._cache.tenants()
        following = after + limit if after + limit < len(names) else None
        return {"tenants": [self._counts(name) for name in names[after : after + limit]], "next": following}

    def _counts(self, name: str) -> Answer:
        settings = self._cache.tenant(name)
        counts = asdict(self._cache.tenant_stats(name))
        return {"tenant": name, "mode": "burst" if settings is None else settings.mode, **counts}

    def set(self, fields: Fields, ids: bytes) -> Answer:
        """Set guarantee, limits, mode and policy; what is left out gets its default."""
        given = {name: fields[name] for name in SETTINGS if fields.get(name) is not None}
        if "policy" in given:
            require_loaded("policy", text_of(fields, "policy"))
        refuse_removed(fields)
        given.setdefault("max_pins", MAX_PINS)
        names, done = self.names(fields), list[str]()
        before = [self._cache.tenant(name) for name in names]
        try:
            for name in names:
                self._cache.add_tenant(Tenant(name, **given))
                done.append(name)
        except RadixKVError:
            for name, old in zip(done, before, strict=False):
                if old is None:
                    self._cache.remove_tenant(name)
                else:
                    self._cache.add_tenant(old)
            raise
        for name in names:
            self._follow(name)
        return {"tenants": names}

    def removable(self, fields: Fields) -> list[str]:
        """Return the cache's names of a tenant that ``remove`` would forget. Raises ArgumentError for another one."""
        names = self.names(fields)
        for name in names:
            require_removable(self._cache, name)
        return names

    def remove(self, fields: Fields, ids: bytes) -> Answer:
        """Forget a tenant's settings, and what it has. All ids are checked before the first is forgotten."""
        names = self.removable(fields)
        for name in names:
            self._cache.remove_tenant(name)
            self._follow(name)
        return {"tenants": names}

    def pins(self, fields: Fields, ids: bytes) -> Answer:
        """``after``: the id of the last pin that is left out."""
        after = number_of(fields, "after", 0, 2**53, 0)
        limit = number_of(fields, "limit", 1, MAX_PAGE, MAX_PAGE)
        found = self._cache.pins(text_of(fields, "tenant"), after=after, limit=limit + 1)
        page = found[:limit]
        return {
            "pins": [self._shown(each) for each in page],
            "next": page[-1].id if len(found) > limit else None,
        }

    def _shown(self, pin: Pin) -> Answer:
        return {
            "id": pin.id,
            "num_tokens": pin.num_tokens,
            "num_blocks": pin.num_blocks,
            "ttl_s": pin.ttl_s,
            "namespace": digest_of(pin.namespace),
        }

    def namespaces(self, fields: Fields, ids: bytes) -> Answer:
        """``after``: how many to skip."""
        after = number_of(fields, "after", 0, 2**53, 0)
        found = [each for name in self.names(fields) for each in self._cache.namespaces(name)]
        following = after + MAX_NAMES if after + MAX_NAMES < len(found) else None
        return {
            "namespaces": [digest_of(each) for each in found[after : after + MAX_NAMES]],
            "next": following,
        }


def refuse_removed(fields: Fields) -> None:
    """Raise ArgumentError for a field that earlier versions had, with what to use in its place."""
    if fields.get("tier_dtype") is not None:
        raise ArgumentError("tier_dtype", fields["tier_dtype"], NO_OWN_DTYPE)


def is_known_to(cache: PrefixCache, tenant: str) -> bool:
    """Whether a cache has met a tenant, or its own disk has records of it."""
    return cache.tenant(tenant) is not None or (isinstance(cache, TieredCache) and cache.is_on_disk(tenant))


def still_owes(cache: PrefixCache, tenant: str) -> bool:
    """Whether a cache's own disk may still have what a purge or a clear of a tenant was to destroy."""
    return isinstance(cache, TieredCache) and bool(cache.pending(tenant))


def digest_of(namespace: Namespace) -> str:
    """Return a name of a namespace, of 32 hex digits, the same for all versions of the weights.

    A namespace itself may be longer than an answer.
    """
    return sha256(namespace._replace(weights=0).framed()).hexdigest()[:32]


def number_of(fields: Fields, name: str, low: int, high: int, default: int | None) -> int:
    """Return an integer of a command. Raises ArgumentError."""
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ArgumentError(name, value, f"an integer from {low} to {high}")
    return value


def text_of(fields: Fields, name: str) -> str:
    """Return a text of a command. Raises ArgumentError."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise ArgumentError(name, value, "a string")
    return value
