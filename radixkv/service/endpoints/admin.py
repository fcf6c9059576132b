"""Endpoints of the operator, to change keys and tenants while the service runs.

A key is shown once, when it is made; from then on only its id and a prefix are shown. A change is in force, and in the
keys file, before it is answered. Requests in progress with a removed key end normally.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from radixkv.errors import ArgumentError, ConfigError, CoordinationError, UnreadableRecord, refusal
from radixkv.service.auth import TENANT_ALLOWED, Key, Principal, tenant_named
from radixkv.service.endpoint import Call, Endpoint, reply
from radixkv.service.key_store import FileBusy, KeyRefused, UnknownKey
from radixkv.service.problems import (
    OUTAGE_RETRY_AFTER_S,
    ApiError,
    invalid,
    not_found,
    store_unavailable,
)
from radixkv.service.schemas.keys import KeyReply, KeysReply, NewKeyReply
from radixkv.service.schemas.tenants import (
    PurgeReply,
    PurgeStateReply,
    TenantReply,
    TenantSettings,
    TenantsReply,
    UnservedTenantReply,
)

if TYPE_CHECKING:
    from radixkv.coordination.purges import Purge
    from radixkv.service.auth import Keyring
    from radixkv.service.core import Service
    from radixkv.service.fleet.quotas import Quotas

T = TypeVar("T")


async def list_keys(call: Call[Service]) -> Response:
    """List all keys with id, prefix and owner, but not the keys themselves."""
    call.query()
    keys = call.host.keyring.keys
    return reply(await call.host.threads.administer(lambda: KeysReply(keys=[_shown(key) for key in keys])))


async def create_operator_key(call: Call[Service]) -> Response:
    """Create another key of the operator. Only this answer shows it."""
    call.query()
    return await _created(call, Principal(None))


async def create_key(call: Call[Service]) -> Response:
    """Create another key of a tenant, and the tenant if it doesn't exist. Only this answer shows the key."""
    call.query()
    return await _created(call, _tenant(call))


async def rotate_key(call: Call[Service]) -> Response:
    """Replace a key by a new one. The old key is refused from now on. Only this answer shows the new key."""
    call.query()
    key_id = call.request.path_params["key"]
    text, key = await _changed(call, lambda: call.host.keys.rotate(key_id), "key")
    return reply(NewKeyReply(key=text, **_shown(key).model_dump()))


async def revoke_key(call: Call[Service]) -> Response:
    """Revoke a key: it is refused from now on."""
    call.query()
    key_id = call.request.path_params["key"]
    await _changed(call, lambda: call.host.keys.revoke(key_id), "key")
    return Response(status_code=204)


async def list_tenants(call: Call[Service]) -> Response:
    """List all tenants with their settings."""
    call.query()

    quotas = call.host.quotas

    def everybody() -> TenantsReply:
        ring = call.host.keyring
        num_keys = Counter(key.principal.tenant for key in ring.keys)
        return TenantsReply(
            tenants=[
                _tenant_reply(ring, quotas, name, settings, num_keys[name])
                for name, settings in ring.settings.items()
            ],
            unserved=[
                UnservedTenantReply(tenant=name, pending=reason)
                for name, reason in ring.pending.items()
                if name not in ring.settings
            ],
        )

    return reply(await call.host.threads.administer(everybody))


async def put_tenant(call: Call[Service]) -> Response:
    """Create a tenant, or replace its settings. A field that is left out gets its default. The keys stay.

    Settings that this replica can't keep now are refused. `pending` says what else of the tenant isn't in force here.
    Other replicas that share the keys file apply the settings within two seconds. One that can't keep them goes on with
    those it had, doesn't serve a new tenant, and tries again every second. Its `GET /v1/tenants` says why.
    """
    call.query()
    tenant = str(_tenant(call).tenant)
    settings = (await call.read(TenantSettings)).body
    await _changed_tenant(call, tenant, lambda: call.host.keys.put_tenant(tenant, settings))
    ring = call.host.keyring
    in_force, num_keys = ring.settings.get(tenant, settings), len(ring.of(Principal(tenant)))
    return reply(_tenant_reply(ring, call.host.quotas, tenant, in_force, num_keys))


async def purge_tenant(call: Call[Service]) -> Response:
    """Remove everything that a tenant has cached, on all replicas.

    From now on, this replica and all replicas in `confirmed` match nothing of it. The request goes to every live
    replica at once. The answer names those that have confirmed so far. `GET` shows the progress. The purge is complete
    when no replica is `pending`. A replica in `unconfirmed` may still run, cut off from the store. It then serves what
    it has, unless the tenant's `on_unconfirmed_generation` is `refuse`. A purge may be repeated.

    `owed` says that this replica's disk couldn't destroy the tenant's records yet. It serves none of them, tries again,
    and is `pending` until then.
    """
    call.query()
    return reply(await _purged(call, _known_tenant(call)))


async def purge_state(call: Call[Service]) -> Response:
    """Return the progress of a tenant's last purge. It is complete when every live replica has confirmed.

    A replica in `unconfirmed` is not counted as live, but it may still run, cut off from the store.
    """
    call.query()
    tenant = _known_tenant(call)
    try:
        purge = await call.host.threads.administer(partial(call.host.fleet.coordinator.purge_report, tenant))
    except CoordinationError as error:
        raise store_unavailable(f"the progress of the purge is unknown: {error}") from None
    return reply(PurgeStateReply(**_state(purge, is_owed=call.host.owes(tenant))))


async def remove_tenant(call: Call[Service]) -> Response:
    """Remove a tenant, its keys, and everything that it has cached, on all replicas.

    If the other replicas can't be informed, or the disk here can't destroy its records yet, the answer is 503 and the
    tenant stays. Then revoke its keys one by one.
    """
    call.query()
    tenant = _known_tenant(call)
    if (await _purged(call, tenant)).owed:
        message = (
            "purged, but the disk hasn't destroyed the tenant's records yet, so the tenant stays: try again"
        )
        raise ApiError(503, "not_saved", message, retry_after_s=OUTAGE_RETRY_AFTER_S)
    await _changed_tenant(call, tenant, lambda: call.host.keys.remove_tenant(tenant))
    with suppress(CoordinationError):  # remains of its last requests; upkeep tries again
        await call.host.purges.purge_removed(waits=True)
    return Response(status_code=204)


async def _changed_tenant(call: Call[Service], tenant: str, change: Callable[[], object]) -> None:
    """Change a tenant, then write its quota to the store. Raises ApiError.

    The quota is written before the answer, so that a later change on any replica counts as later. If the store is
    away, it is written once the store is back.
    """

    await _changed(call, change, "tenant")
    with suppress(CoordinationError):
        await call.host.threads.administer(partial(call.host.quotas.say, tenant))


async def _purged(call: Call[Service], tenant: str) -> PurgeReply:
    """Purge here, then in the store, then notify the others. Raises ApiError 503 with the reason if the store fails."""
    try:
        num_blocks, purge = await call.host.purges.purge(tenant)
    except CoordinationError as error:
        reason = str(error)
        if isinstance(error, UnreadableRecord):
            reason = "no replica wrote the store's record of the tenant's generation, and it was replaced"
        message = f"purged here and on the reachable replicas, but not confirmed: {reason}. Purge again"
        raise store_unavailable(message) from None
    return PurgeReply(blocks=num_blocks, **_state(purge, is_owed=call.host.owes(tenant)))


def _state(purge: Purge, *, is_owed: bool) -> dict[str, Any]:
    return {
        "generation": purge.generation,
        "complete": purge.is_complete,
        "confirmed": list(purge.confirmed),
        "pending": list(purge.pending),
        "unconfirmed": list(purge.unconfirmed),
        "owed": is_owed,
    }


def _known_tenant(call: Call[Service]) -> str:
    tenant, ring = _tenant(call).tenant, call.host.keyring
    if tenant not in ring.settings and tenant not in ring.pending:
        raise not_found("tenant")
    return str(tenant)


async def _created(call: Call[Service], principal: Principal) -> Response:
    text, key = await _changed(call, lambda: call.host.keys.create(principal), "tenant")
    return reply(NewKeyReply(key=text, **_shown(key).model_dump()), 201)


async def _changed(call: Call[Service], change: Callable[[], T], what: str) -> T:
    """Make a change, in a thread because it is written to disk. Raises ApiError."""
    try:
        return await call.host.threads.change_keys(change)
    except UnknownKey:
        raise not_found(what) from None
    except KeyRefused as error:
        raise ApiError(409, "conflict", str(error)) from None
    except ArgumentError as error:
        raise invalid(str(error), error.argument, error.value, error.allowed) from None
    except ConfigError as error:
        raise ApiError(409, "conflict", str(error), field=error.setting, allowed=error.allowed) from None
    except FileBusy as error:
        raise ApiError(503, "not_saved", str(error), retry_after_s=OUTAGE_RETRY_AFTER_S) from None
    except OSError as error:
        message = f"the keys file can't be written: {error.strerror}"
        raise ApiError(503, "not_saved", message, retry_after_s=OUTAGE_RETRY_AFTER_S) from None


def _tenant(call: Call[Service]) -> Principal:
    name = call.path_text("tenant")
    tenant = tenant_named(name)
    if tenant is None:
        raise invalid(refusal("tenant", name, TENANT_ALLOWED), "tenant", name, TENANT_ALLOWED)
    return tenant


def _shown(key: Key) -> KeyReply:
    return KeyReply(id=key.id, tenant=key.principal.tenant, prefix=key.prefix, created=key.created)


def _tenant_reply(
    ring: Keyring, quotas: Quotas, tenant: str, settings: TenantSettings, num_keys: int
) -> TenantReply:
    return TenantReply(
        tenant=tenant,
        settings=settings.model_copy(update={"fleet_blocks": quotas.limit(tenant)}),
        num_keys=num_keys,
        granted_blocks=quotas.granted(tenant),
        pending=ring.pending.get(tenant),
    )


ENDPOINTS = (
    Endpoint("GET", "/v1/keys", list_keys, "List keys", "operator", {200: KeysReply}, errors=(422,)),
    Endpoint(
        "POST",
        "/v1/keys",
        create_operator_key,
        "Create a key of the operator",
        "operator",
        {201: NewKeyReply},
        errors=(409, 422, 503),
    ),
    Endpoint(
        "POST",
        "/v1/keys/{key}/rotate",
        rotate_key,
        "Replace a key",
        "operator",
        {200: NewKeyReply},
        errors=(404, 409, 422, 503),
    ),
    Endpoint(
        "DELETE",
        "/v1/keys/{key}",
        revoke_key,
        "Revoke a key",
        "operator",
        {204: None},
        errors=(404, 409, 422, 503),
    ),
    Endpoint(
        "GET", "/v1/tenants", list_tenants, "List tenants", "operator", {200: TenantsReply}, errors=(422,)
    ),
    Endpoint(
        "POST",
        "/v1/tenants/{tenant}/keys",
        create_key,
        "Create a key of a tenant",
        "operator",
        {201: NewKeyReply},
        errors=(409, 422, 503),
    ),
    Endpoint(
        "PUT",
        "/v1/tenants/{tenant}",
        put_tenant,
        "Create or change a tenant",
        "operator",
        {200: TenantReply},
        body=TenantSettings,
        errors=(409, 503),
    ),
    Endpoint(
        "DELETE",
        "/v1/tenants/{tenant}",
        remove_tenant,
        "Remove a tenant",
        "operator",
        {204: None},
        errors=(404, 409, 422, 503),
    ),
    Endpoint(
        "POST",
        "/v1/tenants/{tenant}/purge",
        purge_tenant,
        "Purge a tenant",
        "operator",
        {200: PurgeReply},
        errors=(404, 422, 503),
    ),
    Endpoint(
        "GET",
        "/v1/tenants/{tenant}/purge",
        purge_state,
        "Get the progress of a purge",
        "operator",
        {200: PurgeStateReply},
        errors=(404, 422, 503),
    ),
)
