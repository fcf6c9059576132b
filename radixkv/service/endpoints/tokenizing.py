"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's form. They are read like prompts, off the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from radixkv.service.endpoint import Call, Endpoint
from radixkv.service.endpoints.completions import check_model
from radixkv.service.problems import LongJson
from radixkv.service.schemas.tokenizing import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from radixkv.service.core import Service
    from radixkv.service.schemas.base import ReplyBody


async def tokenize(call: Call[Service]) -> Response:
    """Return the token ids of a text, or of messages of a chat."""
    reading = await call.read(TokenizeRequest)
    service, prompt = call.host, reading.prompts[0]
    check_model(service, reading.body.model)
    length = service.engine.limits.max_model_len

    def written() -> TokenizeReply:
        return TokenizeReply(count=prompt.num_tokens, max_model_len=length, tokens=prompt.ids.tolist())

    return await service.threads.run(call.tenant, lambda: _json(written()))


async def detokenize(call: Call[Service]) -> Response:
    """Return the text of token ids, without special ones."""
    reading = await call.read(DetokenizeRequest)
    check_model(call.host, reading.body.model)
    text = reading.prompts[0].text
    return await call.host.threads.run(call.tenant, lambda: _json(DetokenizeReply(prompt=text)))


def _json(answer: ReplyBody) -> Response:
    return LongJson(answer.model_dump())


ENDPOINTS = (
    Endpoint(
        "POST",
        "/tokenize",
        tokenize,
        "Get the token ids of a text",
        "tenant",
        {200: TokenizeReply},
        body=TokenizeRequest,
        errors=(404,),
    ),
    Endpoint(
        "POST",
        "/detokenize",
        detokenize,
        "Get the text of token ids",
        "tenant",
        {200: DetokenizeReply},
        body=DetokenizeRequest,
        errors=(404,),
    ),
)
