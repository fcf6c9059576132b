"""The verdicts of an audit: one for each check, and one for the whole.

    leaks                          something of another tenant was observed
    instrument blind               a positive control saw nothing, so the check shows nothing
    inconclusive                   neither shown nor excluded; the detail says why
    isolated in what was checked   nothing was observed, but some checks were not done; the report names them
    not checked                    of one check: it was left out, or isn't possible here; the detail says why
    isolated                       shown by the check's own rule, within the bounds that the report states

The verdict of the whole is the worst verdict of all checks. If a check was not done, *isolated* becomes *isolated
in what was checked*. A check that only measures has no verdict.
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
    PARTIAL = "isolated in what was checked"
    NOT_CHECKED = "not checked"
    ISOLATED = "isolated"


EXIT_CODES = {
    Verdict.ISOLATED: 0,
    Verdict.LEAKS: 1,
    Verdict.INCONCLUSIVE: 3,
    Verdict.BLIND: 4,
    Verdict.PARTIAL: 6,
}
"""Exit codes of a command that audits. 2 means a wrong command line, 5 an audit without a verdict."""


def worst(verdicts: Iterable[Verdict | None]) -> Verdict:
    """Return the combined verdict; inconclusive if no check has a result."""
    found = {verdict for verdict in verdicts if verdict is not None}
    if not found - {Verdict.NOT_CHECKED}:
        return Verdict.INCONCLUSIVE
    first = next(verdict for verdict in Verdict if verdict in found)
    return Verdict.PARTIAL if first is Verdict.NOT_CHECKED else first


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One check: its number in docs/guides/security.md, its result as a sentence, and the figures behind it.

    ``figures`` holds JSON types only. ``verdict`` is None if the check only measures.
    """

    number: int
    name: str
    verdict: Verdict | None
    detail: str
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the check as JSON types."""
        return {
            "check": self.number,
            "name": self.name,
            "verdict": None if self.verdict is None else str(self.verdict),
            "detail": self.detail,
            "figures": dict(self.figures),
            "seconds": round(self.seconds, 3),
        }


def not_checked(number: int, name: str, reason: str) -> Check:
    """Return a check that was not done, and why."""
    return Check(number, name, Verdict.NOT_CHECKED, reason)


@dataclasses.dataclass(frozen=True, slots=True)
class AuditReport:
    """The report of one audit.

    - ``target``: the audited system.
    - ``settings``: fixed before the audit began.
    - ``samples``: seconds to the first token, by arm, in the order of measurement; empty without timing.
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
        """The worst verdict of the checks."""
        return worst(check.verdict for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0 isolated, 1 leaks, 3 inconclusive, 4 instrument blind, 6 isolated in what was checked."""
        return EXIT_CODES[self.verdict]

    @property
    def not_checked(self) -> tuple[Check, ...]:
        """The checks that were not done. Their details say why."""
        return tuple(check for check in self.checks if check.verdict is Verdict.NOT_CHECKED)

    def check(self, number: int) -> Check:
        """Return the check with this number. If there are several, the worst; one that was not done comes last.

        Raises ArgumentError if there is none.
        """
        order = [
            Verdict.LEAKS,
            Verdict.BLIND,
            Verdict.INCONCLUSIVE,
            Verdict.ISOLATED,
            None,
            Verdict.NOT_CHECKED,
        ]
        found = [each for each in self.checks if each.number == number]
        if found:
            return min(found, key=lambda each: order.index(each.verdict))
        done = ", ".join(str(each.number) for each in self.checks)
        raise ArgumentError("number", number, f"one of the checks that were done: {done}")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            "audit": "radixkv",
            "version": self.version,
            "finished_at": self.finished_at,
            "target": self.target,
            "verdict": str(self.verdict),
            "exit_code": self.exit_code,
            "not_checked": [_named(check) for check in self.not_checked],
            "settings": dict(self.settings),
            "checks": [check.as_dict() for check in self.checks],
            "samples": {arm: [round(value, 7) for value in values] for arm, values in self.samples.items()},
        }


def _named(check: Check) -> str:
    return f"{check.number} {check.name}: {check.detail}"
