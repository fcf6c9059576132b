"""A plan as a whole: the sizes, and with a trace what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError, require_extra
from radixkv.simulator.plan.planner import Machine, Options, Planner, Prices, describe
from radixkv.simulator.trace import read


def run(
    place: str,
    machine: Machine,
    options: Options | None = None,
    prices: Prices | None = None,
    traces: Sequence[Path] = (),
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return a plan, as a dict that JSON can encode. Raises ConfigError for what is invalid, unknown or too small.

    ``progress``: gets the number of finished replays of the trace and of all.
    """
    options, prices = options or Options(), prices or Prices()
    if machine.disk_bytes and not machine.host_bytes:
        raise ConfigError("--host", None, "host memory, because --disk is set: blocks pass through it")
    if options.tier_dtype != "exact" and not machine.host_bytes:
        raise ConfigError("--host", None, "host memory, because --tier-dtype is set")
    described = describe(place, options.dtype, options.weights_bytes)
    planner = Planner(described, machine, options)
    trace = read(traces, block_tokens=options.block_size) if traces else None
    replayed = None
    if trace is not None:
        require_extra("radixkv plan --trace", "tiers")
        from radixkv.simulator.plan.replays import Replays

        replayed = Replays(planner, trace, options).run(progress)
    return planner.result(replayed, prices) | {"traces": [str(each) for each in traces]}
