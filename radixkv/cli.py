"""``radixkv``: serve | warm | stats | audit | bench.

Importing this module, and ``--help``, costs click and nothing heavier; each command imports what it runs. A
setting that can't work ends the command with exit code 2 and one line that names it, its value and what is
allowed; a service that refuses, an audit that finds something and the like end it with 1; results go to
stdout (JSON with ``--json``), progress and complaints to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from radixkv import __version__
from radixkv.errors import ArgumentError, ConfigError, RadixKVError

if TYPE_CHECKING:
    from radixkv.cache import Match, PrefixCache
    from radixkv.namespaces import Namespace
    from radixkv.service.core import Service
    from radixkv.tokens import TokenIds

_CONTROL_EXAMPLES = 100
DEFAULT_URL = "http://127.0.0.1:8400"
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
        name = error.setting if isinstance(error, ConfigError) else error.argument
        value = "not set" if error.value is None else repr(error.value)
        code = _complain(f"{name}: {value} is not allowed; allowed: {error.allowed}", 2)
    except RadixKVError as error:
        code = _complain(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        code = _complain("stopped", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    click.echo("radixkv: " + " ".join(message.split()), err=True)
    return code


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="radixkv", message="%(prog)s %(version)s")
def commands() -> None:
    """A prefix cache for LLM serving."""


# serve ----------------------------------------------------------------------------------------------------------------

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
    "policy": "Eviction policy: lru or lfu.  [lru]",
    "device": "Torch device of model and cache.  [cpu]",
    "dtype": "Element type of --model: float32, bfloat16 or float16.  [float32]",
    "threads": "Compute threads; 0 for torch's choice.  [0]",
    "fleet-secret": "File with the secret that the fleet shares; needed with --redis.  [random]",
    "advertise": "Base URL at which the fleet reaches this replica.  [the bound address]",
}


def _variable(setting: str) -> str:
    return "RADIXKV_" + setting.replace("-", "_").upper()


def _serve_options(command: Command) -> Command:
    for setting, text in reversed(list(_SERVE_OPTIONS.items())):
        help_text = f"{text[:-1]}; {_variable(setting)}]" if text.endswith("]") else text
        command = click.option(f"--{setting}", envvar=_variable(setting), metavar="VALUE", help=help_text)(
            command
        )
    return command


@commands.command()
@_serve_options
@click.pass_context
def serve(context: click.Context, /, **values: str | None) -> None:
    """Serve a model and its prefix cache over HTTP."""
    from radixkv.service.settings import ServeSettings

    given = {name.replace("_", "-"): value for name, value in values.items()}
    names = {
        setting: _variable(setting)
        for setting in given
        if context.get_parameter_source(setting.replace("-", "_")) is ParameterSource.ENVIRONMENT
    }
    with _called_as_given(names):
        settings = ServeSettings.parse(given, names)

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
        if setting not in _SERVE_OPTIONS:
            raise
        raise ConfigError(names.get(setting, f"--{setting}"), error.value, error.allowed) from error


# talking to a service -------------------------------------------------------------------------------------------------


def _client_options(command: Command) -> Command:
    options = (
        click.option(
            "--url", envvar="RADIXKV_URL", default=DEFAULT_URL, show_default=True, help="The service."
        ),
        click.option(
            "--key",
            envvar="RADIXKV_KEY",
            help="Key of a tenant or the operator.  [a demo tenant's on loopback]",
        ),
    )
    for option in options:
        command = option(command)
    return command


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


@contextmanager
def _progress(length: int, label: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal; the function takes how much is done in all."""
    with click.progressbar(
        length=length, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as bar:
        yield lambda done: bar.update(done - bar.pos)


@commands.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@_client_options
@click.option("--salt", help="Names one of the tenant's namespaces.")
@click.option("--adapter", help="Key space of an adapter.")
@click.option("--replicas", type=click.Choice(["self", "all"]), default="self", show_default=True)
@_json_option
def warm(
    files: tuple[str, ...],
    url: str,
    key: str | None,
    salt: str | None,
    adapter: str | None,
    replicas: str,
    as_json: bool,
) -> None:
    """Warm the prompts in FILEs: a text file is one prompt, a .jsonl file has one a line."""
    from radixkv.service.client import Client, sources

    found = sources(files)
    given = {name: value for name, value in (("salt", salt), ("adapter", adapter)) if value is not None}
    rows = []
    with Client(url, key) as client, _progress(1000 * len(found), "warming") as advance:
        for index, source in enumerate(found):
            fields = {**given, **source.fields, "replicas": replicas}
            result = client.warm(fields, lambda share, index=index: advance(int(1000 * (index + share))))  # type: ignore[misc]
            rows.append({"source": source.name, **result})
    if as_json:
        _print_json(rows)
    else:
        click.echo(_table(rows, ("source", "tokens", "cached_before", "computed", "left_out", "seconds")))
        click.echo("\n".join(_outcomes(rows)), nl=replicas == "all")
    failed = [each for row in rows for each in row.get("replicas", ()) if each["state"] != "done"]
    if failed:
        raise click.ClickException(f"{len(failed)} warms on other replicas failed")


def _outcomes(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['source']} on {each['replica']}: {each['state']}, "
        + (each["error"] or f"{each['tokens']} tokens, {each['computed']} computed")
        for row in rows
        for each in row.get("replicas", ())
    ]


@commands.command()
@_client_options
@_json_option
def stats(url: str, key: str | None, as_json: bool) -> None:
    """Print a tenant's own counts, or everybody's with the operator's key."""
    from radixkv.service.client import Client

    with Client(url, key) as client:
        document = client.call("GET", "/v1/stats")
    if as_json:
        _print_json(document)
        return
    tenants = document.get("tenants", [document])
    click.echo(_table(tenants, tuple(tenants[0])))
    if "cache" in document:
        click.echo()
        click.echo(
            _table([{"cache": name, "": value} for name, value in document["cache"].items()], ("cache", ""))
        )


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Text: the first column to the left, the others to the right."""
    cells = [list(columns), *([_cell(row[column]) for column in columns] for row in rows)]
    first, *others = (max(len(line[place]) for line in cells) for place in range(len(columns)))
    return "\n".join(_line(line, first, others) for line in cells)


def _line(cells: list[str], first: int, others: list[int]) -> str:
    right = [cell.rjust(width) for cell, width in zip(cells[1:], others, strict=True)]
    return "  ".join([cells[0].ljust(first), *right]).rstrip()


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# audit ----------------------------------------------------------------------------------------------------------------


@commands.command()
@click.option(
    "--examples", type=click.IntRange(1), default=200, show_default=True, help="Random lives of a cache."
)
@click.option(
    "--steps", type=click.IntRange(1), default=50, show_default=True, help="Longest life, in calls."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--url", envvar="RADIXKV_URL", help="Probe this service from outside instead.")
@click.option("--key", "keys", multiple=True, help="With --url: keys of two tenants, --key A --key B.")
@click.option(
    "--probes", type=click.IntRange(1), default=20, show_default=True, help="With --url: prompts to probe."
)
@_json_option
def audit(
    examples: int, steps: int, seed: int, url: str | None, keys: tuple[str, ...], probes: int, as_json: bool
) -> None:
    """Attack the cache with random lives, checking its laws at each step; or probe a service across two tenants."""
    document, text = _audit_service(url, keys, probes) if url else _audit_library(examples, steps, seed)
    if as_json:
        _print_json(document)
    else:
        click.echo(text)
    if not document["ok"]:
        raise click.exceptions.Exit(1)


def _audit_library(examples: int, steps: int, seed: int) -> tuple[dict[str, Any], str]:
    from radixkv.cache import PrefixCache

    try:
        from radixkv.audit import properties
    except ImportError as error:
        raise ConfigError(
            "audit", error.name, "an installation with the extra: pip install 'radixkv[audit]'"
        ) from None
    with _progress(examples, "laws and contents") as advance:
        laws = properties.run(PrefixCache, examples, steps, seed, progress=advance)
    with _progress(examples, "two runs") as advance:
        runs = properties.run(
            PrefixCache, examples, steps, seed, machine=properties.TwoRuns, progress=advance
        )
    with _progress(_CONTROL_EXAMPLES, "a planted leak") as advance:
        leak = properties.run(
            _leaky(PrefixCache),
            _CONTROL_EXAMPLES,
            50,
            seed,
            with_storage=[False],
            shrink=False,
            progress=advance,
        )
    checks = [
        {
            "check": name,
            "ok": ok,
            "examples": report.examples,
            "steps": report.steps,
            "seconds": report.seconds,
        }
        | {"failure": None if ok else report.failure or "the planted leak was not found: this audit is blind"}
        for name, report, ok in (
            ("laws and contents", laws, laws.ok),
            ("non-interference", runs, runs.ok),
            ("a planted leak is found", leak, not leak.ok),
        )
    ]
    text = _table(checks, ("check", "examples", "steps", "seconds", "ok"))
    failures = [f"\n{each['check']}:\n{each['failure']}" for each in checks if each["failure"]]
    document = {"audit": "library", "ok": not failures, "seed": seed, "checks": checks}
    return document, "\n".join([text, *failures])


def _leaky(cache: type[PrefixCache]) -> type[PrefixCache]:
    """A cache that answers a miss with what another namespace holds: the audit's positive control."""

    class Leaky(cache):  # type: ignore[misc, valid-type]
        def match(self, namespace: Namespace, ids: TokenIds) -> Match:
            found: Match = super().match(namespace, ids)
            others = [super(Leaky, self).match(other, ids) for other in self.namespaces()]
            return found if found.num_tokens else max([found, *others], key=lambda match: match.num_tokens)

    return Leaky


def _audit_service(url: str, keys: tuple[str, ...], probes: int) -> tuple[dict[str, Any], str]:
    from radixkv.service.auth import DEMO_KEYS
    from radixkv.service.client import Client
    from radixkv.service.probe import probe

    pair = keys or tuple(DEMO_KEYS.values())
    if len(pair) != 2 or pair[0] == pair[1]:
        raise ConfigError("--key", len(pair), "the keys of two tenants, --key A --key B")
    with Client(url, pair[0]) as a, Client(url, pair[1]) as b, _progress(probes, "probing") as advance:
        report = probe(a, b, probes, advance)
    text = (
        f"{report.probes} prompts of one tenant asked for by another: {report.leaks} leaks; "
        f"positive control {'blind: void' if report.blind else f'matched all {report.tokens} tokens'}"
    )
    return {"audit": "service", **report.as_dict()}, text


# bench ----------------------------------------------------------------------------------------------------------------


@commands.group()
def bench() -> None:
    """Measure on this machine."""


@bench.command("ttft")
@click.option("--url", envvar="RADIXKV_URL", help="A running service.  [a demo service of its own]")
@click.option("--key", envvar="RADIXKV_KEY", help="Key of a tenant.")
@click.option("--tokens", type=click.IntRange(1), default=1500, show_default=True, help="Prompt length.")
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True)
@_json_option
def bench_ttft(url: str | None, key: str | None, tokens: int, pairs: int, as_json: bool) -> None:
    """Time to first token, cold against warmed."""
    from contextlib import ExitStack

    from radixkv.bench import ttft
    from radixkv.service.client import Client

    with ExitStack() as stack:
        if url is None:
            from radixkv.service.local import demo_service

            url = stack.enter_context(demo_service())
        client = stack.enter_context(Client(url, key))
        advance = stack.enter_context(_progress(pairs, "measuring"))
        result = ttft.run(client, tokens=tokens, pairs=pairs, progress=lambda done, _: advance(done))
    _print_result(result, ttft.table, as_json)


@bench.command("index")
@click.option(
    "--workload", type=click.Choice(["chat", "trace", "thin", "unique"]), default="chat", show_default=True
)
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False), help="Trace file (JSONL) for --workload trace."
)
@click.option("--limit", type=click.IntRange(1), help="Most requests.")
@click.option("--num-blocks", type=click.IntRange(2), default=200_000, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--policy", default="lru", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@_json_option
def bench_index(trace: str | None, as_json: bool, **options: Any) -> None:
    """What the index costs a request."""
    from pathlib import Path

    from radixkv.bench import index

    with _counter("requests") as progress:
        result = index.run(trace=Path(trace) if trace else None, progress=progress, **options)
    _print_result(result, index.table, as_json)


@bench.command("fork")
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--num-layers", type=click.IntRange(1), default=32, show_default=True)
@click.option("--num-kv-heads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True)
@click.option("--block-size", type=click.IntRange(2), default=16, show_default=True)
@click.option("--num-pairs", type=click.IntRange(1), multiple=True, default=(1, 4, 16), show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=30, show_default=True)
@click.option("--num-threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@_json_option
def bench_fork(as_json: bool, **options: Any) -> None:
    """What a fork's copies cost."""
    from radixkv.bench import fork

    with _progress(len(options["num_pairs"]), "measuring") as advance:
        result = fork.run(progress=lambda done, _: advance(done), **options)
    _print_result(result, _fork_table, as_json)


def _fork_table(result: dict[str, Any]) -> str:
    head = f"{result['device']}, {result['path']}, copy {result['copy_bytes_per_s'] / 1e9:.1f} GB/s"
    return "\n".join([head, _table(result["results"], tuple(result["results"][0]))])


@contextmanager
def _counter(what: str) -> Iterator[Callable[[int], None]]:
    """A running count on stderr, if that is a terminal, for work whose length isn't known."""
    shown = sys.stderr.isatty()

    def count(done: int) -> None:
        if shown:
            click.echo(f"\r{done} {what}", err=True, nl=False)

    yield count
    if shown:
        click.echo(err=True)


def _print_result(result: dict[str, Any], table: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    if as_json:
        _print_json(result)
    else:
        click.echo(table(result))


if __name__ == "__main__":
    main()
