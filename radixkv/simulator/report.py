"""The report: a self-contained HTML page with curves, the band between LRU and the optimum, a table and the advice.

The page includes Plotly's script, which draws the charts. The page's content policy forbids loading anything. File
and tenant names from the trace are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

from radixkv.simulator.score import BASELINES, LRU, OPTIMUM, OPTIMUM_BYPASS

Result = Mapping[str, Any]
Row = Mapping[str, Any]
Curves = dict[str, list[tuple[int, float]]]
"""For each policy: capacity in blocks, token hit rate in %."""

_COLOURS: Final = ("#1f6feb", "#d1242f", "#8250df", "#bf8700", "#0a7ea4", "#cf5aa0", "#7a4a1d", "#57606a")
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
BOUND_COLOURS: Final = {LRU: "#24292f", OPTIMUM: "#2da44e"}
_BAND: Final = "rgba(110, 150, 200, 0.18)"

_STYLE: Final = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff; margin: 0 auto; max-width: 76rem;
  padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0.5rem 0 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
.facts { color: #57606a; margin: 0.25rem 0 1rem; overflow-wrap: anywhere; }
.advice { background: #f3f7fc; border-left: 4px solid #1f6feb; padding: 0.75rem 1rem 0.75rem 2rem; margin: 0; }
.advice li + li { margin-top: 0.4rem; }
.scroll { overflow-x: auto; margin-top: 0.5rem; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 0.25rem 0.75rem; text-align: right; border-bottom: 1px solid #d8dee4; }
th { background: #f6f8fa; position: sticky; top: 0; } th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tr.first td { border-top: 2px solid #afb8c1; }
"""

_CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def render(result: Result) -> str:
    """Return the page, about 5 MB, nearly all of it Plotly's script. O(rows)."""
    names = result["tenants"] if len(result["tenants"]) > 1 else []
    tenants = [
        f"<h2>Tenant {escape(name)}</h2>{_chart(result, name)}{_table(result, name)}" for name in names
    ]
    return page(
        "radixkv simulate",
        [
            f"<h1>Hit rate by capacity and policy</h1>{_facts(result)}",
            f'<ul class="advice">{"".join(f"<li>{escape(each)}</li>" for each in result["advice"])}</ul>',
            f"<h2>Token hit rate</h2>{_chart(result, None)}{_table(result, None)}",
            f"<h2>Above or below LRU, by stretch of time</h2>{_slices(result)}{_dips(result)}",
            *tenants,
        ],
    )


def page(title: str, parts: Iterable[str]) -> str:
    """Return a page of these parts that loads nothing."""
    from plotly.offline import get_plotlyjs

    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
            *parts,
            "</body></html>",
        ]
    )


def _facts(result: Result) -> str:
    profile = result["profile"]
    said = (
        f"{', '.join(result['traces'])}: {result['scored_requests']:,} of {result['requests']:,} requests scored, "
        f"from {result['score_from_s']:,.0f} s to {result['seconds_of_trace']:,.0f} s, "
        f"{result['prompt_tokens']:,} prompt tokens. A block is {result['block_tokens']} tokens, "
        f"{result['block_bytes'] / 2**20:,.3g} MiB of KV for {profile['name']}; seconds are those of a prefill "
        f"at {profile['tflops']:g} TFLOP/s. An endless cache would have {_percent(result['endless_token_hit_rate'])}."
    )
    return f'<p class="facts">{escape(said)}</p>'


# charts ---------------------------------------------------------------------------------------------------------------


def _chart(result: Result, tenant: str | None) -> str:
    """Hit rate over capacity. LRU and the optimum are the band's edges; every other policy is a line."""
    curves = curves_of(result, tenant)
    band = [
        line(LRU, curves.pop(LRU), color=BOUND_COLOURS[LRU], width=3),
        line(OPTIMUM, curves.pop(OPTIMUM), color=BOUND_COLOURS[OPTIMUM], width=3)
        | {"fill": "tonexty", "fillcolor": _BAND},
    ]
    bound = curves.pop(OPTIMUM_BYPASS, None)
    if bound is not None:
        band.append(line(OPTIMUM_BYPASS, bound, color=BOUND_COLOURS[OPTIMUM], width=2, dash="dot"))
    lines = [line(name, points, **look(index)) for index, (name, points) in enumerate(curves.items())]
    sizes = f"capacity, blocks of {result['block_tokens']:,} tokens"
    return figure([*band, *lines], sizes, "token hit rate, %", log=True)


def curves_of(result: Result, tenant: str | None = None) -> Curves:
    """Curves of all tenants together, or of one tenant, in increasing order of capacity."""
    curves: Curves = {}
    for row in _distinct([*result["baselines"], *result["results"]]):
        scores = row if tenant is None else row["tenants"][tenant]
        curves.setdefault(row["policy"], []).append((row["capacity"], 100 * scores["token_hit_rate"]))
    return curves


def _slices(result: Result) -> str:
    """Points above LRU in each slice, at the capacity with the deepest dip of any policy."""
    rows = [row for row in result["results"] if row["policy"] not in BASELINES]
    if not rows:
        return "<p>Only LRU and the optimum were run.</p>"
    capacity = min(rows, key=_above_lru)["capacity"]
    lines = []
    for index, row in enumerate(row for row in rows if row["capacity"] == capacity):
        points = [(each["to_s"], 100 * each["above_lru"]) for each in row["slices"]]
        lines.append(line(row["policy"], points, **look(index)))
    said = (
        f"<p>At {capacity:,} blocks, where the deepest dip is; each point is the stretch that ends there.</p>"
    )
    return said + figure(lines, "time, s", "points above LRU", log=False)


def _dips(result: Result) -> str:
    """For each policy, its deepest dip below LRU in a slice of time, with capacity and time."""
    deepest: dict[str, Row] = {}
    for row in result["results"]:
        if row["policy"] not in BASELINES:
            deepest[row["policy"]] = min(deepest.get(row["policy"], row), row, key=_above_lru)
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{row['worst_slice']['from_s']:,.0f}–{row['worst_slice']['to_s']:,.0f} s</td>"
        f"<td>{row['capacity']:,}</td><td>{_hundredfold(_above_lru(row), 2)}</td></tr>"
        for name, row in deepest.items()
    )
    return grid(("policy", "its worst stretch", "blocks", "points above LRU"), body) if body else ""


def _above_lru(row: Row) -> float:
    return float(row["worst_slice"]["above_lru"])


def look(index: int) -> dict[str, Any]:
    """The style of a policy's line. Neighbouring lines may overlap, so they differ in colour and dash."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "dash": _DASHES[(index + index // len(_COLOURS)) % len(_DASHES)],
        "width": 2,
    }


def line(
    name: str, points: list[tuple[float, float]] | list[tuple[int, float]], **look: Any
) -> dict[str, Any]:
    """A curve of a chart."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": look,
        "hovertemplate": f"{name}: %{{y:.2f}}<extra></extra>",
    }


def figure(lines: list[dict[str, Any]], x: str, y: str, *, log: bool) -> str:
    """A chart. ``x``, ``y``: the titles of its axes. ``log``: of the x axis."""
    from plotly.io import to_html

    values = sorted({value for line in lines for value in line["x"]})
    ticks = (
        {"type": "log", "tickvals": values, "ticktext": [f"{value:,}" for value in values]}
        if log
        else {"tickformat": ","}
    )
    layout = {
        "height": 460,
        "margin": {"l": 55, "r": 10, "t": 10, "b": 50},
        "hovermode": "x unified",
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "xaxis": {"title": {"text": x, "standoff": 8}, "gridcolor": "#eaeef2", "automargin": True, **ticks},
        "yaxis": {
            "title": {"text": y},
            "rangemode": "tozero",
            "gridcolor": "#eaeef2",
            "zerolinecolor": "#afb8c1",
        },
    }
    config = {"responsive": True, "displaylogo": False}
    drawn: str = to_html(
        {"data": lines, "layout": layout},
        config=config,
        include_plotlyjs=False,
        full_html=False,
        validate=False,
    )
    return drawn


# table ----------------------------------------------------------------------------------------------------------------

_HEAD: Final = (
    "blocks", "policy", "token hit rate", "share of the gap", "blocks for LRU's rate", "memory saved",
    "prefill saved", "memory",
)  # fmt: skip


def _table(result: Result, tenant: str | None) -> str:
    rows = sorted(_distinct([*result["results"], *result["baselines"]]), key=lambda row: int(row["capacity"]))
    body = "".join(_row(row, rows[at - 1] if at else None, result, tenant) for at, row in enumerate(rows))
    return grid(_HEAD, body)


def grid(names: Iterable[str], body: str) -> str:
    """A table with these names at its head."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(row: Row, before: Row | None, result: Result, tenant: str | None) -> str:
    scores = row if tenant is None else row["tenants"][tenant]
    needed = scores["capacity_for_lru_rate"]
    cells = (
        f"{row['capacity']:,}",
        escape(row["policy"]),
        _percent(scores["token_hit_rate"]),
        _percent(scores["share_of_gap"]),
        "–" if needed is None else f"{needed:,}",
        _percent(scores["memory_saved"]),
        f"{scores['prefill_seconds_saved']:,.0f} s",
        f"{row['capacity'] * result['block_bytes'] / 1e9:,.1f} GB",
    )
    first = before is None or before["capacity"] != row["capacity"]
    attribute = ' class="first"' if first else ""
    return f"<tr{attribute}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{_hundredfold(share, 1)}\N{NO-BREAK SPACE}%"


def _hundredfold(share: float, digits: int) -> str:
    """Format a share in percent or points, without a negative zero."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f}"


def _distinct(rows: Iterable[Row]) -> list[Row]:
    """Keep one row for each policy and capacity."""
    return list({(row["policy"], row["capacity"]): row for row in rows}.values())
