"""Pins over HTTP: a tenant keeps prefixes resident, lists its pins, and ends them.

A pin on this replica alone uses a prefix that ``/v1/warm`` computed. It runs where lookups run. ``fleet.pins`` has pins
on several replicas: each of them computes what it lacks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from radixkv.coordination.store.wire import is_pin_id
from radixkv.coordination.values import FleetPin
from radixkv.index.pins import Pin
from radixkv.service.endpoint import Call, Endpoint, reply, until_disconnect
from radixkv.service.endpoints.prefixes import ordered
from radixkv.service.fleet.peers import PIN_PATH
from radixkv.service.fleet.pins import PinContent, PinReplica
from radixkv.service.problems import invalid, not_found
from radixkv.service.schemas.pins import PinOrder, PinPart, PinReply, PinRequest, PinsReply
from radixkv.service.usage import usage_of

if TYPE_CHECKING:
    from radixkv.service.core import Service

OWN_PIN: Final = "pin"
"""The holder of a pin that a tenant asked for on one replica."""
MAX_LISTED: Final = 1_024
"""Most pins in one answer."""
_LOCAL_ID = re.compile(r"0|[1-9][0-9]{0,15}")
_LIMIT = re.compile(r"[1-9][0-9]{0,3}")


async def pin(call: Call[Service]) -> Response:
    """Keep a prefix resident for some time. If it is pinned already, its time starts again.

    With `replicas: self` the prefix must be resident: warm it first. Otherwise each replica computes what it lacks.
    """
    call.host.require("pins")
    reading = await call.read(PinRequest)
    service, body, prompt = call.host, reading.body, reading.prompts[0]
    if not prompt.key:
        allowed = f"at least a block ({service.rules.block_size} tokens) before the last stable boundary"
        raise invalid("the prompt is too short to be pinned", "prompt, messages, token_ids", None, allowed)
    namespace = service.namespace(call.tenant, body.salt, body.adapter)
    if body.replicas == "self":

        def hold() -> Pin:
            found = service.promises.hold(
                OWN_PIN, namespace, prompt.key, body.ttl_s, call.owner.as_of, prompt.date
            )
            call.owner.count_reads(found.num_tokens)
            return found

        found = await service.threads.ask_cache(call.tenant, hold)
        usage = usage_of(found.num_tokens, found.num_tokens)
        await service.meter.written(service.meter.bill("pin", call.owner.payer, usage))
        return reply(_shown(found), 201)
    service.require("prefill")
    fleet_pins, block_size = service.fleet_pins, service.rules.block_size
    pin_id = await fleet_pins.start(
        call.owner, namespace, prompt.key, body.ttl_s, body.replicas, date=prompt.date
    )
    if body.wait:
        settled = await until_disconnect(call.request, fleet_pins.settled(call.owner, pin_id))
        return reply(_shown_fleet(block_size, *settled), 201)
    known = {fact.id: (fact, mine) for fact, mine in await fleet_pins.known(call.tenant)}.get(pin_id)
    if known is None:
        raise not_found("pin")
    return reply(_shown_fleet(block_size, *known), 201)


async def pin_for_replica(call: Call[Service]) -> Response:
    """Take part in a pin for a tenant that another replica's signed request names; asks no further replicas."""
    call.host.require("pins")
    body, owner, namespace, prompt_key = await ordered(call, PinOrder)
    given = body.content
    content = None if given is None else PinContent(given.nonce, given.about, given.chat)
    await call.host.fleet_pins.receive(owner, namespace, prompt_key, body.pin, content, body.date)
    return Response(status_code=202)


async def list_pins(call: Call[Service]) -> Response:
    """List the caller's pins: first those of this replica, the oldest first, then those of the fleet, by id.

    An answer has at most `limit` pins. If there are more, the header `Link` has the address of the next page.
    """
    query = call.query("limit", "after")
    limit, after = _limit(query.get("limit")), query.get("after", "0")
    is_fleet = is_pin_id(after)
    if not is_fleet and not _LOCAL_ID.fullmatch(after):
        raise invalid(
            "after is not the id of a pin", "after", after, "the id of the last pin of the page before"
        )
    fleet_pins, tenant, block_size = call.host.fleet_pins, call.tenant, call.host.rules.block_size
    local = [] if is_fleet else await fleet_pins.local(tenant, int(after), limit + 1)
    pins = [_shown(pin) for pin in local]
    if len(pins) <= limit:
        fleet = sorted(await fleet_pins.known(tenant), key=lambda each: each[0].id)
        pins += [_shown_fleet(block_size, *each) for each in fleet if not is_fleet or each[0].id > after]
    answer = reply(PinsReply(pins=pins[:limit]))
    if len(pins) > limit:
        answer.headers["link"] = f'</v1/pins?after={pins[limit - 1].id}&limit={limit}>; rel="next"'
    return answer


def _limit(text: str | None) -> int:
    """Return the most pins that an answer may list. Raises ApiError."""
    if text is None:
        return MAX_LISTED
    if not _LIMIT.fullmatch(text) or int(text) > MAX_LISTED:
        raise invalid("limit is out of range", "limit", text, f"an integer from 1 to {MAX_LISTED}")
    return int(text)


async def unpin(call: Call[Service]) -> Response:
    """End a pin of the caller before its time. Its blocks stay in the cache until the policy evicts them.

    A pin of the fleet ends here at once. Every other replica ends it about a second after it can read the store.
    """
    call.query()
    fleet_pins, wanted = call.host.fleet_pins, call.request.path_params["pin"]
    is_local = _LOCAL_ID.fullmatch(wanted)
    local = await fleet_pins.local(call.tenant, max(int(wanted) - 1, 0), 1) if is_local else []
    if local and str(local[0].id) == wanted:
        promises = call.host.promises
        await call.host.threads.ask_cache(call.tenant, promises.unpin, local[0])
        return Response(status_code=204)
    if not is_pin_id(wanted):
        raise not_found("pin")
    await fleet_pins.end(call.tenant, wanted)
    return Response(status_code=204)


def _shown(pin: Pin) -> PinReply:
    return PinReply(
        id=str(pin.id),
        salt=pin.namespace.salt,
        adapter=pin.namespace.adapter,
        tokens=pin.num_tokens,
        blocks=pin.num_blocks,
        ttl_s=pin.ttl_s,
        replicas=None,
    )


def _shown_fleet(block_size: int, fact: FleetPin, mine: PinReplica | None) -> PinReply:
    return PinReply(
        id=fact.id,
        salt=None if mine is None else mine.namespace.salt,
        adapter=None if mine is None else mine.namespace.adapter,
        tokens=fact.num_tokens,
        blocks=fact.num_tokens // block_size,
        ttl_s=fact.remaining_s,
        replicas=[
            PinPart(
                replica=part.replica_id,
                state="failed" if part.state == "lost" else part.state,
                error="left" if part.state == "lost" else part.error or None,
            )
            for part in fact.parts
        ],
    )


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/pins",
        pin,
        "Pin a prefix",
        "tenant",
        {201: PinReply},
        body=PinRequest,
        errors=(404, 409, 429, 501, 503),
    ),
    Endpoint(
        "GET",
        "/v1/pins",
        list_pins,
        "List pins",
        "tenant",
        {200: PinsReply},
        query={
            "limit": f"most pins in an answer, 1 to {MAX_LISTED}",
            "after": "only pins after this id; the header Link has it",
        },
        errors=(422, 503),
    ),
    Endpoint("DELETE", "/v1/pins/{pin}", unpin, "End a pin", "tenant", {204: None}, errors=(404, 422, 503)),
    Endpoint(
        "POST",
        PIN_PATH,
        pin_for_replica,
        "Pin for another replica",
        "replica",
        {202: None},
        body=PinOrder,
        internal=True,
    ),
)
