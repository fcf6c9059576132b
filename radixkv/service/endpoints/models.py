"""``/v1/models`` and ``/version``: which model is served, by which version."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from radixkv.service.dialects import OPENAI
from radixkv.service.endpoint import Call, Endpoint, reply
from radixkv.service.endpoints.completions import check_model
from radixkv.service.problems import refused
from radixkv.service.schemas.models import ModelReply, ModelsReply, VersionReply

if TYPE_CHECKING:
    from radixkv.service.core import Service

MAX_PAGE: Final = 1_000
_OF_CLIENTS: Final = ("beta", "client_version")
"""Fields of the query that Anthropic's and OpenAI's own clients send, and that change nothing."""
_STARTED_AT: Final = int(time.time())


async def models(call: Call[Service]) -> Response:
    """List the model that this service serves, in the forms of OpenAI and Anthropic.

    `limit`, `after_id` and `before_id` are Anthropic's pages: before and after the one model there is nothing.
    """
    query = call.query("limit", "after_id", "before_id", *_OF_CLIENTS)
    if "limit" in query and not (query["limit"].isdecimal() and 1 <= int(query["limit"][:6]) <= MAX_PAGE):
        raise refused("limit", query["limit"], None, f"an integer from 1 to {MAX_PAGE}")
    is_beside = call.host.model_name in (query.get("after_id"), query.get("before_id"))
    name = None if is_beside else call.host.model_name
    data = [] if is_beside else [_model(call.host)]
    return reply(ModelsReply(data=data, first_id=name, last_id=name))


async def model(call: Call[Service]) -> Response:
    """Return the model with this name, in the forms of OpenAI and Anthropic.

    A slash in the name is written as `%2F`.
    """
    call.query(*_OF_CLIENTS)
    check_model(call.host, call.path_text("model"))
    return reply(_model(call.host))


async def version(call: Call[Service]) -> Response:
    """Return the version of radixkv."""
    return reply(VersionReply(version=version_of("radixkv")))


def _model(service: Service) -> ModelReply:
    length, name = service.engine.limits.max_model_len, service.model_name
    return ModelReply(
        id=name,
        created=_STARTED_AT,
        owned_by="radixkv",
        max_model_len=length,
        display_name=name,
        created_at=datetime.fromtimestamp(_STARTED_AT, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=length,
        max_tokens=length,
        forgeable_roles=service.tokenizer.forgeable,
    )


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/models",
        models,
        "List models",
        "tenant",
        {200: ModelsReply},
        query={
            "limit": f"most models in an answer, 1 to {MAX_PAGE}",
            "after_id": "the page after this model",
            "before_id": "the page before this model",
        },
        errors=(422,),
        dialect=OPENAI,
        has_clients_dialect=True,
    ),
    Endpoint(
        "GET",
        "/v1/models/{model}",
        model,
        "Get a model",
        "tenant",
        {200: ModelReply},
        errors=(404, 422),
        dialect=OPENAI,
        has_clients_dialect=True,
    ),
    Endpoint("GET", "/version", version, "Get the version", "anyone", {200: VersionReply}),
)
