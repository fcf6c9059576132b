"""Bodies of requests between replicas, other than prompts: challenges and purges."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from radixkv.coordination.settings import REPLICA_ID
from radixkv.coordination.values import MAX_AMOUNT
from radixkv.service.schemas.base import ReplyBody, RequestBody

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Challenge(RequestBody):
    """32 random bytes. A replica proves with its answer that it has the fleet's secret."""

    challenge: Hex32


class ProofReply(ReplyBody):
    """The answer to a challenge: see ``coordination.proofs.Proofs.answer``."""

    proof: Hex32


class ToldPurge(RequestBody):
    """The raise of a tenant's generation (``coordination.wire.Raised``); generation 0: purge the tenant now."""

    generation: int = Field(0, ge=0, le=MAX_AMOUNT)
    token: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    replica_id: Annotated[str, Field(pattern=f"^({REPLICA_ID})?$")] = ""
    nonce: Annotated[str, Field(pattern=r"^[!-9;-~]{0,64}$")] = ""
    proof: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
