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
from radixkv.service.key_store import KeyRefused, UnknownKey
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
)

if TYPE_CHECKING:
    from radixkv.coordination.purges import Purge
    from radixkv.service.auth import Keyring
    from radixkv.service.core import Service
    from radixkv.service.fleet.quotas import Quotas

T = TypeVar("T")


async def list_keys(call: Call[Service]) -> Response:
    """All keys: id, prefix, whose. Never a key or a digest."""
    call.query()
    keys = call.host.keyring.keys
    return reply(await call.host.threads.administer(lambda: KeysReply(keys=[_shown(key) for key in keys])))


async def create_operator_key(call: Call[Service]) -> Response:
    """A further key of the operator's; it is shown this once."""
    call.query()
    return await _created(call, Principal(None))


async def create_key(call: Call[Service]) -> Response:
    """A further key of a tenant's, which comes into being if there is none; it is shown this once."""
    call.query()
    return await _created(call, _tenant(call))


async def rotate_key(call: Call[Service]) -> Response:
    """A new key in the place of an old one, which is refused from now on; it is shown this once."""
    call.query()
    key_id = call.request.path_params["key"]
    text, key = await _changed(call, lambda: call.host.keys.rotate(key_id), "key")
    return reply(NewKeyReply(key=text, **_shown(key).model_dump()))


async def revoke_key(call: Call[Service]) -> Response:
    """The key is refused from now on."""
    call.query()
    key_id = call.request.path_params["key"]
    await _changed(call, lambda: call.host.keys.revoke(key_id), "key")
    return Response(status_code=204)


async def list_tenants(call: Call[Service]) -> Response:
    """All tenants, and what holds for each."""
    call.query()

    quotas = call.host.quotas

    def everybody() -> TenantsReply:
        ring = call.host.keyring
        num_keys = Counter(key.principal.tenant for key in ring.keys)
        return TenantsReply(
            tenants=[_tenant_reply(ring, quotas, name, num_keys[name]) for name in ring.tenants]
        )

    return reply(await call.host.threads.administer(everybody))


async def put_tenant(call: Call[Service]) -> Response:
    """Make a tenant, or change what holds for it; what is left out is what holds for all. Its keys stay."""
    call.query()
    tenant = str(_tenant(call).tenant)
    settings = (await call.read(TenantSettings)).body
    await _changed(call, lambda: call.host.keys.put_tenant(tenant, settings), "tenant")
    await _said(call, tenant)
    ring = call.host.keyring
    return reply(_tenant_reply(ring, call.host.quotas, tenant, len(ring.of(Principal(tenant)))))


async def purge_tenant(call: Call[Service]) -> Response:
    """Forget all that a tenant has, here and on all replicas: nothing of it is matched from now on.

    Every live replica is told at once, and who has confirmed by the time of the answer is named. It may be asked
    again; `GET` says how far the last one has come.
    """
    call.query()
    return reply(await _purged(call, _known_tenant(call)))


async def purge_state(call: Call[Service]) -> Response:
    """How far a tenant's last purge has come: it is complete once every live replica has confirmed."""
    call.query()
    tenant = _known_tenant(call)
    try:
        purge = await call.host.threads.administer(partial(call.host.fleet.coordinator.purge_report, tenant))
    except CoordinationError:
        raise store_unavailable("how far the purge has come can't be known without the store") from None
    return reply(PurgeStateReply(**_state(purge)))


async def remove_tenant(call: Call[Service]) -> Response:
    """Remove a tenant and its keys, and forget all that it has, here and on all replicas.

    If the other replicas can't be told, nothing is removed (503): revoke its keys one by one then.
    """
    call.query()
    tenant = _known_tenant(call)
    await _purged(call, tenant)
    await _changed(call, lambda: call.host.keys.remove_tenant(tenant), "tenant")
    await _said(call, tenant)
    with suppress(CoordinationError):  # remains of its last requests; upkeep tries again
        await call.host.purges.purge_removed()
    return Response(status_code=204)


async def _said(call: Call[Service], tenant: str) -> None:
    """Write the quota now, so that later changes on any replica come later; if the store is away, once it is back."""
    with suppress(CoordinationError):
        await call.host.threads.administer(partial(call.host.quotas.say, tenant))


async def _purged(call: Call[Service], tenant: str) -> PurgeReply:
    """Purge here, then in the store, then notify the others. Raises ApiError 503 if the store can't be reached."""
    try:
        num_blocks, purge = await call.host.purges.purge(tenant)
    except CoordinationError as error:
        reason = "the store can't be reached"
        if isinstance(error, UnreadableRecord):
            reason = (
                "what the store had of the tenant's generation was no replica's writing, and was replaced"
            )
        message = (
            f"purged here, and on those replicas that could be told; not confirmed, as {reason}: ask again"
        )
        raise store_unavailable(message) from None
    return PurgeReply(blocks=num_blocks, **_state(purge))


def _state(purge: Purge) -> dict[str, Any]:
    return {
        "generation": purge.generation,
        "complete": purge.is_complete,
        "confirmed": list(purge.confirmed),
        "pending": list(purge.pending),
        "unconfirmed": list(purge.unconfirmed),
    }


def _known_tenant(call: Call[Service]) -> str:
    tenant = _tenant(call).tenant
    if tenant not in call.host.keyring.settings:
        raise not_found("tenant")
    return str(tenant)


async def _created(call: Call[Service], principal: Principal) -> Response:
    text, key = await _changed(call, lambda: call.host.keys.create(principal), "tenant")
    return reply(NewKeyReply(key=text, **_shown(key).model_dump()), 201)


async def _changed(call: Call[Service], change: Callable[[], T], what: str) -> T:
    """Make a change, in a thread because it is written to disk. Raises ApiError."""
    try:
        return await call.host.threads.administer(change)
    except UnknownKey:
        raise not_found(what) from None
    except KeyRefused as error:
        raise ApiError(409, "conflict", str(error)) from None
    except ArgumentError as error:
        raise invalid(str(error), error.argument, error.value, error.allowed) from None
    except ConfigError as error:
        raise ApiError(409, "conflict", str(error), field=error.setting, allowed=error.allowed) from None
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


def _tenant_reply(ring: Keyring, quotas: Quotas, tenant: str, num_keys: int) -> TenantReply:
    return TenantReply(
        tenant=tenant,
        settings=ring.settings[tenant].model_copy(update={"fleet_blocks": quotas.limit(tenant)}),
        num_keys=num_keys,
        granted_blocks=quotas.granted(tenant),
    )


ENDPOINTS = (
    Endpoint("GET", "/v1/keys", list_keys, "Keys", "operator", {200: KeysReply}, errors=(422,)),
    Endpoint(
        "POST",
        "/v1/keys",
        create_operator_key,
        "Make a key of the operator's",
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
    Endpoint("GET", "/v1/tenants", list_tenants, "Tenants", "operator", {200: TenantsReply}, errors=(422,)),
    Endpoint(
        "POST",
        "/v1/tenants/{tenant}/keys",
        create_key,
        "Make a key of a tenant's",
        "operator",
        {201: NewKeyReply},
        errors=(409, 422, 503),
    ),
    Endpoint(
        "PUT",
        "/v1/tenants/{tenant}",
        put_tenant,
        "Make or change a tenant",
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
        "Forget all that a tenant has",
        "operator",
        {200: PurgeReply},
        errors=(404, 422, 503),
    ),
    Endpoint(
        "GET",
        "/v1/tenants/{tenant}/purge",
        purge_state,
        "How far a purge has come",
        "operator",
        {200: PurgeStateReply},
        errors=(404, 422, 503),
    ),
)
