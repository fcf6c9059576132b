"""``/v1/models`` and ``/version``: which model is served, by which version."""

from __future__ import annotations

import time
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from radixkv.service.dialects import OPENAI
from radixkv.service.endpoint import Call, Endpoint, reply
from radixkv.service.problems import ApiError
from radixkv.service.schemas.models import ModelReply, ModelsReply, VersionReply

if TYPE_CHECKING:
    from radixkv.service.core import Service

_STARTED_AT: Final = int(time.time())


async def models(call: Call[Service]) -> Response:
    """List the model that this service serves, in OpenAI's form."""
    call.query()
    return reply(ModelsReply(data=[_model(call.host)]))


async def model(call: Call[Service]) -> Response:
    """Return the model with this name, in OpenAI's form. A slash in the name is written as `%2F`."""
    call.query()
    wanted = call.path_text("model")
    if wanted != call.host.model_name:
        raise ApiError(404, "not_found", "no such model", field="model", value=wanted)
    return reply(_model(call.host))


async def version(call: Call[Service]) -> Response:
    """Return the version of radixkv."""
    return reply(VersionReply(version=version_of("radixkv")))


def _model(service: Service) -> ModelReply:
    length = service.engine.limits.max_model_len
    return ModelReply(id=service.model_name, created=_STARTED_AT, owned_by="radixkv", max_model_len=length)


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/models",
        models,
        "List models",
        "tenant",
        {200: ModelsReply},
        errors=(422,),
        dialect=OPENAI,
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
    ),
    Endpoint("GET", "/version", version, "Get the version", "anyone", {200: VersionReply}),
)
