"""What must hold of what happened, whatever happened: read from the histories of the replicas and of the driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Purged(NamedTuple):
    """A purge that was complete: who had confirmed, and how often Redis had forgotten something by then."""

    tenant: str
    raised_at: float
    complete_at: float
    confirmed: dict[str, int]
    """With the epochs under which they did: a process that another had taken the id from hasn't."""
    lost_at: float
    """When Redis forgot something after it; infinite if it didn't."""


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Every line of every replica, with its name; a last line that a kill cut short is left out."""
    for path in sorted(folder.glob("*.history")):
        for line in path.read_text().splitlines():
            try:
                yield {"replica": path.name.partition(".")[0], **json.loads(line)}
            except ValueError:
                continue


def wrongs(folder: Path, purges: list[Purged]) -> tuple[list[str], int]:
    """What was wrong in the histories, and how many requests were served."""
    found, num_served = [], 0
    for told in read(folder):
        if told["event"] == "crashed":
            found.append(f"replica {told['replica']} crashed: {told['error']}")
        if told["event"] == "served":
            num_served += 1
            if told["wrong"]:
                found.append(f"wrong KV: {told}")
            found += [f"purged KV: {told} after {purge}" for purge in purges if _is_stale(told, purge)]
    return found, num_served


def _is_stale(served: dict[str, Any], purge: Purged) -> bool:
    """A request of a purged tenant was given what is older than the purge, by a replica that must not do so.

    Those that have confirmed must not; nobody must who thinks that no purge can be complete that it hasn't applied,
    be it that another process has its id, as long as Redis remembers the purge. A tenant that refuses to be served
    where that isn't known is served by no others.
    """
    if served["tenant"] != purge.tenant or served["began"] <= purge.complete_at:
        return False
    confirmed_in = purge.confirmed.get(served["replica"], float("inf"))
    must_not = served["epoch"] >= confirmed_in or (served["knew"] and served["began"] < purge.lost_at)
    return bool(must_not and served["cached"] and served["oldest"] < purge.raised_at)
