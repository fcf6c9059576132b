"""``radixkv``: serve | route | config | warm | stats | keys | purge | disk | usage | audit | bench | plan and more.

Importing this module, and ``--help``, loads only the index and click. Each command imports the rest when it runs. An
invalid setting ends the command with exit code 2 and one line: its name, its value and what is allowed. A service that
refuses a request, or an audit that finds a leak, ends it with 1. Results go to stdout (JSON with ``--json``), progress
and errors to stderr. The ``--help`` of every command ends with examples (``output.examples``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from radixkv import COMPILED, __version__
from radixkv.cli.audit import audit
from radixkv.cli.bench import bench
from radixkv.cli.client import keys, purge, stats, warm
from radixkv.cli.configuration import CommandWithSettings, called_as_given, config, start
from radixkv.cli.disk import disk
from radixkv.cli.explain import explain
from radixkv.cli.output import examples, finish, needs_extra
from radixkv.cli.plan import plan
from radixkv.cli.simulate import simulate, workload
from radixkv.cli.usage import usage

if TYPE_CHECKING:
    from radixkv.service.core import Service

Command = Callable[..., Any]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, then end the process with the exit code."""
    finish(commands, "radixkv", arguments)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=examples("radixkv serve", "radixkv warm prompts/support.txt", "radixkv stats"),
)
@click.version_option(
    f"{__version__} ({'compiled' if COMPILED else 'pure Python'} index)", message="radixkv %(version)s"
)
def commands() -> None:
    """A prefix cache for LLM serving."""


for _command in (
    config,
    warm,
    stats,
    keys,
    purge,
    disk,
    usage,
    audit,
    bench,
    plan,
    simulate,
    workload,
    explain,
):
    commands.add_command(_command)


# serve ----------------------------------------------------------------------------------------------------------------


@commands.command(
    cls=CommandWithSettings,
    epilog=examples(
        "radixkv serve",
        "radixkv serve --model models/llama --keys keys.json --host 0.0.0.0",
        "radixkv serve --redis redis://10.0.0.5:6379/0 --replica a --fleet-secret fleet.secret",
    ),
)
@click.pass_context
@needs_extra("service")
def serve(context: click.Context, /, **options: str | None) -> None:
    """Serve a model and its prefix cache over HTTP."""
    from radixkv.service.options import ServeSettings

    settings, sources, values = start(context, ServeSettings)
    with called_as_given(values):
        from radixkv.service.banner import banner
        from radixkv.service.reloading import reloader
        from radixkv.service.server import run

        def on_ready(service: Service, url: str) -> None:
            click.echo(banner(settings, service, url, sources.path))

        run(settings, __version__, on_ready, reloader(sources, values))


# route ----------------------------------------------------------------------------------------------------------------


@commands.command(
    cls=CommandWithSettings,
    short_help="Serve a router over HTTP.",
    epilog=examples(
        "radixkv route --redis redis://10.0.0.5:6379/0 --fleet-secret fleet.secret",
        "radixkv route --redis redis://10.0.0.5:6379/0 --fleet-secret fleet.secret --keys keys.json --cost lmetric",
    ),
)
@click.pass_context
@needs_extra("route")
def route(context: click.Context, /, **options: str | None) -> None:
    """Serve a router: it ranks the replicas for a prompt, over HTTP."""
    from radixkv.service.options import RouteSettings

    settings, sources, values = start(context, RouteSettings)
    with called_as_given(values):
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

        run(settings, __version__, on_ready, reloader(sources, values))


if __name__ == "__main__":
    main()
