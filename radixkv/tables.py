"""Rows as text, for what the commands print."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Format rows as text. The first row is the head. The first columns are aligned left, the others right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
