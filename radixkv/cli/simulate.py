"""``radixkv simulate`` and ``radixkv workload``: their options and output; ``radixkv.simulator`` does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from radixkv.cli.output import (
    NewFile,
    Number,
    counter,
    examples,
    find_in_working_directory,
    int_option,
    json_option,
    listed,
    print_result,
    progress_bar,
    seed_option,
)
from radixkv.errors import ConfigError, require_extra
from radixkv.sizes import bytes_of

if TYPE_CHECKING:
    from radixkv.simulator.profiles import ModelProfile

_MOST = 1e15
"""The largest number of blocks or seconds."""


def _amount(setting: str, text: str, units: Mapping[str, int]) -> Decimal:
    """Parse a number with an optional unit at its end, such as 30m or 5k. Capital letters work too."""
    unit = text[-1:].lower()
    number, times = (text[:-1], units[unit]) if unit in units else (text, 1)
    try:
        amount = Decimal(number) * times
        is_allowed = 0 <= amount <= _MOST
    except ArithmeticError:
        is_allowed = False
    if not is_allowed:
        allowed = f"a number from 0 to {_MOST:g}, if needed with a unit at its end: {' or '.join(units)}"
        raise ConfigError(setting, text, allowed)
    return amount


class _Sizes:
    """Turns sizes of tiers into blocks of the trace: ``10k``, or bytes such as ``64GB``.

    ``block_bytes`` is called at the first size in bytes: it reads the beginning of the trace.
    """

    def __init__(self, block_bytes: Callable[[], int]) -> None:
        self._block_bytes = cache(block_bytes)

    def blocks(self, option: str, text: str) -> int:
        """Return whole blocks."""
        if text[-1:].lower() == "b":
            return bytes_of(option, text) // self._block_bytes()
        amount = _amount(option, text, {"k": 1_000, "m": 1_000_000})
        if amount != int(amount):
            raise ConfigError(option, text, "a whole number of blocks, or bytes such as 64GB")
        return int(amount)

    def capacities(self, text: str) -> list[int]:
        """Return the blocks of each capacity."""
        return [self.blocks("--capacity", part.strip()) for part in text.split(",")]


def _seconds(setting: str, text: str) -> float:
    """``30m`` as seconds."""
    return float(_amount(setting, text, {"s": 1, "m": 60, "h": 3_600}))


_SERVING = (
    "scheduler", "sessions", "rate", "prefill", "decode", "chunk_tokens", "host", "host_speed", "replicas", "route",
    "pauses", "kappa", "labels", "warm_up", "measure",
)  # fmt: skip
"""The options of ``--serve``."""

_GRID = ("grid", "cells", "seeds", "resume")
"""The options of ``--serve --grid``. A grid sets some of those of ``--serve`` itself."""

_NOT_SERVING = (
    "tenants", "score_from", "svg", "block_tokens", "keep_tails", "jobs", "disk", "disk_writes", "restart",
)  # fmt: skip

_SET_BY_GRID = (
    "capacity", "sessions", "rate", "prefill", "profile", "model_path", "tflops", "host", "replicas", "route", "pauses",
    "html",
)  # fmt: skip


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _require_fitting_options(*, serve: bool, grid: bool) -> None:
    """Raise ConfigError for an option that means nothing beside --serve or --grid, or without it."""
    given = click.get_current_context().params
    serving = [each for each in _SERVING if each != "host"]  # replays of traces have a host tier too
    for options, fits, allowed in (
        (_GRID, serve and grid, "only with --serve and --grid"),
        (serving, serve, "only with --serve"),
        (_NOT_SERVING, not serve, "only without --serve"),
        (_SET_BY_GRID, not grid, "only without --grid"),
    ):
        for name in () if fits else options:
            if _is_given(name):
                option = "--model" if name == "model_path" else f"--{name.replace('_', '-')}"
                raise ConfigError(option, given[name], allowed)


def _simulate_serving(
    traces: Sequence[str],
    policy: str,
    capacity: str,
    sizes: _Sizes,
    given: dict[str, Any],
    html: str | None,
    as_json: bool,
) -> None:
    from radixkv.simulator import serving_report
    from radixkv.simulator import simulate_serving as simulator
    from radixkv.simulator.serving import Settings

    schedulers = listed(given.pop("scheduler")) or ()
    thousands = {"k": 1_000, "m": 1_000_000}
    given["host_blocks"] = sizes.blocks("--host", given.pop("host"))
    given["host_gb_per_s"] = given.pop("host_speed")
    speed = given.pop("prefill")
    if speed is not None:
        given |= {"prefill": float(_amount("--prefill", speed, thousands)), "profile": None}
    for name in ("warm_up", "measure"):
        given[f"{name}_s"] = _seconds(f"--{name.replace('_', '-')}", given.pop(name))
    if html is not None:
        require_extra("radixkv simulate --html", "bench")
    find_in_working_directory(policy)
    with progress_bar(1_000, "simulating") as advance:
        result = simulator.run(
            [Path(each) for each in traces],
            settings=Settings(**given),
            capacities=sizes.capacities(capacity),
            schedulers=schedulers,
            policies=(listed(policy) or ()) if policy != "all" else simulator.POLICIES,
            progress=lambda done, of: advance(1_000 * done // of),
        )
    if html is not None:
        said = simulator.heading(result)
        report = serving_report.render(result, said, simulator.HEAD, simulator.cells)
        Path(html).write_text(report, encoding="utf-8")
    print_result(result, simulator.table, as_json)


def _simulate_grid(
    traces: Sequence[str], policy: str, given: dict[str, Any], grid: dict[str, Any], as_json: bool
) -> None:
    from radixkv.simulator import simulate_grid as simulator
    from radixkv.simulator.serving import Settings

    settings = Settings(
        decode=given["decode"],
        chunk_tokens=given["chunk_tokens"],
        host_gb_per_s=given["host_speed"],
        labels=given["labels"],
        kappa=given["kappa"],
        warm_up_s=_seconds("--warm-up", given["warm_up"]),
        measure_s=_seconds("--measure", given["measure"]),
        seed=given["seed"],
    )
    served_by = {"scheduler": given["scheduler"]} if _is_given("scheduler") else {}
    served_by |= {"policy": policy} if _is_given("policy") else {}
    find_in_working_directory(policy)
    with progress_bar(1_000, "simulating") as advance:
        result = simulator.run(
            [Path(each) for each in traces],
            grid=grid["grid"],
            num_cells=grid["cells"],
            seeds=grid["seeds"],
            settings=settings,
            resume=None if grid["resume"] is None else Path(grid["resume"]),
            progress=lambda done, of: advance(1_000 * done // of),
            **served_by,
        )
    print_result(result, simulator.table, as_json)


def _simulate_policies(
    traces: Sequence[str], given: dict[str, Any], html: str | None, svg: str | None, as_json: bool
) -> None:
    from radixkv.simulator import picture, report
    from radixkv.simulator import simulate as simulator

    for option, path in (("--html", html), ("--svg", svg)):
        if path is not None:
            require_extra(f"radixkv simulate {option}", "bench")
    with progress_bar(1_000, "simulating") as advance:
        result = simulator.run(
            [Path(each) for each in traces],
            progress=lambda done, of: advance(1_000 * done // of),
            **given,
        )
    if html is not None:
        Path(html).write_text(report.render(result), encoding="utf-8")
    if svg is not None:
        Path(svg).write_text(picture.draw(result), encoding="utf-8")
    print_result(result, simulator.table, as_json)


def _simulate_tiers(
    traces: Sequence[str],
    host: str,
    disk: str,
    writes: str | None,
    restart: str | None,
    sizes: _Sizes,
    given: dict[str, Any],
    as_json: bool,
) -> None:
    from radixkv.simulator import simulate_tiers as simulator

    for name in ("html", "svg", "jobs"):
        if _is_given(name):
            allowed = f"--{name} without --host and --disk"
            raise ConfigError(f"--{name}", click.get_current_context().params[name], allowed)
    del given["jobs"]
    with progress_bar(1_000, "simulating") as advance:
        result = simulator.run(
            [Path(each) for each in traces],
            progress=lambda done, of: advance(1_000 * done // of),
            host_blocks=sizes.blocks("--host", host),
            disk_blocks=sizes.blocks("--disk", disk),
            disk_writes=None if writes is None else sizes.blocks("--disk-writes", writes),
            restart_s=None if restart is None else _seconds("--restart", restart),
            **given,
        )
    print_result(result, simulator.table, as_json)


def _profile_of_model(path: str, tflops: float) -> ModelProfile:
    from radixkv.simulator.plan.kv import Kept
    from radixkv.simulator.plan.planner import describe

    described = describe(path)
    model = described.model
    return described.profile(Kept(model.layers, model.states, model.dtype, 1, 16), tflops)


def _block_tokens(traces: Sequence[str], block_tokens: int) -> int:
    from radixkv.simulator.trace import block_tokens_of

    return block_tokens_of([Path(each) for each in traces], block_tokens)


@click.command(
    short_help="Simulate policies on traces.",
    epilog=examples(
        "radixkv simulate trace.jsonl --policy lru,lfu,optimum --capacity 1k,10k --html report.html",
        "radixkv simulate trace.jsonl --policy lru --capacity 20GB,64GB --host 256GB --model models/llama",
        "radixkv simulate --serve sessions.jsonl.gz --sessions 64 --capacity 5k,10k --scheduler fcfs,cache-first",
    ),
)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True)
@click.option(
    "--policy",
    default="all",
    show_default=True,
    help="all, or names: lru,lfu,optimum,optimum_bypass … With --serve: lru,lru+queue,learned+queue,clairvoyant …",
)
@click.option(
    "--capacity",
    default="1k,2k,5k,10k,20k,50k",
    show_default=True,
    help="Capacities in blocks of the trace, such as 1k = 1,000, or in bytes, such as 64GB.",
)
@click.option("--tenants", help="Only requests of these tenants, such as acme,globex.  [all]")
@click.option(
    "--score-from", default="0", show_default=True, help="Score only requests from this time on, such as 30m."
)
@click.option(
    "--profile",
    default="llama-3-8b",
    show_default=True,
    help="Model for which seconds and gigabytes are computed.",
)
@click.option(
    "--model",
    "model_path",
    metavar="PATH",
    help="In place of --profile: the folder of a model, or its config.json, as for `radixkv plan`.",
)
@click.option("--tflops", type=float, help="TFLOP/s that its machine sustains.  [400]")
@int_option("--block-tokens", 16, "Tokens in a block, for traces of token ids.")
@click.option("--keep-tails", is_flag=True, help="Keep partial last blocks, as published studies do.")
@seed_option
@click.option("--jobs", type=click.IntRange(1), help="Worker processes.  [one for each core]")
@click.option("--html", type=NewFile(), help="Write the report to this HTML file.")
@click.option("--svg", type=NewFile(), help="Draw the hit rates in this SVG file.")
@click.option(
    "--serve", is_flag=True, help="Simulate serving packed sessions of agents. The options below are for it."
)
@click.option(
    "--scheduler", default="fcfs,lpm,cache-first", show_default=True, help="Orders of the waiting requests."
)
@click.option("--sessions", type=int, default=32, show_default=True, help="Sessions at a time.")
@click.option("--rate", type=float, help="Sessions that begin in an hour, instead of --sessions.")
@click.option("--prefill", help="Tokens of prefill a second.  [20k, or what --profile says if it is given]")
@click.option("--decode", type=float, default=50.0, show_default=True, help="Tokens a second of each answer.")
@click.option(
    "--chunk-tokens",
    type=int,
    default=0,
    show_default=True,
    help="Prefill tokens in a step that decodes too.",
)
@click.option(
    "--host",
    default="0",
    show_default=True,
    help="Blocks or bytes of the host tier, such as 20k or 64GB; also without --serve.",
)
@click.option(
    "--disk",
    default="0",
    show_default=True,
    help="Blocks or bytes of the disk tier, such as 50k or 1TB; without --serve.",
)
@click.option(
    "--disk-writes",
    help="Blocks or bytes an hour that the disk tier may be written on average, such as 80k.  [no bound]",
)
@click.option(
    "--restart",
    help="Say what a restart at this time costs, such as 30m, after a drain or a crash; with --disk.",
)
@click.option("--host-speed", type=float, default=25.0, show_default=True, help="GB/s from the host.")
@click.option("--replicas", type=int, default=1, show_default=True, help="Replicas behind the router.")
@click.option("--route", default="linear", show_default=True, help="Cost by which the router chooses.")
@click.option(
    "--pauses", type=float, default=1.0, show_default=True, help="Factor of the pauses of sessions."
)
@click.option("--kappa", type=int, default=8, show_default=True, help="κ of the order cache-first.")
@click.option("--labels/--no-labels", default=True, show_default=True, help="What policies hear of requests.")
@click.option("--warm-up", default="1h", show_default=True, help="Time before the measured one.")
@click.option("--measure", default="2h", show_default=True, help="Measured time.")
@click.option(
    "--grid",
    type=click.Choice(["table", "drawn"]),
    help="Serve many loads by FCFS, lpm and one --scheduler and --policy: a table, or loads drawn by the seed.",
)
@click.option("--cells", type=click.IntRange(1), help="Loads of the grid.  [all; 60 drawn ones]")
@int_option("--seeds", 3, "Runs of each load.")
@click.option("--resume", type=click.Path(), help="Add each run of the grid to this file; skip those in it.")
@json_option
def simulate(
    traces: tuple[str, ...],
    policy: str,
    capacity: str,
    tenants: str | None,
    score_from: str,
    profile: str,
    model_path: str | None,
    tflops: float | None,
    html: str | None,
    svg: str | None,
    as_json: bool,
    serve: bool,
    **options: Any,
) -> None:
    """Compute the hit rate of each policy at each capacity on TRACEs, beside the offline optimum.

    A TRACE is a file of JSON lines, in the format of Mooncake or Bailian, or written by `radixkv serve --record` or
    `radixkv workload`. Several traces are merged by time. There are two optima: with and without bypass.

    With --host or --disk, tiers below the cache keep what it evicts. The result says what each tier saves.

    With --serve, a TRACE holds packed sessions of agents (`radixkv workload --sessions`). Each scheduler and policy
    serves them, beside clairvoyant eviction. With --grid, one scheduler and policy serves many loads.
    """
    from radixkv.simulator import profiles

    model = profiles.profile_of(profile, profiles.DEFAULT_TFLOPS if tflops is None else tflops)
    if model_path is not None:
        model = _profile_of_model(model_path, model.tflops)
    serving = {name: options.pop(name) for name in _SERVING}
    grid = {name: options.pop(name) for name in _GRID}
    _require_fitting_options(serve=serve, grid=grid["grid"] is not None)
    if serve:
        serving["seed"] = options["seed"]
        if grid["grid"] is not None:
            _simulate_grid(traces, policy, serving, grid, as_json)
            return
        given_by_user = _is_given("profile") or model_path is not None or tflops is not None
        serving["profile"] = model if given_by_user else None
        serving["block_bytes"] = model.kv_bytes_per_token * 512
        sizes = _Sizes(lambda: model.kv_bytes_per_token * 512)
        _simulate_serving(traces, policy, capacity, sizes, serving, html, as_json)
        return
    disk, writes, restart = (options.pop(name) for name in ("disk", "disk_writes", "restart"))
    find_in_working_directory(policy)
    sizes = _Sizes(lambda: model.kv_bytes_per_token * _block_tokens(traces, options["block_tokens"]))
    given: dict[str, Any] = {
        "policies": listed(policy),
        "capacities": sizes.capacities(capacity),
        "tenants": listed(tenants),
        "score_from_s": _seconds("--score-from", score_from),
        "profile": model,
        **options,
    }
    if any(map(_is_given, ("host", "disk", "disk_writes", "restart"))):
        _simulate_tiers(traces, serving["host"], disk, writes, restart, sizes, given, as_json)
    else:
        _simulate_policies(traces, given, html, svg, as_json)


@click.command(
    short_help="Generate a trace for a simulation.",
    epilog=examples(
        "radixkv workload --duration 30m --output trace.jsonl",
        "radixkv workload --mix acme:chat=2,rag=1 --mix globex:agent=0.5@10m-20m --seed 7 --output trace.jsonl",
        "radixkv workload --sessions 200 --output sessions.jsonl.gz",
    ),
)
@click.option(
    "--mix",
    multiple=True,
    metavar="SPEC",
    help="[tenant:]kind=rate[,kind=rate...][@from[-to]], rates in requests a second; kinds: chat, agent, rag, batch, "
    "scan, loop. May be repeated.  [chat=2,agent=1,rag=0.5,batch=0.3]",
)
@click.option("--duration", default="1h", show_default=True, help="Length of the trace, such as 30m.")
@int_option("--block-tokens", 512, "Tokens in a block.")
@click.option(
    "--tokens-per-s", type=Number(0, min_open=True), help="Give each request a duration, at this speed.  [no]"
)
@click.option(
    "--labels/--no-labels",
    default=True,
    show_default=True,
    help="Add what a service would know of a request.",
)
@seed_option
@click.option(
    "--sessions",
    type=int,
    help="Instead of a trace: this many packed sessions of agents, for simulate --serve.",
)
@click.option("--output", type=NewFile(), help="Write to this file, compressed if it ends in .gz.  [stdout]")
def workload(
    sessions: int | None,
    mix: tuple[str, ...],
    duration: str,
    block_tokens: int,
    tokens_per_s: float | None,
    labels: bool,
    seed: int,
    output: str | None,
) -> None:
    """Generate a trace for `radixkv simulate`: a mix of conversations, agents, RAG, batch jobs and floods by tenants.

    The parameters follow published statistics; `generator.py` and `agent_sessions.py` in `radixkv/simulator`
    have the sources.
    """
    from radixkv.simulator import generator

    if sessions is not None:
        _write_sessions(sessions, seed, output)
        return
    duration_s = _seconds("--duration", duration)
    parts = generator.parse_mix(
        mix or generator.DEFAULT_MIX, duration_s, lambda text: _seconds("--mix", text)
    )
    with _output(output) as file, counter("requests") as progress:
        for number, call in enumerate(generator.generate(parts, seed=seed, block_tokens=block_tokens), 1):
            line = generator.line(call, block_tokens, labels=labels, tokens_per_s=tokens_per_s)
            click.echo(line, file=file)
            if number % 1_000 == 0:
                progress(number)


def _output(path: str | None) -> AbstractContextManager[IO[str]]:
    """Open a file to write text to, compressed if its name ends in .gz; None for stdout."""
    if path is not None and path.endswith(".gz"):
        import gzip

        return gzip.open(path, "wt", encoding="utf-8")
    return click.open_file(path or "-", "w", encoding="utf-8")


def _write_sessions(sessions: int, seed: int, output: str | None) -> None:
    import json

    from radixkv.simulator.agent_sessions import generate_sessions

    for name in ("mix", "duration", "block_tokens", "tokens_per_s", "labels"):
        if _is_given(name):
            given = click.get_current_context().params[name]
            raise ConfigError(f"--{name.replace('_', '-')}", given, "only without --sessions")
    made = generate_sessions(sessions, seed)
    with _output(output) as file:
        for session in made:
            click.echo(json.dumps(session, separators=(",", ":")), file=file)
