"""Types of arguments that the cache checks itself, to say what is allowed.

Type checkers read them, the compiler of index and publisher doesn't: what it has read, it would check first, with
a TypeError. ``radixkv.config`` is left out for the same reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from radixkv.index.match import Match
    from radixkv.storage.device import BlockStorage
    from radixkv_policies import RequestHints

OnPending: TypeAlias = Literal["compute", "raise", "wait"]

Seconds: TypeAlias = float | None
"""Seconds, None for as long as it takes."""

BaseId: TypeAlias = str
"""1 to 256 bytes."""

TenantId: TypeAlias = str

MatchLike: TypeAlias = "Match"

Hints: TypeAlias = "RequestHints | None"
"""What policies may use of a request."""

StorageLike: TypeAlias = "BlockStorage | None"
"""Where an engine that owns its KV keeps its blocks; None where the cache makes a storage, or needs none."""
