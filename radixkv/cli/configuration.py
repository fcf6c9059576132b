"""Options of ``serve`` and ``route``, made of their settings when asked for; ``config show`` and ``config check``.

The settings need the extra ``http``, whose libraries take a tenth of a second to import. Other commands, and the list
of commands, do without.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from radixkv.cli.output import examples, find_in_working_directory, json_option, print_json, table
from radixkv.errors import ConfigError, MissingExtra, require_extra

if TYPE_CHECKING:
    from radixkv.service.options import RouteSettings, ServeSettings
    from radixkv.service.precedence import Sources, Value
    from radixkv.tiers.settings import TierSettings

Kind = TypeVar("Kind", "ServeSettings", "RouteSettings")
log = logging.getLogger("radixkv.cli")

_CONFIG_VARIABLE = "RADIXKV_CONFIG"
_COMMANDS = {"serve": "service", "route": "route"}
"""Commands that have settings, and their extras."""


class CommandWithSettings(click.Command):
    """A command with ``--config``, and an option with its environment variable for each setting."""

    @property
    def params(self) -> list[click.Parameter]:
        """The options. Raises MissingExtra."""
        return _options(str(self.name))

    @params.setter
    def params(self, params: list[click.Parameter]) -> None:
        assert not params, "they are made of the settings"


@cache
def _options(command: str) -> list[click.Parameter]:
    try:
        from radixkv.service.options import REMOVED, SETTINGS, variable_of
    except MissingExtra:
        require_extra(f"radixkv {command}", _COMMANDS[command])
        raise
    help_text = f"YAML file of settings; options and the environment win.  [none; {_CONFIG_VARIABLE}]"
    options: list[click.Parameter] = [
        click.Option(["--config"], envvar=_CONFIG_VARIABLE, metavar="FILE", help=help_text)
    ]
    for name, allowed in REMOVED[command].items():
        text = f"Removed; allowed: {allowed}."
        options.append(click.Option([f"--{name}"], envvar=variable_of(name), help=text, hidden=True))
    for setting in SETTINGS[command].values():
        options.append(
            click.Option(
                [f"--{setting.name}"],
                envvar=setting.variable,
                metavar="VALUE",
                help=f"{setting.text}  [{setting.default or setting.unset}; {setting.variable}]",
                multiple=setting.many,
            )
        )
    return options


def sources_of(context: click.Context) -> Sources:
    """Return where the settings of a command come from, by its parsed options."""
    from radixkv.service.options import REMOVED, variable_of
    from radixkv.service.precedence import Sources

    command, flags, environment = str(context.info_name), dict[str, str](), dict[str, str]()
    for parameter, value in context.params.items():
        text = (
            ",".join(value) if isinstance(value, tuple) else value
        )  # of an option that may be given several times
        if parameter != "config" and (text or isinstance(value, str)):
            is_variable = context.get_parameter_source(parameter) is ParameterSource.ENVIRONMENT
            (environment if is_variable else flags)[parameter.replace("_", "-")] = text
    errors = [
        ConfigError(variable_of(name) if name in environment else f"--{name}", given.pop(name), allowed)
        for name, allowed in REMOVED[command].items()
        for given in (flags, environment)
        if name in given
    ]
    return Sources(command, flags, environment, context.params["config"], tuple(errors))


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


def start(context: click.Context, kind: type[Kind]) -> tuple[Kind, Sources, Mapping[str, Value]]:
    """Return the settings of a process that begins, where they come from, and their values. Sets the level of the log.

    Raises ConfigError, ConfigErrors.
    """
    from radixkv.service.logs import set_up

    sources = sources_of(context)
    found = sources.read()
    if (policy := found.values.get("policy")) is not None:
        find_in_working_directory(policy.text)
    settings = found.parsed()
    assert isinstance(settings, kind)
    set_up(settings.log_level, settings.log_format, settings.access_log == "all")
    for value in found.values.values():
        if (
            value.source == "flag" and value.displayed != value.text
        ):  # no file of a secret: that would be refused
            log.warning(
                "%s holds a password that other users of this machine can see; use %s, or --redis-password",
                value.place,
                value.setting.variable,
            )
    return settings, sources, found.values


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
    with _parsed(command_line) as context:
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


def _parsed(command_line: tuple[str, ...]) -> click.Context:
    """Parse a command with its options, without running it. Raises ConfigError, click's errors."""
    is_named = command_line and not command_line[0].startswith("-")
    name, *arguments = command_line if is_named else ("serve", *command_line)
    if name not in _COMMANDS:
        raise ConfigError("command", name, f"one of {', '.join(_COMMANDS)}")
    root = click.get_current_context().find_root()
    assert isinstance(root.command, click.Group)
    return root.command.commands[name].make_context(name, arguments, parent=root)


@config.command(
    short_help="Check a configuration file.",
    epilog=examples("radixkv config check radixkv.yaml", "radixkv config check router.yaml --command route"),
)
@click.argument("file", metavar="FILE")
@click.option(
    "--command",
    "command_name",
    type=click.Choice(list(_COMMANDS)),
    default="serve",
    show_default=True,
    help="The command that the file is for.",
)
def check(file: str, command_name: str) -> None:
    """Check FILE as the command would read it at its start: names, types, bounds, and the files that it names.

    All errors are listed, and the exit code is 2 then. The environment is left out. Warns of a disk-size or a
    tier-dtype with which the next start drops all records of the disk.
    """
    require_extra("radixkv config check", "http")
    from radixkv.service.options import ServeSettings
    from radixkv.service.precedence import Sources

    settings = Sources(command_name, {}, {}, file).read().parsed()
    click.echo(f"{file} is valid for `radixkv {command_name}`")
    if isinstance(settings, ServeSettings) and settings.tiers is not None:
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
