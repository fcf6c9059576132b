"""Types of arguments that the cache checks itself, so that its errors say what is allowed.

Only type checkers read this module. The compiler of index and publisher doesn't, because it would check the types it
reads first and raise a TypeError. It doesn't read ``radixkv.config`` for the same reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from radixkv.index.announcements import Announcement
    from radixkv.index.match import Match
    from radixkv.storage.device import BlockStorage
    from radixkv_policies import RequestHints

Announced: TypeAlias = "Announcement | None"
"""The announcement of a request that is opened."""

Flag: TypeAlias = bool

Removed: TypeAlias = None
"""An argument that calls had before. It is refused by name."""

BaseId: TypeAlias = str
"""1 to 256 bytes."""

TenantId: TypeAlias = str

SessionName: TypeAlias = "str | None"
"""Up to 256 characters; None for a new one."""

MatchLike: TypeAlias = "Match"

Hints: TypeAlias = "RequestHints | None"
"""Facts about a request that policies may use."""

StorageLike: TypeAlias = "BlockStorage | None"
"""The blocks of an engine that owns its KV; None if the cache makes a storage or needs none."""
