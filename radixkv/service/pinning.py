"""Pins over HTTP: a tenant keeps prefixes of its own resident, sees which, and lets them go. On this replica alone.

A pin takes what ``/v1/warm`` would have computed, and takes microseconds: it runs on the event loop, like a lookup.
"""

from __future__ import annotations

from starlette.responses import Response

from radixkv.pins import Pin
from radixkv.service.endpoint import Call, Endpoint, reply
from radixkv.service.problems import invalid, not_found
from radixkv.service.prompts import prefix_of
from radixkv.service.schemas import PinReply, PinRequest, PinsReply


async def pin(call: Call) -> Response:
    """Keep a resident prefix resident for some time; pinned again, its time begins anew. Warm it first."""
    body = call.read(PinRequest)
    service = call.service
    prefix = await prefix_of(body, service.tokenizer, service.rules)
    if not len(prefix.ids):
        allowed = f"at least a block of {service.rules.block_size} tokens up to its last stable boundary"
        raise invalid("the prompt is too short to be pinned", "prompt, messages, token_ids", None, allowed)
    namespace = service.namespace(call.tenant, body.salt, body.adapter)
    return reply(_shown(service.cache.pin(namespace, prefix.ids, body.ttl_s)), 201)


async def list_pins(call: Call) -> Response:
    """The caller's pins that hold, the oldest first."""
    call.query()
    return reply(PinsReply(pins=[_shown(each) for each in call.service.cache.pins(call.tenant)]))


async def unpin(call: Call) -> Response:
    """End a pin of the caller's before its time; what it held is evicted when its turn comes."""
    call.query()
    cache, wanted = call.service.cache, call.request.path_params["pin"]
    for each in cache.pins(call.tenant):
        if str(each.id) == wanted:
            cache.unpin(each)
            return Response(status_code=204)
    raise not_found("pin")


def _shown(pin: Pin) -> PinReply:
    return PinReply(
        id=str(pin.id),
        salt=pin.namespace.salt,
        adapter=pin.namespace.adapter,
        tokens=pin.num_tokens,
        blocks=pin.num_blocks,
        ttl_s=pin.ttl_s,
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
        errors=(409, 503),
    ),
    Endpoint("GET", "/v1/pins", list_pins, "Pins", "tenant", {200: PinsReply}, errors=(422,)),
    Endpoint("DELETE", "/v1/pins/{pin}", unpin, "End a pin", "tenant", {204: None}, errors=(404, 422)),
)
