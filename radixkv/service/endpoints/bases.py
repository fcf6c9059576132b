"""Bases over HTTP: the operator publishes a prefix on this replica, for tenants to read.

The blocks belong to an account that no key can name (``OPERATOR_ACCOUNT``). So no tenant pays for a base, and tenants
can only read it. The model's thread computes a base in the operator's lane. A client that hangs up ends the
computation. Tenants aren't informed of a base: a reader sees it only by its hits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.responses import Response

from radixkv.engines.calls import publishing
from radixkv.engines.protocol import Tally
from radixkv.errors import ArgumentError
from radixkv.index.bases import BaseInfo
from radixkv.metering.records import Counts
from radixkv.service.auth import OPERATOR_ACCOUNT
from radixkv.service.endpoint import Call, Endpoint, reply, until_disconnect
from radixkv.service.engine_loop import Work, finished
from radixkv.service.problems import ApiError, invalid, not_found
from radixkv.service.schemas.bases import (
    BaseReply,
    BasesReply,
    PublishedReply,
    PublishRequest,
    ReadersRequest,
)
from radixkv.service.usage import usage_so_far

if TYPE_CHECKING:
    from radixkv.engines import EngineCache, Prefill
    from radixkv.engines.steps import Steps
    from radixkv.service.auth import Keyring
    from radixkv.service.core import Service
    from radixkv.service.threads import Threads


async def publish(call: Call[Service]) -> Response:
    """Compute a prefix and publish it as a base. The answer comes when its readers can read it."""
    call.query()
    call.host.require("publish")
    reading = await call.read(PublishRequest)
    service, body, prompt = call.host, reading.body, reading.prompts[0]
    readers = _known(service.keyring, body.readers)
    if not prompt.key:
        message = "the prefix is shorter than a block"
        raise invalid(
            message, "prompt", prompt.left_out, f"at least {service.rules.block_size} stable tokens"
        )
    namespace, tally = service.namespace(OPERATOR_ACCOUNT, "", body.adapter), Tally()

    record_number = 0

    def compute(work: Work[Prefill]) -> Steps[Prefill]:
        nonlocal record_number

        def on_chunk(done: int, total: int) -> None:
            call.owner.require_key()
            work.num_prefill_tokens = total - done
            if done < total:
                work.check()

        call.owner.require_key()
        usage = Counts()
        try:
            done = yield from publishing(
                service.engine,
                body.id,
                service.current(namespace),
                prompt.key,
                readers,
                work.admission(call.owner.require_key),
                on_chunk=on_chunk,
                **call.owner.tallied(tally),
            )
            usage = Counts(read=done.num_cached_tokens, uncached=done.num_computed_tokens)
        finally:  # what ends midway is paid for too
            usage = usage_so_far(tally) if usage.is_nothing else usage
            if not usage.is_nothing:
                record_number = service.meter.bill("base", call.owner.payer, usage)
        return done

    work = service.engine_loop.submit(OPERATOR_ACCOUNT, compute, prompt.num_tokens)
    try:
        done = await until_disconnect(call.request, finished(work))
    except ArgumentError as error:
        raise ApiError(
            409, "conflict", str(error), field=_FIELDS.get(error.argument), allowed=error.allowed
        ) from None
    finally:
        work.cancel()
    await service.meter.written(record_number)
    shown = _shown(_found(service.cache, body.id)).model_dump()
    return reply(
        PublishedReply(
            **shown,
            computed=done.num_computed_tokens,
            left_out=prompt.left_out,
            seconds=service.clock() - call.started_at,
        ),
        201,
    )


_FIELDS = {"base_id": "id", "ids": "prompt"}


async def list_bases(call: Call[Service]) -> Response:
    """List all bases of this replica."""
    call.query()
    return reply(BasesReply(bases=[_shown(base) for base in call.host.cache.bases()]))


async def set_readers(call: Call[Service]) -> Response:
    """Replace the readers of a base: from now on these tenants may read it, and no others."""
    call.query()
    service, base_id = call.host, call.request.path_params["base"]
    readers = _known(service.keyring, (await call.read(ReadersRequest)).body.readers)
    await _on_a_base(service.threads, lambda: service.cache.set_readers(base_id, readers))
    return reply(_shown(_found(service.cache, base_id)))


async def unpublish(call: Call[Service]) -> Response:
    """Unpublish a base: from now on no tenant finds it."""
    call.query()
    service, base_id = call.host, call.request.path_params["base"]
    await _on_a_base(service.threads, lambda: service.cache.unpublish(base_id))
    return Response(status_code=204)


async def _on_a_base(threads: Threads, change: Callable[[], None]) -> None:
    try:
        await threads.administer(change)
    except ArgumentError:
        raise not_found("base") from None


def _known(keyring: Keyring, readers: list[str]) -> list[str]:
    for at, reader in enumerate(readers):
        if reader not in keyring.settings:
            raise invalid(
                f"readers[{at}] is not a tenant", f"readers[{at}]", reader, "ids of existing tenants"
            )
    return readers


def _found(cache: EngineCache, base_id: str) -> BaseInfo:
    for base in cache.bases():
        if base.base_id == base_id:
            return base
    raise not_found("base")


def _shown(base: BaseInfo) -> BaseReply:
    return BaseReply(
        id=base.base_id,
        readers=list(base.readers),
        adapter=base.namespace.adapter,
        tokens=base.num_tokens,
        blocks=base.num_blocks,
        state="readable" if base.is_readable else "computing",
    )


ENDPOINTS = (
    Endpoint("GET", "/v1/bases", list_bases, "List bases", "operator", {200: BasesReply}, errors=(422,)),
    Endpoint(
        "POST",
        "/v1/bases",
        publish,
        "Publish a base",
        "operator",
        {201: PublishedReply},
        body=PublishRequest,
        errors=(409, 429, 501, 503),
    ),
    Endpoint(
        "PUT",
        "/v1/bases/{base}/readers",
        set_readers,
        "Set the readers of a base",
        "operator",
        {200: BaseReply},
        body=ReadersRequest,
        errors=(404,),
    ),
    Endpoint(
        "DELETE",
        "/v1/bases/{base}",
        unpublish,
        "Unpublish a base",
        "operator",
        {204: None},
        errors=(404, 422),
    ),
)
