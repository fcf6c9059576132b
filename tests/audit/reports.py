"""Example reports from samples with a known truth, made by the audit's own statistics."""

from __future__ import annotations

import numpy as np

from radixkv.audit import statistics
from radixkv.audit.timing import TimingPlan
from radixkv.audit.verdict import AuditReport, Check, Verdict

PLAN = TimingPlan(samples=400, control=300)


def _times(seed: int, size: int, median_s: float) -> list[float]:
    return list(np.random.default_rng(seed).lognormal(np.log(median_s), 0.1, size))


def _timed(cross_s: float, margin: float) -> AuditReport:
    samples = {
        "hit": _times(0, 300, 0.010),
        "own_miss": _times(1, 300, 0.030),
        "cross": [*_times(2, 399, cross_s), 0.5],
        "miss": _times(3, 400, 0.030),
    }
    auc = statistics.auc(samples["cross"], samples["miss"])
    verdict = statistics.judged(auc, margin)
    p = statistics.control_p(samples["hit"], samples["own_miss"])
    checks = (
        Check(3, "cross-tenant probe", Verdict.ISOLATED if cross_s > 0.02 else Verdict.LEAKS, "20 probes"),
        Check(9, "timing control", None, f"own hits are faster than own misses, p = {p:.2g}", {"p_value": p}),
        Check(10, "timing: cross-tenant against miss", verdict, f"AUC {auc} against 0.5 ± 0.02",
              {"auc": auc.as_dict(), "margin": 0.02, "confidence": 0.9}),
        Check(12, "leaked bits", None, "in bits a request", {"cross": {"estimate": 0.01}}),
    )  # fmt: skip
    return AuditReport("http://127.0.0.1:8400", "0.1.0", {"timing": PLAN.as_dict()}, checks, samples)


def sound() -> AuditReport:
    """A report in which cross-tenant probes are misses."""
    return _timed(0.030, margin=0.1)


def leaking() -> AuditReport:
    """A report in which cross-tenant probes are hits."""
    return _timed(0.010, margin=0.02)


def without_timing() -> AuditReport:
    """A report about a cache in a process."""
    failure = "AssertionError: (0, 0) was never committed\nstate.open(where=0, prompt=" + "(0, " * 60
    checks = (
        Check(1, "laws and contents", Verdict.LEAKS, failure.splitlines()[0], {"failure": failure}),
        Check(2, "eviction signal", Verdict.INCONCLUSIVE, "not checked: this cache has no strict tenants"),
    )
    return AuditReport("my_engine.integration:make_a_cache_with_a_long_name", "0.1.0", {}, checks)
