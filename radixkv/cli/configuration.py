"""Options of ``serve`` and ``route``, made of ``radixkv.configuration``; ``config show`` and ``config check``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from radixkv.cli.output import examples, json_option, print_json, table
from radixkv.configuration.definitions import COMMANDS, REMOVED, variable_of
from radixkv.configuration.precedence import Sources, Value, names, texts
from radixkv.errors import ConfigError, MissingExtra, require_extra

if TYPE_CHECKING:
    from radixkv.tiers.settings import TierSettings

Command = Callable[..., Any]
log = logging.getLogger("radixkv.cli")

_CONFIG_VARIABLE = "RADIXKV_CONFIG"


def settings_options(command_name: str) -> Callable[[Command], Command]:
    """Add ``--config``, and an option with its environment variable for each setting of a command."""

    def add(command: Command) -> Command:
        for setting in reversed(list(COMMANDS[command_name].values())):
            help_text = f"{setting.help[:-1]}; {setting.variable}]"
            command = click.option(
                f"--{setting.name}",
                envvar=setting.variable,
                metavar="VALUE",
                help=help_text,
                multiple=setting.many,
                callback=_joined if setting.many else None,
            )(command)
        for name, allowed in REMOVED[command_name].items():
            command = click.option(
                f"--{name}",
                envvar=variable_of(name),
                help=f"Removed; allowed: {allowed}.",
                hidden=True,
                expose_value=False,
                callback=partial(_refuse_removed, name, allowed),
            )(command)
        return click.option(
            "--config",
            envvar=_CONFIG_VARIABLE,
            metavar="FILE",
            help=f"YAML file of settings; options and the environment win.  [none; {_CONFIG_VARIABLE}]",
        )(command)

    return add


def _joined(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the values of an option that may be given several times as one text."""
    return ",".join(values) or None


def _refuse_removed(
    name: str, allowed: str, context: click.Context, parameter: click.Parameter, value: str | None
) -> None:
    """Raise ConfigError for a setting of an earlier version."""
    if value is not None:
        is_variable = context.get_parameter_source(str(parameter.name)) is ParameterSource.ENVIRONMENT
        raise ConfigError(variable_of(name) if is_variable else f"--{name}", value, allowed)


def sources_of(context: click.Context) -> Sources:
    """Return where the settings of a command come from, by its parsed options."""
    command, flags, environment = str(context.info_name), dict[str, str](), dict[str, str]()
    for name in COMMANDS[command]:
        parameter = name.replace("-", "_")
        value, source = context.params[parameter], context.get_parameter_source(parameter)
        if value is not None:
            (environment if source is ParameterSource.ENVIRONMENT else flags)[name] = value
    return Sources(command, flags, environment, context.params["config"])


@contextmanager
def called_as_given(values: Mapping[str, Value]) -> Iterator[None]:
    """Let errors name a setting as its user wrote it: ``--num-blocks`` instead of ``num_blocks``."""
    try:
        yield
    except ConfigError as error:
        setting = "model" if error.setting == "tokenizer" else error.setting.replace("_", "-")
        value = values.get(setting.removeprefix("--"))
        if value is None:
            raise
        raise ConfigError(value.name, error.value, error.allowed, problem=error.problem) from error


def warn_of_visible_password(values: Mapping[str, Value]) -> None:
    """Log a warning if an option holds a password: other users of the machine see the options of a process."""
    for value in values.values():
        if value.source == "flag" and value.setting.kind == "url" and value.displayed != value.text:
            log.warning(
                "%s holds a password that other users of this machine can see; use %s, or --redis-password",
                value.place,
                value.setting.variable,
            )


@click.group(
    short_help="Show and check settings.",
    epilog=examples("radixkv config check radixkv.yaml", "radixkv config show --config radixkv.yaml"),
)
def config() -> None:
    """Show where settings come from, and check configuration files. A flag wins over the environment, then the file."""


@config.command(
    short_help="Show all settings and where each value comes from.",
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "radixkv config show",
        "radixkv config show serve --config radixkv.yaml --port 9000",
        "radixkv config show route --config router.yaml --json",
    ),
)
@click.argument("command_line", metavar="[serve|route] [OPTION...]", nargs=-1, type=click.UNPROCESSED)
@json_option
def show(command_line: tuple[str, ...], as_json: bool) -> None:
    """Show each setting of a command, its value and its source: flag, environment, file or default.

    Write `config show` before the command that you would run. Without a command it is `serve`. Secrets are not shown.
    """
    command, arguments = _command(command_line)
    with _parsed(command, arguments) as context:
        found = sources_of(context).resolve()
    if as_json:
        print_json([_document(value) for value in found.values()])
        return
    rows = [
        {
            "setting": name,
            "value": value.displayed,
            "source": f"{value.source} {value.place}".rstrip(),
            "reload": "SIGHUP" if value.setting.reloads else "restart",
        }
        for name, value in found.items()
    ]
    click.echo(table(rows, ("setting", "value", "source", "reload"), left=True))


def _document(value: Value) -> dict[str, Any]:
    return {
        "setting": value.setting.name,
        "value": None if value.text is None else value.displayed,
        "unset": value.setting.unset if value.text is None else None,
        "source": value.source,
        "place": value.place or None,
        "reloads": value.setting.reloads,
    }


def _command(command_line: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the command's name, and its options."""
    if not command_line or command_line[0].startswith("-"):
        return "serve", list(command_line)
    name, *arguments = command_line
    if name not in COMMANDS:
        raise ConfigError("command", name, f"one of {', '.join(COMMANDS)}")
    return name, arguments


def _parsed(name: str, arguments: list[str]) -> click.Context:
    """Parse the options of a command without running it. Raises click's errors."""
    root = click.get_current_context().find_root()
    assert isinstance(root.command, click.Group)
    command = root.command.get_command(root, name)
    assert command is not None
    return command.make_context(name, arguments, parent=root)


@config.command(
    short_help="Check a configuration file.",
    epilog=examples("radixkv config check radixkv.yaml", "radixkv config check router.yaml --command route"),
)
@click.argument("file", metavar="FILE")
@click.option(
    "--command",
    "command_name",
    type=click.Choice(list(COMMANDS)),
    default="serve",
    show_default=True,
    help="The command that the file is for.",
)
def check(file: str, command_name: str) -> None:
    """Check FILE as the command would read it at its start: names, types, bounds, and the files that it names.

    The environment is left out. The exit code is 2 if the file can't be used. Warns of a disk-size or a
    tier-dtype with which the next start drops all records of the disk.
    """
    require_extra("radixkv config check", "http")
    settings = checked(Sources(command_name, {}, {}, file))
    click.echo(f"{file} is valid for `radixkv {command_name}`")
    if command_name == "serve" and settings.tiers is not None:
        _warn_of_dropped(settings.tiers)


def _warn_of_dropped(tiers: TierSettings) -> None:
    """Warn of a size or a dtype with which a start drops the records that are on disk."""
    disk, num_slots = tiers.disk, 0
    if disk is None:
        return
    with suppress(MissingExtra, OSError):  # the start says it
        from radixkv.tiers.disk.inspection import num_dropped

        secrets = [disk.secret, *disk.previous_secrets]
        num_slots = num_dropped(disk.folder, secrets, disk.num_bytes, tiers.dtype)
    if num_slots:
        text = "%s was made with another disk-size or tier-dtype: the next start drops all records there (room for %s)"
        log.warning(text, disk.folder, f"{num_slots:,}")


def checked(sources: Sources) -> Any:
    """Read all sources and return the valid settings of the command, frozen. Raises ConfigError, MissingExtra."""
    from radixkv.service.options import RouteSettings, ServeSettings

    values = sources.resolve()
    parse = ServeSettings.parse if sources.command == "serve" else RouteSettings.parse
    return parse(texts(values), names(values))
