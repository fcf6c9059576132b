"""The types of errors over HTTP, with their statuses, their meaning, and advice for clients.

``ERROR_TYPES`` is the only table. ``/docs/errors`` and the examples of ``/openapi.json`` are made from it. Every error
body links to the entry of its type with ``docs_url``. The hints of errors in process are in ``radixkv.errors``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from radixkv.errors import RadixKVError

DOCS_PATH = "/docs/errors"
"""The page that describes all types. Each type has an anchor of its name there."""


@dataclass(frozen=True, slots=True)
class ErrorType:
    """One type of error.

    - ``statuses``: its HTTP statuses. Empty if it occurs only in the ``error`` of one replica's part of a job or a pin.
    - ``meaning``: the cause.
    - ``action``: the client's remedy.
    - ``example``: ``message``, ``field``, ``value`` and ``allowed`` of a typical error. A missing field is null.
    """

    type: str
    statuses: tuple[int, ...]
    meaning: str
    action: str
    example: Mapping[str, object]

    def example_body(self) -> dict[str, dict[str, object]]:
        """Return a typical body of this type."""
        fields = {"type": self.type, "message": self.meaning, "field": None, "value": None, "allowed": None}
        return {"error": {**fields, **self.example, "docs_url": docs_url(self.type)}}


_LISTED = (
    ErrorType(
        "invalid_json",
        (400,),
        "The body isn't JSON, or not one JSON value.",
        "Send one JSON object in UTF-8. Let a JSON library write it.",
        {"message": "EOF while parsing an object at line 1 column 1", "allowed": "one JSON object"},
    ),
    ErrorType(
        "ambiguous_length",
        (400,),
        "The request states its length more than once. A proxy and the service could read it differently.",
        "Send either Content-Length or Transfer-Encoding, once. Check the proxies in between.",
        {
            "message": "the request states its length more than once",
            "field": "content-length",
            "allowed": "one of Content-Length and Transfer-Encoding, once",
        },
    ),
    ErrorType(
        "unauthorized",
        (401,),
        "The request has no valid key. Under /internal/, its signature isn't valid.",
        "Send the header `Authorization: Bearer KEY` exactly once. The operator can make a new key.",
        {
            "message": "the request has no valid key, or two; send the header Authorization: Bearer KEY once",
            "field": "authorization",
        },
    ),
    ErrorType(
        "forbidden",
        (403,),
        "The key is valid, but this endpoint needs another kind of key.",
        "Use a tenant's key for prompts, pins and caches. Use the operator's key for keys, tenants, bases and metrics.",
        {"message": "this endpoint needs the operator's key", "field": "authorization"},
    ),
    ErrorType(
        "not_found",
        (404,),
        "The path, job, pin, namespace, model, key, tenant or base doesn't exist, or it belongs to another tenant. "
        "Both cases give the same answer.",
        "Check the id. A job is forgotten some minutes after it has finished. A purge removes jobs and pins.",
        {"message": "no such job"},
    ),
    ErrorType(
        "method_not_allowed",
        (405,),
        "The path exists, but not with this method.",
        "Use a method that the header `Allow` names.",
        {"message": "this path has no such method", "field": "method", "value": "GET", "allowed": "POST"},
    ),
    ErrorType(
        "timeout",
        (408, 504),
        "408: the body didn't arrive in time. 504: the answer wasn't ready in time, and its work was cancelled.",
        "408: send the body faster. 504: ask for less at once, or warm in the background with `wait: false`.",
        {"message": "the answer wasn't ready in time", "allowed": "600 seconds"},
    ),
    ErrorType(
        "conflict",
        (409,),
        "The request doesn't fit the present state. For example, the cache was cleared or purged meanwhile, the "
        "Idempotency-Key belongs to another request, or the key is the operator's last one.",
        "Read the message. If the answer has the header Retry-After, send the request again.",
        {"message": "the cache of this namespace was cleared meanwhile; try again"},
    ),
    ErrorType(
        "not_resident",
        (409,),
        "The prefix to pin isn't completely resident on this replica.",
        "Warm the prefix, then pin it. Or pin it with `replicas`: then each replica computes what it lacks.",
        {
            "message": "only 0 of 128 tokens are resident: compute the prefix, then pin it",
            "value": 0,
            "allowed": "a prefix that is resident, with all its 128 tokens: warm it first",
        },
    ),
    ErrorType(
        "pin_budget_exceeded",
        (409,),
        "The pin would exceed the blocks that the tenant may pin.",
        "End a pin, or pin a shorter prefix. The operator can raise `max_pinned_blocks`.",
        {
            "message": "64 blocks to pin, 1000 of the tenant's budget of 1024 pinned already",
            "value": 64,
            "allowed": "at most 1024 blocks: max_pinned_blocks of the tenant, or else its guarantee, or its part of a "
            "quarter of the pool",
        },
    ),
    ErrorType(
        "pin_limit_exceeded",
        (409,),
        "The tenant has as many pins as it may have.",
        "End a pin, or wait until one ends. The operator can raise `max_pins`.",
        {
            "message": "1024 of the tenant's 1024 pins are in use: unpin one, or let one end",
            "value": 1024,
            "allowed": "at most 1024 pins",
        },
    ),
    ErrorType(
        "body_too_large",
        (413,),
        "The body has more bytes than the endpoint or the tenant's limit allows.",
        "Send a shorter body, for example fewer prompts at once. The operator can raise `max_body_bytes`.",
        {
            "message": "the body is too large",
            "field": "content-length",
            "value": 9000000,
            "allowed": "at most 4194304 bytes",
        },
    ),
    ErrorType(
        "unsupported_media_type",
        (415,),
        "The header Content-Type doesn't say that the body is JSON, or the body is compressed.",
        "Send `Content-Type: application/json`, and the body as it is, without Content-Encoding.",
        {
            "message": "the body must be JSON",
            "field": "content-type",
            "value": "text/plain",
            "allowed": "application/json",
        },
    ),
    ErrorType(
        "validation_error",
        (422,),
        "A field of the body, the query or the path has a value that is not allowed, or the fields don't go together.",
        "Correct the field that `field` names. `allowed` says what it may be. Repeating the same request doesn't help.",
        {
            "message": "max_tokens=0 is not allowed; allowed: an integer from 1 to 2147483647",
            "field": "max_tokens",
            "value": 0,
            "allowed": "an integer from 1 to 2147483647",
        },
    ),
    ErrorType(
        "busy",
        (429,),
        "Too many requests or jobs of this tenant are waiting or in progress.",
        "Wait for the seconds in Retry-After, and send fewer requests at once.",
        {"message": "too many of your requests are waiting; try again shortly"},
    ),
    ErrorType(
        "rate_limited",
        (429,),
        "The tenant sends more requests a second than its limit allows, or they use more of the event loop's time than "
        "one tenant's may.",
        "Wait for the seconds in Retry-After. `allowed` names the limit. The operator can raise `requests_per_s` and "
        "`burst`, or add replicas.",
        {"message": "too many requests; try again later", "allowed": "1000 requests a second, 2000 at once"},
    ),
    ErrorType(
        "internal",
        (500,),
        "A bug in radixkv. The answer has no details; the server's log has them.",
        "Report it with the lines of the log. Check /healthz: if it answers 503, replace the process.",
        {"message": "an internal error of the server; its log has the details"},
    ),
    ErrorType(
        "not_supported",
        (501,),
        "The engine that this service runs can't do what the request needs.",
        "Send the request to a service with another engine (`serve --engine`), or do without.",
        {"message": "the engine of this service has no pins", "value": "pins"},
    ),
    ErrorType(
        "no_capacity",
        (400, 503),
        "503: the cache has too few free blocks for this request now. 400: it never has, because the rest is "
        "guaranteed to other tenants.",
        "503: wait for the seconds in Retry-After and try again. 400: send less, or ask for a shorter answer. The "
        "operator can guarantee blocks to a tenant (`guaranteed_blocks`), or give the cache more blocks.",
        {"message": "the cache has too few free blocks for this request at the moment; try again"},
    ),
    ErrorType(
        "quota_exceeded",
        (400, 503),
        "503: the tenant's other requests and pins leave too few blocks of its limit now. 400: this request alone "
        "exceeds the limit.",
        "503: wait until your other requests end, or end a pin. 400: send less, or ask for a shorter answer. The "
        "operator can raise `max_blocks` or `fleet_blocks`.",
        {
            "message": "12 blocks needed, 8 of the tenant's 8 used, 0 of them evictable",
            "value": 12,
            "allowed": "at most 8 blocks",
        },
    ),
    ErrorType(
        "stalled",
        (503,),
        "The client didn't read the stream, and other requests needed its place.",
        "Send the request again, and read the stream as it comes.",
        {"message": "the client didn't read this stream, and other requests needed its place; try again"},
    ),
    ErrorType(
        "shutting_down",
        (503,),
        "The process is about to end.",
        "Send the request to another replica, or again after the seconds in Retry-After.",
        {"message": "the server is shutting down"},
    ),
    ErrorType(
        "not_read",
        (503,),
        "The process that read the body ended before it was done.",
        "Send the request again. If it happens often, look for processes that the system killed for memory.",
        {"message": "the process that read the body ended before it was done; try again"},
    ),
    ErrorType(
        "engine_unavailable",
        (503,),
        "The engine's own process is starting, has ended, or gave an answer that can't be right.",
        "Try again after the seconds in Retry-After. If it goes on, read the engine's log.",
        {"message": "the engine's process can't serve this now; try again"},
    ),
    ErrorType(
        "store_unavailable",
        (503,),
        "The fleet's store (Redis) doesn't work, and this request needs it. Prompts are still served.",
        "Try again after the seconds in Retry-After. The message says what was done already.",
        {"message": "the store of pins can't be reached; nothing was pinned"},
    ),
    ErrorType(
        "no_replica",
        (503,),
        "No live replica serves the requested model, or no replica is known.",
        "Check `model`, and that replicas run with the same Redis. Try again after the seconds in Retry-After.",
        {"message": "no live replica that serves this model is known"},
    ),
    ErrorType(
        "generation_unconfirmed",
        (503,),
        "This replica can't know whether the tenant was purged, and the tenant's settings forbid it to serve then.",
        "Send the request to another replica, or try again. `on_unconfirmed_generation: serve` allows it.",
        {
            "message": "this replica can't know whether the tenant was purged, and the tenant's settings forbid it to "
            "serve then; try another replica"
        },
    ),
    ErrorType(
        "settings_pending",
        (503,),
        "The tenant is new to this replica, which can't keep its settings now or can't read them.",
        "Send the request to another replica, or try again. The operator sees the reason in `GET /v1/tenants`.",
        {
            "message": "this replica can't serve the tenant as its settings ask, so it doesn't serve it; try another "
            "replica"
        },
    ),
    ErrorType(
        "not_saved",
        (503,),
        "The keys file can't be written or is locked, or a disk can't destroy records yet. No key and no setting was "
        "changed.",
        "Correct the cause that the message names, for example a full disk or a process that holds the lock, and try "
        "again.",
        {"message": "the keys file can't be written: No space left on device"},
    ),
    ErrorType(
        "unreachable",
        (503,),
        "A replica can't be reached over the network.",
        "Try again, or name other replicas. Check `--advertise` and the network between the replicas.",
        {"message": "no replica took the pin: unreachable"},
    ),
    ErrorType(
        "failed",
        (503,),
        "The work failed on all replicas, for several reasons. The message names the types.",
        "Look up each type on this page.",
        {"message": "no replica could warm it: no_answer, unreachable"},
    ),
    ErrorType(
        "left",
        (503,),
        "The replica left the fleet, or its lease ran out, before its part was done.",
        "Send the request again: live replicas take the part.",
        {"message": "no replica could warm it: left"},
    ),
    ErrorType(
        "no_answer",
        (503,),
        "The process at the replica's address answered, but its answer isn't one of radixkv.",
        "Check that its address (`--advertise`) leads to radixkv, and that all replicas run the same version.",
        {"message": "no replica could warm it: no_answer"},
    ),
    ErrorType(
        "other_model",
        (503,),
        "The replica serves another model, tokenizer or block size.",
        "Name replicas that serve the same model. `/v1/replicas` shows the model of each.",
        {"message": "no replica could warm it: other_model"},
    ),
    ErrorType(
        "other_weights",
        (503,),
        "The replica serves another version of the weights, so its KV can't stand in for those of this replica.",
        "Send the request again when all replicas have the same weights. `/v1/replicas` shows the version of each.",
        {"message": "no replica could warm it: other_weights"},
    ),
    ErrorType(
        "unproven",
        (503,),
        "The process at the replica's address didn't prove that it has the fleet's secret. Nothing was sent to it.",
        "Check that all replicas have the same `--fleet-secret`, and that the address is the replica's.",
        {"message": "no replica could warm it: unproven"},
    ),
    ErrorType(
        "cleared",
        (),
        "The tenant cleared the namespace on this replica, or the model's weights changed there. So the pin doesn't "
        "hold there any more.",
        "Pin the prefix again.",
        {},
    ),
)

ERROR_TYPES: Mapping[str, ErrorType] = {each.type: each for each in _LISTED}
"""All types, by name, in the order of their statuses."""

_DOCS_URLS = {name: f"{DOCS_PATH}#{name}" for name in ERROR_TYPES}


def docs_url(type: str) -> str:
    """Return the path of a type's description on this service; that of the whole page for an unknown type. O(1)."""
    return _DOCS_URLS.get(type, DOCS_PATH)


def error_classes() -> Iterator[tuple[int, type[RadixKVError]]]:
    """Yield the errors of ``radixkv.errors`` as a tree: the depth of each, 0 for the base, and its class.

    What a class means is its docstring, and what to do is its ``hint``.
    """
    yield from _below(RadixKVError, 0)


def _below(error: type[RadixKVError], depth: int) -> Iterator[tuple[int, type[RadixKVError]]]:
    yield depth, error
    for each in error.__subclasses__():
        if each.__module__ == RadixKVError.__module__:
            yield from _below(each, depth + 1)
