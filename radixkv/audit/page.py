"""An audit's report as one self-contained HTML page, without scripts, fonts or network requests.

Distributions are SVG in a viewBox of 1000 × 300, which stretches with the page. Text is HTML outside the SVG, so it
keeps its size on a phone. The time axis runs from 0 to a bound that 99 % of all samples lie below. The last bar and
the ends of the curves include the samples beyond the bound, so no sample is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from radixkv.audit.verdict import AuditReport, Check, Verdict

WIDTH, HEIGHT, BINS = 1000, 300, 60
_ARMS = {
    "hit": ("own hits", "var(--green)", ""),
    "own_miss": ("own misses", "var(--orange)", "8 5"),
    "cross": ("cross-tenant probes", "var(--blue)", ""),
    "miss": ("misses", "var(--red)", "8 5"),
}
"""Arm → its label, its colour (distinguishable with every kind of colour vision) and its dash pattern."""

_MEANS = {
    Verdict.ISOLATED: "All checks below were done. Each control detected what it had to detect. Nothing of another "
    "tenant was observed, within the bounds below.",
    Verdict.PARTIAL: "Nothing of another tenant was observed in the checks that were done. Some checks were not "
    "done, and this report says nothing about their subjects.",
    Verdict.LEAKS: "Something of another tenant was observed. The checks below say what it was, and how it was seen.",
    Verdict.INCONCLUSIVE: "Nothing of another tenant was observed, but the evidence is not enough for a verdict.",
    Verdict.BLIND: "A positive control detected nothing, so the other results mean nothing. The run is void.",
    Verdict.NOT_APPLICABLE: "The server has nothing in which these checks could see another tenant.",
}
_CLASSES = {Verdict.BLIND: "blind", Verdict.PARTIAL: "partial", Verdict.NOT_APPLICABLE: "unchecked"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5b6570; --paper: #fff; --line: #d5dae0; --card: #f6f7f9;
  --green: #00805c; --orange: #b87700; --blue: #0067a5; --red: #c04a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --soft: #a3adb8; --paper: #14171a; --line: #343b42;
  --card: #1c2126; --green: #2fc79a; --orange: #f0b63d; --blue: #5fb4ee; --red: #ff8a4c; } }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
p { margin: .5rem 0; max-width: 46rem; } .soft { color: var(--soft); overflow-wrap: anywhere; }
.verdict { display: inline-block; padding: .1rem .7rem; border-radius: 1rem; border: 2px solid; font-weight: 600;
  white-space: nowrap; }
.isolated { color: var(--green); } .leaks { color: var(--red); } .inconclusive { color: var(--orange); }
.blind, .partial { color: var(--orange); } .partial { white-space: normal; }
.left-out { padding-left: 1.2rem; overflow-wrap: anywhere; }
.measured, .unchecked { color: var(--soft); }
header .verdict { font-size: 1.3rem; margin: .75rem 0; }
.checks { display: grid; gap: .75rem; grid-template-columns: minmax(0, 1fr); }
.check { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem; }
.check h3 { margin: 0; font-size: 1rem; display: flex; flex-wrap: wrap; gap: .25rem .75rem; align-items: baseline;
  justify-content: space-between; }
.check p { overflow-wrap: anywhere; }
.figures { display: grid; gap: 1.25rem; margin-top: 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; margin-bottom: .25rem; }
svg { display: block; width: 100%; height: 15rem; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line); overflow: visible; }
svg * { vector-effect: non-scaling-stroke; }
.axis { display: flex; justify-content: space-between; font-size: .8rem; color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; }
.legend i { display: inline-block; width: 1.4em; border-top: 3px; margin-right: .4em; vertical-align: middle; }
.scale { position: relative; height: 3rem; border-bottom: 1px solid var(--line); max-width: 46rem; }
.scale b { position: absolute; top: 0; bottom: 0; background: var(--green); opacity: .18; }
.scale i { position: absolute; top: 1.35rem; height: .3rem; background: var(--blue); min-width: 2px; }
.scale u { position: absolute; top: .9rem; height: 1.2rem; width: .3rem; margin-left: -.15rem;
  background: var(--blue); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; background: var(--card);
  padding: .75rem; border-radius: .5rem; }
summary { cursor: pointer; color: var(--soft); }
"""


def page(report: AuditReport) -> str:
    """Return the page as text. O(samples log samples)."""
    verdict = report.verdict
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>radixkv audit: {escape(str(verdict))}</title><style>{_STYLE}</style></head><body><main>",
        f"<header><h1>Isolation audit</h1><p class=soft>{escape(report.target)} · {escape(report.finished_at)} · "
        f"radixkv {escape(report.version)}</p>{_badge(verdict)}<p>{escape(_MEANS[verdict])}</p>"
        f"{_extent(report)}</header>",
        "<h2>Checks</h2><div class=checks>",
        *(_check(check) for check in report.evidence),
        "</div>",
        *_timing(report),
        _not_checked(report),
        "<h2>Settings, fixed before the run</h2>",
        _details("Settings", report.settings),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _badge(verdict: Verdict | None) -> str:
    if verdict is None:
        return '<span class="verdict measured">measured</span>'
    return f'<span class="verdict {_CLASSES.get(verdict, str(verdict))}">{escape(str(verdict))}</span>'


def _extent(report: AuditReport) -> str:
    """Return how much was tried, and how many checks were not done."""
    missing = len(report.not_checked)
    left_out = f"Checks that were not done: {missing}. They are listed below the others." if missing else ""
    return "".join(f"<p>{escape(text)}</p>" for text in (report.tried, left_out) if text)


def _not_checked(report: AuditReport) -> str:
    """Return the checks that were not done, and why: after the evidence, each once."""
    if not report.not_checked:
        return ""
    rows = (
        f"<li>{each.number} {escape(each.name)}: {escape(each.detail)}</li>" for each in report.not_checked
    )
    return f"<h2>Not checked</h2><ul class=left-out>{''.join(rows)}</ul>"


def _check(check: Check) -> str:
    figures = _details("Figures", check.figures) if check.figures else ""
    return (
        f"<article class=check><h3><span>{check.number} · {escape(check.name)}</span>{_badge(check.verdict)}</h3>"
        f"<p>{escape(check.detail)}</p>{figures}</article>"
    )


def _details(title: str, content: Mapping[str, Any]) -> str:
    text = json.dumps(dict(content), indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"


def _timing(report: AuditReport) -> list[str]:
    arms = {name: values for name, values in report.samples.items() if values}
    if not arms:
        return []
    together = np.sort(np.concatenate([np.asarray(values) for values in arms.values()]))
    bound = float(max(np.quantile(together, 0.99) * 1.05, 1e-6))
    pairs = [("Control: own hits and own misses", ("hit", "own_miss")),
             ("Cross-tenant probes and misses", ("cross", "miss"))]  # fmt: skip
    drawn = []
    for title, names in pairs:
        chosen = {name: arms[name] for name in names if name in arms}
        if chosen:
            drawn.append(_figure(f"{title}: histogram", chosen, bound, _histogram(chosen, bound), "share"))
            drawn.append(
                _figure(f"{title}: distribution", chosen, bound, _distribution(chosen, bound), "share below")
            )
    return [
        "<h2>Time to the first token</h2>",
        _sizes(arms),
        _interval(report),
        "<div class=figures>",
        *drawn,
        "</div>",
    ]


def _figure(
    title: str, arms: Mapping[str, Sequence[float]], bound: float, drawing: tuple[str, float], what: str
) -> str:
    shapes, top = drawing
    legend = "".join(
        f'<span><i style="border-top-style:{"dashed" if _ARMS[name][2] else "solid"};'
        f'border-color:{_ARMS[name][1]}"></i>{_ARMS[name][0]}</span>'
        for name in arms
    )
    marks = "".join(f"<span>{1e3 * bound * at / 4:.3g}</span>" for at in range(4))
    return (
        f"<figure><figcaption>{title}</figcaption><div class=legend>{legend}</div>"
        f"<div class=axis><span>{what}, up to {top:.2g}</span></div>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{title}">{shapes}</svg>'
        f"<div class=axis>{marks}<span>≥ {1e3 * bound:.3g} ms</span></div></figure>"
    )


def _histogram(arms: Mapping[str, Sequence[float]], bound: float) -> tuple[str, float]:
    """Outlines of the histograms, and the largest share. The last bar includes all samples beyond the bound."""
    edges = np.linspace(0, bound, BINS + 1)
    shares = {
        name: np.histogram(np.minimum(values, bound), edges)[0] / len(values) for name, values in arms.items()
    }
    top = float(max(share.max() for share in shares.values()))
    xs = np.repeat(edges / bound * WIDTH, 2)
    drawn = []
    for name, share in shares.items():
        ys = HEIGHT - np.concatenate([[0], np.repeat(share, 2), [0]]) / top * HEIGHT
        drawn.append(_line(name, xs, ys, fill=True))
    return "".join(drawn), top


def _distribution(arms: Mapping[str, Sequence[float]], bound: float) -> tuple[str, float]:
    """Return the empirical distribution functions at 400 points, and 1.0 as the largest share."""
    places = np.linspace(0, bound, 400)
    drawn = []
    for name, values in arms.items():
        shares = np.searchsorted(np.sort(np.asarray(values)), places, side="right") / len(values)
        drawn.append(_line(name, places / bound * WIDTH, HEIGHT - shares * HEIGHT, fill=False))
    return "".join(drawn), 1.0


def _line(name: str, xs: Any, ys: Any, *, fill: bool) -> str:
    title, colour, dashes = _ARMS[name]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    inside = f'fill="{colour}" fill-opacity=".12"' if fill else 'fill="none"'
    return (
        f'<polyline data-arm="{name}" points="{points}" {inside} stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dashes}"><title>{title}</title></polyline>'
    )


def _sizes(arms: Mapping[str, Sequence[float]]) -> str:
    rows = "".join(
        f"<tr><td>{_ARMS[name][0]}</td><td class=number>{len(values)}</td>"
        + "".join(
            f"<td class=number>{1e3 * float(each):.2f}</td>"
            for each in np.quantile(values, (0.05, 0.5, 0.95))
        )
        + "</tr>"
        for name, values in arms.items()
    )
    head = "".join(f"<th class=number>{name}</th>" for name in ("samples", "5 %", "median", "95 %"))
    return f"<table><tr><th>arm, ms</th>{head}</tr>{rows}</table>"


def _interval(report: AuditReport) -> str:
    """Return the interval of the AUC against the margin, on a scale that shows both."""
    check = next((each for each in report.checks if each.number == 10 and "auc" in each.figures), None)
    if check is None:
        return ""
    auc, margin = check.figures["auc"], float(check.figures["margin"])
    reach = min(1.3 * max(2 * margin, abs(auc["low"] - 0.5), abs(auc["high"] - 0.5)), 0.5)

    def place(value: float) -> float:
        return float(np.clip((value - 0.5 + reach) / (2 * reach), 0, 1)) * 100

    band, line = place(0.5 - margin), place(auc["low"])
    return (
        f"<h2>Equivalence</h2><p>AUC {auc['estimate']:.4f}, {100 * check.figures['confidence']:g} % interval "
        f"[{auc['low']:.4f}, {auc['high']:.4f}]; equivalent within 0.5 ± {margin:g} (the band). "
        f"0.5: probes are as fast as misses. 1: every probe is faster than every miss.</p>"
        f'<div class=scale><b style="left:{band:.2f}%;right:{band:.2f}%"></b>'
        f'<i style="left:{line:.2f}%;width:{place(auc["high"]) - line:.2f}%"></i>'
        f'<u style="left:{place(auc["estimate"]):.2f}%"></u></div>'
        f'<div class=axis style="max-width:46rem"><span>{0.5 - reach:.3g}</span><span>0.5</span>'
        f"<span>{0.5 + reach:.3g}</span></div>"
    )
