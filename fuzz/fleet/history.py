"""The invariants on served requests, checked in the histories of the replicas and of the driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Purged(NamedTuple):
    """A complete purge: the replicas that had confirmed it, and when Redis may have lost it."""

    tenant: str
    raised_at: float
    complete_at: float
    confirmed: dict[str, int]
    """By replica id, the epoch in which it confirmed. A process whose id another one had taken hasn't confirmed."""
    lost_at: float
    """When Redis lost data after the purge. Infinite if it didn't."""


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield every line of every replica, with its name. A last line that a kill cut short is left out."""
    for path in sorted(folder.glob("*.history")):
        for line in path.read_text().splitlines():
            try:
                yield {"replica": path.name.partition(".")[0], **json.loads(line)}
            except ValueError:
                continue


def wrongs(folder: Path, purges: list[Purged]) -> tuple[list[str], int]:
    """Return the violations in the histories, and the number of requests that were served."""
    found, num_served = [], 0
    for entry in read(folder):
        if entry["event"] == "crashed":
            found.append(f"replica {entry['replica']} crashed: {entry['error']}")
        if entry["event"] == "served":
            num_served += 1
            if entry["wrong"]:
                found.append(f"wrong KV: {entry}")
            found += [f"purged KV: {entry} after {purge}" for purge in purges if _is_stale(entry, purge)]
    return found, num_served


def _is_stale(served: dict[str, Any], purge: Purged) -> bool:
    """Return whether a replica served KV from before a purge, though it must not do so.

    A replica that has confirmed the purge must not do so. Neither must one that believes that no purge can be complete
    before it has applied it, as long as Redis remembers the purge. That includes a process whose id another one has
    taken. A tenant that refuses stale replicas is served only by replicas that believe so.
    """
    if served["tenant"] != purge.tenant or served["began"] <= purge.complete_at:
        return False
    confirmed_in = purge.confirmed.get(served["replica"], float("inf"))
    must_not = served["epoch"] >= confirmed_in or (served["knew"] and served["began"] < purge.lost_at)
    return bool(must_not and served["cached"] and served["oldest"] < purge.raised_at)
