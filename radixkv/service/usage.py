"""What a request read from the cache, wrote to it under a promise, computed without one, and generated.

    prompt   [0 ──── read ──── cached)[cached ── written, by TTL ── end of the last promise)[── uncached ── n)

- **Read**: tokens that the engine really took from the cache. Whole blocks, so the number is rounded down to blocks.
  Of these, some came back from host memory or the disk below the cache.
- **Written**: computed tokens inside a promise (``Promise``) that was granted. Each token counts once, for the longest
  TTL that covers it.
- **Uncached**: all other tokens of the prompt. They may be found again, but nothing was promised.

The three always add up to the prompt. The shapes of all providers and the usage records come from this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from radixkv.errors import ArgumentError
from radixkv.metering.records import Counts

if TYPE_CHECKING:
    from radixkv.engines.protocol import Loaded, Tally

TTL_5M: Final = 300
TTL_30M: Final = 1_800
TTL_1H: Final = 3_600
TTL_12H: Final = 43_200


@dataclass(frozen=True, slots=True)
class Promise:
    """The first ``num_tokens`` of a prompt stay resident for at least ``ttl_s`` seconds."""

    num_tokens: int
    ttl_s: int


def with_loaded(counts: Counts, loaded: Loaded | None) -> Counts:
    """Return counts with what the tiers below the cache brought back. None: nothing is known of them."""
    if loaded is None:
        return counts
    return replace(counts, read_host=loaded.host_tokens, read_disk=loaded.disk_tokens)


def usage_so_far(tally: Tally, granted: Iterable[Promise] = (), generated: int = 0) -> Counts:
    """Return the usage of a request that ends, whichever way: of its prompts, what was read and computed.

    ``granted``: the promises that hold now, of the first prompt.
    """
    usage = Counts(generated=generated)
    for cached, computed in zip(tally.num_cached, tally.num_computed, strict=True):
        usage += usage_of(cached + computed, cached, granted)
        granted = ()
    return with_loaded(usage, tally.loaded)


def usage_of(num_tokens: int, num_cached: int, granted: Iterable[Promise] = (), generated: int = 0) -> Counts:
    """Return the usage of a prompt. O(promises log promises).

    - ``num_tokens``: of the prompt.
    - ``num_cached``: its leading tokens that were read from the cache.
    - ``granted``: the promises that hold now. One that ends behind the prompt raises ArgumentError.
    """
    if not 0 <= num_cached <= num_tokens:
        raise ArgumentError("num_cached", num_cached, f"0 to {num_tokens}, the tokens of the prompt")
    written: dict[int, int] = {}
    end, ttl_s = 0, 0
    for promise in sorted(granted, key=lambda each: -each.num_tokens):
        if not 0 <= promise.num_tokens <= num_tokens:
            raise ArgumentError("granted", promise, f"at most the {num_tokens} tokens of the prompt")
        _count(written, ttl_s, max(promise.num_tokens, num_cached), end)
        end, ttl_s = promise.num_tokens, max(ttl_s, promise.ttl_s)
    _count(written, ttl_s, num_cached, end)
    return Counts(
        num_cached, dict(sorted(written.items())), num_tokens - num_cached - sum(written.values()), generated
    )


def _count(written: dict[int, int], ttl_s: int, start: int, end: int) -> None:
    """Count the tokens ``[start, end)``, if there are any."""
    if start < end:
        written[ttl_s] = written.get(ttl_s, 0) + end - start
