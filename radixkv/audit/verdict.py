"""The verdicts of an audit: one for each check, and one for the whole.

    leaks                          something of another tenant was observed
    instrument blind               a positive control saw nothing, so the check shows nothing
    inconclusive                   neither shown nor excluded; the detail says why
    isolated in what was checked   nothing was observed, but some checks were not done; the report names them
    not checked                    of one check: it was left out, failed, or isn't possible here; the detail says why
    isolated                       shown by the check's own rule, within the bounds that the report states
    not applicable                 of one check: the server has nothing that could show it

The verdict of the whole is the worst verdict of all checks. If a check was not done, *isolated* becomes *isolated
in what was checked*. One that isn't applicable doesn't count. A check that only measures has no verdict.

Each check stands alone. If one fails or is stopped, it is *not checked*, unless it found a leak before: then it *leaks*
(``alone``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from radixkv.audit.limit import Stopped
from radixkv.errors import ArgumentError, RadixKVError


class Verdict(StrEnum):
    """Worst first."""

    LEAKS = "leaks"
    BLIND = "instrument blind"
    INCONCLUSIVE = "inconclusive"
    PARTIAL = "isolated in what was checked"
    NOT_CHECKED = "not checked"
    ISOLATED = "isolated"
    NOT_APPLICABLE = "not applicable"


EXIT_CODES = {
    Verdict.ISOLATED: 0,
    Verdict.LEAKS: 1,
    Verdict.INCONCLUSIVE: 3,
    Verdict.BLIND: 4,
    Verdict.PARTIAL: 6,
    Verdict.NOT_APPLICABLE: 3,
}
"""Exit codes of a command that audits. 2 means a wrong command line, 5 an audit without a verdict."""


def worst(verdicts: Iterable[Verdict | None]) -> Verdict:
    """Return the combined verdict; inconclusive if no check has a result."""
    found = {verdict for verdict in verdicts if verdict is not None}
    if found == {Verdict.NOT_APPLICABLE}:
        return Verdict.NOT_APPLICABLE
    if not found - {Verdict.NOT_CHECKED, Verdict.NOT_APPLICABLE}:
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


def ended_early(number: int, name: str, leaks: list[str], error: BaseException) -> Check:
    """Return the result of a check that didn't reach its end: the leaks that it found before, or *not checked*."""
    told = isinstance(error, (RadixKVError, Stopped))
    why = str(error) if told else f"the check failed: {type(error).__name__}: {error}"
    if not leaks:
        return not_checked(number, name, why)
    detail = f"{'; '.join(leaks)} (then the check ended: {why})"
    return Check(number, name, Verdict.LEAKS, detail, {"leaks": leaks, "ended early": why})


def alone(number: int, name: str, check: Callable[[list[str]], Check | list[Check]]) -> list[Check]:
    """Run a check, and add the time that it took. It adds what it finds to the list as soon as it finds it.

    Nothing that it raises reaches the caller, except KeyboardInterrupt and SystemExit.
    """
    began = time.perf_counter()
    leaks: list[str] = []
    try:
        found = check(leaks)
    except (Exception, Stopped) as error:  # noqa: BLE001 - a server may answer anything
        found = ended_early(number, name, leaks, error)
    checks = found if isinstance(found, list) else [found]
    shared = (time.perf_counter() - began - sum(each.seconds for each in checks)) / max(len(checks), 1)
    return [dataclasses.replace(each, seconds=each.seconds + shared) for each in checks]


_EVIDENCE: tuple[Verdict | None, ...] = (
    Verdict.LEAKS,
    Verdict.BLIND,
    Verdict.INCONCLUSIVE,
    Verdict.PARTIAL,
    Verdict.ISOLATED,
    None,
    Verdict.NOT_APPLICABLE,
    Verdict.NOT_CHECKED,
)
"""The order of checks for a reader: what says most first."""


@dataclasses.dataclass(frozen=True, slots=True)
class AuditReport:
    """The report of one audit.

    - ``target``: the audited system.
    - ``settings``: fixed before the audit began.
    - ``samples``: seconds to the first token, by arm, in the order of measurement; empty without timing.
    - ``tried``: how much was tried, as a sentence.
    """

    target: str
    version: str
    settings: Mapping[str, Any]
    checks: tuple[Check, ...]
    samples: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    finished_at: str = dataclasses.field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds")
    )
    tried: str = ""

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

    @property
    def evidence(self) -> tuple[Check, ...]:
        """The checks that were done: those that leak first."""
        done = [check for check in self.checks if check.verdict is not Verdict.NOT_CHECKED]
        return tuple(sorted(done, key=lambda check: _EVIDENCE.index(check.verdict)))

    def check(self, number: int) -> Check:
        """Return the check with this number. If there are several, the worst; one that was not done comes last.

        Raises ArgumentError if there is none.
        """
        found = [each for each in self.checks if each.number == number]
        if found:
            return min(found, key=lambda each: _EVIDENCE.index(each.verdict))
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
            "tried": self.tried,
            "not_checked": [_named(check) for check in self.not_checked],
            "settings": dict(self.settings),
            "checks": [check.as_dict() for check in self.checks],
            "samples": {arm: [round(value, 7) for value in values] for arm, values in self.samples.items()},
        }


def _named(check: Check) -> str:
    return f"{check.number} {check.name}: {check.detail}"
