"""Whether a tier is worth what it costs, and if it isn't, why, in words: a rule over counts, without I/O.

    facts_of    what a tier has done and how it stands, of its counts and details
    judge       the verdict over these facts, or over those of a span (``TierFacts.since``)
    TierWatch   judges tiers by the last 12 to 24 hours, so that what was useful last week counts no more, and says when
                a log should hear of it

The reasons, in the order in which they are looked for:

    closed             nothing is served: it couldn't be opened, purges are pending, the fleet's store is away
    errors             at least as many operations failed as worked
    too_slow           at least half of the loads ended early, because the tier was slower than computing
    identity_changed   most of what it held at the start was of another model, weights, precision, layout or block size
    too_old            blocks were asked for after they had been evicted: there is too little room
    never_read         nearly nothing that was written was ever used

The first four are facts about now. The last two need time. A tier is *useless* by them if requests used fewer than
``LEAST_SHARE`` of the blocks that were written. It is too early to say that

- before ``LEAST_BLOCKS`` blocks were written. If none of so many was used, the share of those that are is below
  ``LEAST_SHARE``, with 95 % confidence (the rule of three: 3 / 3,000);
- before ``LEAST_S`` seconds. Nine of ten pauses in sessions of coding agents end within 16 minutes, so what didn't come
  back in an hour hardly ever does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from radixkv.clock import Clock, monotonic
from radixkv.tiers.tier import TierDetails

Reason = Literal["closed", "errors", "too_slow", "identity_changed", "too_old", "never_read"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
Worth: TypeAlias = Literal["useful", "too early", "useless"]

LEAST_SHARE: Final = 1 / 1_000
LEAST_BLOCKS: Final = 3_000
LEAST_S: Final = 3_600.0
LEAST_ERRORS: Final = 5
"""Failed operations, or loads that ended early, before these are a reason: fewer may be chance."""
LEAST_RETURNED: Final = 10
"""Requests for blocks that had been evicted, before that is a reason."""
WINDOW_S: Final = 43_200.0
SAID_AGAIN_S: Final = 86_400.0
"""Seconds after which a log hears again of a tier that is still useless for the same reason."""

_CLOSED: Final = {
    "unusable": "it couldn't be opened at the start. The log of the start says why; the next start tries again",
    "awaiting-generations": "it waits for the fleet's store (--redis), to learn which tenants were purged. Check that "
    "the store answers",
    "fenced": "another process has opened its folder. Give each process a folder of its own, and start again",
    "closed": "it was closed, or forgets all its records",
    "off": "an error in radixkv couldn't be undone, see the log. Start again, and report it",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``worth``, and for what is useless the ``reason``.

    ``text``: what it brought, or why it brings nothing and what to do, for people; without the tier's name.
    """

    worth: Worth
    reason: Reason | None
    text: str

    def __str__(self) -> str:
        return f"{self.worth}{'' if self.reason is None else f' ({self.reason})'}: {self.text}"


class TierFacts(NamedTuple):
    """What a tier did in ``seconds``, and how it stands now.

    - ``state``: see TierDetails. ``owed_purges``: tenants whose purge isn't done there.
    - ``block_bytes``, ``block_tokens``: of a block. ``capacity_blocks``: that fit.
    - ``num_found``: blocks that it had at the start. ``num_foreign``: those of them that are of another identity, and
      can't be read.
    - ``written_blocks``; ``hit_blocks``: that requests used; ``worked``: reads and writes of blocks; ``failed``: those
      that failed. ``loads``: of requests; ``timeouts``: those that ended early. ``num_returned``: requests for a block
      that had been evicted.
    """

    state: str
    owed_purges: int
    block_bytes: int
    block_tokens: int
    capacity_blocks: int
    num_found: int
    num_foreign: int
    seconds: float
    written_blocks: int
    hit_blocks: int
    worked: int
    failed: int
    loads: int
    timeouts: int
    num_returned: int

    def since(self, before: TierFacts) -> TierFacts:
        """Return what the tier did since then, and how it stands now. It has found nothing since then."""
        return self._replace(
            num_found=0,
            num_foreign=0,
            seconds=self.seconds - before.seconds,
            written_blocks=self.written_blocks - before.written_blocks,
            hit_blocks=self.hit_blocks - before.hit_blocks,
            worked=self.worked - before.worked,
            failed=self.failed - before.failed,
            loads=self.loads - before.loads,
            timeouts=self.timeouts - before.timeouts,
            num_returned=self.num_returned - before.num_returned,
        )


def facts_of(counts: Mapping[str, float], details: TierDetails) -> TierFacts:
    """Return the facts of a tier, of its counts (``Ladder.counts``) and details."""
    size = max(details.block_bytes, 1)
    written, read = int(counts["written_bytes"]) // size, int(counts["read_bytes"]) // size
    return TierFacts(
        details.state,
        int(counts["owed_purges"]),
        details.block_bytes,
        details.block_tokens,
        int(counts["capacity_blocks"]),
        details.num_found,
        details.num_foreign,
        details.age_s,
        written,
        int(counts["hit_blocks"]),
        written + read,
        int(counts["errors"]) - details.timeouts,
        int(counts["loads"]),
        details.timeouts,
        details.num_returned,
    )


def judge(facts: TierFacts) -> Verdict:
    """Return the verdict over a tier. O(1), pure."""
    is_used = facts.hit_blocks > 0 and facts.hit_blocks >= LEAST_SHARE * facts.written_blocks
    found = _now(facts, is_used=is_used)
    if found is not None:
        return found
    if is_used:
        written = f"{_size(facts.written_blocks * facts.block_bytes)} were written in {_time(facts.seconds)}"
        return Verdict("useful", None, f"{written}, and requests used {facts.hit_blocks:,} blocks")
    if facts.seconds < LEAST_S or facts.written_blocks < LEAST_BLOCKS:
        return Verdict(
            "too early",
            None,
            f"{facts.written_blocks:,} blocks were written in {_time(facts.seconds)}, and requests used "
            f"{facts.hit_blocks:,}; ask again after {LEAST_BLOCKS:,} blocks and {_time(LEAST_S)}",
        )
    return _over_time(facts)


def _now(facts: TierFacts, *, is_used: bool) -> Verdict | None:
    """Return why a tier is useless as it stands now, however long it has been there."""
    if facts.state in _CLOSED:
        return _useless("closed", f"nothing is served: {_CLOSED[facts.state]}")
    if facts.state == "degraded" or LEAST_ERRORS <= facts.failed >= facts.worked:
        return _useless(
            "errors",
            f"{facts.failed:,} operations failed, {facts.worked:,} worked. Read the log, check the medium and its "
            "file system, and replace it if that goes on",
        )
    if LEAST_ERRORS <= facts.timeouts and 2 * facts.timeouts >= facts.loads:
        return _useless(
            "too_slow",
            f"{facts.timeouts:,} of {facts.loads:,} loads ended early, because reading took longer than computing; the "
            "tier rests after each. Use a faster disk, or one that is less busy, or run without it",
        )
    if is_used:
        return None
    if facts.owed_purges:
        return _useless(
            "closed",
            f"the purges of {facts.owed_purges:,} tenants are pending, of which nothing is served. They are repeated "
            "until the disk destroys the keys: check that it can be written",
        )
    if facts.num_foreign > facts.written_blocks and 2 * facts.num_foreign >= facts.num_found:
        return _useless(
            "identity_changed",
            f"{facts.num_foreign:,} of the {facts.num_found:,} records that it held at the start belong to another "
            "model, other weights, another precision, layout or block size, and can't be read. New ones take their "
            "places. If that wasn't meant, start with the former settings; to free the space at once, stop and run "
            "`radixkv disk reset FOLDER`",
        )
    return None


def _over_time(facts: TierFacts) -> Verdict:
    """Return why nearly nothing of what was written was used."""
    used = f"requests used {facts.hit_blocks:,} blocks" if facts.hit_blocks else "nothing was read back"
    size = _size(facts.written_blocks * facts.block_bytes)
    did = f"{size} were written in {_time(facts.seconds)}, and {used}"
    if facts.num_returned >= LEAST_RETURNED:
        return _useless(
            "too_old",
            f"{did}: {facts.num_returned:,} requests asked for blocks that had been evicted before. The tier is too "
            f"small for the time between two uses. With twice its {facts.capacity_blocks:,} blocks it would have had "
            "these",
        )
    return _useless(
        "never_read",
        f"{did}: prompts share no beginnings longer than {facts.block_tokens:,} tokens, or these are found in a tier "
        "above. Send prompts that begin alike to the same replica, or run without this tier; `radixkv simulate` says "
        "what a tier would bring on recorded traffic",
    )


def _useless(reason: Reason, text: str) -> Verdict:
    return Verdict("useless", reason, text)


def _size(num_bytes: float) -> str:
    """``502 GB``: three digits, or fewer."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if num_bytes < 1_000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1_000
    return f"{num_bytes:,.3g} TB"


def _time(seconds: float) -> str:
    if seconds < 7_200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3_600:.0f} hours"


class TierWatch:
    """Judges tiers by what they did in the last ``WINDOW_S`` to twice that, or since their start. Any thread."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._said_at: dict[tuple[str, Reason | None], float] = {}
        self._windows: dict[str, tuple[float, TierFacts | None, TierFacts]] = {}
        """By tier: when the last window began, the facts at the beginning of the one before, and of this one."""

    def verdicts(
        self, counts: Mapping[str, Mapping[str, float]], details: Mapping[str, TierDetails]
    ) -> dict[str, Verdict]:
        """Return the verdicts over tiers with these counts and details. O(tiers)."""
        with self._lock:
            return {name: self._judged(name, facts_of(each, details[name])) for name, each in counts.items()}

    def _judged(self, name: str, facts: TierFacts) -> Verdict:
        now = self._clock()
        began_at, before, middle = self._windows.setdefault(name, (now, None, facts))
        if now - began_at >= WINDOW_S:
            self._windows[name] = now, middle, facts
            before = middle
        return judge(facts if before is None else facts.since(before))

    def unsaid(self, verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
        """Return those of useless tiers, but of each tier and reason once in ``SAID_AGAIN_S``. O(tiers)."""
        now, found = self._clock(), dict[str, Verdict]()
        with self._lock:
            for name, each in verdicts.items():
                said = name, each.reason
                if each.worth == "useless" and now - self._said_at.get(said, -inf) >= SAID_AGAIN_S:
                    self._said_at[said], found[name] = now, each
        return found
