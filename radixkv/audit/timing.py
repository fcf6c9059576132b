"""The timing audit: does the time to the first token show one tenant what another asked?

    control   own hits against own misses, 250 each, shuffled. If they don't differ, the instrument is blind.
    arms      *cross*: B computes P, then A probes P. *miss*: B computes Q, as long as P, then A probes P. Only the
              content differs. Pairs of one each, in random order within the pair; no sample is dropped.

Everything is fixed before the first request (``TimingPlan``), including the rules for stopping early. After each
eighth of the samples, the interval at 99.99 % is computed. If all of it lies outside the margin, the run ends with
*leaks*. There is no early *isolated*: that needs all samples. The control ends as soon as it has detected its hits.

If the audit has a time limit, the control shows how many samples fit in the time that is left. Their number is fixed
then, before the first of them is taken. If so few can't decide, the check is *not checked*.

Each sample has its own prompt of random words, so a cache can know it only from the audit itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from radixkv.audit import statistics
from radixkv.audit.limit import Stopped
from radixkv.audit.probe_prompts import Prompts
from radixkv.audit.target import Target
from radixkv.audit.verdict import Check, Verdict, alone, ended_early, not_checked
from radixkv.errors import ArgumentError

LOOKS = 8
CONTROL_LOOKS = (50, 100)
"""Sizes of each arm of the control after which it ends, if it has detected its hits."""
MIN_SAMPLES = 20
SPARE = 0.9
"""Share of the time that is left which samples may be planned for."""
NAMES = {
    9: "timing control: own hits against own misses",
    10: "timing: cross-tenant against miss",
    12: "leaked bits",
}
STOP_CONFIDENCE = 0.9999
WARM_UP = 4


@dataclass(frozen=True, slots=True)
class TimingPlan:
    """What is fixed beforehand. ``samples`` and ``control`` count one arm each.

    Fewer than 7,200 samples rarely show isolation.
    """

    samples: int = 7_200
    control: int = 250
    prompt_words: int = 60
    margin: float = statistics.MARGIN
    control_p: float = statistics.CONTROL_P
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("samples", MIN_SAMPLES),
            ("control", MIN_SAMPLES),
            ("prompt_words", 1),
        ):
            if getattr(self, name) < low:
                raise ArgumentError(name, getattr(self, name), f"an integer ≥ {low}")
        if not 0 < self.margin < 0.5:
            raise ArgumentError("margin", self.margin, "a number between 0 and 0.5")

    @property
    def steps(self) -> int:
        """Number of probes, for a progress bar."""
        return 2 * self.control + 2 * self.samples

    def as_dict(self) -> dict[str, object]:
        """As JSON types, with the fixed rules."""
        return asdict(self) | {
            "confidence": statistics.CONFIDENCE,
            "looks": LOOKS,
            "control_looks": list(CONTROL_LOOKS),
            "stop_confidence": STOP_CONFIDENCE,
            "stopping_rule": "leaks only, if the whole interval at stop_confidence is outside the margin at a look",
        }


@dataclass(slots=True)
class Samples:
    """Seconds to the first token, by arm, in the order taken."""

    hit: list[float] = field(default_factory=list)
    own_miss: list[float] = field(default_factory=list)
    cross: list[float] = field(default_factory=list)
    miss: list[float] = field(default_factory=list)


class TimingAudit:
    """The checks of A, which probes, and B, the other tenant. Call ``run`` once; ``samples`` holds the measurements."""

    def __init__(self, a: Target, b: Target, plan: TimingPlan, progress: Callable[[int], None]) -> None:
        self._a, self._b, self.plan, self._progress = a, b, plan, progress
        self._random = random.Random(plan.seed)
        self._prompts = Prompts(plan.prompt_words)
        self._done = 0
        self._misses_s = 0.0
        """Seconds that the own misses of the control took."""
        self.samples = Samples()

    def run(self) -> list[Check]:
        """Checks 9, 10 and 12. One that fails or is stopped is *not checked*."""
        (control,) = alone(9, NAMES[9], lambda _: self._control())
        if control.verdict is Verdict.NOT_CHECKED:
            return [
                control,
                *(not_checked(number, NAMES[number], "check 9 was not done") for number in (10, 12)),
            ]
        if control.verdict is Verdict.BLIND:
            reason = "void: the instrument is blind"
            return [
                control,
                Check(10, NAMES[10], Verdict.BLIND, reason),
                not_checked(12, NAMES[12], reason),
            ]
        arms = alone(10, NAMES[10], lambda _: self._arms())
        return [control, *arms, *alone(12, NAMES[12], lambda _: self._bits())]

    def _control(self) -> Check:
        for _ in range(WARM_UP):
            self._own_hit(), self._own_miss()
        looks = [size for size in CONTROL_LOOKS if size < self.plan.control]
        for size in [*looks, self.plan.control]:
            self._take_control(size - len(self.samples.hit))
            p = statistics.control_p(self.samples.hit, self.samples.own_miss)
            sees = p < self.plan.control_p
            if sees:
                break
        self._done = 2 * self.plan.control
        detail = (
            f"own hits are faster than own misses, p = {p:.2g} < {self.plan.control_p:g}"
            if sees
            else f"own hits look like own misses, p = {p:.2g} ≥ {self.plan.control_p:g}: the result means nothing"
        )
        seen = statistics.auc(self.samples.hit, self.samples.own_miss)
        figures = {"p_value": p, "threshold": self.plan.control_p, "auc": seen.as_dict()} | self._sizes()
        verdict = None if sees else Verdict.BLIND
        return Check(9, NAMES[9], verdict, detail, figures)

    def _take_control(self, size: int) -> None:
        schedule = [True, False] * size
        self._random.shuffle(schedule)
        for is_hit in schedule:
            if is_hit:
                self.samples.hit.append(self._own_hit())
            else:
                began = self._a.limit.clock()
                self.samples.own_miss.append(self._own_miss())
                self._misses_s += self._a.limit.clock() - began
            self._tick()

    def _fitting(self) -> int:
        """Return how many samples of each arm fit in the time that is left: all of them without a limit."""
        left_s = self._a.limit.left_s
        if left_s == float("inf") or self._misses_s <= 0:
            return self.plan.samples
        pair_s = 2 * self._misses_s / len(self.samples.own_miss)  # both arms are misses, if nothing leaks
        return min(self.plan.samples, int(SPARE * left_s / pair_s))

    def _arms(self) -> Check:
        fitting = self._fitting()
        if fitting < MIN_SAMPLES:
            return not_checked(10, NAMES[10], f"only {max(fitting, 0)} samples fit in the time that was left")
        try:
            stopped = self._take_arms(fitting)
        except (Exception, Stopped) as error:  # noqa: BLE001 - whatever ended it, the samples are there
            return self._cut(fitting, error)
        check = self._judged(stopped)
        if check.verdict is Verdict.INCONCLUSIVE and fitting < self.plan.samples:
            few = f"only {fitting} of {self.plan.samples} samples fit in the time that was left"
            return replace(check, verdict=Verdict.NOT_CHECKED, detail=f"{few}: {check.detail}")
        return check

    def _take_arms(self, size: int) -> bool:
        """Take so many samples of each arm. Returns whether a look ended it before."""
        looked = 0
        for look in range(1, LOOKS + 1):
            until = size * look // LOOKS
            for _ in range(until - looked):
                self._pair()
            looked = until
            if look < LOOKS and looked >= MIN_SAMPLES and self._is_plain():
                return True
        return False

    def _cut(self, fitting: int, error: BaseException) -> Check:
        """Return the result of arms that were not completed: a leak that is plain already, or *not checked*."""
        taken = min(len(self.samples.cross), len(self.samples.miss))
        if taken < MIN_SAMPLES or not self._is_plain():
            cut = ended_early(10, NAMES[10], [], error)
            return replace(cut, detail=f"ended after {taken} of {fitting} samples: {cut.detail}")
        check = self._judged(stopped=True)
        cut = ended_early(10, NAMES[10], [check.detail], error)
        return replace(check, detail=cut.detail)

    def _judged(self, stopped: bool) -> Check:
        confidence = STOP_CONFIDENCE if stopped else statistics.CONFIDENCE
        interval = statistics.auc(self.samples.cross, self.samples.miss, confidence)
        verdict = statistics.judged(interval, self.plan.margin)
        figures = {
            "auc": interval.as_dict(),
            "confidence": confidence,
            "margin": self.plan.margin,
            "stopped_early": stopped,
        }
        allowed = f"0.5 ± {self.plan.margin:g}"
        detail = {
            Verdict.ISOLATED: f"equivalent: AUC {interval} lies within {allowed}",
            Verdict.LEAKS: f"another tenant's prompts have other times: AUC {interval} lies outside {allowed}",
            Verdict.INCONCLUSIVE: f"undecided: AUC {interval} straddles {allowed}; take more samples, or reduce noise",
        }[verdict]
        return Check(10, NAMES[10], verdict, detail, figures | self._sizes())

    def _is_plain(self) -> bool:
        interval = statistics.auc(self.samples.cross, self.samples.miss, STOP_CONFIDENCE)
        return statistics.judged(interval, self.plan.margin) is Verdict.LEAKS

    def _bits(self) -> Check:
        if min(len(self.samples.cross), len(self.samples.miss)) < MIN_SAMPLES:
            return not_checked(12, NAMES[12], "there are too few samples")
        told = statistics.leaked_bits(self.samples.cross, self.samples.miss, self.plan.seed)
        known = statistics.leaked_bits(self.samples.hit, self.samples.own_miss, self.plan.seed)
        detail = (
            f"A learns {told} bits from the time of one request about B's cache; for its own cache: {known}"
        )
        figures = {"cross": told.as_dict(), "control": known.as_dict(), "confidence": 0.95}
        return Check(12, NAMES[12], None, detail, figures)

    def _own_hit(self) -> float:
        prompt = self.prompt()
        self._a.complete(prompt)
        return self._a.first_token_s(prompt)

    def _own_miss(self) -> float:
        self._a.complete(self.prompt())
        return self._a.first_token_s(self.prompt())

    def _pair(self) -> None:
        for is_cross in self._random.sample([True, False], 2):
            prompt = self.prompt()
            self._b.complete(prompt if is_cross else self.prompt())
            arm = self.samples.cross if is_cross else self.samples.miss
            arm.append(self._a.first_token_s(prompt))
            self._tick()

    def prompt(self) -> str:
        """Return a fresh prompt with as many words as every other."""
        return self._prompts.text()

    def _sizes(self) -> dict[str, int]:
        samples = self.samples
        return {
            "num_hits": len(samples.hit),
            "num_own_misses": len(samples.own_miss),
            "num_cross": len(samples.cross),
            "num_misses": len(samples.miss),
            "num_busy_retries": self._a.num_retries + self._b.num_retries,
        }

    def _tick(self) -> None:
        self._done += 1
        self._progress(self._done)
