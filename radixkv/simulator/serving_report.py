"""The report of the simulator of serving: a self-contained HTML page with charts and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from radixkv.simulator.report import figure, grid, line, look, page

Result = Mapping[str, Any]

_CHARTS = (
    ("Requests an hour", "requests_per_hour", "requests an hour"),
    ("Time to the first token, 95th percentile", "ttft_p95_s", "seconds"),
    ("Slowdown of a session, 95th percentile", "slowdown_p95", "times the time without waiting"),
    ("Tokens computed again, of a request", "recomputed_tokens", "tokens"),
)


def render(
    result: Result, said: str, head: Sequence[str], cells: Callable[[dict[str, Any]], Sequence[str]]
) -> str:
    """Return the page. ``said``: what was simulated. ``head``, ``cells``: of the table."""
    files = escape(", ".join(result["sessions_of"]))
    parts = [f"<h1>Serving by scheduler and policy</h1><p class='facts'>{files}: {escape(said)}</p>"]
    for title, name, unit in _CHARTS:
        parts.append(f"<h2>{title}</h2>{_chart(result, name, unit)}")
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in cells(row))}</tr>" for row in result["results"]
    )
    return page("radixkv simulate --serve", [*parts, f"<h2>All figures</h2>{grid(head, body)}"])


def _chart(result: Result, name: str, unit: str) -> str:
    """A figure over capacity, a line for each scheduler and policy."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in result["results"]:
        if row[name] is not None:
            points.setdefault(f"{row['scheduler']}, {row['policy']}", []).append((row["capacity"], row[name]))
    lines = [line(label, found, **look(at)) for at, (label, found) in enumerate(points.items())]
    return figure(lines, f"capacity, blocks of {result['block_tokens']} tokens", unit, log=True)
