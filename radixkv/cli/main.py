"""``radixkv``: serve | route | warm | stats | keys | purge | audit | bench | simulate | workload.

Importing this module, and ``--help``, costs the index and click; each command imports what else it runs. A
setting that can't work ends the command with exit code 2 and one line that names it, its value and what is
allowed; a service that refuses, an audit that finds something and the like end it with 1; results go to
stdout (JSON with ``--json``), progress and complaints to stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from radixkv import COMPILED, __version__
from radixkv.cli.bench import bench
from radixkv.cli.client import keys, purge, stats, warm
from radixkv.cli.output import (
    NewFile,
    Number,
    counter,
    find_in_working_directory,
    json_option,
    listed,
    needs_extra,
    print_json,
    print_result,
    progress_bar,
    table,
)
from radixkv.clock import monotonic
from radixkv.config import CacheConfig
from radixkv.errors import ArgumentError, ConfigError, MissingExtra, RadixKVError, require_extra

if TYPE_CHECKING:
    from radixkv.audit.verdict import AuditReport
    from radixkv.service.core import Service

Command = Callable[..., Any]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; ends the process with the exit code."""
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


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(
    f"{__version__} ({'compiled' if COMPILED else 'pure Python'} index)", message="radixkv %(version)s"
)
def commands() -> None:
    """A prefix cache for LLM serving."""


for _command in (warm, stats, keys, purge, bench):
    commands.add_command(_command)


# serve ----------------------------------------------------------------------------------------------------------------

_HTTP_OPTIONS: Mapping[str, str] = {
    "tls-cert": "Certificate in PEM, with those that vouch for it; serves HTTPS.  [none: HTTP]",
    "tls-key": "Its key in PEM, unencrypted.  [none: HTTP]",
    "requests-per-s": "Requests a second of a tenant, in the long run.  [1000]",
    "burst": "Requests of a tenant at once.  [2000]",
    "max-concurrent": "Requests of a tenant under way.  [256]",
    "max-queued": "Requests of a tenant that wait for the model.  [32]",
    "max-body-bytes": "Size of a body.  [4194304]",
    "timeout-s": "Seconds after which an answer is given up.  [600]",
    "body-timeout-s": "Seconds that a body may take to arrive.  [30]",
    "drain-s": "Seconds that answers under way may take to end after SIGTERM.  [20]",
    "log-level": "critical, error, warning, info or debug.  [warning]",
}

_SERVE_OPTIONS: Mapping[str, str] = {
    "host": "Address to bind; anything but loopback needs --keys.  [127.0.0.1]",
    "port": "Port to bind; 0 for any free one.  [8400]",
    "model": "Directory of a transformers causal LM with its tokenizer.  [a small demo model, random weights]",
    "keys": 'JSON file of keys: {"operator": "…", "tenants": {"acme": "…"}}.  [demo keys]',
    "redis": "URL of the Redis through which replicas coordinate.  [none: alone]",
    "replica": "Name of this replica in its fleet.  [random]",
    "lease-s": "Seconds after which a silent replica counts as gone.  [10]",
    "num-blocks": "Blocks in the cache.  [4096]",
    "block-size": "Tokens in a block.  [16]",
    "policy": "Eviction policy; policies/README.md compares them.  [learned]",
    "scrub": "Zero blocks that change tenant: cross-tenant, always or never.  [cross-tenant]",
    "device": "Torch device of model and cache.  [cpu]",
    "dtype": "Element type of --model: float32, bfloat16 or float16.  [float32]",
    "threads": "Compute threads; 0 for torch's choice.  [0]",
    "fleet-secret": "File with the secret that the fleet shares; needed with --redis.  [random]",
    "advertise": "Base URL at which the fleet reaches this replica.  [the bound address]",
    "record": "Append a trace of the traffic here: keyed hashes of blocks, no token ids.  [no]",
    **_HTTP_OPTIONS,
}


def _variable(setting: str) -> str:
    return "RADIXKV_" + setting.replace("-", "_").upper()


def _options(texts: Mapping[str, str]) -> Callable[[Command], Command]:
    """An option for each setting, with its environment variable."""

    def add(command: Command) -> Command:
        for setting, text in reversed(list(texts.items())):
            variable = _variable(setting)
            help_text = f"{text[:-1]}; {variable}]" if text.endswith("]") else text
            command = click.option(f"--{setting}", envvar=variable, metavar="VALUE", help=help_text)(command)
        return command

    return add


def _given(
    context: click.Context, values: Mapping[str, str | None]
) -> tuple[dict[str, str | None], dict[str, str]]:
    """Settings by name, and what those that came from the environment are called there."""
    given = {name.replace("_", "-"): value for name, value in values.items()}
    names = {
        setting: _variable(setting)
        for setting in given
        if context.get_parameter_source(setting.replace("-", "_")) is ParameterSource.ENVIRONMENT
    }
    return given, names


@commands.command()
@_options(_SERVE_OPTIONS)
@click.pass_context
@needs_extra("service")
def serve(context: click.Context, /, **values: str | None) -> None:
    """Serve a model and its prefix cache over HTTP."""
    from radixkv.service.options import ServeSettings

    given, names = _given(context, values)
    with _called_as_given(names):
        find_in_working_directory(given["policy"])
        settings = ServeSettings.parse(given, names)
        logging.basicConfig(level=settings.log_level.upper())

        from radixkv.service.banner import banner
        from radixkv.service.server import run

        def on_ready(service: Service, url: str) -> None:
            click.echo(banner(settings, service, url))

        run(settings, __version__, on_ready)


@contextmanager
def _called_as_given(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of what a setting ends up in (``num_blocks``) call it what its user called it (``--num-blocks``)."""
    try:
        yield
    except ConfigError as error:
        setting = "model" if error.setting == "tokenizer" else error.setting.replace("_", "-")
        if setting not in _SERVE_OPTIONS and setting not in _ROUTE_OPTIONS:
            raise
        name = names.get(setting, f"--{setting}")
        raise ConfigError(name, error.value, error.allowed, problem=error.problem) from error


# route ----------------------------------------------------------------------------------------------------------------

_ROUTE_OPTIONS: Mapping[str, str] = {
    "redis": "URL of the Redis through which the replicas coordinate.  [needed]",
    "fleet-secret": "File with the secret that the fleet shares.  [needed]",
    "host": "Address to bind; anything but loopback needs --keys.  [127.0.0.1]",
    "port": "Port to bind; 0 for any free one.  [8500]",
    "keys": "The replicas' JSON file of keys.  [demo keys]",
    "model": "Directory with the tokenizer of the replicas' model.  [the demo model's]",
    "cost": "linear, lmetric, threshold, stddev, least_loaded, round_robin or random.  [linear]",
    "temperature": "0 for the best first; above, chance decides more.  [0]",
    "max-segments": "Most different segments in the view, about 20 bytes each.  [2000000]",
    **_HTTP_OPTIONS,
}


@commands.command()
@_options(_ROUTE_OPTIONS)
@click.pass_context
@needs_extra("route")
def route(context: click.Context, /, **values: str | None) -> None:
    """Say which replica a prompt should go to, over HTTP, beside any number of replicas."""
    from radixkv.service.options import RouteSettings

    given, names = _given(context, values)
    with _called_as_given(names):
        settings = RouteSettings.parse(given, names)
        logging.basicConfig(level=settings.log_level.upper())

        from radixkv.service.standalone import RouterHost, run

        def on_ready(host: RouterHost, url: str) -> None:
            known = (
                f"the store doesn't answer: {host.source.reader.failure}"
                if host.source.is_lost
                else f"{len(host.replicas())} replicas known"
            )
            click.echo(f"radixkv routes at {url}\n  {known}, cost {settings.cost}\n\nCtrl-C stops it.")

        run(settings, __version__, on_ready)


# audit ----------------------------------------------------------------------------------------------------------------


@commands.group()
def audit() -> None:
    """Show whether tenants are isolated."""


@audit.command("run")
@click.option(
    "--cache", metavar="MODULE:FACTORY", help="Audit the caches that it makes.  [radixkv:PrefixCache]"
)
@click.option("--url", help="Audit this server from outside: radixkv's, or an OpenAI-compatible one.")
@click.option("--key", "keys", multiple=True, help="With --url: keys of two tenants, --key A --key B.")
@click.option("--model", help="With --url: the model to ask for.  [the first that the server lists]")
@click.option(
    "--examples", type=click.IntRange(1), default=200, show_default=True, help="Random lives of a cache."
)
@click.option(
    "--steps", type=click.IntRange(1), default=50, show_default=True, help="Longest life, in calls."
)
@click.option(
    "--probes", type=click.IntRange(1), default=20, show_default=True, help="With --url: prompts to probe."
)
@click.option(
    "--samples", type=click.IntRange(20), default=7200, show_default=True, help="Timed probes an arm."
)
@click.option(
    "--control", type=click.IntRange(20), default=250, show_default=True, help="Own hits, and own misses."
)
@click.option(
    "--prompt-words", type=click.IntRange(1), default=24, show_default=True, help="Length of prompts."
)
@click.option(
    "--no-timing", is_flag=True, help="With --url: leave checks 9, 10 and 12 out; the report names them."
)
@click.option(
    "--operator-key", help="With --url: the operator's key, to probe bases; radixkv's service only."
)
@click.option("--adapter", help="With --url: an adapter that the server has.  [a made-up name]")
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    help="With --url: what the tenants are called, in the order of the keys.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--html", type=NewFile(), help="Write the report there as a page.")
@json_option
@needs_extra("audit")
def audit_run(url: str | None, html: str | None, as_json: bool, **options: Any) -> None:
    """Audit a library's caches in this process, or a server with the keys of two of its tenants.

    Use keys of tenants made for the audit: their caches are cleared. A tenant that has something cached already keeps
    it, and the checks that would clear it are not done.

    Exit codes: 0 isolated, 1 leaks, 3 inconclusive, 4 instrument blind, 5 no verdict (the audit could not be made),
    6 isolated in what was checked (some checks were not done; the report names them).
    """
    try:
        report = _audit_cache(options) if url is None else _audit_server(url, options)
    except (ConfigError, ArgumentError):
        raise
    except RadixKVError as error:
        raise _NoVerdict(str(error)) from error
    if html is not None:
        from pathlib import Path

        from radixkv.audit.page import page

        Path(html).write_text(page(report), "utf-8")
    if as_json:
        print_json(report.as_dict())
    else:
        rows = [{**each, "verdict": each["verdict"] or "measured"} for each in report.as_dict()["checks"]]
        click.echo(table(rows, ("name", "check", "verdict", "seconds")))
        click.echo("\n".join(["", *(f"{each['check']} {each['name']}: {each['detail']}" for each in rows)]))
        left_out = [f"not checked: {each.number} {each.name}: {each.detail}" for each in report.not_checked]
        click.echo("\n".join(["", *left_out, f"{report.target}: {report.verdict}"]))
    raise click.exceptions.Exit(report.exit_code)


class _NoVerdict(click.ClickException):
    """The audit couldn't be made: a code that no verdict has."""

    exit_code = 5


def _audit_cache(options: Mapping[str, Any]) -> AuditReport:
    for name in ("keys", "operator_key", "adapter", "tenants"):
        if options[name]:
            option = {"keys": "--key", "tenants": "--tenant"}.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(option, "given", f"{option} with --url only")
    name = options["cache"] or "radixkv:PrefixCache"
    factory = _factory(name)
    from radixkv.audit import inprocess

    chosen = {each: options[each] for each in ("examples", "steps", "seed")}
    with _phases() as progress:
        return inprocess.run(factory, target=name, version=__version__, progress=progress, **chosen)


def _factory(name: str) -> Callable[..., Any]:
    """What ``module:factory`` names; modules of the working directory too."""
    from importlib import import_module
    from pathlib import Path

    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory: Callable[..., Any] = getattr(import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError("--cache", name, f"MODULE:FACTORY that can be imported ({error})") from None
    _require_makes_caches(factory, name)
    return factory


def _require_makes_caches(factory: Callable[..., Any], name: str) -> None:
    allowed = "what makes a cache of a CacheConfig, clock and scrub_blocks, as radixkv:PrefixCache does"
    try:
        made = factory(CacheConfig(num_blocks=2), clock=monotonic, scrub_blocks=lambda _: None)
    except Exception as error:
        raise ConfigError("--cache", name, f"{allowed} ({type(error).__name__}: {error})") from error
    missing = [call for call in ("match", "open", "snapshot") if not hasattr(made, call)]
    if missing:
        raise ConfigError("--cache", name, f"{allowed} (a {type(made).__name__} has no {', '.join(missing)})")


def _audit_server(url: str, options: Mapping[str, Any]) -> AuditReport:
    keys = options["keys"]
    if options["cache"]:
        raise ConfigError("--cache", options["cache"], "either a cache or a --url")
    if len(keys) != 2 or keys[0] == keys[1]:
        raise ConfigError("--key", len(keys), "the keys of two tenants, --key A --key B")
    tenants = options["tenants"]
    if len(tenants) not in (0, 2):
        raise ConfigError(
            "--tenant", len(tenants), "the names of both tenants, --tenant A --tenant B, or of none"
        )
    from radixkv.audit import remote
    from radixkv.audit.timing import TimingPlan

    plan = TimingPlan(**{each: options[each] for each in ("samples", "control", "prompt_words", "seed")})
    with _phases() as progress:
        return remote.run(
            url,
            keys,
            plan,
            version=__version__,
            probes=options["probes"],
            timing=not options["no_timing"],
            options=remote.Options(
                options["model"], options["operator_key"], options["adapter"], tenants or (None, None)
            ),
            progress=progress,
        )


@contextmanager
def _phases() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each phase; the function takes the phase, how much of it is done, and its length."""
    with ExitStack() as bars:
        shown: dict[str, Callable[[int], None]] = {}

        def advance(phase: str, done: int, of: int) -> None:
            if phase not in shown:
                bars.close()
                shown[phase] = bars.enter_context(progress_bar(of, phase))
            shown[phase](done)

        yield advance


# simulate -------------------------------------------------------------------------------------------------------------

_MOST = 1e15
"""Of blocks and seconds."""


def _amount(setting: str, text: str, units: Mapping[str, int]) -> Decimal:
    """A number with a unit at its end, such as 30m or 5k, in capitals too."""
    unit = text[-1:].lower()
    number, times = (text[:-1], units[unit]) if unit in units else (text, 1)
    try:
        amount = Decimal(number) * times
        is_allowed = 0 <= amount <= _MOST
    except ArithmeticError:
        is_allowed = False
    if not is_allowed:
        allowed = f"a number from 0 to {_MOST:g}, with {' or '.join(units)} behind it if wanted"
        raise ConfigError(setting, text, allowed)
    return amount


def _capacities(text: str) -> list[int]:
    """``1k,2500,10k`` as blocks."""
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


@commands.command()
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True)
@click.option(
    "--policy", default="all", show_default=True, help="all, or names: lru,lfu,optimum,optimum_bypass …"
)
@click.option(
    "--capacity", default="1k,2k,5k,10k,20k,50k", show_default=True, help="Blocks of the trace; 1k = 1,000."
)
@click.option("--tenants", help="Only these tenants' requests: acme,globex.  [all]")
@click.option(
    "--score-from", default="0", show_default=True, help="Run from the start, score from here: 30m."
)
@click.option("--profile", default="llama-3-8b", show_default=True, help="Model, for seconds and gigabytes.")
@click.option("--tflops", type=float, help="What its machine sustains.  [400]")
@click.option(
    "--block-tokens", type=click.IntRange(1), default=16, show_default=True, help="Cuts lines of token ids."
)
@click.option("--keep-tails", is_flag=True, help="Keep partial last blocks, as published studies do.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Processes.  [one a core]")
@click.option("--html", type=NewFile(), help="Write the report here.")
@click.option("--svg", type=NewFile(), help="Draw the hit rates here.")
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
    **options: Any,
) -> None:
    """Which hit rate would which policy have had on TRACEs, at which capacity?

    A TRACE is a file of JSON lines: Mooncake's or Bailian's format, or what `radixkv serve --record` and
    `radixkv workload` write. Several are merged by time. The optimum is that of an offline oracle, with and without
    bypass.
    """
    from pathlib import Path

    from radixkv.bench import simulate as simulator
    from radixkv.bench.simulation import picture, profiles, report

    model = profiles.profile_of(profile, profiles.DEFAULT_TFLOPS if tflops is None else tflops)
    find_in_working_directory(policy)
    given = {"policies": listed(policy), "capacities": _capacities(capacity), "tenants": listed(tenants)}
    for option, path in (("--html", html), ("--svg", svg)):
        if path is not None:
            require_extra(f"radixkv simulate {option}", "bench")
    with progress_bar(1_000, "simulating") as advance:
        result = simulator.run(
            [Path(each) for each in traces],
            score_from_s=_seconds("--score-from", score_from),
            profile=model,
            progress=lambda done, of: advance(1_000 * done // of),
            **given,  # type: ignore[arg-type]
            **options,
        )
    if html is not None:
        Path(html).write_text(report.render(result), encoding="utf-8")
    if svg is not None:
        Path(svg).write_text(picture.draw(result), encoding="utf-8")
    print_result(result, simulator.table, as_json)


@commands.command()
@click.option(
    "--mix",
    multiple=True,
    metavar="SPEC",
    help="[tenant:]kind=rate[,kind=rate...][@from[-to]], rates in requests a second; kinds chat, agent, rag, batch, "
    "scan, loop. Several add up.  [chat=2,agent=1,rag=0.5,batch=0.3]",
)
@click.option("--duration", default="1h", show_default=True, help="Length of the trace: 30m.")
@click.option(
    "--block-tokens", type=click.IntRange(1), default=512, show_default=True, help="Tokens a block."
)
@click.option("--tokens-per-s", type=Number(0, min_open=True), help="Requests last, at this speed.  [no]")
@click.option(
    "--labels/--no-labels", default=True, show_default=True, help="What a service would know of a request."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--output", type=NewFile(), help="Write here.  [stdout]")
def workload(
    mix: tuple[str, ...],
    duration: str,
    block_tokens: int,
    tokens_per_s: float | None,
    labels: bool,
    seed: int,
    output: str | None,
) -> None:
    """Generate a trace for `radixkv simulate`: conversations, agents, RAG, batch jobs, floods, by tenants in any mix.

    The parameters follow published statistics; `radixkv/bench/simulation/generator.py` names each.
    """
    from radixkv.bench.simulation import generator

    duration_s = _seconds("--duration", duration)
    parts = generator.parse_mix(
        mix or generator.DEFAULT_MIX, duration_s, lambda text: _seconds("--mix", text)
    )
    with click.open_file(output or "-", "w", encoding="utf-8") as file, counter("requests") as progress:
        for number, call in enumerate(generator.generate(parts, seed=seed, block_tokens=block_tokens), 1):
            line = generator.line(call, block_tokens, labels=labels, tokens_per_s=tokens_per_s)
            click.echo(line, file=file)
            if number % 1_000 == 0:
                progress(number)


if __name__ == "__main__":
    main()
