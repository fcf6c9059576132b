"""What a tier tells those who run it, and what it needs of the fleet's store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from radixkv.tiers.disk.durations import Durations


@dataclass(frozen=True, slots=True)
class TierDetails:
    """What happened in a tier, by reasons and by durations. All grow, also while they are read.

    - ``state``: "open"; why it serves nothing now (``TierState``, "unusable", "off"); or "resting".
    - ``age_s``: seconds since it was opened. ``block_bytes``, ``block_tokens``: of a block.
    - ``num_found``: records that were there when it was opened. ``num_foreign``: those of them that are of another
      identity, and can't be read. ``num_returned``: requests for a record that had been evicted (``disk.evicted``).
    - ``timeouts``: loads that ended early, because the tier was slower than computing.
    - ``missed``: loads of records that found nothing, by reason. ``unstored``: the same of stores.
    - ``loads``: how long requests' loads took, from begin to end, also those that found nothing.
    - ``operations``: how long the tier's medium took, by operation.
    """

    loads: Durations
    missed: Mapping[str, int] = field(default_factory=dict)
    unstored: Mapping[str, int] = field(default_factory=dict)
    operations: Mapping[str, Durations] = field(default_factory=dict)
    state: str = "open"
    age_s: float = 0.0
    block_bytes: int = 0
    block_tokens: int = 0
    num_found: int = 0
    num_foreign: int = 0
    num_returned: int = 0
    timeouts: int = 0


class FolderNotes(Protocol):
    """A store that keeps notes of the folders of disks. From any thread; may wait. Raises CoordinationError."""

    def disk_notes(self, folder: bytes, tags: Sequence[bytes]) -> list[bytes | None]:
        """Return the notes of a folder with these tags; None for one that isn't there."""

    def note_disk(self, folder: bytes, notes: Mapping[bytes, bytes]) -> int:
        """Keep notes of a folder, by tag; return how many have no room."""
