"""A disk that couldn't be opened at the start: requests go on without it, and it is said wherever tiers are shown.

The records on it may be readable again at the next start, as those of a disk that was read-only for a while. So a purge
meanwhile stays pending: it counts as owed until a start that has the disk, where it must be repeated. If the folder's
key file is damaged, no record there can be read any more, and nothing is owed.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from radixkv.errors import ConfigError

_MOST_NAMED: Final = 8
_log = logging.getLogger(__name__)


class UnusableDisk:
    """The disk in ``folder``, which couldn't be opened because of ``error``. Any thread may use it."""

    def __init__(self, folder: Path, error: OSError | ConfigError) -> None:
        self._folder = folder
        self.is_lost = isinstance(error, ConfigError)
        """Whether no record there can be read any more."""
        self._owed, self._owing = frozenset[str](), threading.Lock()
        what = str(error) if self.is_lost else f"the disk in {str(folder)!r}: {error}"
        _log.error("%s. Requests go on without this disk until the next start", what)

    @property
    def owed(self) -> frozenset[str]:
        """Return the tenants that were purged or cleared, and whose records may still be there."""
        return self._owed

    @property
    def num_removed(self) -> int:
        """0: nobody knows what removed tenants have there."""
        return 0

    def retry(self, tenant: str) -> None:
        """Nothing can be destroyed there."""

    def retry_removed(self) -> None:
        """Nothing can be destroyed there."""

    def problem(self, tenant: str) -> str:
        """Return why nothing can be destroyed there."""
        return f"{self._folder} couldn't be opened at the start: purge it again after the next one"

    def add(self, tenant: str) -> None:
        """Take that a tenant was purged or cleared."""
        if self.is_lost:
            return
        with self._owing:
            if tenant not in self._owed:
                self._owed |= {tenant}
                _log.error(
                    "the disk in %s can't be used, and owes the purge of %r: purge it again after the next start",
                    self._folder,
                    tenant,
                )

    def unfinished(self) -> str | None:
        """Say which tenants' records may still be there, though they were purged or cleared; None for none."""
        if not self._owed:
            return None
        named = ", ".join(map(repr, sorted(self._owed)[:_MOST_NAMED])) + ", …" * (
            len(self._owed) > _MOST_NAMED
        )
        return (
            f"{self._folder} couldn't be used, and may still have the records of {len(self._owed)} purged or cleared "
            f"tenants ({named}). Purge them again at the next start"
        )

    def counts(self) -> dict[str, float]:
        """Return its counts, by the names of ``Ladder.counts``: no blocks, and not open."""
        names = (
            "capacity_blocks", "resident_blocks", "hit_blocks", "read_bytes", "written_bytes", "loads", "load_seconds",
            "open", "unchosen_blocks", "lost_blocks", "budget_bytes",
        )  # fmt: skip
        return {**dict.fromkeys(names, 0.0), "errors": 1, "owed_purges": len(self._owed)}
