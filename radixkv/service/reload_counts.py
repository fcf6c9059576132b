"""Counts of reloads of the configuration, for the metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixkv.service.metrics import Level


@dataclass(slots=True)
class ReloadCounts:
    """Numbers of reloads since the start."""

    num_done: int = 0
    num_refused: int = 0


def reload_levels(counts: Callable[[], ReloadCounts]) -> list[Level]:
    """Return the gauges of reloads."""
    return [
        ("config_reloads", "Times that the configuration was reloaded at SIGHUP", lambda: counts().num_done),
        (
            "config_reloads_refused",
            "Times that a reload changed nothing, because the configuration was invalid; the log has the error",
            lambda: counts().num_refused,
        ),
    ]
