"""The picture: hit rates by capacity as an SVG. LRU and the optimum are the edges of a band.

For READMEs and pages that can't run the script of Plotly's ``report``. Matplotlib draws it, because it needs neither
a browser nor a display for an SVG. Text stays text, nothing is loaded, and the same result gives the same bytes. The
colours are for a light page. A style sheet in the file changes them for readers who prefer a dark one.
"""

from __future__ import annotations

from io import StringIO
from typing import Any, Final

from radixkv.simulator.report import BOUND_COLOURS, Curves, Result, curves_of, look
from radixkv.simulator.score import LRU, OPTIMUM, OPTIMUM_BYPASS

_DASHES: Final = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_PAGE, _INK, _FAINT = "#ffffff", "#24292f", "#d8dee4"
_DARK: Final = {_PAGE: "#0d1117", _INK: "#e6edf3", _FAINT: "#30363d"}
_BAND: Final = {"color": "#6e96c8", "alpha": 0.18, "linewidth": 0}

_STYLE: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "radixkv",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "figure.facecolor": _PAGE,
    "axes.facecolor": _PAGE,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _FAINT,
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.color": _FAINT,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "lines.markersize": 4,
}


def draw(result: Result) -> str:
    """Return an SVG of the hit rates of all tenants together, about 20 KB. O(rows)."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained")
        axes = figure.add_subplot()
        _plot(axes, curves_of(result))
        sizes = sorted({row["capacity"] for row in result["baselines"]})
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"capacity, blocks of {result['block_tokens']:,} tokens")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("token hit rate, %")
        figure.legend(loc="outside right upper", handlelength=3)
        file = StringIO()
        about = {"Title": "Token hit rate by capacity and policy", "Date": None, "Creator": None}
        figure.savefig(file, format="svg", metadata=about)
    return _for_dark_pages_too(file.getvalue())


def _plot(axes: Any, curves: Curves) -> None:
    """Draw a line for each policy, the optimum first. A line's id in the file is its policy."""
    best, least = curves.pop(OPTIMUM), curves.pop(LRU)
    sizes = [size for size, _ in best]
    axes.fill_between(sizes, [rate for _, rate in least], [rate for _, rate in best], **_BAND)
    bound = curves.pop(OPTIMUM_BYPASS, None)
    if bound is not None:
        _line(axes, OPTIMUM_BYPASS, bound, color=BOUND_COLOURS[OPTIMUM], width=2, dash="dot")
    _line(axes, OPTIMUM, best, color=BOUND_COLOURS[OPTIMUM], width=3)
    for index, (name, points) in enumerate(curves.items()):
        _line(axes, name, points, **look(index))
    _line(axes, LRU, least, color=_INK, width=3)


def _line(
    axes: Any, name: str, points: list[tuple[int, float]], *, color: str, width: float, dash: str = "solid"
) -> None:
    sizes, rates = zip(*points, strict=True)
    axes.plot(
        sizes, rates, label=name, gid=name, marker="o", color=color, linewidth=width, linestyle=_DASHES[dash]
    )


def _for_dark_pages_too(svg: str) -> str:
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    before, end, after = svg.partition("</metadata>")
    return f"{before}{end}<style>@media(prefers-color-scheme:dark){{{rules}}}</style>{after}"
