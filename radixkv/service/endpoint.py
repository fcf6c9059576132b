"""An endpoint as a value: the source of routes and of the OpenAPI document.

    turn (429) ──▶ caller's key or signature (401, 403) ──▶ gate (429) ──▶ body received, bounded (408, 413)
      ──▶ read (400, 415, 422) ──▶ handler (504) ──▶ reply

Authentication comes before the body is received. So a caller without a key can't distinguish a valid body from an
invalid one, and can't make the server buffer a body. This holds for replicas too: their signature covers the body's
digest, which is a header. A header that decides access counts only if it occurs once. Every error is sent in the form
of ``problems.ApiError``. Logs have endpoints, statuses, types and places in the code. They have no text from a client,
and no message of an unexpected error, because it may quote such text.

The intake decides how a body is read: on the event loop or in a process (``service.intake``). Handlers only name a
schema, so every endpoint reads its body in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope, Send

from radixkv.errors import UnverifiedRequest
from radixkv.service import problems, turns
from radixkv.service.auth import KEY_HEADERS, OPERATOR_ACCOUNT, Key, Principal, presented_key
from radixkv.service.dialects import OWN, Dialect, dialect_of
from radixkv.service.draining import Ended
from radixkv.service.fleet.peers import unsigned
from radixkv.service.limits import Rate, TooFast
from radixkv.service.problems import ApiError, Json
from radixkv.service.schemas.base import RequestBody
from radixkv.service.schemas.tenants import TenantSettings
from radixkv.service.turns import FIRST, NOBODY, TENANT
from radixkv.signing import SIGNED_HEADERS, SignedHead

if TYPE_CHECKING:
    from radixkv.clock import Clock
    from radixkv.config import Namespace
    from radixkv.coordination import ReplicaInfo, Router
    from radixkv.service.auth import Keyring
    from radixkv.service.draining import Drain
    from radixkv.service.failures import Failures
    from radixkv.service.fleet.peers import Fleet
    from radixkv.service.intake import Intake
    from radixkv.service.key_store import KeyStore
    from radixkv.service.limits import Gate, Limits
    from radixkv.service.metrics import RequestMetrics
    from radixkv.service.owner import Owner
    from radixkv.service.prompts import Prompt, PromptRules
    from radixkv.service.reading import Reading
    from radixkv.service.reload_counts import ReloadCounts
    from radixkv.service.schemas.replicas import RouteRequest
    from radixkv.service.threads import Threads
    from radixkv.service.turns import Account, Turns

Who = Literal["anyone", "tenant", "operator", "either", "replica"]
B = TypeVar("B", bound=RequestBody)
T = TypeVar("T")

ENCODED_SLASH = "%2F"
ARRIVAL = "radixkv.arrival"
"""The name of a request's ``Arrival`` in its scope."""
REQUEST_ID = "radixkv.request_id"
"""The name of a request's id in its scope, once its endpoint is known."""
NOBODY_ACCOUNT = "\x00nobody"
FLEET_ACCOUNT = "\x00fleet"
"""The accounts of requests without a valid key, and of other replicas' requests whose tenant isn't known yet."""
MAX_QUERY_BYTES = 8 * 1024
_KEY_HEADERS = frozenset(name.encode() for name in KEY_HEADERS)

log = logging.getLogger("radixkv.service")


def new_request_id() -> str:
    """Return an id for a request."""
    return f"req_{secrets.token_hex(12)}"


def has_encoded_slash(scope: Scope) -> bool:
    """Whether the path that the client sent has a slash inside a segment."""
    return b"%2f" in (scope.get("raw_path") or b"").lower()


class Host(Protocol):
    """What every HTTP process has: a replica's service, or a router."""

    @property
    def clock(self) -> Clock:
        """Time in seconds."""

    @property
    def keys(self) -> KeyStore:
        """Where keys and tenants are changed."""

    @property
    def keyring(self) -> Keyring:
        """The keys that may call."""

    @property
    def limits(self) -> Limits:
        """Bounds on requests."""

    @property
    def cors_origins(self) -> Sequence[str]:
        """Origins of web pages that may call."""

    @property
    def gate(self) -> Gate:
        """The rate limits of tenants."""

    @property
    def turns(self) -> Turns:
        """Whose turn it is on the event loop."""

    @property
    def drain(self) -> Drain:
        """The requests in progress."""

    @property
    def metrics(self) -> RequestMetrics:
        """The counters."""

    @property
    def router(self) -> Router:
        """Ranks replicas."""

    @property
    def failures(self) -> Failures:
        """Turns errors into answers."""

    @property
    def fleet(self) -> Fleet | None:
        """Verifies requests of other replicas; None if there are no endpoints for them."""

    @property
    def num_endings(self) -> int:
        """How often something was purged, cleared or removed here."""

    def owner(self, tenant: str | None, key_id: str, as_of: int) -> Owner | None:
        """Return who a request belongs to that came at ``as_of``; a tenant of None is the operator."""

    @property
    def reloads(self) -> ReloadCounts:
        """Counts of reloads of the configuration."""

    def set_limits(self, limits: Limits) -> None:
        """Replace the bounds on requests."""

    def replicas(self) -> list[ReplicaInfo]:
        """Return all replicas that are known here."""

    @property
    def rules(self) -> PromptRules:
        """The rules for prompts."""

    @property
    def intake(self) -> Intake:
        """Reads bodies."""

    @property
    def threads(self) -> Threads:
        """Runs calls that block."""

    def routed_to(self, tenant: str, body: RouteRequest) -> Namespace:
        """Return the namespace of a prompt for routing. Raises ApiError."""

    def promised_dates(self, tenant: str, today: str) -> tuple[str, ...]:
        """Return dates before today on which something was promised to a tenant that still holds; two at most."""

    def as_promised(self, tenant: str, body: RequestBody, prompt: Prompt) -> Prompt:
        """Return the prompt or one of its ``others``: the one of which promises that hold cover most."""

    def coordination(self) -> str:
        """Return ``ok``, or the problem between this process and the fleet's store."""

    def unreadiness(self) -> list[str]:
        """Return the reasons to send no requests here now."""

    def warnings(self) -> list[str]:
        """Return what an operator should look at, although the process may serve. Anybody may read it."""

    def sickness(self) -> list[str]:
        """Return the reasons to replace this process."""


H = TypeVar("H", bound=Host)
H_co = TypeVar("H_co", bound=Host, covariant=True)
H_contra = TypeVar("H_contra", bound=Host, contravariant=True)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came, before its key was looked up, and its key in the ring of that time.

    ``at``: on ``Host.clock``. ``as_of``: ``Host.num_endings``.
    """

    at: float
    as_of: int
    ring: Keyring
    key: Key | None


def arrived(host: Host, scope: Scope) -> Arrival:
    """Return the arrival of a request, now. O(keys)."""
    at, as_of, ring = host.clock(), host.num_endings, host.keyring
    given: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        if name in _KEY_HEADERS:
            given.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return Arrival(at, as_of, ring, ring.find(presented_key(given)) if given else None)


def account_of(host: Host, path: str, key: Key | None) -> Account:
    """Return the account of a request on the event loop."""
    if key is None:
        is_signed = host.fleet is not None and path.startswith("/internal/")
        return host.turns.account(*((FLEET_ACCOUNT, TENANT) if is_signed else (NOBODY_ACCOUNT, NOBODY)))
    if key.principal.tenant is None:
        return host.turns.account(OPERATOR_ACCOUNT, FIRST)
    return tenants_account(host, key.principal.tenant)


def tenants_account(host: Host, tenant: str) -> Account:
    """Return a tenant's account on the event loop, with its present mode and weight."""
    own = host.keyring.settings.get(tenant)
    if own is None:
        return host.turns.account(tenant)
    return host.turns.account(tenant, FIRST if own.mode == "strict" else TENANT, own.weight)


@dataclass(slots=True)
class Call(Generic[H_co]):
    """One request, as a handler sees it."""

    host: H_co
    request: Request
    endpoint: Endpoint[H_co]
    started_at: float
    as_of: int = 0
    """``Host.num_endings`` when it came, before its key was checked."""
    principal: Principal | None = None
    caller: Owner | None = None
    """Who it belongs to, once its key was checked; None in a router."""
    signed: SignedHead | None = None
    body: bytes = b""
    receiving: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Held while a long body is received, and until it is read."""
    id: str = field(default_factory=new_request_id)
    """Made here, never taken from the client. In the answer if the endpoint's dialect has a header for it."""
    rate: Rate | None = None
    """What the tenant's rate leaves after it; None if it has none."""

    @property
    def dialect(self) -> Dialect:
        """Form of its errors."""
        if not self.endpoint.has_clients_dialect:
            return self.endpoint.dialect
        return dialect_of(self.endpoint.path, self.request.headers, self.endpoint.dialect)

    @property
    def tenant(self) -> str:
        """The calling tenant; only in endpoints for tenants."""
        assert self.principal is not None and self.principal.tenant is not None
        return self.principal.tenant

    @property
    def owner(self) -> Owner:
        """Who it belongs to; only in a replica's endpoints for tenants and the operator."""
        assert self.caller is not None
        return self.caller

    @property
    def signed_tenant(self) -> str:
        """The tenant that another replica's request acts for; only in endpoints for replicas."""
        assert self.signed is not None
        return self.signed.tenant

    def header(self, name: str) -> str | None:
        """Return a header that occurs exactly once, or None."""
        values = self.request.headers.getlist(name)
        return values[0] if len(values) == 1 else None

    @property
    def lane(self) -> str:
        """The lane that this request waits in: its tenant's, also if a replica asks for the tenant, or the
        operator's."""
        if self.signed is not None:
            return self.signed.tenant
        assert self.principal is not None
        return OPERATOR_ACCOUNT if self.principal.tenant is None else self.principal.tenant

    async def read(self, model: type[B]) -> Reading[B]:
        """Return the body as ``model``, and its prompts. Raises ApiError 400, 415 or 422, Busy or Closed.

        Raises ClientDisconnect when the client hangs up while its body waits for a process.
        """
        self._require_json()
        try:
            return await self.read_bytes(self.body, model)
        finally:
            await self.receiving.aclose()

    async def read_bytes(self, raw: bytes, model: type[B]) -> Reading[B]:
        """Return a body that was made here, and its prompts, as ``read`` does.

        Each prompt is the one with the date that it keeps.
        """
        intake, lane = self.host.intake, self.lane
        times = intake.times(partial(self.host.promised_dates, lane))
        found = intake.read_now(lane, raw, model, times)
        if found is None:
            found = await until_disconnect(self.request, intake.read(lane, raw, model, times))
        if any(each.others for each in found.prompts):
            prompts = tuple(self.host.as_promised(lane, found.body, each) for each in found.prompts)
            found = replace(found, prompts=prompts)
        return found

    def _require_json(self) -> None:
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = "the body must be JSON"
            raise ApiError(
                415,
                "unsupported_media_type",
                message,
                field="content-type",
                value=kind or None,
                allowed="application/json",
            )

    def path_text(self, name: str) -> str:
        """Return a parameter of the path, decoded; a slash in it was written as ``%2F``."""
        text = str(self.request.path_params[name])
        return text.replace(ENCODED_SLASH, "/") if has_encoded_slash(self.request.scope) else text

    def query(self, *allowed: str) -> dict[str, str]:
        """Return the query's fields, each at most once. Raises ApiError 422 for others."""
        length = len(self.request.scope["query_string"])
        if length > MAX_QUERY_BYTES:
            message = f"the query has {length} bytes, more than {MAX_QUERY_BYTES}"
            raise problems.invalid(message, "query", length, f"at most {MAX_QUERY_BYTES} bytes")
        found: dict[str, str] = {}
        for name, value in self.request.query_params.multi_items():
            if name not in allowed:
                raise problems.invalid(f"unknown field {problems.shown(name)}", str(problems.shown(name)), value,
                                       f"one of {', '.join(allowed)}" if allowed else "no query")  # fmt: skip
            if name in found:
                raise problems.invalid(f"{name} is given twice", name, value, "one value")
            found[name] = value
        return found


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[H_contra]):
    """A path, a method, the allowed callers, the request and the replies; for hosts of a kind."""

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    handler: Callable[[Call[H_contra]], Awaitable[Response]]
    summary: str
    who: Who
    replies: Mapping[int, Any]
    """Status → model of the body, a union of models, or text that is a media type."""
    body: type[RequestBody] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    internal: bool = False
    while_draining: bool = False
    """Whether it is answered while the process drains, as endpoints for anyone are."""
    dialect: Dialect = OWN
    """Form of its errors, and the name of the header with the request's id."""
    has_clients_dialect: bool = False
    """Whether several providers have this path: errors have the form of the client's own, if its headers name one."""


async def serve(host: H, endpoint: Endpoint[H], request: Request) -> Response:
    """Answer one request; every error becomes an answer, except a bug in radixkv."""
    arrival: Arrival = request.scope[ARRIVAL]
    call = Call(host, request, endpoint, arrival.at, arrival.as_of)
    request.scope[REQUEST_ID] = call.id
    response: Response | None = None
    try:
        with host.drain.under_way():
            if host.drain.is_stopping and endpoint.who != "anyone" and not endpoint.while_draining:
                raise Ended
            response = await _answer(call)
        return response
    except ClientDisconnect:
        response = Response(status_code=499)
        return response
    except Exception as error:  # noqa: BLE001 the one place that turns errors into answers
        response = call.dialect.answer(host.failures.answer(error), call.id)
        return response
    finally:
        if response is not None:
            _complete(call, response)
        status = response.status_code if response is not None else 499
        seconds = host.clock() - call.started_at
        host.metrics.answered(endpoint.method, endpoint.path, status, seconds)
        log.debug("%s %s: %d after %.6f s", endpoint.method, endpoint.path, status, seconds)


def _complete(call: Call[Host], response: Response) -> None:
    """Add the provider's headers to an answer."""
    dialect = call.dialect
    if dialect.id_header is not None:
        response.headers.setdefault(dialect.id_header, call.id)
    if dialect.rate_headers is not None and call.rate is not None:
        response.headers.update(dialect.rate_headers(call.rate))


async def _answer(call: Call[Host]) -> Response:
    if call.endpoint.who in ("tenant", "operator", "either"):
        key = _authenticated(call)
        call.principal = key.principal
        call.caller = call.host.owner(key.principal.tenant, key.id, call.as_of)
    if call.endpoint.who == "replica":
        return await _answer_replica(call)
    with _admitted(call) as max_body_bytes:
        async with call.receiving:
            if call.endpoint.body is not None:
                call.body = await _received(call, call.endpoint.body, max_body_bytes)
            response = await _in_time(call)
    if call.caller is not None and call.principal is not None and call.principal.tenant is not None:
        call.caller.require_key()
    return response


async def _answer_replica(call: Call[Host]) -> Response:
    """Verify the headers, then read the body and compare it with the signed digest. Raises ApiError 401."""
    fleet, limits, query = call.host.fleet, call.host.limits, call.request.url.query
    assert fleet is not None
    path = call.endpoint.path + (f"?{query}" if query else "")
    headers = {name: value for name in SIGNED_HEADERS if (value := call.header(name)) is not None}
    call.signed = fleet.verified(headers, call.endpoint.method, path)
    if (payer := turns.payer()) is not None:
        payer.account = tenants_account(call.host, call.signed.tenant)
    async with fleet.admitted(call.endpoint.path, limits.body_timeout_s), call.receiving:
        if call.endpoint.body is not None:
            call.body = await _received(call, call.endpoint.body, limits.max_body_bytes)
        try:
            call.signed.check_body(call.body)
        except UnverifiedRequest:
            raise unsigned() from None
        return await _in_time(call)


@contextmanager
def _admitted(call: Call[Host]) -> Iterator[int]:
    """Pass the gate, if a tenant calls; yield the maximum size of its body in bytes. Raises TooFast or Busy."""
    limits, principal = call.host.limits, call.principal
    if principal is None or principal.tenant is None:
        yield limits.max_body_bytes
        return
    own = call.host.keyring.settings.get(principal.tenant, TenantSettings())
    rate, burst = own.requests_per_s or limits.requests_per_s, own.burst or limits.burst
    try:
        with call.host.gate.admit(principal.tenant, rate, burst):
            call.rate = call.host.gate.rate(principal.tenant, rate, burst)
            yield own.max_body_bytes or limits.max_body_bytes
    except TooFast:
        call.rate = call.host.gate.rate(principal.tenant, rate, burst)
        raise


async def _received(call: Call[Host], model: type[RequestBody], max_bytes: int) -> bytes:
    """Return the bytes of the body. A long body waits until its tenant's limit on bytes allows it. Raises ApiError."""
    _require_plain(call)
    max_bytes = min(max_bytes, call.host.intake.max_bytes(model) or max_bytes)
    stated = call.request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > max_bytes:
        raise _too_large(max_bytes, int(stated))
    num_bytes = int(stated) if stated.isdecimal() else max_bytes
    if num_bytes > call.host.intake.most_inline:
        try:
            async with asyncio.timeout(call.host.limits.timeout_s):
                await call.receiving.enter_async_context(call.host.intake.admit(call.lane, num_bytes))
        except TimeoutError:
            raise problems.timed_out(call.host.limits.timeout_s) from None
    return await _body_in_time(call, max_bytes)


def _require_plain(call: Call[Host]) -> None:
    """Raise ApiError 415 for a compressed body: its size says nothing of what it holds."""
    coding = ",".join(call.request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415,
            "unsupported_media_type",
            "the body must not be compressed; send it as it is, without content-encoding",
            field="content-encoding",
            value=coding,
            allowed="no content-encoding",
            headers={"Accept-Encoding": "identity"},
        )


async def _body_in_time(call: Call[Host], max_bytes: int) -> bytes:
    timeout_s = call.host.limits.body_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await _bounded_body(call, max_bytes)
    except TimeoutError:
        raise problems.body_timed_out(timeout_s) from None


async def _in_time(call: Call[Host]) -> Response:
    timeout_s = call.host.limits.timeout_s
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            return await call.endpoint.handler(call)
    except TimeoutError:
        if timeout.expired():
            raise problems.timed_out(timeout_s) from None
        raise


def _authenticated(call: Call[Host]) -> Key:
    ring = call.host.keyring
    arrival: Arrival = call.request.scope[ARRIVAL]
    if arrival.ring is not ring:
        arrival = arrived(call.host, call.request.scope)
    key = arrival.key
    if key is None:
        headers = {"WWW-Authenticate": 'Bearer realm="radixkv"'}
        message = "the request has no valid key, or two; send the header Authorization: Bearer KEY once"
        raise ApiError(401, "unauthorized", message, field="authorization", headers=headers)
    if call.endpoint.who == "operator" and not key.principal.is_operator:
        raise ApiError(403, "forbidden", "this endpoint needs the operator's key", field="authorization")
    if call.endpoint.who == "tenant" and key.principal.is_operator:
        raise ApiError(403, "forbidden", "this endpoint needs a tenant's key", field="authorization")
    if key.principal.tenant is not None and key.principal.tenant not in ring.settings:
        raise problems.settings_pending()
    return key


async def _bounded_body(call: Call[Host], max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in call.request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes, None)
        parts.append(part)
        if size > call.host.intake.most_inline:
            await call.host.intake.pace(call.lane, len(part))
    return b"".join(parts)


def _too_large(max_bytes: int, stated: int | None) -> ApiError:
    return ApiError(
        413,
        "body_too_large",
        "the body is too large",
        field="content-length",
        value=stated,
        allowed=f"at most {max_bytes} bytes",
    )


def reply(body: BaseModel, status: int = 200) -> Json:
    """Return a body of ``schemas`` as an answer."""
    return Json(body.model_dump(), status)


class Streamed(StreamingResponse):
    """An answer in parts, each sent in the turn of the request."""

    async def stream_response(self, send: Send) -> None:
        """Send the parts. Starlette calls it in a task of its own."""
        await turns.in_turn(super().stream_response(send))


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, or raise ClientDisconnect as soon as the client hangs up (``work`` is
    cancelled)."""
    working = asyncio.ensure_future(turns.in_turn(work))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
