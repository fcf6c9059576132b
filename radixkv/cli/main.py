"""``radixkv``: serve | route | config | warm | stats | keys | purge | disk | usage | audit | bench | simulate and more.

Importing this module, and ``--help``, loads only the index and click. Each command imports the rest when it runs. An
invalid setting ends the command with exit code 2 and one line: its name, its value and what is allowed. A service that
refuses a request, or an audit that finds a leak, ends it with 1. Results go to stdout (JSON with ``--json``), progress
and errors to stderr. The ``--help`` of every command ends with examples (``output.examples``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import IO, TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from radixkv import COMPILED, __version__
from radixkv.cli.audit import audit
from radixkv.cli.bench import bench
from radixkv.cli.client import keys, purge, stats, warm
from radixkv.cli.configuration import (
    called_as_given,
    config,
    settings_options,
    sources_of,
    warn_of_visible_password,
)
from radixkv.cli.disk import disk
from radixkv.cli.output import (
    NewFile,
    Number,
    counter,
    examples,
    find_in_working_directory,
    json_option,
    listed,
    needs_extra,
    print_result,
    progress_bar,
)
from radixkv.cli.usage import usage
from radixkv.configuration.definitions import COMMANDS
from radixkv.configuration.precedence import names, texts
from radixkv.errors import ArgumentError, ConfigError, MissingExtra, RadixKVError, require_extra

if TYPE_CHECKING:
    from radixkv.service.core import Service

Command = Callable[..., Any]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, then end the process with the exit code."""
    try:
        code = commands.main(args=arguments, prog_name="radixkv", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        code = 2
    except click.ClickException as error:
        code = _complain(error.format_message(), error.exit_code)
    except (ConfigError, ArgumentError) as error:
        code = _complain(str(error), 2)
    except MissingExtra as error:
        code = _complain(str(error), 2)
    except (RadixKVError, OSError) as error:  # OSError: output that can't be written
        code = _complain(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        code = _complain("stopped", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    click.echo("radixkv: " + " ".join(message.split()), err=True)
    return code


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=examples("radixkv serve", "radixkv warm prompts/support.txt", "radixkv stats"),
)
@click.version_option(
    f"{__version__} ({'compiled' if COMPILED else 'pure Python'} index)", message="radixkv %(version)s"
)
def commands() -> None:
    """A prefix cache for LLM serving."""


for _command in (config, warm, stats, keys, purge, disk, usage, audit, bench):
    commands.add_command(_command)


# serve ----------------------------------------------------------------------------------------------------------------

_SERVE_OPTIONS: Mapping[str, str] = {name: each.help for name, each in COMMANDS["serve"].items()}
_ROUTE_OPTIONS: Mapping[str, str] = {name: each.help for name, each in COMMANDS["route"].items()}
"""The texts of the options, by setting."""


@commands.command(
    epilog=examples(
        "radixkv serve",
        "radixkv serve --model models/llama --keys keys.json --host 0.0.0.0",
        "radixkv serve --redis redis://10.0.0.5:6379/0 --replica a --fleet-secret fleet.secret",
    )
)
@settings_options("serve")
@click.pass_context
@needs_extra("service")
def serve(context: click.Context, /, **values: str | None) -> None:
    """Serve a model and its prefix cache over HTTP."""
    from radixkv.service.options import ServeSettings

    sources = sources_of(context)
    found = sources.resolve()
    with called_as_given(found):
        find_in_working_directory(found["policy"].text)
        settings = ServeSettings.parse(texts(found), names(found))
        logging.basicConfig(level=settings.log_level.upper())
        warn_of_visible_password(found)

        from radixkv.service.banner import banner
        from radixkv.service.reloading import reloader
        from radixkv.service.server import run

        def on_ready(service: Service, url: str) -> None:
            click.echo(banner(settings, service, url, sources.path))

        run(settings, __version__, on_ready, reloader(sources, found))


# route ----------------------------------------------------------------------------------------------------------------


@commands.command(
    short_help="Serve a router over HTTP.",
    epilog=examples(
        "radixkv route --redis redis://10.0.0.5:6379/0 --fleet-secret fleet.secret",
        "radixkv route --redis redis://10.0.0.5:6379/0 --fleet-secret fleet.secret --keys keys.json --cost lmetric",
    ),
)
@settings_options("route")
@click.pass_context
@needs_extra("route")
def route(context: click.Context, /, **values: str | None) -> None:
    """Serve a router: it ranks the replicas for a prompt, over HTTP."""
    from radixkv.service.options import RouteSettings

    sources = sources_of(context)
    found = sources.resolve()
    with called_as_given(found):
        settings = RouteSettings.parse(texts(found), names(found))
        logging.basicConfig(level=settings.log_level.upper())
        warn_of_visible_password(found)

        from radixkv.service.reloading import reloader
        from radixkv.service.standalone import RouterHost, run

        def on_ready(host: RouterHost, url: str) -> None:
            known = (
                f"the store is unavailable: {host.source.reader.failure}"
                if host.source.is_lost
                else f"{len(host.replicas())} replicas known"
            )
            given = "" if sources.path is None else f"\n  settings from {sources.path}"
            click.echo(f"radixkv routes at {url}\n  {known}, cost {settings.cost}{given}\n\nCtrl-C stops it.")

        run(settings, __version__, on_ready, reloader(sources, found))


# simulate -------------------------------------------------------------------------------------------------------------

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


def _capacities(text: str) -> list[int]:
    """``1k,2500,10k`` as numbers of blocks."""
    found = []
    for part in text.split(","):
        amount = _amount("--capacity", part.strip(), {"k": 1_000, "m": 1_000_000})
        if amount != int(amount):
            raise ConfigError("--capacity", part, "whole numbers of blocks")
        found.append(int(amount))
    return found


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
    "capacity", "sessions", "rate", "prefill", "profile", "tflops", "host", "replicas", "route", "pauses", "html",
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
                raise ConfigError(f"--{name.replace('_', '-')}", given[name], allowed)


def _simulate_serving(
    traces: Sequence[str],
    policy: str,
    capacity: str,
    given: dict[str, Any],
    html: str | None,
    as_json: bool,
) -> None:
    from pathlib import Path

    from radixkv.bench import simulate_serving as simulator
    from radixkv.bench.simulation import serving_report
    from radixkv.bench.simulation.serving import Settings

    schedulers = listed(given.pop("scheduler")) or ()
    thousands = {"k": 1_000, "m": 1_000_000}
    given["host_blocks"] = int(_amount("--host", given.pop("host"), thousands))
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
            capacities=_capacities(capacity),
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
    from pathlib import Path

    from radixkv.bench import simulate_grid as simulator
    from radixkv.bench.simulation.serving import Settings

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
    from pathlib import Path

    from radixkv.bench import simulate as simulator
    from radixkv.bench.simulation import picture, report

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
    given: dict[str, Any],
    as_json: bool,
) -> None:
    from pathlib import Path

    from radixkv.bench import simulate_tiers as simulator

    for name in ("html", "svg", "jobs"):
        if _is_given(name):
            allowed = f"--{name} without --host and --disk"
            raise ConfigError(f"--{name}", click.get_current_context().params[name], allowed)
    del given["jobs"]
    with progress_bar(1_000, "simulating") as advance:
        result = simulator.run(
            [Path(each) for each in traces],
            progress=lambda done, of: advance(1_000 * done // of),
            host_blocks=_blocks("--host", host),
            disk_blocks=_blocks("--disk", disk),
            disk_writes=None if writes is None else _blocks("--disk-writes", writes),
            restart_s=None if restart is None else _seconds("--restart", restart),
            **given,
        )
    print_result(result, simulator.table, as_json)


def _blocks(option: str, text: str) -> int:
    """``10k`` as a number of blocks."""
    amount = _amount(option, text, {"k": 1_000, "m": 1_000_000})
    if amount != int(amount):
        raise ConfigError(option, text, "a whole number of blocks")
    return int(amount)


@commands.command(
    short_help="Simulate policies on traces.",
    epilog=examples(
        "radixkv simulate trace.jsonl --policy lru,lfu,optimum --capacity 1k,10k --html report.html",
        "radixkv simulate trace.jsonl --policy lru --capacity 1k --host 10k --disk 50k",
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
    help="Capacities in blocks of the trace; 1k = 1,000.",
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
@click.option("--tflops", type=float, help="TFLOP/s that its machine sustains.  [400]")
@click.option(
    "--block-tokens",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Tokens in a block, for traces of token ids.",
)
@click.option("--keep-tails", is_flag=True, help="Keep partial last blocks, as published studies do.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random choices."
)
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
    help="Blocks of the host tier, such as 20k; also without --serve.",
)
@click.option(
    "--disk", default="0", show_default=True, help="Blocks of the disk tier, such as 50k; without --serve."
)
@click.option(
    "--disk-writes",
    help="Blocks an hour that the disk tier may be written on average, such as 80k.  [no bound]",
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
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each load.")
@click.option("--resume", type=click.Path(), help="Add each run of the grid to this file; skip those in it.")
@json_option
def simulate(
    traces: tuple[str, ...],
    policy: str,
    capacity: str,
    tenants: str | None,
    score_from: str,
    profile: str,
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
    from radixkv.bench.simulation import profiles

    model = profiles.profile_of(profile, profiles.DEFAULT_TFLOPS if tflops is None else tflops)
    serving = {name: options.pop(name) for name in _SERVING}
    grid = {name: options.pop(name) for name in _GRID}
    _require_fitting_options(serve=serve, grid=grid["grid"] is not None)
    if serve:
        serving["seed"] = options["seed"]
        if grid["grid"] is not None:
            _simulate_grid(traces, policy, serving, grid, as_json)
            return
        given_by_user = _is_given("profile") or tflops is not None
        serving["profile"] = model if given_by_user else None
        serving["block_bytes"] = model.kv_bytes_per_token * 512
        _simulate_serving(traces, policy, capacity, serving, html, as_json)
        return
    disk, writes, restart = (options.pop(name) for name in ("disk", "disk_writes", "restart"))
    find_in_working_directory(policy)
    given: dict[str, Any] = {
        "policies": listed(policy),
        "capacities": _capacities(capacity),
        "tenants": listed(tenants),
        "score_from_s": _seconds("--score-from", score_from),
        "profile": model,
        **options,
    }
    if any(map(_is_given, ("host", "disk", "disk_writes", "restart"))):
        _simulate_tiers(traces, serving["host"], disk, writes, restart, given, as_json)
    else:
        _simulate_policies(traces, given, html, svg, as_json)


@commands.command(
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
@click.option(
    "--block-tokens", type=click.IntRange(1), default=512, show_default=True, help="Tokens in a block."
)
@click.option(
    "--tokens-per-s", type=Number(0, min_open=True), help="Give each request a duration, at this speed.  [no]"
)
@click.option(
    "--labels/--no-labels",
    default=True,
    show_default=True,
    help="Add what a service would know of a request.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random choices."
)
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

    The parameters follow published statistics; `generator.py` and `agent_sessions.py` in `radixkv/bench/simulation`
    have the sources.
    """
    from radixkv.bench.simulation import generator

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

    from radixkv.bench.simulation.agent_sessions import generate_sessions

    for name in ("mix", "duration", "block_tokens", "tokens_per_s", "labels"):
        if _is_given(name):
            given = click.get_current_context().params[name]
            raise ConfigError(f"--{name.replace('_', '-')}", given, "only without --sessions")
    made = generate_sessions(sessions, seed)
    with _output(output) as file:
        for session in made:
            click.echo(json.dumps(session, separators=(",", ":")), file=file)


if __name__ == "__main__":
    main()
