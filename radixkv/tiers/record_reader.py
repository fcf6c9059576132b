"""Single records of a disk on their way into staging memory, each read once for all that want it.

A load takes records in any order, straight from staging memory into the cache's blocks. (``promotions`` bring a
prompt's leading records into host memory: for a worker in another process, and for prompts that are to come.) Used
within the tiers' gate. Only threads of the tier wait for the disk.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from radixkv.clock import Clock
from radixkv.config import Namespace
from radixkv.index.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.tiers.disk.io_threads import Job
    from radixkv.tiers.disk_level import DiskLevel


class Where(NamedTuple):
    """The record of one block. ``mark``: of the tenant, so nobody joins a read that began before a purge.

    ``place``: the records' namespace.
    """

    mark: int
    place: Namespace
    block: int


class Flight:
    """A record that is being read for ``num_users`` loads, or was. ``key``: of its prompt, up to its end at least."""

    __slots__ = ("began_at", "job", "key", "num_users", "row", "where")

    def __init__(self, where: Where, key: bytes, row: int, job: Job, began_at: float) -> None:
        self.where, self.key, self.row, self.job, self.num_users = where, key, row, job, 1
        self.began_at = began_at


class RecordReader:
    """Reads records of ``disk``, whose segments are blocks of ``block_size`` tokens."""

    def __init__(self, disk: DiskLevel, block_size: int, clock: Clock) -> None:
        self.disk, self._block_bytes, self._clock = disk, block_size * TOKEN_BYTES, clock
        self._flights: dict[Where, list[Flight]] = {}
        self.dropped: deque[list[Flight]] = deque()
        """Of loads that nobody has any more. A finaliser adds them; ``sweep`` ends them."""

    @property
    def num_running(self) -> int:
        """Records in staging memory, or on their way there."""
        return sum(map(len, self._flights.values()))

    def reads(self, place: Namespace, key: bytes, block: int) -> bool:
        """Whether records of a prompt are on their way that has the first ``block + 1`` blocks of a key. O(records)."""
        head = key[: (block + 1) * self._block_bytes]
        flights = (each for where, found in self._flights.items() if where.place == place for each in found)
        return any(each.key.startswith(head) for each in flights)

    def begin(self, where: Where, key: bytes, flights: list[Flight]) -> Flight | None:
        """Begin to read a record, or join a read of it. None if its tenant has no rows left, or the disk refuses.

        ``flights``: of the load, which gets it here, so it is ended with these whatever happens to the caller. O(a hash
        of the key up to the block).
        """
        stop = (where.block + 1) * self._block_bytes
        for flight in self._flights.get(where, ()):
            is_same = flight.key[:stop] == key[:stop]
            if is_same and not (flight.job.is_done and not flight.job.wait(0)):
                flights.append(flight)
                flight.num_users += 1
                return flight
        rows = self.disk.rows
        row = rows.take(where.place.tenant)
        if row is None:
            return None
        made, jobs = None, list["Job"]()
        try:
            job = self.disk.promotions.read(where.place, key, where.block, row, jobs)
            if job is not None:
                made = Flight(where, key, row, job, self._clock())
                flights.append(made)
        except BaseException:
            for begun in jobs:
                begun.cancel()  # else it writes into a row that is free, or somebody else's
            rows.give(row)
            raise
        if made is None:
            rows.give(row)
            return None
        self._flights.setdefault(where, []).append(made)
        return made

    def end(self, flight: Flight) -> None:
        """Take that one load wants a record no more. After the last one its memory is zeroed and free.

        May wait for a decryption.
        """
        flight.num_users -= 1
        if flight.num_users:
            return
        flight.job.cancel()
        left = [each for each in self._flights.pop(flight.where, ()) if each is not flight]
        if left:
            self._flights[flight.where] = left
        self.disk.rows.give(flight.row)

    def sweep(self) -> None:
        """End what dropped loads left."""
        while self.dropped:
            flights = self.dropped.popleft()
            while flights:
                self.end(flights.pop())
