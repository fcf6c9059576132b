"""Requests to other replicas, and checks of requests from them.

A request goes only to an address that is proven with the fleet secret. It is signed with that secret for exactly one
registration, and the signature covers the tenant. Bearer keys never leave this replica. The endpoints that receive such
requests ask no further replicas.

Before a prompt or a tenant's name is sent, the replica at that address must answer a random challenge. The answer is a
MAC over the challenge, the audience and the address that the caller meant, under a key that only the fleet can derive.
So an address that now belongs to another process, such as a dead pod's, learns nothing. An attacker who can relay
traffic between two replicas can relay the challenge too. Only TLS protects against that.

The signature is verified from the headers, before any byte of the body is read. At most MAX_AT_ONCE requests to one
internal endpoint are read and served at once, so they buffer at most that many bodies. Other requests wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio.to_thread
import httpx
from pydantic import BaseModel, ValidationError

from radixkv.clock import Clock, monotonic
from radixkv.coordination.store.wire import NEVER, Raised, is_code
from radixkv.errors import UnverifiedRequest
from radixkv.service.problems import ApiError, busy
from radixkv.service.schemas.fleet import ProofReply, ToldPurge
from radixkv.signing import RequestVerifier, SignedHead, sign_request

if TYPE_CHECKING:
    from radixkv.coordination.coordinator import Coordinator
    from radixkv.coordination.values import ReplicaInfo

WARM_PATH = "/internal/warm"
PURGE_PATH = "/internal/purge"
PIN_PATH = "/internal/pin"
PROVE_PATH = "/internal/prove"
PROVEN_S = 10.0
"""How long the answer to a challenge is valid."""
MAX_AT_ONCE = 16
"""Requests to one internal endpoint that are read and served at once."""
_CONNECT_TIMEOUT_S = 3.0
_ORDER_TIMEOUT_S = 10.0
"""Far above the time of a 202. A replica that learns of a part that was given up still takes it up."""
_PURGE_TIMEOUT_S = 3.0
"""Above the time of a purge. A slower replica is listed as pending."""
_MAX_PROVEN = 1_024
_MAX_PROOF_BYTES = 4_096
_KEEPALIVE_S = 2.0
"""Shorter than the server's own time, so that no request uses a connection that the server is closing."""


log = logging.getLogger("radixkv.service")


class Unproven(Exception):
    """The process at a replica's address doesn't prove that it is this replica."""


class Fleet:
    """The coordinator of this process, and requests to other replicas.

    ``is_alone``: no other replica can exist, so the service has no internal endpoints.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        secret: bytes,
        *,
        is_alone: bool = False,
        clock: Clock = monotonic,
    ) -> None:
        self.coordinator, self.is_alone = coordinator, is_alone
        self.secret = secret
        self._verifier = RequestVerifier(secret)
        self._clock = clock
        self._proven: dict[tuple[str, str | None], float] = {}
        self._client: httpx.AsyncClient | None = None
        self._free: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_AT_ONCE))

    @property
    def num_nonces(self) -> int:
        """Number of remembered nonces of requests from other replicas; at most 65,536."""
        return self._verifier.num_nonces

    async def close(self) -> None:
        """Leave the registry and close connections."""
        if self._client is not None:
            await self._client.aclose()
        await anyio.to_thread.run_sync(self.coordinator.close)

    def verified(self, headers: Mapping[str, str], method: str, path: str) -> SignedHead:
        """Return what the headers of another replica's request state, before its body is read. Raises ApiError 401."""
        audience = self.coordinator.info().audience
        try:
            return self._verifier.verify_head(headers, method=method, path=path, audience=audience)
        except UnverifiedRequest:
            raise unsigned() from None

    @asynccontextmanager
    async def admitted(self, path: str, wait_s: float) -> AsyncIterator[None]:
        """Take one of the MAX_AT_ONCE places for requests to ``path``.

        Raises ApiError 429 after ``wait_s`` of waiting.
        """
        free = self._free[path]
        try:
            async with asyncio.timeout(wait_s):
                await free.acquire()
        except TimeoutError:
            raise busy() from None
        try:
            yield
        finally:
            free.release()

    async def order(self, peer: ReplicaInfo, tenant: str, body: bytes, path: str = WARM_PATH) -> str | None:
        """Ask a replica to take its part in a job or a pin.

        Returns None once it has accepted, else a code with the reason.
        """
        try:
            answer = await self._post(peer, path, tenant, body, _ORDER_TIMEOUT_S)
        except Unproven:
            return "unproven"
        except httpx.HTTPError:
            return "unreachable"
        return None if answer.status_code == 202 else _code(answer)

    async def send_purge(self, tenant: str, raised: Raised = NEVER) -> None:
        """Send a purge to all replicas now, also to those that drain.

        A replica that can't be reached learns of it with its next beat.

        They forget the tenant in any case, and confirm ``raised`` if it was raised.
        """
        body = ToldPurge(**raised._asdict()).model_dump_json().encode()
        peers = self.coordinator.peers(draining=True)
        asked = [self._post(peer, PURGE_PATH, tenant, body, _PURGE_TIMEOUT_S) for peer in peers]
        await asyncio.gather(*asked, return_exceptions=True)

    # ---- proofs

    def prove(self, challenge: str) -> str:
        """Return this replica's answer to another replica's challenge."""
        info = self.coordinator.info()
        return self.coordinator.proofs.answer(challenge, info.audience, info.address or "")

    async def _require_proof(self, peer: ReplicaInfo, timeout_s: float) -> None:
        """Raise Unproven unless the process at the peer's address has the fleet secret and is that registration.

        Nothing of a tenant is sent before this. A proof is valid for that registration at that address. It ends after
        ``PROVEN_S`` seconds, or when a connection to it fails, because the address may then belong to another process.
        """
        who, now = (peer.audience, peer.address), self._clock()
        if self._proven.get(who, float("-inf")) > now:
            return
        challenge = secrets.token_hex(32)
        body = json.dumps({"challenge": challenge}).encode()
        async with asyncio.timeout(timeout_s):
            proof = await self._answer(peer, body, timeout_s)
        if not self.coordinator.proofs.is_answer(proof, challenge, peer.audience, peer.address or ""):
            log.warning(
                "replica %s at %s doesn't prove that it has the fleet's secret: nothing was sent there",
                peer.id,
                peer.address,
            )
            raise Unproven
        if len(self._proven) >= _MAX_PROVEN:
            self._proven.clear()
        self._proven[who] = now + PROVEN_S

    async def _post(
        self, peer: ReplicaInfo, path: str, tenant: str, body: bytes, timeout_s: float
    ) -> httpx.Response:
        """Send a request to a proven peer. Raises Unproven, and HTTPError if there is no answer."""
        try:
            await self._require_proof(peer, min(_CONNECT_TIMEOUT_S, timeout_s))
            return await self._send(peer, path, tenant, body, timeout_s)
        except TimeoutError:
            raise httpx.ReadTimeout("no answer to a challenge") from None
        except httpx.HTTPError:
            self._proven.pop((peer.audience, peer.address), None)
            raise

    async def _answer(self, peer: ReplicaInfo, body: bytes, timeout_s: float) -> str:
        """Return the proof in the answer to a challenge; empty if it has none.

        Reads at most as much as an answer can have.
        """
        headers = self._signed(peer, PROVE_PATH, "", body)
        url, timeout = f"{peer.address}{PROVE_PATH}", httpx.Timeout(timeout_s)
        async with self._http().stream("POST", url, content=body, headers=headers, timeout=timeout) as answer:
            read = b""
            async for part in answer.aiter_raw():
                read += part
                if len(read) > _MAX_PROOF_BYTES:
                    return ""
        try:
            return ProofReply.model_validate_json(read).proof if answer.status_code == 200 else ""
        except ValidationError:
            return ""

    async def _send(
        self, peer: ReplicaInfo, path: str, tenant: str, body: bytes, timeout_s: float
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s))
        headers = self._signed(peer, path, tenant, body)
        return await self._http().post(
            f"{peer.address}{path}", content=body, headers=headers, timeout=timeout
        )

    def _signed(self, peer: ReplicaInfo, path: str, tenant: str, body: bytes) -> dict[str, str]:
        headers = sign_request(
            self.secret,
            method="POST",
            path=path,
            tenant=tenant,
            body=body,
            audience=peer.audience,
            timestamp_s=time.time(),
        )
        headers["content-type"] = "application/json"
        return headers

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            limits = httpx.Limits(keepalive_expiry=_KEEPALIVE_S)
            self._client = httpx.AsyncClient(
                limits=limits,
                follow_redirects=False,
                trust_env=False,
                verify=ssl.create_default_context(),
            )
        return self._client


def unsigned() -> ApiError:
    """401: the request is not signed with the fleet's secret, or not for this replica, or not now."""
    return ApiError(
        401, "unauthorized", "this endpoint needs the signature of a replica of this fleet", field="signature"
    )


class _Coded(BaseModel):
    type: str


class _Refusal(BaseModel):
    """The part of an error's body that a replica reads. Replicas of other versions may send other fields beside it."""

    error: _Coded


def _code(answer: httpx.Response) -> str:
    """Return the error type of a replica's answer."""
    try:
        kind = _Refusal.model_validate_json(answer.content).error.type
    except ValidationError:
        return "no_answer"
    return kind if is_code(kind) else "no_answer"
