"""Whether a request fits: the blocks that it may come to need, and those that its tenant can have.

    prompts, each block once ─┐
    answers, a tail a row ────┴▶ needed ≤ room of the tenant?   before anything is computed

What can never fit is a 400 with the numbers, because sending it again doesn't help. What only has no room now is a 503.
Blocks of a base that the tenant may read are the operator's, and don't count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from radixkv.index.tokens import TOKEN_BYTES
from radixkv.service.problems import RETRY_AFTER_S, ApiError, quota_exceeded

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.engines import EngineCache
    from radixkv.errors import QuotaExceeded


class Room(NamedTuple):
    """Blocks that a tenant can have on this replica.

    - ``own``: by its own settings; None: no limit.
    - ``share``: of a quota over the fleet, now. It changes as replicas come and go. None: there is no quota, or its
      share isn't known yet.
    - ``pool``: those of the pool that aren't guaranteed to others.
    """

    own: int | None
    share: int | None
    pool: int

    @property
    def most(self) -> int:
        """The most blocks that it can have now."""
        return min(each for each in (self.own, self.share, self.pool) if each is not None)

    def require(self, needed: int, block_size: int, field: str) -> None:
        """Raise ApiError 400 if a request can never have its blocks, 503 if it can't with the present share."""
        if self.own is not None and needed > self.own:
            whose = f"more than the {self.own} that this tenant may use"
            raise _never("quota_exceeded", whose, needed, self.own, block_size, field)
        if needed > self.pool:
            whose = f"more than the {self.pool} that this tenant can have: the others are guaranteed"
            raise _never("no_capacity", whose, needed, self.pool, block_size, field)
        if self.share is not None and needed > self.share:
            message = f"{needed} blocks are needed, more than this replica's share of the tenant's blocks, {self.share}"
            allowed = f"at most {self.share} blocks"
            raise ApiError(
                503, "quota_exceeded", message, value=needed, allowed=allowed, retry_after_s=RETRY_AFTER_S
            )

    def tokens_left(self, num_tokens: int, num_rows: int, block_size: int) -> int:
        """Return the most tokens that each of the rows after a prompt can have, at least 1."""
        whole, rest = divmod(num_tokens, block_size)
        return max((self.most - whole) // num_rows * block_size - rest + 1, 1)


def _never(kind: str, whose: str, needed: int, most: int, block_size: int, field: str) -> ApiError:
    message = (
        f"{needed} blocks of {block_size} tokens are needed, {whose}; send less, or ask for a shorter answer"
    )
    return ApiError(400, kind, message, field=field, value=needed, allowed=f"at most {most} blocks")


def of_quota(error: QuotaExceeded, cache: EngineCache, tenant: str) -> ApiError:
    """Return the answer to a request for which the tenant's limit has no room. If pins are the reason, it says so."""
    answer = quota_exceeded(error)
    pinned = cache.tenant_stats(tenant).pinned_blocks
    if error.needed > error.limit or error.needed + pinned <= error.limit:
        return answer
    ends_s = min((pin.ttl_s for pin in cache.pins(tenant)), default=RETRY_AFTER_S)
    message = f"{error}; {pinned} are pinned: end a pin, or wait until one ends"
    allowed = str(answer.body["allowed"])
    return ApiError(503, answer.type, message, value=error.needed, allowed=allowed, retry_after_s=ends_s)


def blocks_needed(
    keys: Sequence[bytes], num_rows: int, max_tokens: int, block_size: int, based: Sequence[int] = ()
) -> int:
    """Return the most blocks that prompts with this many rows each come to need.

    The last token of an answer needs no place. Blocks that several prompts begin with count once. ``based``: whole
    blocks at the beginning of each prompt that don't count.
    """
    size, private = block_size * TOKEN_BYTES, 0
    heads: list[tuple[bytes, int]] = []
    for at, key in enumerate(keys):
        rest = len(key) % size
        heads.append((key[: len(key) - rest], based[at] if based else 0))
        private += num_rows * -(-(rest // TOKEN_BYTES + max(max_tokens - 1, 0)) // block_size)
    shared, before = 0, b""
    for head, free in sorted(heads):
        known = max(_num_common(before, head, size), free)
        shared += max(len(head) // size - known, 0)
        before = head
    return shared + private


def _num_common(left: bytes, right: bytes, size: int) -> int:
    """Return how many leading blocks of ``size`` bytes are equal. O(log blocks) comparisons."""
    low, high = 0, min(len(left), len(right)) // size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[: middle * size] == right[: middle * size] else (low, middle - 1)
    return low


def based_blocks(cache: EngineCache, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
    """Return how many leading blocks of each prompt bases have that the tenant may read. O(bases)."""
    found = [0] * len(keys)
    for base in cache.bases():
        published = base.namespace
        if (
            base.is_readable
            and namespace.tenant in base.readers
            and (published.model, published.adapter, published.weights)
            == (namespace.model, namespace.adapter, namespace.weights)
        ):
            for at, key in enumerate(keys):
                found[at] = max(found[at], min(cache.match(published, key).num_blocks, base.num_blocks))
    return found
