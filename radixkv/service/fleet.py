"""This replica among the others: whom it knows, and warming a prefix on all of them.

A fan-out asks each live replica once, at an address that is proven with the fleet secret, with a request that
the secret signs for exactly that registration; the tenant is inside what is signed, and bearer keys stay here.
The receiving endpoint has no way to fan out again. What becomes of one replica is that replica's outcome:
the others go on. A replica that leaves the view while it is asked has failed; nobody waits for the dead.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio.to_thread
import httpx
from pydantic import ValidationError

from radixkv.coordination.signing import RequestVerifier, is_signed, sign_request
from radixkv.errors import UnverifiedRequest
from radixkv.namespaces import Namespace
from radixkv.service.problems import ApiError
from radixkv.service.prompts import Ids
from radixkv.service.schemas import ErrorReply, ReplicaOutcome, WarmReply

if TYPE_CHECKING:
    from radixkv.coordination.base import BaseCoordinator
    from radixkv.coordination.protocol import ReplicaInfo

WARM_PATH = "/internal/warm"
_CONNECT_TIMEOUT_S = 3.0
_LOOK_AGAIN_S = 0.5
_KEEPALIVE_S = 2.0
"""Shorter than the server's own, so that a connection isn't used again while the other end closes it."""


class Fleet:
    """The coordinator of this process, and requests to other replicas."""

    def __init__(self, coordinator: BaseCoordinator, secret: bytes) -> None:
        self.coordinator = coordinator
        self.secret = secret
        self._verifier = RequestVerifier(secret)
        self._client: httpx.AsyncClient | None = None

    async def close(self) -> None:
        """Leave the registry and close connections."""
        if self._client is not None:
            await self._client.aclose()
        await anyio.to_thread.run_sync(self.coordinator.close)

    def require_signature(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError 401 unless a request claims to come from a replica: no body is read before that."""
        if not is_signed(headers):
            raise _unauthorized()

    def tenant_of(self, headers: Mapping[str, str], path: str, body: bytes) -> str:
        """The tenant that another replica's signed request is for. Raises ApiError 401."""
        audience = self.coordinator.info().audience
        try:
            return self._verifier.verify(headers, method="POST", path=path, body=body, audience=audience)
        except UnverifiedRequest:
            raise _unauthorized() from None

    async def warm_others(self, namespace: Namespace, ids: Ids) -> list[ReplicaOutcome]:
        """The outcome of warming ``ids`` on every live replica but this one, by id."""
        document = {"token_ids": ids.tolist(), "salt": namespace.salt, "adapter": namespace.adapter}
        body = json.dumps(document).encode()
        peers = self.coordinator.peers()
        return list(await asyncio.gather(*(self._warm_on(peer, namespace, body) for peer in peers)))

    async def _warm_on(self, peer: ReplicaInfo, namespace: Namespace, body: bytes) -> ReplicaOutcome:
        if peer.fingerprint != namespace.model:
            return _failed(peer, "other_model")
        asking = asyncio.create_task(self._post(peer, namespace.tenant, body))
        try:
            while not asking.done() and self._is_there(peer):
                await asyncio.wait((asking,), timeout=_LOOK_AGAIN_S)
            return _outcome(peer, asking.result()) if asking.done() else _failed(peer, "left")
        except httpx.HTTPError:
            return _failed(peer, "unreachable")
        finally:
            asking.cancel()

    async def _post(self, peer: ReplicaInfo, tenant: str, body: bytes) -> httpx.Response:
        headers = sign_request(
            self.secret,
            method="POST",
            path=WARM_PATH,
            tenant=tenant,
            body=body,
            audience=peer.audience,
            timestamp_s=time.time(),
        )
        headers["content-type"] = "application/json"
        return await self._http().post(f"{peer.address}{WARM_PATH}", content=body, headers=headers)

    def _is_there(self, peer: ReplicaInfo) -> bool:
        return any(each.id == peer.id and each.epoch == peer.epoch for each in self.coordinator.peers())

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
            limits = httpx.Limits(keepalive_expiry=_KEEPALIVE_S)
            self._client = httpx.AsyncClient(
                timeout=timeout,
                limits=limits,
                follow_redirects=False,
                trust_env=False,
                verify=ssl.create_default_context(),
            )
        return self._client


def _unauthorized() -> ApiError:
    return ApiError(401, "unauthorized", "this is for replicas of this fleet", field="signature")


def _failed(peer: ReplicaInfo, error: str) -> ReplicaOutcome:
    return ReplicaOutcome(replica=peer.id, state="failed", error=error)


def _outcome(peer: ReplicaInfo, answer: httpx.Response) -> ReplicaOutcome:
    try:
        if answer.status_code != 200:
            return _failed(peer, ErrorReply.model_validate_json(answer.content).error.type)
        return own_outcome(peer.id, WarmReply.model_validate_json(answer.content))
    except ValidationError:
        return _failed(peer, "no_answer")


def own_outcome(replica_id: str, warmed: WarmReply) -> ReplicaOutcome:
    """A finished warm as the outcome of a replica."""
    return ReplicaOutcome(
        replica=replica_id,
        state="done",
        tokens=warmed.tokens,
        cached_before=warmed.cached_before,
        computed=warmed.computed,
        seconds=warmed.seconds,
    )
