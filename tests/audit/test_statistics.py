"""The statistics, checked on samples with a known truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from radixkv.audit import statistics
from radixkv.audit.statistics import Interval
from radixkv.audit.verdict import AuditReport, Check, Verdict, worst
from radixkv.errors import ArgumentError


def normal(seed: int, size: int, shift: float = 0.0) -> list[float]:
    return list(np.random.default_rng(seed).normal(10 + shift, 1, size))


def test_the_control_detects_only_faster_hits() -> None:
    misses = normal(0, 250)
    assert statistics.control_p(normal(1, 250, -2), misses) < 1e-8
    assert statistics.control_p(normal(1, 250), misses) > 1e-3
    assert statistics.control_p(normal(1, 250, +2), misses) > 0.99, "slower hits do not count"


def test_the_auc_equals_mann_whitney_with_ties() -> None:
    probes, misses = [1.0, 2.0, 2.0, 5.0], [2.0, 3.0, 4.0]
    expected = sum((p < m) + (p == m) / 2 for p in probes for m in misses) / 12
    found = statistics.auc(probes, misses)
    assert found.estimate == pytest.approx(expected)
    assert found.estimate == pytest.approx(stats.mannwhitneyu(misses, probes).statistic / 12)
    assert 0 <= found.low <= found.estimate <= found.high <= 1


def test_the_interval_has_the_documented_width() -> None:
    """Without a difference, each side of the interval is 1.645 / √(6 n) wide.

    It contains the truth in nine of ten runs.
    """
    found = statistics.auc(normal(0, 7200), normal(1, 7200))
    assert (found.high - found.low) / 2 == pytest.approx(1.645 / np.sqrt(6 * 7200), rel=0.03)
    held = 0
    for seed in range(200):
        interval = statistics.auc(normal(2 * seed, 300), normal(2 * seed + 1, 300))
        held += interval.low <= 0.5 <= interval.high
    assert 170 <= held <= 192


def test_the_auc_of_a_known_shift() -> None:
    found = statistics.auc(normal(0, 2000, -0.5), normal(1, 2000))
    assert found.low < stats.norm.cdf(0.5 / np.sqrt(2)) < found.high


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.481, 0.519, Verdict.ISOLATED),
        (0.505, 0.515, Verdict.ISOLATED),  # different, but equivalent
        (0.479, 0.519, Verdict.INCONCLUSIVE),
        (0.3, 0.7, Verdict.INCONCLUSIVE),
        (0.519, 0.9, Verdict.INCONCLUSIVE),
        (0.521, 0.9, Verdict.LEAKS),
        (0.1, 0.479, Verdict.LEAKS),
    ],
)
def test_equivalence_needs_evidence(low: float, high: float, verdict: Verdict) -> None:
    assert statistics.judged(Interval((low + high) / 2, low, high)) is verdict


@pytest.mark.slow
def test_enough_samples_show_equivalence_and_half_of_them_often_do_not() -> None:
    def isolated(size: int) -> int:
        return sum(
            statistics.judged(statistics.auc(normal(seed, size), normal(seed + 1000, size)))
            is Verdict.ISOLATED
            for seed in range(60)
        )

    assert isolated(7200) >= 57
    assert isolated(3600) <= 56
    assert isolated(100) == 0


@pytest.mark.slow
def test_leaked_bits_of_equal_and_of_separate_samples() -> None:
    nothing = statistics.leaked_bits(normal(0, 3000), normal(1, 3000), seed=0)
    assert nothing.low == 0 and nothing.estimate < 0.005 and nothing.high < 0.02
    everything = statistics.leaked_bits(normal(0, 500, -20), normal(1, 500), seed=0)
    assert everything.low > 0.95 and everything.high <= 1
    some = statistics.leaked_bits(normal(0, 3000, -1), normal(1, 3000), seed=0)
    assert 0.1 < some.low < some.estimate < some.high < 0.3
    assert some == statistics.leaked_bits(normal(0, 3000, -1), normal(1, 3000), seed=0)


def test_the_verdict_of_a_report_is_the_worst_one() -> None:
    assert worst([]) is Verdict.INCONCLUSIVE and worst([None]) is Verdict.INCONCLUSIVE
    assert worst([Verdict.ISOLATED, None]) is Verdict.ISOLATED
    assert worst([Verdict.ISOLATED, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert worst([Verdict.INCONCLUSIVE, Verdict.BLIND]) is Verdict.BLIND
    assert worst([Verdict.BLIND, Verdict.LEAKS]) is Verdict.LEAKS
    report = AuditReport("x", "0", {}, (Check(9, "control", Verdict.BLIND, "void"),))
    assert (report.verdict, report.exit_code, report.as_dict()["verdict"]) == (
        Verdict.BLIND,
        4,
        "instrument blind",
    )
    with pytest.raises(ArgumentError):
        report.check(10)
