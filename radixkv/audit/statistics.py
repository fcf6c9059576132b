"""Statistics of the timing audit. Only this module of the package imports SciPy (extra ``audit``).

It answers three questions about the seconds to the first token:

- *Can the measurement distinguish hits from misses at all?* One-sided two-sample Kolmogorov–Smirnov test of own
  hits against own misses: hits are faster. The control passes if p < 1e-8.
- *Are cross-tenant probes and misses equivalent?* A test that finds no difference isn't enough. The 90 % interval
  of the Mann–Whitney AUC (two one-sided tests at 5 %) must lie within 0.5 ± margin. DeLong's variance holds for any
  distribution and for ties [DeLong, DeLong, Clarke-Pearson 1988]. Without a difference, the standard deviation of
  the AUC is 1 / √(6 n). With n = 7,200 samples an arm, a sound system passes ± 0.02 in 99 of 100 runs; with 3,600
  in 80.
- *How many bits leak?* Mutual information between the arm (a fair coin) and the time, in bits a request. It is the
  plug-in estimate over quantile bins, minus the bias of Miller and Madow, with a percentile bootstrap interval.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.audit.statistics", "audit")

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from radixkv.audit.verdict import Verdict

CONTROL_P = 1e-8
MARGIN = 0.02
CONFIDENCE = 0.90
MAX_BINS = 16
SAMPLES_A_BIN = 25

Times = Sequence[float]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the limits of its interval."""

    estimate: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """As JSON types."""
        return {"estimate": self.estimate, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.estimate:.4f} [{self.low:.4f}, {self.high:.4f}]"


def control_p(hits: Times, misses: Times) -> float:
    """p of the one-sided Kolmogorov–Smirnov test; small if hits are faster than misses. O(n log n)."""
    return float(stats.ks_2samp(hits, misses, alternative="greater").pvalue)


def auc(probes: Times, misses: Times, confidence: float = CONFIDENCE) -> Interval:
    """P(a probe is faster than a miss) + ½ P(tie), with DeLong's interval. 0.5 means no difference. O(n log n)."""
    n, m = len(probes), len(misses)
    together = stats.rankdata([*probes, *misses])
    beaten_by = (together[:n] - stats.rankdata(probes)) / m
    beats = 1.0 - beaten_by
    slower = (together[n:] - stats.rankdata(misses)) / n
    estimate = float(beats.mean())
    variance = beats.var(ddof=1) / n + slower.var(ddof=1) / m
    reach = float(stats.norm.ppf(0.5 + confidence / 2) * np.sqrt(variance))
    return Interval(estimate, max(estimate - reach, 0.0), min(estimate + reach, 1.0))


def judged(interval: Interval, margin: float = MARGIN) -> Verdict:
    """Isolated if the interval lies within 0.5 ± margin, leaks if it lies outside, inconclusive otherwise."""
    low, high = 0.5 - margin, 0.5 + margin
    if low <= interval.low and interval.high <= high:
        return Verdict.ISOLATED
    if interval.low > high or interval.high < low:
        return Verdict.LEAKS
    return Verdict.INCONCLUSIVE


def leaked_bits(probes: Times, misses: Times, seed: int, num_resamples: int = 500) -> Interval:
    """Return the bits that one request reveals about its arm, in [0, 1], with a 95 % bootstrap interval.

    O(resamples × n).
    """
    num_bins = int(np.clip(min(len(probes), len(misses)) // SAMPLES_A_BIN, 2, MAX_BINS))
    inner = np.linspace(0, 1, num_bins + 1)[1:-1]
    edges = np.unique(np.quantile([*probes, *misses], inner))
    binned = [np.searchsorted(edges, np.asarray(arm)) for arm in (probes, misses)]

    def bits(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
        return _mutual_information(first, second, len(edges) + 1)

    found = stats.bootstrap(
        binned, bits, n_resamples=num_resamples, method="percentile", vectorized=False, rng=seed
    )
    limits = found.confidence_interval
    return Interval(bits(*binned), float(limits.low), float(limits.high))


def _mutual_information(first: NDArray[np.int64], second: NDArray[np.int64], num_bins: int) -> float:
    counts = np.stack([np.bincount(arm, minlength=num_bins) for arm in (first, second)])
    shares = counts / counts.sum(axis=1, keepdims=True) / 2
    both = shares.sum(axis=0)
    told = shares > 0
    plug_in = (shares[told] * np.log2((shares / np.where(both > 0, both, 1) * 2)[told])).sum()
    used = int((counts.sum(axis=0) > 0).sum())
    bias = (used - 1) / (2 * counts.sum() * np.log(2))
    return float(np.clip(plug_in - bias, 0.0, 1.0))
