"""Every answer that is not a success, in one JSON shape.

    {"error": {"type": "validation_error", "message": "…", "field": "token_ids[3]", "value": 99999, "allowed": "…",
               "docs_url": "/docs/errors#validation_error"}}

All six names are always there; a name that does not apply is null. ``docs_url`` is a path on this service: the page
that says what the type means and what to do. Values that a client sent are shortened before they
are echoed. No answer tells one tenant about another: an unknown object and another tenant's object give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import JSONResponse

from radixkv.errors import (
    ArgumentError,
    CapacityError,
    ControlError,
    LeaseError,
    NamespaceError,
    NotResident,
    PinBudgetExceeded,
    PinLimitExceeded,
    QuotaExceeded,
    RadixKVError,
    TokenError,
    made_again,
)
from radixkv.service.error_types import ERROR_TYPES, docs_url
from radixkv.service.schemas.base import TWO_VALUES, UNKNOWN_FIELDS
from radixkv.service.schemas.ignored import NOT_SUPPORTED
from radixkv.service.turns import LOOP_BURST_S, LOOP_SHARE
from radixkv.service.wording import allowed_at, schema_of

MAX_ECHO = 80
RETRY_AFTER_S = 1
"""Seconds to retry after a temporary problem."""
OUTAGE_RETRY_AFTER_S = 5
"""Seconds to retry after an outage."""
_TAGS = frozenset(
    {
        "text",
        "ids",
        "texts",
        "batch",
        "one",
        "many",
        "place",
        "count",
        "names",
        "tool_use",
        "tool_result",
        "message",
        "function_call",
        "function_call_output",
        "plain",
        "group",
    }
)


class ApiError(Exception):
    """An answer other than success. ``status`` is HTTP's; ``retry_after_s``: a retry after it may succeed.

    ``is_too_long``: the prompt, or the prompt with its answer, exceeds the model's length. Some dialects have a code
    for it. The other fields, except ``headers``, go into the body.
    """

    def __init__(
        self,
        status: int,
        type: str,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        allowed: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        is_too_long: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_too_long = is_too_long
        self.status, self.type, self.headers = status, type, dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(ceil(retry_after_s), 1))
        self.body = {
            "type": type,
            "message": message,
            "field": field,
            "value": shown(value),
            "allowed": allowed,
            "docs_url": docs_url(type),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return made_again(self)

    def response(self) -> JSONResponse:
        """Return the answer to send."""
        return Json({"error": self.body}, self.status, self.headers)


class Json(JSONResponse):
    """JSON that ends with a newline, so that a terminal's prompt starts on a new line."""

    def render(self, content: Any) -> bytes:
        return super().render(content) + b"\n"


class LongJson(Json):
    """The same bytes, made string by string. If a thread makes a long answer, other threads can run in between."""

    def render(self, content: Any) -> bytes:
        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return ("".join(encoder.iterencode(content)) + "\n").encode()


def shown(value: object) -> object:
    """Return ``value`` as it may be echoed: JSON, and no longer than MAX_ECHO characters."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) < 2**63:
        return value
    text = value if isinstance(value, str) else _short_repr(value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "…"


def _short_repr(value: object) -> str:
    if isinstance(value, int):
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {len(value)} names"
    return repr(value)


def invalid(
    message: str, field: str | None, value: object, allowed: str, *, is_too_long: bool = False
) -> ApiError:
    """422: a body that can't be served as it is. The message also says what is allowed."""
    said = message if "; allowed: " in message else f"{message}; allowed: {allowed}"
    return ApiError(
        422, "validation_error", said, field=field, value=value, allowed=allowed, is_too_long=is_too_long
    )


def refused(
    field: str, value: object, reason: str | None, allowed: str, *, is_too_long: bool = False
) -> ApiError:
    """422 in the one form: ``FIELD=VALUE is not allowed, because REASON; allowed: WHAT``."""
    because = "" if reason is None else f", because {reason}"
    return invalid(
        f"{field}={_as_json(value)} is not allowed{because}; allowed: {allowed}",
        field,
        value,
        allowed,
        is_too_long=is_too_long,
    )


def _as_json(value: object) -> str:
    """Return a value as JSON, cut as in an echo; for lists and objects the number of items."""
    told = shown(value)
    return (
        json.dumps(told, ensure_ascii=False) if value is None or isinstance(value, str | bool) else str(told)
    )


def _listed(type: str, retry_after_s: float | None = None) -> Callable[[], ApiError]:
    """Return what makes an answer whose text is always the same: the message of the type's example, with its status."""
    listed = ERROR_TYPES[type]
    message = str(listed.example["message"])
    return partial(ApiError, listed.statuses[-1], type, message, retry_after_s=retry_after_s)


busy = _listed("busy", RETRY_AFTER_S)
"""429: the caller has too many requests waiting."""
no_capacity = _listed("no_capacity", RETRY_AFTER_S)
"""503: no capacity for this request now."""
cleared = _listed("conflict", RETRY_AFTER_S)
"""409: a clear or a purge removed what the request worked on; the client may send it again."""
stalled = _listed("stalled", RETRY_AFTER_S)
"""503: the answer wasn't read, and other requests needed its place."""
shutting_down = _listed("shutting_down", OUTAGE_RETRY_AFTER_S)
"""503: this process is about to end."""
not_read = _listed("not_read", RETRY_AFTER_S)
"""503: the process that read the body ended before it was done."""
engine_unavailable = _listed("engine_unavailable", OUTAGE_RETRY_AFTER_S)
"""503: the process of the engine can't be used now."""
generation_unconfirmed = _listed("generation_unconfirmed", RETRY_AFTER_S)
"""503: the tenant may have been purged, and forbids service from before the purge."""
settings_pending = _listed("settings_pending", RETRY_AFTER_S)
"""503: what the keys file says of the tenant can't be in force here."""
internal = _listed("internal")
"""500: a bug in radixkv; no details are shown."""


def not_found(what: str) -> ApiError:
    """404: it doesn't exist, or belongs to another tenant."""
    return ApiError(404, "not_found", f"no such {what}")


def too_fast(wait_s: float, allowed: str) -> ApiError:
    """429: the caller sends requests too often."""
    message = "too many requests; try again later"
    return ApiError(429, "rate_limited", message, allowed=allowed, retry_after_s=wait_s)


def above_share(wait_s: float) -> ApiError:
    """429: the caller's requests use more of the event loop than one tenant may."""
    message = "your requests use more of the server's time than one tenant's may; try again later"
    allowed = f"{LOOP_SHARE:.0%} of the event loop's time, {LOOP_BURST_S:g} s at once"
    return ApiError(429, "rate_limited", message, allowed=allowed, retry_after_s=wait_s)


def body_timed_out(timeout_s: float) -> ApiError:
    """408: the body didn't arrive in time."""
    return ApiError(408, "timeout", "the body didn't arrive in time", allowed=f"{timeout_s:g} seconds")


def timed_out(timeout_s: float) -> ApiError:
    """504: the answer wasn't ready in time; its work is cancelled."""
    return ApiError(504, "timeout", "the answer wasn't ready in time", allowed=f"{timeout_s:g} seconds")


def quota_exceeded(error: QuotaExceeded) -> ApiError:
    """503: the caller's own limit leaves no capacity now; 400: it never does. Only its own numbers are shown."""
    is_final = error.needed > error.limit
    return ApiError(
        400 if is_final else 503,
        "quota_exceeded",
        str(error),
        value=error.needed,
        allowed=f"at most {error.limit} blocks",
        retry_after_s=None if is_final else RETRY_AFTER_S,
    )


def pin_budget_exceeded(error: PinBudgetExceeded) -> ApiError:
    """409: the caller may not pin so much; only its own numbers are shown."""
    allowed = (
        f"at most {error.budget} blocks: max_pinned_blocks of the tenant, or else its guarantee, or its part of a "
        "quarter of the pool"
    )
    return ApiError(409, "pin_budget_exceeded", str(error), value=error.needed, allowed=allowed)


def pin_limit_exceeded(error: PinLimitExceeded) -> ApiError:
    """409: the caller may not have more pins; only its own numbers are shown."""
    allowed = f"at most {error.limit} pins"
    return ApiError(409, "pin_limit_exceeded", str(error), value=error.num_pins, allowed=allowed)


def not_resident(error: NotResident) -> ApiError:
    """409: the prefix to pin is not completely resident."""
    allowed = f"a prefix that is resident, with all its {error.num_tokens} tokens: warm it first"
    return ApiError(409, "not_resident", str(error), value=error.resident_tokens, allowed=allowed)


def revoked() -> ApiError:
    """401: the request's key was revoked while it waited or ran."""
    return ApiError(
        401,
        "unauthorized",
        "the key of this request was revoked before the answer ended; send it again with a valid key",
        field="authorization",
        headers={"WWW-Authenticate": 'Bearer realm="radixkv"'},
    )


def store_unavailable(message: str) -> ApiError:
    """503: the fleet's store can't be reached."""
    return ApiError(503, "store_unavailable", message, retry_after_s=OUTAGE_RETRY_AFTER_S)


def no_replica(message: str) -> ApiError:
    """503: no known replica could serve this."""
    return ApiError(503, "no_replica", message, retry_after_s=OUTAGE_RETRY_AFTER_S)


def other_weights() -> ApiError:
    """503: another replica sent an order for another version of the weights."""
    message = "this replica serves another version of the weights"
    return ApiError(503, "other_weights", message, retry_after_s=RETRY_AFTER_S)


def not_supported(ability: str) -> ApiError:
    """The engine lacks an ability that a request needs: see ``radixkv.engines.Ability``."""
    return ApiError(501, "not_supported", f"the engine of this service has no {ability}", value=ability)


def of_library(error: RadixKVError) -> ApiError:
    """Return the answer to an error of the library; 500 if the client can't correct it."""
    if isinstance(error, TokenError):
        field = "token_ids" if error.index is None else f"token_ids[{error.index}]"
        return invalid(str(error), field, None, "token ids of the vocabulary")
    if isinstance(error, ArgumentError):
        return invalid(str(error), error.argument, error.value, error.allowed)
    if isinstance(error, NamespaceError):
        return invalid(str(error), "salt, adapter", None, "text that can name a namespace")
    if isinstance(error, QuotaExceeded):
        return quota_exceeded(error)
    if isinstance(error, PinBudgetExceeded):
        return pin_budget_exceeded(error)
    if isinstance(error, PinLimitExceeded):
        return pin_limit_exceeded(error)
    if isinstance(error, NotResident):
        return not_resident(error)
    if isinstance(error, CapacityError):
        return no_capacity()
    if isinstance(error, LeaseError):
        return cleared()
    if isinstance(error, ControlError):
        return engine_unavailable()
    return internal()


def of_validation(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Return the answer to a body that doesn't match ``model``: the first error, and the number of further ones.

    The schemas bound the number of errors: unknown fields are one, lists stop at the first bad item.
    """
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "invalid_json", first["msg"], allowed="one JSON object")
    context = first.get("ctx", {})
    is_unknown = first["type"] == UNKNOWN_FIELDS
    num_more = error.error_count() - 1 + (context["more"] if is_unknown else 0)
    more = f" (and {num_more} more)" if num_more else ""
    field = str(shown(_field_of(first)))
    if is_unknown:
        allowed = _known_fields(first["loc"], model)
        return _validation_error(f"unknown field {field}{more}", field, context["value"], allowed)
    if first["type"] == "missing":
        return _validation_error(f"{field} is required{more}", field, None, "a value")
    value = context["value"] if place_of(first) != first["loc"] else first["input"]
    allowed = context["allowed"] if "allowed" in context else _allowed(first, model)
    wrong = "not supported" if first["type"] == NOT_SUPPORTED else "not allowed"
    wrong += f", because {context['reason']}" if "reason" in context else ""
    given = f"{field}={_as_json(value)}" if field else f"the body, {_as_json(value)},"
    return _validation_error(f"{given} is {wrong}; allowed: {allowed}{more}", field or None, value, allowed)


def _validation_error(message: str, field: str | None, value: object, allowed: str) -> ApiError:
    return ApiError(422, "validation_error", message, field=field, value=value, allowed=allowed)


def _allowed(error: ErrorDetails, model: type[BaseModel]) -> str:
    """Return what the schema allows there, in words, or else the text of pydantic or of a validator."""
    said = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    is_own = error["type"] in ("value_error", "where", "top_k")
    return said if is_own else allowed_at(model, error["loc"]) or said


def place_of(error: ErrorDetails) -> tuple[int | str, ...]:
    """Return the place of a pydantic error; unknown fields are reported as one error of their object."""
    has_name = error["type"] in (UNKNOWN_FIELDS, TWO_VALUES, NOT_SUPPORTED) and "name" in error["ctx"]
    return (*error["loc"], error["ctx"]["name"]) if has_name else error["loc"]


def _field_of(error: ErrorDetails) -> str:
    """Return the place of a pydantic error as a path such as ``messages[2].role``. Tags of unions are left out."""
    name, own = "", place_of(error)[len(error["loc"]) :]
    for part in error["loc"]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in _TAGS or not name:
            name += f".{part}" if name else part
    for each in own:
        name += f"[{each}]" if isinstance(each, int) else f".{each}" if name else str(each)
    return name


def _known_fields(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    schema = schema_of(model)
    definition: dict[str, Any] = schema
    for part in loc:
        if isinstance(part, str) and part in definition.get("properties", {}):
            reference = _reference(definition["properties"][part])
            definition = schema["$defs"][reference] if reference else {}
    return "one of " + ", ".join(definition.get("properties", {}))


def _reference(schema: dict[str, Any]) -> str | None:
    """Return the name of the definition that a property, or the items of its list, refer to."""
    for candidate in (schema, schema.get("items", {}), *schema.get("anyOf", [])):
        target = candidate.get("$ref") or candidate.get("items", {}).get("$ref")
        if target:
            return str(target).rsplit("/", 1)[-1]
    return None
