"""What an audit says: checks with a verdict each, and one verdict of all.

    leaks              something of another tenant's was observed
    instrument blind   the positive control saw nothing, so nothing that follows means anything
    inconclusive       neither shown nor excluded, or not checked here; the detail says why
    isolated           shown, by the check's own rule, within what the report says was looked at

The whole is the first of these, in this order, that any check has: there is no bare pass, and *isolated* means every
check was done and every control saw what it must. A check that only measures has no verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from radixkv.errors import ArgumentError


class Verdict(StrEnum):
    """Worst first."""

    LEAKS = "leaks"
    BLIND = "instrument blind"
    INCONCLUSIVE = "inconclusive"
    ISOLATED = "isolated"


EXIT_CODES = {Verdict.ISOLATED: 0, Verdict.LEAKS: 1, Verdict.INCONCLUSIVE: 3, Verdict.BLIND: 4}
"""What a command that audits ends with; 2 is for a command line that can't work."""


def worst(verdicts: Iterable[Verdict | None]) -> Verdict:
    """The verdict of several; of none, inconclusive."""
    found = {verdict for verdict in verdicts if verdict is not None}
    return next((verdict for verdict in Verdict if verdict in found), Verdict.INCONCLUSIVE)


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One check: its number in docs/security.md, what it found in a sentence, and the figures behind it.

    ``figures`` holds JSON types only. ``verdict`` is None for what only measures.
    """

    number: int
    name: str
    verdict: Verdict | None
    detail: str
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The check as JSON types."""
        return {
            "check": self.number,
            "name": self.name,
            "verdict": None if self.verdict is None else str(self.verdict),
            "detail": self.detail,
            "figures": dict(self.figures),
            "seconds": round(self.seconds, 3),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class AuditReport:
    """An audit as people hand it on. ``target``: what was audited; ``settings``: what was fixed beforehand.

    ``samples``: seconds to the first token, by arm, in the order in which they were taken; empty without timing.
    """

    target: str
    version: str
    settings: Mapping[str, Any]
    checks: tuple[Check, ...]
    samples: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    finished_at: str = dataclasses.field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds")
    )

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks'."""
        return worst(check.verdict for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0 isolated, 1 leaks, 3 inconclusive, 4 instrument blind."""
        return EXIT_CODES[self.verdict]

    def check(self, number: int) -> Check:
        """The check with this number. Raises ArgumentError if it wasn't done."""
        for each in self.checks:
            if each.number == number:
                return each
        done = ", ".join(str(each.number) for each in self.checks)
        raise ArgumentError("number", number, f"one of the checks that were done: {done}")

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            "audit": "radixkv",
            "version": self.version,
            "finished_at": self.finished_at,
            "target": self.target,
            "verdict": str(self.verdict),
            "settings": dict(self.settings),
            "checks": [check.as_dict() for check in self.checks],
            "samples": {arm: [round(value, 7) for value in values] for arm, values in self.samples.items()},
        }
