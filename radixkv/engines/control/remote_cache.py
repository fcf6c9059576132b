"""An ``EngineCache`` in another process, over its control channel: a vLLM that ``radixkv serve`` supervises.

Tenants have the fleet's names here, and namespaces the clients' salts. The engine gets the ``cache_salt`` that
``make_salt`` makes of them, and knows digests alone. So this side keeps the namespaces that it has named: at most
MAX_NAMESPACES; the one that was used longest ago is cleared in the engine when there are more.

A request that the engine hasn't begun publishes under its salt later. So a cleared namespace gets another salt: what
such a request leaves is never matched.

After a restart the engine has nothing: ``restore`` sets the tenants again. Generations go on, in the salts.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from radixkv.clock import monotonic
from radixkv.config import Namespace, Tenant
from radixkv.engines.control.client import ControlClient
from radixkv.engines.control.tenants import digest_of
from radixkv.errors import (
    ArgumentError,
    CommandRefused,
    ControlError,
    LeaseError,
    NotResident,
    PinBudgetExceeded,
    PinLimitExceeded,
    QuotaExceeded,
    StaleGeneration,
)
from radixkv.index.bases import BaseInfo
from radixkv.index.endings import Endings
from radixkv.index.pins import Pin
from radixkv.index.snapshot import Snapshot
from radixkv.index.stats import CacheStats, TenantStats
from radixkv.index.tokens import TokenIds, encode
from radixkv.signing import KeySet
from radixkv.tenancy.salt import SaltReader, make_salt
from radixkv.uncopied import refuse_copies

MAX_NAMESPACES: Final = 65_536
MAX_CONNECTIONS: Final = 4
_IDLE_S: Final = 30.0
"""Seconds after which an unused connection is replaced. The engine closes it after 60."""
_SHORT_S: Final = 10.0
_LONG_S: Final = 3_600.0
_MAX_COUNT: Final = 2**63

Counts = TypeVar("Counts", CacheStats, TenantStats)
_NUMBERS: Mapping[str, Callable[..., Exception]] = {
    "NotResident": NotResident,
    "PinBudgetExceeded": PinBudgetExceeded,
    "PinLimitExceeded": PinLimitExceeded,
}


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a lookup."""

    num_tokens: int
    num_blocks: int


class ControlCache:
    """See ``EngineCache``. Thread-safe. Raises ControlError where there is no engine.

    Every call waits: a short one up to a step of the engine, or 20 ms. MAX_CONNECTIONS of them are made at a time.

    - ``path``: of the control socket. ``keys``: of all purposes.
    - ``model``: identity of the model in the engine's namespaces.
    """

    def __init__(self, path: Path, keys: KeySet, model: str) -> None:
        self._path, self._keys, self._model = path, keys, model
        self._reader = SaltReader(keys)
        self._idle: list[tuple[ControlClient, float]] = []
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._tenants: dict[str, Tenant] = {}
        self._generations: dict[str, int] = {}
        self._named: OrderedDict[Namespace, str] = OrderedDict()
        self.endings = Endings()
        self._naming = threading.Lock()

    def cache_salt(self, namespace: Namespace, as_of: int | None = None) -> str:
        """Return the salt of a namespace's requests, and remember the namespace.

        ``as_of``: see ``PrefixCache.open``.
        """
        with self._naming:
            if as_of is not None:
                self.endings.require_current(namespace, as_of)
            salt = self._named.get(namespace) or self._new_salt(namespace, namespace.salt)
            self._named[namespace] = salt
            self._named.move_to_end(namespace)
            oldest = self._named.popitem(last=False) if len(self._named) > MAX_NAMESPACES else None
        if oldest is not None:
            self._long("clear", {"model": self._model, "cache_salt": oldest[1]})
        return salt

    def _new_salt(self, namespace: Namespace, client_salt: str) -> str:
        generation = self._generations.get(namespace.tenant, 0)
        return make_salt(self._keys, namespace.tenant, generation, client_salt=client_salt)

    def restore(self) -> None:
        """Set all tenants again, in an engine that has just started."""
        self.close()
        for tenant in list(self._tenants.values()):
            self._set(tenant)

    def close(self) -> None:
        """End the connections that no call uses now."""
        with suppress(IndexError):
            while True:
                self._idle.pop()[0].close()

    def audit(self) -> list[str]:
        """Return which laws the engine's cache breaks."""
        found = self._long("audit", {}).get("violations")
        if not isinstance(found, list):
            raise _nonsense("audit")
        return [f"{each.get('law')}: {each.get('detail')}" for each in found if isinstance(each, dict)]

    # --- prefixes

    def match(self, namespace: Namespace, ids: TokenIds, /) -> Found:
        """Return how much of a prefix is resident."""
        try:
            answer = self._short("lookup", self._where(namespace), ids)
        except StaleGeneration:  # purged at this moment
            return Found(0, 0)
        return Found(_count(answer, "matched_tokens"), _count(answer, "matched_blocks"))

    def touch(self, namespace: Namespace, ids: TokenIds, /) -> int:
        """Count a use of what is resident."""
        try:
            return _count(self._short("touch", self._where(namespace), ids), "tokens")
        except StaleGeneration:  # purged at this moment
            return 0

    def clear(self, namespace: Namespace, /) -> int:
        """Forget a namespace. Its requests have another salt from now on."""
        where = self._where(namespace)
        with self._naming:
            self.endings.end_namespace(namespace)
            self._named[namespace] = self._new_salt(namespace, secrets.token_hex(16))
        return _count(self._long("clear", where), "blocks")

    def namespaces(self, tenant: str | None = None, /) -> list[Namespace]:
        """Return the namespaces that hold something."""
        with self._naming:
            named = [(each, salt) for each, salt in self._named.items() if tenant in (None, each.tenant)]
        held: set[str] = set()
        for name in dict.fromkeys(each.tenant for each, _ in named):
            after: int | None = 0
            while after is not None:
                page = self._short("namespaces", {"tenant": name, "after": after})
                held.update(_texts(page, "namespaces"))
                after = None if page.get("next") is None else _count(page, "next")
        return [each for each, salt in named if digest_of(self._there(salt)) in held]

    # --- pins

    def pin(self, namespace: Namespace, ids: TokenIds, ttl_s: float, /, *, as_of: int | None = None) -> Pin:
        """Keep a resident prefix for some seconds."""
        where = self._where(namespace) if as_of is None else self._where_still(namespace, as_of)
        answer = self._short("pin", {**where, "ttl_s": ttl_s}, ids)
        return _pin(answer, namespace)

    def unpin(self, pin: Pin, /) -> None:
        """End a pin."""
        self._short("unpin", {"tenant": self._tenant_there(pin.namespace.tenant), "id": pin.id})

    def pins(self, tenant: str | None = None, *, after: int = 0, limit: int | None = None) -> list[Pin]:
        """Return active pins, by id."""
        found: list[Pin] = []
        with self._naming:
            named = {
                digest_of(self._there(salt)): each
                for each, salt in self._named.items()
                if tenant in (None, each.tenant)
            }
        for name in [tenant] if tenant is not None else list(self._tenants):
            next_after: int | None = after
            while next_after is not None and (limit is None or len(found) < limit):
                page = self._short("pins", {"tenant": self._tenant_there(name), "after": next_after})
                pins = page.get("pins")
                if not isinstance(pins, list):
                    raise _nonsense("pins")
                for each in pins:
                    namespace = named.get(str(each.get("namespace"))) if isinstance(each, dict) else None
                    if namespace is not None:
                        found.append(_pin(each, namespace))
                next_after = None if page.get("next") is None else _count(page, "next")
        return found if limit is None else found[:limit]

    # --- tenants

    def add_tenant(self, tenant: Tenant, /) -> None:
        """Set a tenant's guarantee and limit."""
        self._set(tenant)
        self._tenants[tenant.id] = tenant

    def remove_tenant(self, tenant: str, /) -> None:
        """Forget a tenant and its settings. Its older salts are refused, also if it is added again."""
        self.purge(tenant)
        self._long("remove_tenant", {"tenant": tenant})
        self._tenants.pop(tenant, None)

    def purge(self, tenant: str, /) -> int:
        """Forget a tenant, and raise its generation: older salts are refused."""
        with self._naming:
            self.endings.end_tenant(tenant)
            generation = self._generations[tenant] = self._generations.get(tenant, 0) + 1
            for each in [each for each in self._named if each.tenant == tenant]:
                del self._named[each]
        return _count(self._long("purge", {"tenant": tenant, "generation": generation}), "blocks")

    def generation(self, tenant: str, /) -> int:
        """Return how often a tenant was purged."""
        return self._generations.get(tenant, 0)

    def tenants(self) -> list[str]:
        """Return the tenants that this side has named."""
        return list(self._tenants)

    def require_fit(self, tenant: str, num_blocks: int) -> None:
        """Raise QuotaExceeded if a request needs more blocks than its tenant may ever use."""
        settings = self._tenants.get(tenant)
        limit = None if settings is None else settings.limit
        if limit is not None and num_blocks > limit:
            stats = self.tenant_stats(tenant)
            raise QuotaExceeded(num_blocks, limit, stats.used_blocks, stats.evictable_blocks)

    def stats(self) -> CacheStats:
        """Return counts of the whole cache."""
        return _counts(CacheStats, self._short("stats", {}).get("cache"), {})

    def tenant_stats(self, tenant: str, /) -> TenantStats:
        """Return counts of one tenant."""
        found = self._short("tenants", {"tenant": tenant}).get("tenants")
        if not isinstance(found, list) or len(found) != 1:
            raise _nonsense("tenants")
        return _counts(TenantStats, found[0], {"tenant": tenant})

    # --- what it can't do

    def bases(self) -> list[BaseInfo]:
        """Return no bases."""
        return []

    def set_readers(self, base_id: str, readers: Iterable[str], /) -> None:
        """Never called without the ability ``publish``."""
        raise ArgumentError("base_id", base_id, "no base: this engine has none")

    def unpublish(self, base_id: str, /) -> None:
        """Never called without the ability ``publish``."""
        raise ArgumentError("base_id", base_id, "no base: this engine has none")

    def snapshot(self) -> Snapshot:
        """Never called without a fleet or events of this process."""
        raise ControlError("a snapshot isn't sent over a control channel")

    # --- the channel

    def _where(self, namespace: Namespace) -> dict[str, Any]:
        return {"model": self._model, "cache_salt": self.cache_salt(namespace)}

    def _where_still(self, namespace: Namespace, as_of: int) -> dict[str, Any]:
        return {"model": self._model, "cache_salt": self.cache_salt(namespace, as_of)}

    def _there(self, salt: str) -> Namespace:
        return self._reader.read(salt).namespace(self._model)

    def _tenant_there(self, tenant: str) -> str:
        return self._reader.tenant_ids(tenant)[0]

    def _set(self, tenant: Tenant) -> None:
        if tenant.policy is not None and not isinstance(tenant.policy, str):
            raise ArgumentError("policy", tenant.policy, "a name, for an engine in another process")
        given = {each.name: getattr(tenant, each.name) for each in fields(tenant) if each.name != "id"}
        self._short("set_tenant", {"tenant": tenant.id, **given})

    def _short(self, command: str, given: Mapping[str, Any], ids: TokenIds = b"") -> dict[str, Any]:
        """Send a short command over a connection that is kept."""
        key = encode(ids)
        try:
            with self._connection() as client:
                return client.call(command, given, key)
        except CommandRefused as error:
            raise _translated(error) from None

    @contextmanager
    def _connection(self) -> Iterator[ControlClient]:
        """Yield a connection that no other call uses. If one breaks, all unused ones are replaced."""
        with self._free:
            client = self._unused() or ControlClient(self._path, self._keys, timeout_s=_SHORT_S)
            is_whole = False
            try:
                yield client
                is_whole = True
            except CommandRefused:
                is_whole = True
                raise
            finally:
                if is_whole:
                    self._idle.append((client, monotonic()))
                else:
                    client.close()
                    self.close()

    def _unused(self) -> ControlClient | None:
        """Return the connection that was used last, unless that is long ago."""
        with suppress(IndexError):
            client, used_at = self._idle.pop()
            if monotonic() - used_at < _IDLE_S:
                return client
            client.close()
            self.close()
        return None

    def _long(self, command: str, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            with ControlClient(self._path, self._keys, timeout_s=_LONG_S) as client:
                return client.call(command, given)
        except CommandRefused as error:
            raise _translated(error) from None


refuse_copies(ControlCache, "it holds a socket. Make another")


def _translated(error: CommandRefused) -> Exception:
    """Return the engine's error as the cache would raise it here."""
    known = _NUMBERS.get(error.kind)
    if known is not None:
        try:
            return known(**error.numbers)
        except TypeError:
            return error
    if error.kind == "StaleSaltError":
        return StaleGeneration("the tenant was purged before its engine heard of this call")
    if error.kind == "LeaseError":
        return LeaseError(str(error))
    if error.kind in ("ArgumentError", "ConfigError"):
        return ArgumentError("the command", "…", "what its engine allows", problem=str(error))
    return error


def _nonsense(what: str) -> ControlError:
    return ControlError(f"the engine's answer to {what!r} has another form")


def _count(answer: Any, name: str) -> int:
    value = answer.get(name) if isinstance(answer, dict) else None
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise _nonsense(name)
    return value


def _texts(answer: dict[str, Any], name: str) -> list[str]:
    found = answer.get(name)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise _nonsense(name)
    return found


def _counts(kind: type[Counts], answer: Any, given: Mapping[str, Any]) -> Counts:
    numbers = {each.name: _count(answer, each.name) for each in fields(kind) if each.name not in given}
    return kind(**{**given, **numbers})


def _pin(answer: dict[str, Any], namespace: Namespace) -> Pin:
    ttl_s = answer.get("ttl_s")
    if not isinstance(ttl_s, (int, float)) or not 0 <= ttl_s < 1e12:
        raise _nonsense("pin")
    num_tokens, num_blocks = _count(answer, "num_tokens"), _count(answer, "num_blocks")
    return Pin(_count(answer, "id"), namespace, num_tokens, num_blocks, ttl_s)
